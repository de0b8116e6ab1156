"""A cache of two KV groups: attention, with a row per token, and a state, with one row per request.

The two have other layers, other heads, other rows and other block tables, and their layers take turns.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from chaos.model import CANARY, Group, Memory, Model, RankPages, hello_of, make_rank_pages
from virtual.pair import VirtualPair, value

from p2pkv.config import Options
from p2pkv.engine import commands as do
from p2pkv.kv.cache import RankCache
from p2pkv.protocol.messages import Hello
from support.engine.engines import READY, Geometry
from support.links.memory import MemoryLinks

TOKENS, STOP = 80, 79
"""Of the prompt, whose last one P leaves to D."""

ATTENTION = Group((0, 2, 3), heads=4, content=8)
STATE = Group((1, 4), heads=2, content=22, table=1, once=True)
MODEL = Model((ATTENTION, STATE), blocks=24)
ALL = range(MODEL.layers)

P_TABLES = ([3, 4, 5, 6, 7], [17])
D_TABLES = ([20, 11, 12, 9, 1], [8])


class Pair(VirtualPair):
    def __init__(self, tps: tuple[int, int] = (1, 1), **options: object) -> None:
        self._made: list[RankPages] = []
        super().__init__(Geometry(tp=tps[0]), on_d=Geometry(tp=tps[1]), **options)  # type: ignore[arg-type]
        self.on_p, self.on_d = (Memory(MODEL, each) for each in (self._made[: tps[0]], self._made[tps[0] :]))

    def describe(
        self, role: str, options: Options, geometry: Geometry, number: int
    ) -> tuple[list[Any], RankCache, Hello]:
        pages = make_rank_pages(MODEL, number, geometry.tp)
        self._made.append(pages)
        return pages.groups, pages.cache, hello_of(options, MODEL, pages, MemoryLinks.kind)

    def step(self, start: int, stop: int, layers: Sequence[int] = ALL) -> None:
        self.p.do(do.PromptBlocks("k", P_TABLES))
        for layer in layers:
            self.on_p.compute(0, layer, P_TABLES, start, stop)
            self.p.do(do.Computed((("k", stop),), layer, layer + 1, READY))
        self.p.do(do.Flush(("k",)))

    def ask(self, cached: int = 0) -> None:
        self.expect(tokens=TOKENS)
        self.p.do(do.OfferPrompt("k", self.d.address, TOKENS, b"digest"))
        self.d.wait(do.Begun("k"))
        self.d.do(do.Load("k", cached, STOP, D_TABLES))

    def arrives(self, cached: int) -> None:
        """Every rank of D holds what P computed, and nothing of the tokens that D has or computes."""
        self.d.wait(do.Loaded("k"))
        heads = sum(len(ATTENTION.on_rank(each.hello.rank, len(self.d.ranks))) for each in self.d.ranks)
        own = cached * heads * ATTENTION.content
        assert self.on_d.wrong(0, D_TABLES, STOP) == len(ATTENTION.layers) * own
        for rank in self.d.ranks:
            for page in rank.pages[0]:
                assert bool((page.view(torch.int32)[D_TABLES[0][0], :, :cached] == CANARY).all())


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("cached", [0, 16])
def test_both_groups_arrive_whole_and_the_state_is_the_last_one(tps: tuple[int, int], cached: int) -> None:
    """The first half's state is overwritten by the second half's, and must never travel."""
    pair = Pair(tps)
    pair.ask(cached)
    pair.step(0, 40)
    pair.until(lambda: value(pair.d, "bytes_scattered"))
    pair.step(40, STOP)
    pair.arrives(cached)
    pair.rest("k")
    heads = {group: max(group.heads, tps[1]) for group in MODEL.groups}
    rows = 3 * (STOP - cached) * heads[ATTENTION] * 8 + 2 * heads[STATE] * 22
    assert value(pair.p, "bytes_sent") == rows * 4, "each byte that a rank of D needs travels once"


@pytest.mark.parametrize(
    ("fault", "words"), [({"break_at": -1}, "the link broke"), ({"flip_at": 0}, "checksum")]
)
def test_a_load_of_which_the_state_alone_does_not_come_or_comes_wrong_fails(fault: Any, words: str) -> None:
    """D has written all else by then. Nothing is written to the state's block."""
    pair = Pair(verify="flip_at" in fault)
    pair.ask()
    pair.step(0, STOP, ATTENTION.layers)
    pair.until(lambda: value(pair.d, "bytes_scattered") == 3 * STOP * 4 * 8 * 4)
    pair.d.rank.wires.change(**fault)
    pair.step(0, STOP, STATE.layers)
    pair.fails(words)
    assert not pair.d.ranks[0].heard(do.Loaded("k"))
    assert all(bool((page.view(torch.int32) == CANARY).all()) for page in pair.d.ranks[0].pages[1])
    pair.rest("k")


def test_p_keeps_its_blocks_until_the_state_too_is_sent() -> None:
    pair = Pair()
    pair.ask()
    pair.step(0, STOP, ATTENTION.layers)
    pair.until(lambda: value(pair.d, "bytes_scattered") == 3 * STOP * 4 * 8 * 4)
    pair.d.rank.stand_still(0.5)  # it has no room for it meanwhile
    pair.step(0, STOP, STATE.layers)
    pair.lasts(lambda: not pair.p.all_heard(do.BlocksFree("k")), 0.4)
    pair.p.wait(do.BlocksFree("k"))
    pair.arrives(0)
    pair.rest("k")
