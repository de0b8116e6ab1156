"""The command `p2pkv-proxy`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from aiohttp import web

from p2pkv.pairing import Address

from .app import LISTENER, Dispatch, make_app
from .listener import endpoint_of

logger = logging.getLogger(__name__)

# After SIGTERM: no new connections, and this long for the answers that are under way.
_SHUTDOWN_SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the proxy until SIGTERM or SIGINT; returns the exit status."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve(arguments.host, arguments.port, arguments.discovery, arguments.dispatch))
    except OSError as error:
        print(f"p2pkv-proxy: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(host: str, port: int, discovery: Address, dispatch: Dispatch) -> None:
    """Serves until told to stop. Raises OSError if an address cannot be bound."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    _warn_off_loopback(host, discovery.host)
    app = make_app(endpoint_of(discovery), dispatch)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS
    )
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        logger.info(
            "serving on %s, discovery on %s, %s dispatch", _bound(runner), app[LISTENER].endpoint, dispatch
        )
        await stop.wait()
        logger.info("stopping")
    finally:
        await runner.cleanup()


def _bound(runner: web.AppRunner) -> str:
    return ", ".join(f"http://{Address(address[0], address[1])}" for address in runner.addresses)


def _warn_off_loopback(*hosts: str) -> None:
    for host in hosts:
        if not host.startswith("127.") and host not in ("::1", "localhost"):
            logger.warning(
                "%s is reachable from other hosts: clients and pings are not authenticated here", host
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p2pkv-proxy", description="One OpenAI endpoint in front of vLLM prefill and decode instances."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=10001, help="port to serve on (default: %(default)s)")
    parser.add_argument(
        "--discovery",
        type=_address,
        default="127.0.0.1:30001",
        metavar="HOST:PORT",
        help="where instances send their pings (default: %(default)s)",
    )
    parser.add_argument(
        "--dispatch",
        choices=("concurrent", "sequential"),
        default="concurrent",
        help="prefill and decode at once, or one after the other (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        default="INFO",
        help="default: %(default)s",
    )
    return parser


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a port: expected a number from 1 to 65535, or 0 for a free one"
        )
    return int(text)
