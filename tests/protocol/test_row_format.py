"""What form rows travel in, from two descriptions of a cache."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from p2pkv.packings import DENSE, PACKINGS
from p2pkv.plan import make_plan
from p2pkv.protocol.handshake import Assignment, RowFormat, row_format
from p2pkv.protocol.messages import KvGroup
from p2pkv.protocol.pieces import Extent
from p2pkv.sharding import Shape

TOKEN = 256


def group(codec: str, block: int = 1, dtype: str = "bfloat16", token: int = TOKEN) -> KvGroup:
    return KvGroup((4,), 2, token * block, block, dtype, codec, "names")


DENSE_WIRE = RowFormat(DENSE, 1, TOKEN)


@pytest.mark.parametrize(
    ("one", "other", "wire"),
    [
        (group("dense"), group("dense"), DENSE_WIRE),
        (group("page:amx", 32), group("page:amx", 32), RowFormat("page:amx", 32, 32 * TOKEN)),
        (group("page:neon", 32), group("page:neon", 32), RowFormat("page:neon", 32, 32 * TOKEN)),
        (group("page:amx", 32), group("page:amx", 128), DENSE_WIRE),
        (group("page:vec", 48), group("page:vec16", 32), DENSE_WIRE),
        (group("page:vec", 32), group("dense"), DENSE_WIRE),
        (group("page:vec", 32, "float32"), group("dense", 1, "float32"), DENSE_WIRE),
        (group("page:neon", 32), group("page:neon", 128), None),
        (group("page:rvv", 32), group("dense"), None),
        (group("page:vec", 32), group("page:neon", 32), None),
        (group("page:vec", 32, "uint8 (fp8_e4m3)"), group("dense", 1, "uint8 (fp8_e4m3)"), None),
        (group("page:amx", 32, "float32"), group("dense", 1, "float32"), None),
        (group("dense"), group("dense", 1, "float16"), None),
        (group("dense"), group("page:vec", 32, token=2 * TOKEN), None),
    ],
)
def test_the_form_follows_from_the_two_caches(one: KvGroup, other: KvGroup, wire: RowFormat | None) -> None:
    assert row_format(one, other) == row_format(other, one) == wire


def test_fp8_packed_pages_travel_whole_between_equals() -> None:
    packed = group("page:vec", 32, "uint8 (fp8_e4m3)")
    assert row_format(packed, packed) == RowFormat("page:vec", 32, 32 * TOKEN)


def test_a_row_that_does_not_divide_by_its_tokens_is_nobodys_equal() -> None:
    odd = KvGroup((4,), 2, 32 * TOKEN + 1, 32, "bfloat16", "page:vec", "names")
    assert row_format(odd, group("dense")) is None


def test_pages_of_any_two_packings_travel_dense() -> None:
    pairs = product(PACKINGS, PACKINGS)
    assert all(row_format(group(one, 32), group(other, 64)) == DENSE_WIRE for one, other in pairs)


def test_a_debt_is_counted_in_rows_of_its_form() -> None:
    (edge,) = make_plan((Shape((4,), 2, 1),), (Shape((4,), 2, 1),)).edges
    dense = Assignment.of([edge], [DENSE_WIRE])
    assert dense.extents(3, 9).by_group == {0: Extent(0, 0, 4, 3, 9, 1, 2 * TOKEN)}
    packed = Assignment.of([edge], [RowFormat("page:vec", 32, 99)])
    assert packed.extents(32, 65).by_group == {0: Extent(0, 0, 4, 32, 65, 32, 198)}


def test_a_state_travels_once_and_whole_whatever_tokens_are_wanted() -> None:
    attention, state = Shape((4,), 2, 1), Shape((3,), 4, 1)
    edges = make_plan((attention, state), (attention, state)).edges
    wires = [RowFormat("page:vec", 32, 99), RowFormat(DENSE, 1, 5, once=True)]
    owed = Assignment.of(edges, wires)
    assert owed.extents(32, 65).by_group[1] == Extent(1, 0, 3, 0, 1, 1, 4 * 5, ready=65)
    assert (owed.unit, owed.extents(32, 65).nbytes) == (32, 4 * 2 * 198 + 3 * 20)


@pytest.mark.parametrize(
    ("unit", "window", "start", "stop", "tokens"),
    [
        (1, 0, 3, 9, (3, 9)),
        (1, 4, 0, 9, (6, 9)),  # token 9 looks at 6, 7, 8 and itself
        (1, 4, 7, 9, (7, 9)),
        (1, 40, 0, 9, (0, 9)),
        (1, 1, 0, 9, (9, 9)),
        (16, 20, 0, 65, (32, 65)),  # 46 to 64, from the beginning of a page
        (16, 20, 48, 65, (48, 65)),
    ],
)
def test_of_a_window_only_the_tokens_that_the_next_one_sees_are_needed(
    unit: int, window: int, start: int, stop: int, tokens: tuple[int, int]
) -> None:
    codec = DENSE if unit == 1 else "page:vec"
    assert RowFormat(codec, unit, 8, window=window).needed(start, stop) == tokens


@pytest.mark.parametrize(
    ("unit", "block", "start", "tokens"),
    [(1, 16, 0, (32, 65)), (1, 16, 48, (48, 65)), (16, 64, 0, (0, 65)), (1, 1, 0, (46, 65))],
)
def test_of_a_window_that_begins_inside_a_block_all_of_the_block_is_needed(
    unit: int, block: int, start: int, tokens: tuple[int, int]
) -> None:
    codec = DENSE if unit == 1 else "page:vec"
    assert RowFormat(codec, unit, 8, window=20, block=block).needed(start, 65) == tokens


@pytest.mark.parametrize(
    ("start", "stop", "tokens"),
    [
        (0, 3, (0, 0)),
        (0, 4, (0, 4)),
        (0, 702, (0, 700)),  # 700 to 703 are one row, and D computes 702 and what follows
        (512, 702, (512, 700)),
        (512, 514, (512, 512)),
    ],
)
def test_a_row_of_several_tokens_is_needed_if_all_of_them_have_been_computed(
    start: int, stop: int, tokens: tuple[int, int]
) -> None:
    assert RowFormat(DENSE, 4, 8).needed(start, stop) == tokens


def test_a_prompt_may_have_no_row_of_several_tokens() -> None:
    shape = Shape((4,), 1, 1)
    owed = Assignment.of(make_plan((shape,), (shape,)).edges, [RowFormat(DENSE, 128, 584)])
    assert owed.unit == 128 and owed.extents(0, 127).nbytes == 0
    assert owed.extents(0, 300).nbytes == 4 * 2 * 584


def test_the_blocks_that_count_are_d_s() -> None:
    """Which are never larger than P's; a D that caches nothing says 1."""
    p, d, neither = (replace(group("dense"), window=64, block=block) for block in (128, 32, 1))
    assert row_format(p, d) == row_format(d, p) == RowFormat(DENSE, 1, TOKEN, window=64, block=32)
    assert row_format(p, neither) == RowFormat(DENSE, 1, TOKEN, window=64)
    packed = replace(group("page:vec", 32), window=64, block=64)
    wire = row_format(packed, replace(packed, block=32))
    assert wire is not None and (wire.codec, wire.unit, wire.block) == ("page:vec", 32, 32)


def test_other_windows_are_nobodys_equal() -> None:
    narrow, wide = (replace(group("dense"), window=window) for window in (64, 128))
    assert row_format(narrow, narrow) == RowFormat(DENSE, 1, TOKEN, window=64)
    assert row_format(narrow, replace(group("page:vec", 32), window=64)) == RowFormat(
        DENSE, 1, TOKEN, window=64
    )
    assert row_format(narrow, wide) is None


def test_rows_of_several_tokens_travel_between_their_like_only() -> None:
    compressed = KvGroup((4,), 1, 584, 4, "uint8", DENSE, "names")
    assert row_format(compressed, compressed) == RowFormat(DENSE, 4, 584)
    for other in (replace(compressed, unit_tokens=2), replace(compressed, unit_tokens=1, row_bytes=146)):
        assert row_format(compressed, other) is None
    assert row_format(compressed, replace(compressed, codec="page:vec")) is None


def test_a_state_and_a_row_per_token_are_nobodys_equal() -> None:
    state = KvGroup((4,), 2, TOKEN, 1, "bfloat16", "dense", "names", once=True)
    assert row_format(state, state) == RowFormat(DENSE, 1, TOKEN, once=True)
    assert row_format(state, group("dense")) is None and row_format(group("page:vec", 32), state) is None


@pytest.mark.parametrize(
    ("block", "start", "stop", "tokens"),
    [
        (1, 0, 63, (0, 63)),
        (1, 0, 64, (64, 64)),
        (1, 0, 65, (64, 65)),
        (1, 70, 100, (70, 100)),
        (1, 70, 128, (128, 128)),
        (48, 0, 100, (48, 100)),  # all of the block in which the chunk begins
    ],
)
def test_of_a_chunk_only_what_was_computed_of_it_is_needed(
    block: int, start: int, stop: int, tokens: tuple[int, int]
) -> None:
    row = RowFormat(DENSE, 1, 8, window=64, block=block, chunked=True)
    assert row.needed(start, stop) == tokens
    assert "of the chunk of 64" in str(row)


def test_a_chunk_is_no_sliding_window() -> None:
    sliding = replace(group("dense"), window=64)
    chunk = replace(sliding, chunked=True)
    assert row_format(sliding, chunk) is None
    assert row_format(chunk, chunk) == RowFormat(DENSE, 1, TOKEN, window=64, chunked=True)
    packed = replace(group("page:vec", 32), window=64, chunked=True)
    assert row_format(chunk, packed) == RowFormat(DENSE, 1, TOKEN, window=64, chunked=True)
