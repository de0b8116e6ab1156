"""What an instance needs to be found by other people's routers, and what they send it.

The original connector's example proxy is a stand-in that is written from the protocol's description
(tests/support/classic_router.py). tests/vllm/test_routers.py has it and vllm-router in front of real servers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from proxy_behaviours import answer_json
from proxy_fakes import FakeInstance, pinging, serve

from p2pkv.control.pinger import Pinger
from p2pkv.demo.processes import free_ports
from p2pkv.pairing import find_pair
from support.classic_router import ClassicRouter, by_aiohttp
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
        server = await stack.enter_async_context(TestServer(by_aiohttp(router)))
        instances = FakeInstance("P"), FakeInstance("D")
        for each in instances:
            await serve(stack, each)
        pinger, _ = (stack.enter_context(pinging(discovery, each.ping)) for each in instances)
        await eventually(lambda: bool(router.there("P") and router.there("D")), "both are registered")
        yield Classic(str(server.make_url("")).rstrip("/"), discovery, router, *instances, pinger)


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
    with pinging(classic.discovery, classic.p.ping):
        await eventually(lambda: bool(classic.router.there("P")), "P is back")
    assert classic.router.ended is None and classic.p.behaviour is answer_json
