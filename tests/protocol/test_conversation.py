"""Both roles at once, several ranks each, under every fault that a seed can think of.

Hypothesis moves the two engines of world.py: it computes, preempts, delivers one message, loses a
connection, kills and restarts, replays, lets time pass. The invariants of the design are checked in
the engines as they act, after every step, and at the end, when everything must be at its baseline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from protocol.wires import Violation
from protocol.world import BEAT, LEASE, World

from p2pkv.protocol import sender
from p2pkv.sharding import Shape

KEYS = ("a", "b", "c")
STEPS = ("p", "d", "transmit", "speak", "carry", "land")


@pytest.fixture(autouse=True)
def few_announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So few that small prompts reach the bound."""
    monkeypatch.setattr(sender, "MAX_ANNOUNCED", 3)
    yield


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


@st.composite
def worlds(draw: st.DrawFn) -> World:
    prefill, decode = draw(shapes())
    row = 8 * prefill.kv_heads
    return World(
        prefill,
        decode,
        unit=draw(st.sampled_from([1, 1, 2])),
        chunk_bytes=draw(st.integers(1, 8)) * 8,
        window=draw(st.integers(1, 8)) * row,
        whole=draw(st.booleans()),
        ahead=draw(st.booleans()),
        verify=draw(st.booleans()),
    )


prefills = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(lambda parts: tuple(accumulate(parts)))
some = st.integers(0, 1000)


# What goes wrong: (world, a number to choose with, two flags).


def _choose(world: World, which: int) -> str:
    keys = list(world.requests)
    return keys[which % len(keys)]


def freeze(world: World, which: int, one: bool, other: bool) -> None:
    """Nothing moves for a while."""
    world.disturb()
    world.advance(LEASE * (which % 4 + 1) / 2)


def abort_on_p(world: World, which: int, one: bool, other: bool) -> None:
    key = _choose(world, which)
    world.requests[key].disturbed = True
    for rank in world.p:
        if key in rank.senders:
            rank.abort(key, "the client of P left")


def abort_on_d(world: World, which: int, one: bool, other: bool) -> None:
    key = _choose(world, which)
    world.requests[key].disturbed = True
    for rank in world.d:
        rank.cancel(key, "the client of D left")


def cut(world: World, which: int, tell_p: bool, tell_d: bool) -> None:
    """A control connection breaks; the transport mends it."""
    pairs = sorted(world.lines)
    if pairs and world.d:
        world.cut(pairs[which % len(pairs)], tell_p, tell_d)


def replay(world: World, which: int, one: bool, other: bool) -> None:
    """Something that was delivered comes again."""
    pairs = sorted(world.lines)
    if pairs:
        world.disturb()
        world.lines[pairs[which % len(pairs)]].replay(which // len(pairs))


def break_link(world: World, which: int, one: bool, other: bool) -> None:
    links = list(world.links.values())
    if links:
        world.disturb()
        links[which % len(links)].broken = True


def spoil(world: World, which: int, one: bool, other: bool) -> None:
    """What a link carries changes on the way; without checksums D would believe it."""
    links = list(world.links.values())
    if links and world.verify:
        world.disturb()
        links[which % len(links)].spoil = which // len(links)


def kill_p(world: World, which: int, loud: bool, again: bool) -> None:
    world.kill_p(loud)
    if again:
        world.start_p()


def kill_d(world: World, which: int, loud: bool, again: bool) -> None:
    world.kill_d(loud)
    if again:
        world.start_d()


FAULTS: dict[str, Callable[[World, int, bool, bool], None]] = {
    fault.__name__: fault
    for fault in (freeze, abort_on_p, abort_on_d, cut, replay, replay, break_link, spoil, kill_p, kill_d)
}


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


# Longer walks than Hypothesis makes, in larger worlds, where faults mostly meet chunks that are under way.


def walk(seed: int | str, steps: int = 250) -> World:
    chance = Random(seed)
    machine = Conversation()
    layers, heads = chance.randint(1, 4), chance.choice([1, 2, 4])
    machine.begin(
        world=World(
            _random_shape(chance, layers, heads),
            _random_shape(chance, layers, heads),
            unit=chance.choice([1, 1, 1, 3]),
            chunk_bytes=chance.randint(1, 24) * 8,
            window=chance.randint(2, 12) * 8 * heads,
            whole=chance.random() < 0.1,
            ahead=chance.random() < 0.5,
            verify=chance.random() < 0.5,
        ),
        chunks=[tuple(accumulate(chance.choices(range(1, 20), k=chance.randint(1, 3)))) for _ in KEYS],
        early=[chance.choice(["both", "both", "both", "p", "d"]) for _ in KEYS],
        faults=chance.choice([0, 0, 1, 2, 3, 6]),
        warm=chance.random() < 0.7,
    )

    def number() -> int:
        return chance.randrange(1000)

    def coin() -> bool:
        return chance.random() < 0.5

    speeds = chance.choices([1, 4, 16], k=len(STEPS))
    acts: dict[Callable[[], object], int] = {
        lambda: machine.compute(number(), number(), chance.randint(1, 3), coin()): 6,
        lambda: machine.preempt(number()): chance.choice([0, 1, 4]),
        lambda: machine.admit(number(), chance.choice([0, 0, 0, 1, 4]), chance.randint(0, 2)): 4,
        lambda: machine.schedule(number(), chance.choice(["p", "d", "failed", "forget"]), number()): 1,
        lambda: machine.schedule(number(), "nothing wanted", 0): chance.choice([0, 0, 0, 1]),
        lambda: machine.step(chance.choices(STEPS, speeds)[0], number(), chance.randint(1, 3)): 12,
        lambda: machine.move(chance.randint(1, 3)): chance.choice([1, 6]),
        lambda: machine.wait(chance.choice([0.1, 1.0])): 2,
        machine.beat: 1,
        machine.restart: 1,
        lambda: machine.fault(chance.choice(sorted(FAULTS)), number(), coin(), coin()): 1,
    }
    for act in chance.choices(list(acts), list(acts.values()), k=steps):
        act()
        machine.bounds()
    machine.teardown()
    return machine.world


def _random_shape(chance: Random, layers: int, heads: int) -> Shape:
    tp = chance.choice([1, 2])
    if layers == 1 or chance.random() < 0.5:
        return Shape((layers,), heads, tp)
    cut = chance.randint(1, layers - 1)
    return Shape((cut, layers - cut), heads, tp)


def test_a_chunk_that_changes_on_the_way_fails_its_load_and_the_next_one_is_right() -> None:
    world = _spoilt(verify=True)
    world.settle()
    assert world.corrupt == 1
    world.give_up_failed()
    world.drain()
    assert world._failed(world.d[0], "spoilt")
    world.add("next", (10,))
    world.arrive_at_p("next")
    world.arrive_at_d("next")
    world.drain()
    assert world.corrupt == 1 and not world._failed(world.d[0], "next")
    world.requests["spoilt"].disturbed = True
    outcomes(world)


def test_without_checksums_that_chunk_is_written() -> None:
    world = _spoilt(verify=False)
    with pytest.raises(Violation, match=r"writes .*garbage"):
        world.settle()


def _spoilt(verify: bool) -> World:
    """D has just said what it wants, and something of the first chunk will change on its way."""
    shape = Shape((2,), 1, 1)
    world = World(shape, shape, unit=1, chunk_bytes=64, window=64, verify=verify)
    world.add("spoilt", (10,))
    world.arrive_at_p("spoilt")
    world.arrive_at_d("spoilt")
    world.settle()
    world.p[0].step("spoilt", 2)
    world.advance(BEAT)
    world.settle()
    (link,) = world.links.values()
    link.spoil = 2
    world.admit("spoilt", 0, 9)
    return world


@pytest.mark.parametrize("seed", range(int(os.environ.get("P2PKV_WALKS", "120"))))
def test_a_long_walk(seed: int) -> None:
    walk(seed)


Conversation.TestCase.settings = settings(
    deadline=None,
    max_examples=int(os.environ.get("P2PKV_EXAMPLES", "60")),
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)
TestConversation = Conversation.TestCase
