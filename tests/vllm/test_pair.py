"""A pair of real servers answers as a single server does, from KV that really moved."""

import pytest

from p2pkv.demo import answers, client
from support.servers.fleet import (
    BLOCK,
    CHUNK,
    MODEL_NAME,
    Fleet,
    Hits,
    Traffic,
    answers_as_one,
    ask_all,
    assert_moved,
    assert_same,
    chat_all,
    complete,
    each_dispatch,
    kv_bytes,
    letters,
    paired_headers,
    streamed,
    tokens,
)
from support.servers.probes import Compared

pytestmark = pytest.mark.usefixtures("compared")

LENGTHS = {
    "one-token": 1,
    "block-1": BLOCK - 1,
    "block": BLOCK,
    "block+1": BLOCK + 1,
    "two-tokens": 2,
    "chunk": CHUNK,
    "chunk+1": CHUNK + 1,
    "chunk+2": CHUNK + 2,
    "three-chunks": 2 * CHUNK + CHUNK // 2,
}


@each_dispatch
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_prompt_of_each_length(fleet: Fleet, compared: Compared, dispatch: str, length: int) -> None:
    prompt = tokens(length, f"length {length} {dispatch}")
    answers_as_one(fleet, dispatch, prompt, (0, length - 1))  # D computes the last token by itself
    assert length == 1 or compared.spans(1) == [(0, length - 1)]


@each_dispatch
@pytest.mark.parametrize("side", ["P", "D"])
def test_a_prompt_half_cached(fleet: Fleet, compared: Compared, dispatch: str, side: str) -> None:
    length, cached = 2 * CHUNK + CHUNK // 2, 5 * BLOCK
    prompt, server = tokens(length, f"cached on {side} {dispatch}"), fleet.p if side == "P" else fleet.d
    complete(server, [*prompt[:cached], 299], 1)
    missing = (cached if side == "D" else 0, length - 1)
    with Hits(server, cached):
        answers_as_one(fleet, dispatch, prompt, missing)
    assert compared.spans(1) == [missing]


@each_dispatch
def test_the_same_prompt_again_moves_only_what_d_forgot(fleet: Fleet, dispatch: str) -> None:
    length = 3 * BLOCK + 5
    prompt = tokens(length, f"again {dispatch}")
    answers_as_one(fleet, dispatch, prompt, (0, length - 1))
    answers_as_one(fleet, dispatch, prompt, (3 * BLOCK, length - 1))


@each_dispatch
def test_a_list_of_prompts(fleet: Fleet, dispatch: str) -> None:
    lengths = (BLOCK + 3, CHUNK + 7, 9)
    prompts = [tokens(length, f"list {length} {dispatch}") for length in lengths]
    answers_as_one(fleet, dispatch, prompts, *((0, length - 1) for length in lengths))


@each_dispatch
def test_two_children_of_one_prompt(fleet: Fleet, dispatch: str) -> None:
    prompt = tokens(CHUNK + 40, f"children {dispatch}")
    # vLLM refuses n > 1 with temperature 0; top_k 1 is as greedy.
    children = {"n": 2, "temperature": 1.0, "top_k": 1}
    # The first child loads, its sibling takes D's prefix cache.
    assert len(answers_as_one(fleet, dispatch, prompt, (0, len(prompt) - 1), **children)) == 2


@each_dispatch
def test_chat(fleet: Fleet, dispatch: str) -> None:
    story, traffic = [letters(tokens(200, f"chat {dispatch}"))], Traffic(fleet)
    pair = chat_all(fleet.proxy(dispatch).base_url, story, at_once=1)
    assert_same(chat_all(fleet.single.base_url, story, at_once=1), pair)
    assert traffic.scattered(at_least=kv_bytes(0, 2 * BLOCK)) > 0


@each_dispatch
def test_streaming(fleet: Fleet, dispatch: str) -> None:
    """A greedy one, which begins with P's token where D is asked at once."""
    proxy, from_p = fleet.proxy(dispatch).base_url, "p2pkv_proxy_first_tokens_from_prefill_total"
    before = client.metrics(proxy)[from_p]
    prompt = tokens(CHUNK + 11, f"stream {dispatch}")
    (single,) = answers.complete(fleet.single.base_url, MODEL_NAME, prompt, max_tokens=96)
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 96, **answers.GREEDY}
    traffic = Traffic(fleet)
    events = list(client.stream(f"{proxy}/v1/completions", body))
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert len(choices) > 1, "the answer came in one piece"
    assert_same([single], [streamed(choices, single.margins)])
    assert_moved(traffic, (0, len(prompt) - 1))
    assert client.metrics(proxy)[from_p] - before == (dispatch == "concurrent")


@each_dispatch
def test_32_requests_at_once(fleet: Fleet, dispatch: str) -> None:
    lengths = [7 + 23 * index % 300 for index in range(32)]
    prompts = [tokens(length, f"crowd {index} {dispatch}") for index, length in enumerate(lengths)]
    traffic = Traffic(fleet)
    pair = ask_all(fleet.proxy(dispatch).base_url, prompts, at_once=32)
    assert_same(ask_all(fleet.single.base_url, prompts, at_once=32), pair)
    assert_moved(traffic, *((0, length - 1) for length in lengths))


ASKED = "do_remote_decode", "do_remote_prefill"


def test_p_to_its_end_then_d_by_hand(fleet: Fleet) -> None:
    """With what vllm-router adds in its MoRIIO mode."""
    prompt, headers, traffic = tokens(CHUNK + 60, "by hand"), paired_headers(fleet.p, fleet.d), Traffic(fleet)
    on_p, on_d = ({"kv_transfer_params": {each: True, "transfer_id": "tx-4be1f0"}} for each in ASKED)
    complete(fleet.p, prompt, 1, headers=headers, **on_p)
    pair = complete(fleet.d, prompt, headers=headers, **on_d)
    assert_same([complete(fleet.single, prompt)], [pair])
    assert_moved(traffic, (0, len(prompt) - 1))
