"""A process with a rank is stopped or killed under load: what is left behind, how the next one starts."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pkv.control.discovery import Ping, decode_ping
from p2pkv.demo.processes import free_ports
from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.engine.engines import Engine, at_baseline, engine_maker, plain_links, prefill, step
from support.engine.transfers import BLOCKS, arrives, expect, failure, load, rest, scribble, value
from support.hostile import router
from support.links.pairs import Peer, leftovers, starting
from support.waiting import wait_for

SCRIPT = Path(__file__).with_name("stop_peer.py")
LEASE = 2.0
EXIT_SECONDS = 15.0
"""For the interpreter to end too; the rank itself takes two at most."""


@pytest.fixture(params=["shared-memory", "tcp"])
def mode(request) -> str:
    return request.param


@pytest.fixture
def proxy() -> Iterator[tuple[int, Callable[[], Ping]]]:
    """The port to ping, and the next ping."""
    with router() as (socket, place):

        def hear() -> Ping:
            assert socket.poll(10_000), "no ping in 10 s"
            return decode_ping(socket.recv_multipart()[1])

        yield place.port, hear


@pytest.fixture
def start(mode: str, proxy) -> Iterator[Callable[..., Peer]]:
    with starting() as begin:

        def start(role: str, port: int) -> Peer:
            peer = begin(role, str(port), str(proxy[0]), mode, script=SCRIPT)
            assert peer.hear() == {"ready": True}
            return peer

        yield start


@contextlib.contextmanager
def engine(role: str, mode: str) -> Iterator[Engine]:
    with engine_maker(plain_links(mode), lease_seconds=LEASE) as make:
        yield make(role)


def order(peer: Peer, what: str, key: str, other: Engine, tokens: int = 96) -> None:
    peer.tell(do=what, key=key, peer=str(other.address), tokens=tokens)
    assert peer.hear() == {"done": True}


def test_a_killed_p_leaves_no_memory_behind_and_the_next_one_serves_at_once(mode, start, proxy) -> None:
    """That gets SIGTERM under load: what it has computed arrives, what it has not fails at once, newcomers
    are not served."""
    port = free_ports()
    place = Address("127.0.0.1", port)
    with engine("D", mode) as d:
        p = start("P", port)
        expect(place, d, "k")
        order(p, "half", "k", d)
        load(d, "k")
        wait_for(lambda: value(d, "bytes_scattered"))
        p.kill()
        assert failure(d, "k")
        d.do(do.Forget("k"))
        wait_for(lambda: at_baseline(d) and not any(leftovers()[1:]))
        p = start("P", port)
        expect(place, d, "again")
        order(p, "prefill", "again", d)
        load(d, "again")
        arrives(d, "again")
        scribble(d, BLOCKS)
        scattered = value(d, "bytes_scattered")
        for key in ("whole", "half"):
            expect(place, d, key)
        order(p, "half", "half", d)
        load(d, "half")
        wait_for(lambda: value(d, "bytes_scattered") > scattered)
        order(p, "prefill", "whole", d)
        load(d, "whole")
        stops(p, proxy[1])
        arrives(d, "whole")
        assert failure(d, "half") == f"{place} is gone: it is shutting down"
        expect(place, d, "late")
        assert failure(d, "late")
        for key in ("again", "whole", "half", "late"):
            d.do(do.Forget(key))
        rest(d)
    assert not any(leftovers()[1:])


def test_a_killed_d_leaves_no_memory_behind_and_the_next_one_is_served_at_once(mode, start) -> None:
    """The arena is D's, and P has it mapped when D dies."""
    port = free_ports()
    with engine("P", mode) as p:
        d = start("D", port)
        place = Address("127.0.0.1", port)
        p.do(do.OfferPrompt("k", place, 96, b"digest"))
        order(d, "load", "k", p)
        step(p, "k", BLOCKS, 0, 48)
        wait_for(lambda: value(p, "bytes_sent"))
        assert bool(leftovers()[1]) is (mode == "shared-memory")
        d.kill()
        p.wait(do.BlocksFree("k"))
        p.do(do.Forget("k"))
        rest(p)
        d = start("D", port)
        prefill(p, "again", place, 96, BLOCKS, chunk=96)
        order(d, "load", "again", p)
        p.wait(do.BlocksFree("again"))
        assert value(p, "transfers_sent") == 1
        d.kill()
    wait_for(lambda: not any(leftovers()[1:]))


def stops(peer: Peer, hear: Callable[[], Ping]) -> None:
    """SIGTERM: it says goodbye, ends its threads, and the process ends by itself."""
    assert not hear().leaving
    peer.process.send_signal(signal.SIGTERM)
    while not hear().leaving:
        pass
    assert peer.hear() == {"alive": [False]}
    assert peer.process.wait(EXIT_SECONDS) == 0
