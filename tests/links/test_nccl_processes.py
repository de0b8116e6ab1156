"""NCCL links to a process that dies: before it joins, after it has, in mid-message. NCCL says nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from links_support import NCCL_KINDS, Peer, nccl_links, receive_all, send_all, starting

from p2pkv.links.base import LinkError
from p2pkv.links.nccl import NcclLinks
from support.waiting import wait_for

SIZES = [1, 100_001, 1 << 21]
WINDOW = 1 << 23
POLLS = 200


@pytest.fixture(params=NCCL_KINDS)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start(mode: str) -> Iterator[Callable[[str], Peer]]:
    with starting() as begin:
        yield lambda role: begin(role, mode)


@pytest.fixture
def links(mode: str) -> Iterator[NcclLinks]:
    links = nccl_links(blocking=mode == "nccl-blocking", staging=2 * WINDOW)
    yield links
    links.close()
    assert links.staging.used == 0


def test_d_dies_in_mid_message_and_another_takes_its_place(
    start: Callable[[str], Peer], links: NcclLinks
) -> None:
    peer, other = start("D"), start("D")
    outbound, remote_slot = send_all(links, peer, SIZES, WINDOW)
    peer.process.send_signal(signal.SIGSTOP)  # so that no message can be taken as a whole
    send = outbound.reserve(WINDOW, remote_slot)
    assert send is not None
    send.commit()
    peer.kill()
    for _ in range(POLLS):
        outbound.poll()
        assert not send.done()
    assert links.staging.used == WINDOW
    outbound.abort()
    wait_for(lambda: links.staging.used == 0)
    outbound, _ = send_all(links, other, SIZES, WINDOW)
    outbound.abort()


def test_p_dies_with_a_receive_posted(start: Callable[[str], Peer], links: NcclLinks) -> None:
    peer = start("P")
    inbound = receive_all(links, peer, SIZES, WINDOW)
    last = inbound.post(WINDOW)
    assert last is not None and peer.hear() == {"sent": True}
    peer.kill()
    for _ in range(POLLS):
        inbound.poll()
        assert not last.done()
    inbound.abort()
    assert inbound.used == 0
    wait_for(lambda: links.staging.used == 0)


def test_p_dies_before_it_joins(start: Callable[[str], Peer], mode: str) -> None:
    links = nccl_links(blocking=mode == "nccl-blocking", init_seconds=0.1)
    peer = start("P")
    invitation = bytes.fromhex(peer.hear()["invitation"])
    peer.kill()
    inbound, _ = links.accept(invitation, WINDOW)
    with pytest.raises(LinkError, match=r"did not come up in 0\.1 s"):
        wait_for(inbound.ready)
    inbound.abort()
    links.close()
    wait_for(lambda: links.stuck == (1 if mode == "nccl-blocking" else 0))
