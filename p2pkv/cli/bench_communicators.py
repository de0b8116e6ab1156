"""What a communicator costs in device memory, for `p2pkv bench --link nccl`: links come up one by one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from p2pkv.cli.bench_device import LAYOUT, environment, environment_of_child
from p2pkv.cli.bench_pages import capacity_for
from p2pkv.cli.bench_ranks import HOST, STAGING_BYTES, WINDOW_BYTES, bare_link, end_decode, start_decode
from p2pkv.cli.processes import free_ports
from p2pkv.links import make_factory

LINKS = 4


def free_bytes(device: str) -> int:
    """What no process holds of the device; first torch gives back what it keeps for later."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def measure(link: str, devices: tuple[str, str], free: Callable[[str], int] = free_bytes) -> dict[str, Any]:
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
        os.environ.update(environment("P", shared))
        process, wire = start_decode(settings, environment_of_child("D", shared))
        stack.callback(end_decode, process)
        stack.callback(wire.close)
        wire.expect("addresses")
        left = [free(devices[0])]
        links = make_factory(link, host=HOST, staging_bytes=STAGING_BYTES)
        stack.callback(links.close)
        left.append(free(devices[0]))
        ends = []  # kept, or a link of another kind than NCCL's would end
        for _ in range(LINKS):
            ends.append(bare_link(links, wire, WINDOW_BYTES))
            left.append(free(devices[0]))
    slots, *each = (before - after for before, after in pairwise(left))
    return {"ends": 2 if shared else 1, "staging_bytes": STAGING_BYTES, "slots": slots, "links": each}


def table(costs: dict[str, Any]) -> Iterator[str]:
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


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):>8.1f}"
