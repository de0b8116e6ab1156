"""How ranks and links end on a device: nothing is freed that is still used, nothing is used that has ended.

The device is tests/support/cuda/device.py; it refuses what a real one refuses, or crashes for.
"""

import gc
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from p2pkv.device import make_recorder, own_stream
from p2pkv.kv.cache import PagedCache, RankCache
from p2pkv.kv.small_copies import Ring
from p2pkv.links.base import LinkFactory, Receive, Send
from p2pkv.links.gpu import CudaDevice
from p2pkv.links.ipc import IpcLinks
from p2pkv.links.nccl import NcclLinks
from support.cuda import ipc as ipc_simulated
from support.cuda.device import CUDA, CardMemory, CardNccl, SimulatedCuda
from support.cuda.kernels import NO_GCC, CpuLauncher, compiled
from support.engine.engines import Geometry, engine_maker, make_pages, soon_on_engine_thread
from support.engine.transfers import arrives, begin, half, load
from support.nccl import simulated as nccl_simulated
from support.waiting import wait_for

KINDS = ("ipc", "nccl")
GEOMETRY = Geometry()
TABLE = list(range(6))
CUT = (0, 4), (0, 90), (0, 2)
STAGING = 1 << 20


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> CpuLauncher:
    if NO_GCC:
        pytest.skip(NO_GCC)
    return CpuLauncher(compiled(tmp_path_factory.mktemp("kernels")))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    simulated = SimulatedCuda(monkeypatch)
    yield simulated
    gc.collect()
    simulated.let_go()
    ipc_simulated.let_go()
    nccl_simulated.let_go()


def all_ended(cuda: SimulatedCuda) -> None:
    """Nothing was refused, and nothing is left: helper threads may take a moment."""

    def over() -> bool:
        gc.collect()
        return bool(cuda.driver.refusals) or not cuda.leftovers()

    wait_for(over, what="the end of all")
    cuda.let_go()


def on_card(cache: PagedCache) -> PagedCache:
    """The same, for the engine: it is on the device."""
    cache.device = CUDA
    cache._record = make_recorder(CUDA)
    return cache


def links_of(cuda: SimulatedCuda, kind: str, receives: bool) -> LinkFactory:
    on = CudaDevice(CUDA)
    if kind == "ipc":
        return IpcLinks(on, CardMemory(cuda), STAGING, receives)
    return NcclLinks(CardNccl(cuda), on, STAGING, 20.0)


class OwnThread:
    """A thread with a stream of its own that does what it is told, as a rank's does; `kept` is its own."""

    def __init__(self, *kept: object) -> None:
        self.chunks = kept
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def do(self, act: Callable[[], Any]) -> Any:
        self._orders.put(act)
        result, error = self._answers.get(timeout=20.0)
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        self._orders.put(None)
        self._thread.join(20.0)
        assert not self.alive

    def _main(self) -> None:
        with own_stream(CUDA):
            while (act := self._orders.get()) is not None:
                try:
                    self._answers.put((act(), None))
                except BaseException as error:
                    self._answers.put((None, error))
                del act
        self.chunks = ()


# torch's pinned buffers, which outlive the rank.


def test_a_pinned_buffer_is_freed_after_the_rank_that_used_it(cuda: SimulatedCuda) -> None:
    """On an H100, with a stream that was destroyed at the rank's end, this was a segmentation fault."""
    thread, kept = OwnThread(), [Ring(CUDA, torch.int32)]
    thread.do(lambda: kept[0].copy(np.arange(10)))
    thread.end()
    kept.clear()
    all_ended(cuda)


def test_a_rank_that_starts_takes_the_stream_of_one_that_has_ended(cuda: SimulatedCuda) -> None:
    def stream(thread: OwnThread) -> int:
        return thread.do(lambda: cuda.stream)

    first, second = OwnThread(), OwnThread()
    taken = {stream(first), stream(second)}
    assert len(taken) == 2 and 0 not in taken
    for _ in range(3):
        first.end()
        first = OwnThread()
        assert {stream(first), stream(second)} == taken
    assert cuda.driver.made == 2
    first.end()
    second.end()
    assert cuda.leftovers() == []


def test_a_link_takes_the_stream_of_one_that_has_ended_and_never_the_engines(cuda: SimulatedCuda) -> None:
    card = CudaDevice(CUDA)
    thread = OwnThread()
    thread.end()
    link = card.stream()
    assert cuda.driver.made == 2, "a link's stream has another priority than an engine's"
    number = link.number
    link.close()
    assert card.stream().number == number and cuda.driver.made == 2


def test_a_stream_is_given_back_when_nothing_is_on_it(cuda: SimulatedCuda) -> None:
    """Also if an error ends the thread's work."""
    under_way = lambda: cuda.driver.queue(cuda.stream, "a kernel", [])  # noqa: E731
    with pytest.raises(KeyError), own_stream(CUDA):
        under_way()
        assert cuda.driver.busy
        raise KeyError
    assert cuda.leftovers() == []


def test_a_stream_of_a_device_that_has_failed_is_not_used_again(
    cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with own_stream(CUDA):
        monkeypatch.setattr(cuda.driver, "cuEventSynchronize", lambda event: 719)
    assert cuda.leftovers() == ["a stream"]
    assert "the device has failed, so a stream of p2pkv is not used again" in caplog.text


# One rank's thread, links, kernels, and the memory that it shares, in every order.

PARTS = ("thread", "links", "kernels", "memory")


@dataclass
class Side:
    """One rank, as far as a device knows it, and the operations that it has under way."""

    links: LinkFactory | None
    cache: RankCache | None
    thread: OwnThread
    memory: list[torch.Tensor] = field(default_factory=list)
    """Views of staging, the peer's too."""
    ends: list[object] = field(default_factory=list)

    def end(self, part: str) -> None:
        """The thread holds what it uses until it ends, as a rank's does. It closes links, if it still can."""
        if part == "thread":
            self.thread.end()
        elif part == "links":
            self.thread.do(self.links.close) if self.thread.alive else self.links.close()
            self.links = None
            self.ends.clear()
        elif part == "kernels":
            self.cache = None
        else:
            self.memory.clear()
        gc.collect()


def side_of(cuda: SimulatedCuda, launcher: CpuLauncher, kind: str, role: str) -> Side:
    links = links_of(cuda, kind, receives=role == "D")
    with cuda.moving(launcher):
        pages, cache = make_pages(GEOMETRY, 0)
    whole = RankCache([on_card(cache)])
    whole.warm_up()
    return Side(links, whole, OwnThread(pages, whole, links))


def begin_all(p: Side, d: Side) -> None:
    """With copies that nobody has waited for: a message is being read, one handed over, one only written."""
    gather, scatter = p.cache.groups[0].gather, d.cache.groups[0].scatter
    nbytes = p.cache.groups[0].nbytes(4, *CUT[1], 2)
    invitation = p.links.invite()
    inbound, acceptance = d.thread.do(lambda: d.links.accept(invitation, STAGING // 2))  # type: ignore[union-attr]
    outbound = p.thread.do(lambda: p.links.complete(invitation, acceptance))  # type: ignore[union-attr]

    def poll() -> None:
        d.thread.do(inbound.poll)
        p.thread.do(outbound.poll)

    def send(slot: int, commit: bool = True) -> Send:
        made = outbound.reserve(nbytes, slot)
        gather(made.buffer, *CUT, [TABLE])
        if commit:
            made.commit()
        return made

    def arrived() -> bool:
        poll()
        return d.thread.do(receives[0].done)

    wait_for(lambda: d.thread.do(inbound.ready) & p.thread.do(outbound.ready))
    receives: list[Receive] = [d.thread.do(lambda: inbound.post(nbytes)) for _ in range(3)]
    sends = [p.thread.do(lambda: send(receives[0].remote_slot))]
    wait_for(arrived, what="the first message")
    d.thread.do(lambda: scatter(receives[0].buffer, *CUT, [TABLE]))
    d.thread.do(receives[0].release)
    sends.append(p.thread.do(lambda: send(receives[1].remote_slot)))
    sends.append(p.thread.do(lambda: send(receives[2].remote_slot, commit=False)))
    p.memory += [each.buffer for each in sends]
    d.memory += [each.buffer for each in receives]
    p.ends += [outbound, *sends]
    d.ends += [inbound, *receives]


@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_ends_in_every_order(
    cuda: SimulatedCuda, launcher: CpuLauncher, kind: str, first: str
) -> None:
    orders = list(itertools.permutations(PARTS))
    descriptors = len(os.listdir("/proc/self/fd"))
    for order in orders:
        sides = {role: side_of(cuda, launcher, kind, role) for role in "PD"}
        begin_all(sides["P"], sides["D"])
        assert cuda.driver.busy, "nothing is under way"
        for role in (first, *{"P", "D"} - {first}):
            for part in order:
                sides[role].end(part)
        sides.clear()
        all_ended(cuda)
    assert cuda.driver.made <= 4, "each order needs two engines' streams, and two links'"
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


# Whole engines.


@pytest.mark.parametrize("order", ["PD", "DP"])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_stop_with_a_prompt_under_way(
    cuda: SimulatedCuda, launcher: CpuLauncher, kind: str, order: str
) -> None:
    """And the same ranks again, as after a sleep, on the streams of those before."""
    for _ in range(2):
        with cuda.moving(launcher), engine_maker(partial(engine_links, cuda, kind), device=on_card) as make:
            made = {role: make(role) for role in "PD"}
            p, d = made["P"], made["D"]
            begin(p, d)
            load(d)
            arrives(d)
            half(p, d, "k2")
            for role in order:
                made[role].stop()
            del make, made, p, d
        all_ended(cuda)
    assert cuda.driver.made <= 4


@pytest.mark.parametrize("role", ["P", "D"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engines_thread_that_fails_leaves_nothing(
    cuda: SimulatedCuda, launcher: CpuLauncher, caplog: pytest.LogCaptureFixture, kind: str, role: str
) -> None:
    """It closes its links while its own stream is current: their events then stand behind its copies."""

    def fail() -> None:
        with cuda.moving(launcher), engine_maker(partial(engine_links, cuda, kind), device=on_card) as make:
            made = {each: make(each) for each in "PD"}
            half(made["P"], made["D"])
            rank = made[role].ranks[0].rank
            rank.core.close = partial(note, rank.core.close)  # type: ignore[method-assign]
            soon_on_engine_thread(rank, lambda: sys.exit("this thread ends"))
            wait_for(lambda: not rank.alive, what="the end of the thread")
            assert "this thread ends" in rank.failure

    def note(close: Callable[[], None]) -> None:
        closed_on.append(cuda.stream)
        close()

    closed_on: list[int] = []
    with caplog.at_level(sys.maxsize, "p2pkv.engine"):  # a captured record holds the error, and that the rank
        fail()
    assert len(closed_on) == 1 and closed_on[0] != 0
    all_ended(cuda)


def test_what_a_rank_takes_for_copies_is_there_when_its_thread_begins(
    cuda: SimulatedCuda, launcher: CpuLauncher
) -> None:
    """What warms up is queued on the stream of the thread that starts the rank, not on its own."""
    with cuda.moving(launcher):
        cache = RankCache([on_card(make_pages(GEOMETRY, 0)[1])])
    cache.groups[0].copier.warm_up()
    assert cuda.driver.busy
    cache.warm_up()
    assert not cuda.driver.busy


def engine_links(cuda: SimulatedCuda, kind: str, side: str, rank: int) -> LinkFactory:
    return links_of(cuda, kind, receives=side == "D")
