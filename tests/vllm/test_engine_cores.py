"""Real servers whose engine core alone is stopped, paused by vLLM's /pause, or left without its HTTP server.

Every request ends, new ones go elsewhere, and what was stopped or paused is as before when it goes on.
"""

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2pkv.control.endpoint import inspect
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.pairing import Address
from support.servers.deployments import (
    LEASE,
    PROXYS,
    PROXYS_LEASE,
    STALL,
    Deployment,
    cores_of,
    deployed,
    instance,
    started_again,
    works_after,
)
from support.servers.fleet import assert_same

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# Whoever computes a prompt again, or decodes on, needs two cores to itself for this long.
WORK_SECONDS = 30.0
MODES = ("abort", "wait", "keep")


def told(server: VllmServer, name: str) -> Any:
    return inspect(Address.parse(server.zmq_address))[name]


def post(server: VllmServer, path: str, timeout: float = 120.0) -> float:
    """Seconds that it took to answer 200."""
    began = time.monotonic()
    request = urllib.request.Request(server.base_url + path, method="POST")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        assert answer.status == 200
    return time.monotonic() - began


@pytest.fixture(scope="module")
def started(
    fleet_keeper: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    fleet_keeper.stop()
    logs = tmp_path_factory.mktemp("engine-cores")
    proxy = ProxyServer(log_path=logs / "proxy.log", extra_args=PROXYS)
    p, *ds = (
        instance(proxy, tiny_model, logs, name[0], name=name, env={"VLLM_SERVER_DEV_MODE": "1"})
        for name in ("P", "D", "D2")
    )
    with deployed(Deployment(p, ds, proxy)) as made:
        yield made


def asked_elsewhere(trio: Deployment, victim: VllmServer, prompt: list[int], expected: Answer) -> None:
    def chosen() -> int:
        mine = victim.base_url.removeprefix("http://")
        pairs = trio.page("status")["pairs"]
        return sum(each["total"] for each in pairs if mine in (each["prefill"], each["decode"]))

    given = chosen()
    late, _ = trio.ask(prompt)
    assert_same([expected], [late])
    assert chosen() == given, f"a new request went to {victim.name}"


@pytest.mark.parametrize("moment", ["idle", "at work"])
@pytest.mark.parametrize("who", ["P", "D"])
def test_of_a_stopped_engine_core_all_requests_end_and_new_ones_go_elsewhere(
    trio: Deployment, who: str, moment: str
) -> None:
    victim, prompts = trio.victim(who), trio.prompts(f"stopped {who} {moment}")
    others = [each for each in trio.servers if each is not victim]
    expected, works, core = trio.expected(prompts), works_after(victim), cores_of(victim)[0]
    struck: list[float] = []

    def stop() -> None:
        if moment == "at work":
            works()
        core.suspend()
        struck.append(time.monotonic())

    def meanwhile() -> None:
        if moment == "at work":
            stop()
        wait_until(lambda: trio.state(victim) in ("silent", "gone"), "the overdue ping", 20.0)
        asked_elsewhere(trio, victim, prompts[0], expected[0])

    try:
        if moment == "idle":
            stop()
        slowest = max(trio.are_answered(prompts, expected, meanwhile)) - struck[0]
        bound = STALL + LEASE if who == "P" else 4.0 + PROXYS_LEASE + 5.0
        assert slowest < bound + WORK_SECONDS, f"the last request ended after {slowest:.0f} s"
        print(f"{who} {moment}: the last of {len(prompts)} after {slowest:.1f} s")
        wait_until(lambda: told(victim, "engine") != "runs", "its rank's word", STALL + LEASE)
        assert "no beat" in told(victim, "engine")
        trio.rests(*others)
    finally:
        core.resume()
    trio.is_as_before(f"stopped {who} {moment}")
    assert told(victim, "engine") == "runs"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("who", ["P", "D"])
def test_a_pause_under_load_returns_and_all_requests_end_or_go_on_after_it(
    trio: Deployment, who: str, mode: str
) -> None:
    victim, prompts = trio.victim(who), trio.prompts(f"paused {who} {mode}")
    expected, works = trio.expected(prompts), works_after(victim)

    def pause() -> None:
        works()
        took = post(victim, f"/pause?mode={mode}")
        print(f"{who} {mode}: /pause returned after {took:.1f} s")
        assert took < STALL + LEASE + WORK_SECONDS
        wait_until(lambda: trio.state(victim) == "engine_paused", "the proxy's notice", 10.0)
        assert told(victim, "engine").startswith(("paused", "its engine core has been paused"))
        asked_elsewhere(trio, victim, prompts[0], expected[0])
        post(victim, "/resume")

    trio.are_answered(prompts, expected, pause)
    trio.is_as_before(f"paused {who} {mode}")


@pytest.mark.parametrize("who", ["P", "D"])
def test_an_engine_whose_http_server_was_killed_is_announced_no_more_and_holds_nothing(
    trio: Deployment, who: str
) -> None:
    victim, prompts = trio.victim(who), trio.prompts(f"orphan {who}")
    core, expected, works = cores_of(victim)[0], trio.expected(prompts), works_after(victim)
    others = [each for each in trio.servers if each is not victim]
    try:
        trio.are_answered(prompts, expected, lambda: (works(), psutil.Process(victim.pid).kill()))
        wait_until(lambda: trio.state(victim) == "gone", "the end of its pings", 60.0)
        assert "HTTP server" in told(victim, "engine")
        assert core.is_running() and core.status() != psutil.STATUS_ZOMBIE, "vLLM has ended it by itself"
        log = victim.log_path.read_text(errors="replace")
        assert "gives up what it holds" in log and "is not announced any more" in log
        trio.rests(*others)
    finally:
        started_again(victim)
    trio.is_as_before(f"orphan {who}")
