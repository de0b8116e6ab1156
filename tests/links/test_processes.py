"""Host links between two processes, and what is left when one of them is killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from links_support import Peer, receive_all, send_all, starting

from p2pkv.links.base import LinkError
from p2pkv.links.host import HostLinks
from p2pkv.links.shared_memory import SharedOutbound
from p2pkv.links.tcp import TcpOutbound
from support.waiting import wait_for

SIZES = [1, 4096, 100_001, 1 << 21, (1 << 23) + 7]
WINDOW = 1 << 24


@pytest.fixture(params=["shared", "tcp"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start(mode: str) -> Iterator[Callable[[str], Peer]]:
    with starting() as begin:
        yield lambda role: begin(role, mode)


@pytest.fixture
def links(mode: str) -> Iterator[HostLinks]:
    before = leftovers()
    links = HostLinks("127.0.0.1", 1 << 25, mode == "shared")
    yield links
    links.close()
    assert leftovers() == before


def leftovers() -> tuple[int, int, list[str]]:
    """Open descriptors, mapped arenas, files of ours in /dev/shm."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("p2pkv-arena")
    ours = sorted(name for name in os.listdir("/dev/shm") if "p2pkv" in name)  # others use it meanwhile
    return len(os.listdir("/proc/self/fd")), maps, ours


def test_to_another_process_which_is_killed(
    start: Callable[[str], Peer], links: HostLinks, mode: str
) -> None:
    peer = start("D")
    outbound, remote_slot = send_all(links, peer, SIZES, WINDOW)
    assert isinstance(outbound, SharedOutbound if mode == "shared" else TcpOutbound)
    assert outbound.used == 0
    send = outbound.reserve(WINDOW, remote_slot)
    assert send is not None
    peer.kill()
    send.buffer.fill_(1)
    outlive(outbound.poll, send)
    outbound.abort()
    assert outbound.used == 0
    peer.process.stdin.close()  # type: ignore[union-attr]


def test_from_another_process_which_is_killed(start: Callable[[str], Peer], links: HostLinks) -> None:
    peer = start("P")
    inbound = receive_all(links, peer, SIZES, WINDOW)
    last = inbound.post(WINDOW)
    wait_for(lambda: inbound.poll() or peer.hear() == {"sent": True})
    peer.tell(nbytes=WINDOW, remote_slot=last.remote_slot)
    assert peer.hear() == {"half": True}
    peer.kill()
    outlive(inbound.poll, last)
    assert inbound.used >= WINDOW
    inbound.abort()
    assert inbound.used == 0


def outlive(poll: Callable[[], None], operation: object) -> None:
    """A killed peer is silent or a LinkError, and never a completion."""
    for _ in range(20):
        try:
            poll()
            assert not operation.done()  # type: ignore[attr-defined]
        except LinkError as error:
            assert "closed" in str(error) or "broke" in str(error)
