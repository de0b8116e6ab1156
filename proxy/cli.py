"""The command `p2pkv-proxy`."""

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from itertools import chain

from aiohttp import web

from p2pkv.control.security import Members, NoCurve, members_of
from p2pkv.pairing import Address
from p2pkv.stamps import wanted
from p2pkv.trust import SECRET_VARIABLE, TrustError, is_loopback, read_secret

from . import options, settings, tracepoints
from .access import Access
from .app import BoundedRunner, make_app
from .cors import Cors
from .membership.listener import endpoint_of
from .policies import Routing
from .service import PROXY
from .tracing import NoTracing, Spans, set_up_logging

logger = logging.getLogger(__name__)

# For connections on which nothing moves, once `--drain-seconds` are over.
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
    # As many file descriptors as the hard limit allows: a request needs three, the usual soft limit is 1024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Modules and options live as long as the process: the garbage collector need not look at them again.
    gc.collect()
    gc.freeze()
    if (stamps := wanted()) is not None:
        tracepoints.install(stamps)
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_serve(arguments, members))
    except (OSError, UnicodeError, NoTracing) as error:
        admin = f", --admin {arguments.admin}" if arguments.admin else ""
        hosts = f" (--host {arguments.host}, --discovery {arguments.discovery}{admin})"
        unknown = isinstance(error, socket.gaierror | UnicodeError)  # the latter for names such as `a..b`
        print(f"p2pkv-proxy: {error}{hosts if unknown else ''}", file=sys.stderr)
        return 1
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where that is installed: its sockets take less of the processor."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    return new_event_loop()


def _members(arguments: argparse.Namespace) -> Members | None:
    """Who may register; None: all. Raises TrustError if other machines could without --allow-insecure."""
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
    stop, cut_short = _signals()
    _warn(arguments, members)
    app = _app(arguments, members)
    runner, admin = BoundedRunner(app, _SHUTDOWN_SECONDS, _tls(arguments)), arguments.admin
    try:
        await runner.setup()
        shared = arguments.reuse_port or None
        await web.TCPSite(runner, arguments.host, arguments.port, reuse_port=shared).start()
        if admin is not None:
            await web.TCPSite(runner, admin.host, admin.port).start()
        _log_serving(arguments, members, runner)
        await stop.wait()
        left, seconds = len(app[PROXY].active), arguments.drain_seconds
        logger.info("stopping: %d requests may go on for %g s (--drain-seconds)", left, seconds)
        for site in list(runner.sites):
            await site.stop()
        ended = await app[PROXY].stop(arguments.drain_seconds, cut_short)
        logger.info("stopped; %d requests were cut off", ended)
    finally:
        await runner.cleanup()


def _app(arguments: argparse.Namespace, members: Members | None) -> web.Application:
    plain: Address | None = arguments.plain_discovery
    return make_app(
        endpoint_of(arguments.discovery),
        arguments.dispatch,
        limits=options.limits(arguments),
        members=members,
        plain_discovery=None if plain is None else endpoint_of(plain),
        routing=settings.made(Routing, arguments),
        guard=Access(arguments.admin_token, arguments.private, options.keys(arguments)),
        log_requests=arguments.log_requests,
        tracing=Spans(arguments.otlp_traces_endpoint) if arguments.otlp_traces_endpoint else None,
        listed=[*arguments.prefill, *arguments.decode],
        tenants=options.tenants(arguments),
        cors=Cors(
            tuple(chain.from_iterable(arguments.allowed_origins)),
            arguments.allow_credentials,
            tuple(chain.from_iterable(arguments.allowed_methods)) or Cors.methods,
            tuple(chain.from_iterable(arguments.allowed_headers)) or Cors.headers,
        ),
    )


def _tls(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """Raises OSError, with a sentence, if the files are not a certificate and its key."""
    if not arguments.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(arguments.ssl_certfile, arguments.ssl_keyfile, password="")
    except OSError as error:
        files = f"--ssl-certfile {arguments.ssl_certfile} and --ssl-keyfile {arguments.ssl_keyfile}"
        rule = "have to be a certificate and its key without a password, in PEM"
        raise OSError(f"{files} {rule}: {error.strerror or error}") from None
    return context


def _log_serving(arguments: argparse.Namespace, members: Members | None, runner: BoundedRunner) -> None:
    scheme = "https" if arguments.ssl_certfile else "http"
    listeners = runner.app[PROXY].membership.listeners
    logger.info(
        "serving on %s, discovery on %s, %s dispatch, %s for prefill and %s for decode, %s",
        ", ".join(f"{scheme}://{Address(address[0], address[1])}" for address in runner.addresses),
        listeners[0].endpoint,
        arguments.dispatch,
        arguments.prefill_policy,
        arguments.decode_policy,
        "any instance may register" if members is None else "only instances with the secret may register",
    )
    for each in listeners[1:]:
        logger.info("plain discovery on %s, where any instance may register", each.endpoint)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events that the first and the second SIGTERM or SIGINT set."""
    stop, cut_short = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (cut_short if stop.is_set() else stop).set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    return stop, cut_short


def _warn(arguments: argparse.Namespace, members: Members | None) -> None:
    """Warns of what other machines can reach without a key or secret."""
    for host in [arguments.host, *([arguments.admin.host] if arguments.admin else [])]:
        if not is_loopback(host) and not options.keys(arguments):
            logger.warning("other hosts reach %s, and their clients need no API key (--api-key)", host)
    places = [arguments.discovery] if members is None else []
    for place in [*places, *filter(None, [arguments.plain_discovery])]:
        if not is_loopback(place.host):
            logger.warning("any process that reaches %s can register an instance and be sent requests", place)
