"""D's scheduler side: which requests wait for a P, and what vLLM hears about their external tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from p2pkv.connector.identity import Paired, Pairs, prompt_digest
from p2pkv.connector.metadata import Ended, StepMetadata, WorkerNews
from p2pkv.engine.commands import Expect, Load

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class State(Enum):
    WAITING = auto()  # for P to begin
    LOADING = auto()  # vLLM has given it pages and waits for our word
    SETTLED = auto()  # nothing more is to be loaded


@dataclass
class _Asking:
    request: Request
    paired: Paired
    state: State = State.WAITING
    local: int = 0
    """Tokens in D's own prefix cache when vLLM last asked."""
    begun: int = 0
    failure: str = ""


class Consuming:
    """`world` ranks must each have heard from P; `recompute`: a failed load is computed here instead."""

    def __init__(self, pairs: Pairs, world: int, recompute: bool) -> None:
        self._pairs = pairs
        self._world = world
        self._recompute = recompute
        self._asking: dict[str, _Asking] = {}
        self._owners: dict[str, str] = {}
        self._siblings: dict[str, str] = {}
        self._next = StepMetadata()

    def new(self, request: Request) -> None:
        paired = self._pairs.of(request)
        if paired is None:
            return
        if paired.key in self._owners:
            self._siblings[request.request_id] = paired.key
            return
        self._owners[paired.key] = request.request_id
        self._asking[request.request_id] = _Asking(request, paired)
        expect = Expect(paired.key, paired.prefill, request.num_prompt_tokens, prompt_digest(request))
        self._next.expects.append((request.request_id, expect))

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Tokens beyond the `local` ones that P computes for us; None: ask again."""
        asking = self._asking.get(request.request_id)
        if asking is None:
            return self._sibling(request), False
        # The last token is computed here: vLLM needs its logits.
        asking.local, external = local, request.num_prompt_tokens - 1 - local
        if asking.state is not State.WAITING or external <= 0:
            return 0, False
        if asking.failure:
            # Under `fail`, vLLM fails a request only for a load that it has seen begin.
            return (0, False) if self._recompute else (external, True)
        return (external, True) if asking.begun >= self._world else (None, False)

    def _sibling(self, request: Request) -> int | None:
        """A further child of n waits until the first has loaded, and then takes the prefix cache."""
        key = self._siblings.get(request.request_id)
        owner = self._asking.get(self._owners.get(key, "")) if key is not None else None
        return 0 if owner is None or owner.state is State.SETTLED else None

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has admitted the request: say what is wanted, once."""
        asking = self._asking.get(request.request_id)
        if asking is None or asking.state is not State.WAITING:
            return
        key = asking.paired.key
        if external <= 0:
            asking.state = State.SETTLED
            self._next.loads.append((request.request_id, Load(key, 0, 0, ())))
            return
        asking.state = State.LOADING
        if asking.failure:
            # Some ranks have not failed, and P may not even have begun for them: nothing is asked for.
            self._next.drops.append(Ended(request.request_id, key, asking.failure))
            return
        pages = tuple(list(group) for group in blocks.get_block_ids())
        load = Load(key, asking.local, asking.local + external, pages)
        self._next.loads.append((request.request_id, load))

    def step(self, output: SchedulerOutput) -> StepMetadata:
        meta, self._next = self._next, StepMetadata()
        meta.work = output.total_num_scheduled_tokens > 0
        return meta

    @property
    def awaits_news(self) -> bool:
        """Whether a request waits for P, or for its KV."""
        return any(asking.state is not State.SETTLED for asking in self._asking.values())

    def heard(self, news: WorkerNews | None, received: set[str]) -> None:
        """What the workers report; `received`: loads that have ended, well or not."""
        for request_id in received:
            if asking := self._asking.get(request_id):
                asking.state = State.SETTLED
        if news is None:
            return
        for request_id, ranks in news.begun.items():
            if asking := self._asking.get(request_id):
                asking.begun += ranks
        for request_id, reason in news.failed.items():
            if asking := self._asking.get(request_id):
                asking.failure = reason

    def finished(self, request: Request) -> None:
        """The request has ended, whatever its state. vLLM keeps the pages of an aborted load itself."""
        self._siblings.pop(request.request_id, None)
        asking = self._asking.pop(request.request_id, None)
        if asking is None:
            return
        self._owners.pop(asking.paired.key, None)
        if asking.state is not State.SETTLED:
            loading, key = asking.state is State.LOADING, asking.paired.key
            self._next.drops.append(Ended(request.request_id, key, "D's request has ended", report=loading))
