"""Real vLLM: kinds of KV cache, on one card each, with which a pair answers as a single server does.

As in test_servers.py, but one test to a setting, and models whose sizes the kernels for CUDA take.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gpu.servers import NAME, Setting, setting, started

from p2pkv.demo import answers, processes, tiny_model
from support.models.families import TinyDeepseek, TinyFalconH1, TinyGemma, TinyGptOss, TinyQwen

pytestmark = [pytest.mark.vllm, pytest.mark.servers, pytest.mark.timeout(600)]

LENGTHS = (33, 289, 1505)
"""Whole blocks and a token: asked twice, the single server has the blocks and computes the token as D does.
Kernels of MLA and of fp8 round otherwise where they prefill than where they decode."""
PREFIX = 640
"""Tokens that two prompts begin with: more than the largest block, which holds as much as a state."""
ROUNDINGS = 0.5
"""A tie of models that amplify roundings, or where the single server recomputes tokens behind a state."""
OTHER_KERNELS = 1.0
"""A tie where the KV of fp8 or of MLA has been computed in other steps."""


def card(name: str, model: tiny_model.TinyModel | None = None, *more: str, **how: Any) -> Any:
    return setting(f"one-gpu-{name}", pytest.mark.gpu, p="0", d="0", model=model, more=more, **how)


# vLLM's prefill kernel for MLA takes few sizes of heads, DeepSeek's among them.
MLA = TinyDeepseek(nope=128, value=128)
WINDOW = TinyGemma(head_dim=64)
MODELS = [
    setting("cpu-window", pytest.mark.long, p="", d="", model=WINDOW),
    setting("cpu-blocks", pytest.mark.long, p="", d="", larger=2),
    card("blocks", larger=2),
    card("runner1", runner="0"),
    card("fp8", None, "--kv-cache-dtype", "fp8", tie=OTHER_KERNELS),
    card("mla", MLA, tie=OTHER_KERNELS),
    card("triton-mla", MLA, "--attention-backend", "TRITON_MLA", tie=OTHER_KERNELS),
    card("window", WINDOW, tie=ROUNDINGS),
    # On a Hopper vLLM chooses FlashInfer's kernel whether or not it is there.
    card(
        "recurrent",
        TinyQwen(),
        *("--mamba-ssm-cache-dtype", "float32", "--gdn-prefill-backend", "triton"),
        tie=ROUNDINGS,
    ),
    card("mamba", TinyFalconH1(hidden=256, state=64), tie=ROUNDINGS),
    # Every token goes to all experts: a rounding chooses none.
    card("sinks", TinyGptOss(experts=2), tie=ROUNDINGS),
]


@pytest.mark.parametrize("chosen", MODELS)
def test_a_pair_with_this_kind_of_cache_answers_as_a_single_server(chosen: Setting, tmp_path: Path) -> None:
    with started(chosen, tmp_path) as servers:
        prefix = servers.prompt("prefix", PREFIX)
        prompts = [servers.prompt(str(length), length) for length in LENGTHS]
        prompts += [[*prefix, *servers.prompt(tail, 33)] for tail in ("one", "other")]
        # Kernels that are compiled at their first call are, before a transfer waits for them.
        for each in (servers.single, servers.p, servers.d):
            answers.complete(each.base_url, NAME, servers.prompt("first", 700), max_tokens=2)
        before, wrong = servers.counters(), []
        for prompt in prompts:
            _, expected = (answers.complete(servers.single.base_url, NAME, prompt)[0] for _ in range(2))
            (pair,) = answers.complete(servers.proxy.base_url, NAME, prompt)
            wrong.append(servers.differs(expected, pair))
        after = servers.counters()
        assert int(after["transfers_failed"]) == int(after["chunks_corrupt"]) == 0
        assert int(after["transfers_loaded"]) == int(before["transfers_loaded"]) + len(prompts)
        assert wrong == [None] * len(prompts)


@pytest.mark.long
def test_a_server_that_does_not_start_says_why_on_a_cpu(tmp_path: Path) -> None:
    chosen = Setting("cpu", p="", d="", more=("--no-such-option",))
    with pytest.raises(processes.ServerFailed) as failed, ExitStack() as stack:
        stack.enter_context(started(chosen, tmp_path))
    assert any("--no-such-option" in note for note in failed.value.__notes__)
