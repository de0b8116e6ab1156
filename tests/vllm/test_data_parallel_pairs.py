"""P and D of several data-parallel engines behind p2pkv-proxy: D's blocks are P's, answers one server's.

P's engines may be behind several HTTP servers (hybrid, external), or on a node without one: the proxy has
each engine where it is. All on one host. What vLLM does not start is in docs/compatibility.md.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from p2pkv.demo.processes import ServerProcess, free_ports
from p2pkv.demo.servers import LOOPBACK, ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model
from support.models.families import TinyMoe
from support.servers.data_parallel import answered, engines, known, serves_as_one
from support.servers.fleet import (
    DISPATCHES,
    SETTINGS,
    Fleet,
    at_rest,
    by_vllm_serve,
    each_of,
    needs_cpu_build,
    plugin_environment,
    probing_server,
    start_all,
)
from support.servers.routers import ROUTERS, router


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
    )
    launch(p, proxy)
    assert "not known" not in proxy.log_path.read_text(), "what the listed D fits"
    serves_as_one(proxy.base_url, fleet.single.base_url, fleet.probes, "two to one")
    assert len(answered(p.base_url)) == 2 and min(answered(p.base_url).values()) >= 10, (
        "one engine has answered nearly all"
    )
    for server, ranks in ((p, 2), (fleet.d, 1)):
        at_rest(server, ranks)


# With servers of their own.


@dataclass(frozen=True)
class Way:
    """One way to start P, of `p` engines, and D, of `d` behind one HTTP server."""

    p: int
    d: int = 1
    experts: bool = False
    nodes: tuple[tuple[str, ...], ...] = ()
    """Options of each of P's commands, of which the first has an HTTP server; (): there is one command."""
    headless: bool = False
    """Whether all others have none."""
    listed: bool = False
    """Whether each engine has an HTTP server behind one command, so that the proxy has a list of them."""
    more: tuple[str, ...] = ()
    """Options of both sides."""


def hybrid(experts: bool) -> Way:
    size = ("--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-hybrid-lb")
    nodes = tuple((*size, "--data-parallel-start-rank", start) for start in ("0", "2"))
    return Way(4, experts=experts, nodes=nodes)


def headless(experts: bool) -> Way:
    size = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    nodes = (size, (*size, "--data-parallel-start-rank", "1"))
    return Way(2, experts=experts, nodes=nodes, headless=True)


MULTI_PORT = (
    *("--data-parallel-size", "2", "--data-parallel-size-local", "2"),
    "--data-parallel-multi-port-external-lb",
)
EXTERNAL = tuple(("--data-parallel-size", "2", "--data-parallel-rank", rank) for rank in "01")

WAYS = {
    "dense-1-to-2": Way(1, 2),
    "dense-2-to-2": Way(2, 2),
    "experts-1-to-2": Way(1, 2, experts=True),
    "experts-2-to-1": Way(2, 1, experts=True),
    "experts-2-to-2": Way(2, 2, experts=True),
    "experts-2-to-2-expert-parallel": Way(2, 2, experts=True, more=("--enable-expert-parallel",)),
    "dense-hybrid": hybrid(experts=False),
    "experts-hybrid": hybrid(experts=True),
    "experts-external": Way(2, experts=True, nodes=EXTERNAL),
    "experts-multi-port": Way(2, experts=True, nodes=(MULTI_PORT,), listed=True),
    "dense-headless": headless(experts=False),
    "experts-headless": headless(experts=True),
}
LEAST = {1: 10, 2: 10, 4: 2}
"""By the number of engines: requests of 24 that each answers."""


@dataclass(frozen=True)
class Group:
    """P and D, each with some engines, both kinds of proxy, and a single server that knows the answers."""

    way: Way
    p: list[VllmServer]
    """Its commands."""
    d: VllmServer
    single: VllmServer
    proxies: dict[str, ProxyServer]
    probes: Path
    spare: tuple[str, int]
    """As the fleet's."""
    urls: tuple[list[str], list[str]]
    """Of P's HTTP servers, and of D's."""

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        return *self.p, self.d, self.single, *self.proxies.values()

    def at_rest(self) -> None:
        at_rest(self.p[0], self.way.p)
        at_rest(self.d, self.way.d)

    def answered(self) -> list[dict[str, float]]:
        return [
            {f"{url} {engine}": count for url in urls for engine, count in answered(url).items()}
            for urls in self.urls
        ]


def start(way: Way, model: Path, folder: Path, stack: ExitStack) -> Group:
    plugins: tuple[str, ...] = ()
    if way.experts:
        needs_cpu_build()
        model, plugins = ensure_model(TinyMoe(), folder), ("moe_dp",)
    settings = (*SETTINGS, "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16")
    http, port, rpc = free_ports(way.p), free_ports(way.p), str(free_ports())
    urls = [f"http://{LOOPBACK}:{http + rank}" for rank in range(way.p)] if way.listed else []
    listed = [f"--prefill={url}={LOOPBACK}:{port + rank}" for rank, url in enumerate(urls)]
    proxies = {
        each: ProxyServer(
            dispatch=each, prefill=way.p, extra_args=listed, log_path=folder / f"proxy-{each}.log"
        )
        for each in DISPATCHES
    }
    spare = LOOPBACK, free_ports()
    pinged = each_of(*(each.discovery for each in proxies.values()), spare)

    def server(name: str, extra: tuple[str, ...], **more: Any) -> VllmServer:
        return probing_server(
            model,
            name[0],  # type: ignore[arg-type]
            folder,
            plugins=plugins,
            name=name,
            extra_args=(*settings, *extra, *way.more),
            **{"proxy": pinged, **more},
        )

    p: list[VllmServer] = []
    for number, options in enumerate(way.nodes or (engines(way.p),)):
        where = ("--data-parallel-address", LOOPBACK, "--data-parallel-rpc-port", rpc) if way.nodes else ()
        more: dict[str, Any] = {"http_port": p[0].http_port} if number and way.headless else {}
        if way.listed:
            more = {"http_port": http, "proxy": None}
        node = server(f"P{number}", (*options, *where), kv_port=port, **more)
        if way.listed:
            node = by_vllm_serve(node, "--data-parallel-supervisor-port", str(free_ports()))
        elif more:
            node = by_vllm_serve(node, "--headless")
        p.append(node)
    d = server("D", engines(way.d), ranks=way.d)
    env = plugin_environment(*plugins) if plugins else {}
    single = VllmServer(model, extra_args=settings, env=env, name="single", log_path=folder / "single.log")
    serving = urls or [each.base_url for each in (p[:1] if way.headless else p)]
    group = Group(way, p, d, single, proxies, folder, spare, (serving, [d.base_url]))
    start_all(stack, *group.servers)
    for proxy in proxies.values():
        known(proxy, way.p, way.d)
    return group


@pytest.fixture(scope="module", params=WAYS)
def group(
    request: pytest.FixtureRequest,
    fleet_keeper: Any,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Group]:
    fleet_keeper.stop()
    with ExitStack() as stack:
        yield start(WAYS[request.param], tiny_model, tmp_path_factory.mktemp(request.param), stack)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_engines_of_p_and_d_behind_both_dispatches(
    group: Group, dispatch: str, servers_on_failure: Callable[..., None]
) -> None:
    servers_on_failure(*group.servers)
    before = group.answered()
    serves_as_one(group.proxies[dispatch].base_url, group.single.base_url, group.probes, dispatch)
    group.at_rest()
    for size, now, then in zip((group.way.p, group.way.d), group.answered(), before, strict=True):
        counts = {engine: count - then.get(engine, 0.0) for engine, count in now.items()}
        assert len(counts) == size and min(counts.values()) >= LEAST[size], counts


@pytest.mark.long
@pytest.mark.parametrize("group", ["dense-2-to-2"], indirect=True)
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_that_know_no_data_parallel_ranks(
    group: Group, name: str, pytestconfig: pytest.Config, logs: Path, servers_on_failure: Callable[..., None]
) -> None:
    """Whichever engines their ids name, vLLM's HTTP servers choose by themselves."""
    process = router(name, pytestconfig, logs, group.spare)
    servers_on_failure(*group.servers, process)
    with process:
        process.wait_ready(60.0)
        serves_as_one(process.base_url, group.single.base_url, group.probes, name)
    group.at_rest()
