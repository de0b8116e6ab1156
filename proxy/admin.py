"""What operators and machines see of the proxy: health, instances and their drains, /status, /metrics and the
dashboard, a file that loads nothing from elsewhere. No answer holds a ZMQ address or a secret.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain, zip_longest
from operator import itemgetter
from typing import Any

from aiohttp import web
from msgspec import to_builtins

from p2pkv import __version__
from p2pkv.pairing import Address

from .access import Access
from .errors import ProxyError, error_response, retry_after
from .exposition import page
from .membership.instance import ROLE_NAMES, WORST_FIRST, Instance, Role
from .metrics import OUTCOMES, SAMPLE_SECONDS, Metrics, Sample, quantiles
from .service import STOPPING, Proxy
from .siblings import Siblings

_LONGEST_DRAIN = 86400.0
_ROLES: dict[str, Role] = {"prefill": "P", "decode": "D"}
UNAVAILABLE = "unavailable"


async def health_page(proxy: Proxy, request: web.Request) -> web.Response:
    """GET /health: 200 if a request can be served, else 503; and what is missing.

    With `?prefill=1&decode=2` it is 200 only if so many are there.
    """
    found = report(proxy)
    enough = all(found[name] >= _number(request, name) for name in _ROLES)
    return _verdict(found, found["status"] != UNAVAILABLE and enough)


async def ready_page(proxy: Proxy, request: web.Request) -> web.Response:
    """GET /ready: 200 if a request can be served, and by whom it is; else 503."""
    found = report(proxy)
    good = found["status"] != UNAVAILABLE
    needs = "a decode instance" if proxy.limits.alone else "a prefill and a decode instance"
    answer = {name: found[name] for name in ("prefill", "decode", "missing")}
    return _verdict({"ready": good, "needs": needs, **answer}, good)


def _verdict(found: dict[str, Any], good: bool) -> web.Response:
    return web.json_response(found, status=200 if good else 503, headers=None if good else retry_after())


def report(proxy: Proxy) -> dict[str, Any]:
    """Whether requests can be served, which instances are missing, what is held and what was counted."""
    now = proxy.clock()
    missing = [STOPPING] if proxy.active.stopping else proxy.router.missing(now)
    there = {name: len(proxy.registry.routable(role, now)) for name, role in _ROLES.items()}
    able = there["decode"] > 0 and (proxy.limits.alone > 0 or proxy.router.helped(now))
    serves = able and not proxy.active.stopping
    return {
        "status": UNAVAILABLE if not serves else "degraded" if missing else "ok",
        **there,
        "missing": missing,
        "gauges": proxy.gauges(),
        "counters": proxy.counted(),
    }


def _number(request: web.Request, name: str) -> int:
    """How many instances of one kind a question about health asks for."""
    text = request.query.get(name, "0")
    if not text.isdecimal():
        raise ProxyError(400, f"`{name}` in /health?{name}=... is a number of instances, such as 1.")
    return int(text)


# An instance may list any number of adapters.
_MOST_NAMES = 32


def described(proxy: Proxy, instance: Instance) -> dict[str, Any]:
    """One instance, for /instances and the dashboard."""
    names, report = sorted(instance.names), instance.report
    return {
        "role": "both" if instance.role == "both" else ROLE_NAMES[instance.role],
        "address": instance.ping.http_address,
        "rank": instance.ping.dp_rank,
        "state": proxy.state_of(instance),
        "models": names[:_MOST_NAMES],
        "more_models": max(0, len(names) - _MOST_NAMES),
        "running": instance.in_flight,
        "load": instance.load,
        "alone": instance.alone,
        "reported": None if report is None else to_builtins(report.work),
        "last_ping_seconds": round(proxy.clock() - instance.last_seen, 1),
        "pauses": instance.breaker.opened,
    }


def drain(proxy: Proxy, address: str, *, drained: bool, seconds: float | None = None) -> list[dict[str, Any]]:
    """Drains or resumes all ranks at this HTTP address, for this worker; returns them. After `seconds` what
    still runs there goes on elsewhere, if it can; None: never."""
    wanted = Address.parse(address)
    meant = [each for each in proxy.instances() if Address.parse(each.ping.http_address) == wanted]
    for instance in meant:
        proxy.registry.drain(instance, drained)
    proxy.admission.advance()
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, proxy.move_away, meant)
    return [described(proxy, each) for each in meant]


async def listed(siblings: Siblings, guard: Access, request: web.Request) -> web.Response:
    """GET /instances."""
    guard.look(request)
    return web.json_response({"instances": merged_instances(*await siblings.ask("instances"))})


async def changed(siblings: Siblings, guard: Access, request: web.Request, what: str) -> web.Response:
    """POST /instances/{address}/drain and .../resume: all ranks at this HTTP address. With `move_after` what
    still runs there after so many seconds goes on elsewhere."""
    guard.change(request)
    address, seconds = request.match_info["address"], None
    try:
        Address.parse(address)
        if what == "drain" and "move_after" in request.query:
            seconds = _seconds(request.query["move_after"])
    except ValueError as error:
        raise ProxyError(400, f"{error}.") from None
    meant = merged_instances(*await siblings.ask(what, (address, seconds)))
    if not meant:
        return error_response(
            404, "No instance with this HTTP address is registered; GET /instances lists those that are."
        )
    return web.json_response({"instances": meant})


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_DRAIN:
        raise ValueError(f"move_after is {text!r}: give seconds from 0 to {_LONGEST_DRAIN:g}, such as 30")
    return seconds


# Instances as all workers have them, as if these were one.


def merged_instances(parts: Sequence[Sequence[dict[str, Any]]], complete: bool) -> list[dict[str, Any]]:
    """Each instance once; in the state that lets it take the fewest requests. It is not drained before all
    workers have drained it: one that is late may have requests there."""
    states: dict[Any, list[str]] = {}
    for each in chain.from_iterable(parts):
        late = each["state"] == "drained" and not complete
        states.setdefault(_INSTANCE(each), []).append("draining" if late else each["state"])
    together = _added(parts, _INSTANCE)
    return [{**each, "state": min(states[_INSTANCE(each)], key=WORST_FIRST.index)} for each in together]


_AMOUNTS = ("running", "load", "alone", "total")
_INSTANCE, _PAIR = itemgetter("role", "address", "rank"), itemgetter("prefill", "decode")


def _added(parts: Sequence[Sequence[dict[str, Any]]], name: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Each thing of one name once, with the sums of its amounts; all else as in the first part."""
    found: dict[Any, dict[str, Any]] = {}
    for each in chain.from_iterable(parts):
        if before := found.get(name(each)):
            each = before | {what: before[what] + each[what] for what in _AMOUNTS if what in each}
        found[name(each)] = each
    return list(found.values())


# Of the pairs that have worked together, the busiest.
_MOST_PAIRS = 200
_MOST_INSTANCES = 500


async def keep_history(metrics: Metrics) -> None:
    """Takes samples until cancelled."""
    while True:
        metrics.sample()
        await asyncio.sleep(SAMPLE_SECONDS)


async def metrics_page(siblings: Siblings, guard: Access, request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    guard.look(request)
    parts, _ = await siblings.ask("metrics")
    body, kind = page(request.headers.get("Accept", ""), parts)
    return web.Response(body=body, headers={"Content-Type": kind})


async def status_page(siblings: Siblings, guard: Access, request: web.Request) -> web.Response:
    """GET /status: what the dashboard shows."""
    guard.look(request)
    answer = merged(*await siblings.ask("status"))
    return web.json_response(answer, headers={"Cache-Control": "no-store"})


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
        **report(proxy),
        "outcomes": {name: metrics.totals[name] for name in OUTCOMES},
        "placement": {"by": proxy.routing.placement, **proxy.router.costs.status()},
        "stream_events": metrics.events,
        "first_token_seconds": metrics.recent(),
        "instances": [described(proxy, each) for each in instances[:_MOST_INSTANCES]],
        "more_instances": max(0, len(instances) - _MOST_INSTANCES),
        "pairs": [
            {"prefill": p, "decode": d, "total": total, "running": running[p, d]}
            for (p, d), total in metrics.pairs.most_common(_MOST_PAIRS)
        ],
        "history_fields": Sample._fields,
        "history": [(round(each.at - now, 2), *each[1:]) for each in metrics.history],
    }


# The answers of all workers, as if they were one.

# From the worst to the best.
_STATUSES = ("unavailable", "degraded", "ok")
# Every worker sees the same ones.
_SEEN_BY_ALL = ("silent", "engines_paused", "breakers_open", "claims_refused")


def merged(parts: Sequence[dict[str, Any]], complete: bool = True) -> dict[str, Any]:
    """The page, of at least one worker's part; `complete`: of all workers'."""
    pairs = _added([part["pairs"] for part in parts], _PAIR)
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
        "placement": _merged_placement([part["placement"] for part in parts]),
        "instances": merged_instances([part["instances"] for part in parts], complete),
        "pairs": sorted(pairs, key=lambda pair: -pair["total"])[:_MOST_PAIRS],
        "history": _merged_history([part["history"] for part in parts]),
    }


def _summed(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: (max if name in _SEEN_BY_ALL else sum)(part[name] for part in parts) for name in parts[0]}


def _merged_placement(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The decisions shown are those of one worker."""
    ways: Counter[str] = sum((Counter(part["ways"]) for part in parts), Counter())
    errors = [error for part in parts for error in part["errors"]]
    shown = {name: parts[0][name] for name in ("by", "latest")}
    return {**shown, "ways": dict(ways), "median_error": quantiles(errors, 0.5)[0]}


def _merged_history(parts: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Samples from about the same moment make one: all workers take them at the same pace."""
    rows = []
    for samples in zip_longest(*(reversed(part) for part in parts)):
        times, *amounts, first_tokens = zip(*filter(None, samples), strict=True)
        longest = max((each for each in first_tokens if each is not None), default=None)
        rows.append([times[0], *map(sum, amounts), longest])
    return rows[::-1]


async def dashboard(request: web.Request) -> web.Response:
    """GET /: it holds no data of its own, so all may load it."""
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

    def digests(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        made = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{each}'" for each in made)

    policy = (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy
