"""One engine of a data-parallel server is killed, frozen or drained, with P of two engines and D of two.

Every request is answered, other servers go on, and what was frozen or drained comes back. The neighbour of a
frozen engine goes on with a dense model; with experts vLLM computes in lockstep, so it stops too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model
from support.models.families import TinyMoe
from support.servers.data_parallel import answered, engines
from support.servers.deployments import (
    PROXYS,
    TOKEN,
    Deployment,
    cores_of,
    deployed,
    instance,
    started_again,
    works_after,
)
from support.servers.fleet import needs_cpu_build, plugin_environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ENGINES = 2


@pytest.fixture(scope="module", params=["dense", "experts"])
def started(
    request: pytest.FixtureRequest,
    fleet_keeper: Any,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    fleet_keeper.stop()
    logs = tmp_path_factory.mktemp("data-parallel-faults")
    lockstep, model, env = request.param == "experts", tiny_model, dict[str, str]()
    if lockstep:
        needs_cpu_build()
        model, env = ensure_model(TinyMoe(), logs), plugin_environment("moe_dp")
    proxy = ProxyServer(
        prefill=ENGINES,
        log_path=logs / "proxy.log",
        extra_args=[*PROXYS, "--decode-policy", "round_robin"],
        env={"P2PKV_PROXY_ADMIN_TOKEN": TOKEN},
    )

    def server(role: str, name: str, size: int = ENGINES) -> VllmServer:
        more = ("--dtype", "float32", "--max-model-len", "1024", *engines(size))
        return instance(proxy, model, logs, role, name=name, ranks=size, more_args=more, env=env)

    made = Deployment(server("P", "P"), [server("D", "D"), server("D", "other", 1)], proxy, ENGINES, lockstep)
    with deployed(made):
        wait_until(made.ready, "all engines", 90.0)
        yield made


@pytest.fixture
def deployment(started: Deployment, servers_on_failure: Callable[..., None]) -> Deployment:
    servers_on_failure(*started.servers, started.proxy)
    wait_until(started.trusted, "all engines", 200.0)
    return started


@pytest.mark.parametrize("rank", range(ENGINES))
@pytest.mark.parametrize("who", ["P", "D"])
def test_one_engine_is_frozen(deployment: Deployment, who: str, rank: int) -> None:
    victim, survivor = (deployment.victim(each) for each in (who, "D" if who == "P" else "P"))
    prompts = deployment.prompts(f"frozen {who} {rank}")
    expected = deployment.expected(prompts)
    works = works_after(victim)
    core = cores_of(victim)[rank]

    def freeze() -> None:
        works()
        core.suspend()
        wait_until(
            lambda: deployment.states(victim).count("ready") < ENGINES, "an engine that is silent", 30.0
        )

    try:
        deployment.are_answered(prompts, expected, freeze)
        if deployment.lockstep:
            wait_until(lambda: "ready" not in deployment.states(victim), "a group that is silent", 30.0)
        then, more = answered(victim.base_url), deployment.prompts(f"without {who} {rank}")
        deployment.are_answered(more, deployment.expected(more))
        served = {
            engine for engine, count in answered(victim.base_url).items() if count > then.get(engine, 0.0)
        }
        assert served == (set() if deployment.lockstep else {str(1 - rank)})
        deployment.rests(survivor)
    finally:
        core.resume()
    deployment.is_as_before(f"frozen {who} {rank}")


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_server_of_two_engines_is_drained_and_resumed(deployment: Deployment, who: str) -> None:
    """A drain is the HTTP server's: of all its engines."""
    victim = deployment.victim(who)
    prompts = deployment.prompts(f"drained {who}")
    expected = deployment.expected(prompts)
    works = works_after(victim)

    def drain() -> None:
        works()
        deployment.order(victim, "drain")

    deployment.are_answered(prompts, expected, drain)
    wait_until(lambda: deployment.states(victim) == ["drained"] * ENGINES, "both drained", 60.0)
    deployment.rests(victim)
    then, more = answered(victim.base_url), deployment.prompts(f"while {who} is drained")
    deployment.are_answered(more, deployment.expected(more))
    assert answered(victim.base_url) == then, "a drained engine got a request"
    deployment.order(victim, "resume")
    deployment.is_as_before(f"drained {who}")


@pytest.mark.parametrize("rank", range(ENGINES))
@pytest.mark.parametrize("who", ["P", "D"])
def test_one_engine_is_killed(deployment: Deployment, who: str, rank: int) -> None:
    """vLLM ends the whole server then; others answer."""
    victim, survivor = (deployment.victim(each) for each in (who, "D" if who == "P" else "P"))
    prompts = deployment.prompts(f"killed {who} {rank}")
    expected = deployment.expected(prompts)
    works = works_after(victim)

    def kill() -> None:
        works()
        cores_of(victim)[rank].kill()

    try:
        deployment.are_answered(prompts, expected, kill)
        wait_until(lambda: not victim.running(), "the end of the whole server", 60.0)
        more = deployment.prompts(f"after the end of {who} {rank}")
        deployment.are_answered(more, deployment.expected(more))
        deployment.rests(survivor, deployment.ds[-1])
    finally:
        started_again(victim)
    deployment.is_as_before(f"killed {who} {rank}")
