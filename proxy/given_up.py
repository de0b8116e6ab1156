"""Answers that an instance has given up, and passes off as complete.

A vLLM that is told to stop (SIGTERM) ends what it works on with status 200, the tokens that it has, and the
finish reason "abort". Nobody but the instance itself can be its cause here: a client that aborts has left.
"""

from __future__ import annotations

# As vLLM writes it. In a string of the same JSON, such as the model's text, the quotes are escaped.
GIVEN_UP = b'"finish_reason":"abort"'

STOPPED = "was stopped before its answer was complete"


class Watch:
    """Follows the bytes of one answer, however they are cut.

    Attributes:
        given_up: its instance has given it up.
    """

    def __init__(self) -> None:
        self.given_up = False
        self._tail = b""

    def sound(self, chunk: bytes) -> bytes:
        """The next bytes, without the event that gives up and what follows it."""
        text = self._tail + chunk
        self._tail = text[1 - len(GIVEN_UP) :]
        self.given_up = GIVEN_UP in text
        if not self.given_up:
            return chunk
        before, end, _ = chunk.partition(GIVEN_UP)[0].rpartition(b"\n\n")
        return before + end if GIVEN_UP in chunk else b""
