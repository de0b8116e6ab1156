"""The D of `p2pkv bench`, a process of its own: loads what P's process orders, and reports when it has loaded
it.

`harness.decode_process` starts it with the number of a socket; it ends when that socket does.
"""

import contextlib
import sys
import time
from collections import deque
from typing import Any

import torch

from p2pkv.bench.harness import (
    FORMS,
    HOST,
    STAGING_BYTES,
    BenchError,
    Pipe,
    RawNccl,
    begin_decode,
    make_rank,
    poll_until,
    wait_for,
)
from p2pkv.bench.memory import Memory
from p2pkv.device import make_recorder
from p2pkv.engine import commands as do
from p2pkv.engine.thread import Rank
from p2pkv.links import make_factory
from p2pkv.links.base import Inbound, LinkError, Receive
from p2pkv.pairing import Address

AHEAD = 64
"""Receives posted at once: many more would fill the socket in both directions with messages about them."""


class DecodeSide:
    """One rank of D for each layout, and its ends of bare links."""

    def __init__(self, pipe: Pipe, settings: dict[str, Any]) -> None:
        self._pipe = pipe
        share = {"rank": settings.get("rank", 0), "tp": settings.get("tp", 1)}
        self._memory = Memory(settings["capacity"], "D", settings.get("device", "cpu"), **share)
        self._record = make_recorder(self._memory.flat.device)
        staging = settings.get("staging_bytes", STAGING_BYTES)
        options = {
            "lease_seconds": settings.get("lease_seconds", 30.0),
            "staging_bytes": staging,
            **settings.get("nccl", {}),
        }
        self._raw: RawNccl | None = None
        self._ranks: dict[str, Rank] = {}
        self._links = make_factory(settings["link"], host=HOST, staging_bytes=staging)
        self._inbounds: list[Inbound] = []
        addresses = {}
        for name, port in settings["ports"].items():
            address, self._ranks[name] = make_rank(
                "D", FORMS[name], self._memory, port, link=settings["link"], **share, **options
            )
            addresses[name] = str(address)
        pipe.send(addresses=addresses)

    def obey(self, order: dict[str, Any]) -> None:
        """Carry out one order of P's process."""
        match order.pop("order"):
            case "load":
                self._load(**order)
            case "link":
                self._link(**order)
            case "receive":
                self._receive(order["sizes"])
            case "raw":
                self._receive_raw(**order)
            case other:
                raise AssertionError(f"order {other!r}")

    def _load(self, layout: str, key: str, prefill: str, tokens: int, together: bool = False) -> None:
        """Load one prompt as D's scheduler would, and check samples of what came.

        At once, or with `together` when P lets all ranks go.
        """
        rank, form = self._ranks[layout], FORMS[layout]
        form.clear(self._memory, tokens)
        cleared = self._record()
        tables = form.tables(tokens, self._memory.capacity, "D")
        before = rank.counters.values["bytes_scattered"]
        expected = time.monotonic()
        rank.do(do.Expect(key, Address.parse(prefill), tokens, b"bench"))
        self._pipe.send(expecting=True)
        begun = wait_for(rank, do.Begun(key))
        if together:
            self._pipe.send(begun=begun)
            self._pipe.expect("go")
        asked = time.monotonic()
        rank.do(do.Load(key, 0, tokens - 1, tables, cleared))
        loaded = wait_for(rank, do.Loaded(key))
        rank.do(do.Forget(key))
        scattered = rank.counters.values["bytes_scattered"] - before
        if wrong := form.wrong(self._memory, tokens):
            raise BenchError(f"{layout}, {tokens} tokens: D does not hold P's KV at {wrong}")
        self._pipe.send(expected=expected, begun=begun, asked=asked, loaded=loaded, scattered=scattered)

    def _link(self, invitation: str, window: int) -> None:
        inbound, acceptance = self._links.accept(bytes.fromhex(invitation), window)
        self._inbounds.append(inbound)
        self._pipe.send(acceptance=acceptance.hex())
        poll_until(inbound.poll, inbound.ready, "building the bare link")

    def _receive(self, sizes: list[int]) -> None:
        """Receive these messages over the latest bare link, with at most AHEAD posted."""
        inbound = self._inbounds[-1]
        waiting, posted = deque(sizes), deque[Receive]()
        while waiting or posted:
            while waiting and len(posted) < AHEAD and (receive := inbound.post(waiting[0])) is not None:
                waiting.popleft()
                posted.append(receive)
                self._pipe.send(remote_slot=receive.remote_slot)
            self._pipe.expect("sent")
            receive = posted.popleft()
            poll_until(inbound.poll, receive.done, "a receive of the bare link")
            receive.release()
        inbound.poll()
        self._pipe.send(received=time.monotonic())

    def _receive_raw(self, name: str, sizes: list[int]) -> None:
        """Receive these messages by NCCL's own calls; the first time, join the communicator `name`."""
        if self._raw is None:
            self._raw = RawNccl(bytes.fromhex(name), rank=1)
        self._pipe.send(ready=True)
        self._raw.receive(self._memory.flat, sizes)
        self._pipe.send(received=time.monotonic())

    def stop(self) -> None:
        """End the ranks and links."""
        for rank in self._ranks.values():
            rank.stop()
        if self._raw is not None:
            self._raw.close()
        self._links.close()


def main(argv: list[str]) -> int:
    """`argv`: the socket's file descriptor and the settings as JSON."""
    pipe, settings = begin_decode(argv)
    if settings.get("device", "cpu") != "cpu":
        torch.cuda.set_device(settings["device"])
    decode = DecodeSide(pipe, settings)
    try:
        while (order := pipe.receive()) is not None:
            decode.obey(order)
        return 0
    except (BenchError, LinkError, ValueError) as error:
        with contextlib.suppress(OSError):  # P may have gone
            pipe.send(error=str(error))
        return 1
    finally:
        decode.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
