"""P's side: event in, then the states and what is to be done; chunks, and leases by a virtual clock."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from protocol.sender_rigs import (
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
from p2pkv.protocol.messages import Chunk, Failed, Piece
from p2pkv.protocol.sender import PROMPT, SEND, PromptEvent, PromptPhase, SendEvent, SendPhase
from p2pkv.protocol.state_machine import Decision, Finished, Released, RemoteProtocolError, SendTo, Transmit

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
    assert rig.sender.sent(rest, filler=False) == [SendTo(0, sent(1)), Released(), Finished(True)]
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
    assert rig.carry(rig.want(0, 4, rank=1)) == [SendTo(1, sent(0)), Released(), Finished(True)]


def test_an_empty_want_releases_the_pages() -> None:
    rig = Rig(expects=(0, 1))
    for rank in (0, 1):
        rig.claim(rank)
    rig.offer()
    assert rig.want(9, 9, rank=0) == [] and rig.states == (
        PromptPhase.OFFERED,
        [SendPhase.DONE, SendPhase.CLAIMED],
    )
    assert rig.want(0, 0, rank=1) == [Released(), Finished(True)]
    assert rig.compute() == rig.sender.flush() == rig.sender.abort("late") == []


def test_an_empty_want_before_the_offer_releases_the_pages_when_the_prefill_begins() -> None:
    rig = Rig()
    rig.claim()
    assert rig.want(0, 0) == [] and rig.states == (PromptPhase.HELD, [SendPhase.DONE])
    assert rig.offer() == [Released(), Finished(True)]


def test_a_rank_that_owes_nobody_anything_releases_its_pages_at_once() -> None:
    rig = Rig(expects=())
    assert rig.offer() == [Released(), Finished(True)]


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
    assert effects.count(Released()) == (1 if rig.sender.prompt.ended else 0)
    assert len([effect for effect in effects if isinstance(effect, Finished)]) == effects.count(Released())


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
    reason = (
        f"D did not answer in time: no word from it about this request for {LEASE:g} s; P has let its KV go"
    )
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
        assert isinstance(effects[0], SendTo) and isinstance(effects[0].message, Failed)
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
    assert rig.sender.deadline == 2.0 + LEASE and rig.states[1] == [SendPhase.DRAINED]
    rig.now = 3.0
    rig.done()
    assert rig.sender.deadline is None
    rig = claimed()
    rig.cancel()
    assert rig.sender.deadline is None
