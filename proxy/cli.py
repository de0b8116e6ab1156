"""The command `p2pkv-proxy`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import os
import resource
import signal
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from p2pkv.control.security import Members, NoCurve, members_of
from p2pkv.pairing import Address
from p2pkv.trust import SECRET_VARIABLE, TrustError, is_loopback, read_secret

from . import options, settings
from .access import Access
from .app import end, make_app, make_runner
from .limits import Limits
from .logs import set_up_logging
from .membership.listener import Listener, endpoint_of
from .policy import Routing
from .service import PROXY
from .supervisor import Supervisor, bound, ignore_signals, reserved, share_of
from .tracing import NoTracing, Spans
from .worker import WorkerConfig, WorkerState

logger = logging.getLogger(__name__)

# For connections on which nothing moves any more, after all that `--drain-seconds` allows.
_SHUTDOWN_SECONDS = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the proxy until SIGTERM or SIGINT; returns the exit status."""
    parser = options.make_parser()
    arguments = options.read(parser, sys.argv[1:] if argv is None else argv, os.environ)
    try:
        members = _members(arguments)
    except (TrustError, NoCurve) as error:
        parser.error(str(error))
    set_up_logging(arguments.log_level, arguments.log_format)
    _take_descriptors()
    return _run((_serve if arguments.workers == 1 else _oversee)(arguments, members))


def _run(serving: Coroutine[Any, Any, None]) -> int:
    """All that this process does from now on; its exit status."""
    # Modules and options live as long as the process: the garbage collector need not look at them again.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(serving)
    except (OSError, NoTracing) as error:
        print(f"p2pkv-proxy: {error}", file=sys.stderr)
        return 1
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where that is installed: its sockets take less of the processor."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    return new_event_loop()


def _take_descriptors() -> None:
    """As many as it may: a request needs three, and the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _members(arguments: argparse.Namespace) -> Members | None:
    """Those who may register. Raises TrustError if all could, from anywhere, and that is not meant."""
    secret = read_secret(arguments.secret_file, os.environ)
    discovery: Address = arguments.discovery
    if secret is None and not arguments.allow_insecure and not is_loopback(discovery.host):
        raise TrustError(
            f"--discovery {discovery} can be reached from other machines, and there is no secret: "
            f"any process that pings it would be sent requests; set {SECRET_VARIABLE} or --secret-file, or "
            "listen on 127.0.0.1, or add --allow-insecure if only machines that you trust reach it"
        )
    return members_of(secret)


async def _serve(arguments: argparse.Namespace, members: Members | None) -> None:
    """Serves until a signal to stop. Raises OSError if an address cannot be bound."""
    stop, hurry = _signals()
    _warn(arguments, members)
    app = _app(arguments, members, options.limits(arguments))
    async with _running(app, arguments.drain_seconds, hurry) as runner:
        await web.TCPSite(runner, arguments.host, arguments.port, ssl_context=_tls(arguments)).start()
        _log_serving(arguments, members, runner.addresses, app[PROXY].membership.listeners)
        await stop.wait()


def _app(
    arguments: argparse.Namespace,
    members: Members | None,
    limits: Limits,
    worker: WorkerState | None = None,
) -> web.Application:
    plain: Address | None = arguments.plain_discovery
    return make_app(
        endpoint_of(arguments.discovery),
        arguments.dispatch,
        limits=limits,
        members=members,
        plain_discovery=None if plain is None else endpoint_of(plain),
        routing=settings.made(Routing, arguments),
        guard=Access(arguments.admin_token, arguments.private, tuple(arguments.api_key)),
        log_requests=arguments.log_requests,
        tracing=Spans(arguments.otlp_traces_endpoint) if arguments.otlp_traces_endpoint else None,
        listed=[*arguments.prefill, *arguments.decode],
        worker=worker,
    )


def _tls(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """Raises OSError, with a sentence, if the files are not a certificate and its key."""
    if not arguments.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(arguments.ssl_certfile, arguments.ssl_keyfile, password="")
    except OSError as error:
        raise OSError(
            f"--ssl-certfile {arguments.ssl_certfile} and --ssl-keyfile {arguments.ssl_keyfile} have to be a "
            f"certificate and its key without a password, in PEM: {error.strerror or error}"
        ) from None
    return context


@asynccontextmanager
async def _running(
    app: web.Application, drain_seconds: float, hurry: asyncio.Event
) -> AsyncIterator[web.AppRunner]:
    """What serves `app`; at the end it takes no more, and what is under way may go on for so long."""
    runner = make_runner(app, _SHUTDOWN_SECONDS)
    try:
        await runner.setup()
        yield runner
        logger.info("stopping: %d requests have %g s to end", len(app[PROXY].active), drain_seconds)
        for site in list(runner.sites):
            await site.stop()
        ended = await app[PROXY].stop(drain_seconds, hurry)
        logger.info("stopped; %d requests were cut off", ended)
    finally:
        await runner.cleanup()


def _log_serving(
    arguments: argparse.Namespace,
    members: Members | None,
    addresses: Sequence[Any],
    listeners: Sequence[Listener],
) -> None:
    scheme = "https" if arguments.ssl_certfile else "http"
    logger.info(
        "serving on %s, discovery on %s, %s dispatch, %s for prefill and %s for decode, %s",
        ", ".join(f"{scheme}://{Address(address[0], address[1])}" for address in addresses),
        listeners[0].endpoint,
        arguments.dispatch,
        arguments.prefill_policy,
        arguments.decode_policy,
        "open to all" if members is None else "for members only",
    )
    for each in listeners[1:]:
        logger.info("plain discovery on %s", each.endpoint)


# Several workers.


async def _oversee(arguments: argparse.Namespace, members: Members | None) -> None:
    """Has workers serve until a signal to stop. Raises OSError if an address cannot be bound."""
    stop, hurry = _signals()
    _warn(arguments, members)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="p2pkv-proxy-")))
        port = reserved(arguments.host, arguments.port)
        supervisor = Supervisor(arguments.workers, port, folder, _work, arguments, members)
        listeners: list[Listener] = []
        for address, who in ((arguments.discovery, members), (arguments.plain_discovery, None)):
            if address is not None:
                listeners.append(Listener(endpoint_of(address), supervisor.pings.take, who))
                cleanup.callback(listeners[-1].close)
        listening = [asyncio.create_task(each.run()) for each in listeners]
        try:
            await supervisor.start(stop)
            if not stop.is_set():
                _log_serving(arguments, members, [each.getsockname() for each in port], listeners)
            await stop.wait()
        finally:
            await supervisor.stop(arguments.drain_seconds + _SHUTDOWN_SECONDS, hurry)
            await end(listening)


def _work(arguments: argparse.Namespace, members: Members | None, config: WorkerConfig) -> None:
    """What a worker's process does."""
    ignore_signals()
    set_up_logging(arguments.log_level, arguments.log_format, f"worker {config.number}")
    if config.number > 1:  # the first one logs which instances come and go
        logging.getLogger(f"{__package__}.membership.registry").setLevel(logging.ERROR)
        logging.getLogger(f"{__package__}.membership.prober").setLevel(logging.WARNING)
    sys.exit(_run(_serve_as_worker(arguments, members, config)))


async def _serve_as_worker(
    arguments: argparse.Namespace, members: Members | None, config: WorkerConfig
) -> None:
    """Serves until the supervisor ends it. Takes no connection before it has the instances and the drains
    that there are: it would turn requests away that another worker would serve."""
    worker = WorkerState(config)
    app = _app(arguments, members, share_of(options.limits(arguments), config.of), worker)
    _end_without_parent(worker)
    async with _running(app, arguments.drain_seconds, worker.hurry) as runner:
        await worker.updated.wait()
        await app[PROXY].membership.prober.round()
        if not worker.stop.is_set():
            tls = _tls(arguments)
            for each in bound(config):
                await web.SockSite(runner, each, ssl_context=tls).start()
            worker.serve()
            await worker.stop.wait()


def _end_without_parent(worker: WorkerState) -> None:
    """Ends the worker when the process that has started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(parent.sentinel)
        logger.warning("the process that started this worker is gone: it stops, too")
        worker.end()

    loop.add_reader(parent.sentinel, gone)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and the second SIGTERM or SIGINT."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    return stop, hurry


def _warn(arguments: argparse.Namespace, members: Members | None) -> None:
    """Of what is open to other machines."""
    if not is_loopback(arguments.host) and not arguments.api_key:
        logger.warning("%s is reachable from other hosts: clients are not authenticated here", arguments.host)
    places = [arguments.discovery] if members is None else []
    for place in [*places, *filter(None, [arguments.plain_discovery])]:
        if not is_loopback(place.host):
            logger.warning("any process that reaches %s can register an instance and be sent requests", place)
