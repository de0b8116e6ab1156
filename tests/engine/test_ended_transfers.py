"""What P remembers of transfers that have ended, and for how long."""

from __future__ import annotations

from p2pkv.engine.context import Remembered


def test_reasons_are_kept_for_a_while() -> None:
    ends = Remembered[str](10.0, 1024)
    ends.add("a", "P aborted", 0.0)
    ends.expire(10.0)
    assert ends.get("a") == "P aborted" and ends.get("b") is None
    ends.expire(10.1)
    assert ends.get("a") is None and len(ends) == 0


def test_a_key_that_ends_again_is_kept_from_its_last_end_on() -> None:
    """As when a client sends the same request id again."""
    ends = Remembered[str](10.0, 1024)
    ends.add("a", "first", 0.0)
    ends.discard("a")
    ends.add("a", "second", 8.0)
    ends.expire(12.0)
    assert ends.get("a") == "second"
    ends.expire(18.1)
    assert len(ends) == 0


def test_they_are_bounded_in_number() -> None:
    ends = Remembered[str](1e9, most=100)
    for number in range(200):
        ends.add(f"k{number}", "over", float(number))
    assert len(ends) == 100 and ends.get("k0") is None and ends.get("k199") == "over"
