"""The workers' side: what vLLM's forward thread does for p2pkv. It only appends to a queue."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from p2pkv.connector.idle_steps import SPINNING, Bell
from p2pkv.connector.loads import Loads
from p2pkv.connector.metadata import Ended, StepMetadata, WorkerNews
from p2pkv.connector.stats import Growth, P2pKvStats
from p2pkv.engine import commands as do
from p2pkv.engine.rank import Rank
from p2pkv.pages.device import make_recorder


class Worker:
    """One rank. `places` gives each layer's index in the rank's cache; layers that share KV have none.

    `hooks`: whether a layer's hook says that the whole step's KV of this layer is written.
    """

    def __init__(
        self, rank: Rank, places: Mapping[str, int], device: torch.device, hooks: bool = True
    ) -> None:
        self.rank = rank
        self._places = places
        self._layers = len(places)
        self._hooks = hooks
        self._record = make_recorder(device)
        self._growth = Growth(rank.counters)
        self._prompts: tuple[tuple[str, int], ...] = ()
        # Layers whose hooks have fired and which have not been handed over, and how many make a message.
        self._run = 0, 0
        self._stride = 1
        # P, by key: requests that vLLM has ended and waits for, and prompts whose pages are free.
        self._ended: dict[str, str] = {}
        self._free: set[str] = set()
        self._idle_wait = 0.0
        self._bell = Bell()
        rank.call_on_event(self._bell.ring)
        self.loads = Loads(rank)

    # Before the forward.

    def preempt(self, meta: StepMetadata) -> None:
        """Nothing reads the revoked prompts' pages any more when this returns."""
        # Some runners leave out the end of a step: V1's on all but the last stage, with a drafter.
        self.end()
        self.rank.revoke(meta.revoked)

    def begin(self, meta: StepMetadata) -> None:
        self._idle_wait = meta.idle_wait
        self._bell.address = meta.bell
        SPINNING.idle = meta.idle
        if meta.work:
            self.rank.steps.begin(time.monotonic())
        for hold in meta.holds:
            self.rank.do(hold)
        for offer in meta.offers:
            self.rank.do(offer)
        for prefill in meta.prefills:
            self.rank.do(prefill.pages)
            if prefill.cached:
                cached = ((prefill.pages.key, prefill.cached),)
                self.rank.do(do.Computed(cached, 0, self._layers, self._record()))
        self._stride = self.rank.layers_per_message(sum(each.stop - each.start for each in meta.prefills))
        self._run = 0, 0
        self._prompts = tuple((prefill.pages.key, prefill.stop) for prefill in meta.prefills)
        for ended in meta.sent:
            self._prompt_ended(ended)
        if meta.loads and not (fence := self._record()).ready():
            # The pages may have been another request's until now, and the step before still runs.
            self.rank.do(do.After(fence))
        self.loads.begin(meta)

    def _prompt_ended(self, ended: Ended) -> None:
        if ended.reason:
            self.rank.do(do.Abort(ended.key, ended.reason))
        self._ended[ended.key] = ended.request_id

    # During and after the forward.

    def layer(self, name: str) -> None:
        """The hook of one layer: its KV of this step is written, or queued on the current stream."""
        place = self._places.get(name)
        if place is None or not self._prompts or not self._hooks:
            return
        if place != self._run[1]:
            self._say()
            self._run = place, place
        self._run = self._run[0], place + 1
        if self._run[1] - self._run[0] >= self._stride:
            self._say()

    def _say(self) -> None:
        """Hand over a run of layers: the engine is woken when there is a message's worth, not sooner."""
        first, stop = self._run
        if stop > first:
            self.rank.do(do.Computed(self._prompts, first, stop, self._record()))
        self._run = stop, stop

    def end(self) -> None:
        """The step's forwards are over: sweep up what no hook covered."""
        if self._prompts:
            self.rank.do(do.Computed(self._prompts, 0, self._layers, self._record()))
            self.rank.do(do.Flush(tuple(key for key, _ in self._prompts)))
            self._prompts = ()
        self.rank.steps.end()

    # What vLLM asks afterwards.

    def results(self) -> KVConnectorTransferResults:
        """Each id once, and a send only when vLLM has been told to wait for it.

        A step that computes nothing waits for the engine thread here, up to `StepMetadata.idle_wait`.
        """
        # An engine that is idle after this must not count as hung, and some runners leave out the end.
        self.rank.steps.end()
        self._hear()
        if self._idle_wait and not self._anything_new:
            self.rank.wait_for_event(self._idle_wait)
            self._hear()
        results = self.loads.results()
        for key in self._free & self._ended.keys():
            self._free.discard(key)
            results.finished_sending.add(self._ended.pop(key))
            self.rank.do(do.Forget(key))
        return results

    def _hear(self) -> None:
        for event in self.rank.events():
            if isinstance(event, do.PagesFree):
                self._free.add(event.key)
            else:
                self.loads.note(event)

    @property
    def _anything_new(self) -> bool:
        """Whether this step has something to report to the scheduler."""
        return self.loads.anything_new or not self._free.isdisjoint(self._ended)

    def news(self) -> WorkerNews | None:
        news = self.loads.news()
        return news if news.begun or news.failed else None

    def stats(self) -> P2pKvStats | None:
        return self._growth.since()

    def stop(self) -> None:
        self.rank.stop()
        self._bell.close()
