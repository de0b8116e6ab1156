"""The forward thread of a D: admits what P has begun, keeps prefixes, computes what failed, checks bytes."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from chaos.forward import LAYER_SECONDS, Forward
from chaos.model import NULL, Tables

from p2pkv.engine import commands as do
from p2pkv.pairing import Address

WORDS = 4
"""A reason of fewer words is no sentence."""


@dataclass
class Request:
    """One request. `ask_at`, `drop_at`: when it comes, and when its client leaves, on the run's clock.
    `recompute`: if the load fails, all of it is computed here, in the same blocks."""

    key: str
    prompt: int
    tokens: int
    prefill: Address
    ask_at: float
    drop_at: float
    recompute: bool
    stop: int
    """Tokens from here on are computed by D itself."""
    asked: bool = False
    tables: Tables = ()
    hit: int = 0
    begun: bool = False
    admitted: bool = False


@dataclass
class Prefix:
    """The beginning of a prompt: full blocks of tokens [0, tokens); of a window those from `first` on."""

    tables: Tables
    tokens: int
    first: tuple[int, ...]


NOTHING = Prefix((), 0, ())


@dataclass
class DecodeSide(Forward):
    _requests: dict[str, Request] = field(default_factory=dict)
    _cache: dict[int, Prefix] = field(default_factory=dict)
    """By prompt, the longest unused first."""
    _failed: deque[tuple[Request, str]] = field(default_factory=deque)
    """What is to be computed here, and why."""

    def order(self, order: dict[str, Any], now: float) -> None:
        """A request to load, `after` so many seconds; then `leave` is its client's patience, -1 endless."""
        asks = now + order["after"]
        leaves = asks + order["leave"] if order["leave"] >= 0 else float("inf")
        key, tokens, prefill = order["key"], order["tokens"], Address.parse(order["prefill"])
        # The last token of a prompt is computed here. Of a hybrid's, P has it neither: it counts less.
        stop = tokens if self.memory.model.hybrid else tokens - 1
        request = Request(key, order["prompt"], tokens, prefill, asks, leaves, order["recompute"], stop)
        self._requests[key] = request

    def _ask(self, request: Request) -> None:
        request.asked = True
        digest = b"%d" % request.prompt
        self.crew.do(do.Expect(request.key, request.prefill, request.tokens, digest))

    def empty(self) -> bool:
        """Forget the prefixes; a D that has nothing to load has no other blocks."""
        while self._cache:
            self._evict()
        return self.memory.held == 0

    @property
    def idle(self) -> bool:
        return not self._requests

    def turn(self, now: float) -> Iterator[float]:
        """Hear what has come, admit, drop what clients have left, and compute one request that failed."""
        for event in self.crew.events():
            self._hear(event)
        for request in list(self._requests.values()):
            if not request.asked and now >= request.ask_at:
                self._ask(request)
            if request.asked and now >= request.drop_at:
                request.drop_at, request.recompute = float("inf"), False
                self.crew.do(do.Drop(request.key, "the client has left"))
            if request.begun and not request.admitted and not self.crew.ordered(request.key):
                self._admit(request)
        if self._failed:
            request, reason = self._failed.popleft()
            for layer in range(self.memory.model.layers):
                self.memory.compute(request.prompt, layer, request.tables, request.hit, request.stop)
                yield LAYER_SECONDS
            self._keep(request)
            self._end(request, reason)

    def _hear(self, event: do.Event) -> None:
        request = self._requests[event.key]
        match event:
            case do.Begun():
                request.begun = True
                self.say(begun=event.key)
            case do.Loaded():
                self._keep(request)
                self._end(request, "")
            case do.LoadFailed(_, reason):
                if len(reason.split()) < WORDS:
                    self.broken(f"{event.key} failed without a sentence: {reason!r}")
                request.drop_at = float("inf")
                if request.admitted and request.recompute:
                    self._failed.append((request, reason))
                    return
                self.memory.give_back(*request.tables)
                self._end(request, reason)

    # Blocks.

    def _admit(self, request: Request) -> None:
        prefix = self._cache.pop(request.prompt, NOTHING)
        hit = self._hit(prefix, request.stop)
        kept, missing = self._layout(prefix, hit, request.stop)
        while (taken := self.memory.take(missing)) is None and self._cache:
            self._evict()
        if taken is None:
            self._cache[request.prompt] = prefix
            return
        some = iter(taken)
        request.tables = tuple([next(some) if block < 0 else block for block in table] for table in kept)
        used = {block for table in request.tables for block in table}
        self.memory.give_back([block for table in prefix.tables for block in table if block not in used])
        request.admitted, request.hit = True, hit
        self.crew.do(do.Load(request.key, hit, request.stop, request.tables))

    def _hit(self, prefix: Prefix, stop: int) -> int:
        """How many tokens need not come: what is missing of a window is not made up for."""
        model = self.memory.model
        # A state always comes, and with it at least one token.
        hit = min(prefix.tokens, stop - model.hybrid) // model.step * model.step
        for each, first in zip(model.tables, prefix.first, strict=False):
            if not each.once and each.first(stop) < min(hit, first):
                return 0
        return hit

    def _layout(self, prefix: Prefix, hit: int, stop: int) -> tuple[list[list[int]], int]:
        """The tables of a request, with -1 for each block that it lacks; and how many it lacks."""
        tables: list[list[int]] = []
        for number, each in enumerate(self.memory.model.tables):
            if each.once:
                tables.append([-1])
                continue
            first, last = each.first(stop) // each.block, -(-stop // each.block)
            kept = prefix.tables[number][first : hit // each.block] if hit else []
            tables.append([NULL] * first + kept + [-1] * (last - first - len(kept)))
        return tables, sum(table.count(-1) for table in tables)

    def _keep(self, request: Request) -> None:
        """All of it is here: check it, and keep the full blocks as a prefix."""
        model = self.memory.model
        wrong = self.memory.wrong(request.prompt, request.tables, request.stop)
        full = max(request.hit, request.stop // model.step * model.step)
        if old := self._cache.pop(request.prompt, None):
            self.memory.give_back(*old.tables)
        kept: list[list[int]] = []
        for table, each in zip(request.tables, model.tables, strict=True):
            good = 0 if wrong or each.once else full // each.block
            kept.append(table[:good])
            self.memory.give_back(table[good:])
        firsts = tuple(each.first(request.stop) for each in model.tables)
        self._cache[request.prompt] = Prefix(tuple(kept), 0 if wrong else full, firsts)
        if wrong:
            self.broken(
                f"{request.key}: {wrong} wrong values in {request.stop} tokens, {request.hit} of a prefix"
            )

    def _end(self, request: Request, reason: str) -> None:
        del self._requests[request.key]
        self.crew.do(do.Forget(request.key))
        loaded = self.memory.model.nbytes(request.hit, request.stop) if not reason else 0
        recomputed = bool(reason) and request.admitted and request.recompute
        self.say(loaded=request.key, nbytes=loaded, reason=reason, recomputed=recomputed)

    def _evict(self) -> None:
        self.memory.give_back(*self._cache.pop(next(iter(self._cache))).tables)
