"""What form rows travel in, from two descriptions of a cache."""

from itertools import product

import pytest
from msgspec.structs import replace

from p2pkv.page_packings import DENSE, PACKINGS
from p2pkv.plan import make_plan
from p2pkv.protocol.extents import Extent
from p2pkv.protocol.handshake import Assignment, RowFormat, row_format
from p2pkv.protocol.messages import KvGroup
from p2pkv.sharding import Shape

TOKEN = 256


def group(codec: str, block: int = 1, dtype: str = "bfloat16", token: int = TOKEN) -> KvGroup:
    return KvGroup((4,), 2, token * block, block, dtype, codec, "names")


DENSE_WIRE = RowFormat(DENSE, 1, TOKEN)


FP8 = group("page:vec", 32, "uint8 (fp8_e4m3)")
NARROW = replace(group("dense"), window=64)
PACKED = replace(group("page:vec", 32), window=64)
CHUNK = replace(NARROW, chunked=True)
COMPRESSED = KvGroup((4,), 1, 584, 4, "uint8", DENSE, "names")
STATE = replace(group("dense"), once=True)


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
        (FP8, group("dense", 1, "uint8 (fp8_e4m3)"), None),
        (group("page:amx", 32, "float32"), group("dense", 1, "float32"), None),
        (group("dense"), group("dense", 1, "float16"), None),
        (group("dense"), group("page:vec", 32, token=2 * TOKEN), None),
        (FP8, FP8, RowFormat("page:vec", 32, 32 * TOKEN)),
        # A row that does not divide by its tokens.
        (KvGroup((4,), 2, 32 * TOKEN + 1, 32, "bfloat16", "page:vec", "names"), group("dense"), None),
        (NARROW, NARROW, RowFormat(DENSE, 1, TOKEN, window=64)),
        (NARROW, PACKED, RowFormat(DENSE, 1, TOKEN, window=64)),
        (NARROW, replace(NARROW, window=128), None),
        (NARROW, CHUNK, None),
        (CHUNK, CHUNK, RowFormat(DENSE, 1, TOKEN, window=64, chunked=True)),
        (CHUNK, replace(PACKED, chunked=True), RowFormat(DENSE, 1, TOKEN, window=64, chunked=True)),
        (COMPRESSED, COMPRESSED, RowFormat(DENSE, 4, 584)),
        (COMPRESSED, replace(COMPRESSED, unit_tokens=2), None),
        (COMPRESSED, replace(COMPRESSED, unit_tokens=1, row_bytes=146), None),
        (COMPRESSED, replace(COMPRESSED, codec="page:vec"), None),
        (STATE, STATE, RowFormat(DENSE, 1, TOKEN, once=True)),
        (STATE, group("dense"), None),
        (STATE, group("page:vec", 32), None),
    ],
)
def test_the_form_follows_from_the_two_caches(one: KvGroup, other: KvGroup, wire: RowFormat | None) -> None:
    assert row_format(one, other) == row_format(other, one) == wire


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


WINDOW = RowFormat(DENSE, 1, 8, window=20, block=16)
"""20 tokens that a next one sees, whole blocks of 16."""

CHUNKED = RowFormat(DENSE, 1, 8, window=64, chunked=True)


@pytest.mark.parametrize(
    ("row", "start", "stop", "tokens"),
    [
        (RowFormat(DENSE, 1, 8), 3, 9, (3, 9)),
        # Of a window only the tokens that the next one sees: token 9 looks at 6, 7, 8 and itself.
        (RowFormat(DENSE, 1, 8, window=4), 0, 9, (6, 9)),
        (RowFormat(DENSE, 1, 8, window=4), 7, 9, (7, 9)),
        (RowFormat(DENSE, 1, 8, window=40), 0, 9, (0, 9)),
        (RowFormat(DENSE, 1, 8, window=1), 0, 9, (9, 9)),
        # 46 to 64, from the beginning of a page.
        (RowFormat("page:vec", 16, 8, window=20), 0, 65, (32, 65)),
        (RowFormat("page:vec", 16, 8, window=20), 48, 65, (48, 65)),
        # All of the block in which a window begins.
        (WINDOW, 0, 65, (32, 65)),
        (WINDOW, 48, 65, (48, 65)),
        (RowFormat("page:vec", 16, 8, window=20, block=64), 0, 65, (0, 65)),
        (RowFormat(DENSE, 1, 8, window=20), 0, 65, (46, 65)),
        # A row of several tokens if all of them have been computed: 700 to 703 are one row.
        (RowFormat(DENSE, 4, 8), 0, 3, (0, 0)),
        (RowFormat(DENSE, 4, 8), 0, 4, (0, 4)),
        (RowFormat(DENSE, 4, 8), 0, 702, (0, 700)),
        (RowFormat(DENSE, 4, 8), 512, 702, (512, 700)),
        (RowFormat(DENSE, 4, 8), 512, 514, (512, 512)),
        # Of a chunk what was computed of it.
        (CHUNKED, 0, 63, (0, 63)),
        (CHUNKED, 0, 64, (64, 64)),
        (CHUNKED, 0, 65, (64, 65)),
        (CHUNKED, 70, 100, (70, 100)),
        (CHUNKED, 70, 128, (128, 128)),
        (replace(CHUNKED, block=48), 0, 100, (48, 100)),
    ],
    ids=str,
)
def test_of_the_tokens_that_are_wanted_these_are_needed(
    row: RowFormat, start: int, stop: int, tokens: tuple[int, int]
) -> None:
    assert row.needed(start, stop) == tokens
    assert ("of the chunk of 64" in str(row)) == row.chunked


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
