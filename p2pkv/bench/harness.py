"""What the measurements of `p2pkv bench` share: processes, ranks, bare links, devices."""

import contextlib
import json
import logging
import os
import select
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch

from p2pkv.bench.latents import LATENTS, Latents
from p2pkv.bench.memory import HEADS, LAYERS, LAYOUTS, TOKEN_BYTES, Layout, Memory
from p2pkv.config import Options
from p2pkv.engine import commands as do
from p2pkv.engine.thread import Rank
from p2pkv.kv import PagedCache, RankCache
from p2pkv.links import make_factory
from p2pkv.links.base import LinkFactory, Outbound, Send
from p2pkv.links.nccl_bindings import SHARED_GPU
from p2pkv.pairing import Address
from p2pkv.protocol.messages import PROTOCOL_VERSION, Hello

HOST = "127.0.0.1"
STAGING_BYTES = 64 << 20
"""The default on a CPU; the other end's window is half of it."""

FORMS: dict[str, Layout | Latents] = {**LAYOUTS, LATENTS.name: LATENTS}
"""Caches that a prompt is pushed from and to, by name."""

WINDOW_BYTES = STAGING_BYTES // 2
DEADLINE_SECONDS = 60.0
"""How long anything in the benchmark may take before it gives up."""

Decoder = subprocess.Popen[bytes]
Made = TypeVar("Made")


# Prompts that are given up on purpose, and links that end with their processes, are no news here.
logging.getLogger("p2pkv").setLevel(logging.ERROR)


class BenchError(Exception):
    """The benchmark cannot go on: a sentence."""


# The processes.


class Pipe:
    """Messages between P's process and one of D, a line of JSON each, over a socket pair."""

    def __init__(self, end: socket.socket, deadline: float | None = DEADLINE_SECONDS) -> None:
        """`deadline`: seconds that a message may take; None: it waits until the other process ends."""
        self._socket = end
        self._socket.settimeout(deadline)
        self._came = b""

    def send(self, **message: Any) -> None:
        """Send one message."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other process has gone. TimeoutError after the deadline."""
        while b"\n" not in self._came:
            part = self._socket.recv(1 << 16)
            if not part:
                return None
            self._came += part
        line, _, self._came = self._came.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def expect(self, name: str, poll: Callable[[], None] | None = None) -> dict[str, Any]:
        """The next message, which holds `name`. `poll`: of a link, called until it comes. Raises BenchError
        for the other's error, or its end."""
        if poll is not None and not self._came:
            poll_until(poll, self._has_more, f"the wait for {name!r}")
        try:
            message = self.receive()
        except TimeoutError:
            raise BenchError(f"the other process did not send {name!r} in {DEADLINE_SECONDS:g} s") from None
        if message is None:
            raise BenchError(f"the other process ended before it sent {name!r}; its last output is above")
        if "error" in message:
            raise BenchError(str(message["error"]))
        assert name in message, f"{message} where {name!r} was due"
        return message

    def _has_more(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """Close our end; the other process finds out when it reads."""
        self._socket.close()


@contextlib.contextmanager
def decode_process(
    settings: dict[str, Any], env: dict[str, str] | None = None, module: str = "p2pkv.bench.decode"
) -> Iterator[tuple[Decoder, Pipe]]:
    """D's process, which runs this module, and the pipe to it. It ends when the pipe is closed on the way
    out; by force after a while."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", module, str(theirs.fileno()), json.dumps(settings)]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env)
    pipe = Pipe(ours)
    try:
        yield process, pipe
    finally:
        pipe.close()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)


def begin_decode(argv: Sequence[str]) -> tuple[Pipe, dict[str, Any]]:
    """In D's process: the pipe to P's, and the settings. `argv`: what `decode_process` has given it."""
    torch.set_num_threads(1)
    return Pipe(socket.socket(fileno=int(argv[0])), deadline=None), json.loads(argv[1])


@contextlib.contextmanager
def measuring(make: Callable[..., Made], *args: Any, **options: Any) -> Iterator[Made]:
    """What this makes; its first argument is a stack of what has to end on the way out. On a CPU torch copies
    in one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        yield make(stack, *args, **options)


# Ranks and bare links.


def make_rank(
    role: Literal["P", "D"],
    layout: Layout | Latents,
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
    cache = layout.rank_cache(memory)
    settings = Options(role=role, host=HOST, kv_port=port, staging_bytes=staging_bytes, **options)
    links = make_factory(
        link,
        host=HOST,
        staging_bytes=staging_bytes,
        receives=role != "P",
        nccl_in_flight=settings.nccl_in_flight,
        nccl_group_bytes=settings.nccl_group_bytes,
    )
    hello = hello_of(settings, layout, cache, links.kind, rank, tp)
    return settings.address, Rank(hello, settings, cache, links)


def hello_of(
    settings: Options, layout: Layout | Latents, cache: RankCache, link: str, rank: int = 0, tp: int = 1
) -> Hello:
    """How a rank of `tp` of the benchmark introduces itself."""
    return Hello(
        version=PROTOCOL_VERSION,
        incarnation=uuid.uuid4().hex,
        role="P" if settings.prefills else "D",
        rank=rank,
        to="none",
        address=str(settings.address.shifted(rank)),
        addresses=tuple(str(settings.address.shifted(each)) for each in range(tp)),
        model="bench",
        weights="none",
        cache=layout.described(cache, tp),
        link=link,
        digest=cache.digest_name,
        verify=settings.verify,
        several=True,
        together=True,
    )


def poll_until(poll: Callable[[], None], done: Callable[[], bool], what: str) -> None:
    """Poll a link until this is done. Raises BenchError after the deadline, LinkError as they do."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    poll()
    while not done():
        if time.monotonic() > deadline:
            raise BenchError(f"{what} did not end in {DEADLINE_SECONDS:g} s")
        poll()


def room_for(outbound: Outbound, nbytes: int, remote_slot: int) -> Send:
    """The next send of a bare link, once there is room for it."""
    found: list[Send] = []

    def tried() -> bool:
        if (send := outbound.reserve(nbytes, remote_slot)) is not None:
            found.append(send)
        return bool(found)

    poll_until(outbound.poll, tried, "room for a send")
    return found[0]


def bare_link(links: LinkFactory, pipe: Pipe, window: int) -> Outbound:
    """P's end of a link to the process at the other end of `pipe`, when it is up."""
    invitation = links.invite()
    pipe.send(order="link", invitation=invitation.hex(), window=window)
    acceptance = bytes.fromhex(pipe.expect("acceptance")["acceptance"])
    outbound = links.complete(invitation, acceptance)
    poll_until(outbound.poll, outbound.ready, "building the bare link")
    return outbound


def seconds_over(outbound: Outbound, pipe: Pipe, flat: torch.Tensor, sizes: Sequence[int]) -> float:
    """Seconds of messages of these sizes over a bare link, each filled by one plain copy out of `flat`."""
    sends, offset = list[Send](), 0
    begin = time.monotonic()
    pipe.send(order="receive", sizes=sizes)
    for size in sizes:
        remote_slot = pipe.expect("remote_slot", outbound.poll)["remote_slot"]
        send = room_for(outbound, size, remote_slot)
        send.buffer.copy_(flat[offset : offset + size])
        send.commit()
        pipe.send(sent=True)
        sends.append(send)
        offset += size
    received = float(pipe.expect("received", outbound.poll)["received"])
    poll_until(outbound.poll, lambda: all(send.done() for send in sends), "the last send")
    return received - begin


def hold(rank: Rank, key: str, decode: Address, tokens: int, blocks: tuple[list[int], ...]) -> None:
    """P's rank has a prompt for this D, in these blocks."""
    rank.do(do.HoldPrompt(key, decode))
    rank.do(do.OfferPrompt(key, decode, tokens, b"bench"))
    rank.do(do.PromptBlocks(key, blocks))


def forget(rank: Rank, key: str) -> None:
    """Once nobody needs its blocks any more. Raises as `wait_for`."""
    wait_for(rank, do.BlocksFree(key))
    rank.do(do.Forget(key))


def wait_for(rank: Rank, event: do.Event) -> float:
    """When this event came, on the monotonic clock: without polling, which would take the interpreter's lock
    from the engine. Raises BenchError if it fails or is late."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while event not in (events := rank.events()):
        for other in events:
            if isinstance(other, do.LoadFailed):
                raise BenchError(f"a push failed: {other.reason}")
        if time.monotonic() > deadline:
            counters = rank.counters.snapshot()
            raise BenchError(f"{event} did not come in {DEADLINE_SECONDS:g} s; counters: {counters}")
        rank.wait_for_event(1.0)
    return time.monotonic()


# What is shown.


def ms(seconds: Sequence[float]) -> str:
    """The median, with the lowest and the highest."""
    values = [value * 1e3 for value in seconds]
    return f"{statistics.median(values):.1f} [{min(values):.1f} - {max(values):.1f}]"


def ratio_of(these: Sequence[float], those: Sequence[float]) -> float:
    """The median of the ratios of measurements made one after the other."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))


# Devices.

LAYOUT = LAYOUTS["dense"]
BLOCK_BYTES = LAYOUT.block * TOKEN_BYTES // LAYERS
"""A block of one layer; the smallest message."""

LEAST_SECONDS = 0.02
"""How long each measurement on a device lasts at least, so that its start does not count."""


def devices(link: str) -> tuple[str, str]:
    """P's and D's CUDA device, the same one if there is only one. Raises BenchError with a sentence."""
    if not torch.cuda.is_available():
        raise BenchError(
            f"--link {link} moves KV between GPUs, and torch finds no CUDA device here: run it on a "
            "machine that has one, or measure the link of this machine with --link host"
        )
    return "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"


def environment(shared: bool) -> dict[str, str]:
    """What NCCL's environment needs before its first call in a process, if P and D share a device: before
    2.30 it refuses two ranks there, whatever is set."""
    return {SHARED_GPU: "1"} if shared else {}


def environment_of_child(shared: bool) -> dict[str, str]:
    """The whole environment of D's process."""
    return {**os.environ, **environment(shared)}


def seconds_of(device: str, once: Callable[[], object]) -> float:
    """How long `once` takes, the mean over so many calls in a row that LEAST_SECONDS are filled."""
    once()
    count = 1
    while True:
        took = _timed(device, once, count)
        if took >= LEAST_SECONDS:
            return took / count
        count = max(count + 1, int(1.5 * count * LEAST_SECONDS / max(took, 1e-6)))


def _timed(device: str, once: Callable[[], object], count: int) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(count):
            once()
        return time.perf_counter() - begin
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        once()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000


class Strip:
    """Rectangles of Llama-8B's KV, [layer, token, 8 heads], and a dense buffer to move them to and from."""

    def __init__(self, memory: Memory, most: int, device: str) -> None:
        """`most`: bytes of the largest rectangle, a multiple of BLOCK_BYTES."""
        self._device = device
        self._cache: PagedCache = memory.cache(LAYOUT)
        self._cache.copier.warm_up()
        self._flat = memory.flat
        self._dense = torch.empty(most, dtype=torch.uint8, device=device)
        self._table = [LAYOUT.table(memory.capacity, memory.capacity, "P")]

    def rates(self, nbytes: int) -> dict[str, float]:
        """Bytes per second of a plain copy, a gather and a scatter of `nbytes`, multiple of BLOCK_BYTES."""
        part, plain = self._dense[:nbytes], self._flat[:nbytes]
        cut = (*_rectangle(nbytes), (0, HEADS), self._table)
        kinds: dict[str, Callable[[], object]] = {
            "copy": lambda: part.copy_(plain),
            "gather": lambda: self._cache.gather(part, *cut),
            "scatter": lambda: self._cache.scatter(part, *cut),
        }
        return {kind: nbytes / seconds_of(self._device, once) for kind, once in kinds.items()}


def _rectangle(nbytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Layers and tokens of a rectangle of so many bytes: few tokens of many layers, as chunks are."""
    blocks = nbytes // BLOCK_BYTES
    layers = min(LAYERS, blocks)
    assert nbytes % BLOCK_BYTES == 0 and blocks % layers == 0
    return (0, layers), (0, blocks // layers * LAYOUT.block)


# NCCL's own send and receive, through CuPy and without p2pkv's link: what a link is compared with.

UINT8 = 1
"""NCCL's number for the type uint8."""


def new_name() -> str:
    """The name of a new communicator, in hex. Raises ImportError without CuPy."""
    from cupy.cuda import nccl

    name = nccl.get_unique_id()
    return bytes(part & 0xFF for part in name).hex()


def _takes_bytes() -> bool:
    import cupy

    return int(cupy.__version__.split(".")[0]) >= 14


class RawNccl:
    """One of two ranks on torch's current device. Making it waits for the other. Raises ImportError."""

    def __init__(self, name: bytes, rank: int) -> None:
        from cupy.cuda import nccl

        # CuPy 13 takes and gives a tuple of signed numbers, CuPy 14 bytes.
        signed = tuple(part - 256 if part > 127 else part for part in name)
        self._comm: Any = nccl.NcclCommunicator(2, name if _takes_bytes() else signed, rank)
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, flat: torch.Tensor, sizes: list[int]) -> None:
        """Send messages of these sizes, one after the other out of `flat`, and wait until they are gone."""
        self._each(self._comm.send, flat, sizes, peer=1)

    def receive(self, flat: torch.Tensor, sizes: list[int]) -> None:
        """Receive them into `flat`, and wait until they are there."""
        self._each(self._comm.recv, flat, sizes, peer=0)

    def close(self) -> None:
        """End the communicator. `abort`, since `destroy` may wait for a peer that has gone."""
        self._comm.abort()

    def _each(self, call: Any, flat: torch.Tensor, sizes: list[int], peer: int) -> None:
        offset = 0
        for size in sizes:
            call(flat.data_ptr() + offset, size, UINT8, peer, self._stream.cuda_stream)
            offset += size
        self._stream.synchronize()
