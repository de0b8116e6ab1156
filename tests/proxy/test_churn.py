"""Instances that join, are drained, say goodbye or die under 64 concurrent streams: no stream fails but those
that a killed D had begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from proxy_behaviours import Seen, event_stream
from proxy_fakes import Deployment, FakeInstance, deployed, quiet

from p2pkv_proxy.access import Access
from p2pkv_proxy.attempt import Dispatch
from support.waiting import eventually

STREAMS = 64
EVENTS = 8
TOKEN = "a-token-of-the-tests"


@dataclass
class Tide:
    """The streams, and the instances that they go through.

    Attributes:
        begun: the streams of each D that have had their first event and not their last, by their number.
        whole, broken: the numbers of those that ended so, for their clients.
    """

    deployment: Deployment
    begun: dict[str, set[int]] = field(default_factory=dict)
    whole: list[int] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    sent: int = 0
    ebb: bool = False

    async def add(self, role: str) -> FakeInstance:
        instance = await self.deployment.add("P" if role == "P" else "D")
        if role == "D":
            self.begun[instance.http_address] = set()
            instance.behaviour = self.streams
        return instance

    async def add_at_work(self, role: str) -> FakeInstance:
        instance = await self.add(role)
        await eventually(lambda: bool(instance.requests), "the newcomer gets requests")
        return instance

    async def streams(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        """What a D does."""
        number = int(seen.body["prompt"])
        at_work = self.begun[request.host]
        response = await event_stream(request)
        try:
            for token in range(EVENTS):
                data = json.dumps({"choices": [{"text": f"{number}.{token}"}]})
                at_work.add(number)
                await response.write(f"data: {data}\n\n".encode())
                await asyncio.sleep(0.02)
        finally:
            at_work.discard(number)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def one_client(self, client: aiohttp.ClientSession) -> None:
        while not self.ebb:
            self.sent += 1
            number = self.sent
            body = {"model": "tiny", "prompt": str(number), "stream": True}
            async with client.post(f"{self.deployment.url}/v1/completions", json=body) as response:
                text = await response.text()
            right = [f"{number}.{token}" in text for token in range(EVENTS)]
            if response.status == 200 and all(right) and "[DONE]" in text and '"error"' not in text:
                self.whole.append(number)
            else:
                assert response.status == 200 and '"error"' in text, (number, response.status, text)
                self.broken.append(number)

    async def flows(self) -> None:
        """Until as many more have ended as there are at a time."""
        goal = len(self.whole) + STREAMS
        await eventually(lambda: len(self.whole) >= goal, "the streams go on")


@asynccontextmanager
async def tide(dispatch: Dispatch) -> AsyncIterator[Tide]:
    """A proxy with two P and two D, and 64 streams through it, from the beginning to the end."""
    async with deployed(dispatch, guard=Access(TOKEN)) as deployment:
        flood = Tide(deployment)
        client = await deployment.cleanup.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0)
            )
        )
        for role in ("P", "P", "D", "D"):
            await flood.add(role)
        await deployment.ready(prefill=2, decode=2)
        clients = [asyncio.create_task(flood.one_client(client)) for _ in range(STREAMS)]
        try:
            await flood.flows()
            yield flood
            await flood.flows()
        finally:
            flood.ebb = True
            await asyncio.gather(*clients)
        await quiet(deployment)


async def say_goodbye(flood: Tide, instance: FakeInstance) -> None:
    """As a clean stop does: no more pings, what is under way ends, then the port closes."""
    leaver = flood.deployment.known(instance)
    await flood.deployment.goodbye(instance)
    await eventually(lambda: leaver.in_flight == leaver.load == 0, "what it works on ends")
    await instance.stop()


@pytest.mark.parametrize("dispatch", ["concurrent", pytest.param("sequential", marks=pytest.mark.long)])
async def test_instances_join_and_leave_under_64_streams_and_none_fails(dispatch: Dispatch) -> None:
    async with tide(dispatch) as flood:
        deployment = flood.deployment
        for role, leavers in (("P", deployment.prefills), ("D", deployment.decodes)):
            first, second = leavers[:2]
            await flood.add_at_work(role)
            await say_goodbye(flood, first)
            await flood.flows()
            await flood.add_at_work(role)
            order = await deployment.order(second, "drain", {"Authorization": f"Bearer {TOKEN}"})
            assert order.status == 200
            drained = deployment.known(second)
            await eventually(lambda drained=drained: deployment.proxy.state_of(drained) == "drained")
            await second.stop()
            await flood.flows()
    assert flood.broken == []
    assert len(flood.whole) == flood.sent > 6 * STREAMS


async def test_of_a_killed_d_only_the_streams_that_it_had_begun_are_lost() -> None:
    async with tide("concurrent") as flood:
        deployment = flood.deployment
        await flood.add_at_work("P")
        await flood.add_at_work("D")
        # A P that dies costs nothing, a D what it was streaming.
        deployment.prefills[0].kill()
        await flood.flows()
        killed = deployment.decodes[0]
        begun = flood.begun[killed.http_address]
        await eventually(lambda: len(begun) >= STREAMS // 8)
        lost = set(begun)
        killed.kill()
        await flood.flows()
    assert flood.broken and set(flood.broken) <= lost
    assert len(flood.whole) + len(flood.broken) == flood.sent
