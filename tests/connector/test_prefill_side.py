"""P's connector inside vLLM's own scheduler: what the workers are told of prompts, and who keeps pages."""

from collections import Counter

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from p2pkv.connector.held_blocks import HeldBlocks
from p2pkv.connector.identity import Pairs, prompt_digest
from p2pkv.connector.scheduler import BlockTables, ProducerScheduler
from p2pkv.engine import commands as do
from support.connector.instances import (
    BLOCK,
    D_ADDRESS,
    P_ADDRESS,
    Instance,
    asked,
    each_pace,
    inner_id,
    make_request,
    pair_id,
    tokens,
)


@each_pace
def test_a_prompt_is_held_then_offered_then_computed_in_contiguous_chunks(ahead: int) -> None:
    p, request = asked("P", tokens(150), max_tokens=1, budget=64, ahead=ahead)
    blocks: list[int] = []
    while request.request_id not in p.ended:
        p.step()
        blocks = p.blocks(request) or blocks
    key = p.held_key
    assert p.rank.said(do.HoldPrompt) == [do.HoldPrompt(key, D_ADDRESS)]
    assert p.rank.said(do.OfferPrompt) == [do.OfferPrompt(key, D_ADDRESS, 150, prompt_digest(request))]
    said = p.prefills(key)
    assert [each.stop for each in said] == [64, 128, 150]
    for each in said:
        (table,) = each.blocks.blocks
        assert table == blocks[: len(table)]
        assert len(table) * BLOCK >= each.stop
    assert p.blocks(request) == blocks, "vLLM keeps the pages"
    p.step(5)
    assert request.request_id in p.scheduler.requests
    p.assert_at_rest(key)
    assert p.reported == [request.request_id]


def test_a_prefix_that_another_request_computes_in_this_very_step_is_not_said_early() -> None:
    """vLLM counts such tokens as cached, but no layer has them before the forward has passed it."""
    p = Instance("P", budget=200)
    prompt = tokens(64)
    requests = [p.ask(inner_id(pair_id(index)), [*prompt, index, 1, 2], max_tokens=1) for index in range(2)]
    p.step()
    assert p.computed[requests[1].request_id] == 3, "the second prompt's prefix counts as cached"
    assert p.blocks(requests[0])[:4] == p.blocks(requests[1])[:4]
    early = [each for each in p.rank.said(do.Computed) if each.layer_stop - each.layer > 1][:-1]
    assert not early, "all but the sweep at the end come from the hooks of single layers"
    (step,) = {each.prompts for each in p.rank.said(do.Computed)}
    assert [stop for _, stop in step] == [67, 67]


def test_block_tables_are_read_twice_for_each_prompt_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts with a cached beginning there are: once for the prompt, once for the step."""
    shared = tokens(3 * BLOCK)
    p = Instance("P", blocks=200, budget=512, seqs=32)
    p.ask("cmpl-first-0-12345678", shared, max_tokens=1)
    p.step(2)
    requests = [p.ask(inner_id(pair_id(n)), [*shared, *tokens(5, n)], max_tokens=1) for n in range(16)]
    manager, connector = p.scheduler.kv_cache_manager, p.scheduler.connector
    get_block_ids, build = manager.get_block_ids, connector.build_connector_meta
    read: Counter[str] = Counter()

    def build_and_count(output: SchedulerOutput) -> KVConnectorMetadata:
        with monkeypatch.context() as patch:
            patch.setattr(manager, "get_block_ids", lambda name: read.update([name]) or get_block_ids(name))
            output.kv_connector_block_state.resolve_block_ids = manager.get_block_ids
            return build(output)

    monkeypatch.setattr(connector, "build_connector_meta", build_and_count)
    p.step()
    assert set(p.scheduled.num_scheduled_tokens) == {each.request_id for each in requests}
    assert [each.cached for each in p.metas[-1].prefills] == [3 * BLOCK] * 16
    assert read == {each.request_id: 2 for each in requests}


@each_pace
def test_the_pages_are_kept_until_nothing_reads_them_and_no_longer(ahead: int) -> None:
    p = Instance("P", ranks=2, ahead=ahead)
    requests = [p.ask(inner_id(pair_id(index)), tokens(30, index), max_tokens=1) for index in range(3)]
    p.finish(*requests)
    p.step(4)
    held = p.free
    keys = [hold.key for hold in p.rank.said(do.HoldPrompt)]
    for rank in p.ranks:
        rank.free(keys[1])
        p.step(2 + ahead)
        p.drain()
        assert p.reported == ([] if rank is p.ranks[0] else [requests[1].request_id])
    assert p.free == held + 2
    for rank in p.ranks:
        rank.free(keys[0])
        rank.free(keys[2])
    p.assert_at_rest()


def test_preempted_and_aborted_between_two_steps_its_pages_are_not_read_any_more() -> None:
    p, request = asked("P", tokens(30), max_tokens=8)
    p.step(2)
    assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
    p.abort(request)
    p.step()
    key = p.held_key
    assert p.rank.revoked == [key]
    assert [abort.key for abort in p.rank.said(do.Abort)] == [key]
    p.assert_at_rest()


def test_the_same_id_again_while_the_first_ones_pages_are_held_is_served_without_a_push() -> None:
    """One key must never mean the pages of two requests."""
    p = Instance("P")
    outer = pair_id()
    first = p.ask(inner_id(outer), tokens(30, "first"), max_tokens=1)
    p.finish(first)
    second = p.ask(inner_id(outer), tokens(40, "second"), max_tokens=1)
    p.finish(second)
    key = p.held_key
    assert [each.stop for each in p.prefills(key)] == [30]
    p.assert_at_rest(key)
    third = p.ask(inner_id(outer), tokens(50, "third"), max_tokens=1)
    p.finish(third)
    assert [each.stop for each in p.prefills(key)] == [30, 50], "then the key is free again"
    p.assert_at_rest(key)
    assert p.reported == [first.request_id, third.request_id]


@pytest.mark.parametrize("request_id", ["cmpl-plain-0-12345678", "cmpl-___decode_addr_x-0-12345678"])
def test_requests_without_a_pair_are_none_of_our_business(request_id: str) -> None:
    p = Instance("P")
    request = p.ask(request_id, tokens(100), params={"transfer_id": "x"}, max_tokens=3)
    p.finish(request)
    assert not p.rank.log
    p.assert_at_rest()


def test_another_prompt_under_the_same_id_takes_nothing_over() -> None:
    p = Instance("P", budget=32)
    outer = pair_id()
    first = p.ask(inner_id(outer), tokens(100, "first"), max_tokens=1)
    p.step()
    second = p.ask(inner_id(outer), tokens(100, "second"), max_tokens=1)
    p.abort(first)
    p.finish(second)
    assert [abort.key for abort in p.rank.said(do.Abort)] == [p.held_key]
    p.assert_at_rest()
    assert p.reported == [first.request_id]


def test_of_embeddings_mixed_with_tokens_the_last_is_left_to_d_wherever_it_is_said() -> None:
    embeds, which = torch.rand(20, 4), [True, False] * 10
    request = make_request(
        inner_id(pair_id()), tokens(20), prompt_embeds=embeds, prompt_is_token_ids=list(which)
    )
    tables = BlockTables((BLOCK,), tail=3, p_computes_last=False)
    ProducerScheduler(Pairs(P_ADDRESS, "P"), tables, HeldBlocks(64, 0.5), 1, None).new(request)
    assert request.num_prompt_tokens == len(request.all_token_ids) == 17
    assert torch.equal(request.prompt_embeds, embeds[:17])
    assert request.prompt_is_token_ids == which[:17]
