"""A P and a D with few file descriptors. Reads a line, does what it says, answers with one line.

`python descriptors_peer.py LIMIT [SECRET]` first says the two addresses; then `transfer KEY`, `dial PORT`,
`open` (descriptors in use) and `end`.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from engine_support import Engine, Geometry, engines, prefill, wrong_cells
from memory_links import MemoryNetwork

from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.waiting import wait_for

BLOCKS = list(range(6))


def transfer(p: Engine, d: Engine, key: str) -> str:
    d.do(do.Expect(key, p.address, 32, b"digest"))
    prefill(p, key, d.address, 32, BLOCKS, chunk=32)
    d.wait(do.Begun(key))
    d.do(do.Load(key, 0, 31, (BLOCKS,)))
    d.wait(do.Loaded(key))
    assert wrong_cells(d.ranks[0], BLOCKS, 0, 31) == []
    return "transferred"


def dial(d: Engine, port: str) -> str:
    """Ask a P at `port` for a prompt, in vain; why it failed."""
    key = f"dialed-{port}"
    d.do(do.Expect(key, Address("127.0.0.1", int(port)), 32, b"digest"))
    failed: list[str] = []

    def heard() -> bool:
        failed[:] = [event.reason for event in d.ranks[0].events(do.LoadFailed) if event.key == key]
        return bool(failed)

    wait_for(heard)
    return failed[0]


def main() -> None:
    limit = int(sys.argv[1])
    secret = sys.argv[2].encode() if len(sys.argv) > 2 else None
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    network = MemoryNetwork()
    links = lambda side, rank: network.rank()  # noqa: E731
    with engines(Geometry(), Geometry(), links, secret=secret, lease_seconds=2.0) as (p, d):
        print(p.address, d.address, flush=True)
        for line in sys.stdin:
            match line.split():
                case ["transfer", key]:
                    print(transfer(p, d, key), flush=True)
                case ["dial", port]:
                    print(dial(d, port), flush=True)
                case ["open"]:
                    # Counting needs no descriptor; listing a folder would.
                    used = sum(1 for number in range(limit) if _is_open(number))
                    print(used, flush=True)
                case _:
                    break
        assert p.ranks[0].rank.alive and d.ranks[0].rank.alive
    print("ended", flush=True)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
