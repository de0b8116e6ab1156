"""The proxy's pages for operators and machines: /health, /ready, /instances and their drains, /status, and
the dashboard, a file that loads nothing from elsewhere. No answer holds a ZMQ address or a secret.
"""

import asyncio
import base64
import hashlib
import re
from collections import Counter
from functools import cache
from importlib.resources import files
from typing import Any

from aiohttp import web
from msgspec import to_builtins

from p2pkv import __version__
from p2pkv.pairing import Address

from .http import ProxyError, error_response, retry_after
from .membership.instance import ROLE_NAMES, ROLES, Instance
from .metrics import OUTCOMES, SAMPLE_SECONDS, Sample, quantiles
from .service import STOPPING, Proxy
from .settings import float_of

_LONGEST_DRAIN = 86400.0
UNAVAILABLE = "unavailable"


async def health_page(proxy: Proxy, request: web.Request) -> web.Response:
    """GET /health: 200 if a request can be served, else 503; and what is missing. With
    `?prefill=1&decode=2` it is 200 only if at least so many instances can be given requests."""
    found = report(proxy)
    enough = all(found[name] >= _number(request, name) for name in ROLES)
    return _verdict(found, found["status"] != UNAVAILABLE and enough)


async def ready_page(proxy: Proxy, request: web.Request) -> web.Response:
    """GET /ready: 200 if a request can be served, else 503; with what that needs and what there is."""
    found = report(proxy)
    good = found["status"] != UNAVAILABLE
    needs = "a decode instance" if proxy.limits.decode_alone else "a prefill and a decode instance"
    answer = {name: found[name] for name in ("prefill", "decode", "missing")}
    return _verdict({"ready": good, "needs": needs, **answer}, good)


def _verdict(found: dict[str, Any], good: bool) -> web.Response:
    return web.json_response(found, status=200 if good else 503, headers=None if good else retry_after())


def report(proxy: Proxy) -> dict[str, Any]:
    """For /health and /status: whether requests can be served, what is missing, gauges and counters."""
    now = proxy.clock()
    missing = [STOPPING] if proxy.active.stopping else proxy.router.missing(now)
    there = {name: len(proxy.registry.routable(role, now)) for name, role in ROLES.items()}
    able = there["decode"] > 0 and (proxy.limits.decode_alone > 0 or proxy.router.has_pair(now))
    return {
        "status": UNAVAILABLE if not able or proxy.active.stopping else "degraded" if missing else "ok",
        **there,
        "missing": missing,
        "gauges": proxy.gauges(),
        "counters": proxy.counted(),
    }


def _number(request: web.Request, name: str) -> int:
    """How many instances with this role a request for /health demands; 0 if it names none."""
    text = request.query.get(name, "0")
    if not re.fullmatch(r"\d{1,9}", text):
        raise ProxyError(400, f"/health?{name}={text[:20]}: expected a whole number of instances, such as 1.")
    return int(text)


# An instance may list any number of adapters.
_MAX_NAMES = 32


def described(proxy: Proxy, instance: Instance) -> dict[str, Any]:
    """One instance, for /instances and the dashboard."""
    names, report = sorted(instance.names), instance.report
    return {
        "role": "both" if instance.role == "both" else ROLE_NAMES[instance.role],
        "address": instance.ping.http_address,
        "rank": instance.ping.dp_rank,
        "state": proxy.state_of(instance),
        "models": names[:_MAX_NAMES],
        "more_models": max(0, len(names) - _MAX_NAMES),
        "running": instance.in_flight,
        "load": instance.load,
        "alone": instance.decode_alone,
        "reported": None if report is None else to_builtins(report.work),
        "last_ping_seconds": round(proxy.clock() - instance.last_seen, 1),
        "pauses": instance.breaker.opened,
    }


async def instances_page(proxy: Proxy, request: web.Request) -> web.Response:
    proxy.guard.look(request)
    return web.json_response({"instances": [described(proxy, each) for each in proxy.instances()]})


async def drain(proxy: Proxy, request: web.Request, *, drained: bool) -> web.Response:
    """POST /instances/{address}/drain and .../resume, for all ranks at this HTTP address. With `move_after`,
    requests that still run there after so many seconds go on elsewhere, if they can."""
    proxy.guard.change(request)
    seconds = None
    try:
        wanted = Address.parse(request.match_info["address"])
        if drained and "move_after" in request.query:
            text = request.query["move_after"]
            if not 0 <= (seconds := float_of(text)) <= _LONGEST_DRAIN:
                most = f"{_LONGEST_DRAIN:g}"
                raise ValueError(f"move_after is {text!r}: give seconds from 0 to {most}, such as 30")
    except ValueError as error:
        raise ProxyError(400, f"{error}.") from None
    meant = [each for each in proxy.instances() if Address.parse(each.ping.http_address) == wanted]
    if not meant:
        why = "No instance with this HTTP address is registered; GET /instances lists those that are."
        return error_response(404, why)
    for instance in meant:
        proxy.registry.drain(instance, drained)
    proxy.admission.advance()
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, proxy.move_away, meant)
    return web.json_response({"instances": [described(proxy, each) for each in meant]})


# /status shows at most so many pairs, the busiest, and so many instances.
_MAX_PAIRS = 200
_MAX_INSTANCES = 500


async def keep_history(proxy: Proxy) -> None:
    """Takes samples until cancelled."""
    while True:
        proxy.metrics.sample(proxy.admission.under_way, proxy.admission.waiting)
        await asyncio.sleep(SAMPLE_SECONDS)


async def status_page(proxy: Proxy, request: web.Request) -> web.Response:
    """GET /status: what the dashboard shows."""
    proxy.guard.look(request)
    metrics, now = proxy.metrics, proxy.clock()
    instances = proxy.instances()
    running = Counter(
        (choice.prefill.ping.http_address, choice.decode.ping.http_address)
        for choice in proxy.admission.choices
        if choice.prefill is not None
    )
    status = {
        "version": __version__,
        "uptime_seconds": round(now - metrics.began, 1),
        "dispatch": proxy.dispatch,
        "can_drain": bool(proxy.guard.token),
        **report(proxy),
        "outcomes": {name: metrics.totals[name] for name in OUTCOMES},
        "placement": {"by": proxy.routing.placement, **proxy.router.costs.status()},
        "stream_events": metrics.events,
        "first_token_seconds": {
            **dict(zip(("p50", "p95"), quantiles(metrics.recent(), 0.5, 0.95), strict=True)),
            "p50_from_prefill": quantiles(metrics.recent(by_prefill=True), 0.5)[0],
            "p50_from_decode": quantiles(metrics.recent(by_prefill=False), 0.5)[0],
        },
        "instances": [described(proxy, each) for each in instances[:_MAX_INSTANCES]],
        "more_instances": max(0, len(instances) - _MAX_INSTANCES),
        "pairs": [
            {"prefill": p, "decode": d, "total": total, "running": running[p, d]}
            for (p, d), total in metrics.pairs.most_common(_MAX_PAIRS)
        ],
        "history_fields": Sample._fields,
        "history": [(round(each.at - now, 2), *each[1:]) for each in metrics.history],
    }
    return web.json_response(status, headers={"Cache-Control": "no-store"})


async def dashboard(request: web.Request) -> web.Response:
    """GET /: a page without data of its own, so everyone may load it."""
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
    """The page, and a Content-Security-Policy that allows only its own script and style."""
    text = files(__package__).joinpath("dashboard.html").read_text("utf-8")

    def digests(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        made = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{each}'" for each in made)

    policy = (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy
