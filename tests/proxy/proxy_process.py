"""The real command in a process of its own, with its log gathered."""

import asyncio
import contextlib
import os
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from proxy_fakes import Front

from p2pkv.demo.processes import free_ports
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
DEADLINE = 30.0


# The development mode tells of what was not closed.
PROXY = ("-X", "dev", "-m", "p2pkv_proxy")


class Command:
    """`python -m proxy`, or another `program` that is it, with its log gathered."""

    def __init__(self, *arguments: str, program: Sequence[str] = PROXY) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def says(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + DEADLINE
        while (match := re.search(pattern, self.log)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in:\n{self.log}"
            assert self.process.poll() is None, f"it ended:\n{self.log}"
            time.sleep(0.02)
        return match

    def stopped(self) -> None:
        """It ends with 0, and its log tells of nothing that was left behind, or not foreseen."""
        assert self.end() == 0, self.log
        told = re.search("Traceback|destroyed|never retrieved|Warning|Unclosed|ERROR", self.log)
        assert told is None, self.log

    def end(self) -> int:
        status = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return status


@contextlib.contextmanager
def running(*arguments: str, program: Sequence[str] = PROXY) -> Iterator[Command]:
    command = Command(*arguments, program=program)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
        command.end()


@dataclass(kw_only=True)
class Served(Front):
    """A proxy in a process of its own, with fake instances in this one, and a client."""

    command: Command

    async def says(self, pattern: str) -> re.Match[str]:
        return await asyncio.to_thread(self.command.says, pattern)

    async def ready(self, prefill: int, decode: int) -> None:
        async def there() -> bool:
            page = (await self.get("/status"))[1]
            return (page["prefill"], page["decode"]) == (prefill, decode)

        await eventually(there, "instances", DEADLINE)

    def terminate(self) -> None:
        self.command.process.terminate()

    async def ended(self) -> None:
        await asyncio.to_thread(self.command.stopped)


@contextlib.asynccontextmanager
async def served(
    *arguments: str,
    prefill: int = 1,
    decode: int = 1,
    tls: ssl.SSLContext | bool = True,
    keep: bool = True,
    program: Sequence[str] = PROXY,
) -> AsyncIterator[Served]:
    """`keep`: connections of the client are used again."""
    async with AsyncExitStack() as cleanup:
        discovery = f"127.0.0.1:{free_ports()}"
        port = () if "--port" in arguments else ("--port", "0")
        arguments = (*port, "--discovery", discovery, *arguments)
        command = cleanup.enter_context(running(*arguments, program=program))
        url = (await asyncio.to_thread(command.says, r"serving on (https?://[^ ,]+),"))[1]
        client = await cleanup.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=not keep, ssl=tls),
                timeout=aiohttp.ClientTimeout(total=DEADLINE),
            )
        )
        proxy = Served(url, discovery, client, cleanup, command=command)
        for number, role in ((prefill, "P"), (decode, "D")):
            for _ in range(number):
                await proxy.add("P" if role == "P" else "D")
        for each in proxy.instances:
            await proxy.says(f"{each.http_address} is ready")
        yield proxy
