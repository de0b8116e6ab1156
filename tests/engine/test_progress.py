"""The engine's thread tells the forward thread that something has happened.

Who is waited for, and how long, is in tests/virtual/test_silence.py.
"""

from __future__ import annotations

from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.waiting import wait_for


def test_an_event_ends_the_forward_threads_wait(memory_pair):
    """What happens in the wait, and what has happened before it; else it would outlast the test."""
    _, d = memory_pair
    rank = d.ranks[0].rank
    for meanwhile in (True, False):
        d.do(do.Expect("k", Address("127.0.0.1", 1), 96, b"digest"))
        d.do(do.Drop("k", "over"))
        if not meanwhile:
            wait_for(lambda: rank.core.news)
        rank.wait_for_event(300.0)
        assert [type(event) for event in rank.events()] == [do.LoadFailed]
        d.do(do.Forget("k"))


def test_an_event_is_called_out_once_until_it_has_been_heard(memory_pair):
    _, d = memory_pair
    rank, calls = d.ranks[0].rank, []
    rank.call_on_event(lambda: calls.append(rank.core.news))
    for heard in (1, 2):
        for key in "ab":
            d.do(do.Expect(key, Address("127.0.0.1", 1), 96, b"digest"))
            d.do(do.Drop(key, "over"))
        wait_for(lambda: rank.core.news == 2)
        assert len(calls) == heard
        assert len(rank.events()) == 2
        for key in "ab":
            d.do(do.Forget(key))
