"""P's scheduler side: which prompts are computed for whom, and when their pages may go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pkv.connector.identity import Paired, Pairs, prompt_digest
from p2pkv.connector.metadata import Ended, Prefill, StepMetadata
from p2pkv.engine.commands import Hold, OfferPrompt, Pages

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class _Prompt:
    request: Request
    paired: Paired
    offered: bool = False
    said: int = 0
    """Tokens of the prompt that the workers know to be in the pages, or to be computed this step."""


class Producing:
    """A key is taken from the arrival of its request until the workers have reported it.

    `block_sizes`: tokens in a block of each KV cache group.
    """

    def __init__(self, pairs: Pairs, block_sizes: tuple[int, ...]) -> None:
        self._pairs = pairs
        self._block_sizes = block_sizes
        self._prompts: dict[str, _Prompt] = {}
        self._taken: set[str] = set()
        self._spare: dict[str, dict[str, Request]] = {}
        """By key: requests of the same prompt that do not push, unless the one that does is aborted."""
        self._ended: dict[str, str] = {}
        self._next = StepMetadata()

    def new(self, request: Request) -> None:
        paired = self._pairs.of(request)
        if paired is None:
            return
        # Some routers leave `n` on P: its first child pushes, the others would push the same again. And a
        # router that lost its connection asks again, while the first one may be running still.
        if paired.key in self._taken:
            self._spare.setdefault(paired.key, {})[request.request_id] = request
            return
        self._taken.add(paired.key)
        self._prompts[request.request_id] = _Prompt(request, paired)
        self._next.holds.append(Hold(paired.key, paired.decode))

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """This step's word to the workers. Called before vLLM advances the computed tokens."""
        meta, self._next = self._next, StepMetadata()
        meta.work = output.total_num_scheduled_tokens > 0
        for request_id in output.preempted_req_ids or ():
            if (prompt := self._prompts.get(request_id)) and prompt.said:
                prompt.said = 0
                meta.revoked.append(prompt.paired.key)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is not None and prompt.said < prompt.request.num_prompt_tokens:
                self._prefill(meta, prompt, scheduled, output)
        return meta

    def _prefill(self, meta: StepMetadata, prompt: _Prompt, scheduled: int, output: SchedulerOutput) -> None:
        request, key = prompt.request, prompt.paired.key
        if not prompt.offered:
            prompt.offered = True
            tokens = request.num_prompt_tokens
            meta.offers.append(OfferPrompt(key, prompt.paired.decode, tokens, prompt_digest(request)))
        state = output.kv_connector_block_state
        blocks = state.get_block_ids(request.request_id) if state is not None else None
        assert blocks is not None
        # After a preemption even tokens of the answer may be cached.
        start, stop = request.num_computed_tokens, request.num_computed_tokens + scheduled
        start, stop = min(start, request.num_prompt_tokens), min(stop, request.num_prompt_tokens)
        cached = self._settled(output, blocks, start) if start > prompt.said else 0
        prompt.said = stop
        pages = Pages(key, tuple(list(group) for group in blocks))
        meta.prefills.append(Prefill(pages, cached, start, stop))

    def _settled(self, output: SchedulerOutput, blocks: tuple[list[int], ...], cached: int) -> int:
        """How many of the cached tokens were computed before this step.

        vLLM also counts as cached what another request of this very step is about to compute; those
        tokens come with each layer's hook.
        """
        fresh = self._fresh(output)
        for size, group in zip(self._block_sizes, blocks, strict=True):
            number = next((place for place, block in enumerate(group) if block in fresh), len(group))
            cached = min(cached, number * size)
        return cached

    def _fresh(self, output: SchedulerOutput) -> set[int]:
        """The blocks that this step writes."""
        state, old = output.kv_connector_block_state, output.scheduled_cached_reqs
        assert state is not None
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        fresh: set[int] = set()
        for request_id, start in starts.items():
            for size, group in zip(self._block_sizes, state.get_block_ids(request_id) or (), strict=False):
                fresh.update(group[start // size :])
        return fresh

    @property
    def awaits_news(self) -> bool:
        """Whether pages wait for word from the workers that they are free."""
        return bool(self._ended)

    def finished(self, request: Request) -> bool:
        """The request has ended; whether its pages must wait for word from the workers."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            self._no_spare(request)
            return False
        key = prompt.paired.key
        if prompt.said < request.num_prompt_tokens and (heir := self._heir(prompt)):
            # As after a preemption: the same prompt, with other pages.
            if prompt.said:
                self._next.revoked.append(key)
            self._prompts[heir.request_id] = _Prompt(heir, prompt.paired, prompt.offered)
            return False
        if prompt.said and not request.num_computed_tokens:
            # Preempted since the last step, so its pages are gone already.
            prompt.said = 0
            self._next.revoked.append(key)
        whole = prompt.said >= request.num_prompt_tokens
        reason = "" if whole else "P's request was aborted before its prefill ended"
        self._ended[request.request_id] = key
        self._next.sent.append(Ended(request.request_id, key, reason))
        return True

    def _heir(self, prompt: _Prompt) -> Request | None:
        """Who pushes the prompt of an aborted request in its place: one that asks for the same again."""
        for request in self._spare.get(prompt.paired.key, {}).values():
            if prompt_digest(request) == prompt_digest(prompt.request):
                self._no_spare(request)
                return request
        return None

    def _no_spare(self, request: Request) -> None:
        for key, spare in list(self._spare.items()):
            if spare.pop(request.request_id, None) is not None and not spare:
                del self._spare[key]

    def heard(self, sent: Iterable[str]) -> None:
        """The workers have reported these requests: their keys may be used again."""
        for request_id in sent:
            if key := self._ended.pop(request_id, None):
                self._taken.discard(key)
