"""Several workers on one port: what they and the process that starts them do, all in this process."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from proxy_fakes import DEADLINE, ping, until

from p2pkv.control.discovery import MAX_PING_BYTES, Ping, decode_ping, encode_ping
from proxy.admission import Limits
from proxy.instances import Access, changed, listed
from proxy.metrics import Family, Metrics
from proxy.registry import Registry
from proxy.serving import Proxy
from proxy.status import metrics_page
from proxy.team import (
    Channel,
    Drained,
    Heard,
    Link,
    Lost,
    Message,
    Pinged,
    Question,
    Said,
    Serving,
    SharedSource,
    Stop,
    Team,
)
from proxy.upstream import Client
from proxy.workers import Membership, Seat, Supervisor, WorkerFailed

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def following(**parts: Any) -> AsyncIterator[tuple[Registry, Channel, Link]]:
    """A worker's registry, and the parent's end of its channel."""
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours)
    link = Link(await Channel.over(theirs), asyncio.Event(), asyncio.Event())
    registry = Registry(life=10.0, lease=30.0)
    task = asyncio.create_task(Team(parts, link).follow(registry, lambda: 100.0, lambda: None))
    try:
        yield registry, channel, link
    finally:
        channel.close()
        await task
        link.channel.close()


def long_ping() -> Ping:
    """One that fits into a ping's bound only without the fields that it leaves out."""
    fields = {"type": "P", "http_address": "10.0.0.1:1", "zmq_address": "10.0.0.1:2", "model": ""}
    fields["transfer_mode"] = "\N{ROCKET}" * 500
    fields["model"] = "\N{EURO SIGN}" * 500
    fields["fit"] = "f" * (MAX_PING_BYTES - 4 - len(msgspec.msgpack.encode(fields | {"fit": ""})))
    return decode_ping(msgspec.msgpack.encode(fields))


async def test_a_ping_that_is_longer_once_its_defaults_are_written_reaches_the_workers() -> None:
    message = long_ping()
    assert len(encode_ping(message)) > MAX_PING_BYTES
    async with Client() as session, following() as (registry, channel, link):
        membership = Membership(Proxy(session, Registry(), "concurrent", Limits()), channel.send)
        membership.take(message, SharedSource())
        await until(lambda: registry.of(message) is not None, "the instance")
        assert not link.stop.is_set()


async def test_a_message_that_is_none_and_one_that_fails_do_not_end_a_worker() -> None:
    message = ping("D")
    async with following() as (registry, channel, link):
        channel._writer.write((3).to_bytes(4) + b"\xff\xff\xff")
        channel.send(Question(1, "what nobody can say"))
        channel.send(Pinged(message))
        await until(lambda: registry.of(message) is not None, "the instance")
        assert not link.stop.is_set()


async def test_who_is_lost_is_not_alive_once_it_is_silent_and_comes_back_with_its_pings() -> None:
    message = ping("D")
    async with following() as (registry, channel, _):
        channel.send(Pinged(message))
        await until(lambda: bool(registry.known("D")), "the instance")
        (instance,) = registry.known("D")
        instance.healthy = True
        assert registry.routable("D", 115.0) == [instance], "silent, and its connection stands"
        channel.send(Lost(message))
        await until(lambda: not registry.routable("D", 115.0), "its loss")
        channel.send(Pinged(message))
        await until(lambda: bool(registry.routable("D", 115.0)), "its return")
        restarted = ping("D", incarnation="another")
        channel.send(Pinged(restarted))
        await until(lambda: bool(registry.of(restarted)), "its successor, under the same address")


async def test_a_drain_may_be_known_before_the_instance_and_the_end_of_the_parent_stops_a_worker() -> None:
    message = ping("D", incarnation="first")
    async with following() as (registry, channel, link):
        channel.send(Drained(message))
        channel.send(Pinged(message))
        await until(lambda: bool(registry.known("D")), "the instance")
        assert registry.known("D")[0].drained
        channel.send(Stop(hurry=True))
        await asyncio.wait_for(link.hurry.wait(), DEADLINE)
        assert not link.stop.is_set()
        channel.close()
        await asyncio.wait_for(link.stop.wait(), DEADLINE)


async def test_a_drain_reaches_a_worker_that_has_yet_to_learn_of_the_instance_and_so_does_a_resume() -> None:
    one, other = ping("D", 1), ping("D", 2)
    told: list[Message] = []
    async with Client() as session, following() as (registry, channel, _):
        membership = Membership(Proxy(session, Registry(), "concurrent", Limits()), told.append)
        for each in (one, other):
            membership.take(each, SharedSource())
            membership.drain(each.http_address, drained=True)
        membership.drain(other.http_address, drained=False)
        for message in sorted(told, key=lambda each: isinstance(each, Pinged)):
            channel.send(message)
        await until(lambda: len(registry.known("D")) == 2, "both")
        assert [each.drained for each in registry.known("D")] == [True, False]


async def test_a_worker_that_begins_learns_who_is_paused() -> None:
    message = ping("D")
    async with Client() as session, following() as (registry, channel, _):
        membership = Membership(Proxy(session, Registry(), "concurrent", Limits()), lambda _: None)
        for paused in (False, True):
            membership.take(msgspec.structs.replace(message, paused=paused), SharedSource())
        for each in membership.all():
            channel.send(each)
        await until(lambda: bool(registry.known("D")), "the instance")
        assert registry.known("D")[0].paused


async def test_a_worker_that_nobody_has_heard_in_time_speaks_for_itself() -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours)
    link = Link(await Channel.over(theirs), asyncio.Event(), asyncio.Event())
    team = Team({"status": lambda _: "mine"}, link)
    following = asyncio.create_task(team.follow(Registry(), lambda: 0.0, lambda: None))
    asking = asyncio.create_task(team.ask("status"))
    ask = await anext(channel.messages())
    assert isinstance(ask, Question)
    channel.send(Said(ask.number, [], missing=2))
    assert await asking == Heard(["mine"], complete=False)
    channel.close()
    await following
    link.channel.close()


# Workers that end, freeze, or cannot be started.

Begin = Callable[[Seat], Awaitable[None]]


class Process:
    """In place of a worker's process: a task of this one."""

    def __init__(self, target: Begin, args: tuple[Seat], **_: Any) -> None:
        self._begin, (self._seat,) = target, args
        self._ended = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self.exitcode: int | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(replace(self._seat, end=self._seat.end.dup())))

    async def _run(self, seat: Seat) -> None:
        try:
            await self._begin(seat)
        finally:
            self.exitcode = self.exitcode or 0
            seat.end.close()
            self._ended.set()

    def kill(self) -> None:
        self.exitcode = -signal.SIGKILL
        assert self._task is not None
        self._task.cancel()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, seconds: float) -> None:
        self._ended.wait(seconds)


async def work(seat: Seat, teams: list[Team] | None = None, **parts: Any) -> None:
    """As a worker that is in order; `teams` gets its side of all workers."""
    channel = await Channel.over(seat.end)
    link = Link(channel, asyncio.Event(), asyncio.Event())
    team = Team(parts, link)
    task = asyncio.create_task(team.follow(Registry(), lambda: 0.0, lambda: None))
    if teams is not None:
        teams.append(team)
    channel.send(Serving())
    try:
        await link.stop.wait()
    finally:
        task.cancel()
        channel.close()


async def freeze(seat: Seat) -> None:
    """It has begun to serve, and reads nothing any more."""
    channel = await Channel.over(seat.end)
    channel.send(Serving())
    try:
        await asyncio.Event().wait()
    finally:
        channel.close()


async def serve_and_end(seat: Seat) -> None:
    channel = await Channel.over(seat.end)
    channel.send(Serving())
    channel.close()


class Lives:
    """What each worker's processes do, one after the other; the last one goes on for ever.

    Attributes:
        begun: the numbers of the workers whose processes have begun.
    """

    def __init__(self, *workers: list[Begin]) -> None:
        self._workers = workers
        self.begun: list[int] = []

    async def __call__(self, seat: Seat) -> None:
        lives = self._workers[seat.number - 1]
        self.begun.append(seat.number)
        await (lives.pop(0) if len(lives) > 1 else lives[0])(seat)

    def served_again(self, number: int, times: int) -> Callable[[], bool]:
        return lambda: self.begun.count(number) > times


@asynccontextmanager
async def supervised(lives: Lives, workers: int) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor([[socket.socket()] for _ in range(workers)], lives)
    try:
        yield supervisor
    finally:
        async with asyncio.timeout(DEADLINE):
            await supervisor.stop(1000.0, asyncio.Event())


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(Process=Process)
    monkeypatch.setattr("proxy.workers.multiprocessing.get_context", lambda method: context)
    monkeypatch.setattr("proxy.workers._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("proxy.workers._ALIVE_SECONDS", 0.01)


async def test_a_frozen_worker_is_killed_and_started_again_and_one_that_still_starts_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin = asyncio.Event()

    async def starts_slowly(seat: Seat) -> None:
        await begin.wait()
        await work(seat)

    lives = Lives([starts_slowly], [freeze, work])
    async with supervised(lives, 2) as supervisor:
        starting = asyncio.create_task(supervisor.start(asyncio.Event()))
        await until(lives.served_again(2, times=1), "the frozen worker's successor")
        assert "worker 2 has answered nothing for 0.05 s: it is killed" in caplog.text
        assert "worker 2 was ended by SIGKILL" in caplog.text
        begin.set()
        await starting
    assert lives.begun == [1, 2, 2]


async def test_a_worker_that_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def counts(seat: Seat) -> None:
        nonlocal asked
        channel = await Channel.over(seat.end)
        channel.send(Serving())
        async for message in channel.messages():
            asked += 1
            channel.send(message)
            if isinstance(message, Stop):
                channel.close()

    lives = Lives([counts])
    async with supervised(lives, 1) as supervisor:
        await supervisor.start(asyncio.Event())
        await until(lambda: asked > 20, "questions")
    assert lives.begun == [1]


async def test_a_worker_that_cannot_be_started_for_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pairs: list[tuple[socket.socket, socket.socket]] = []
    real, starts, no_memory = socket.socketpair, Process.start, [False, True, True, False]

    def pair() -> tuple[socket.socket, socket.socket]:
        pairs.append(real())
        return pairs[-1]

    def start(process: Process) -> None:
        if no_memory.pop(0):
            raise OSError("Cannot allocate memory")
        starts(process)

    monkeypatch.setattr("proxy.workers.socket.socketpair", pair)
    monkeypatch.setattr(Process, "start", start)
    lives = Lives([serve_and_end, work])
    async with supervised(lives, 1) as supervisor:
        await supervisor.start(asyncio.Event())
        await until(lambda: lives.begun == [1, 1], "the worker's second process")
        assert caplog.text.count("could not be started (OSError('Cannot allocate memory'))") == 2
        assert all(end.fileno() == -1 for failed in pairs[1:3] for end in failed)


async def test_a_worker_that_can_never_be_started_is_the_end_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(process: Process) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(Process, "start", fail)
    async with supervised(Lives([work]), 1) as supervisor:
        with pytest.raises(WorkerFailed, match=r"worker 1 could not be started .* before it served"):
            await supervisor.start(asyncio.Event())


async def test_they_can_be_stopped_before_all_serve() -> None:
    begin, stop = asyncio.Event(), asyncio.Event()

    async def starts_slowly(seat: Seat) -> None:
        await begin.wait()
        await work(seat)

    lives = Lives([starts_slowly], [work])
    async with supervised(lives, 2) as supervisor:
        starting = asyncio.create_task(supervisor.start(stop))
        await until(supervisor.workers[1].serves.is_set, "one of both")
        stop.set()
        async with asyncio.timeout(DEADLINE):
            await starting
        begin.set()
    assert lives.begun == [1, 2]


async def test_the_pause_after_a_death_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("proxy.workers._FIRST_PAUSE", 1000.0)
    lives = Lives([serve_and_end])
    async with supervised(lives, 1) as supervisor:
        await supervisor.start(asyncio.Event())
        await until(lambda: "worker 1 ended with status 0" in caplog.text, "its end")
    assert lives.begun == [1]


# What all workers say.


class MayBeBusy:
    """A worker that answers every question in the same way, until it is too busy for that."""

    def __init__(self, said: Any) -> None:
        self._said = said
        self.busy = False

    async def __call__(self, seat: Seat) -> None:
        channel = await Channel.over(seat.end)
        channel.send(Serving())
        async for message in channel.messages():
            if isinstance(message, Question) and not self.busy:
                channel.send(Said(message.number, self._said))
            elif isinstance(message, Stop):
                channel.close()


async def test_an_instance_is_not_drained_before_all_workers_have_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.workers._ALIVE_SECONDS", 1000.0)
    monkeypatch.setattr("proxy.workers.ANSWER_SECONDS", 0.1)
    instance = {"role": "decode", "address": "127.0.0.1:9", "rank": 0, "state": "drained"}
    other, teams = MayBeBusy([instance]), list[Team]()

    def says(address: str) -> list[dict[str, Any]]:
        return [instance]

    async def states(team: Team) -> list[str]:
        match_info = {"address": "127.0.0.1:9"}
        shown = {"Authorization": "Bearer t"}
        post = make_mocked_request("POST", "/", headers=shown, match_info=match_info)
        pages = [
            await listed(team, Access(), make_mocked_request("GET", "/")),
            await changed(team, Access("t"), post, "drain"),
        ]
        return [each["state"] for page in pages for each in msgspec.json.decode(page.body)["instances"]]

    lives = Lives([partial(work, teams=teams, instances=says, drain=says)], [other])
    async with supervised(lives, 2) as supervisor:
        await supervisor.start(asyncio.Event())
        assert await states(teams[0]) == ["drained", "drained"]
        other.busy = True
        assert await states(teams[0]) == ["draining", "draining"]


async def test_the_counters_of_a_worker_that_is_late_stay_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.workers._ALIVE_SECONDS", 1000.0)
    monkeypatch.setattr("proxy.workers.ANSWER_SECONDS", 0.1)
    counted = ("requests", "x", "counter", [("requests_total", {}, 3.0)])
    families: list[Family] = [counted, ("running", "x", "gauge", [("running", {}, 1.0)])]
    other, teams = MayBeBusy(families), list[Team]()

    async def sums() -> list[str]:
        page = make_mocked_request("GET", "/metrics")
        text = (await metrics_page(teams[0], Metrics(), Access(), page)).body.decode()
        return [line for line in text.splitlines() if not line.startswith("#")]

    lives = Lives([partial(work, teams=teams, metrics=lambda _: families)], [other])
    async with supervised(lives, 2) as supervisor:
        await supervisor.start(asyncio.Event())
        assert await sums() == ["requests_total 6.0", "running 2.0"]
        other.busy = True
        assert await sums() == ["requests_total 6.0", "running 1.0"]
