"""One rank of P and many links, for `p2pkv bench`: a fan-out, and what communicators cost.

Fan-out: one rank of P pushes a prompt to 1, 2, 4 ranks of D. The ranks of a D share the heads of the prompt,
as under tensor parallelism; each is a process of its own. So a prompt has the same size at every fan-out, and
only the number of links differs.

Communicators: links come up one by one, and after each one we ask the device how much memory it has left.
"""

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from p2pkv.bench.harness import (
    HOST,
    LAYOUT,
    STAGING_BYTES,
    WINDOW_BYTES,
    BenchError,
    Pipe,
    bare_link,
    decode_process,
    environment,
    environment_of_child,
    forget,
    hold,
    make_rank,
    measuring,
    ratio_of,
)
from p2pkv.bench.memory import TOKEN_BYTES, Memory, capacity_for
from p2pkv.bench.prefill import Hook
from p2pkv.demo.processes import free_ports
from p2pkv.link_kinds import KINDS
from p2pkv.links import make_factory
from p2pkv.links.nccl_memory import CHANNELS, Way, end_bytes
from p2pkv.pairing import Address

FAN_OUTS = (1, 2, 4)
TOTAL = {"cuda": 256 << 20, "cpu": 64 << 20}
"""Bytes of a prompt: enough for several messages to each of 4 ranks."""

Rows = list[dict[str, Any]]


def measure(
    link: str, devices: Sequence[str], fan_outs: Sequence[int], chunk_bytes: int, repeat: int
) -> dict[str, Any]:
    """Rates by fan-out, and what they are of; see FanOut and `rows_of`."""
    total = TOTAL[KINDS[link].memory]
    with fan_out(link, devices, fan_outs, total, chunk_bytes) as fans:
        rows = rows_of(fans, fan_outs, repeat)
    return {"devices": list(devices), "total": total, "rows": rows}


class FanOut:
    """One rank of P, and a D of 1, 2, 4 ... ranks for each fan-out."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        link: str,
        devices: Sequence[str],
        fan_outs: Sequence[int],
        total: int,
        chunk_bytes: int,
    ) -> None:
        """`stack`: of what has to end. `devices`: see `device_of`. `total`: bytes of a prompt, a multiple of
        a token's."""
        self._total = total
        self._tokens = total // TOKEN_BYTES + 1
        self._link = link
        self._devices = devices
        self._staging = max(STAGING_BYTES, total)
        self._stack = stack
        self._keys = 0
        self._decodes: dict[int, Address] = {}
        self._pipes: dict[int, list[Pipe]] = {}
        self._shared = len(devices) == 1 and devices[0] != "cpu"
        os.environ.update(environment(self._shared))
        self.memory = Memory(capacity_for(self._tokens), "P", devices[0])
        for fan_out in fan_outs:
            self._start_decode(fan_out)
        for pipe in (pipe for pipes in self._pipes.values() for pipe in pipes):
            pipe.expect("addresses")
        self._address, self.rank = make_rank(
            "P", LAYOUT, self.memory, free_ports(), link=link, staging_bytes=self._staging,
            chunk_bytes=chunk_bytes,
        )  # fmt: skip
        stack.callback(self.rank.stop)

    def push(self, fan_out: int) -> float:
        """Bytes per second, all ranks of D together, from the first that asks to the last that has it all.

        The prompt is computed before. Raises BenchError if a rank does not hold what P computed.
        """
        pipes = self._pipes[fan_out]
        key = self._hold(self._decodes[fan_out])
        order = {"layout": LAYOUT.name, "key": key, "prefill": str(self._address), "tokens": self._tokens}
        for pipe in pipes:
            pipe.send(order="load", together=True, **order)
        for name in ("expecting", "begun"):
            for pipe in pipes:
                pipe.expect(name)
        for pipe in pipes:
            pipe.send(go=True)
        times = [pipe.expect("loaded") for pipe in pipes]
        share = self._total // fan_out
        for rank, each in enumerate(times):
            if each["scattered"] != share:
                raise BenchError(f"rank {rank} of D wrote {each['scattered']} bytes instead of {share}")
        forget(self.rank, key)
        begin = min(float(each["asked"]) for each in times)
        return self._total / (max(float(each["loaded"]) for each in times) - begin)

    # Inside.

    def _hold(self, decode: Address) -> str:
        """P has computed a prompt for this D; its key."""
        self._keys += 1
        key = f"fan-out-{self._keys}"
        hold(self.rank, key, decode, self._tokens, LAYOUT.tables(self._tokens, self.memory.capacity, "P"))
        Hook(self.rank, ((key, self._tokens),), 1, self._devices[0]).end()
        return key

    def _start_decode(self, fan_out: int) -> None:
        """Start the processes of a D with so many ranks; each sends `addresses` when it listens."""
        port = free_ports(fan_out)
        pipes = self._pipes[fan_out] = []
        for rank in range(fan_out):
            settings = {
                "capacity": self.memory.capacity,
                "link": self._link,
                "ports": {LAYOUT.name: port},
                "device": device_of(self._devices, rank),
                "staging_bytes": self._staging,
                "rank": rank,
                "tp": fan_out,
            }
            process = decode_process(settings, environment_of_child(self._shared))
            pipes.append(self._stack.enter_context(process)[1])
        self._decodes[fan_out] = Address(HOST, port)


def device_of(devices: Sequence[str], rank: int) -> str:
    """The device of a rank of D: P has the first one, and D's ranks take turns on the others, if any."""
    others = devices[1:] or devices
    return others[rank % len(others)]


fan_out = partial(measuring, FanOut)
"""A FanOut, ended on the way out."""


def rows_of(fans: FanOut, fan_outs: Sequence[int], repeat: int) -> Rows:
    """One row a fan-out, rates in bytes per second; they are measured in turn."""
    rows: Rows = [{"fan_out": number, "push": []} for number in fan_outs]
    for turn in range(repeat + 1):
        for row in rows:
            rate = fans.push(row["fan_out"])
            if turn:  # the first one only warms up
                row["push"].append(rate)
    return rows


def table(results: dict[str, Any]) -> Iterator[str]:
    """GB/s of all ranks together by fan-out: medians, and the ratio to the first row's, turn by turn."""
    rows, devices = results["rows"], results["devices"]
    most = max(row["fan_out"] for row in rows)
    used = sorted({device_of(devices, rank) for rank in range(most)})
    moved = results["total"] >> 20
    yield f"One rank of P pushes {moved} MiB, computed before, to ranks of D that share the heads"
    yield f"P on {devices[0]}, D's ranks on {', '.join(used)}"
    first = rows[0]
    yield f"{'ranks of D':>10} {'push':>8} {'/ ' + str(first['fan_out']):>7}   GB/s, all together"
    for row in rows:
        rate, of_first = statistics.median(row["push"]), ratio_of(row["push"], first["push"])
        yield f"{row['fan_out']:>10} {rate / 1e9:>8.2f} {of_first:>7.2f}"


# The memory of communicators.

LINKS = 4


def free_bytes(device: str) -> int:
    """What no process holds of the device; first torch gives back what it keeps for later."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def measure_communicators(
    link: str, devices: tuple[str, str], free: Callable[[str], int] = free_bytes
) -> dict[str, Any]:
    """Bytes that P's device lost to p2pkv's slots, then to each of LINKS links to one D.

    Where D is on the same device, its ends are in it, and its slots, taken before, are not. Call it
    before anything else has used NCCL, or the first link lacks what NCCL takes once in a process.

    Args:
        link: kind of the links.
        devices: P's and D's.
        free: bytes left on a device.
    """
    shared = devices[0] == devices[1] != "cpu"
    settings = {
        "capacity": capacity_for(1),
        "link": link,
        "ports": {LAYOUT.name: free_ports()},
        "device": devices[1],
    }
    with contextlib.ExitStack() as stack:
        os.environ.update(environment(shared))
        _, pipe = stack.enter_context(decode_process(settings, environment_of_child(shared)))
        pipe.expect("addresses")
        left = [free(devices[0])]
        links = make_factory(link, host=HOST, staging_bytes=STAGING_BYTES)
        stack.callback(links.close)
        left.append(free(devices[0]))
        ends = []  # kept, or a link of another kind than NCCL's would end
        for _ in range(LINKS):
            ends.append(bare_link(links, pipe, WINDOW_BYTES))
            left.append(free(devices[0]))
    slots, *each = (before - after for before, after in pairwise(left))
    return {"ends": 2 if shared else 1, "staging_bytes": STAGING_BYTES, "slots": slots, "links": each}


def communicators_table(costs: dict[str, Any]) -> Iterator[str]:
    """MiB by link, in the order in which they came up."""
    whose = "both ends, since P and D share it" if costs["ends"] == 2 else "P's end"
    yield f"Device memory that a communicator takes ({whose}), in the order in which they came up"
    yield f"{'link':>10} {'MiB':>8}"
    for number, nbytes in enumerate(costs["links"], 1):
        yield f"{number:>10} {_mib(nbytes)}"
    yield (
        f"{'slots':>10} {_mib(costs['slots'])}   apart: taken once for a rank, "
        f"staging_bytes {costs['staging_bytes'] >> 20} MiB, and what loading NCCL took"
    )
    for way in Way:
        p, d = (end_bytes(CHANNELS, way, receives) for receives in (False, True))
        yield f"{way.name:>10} {_mib(p)} {_mib(d)}   P's and D's end, by NCCL's source, {CHANNELS} channels"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):>8.1f}"
