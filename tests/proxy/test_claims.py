"""Two who ping under one address: the first keeps it while it lives, and its successor gets it at once."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from proxy_fakes import Deployment, Line, deployed, fail, join, ping

from p2pkv.control.discovery import PING_INTERVAL, encode_ping, goodbye
from p2pkv.control.security import Members
from p2pkv.pairing import Address
from p2pkv_proxy.membership.instance import LIFE, Instance, Role
from p2pkv_proxy.membership.registry import LEASE, Registry
from p2pkv_proxy.policies import RoutingRequest
from p2pkv_proxy.routing import Router
from support.hostile import dealer
from support.waiting import eventually

MEMBERS = Members(b"a secret of the tests")


def held(**more: Any) -> tuple[Registry, Instance, Line]:
    """A registry with one instance that pinged at 0."""
    registry, line = Registry(), Line()
    return registry, join(registry, ping(incarnation="first", **more), 0.0, line), line


@pytest.mark.parametrize(
    ("address", "spelled"),
    [
        ("10.0.0.1:21001", "10.0.0.1:21001"),
        ("node-7:21001", "NODE-7.:21001"),
        ("[fd00::1]:21001", "[fd00:0::1]:21001"),
    ],
)
def test_a_zmq_address_is_its_holders_too(address: str, spelled: str) -> None:
    registry = Registry()
    holder = join(registry, msgspec.structs.replace(ping(), zmq_address=address), 0.0, Line())
    thief = msgspec.structs.replace(ping(port=1), zmq_address=spelled)
    assert registry.observe(thief, 1.0, Line()) is None
    assert registry.known("P") == [holder] and registry.claims_refused == 1
    assert registry.observe(msgspec.structs.replace(thief, type="D"), 1.0, Line()) is not None


def test_of_a_frozen_holder_the_successor_is_taken_when_its_pings_are_late() -> None:
    registry, _, _ = held()
    assert registry.observe(ping(incarnation="second"), 2 * PING_INTERVAL, Line()) is None
    assert registry.observe(ping(incarnation="second"), 3 * PING_INTERVAL, Line()) is not None
    assert 3 * PING_INTERVAL < LIFE


def test_a_goodbye_from_elsewhere_removes_nobody_who_lives() -> None:
    registry, holder, line = held()
    registry.observe(goodbye(holder.ping), 1.0, Line())
    assert registry.known("P") == [holder]
    line.open, anew = False, Line()
    assert registry.observe(holder.ping, 1.0, anew) is None, "it has dialed anew"
    assert registry.observe(ping(incarnation="second"), 1.0, Line()) is None
    anew.open = False  # again, and the goodbye is the first that it says
    registry.observe(goodbye(holder.ping), 1.0, Line())
    assert registry.known("P") == []


def test_a_replayed_ping_does_not_take_the_address_over() -> None:
    registry, holder, line = held()
    replayer = Line()
    registry.observe(holder.ping, 1.0, replayer)
    assert registry.observe(ping(incarnation="second"), 1.0, replayer) is None
    assert holder.source is line


def test_a_member_is_not_kept_out_by_what_anybody_may_say_and_keeps_anybody_out() -> None:
    registry, _, _ = held()
    member = registry.observe(ping(incarnation="second"), 0.1, Line(member=True))
    assert registry.known("P") == [member]
    assert registry.observe(ping(incarnation="third"), 0.2, Line()) is None
    assert registry.known("P") == [member]


def test_it_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    registry, holder, line = held()
    for second in range(1, 100):
        registry.observe(holder.ping, float(second), line)
        registry.observe(ping(incarnation="second"), float(second), Line())
    assert registry.claims_refused == 99
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2
    assert re.search(r"10\.0\.0\.1:8100 refused \(1 such .* 10\.0\.0\.1:18100 belongs to prefill", said[0])


# Silent, and gone.


def test_it_is_silent_while_its_connection_stands_and_then_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    registry, holder, line = held()
    for second in range(12, 25):
        assert registry.expire(float(second)) == []
        assert holder.silent(float(second)) and registry.routable("P", float(second)) == [holder]
    line.open = False
    assert registry.routable("P", 25.0) == []
    assert registry.expire(25.0) == [holder]
    (silent, removed) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert "is silent: no ping for 12 s, but its connection stands" in silent
    assert removed.endswith("removed: no ping for 25 s, and its connection is closed")


def test_it_speaks_again_and_is_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """A closed connection alone is a reconnection; after a lease of silence it is gone whatever stands."""
    caplog.set_level(logging.INFO)
    registry, holder, line = held()
    registry.expire(20.0)
    assert registry.observe(holder.ping, 21.0, line) is None
    registry.expire(22.0)
    assert not holder.silent(22.0)
    assert caplog.records[-1].getMessage().endswith("pings again")
    line.open = False
    assert registry.expire(21.0 + LIFE - 0.1) == [] and not holder.silent(21.0 + LIFE - 0.1)
    assert registry.observe(holder.ping, 31.0, Line()) is None
    assert registry.expire(31.0 + LIFE + 5.0) == []
    assert registry.expire(31.0 + LEASE - 0.1) == []
    assert registry.routable("P", 31.0 + LEASE - 0.1) == [holder]
    assert registry.routable("P", 31.0 + LEASE + 0.1) == []
    assert registry.expire(31.0 + LEASE + 0.1) == [holder]


def test_an_instance_that_answers_is_not_silent_although_its_pings_are_lost() -> None:
    """Else the half of a fleet whose pings still come would get all requests."""
    registry, line = Registry(), Line()
    p, lost, pings = (join(registry, ping(role, n), 0.0, line) for n, role in enumerate("PDD", 1))
    router = Router(registry)

    def chosen(now: float) -> set[Instance]:
        for each in (p, pings):
            each.pinged(each.ping, now)
        return {router.choose(RoutingRequest(), now).decode for _ in range(4)}

    for now in (LIFE - 1.0, 2.0 * LIFE - 2.0, 3.0 * LIFE - 3.0, 3.0 * LIFE + 30.0):
        lost.answered(now)
        assert chosen(now + 1.0) == {lost, pings} and not registry.overdue(lost, now + 1.0)
    assert chosen(now + LIFE + 1.0) == {pings}
    assert registry.expire(now + LIFE + 1.0) == []


@pytest.mark.parametrize("role", ["P", "D"])
def test_others_are_preferred_to_a_silent_one_and_it_is_better_than_nobody(role: Role) -> None:
    registry, line = Registry(), Line()
    for port, kind in ((1, "P"), (2, "D"), (3, role)):
        join(registry, ping(kind, port), 0.0, line)
    both = registry.known(role)
    router = Router(registry)

    def chosen() -> set[Instance]:
        return {
            each for _ in range(4) for each in router.choose(RoutingRequest(), 20.0).instances if each in both
        }

    assert chosen() == set(both), "all are silent"
    both[1].pinged(both[1].ping, 19.0)
    assert chosen() == {both[1]}
    fail(both[1], 20.0)
    assert chosen() == {both[0]}, "rather one that says nothing than one that fails"


# The same over real connections.


@pytest.fixture(params=[None, MEMBERS], ids=["plain", "members"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """A proxy with one P and one D that ping, with and without a secret."""
    async with deployed("concurrent", 1, 1, members=request.param) as deployment:
        yield deployment


async def test_a_member_that_registers_anothers_address_is_refused(place: Deployment) -> None:
    holder, p = place.registry.known("P"), place.p.ping
    changes: list[dict[str, str]] = [
        *({"incarnation": "second"}, {"incarnation": ""}, {"model": "other"}),
        *({"zmq_address": "127.0.0.1:9"}, {"http_address": "127.0.0.1:9"}),
    ]
    claims = [*(msgspec.structs.replace(p, **change) for change in changes), goodbye(p)]
    with dealer(Address.parse(place.discovery), place.members, "proxy") as socket:
        for claim in claims * 100:
            socket.send(encode_ping(claim))
        await eventually(lambda: place.registry.claims_refused == 600)
        seen = holder[0].last_seen
        await eventually(lambda: holder[0].last_seen > seen, "its pings still count")
        assert place.registry.known("P") == holder
        assert place.registry.routable("P", place.proxy.clock()) == holder
        assert (await place.post()).status == 200
    assert (await place.get("/health"))[1]["counters"]["claims_refused"] == 600
    assert place.refused == 0


async def test_a_process_that_was_killed_is_followed_at_once(place: Deployment) -> None:
    place.pingers[place.p.http_address].stop()
    await eventually(lambda: place.registry.known("P") == [])
    for number in range(10):
        ping = msgspec.structs.replace(place.p.ping, incarnation=f"number {number}")
        # Its end closes the connection, without a goodbye, as a kill does.
        with dealer(Address.parse(place.discovery), place.members, "proxy") as socket:
            socket.send(encode_ping(ping))
            await eventually(lambda ping=ping: [each.ping for each in place.registry.known("P")] == [ping])
    assert place.registry.claims_refused == 0
