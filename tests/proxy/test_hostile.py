"""A discovery port among strangers: every wrong ping is counted, none of them ends the listener."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
import pytest
import zmq
from hostile_support import DEEP, RAW, dealer, shout
from proxy_fakes import Deployment, deployed

from p2pkv.control import security
from p2pkv.control.discovery import Ping, encode_ping
from p2pkv.pairing import Address
from p2pkv_proxy.app import LISTENER
from support.waiting import eventually

PING = Ping(type="P", http_address="127.0.0.1:9", zmq_address="127.0.0.1:10", model="m")


async def serves(deployment: Deployment) -> None:
    """It still takes pings, and serves."""
    before = len(deployment.routable("D"))
    await deployment.add("D")
    if before == 0:
        await deployment.add("P")
    await deployment.ready(prefill=1, decode=before + 1)
    assert (await deployment.post()).status == 200


async def test_every_truncation_and_wrong_value_of_a_ping(lonely: Deployment) -> None:
    wire = encode_ping(PING)
    frames = [wire[:length] for length in range(len(wire))] + [frame for frame in DEEP if len(frame) < 4000]
    fields = msgspec.to_builtins(PING)
    wrong = (-1, 1 << 63, "x" * 1000, [[]] * 50, {"type": "P"}, b"\x00", ["x"] * 100)
    frames += [msgspec.msgpack.encode(fields | {name: value}) for name in fields for value in wrong]
    with dealer(Address.parse(lonely.discovery)) as socket:
        for frame in frames:
            socket.send(frame)
        await eventually(lambda: lonely.refused == len(frames))
    assert lonely.registry.known("P") == []
    await serves(lonely)


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


@pytest.mark.parametrize("kind", RAW)
async def test_raw_bytes(lonely: Deployment, kind: str) -> None:
    with shout(Address.parse(lonely.discovery), RAW[kind]):
        await serves(lonely)


async def test_idle_connections_are_closed(lonely: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ten seconds that the page gives; here after one."""
    assert lonely.app[LISTENER]._router.getsockopt(zmq.HANDSHAKE_IVL) == 10_000
    monkeypatch.setattr(security, "HANDSHAKE_SECONDS", 1.0)
    async with deployed("concurrent") as deployment:
        place = Address.parse(deployment.discovery)
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(shout(place, b""))
            await serves(deployment)
            await eventually(lambda: deployment.app[LISTENER].shut_out >= 200)
        await serves(deployment)


async def test_the_tasks_of_the_listener_outlive_what_they_meet(lonely: Deployment) -> None:
    """Even a fault of ours in taking a ping in."""

    failed = asyncio.Event()

    def fail(ping: Ping, source: object) -> None:
        failed.set()
        raise RuntimeError("made up")

    listener = lonely.app[LISTENER]
    take, listener._take = listener._take, fail
    with dealer(Address.parse(lonely.discovery)) as socket:
        socket.send(encode_ping(PING))
        await eventually(failed.is_set)
    listener._take = take
    await serves(lonely)
