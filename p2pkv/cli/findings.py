"""What `p2pkv doctor` reports, line by line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, in a word or two; what was found and, if it is not ok (a
    server with p2pkv cannot run because of it), what to do."""

    about: str
    sentence: str
    ok: bool = True


class CheckFailed(Exception):
    """The check of a pair cannot go on: a sentence."""
