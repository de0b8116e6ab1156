"""Whole engines whose ranks hold a part of one model's KV each, and a push between two of them."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import forkserver
from typing import Any
from unittest.mock import patch

import torch

from p2pkv.demo.processes import free_ports
from p2pkv.engine import commands as do
from p2pkv.links import make_factory
from p2pkv.links.base import LinkFactory
from p2pkv.pairing import Address
from p2pkv.plan import Edge, Plan, make_plan
from support.engine.engines import BUSY, READY, Geometry, make_rank
from support.waiting import wait_for

DEADLINE = 30.0
NOTHING = -1.0
"""What D's pages hold at the start; no KV has this value."""

OPTIONS = {"lease_seconds": 20.0, "staging_bytes": 1 << 20, "chunk_bytes": 32 << 10}


def shape(
    layers: tuple[int, ...], kv_heads: int, tp: int, block: int = 16, tokens: int = 4096, **context: int
) -> Geometry:
    """An engine with room for two prompts of so many tokens; 16 bytes of KV for each token and head.
    `context`: pcp, dcp, interleave."""
    return Geometry(layers, kv_heads, tp, block, content=4, blocks=2 * -(-tokens // block) + 5, **context)


def plan_of(p: Geometry, d: Geometry) -> Plan:
    """The plan between two engines."""
    return make_plan(*((each.shape,) for each in (p, d)))


@dataclass(frozen=True)
class Prompt:
    """A prompt that P computes in chunks, and of which D has the first `cached` tokens by itself."""

    key: str = "k"
    number: int = 0
    tokens: int = 4096
    chunk: int = 1000
    cached: int = 0

    def blocks(self, role: str, geometry: Geometry) -> list[int]:
        """Its block table on one side: in no order, and no block of another prompt's."""
        order = list(range(geometry.blocks))
        random.Random(role).shuffle(order)
        count = -(-self.tokens // (geometry.block * geometry.dcp))
        return order[self.number * count :][:count]

    def kv(self, geometry: Geometry) -> torch.Tensor:
        """What the model computes, float32 [layer, token, head, content]: every number once."""
        return _kv(self.number, sum(geometry.layers), self.tokens, geometry.kv_heads, geometry.content)


@lru_cache(maxsize=4)
def _kv(number: int, *sizes: int) -> torch.Tensor:
    count = torch.Size(sizes).numel()
    assert (number + 1) * count < 1 << 24, "float32 tells no more whole numbers apart"
    return torch.arange(number * count, (number + 1) * count, dtype=torch.float32).view(sizes)


class Player:
    """One rank with its pages, which a `Crew` calls by the names of its methods."""

    def __init__(self, role: str, geometry: Geometry, rank: int, port: int, links: LinkFactory) -> None:
        self.role, self.geometry, self.number = role, geometry, rank
        self.it = make_rank(role, geometry, rank, port, links, 0.0 if role == "P" else NOTHING, **OPTIONS)

    def pid(self) -> int:
        return os.getpid()

    def do(self, command: do.Command) -> None:
        self.it.rank.do(command)

    def compute(self, prompt: Prompt, start: int, stop: int) -> None:
        """One step of a forward over tokens [start, stop), layer by layer with all its hooks."""
        self.do(do.PromptBlocks(prompt.key, (prompt.blocks("P", self.geometry),)))
        for layer in range(len(self.it.pages)):
            self._write(self.it.pages, prompt, layer, start, stop)
            self.do(do.Computed(((prompt.key, stop),), layer, layer + 1, READY))
        self.do(do.Flush((prompt.key,)))

    def wait(self, event: do.Event) -> None:
        """Until the rank has said this. AssertionError if it has failed instead, or says it too late."""
        wait_for(
            lambda: self.it.heard(event) or self.it.events(do.LoadFailed), DEADLINE, f"{event} on {self}"
        )
        assert event in self.it.seen, f"{event} on {self}, which heard {self.it.seen}"

    def settle(self) -> None:
        """Until nothing is held, staged or under way."""
        counters = self.it.rank.counters
        wait_for(
            lambda: not any(counters.snapshot().get(name, 0) for name in BUSY), DEADLINE, f"{self} at rest"
        )

    def account(self) -> tuple[list[do.Event], dict[str, int]]:
        """All that the rank has said and counted."""
        self.it.seen += self.it.rank.events()
        return self.it.seen, self.it.rank.counters.snapshot()

    def wrong(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The first (layer, block, head, slot) of D's pages that hold anything but what they should.

        All of them are compared: what was wanted is there, and nothing was written anywhere else.
        """
        right = [torch.full_like(page, NOTHING) for page in self.it.pages]
        for prompt in prompts:
            for layer in range(len(right)):
                self._write(right, prompt, layer, prompt.cached, prompt.tokens - 1)
        found = [
            [layer, *place]
            for layer, (ours, theirs) in enumerate(zip(self.it.pages, right, strict=True))
            for place in (ours.view(torch.int32) != theirs.view(torch.int32)).any(-1).nonzero()[:8].tolist()
        ]
        return found[:8]

    def spoil(self, layer: int, block: int, head: int, slot: int) -> None:
        """Write over one token's row."""
        self.it.pages[layer][block, head, slot] = 0.5

    def stop(self) -> None:
        self.it.rank.stop()
        assert not self.it.rank.alive

    def _write(self, pages: list[torch.Tensor], prompt: Prompt, layer: int, start: int, stop: int) -> None:
        heads = self.geometry.heads(self.number)
        here, entries, slots = self.geometry.slots(self.number, torch.arange(start, stop))
        blocks = torch.tensor(prompt.blocks(self.role, self.geometry))[entries]
        model_layer = self.geometry.layer_span(self.number)[layer]
        rows = prompt.kv(self.geometry)[model_layer, start:stop, heads.start : heads.stop]
        pages[layer][blocks, :, slots] = rows[here]

    def __str__(self) -> str:
        return f"rank {self.number} of {self.role}"


class Crew:
    """All ranks of one engine, threads of this process."""

    def __init__(self, role: str, geometry: Geometry, links: Callable[[], LinkFactory]) -> None:
        port = free_ports(geometry.world)
        self.address, self.geometry = Address("127.0.0.1", port), geometry
        self._players = [Player(role, geometry, rank, port, links()) for rank in range(geometry.world)]

    def each(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every Player; what they answer, by rank."""
        return [getattr(player, method)(*args) for player in self._players]

    def close(self) -> None:
        self.each("stop")


class Processes(Crew):
    """A process for each rank, over the host link."""

    def __init__(self, role: str, geometry: Geometry) -> None:
        # Forked by a process that has imported torch and has one thread: quick, and safe.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "p2pkv.engine.thread", "p2pkv.demo.processes"])
        with patch.dict(os.environ, {"OPENBLAS_NUM_THREADS": "1"}):  # numpy starts threads when imported
            forkserver.ensure_running()
        port = free_ports(geometry.world)
        self.address, self.geometry = Address("127.0.0.1", port), geometry
        self._ranks = [
            ProcessPoolExecutor(1, context, _begin, (role, geometry, rank, port))
            for rank in range(geometry.world)
        ]

    def each(self, method: str, *args: Any) -> list[Any]:
        answers = [rank.submit(_play, method, args) for rank in self._ranks]
        return [answer.result(2 * DEADLINE) for answer in answers]

    def close(self) -> None:
        try:
            super().close()
        finally:
            for rank in self._ranks:
                rank.shutdown()


def _begin(role: str, geometry: Geometry, rank: int, port: int) -> None:
    """A rank's process has one Player."""
    global PLAYER
    torch.set_num_threads(1)
    links = make_factory("host", host="127.0.0.1", staging_bytes=OPTIONS["staging_bytes"])
    PLAYER = Player(role, geometry, rank, port, links)


def _play(method: str, args: Sequence[Any]) -> Any:
    return getattr(PLAYER, method)(*args)


def push(p: Crew, d: Crew, prompts: Sequence[Prompt]) -> None:
    """Prefill all of them, a chunk of each in turn; D asks when the first chunks are computed.

    In the end every byte is where it belongs and was sent once, and every rank has said its word once.
    """
    for prompt in prompts:
        d.each("do", do.Expect(prompt.key, p.address, prompt.tokens, b"digest"))
        p.each("do", do.HoldPrompt(prompt.key, d.address))
        p.each("do", do.OfferPrompt(prompt.key, d.address, prompt.tokens, b"digest"))
        p.each("compute", prompt, 0, min(prompt.chunk, prompt.tokens))
    for prompt in prompts:
        d.each("wait", do.Begun(prompt.key))
        pages = (prompt.blocks("D", d.geometry),)
        d.each("do", do.Load(prompt.key, prompt.cached, prompt.tokens - 1, pages))
    for prompt in prompts:
        for start in range(prompt.chunk, prompt.tokens, prompt.chunk):
            p.each("compute", prompt, start, min(start + prompt.chunk, prompt.tokens))
    for prompt in prompts:
        for crew, event in ((d, do.Loaded(prompt.key)), (p, do.BlocksFree(prompt.key))):
            crew.each("wait", event)
            crew.each("do", do.Forget(prompt.key))
    for crew in (p, d):
        crew.each("settle")
    assert d.each("wrong", prompts) == [[]] * d.geometry.world
    plan = plan_of(p.geometry, d.geometry)

    def nbytes(edge: Edge) -> int:
        """Of the tokens that both ranks keep."""
        count = 0
        for prompt in prompts:
            tokens = torch.arange(prompt.cached, prompt.tokens - 1)
            on_p, on_d = (
                crew.geometry.slots(rank, tokens)[0] for crew, rank in ((p, edge.source), (d, edge.target))
            )
            count += int((on_p & on_d).sum())
        return count * len(edge.layers) * len(edge.heads) * p.geometry.content * 4

    for rank, (heard, counted) in enumerate(p.each("account")):
        edges = plan.from_source(rank)
        assert sorted(heard, key=str) == [do.BlocksFree(prompt.key) for prompt in prompts]
        assert (counted["bytes_sent"], counted["chunks_filler"]) == (sum(map(nbytes, edges)), 0)
        assert counted["links"] == len(edges)
    for rank, (heard, counted) in enumerate(d.each("account")):
        edges = plan.to_target(rank)
        assert sorted(heard, key=str) == [
            kind(each.key) for kind in (do.Begun, do.Loaded) for each in prompts
        ]
        assert counted["bytes_scattered"] == sum(map(nbytes, edges))
        assert counted["links"] == len(edges)
