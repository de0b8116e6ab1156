"""A discovery port among strangers, with a secret and without."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
from proxy_fakes import Deployment, deployed, pinging

from p2pkv.control import security
from p2pkv.control.discovery import Ping, encode_ping, goodbye
from p2pkv.control.security import Members
from p2pkv.pairing import Address
from support.hostile import RAW, dealer, shout
from support.waiting import eventually

FORGED = Ping(type="P", http_address="127.0.0.1:9", zmq_address="127.0.0.1:10")
MEMBERS, OTHERS = Members(b"a secret of the tests"), Members(b"another secret of the tests")


async def serves(deployment: Deployment) -> None:
    """It still takes pings, and serves."""
    before = len(deployment.routable("D"))
    await deployment.add("D")
    if before == 0:
        await deployment.add("P")
    await deployment.ready(prefill=1, decode=before + 1)
    assert (await deployment.post()).status == 200


async def test_garbage_without_end_makes_a_line_in_ten_seconds(
    lonely: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with dealer(Address.parse(lonely.discovery)) as socket:
        for _ in range(500):
            socket.send(b"\xff")
        await eventually(lambda: lonely.refused == 500)
    assert len([line for line in caplog.records if "refused" in line.getMessage()]) <= 2
    await serves(lonely)


@pytest.mark.parametrize("members", [None, MEMBERS], ids=["plain", "members"])
@pytest.mark.parametrize("kind", RAW)
async def test_raw_bytes(members: Members | None, kind: str) -> None:
    """With a secret they never reach the decoder."""
    async with deployed("concurrent", members=members) as deployment:
        with shout(Address.parse(deployment.discovery), RAW[kind]):
            await serves(deployment)
        assert members is None or deployment.refused == 0


async def test_idle_connections_are_closed(lonely: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ten seconds that the page gives; here after one."""
    assert lonely.proxy.membership.listeners[0]._router.getsockopt(zmq.HANDSHAKE_IVL) == 10_000
    monkeypatch.setattr(security, "HANDSHAKE_SECONDS", 1.0)
    async with deployed("concurrent") as deployment:
        place = Address.parse(deployment.discovery)
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(shout(place, b""))
            await serves(deployment)
            await eventually(lambda: deployment.proxy.membership.listeners[0].shut_out >= 200)
        await serves(deployment)


async def test_the_tasks_of_the_listener_outlive_what_they_meet(lonely: Deployment) -> None:
    """Even a fault of ours in taking a ping in."""

    failed = asyncio.Event()

    def fail(ping: Ping, source: object) -> None:
        failed.set()
        raise RuntimeError("made up")

    listener = lonely.proxy.membership.listeners[0]
    take, listener._take = listener._take, fail
    with dealer(Address.parse(lonely.discovery)) as socket:
        socket.send(encode_ping(FORGED))
        await eventually(failed.is_set)
    listener._take = take
    await serves(lonely)


# With a secret: pings of members, and of those who are none.


def knowing() -> Members:
    """Somebody who knows the proxy's key, and not the members'."""
    made = Members(b"another secret of the tests")
    made._keys = {**made._keys, "proxy": MEMBERS._keys["proxy"]}
    return made


@pytest.fixture
async def guarded() -> AsyncIterator[Deployment]:
    """A proxy with a secret, and a second port without."""
    async with deployed("concurrent", prefill=1, decode=1, members=MEMBERS) as deployment:
        yield deployment


@pytest.mark.parametrize(
    ("way", "server"),
    [(None, "proxy"), (OTHERS, "proxy"), (knowing(), "proxy"), (MEMBERS, "rank")],
    ids=["in the clear", "another secret", "its key", "a member of the ranks"],
)
async def test_strangers_change_nothing(guarded: Deployment, way: Members | None, server: str) -> None:
    frames = [FORGED, msgspec.structs.replace(guarded.p.ping, zmq_address="127.0.0.1:10")]
    with dealer(Address.parse(guarded.discovery), way, server) as socket:
        for ping in (*frames, goodbye(guarded.p.ping)):
            with contextlib.suppress(zmq.Again):  # libzmq sends no more once its handshake has failed
                socket.send(encode_ping(ping))
        await eventually(lambda: guarded.proxy.membership.listeners[0].shut_out > 0)
    assert [instance.ping for instance in guarded.registry.known("P")] == [guarded.p.ping]
    assert guarded.refused == 0
    assert (await guarded.post()).status == 200


async def test_the_plain_port_takes_anybodys_pings(guarded: Deployment) -> None:
    with dealer(Address.parse(guarded.plain_discovery)) as socket:
        socket.send(encode_ping(FORGED))
        await eventually(lambda: len(guarded.registry.known("P")) == 2)
    with dealer(Address.parse(guarded.plain_discovery), MEMBERS, "proxy") as socket:
        socket.send(encode_ping(msgspec.structs.replace(FORGED, type="D")))
        assert not await asyncio.to_thread(socket.poll, 300)
    assert len(guarded.registry.known("D")) == 1


@pytest.mark.parametrize("way", [None, OTHERS], ids=["none", "another"])
async def test_an_instance_without_the_secret_hears_so(
    guarded: Deployment, way: Members | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with pinging(guarded.discovery, FORGED, members=way):
        await eventually(lambda: f"the proxy at {guarded.discovery} refused the handshake" in caplog.text)
    said = [line.getMessage() for line in caplog.records if "not registered" in line.getMessage()]
    assert len(said) == 1 and "secret" in said[0]
    assert len(guarded.registry.known("P")) == 1
