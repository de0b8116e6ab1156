"""Who may call a link, and whether it still works."""

from __future__ import annotations

import threading
from threading import get_ident

from p2pkv.links.base import LinkError


class Guard:
    """The checks that every call to one end of a link makes first.

    The first caller's thread becomes the owner; the factory, which may run elsewhere, does not count.
    """

    __slots__ = ("_ident", "_name", "_what", "reason")

    def __init__(self, what: str) -> None:
        self._what = what
        self._ident = 0
        self._name = ""
        self.reason: str | None = None

    def owned(self) -> None:
        """Raises RuntimeError if a second thread calls."""
        if get_ident() != self._ident:
            self._meet()

    def check(self) -> None:
        """Raises RuntimeError if a second thread calls, LinkError if this end no longer works."""
        if get_ident() != self._ident:
            self._meet()
        if self.reason is not None:
            raise LinkError(self.reason)

    def fail(self, reason: str) -> LinkError:
        """Break this end for good; the first reason stays. Returns the error to be raised."""
        if self.reason is None:
            self.reason = f"{self._what}: {reason}"
        return LinkError(self.reason)

    def _meet(self) -> None:
        thread = threading.current_thread()
        if self._ident == 0:
            self._ident, self._name = get_ident(), thread.name
            return
        raise RuntimeError(
            f"{self._what} belongs to thread {self._name!r} ({self._ident}) but was called by thread "
            f"{thread.name!r} ({get_ident()}); all calls to one link must come from one thread"
        )
