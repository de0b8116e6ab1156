"""The injected faults do what they say, the same way for one seed."""

from __future__ import annotations

import pytest
import torch

from p2pkv.links.base import LinkError
from support.links.faulty import Faults, FaultyLinks
from support.links.memory import MemoryNetwork
from support.links.pairs import Pair, connect, noise

WINDOW = 1 << 16


def make(p: Faults, d: Faults, seed: int = 0) -> tuple[FaultyLinks, FaultyLinks]:
    network = MemoryNetwork()
    return FaultyLinks(network.rank(), p, seed), FaultyLinks(network.rank(), d, seed)


def test_delays_end() -> None:
    pair = connect(make(Faults(), Faults(delay_polls=20)), WINDOW)
    pairs = [pair.begin(64) for _ in range(8)]
    for _, send in pairs:
        send.commit()
    pair.poll()
    done = []
    for _ in range(21):
        done.append([receive.done() for receive, _ in pairs].count(True))
        pair.poll()
    assert done == sorted(done) and done[0] < 8 and done[-1] == 8


@pytest.mark.parametrize("breaks", ["P", "D"])
def test_a_break_is_an_error_from_that_operation_on(breaks: str) -> None:
    broken = Faults(break_at=1)
    pair = connect(make(broken, Faults()) if breaks == "P" else make(Faults(), broken), WINDOW)
    pair.begin(64)
    receive, send = pair.begin(64)
    end, operation = (pair.outbound, send) if breaks == "P" else (pair.inbound, receive)
    for call in (end.poll, end.ready, operation.done):
        with pytest.raises(LinkError, match="injected fault: the link broke at operation 1"):
            call()
    pair.abort()


@pytest.mark.parametrize(("place", "at"), [(0.0, 0), (1.0, 99), (0.5, 49)])
def test_links_that_there_are_get_faults_and_later_ones_do_not(place: float, at: int) -> None:
    p, d = make(Faults(), Faults())
    old = connect((p, d), WINDOW)
    old.carry(100)
    p.change(flip_at=1, flip_place=place, flip_bit=7)
    d.change(break_at=0)
    d.change(break_at=None)
    new = connect((p, d), WINDOW)
    assert [wrong_bits(pair, i) for pair in (new, old) for i in range(3)] == [[]] * 4 + [[(at, 128)], []]


def wrong_bits(pair: Pair, seed: int) -> list[tuple[int, int]]:
    """Send a message; where it arrives wrong, and by which bits."""
    wrong = pair.transfer(100, seed) ^ noise(100, seed)
    return [(int(at), int(wrong[at])) for at in wrong.nonzero()]


@pytest.mark.parametrize("who", ["P", "D"])
def test_frozen_then_awake(who: str) -> None:
    p, d = make(Faults(), Faults())
    pair = connect((p, d), WINDOW)
    receive, send = pair.begin(100)
    frozen = p if who == "P" else d
    frozen.frozen = True
    send.buffer.fill_(4)
    send.commit()
    for _ in range(20):
        pair.poll()
        assert not receive.done() and not send.done()
    frozen.frozen = False
    pair.until(lambda: receive.done() and send.done())
    assert torch.equal(receive.buffer, send.buffer)
