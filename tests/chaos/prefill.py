"""The forward thread of a P: prompts in chunks, layer by layer, with aborts and preemptions."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from chaos.forward import LAYER_SECONDS, Forward
from chaos.model import NULL, Tables

from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.engine.engines import READY


@dataclass
class Prompt:
    """One prompt. `abort_at`, `preempt_at`: after so many tokens, or -1. `decode`, `named`: as in its id."""

    key: str
    decode: Address
    named: Address
    prompt: int
    tokens: int
    chunk: int
    abort_at: int
    preempt_at: int
    tables: Tables = ()
    computed: int = 0
    computing: bool = True
    free: bool = False


@dataclass
class PrefillSide(Forward):
    _prompts: dict[str, Prompt] = field(default_factory=dict)
    _queue: deque[Prompt] = field(default_factory=deque)

    def order(self, order: dict[str, Any], now: float) -> None:
        prompt = Prompt(**order | {name: Address.parse(order[name]) for name in ("decode", "named")})
        self._prompts[prompt.key] = prompt
        self._queue.append(prompt)
        here = self.crew.ranks[0].context.hello.addresses[0]
        self.crew.do(
            do.HoldPrompt(prompt.key, prompt.decode, None if here == str(prompt.named) else prompt.named)
        )

    def empty(self) -> bool:
        return self.memory.held == 0

    @property
    def idle(self) -> bool:
        return not self._queue

    def turn(self, now: float) -> Iterator[float]:
        """Hear what is free, and compute one chunk of one prompt."""
        for event in self.crew.events():
            assert isinstance(event, do.BlocksFree)
            prompt = self._prompts[event.key]
            prompt.free, prompt.computing = True, False
            self._forget(prompt)
        while self._queue and not self._queue[0].computing:
            self._queue.popleft()
        if self._queue:
            prompt = self._queue[0]
            self._queue.rotate(-1)
            self.crew.begin_step(now)
            yield from self._advance(prompt)
            self.crew.end_step()

    def _advance(self, prompt: Prompt) -> Iterator[float]:
        if not prompt.tables and not self._begin(prompt):
            return
        if 0 <= prompt.abort_at <= prompt.computed:
            prompt.computing = False
            self.crew.do(do.Abort(prompt.key, "the client has left"))
            return
        if 0 <= prompt.preempt_at <= prompt.computed:
            self._preempt(prompt)
            return
        if not self._move_on(prompt):
            return
        yield from self._compute(prompt, min(prompt.tokens, prompt.computed + prompt.chunk))
        self.say(computed=prompt.key)

    def _begin(self, prompt: Prompt) -> bool:
        sizes = [1 if each.once else -(-prompt.tokens // each.block) for each in self.memory.model.tables]
        blocks = self.memory.take(sum(sizes))
        if blocks is None:
            return False
        some = iter(blocks)
        prompt.tables = tuple([next(some) for _ in range(size)] for size in sizes)
        offer = do.OfferPrompt(prompt.key, prompt.decode, prompt.tokens, b"%d" % prompt.prompt)
        self.crew.do(offer)
        return True

    def _move_on(self, prompt: Prompt) -> bool:
        """Give back what the next chunk does not need any more; False if there is no block for its state."""
        for table, each in zip(prompt.tables, self.memory.model.tables, strict=True):
            if each.moves and prompt.computed:
                other = self.memory.take(1)
                if other is None:
                    return False
                self.memory.give_back(table)
                table[:] = other
            gone = each.first(prompt.computed) // each.block if each.window else 0
            self.memory.give_back(table[:gone])
            table[:gone] = [NULL] * gone
        return True

    def _compute(self, prompt: Prompt, stop: int) -> Iterator[float]:
        # A copy: the engine keeps what it is told, and these tables change.
        self.crew.do(do.PromptBlocks(prompt.key, tuple(list(table) for table in prompt.tables)))
        for layer in range(self.memory.model.layers):
            self.memory.compute(prompt.prompt, layer, prompt.tables, prompt.computed, stop)
            self.crew.computed(((prompt.key, stop),), layer, READY)
            yield LAYER_SECONDS
        self.crew.do(do.Flush((prompt.key,)))
        prompt.computed = stop
        prompt.computing = stop < prompt.tokens

    def _preempt(self, prompt: Prompt) -> None:
        """Take the pages back at once, and begin again in others."""
        self.crew.revoke([prompt.key])
        self._give_back(prompt)
        prompt.computed, prompt.preempt_at = 0, -1

    def _give_back(self, prompt: Prompt) -> None:
        self.memory.give_back(*prompt.tables)
        prompt.tables = ()

    def _forget(self, prompt: Prompt) -> None:
        self._give_back(prompt)
        del self._prompts[prompt.key]
        self.crew.do(do.Forget(prompt.key))
        self.say(freed=prompt.key)
