"""A host link's memory, and P's end where both ranks share it: P gathers straight into D's window.

The arena of a link is D's window and, before it, a header of flag words that both processes map. One entry
of the header serves one message at a time: message number `sequence` uses entry `sequence % ENTRIES`. Flags
are never cleared. They hold the message's number plus one, so an old value is never taken for a new one.
"""

import fcntl
import functools
import mmap
import os
import platform
import stat
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta, Struct

from p2pkv.links.base import NONCE_BYTES, Guard, LinkError, Outbound
from p2pkv.links.staging import ALIGNMENT, MappedPool, aligned

ENTRIES = 1024
_ENTRY_WORDS = 16  # P's words and D's words on cache lines of their own
_FIRST_WORD = 512  # the first page: nonce at byte 0, P's greeting in word 8
_GREETING = 8
HEADER_BYTES = (_FIRST_WORD + ENTRIES * _ENTRY_WORDS) * 8
COMMITTED, NBYTES, TAKEN = 0, 1, 8

_SEQUENCE_BITS = 24
_NAME = "p2pkv-arena"
_SEALS = sum(int(getattr(fcntl, f"F_SEAL_{what}", 0)) for what in ("SHRINK", "GROW", "SEAL"))

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=64)]


class PidNamespace(Struct, frozen=True, forbid_unknown_fields=True):
    """Processes that can open each other's memory: a pid namespace (its inode) of one boot of one host."""

    boot: Text
    pids: Number


class SharedArena(Struct, frozen=True, forbid_unknown_fields=True):
    """An arena that P may open as /proc/`pid`/fd/`fd`; `inode` distinguishes it from any other file."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    fd: Annotated[int, Meta(ge=0, lt=1 << 31)]
    inode: Number


@functools.cache
def this_namespace() -> PidNamespace | None:
    """This process's namespace, or None where the system has none (no Linux, no /proc)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return PidNamespace(boot=boot[:64], pids=os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return None


def can_share() -> bool:
    """Whether processes of this system can share arenas."""
    return hasattr(os, "memfd_create") and this_namespace() is not None


class Arena:
    """A mapped arena. `words`: the header, by 64 bits. P writes data, then a flag, D reads the flag, then
    data, with a `fence` between."""

    def __init__(self, memory: mmap.mmap, window: int, advice: int, fd: int | None = None) -> None:
        self.words: memoryview[int] = memoryview(memory)[:HEADER_BYTES].cast("B").cast("Q")
        self.pool = MappedPool(memory, HEADER_BYTES, window, advice)
        self._fd = fd
        self._close_fd = None if fd is None else weakref.finalize(self, os.close, fd)

    def greet(self, nonce: bytes) -> None:
        """Mark the arena as mapped by P, for D."""
        self.words[_GREETING] = _greeting(nonce)

    def greeted(self, nonce: bytes) -> bool:
        """Whether the P of invitation `nonce` has mapped the arena."""
        return self.words[_GREETING] == _greeting(nonce)

    def offer(self) -> SharedArena | None:
        """How another process finds this arena; None if it cannot be shared."""
        if self._fd is None:
            return None
        return SharedArena(pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino)

    def seal_off(self) -> None:
        """From now on no process may open this arena; a process that has mapped it keeps it. Idempotent."""
        if self._close_fd is not None:
            self._close_fd()
            self._fd = None


def create_arena(window: int, nonce: bytes, *, shared: bool) -> Arena:
    """D's new arena; if `shared` a memfd: no name to squat, gone with its last process. Raises LinkError."""
    size = arena_bytes(window)
    try:
        if shared:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            arena = _map_new(fd, size, window)
        else:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            arena = Arena(memory, window, mmap.MADV_DONTNEED)
    except OSError as error:
        raise LinkError(f"no memory for a link's window of {window} bytes: {error}") from error
    arena.words[0], arena.words[1] = _nonce_words(nonce)
    return arena


def _map_new(fd: int, size: int, window: int) -> Arena:
    try:
        os.ftruncate(fd, size)
        # Sealed, so that no end can make the other one's mapping fault by shrinking the file.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return Arena(memory, window, mmap.MADV_REMOVE, fd)


def open_arena(offer: SharedArena | None, namespace: PidNamespace | None, window: int, nonce: bytes) -> Arena:
    """P's mapping of D's arena. The arguments are those of HostAcceptance. Raises LinkError."""
    if offer is None or namespace is None or namespace != this_namespace():
        raise LinkError("D runs on another host or in another pid namespace")
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # opening any other file may have effects
            raise LinkError(f"{path} is not an arena of p2pkv")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise LinkError(f"cannot open the peer's memory: {error}") from error
    try:
        return _map_peer(fd, offer, window, nonce)
    finally:
        os.close(fd)  # the mapping has a descriptor of its own


def _map_peer(fd: int, offer: SharedArena, window: int, nonce: bytes) -> Arena:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_ino != offer.inode:
        raise LinkError("the peer's memory is not the file that it announced")
    if status.st_size != arena_bytes(window):
        raise LinkError(f"the peer's memory has {status.st_size} bytes, not {arena_bytes(window)}")
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise LinkError("the peer's memory is not sealed against being resized")
        arena = Arena(mmap.mmap(fd, status.st_size), window, mmap.MADV_REMOVE)
    except OSError as error:
        raise LinkError(f"cannot map the peer's memory: {error}") from error
    if (arena.words[0], arena.words[1]) != _nonce_words(nonce):
        raise LinkError("the peer's memory does not carry the nonce that it announced")
    return arena


def arena_bytes(window: int) -> int:
    """Size of an arena with room for `window` bytes: whole pages."""
    return HEADER_BYTES + -(-aligned(window) // mmap.PAGESIZE) * mmap.PAGESIZE


def entry(sequence: int) -> int:
    """Index of the first word of this message's entry."""
    return _FIRST_WORD + sequence % ENTRIES * _ENTRY_WORDS


def to_remote_slot(offset: int, sequence: int) -> int:
    """The remote slot of message number `sequence`, at `offset` (a multiple of 64) of the pool."""
    return offset // ALIGNMENT << _SEQUENCE_BITS | sequence & (1 << _SEQUENCE_BITS) - 1


def from_remote_slot(remote_slot: int, sequence: int, guard: Guard) -> int:
    """The offset in a remote slot. Breaks the link, and raises LinkError, if it is another message's."""
    mask = (1 << _SEQUENCE_BITS) - 1
    if remote_slot < 0 or remote_slot & mask != sequence & mask:
        raise guard.fail(
            f"remote slot {remote_slot} is not that of message {sequence}; grants must be used in order"
        )
    return (remote_slot >> _SEQUENCE_BITS) * ALIGNMENT


def _greeting(nonce: bytes) -> int:
    return int.from_bytes(nonce[:8], sys.byteorder) | 1  # never the 0 of fresh memory


def _nonce_words(nonce: bytes) -> tuple[int, int]:
    assert len(nonce) == NONCE_BYTES
    return int.from_bytes(nonce[:8], sys.byteorder), int.from_bytes(nonce[8:], sys.byteorder)


_lock = threading.Lock()


def _nothing() -> None:
    """x86 keeps stores in order and loads in order, which is all that is needed here."""


def _lock_twice() -> None:
    """A full barrier without a C extension: a release followed by an acquire, within acquire and release."""
    with _lock:
        pass
    with _lock:
        pass


fence: Callable[[], None] = _nothing if platform.machine() in ("x86_64", "AMD64", "i686") else _lock_twice


class SharedSend:
    """One send; its buffer is D's slot, so committing it is setting a flag."""

    def __init__(self, link: "SharedOutbound", arena: Arena, sequence: int, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.sequence = sequence
        self._link = link
        self._words = arena.words
        self._entry = entry(sequence)

    def commit(self) -> None:
        self._link.guard.check()
        self._words[self._entry + NBYTES] = self.buffer.numel()
        fence()
        self._words[self._entry + COMMITTED] = self.sequence + 1

    def done(self) -> bool:
        self._link.guard.check()
        return self.taken()

    def taken(self) -> bool:
        """`done` without the checks. A later number means that the entry has been used again since."""
        return self._words[self._entry + TAKEN] > self.sequence


class SharedOutbound(Outbound):
    """P's end. Nothing here makes a system call; a peer that dies is never noticed."""

    def __init__(self, arena: Arena, nonce: bytes) -> None:
        """`nonce`: P's own, by which D knows who has mapped the arena."""
        self.guard = Guard("the link to a peer on this host")
        self.up = True  # D made its end before P mapped it
        self._arena: Arena | None = arena
        self._next = 0
        self._unfinished: deque[SharedSend] = deque()
        arena.greet(nonce)

    def reserve(self, nbytes: int, remote_slot: int) -> SharedSend | None:
        """D's slot. Never None: D has granted it. Raises LinkError for a slot of another grant."""
        self.guard.check()
        assert self._arena is not None
        pool = self._arena.pool
        pool.check(nbytes)
        offset = from_remote_slot(remote_slot, self._next, self.guard)
        if offset + nbytes > pool.capacity:
            raise self.guard.fail(
                f"remote slot {remote_slot} lies outside the window of {pool.capacity} bytes"
            )
        send = SharedSend(self, self._arena, self._next, pool.tensor(offset, nbytes))
        self._unfinished.append(send)
        self._next += 1
        return send

    @property
    def used(self) -> int:
        return sum(send.buffer.numel() for send in tuple(self._unfinished) if not send.taken())

    def poll(self) -> None:
        """Let go of the sends that D has taken."""
        self.guard.check()
        while self._unfinished and self._unfinished[0].taken():
            self._unfinished.popleft()

    def _free(self) -> None:
        self._arena = None  # unmapped when no tensor of it is held any more
        self._unfinished.clear()

    def __repr__(self) -> str:
        return f"SharedOutbound({len(self._unfinished)} of {self._next} sends unfinished, {self.used} bytes)"
