"""Speculative decoding: what an instance says of its drafter, and which tokens D computes for it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from msgspec import structs
from vllm.config import LoadConfig, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput

from p2pkv.config import ConfigError
from p2pkv.connector import describe
from p2pkv.connector.describe import Layers, cache_of, local_groups, prompt_tail, refuse_what_cannot_pair
from p2pkv.connector.identity import Pairs, drafter_of
from p2pkv.connector.metadata import WorkerMetadata
from p2pkv.connector.scheduler import BlockTables, ConsumerScheduler, HeldBlocks, ProducerScheduler
from p2pkv.demo.tiny_model import TinyLlama
from p2pkv.engine import commands as do
from p2pkv.protocol.handshake import Refused, fit, negotiate
from p2pkv.protocol.messages import Hello
from support.connector.instances import (
    BLOCK,
    D_ADDRESS,
    FULL,
    LAYERS,
    P_ADDRESS,
    SMALL,
    Instance,
    caches_of,
    hello_with,
    inner_id,
    kv_cache_config,
    kv_groups,
    make_request,
    pair_id,
    tokens,
    vllm_config,
    write,
)
from support.models.eagle import TinyEagle

GUESSES = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": 3}
DRAFT = TinyLlama(layers=1, hidden=32, heads=4, kv_heads=1, head_dim=16, mlp=32, vocab=512)


def eagle(seed: int = 7, guesses: int = GUESSES) -> dict[str, Any]:
    head = write(TinyEagle(target=SMALL, seed=seed))
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": guesses}


def draft_model() -> dict[str, Any]:
    return {"method": "draft_model", "model": str(write(DRAFT)), "num_speculative_tokens": GUESSES}


EAGLE_LAYERS = [*LAYERS, "model.layers.2.self_attn.attn"]
DRAFT_LAYERS = [*LAYERS, "draft_model.model.layers.0.self_attn.attn"]


def hello(
    role: str, drafter: Mapping[str, Any] | None = None, layers: Sequence[str] = tuple(LAYERS)
) -> Hello:
    return hello_with(vllm_config(role, drafter=drafter), caches_of(layers))


# What an instance says.


def test_an_eagle_heads_layer_travels_with_the_models() -> None:
    said = hello("P", eagle(), EAGLE_LAYERS)
    assert [group.layers for group in said.cache.groups] == [(3,)]
    assert "with drafter eagle" in said.weights
    negotiate(said, hello("D", eagle(), EAGLE_LAYERS))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_draft_model_has_its_own_number_of_heads(tp: int) -> None:
    """At TP 2 a rank has one head of each; the draft model's only one is on both ranks."""
    config = vllm_config("P", drafter=draft_model())
    config.parallel_config.tensor_parallel_size = tp
    heads = dict(zip(DRAFT_LAYERS, (2 // tp, 2 // tp, 1), strict=True))
    kv = kv_groups(*(([name], replace(FULL, num_kv_heads=held)) for name, held in heads.items()))
    caches = {name: torch.zeros(4, held, BLOCK, 32) for name, held in heads.items()}
    cache, said = cache_of(config, Layers(caches, kv))
    assert sorted((group.heads, group.layers) for group in said.groups) == [(1, (1,)), (2, (2,))]
    assert sorted(cache.groups[number].heads for number in range(2)) == sorted([1, 2 // tp])


SIDES: dict[str, Callable[[str], Hello]] = {
    "none": hello,
    "ngram": lambda role: hello(role, NGRAM),
    "eagle": lambda role: hello(role, eagle(), EAGLE_LAYERS),
    "another eagle": lambda role: hello(role, eagle(seed=8), EAGLE_LAYERS),
}


@pytest.mark.parametrize(
    ("on_p", "on_d"), [("none", "eagle"), ("eagle", "none"), ("eagle", "another eagle"), ("eagle", "ngram")]
)
def test_other_drafters_with_kv_are_refused(on_p: str, on_d: str) -> None:
    p, d = SIDES[on_p]("P"), SIDES[on_d]("D")
    for mine, theirs in ((p, d), (d, p)):
        with pytest.raises(Refused, match=r"weights differ.*the same --speculative-config on both sides"):
            negotiate(mine, theirs)
    assert fit(p) != fit(d), "or a proxy would pair them"


def test_drafters_without_kv_and_numbers_of_guesses_may_differ() -> None:
    plain = hello("P")
    negotiate(plain, hello("D", NGRAM))
    assert fit(plain) == fit(hello("D", NGRAM))
    negotiate(hello("P", eagle(guesses=2), EAGLE_LAYERS), hello("D", eagle(guesses=5), EAGLE_LAYERS))


def test_a_drafters_configuration_counts_but_for_what_vllm_and_its_own_class_write_there() -> None:
    """The longest request and the number of guesses may differ between P and D. EAGLE-3's class writes, and
    of several pipeline stages only the last one makes a drafter, and all say the same."""
    files = (Path(vllm.__file__).parent / "model_executor" / "models").glob("*.py")
    drafters = [each for each in files if re.search("eagle|dflash|dspark|xpress|mtp", each.name)]
    written = {name for each in drafters for name in re.findall(r"self\.config\.(\w+) = ", each.read_text())}
    assert "target_layer_count" in written
    seen = []
    derived = {"max_position_embeddings": 99, "num_lookahead_tokens": 5, "dspark_draft_topk": 4}
    for settings in ({}, derived, dict.fromkeys(written, 2), {"rms_norm_eps": 1.0}):
        config = vllm_config("D", drafter=draft_model())
        config.speculative_config.draft_model_config.hf_config.update(settings)
        seen.append(drafter_of(config))
    assert seen[0] == seen[1] == seen[2] != seen[3]


def test_a_drafters_cache_may_have_a_type_of_its_own() -> None:
    """kv_cache_dtype of --speculative-config, beside a model's cache whose rows have as many bytes."""

    def said(role: str, dtype: str, ours: str | None) -> Hello:
        config = vllm_config(role, drafter=eagle())
        config.cache_config.cache_dtype, config.speculative_config.kv_cache_dtype = dtype, ours  # type: ignore
        return hello_with(config, caches_of(EAGLE_LAYERS, dtype=torch.uint8))

    mixed = said("P", "fp8", "fp8_e5m2")
    assert [group.dtype for group in mixed.cache.groups] == ["uint8 (fp8_e4m3)", "uint8 (fp8_e5m2)"]
    negotiate(mixed, said("D", "fp8", "fp8_e5m2"))
    negotiate(said("P", "fp8", None), said("D", "fp8", "fp8_e4m3"))
    for dtype, ours, match in (("fp8", None, "groups differ: 2 "), ("fp8_e5m2", "fp8", "element types")):
        with pytest.raises(Refused, match=match):
            negotiate(mixed, said("D", dtype, ours))


def test_a_drafter_without_files_needs_a_name() -> None:
    config = vllm_config("D", drafter=draft_model())
    config.speculative_config.draft_load_config = LoadConfig(load_format="tensorizer")
    with pytest.raises(ConfigError, match=r"load format tensorizer.*weights_name"):
        drafter_of(config)
    assert drafter_of(config, "one") != drafter_of(config, "other")


def mtp(guesses: int, modules: int) -> Any:
    """As vLLM's SpeculativeConfig for a model whose checkpoint has so many MTP modules."""
    return SimpleNamespace(
        method="mtp",
        num_speculative_tokens=guesses,
        draft_model_config=None,
        uses_draft_kv_cache=lambda: True,
        use_eagle=lambda: True,
        use_multi_module_mtp=lambda: min(guesses, modules) > 1,
        use_gemma4_mtp=lambda: False,
    )


def test_of_several_mtp_modules_as_many_must_run_on_both() -> None:
    def said(guesses: int, modules: int) -> str:
        return drafter_of(SimpleNamespace(speculative_config=mtp(guesses, modules)))  # type: ignore[arg-type]

    assert said(2, 1) == said(5, 1) == "mtp"
    assert said(2, 4) != said(3, 4)


def test_a_drafter_that_reads_the_models_kv_may_be_on_one_side_only() -> None:
    """Gemma 4's, whose layers vLLM registers with the memory of the model's."""
    config, own = vllm_config("D", drafter=eagle()), caches_of(LAYERS)
    drafting, shared = config.speculative_config, {"draft_model.layers.0.attn": own[list(LAYERS)[1]]}
    drafting.method, drafting.draft_model_config.hf_config.model_type = "mtp", "gemma4_mtp"
    negotiate(hello("P"), hello_with(config, own | shared))


def test_stages_of_a_model_with_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps a drafter on the last stage; its layers come last also where their names come first."""
    names = ["model.layers.0.attn", "model.layers.1.attn", "draft_model.layers.0.attn"]
    kv, caches = kv_cache_config(layers=names), caches_of(names)
    config = vllm_config("P", drafter=eagle())
    refuse_what_cannot_pair(config)
    whole = cache_of(config, Layers(caches, kv))[1]
    stages = [Layers({name: caches[name] for name in some}, kv) for some in (names[:1], names[1:])]
    described = [[group.described for group in local_groups(config, layers)] for layers in stages]
    config.parallel_config.pipeline_parallel_size = 2
    monkeypatch.setattr(describe.stage_layers, "exchange_with_stages", lambda mine: described)
    for layers in stages:
        cache, said = cache_of(config, layers)
        assert said.groups[0].layers == (1, 2) and cache.groups[0].layers == len(layers.all)
        assert structs.replace(said.groups[0], layers=(3,)) == whole.groups[0]
    assert [*Layers(caches, kv).indices] == names
    monkeypatch.setattr(describe.stage_layers, "exchange_with_stages", lambda mine: described[::-1])
    with pytest.raises(ConfigError, match=r"out of the order .* serve it without --pipeline-parallel-size"):
        cache_of(config, stages[0])


# The prompt's tail.


def test_d_computes_what_a_drafter_reads_ahead() -> None:
    def tail(drafter: Any) -> int:
        lookahead = VllmConfig.num_prefill_lookahead_tokens.fget(SimpleNamespace(**drafter))
        return prompt_tail(SimpleNamespace(num_prefill_lookahead_tokens=lookahead))  # type: ignore[arg-type]

    assert tail({"speculative_config": None}) == 1
    for config in (NGRAM, eagle(), draft_model()):
        assert prompt_tail(vllm_config("D", drafter=config)) == 1
    assert tail({"speculative_config": mtp(3, 1), "num_speculative_tokens": 3}) == 1
    assert tail({"speculative_config": mtp(3, 4), "num_speculative_tokens": 3}) == 3


@pytest.mark.parametrize("ahead", [1, 3])
def test_in_vllms_scheduler_d_loads_all_but_the_tail(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots for guesses come after the load; until then D's blocks are those of the prompt."""
    lookahead = property(lambda config: ahead)
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", lookahead)
    d = Instance("D", drafter=eagle())
    prompt = tokens(3 * BLOCK)
    paired = d.ask(inner_id(pair_id()), prompt)
    key = d.start_load(paired)
    (load,) = d.rank.said(do.Load)
    assert (load.start, load.stop) == (0, len(prompt) - ahead)
    assert load.blocks == (d.blocks(paired),) and len(load.blocks[0]) == 3
    d.rank.load(key)
    d.run_until(lambda: paired.request_id in d.scheduled.num_scheduled_tokens)
    padded = len(d.scheduled.scheduled_spec_decode_tokens.get(paired.request_id, ()))
    assert d.scheduled.num_scheduled_tokens[paired.request_id] - padded == ahead
    d.finish(paired)
    d.assert_at_rest()


def test_p_with_a_drafter_sends_from_the_prompts_blocks() -> None:
    p = Instance("P", drafter=eagle())
    prompt = tokens(3 * BLOCK)
    request = p.ask(inner_id(pair_id()), prompt, max_tokens=1)
    p.finish(request)
    stops = [stop for each in p.rank.said(do.Computed) for _, stop in each.prompts]
    assert max(stops) == len(prompt), "never slots of guesses"
    p.assert_at_rest(p.held_key)


def test_a_p_that_leaves_the_tail_out_and_its_d_count_the_same_tokens() -> None:
    """As where layers see a window or keep a state."""
    tables = BlockTables((BLOCK,), tail=3, p_computes_last=False)
    for length, left in ((10, 7), (4, 1), (3, 3), (1, 1)):
        p = ProducerScheduler(Pairs(P_ADDRESS, "P"), tables, HeldBlocks(64, 0.5), 1, None)
        request, shared = make_request(inner_id(pair_id()), tokens(length)), tokens(length)
        request.prompt_token_ids = shared  # as children of one request have it
        p.new(request)
        assert request.num_prompt_tokens == left and request.prompt_token_ids == tokens(length)[:left]
        assert list(request.all_token_ids) == tokens(length)[:left] and len(shared) == length
        assert request.max_tokens == (1 if left < length else 4)
        d = ConsumerScheduler(Pairs(D_ADDRESS, "D"), 1, True, tables)
        d.new(make_request(inner_id(pair_id()), tokens(length)))
        ((_, expect),) = d.step(SchedulerOutput.make_empty()).expects
        assert expect.tokens == left


def test_of_a_state_d_takes_all_or_nothing() -> None:
    """If vLLM asked for fewer tokens than P sends, a state would be that of later ones."""
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    for whole, external, wanted in ((True, 20, True), (False, 29, True), (False, 20, False)):
        d = ConsumerScheduler(Pairs(D_ADDRESS, "D"), 1, True, BlockTables((BLOCK,), p_computes_last=whole))
        request = make_request(inner_id(pair_id()), tokens(30))
        d.new(request)
        d.reported(WorkerMetadata(begun={request.request_id: [""]}), set(), failed=(), early=False)
        assert d.matched(request, 0) == (29, True)
        d.allocated(request, blocks, external)  # type: ignore[arg-type]
        meta = d.step(SchedulerOutput.make_empty())
        assert (len(meta.loads), len(meta.drops)) == ((1, 0) if wanted else (0, 1))
