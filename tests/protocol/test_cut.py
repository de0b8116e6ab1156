"""A prompt that is computed when D asks for it: D cuts the chunks, and grants them with its `Want`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from protocol import receiver_rigs as d_side
from protocol.sender_rigs import KEY, TERMS, TOKENS, WHOLE, Rig, computed, grant, offer, offered, sent
from protocol.test_extents import several_extents

from p2pkv.protocol import messages
from p2pkv.protocol.extents import Cutter, Extents
from p2pkv.protocol.messages import MAX_CUT, MAX_PIECES, Chunk, Offer, Piece, Want
from p2pkv.protocol.receiver import LoadPhase
from p2pkv.protocol.sender import PromptPhase, SendPhase
from p2pkv.protocol.state_machine import Finished, Post, RemoteProtocolError, SendTo, Transmit

HALVES = (Piece(0, 2, 3, 0, 9),), (Piece(0, 3, 4, 0, 9),)
BYTES = 27


def ready() -> Rig:
    """D has claimed the prompt, which is computed, and was told that it may cut it."""
    rig = computed()
    assert rig.claim() == [SendTo(0, offer(ready=True))]
    return rig


def wanted(*cut: tuple[Piece, ...], ahead: bool = False) -> Want:
    return Want(KEY, 1, 0, 9, ahead, cut)


# P's side.


def test_p_offers_the_prompt_again_once_it_is_computed_if_d_has_not_asked() -> None:
    rig = offered()
    assert rig.claim() == [SendTo(0, offer())], "it is not computed"
    assert rig.compute() == [SendTo(0, offer(ready=True))]
    rig = offered()
    rig.claim()
    rig.want()
    assert [type(said.message) for said in rig.compute() if isinstance(said, SendTo)] == [Chunk]


def test_p_says_so_when_the_link_is_up() -> None:
    rig = computed()
    assert rig.claim(limit=0) == [SendTo(0, offer())]
    assert rig.claim(limit=1 << 20) == [SendTo(0, offer(ready=True))]
    assert rig.claim(limit=1 << 20) == []


def test_chunks_that_d_has_cut_need_no_announcement() -> None:
    rig = ready()
    assert rig.sender.want(0, wanted(*HALVES), 0.0) == []
    orders = [rig.grant(number, BYTES)[0] for number in (0, 1)]
    assert orders == [Transmit(0, grant(number, BYTES), HALVES[number]) for number in (0, 1)]
    assert rig.sender.sent(orders[0], False) == [SendTo(0, sent(0))]
    assert rig.sender.sent(orders[1], False) == [SendTo(0, sent(1)), Finished(True)]
    assert rig.states == (PromptPhase.RELEASED, [SendPhase.DRAINED])


def test_p_announces_what_d_has_not_cut_under_the_next_number() -> None:
    rig = ready()
    assert rig.sender.want(0, wanted(HALVES[0]), 0.0) == [], "the first one goes first"
    (order,) = rig.grant(0, BYTES)
    announced = SendTo(0, Chunk(KEY, 1, 1, BYTES, HALVES[1]))
    assert rig.sender.sent(order, False) == [SendTo(0, sent(0)), announced]


def test_what_was_preempted_meanwhile_goes_out_as_filler_and_is_announced_later() -> None:
    rig = ready()
    rig.sender.revoke()
    assert rig.sender.want(0, wanted(*HALVES), 0.0) == []
    for number in (0, 1):
        (order,) = rig.grant(number, BYTES)
        assert isinstance(order, Transmit) and not rig.sender.readable(order)
        assert rig.sender.sent(order, True) == [SendTo(0, sent(number, filler=True))]
    rig.offer()
    (again,) = rig.compute()
    assert again == SendTo(0, Chunk(KEY, 1, 2, 2 * BYTES, (*HALVES[0], *HALVES[1])))


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        ([(Piece(0, 2, 5, 0, 9),)], "does not lie in what was asked for"),
        ([(Piece(0, 2, 4, 3, 9),)], "does not follow"),
        ([HALVES[0], HALVES[0]], "does not follow"),
        ([(Piece(0, 2, 3, 0, 9), Piece(0, 2, 3, 0, 9))], "does not follow"),
    ],
)
def test_p_refuses_pieces_that_it_would_not_cut(cut: list[tuple[Piece, ...]], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        ready().sender.want(0, wanted(*cut), 0.0)


def test_p_refuses_a_cut_that_it_did_not_offer_or_that_is_too_large() -> None:
    rig = offered()
    rig.claim()
    with pytest.raises(RemoteProtocolError, match="is not ready"):
        rig.sender.want(0, wanted(WHOLE.pieces), 0.0)
    rig = computed()
    rig.claim(limit=BYTES)
    with pytest.raises(RemoteProtocolError, match="54 bytes was cut where 27 are allowed"):
        rig.sender.want(0, wanted(WHOLE.pieces), 0.0)


def test_what_was_cut_ahead_is_not_cut_again() -> None:
    rig = ready()
    rig.sender.want(0, wanted(HALVES[0], ahead=True), 0.0)
    with pytest.raises(RemoteProtocolError, match="cuts what was cut before"):
        rig.sender.want(0, wanted(HALVES[1]), 0.0)


def test_what_d_is_likely_to_want_can_be_prepared() -> None:
    rig = ready()
    send = rig.sender.sends[0]
    assert list(rig.sender.foresee(send, BYTES)) == list(HALVES)
    assert send.cutter is None, "nothing is announced by that"


# D's side.


def ready_offer(limit: int, tokens: int = d_side.TOKENS) -> Offer:
    return Offer(d_side.KEY, d_side.ATTEMPT, tokens, d_side.DIGEST, "", limit)


def test_d_cuts_what_is_ready_and_posts_it_unasked() -> None:
    made = d_side.one_source()
    made.offer(0, d_side.offer(), 1.0)
    assert made.offer(0, ready_offer(54), 1.5) == [], "the request knows already that P has begun"
    want, *posts = made.want(0, 9, 2.0)
    cut = want.message.cut
    assert cut == ((Piece(0, 0, 1, 0, 9),), (Piece(0, 1, 2, 0, 9),))
    assert posts == [Post(0, d_side.chunk(number, *pieces)) for number, pieces in enumerate(cut)]
    assert made.chunk(0, d_side.chunk(0, *cut[0]), 2.5) == [], "announced twice"
    for post in posts:
        made.posted(0, post.chunk)
        made.sent(0, messages.Sent(d_side.KEY, d_side.ATTEMPT, post.chunk.chunk, 0, False), 3.0)
        ends = made.scattered(0, post.chunk.chunk, 3.0)
    assert ends[-1] == Finished(True) and made.load.state is LoadPhase.DONE


@pytest.mark.parametrize("stop", [9, 5])
def test_d_may_cut_what_is_likely_to_be_wanted_beforehand(stop: int) -> None:
    foreseen, made = d_side.one_source(), d_side.one_source()
    for each in (foreseen, made):
        each.offer(0, ready_offer(30), 1.0)
    foreseen.foresee(0)
    assert foreseen.want(0, stop, 2.0) == made.want(0, stop, 2.0)


def test_an_offer_that_is_not_ready_any_more_is_not_cut() -> None:
    made = d_side.one_source()
    for message in (ready_offer(54), d_side.offer()):
        made.offer(0, message, 1.0)
    assert made.want(0, 9, 2.0) == [SendTo(0, Want(d_side.KEY, d_side.ATTEMPT, 0, 9))]


def test_only_the_ranks_that_are_ready_are_sent_a_cut() -> None:
    made = d_side.make()
    made.offer(0, ready_offer(1 << 20), 1.0)
    made.offer(1, d_side.offer(), 1.0)
    first, post, second = made.want(0, 9, 2.0)
    assert isinstance(first, SendTo) and isinstance(first.message, Want) and first.message.cut
    assert post == Post(0, d_side.whole(0))
    assert second == SendTo(1, Want(d_side.KEY, d_side.ATTEMPT, 0, 9))


def test_a_cut_has_no_more_chunks_and_pieces_than_a_message_takes() -> None:
    made = d_side.one_source()
    made.offer(0, ready_offer(6, tokens=d_side.TOKENS), 1.0)
    want, *posts = made.want(0, 9, 2.0)
    assert isinstance(want, SendTo) and isinstance(want.message, Want) and want.message.cut
    assert len(posts) == len(want.message.cut) == MAX_CUT, "a row each, of 18"
    assert sum(map(len, want.message.cut)) <= MAX_PIECES


# Both.


@settings(max_examples=200, deadline=None)
@given(several_extents(), st.integers(1, 400), st.integers(1, 6))
def test_p_takes_whatever_d_cuts_and_announces_the_rest(extents: Extents, limit: int, most: int) -> None:
    """Together they announce what P would alone."""
    groups = extents.by_group.items()
    computed = {group: [999] * (extent.layer_stop - extent.layer) for group, extent in groups}
    alone = list(Cutter(extents).chunks(computed, limit, True, 999))
    cut = list(Cutter(extents).whole(999, limit, most))
    sender = Cutter(extents)
    assert [sender.take(pieces, limit) for _, pieces in cut] == [nbytes for nbytes, _ in cut]
    assert [*cut, *sender.chunks(computed, limit, True, 999)] == alone
    assert sender.left == 0


def test_an_older_side_never_sees_a_cut() -> None:
    """An older D reads the offer without `ready`, and asks as ever; an older P never says `ready`."""
    known = {"t", "key", "attempt", "tokens", "digest", "generation"}
    data = messages.without_optional(messages.encode(ready_offer(54)), known)
    old = messages.decode(data)
    assert old == d_side.offer()
    made = d_side.one_source()
    made.offer(0, old, 1.0)
    (want,) = made.want(0, 9, 2.0)
    assert isinstance(want, SendTo) and isinstance(want.message, Want) and want.message.cut is UNSET
    rig = ready()
    assert rig.want() == [SendTo(0, WHOLE)], "P announces"
    assert TERMS.chunk_bytes > WHOLE.nbytes and TOKENS == d_side.TOKENS
