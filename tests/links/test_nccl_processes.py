"""NCCL links to a process that dies: before it joins, after it has, in mid-message. NCCL says nothing."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterator

import pytest
from links_support import NCCL_KINDS, Peer, nccl_links, noise, wait_until

from p2pkv.links.base import LinkError, Outbound
from p2pkv.links.nccl import NcclLinks

SIZES = [1, 100_001, 1 << 21]
WINDOW = 1 << 23
POLLS = 200


@pytest.fixture(params=NCCL_KINDS)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start(mode: str) -> Iterator[Callable[[str], Peer]]:
    peers: list[Peer] = []

    def start(role: str) -> Peer:
        peers.append(Peer(role, mode))
        return peers[-1]

    yield start
    for peer in peers:
        if peer.process.poll() is None:
            peer.kill()


@pytest.fixture
def links(mode: str) -> Iterator[NcclLinks]:
    links = nccl_links(blocking=mode == "nccl-blocking", staging=2 * WINDOW)
    yield links
    links.close()
    assert links.slot_bytes == 0


def send_all(links: NcclLinks, peer: Peer) -> tuple[Outbound, int]:
    """Messages of all sizes to a fresh D; the link, and the landing of one more receive of WINDOW bytes."""
    invitation = links.invite()
    peer.tell(invitation=invitation.hex(), window=WINDOW, sizes=SIZES)
    outbound = links.complete(invitation, bytes.fromhex(peer.hear()["acceptance"]))
    sends = []
    for seed, (nbytes, landing) in enumerate(zip(SIZES, peer.hear()["landings"], strict=True)):
        send = outbound.reserve(nbytes, landing)
        assert send is not None
        send.buffer.copy_(noise(nbytes, seed))
        send.commit()
        sends.append(send)
    wait_until(lambda: outbound.poll() or all(send.done() for send in sends))
    expected = [hashlib.sha256(noise(nbytes, seed).numpy()).hexdigest() for seed, nbytes in enumerate(SIZES)]
    assert peer.hear()["digests"] == expected
    return outbound, peer.hear()["landing"]


def test_d_dies_in_mid_message_and_another_takes_its_place(
    start: Callable[[str], Peer], links: NcclLinks
) -> None:
    peer, other = start("D"), start("D")
    outbound, landing = send_all(links, peer)
    peer.process.send_signal(signal.SIGSTOP)  # so that no message can be taken as a whole
    send = outbound.reserve(WINDOW, landing)
    assert send is not None
    send.commit()
    peer.kill()
    for _ in range(POLLS):
        outbound.poll()
        assert not send.done()
    assert links.slot_bytes == WINDOW
    outbound.abort()
    wait_until(lambda: links.slot_bytes == 0)
    outbound, _ = send_all(links, other)
    outbound.abort()


def test_p_dies_with_a_receive_posted(start: Callable[[str], Peer], links: NcclLinks) -> None:
    peer = start("P")
    inbound, acceptance = links.accept(bytes.fromhex(peer.hear()["invitation"]), WINDOW)
    receives = [inbound.post(nbytes) for nbytes in SIZES]
    peer.tell(acceptance=acceptance.hex(), sizes=SIZES, landings=[each.landing for each in receives])
    wait_until(lambda: inbound.poll() or all(receive.done() for receive in receives))
    for seed, (nbytes, receive) in enumerate(zip(SIZES, receives, strict=True)):
        assert bytes(receive.buffer.numpy()) == bytes(noise(nbytes, seed).numpy())
        receive.release()
    last = inbound.post(WINDOW)
    assert last is not None and peer.hear() == {"sent": True}
    peer.kill()
    for _ in range(POLLS):
        inbound.poll()
        assert not last.done()
    inbound.abort()
    assert inbound.used == 0
    wait_until(lambda: links.slot_bytes == 0)


def test_p_dies_before_it_joins(start: Callable[[str], Peer], mode: str) -> None:
    links = nccl_links(blocking=mode == "nccl-blocking", init_seconds=0.1)
    peer = start("P")
    invitation = bytes.fromhex(peer.hear()["invitation"])
    peer.kill()
    inbound, _ = links.accept(invitation, WINDOW)
    with pytest.raises(LinkError, match=r"did not come up in 0\.1 s"):
        wait_until(inbound.ready)
    inbound.abort()
    links.close()
    wait_until(lambda: links.stuck == (1 if mode == "nccl-blocking" else 0))
