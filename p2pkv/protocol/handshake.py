"""What two ranks agree on before KV travels: D dials and says Hello until P answers; each compares the two.

P never dials. A request id, which a client may have forged, can therefore make D open one connection
that says Hello, and can make P do nothing at all.

Both compute the form of the KV from the same two Hellos, for each KV group. Where the two caches are alike,
their rows travel as they lie. Where they are not, a row is the K and V of one (token, head): a dense cache
has such rows, and a packed one can make them if the packing is known. A dense row that stands for several
tokens is alike on both sides, or there is no common form.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from math import lcm

from msgspec import Struct, structs

from p2pkv.page_packings import DENSE, PACKINGS
from p2pkv.pairing import Address, PairingError, of_one_instance
from p2pkv.plan import Edge, Plan, Shapes, make_plan
from p2pkv.protocol.extents import Extent, Extents
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello, KvGroup, UnknownHello
from p2pkv.sharding import Shape, ShardingError


class RowFormat(Struct, frozen=True):
    """How rows of a KV group, of `unit` tokens, are arranged between two ranks: by the codec of both, or
    dense. The other fields are those of `KvGroup`."""

    codec: str
    unit: int
    row_bytes: int
    once: bool = False
    window: int = 0
    block: int = 1
    chunked: bool = False

    def __str__(self) -> str:
        tokens = "the whole request" if self.once else f"{self.unit} tokens"
        seen = f"chunk of {self.window}" if self.chunked else f"last {self.window} tokens"
        window = f", of the {seen}" if self.window else ""
        return f"{self.codec} rows of {tokens}, {self.row_bytes} bytes for each layer and head{window}"

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """The tokens, in whole rows, that a rank with [0, start) needs to compute token `stop`.

        Of a window that begins inside a block, all of the block: vLLM caches it, and a prompt that is shorter
        would see what had not come. A dense row of several tokens is computed with the last of them: the row
        in which token `stop` lies is not needed.
        """
        if self.once:
            return 0, 1
        if self.codec == DENSE:
            stop = stop // self.unit * self.unit
        whole = lcm(self.unit, self.block)
        first = stop // self.window * self.window if self.chunked else max(0, stop - self.window + 1)
        first = first // whole * whole if self.window else 0
        return max(start, min(first, stop)), stop


def row_formats(one: Cache, other: Cache) -> tuple[RowFormat, ...]:
    """The form in which each KV group travels between two caches that `negotiate` has accepted."""
    wires = map(row_format, one.groups, other.groups)
    return tuple(wire for wire in wires if wire is not None)


def row_format(one: KvGroup, other: KvGroup) -> RowFormat | None:
    """The form in which rows of a group travel; None if there is none. The order does not matter."""
    mine, theirs = _as_it_lies(one), _as_it_lies(other)
    if (one.dtype, _seen(one)) != (other.dtype, _seen(other)):
        return None
    # P's blocks are as large as D's, or larger; see `negotiate`.
    block = min(one.block, other.block)
    if mine == theirs:
        return structs.replace(mine, block=block)
    if not (_can_be_dense(one) and _can_be_dense(other)):
        return None
    dense = RowFormat(DENSE, 1, token_bytes(one), window=one.window, block=block, chunked=one.chunked)
    return dense if dense.row_bytes == token_bytes(other) else None


def token_bytes(group: KvGroup) -> int:
    """Bytes of K and V of one (layer, head, token); of a row that stands for several, or for a request."""
    return group.row_bytes if group.codec == DENSE else group.row_bytes // group.unit_tokens


def _row_tokens(group: KvGroup) -> int:
    """How many tokens one row stands for; packed pages have a row for each token."""
    return group.unit_tokens if group.codec == DENSE else 1


def _as_it_lies(group: KvGroup) -> RowFormat:
    row = group.codec, group.unit_tokens, group.row_bytes, group.once
    return RowFormat(*row, group.window, chunked=group.chunked)


def _seen(group: KvGroup) -> int | str:
    """The tokens that attention looks at."""
    if group.once and group.window:
        return f"a ring of {group.window} slots in {group.row_bytes} bytes"
    return f"in chunks of {group.window}" if group.chunked else group.window


def _can_be_dense(group: KvGroup) -> bool:
    packing = PACKINGS.get(group.codec)
    known = group.codec == DENSE or (packing is not None and group.dtype in packing.dtypes)
    divisible = group.row_bytes % group.unit_tokens == 0
    return known and not group.once and _row_tokens(group) == 1 and divisible


class GroupAssignment(Struct, frozen=True):
    """What one rank of P owes one rank of D of one KV group: a rectangle, in the form agreed on."""

    edge: Edge
    wire: RowFormat

    def extent(self, start: int, stop: int) -> Extent:
        edge, wire = self.edge, self.wire
        row = len(edge.heads) * wire.row_bytes
        ready = stop if wire.once else None
        first, last = wire.needed(start, stop)
        if edge.tokens is not None:
            first, last = edge.tokens.count(first), edge.tokens.count(last)
        layers = edge.layers
        return Extent(edge.group, layers.start, layers.stop, first, last, wire.unit, row, ready, edge.tokens)


class Assignment(Struct, frozen=True, dict=True):
    """What one rank of P owes one rank of D of all KV groups, in order; of some groups nothing."""

    groups: tuple[GroupAssignment, ...]

    @classmethod
    def of(cls, edges: Sequence[Edge], wires: Sequence[RowFormat]) -> "Assignment":
        return cls(tuple(GroupAssignment(edge, wires[edge.group]) for edge in edges))

    def extents(self, start: int, stop: int) -> Extents:
        """The part of it for a D that has tokens [0, start) and will compute token `stop`. Raises
        RemoteProtocolError if `start` is inside a row of the wire."""
        return Extents({each.edge.group: each.extent(start, stop) for each in self.groups})

    @cached_property
    def edges(self) -> dict[int, Edge]:
        """The edges, by KV group."""
        return {each.edge.group: each.edge for each in self.groups}

    @cached_property
    def unit(self) -> int:
        """D may want tokens from any multiple of this on."""
        return lcm(*(each.wire.unit for each in self.groups if not each.wire.once))


FIRST_RETRY = 0.05
LAST_RETRY = 1.0
"""Seconds between Hellos: the first interval, doubled up to the last."""

REFUSED_FOR = 5.0
"""Seconds after which a refused peer may be asked again, since a restart may have mended it."""

DRAFTER = " with drafter "
"""Stands in a Hello's weights before the text that identifies a drafter that keeps KV."""

SAME_RINGS = "serve the same model with the same num_speculative_tokens, from which vLLM takes a ring's size"
SAME_LINK = "give both the same `link`, nccl_num_channels, NCCL_* variables and nvidia-nccl package"
SAME_ALLOCATOR = "serve the same model, and set --disable-hybrid-kv-cache-manager on both sides or on neither"
SAME_GROUPS = f"{SAME_ALLOCATOR}; if one --attention-backend keeps K and V apart (B12X), choose it on both"


class Refused(Exception):
    """These two ranks cannot work together; the message says why, with both values."""


def unfit(mine: str, theirs: str, why: object) -> str:
    """Why two ranks cannot work together, in a sentence with both addresses; `why`: what does not fit."""
    return f"{theirs} and {mine} do not fit: {why}"


def shapes(cache: Cache) -> Shapes:
    """What the planner must know of a cache. Raises ShardingError."""
    return tuple(
        Shape(group.layers, group.heads, cache.tp, cache.pcp, group.dcp, group.interleave)
        for group in cache.groups
    )


def is_engine_of(address: str, hello: Hello) -> bool:
    """Whether an engine of this Hello's instance may listen at `address`, as its addresses show."""
    try:
        engine, first = Address.parse(address), Address.parse(hello.instance or hello.addresses[0])
    except PairingError:
        return False
    return engine == first or (bool(hello.instance) and of_one_instance(engine, first, len(hello.addresses)))


def verified(mine: Hello, theirs: Hello) -> bool:
    """Whether each chunk between these two carries a checksum: it does if either of them wants that."""
    return mine.verify or theirs.verify


def negotiate(mine: Hello, theirs: Hello) -> Plan:
    """The common plan of a P and a D. Raises Refused with a sentence that names both values."""
    if theirs.version != PROTOCOL_VERSION or mine.version != PROTOCOL_VERSION:
        raise Refused(other_versions(mine, theirs))
    if mine.role == theirs.role:
        raise Refused(
            f"both {mine.address} and {theirs.address} have role {mine.role}: "
            "a producer (kv_producer) pairs with a consumer (kv_consumer) only"
        )
    if theirs.rank >= len(theirs.addresses):
        raise Refused(f"{theirs.address} says it is rank {theirs.rank} of {len(theirs.addresses)}")
    ranks = theirs.cache.ranks
    if ranks != len(theirs.addresses):
        raise Refused(f"{theirs.address} names {len(theirs.addresses)} ranks, but its cache lies on {ranks}")
    for place in theirs.addresses if theirs.role == "P" else ():  # D will dial them
        try:
            Address.parse(place)
        except PairingError as error:
            raise Refused(f"{theirs.address} names a rank that cannot be dialed: {error}") from None
    alike = f"serve the same model (here {mine.model}, there {theirs.model}), configured alike"
    if drafts := DRAFTER in mine.weights + theirs.weights:
        alike += (
            " with the same --speculative-config on both sides, or on neither: a drafter guesses badly "
            "without the KV of the prompt that the same drafter has on P"
        )
    weights = "weights", mine.weights, theirs.weights, alike
    same: list[tuple[str, object, object, str]] = [
        ("links", mine.link, theirs.link, SAME_LINK),
        ("numbers of KV groups", len(mine.cache.groups), len(theirs.cache.groups), SAME_GROUPS),
    ]
    for number, (ours, others) in enumerate(zip(mine.cache.groups, theirs.cache.groups, strict=False)):
        same += [
            (f"{what}{_of_group(number, mine)}", here, there, advice)
            for what, here, there, advice in _same_of_groups(ours, others)
        ]
    if verified(mine, theirs):
        advice = "a CPU and a GPU compute different ones; leave `verify` out on both sides"
        same.append(("checksums", mine.digest, theirs.digest, advice))
    # The weights' name has the configuration in it, of which the cache of the same model says more.
    last = mine.model == theirs.model and not drafts
    for what, here, there, advice in [*same, weights] if last else [weights, *same]:
        if here != there:
            raise Refused(f"{_differ(what, mine, theirs, here, there)}; {advice}")
    for number, (ours, others) in enumerate(zip(mine.cache.groups, theirs.cache.groups, strict=True)):
        if row_format(ours, others) is None:
            what = f"memory layouts{_of_group(number, mine)}"
            layouts = _differ(what, mine, theirs, _layout(ours), _layout(others))
            raise Refused(f"{layouts}; {_advice(ours, others)}")
        _check_divided_tokens(number, mine, theirs)
    prefill, decode = (mine, theirs) if mine.role == "P" else (theirs, mine)
    _check_windows(prefill, decode)
    try:
        return make_plan(shapes(prefill.cache), shapes(decode.cache))
    except ShardingError as error:
        raise Refused(f"{mine.address} and {theirs.address}: {error}") from None


def _check_divided_tokens(number: int, mine: Hello, theirs: Hello) -> None:
    """Raises Refused for a KV group whose tokens one of the two divides, although its rows are not tokens."""
    groups = [hello.cache.groups[number] for hello in (mine, theirs)]
    if max(group.dcp for group in groups) == 1:
        return
    for hello, group in zip((mine, theirs), groups, strict=True):
        if group.once or group.window or group.codec != DENSE or group.unit_tokens > 1:
            raise Refused(
                f"decode-context-parallel sizes{_of_group(number, mine)} are {groups[0].dcp} at "
                f"{mine.address} and {groups[1].dcp} at {theirs.address}, and {hello.address} keeps "
                f"{_layout(group)}, rows per request: {_rows(group)}, window: {group.window}; tokens are "
                "divided only where a dense row is one token and there is no window, so set "
                "--decode-context-parallel-size to 1 on both sides"
            )


def _check_windows(prefill: Hello, decode: Hello) -> None:
    """Raises Refused for a D whose prefix cache would keep blocks of which P has let a part go."""
    for number, (on_p, on_d) in enumerate(zip(prefill.cache.groups, decode.cache.groups, strict=True)):
        if on_p.block % on_d.block:
            raise Refused(
                f"blocks of a sliding window{_of_group(number, prefill)} have {on_p.block} tokens at "
                f"{prefill.address} and {on_d.block} at {decode.address}, which caches prefixes: P gives "
                "blocks back that have left the window, so their size has to be a multiple of D's; set "
                "--block-size and --swa-bounded-replay alike on both sides, or "
                "--no-enable-prefix-caching on D"
            )


def _same_of_groups(mine: KvGroup, theirs: KvGroup) -> list[tuple[str, object, object, str]]:
    """What must be equal of a KV group: what it is, here, there, what to do if it is not."""
    row = "token" if _row_tokens(mine) == 1 else "row"
    same_type = "serve the same model with the same cache type"
    return [
        ("rows per request", _rows(mine), _rows(theirs), "serve the same model"),
        ("attention windows", _seen(mine), _seen(theirs), SAME_RINGS if mine.once else SAME_ALLOCATOR),
        ("cache element types", mine.dtype, theirs.dtype, "set the same --kv-cache-dtype and --dtype"),
        (f"bytes per {row} and head", token_bytes(mine), token_bytes(theirs), same_type),
        ("KV layers", mine.layer_names, theirs.layer_names, "serve the same model"),
    ]


def _rows(group: KvGroup) -> str:
    if group.once:
        return "one"
    tokens = _row_tokens(group)
    return "one for each token" if tokens == 1 else f"one for {tokens} tokens"


def _of_group(number: int, mine: Hello) -> str:
    """Which KV group is meant; "" where there is only one."""
    return f" of KV group {number}" if len(mine.cache.groups) > 1 else ""


def _layout(group: KvGroup) -> str:
    return f"codec {group.codec} with blocks of {group.unit_tokens} tokens"


def _advice(mine: KvGroup, theirs: KvGroup) -> str:
    """What makes two caches exchange whole blocks, since one of them cannot be undone."""
    if mine.codec == theirs.codec:
        return "this codec's pages travel whole, so set the same --block-size"
    return (
        "pages of a codec that p2pkv cannot undo travel whole, so use the same kind of CPU or GPU, and set "
        "the same --dtype, --kv-cache-dtype and --block-size"
    )


def other_versions(mine: Hello, theirs: Hello | UnknownHello) -> str:
    """Why two ranks of different versions of the protocol refuse each other."""
    versions = _differ("protocol versions", mine, theirs, mine.version, theirs.version)
    return f"{versions}; install the same p2pkv"


def _differ(what: str, mine: Hello, theirs: Hello | UnknownHello, here: object, there: object) -> str:
    return f"{what} differ: {here} at {mine.address}, {there} at {theirs.address}"


def fit(hello: Hello) -> str:
    """What `negotiate` demands equal of a P and a D, as text for the ping: "name=value, name=value".

    Two that `negotiate` accepts have the same text, so a proxy pairs no instances whose texts differ. The
    same text is no promise: sizes that cannot be divided over each other, blocks of windows, and checksums
    are compared for pairs only. All ranks of an engine have the same text. A change of its form needs a new
    PROTOCOL_VERSION.
    """
    demanded: dict[str, object] = {"protocol": hello.version, "weights": hello.weights, "link": hello.link}
    demanded["KV groups"] = len(hello.cache.groups)
    forms = [_form(group) for group in hello.cache.groups]
    demanded |= forms[0] if len(forms) == 1 else {"forms of KV groups": forms}

    def word(value: object) -> str:
        text = str(value)
        plain = text.isascii() and text.isprintable() and not {",", "="} & set(text) and len(text) <= 32
        return text if plain else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    return ", ".join(f"{name}={word(value)}" for name, value in demanded.items())


def _form(group: KvGroup) -> dict[str, object]:
    """What must be equal of a KV group on P and D."""
    form: dict[str, object] = {what: mine for what, mine, _, _ in _same_of_groups(group, group)}
    form |= {"layers in all": sum(group.layers), "KV heads": group.heads}
    # Where the bytes of a row cannot be rearranged, rows must be alike.
    return form | {"memory layout": DENSE if _can_be_dense(group) else _as_it_lies(group)}


class DialState:
    """D's view of one P rank: when to say Hello, and what came of it.

    `open`: both have accepted each other. `reason`: why one has refused the other; "" if none has.
    """

    def __init__(self, now: float) -> None:
        self.open = False
        self.reason = ""
        self.next_try = now
        self._pause = FIRST_RETRY

    def due(self, now: float) -> bool:
        """Whether to say Hello now; the next time is then set, with a growing pause."""
        if self.open or now < self.next_try:
            return False
        self.reason = ""
        self.next_try = now + self._pause
        self._pause = min(2 * self._pause, LAST_RETRY)
        return True

    def welcomed(self) -> None:
        """P has accepted us, and `negotiate` has accepted P."""
        self.open, self.reason, self._pause = True, "", FIRST_RETRY

    def refuse(self, reason: str, now: float) -> None:
        """P has refused us, or `negotiate` has refused P."""
        self.open, self.reason, self._pause = False, reason or "it does not say why", FIRST_RETRY
        self.next_try = now + REFUSED_FOR

    def lost(self, now: float) -> None:
        """The peer does not know us any more, or is gone: start over. One that is asking already keeps to its
        pauses, so that a peer that goes again and again is not asked without end."""
        if self.open:
            self.open, self.next_try = False, now
