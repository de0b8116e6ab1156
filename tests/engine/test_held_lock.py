"""A worker that holds its interpreter's lock for long: its engine thread says nothing, and is not dead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_support import Engine, Geometry, at_baseline, make_engine, prefill, step, wait_for, wrong_cells
from links_support import Peer, starting

from p2pkv.demo.processes import free_ports
from p2pkv.engine import commands as do
from p2pkv.links.host import HostLinks
from p2pkv.pairing import Address

SCRIPT = Path(__file__).parents[1] / "stop_peer.py"
BLOCKS = list(range(6))
TOKENS = 96
SECRET = b"a secret of the tests"
HELD, LEASE = 15.0, 30.0
"""Seconds: the lock is held for longer than any pause of the conversation but the lease."""

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def pair(role: str, secret: bytes) -> Iterator[tuple[Engine, Peer, Address]]:
    """An engine of this role here, and the other one in a process, where it listens."""
    other, port = "D" if role == "P" else "P", free_ports()
    links = HostLinks("127.0.0.1", 1 << 20, True)
    engine = make_engine(role, Geometry(), lambda rank: links, lease_seconds=LEASE, secret=secret or None)
    try:
        with starting() as begin:
            nobody = str(free_ports())  # no proxy listens there
            peer = begin(other, str(port), nobody, "shared", str(LEASE), secret.decode(), script=SCRIPT)
            assert peer.hear() == {"ready": True}
            yield engine, peer, Address("127.0.0.1", port)
    finally:
        engine.stop()


def hold(peer: Peer) -> None:
    """From now on its process runs nothing but this."""
    peer.tell(do="hold", seconds=HELD)
    assert peer.hear() == {"holding": True}


def order(peer: Peer, what: str, engine: Engine) -> None:
    """To be obeyed when it comes to it; see `obeyed`."""
    peer.tell(do=what, key="k", peer=str(engine.address), tokens=TOKENS)


def obeyed(peer: Peer, orders: int) -> None:
    for _ in range(orders):
        assert peer.hear() == {"done": True}


def load(d: Engine) -> None:
    d.wait(do.Begun("k"), LEASE)
    d.do(do.Load("k", 0, TOKENS - 1, (BLOCKS,)))
    d.wait(do.Loaded("k"), LEASE)
    assert wrong_cells(d.ranks[0], BLOCKS, 0, TOKENS - 1) == []


def nothing_was_lost(engine: Engine) -> None:
    engine.do(do.Forget("k"))
    wait_for(lambda: at_baseline(engine))
    counters = engine.ranks[0].rank.counters.values
    assert counters["transfers_failed"] == counters["links_aborted"] == counters["handshakes_failed"] == 0


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["in the clear", "with the secret"])
def test_p_holds_its_lock_when_d_first_asks(secret: bytes) -> None:
    """With a secret the handshake waits for P's thread, without one the Hello does."""
    with pair("D", secret) as (d, p, address):
        hold(p)
        d.do(do.Expect("k", address, TOKENS, b"digest"))
        order(p, "prefill", d)
        load(d)
        obeyed(p, 2)
        nothing_was_lost(d)


def test_p_holds_its_lock_in_the_middle_of_a_prompt() -> None:
    with pair("D", SECRET) as (d, p, address):
        d.do(do.Expect("k", address, TOKENS, b"digest"))
        order(p, "half", d)
        obeyed(p, 1)
        d.wait(do.Begun("k"))
        d.do(do.Load("k", 0, TOKENS - 1, (BLOCKS,)))
        wait_for(lambda: d.ranks[0].rank.counters.values["bytes_scattered"], what="half of the prompt")
        hold(p)
        order(p, "other half", d)
        d.wait(do.Loaded("k"), LEASE)
        assert wrong_cells(d.ranks[0], BLOCKS, 0, TOKENS - 1) == []
        obeyed(p, 2)
        nothing_was_lost(d)


def test_d_holds_its_lock_before_it_asks() -> None:
    """P has computed all of the prompt, and its pages wait."""
    with pair("P", SECRET) as (p, d, address):
        hold(d)
        prefill(p, "k", address, TOKENS, BLOCKS, chunk=TOKENS)
        order(d, "expect", p)
        order(d, "take", p)
        obeyed(d, 3)
        p.wait(do.BlocksFree("k"))
        nothing_was_lost(p)


def test_d_holds_its_lock_when_it_has_asked() -> None:
    """While it is silent P computes the rest, and builds nothing anew."""
    with pair("P", SECRET) as (p, d, address):
        order(d, "expect", p)
        obeyed(d, 1)
        p.do(do.OfferPrompt("k", address, TOKENS, b"digest"))
        step(p, "k", BLOCKS, 0, TOKENS // 2)
        wait_for(lambda: p.ranks[0].rank.counters.snapshot()["links"], what="the link")
        hold(d)
        step(p, "k", BLOCKS, TOKENS // 2, TOKENS)
        order(d, "take", p)
        obeyed(d, 2)
        p.wait(do.BlocksFree("k"))
        nothing_was_lost(p)
