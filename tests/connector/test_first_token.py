"""P's token is the client's: what P and D make of the prompt then."""

from __future__ import annotations

import pytest
from vllm.v1.request import Request

from p2pkv.connector.identity import prompt_digest
from p2pkv.engine import commands as do
from p2pkv.first_token import FIRST_TOKEN, FirstToken, found, params
from p2pkv.pairing import transfer_key
from support.connector.instances import Instance, inner_id, make_request, pair_id, tokens

pytestmark = pytest.mark.vllm

PROMPT = tokens(50)
SAMPLED = 7
"""What the made-up engine samples."""


def ask(instance: Instance, what: FirstToken | None, prompt: list[int], *, stops: bool = False) -> Request:
    said = None if what is None else params(what)
    request = make_request(inner_id(pair_id()), prompt, 1, said, instance.hash_block)
    assert request.sampling_params is not None
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
    assert bool(d.metas[-1].idle_wait) == idle, "no other request waits for this load"
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


def test_a_digest_without_the_last_tokens_is_the_shorter_prompts() -> None:
    longer, shorter = (make_request("a", prompt) for prompt in (PROMPT, PROMPT[:-2]))
    assert prompt_digest(longer, without=2) == prompt_digest(shorter) != prompt_digest(longer)


@pytest.mark.parametrize("said", [None, {}, {FIRST_TOKEN: "of a later version"}, {FIRST_TOKEN: [1]}, "text"])
def test_what_is_not_known_says_nothing(said: object) -> None:
    assert found(said) is None
