"""CUDA IPC links to a process that dies, or is frozen and wakes up."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from links_support import Peer, ipc_links, receive_all, send_all, starting

from p2pkv.links import ipc_ends
from p2pkv.links.base import LinkError
from p2pkv.links.ipc import IpcLinks
from support.waiting import wait_for

SIZES = [1, 4096, 100_001, 1 << 21]
WINDOW = 1 << 22


@pytest.fixture
def start() -> Iterator[Callable[[str], Peer]]:
    with starting() as begin:
        yield lambda role: begin(role, "ipc")


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[IpcLinks]:
    monkeypatch.setattr(ipc_ends, "ORPHAN_SECONDS", 0.1)
    links = ipc_links(2 * WINDOW)
    yield links
    links.close()


def test_d_dies_and_another_takes_its_place(start: Callable[[str], Peer], links: IpcLinks) -> None:
    """What P writes after D's death lands in memory that the driver keeps until P has left it."""
    peer, other = start("D"), start("D")
    before = len(os.listdir("/proc/self/fd"))
    outbound, remote_slot = send_all(links, peer, SIZES, WINDOW)
    send = outbound.reserve(WINDOW, remote_slot)
    assert send is not None
    peer.kill()
    send.buffer.fill_(1)  # no fault: the memory is still mapped
    with pytest.raises(LinkError, match="closed by the peer"):
        send.commit()
        wait_for(outbound.poll)  # type: ignore[arg-type]
    outbound.abort()
    outbound, _ = send_all(links, other, SIZES, WINDOW)
    outbound.abort()
    del send
    wait_for(lambda: not links.shared.aborts.busy and len(os.listdir("/proc/self/fd")) <= before)


def test_p_dies_while_it_writes(start: Callable[[str], Peer], links: IpcLinks) -> None:
    peer = start("P")
    inbound = receive_all(links, peer, SIZES, WINDOW)
    last = inbound.post(WINDOW)
    assert last is not None
    wait_for(lambda: inbound.poll() or peer.hear() == {"sent": True})
    peer.tell(nbytes=WINDOW, remote_slot=last.remote_slot)
    assert peer.hear() == {"half": True}
    peer.kill()
    with pytest.raises(LinkError, match="closed by the peer"):
        wait_for(inbound.poll)  # type: ignore[arg-type]
    assert not last.arrived
    inbound.abort()
    assert links.staging.used == WINDOW, "kernels of a process that was killed may run on for a moment"
    wait_for(lambda: links.staging.used == 0)


def test_a_frozen_p_that_wakes_up_writes_where_no_rank_reads(
    start: Callable[[str], Peer], links: IpcLinks
) -> None:
    peer = start("P")
    inbound = receive_all(links, peer, SIZES, WINDOW)
    last = inbound.post(WINDOW)
    assert last is not None
    wait_for(lambda: inbound.poll() or peer.hear() == {"sent": True})
    peer.process.send_signal(signal.SIGSTOP)
    peer.tell(nbytes=WINDOW, remote_slot=last.remote_slot)
    inbound.abort()
    other, _ = links.accept(links.invite(), WINDOW)
    fresh = other.post(WINDOW)
    assert fresh is not None
    before = fresh.buffer.clone()
    slot = last.buffer
    slot.fill_(0)
    peer.process.send_signal(signal.SIGCONT)
    assert peer.hear() == {"half": True}
    assert bool((slot[: WINDOW // 2] == 1).all()), "P has written"
    assert torch.equal(fresh.buffer, before) and links.staging.used == 2 * WINDOW
    wait_for(lambda: peer.process.poll() is not None)  # it finds the link closed
    wait_for(lambda: links.staging.used == WINDOW)
