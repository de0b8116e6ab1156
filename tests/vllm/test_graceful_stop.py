"""A P that is told to stop with `--shutdown-timeout` finishes what it has taken on, and nobody notices."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2pkv.demo import client
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer
from support.servers.deployments import Deployment, deployed, instance
from support.servers.fleet import assert_same, at_rest, complete, metric, tokens

pytestmark = pytest.mark.long

SHUTDOWN_SECONDS = 30
PROMPTS = 16
TOKENS = 24


@pytest.fixture
def stopping_pair(
    tiny_model: Path, logs: Path, servers_on_failure: Callable[..., None], fleet_keeper
) -> Iterator[Deployment]:
    """P, D and their proxy; what D cannot load, it fails."""
    fleet_keeper.stop()
    proxy = ProxyServer(log_path=logs / "stopping-proxy.log")
    config, stop = {"chunk_bytes": 16384}, ("--shutdown-timeout", str(SHUTDOWN_SECONDS))
    p = instance(proxy, tiny_model, logs, "P", name="stopping-P", extra_config=config, more_args=stop)
    d = instance(
        proxy, tiny_model, logs, "D", name="stopping-D", extra_config=config, load_failure_policy="fail"
    )
    servers_on_failure(p, d, proxy)
    with deployed(Deployment(p, [d], proxy)) as made:
        yield made


@pytest.mark.timeout(500)
def test_p_finishes_what_it_has_taken_on(stopping_pair: Deployment) -> None:
    p, d, proxy = stopping_pair.p, stopping_pair.d, stopping_pair.proxy
    line = f"the link to P at {p.zmq_address} is up, ahead of requests"
    wait_until(lambda: line in d.log_path.read_text(errors="replace"), "the link, before any request", 200.0)
    assert metric(p, "p2pkv_bytes_sent_total") == 0
    prompts = [tokens(900, f"graceful {number}") for number in range(PROMPTS)]
    expected = [complete(d, each, TOKENS) for each in prompts]

    def under_way() -> bool:
        """P has begun to push, and has all requests."""
        there = client.metrics(p.base_url)
        done = there.get("vllm:request_success_total", 0.0)
        running = there.get("vllm:num_requests_running", 0.0) + there.get("vllm:num_requests_waiting", 0.0)
        return there.get("p2pkv_bytes_sent_total", 0.0) > 0 and running + done >= PROMPTS

    with ThreadPoolExecutor(PROMPTS) as pool:
        asked = [pool.submit(complete, proxy, prompt, TOKENS) for prompt in prompts]
        wait_until(under_way, "P pushing", 60.0)
        told = time.monotonic()
        os.kill(p.pid, signal.SIGTERM)
        got = [each.result(120.0) for each in asked]
    assert_same(expected, got)
    wait_until(lambda: not p.running(), "P's end", SHUTDOWN_SECONDS + 15.0)
    assert time.monotonic() - told < SHUTDOWN_SECONDS + 15.0
    log = proxy.log_path.read_text(errors="replace")
    name = f"prefill instance 127.0.0.1:{p.http_port}"
    assert -1 < log.find(f"{name} is paused by vLLM's") < log.find(f"{name} said goodbye")
    at_rest(d)
    assert metric(d, "p2pkv_transfers_failed_total") == 0
    assert metric(d, "p2pkv_transfers_loaded_total") == PROMPTS, "D computed prompts that P had taken on"
