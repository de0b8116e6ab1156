"""Who may ask, who may look and who may change."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from functools import cached_property

from aiohttp import web

from .errors import ProxyError


@dataclass(frozen=True)
class Access:
    """Who may ask for, see and change what.

    Attributes:
        token: an operator shows it as a bearer token; "" if there is none, and then nothing is changed.
        private: who looks has to show it, too.
        keys: a client shows one of them; without any, all may ask.
    """

    token: str = ""
    private: bool = False
    keys: tuple[str, ...] = ()

    def ask(self, request: web.Request) -> None:
        """Raises ProxyError if this request may not be served by an instance."""
        if self.keys and not any(digest(each) in self._digests for each in shown_keys(request)):
            raise ProxyError(
                401, "This needs an API key of this proxy, as `Authorization: Bearer KEY`.", ask="Bearer"
            )

    @cached_property
    def _digests(self) -> frozenset[bytes]:
        return frozenset(digest(key) for key in self.keys if key)

    def look(self, request: web.Request) -> None:
        """Raises ProxyError if this request may not see instances."""
        if self.private:
            self._check(request)

    def change(self, request: web.Request) -> None:
        """Raises ProxyError if this request may not drain or resume instances."""
        if not self.token:
            raise ProxyError(
                403,
                "This proxy was started without an admin token, so no request can drain or resume instances: "
                "start it with --admin-token, or set P2PKV_PROXY_ADMIN_TOKEN.",
            )
        self._check(request)

    def _check(self, request: web.Request) -> None:
        if not self.token or not _same(_bearer(request), self.token):
            raise ProxyError(
                401, "This needs the proxy's admin token, as `Authorization: Bearer TOKEN`.", ask="Bearer"
            )


def shown_keys(request: web.Request) -> tuple[str, str]:
    """What a client shows as API keys; "" where it shows none. Anthropic's clients, which ask /v1/messages,
    have a header of their own."""
    return _bearer(request), request.headers.get("X-Api-Key", "")


def digest(key: str) -> bytes:
    """By which keys are looked up: how long that takes does not depend on how much of a key is right."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _bearer(request: web.Request) -> str:
    kind, _, shown = request.headers.get("Authorization", "").partition(" ")
    return shown.strip() if kind.lower() == "bearer" else ""


def _same(shown: str, expected: str) -> bool:
    """In a time that does not depend on how much of it is right."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), expected.encode())
