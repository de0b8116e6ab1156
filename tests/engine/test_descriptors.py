"""A process that runs out of file descriptors: its ranks go on, and serve again when there are some."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pkv.pairing import Address
from support.hostile import shout
from support.links.pairs import Peer, starting
from support.waiting import wait_for

PEER = Path(__file__).with_name("descriptors_peer.py")
LIMIT, FLOOD = 128, 140
SECRET = "a secret of the tests"


@pytest.fixture(params=[(), (SECRET,)], ids=["in the clear", "with a secret"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    with starting() as start:
        yield start(str(LIMIT), *request.param, script=PEER)


def ask(peer: Peer, what: str, **details: object) -> object:
    peer.tell(do=what, **details)
    return peer.hear()["answer"]


@contextlib.contextmanager
def flooded(addresses: list[str]) -> Iterator[None]:
    """More connections than the process has descriptors; what it cannot accept waits in the kernel."""
    with contextlib.ExitStack() as stack:
        for number in range(FLOOD):
            stack.enter_context(shout(Address.parse(addresses[number % len(addresses)]), b""))
        yield


def test_running_out_of_descriptors_is_survived(peer: Peer) -> None:
    addresses = peer.hear()["addresses"]
    assert ask(peer, "transfer", key="before") == "transferred"
    quiet = ask(peer, "open")
    with flooded(addresses):
        wait_for(lambda: ask(peer, "open") >= LIMIT - 1, what="the end of all descriptors")
        # Over the connection that there is.
        assert ask(peer, "transfer", key="during") == "transferred"
        assert "Too many open files" in ask(peer, "dial", port=9)
    wait_for(lambda: ask(peer, "open") <= quiet + 8, what="the return of descriptors")
    assert ask(peer, "transfer", key="after") == "transferred"
    assert ask(peer, "end") == "ended"
    assert peer.process.wait(10) == 0
