"""A server that answers as vLLM does, and computes nothing: for tests of the benchmarks' own code.

fake_vllm.py PORT
"""

import asyncio
import json
import sys

from aiohttp import web


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    await asyncio.sleep(len(body["prompt"]) * 1e-5)
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "a"}]})
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await response.write(b"data: " + json.dumps({"choices": [{"text": "a"}]}).encode() + b"\n\n")
        await asyncio.sleep(0.001)
    await response.write(b"data: [DONE]\n\n")
    return response


async def healthy(_request: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", healthy)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
