"""What engines over NCCL links leave of the device to the model, while P is held up and when it is killed.

Not verified on a GPU: see tests/support/nccl/gpu.py for the rules of the simulated one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from p2pkv.engine import commands as do
from support.engine.engines import Engine, Geometry, hold_back, make_engine, vanish, wrong_cells
from support.engine.transfers import begin, load, push
from support.links.pairs import NCCL_KINDS, nccl_links, simulated
from support.nccl import simulated as nccl_simulated
from support.nccl.gpu import Model, SimulatedGpu
from support.waiting import wait_for

BLOCKS = list(range(6))
TOKENS = 96
SECONDS = 20.0
TP2 = Geometry(tp=2)
TP1 = Geometry()


@dataclass
class Cluster:
    """Engines on simulated devices of one hardware queue each, so that every stream shares it."""

    blocking: bool
    processors: int = 132
    made: list[Engine] = field(default_factory=list)
    gpus: dict[int, list[SimulatedGpu]] = field(default_factory=dict)

    def engine(self, role: str, geometry: Geometry = TP2, **options: object) -> Engine:
        gpus = [SimulatedGpu(1, self.processors) for _ in range(geometry.world)]
        links = [
            nccl_links(blocking=self.blocking, gpu=gpu, processors=self.processors, staging=1 << 20)
            for gpu in gpus
        ]
        engine = make_engine(role, geometry, links.__getitem__, **{"lease_seconds": 4.0, **options})
        self.made.append(engine)
        self.gpus[id(engine)] = gpus
        return engine

    def of(self, engine: Engine) -> list[SimulatedGpu]:
        return self.gpus[id(engine)]

    def model(self, engine: Engine) -> Model:
        return Model(self.of(engine))

    def occupied(self, engine: Engine) -> int:
        return sum(gpu.occupied for gpu in self.of(engine))

    def close(self) -> None:
        for engine in self.made:
            engine.stop()
        nccl_simulated.let_go()


@pytest.fixture(params=NCCL_KINDS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param == "nccl-blocking")
    yield made
    made.close()


def held(cluster: Cluster, p: Engine, d: Engine, key: str) -> Callable[[], None]:
    """P has announced a prompt, D has granted what it had room for, and P is held up before it sends."""
    push(p, d, f"{key}, to build the link", salt=1)
    releases = [hold_back(Engine(p.address, p.geometry, [rank])) for rank in p.ranks]
    begin(p, d, key, salt=2)
    load(d, key)
    for rank in d.ranks:
        wait_for(lambda rank=rank: rank.rank.counters.snapshot()["receives_posted"] > 1, what="grants of D")
    return lambda: [release() for release in releases]  # type: ignore[func-returns-value,return-value]


def test_d_computes_while_p_is_held_up(cluster: Cluster) -> None:
    """Two Ps and a D, tensor-parallel over two ranks: D's steps, with an all-reduce in each, go on."""
    ps, d = [cluster.engine("P") for _ in range(2)], cluster.engine("D")
    model = cluster.model(d)
    go_on = [held(cluster, p, d, f"k{number}") for number, p in enumerate(ps)]
    for _ in range(5):
        assert model.runs(SECONDS)
    for release in go_on:
        release()
    for number in range(2):
        d.wait(do.Loaded(f"k{number}"))
    for rank in d.ranks:
        assert wrong_cells(rank, BLOCKS, 0, TOKENS - 1, salt=2) == []
    assert model.runs(SECONDS)


def test_d_computes_on_when_p_is_killed(cluster: Cluster) -> None:
    p, d = cluster.engine("P"), cluster.engine("D")
    model = cluster.model(d)
    held(cluster, p, d, "k")
    vanish(p)
    for _ in range(5):
        assert model.runs(SECONDS)
    wait_for(lambda: any(rank.events(do.LoadFailed) for rank in d.ranks), what="the end of the load")
    wait_for(lambda: cluster.occupied(d) == 0, what="D's devices without p2pkv's kernels")
    assert model.runs(SECONDS)


def test_a_p_that_is_held_up_holds_no_multiprocessor_of_d(cluster: Cluster) -> None:
    p, d = cluster.engine("P"), cluster.engine("D")
    release = held(cluster, p, d, "k")
    try:
        with pytest.raises(AssertionError, match="did not come true"):
            wait_for(lambda: cluster.occupied(d), 1.0, "a receive on D's device")
    finally:
        release()
        d.wait(do.Loaded("k"))


@pytest.mark.parametrize(
    ("cluster", "launches_wait"),
    [*((kind, False) for kind in NCCL_KINDS), ("nccl-blocking", True)],
    indirect=["cluster"],
)
def test_a_p_that_is_held_up_does_not_keep_another_from_sending(
    cluster: Cluster, launches_wait: bool
) -> None:
    """D's multiprocessors suffice for one link at a time; or launches block, as with CUDA_LAUNCH_BLOCKING=1,
    and what one P has not decided does not hold up what the other sends."""
    cluster.processors = 132 if launches_wait else 32
    first, second = (cluster.engine("P", TP1, lease_seconds=3.0) for _ in range(2))
    d = cluster.engine("D", TP1, lease_seconds=3.0)
    for rank in itertools.chain(first.ranks, second.ranks, d.ranks):
        simulated(rank.links).launches_wait = launches_wait
    push(second, d, "to build the link", salt=1)
    release = held(cluster, first, d, "k")
    try:
        push(second, d, "other", salt=3)
        assert not d.ranks[0].events(do.LoadFailed)
    finally:
        release()


def test_no_link_is_built_while_p_captures_its_graphs(cluster: Cluster) -> None:
    p, d = cluster.engine("P", TP1), cluster.engine("D", TP1)
    rank, nccl = p.ranks[0].rank, simulated(p.ranks[0].links)
    rank.steps.serving, nccl.capturing = False, True
    d.do(do.Expect("early", p.address, TOKENS, b"digest"))
    wait_for(lambda: rank.core.roles[0].peers, what="the connection")
    with pytest.raises(AssertionError, match="did not come true"):
        wait_for(lambda: nccl.captures_ended, 1.0, "a capture that was ended")
    nccl.capturing = False
    rank.steps.begin(time.monotonic())
    rank.steps.end()
    d.do(do.Drop("early", "the client has left"))
    push(p, d, "k", salt=1)
