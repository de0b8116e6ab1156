"""Sampled answers whose first token comes from P, or from D where P's cannot be handed on, are drawn from one
server's distribution."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from math import sqrt

import pytest
from proxy_fakes import join, ping
from test_continuation import COMPLETIONS, body_of, transcript_of

from p2pkv_proxy.bodies import parse
from p2pkv_proxy.first_token import FirstTokens, PrefillToken
from p2pkv_proxy.limits import RequestCounters
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.routing import Choice

DRAWS = 20_000
FIRST = {"a": 0.4, "b": 0.2, "": 0.25, "E": 0.15}
"""By the text of the first token: "" is half a character, "E" may begin the stop string."""
SECOND = {
    "a": {"x": 0.7, "y": 0.3},
    "b": {"x": 0.1, "y": 0.9},
    "": {"x": 0.5, "y": 0.5},
    "E": {"x": 0.2, "y": 0.8},
}
BODY = body_of(COMPLETIONS, max_tokens=9, temperature=1, stop="END")
CONTEXT = 512

Draw = Callable[[random.Random], tuple[str, str]]


def drawn(shares: dict[str, float], dice: random.Random) -> str:
    return dice.choices([*shares], [*shares.values()])[0]


def one_server(dice: random.Random) -> tuple[str, str]:
    first = drawn(FIRST, dice)
    return first, drawn(SECOND[first], dice)


def event(text: str) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "token_ids": [7]}
    fields = {"id": "cmpl-x", "choices": [choice | {"prompt_token_ids": [1, 2, 3]}]}
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def by_the_proxy(tokens: FirstTokens, *, one_seed: bool = True) -> Draw:
    """P draws; D draws the second token behind P's, or both by itself, with P's seed."""
    registry = Registry()
    p, d = (
        join(registry, ping("P", 1, first_token=2, seeds=True)),
        join(registry, ping("D", 2, first_token=2, ahead_tokens=1000, seeds=True)),
    )
    d.context = CONTEXT
    body = parse(json.dumps(BODY).encode(), COMPLETIONS)

    def draw(dice: random.Random) -> tuple[str, str]:
        transcript = transcript_of(COMPLETIONS, BODY)
        assert transcript is not None
        plan = tokens.plan(body, transcript, Choice(p, d))
        assert plan is not None and plan.seed is not None
        first = drawn(FIRST, random.Random(plan.seed))
        plan.leave()
        token = tokens.of(event(first), plan, body, transcript, CONTEXT)
        if isinstance(token, PrefillToken):
            return first, drawn(SECOND[first], dice)
        return one_server(random.Random(plan.seed) if one_seed else dice)

    return draw


def excess(draw: Draw, seed: int = 41) -> float:
    """How far the pairs are from one server's, by chi squared, in standard deviations above its mean."""
    dice = random.Random(seed)
    counts = Counter(draw(dice) for _ in range(DRAWS))
    expected = {
        (one, two): DRAWS * share * SECOND[one][two] for one, share in FIRST.items() for two in SECOND[one]
    }
    squared = sum((counts[pair] - mean) ** 2 / mean for pair, mean in expected.items())
    degrees = len(expected) - 1
    return (squared - degrees) / sqrt(2 * degrees)


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> FirstTokens:
    """With seeds that are the same each time."""
    monkeypatch.setattr("p2pkv_proxy.first_token.random", random.Random(7))
    return FirstTokens(True, RequestCounters())


def test_pairs_of_p_and_d_are_drawn_as_one_servers(tokens: FirstTokens) -> None:
    assert excess(one_server) < 4
    assert excess(by_the_proxy(tokens)) < 4
    assert tokens.from_decode["token"] == pytest.approx(DRAWS * (FIRST[""] + FIRST["E"]), rel=0.05)
    assert excess(by_the_proxy(tokens, one_seed=False)) > 100, "with a seed of D's own they are not"
