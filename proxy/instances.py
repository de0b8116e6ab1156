"""Instances as an operator sees them: their list and state, and the word that drains or resumes one.

Who may look and who may change is decided here, too. No answer holds a ZMQ address or a secret.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from p2pkv.pairing import Address

from .errors import ProxyError, error_response
from .registry import Instance

if TYPE_CHECKING:
    from .serving import Proxy

# An instance may list any number of adapters.
_MOST_NAMES = 32


def state_of(instance: Instance, now: float, *, needed: bool) -> str:
    """In one word, what keeps it from new requests, if anything does; `needed`: requests depend on it."""
    if instance.drained:
        return "draining" if needed else "drained"
    if not instance.healthy:
        return "starting"
    if instance.silent(now):
        return "silent"
    return "ready" if instance.breaker.closed else "paused"


@dataclass(frozen=True)
class Access:
    """Who may see and change what.

    Attributes:
        token: an operator shows it as a bearer token; "" if there is none, and then nobody changes anything.
        private: who looks has to show it, too.
    """

    token: str = ""
    private: bool = False

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
        kind, _, shown = request.headers.get("Authorization", "").partition(" ")
        right = hmac.compare_digest(shown.strip().encode("utf-8", "replace"), self.token.encode())
        if kind.lower() != "bearer" or not self.token or not right:
            raise ProxyError(
                401, "This needs the proxy's admin token, as `Authorization: Bearer TOKEN`.", ask="Bearer"
            )


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


async def listed(proxy: Proxy, guard: Access, request: web.Request) -> web.Response:
    """GET /instances."""
    guard.look(request)
    return web.json_response({"instances": [described(proxy, each) for each in proxy.instances()]})


async def changed(proxy: Proxy, guard: Access, request: web.Request, *, drained: bool) -> web.Response:
    """POST /instances/{address}/drain and .../resume: all ranks at this HTTP address."""
    guard.change(request)
    meant = _at(proxy, request.match_info["address"])
    if not meant:
        return error_response(
            404, "No instance with this HTTP address is registered; GET /instances lists those that are."
        )
    for instance in meant:
        proxy.registry.drain(instance, drained)
    proxy.admission.advance()
    return web.json_response({"instances": [described(proxy, each) for each in meant]})


def _at(proxy: Proxy, text: str) -> list[Instance]:
    try:
        address = Address.parse(text)
    except ValueError as error:
        raise ProxyError(400, f"{error}.") from None
    return [each for each in proxy.instances() if Address.parse(each.ping.http_address) == address]
