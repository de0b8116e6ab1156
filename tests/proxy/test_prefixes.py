"""What the proxy makes of prompts without a tokenizer, and the index of their beginnings."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from proxy.prefixes import (
    CHARACTERS_PER_TOKEN,
    MOST_HOLDERS,
    MOST_PIECES,
    PIECE_TOKENS,
    Chain,
    PrefixIndex,
    Prompt,
)

PIECE = PIECE_TOKENS * CHARACTERS_PER_TOKEN
"""Characters."""


def text(pieces: float, seed: int = 0) -> str:
    """So many pieces of words that are drawn."""
    return "".join(random.Random(seed).choices("abcdefgh ", k=int(pieces * PIECE)))


def chat(*contents: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)],
    }


def chain(fields: dict[str, Any]) -> Chain:
    return Prompt(fields).chain


def common(one: dict[str, Any], other: dict[str, Any]) -> int:
    """How many pieces two prompts have in common from their beginning."""
    pairs = zip(chain(one), chain(other), strict=False)
    return next(
        (depth for depth, (a, b) in enumerate(pairs) if a != b), min(len(chain(one)), len(chain(other)))
    )


# Lengths.


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 0),
        ({"prompt": ""}, 0),
        ({"prompt": "x"}, 1),
        ({"prompt": "x" * 400}, 100),
        ({"prompt": ["x" * 40, "x" * 40]}, 20),
        ({"prompt": [7] * 33}, 33),
        ({"prompt": [[7] * 33, [8] * 2]}, 35),
        ({"messages": [{"role": "user", "content": "x" * 36}]}, 10),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 36}]}]}, 10),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, 3),
        ({"input": "x" * 40, "instructions": "x" * 40}, 20),
        ({"system": "x" * 40, "messages": [{"role": "user", "content": "x" * 36}]}, 20),
        ({"prompt": 7, "messages": {"content": 3.5}, "input": None, "tools": [[[[[["deep"]]]]]]}, 0),
    ],
)
def test_a_prompts_length_is_estimated(fields: dict[str, Any], tokens: int) -> None:
    assert Prompt(fields).tokens == tokens


def test_an_image_does_not_count_by_the_length_of_its_bytes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "B" * 1_000_000}}
    described = [chat("you see", [each, {"type": "text", "text": text(2)}]) for each in (image, image, other)]
    assert Prompt(described[0]).tokens < 200
    assert chain(described[0]) == chain(described[1]) != chain(described[2])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "text", "role", "type", "x"]), inner, max_size=3)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "messages", "input", "tools", "system", "model", "cache_salt"]), JSON
    )
)
def test_whatever_a_request_says_it_has_a_length_and_a_chain(fields: dict[str, Any]) -> None:
    assert Prompt(fields).tokens >= 0
    assert chain(fields) == chain(dict(fields))


# Chains.


def test_prompts_that_begin_alike_have_chains_that_begin_alike() -> None:
    shared = text(3)
    one, other = ({"prompt": shared + text(2, seed)} for seed in (1, 2))
    assert (len(chain(one)), common(one, other)) == (5, 3)
    assert common(one, {"prompt": "x" + shared}) == 0
    assert common(one, {"prompt": shared[:PIECE]}) == 1


def test_token_ids_are_compared_as_they_are() -> None:
    one = {"prompt": [*range(PIECE_TOKENS * 3), 1]}
    other = {"prompt": [*range(PIECE_TOKENS * 2), *[9] * PIECE_TOKENS]}
    assert (len(chain(one)), common(one, other)) == (3, 2)
    assert chain({"prompt": [one["prompt"], [5]]}) == chain(one), "of several, the first"


def test_a_conversation_goes_on_with_the_same_chain() -> None:
    turns = [text(1.5, seed) for seed in range(5)]
    first, second = chat(*turns[:2]), chat(*turns[:4])
    assert common(first, second) == len(chain(first)) == 3


def test_a_tool_at_the_beginning_makes_another_prompt() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    plain = chat(text(2), text(1))
    assert common(plain, plain | {"tools": [tool]}) == 0


@pytest.mark.parametrize("change", [{"model": "an-adapter"}, {"cache_salt": "mine"}])
def test_what_vllm_keeps_apart_has_chains_of_its_own(change: dict[str, str]) -> None:
    prompt = {"model": "m", "prompt": text(2)}
    assert common(prompt, prompt | change) == 0


def test_of_a_very_long_prompt_only_the_beginning_counts() -> None:
    long = text(1) * (MOST_PIECES + 10)
    for fields in ({"prompt": long}, {"prompt": [1] * (MOST_PIECES + 10) * PIECE_TOKENS}):
        assert len(chain(fields)) == MOST_PIECES


# The index.


def test_who_has_been_given_a_beginning_is_found() -> None:
    index = PrefixIndex(100)
    index.add([b"a", b"b", b"c"], "one")
    index.add([b"a", b"x"], "two")
    assert index.held((b"a", b"b", b"c", b"d")) == {"one": 3, "two": 1}
    assert index.held((b"a", b"x")) == {"one": 1, "two": 2}
    assert index.held((b"b",)) == {"one": 1}
    assert index.held((b"y", b"a")) == index.held(()) == {}


def test_the_oldest_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    index = PrefixIndex(5)
    index.add([b"a", b"b", b"c"], "one")
    index.add([b"x", b"y"], "one")
    index.add([b"z"], "one")
    assert index.held((b"a", b"b", b"c")) == {"one": 2}
    index.add([b"a"], "one")  # used again
    index.add([b"w", b"v"], "one")
    assert index.held((b"a", b"b")) == {"one": 1}


def test_a_chain_longer_than_the_memory_keeps_its_beginning() -> None:
    index = PrefixIndex(3)
    index.add([bytes([number]) for number in range(10)], "one")
    assert index.held(tuple(bytes([number]) for number in range(10))) == {"one": 3}


def test_a_beginning_that_all_share_does_not_remember_everybody_who_ever_was_there() -> None:
    index = PrefixIndex(1000)
    for restart in range(500):
        index.add([b"system prompt"], restart)
    assert set(index.held((b"system prompt",))) == set(range(500 - MOST_HOLDERS, 500))
    assert len(index) == MOST_HOLDERS


LINKS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=6)


def linked(letters: list[bytes]) -> Chain:
    """A chain: each link says all that came before it."""
    return tuple(b"".join(letters[: depth + 1]) for depth in range(len(letters)))


class IndexMachine(RuleBasedStateMachine):
    """The index beside a twin that gets the same calls, and beside everything that was ever given."""

    CAPACITY = 12

    def __init__(self) -> None:
        super().__init__()
        self.index, self.twin = PrefixIndex(self.CAPACITY), PrefixIndex(self.CAPACITY)
        self.given: dict[Hashable, set[bytes]] = {}

    @rule(letters=LINKS, holder=st.integers(0, 3))
    def add(self, letters: list[bytes], holder: int) -> None:
        for index in (self.index, self.twin):
            index.add(linked(letters), holder)
        self.given.setdefault(holder, set()).update(linked(letters))
        expected = min(len(letters), self.CAPACITY)
        assert self.index.held(linked(letters)).get(holder, 0) == expected, "what is new is remembered"

    @rule(letters=LINKS)
    def look(self, letters: list[bytes]) -> None:
        chain = linked(letters)
        held = self.index.held(chain)
        assert held == self.twin.held(chain), "the same calls, the same answers"
        for holder, depth in held.items():
            assert 0 < depth <= len(chain) and set(chain[:depth]) <= self.given[holder]

    @invariant()
    def bounded(self) -> None:
        assert len(self.index) <= self.CAPACITY
        assert len(self.index) == sum(map(len, self.index._links.values()))

    @invariant()
    def whatever_is_remembered_starts_at_the_beginning(self) -> None:
        for link in self.index._links:
            assert all(link[:depth] in self.index._links for depth in range(1, len(link)))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(deadline=None, max_examples=100, stateful_step_count=30)
