"""The connector in vLLM's workers: what the forward thread does for p2pkv.

During the forward it only appends to a queue. `preempt` waits for copies on the device, and `results` of an
idle step waits for events.
"""

import gc
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from p2pkv.connector.idle_steps import WakeupSender
from p2pkv.connector.metadata import CounterDeltas, EndedRequest, StepMetadata, WorkerMetadata
from p2pkv.connector.vllm_patches import SPIN_WAIT
from p2pkv.device import Fence, make_recorder
from p2pkv.engine import commands as do
from p2pkv.engine.commands import Command, Event
from p2pkv.engine.computed_layers import ComputedLayers
from p2pkv.engine.context import LOOK_SECONDS, Counters
from p2pkv.engine.core_liveness import Liveness
from p2pkv.engine.thread import Rank


@dataclass
class _Load:
    """One request that the engine knows, or that uses the key of one that the engine still knows."""

    request_id: str
    expect: do.Expect
    begun: bool = False
    """P has begun to compute it."""
    order: do.Load | None = None
    """What vLLM has ordered before the engine knows of it."""
    waited: bool | None = None
    """Whether vLLM keeps its blocks until the load is reported; False: it asks no more; None: undecided."""
    dropped: bool = False
    """Whatever has come of it is not wanted."""
    complete: bool | None = None
    """Whether all has come; None until the engine has reported its end."""
    now: list[int] | None = None
    """The step computes with it; these blocks are no good if it fails."""


class Loads:
    """D's loads. The engine reports the end of each request once; only then is the request forgotten."""

    def __init__(self, rank: Rank) -> None:
        self.rank: Rank | SleepingRank = rank
        self._known: dict[str, _Load] = {}
        self._later: dict[str, _Load] = {}
        self._results = KVConnectorTransferResults()
        self._metadata = WorkerMetadata()
        self.now: set[str] = set()
        """Loads that the step computes with and that have not ended."""
        self._spoilt: set[int] = set()

    # Orders of vLLM's scheduler.

    def begin(self, meta: StepMetadata, fence: Fence | None = None) -> None:
        """`fence`: nothing may be written to the blocks of these loads before it is passed; None: at once."""
        new = {request_id for request_id, _ in meta.expects}
        for ended in meta.drops:
            if ended.request_id not in new:  # its key may be a new one's
                self._drop(ended)
        for request_id, expect in meta.expects:
            self._expect(_Load(request_id, expect))
        for request_id, load in meta.loads:
            self._load(request_id, replace(load, fence=fence), meta.now.get(load.key))
        for ended in meta.drops:
            if ended.request_id in new:
                self._drop(ended)
        self._fail(meta.withheld)

    def _expect(self, load: _Load) -> None:
        key = load.expect.key
        if key in self._known:
            self._later[key] = load
        else:
            self._known[key] = load
            self.rank.do(load.expect)

    def _load(self, request_id: str, order: do.Load, now: list[int] | None = None) -> None:
        """`now`: the blocks of a load that the step computes with."""
        if now is not None:
            self.now.add(order.key)
        if (later := self._later.get(order.key)) and later.request_id == request_id:
            later.order, later.now = order, now
            return
        load = self._known[order.key]
        assert load.request_id == request_id
        load.waited, load.now = now is None and order.stop > order.start, now
        if load.complete is None:
            self.rank.do(order)
        self._settle(order.key)

    def _drop(self, ended: EndedRequest) -> None:
        """The request has ended, or is to fail: load nothing more."""
        key = ended.key
        if (later := self._later.get(key)) and later.request_id == ended.request_id:
            del self._later[key]
            self._fail([ended.request_id] * ended.report)
        load = self._known.get(key)
        if load is None or load.request_id != ended.request_id:
            return
        load.waited, load.dropped = ended.report, True
        if load.complete is None:
            self.rank.do(do.Drop(key, ended.reason))
        self._settle(key)

    # Events of the engine.

    def note(self, event: do.Event) -> None:
        match event:
            case do.Begun(key, generation) if key in self._known:
                self._known[key].begun = True
                self._metadata.begun[self._known[key].request_id] = [generation]
            case do.Loaded(key) if key in self._known:
                self._known[key].complete = True
                self._settle(key)
            case do.LoadFailed(key, reason) if key in self._known:
                load = self._known[key]
                load.complete = False
                if load.waited is None:
                    self._metadata.failed[load.request_id] = reason
                self._settle(key)

    def _settle(self, key: str) -> None:
        """Report the end to vLLM, if it waits, and let the engine forget the request."""
        load = self._known[key]
        if load.complete is None or load.waited is None:
            return
        if load.waited:
            self._results.finished_recving.add(load.request_id)
            if load.dropped or not load.complete:
                self._results.failed_recving.add(load.request_id)
        elif load.now is not None:
            self.now.discard(key)
            self._spoilt.update(() if load.complete else load.now)
        del self._known[key]
        self.rank.do(do.Forget(key, "D"))
        if later := self._later.pop(key, None):
            self._expect(later)
            if later.order is not None:
                self._load(later.request_id, later.order, later.now)

    def _fail(self, request_ids: Iterable[str]) -> None:
        """Report these loads to vLLM, as failed."""
        self._results.finished_recving.update(request_ids)
        self._results.failed_recving.update(request_ids)

    # When the instance wakes up.

    def wake(self, rank: Rank) -> None:
        """The engine is another one: it expects what P has not begun, and the rest has failed."""
        self.rank = rank
        for key, load in list(self._known.items()):
            if load.complete is None and (load.begun or load.waited is not None):
                self.note(do.LoadFailed(key, "D was put to sleep while this prompt's KV was on its way"))
            elif load.complete is None:
                rank.do(load.expect)

    # What vLLM asks.

    @property
    def has_output(self) -> bool:
        """Whether `results` or `metadata` would have anything."""
        return bool(self._results.finished_recving or self._metadata.begun or self._metadata.failed)

    def spoilt(self) -> set[int]:
        """Blocks with which a step has computed although their load had failed, since the last call."""
        spoilt, self._spoilt = self._spoilt, set()
        return spoilt

    def results(self) -> KVConnectorTransferResults:
        """Loads that have ended since the last call."""
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def worker_metadata(self) -> WorkerMetadata | None:
        """What else the scheduler's side must learn, since the last call; None: nothing."""
        metadata, self._metadata = self._metadata, WorkerMetadata()
        return metadata if metadata.begun or metadata.failed else None


class SleepingRank:
    """In place of the rank while the instance sleeps: it does nothing, and nothing happens."""

    def __init__(self) -> None:
        self.counters, self.steps = Counters(), Liveness(math.inf)
        self.failure = ""

    def do(self, command: Command) -> None: ...

    def revoke(self, keys: Iterable[str]) -> None: ...

    def events(self) -> list[Event]:
        return []

    def wait_for_event(self, seconds: float) -> None: ...

    def layers_per_message(self, tokens: int) -> int:
        return 1

    def trouble(self) -> str:
        return ""

    def stop(self) -> None: ...


class Worker:
    """One rank. `indices`: each layer's index in the rank's cache; layers that share KV have none.

    `hooks`: whether the whole step's KV of a layer is written when its hook is called.
    """

    def __init__(
        self, rank: Rank, indices: Mapping[str, int], device: torch.device, hooks: bool, wakeup: WakeupSender
    ) -> None:
        self.rank: Rank | SleepingRank = rank
        self._indices = indices
        self._layers = len(indices)
        self._hooks = hooks
        self.record = make_recorder(device)
        self._computed = ComputedLayers(self._layers, self.record)
        self.deltas = CounterDeltas(rank.counters)
        # P, by key: prompts that the engine knows (None: they are offered), requests that vLLM has ended and
        # waits for, and prompts whose blocks are free.
        self._held: dict[str, do.HoldPrompt | None] = {}
        self._ended: dict[str, str] = {}
        self._free: set[str] = set()
        self._invalidate: do.Invalidate | None = None
        """D: the last one, which says what weights there are."""
        self._idle_wait = 0.0
        self._wakeup = wakeup
        self._quiet = False
        """The engine thread learns of this step's prompts in the next one."""
        self._postponed: list[Command] = []
        """Those of a quiet step."""
        rank.on_event = self._wakeup.send
        self.loads = Loads(rank)

    # Before the forward.

    def preempt(self, meta: StepMetadata) -> None:
        """Nothing reads the revoked prompts' blocks any more when this returns."""
        # Some runners leave out the end of a step: V1's on all but the last stage, with a drafter.
        self._quiet = False
        self._sweep()
        if meta.now and meta.invalidate is None:
            # They are loaded while vLLM prepares the step.
            expects = [each for each in meta.expects if each[1].key in meta.now]
            loads = [each for each in meta.loads if each[1].key in meta.now]
            early = StepMetadata(now=meta.now, expects=expects, loads=loads)
            meta.expects = [each for each in meta.expects if each not in early.expects]
            meta.loads = [each for each in meta.loads if each not in early.loads]
            self.loads.begin(early)
        revoked, meta.revoked = meta.revoked, []
        self.rank.revoke(revoked)

    def begin(self, meta: StepMetadata) -> None:
        """Take a step's orders. Raises RuntimeError, which ends vLLM's engine, if the engine thread has
        ended, as no transfer would; or if a step has failed, as this one may use what is not computed."""
        if failure := self.rank.failure or self._computed.failure:
            raise RuntimeError(failure)
        self._idle_wait = meta.idle_wait
        self._wakeup.address, self._wakeup.needed = meta.wakeup_address, not meta.work
        SPIN_WAIT.idle = meta.idle
        if meta.work:
            self.rank.steps.begin(time.monotonic())
        tokens = sum(each.stop - each.start for each in meta.prefills)
        stride = self.rank.layers_per_message(tokens)
        # What fits one message is sent behind the last layer, and the engine thread would only take time from
        # the forward and from the token's way to the client before the next step.
        self._quiet = bool(meta.prefills) and meta.quiet and stride >= self._layers
        order = self._postponed.append if self._quiet else self.rank.do
        for hold in meta.holds:
            self._held[hold.key] = hold
            order(hold)
        for key, reason in meta.stale:
            order(do.Abort(key, reason))
        if meta.invalidate is not None:
            self._invalidate = meta.invalidate
            self.rank.do(meta.invalidate)
        for offer in meta.offers:
            self._held[offer.key] = None
            order(offer)
        for prefill in meta.prefills:
            order(prefill.blocks)
            if prefill.cached:
                cached = ((prefill.blocks.key, prefill.cached),)
                order(do.Computed(cached, 0, self._layers, self.record()))
        prompts = tuple((prefill.blocks.key, prefill.stop) for prefill in meta.prefills)
        self._computed.begin(prompts, stride)
        for ended in meta.sent:
            if ended.reason:
                order(do.Abort(ended.key, ended.reason))
            self._ended[ended.key] = ended.request_id
        for key, reason in meta.released:
            order(do.Release(key, reason))
        # The blocks may have been another request's until now, and the step before may still run.
        fence = self.record() if meta.loads else None
        self.loads.begin(meta, None if fence is None or fence.ready() else fence)

    def load_now(self) -> None:
        """Wait for the loads that this step computes with. Raises RuntimeError if the engine thread ends."""
        while self.loads.now:
            self.rank.wait_for_event(LOOK_SECONDS)
            self._take_events()
            if self.rank.failure:
                raise RuntimeError(self.rank.failure)

    # During and after the forward.

    def layer(self, name: str) -> None:
        """The hook of one layer: its KV of this step is written, or queued on the current stream."""
        hooked = self._computed.prompts and self._hooks and not self._quiet
        if hooked and (index := self._indices.get(name)) is not None:
            self._computed.computed(index, self.rank.do)

    def end(self) -> None:
        """The step's forwards are over: sweep up what no hook covered, unless it is a quiet step."""
        self._computed.ended()
        self._sweep()

    def _sweep(self) -> None:
        if not self._quiet:
            for command in self._postponed:
                self.rank.do(command)
            self._postponed.clear()
            self._computed.end(self.rank.do)
        self.rank.steps.end()

    # What vLLM asks afterwards.

    def results(self) -> KVConnectorTransferResults:
        """Each id once, and a send only after vLLM was asked to wait for it.

        A step that computes nothing waits for the engine thread here, up to `StepMetadata.idle_wait`.
        """
        # Some runners leave out the end, and an engine that is idle after this must not count as hung.
        self._computed.ended()
        self.rank.steps.end()
        self._take_events()
        if self._idle_wait and not self.loads.has_output and self._free.isdisjoint(self._ended):
            self.rank.wait_for_event(self._idle_wait)
            self._take_events()
        results = self.loads.results()
        for key in self._free & self._ended.keys():
            self._free.discard(key)
            del self._held[key]
            results.finished_sending.add(self._ended.pop(key))
            self.rank.do(do.Forget(key, "P"))
        return results

    def _take_events(self) -> None:
        for event in self.rank.events():
            if isinstance(event, do.BlocksFree):
                self._free.add(event.key)
            else:
                self.loads.note(event)

    def sleep(self) -> None:
        """Give the rank up, with its links and its memory: nothing reads or writes blocks any more."""
        self._take_events()
        self.rank.stop()  # which ends all transfers: `wake` decides what follows
        self._postponed.clear()
        self.rank = self.loads.rank = SleepingRank()
        self.deltas = CounterDeltas(self.rank.counters)
        _collect()

    def wake(self, rank: Rank) -> None:
        self.rank = rank
        if self._invalidate is not None:
            rank.do(self._invalidate)
        for key, hold in self._held.items():
            if hold is None or key in self._ended:
                self._free.add(key)
            else:  # P has not begun it
                self._free.discard(key)
                rank.do(hold)
        self.deltas = CounterDeltas(rank.counters)
        rank.on_event = self._wakeup.send
        self.loads.wake(rank)

    def stop(self) -> None:
        self.rank.stop()
        self._wakeup.close()


def _collect() -> None:
    """Free now what only refers to itself, as a rank that has ended does. vLLM has taken its workers' objects
    out of the collector's sight after the start (`gc.freeze`), and there they go back."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
