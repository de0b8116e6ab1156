"""P or D dies, freezes, is told to stop or is only slow, at several moments, under sixteen requests.

All requests end, the survivor goes on, and both are back where they were. Whatever becomes of P, all are
answered: D computes what P cannot. Who is slow loses nothing at all.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from p2pkv.demo import client
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from support.servers import deployments
from support.servers.fleet import assert_same, complete, metric, worker_of

pytestmark = pytest.mark.long

PROMPTS = 16
FREEZE_SECONDS = deployments.LEASE * 2 / 3
# Whoever computes a prompt again, or decodes on, needs two cores to itself for this long.
WORK_SECONDS = 20.0


@pytest.fixture(scope="module")
def pair(
    fleet_keeper, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[deployments.Deployment]:
    """A P and a D, which are judged by their leases alone."""
    fleet_keeper.stop()
    logs = tmp_path_factory.mktemp("dead-peers")
    proxy = ProxyServer(log_path=logs / "proxy.log", extra_args=deployments.PROXYS)
    config = {name: deployments.SHORT[name] for name in ("lease_seconds", "chunk_bytes")}
    p, d = (deployments.instance(proxy, tiny_model, logs, role, extra_config=config) for role in "PD")
    with deployments.deployed(deployments.Deployment(p, [d], proxy)) as made:
        yield made


def sign(pair: deployments.Deployment, moment: str) -> Callable[[], None]:
    server, name = {
        "queued": (pair.p, "vllm:prompt_tokens_total"),
        "pushing": (pair.p, "p2pkv_bytes_sent_total"),
        "decoding": (pair.d, "vllm:generation_tokens_total"),
    }[moment]
    return deployments.grows(server, name)


def done(pair: deployments.Deployment) -> dict[str, float]:
    return {
        "computed by P": metric(pair.p, "vllm:prompt_tokens_total"),
        "loaded by D": metric(pair.d, "p2pkv_transfers_loaded_total"),
        "failed on D": metric(pair.d, "p2pkv_transfers_failed_total"),
        "alone": pair.page("health")["counters"]["decode_alone"],
    }


def ends(asked: list[Future[Any]], struck: float) -> list[tuple[Answer | Exception, float]]:
    """The answers or errors, and how long after the fault each came."""
    return [(what, when - struck) for what, when in (each.result(120.0) for each in asked)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["queued", "pushing", "decoding"])
@pytest.mark.parametrize("who", ["P", "D"])
@pytest.mark.parametrize("fault", ["freeze", "kill", "stop"])
def test_all_requests_end_and_the_survivor_goes_on(
    pair: deployments.Deployment, servers_on_failure: Callable[..., None], fault: str, who: str, moment: str
) -> None:
    servers_on_failure(pair.p, pair.d)
    wait_until(pair.serving, "a pair that serves", 200.0)
    victim, survivor = pair.victim(who), pair.victim("D" if who == "P" else "P")
    prompts = pair.prompts(f"{fault} {who} {moment}", PROMPTS)
    expected, come = pair.expected(prompts), sign(pair, moment)
    with ThreadPoolExecutor(PROMPTS) as pool:
        asked = [pool.submit(pair.ask, prompt) for prompt in prompts]
        if moment != "queued":
            come()
        struck = time.monotonic()
        with out_of_action(victim, fault):
            ended = ends(asked, struck)
            frozen_d = (fault, who) == ("freeze", "D")  # which only the proxy can give up
            lease = deployments.PROXYS_LEASE if frozen_d else deployments.LEASE
            check_ends(expected, ended, lease)
            if who == "P":
                assert [what for what, _ in ended if isinstance(what, Exception)] == []
            assert_same(expected[:1], [complete(survivor, prompts[0], deployments.TOKENS)])
            pair.rests(survivor)
    if fault != "freeze":
        victim.wait_ready()
    pair.rests(victim)
    wait_until(pair.serving, "a pair that serves again", 200.0)
    again, _ = pair.ask(prompts[0])
    assert isinstance(again, Answer), again
    assert_same(expected[:1], [again])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["before the handshake", "pushing", "decoding"])
@pytest.mark.parametrize("what", ["instance", "worker"])
@pytest.mark.parametrize("who", ["P", "D"])
def test_a_freeze_of_two_thirds_of_the_lease_fails_no_request(
    pair: deployments.Deployment, servers_on_failure: Callable[..., None], who: str, what: str, moment: str
) -> None:
    servers_on_failure(pair.p, pair.d)
    victim = pair.victim(who)
    wait_until(pair.serving, "a pair that serves", 200.0)
    prompts = pair.prompts(f"slow {who} {what} {moment}", PROMPTS)
    expected = pair.expected(prompts)
    if moment == "before the handshake":
        victim.stop()
        victim.start()
        victim.wait_ready()
        wait_until(pair.serving, "a pair that serves", 200.0)
    before = done(pair)
    worker = worker_of(victim)
    freeze, thaw = {"instance": (victim.freeze, victim.thaw), "worker": (worker.suspend, worker.resume)}[what]
    with ThreadPoolExecutor(PROMPTS) as pool:
        if moment == "before the handshake":
            freeze()
            asked = [pool.submit(pair.ask, prompt) for prompt in prompts]
        else:
            come = sign(pair, moment)
            asked = [pool.submit(pair.ask, prompt) for prompt in prompts]
            come()
            freeze()
        try:
            time.sleep(FREEZE_SECONDS)  # what is tested: a silence of this length
        finally:
            thaw()
        ended = [each.result(120.0)[0] for each in asked]
    assert [each for each in ended if isinstance(each, Exception)] == []
    assert_same(expected, [each for each in ended if isinstance(each, Answer)])
    # Each prompt was computed by P, once, and loaded by D, once.
    grown = {name: value - before[name] for name, value in done(pair).items()}
    assert grown == {
        "computed by P": PROMPTS * deployments.LENGTH,
        "loaded by D": PROMPTS,
        "failed on D": 0,
        "alone": 0,
    }
    pair.rests()


@contextmanager
def out_of_action(server: VllmServer, fault: str) -> Iterator[None]:
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
