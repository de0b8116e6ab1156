"""Any interleaving of two ends delivers what was sent, and returns both to zero."""

import random
from collections import deque

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pkv.links.staging import ALIGNMENT, Slots, aligned
from support.links.pairs import KINDS, connect, make_factories, noise
from support.waiting import wait_for


class Conversation:
    """Takes random steps at either end of a link, as two engines would."""

    def __init__(self, kind: str, sizes: list[int], window: int, seed: int) -> None:
        self.factories = make_factories(kind)
        self.pair = connect(self.factories, window, ready=False)
        self.sizes = sizes
        self.dice = random.Random(seed)
        self.posted: deque = deque()  # (message, receive), granted and not yet released
        self.granted: deque = deque()  # (message, remote_slot)
        self.filling: list = []
        self.sent: list = []
        self.next = 0
        self.received: dict[int, bool] = {}

    def step(self) -> bool:
        p, d = self.pair.outbound, self.pair.inbound
        self.dice.choice((self.post, self.reserve, self.fill, self.take, p.poll, d.poll))()
        self.sent = [send for send in self.sent if not send.done()]
        return len(self.received) == len(self.sizes) and not self.sent

    def post(self) -> None:
        if self.next < len(self.sizes):
            receive = self.pair.inbound.post(self.sizes[self.next])
            if receive is not None:
                self.posted.append((self.next, receive))
                self.granted.append((self.next, receive.remote_slot))
                self.next += 1

    def reserve(self) -> None:
        if self.granted:
            message, remote_slot = self.granted[0]
            send = self.pair.outbound.reserve(self.sizes[message], remote_slot)
            if send is not None:
                self.granted.popleft()
                self.filling.append((message, send))

    def fill(self) -> None:
        if self.filling:
            message, send = self.filling.pop(self.dice.randrange(len(self.filling)))
            send.buffer.copy_(noise(self.sizes[message], message))
            send.commit()
            self.sent.append(send)

    def take(self) -> None:
        if self.posted:
            self.posted.rotate(self.dice.randrange(len(self.posted)))
            message, receive = self.posted[0]
            if receive.done():
                self.posted.popleft()
                self.received[message] = torch.equal(receive.buffer, noise(self.sizes[message], message))
                receive.release()


@pytest.mark.parametrize("kind", KINDS)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    window=st.integers(5000, 20000),
    seed=st.integers(0, 1 << 30),
)
@example(sizes=[1, 63, 64, 65, 4097, 65536], window=65536, seed=0)
@settings(deadline=None, max_examples=20)
def test_every_interleaving_delivers(kind: str, sizes: list[int], window: int, seed: int) -> None:
    talk = Conversation(kind, sizes, window, seed)
    try:
        wait_for(lambda: any(talk.step() for _ in range(30)))
        talk.pair.poll()
        assert talk.received == dict.fromkeys(range(len(sizes)), True)
        assert (talk.pair.inbound.used, talk.pair.outbound.used) == (0, 0)
    finally:
        for factory in talk.factories:
            factory.close()


@given(
    capacity=st.integers(1, 4000), steps=st.lists(st.tuples(st.integers(1, 1500), st.booleans()), max_size=60)
)
@settings(deadline=None, max_examples=100)
def test_slots_never_overlap(capacity: int, steps: list[tuple[int, bool]]) -> None:
    slots = Slots(capacity)
    held: dict[int, int] = {}
    for nbytes, give_first in steps:
        if give_first and held:
            offset = next(iter(held))
            del held[offset]
            slots.give(offset)
        if nbytes > slots.capacity:
            with pytest.raises(ValueError, match="never fit"):
                slots.take(nbytes)
            continue
        offset = slots.take(nbytes)
        if offset is not None:
            assert offset % ALIGNMENT == 0 and offset + nbytes <= slots.capacity
            assert all(offset + nbytes <= o or o + n <= offset for o, n in held.items())
            held[offset] = nbytes
        assert slots.used == sum(aligned(n) for n in held.values())
    for offset in held:
        slots.give(offset)
    assert slots.used == 0 and slots.take(capacity) == 0


def test_slots_take_the_lowest_address_first() -> None:
    slots = Slots(640)
    first, second, third = (slots.take(64) for _ in range(3))
    assert (first, second, third) == (0, 64, 128)
    slots.give(64)
    slots.give(0)
    assert slots.take(128) == 0 and slots.take(64) == 192
