"""Requests that wait for P in vLLM's own scheduler of D: no pass comes to them until it has news of them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.request import Request, RequestStatus

from p2pkv.connector.deferring_queue import DeferringQueue
from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.connector.instances import (
    BLOCK,
    Instance,
    asked,
    each_pace,
    inner_id,
    make_request,
    pair_id,
    tokens,
)
from support.connector.multi import MultiInstance


class Counted:
    """How often vLLM's scheduler has looked up a prompt in the prefix cache of this instance."""

    def __init__(self, d: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lookups = 0
        manager = d.scheduler.kv_cache_manager
        look_up = manager.get_computed_blocks

        def count(*arguments: Any) -> Any:
            self.lookups += 1
            return look_up(*arguments)

        monkeypatch.setattr(manager, "get_computed_blocks", count)


def waiting(d: Instance, number: int) -> list[Request]:
    return [d.ask(inner_id(pair_id(each)), tokens(50, each)) for each in range(number)]


@each_pace
def test_each_is_looked_up_once_until_p_begins_and_once_then(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = Instance("D", ahead=ahead, ranks=2)
    counted = Counted(d, monkeypatch)
    requests = waiting(d, 20)
    d.step(10)
    assert counted.lookups == 20
    d.ranks[0].begin(d.key(requests[7]))
    d.step(5)
    assert counted.lookups == 20, "nothing has changed before every rank of P has begun"
    d.ranks[1].begin(d.key(requests[7]))
    d.run_until(lambda: d.rank.said(do.Load))
    d.step(3)
    assert counted.lookups == 21
    assert not any(d.blocks(each) for each in requests if each is not requests[7])


def test_they_count_as_waiting_and_an_engine_with_nothing_else_goes_on() -> None:
    d = Instance("D")
    waiting(d, 3)
    d.step(3)
    assert d.scheduler.get_request_counts() == (0, 3)
    assert d.scheduler.has_unfinished_requests()
    assert len(d.scheduler.deferred_waiting) == 3, "vLLM reports them as deferred"
    assert len(list(d.scheduler.waiting)) == 3 and not d.scheduler.waiting


@pytest.mark.parametrize("ends", ["loads", "fails", "is-aborted", "is-aborted-before-p-begins"])
def test_further_children_of_n_wait_for_the_first_and_take_its_cache(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being looked up meanwhile."""
    d = Instance("D", policy="recompute")
    outer, prompt = pair_id(), tokens(50)
    first = d.ask(inner_id(outer, child=0), prompt, max_tokens=40)
    others = [d.ask(inner_id(outer, child=child), prompt) for child in (1, 2)]
    counted = Counted(d, monkeypatch)
    d.step(5)
    assert counted.lookups == 3
    if ends != "is-aborted-before-p-begins":
        key = d.start_load(first)
        assert not any(d.blocks(each) for each in others)
    if "aborted" in ends:
        d.abort(first)
    else:
        (d.rank.load if ends == "loads" else d.rank.fail)(key)
    d.finish(*others)
    assert "aborted" in ends or first.request_id not in d.ended
    if ends == "loads":
        assert [d.computed[each.request_id] - 3 for each in others] == [len(prompt) % BLOCK] * 2
    d.finish(first)
    assert len(d.rank.said(do.Expect)) == 1
    d.assert_at_rest()


def test_further_children_of_n_go_on_when_the_first_needs_nothing_from_p() -> None:
    """While they wait, another request brings the prompt into D's prefix cache."""
    d = Instance("D")
    prompt, outer = tokens(BLOCK + 1), pair_id()
    first = d.ask(inner_id(outer, child=0), prompt, max_tokens=40)
    second = d.ask(inner_id(outer, child=1), prompt)
    d.step()
    d.finish(d.ask("cmpl-alone-0-12345678", prompt, max_tokens=1))
    d.rank.begin(d.key(first))
    d.finish(second)
    assert [(load.start, load.stop) for load in d.rank.said(do.Load)] == [(0, 0)]
    assert first.request_id not in d.ended
    d.finish(first)
    d.assert_at_rest()


# The order.


def test_those_that_p_begins_late_come_before_younger_ones() -> None:
    """One is in the queue because there is no room for it; it keeps its place behind older requests."""
    d = Instance("D", blocks=8, seqs=8)
    old, middle, young = waiting(d, 3)
    d.step(2)
    d.ask("cmpl-alone-0-12345678", tokens(90, "alone"), max_tokens=30)
    d.step(2)
    for request in (young, old, middle):
        d.rank.begin(d.key(request))
        d.step()
    assert pop_all(d.scheduler.waiting) == [each.request_id for each in (old, middle, young)]


def test_within_a_pass_none_comes_before_the_request_that_vllm_looks_at() -> None:
    """All loads have the blocks that they may have, an older request waits for some, and a younger one, whose
    prompt is in D's prefix cache, leaves its place behind it: that decides the older one."""
    here, cached = Address("127.0.0.1", 22001), tokens(BLOCK + 1, "cached")
    d = Instance("both", port=here.port, blocks=31, seqs=8, held_share=1.0)
    d.finish(d.ask("cmpl-alone-0-12345678", cached, max_tokens=1))
    loading = [d.ask(inner_id(pair_id(each, decode=here)), tokens(80, each)) for each in range(2)]
    for request in loading:
        d.start_load(request)
    old = d.ask(inner_id(pair_id("old", decode=here)), tokens(80, "old"))
    d.step()
    d.rank.begin(d.key(old))
    d.step(2)
    young = d.ask(inner_id(pair_id("young", decode=here)), cached)
    d.finish(young)
    for request in loading:
        d.rank.load(d.key(request))
    d.run_until(lambda: d.rank.facts[d.key(old)].asked)
    d.rank.load(d.key(old))
    d.finish(old, *loading)
    d.assert_at_rest()


def test_one_that_vllm_takes_without_an_answer_is_not_deferred_any_more() -> None:
    """As with prompt_logprobs: preempted and left out of a pass, it would never come back."""
    d = Instance("D")
    request = make_request(inner_id(pair_id()), tokens(50))
    request.skip_reading_prefix_cache = True
    d.add(request)
    d.step()
    assert request.status is RequestStatus.RUNNING
    assert not d.scheduler.waiting._undecided
    d.finish(request)
    d.assert_at_rest()


def test_a_preempted_request_stays_first() -> None:
    queue = DeferringQueue(FCFSRequestQueue(), {"old"})
    old, preempted, young = requests_of_age("old", "preempted", "young")
    preempted.status = RequestStatus.PREEMPTED
    queue.add_request(young)
    queue.prepend_requests([old])
    queue.prepend_request(preempted)
    queue.resume({"old"})
    assert pop_all(queue) == ["preempted", "old", "young"]


def requests_of_age(*names: str) -> list[Request]:
    """The first is the oldest."""
    return [make_request(name, [1, 2], arrival_time=1.0 + age) for age, name in enumerate(names)]


def pop_all(queue: DeferringQueue) -> list[str]:
    """In the order in which passes come to them."""
    found = []
    while queue:
        request = queue.peek_request()
        assert queue.pop_request() is request
        found.append(request.request_id)
    return found


@settings(max_examples=50)
@given(st.data())
@pytest.mark.parametrize("kind", [FCFSRequestQueue, PriorityRequestQueue])
def test_passes_see_the_order_that_they_see_without_it(kind: Any, data: st.DataObject) -> None:
    """Requests come, are decided and leave in any order: passes take them as vLLM's own queue has them."""
    names = [str(number) for number in range(data.draw(st.integers(2, 6)))]
    requests = dict(zip(names, requests_of_age(*names), strict=True))
    undecided = set(names)
    plain, ours = kind(), DeferringQueue(kind(), undecided)
    coming = list(names)
    for _ in range(12):
        act = data.draw(st.sampled_from(["come", "decide", "leave", "pass"]))
        here = [each.request_id for each in plain]
        if act == "come" and coming:
            name = coming.pop(0)
            plain.add_request(requests[name])
            ours.add_request(requests[name])
        elif act == "decide" and undecided:
            name = data.draw(st.sampled_from(sorted(undecided)))
            undecided.discard(name)
            ours.resume({name})
        elif act == "leave" and here:
            name = data.draw(st.sampled_from(here))
            plain.remove_requests([requests[name]])
            ours.remove_requests([requests[name]])
        elif act == "pass":
            room = data.draw(st.integers(0, 3))
            assert a_pass(ours, undecided, room) == a_pass(plain, undecided, room)
        assert len(ours) == len(plain)
        assert sorted(each.request_id for each in ours) == sorted(each.request_id for each in plain)


def a_pass(queue: Any, undecided: set[str], room: int) -> list[str]:
    """As vLLM's scheduler does it: the undecided are skipped and put back, and `room` of the others taken."""
    taken: list[str] = []
    skipped: list[Request] = []
    while queue and len(taken) < room:
        request = queue.pop_request()
        if request.request_id in undecided:
            skipped.insert(0, request)
        else:
            taken.append(request.request_id)
    if skipped:
        queue.prepend_requests(skipped)
    return taken


# Where it is not used.


def test_beside_another_connector_vllms_queue_stays() -> None:
    """What the other one answers may change in every pass."""
    d = MultiInstance("D")
    waiting(d, 1)
    assert isinstance(d.scheduler.waiting, FCFSRequestQueue)


def test_nor_on_p() -> None:
    p, _ = asked("P", tokens(50))
    assert isinstance(p.scheduler.waiting, FCFSRequestQueue)
