"""A client leaves: both instances hear of it, and nothing is held for it."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from proxy_behaviours import Seen, event, event_stream, never, streams
from proxy_fakes import Deployment, called

from support.waiting import eventually


async def test_a_client_that_leaves_while_both_work(concurrent: Deployment) -> None:
    concurrent.p.behaviour = concurrent.d.behaviour = never
    asking = asyncio.create_task(concurrent.post())
    await eventually(lambda: called(concurrent.p, concurrent.d))
    asking.cancel()
    await eventually(lambda: concurrent.p.requests[0].aborted and concurrent.d.requests[0].aborted)
    everyone = concurrent.registry.known("P") + concurrent.registry.known("D")
    await eventually(lambda: all(instance.in_flight == 0 for instance in everyone))


@pytest.mark.parametrize("working", ["P", "D"])
async def test_a_client_that_leaves_while_one_works(sequential: Deployment, working: str) -> None:
    works = sequential.p if working == "P" else sequential.d
    works.behaviour = never
    asking = asyncio.create_task(sequential.post())
    await eventually(lambda: called(works))
    asking.cancel()
    await eventually(lambda: works.requests[0].aborted)
    assert len(sequential.d.requests) == (working == "D")


async def test_a_client_that_leaves_in_the_stream(concurrent: Deployment) -> None:
    concurrent.p.behaviour = never
    concurrent.d.behaviour = streams(asyncio.Event())
    response = await concurrent.post({"prompt": "x", "stream": True})
    assert b"first" in await response.content.readuntil(b"\n\n")
    response.close()
    await eventually(lambda: concurrent.p.requests[0].aborted and concurrent.d.requests[0].aborted)


async def test_a_client_that_leaves_in_a_flood(either: Deployment) -> None:
    async def flood(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        while True:
            await response.write(event(seen, "x" * 10_000))

    either.d.behaviour = flood
    response = await either.post({"prompt": "x", "stream": True})
    await response.content.readuntil(b"\n\n")
    response.close()
    (instance,) = either.registry.known("D")
    await eventually(lambda: instance.in_flight == 0)
