"""The ping, its answer, and the thread that pings: whatever is no ping is refused and nothing else. The port
among strangers, with a secret and without."""

import asyncio
import contextlib
import logging
import socket as socket_module
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_behaviours import answer_json
from proxy_fakes import Deployment, FakeInstance, deployed, pinging, serve

from p2pkv.control import security
from p2pkv.control.discovery import (
    DISCOVERY_VERSION,
    MAX_PARTNERS,
    MAX_PARTNERS_BYTES,
    MAX_PING_BYTES,
    BadPartners,
    BadPing,
    Ping,
    decode_partners,
    decode_ping,
    encode_partners,
    encode_ping,
    goodbye,
)
from p2pkv.control.pinger import Pinger
from p2pkv.control.security import Members
from p2pkv.demo.processes import free_ports
from p2pkv.pairing import Address, find_pair
from support.classic_router import ClassicRouter, by_aiohttp
from support.hostile import RAW, dealer, router, shout
from support.waiting import eventually, wait_for

CLASSIC = {"type": "P", "http_address": "10.0.0.1:8100", "zmq_address": "10.0.0.1:21001"}
OURS = Ping(
    type="D",
    http_address="[fd00::1]:8200",
    zmq_address="node-7:22001",
    version=DISCOVERY_VERSION,
    incarnation="abc",
    model="m",
    dp_size=2,
    dp_rank=1,
    protocol=2,
    fit="protocol=2, weights=ab12",
    partners=64,
)


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def test_missing_fields_have_defaults_and_unknown_ones_are_ignored() -> None:
    ping = decode_ping(pack(CLASSIC))
    assert (ping.type, ping.http_address, ping.zmq_address) == ("P", "10.0.0.1:8100", "10.0.0.1:21001")
    assert (ping.version, ping.incarnation, ping.model, ping.leaving) == (0, "", "", False)
    assert decode_ping(pack(CLASSIC | {"notify_port": 1, "handshake": {"x": [1]}})) == ping
    assert (ping.protocol, ping.fit, ping.partners) == (0, "", 0)


def test_old_routers_find_their_fields() -> None:
    for ping in (OURS, goodbye(OURS)):
        assert decode_ping(encode_ping(ping)) == ping
    fields = msgspec.msgpack.decode(encode_ping(goodbye(OURS)))
    assert {name: fields[name] for name in CLASSIC} == {
        "type": "D",
        "http_address": "[fd00::1]:8200",
        "zmq_address": "node-7:22001",
    }
    assert (fields["dp_size"], fields["tp_size"], fields["transfer_mode"]) == (2, 1, "WRITE")


@pytest.mark.parametrize(
    "change",
    [
        *({"type": kind} for kind in ("X", 3)),
        *({"http_address": each} for each in ("10.0.0.1", "10.0.0.1:0", "10.0.0.1:80/admin", "user@host:80")),
        {"http_address": "a" * 301 + ":1"},
        *({"zmq_address": each} for each in (None, ["10.0.0.1:21001"])),
        *({"dp_size": 0}, {"tp_size": "1"}, {"leaving": 1}, {"incarnation": "x" * 65}, {"protocol": -1}),
        *({"partners": each} for each in (-1, True)),
        *({"fit": each} for each in ("x" * 513, "weights=a\nnext line of the log", "weights=\u00e9")),
        {"padding": "x" * MAX_PING_BYTES},
        b"", b"\x91" * 4000, b"\xc1", pack([]), pack(7), pack(CLASSIC) + b"\x00", b"\xff" * 99,
        *(pack({name: CLASSIC[name] for name in CLASSIC if name != missing}) for missing in CLASSIC),
    ],
)  # fmt: skip
def test_what_is_no_ping_is_refused(change: dict[str, Any] | bytes) -> None:
    with pytest.raises(BadPing, match="discovery ping"):
        decode_ping(change if isinstance(change, bytes) else pack(CLASSIC | change))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    frame = bytearray(encode_ping(OURS))
    frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))])


MAPS = st.dictionaries(
    st.sampled_from([*CLASSIC, "dp_size", "version", "model", "leaving", "protocol", "fit", "junk"]),
    st.none()
    | st.booleans()
    | st.integers().filter(lambda n: -(2**63) <= n < 2**64)
    | st.text(max_size=20)
    | st.binary(max_size=9),
)


@settings(max_examples=700)
@given(st.binary(max_size=200) | mutated() | MAPS.map(lambda fields: pack(CLASSIC | fields)))
def test_any_frame_is_a_ping_or_refused(frame: bytes) -> None:
    try:
        ping = decode_ping(frame)
    except BadPing:
        return
    assert decode_ping(encode_ping(ping)) == ping


SOME = ("10.0.0.1:21001", "[fd00::1]:21001", "node-7:22001")


def test_an_answer_comes_back_as_it_was_and_may_say_more_than_we_read() -> None:
    for addresses in ((), SOME):
        assert decode_partners(encode_partners(addresses)) == addresses
    assert decode_partners(pack({"partners": SOME, "since": "another version"})) == SOME


@pytest.mark.parametrize("host", ["10.0.0.1", ".".join(["a" * 40] * 6)])
def test_an_answer_holds_what_there_is_room_for(host: str) -> None:
    frame = encode_partners(f"{host}:{port}" for port in range(1, 3 * MAX_PARTNERS))
    found = decode_partners(frame)
    assert len(frame) <= MAX_PARTNERS_BYTES and 30 < len(found) <= MAX_PARTNERS
    assert found == tuple(f"{host}:{port}" for port in range(1, len(found) + 1))


@pytest.mark.parametrize(
    "frame",
    [
        *(b"", b"\xc1", b"\x91" * 4000, b"x" * (MAX_PARTNERS_BYTES + 1)),
        *(pack([]), pack({}), encode_ping(OURS)),
        *(pack({"partners": wrong}) for wrong in ("10.0.0.1:21001", ["nowhere"], [1], ["a:0"], ["a:1/x"])),
        pack({"partners": ["a:1"] * (MAX_PARTNERS + 1)}),
        encode_partners(SOME) + b"\x00",
        encode_partners(SOME)[:-1],
    ],
)
def test_what_is_no_answer_is_refused(frame: bytes) -> None:
    with pytest.raises(BadPartners):
        decode_partners(frame)


# The pinger thread against a real ROUTER, present, absent and late.


PING = Ping(type="P", http_address="127.0.0.1:8100", zmq_address="127.0.0.1:21001", incarnation="one")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "p2pkv-pinger"]


def test_what_closes_connections_before_a_proxy_that_was_there_is_not_dialed_without_pause() -> None:
    """As a forwarder does whose proxy is away. Nothing shows that none will come: a second's look."""
    with router() as (socket, address):
        pinger = Pinger(str(address), PING, 0.05)
        pinger.start()
        assert decode_ping(socket.recv_multipart()[1]) == PING
    try:
        with socket_module.create_server((address.host, address.port)) as forwarder:
            forwarder.settimeout(5.0)
            forwarder.accept()[0].close()
            came, end = 1, time.monotonic() + 1.0
            while (left := end - time.monotonic()) > 0:
                forwarder.settimeout(left)
                with contextlib.suppress(TimeoutError):
                    forwarder.accept()[0].close()
                    came += 1
    finally:
        pinger.stop()
    assert came < 5


@pytest.mark.parametrize("there", [False, True])
def test_a_stop_while_it_waits_or_before_it_starts_is_quick(there: bool) -> None:
    Pinger("127.0.0.1:9", PING).stop()
    with router() as (socket, address):
        if not there:
            socket.close()
        with pinging(str(address), PING, 60.0) as pinger:
            if there:
                socket.recv_multipart()
            begin = time.monotonic()
            pinger.stop()
            assert time.monotonic() - begin < 2.0
            assert threads() == []
            pinger.stop()  # again: no harm
            if there:
                assert decode_ping(socket.recv_multipart()[1]) == goodbye(PING)


@pytest.mark.parametrize("asks", [True, False])
def test_of_what_a_proxy_answers_a_d_that_asked_hears_and_others_nothing(asks: bool) -> None:
    heard: list[tuple[str, ...]] = []
    ping = msgspec.structs.replace(PING, type="D", partners=4 if asks else 0)
    with router() as (socket, address), pinging(str(address), ping, on_partners=heard.append):
        peer, _ = socket.recv_multipart()
        noise = (b"", b"hello", encode_ping(PING), *((b"x" * 5000,) * 20 if not asks else ()))
        for frame in (*noise, encode_partners(["a:1"]), *noise, encode_partners(["a:1", "b:2"])):
            socket.send_multipart([peer, frame])
        socket.send_multipart([peer, encode_partners(["c:3"]), b"and another frame"])
        if asks:
            wait_for(lambda: len(heard) == 3, what="the answers")
        # A reply too long costs the connection, so the pings go on under a new identity.
        for _ in range(3):
            assert decode_ping(socket.recv_multipart()[1]) == ping
    assert heard == ([("a:1",), ("a:1", "b:2"), ("c:3",)] if asks else [])


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "127.0.0.1:x"])
def test_what_cannot_be_pinged_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Pinger(address, PING)


# What other people's routers need, and send. tests/vllm/test_routers.py has them in front of real servers.


LIFE = 1.0


@dataclass
class Classic:
    """The stand-in with a P and a D whose pings are those of real instances."""

    url: str
    discovery: str
    router: ClassicRouter
    p: FakeInstance
    d: FakeInstance
    p_pinger: Pinger


@pytest.fixture
async def classic() -> AsyncIterator[Classic]:
    async with contextlib.AsyncExitStack() as stack:
        router = ClassicRouter(LIFE)
        discovery = f"127.0.0.1:{free_ports()}"
        task = asyncio.create_task(router.discover(f"tcp://{discovery}"))
        stack.callback(task.cancel)
        server = await stack.enter_async_context(TestServer(by_aiohttp(router)))
        instances = FakeInstance("P"), FakeInstance("D")
        for each in instances:
            await serve(stack, each)
        pinger, _ = (stack.enter_context(pinging(discovery, each.ping)) for each in instances)
        await eventually(lambda: bool(router.there("P") and router.there("D")), "both are registered")
        yield Classic(str(server.make_url("")).rstrip("/"), discovery, router, *instances, pinger)


async def test_a_request_goes_to_p_and_then_to_d(classic: Classic) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 5}
    async with aiohttp.ClientSession() as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            async with client.post(classic.url + path, json=body) as response:
                assert response.status == 200 and (await response.json())["choices"]
    assert [seen.body["max_tokens"] for seen in classic.p.requests] == [1, 1]
    assert [seen.body for seen in classic.d.requests] == [body, body]
    for on_p, on_d in zip(classic.p.requests, classic.d.requests, strict=True):
        pair = find_pair(on_p.request_id)
        assert on_p.request_id == on_d.request_id and pair is not None
        assert (str(pair.prefill), str(pair.decode)) == (classic.p.zmq_address, classic.d.zmq_address)


async def test_a_goodbye_does_not_end_its_discovery(classic: Classic) -> None:
    # Its discovery dies of a message that it does not know; ours says goodbye in a ping.
    await asyncio.to_thread(classic.p_pinger.stop)
    await eventually(lambda: not classic.router.there("P"), "P's life has ended")
    assert classic.router.ended is None and classic.router.there("D")
    with pinging(classic.discovery, classic.p.ping):
        await eventually(lambda: bool(classic.router.there("P")), "P is back")
    assert classic.router.ended is None and classic.p.behaviour is answer_json


FORGED = Ping(type="P", http_address="127.0.0.1:9", zmq_address="127.0.0.1:10", version=1)
MEMBERS, OTHERS = Members(b"a secret of the tests"), Members(b"another secret of the tests")


async def serves(deployment: Deployment) -> None:
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


async def test_a_d_of_the_former_connector_gets_no_requests(lonely: Deployment) -> None:
    """Its engine waits in a step, for ever, for the KV of a prompt that no P computes."""
    with dealer(Address.parse(lonely.discovery)) as socket:
        socket.send(pack(CLASSIC | {"type": "D"}))
        await eventually(lambda: lonely.refused == 1)
    assert lonely.registry.known("D") == []


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
