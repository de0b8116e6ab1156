"""A stand-in for the example proxy of the original P2pNcclConnector: the same protocol and the same design.

For tests: do our instances register, are the answers right? It is written from the protocol's description:

- A ZMQ ROUTER takes pings of one frame: a msgpack map with `type` ("P" or "D"), `http_address` and
  `zmq_address`. Other fields are not read. Of an unknown type, discovery ends. It forgets an instance five
  seconds after its last ping.
- A request gets an id, ___prefill_addr_{P}___decode_addr_{D}_{32 hex digits}, in the header X-Request-Id. P
  gets it with max_tokens=1; when P's answer has been read, D gets it as the client has sent it.
- One counter chooses P and D. Each call of an instance makes an aiohttp session of its own.

`/health` is an addition: 200 when a P and a D are there.

    python tests/support/classic_router.py --port 10001 --discovery 127.0.0.1:30001
"""

import argparse
import asyncio
import itertools
import json
import os
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

PATHS = ("/v1/completions", "/v1/chat/completions")
LIFE_SECONDS = 5.0


class ClassicRouter:
    """Which instances there are, and the way of a request through two of them. `instances`: of each type,
    HTTP address -> (ZMQ address, time until which it is there); `ended`: what ended discovery, if anything
    did."""

    def __init__(self, life: float = LIFE_SECONDS) -> None:
        self.instances: dict[str, dict[str, tuple[str, float]]] = {"P": {}, "D": {}}
        self.ended: str | None = None
        self._life = life
        self._count = itertools.count()

    def take(self, frame: bytes) -> None:
        """One ping. Raises KeyError for a type that is neither P nor D."""
        ping = msgspec.msgpack.decode(frame)
        until = time.monotonic() + self._life
        self.instances[ping["type"]][ping["http_address"]] = (ping["zmq_address"], until)

    async def discover(self, endpoint: str) -> None:
        """Take pings at `endpoint` until cancelled, or until one cannot be read."""
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(endpoint)
            while self.ended is None:
                _identity, frame = await router.recv_multipart()
                try:
                    self.take(frame)
                except (msgspec.MsgspecError, LookupError, TypeError) as error:
                    self.ended = f"{type(error).__name__}: {error}"

    def there(self, kind: str) -> list[tuple[str, str]]:
        """HTTP and ZMQ addresses of those whose life has not ended."""
        now = time.monotonic()
        return [(http, zmq) for http, (zmq, until) in self.instances[kind].items() if until > now]

    async def answer(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """D's answer, piece by piece, after P has answered."""
        number = next(self._count)
        (p_http, p_zmq), (d_http, d_zmq) = (
            found[number % len(found)] for found in (self.there("P"), self.there("D"))
        )
        name = f"___prefill_addr_{p_zmq}___decode_addr_{d_zmq}_{uuid.uuid4().hex}"
        one = {**body, "max_tokens": 1}
        if "max_completion_tokens" in one:
            one["max_completion_tokens"] = 1
        async for _ in _call(f"http://{p_http}{path}", one, name):
            pass
        async for piece in _call(f"http://{d_http}{path}", body, name):
            yield piece


async def _call(url: str, body: dict[str, Any], name: str) -> AsyncIterator[bytes]:
    headers = {"X-Request-Id": name, "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}
    timeout = aiohttp.ClientTimeout(total=6 * 3600)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, json=body, headers=headers) as response,
    ):
        response.raise_for_status()
        async for piece in response.content.iter_chunked(1024):
            yield piece


def by_aiohttp(router: ClassicRouter) -> web.Application:
    async def serve(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        kind = "text/event-stream" if body.get("stream") else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind})
        pieces = router.answer(request.path, body)
        first = await anext(pieces)
        await response.prepare(request)
        await response.write(first)
        async for piece in pieces:
            await response.write(piece)
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=200 if router.there("P") and router.there("D") else 503)

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.get("/health", health), *(web.post(path, serve) for path in PATHS)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=10001)
    parser.add_argument("--discovery", default="127.0.0.1:30001", metavar="HOST:PORT")
    args = parser.parse_args()
    app = by_aiohttp(router := ClassicRouter())

    async def discovering(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(router.discover(f"tcp://{args.discovery}"))
        yield
        task.cancel()

    app.cleanup_ctx.append(discovering)
    web.run_app(app, host=args.host, port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
