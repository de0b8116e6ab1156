"""The forward thread of a P: prompts in chunks, layer by layer, with aborts and preemptions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from chaos.forward import Forward
from chaos.model import LAYERS, SHAPE
from engine_support import READY

from p2pkv.engine import commands as do
from p2pkv.pairing import Address

LAYER_SECONDS = 0.001
"""What a forward takes for one."""


@dataclass
class Prompt:
    """One prompt. `abort_at`, `preempt_at`: after so many tokens; -1 is never."""

    key: str
    decode: Address
    prompt: int
    tokens: int
    chunk: int
    abort_at: int
    preempt_at: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    computing: bool = True
    free: bool = False


@dataclass
class PrefillSide(Forward):
    _prompts: dict[str, Prompt] = field(default_factory=dict)
    _queue: deque[Prompt] = field(default_factory=deque)

    def order(self, order: dict[str, Any], now: float) -> None:
        """A prompt to prefill."""
        prompt = Prompt(**order | {"decode": Address.parse(order["decode"])})
        self._prompts[prompt.key] = prompt
        self._queue.append(prompt)
        self.rank.do(do.Hold(prompt.key, prompt.decode))

    def empty(self) -> bool:
        """A P keeps nothing."""
        return self.memory.free == SHAPE.blocks

    @property
    def idle(self) -> bool:
        return not self._queue

    def turn(self, now: float) -> Iterator[float]:
        """Hear what is free, and compute one chunk of one prompt."""
        for event in self.rank.events():
            assert isinstance(event, do.BlocksFree)
            prompt = self._prompts.get(event.key)
            if prompt is None or prompt.free:
                self.broken(f"the pages of {event.key} were given back twice")
                continue
            prompt.free, prompt.computing = True, False
            self._forget(prompt)
        while self._queue and not self._queue[0].computing:
            self._queue.popleft()
        if self._queue:
            prompt = self._queue[0]
            self._queue.rotate(-1)
            self.rank.steps.begin(now)
            yield from self._advance(prompt)
            self.rank.steps.end()

    def _advance(self, prompt: Prompt) -> Iterator[float]:
        if not prompt.blocks and not self._begin(prompt):
            return
        if 0 <= prompt.abort_at <= prompt.computed:
            prompt.computing = False
            self.rank.do(do.Abort(prompt.key, "the client has left"))
            return
        if 0 <= prompt.preempt_at <= prompt.computed:
            self._preempt(prompt)
            return
        yield from self._compute(prompt, min(prompt.tokens, prompt.computed + prompt.chunk))
        self.say(computed=prompt.key)

    def _begin(self, prompt: Prompt) -> bool:
        blocks = self.memory.take(prompt.tokens)
        if blocks is None:
            return False
        prompt.blocks = blocks
        self.rank.do(do.OfferPrompt(prompt.key, prompt.decode, prompt.tokens, b"%d" % prompt.prompt))
        return True

    def _compute(self, prompt: Prompt, stop: int) -> Iterator[float]:
        self.rank.do(do.PromptBlocks(prompt.key, (prompt.blocks,)))
        for layer in range(LAYERS):
            self.memory.compute(prompt.prompt, layer, prompt.blocks, prompt.computed, stop)
            self.rank.do(do.Computed(((prompt.key, stop),), layer, layer + 1, READY))
            yield LAYER_SECONDS
        self.rank.do(do.Flush((prompt.key,)))
        prompt.computed = stop
        prompt.computing = stop < prompt.tokens

    def _preempt(self, prompt: Prompt) -> None:
        """Take the pages back at once, and begin again in others."""
        self.rank.revoke([prompt.key])
        self.memory.give_back(prompt.blocks)
        prompt.blocks, prompt.computed, prompt.preempt_at = [], 0, -1

    def _forget(self, prompt: Prompt) -> None:
        self.memory.give_back(prompt.blocks)
        del self._prompts[prompt.key]
        self.rank.do(do.Forget(prompt.key))
        self.say(freed=prompt.key)
