"""The pages that people and machines look at: /metrics, /status and the dashboard that shows it.

The dashboard is one file, `dashboard.html`, that loads nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from aiohttp import web

from p2pkv import __version__

from .instances import Access, added, described, merged_instances
from .metrics import OUTCOMES, SAMPLE_SECONDS, Metrics, quantiles
from .siblings import Siblings

if TYPE_CHECKING:
    from .service import Proxy

# Of the pairs that have worked together, the busiest.
_MOST_PAIRS = 200
_MOST_INSTANCES = 500


async def keep_history(metrics: Metrics) -> None:
    """Takes samples until cancelled."""
    while True:
        metrics.sample()
        await asyncio.sleep(SAMPLE_SECONDS)


async def metrics_page(
    siblings: Siblings, metrics: Metrics, guard: Access, request: web.Request
) -> web.Response:
    """GET /metrics, for Prometheus."""
    guard.look(request)
    said = await siblings.ask("metrics")
    body, kind = metrics.exposition(request.headers.get("Accept", ""), said.parts)
    return web.Response(body=body, headers={"Content-Type": kind})


async def status_page(siblings: Siblings, guard: Access, request: web.Request) -> web.Response:
    """GET /status: what the dashboard shows."""
    guard.look(request)
    said = await siblings.ask("status")
    page = merged(said.parts, complete=said.complete)
    return web.json_response(page, headers={"Cache-Control": "no-store"})


def status_of(proxy: Proxy, guard: Access) -> dict[str, Any]:
    """One worker's part of it."""
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
        "first_token_seconds": metrics.recent(),
        "instances": [described(proxy, each) for each in instances[:_MOST_INSTANCES]],
        "more_instances": max(0, len(instances) - _MOST_INSTANCES),
        "pairs": [
            {"prefill": p, "decode": d, "total": total, "running": running[p, d]}
            for (p, d), total in metrics.pairs.most_common(_MOST_PAIRS)
        ],
        "history_fields": ["at", "ended", "failed", "events", "running", "waiting", "first_token"],
        "history": [(round(each.at - now, 2), *astuple(each)[1:]) for each in metrics.history],
    }


# What all workers say, as if they were one.

# From the worst to the best.
_STATUSES = ("unavailable", "degraded", "ok")
# Every worker sees the same ones.
_SEEN_BY_ALL = ("silent", "engines_paused", "breakers_open", "claims_refused")


def merged(parts: Sequence[dict[str, Any]], *, complete: bool = True) -> dict[str, Any]:
    """The page, of at least one worker's part; `complete`: of all workers'."""
    pairs = added([{(each["prefill"], each["decode"]): each for each in part["pairs"]} for part in parts])
    first_tokens = [seconds for part in parts for seconds in part["first_token_seconds"]]
    return {
        **parts[0],
        "workers": len(parts),
        "uptime_seconds": max(part["uptime_seconds"] for part in parts),
        "status": min((part["status"] for part in parts), key=_STATUSES.index),
        "missing": list(dict.fromkeys(each for part in parts for each in part["missing"])),
        **{name: min(part[name] for part in parts) for name in ("prefill", "decode")},
        **{name: _summed([part[name] for part in parts]) for name in ("gauges", "counters", "outcomes")},
        "stream_events": sum(part["stream_events"] for part in parts),
        "first_token_seconds": dict(zip(("p50", "p95"), quantiles(first_tokens, 0.5, 0.95), strict=True)),
        "instances": merged_instances([part["instances"] for part in parts], complete=complete),
        "pairs": sorted(pairs, key=lambda pair: -pair["total"])[:_MOST_PAIRS],
        "history": _merged_history([part["history"] for part in parts]),
    }


def _summed(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: (max if name in _SEEN_BY_ALL else sum)(part[name] for part in parts) for name in parts[0]}


def _merged_history(parts: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Samples from about the same moment make one: all workers take them at the same pace."""
    rows = []
    for samples in zip_longest(*(reversed(part) for part in parts)):
        there = [sample for sample in samples if sample is not None]
        first_tokens = [sample[-1] for sample in there if sample[-1] is not None]
        amounts = [sum(column) for column in list(zip(*there, strict=True))[1:-1]]
        rows.append([there[0][0], *amounts, max(first_tokens, default=None)])
    return rows[::-1]


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
