"""What only host links promise: fallback, memory that returns, strangers kept out, bad peers survived."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from links_support import Pair, connect, noise, wait_until

from p2pkv.links import blobs, make_factory
from p2pkv.links.arena import ENTRIES, arena_bytes
from p2pkv.links.base import LinkError
from p2pkv.links.blobs import Acceptance, Invitation, SharedArena
from p2pkv.links.host import HostInbound, HostLinks, SharedOutbound, TcpOutbound
from p2pkv.links.tcp import HEADER, MAGIC, TAKEN
from p2pkv.trust import Networks

WINDOW = 1 << 20


def make(shared: bool) -> Iterator[HostLinks]:
    links = HostLinks("127.0.0.1", WINDOW, shared)
    yield links
    links.close()


@pytest.fixture
def shm() -> Iterator[HostLinks]:
    yield from make(True)


@pytest.fixture
def tcp() -> Iterator[HostLinks]:
    yield from make(False)


def mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("p2pkv-arena")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def accepted(links: HostLinks) -> tuple[bytes, HostInbound, Acceptance]:
    invitation = links.invite()
    inbound, acceptance = links.accept(invitation, WINDOW)
    return invitation, inbound, blobs.decode(acceptance, Acceptance)


def send_one(pair: Pair, nbytes: int = 1000) -> None:
    receive, send = pair.begin(nbytes)
    send.buffer.copy_(noise(nbytes, 1))
    send.commit()
    pair.until(receive.done)
    assert torch.equal(receive.buffer, noise(nbytes, 1))
    receive.release()
    pair.until(send.done)


# Choosing a way.


def test_each_way_is_taken(shm: HostLinks, tcp: HostLinks) -> None:
    assert isinstance(connect((shm, shm), WINDOW).outbound, SharedOutbound)
    for p, d in ((tcp, tcp), (shm, tcp), (tcp, shm)):
        pair = connect((p, d), WINDOW)
        assert isinstance(pair.outbound, TcpOutbound)
        send_one(pair)


def unsealed(offer: SharedArena) -> SharedArena:
    fd = os.memfd_create("p2pkv-arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, arena_bytes(WINDOW))
    return msgspec.structs.replace(offer, fd=fd, inode=os.fstat(fd).st_ino)


def sealed_but_strange(offer: SharedArena) -> SharedArena:
    bad = unsealed(offer)
    fcntl.fcntl(bad.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return bad


def short(offer: SharedArena) -> SharedArena:
    bad = unsealed(offer)
    os.ftruncate(bad.fd, 4096)
    return bad


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda offer: msgspec.structs.replace(offer, fd=1 << 20), "cannot open"),
        (lambda offer: msgspec.structs.replace(offer, pid=(1 << 31) - 1), "cannot open"),
        (lambda offer: msgspec.structs.replace(offer, inode=5), "not the file"),
        (lambda offer: msgspec.structs.replace(offer, fd=0), "not an arena"),
        (unsealed, "not sealed"),
        (sealed_but_strange, "nonce"),
        (short, "4096 bytes"),
    ],
    ids=["no fd", "no process", "another file", "stdin", "not sealed", "wrong nonce", "wrong size"],
)
def test_memory_that_cannot_be_had_means_tcp(shm: HostLinks, caplog, spoil, why: str) -> None:
    invitation, inbound, acceptance = accepted(shm)
    assert acceptance.shared is not None
    bad = spoil(acceptance.shared)
    outbound = shm.complete(invitation, blobs.encode(msgspec.structs.replace(acceptance, shared=bad)))
    if bad.fd not in (0, 1 << 20, acceptance.shared.fd):
        os.close(bad.fd)
    assert isinstance(outbound, TcpOutbound) and why in caplog.text
    send_one(Pair(outbound, inbound))


def test_an_invitation_from_elsewhere_is_answered_with_tcp_only(shm: HostLinks) -> None:
    invited = blobs.decode(shm.invite(), Invitation)
    assert invited.place is not None
    elsewhere = msgspec.structs.replace(invited.place, boot="another")
    _, answer = shm.accept(blobs.encode(msgspec.structs.replace(invited, place=elsewhere)), WINDOW)
    assert blobs.decode(answer, Acceptance).shared is None


def test_a_loopback_address_of_another_host_is_refused_with_a_sentence(tcp: HostLinks) -> None:
    invitation, _, acceptance = accepted(tcp)
    assert acceptance.place is not None
    far = msgspec.structs.replace(acceptance, place=msgspec.structs.replace(acceptance.place, boot="another"))
    with pytest.raises(
        LinkError, match=r"127\.0\.0\.1, which only its own machine can reach; set its `host`"
    ):
        tcp.complete(invitation, blobs.encode(far))


def test_an_address_outside_of_the_allowed_networks_is_not_dialed() -> None:
    """D names it, and P would connect to it: to any service, if D is no friend."""
    links = HostLinks("127.0.0.1", WINDOW, False, Networks.parse(["10.0.0.0/8", "127.0.0.1/32"]))
    invitation, _, acceptance = accepted(links)
    links.complete(invitation, blobs.encode(acceptance))
    with socket.create_server(("127.0.0.2", 0)) as service:
        far = msgspec.structs.replace(acceptance, host="127.0.0.2", port=service.getsockname()[1])
        with pytest.raises(LinkError, match=r"127\.0\.0\.2 is not dialed: allowed_peers are 10\.0\.0\.0/8"):
            links.complete(invitation, blobs.encode(far))
        service.settimeout(0.2)
        with pytest.raises(TimeoutError):
            service.accept()
    links.close()


@pytest.mark.parametrize("host", ["localhost.invalid", "/tmp/socket", "a b"])
def test_an_announced_name_is_no_address(tcp: HostLinks, host: str) -> None:
    invitation, _, acceptance = accepted(tcp)
    with pytest.raises(LinkError, match="not a numeric address"):
        tcp.complete(invitation, blobs.encode(msgspec.structs.replace(acceptance, host=host)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "no-such-host.invalid", ""])
def test_a_host_that_nobody_can_dial_is_a_value_error(host: str) -> None:
    with pytest.raises(ValueError, match="address"):
        HostLinks(host, WINDOW)


def test_a_host_of_another_machine_cannot_be_bound() -> None:
    links = HostLinks("192.0.2.1", WINDOW)
    with pytest.raises(LinkError, match=r"192\.0\.2\.1.*must be an address of this machine"):
        links.accept(links.invite(), WINDOW)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_ipv6() -> None:
    links = HostLinks("::1", WINDOW, False)
    send_one(connect((links, links), WINDOW))
    links.close()


def test_make_factory() -> None:
    factory = make_factory("auto", host="127.0.0.1", staging_bytes=1 << 20)
    assert factory.kind == "host"
    factory.close()
    with pytest.raises(ValueError, match="NCCL link needs a CUDA device, and torch finds none; set"):
        make_factory("nccl", host="127.0.0.1", staging_bytes=1 << 20)
    with pytest.raises(ValueError, match="'gloo'; it must be one of auto, host, nccl"):
        make_factory("gloo", host="127.0.0.1", staging_bytes=1 << 20)
    with pytest.raises(ValueError, match="staging_bytes is 0"):
        make_factory("host", host="127.0.0.1", staging_bytes=0)


# What is left, and what returns.


@pytest.mark.parametrize("shared", [True, False])
def test_descriptors_and_mappings_return(shared: bool) -> None:
    links = HostLinks("127.0.0.1", WINDOW, shared)
    before = descriptors(), mapped()
    for round_ in range(12):
        pair = connect((links, links), WINDOW, ready=round_ % 3 > 0)
        if round_ % 3 == 2:
            pair.begin(100)
        pair.abort()
        del pair
        assert (descriptors(), mapped()) == before
    links.close()


def test_a_ready_shared_link_holds_one_descriptor_at_each_end(shm: HostLinks) -> None:
    before = descriptors()
    pair = connect((shm, shm), WINDOW)
    assert descriptors() == before + 2
    assert mapped() == 2
    del pair


def test_links_dropped_without_an_abort_are_collected() -> None:
    before = descriptors(), mapped()
    links = HostLinks("127.0.0.1", WINDOW, True)
    connect((links, links), WINDOW, ready=False).begin(10)
    gc.collect()
    assert mapped() == before[1]
    links.close()


def test_a_tensor_outlives_its_link(shm: HostLinks) -> None:
    pair = connect((shm, shm), WINDOW)
    receive, send = pair.begin(100)
    send.buffer.fill_(5)
    buffer = receive.buffer
    pair.abort()
    del receive, send, pair
    assert mapped() == 1
    assert int(buffer.sum()) == 500
    del buffer
    assert mapped() == 0


def test_idle_pages_return_to_the_system(shm: HostLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.links.room.IDLE_SECONDS", 0.05)
    before = set(os.listdir("/proc/self/fd"))
    window = 20 << 20
    pair = connect((shm, shm), window)
    arena = next(fd for fd in os.listdir("/proc/self/fd") if fd not in before)
    send_one(pair, window)
    assert os.stat(f"/proc/self/fd/{arena}").st_blocks * 512 >= window
    pair.until(lambda: os.stat(f"/proc/self/fd/{arena}").st_blocks * 512 < 1 << 20)
    send_one(pair, window)


def test_more_messages_than_entries(shm: HostLinks) -> None:
    pair = connect((shm, shm), WINDOW)
    receives = []
    while (receive := pair.inbound.post(1)) is not None:
        receives.append(receive)
    assert len(receives) == ENTRIES
    with pytest.raises(ValueError, match="never fit"):
        pair.inbound.post(WINDOW + 1)
    sends = [pair.outbound.reserve(1, receive.landing) for receive in receives]
    for _ in range(2 * ENTRIES):
        send, receive = sends.pop(0), receives.pop(0)
        send.buffer[0] = len(receives) % 256
        send.commit()
        assert receive.done() and int(receive.buffer) == len(receives) % 256
        receive.release()
        assert send.done()
        receives.append(pair.inbound.post(1))
        sends.append(pair.outbound.reserve(1, receives[-1].landing))


# Staging over TCP.


def test_staging_says_none_and_recovers_and_leaves_something_to_others(tcp: HostLinks) -> None:
    first, second = connect((tcp, tcp), WINDOW), connect((tcp, tcp), WINDOW)
    half = WINDOW // 2
    pending = [first.begin(half)]
    receive = first.inbound.post(half)
    assert first.outbound.reserve(half, receive.landing) is None, "a holder must leave as much to the others"
    other = second.begin(half)
    third = second.inbound.post(64)
    assert second.outbound.reserve(64, third.landing) is None, "the rank's staging is used up"
    for pair, (posted, send) in ((first, pending[0]), (second, other)):
        send.commit()
        pair.until(lambda posted=posted, send=send: posted.done() and send.done())
    assert first.outbound.reserve(half, receive.landing) is not None
    with pytest.raises(ValueError, match="never fit"):
        first.outbound.reserve(WINDOW + 1, 0)
    first.abort()
    assert second.outbound.reserve(WINDOW, third.landing) is not None, "an abort returns what a link held"


# The door and the wire.


def test_strangers_do_not_get_in(tcp: HostLinks) -> None:
    invitation, inbound, acceptance = accepted(tcp)
    here = (acceptance.host, acceptance.port)
    strangers = []
    for i in range(20):
        stranger = socket.create_connection(here)
        strangers.append(stranger)
        stranger.sendall((b"GET / HTTP/1.0\r\n\r\n", MAGIC + bytes(16), b"", b"\xff\x00" * 500)[i % 4])
        inbound.poll()
    assert not inbound.ready()
    pair = Pair(tcp.complete(invitation, blobs.encode(acceptance)), inbound)
    wait_until(lambda: pair.outbound.ready() & inbound.ready())
    send_one(pair)
    for stranger in strangers:
        stranger.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(here)


def hello(tcp: HostLinks) -> tuple[HostInbound, socket.socket]:
    """D's end, and a socket that has said a right hello, byte by byte."""
    _, inbound, acceptance = accepted(tcp)
    peer = socket.create_connection((acceptance.host, acceptance.port))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in MAGIC + acceptance.nonce:
        peer.sendall(bytes([byte]))
        inbound.poll()
    wait_until(inbound.ready)
    assert len(peer.recv(16)) == 16
    return inbound, peer


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (HEADER.pack(1, 100), "message 1 where 0 was next"),
        (HEADER.pack(0, 101), "101 bytes where 100"),
        (HEADER.pack(0, 1 << 63), "where 100"),
        (HEADER.pack(0, 100) + bytes(100) + HEADER.pack(1, 1), "no receive is posted"),
        (b"\xff" * 64, "was next"),
    ],
    ids=["wrong number", "wrong size", "huge size", "not posted", "garbage"],
)
def test_a_peer_that_breaks_the_rules_breaks_its_own_link_only(tcp: HostLinks, sent: bytes, why: str) -> None:
    good = connect((tcp, tcp), WINDOW)
    inbound, peer = hello(tcp)
    inbound.post(100)
    peer.sendall(sent)
    with pytest.raises(LinkError, match=why):
        wait_until(lambda: inbound.poll() or False)
    with pytest.raises(LinkError, match=why):
        inbound.post(1)
    inbound.abort()
    peer.close()
    send_one(good)


@pytest.mark.parametrize("answer", [bytes(16), None], ids=["wrong nonce", "too many taken"])
def test_a_d_that_answers_wrongly_breaks_the_link(tcp: HostLinks, answer: bytes | None) -> None:
    invitation, _, acceptance = accepted(tcp)
    with socket.create_server(("127.0.0.1", 0)) as server:
        fake = msgspec.structs.replace(acceptance, port=server.getsockname()[1])
        outbound = tcp.complete(invitation, blobs.encode(fake))
        peer, _ = server.accept()
        with peer:
            outbound.poll()
            assert peer.recv(100) == MAGIC + acceptance.nonce
            nonce = blobs.decode(invitation, Invitation).nonce
            peer.sendall(nonce + TAKEN.pack(1) if answer is None else answer)
            with pytest.raises(LinkError, match=r"does not know this link|took 1 messages of 0 sent"):
                wait_until(lambda: outbound.poll() or False)


def test_what_has_arrived_survives_the_end_of_the_connection(tcp: HostLinks) -> None:
    pair = connect((tcp, tcp), WINDOW)
    receive, send = pair.begin(1000)
    send.buffer.fill_(3)
    send.commit()
    pair.until(send.done)
    pair.outbound.abort()
    for _ in range(20):
        pair.inbound.poll()
    assert receive.done() and int(receive.buffer.sum()) == 3000
    receive.release()
    assert pair.inbound.used == 0
    with pytest.raises(LinkError, match="closed the connection"):
        wait_until(lambda: pair.inbound.post(10) is not None and pair.inbound.poll() is not None)


def test_nobody_there(tcp: HostLinks) -> None:
    invitation, inbound, acceptance = accepted(tcp)
    inbound.abort()
    outbound = tcp.complete(invitation, blobs.encode(acceptance))
    with pytest.raises(LinkError, match="refused"):
        wait_until(outbound.ready)
    outbound.abort()


def test_a_landing_outside_the_window_breaks_the_link(shm: HostLinks) -> None:
    pair = connect((shm, shm), WINDOW)
    for landing in (WINDOW << 20, -1):
        with pytest.raises(LinkError, match="landing"):
            pair.outbound.reserve(1, landing)
