"""P's blocks that wait for a D: one D that takes nothing leaves P to the others. vLLM's own scheduler."""

import itertools
import logging

import pytest
from vllm.v1.request import Request

from p2pkv.connector.held_blocks import BlockQuota, HeldBlocks, most_blocks
from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.connector.instances import BLOCK, Instance, inner_id, pair_id, tokens

STUCK, QUICK = Address("127.0.0.1", 21101), Address("127.0.0.1", 21201)
BLOCKS = 64
PROMPT = 100
PROMPT_BLOCKS = -(-PROMPT // BLOCK)
STEPS = 120


def ask(p: Instance, decode: Address, number: int, prompt: list[int] | None = None) -> Request:
    name = f"{decode} {number}"
    prompt = prompt or tokens(PROMPT, name)
    return p.ask(inner_id(pair_id(name, decode=decode)), prompt, max_tokens=1)


def begun(p: Instance, decode: Address) -> int:
    return sum(offer.decode == decode for offer in p.rank.said(do.OfferPrompt))


def free(p: Instance, decode: Address) -> None:
    """This D has taken all that P has computed for it."""
    for offer in p.rank.said(do.OfferPrompt):
        known = p.rank.facts.get(offer.key)
        if offer.decode == decode and known is not None and offer.key in p.workers[0]._ended:
            p.rank.free(offer.key)


def test_a_full_ds_prompts_wait_and_begin_when_it_has_taken_some(caplog: pytest.LogCaptureFixture) -> None:
    p = Instance("P", blocks=BLOCKS)
    requests = [ask(p, STUCK, number) for number in range(12)]
    p.step(STEPS)
    held = begun(p, STUCK)
    assert BLOCKS // 2 <= held * PROMPT_BLOCKS < BLOCKS // 2 + 2 * PROMPT_BLOCKS
    assert sum(each.is_finished() for each in requests) == held
    quick = ask(p, QUICK, 0)
    p.run_until(quick.is_finished)
    p.step()
    free(p, QUICK)
    assert begun(p, STUCK) == held, "it has what the other leaves free, and does not wait behind its prompts"
    warned = [each for each in caplog.records if "P begins no further prompt" in each.getMessage()]
    assert len(warned) == 1 and warned[0].levelno == logging.WARNING and str(STUCK) in warned[0].getMessage()
    for _ in range(STEPS):
        free(p, STUCK)
        p.step()
    assert all(each.is_finished() for each in requests)
    free(p, STUCK)
    p.assert_at_rest()


def test_a_prompt_that_has_begun_is_finished_although_its_d_is_full_meanwhile() -> None:
    """Preempted, say, and looked up again."""
    p = Instance("P", blocks=BLOCKS, budget=40)
    last = ask(p, STUCK, 100, tokens(40 * BLOCK - 200, "long"))
    p.step()
    assert begun(p, STUCK) == 1
    p.scheduler._preempt_request(last, 0.0)
    p.scheduler.running.remove(last)
    p.scheduler.connector.producer._held.hold("another", STUCK, [list(range(1, BLOCKS))])
    p.run_until(last.is_finished)


def test_a_prompt_larger_than_the_share_begins_if_its_d_holds_nothing() -> None:
    p = Instance("P", blocks=BLOCKS, held_share=0.1)
    request = ask(p, STUCK, 0, tokens(50 * BLOCK - 300))
    p.run_until(request.is_finished)


def test_of_a_prefix_that_several_prompts_share_each_block_counts_once() -> None:
    held = HeldBlocks(100, 0.5)
    for number in range(60):
        held.hold(f"{number}", STUCK, [[*range(1, 20), 20 + number % 10]])
    assert not held.full(STUCK)
    held.hold("more", STUCK, [list(range(40, 70))])
    assert held.full(STUCK)
    for number in range(60):
        held.free(f"{number}")
    assert not held.full(STUCK), "the last prompt's blocks are 30"
    held.free("more")


def test_beside_several_ds_that_take_nothing_blocks_stay_free() -> None:
    held, total = HeldBlocks(1000, 0.5), 0
    blocks = itertools.count(1)
    for number in range(5):
        decode = Address("127.0.0.1", 22000 + number)
        for prompt in range(1000):
            if held.full(decode):
                break
            held.hold(f"{number} {prompt}", decode, [[next(blocks)]])
            total += 1
    assert 900 < total < 1000 - 1000 // 2**6


def test_prompts_without_blocks_do_not_count() -> None:
    held = HeldBlocks(10, 0.5)
    held.hold("preempted", STUCK, ([],))
    held.hold("other", STUCK, ([1, 2],))
    held.free("other")
    held.free("preempted")
    assert not held.full(STUCK)


# The rooms of an instance of both roles.


def test_a_room_admits_up_to_its_limit_and_who_has_waited_longest_first() -> None:
    room = BlockQuota(10, lambda tokens: -(-tokens // BLOCK))
    assert room.ever_admits(160) and not room.ever_admits(161)
    assert room.admits("a", 80)
    room.enter("a", 80)
    assert not room.admits("long", 100)
    assert not room.admits("short", 16), "it would fit, but came later"
    assert not room.admits("long", 100, other_blocks=5)
    room.leave("a")
    assert room.next_waiting == ["long"] and room.admits("long", 100)
    room.enter("long", 100)
    assert room.next_waiting == ["short"] and not room.admits("short", 16, other_blocks=3)
    assert room.admits("short", 16, other_blocks=2)
    room.leave("short")
    room.leave("long")
    assert (room.taken, room.next_waiting, room.admitted) == (0, [], [])


def test_blocks_of_a_request_are_bounded_by_what_vllm_keeps_of_the_longest() -> None:
    tables = [(16, 128), (16, 5), (2048, 2)]
    assert [most_blocks(tables, 1, tokens) for tokens in (1, 15, 16, 79, 160)] == [3, 3, 5, 11, 17]
