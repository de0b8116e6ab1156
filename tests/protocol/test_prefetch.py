"""What is pushed before D's request has come: P keeps its pages, and D may let go as if it had never been."""

from collections.abc import Callable

import pytest
from protocol import receiver_rigs as d_side
from protocol.sender_rigs import LEASE, TOKENS, Rig, grant, offer, offered, sent

from p2pkv.protocol import receiver
from p2pkv.protocol.messages import Cancel, Done, Failed, Piece, Want
from p2pkv.protocol.receiver import LoadPhase, Receiver
from p2pkv.protocol.sender import PromptPhase, SendPhase
from p2pkv.protocol.state_machine import Finished, Offered, RemoteProtocolError, SendTo, Transmit


def pushed() -> Rig:
    """All of a prompt has been pushed ahead, and P is done with it."""
    rig = offered()
    rig.claim()
    rig.want(0, TOKENS, prefetch=True)
    assert rig.carry(rig.compute())[0] == SendTo(0, sent(0))
    assert rig.states == (PromptPhase.COMPUTED, [SendPhase.PREFETCHING])
    return rig


# P's side.


def test_another_part_of_it_cannot_be_wanted() -> None:
    with pytest.raises(RemoteProtocolError, match="is not what was wanted ahead"):
        pushed().want(0, 4)


def withdraw(rig: Rig, how: str) -> None:
    """Of a send that is ahead; the lease of the pages is renewed, as if they took long to compute."""
    rig.now = LEASE - 1
    match how:
        case "let go":
            assert rig.want(0, 0, prefetch=True) == []
        case "lost":
            assert [type(effect) for effect in rig.sender.unlinked(0, "gone")] == [SendTo]
        case "silence":
            rig.sender._since = rig.now
            assert rig.sender.tick(LEASE) == []


@pytest.mark.parametrize("how", ["let go", "lost", "silence"])
def test_what_d_has_said_before_it_heard_of_that_brings_nothing_back(how: str) -> None:
    """Its chunks are counted from 0 again only under another attempt, or D would take none of them."""
    rig = offered()
    rig.claim()
    rig.want(0, TOKENS, prefetch=True)
    (announced,) = rig.compute()
    withdraw(rig, how)
    (answer,) = rig.claim()
    assert isinstance(answer, SendTo) and isinstance(answer.message, Failed)
    nbytes = announced.message.nbytes
    assert rig.grant(0, nbytes) == [Transmit(0, grant(0, nbytes), ())]
    assert rig.want(0, TOKENS) == rig.done() == []
    assert rig.states == (PromptPhase.COMPUTED, [])
    assert rig.claim(attempt=2) == [SendTo(0, offer(2, ready=True))]


def test_a_later_claim_is_not_touched_by_words_about_an_earlier_one() -> None:
    rig = pushed()
    rig.sender.unlinked(0, "its link broke")
    rig.claim(attempt=2)
    assert rig.want(0, 0) == rig.want(0, 0, prefetch=True) == []
    assert rig.states == (PromptPhase.COMPUTED, [SendPhase.CLAIMED])


def test_a_d_that_has_restarted_counts_its_attempts_anew() -> None:
    rig = offered()
    rig.claim(attempt=7)
    rig.want(0, TOKENS, attempt=7, prefetch=True)
    rig.sender.unlinked(0, "its link broke")
    rig.claim(attempt=8)
    rig.want(0, TOKENS, attempt=8, prefetch=True)
    rig.sender.lost(0, "it has restarted", restarted=True)
    assert rig.claim(attempt=1) == [SendTo(0, offer(1))]


def test_a_d_that_has_all_of_it_releases_what_was_withdrawn() -> None:
    rig = pushed()
    rig.sender.unlinked(0, "its link broke")
    assert rig.want(0, 0) == [Finished(True)]


# D's side.


def kept() -> Receiver:
    """Source 0 has sent all it owes, source 1 nothing."""
    made = d_side.prefetch(d_side.make(prefetch=True))
    d_side.arrive(made, 0, d_side.chunk(0, Piece(0, 0, 1, 0, d_side.TOKENS)), 2.0)
    made.stored(0, 0, 3.0)
    return made


def test_a_request_adopts_it_and_what_was_kept_counts_when_it_is_written() -> None:
    made = kept()
    assert made.adopt(0.0) == [Offered()]
    release = Want(d_side.KEY, d_side.ATTEMPT, 0, 0)
    want = Want(d_side.KEY, d_side.ATTEMPT, 0, d_side.TOKENS)
    assert made.want(4, 9, 4.0) == [SendTo(0, release), SendTo(1, want)]
    assert made.scattered(0, 0, 5.0) == [SendTo(0, Done(d_side.KEY, d_side.ATTEMPT))]
    last = d_side.take(made, 1, d_side.chunk(0, Piece(0, 1, 2, 0, d_side.TOKENS)))
    assert last[-1] == Finished(True) and made.load.state is LoadPhase.DONE


def test_who_has_sent_all_may_go_and_is_not_waited_for() -> None:
    made = kept()
    assert made.lost("gone", 0) == [] and made.load.state is LoadPhase.PREFETCHING
    assert made.deadline == 1.0 + d_side.LEASE
    assert made.lost("gone", 1)[-1] == Finished(False, "gone")


@pytest.mark.parametrize("make", [kept, lambda: d_side.make(prefetch=True)])
def test_what_nobody_has_asked_for_is_left_to_p(make: Callable[[], d_side.Receiver]) -> None:
    made, leave = make(), Want(d_side.KEY, d_side.ATTEMPT, 0, 0, prefetch=True)
    assert made.cancel("enough") == [SendTo(0, leave), SendTo(1, leave), Finished(False, "enough")]


def test_what_has_been_asked_for_is_cancelled() -> None:
    made = kept()
    made.adopt(0.0)
    cancel = Cancel(d_side.KEY, d_side.ATTEMPT, "enough")
    assert made.cancel("enough") == [SendTo(0, cancel), SendTo(1, cancel), Finished(False, "enough")]


def test_what_is_kept_does_not_count_as_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "MAX_CHUNKS", 1)
    made = d_side.prefetch(d_side.make(prefetch=True))
    for number in range(3):
        d_side.arrive(made, 0, d_side.chunk(number, Piece(0, 0, 1, number, number + 1)), 2.0)
        made.stored(0, number, 2.0)
    assert len(made.sources[0].chunks) == 3
