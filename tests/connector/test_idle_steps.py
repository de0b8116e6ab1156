"""Steps that compute nothing: which of them wait for news, what ends the wait, how vLLM's processes nap."""

import inspect
import os
import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine import core as engine_core

from p2pkv.connector import P2pKvConnector, describe
from p2pkv.connector.idle_steps import (
    FIRST_WAIT,
    IDLE_SLEEP,
    MAX_SLEEP_MS,
    NAP_SECONDS,
    STEPLESS_MS,
    VLLM_IDLE_SLEEP,
    IdleBackoff,
    WakeupSender,
)
from p2pkv.connector.metadata import StepMetadata
from p2pkv.connector.vllm_patches import ENGINE_CORE, SPIN_WAIT, EngineCore, SpinWait
from p2pkv.engine import commands as do
from support.connector import instances
from support.connector.instances import asked
from support.waiting import wait_for

BOUND = 0.005


def idle(pace: IdleBackoff, steps: int = 1) -> list[float]:
    return [pace.step(FIRST_WAIT, BOUND, tokens=False, awaited=True, changed=False) for _ in range(steps)]


class TestPace:
    @pytest.mark.parametrize("what", ["tokens", "changed", "woken"])
    def test_it_is_short_again_once_something_has_happened(self, what: str) -> None:
        pace = IdleBackoff(1)
        idle(pace, 5)
        happened = {"tokens": False, "changed": False, "woken": False} | {what: True}
        pace.step(FIRST_WAIT, BOUND, awaited=True, **happened)
        assert idle(pace)[0] <= 2 * FIRST_WAIT

    @pytest.mark.parametrize("batches", [2, 3])
    def test_none_pauses_while_a_step_with_tokens_may_be_out(self, batches: int) -> None:
        pace = IdleBackoff(batches)
        for _ in range(3):
            pace.step(FIRST_WAIT, BOUND, tokens=True, awaited=True, changed=False)
            assert idle(pace, batches - 1) == [0.0] * (batches - 1)
            assert idle(pace)[0] > 0

    @pytest.mark.parametrize("batches", [1, 2, 4])
    def test_nor_while_a_step_may_be_out_that_brings_what_was_rung_for(self, batches: int) -> None:
        pace = IdleBackoff(batches)
        idle(pace, 5)
        rung = pace.step(FIRST_WAIT, BOUND, tokens=False, awaited=True, changed=False, woken=True)
        assert [rung, *idle(pace, batches)].count(0.0) == batches - 1


class TestScheduling:
    @pytest.fixture
    def bell(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """An engine core of this process can rest."""
        monkeypatch.setattr(ENGINE_CORE, "address", "\0a bell")
        return ENGINE_CORE.address

    def idle_steps(
        self, monkeypatch: pytest.MonkeyPatch, resumes: bool = False, **parallel: Any
    ) -> list[StepMetadata]:
        """What D tells its workers in five steps without tokens. `resumes`: each puts back a request."""
        if parallel.get("nnodes"):
            monkeypatch.setattr(describe, "refuse_what_cannot_pair", lambda config: None)
        config = instances.vllm_config("D")
        for name, value in parallel.items():
            setattr(config.parallel_config, name, value)
        made = P2pKvConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=[]))
        waiting = SimpleNamespace(step=lambda scheduled: StepMetadata(), awaits_workers=True, resumes=resumes)
        made.consumer = waiting  # type: ignore[assignment]
        return [made.build_connector_meta(None) for _ in range(5)]  # type: ignore[arg-type]

    def test_ranks_of_other_replicas_are_not_kept_waiting(
        self, monkeypatch: pytest.MonkeyPatch, bell: str
    ) -> None:
        """They may need a batch of this one that computes nothing."""
        assert not any(meta.idle for meta in self.idle_steps(monkeypatch, data_parallel_size=2))
        assert ENGINE_CORE.seconds == 0
        assert {meta.wakeup_address for meta in self.idle_steps(monkeypatch)} == {bell}

    def test_none_pauses_before_vllm_looks_at_a_request_that_is_back_in_its_queue(
        self, monkeypatch: pytest.MonkeyPatch, bell: str
    ) -> None:
        assert not any(meta.idle for meta in self.idle_steps(monkeypatch, resumes=True))
        assert ENGINE_CORE.seconds == 0

    @pytest.mark.parametrize("change", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}])
    def test_ranks_of_other_hosts_wait_in_the_step_for_no_bell_is_heard_from_there(
        self, monkeypatch: pytest.MonkeyPatch, bell: str, change: dict[str, Any]
    ) -> None:
        metas = self.idle_steps(monkeypatch, **change)
        assert all(meta.idle and meta.idle_wait and not meta.wakeup_address for meta in metas)

    @instances.each_pace
    def test_it_rests_after_an_idle_step_until_there_are_news(self, bell: str, ahead: int) -> None:
        d, request = asked("D", instances.tokens(50), ahead=ahead)
        rests = []
        for _ in range(12):
            d.step()
            rests.append(ENGINE_CORE.seconds)
        assert rests[-1] == IDLE_SLEEP and not d.rank.waits
        assert {meta.wakeup_address for meta in d.metas} == {bell}
        d.rank.begin(d.key(request))
        d.step(1 + ahead)
        assert ENGINE_CORE.seconds == 0.0
        alone = d.ask("cmpl-alone-0-00000001", instances.tokens(20), max_tokens=1)
        d.run_until(lambda: alone.request_id in d.ended)
        assert not any(meta.idle for meta in d.metas if meta.work)

    @instances.each_pace
    def test_d_waits_for_p_in_steps_that_compute_nothing(self, ahead: int) -> None:
        d, _ = asked("D", instances.tokens(50), ahead=ahead, ranks=2)
        d.step(12)
        assert d.rank.waits and max(d.rank.waits) == pytest.approx(BOUND / (1 + ahead))
        assert d.rank.waits == sorted(d.rank.waits) == d.ranks[1].waits
        assert SPIN_WAIT.idle

    @instances.each_pace
    def test_news_that_comes_in_the_wait_are_told_in_the_same_step(self, ahead: int) -> None:
        d, request = asked("D", instances.tokens(50), ahead=ahead)
        d.step(3)
        key = d.key(request)
        d.rank.meanwhile = lambda: None if d.rank.facts[key].offered else d.rank.begin(key)
        d.run_until(lambda: d.blocks(request), most=3 + ahead)

    @instances.each_pace
    def test_no_step_waits_while_the_tokens_of_an_earlier_one_are_out(self, ahead: int) -> None:
        d = instances.Instance("D", ahead=ahead)
        out: list[bool] = []
        d.rank.meanwhile = lambda: out.append(d.computing)
        d.ask(instances.inner_id(instances.pair_id()), instances.tokens(50))
        for number in range(5):
            alone = d.ask(f"cmpl-alone-0-{number:08x}", instances.tokens(20, number), max_tokens=3)
            d.step(1)
            assert not SPIN_WAIT.idle
            d.run_until(lambda: alone.request_id in d.ended)  # noqa: B023
            d.step(3)
        assert out and not any(out)

    @instances.each_pace
    def test_p_waits_for_word_that_the_blocks_are_free(self, ahead: int) -> None:
        p, request = asked("P", instances.tokens(50), max_tokens=1, ahead=ahead)
        p.run_until(lambda: request.request_id in p.ended)
        assert not p.rank.waits
        p.step(6)
        assert p.rank.waits
        (hold,) = p.rank.said(do.HoldPrompt)
        p.rank.meanwhile = lambda: p.rank.free(hold.key) if hold.key in p.rank.facts else None
        p.run_until(lambda: request.request_id in p.reported, most=2 + ahead)

    def test_the_option_switches_it_off(self) -> None:
        d, _ = asked("D", instances.tokens(50), idle_wait_ms=0)
        d.step(5)
        assert not d.rank.waits and not SPIN_WAIT.idle


class Core:
    """As much of vLLM's EngineCoreProc as takes its requests."""

    scheduler: Any = None
    step_fn: Any = None
    post_step: Any = None
    output_queue: Any = None

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.handled: list[Any] = []
        self.running = True

    def is_running(self) -> bool:
        return self.running

    def has_work(self) -> bool:
        return True

    def _handle_client_request(self, kind: Any, request: Any) -> None:
        self.handled.append(kind)

    def take(self) -> float:
        """Seconds that vLLM's engine core, as it is now, takes to look for requests."""
        begin = time.monotonic()
        engine_core.EngineCoreProc._process_input_queue(self)
        return time.monotonic() - begin


class TestRest:
    LONG = 60.0

    @pytest.fixture
    def rest(self, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
        # Connectors that other tests have made in this process have put the rest there already.
        original = inspect.unwrap(engine_core.EngineCoreProc._process_input_queue)
        monkeypatch.setattr(engine_core.EngineCoreProc, "_process_input_queue", original)
        original = inspect.unwrap(engine_core.EngineCoreProc._process_engine_step)
        monkeypatch.setattr(engine_core.EngineCoreProc, "_process_engine_step", original)
        made = EngineCore()
        made.sleeps_when_idle = True
        made.install()
        return made

    def test_there_is_no_rest_before_an_engine_core_has_looked_for_requests(self, rest: EngineCore) -> None:
        assert not rest.address
        Core().take()
        assert rest.address

    def test_it_rests_once_for_the_time_that_it_was_told(self, rest: EngineCore) -> None:
        core = Core()
        rest.seconds = 0.05
        assert core.take() >= 0.05 and not rest.seconds and not core.handled and not rest.take_wakeup()

    def test_a_request_ends_the_rest_and_is_handled(self, rest: EngineCore) -> None:
        core = Core()
        rest.seconds = self.LONG
        threading.Timer(0.05, core.input_queue.put, ((EngineCoreRequestType.ADD, None),)).start()
        core.take()
        assert core.handled == [EngineCoreRequestType.ADD] and not rest.take_wakeup()

    @pytest.fixture
    def rung(self, rest: EngineCore) -> Iterator[tuple[Core, WakeupSender]]:
        """An engine core that has looked for requests, and a bell that has been rung for it."""
        core, bell = Core(), WakeupSender()
        core.take()
        bell.address = rest.address
        bell.send(do.Begun("k"))
        yield core, bell
        bell.close()

    def test_a_bell_ends_the_rest_even_if_it_was_rung_before(
        self, rest: EngineCore, rung: tuple[Core, WakeupSender]
    ) -> None:
        core, bell = rung
        for _ in range(2):
            rest.seconds = self.LONG
            threading.Timer(0.05, bell.send, (do.Begun("k"),)).start()
            core.take()
            assert rest.take_wakeup()

    def test_a_bell_counts_although_vllm_itself_takes_the_wake_up(
        self, rest: EngineCore, rung: tuple[Core, WakeupSender]
    ) -> None:
        core, _ = rung
        wait_for(lambda: not core.input_queue.empty(), what="the wake-up")
        core.take()
        assert rest.take_wakeup() and not rest.take_wakeup()

    def test_what_other_users_send_wakes_nobody(
        self, rest: EngineCore, rung: tuple[Core, WakeupSender], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core, bell = rung
        wait_for(lambda: not core.input_queue.empty(), what="the wake-up")
        core.take()
        others, ours = [-2] * 5, os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: others.pop() if others else ours)
        for _ in range(6):
            bell.send(do.Loaded("k", 1))
        wait_for(lambda: not (others or core.input_queue.empty()), what="the wake-up")
        assert core.input_queue.qsize() == 1

    def hears(self, rest: EngineCore, d: instances.Instance, number: int) -> None:
        """Each rank of this D says that it has all of the load of this number."""
        core = Core()
        core.scheduler = d.scheduler
        core.take()
        for rank, _ in enumerate(d.ranks):
            assert core.input_queue.empty(), "one rank alone wakes nobody"
            bell = WakeupSender(rank, len(d.ranks))
            bell.address, bell.needed = rest.address, False
            bell.send(do.Begun("k"))
            bell.send(do.Loaded("k", number))
            bell.close()
        wait_for(lambda: not core.input_queue.empty(), what="the wake-up")
        core.take()

    @instances.each_pace
    @pytest.mark.parametrize("reported", [True, False])
    def test_a_load_that_all_ranks_have_said_is_not_told_twice(
        self, rest: EngineCore, reported: bool, ahead: int
    ) -> None:
        d, request = asked("D", instances.tokens(50), ahead=ahead, ranks=2)
        key = d.start_load(request)
        load = d.rank.said(do.Load)[0]

        def report() -> None:
            for rank in d.ranks:
                rank.load(key)

        if reported:
            report()
            d.run_until(lambda: request.request_id in d.reported)
        self.hears(rest, d, load.number)
        d.step()
        assert request.request_id in d.computed, "the pass behind it computes"
        if not reported:
            report()
        d.finish(request)
        assert d.reported == [request.request_id] * reported
        d.assert_at_rest()

    def test_a_load_that_is_not_wanted_any_more_is_not_told(self, rest: EngineCore) -> None:
        d, request = asked("D", instances.tokens(50))
        d.start_load(request)
        connector: Any = d.scheduler.connector
        connector.reset_cache()
        self.hears(rest, d, d.rank.said(do.Load)[0].number)
        d.step()
        assert request.request_id not in d.computed, "D's weights may have changed"
        d.finish(request)
        d.assert_at_rest()

    def test_nothing_is_kept_for_a_connector_that_takes_no_messages(self, rest: EngineCore) -> None:
        d: Any = SimpleNamespace(scheduler=SimpleNamespace(get_kv_connector=object), ranks=[0])
        self.hears(rest, d, 1)
        assert not rest._messages

    def test_a_step_that_has_computed_nothing_is_followed_by_vllms_rest_unless_it_brought_news(
        self, rest: EngineCore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core, fed = Core(), list[str]()
        dog = SimpleNamespace(feed=lambda: fed.append("fed"))
        monkeypatch.setattr(engine_core, "get_watch_dog", lambda: dog, raising=False)
        core.scheduler = SimpleNamespace(has_requests=lambda: True)
        core.post_step, core.output_queue = lambda computed: None, queue.Queue()
        for news, computed in ((False, False), (True, False), (False, True)):
            rest.seconds = 0.0

            def step(news: bool = news, computed: bool = computed) -> tuple[dict[int, str], bool]:
                rest.changed |= news
                return {0: "an output"}, computed

            core.step_fn = step
            assert engine_core.EngineCoreProc._process_engine_step(core) is computed
            assert rest.seconds == (0.0 if news or computed else VLLM_IDLE_SLEEP)
            assert core.output_queue.get_nowait() == (0, "an output")
        assert len(fed) == 3

    def test_one_that_shuts_down_does_not_rest(self, rest: EngineCore) -> None:
        core = Core()
        core.running = False
        rest.seconds = self.LONG
        asked: list[Any] = []
        core.input_queue.get = lambda *args, **more: asked.append((args, more))  # type: ignore[method-assign]
        core.take()
        assert not asked, "it has waited for a request"


@pytest.fixture
def condition(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A reader's SpinCondition as vLLM makes it; `yields` counts its turns of spinning."""
    # Connectors that other tests have made in this process have put the nap there already.
    original = inspect.unwrap(shm_broadcast.SpinCondition.wait)
    monkeypatch.setattr(shm_broadcast.SpinCondition, "wait", original)
    context = zmq.Context()
    writer = shm_broadcast.SpinCondition(False, context, "inproc://spin")
    reader = shm_broadcast.SpinCondition(True, context, "inproc://spin")
    reader.writer, reader.yields = writer, 0

    def count() -> None:
        reader.yields += 1

    monkeypatch.setattr(shm_broadcast, "sched_yield", count)
    yield reader
    context.destroy(linger=0)


def waits(condition: Any, waited: float) -> None:
    """It looks for a message, so many seconds after the last one."""
    condition.last_read = time.monotonic() - waited
    condition.wait(timeout_ms=5000)


@pytest.mark.parametrize("spin", [False, True])
def test_the_option_says_whether_vllms_processes_spin(spin: bool) -> None:
    P2pKvConnector(instances.vllm_config("D", spin=spin), KVConnectorRole.WORKER, instances.kv_cache_config())
    assert SPIN_WAIT.spins is spin


class TestSpinning:
    @pytest.fixture
    def spinning(self, condition: Any) -> SpinWait:
        made = SpinWait()
        made.install()
        return made

    @pytest.fixture
    def polled(self, condition: Any) -> list[int]:
        """How long it has waited for the socket of the wake-ups each time."""
        times: list[int] = []
        condition.poller = SimpleNamespace(poll=lambda timeout: times.append(timeout) or [])
        return times

    def test_a_process_with_something_to_compute_spins_as_vllm_made_it(
        self, condition: Any, spinning: SpinWait
    ) -> None:
        condition.wait(timeout_ms=5000)
        assert condition.yields == 1

    def test_an_idle_one_sleeps_on_the_socket_of_the_wake_ups_for_vllms_own_second(
        self, condition: Any, spinning: SpinWait, polled: list[int]
    ) -> None:
        spinning.idle = True
        for waited in (0.0, 0.003, 0.5):
            waits(condition, waited)
        assert not condition.yields
        assert polled == [MAX_SLEEP_MS] * 3
        assert condition.busy_loop_s == 1, "vLLM's own setting is back"
        waits(condition, 2.0)
        assert polled[3:] == [5000], "it waits as vLLM does"

    def test_a_worker_without_a_step_naps_for_an_eighth_of_its_wait(
        self, condition: Any, spinning: SpinWait, polled: list[int]
    ) -> None:
        spinning.worker = True
        for steps in (0.0, 0.5, 1.5):
            waits(condition, steps * STEPLESS_MS / 1000)
        assert condition.yields == 2 and polled == [1]
        waits(condition, 0.5)
        spinning.worker = False
        condition.wait(timeout_ms=5000)
        assert condition.yields == 3 and polled == [1, MAX_SLEEP_MS]

    def test_without_spinning_it_leaves_the_core_to_those_it_waits_for(
        self, condition: Any, spinning: SpinWait, polled: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        naps: list[float] = []
        monkeypatch.setattr("p2pkv.connector.vllm_patches.time.sleep", naps.append)
        spinning.spins = False
        waits(condition, 0.5)
        assert naps == [NAP_SECONDS] and not condition.yields
        waits(condition, 2.0)
        assert polled == [5000] and len(naps) == 1, "it waits as vLLM does"

    def test_a_wake_up_ends_the_nap(
        self, condition: Any, spinning: SpinWait, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spinning.idle = True
        monkeypatch.setattr("p2pkv.connector.idle_steps.MAX_SLEEP_MS", 60_000)
        poll, ended = condition.poller.poll, []
        condition.poller = SimpleNamespace(poll=lambda timeout: ended.append(poll(timeout)) or ended[-1])
        threading.Timer(0.05, condition.writer.notify).start()
        condition.wait(timeout_ms=None)
        assert len(ended) == 1 and ended[0], "the minute was over before the wake-up was seen"

    def test_messages_come_although_their_wake_ups_are_lost(
        self, spinning: SpinWait, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM looks for itself after five seconds only."""
        spinning.idle = True
        monkeypatch.setattr(shm_broadcast.SpinCondition, "notify", lambda self: None)
        writer = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=1 << 16, max_chunks=4)
        reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
        for number in range(20):
            timer = threading.Timer(0.01, writer.enqueue, (number,))
            timer.start()
            assert reader.dequeue(timeout=4.5) == number
            timer.join()

    def test_the_extension_in_c_does_not_spin_either(
        self, condition: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spun, made = list[str](), SpinWait()
        monkeypatch.setattr(shm_broadcast, "SPINLOOP_EXT_ENABLED", True)
        monkeypatch.setattr(
            shm_broadcast, "spinloop", lambda *args, **kwargs: spun.append("spun"), raising=False
        )
        made.install()
        shm_broadcast.spinloop(b"", bool, timeout=1)
        for made.spins, made.idle in ((True, True), (False, False)):
            shm_broadcast.spinloop(b"", bool, timeout=1)
        assert spun == ["spun"]
