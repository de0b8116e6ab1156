"""The options of `p2pkv-proxy`: how each is read and checked, and what the proxy is built from."""

from __future__ import annotations

import argparse
import re
import resource
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from p2pkv import __version__
from p2pkv.pairing import Address

from . import settings
from .bodies import PIECE_TOKENS
from .limits import Limits
from .membership.instance import ROLE_NAMES, Role
from .membership.listed import ListedInstance
from .routing import POLICIES
from .routing_base import Routing

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
    twice = [each for each, count in Counter(_addresses(arguments)).items() if count > 1]
    if twice:
        parser.error(f"{twice[0]} is listed twice: each instance has addresses of its own")
    if arguments.workers > arguments.max_requests:
        parser.error("--workers divide --max-requests, so there can be no more of them than that")
    if bool(arguments.ssl_certfile) != bool(arguments.ssl_keyfile):
        parser.error("TLS needs both --ssl-certfile and --ssl-keyfile")
    if arguments.private and not arguments.admin_token:
        parser.error("--private needs an --admin-token, or those pages could not be seen at all")
    return arguments


def _addresses(arguments: argparse.Namespace) -> list[Address]:
    """Of all that are listed."""
    listed: list[ListedInstance] = [*arguments.prefill, *arguments.decode]
    return [address for each in listed for address in (each.http, each.zmq)]


def limits(arguments: argparse.Namespace) -> Limits:
    return Limits(
        max_requests=arguments.max_requests,
        max_waiting=arguments.max_waiting,
        max_wait=arguments.max_wait,
        max_body=arguments.max_body_mib << 20,
        max_values=arguments.max_body_values,
        max_messages=arguments.max_messages,
        max_held=arguments.max_held_mib << 20,
        body_seconds=arguments.body_seconds,
        max_connections=min(arguments.max_connections, arguments.workers * _most_requests()),
        retries=arguments.retries,
        resumes=arguments.resume_limit,
        resume_bytes=arguments.resume_mib << 20,
        lease=arguments.lease_seconds,
        first_token_seconds=arguments.first_token_seconds,
        event_seconds=arguments.event_seconds,
        alone_share=0.0 if arguments.no_decode_alone else arguments.alone_share,
    )


def _most_requests() -> int:
    """That one process has descriptors for: a request needs three."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if descriptors == resource.RLIM_INFINITY else max(1, descriptors // 3)


def routing(arguments: argparse.Namespace) -> Routing:
    return Routing(
        prefill=arguments.prefill_policy,
        decode=arguments.decode_policy,
        session_header=arguments.session_header,
        prefix_memory=arguments.prefix_memory,
        skip_below=arguments.skip_prefill_below,
        placement=arguments.placement,
        pause_weight=arguments.pause_weight,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p2pkv-proxy",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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
        "--secret-file",
        metavar="FILE",
        help="the secret of all instances, so that only they can register; or set P2PKV_SECRET",
    )
    parser.add_argument(
        "--plain-discovery",
        type=_address,
        metavar="HOST:PORT",
        help="a second place for pings, without the secret: for instances with `discovery: plain`",
    )
    roles: dict[str, Role] = {"--prefill": "P", "--decode": "D"}
    for option, role in roles.items():
        parser.add_argument(
            option,
            type=_listed(role),
            action="append",
            default=[],
            metavar="URL=HOST:PORT",
            help=f"a {ROLE_NAMES[role]} instance that does not ping: URL of its API, host and kv_port. "
            "Repeat the option for others (environment: commas; file: a list)",
        )
    parser.add_argument(
        "--allow-insecure",
        action="store_true",
        help="let --discovery be off loopback without a secret",
    )
    parser.add_argument(
        "--dispatch",
        choices=("concurrent", "sequential"),
        default="concurrent",
        help="ask the prefill and the decode instance at once, or the prefill instance first "
        "(default: %(default)s)",
    )
    _add_routing(parser)
    _add_limits(parser)
    _add_operation(parser)
    return parser


def _add_operation(parser: argparse.ArgumentParser) -> None:
    """For those who run it."""
    group = parser.add_argument_group("operation")
    group.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    group.add_argument(
        settings.FILE_OPTION, metavar="FILE", help="a TOML file with options, such as `max-requests = 64`"
    )
    group.add_argument(
        "--workers",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="processes that serve the port; each has an equal part of the limits and knows its own requests "
        "only: take power_of_two for both policies (default: %(default)s)",
    )
    group.add_argument(
        "--api-key",
        type=_key,
        action="append",
        default=[],
        metavar="KEY",
        help="clients have to show this key, which goes on to the instances; repeat the option for others. "
        "Safer in the environment or the file",
    )
    group.add_argument(
        "--ssl-certfile", default="", metavar="FILE", help="serve HTTPS, with this certificate chain (PEM)"
    )
    group.add_argument("--ssl-keyfile", default="", metavar="FILE", help="the certificate's key (PEM)")
    group.add_argument(
        "--admin-token",
        type=_token,
        default="",
        metavar="TOKEN",
        help="what a request to drain or resume an instance has to show; without it none can. Safer in the "
        "environment or the file",
    )
    group.add_argument(
        "--private",
        action="store_true",
        help="/instances, /status and /metrics, which name instances, demand the admin token",
    )
    group.add_argument(
        "--log-level",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        default="INFO",
        help="default: %(default)s",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: an object for each line, with the ids of its request (default: %(default)s)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="where OpenTelemetry spans go, such as http://127.0.0.1:4318/v1/traces; needs OpenTelemetry",
    )
    group.add_argument(
        "--log-requests", action="store_true", help="write a line for each request when it has ended"
    )


def _policies() -> str:
    width = max(map(len, POLICIES)) + 2
    wrapped = textwrap.TextWrapper(88, subsequent_indent="  " + width * " ")
    each = (wrapped.fill(f"  {name:{width}}{policy.help}") for name, policy in POLICIES.items())
    return "\n".join(
        [
            "A request gets a prefill instance by one policy, and a decode instance by another one,",
            "among those that serve its model, are in good health and fit each other.",
            "",
            *each,
            "",
            "The proxy has no tokenizer: it takes four bytes of a prompt for a token.",
        ]
    )


def _add_routing(parser: argparse.ArgumentParser) -> None:
    """Which instances serve a request."""
    defaults = Routing()
    group = parser.add_argument_group("which instances serve a request", _policies())
    for option, role, default in (
        ("--prefill-policy", "prefill", defaults.prefill),
        ("--decode-policy", "decode", defaults.decode),
    ):
        group.add_argument(
            option,
            choices=POLICIES,
            default=default,
            metavar="POLICY",
            help=f"how the {role} instance is chosen, see above (default: %(default)s)",
        )
    group.add_argument(
        "--placement",
        choices=("pair", "auto"),
        default=defaults.placement,
        help="pair: the policies choose a prefill instance for each prompt and a decode instance for the "
        "answer; auto: least predicted cost, and an instance of both roles may serve a request whole "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--pause-weight",
        type=_not_negative,
        default=defaults.pause_weight,
        metavar="N",
        help="for --placement auto: the cost of a second for which a prompt stops an answer, where a second "
        "of waiting costs 1; the larger, the more prompts and answers are kept apart (default: %(default)s)",
    )
    group.add_argument(
        "--session-header",
        type=_header,
        default=defaults.session_header,
        metavar="NAME",
        help="for consistent_hash: the HTTP header that names a session; without it: least_loaded "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--prefix-memory",
        type=_at_least(1),
        default=defaults.prefix_memory,
        metavar="N",
        help="for prefix_aware: how many pieces of prompts the proxy remembers for prefill and as many for "
        f"decode instances: {PIECE_TOKENS} tokens each at a prompt's beginning, 512 beyond "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--skip-prefill-below",
        type=_at_least(0),
        default=defaults.skip_below,
        metavar="TOKENS",
        help="a prompt of fewer tokens goes to a decode instance alone, within --alone-share; with "
        "--decode-policy prefix_aware only tokens new to it count (default: %(default)s, so none does)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """How much the proxy takes on, and for how long."""
    standard = Limits()
    rows: list[tuple[str, Callable[[str], float], float, str, str]] = [
        ("--max-requests", _at_least(1), standard.max_requests, "N",
            "requests under way at each decode instance; others wait"),
        ("--max-waiting", _at_least(0), standard.max_waiting, "N",
            "requests that wait, in all; others get a 503"),
        ("--max-wait", _seconds, standard.max_wait, "SECONDS",
            "how long a request waits before it gets a 503"),
        ("--max-body-mib", _at_least(1), standard.max_body >> 20, "MIB",
            "MiB of one request's body; a larger one gets a 413"),
        ("--max-body-values", _at_least(1), standard.max_values, "N",
            "JSON values in one request's body, token ids not counted; more get a 413"),
        ("--max-messages", _at_least(1), standard.max_messages, "N",
            "messages, or items of the input of /v1/responses, in one request's body; more get a 413"),
        ("--body-seconds", _seconds, standard.body_seconds, "SECONDS",
            "how long a request's body may take to come; then it gets a 408"),
        ("--max-connections", _at_least(1), standard.max_connections, "N",
            "connections of clients; one more takes the place of an idle one, or gets a 503"),
        ("--max-held-mib", _at_least(1), standard.max_held >> 20, "MIB",
            "MiB of the bodies of all requests without an answer yet; others get a 503"),
        ("--retries", _at_least(0), standard.retries, "N",
            "tries at other instances if one fails before the first byte, not counting refused connections"),
        ("--resume-limit", _at_least(0), standard.resumes, "N",
            "how often a streamed answer whose decode instance is lost goes on at another one; 0: never"),
        ("--resume-mib", _at_least(1), standard.resume_bytes >> 20, "MIB",
            "MiB of token ids that the proxy holds for that; answers beyond it do not go on"),
        ("--alone-share", _share, standard.alone_share, "SHARE",
            "share of each decode instance's --max-requests, for prompts that it computes because no prefill "
            "instance can, or because they are short"),
        ("--lease-seconds", _seconds, standard.lease, "SECONDS",
            "how long an instance whose connection is open may be silent until it counts as gone"),
        ("--first-token-seconds", _seconds, standard.first_token_seconds, "SECONDS",
            "how long a streamed answer may take until its first token, before it is tried elsewhere or ends "
            "with a 504: more than a long prompt takes under load; 0: no deadline"),
        ("--event-seconds", _seconds, standard.event_seconds, "SECONDS",
            "how long a streamed answer may pause before it goes on at another instance, or ends with an "
            "error event; 0: no deadline"),
        ("--drain-seconds", _seconds, 25.0, "SECONDS",
            "after SIGTERM, how long requests under way may go on"),
    ]  # fmt: skip
    for option, take, default, unit, what in rows:
        parser.add_argument(
            option, type=take, default=default, metavar=unit, help=f"{what} (default: %(default)g)"
        )
    parser.add_argument(
        "--no-decode-alone",
        action="store_true",
        help="fail a request when no prefill instance can serve it, instead of letting a decode instance "
        "compute its prompt; --skip-prefill-below has no effect then",
    )


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _listed(role: Role) -> Callable[[str], ListedInstance]:
    def instance(text: str) -> ListedInstance:
        try:
            return ListedInstance.parse(role, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return instance


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _header(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of an HTTP header, such as X-Session-Id")
    return text


def _seconds(text: str) -> float:
    return _not_negative(text, "number of seconds")


def _not_negative(text: str, what: str = "number") -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what} of at least 0")
    return number


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share: expected more than 0 and at most 1; to have none, --no-decode-alone"
        )
    return share


def _token(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError("a token is printable ASCII characters without a space")
    return text


def _key(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty key would let every client in: give one, or no --api-key")
    return _token(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a port: expected a number from 1 to 65535, or 0 for a free one"
        )
    return int(text)
