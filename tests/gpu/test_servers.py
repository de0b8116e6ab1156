"""Two GPUs, real vLLM: a prefill and a decode server with the proxy answer as a single server does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from p2pkv.control.endpoint import inspect
from p2pkv.demo import answers
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import TinyLlama, ensure_model
from p2pkv.pairing import Address

pytestmark = [pytest.mark.two_gpus, pytest.mark.vllm, pytest.mark.servers, pytest.mark.timeout(600)]

NAME = "tiny"
LENGTHS = (1, 15, 16, 17, 300, 1500)
SETTINGS = (
    *("--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", "2048", "--block-size", "16"),
    *("--max-num-batched-tokens", "512", "--gpu-memory-utilization", "0.3", "--enable-prefix-caching"),
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The proxy over P and D on a GPU each, and a single server beside P."""
    # FlashAttention takes head sizes from 64 on in all its versions.
    shape = TinyLlama(dtype="bfloat16", head_dim=64)
    model = ensure_model(shape, tmp_path_factory.mktemp("models"))
    logs = tmp_path_factory.mktemp("logs")
    proxy = ProxyServer(log_path=logs / "proxy.log")

    def server(name: str, gpu: int, **options: Any) -> VllmServer:
        env = {"CUDA_VISIBLE_DEVICES": str(gpu)}
        return VllmServer(
            model, extra_args=SETTINGS, env=env, name=name, log_path=logs / f"{name}.log", **options
        )

    paired = {"proxy": proxy.discovery, "extra_config": {"link": "nccl", "staging_bytes": 64 << 20}}
    found = {
        "proxy": proxy,
        "P": server("P", 0, role="P", **paired),
        "D": server("D", 1, role="D", **paired),
        "single": server("single", 0),
    }
    with ExitStack() as stack:
        for each in found.values():
            stack.enter_context(each)
        for each in found.values():
            each.wait_ready()
        yield {**found, "vocab": shape.vocab}


@pytest.mark.parametrize("length", LENGTHS)
def test_the_pair_answers_as_a_single_server(servers: dict[str, Any], length: int) -> None:
    draw = random.Random(f"gpu {length}")
    prompt = [draw.randrange(300, servers["vocab"]) for _ in range(length)]
    expected = answers.complete(servers["single"].base_url, NAME, prompt)
    pair = answers.complete(servers["proxy"].base_url, NAME, prompt)
    assert len(expected) == len(pair) == 1
    assert answers.difference(expected[0], pair[0]) is None
    counted = inspect(Address.parse(servers["D"].zmq_address))
    if length > 1:
        assert int(counted["transfers_loaded"]) >= 1 and int(counted["transfers_failed"]) == 0
