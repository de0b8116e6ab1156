"""A P and a D on the virtual clock, with few ranks: a test orders and waits as with support/engine's.

Both are the product's own cores. The network, the links and the time are made up, so a wait of many leases
costs nothing, and a test may say to the moment how long something lasts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from virtual.clock import Alarm, Clock
from virtual.network import Endpoint, Network

from p2pkv.config import Options
from p2pkv.engine import commands as do
from p2pkv.engine.core import Core
from p2pkv.engine.core_liveness import Beat
from p2pkv.kv.cache import RankCache
from p2pkv.pairing import Address
from p2pkv.protocol.messages import Hello
from support.engine import engines, transfers
from support.engine.transfers import BLOCKS, TOKENS, value
from support.links.faulty import Faults, FaultyLinks
from support.links.memory import MemoryLinks, MemoryNetwork

TURN = 0.001
"""Seconds between something that wakes an engine's thread and its turn."""

LEASE, STALL = 10.0, 16.0
LONG = 30.0
"""Seconds: several leases, and longer than a stall."""

GRACE = 5.0
"""Seconds after its lease in which whatever was given up has ended: the promise of docs/design.md."""

HALF = TOKENS // 2
TOKEN = 4 * 2 * 8 * 4
"""Bytes of a token."""


class VirtualRank:
    """A core whose turns come by the clock, unless its thread stands still until `still_until`."""

    def __init__(
        self,
        role: str,
        port: int,
        pair: VirtualPair,
        geometry: engines.Geometry,
        number: int,
        **options: object,
    ) -> None:
        own = "both" if pair.both else role
        opts = Options(role=own, host="127.0.0.1", kv_port=port, **engines.DEFAULTS | options)  # type: ignore[arg-type]
        self.wires = FaultyLinks(pair.wires.rank(opts.staging_bytes), Faults())
        name = f"{role} {pair.draw.getrandbits(64):x}"
        self.pages, cache, hello = pair.describe(role, opts, geometry, number)
        self.hello = replace(hello, incarnation=name)
        self.endpoint = Endpoint(name, opts.address.shifted(number), pair.network, self.ring)
        self._clock = pair.clock
        self._turns = Alarm(pair.clock, self._turn)
        self.still_until = 0.0
        self.beat: Beat | None = None
        """What its engine core says of itself as often as it is looked at; None: nothing."""
        self.alive = True
        self.turns = 0
        self.core = Core(self.hello, opts, cache, self.wires, self.endpoint)
        self.context, self.steps, self.counters = self.core.context, self.core.steps, self.core.counters
        self.revoke, self.events = self.core.revoke, self.core.events
        self.steps.read_beats = lambda: [] if self.beat is None else [self.beat]
        self.ring()

    def do(self, command: do.Command) -> None:
        self.core.do(command)
        self.ring()

    def ring(self) -> None:
        self._turns.within(TURN)

    def _turn(self) -> None:
        if not self.alive:
            return
        if self._clock.now < self.still_until:
            self._turns.within(self.still_until - self._clock.now)
            return
        self.turns += 1
        self.core.turn(self._clock.now)
        self._turns.within(max(TURN, self.core.pause(self._clock.now)))

    def stand_still(self, seconds: float) -> None:
        """Its thread does nothing for so long; connections stay up, and nobody answers a new one."""
        self.still_until = self._clock.now + seconds
        self.endpoint.answers = False
        self._clock.after(seconds, lambda: setattr(self.endpoint, "answers", True))

    def vanish(self) -> None:
        """Die as by kill -9."""
        self.alive = False
        self.endpoint.vanish()


class VirtualEngine(engines.Engine):
    pair: VirtualPair

    @property
    def rank(self) -> VirtualRank:
        return self.ranks[0].rank

    def wait(self, event: do.Event, seconds: float = 20.0) -> None:
        self.pair.until(lambda: self.all_heard(event), seconds, f"{event} on {self.address}")

    @property
    def failures(self) -> list[do.Event]:
        return self.ranks[0].events(do.LoadFailed)

    def hang(self) -> None:
        """The forward thread enters a step that has work, and stays there."""
        self.rank.steps.begin(self.pair.clock.now)

    def wake(self) -> None:
        self.rank.steps.end()

    def core(self, steps: int = 1, **state: bool) -> None:
        """What its engine core says of itself from now on."""
        self.rank.beat = Beat(steps=steps, **{"work": False} | state)

    def core_stops(self) -> None:
        assert self.rank.beat is not None
        self.rank.beat = None


class VirtualPair:
    """`p` and `d`, with these options. `both`: each has both roles. `on_d`: D's geometry, if another."""

    def __init__(
        self,
        geometry: engines.Geometry | None = None,
        both: bool = False,
        on_d: engines.Geometry | None = None,
        **options: object,
    ) -> None:
        self.both = both
        self.geometry = geometry or engines.Geometry()
        self.draw = random.Random(1)
        self.clock = Clock()
        self.network = Network(self.clock, self.draw, lambda *_: None)
        self.wires = MemoryNetwork()
        self.options = options
        self.ports = itertools.count(8000, 10)
        self.p, self.d = self.engine("P", 7000), self.engine("D", 7010, on_d)

    def describe(
        self, role: str, options: Options, geometry: engines.Geometry, number: int
    ) -> tuple[list[Any], RankCache, Hello]:
        pages, cache = engines.make_pages(geometry, number, 0.0 if role == "P" else -1.0)
        about = engines.cache_of(geometry, cache), cache.digest_name, MemoryLinks.kind
        return pages, RankCache([cache]), engines.hello_of(options, number, geometry.world, *about)

    def engine(
        self, role: str, port: int, geometry: engines.Geometry | None = None, **options: object
    ) -> VirtualEngine:
        """One more engine, with options of its own; at a port that was another's, its next incarnation."""
        geometry, ranks = geometry or self.geometry, []
        for number in range(geometry.world):
            rank: Any = VirtualRank(role, port, self, geometry, number, **self.options | options)
            ranks.append(engines.TestRank(geometry, rank, rank.pages, rank.hello, rank.wires))
        engine = VirtualEngine(Address("127.0.0.1", port), geometry, ranks)
        engine.pair = self
        return engine

    def more(self, role: str, geometry: engines.Geometry | None = None, **options: object) -> VirtualEngine:
        return self.engine(role, next(self.ports), geometry, **options)

    def until(
        self, condition: Callable[[], object], seconds: float = 20.0, what: str = "the condition"
    ) -> None:
        end = self.clock.now + seconds
        while not condition():
            assert self.clock.now <= end, f"{what} did not come true in {seconds:g} s"
            self.clock.step()

    def lasts(self, condition: Callable[[], object], seconds: float) -> None:
        end = self.clock.now + seconds
        self.clock.after(seconds, lambda: None)
        while self.clock.now < end:
            assert condition(), f"it held only until {end - self.clock.now:.2f} s before the end"
            self.clock.step()

    def rest(self, *keys: str) -> None:
        if keys:
            transfers.ends(self.p, self.d, *keys)
        self.until(lambda: engines.at_baseline(self.p) and engines.at_baseline(self.d), what="the baseline")

    # One prompt of 96 tokens: what P and D are told of it, and how far it has come.

    def expect(self, key: str = "k", tokens: int = TOKENS) -> None:
        transfers.expect(self.p, self.d, key, tokens=tokens)

    def computed(self, key: str = "k") -> None:
        engines.prefill(self.p, key, self.d.address, TOKENS, BLOCKS, chunk=TOKENS)

    def offered(self) -> None:
        """P has computed what D waits for, and D has no blocks for it yet."""
        self.expect()
        self.computed()
        self.d.wait(do.Begun("k"))

    def queued(self) -> None:
        """D waits for a prompt that P has in its queue."""
        self.expect()
        self.p.do(do.HoldPrompt("k", self.d.address))

    def load(self, key: str = "k") -> None:
        """D has blocks for it, and gets what P has computed."""
        transfers.load(self.d, key)
        transfers.arrives(self.d, key, seconds=LEASE)

    def half_a_push(self) -> None:
        """D waits for 96 tokens, of which 48 are computed and pushed."""
        transfers.ask(self.p, self.d)
        engines.step(self.p, "k", BLOCKS, 0, HALF)
        self.until(lambda: value(self.d, "bytes_scattered") == HALF * TOKEN, what="half of the prompt")

    def served(self, key: str = "k") -> None:
        self.computed(key)
        self.load(key)
        self.ends_well(key)

    def ends_well(self, key: str = "k") -> None:
        """What has been loaded leaves nothing, and nothing was lost on the way."""
        self.rest(key)
        self.nothing_was_lost()

    def nothing_was_lost(self) -> None:
        for engine in (self.p, self.d):
            lost = "transfers_failed", "links_aborted", "handshakes_failed", "messages_refused"
            assert {name: value(engine, name) for name in lost} == dict.fromkeys(lost, 0)

    def fails(self, words: str, seconds: float = GRACE) -> None:
        """D's one request fails within so many seconds, and says why in these words."""
        self.until(lambda: self.d.failures, seconds, "the end of the request")
        (failed,) = self.d.failures
        assert words in failed.reason  # type: ignore[attr-defined]

    def kept(self) -> bool:
        return not self.d.failures and not self.p.all_heard(do.BlocksFree("k"))
