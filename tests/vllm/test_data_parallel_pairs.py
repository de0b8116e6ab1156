"""P and D of several data-parallel engines behind p2pkv-proxy: D's blocks are P's, answers one server's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from data_parallel_support import answered, engines, known, serves_as_one
from router_support import MODES, original_router, vllm_router
from tiny_moe import TinyMoe
from vllm_support import (
    DISPATCHES,
    SETTINGS,
    Fleet,
    PingRelay,
    at_rest,
    needs_cpu_build,
    plugin_environment,
    probing_server,
)

from p2pkv.demo.processes import ServerProcess
from p2pkv.demo.servers import LOOPBACK, ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model


def test_a_p_of_two_engines_and_a_d_of_one(
    fleet: Fleet, tiny_model: Path, tmp_path: Path, launch: Callable[..., None]
) -> None:
    listed = f"{fleet.d.base_url}={fleet.d.zmq_address}"
    proxy = ProxyServer(prefill=2, extra_args=("--decode", listed), log_path=tmp_path / "proxy.log")
    p = probing_server(
        tiny_model,
        "P",
        fleet.probes,
        name="P-of-two",
        ranks=2,
        proxy=proxy.discovery,
        extra_args=(*SETTINGS, *engines(2)),
        log_path=tmp_path / "p.log",
    )
    launch(p, proxy)
    serves_as_one(proxy.base_url, fleet.single.base_url, fleet.probes, "two to one")
    assert len(answered(p.base_url)) == 2 and min(answered(p.base_url).values()) >= 10, (
        "one engine has answered nearly all"
    )
    for server, ranks in ((p, 2), (fleet.d, 1)):
        at_rest(server, ranks)


# With servers of their own.


@dataclass(frozen=True)
class Group:
    """P and D, each with some engines, both kinds of proxy, and a single server that knows the answers."""

    p: VllmServer
    d: VllmServer
    single: VllmServer
    proxies: dict[str, ProxyServer]
    sizes: tuple[int, int]
    probes: Path
    pings: PingRelay

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        return self.p, self.d, self.single, *self.proxies.values()

    def at_rest(self) -> None:
        for server, ranks in zip((self.p, self.d), self.sizes, strict=True):
            at_rest(server, ranks)


SHAPES = {
    "dense-1-to-2": (1, 2),
    "dense-2-to-2": (2, 2),
    "experts-1-to-2": (1, 2),
    "experts-2-to-1": (2, 1),
    "experts-2-to-2": (2, 2),
    "experts-2-to-2-expert-parallel": (2, 2),
}


def start(
    name: str,
    model: Path,
    folder: Path,
    stack: ExitStack,
    **extra: object,
) -> Group:
    p_size, d_size = SHAPES[name]
    plugins: tuple[str, ...] = ()
    if name.startswith("experts"):
        needs_cpu_build()
        model, plugins = ensure_model(TinyMoe(), folder), ("moe_dp",)
    settings = (*SETTINGS, "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16")
    parallel = ("--enable-expert-parallel",) if name.endswith("expert-parallel") else ()
    probes = folder / "probes"
    probes.mkdir()
    proxies = {
        each: ProxyServer(dispatch=each, prefill=p_size, log_path=folder / f"proxy-{each}.log")
        for each in DISPATCHES
    }
    pings = stack.enter_context(PingRelay([each.discovery for each in proxies.values()]))
    servers = [
        probing_server(
            model,
            role,
            probes,
            plugins=plugins,
            name=f"{role}-{name}",
            ranks=size,
            proxy=(LOOPBACK, pings.port),
            extra_args=(*settings, *engines(size), *parallel),
            extra_config=extra,
            log_path=folder / f"{role}.log",
        )
        for role, size in (("P", p_size), ("D", d_size))
    ]
    env = plugin_environment(*plugins) if plugins else {}
    single = VllmServer(model, extra_args=settings, env=env, name="single", log_path=folder / "single.log")
    group = Group(servers[0], servers[1], single, proxies, (p_size, d_size), probes, pings)
    for each in group.servers:
        stack.enter_context(each)
    for each in group.servers:
        each.wait_ready()
    for proxy in proxies.values():
        known(proxy, p_size, d_size)
    return group


@pytest.fixture(scope="module", params=SHAPES)
def group(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    with ExitStack() as stack:
        yield start(request.param, tiny_model, tmp_path_factory.mktemp(request.param), stack)


@pytest.mark.long
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_engines_of_p_and_d_behind_both_dispatches(
    group: Group, dispatch: str, servers_on_failure: Callable[..., None]
) -> None:
    servers_on_failure(*group.servers)
    before = [answered(server.base_url) for server in (group.p, group.d)]
    serves_as_one(group.proxies[dispatch].base_url, group.single.base_url, group.probes, dispatch)
    group.at_rest()
    for server, size, then in zip((group.p, group.d), group.sizes, before, strict=True):
        counts = {engine: count - then[engine] for engine, count in answered(server.base_url).items()}
        assert len(counts) == size and min(counts.values()) >= 10, counts


@pytest.mark.long
@pytest.mark.parametrize("group", ["dense-2-to-2"], indirect=True)
@pytest.mark.parametrize("router", ["original", *MODES])
def test_routers_that_know_no_data_parallel_ranks(
    group: Group,
    router: str,
    pytestconfig: pytest.Config,
    logs: Path,
    servers_on_failure: Callable[..., None],
) -> None:
    """Whichever engines their ids name, vLLM's HTTP servers choose by themselves."""
    process = original_router(logs) if router == "original" else vllm_router(router, pytestconfig, logs)
    servers_on_failure(*group.servers, process)
    with process, group.pings.also(process.discovery):
        process.wait_ready(60.0)
        serves_as_one(process.base_url, group.single.base_url, group.probes, router)
    group.at_rest()
