"""What the proxy knows of vLLM's HTTP servers, held against vLLM's own code: how each endpoint writes an
answer that it gives up, and which headers control it."""

import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import vllm
from fastapi.responses import JSONResponse
from multidict import CIMultiDict, CIMultiDictProxy
from proxy_fakes import filter_of, join, ping
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion import protocol as chats
from vllm.entrypoints.openai.completion import protocol as completions
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.sampling_params import SamplingParams

from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.relay import to_instance
from p2pkv_proxy.upstream import first_content, gave_up, is_servers_error

pytestmark = pytest.mark.vllm

TOKENS = {"abort": 0, "stop": 3, "length": 1}
"""That an answer has which ends for this reason, in these tests."""
each_reason = pytest.mark.parametrize("reason", TOKENS)
ECHO = {"finish_reason": "abort", "status": "cancelled"}


def usage(reason: str) -> chats.UsageInfo:
    return chats.UsageInfo(prompt_tokens=5, completion_tokens=TOKENS[reason], total_tokens=5 + TOKENS[reason])


def whole(answer: Any, **options: Any) -> bytes:
    """As vLLM's routers write it."""
    return bytes(JSONResponse(content=answer.model_dump(**options)).body)


def event(answer: Any) -> bytes:
    return f"data: {answer.model_dump_json(exclude_unset=True)}\n\n".encode()


def given_up_in(path: str, events: bytes) -> bool:
    watch = filter_of(path)
    watch.feed(events)
    return watch.given_up


@each_reason
def test_completions(reason: str) -> None:
    choice = completions.CompletionResponseChoice(index=0, text="x", finish_reason=reason)
    answer = completions.CompletionResponse(model="m", choices=[choice], usage=usage(reason))
    assert gave_up("/v1/completions", whole(answer)) is (reason == "abort")
    last = completions.CompletionResponseStreamChoice(index=0, text="", finish_reason=reason)
    events = event(completions.CompletionStreamResponse(model="m", choices=[last]))
    assert given_up_in("/v1/completions", events) is (reason == "abort")


def chat(reason: str) -> chats.ChatCompletionResponse:
    message = chats.ChatMessage(role="assistant", content="x")
    choice = chats.ChatCompletionResponseChoice(index=0, message=message, finish_reason=reason)
    return chats.ChatCompletionResponse(model="m", choices=[choice], usage=usage(reason))


def chat_chunks(reason: str) -> list[chats.ChatCompletionStreamResponse]:
    """With a usage at the end, as /v1/messages has it."""
    choices = [
        chats.ChatCompletionResponseStreamChoice(
            index=0, delta=chats.DeltaMessage(role="assistant", content="")
        ),
        chats.ChatCompletionResponseStreamChoice(index=0, delta=chats.DeltaMessage(content="x")),
        chats.ChatCompletionResponseStreamChoice(
            index=0, delta=chats.DeltaMessage(content=""), finish_reason=reason
        ),
    ]
    chunks = [chats.ChatCompletionStreamResponse(model="m", choices=[each]) for each in choices]
    chunks[0].usage = usage(reason)
    return [*chunks, chats.ChatCompletionStreamResponse(model="m", choices=[], usage=usage(reason))]


@each_reason
def test_chat_completions(reason: str) -> None:
    assert gave_up("/v1/chat/completions", whole(chat(reason))) is (reason == "abort")
    assert given_up_in("/v1/chat/completions", b"".join(map(event, chat_chunks(reason)))) is (
        reason == "abort"
    )


@each_reason
async def test_messages(reason: str) -> None:
    answer = object.__new__(AnthropicServingMessages).messages_full_converter(chat(reason))
    assert gave_up("/v1/messages", whole(answer, exclude_none=True)) is (reason == "abort")

    events = await message_events(*chat_chunks(reason))
    assert b"message_delta" in events and b"message_stop" in events
    assert given_up_in("/v1/messages", events) is (reason == "abort")


async def message_events(*chunks: Any) -> bytes:
    """Of the chunks of a chat: vLLM 0.33 makes them of these, 0.32 of their events."""
    newer = hasattr(AnthropicServingMessages, "chat_completion_stream_generator_raw")

    async def given() -> AsyncIterator[Any]:
        for each in chunks:
            yield each if newer else event(each).decode()
        if not newer:
            yield "data: [DONE]\n\n"

    made = object.__new__(AnthropicServingMessages).message_stream_converter(given())
    return "".join([each async for each in made]).encode()


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_mistakes_that_messages_show_in_the_stream(status: int) -> None:
    """With 0.32 none shows whose it is."""
    events = await message_events(create_error_response("no", status_code=HTTPStatus(status)))
    error = first_content(events)
    assert error["type"] == "error"
    assert is_servers_error(error) is (status >= 500 or error["error"]["type"] == "internal_error")


def response(status: Any, tokens: int) -> responses.ResponsesResponse:
    request = responses.ResponsesRequest(model="m", input="x", metadata=ECHO)
    return responses.ResponsesResponse.from_request(
        request,
        SamplingParams(max_tokens=5),
        model_name="m",
        created_time=1,
        output=[],
        status=status,
        usage=responses.ResponseUsage(
            input_tokens=5,
            output_tokens=tokens,
            total_tokens=5 + tokens,
            input_tokens_details=responses.InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            output_tokens_details=responses.OutputTokensDetails(reasoning_tokens=0),
        ),
    )


@pytest.mark.parametrize(
    ("status", "tokens", "given_up"),
    [
        ("cancelled", 3, True),
        ("completed", 0, True),
        ("incomplete", 0, True),
        ("completed", 3, False),
        ("incomplete", 1, False),
    ],
)
async def test_responses(status: str, tokens: int, given_up: bool) -> None:
    answer = response(status, tokens)
    raw = whole(answer, mode="json", by_alias=True)
    assert b'"finish_reason":"abort"' in raw, "the client's metadata"
    assert gave_up("/v1/responses", raw) is given_up

    kind, made = "completed", responses.ResponseCompletedEvent
    if status == "incomplete" and hasattr(responses, "ResponseIncompleteEvent"):  # vLLM 0.33
        kind, made = status, responses.ResponseIncompleteEvent

    async def ends() -> AsyncIterator[Any]:
        yield made(type=f"response.{kind}", sequence_number=1, response=answer)

    events = [each async for each in _convert_stream_to_sse_events(ends())]
    assert given_up_in("/v1/responses", "".join(events).encode()) is given_up


READ = re.compile(r"headers\.get\(\s*(?:\"([^\"]+)\"|([A-Z_]+))")


def test_headers_that_control_vllm_do_not_come_from_clients() -> None:
    """All that vLLM's servers read by name, but for those of its own clients and of other services."""
    folder = Path(vllm.__file__).parent / "entrypoints"
    source = "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
    named = {
        text or re.findall(rf'^{constant} = "([^"]+)"', source, re.MULTILINE)[0]
        for text, constant in READ.findall(source)
    }
    through = {"authorization", "content-type", "x-session-id"}
    proxys_own = {"x-request-id", "x-data-parallel-rank"}
    stopped = {"x-vllm-priority", "endpoint-load-metrics-format"}
    assert {name.lower() for name in named} <= through | proxys_own | stopped
    assert stopped <= {name.lower() for name in named}

    client = CIMultiDict(dict.fromkeys((*named, "X-Mine"), "5"))
    sent = to_instance(CIMultiDictProxy(client), join(Registry(), ping("D")), "id")
    kept = {name.lower(): value for name, value in sent.items()}
    assert not stopped & set(kept) and "x-data-parallel-rank" not in kept
    assert kept["x-request-id"] == "id" and kept["x-session-id"] == kept["x-mine"] == "5"
    assert kept["content-type"] == "5", "vLLM's check of pages that may not ask is the proxy's, too"
    unnamed = to_instance(CIMultiDictProxy(CIMultiDict()), join(Registry(), ping("D")), "id")
    assert unnamed["Content-Type"] == ""
