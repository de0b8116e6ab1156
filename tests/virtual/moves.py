"""One prompt of 96 tokens on a virtual pair: what P and D are told of it, and how far it has come."""

from __future__ import annotations

from engine_support import prefill, step, wrong_cells
from transfers import BLOCKS, TOKENS, value
from virtual.pair import VirtualPair

from p2pkv.engine import commands as do

LEASE, STALL = 10.0, 16.0
LONG = 30.0
"""Seconds: several leases, and longer than a stall."""

GRACE = 5.0
"""Seconds after its lease in which whatever was given up has ended: the promise of docs/design.md."""

HALF = TOKENS // 2
TOKEN = 4 * 2 * 8 * 4
"""Bytes of a token."""


def expect(pair: VirtualPair, key: str = "k", tokens: int = TOKENS) -> None:
    pair.d.do(do.Expect(key, pair.p.address, tokens, b"digest"))


def computed(pair: VirtualPair, key: str = "k") -> None:
    prefill(pair.p, key, pair.d.address, TOKENS, BLOCKS, chunk=TOKENS)


def load(pair: VirtualPair, key: str = "k") -> None:
    """D has blocks for it, and gets what P has computed."""
    pair.d.wait(do.Begun(key))
    pair.d.do(do.Load(key, 0, TOKENS - 1, (BLOCKS,)))
    pair.d.wait(do.Loaded(key), LEASE)
    assert wrong_cells(pair.d.ranks[0], BLOCKS, 0, TOKENS - 1) == []


def begin(pair: VirtualPair) -> None:
    """D waits for 96 tokens, of which P has computed none."""
    expect(pair)
    pair.p.do(do.OfferPrompt("k", pair.d.address, TOKENS, b"digest"))
    pair.d.wait(do.Begun("k"))
    pair.d.do(do.Load("k", 0, TOKENS - 1, (BLOCKS,)))


def half_a_push(pair: VirtualPair) -> None:
    """48 of the 96 tokens are computed and pushed."""
    begin(pair)
    step(pair.p, "k", BLOCKS, 0, HALF)
    pair.until(lambda: value(pair.d, "bytes_scattered") == HALF * TOKEN, what="half of the prompt")


def served(pair: VirtualPair, key: str = "k") -> None:
    """P computes it, D loads it, nothing is left of it, and nothing was lost on the way."""
    computed(pair, key)
    load(pair, key)
    ends_well(pair, key)


def ends_well(pair: VirtualPair, key: str = "k") -> None:
    """What has been loaded leaves nothing, and nothing was lost on the way."""
    pair.rest(key)
    nothing_was_lost(pair)


def nothing_was_lost(pair: VirtualPair) -> None:
    for engine in (pair.p, pair.d):
        lost = "transfers_failed", "links_aborted", "handshakes_failed", "messages_refused"
        assert {name: value(engine, name) for name in lost} == dict.fromkeys(lost, 0)


def fails(pair: VirtualPair, words: str, seconds: float = GRACE) -> None:
    """D's one request fails within so many seconds, and says why in these words."""
    pair.until(lambda: pair.d.failures, seconds, "the end of the request")
    (failed,) = pair.d.failures
    assert words in failed.reason  # type: ignore[attr-defined]


def kept(pair: VirtualPair) -> bool:
    """Neither side has given the request up."""
    return not pair.d.failures and not pair.p.all_heard(do.BlocksFree("k"))
