"""The engine thread as the forward thread sees it: it says that something has happened, and it may end before
its rank is stopped, at its own start or by what is no error of a turn. Nothing may go on as if it lived."""

import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from p2pkv.connector.idle_steps import WakeupSender
from p2pkv.connector.metadata import StepMetadata
from p2pkv.connector.worker import Worker
from p2pkv.demo.processes import free_ports
from p2pkv.engine import commands as do
from p2pkv.engine import thread as engine_thread
from p2pkv.engine.core_liveness import Beat
from p2pkv.pairing import Address
from support.engine.engines import Geometry, TestRank, make_rank
from support.links.memory import MemoryNetwork
from support.waiting import wait_for


@pytest.fixture
def made() -> Iterator[TestRank]:
    rank = a_rank()
    yield rank
    rank.rank.stop()


def a_rank(**options: Any) -> TestRank:
    return make_rank("P", Geometry(), 0, free_ports(), MemoryNetwork().rank(), 0.0, **options)


def test_a_thread_that_cannot_begin_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    no_stream = RuntimeError("CUDA cannot make a stream for p2pkv")
    monkeypatch.setattr(engine_thread, "own_stream", Mock(side_effect=no_stream))
    with pytest.raises(RuntimeError, match=r"engine thread has ended.*cannot make a stream.*restart"):
        a_rank()


def test_a_thread_that_ends_is_not_announced_and_fails_the_next_step(
    made: TestRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert made.rank.trouble() == ""
    end = SystemExit("a thread's end")  # what `_guarded` does not catch
    monkeypatch.setattr(made.rank.core, "turn", Mock(side_effect=end))
    wait_for(lambda: not made.rank.alive, what="the end of the thread")
    assert "engine thread has ended" in made.rank.trouble()
    assert [each for each in caplog.records if each.levelname == "CRITICAL"]
    with pytest.raises(RuntimeError, match="engine thread has ended"):
        Worker(made.rank, {}, torch.device("cpu"), True, WakeupSender()).begin(StepMetadata())


def test_a_thread_that_stands_still_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = a_rank(stall_seconds=1.0).rank
    try:
        turn = rank.core.turn
        stand, go_on = [True], lambda: not stand
        monkeypatch.setattr(rank.core, "turn", lambda now: (wait_for(go_on, 60.0), turn(now)))
        wait_for(lambda: "stood still" in rank.trouble(), what="a thread that stands still")
        stand.clear()
        wait_for(lambda: not rank.trouble(), what="its next turn")
    finally:
        stand.clear()
        rank.stop()


def test_a_rank_whose_engine_core_falls_silent_is_not_announced_long_before_its_leases_end(
    made: TestRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "LATE_BEAT_SECONDS", late := 1.0)
    beats = [Beat(steps=1, work=False)]
    made.rank.steps.read_beats = lambda: beats
    wait_for(lambda: made.rank.steps.scheduled, what="a beat")
    assert made.rank.trouble() == ""
    beats.clear()
    since = time.monotonic()
    wait_for(lambda: "stopped or dead" in made.rank.trouble(), what="the doubt")
    assert time.monotonic() - since >= late / 2
    assert not made.rank.steps.trouble(time.monotonic()), "D is still told that its prompts are held"
    beats.append(Beat(steps=1, work=False))
    wait_for(lambda: not made.rank.trouble(), what="the end of the doubt")


# Who is waited for, and how long, is in tests/virtual/test_silence.py.


def test_an_event_ends_the_forward_threads_wait(make_memory):
    """What happens in the wait, and what has happened before it; else it would outlast the test."""
    d = make_memory("D")
    rank = d.ranks[0].rank
    for meanwhile in (True, False):
        d.do(do.Expect("k", Address("127.0.0.1", 1), 96, b"digest"))
        d.do(do.Drop("k", "over"))
        if not meanwhile:
            wait_for(lambda: rank.core._events)
        rank.wait_for_event(300.0)
        assert [type(event) for event in rank.events()] == [do.LoadFailed]
        d.do(do.Forget("k"))


def test_an_event_is_called_out_once_until_it_has_been_heard(make_memory):
    d = make_memory("D")
    rank, calls = d.ranks[0].rank, []
    rank.on_event = lambda event: calls.append(len(rank.core._events))
    for heard in (1, 2):
        for key in "ab":
            d.do(do.Expect(key, Address("127.0.0.1", 1), 96, b"digest"))
            d.do(do.Drop(key, "over"))
        wait_for(lambda: len(rank.core._events) == 2)
        assert len(calls) == heard
        assert len(rank.events()) == 2
        for key in "ab":
            d.do(do.Forget(key))
