"""KV that P pushes before D's request has come: it is right, bounded, and in nobody's way. Cores on a virtual
clock; what the two conversations decide is in tests/protocol/test_prefetch.py.
"""

import pytest
import torch
from virtual.pair import LEASE, TOKEN, VirtualPair, value

from p2pkv.engine import commands as do
from p2pkv.engine import decode
from p2pkv.page_packings import DENSE
from p2pkv.protocol import messages as m
from support.engine.engines import Geometry, at_baseline, prefill, step, wrong_cells
from support.engine.transfers import arrives, begin, expect, load

ONE, TWO = Geometry(), Geometry(tp=2)
ROOM = 1 << 20
BLOCKS = list(range(8))


class Pair(VirtualPair):
    """P may push ahead: D has dialed it for a first request."""

    def __init__(self, p_side: Geometry = ONE, d_side: Geometry | None = None, **options: object) -> None:
        usual = {"prefetch_bytes": ROOM, "lease_seconds": LEASE}
        super().__init__(p_side, on_d=d_side, **usual | options)  # type: ignore[arg-type]
        begin(self.p, self.d, "first", 4, [60])
        self.fetch("first", 4, blocks=[60])
        self.finish("first")

    def fetch(self, key: str, tokens: int, start: int = 0, blocks: list[int] = BLOCKS) -> None:
        """The request comes, and every rank of D holds what P has computed from `start` on."""
        expect(self.p, self.d, key, tokens=tokens)
        load(self.d, key, tokens, blocks, start)
        arrives(self.d, key, tokens, blocks, start)
        self.d.do(do.Forget(key))

    def finish(self, key: str) -> None:
        self.p.wait(do.BlocksFree(key))
        self.p.do(do.Forget(key))

    def fetch_all(self, tokens: int, start: int = 0) -> None:
        self.fetch("k", tokens, start)
        self.end("k")

    def end(self, *keys: str) -> None:
        for key in keys:
            self.finish(key)
        self.rest()
        self.until(lambda: not value(self.d, "prefetch_bytes"), what="the end of the early buffers")

    def arrived(self, tokens: int) -> None:
        self.until(lambda: value(self.d, "bytes_prefetched") == tokens * TOKEN, what=f"{tokens} tokens ahead")

    def push_ahead(self, tokens: int = 40) -> None:
        """So many tokens lie in D's early buffer, for which no request has come."""
        prefill(self.p, "k", self.d.address, tokens, BLOCKS, chunk=40)
        self.arrived(tokens)

    def push_half_ahead(self) -> None:
        """48 of 96 tokens do."""
        self.p.do(do.OfferPrompt("k", self.d.address, 96, b"digest"))
        step(self.p, "k", BLOCKS, 0, 48)
        self.arrived(48)


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("tokens", [2, 33, 100])
def test_all_is_here_when_the_request_comes(pair: Pair, tokens: int) -> None:
    pair.push_ahead(tokens)
    assert value(pair.p, "prompts_held") == 1
    pair.fetch_all(tokens)
    pair.nothing_was_lost()


@pytest.mark.parametrize("large", [False, True])
def test_each_rank_tells_that_all_of_a_prompt_is_here(
    pair: Pair, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is large: the step that would copy it is also that of other requests."""
    monkeypatch.setattr(decode, "BURST_BYTES", 96 * TOKEN - large)
    pair.push_half_ahead()
    assert not pair.d.ranks[0].events(do.PrefetchComplete)
    step(pair.p, "k", BLOCKS, 48, 96)
    pair.arrived(96)
    pair.fetch_all(96)
    assert len(pair.d.ranks[0].events(do.PrefetchComplete)) == (not large)


@pytest.mark.parametrize("codec", [DENSE, "page:vec16"])
@pytest.mark.parametrize("other_blocks", [16, 32])
def test_what_d_has_cached_itself_is_not_written_to(codec: str, other_blocks: int) -> None:
    """Whatever the wire's rows are: dense, packed pages, or packed pages of two sizes."""
    here, there = (
        Geometry(block=n, codec=codec, dtype=torch.bfloat16, content=16) for n in (32, other_blocks)
    )
    pair = Pair(there, here)
    prefill(pair.p, "k", pair.d.address, 90, list(range(10)), chunk=40)
    pair.until(lambda: value(pair.d, "bytes_prefetched") >= 90 * 4 * 2 * 16 * 2)
    before = [page.clone() for page in pair.d.ranks[0].pages]
    pair.fetch_all(90, start=32)
    for old, new in zip(before, pair.d.ranks[0].pages, strict=True):
        assert torch.equal(old[BLOCKS[0]], new[BLOCKS[0]])


def test_a_request_that_comes_in_the_middle_takes_the_rest_straight_to_its_pages(pair: Pair) -> None:
    pair.push_half_ahead()
    expect(pair.p, pair.d)
    load(pair.d, blocks=BLOCKS)
    pair.until(lambda: value(pair.d, "bytes_scattered") >= 48 * TOKEN)
    step(pair.p, "k", BLOCKS, 48, 96)
    arrives(pair.d, blocks=BLOCKS)
    pair.d.do(do.Forget("k"))
    pair.arrived(48)
    pair.end("k")


@pytest.mark.parametrize("shapes", [(TWO, ONE), (ONE, TWO), (TWO, TWO), (Geometry(layers=(2, 2)), TWO)])
def test_ranks_of_any_shape(shapes: tuple[Geometry, Geometry]) -> None:
    pair = Pair(*shapes)
    pair.push_ahead()
    pair.fetch_all(40)


def test_a_preempted_prompt_is_taken_anew(pair: Pair) -> None:
    pair.p.do(do.OfferPrompt("k", pair.d.address, 80, b"digest"))
    step(pair.p, "k", BLOCKS, 0, 40)
    pair.arrived(40)
    pair.p.rank.revoke(["k"])
    for page in pair.p.ranks[0].pages:
        page[BLOCKS] = 7.0
    step(pair.p, "k", list(range(20, 28)), 0, 80)
    pair.arrived(80)
    pair.fetch_all(80)


def test_what_nobody_asks_for_goes_after_a_lease(pair: Pair) -> None:
    pair.push_ahead()
    pair.lasts(lambda: value(pair.d, "prefetch_bytes"), LEASE - 1)
    pair.end("k")
    assert pair.d.failures == [] and value(pair.d, "transfers_failed") == 0


def test_without_room_it_waits_on_p() -> None:
    pair = Pair(prefetch_bytes=60 * TOKEN)
    for number, key in enumerate(("one", "two")):
        prefill(pair.p, key, pair.d.address, 40, [10 * number, 10 * number + 1, 10 * number + 2], chunk=16)
    pair.arrived(40)
    for number, key in enumerate(("two", "one")):
        pair.fetch(key, 40, blocks=[30 + 10 * number, 31 + 10 * number, 32 + 10 * number])
    pair.arrived(40)
    pair.end("one", "two")


def test_p_may_die_when_all_is_here(pair: Pair) -> None:
    pair.push_ahead()
    pair.p.rank.vanish()
    pair.fetch("k", 40)
    pair.until(lambda: at_baseline(pair.d) and not value(pair.d, "prefetch_bytes"), what="D's baseline")


@pytest.mark.parametrize("ends", ["before it has pages", "wanting nothing"])
def test_a_request_that_takes_nothing_of_it_frees_ps_at_once(pair: Pair, ends: str) -> None:
    pair.push_ahead()
    expect(pair.p, pair.d, tokens=40)
    pair.d.wait(do.Begun("k"))
    if ends == "wanting nothing":
        pair.d.do(do.Load("k", 0, 0, ()))
        pair.d.wait(do.Loaded("k"))
    else:
        pair.d.do(do.Drop("k", "the client has left"))
    pair.d.do(do.Forget("k"))
    pair.p.wait(do.BlocksFree("k"), 1.0)
    pair.end("k")
    assert value(pair.p, "prompts_held") == 0
    assert pair.p.rank.core.finished, "a P that stops would wait for D's word"


@pytest.mark.parametrize(("tokens", "digest"), [(40, b"another"), (41, b"digest")])
def test_another_prompt_of_that_name_is_refused(pair: Pair, tokens: int, digest: bytes) -> None:
    pair.push_ahead()
    pair.d.do(do.Expect("k", pair.p.address, tokens, digest))
    pair.fails("is not D's")
    pair.d.do(do.Forget("k"))
    pair.end("k")


@pytest.mark.parametrize("how", ["D's link breaks", "P gives it up"])
def test_what_was_pushed_for_nothing_costs_nothing(pair: Pair, how: str) -> None:
    """P has kept its pages. It gives up if D was silent for a lease, and D goes on with what P forgot."""
    pair.push_half_ahead()
    if how == "P gives it up":
        pair.p.rank.core.prefill.transfers._expire(pair.clock.now + LEASE + 0.5)
        pair.p.rank.ring()
    else:
        pair.d.rank.wires.change(break_at=-1)
        pair.until(lambda: value(pair.p, "links_aborted"))
    pair.until(lambda: value(pair.d, "prefetch_bytes") == 0)
    step(pair.p, "k", BLOCKS, 48, 96)
    pair.fetch_all(96)


def test_a_link_that_breaks_when_all_is_here_costs_nothing(pair: Pair) -> None:
    """P's end breaks, and P hears what D said before it knew."""
    pair.push_ahead()
    role, now = pair.p.rank.core.prefill, pair.clock.now
    (peer,) = role.peers
    (entry,) = role.transfers.entries.values()
    role.peers.lose_link(peer, "broken by a test", now)
    claims = tuple(("k", send.attempt) for send in entry.sender.sends.values())
    role.transfers.heartbeat(peer, m.Heartbeat(claims), now)
    pair.p.rank.ring()
    pair.fetch_all(40)
    assert value(pair.p, "transfers_failed") == value(pair.d, "transfers_failed") == 0


def test_a_byte_that_changes_meanwhile_costs_nothing() -> None:
    """With checksums: what has come is given up, and the request loads as if nothing had come."""
    pair = Pair(verify=True)
    pair.d.rank.wires.change(flip_at=1, flip_bit=3)
    prefill(pair.p, "k", pair.d.address, 100, BLOCKS, chunk=100)
    pair.until(lambda: value(pair.d, "chunks_corrupt") == 1 and value(pair.d, "prefetch_bytes") == 0)
    pair.fetch_all(100)


def test_admitted_requests_go_before_it() -> None:
    """P sends nothing: what D has posted for KV ahead stays posted, and then there is one more."""
    chunk = 1024
    pair = Pair(staging_bytes=8 * chunk, chunk_bytes=chunk, lease_seconds=60.0)
    p, d = pair.p, pair.d
    peers = p.rank.core.prefill.peers
    poll, peers.poll = peers.poll, lambda now: None  # type: ignore[method-assign]
    prefill(p, "ahead", d.address, 100, list(range(7)), chunk=100)
    pair.clock.pass_by(1.0)
    assert value(d, "receives_asked") > 8
    ahead = value(d, "receives_posted")
    assert ahead > 0
    begin(p, d, "asked", 100, list(range(8, 15)))
    load(d, "asked", 100, list(range(20, 27)))
    pair.until(lambda: value(d, "receives_posted") > ahead, 1.0, "a receive for the admitted request")
    peers.poll = poll  # type: ignore[method-assign]
    arrives(d, "asked", 100, list(range(20, 27)))
    d.do(do.Forget("asked"))
    pair.arrived(100)
    pair.fetch("ahead", 100, blocks=list(range(30, 37)))
    pair.end("ahead", "asked")


def test_what_p_says_of_its_own_accord_is_no_answer(pair: Pair) -> None:
    """A connection that is deaf one way only: P is heard, and does not hear."""
    core = pair.d.rank.core
    (peer,) = core.decode.peers
    peer.unanswered_since = 1.0
    seen = []
    for message in (m.PrefetchOffer("k", 40, b"digest"), m.HeartbeatAck((), ())):
        core.table.messages[type(peer), type(message)](peer, message, pair.clock.now)
        seen.append(peer.unanswered_since)
    assert seen == [1.0, None]


def test_what_waits_for_its_request_is_let_go_when_weights_change_or_caches_are_reset(pair: Pair) -> None:
    """The request then takes it from P, which has kept the blocks."""
    pair.push_ahead()
    pair.d.do(do.Invalidate("", "the caches were reset"))
    pair.until(lambda: not value(pair.d, "prefetch_bytes"), 1.0, "the end of the early buffer")
    pair.fetch_all(40)


def test_a_request_whose_early_buffer_is_let_go_fails(pair: Pair) -> None:
    pair.push_half_ahead()
    expect(pair.p, pair.d)
    pair.d.wait(do.Begun("k"))
    pair.d.do(do.Invalidate("", "the caches were reset"))
    pair.d.wait(do.LoadFailed("k", "the caches were reset"))
    pair.d.do(do.Forget("k"))
    pair.end("k")


def test_a_prompt_of_other_weights_is_not_taken_ahead(pair: Pair) -> None:
    # P's offers come by another way than D's command, so they could come first.
    pair.d.do(do.Invalidate("version 2", "the weights have changed"))
    pair.clock.pass_by(0.1)
    for key, generation, blocks in (("old", "", [8]), ("new", "version 2", [9])):
        pair.p.do(do.OfferPrompt(key, pair.d.address, 16, b"digest", generation))
        step(pair.p, key, blocks, 0, 16)
    pair.arrived(16)
    for key, generation in (("new", "version 2"), ("old", "")):
        expect(pair.p, pair.d, key, tokens=16)
        pair.d.wait(do.Begun(key, generation))
        pair.d.do(do.Load(key, 0, 15, (BLOCKS,)))
        if generation:
            arrives(pair.d, key, 16, BLOCKS)
        else:
            pair.d.wait(do.LoadFailed(key, "P has computed this prompt with other weights than D's"))
        pair.d.do(do.Forget(key))
    pair.arrived(16)
    pair.end("old", "new")


@pytest.mark.parametrize("generation", ["", "another"])
@pytest.mark.parametrize("late", [False, True])
def test_a_load_may_be_ordered_before_ps_offer_is_known(generation: str, late: bool) -> None:
    """D's router says that P has begun. With other weights than D's P's KV is of no use."""
    pair = Pair(prefetch_bytes=0)
    expect(pair.p, pair.d, tokens=40)
    load = do.Load("k", 0, 40, (BLOCKS,))
    if not late:
        pair.d.do(load)
    pair.p.do(do.OfferPrompt("k", pair.d.address, 40, b"digest", generation))
    step(pair.p, "k", BLOCKS, 0, 40)
    if late:  # D's scheduler does not know it yet
        pair.d.wait(do.Begun("k", generation))
        pair.d.do(load)
    if generation:
        pair.fails("other weights")
    else:
        pair.d.wait(do.Loaded("k"))
        assert wrong_cells(pair.d.ranks[0], BLOCKS, 0, 40) == []
    pair.d.do(do.Forget("k"))
    pair.end("k")
