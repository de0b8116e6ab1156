"""Which tokens two context-parallel ranks have in common, against a list of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pkv.interleave import Common, Part, common

parts = st.tuples(st.integers(1, 8), st.sampled_from([1, 2, 3, 4, 16])).flatmap(
    lambda sizes: st.builds(Part, st.integers(0, sizes[0] - 1), st.just(sizes[0]), st.just(sizes[1]))
)


def kept(part: Part, tokens: int) -> list[int]:
    return [token for token in range(tokens) if token // part.run % part.ranks == part.rank]


@given(source=parts, target=parts, tokens=st.integers(0, 400), start=st.integers(0, 400))
def test_common_tokens(source: Part, target: Part, tokens: int, start: int) -> None:
    on_p, on_d = kept(source, tokens), kept(target, tokens)
    both, found = sorted({*on_p} & {*on_d}), Common(source, target)
    assert found.count(tokens) == len(both)
    start = min(start, len(both))
    if both:
        assert found.on_source(start, len(both)).tolist() == [on_p.index(token) for token in both[start:]]
        assert found.on_target(start, len(both)).tolist() == [on_d.index(token) for token in both[start:]]


def test_two_ranks_with_all_tokens_need_no_numbers() -> None:
    whole, half = Part(0, 1, 1), Part(1, 2, 1)
    assert common(whole, Part(0, 1, 16)) is None
    assert common(half, whole) is common(half, whole) is not None
