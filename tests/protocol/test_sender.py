"""P's side: event in, then the states and what is to be done; chunks, and leases by a virtual clock."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from protocol.sender_rigs import (
    KEY,
    LEASE,
    ROW,
    TERMS,
    TOKENS,
    WHOLE,
    Rig,
    cancelled,
    chunk,
    claimed,
    computed,
    done,
    drained,
    ended,
    grant,
    held,
    offer,
    offered,
    prefetch,
    released,
    sending,
    sent,
)

from p2pkv.protocol import sender as module
from p2pkv.protocol.handshake import RowFormat
from p2pkv.protocol.messages import Chunk, Failed, Piece
from p2pkv.protocol.sender import PROMPT, SEND, PromptEvent, PromptPhase, Sender, SendEvent, SendPhase
from p2pkv.protocol.state_machine import (
    Decision,
    Finished,
    LocalProtocolError,
    RemoteProtocolError,
    SendTo,
    Transmit,
)

# One transfer, from end to end.


def test_a_transfer_that_is_claimed_before_the_prefill_begins() -> None:
    rig = Rig()
    assert rig.claim() == [] and rig.states == (PromptPhase.HELD, [SendPhase.CLAIMED])
    assert rig.offer() == [SendTo(0, offer())]
    assert rig.want() == [] and rig.states == (PromptPhase.OFFERED, [SendPhase.SENDING])
    assert rig.compute(4, (0, 1)) == []
    assert rig.sender.flush() == [SendTo(0, chunk(0, Piece(0, 2, 3, 0, 4)))]
    order = Transmit(0, grant(0, 4 * ROW), (Piece(0, 2, 3, 0, 4),))
    assert rig.grant(0, 4 * ROW) == [order]
    assert rig.sender.readable(order) and order.pieces
    assert rig.sender.sent(order, filler=False) == [SendTo(0, sent(0))]
    assert rig.compute(TOKENS) == [SendTo(0, chunk(1, Piece(0, 2, 3, 4, 9), Piece(0, 3, 4, 0, 9)))]
    assert rig.states == (PromptPhase.COMPUTED, [SendPhase.SENDING])
    rest = Transmit(0, grant(1, 14 * ROW), (Piece(0, 2, 3, 4, 9), Piece(0, 3, 4, 0, 9)))
    assert rig.grant(1, 14 * ROW) == [rest]
    assert rig.sender.sent(rest, filler=False) == [SendTo(0, sent(1)), Finished(True)]
    assert rig.states == (PromptPhase.RELEASED, [SendPhase.DRAINED])
    assert rig.done() == [] and rig.states == (PromptPhase.RELEASED, [SendPhase.DONE])


def test_the_pages_are_held_until_every_target_has_read_them() -> None:
    rig = Rig(expects=(0, 1))
    rig.offer()
    rig.compute()
    rig.claim(0)
    assert rig.carry(rig.want(rank=0)) == [SendTo(0, sent(0))]
    assert rig.done(0) == [] and rig.sender.flush() == []
    assert rig.states == (PromptPhase.COMPUTED, [SendPhase.DONE])
    assert rig.claim(1) == [SendTo(1, offer(ready=True))]
    assert rig.carry(rig.want(0, 4, rank=1)) == [SendTo(1, sent(0)), Finished(True)]


def test_an_empty_want_releases_the_pages() -> None:
    rig = Rig(expects=(0, 1))
    for rank in (0, 1):
        rig.claim(rank)
    rig.offer()
    assert rig.want(9, 9, rank=0) == [] and rig.states == (
        PromptPhase.OFFERED,
        [SendPhase.DONE, SendPhase.CLAIMED],
    )
    assert rig.want(0, 0, rank=1) == [Finished(True)]
    assert rig.compute() == rig.sender.flush() == rig.sender.abort("late") == []


def test_an_empty_want_before_the_offer_releases_the_pages_when_the_prefill_begins() -> None:
    rig = Rig()
    rig.claim()
    assert rig.want(0, 0) == [] and rig.states == (PromptPhase.HELD, [SendPhase.DONE])
    assert rig.offer() == [Finished(True)]


def test_a_rank_that_owes_nobody_anything_releases_its_pages_at_once() -> None:
    rig = Rig(expects=())
    assert rig.offer() == [Finished(True)]


def test_a_stage_without_kv_layers_has_computed_a_prompt_with_its_last_token() -> None:
    sender = Sender(KEY, [()], TERMS)
    sender.offer(TOKENS, b"prompt")
    assert sender.computed(0, 0, TOKENS - 1, 0.0) == [] and sender.deadline is None
    assert sender.computed(0, 0, TOKENS, 1.0) == [] and sender.deadline == 1.0 + LEASE


# Every row of the tables.


PROMPTS: dict[PromptPhase, Callable[[], Rig]] = {
    PromptPhase.HELD: held,
    PromptPhase.OFFERED: offered,
    PromptPhase.COMPUTED: computed,
    PromptPhase.RELEASED: released,
    PromptPhase.ENDED: ended,
}


def do(rig: Rig, event: PromptEvent) -> list[Decision]:
    match event:
        case "OFFER":
            return rig.offer()
        case "COMPLETE":
            return rig.compute()
        case "REVOKE":
            rig.sender.revoke()
            return []
        case "RELEASE":
            rig.claim()
            return rig.want(0, 0)
        case "END":
            return rig.sender.abort("enough")


@pytest.mark.parametrize(("state", "event"), [(state, of) for state, row in PROMPT.items() for of in row])
def test_every_row_of_the_prompts_table(state: PromptPhase, event: PromptEvent) -> None:
    rig = PROMPTS[state]()
    assert rig.sender.prompt.state is state
    effects = do(rig, event)
    assert rig.sender.prompt.state is PROMPT[state][event]
    assert len([each for each in effects if isinstance(each, Finished)]) == rig.sender.prompt.ended


LEGS: dict[SendPhase, Callable[[], Rig]] = {
    SendPhase.CLAIMED: claimed,
    SendPhase.PREFETCHING: prefetch,
    SendPhase.SENDING: sending,
    SendPhase.DRAINED: drained,
    SendPhase.DONE: done,
    SendPhase.ENDED: cancelled,
}

REMOTE: dict[SendEvent, Callable[[Rig], list[Decision]]] = {
    "PREFETCHING": lambda rig: rig.want(prefetch=True),
    "WANT": lambda rig: rig.want(),
    "NOTHING": lambda rig: rig.want(0, 0),
    "DONE": lambda rig: rig.done(),
    "END": lambda rig: rig.cancel(),
}


@pytest.mark.parametrize(("state", "event"), [(state, on) for state, row in SEND.items() for on in row])
def test_every_row_of_the_legs_table(state: SendPhase, event: SendEvent) -> None:
    rig = LEGS[state]()
    assert rig.states[1] == [state]
    if event == "DRAIN":
        rig.carry(rig.compute())
    else:
        REMOTE[event](rig)
    assert rig.states[1] == [SEND[state][event]]


@pytest.mark.parametrize(
    "state", [SendPhase.CLAIMED, SendPhase.PREFETCHING, SendPhase.SENDING, SendPhase.DRAINED]
)
def test_every_other_word_of_d_is_its_error(state: SendPhase) -> None:
    for event in REMOTE.keys() - SEND[state].keys():
        rig = LEGS[state]()
        with pytest.raises(RemoteProtocolError, match=f"send k/0: {event} in state {state.name}"):
            REMOTE[event](rig)
        assert rig.states[1] == [state]


@pytest.mark.parametrize("state", [SendPhase.DONE, SendPhase.ENDED])
def test_after_the_end_of_a_leg_no_word_of_d_has_an_effect(state: SendPhase) -> None:
    rig = LEGS[state]()
    assert [word(rig) for word in REMOTE.values()] == [[]] * len(REMOTE)
    assert rig.sender.lost(0, "gone") == [] and rig.states[1] == [state]


def test_p_vouches_for_what_is_alive() -> None:
    alive = {state: state not in (SendPhase.DONE, SendPhase.ENDED) for state in SendPhase}
    assert {state: make().sender.vouches(0, 1) for state, make in LEGS.items()} == alive
    assert not sending().sender.vouches(0, 2) and not sending().sender.vouches(1, 1)


# How what is computed is cut into chunks, and when they are announced.


def test_full_chunks_go_at_once_and_the_rest_when_the_step_is_over() -> None:
    rig = Rig(replace(TERMS, chunk_bytes=4 * ROW))
    rig.offer()
    rig.claim()
    rig.want()
    assert rig.compute(3, (0, 1)) == []
    assert rig.compute(6, (0, 1)) == [SendTo(0, chunk(0, Piece(0, 2, 3, 0, 4)))]
    assert rig.compute(6, (1, 2)) == [
        SendTo(0, chunk(1, Piece(0, 2, 3, 4, 6))),
        SendTo(0, chunk(2, Piece(0, 3, 4, 0, 4))),
    ]
    assert rig.sender.flush() == [SendTo(0, chunk(3, Piece(0, 3, 4, 4, 6)))]
    assert rig.sender.flush() == []


def test_a_chunk_is_no_larger_than_d_takes() -> None:
    rig = computed()
    rig.claim(limit=4 * ROW)
    said = rig.want()
    sizes = [
        each.message.nbytes for each in said if isinstance(each, SendTo) and isinstance(each.message, Chunk)
    ]
    assert max(sizes) == 4 * ROW and sum(sizes) == 18 * ROW


def test_nothing_is_announced_before_it_is_known_how_much_d_takes() -> None:
    rig = computed()
    rig.claim(limit=0)
    assert rig.want() == [] and rig.sender.flush() == []
    assert rig.claim(limit=1 << 20) == [SendTo(0, WHOLE)]
    assert rig.claim(limit=0) == []


def test_announced_chunks_are_bounded_and_go_on_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANNOUNCED", 3)
    rig = Rig(replace(TERMS, chunk_bytes=1))
    rig.offer()
    rig.compute()
    rig.claim()
    said = rig.want()
    assert [each.message.chunk for each in said if isinstance(each, SendTo)] == [0, 1, 2]  # type: ignore[union-attr]
    count = 0
    while said:
        count += len(said)
        assert len(rig.sender.sends[0].announced) <= 3
        after = rig.carry(said)
        said = [each for each in after if isinstance(each, SendTo) and isinstance(each.message, Chunk)]
    assert count == 18 and rig.states == (PromptPhase.RELEASED, [SendPhase.DRAINED])


# For how long pages wait for a D.


def test_no_lease_runs_while_p_computes_and_nobody_has_claimed() -> None:
    for rig in (held(), offered()):
        assert rig.sender.deadline is None and rig.sender.tick(1e9) == []
    rig = offered()
    rig.now = 5.0
    rig.compute()
    assert rig.sender.deadline == 5.0 + LEASE
    rig.now = 6.0
    rig.compute()
    assert rig.sender.deadline == 5.0 + LEASE
    assert rig.sender.tick(5.0 + LEASE - 0.01) == []
    silent = f"D did not answer in time: no word from it about this request for {LEASE:g} s"
    reason = f"{silent}; P has freed its blocks"
    assert rig.sender.tick(5.0 + LEASE) == [Finished(False, reason)]


def test_a_claimed_leg_must_be_renewed_whatever_p_does() -> None:
    for make in (held, offered):
        rig = make()
        rig.now = 1.0
        rig.claim()
        rig.now = 20.0
        rig.claim()
        assert rig.sender.deadline == 20.0 + LEASE and rig.sender.tick(20.0 + LEASE - 0.01) == []
        effects = rig.sender.tick(20.0 + LEASE)
        assert isinstance(effects[0], SendTo) and isinstance(effects[0].message, Failed)
        assert isinstance(effects[1], Finished)


def test_the_lease_after_completion_runs_until_all_have_claimed_anew_from_each_claim() -> None:
    rig = Rig(expects=(0, 1))
    rig.offer()
    rig.compute()
    rig.now = 10.0
    rig.claim(0)
    for rig.now in (20.0, 30.0, 39.0):
        rig.claim(0)
    assert rig.sender.deadline == 10.0 + LEASE
    rig.claim(1)
    for rig.now in (50.0, 60.0):
        rig.claim(0)
        rig.claim(1)
    assert rig.sender.deadline == 60.0 + LEASE


def test_every_word_of_d_renews_and_an_ended_leg_has_no_lease() -> None:
    rig = claimed()
    rig.now = 1.0
    rig.want()
    assert rig.sender.deadline == 1.0 + LEASE
    rig.compute(9)
    said = rig.sender.flush()
    rig.now = 2.0
    rig.carry(said)
    assert rig.sender.deadline == 2.0 + LEASE and rig.states[1] == [SendPhase.DRAINED]
    rig.now = 3.0
    rig.done()
    assert rig.sender.deadline is None
    rig = claimed()
    rig.cancel()
    assert rig.sender.deadline is None


# What D may not say.


def test_wanting_more_than_was_offered_is_an_error_of_the_peer() -> None:
    rig = claimed()
    with pytest.raises(RemoteProtocolError, match="goes beyond the 10 tokens of the offer"):
        rig.want(0, 11)
    rig = Rig()
    rig.claim()
    with pytest.raises(RemoteProtocolError, match="goes beyond the 0 tokens of the offer"):
        rig.want(0, 1)
    assert rig.states[1] == [SendPhase.CLAIMED]


def test_wanting_from_inside_a_unit_is_an_error_of_the_peer() -> None:
    rig = Rig(wires=[RowFormat("page:vec", 4, ROW)])
    rig.offer()
    rig.claim()
    with pytest.raises(RemoteProtocolError, match="multiples of 4"):
        rig.want(2, 9)
    rig.want(4, 9)
    assert rig.compute(8) == [] and rig.sender.flush() == [
        SendTo(0, Chunk(KEY, 1, 0, 2 * ROW, (Piece(0, 2, 4, 4, 8),)))
    ]
    assert rig.compute() == [SendTo(0, Chunk(KEY, 1, 1, 2 * ROW, (Piece(0, 2, 4, 8, 12),)))]


@pytest.mark.parametrize(("number", "nbytes"), [(1, 18 * ROW), (0, 1), (0, 18 * ROW)])
def test_a_grant_of_what_was_not_announced_or_twice_is_an_error_of_the_peer(number: int, nbytes: int) -> None:
    rig = computed()
    rig.claim()
    rig.want()
    if (number, nbytes) == (0, 18 * ROW):
        rig.grant(0, 18 * ROW)
    with pytest.raises(RemoteProtocolError, match="grants what was not announced, or grants it twice"):
        rig.grant(number, nbytes)


# Stale, repeated, in an odd order.


def test_another_attempt_and_another_rank_are_ignored() -> None:
    rig = sending()
    for rank, attempt in ((0, 0), (0, 2), (1, 1)):
        assert rig.want(0, 99, rank, attempt) == rig.done(rank, attempt) == rig.cancel(rank, attempt) == []
    assert rig.states[1] == [SendPhase.SENDING]


def test_a_stale_grant_is_obeyed_with_filler() -> None:
    rig = sending()
    assert rig.grant(5, 77, attempt=0) == [Transmit(0, grant(5, 77, 0), ())]
    order = Transmit(0, grant(5, 77, 0), ())
    assert not order.pieces and not rig.sender.readable(order)
    assert rig.sender.sent(order, filler=True) == [SendTo(0, sent(5, True, 0))]


def test_claiming_again_renews_and_says_nothing() -> None:
    rig = claimed()
    rig.now = 20.0
    assert rig.claim() == [] and rig.sender.deadline == 20.0 + LEASE
    rig = drained()
    assert rig.claim() == [] and rig.states[1] == [SendPhase.DRAINED]
    rig = done()
    assert rig.claim() == [] and rig.states[1] == [SendPhase.DONE]


def test_who_claims_what_has_ended_is_told_so_each_time() -> None:
    rig = ended()
    for _ in range(2):
        assert rig.claim() == [SendTo(0, Failed(KEY, 1, "aborted"))]
    assert rig.sender.sends == {}
    rig = cancelled()
    assert rig.claim() == [SendTo(0, Failed(KEY, 1, "D cancelled: enough"))]
    rig = released()
    assert rig.claim(attempt=1) == []
    effect = rig.claim(attempt=2)[0]
    assert isinstance(effect, SendTo) and isinstance(effect.message, Failed) and effect.message.attempt == 2


def test_a_d_that_has_restarted_is_not_taken_for_the_one_before() -> None:
    for make in (done, drained, sending):
        rig = make()
        rig.sender.lost(0, "restarted")
        assert not rig.sender.vouches(0, 1)
        effect = rig.claim(attempt=1)[0]
        assert isinstance(effect, SendTo) and isinstance(effect.message, Failed)
        assert rig.claim(attempt=2) == [SendTo(0, offer(2, ready=rig.states[0] is PromptPhase.COMPUTED))]


def test_a_later_attempt_takes_the_place_of_the_one_before() -> None:
    for rig in (cancelled(), sending()):
        assert rig.claim(attempt=3) == [SendTo(0, offer(3))]
        assert rig.states[1] == [SendPhase.CLAIMED]
        assert rig.want(0, 0, attempt=1) == [] and rig.states[1] == [SendPhase.CLAIMED]
        stale = rig.claim(attempt=2)[0]
        assert isinstance(stale, SendTo) and isinstance(stale.message, Failed) and stale.message.attempt == 2
        assert rig.states[1] == [SendPhase.CLAIMED]
        assert rig.want(attempt=3) == []
        again = chunk(0, Piece(0, 2, 4, 0, 9), attempt=3)
        assert rig.compute() == [SendTo(0, again)]
        assert rig.carry([SendTo(0, again)]) == [SendTo(0, sent(0, attempt=3))]
        assert rig.states[1] == [SendPhase.DRAINED]


def test_a_chunk_of_an_earlier_attempt_that_goes_out_late_is_void_and_counts_for_nothing() -> None:
    rig = computed()
    rig.claim()
    rig.want()
    order = rig.grant(0, 18 * ROW)[0]
    rig.claim(attempt=2)
    rig.want(attempt=2)
    assert not rig.sender.readable(order)
    assert rig.sender.sent(order, filler=True) == [SendTo(0, sent(0, True))]
    assert rig.states == (PromptPhase.COMPUTED, [SendPhase.SENDING])


def test_offers_are_repeated_when_a_prefill_begins_again() -> None:
    rig = offered()
    rig.claim()
    rig.sender.revoke()
    assert rig.offer() == [SendTo(0, offer())]


# Preemption.


def test_what_was_granted_when_the_pages_were_revoked_goes_out_void_and_then_again() -> None:
    rig = sending()
    rig.compute(6)
    assert rig.sender.flush() == [SendTo(0, chunk(0, Piece(0, 2, 4, 0, 6)))]
    order = rig.grant(0, 12 * ROW)[0]
    assert isinstance(order, Transmit) and rig.sender.readable(order)
    rig.sender.revoke()
    assert not rig.sender.readable(order)
    assert rig.sender.sent(order, filler=True) == [SendTo(0, sent(0, True))]
    rig.offer()
    assert rig.compute(3) == rig.sender.flush() == []
    assert rig.compute(TOKENS) == [SendTo(0, chunk(1, Piece(0, 2, 4, 0, 6), Piece(0, 2, 4, 6, 9)))]
    assert rig.states[1] == [SendPhase.SENDING]


def test_what_was_announced_when_the_pages_were_revoked_is_read_after_the_recompute() -> None:
    rig = sending()
    rig.compute(6)
    rig.sender.flush()
    rig.sender.revoke()
    order = rig.grant(0, 12 * ROW)[0]
    assert isinstance(order, Transmit) and not rig.sender.readable(order)
    rig.offer()
    rig.compute(5)
    assert not rig.sender.readable(order)
    rig.compute(6, (0, 1))
    assert not rig.sender.readable(order)
    rig.compute(6, (1, 2))
    assert rig.sender.readable(order)
    assert rig.sender.sent(order, filler=False) == [SendTo(0, sent(0))]


def test_rows_that_were_sent_before_a_preemption_are_not_sent_again() -> None:
    rig = sending()
    rig.compute(6)
    rig.carry(rig.sender.flush())
    rig.sender.revoke()
    rig.offer()
    assert rig.compute() == [SendTo(0, chunk(1, Piece(0, 2, 4, 6, 9)))]


def test_a_preempted_prompt_is_not_complete() -> None:
    rig = computed()
    rig.sender.revoke()
    assert rig.states[0] is PromptPhase.OFFERED and rig.sender.deadline is None
    rig.compute(TOKENS, (0, 1))
    assert rig.states[0] is PromptPhase.OFFERED
    rig.compute(TOKENS, (1, 2))
    assert rig.states[0] is PromptPhase.COMPUTED


def test_tokens_computed_before_the_offer_are_an_error_of_ours() -> None:
    with pytest.raises(LocalProtocolError, match="before the prompt was offered"):
        held().compute()


# The ends.


def test_an_abort_is_said_to_every_open_leg_once() -> None:
    rig = claimed()
    rig.claim(1, attempt=4)
    rig.cancel(0)
    assert rig.sender.abort("client left") == [
        SendTo(1, Failed(KEY, 4, "client left")),
        Finished(False, "client left"),
    ]
    assert rig.states == (PromptPhase.ENDED, [SendPhase.ENDED, SendPhase.ENDED])
    assert rig.sender.abort("again") == rig.offer() == rig.compute() == rig.sender.flush() == []
    rig.sender.revoke()
    assert rig.sender.deadline is None and rig.sender.tick(1e9) == []


def test_a_cancel_of_every_target_releases_the_pages_once_the_prefill_has_begun() -> None:
    rig = claimed()
    rig.claim(1)
    assert rig.cancel(0) == []
    assert rig.cancel(1) == [Finished(False, "D cancelled: enough")]
    rig = Rig()
    rig.claim()
    assert rig.cancel() == [] and rig.states == (PromptPhase.HELD, [SendPhase.ENDED])
    assert rig.offer() == [Finished(False, "D cancelled: enough")]


def test_a_lost_target_ends_its_leg_only() -> None:
    rig = claimed()
    rig.claim(1)
    assert rig.sender.lost(0, "gone") == [SendTo(0, Failed(KEY, 1, "gone"))]
    assert rig.sender.lost(0, "gone") == [] == rig.sender.lost(7, "never seen")
    rig.want(rank=1)
    assert rig.carry(rig.compute())[-1:] == [Finished(False, "gone")]


def test_a_link_that_breaks_costs_what_it_carried_and_not_what_waits() -> None:
    rig = computed()
    rig.claim()
    assert rig.sender.unlinked(0, "link broke") == [] == rig.want()
    assert rig.sender.deadline == rig.now + LEASE
    assert rig.claim() == [SendTo(0, WHOLE)]
    assert rig.sender.unlinked(0, "link broke")[0] == SendTo(0, Failed(KEY, 1, "link broke"))
    assert rig.sender.unlinked(7, "never seen") == []


def test_a_lost_target_that_had_everything_in_flight_hears_of_it_and_the_outcome_stays() -> None:
    rig = offered()
    rig.claim()
    rig.want()
    assert rig.carry(rig.compute())[-1] == Finished(True)
    assert rig.sender.lost(0, "link broke") == [SendTo(0, Failed(KEY, 1, "link broke"))]
    assert rig.done() == [] and rig.states == (PromptPhase.RELEASED, [SendPhase.ENDED])


def test_a_grant_from_before_its_claim_takes_no_chunk_of_it() -> None:
    rig = computed()
    (early,) = rig.grant(0, WHOLE.nbytes)
    assert isinstance(early, Transmit) and not early.pieces
    rig.claim()
    assert rig.want() == [SendTo(0, WHOLE)]
    assert rig.sender.sent(early, filler=True) == [SendTo(0, sent(0, filler=True))]
    assert rig.carry([SendTo(0, WHOLE)]) == [SendTo(0, sent(0)), Finished(True)]
