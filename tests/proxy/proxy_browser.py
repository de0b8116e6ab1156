"""A headless Chromium, driven over its own debugging protocol."""

import asyncio
import base64
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

DEADLINE = 30.0
# A browser of this machine's, or the one that this variable names.
VARIABLE = "P2PKV_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-port=0",
)  # fmt: skip


def found() -> str | None:
    named = os.environ.get(VARIABLE)
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Browser:
    """One page. `complaints`: what it or the browser said of errors, also of violations of its policy."""

    socket: aiohttp.ClientWebSocketResponse
    session: str = ""
    complaints: list[str] = field(default_factory=list)
    _number: int = 0
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    async def listen(self) -> None:
        async for message in self.socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self.session} if self.session else {}
        await self.socket.send_json({"id": self._number, "method": method, "params": params, **session})
        async with asyncio.timeout(DEADLINE):
            said = await answer
        assert "error" not in said, said
        return said["result"]

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)
        await self.waits("location.protocol === 'http:' && document.readyState === 'complete'")

    async def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """As a window of these CSS pixels."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    async def scheme(self, name: str) -> None:
        await self.ask(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
        )

    async def value(self, expression: str) -> Any:
        """What JavaScript makes of it."""
        result = await self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def waits(self, expression: str) -> Any:
        async with asyncio.timeout(DEADLINE):
            while not (value := await self.value(expression)):
                await asyncio.sleep(0.05)
        return value

    async def picture(self) -> bytes:
        shot = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browsing(command: str) -> AsyncIterator[Browser]:
    """An empty page of a browser that has just been started, and is ended afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            command,
            *OPTIONS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            endpoint = await _endpoint(process)
            async with (
                aiohttp.ClientSession() as client,
                client.ws_connect(endpoint, max_msg_size=0) as socket,
            ):
                browser = Browser(socket)
                listening = asyncio.create_task(browser.listen())
                made = await browser.ask("Target.createTarget", url="about:blank")
                target = made["targetId"]
                attached = await browser.ask("Target.attachToTarget", targetId=target, flatten=True)
                browser.session = attached["sessionId"]
                for domain in ("Page", "Runtime", "Log"):
                    await browser.ask(f"{domain}.enable")
                yield browser
                listening.cancel()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(DEADLINE):
                    await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _endpoint(process: asyncio.subprocess.Process) -> str:
    said = b""
    async with asyncio.timeout(DEADLINE):
        while line := await process.stderr.readline():
            said += line
            if match := re.search(rb"DevTools listening on (ws://\S+)", line):
                return match[1].decode()
    raise AssertionError(f"the browser ended: {said.decode(errors='replace')}")
