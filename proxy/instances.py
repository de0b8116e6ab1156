"""Instances as an operator sees them: their list and state, and the word that drains or resumes one.

Who may ask, who may look and who may change is decided here, too. No answer holds a ZMQ address or a secret.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from p2pkv.pairing import Address

from .errors import ProxyError, error_response
from .registry import Instance

if TYPE_CHECKING:
    from .service import Proxy
    from .siblings import Siblings, Together

# An instance may list any number of adapters.
_MOST_NAMES = 32


# If workers disagree about an instance's state, the one that comes first here is shown.
WORST_FIRST = ("draining", "drained", "starting", "engine_paused", "silent", "paused", "ready")


def state_of(instance: Instance, now: float, *, needed: bool) -> str:
    """In one word, what keeps it from new requests, if anything does; `needed`: requests depend on it."""
    if instance.drained:
        return "draining" if needed else "drained"
    if not instance.healthy:
        return "starting"
    if instance.paused:
        return "engine_paused"
    if instance.silent(now):
        return "silent"
    return "ready" if instance.breaker.closed else "paused"


@dataclass(frozen=True)
class Access:
    """Who may ask for, see and change what.

    Attributes:
        token: an operator shows it as a bearer token; "" if there is none, and then nobody changes anything.
        private: who looks has to show it, too.
        keys: a client shows one of them; without any, everybody may ask.
    """

    token: str = ""
    private: bool = False
    keys: tuple[str, ...] = ()

    def ask(self, request: web.Request) -> None:
        """Raises ProxyError if this request may not be served by an instance."""
        # Anthropic's clients, which ask /v1/messages, have a header of their own.
        shown = _bearer(request), request.headers.get("X-Api-Key", "")
        if self.keys and not any(key and _same(each, key) for each in shown for key in self.keys):
            raise ProxyError(
                401, "This needs an API key of this proxy, as `Authorization: Bearer KEY`.", ask="Bearer"
            )

    def look(self, request: web.Request) -> None:
        """Raises ProxyError if this request may not see instances."""
        if self.private:
            self._check(request)

    def change(self, request: web.Request) -> None:
        """Raises ProxyError if this request may not drain or resume instances."""
        if not self.token:
            raise ProxyError(
                403,
                "This proxy was started without an admin token, so nobody can drain or resume instances: "
                "start it with --admin-token, or set P2PKV_PROXY_ADMIN_TOKEN.",
            )
        self._check(request)

    def _check(self, request: web.Request) -> None:
        if not self.token or not _same(_bearer(request), self.token):
            raise ProxyError(
                401, "This needs the proxy's admin token, as `Authorization: Bearer TOKEN`.", ask="Bearer"
            )


def _bearer(request: web.Request) -> str:
    kind, _, shown = request.headers.get("Authorization", "").partition(" ")
    return shown.strip() if kind.lower() == "bearer" else ""


def _same(shown: str, expected: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), expected.encode())


def described(proxy: Proxy, instance: Instance) -> dict[str, Any]:
    """One instance, for /instances and the dashboard."""
    now = proxy.clock()
    names = sorted(instance.names)
    return {
        "role": "prefill" if instance.role == "P" else "decode",
        "address": instance.ping.http_address,
        "rank": instance.ping.dp_rank,
        "state": proxy.state_of(instance),
        "models": names[:_MOST_NAMES],
        "more_models": max(0, len(names) - _MOST_NAMES),
        "running": instance.in_flight,
        "load": instance.load,
        "alone": instance.alone,
        "last_ping_seconds": round(now - instance.last_seen, 1),
        "pauses": instance.breaker.opened,
    }


def drain(proxy: Proxy, address: str, *, drained: bool) -> list[dict[str, Any]]:
    """Drains or resumes all ranks at this HTTP address, for this worker; returns them."""
    meant = at(proxy, address)
    for instance in meant:
        proxy.registry.drain(instance, drained)
    proxy.admission.advance()
    return [described(proxy, each) for each in meant]


def at(proxy: Proxy, address: str) -> list[Instance]:
    """All ranks at this HTTP address."""
    wanted = Address.parse(address)
    return [each for each in proxy.instances() if Address.parse(each.ping.http_address) == wanted]


async def listed(siblings: Siblings, guard: Access, request: web.Request) -> web.Response:
    """GET /instances."""
    guard.look(request)
    return web.json_response({"instances": _together(await siblings.ask("instances"))})


async def changed(siblings: Siblings, guard: Access, request: web.Request, what: str) -> web.Response:
    """POST /instances/{address}/drain and .../resume: all ranks at this HTTP address."""
    guard.change(request)
    address = request.match_info["address"]
    try:
        Address.parse(address)
    except ValueError as error:
        raise ProxyError(400, f"{error}.") from None
    meant = _together(await siblings.ask(what, address))
    if not meant:
        return error_response(
            404, "No instance with this HTTP address is registered; GET /instances lists those that are."
        )
    return web.json_response({"instances": meant})


# What all workers say of instances, as if they were one.


def _together(said: Together) -> list[dict[str, Any]]:
    return merged_instances(said.parts, complete=said.complete)


def merged_instances(
    parts: Sequence[Sequence[dict[str, Any]]], *, complete: bool = True
) -> list[dict[str, Any]]:
    """Each instance once; in the state that lets it take the fewest requests. It is not drained before all
    workers have said so: one that is late may have requests there."""
    states: dict[Any, list[str]] = {}
    for each in (each for part in parts for each in part):
        late = each["state"] == "drained" and not complete
        states.setdefault(_name(each), []).append("draining" if late else each["state"])
    together = added([{_name(each): each for each in part} for part in parts])
    return [{**each, "state": min(states[_name(each)], key=WORST_FIRST.index)} for each in together]


def _name(described: dict[str, Any]) -> tuple[str, str, int]:
    return described["role"], described["address"], described["rank"]


_AMOUNTS = ("running", "load", "alone", "total")


def added(parts: Sequence[dict[Any, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each thing once, with the sums of its amounts; all else as who comes first says it."""
    found: dict[Any, dict[str, Any]] = {}
    for name, each in (item for part in parts for item in part.items()):
        known = found.get(name)
        found[name] = (
            each
            if known is None
            else known | {amount: known[amount] + each[amount] for amount in _AMOUNTS if amount in each}
        )
    return list(found.values())
