"""What bench_fleet.py models: a clock whose time is virtual, P's, D's and the links between them.

A P computes one prompt after another, and keeps blocks of 512 tokens, least recently used out. A D decodes
its streams in a batch. A rank keeps at most `max_links` links, the longest unused out.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK = 512
"""Tokens of a block of the traces."""


@dataclass(frozen=True)
class Costs:
    """An instance of eight H100s that serves a model of 8 billion parameters.

    Attributes:
        prefill: prompt tokens a second. Mooncake's figure for 4,096 tokens on H800 TP 8: a transfer of 4.75
            ms is 3.8% of the time to first token, which is 125 ms.
        begin: seconds before a prompt begins. Assumed.
        exposed: seconds of a transfer that computing does not hide: Splitwise's 5 to 8 ms.
        step: seconds of a decode step: the P2pNcclConnector's documented 10.45 ms a token on 8 x H100.
        step_stream, step_token: what each stream and each token of its KV adds. 131,072 bytes a token at
            8 x 3.35 TB/s; a stream's share of the rest is assumed.
        cache: prompt tokens that a P keeps. Assumed.
        link: seconds until a new link is up, while P computes. Assumed.
        max_links: p2pkv's default.
        communicator: MB of device memory of an NCCL communicator with 8 channels, as measured for the
            P2pNcclConnector.
    """

    prefill: float = 32_768.0
    begin: float = 0.005
    exposed: float = 0.008
    step: float = 0.0095
    step_stream: float = 2e-5
    step_token: float = 5e-9
    cache: int = 2_000_000
    link: float = 0.3
    max_links: int = 64
    communicator: int = 52


COSTS = Costs()


class Clock(selectors.SelectSelector):
    """Nothing is waited for: time passes to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is left that could happen")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual."""

    def __init__(self) -> None:
        self._virtual = Clock()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class Lost(Exception):
    """The instance is gone."""


class Closed(Lost):
    """It was gone before it was asked."""


Done = asyncio.Future[int]
"""Of a prompt: the tokens that were cached."""


class Prefill:
    """A P: one prompt after another."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._queue: deque[tuple[Done, Sequence[int], int]] = deque()
        self._now: Done | None = None
        self.alive = True

    async def compute(self, blocks: Sequence[int], tokens: int) -> int:
        """Returns how many tokens it had. Raises Lost."""
        if not self.alive:
            raise Closed
        done: Done = self._loop.create_future()
        self._queue.append((done, blocks, tokens))
        if self._now is None:
            self._next()
        return await done

    def _next(self) -> None:
        """Begins with the next prompt that has not been aborted."""
        self._now = None
        while self._queue and self._now is None and self.alive:
            done, blocks, tokens = self._queue.popleft()
            if done.done():
                continue
            cached = next((at for at, block in enumerate(blocks) if block not in self._blocks), len(blocks))
            had, self._now = min(tokens - 1, BLOCK * cached), done
            work = COSTS.begin + (tokens - had) / COSTS.prefill
            self._loop.call_later(work, self._end, done, blocks, had)

    def _end(self, done: Done, blocks: Sequence[int], had: int) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) * BLOCK > COSTS.cache:
            self._blocks.popitem(last=False)
        if not done.done():
            done.set_result(had)
        self._next()

    def die(self) -> None:
        self.alive = False
        for done in [*(each for each, _, _ in self._queue), *([self._now] if self._now else [])]:
            if not done.done():
                done.set_exception(Lost())


class Decode:
    """A D: its streams advance together, a token a step."""

    def __init__(self, loop: VirtualLoop, pauses: dict[int, float]) -> None:
        self._loop = loop
        self._pauses = pauses
        self._streams: dict[asyncio.Future[None], tuple[float, int]] = {}
        """Of each the progress at which it ends, and tokens of its KV."""
        self._progress = self._since = 0.0
        self._step = COSTS.step
        self._timer: asyncio.TimerHandle | None = None
        self.alive = True
        self.generated = 0.0

    async def generate(self, tokens: int, context: int, sent: Callable[[int], None]) -> None:
        """`sent` is called at the end, whatever that is, with how many tokens came. Raises Lost."""
        if not self.alive:
            raise Closed
        self._advance()
        begun, done = self._progress, self._loop.create_future()
        self._streams[done] = (self._progress + tokens, context + tokens // 2)
        self._plan()
        try:
            await done
        finally:
            self._advance()
            self._streams.pop(done, None)
            sent(min(tokens, int(self._progress - begun + 1e-6)))
            self._plan()

    def _advance(self) -> None:
        now = self._loop.time()
        steps = (now - self._since) / self._step
        if self._streams and steps:
            bucket = int(self._step * 1e4)
            self._pauses[bucket] = self._pauses.get(bucket, 0.0) + steps * len(self._streams)
            self.generated += steps * len(self._streams)
            self._progress += steps
        self._since = now

    def _plan(self) -> None:
        """The next end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._streams or not self.alive:
            return
        context = sum(kv for _, kv in self._streams.values())
        self._step = COSTS.step + COSTS.step_stream * len(self._streams) + COSTS.step_token * context
        first = min(end for end, _ in self._streams.values())
        self._timer = self._loop.call_later(max(0.0, first - self._progress) * self._step, self._end)

    def _end(self) -> None:
        self._advance()
        for stream, (end, _) in list(self._streams.items()):
            if end - self._progress < 1e-6 and not stream.done():
                stream.set_result(None)
        self._timer = None

    def die(self) -> None:
        self._advance()
        self.alive = False
        for each in list(self._streams):
            if not each.done():
                each.set_exception(Lost())


class Links:
    """Which links stand between P's and D's.

    Attributes:
        built: so many were built for a request that came before its link.
        most: of one instance, at any time.
    """

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, None]] = {}
        self.built = self.most = 0

    def stands(self, p: str, d: str) -> bool:
        """Whether this link was there for the request that uses it now; from now on it is."""
        stood = d in self._of.setdefault(p, OrderedDict())
        self._connect(p, d)
        self.built += not stood
        return stood

    def preconnect(self, p: str, d: str) -> None:
        """Builds a link, if it takes the place of no other one."""
        if all(len(self._of.get(each, ())) < COSTS.max_links for each in (p, d)):
            self._connect(p, d)

    def _connect(self, p: str, d: str) -> None:
        for one, other in ((p, d), (d, p)):
            links = self._of.setdefault(one, OrderedDict())
            links[other] = None
            links.move_to_end(other)
            if len(links) > COSTS.max_links:
                self._cut(one, next(iter(links)))
            self.most = max(self.most, len(links))

    def forget(self, name: str) -> None:
        """An instance has died."""
        for other in list(self._of.get(name, ())):
            self._cut(name, other)

    def _cut(self, one: str, other: str) -> None:
        self._of[one].pop(other, None)
        self._of[other].pop(one, None)
