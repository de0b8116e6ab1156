"""What the proxy makes of prompts without a tokenizer, and the index of their beginnings."""

import base64
import random
import tracemalloc
from collections.abc import Hashable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from proxy_fakes import prompt_of
from test_bodies import json_values

from p2pkv_proxy.bodies import BYTES_PER_TOKEN, DATA_BYTES_PER_TOKEN, MAX_PIECES, PIECE_TOKENS, Chain, Prompt
from p2pkv_proxy.policies import MAX_HOLDERS, PrefixIndex

PIECE = PIECE_TOKENS * BYTES_PER_TOKEN
"""Bytes."""


def text(pieces: float, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=int(pieces * PIECE)))


def chat(*contents: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)],
    }


def chain(fields: dict[str, Any]) -> Chain:
    return prompt_of(fields).chain


def common(one: dict[str, Any], other: dict[str, Any]) -> int:
    pairs = zip(chain(one), chain(other), strict=False)
    return next(
        (depth for depth, (a, b) in enumerate(pairs) if a != b), min(len(chain(one)), len(chain(other)))
    )


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 0),
        ({"prompt": ""}, 0),
        ({"prompt": "x"}, 1),
        ({"prompt": "x" * 400}, 100),
        ({"prompt": ["x" * 40, "x" * 40]}, 22),
        ({"prompt": "7" * 400}, 100),
        ({"prompt": [" 7, 7, 7"]}, 3),
        ({"prompt": [7] * 33}, 33),
        ({"prompt": [[7] * 33, [8] * 2]}, 35),
        ({"prompt": []}, 0),
        ({"prompt": None, "tools": [], "messages": []}, 0),
        ({"messages": [{"role": "user", "content": "x" * 369}]}, 100),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 344}]}]}, 100),
        ({"input": "x" * 40, "instructions": "x" * 40}, 20),
        ({"system": "x" * 40, "messages": [{"role": "user", "content": "x" * 49}]}, 30),
    ],
)
def test_a_prompts_length_is_estimated(fields: dict[str, Any], tokens: int) -> None:
    """By the length of its JSON: a message's frame has about as many tokens as a chat template adds."""
    assert prompt_of(fields).tokens == tokens


def test_token_ids_of_a_long_prompt_are_counted_by_a_part_of_them() -> None:
    ids = [random.Random(1).randrange(100, 150_000) for _ in range(400_000)]
    assert prompt_of({"prompt": ids}).tokens == pytest.approx(400_000, rel=0.01)


def picture(size: int, seed: int) -> dict[str, Any]:
    data = base64.b64encode(random.Random(seed).randbytes(size * 3 // 4)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@pytest.mark.parametrize("size", [20_000, 1_000_000, 8_000_000])
def test_a_picture_counts_by_a_figure_of_its_own(size: int) -> None:
    words = {"type": "text", "text": text(10)}
    plain, seen = (prompt_of(chat("you see", parts)) for parts in ([words], [picture(size, 1), words]))
    between_looks = max(2048, size / 512) / BYTES_PER_TOKEN
    assert seen.tokens - plain.tokens == pytest.approx(size / DATA_BYTES_PER_TOKEN, abs=2 * between_looks)


@pytest.mark.parametrize(
    "words", ["ACGT" * 5000, "deadbeef" * 2500, "ä" * 20_000, "https://a.example/?b=c&d=e " * 800]
)
def test_text_without_spaces_is_no_picture(words: str) -> None:
    assert prompt_of(chat(words)).tokens >= len(words.encode()) // BYTES_PER_TOKEN


def test_prompts_with_pictures_are_told_apart_by_these_and_by_what_follows() -> None:
    words = {"type": "text", "text": text(3)}
    others = {"type": "text", "text": text(3, seed=9)}
    first = chat("you see", [picture(1_000_000, 1), words])
    pieces = 1_000_000 / DATA_BYTES_PER_TOKEN / PIECE_TOKENS
    assert len(chain(first)) == pytest.approx(pieces + 3, abs=2)
    assert common(first, chat("you see", [picture(1_000_000, 1), words])) == len(chain(first))
    assert common(first, chat("you see", [picture(1_000_000, 1), others])) == pytest.approx(pieces, abs=2)
    assert common(first, chat("you see", [picture(1_000_000, 2), words])) == 0


def test_a_prompt_that_has_been_let_go_keeps_its_length_and_no_bytes() -> None:
    body = bytearray(b'"' + b"x" * 4000 + b'"')
    prompt = Prompt({"prompt": msgspec.json.Decoder(msgspec.Raw).decode(body)})
    before = prompt.chain
    prompt.let_go()
    assert (prompt.tokens, prompt.chain) == (1000, before)
    body.clear()  # what is still looked at cannot be resized


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x y " * 4_000_000},
        {"prompt": [1] * (MAX_PIECES + 10) * PIECE_TOKENS},
        chat("you see", [picture(16_000_000, 1)]),
    ],
    ids=["text", "ids", "picture"],
)
def test_a_chain_costs_no_more_than_its_beginning(fields: dict[str, Any]) -> None:
    prompt = prompt_of(fields)
    tracemalloc.start()
    try:
        assert len(prompt.chain) <= MAX_PIECES
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_PIECES * PIECE
    finally:
        tracemalloc.stop()
    assert len(prompt.chain) == MAX_PIECES


JSON = json_values(names=st.sampled_from(["content", "text", "role", "type", "x"]))


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "messages", "input", "tools", "system", "model", "cache_salt"]), JSON
    )
)
def test_whatever_a_request_says_it_has_a_length_and_a_chain(fields: dict[str, Any]) -> None:
    assert prompt_of(fields).tokens >= 0
    assert chain(fields) == chain(dict(fields))


SHARED, TURNS = text(3), [text(1.5, seed) for seed in range(5)]
ONE, PLAIN = {"prompt": SHARED + text(2, 1)}, chat(text(2), text(1))
IDS = [*range(PIECE_TOKENS * 3), 1]
ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "the same beginning": (ONE, {"prompt": SHARED + text(2, 2)}, 5, 3),
    "another beginning": (ONE, {"prompt": "x" + SHARED}, 5, 0),
    "the beginning alone": (ONE, {"prompt": SHARED[:PIECE]}, 5, 1),
    "token ids": ({"prompt": IDS}, {"prompt": IDS[: PIECE_TOKENS * 2] + [9] * PIECE_TOKENS}, 3, 2),
    "of several prompts, the first": ({"prompt": IDS}, {"prompt": [IDS, [5]]}, 3, 3),
    "a conversation that goes on": (chat(*TURNS[:2]), chat(*TURNS[:4]), 3, 3),
    "a tool, which comes first": (PLAIN, PLAIN | {"tools": [{"type": "function"}]}, len(chain(PLAIN)), 0),
    "an adapter": ({"model": "m", **ONE}, {"model": "an-adapter", **ONE}, 5, 0),
    "a salt": (ONE, ONE | {"cache_salt": "mine"}, 5, 0),
}
"""Two prompts, the pieces of the first, and those that they have in common."""


@pytest.mark.parametrize("kind", ALIKE)
def test_prompts_that_begin_alike_have_chains_that_begin_alike(kind: str) -> None:
    one, other, length, shared = ALIKE[kind]
    assert (len(chain(one)), common(one, other)) == (length, shared)


def test_the_oldest_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    index = PrefixIndex(5)
    index.add([b"a", b"b", b"c"], "one")
    index.add([b"x", b"y"], "one")
    index.add([b"z"], "one")
    assert index.held((b"a", b"b", b"c")) == {"one": 2}
    index.add([b"a"], "one")  # used again
    index.add([b"w", b"v"], "one")
    assert index.held((b"a", b"b")) == {"one": 1}


def test_a_shared_beginning_forgets_holders_but_not_who_has_more_of_a_prompt() -> None:
    index = PrefixIndex(1000)
    index.add([b"system prompt", b"turn", b"next turn"], "one")
    for restart in range(500):
        index.add([b"system prompt"], restart)
    held = index.held((b"system prompt", b"turn", b"other turn"))
    assert held.pop("one") == 2
    assert len(held) in (MAX_HOLDERS - 1, MAX_HOLDERS) and set(held) == set(range(500 - len(held), 500))


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
        # Each piece may have all holders that there are.
        least = min(len(letters), self.CAPACITY // len(self.given))
        assert self.index.held(linked(letters)).get(holder, 0) >= least, "what is new is remembered"

    @rule(letters=LINKS)
    def look(self, letters: list[bytes]) -> None:
        chain = linked(letters)
        held = self.index.held(chain)
        assert held == self.twin.held(chain), "the same calls, the same answers"
        for holder, depth in held.items():
            assert 0 < depth <= len(chain) and set(chain[:depth]) <= self.given[holder]

    @invariant()
    def bounded(self) -> None:
        assert self.index._size <= self.CAPACITY
        assert self.index._size == sum(map(len, self.index._links.values()))

    @invariant()
    def whatever_is_remembered_starts_at_the_beginning(self) -> None:
        for link in self.index._links:
            assert all(link[:depth] in self.index._links for depth in range(1, len(link)))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=30)
