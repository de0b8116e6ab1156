"""What waits for copies, and what does not."""

from __future__ import annotations

from fake_device import Device

from p2pkv.device import PASSED
from p2pkv.engine.context import Copies


def test_on_a_cpu_nothing_waits_and_nothing_is_kept():
    copies, seen = Copies(lambda: PASSED), []
    copies.launched("k")
    copies.then("k", seen.append, 1.0)
    assert seen == [1.0] and len(copies) == 0


def test_actions_come_in_order_behind_the_last_copy_of_their_own_transfer():
    device, seen = Device(), []
    copies = Copies(device.fence)
    for number, key in enumerate("aba"):
        device.queue(lambda: None)
        copies.launched(key)
        copies.then(key, lambda now, number=number: seen.append((number, now)), 0.0)
    copies.then("a", lambda now: seen.append(("last of a", now)), 0.0)
    copies.then("b", lambda now: seen.append(("last of b", now)), 0.0)
    copies.then("c", lambda now: seen.append(("nothing of c", now)), 0.0)
    assert seen == [("nothing of c", 0.0)]
    device.run(2)
    copies.poll(5.0)
    assert seen[1:] == [(0, 5.0), (1, 5.0), ("last of b", 5.0)]
    copies.then("b", lambda now: seen.append(("later b", now)), 6.0)
    assert seen[-1] == ("later b", 6.0)
    device.run(1)
    copies.poll(7.0)
    assert seen[-2:] == [(2, 7.0), ("last of a", 7.0)]
    assert len(copies) == 0


def test_an_action_that_fails_does_not_keep_the_others():
    device, seen = Device(), []
    copies = Copies(device.fence)
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
    copies = Copies(device.fence)
    device.queue(lambda: None)
    copies.launched("a")
    device.run()
    copies.launched("b")
    copies.then("b", lambda now: seen.append("b"), 0.0)
    copies.then("a", lambda now: seen.append("a"), 0.0)
    assert seen == []
    copies.poll(1.0)
    assert seen == ["a", "b"]
