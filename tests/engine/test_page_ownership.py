"""P reads a prompt's pages after its forward has written them, and never after somebody else got them."""

import threading
from typing import Any

import torch
from virtual.pair import VirtualPair

from p2pkv.engine import commands as do
from p2pkv.kv.cache import PagedCache
from support.engine.engines import Forward, Geometry, compute, engines, plain_links, step
from support.engine.transfers import TOKENS, arrives, ask, begin, ends, load, scribble, value
from support.waiting import wait_for

ONE = Geometry()
BLOCKS, OTHER_BLOCKS = list(range(6)), list(range(20, 26))
LAYER = (TOKENS - 1) * 2 * 8 * 4
"""Bytes of a layer on the wire."""

LONG_ENOUGH = 0.5
"""Seconds in which a revoke that does not wait for the gather returns."""


def test_nothing_is_read_before_the_forward_has_written_it() -> None:
    pair = VirtualPair()
    p, d = pair.p, pair.d
    ask(p, d)
    forwards = [Forward() for _ in p.ranks[0].pages]
    p.do(do.PromptBlocks("k", (BLOCKS,)))
    for layer, forward in enumerate(forwards):
        p.do(do.Computed((("k", TOKENS),), layer, layer + 1, forward))
    p.do(do.Flush(("k",)))
    for layer, forward in enumerate(forwards):
        pair.clock.pass_by(1.0)
        assert value(p, "bytes_sent") <= layer * LAYER
        compute(p.ranks[0], BLOCKS, layer, 0, TOKENS)
        forward.done.set()
    arrives(d)


def test_pages_taken_back_are_not_read_before_the_engine_has_heard_so() -> None:
    """Its next command waits for the forward, and `Revoked` stands behind that."""
    pair, forward = VirtualPair(), Forward()
    p, d = pair.p, pair.d
    begin(p, d)
    d.wait(do.Begun("k"))
    p.do(do.Computed((("another", 1),), 0, 1, forward))
    p.rank.revoke(["k"])
    scribble(p, BLOCKS)
    load(d)
    pair.until(lambda: value(p, "chunks_filler") + value(p, "chunks_sent"), what="an answer to a grant")
    assert value(p, "bytes_sent") == 0 and not forward.done.is_set()
    forward.done.set()
    step(p, "k", OTHER_BLOCKS, 0, TOKENS)
    arrives(d)
    pair.rest("k")


class Overtaken(PagedCache):
    """In the first gather another thread takes the pages back, and gives them to another request."""

    pages: list[torch.Tensor]
    revoke: Any
    revoker: threading.Thread | None
    waited: bool
    taken_back: threading.Event

    def gather(self, *cut: Any) -> None:
        if self.revoker is None:
            self.revoker = threading.Thread(target=self._take_back)
            self.revoker.start()
            self.waited = not self.taken_back.wait(LONG_ENOUGH)
        super().gather(*cut)

    def _take_back(self) -> None:
        self.revoke(["k"])
        self.taken_back.set()
        for page in self.pages:
            page[BLOCKS] = 7.0


def test_pages_are_not_taken_back_while_they_are_read():
    caches: list[Overtaken] = []

    def wrap(cache: PagedCache) -> PagedCache:
        wrapped = Overtaken.__new__(Overtaken)
        wrapped.__dict__.update(cache.__dict__, revoker=None, waited=False, taken_back=threading.Event())
        caches.append(wrapped)
        return wrapped

    with engines(ONE, ONE, plain_links("memory"), devices={"P": wrap}) as (p, d):
        (cache,) = caches
        cache.pages, cache.revoke = p.ranks[0].pages, p.ranks[0].rank.revoke
        begin(p, d)
        load(d)
        wait_for(cache.taken_back.is_set, what="the revoke")
        assert cache.waited, "the pages were taken back in the middle of a gather"
        step(p, "k", OTHER_BLOCKS, 0, TOKENS)
        arrives(d)
        ends(p, d)
