"""Host links over TCP: strangers kept out, bad peers survived."""

import socket

import msgspec
import pytest

from p2pkv.links.base import LinkError, decode_blob, encode_blob
from p2pkv.links.host import HostInbound, HostInvitation, HostLinks
from p2pkv.links.tcp import HEADER, MAGIC, TAKEN
from support.links.pairs import HOST_WINDOW as WINDOW
from support.links.pairs import Pair, accepted, connect
from support.waiting import wait_for


def test_strangers_do_not_get_in(tcp: HostLinks) -> None:
    invitation, inbound, acceptance = accepted(tcp, WINDOW)
    here = (acceptance.host, acceptance.port)
    strangers = []
    for i in range(20):
        stranger = socket.create_connection(here)
        strangers.append(stranger)
        stranger.sendall((b"GET / HTTP/1.0\r\n\r\n", MAGIC + bytes(16), b"", b"\xff\x00" * 500)[i % 4])
        inbound.poll()
    assert not inbound.ready()
    pair = Pair(tcp.complete(invitation, encode_blob(acceptance)), inbound)
    wait_for(lambda: pair.outbound.ready() & inbound.ready())
    pair.carry(1000)
    for stranger in strangers:
        stranger.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(here)


def hello(tcp: HostLinks) -> tuple[HostInbound, socket.socket]:
    """D's end, and a socket that has said a right hello, byte by byte."""
    _, inbound, acceptance = accepted(tcp, WINDOW)
    peer = socket.create_connection((acceptance.host, acceptance.port))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in MAGIC + acceptance.nonce:
        peer.sendall(bytes([byte]))
        inbound.poll()
    wait_for(inbound.ready)
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
        wait_for(lambda: inbound.poll() or False)
    with pytest.raises(LinkError, match=why):
        inbound.post(1)
    inbound.abort()
    peer.close()
    good.carry(1000)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (bytes(16), "does not know this link"),
        (None, "took 1 messages of 0 sent"),
        (b"", "closed the connection"),  # an idle one: else the next transfer would find that out
    ],
    ids=["wrong nonce", "too many taken", "nothing more"],
)
def test_a_d_that_answers_wrongly_breaks_the_link(tcp: HostLinks, answer: bytes | None, why: str) -> None:
    invitation, _, acceptance = accepted(tcp, WINDOW)
    with socket.create_server(("127.0.0.1", 0)) as server:
        fake = msgspec.structs.replace(acceptance, port=server.getsockname()[1])
        outbound = tcp.complete(invitation, encode_blob(fake))
        peer, _ = server.accept()
        with peer:
            outbound.poll()
            assert peer.recv(100) == MAGIC + acceptance.nonce
            nonce = decode_blob(invitation, HostInvitation).nonce
            peer.sendall(nonce + TAKEN.pack(1) if answer is None else answer or nonce)
            peer.shutdown(socket.SHUT_WR)
            with pytest.raises(LinkError, match=why):
                wait_for(lambda: outbound.poll() or False)


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
        wait_for(lambda: pair.inbound.post(10) is not None and pair.inbound.poll() is not None)


def test_nobody_there(tcp: HostLinks) -> None:
    invitation, inbound, acceptance = accepted(tcp, WINDOW)
    inbound.abort()
    outbound = tcp.complete(invitation, encode_blob(acceptance))
    with pytest.raises(LinkError, match="refused"):
        wait_for(outbound.ready)
    outbound.abort()
