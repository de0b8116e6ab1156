"""What engines over NCCL links leave of the device to the model, while P is held up and when it is killed.

Not verified on a GPU: see tests/support/nccl/gpu.py for the rules of the simulated one.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from p2pkv.engine import commands as do
from support.engine.engines import Engine, Geometry, hold_back, make_engine, vanish
from support.engine.transfers import arrives, begin, load, push, value
from support.links.pairs import nccl_links
from support.nccl import simulated as nccl_simulated
from support.nccl.gpu import Model, SimulatedGpu
from support.waiting import wait_for

SECONDS = 20.0
TP2 = Geometry(tp=2)
TP1 = Geometry()


@dataclass
class Cluster:
    """Engines on simulated devices, by default of one hardware queue each, which all streams share."""

    processors: int = 132
    queues: int = 1
    made: list[Engine] = field(default_factory=list)
    gpus: dict[int, list[SimulatedGpu]] = field(default_factory=dict)

    def engine(self, role: str, geometry: Geometry = TP2, **options: object) -> Engine:
        gpus = [SimulatedGpu(self.queues, self.processors) for _ in range(geometry.world)]
        links = [nccl_links(gpu=gpu, processors=self.processors, staging=1 << 20) for gpu in gpus]
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


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
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


def test_d_computes_while_p_is_held_up_and_when_it_is_killed(cluster: Cluster) -> None:
    """Of two Ps and a D of TP 2: D's steps, each with an all-reduce, go on, and a silent P takes nothing."""
    ps, d = [cluster.engine("P") for _ in range(2)], cluster.engine("D")
    model = cluster.model(d)
    go_on = [held(cluster, p, d, f"k{number}") for number, p in enumerate(ps)]
    for _ in range(5):
        assert model.runs(SECONDS)
    assert not cluster.occupied(d)
    go_on[0]()
    arrives(d, "k0", salt=2)
    vanish(ps[1])
    assert model.runs(SECONDS)
    wait_for(lambda: any(rank.events(do.LoadFailed) for rank in d.ranks), what="the end of the load")
    wait_for(lambda: cluster.occupied(d) == 0, what="D's devices without p2pkv's kernels")
    assert model.runs(SECONDS)


@pytest.mark.parametrize("processors", [32, 132])
@pytest.mark.parametrize("queues", [1, 3])
def test_ranks_that_compute_and_push_never_wait_in_a_circle(
    cluster: Cluster, queues: int, processors: int
) -> None:
    """Links from each of two ranks to two others; with 32 multiprocessors a device has room for one."""
    cluster.queues, cluster.processors = queues, processors
    p, d = cluster.engine("P", Geometry(layers=(2, 2)), chunk_bytes=1024), cluster.engine("D")
    over = threading.Event()

    def compute(model: Model) -> None:
        while not over.wait(0.0002):
            assert model.runs(SECONDS)

    with ThreadPoolExecutor(2) as threads:
        computing = [threads.submit(compute, cluster.model(engine)) for engine in (p, d)]
        try:
            prompts = [(f"k{n}", list(range(6 * n, 6 * n + 6)), n) for n in range(4)]
            for key, blocks, salt in prompts:
                begin(p, d, key, blocks=blocks, salt=salt)
            for key, blocks, _ in prompts:
                load(d, key, blocks=blocks)
            for key, blocks, salt in prompts:
                arrives(d, key, blocks=blocks, salt=salt)
        finally:
            over.set()
        for each in computing:
            each.result(SECONDS)


def test_a_p_that_is_held_up_does_not_keep_another_from_sending(cluster: Cluster) -> None:
    """D's multiprocessors suffice for one link; what one P has not decided holds up no other's sends."""
    cluster.processors = 32
    first, second = (cluster.engine("P", TP1, lease_seconds=3.0) for _ in range(2))
    d = cluster.engine("D", TP1, lease_seconds=3.0)
    push(second, d, "to build the link", salt=1)
    release = held(cluster, first, d, "k")
    try:
        push(second, d, "other", salt=3)
        assert not d.ranks[0].events(do.LoadFailed)
    finally:
        release()


def test_a_p_tells_no_d_of_what_it_may_not_launch_now(cluster: Cluster) -> None:
    """P's multiprocessors suffice for one link at a time, and it has sends for two Ds, which are held up. If
    both launched what P sends, two Ps and two Ds could wait for each other in a circle."""
    cluster.processors = 32
    p, *ds = (cluster.engine(role, TP1) for role in "PDD")
    for number, d in enumerate(ds):
        push(p, d, f"{number}, to build the link", salt=1)
    go_on = hold_back(p)
    for d in ds:
        begin(p, d, f"k {d.address}", salt=2)
        load(d, f"k {d.address}")
        wait_for(lambda d=d: value(d, "receives_posted") > 1, what="grants of D")
    release = [hold_back(d) for d in ds]
    expected = value(p, "chunks_sent") + sum(value(d, "receives_posted") for d in ds)
    go_on()
    wait_for(lambda: cluster.occupied(p) and value(p, "chunks_sent") == expected)
    time.sleep(0.1)
    posted = [peer.link.posted for d in ds for peer in d.ranks[0].rank.core.roles[0].peers]
    assert sorted(bool(receives[0].sent) for receives in posted) == [False, True]
    for each in release:
        each()
    for d in ds:
        arrives(d, f"k {d.address}", salt=2)
