"""Far more runnable processes than cores: nothing is declared dead that lives.

Whether requests end is tested, not how soon: SLOWER stretches what waits for the servers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2pkv.demo import answers
from p2pkv.demo.servers import ProxyServer, VllmServer
from support.servers.fleet import MODEL_NAME, SETTINGS, assert_same, at_rest, tokens

pytestmark = pytest.mark.long

LOOPS = 4
PROMPTS = 16
SLOWER = 8.0


@contextmanager
def busy_loops() -> Iterator[None]:
    """Processes that only compute, at normal priority."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.timeout(300 * SLOWER)
@pytest.mark.parametrize("ranks", [1, 2])
def test_beside_four_busy_loops_no_request_is_lost(
    fleet_keeper, launch: Callable[..., None], tiny_model: Path, tmp_path: Path, ranks: int
) -> None:
    fleet_keeper.stop()
    proxy = ProxyServer(log_path=tmp_path / "proxy.log", extra_args=["--no-decode-alone"])

    def server(role: str, tp: int) -> VllmServer:
        return VllmServer(
            tiny_model,
            role=role,  # type: ignore[arg-type]
            ranks=tp,
            proxy=proxy.discovery,
            extra_args=[*SETTINGS, "--tensor-parallel-size", str(tp)],
            load_failure_policy="fail" if role == "D" else None,
            log_path=tmp_path / f"{role}.log",
        )

    p, d = server("P", ranks), server("D", 1)
    launch(proxy, p, d)
    prompts = [tokens(300, f"overload {ranks} {number}") for number in range(PROMPTS)]

    def ask(prompt: list[int]) -> answers.Answer:
        return answers.complete(
            proxy.base_url, MODEL_NAME, prompt, max_tokens=16, timeout_seconds=120.0 * SLOWER
        )[0]

    with busy_loops(), ThreadPoolExecutor(PROMPTS) as pool:
        got = list(pool.map(ask, prompts))
    expected = [answers.complete(d.base_url, MODEL_NAME, each, max_tokens=16)[0] for each in prompts]
    assert_same(expected, got)
    at_rest(p, ranks, 120.0)
    at_rest(d, 1, 120.0)
