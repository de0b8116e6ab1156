"""A client leaves: both instances hear of it, and nothing is held for it."""

from __future__ import annotations

import asyncio

import pytest
from proxy_behaviours import flood, never, streams
from proxy_fakes import Deployment

from support.waiting import eventually


async def test_a_client_that_leaves_while_both_work(concurrent: Deployment) -> None:
    concurrent.p.behaviour = concurrent.d.behaviour = never
    asking = await concurrent.under_way(concurrent.p, concurrent.d)
    asking.cancel()
    await eventually(lambda: concurrent.p.requests[0].aborted and concurrent.d.requests[0].aborted)
    await eventually(lambda: all(instance.in_flight == 0 for instance in concurrent.everyone()))


@pytest.mark.parametrize("working", ["P", "D"])
async def test_a_client_that_leaves_while_one_works(sequential: Deployment, working: str) -> None:
    works = sequential.p if working == "P" else sequential.d
    works.behaviour = never
    asking = await sequential.under_way(works)
    asking.cancel()
    await eventually(lambda: works.requests[0].aborted)
    assert len(sequential.d.requests) == (working == "D")


async def test_a_client_that_leaves_in_the_stream(concurrent: Deployment) -> None:
    concurrent.p.behaviour = never
    concurrent.d.behaviour = streams(asyncio.Event())
    response = await concurrent.begin()
    response.close()
    await eventually(lambda: concurrent.p.requests[0].aborted and concurrent.d.requests[0].aborted)


async def test_a_client_that_leaves_in_a_flood(either: Deployment) -> None:
    either.d.behaviour = flood(10_000)
    response = await either.post({"prompt": "x", "stream": True})
    await response.content.readuntil(b"\n\n")
    response.close()
    instance = either.known(either.d)
    await eventually(lambda: instance.in_flight == 0)
