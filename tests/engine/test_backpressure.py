"""Staging is small, and some peers are slow: who is slow waits alone, and nothing is dropped."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from p2pkv.engine import commands as do
from p2pkv.engine.roles import DecodeRole
from support.engine import transfers
from support.engine.engines import (
    Engine,
    Geometry,
    Make,
    at_baseline,
    engine_maker,
    engines,
    hold_back,
    on_engine_thread,
    plain_links,
    prefill,
    soon_on_engine_thread,
)
from support.engine.transfers import ask, begin, ends, failure, rest
from support.links.memory import MemoryNetwork
from support.waiting import wait_for

ONE = Geometry((8,))
TOKENS = 65
CHUNK = 4096
STAGING = 4 * CHUNK
"""Of each rank, for all its peers."""

PROMPT = (TOKENS - 1) * 8 * 2 * 8 * 4
"""Bytes of one prompt on the wire: twice the staging. A layer is a chunk."""


@pytest.fixture(params=["memory", "shared-memory", "tcp"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Engines of one rank whose peers may be silent for long."""
    options = {"staging_bytes": STAGING, "chunk_bytes": CHUNK, "lease_seconds": 60.0}
    with engine_maker(plain_links(request.param, STAGING), ONE, **options) as make:
        yield make


def values(engine: Engine) -> dict[str, int]:
    return engine.ranks[0].rank.counters.values


def gauges(engine: Engine) -> dict[str, int]:
    return engine.ranks[0].rank.counters.snapshot()


def blocks_of(number: int) -> list[int]:
    return list(range(5 * number, 5 * number + 5))


def admit(p: Engine, d: Engine, key: str, number: int) -> None:
    """The prompt is computed, and its load is admitted."""
    begin(p, d, key, TOKENS, blocks_of(number), salt=number)
    on_engine_thread(p.ranks[0].rank, lambda: None)  # P knows of all of it: what D wants is cut at once
    d.wait(do.Begun(key))
    d.do(do.Load(key, 0, TOKENS - 1, (blocks_of(number),)))


def arrives(p: Engine, d: Engine, key: str, number: int) -> None:
    transfers.arrives(d, key, TOKENS, blocks_of(number), salt=number)
    ends(p, d, key)


def whole(p: Engine, d: Engine, key: str, number: int) -> None:
    admit(p, d, key, number)
    arrives(p, d, key, number)


def all_at_rest(*some: Engine) -> None:
    wait_for(lambda: all(at_baseline(each) for each in some), what="the baseline of all")
    assert all(values(each)["chunks_filler"] + values(each)["chunks_dropped"] == 0 for each in some)
    assert all(values(each)["links_aborted"] == 0 for each in some)


class Slow:
    """A D that stands still from `stop` on, in one of three ways, until `wake`."""

    def __init__(self, d: Engine, how: str) -> None:
        half = d.ranks[0].rank.core.roles[0]
        assert isinstance(half, DecodeRole)
        self._rank, self._how, self.peers = d.ranks[0].rank, how, half.peers
        self._pump = half.peers.poll
        self._gate = threading.Event()

    def stop(self) -> None:
        match self._how:
            case "frozen":
                asleep = threading.Event()

                def sleep() -> None:
                    asleep.set()
                    assert self._gate.wait(60.0)

                soon_on_engine_thread(self._rank, sleep)
                assert asleep.wait(20.0)
            case "grants nothing":
                self._set(lambda now: False)
            case "takes nothing":
                self._set(self._only_grant)

    def wake(self) -> None:
        self._gate.set()
        self._set(self._pump)

    def _only_grant(self, now: float) -> bool:
        for peer in self.peers:
            self.peers._post(peer)
        return False

    def _set(self, pump: Callable[[float], bool]) -> None:
        on_engine_thread(self._rank, lambda: setattr(self.peers, "poll", pump))


@pytest.mark.parametrize("staging", [STAGING, 2 * STAGING])
def test_a_message_is_filled_up_to_chunk_bytes_or_a_quarter_of_ds_staging(make: Make, staging: int) -> None:
    """As docs/options.md says of `chunk_bytes`: the staging of P does not count."""
    p = make("P", staging_bytes=4 * STAGING, chunk_bytes=4 * STAGING)
    d = make("D", staging_bytes=staging)
    whole(p, d, "a", 0)
    sent = values(p)
    assert (sent["bytes_sent"], sent["chunks_sent"]) == (PROMPT, PROMPT // (staging // 4))
    all_at_rest(p, d)
    small = make("P", staging_bytes=4 * STAGING, chunk_bytes=CHUNK // 2)
    whole(small, d, "b", 1)
    assert values(small)["chunks_sent"] == PROMPT // (CHUNK // 2)
    all_at_rest(small, d)


@pytest.mark.parametrize("how", ["frozen", "grants nothing", "takes nothing"])
def test_a_slow_d_does_not_delay_the_other_ds_of_its_p(make: Make, how: str) -> None:
    p, slow, others = make("P"), make("D"), [make("D") for _ in range(2)]
    standstill = Slow(slow, how)
    whole(p, slow, "before", 0)
    before = values(slow)["bytes_scattered"]
    # It is admitted, and stands still before it has moved anything.
    ask(p, slow, "slow", TOKENS, blocks_of(1))
    wait_for(lambda: gauges(slow)["loads"] == 1)
    standstill.stop()
    prefill(p, "slow", slow.address, TOKENS, blocks_of(1), chunk=TOKENS, salt=1)
    if how == "takes nothing":
        wait_for(lambda: gauges(p)["sends_under_way"] >= 1)
    for round_ in range(2):
        for number, d in enumerate(others):
            whole(p, d, f"{round_} {number}", 3 + 2 * round_ + number)
    assert values(slow)["bytes_scattered"] == before
    standstill.wake()
    arrives(p, slow, "slow", 1)
    all_at_rest(p, slow, *others)


@pytest.mark.parametrize("slow_ones", [1, 2])
def test_slow_ps_do_not_delay_the_other_ps_of_their_d(make: Make, slow_ones: int) -> None:
    """D has posted receives for them, and whoever holds some of its staging leaves as much to others."""
    d, slow, other = make("D"), [make("P") for _ in range(slow_ones)], make("P")
    go_on = []
    for number, p in enumerate(slow):
        whole(p, d, f"before {number}", number)
        go_on.append(hold_back(p))
        admit(p, d, f"slow {number}", number)
    moved = values(d)["bytes_scattered"]
    wait_for(lambda: gauges(d)["receives_posted"] >= slow_ones, what="receives for each slow P")
    for number in range(3):
        whole(other, d, f"{number}", 5 + number)
    assert values(d)["bytes_scattered"] == moved + 3 * PROMPT
    for number, p in enumerate(slow):
        go_on[number]()
        arrives(p, d, f"slow {number}", number)
    all_at_rest(d, other, *slow)


def test_ps_that_hold_receives_leave_room_for_another_and_all_keep_to_the_budget() -> None:
    """Chunks are small beside a link's window, so only D's own share keeps the first from taking all."""
    sizes = {"staging_bytes": STAGING, "chunk_bytes": CHUNK // 4, "lease_seconds": 60.0}
    with engine_maker(plain_links("memory", STAGING), ONE, **sizes) as make:
        d, other, *slow = (make(role) for role in "DPPPP")
        go_on = []
        for number, p in enumerate(slow):
            whole(p, d, f"before {number}", number)
            go_on.append(hold_back(p))
            held = gauges(d)["receives_posted"]
            admit(p, d, f"slow {number}", number)
            wait_for(lambda held=held: gauges(d)["receives_posted"] > held, what="a receive for this P")
            wait_for(
                lambda number=number: gauges(d)["receives_asked"] >= 8 * (number + 1), what="more chunks"
            )
            for _ in range(40):
                on_engine_thread(d.ranks[0].rank, lambda: None)  # whatever may be posted has been
            assert gauges(d)["staging_bytes"] <= STAGING
        for number in range(2):
            whole(other, d, f"{number}", 5 + number)
        for number, p in enumerate(slow):
            go_on[number]()
            arrives(p, d, f"slow {number}", number)
        all_at_rest(d, other, *slow)


def test_too_little_staging_is_counted_and_nothing_is_lost(make: Make) -> None:
    """On D in any case; on P where sends have staging of their own, and D takes none of them for a while."""
    p, d = make("P"), make("D")
    most = {"P": 0, "D": 0}

    def within_budget(engine: Engine, role: str) -> None:
        peers = engine.ranks[0].rank.core.roles[0].peers
        pump = peers.poll

        def watch(now: float) -> bool:
            soon = pump(now)
            most[role] = max(most[role], gauges(engine)["staging_bytes"])
            return soon

        on_engine_thread(engine.ranks[0].rank, lambda: setattr(peers, "poll", watch))

    within_budget(p, "P")
    within_budget(d, "D")
    for number in range(4):
        admit(p, d, f"k{number}", number)
    for number in range(4):
        arrives(p, d, f"k{number}", number)
    assert values(d)["chunks_waited"] > 0
    assert values(d)["chunks_waited"] <= values(d)["chunks_scattered"], "each chunk counts once"
    assert 0 < most["D"] <= STAGING and most["P"] <= STAGING
    assert values(d)["bytes_scattered"] == 4 * PROMPT == values(p)["bytes_sent"]
    all_at_rest(p, d)


def test_staging_that_is_exhausted_on_p_is_counted_there() -> None:
    """D grants more than this P has staging for."""
    network = MemoryNetwork()
    side = {"P": CHUNK, "D": 16 * CHUNK}
    links = lambda role, rank: network.rank(side[role])  # noqa: E731
    with engines(ONE, ONE, links, staging_bytes=16 * CHUNK, chunk_bytes=CHUNK) as (p, d):
        whole(p, d, "k", 0)
        chunks = values(p)["chunks_sent"]
        assert 0 < values(p)["chunks_waited"] < chunks == values(d)["chunks_scattered"]
        assert values(d)["chunks_waited"] == 0
        all_at_rest(p, d)


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_message_that_the_staging_of_either_can_never_hold_ends_its_transfer(who: str) -> None:
    """At once, and with the reason: no timer of the rank stands still, and no other prompt waits for it."""
    network = MemoryNetwork()
    side = {"P": 16 * CHUNK, "D": 16 * CHUNK, who: CHUNK // 2}
    links = lambda role, rank: network.rank(side[role])  # noqa: E731
    with engines(ONE, ONE, links, staging_bytes=16 * CHUNK, chunk_bytes=CHUNK) as (p, d):
        admit(p, d, "k", 0)
        reason = failure(d)
        assert f"a message of {CHUNK} bytes can never fit {CHUNK // 2} bytes of staging" in reason
        ends(p, d, "k")
        rest(p, d)


TWO = Geometry((8,), kv_heads=2, tp=2)
NARROW = {"staging_bytes": 2048, "chunk_bytes": 1024, "lease_seconds": 60.0}
ORDERS = [
    *itertools.product(itertools.permutations("AB"), repeat=2),
    (("A", "B", "C"), ("C", "B", "A")),
    (("A", "B", "C"), ("B", "C", "A")),
]


def one_chunk_at_a_time(p: Engine, d: Engine) -> None:
    """D's window is all of its staging, so that P cuts chunks of half of it, and D grants one of them."""
    for rank in d.ranks:
        half = rank.rank.core.roles[0]
        assert isinstance(half, DecodeRole)
        half.peers.window = NARROW["staging_bytes"]


@pytest.mark.parametrize("reverse", [False, True], ids=["P in order", "P in reverse"])
@pytest.mark.parametrize("orders", ORDERS, ids=lambda orders: " ".join("".join(each) for each in orders))
def test_ranks_that_grant_in_different_orders_do_not_lock_each_other(orders, reverse) -> None:
    """Two ranks of D admit the same transfers in these orders, and there is room for one chunk only."""
    with engines(TWO, TWO, plain_links("memory", 1024), **NARROW) as (p, d):
        one_chunk_at_a_time(p, d)
        keys = sorted(orders[0])
        for key in keys:
            d.do(do.Expect(key, p.address, TOKENS, b"digest"))
            p.do(do.OfferPrompt(key, d.address, TOKENS, b"digest"))
        for key in keys:
            d.wait(do.Begun(key))
        for place, order in enumerate(orders):
            for key in order:
                load = do.Load(key, 0, TOKENS - 1, (blocks_of(keys.index(key)),))
                d.ranks[place].rank.do(load)
        for key in reversed(keys) if reverse else keys:
            number = keys.index(key)
            prefill(p, key, d.address, TOKENS, blocks_of(number), chunk=32, salt=number)
        for key in keys:
            arrives(p, d, key, keys.index(key))
        for each in d.ranks:
            assert each.rank.counters.values["chunks_waited"] > 0
        all_at_rest(p, d)
