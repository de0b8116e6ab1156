"""What form rows travel in, from two descriptions of a cache."""

from __future__ import annotations

from itertools import product

import pytest

from p2pkv.kv.codecs import UNDONE
from p2pkv.plan import make_plan
from p2pkv.protocol.handshake import DENSE, KNOWN_PACKINGS, Assignment, Wire, wire_between
from p2pkv.protocol.messages import Cache
from p2pkv.protocol.pieces import Window
from p2pkv.sharding import Shape

TOKEN = 256


def cache(codec: str, block: int = 1, dtype: str = "bfloat16", token: int = TOKEN) -> Cache:
    return Cache((4,), 2, 1, token * block, block, dtype, codec, "names")


DENSE_WIRE = Wire(DENSE, 1, TOKEN)


@pytest.mark.parametrize(
    ("one", "other", "wire"),
    [
        (cache("dense"), cache("dense"), DENSE_WIRE),
        (cache("page:amx", 32), cache("page:amx", 32), Wire("page:amx", 32, 32 * TOKEN)),
        (cache("page:neon", 32), cache("page:neon", 32), Wire("page:neon", 32, 32 * TOKEN)),
        (cache("page:amx", 32), cache("page:amx", 128), DENSE_WIRE),
        (cache("page:vec", 48), cache("page:vec16", 32), DENSE_WIRE),
        (cache("page:vec", 32), cache("dense"), DENSE_WIRE),
        (cache("page:vec", 32, "float32"), cache("dense", 1, "float32"), DENSE_WIRE),
        (cache("page:neon", 32), cache("page:neon", 128), None),
        (cache("page:rvv", 32), cache("dense"), None),
        (cache("page:vec", 32), cache("page:neon", 32), None),
        (cache("page:vec", 32, "uint8 (fp8_e4m3)"), cache("dense", 1, "uint8 (fp8_e4m3)"), None),
        (cache("page:amx", 32, "float32"), cache("dense", 1, "float32"), None),
        (cache("dense"), cache("dense", 1, "float16"), None),
        (cache("dense"), cache("page:vec", 32, token=2 * TOKEN), None),
    ],
)
def test_the_form_follows_from_the_two_caches(one: Cache, other: Cache, wire: Wire | None) -> None:
    assert wire_between(one, other) == wire_between(other, one) == wire


def test_fp8_packed_pages_travel_whole_between_equals() -> None:
    packed = cache("page:vec", 32, "uint8 (fp8_e4m3)")
    assert wire_between(packed, packed) == Wire("page:vec", 32, 32 * TOKEN)


def test_a_row_that_does_not_divide_by_its_tokens_is_nobodys_equal() -> None:
    odd = Cache((4,), 2, 1, 32 * TOKEN + 1, 32, "bfloat16", "page:vec", "names")
    assert wire_between(odd, cache("dense")) is None


def test_every_packing_of_the_handshake_can_be_undone_by_the_pages() -> None:
    assert set(KNOWN_PACKINGS) == set(UNDONE)
    pairs = product(UNDONE, UNDONE)
    assert all(wire_between(cache(one, 32), cache(other, 64)) == DENSE_WIRE for one, other in pairs)


def test_a_debt_is_counted_in_rows_of_its_form() -> None:
    (edge,) = make_plan(Shape((4,), 2, 1), Shape((4,), 2, 1)).edges
    assert Assignment(edge, DENSE_WIRE).window(3, 9) == Window(0, 4, 3, 9, 1, 2 * TOKEN)
    assert Assignment(edge, Wire("page:vec", 32, 99)).window(32, 65) == Window(0, 4, 32, 65, 32, 198)
