"""Intervals, ownerships of an axis, where two of them meet; and tokens that two ranks have in common."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.interleave import Common, Part, common
from p2pkv.sharding import Interval, Ownership, Shape, ShardingError, overlaps

budget = settings(max_examples=200)
intervals = st.builds(
    lambda start, length: Interval(start, start + length), st.integers(0, 50), st.integers(0, 50)
)


@st.composite
def ownerships(draw: st.DrawFn, size: int) -> Ownership:
    """Any ownership of an axis: unequal parts, each held by one rank or by several, in any order."""
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=8))) if size > 1 else []
    parts = [Interval(start, stop) for start, stop in zip([0, *cuts], [*cuts, size], strict=True)]
    replicas = draw(st.lists(st.sampled_from([*parts, Interval(0, 0)]), max_size=6))
    return Ownership(tuple(draw(st.permutations(parts + replicas))))


two_ownerships = st.integers(1, 40).flatmap(lambda size: st.tuples(ownerships(size), ownerships(size)))


class TestInterval:
    @given(one=intervals, two=intervals)
    @budget
    def test_intersect_is_the_set_intersection(self, one: Interval, two: Interval) -> None:
        assert set(one.intersect(two)) == set(one) & set(two) == set(two.intersect(one))


class TestOwnership:
    def test_replicated_to_consecutive_ranks_as_vllm_does(self) -> None:
        owned = Ownership.evenly(2, 8)
        assert [interval.start for interval in owned.ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert owned.holders == ((0, 1, 2, 3), (4, 5, 6, 7))

    def test_parts_of_any_length(self) -> None:
        owned = Ownership.in_parts((3, 0, 2))
        assert owned.ranks == (Interval(0, 3), Interval(3, 3), Interval(3, 5))
        assert (owned.parts, owned.holders) == ((Interval(0, 3), Interval(3, 5)), ((0,), (2,)))


class TestOverlaps:
    @given(sides=two_ownerships)
    @budget
    def test_each_target_cell_is_met_once_at_the_right_places(
        self, sides: tuple[Ownership, Ownership]
    ) -> None:
        source, target = sides
        met: dict[int, list[int]] = {rank: [] for rank in range(len(target.ranks))}
        for overlap in overlaps(source, target):
            for offset, cell in enumerate(overlap.cells):
                assert source.parts[overlap.part].start + overlap.in_source + offset == cell
                assert target.ranks[overlap.target].start + overlap.in_target + offset == cell
                met[overlap.target].append(cell)
        assert met == {rank: list(owned) for rank, owned in enumerate(target.ranks)}


class TestShape:
    def test_ranks_are_numbered_stage_by_stage(self) -> None:
        shape = Shape((5, 3), heads=4, tp=2)
        assert shape.world == 4
        assert shape.stage_layers.ranks == (Interval(0, 5), Interval(5, 8))
        assert shape.rank_heads.ranks == (Interval(0, 2), Interval(2, 4))

    @pytest.mark.parametrize(
        ("layers", "kv_heads", "tp", "told"),
        [
            ((8,), 8, 3, "8 KV heads cannot be divided over tensor-parallel size 3"),
            ((8,), 3, 8, "3 KV heads cannot be divided over tensor-parallel size 8"),
            ((), 8, 1, "at least one KV layer"),
            ((0, 0), 8, 1, "at least one KV layer"),
            ((4, -1), 8, 1, "at least one KV layer"),
            ((4,), 0, 1, "expected 1 or more"),
            ((4,), 1, 0, "expected 1 or more"),
            ((1,) * 1024, 1, 1024, "1048576 ranks"),
        ],
    )
    def test_refused(self, layers: tuple[int, ...], kv_heads: int, tp: int, told: str) -> None:
        with pytest.raises(ShardingError, match=told):
            Shape(layers, kv_heads, tp)


# Tokens of two context-parallel ranks, against a list of them.


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
