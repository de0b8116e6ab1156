"""What P, D and the client each get of a request that goes well, and what a client gets wrong, and hears."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st
from proxy_behaviours import (
    DONE,
    Seen,
    after,
    answer_json,
    completion,
    event,
    event_stream,
    never,
    stream_of,
    telling,
)
from proxy_fakes import Deployment, deployed, error_of, filter_of, join, quiet
from test_failures import shows_no_address

from p2pkv.control.discovery import Ping
from p2pkv.pairing import Address, find_pair
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.relay import AnswerFilter, Scrubber
from p2pkv_proxy.routing import Choice
from support.waiting import eventually

HEX = re.compile(r"[0-9a-f]{32}")


async def test_both_get_one_fresh_id_that_names_them(either: Deployment) -> None:
    for _ in range(2):
        await either.post()
    first, second = either.p.requests
    assert [seen.request_id for seen in either.d.requests] == [first.request_id, second.request_id]
    assert first.request_id != second.request_id
    pair = find_pair(first.request_id)
    assert pair is not None
    assert (pair.prefill, pair.decode) == tuple(Address.parse(i.zmq_address) for i in (either.p, either.d))
    assert str(pair) == first.request_id


async def test_each_gets_its_body(either: Deployment) -> None:
    raw = b'{"model": "tiny",  "prompt": "hi", "max_tokens": 50, "n": 2, "stream": false}'
    async with either.client.post(f"{either.url}/v1/completions", data=raw) as response:
        assert response.status == 200
    assert either.d.requests[0].raw == raw
    assert either.p.requests[0].body == {
        "model": "tiny",
        "prompt": "hi",
        "max_tokens": 1,
        "n": 1,
        "stream": False,
    }


async def test_the_clients_headers_reach_both(either: Deployment) -> None:
    headers = {
        "Authorization": "Bearer mine",
        "X-Custom": "1",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "no",
        "TE": "trailers",
        "Proxy-Authorization": "no",
        "X-data-parallel-rank": "7",
        "X-Vllm-Priority": "-1000",
        "Endpoint-Load-Metrics-Format": "TEXT",
    }
    await either.post(headers=headers)
    for instance in (either.p, either.d):
        got = instance.requests[0].headers
        assert (got["Authorization"], got["X-Custom"]) == ("Bearer mine", "1")
        assert not {"X-Hop", "TE", "Proxy-Authorization", "X-data-parallel-rank"} & set(got)
        assert not {"X-Vllm-Priority", "Endpoint-Load-Metrics-Format"} & set(got), "they control vLLM"
        assert got["Host"] == instance.http_address


async def test_the_clients_own_id_comes_back_and_goes_nowhere(either: Deployment) -> None:
    mine = "___prefill_addr_6.6.6.6:1___decode_addr_6.6.6.6:2_" + "0" * 32
    response = await either.post(headers={"X-Request-Id": mine})
    assert response.headers.getall("X-Request-Id") == [mine]
    for instance in (either.p, either.d):
        assert instance.requests[0].headers.getall("X-Request-Id") != [mine]
        assert "6.6.6.6" not in instance.requests[0].request_id


async def test_without_an_id_of_its_own_the_client_gets_the_one_in_the_answer(either: Deployment) -> None:
    response = await either.post()
    unique = response.headers["X-Request-Id"]
    assert HEX.fullmatch(unique)
    assert (await response.json())["id"] == f"cmpl-{unique}"
    assert either.d.requests[0].request_id.endswith(unique)


async def test_no_address_in_body_or_headers(either: Deployment) -> None:
    async def telltale(request: web.Request, seen: Seen) -> web.StreamResponse:
        headers = {
            "X-Request-Id": seen.request_id,
            "X-Served-By": either.d.http_address,
            "X-Trace": f"a {seen.request_id} b",
        }
        return web.json_response(completion(seen), headers=headers)

    either.d.behaviour = telltale
    response = await either.post()
    shown = await response.text() + str(response.headers)
    assert shows_no_address(either, shown)
    assert response.headers["X-Trace"].startswith("a ")


async def test_concurrent_calls_both_at_once(concurrent: Deployment) -> None:
    meet = asyncio.Barrier(2)

    async def together(request: web.Request, seen: Seen) -> web.StreamResponse:
        await meet.wait()  # each waits until the other has been called too
        return await answer_json(request, seen)

    concurrent.p.behaviour = concurrent.d.behaviour = together
    assert (await concurrent.post()).status == 200


async def test_sequential_calls_d_when_p_has_ended(sequential: Deployment) -> None:
    release = asyncio.Event()

    async def returns(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response(completion(seen, kv_transfer_params={"remote_block_ids": [1, 2]}))

    sequential.p.behaviour = after(release, returns)
    asking = await sequential.under_way(sequential.p)
    assert sequential.d.requests == []
    release.set()
    assert (await asking).status == 200
    assert sequential.p.requests[0].answered
    assert sequential.d.requests[0].body["kv_transfer_params"] == {"remote_block_ids": [1, 2]}
    assert sequential.d.requests[0].body["max_tokens"] == 5


async def test_a_stream_is_relayed_as_it_comes(either: Deployment) -> None:
    release = asyncio.Event()
    either.d.behaviour = stream_of("first", release, "second", DONE)
    response = await either.post({"prompt": "x", "stream": True})
    assert response.content_type == "text/event-stream"
    first = await response.content.readuntil(b"\n\n")
    assert b"first" in first
    release.set()
    rest = await response.content.read()
    assert b"second" in rest
    assert rest.endswith(DONE)
    assert shows_no_address(either, (first + rest).decode())
    assert either.p.requests[0].body["stream"] is False


async def test_an_id_cut_by_chunks_is_still_rewritten(either: Deployment) -> None:
    async def drip(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        for piece in re.findall(rb"(?s).{1,7}", event(seen, "x") * 3):
            await response.write(piece)
            await asyncio.sleep(0)  # so that the pieces travel by themselves
        return response

    either.d.behaviour = drip
    response = await either.post({"prompt": "x", "stream": True})
    text = await response.text()
    assert text.count(f"cmpl-{response.headers['X-Request-Id']}") == 3
    assert shows_no_address(either, text)


@pytest.mark.parametrize("fields", [{"use_beam_search": True}, {"echo": True}, {"prompt_logprobs": 1}])
async def test_what_p_cannot_help_with_goes_to_d_alone(either: Deployment, fields: dict[str, Any]) -> None:
    response = await either.post({"prompt": "x", **fields})
    assert response.status == 200
    assert HEX.fullmatch(either.d.requests[0].request_id)
    assert (await response.json())["id"] == f"cmpl-{either.d.requests[0].request_id}"
    assert either.p.requests == []


async def test_what_is_none_of_ps_business_needs_no_p() -> None:
    async with deployed("concurrent", decode=1, limits=Limits(alone_share=0)) as deployment:
        assert (await deployment.post({"prompt": "x", "echo": True})).status == 200
        assert (await deployment.post({"prompt": "x"})).status == 503


async def test_p_may_end_after_d_has_answered(concurrent: Deployment) -> None:
    release = asyncio.Event()
    concurrent.p.behaviour = after(release, answer_json)
    assert (await concurrent.post()).status == 200
    instance = concurrent.known(concurrent.p)
    assert instance.in_flight == 1
    release.set()
    await eventually(lambda: instance.in_flight == 0)
    assert concurrent.p.requests[0].answered
    assert not concurrent.p.requests[0].aborted


async def test_a_p_that_does_not_end_is_closed_after_a_while(
    concurrent: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = asyncio.Event()
    monkeypatch.setattr("p2pkv_proxy.attempt._GRACE_SECONDS", 0.1)
    concurrent.p.behaviour, concurrent.d.behaviour = telling(called, never), after(called, answer_json)
    assert (await concurrent.post()).status == 200
    await eventually(lambda: concurrent.p.requests[0].aborted)
    await quiet(concurrent)


async def test_many_requests_spread_and_leave_nothing_behind() -> None:
    async with deployed("concurrent", prefill=2, decode=3) as deployment:
        responses = await asyncio.gather(*(deployment.post() for _ in range(30)))
        assert [response.status for response in responses] == [200] * 30
        assert [len(d.requests) for d in deployment.decodes] == [10] * 3
        assert [len(p.requests) for p in deployment.prefills] == [15] * 2
        everyone = deployment.registry.known("P") + deployment.registry.known("D")
        await eventually(lambda: all(instance.in_flight == 0 for instance in everyone))


async def test_an_end_that_looks_like_the_start_of_its_id_arrives(either: Deployment) -> None:
    async def cut(request: web.Request, seen: Seen) -> web.StreamResponse:
        ends.append(b"so it goes: " + seen.request_id[:5].encode())
        return web.Response(body=ends[-1])

    ends: list[bytes] = []
    either.d.behaviour = cut
    assert await (await either.post()).read() == ends[0]


async def test_cookies_are_each_clients_own(either: Deployment) -> None:
    async def cookie(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.json_response(completion(seen))
        response.set_cookie("who", "first")
        return response

    either.d.behaviour = cookie
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as other:
        async with other.post(f"{either.url}/v1/completions", json={"prompt": "x"}) as response:
            assert "who" in response.cookies
        async with other.post(f"{either.url}/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 200
    assert "Cookie" not in either.d.requests[1].headers


@pytest.mark.parametrize("encode", [json.dumps, lambda body: json.dumps(body, indent=4)])
async def test_an_answer_that_is_no_stream_arrives_whole(
    either: Deployment, encode: Callable[[Any], str]
) -> None:
    async def big(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(text=encode(completion(seen, "y" * 300_000)), content_type="application/json")

    either.d.behaviour = big
    response = await either.post()
    assert (await response.json())["choices"][0]["text"] == "y" * 300_000


# What a client gets wrong.


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"", b"\xff\xfe", b"[" * 5000])
async def test_what_is_no_json_object_is_a_400(either: Deployment, raw: bytes) -> None:
    async with either.client.post(f"{either.url}/v1/completions", data=raw) as response:
        assert response.status == 400
        assert "not a JSON object" in (await error_of(response))["message"]
    assert either.p.requests == either.d.requests == []


async def test_too_large_a_body_is_a_413() -> None:
    async with deployed("concurrent", 1, 1, max_body=1000) as deployment:
        response = await deployment.post({"prompt": "x" * 2000})
        assert response.status == 413
        assert "1000 bytes" in (await error_of(response))["message"]
        assert deployment.d.requests == []
        body = {"prompt": ""}
        assert (await deployment.post(body | {"prompt": "x" * (1000 - len(json.dumps(body)))})).status == 200


async def test_a_body_that_could_never_be_held_is_a_413_too() -> None:
    async with deployed("concurrent", 1, 1, limits=Limits(max_held=1000)) as deployment:
        response = await deployment.post({"prompt": "x" * 2000})
        assert response.status == 413
        assert "1000 bytes" in (await error_of(response))["message"]
        assert deployment.proxy.counters.refused_full == deployment.proxy.intake.held == 0


async def test_other_paths_are_a_404_that_says_what_there_is(lonely: Deployment) -> None:
    async with lonely.client.get(f"{lonely.url}/v1/rerank") as response:
        assert response.status == 404
        message = (await error_of(response))["message"]
    assert "There is no /v1/rerank here" in message
    assert "/v1/chat/completions" in message


async def test_every_answer_gives_the_clients_id_back(lonely: Deployment) -> None:
    mine = {"X-Request-Id": "mine"}
    async with lonely.client.get(f"{lonely.url}/nowhere", headers=mine) as response:
        assert response.headers["X-Request-Id"] == "mine"
    assert (await lonely.post(headers=mine)).headers["X-Request-Id"] == "mine"


# The streaming replacement of an id equals bytes.replace, however the stream is cut.


MINTED = b"___prefill_addr_127.0.0.1:21001___decode_addr_[::1]:21002_" + b"0123456789abcdef" * 2
CLEAN = b"0123456789abcdef" * 2
# Small alphabets make overlaps and near misses likely.
STREAM = st.lists(st.sampled_from([b"_", b"a", b"__a", b"ab"]), max_size=30).map(b"".join)


def minted(old: bytes = MINTED, new: bytes = CLEAN, *, streamed: bool) -> AnswerFilter:
    return filter_of("/v1/completions", streamed=streamed, old=old.decode(), new=new.decode())


def rewritten(chunks: list[bytes], old: bytes = MINTED, new: bytes = CLEAN) -> set[bytes]:
    """As an event stream, and as a long JSON."""
    filters = [minted(old, new, streamed=streamed) for streamed in (True, False)]
    return {b"".join([*map(each.feed, chunks), each.flush()]) for each in filters}


def chunks_of(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def test_every_cut_in_two_of_a_stream_with_the_id() -> None:
    stream = b'data: {"id": "cmpl-' + MINTED + b'"}\n\ndata: {"id": "cmpl-' + MINTED + b'-0"}\n\n'
    expected = stream.replace(MINTED, CLEAN)
    for cut in range(len(stream) + 1):
        assert rewritten([stream[:cut], stream[cut:]]) == {expected}


def test_byte_by_byte() -> None:
    stream = b"__" + MINTED + MINTED[:-1] + MINTED + b"_"
    chunks = [bytes([byte]) for byte in stream]
    assert rewritten(chunks) == {stream.replace(MINTED, CLEAN)}


@settings(deadline=None, max_examples=300)
@given(
    STREAM,
    st.binary(min_size=1, max_size=4).map(lambda b: bytes(b"_ab"[x % 3] for x in b)),
    st.lists(st.integers(0, 90)),
)
@example(b"a_a_a_a", b"a_a", [3])
def test_any_stream_any_cuts(stream: bytes, old: bytes, cuts: list[int]) -> None:
    assert rewritten(chunks_of(stream, cuts), old, b"NEW") == {stream.replace(old, b"NEW")}


def test_no_more_waits_than_may_begin_the_id() -> None:
    whole = b'data: {"id": "' + MINTED + b'"}\n\n'
    assert minted(streamed=True).feed(whole) == whole.replace(MINTED, CLEAN)
    long = b"x" * 100 + MINTED + b"y" * 200
    assert len(minted(streamed=False).feed(long)) > 300 + len(CLEAN) - len(MINTED)
    event = b"data: " + b"z" * (2 << 20) + long
    passed = minted(streamed=True).feed(event)
    assert CLEAN in passed and len(event) - len(passed) < 2 * len(MINTED)


@pytest.mark.parametrize("named", ["[::1]:21001", "[0:0:0:0:0:0:0:1]:21001", "[::1]:8100"])
def test_an_error_names_no_instance_however_it_spells_the_address(named: str) -> None:
    """A ping may spell it in full, and what vLLM writes is the short form."""
    message = Ping(type="D", http_address="[::1]:8100", zmq_address="[0:0:0:0:0:0:0:1]:21001")
    scrubber = Scrubber(Choice(None, join(Registry(), message)), "the id", "mine")
    assert scrubber.text(f"the id: no KV from {named}") == "mine: no KV from (decode instance)"
