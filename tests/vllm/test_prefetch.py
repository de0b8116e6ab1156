"""A D that takes KV before its request has come, with a P that is asked first and a D that is asked then."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import VllmServer
from support.servers.fleet import (
    BLOCK,
    CHUNK,
    Fleet,
    ask_pair,
    assert_same,
    at_rest,
    complete,
    counter,
    kv_bytes,
    tokens,
)
from support.servers.probes import Compared


@pytest.fixture(autouse=True)
def left_as_found(fleet: Fleet, taker: VllmServer) -> Iterator[None]:
    """After every test the pages of D were those of P, and neither holds anything any more."""

    def failures() -> list[float]:
        return [counter(taker, name) for name in ("transfers_failed", "chunks_corrupt")]

    compared, before = Compared(fleet.probes), failures()
    yield
    compared.spans()
    at_rest(fleet.p)
    at_rest(taker)
    assert failures() == before


def answer(fleet: Fleet, taker: VllmServer, *prompts: list[int]) -> None:
    """All of these at once, and the answers are a single server's."""
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda prompt: ask_pair(fleet.p, taker, prompt, at_once=False), prompts))
    assert_same([complete(fleet.single, prompt) for prompt in prompts], got)


def come_ahead(fleet: Fleet, taker: VllmServer, *prompts: list[int]) -> None:
    """They are answered, and all their KV comes before D is asked."""
    before, nbytes = counter(taker, "bytes_prefetched"), sum(kv_bytes(0, len(prompt)) for prompt in prompts)
    answer(fleet, taker, *prompts)
    # vLLM shows counters when it steps.
    wait_until(lambda: counter(taker, "bytes_prefetched") - before >= nbytes, f"{nbytes} bytes ahead", 20.0)


def test_two_tokens_may_come_ahead(fleet: Fleet, taker: VllmServer) -> None:
    """The request that follows may overtake so few; nor are P and D connected when the first comes."""
    before, numbers = counter(taker, "bytes_prefetched"), count()

    def ahead() -> bool:
        answer(fleet, taker, tokens(2, f"ahead, two, {next(numbers)}"))
        return counter(taker, "bytes_prefetched") > before

    wait_until(ahead, "two tokens that come before their request", 60.0)


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 2 * CHUNK + 40])
def test_the_answer_is_a_single_servers(fleet: Fleet, taker: VllmServer, length: int) -> None:
    come_ahead(fleet, taker, tokens(length, f"ahead {length}"))


def test_a_prompt_half_cached_on_d(fleet: Fleet, taker: VllmServer) -> None:
    prompt = tokens(2 * CHUNK + 40, "ahead, half cached")
    complete(taker, [*prompt[: 5 * BLOCK], 299], 1)
    come_ahead(fleet, taker, prompt)


def test_sixteen_at_once(fleet: Fleet, taker: VllmServer) -> None:
    come_ahead(fleet, taker, *(tokens(40 + 17 * number, f"ahead, crowd {number}") for number in range(16)))
