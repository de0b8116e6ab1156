"""The plug-in deepseek_v4, in a process of its own: vLLM's functions give what their formulas say."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_deepseek_v4 import TinyDeepseekV4
from vllm_support import PLUGIN_FOLDER, plugin_environment

from p2pkv.demo.servers import cpu_environment
from p2pkv.demo.tiny_model import ensure_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK, WINDOW, LONGEST = 256, 128, 3000


def draw_batch(draw: random.Random) -> dict[str, Any]:
    """A few requests, some with one token; blocks in any order; some tokens without a slot."""
    count = draw.randint(1, 5)
    queries = [draw.choice([1, draw.randint(1, 700)]) for _ in range(count)]
    # Long enough that the requests have one row of the indexer's cache between them.
    contexts = [draw.choice([0, draw.randint(0, LONGEST)]) + 4 * (query == 1) for query in queries]
    blocks = (LONGEST + 700) // BLOCK + 1
    ids = draw.sample(range(count * blocks), count * blocks)
    return {
        "queries": queries,
        "contexts": contexts,
        "padding": draw.choice([0, draw.randint(1, 300)]),
        "table": [ids[request * blocks :][:blocks] for request in range(count)],
        "slots": [draw.choice([0] * 9 + [-1]) for _ in range(sum(queries))],
    }


def formulas(batch: dict[str, Any]) -> dict[str, list[int]]:
    """Token by token, what `answer` of the other process asks vLLM for."""
    queries, contexts = batch["queries"], batch["contexts"]
    tokens = [
        (request, contexts[request] + index)
        for request in range(len(queries))
        for index in range(queries[request])
    ]
    rows = [(query + context) // 4 for query, context in zip(queries, contexts, strict=True)]
    wanted = {
        "requests": [request for request, _ in tokens] + [0] * batch["padding"],
        "first": [sum(rows[:request]) for request, _ in tokens],
        "past": [sum(rows[:request]) + (position + 1) // 4 for request, position in tokens],
        "owners": [request for request, count in enumerate(rows) for _ in range(count)],
        "gathered": [
            query + min(context, WINDOW - 1) for query, context in zip(queries, contexts, strict=True)
        ],
    }
    for ratio in (4, 128):
        wanted[f"slots {ratio}"] = [
            _slot(batch["table"][request], position, ratio)
            if (position + 1) % ratio == 0 and slot != -1
            else -1
            for (request, position), slot in zip(tokens, batch["slots"], strict=True)
        ]
    return wanted


def _slot(table: list[int], position: int, ratio: int) -> int:
    """Of the row that stands for the tokens up to this one."""
    block, row = divmod(position // ratio, BLOCK // ratio)
    return table[block] * (BLOCK // ratio) + row


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [draw_batch(draw) for _ in range(20)]


@pytest.fixture(scope="module")
def answers(batches: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with the plug-in found."""
    folder = tmp_path_factory.mktemp("deepseek_v4")
    model = ensure_model(TinyDeepseekV4(), folder)
    asked, found = folder / "batches.json", folder / "answers.json"
    asked.write_text(json.dumps(batches))
    peer = Path(PLUGIN_FOLDER) / "deepseek_v4_peer.py"
    done = subprocess.run(
        [sys.executable, peer, model, asked, found],
        env={**os.environ, **cpu_environment(), **plugin_environment("deepseek_v4")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(found.read_text())


def test_metadata_is_what_the_formulas_say(batches: list[dict[str, Any]], answers: dict[str, Any]) -> None:
    for batch, found in zip(batches, answers["batches"], strict=True):
        assert found == formulas(batch)


def test_prefixes_are_cached_and_prompts_computed_in_chunks(answers: dict[str, Any]) -> None:
    assert answers["prefix_caching"] is True
    assert answers["chunked_prefill"] is True
    assert answers["batched_tokens"] == 512
    assert answers["amx_untouched"]


def test_no_layer_type_has_a_plan_of_tiles(answers: dict[str, Any]) -> None:
    assert answers["tiles"] == dict.fromkeys(answers["layer_types"])


def test_no_code_for_the_cpu_reads_what_the_skipped_kernel_writes() -> None:
    import vllm

    package = Path(vllm.__file__).parent
    sources = [
        *(package / "models" / "deepseek_v4" / "cpu").glob("*.py"),
        package / "model_executor" / "layers" / "sparse_attn_indexer.py",
    ]
    assert len(sources) > 5
    readers = [path.name for path in sources if "swa_indices" in path.read_text()]
    readers += [path.name for path in sources if "swa_lens" in path.read_text()]
    assert readers == []
