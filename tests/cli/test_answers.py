"""Comparing answers: what counts as different."""

from __future__ import annotations

import pytest

from p2pkv.demo.answers import Answer, answer_of, difference

EXPECTED = Answer(text="a b c", tokens=(1, 2, 3), margins=(0.5, 0.0005, 0.5))


def test_equal_answers_have_no_difference() -> None:
    assert difference(EXPECTED, EXPECTED) is None


def test_another_token_is_named_with_its_place_and_margin() -> None:
    got = Answer(text="x", tokens=(9, 2, 3), margins=(0.1, 0.1, 0.1))
    sentence = difference(EXPECTED, got)
    assert sentence is not None
    assert sentence.startswith("token 0 is 9 instead of 1, which was ahead by 0.5000")


def test_nothing_is_compared_after_a_tie() -> None:
    assert difference(EXPECTED, Answer(text="y", tokens=(1, 9, 9), margins=(0.5, 0.1, 0.1))) is None


@pytest.mark.parametrize("tokens", [(1, 2), (1, 2, 3, 4)])
def test_another_length_is_a_difference(tokens: tuple[int, ...]) -> None:
    sentence = difference(EXPECTED, Answer(text="z", tokens=tokens, margins=(0.5,) * len(tokens)))
    assert sentence is not None
    assert sentence.startswith(f"{len(tokens)} tokens instead of 3")


def test_choices_of_both_endpoints_are_read() -> None:
    completion = {
        "text": "hi",
        "token_ids": [7],
        "logprobs": {"top_logprobs": [{"token_id:7": -0.25, "token_id:9": -1.5}]},
    }
    chat = {
        "message": {"content": "hi"},
        "token_ids": [7],
        "logprobs": {"content": [{"top_logprobs": [{"logprob": -0.25}, {"logprob": -1.5}]}]},
    }
    assert answer_of(completion) == answer_of(chat) == Answer(text="hi", tokens=(7,), margins=(1.25,))
