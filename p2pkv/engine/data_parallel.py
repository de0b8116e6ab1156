"""The other engines of a data-parallel P, where the router knows no data-parallel ranks.

Then a request's id names one engine of P, and the HTTP server has given the request to another. D asks the
engine that is named. So whichever engine has the request sends that one `PromptOwner`, and it refers D to the
engine (`Redirect`). What an engine has been sent counts for a lease; it is repeated while P has the request.
"""

from p2pkv.control.endpoint import Connection
from p2pkv.engine.context import Context, ExpiringDict, log
from p2pkv.engine.effects import Timer
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import is_engine_of
from p2pkv.protocol.state_machine import RemoteProtocolError

RETRY_SECONDS = 0.02
"""Between two tries to send to an engine whose connection is not up yet."""

AT_ONCE = 1024
"""Requests that one message names at most."""

MAX_REDIRECTS = 1 << 16
"""Requests at other engines that are remembered."""

MAX_ENGINES = 256
"""Connections to other engines. An id, which a client may have forged, can make P dial its own host."""


class Redirects:
    """Which requests are at another engine than their ids name. Rank r talks to rank r of the others."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._local: dict[str, str] = {}
        """This engine's requests that name another, which is named by the address of its rank 0."""
        self._unsent: dict[str, dict[str, None]] = {}
        """By engine: the requests that it has not been sent."""
        self._engines: dict[str, Connection] = {}
        self._lease = context.options.lease_seconds
        self._owners = ExpiringDict(self._lease, MAX_REDIRECTS)
        """By key of the requests that name this engine: the one that has it."""
        self._retry = Timer(context.timers, self._pass_on)
        self._repeat = Timer(context.timers, self._renew)
        self._logged = False

    def announce(self, key: str, named: Address, now: float) -> None:
        """This engine has a request whose id names another one."""
        engine = str(named)
        if engine not in self._engines and len(self._engines) >= MAX_ENGINES:
            return
        if not self._logged:
            self._logged = True
            mine = self._ctx.hello.addresses[0]
            log.info(
                f"requests name {engine}, but the HTTP server gives them to {mine}: the router knows no "
                "data-parallel ranks, so D is referred from one engine to the other (logged once)"
            )
        if not self._local:
            self._repeat.at(now + self._lease / 3)
        self._local[key] = engine
        self._unsent.setdefault(engine, {})[key] = None
        self._pass_on(now)

    def forget(self, key: str) -> None:
        """P does not have this request any more."""
        if engine := self._local.pop(key, None):
            self._unsent.get(engine, {}).pop(key, None)

    def received(self, message: m.PromptOwner, now: float) -> None:
        """Another engine has requests that name this one. Raises RemoteProtocolError."""
        mine = self._ctx.hello
        if message.engine == mine.addresses[0] or not (mine.instance and is_engine_of(message.engine, mine)):
            raise RemoteProtocolError(f"{message.engine} is no other engine of {mine.address}'s instance")
        for key in message.keys:
            self._owners.add(key, message.engine, now)

    def of(self, key: str, now: float) -> str | None:
        """The engine that has this request; None if none is known to."""
        self._owners.expire(now)
        return self._owners.get(key)

    def _pass_on(self, now: float) -> None:
        """Send each engine what it has not been sent; what cannot be sent yet is tried again."""
        mine = self._ctx.hello
        for engine, keys in list(self._unsent.items()):
            if engine not in self._engines:
                self._engines[engine] = self._ctx.endpoint.dial(Address.parse(engine).shifted(mine.rank))
            connection = self._engines[engine]
            self._ctx.endpoint.redial(connection)
            while keys:
                some = tuple(keys)[:AT_ONCE]
                if not self._ctx.answer(connection, m.PromptOwner(mine.addresses[0], some)):
                    self._retry.by(now + RETRY_SECONDS)
                    break
                for key in some:
                    del keys[key]
            if not keys:
                del self._unsent[engine]

    def _renew(self, now: float) -> None:
        """Repeat what is still true, and close what is not needed."""
        self._unsent.clear()
        for key, engine in self._local.items():
            self._unsent.setdefault(engine, {})[key] = None
        for engine in [each for each in self._engines if each not in self._unsent]:
            self._ctx.endpoint.hang_up(self._engines.pop(engine))
        self._pass_on(now)
        if self._local:
            self._repeat.at(now + self._lease / 3)
