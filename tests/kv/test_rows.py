"""How large the rows of a copy are: that is what makes gather and scatter fast."""

import pytest
import torch

from p2pkv.kv import PagedCache, copiers, layouts
from support.kv.pages import Memory

BLOCK, HEADS, CONTENT = 16, 8, 256
ROW = CONTENT * 2


class Counting(copiers.StorageCopier):
    asked: list[layouts.Rows] = []  # noqa: RUF012

    def take_rows(self, flat: torch.Tensor, rows: layouts.Rows, out: torch.Tensor) -> None:
        self.asked.append(rows)


@pytest.mark.parametrize(
    ("layout", "codec", "ratio", "tokens", "heads", "atom"),
    [
        ("LBNHC", "dense", 1, (0, 64), (0, 8), 16 * 8 * ROW),  # whole blocks
        ("BLNHC", "dense", 1, (0, 64), (0, 8), 16 * 8 * ROW),
        ("LBNHC", "dense", 2, (0, 64), (0, 8), 16 * 8 * ROW),  # kernel blocks that touch
        ("BLNHC", "dense", 2, (0, 64), (0, 8), 8 * 8 * ROW),  # kernel blocks that do not
        ("LBNHC", "dense", 1, (4, 62), (0, 8), 2 * 8 * ROW),  # parts of blocks
        ("LBNHC", "dense", 1, (0, 33), (0, 8), 8 * ROW),
        ("LBNHC", "dense", 1, (0, 64), (4, 8), 4 * ROW),  # some heads of each token
        ("LBNHC", "dense", 1, (0, 64), (1, 4), ROW),
        ("LBHNC", "dense", 1, (0, 64), (0, 8), ROW),  # the wire has heads inside tokens
        ("LBHNC", "dense", 1, (0, 64), (2, 3), 16 * ROW),
        ("LBHNC", "page:vec", 1, (0, 64), (0, 8), 8 * 16 * ROW),  # whole pages
        ("LBHNC", "page:vec", 2, (0, 64), (0, 8), 2 * 8 * 8 * ROW),
        ("LBHNC", "page:vec", 1, (16, 35), (4, 8), 4 * 16 * ROW),
        ("LBHNC", "page:vec", 1, (0, 64), (1, 4), 16 * ROW),
        ("LHBNC", "page:vec", 1, (0, 64), (0, 8), 16 * ROW),
    ],
)
def test_one_copy_of_rows_as_large_as_layout_and_rectangle_allow(
    layout: str,
    codec: str,
    ratio: int,
    tokens: tuple[int, int],
    heads: tuple[int, int],
    atom: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counting, "asked", [])
    monkeypatch.setattr("p2pkv.kv.cache.copier_of", Counting)
    kind = torch.bfloat16
    memory = Memory(layout, 3, 8, BLOCK, ratio, HEADS, CONTENT, kind, codec, 0, 0, (0, 0, 0), 1)
    cache: PagedCache = memory.cache(memory.flat)
    nbytes = cache.nbytes(3, *tokens, heads[1] - heads[0])
    cache.gather(torch.empty(nbytes, dtype=torch.uint8), (0, 3), tokens, heads, memory.tables(64, seed=1))
    assert [rows.atom for rows in Counting.asked] == [atom]
    assert Counting.asked[0].index.size * atom == nbytes
