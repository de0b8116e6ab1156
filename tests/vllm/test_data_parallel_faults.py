"""One engine of a data-parallel server is killed or frozen, with P of two engines and D of two.

Every request is answered, other servers go on, and what was frozen comes back. The neighbour of a
frozen engine goes on with a dense model; with experts vLLM computes in lockstep, so it stops too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model
from support.models.families import TinyMoe
from support.servers import deployments
from support.servers.data_parallel import answered, engines
from support.servers.fleet import needs_cpu_build, plugin_environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ENGINES = 2


@pytest.fixture(scope="module", params=["dense", "experts"])
def started(
    request: pytest.FixtureRequest,
    fleet_keeper: Any,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[deployments.Deployment]:
    fleet_keeper.stop()
    logs = tmp_path_factory.mktemp("data-parallel-faults")
    lockstep, model, env = request.param == "experts", tiny_model, dict[str, str]()
    if lockstep:
        needs_cpu_build()
        model, env = ensure_model(TinyMoe(), logs), plugin_environment("moe_dp")
    proxy = ProxyServer(
        prefill=ENGINES,
        log_path=logs / "proxy.log",
        extra_args=[*deployments.PROXYS, "--decode-policy", "round_robin"],
        env={"P2PKV_PROXY_ADMIN_TOKEN": deployments.TOKEN},
    )

    def server(role: str, name: str, size: int = ENGINES) -> VllmServer:
        more = ("--dtype", "float32", "--max-model-len", "1024", *engines(size))
        return deployments.instance(proxy, model, logs, role, name=name, ranks=size, more_args=more, env=env)

    made = deployments.Deployment(
        server("P", "P"), [server("D", "D"), server("D", "other", 1)], proxy, ENGINES, lockstep
    )
    with deployments.deployed(made):
        wait_until(made.ready, "all engines", 90.0)
        yield made


@pytest.mark.parametrize("rank", range(ENGINES))
@pytest.mark.parametrize("who", ["P", "D"])
def test_one_engine_is_frozen(trio: deployments.Deployment, who: str, rank: int) -> None:
    victim, survivor = (trio.victim(each) for each in (who, "D" if who == "P" else "P"))
    prompts = trio.prompts(f"frozen {who} {rank}")
    expected = trio.expected(prompts)
    works = deployments.works_after(victim)
    core = deployments.cores_of(victim)[rank]

    def freeze() -> None:
        works()
        core.suspend()
        wait_until(lambda: trio.states(victim).count("ready") < ENGINES, "an engine that is silent", 30.0)

    try:
        trio.are_answered(prompts, expected, freeze)
        if trio.lockstep:
            wait_until(lambda: "ready" not in trio.states(victim), "a group that is silent", 30.0)
        then, more = answered(victim.base_url), trio.prompts(f"without {who} {rank}")
        trio.are_answered(more, trio.expected(more))
        served = {
            engine for engine, count in answered(victim.base_url).items() if count > then.get(engine, 0.0)
        }
        assert served == (set() if trio.lockstep else {str(1 - rank)})
        trio.rests(survivor)
    finally:
        core.resume()
    trio.is_as_before(f"frozen {who} {rank}")


@pytest.mark.parametrize("rank", range(ENGINES))
@pytest.mark.parametrize("who", ["P", "D"])
def test_one_engine_is_killed(trio: deployments.Deployment, who: str, rank: int) -> None:
    """vLLM ends the whole server then; others answer."""
    victim, survivor = (trio.victim(each) for each in (who, "D" if who == "P" else "P"))
    prompts = trio.prompts(f"killed {who} {rank}")
    expected = trio.expected(prompts)
    works = deployments.works_after(victim)

    def kill() -> None:
        works()
        deployments.cores_of(victim)[rank].kill()

    try:
        trio.are_answered(prompts, expected, kill)
        wait_until(lambda: not victim.running(), "the end of the whole server", 60.0)
        more = trio.prompts(f"after the end of {who} {rank}")
        trio.are_answered(more, trio.expected(more))
        trio.rests(survivor, trio.ds[-1])
    finally:
        deployments.started_again(victim)
    trio.is_as_before(f"killed {who} {rank}")
