"""The engine core's beats, between real processes and of vLLM's own scheduler."""

import json
import logging
import multiprocessing
import os
import queue
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType

from p2pkv.connector.core_beats import BEAT_SECONDS, BeatListener, BeatSender, state_of
from p2pkv.control.discovery import Workload
from p2pkv.demo.processes import free_ports
from p2pkv.engine.core_liveness import Beat
from support.connector.instances import Instance, inner_id, pair_id, tokens
from support.waiting import wait_for

FORK = multiprocessing.get_context("fork")


class Core:
    """In place of the scheduler's connector."""

    beat = Beat(steps=7, work=True, paused=True)

    def state(self, orphaned: bool) -> Beat:
        return Beat(steps=self.beat.steps, work=self.beat.work, paused=self.beat.paused, orphaned=orphaned)


def address() -> str:
    return f"127.0.0.1:{free_ports()}"


def listen(rank: str, out: Connection) -> None:
    """A worker: says which beats it gets."""
    listener = BeatListener(rank)
    out.send("listens")
    while True:
        for beat in listener.read():
            out.send(beat)
        time.sleep(BEAT_SECONDS / 10)


def send(rank: str) -> None:
    core = Core()
    core.beat = Beat(steps=666, work=False)
    sender = BeatSender([rank], core.state)
    sender._thread.join()


@contextmanager
def process(target: Any, *args: Any) -> Iterator[Any]:
    made = FORK.Process(target=target, args=args, daemon=True)
    made.start()
    try:
        yield made
    finally:
        made.kill()
        made.join()


def test_a_worker_takes_beats_from_its_engine_core_and_from_nobody_else() -> None:
    """vLLM's engine core is its workers' parent."""
    rank, core = address(), Core()
    ours, theirs = FORK.Pipe()
    with process(listen, rank, theirs), process(send, rank):
        assert ours.poll(60.0) and ours.recv() == "listens"
        assert not ours.poll(6 * BEAT_SECONDS), "a stranger's beat"
        sender = BeatSender([rank], core.state)
        assert ours.poll(20.0) and {ours.recv() for _ in range(3)} == {core.beat}
        sender.close()


def flood(rank: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        while True:
            with suppress(OSError):
                out.sendto(b"", f"\0p2pkv-core-{rank}")


def test_a_stranger_that_leaves_no_room_for_beats_holds_none_up() -> None:
    rank, core = address(), Core()
    ours, theirs = FORK.Pipe()
    with process(listen, rank, theirs):
        assert ours.poll(60.0) and ours.recv() == "listens"
        with process(flood, rank):
            sender = BeatSender([rank], core.state)
            for _ in range(4):
                assert ours.poll(20.0) and ours.recv() == core.beat
            sender.close()


def core_process(rank: str, out: int) -> None:
    """An engine core with a rank in it, whose server may go."""
    listener, core = BeatListener(rank), Core()
    BeatSender([rank], core.state)
    with os.fdopen(out, "w") as said:
        while True:
            for beat in listener.read():
                print(json.dumps([os.getpid(), beat.orphaned]), file=said, flush=True)
            time.sleep(BEAT_SECONDS / 10)


def server_process(rank: str, out: int) -> None:
    """An HTTP server, that starts an engine core."""
    FORK.Process(target=core_process, args=(rank, out)).start()
    time.sleep(1000)


def test_a_core_whose_server_is_killed_says_so() -> None:
    reading, writing = os.pipe()
    server = FORK.Process(target=server_process, args=(address(), writing))
    server.start()
    os.close(writing)
    pid = 0
    try:
        with os.fdopen(reading) as said:
            pid, orphaned = json.loads(said.readline())
            assert not orphaned
            server.kill()
            server.join()
            end = time.monotonic() + 20.0
            while not orphaned:
                assert time.monotonic() < end, "it does not notice"
                _, orphaned = json.loads(said.readline())
    finally:
        server.kill()
        if pid:
            os.kill(pid, signal.SIGKILL)


def test_a_name_that_is_taken_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    rank = address()
    first, second = BeatListener(rank), BeatListener(rank)
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "cannot take its engine core's beats" in record.getMessage()
    assert second.read() == []
    first.close()
    second.close()


def test_a_state_that_cannot_be_read_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.connector.core_beats.BEAT_SECONDS", 0.01)
    core = Core()
    core.beat = None  # type: ignore[assignment]
    sender = BeatSender([address()], core.state)
    wait_for(lambda: caplog.records, what="the line")
    time.sleep(0.2)  # for further ones
    assert len(caplog.records) == 1
    sender.close()


def test_a_sender_ends_with_what_it_speaks_for() -> None:
    core = Core()
    sender = BeatSender([address()], core.state)
    del core
    wait_for(lambda: not sender._thread.is_alive(), what="the end of the thread")


# What vLLM's own objects say.


def beat_of(instance: Instance, requests: queue.Queue[Any], running: bool = True) -> Beat:
    core = SimpleNamespace(scheduler=instance.scheduler, input_queue=requests, is_running=lambda: running)
    consumer = instance.scheduler.connector.consumer
    is_loaded = consumer.is_loaded if consumer is not None else lambda _: False
    return state_of(core, steps=1, transfers=False, orphaned=False, is_loaded=is_loaded)


def test_work_is_what_vllm_has_to_step_for_and_requests_that_nobody_takes() -> None:
    d, requests = Instance("D"), queue.Queue[Any]()
    assert not beat_of(d, requests).work
    requests.put("a request")
    assert beat_of(d, requests).work, "its loop takes nothing from its queue"
    requests.get()
    request = d.ask(inner_id(pair_id()), tokens(50))
    beat = beat_of(d, requests)
    assert beat.work and beat.workload is not None
    work = beat.workload
    assert (work.prompts, work.tokens, work.answers) == (0, 0, 1), "D computes no prompt that comes from a P"
    d.abort(request)
    d.run_until(lambda: not d.scheduler.requests)
    d.step()
    assert not beat_of(d, requests).work


@pytest.mark.parametrize("state", list(PauseState))
def test_a_pause_of_either_kind_is_one(state: PauseState) -> None:
    p = Instance("P")
    p.scheduler.set_pause_state(state)
    assert beat_of(p, queue.Queue()).paused is (state is not PauseState.UNPAUSED)


@pytest.mark.parametrize("running", [True, False])
def test_an_engine_core_that_finishes_what_it_has_and_ends_is_no_paused_one(running: bool) -> None:
    beat = beat_of(Instance("P"), queue.Queue(), running)
    assert (beat.stopping, beat.paused) == (not running, False)


def test_each_step_counts() -> None:
    d = Instance("D")
    connector = d.scheduler.connector
    before = connector._beat(False)
    d.ask(inner_id(pair_id()), tokens(50))
    d.step(3)
    after = connector._beat(False)
    assert after.steps - before.steps == 3 and after.work and not before.work


def test_the_workload_is_what_the_scheduler_and_its_input_queue_have() -> None:
    p, requests = Instance("P"), queue.Queue[Any]()
    one = p.ask("one", tokens(50))
    assert beat_of(p, requests).workload == Workload(waiting=1, prompts=1, tokens=50, answers=1)
    p.step()
    assert beat_of(p, requests).workload == Workload(running=1, answers=1)
    two = p.ask(inner_id(pair_id()), tokens(70), max_tokens=1)
    requests.put((EngineCoreRequestType.ADD, (two, 0)))  # taken from there, and counted once
    requests.put((EngineCoreRequestType.ABORT, ["no request"]))
    work = beat_of(p, requests).workload
    assert (work.prompts, work.tokens, work.answers) == (1, 70, 1), "P's part of a pair has no answer"
    for each in (one, two):
        p.abort(each)
    p.run_until(lambda: not p.scheduler.requests)
    assert beat_of(p, queue.Queue()).workload == Workload()


def test_a_scheduler_that_cannot_be_read_costs_no_beat() -> None:
    d, requests = Instance("D"), queue.Queue[Any]()
    requests.put("what no vLLM of today puts there")
    beat = beat_of(d, requests)
    assert beat.work and beat.workload is None


def test_without_the_engine_core_no_workload_is_known() -> None:
    beat = state_of(None, steps=1, transfers=True, orphaned=False, is_loaded=lambda _: False)
    assert beat.workload is None and beat.work
