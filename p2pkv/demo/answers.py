"""Greedy answers of two servers, asked for with the margins of their choices, and compared token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pkv.demo import client

TIE = 1e-3
"""Two likeliest tokens whose log-probabilities are closer than this may swap places without a fault."""

Prompt = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One choice of one request.

    Attributes:
        text: the decoded text.
        tokens: token ids.
        margins: for each token, log-probability of the likeliest token less that of the second.
    """

    text: str
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


GREEDY = {"temperature": 0.0, "return_token_ids": True, "return_tokens_as_token_ids": True}
"""What a request needs besides prompt and length, so that its answers can be compared."""


def complete(
    base_url: str,
    model: str,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_tokens: int = 16,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
    **more: Any,
) -> list[Answer]:
    """Ask /v1/completions; one answer for each prompt and child, in order. Raises client.RequestFailed."""
    prompts = prompt if isinstance(prompt, str) else list(prompt)
    body = {"model": model, "prompt": prompts, "max_tokens": max_tokens, "logprobs": 2, **GREEDY, **more}
    url = f"{base_url}/v1/completions"
    answer = client.post(url, body, headers=headers, timeout_seconds=timeout_seconds)
    return [answer_of(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def chat(
    base_url: str,
    model: str,
    messages: Sequence[Mapping[str, str]],
    *,
    max_tokens: int = 16,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
    **more: Any,
) -> list[Answer]:
    """Ask /v1/chat/completions; one answer for each child. Raises client.RequestFailed."""
    body = {"model": model, "messages": list(messages), "max_tokens": max_tokens, **GREEDY, **more}
    body |= {"logprobs": True, "top_logprobs": 2}
    url = f"{base_url}/v1/chat/completions"
    answer = client.post(url, body, headers=headers, timeout_seconds=timeout_seconds)
    return [answer_of(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def answer_of(choice: Mapping[str, Any]) -> Answer:
    """An answer from a choice of either endpoint that was asked for log-probabilities and token ids."""
    logprobs = choice["logprobs"]
    if "message" in choice:
        text = choice["message"]["content"] or ""
        likeliest = [[top["logprob"] for top in token["top_logprobs"]] for token in logprobs["content"]]
    else:
        text = choice["text"]
        likeliest = [list(top.values()) for top in logprobs["top_logprobs"]]
    return Answer(
        text=text,
        tokens=tuple(choice["token_ids"]),
        margins=tuple(_margin(values) for values in likeliest),
    )


def difference(expected: Answer, got: Answer, tie: float = TIE) -> str | None:
    """What is wrong with `got`, in a sentence, or None if it equals `expected`.

    After a step where the two likeliest tokens were a tie, nearer to each other than `tie`, the answers may
    go different ways, and nothing more is compared.
    """
    for position, (want, have) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        if want == have:
            continue
        margin = expected.margins[position]
        if margin < tie:
            return None
        return (
            f"token {position} is {have} instead of {want}, which was ahead by {margin:.4f} in "
            f"log-probability; expected {expected.text!r}, got {got.text!r}"
        )
    if len(expected.tokens) != len(got.tokens):
        return (
            f"{len(got.tokens)} tokens instead of {len(expected.tokens)}: {got.text!r}, not {expected.text!r}"
        )
    return None


def _margin(logprobs: Sequence[float]) -> float:
    first, second = sorted(logprobs, reverse=True)[:2]
    return first - second
