"""P's side: event in, then the states and what is to be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from p2pkv.plan import make_plan
from p2pkv.protocol import sender as module
from p2pkv.protocol.effects import Effect, Finished, Released, Tell, Transmit
from p2pkv.protocol.machine import LocalProtocolError, RemoteProtocolError
from p2pkv.protocol.messages import Cancel, Chunk, Done, Failed, Grant, Offer, Piece, Sent, Want
from p2pkv.protocol.sender import LEG, PROMPT, Leg, Of, On, Prompt, Sender, Terms
from p2pkv.sharding import Shape

KEY, TOKENS, DIGEST, LEASE = "k", 10, b"prompt", 30.0
TERMS = Terms(row_bytes=3, unit=1, chunk_bytes=1 << 20, lease=LEASE)

PLAN = make_plan(Shape((2, 2), 2, 1), Shape((4,), 2, 2))
EDGES = {edge.target: edge for edge in PLAN.from_source(1)}
"""This P rank is the second stage of two: global layers 2 and 3, of which D's two ranks want a head each."""
ROW = 3


class Rig:
    """A Sender and a clock that stands still until told otherwise."""

    def __init__(self, terms: Terms = TERMS, expects: Sequence[int] = (0,)) -> None:
        self.sender = Sender(KEY, 2, terms)
        self.sender.expects = frozenset(expects)
        self.now = 0.0

    @property
    def states(self) -> tuple[Prompt, list[Leg]]:
        return self.sender.prompt.state, [leg.machine.state for leg in self.sender.legs.values()]

    def claim(self, rank: int = 0, attempt: int = 1, limit: int = 1 << 20) -> list[Effect]:
        return self.sender.claim(rank, EDGES[rank], attempt, limit, self.now)

    def offer(self) -> list[Effect]:
        return self.sender.offer(TOKENS, DIGEST)

    def compute(self, stop: int = TOKENS, layers: tuple[int, int] = (0, 2)) -> list[Effect]:
        return self.sender.computed(*layers, stop, self.now)

    def want(self, start: int = 0, stop: int = 9, rank: int = 0, attempt: int = 1) -> list[Effect]:
        return self.sender.want(rank, Want(KEY, attempt, start, stop), self.now)

    def grant(self, number: int, nbytes: int, rank: int = 0, attempt: int = 1) -> list[Effect]:
        return self.sender.grant(rank, grant(number, nbytes, attempt), self.now)

    def carry(self, said: list[Effect], void: bool = False) -> list[Effect]:
        """Grant and send every chunk that is announced in `said`."""
        out: list[Effect] = []
        for effect in said:
            if isinstance(effect, Tell) and isinstance(effect.message, Chunk):
                message = effect.message
                order = self.grant(message.chunk, message.nbytes, effect.rank, message.attempt)[0]
                assert isinstance(order, Transmit)
                out += self.sender.sent(order, void)
        return out

    def done(self, rank: int = 0, attempt: int = 1) -> list[Effect]:
        return self.sender.done(rank, Done(KEY, attempt), self.now)

    def cancel(self, rank: int = 0, attempt: int = 1) -> list[Effect]:
        return self.sender.cancel(rank, Cancel(KEY, attempt, "enough"))


def grant(number: int, nbytes: int, attempt: int = 1) -> Grant:
    return Grant(KEY, attempt, number, nbytes, 1, 0)


def chunk(number: int, *pieces: Piece, attempt: int = 1) -> Chunk:
    rows = sum((piece.layer_stop - piece.layer) * (piece.stop - piece.start) for piece in pieces)
    return Chunk(KEY, attempt, number, ROW * rows, pieces)


def offer(attempt: int = 1) -> Offer:
    return Offer(KEY, attempt, TOKENS, DIGEST)


def sent(number: int, void: bool = False, attempt: int = 1) -> Sent:
    return Sent(KEY, attempt, number, void)


WHOLE = chunk(0, Piece(2, 4, 0, 9))


# One transfer, from end to end.


def test_a_transfer_that_is_claimed_before_the_prefill_begins() -> None:
    rig = Rig()
    assert rig.claim() == [] and rig.states == (Prompt.HELD, [Leg.CLAIMED])
    assert rig.offer() == [Tell(0, offer())]
    assert rig.want() == [] and rig.states == (Prompt.OFFERED, [Leg.SENDING])
    assert rig.compute(4, (0, 1)) == []
    assert rig.sender.flush() == [Tell(0, chunk(0, Piece(2, 3, 0, 4)))]
    order = Transmit(0, grant(0, 4 * ROW), (Piece(2, 3, 0, 4),))
    assert rig.grant(0, 4 * ROW) == [order]
    assert rig.sender.readable(order) and not order.void
    assert rig.sender.sent(order, void=False) == [Tell(0, sent(0))]
    assert rig.compute(TOKENS) == [Tell(0, chunk(1, Piece(2, 3, 4, 9), Piece(3, 4, 0, 9)))]
    assert rig.states == (Prompt.COMPUTED, [Leg.SENDING])
    rest = Transmit(0, grant(1, 14 * ROW), (Piece(2, 3, 4, 9), Piece(3, 4, 0, 9)))
    assert rig.grant(1, 14 * ROW) == [rest]
    assert rig.sender.sent(rest, void=False) == [Tell(0, sent(1)), Released(), Finished(True)]
    assert rig.states == (Prompt.RELEASED, [Leg.DRAINED])
    assert rig.done() == [] and rig.states == (Prompt.RELEASED, [Leg.DONE])


def test_a_transfer_that_is_claimed_after_the_prefill() -> None:
    rig = Rig()
    assert rig.offer() == rig.compute() == []
    assert rig.states == (Prompt.COMPUTED, [])
    assert rig.claim() == [Tell(0, offer())]
    assert rig.want() == [Tell(0, WHOLE)]
    assert rig.carry([Tell(0, WHOLE)]) == [Tell(0, sent(0)), Released(), Finished(True)]


def test_the_pages_are_held_until_every_target_has_read_them() -> None:
    rig = Rig(expects=(0, 1))
    rig.offer()
    rig.compute()
    rig.claim(0)
    assert rig.carry(rig.want(rank=0)) == [Tell(0, sent(0))]
    assert rig.done(0) == [] and rig.sender.flush() == []
    assert rig.states == (Prompt.COMPUTED, [Leg.DONE])
    assert rig.claim(1) == [Tell(1, offer())]
    assert rig.carry(rig.want(0, 4, rank=1)) == [Tell(1, sent(0)), Released(), Finished(True)]


def test_an_empty_want_releases_the_pages() -> None:
    rig = Rig(expects=(0, 1))
    for rank in (0, 1):
        rig.claim(rank)
    rig.offer()
    assert rig.want(9, 9, rank=0) == [] and rig.states == (Prompt.OFFERED, [Leg.DONE, Leg.CLAIMED])
    assert rig.want(0, 0, rank=1) == [Released(), Finished(True)]
    assert rig.compute() == rig.sender.flush() == rig.sender.abort("late") == []


def test_an_empty_want_before_the_offer_releases_the_pages_when_the_prefill_begins() -> None:
    rig = Rig()
    rig.claim()
    assert rig.want(0, 0) == [] and rig.states == (Prompt.HELD, [Leg.DONE])
    assert rig.offer() == [Released(), Finished(True)]


def test_a_rank_that_owes_nobody_anything_releases_its_pages_at_once() -> None:
    rig = Rig(expects=())
    assert rig.offer() == [Released(), Finished(True)]


# Every row of the tables.


def held() -> Rig:
    return Rig()


def offered() -> Rig:
    rig = Rig()
    rig.offer()
    return rig


def computed() -> Rig:
    rig = offered()
    rig.compute()
    return rig


def released() -> Rig:
    rig = computed()
    rig.claim()
    rig.want(0, 0)
    return rig


def ended() -> Rig:
    rig = offered()
    rig.sender.abort("aborted")
    return rig


PROMPTS: dict[Prompt, Callable[[], Rig]] = {
    Prompt.HELD: held,
    Prompt.OFFERED: offered,
    Prompt.COMPUTED: computed,
    Prompt.RELEASED: released,
    Prompt.ENDED: ended,
}


def do(rig: Rig, event: Of) -> list[Effect]:
    match event:
        case Of.OFFER:
            return rig.offer()
        case Of.COMPLETE:
            return rig.compute()
        case Of.REVOKE:
            rig.sender.revoke()
            return []
        case Of.RELEASE:
            rig.claim()
            return rig.want(0, 0)
        case Of.END:
            return rig.sender.abort("enough")


@pytest.mark.parametrize(("state", "event"), [(state, of) for state, row in PROMPT.items() for of in row])
def test_every_row_of_the_prompts_table(state: Prompt, event: Of) -> None:
    rig = PROMPTS[state]()
    assert rig.sender.prompt.state is state
    effects = do(rig, event)
    assert rig.sender.prompt.state is PROMPT[state][event]
    assert effects.count(Released()) == (1 if rig.sender.prompt.ended else 0)
    assert len([effect for effect in effects if isinstance(effect, Finished)]) == effects.count(Released())


def claimed() -> Rig:
    """With a second target that never comes, so that the leg's state is all that moves."""
    rig = Rig(expects=(0, 1))
    rig.offer()
    rig.claim()
    return rig


def sending() -> Rig:
    rig = claimed()
    rig.want()
    return rig


def drained() -> Rig:
    rig = sending()
    rig.carry(rig.compute())
    return rig


def done() -> Rig:
    rig = drained()
    rig.done()
    return rig


def cancelled() -> Rig:
    rig = claimed()
    rig.cancel()
    return rig


LEGS: dict[Leg, Callable[[], Rig]] = {
    Leg.CLAIMED: claimed,
    Leg.SENDING: sending,
    Leg.DRAINED: drained,
    Leg.DONE: done,
    Leg.ENDED: cancelled,
}

REMOTE: dict[On, Callable[[Rig], list[Effect]]] = {
    On.WANT: lambda rig: rig.want(),
    On.NOTHING: lambda rig: rig.want(0, 0),
    On.DONE: lambda rig: rig.done(),
    On.END: lambda rig: rig.cancel(),
}


@pytest.mark.parametrize(("state", "event"), [(state, on) for state, row in LEG.items() for on in row])
def test_every_row_of_the_legs_table(state: Leg, event: On) -> None:
    rig = LEGS[state]()
    assert rig.states[1] == [state]
    if event is On.DRAIN:
        rig.carry(rig.compute())
    else:
        REMOTE[event](rig)
    assert rig.states[1] == [LEG[state][event]]


@pytest.mark.parametrize("state", [Leg.CLAIMED, Leg.SENDING, Leg.DRAINED])
def test_every_other_word_of_d_is_its_error(state: Leg) -> None:
    for event in REMOTE.keys() - LEG[state].keys():
        rig = LEGS[state]()
        with pytest.raises(RemoteProtocolError, match=f"leg k/0: {event.name} in state {state.name}"):
            REMOTE[event](rig)
        assert rig.states[1] == [state]


@pytest.mark.parametrize("state", [Leg.DONE, Leg.ENDED])
def test_after_the_end_of_a_leg_no_word_of_d_has_an_effect(state: Leg) -> None:
    rig = LEGS[state]()
    assert [word(rig) for word in REMOTE.values()] == [[]] * len(REMOTE)
    assert rig.sender.lost(0, "gone") == [] and rig.states[1] == [state]


# What D may not say.


def test_wanting_more_than_was_offered_is_an_error_of_the_peer() -> None:
    rig = claimed()
    with pytest.raises(RemoteProtocolError, match="goes beyond the 10 tokens of the offer"):
        rig.want(0, 11)
    rig = Rig()
    rig.claim()
    with pytest.raises(RemoteProtocolError, match="goes beyond the 0 tokens of the offer"):
        rig.want(0, 1)
    assert rig.states[1] == [Leg.CLAIMED]


def test_wanting_from_inside_a_unit_is_an_error_of_the_peer() -> None:
    rig = Rig(replace(TERMS, unit=4))
    rig.offer()
    rig.claim()
    with pytest.raises(RemoteProtocolError, match="multiples of 4"):
        rig.want(2, 9)
    rig.want(4, 9)
    assert rig.compute(8) == [] and rig.sender.flush() == [
        Tell(0, Chunk(KEY, 1, 0, 2 * ROW, (Piece(2, 4, 4, 8),)))
    ]
    assert rig.compute() == [Tell(0, Chunk(KEY, 1, 1, 2 * ROW, (Piece(2, 4, 8, 12),)))]


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
    assert rig.states[1] == [Leg.SENDING]


def test_a_stale_grant_is_obeyed_with_filler() -> None:
    rig = sending()
    assert rig.grant(5, 77, attempt=0) == [Transmit(0, grant(5, 77, 0), ())]
    order = Transmit(0, grant(5, 77, 0), ())
    assert order.void and not rig.sender.readable(order)
    assert rig.sender.sent(order, void=True) == [Tell(0, sent(5, True, 0))]


def test_claiming_again_renews_and_says_nothing() -> None:
    rig = claimed()
    rig.now = 20.0
    assert rig.claim() == [] and rig.sender.deadline == 20.0 + LEASE
    rig = drained()
    assert rig.claim() == [] and rig.states[1] == [Leg.DRAINED]
    rig = done()
    assert rig.claim() == [] and rig.states[1] == [Leg.DONE]


def test_who_claims_what_has_ended_is_told_so_each_time() -> None:
    rig = ended()
    for _ in range(2):
        assert rig.claim() == [Tell(0, Failed(KEY, 1, "aborted"))]
    assert rig.sender.legs == {}
    rig = cancelled()
    assert rig.claim() == [Tell(0, Failed(KEY, 1, "D cancelled: enough"))]
    rig = released()
    assert rig.claim(attempt=1) == []
    effect = rig.claim(attempt=2)[0]
    assert isinstance(effect, Tell) and isinstance(effect.message, Failed) and effect.message.attempt == 2


def test_a_d_that_has_restarted_is_not_taken_for_the_one_before() -> None:
    for make in (done, drained, sending):
        rig = make()
        rig.sender.lost(0, "restarted")
        assert not rig.sender.vouches(0, 1)
        effect = rig.claim(attempt=1)[0]
        assert isinstance(effect, Tell) and isinstance(effect.message, Failed)
        assert rig.claim(attempt=2) == [Tell(0, offer(2))]


def test_p_vouches_for_what_is_alive() -> None:
    alive = {Leg.CLAIMED: True, Leg.SENDING: True, Leg.DRAINED: True, Leg.DONE: False, Leg.ENDED: False}
    assert {state: make().sender.vouches(0, 1) for state, make in LEGS.items()} == alive
    assert not sending().sender.vouches(0, 2) and not sending().sender.vouches(1, 1)


def test_a_later_attempt_takes_the_place_of_the_one_before() -> None:
    for rig in (cancelled(), sending()):
        assert rig.claim(attempt=3) == [Tell(0, offer(3))]
        assert rig.states[1] == [Leg.CLAIMED]
        assert rig.want(0, 0, attempt=1) == [] and rig.states[1] == [Leg.CLAIMED]
        stale = rig.claim(attempt=2)[0]
        assert isinstance(stale, Tell) and isinstance(stale.message, Failed) and stale.message.attempt == 2
        assert rig.states[1] == [Leg.CLAIMED]
        assert rig.want(attempt=3) == []
        again = chunk(0, Piece(2, 4, 0, 9), attempt=3)
        assert rig.compute() == [Tell(0, again)]
        assert rig.carry([Tell(0, again)]) == [Tell(0, sent(0, attempt=3))]
        assert rig.states[1] == [Leg.DRAINED]


def test_a_chunk_of_an_earlier_attempt_that_goes_out_late_is_void_and_counts_for_nothing() -> None:
    rig = computed()
    rig.claim()
    rig.want()
    order = rig.grant(0, 18 * ROW)[0]
    assert isinstance(order, Transmit)
    rig.claim(attempt=2)
    rig.want(attempt=2)
    assert not rig.sender.readable(order)
    assert rig.sender.sent(order, void=True) == [Tell(0, sent(0, True))]
    assert rig.states == (Prompt.COMPUTED, [Leg.SENDING])


def test_offers_are_repeated_when_a_prefill_begins_again() -> None:
    rig = offered()
    rig.claim()
    rig.sender.revoke()
    assert rig.offer() == [Tell(0, offer())]


# Preemption.


def test_what_was_granted_when_the_pages_were_revoked_goes_out_void_and_then_again() -> None:
    rig = sending()
    rig.compute(6)
    assert rig.sender.flush() == [Tell(0, chunk(0, Piece(2, 4, 0, 6)))]
    order = rig.grant(0, 12 * ROW)[0]
    assert isinstance(order, Transmit) and rig.sender.readable(order)
    rig.sender.revoke()
    assert not rig.sender.readable(order)
    assert rig.sender.sent(order, void=True) == [Tell(0, sent(0, True))]
    rig.offer()
    assert rig.compute(3) == rig.sender.flush() == []
    assert rig.compute(TOKENS) == [Tell(0, chunk(1, Piece(2, 4, 0, 6), Piece(2, 4, 6, 9)))]
    assert rig.states[1] == [Leg.SENDING]


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
    assert rig.sender.sent(order, void=False) == [Tell(0, sent(0))]


def test_rows_that_were_sent_before_a_preemption_are_not_sent_again() -> None:
    rig = sending()
    rig.compute(6)
    rig.carry(rig.sender.flush())
    rig.sender.revoke()
    rig.offer()
    assert rig.compute() == [Tell(0, chunk(1, Piece(2, 4, 6, 9)))]


def test_a_preempted_prompt_is_not_complete() -> None:
    rig = computed()
    rig.sender.revoke()
    assert rig.states[0] is Prompt.OFFERED and rig.sender.deadline is None
    rig.compute(TOKENS, (0, 1))
    assert rig.states[0] is Prompt.OFFERED
    rig.compute(TOKENS, (1, 2))
    assert rig.states[0] is Prompt.COMPUTED


def test_tokens_computed_before_the_offer_are_an_error_of_ours() -> None:
    with pytest.raises(LocalProtocolError, match="before the prompt was offered"):
        held().compute()


# Chunks.


def test_full_chunks_go_at_once_and_the_rest_when_the_step_is_over() -> None:
    rig = Rig(replace(TERMS, chunk_bytes=4 * ROW))
    rig.offer()
    rig.claim()
    rig.want()
    assert rig.compute(3, (0, 1)) == []
    assert rig.compute(6, (0, 1)) == [Tell(0, chunk(0, Piece(2, 3, 0, 4)))]
    assert rig.compute(6, (1, 2)) == [
        Tell(0, chunk(1, Piece(2, 3, 4, 6))),
        Tell(0, chunk(2, Piece(3, 4, 0, 4))),
    ]
    assert rig.sender.flush() == [Tell(0, chunk(3, Piece(3, 4, 4, 6)))]
    assert rig.sender.flush() == []


def test_a_chunk_is_no_larger_than_d_takes() -> None:
    rig = computed()
    rig.claim(limit=4 * ROW)
    said = rig.want()
    sizes = [
        each.message.nbytes for each in said if isinstance(each, Tell) and isinstance(each.message, Chunk)
    ]
    assert max(sizes) == 4 * ROW and sum(sizes) == 18 * ROW


def test_nothing_is_announced_before_it_is_known_how_much_d_takes() -> None:
    rig = computed()
    rig.claim(limit=0)
    assert rig.want() == [] and rig.sender.flush() == []
    assert rig.claim(limit=1 << 20) == [Tell(0, WHOLE)]
    assert rig.claim(limit=0) == []


def test_a_whole_request_is_pushed_when_all_of_it_is_computed() -> None:
    rig = Rig(replace(TERMS, whole=True, chunk_bytes=1))
    rig.offer()
    rig.claim()
    rig.want()
    assert rig.compute(9) == rig.sender.flush() == []
    assert len(rig.compute()) == 18


def test_announced_chunks_are_bounded_and_go_on_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANNOUNCED", 3)
    rig = Rig(replace(TERMS, chunk_bytes=1))
    rig.offer()
    rig.compute()
    rig.claim()
    said = rig.want()
    assert [each.message.chunk for each in said if isinstance(each, Tell)] == [0, 1, 2]  # type: ignore[union-attr]
    count = 0
    while said:
        count += len(said)
        assert len(rig.sender.legs[0].announced) <= 3
        after = rig.carry(said)
        said = [each for each in after if isinstance(each, Tell) and isinstance(each.message, Chunk)]
    assert count == 18 and rig.states == (Prompt.RELEASED, [Leg.DRAINED])


# The ends.


def test_an_abort_is_said_to_every_open_leg_once() -> None:
    rig = Rig(expects=(0, 1))
    rig.offer()
    rig.claim(0)
    rig.claim(1, attempt=4)
    rig.cancel(0)
    assert rig.sender.abort("client left") == [
        Tell(1, Failed(KEY, 4, "client left")),
        Released(),
        Finished(False, "client left"),
    ]
    assert rig.states == (Prompt.ENDED, [Leg.ENDED, Leg.ENDED])
    assert rig.sender.abort("again") == rig.offer() == rig.compute() == rig.sender.flush() == []
    rig.sender.revoke()
    assert rig.sender.deadline is None and rig.sender.tick(1e9) == []


def test_a_cancel_of_every_target_releases_the_pages_once_the_prefill_has_begun() -> None:
    rig = Rig(expects=(0, 1))
    rig.offer()
    rig.claim(0)
    rig.claim(1)
    assert rig.cancel(0) == []
    assert rig.cancel(1) == [Released(), Finished(False, "D cancelled: enough")]
    rig = Rig()
    rig.claim()
    assert rig.cancel() == [] and rig.states == (Prompt.HELD, [Leg.ENDED])
    assert rig.offer() == [Released(), Finished(False, "D cancelled: enough")]


def test_a_lost_target_ends_its_leg_only() -> None:
    rig = Rig(expects=(0, 1))
    rig.offer()
    rig.claim(0)
    rig.claim(1)
    assert rig.sender.lost(0, "gone") == [Tell(0, Failed(KEY, 1, "gone"))]
    assert rig.sender.lost(0, "gone") == [] == rig.sender.lost(7, "never seen")
    rig.want(rank=1)
    assert rig.carry(rig.compute())[-2:] == [Released(), Finished(False, "gone")]


def test_a_lost_target_that_had_everything_in_flight_hears_of_it_and_the_outcome_stays() -> None:
    rig = Rig()
    rig.offer()
    rig.claim()
    rig.want()
    assert rig.carry(rig.compute())[-1] == Finished(True)
    assert rig.sender.lost(0, "link broke") == [Tell(0, Failed(KEY, 1, "link broke"))]
    assert rig.done() == [] and rig.states == (Prompt.RELEASED, [Leg.ENDED])


# Time.


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
    reason = f"no word from D about this request for {LEASE:g} s; P has let its KV go"
    assert rig.sender.tick(5.0 + LEASE) == [Released(), Finished(False, reason)]


def test_a_claimed_leg_must_be_renewed_whatever_p_does() -> None:
    for make in (held, offered):
        rig = make()
        rig.now = 1.0
        rig.claim()
        rig.now = 20.0
        rig.claim()
        assert rig.sender.deadline == 20.0 + LEASE and rig.sender.tick(20.0 + LEASE - 0.01) == []
        effects = rig.sender.tick(20.0 + LEASE)
        assert isinstance(effects[0], Tell) and isinstance(effects[0].message, Failed)
        assert effects[1] == Released() and isinstance(effects[2], Finished)


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
    assert rig.sender.deadline == 2.0 + LEASE and rig.states[1] == [Leg.DRAINED]
    rig.now = 3.0
    rig.done()
    assert rig.sender.deadline is None
    rig = claimed()
    rig.cancel()
    assert rig.sender.deadline is None


def test_the_repr_says_where_it_stands() -> None:
    assert repr(sending().sender) == "<prompt k:OFFERED leg k/0:SENDING>"
