"""What the two processes of `p2pkv bench` share: how they talk, and how each makes its ranks."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

from p2pkv.cli.bench_pages import Layout, Memory, described
from p2pkv.config import Options
from p2pkv.engine.commands import Event, LoadFailed
from p2pkv.engine.rank import Rank
from p2pkv.links import make_factory
from p2pkv.links.base import LinkFactory, Outbound
from p2pkv.pairing import Address
from p2pkv.protocol.messages import PROTOCOL_VERSION, Hello

HOST = "127.0.0.1"
STAGING_BYTES = 64 << 20
"""The default on a CPU; the other end's window is half of it."""

WINDOW_BYTES = STAGING_BYTES // 2
DEADLINE_SECONDS = 60.0
"""How long anything in the benchmark may take before it gives up."""

POLL_SECONDS = 200e-6

Decoder = subprocess.Popen[bytes]


# Prompts that are given up on purpose, and links that end with their processes, are no news here.
logging.getLogger("p2pkv").setLevel(logging.ERROR)


class BenchError(Exception):
    """The benchmark cannot go on: a sentence."""


class Wire:
    """Messages between the two processes, a line of JSON each, over a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(DEADLINE_SECONDS)
        self._lines = end.makefile("rb")

    def say(self, **message: Any) -> None:
        """Send one message."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The next message; None when the other process has gone. TimeoutError after the deadline."""
        line = self._lines.readline()
        if not line:
            return None
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def expect(self, word: str) -> dict[str, Any]:
        """The next message, which holds `word`. Raises BenchError for the other's error, or its end."""
        try:
            message = self.hear()
        except TimeoutError:
            raise BenchError(f"the other process did not say {word!r} in {DEADLINE_SECONDS:g} s") from None
        if message is None:
            raise BenchError(f"the other process ended before it said {word!r}; its last words are above")
        if "error" in message:
            raise BenchError(str(message["error"]))
        assert word in message, f"{message} where {word!r} was due"
        return message

    def patient(self) -> None:
        """From now on wait for the other process as long as it lives."""
        self._socket.settimeout(None)

    def close(self) -> None:
        """The other process hears that this one has gone."""
        self._lines.close()
        self._socket.close()


def start_decode(settings: dict[str, Any], env: dict[str, str] | None = None) -> tuple[Decoder, Wire]:
    """D's process (see bench_decode), and the wire to it. Close the wire, then end the process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "p2pkv.cli.bench_decode", str(theirs.fileno()), json.dumps(settings)]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env)
    return process, Wire(ours)


def end_decode(process: Decoder) -> None:
    """Wait until it ends, as it does when its wire is closed; by force after a while."""
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10.0)


def make_rank(
    role: Literal["P", "D"],
    layout: Layout,
    memory: Memory,
    port: int,
    *,
    link: str,
    staging_bytes: int = STAGING_BYTES,
    rank: int = 0,
    tp: int = 1,
    **options: Any,
) -> tuple[Address, Rank]:
    """A running rank of `tp` over this memory, and where its engine's rank 0 listens: on `port`."""
    cache = memory.cache(layout)
    settings = Options(role=role, host=HOST, kv_port=port, staging_bytes=staging_bytes, **options)
    links = make_factory(link, host=HOST, staging_bytes=staging_bytes)
    hello = Hello(
        version=PROTOCOL_VERSION,
        incarnation=uuid.uuid4().hex,
        role=role,
        rank=rank,
        to="none",
        address=str(settings.address.shifted(rank)),
        addresses=tuple(str(settings.address.shifted(each)) for each in range(tp)),
        model="bench",
        weights="none",
        cache=described(layout, cache, tp),
        link=links.kind,
        digest=cache.digest_name,
        verify=settings.verify,
    )
    return settings.address, Rank(hello, settings, cache, links)


def poll_until(poll: Callable[[], None], done: Callable[[], bool], what: str) -> None:
    """Poll a link until this is done. Raises BenchError after the deadline, LinkError as they do."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    poll()
    while not done():
        if time.monotonic() > deadline:
            raise BenchError(f"{what} did not end in {DEADLINE_SECONDS:g} s")
        poll()


def bare_link(links: LinkFactory, wire: Wire, window: int) -> Outbound:
    """P's end of a link to the process at the other end of `wire`, when it is up."""
    invitation = links.invite()
    wire.say(order="link", invitation=invitation.hex(), window=window)
    acceptance = bytes.fromhex(wire.expect("acceptance")["acceptance"])
    outbound = links.complete(invitation, acceptance)
    poll_until(outbound.poll, outbound.ready, "building the bare link")
    return outbound


def wait_for(rank: Rank, event: Event) -> float:
    """When this event was heard, on the monotonic clock. Raises BenchError if it fails or is late."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        heard = rank.events()
        now = time.monotonic()
        if event in heard:
            return now
        for other in heard:
            if isinstance(other, LoadFailed):
                raise BenchError(f"a push failed: {other.reason}")
        if now > deadline:
            counters = rank.counters.snapshot()
            raise BenchError(f"{event} did not come in {DEADLINE_SECONDS:g} s; counters: {counters}")
        time.sleep(POLL_SECONDS)
