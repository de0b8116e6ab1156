"""The first words of two ranks: D dials and says Hello until P answers; each side judges the other.

P never dials. A request id, which a client may have forged, can therefore make D open one connection
that says Hello, and can make P do nothing at all.
"""

from __future__ import annotations

from enum import Enum, auto

from p2pkv.pairing import Address, PairingError
from p2pkv.plan import Plan, make_plan
from p2pkv.protocol.machine import Machine, Table
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello
from p2pkv.protocol.wire import token_bytes, wire_between
from p2pkv.sharding import Shape, ShardingError

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
    """What makes two caches exchange whole pages, since one of them cannot be undone."""
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


class Dial(Enum):
    ASKING = auto()
    OPEN = auto()
    REFUSED = auto()


class On(Enum):
    WELCOME = auto()
    REFUSE = auto()
    LOST = auto()
    RETRY = auto()


DIAL: Table[Dial, On] = {
    Dial.ASKING: {On.WELCOME: Dial.OPEN, On.REFUSE: Dial.REFUSED, On.LOST: Dial.ASKING},
    Dial.OPEN: {On.WELCOME: Dial.OPEN, On.REFUSE: Dial.REFUSED, On.LOST: Dial.ASKING},
    # A Welcome after a refusal answers a later Hello, or comes from a P that has restarted.
    Dial.REFUSED: {
        On.WELCOME: Dial.OPEN,
        On.REFUSE: Dial.REFUSED,
        On.LOST: Dial.REFUSED,
        On.RETRY: Dial.ASKING,
    },
}


class Dialing:
    """D's view of one P rank: when to say Hello, and what came of it."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.machine = Machine(f"dial {address}", DIAL, Dial.ASKING)
        self.reason = ""
        self._next = now
        self._pause = FIRST_RETRY

    @property
    def open(self) -> bool:
        return self.machine.state is Dial.OPEN

    @property
    def refused(self) -> bool:
        return self.machine.state is Dial.REFUSED

    def due(self, now: float) -> bool:
        """Whether to say Hello now; the next time is then set, with a growing pause."""
        if self.open or now < self._next:
            return False
        if self.refused:
            self.machine.local(On.RETRY)
        self._next = now + self._pause
        self._pause = min(2 * self._pause, LAST_RETRY)
        return True

    @property
    def deadline(self) -> float | None:
        """When `due` may next be true; None while nobody need ask."""
        return self._next if self.machine.state is Dial.ASKING else None

    def welcomed(self) -> None:
        """P has accepted us, and `judge` has accepted P."""
        self.machine.remote(On.WELCOME)
        self.reason = ""
        self._pause = FIRST_RETRY

    def refuse(self, reason: str, now: float) -> None:
        """P has refused us, or `judge` has refused P."""
        self.machine.remote(On.REFUSE)
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
        self.machine.local(On.LOST)
