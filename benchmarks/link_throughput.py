"""GB/s of the host link between two processes, by message size, beside torch's copy of the same bytes.

Each row is one run: the copy is measured just before and just after, so that the ratios hold on a
loaded machine. The receiver checks one byte of each message and releases it; a real one scatters.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections import deque
from multiprocessing.connection import Connection

import torch

from p2pkv.links.base import Receive, Send
from p2pkv.links.host import HostLinks

IDLE = 20e-6  # what the waiting end sleeps, in seconds; an engine's loop does other work meanwhile


def receive(pipe: Connection, shared: bool, sizes: list[int], total: int, depth: int) -> None:
    """D: one link for each size; `depth` receives are kept posted."""
    for nbytes in sizes:
        count = max(depth, total // nbytes)
        with_links = HostLinks("127.0.0.1", 1 << 20, shared)
        inbound, acceptance = with_links.accept(pipe.recv_bytes(), depth * nbytes)
        pipe.send_bytes(acceptance)
        while not inbound.ready():
            time.sleep(IDLE)
        for _ in range(3):  # the first round warms pages up
            posted: deque[Receive] = deque()
            taken, announced = 0, 0
            while taken < count:
                inbound.poll()
                while announced < count and (new := inbound.post(nbytes)) is not None:
                    posted.append(new)
                    announced += 1
                    pipe.send_bytes(new.remote_slot.to_bytes(8, "little"))
                if not posted[0].done():
                    time.sleep(IDLE)
                    continue
                assert int(posted[0].buffer[-1]) == 7
                posted.popleft().release()
                taken += 1
        pipe.recv_bytes()
        with_links.close()


def send(pipe: Connection, shared: bool, nbytes: int, total: int, depth: int) -> float:
    """P: the best GB/s of the rounds after the first."""
    count = max(depth, total // nbytes)
    links = HostLinks("127.0.0.1", 4 * depth * nbytes, shared)
    invitation = links.invite()
    pipe.send_bytes(invitation)
    outbound = links.complete(invitation, pipe.recv_bytes())
    while not outbound.ready():
        time.sleep(IDLE)
    source = torch.full((depth, nbytes), 7, dtype=torch.uint8)
    rates = []
    for _ in range(3):
        sends: deque[Send] = deque()
        sent = 0
        start = time.perf_counter()
        while sent < count or sends:
            outbound.poll()
            while sends and sends[0].done():
                sends.popleft()
            if sent < count and pipe.poll():
                new = outbound.reserve(nbytes, int.from_bytes(pipe.recv_bytes(), "little"))
                assert new is not None
                new.buffer.copy_(source[sent % depth])
                new.commit()
                sends.append(new)
                sent += 1
            else:
                time.sleep(IDLE)
        rates.append(count * nbytes / (time.perf_counter() - start) / 1e9)
    pipe.send_bytes(b"next")
    links.close()
    return max(rates[1:])


def copy_rate(nbytes: int, total: int, depth: int) -> float:
    """Best GB/s of torch's copy_ between two rings of `depth` warm messages."""
    source = torch.full((depth, nbytes), 7, dtype=torch.uint8)
    target = torch.zeros_like(source)
    count = max(depth, total // nbytes)
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        for i in range(count):
            target[i % depth].copy_(source[i % depth])
        rates.append(count * nbytes / (time.perf_counter() - start) / 1e9)
    return max(rates[1:])


def call_cost() -> dict[str, float]:
    """Microseconds of a `done()` and a `poll()` that find nothing, over shared memory."""
    links = HostLinks("127.0.0.1", 1 << 20)
    invitation = links.invite()
    inbound, acceptance = links.accept(invitation, 1 << 20)
    outbound = links.complete(invitation, acceptance)
    assert inbound.ready() and outbound.ready()
    receiving = inbound.post(4096)
    assert receiving is not None
    sending = outbound.reserve(4096, receiving.remote_slot)
    assert sending is not None
    costs = {}
    calls = {
        "receive.done": receiving.done,
        "send.done": sending.done,
        "inbound.poll": inbound.poll,
        "outbound.poll": outbound.poll,
    }
    for name, call in calls.items():
        rounds = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(20_000):
                call()
            rounds.append((time.perf_counter() - start) / 20_000 * 1e6)
        costs[name] = min(rounds)
    links.close()
    return costs


def measure(shared: bool, sizes: list[int], total: int, depth: int) -> list[dict[str, float | str]]:
    """One row for each size."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs, shared, sizes, total, depth))
    child.start()
    rows: list[dict[str, float | str]] = []
    for nbytes in sizes:
        before = copy_rate(nbytes, total, depth)
        rate = send(ours, shared, nbytes, total, depth)
        copied = statistics.mean((before, copy_rate(nbytes, total, depth)))
        way = "shared memory" if shared else "tcp"
        rows.append({"way": way, "MiB": nbytes / (1 << 20), "GB/s": rate, "copy_ GB/s": copied})
    child.join(30)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mib", type=float, nargs="+", default=[0.0625, 1, 8, 32], help="message sizes in MiB"
    )
    parser.add_argument("--total-mib", type=int, default=512, help="MiB moved in each round")
    parser.add_argument("--depth", type=int, default=4, help="messages in flight")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the copy and of the gather")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = [int(mib * (1 << 20)) for mib in args.mib]
    rows = [
        row for shared in (True, False) for row in measure(shared, sizes, args.total_mib << 20, args.depth)
    ]
    costs = call_cost()
    if args.json:
        print(json.dumps({"rows": rows, "call_microseconds": costs}))
        return
    print(f"{'way':<14} {'MiB':>8} {'GB/s':>7} {'copy_ GB/s':>11} {'ratio':>6}")
    for row in rows:
        rate, copied = float(row["GB/s"]), float(row["copy_ GB/s"])
        print(f"{row['way']:<14} {row['MiB']:>8g} {rate:>7.2f} {copied:>11.2f} {rate / copied:>6.2f}")
    print("microseconds a call: " + ", ".join(f"{name} {cost:.2f}" for name, cost in costs.items()))


if __name__ == "__main__":
    main()
