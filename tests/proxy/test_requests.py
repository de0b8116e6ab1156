"""What P, D and the client each get of a request that goes well, and what a client gets wrong, and hears."""

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
from proxy_behaviours import DONE, Seen, Step, after, answer_json, answers, completion, never, stream_of
from proxy_fakes import Deployment, called, deployed, error_of, filter_of, join
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
    """A client without an id of its own gets the one in the answer."""
    await either.serves(1)
    response = await either.post()
    first, second = either.p.requests
    assert [seen.request_id for seen in either.d.requests] == [first.request_id, second.request_id]
    assert first.request_id != second.request_id
    pair = find_pair(first.request_id)
    assert (pair.prefill, pair.decode) == tuple(Address.parse(i.zmq_address) for i in (either.p, either.d))
    assert str(pair) == first.request_id
    unique = response.headers["X-Request-Id"]
    assert HEX.fullmatch(unique)
    assert (await response.json())["id"] == f"cmpl-{unique}"
    assert second.request_id.endswith(unique)


async def test_the_clients_headers_reach_both(either: Deployment) -> None:
    kept = {"Authorization": "Bearer mine", "X-Custom": "1", "traceparent": "x", "tracestate": "y=z"}
    headers = {
        **kept,
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
        assert {name: got[name] for name in kept} == kept
        assert not {"X-Hop", "TE", "Proxy-Authorization", "X-data-parallel-rank"} & set(got)
        assert not {"X-Vllm-Priority", "Endpoint-Load-Metrics-Format"} & set(got), "they control vLLM"
        assert got["Host"] == instance.http_address


async def test_no_address_in_body_or_headers(either: Deployment) -> None:
    def telltale(seen: Seen) -> web.StreamResponse:
        headers = {
            "X-Request-Id": seen.request_id,
            "X-Served-By": either.d.http_address,
            "X-Trace": f"a {seen.request_id} b",
        }
        return web.json_response(completion(seen), headers=headers)

    either.d.behaviour = answers(telltale)
    response = await either.post()
    shown = await response.text() + str(response.headers)
    assert shows_no_address(either, shown)
    assert response.headers["X-Trace"].startswith("a ")


async def test_sequential_calls_d_when_p_has_ended(sequential: Deployment) -> None:
    release = asyncio.Event()
    more = {"kv_transfer_params": {"remote_block_ids": [1, 2]}}
    returns = answers(lambda seen: web.json_response(completion(seen, **more)))
    sequential.p.behaviour = after(release, returns)
    asking = await sequential.under_way(sequential.p)
    assert sequential.d.requests == []
    release.set()
    assert (await asking).status == 200
    assert sequential.p.requests[0].answered
    assert sequential.d.requests[0].body.items() >= more.items()
    assert sequential.d.requests[0].body["max_tokens"] == 5


RETURNS = [b'data: {"choices":[{"text":"%s"}]}\r\n\r\n' % each for each in (b"first", b"second")]


@pytest.mark.parametrize(("first", "last", "end"), [("first", "second", b"\n\n"), (*RETURNS, b"\r\n\r\n")])
async def test_a_stream_is_relayed_as_it_comes(
    either: Deployment, first: Step, last: Step, end: bytes
) -> None:
    """Its events may end with carriage returns."""
    release = asyncio.Event()
    either.d.behaviour = stream_of(first, release, last, DONE)
    response = await either.post(stream=True)
    assert response.content_type == "text/event-stream"
    begin = await response.content.readuntil(end)
    assert b"first" in begin
    release.set()
    rest = await response.content.read()
    assert b"second" in rest and rest.endswith(DONE)
    assert shows_no_address(either, (begin + rest).decode())
    assert either.p.requests[0].body["stream"] is False


async def test_a_p_that_does_not_end_is_closed_after_a_while(
    concurrent: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv_proxy.attempt._GRACE_SECONDS", 0.1)
    concurrent.p.behaviour = never
    concurrent.d.behaviour = after(lambda: called(concurrent.p), answer_json)
    assert (await concurrent.post()).status == 200
    await eventually(lambda: concurrent.p.requests[0].aborted)


async def test_cookies_are_each_clients_own(either: Deployment) -> None:
    def cookie(seen: Seen) -> web.StreamResponse:
        response = web.json_response(completion(seen))
        response.set_cookie("who", "first")
        return response

    either.d.behaviour = answers(cookie)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as other:
        async with other.post(f"{either.url}/v1/completions", json={"prompt": "x"}) as response:
            assert "who" in response.cookies
        async with other.post(f"{either.url}/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 200
    assert "Cookie" not in either.d.requests[1].headers


@pytest.mark.parametrize("encode", [json.dumps, lambda body: json.dumps(body, indent=4)])
async def test_an_answer_without_stream_comes_whole(either: Deployment, encode: Callable[[Any], str]) -> None:
    def big(seen: Seen) -> web.StreamResponse:
        return web.Response(text=encode(completion(seen, "y" * 300_000)), content_type="application/json")

    either.d.behaviour = answers(big)
    response = await either.post()
    assert (await response.json())["choices"][0]["text"] == "y" * 300_000


@pytest.mark.parametrize("limits", [Limits(max_body=1000), Limits(max_held=1000)], ids=["body", "held"])
async def test_too_large_a_body_is_a_413(limits: Limits) -> None:
    async with deployed("concurrent", 1, 1, limits=limits) as deployment:
        assert "1000 bytes" in await deployment.refusal(413, {"prompt": "x" * 2000})
        assert deployment.d.requests == []
        assert deployment.proxy.counters.refused_full == deployment.proxy.intake.held == 0
        await deployment.serves(1, {"prompt": "x" * (1000 - len(json.dumps({"prompt": ""})))})


async def test_other_paths_are_a_404_that_says_what_there_is(lonely: Deployment) -> None:
    mine = {"X-Request-Id": "mine"}
    async with lonely.client.get(f"{lonely.url}/v1/rerank", headers=mine) as response:
        assert response.status == 404 and response.headers["X-Request-Id"] == "mine"
        message = (await error_of(response))["message"]
    assert "There is no /v1/rerank here" in message
    assert "/v1/chat/completions" in message
    assert (await lonely.post(headers=mine)).headers["X-Request-Id"] == "mine", "of a 503, too"


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


@settings(max_examples=300)
@given(
    STREAM,
    st.binary(min_size=1, max_size=4).map(lambda b: bytes(b"_ab"[x % 3] for x in b)),
    st.lists(st.integers(0, 90)),
)
@example(b"a_a_a_a", b"a_a", [3])
@example(b'data: {"id": "cmpl-' + MINTED + b'"}\n\ndata: {"id": "cmpl-' + MINTED + b'-0"}\n\n', MINTED, [50])
@example(b"__" + MINTED + MINTED[:-1] + MINTED + b"_", MINTED, [*range(300)])
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
