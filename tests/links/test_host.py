"""Host links: which way they take, who is not dialed, strangers kept out and bad peers survived."""

import fcntl
import os
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from p2pkv.links import make_factory
from p2pkv.links.base import LinkError, decode_blob, encode_blob
from p2pkv.links.host import HostAcceptance, HostInbound, HostInvitation, HostLinks
from p2pkv.links.shared_memory import SharedArena, SharedOutbound, arena_bytes
from p2pkv.links.tcp import HEADER, MAGIC, TAKEN, TcpOutbound
from p2pkv.trust import Networks
from support import commands
from support.links.pairs import HOST_WINDOW as WINDOW
from support.links.pairs import Pair, accepted, connect
from support.waiting import wait_for


def test_each_way_is_taken(shm: HostLinks, tcp: HostLinks) -> None:
    assert isinstance(connect((shm, shm), WINDOW).outbound, SharedOutbound)
    for p, d in ((tcp, tcp), (shm, tcp), (tcp, shm)):
        pair = connect((p, d), WINDOW)
        assert isinstance(pair.outbound, TcpOutbound)
        assert pair.outbound._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        pair.carry(1000)


def test_over_tcp_a_message_leaves_as_soon_as_it_is_filled(tcp: HostLinks) -> None:
    """P gathers the next one meanwhile, and polls its links only then."""
    pair = connect((tcp, tcp), WINDOW)
    receive, send = pair.begin(1000)
    send.commit()

    def arrived() -> bool:
        pair.inbound.poll()
        return receive.done()

    wait_for(arrived)


FIRST_BLOBS = """
import threading

from p2pkv.links.base import SetupBlob, decode_blob, encode_blob
from msgspec import Struct

first_looks, second_decodes = threading.Event(), threading.Event()


def slow():
    first_looks.set()
    second_decodes.wait(1.0)  # a thread that has to wait for this one cannot say so
    return int


class Inner(Struct, frozen=True):
    number: slow()


class Blob(SetupBlob, frozen=True, tag="blob"):
    inner: Inner
    name_of_it: str


def decode():
    assert decode_blob(blob, Blob).inner.number == 5


blob = encode_blob(Blob(1, Inner(5), "x"))
threads = [threading.Thread(target=decode) for _ in range(2)]
threads[0].start()
assert first_looks.wait(10.0)
threads[1].start()
for thread in threads:
    thread.join(10.0)
print("both decoded")
"""


def test_two_ranks_of_one_process_may_decode_their_first_blobs_at_once() -> None:
    """In a process of its own, which msgspec crashed: the second thread found the type half looked at."""
    done = commands.run(sys.executable, "-c", FIRST_BLOBS)
    assert (done.returncode, done.stdout) == (0, "both decoded\n"), done.stderr


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
    invitation, inbound, acceptance = accepted(shm, WINDOW)
    bad = spoil(acceptance.shared)
    outbound = shm.complete(invitation, encode_blob(msgspec.structs.replace(acceptance, shared=bad)))
    if bad.fd not in (0, 1 << 20, acceptance.shared.fd):
        os.close(bad.fd)
    assert isinstance(outbound, TcpOutbound) and why in caplog.text
    Pair(outbound, inbound).carry(1000)


def test_an_invitation_from_elsewhere_is_answered_with_tcp_only(shm: HostLinks) -> None:
    invited = decode_blob(shm.invite(), HostInvitation)
    elsewhere = msgspec.structs.replace(invited.namespace, boot="another")
    _, answer = shm.accept(encode_blob(msgspec.structs.replace(invited, namespace=elsewhere)), WINDOW)
    assert decode_blob(answer, HostAcceptance).shared is None


def test_a_loopback_address_of_another_host_is_refused_with_a_sentence(tcp: HostLinks) -> None:
    invitation, _, acceptance = accepted(tcp, WINDOW)
    far = msgspec.structs.replace(
        acceptance, namespace=msgspec.structs.replace(acceptance.namespace, boot="another")
    )
    with pytest.raises(
        LinkError, match=r"127\.0\.0\.1, which only its own machine can reach; set its `host`"
    ):
        tcp.complete(invitation, encode_blob(far))


def test_an_address_outside_of_the_allowed_networks_is_not_dialed() -> None:
    """D names it, and P would connect to it: to any service, if D is no friend."""
    links = HostLinks("127.0.0.1", WINDOW, False, Networks.parse(["10.0.0.0/8", "127.0.0.1/32"]))
    invitation, _, acceptance = accepted(links, WINDOW)
    links.complete(invitation, encode_blob(acceptance))
    with socket.create_server(("127.0.0.2", 0)) as service:
        far = msgspec.structs.replace(acceptance, host="127.0.0.2", port=service.getsockname()[1])
        with pytest.raises(LinkError, match=r"127\.0\.0\.2 is not dialed: allowed_peers are 10\.0\.0\.0/8"):
            links.complete(invitation, encode_blob(far))
        service.settimeout(0.2)
        with pytest.raises(TimeoutError):
            service.accept()
    links.close()


@pytest.mark.parametrize("host", ["localhost.invalid", "/tmp/socket", "a b"])
def test_an_announced_name_is_no_address(tcp: HostLinks, host: str) -> None:
    invitation, _, acceptance = accepted(tcp, WINDOW)
    with pytest.raises(LinkError, match="not a numeric address"):
        tcp.complete(invitation, encode_blob(msgspec.structs.replace(acceptance, host=host)))


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
    connect((links, links), WINDOW).carry(1000)
    links.close()


def test_make_factory() -> None:
    factory = make_factory("auto", host="127.0.0.1", staging_bytes=1 << 20)
    assert factory.kind == "host"
    factory.close()
    for kind in ("nccl", "ipc"):
        with pytest.raises(ValueError, match=f"'{kind}', which needs a CUDA device, and there is none; use"):
            make_factory(kind, host="127.0.0.1", staging_bytes=1 << 20)
    with pytest.raises(ValueError, match="'gloo'; it must be one of auto, host"):
        make_factory("gloo", host="127.0.0.1", staging_bytes=1 << 20)
    with pytest.raises(ValueError, match="staging_bytes is 0"):
        make_factory("host", host="127.0.0.1", staging_bytes=0)


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
