"""Hypothesis moves the two engines of world.py.

It computes, preempts, delivers one message, loses a connection, kills and restarts, replays, lets time pass.
The invariants of the design are checked in the engines as they act, after every step, and at the end, when
everything must be at its baseline.
"""

from __future__ import annotations

from itertools import accumulate

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from protocol.faults import FAULTS
from protocol.world import BEAT, LEASE, Beside, World

from p2pkv.sharding import Shape

KEYS = ("a", "b", "c")
STEPS = ("p", "d", "transmit", "speak", "carry", "land")


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two ways to divide one small model over up to 4 ranks."""
    layers, heads = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2]))
    return draw(_shape(layers, heads)), draw(_shape(layers, heads))


@st.composite
def _shape(draw: st.DrawFn, layers: int, heads: int) -> Shape:
    stages = draw(st.integers(1, min(2, layers)))
    cut = draw(st.integers(1, layers - 1)) if stages == 2 else layers
    return Shape((cut, layers - cut) if stages == 2 else (layers,), heads, draw(st.sampled_from([1, 2])))


ALONG = ("window", "state")
"""KV groups beside the first one."""


@st.composite
def _beside(draw: st.DrawFn, kinds: tuple[str, ...], prefill: Shape, decode: Shape) -> tuple[Beside, ...]:
    """One layer each, on any stage of either side."""

    def layers(shape: Shape) -> tuple[int, ...]:
        stage = draw(st.integers(0, len(shape.layers) - 1))
        return tuple(int(each == stage) for each in range(len(shape.layers)))

    return tuple(
        Beside(
            layers(prefill),
            layers(decode),
            draw(st.sampled_from([1, 2])),
            24,
            window=draw(st.sampled_from([1, 3, 8])) if kind == "window" else 0,
            once=kind == "state",
        )
        for kind in kinds
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    prefill, decode = draw(shapes())
    beside = draw(_beside(draw(st.sampled_from([(), ALONG[:1], ALONG[1:], ALONG])), prefill, decode))
    row = max(8 * prefill.heads, *(each.heads * each.row for each in beside), 0)
    return World(
        prefill,
        decode,
        unit=draw(st.sampled_from([1, 1, 2])),
        chunk_bytes=draw(st.integers(1, 8)) * 8,
        window=draw(st.integers(1, 8)) * row,
        beside=beside,
        ahead=draw(st.booleans()),
        verify=draw(st.booleans()),
    )


prefills = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(lambda parts: tuple(accumulate(parts)))
some = st.integers(0, 1000)


class Conversation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: World

    @initialize(
        world=worlds(),
        chunks=st.lists(prefills, min_size=1, max_size=len(KEYS)),
        early=st.lists(st.sampled_from(["both", "both", "p", "d", "none"]), min_size=3, max_size=3),
        faults=st.integers(0, 4),
        warm=st.booleans(),
    )
    def begin(
        self, world: World, chunks: list[tuple[int, ...]], early: list[str], faults: int, warm: bool
    ) -> None:
        """`warm`: what has come to both sides is admitted, so that chunks flow from the first step on."""
        self.world, self.faults, self._fair_at = world, faults, world.now
        for key, each, where in zip(KEYS, chunks, early, strict=False):
            world.add(key, each)
            if where in ("both", "p"):
                world.arrive_at_p(key)
            if where in ("both", "d"):
                world.arrive_at_d(key)
        for key in world.requests if warm else ():
            world.settle()
            for rank in world.p:
                if key in rank.senders:
                    rank.step(key, 1)
            world.settle()
            if world.admissible(key):
                world.admit(key, 0, world.requests[key].tokens - 1)

    def _key(self, which: int) -> str:
        keys = list(self.world.requests)
        return keys[which % len(keys)]

    # The engines at work.

    @rule(which=some, rank=some, layers=st.integers(1, 5), alike=st.booleans())
    def compute(self, which: int, rank: int, layers: int, alike: bool) -> None:
        """One P rank, or all of them, computes some more layers."""
        key, ranks = self._key(which), self.world.p
        for chosen in ranks if alike else ranks[rank % max(1, len(ranks)) :][:1]:
            if key in chosen.senders:
                chosen.step(key, layers)

    @rule(which=some)
    def preempt(self, which: int) -> None:
        ranks = [rank for rank in self.world.p if (key := self._key(which)) in rank.senders]
        if any(not rank.prefills[key].done for rank in ranks):
            for rank in ranks:
                rank.preempt(key)

    @rule(which=some, start=st.integers(0, 8), tail=st.integers(0, 2))
    def admit(self, which: int, start: int, tail: int) -> None:
        """D's scheduler gives the request pages; a start at the end or beyond means nothing is wanted."""
        key, world = self._key(which), self.world
        if world.admissible(key):
            world.admit(key, start * world.unit, world.requests[key].tokens - tail)

    @rule(which=some, what=st.sampled_from(["p", "d", "nothing wanted", "failed", "forget"]), rank=some)
    def schedule(self, which: int, what: str, rank: int) -> None:
        """What else schedulers say: requests arrive, end, are forgotten, are in D's own cache."""
        key, world = self._key(which), self.world
        if what == "p" and world.p and not any(key in each.prefills for each in world.p):
            world.arrive_at_p(key)
        elif what == "d" and world.d and not world.loading(key):
            world.requests[key].disturbed |= any(key in each.attempts for each in world.d)
            world.arrive_at_d(key)
        elif what == "nothing wanted" and world.loading(key) and key not in world.wants:
            world.admit(key, 0, 0)
        elif what == "failed":
            world.give_up_failed()
        elif what == "forget":
            both = [*world.p, *world.d]
            if both:
                both[rank % len(both)].forget(key)

    @rule(what=st.sampled_from(STEPS), which=some, many=st.integers(1, 4))
    def step(self, what: str, which: int, many: int) -> None:
        """One part moves while the others stand still."""
        world = self.world
        pairs, links = sorted(world.lines), list(world.links.values())
        for _ in range(many):
            if what in ("p", "d") and pairs:
                world.deliver(pairs[which % len(pairs)], what)
            elif what == "transmit":
                peers = [(rank, peer) for rank in world.p for peer in rank.peers.values()]
                if peers:
                    rank, peer = peers[which % len(peers)]
                    rank.transmit(peer)
            elif what == "speak":
                speakers = [(rank, peer) for rank in world.p for peer in rank.peers.values()]
                if speakers:
                    rank, peer = speakers[which % len(speakers)]
                    rank.speak(peer)
            elif what == "carry" and links:
                links[which % len(links)].move()
            elif what == "land" and pairs and world.d:
                p, d = pairs[which % len(pairs)]
                world.d[d].pump(p)

    @rule(times=st.integers(1, 8))
    def move(self, times: int) -> None:
        for _ in range(times):
            self.world.move()

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def beat(self) -> None:
        """A while in which much is delivered, if not all."""
        for _ in range(20):
            if not self.world.move():
                self._fair_at = self.world.now
                break
        self.world.advance(BEAT)

    # What goes wrong.

    @precondition(lambda self: self.faults > 0)
    @rule(what=st.sampled_from(sorted(FAULTS)), which=some, one=st.booleans(), other=st.booleans())
    def fault(self, what: str, which: int, one: bool, other: bool) -> None:
        if self.faults == 0:
            return
        self.faults -= 1
        FAULTS[what](self.world, which, one, other)

    @rule()
    def restart(self) -> None:
        if not self.world.p:
            self.world.start_p()
        if not self.world.d:
            self.world.start_d()

    # What must hold.

    @invariant()
    def bounds(self) -> None:
        if hasattr(self, "world"):
            if self.world.now - self._fair_at > LEASE / 3:
                self.world.disturb()
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            outcomes(self.world)


def outcomes(world: World) -> None:
    """Every transfer of a living process has one outcome, and a good one if nothing went wrong."""
    for key, request in world.requests.items():
        if request.on_d:
            for rank in world.d:
                ends = [end for end in world.ends if end[:4] == ("D", rank.incarnation, rank.rank, key)]
                assert ends, f"D{rank.rank} has no outcome for {key}"
                if request.on_p and not request.disturbed:
                    assert all(world.ends[end].ok for end in ends), f"{key} failed on D: {world.ends}"
        if request.on_p:
            for prefill in world.p:
                end = ("P", prefill.incarnation, prefill.rank, key, 0)
                assert end in world.ends, f"P{prefill.rank} has no outcome for {key}"
                if request.on_d and not request.disturbed:
                    assert world.ends[end].ok, f"{key} failed on P: {world.ends}"
