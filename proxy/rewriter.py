"""Replaces a byte string in a stream, wherever the stream happens to be cut."""

from __future__ import annotations


class Rewriter:
    """Replaces every `old` by `new`, as `bytes.replace` would over the whole stream.

    What may turn out to be the start of `old` is held back until the next bytes decide it; nothing
    else waits. Raises ValueError if `old` is empty.
    """

    def __init__(self, old: bytes, new: bytes) -> None:
        if not old:
            raise ValueError("there is nothing to replace: `old` is empty")
        self._old = old
        self._new = new
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that are certain now that `chunk` has come; may be empty."""
        *whole, tail = (self._held + chunk).split(self._old)
        cut = self._undecided(tail)
        self._held = tail[cut:]
        return self._new.join([*whole, tail[:cut]])

    def flush(self) -> bytes:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _undecided(self, tail: bytes) -> int:
        """Where the longest suffix of `tail` that begins `old` starts; len(tail) if none does."""
        at = tail.find(self._old[:1], max(0, len(tail) - len(self._old) + 1))
        while at >= 0:
            if self._old.startswith(tail[at:]):
                return at
            at = tail.find(self._old[:1], at + 1)
        return len(tail)
