"""Two engines in one process: what P computed is what D holds, byte for byte."""

from __future__ import annotations

import threading

import ipc_simulated
import nccl_simulated
import pytest
from engine_support import Engine, Geometry, at_baseline, engines, plain_links, prefill, step, wrong_cells
from links_support import NCCL_KINDS, ipc_links, nccl_links

from p2pkv.engine import commands as do
from p2pkv.engine.from_prefill import Receiving
from support.waiting import wait_for

ONE = Geometry()


@pytest.fixture(params=["memory", "host", "ipc", *NCCL_KINDS])
def links(request):
    if request.param in NCCL_KINDS:
        yield lambda side, rank: nccl_links(blocking=request.param == "nccl-blocking", staging=1 << 20)
    elif request.param == "ipc":
        yield lambda side, rank: ipc_links(1 << 20, receives=side == "D")
    else:
        yield plain_links(request.param)
    ipc_simulated.let_go()
    nccl_simulated.let_go()


def finish(engine: Engine, key: str) -> None:
    engine.wait(do.BlocksFree(key))
    engine.do(do.Forget(key))


def load(d: Engine, p: Engine, key: str, tokens: int, start: int, blocks: list[int]) -> None:
    d.wait(do.Begun(key))
    d.do(do.Load(key, start, tokens - 1, (blocks,)))
    d.wait(do.Loaded(key))
    d.do(do.Forget(key))


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("cached", [0, 16])
def test_bytes_on_d_equal_bytes_on_p(links, tokens, cached):
    if cached >= tokens - 1:
        cached = 0
    p_blocks, d_blocks = list(range(10, 20)), list(range(40, 30, -1))
    with engines(ONE, ONE, links) as (p, d):
        d.do(do.Expect("k", p.address, tokens, b"digest"))
        p.do(do.Hold("k", d.address))
        prefill(p, "k", d.address, tokens, p_blocks, chunk=40)
        load(d, p, "k", tokens, cached, d_blocks)
        assert wrong_cells(d.ranks[0], d_blocks, cached, tokens - 1) == []
        assert len(wrong_cells(d.ranks[0], d_blocks, 0, cached)) == cached * 8
        finish(p, "k")
        wait_for(lambda: at_baseline(p) and at_baseline(d))
        sent = (tokens - 1 - cached) * 4 * 2 * 8 * 4
        assert p.ranks[0].rank.counters.values["bytes_sent"] == sent
        assert d.ranks[0].rank.counters.values["bytes_scattered"] == sent


def test_chunks_arrive_before_the_prefill_ends(links):
    blocks = list(range(8))
    with engines(ONE, ONE, links) as (p, d):
        d.do(do.Expect("k", p.address, 96, b"digest"))
        p.do(do.OfferPrompt("k", d.address, 96, b"digest"))
        d.wait(do.Begun("k"))
        d.do(do.Load("k", 0, 95, (blocks,)))
        step(p, "k", blocks, 0, 48)
        half = 48 * 4 * 2 * 8 * 4
        # Each side counts on its own thread, so neither count says that the other is made.
        wait_for(lambda: d.ranks[0].rank.counters.values["bytes_scattered"] == half)
        wait_for(lambda: p.ranks[0].rank.counters.values["bytes_early"] == half)
        step(p, "k", blocks, 48, 96)
        d.wait(do.Loaded("k"))
        assert wrong_cells(d.ranks[0], blocks, 0, 95) == []


def test_preempted_prompt_is_recomputed_and_right(links):
    first, second, d_blocks = [1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25], list(range(8))
    with engines(ONE, ONE, links) as (p, d):
        d.do(do.Expect("k", p.address, 80, b"digest"))
        p.do(do.OfferPrompt("k", d.address, 80, b"digest"))
        d.wait(do.Begun("k"))
        step(p, "k", first, 0, 40)
        p.ranks[0].rank.revoke(["k"])
        for page in p.ranks[0].pages:
            page[first] = 7.0
        d.do(do.Load("k", 0, 79, (d_blocks,)))
        step(p, "k", second, 0, 40)
        step(p, "k", second, 40, 80)
        d.wait(do.Loaded("k"))
        assert wrong_cells(d.ranks[0], d_blocks, 0, 79) == []
        assert p.ranks[0].rank.context.revoked.keys == {}


def test_nothing_wanted_releases_p(links):
    with engines(ONE, ONE, links) as (p, d):
        d.do(do.Expect("k", p.address, 1, b"digest"))
        d.do(do.Load("k", 0, 0, ()))
        prefill(p, "k", d.address, 1, [3], chunk=16)
        finish(p, "k")
        d.wait(do.Loaded("k"))
        d.do(do.Forget("k"))
        wait_for(lambda: at_baseline(p) and at_baseline(d))


def test_a_claim_that_outlives_its_prompt_ends_with_the_transfer(links, monkeypatch):
    gate, arrived = threading.Event(), Receiving.arrived.fget
    monkeypatch.setattr(Receiving, "arrived", property(lambda posted: gate.is_set() and arrived(posted)))
    with engines(ONE, ONE, links) as (p, d):
        d.do(do.Expect("k", p.address, 20, b"digest"))
        prefill(p, "k", d.address, 20, [3, 4], chunk=20)
        d.wait(do.Begun("k"))
        d.do(do.Load("k", 0, 19, ([5, 6],)))
        p.wait(do.BlocksFree("k"))
        p.do(do.Forget("k"))
        # D has not seen its bytes yet, and says again that it waits.
        wait_for(lambda: p.ranks[0].rank.counters.snapshot()["early_claims"])
        gate.set()
        d.wait(do.Loaded("k"))
        d.do(do.Forget("k"))
        wait_for(lambda: at_baseline(p) and at_baseline(d), 10.0)


def test_sequential_router_p_first_to_its_end(links):
    blocks = list(range(6))
    with engines(ONE, ONE, links) as (p, d):
        prefill(p, "k", d.address, 90, blocks, chunk=90)
        d.do(do.Expect("k", p.address, 90, b"digest"))
        load(d, p, "k", 90, 0, blocks)
        assert wrong_cells(d.ranks[0], blocks, 0, 89) == []
        finish(p, "k")


def test_many_at_once(links):
    with engines(ONE, ONE, links, staging_bytes=16384) as (p, d):
        keys = [f"k{number}" for number in range(30)]
        for number, key in enumerate(keys):
            d.do(do.Expect(key, p.address, 32, b"digest"))
            prefill(p, key, d.address, 32, [2 * number, 2 * number + 1], chunk=32, salt=number)
        for number, key in enumerate(keys):
            d.wait(do.Begun(key))
            d.do(do.Load(key, 0, 31, ([63 - 2 * number, 62 - 2 * number],)))
        for number, key in enumerate(keys):
            d.wait(do.Loaded(key))
            assert wrong_cells(d.ranks[0], [63 - 2 * number, 62 - 2 * number], 0, 31, number) == []
            d.do(do.Forget(key))
            finish(p, key)
        wait_for(lambda: at_baseline(p) and at_baseline(d))


SHAPES = [
    (Geometry((4,), 4, 2), Geometry((4,), 4, 1)),
    (Geometry((4,), 4, 1), Geometry((4,), 4, 2)),
    (Geometry((4,), 1, 2), Geometry((4,), 1, 2)),
    (Geometry((2, 2), 4, 2), Geometry((1, 3), 4, 4)),
    (Geometry((4,), 6, 3), Geometry((4,), 6, 2)),
    (Geometry((4,), 1, 2), Geometry((4,), 1, 1)),
]


def test_replicas_each_send_a_share(links):
    """All 4 ranks of P hold the one head's 4 layers; D's only rank takes a layer from each."""
    blocks = list(range(5))
    with engines(Geometry((4,), 1, 4), Geometry((4,), 1, 1), links) as (p, d):
        d.do(do.Expect("k", p.address, 70, b"digest"))
        prefill(p, "k", d.address, 70, blocks, chunk=33)
        load(d, p, "k", 70, 0, blocks)
        assert wrong_cells(d.ranks[0], blocks, 0, 69) == []
        finish(p, "k")
        assert [rank.rank.counters.values["bytes_sent"] for rank in p.ranks] == 4 * [69 * 8 * 4]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_ranks_of_other_shapes(links, shapes):
    blocks, d_blocks = list(range(5)), list(range(20, 25))
    with engines(*shapes, links) as (p, d):
        d.do(do.Expect("k", p.address, 70, b"digest"))
        prefill(p, "k", d.address, 70, blocks, chunk=33)
        load(d, p, "k", 70, 16, d_blocks)
        for rank in d.ranks:
            assert wrong_cells(rank, d_blocks, 16, 69) == []
        finish(p, "k")
        wait_for(lambda: at_baseline(p) and at_baseline(d))
