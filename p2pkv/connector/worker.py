"""The workers' side: what vLLM's forward thread does for p2pkv. It only appends to a queue."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from p2pkv.connector.metadata import Ended, StepMetadata, WorkerNews
from p2pkv.connector.stats import Growth, P2pKvStats
from p2pkv.engine import commands as do
from p2pkv.engine.rank import Rank
from p2pkv.pages.device import make_recorder


class Worker:
    """One rank. `places` gives each layer's index in the rank's cache; layers that share KV have none."""

    def __init__(self, rank: Rank, places: Mapping[str, int], device: torch.device) -> None:
        self.rank = rank
        self._places = places
        self._layers = len(places)
        self._record = make_recorder(device)
        self._growth = Growth(rank.counters)
        self._prompts: tuple[tuple[str, int], ...] = ()
        self._news = WorkerNews()
        # P: requests that vLLM has ended and waits for, and prompts whose pages are free.
        self._ended: dict[str, str] = {}
        self._free: set[str] = set()
        # D: requests by key, and those for which vLLM waits.
        self._requests: dict[str, str] = {}
        self._loading: set[str] = set()
        self._leaving: set[str] = set()
        """Keys of which only P still has to hear that nothing is wanted."""

    # Before the forward.

    def preempt(self, meta: StepMetadata) -> None:
        """Nothing reads the revoked prompts' pages any more when this returns."""
        self.rank.revoke(meta.revoked)
        self._free.difference_update(meta.revoked)

    def begin(self, meta: StepMetadata) -> None:
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
        self._prompts = tuple((prefill.pages.key, prefill.stop) for prefill in meta.prefills)
        for ended in meta.sent:
            self._prompt_ended(ended)
        for request_id, expect in meta.expects:
            self._requests[expect.key] = request_id
            self.rank.do(expect)
        for load in meta.loads:
            self._load(load)
        for ended in meta.drops:
            self._load_dropped(ended)

    def _load(self, load: do.Load) -> None:
        if load.stop > load.start:
            self._loading.add(load.key)
        elif self._requests.pop(load.key, None) is not None:
            self._leaving.add(load.key)
        self.rank.do(load)

    def _prompt_ended(self, ended: Ended) -> None:
        if ended.reason:
            self.rank.do(do.Abort(ended.key, ended.reason))
        if ended.report:
            self._ended[ended.key] = ended.request_id
        else:
            self.rank.do(do.Forget(ended.key))

    def _load_dropped(self, ended: Ended) -> None:
        if ended.key not in self._requests:
            return
        self.rank.do(do.Drop(ended.key, ended.reason))
        if ended.key not in self._loading:
            self._requests.pop(ended.key)
            self.rank.do(do.Forget(ended.key))

    # During and after the forward.

    def layer(self, name: str) -> None:
        """The hook of one layer: its KV of this step is written, or queued on the current stream."""
        place = self._places.get(name)
        if place is not None and self._prompts:
            self.rank.do(do.Computed(self._prompts, place, place + 1, self._record()))

    def end(self) -> None:
        """The step's forwards are over: sweep up what no hook covered."""
        if self._prompts:
            self.rank.do(do.Computed(self._prompts, 0, self._layers, self._record()))
            self.rank.do(do.Flush(tuple(key for key, _ in self._prompts)))
            self._prompts = ()
        self.rank.steps.end()

    # What vLLM asks afterwards.

    def results(self) -> KVConnectorTransferResults:
        """Each id once, and a send only when vLLM has been told to wait for it."""
        results = KVConnectorTransferResults()
        for event in self.rank.events():
            self._note(event, results)
        for key in self._free & self._ended.keys():
            self._free.discard(key)
            results.finished_sending.add(self._ended.pop(key))
            self.rank.do(do.Forget(key))
        return results

    def _note(self, event: do.Event, results: KVConnectorTransferResults) -> None:
        match event:
            case do.PagesFree(key):
                self._free.add(key)
            case do.Begun(key):
                if key in self._requests:
                    self._news.begun[self._requests[key]] = 1
            case do.Loaded(key) | do.LoadFailed(key) if key in self._leaving:
                self._leaving.discard(key)
                self.rank.do(do.Forget(key))
            case do.Loaded(key):
                self._load_ended(key, results)
            case do.LoadFailed(key, _) if key in self._loading:
                results.failed_recving.add(self._requests[key])
                self._load_ended(key, results)
            case do.LoadFailed(key, reason):
                if key in self._requests:
                    self._news.failed[self._requests[key]] = reason

    def _load_ended(self, key: str, results: KVConnectorTransferResults) -> None:
        if key not in self._requests:
            return
        request_id = self._requests.pop(key)
        if key in self._loading:
            self._loading.discard(key)
            results.finished_recving.add(request_id)
        self.rank.do(do.Forget(key))

    def news(self) -> WorkerNews | None:
        news, self._news = self._news, WorkerNews()
        return news if news.begun or news.failed else None

    def stats(self) -> P2pKvStats | None:
        return self._growth.since()

    def stop(self) -> None:
        self.rank.stop()
