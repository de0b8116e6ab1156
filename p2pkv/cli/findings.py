"""What `p2pkv doctor` reports, line by line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    about: str
    """What was looked at, in a word or two."""
    sentence: str
    """What was found and, if it is not ok, what to do."""
    ok: bool = True
    """False if a server with p2pkv cannot run because of this."""


class CheckFailed(Exception):
    """The check of a pair cannot go on: a sentence."""
