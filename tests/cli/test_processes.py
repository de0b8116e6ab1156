"""Server processes: started, waited for, frozen, and gone with all their children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from p2pkv.demo.processes import (
    Ports,
    ServerFailed,
    ServerProcess,
    answers_ok,
    free_ports,
    group_members,
    wait_until,
)

# Serves /, with a child that does not listen to SIGTERM.
SERVER = """
import http.server, signal, subprocess, sys
deaf = "from signal import *; signal(SIGTERM, SIG_IGN); print('deaf', flush=True); pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
print("serving", flush=True)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def health_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/"


def process(tmp_path: Path, code: str, *arguments: str, port: int = 1) -> ServerProcess:
    return ServerProcess(
        "demo server",
        [sys.executable, "-c", code, *arguments],
        health_url=health_url(port),
        log_path=tmp_path / "logs" / "server.log",
        env=os.environ,
    )


@pytest.fixture
def port() -> int:
    return free_ports()


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[ServerProcess]:
    server = process(tmp_path, SERVER, str(port), port=port)
    with server:
        server.wait_ready(30.0)
        yield server
        server.stop(grace_seconds=0.2)


def test_a_page_of_this_machine_is_asked_without_a_proxy(
    server: ServerProcess, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert answers_ok(health_url(port))


def test_stop_takes_the_children_along(server: ServerProcess) -> None:
    group = server.pid
    assert len(group_members(group)) == 2
    server.stop(grace_seconds=0.5)
    assert group_members(group) == []
    assert not server.running()
    server.stop()


def test_kill_is_at_once_and_the_server_can_start_again(server: ServerProcess) -> None:
    group = server.pid
    server.kill()
    assert group_members(group) == []
    server.start()
    server.wait_ready(30.0)
    assert server.pid != group


def test_a_frozen_server_answers_again_when_thawed(server: ServerProcess, port: int) -> None:
    url = health_url(port)
    server.freeze()
    assert not answers_ok(url, timeout_seconds=0.3)
    server.thaw()
    wait_until(lambda: answers_ok(url), "an answer", 10.0)


def test_a_frozen_server_can_be_stopped(server: ServerProcess) -> None:
    group = server.pid
    server.freeze()
    server.stop(grace_seconds=0.5)
    assert group_members(group) == []


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("print('no such model'); raise SystemExit(3)", 30.0, r"(?s)ended before it served.*no such model"),
        ("import time; time.sleep(600)", 0.3, r"did not serve within 0\.3 s"),
    ],
)
def test_a_server_that_does_not_serve_is_reported(
    tmp_path: Path, code: str, seconds: float, said: str
) -> None:
    with process(tmp_path, code) as server, pytest.raises(ServerFailed, match=said):
        server.wait_ready(seconds)
    assert not server.running()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_servers_on_the_way_out(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from p2pkv.demo.processes import ServerProcess, ending_on_signals
with ending_on_signals():
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    log = Path({str(tmp_path / "log")!r})
    with ServerProcess("s", sleep, health_url="", log_path=log, env=os.environ) as server:
        print(server.pid, flush=True)
        time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        group = int(demo.stdout.readline())
        demo.send_signal(number)
        assert demo.wait(30.0) == 128 + number
    assert group_members(group) == []


def test_free_ports_are_consecutive_free_and_never_given_twice() -> None:
    firsts = [free_ports(4) for _ in range(5)]
    ports = [first + offset for first in firsts for offset in range(4)]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_processes_that_ask_for_ports_at_the_same_time_get_different_ones() -> None:
    code = """
from p2pkv.demo.processes import free_ports
print(*(free_ports(3) for _ in range(100)), flush=True)
input()
"""
    ask = [sys.executable, "-c", code]
    with ExitStack() as stack:
        asking = [
            stack.enter_context(
                subprocess.Popen(ask, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(3)
        ]
        firsts = [int(first) for each in asking for first in _line(each).split()]
        for each in asking:
            each.communicate("\n")
    assert len(firsts) == 300
    assert len({first + offset for first in firsts for offset in range(3)}) == 900


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_ports_are_given_again_only_when_all_were_used() -> None:
    ports = Ports(free_ports(32), blocks=1, block=32)
    first_round = [ports.take(15) for _ in range(2)]
    assert len(set(first_round)) == 2
    assert [ports.take(15) for _ in range(2)] == first_round
    with pytest.raises(ValueError, match="32 consecutive ports, expected 1 to 31"):
        ports.take(32)


def test_a_block_that_another_holds_is_left_to_it() -> None:
    first = free_ports(32)
    holder, other = (Ports(first, blocks=1, block=32) for _ in range(2))
    holder.take(1)
    with pytest.raises(RuntimeError, match=f"all ports from {first} to {first + 31}"):
        other.take(1)


def test_wait_until_names_what_did_not_come() -> None:
    with pytest.raises(TimeoutError, match="the tide: not within 0"):
        wait_until(lambda: False, "the tide", 0.0)
