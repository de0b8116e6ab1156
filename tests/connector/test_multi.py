"""p2pkv beside a storing connector, in vLLM's MultiConnector and in ours: who loads, who pushes, and when."""

import contextlib
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.request import Request

from p2pkv.connector import P2pKvConnector
from p2pkv.connector.vllm_patches import PROMPT_END
from p2pkv.engine import commands as do
from p2pkv.engine.context import Counters
from support.connector.instances import BLOCK, each_pace, each_policy, inner_id, pair_id, tokens, vllm_config
from support.connector.multi import OURS, MultiInstance, StoreMetadata

PROMPT = tokens(100)
WHOLE = 6 * BLOCK
"""Tokens of PROMPT in whole blocks."""
BEGINNING = tuple(PROMPT[:3])

each_length = pytest.mark.parametrize("most", [1, 5], ids=["ends-at-once", "goes-on"])
each_order = pytest.mark.parametrize("store_first", [True, False], ids=["store-first", "p2pkv-first"])


def loads(d: MultiInstance) -> list[tuple[int, int]]:
    return [(load.start, load.stop) for load in d.rank.said(do.Load)]


# D.


@each_order
@each_pace
def test_d_does_not_wait_for_p_where_the_store_has_the_whole_prompt(store_first: bool, ahead: int) -> None:
    d = MultiInstance("D", store_first=store_first, ahead=ahead)
    d.store.held[BEGINNING] = WHOLE
    paired = d.ask(inner_id(pair_id()), PROMPT)
    d.step()
    assert d.scheduled.num_scheduled_tokens == {paired.request_id: len(PROMPT) - WHOLE}
    assert d.store.loaded == [(paired.request_id, WHOLE)]
    assert d.stores[0].began == [paired.request_id]
    assert loads(d) == [(0, 0)], "P is released"
    d.finish(paired)
    d.assert_at_rest()


@each_order
@each_pace
@pytest.mark.parametrize("held", [0, 2 * BLOCK, WHOLE - BLOCK], ids=["nothing", "a-part", "all-but-a-block"])
def test_d_loads_from_p_what_the_store_does_not_have_whole(store_first: bool, ahead: int, held: int) -> None:
    d = MultiInstance("D", store_first=store_first, ahead=ahead, ranks=2)
    d.store.held[BEGINNING] = held
    paired = d.ask(inner_id(pair_id()), PROMPT)
    d.step(2)
    assert not d.blocks(paired), "P has not begun"
    d.load(paired)
    assert loads(d) == [(0, len(PROMPT) - 1)]
    assert not d.store.loaded
    d.finish(paired)
    assert d.computed[paired.request_id] == 1 + 3
    assert d.reported == [paired.request_id]
    d.assert_at_rest()


def test_vllms_own_waits_for_p_and_then_takes_the_store() -> None:
    """What docs/operations.md says of it."""
    d = MultiInstance("D", path=None)
    d.store.held[BEGINNING] = WHOLE
    paired = d.ask(inner_id(pair_id()), PROMPT)
    d.step(3)
    assert not d.blocks(paired)
    d.rank.begin(d.key(paired))
    d.finish(paired)
    assert d.store.loaded == [(paired.request_id, WHOLE)]
    assert loads(d) == [(0, 0)]
    d.assert_at_rest()


@each_order
def test_another_connector_that_is_still_looking_is_waited_for(store_first: bool) -> None:
    d = MultiInstance("D", store_first=store_first)
    d.store.undecided = True
    paired = d.ask(inner_id(pair_id()), PROMPT)
    key = d.begin(paired)
    d.step(2)
    assert not d.blocks(paired)
    d.store.undecided = False
    d.run_until(lambda: loads(d))
    d.rank.load(key)
    d.finish(paired)
    d.assert_at_rest()


@each_order
@each_policy
@pytest.mark.parametrize("begun", [False, True])
def test_a_p_that_fails_fails_nothing_that_the_store_has(store_first: bool, policy: str, begun: bool) -> None:
    d = MultiInstance("D", store_first=store_first, policy=policy)
    d.store.undecided = True
    paired = d.ask(inner_id(pair_id()), PROMPT)
    d.step()
    if begun:
        d.rank.begin(d.key(paired))
    d.rank.fail(d.key(paired))
    d.step(2)
    d.store.held[BEGINNING], d.store.undecided = WHOLE, False
    d.finish(paired)
    assert d.ended == {paired.request_id: "length"}
    assert d.store.loaded == [(paired.request_id, WHOLE)]
    d.assert_at_rest()


def test_a_failed_push_is_treated_as_the_outer_configuration_says() -> None:
    """vLLM's scheduler reads the policy there, and so must p2pkv: before admission, too."""
    d = MultiInstance("D", policy="recompute")
    waiting, loading = (d.ask(inner_id(pair_id(n)), tokens(60, n)) for n in range(2))
    d.step()
    d.rank.fail(d.key(waiting))
    d.rank.begin(d.key(loading))
    d.run_until(lambda: waiting.request_id in d.ended and loads(d))
    assert loads(d) == [(0, 59)], "the first is computed here, and never loaded"
    d.rank.fail(d.key(loading))
    d.finish(loading)
    assert set(d.ended.values()) == {"length"}
    d.assert_at_rest()


# P.


def filling(most: int = 1, **options: Any) -> tuple[MultiInstance, Request]:
    """A P whose store has the whole blocks of the prompt that it is asked for."""
    p = MultiInstance("P", **options)
    p.store.held[BEGINNING] = WHOLE
    return p, p.ask(inner_id(pair_id()), PROMPT, max_tokens=most)


@each_pace
@each_length
def test_what_a_store_fills_on_p_is_pushed_only_once_vllm_has_taken_the_step(ahead: int, most: int) -> None:
    """The load runs in the step itself: nothing may be read before, and the load may fail."""
    p, request = filling(most, ahead=ahead)
    p.step()
    assert p.stores[0].began == [request.request_id]
    assert len(p.rank.said(do.OfferPrompt)) == 1, "D is told that the prefill has begun"
    assert not p.rank.said(do.Computed)
    table = p.blocks(request)
    p.run_until(p.prefills)
    (said,) = p.prefills()
    assert said.stop == len(PROMPT)
    assert said.blocks.blocks[0][: len(table)] == table
    p.finish(request)
    p.step(2)
    assert not p.rank.said(do.Abort)
    p.assert_at_rest(p.held_key)


@each_pace
@each_length
@each_policy
def test_a_failed_load_on_p_never_reaches_d(ahead: int, most: int, policy: str) -> None:
    p, request = filling(most, ahead=ahead, policy=policy)
    p.stores[0].spoil = True
    p.step(1 + ahead)
    assert not p.rank.said(do.Computed)
    p.finish(request)
    p.step(2)
    if policy == "fail":
        assert p.ended[request.request_id] == "error"
        assert not p.rank.said(do.Computed)
        assert [abort.key for abort in p.rank.said(do.Abort)] == [p.held_key]
        p.assert_at_rest()
    else:
        assert p.ended[request.request_id] == "length"
        first, *_, last = p.prefills() * 2
        assert (first.cached, first.start, last.stop) == (BLOCK, BLOCK, len(PROMPT))
        p.assert_at_rest(p.held_key)


@each_order
@pytest.mark.parametrize("saved_first", [True, False])
def test_blocks_are_kept_until_both_have_done_with_them(store_first: bool, saved_first: bool) -> None:
    p = MultiInstance("P", store_first=store_first, ranks=2)
    p.store.saves = True
    outer = pair_id()
    request = p.ask(inner_id(outer), PROMPT, max_tokens=1)
    p.finish(request)
    p.step()
    key = p.held_key

    def push() -> None:
        for rank in p.ranks:
            rank.free(key)

    def save() -> None:
        for store in p.stores:
            store.saved = {request.request_id}

    for deed in (save, push) if saved_first else (push, save):
        assert not p.reported
        deed()
        p.step(2)
    assert p.reported == [request.request_id]
    p.store.saves = False
    p.finish(p.ask(inner_id(outer), PROMPT, max_tokens=1))
    assert len(p.rank.said(do.HoldPrompt)) == 2, "the key is free again"
    push()
    p.assert_at_rest()


@each_order
@each_pace
@pytest.mark.parametrize("begun", [False, True])
def test_a_prompt_may_end_on_p_while_a_store_loads_it(store_first: bool, ahead: int, begun: bool) -> None:
    """vLLM waits for one report then, which is the store's. `begun`: it was preempted before."""
    p, request = filling(5, store_first=store_first, ahead=ahead)
    if begun:
        p.step()
        p.drain()
        p.scheduler.reset_prefix_cache(reset_running_requests=True)
    p.store.later = True
    p.step(2)
    p.abort(request)
    p.step(2)
    assert p.free < p.all_free, "the store still writes there"
    p.stores[0].came = {request.request_id}
    p.step(2)
    p.assert_at_rest()


class Watched(MultiInstance):
    """Knows which blocks hold what a failed load has left in them, or what was computed on it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.bad: set[int] = set()
        super().__init__(*args, **options)

    @property
    def recompute(self) -> set[str]:
        """Running requests that have yet to compute what a failed load has left. vLLM's prefix cache keeps it
        meanwhile: where such a request ends or is preempted, others take it, also without p2pkv."""
        table = self.scheduler.kv_cache_manager.get_block_ids
        running = [each.request_id for each in self.scheduler.running]
        return {each for each in running if not self.bad.isdisjoint(table(each)[0])}

    def _run(self, scheduled: Any) -> Any:
        output = super()._run(scheduled)
        (store,) = [m for m in scheduled.kv_connector_metadata.metadata if isinstance(m, StoreMetadata)]
        self.bad.difference_update(block for _, blocks in store.loads for block in blocks)
        self.bad |= output.kv_connector_output.invalid_block_ids
        old = scheduled.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        starts |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        for request_id, count in scheduled.num_scheduled_tokens.items():
            start = starts[request_id]
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            written = table[start // BLOCK : -(-(start + count) // BLOCK)]
            if self.bad.isdisjoint(table[: -(-start // BLOCK)]):
                self.bad.difference_update(written)
            else:
                self.bad.update(written)
        for prefill in self.metas[-1].prefills:
            (table,) = prefill.blocks.blocks
            assert self.bad.isdisjoint(table[: -(-prefill.stop // BLOCK)]), "D would get what is wrong"
        return output


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_d_never_gets_what_a_failed_load_has_left_on_p(data: st.DataObject) -> None:
    """Explored for long it finds what vLLM 0.32 does by itself: one step ahead, and where two requests share
    a block that did not come, the second keeps a token that it has computed on it."""
    ahead = data.draw(st.integers(0, 1), "ahead")
    p = Watched("P", policy="recompute", ahead=ahead, budget=data.draw(st.sampled_from([48, 200]), "budget"))
    prompts = [tokens(70, number) for number in range(2)]
    requests = []
    for number in range(data.draw(st.integers(3, 25), "moves")):
        move = data.draw(st.sampled_from(["step", "step", "ask", "ask", "store", "spoil", "forget", "abort"]))
        prompt = data.draw(st.sampled_from(prompts))
        if move == "step":
            p.step()
        elif move == "ask":
            stop = data.draw(st.sampled_from([40, 70]))
            outer = pair_id(number) if data.draw(st.booleans()) else f"alone-{number}"
            most = data.draw(st.sampled_from([1, 3]))
            requests.append(p.ask(inner_id(outer), [*prompt[:stop], 7 + number], max_tokens=most))
        elif move == "store":
            p.store.held[tuple(prompt[:3])] = data.draw(st.sampled_from([2, 4])) * BLOCK
        elif move == "spoil":
            p.stores[0].spoil = True
        elif move == "forget":
            p.drain()
            if not p.recompute:
                with contextlib.suppress(RuntimeError):
                    p.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif live := [
            each for each in requests if not each.is_finished() and each.request_id not in p.recompute
        ]:
            p.abort(data.draw(st.sampled_from(live)))
    for _ in range(100):
        if not p.scheduler.requests:
            break
        for key in list(p.rank.facts):
            p.rank.free(key)
        p.step()
    p.drain()
    p.assert_at_rest()
    assert "error" not in p.ended.values()


# What both report, and p2pkv alone.


@pytest.mark.parametrize("path", [OURS, None], ids=["ours", "vllms"])
def test_counters_reach_vllms_log_and_its_metrics_page(path: str | None) -> None:
    p = MultiInstance("P", ranks=2, path=path)
    request = p.ask(inner_id(pair_id()), PROMPT, max_tokens=1)
    for number, rank in enumerate(p.ranks):
        rank.counters.add("bytes_sent", 1000 + number)
    p.finish(request)
    aggregated = p.outputs[0].kv_connector_stats
    payload = aggregated.to_dict()
    assert payload == {"P2pKvConnector": {"bytes_sent": 2001}}
    lines: list[str] = []
    logging = KVConnectorLogging(p.config.kv_transfer_config)
    logging.observe(payload)
    logging.log(lambda text, *args: lines.append(text % args))
    assert "2001" in lines[0]
    before = REGISTRY.get_sample_value("p2pkv_bytes_sent_total", {"model_name": "both", "engine": "0"}) or 0
    with mock.patch.object(PROMPT_END, "install") as install:  # this call is that of an API server
        prom = KVConnectorProm(p.config, ["model_name", "engine"], {0: ["both", "0"]})
    install.assert_called_once_with(())
    prom.observe(payload, 0)
    after = REGISTRY.get_sample_value("p2pkv_bytes_sent_total", {"model_name": "both", "engine": "0"})
    assert after == before + 2001
    p.ranks[1].free(p.held_key)
    p.assert_at_rest(p.held_key)


def test_prometheus_has_one_counter_for_each_and_engines_have_labels() -> None:
    kinds: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    # The second as when an engine is made anew in this process.
    first = {"bytes_sent": 10, "unknown": 3}, 10, None
    for counts, total, skipped in (first, ({"bytes_sent": 1}, 11, ["prompt_end"])):
        config = vllm_config("P", skip_patches=skipped)
        with mock.patch.object(PROMPT_END, "install") as install:
            made = P2pKvConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], labels)
        install.assert_called_once_with(skipped or ())
        made.observe(counts, engine_idx=1)
        for engine, expected in (("0", None), ("1", total)):
            of = {"model_name": "m", "engine": engine}
            assert REGISTRY.get_sample_value("p2pkv_bytes_sent_total", of) == expected
    exposed = {family.name for family in REGISTRY.collect() if family.name.startswith("p2pkv_")}
    assert exposed == {f"p2pkv_{name}" for name in Counters.NAMES}
