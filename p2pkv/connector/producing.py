"""P's scheduler side: which prompts are computed for whom, and when their pages may go."""

from __future__ import annotations

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
    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._prompts: dict[str, _Prompt] = {}
        self._keys: set[str] = set()
        self._next = StepMetadata()

    def new(self, request: Request) -> None:
        paired = self._pairs.of(request)
        # Some routers leave `n` on P: its first child pushes, the others would push the same again.
        if paired is None or paired.key in self._keys:
            return
        self._keys.add(paired.key)
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
        cached = request.num_computed_tokens
        stop = min(cached + scheduled, request.num_prompt_tokens)
        pages = Pages(key, tuple(list(group) for group in blocks))
        meta.prefills.append(Prefill(pages, min(cached, stop) if cached > prompt.said else 0, stop))
        prompt.said = stop

    def finished(self, request: Request) -> bool:
        """The request has ended; whether its pages must wait for word from the workers."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return False
        self._keys.discard(prompt.paired.key)
        whole = prompt.said >= request.num_prompt_tokens
        reason = "" if whole else "P's request was aborted before its prefill ended"
        self._next.sent.append(Ended(request.request_id, prompt.paired.key, reason, report=prompt.offered))
        return prompt.offered
