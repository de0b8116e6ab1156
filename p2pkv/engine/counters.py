"""What a rank counts. Counters only grow; gauges return to 0 when nothing is under way."""

from __future__ import annotations

from collections.abc import Callable


class Counters:
    """Named numbers of one rank; written by the engine thread, read by anybody.

    A gauge that counts in a dict of the engine's takes a copy of its values: the dict may grow meanwhile.
    """

    NAMES = (
        "bytes_sent",  # KV bytes gathered and handed to a link
        "bytes_early",  # of those, taken by D before P had computed the whole prompt
        "bytes_ahead",  # KV bytes that came to D before the request did
        "bytes_scattered",  # KV bytes received and written to pages
        "chunks_sent",
        "chunks_void",  # granted, but sent as filler
        "chunks_scattered",
        "chunks_dropped",  # received for a transfer that had ended
        "chunks_corrupt",  # received with another checksum than P had sent
        "chunks_waited",  # on D announced, on P granted, and no room in the staging at first
        "transfers_sent",
        "transfers_loaded",
        "transfers_failed",
        "messages_bad",  # not messages of this protocol
        "messages_refused",  # messages that the protocol does not allow
        "handshakes_failed",  # connections that did not come about: strangers here, no members there
        "links_aborted",
    )

    def __init__(self) -> None:
        self.values = dict.fromkeys(self.NAMES, 0)
        self.gauges: dict[str, Callable[[], int]] = {}

    def add(self, name: str, value: int = 1) -> None:
        self.values[name] += value

    def snapshot(self) -> dict[str, int]:
        """All counters and gauges now."""
        return self.values | {name: read() for name, read in self.gauges.items()}
