"""Instances that the command line lists, for places where their pings do not reach this proxy.

The proxy asks each of them for /health, and an answer counts as a ping. Besides the two addresses a ping has
the process's incarnation, its ranks, and what a peer must be like to fit it; the proxy asks the instance's
rank 0 for these, as `p2pkv doctor --rank` does. If that rank does not answer, the instance is paired with any
other, and the ranks' handshake refuses what does not fit.

If an instance pings by itself only its pings count, listed or not.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import aiohttp
import msgspec
import zmq

from p2pkv.control.discovery import DISCOVERY_VERSION, Ping, decode_ping, encode_ping
from p2pkv.control.endpoint import inspect
from p2pkv.control.security import Members
from p2pkv.pairing import Address

from .instance import ROLE_NAMES, InstanceRole, ListedSource, PingSource, Role
from .prober import is_ours
from .registry import Registry

logger = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_PERIOD_SECONDS = 2.0
# How long rank 0 may take to answer, and after what time it is asked again if it did not.
_RANK_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 30.0


@dataclass(frozen=True)
class ListedInstance:
    """One instance as it is listed: the addresses of its OpenAI API and of its rank 0 (`kv_port`)."""

    role: Role
    http: Address
    zmq: Address

    @classmethod
    def parse(cls, role: Role, text: str) -> Self:
        """The value of `--prefill` or `--decode`. Raises ValueError with a sentence for anything else."""
        url, separator, zmq = text.rpartition("=")
        if not separator:
            raise ValueError(
                f"{text!r} names no ZMQ address: expected URL=HOST:PORT with the instance's HTTP address and "
                "its kv_port, such as http://10.0.0.7:8100=10.0.0.7:21001"
            )
        if url.startswith("https://"):
            raise ValueError(f"{url} is HTTPS: the proxy speaks plain HTTP to instances, give http://")
        return cls(role, Address.parse(url.removeprefix("http://").removesuffix("/")), Address.parse(zmq))

    def __str__(self) -> str:
        return f"{ROLE_NAMES[self.role]} instance {self.http}"


@dataclass(eq=False)
class ListedWatch:
    """Keeps one listed instance in the registry as long as its /health answers, by made-up pings, which it
    gives to `take`. `members`: the keys for rank 0; None without a secret."""

    listed: ListedInstance
    session: aiohttp.ClientSession
    registry: Registry
    take: Callable[[Ping, PingSource], None]
    members: Members | None
    clock: Callable[[], float]
    _source: ListedSource = field(default_factory=ListedSource)
    _ping: Ping | None = None
    """The made-up ping; None while its /health does not answer."""
    _learnt: bool = False
    """Whether that ping has what rank 0 has reported."""
    _asked: float = 0.0
    """When rank 0 was last asked."""
    _logged: str = ""
    """The trouble that was logged last; "" if it is over."""

    async def run(self) -> None:
        """Asks until cancelled."""
        while True:
            try:
                await self._look()
            except Exception:  # one answer must not end the watch
                logger.exception("%s, which is listed: asking its /health failed", self.listed)
            await asyncio.sleep(_PERIOD_SECONDS)

    async def _look(self) -> None:
        if self._pings():
            return
        url = f"http://{self.listed.http}/health"
        try:
            async with self.session.get(url, timeout=_TIMEOUT, allow_redirects=False) as answer:
                trouble = "" if answer.status == 200 else f"its /health answered {answer.status}"
        except TimeoutError:
            # It may be busy. If this goes on it becomes silent, as if its pings had stopped.
            if self._ping is None and not self._logged:
                self._log("it gets no requests: its /health does not answer; is the address right?")
            return
        except (aiohttp.ClientError, OSError) as error:
            if is_ours(error):
                return  # this proxy lacks a file descriptor: that says nothing of the instance
            trouble = f"its /health cannot be asked: {error}"
        if not trouble:
            if not self._source.pinged:
                await self._up()
            # Else its pings have ended, and it may be stopping: it counts again after a /health that failed.
            return
        known = self.registry.at((self.listed.role, self.listed.http, 0))
        if known is not None and known.source is self._source:
            known.healthy = False  # until its /health answers again
        if self._ping is not None or not self._logged:
            logger.warning("%s, which is listed, gets no requests: %s", self.listed, trouble)
        self._logged = self._logged or trouble
        self._source.answers = self._source.pinged = self._learnt = False
        self._ping = None

    def _pings(self) -> bool:
        """Whether it pings by itself, with the listed role or with both."""
        roles: tuple[InstanceRole, ...] = self.listed.role, "both"
        there = [self.registry.at((role, self.listed.http, 0)) for role in roles]
        pings = any(each is not None and each.source is not self._source for each in there)
        self._source.pinged = pings or self._source.pinged
        return pings

    async def _up(self) -> None:
        now = self.clock()
        if self._ping is None or (not self._learnt and now - self._asked > _ASK_AGAIN_SECONDS):
            self._asked = now
            self._ping = await self._learn()
        if self._ping is not None and not (self._pings() or self._source.pinged):
            self._source.answers = True
            self.take(self._ping, self._source)

    async def _learn(self) -> Ping | None:
        """The made-up ping; None if rank 0 is another than the list says."""
        listed = self.listed
        ping = Ping(type=listed.role, http_address=str(listed.http), zmq_address=str(listed.zmq))
        try:
            report = await asyncio.to_thread(inspect, listed.zmq, _RANK_SECONDS, self.members)
            rank = msgspec.convert(report, _Rank)
            known = {"incarnation": rank.incarnation, "protocol": rank.protocol, "fit": rank.fit}
            full = msgspec.structs.replace(ping, tp_size=rank.ranks, version=DISCOVERY_VERSION, **known)
            full = decode_ping(encode_ping(full))  # within the bounds of a ping
        except (TimeoutError, ValueError, zmq.ZMQError) as error:
            self._log(f"its rank 0 did not say what it fits, so it is paired with any other: {error}")
            return ping
        if rank.role not in (listed.role, "both") or rank.rank:
            self._log(
                f"it gets no requests: at {listed.zmq} is rank {rank.rank} of a "
                f"{ROLE_NAMES[rank.role]} instance, and rank 0 of a {ROLE_NAMES[listed.role]} instance was "
                "expected; correct --prefill and --decode",
            )
            return None
        self._learnt, self._logged = True, ""
        return full

    def _log(self, trouble: str) -> None:
        """Logs the trouble once, until it changes."""
        if self._logged != trouble:
            logger.warning("%s, which is listed: %s", self.listed, trouble)
        self._logged = trouble


class _Rank(msgspec.Struct):
    """The part of a rank's report that is used here."""

    role: InstanceRole
    rank: int
    incarnation: str
    ranks: int = 1
    protocol: int = 0
    fit: str = ""
