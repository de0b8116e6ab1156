"""The pages that people and machines look at: /metrics, /status and the dashboard that shows it.

The dashboard is one file, `dashboard.html`, that loads nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections import Counter
from dataclasses import astuple
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

from p2pkv import __version__

from .instances import Access, described
from .metrics import OUTCOMES, SAMPLE_SECONDS, Metrics

if TYPE_CHECKING:
    from .serving import Proxy

# Of the pairs that have worked together, the busiest.
_MOST_PAIRS = 200
_MOST_INSTANCES = 500


async def keep_history(metrics: Metrics) -> None:
    """Takes samples until cancelled."""
    while True:
        metrics.sample()
        await asyncio.sleep(SAMPLE_SECONDS)


async def metrics_page(metrics: Metrics, guard: Access, request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    guard.look(request)
    body, kind = metrics.exposition(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": kind})


async def status_page(proxy: Proxy, guard: Access, request: web.Request) -> web.Response:
    """GET /status: what the dashboard shows."""
    guard.look(request)
    return web.json_response(_status(proxy, guard), headers={"Cache-Control": "no-store"})


def _status(proxy: Proxy, guard: Access) -> dict[str, Any]:
    metrics, now = proxy.metrics, proxy.clock()
    instances = proxy.instances()
    running = Counter(
        (choice.prefill.ping.http_address, choice.decode.ping.http_address)
        for choice in proxy.admission.choices
        if choice.prefill is not None
    )
    return {
        "version": __version__,
        "uptime_seconds": round(now - metrics.began, 1),
        "dispatch": proxy.dispatch,
        "can_drain": bool(guard.token),
        **proxy.report(),
        "outcomes": {name: metrics.totals[name] for name in OUTCOMES},
        "stream_events": metrics.events,
        "first_token_seconds": dict(zip(("p50", "p95"), metrics.quantiles(0.5, 0.95), strict=True)),
        "instances": [described(proxy, each) for each in instances[:_MOST_INSTANCES]],
        "more_instances": max(0, len(instances) - _MOST_INSTANCES),
        "pairs": [
            {"prefill": p, "decode": d, "total": total, "running": running[p, d]}
            for (p, d), total in metrics.pairs.most_common(_MOST_PAIRS)
        ],
        "history_fields": ["at", "ended", "failed", "events", "running", "waiting", "first_token"],
        "history": [(round(each.at - now, 2), *astuple(each)[1:]) for each in metrics.history],
    }


async def dashboard(request: web.Request) -> web.Response:
    """GET /: it holds no data of its own, so everybody may load it."""
    page, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return web.Response(body=page, content_type="text/html", charset="utf-8", headers=headers)


@cache
def _page() -> tuple[bytes, str]:
    """The page, and a policy under which nothing but its own script and style runs."""
    text = files(__package__).joinpath("dashboard.html").read_text("utf-8")
    script, style = (
        " ".join(f"'sha256-{_digest(part)}'" for part in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S))
        for tag in ("script", "style")
    )
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
