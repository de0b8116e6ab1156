"""Instances of several data-parallel engines: the proxy chooses engines, and sends each request to those that
its id names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from proxy_behaviours import answer_json, never
from proxy_fakes import Deployment, FakeInstance, deployed, join, ping, pinging, serve

from p2pkv.control.discovery import DISCOVERY_VERSION
from p2pkv.control.pinger import Pinger
from p2pkv.demo.processes import free_ports
from p2pkv_proxy.access import Access
from p2pkv_proxy.membership.instance import Role
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import Routing
from support.waiting import eventually

PAIR = re.compile(r"___prefill_addr_(.*:\d+)___decode_addr_(.*:\d+)_[0-9a-f]{32}")


async def add(
    deployment: Deployment, role: Role, replicas: dict[int, int | None]
) -> tuple[FakeInstance, dict[int, Pinger]]:
    """A server with an engine for each data-parallel rank, which has the number `replicas[rank]` there."""
    instance, pingers = FakeInstance(role, version=DISCOVERY_VERSION), dict[int, Pinger]()
    first = free_ports(8)
    await serve(deployment.cleanup, instance)
    deployment.instances.append(instance)
    for rank, replica in replicas.items():
        place = f"127.0.0.1:{first + rank}"
        said = replace(instance.ping, dp_rank=rank, replica=replica, zmq_address=place)
        pingers[rank] = deployment.cleanup.enter_context(pinging(deployment.discovery, said))
    return instance, pingers


@pytest.fixture(params=["concurrent", "sequential"])
async def internal(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """P and D with two engines each, all engines of one behind one HTTP address."""
    async with deployed(request.param, guard=Access("token")) as deployment:
        await add(deployment, "P", {0: 0, 1: 1})
        await add(deployment, "D", {0: 0, 1: 1})
        await deployment.ready(prefill=2, decode=2)
        yield deployment


async def test_each_request_goes_to_the_engines_that_its_id_names(internal: Deployment) -> None:
    await internal.serves(8, headers={"X-data-parallel-rank": "7"})
    address = {
        (each.role, each.ping.dp_rank): each.ping.zmq_address
        for each in (*internal.registry.known("P"), *internal.registry.known("D"))
    }
    assert len(set(address.values())) == 4
    for role, instance, half in (("P", internal.p, 1), ("D", internal.d, 2)):
        seen = [(int(each.headers["X-data-parallel-rank"]), each.request_id) for each in instance.requests]
        assert sorted(rank for rank, _ in seen) == [0] * 4 + [1] * 4
        for rank, request_id in seen:
            found = PAIR.search(request_id)
            assert found is not None and found[half] == address[role, rank]


async def test_the_header_counts_the_servers_own_engines() -> None:
    """Hybrid: rank 2 is the first of its node. An engine that is alone behind its server needs no header."""
    async with deployed("concurrent") as deployment:
        p, _ = await add(deployment, "P", {2: 0})
        d, _ = await add(deployment, "D", {1: None})
        await deployment.ready(prefill=1, decode=1)
        assert (await deployment.post()).status == 200
        assert p.requests[0].headers["X-data-parallel-rank"] == "0"
        assert "X-data-parallel-rank" not in d.requests[0].headers


async def test_all_engines_at_an_address_are_drained_together(internal: Deployment) -> None:
    answer = await internal.order(internal.d, "drain", {"Authorization": "Bearer token"})
    drained = (await answer.json())["instances"]
    assert sorted((each["rank"], each["state"]) for each in drained) == [(0, "drained"), (1, "drained")]
    assert internal.routable("D") == []


def test_one_engine_fails_alone_and_a_server_with_all_its_engines() -> None:
    """The breaker, goodbyes, silence and vLLM's /pause are the engine's; what none reaches is the server."""
    registry = Registry(life=10.0)
    pings = [ping("P", version=DISCOVERY_VERSION, dp_rank=rank, replica=rank) for rank in range(2)]
    one, other = (join(registry, each, 0.0) for each in pings)
    for _ in range(5):
        one.breaker.failed(1.0)
    assert not one.breaker.closed and other.breaker.closed
    registry.observe(replace(pings[0], paused=True), 9.0)
    assert one.paused and not other.paused
    assert other.silent(11.0) and not one.silent(11.0)
    elsewhere = [join(registry, ping("D")), join(registry, ping("P", 8200, dp_rank=1))]
    other.unreachable()
    assert [each.healthy for each in (one, other, *elsewhere)] == [False] * 2 + [True] * 2
    registry.observe(replace(pings[0], leaving=True), 11.0)
    assert registry.known("P") == [other, elsewhere[1]]


async def test_what_a_hung_engine_has_not_begun_goes_to_another_server() -> None:
    """Not to its neighbour: with experts, in lockstep, that one hangs too, and a request has one retry."""
    routing = Routing(decode="round_robin")
    async with deployed(
        "concurrent", prefill=1, decode=1, life=0.5, lease=1.0, routing=routing
    ) as deployment:
        other = deployment.d
        server, pingers = await add(deployment, "D", {0: 0, 1: 1})
        await deployment.ready(prefill=1, decode=3)
        server.behaviour = never
        asking = [asyncio.create_task(deployment.post()) for _ in range(24)]
        await eventually(lambda: len(other.requests) + len(server.requests) == 24)
        ranks = [each.headers["X-data-parallel-rank"] for each in server.requests]
        assert min(ranks.count(rank) for rank in "01") >= 4
        pingers[1]._interval = 1000.0
        await eventually(lambda: sum(each.done() for each in asking) == 24 - ranks.count("0"))
        pingers[0]._interval = 1000.0
        assert {(await each).status for each in asking} == {200}
        assert len(server.requests) == len(ranks), "a second try went to the hung engine's neighbour"


async def test_a_neighbour_is_better_than_no_other_engine() -> None:
    async with deployed("concurrent", prefill=1, life=0.5, lease=1.0) as deployment:
        server, pingers = await add(deployment, "D", {0: 0, 1: 1})
        await deployment.ready(prefill=1, decode=2)
        server.behaviour = never
        asking = asyncio.create_task(deployment.post())
        await eventually(lambda: len(server.requests) == 1)
        (hung,) = server.requests
        server.behaviour = answer_json
        pingers[int(hung.headers["X-data-parallel-rank"])]._interval = 1000.0
        assert (await asking).status == 200
        assert len(server.requests) == 2
