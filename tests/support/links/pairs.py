"""Pairs of link ends for the tests of p2pkv.links."""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from p2pkv import link_kinds
from p2pkv.links import make_factory
from p2pkv.links.base import Inbound, LinkFactory, Outbound, Receive, Send, decode_blob
from p2pkv.links.host import HostAcceptance, HostInbound, HostLinks
from p2pkv.links.ipc import IpcLinks
from p2pkv.links.nccl import NcclLinks
from support.cuda.ipc import CARD, SimulatedMemory
from support.cuda.ipc import SimulatedGpu as SimulatedCard
from support.engine.engines import Engine
from support.links.faulty import Faults, FaultyLinks
from support.links.memory import MemoryNetwork
from support.nccl.gpu import SimulatedGpu
from support.nccl.simulated import SimulatedDevice, SimulatedNccl
from support.waiting import wait_for

OWN_WAYS = {"host": ("shared-memory", "tcp"), "ipc": ("ipc",), "nccl": ("nccl",)}
"""Registered kinds that `make_factories` makes in another way than `make_factory` does."""
KINDS = ("memory", "faulty", *(way for name in link_kinds.KINDS for way in OWN_WAYS.get(name, (name,))))
"""All that the contract tests try: a kind that is registered is among them."""
STAGING = 1 << 22
DEADLINE = 10.0
HOST_WINDOW = 1 << 20
"""Of the links of the fixtures `shm` and `tcp`, and the staging of their ranks."""
PEER = Path(__file__).with_name("peer.py")


def make_factories(kind: str) -> tuple[LinkFactory, LinkFactory]:
    if kind not in ("memory", "faulty"):
        return links_of(kind), links_of(kind)
    network = MemoryNetwork()
    p, d = network.rank(STAGING), network.rank(STAGING)
    return (
        (p, d) if kind == "memory" else (FaultyLinks(p, Faults(), seed=1), FaultyLinks(d, Faults(), seed=2))
    )


def links_of(kind: str, staging: int = 4 * STAGING) -> LinkFactory:
    """Those of one rank. Raises ValueError for a kind that is not registered, or needs a GPU."""
    if kind == "nccl":
        return nccl_links(staging=staging)
    if kind == "ipc":
        return ipc_links(staging)
    if kind in OWN_WAYS["host"]:
        return HostLinks("127.0.0.1", staging, kind == "shared-memory")
    return make_factory(kind, host="127.0.0.1", staging_bytes=staging)  # as an instance makes it


def ipc_links(
    staging: int = STAGING, *, card: bytes = CARD, receives: bool = True, gpu: SimulatedCard | None = None
) -> IpcLinks:
    gpu = gpu or SimulatedCard()
    return IpcLinks(gpu, SimulatedMemory(gpu, card), staging, receives)


_SIMULATIONS: WeakKeyDictionary[LinkFactory, SimulatedNccl] = WeakKeyDictionary()


def nccl_links(
    *,
    version: int = 22809,
    staging: int = 4 * STAGING,
    init_seconds: float = DEADLINE,
    processors: int = 512,
    channels: int = 8,
    gpu: SimulatedGpu | None = None,
    announced: bool = False,
    in_flight: int = 1,
    group_bytes: int = 64 << 20,
) -> NcclLinks:
    """NCCL links of one rank on a simulated device of its own; with `gpu`, one whose streams share it."""
    nccl = SimulatedNccl(version=version, gpu=gpu, channels=channels)
    device = SimulatedDevice(nccl, processors=processors)
    links = NcclLinks(nccl, device, staging, init_seconds, in_flight, group_bytes)
    links.announced = announced
    _SIMULATIONS[links] = nccl
    return links


def simulated(links: LinkFactory) -> SimulatedNccl:
    return _SIMULATIONS[links]


def nccl_of(engine: Engine) -> SimulatedNccl:
    return simulated(engine.ranks[0].links)


@dataclass
class Pair:
    outbound: Outbound
    inbound: Inbound

    def poll(self) -> None:
        self.outbound.poll()
        self.inbound.poll()

    def until(self, condition: Callable[[], bool]) -> None:
        wait_for(lambda: self.poll() or condition())

    def begin(self, nbytes: int) -> tuple[Receive, Send]:
        receive = self.inbound.post(nbytes)
        send = self.outbound.reserve(nbytes, receive.remote_slot)
        return receive, send

    def transfer(self, nbytes: int, seed: int = 1) -> torch.Tensor:
        """What D gets of one message of noise, uint8 [nbytes]."""
        receive, send = self.begin(nbytes)
        send.buffer.copy_(noise(nbytes, seed))
        send.commit()
        self.until(receive.done)
        got = receive.buffer.clone()
        receive.release()
        self.until(send.done)
        return got

    def carry(self, nbytes: int, seed: int = 1) -> None:
        """One message arrives as it was sent."""
        assert torch.equal(self.transfer(nbytes, seed), noise(nbytes, seed))

    def abort(self) -> None:
        self.outbound.abort()
        self.inbound.abort()


def connect(factories: tuple[LinkFactory, LinkFactory], window: int, *, ready: bool = True) -> Pair:
    """A new link from the first factory's rank (P) to the second's (D)."""
    p, d = factories
    invitation = p.invite()
    inbound, acceptance = d.accept(invitation, window)
    pair = Pair(p.complete(invitation, acceptance), inbound)
    if ready:
        wait_for(lambda: pair.outbound.ready() & pair.inbound.ready())
    return pair


def noise(nbytes: int, seed: int) -> torch.Tensor:
    """uint8 [nbytes], the same for one seed."""
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(nbytes)), dtype=torch.uint8)


def accepted(links: HostLinks, window: int) -> tuple[bytes, HostInbound, HostAcceptance]:
    invitation = links.invite()
    inbound, acceptance = links.accept(invitation, window)
    return invitation, inbound, decode_blob(acceptance, HostAcceptance)


def leftovers() -> tuple[int, list[str], list[str]]:
    """Open descriptors, arenas mapped here, and files of ours with a name that others could find."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "p2pkv-arena" in line]
    ours = sorted(name for name in os.listdir("/dev/shm") if "p2pkv" in name)  # others use it meanwhile
    return len(os.listdir("/proc/self/fd")), maps, ours


def held() -> Counter[str]:
    """How many of each: open descriptors, arenas mapped here, files of ours in /dev/shm, threads of ours. For
    `held() - before`: what earlier tests have left may go meanwhile, so it is collected before `before`."""
    _, maps, files = leftovers()
    descriptors = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            descriptors.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    threads = [each.name for each in threading.enumerate() if each.name.startswith("p2pkv")]
    return Counter([*descriptors, *maps, *files, *threads])


class Peer:
    """A child process at the other end of the link."""

    def __init__(self, *arguments: str, script: Path = PEER) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, **what: object) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait(10)}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@contextlib.contextmanager
def starting() -> Iterator[Callable[..., Peer]]:
    """What starts a Peer, with Peer's own arguments; none of them is left at the end."""
    peers: list[Peer] = []

    def start(*arguments: str, script: Path = PEER) -> Peer:
        peers.append(Peer(*arguments, script=script))
        return peers[-1]

    yield start
    for peer in peers:
        if peer.process.poll() is None:
            peer.kill()


def from_another_thread(*calls: Callable[[], object]) -> list[str]:
    """What each call is told there, which may make none of them."""
    with ThreadPoolExecutor(1, "intruder") as pool:
        return [str(pool.submit(call).exception(10)) for call in calls]


def send_sizes(outbound: Outbound, sizes: list[int], remote_slots: list[int]) -> None:
    """One message of noise of each size, seeded by its number; returns when all have gone out."""
    wait_for(outbound.ready)
    sends = []
    for seed, (nbytes, remote_slot) in enumerate(zip(sizes, remote_slots, strict=True)):
        send = outbound.reserve(nbytes, remote_slot)
        send.buffer.copy_(noise(nbytes, seed))
        send.commit()
        sends.append(send)
    wait_for(lambda: outbound.poll() or all(send.done() for send in sends))


def send_all(links: LinkFactory, peer: Peer, sizes: list[int], window: int) -> tuple[Outbound, int]:
    """Messages of all sizes to a fresh D; the link, and the slot of one more receive of `window` bytes."""
    invitation = links.invite()
    peer.tell(invitation=invitation.hex(), window=window, sizes=sizes)
    outbound = links.complete(invitation, bytes.fromhex(peer.hear()["acceptance"]))
    send_sizes(outbound, sizes, peer.hear()["remote_slots"])
    expected = [hashlib.sha256(noise(nbytes, seed).numpy()).hexdigest() for seed, nbytes in enumerate(sizes)]
    assert peer.hear()["digests"] == expected
    return outbound, peer.hear()["remote_slot"]


def receive_all(links: LinkFactory, peer: Peer, sizes: list[int], window: int) -> Inbound:
    """Messages of all sizes from a fresh P."""
    inbound, acceptance = links.accept(bytes.fromhex(peer.hear()["invitation"]), window)
    receives = [inbound.post(nbytes) for nbytes in sizes]
    peer.tell(acceptance=acceptance.hex(), sizes=sizes, remote_slots=[each.remote_slot for each in receives])
    wait_for(lambda: inbound.poll() or all(receive.done() for receive in receives))
    for seed, (nbytes, receive) in enumerate(zip(sizes, receives, strict=True)):
        assert torch.equal(receive.buffer, noise(nbytes, seed))
        receive.release()
    return inbound
