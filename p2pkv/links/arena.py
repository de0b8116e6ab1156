"""The memory of one host link: D's window and, before it, the flag words that two processes share.

One entry of the header serves one message at a time, number `sequence` the entry `sequence % ENTRIES`.
Flags are never cleared: they hold the message's number plus one, so that an old value is no answer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import stat
import sys
import threading
import weakref
from collections.abc import Callable

from p2pkv.links.base import LinkError
from p2pkv.links.blobs import NONCE_BYTES, Acceptance, SharedArena, here
from p2pkv.links.room import Room
from p2pkv.links.slots import ALIGNMENT, aligned

ENTRIES = 1024
_ENTRY_WORDS = 16  # P's words and D's words on cache lines of their own
_FIRST_WORD = 512  # the first page: nonce at byte 0, P's greeting in word 8
_GREETING = 8
HEADER_BYTES = (_FIRST_WORD + ENTRIES * _ENTRY_WORDS) * 8
COMMITTED, NBYTES, TAKEN = 0, 1, 8

_SEQUENCE_BITS = 24
_NAME = "p2pkv-arena"
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class Arena:
    """A mapped arena. `words` are the header's 64-bit words.

    P and D order data and flags with `fence`: P writes data, fence, flag; D reads flag, fence, data.
    """

    def __init__(self, memory: mmap.mmap, window: int, advice: int, fd: int | None = None) -> None:
        self.words: memoryview[int] = memoryview(memory)[:HEADER_BYTES].cast("B").cast("Q")
        self.room = Room(memory, HEADER_BYTES, window, advice)
        self._fd = fd
        self._close_fd = None if fd is None else weakref.finalize(self, os.close, fd)

    def greet(self, nonce: bytes) -> None:
        """P's word that it has mapped the arena."""
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
        """Nobody else may open this arena from now on; who has mapped it keeps it. Idempotent."""
        if self._close_fd is not None:
            self._close_fd()
            self._fd = None


def create_arena(window: int, nonce: bytes, *, shared: bool) -> Arena:
    """D's new arena; a memfd if `shared`: it has no name to squat, and vanishes with its last process.

    Raises LinkError if the system has no memory or descriptor for it.
    """
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
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
        memory = mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return Arena(memory, window, mmap.MADV_REMOVE, fd)


def open_arena(accepted: Acceptance) -> Arena:
    """P's mapping of D's arena. Raises LinkError with the reason if it cannot be had."""
    offer, place = accepted.shared, here()
    if offer is None or place is None or accepted.place != place:
        raise LinkError("the peer runs on another host or in another pid namespace")
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # opening any other file may have effects
            raise LinkError(f"{path} is not an arena of p2pkv")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise LinkError(f"cannot open the peer's memory: {error}") from error
    try:
        return _map_peer(fd, offer, accepted.window, accepted.nonce)
    finally:
        os.close(fd)  # the mapping has a descriptor of its own


def _map_peer(fd: int, offer: SharedArena, window: int, nonce: bytes) -> Arena:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_ino != offer.inode:
        raise LinkError("the peer's memory is not the file that it announced")
    if status.st_size != arena_bytes(window):
        raise LinkError(f"the peer's memory has {status.st_size} bytes, not {arena_bytes(window)}")
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise LinkError("the peer's memory is not sealed against being resized")
        arena = Arena(mmap.mmap(fd, status.st_size), window, mmap.MADV_REMOVE)
    except OSError as error:
        raise LinkError(f"cannot map the peer's memory: {error}") from error
    if (arena.words[0], arena.words[1]) != _nonce_words(nonce):
        raise LinkError("the peer's memory does not carry the nonce that it announced")
    return arena


def can_share() -> bool:
    """Whether this system can share arenas between processes."""
    return hasattr(os, "memfd_create") and here() is not None


def arena_bytes(window: int) -> int:
    """Size of an arena with room for `window` bytes: whole pages."""
    return HEADER_BYTES + -(-aligned(window) // mmap.PAGESIZE) * mmap.PAGESIZE


def entry(sequence: int) -> int:
    """Index of the first word of this message's entry."""
    return _FIRST_WORD + sequence % ENTRIES * _ENTRY_WORDS


def to_landing(offset: int, sequence: int) -> int:
    """The landing of message number `sequence` at `offset` (a multiple of 64) of the room."""
    return offset // ALIGNMENT << _SEQUENCE_BITS | sequence & (1 << _SEQUENCE_BITS) - 1


def from_landing(landing: int, sequence: int) -> int:
    """The offset in `landing`. Raises LinkError if it is not that of message number `sequence`."""
    mask = (1 << _SEQUENCE_BITS) - 1
    if landing < 0 or landing & mask != sequence & mask:
        raise LinkError(f"landing {landing} is not that of message {sequence}; grants must be used in order")
    return (landing >> _SEQUENCE_BITS) * ALIGNMENT


def _greeting(nonce: bytes) -> int:
    return int.from_bytes(nonce[:8], sys.byteorder) | 1  # never the 0 of fresh memory


def _nonce_words(nonce: bytes) -> tuple[int, int]:
    assert len(nonce) == NONCE_BYTES
    return int.from_bytes(nonce[:8], sys.byteorder), int.from_bytes(nonce[8:], sys.byteorder)


def _seals() -> int:
    return sum(int(getattr(fcntl, name)) for name in _SEALS)


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
