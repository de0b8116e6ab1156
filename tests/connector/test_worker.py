"""One rank's worker: the engine's commands in the order in which vLLM's two runners call it."""

import socket
import uuid
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from p2pkv.config import ConfigError
from p2pkv.connector import P2pKvConnector
from p2pkv.connector.idle_steps import WakeupSender
from p2pkv.connector.metadata import EndedRequest, PrefillStep, StepMetadata
from p2pkv.connector.vllm_patches import EARLY_REVOCATION
from p2pkv.connector.worker import Worker
from p2pkv.engine import commands as do
from p2pkv.engine.computed_layers import ComputedLayers
from p2pkv.pairing import Address
from support.connector.instances import BLOCK, LAYERS, FakeRank, kv_cache_config, vllm_config

D = Address("127.0.0.1", 21101)
LAST = list(LAYERS)[-1]


def prefill_step(stop: int, *, first: bool) -> StepMetadata:
    meta = StepMetadata(work=True, prefills=[PrefillStep(do.PromptBlocks("k", ([1, 2],)), 0, 0, stop)])
    if first:
        meta.holds, meta.offers = [do.HoldPrompt("k", D)], [do.OfferPrompt("k", D, 32, b"digest")]
    return meta


class Runner:
    """Runs steps as one of vLLM's model runners does; `hooked` layers announce themselves; `sync`: a step
    computes with what it loads."""

    sync = False

    def __init__(self, connector: P2pKvConnector, hooked: Sequence[str]) -> None:
        self.connector = connector
        self.config = vllm_config("P")
        self.hooked = hooked

    def forward(self) -> None:
        tensor = torch.empty(0)
        for name in self.hooked:
            self.connector.wait_for_layer_load(name)
            self.connector.save_kv_layer(name, tensor, None)


class First(Runner):
    """V1's. `drafter`: results are polled before the drafter's forward, and the end comes after it."""

    drafter = False

    def step(self, meta: StepMetadata) -> KVConnectorOutput:
        output = SchedulerOutput.make_empty()
        output.kv_connector_metadata, output.has_sync_kv_loads = meta, self.sync
        mixin = KVConnectorModelRunnerMixin
        self.connector.handle_preemptions(meta)
        if not meta.work:
            return (
                mixin.kv_connector_no_forward(output, self.config).kv_connector_output or KVConnectorOutput()
            )
        with (
            set_forward_context(None, self.config),
            mixin.maybe_get_kv_connector_output(output, defer_finalize=self.drafter) as told,
        ):
            self.forward()
        if self.drafter:
            self.finalize()
        return told

    def finalize(self) -> None:
        KVConnectorModelRunnerMixin.finalize_kv_connector()


class FirstWithDrafter(First):
    drafter = True


class FirstWithDrafterBeforeTheLastStage(FirstWithDrafter):
    """All but the last pipeline stage leave the end of the step out."""

    def finalize(self) -> None:
        pass


class Second(Runner):
    """V2's."""

    def __init__(self, connector: P2pKvConnector, hooked: Sequence[str]) -> None:
        super().__init__(connector, hooked)
        connector.register_kv_caches = lambda kv_caches: None  # type: ignore[method-assign]
        self.active = ActiveKVConnector(self.config, {})

    def step(self, meta: StepMetadata) -> KVConnectorOutput:
        output = SchedulerOutput.make_empty()
        output.kv_connector_metadata, output.has_sync_kv_loads = meta, self.sync
        if not meta.work:
            return self.active.no_forward(output).kv_connector_output or KVConnectorOutput()
        with set_forward_context(None, self.config):
            self.active.pre_forward(output)
            self.forward()
        self.active.finish_forward()
        return self.end()

    def end(self) -> KVConnectorOutput:
        return self.active.post_forward(set())


class SecondWithDrafter(Second):
    """From 0.33 on: results first, then the drafter, then the end."""

    def end(self) -> KVConnectorOutput:
        if not hasattr(self.active, "finalize_step"):
            return super().end()
        told = self.active.post_forward(set(), defer_finalize=True)
        self.active.finalize_step()
        return told


RUNNERS = [First, FirstWithDrafter, FirstWithDrafterBeforeTheLastStage, Second, SecondWithDrafter]
Make = Callable[..., tuple[Runner, FakeRank]]


@pytest.fixture(params=RUNNERS, ids=lambda kind: kind.__name__)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    def runner(
        role: str = "P", hooked: Sequence[str] = tuple(LAYERS), hooks: bool = True
    ) -> tuple[Runner, FakeRank]:
        config = vllm_config(role)
        connector = P2pKvConnector(config, KVConnectorRole.WORKER, kv_cache_config())
        rank = FakeRank()
        connector.worker = Worker(rank, LAYERS, torch.device("cpu"), hooks, WakeupSender())
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        return request.param(connector, hooked), rank

    return runner


def covered(rank: FakeRank) -> dict[int, int]:
    out = dict.fromkeys(range(len(LAYERS)), 0)
    for each in rank.said(do.Computed):
        for layer in range(each.layer, each.layer_stop):
            out[layer] = max(out[layer], *(stop for _, stop in each.prompts))
    return out


@pytest.mark.parametrize("hooked", [[], list(LAYERS), [LAST], ["model.layers.9.shared"]], ids=str)
def test_every_layer_is_said_by_the_end_of_the_step_or_the_beginning_of_the_next(
    make: Make, hooked: list[str]
) -> None:
    runner, rank = make(hooked=hooked)
    runner.step(prefill_step(16, first=True))
    runner.step(prefill_step(32, first=False))
    runner.step(StepMetadata())
    assert covered(rank) == {0: 32, 1: 32}
    assert [flush.keys for flush in rank.said(do.Flush)] == [("k",), ("k",)]
    assert rank.steps.running is None
    kinds = [type(command).__name__ for command in rank.log]
    assert kinds[:3] == ["HoldPrompt", "OfferPrompt", "PromptBlocks"]


def test_a_hook_is_said_at_once(make: Make) -> None:
    runner, rank = make(hooked=[LAST])
    seen: list[list[do.Computed]] = []
    forward = runner.forward

    def watch() -> None:
        assert rank.steps.running is not None
        seen.append(rank.said(do.Computed))
        forward()
        seen.append(rank.said(do.Computed))

    runner.forward = watch  # type: ignore[method-assign]
    runner.step(prefill_step(16, first=True))
    before, after = seen
    assert not before, "nothing is computed before the forward"
    assert [(each.layer, each.layer_stop) for each in after] == [(1, 2)]


def test_the_last_layers_hook_says_what_does_not_fill_a_message(make: Make) -> None:
    """The end of the step may come late: behind sampling, with vLLM's second runner."""
    runner, rank = make()
    rank.layers_per_message = lambda tokens: 99  # type: ignore[method-assign]
    forward, seen = runner.forward, list[do.Computed]()
    runner.forward = lambda: (forward(), seen.extend(rank.said(do.Computed)))  # type: ignore[method-assign, func-returns-value]
    runner.step(prefill_step(16, first=True))
    assert [(each.layer, each.layer_stop) for each in seen] == [(0, 2)]


@pytest.mark.parametrize(("waits", "runs"), [(True, [(0, 6)]), (False, [(0, 2), (2, 4), (4, 6)])])
def test_where_the_device_waits_for_launches_nothing_is_said_before_the_last_layer(
    waits: bool, runs: list[tuple[int, int]]
) -> None:
    layers, said = ComputedLayers(6, lambda: Mock(ready=lambda: waits)), list[Any]()
    layers.begin((("k", 16),), 2)
    for index in range(6):
        layers.computed(index, said.append)
    assert [(each.layer, each.layer_stop) for each in said] == runs


def test_layers_without_a_hook_between_others_wake_the_engine_no_sooner() -> None:
    """Of MLA with an indexer every second layer has a hook, of hybrids every fourth: one fence a message."""
    layers, said = ComputedLayers(16, lambda: Mock(ready=lambda: False)), list[Any]()
    for last in ([0], [12, 14]):  # which layer is the last with a hook, the first step shows
        said.clear()
        layers.begin((("k", 16),), 3)
        for index in range(0, 16, 2):
            layers.computed(index, said.append)
        layers.ended()
        layers.end(said.append)
        computed = said[:-1]
        fences = {id(each.fence): each.fence for each in computed}.values()
        runs = [[each.layer for each in computed if each.fence is fence] for fence in fences]
        assert runs[:3] == [[0, 2, 4], [6, 8, 10], last]
        assert computed[-1].layer_stop == 16


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_forward_that_raises_has_computed_no_more_than_its_hooks_have_said(
    make: Make, error: type[BaseException]
) -> None:
    """As a signal does. V1 ends such a step, too, a P that stops goes on with what is computed, and where it
    does not stop vLLM may have sent the next step already."""
    runner, rank = make(hooked=[LAST])
    forward = runner.forward
    try:
        raise KeyError  # a step within an `except` is one as any
    except KeyError:
        runner.step(prefill_step(16, first=True))

    def fail() -> None:
        forward()
        raise error

    runner.forward = fail  # type: ignore[method-assign]
    with pytest.raises(error):
        runner.step(prefill_step(32, first=False))
    runner.forward = forward  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a step of P has failed"):
        runner.step(prefill_step(48, first=False))
    assert covered(rank) == {0: 16, 1: 32}
    assert [each.key for each in rank.said(do.Abort)] == ["k"]


@pytest.mark.parametrize("message", [1, 99])
def test_what_no_d_waits_for_and_fits_a_message_is_said_in_the_next_step(make: Make, message: int) -> None:
    """So that the engine thread takes no time from the token that goes to the client."""
    runner, rank = make()
    rank.layers_per_message = lambda tokens: message  # type: ignore[method-assign]
    meta = prefill_step(32, first=True)
    meta.quiet = True
    runner.step(meta)
    assert bool(rank.log) == (message == 1)
    runner.step(StepMetadata(sent=[EndedRequest("request", "k", "")]))
    kinds = [type(command) for command in rank.log]
    assert kinds[:3] == [do.HoldPrompt, do.OfferPrompt, do.PromptBlocks]
    assert covered(rank) == {0: 32, 1: 32} and rank.said(do.Flush)


def test_with_micro_batches_only_the_end_of_the_step_says_anything(make: Make) -> None:
    runner, rank = make(hooks=False)
    runner.step(prefill_step(16, first=True))
    runner.step(StepMetadata())
    assert [(each.layer, each.layer_stop) for each in rank.said(do.Computed)] == [(0, 2)]


def test_a_sweep_that_the_runner_left_out_comes_before_a_revocation(make: Make) -> None:
    runner, rank = make()
    runner.step(prefill_step(16, first=True))
    rank.revoke = lambda keys: rank.log.extend(do.Revoked(key) for key in keys)  # type: ignore[method-assign]
    runner.step(StepMetadata(revoked=["k"]))
    kinds = [type(command) for command in rank.log]
    assert kinds.index(do.Flush) < kinds.index(do.Revoked)
    assert do.Computed not in kinds[kinds.index(do.Revoked) :]


@pytest.fixture
def second_runner(monkeypatch: pytest.MonkeyPatch) -> type[GPUModelRunner]:
    """V2's, as it is before anybody has replaced anything."""
    monkeypatch.setattr(EARLY_REVOCATION, "installed", False)
    monkeypatch.setattr(EARLY_REVOCATION, "preempt", None)
    monkeypatch.setattr(GPUModelRunner, "update_requests", GPUModelRunner.update_requests)
    return GPUModelRunner


@pytest.mark.parametrize("among_others", [False, True])
def test_v2_overwrites_no_block_before_the_revocation(
    second_runner: type[GPUModelRunner], monkeypatch: pytest.MonkeyPatch, among_others: bool
) -> None:
    """vLLM's own code zeroes the blocks, and says so to a stand-in for its kernels."""
    config = vllm_config("P")
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    connector = P2pKvConnector(config, KVConnectorRole.WORKER, kv_cache_config())
    rank = FakeRank()
    connector.worker = Worker(rank, LAYERS, torch.device("cpu"), True, WakeupSender())
    monkeypatch.setattr(EARLY_REVOCATION, "preempt", connector.worker.preempt)
    seen: list[Any] = []
    rank.revoke = seen.extend  # type: ignore[method-assign]
    meta = StepMetadata(revoked=["k"])
    step = SchedulerOutput.make_empty()
    step.new_block_ids_to_zero = [1, 2]
    step.kv_connector_metadata = MultiKVConnectorMetadata(metadata=(meta,)) if among_others else meta
    second_runner.update_requests(stand_in_for_v2(zero=seen.append), step)
    connector.handle_preemptions(meta)
    assert seen == ["k", [1, 2]]


def stand_in_for_v2(zero: Callable[[list[int]], None]) -> Any:
    """What V2's `update_requests` needs of its runner."""
    none = np.zeros(0, np.int32)
    states = SimpleNamespace(
        num_computed_tokens_np=none, prefill_len=SimpleNamespace(np=none), num_computed_prefill_tokens=none
    )
    return SimpleNamespace(
        req_states=states, block_tables=None, kv_block_zeroer=SimpleNamespace(zero_block_ids=zero)
    )


def test_a_v2_runner_that_looks_otherwise_is_refused_where_it_overwrites_blocks(
    second_runner: type[GPUModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = vllm_config("P"), vllm_config("D")
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    monkeypatch.setattr(second_runner, "update_requests", lambda self, output, more: None)
    # The configuration has no layer of such a state.
    monkeypatch.setattr("p2pkv.connector.describe.refuse_what_cannot_move", lambda config, cache: None)
    P2pKvConnector(p, KVConnectorRole.WORKER, kv_cache_config())
    state = MambaSpec(block_size=BLOCK, shapes=((2, 2), (2, 2, 2)), dtypes=(torch.float32,) * 2)
    P2pKvConnector(d, KVConnectorRole.WORKER, kv_cache_config(spec=state))
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        P2pKvConnector(p, KVConnectorRole.WORKER, kv_cache_config(spec=state))


@pytest.mark.parametrize("early", [False, True])
def test_a_send_is_reported_once_and_not_before_vllm_waits(make: Make, early: bool) -> None:
    """`early`: while the prompt was queued on P, its D has not been heard of for a lease."""
    runner, rank = make()
    meta = prefill_step(16, first=True)
    if early:
        runner.step(StepMetadata(holds=meta.holds))
        rank.free("k")
        meta.holds = []
    told = [runner.step(meta)]
    rank.free("k")
    told += [runner.step(StepMetadata()) for _ in range(2)]
    assert not any(each.finished_sending for each in told)
    told = [runner.step(StepMetadata(sent=[EndedRequest("r", "k", "")]))]
    told += [runner.step(StepMetadata()) for _ in range(3)]
    assert [set(each.finished_sending or ()) for each in told] == [{"r"}, set(), set(), set()]
    assert rank.log[-1] == do.Forget("k", "P")


def test_what_p_has_not_begun_is_held_anew_when_it_wakes_up(make: Make) -> None:
    runner, rank = make()
    meta, worker, other = prefill_step(16, first=True), runner.connector.worker, FakeRank()
    runner.step(StepMetadata(holds=meta.holds))
    rank.free("k")
    runner.step(StepMetadata())
    worker.sleep()
    worker.wake(other)
    meta.holds = []
    told = [runner.step(meta), runner.step(StepMetadata(sent=[EndedRequest("r", "k", "")]))]
    assert not any(each.finished_sending for each in told), "D may still take it"
    other.free("k")
    assert runner.step(StepMetadata()).finished_sending == {"r"}


LOAD = do.Load("k", 0, 31, ([1, 2],))


def expected(key: str) -> do.Expect:
    return do.Expect(key, D, 32, b"digest")


def begun(runner: Runner, rank: FakeRank) -> None:
    runner.step(StepMetadata(expects=[("r", expected("k"))]))
    rank.begin("k")


def test_loads_are_handed_over_before_the_forward_and_reported_once(make: Make) -> None:
    runner, rank = make(role="D")
    begun(runner, rank)
    told = runner.step(StepMetadata())
    assert told.kv_connector_worker_meta.begun == {"r": [""]}
    at_forward: list[do.Load] = []
    runner.forward = lambda: at_forward.extend(rank.said(do.Load))  # type: ignore[method-assign]
    runner.step(StepMetadata(work=True, loads=[("r", LOAD)]))
    assert at_forward == [LOAD]
    assert rank.steps.running is None
    rank.load("k")
    told_last = [runner.step(StepMetadata()) for _ in range(3)]
    assert [set(each.finished_recving or ()) for each in told_last] == [{"r"}, set(), set()]
    assert not any(each.failed_recving for each in told_last)
    assert rank.log[-1] == do.Forget("k", "D")


def test_a_load_that_ends_before_the_engine_knows_of_it_is_reported(make: Make) -> None:
    """The engine still knows an earlier request with the same key, and vLLM waits for both."""
    runner, rank = make(role="D")
    begun(runner, rank)
    runner.step(StepMetadata(expects=[("again", expected("k"))], loads=[("r", LOAD), ("again", LOAD)]))
    meta = StepMetadata(expects=[("third", expected("k"))])
    meta.drops = [EndedRequest(name, "k", "D's request has ended") for name in ("r", "again")]
    told = [runner.step(meta), runner.step(StepMetadata())]
    assert [set(each.finished_recving or ()) for each in told] == [{"again", "r"}, set()]
    assert told[0].failed_recving == {"again", "r"}
    rank.begin("k")
    assert runner.step(StepMetadata()).kv_connector_worker_meta.begun == {"third": [""]}


def test_steps_without_news_are_empty(make: Make) -> None:
    for role in ("P", "D"):
        runner, _ = make(role=role)
        told = runner.step(StepMetadata())
        assert told.is_empty()
        assert not told.invalid_block_ids


def test_what_the_rank_has_counted_since_the_last_step_comes_as_statistics(make: Make) -> None:
    runner, rank = make()
    rank.counters.add("bytes_sent", 5)
    told = [runner.step(StepMetadata()).kv_connector_stats for _ in range(2)]
    assert told[0].data == {"bytes_sent": 5}
    assert told[1] is None


def test_before_the_caches_are_registered_every_hook_does_nothing() -> None:
    connector = P2pKvConnector(vllm_config("D"), KVConnectorRole.WORKER, kv_cache_config())
    connector.handle_preemptions(StepMetadata())
    connector.bind_connector_metadata(StepMetadata(work=True))
    connector.save_kv_layer(LAST, torch.empty(0), None)
    connector.wait_for_save()
    assert connector.get_transfer_results(set()).finished_sending == set()
    assert connector.build_connector_worker_meta() is None
    assert connector.get_kv_connector_stats() is None
    connector.shutdown()


@pytest.mark.parametrize("still_runs", [False, True])
def test_a_load_writes_its_pages_only_behind_the_forward_that_had_them(make: Make, still_runs: bool) -> None:
    runner, rank = make("D")
    worker = runner.connector.worker
    fence = Mock(ready=lambda: False) if still_runs else worker.record()
    worker.record = lambda: fence
    begun(runner, rank)
    runner.step(StepMetadata(work=True, loads=[("r", LOAD)]))
    (load,) = rank.said(do.Load)
    assert load.fence is (fence if still_runs else None)


@pytest.mark.parametrize("former", [False, True])
def test_a_load_that_the_step_computes_with_is_waited_for_before_its_forward(
    make: Make, former: bool
) -> None:
    """`former`: the engine still knows an earlier request with the same key, which has just ended."""
    runner, rank = make("D")
    if former:
        runner.step(StepMetadata(expects=[("r", expected("now"))]))
    load = do.Load("now", 0, 32, ([1, 2],), number=1)
    meta = StepMetadata(work=True, expects=[(name, expected(name)) for name in ("now", "other")])
    meta.loads, meta.now = [("now", load)], {"now": [1, 2]}
    meta.drops = [EndedRequest("r", "now", "D's request has ended", report=False)] * former
    rank.handed_on.add("now")
    rank.meanwhile = lambda: rank.facts["now"].asked and rank.load("now")
    runner.forward = lambda: seen.append("now" in rank.facts)  # type: ignore[method-assign]
    seen: list[bool] = []
    runner.sync = True
    told = runner.step(meta)
    assert seen == [False], "the engine has loaded and forgotten it"
    assert rank.said(do.Load) == [load] and len(rank.said(do.Expect)) == 2 + former
    assert not told.finished_recving and not told.invalid_block_ids


def test_news_ring_the_bell_after_an_idle_step_only(make: Make) -> None:
    runner, rank = make("D")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bells:
        bells.bind(f"\0p2pkv-test-{uuid.uuid4().hex}")
        bells.setblocking(False)
        idle = StepMetadata(idle=True, wakeup_address=bells.getsockname().decode())
        runner.step(StepMetadata(expects=[(name, expected(name)) for name in "abc"]))
        rank.begin("a")
        with pytest.raises(BlockingIOError):
            bells.recv(1)
        runner.step(idle)
        rank.begin("b")
        assert bells.recv(1) == b""
        runner.step(StepMetadata(work=True))
        rank.begin("c")
        with pytest.raises(BlockingIOError):
            bells.recv(1)
    runner.step(idle)
    rank.fail("a")  # nobody hears it, and nothing happens
    assert not rank.waits
