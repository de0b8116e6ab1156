"""Stamps of single requests on their way through proxy, P and D, for `p2pkv waterfall`.

They are made only in processes that start with P2PKV_STAMPS, a name and a folder, such as P:/tmp/stamps. Some
functions, ours and vLLM's, are wrapped then, and else nothing is. Each process appends to a file of its own a
line for each stamp: seconds of this host's monotonic clock, the name, the station, and the 32 hex digits by
which all know the request.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
VARIABLE = "P2PKV_STAMPS"
FIELDS = 4
_UNIQUE = re.compile(r"(?<![0-9a-f])([0-9a-f]{32})(?![0-9a-f])")
_MAX_SEEN = 100_000

Keys = Callable[..., Iterable[str]]
"""Finds the ids, or keys, of a call's requests in its arguments."""


def unique_of(name: str) -> str:
    """The 32 hex digits in a request id or in a transfer's key; "" if there are none."""
    found = _UNIQUE.findall(name)
    return found[-1] if found else ""


class Stamps:
    """Writes the stamps of this process, which has a name of `who`: proxy, P, D or single."""

    def __init__(self, who: str, folder: str) -> None:
        self.who = who
        self._folder = Path(folder)
        self._file = -1
        self._pid = 0
        self._seen: set[tuple[str, str]] = set()

    def stamp(self, station: str, name: str, at: float | None = None, *, again: bool = False) -> None:
        """This request is at this station; `again`: a later time replaces the one before."""
        unique = unique_of(name)
        if not unique or ((station, unique) in self._seen and not again):
            return
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add((station, unique))
        line = f"{time.monotonic() if at is None else at:.6f}\t{self.who}\t{station}\t{unique}\n"
        with suppress(OSError):  # a full disk is no reason to end an engine
            if self._pid != os.getpid():  # vLLM forks its processes
                path = self._folder / f"{os.getpid()}.stamps"
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self._pid = os.getpid()
            os.write(self._file, line.encode())

    def wrap(
        self, owner: Any, method: str, station: str, keys: Keys, *, after: bool = False, again: bool = False
    ) -> None:
        """Stamp each call of a method, when it begins, or has returned: `keys` gets its arguments."""
        called = getattr(owner, method)

        @wraps(called)
        def stamped(*args: Any, **more: Any) -> Any:
            made = called(*args, **more) if after else None
            for each in keys(*args, **more):
                self.stamp(station, each, again=again)
            return made if after else called(*args, **more)

        self.put(owner, method, stamped)

    def put(self, owner: Any, method: str, instead: Callable[..., Any]) -> None:
        """In place of a method, one that makes stamps by itself."""
        setattr(owner, method, instead)


def wanted() -> Stamps | None:
    """None if this process shall make no stamps."""
    who, _, folder = os.environ.get(VARIABLE, "").partition(":")
    if not who:
        return None
    if not os.path.isdir(folder):
        logger.warning("no stamps: %s has %r, no folder; expected such as P:/tmp/stamps", VARIABLE, folder)
        return None
    return Stamps(who, folder)
