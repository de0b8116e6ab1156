"""What workers report up: counts for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from p2pkv.connector import P2pKvConnector
from p2pkv.engine.context import Counters
from support.connector.instances import vllm_config


def test_prometheus_has_one_counter_for_each_and_engines_have_labels() -> None:
    kinds: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    # The second as when an engine is made anew in this process.
    for counts, total in (({"bytes_sent": 10, "unknown": 3}, 10), ({"bytes_sent": 1}, 11)):
        config = vllm_config("P")
        made = P2pKvConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], labels)
        made.observe(counts, engine_idx=1)
        for engine, expected in (("0", None), ("1", total)):
            of = {"model_name": "m", "engine": engine}
            assert REGISTRY.get_sample_value("p2pkv_bytes_sent_total", of) == expected
    exposed = {family.name for family in REGISTRY.collect() if family.name.startswith("p2pkv_")}
    assert exposed == {f"p2pkv_{name}" for name in Counters.NAMES}
