"""A mixture of experts over two data-parallel ranks, with the plug-in moe_dp: its answers are one rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_moe import TinyMoe
from vllm_support import MODEL_NAME, ask_all, assert_same, needs_cpu_build, plugin_environment, tokens

from p2pkv.demo import answers, client
from p2pkv.demo.servers import VllmServer
from p2pkv.demo.tiny_model import ensure_model

pytestmark = pytest.mark.long

LENGTHS = (3, 31, 32, 33, 100, 200, 300)
SETTINGS = (
    *("--served-model-name", MODEL_NAME, "--dtype", "float32", "--max-model-len", "1024"),
    *("--block-size", "32", "--max-num-batched-tokens", "128", "--max-num-seqs", "16"),
)
RANKS = ("--data-parallel-size", "2")
EXPERTS = {"each-expert-on-both-ranks": (), "each-expert-on-one-rank": ("--enable-expert-parallel",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_cpu_build()
    return tmp_path_factory.mktemp("data_parallel")


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Iterator[VllmServer]:
    """Ready when `two_ranks` is: they start side by side."""
    with server(folder, "one-rank", SETTINGS) as started:
        yield started


@pytest.fixture(scope="module", params=EXPERTS)
def two_ranks(folder: Path, one_rank: VllmServer, request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    settings = (*SETTINGS, *RANKS, *EXPERTS[request.param])
    with server(folder, request.param, settings) as started:
        for each in (one_rank, started):
            each.wait_ready()
        yield started


def server(folder: Path, name: str, settings: tuple[str, ...]) -> VllmServer:
    return VllmServer(
        ensure_model(TinyMoe(), folder),
        extra_args=settings,
        env=plugin_environment("moe_dp"),
        name=name,
        log_path=folder / f"{name}.log",
    )


def answered(server: VllmServer) -> list[float]:
    """Requests that each rank has answered."""
    counts = [0.0, 0.0]
    for family in text_string_to_metric_families(client.get(f"{server.base_url}/metrics")):
        for sample in family.samples:
            if sample.name == "vllm:request_success_total":
                counts[int(sample.labels["engine"])] += sample.value
    return counts


def test_the_header_chooses_the_rank_and_the_other_computes_along(
    one_rank: VllmServer, two_ranks: VllmServer, servers_on_failure: Callable[..., None]
) -> None:
    servers_on_failure(one_rank, two_ranks)
    prompts = [tokens(length, f"moe {length}") for length in LENGTHS]
    expected = ask_all(one_rank.base_url, prompts, at_once=1)
    for rank in range(2):
        before = answered(two_ranks)
        header = {"X-data-parallel-rank": f"{rank}"}
        got = [
            answers.complete(two_ranks.base_url, MODEL_NAME, prompt, headers=header)[0] for prompt in prompts
        ]
        assert_same(expected, got)
        before[rank] += len(prompts)
        assert answered(two_ranks) == before


def test_answers_are_one_ranks_where_both_compute(
    one_rank: VllmServer, two_ranks: VllmServer, servers_on_failure: Callable[..., None]
) -> None:
    """Ranks with different numbers of tokens in each step, and vLLM's own choice of the rank."""
    servers_on_failure(one_rank, two_ranks)
    prompts = [tokens(length, f"moe {count}") for length in LENGTHS for count in range(3)]
    before = answered(two_ranks)
    got = ask_all(two_ranks.base_url, prompts, at_once=16)
    assert_same(ask_all(one_rank.base_url, prompts, at_once=1), got)
    assert all(now > then for now, then in zip(answered(two_ranks), before, strict=True))
