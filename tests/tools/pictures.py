"""Makes the pictures of the pages: `make pictures`.

docs/pair.svg is drawn from BOXES and ARROWS. docs/dashboard.png is a screenshot of a real proxy's dashboard
in front of the tests' fake instances; it takes a Chromium (Debian: `apt-get install chromium`).
"""

import argparse
import asyncio
import io
import itertools
import random
import sys
from html import escape
from pathlib import Path

from aiohttp import web
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "proxy"))
PAIR = ROOT / "docs" / "pair.svg"
DASHBOARD = ROOT / "docs" / "dashboard.png"

WIDTH, HEIGHT = 760, 300
BOXES = {
    (20, 34, 90, 48): ("client", ""),
    (220, 24, 320, 68): ("p2pkv-proxy", "chooses P and D, writes both into the request id"),
    (40, 170, 220, 90): ("P: prefill", "vLLM, kv_producer"),
    (500, 170, 220, 90): ("D: decode", "vLLM, kv_consumer"),
}
"""Left, top, width, height: its name, and what stands below."""

ARROWS = {
    "M110 58H216": ("both", (165, 50), "HTTP, as vLLM's"),
    "M300 92 180 166": ("there", (160, 130), "the prompt"),
    "M460 92 580 166": ("both", (626, 130), "the prompt; the answer"),
    "M496 240H264": ("control", (380, 258), "control: ZMQ, opened by D"),
}
"""A path: its kind, and where what stands beside it."""

KV = ("M262 204H484", ("KV, layer by layer", "GPUs: NCCL. CPUs: shared memory, TCP"))
BELOW = "P and D ping the proxy, so instances may come and go while it runs"
GREY, BLUE = "#57606a", "#0969da"


def pair() -> str:
    def text(x: float, y: float, words: str, more: str = 'font-size="12"') -> str:
        return f'<text x="{x:g}" y="{y:g}" {more}>{escape(words, quote=False)}</text>'

    def marker(name: str, size: float, tip: int, colour: str) -> str:
        box = f'viewBox="0 0 8 8" refX="{tip}" refY="4" markerWidth="{size:g}" markerHeight="{size:g}"'
        head = f'<marker id="{name}" {box} orient="auto-start-reverse">'
        return f'{head}<path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'

    ends = {"there": 'marker-end="url(#thin)"', "both": 'marker-start="url(#thin)" marker-end="url(#thin)"'}
    ends["control"] = f'stroke-dasharray="5 4" {ends["both"]}'
    path, above = KV
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="14" fill="#1f2328" text-anchor="middle">',
        "<!-- Drawn by tests/tools/pictures.py -->",
        "<title>A client, the proxy, a prefill instance P and a decode instance D</title>",
        f"<defs>{marker('thin', 8, 7, GREY)}{marker('thick', 3.4, 6, BLUE)}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
    ]
    for (x, y, width, height), (name, words) in BOXES.items():
        middle, line = x + width / 2, y + height / 2
        place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        lines.append(f'<rect {place} rx="6" fill="#f6f8fa" stroke="{GREY}"/>')
        lines.append(text(middle, line - 6 if words else line + 5, name, 'font-weight="600"'))
        if words:
            lines.append(text(middle, line + 16, words))
    for arrow, (kind, (x, y), words) in ARROWS.items():
        lines.append(f'<path d="{arrow}" fill="none" stroke="{GREY}" stroke-width="1.4" {ends[kind]}/>')
        lines.append(text(x, y, words))
    lines.append(f'<path d="{path}" stroke="{BLUE}" stroke-width="6" marker-end="url(#thick)"/>')
    lines.append(text(WIDTH / 2, 168, above[0], f'font-size="13" font-weight="600" fill="{BLUE}"'))
    lines.append(text(WIDTH / 2, 188, above[1], f'font-size="11" fill="{BLUE}"'))
    return "\n".join([*lines, text(WIDTH / 2, 286, BELOW), "</svg>", ""])


MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CLIENTS, SECONDS = 12, 40.0
TOKENS, TOKEN_SECONDS = 40, 0.06
SIZE = (1120, 730)


async def dashboard(chromium: str) -> bytes:
    """A PNG of the dashboard when requests have passed for 40 s; one D of three has been drained."""
    from proxy_behaviours import DONE, Seen, completion, stream_of
    from proxy_browser import browsing
    from proxy_process import served

    chances = random.Random(1)

    async def prefill(request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(chances.uniform(0.2, 0.5))
        return web.json_response(completion(seen))

    async def decode(request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(chances.uniform(0.3, 0.7))
        steps = [step for number in range(TOKENS) for step in (f" {number}", a_token_later)]
        return await stream_of(*steps, DONE)(request, seen)

    async def a_token_later(*_: object) -> None:
        await asyncio.sleep(TOKEN_SECONDS)

    async with served("--admin-token", "token", prefill=0, decode=0) as proxy, browsing(chromium) as browser:
        for role in ("P", "P", "D", "D", "D"):
            instance = await proxy.add(
                role, model=MODEL, behaviour=prefill if role == "P" else decode, models=(MODEL,)
            )
            await proxy.says(f"{instance.http_address} is ready")
        url, client = proxy.url, proxy.client

        async def ask() -> None:
            for number in itertools.count():
                body = {"model": MODEL, "prompt": f"{number} {chances.random()}", "stream": True}
                async with client.post(f"{url}/v1/completions", json=body) as response:
                    await response.read()

        async with asyncio.TaskGroup() as clients:
            asking = [clients.create_task(ask()) for _ in range(CLIENTS)]
            await browser.size(*SIZE)
            await browser.open(url)
            await asyncio.sleep(SECONDS / 2)
            order = f"{url}/instances/{instance.http_address}/drain"
            async with client.post(order, headers={"Authorization": "Bearer token"}) as response:
                response.raise_for_status()
            await asyncio.sleep(SECONDS / 2)
            picture = await browser.picture()
            for each in asking:
                each.cancel()
        assert browser.complaints == []
    return picture


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAIR.write_text(pair())
    from proxy_browser import VARIABLE, found

    chromium = found()
    if chromium is None:
        sys.exit(f"docs/pair.svg is done. docs/dashboard.png takes a Chromium: install it or set {VARIABLE}")
    Image.open(io.BytesIO(asyncio.run(dashboard(chromium)))).quantize().save(DASHBOARD, optimize=True)


if __name__ == "__main__":
    main()
