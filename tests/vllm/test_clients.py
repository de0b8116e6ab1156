"""What other people's clients do against one vLLM they do here: curl's ways to send a body, and what the SDKs
of OpenAI and Anthropic do beside what test_endpoints.py shows. The rest is in test_other_clients.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from support.servers.clients import (
    CURLS,
    adaptive,
    conversation,
    counts,
    curl,
    logprobs,
    refused,
    story,
    structured_chat,
    structured_response,
    text_of,
    thinking,
    tool_of_a_message,
)
from support.servers.fleet import BLOCK, MODEL_NAME, Fleet, Traffic, each_dispatch, kv_bytes

pytestmark = pytest.mark.usefixtures("compared")


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@each_dispatch
@pytest.mark.parametrize("way", CURLS)
def test_curl(fleet: Fleet, dispatch: str, way: str) -> None:
    for streamed in (False, True):
        prompt, traffic = story(f"curl {way} {dispatch} {streamed}"), Traffic(fleet)
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": streamed}
        version, status, pair = curl(fleet.proxy(dispatch).base_url, body, *CURLS[way])
        assert (version, status) == ("1.1", "200") or way.startswith("HTTP/1.0")
        assert status == "200"
        _, _, single = curl(fleet.single.base_url, body, *CURLS[way])
        assert text_of(pair, streamed=streamed) == text_of(single, streamed=streamed) != ""
        assert traffic.scattered(at_least=kv_bytes(0, 2 * BLOCK)) > 0


@each_dispatch
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_conversation_by_ids(fleet: Fleet, dispatch: str, streamed: bool) -> None:
    """With `previous_response_id`: only the D that has a response can go on with it."""
    seed = f"conversation {dispatch} {streamed}"
    pair = conversation(fleet.proxy(dispatch).base_url, seed, streamed=streamed)
    assert pair == conversation(fleet.single.base_url, seed, streamed=streamed) and all(pair)


@each_dispatch
def test_what_is_counted(fleet: Fleet, dispatch: str) -> None:
    """A fresh prompt has no cached tokens, whatever D got from P; one that was asked before has as many as on
    one server."""
    pair = counts(fleet.proxy(dispatch).base_url, f"counts {dispatch}")
    single = counts(fleet.single.base_url, f"counts {dispatch}")
    assert pair == single
    assert single["chat first"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert single["message again"]["cache_read_input_tokens"] >= 2 * BLOCK


@each_dispatch
@pytest.mark.parametrize(
    "ask", [structured_chat, structured_response, logprobs, tool_of_a_message, refused, thinking, adaptive]
)
def test_the_sdks(fleet: Fleet, dispatch: str, ask: Callable[[str, str], Any]) -> None:
    seed = f"{ask.__name__} {dispatch}"
    pair, single = ask(fleet.proxy(dispatch).base_url, seed), ask(fleet.single.base_url, seed)
    assert pair == single and pair
