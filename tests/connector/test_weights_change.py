"""No answer comes from KV of other weights: what vLLM's scheduler and our connector do when they change."""

from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from p2pkv.connector.scheduler import CHANGED_ON_D, CHANGED_ON_P
from p2pkv.engine import commands as do
from support.connector.instances import (
    BLOCK,
    Instance,
    asked,
    each_pace,
    each_policy,
    inner_id,
    make_request,
    pair_id,
    tokens,
)

PROMPT = tokens(50)


def change(instance: Instance) -> str:
    """Its weights change; what they are called now."""
    connector: Any = instance.scheduler.connector
    connector.generation.call("update_it", (), {}, lambda: None)
    reset(instance)
    return str(connector.generation.name)


def reset(instance: Instance) -> None:
    """As `/reset_prefix_cache?reset_external=true`, whatever vLLM can empty of its own."""
    assert instance.scheduler.reset_connector_cache()


# P.


def aborted(p: Instance) -> dict[str, str]:
    return {each.key: each.reason for each in p.rank.said(do.Abort)}


@each_pace
def test_p_names_its_weights_in_each_offer_and_sends_nothing_of_before(ahead: int) -> None:
    p = Instance("P", budget=64, blocks=32, ahead=ahead)
    done, half, waiting = (p.ask(inner_id(pair_id(n)), tokens(100, n), max_tokens=1) for n in range(3))
    p.run_until(lambda: half.num_computed_tokens and done.request_id in p.ended)
    assert half.num_computed_tokens < 100 and not waiting.num_computed_tokens
    keys = [hold.key for hold in p.rank.said(do.HoldPrompt)]
    before = len(p.rank.said(do.Computed))
    name = change(p)
    p.finish(half, waiting)
    assert [(each.key, each.generation) for each in p.rank.said(do.OfferPrompt)] == [
        (keys[0], ""),
        (keys[1], ""),
        (keys[2], name),
    ]
    assert aborted(p) == {keys[0]: CHANGED_ON_P, keys[1]: CHANGED_ON_P}
    said = {key for each in p.rank.said(do.Computed)[before:] for key, _ in each.prompts}
    assert said <= {keys[2]} | ({keys[1]} if ahead else set()), "a step that was under way may end"
    p.step(3)
    assert set(p.reported) == {done.request_id, half.request_id}
    p.rank.free(keys[2])
    p.assert_at_rest()


def test_a_preempted_prompt_of_before_is_revoked_all_the_same() -> None:
    """P may still read the blocks for D when vLLM takes them back."""
    p, request = asked("P", tokens(100), max_tokens=1, budget=64)
    p.step()
    (hold,) = p.rank.said(do.HoldPrompt)
    change(p)
    p.scheduler._preempt_request(p.scheduler.running.pop(), 0.0)
    p.scheduler.prev_step_scheduled_req_ids.clear()
    p.step()
    assert p.rank.revoked == [hold.key]
    p.finish(request)
    p.assert_at_rest()


def test_a_duplicate_that_has_begun_before_does_not_push_in_place_of_the_first() -> None:
    p = Instance("P", budget=32, policy="fail")
    first = make_request(inner_id(pair_id()), tokens(100), max_tokens=1)
    second = make_request(inner_id(pair_id()), tokens(100), max_tokens=1)
    p.add(first)
    p.scheduler.waiting.remove_request(first)  # as with priorities: the second is begun before the first
    p.add(second)
    p.step()
    assert second.num_computed_tokens and not first.num_computed_tokens
    change(p)
    p.scheduler.waiting.add_request(first)
    p.abort(first)
    p.finish(second)
    assert not p.rank.said(do.Computed)
    p.assert_at_rest()


# D.


def dropped(d: Instance) -> list[str]:
    return [each.reason for each in d.rank.said(do.Drop)]


@each_pace
@each_policy
def test_d_loads_nothing_of_other_weights(policy: str, ahead: int) -> None:
    d, request = asked("D", PROMPT, policy=policy, ranks=2, ahead=ahead)
    d.begin(request, "version v2")
    d.finish(request)
    (reason,) = dropped(d)
    assert "P computed this prompt with weights 'version v2', and D has 'start'" in reason
    assert "/update_weight_version" in reason
    assert not any(load.stop for load in d.rank.said(do.Load))
    assert d.ended == {request.request_id: "length" if policy == "recompute" else "error"}
    assert d.computed[request.request_id] == (len(PROMPT) + 3 if policy == "recompute" else 0)
    d.assert_at_rest()


@pytest.mark.parametrize("other", ["", None], ids=["another", "nothing"])
def test_one_rank_with_another_offer_is_enough_unless_it_gets_nothing(other: str | None) -> None:
    """P offers nothing to a stage without KV layers."""
    d = Instance("D", policy="fail", ranks=2)
    name = change(d)
    request = d.ask(inner_id(pair_id()), PROMPT)
    key = d.begin(request, name, other)
    if other is None:
        d.run_until(lambda: d.rank.said(do.Load))
        for rank in d.ranks:
            rank.load(key)
    d.finish(request)
    assert d.ended == {request.request_id: "length" if other is None else "error"}
    d.assert_at_rest()


def test_a_prompt_that_d_has_cached_itself_is_no_failure() -> None:
    d, request = asked("D", PROMPT[: BLOCK + 1], policy="fail")
    d.begin(request, "version of P alone")
    first = d.ask("cmpl-first-0-12345678", PROMPT[: BLOCK + 1])
    d.finish(first, request)
    assert d.ended[request.request_id] == "length"
    assert not dropped(d)
    d.assert_at_rest()


MOMENTS = [
    (moment, ahead) for moment in ("asked", "begun", "loading", "half-loaded", "loaded") for ahead in (0, 1)
]
"""Of a load, and the steps that vLLM schedules ahead. Once vLLM has taken the report of a load, the request
counts as one that decodes; until then the report may be under way, in a step ahead."""


@each_policy
@pytest.mark.parametrize(("moment", "ahead"), [*MOMENTS, ("reported", 1)])
def test_what_is_on_its_way_when_d_changes_is_not_used(
    moment: str, policy: str, ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    d, request = asked("D", PROMPT, policy=policy, ranks=2, ahead=ahead)
    if moment == "asked":
        d.step()
        key = d.key(request)
    else:
        key = d.begin(request)
    if moment not in ("asked", "begun"):
        d.run_until(lambda: d.rank.said(do.Load))
        d.drain()
    if moment in ("half-loaded", "loaded", "reported"):
        d.ranks[0].load(key)
    if moment in ("loaded", "reported"):
        d.ranks[1].load(key)
    if moment == "reported":
        d.step()
    change(d)
    if moment == "asked":
        for rank in d.ranks:
            rank.begin(key, "")
    d.finish(request)
    assert d.ended == {request.request_id: "length" if policy == "recompute" else "error"}
    assert d.computed[request.request_id] == (len(PROMPT) + 3 if policy == "recompute" else 0)
    assert len(dropped(d)) == (moment != "reported")
    assert f"is not used: {CHANGED_ON_D}" in caplog.text or dropped(d)
    d.assert_at_rest()


def test_a_reset_ends_what_is_loading_and_lets_the_others_load() -> None:
    d = Instance("D", policy="fail")
    loading = d.ask(inner_id(pair_id(0)), PROMPT)
    d.start_load(loading)
    waiting = d.ask(inner_id(pair_id(1)), tokens(50, "waiting"))
    d.step()
    reset(d)
    d.load(waiting)
    d.finish(loading, waiting)
    assert d.ended == {loading.request_id: "error", waiting.request_id: "length"}
    assert dropped(d) == [CHANGED_ON_D]
    (invalidate,) = d.rank.said(do.Invalidate)
    assert invalidate == do.Invalidate("", CHANGED_ON_D)
    d.assert_at_rest()


# vLLM's prefix cache, on either side.


@pytest.mark.parametrize("role", ["P", "D"])
@pytest.mark.parametrize("length", [5, BLOCK, 2 * BLOCK + 3], ids=["part", "block", "blocks"])
def test_nothing_of_before_is_found_in_vllms_cache(role: str, length: int) -> None:
    """Also not what a request that runs across the change caches later, on top of what it had."""
    instance = Instance(role, budget=200)
    prompt = tokens(length)
    running = instance.ask("cmpl-running-0-12345678", prompt, max_tokens=3 * BLOCK)
    instance.run_until(lambda: running.num_output_tokens > 2)
    stale = set(instance.blocks(running))
    change(instance)
    instance.run_until(lambda: running.num_output_tokens == 3 * BLOCK - 1)
    stale |= set(instance.blocks(running))
    assert len(stale) > length // BLOCK + 2
    conversation = [*prompt, *running.output_token_ids, 9]
    first = instance.ask("cmpl-first-0-12345678", conversation, max_tokens=1)
    instance.step()
    assert instance.computed[first.request_id] == len(conversation)
    fresh = set(instance.blocks(first))
    instance.finish(first)
    second = instance.ask("cmpl-second-0-12345678", conversation, max_tokens=1)
    instance.step()
    assert instance.computed[second.request_id] < BLOCK + 1, "what was computed since is found"
    cached = instance.blocks(second)[: (len(conversation) - 1) // BLOCK]
    assert set(cached) <= fresh and not set(cached) & stale


def test_an_adapter_that_is_loaded_again_under_its_name_finds_nothing_of_the_one_before(
    tmp_path: Path,
) -> None:
    """vLLM knows its blocks by name and path. Other requests lose what they had cached, and go on."""
    d = Instance("D", budget=200)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")

    def asked(name: str, number: int, **more: Any) -> Request:
        adapter = LoRARequest("adapter", number, str(tmp_path), **more)
        request = d.ask(f"cmpl-{name}-0-12345678", PROMPT, lora_request=adapter)
        d.finish(request)
        return request

    cached = len(PROMPT) - 3 * BLOCK
    assert d.computed[asked("first", 1).request_id] == len(PROMPT) + 3
    assert d.computed[asked("again", 1).request_id] == cached + 3
    (tmp_path / "adapter_model.safetensors").write_bytes(b"the second")
    assert d.computed[asked("in-place", 1, load_inplace=True).request_id] == len(PROMPT) + 3
    assert d.computed[asked("in-place-again", 1, load_inplace=True).request_id] == cached + 3
    assert d.computed[asked("new-number", 2).request_id] == len(PROMPT) + 3
    assert not d.rank.said(do.Invalidate)
