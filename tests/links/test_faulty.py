"""The injected faults do what they say."""

import pytest
import torch

from support.links.faulty import FaultyLinks
from support.links.pairs import connect, make_factories


@pytest.mark.parametrize("who", ["P", "D"])
def test_frozen_then_awake(who: str) -> None:
    p, d = make_factories("faulty")
    pair, frozen = connect((p, d), 1 << 16), p if who == "P" else d
    receive, send = pair.begin(100)
    assert isinstance(frozen, FaultyLinks)
    frozen.frozen = True
    send.buffer.fill_(4)
    send.commit()
    for _ in range(20):
        pair.poll()
        assert not receive.done() and not send.done()
    frozen.frozen = False
    pair.until(lambda: receive.done() and send.done())
    assert torch.equal(receive.buffer, send.buffer)
