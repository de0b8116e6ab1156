"""The P of `p2pkv bench --link nccl`: the same bytes in messages of several sizes, at every level.

Gather and scatter beside a plain copy on the device; p2pkv's bare link beside NCCL's own send and
receive; a whole push beside the bare link.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from p2pkv.cli.bench_device import LAYOUT, Strip, environment, environment_of_child
from p2pkv.cli.bench_pages import TOKEN_BYTES, Memory, capacity_for
from p2pkv.cli.bench_prefill import Hook
from p2pkv.cli.bench_ranks import (
    HOST,
    STAGING_BYTES,
    BenchError,
    bare_link,
    end_decode,
    make_rank,
    poll_until,
    start_decode,
    wait_for,
)
from p2pkv.cli.bench_raw import RawNccl, new_name
from p2pkv.cli.processes import free_ports
from p2pkv.engine import commands as do
from p2pkv.engine.rank import Rank
from p2pkv.links import make_factory
from p2pkv.links.base import Outbound, Send
from p2pkv.pairing import Address

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


class Messages:
    """P's memory, ranks and links, and D's process. Close it.

    Attributes:
        decoder: D's process.
        total: bytes that each measurement of a link or a push moves.
    """

    def __init__(
        self,
        link: str,
        devices: tuple[str, str],
        sizes: Sequence[int],
        total: int,
        lease_seconds: float = 30.0,
        verify: bool = False,
    ) -> None:
        """`total`: a multiple of every size and of a token's bytes. `verify`: with checksums."""
        self.total = total
        self._device, self._decode_device = devices
        self._lease_seconds = lease_seconds
        self._verify = verify
        self._shared = devices[0] == devices[1] != "cpu"
        self._link = link
        self._staging = max(4 * max(sizes), STAGING_BYTES)
        self._tokens = total // TOKEN_BYTES + 1
        self._stack = contextlib.ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(1))
        self._keys = 0
        os.environ.update(environment("P", self._shared))
        self._memory = Memory(capacity_for(self._tokens), "P", self._device)
        self._ranks: dict[int, tuple[Address, Rank]] = {}
        self._outbound: Outbound | None = None
        self._raw: RawNccl | None = None
        try:
            self._start_decode()
            for size in sizes:
                self._ranks[size] = self._start_rank(size)
        except BaseException:
            self.close()
            raise

    def on_device(self, sizes: Sequence[int]) -> dict[int, dict[str, float]]:
        """By size, bytes per second of a plain copy, a gather and a scatter."""
        strip = Strip(self._memory, max(sizes), self._device)
        return {size: strip.rates(size) for size in sizes}

    def push(self, size: int) -> float:
        """Bytes per second of a prompt that is all computed when D asks, with this chunk_bytes."""
        rank, key = self.rank(size), self.hold(size)
        self.ask(size, key)
        times = self._wire.expect("loaded")
        if times["scattered"] != self.total:
            raise BenchError(f"D wrote {times['scattered']} bytes instead of {self.total}")
        wait_for(rank, do.PagesFree(key))
        rank.do(do.Forget(key))
        return self.total / (float(times["loaded"]) - float(times["asked"]))

    def hold(self, size: int, share: float = 1.0) -> str:
        """P has computed so much of a prompt for D, in the rank with this chunk_bytes; its key."""
        _, rank = self._ranks[size]
        self._keys += 1
        key = f"messages-{self._keys}"
        rank.do(do.Hold(key, self._decode))
        rank.do(do.OfferPrompt(key, self._decode, self._tokens, b"bench"))
        rank.do(do.Pages(key, (LAYOUT.table(self._tokens, self._memory.capacity, "P"),)))
        Hook(rank, ((key, int(share * self._tokens)),), 1, self._device).end()
        return key

    def ask(self, size: int, key: str) -> None:
        """D asks for what P holds under this key."""
        address, _ = self._ranks[size]
        self._wire.say(order="load", layout=LAYOUT.name, key=key, prefill=str(address), tokens=self._tokens)
        self._wire.expect("expecting")

    def restart_decode(self) -> None:
        """Kill D's process, without a word to anybody, and start another at another address."""
        self.decoder.kill()
        self.decoder.wait(10.0)
        self._outbound = self._raw = None
        self._start_decode()

    def rank(self, size: int) -> Rank:
        """P's rank with this chunk_bytes."""
        return self._ranks[size][1]

    def link(self, size: int) -> float:
        """Bytes per second over the bare link, each message filled by one plain copy."""
        outbound = self._outbound = self._outbound or self._start_link()
        sizes, sends, offset = [size] * (self.total // size), list[Send](), 0
        begin = time.monotonic()
        self._wire.say(order="receive", sizes=sizes)
        for each in sizes:
            landing = self._heard(outbound, "landing")["landing"]
            send = self._reserve(outbound, each, landing)
            send.buffer.copy_(self._memory.flat[offset : offset + each])
            send.commit()
            self._wire.say(sent=True)
            sends.append(send)
            offset += each
        received = float(self._heard(outbound, "received")["received"])
        poll_until(outbound.poll, lambda: all(send.done() for send in sends), "the last send")
        return self.total / (received - begin)

    def raw(self, size: int) -> float:
        """Bytes per second of NCCL's own send and receive. Raises ImportError without CuPy."""
        name = new_name() if self._raw is None else ""
        sizes = [size] * (self.total // size)
        self._wire.say(order="raw", name=name, sizes=sizes)
        if self._raw is None:
            self._raw = RawNccl(bytes.fromhex(name), rank=0)
            self._stack.callback(self._raw.close)
        self._wire.expect("ready")
        begin = time.monotonic()
        self._raw.send(self._memory.flat, sizes)
        return self.total / (float(self._wire.expect("received")["received"]) - begin)

    def close(self) -> None:
        """End the ranks, the links and D's process. Idempotent."""
        self._stack.close()

    # Inside.

    def _start_decode(self) -> None:
        settings = {
            "capacity": self._memory.capacity,
            "link": self._link,
            "ports": {LAYOUT.name: free_ports()},
            "device": self._decode_device,
            "staging_bytes": self._staging,
            "lease_seconds": self._lease_seconds,
        }
        self.decoder, self._wire = start_decode(settings, environment_of_child("D", self._shared))
        self._stack.callback(end_decode, self.decoder)
        self._stack.callback(self._wire.close)
        self._decode = Address.parse(self._wire.expect("addresses")["addresses"][LAYOUT.name])

    def _start_rank(self, size: int) -> tuple[Address, Rank]:
        address, rank = make_rank(
            "P", LAYOUT, self._memory, free_ports(), link=self._link,
            staging_bytes=self._staging, chunk_bytes=size, lease_seconds=self._lease_seconds,
            verify=self._verify,
        )  # fmt: skip
        self._stack.callback(rank.stop)
        return address, rank

    def _start_link(self) -> Outbound:
        links = make_factory(self._link, host=HOST, staging_bytes=self._staging)
        self._stack.callback(links.close)
        return bare_link(links, self._wire, self._staging // 2)

    def _heard(self, outbound: Outbound, word: str) -> dict[str, Any]:
        """D's next message; the link is polled meanwhile, since its sends may wait for that."""
        future = self._pool.submit(self._wire.expect, word)
        poll_until(outbound.poll, future.done, f"D's word {word!r}")
        return future.result()

    def _reserve(self, outbound: Outbound, nbytes: int, landing: int) -> Send:
        found: list[Send] = []

        def tried() -> bool:
            if (send := outbound.reserve(nbytes, landing)) is not None:
                found.append(send)
            return bool(found)

        poll_until(outbound.poll, tried, "room for a send")
        return found[0]


@contextlib.contextmanager
def messages(*args: Any, **options: Any) -> Iterator[Messages]:
    """A Messages, ended on the way out; on a CPU torch copies in one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    both = Messages(*args, **options)
    try:
        yield both
    finally:
        both.close()
        torch.set_num_threads(threads)
