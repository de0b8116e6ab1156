"""D's workers' side: one rank's loads, from what vLLM asks for to what it is told, each request once."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from p2pkv.connector.metadata import Ended, StepMetadata, WorkerNews
from p2pkv.engine import commands as do
from p2pkv.engine.rank import Rank


@dataclass
class _Load:
    """One request that the engine knows."""

    request_id: str
    waited: bool = False
    """vLLM has given it pages, and keeps them until it hears of it."""
    unwanted: bool = False
    """Nobody will ask for it any more."""
    complete: bool | None = None
    """Whether all has come; None until the engine has said its last word."""


@dataclass
class _Later:
    """A request that uses the key of one that the engine still knows."""

    request_id: str
    expect: do.Expect
    order: do.Load | None = None


class Loads:
    """The engine says of each request, once, how it has ended; only then is it forgotten."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._known: dict[str, _Load] = {}
        self._later: dict[str, _Later] = {}
        self._results = KVConnectorTransferResults()
        self._news = WorkerNews()

    @property
    def requests(self) -> dict[str, str]:
        """vLLM's ids of the requests that the engine knows, by key."""
        return {key: load.request_id for key, load in self._known.items()}

    # What vLLM's scheduler says.

    def begin(self, meta: StepMetadata) -> None:
        for request_id, expect in meta.expects:
            self._expect(request_id, expect)
        for request_id, load in meta.loads:
            self._load(request_id, load)
        for ended in meta.drops:
            self._drop(ended)

    def _expect(self, request_id: str, expect: do.Expect) -> None:
        if expect.key in self._known:
            self._later[expect.key] = _Later(request_id, expect)
        else:
            self._known[expect.key] = _Load(request_id)
            self._rank.do(expect)

    def _load(self, request_id: str, order: do.Load) -> None:
        if (later := self._later.get(order.key)) and later.request_id == request_id:
            later.order = order
            return
        load = self._known[order.key]
        assert load.request_id == request_id
        load.waited = order.stop > order.start
        load.unwanted = not load.waited
        if load.complete is None:
            self._rank.do(order)
        self._settle(order.key)

    def _drop(self, ended: Ended) -> None:
        """The request has ended, or is to fail: load nothing more."""
        key = ended.key
        if (later := self._later.get(key)) and later.request_id == ended.request_id:
            del self._later[key]
        load = self._known.get(key)
        if load is None or load.request_id != ended.request_id:
            return
        load.waited = ended.report
        load.unwanted = not load.waited
        if load.complete is None:
            self._rank.do(do.Drop(key, ended.reason))
        self._settle(key)

    # What the engine says.

    def note(self, event: do.Event) -> None:
        match event:
            case do.Begun(key) if key in self._known:
                self._news.begun[self._known[key].request_id] = 1
            case do.Loaded(key) if key in self._known:
                self._known[key].complete = True
                self._settle(key)
            case do.LoadFailed(key, reason) if key in self._known:
                load = self._known[key]
                load.complete = False
                if not load.waited and not load.unwanted:
                    self._news.failed[load.request_id] = reason
                self._settle(key)

    def _settle(self, key: str) -> None:
        """Tell vLLM, if it waits, and let the engine forget, once there is nothing more to be said."""
        load = self._known[key]
        if load.complete is None or not (load.waited or load.unwanted):
            return
        if load.waited:
            self._results.finished_recving.add(load.request_id)
            if not load.complete:
                self._results.failed_recving.add(load.request_id)
        del self._known[key]
        self._rank.do(do.Forget(key))
        if later := self._later.pop(key, None):
            self._expect(later.request_id, later.expect)
            if later.order is not None:
                self._load(later.request_id, later.order)

    # What vLLM asks.

    @property
    def anything_new(self) -> bool:
        """Whether `results` or `news` would say something."""
        return bool(self._results.finished_recving or self._news.begun or self._news.failed)

    def results(self) -> KVConnectorTransferResults:
        """Loads that have ended since the last call."""
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def news(self) -> WorkerNews:
        """What the scheduler's side must hear besides, since the last call."""
        news, self._news = self._news, WorkerNews()
        return news
