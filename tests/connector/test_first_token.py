"""P's token is the client's: what P and D make of the prompt then."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request

from p2pkv.connector import scheduler as scheduling
from p2pkv.connector.identity import prompt_digest
from p2pkv.connector.idle_steps import WakeupMessage
from p2pkv.engine import commands as do
from p2pkv.first_token import FIRST_TOKEN, FirstToken, found, params
from p2pkv.pairing import transfer_key
from support.connector.instances import Instance, inner_id, make_request, pair_id, tokens

PROMPT = tokens(50)
SAMPLED = 7
"""What the made-up engine samples."""


def ask(instance: Instance, what: FirstToken | None, prompt: list[int], *, stops: bool = False) -> Request:
    said = None if what is None else params(what)
    request = make_request(inner_id(pair_id()), prompt, 1, said, instance.hash_block)
    request.sampling_params.stop_token_ids = [SAMPLED] if stops else []
    return instance.add(request)


@pytest.mark.parametrize("idle", [True, False])
def test_d_takes_what_p_has_of_a_prompt_that_ends_with_ps_token(idle: bool) -> None:
    p, d = Instance("P"), Instance("D")
    others = [] if idle else [d.ask(inner_id("alone"), tokens(20, "alone"), max_tokens=8)]
    d.step()
    ask(p, FirstToken.HANDED_ON, PROMPT)
    p.step()
    d.rank.handed_on.add(transfer_key(pair_id()))
    paired = ask(d, FirstToken.IN_PROMPT, [*PROMPT, SAMPLED])
    d.step()
    assert d.metas[-1].expects and d.metas[-1].loads, "nothing is waited for before D has blocks"
    d.rank.load(d.key(paired))
    (offer,), (expect,), (load,) = p.rank.said(do.OfferPrompt), d.rank.said(do.Expect), d.rank.said(do.Load)
    assert (expect.tokens, expect.digest) == (offer.tokens, offer.digest)
    assert (load.start, load.stop) == (0, len(PROMPT)), "all that P has"
    d.run_until(lambda: paired.request_id in d.scheduled.num_scheduled_tokens)
    assert d.scheduled.num_scheduled_tokens[paired.request_id] == 1, "P's token alone is computed here"
    d.finish(paired, *others)
    d.assert_at_rest()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("what", [FirstToken.HANDED_ON, None])
@pytest.mark.parametrize("stops", [True, False])
def test_p_keeps_no_blocks_of_an_answer_that_has_ended(
    what: FirstToken | None, stops: bool, ahead: int
) -> None:
    p = Instance("P", ahead=ahead)
    request = ask(p, what, PROMPT, stops=stops)
    p.finish(request)
    p.step(4)
    p.drain()
    released = bool(stops and what)
    assert len(p.rank.said(do.Release)) == released
    assert (request.request_id in p.scheduler.requests) != released
    p.assert_at_rest(*(() if released else (p.held_key,)))


def test_p_holds_nothing_of_an_answer_that_is_its_token_alone() -> None:
    p = Instance("P")
    p.finish(ask(p, FirstToken.WHOLE, PROMPT))
    assert not p.rank.log
    p.assert_at_rest()


def test_a_router_may_release_a_prompt() -> None:
    p = Instance("P")
    request = ask(p, FirstToken.HANDED_ON, PROMPT)
    p.finish(request)
    p.step(2)
    assert request.request_id in p.scheduler.requests
    p.finish(ask(p, FirstToken.RELEASED, PROMPT[:1]))
    assert [each.key for each in p.rank.said(do.Release)] == [p.held_key]
    p.assert_at_rest()
    p.finish(ask(p, FirstToken.RELEASED, PROMPT[:1]))  # once more
    assert len(p.rank.said(do.Release)) == 1
    p.assert_at_rest()


@pytest.mark.parametrize("said", [None, {}, {FIRST_TOKEN: "of a later version"}, {FIRST_TOKEN: [1]}, "text"])
def test_what_is_not_known_says_nothing(said: object) -> None:
    assert found(said) is None


# What D's ranks have said to its engine core beside the results of steps.

KEY = transfer_key(pair_id())


def kept(*, ranks: int = 1, prompt: list[int] = PROMPT, **options: Any) -> tuple[Instance, Any]:
    """A D whose ranks have all of a prompt before its request comes; and its connector."""
    d = Instance("D", ranks=ranks, **options)
    connector: Any = d.scheduler.connector
    request = make_request(inner_id(pair_id()), prompt)
    for rank in d.ranks:
        rank.handed_on.add(KEY)
    assert connector.on_wakeup(WakeupMessage(0, ranks, 0, KEY, len(prompt), prompt_digest(request))) is None
    return d, connector


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("busy", [True, False])
def test_what_waits_on_d_is_loaded_by_the_step_that_computes_the_rest(
    busy: bool, ranks: int, ahead: int
) -> None:
    d, _ = kept(ranks=ranks, ahead=ahead)
    others = [d.ask(inner_id("alone"), tokens(20, "alone"), max_tokens=8)] if busy else []
    d.step()
    for rank in d.ranks:
        rank.meanwhile = lambda rank=rank: rank.load(KEY)
    request = ask(d, FirstToken.IN_PROMPT, [*PROMPT, SAMPLED])
    d.step()
    assert d.scheduled.num_scheduled_tokens[request.request_id] == 1
    assert all(rank.said(do.Load) and rank.waits for rank in d.ranks)
    d.finish(request, *others)
    assert d.computed[request.request_id] == 1 and not d.reported
    d.assert_at_rest()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails_in_its_step_ends_or_is_computed_as_the_policy_says(policy: str) -> None:
    d, _ = kept(policy=policy)
    d.rank.meanwhile = lambda: d.rank.fail(KEY)
    request = ask(d, FirstToken.IN_PROMPT, [*PROMPT, SAMPLED])
    d.finish(request)
    assert d.ended[request.request_id] == ("error" if policy == "fail" else "length")
    assert d.computed[request.request_id] == (1 if policy == "fail" else 1 + len(PROMPT) + 1)
    d.assert_at_rest()


@pytest.mark.parametrize(
    "why", ["another prompt", "long ago", "caches were reset", "its second time", "given up"]
)
def test_what_may_not_be_on_d_any_more_is_loaded_before_its_step(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, connector = kept(prompt=tokens(50, "other") if why == "another prompt" else PROMPT)
    if why == "long ago":
        clock = SimpleNamespace(monotonic=lambda: 1e12)
        monkeypatch.setattr(scheduling, "time", clock)
    elif why == "caches were reset":
        connector.reset_cache()
    elif why == "its second time":
        d.rank.meanwhile = lambda: d.rank.load(KEY)
        d.finish(ask(d, FirstToken.IN_PROMPT, [*PROMPT, SAMPLED]))
        d.assert_at_rest()
        d.rank.meanwhile = lambda: None
    elif why == "given up":
        d.abort(ask(d, FirstToken.IN_PROMPT, [*PROMPT, SAMPLED]))
    request = ask(d, FirstToken.IN_PROMPT, [*PROMPT, SAMPLED])
    d.step()
    assert request.request_id not in d.scheduled.num_scheduled_tokens
    d.rank.load(KEY)
    d.finish(request)
    d.assert_at_rest()
