"""A P and a D with few file descriptors. JSON lines both ways: `descriptors_peer.py LIMIT [SECRET]`."""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from p2pkv.pairing import Address
from support.engine.engines import Engine, Geometry, engines, plain_links
from support.engine.transfers import expect, failure, push


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def obey(p: Engine, d: Engine, order: dict[str, Any], limit: int) -> object:
    match order["do"]:
        case "transfer":
            push(p, d, order["key"])
            return "transferred"
        case "dial":
            expect(Address("127.0.0.1", order["port"]), d, "dialed")
            return failure(d, "dialed", 20.0)
        case _:
            # Counting needs no descriptor; listing a folder would.
            return sum(1 for number in range(limit) if _is_open(number))


def main(limit: int, secret: str = "") -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    options = {"secret": secret.encode() or None, "lease_seconds": 2.0}
    with engines(Geometry(), Geometry(), plain_links("memory"), **options) as (p, d):
        say(addresses=[str(p.address), str(d.address)])
        for line in sys.stdin:
            if (order := json.loads(line))["do"] == "end":
                break
            say(answer=obey(p, d, order, limit))
        assert p.ranks[0].rank.alive and d.ranks[0].rank.alive
    say(answer="ended")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
