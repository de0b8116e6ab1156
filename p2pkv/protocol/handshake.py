"""What two ranks agree on before KV travels: D dials and says Hello until P answers; each judges the other.

P never dials. A request id, which a client may have forged, can therefore make D open one connection
that says Hello, and can make P do nothing at all.

Both compute the form of the KV from the same two Hellos. Where the caches are alike, their rows travel as
they lie. Where they are not, a row is the K and V of one (token, head): a dense cache has such rows, and a
packed one can make them if the packing is known.
"""

from __future__ import annotations

import hashlib
from enum import Enum, auto

from msgspec import Struct

from p2pkv.pairing import Address, PairingError
from p2pkv.plan import Edge, Plan, make_plan
from p2pkv.protocol.machine import Machine, Table
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello
from p2pkv.protocol.pieces import Window
from p2pkv.sharding import Shape, ShardingError

# The form in which KV travels.


DENSE = "dense"
KNOWN_PACKINGS = {
    "page:vec": ("bfloat16", "float16", "float32"),
    "page:vec16": ("bfloat16", "float16", "float32"),
    "page:amx": ("bfloat16",),
}
"""Codecs that can be undone, and the element types with which vLLM uses them in the order that we know; it
packs fp8 in another."""


class Wire(Struct, frozen=True):
    """How rows are arranged between two ranks.

    Attributes:
        codec: "dense", or the codec of both caches.
        unit: tokens in a row.
        row_bytes: bytes of one (layer, head, unit) row.
    """

    codec: str
    unit: int
    row_bytes: int

    def __str__(self) -> str:
        return f"{self.codec} rows of {self.unit} tokens, {self.row_bytes} bytes for each layer and head"


def wire_between(one: Cache, other: Cache) -> Wire | None:
    """The form in which rows travel between two caches; None if there is none. The order does not matter."""
    mine, theirs = _as_it_lies(one), _as_it_lies(other)
    if one.dtype != other.dtype:
        return None
    if mine == theirs:
        return mine
    if not (_can_be_dense(one) and _can_be_dense(other)):
        return None
    dense = Wire(DENSE, 1, token_bytes(one))
    return dense if dense.row_bytes == token_bytes(other) else None


def token_bytes(cache: Cache) -> int:
    """Bytes of the K and V of one (layer, head, token)."""
    return cache.row_bytes // cache.unit_tokens


def _as_it_lies(cache: Cache) -> Wire:
    return Wire(cache.codec, cache.unit_tokens, cache.row_bytes)


def _can_be_dense(cache: Cache) -> bool:
    known = cache.codec == DENSE or cache.dtype in KNOWN_PACKINGS.get(cache.codec, ())
    return known and cache.row_bytes % cache.unit_tokens == 0


class Assignment(Struct, frozen=True):
    """What one rank of P owes one rank of D: a rectangle of the cache, in the form agreed on."""

    edge: Edge
    wire: Wire

    def window(self, start: int, stop: int) -> Window:
        """The part of it that holds tokens [start, stop).

        Raises RemoteProtocolError if `start` is inside a row of the wire.
        """
        layers, row = self.edge.layers, len(self.edge.heads) * self.wire.row_bytes
        return Window(layers.start, layers.stop, start, stop, self.wire.unit, row)


# The verdict on a pair, and D's dialing.


FIRST_RETRY = 0.05
LAST_RETRY = 1.0
"""Seconds between Hellos: the first interval, doubled up to the last."""

REFUSED_FOR = 5.0
"""Seconds after which a refused peer may be asked again, since a restart may have mended it."""


class Refused(Exception):
    """These two ranks cannot work together; the message says why, with both values."""


def unfit(mine: str, theirs: str, why: object) -> str:
    """The verdict on a pair, which only an answer can bring: somebody has looked at both Hellos."""
    return f"{theirs} and {mine} do not fit: {why}"


def shape(cache: Cache) -> Shape:
    """What the planner must know of a cache."""
    return Shape(cache.layers, cache.kv_heads, cache.tp)


def verified(mine: Hello, theirs: Hello) -> bool:
    """Whether each chunk between these two carries a checksum: it does if either of them wants that."""
    return mine.verify or theirs.verify


def judge(mine: Hello, theirs: Hello) -> Plan:
    """The common plan of a P and a D. Raises Refused with a sentence that names both values."""
    if theirs.version != PROTOCOL_VERSION or mine.version != PROTOCOL_VERSION:
        raise Refused(
            _differ("protocol versions", mine, theirs, mine.version, theirs.version)
            + "; install the same p2pkv"
        )
    if mine.role == theirs.role:
        raise Refused(
            f"both {mine.address} and {theirs.address} have role {mine.role}: "
            "a producer (kv_producer) pairs with a consumer (kv_consumer) only"
        )
    if theirs.rank >= len(theirs.addresses):
        raise Refused(f"{theirs.address} says it is rank {theirs.rank} of {len(theirs.addresses)}")
    ranks = len(theirs.cache.layers) * theirs.cache.tp
    if ranks != len(theirs.addresses):
        raise Refused(f"{theirs.address} names {len(theirs.addresses)} ranks, but its cache lies on {ranks}")
    if theirs.role == "P":
        _check_places(theirs)
    same = [
        (
            "weights",
            mine.weights,
            theirs.weights,
            f"serve the same model (here {mine.model}, there {theirs.model})",
        ),
        ("links", mine.link, theirs.link, "set the same `link` option, and install the same NCCL"),
        (
            "cache element types",
            mine.cache.dtype,
            theirs.cache.dtype,
            "set the same --kv-cache-dtype and --dtype",
        ),
        (
            "bytes per token and head",
            token_bytes(mine.cache),
            token_bytes(theirs.cache),
            "serve the same model with the same cache type",
        ),
        ("KV layers", mine.cache.layer_names, theirs.cache.layer_names, "serve the same model"),
    ]
    if verified(mine, theirs):
        advice = "a CPU and a GPU compute different ones; leave `verify` out on both sides"
        same.append(("checksums", mine.digest, theirs.digest, advice))
    for what, here, there, advice in same:
        if here != there:
            raise Refused(f"{_differ(what, mine, theirs, here, there)}; {advice}")
    if wire_between(mine.cache, theirs.cache) is None:
        raise Refused(
            _differ("memory layouts", mine, theirs, _layout(mine.cache), _layout(theirs.cache))
            + f"; {_advice(mine.cache, theirs.cache)}"
        )
    prefill, decode = (mine, theirs) if mine.role == "P" else (theirs, mine)
    try:
        return make_plan(shape(prefill.cache), shape(decode.cache))
    except ShardingError as error:
        raise Refused(f"{mine.address} and {theirs.address}: {error}") from None


def _layout(cache: Cache) -> str:
    return f"codec {cache.codec} with blocks of {cache.unit_tokens} tokens"


def _advice(mine: Cache, theirs: Cache) -> str:
    """What makes two caches exchange whole blocks, since one of them cannot be undone."""
    if mine.codec == theirs.codec:
        return "this codec's pages travel whole, so set the same --block-size"
    return (
        "pages of a codec that p2pkv cannot undo travel whole, so use hosts with the same kind of CPU, "
        "and set the same --dtype, --kv-cache-dtype and --block-size"
    )


def _check_places(prefill: Hello) -> None:
    """D will dial P's other ranks. Raises Refused if one of them cannot be dialed."""
    for place in prefill.addresses:
        try:
            Address.parse(place)
        except PairingError as error:
            raise Refused(f"{prefill.address} names a rank that cannot be dialed: {error}") from None


def _differ(what: str, mine: Hello, theirs: Hello, here: object, there: object) -> str:
    return f"{what} differ: {here} at {mine.address}, {there} at {theirs.address}"


def fit(hello: Hello) -> str:
    """What `judge` demands equal of a P and a D, as text for the discovery ping: "name=value, name=value".

    Two that `judge` accepts have the same text, so a proxy pairs no instances whose texts differ. The same
    text is no promise: sizes that cannot be divided over each other, and checksums, are judged of pairs only.
    All ranks of an engine have the same text. Whoever changes its form raises PROTOCOL_VERSION.
    """
    cache = hello.cache
    demanded: dict[str, object] = {
        "protocol": hello.version,
        "weights": hello.weights,
        "link": hello.link,
        "cache type": cache.dtype,
        "bytes per token and head": token_bytes(cache),
        "KV layers": sum(cache.layers),
        "KV heads": cache.kv_heads,
        "layer names": cache.layer_names,
        # Where the bytes of a row cannot be rearranged, rows must be alike.
        "memory layout": DENSE if _can_be_dense(cache) else _as_it_lies(cache),
    }

    def word(value: object) -> str:
        text = str(value)
        plain = text.isascii() and text.isprintable() and not {",", "="} & set(text)
        return (
            text if plain and len(text) <= 32 else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        )

    return ", ".join(f"{name}={word(value)}" for name, value in demanded.items())


class DialPhase(Enum):
    ASKING = auto()
    OPEN = auto()
    REFUSED = auto()


class DialEvent(Enum):
    WELCOME = auto()
    REFUSE = auto()
    LOST = auto()
    RETRY = auto()


DIAL: Table[DialPhase, DialEvent] = {
    DialPhase.ASKING: {
        DialEvent.WELCOME: DialPhase.OPEN,
        DialEvent.REFUSE: DialPhase.REFUSED,
        DialEvent.LOST: DialPhase.ASKING,
    },
    DialPhase.OPEN: {
        DialEvent.WELCOME: DialPhase.OPEN,
        DialEvent.REFUSE: DialPhase.REFUSED,
        DialEvent.LOST: DialPhase.ASKING,
    },
    # A Welcome after a refusal answers a later Hello, or comes from a P that has restarted.
    DialPhase.REFUSED: {
        DialEvent.WELCOME: DialPhase.OPEN,
        DialEvent.REFUSE: DialPhase.REFUSED,
        DialEvent.LOST: DialPhase.REFUSED,
        DialEvent.RETRY: DialPhase.ASKING,
    },
}


class Dialing:
    """D's view of one P rank: when to say Hello, and what came of it."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.machine = Machine(f"dial {address}", DIAL, DialPhase.ASKING)
        self.reason = ""
        self._next = now
        self._pause = FIRST_RETRY

    @property
    def open(self) -> bool:
        return self.machine.state is DialPhase.OPEN

    @property
    def refused(self) -> bool:
        return self.machine.state is DialPhase.REFUSED

    def due(self, now: float) -> bool:
        """Whether to say Hello now; the next time is then set, with a growing pause."""
        if self.open or now < self._next:
            return False
        if self.refused:
            self.machine.local(DialEvent.RETRY)
        self._next = now + self._pause
        self._pause = min(2 * self._pause, LAST_RETRY)
        return True

    @property
    def deadline(self) -> float | None:
        """When `due` may next be true; None while nobody need ask."""
        return self._next if self.machine.state is DialPhase.ASKING else None

    def welcomed(self) -> None:
        """P has accepted us, and `judge` has accepted P."""
        self.machine.remote(DialEvent.WELCOME)
        self.reason = ""
        self._pause = FIRST_RETRY

    def refuse(self, reason: str, now: float) -> None:
        """P has refused us, or `judge` has refused P."""
        self.machine.remote(DialEvent.REFUSE)
        self.reason = reason
        self._next = now + REFUSED_FOR
        self._pause = FIRST_RETRY

    def lost(self, now: float) -> None:
        """The peer does not know us any more, or is gone: start over.

        Who is asking already keeps to its pauses, so that a peer that goes again and again is not
        asked without end.
        """
        if self.open:
            self._next = now
        self.machine.local(DialEvent.LOST)
