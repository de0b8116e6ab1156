"""The pages of D hold, token by token and layer by layer, what the pages of P hold: the tokens that D wants.

Both servers run a connector that writes down hashes of its pages when a transfer ends; see
probe_connector.py. test_pair.py compares the pages after each of its tests too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from probes import Compared
from vllm_support import BLOCK, CHUNK, MODEL_NAME, Fleet, assert_at_rest, tokens

from p2pkv.demo import answers

LENGTHS = (2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + CHUNK // 2)


@pytest.fixture(autouse=True)
def left_as_found(fleet: Fleet) -> Iterator[None]:
    yield
    assert_at_rest(fleet)


@pytest.mark.parametrize("dispatch", ["concurrent", "sequential"])
@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_of_each_length(fleet: Fleet, dispatch: str, length: int) -> None:
    compared = Compared(fleet.probes)
    prompt = tokens(length, f"bytes {length} {dispatch}")
    answers.complete(fleet.proxy(dispatch).base_url, MODEL_NAME, prompt, max_tokens=2)
    assert compared.spans(1) == [(0, length - 1)]


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_prompt_half_cached(fleet: Fleet, side: str) -> None:
    length, cached = 2 * CHUNK + CHUNK // 2, 5 * BLOCK
    prompt = tokens(length, f"bytes cached on {side}")
    server = fleet.p if side == "P" else fleet.d
    answers.complete(server.base_url, MODEL_NAME, [*prompt[:cached], 299], max_tokens=1)
    compared = Compared(fleet.probes)
    answers.complete(fleet.concurrent.base_url, MODEL_NAME, prompt, max_tokens=2)
    assert compared.spans(1) == [(cached if side == "D" else 0, length - 1)]
