"""D's connector inside vLLM's own scheduler: what waits, what is loaded, and what happens if it is not."""

import pytest
from vllm.v1.core.sched.interface import PauseState

from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.connector import instances

PROMPT = instances.tokens(50)


@instances.each_pace
def test_it_waits_until_every_rank_has_heard_that_p_has_begun_and_others_pass(ahead: int) -> None:
    d, paired = instances.asked("D", PROMPT, ranks=2, ahead=ahead)
    alone = d.ask("cmpl-no-pair-0-12345678", instances.tokens(20, "alone"))
    d.step(2)
    assert alone.num_output_tokens, "a later request is served meanwhile"
    key = d.key(paired)
    d.ranks[0].begin(key)
    d.step(3)
    assert not d.blocks(paired), "no blocks for a prompt that P has not begun everywhere"
    d.ranks[1].begin(key)
    d.step(3)
    for rank in d.ranks:
        (load,) = rank.said(do.Load)
        assert (load.start, load.stop) == (0, len(PROMPT) - 1)
        assert load.blocks == (d.blocks(paired),)
    d.ranks[0].load(key)
    d.step(3)
    assert not paired.num_output_tokens, "not before every rank has all of it"
    d.ranks[1].load(key)
    d.run_until(lambda: paired.request_id in d.scheduled.num_scheduled_tokens)
    assert d.scheduled.num_scheduled_tokens[paired.request_id] == 1, "the last token is computed here"
    d.run_until(lambda: len(d.ended) == 2)
    assert set(d.ended.values()) == {"length"}
    d.assert_at_rest()


@pytest.mark.parametrize(
    ("cached", "length", "missing"),
    [
        (2 * instances.BLOCK + 3, 50, (2 * instances.BLOCK, 49)),
        (instances.BLOCK + 1, instances.BLOCK + 1, (0, 0)),
        (0, 1, (0, 0)),
    ],
)
def test_only_what_d_has_not_cached_is_asked_for(cached: int, length: int, missing: tuple[int, int]) -> None:
    """A prompt of which nothing is missing waits for nobody, and releases P."""
    d = instances.Instance("D")
    if cached:
        d.finish(d.ask("cmpl-first-0-12345678", PROMPT[:cached]))
    paired = d.ask(instances.inner_id(instances.pair_id()), PROMPT[:length])
    if missing == (0, 0):
        d.step(2)
        assert paired.num_output_tokens
    else:
        d.rank.load(d.start_load(paired))
    (load,) = d.rank.said(do.Load)
    assert (load.start, load.stop) == missing
    assert load.blocks == ((d.blocks(paired),) if load.stop else ())
    d.finish(paired)
    d.assert_at_rest()


@instances.each_pace
@instances.each_policy
@pytest.mark.parametrize("moment", ["waiting", "half-begun", "begun", "loading", "loading-on-both"])
def test_a_transfer_that_fails_is_not_asked_for_again(moment: str, policy: str, ahead: int) -> None:
    """The prompt is computed here, or its request fails. `begun`: the failure crosses the admission."""
    d, paired = instances.asked("D", PROMPT, policy=policy, ranks=2, ahead=ahead)
    if "loading" in moment:
        key = d.start_load(paired)
    elif moment == "begun":
        key = d.begin(paired)
        d.step()
    else:
        d.step()
        key = d.key(paired)
    if moment == "half-begun":
        d.ranks[0].begin(key)
    d.ranks[1].fail(key)
    if moment not in ("waiting", "half-begun"):
        d.step(3)
        assert moment == "begun" or not d.ended, "the other rank may still write into the pages"
        (d.ranks[0].load if moment == "loading" else d.ranks[0].fail)(key)
    d.finish(paired)
    assert d.ended == {paired.request_id: "length" if policy == "recompute" else "error"}
    assert d.computed[paired.request_id] == (len(PROMPT) + 3 if policy == "recompute" else 0)
    if moment != "begun":
        assert sum(load.stop > 0 for load in d.rank.said(do.Load)) == ("loading" in moment)
        assert "loading" in moment or policy == "fail" or not d.reported, "vLLM was never told to wait"
    after = d.ask("cmpl-after-0-12345678", PROMPT)
    d.finish(after)
    assert d.ended[after.request_id] == "length"
    d.assert_at_rest()


@instances.each_pace
@pytest.mark.parametrize("end", ["load", "fail"])
def test_a_pause_that_keeps_requests_waits_for_kv_that_comes_in_and_gives_its_blocks_back(
    end: str, ahead: int
) -> None:
    d, paired = instances.asked("D", PROMPT, policy="recompute", ahead=ahead)
    key = d.begin(paired)
    d.run_until(lambda: d.blocks(paired))
    d.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    d.drain()
    assert d.scheduler.has_requests(), "vLLM's pause ends when nothing has to be done"
    d.step(2)
    getattr(d.rank, end)(key)
    d.run_until(lambda: not d.scheduler.has_requests())
    d.drain()
    assert d.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert d.free == d.all_free
    d.scheduler.set_pause_state(PauseState.UNPAUSED)
    d.run_until(lambda: d.ended)
    assert d.ended == {paired.request_id: "length"}
    assert d.computed[paired.request_id] - 3 == len(PROMPT), "its caches were emptied: it is computed here"
    d.assert_at_rest()


def test_such_a_pause_takes_the_blocks_of_loads_that_have_ended_and_wait_for_one_more() -> None:
    d = instances.Instance("D", policy="recompute", blocks=6)
    others = d.ask("cmpl-no-pair-0-12345678", instances.tokens(17, "alone"), max_tokens=40)
    d.step()
    paired = d.ask(instances.inner_id(instances.pair_id()), instances.tokens(33))
    key = d.start_load(paired)
    d.run_until(lambda: not d.free)
    d.rank.load(key)
    d.step(2)
    assert d.blocks(paired) and paired.request_id not in d.scheduler.finished_recving_kv_req_ids
    d.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert d.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    d.scheduler.set_pause_state(PauseState.UNPAUSED)
    d.finish(paired, others)
    assert set(d.ended.values()) == {"length"}
    d.assert_at_rest()


@pytest.mark.parametrize(
    "request_id",
    [
        "cmpl-plain-0-12345678",
        "cmpl-___prefill_addr_127.0.0.1:21001___decode_addr_nobody-0-12345678",
        instances.inner_id(instances.pair_id(decode=Address("127.0.0.1", 21999))),
        "cmpl-" + instances.pair_id() + "-0-12345678-and-more",
    ],
    ids=["no-pair", "half-a-pair", "another-d", "unknown-ending"],
)
def test_a_request_that_is_not_for_this_pair_is_served_here_alone(
    request_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    d = instances.Instance("D")
    with caplog.at_level("WARNING", logger="p2pkv"):
        for again in range(2):
            d.ask(f"{again}{request_id}" if again else request_id, PROMPT)
    d.run_until(lambda: len(d.ended) == 2)
    assert not d.rank.log
    said = [record.message for record in caplog.records if record.name == "p2pkv"]
    assert len(said) == 1, "said once, not for every request"
    assert "alone" in said[0]
    d.assert_at_rest()
