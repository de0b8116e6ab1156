"""The proxy's command, which tells on SIGUSR1 what it holds: run as `python soak_peer.py OPTIONS`.

A line of its log: the coroutines of its tasks, and how many objects there are that belong to one request.
"""

import asyncio
import gc
import json
import signal
import sys
from collections import Counter
from typing import Any

import aiohttp

from p2pkv_proxy.admission import RequestPlace
from p2pkv_proxy.attempt import Attempt
from p2pkv_proxy.cli import main
from p2pkv_proxy.relay import Relay
from p2pkv_proxy.upstream import Call, Reply

OF_REQUESTS = (Attempt, RequestPlace, Relay, Call, Reply, aiohttp.ClientResponse)
"""Records of requests are not among them: asyncio keeps the context of a timer that was cancelled, and with
it the record, until it has a hundred such timers or their time comes."""


def objects_of_requests(*, collect: bool = True) -> Counter[str]:
    """How many there are, by class."""
    if collect:
        gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in OF_REQUESTS)


def tell(*_: Any) -> None:
    """Runs in the loop's own thread."""
    tasks = Counter(str(getattr(task.get_coro(), "__qualname__", "?")) for task in asyncio.all_tasks())
    print(
        f"holds: {json.dumps({'tasks': tasks, 'objects': objects_of_requests()})}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, tell)
    sys.exit(main())
