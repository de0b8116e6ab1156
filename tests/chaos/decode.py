"""The forward thread of a D: admits what P has begun, keeps prefixes, and checks every byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from chaos.forward import Forward
from chaos.model import LAYERS, SHAPE

from p2pkv.engine import commands as do
from p2pkv.pairing import Address

WORDS = 4
"""A reason of fewer words is no sentence."""


@dataclass
class Request:
    """One request. `ask_at`, `drop_at`: when it comes, and when its client leaves, on the run's clock."""

    key: str
    prompt: int
    tokens: int
    prefill: Address
    ask_at: float
    drop_at: float
    asked: bool = False
    blocks: list[int] = field(default_factory=list)
    hit: int = 0
    begun: bool = False
    admitted: bool = False

    @property
    def stop(self) -> int:
        """The last token is computed here."""
        return self.tokens - 1


@dataclass
class DecodeSide(Forward):
    _requests: dict[str, Request] = field(default_factory=dict)
    _cache: dict[int, list[int]] = field(default_factory=dict)
    """Full blocks that hold the beginning of a prompt, the longest unused first."""

    def order(self, order: dict[str, Any], now: float) -> None:
        """A request to load, `after` so many seconds; then `leave` is its client's patience, -1 endless."""
        asks = now + order["after"]
        leaves = asks + order["leave"] if order["leave"] >= 0 else float("inf")
        prefill = Address.parse(order["prefill"])
        request = Request(order["key"], order["prompt"], order["tokens"], prefill, asks, leaves)
        self._requests[request.key] = request

    def _ask(self, request: Request) -> None:
        request.asked = True
        digest = b"%d" % request.prompt
        self.rank.do(do.Expect(request.key, request.prefill, request.tokens, digest))

    def empty(self) -> bool:
        """Forget the prefixes; a D that has nothing to load has no other blocks."""
        while self._cache:
            self._evict()
        return self.memory.free == SHAPE.blocks

    @property
    def idle(self) -> bool:
        return not self._requests

    def turn(self, now: float) -> Iterator[float]:
        """Hear what has come, admit, and drop what clients have left. It takes no time."""
        for event in self.rank.events():
            self._hear(event)
        for request in list(self._requests.values()):
            if not request.asked and now >= request.ask_at:
                self._ask(request)
            if request.asked and now >= request.drop_at:
                request.drop_at = float("inf")
                self.rank.do(do.Drop(request.key, "the client has left"))
            if request.begun and not request.admitted:
                self._admit(request)
        yield from ()

    def _hear(self, event: do.Event) -> None:
        request = self._requests.get(event.key)
        if request is None:
            self.broken(f"a second outcome: {event}")
            return
        match event:
            case do.Begun():
                request.begun = True
                self.say(begun=event.key)
            case do.Loaded():
                self._keep(request)
                self._end(request, "")
            case do.LoadFailed(_, reason):
                self.memory.give_back(request.blocks)
                self._end(request, reason)
                if len(reason.split()) < WORDS:
                    self.broken(f"{event.key} failed without a sentence: {reason!r}")

    def _admit(self, request: Request) -> None:
        held = self._cache.pop(request.prompt, [])
        missing = max(0, request.stop - len(held) * SHAPE.block)
        while (taken := self.memory.take(missing)) is None and self._cache:
            self._evict()
        if taken is None:
            self._cache[request.prompt] = held
            return
        request.blocks, request.admitted = held + taken, True
        request.hit = min(len(held), request.stop // SHAPE.block) * SHAPE.block
        start = min(request.hit, request.stop)
        self.rank.do(do.Load(request.key, start, request.stop, (request.blocks,)))

    def _keep(self, request: Request) -> None:
        """All of it is here: check it, and keep the full blocks as a prefix."""
        wrong = self.memory.wrong(request.prompt, request.blocks, request.stop)
        full = max(request.hit, request.stop) // SHAPE.block
        good = 0 if wrong else full
        if old := self._cache.pop(request.prompt, []):
            self.memory.give_back(old)
        self._cache[request.prompt] = request.blocks[:good]
        self.memory.give_back(request.blocks[good:])
        if wrong:
            self.broken(
                f"{request.key}: {wrong} wrong values in {request.stop} tokens, {request.hit} of a prefix"
            )

    def _end(self, request: Request, reason: str) -> None:
        del self._requests[request.key]
        self.rank.do(do.Forget(request.key))
        loaded = (request.stop - request.hit) * LAYERS * SHAPE.kv_heads * SHAPE.content * 4
        self.say(loaded=request.key, nbytes=0 if reason else loaded, reason=reason)

    def _evict(self) -> None:
        self.memory.give_back(self._cache.pop(next(iter(self._cache))))
