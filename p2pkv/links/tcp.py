"""A host link over TCP: D's reader into the arena, P's end and its staging.

P sends its 24-byte hello (magic and D's nonce), D answers with P's nonce. Then P sends messages, each a
header (sequence number, size) and its bytes; D answers each with the count of messages taken. These are
plain sockets and not ZMQ: the kernel copies straight into the slot of the posted receive, and a stranger
costs no memory beyond a hello.
"""

import ipaddress
import mmap
import socket
import struct
from collections import deque
from collections.abc import Callable

import torch

from p2pkv.links.base import NONCE_BYTES, Guard, LinkError, Outbound
from p2pkv.links.shared_memory import from_remote_slot
from p2pkv.links.staging import MappedPool, StagingShare, aligned

MAGIC = b"p2pkv\x00L1"
HEADER = struct.Struct("<QQ")  # sequence number, bytes that follow
TAKEN = struct.Struct("<Q")  # messages taken so far
PIECE_BYTES = 1 << 20
BURST_BYTES = 8 << 20  # what one poll may move: a few milliseconds at most
_BACKLOG = 64  # connections between two polls; the kernel drops the rest, and they try again


def listen(host: str) -> socket.socket:
    """A listening socket, at any port. `host` is numeric. Raises LinkError if it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise LinkError(
            f"cannot listen on {host}: {error}; `host` must be an address of this machine"
        ) from error


class TcpReader:
    """Takes messages off P's connection, in order, into slots: slot_of(sequence, nbytes) -> memoryview
    [nbytes], or LinkError. landed(sequence) is called when all bytes are there."""

    def __init__(
        self,
        connection: socket.socket,
        answer: bytes,
        slot_of: Callable[[int, int], memoryview],
        landed: Callable[[int], None],
    ) -> None:
        self.taken = 0
        self.lost: str | None = None
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._slot_of = slot_of
        self._landed = landed
        self._header = memoryview(bytearray(HEADER.size))
        self._into: memoryview | None = None
        self._filled = 0
        self._answers = bytearray(answer)

    def poll(self) -> None:
        """Take what has arrived; `lost`: the connection has ended. LinkError for what P may not send."""
        if self.lost is None:
            try:
                self._take_all()
                self._answer()
            except OSError as error:
                self.lost = f"the connection broke: {error}"

    def close(self) -> None:
        """Close the connection; nothing is written into any slot after this. Idempotent."""
        self._socket.close()
        self._into = None

    def _take_all(self) -> None:
        budget = BURST_BYTES
        while budget > 0:
            into = self._header if self._into is None else self._into
            try:
                count = self._socket.recv_into(into[self._filled :])
            except BlockingIOError:
                return
            if count == 0:
                self.lost = "the peer closed the connection"
                return
            budget -= count
            self._filled += count
            if self._filled == len(into):
                self._advance()

    def _advance(self) -> None:
        self._filled = 0
        if self._into is None:
            sequence, nbytes = HEADER.unpack(self._header)
            if sequence != self.taken:
                raise LinkError(f"the peer sent message {sequence} where {self.taken} was next")
            self._into = self._slot_of(sequence, nbytes)
            return
        self._into = None
        self._landed(self.taken)
        self.taken += 1
        self._answers += TAKEN.pack(self.taken)

    def _answer(self) -> None:
        while self._answers:
            try:
                count = self._socket.send(self._answers)
            except BlockingIOError:
                return
            del self._answers[:count]


class TcpSend:
    """One send; its bytes are staged here until D has taken them."""

    def __init__(self, link: "TcpOutbound", sequence: int, offset: int, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.sequence = sequence
        self.offset = offset
        self.nbytes = buffer.numel()
        self.header = HEADER.pack(sequence, self.nbytes)
        self.committed = False
        self._link = link

    def commit(self) -> None:
        """Hand the buffer over; it leaves when the sends before it have left."""
        self._link.guard.check()
        self.committed = True
        self._link.poll()

    def done(self) -> bool:
        link = self._link
        link.guard.check()
        if self.sequence < link.taken:
            return True
        if link.lost is not None:
            raise LinkError(link.lost)
        return False


class TcpOutbound(Outbound):
    """P's end. Connects without blocking; `ready` once D has answered the hello."""

    def __init__(self, address: tuple[str, int], hello: bytes, answer: bytes, share: StagingShare) -> None:
        """`hello`: D's nonce, which P shows; `answer`: P's nonce, which D must show. Raises LinkError if the
        address is malformed or there is no socket."""
        self.guard = Guard(f"the link to {address[0]}:{address[1]}")
        self.taken = 0
        self.lost: str | None = None
        self.share = share
        self._expected = answer
        self._next = 0
        self._outgoing: deque[TcpSend] = deque()  # not yet all in the kernel's hands
        self._unfinished: deque[TcpSend] = deque()
        self._gone = 0  # bytes of the first outgoing send in the kernel's hands, its header included
        self._unsaid = bytearray(MAGIC + hello)
        self._received = bytearray()
        # A pool of its own, which an abort never hands to another link. Untouched pages cost nothing.
        limit = share.budget.limit
        size = -(-aligned(limit) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise LinkError(f"no memory for a link's staging of {limit} bytes: {error}") from error
        self._pool: MappedPool | None = MappedPool(memory, 0, limit, mmap.MADV_DONTNEED)
        self._socket = _connect(address)

    def reserve(self, nbytes: int, remote_slot: int) -> TcpSend | None:
        self.guard.check()
        if self.lost is not None:
            raise LinkError(self.lost)
        assert self._pool is not None
        self._pool.check(nbytes)
        from_remote_slot(remote_slot, self._next, self.guard)
        offset = self._pool.take(nbytes, self.share) if self.share.grants(nbytes) else None
        if offset is None:
            return None
        send = TcpSend(self, self._next, offset, self._pool.tensor(offset, nbytes))
        self._next += 1
        self._outgoing.append(send)
        self._unfinished.append(send)
        return send

    def poll(self) -> None:
        self.guard.check()
        if self.lost is None:
            try:
                self._read_hello()  # first: D's counts must be read even if a send fails
                self._speak()
            except OSError as error:
                self.lost = f"{self} broke: {error}"
        if self.lost is not None:
            raise LinkError(self.lost)
        assert self._pool is not None
        self._pool.tidy()

    def _free(self) -> None:
        self._socket.close()
        if self._pool is not None:
            self._pool.give_all()
            self._pool = None
        self._outgoing.clear()
        self._unfinished.clear()

    def __repr__(self) -> str:
        return f"TcpOutbound(taken {self.taken} of {self._next}, {self.used} bytes staged)"

    def _speak(self) -> None:
        if self._unsaid:
            del self._unsaid[: self._send([self._unsaid])]
        budget = BURST_BYTES
        while self.up and self._outgoing and self._outgoing[0].committed and budget > 0:
            send = self._outgoing[0]
            count = self._send(self._rest(send))
            if count == 0:
                return
            budget -= count
            self._gone += count
            if self._gone == HEADER.size + send.nbytes:
                self._outgoing.popleft()
                self._gone = 0

    def _rest(self, send: TcpSend) -> list[bytes | memoryview]:
        assert self._pool is not None
        start = max(0, self._gone - HEADER.size)
        piece = self._pool.view(send.offset + start, min(PIECE_BYTES, send.nbytes - start))
        return [piece] if self._gone >= HEADER.size else [send.header[self._gone :], piece]

    def _send(self, parts: list[bytes | memoryview] | list[bytearray]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0

    def _read_hello(self) -> None:
        try:
            part = self._socket.recv(4096)
        except BlockingIOError:
            return
        if not part:
            self.lost = f"{self}: the peer closed the connection"
            return
        self._received += part
        if not self.up and len(self._received) >= NONCE_BYTES:
            if self._received[:NONCE_BYTES] != self._expected:
                raise self.guard.fail("the process that answered there does not know this link")
            del self._received[:NONCE_BYTES]
            self.up = True
        while self.up and len(self._received) >= TAKEN.size:
            (count,) = TAKEN.unpack_from(self._received)
            del self._received[: TAKEN.size]
            self._finish(count)

    def _finish(self, count: int) -> None:
        sent = self._next - len(self._outgoing)
        if not self.taken < count <= sent:
            raise self.guard.fail(
                f"the peer reports that it took {count} messages of {sent} sent, {self.taken} before"
            )
        assert self._pool is not None
        for _ in range(count - self.taken):
            self._pool.give(self._unfinished.popleft().offset)
        self.taken = count


def _connect(address: tuple[str, int]) -> socket.socket:
    host, port = address
    connection = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        connection = socket.socket(found[0][0], socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A firewall between the hosts may forget an idle connection: in most clouds after minutes.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        connection.connect_ex(found[0][4])  # an error, if any, is met again at the first send
        return connection
    except OSError as error:
        if connection is not None:
            connection.close()
        raise LinkError(f"cannot connect to {host}:{port}: {error}") from error


def numeric(host: str) -> str:
    """The numeric address of `host`, which peers get. Raises ValueError if it is not one to dial."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"host {host!r} has no address ({error}); give an address of this machine") from None
    address = str(found[0][4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ValueError(
            f"host {host!r} is no address that a peer can dial; give one address of this machine"
        )
    return address


def is_loopback(address: str) -> bool:
    """Whether the numeric `address` is for its own host only. Raises LinkError if it is no address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        raise LinkError(f"the peer announced {address!r}, which is not a numeric address") from None
