"""The real command: it starts, serves, and stops."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from proxy_fakes import pinging
from proxy_process import running, served

from p2pkv.control.discovery import Ping
from p2pkv.control.security import Members
from p2pkv.demo.client import RequestFailed, get
from p2pkv.demo.processes import free_ports


def test_it_serves_and_stops_cleanly() -> None:
    discovery = f"127.0.0.1:{free_ports()}"
    with running("--port", "0", "--discovery", discovery, "--dispatch", "sequential") as command:
        line = command.says(r"serving on (http://127\.0\.0\.1:\d+), discovery on tcp://(\S+), sequential")
        assert line[2] == discovery
        with pinging(discovery, Ping(type="P", http_address="127.0.0.1:9", zmq_address="127.0.0.1:10")):
            command.says(r"prefill instance 127\.0\.0\.1:9 registered")
            with pytest.raises(RequestFailed, match=r"answered 503: .*of 1 registered"):
                get(f"{line[1]}/health")
        command.says("said goodbye")
        command.process.send_signal(signal.SIGINT)  # test_stopping.py sends SIGTERM
        assert command.end() == 0
        assert "Traceback" not in command.log


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """What is started meanwhile has half of what it may take; gives all of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_takes_all_the_descriptors_that_it_may(few_descriptors: int) -> None:
    """A request needs three of them, and a shell gives 1024. Discovery may be given by name."""
    port = free_ports()
    with running("--port", "0", "--discovery", f"localhost:{port}") as command:
        command.says(rf"serving on .*discovery on tcp://127\.0\.0\.1:{port}, concurrent")
        limits = Path(f"/proc/{command.process.pid}/limits").read_text()
        assert re.search(rf"Max open files +{few_descriptors} +{few_descriptors} ", limits)


def test_a_taken_port_is_said_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments in (
            ["--port", port, "--discovery", f"127.0.0.1:{free_ports()}"],
            ["--port", "0", "--discovery", f"127.0.0.1:{port}"],
        ):
            with running(*arguments) as command:
                assert command.end() == 1
                assert f"127.0.0.1:{port}" in command.log.replace("('127.0.0.1', ", "127.0.0.1:")
                assert "Traceback" not in command.log


def test_with_a_secret_only_members_register_and_the_plain_port_is_another(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of the tests\n")
    guarded, plain = f"127.0.0.1:{free_ports()}", f"127.0.0.1:{free_ports()}"
    arguments = ("--secret-file", str(secret), "--discovery", guarded, "--plain-discovery", plain)
    ways = [(guarded, Members(b"a secret of the tests")), (plain, None), (guarded, None)]
    pings = [
        Ping(type="P", http_address=f"127.0.0.1:{number}", zmq_address=f"127.0.0.1:1{number}")
        for number in (7, 8, 9)
    ]
    with running("--port", "0", *arguments) as command, ExitStack() as stack:
        command.says("for members only")
        command.says(rf"plain discovery on tcp://{re.escape(plain)}")
        for (place, members), ping in zip(ways, pings, strict=True):
            stack.enter_context(pinging(place, ping, members=members))
        command.says(r"instance 127\.0\.0\.1:7 registered")
        command.says(r"instance 127\.0\.0\.1:8 registered")
        command.says(r"refused .\d+ so far.: one side has a secret")
        assert "127.0.0.1:9 registered" not in command.log
        assert "a secret of" not in command.log


def test_off_loopback_without_a_secret_it_must_be_meant() -> None:
    everywhere = f"0.0.0.0:{free_ports()}"
    with running("--port", "0", "--discovery", everywhere, "--allow-insecure") as command:
        command.says(f"any process that reaches {re.escape(everywhere)} can register an instance")
        command.says("serving on .* open to all")


async def test_proxies_share_a_port_and_each_has_pages_of_its_own() -> None:
    """When one has ended the other has all of the connections."""
    port = str(free_ports())
    admins = [f"127.0.0.1:{free_ports()}" for _ in range(2)]
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(
                served("--port", port, "--reuse-port", "--admin", admin, keep=False)
            )
            for admin in admins
        ]
        with running("--port", port, "--discovery", f"127.0.0.1:{free_ports()}") as third:
            assert await asyncio.to_thread(third.end) == 1
            assert "address already in use" in third.log, "it does not say that it means to share"

        async def ended(at: int) -> int:
            async with one.client.get(f"http://{admins[at]}/status") as response:
                return sum((await response.json())["outcomes"].values())

        for _ in range(40):
            assert (await one.post()).status == 200
        counted = [await ended(0), await ended(1)]
        assert sum(counted) == 40 and min(counted) > 0
        one.terminate()
        await one.ended()
        for _ in range(10):
            assert (await other.post()).status == 200
        assert await ended(1) == counted[1] + 10
