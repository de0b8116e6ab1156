"""P's side: wrong, stale and repeated words of D; preemption; how transfers end."""

import pytest
from protocol.sender_rigs import (
    KEY,
    LEASE,
    ROW,
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
    released,
    sending,
    sent,
)

from p2pkv.protocol.handshake import RowFormat
from p2pkv.protocol.messages import Chunk, Failed, Piece
from p2pkv.protocol.sender import PromptPhase, SendPhase
from p2pkv.protocol.state_machine import (
    Finished,
    LocalProtocolError,
    Released,
    RemoteProtocolError,
    SendTo,
    Transmit,
)

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
        Released(),
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
    assert rig.cancel(1) == [Released(), Finished(False, "D cancelled: enough")]
    rig = Rig()
    rig.claim()
    assert rig.cancel() == [] and rig.states == (PromptPhase.HELD, [SendPhase.ENDED])
    assert rig.offer() == [Released(), Finished(False, "D cancelled: enough")]


def test_a_lost_target_ends_its_leg_only() -> None:
    rig = claimed()
    rig.claim(1)
    assert rig.sender.lost(0, "gone") == [SendTo(0, Failed(KEY, 1, "gone"))]
    assert rig.sender.lost(0, "gone") == [] == rig.sender.lost(7, "never seen")
    rig.want(rank=1)
    assert rig.carry(rig.compute())[-2:] == [Released(), Finished(False, "gone")]


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
    assert rig.carry([SendTo(0, WHOLE)]) == [SendTo(0, sent(0)), Released(), Finished(True)]
