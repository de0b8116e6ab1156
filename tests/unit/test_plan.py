"""Plans, checked by carrying one out on small arrays: every cell of D once, from a rank that has it."""

import subprocess
import sys
from copy import copy
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.plan import Edge, Plan, Shapes, make_plan
from p2pkv.sharding import Shape, ShardingError

Cells = np.ndarray[tuple[int, int, int], np.dtype[np.int64]]
TOKENS = 96
"""A multiple of all cycles that are drawn."""
budget = settings(max_examples=200)


@st.composite
def two_engines(draw: st.DrawFn) -> tuple[Shapes, Shapes]:
    """Two ways to divide one model: TP 1 to 16, PP 1 to 4, PCP 1 to 4, DCP 1 to 8, 1 to 3 KV groups of 1 to
    64 heads and 1 to 48 layers; of some groups every rank has all tokens."""
    heads = st.one_of(st.sampled_from([1, 1, 2, 4]), st.integers(1, 64))
    sizes = st.tuples(heads, st.integers(1, 48))
    groups = draw(st.lists(sizes, min_size=1, max_size=3))
    return draw(_engine(groups)), draw(_engine(groups))


@st.composite
def _engine(draw: st.DrawFn, groups: list[tuple[int, int]]) -> Shapes:
    fits = [tp for tp in range(1, 17) if all(heads % tp == 0 or tp % heads == 0 for heads, _ in groups)]
    tp, stages = draw(st.sampled_from(fits)), draw(st.integers(1, 4))
    pcp, run = draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4]))
    dcp = draw(st.sampled_from(dcp_sizes(tp, pcp)))
    shapes = []
    for heads, layers in groups:
        copies = max(1, tp // heads)
        fits_heads = copies % dcp == 0 if pcp == 1 else dcp in (1, pcp) or copies == tp
        divided = fits_heads and draw(st.integers(0, 3)) > 0
        cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
        counts = (stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True))
        shapes.append(Shape(tuple(counts), heads, tp, pcp, dcp if divided else 1, run))
    return tuple(shapes)


def dcp_sizes(tp: int, pcp: int) -> list[int]:
    """What vLLM allows, as far as it divides TOKENS."""
    sizes = [size for size in range(1, tp + 1) if tp % size == 0] if pcp == 1 else [1, pcp, tp * pcp]
    return [size for size in sizes if size in (1, 2, 3, 4, 6, 8)]


def local_caches(shape: Shape) -> list[Cells]:
    """[layers, heads, tokens] of every rank, each cell its own global number, without p2pkv."""
    total = np.arange(sum(shape.layers) * shape.heads * TOKENS).reshape(-1, shape.heads, TOKENS)
    bounds, held = np.cumsum([0, *shape.layers]), []
    for stage, pcp_rank, rank in product(*map(range, (len(shape.layers), shape.pcp, shape.tp))):
        if shape.tp <= shape.heads:
            heads = [head for head in range(shape.heads) if head * shape.tp // shape.heads == rank]
        else:
            heads = [rank // (shape.tp // shape.heads)]
        turn = (rank * shape.pcp + pcp_rank) % shape.dcp
        tokens = [token for token in range(TOKENS) if token // shape.run % shape.dcp == turn]
        held.append(total[bounds[stage] : bounds[stage + 1]][:, heads][:, :, tokens])
    return held


def places(edge: Edge) -> tuple[list[int], list[int]]:
    if edge.tokens is None:
        return list(range(TOKENS)), list(range(TOKENS))
    span = 0, edge.tokens.count(TOKENS)
    return edge.tokens.on_source(*span).tolist(), edge.tokens.on_target(*span).tolist()


def weight(edge: Edge) -> int:
    """(layer, head, token) cells."""
    return len(edge.layers) * len(edge.heads) * len(places(edge)[0])


def carry_out(plan: Plan, group: int) -> tuple[list[Cells], list[Cells]]:
    """What arrives in each D rank's part of a group (-1: nothing), and how often each cell is written."""
    source = local_caches(plan.prefill[group])
    arrived = [np.full_like(cache, -1) for cache in local_caches(plan.decode[group])]
    written = [np.zeros_like(cache) for cache in arrived]
    for edge in plan.edges:
        if edge.group != group:
            continue
        layers, heads = len(edge.layers), len(edge.heads)
        taken, put = places(edge)
        sent = source[edge.source][edge.source_layer :, edge.source_head :][:layers, :heads][:, :, taken]
        assert sent.shape == (layers, heads, len(taken)) and sent.size
        place = np.ix_(
            range(edge.target_layer, edge.target_layer + layers),
            range(edge.target_head, edge.target_head + heads),
            put,
        )
        arrived[edge.target][place] = sent
        written[edge.target][place] += 1
    return arrived, written


@given(shapes=two_engines())
@budget
def test_every_cell_arrives_once_where_it_belongs(shapes: tuple[Shapes, Shapes]) -> None:
    plan = make_plan(*shapes)
    for group, shape in enumerate(shapes[1]):
        arrived, written = carry_out(plan, group)
        for cache, count, wanted in zip(arrived, written, local_caches(shape), strict=True):
            assert np.array_equal(cache, wanted)
            assert (count == 1).all()


@given(shapes=two_engines())
@budget
def test_edges_say_globally_what_they_do_locally(shapes: tuple[Shapes, Shapes]) -> None:
    plan = make_plan(*shapes)
    held = [local_caches(shape) for shape in plan.prefill]
    for edge in plan.edges:
        corner = edge.layers.start * plan.prefill[edge.group].heads + edge.heads.start
        first = held[edge.group][edge.source][edge.source_layer, edge.source_head, places(edge)[0][0]]
        assert first // TOKENS == corner
        assert edge.layers and edge.heads


@given(shapes=two_engines())
@budget
def test_load_is_spread_over_those_who_hold_the_same(shapes: tuple[Shapes, Shapes]) -> None:
    plan = make_plan(*shapes)
    replicas: dict[tuple[int, bytes], list[int]] = {}
    for group, shape in enumerate(plan.prefill):
        for rank, cache in enumerate(local_caches(shape)):
            if cache.size:
                replicas.setdefault((group, cache.tobytes()), []).append(rank)
    for (group, _), ranks in replicas.items():
        of_ranks = [[edge for edge in plan.from_source(rank) if edge.group == group] for rank in ranks]
        sent = [edge for edges in of_ranks for edge in edges]
        loads = [sum(map(weight, edges)) for edges in of_ranks]
        shared = len({edge.target for edge in sent}) < len(ranks)
        most = max((weight(edge) // (len(edge.layers) if shared else 1) for edge in sent), default=0)
        assert max(loads) <= sum(loads) / len(ranks) + most


@given(shapes=two_engines())
@budget
def test_one_edge_of_a_group_for_a_pair_of_ranks_and_both_sides_see_it(shapes: tuple[Shapes, Shapes]) -> None:
    plan = make_plan(*shapes)
    pairs = [(edge.source, edge.target, edge.group) for edge in plan.edges]
    assert pairs == sorted(set(pairs))
    sent = [edge for rank in range(plan.prefill[0].world) for edge in plan.from_source(rank)]
    received = [edge for rank in range(plan.decode[0].world) for edge in plan.to_target(rank)]
    assert tuple(sent) == plan.edges
    assert sorted(received, key=lambda edge: (edge.source, edge.target, edge.group)) == sent


@given(shapes=two_engines())
@budget
def test_both_sides_compute_the_same_plan(shapes: tuple[Shapes, Shapes]) -> None:
    ours = make_plan(*shapes)
    assert make_plan(*shapes) is ours
    theirs = make_plan.__wrapped__(*(tuple(copy(each) for each in engine) for engine in shapes))
    assert theirs is not ours
    assert (theirs.edges, theirs.digest) == (ours.edges, ours.digest)


def test_digest_is_the_same_in_another_process() -> None:
    code = "from p2pkv.plan import make_plan; from p2pkv.sharding import Shape\n"
    code += "print(make_plan((Shape((3, 2), 4, 8),), (Shape((5,), 4, 2),)).digest)"
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == make_plan((Shape((3, 2), 4, 8),), (Shape((5,), 4, 2),)).digest


def test_digests_tell_plans_apart() -> None:
    one, two, mla = Shape((8,), 4, 2), Shape((4, 4), 4, 2), Shape((8,), 1, 2)
    engines = [
        ((one,), (one,)),
        ((one,), (two,)),
        ((two,), (one,)),
        ((mla,), (mla,)),
        ((one, mla), (one, mla)),
    ]
    plans = [make_plan(*pair) for pair in engines]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_equal_shapes_send_rank_to_rank() -> None:
    for shape in (Shape((4, 4), 8, 4), Shape((4, 4), 2, 8), Shape((4,), 1, 8)):
        plan = make_plan((shape,), (shape,))
        assert [(edge.source, edge.target) for edge in plan.edges] == [(r, r) for r in range(shape.world)]


@pytest.mark.parametrize(
    ("prefill", "decode", "shares"),
    [
        (Shape((6,), 1, 4), Shape((6,), 1, 1), ["0: 0-2", "0: 2-3", "0: 3-5", "0: 5-6"]),
        (Shape((8,), 1, 2), Shape((8,), 1, 1), ["0: 0-4", "0: 4-8"]),
        (Shape((2,), 1, 4), Shape((2,), 1, 1), ["0: 0-1", "", "0: 1-2", ""]),
        (Shape((8,), 2, 4), Shape((8,), 2, 1), ["0: 0-4", "0: 4-8", "0: 0-4", "0: 4-8"]),
        # 3 D ranks need all 8 layers: each P rank sends 6 of the 24.
        (Shape((8,), 1, 4), Shape((8,), 1, 3), ["0: 0-6", "0: 6-8, 1: 0-4", "1: 4-8, 2: 0-2", "2: 2-8"]),
    ],
)
def test_replicas_share_what_fewer_ranks_need(prefill: Shape, decode: Shape, shares: list[str]) -> None:
    """Each P rank that holds the same sends a run of layers, to these ranks of D."""
    plan = make_plan((prefill,), (decode,))
    sent = [plan.from_source(rank) for rank in range(prefill.tp)]
    assert [
        ", ".join(f"{edge.target}: {edge.layers.start}-{edge.layers.stop}" for edge in edges)
        for edges in sent
    ] == shares


def test_unequal_needs_are_balanced_by_size() -> None:
    """Two P replicas; D's stages hold 5, 1, 1, 1, 1 and 1 layers."""
    plan = make_plan((Shape((10,), 1, 2),), (Shape((5, 1, 1, 1, 1, 1), 1, 1),))
    assert [sum(len(edge.layers) for edge in plan.from_source(rank)) for rank in range(2)] == [5, 5]


ATTENTION, STATE = Shape((8,), 4, 1), Shape((4,), 2, 1)


@pytest.mark.parametrize(
    ("prefill", "decode", "told"),
    [
        ((ATTENTION,), (Shape((9,), 4, 1),), "prefill instance has 8 KV layers, the decode instance 9"),
        ((ATTENTION,), (Shape((4, 4), 2, 1),), "prefill instance has 4 KV heads, the decode instance 2"),
        ((ATTENTION, STATE), (ATTENTION,), "prefill instance has 2 KV groups, the decode instance 1"),
        ((ATTENTION, STATE), (ATTENTION, ATTENTION), "has 4 KV layers in group 1, the decode instance 8"),
        ((ATTENTION, STATE), (ATTENTION, Shape((2, 2), 2, 1)), "have different stages or ranks"),
    ],
)
def test_different_models_are_refused(prefill: Shapes, decode: Shapes, told: str) -> None:
    with pytest.raises(ShardingError, match=told):
        make_plan(prefill, decode)


def test_a_plan_of_absurd_size_is_refused_before_it_is_made() -> None:
    with pytest.raises(ShardingError, match="16777216 links"):
        make_plan((Shape((1,) * 1024, 1, 1),), (Shape((1024,), 1, 16384),))
