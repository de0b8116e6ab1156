"""Other people's routers in front of our P and D: answers are a single server's, from KV that really moved.

`vllm-router` comes from the Python Package Index into an environment of its own, which pytest's cache keeps.
Where it cannot be had, its tests are skipped and say why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from p2pkv.demo import answers, client
from support.servers.fleet import (
    CHUNK,
    MODEL_NAME,
    Fleet,
    Traffic,
    ask_all,
    assert_same,
    chat_all,
    kv_bytes,
    letters,
    tokens,
)
from support.servers.routers import MODES, RouterProcess, original_router, vllm_router

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("compared")]

AT_ONCE = 8
REQUESTS = 24


@contextmanager
def found_by(fleet: Fleet, router: RouterProcess, note: Any) -> Iterator[str]:
    """The router's URL, when it has found the fleet's P and D."""
    note(router)
    with router, fleet.pings.also(router.discovery):
        router.wait_ready(60.0)
        yield router.base_url


def serves_as_one(fleet: Fleet, url: str, seed: str) -> None:
    """Completions, chat and a stream through `url`, 8 at once, are those of the single server."""
    lengths = [7 + 23 * index % 300 for index in range(REQUESTS)]
    prompts = [tokens(length, f"{seed} {index}") for index, length in enumerate(lengths)]
    traffic = Traffic(fleet)
    pair = ask_all(url, prompts, at_once=AT_ONCE)
    moved = traffic.scattered(at_least=sum(kv_bytes(0, length - 1) for length in lengths))
    assert moved <= sum(kv_bytes(0, length - 1, whole_blocks=True) for length in lengths)
    assert_same(ask_all(fleet.single.base_url, prompts, at_once=AT_ONCE), pair)

    stories, traffic = [letters(prompt) for prompt in prompts[:AT_ONCE]], Traffic(fleet)
    pair = chat_all(url, stories, at_once=AT_ONCE)
    assert_same(chat_all(fleet.single.base_url, stories, at_once=AT_ONCE), pair)
    assert traffic.scattered(at_least=1)

    prompt = tokens(CHUNK + 11, f"{seed} stream")
    (single,) = answers.complete(fleet.single.base_url, MODEL_NAME, prompt, max_tokens=32)
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 32, **answers.GREEDY}
    events = [event for event in client.stream(f"{url}/v1/completions", body) if event["choices"]]
    assert len(events) > 1, "the answer came in one piece"
    assert "".join(event["choices"][0]["text"] for event in events) == single.text


@pytest.mark.parametrize("mode", MODES)
def test_vllm_router(
    fleet: Fleet, pytestconfig: pytest.Config, logs: Path, servers_on_failure: Any, mode: str
) -> None:
    with found_by(fleet, vllm_router(mode, pytestconfig, logs), servers_on_failure) as url:
        serves_as_one(fleet, url, f"vllm-router {mode}")


def test_the_original_example_proxy(fleet: Fleet, logs: Path, servers_on_failure: Any) -> None:
    with found_by(fleet, original_router(logs), servers_on_failure) as url:
        serves_as_one(fleet, url, "classic router")


# The benchmark with its own options, but without the `vllm` command: that of the CPU build looks for a
# distribution named vllm and fails, by `python -m vllm.entrypoints.cli.main` as well.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllms_serving_benchmark(fleet: Fleet, tiny_model: Path, tmp_path: Path, backend: str) -> None:
    endpoint = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    result = tmp_path / "result.json"
    options = {
        "backend": backend,
        "base-url": fleet.concurrent.base_url,
        "endpoint": endpoint,
        "model": MODEL_NAME,
        "tokenizer": str(tiny_model),
        "dataset-name": "random",
        "random-input-len": "160",
        "random-output-len": "8",
        "num-prompts": str(REQUESTS),
        "max-concurrency": str(AT_ONCE),
        "result-filename": str(result),
    }
    command = [sys.executable, "-c", BENCH, "--save-result", "--ignore-eos"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    traffic = Traffic(fleet)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(result.read_text())
    assert (found["completed"], found.get("failed", 0)) == (REQUESTS, 0)
    assert found["total_output_tokens"] == 8 * REQUESTS
    assert traffic.scattered(at_least=REQUESTS * kv_bytes(0, 150)) > 0
