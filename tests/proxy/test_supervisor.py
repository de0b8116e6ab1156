"""Several workers on one port: what they and the process that starts them do, all in this process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from proxy_fakes import DEADLINE, Line, join, ping

from p2pkv.control.discovery import MAX_PING_BYTES, Ping, Workload, decode_ping, encode_ping, goodbye
from p2pkv_proxy.access import Access
from p2pkv_proxy.admin import changed, listed, metrics_page
from p2pkv_proxy.exposition import Family
from p2pkv_proxy.membership.registry import MAX_INSTANCES, Registry
from p2pkv_proxy.siblings import NoAnswer, Siblings, answering, ask
from p2pkv_proxy.supervisor import Pings, Supervisor, WorkerFailed
from p2pkv_proxy.worker import Drains, Update, WorkerConfig, WorkerReport, WorkerState
from support.waiting import eventually

# Pings.


class Repeated:
    """What comes at the discovery address, and a worker's registry. `now` is the registry's clock."""

    def __init__(self, seat: WorkerConfig | None = None) -> None:
        self.news = 0
        self.now = 100.0
        self.drains: Drains = []
        self.pings = Pings(self._changed)
        self.begin()

    def begin(self) -> None:
        """A worker that begins."""
        self.worker = WorkerState(WorkerConfig(1, 2, (), Path()))
        self.registry = Registry(life=10.0, lease=30.0)

    def _changed(self) -> None:
        self.news += 1

    def hear(self, message: Ping, line: Line | None = None) -> None:
        """A ping comes, and the worker's next update."""
        self.pings.take(message, line or Line())
        self.update()

    def update(self) -> WorkerReport:
        """As it travels."""
        raw = msgspec.msgpack.encode(Update(self.pings.all(), self.drains))
        return self.worker.update(msgspec.msgpack.decode(raw, type=Update), self.registry, self._take)

    def _take(self, message: Ping, source: Any) -> None:
        found = self.registry.observe(message, self.now, source)
        if found is not None:
            found.healthy = True
            source.answer(f"to {message.http_address}".encode())


async def test_workers_have_the_pings_and_a_new_one_has_them_at_once() -> None:
    both, line = Repeated(), Line()
    both.pings.take(ping("D"), line)
    both.pings.take(ping("P"), line)
    assert both.news == 2
    for _ in range(2):
        both.update()
        assert [len(both.registry.routable(role, both.now)) for role in ("P", "D")] == [1, 1]
        both.begin()
    both.pings.take(ping("D"), line)
    assert both.news == 2, "one more ping of the same instance is no news"


async def test_repeated_pings_do_not_renew_an_instance() -> None:
    both, line = Repeated(), Line()
    both.hear(ping("D"), line)
    (instance,) = both.registry.known("D")
    both.now = 105.0
    both.update()
    assert instance.last_seen == 100.0
    both.hear(ping("D"), line)
    assert instance.last_seen == 105.0


async def test_reports_reach_workers_with_the_age_that_they_have_by_then_and_are_no_news() -> None:
    both, line = Repeated(), Line()
    for tokens in (5, 7):
        both.pings.take(ping("D", workload=Workload(tokens=tokens, age=0.5)), line)
        await asyncio.sleep(0.01)
        both.update()
        (instance,) = both.registry.known("D")
        assert instance.report is not None and instance.report.work.tokens == tokens
        assert 0.51 <= both.now - instance.report.at < DEADLINE
    assert both.news == 1


async def test_a_closed_connection_takes_its_instance_along() -> None:
    both, line = Repeated(), Line()
    both.hear(ping("D", incarnation="first"), line)
    assert both.registry.routable("D", 115.0), "silent, and its connection stands"
    line.open = False
    both.update()
    assert not both.registry.routable("D", 115.0)
    second = Line()
    both.hear(ping("D", incarnation="second"), second)
    assert [each.ping.incarnation for each in both.registry.known("D")] == ["second"]
    second.open = False  # and its successor is in the same update
    both.hear(ping("D", incarnation="third"))
    assert [each.ping.incarnation for each in both.registry.known("D")] == ["third"]
    assert both.registry.claims_refused == 0


async def test_an_address_belongs_to_its_holder_here_too_unless_a_member_wants_it() -> None:
    both = Repeated()
    both.pings.take(ping("D", incarnation="first"), Line())
    both.hear(ping("D", incarnation="thief"))
    assert [each.ping.incarnation for each in both.registry.known("D")] == ["first"]
    assert both.registry.claims_refused == 1
    both.hear(ping("D", incarnation="member"), Line(member=True))
    assert [each.ping.incarnation for each in both.registry.known("D")] == ["member"]


async def test_a_goodbye_reaches_workers_and_those_that_begin_after_it() -> None:
    both, line = Repeated(), Line()
    both.hear(ping("D"), line)
    both.pings.take(goodbye(ping("D")), line)
    assert both.news == 2
    for _ in range(2):
        both.update()
        assert both.registry.known("D") == []
        both.begin()
    both.hear(ping("D"), line)
    assert len(both.registry.known("D")) == 1, "it has come back"


async def test_what_a_worker_answers_to_a_ping_goes_to_its_sender() -> None:
    both, one, other = Repeated(), Line(), Line()
    both.pings.take(ping("D", 1), one)
    both.pings.take(ping("D", 2), other)
    for number, frame in both.update().answers:
        both.pings.answer(number, frame)
    assert (one.told, other.told) == ([b"to 10.0.0.1:1"], [b"to 10.0.0.1:2"])
    assert both.update().answers == []
    both.pings.answer(12345, b"of a connection that is gone")


async def test_however_many_addresses_are_pinged_what_is_kept_is_bounded() -> None:
    both, line = Repeated(), Line()
    for port in range(1, MAX_INSTANCES + 100):
        both.pings.take(ping("D", port), line)
    both.pings.take(ping("P"), Line())
    assert len(both.pings.all()) == MAX_INSTANCES
    assert len(both.pings._numbers) == 1


def long_ping() -> Ping:
    """One that fits into a ping's bound only without the fields that it leaves out."""
    fields = {"type": "P", "http_address": "10.0.0.1:1", "zmq_address": "10.0.0.1:2", "model": ""}
    fields["transfer_mode"] = "\N{ROCKET}" * 500
    fields["model"] = "\N{EURO SIGN}" * 500
    fields["fit"] = "f" * (MAX_PING_BYTES - 4 - len(msgspec.msgpack.encode(fields | {"fit": ""})))
    return decode_ping(msgspec.msgpack.encode(fields))


async def test_a_ping_that_grows_by_its_defaults_reaches_the_workers() -> None:
    both, message = Repeated(), long_ping()
    assert len(encode_ping(message)) > MAX_PING_BYTES
    both.hear(message)
    assert both.registry.of(message) is not None


async def test_only_a_worker_that_begins_takes_over_drains() -> None:
    both, line = Repeated(), Line()
    for port in (1, 2):
        both.pings.take(ping("D", port, incarnation="x"), line)
    both.update()
    first, _ = both.registry.known("D")
    both.registry.drain(first, True)
    both.drains = both.update().drains
    both.begin()
    both.update()
    assert not both.worker.updated.is_set(), "a drain may not have reached the supervisor in time for it"
    both.update()
    assert both.worker.updated.is_set()
    assert [each.drained for each in both.registry.known("D")] == [True, False]
    both.worker.serving = True
    first, _ = both.registry.known("D")
    both.registry.drain(first, False)
    assert both.update().drains == [] and not first.drained, "the supervisor may be late to learn of a resume"


async def test_a_drain_may_be_known_before_its_instance() -> None:
    old, new = Registry(), Registry()
    old.drain(join(old, ping("D", 1, incarnation="x")), True)
    old.drain(join(old, ping("D", 2, incarnation="y")), True)
    new.adopt_drains(msgspec.msgpack.decode(msgspec.msgpack.encode(old.drains())))
    assert join(new, ping("D", 1, incarnation="x")).drained
    assert not join(new, ping("D", 2, incarnation="its successor")).drained
    assert not join(new, ping("D", 3, incarnation="x")).drained


async def test_workers_and_those_that_begin_learn_who_is_paused() -> None:
    both, line, message = Repeated(), Line(), ping("D")
    both.hear(message, line)
    both.pings.take(msgspec.structs.replace(message, paused=True), line)
    assert both.news == 2, "a pause is news"
    for _ in range(2):
        both.update()
        assert both.registry.known("D")[0].paused
        both.begin()


# Workers that end, freeze, or cannot be started.

Begin = Callable[[WorkerConfig], Awaitable[None]]


class Process:
    """In place of a worker's process: a task of this one."""

    def __init__(self, target: Begin, args: tuple[WorkerConfig], **_: Any) -> None:
        self._begin, (self._seat,) = target, args
        self.sentinel, self._end = os.pipe()
        self._task: asyncio.Task[None] | None = None
        self.exitcode: int | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._begin(self._seat)
        finally:
            self.exitcode = self.exitcode or 0
            os.close(self._end)

    def kill(self) -> None:
        self.exitcode = -signal.SIGKILL
        assert self._task is not None
        self._task.cancel()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def join(self) -> None:
        os.close(self.sentinel)


async def work(
    seat: WorkerConfig,
    siblings: list[Siblings] | None = None,
    before: Callable[[], object] = lambda: None,
    take: Callable[[Ping, Any], object] = lambda *_: None,
    until: asyncio.Event | None = None,
    **parts: Any,
) -> None:
    """As a worker that is in order; `siblings` gets its side of all workers, `before` is called at each
    update, and `until` ends it."""
    worker = WorkerState(seat)
    worker.serving = True
    if siblings is not None:
        siblings.append(Siblings(parts, seat.others))

    def update(raw: Any) -> WorkerReport:
        before()
        return worker.update(msgspec.convert(raw, Update), Registry(), take)

    async with answering(seat.socket, parts | {"update": update}):
        await (until or worker.stop).wait()


async def freeze(seat: WorkerConfig) -> None:
    """It has begun to serve, and answers nothing any more."""
    served = False

    def before() -> None:
        nonlocal served
        if served:
            raise NoAnswer
        served = True

    await work(seat, before=before, until=asyncio.Event())


async def start_slowly(begin: asyncio.Event, seat: WorkerConfig) -> None:
    await begin.wait()
    await work(seat)


async def serve_and_end(seat: WorkerConfig) -> None:
    """It serves, and ends when it has said so."""
    said = asyncio.Event()
    await work(seat, before=lambda: asyncio.get_running_loop().call_later(0.05, said.set), until=said)


async def end_at_once(seat: WorkerConfig) -> None:
    return None


class Lives:
    """What each worker's processes do, one after the other; the last one goes on for ever.

    Attributes:
        begun: the numbers of the workers whose processes have begun.
    """

    def __init__(self, *workers: list[Begin]) -> None:
        self._workers = workers
        self.begun: list[int] = []

    async def __call__(self, seat: WorkerConfig) -> None:
        lives = self._workers[seat.number - 1]
        self.begun.append(seat.number)
        await (lives.pop(0) if len(lives) > 1 else lives[0])(seat)

    def began_again(self, number: int, times: int) -> Callable[[], bool]:
        return lambda: self.begun.count(number) > times


@asynccontextmanager
async def supervised(lives: Lives, workers: int, folder: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(workers, [], folder, lives)
    try:
        yield supervisor
    finally:
        async with asyncio.timeout(DEADLINE):
            await supervisor.stop(1000.0, asyncio.Event())


@asynccontextmanager
async def started(folder: Path, *workers: list[Begin]) -> AsyncIterator[Lives]:
    """Workers that have begun to serve."""
    lives = Lives(*workers)
    async with supervised(lives, len(workers), folder) as supervisor:
        await supervisor.start(asyncio.Event())
        yield lives


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(Process=Process)
    monkeypatch.setattr("p2pkv_proxy.supervisor.multiprocessing.get_context", lambda method: context)
    monkeypatch.setattr("p2pkv_proxy.supervisor._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("p2pkv_proxy.supervisor._UPDATE_SECONDS", 0.01)
    monkeypatch.setattr("p2pkv_proxy.supervisor._START_SECONDS", 0.01)


async def test_a_frozen_worker_is_restarted_and_a_starting_one_is_not(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    begin = asyncio.Event()
    lives = Lives([partial(start_slowly, begin)], [freeze, work])
    async with supervised(lives, 2, tmp_path) as supervisor:
        starting = asyncio.create_task(supervisor.start(asyncio.Event()))
        await eventually(lives.began_again(2, times=1), "the frozen worker's successor")
        assert "worker 2 has not answered 5 times: it is killed" in caplog.text
        assert "worker 2 was ended by SIGKILL" in caplog.text
        begin.set()
        await starting
    assert lives.begun == [1, 2, 2]


async def test_four_missed_answers_kill_no_worker(tmp_path: Path) -> None:
    asked = 0

    def misses_some() -> None:
        nonlocal asked
        asked += 1
        if asked % 5:
            raise NoAnswer

    async with started(tmp_path, [partial(work, before=misses_some)]) as lives:
        await eventually(lambda: asked > 30, "questions")
    assert lives.begun == [1]


async def test_the_pause_before_a_restart_doubles_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("p2pkv_proxy.supervisor._LONGEST_PAUSE", 0.05)
    async with started(tmp_path, [serve_and_end, *[end_at_once] * 5, work]) as lives:
        await eventually(lives.began_again(1, times=6), "the last one")
    pauses = re.findall(r"another starts in (\S+) s", caplog.text)
    assert pauses == ["0.01", "0.02", "0.04", "0.05", "0.05", "0.05"]
    caplog.clear()
    monkeypatch.setattr("p2pkv_proxy.supervisor._LIVED_SECONDS", 0.0)
    async with started(tmp_path, [serve_and_end, *[end_at_once] * 2, work]) as lives:
        await eventually(lives.began_again(1, times=3), "the last one")
    assert set(re.findall(r"another starts in (\S+) s", caplog.text)) == {"0.01"}


async def test_a_worker_that_cannot_be_started_for_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    starts, no_memory = Process.start, [False, True, True, False]

    def start(process: Process) -> None:
        if no_memory.pop(0):
            raise OSError("Cannot allocate memory")
        starts(process)

    monkeypatch.setattr(Process, "start", start)
    async with started(tmp_path, [serve_and_end, work]) as lives:
        await eventually(lambda: lives.begun == [1, 1], "the worker's second process")
        assert caplog.text.count("could not be started (OSError('Cannot allocate memory'))") == 2


async def test_a_worker_that_can_never_be_started_is_the_end_of_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(process: Process) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(Process, "start", fail)
    async with supervised(Lives([work]), 1, tmp_path) as supervisor:
        with pytest.raises(WorkerFailed, match=r"worker 1 could not be started .* before it served"):
            await supervisor.start(asyncio.Event())


async def test_they_can_be_stopped_before_all_serve(tmp_path: Path) -> None:
    begin, stop = asyncio.Event(), asyncio.Event()
    lives = Lives([partial(start_slowly, begin)], [work])
    async with supervised(lives, 2, tmp_path) as supervisor:
        starting = asyncio.create_task(supervisor.start(stop))
        await eventually(supervisor.workers[1].served.is_set, "one of both")
        stop.set()
        async with asyncio.timeout(DEADLINE):
            await starting
        begin.set()
    assert lives.begun == [1, 2]


async def test_the_pause_after_a_death_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("p2pkv_proxy.supervisor._FIRST_PAUSE", 1000.0)
    async with started(tmp_path, [serve_and_end]) as lives:
        await eventually(lambda: "worker 1 ended with status 0" in caplog.text, "its end")
    assert lives.begun == [1]


async def test_a_round_of_updates_that_fails_is_followed_by_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    lives, fails = Lives([work]), True

    def stands() -> bool:
        if fails:
            raise RuntimeError("made up")
        return True

    async with supervised(lives, 1, tmp_path) as supervisor:
        line = Line()
        monkeypatch.setattr(line, "stands", stands, raising=False)
        supervisor.pings.take(ping("D"), line)
        starting = asyncio.create_task(supervisor.start(asyncio.Event()))
        await eventually(lambda: "a round of updates failed" in caplog.text, "a failure")
        fails = False
        await starting


async def test_a_new_instance_reaches_all_workers_without_waiting_for_the_next_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("p2pkv_proxy.supervisor._UPDATE_SECONDS", 1000.0)
    taken: list[int] = []

    async def follows(seat: WorkerConfig) -> None:
        await work(seat, take=lambda *_: taken.append(seat.number))

    async with supervised(Lives([follows], [follows]), 2, tmp_path) as supervisor:
        await supervisor.start(asyncio.Event())
        await eventually(lambda: not supervisor._news.is_set(), "a quiet moment")
        supervisor.pings.take(ping("D"), Line())
        await eventually(lambda: sorted(taken) == [1, 2], "both")


# What all workers say.


class MayBeBusy:
    """A worker that answers every question in the same way, until it is too busy for that."""

    def __init__(self, said: Any) -> None:
        self._said = said
        self.busy = False

    async def __call__(self, seat: WorkerConfig) -> None:
        def answer(_: Any) -> Any:
            if self.busy:
                raise NoAnswer
            return self._said

        await work(seat, instances=answer, drain=answer, metrics=answer)


async def test_an_instance_is_not_drained_before_all_workers_have_said_so(tmp_path: Path) -> None:
    instance = {"role": "decode", "address": "127.0.0.1:9", "rank": 0, "state": "drained"}
    other, siblings = MayBeBusy([instance]), list[Siblings]()

    def says(_: Any) -> list[dict[str, Any]]:
        return [instance]

    async def states(all_workers: Siblings) -> list[str]:
        match_info = {"address": "127.0.0.1:9"}
        shown = {"Authorization": "Bearer t"}
        post = make_mocked_request("POST", "/", headers=shown, match_info=match_info)
        pages = [
            await listed(all_workers, Access(), make_mocked_request("GET", "/")),
            await changed(all_workers, Access("t"), post, "drain"),
        ]
        return [each["state"] for page in pages for each in msgspec.json.decode(page.body)["instances"]]

    first = partial(work, siblings=siblings, instances=says, drain=says)
    async with started(tmp_path, [first], [other]):
        assert await states(siblings[0]) == ["drained", "drained"]
        other.busy = True
        assert await states(siblings[0]) == ["draining", "draining"]


async def test_the_counters_of_a_worker_that_is_late_stay_in_the_sum(tmp_path: Path) -> None:
    counted = ("requests", "x", "counter", [("requests_total", {}, 3.0)])
    families: list[Family] = [counted, ("running", "x", "gauge", [("running", {}, 1.0)])]
    other, siblings = MayBeBusy(families), list[Siblings]()

    async def sums() -> list[str]:
        page = make_mocked_request("GET", "/metrics")
        text = (await metrics_page(siblings[0], Access(), page)).body.decode()
        return [line for line in text.splitlines() if not line.startswith("#")]

    first = partial(work, siblings=siblings, metrics=lambda _: families)
    async with started(tmp_path, [first], [other]):
        assert await sums() == ["requests_total 6.0", "running 2.0"]
        other.busy = True
        assert await sums() == ["requests_total 6.0", "running 1.0"]


async def test_a_worker_that_does_not_answer_in_time_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv_proxy.siblings.ANSWER_SECONDS", 0.1)
    stuck = await asyncio.start_unix_server(lambda *_: asyncio.Event().wait(), tmp_path / "2")
    try:
        with pytest.raises(NoAnswer):
            await ask(tmp_path / "2", "status", None)
        heard = await Siblings({"status": lambda _: "mine"}, {2: tmp_path / "2"}).ask("status")
        assert heard == (["mine"], False)
    finally:
        stuck.close()
