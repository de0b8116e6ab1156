"""A model, not a measurement: what one link of one rank could move on an H100, by size of its messages.

Time passes as in `links/nccl_ends.py`: P gathers a message, announces it and launches a send, D launches its
receive, the bytes cross the wire, and D scatters them. Copies run beside the wire. One operation of a link is
on the device at a time (ON_DEVICE), and one more may be announced behind it (ANNOUNCED). So a message costs
the wire its bytes, and what lies between the end of one operation and the start of the next.

Every input is a field of Inputs; SOURCES says where each comes from. Run: python benchmarks/link_model.py
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields

MIB = 1 << 20
US = 1e-6


@dataclass(frozen=True)
class Inputs:
    """Seconds and bytes per second. `poll`: the engine's pause while a link is busy; half of it is waited."""

    poll: float = 100 * US
    python: float = 40 * US
    nccl_thread: float = 40 * US
    launch: float = 10 * US
    network: float = 15 * US
    control: float = 150 * US
    wire: float = 50e9
    efficiency: float = 0.96
    memory: float = 2.0e12


SOURCES = {
    "poll": "links/nccl.py, POLL_SECONDS",
    "python": "of a turn between an event that is ready and NCCL's call: benchmarks/engine_cost.py on a CPU",
    "nccl_thread": "with blocking=0 NCCL makes a thread for each call (group.cc): assumed",
    "launch": "a kernel launch with NCCL's arguments: 5 us are usual, twice that assumed",
    "network": "first bytes through NCCL's proxy and a switch, each way: assumed",
    "control": "Sent from P's engine to D's launch, over TCP: assumed; only if not announced ahead",
    "wire": "400 Gbit/s",
    "efficiency": "what NCCL gets of a 400 Gbit/s wire: its makers publish 45 to 49 GB/s",
    "memory": "H100 SXM: 3.35 TB/s; a gather reads and writes, and reaches some 60 %",
}


def seconds_per_message(nbytes: int, given: Inputs, *, ahead: bool = True, on_device: int = 1) -> float:
    """Seconds from one message to the next when many follow each other.

    `ahead`: whether D knows of the next message before this one has arrived. `on_device`: operations launched
    and unfinished; with two, the gap lies beside the wire.
    """
    wire = nbytes / (given.wire * given.efficiency)
    notice = given.poll / 2 + given.python
    gap = notice + given.nccl_thread + given.launch + given.network
    if not ahead:
        gap += given.control
    copies = 2 * nbytes / given.memory + given.launch + given.python
    if on_device > 1:
        return max(wire, gap, copies)
    return max(wire + gap, copies)


def share_of_wire(nbytes: int, given: Inputs, **how: int) -> float:
    """Throughput over the wire's own."""
    return nbytes / seconds_per_message(nbytes, given, **how) / given.wire  # type: ignore[arg-type]


def chunk_of(staging: int) -> int:
    """The rule of `config.default_chunk`."""
    from p2pkv.config import default_chunk

    return default_chunk(staging, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    given = Inputs()
    rows = [
        {
            "chunk_mib": size,
            "as built": round(share_of_wire(size * MIB, given), 3),
            "not announced ahead": round(share_of_wire(size * MIB, given, ahead=False), 3),
            "two on the device": round(share_of_wire(size * MIB, given, on_device=2), 3),
        }
        for size in (1, 4, 8, 16, 32, 40, 64)
    ]
    if args.json:
        print(json.dumps({"model": True, "inputs": vars(given), "sources": SOURCES, "rows": rows}, indent=1))
        return
    print("A MODEL of one link of one rank on an H100, share of a 400 Gbit/s wire. No GPU was measured.\n")
    for field in fields(given):
        print(f"  {field.name:12} {getattr(given, field.name):10.4g}  {SOURCES[field.name]}")
    print(f"\n{'message':>8} {'as built':>10} {'not announced ahead':>20} {'two on the device':>18}")
    for row in rows:
        print(
            f"{row['chunk_mib']:>4} MiB {row['as built']:>10.2f} {row['not announced ahead']:>20.2f} "
            f"{row['two on the device']:>18.2f}"
        )
    chunk = chunk_of(640 * MIB)
    print(f"\nan H100 with 80 GB: staging 640 MiB, messages of {chunk // MIB} MiB: "
          f"{share_of_wire(chunk, given):.2f} of the wire")  # fmt: skip


if __name__ == "__main__":
    main()
