"""How a rank ends: stopped under load, and what its peers hear of it."""

import contextlib
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from p2pkv.engine import commands as do
from p2pkv.engine.thread import FINISH_SECONDS
from support.engine.engines import Engine, Geometry, Make, engine_maker, plain_links, step, wrong_cells
from support.engine.transfers import BLOCKS, arrives, begin, expect, load, push, rest, value
from support.links.pairs import held
from support.waiting import wait_for

ONE = Geometry()
LEASE = 60.0
"""Seconds: what ends in these tests does not end by a lease, if nothing else is said."""


@pytest.fixture(params=["memory", "shared-memory", "tcp"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with engine_maker(plain_links(request.param), lease_seconds=LEASE) as make:
        yield make


one_kind = pytest.mark.parametrize("make", ["memory"], indirect=True)


def reasons(engine: Engine) -> dict[str, str]:
    return {event.key: event.reason for event in engine.ranks[0].events(do.LoadFailed)}


@contextlib.contextmanager
def stopping(engine: Engine) -> Iterator[None]:
    """It is being stopped meanwhile, and has ended within its deadline."""
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    yield
    stopper.join(FINISH_SECONDS + 5.0)
    assert not stopper.is_alive() and not engine.ranks[0].rank.alive


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_p_that_stops_finishes_what_it_has_computed_and_d_loads(make: Make, forgotten: bool) -> None:
    """Also if vLLM has heard that the pages are free, and P has forgotten the prompt."""
    p, d = make("P", chunk_bytes=1024), make("D", chunk_bytes=1024)
    push(p, d, "first")
    begin(p, d)
    load(d)
    if forgotten:
        p.wait(do.BlocksFree("k"))
        p.do(do.Forget("k"))
    p.stop()
    arrives(d)
    d.do(do.Forget("k"))
    rest(d)


@one_kind
def test_a_p_that_stops_waits_a_moment_for_a_d_that_is_about_to_admit(make: Make) -> None:
    p, d = make("P"), make("D")
    begin(p, d)
    d.wait(do.Begun("k"))
    with stopping(p):
        wait_for(lambda: p.ranks[0].rank.core.prefill.peers.leaving)
        d.do(do.Load("k", 0, 95, (BLOCKS,)))
        d.wait(do.Loaded("k"))
    assert wrong_cells(d.ranks[0], BLOCKS, 0, 95) == []


@one_kind
def test_a_p_that_stops_ends_at_once_what_it_has_not_computed(make: Make) -> None:
    """Half a push, a prompt in its queue, and one that it has not heard of; with the reason."""
    p, d = make("P"), make("D")
    p.ranks[0].rank.steps.begin(time.monotonic())
    for key in ("half", "queued", "unheard of"):
        d.do(do.Expect(key, p.address, 96, b"digest"))
    p.do(do.OfferPrompt("half", d.address, 96, b"digest"))
    p.do(do.HoldPrompt("queued", d.address))
    load(d, "half")
    step(p, "half", BLOCKS, 0, 48)
    wait_for(lambda: value(d, "bytes_scattered"))
    wait_for(lambda: value(p, "early_claims"))
    p.stop()
    wait_for(lambda: len(reasons(d)) == 3)
    assert set(reasons(d).values()) == {f"{p.address} is gone: it is shutting down"}
    for key in reasons(d):
        d.do(do.Forget(key))
    rest(d)


@one_kind
def test_a_p_that_stops_takes_on_nothing_new(make: Make) -> None:
    p, d, other = make("P"), make("D"), make("D")
    begin(p, d)
    d.wait(do.Begun("k"))
    with stopping(p):
        wait_for(lambda: p.ranks[0].rank.core.prefill.peers.leaving)
        d.do(do.Expect("new", p.address, 32, b"digest"))
        other.do(do.Expect("new", p.address, 32, b"digest"))
        for each in (d, other):
            wait_for(lambda each=each: "is shutting down" in reasons(each).get("new", ""))
    wait_for(lambda: "is shutting down" in reasons(d).get("k", ""), what="the end of what D never admitted")


@one_kind
def test_a_stop_waits_for_no_peer_that_is_dead(make: Make) -> None:
    """P has computed what D wants, and D says nothing any more."""
    p, d = make("P"), make("D")
    push(p, d, "first")
    gate = threading.Event()
    d.ranks[0].rank.core.roles[0].peers.poll = lambda now: gate.wait(30.0) and False
    begin(p, d)
    p.stop()
    assert not p.ranks[0].rank.alive
    gate.set()


@pytest.mark.parametrize("who", ["P", "D"])
@pytest.mark.parametrize("seed", range(3))
def test_a_stop_at_any_moment_leaves_nothing_behind(make: Make, who: str, seed: int) -> None:
    """Neither in this process nor at the peer, which is at its baseline after a lease."""
    gc.collect()
    before = held()
    p, d = make("P", lease_seconds=1.0), make("D", lease_seconds=1.0)
    stopped, other = (p, d) if who == "P" else (d, p)
    keys = [f"k{number}" for number in range(12)]
    for number, key in enumerate(keys):
        expect(p, d, key)
        p.do(do.OfferPrompt(key, d.address, 96, b"digest"))
        step(p, key, BLOCKS, 0, 48 if number % 2 else 96)
        d.do(do.Load(key, 0, 95, (BLOCKS,)))
    wait_for(lambda: value(d, "bytes_scattered"))
    time.sleep(random.Random(seed).random() / 20)
    stopped.stop()
    assert not stopped.ranks[0].rank.alive
    for key in keys:
        # As vLLM does: what the client has left is dropped, and what has had its last word is forgotten.
        other.do(do.Abort(key, "the end") if other is p else do.Drop(key, "the end"))
    last = do.BlocksFree if other is p else do.Loaded | do.LoadFailed
    wait_for(
        lambda: {event.key for event in other.ranks[0].events(last)} == set(keys),
        what="a last word about each request",
    )
    for key in keys:
        other.do(do.Forget(key))
    rest(other)
    other.stop()
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not held() - before)
    assert held() - before == Counter()
