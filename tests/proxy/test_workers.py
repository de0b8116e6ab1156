"""Several workers on one port: real processes, and fake instances in this one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from proxy_behaviours import streams
from proxy_process import DEADLINE, Command, Served, running, served

from p2pkv.demo.processes import free_ports
from p2pkv_proxy.admin import merged
from p2pkv_proxy.exposition import Family, page
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import WORST_FIRST
from p2pkv_proxy.supervisor import _addresses, bound, reserved, share_of
from p2pkv_proxy.worker import WorkerConfig
from support.waiting import eventually


async def answers(proxy: Served, count: int) -> list[int]:
    """The statuses of so many requests, one after the other, each over a connection of its own, which the
    kernel gives to one of the workers."""
    statuses = []
    for _ in range(count):
        async with await proxy.post() as response:
            await response.read()
            statuses.append(response.status)
    return statuses


async def both_have_worked(proxy: Served) -> None:
    """Requests until each worker has had one."""

    async def seen() -> bool:
        assert await answers(proxy, 1) == [200]
        said = (f"worker {number}: p2pkv_proxy.service: request ended" for number in (1, 2))
        return all(each in proxy.command.log for each in said)

    await eventually(seen, "a request for each worker", DEADLINE)


def processes(proxy: Served) -> dict[int, psutil.Process]:
    """Of the workers, by their numbers."""
    children = psutil.Process(proxy.command.process.pid).children()
    found = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return dict(enumerate(sorted(found, key=lambda each: each.create_time()), 1))


@asynccontextmanager
async def two(*arguments: str, decode: int = 1, tls: ssl.SSLContext | bool = True) -> AsyncIterator[Served]:
    """A proxy of two workers, which both know a P and so many D's."""
    async with served("--log-requests", *arguments, decode=decode, workers=2, tls=tls, keep=False) as proxy:
        await proxy.ready(1, decode, 2)
        yield proxy


async def test_two_workers_share_the_discovery_and_answer_as_one() -> None:
    async with two(decode=2) as deployment:
        await both_have_worked(deployment)
        assert set(await answers(deployment, 20)) == {200}
        sent = sum(len(each.requests) for each in deployment.instances) // 2
        for _ in range(4):  # whichever worker is asked
            page = (await deployment.get("/status"))[1]
            assert page["outcomes"]["answered"] == page["counters"]["admitted"] == sent
            assert sum(pair["total"] for pair in page["pairs"]) == sent
            assert [each["state"] for each in page["instances"]] == ["ready"] * 3
            text = await deployment.text("/metrics")
            metrics = {each.name: each for each in text_string_to_metric_families(text)}
            (answered,) = [s for s in metrics["p2pkv_proxy_requests"].samples if s.name.endswith("_total")]
            assert (answered.labels["outcome"], answered.value) == ("answered", sent)
            states = {tuple(s.labels.values()): s.value for s in metrics["p2pkv_proxy_instances"].samples}
            assert (states["P", "ready"], states["D", "ready"]) == (1, 2)
        deployment.terminate()
        await deployment.ended()


async def test_a_worker_that_cannot_come_up_takes_no_share_of_the_connections(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its certificate is gone, say. A request, over TLS, that it would get has to be answered by the
    other."""
    files = [Path(shutil.copy(each, tmp_path)) for each in certificate]
    arguments = [f"--ssl-{name}file={file}" for name, file in zip(("cert", "key"), files, strict=True)]
    trusted = ssl.create_default_context(cafile=certificate[0])
    async with two(*arguments, tls=trusted) as deployment:
        await both_have_worked(deployment)
        for file in files:
            file.unlink()
        processes(deployment)[1].kill()
        await deployment.says(r"(worker 1 ended with status 1: (.|\n)*){2}")
        assert set(await answers(deployment, 40)) == {200}
        assert "have to be a certificate and its key" in deployment.command.log
        for file, original in zip(files, certificate, strict=True):
            shutil.copy(original, file)
        await deployment.says(r"ended with status 1: (.|\n)*worker 1 serves")
        await deployment.ready(1, 1, 2)


async def test_a_worker_that_begins_turns_no_request_away_for_want_of_instances() -> None:
    """It takes no connection before it knows them, and has asked for their health."""
    async with two(decode=2) as deployment:
        await both_have_worked(deployment)
        statuses: list[int] = []
        for times in (1, 2):
            processes(deployment)[1].kill()
            serving = asyncio.create_task(
                deployment.says(rf"(worker \d was ended by SIGKILL: (.|\n)*){{{times}}}worker \d serves")
            )
            while not serving.done():
                with contextlib.suppress(aiohttp.ClientConnectionError):  # what the dead one had
                    statuses += await answers(deployment, 1)
        assert set(statuses) == {200} and len(statuses) > 20


@pytest.mark.long
async def test_one_signal_lets_the_streams_of_all_workers_end() -> None:
    finish = asyncio.Event()
    async with two() as deployment:
        await both_have_worked(deployment)
        deployment.d.behaviour = streams(finish)
        responses = [await deployment.post(stream=True) for _ in range(12)]
        deployment.terminate()
        for number in (1, 2):
            stopping = await deployment.says(
                rf"worker {number}: p2pkv_proxy.cli: stopping: (\d+) requests have 25 s"
            )
            assert int(stopping[1]) > 0, "the kernel gave all twelve to one worker"
        with pytest.raises(aiohttp.ClientConnectionError):
            await deployment.post()
        finish.set()
        for response in responses:
            assert "second" in await response.text()
        await deployment.ended()


@contextlib.contextmanager
def two_that_start() -> Iterator[tuple[Command, psutil.Process]]:
    """A command whose two workers have begun, and do not serve yet."""
    discovery = f"127.0.0.1:{free_ports()}"
    with running("--port", "0", "--discovery", discovery, "--workers", "2") as command:
        parent = psutil.Process(command.process.pid)
        end = time.monotonic() + DEADLINE
        while len(parent.children()) < 3:  # of which one is Python's own
            assert time.monotonic() < end and command.process.poll() is None, command.log
        yield command, parent


def test_ctrl_c_before_all_workers_serve_is_no_failure() -> None:
    """It goes to all processes of a terminal, and those that start could not ignore it yet."""
    with two_that_start() as (command, parent):
        for process in (*parent.children(), parent):
            process.send_signal(signal.SIGINT)
        command.stopped()
        assert "serving on" not in command.log, command.log


@pytest.mark.long
async def test_without_the_process_that_started_them_workers_end() -> None:
    async with two() as deployment:
        workers = list(processes(deployment).values())
        deployment.command.process.kill()
        gone, alive = await asyncio.to_thread(psutil.wait_procs, workers, DEADLINE)
        assert (len(gone), alive) == (2, [])
        assert "the process that started this worker is gone" in deployment.command.log


def test_starting_workers_end_with_their_parent() -> None:
    with two_that_start() as (command, parent):
        children = parent.children()
        command.process.kill()
        gone, alive = psutil.wait_procs(children, DEADLINE)
        assert (len(gone), alive) == (3, [])


@contextlib.contextmanager
def listening(host: str, workers: int = 2) -> Iterator[tuple[int, list[list[socket.socket]]]]:
    """The port, and the sockets at which so many workers listen; the ones that keep the port are the
    first."""
    kept = reserved(host, 0)
    seat = WorkerConfig(1, workers, tuple((each.family, each.getsockname()) for each in kept), Path())
    made = [bound(seat) for _ in range(workers)]
    for each in itertools.chain(*made):
        each.listen()
    try:
        yield kept[0].getsockname()[1], [kept, *made]
    finally:
        close([kept, *made])


def close(sockets: list[list[socket.socket]]) -> None:
    for each in itertools.chain(*sockets):
        each.close()


def test_another_proxy_of_the_same_user_does_not_take_half_of_the_connections() -> None:
    with listening("127.0.0.1") as (port, sockets):
        assert {each.getsockname()[1] for each in itertools.chain(*sockets)} == {port}
        with pytest.raises(OSError, match=f"cannot serve on 127.0.0.1:{port}: Address already in use"):
            reserved("127.0.0.1", port)


def test_what_keeps_the_port_gets_no_connections() -> None:
    with listening("127.0.0.1") as (port, (_, one, other)):
        close([other])
        for _ in range(20):
            assert _answers(socket.AF_INET, "127.0.0.1", port)
        close([one])
        assert not _answers(socket.AF_INET, "127.0.0.1", port)
        (again,) = bound(WorkerConfig(1, 1, ((socket.AF_INET, ("127.0.0.1", port)),), Path()))
        again.close()


def _answers(family: socket.AddressFamily, address: str, port: int) -> bool:
    try:
        with socket.socket(family) as client:
            client.settimeout(DEADLINE)
            return client.connect_ex((address, port)) == 0
    except OSError:
        return False


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "ipv4", "ipv6"), [("127.0.0.1", True, False), ("localhost", True, True), ("::1", False, True)]
)
def test_each_worker_listens_at_each_address_of_a_name(
    host: str, ipv4: bool, ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ipv6 and not _has_ipv6():
        pytest.skip("no IPv6 here")
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    if host == "localhost":  # which has one address only in some /etc/hosts
        monkeypatch.setattr("p2pkv_proxy.supervisor.socket.getaddrinfo", lambda *_, **__: found)
    with listening(host) as (port, sockets):
        assert [len(each) for each in sockets] == [ipv4 + ipv6] * 3
        assert _answers(socket.AF_INET, "127.0.0.1", port) == ipv4
        assert _answers(socket.AF_INET6, "::1", port) == ipv6
        of_ipv6 = [each for each in itertools.chain(*sockets) if each.family == socket.AF_INET6]
        assert all(each.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) for each in of_ipv6)


def test_an_empty_host_means_all_interfaces() -> None:
    assert "0.0.0.0" in {address[0] for _, address in _addresses("")}


def test_an_address_of_another_machine_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    for found in ([elsewhere, here], [elsewhere]):
        monkeypatch.setattr("p2pkv_proxy.supervisor.socket.getaddrinfo", lambda *_, found=found, **__: found)
        if here in found:
            (kept,) = reserved("a-name", 0)
            assert kept.getsockname()[0] == "127.0.0.1"
            kept.close()
        else:
            with pytest.raises(OSError, match="cannot serve on a-name:0: Cannot assign requested address"):
                reserved("a-name", 0)


def test_limits_are_divided() -> None:
    limits = Limits(max_requests=100, max_waiting=10, max_held=1 << 30, max_connections=900, alone_share=0.25)
    third = share_of(limits, 3)
    assert (third.max_requests, third.max_waiting, third.max_held) == (33, 3, (1 << 30) // 3)
    assert (third.alone, third.max_connections) == (8, 300)
    assert (third.max_body, third.max_values) == (limits.max_body, limits.max_values)
    assert share_of(Limits(max_requests=2, max_waiting=0), 2).max_requests == 1


# What all say together.


def test_metrics_of_two_workers_are_added_and_what_is_no_amount_is_not() -> None:
    def state(of: str) -> Family:
        labels = {"address": "p:1", "role": "P", "rank": "0"}
        sample = ("p2pkv_proxy_instance_state", labels, float(WORST_FIRST.index(of)))
        return "p2pkv_proxy_instance_state", "x", "gauge", [sample]

    def requests(**outcomes: float) -> Family:
        name = "p2pkv_proxy_requests"
        samples = [(f"{name}_total", {"outcome": each}, value) for each, value in outcomes.items()]
        return name, "x", "counter", samples

    def began(at: float) -> Family:
        return "process_start_time_seconds", "x", "gauge", [("process_start_time_seconds", {}, at)]

    mine = [requests(left=2.0), state("ready"), began(50.0)]
    theirs = [requests(left=3.0, failed=1.0), state("paused"), began(40.0)]
    body, _ = page("", [mine, theirs])
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    instances = [line for line in lines if line.startswith("p2pkv_proxy_instances")]
    assert [line for line in instances if not line.endswith(" 0.0")] == [
        'p2pkv_proxy_instances{role="P",state="paused"} 1.0'
    ]
    assert [line for line in lines if line not in instances] == [
        'p2pkv_proxy_requests_total{outcome="left"} 5.0',
        'p2pkv_proxy_requests_total{outcome="failed"} 1.0',
        "process_start_time_seconds 40.0",
    ]


def test_status_of_two_workers_is_added_and_the_worst_counts() -> None:
    def part(**more: Any) -> dict[str, Any]:
        instance = {"role": "decode", "address": "d:1", "rank": 0, "state": "ready", "load": 2, "alone": 0}
        return {
            "uptime_seconds": 5.0, "status": "ok", "prefill": 2, "decode": 1, "missing": [],
            "gauges": {"waiting": 1, "silent": 1}, "counters": {"admitted": 4}, "outcomes": {"left": 1},
            "stream_events": 7, "first_token_seconds": [0.1], "instances": [instance],
            "pairs": [{"prefill": "p:1", "decode": "d:1", "total": 3, "running": 1}],
            "placement": {"by": "auto", "ways": {"pair": 1}, "errors": [0.1], "latest": []},
            "history": [(-3.0, 1, 0, 5, 1, 0, 0.2), (-1.0, 2, 0, 7, 1, 0, None)], **more,
        }  # fmt: skip

    draining = {**part()["instances"][0], "state": "draining", "alone": 1}
    page = merged(
        [
            part(),
            part(
                status="degraded", prefill=1, missing=["no P"], instances=[draining], first_token_seconds=[],
                history=[(-1.5, 4, 1, 1, 2, 3, 0.5)],
            ),
        ]
    )  # fmt: skip
    assert (page["status"], page["prefill"], page["missing"], page["workers"]) == ("degraded", 1, ["no P"], 2)
    assert page["gauges"] == {"waiting": 2, "silent": 1}
    assert page["counters"] == {"admitted": 8}
    assert page["first_token_seconds"] == {"p50": 0.1, "p95": 0.1}
    assert page["placement"] == {"by": "auto", "ways": {"pair": 2}, "median_error": 0.1, "latest": []}
    assert page["pairs"] == [{"prefill": "p:1", "decode": "d:1", "total": 6, "running": 2}]
    (instance,) = page["instances"]
    assert (instance["state"], instance["load"], instance["alone"]) == ("draining", 4, 1)
    assert page["history"] == [[-3.0, 1, 0, 5, 1, 0, 0.2], [-1.0, 6, 1, 8, 3, 3, 0.5]]
