"""What an instance needs to be found by other people's routers, and what they send it.

The original connector's example proxy is a stand-in that is written from the protocol's description
(benchmarks/classic_router.py); vllm-router is the real one. tests/vllm/test_routers.py has both in front of
real servers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from classic_router import ClassicRouter, by_aiohttp
from proxy_behaviours import answer_json
from proxy_fakes import PING_SECONDS, FakeInstance, serve_and_ping
from router_support import MODES, vllm_router

from p2pkv.control.pinger import Pinger
from p2pkv.demo.processes import free_ports
from p2pkv.pairing import find_pair, transfer_key
from support.waiting import eventually

LIFE = 1.0


@dataclass
class Classic:
    """The stand-in with a P and a D whose pings are those of real instances."""

    url: str
    discovery: str
    router: ClassicRouter
    p: FakeInstance
    d: FakeInstance
    p_pinger: Pinger


@pytest.fixture
async def classic() -> AsyncIterator[Classic]:
    async with contextlib.AsyncExitStack() as stack:
        router = ClassicRouter(LIFE)
        discovery = f"127.0.0.1:{free_ports()}"
        task = asyncio.create_task(router.discover(f"tcp://{discovery}"))
        stack.callback(task.cancel)
        runner = web.AppRunner(by_aiohttp(router), access_log=None)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        instances = FakeInstance("P"), FakeInstance("D")
        pingers = [await serve_and_ping(stack, discovery, instance) for instance in instances]
        await eventually(lambda: bool(router.there("P") and router.there("D")), "both are registered")
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield Classic(url, discovery, router, *instances, pingers[0])


async def test_a_request_goes_to_p_and_then_to_d(classic: Classic) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 5}
    async with aiohttp.ClientSession() as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            async with client.post(classic.url + path, json=body) as response:
                assert response.status == 200 and (await response.json())["choices"]
    assert [seen.body["max_tokens"] for seen in classic.p.requests] == [1, 1]
    assert [seen.body for seen in classic.d.requests] == [body, body]
    for on_p, on_d in zip(classic.p.requests, classic.d.requests, strict=True):
        pair = find_pair(on_p.request_id)
        assert on_p.request_id == on_d.request_id and pair is not None
        assert (str(pair.prefill), str(pair.decode)) == (classic.p.zmq_address, classic.d.zmq_address)


async def test_a_goodbye_does_not_end_its_discovery(classic: Classic) -> None:
    # Its discovery dies of a message that it does not know; ours says goodbye in a ping.
    await asyncio.to_thread(classic.p_pinger.stop)
    await eventually(lambda: not classic.router.there("P"), "P's life has ended")
    assert classic.router.ended is None and classic.router.there("D")
    again = Pinger(classic.discovery, classic.p.ping, PING_SECONDS)
    again.start()
    try:
        await eventually(lambda: bool(classic.router.there("P")), "P is back")
    finally:
        await asyncio.to_thread(again.stop)
    assert classic.router.ended is None and classic.p.behaviour is answer_json


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
async def test_what_vllm_router_sends(mode: str, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    router = await asyncio.to_thread(vllm_router, mode, pytestconfig, tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        instances = FakeInstance("P"), FakeInstance("D")
        for instance in instances:
            await serve_and_ping(stack, f"{router.discovery[0]}:{router.discovery[1]}", instance)
        stack.enter_context(router)
        await asyncio.to_thread(router.wait_ready, 60.0)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5}
        async with client.post(f"{router.base_url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
        on_p, on_d = (instance.requests[0] for instance in instances)
        pair = find_pair(on_p.request_id)
        assert on_p.request_id == on_d.request_id and pair is not None
        assert (str(pair.prefill), str(pair.decode)) == tuple(each.zmq_address for each in instances)
        assert (on_p.body["max_tokens"], on_d.body["max_tokens"]) == (1, 5)
        ids = [(seen.body.get("kv_transfer_params") or {}).get("transfer_id") for seen in (on_p, on_d)]
        # One transfer id for both in the concurrent mode, none in the other.
        assert (ids[0] == ids[1]) and (ids[0] is None) == (mode == "default")
        keys = [transfer_key(f"cmpl-{on_p.request_id}-0-0a1b2c3d", each) for each in ids]
        assert keys[0] == keys[1]
