"""P or D dies, freezes, is told to stop or is only slow, at several moments, under sixteen requests.

All requests end, the survivor goes on, and both are back where they were. Whatever becomes of P, all are
answered: D computes what P cannot. Who is slow loses nothing at all.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_support import MODEL_NAME, SETTINGS, assert_same, at_rest, metric, tokens, worker_of

from p2pkv.demo import answers, client
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer

pytestmark = pytest.mark.long

LEASE = 5
PROXYS_LEASE = 10
"""Its least: three lost pings and a little."""
PROMPTS = 16
TOKENS = 48
FREEZE_SECONDS = LEASE * 2 / 3
# Whoever computes a prompt again, or decodes on, needs two cores to itself for this long.
WORK_SECONDS = 20.0
# P keeps D's last word about a prompt that it does not know for ten leases.
SETTLE_SECONDS = 10 * LEASE + 20.0


@dataclass
class Pair:
    """A P and a D of a short lease, and their proxy."""

    p: VllmServer
    d: VllmServer
    proxy: ProxyServer

    def victim(self, who: str) -> VllmServer:
        return self.p if who == "P" else self.d

    def sign(self, moment: str) -> tuple[VllmServer, str]:
        """A server and its counter that grows when the moment has come."""
        return {
            "queued": (self.p, "vllm:prompt_tokens_total"),
            "pushing": (self.p, "p2pkv_bytes_sent_total"),
            "decoding": (self.d, "vllm:generation_tokens_total"),
        }[moment]

    def ask(self, prompt: list[int]) -> tuple[Answer | Exception, float]:
        """The answer or the error, and when it came."""
        try:
            answer = answers.complete(self.proxy.base_url, MODEL_NAME, prompt, max_tokens=TOKENS)[0]
        except (client.RequestFailed, http.client.HTTPException, OSError) as error:
            return error, time.monotonic()
        return answer, time.monotonic()

    def done(self) -> dict[str, float]:
        """What has been computed, loaded and lost so far."""
        report = json.loads(client.get(f"{self.proxy.base_url}/health"))
        return {
            "computed by P": metric(self.p, "vllm:prompt_tokens_total"),
            "loaded by D": metric(self.d, "p2pkv_transfers_loaded_total"),
            "failed on D": metric(self.d, "p2pkv_transfers_failed_total"),
            "alone": report["counters"]["alone"],
        }

    def serving(self) -> bool:
        try:
            report = json.loads(client.get(f"{self.proxy.base_url}/health"))
            return bool(report["prefill"] and report["decode"])
        except (client.RequestFailed, http.client.HTTPException, OSError):
            return False


@pytest.fixture(scope="module")
def pair(fleet_keeper, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    fleet_keeper.stop()
    logs = tmp_path_factory.mktemp("dead-peers")
    proxy = ProxyServer(log_path=logs / "proxy.log", extra_args=["--lease-seconds", str(PROXYS_LEASE)])
    # Without a prefix cache every prompt is computed by P, and moved as a whole, each time it is asked.
    settings = [*SETTINGS, "--no-enable-prefix-caching"]

    def server(role: str) -> VllmServer:
        return VllmServer(
            tiny_model,
            role=role,  # type: ignore[arg-type]
            proxy=proxy.discovery,
            extra_args=settings,
            extra_config={"lease_seconds": LEASE, "chunk_bytes": 16384},
            load_failure_policy="recompute" if role == "D" else None,
            log_path=logs / f"{role}.log",
        )

    with proxy, server("P") as p, server("D") as d:
        for each in (p, d, proxy):
            each.wait_ready()
        yield Pair(p, d, proxy)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["queued", "pushing", "decoding"])
@pytest.mark.parametrize("who", ["P", "D"])
@pytest.mark.parametrize("fault", ["freeze", "kill", "stop"])
def test_all_requests_end_and_the_survivor_goes_on(
    pair: Pair, servers_on_failure: Callable[..., None], fault: str, who: str, moment: str
) -> None:
    servers_on_failure(pair.p, pair.d)
    wait_until(pair.serving, "a pair that serves", 200.0)
    victim, survivor = pair.victim(who), pair.victim("D" if who == "P" else "P")
    prompts = [tokens(300, f"{fault} {who} {moment} {number}") for number in range(PROMPTS)]
    expected = [answers.complete(pair.d.base_url, MODEL_NAME, each, max_tokens=TOKENS)[0] for each in prompts]
    server, name = pair.sign(moment)
    before = metric(server, name)
    with ThreadPoolExecutor(PROMPTS) as pool:
        asked = [pool.submit(pair.ask, prompt) for prompt in prompts]
        if moment != "queued":
            wait_until(lambda: metric(server, name) > before, f"the moment of {moment}", 30.0)
        struck = time.monotonic()
        with out_of_action(victim, fault):
            ended = [each.result(120.0) for each in asked]
            frozen_d = (fault, who) == ("freeze", "D")  # which only the proxy can give up
            lease = PROXYS_LEASE if frozen_d else LEASE
            check_ends(expected, [(what, when - struck) for what, when in ended], lease)
            if who == "P":
                assert [what for what, _ in ended if isinstance(what, Exception)] == []
            alone = answers.complete(survivor.base_url, MODEL_NAME, prompts[0], max_tokens=TOKENS)
            assert_same(expected[:1], alone)
            at_rest(survivor, seconds=SETTLE_SECONDS)
    if fault != "freeze":
        victim.wait_ready()
    at_rest(victim, seconds=SETTLE_SECONDS)
    wait_until(pair.serving, "a pair that serves again", 200.0)
    again, _ = pair.ask(prompts[0])
    assert isinstance(again, Answer), again
    assert_same(expected[:1], [again])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["before the handshake", "pushing", "decoding"])
@pytest.mark.parametrize("what", ["instance", "worker"])
@pytest.mark.parametrize("who", ["P", "D"])
def test_a_freeze_of_two_thirds_of_the_lease_fails_no_request(
    pair: Pair, servers_on_failure: Callable[..., None], who: str, what: str, moment: str
) -> None:
    servers_on_failure(pair.p, pair.d)
    victim = pair.victim(who)
    wait_until(pair.serving, "a pair that serves", 200.0)
    prompts = [tokens(300, f"slow {who} {what} {moment} {number}") for number in range(PROMPTS)]
    expected = [answers.complete(pair.d.base_url, MODEL_NAME, each, max_tokens=TOKENS)[0] for each in prompts]
    if moment == "before the handshake":
        victim.stop()
        victim.start()
        victim.wait_ready()
        wait_until(pair.serving, "a pair that serves", 200.0)
    before = pair.done()
    worker = worker_of(victim)
    freeze, thaw = {
        "instance": (victim.freeze, victim.thaw),
        "worker": (worker.suspend, worker.resume),
    }[what]
    with ThreadPoolExecutor(PROMPTS) as pool:
        if moment == "before the handshake":
            freeze()
            asked = [pool.submit(pair.ask, prompt) for prompt in prompts]
        else:
            server, name = pair.sign(moment)
            sign = metric(server, name)
            asked = [pool.submit(pair.ask, prompt) for prompt in prompts]
            wait_until(lambda: metric(server, name) > sign, f"the moment of {moment}", 30.0)
            freeze()
        try:
            time.sleep(FREEZE_SECONDS)  # what is tested: a silence of this length
        finally:
            thaw()
        ended = [each.result(120.0)[0] for each in asked]
    assert [each for each in ended if isinstance(each, Exception)] == []
    assert_same(expected, [each for each in ended if isinstance(each, Answer)])
    # Each prompt was computed by P, once, and loaded by D, once.
    grown = {name: value - before[name] for name, value in pair.done().items()}
    assert grown == {"computed by P": PROMPTS * 300, "loaded by D": PROMPTS, "failed on D": 0, "alone": 0}
    for each in (pair.p, pair.d):
        at_rest(each, seconds=SETTLE_SECONDS)


@pytest.mark.timeout(900)
def test_with_the_policy_fail_and_nobody_alone_each_failure_comes_in_time_and_says_why(
    fleet_keeper, launch: Callable[..., None], tiny_model: Path, tmp_path: Path
) -> None:
    fleet_keeper.stop()
    proxy = ProxyServer(
        log_path=tmp_path / "proxy.log",
        extra_args=["--no-decode-alone", "--lease-seconds", str(PROXYS_LEASE)],
    )
    p, d = (
        VllmServer(
            tiny_model,
            role=role,  # type: ignore[arg-type]
            proxy=proxy.discovery,
            extra_args=[*SETTINGS, "--no-enable-prefix-caching"],
            extra_config={"lease_seconds": LEASE, "chunk_bytes": 16384},
            load_failure_policy="fail" if role == "D" else None,
            log_path=tmp_path / f"{role}.log",
        )
        for role in "PD"
    )
    launch(proxy, p, d)
    pair = Pair(p, d, proxy)
    for fault in ("freeze", "kill"):
        wait_until(pair.serving, "a pair that serves", 200.0)
        prompts = [tokens(300, f"fail {fault} {number}") for number in range(PROMPTS)]
        expected = [answers.complete(d.base_url, MODEL_NAME, each, max_tokens=TOKENS)[0] for each in prompts]
        server, name = pair.sign("pushing")
        before = metric(server, name)
        with ThreadPoolExecutor(PROMPTS) as pool:
            asked = [pool.submit(pair.ask, prompt) for prompt in prompts]
            wait_until(lambda: metric(server, name) > before, "the moment of pushing", 30.0)  # noqa: B023
            struck = time.monotonic()
            with out_of_action(p, fault):
                ended = [each.result(120.0) for each in asked]
        check_ends(expected, [(what, when - struck) for what, when in ended], LEASE)
        failures = [what for what, _ in ended if isinstance(what, Exception)]
        assert failures, "all were answered before P failed"
        for failure in failures:
            assert isinstance(failure, client.RequestFailed), failure
            assert re.search(r"P|prefill", str(failure)), failure


@contextmanager
def out_of_action(server: VllmServer, fault: str) -> Iterator[None]:
    """It dies, freezes or stops, and is there again in the end."""
    {"kill": server.kill, "freeze": server.freeze, "stop": server.stop}[fault]()
    try:
        yield
    finally:
        (server.thaw if fault == "freeze" else server.start)()


def check_ends(expected: list[Answer], ended: list[tuple[Answer | Exception, float]], lease: float) -> None:
    """All that was asked has ended in time, after so many seconds: rightly, or with a clear error."""
    late = [round(seconds, 1) for what, seconds in ended if isinstance(what, Exception)]
    assert all(seconds < lease + 5 for seconds in late), f"errors came after {late} s"
    assert all(seconds < lease + 5 + WORK_SECONDS for _, seconds in ended)
    right = [
        (want, what) for want, (what, _) in zip(expected, ended, strict=True) if isinstance(what, Answer)
    ]
    assert_same([want for want, _ in right], [got for _, got in right])
    for what, _ in ended:
        assert not isinstance(what, client.RequestFailed) or what.status in (500, 502, 503), what
