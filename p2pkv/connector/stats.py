"""What a rank counts, in the forms that vLLM's log and its Prometheus page take."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from p2pkv.engine.context import Counters


@dataclass
class P2pKvStats(KVConnectorStats):
    """`data`: by how much each counter has grown since the last report."""

    data: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> P2pKvStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Growth:
    """Turns counters into what they have grown by since the last look."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._seen = dict(counters.values)

    def since(self) -> P2pKvStats | None:
        now = dict(self._counters.values)
        grown = {name: value - self._seen[name] for name, value in now.items() if value != self._seen[name]}
        self._seen = now
        return P2pKvStats(data=grown) if grown else None


@cache
def _counter(kind: Any, name: str, *labelnames: str) -> Any:
    """One for the whole process: the registry refuses a second one of the same name."""
    return kind(f"p2pkv_{name}", f"p2pkv: {name.replace('_', ' ')}", labelnames=list(labelnames))


class P2pKvMetrics(KVConnectorPromMetrics):
    """`p2pkv_<counter>_total` for each counter, by engine."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {name: _counter(self._counter_cls, name, *labelnames) for name in Counters.NAMES}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if value and name in self._metrics:
                self._metrics[name].labels(*labels).inc(value)
