"""The process that announces an instance: beside a worker that is busy, frozen, killed, or ends well."""

import contextlib
import http.server
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from p2pkv.control import announcer_child, pinger
from p2pkv.control.announcer import Announcement, Announcer, EngineHealth
from p2pkv.control.discovery import Ping, Workload, decode_ping, encode_partners, goodbye, lasting
from p2pkv.control.security import Members
from p2pkv.control.warm_up_prompts import REQUEST_MARK, WarmUp
from p2pkv.demo.processes import free_ports
from support.hostile import router
from support.links.pairs import Peer, starting
from support.waiting import wait_for

SCRIPT = Path(__file__).with_name("announcer_peer.py")
PING = Ping(type="P", http_address="127.0.0.1:8100", zmq_address="127.0.0.1:21001", incarnation="one")
SECRET = b"a secret of the tests"
INTERVAL = 0.1
QUIET = 1.0
"""Seconds without a ping that are no accident; a machine in a hurry may keep a single one back for longer."""


class Proxy:
    """The discovery socket, of which the connections are watched."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.events = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.address = f"127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def hear(self, seconds: float = 20.0) -> Ping:
        return self.hear_from(seconds)[1]

    def hear_from(self, seconds: float = 20.0) -> tuple[bytes, Ping]:
        assert self.socket.poll(int(seconds * 1000)), f"no ping in {seconds:g} s"
        sender, frame = self.socket.recv_multipart()
        return sender, decode_ping(frame)

    def hear_goodbye(self, ping: Ping) -> None:
        """After pings that are all the same."""
        while (said := self.hear()) == ping:
            continue
        assert said == goodbye(ping)

    def answer(self, *addresses: str) -> None:
        self.socket.send_multipart([self.hear_from()[0], encode_partners(addresses)])

    def silent(self) -> bool:
        """Whether no ping comes for a while, after those that have come already."""
        while self.socket.poll(0):
            self.socket.recv_multipart()
        return not self.socket.poll(int(QUIET * 1000))

    def hear_no_more(self) -> None:
        wait_for(self.silent, what="the last ping")

    def lost_the_connection(self, seconds: float = 20.0) -> bool:
        return bool(self.events.poll(int(seconds * 1000)))


@contextlib.contextmanager
def listening() -> Iterator[Proxy]:
    with zmq.Context() as context:
        made = Proxy(context)
        yield made
        made.socket.disable_monitor()
        made.events.close(0)
        made.socket.close(0)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with listening() as made:
        yield made


@pytest.fixture
def start(proxy: Proxy) -> Iterator[Callable[..., tuple[Peer, int]]]:
    """Start a worker that announces itself; it, and the process id of its child."""
    with starting() as begin:

        def start(**changes: Any) -> tuple[Peer, int]:
            announcement = Announcement(proxies=(proxy.address,), ping=PING, interval=INTERVAL)
            changed = msgspec.structs.replace(announcement, **changes)
            peer = begin(msgspec.json.encode(changed).decode(), script=SCRIPT)
            return peer, peer.hear()["pid"]

        yield start


@contextlib.contextmanager
def announcing(
    *proxies: str, ping: Ping = PING, heard: Any = lambda _: None, **more: Any
) -> Iterator[Announcer]:
    announcement = Announcement(proxies=proxies, ping=ping, interval=INTERVAL, **more)
    announcer = Announcer(announcement, heard, EngineHealth)
    try:
        yield announcer
    finally:
        announcer.stop()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_worker_that_holds_its_lock_is_vouched_for_until_it_counts_as_hung(start, proxy) -> None:
    worker, _ = start(stall_seconds=3.0)
    assert proxy.hear() == PING
    worker.tell(do="hold", seconds=7.0)
    assert worker.hear() == {"holding": True}
    end, pings = time.monotonic() + 2.0, 0
    while time.monotonic() < end:
        assert proxy.hear(2.0) == PING
        pings += 1
    assert pings > 5
    proxy.hear_no_more()
    assert proxy.hear() == PING, "it is back when it beats"
    assert worker.hear() == {"done": True}


def test_a_worker_whose_engine_does_not_get_on_is_not_announced_until_it_does(start, proxy) -> None:
    worker, pid = start()
    proxy.hear()
    worker.tell(do="stand", standing={"trouble": "its engine core is stopped", "paused": False})
    proxy.hear_no_more()
    worker.tell(do="stand", standing={"trouble": "", "paused": False})
    assert proxy.hear() == PING
    assert not gone(pid)


def test_what_changes_travels_with_pings_and_at_once(start, proxy) -> None:
    """A pause, and what the scheduler has to do."""
    worker, _ = start(interval=60.0)  # so what comes soon has not waited for the next ping
    assert proxy.hear() == PING
    for paused in (True, False):
        worker.tell(do="stand", standing={"trouble": "", "paused": paused})
        assert proxy.hear(10.0) == msgspec.structs.replace(PING, paused=paused)
    for tokens in (500, 0):
        work = {"running": 1, "waiting": 2, "prompts": 3, "tokens": tokens, "answers": 4}
        worker.tell(do="stand", standing={"workload": work, "at": time.monotonic()})
        ping = proxy.hear(10.0)
        assert lasting(ping) == PING
        assert ping.workload is not None and 0.0 < ping.workload.age < 60.0
        assert msgspec.structs.replace(ping.workload, age=0.0) == Workload(**work)
    worker.tell(do="stand", standing={"workload": work, "at": time.monotonic()})
    assert proxy.silent(), "nothing has changed but its age"


def test_a_clean_end_says_goodbye_and_no_signal_for_the_group_ends_the_child_before(start, proxy) -> None:
    worker, child = start()
    proxy.hear()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(child, number)
    worker.tell(do="stop")
    assert worker.hear() == {"done": True}
    proxy.hear_goodbye(PING)
    assert gone(child)


def test_a_killed_worker_takes_its_child_and_the_connection_along(start, proxy) -> None:
    worker, child = start()
    proxy.hear()
    worker.kill()
    assert proxy.lost_the_connection()
    wait_for(lambda: gone(child), what="the end of the child")
    while proxy.socket.poll(0):
        assert not proxy.hear().leaving, "a crash is no goodbye"


def test_a_worker_that_has_died_before_it_has_read_all_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end of their socket is then reset, and not only closed."""

    def ended(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", ended)
    line, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with line:
        line.send(encode_partners(["10.0.0.1:1"]))
        workers.close()
        task = Announcement(proxies=(), ping=PING, parent=os.getppid())
        with pytest.raises(SystemExit, match="0"):
            announcer_child._Worker(line, task).follow(lambda: None)


def test_a_proxy_without_a_connection_is_named_in_the_log(
    proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinger, "_UNREACHED_SECONDS", 0.2)
    absent = f"127.0.0.1:{free_ports()}"
    ours = pinger.Pinger([absent, proxy.address], PING, 0.1)
    ours.start()
    try:
        wait_for(lambda: "no connection to the proxy at" in caplog.text, what="the line")
        proxy.hear()
    finally:
        ours.stop()
    assert absent in caplog.text and proxy.address not in caplog.text


def test_a_proxy_that_refuses_is_not_called_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_UNREACHED_SECONDS", "_LOG_SECONDS", "_REDIAL_SECONDS"):
        monkeypatch.setattr(pinger, name, 0.3)
    with router(Members(b"another secret")) as (_, place):
        ours = pinger.Pinger([str(place)], PING, 0.1, members=Members(SECRET))
        ours.start()
        try:
            wait_for(lambda: caplog.text.count("refused the handshake") >= 4, what="several refusals")
        finally:
            ours.stop()
    assert "no connection" not in caplog.text


def test_the_worker_hears_what_the_proxy_answers(proxy) -> None:
    heard: list[tuple[str, ...]] = []
    ping = msgspec.structs.replace(PING, type="D", partners=3)
    answer = proxy.answer
    with announcing(proxy.address, ping=ping, heard=heard.append) as announcer:
        answer("10.0.0.1:1", "10.0.0.2:1")
        wait_for(lambda: heard == [("10.0.0.1:1", "10.0.0.2:1")], what="the first answer")
        answer("10.0.0.1:1", "10.0.0.2:1")
        answer("10.0.0.2:1")
        wait_for(lambda: heard[1:] == [("10.0.0.2:1",)], what="the second, which is another one")
        os.kill(announcer._child.pid, signal.SIGKILL)
        assert proxy.lost_the_connection()
        while proxy.socket.poll(0):
            proxy.socket.recv_multipart()
        answer()
        wait_for(lambda: heard[2:] == [()], what="what the child's successor has heard")


def test_several_proxies_each_get_all_pings_and_the_goodbye_and_one_may_be_away(proxy) -> None:
    """And the worker hears of all that any of them names."""
    heard: list[tuple[str, ...]] = []
    ping = msgspec.structs.replace(PING, type="D", partners=3)
    absent = f"127.0.0.1:{free_ports()}"
    with listening() as other:
        with announcing(absent, proxy.address, other.address, ping=ping, heard=heard.append):
            for each, named in ((proxy, ["10.0.0.1:1"]), (other, ["10.0.0.1:1", "10.0.0.2:1"])):
                each.answer(*named)
                wait_for(lambda named=named: heard and heard[-1] == tuple(named), what="all that are named")
        for each in (proxy, other):
            each.hear_goodbye(ping)


def test_one_can_be_stopped_twice() -> None:
    with announcing("127.0.0.1:9") as announcer:
        announcer.stop()
    assert not [each for each in threading.enumerate() if each.name == "p2pkv-announcer"]


# The warm-up.


class Api:
    """An instance's HTTP API: healthy after `sick` questions, and with `key` it wants one."""

    def __init__(self, sick: int = 0, key: str = "", status: int = 200) -> None:
        self.sick, self.key, self.status = sick, key, status
        self.asked: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.replicas: list[str | None] = []
        self.answer = threading.Event()
        self.answer.set()
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.sick -= 1
                self.reply(503 if api.sick >= 0 or self.path != "/health" else 200)

            def do_POST(self) -> None:
                api.ids.append(self.headers["X-Request-Id"])
                api.replicas.append(self.headers["X-data-parallel-rank"])
                api.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                allowed = not api.key or self.headers["Authorization"] == f"Bearer {api.key}"
                api.answer.wait(30.0)
                self.reply(api.status if allowed else 401)

            def reply(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.answer.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def api() -> Iterator[Callable[..., Api]]:
    made: list[Api] = []

    def make(**how: Any) -> Api:
        made.append(Api(**how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def plan(url: str, **changes: Any) -> WarmUp:
    return msgspec.structs.replace(
        WarmUp(url=url, model="tiny", tokens=49, seconds=20.0, api_key=""), **changes
    )


def test_no_ping_before_the_first_prompt_is_answered(start, proxy, api) -> None:
    there = api(sick=2, key="a key")
    there.answer.clear()
    start(warm_up=plan(there.url, api_key="a key\n"))
    wait_for(lambda: there.asked, what="the first prompt")
    assert proxy.silent()
    there.answer.set()
    assert proxy.hear() == PING
    body, sampled = there.asked
    assert (body["model"], body["max_tokens"], body["truncate_prompt_tokens"]) == ("tiny", 2, 49)
    assert len(body["prompt"].split()) == 49
    assert body["temperature"] == 0.0 and sampled["temperature"] == 1.0 and sampled["n"] > 1
    assert body["logprobs"] and sampled["logprobs"]
    assert there.ids[0].startswith(REQUEST_MARK) and "addr" not in there.ids[0]
    assert there.replicas == [None, None]


def test_a_data_parallel_engine_warms_itself_up_and_every_first_prompt_is_another(start, proxy, api) -> None:
    there = api()
    for number in (2, 4):
        start(warm_up=plan(there.url, replica=1))
        wait_for(lambda number=number: len(there.asked) == number, what="the first prompts")
    assert there.replicas == ["1"] * 4
    assert len({each["prompt"] for each in there.asked}) == 4


UNWARMED: dict[str, tuple[dict[str, Any], str]] = {
    "nobody": ({}, "did not answer 200 in 1 s"),
    "never healthy": ({"sick": 1000}, "status 503"),
    "no answer": ({}, "were not answered in 1 s"),
    "an error": ({"status": 500}, "status 500"),
    "a key is missing": ({"key": "a key"}, "VLLM_API_KEY"),
    "a strange key": ({}, "characters that no HTTP header can carry"),
}


@pytest.mark.parametrize("kind", UNWARMED)
def test_who_cannot_be_warmed_up_is_announced_all_the_same_and_the_log_says_why(
    proxy, api, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    how, why = UNWARMED[kind]
    there = api(**how)
    if kind == "no answer":
        there.answer.clear()
    url = f"http://127.0.0.1:{free_ports()}" if kind == "nobody" else there.url
    warm_up = plan(url, seconds=1.0, api_key="private\tkey" if kind == "a strange key" else "")
    with announcing(proxy.address, warm_up=warm_up):
        assert proxy.hear() == PING
    said = capfd.readouterr().err
    assert "WARNING" in said and "not warmed up" in said and "announced all the same" in said
    assert "private" not in said and why in said


def test_who_is_stopped_before_it_is_warm_says_nothing(start, proxy, api) -> None:
    there = api()
    there.answer.clear()
    worker, child = start(warm_up=plan(there.url))
    wait_for(lambda: there.asked, what="the first prompt")
    worker.tell(do="stop")
    assert worker.hear() == {"done": True}
    assert gone(child) and proxy.silent()
