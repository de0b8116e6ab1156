"""P of several data-parallel engines behind several HTTP servers (hybrid, external), or with engines on a
node without one: the proxy has each engine where it is, D's blocks are P's, answers one server's.

All on one host. What vLLM does not start is in docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from data_parallel_support import answered, known, serves_as_one
from tiny_moe import TinyMoe
from vllm_support import (
    DISPATCHES,
    SETTINGS,
    PingRelay,
    at_rest,
    by_vllm_serve,
    needs_cpu_build,
    plugin_environment,
    probing_server,
)

from p2pkv.demo.processes import free_ports
from p2pkv.demo.servers import LOOPBACK, ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Way:
    """One way to start P. `nodes`: options of each command; the first has an HTTP server."""

    experts: bool
    engines: int
    nodes: tuple[tuple[str, ...], ...]
    headless: bool = False
    """Whether all others have none."""
    listed: bool = False
    """Whether each engine has an HTTP server behind one command, so that the proxy has a list of them."""


def hybrid(experts: bool) -> Way:
    size = ("--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-hybrid-lb")
    return Way(experts, 4, tuple((*size, "--data-parallel-start-rank", start) for start in ("0", "2")))


def headless(experts: bool) -> Way:
    size = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    return Way(experts, 2, (size, (*size, "--data-parallel-start-rank", "1")), headless=True)


MULTI_PORT = (
    *("--data-parallel-size", "2", "--data-parallel-size-local", "2"),
    "--data-parallel-multi-port-external-lb",
)

WAYS = {
    "dense-hybrid": hybrid(experts=False),
    "experts-hybrid": hybrid(experts=True),
    "experts-external": Way(
        True, 2, tuple(("--data-parallel-size", "2", "--data-parallel-rank", rank) for rank in "01")
    ),
    "experts-multi-port": Way(True, 2, (MULTI_PORT,), listed=True),
    "dense-headless": headless(experts=False),
    "experts-headless": headless(experts=True),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_way_to_balance_that_vllm_starts(
    fleet_keeper: Any, tiny_model: Path, tmp_path: Path, launch: Callable[..., None], way: Way
) -> None:
    fleet_keeper.stop()
    model, plugins = tiny_model, ()
    if way.experts:
        needs_cpu_build()
        model, plugins = ensure_model(TinyMoe(), tmp_path), ("moe_dp",)
    settings = (*SETTINGS, "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16")
    probes, port, rpc = tmp_path / "probes", free_ports(way.engines), free_ports()
    probes.mkdir()
    http = free_ports(way.engines)  # of the multi-port way: one for each engine
    urls = [f"http://{LOOPBACK}:{http + rank}" for rank in range(way.engines)] if way.listed else []
    listed = [f"--prefill={url}={LOOPBACK}:{port + rank}" for rank, url in enumerate(urls)]
    proxies = [
        ProxyServer(
            dispatch=each, prefill=way.engines, extra_args=listed, log_path=tmp_path / f"proxy-{each}.log"
        )
        for each in DISPATCHES
    ]
    with PingRelay([each.discovery for each in proxies]) as pings:

        def server(name: str, extra: tuple[str, ...], **more: Any) -> VllmServer:
            return probing_server(
                model,
                name[0],
                probes,
                plugins=plugins,
                name=name,
                extra_args=(*settings, *extra),
                log_path=tmp_path / f"{name}.log",
                **{"proxy": (LOOPBACK, pings.port), **more},
            )

        nodes: list[VllmServer] = []
        for number, options in enumerate(way.nodes):
            where = ("--data-parallel-address", LOOPBACK, "--data-parallel-rpc-port", str(rpc))
            more: dict[str, Any] = {"http_port": nodes[0].http_port} if number and way.headless else {}
            if way.listed:
                more = {"http_port": http, "proxy": None}
            node = server(f"P{number}", (*options, *where), kv_port=port, **more)
            if way.listed:
                node = by_vllm_serve(node, "--data-parallel-supervisor-port", str(free_ports()))
            elif more:
                node = by_vllm_serve(node, "--headless")
            nodes.append(node)
        d = server("D", (), ranks=1)
        env = plugin_environment(*plugins) if plugins else {}
        single = VllmServer(model, extra_args=settings, env=env, log_path=tmp_path / "single.log")
        launch(*nodes, d, single, *proxies)
        for proxy in proxies:
            known(proxy, way.engines, 1)
            serves_as_one(proxy.base_url, single.base_url, probes, proxy.base_url)
        at_rest(nodes[0], way.engines)
        at_rest(d)
        serving = urls or [each.base_url for each in (nodes[:1] if way.headless else nodes)]
        counts = [count for url in serving for count in answered(url).values()]
        assert len(counts) == way.engines and min(counts) >= 5, counts
