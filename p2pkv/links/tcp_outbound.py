"""P's end of a host link over TCP: staging, the connection, and the pump between them."""

from __future__ import annotations

import mmap
import socket
from collections import deque

import torch

from p2pkv.links.arena import from_landing
from p2pkv.links.base import LinkError, Outbound
from p2pkv.links.blobs import NONCE_BYTES
from p2pkv.links.guard import Guard
from p2pkv.links.room import Room
from p2pkv.links.slots import aligned
from p2pkv.links.tcp import BURST_BYTES, HEADER, MAGIC, PIECE_BYTES, TAKEN


class Budget:
    """Bytes of staging that all TCP links of one rank share."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"staging_bytes is {limit}; it must be positive")
        self.limit = limit
        self.used = 0

    def grants(self, held: int, nbytes: int) -> bool:
        """Whether a link that holds `held` may have `nbytes` more.

        Who holds something must leave as much to the others, so a silent peer never takes everything.
        """
        left = self.limit - self.used - nbytes
        return left >= 0 and (held == 0 or held + nbytes <= left)


class TcpSend:
    """One send; its bytes are staged here until D has taken them."""

    __slots__ = ("_link", "buffer", "committed", "header", "nbytes", "offset", "sequence")

    def __init__(self, link: TcpOutbound, sequence: int, offset: int, buffer: torch.Tensor) -> None:
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

    def done(self) -> bool:
        """Whether D has taken all bytes. Raises LinkError if it never will."""
        link = self._link
        link.guard.check()
        if self.sequence < link.taken:
            return True
        if link.lost is not None:
            raise LinkError(link.lost)
        return False


class TcpOutbound(Outbound):
    """P's end. Connects without blocking; `ready` once D has answered the hello."""

    def __init__(self, address: tuple[str, int], hello: bytes, answer: bytes, budget: Budget) -> None:
        """`hello`: D's nonce, which P shows; `answer`: P's nonce, which D must show.

        Raises LinkError if the address is malformed or there is no socket.
        """
        self.guard = Guard(f"the link to {address[0]}:{address[1]}")
        self.taken = 0
        self.lost: str | None = None
        self._budget = budget
        self._expected = answer
        self._greeted = False
        self._next = 0
        self._outgoing: deque[TcpSend] = deque()  # not yet all in the kernel's hands
        self._unfinished: deque[TcpSend] = deque()
        self._gone = 0  # bytes of the first outgoing send, its header included, that are
        self._unsaid = bytearray(MAGIC + hello)
        self._heard = bytearray()
        self._room: Room | None = _staging(budget.limit)
        self._socket = _connect(address)

    def ready(self) -> bool:
        """Whether D has answered. Raises LinkError if the connection has ended."""
        if not self._greeted:
            self.poll()
        self.guard.check()
        return self._greeted

    def reserve(self, nbytes: int, landing: int) -> TcpSend | None:
        """A staging buffer, or None while the rank's staging has no room. ValueError if it never has."""
        self.guard.check()
        if self.lost is not None:
            raise LinkError(self.lost)
        assert self._room is not None
        self._room.check(nbytes)
        try:
            from_landing(landing, self._next)
        except LinkError as error:
            raise self.guard.fail(str(error)) from None
        if not self._budget.grants(self._room.used, aligned(nbytes)):
            return None
        offset = self._room.take(nbytes)
        if offset is None:
            return None
        self._budget.used += aligned(nbytes)
        send = TcpSend(self, self._next, offset, self._room.tensor(offset, nbytes))
        self._next += 1
        self._outgoing.append(send)
        self._unfinished.append(send)
        return send

    @property
    def used(self) -> int:
        """Bytes of staging that D has not taken yet."""
        return 0 if self._room is None else self._room.used

    def poll(self) -> None:
        """Send and hear what can be now. Raises LinkError if a send of ours can never end."""
        self.guard.check()
        if self.lost is None:
            try:
                self._hear()  # first: a failing send must not hide what D has taken
                self._speak()
            except OSError as error:
                self.lost = f"{self} broke: {error}"
        if self.lost is not None and (self._unfinished or not self._greeted):
            raise LinkError(self.lost)
        assert self._room is not None
        self._room.tidy()

    def abort(self) -> None:
        """Close the connection and free the staging. Idempotent."""
        self.guard.owned()
        self.close("aborted on this side")

    def close(self, reason: str) -> None:
        """`abort` for the factory, whose thread may be another one."""
        self.guard.fail(reason)
        self._socket.close()
        if self._room is not None:
            self._budget.used -= self._room.used
            self._room = None
        self._outgoing.clear()
        self._unfinished.clear()

    def __repr__(self) -> str:
        return f"TcpOutbound(taken {self.taken} of {self._next}, {self.used} bytes staged)"

    def _speak(self) -> None:
        if self._unsaid:
            del self._unsaid[: self._send([self._unsaid])]
        budget = BURST_BYTES
        while self._greeted and self._outgoing and self._outgoing[0].committed and budget > 0:
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
        assert self._room is not None
        start = max(0, self._gone - HEADER.size)
        piece = self._room.view(send.offset + start, min(PIECE_BYTES, send.nbytes - start))
        return [piece] if self._gone >= HEADER.size else [send.header[self._gone :], piece]

    def _send(self, parts: list[bytes | memoryview] | list[bytearray]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0

    def _hear(self) -> None:
        try:
            part = self._socket.recv(4096)
        except BlockingIOError:
            return
        if not part:
            self.lost = f"{self}: the peer closed the connection"
            return
        self._heard += part
        if not self._greeted:
            self._greet()
        while self._greeted and len(self._heard) >= TAKEN.size:
            (count,) = TAKEN.unpack_from(self._heard)
            del self._heard[: TAKEN.size]
            self._finish(count)

    def _greet(self) -> None:
        if len(self._heard) >= NONCE_BYTES:
            if self._heard[:NONCE_BYTES] != self._expected:
                raise self.guard.fail("who answered there does not know this link")
            del self._heard[:NONCE_BYTES]
            self._greeted = True

    def _finish(self, count: int) -> None:
        sent = self._next - len(self._outgoing)
        if not self.taken < count <= sent:
            raise self.guard.fail(
                f"the peer says it took {count} messages of {sent} sent, {self.taken} before"
            )
        assert self._room is not None
        for _ in range(count - self.taken):
            send = self._unfinished.popleft()
            self._budget.used -= aligned(send.nbytes)
            self._room.give(send.offset)
        self.taken = count


def _staging(nbytes: int) -> Room:
    """Room of a link's own, so that an abort never hands it to another link; untouched pages cost nothing."""
    size = -(-aligned(nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise LinkError(f"no memory for a link's staging of {nbytes} bytes: {error}") from error
    return Room(memory, 0, nbytes, mmap.MADV_DONTNEED)


def _connect(address: tuple[str, int]) -> socket.socket:
    host, port = address
    connection = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        connection = socket.socket(found[0][0], socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect_ex(found[0][4])  # an error, if any, is met again at the first send
        return connection
    except OSError as error:
        if connection is not None:
            connection.close()
        raise LinkError(f"cannot connect to {host}:{port}: {error}") from error
