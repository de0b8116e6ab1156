"""examples/grafana.json: whatever it asks for exists, here, in the connector or in vLLM's own source."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from proxy_fakes import Deployment

from p2pkv.engine.context import Counters
from p2pkv_proxy.exposition import page as page_of

BOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
QUERIES = [
    *(target["expr"] for panel in PANELS for target in panel.get("targets", ())),
    *(each["query"]["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"),
]
NAME = re.compile(r"(?<![\w:])(?:p2pkv_|vllm:)\w+")
SUFFIXES = {
    "counter": ["_total"],
    "histogram": ["_bucket", "_count", "_sum"],
    "gauge": [""],
    "info": ["_info"],
}


def asked(prefix: str) -> set[str]:
    return {name for query in QUERIES for name in NAME.findall(query) if name.startswith(prefix)}


def test_every_series_in_a_query_is_ours_or_vllms() -> None:
    """So that no name escapes the tests below."""
    for query in QUERIES:
        selected = re.findall(r"([A-Za-z_:][\w:]*)(?=[{\[])", query)
        assert selected or query.startswith("label_values("), query
        assert all(NAME.fullmatch(name) for name in selected), query


async def test_the_proxy_has_what_is_asked_of_it(concurrent: Deployment) -> None:
    assert (await concurrent.post()).status == 200
    page, _ = page_of("", [concurrent.proxy.exposition.families()])
    families = list(text_string_to_metric_families(page.decode()))
    names = {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}
    assert len(asked("p2pkv_proxy_")) > 10
    assert asked("p2pkv_proxy_") <= names
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    used = {
        label
        for query in QUERIES
        if "p2pkv_proxy_" in query
        for group in re.findall(r"by \(([^)]*)\)", query)
        for label in group.split(", ")
    }
    assert used <= labels | {"le"}


@pytest.mark.vllm
def test_the_connector_has_what_is_asked_of_it() -> None:
    found = {name for name in asked("p2pkv_") if not name.startswith("p2pkv_proxy_")}
    from p2pkv.connector.metadata import RENAMED

    assert found and found <= {f"p2pkv_{RENAMED.get(name, name)}_total" for name in Counters.NAMES}


@pytest.mark.vllm
def test_vllm_has_what_is_asked_of_it() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    made = re.findall(r"self\._(gauge|counter|histogram)_cls\(\s*name=\"(vllm:\w+)\"", source)
    names = {name + suffix for kind, name in made for suffix in SUFFIXES[kind]}
    assert len(asked("vllm:")) > 8
    assert asked("vllm:") <= names


def test_panels_lie_side_by_side_and_are_told_apart() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        across = one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
        down = one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]
        assert not (across and down)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_every_target_asks_the_source_that_the_user_chooses() -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    chosen = {each["name"] for each in BOARD["templating"]["list"]}
    for panel in PANELS:
        for target in panel.get("targets", ()):
            assert panel["datasource"] == target["datasource"] == source
            assert set(re.findall(r"\$(?!__)(\w+)", target["expr"])) <= chosen
            assert set(re.findall(r"\$(__\w+)", target["expr"])) <= {"__rate_interval"}
