"""The P of `p2pkv bench`: plays the forward in this thread, and measures.

All times are of the monotonic clock, which the two processes share.
"""

import contextlib
import itertools
import time
from dataclasses import dataclass, field
from functools import partial

import torch

from p2pkv.bench.harness import (
    FORMS,
    HOST,
    WINDOW_BYTES,
    BenchError,
    bare_link,
    decode_process,
    forget,
    hold,
    make_rank,
    measuring,
    seconds_over,
)
from p2pkv.bench.memory import LAYERS, Memory, capacity_for
from p2pkv.demo.processes import free_ports
from p2pkv.device import make_recorder
from p2pkv.engine import commands as do
from p2pkv.engine.computed_layers import ComputedLayers
from p2pkv.engine.thread import Rank
from p2pkv.links import make_factory
from p2pkv.links.base import Outbound
from p2pkv.pairing import Address

ASLEEP_HOOKS = 200
ASLEEP_PAUSE = 0.002
"""Seconds between two hooks: long enough for the engine to sleep again."""


@dataclass(frozen=True)
class Push:
    """One prompt, pushed. Seconds.

    Attributes:
        forward: from the first layer's beginning to the last one's end; 0 if all was computed before.
        tail: from the last layer's end, or D's asking if that was later, until D has it.
        total: from the first layer's beginning, or D's asking if all was computed before, until D has it.
        claim: from D's Expect until D knows that P has begun.
        early: share of the bytes that D had before the last layer was computed.
        hooks: what each layer's hook cost.
    """

    forward: float
    tail: float
    total: float
    claim: float
    early: float
    hooks: list[float] = field(default_factory=list)


class Hook:
    """A step of P, as `p2pkv.connector.worker` reports it; that module cannot be imported without vLLM."""

    def __init__(
        self, rank: Rank, prompts: tuple[tuple[str, int], ...], stride: int, device: str = "cpu"
    ) -> None:
        """`stride`: layers of one message."""
        self._rank = rank
        self._indices = {f"model.layers.{layer}.self_attn.attn": layer for layer in range(LAYERS)}
        self._names = list(self._indices)
        self._computed = ComputedLayers(LAYERS, make_recorder(torch.device(device)))
        self._computed.begin(prompts, stride)

    def timed(self, layer: int) -> float:
        """Call it for this layer; seconds that it took."""
        name = self._names[layer]
        start = time.perf_counter()
        self.layer(name)
        return time.perf_counter() - start

    def layer(self, name: str) -> None:
        """The hook of one layer."""
        if self._computed.prompts and (index := self._indices.get(name)) is not None:
            self._computed.computed(index, self._rank.do)

    def end(self) -> None:
        """The sweep at the end of the step."""
        self._computed.ended()
        self._computed.end(self._rank.do)


class PrefillSide:
    """P's ranks and D's process."""

    def __init__(self, stack: contextlib.ExitStack, longest: int, chunk_bytes: int, link: str) -> None:
        """`stack`: of what has to end. `longest`: tokens of the longest prompt."""
        self.chunk_bytes = chunk_bytes
        self._stack = stack
        self._keys = (f"bench-{number}" for number in itertools.count())
        self.memory = Memory(capacity_for(longest), "P")
        self._copy = torch.zeros_like(self.memory.flat)
        settings = {
            "capacity": self.memory.capacity,
            "link": link,
            "ports": {name: free_ports() for name in FORMS},
        }
        _, self.pipe = stack.enter_context(decode_process(settings))
        self._decode = {
            name: Address.parse(at) for name, at in self.pipe.expect("addresses")["addresses"].items()
        }
        self._ranks = {layout: self._start_rank(layout, link) for layout in FORMS}
        self._verified = self._start_rank("dense", link, verify=True)
        self._outbound = self._start_link(link)

    # One measurement each.

    def copy(self, nbytes: int) -> float:
        """Seconds of one plain copy of so many bytes in one thread."""
        begin = time.monotonic()
        self._copy[:nbytes].copy_(self.memory.flat[:nbytes])
        return time.monotonic() - begin

    def raw(self, nbytes: int) -> float:
        """Seconds of so many bytes over a bare link, each message filled by one plain copy."""
        step = min(self.chunk_bytes, WINDOW_BYTES // 2)
        sizes = [min(step, nbytes - done) for done in range(0, nbytes, step)]
        return seconds_over(self._outbound, self.pipe, self.memory.flat, sizes)

    def push_ready(self, layout: str, tokens: int, *, verify: bool = False) -> Push:
        """A sequential router's request: P has computed it all when D comes. `verify`: dense only."""
        address, rank = self._verified if verify else self._ranks[layout]
        key = self._hold(layout, rank, tokens)
        Hook(rank, ((key, tokens),), LAYERS).end()
        self._ask(layout, key, address, tokens)
        times = self._loaded(layout, rank, key, tokens)
        took = times["loaded"] - times["asked"]
        return Push(0.0, took, took, times["begun"] - times["expected"], 0.0)

    def push_layers(self, layout: str, tokens: int, layer_seconds: float, *, whole: bool) -> Push:
        """A concurrent router's request: D waits while the forward runs, layer after layer.

        `whole`: P hands nothing over before the end, the baseline.
        """
        address, rank = self._ranks[layout]
        before = dict(rank.counters.values)
        self._ask(layout, key := next(self._keys), address, tokens)
        rank.steps.begin(time.monotonic())
        begin = time.monotonic()
        self._hold(layout, rank, tokens, key)
        hook, hooks = Hook(rank, ((key, tokens),), rank.layers_per_message(tokens)), []
        for layer in range(LAYERS):
            time.sleep(layer_seconds)
            if not whole:
                hooks.append(hook.timed(layer))
        end = time.monotonic() - (hooks[-1] if hooks else 0.0)
        hook.end()
        rank.steps.end()
        times = self._loaded(layout, rank, key, tokens)
        names = "bytes_sent", "bytes_before_last_layer"
        sent, early = (rank.counters.values[name] - before[name] for name in names)
        tail = times["loaded"] - max(end, times["asked"])
        return Push(
            end - begin,
            tail,
            times["loaded"] - begin,
            times["begun"] - times["expected"],
            early / sent,
            hooks,
        )

    def forward_alone(self, layer_seconds: float) -> float:
        """Seconds of the same forward without hooks."""
        begin = time.monotonic()
        for _ in range(LAYERS):
            time.sleep(layer_seconds)
        return time.monotonic() - begin

    def hooks_asleep(self) -> list[float]:
        """Seconds of hooks, each of which wakes the engine; no D wants the prompt."""
        _, rank = self._ranks["dense"]
        key = self._hold("dense", rank, 1 << 20, blocks=())
        hook, hooks = Hook(rank, ((key, 1),), stride=1), []
        for number in range(ASLEEP_HOOKS):
            time.sleep(ASLEEP_PAUSE)
            hooks.append(hook.timed(number % LAYERS))
        rank.do(do.Abort(key, "the benchmark needs it no more"))
        forget(rank, key)
        return hooks

    # Inside.

    def _hold(
        self, layout: str, rank: Rank, tokens: int, key: str = "", blocks: tuple[list[int], ...] | None = None
    ) -> str:
        key = key or next(self._keys)
        if blocks is None:
            blocks = FORMS[layout].tables(tokens, self.memory.capacity, "P")
        hold(rank, key, self._decode[layout], tokens, blocks)
        return key

    def _ask(self, layout: str, key: str, prefill: Address, tokens: int) -> None:
        self.pipe.send(order="load", layout=layout, key=key, prefill=str(prefill), tokens=tokens)
        self.pipe.expect("expecting")

    def _loaded(self, layout: str, rank: Rank, key: str, tokens: int) -> dict[str, float]:
        times = self.pipe.expect("loaded")
        expected = FORMS[layout].nbytes(tokens)
        if times["scattered"] != expected:
            raise BenchError(
                f"{layout}, {tokens} tokens: D wrote {times['scattered']} bytes instead of {expected}"
            )
        forget(rank, key)
        return times

    def _start_rank(self, layout: str, link: str, **options: bool) -> tuple[Address, Rank]:
        memory, chunk_bytes = self.memory, self.chunk_bytes
        address, rank = make_rank(
            "P", FORMS[layout], memory, free_ports(), link=link, chunk_bytes=chunk_bytes, **options
        )
        self._stack.callback(rank.stop)
        return address, rank

    def _start_link(self, link: str) -> Outbound:
        links = make_factory(link, host=HOST, staging_bytes=WINDOW_BYTES)
        self._stack.callback(links.close)
        return bare_link(links, self.pipe, WINDOW_BYTES)


prefill = partial(measuring, PrefillSide)
"""Both processes, ended on the way out."""
