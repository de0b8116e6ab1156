"""The files of the proxy that one request passes, by a trace of it: docs/design.md names them.

The request is an ordinary one with a P and a D, streamed, over connections that have been used before, with
the proxy's default options. A file counts if any function of it runs while the request is served. What runs
beside it, such as the watch over instances, does not run each time: so of several traces the files count that
are in all of them.
"""

import asyncio
import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

sys.path.append(str(Path(__file__).parents[1]))  # where this is run by itself

from proxy_behaviours import streams_at_once
from proxy_fakes import Deployment, deployed, quiet

import p2pkv_proxy

HERE = Path(p2pkv_proxy.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
BODY = {"model": "tiny", "prompt": "hi", "stream": True}


async def files_of_one(deployment: Deployment) -> Counter[str]:
    """The files of one request, and how many calls there were in each."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(HERE):
            calls[str(path.relative_to(HERE))] += 1

    sys.setprofile(note)
    try:
        async with await deployment.post(BODY) as response:
            assert response.status == 200 and b"second" in await response.read()
        await asyncio.sleep(0.05)  # P's call may end after the answer
    finally:
        sys.setprofile(None)
    await quiet(deployment)
    return calls


async def files_passed() -> Counter[str]:
    """The files that every request passes, and how many calls the shortest of the traces had in each."""
    async with deployed("concurrent", 1, 1) as deployment:
        deployment.d.behaviour = streams_at_once
        for pinger in deployment.pingers.values():
            pinger._interval = 1000.0
        await files_of_one(deployment)
        traces = [await files_of_one(deployment) for _ in range(4)]
        passed = traces[0]
        for each in traces[1:]:
            passed &= each
        return passed


async def test_a_request_passes_the_twelve_files_that_the_page_names() -> None:
    table = PAGE.partition("**A request** passes twelve files")[2].partition("\nSome requests pass others")[0]
    named = set(re.findall(r"^\| `([^`]+\.py)`", table, re.MULTILINE))
    assert len(named) == 12
    assert set(await files_passed()) == named


if __name__ == "__main__":
    found = asyncio.run(files_passed())
    for name, count in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{name:26} {count:4} calls")
    print(f"{len(found)} files")
