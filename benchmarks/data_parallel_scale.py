"""What many data-parallel engines cost each other: P's of TP 4 and D's of TP 1, in the tests' virtual runs.

Each rank is a real core with real pages, on a virtual clock, without faults: what is measured is the protocol
and its state, not a network. Each size of the fleet has a process of its own. There each D takes a request
from some P's, and another one when the links are up; all idle for a while; and each D waits for those P's.
The same again behind a router that knows no data-parallel ranks.

    python benchmarks/data_parallel_scale.py [--fleets 4x18,8x36,16x72,32x144] [--partners 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from chaos.engine import Build
from chaos.model import Group, Model
from chaos.schedule import LEASE
from virtual.machine import Worker
from virtual.world import World

P_RANKS = 4
MODEL = Model((Group((0, 1), heads=P_RANKS, content=4),), blocks=16)
TOKENS = 40
IDLE_SECONDS = 10.0
WAIT_SECONDS = 0.8 * LEASE
CHUNK_BYTES = 16384


class Fleet(World):
    """`prefills` engines of TP 4, `decodes` of TP 1; what they send is counted by kind."""

    def __init__(self, prefills: int, decodes: int, named: bool) -> None:
        self._prefills_left = prefills
        self.sent: Counter[str] = Counter()
        groups = "" if named else "PD"
        super().__init__(
            "scale", prefills, decodes, model=MODEL, tps=(1,), chunks=(CHUNK_BYTES,), groups=groups
        )

    def _draw_build(self, *_: object) -> Build:
        self._prefills_left -= 1
        return Build(MODEL, P_RANKS if self._prefills_left >= 0 else 1)

    def note(self, *words: object) -> None:
        if words[0] == "message":
            data = words[3]
            assert isinstance(data, bytes)
            kind = data.index(b"\xa1t") + 2  # MessagePack: {"t": "Hello", ...
            self.sent[data[kind + 1 : kind + 1 + (data[kind] & 0x1F)].decode()] += 1

    def _sweep(self) -> None:
        """No looks at every byte: they would be most of the time."""

    def _watch(self) -> None:
        self.jobs.check()
        self.clock.after(0.1, self._watch)

    def workers(self, role: str) -> list[Worker]:
        lives = [machine.life for machine in self.of(role)]
        return [worker for life in lives if life is not None for worker in life.workers]

    def settle(self) -> None:
        self.turn_until(lambda: not self.jobs.open, 4 * LEASE)


def resident() -> int:
    return psutil.Process().memory_info().rss


def highest(workers: list[Worker], gauge: str) -> int:
    return max(int(worker.core.counters.gauges[gauge]()) for worker in workers)


def measure(prefills: int, decodes: int, partners: int, named: bool) -> dict[str, Any]:
    """Each D asks `partners` P's, and then the same ones once more. `named`: ids name the engines that have
    the requests, as p2pkv-proxy's do, and not any of their instances."""
    torch.set_num_threads(1)
    logging.getLogger("p2pkv").setLevel(logging.CRITICAL)
    began = resident()
    fleet = Fleet(prefills, decodes, named)
    fleet.wait(0.5)
    alone = resident()
    ps, ds = fleet.of("P"), fleet.of("D")
    pairs = [
        (ps[(number * partners + step) % prefills], d)
        for step in range(partners)
        for number, d in enumerate(ds)
    ]
    row: dict[str, Any] = {
        "prefill_engines": prefills,
        "decode_engines": decodes,
        "ranks": prefills * P_RANKS + decodes,
        "pairs": len(pairs),
        "ids_name_the_engines": named,
    }
    for name in ("first", "second"):
        fleet.sent.clear()
        cpu, requests = time.process_time(), 0
        for start in range(0, len(pairs), decodes):
            for p, d in pairs[start : start + decodes]:
                fleet.jobs.ask(p, d, plain=True, must=True, longest=TOKENS, shortest=TOKENS, fresh=True)
                requests += 1
            fleet.settle()
        row[f"{name}_cpu_ms_per_request"] = round(1e3 * (time.process_time() - cpu) / requests, 2)
        row[f"{name}_messages_per_request"] = round(fleet.sent.total() / requests, 1)
        row[f"{name}_hellos"] = fleet.sent["Hello"]
    fleet.wait(1.0)
    fleet.sent.clear()
    cpu = time.process_time()
    fleet.wait(IDLE_SECONDS)
    row |= {
        "idle_cpu_ms_per_rank_and_second": round(
            1e3 * (time.process_time() - cpu) / IDLE_SECONDS / row["ranks"], 3
        ),
        "idle_messages_per_pair_of_ranks_and_second": round(
            fleet.sent.total() / IDLE_SECONDS / (len(pairs) * P_RANKS), 2
        ),
        "most_links_of_a_p_rank": highest(fleet.workers("P"), "links"),
        "most_links_of_a_d_rank": highest(fleet.workers("D"), "links"),
        "most_peers_of_a_p_rank": highest(fleet.workers("P"), "peers"),
        "most_peers_of_a_d_rank": highest(fleet.workers("D"), "peers"),
        "kib_per_rank": round((alone - began) / 1024 / row["ranks"]),
        "kib_per_pair_of_ranks": round((resident() - alone) / 1024 / (len(pairs) * P_RANKS), 1),
    }
    fleet._rest("after the idle seconds")
    fleet.sent.clear()
    for number, (p, d) in enumerate(pairs):
        # P has not begun.
        d.order("load", key=f"waits-{number}", prefill=str(p.outside), prompt=0, tokens=TOKENS,
                after=0.0, leave=-1, recompute=False)  # fmt: skip
    fleet.wait(WAIT_SECONDS)
    beats = fleet.sent["Heartbeat"] + fleet.sent["HeartbeatAck"]
    row["waiting_beats_per_pair_of_ranks_and_second"] = round(
        beats / WAIT_SECONDS / (len(pairs) * P_RANKS), 2
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fleets", default="4x18,8x36,16x72,32x144", help="engines of P x engines of D")
    parser.add_argument("--partners", type=int, default=4, help="P's that each D asks")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    arguments = parser.parse_args()
    rows = []
    fleets = [tuple(map(int, each.split("x"))) for each in arguments.fleets.split(",")]
    for named, (p, d) in product((True, False), fleets):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            rows.append(process.submit(measure, p, d, arguments.partners, named).result())
        print(json.dumps(rows[-1]), flush=True)
        if arguments.json:
            machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
            arguments.json.write_text(json.dumps({"machine": machine, "fleets": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
