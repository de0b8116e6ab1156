"""Every option of p2pkv: its default, its unit, what it means, how it is read; and errors in sentences.

Options are written in `--kv-transfer-config`, under `kv_connector_extra_config`. Old names of the
connector that p2pkv succeeds are understood.
"""

from __future__ import annotations

import difflib
import math
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from p2pkv.pairing import Address, PairingError, normal_host
from p2pkv.trust import SECRET_VARIABLE, Networks, TrustError, is_loopback, read_secret

Role = Literal["P", "D"]
LinkChoice = Literal["auto", "nccl", "host"]
Discovery = Literal["curve", "plain"]

MIB = 1 << 20
DEFAULT_KV_PORT = 21001

_ROLES: dict[str, Role] = {"kv_producer": "P", "kv_consumer": "D"}

GPU_SHARE = 128
"""By default staging takes one part in so many of a GPU's memory, from 64 MiB to 1 GiB."""

RESERVED_CHUNKS = 2
"""Chunks of D's staging that only requests which have pages may take."""


class ConfigError(ValueError):
    """An option that cannot be used: what was given, what was expected, what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How one instance runs. Numbers are checked when it is made; raises ConfigError."""

    role: Role
    """`P` (kv_role kv_producer: prefills and sends) or `D` (kv_consumer: receives and decodes)."""

    host: str
    """Default: the IP address that vLLM would choose. What this instance binds and advertises, so one
    that its peers can reach; no wildcard."""

    kv_port: int = DEFAULT_KV_PORT
    """Default 21001; from kv_port beside the options. TCP port of rank 0; rank r listens on kv_port + r."""

    proxy_ip: str | None = None
    """Default none. Host of the proxy to register with; needs proxy_port and http_port."""

    proxy_port: int | None = None
    """Default none. TCP port of the proxy's discovery socket."""

    http_port: int | None = None
    """Default none. Port of this instance's HTTP API, advertised to the proxy."""

    link: LinkChoice = "auto"
    """Default auto. What carries the KV: `nccl` (GPUs), `host` (shared memory or TCP), or `auto`: `nccl` with
    a CUDA device, else `host`. Both ends of a pair need the same one."""

    staging_bytes: int = 64 * MIB
    """Default 1/128 of the GPU's memory, from 64 MiB to 1 GiB; 64 MiB without a GPU; bytes. Send and receive
    slots of one rank together: what is in flight at once."""

    chunk_bytes: int = 8 * MIB
    """Default 8 MiB; bytes. What a message is filled up to; at most staging_bytes, and in effect at most a
    quarter of D's."""

    ahead_bytes: int = 0
    """Default 0: off; bytes of a rank of D. Room for KV that P pushes before the request for it has come to
    D, for routers that ask P first and D when P has answered. P keeps its pages all the same."""

    lease_seconds: float = 30.0
    """Default 30; seconds. A transfer that makes no progress for this long ends, and frees its pages."""

    stall_seconds: float = 120.0
    """Default 120; seconds. An engine that has work and stays this long in one step counts as hung."""

    idle_wait_ms: float = 5.0
    """Default 5; milliseconds. How long a step in which vLLM has nothing to compute may wait for KV, and so
    how much later a request may be scheduled that comes meanwhile. vLLM's processes nap between such steps
    instead of spinning; 0: neither."""

    warm_up_seconds: float = 120.0
    """Default 120; seconds; 0: off. Before an instance registers with the proxy it waits so long for its own
    /health, then sends itself one prompt and waits so long for the answer; after that it registers anyway."""

    warm_up_api_key: str = field(default="", repr=False)
    """Default: VLLM_API_KEY from the environment, if set. What that prompt shows to an HTTP API with a key.
    vLLM writes all options into its log: the variable keeps the key out of it."""

    warm_up_tls: bool = False
    """Default false. The HTTP API of this instance speaks TLS. Its certificate is not checked."""

    discovery: Discovery = "plain"
    """Default curve with a secret, else plain. How the proxy is pinged: `curve` shows it that this instance
    is a member; `plain` is what routers other than p2pkv-proxy understand."""

    secret_file: str | None = None
    """Default none. File with the secret that all members share, at least 16 bytes; the environment variable
    P2PKV_SECRET may hold it instead. With a secret, only members can talk to this instance's ranks."""

    secret: bytes | None = field(default=None, repr=False)
    """Not an option: what secret_file or P2PKV_SECRET holds."""

    allowed_peers: Networks | None = None
    """Default none: any. Networks in CIDR notation; no rank outside of them is dialed or answered."""

    max_links: int = 64
    """Default 64; links. Idle ones beyond this number are closed, and built again by the next request."""

    allow_insecure: bool = False
    """Default false. Needed to bind off loopback without a secret; each start then warns that whoever
    reaches this instance can read and alter KV."""

    verify: bool = False
    """Default false. A checksum of each message, computed by P and again by D, so that bytes that changed on
    the way fail the request instead of making its answer wrong. A pair does it if either side asks for it."""

    nccl_num_channels: int = 8
    """Default 8; channels. The most channels of an NCCL communicator (with nccl4py 32 at most); more of them
    take more GPU memory. With CuPy it goes through NCCL's environment, which must not have been read yet."""

    notes: tuple[str, ...] = ()
    """Not an option: what the person who wrote the options should read once at start, a sentence each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", _read_own_host("host", self.host))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is {value}: expected {low} to {high}; choose a number in between")
        if self.chunk_bytes > self.staging_bytes:
            raise ConfigError(
                f"chunk_bytes is {self.chunk_bytes} and staging_bytes only {self.staging_bytes}: expected a "
                "chunk to fit; raise staging_bytes or lower chunk_bytes"
            )
        if self.ahead_bytes and self.staging_bytes <= RESERVED_CHUNKS * self.chunk_bytes:
            raise ConfigError(
                f"ahead_bytes is set and staging_bytes only {self.staging_bytes}: expected more than "
                f"{RESERVED_CHUNKS} chunks of {self.chunk_bytes} bytes, which are kept for requests that D "
                "has admitted; raise staging_bytes or lower chunk_bytes"
            )
        self._check_proxy()
        self._check_trust()

    def _check_trust(self) -> None:
        if self.discovery == "curve" and self.secret is None:
            raise ConfigError(
                f"discovery is 'curve' and there is no secret: set {SECRET_VARIABLE} or secret_file, or "
                "leave discovery out"
            )
        if self.secret is None and not self.allow_insecure and not is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host}, which other machines may reach, and there is no secret: expected one "
                f"off loopback; set {SECRET_VARIABLE} or secret_file to the same secret on all instances, or "
                "host to 127.0.0.1, or allow_insecure to true if only machines that you trust reach it "
                "(P2pNcclConnector had no secret and asked for none; docs/coming-from-p2pnccl.md says what "
                "else is different)"
            )

    def _check_proxy(self) -> None:
        if (self.proxy_ip is None) != (self.proxy_port is None):
            given, missing = ("proxy_ip", "proxy_port") if self.proxy_ip else ("proxy_port", "proxy_ip")
            raise ConfigError(
                f"{given} is set and {missing} is not: expected both, or neither; add {missing} to "
                f"kv_connector_extra_config, or remove {given} to run without a proxy"
            )
        if self.proxy_ip is not None and self.http_port is None:
            raise ConfigError(
                "proxy_ip and proxy_port are set and http_port is not: the proxy must be told where to send "
                "requests; add http_port, the number given to --port, to kv_connector_extra_config"
            )

    @property
    def address(self) -> Address:
        """Where rank 0 listens."""
        return Address(self.host, self.kv_port)

    @property
    def proxy(self) -> Address | None:
        """The proxy's discovery socket, or None to run without a proxy."""
        if self.proxy_ip is None or self.proxy_port is None:
            return None
        return Address(self.proxy_ip, self.proxy_port)

    @property
    def http_address(self) -> Address | None:
        """Where requests reach this instance, as the proxy is told; None without http_port."""
        return None if self.http_port is None else Address(self.host, self.http_port)

    @classmethod
    def from_extra(
        cls,
        extra: Mapping[str, object],
        *,
        role: str,
        kv_port: int | None,
        default_host: str,
        has_gpu: bool,
        gpu_bytes: int = 0,
        former: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> Options:
        """The options in `extra` (kv_connector_extra_config), defaults for the rest.

        `role` is vLLM's kv_role; `kv_port` may be None for the default; `gpu_bytes` is the memory of one GPU;
        `former` says that the connector goes by its former name. null and "" stand for an option that is not
        set. Raises ConfigError for whatever cannot be used.
        """
        given = {name: value for name, value in extra.items() if value is not None and value != ""}
        _refuse_unknown(extra)
        secret = _secret(given, environ)
        values: dict[str, Any] = {"host": default_host, "staging_bytes": default_staging(gpu_bytes)}
        values |= {"warm_up_api_key": environ.get("VLLM_API_KEY", "")}
        values |= {"secret": secret, "discovery": "curve" if secret and not former else "plain"}
        values |= {name: reader(name, given[name]) for name, reader in _READERS.items() if name in given}
        port = DEFAULT_KV_PORT if kv_port is None else _read_whole("kv_port", kv_port)
        options = cls(role=_role(role), kv_port=port, **values)
        if options.link == "nccl" and not has_gpu:
            raise ConfigError(
                "link is 'nccl', which needs a CUDA device, and there is none; use 'auto' or 'host'"
            )
        former_way = former and secret is not None and "discovery" not in given
        return replace(options, notes=(*_old_notes(given, options), *_notes(options, former_way)))


def default_staging(gpu_bytes: int) -> int:
    """Bytes of staging for a device with so much memory, 0 without a GPU: whole chunks of 8 MiB."""
    return max(64 * MIB, min(gpu_bytes // GPU_SHARE // (8 * MIB) * (8 * MIB), 1024 * MIB))


# Reading what was written for one option: the value that is meant, or a sentence about a bad one. A reader
# gets the option's name, for that sentence, and what was written. It raises ConfigError.

_Reader = Callable[[str, object], object]

_short = reprlib.Repr()
_short.maxstring = 80


def _shown(value: object) -> str:
    """A value as sentences quote it: cut, if it is long."""
    return _short.repr(value)


def _read_whole(name: str, value: object) -> int:
    """A number without a fraction."""
    read = _read_number(name, value, "a whole number")
    if read != int(read):
        raise ConfigError(f"{name} is {_shown(value)}: expected a whole number; leave out the fraction")
    return int(read)


def _read_number(name: str, value: object, expected: str = "a number") -> float:
    """An int stays one, however large; strings are read as numbers."""
    try:
        if isinstance(value, str):
            read = float(value) if set(value) & set(".eEn") else int(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            read = value
        else:
            raise TypeError
        if not math.isfinite(read):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f'{name} is {_shown(value)}: expected {expected}, as 8 or as "8"; correct it'
        ) from None
    return read


def _read_flag(name: str, value: object) -> bool:
    """A bool, or a text that says one."""
    known = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise ConfigError(f"{name} is {_shown(value)}: expected true or false; correct it")


def _read_host(name: str, value: object) -> str:
    """A host name or address in its normal form, without a port."""
    try:
        return normal_host(str(value))
    except PairingError as error:
        raise ConfigError(
            f"{name}: {error}; write the host alone, its port is an option of its own"
        ) from None


def _read_own_host(name: str, value: object) -> str:
    """A host that peers can connect to: no wildcard."""
    read = _read_host(name, value)
    if read in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{name} is {_shown(value)}: expected an address that peers can connect to, since it is "
            "advertised to them; write this machine's own address"
        )
    return read


def _one_of(*known: str) -> Callable[[str, object], str]:
    """A reader for one of these words."""

    def read(name: str, value: object) -> str:
        if value in known:
            return str(value)
        raise ConfigError(
            f"{name} is {_shown(value)}: expected one of {', '.join(known)}; choose one of them"
        )

    return read


def _read_path(name: str, value: object) -> str:
    """A text; whether there is such a file is not looked at."""
    if isinstance(value, str):
        return value
    raise ConfigError(f"{name} is {_shown(value)}: expected the path of a file; correct it")


def _read_text(name: str, value: object) -> str:
    """Any text. What was written is not quoted: it may be a key."""
    if isinstance(value, str):
        return value
    raise ConfigError(f"{name} is a {type(value).__name__}: expected a text; put it in quotes")


def _read_networks(name: str, value: object) -> Networks:
    """A list, or one text with commas."""
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f'{name} is {_shown(value)}: expected a list of networks, as ["10.0.0.0/8"]; correct it'
        )
    try:
        return Networks.parse(texts)
    except TrustError as error:
        raise ConfigError(f"{name}: {error}; leave the option out to admit any") from None


# The range and the reader of each option.

_PORT = (1, 65535)
_SECONDS = (0.001, 1e9)
_RANGES: dict[str, tuple[float, float]] = {
    "kv_port": _PORT,
    "proxy_port": _PORT,
    "http_port": _PORT,
    "staging_bytes": (1024, 1 << 40),
    "chunk_bytes": (1024, 1 << 30),
    "ahead_bytes": (0, 1 << 40),
    "lease_seconds": _SECONDS,
    "stall_seconds": _SECONDS,
    "idle_wait_ms": (0, 100),
    "warm_up_seconds": (0, 1e9),
    "max_links": (1, 1 << 16),
    "nccl_num_channels": (1, 64),
}


_READERS: dict[str, _Reader] = {
    "host": _read_own_host,
    "proxy_ip": _read_host,
    "proxy_port": _read_whole,
    "http_port": _read_whole,
    "link": _one_of("auto", "nccl", "host"),
    "staging_bytes": _read_whole,
    "chunk_bytes": _read_whole,
    "ahead_bytes": _read_whole,
    "lease_seconds": _read_number,
    "stall_seconds": _read_number,
    "idle_wait_ms": _read_number,
    "warm_up_seconds": _read_number,
    "warm_up_api_key": _read_text,
    "warm_up_tls": _read_flag,
    "discovery": _one_of("curve", "plain"),
    "secret_file": _read_path,
    "allowed_peers": _read_networks,
    "max_links": _read_whole,
    "allow_insecure": _read_flag,
    "verify": _read_flag,
    "nccl_num_channels": _read_whole,
}
_OLD: dict[str, _Reader] = {
    "mem_pool_size_gb": _read_number,
    "send_type": _one_of("PUT", "GET", "PUT_ASYNC"),
}
_KNOWN = (*_READERS, *_OLD)


def _role(role: str) -> Role:
    if role == "kv_both":
        raise ConfigError(
            "kv_role is 'kv_both': an instance of p2pkv either prefills or decodes; start one instance with "
            "kv_producer and another one with kv_consumer"
        )
    if role not in _ROLES:
        raise ConfigError(
            f"kv_role is {_shown(role)}: expected kv_producer or kv_consumer; choose one of them"
        )
    return _ROLES[role]


def _refuse_unknown(extra: Mapping[str, object]) -> None:
    for name in extra:
        if name not in _KNOWN:
            closest = difflib.get_close_matches(name.lower(), _KNOWN, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{_shown(name)} in kv_connector_extra_config is no option of p2pkv: did you mean "
                f"{closest!r}? There are {', '.join(_KNOWN)}; correct or remove it"
            )


def _secret(given: Mapping[str, object], environ: Mapping[str, str]) -> bytes | None:
    file = _read_path("secret_file", given["secret_file"]) if "secret_file" in given else None
    try:
        return read_secret(file, environ)
    except TrustError as error:
        raise ConfigError(str(error)) from None


def _old_notes(given: Mapping[str, object], options: Options) -> Iterator[str]:
    values = {name: reader(name, given[name]) for name, reader in _OLD.items() if name in given}
    if "mem_pool_size_gb" in values:
        yield (
            "mem_pool_size_gb is an option of the former connector and has no effect: there is no pool, a "
            f"prompt's KV waits in P's own blocks; what is in flight is bounded by staging_bytes "
            f"({options.staging_bytes} here). Remove it; see docs/coming-from-p2pnccl.md"
        )
    if "send_type" in values:
        yield (
            f"send_type {values['send_type']} is an option of the former connector and has no effect: P "
            "always pushes while the prefill runs. Remove it; see docs/coming-from-p2pnccl.md"
        )


def _notes(options: Options, former_way: bool) -> Iterator[str]:
    if options.http_port is not None and options.proxy is None:
        yield "http_port has no effect without proxy_ip and proxy_port: this instance registers with no proxy"
    if former_way and options.proxy is not None:
        yield (
            f"the former connector's name implies discovery 'plain', since its routers know nothing else: "
            f"the ping to {options.proxy} is not authenticated (the ranks are); for p2pkv-proxy with the "
            "secret, set discovery to 'curve'"
        )
    if options.secret is None and not is_loopback(options.host):
        yield (
            f"traffic to and from {options.address} is unauthenticated and unencrypted: whoever reaches it "
            "can read and alter KV (allow_insecure is set)"
        )
