"""KV that P pushes before D's request has come: it is right, bounded, and in nobody's way."""

from __future__ import annotations

import time

import pytest
import torch

from p2pkv.engine import commands as do
from p2pkv.engine import decode
from p2pkv.packings import DENSE
from p2pkv.protocol import messages as m
from support.engine.engines import (
    Engine,
    Geometry,
    at_baseline,
    break_link,
    engines,
    hold_back,
    on_engine_thread,
    plain_links,
    prefill,
    step,
    vanish,
    wrong_cells,
)
from support.engine.transfers import arrives, begin, expect, failure, load, value
from support.links.faulty import Faults, FaultyLinks
from support.waiting import wait_for

ONE = Geometry()
TWO = Geometry(tp=2)
TOKEN = 4 * 2 * 8 * 4
"""Bytes of a token of ONE."""

ROOM = 1 << 20
BLOCKS = list(range(8))


one_kind = pytest.mark.parametrize("links", ["memory"], indirect=True)


def fetch(p: Engine, d: Engine, key: str, tokens: int, start: int = 0, blocks: list[int] = BLOCKS) -> None:
    """The request comes, and every rank of D holds what P has computed from `start` on."""
    expect(p, d, key, tokens=tokens)
    load(d, key, tokens, blocks, start)
    arrives(d, key, tokens, blocks, start)
    d.do(do.Forget(key))


def finish(p: Engine, key: str) -> None:
    p.wait(do.BlocksFree(key))
    p.do(do.Forget(key))


def acquaint(p: Engine, d: Engine) -> None:
    """A first request: D dials P for it, and P can push ahead from then on."""
    begin(p, d, "first", 4, [60])
    fetch(p, d, "first", 4, blocks=[60])
    finish(p, "first")


def arrived(d: Engine, nbytes: int) -> None:
    wait_for(lambda: value(d, "bytes_prefetched") == nbytes, what=f"{nbytes} bytes ahead")


def push_ahead(p: Engine, d: Engine) -> None:
    """40 tokens lie on D's early buffer, for which no request has come."""
    acquaint(p, d)
    prefill(p, "k", d.address, 40, BLOCKS, chunk=16)
    arrived(d, 40 * TOKEN)


def push_half_ahead(p: Engine, d: Engine) -> None:
    """48 of 96 tokens do."""
    acquaint(p, d)
    p.do(do.OfferPrompt("k", d.address, 96, b"digest"))
    step(p, "k", BLOCKS, 0, 48)
    arrived(d, 48 * TOKEN)


def quiet(p: Engine, d: Engine) -> None:
    wait_for(lambda: at_baseline(p) and at_baseline(d))
    wait_for(lambda: not value(d, "prefetch_bytes"), what="the end of the early buffers")


def ends_well(p: Engine, d: Engine, key: str, tokens: int, start: int = 0) -> None:
    """The request comes, and nothing is left."""
    fetch(p, d, key, tokens, start)
    finish(p, key)
    quiet(p, d)


@pytest.mark.parametrize("tokens", [2, 33, 100])
def test_all_is_here_when_the_request_comes(links, tokens):
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        acquaint(p, d)
        prefill(p, "k", d.address, tokens, list(range(10, 20)), chunk=40)
        arrived(d, tokens * TOKEN)
        assert value(p, "prompts_held") == 1
        ends_well(p, d, "k", tokens)
        assert value(p, "transfers_failed") == value(d, "transfers_failed") == 0


@one_kind
@pytest.mark.parametrize("large", [False, True])
def test_each_rank_tells_that_all_of_a_prompt_is_here(links, large, monkeypatch):
    """Unless it is large: the step that would copy it is also that of other requests."""
    monkeypatch.setattr(decode, "BURST_BYTES", 96 * TOKEN - large)
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        push_half_ahead(p, d)
        assert not d.ranks[0].events(do.PrefetchComplete)
        step(p, "k", BLOCKS, 48, 96)
        arrived(d, 96 * TOKEN)
        ends_well(p, d, "k", 96)
        assert len(d.ranks[0].events(do.PrefetchComplete)) == (not large)


@pytest.mark.parametrize("codec", [DENSE, "page:vec16"])
@pytest.mark.parametrize("other_blocks", [16, 32])
def test_what_d_has_cached_itself_is_not_written_to(links, codec, other_blocks):
    """Whatever the wire's rows are: dense, packed pages, or packed pages of two sizes."""
    kind = {"codec": codec, "dtype": torch.bfloat16, "content": 16}
    here, there = Geometry(block=32, **kind), Geometry(block=other_blocks, **kind)
    with engines(there, here, links, prefetch_bytes=ROOM) as (p, d):
        acquaint(p, d)
        prefill(p, "k", d.address, 90, list(range(10)), chunk=40)
        wait_for(lambda: value(d, "bytes_prefetched") >= 90 * 4 * 2 * 16 * 2)
        before = [page.clone() for page in d.ranks[0].pages]
        ends_well(p, d, "k", 90, start=32)
        for old, new in zip(before, d.ranks[0].pages, strict=True):
            assert torch.equal(old[BLOCKS[0]], new[BLOCKS[0]])


def test_a_request_that_comes_in_the_middle_takes_the_rest_straight_to_its_pages(links):
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        push_half_ahead(p, d)
        d.do(do.Expect("k", p.address, 96, b"digest"))
        load(d, blocks=BLOCKS)
        wait_for(lambda: value(d, "bytes_scattered") >= 48 * TOKEN)
        step(p, "k", BLOCKS, 48, 96)
        d.wait(do.Loaded("k"))
        d.do(do.Forget("k"))
        assert value(d, "bytes_prefetched") == 48 * TOKEN
        assert wrong_cells(d.ranks[0], BLOCKS, 0, 95) == []
        finish(p, "k")
        quiet(p, d)


@pytest.mark.parametrize("shapes", [(TWO, ONE), (ONE, TWO), (TWO, TWO), (Geometry(layers=(2, 2)), TWO)])
def test_ranks_of_any_shape(links, shapes):
    with engines(*shapes, links, prefetch_bytes=ROOM) as (p, d):
        push_ahead(p, d)
        ends_well(p, d, "k", 40)


@one_kind
def test_a_preempted_prompt_is_taken_anew(links):
    second = list(range(20, 28))
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        acquaint(p, d)
        p.do(do.OfferPrompt("k", d.address, 80, b"digest"))
        step(p, "k", BLOCKS, 0, 40)
        arrived(d, 40 * TOKEN)
        p.ranks[0].rank.revoke(["k"])
        for page in p.ranks[0].pages:
            page[BLOCKS] = 7.0
        step(p, "k", second, 0, 80)
        arrived(d, 80 * TOKEN)
        ends_well(p, d, "k", 80)


@one_kind
def test_what_nobody_asks_for_goes_after_a_lease(links):
    with engines(ONE, ONE, links, prefetch_bytes=ROOM, lease_seconds=1.0) as (p, d):
        push_ahead(p, d)
        p.wait(do.BlocksFree("k"))
        p.do(do.Forget("k"))
        quiet(p, d)
        assert d.ranks[0].events(do.LoadFailed) == []
        assert value(d, "transfers_failed") == 0


@one_kind
def test_without_room_it_waits_on_p(links):
    with engines(ONE, ONE, links, prefetch_bytes=60 * TOKEN) as (p, d):
        acquaint(p, d)
        for number, key in enumerate(("one", "two")):
            prefill(p, key, d.address, 40, [10 * number, 10 * number + 1, 10 * number + 2], chunk=16)
        arrived(d, 40 * TOKEN)
        for number, key in enumerate(("two", "one")):
            blocks = [30 + 10 * number, 31 + 10 * number, 32 + 10 * number]
            fetch(p, d, key, 40, blocks=blocks)
            finish(p, key)
        assert value(d, "bytes_prefetched") == 40 * TOKEN
        quiet(p, d)


def test_p_may_die_when_all_is_here(links):
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        push_ahead(p, d)
        vanish(p)
        fetch(p, d, "k", 40)
        wait_for(lambda: at_baseline(d) and not value(d, "prefetch_bytes"), what="D's baseline")


@one_kind
@pytest.mark.parametrize("ends", ["before it has pages", "wanting nothing"])
def test_a_request_that_takes_nothing_of_it_frees_ps_at_once(links, ends):
    with engines(ONE, ONE, links, prefetch_bytes=ROOM, lease_seconds=60.0) as (p, d):
        push_ahead(p, d)
        d.do(do.Expect("k", p.address, 40, b"digest"))
        d.wait(do.Begun("k"))
        if ends == "wanting nothing":
            d.do(do.Load("k", 0, 0, ()))
            d.wait(do.Loaded("k"))
        else:
            d.do(do.Drop("k", "the client has left"))
        d.do(do.Forget("k"))
        finish(p, "k")
        quiet(p, d)
        assert value(p, "prompts_held") == 0
        assert p.ranks[0].rank.core.finished, "a P that stops would wait for D's word"


@one_kind
@pytest.mark.parametrize("tokens, digest", [(40, b"another"), (41, b"digest")])
def test_another_prompt_of_that_name_is_refused(links, tokens, digest):
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        push_ahead(p, d)
        d.do(do.Expect("k", p.address, tokens, digest))
        assert "is not D's" in failure(d)
        d.do(do.Forget("k"))
        finish(p, "k")
        quiet(p, d)


@one_kind
@pytest.mark.parametrize("how", ["D's link breaks", "P gives it up"])
def test_what_was_pushed_for_nothing_costs_nothing(links, how):
    """P has kept its pages: the request loads as if nothing had come. P gives up if D was silent for a lease,
    and D goes on with what P does not know any more."""
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        push_half_ahead(p, d)
        before, rank = value(p, "links_aborted"), p.ranks[0].rank
        if how == "P gives it up":
            on_engine_thread(rank, lambda: rank.core.roles[0].transfers._expire(time.monotonic() + 5.5))
        else:
            break_link(d)
            wait_for(lambda: value(p, "links_aborted") > before)
        wait_for(lambda: value(d, "prefetch_bytes") == 0)
        step(p, "k", BLOCKS, 48, 96)
        ends_well(p, d, "k", 96)


@one_kind
def test_a_link_that_breaks_when_all_is_here_costs_nothing(links):
    """P's end breaks, and P hears what D said before it knew."""
    with engines(ONE, ONE, links, prefetch_bytes=ROOM, lease_seconds=60.0) as (p, d):
        push_ahead(p, d)
        role = p.ranks[0].rank.core.prefill
        (peer,) = role.peers

        def act() -> None:
            claims = tuple((key, send.attempt) for key, e in role.transfers.entries.items()
                           for send in e.sender.sends.values())  # fmt: skip
            role.peers.lose_link(peer, "broken by a test", time.monotonic())
            role.transfers.heartbeat(peer, m.Heartbeat(claims), time.monotonic())

        on_engine_thread(p.ranks[0].rank, act)
        ends_well(p, d, "k", 40)
        assert value(p, "transfers_failed") == value(d, "transfers_failed") == 0


def test_a_byte_that_changes_meanwhile_costs_nothing():
    """With checksums: what has come is given up, and the request loads as if nothing had come."""
    plain = plain_links("memory")
    links = {side: FaultyLinks(plain(side, 0), Faults()) for side in "PD"}
    with engines(ONE, ONE, lambda side, rank: links[side], prefetch_bytes=ROOM, verify=True) as (p, d):
        acquaint(p, d)
        flip = {"flip_at": 1, "flip_place": 0.5, "flip_bit": 3}
        on_engine_thread(d.ranks[0].rank, lambda: links["D"].change(**flip))
        prefill(p, "k", d.address, 100, BLOCKS, chunk=100)
        wait_for(lambda: value(d, "chunks_corrupt") == 1 and value(d, "prefetch_bytes") == 0)
        ends_well(p, d, "k", 100)


def test_admitted_requests_go_before_it():
    """P sends nothing: what D has posted for KV ahead stays posted, and then there is one more."""
    chunk = 1024
    sizes = {"prefetch_bytes": ROOM, "staging_bytes": 8 * chunk, "chunk_bytes": chunk, "lease_seconds": 60.0}
    ps = {"ahead": list(range(7)), "asked": list(range(8, 15))}
    ds = {"ahead": list(range(30, 37)), "asked": list(range(20, 27))}
    with engines(ONE, ONE, plain_links("memory", 8 * chunk), **sizes) as (p, d):
        acquaint(p, d)
        go_on = hold_back(p)
        prefill(p, "ahead", d.address, 100, ps["ahead"], chunk=100)
        wait_for(
            lambda: value(d, "receives_asked") > 8 and value(d, "receives_posted"), what="chunks that wait"
        )
        on_engine_thread(d.ranks[0].rank, lambda: None)
        on_engine_thread(d.ranks[0].rank, lambda: None)
        ahead = value(d, "receives_posted")
        begin(p, d, "asked", 100, ps["asked"])
        load(d, "asked", 100, ds["asked"])
        wait_for(lambda: value(d, "receives_posted") > ahead, what="a receive for the admitted request")
        go_on()
        arrives(d, "asked", 100, ds["asked"])
        d.do(do.Forget("asked"))
        arrived(d, 100 * TOKEN)
        fetch(p, d, "ahead", 100, blocks=ds["ahead"])
        for key in ds:
            finish(p, key)
        quiet(p, d)


def test_what_p_says_of_its_own_accord_is_no_answer():
    """A connection that is deaf one way only: P is heard, and does not hear."""
    seen = []
    with engines(ONE, ONE, plain_links("memory")) as (p, d):
        acquaint(p, d)
        core = d.ranks[0].rank.core
        (peer,) = core.decode.peers

        def hear() -> None:
            for message in (m.PrefetchOffer("k", 40, b"digest"), m.HeartbeatAck((), ())):
                peer.unanswered_since = 1.0 if not seen else peer.unanswered_since
                core.table.messages[type(peer), type(message)](peer, message, 2.0)
                seen.append(peer.unanswered_since)

        on_engine_thread(d.ranks[0].rank, hear)
        assert seen == [1.0, None]


@one_kind
def test_what_waits_for_its_request_is_let_go_when_weights_change_or_caches_are_reset(links):
    """The request then takes it from P, which has kept the blocks."""
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        push_ahead(p, d)
        d.do(do.Invalidate("", "the caches were reset"))
        wait_for(lambda: not value(d, "prefetch_bytes"), what="the end of the early buffer")
        ends_well(p, d, "k", 40)


@one_kind
def test_a_request_whose_early_buffer_is_let_go_fails(links):
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        push_half_ahead(p, d)
        d.do(do.Expect("k", p.address, 96, b"digest"))
        d.wait(do.Begun("k"))
        d.do(do.Invalidate("", "the caches were reset"))
        d.wait(do.LoadFailed("k", "the caches were reset"))
        d.do(do.Forget("k"))
        finish(p, "k")
        quiet(p, d)


@one_kind
def test_a_prompt_of_other_weights_is_not_taken_ahead(links):
    with engines(ONE, ONE, links, prefetch_bytes=ROOM) as (p, d):
        acquaint(p, d)
        # P's offers come by another way than D's command, so they could come first.
        d.do(do.Invalidate("version 2", "the weights have changed"))
        on_engine_thread(d.ranks[0].rank, lambda: None)
        for key, generation, blocks in (("old", "", [8]), ("new", "version 2", [9])):
            p.do(do.OfferPrompt(key, d.address, 16, b"digest", generation))
            step(p, key, blocks, 0, 16)
        arrived(d, 16 * TOKEN)
        for key, generation in (("new", "version 2"), ("old", "")):
            d.do(do.Expect(key, p.address, 16, b"digest"))
            d.wait(do.Begun(key, generation))
            d.do(do.Load(key, 0, 15, (BLOCKS,)))
            arrives(d, key, 16, BLOCKS)
            d.do(do.Forget(key))
            finish(p, key)
        assert value(d, "bytes_prefetched") == 16 * TOKEN
        quiet(p, d)


@pytest.mark.parametrize("generation", ["", "another"])
def test_a_load_may_be_ordered_before_ps_offer_has_come(links, generation):
    """D's router says that P has begun. With other weights than D's P's KV is of no use."""
    with engines(ONE, ONE, links) as (p, d):
        d.do(do.Expect("k", p.address, 40, b"digest"))
        d.do(do.Load("k", 0, 40, (BLOCKS,)))
        p.do(do.OfferPrompt("k", d.address, 40, b"digest", generation))
        step(p, "k", BLOCKS, 0, 40)
        if generation:
            assert "other weights" in failure(d, "k")
        else:
            d.wait(do.Loaded("k"))
            assert wrong_cells(d.ranks[0], BLOCKS, 0, 40) == []
        d.do(do.Forget("k"))
        finish(p, "k")
        quiet(p, d)
