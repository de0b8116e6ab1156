"""The options of `p2pkv-proxy`: how each is read and checked, and the objects made of them."""

import argparse
import resource
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from p2pkv import __version__
from p2pkv.pairing import Address

from . import settings
from .access import OTHER, Tenants, read_tenants
from .cors import read_list
from .limits import Limits
from .membership.instance import ROLES
from .membership.listed import ListedInstance
from .policies import Routing
from .routing import POLICIES

_DESCRIPTION = """\
One OpenAI endpoint in front of vLLM prefill and decode instances.

Start it, then start the instances with its discovery address as proxy_ip and proxy_port: they register
themselves. Clients talk to http://HOST:PORT as they would to vLLM; a browser shows a dashboard there.
"""
_EPILOG = """\
Each option may stand in the environment instead, as P2PKV_PROXY_MAX_REQUESTS=64, or in the file that --config
names, as `max-requests = 64`. The command line comes first, then the environment, then the file.

An example, on one machine:
  p2pkv-proxy --port 10001 --discovery 127.0.0.1:30001

Exit status: 0 after SIGTERM or SIGINT, 1 if an address cannot be bound, 2 if an option is wrong.
"""


def read(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> argparse.Namespace:
    """The options from all places. Ends the process with status 2 and a sentence if something is wrong."""
    arguments = settings.parse(parser, argv, environ)
    listed: list[ListedInstance] = [*arguments.prefill, *arguments.decode]
    addresses = Counter(address for each in listed for address in (each.http, each.zmq))
    if twice := [each for each, count in addresses.items() if count > 1]:
        parser.error(f"{twice[0]} is listed twice: each instance has addresses of its own")
    if bool(arguments.ssl_certfile) != bool(arguments.ssl_keyfile):
        parser.error("TLS needs both --ssl-certfile and --ssl-keyfile")
    if arguments.private and not arguments.admin_token:
        parser.error("--private needs an --admin-token, or no request could see the private pages")
    if arguments.tenant_header and not arguments.tenants:
        parser.error("--tenant-header needs --tenants, a file that has the tenants that the header names")
    for name, each in (arguments.tenants or {}).items():
        if not each.keys and not arguments.tenant_header and name != OTHER:
            why = f"tenant `{name}` has no keys, and without --tenant-header no request could be its"
            parser.error(f"--tenants: {why}")
    return arguments


def keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The API keys of which a client has to show one; without any, all clients are served."""
    of_tenants = (key for each in (arguments.tenants or {}).values() for key in each.keys)
    return (*arguments.api_key, *of_tenants)


def tenants(arguments: argparse.Namespace) -> Tenants | None:
    return Tenants(arguments.tenants, arguments.tenant_header or "") if arguments.tenants else None


def limits(arguments: argparse.Namespace) -> Limits:
    given = settings.made(Limits, arguments)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most, share = given.max_connections, 0.0 if arguments.no_decode_alone else given.alone_share
    if descriptors != resource.RLIM_INFINITY:
        most = min(most, max(1, descriptors // 3))  # a request needs three
    return replace(given, max_connections=most, alone_share=share)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p2pkv-proxy",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # fmt: off
    add = partial(settings.add_option, parser)
    add("--host", "127.0.0.1", _given, what="address to serve on")
    add("--port", 10001, _port, what="port to serve on")
    add("--discovery", "127.0.0.1:30001", Address.parse, "HOST:PORT", "where instances send their pings")
    add("--secret-file", None, _given, "FILE",
        "a file with all instances' secret, so that only they can register; or set P2PKV_SECRET")
    add("--plain-discovery", None, Address.parse, "HOST:PORT",
        "a second address for pings, without the secret: for instances with `discovery: plain`")
    for name, role in ROLES.items():
        add(f"--{name}", [], partial(ListedInstance.parse, role), "URL=HOST:PORT",
            f"a {name} instance that does not ping: URL of its API, host and kv_port. Repeat the "
            "option for others (environment: commas; file: a list)")
    add("--allow-insecure", False, what="let other machines reach --discovery without a secret")
    add("--dispatch", "concurrent", what="concurrent: ask the prefill and the decode instance at once; "
        "sequential: prefill first", choices=("concurrent", "sequential"))
    group = parser.add_argument_group("which instances serve a request", _policies())
    settings.add_fields(group, Routing, prefill=POLICIES, decode=POLICIES)
    settings.add_fields(parser, Limits)
    add("--no-decode-alone", False, what="fail a request when no prefill instance can serve it, instead "
        "of letting a decode instance compute its prompt; --skip-prefill-below has no effect then")
    group = parser.add_argument_group("operation")
    group.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add = partial(settings.add_option, group)
    add(settings.FILE_OPTION, None, _given, "FILE", "a TOML file with options, such as `max-requests = 64`")
    add("--reuse-port", False, what="share --port with other proxies that have this option: the kernel "
        "gives each of them a part of the connections")
    add("--admin", None, Address.parse, "HOST:PORT", "a second address, only this proxy's: for its "
        "pages and drains, where proxies share --port")
    add("--api-key", [], _key, "KEY",
        "clients have to show this key, which goes on to the instances; repeat the option for others. Safer "
        "in the environment, where commas separate keys, or the file")
    add("--tenants", None, read_tenants, "FILE",
        "a TOML file with tenants: API keys, limits and weights of each; without it all requests are alike")
    add("--tenant-header", None, settings.header, "NAME",
        "the HTTP header in which a gateway names the tenant of a request without a tenant's key. Anyone who "
        "reaches the proxy can set it")
    add("--allowed-origins", [], read_list, "ORIGIN",
        "browsers may use this proxy from pages of this origin, such as https://chat.example.com; * is any. "
        "Repeat the option for others, or give a list in JSON as to vLLM; without it they may not")
    add("--allow-credentials", False, what="such pages may send cookies")
    add("--allowed-methods", [], read_list, "METHOD", "such pages may use only these methods")
    add("--allowed-headers", [], read_list, "NAME", "such pages may set only these headers")
    add("--ssl-certfile", None, _given, "FILE", "serve HTTPS, with this certificate chain (PEM)")
    add("--ssl-keyfile", None, _given, "FILE", "the certificate's key (PEM)")
    add("--admin-token", "", _token, "TOKEN",
        "the token with which requests drain and resume instances; without it none can. Safer in the "
        "environment or the file")
    add("--private", False,
        what="demand the admin token for /instances, /status and /metrics, which name instances")
    add("--log-level", "INFO", what="the least important lines that are written",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    add("--log-format", "text", what="json: an object for each line, with the ids of its request",
        choices=("text", "json"))
    add("--otlp-traces-endpoint", "", str, "URL",
        "where OpenTelemetry spans go, such as http://127.0.0.1:4318/v1/traces; needs OpenTelemetry")
    add("--log-requests", False, what="write a line for each request when it has ended")
    # fmt: on
    return parser


def _policies() -> str:
    width = max(map(len, POLICIES)) + 2
    wrapped = textwrap.TextWrapper(88, subsequent_indent="  " + width * " ")
    each = "\n".join(wrapped.fill(f"  {name:{width}}{policy.help}") for name, policy in POLICIES.items())
    return (
        "A request gets a prefill instance by one policy, and a decode instance by another one,\n"
        f"among those that serve its model, are in good health and fit each other.\n\n{each}\n\n"
        "The proxy has no tokenizer: it takes four bytes of a prompt for a token."
    )


def _given(text: str) -> str:
    settings.demand(text, "expected a value, not an empty text; or leave the option out")
    return text


def _token(text: str) -> str:
    good = text.isascii() and text.isprintable() and " " not in text
    settings.demand(good, "a token is printable ASCII characters without a space")
    return text


def _key(text: str) -> str:
    settings.demand(text, "an empty key would let every client in: give one, or no --api-key")
    return _token(text)


def _port(text: str) -> int:
    good = text.isdecimal() and int(text) <= 65535
    settings.demand(good, f"{text!r} is not a port: expected a number from 1 to 65535, or 0 for a free one")
    return int(text)
