"""Responses of /v1/responses that go on with one before, which a single D has."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from proxy_behaviours import Seen, event_stream
from proxy_fakes import Deployment, deployed, filter_of, join, ping

from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.http import ProxyError
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.models import StoredResponses
from p2pkv_proxy.relay import AnswerFilter, Scrubber
from p2pkv_proxy.routing import Choice

PATH = "/v1/responses"


class Store:
    """What vLLM does with an instance's responses, by its ids."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    async def __call__(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.body
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.made:
            why = {"message": f"Response with id '{previous}' not found.", "type": "X", "code": 404}
            return web.json_response({"error": why}, status=404)
        answer = {
            "id": body["request_id"],
            "object": "response",
            "status": "completed",
            "output": [*self.made.get(previous, []), body["input"]],
            "previous_response_id": previous,
        }
        if body.get("store", True):
            self.made[body["request_id"]] = answer["output"]
        if not body.get("stream"):
            return web.json_response(answer)
        response = await event_stream(request)
        for name in ("response.created", "response.output_text.delta", "response.completed"):
            event = {"type": name, "response": answer, "delta": "x"}
            await response.write(f"event: {name}\ndata: {json.dumps(event)}\n\n".encode())
        return response


@asynccontextmanager
async def stores(dispatch: Dispatch, decode: int, **more: Any) -> AsyncIterator[Deployment]:
    async with deployed(dispatch, prefill=1, decode=decode, **more) as deployment:
        for each in deployment.decodes:
            each.behaviour = Store()
        yield deployment


async def respond(deployment: Deployment, text: str, previous: str | None = None, **more: Any) -> Any:
    """The response, as the client knows it."""
    body = {"model": "tiny", "input": text, "previous_response_id": previous, **more}
    answer = await deployment.post(body, PATH)
    said = await answer.text()
    assert answer.status == 200, said
    assert "_addr_" not in said
    if not more.get("stream"):
        return json.loads(said)
    shown = [json.loads(line[6:])["response"] for line in said.split("\n") if line.startswith("data: ")]
    assert len(shown) == 3 and shown[0] == shown[2]
    return shown[2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_at_the_d_that_has_it(dispatch: Dispatch, stream: bool) -> None:
    async with stores(dispatch, decode=3) as deployment:
        said: dict[str, Any] = {}
        for turn in range(4):
            for who in "abc":
                before = said.get(who, {"id": None, "output": []})
                said[who] = answer = await respond(deployment, f"{who}{turn}", before["id"], stream=stream)
                assert answer["output"] == [f"{who}{each}" for each in range(turn + 1)]
                assert answer["previous_response_id"] == before["id"]
        assert len(deployment.p.requests) == 3, "of those that go on with one P does not know the prompt"
        assert deployment.proxy.counters.decode_alone == 0, "which costs no place of D's share for prompts"


async def test_it_is_said_why_one_cannot_go_on(dispatch: Dispatch) -> None:
    async with stores(dispatch, decode=2) as deployment:
        first = (await respond(deployment, "a"))["id"]
        body = {"model": "tiny", "input": "b"}
        why = await deployment.refusal(400, {**body, "previous_response_id": "resp_" + "0" * 32}, PATH)
        assert "not found" in why and "this proxy has not passed it on" in why
        (holder,) = (each for each in deployment.decodes if each.requests)
        await deployment.goodbye(holder)
        why = await deployment.refusal(400, {**body, "previous_response_id": first}, PATH)
        assert first in why and "takes no requests any more" in why
        (other,) = (each for each in deployment.decodes if each is not holder)
        assert not other.requests, "it could only have said that it does not know it"


async def test_what_was_not_stored_is_not_looked_for(dispatch: Dispatch) -> None:
    """A vLLM that stores nothing says so by the client's id."""
    async with stores(dispatch, decode=1) as deployment:
        first = (await respond(deployment, "a"))["id"]
        unstored = (await respond(deployment, "a", store=False))["id"]
        body = {"model": "tiny", "input": "b", "previous_response_id": unstored}
        assert "not found" in await deployment.refusal(400, body, PATH)
        deployment.d.behaviour = Store()
        assert f"'{first}' not found" in await deployment.refusal(
            404, body | {"previous_response_id": first}, PATH
        )


@pytest.mark.parametrize("background", [True, "true", 1])
async def test_nothing_is_answered_in_the_background(dispatch: Dispatch, background: Any) -> None:
    """It could not be fetched."""
    async with stores(dispatch, decode=1) as deployment:
        body = {"model": "tiny", "input": "b"}
        why = await deployment.refusal(400, {**body, "background": background}, PATH)
        assert "`background` is not supported" in why
        assert not deployment.p.requests and not deployment.d.requests
        await deployment.serves(1, {**body, "background": False}, PATH)


def test_the_oldest_are_forgotten() -> None:
    registry = Registry()
    decode, stored = join(registry, ping("D")), StoredResponses(registry, most=2)
    for number in range(3):
        stored.note(f"resp_{number}", decode, f"resp_at_d_{number}")
    assert stored.find("resp_2", 0.0) == (decode, "resp_at_d_2")
    with pytest.raises(ProxyError, match="'resp_0' not found"):
        stored.find("resp_0", 0.0)


def cut(text: bytes, size: int) -> Iterator[bytes]:
    yield from (text[at : at + size] for at in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_both_ids_are_replaced_wherever_the_answer_is_cut(size: int) -> None:
    ids = {"the new one's id, which is long": "new", "id of the previous": "before"}
    (old, new), previous = ids.items()
    scrubber = Scrubber(Choice(None, join(Registry(), ping("D"))), old, new, previous)
    text = "".join(f"{word} {old} {previous[0]}{old} {previous[0]}" for word in "abc")
    watch = AnswerFilter(PATH, scrubber, streamed=False)
    got = b"".join(watch.feed(piece) for piece in cut(text.encode(), size)) + watch.flush()
    assert got.decode() == text.replace(old, new).replace(*previous)
    assert filter_of(PATH).feed(b"x") == b""
