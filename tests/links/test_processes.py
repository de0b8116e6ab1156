"""Links between GPUs to a process that dies, or is frozen and wakes up. Host links: with engines, in
tests/engine/test_shutdown_processes.py."""

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from p2pkv.links import ipc_ends
from p2pkv.links.base import Inbound, LinkError, LinkFactory, Receive, Send
from support.links import pairs
from support.waiting import wait_for

SIZES = [1, 4096, 100_001, 1 << 21, (1 << 22) + 7]
WINDOW = 1 << 23


@pytest.fixture(params=["ipc", "nccl"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(mode: str) -> Iterator[Callable[[str], pairs.Peer]]:
    with pairs.starting() as begin:
        yield lambda role: begin(role, mode)


@pytest.fixture
def links(mode: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LinkFactory]:
    monkeypatch.setattr(ipc_ends, "ORPHAN_SECONDS", 0.1)
    made = pairs.links_of(mode, 2 * WINDOW)
    yield made
    wait_for(lambda: made.staging.used == 0, what="the return of all staging")
    made.close()


def outlive(poll: Callable[[], None], operation: Receive | Send, mode: str) -> None:
    """A killed peer never completes anything. CUDA IPC has a socket that shows its death, NCCL is silent."""
    if mode == "ipc":
        with pytest.raises(LinkError, match="closed by the peer"):
            wait_for(poll)  # type: ignore[arg-type]
        return
    for _ in range(200):
        poll()
        assert not operation.done()


def posted(links: LinkFactory, peer: pairs.Peer) -> tuple[Inbound, Receive]:
    """A P has sent all sizes, and a receive of a whole window is posted."""
    inbound = pairs.receive_all(links, peer, SIZES, WINDOW)
    last = inbound.post(WINDOW)
    wait_for(lambda: inbound.poll() or peer.hear() == {"sent": True})
    return inbound, last


def test_d_dies_in_mid_message_and_another_takes_its_place(
    start: Callable[[str], pairs.Peer], links: LinkFactory, mode: str
) -> None:
    """What P writes after D's death lands where it is kept until P has left it."""
    peer = start("D")
    outbound, remote_slot = pairs.send_all(links, peer, SIZES, WINDOW)
    assert outbound.used == 0
    peer.process.send_signal(signal.SIGSTOP)  # so that no message can be taken as a whole
    send = outbound.reserve(WINDOW, remote_slot)
    if mode == "nccl":
        send.commit()
    peer.kill()
    if mode != "nccl":
        send.buffer.fill_(1)  # no fault: the memory is still mapped
        with suppress(LinkError):
            send.commit()
    outlive(outbound.poll, send, mode)
    outbound.abort()
    assert outbound.used == 0
    other = pairs.links_of(mode, 2 * WINDOW)
    pair = pairs.connect((links, other), WINDOW)
    pair.carry(WINDOW)
    pair.abort()
    wait_for(lambda: other.staging.used == 0, what="the return of the other D's staging")
    other.close()


def test_p_dies_while_it_writes(start: Callable[[str], pairs.Peer], links: LinkFactory, mode: str) -> None:
    peer = start("P")
    inbound, last = posted(links, peer)
    peer.tell(nbytes=WINDOW, remote_slot=last.remote_slot)
    assert peer.hear() == {"half": True}
    peer.kill()
    outlive(inbound.poll, last, mode)
    inbound.abort()
    assert inbound.used == 0
    if mode == "ipc":
        assert links.staging.used == WINDOW, "kernels of a process that was killed may run on for a moment"


@pytest.mark.parametrize("mode", ["ipc"], indirect=True)
def test_a_frozen_p_that_wakes_up_writes_where_no_rank_reads(
    start: Callable[[str], pairs.Peer], links: LinkFactory
) -> None:
    peer = start("P")
    inbound, last = posted(links, peer)
    peer.process.send_signal(signal.SIGSTOP)
    peer.tell(nbytes=WINDOW, remote_slot=last.remote_slot)
    inbound.abort()
    other, _ = links.accept(links.invite(), WINDOW)
    fresh = other.post(WINDOW)
    before, slot = fresh.buffer.clone(), last.buffer
    slot.fill_(0)
    peer.process.send_signal(signal.SIGCONT)
    assert peer.hear() == {"half": True}
    assert bool((slot[: WINDOW // 2] == 1).all()), "P has written"
    assert torch.equal(fresh.buffer, before) and links.staging.used == 2 * WINDOW
    wait_for(lambda: peer.process.poll() is not None)  # it finds the link closed
    wait_for(lambda: links.staging.used == WINDOW)
    other.abort()
