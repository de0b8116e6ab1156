"""A client hangs up on real servers: both sides let go of its request, and serve on.

tests/connector/test_cancel.py has every stage, with vLLM's schedulers and real ranks.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pkv.demo import answers
from p2pkv.demo.processes import wait_until
from support.servers.fleet import (
    MODEL_NAME,
    Caller,
    Fleet,
    assert_at_rest,
    assert_same,
    each_dispatch,
    metric,
    tokens,
)

LONG = 600
"""Tokens of an answer that takes seconds."""


@pytest.fixture(autouse=True)
def left_as_found(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[None]:
    """Afterwards neither side holds anything, and the next request is answered."""
    yield
    assert_at_rest(fleet)
    prompt = tokens(50, f"after {request.node.name}")
    got = answers.complete(fleet.concurrent.base_url, MODEL_NAME, prompt)
    assert_same(answers.complete(fleet.single.base_url, MODEL_NAME, prompt), got)
    assert_at_rest(fleet)


@pytest.fixture
def held(fleet: Fleet) -> Iterator[Callable[[], None]]:
    """Stops P's forward in the third layer of the next prompt; waits there until P has begun it."""
    hold: Path = fleet.probes / "hold-P"
    begun = hold.with_suffix(".held")
    begun.unlink(missing_ok=True)
    hold.write_text("2 1")
    try:
        yield lambda: wait_until(begun.exists, "P's forward to be held", 30.0)
    finally:
        hold.unlink(missing_ok=True)
        begun.unlink(missing_ok=True)


@each_dispatch
def test_while_p_computes_and_pushes_and_while_p_and_d_have_it_queued(
    fleet: Fleet, held: Callable[[], None], dispatch: str
) -> None:
    """With P's forward held: one prompt half computed, the others queued on P; D waits for all of them."""
    base = fleet.proxy(dispatch).base_url
    callers = [Caller(base, tokens(150, f"leave {dispatch} {number}")) for number in range(4)]
    held()
    for caller in callers:
        caller.hang_up()


@each_dispatch
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_while_d_decodes(fleet: Fleet, dispatch: str, streamed: bool) -> None:
    before = metric(fleet.d, "vllm:generation_tokens_total")
    prompt = tokens(60, f"leave decoding {dispatch} {streamed}")
    caller = Caller(fleet.proxy(dispatch).base_url, prompt, stream=streamed, max_tokens=LONG)
    wait_until(lambda: metric(fleet.d, "vllm:generation_tokens_total") > before, "D to decode", 30.0)
    assert not streamed or caller.first_words().startswith(b"data: ")
    caller.hang_up()
    wait_until(lambda: metric(fleet.d, "vllm:num_requests_running") == 0, "D to stop decoding", 10.0)


@each_dispatch
def test_at_any_moment(fleet: Fleet, dispatch: str) -> None:
    """Twelve clients leave one after the other, as often as D or P gets on with the others."""
    base = fleet.proxy(dispatch).base_url
    callers = [
        Caller(base, tokens(40 + 20 * number, f"leave any {dispatch} {number}"), stream=True, max_tokens=64)
        for number in range(12)
    ]
    for caller in callers[:-1]:
        seen = _progress(fleet)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda seen=seen: _progress(fleet) > seen, "progress", 2.0)
        caller.hang_up()
    assert b"[DONE]" in callers[-1].answer()


def _progress(fleet: Fleet) -> float:
    return metric(fleet.p, "vllm:prompt_tokens_total") + metric(fleet.d, "vllm:generation_tokens_total")
