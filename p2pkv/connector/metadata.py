"""The messages between the scheduler's side and the workers' side, step by step, and a worker's counters.

vLLM carries these objects between its own processes. Requests are named by vLLM's request id where
they are reported to vLLM, and by the transfer key everywhere else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.outputs import KVConnectorOutput

from p2pkv.engine.commands import Expect, HoldPrompt, Invalidate, Load, OfferPrompt, PromptBlocks
from p2pkv.engine.context import Counters


@dataclass
class PrefillStep:
    """P: what this step does to one prompt."""

    blocks: PromptBlocks
    cached: int
    """Its blocks hold tokens [0, cached) already, and no step will touch them again."""
    start: int
    stop: int
    """This step computes tokens [start, stop)."""


@dataclass
class EndedRequest:
    """A request that is over, and why if it was cut short."""

    request_id: str
    key: str
    reason: str
    report: bool = True
    """vLLM keeps the request's blocks until their end is reported."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, each step."""

    work: bool = False
    """Whether this step computes anything."""
    idle: bool = False
    """Whether it computes nothing, no step before it is still out, and only the workers can change that."""
    idle_wait: float = 0.0
    """Seconds that this step may wait for events of the transfers; 0 unless it is idle."""
    wakeup_address: str = ""
    """Where to send wake-ups (`idle_steps.WakeupSender`); "": the engine core does not sleep."""

    # P
    holds: list[HoldPrompt] = field(default_factory=list)
    offers: list[OfferPrompt] = field(default_factory=list)
    prefills: list[PrefillStep] = field(default_factory=list)
    quiet: bool = False
    """No D waits for any of these: P's token goes to the client before D is asked."""
    revoked: list[str] = field(default_factory=list)
    stale: list[tuple[str, str]] = field(default_factory=list)
    """Keys of prompts that were computed with former weights, and why they are not sent any more."""
    sent: list[EndedRequest] = field(default_factory=list)
    released: list[tuple[str, str]] = field(default_factory=list)
    """Keys of prompts for which no D will ask, and why."""

    # D
    invalidate: Invalidate | None = None
    withheld: list[str] = field(default_factory=list)
    """Loads that the workers have reported as done and must report again, as failed."""
    expects: list[tuple[str, Expect]] = field(default_factory=list)
    loads: list[tuple[str, Load]] = field(default_factory=list)
    now: dict[str, list[int]] = field(default_factory=dict)
    """Of these loads the keys of those that this step computes with, and the blocks that a failure spoils."""
    drops: list[EndedRequest] = field(default_factory=list)

    def with_loads(self, other: StepMetadata) -> StepMetadata:
        """One step's orders: to P those of this object, to D those of `other`."""
        to_d = ("invalidate", "withheld", "expects", "loads", "now", "drops")
        return replace(self, **{name: getattr(other, name) for name in to_d})

    @property
    def has_commands(self) -> bool:
        return self != StepMetadata(self.work, self.idle, self.idle_wait, self.wakeup_address)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, each step: requests of D by vLLM's id."""

    begun: dict[str, list[str | None]] = field(default_factory=dict)
    """By request: for each rank that P has offered it to, the offer's generation; see `commands.Begun`."""
    failed: dict[str, str] = field(default_factory=dict)
    """Transfers that failed before D had blocks for them, and why."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        begun = dict(self.begun)
        for request_id, offered in other.begun.items():
            begun[request_id] = begun.get(request_id, []) + offered
        return WorkerMetadata(begun, {**self.failed, **other.failed})


class EarlyLoad(KVConnectorOutput):
    """A load that all ranks have, before the result of a step reports it (`idle_steps.WakeupSender`)."""


# What a rank counts, in the forms that vLLM's log and its Prometheus page take.


@dataclass
class P2pKvStats(KVConnectorStats):
    """`data`: by how much each counter has grown since the last report."""

    data: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> P2pKvStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class CounterDeltas:
    """Turns counters into what they have grown by since the last look."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._seen = Counter(counters.values)

    def since(self) -> P2pKvStats | None:
        seen, self._seen = self._seen, Counter(self._counters.values)
        grown = self._seen - seen
        return P2pKvStats(data=dict(grown)) if grown else None


@cache
def _counter(kind: Any, name: str, meaning: str, *labelnames: str) -> Any:
    """One for the whole process: the registry refuses a second one of the same name."""
    return kind(f"p2pkv_{name}", meaning, labelnames=list(labelnames))


class P2pKvMetrics(KVConnectorPromMetrics):
    """`p2pkv_<counter>_total` for each counter, by engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, *more: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, *more)
        self._metrics = {
            name: _counter(self._counter_cls, name, f"p2pkv: {name.replace('_', ' ')}", *labelnames)
            for name in Counters.NAMES
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if value and name in self._metrics:
                self._metrics[name].labels(*labels).inc(value)
