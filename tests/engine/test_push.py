"""Two engines in one process: what P computed is what D holds, byte for byte.

tests/engine/test_many_ranks.py has engines of many ranks.
"""

import threading

import pytest

from p2pkv.engine import commands as do
from p2pkv.engine.from_prefill import PostedReceive
from support.cuda import ipc as ipc_simulated
from support.engine.engines import Geometry, engines, plain_links, prefill, step, wrong_cells
from support.engine.transfers import arrives, ask, begin, ends, expect, load, rest, scribble, value
from support.links.pairs import ipc_links, nccl_links
from support.nccl import simulated as nccl_simulated
from support.waiting import wait_for

ONE = Geometry()
TOKEN = 4 * 2 * 8 * 4
"""Bytes of one."""


@pytest.fixture(params=["memory", "shared-memory", "ipc", "nccl"])
def links(request):
    kind = request.param
    if kind == "nccl":
        yield lambda side, rank: nccl_links(staging=1 << 20)
    elif kind == "ipc":
        yield lambda side, rank: ipc_links(1 << 20, receives=side == "D")
    else:
        yield plain_links(kind)
    ipc_simulated.let_go()
    nccl_simulated.let_go()


@pytest.fixture
def pair(links):
    with engines(ONE, ONE, links) as made:
        yield made


@pytest.mark.parametrize(
    ("tokens", "cached"), [*((tokens, 0) for tokens in (2, 15, 16, 17, 33, 100)), (33, 16), (100, 16)]
)
def test_bytes_on_d_equal_bytes_on_p(pair, tokens, cached):
    p_blocks, d_blocks = list(range(10, 20)), list(range(40, 30, -1))
    p, d = pair
    expect(p, d, tokens=tokens)
    p.do(do.HoldPrompt("k", d.address))
    prefill(p, "k", d.address, tokens, p_blocks, chunk=40)
    load(d, "k", tokens, d_blocks, cached)
    arrives(d, "k", tokens, d_blocks, cached)
    assert len(wrong_cells(d.ranks[0], d_blocks, 0, cached)) == cached * 8
    ends(p, d)
    rest(p, d)
    sent = (tokens - 1 - cached) * TOKEN
    assert value(p, "bytes_sent") == value(d, "bytes_scattered") == sent


def test_chunks_arrive_before_the_prefill_ends(pair):
    p, d = pair
    ask(p, d)
    blocks = list(range(6))
    step(p, "k", blocks, 0, 48)
    # Each side counts on its own thread, so neither count says that the other is made.
    wait_for(lambda: value(d, "bytes_scattered") == 48 * TOKEN)
    wait_for(lambda: value(p, "bytes_before_last_layer") == 48 * TOKEN)
    step(p, "k", blocks, 48, 96)
    arrives(d)


def test_preempted_prompt_is_recomputed_and_right(pair):
    first, second, d_blocks = [1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25], list(range(8))
    p, d = pair
    expect(p, d, tokens=80)
    p.do(do.OfferPrompt("k", d.address, 80, b"digest"))
    d.wait(do.Begun("k"))
    step(p, "k", first, 0, 40)
    p.ranks[0].rank.revoke(["k"])
    scribble(p, first)
    load(d, "k", 80, d_blocks)
    step(p, "k", second, 0, 40)
    step(p, "k", second, 40, 80)
    arrives(d, "k", 80, d_blocks)
    assert p.ranks[0].rank.context.revoked.keys == {}


def test_nothing_wanted_releases_p(pair):
    p, d = pair
    expect(p, d, tokens=1)
    d.do(do.Load("k", 0, 0, ()))
    prefill(p, "k", d.address, 1, [3], chunk=16)
    d.wait(do.Loaded("k"))
    ends(p, d)
    rest(p, d)


def test_a_claim_that_outlives_its_prompt_ends_with_the_transfer(pair, monkeypatch):
    gate, arrived = threading.Event(), PostedReceive.arrived.fget
    monkeypatch.setattr(PostedReceive, "arrived", property(lambda posted: gate.is_set() and arrived(posted)))
    p, d = pair
    begin(p, d, tokens=20, blocks=[3, 4])
    load(d, tokens=20, blocks=[5, 6])
    p.wait(do.BlocksFree("k"))
    p.do(do.Forget("k"))
    # D has not seen its bytes yet, and says again that it waits.
    wait_for(lambda: value(p, "early_claims"))
    gate.set()
    d.wait(do.Loaded("k"))
    d.do(do.Forget("k"))
    rest(p, d)


def test_many_at_once(links):
    with engines(ONE, ONE, links, staging_bytes=16384) as (p, d):
        keys = {f"k{number}": number for number in range(30)}
        blocks = [[63 - 2 * number, 62 - 2 * number] for number in keys.values()]
        for key, number in keys.items():
            begin(p, d, key, 32, [2 * number, 2 * number + 1], salt=number)
        for key, number in keys.items():
            load(d, key, 32, blocks[number])
        for key, number in keys.items():
            arrives(d, key, 32, blocks[number], salt=number)
            ends(p, d, key)
        rest(p, d)
