"""Staging is small, and some peers are slow: who is slow waits alone, and nothing is dropped. Cores on a
virtual clock."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from virtual.pair import VirtualEngine, VirtualPair, value

from p2pkv.engine import commands as do
from support.engine import transfers
from support.engine.engines import Geometry, at_baseline, prefill
from support.engine.transfers import ask, begin, ends, expect

ONE = Geometry((8,))
TOKENS = 65
CHUNK = 4096
STAGING = 4 * CHUNK
"""Of each rank, for all its peers."""

LEASE = 60.0
PROMPT = (TOKENS - 1) * 8 * 2 * 8 * 4
"""Bytes of one prompt on the wire: twice the staging. A layer is a chunk."""


class Rig(VirtualPair):
    """Engines whose peers may be silent for long."""

    def __init__(self, geometry: Geometry = ONE, **sizes: int) -> None:
        usual = {"staging_bytes": STAGING, "chunk_bytes": CHUNK, "lease_seconds": LEASE}
        super().__init__(geometry, **usual | sizes)
        self.all = [self.p, self.d]

    def more(self, role: str, geometry: Geometry | None = None, **options: object) -> VirtualEngine:
        self.all.append(super().more(role, geometry, **options))
        return self.all[-1]

    def admit(self, p: VirtualEngine, d: VirtualEngine, key: str, number: int) -> None:
        begin(p, d, key, TOKENS, blocks_of(number), salt=number)
        transfers.load(d, key, TOKENS, blocks_of(number))

    def arrives(self, p: VirtualEngine, d: VirtualEngine, key: str, number: int) -> None:
        transfers.arrives(d, key, TOKENS, blocks_of(number), salt=number)
        ends(p, d, key)

    def whole(self, p: VirtualEngine, d: VirtualEngine, key: str, number: int) -> None:
        self.admit(p, d, key, number)
        self.arrives(p, d, key, number)

    def all_at_rest(self) -> None:
        self.until(lambda: all(map(at_baseline, self.all)), what="the baseline of all")
        for each in self.all:
            lost = "chunks_filler", "chunks_dropped", "links_aborted"
            assert {name: value(each, name) for name in lost} == dict.fromkeys(lost, 0)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def blocks_of(number: int) -> list[int]:
    return list(range(5 * number, 5 * number + 5))


def has_staging(engine: VirtualEngine, nbytes: int) -> None:
    """The links of its ranks have so much, whatever its option says."""
    for each in engine.ranks:
        each.links.staging.limit = each.links.staging.most = nbytes


def hold(engine: VirtualEngine, poll: Callable[[Any, float], object] | None = None) -> Callable[[], None]:
    """Its links move no more, or only so; the result lets them go on."""
    peers: Any = engine.rank.core.roles[0].peers
    plain = peers.poll
    peers.poll = lambda now: poll(peers, now) if poll else None
    return lambda: setattr(peers, "poll", plain)


def only_grant(peers: Any, now: float) -> None:
    for peer in peers:
        peers._post(peer)


@pytest.mark.parametrize("staging", [STAGING, 2 * STAGING])
def test_a_message_is_filled_up_to_chunk_bytes_or_a_quarter_of_ds_staging(rig: Rig, staging: int) -> None:
    """As docs/options.md says of `chunk_bytes`: the staging of P does not count."""
    p = rig.more("P", staging_bytes=4 * STAGING, chunk_bytes=4 * STAGING)
    d = rig.more("D", staging_bytes=staging)
    rig.whole(p, d, "a", 0)
    assert (value(p, "bytes_sent"), value(p, "chunks_sent")) == (PROMPT, PROMPT // (staging // 4))
    small = rig.more("P", staging_bytes=4 * STAGING, chunk_bytes=CHUNK // 2)
    rig.whole(small, d, "b", 1)
    assert value(small, "chunks_sent") == PROMPT // (CHUNK // 2)
    rig.all_at_rest()


@pytest.mark.parametrize("how", ["frozen", "grants nothing", "takes nothing"])
def test_a_slow_d_does_not_delay_the_other_ds_of_its_p(rig: Rig, how: str) -> None:
    p, slow, others = rig.p, rig.d, [rig.more("D") for _ in range(2)]
    rig.whole(p, slow, "before", 0)
    before = value(slow, "bytes_scattered")
    # It is admitted, and stands still before it has moved anything.
    ask(p, slow, "slow", TOKENS, blocks_of(1))
    rig.until(lambda: value(slow, "loads") == 1)
    if how == "frozen":
        slow.rank.stand_still(LEASE / 4)
    go_on = hold(slow, only_grant if how == "takes nothing" else None)
    prefill(p, "slow", slow.address, TOKENS, blocks_of(1), chunk=TOKENS, salt=1)
    rig.until(lambda: value(p, "sends_under_way") >= (how == "takes nothing"))
    for round_ in range(2):
        for number, d in enumerate(others):
            rig.whole(p, d, f"{round_} {number}", 3 + 2 * round_ + number)
    assert value(slow, "bytes_scattered") == before
    go_on()
    rig.arrives(p, slow, "slow", 1)
    rig.all_at_rest()


@pytest.mark.parametrize("slow_ones", [1, 4])
def test_ps_that_hold_receives_leave_room_for_another_and_all_keep_to_the_budget(slow_ones: int) -> None:
    """Chunks are small beside a link's window, so only D's own share keeps the first from taking all."""
    rig = Rig(chunk_bytes=CHUNK // 4)
    d, other, slow, go_on = rig.d, rig.p, [rig.more("P") for _ in range(slow_ones)], []
    for number, p in enumerate(slow):
        rig.whole(p, d, f"before {number}", number)
        go_on.append(hold(p))
        held = value(d, "receives_posted")
        rig.admit(p, d, f"slow {number}", number)
        rig.clock.pass_by(1.0)
        assert value(d, "receives_posted") > held and value(d, "receives_asked") >= 8 * (number + 1)
        assert value(d, "staging_bytes") <= STAGING
    moved = value(d, "bytes_scattered")
    for number in range(2):
        rig.whole(other, d, f"{number}", 5 + number)
    assert value(d, "bytes_scattered") == moved + 2 * PROMPT
    for number, p in enumerate(slow):
        go_on[number]()
        rig.arrives(p, d, f"slow {number}", number)
    rig.all_at_rest()


def test_too_little_staging_is_counted_and_nothing_is_lost(rig: Rig) -> None:
    p, d, most = rig.p, rig.d, {"P": 0, "D": 0}
    for number in range(4):
        rig.admit(p, d, f"k{number}", number)

    def loaded() -> bool:
        for engine in (p, d):
            role = engine.rank.hello.role
            most[role] = max(most[role], value(engine, "staging_bytes"))
        return all(d.all_heard(do.Loaded(f"k{number}")) for number in range(4))

    rig.until(loaded)
    for number in range(4):
        rig.arrives(p, d, f"k{number}", number)
    assert value(d, "chunks_waited") > 0
    assert value(d, "chunks_waited") <= value(d, "chunks_scattered"), "each chunk counts once"
    assert 0 < most["D"] <= STAGING and most["P"] <= STAGING
    assert value(d, "bytes_scattered") == 4 * PROMPT == value(p, "bytes_sent")
    rig.all_at_rest()


def test_staging_that_is_exhausted_on_p_is_counted_there() -> None:
    """D grants more than this P has staging for."""
    rig = Rig(staging_bytes=16 * CHUNK)
    has_staging(rig.p, CHUNK)
    rig.whole(rig.p, rig.d, "k", 0)
    chunks = value(rig.p, "chunks_sent")
    assert 0 < value(rig.p, "chunks_waited") < chunks == value(rig.d, "chunks_scattered")
    assert value(rig.d, "chunks_waited") == 0
    rig.all_at_rest()


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_message_that_the_staging_of_either_can_never_hold_ends_its_transfer(who: str) -> None:
    """At once, and with the reason: no timer of the rank stands still, and no other prompt waits for it."""
    rig = Rig(staging_bytes=16 * CHUNK)
    has_staging(rig.p if who == "P" else rig.d, CHUNK // 2)
    rig.admit(rig.p, rig.d, "k", 0)
    rig.fails(f"a message of {CHUNK} bytes can never fit {CHUNK // 2} bytes of staging", 1.0)
    rig.rest("k")


TWO = Geometry((8,), kv_heads=2, tp=2)
NARROW = 2048
ORDERS = [
    *itertools.product(itertools.permutations("AB"), repeat=2),
    (("A", "B", "C"), ("C", "B", "A")),
    (("A", "B", "C"), ("B", "C", "A")),
]


@pytest.mark.parametrize("reverse", [False, True], ids=["P in order", "P in reverse"])
@pytest.mark.parametrize("orders", ORDERS, ids=lambda orders: " ".join("".join(each) for each in orders))
def test_ranks_that_grant_in_different_orders_do_not_lock_each_other(
    orders: tuple[tuple[str, ...], ...], reverse: bool
) -> None:
    """Two ranks of D admit the same transfers in these orders, and there is room for one chunk only."""
    rig = Rig(TWO, staging_bytes=NARROW, chunk_bytes=1024)
    p, d, keys = rig.p, rig.d, sorted(orders[0])
    for engine in (p, d):
        has_staging(engine, NARROW // 2)
    for rank in d.ranks:
        rank.rank.core.decode.peers.window = NARROW  # type: ignore[union-attr]
    expect(p, d, *keys, tokens=TOKENS)
    for key in keys:
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
        rig.arrives(p, d, key, keys.index(key))
    for each in d.ranks:
        assert each.rank.counters.values["chunks_waited"] > 0
    rig.all_at_rest()


def test_ps_that_come_later_get_room_while_others_push_without_end() -> None:
    """D has room for four messages, and five P's have long prompts for it."""
    rig = Rig(Geometry(blocks=480))
    ps = {key: rig.p if key == "a" else rig.more("P") for key in "abcdefgh"}
    tokens = {key: 96 if key in "fgh" else 60 * 16 for key in ps}
    for key, p in ps.items():
        begin(p, rig.d, key, tokens[key], list(range(60)))
        rig.d.wait(do.Begun(key))
    for number, key in enumerate(ps):
        transfers.load(rig.d, key, tokens[key], [60 * number + each for each in range(60)])
    for key in "fgh":
        rig.d.wait(do.Loaded(key))
    assert not any(rig.d.all_heard(do.Loaded(key)) for key in "abcde")
