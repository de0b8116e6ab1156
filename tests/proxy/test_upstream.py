"""One call to one instance, ended at the worst of moments."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict
from proxy_behaviours import Seen, event, event_stream
from proxy_fakes import FakeInstance, join, ping

from proxy.registry import Registry
from proxy.upstream import Call, CallFailed, Client


class Answer:
    """Knows whether it has been closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.asyncio
async def test_an_answer_that_comes_as_its_call_is_cancelled_is_closed() -> None:
    answer = Answer()

    class Session:
        async def post(self, *arguments: Any, **options: Any) -> Answer:
            # Runs before the caller is told of the answer.
            asyncio.get_running_loop().call_soon(asking.cancel)
            return answer

    instance = join(Registry(), ping("D"))
    call = Call(Session(), instance, "/v1/completions")

    async def ask() -> None:
        try:
            await call.open(b"", CIMultiDict())
        finally:
            call.close()

    asking = asyncio.create_task(ask())
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert answer.closed
    assert instance.in_flight == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [aiohttp.ConnectionTimeoutError, aiohttp.ServerDisconnectedError])
async def test_who_cannot_be_reached_waits_for_its_health_and_who_hangs_up_does_not(
    error: type[aiohttp.ClientError],
) -> None:
    class Session:
        async def post(self, *arguments: Any, **options: Any) -> Answer:
            raise error

    instance = join(Registry(), ping("D"))
    call = Call(Session(), instance, "/v1/completions")
    with pytest.raises(CallFailed):
        await call.open(b"", CIMultiDict())
    call.close()
    assert instance.healthy is (error is aiohttp.ServerDisconnectedError)


@pytest.mark.asyncio
@pytest.mark.parametrize(("number", "healthy"), [(errno.EMFILE, True), (errno.ECONNREFUSED, False)])
async def test_when_the_proxy_has_no_descriptors_left_nobody_is_to_blame(number: int, healthy: bool) -> None:
    class Session:
        async def post(self, *arguments: Any, **options: Any) -> Answer:
            key = ConnectionKey("10.0.0.1", 8100, False, True, None, None, None)
            raise aiohttp.ClientConnectorError(key, OSError(number, "no"))

    instance = join(Registry(), ping("D"))
    call = Call(Session(), instance, "/v1/completions")
    with pytest.raises(CallFailed):
        await call.open(b"", CIMultiDict())
    call.close()
    assert instance.healthy is healthy


@pytest.mark.asyncio
@pytest.mark.parametrize("dead_first", [True, False])
async def test_who_leaves_as_the_instance_dies_has_left(dead_first: bool) -> None:
    """Else its request would be tried at another instance, for nobody."""

    class Session:
        async def post(self, *arguments: Any, **options: Any) -> Answer:
            asked.set()
            await asyncio.Event().wait()
            return Answer()

    asked = asyncio.Event()
    instance = join(Registry(), ping("D"))
    call = Call(Session(), instance, "/v1/completions")
    asking = asyncio.create_task(call.open(b"", CIMultiDict()))
    await asked.wait()
    ends: list[Callable[[], object]] = [lambda: instance.dead(known=True), asking.cancel]
    for end in ends if dead_first else reversed(ends):
        end()
    with pytest.raises(asyncio.CancelledError):
        await asking
    call.close()
    assert instance.in_flight == 0


@pytest.mark.asyncio
async def test_a_connection_is_not_used_again_when_vllm_may_be_closing_it() -> None:
    """Its server does so after five idle seconds."""
    async with Client() as client:
        assert client.kept.connector is not None
        assert 1.0 <= client.kept.connector._keepalive_timeout <= 4.0


@pytest.mark.asyncio
async def test_a_host_that_vanishes_is_noticed_although_nothing_is_sent_to_it() -> None:
    """After a goodbye no ping is missed; the kernel asks whether its host is still there."""

    async def streams(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        await response.write(event(seen, "first"))
        await asyncio.Event().wait()
        return response

    instance = FakeInstance("D", behaviour=streams)
    await instance.start()
    try:
        async with Client() as client:
            url = f"http://{instance.http_address}/v1/completions"
            async with await client.post(url, b"{}", CIMultiDict({"X-Request-Id": "x"})) as answer:
                assert answer.connection is not None and answer.connection.transport is not None
                sock = answer.connection.transport.get_extra_info("socket")
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                idle, interval, probes = (sock.getsockopt(socket.IPPROTO_TCP, name) for name in names)
                assert 5 <= idle + interval * probes <= 30
    finally:
        await instance.stop()
