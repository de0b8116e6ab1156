"""What an engine thread looks at does not grow with what waits: looks are counted, no time is measured."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from engine_support import READY, Geometry, make_hello, make_pages
from memory_links import MemoryNetwork
from virtual.clock import Clock
from virtual.network import Endpoint, Network

from p2pkv.config import Options
from p2pkv.engine import commands as do
from p2pkv.engine.core import Core
from p2pkv.engine.decode import RequestEntry
from p2pkv.engine.from_prefill import InboundLink
from p2pkv.engine.prefill import PromptEntry
from p2pkv.engine.to_decode import OutboundLink
from p2pkv.kv.cache import RankCache

SHAPE = Geometry(blocks=8)
TOKENS, BLOCKS = 33, ([0, 1, 2],)
LEASE = 6.0
FEW, MANY = 5, 200
"""Requests that wait."""


class Seat:
    """One rank on the virtual clock, which has its turns when they are due."""

    def __init__(self, role: str, port: int, rig: Rig) -> None:
        options = Options(
            role=role, host="127.0.0.1", kv_port=port, lease_seconds=LEASE, chunk_bytes=rig.chunk_bytes
        )  # type: ignore[arg-type]
        _, cache = make_pages(SHAPE, 0)
        links = rig.wires.rank()
        self.address = options.address
        self._clock = rig.clock
        self._due = float("inf")
        self.turns = 0
        self.seen: list[do.Event] = []
        endpoint: Any = Endpoint(f"{role}{port}", self.address, rig.network, self.ring)
        hello = make_hello(options, SHAPE, 0, cache, links.kind, f"incarnation {port}")
        self.core = Core(hello, options, RankCache([cache]), links, endpoint)

    def do(self, *commands: do.Command) -> None:
        for command in commands:
            self.core.do(command)
        self.ring()

    def ring(self) -> None:
        """There is something to hear."""
        self._turn_in(0.0)

    def _turn_in(self, seconds: float) -> None:
        due = self._clock.now + seconds
        if due < self._due:
            self._due = due
            self._clock.after(seconds, lambda: self._turn(due))

    def _turn(self, due: float) -> None:
        if due == self._due:
            self._due = float("inf")
            self.turns += 1
            self.core.turn(self._clock.now)
            self.seen += self.core.events()
            self._turn_in(max(0.001, self.core.pause(self._clock.now)))


class Rig:
    """Some ranks of P and D, each an engine of its own, whose requests wait on both sides."""

    def __init__(self, prefills: int = 1, decodes: int = 1, chunk_bytes: int = 4096) -> None:
        self.chunk_bytes = chunk_bytes
        self.clock = Clock()
        self.network = Network(self.clock, random.Random(7), lambda *_: None)
        self.wires = MemoryNetwork()
        self.ps = [Seat("P", 7000 + number, self) for number in range(prefills)]
        self.ds = [Seat("D", 8000 + number, self) for number in range(decodes)]
        for seat in [*self.ps, *self.ds]:
            seat.ring()

    def pass_by(self, seconds: float) -> None:
        end = self.clock.now + seconds
        self.clock.after(seconds, lambda: None)
        while self.clock.now < end:
            self.clock.step()

    def until(self, condition: Callable[[], bool]) -> None:
        end = self.clock.now + 2 * LEASE
        while not condition():
            assert self.clock.now < end, "it did not come true"
            self.clock.step()

    def wait_with(self, number: int, p: Seat, d: Seat) -> list[str]:
        """So many requests of this pair wait; their keys, when they are connected and their link is up."""
        keys = [f"{p.address}-{d.address}-{each}" for each in range(number)]
        for key in keys:
            d.do(do.Expect(key, p.address, TOKENS, b"digest"))
            p.do(do.Hold(key, d.address))
        self.pass_by(3.0)
        return keys

    def transfer(self, key: str, p: Seat, d: Seat) -> None:
        p.do(do.OfferPrompt(key, d.address, TOKENS, b"digest"), do.PromptBlocks(key, BLOCKS))
        self.until(lambda: do.Begun(key) in d.seen)
        d.do(do.Load(key, 0, TOKENS - 1, BLOCKS))
        p.do(do.Computed(((key, TOKENS),), 0, 4, READY), do.Flush((key,)))
        self.until(lambda: do.Loaded(key) in d.seen and do.BlocksFree(key) in p.seen)
        d.do(do.Forget(key))
        p.do(do.Forget(key))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often anybody reads something of a request on D, or of a prompt on P."""
    counted: Counter[str] = Counter()

    def count(name: str, kind: type) -> None:
        plain = kind.__getattribute__

        def read(self: object, attribute: str) -> Any:
            counted[name] += 1
            return plain(self, attribute)

        monkeypatch.setattr(kind, "__getattribute__", read)

    count("request", RequestEntry)
    count("prompt", PromptEntry)
    return counted


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Counter[object]:
    """How often each link is polled."""
    counted: Counter[object] = Counter()

    def count(kind: type[InboundLink] | type[OutboundLink]) -> None:
        plain = kind.poll

        def poll(self: Any) -> Any:
            counted[self] += 1
            return plain(self)

        monkeypatch.setattr(kind, "poll", poll)

    count(InboundLink)
    count(OutboundLink)
    return counted


def test_a_request_that_waits_is_looked_at_once_a_heartbeat(looks: Counter[str]) -> None:
    rig = Rig()
    (p,), (d,) = rig.ps, rig.ds
    rig.wait_with(MANY, p, d)
    looks.clear()
    p.turns = d.turns = 0
    rig.pass_by(10.0)
    # A heartbeat a second reads a few attributes of each; 50 ticks a second, on both sides, read none.
    assert 0 < looks["request"] < 10 * 10 * MANY
    assert 0 < looks["prompt"] < 10 * 10 * MANY
    # What is due are heartbeats, their answers, and a look at the peers every quarter of a second.
    assert p.turns < 10 * 10 and d.turns < 10 * 10


def test_a_transfer_looks_at_no_other_request(looks: Counter[str]) -> None:
    seen = {}
    for number in (FEW, MANY):
        rig = Rig()
        (p,), (d,) = rig.ps, rig.ds
        keys = rig.wait_with(number, p, d)
        rig.transfer(keys.pop(), p, d)  # the first one may meet a heartbeat
        looks.clear()
        rig.transfer(keys.pop(), p, d)
        seen[number] = looks.copy()
    for kind in ("request", "prompt"):
        assert 0 < seen[MANY][kind] < seen[FEW][kind] + MANY, kind


def test_requests_for_a_p_that_is_not_there_are_not_tried_one_by_one(looks: Counter[str]) -> None:
    rig = Rig()
    (p,), (d,) = rig.ps, rig.ds
    p.core.context.endpoint.listens = False  # type: ignore[attr-defined]
    for number in range(MANY):
        d.do(do.Expect(f"k{number}", p.address, TOKENS, b"digest"))
    rig.pass_by(1.0)
    looks.clear()
    rig.pass_by(1.0)
    assert 0 < looks["request"] < 20 * 50  # of one of them, 50 times
    rig.pass_by(LEASE)
    rig.until(lambda: sum(isinstance(event, do.LoadFailed) for event in d.seen) == MANY)


def test_links_without_anything_under_way_are_polled_now_and_then(polls: Counter[object]) -> None:
    for prefills, decodes in ((4, 1), (1, 4)):
        rig = Rig(prefills, decodes)
        pairs = [(p, d) for p in rig.ps for d in rig.ds]
        keys = {pair: rig.wait_with(60, *pair) for pair in pairs}
        polls.clear()
        busy, *others = pairs
        begin = rig.clock.now
        for key in keys[busy][:50]:
            rig.transfer(key, *busy)
        seconds = rig.clock.now - begin
        one, many = (1, 0) if prefills > 1 else (0, 1)
        (role,) = busy[one].core.roles
        links = {peer.address: peer.link for peer in role.peers}  # type: ignore[attr-defined]
        assert polls[links[str(busy[many].address)]] >= 50
        for pair in others:
            assert polls[links[str(pair[many].address)]] <= 4 * seconds + 4
