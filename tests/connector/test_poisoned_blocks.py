"""No block that P or D reads, or keeps under a hash, holds what was in it before: KV groups of every kind.

vLLM's schedulers and block managers, real ranks and links; `real_ranks.starting` poisons each block that vLLM
gives out, and checks what every forward reads and what every prefix cache keeps.
"""

import random
from collections.abc import Callable, Sequence

import pytest
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from support.connector.instances import BLOCK, tokens
from support.connector.kinds import ATTENTION, GEMMA, KINDS, QWEN, Kind
from support.connector.real_ranks import Engine, ask_both, finish, preempt_all, run

Start = Callable[..., list[Engine]]


TIGHT = {
    "attention": 17,
    "MLA": 17,
    "windows": 24,
    "chunks": 18,
    "reference-windows": 13,
    "two-precisions": 15,
    "states": 22,
    "states-uncached": 19,
    "states-in-mid-step": 22,
    "parts-of-blocks": 12,
    "M3": 17,
    "V3.2": 17,
    "V4": 24,
    "V4.1": 20,
    "V4.1-replay": 20,
    "GLM5-Next": 19,
    "Qwen4-exp": 19,
    "all": 16,
    "all-packed": 22,
}
"""Blocks that hold two requests of 60 tokens, and one of 160, but not two."""


def computed(engine: Engine) -> int:
    return sum(engine.computed.values())


CONTEXT: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "undivided": ({}, {}),
    "DCP 2 to 1": ({"dcp": 2}, {}),
    "DCP 1 to 2": ({}, {"dcp": 2, "interleave": 4}),
    "DCP 4 to 2": ({"dcp": 4, "interleave": BLOCK}, {"dcp": 2}),
}
"""Whether tokens are divided over ranks: then the blocks of vLLM's scheduler are larger than those of one."""
(MLA,) = (each for each in KINDS if each.name == "MLA")
DIVIDED = [(MLA, tp, name) for tp, name in zip(((2, 1), (1, 2), (4, 2)), list(CONTEXT)[1:], strict=True)]


@pytest.mark.parametrize(
    ("kind", "tp", "context"),
    [
        *((kind, tp, "undivided") for kind in KINDS for tp in ((2, 1), (1, 2))),
        (ATTENTION, (2, 2), "undivided"),
        *DIVIDED,
    ],
    ids=str,
)
def test_prompts_that_end_anywhere_in_a_block(
    kind: Kind, tp: tuple[int, int], context: str, engines: Start
) -> None:
    p, d = engines(*tp, blocks=120, kind=kind, budget=48, context=CONTEXT[context])
    lengths = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 65, 100)
    for index, length in enumerate(lengths):
        ask_both(p, d, "a list", tokens(length, length), tokens=20, index=index)
    finish(p, d)
    assert set(d.ended.values()) == {"length"}
    assert computed(d) == 20 * len(lengths), "D computed one token of each prompt"
    for engine in (p, d):
        assert engine.holds_poison or engine.scheduler.needs_kv_cache_zeroing, "no block was poisoned"


STAGES = {"windows": (1, 3), "states": (1, 3), "two-precisions": (2, 2), "M3": (3, 1), "all": (1, 2)}
"""Layers of two stages, of which one mostly has no layer of some KV group."""


@pytest.mark.parametrize("on_p", [True, False], ids=["P", "D"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if str(kind) in STAGES], ids=str)
def test_stages_of_layers_that_differ(kind: Kind, on_p: bool, engines: Start) -> None:
    """PP 2 x TP 2 on one side, TP 1 on the other: chunks, and prefixes that D has already."""
    stages = STAGES[str(kind)]
    tp, cut = ((2, 1), (stages, None)) if on_p else ((1, 2), (None, stages))
    p, d = engines(*tp, blocks=160, kind=kind, budget=48, stages=cut)
    prompts_come(p, d, 129, (1, BLOCK, BLOCK + 1, 65, 100))


def prompts_come(p: Engine, d: Engine, longest: int, lengths: Sequence[int]) -> None:
    """All at once, and then the longest one again, with two more tokens."""
    start = tokens(longest, "start")
    for number, prompt in enumerate([start, *(tokens(length, length) for length in lengths)]):
        ask_both(p, d, number, prompt, tokens=20)
    finish(p, d)
    ask_both(p, d, "again", [*start, 7, 8], tokens=20)
    finish(p, d)
    assert set(d.ended.values()) == {"length"}
    assert computed(d) == 20 * (len(lengths) + 2), "D computed one token of each prompt"


@pytest.mark.parametrize(("kind", "stages", "budget"), [(GEMMA, (3, 5), 48), (QWEN, (3, 1), 200)], ids=str)
def test_stages_of_whole_models(kind: Kind, stages: tuple[int, int], budget: int, engines: Start) -> None:
    """P with PP 2 x TP 2, whose first stage has no layer that sees all; D with TP 1; vLLM's own layers."""
    p, d = engines(2, 1, blocks=160, kind=kind, budget=budget, stages=(stages, None))
    whole = {name for name, spec in d.specs.items() if type(spec) is FullAttentionSpec}
    assert whole and whole.isdisjoint(p.stages[0]) and len(d.kv_config.kv_cache_groups) > 1
    block = d.hash_block
    prompts_come(p, d, 2 * block + 1, (1, block, block + 1, 2 * block - 3))


@pytest.mark.parametrize(
    ("kind", "tp", "context"),
    [*((kind, (1, 1), "undivided") for kind in KINDS if kind.caching), *DIVIDED],
    ids=str,
)
def test_prefixes_that_p_or_d_or_both_have_already(
    kind: Kind, tp: tuple[int, int], context: str, engines: Start
) -> None:
    """What D has loaded for one prompt is the beginning of others, also of one that it computes alone."""
    p, d = engines(*tp, blocks=160, kind=kind, budget=64, context=CONTEXT[context])
    start = tokens(129, "start")  # D computes the last one, so what comes ends with a block of any size
    ask_both(p, d, "first", start)
    finish(p, d)
    d.ask("cmpl-alone-0-12345678", [*start, 7, 8, 9], max_tokens=5)
    finish(p, d)
    alone = d.computed["cmpl-alone-0-12345678"]
    assert alone == 4 + 4 + kind.replayed, "D has not found what came as a prefix"
    p.ask("cmpl-of-p-0-12345678", tokens(100, "of P"), max_tokens=1)
    d.ask("cmpl-of-d-0-12345678", tokens(100, "of D"), max_tokens=1)
    finish(p, d)
    prompts = [[*start, 7, 8], [*start[:96], *tokens(40, "more")], [*start[:50], *tokens(5, "few")]]
    prompts += [[*tokens(100, whose)[:cut], 7] for whose in ("of P", "of D") for cut in (33, 64, 100)]
    prompts += [start]
    before = computed(d)
    for number, prompt in enumerate(prompts):
        ask_both(p, d, number, prompt)
    finish(p, d)
    more = computed(d) - before - 5 * len(prompts)
    assert 0 <= more <= 2 * kind.replayed * len(prompts), "D computed more than one token of a prompt"
    assert set(d.ended.values()) == {"length"}
    assert p.passed > 0 or kind.name != "states-in-mid-step"


def test_a_prompt_that_goes_on_in_a_cached_block_is_pushed_from_its_first_step_on(engines: Start) -> None:
    """What vLLM itself has cached of a block is no load of another connector, which might fail."""
    (kind,) = (each for each in KINDS if each.name == "parts-of-blocks")
    p, d = engines(1, 1, blocks=80, kind=kind, budget=200)
    start = tokens(60, "start")
    for number, prompt in enumerate((start, [*start, *tokens(40, "more")])):
        before = len(p.metas)
        ask_both(p, d, number, prompt)
        finish(p, d)
    (step,) = p.metas[before].prefills
    assert (step.cached, step.start) == (2 * BLOCK, 3 * BLOCK)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_came_of_a_load_that_failed_is_computed_again(kind: Kind, engines: Start) -> None:
    p, d = engines(1, 1, blocks=80, kind=kind, budget=64, policy="recompute", chunk_bytes=1024)
    prompt = tokens(200)
    prefill, decode = ask_both(p, d, "k", prompt)
    p.step()
    run([d], lambda: decode.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    p.step()
    came = d.workers[0].rank.counters.values
    run([d], lambda: came["bytes_scattered"] > 0)
    assert not prefill.is_finished()
    p.abort(prefill)
    finish(p, d)
    assert d.ended == {decode.request_id: "length"}
    assert computed(d) == len(prompt) + 4, "D computed the whole prompt"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_blocks_that_a_preemption_took_back(kind: Kind, engines: Start) -> None:
    """Two requests fit as they come, and not as they end."""
    p, d = engines(1, 1, blocks=TIGHT[str(kind)], kind=kind, policy="recompute")
    requests = [ask_both(p, d, number, tokens(60, number), tokens=100) for number in range(2)]
    finish(p, d)
    assert sum(request.num_preemptions for _, request in requests) > 0
    assert set(d.ended.values()) == {"length"}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_traffic(kind: Kind, engines: Start) -> None:
    """Common beginnings, chunks, aborts, emptied caches and preemptions on both sides, in any order."""
    draw = random.Random(str(kind))
    p, d = engines(1, 1, blocks=60, kind=kind, budget=64, policy="recompute", lease_seconds=1)
    starts = [tokens(80, f"start {each}") for each in range(2)]
    live = []
    for index in range(20):
        prompt = draw.choice(starts)[: draw.randrange(81)] + tokens(draw.randrange(1, 60), index)
        prefill, decode = ask_both(p, d, index, prompt, tokens=draw.randrange(1, 30))
        live += [(p, prefill), (d, decode)]
        for _ in range(draw.randrange(6)):
            draw.choice([p, d]).step()
        if draw.random() < 0.3:
            engine, request = draw.choice(live)
            if not request.is_finished():
                engine.abort(request)
        if draw.random() < 0.2:
            preempt_all(draw.choice([p, d]))
    finish(p, d)
    assert len(p.ended) == len(d.ended) == 20
    assert set(d.ended.values()) <= {"length", "abort"}
