"""Small parts of an engine by themselves."""

import pytest
import torch

from p2pkv.engine.context import CopyQueue, ExpiringDict
from p2pkv.engine.prefetch import PrefetchBuffers
from support.engine.fake_device import Device

# Room for KV that comes ahead of its request.


@pytest.mark.parametrize("room", [0, 63, 64, 100, 200])
def test_what_was_given_is_not_exceeded(room: int) -> None:
    """Slots come in steps of 64 bytes, and the room that somebody asks for need not."""
    buffers, whole = PrefetchBuffers(room, torch.device("cpu")), room // 64 * 64
    assert buffers.take(whole + 1, 0.0) is None
    buffer = buffers.take(whole, 0.0)
    assert (buffer is not None) == (whole > 0)
    if buffer is not None:
        assert buffers.take(1, 0.0) is None
        buffers.give(buffer)
    assert buffers.used == 0


# What P remembers of transfers that have ended, and for how long.


def test_reasons_are_kept_for_a_while_from_the_last_end_of_their_key_on_and_bounded_in_number() -> None:
    """A key may end again, as when a client sends the same request id again."""
    ends = ExpiringDict(10.0, 1024)
    ends.add("a", "first", 0.0)
    ends.expire(10.0)
    assert ends.get("a") == "first" and ends.get("b") is None
    ends.discard("a")
    ends.add("a", "second", 10.0)
    ends.expire(20.0)
    assert ends.get("a") == "second"
    ends.expire(20.1)
    assert ends.get("a") is None and len(ends) == 0
    ends = ExpiringDict(1e9, most=100)
    for number in range(200):
        ends.add(f"k{number}", "over", float(number))
    assert len(ends) == 100 and ends.get("k0") is None and ends.get("k199") == "over"


# What waits for copies, and what does not.


def test_an_action_that_fails_does_not_keep_the_others():
    device, seen = Device(), []
    copies = CopyQueue(device.fence)
    device.queue(lambda: None)
    copies.launched("k")

    def fail(now: float) -> None:
        raise ZeroDivisionError

    copies.then("k", fail, 0.0)
    copies.then("k", seen.append, 0.0)
    device.run()
    try:
        copies.poll(1.0)
    except ZeroDivisionError:
        seen.append("raised")
    copies.poll(2.0)
    assert seen == ["raised", 2.0] and len(copies) == 0


def test_a_copy_behind_one_that_is_under_way_waits_its_turn():
    """Fences pass in order, but the one behind may be asked first."""
    device, seen = Device(), []
    copies = CopyQueue(device.fence)
    device.queue(lambda: None)
    copies.launched("a")
    device.run()
    copies.launched("b")
    copies.then("b", lambda now: seen.append("b"), 0.0)
    copies.then("a", lambda now: seen.append("a"), 0.0)
    assert seen == []
    copies.poll(1.0)
    assert seen == ["a", "b"]
