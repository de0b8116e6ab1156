"""What workers report up: news for the scheduler, and counts for log and Prometheus."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from p2pkv.connector import P2pKvConnector
from p2pkv.connector.metadata import CounterDeltas
from p2pkv.engine.context import Counters
from support.connector.instances import vllm_config

pytestmark = pytest.mark.vllm


def test_counts_are_reported_as_their_growth() -> None:
    counters = Counters()
    counters.add("bytes_sent", 100)
    growth = CounterDeltas(counters)
    assert growth.since() is None
    counters.add("bytes_sent", 5)
    counters.add("chunks_sent", 1)
    grown = growth.since()
    assert grown is not None
    assert grown.data == {"bytes_sent": 5, "chunks_sent": 1}
    assert growth.since() is None


def test_vllms_log_line_names_what_has_grown() -> None:
    logging = KVConnectorLogging(vllm_config("P").kv_transfer_config)
    lines: list[str] = []
    for _ in range(2):
        logging.observe({"bytes_sent": 3, "chunks_sent": 0})
    logging.log(lambda text, *values: lines.append(text % values))
    logging.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: bytes_sent=6"]


def metrics(labels: dict[int, list[object]]) -> Any:
    kinds = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    return P2pKvConnector.build_prom_metrics(vllm_config("P"), kinds, ["model_name", "engine"], labels)


def sample(name: str, engine: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": engine})


def test_prometheus_has_one_counter_for_each_and_engines_have_labels() -> None:
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    first = metrics(labels)
    first.observe({"bytes_sent": 10, "unknown": 3}, engine_idx=1)
    assert sample("p2pkv_bytes_sent_total", "1") == 10
    assert sample("p2pkv_bytes_sent_total", "0") is None
    # A second front end in this process, as when an engine is made anew.
    metrics(labels).observe({"bytes_sent": 1}, engine_idx=1)
    assert sample("p2pkv_bytes_sent_total", "1") == 11
    exposed = {family.name for family in REGISTRY.collect() if family.name.startswith("p2pkv_")}
    assert exposed == {f"p2pkv_{name}" for name in Counters.NAMES}
