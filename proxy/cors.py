"""What browsers may do from pages of other origins: vLLM's options with vLLM's meaning. Off by default."""

import json
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
# A browser may always send these.
_SAFE_HEADERS = ("Accept", "Accept-Language", "Content-Language", "Content-Type")
_MAX_AGE_SECONDS = 600
_ANY = ("*",)
_ALLOW = "Access-Control-Allow-"


@dataclass(frozen=True)
class Cors:
    """Answers to browsers.

    Attributes:
        origins: of the pages, such as https://chat.example.com; "*": all; without any, none.
        methods, headers: that their requests may have; "*": all.
    """

    origins: tuple[str, ...] = ()
    credentials: bool = False
    methods: tuple[str, ...] = _ANY
    headers: tuple[str, ...] = _ANY

    @web.middleware
    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A middleware that answers preflight requests, in which a browser shows no key."""
        wanted = request.headers.get("Access-Control-Request-Method")
        origin = request.headers.get("Origin")
        if request.method != "OPTIONS" or wanted is None or origin is None:
            return await handler(request)
        methods = _METHODS if "*" in self.methods else self.methods
        asked = request.headers.get("Access-Control-Request-Headers")
        names = [name.strip() for name in (asked or "").split(",") if name.strip()]
        known = {name.lower() for name in (*_SAFE_HEADERS, *self.headers)}
        bad = [] if self._admits(origin) else ["origin"]
        bad += [] if wanted in methods else ["method"]
        bad += [] if "*" in self.headers or known.issuperset(map(str.lower, names)) else ["headers"]
        headers = {f"{_ALLOW}Methods": ", ".join(methods), "Access-Control-Max-Age": str(_MAX_AGE_SECONDS)}
        if "*" not in self.headers:
            headers[f"{_ALLOW}Headers"] = ", ".join(sorted({*_SAFE_HEADERS, *self.headers}))
        elif asked is not None:
            headers[f"{_ALLOW}Headers"] = asked
        text = f"Disallowed CORS {', '.join(bad)}" if bad else "OK"
        return web.Response(status=400 if bad else 200, text=text, headers=headers)

    async def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """To be called when an answer's head is about to be sent."""
        for name in ("Origin", "Credentials"):
            response.headers.popall(f"{_ALLOW}{name}", None)  # the instance's own
        if (origin := request.headers.get("Origin")) is not None:
            if self._admits(origin):
                everyone = "*" in self.origins and not self.credentials
                response.headers[f"{_ALLOW}Origin"] = "*" if everyone else origin
            if self.credentials:
                response.headers[f"{_ALLOW}Credentials"] = "true"
        response.headers.add("Vary", "Origin")

    def _admits(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins


def read_list(text: str) -> tuple[str, ...]:
    """One value of an option, or several in a JSON list, as vLLM's options take them. Raises ValueError."""
    if not text.startswith("["):
        return (text,)
    try:
        values = json.loads(text)
    except ValueError:
        raise ValueError(f'{text!r} is no list in JSON, such as ["https://chat.example.com"]') from None
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{text!r} is no list of texts")
    return tuple(values)
