"""Several workers on one port: what they and the process that starts them do, all in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from proxy_fakes import DEADLINE, ping, until

from p2pkv.control.discovery import MAX_PING_BYTES, Ping, decode_ping, encode_ping
from proxy.admission import Limits
from proxy.registry import Registry
from proxy.serving import Proxy
from proxy.team import Ask, Channel, Drained, Link, Lost, Pinged, SharedSource, Stop, Team
from proxy.upstream import Client
from proxy.workers import Membership

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def following(**parts: Any) -> AsyncIterator[tuple[Registry, Channel, Link]]:
    """A worker's registry, and the parent's end of its channel."""
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours)
    link = Link(await Channel.over(theirs), asyncio.Event(), asyncio.Event())
    registry = Registry(life=10.0, lease=30.0)
    task = asyncio.create_task(Team(parts, link).follow(registry, lambda: 100.0, lambda: None))
    try:
        yield registry, channel, link
    finally:
        channel.close()
        await task
        link.channel.close()


def long_ping() -> Ping:
    """One that fits into a ping's bound only without the fields that it leaves out."""
    fields = {"type": "P", "http_address": "10.0.0.1:1", "zmq_address": "10.0.0.1:2", "model": ""}
    fields["transfer_mode"] = "\N{ROCKET}" * 500
    fields["model"] = "\N{EURO SIGN}" * 500
    fields["fit"] = "f" * (MAX_PING_BYTES - 4 - len(msgspec.msgpack.encode(fields | {"fit": ""})))
    return decode_ping(msgspec.msgpack.encode(fields))


async def test_a_ping_that_is_longer_once_its_defaults_are_written_reaches_the_workers() -> None:
    message = long_ping()
    assert len(encode_ping(message)) > MAX_PING_BYTES
    async with Client() as session, following() as (registry, channel, link):
        membership = Membership(Proxy(session, Registry(), "concurrent", Limits()), channel.send)
        membership.take(message, SharedSource())
        await until(lambda: registry.of(message) is not None, "the instance")
        assert not link.stop.is_set()


async def test_a_message_that_is_none_and_one_that_fails_do_not_end_a_worker() -> None:
    message = ping("D")
    async with following() as (registry, channel, link):
        channel._writer.write((3).to_bytes(4) + b"\xff\xff\xff")
        channel.send(Ask(1, "what nobody can say"))
        channel.send(Pinged(message))
        await until(lambda: registry.of(message) is not None, "the instance")
        assert not link.stop.is_set()


async def test_who_is_lost_is_not_alive_once_it_is_silent_and_comes_back_with_its_pings() -> None:
    message = ping("D")
    async with following() as (registry, channel, _):
        channel.send(Pinged(message))
        await until(lambda: bool(registry.known("D")), "the instance")
        (instance,) = registry.known("D")
        instance.healthy = True
        assert registry.routable("D", 115.0) == [instance], "silent, and its connection stands"
        channel.send(Lost(message))
        await until(lambda: not registry.routable("D", 115.0), "its loss")
        channel.send(Pinged(message))
        await until(lambda: bool(registry.routable("D", 115.0)), "its return")
        restarted = ping("D", incarnation="another")
        channel.send(Pinged(restarted))
        await until(lambda: bool(registry.of(restarted)), "its successor, under the same address")


async def test_a_drain_may_be_known_before_the_instance_and_the_end_of_the_parent_stops_a_worker() -> None:
    message = ping("D", incarnation="first")
    async with following() as (registry, channel, link):
        channel.send(Drained(message))
        channel.send(Pinged(message))
        await until(lambda: bool(registry.known("D")), "the instance")
        assert registry.known("D")[0].drained
        channel.send(Stop(hurry=True))
        await asyncio.wait_for(link.hurry.wait(), DEADLINE)
        assert not link.stop.is_set()
        channel.close()
        await asyncio.wait_for(link.stop.wait(), DEADLINE)
