"""Every option of p2pkv, declared once: type, limits, default, unit and meaning; and errors in sentences.

Options are written in `--kv-transfer-config`, under `kv_connector_extra_config`. The options of the
connector that p2pkv succeeds are understood.
"""

import difflib
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from socket import getaddrinfo
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from p2pkv.link_kinds import AUTO, NAMES, refuse_other_memory
from p2pkv.pairing import Address, PairingError, normal_host, of_one_instance
from p2pkv.trust import SECRET_VARIABLE, Networks, TrustError, is_loopback, read_secret

Role = Literal["P", "D"]

InstanceRole = Literal["P", "D", "both"]

MIB = 1 << 20
DEFAULT_KV_PORT = 14579
"""vLLM's own, which it passes on where none is set."""

_ROLES: dict[str, InstanceRole] = {"kv_producer": "P", "kv_consumer": "D", "kv_both": "both"}

GPU_SHARE = 128
"""By default staging takes one part in so many of a GPU's memory, from 64 MiB to 1 GiB."""

SLOTS_OF_A_LINK = 4
"""Messages of a link that staging should have room for: one on the wire, one announced behind it, one that is
gathered or scattered, and one granted."""

BUSY_LINKS = 4
"""Links of a GPU that may be busy at once: 8 channels each are a quarter of 132 multiprocessors."""

RESERVED_CHUNKS = 2
"""Chunks of D's staging that are kept for requests with blocks."""

PatchName = Literal[
    "weights", "engine_core", "spin_wait", "early_revocation", "deferral", "paused_loads", "prompt_end"
]
"""The patches of `p2pkv.connector.vllm_patches`."""

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(ge=0.001, le=1e9)]


class ConfigError(ValueError):
    """An option that cannot be used: what was given, what was expected, what to do."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How one instance runs. Types and limits are checked when it is made; raises ConfigError.

    Below each option: its unit | whether P and D must have the same value | what it means. The tables of
    docs/options.md are these lines, and a test compares them.
    """

    role: InstanceRole
    """Not an option: `P` (kv_role kv_producer: prefills and sends), `D` (kv_consumer: decodes) or `both`
    (kv_both: one or the other, as each request's id says)."""

    host: str
    """IP address or name | no | what the instance binds and advertises; its peers must be able to reach it;
    no wildcard"""

    kv_port: Port = DEFAULT_KV_PORT
    """TCP port | no | rank r of data-parallel engine e listens on `kv_port + e * ranks + r`, where `ranks` is
    TP x PP x PCP; every instance of a host needs ports of its own"""

    engine_index: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    """Not an option: which engine of its instance this is, vLLM's data-parallel rank."""

    data_parallel: bool = False
    """Not an option: whether its instance may have other engines."""

    engine_ranks: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    """Not an option: how many ranks this engine has, TP x PP x PCP."""

    proxy_ip: str | None = None
    """IP address or name | no | the proxy to register with, or several with commas between them; each may
    be `host:port`; needs `proxy_port` and `http_port`"""

    proxy_port: Port | None = None
    """TCP port | no | the proxy's discovery socket, where `proxy_ip` names no other"""

    http_port: Port | None = None
    """TCP port | no | the HTTP port of this instance (`--port` of vLLM), for the proxy"""

    secret_file: str | None = None
    """path | yes: one secret for all | a file with the secret, at least 16 bytes; the environment variable
    `P2PKV_SECRET` may hold it instead; needed off loopback"""

    secret: bytes | None = None
    """Not an option: what secret_file or P2PKV_SECRET holds."""

    allow_insecure: bool = False
    """true or false | no | start off loopback without a secret all the same, and warn at every start"""

    discovery: Literal["curve", "plain"] = "plain"
    """`curve` or `plain` | as on the proxy | encryption of pings; `plain` is for routers other than
    p2pkv-proxy. The name `P2pNcclConnector` implies `plain`"""

    allowed_peers: Networks | None = None
    """networks, as `["10.0.0.0/8"]` | no | the instance neither dials nor admits ranks outside of them"""

    link: str = AUTO
    """one of `link_kinds.NAMES` | the resulting kind | what carries the KV: {kinds}; `auto` is `nccl` where
    there is a CUDA device, else `host`"""

    staging_bytes: Annotated[int, Meta(ge=1024, le=1 << 40)] = 64 * MIB
    """bytes of a rank | no | memory for KV in flight, of a rank with all its peers"""

    chunk_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 8 * MIB
    """bytes | no | the most that P puts into a message, or a quarter of D's `staging_bytes` if that is less.
    At most `staging_bytes`; above a quarter of it a line is logged at start"""

    prefetch_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """bytes of a rank of D | no | room for KV that P pushes before D has the request, for routers that ask P
    first and for P's first tokens of sampled streams"""

    watch_weights: bool = True
    """true or false | no | notice when vLLM changes the weights while it runs, and use no older KV"""

    max_links: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    """links of a rank | no | idle links beyond this number are closed, and built again by the next request;
    with kv_both for each role"""

    preconnect: bool = True
    """true or false | no | D builds links to the P's that p2pkv-proxy names before a request needs them: at
    most `max_links`, never in place of a used one"""

    nccl_num_channels: Annotated[int, Meta(ge=1, le=64)] = 8
    """channels | yes | the most channels of an NCCL communicator (32 at most); more take more GPU memory"""

    nccl_in_flight: Annotated[int, Meta(ge=1, le=8)] = 1
    """launches | no | how many launches an NCCL link may have on the device at a time while no other link
    of the rank is busy; else one, with kv_both always one. The model's kernels might wait behind a second;
    with `2` large messages were 1.2 times as fast on an H200"""

    nccl_group_bytes: Annotated[int, Meta(ge=0, le=1 << 32)] = 16 * MIB
    """bytes | no | messages of an NCCL link that are ready together are launched together, up to so many
    bytes (P's value counts); 0: each alone"""

    weights_name: Annotated[str, Meta(max_length=256)] = ""
    """text | yes: one name for the same weights | a name for weights that vLLM does not load from files on
    this machine (Run:ai from object storage, tensorizer, modelexpress, ipc_cache, dummy); without it such an
    instance does not start. P and D compare it in place of files, besides the model's configuration"""

    verify: bool = False
    """true or false | no: one side is enough | P and D compare a checksum of each message: bytes that changed
    on the way fail the transfer"""

    lease_seconds: Seconds = 30.0
    """seconds | recommended | how long one side of a transfer waits for news of the other before it ends the
    transfer"""

    stall_seconds: Seconds = 120.0
    """seconds | recommended | an engine that makes no progress for this long (it hangs in a step or between
    steps, is paused, or its engine core is stopped) loses its transfers"""

    wait_seconds: Seconds = 480.0
    """seconds | recommended | how long a request may wait on D for P to begin, and again for room on D; and
    how long P keeps a prompt's blocks for a D that takes nothing. Then D's policy decides"""

    held_share: Annotated[float, Meta(ge=0.001, le=1)] = 0.5
    """a share, more than 0 and at most 1 | no | the share of P's blocks, not counting those held for other
    D's, that finished prompts may hold for one D; at this share P begins no further prompt for it. With
    kv_both a share of a third of the blocks"""

    idle_wait_ms: Annotated[float, Meta(ge=0, le=100)] = 5.0
    """milliseconds | no | how long a step that computes nothing may wait for KV, and so delay a new request,
    where vLLM's engine core cannot sleep (Ray's workers); 0: vLLM's processes spin while they wait for KV"""

    spin: bool = True
    """true or false | no | vLLM's processes spin while they wait for each other's messages; false: they sleep
    for 20 us at a time, for P and D that share a few cores with nothing else"""

    skip_patches: tuple[PatchName, ...] = ()
    """names, as `["deferral"]` | no | [patches](compatibility.md#what-p2pkv-replaces-in-vllm) to leave out:
    `weights`, `engine_core`, `spin_wait`, `early_revocation`, `deferral`, `paused_loads`, `prompt_end`"""

    warm_up_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 120.0
    """seconds | no | how long an instance waits for its own `/health`, and again for its first prompts,
    before it registers with the proxy; 0: off"""

    warm_up_api_key: str = ""
    """text | no | the key of the instance's HTTP API, for those prompts; vLLM logs all options, so prefer the
    variable"""

    warm_up_tls: bool = False
    """true or false | no | the instance's HTTP API speaks TLS (the certificate is not checked), which
    p2pkv-proxy does not; for other routers"""

    notes: tuple[str, ...] = ()
    """Not an option: warnings about the options, to be logged once at start; a sentence each."""

    def __post_init__(self) -> None:
        for name in OPTIONS:
            msgspec.structs.force_setattr(self, name, _read(name, getattr(self, name), _TYPES[name]))
        self._normalise_host()
        if self.kv_port + (self.engine_index + 1) * self.engine_ranks - 1 > 65535:
            raise ConfigError(f"{self.ports}: expected ports up to 65535; lower kv_port")
        if self.chunk_bytes > self.staging_bytes:
            raise ConfigError(
                f"chunk_bytes is {self.chunk_bytes} and staging_bytes only {self.staging_bytes}: expected a "
                "chunk to fit; raise staging_bytes or lower chunk_bytes"
            )
        if self.prefetch_bytes and self.staging_bytes <= RESERVED_CHUNKS * self.chunk_bytes:
            raise ConfigError(
                f"prefetch_bytes is set and staging_bytes only {self.staging_bytes}: expected more than "
                f"{RESERVED_CHUNKS} chunks of {self.chunk_bytes} bytes, which are kept for requests that D "
                "has admitted; raise staging_bytes or lower chunk_bytes"
            )
        if self.role == "both" and self.chunk_bytes > self.staging_bytes // 4:
            raise ConfigError(
                f"chunk_bytes is {self.chunk_bytes} and staging_bytes only {self.staging_bytes}: with "
                "kv_both a chunk may take a quarter of the staging, which is kept for each direction; raise "
                "staging_bytes or lower chunk_bytes"
            )
        self._check_proxy()
        self._check_trust()

    def __repr__(self) -> str:
        """Without the secret and the key, which would come into logs."""
        names = [name for name in self.__struct_fields__ if name not in ("secret", "warm_up_api_key")]
        return f"Options({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def _normalise_host(self) -> None:
        try:
            msgspec.structs.force_setattr(self, "host", normal_host(self.host))
        except PairingError as error:
            raise ConfigError(f"host: {error}; write it alone, its port is the option kv_port") from None
        if self.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"host is {self.host!r}: expected an address that peers can connect to, since it is "
                "advertised to them; write this machine's own address"
            )

    def _check_trust(self) -> None:
        if self.discovery == "curve" and self.secret is None:
            raise ConfigError(
                f"discovery is 'curve' and there is no secret: set {SECRET_VARIABLE} or secret_file, or "
                "leave discovery out"
            )
        if self.secret is None and not self.allow_insecure and not is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host}, which other machines may reach, and there is no secret: such a host "
                f"needs one; set {SECRET_VARIABLE} or secret_file to the same secret on all instances, or "
                "host to 127.0.0.1, or allow_insecure to true if only machines that you trust reach it "
                "(P2pNcclConnector had no secret and asked for none; docs/coming-from-p2pnccl.md has what "
                "else is different)"
            )

    def _check_proxy(self) -> None:
        if (self.proxy_ip is None) != (self.proxy_port is None):
            given, missing = ("proxy_ip", "proxy_port") if self.proxy_ip else ("proxy_port", "proxy_ip")
            raise ConfigError(
                f"{given} is set and {missing} is not: expected both, or neither; add {missing} to "
                f"kv_connector_extra_config, or remove {given} to run without a proxy"
            )
        try:
            _ = self.proxies
        except PairingError as error:
            raise ConfigError(f"proxy_ip: {error}; write HOST or HOST:PORT, several with commas") from None
        if self.proxy_ip is not None and self.http_port is None:
            raise ConfigError(
                "proxy_ip and proxy_port are set and http_port is not: the proxy must know where to send "
                "requests; add http_port, the number given to --port, to kv_connector_extra_config"
            )

    @property
    def prefills(self) -> bool:
        """Whether it prefills prompts for other instances."""
        return self.role != "D"

    @property
    def decodes(self) -> bool:
        """Whether it decodes requests that other instances have prefilled."""
        return self.role != "P"

    @property
    def address(self) -> Address:
        """Where rank 0 of this engine listens."""
        return Address(self.host, self.kv_port + self.engine_index * self.engine_ranks)

    @property
    def instance(self) -> Address | None:
        """Where rank 0 of a data-parallel instance's first engine listens, or would here; else None."""
        return Address(self.host, self.kv_port) if self.data_parallel else None

    def is_of_instance(self, engine: Address) -> bool:
        """Whether `engine` may be where this engine begins, or another of its instance on this host."""
        first = self.instance
        return engine == self.address if first is None else of_one_instance(engine, first, self.engine_ranks)

    @property
    def ports(self) -> str:
        """Where the ranks of this engine listen, and why there."""
        first, ranks = self.kv_port + self.engine_index * self.engine_ranks, self.engine_ranks
        return (
            f"the ranks of this engine listen on ports {first} to {first + ranks - 1} "
            f"(kv_port {self.kv_port}, data-parallel rank {self.engine_index}, TP x PP x PCP {ranks})"
        )

    @property
    def proxies(self) -> tuple[Address, ...]:
        """The discovery sockets of the proxies to register with."""
        if self.proxy_ip is None or self.proxy_port is None:
            return ()
        found = (_proxy(each.strip(), self.proxy_port) for each in self.proxy_ip.split(","))
        return tuple(dict.fromkeys(found))

    @property
    def http_address(self) -> Address | None:
        """Where requests reach this instance, as the pings have it; None without http_port."""
        return None if self.http_port is None else Address(self.host, self.http_port)

    @classmethod
    def from_extra(
        cls,
        extra: Mapping[str, object],
        *,
        role: str,
        kv_port: object,
        default_host: str,
        has_gpu: bool,
        gpu_bytes: int = 0,
        engine: tuple[int, int, bool] = (0, 1, False),
        former: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> "Options":
        """The options in `extra` (kv_connector_extra_config), defaults for the rest.

        `role` is vLLM's kv_role; `kv_port` may be None for the default; `gpu_bytes` is the memory of one GPU;
        `engine` has `engine_index`, `engine_ranks` and `data_parallel`; `former`: the connector goes by its
        former name. null and "" stand for an option that is not set. Raises ConfigError for whatever cannot
        be used.
        """
        if role not in _ROLES:
            raise ConfigError(
                f"kv_role is {_short.repr(role)}: expected kv_producer, kv_consumer or kv_both; choose one"
            )
        _refuse_unknown(extra)
        given = {name: value for name, value in extra.items() if value is not None and value != ""}
        unused = {name: _read(name, given.pop(name), _FORMER[name][0]) for name in _FORMER if name in given}
        try:
            secret = read_secret(_read("secret_file", given.get("secret_file"), str | None), environ)
        except TrustError as error:
            raise ConfigError(str(error)) from None
        default = default_staging(gpu_bytes)
        chunk = default_chunk(_read("staging_bytes", given.get("staging_bytes", default), int), has_gpu)
        values: dict[str, Any] = {
            "kv_port": DEFAULT_KV_PORT if kv_port is None else kv_port,
            "host": default_host,
            "engine_index": engine[0],
            "engine_ranks": engine[1],
            "data_parallel": engine[2],
            "staging_bytes": default,
            "chunk_bytes": chunk,
            "nccl_group_bytes": 2 * chunk,
            "warm_up_api_key": environ.get("VLLM_API_KEY", ""),
            "secret": secret,
            "discovery": "curve" if secret and not former else "plain",
        }
        options = cls(role=_ROLES[role], **values | given)
        try:
            refuse_other_memory(options.link, has_gpu)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        former_way = former and secret is not None and "discovery" not in given
        notes = [*_former_notes(unused, options, former), *_notes(options, former_way)]
        return msgspec.structs.replace(options, notes=tuple(notes))


def default_staging(gpu_bytes: int) -> int:
    """Bytes of staging for a device with so much memory, 0 without a GPU: whole chunks of 8 MiB."""
    return max(64 * MIB, min(gpu_bytes // GPU_SHARE // (8 * MIB) * (8 * MIB), 1024 * MIB))


def default_chunk(staging: int, has_gpu: bool) -> int:
    """Bytes of a message, for what is given as `staging_bytes`; docs/design.md derives it ("The NCCL link").

    A message between GPUs costs 0.1 to 0.3 ms besides its bytes, so it should be large; but staging holds
    SLOTS_OF_A_LINK messages for each of BUSY_LINKS links.
    """
    if not has_gpu:
        return 8 * MIB
    part = staging // (SLOTS_OF_A_LINK * BUSY_LINKS) // MIB * MIB
    return max(8 * MIB, min(part, 64 * MIB))


_TYPES = get_type_hints(Options, include_extras=True) | {"link": Literal[NAMES]}
NO_OPTIONS = ("role", "engine_index", "data_parallel", "engine_ranks", "secret", "notes")
OPTIONS = tuple(name for name in Options.__struct_fields__ if name not in NO_OPTIONS)
"""The names of the options."""

_FORMER: dict[str, tuple[Any, str]] = {
    "mem_pool_size_gb": (float, "KV waits in P's own blocks, and staging_bytes bounds what is in flight"),
    "send_type": (Literal["PUT", "GET", "PUT_ASYNC"], "P always pushes while the prefill runs"),
    "http_ip": (str, "the former connector did not read it either; the HTTP API is at host, too"),
}
"""What the former connector's users wrote: its type, and why it has no effect."""
EXTRA = (*(name for name in OPTIONS if name != "kv_port"), *_FORMER)
"""The names that kv_connector_extra_config may have: options, and the former connector's."""

_short = reprlib.Repr()
_short.maxstring = 80


def _read(name: str, value: object, expected: Any) -> Any:
    """`value` as the type `expected`: numbers and flags may be texts. Raises ConfigError with a sentence."""
    try:
        return msgspec.convert(value, expected, strict=False, dec_hook=_read_custom)
    except (msgspec.ValidationError, UnicodeError) as error:
        if isinstance(error.__cause__, TrustError):
            raise ConfigError(f"{name}: {error.__cause__}; leave the option out to admit any") from None
        # A key is not repeated, whatever is wrong with it.
        shown = f"a {type(value).__name__}" if name == "warm_up_api_key" else _short.repr(value)
        wanted = _expected(msgspec.inspect.type_info(expected))
        raise ConfigError(f"{name} is {shown}: expected {wanted}; correct it") from None


def _read_custom(kind: type, value: object) -> Networks:
    """Networks, out of a list or one text with commas."""
    if isinstance(value, Networks):
        return value
    return Networks.parse(msgspec.convert(value.split(",") if isinstance(value, str) else value, list[str]))


def _expected(kind: msgspec.inspect.Type) -> str:
    """What a user may write for a value of this type."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return _expected(types[0])
        case msgspec.inspect.IntType(ge=low, le=high) | msgspec.inspect.FloatType(ge=low, le=high):
            number = "a whole number" if isinstance(kind, msgspec.inspect.IntType) else "a number"
            # 13 digits: 1 TiB in bytes, without an exponent.
            return number if low is None or high is None else f"{number} from {low:.13g} to {high:.13g}"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case msgspec.inspect.VarTupleType(item_type=msgspec.inspect.LiteralType(values=values)):
            return f"a list of names out of {', '.join(map(str, values))}"
        case msgspec.inspect.StrType(max_length=int(most)):
            return f"a text in quotes of at most {most} characters"
        case msgspec.inspect.CustomType():
            return 'a list of networks, as ["10.0.0.0/8"]'
    return "a text in quotes"


def _proxy(text: str, port: int) -> Address:
    """One of `proxy_ip`; an IPv6 address alone has several colons."""
    return Address.parse(text) if text.count(":") == 1 or "]:" in text else Address(text, port)


def _refuse_unknown(extra: Mapping[str, object]) -> None:
    for name in extra:
        if name in ("kv_port", "kv_role", "kv_load_failure_policy"):
            raise ConfigError(f"{name} belongs beside kv_connector_extra_config, not in it; move it out")
        if name not in EXTRA:
            close = difflib.get_close_matches(name.lower(), EXTRA, n=1)
            meant = f": did you mean {close[0]!r}?" if close else "."
            raise ConfigError(
                f"{_short.repr(name)} in kv_connector_extra_config is no option of p2pkv{meant} "
                f"The options are {', '.join(EXTRA)}; correct or remove it"
            )


def _former_notes(unused: Iterable[str], options: Options, former: bool) -> Iterator[str]:
    for name in unused:
        yield f"{name} has no effect: {_FORMER[name][1]}. Remove it; see docs/coming-from-p2pnccl.md"
    if former and options.role == "both" and options.proxies and options.discovery == "plain":
        yield (
            "kv_both was a P with the former connector, and is P and D now. Only p2pkv-proxy knows that; the "
            "former example proxy takes no more pings after one: set kv_producer, or leave proxy_ip out"
        )


def _notes(options: Options, former_way: bool) -> Iterator[str]:
    quarter = options.staging_bytes // 4
    if options.chunk_bytes > quarter:
        whose = "this instance takes" if options.decodes else "a D with the same staging_bytes takes"
        yield (
            f"chunk_bytes is {options.chunk_bytes}, and {whose} messages of at most {quarter} bytes, a "
            "quarter of its staging_bytes: P fills messages up to that; raise staging_bytes or lower "
            "chunk_bytes"
        )
    if options.prefetch_bytes and not options.decodes:
        yield "prefetch_bytes has no effect on a P: D keeps the room, so set it there"
    elif options.prefetch_bytes and options.data_parallel:
        yield "prefetch_bytes has no effect here: with data parallelism P may not know D's engine yet"
    if options.http_port is not None and not options.proxies:
        yield "http_port has no effect without proxy_ip and proxy_port: this instance registers with no proxy"
    if former_way and options.proxies:
        yield (
            f"the former connector's name implies discovery 'plain', since its routers know nothing else: "
            f"pings to {' and '.join(map(str, options.proxies))} are not authenticated (the ranks are); "
            "for p2pkv-proxy with the secret, set discovery to 'curve'"
        )
    with suppress(OSError):  # a rank cannot listen then, and says so
        here = str(getaddrinfo(options.host, None)[0][4][0])
        if is_loopback(here) and not is_loopback(options.host):
            yield (
                f"host {options.host} is {here} on this machine (see /etc/hosts), which no other machine "
                "reaches: set host to this machine's address"
            )
    if options.secret is None and not is_loopback(options.host):
        yield (
            f"traffic to and from {options.address} is unauthenticated and unencrypted: anyone who reaches "
            "it can read and alter KV (allow_insecure is set)"
        )
