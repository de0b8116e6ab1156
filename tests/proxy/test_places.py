"""Places at instances: none is lost, none is kept, and they are given out evenly and cheaply."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
from proxy_fakes import Deployment, fleet, join, ping
from test_admission import ask, slow

from p2pkv_proxy.admission import Admission
from p2pkv_proxy.http import ProxyError
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import RoutingRequest
from p2pkv_proxy.routing import PrefillMode
from support.waiting import eventually


def small(**limits: Any) -> Admission:
    """One D, which takes one request."""
    return Admission(fleet("D", room=1)[0], Limits(**limits), RequestCounters(), lambda: 0.0)


async def enter(admission: Admission, leave: asyncio.Event | None = None, model: str | None = None) -> None:
    """Gets a place, and keeps it until told to leave."""
    async with admission.place(RoutingRequest(model), paired=False):
        if leave is not None:
            await leave.wait()


async def one_leaves(admission: Admission) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
    """Two wait, and the first has been cancelled in this turn of the loop."""
    leaver, stayer = (asyncio.create_task(enter(admission)) for _ in range(2))
    await eventually(lambda: admission.waiting == 2)
    leaver.cancel()
    return leaver, stayer


async def test_a_place_that_comes_as_the_wait_ends_is_not_lost() -> None:
    admission, leave = small(max_wait=0.05), asyncio.Event()
    holder = asyncio.create_task(enter(admission, leave))
    await eventually(lambda: admission.under_way == 1)
    late = asyncio.create_task(enter(admission))
    await eventually(lambda: admission.waiting == 1)
    leave.set()
    time.sleep(0.06)  # the holder leaves and the deadline passes in the same turn of the loop
    with pytest.raises(ProxyError):
        await late
    await holder
    assert (admission.waiting, admission.under_way) == (0, 0)
    await enter(admission)


async def test_a_place_that_comes_as_its_client_leaves_is_not_lost() -> None:
    admission = small()
    async with admission.place(RoutingRequest(), paired=False):
        leaver = asyncio.create_task(enter(admission))
        await eventually(lambda: admission.waiting == 1)
    # The place is the leaver's by now, which has not run since.
    assert (admission.waiting, admission.under_way) == (0, 1)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert (admission.waiting, admission.under_way) == (0, 0)
    await enter(admission)


async def test_a_place_passes_by_who_has_just_left() -> None:
    admission = small()
    async with admission.place(RoutingRequest(), paired=False):
        leaver, stayer = await one_leaves(admission)
    await stayer
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert (admission.waiting, admission.under_way) == (0, 0)


async def test_who_has_just_left_does_not_spoil_the_end() -> None:
    admission = small()
    async with admission.place(RoutingRequest(), paired=False):
        leaver, stayer = await one_leaves(admission)
        admission.close(ProxyError(503, "the end"))
        with pytest.raises(ProxyError, match="the end"):
            await stayer
        with pytest.raises(asyncio.CancelledError):
            await leaver
    assert (admission.waiting, admission.under_way) == (0, 0)


async def test_who_moves_makes_room_for_who_waits() -> None:
    router, (both, one) = fleet("D", "D", room=1)
    both.learn(frozenset({"a", "b"}))
    one.learn(frozenset({"b"}))
    one.take_turn(1)  # so that the other one is first
    admission = Admission(router, Limits(), RequestCounters(), lambda: 0.0)
    async with admission.place(RoutingRequest("b"), paired=False) as place:
        assert place.choice.decode is both
        waiter = asyncio.create_task(enter(admission, model="a"))
        await eventually(lambda: admission.waiting == 1)
        assert admission.move(place, PrefillMode.NONE, frozenset({both}))
        await waiter
        assert (both.places, one.places) == (0, 1)
    assert one.places == 0


async def test_who_wants_different_things_of_one_d_is_served_in_order_too() -> None:
    admission, served = small(), list[int]()

    async def take(number: int, model: str | None) -> None:
        await enter(admission, model=model)
        served.append(number)

    async with admission.place(RoutingRequest(), paired=False):
        wanted = enumerate([None, "x", None, "y", "x", None])
        asked = [asyncio.create_task(take(number, model)) for number, model in wanted]
        await eventually(lambda: admission.waiting == 6)
    await asyncio.gather(*asked)
    assert served == [0, 1, 2, 3, 4, 5]


async def test_nothing_is_left_of_names_that_were_waited_for() -> None:
    admission = small()
    async with admission.place(RoutingRequest(), paired=False):
        asked = [asyncio.create_task(enter(admission, model=str(number))) for number in range(20)]
        await eventually(lambda: admission.waiting == 20)
        for leaver in asked[10:]:
            leaver.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert not admission._queues


async def test_those_who_wait_for_one_model_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, looks = Registry(), 0
    several = [(role, {"model": model}) for model in "ab" for role in "PD"]
    router, _ = fleet(*several, registry=registry, room=2)
    admission = Admission(router, Limits(max_waiting=200), RequestCounters(), lambda: 0.0)

    async def once(model: str) -> None:
        async with admission.place(RoutingRequest(model), paired=True):
            pass

    def looked(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return routable(*arguments)

    routable = registry.routable
    async with (
        admission.place(RoutingRequest("a"), paired=True),
        admission.place(RoutingRequest("a"), paired=True),
    ):
        asked = [asyncio.create_task(once("a")) for _ in range(200)]
        await eventually(lambda: admission.waiting == 200)
        monkeypatch.setattr(registry, "routable", looked)
        await once("b")
        monkeypatch.undo()
        assert looks < 20
        assert admission.waiting == 200
    await asyncio.gather(*asked)
    assert (admission.waiting, admission.under_way) == (0, 0)


async def test_a_herd_is_spread_although_nobody_has_got_his_first_request_yet() -> None:
    registry = Registry()
    router, (busier, idler, _) = fleet("P", "P", "D", registry=registry, room=10)
    admission = Admission(router, Limits(), RequestCounters(), lambda: 0.0)
    async with AsyncExitStack() as leave:
        leave.enter_context(busier.busy(lambda loss: None))
        for _ in range(10):
            (await leave.enter_async_context(admission.place(RoutingRequest(), paired=True))).sent()
        asked = [
            asyncio.create_task(leave.enter_async_context(admission.place(RoutingRequest(), paired=True)))
            for _ in range(9)
        ]
        await eventually(lambda: admission.waiting == 9)
        join(registry, ping("D", 99))
        admission.advance()
        chosen = [(await each).choice.prefill for each in asked]
        assert (chosen.count(busier), chosen.count(idler)) == (4, 5)
    assert (busier.expected, idler.expected) == (0, 0)


async def test_a_d_whose_requests_are_still_at_p_is_busy(sequential: Deployment) -> None:
    await sequential.newcomer("D")
    first, second = sequential.registry.known("D")
    with slow(sequential.p), first.busy(lambda loss: None):
        asked = [ask(sequential) for _ in range(9)]
        await eventually(lambda: len(sequential.p.requests) == 9)
        assert sorted((first.places, second.places)) == [4, 5]
    assert await asyncio.gather(*asked) == [200] * 9
