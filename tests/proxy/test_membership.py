"""Instances that come, go, restart, lie or are not ready, over real pings; and those of several engines."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from proxy_behaviours import after, answer_error, answer_json, never, never_a_token, streams
from proxy_fakes import Deployment, FakeInstance, all_do, deployed, join, outcomes, ping, pinging, serve

from p2pkv.control.discovery import DISCOVERY_VERSION
from p2pkv.control.pinger import Pinger
from p2pkv.demo.processes import free_ports
from p2pkv_proxy.access import Access
from p2pkv_proxy.membership.instance import Instance, Role
from p2pkv_proxy.membership.listener import PingConnection
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import Routing
from support.waiting import eventually


async def test_nobody_is_there(lonely: Deployment) -> None:
    response = await lonely.post()
    assert response.status == 503
    assert int(response.headers["Retry-After"]) in range(3, 7)
    error = (await response.json())["error"]
    assert error["message"] == "No decode instance is ready: none has registered. Try again in a few seconds."
    assert (await lonely.get("/v1/models"))[0] == 503
    status, report = await lonely.get("/health")
    assert status == 503
    assert report["missing"] == [
        f"No {role} instance is ready: none has registered." for role in ("prefill", "decode")
    ]


async def test_an_instance_that_pings_but_is_not_healthy_is_not_routable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with deployed("concurrent", alone_share=0) as lonely:
        await lonely.add("D")
        p = await lonely.add("P", health=503)
        await lonely.ready(prefill=0, decode=1)
        await eventually(lambda: len(lonely.registry.known("P")) == 1)
        why = "No prefill instance is ready: of 1 registered, none has answered /health with 200 lately"
        assert why in await lonely.refusal(503)
        p.health = 200
        await lonely.ready(prefill=1, decode=1)
        assert (await lonely.post()).status == 200
        other = await lonely.add("P", health=503)
        other.refuse()
        said = (
            f"prefill instance {other.http_address} gets no requests: its /health cannot be asked from here"
        )
        await eventually(lambda: said in caplog.text)


async def leaves(deployment: Deployment, instance: FakeInstance) -> None:
    """As vLLM that is told to stop: it says goodbye, its port refuses, and what it has stays open."""
    instance.refuse()
    await deployment.goodbye(instance)


async def test_an_answer_that_comes_within_a_second_of_the_goodbye_is_taken(
    concurrent: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sends what it has computed although its port refuses."""
    monkeypatch.setattr("p2pkv_proxy.membership.prober._GOODBYE_SECONDS", 1000.0)
    monkeypatch.setattr("p2pkv_proxy.membership.prober._PERIOD_SECONDS", 0.01)
    release, refused = asyncio.Event(), 0
    health = concurrent.proxy.membership.prober._health

    async def counted(instance: Instance) -> bool:
        nonlocal refused
        try:
            return await health(instance)
        except OSError:
            refused += 1
            raise

    concurrent.d.behaviour = after(release, answer_json)
    asking = await concurrent.under_way(concurrent.d)
    monkeypatch.setattr(concurrent.proxy.membership.prober, "_health", counted)
    await leaves(concurrent, concurrent.d)
    await eventually(lambda: refused > 3)
    release.set()
    assert (await asking).status == 200


async def test_a_frozen_leaver_loses_its_requests_after_a_lease() -> None:
    async with deployed("concurrent", 1, 1, life=0.5, lease=1.0) as deployment:
        deployment.d.behaviour = never
        asking = await deployment.under_way(deployment.d)
        other = await deployment.newcomer("D")
        deployment.pingers[deployment.d.http_address].stop()
        deployment.d.frozen = True
        assert (await asking).status == 200 and len(other.requests) == 1


async def test_a_request_that_a_leaving_d_takes_goes_elsewhere_too(sequential: Deployment) -> None:
    """It was chosen before its goodbye, P has answered since, and its port was still open."""
    release = asyncio.Event()
    other = await sequential.add("D", health=503)
    sequential.p.behaviour = after(release, answer_json)
    sequential.d.behaviour = never
    asking = await sequential.under_way(sequential.p)
    other.health = 200
    await eventually(lambda: other.http_address in sequential.routable("D"))
    await sequential.goodbye(sequential.d)
    asked_before = sequential.d.healths
    await eventually(lambda: sequential.d.healths > asked_before + 1)
    release.set()
    await eventually(lambda: len(sequential.d.requests) == 1)
    sequential.d.refuse()
    assert (await asking).status == 200 and len(other.requests) == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_what_becomes_of_a_request_whose_p_leaves_is_ds_to_say(
    concurrent: Deployment, fails: bool
) -> None:
    """P has told D that it stops, and D computes the prompt. With the policy `fail` it says so before the
    proxy has given P up, and is not to blame: one whose only D is to blame is not tried again."""
    release = asyncio.Event()
    concurrent.p.behaviour = never
    concurrent.d.behaviour = after(
        release, answer_error(500, "Internal server error") if fails else answer_json
    )
    asking = await concurrent.under_way(concurrent.p, concurrent.d)
    if fails:
        other = await concurrent.newcomer("P")
        await concurrent.goodbye(concurrent.p)
        concurrent.d.behaviour = answer_json
    else:
        await leaves(concurrent, concurrent.p)
        await eventually(lambda: concurrent.p.requests[0].aborted)
        assert not concurrent.d.requests[0].aborted
    release.set()
    assert (await asking).status == 200
    assert len(other.requests if fails else concurrent.d.requests) == 1


async def test_an_answer_that_the_leaver_has_begun_goes_on(concurrent: Deployment) -> None:
    release = asyncio.Event()
    concurrent.d.behaviour = streams(release)
    response = await concurrent.begin()
    concurrent.d.behaviour = never_a_token
    asking = asyncio.create_task(concurrent.post())
    await eventually(lambda: len(concurrent.d.requests) == 2)
    await leaves(concurrent, concurrent.d)
    await eventually(lambda: concurrent.d.requests[1].aborted)  # so the leaver is known to have stopped
    release.set()
    assert b"second" in await response.read()
    asking.cancel()


async def test_a_leavers_requests_need_no_retries(concurrent: Deployment) -> None:
    """The budget of retries, ten of so few requests, is for outages."""
    concurrent.d.behaviour = never
    asking = [asyncio.create_task(concurrent.post()) for _ in range(14)]
    await eventually(lambda: len(concurrent.d.requests) == len(asking))
    other = await concurrent.newcomer("D")
    await leaves(concurrent, concurrent.d)
    assert {(await each).status for each in asking} == {200}
    assert len(other.requests) == len(asking)


async def test_a_d_that_dies_is_blamed_although_its_p_has_left() -> None:
    """For want of KV a D says that it fails; it does not close the connection."""
    async with deployed("concurrent", 2, 2) as deployment:
        all_do(deployment.instances, never)
        asking = asyncio.create_task(deployment.post())
        asked = deployment.instances
        await eventually(lambda: sum(len(each.requests) for each in asked) == 2)
        p, d = (each for each in asked if each.requests)
        for each in asked:
            if each not in (p, d):
                each.behaviour = answer_json
        await deployment.goodbye(p)
        dead = deployment.known(d)
        d.kill()
        assert (await asking).status == 200
        assert outcomes(dead) == [False]


async def test_a_leaver_that_nobody_needs_is_not_asked_again(concurrent: Deployment) -> None:
    """Where its address answers nothing any more, each round would wait for it."""
    leaver = await concurrent.newcomer("D")
    concurrent.pingers[leaver.http_address].stop()
    await concurrent.ready(prefill=1, decode=1)
    asked = leaver.healths
    newcomer = await concurrent.add("D", health=503)  # which is asked in each round
    await eventually(lambda: newcomer.healths >= 4)
    assert leaver.healths <= asked + 1


# Instances of several data-parallel engines: each request goes to the engines that its id names.


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


async def test_not_each_request_tries_the_connections_of_silent_instances(
    concurrent: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[PingConnection] = []
    monkeypatch.setattr(PingConnection, "_send", lambda each, _: tried.append(each))
    source = concurrent.known(concurrent.d).source
    assert all(source.is_connected() for _ in range(1000))
    assert len(tried) < 100
