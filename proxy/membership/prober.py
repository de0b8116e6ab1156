"""Asks instances for their /health.

It asks newcomers, because a ping comes from a worker, which starts before the API listens. And it asks those
with requests in flight whose pings have stopped. If the port refuses they are gone. One that is silent is
frozen or busy: its requests go on until it has been silent for a lease. One whose /health answers lives, but
its engine may hang: after a lease without a ping, what it has not begun to answer goes elsewhere where it
can. From version 4 of the pings on an instance sends none while its engine hangs: what has nowhere else to
go fails then, and so does a stream of which nothing comes.

One that has said goodbye computes nothing more. vLLM closes its port then, and keeps the connections: on them
it sends what it has computed, and requests that never reached its engine get their end only after 20 s.
"""

import asyncio
import errno
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec

from p2pkv.log import RateLimit

from .instance import Instance
from .registry import Registry

logger = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_PERIOD_SECONDS = 1.0
_MAX_BYTES = 16 << 20  # of a list of models
_COMPLAIN_SECONDS = 600.0  # between two lines about one instance whose engine seems to hang
_GOODBYE_SECONDS = 1.0
"""After a goodbye, for the answers that were complete."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


@dataclass(eq=False)
class Prober:
    """Makes instances routable, and keeps the registry, whose clock this is, free of dead ones. `changed` is
    called when an instance may have become routable, and once in a while."""

    _session: aiohttp.ClientSession
    _registry: Registry
    _clock: Callable[[], float]
    changed: Callable[[], None] = lambda: None
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    """A new instance is there: probe without waiting for the next round."""
    _complaints: RateLimit = field(default_factory=lambda: RateLimit(seconds=_COMPLAIN_SECONDS))
    _gone: set[Instance] = field(default_factory=set)
    """Instances that are no longer registered, and have requests or were chosen for some."""

    async def run(self) -> None:
        """Probes until cancelled."""
        while True:
            self.wakeup.clear()
            try:
                await self.round()
            except Exception:  # nothing else looks for newcomers and the dead
                logger.exception("asking the instances for their /health failed; the next round comes")
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self.wakeup.wait()

    async def round(self) -> None:
        """Asks each instance once whose health is not known now."""
        now = self._clock()
        self._gone = {each for each in self._gone.union(self._registry.expire(now)) if each.load}
        doubtful = {*self._registry.late(now), *self._gone}
        instances = {*self._registry.known("P"), *self._registry.known("D")}
        await asyncio.gather(
            *(self._probe(instance) for instance in instances if not instance.healthy),
            *(self._doubt(instance) for instance in doubtful),
        )
        self.changed()

    async def _doubt(self, instance: Instance) -> None:
        """Ends the requests of an instance that refuses, or that neither pings nor answers for a lease; of
        one that has said goodbye, or only pings no more, those whose answer has not begun. See Call.lose."""
        try:
            await self._health(instance)
            if instance.left is None and self._overdue(instance, now := self._clock()):
                if self._complaints.admits(instance.name):
                    logger.warning(
                        f"{instance} has not pinged for {now - instance.last_seen:.0f} s, but its /health "
                        "answers: its engine may hang, so requests that it has not begun to answer go to "
                        "others, where there are any"
                    )
                instance.lost("hung")
        except (aiohttp.ClientError, OSError) as error:
            refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
            now = self._clock()
            if instance.left is not None:
                if refused and now - instance.left >= _GOODBYE_SECONDS:
                    instance.lost("stopped")
                elif not refused and self._registry.overdue(instance, now):
                    instance.lost("silent")  # it stands still with its port open
            elif refused or self._overdue(instance, now):
                what = f"its {instance.in_flight} requests fail"
                logger.warning("%s neither pings nor answers (%r): %s", instance, error, what)
                instance.lost("gone" if refused else "silent")
        except Exception:  # as below; it has answered something
            logger.exception("%s: asking its /health failed", instance)

    def _overdue(self, instance: Instance, now: float) -> bool:
        """One that was removed may ping again, and is registered anew then."""
        return self._registry.overdue(self._registry.of(instance.ping) or instance, now)

    async def _health(self, instance: Instance) -> bool:
        url = f"{instance.url}/health"
        async with self._session.get(url, timeout=_TIMEOUT, allow_redirects=False) as answer:
            return bool(answer.status == 200)

    async def _probe(self, instance: Instance) -> None:
        try:
            if not await self._health(instance):
                return
            await self._learn_models(instance)
        except (aiohttp.ClientError, OSError) as error:
            new = not (instance.context or is_ours(error))
            if new and self._complaints.admits(("health", instance.name)):
                logger.warning(
                    f"{instance} gets no requests: its /health cannot be asked from here ({error!r}); is its "
                    "`host` one that this machine reaches, and http_port its --port?"
                )
        except Exception:  # one instance's answer must not end the probing of all
            logger.exception("%s: asking its /health and models failed", instance)
        else:
            instance.healthy = True
            logger.info("%s is ready", instance)
            self.changed()

    async def _learn_models(self, instance: Instance) -> None:
        """Those that it lists; none if it lists them only for those who have its key."""
        listed: list[_Model] = []
        url = f"{instance.url}/v1/models"
        async with self._session.get(url, timeout=_TIMEOUT, allow_redirects=False) as answer:
            try:
                if answer.status == 200:
                    body = bytearray()
                    async for chunk in answer.content.iter_any():
                        body += chunk
                        if len(body) > _MAX_BYTES:
                            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
                    listed = _models.decode(body).data
            except (msgspec.MsgspecError, RecursionError, ValueError) as error:
                logger.warning("%s: its list of models cannot be read: %s", instance, error)
        context = max((model.max_model_len or 0 for model in listed), default=0)
        instance.learn(frozenset(model.id for model in listed), context)


# What this machine may lack for one connection more: descriptors, ports, memory.
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


def is_ours(error: BaseException) -> bool:
    """Whether a connection did not come about because this machine lacks something for it."""
    return isinstance(error, OSError) and error.errno in _OURS
