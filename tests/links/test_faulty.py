"""The injected faults do what they say, the same way for one seed."""

from __future__ import annotations

import pytest
import torch

from p2pkv.links.base import LinkError
from support.links.faulty import Faults, FaultyLinks
from support.links.memory import MemoryNetwork
from support.links.pairs import connect

WINDOW = 1 << 16


def make(p: Faults, d: Faults, seed: int = 0) -> tuple[FaultyLinks, FaultyLinks]:
    network = MemoryNetwork()
    return FaultyLinks(network.rank(), p, seed), FaultyLinks(network.rank(), d, seed)


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
