"""A server that answers as vLLM does, and computes nothing: for tests of the benchmarks' own code.

fake_vllm.py PORT [STATUS]: with a STATUS other than 200, that is how it answers every prompt.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web


async def complete(request: web.Request) -> web.StreamResponse:
    status: int = request.app[STATUS]
    body = await request.json()
    if status != 200:
        return web.json_response({"error": "this server only fails"}, status=status)
    await asyncio.sleep(len(body["prompt"]) * 1e-5)
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": {"remote": 1}})
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await response.write(b"data: " + json.dumps({"choices": [{"text": "a"}]}).encode() + b"\n\n")
        await asyncio.sleep(0.001)
    await response.write(b"data: [DONE]\n\n")
    return response


async def metrics(_request: web.Request) -> web.Response:
    return web.Response(text="vllm:external_prefix_cache_hits_total 7\n")


async def healthy(_request: web.Request) -> web.Response:
    return web.Response()


STATUS = web.AppKey("STATUS", int)


def main() -> None:
    app = web.Application()
    app[STATUS] = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", healthy)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
