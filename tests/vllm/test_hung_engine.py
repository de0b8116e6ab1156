"""One of two D's hangs behind its living HTTP server: every request is answered, by the other one."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_support import MODEL_NAME, SETTINGS, assert_same, at_rest, tokens, worker_of

from p2pkv.demo import answers, client
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer

pytestmark = pytest.mark.long

LEASE, PROXYS_LEASE, STALL = 5, 10, 10
PROMPTS = 12


@pytest.mark.timeout(900)
def test_with_one_of_two_ds_hung_every_request_is_answered(
    fleet_keeper, launch: Callable[..., None], tiny_model: Path, tmp_path: Path
) -> None:
    """Its worker is stopped alone, so its port, its /health and its connection to the proxy stand."""
    fleet_keeper.stop()
    proxy = ProxyServer(
        log_path=tmp_path / "proxy.log",
        extra_args=["--lease-seconds", str(PROXYS_LEASE), "--decode-policy", "round_robin"],
    )

    def server(role: str, number: int) -> VllmServer:
        return VllmServer(
            tiny_model,
            role=role,  # type: ignore[arg-type]
            proxy=proxy.discovery,
            extra_args=SETTINGS,
            extra_config={"lease_seconds": LEASE, "stall_seconds": STALL},
            load_failure_policy="recompute" if role == "D" else None,
            log_path=tmp_path / f"{role}{number}.log",
        )

    p, hung, sound = server("P", 0), server("D", 0), server("D", 1)
    launch(proxy, p, hung, sound)

    def there(prefill: int, decode: int) -> bool:
        report = json.loads(client.get(f"{proxy.base_url}/health"))
        return (report["prefill"], report["decode"]) == (prefill, decode)

    def ask(prompt: list[int]) -> answers.Answer:
        return answers.complete(proxy.base_url, MODEL_NAME, prompt, max_tokens=16, timeout_seconds=300.0)[0]

    wait_until(lambda: there(1, 2), "a P and two D's", 200.0)
    prompts = [tokens(300, f"hung {number}") for number in range(PROMPTS)]
    expected = [answers.complete(sound.base_url, MODEL_NAME, each, max_tokens=16)[0] for each in prompts]
    worker = worker_of(hung)
    worker.suspend()
    try:
        with ThreadPoolExecutor(PROMPTS) as pool:
            got = list(pool.map(ask, prompts))
        assert client.get(f"{hung.base_url}/health") is not None, "its HTTP server lives"
        assert_same(expected, got)
        counters = json.loads(client.get(f"{proxy.base_url}/health"))["counters"]
        assert counters["retried"] >= PROMPTS // 3 and counters["retries_refused"] == 0
        log = (tmp_path / "proxy.log").read_text()
        assert "its engine may hang" in log
        assert_same(expected[:2], [ask(prompts[0]), ask(prompts[1])])
        at_rest(sound, seconds=120.0)
    finally:
        worker.resume()
    wait_until(lambda: there(1, 2), "all of them again", 200.0)
    again = [tokens(300, f"again {number}") for number in range(4)]
    assert_same(
        [answers.complete(sound.base_url, MODEL_NAME, each, max_tokens=16)[0] for each in again],
        [ask(each) for each in again],
    )
    for each in (p, hung, sound):
        at_rest(each, seconds=120.0)
