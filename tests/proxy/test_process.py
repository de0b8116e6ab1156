"""The real command: it starts, serves, and stops, under load, too; and its options."""

import argparse
import asyncio
import json
import logging
import re
import resource
import signal
import socket
import sys
import tomllib
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path

import aiohttp
import pytest
from proxy_behaviours import DONE, Behaviour, after, answer_json, by_kind, chosen, flood, stream_of
from proxy_fakes import DEADLINE, connect, pinging
from proxy_process import Served, running, served

from p2pkv.control.discovery import Ping
from p2pkv.control.security import Members
from p2pkv.demo.processes import free_ports
from p2pkv_proxy import cli, options, settings
from p2pkv_proxy.routing import POLICIES
from support.waiting import eventually


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


def test_without_its_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    monkeypatch.setitem(sys.modules, "p2pkv_proxy.cli", None)
    run = EntryPoint("p2pkv-proxy", project["scripts"]["p2pkv-proxy"], "console_scripts").load()
    assert run() == 1
    assert "it needs p2pkv's extra `proxy`" in capsys.readouterr().err


def test_a_host_without_an_address_is_named() -> None:
    with running("--port", "0", "--host", "nowhere.invalid") as command:
        assert command.end() == 1
        assert "(--host nowhere.invalid, --discovery 127.0.0.1:30001)" in command.log


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


# SIGTERM under load: of the proxy, with real clients, and of an instance behind it.


def stream(release: asyncio.Event) -> Behaviour:
    """Of a D: a first event, and the rest once it may."""
    return by_kind(stream_of("first", release, "second", DONE), after(release, answer_json))


async def waits(proxy: Served, **wanted: int) -> None:
    async def there() -> bool:
        found: dict[str, int] = (await proxy.get("/health"))[1]["gauges"]
        return wanted.items() <= found.items()

    await eventually(there, f"{wanted}")


async def test_what_is_under_way_ends_and_nothing_new_begins() -> None:
    async with served("--max-requests", "2", "--drain-seconds", "1000") as proxy:
        release = asyncio.Event()
        proxy.d.behaviour = stream(release)
        streaming = await proxy.begin()
        whole = asyncio.create_task(proxy.post())
        await eventually(lambda: len(proxy.d.requests) == 2)
        waiting = asyncio.create_task(proxy.post(prompt="waiting"))
        await waits(proxy, under_way=2, waiting=1)
        reader, writer = await connect(proxy.url)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        proxy.terminate()

        turned_away = await waiting
        assert turned_away.status == 503
        assert int(turned_away.headers["Retry-After"]) >= 3
        assert "stopping" in (await turned_away.json())["error"]["message"]
        with pytest.raises(OSError):
            await connect(proxy.url)
        await reader.readuntil(b"}}")
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert b" 503 " in await reader.readline()
        assert b"Connection: close" in await reader.read()
        writer.close()

        assert proxy.command.process.poll() is None
        release.set()
        assert (await streaming.content.read()).endswith(DONE)
        assert (await whole).status == 200
        await proxy.ended()
        assert [seen.body["prompt"] for seen in proxy.d.requests] == ["hi", "hi"]


async def test_at_the_deadline_the_rest_ends_with_errors() -> None:
    """Neither a client that does not read nor half a body holds it up."""
    async with served("--drain-seconds", "0.2") as proxy:
        answer, endless = stream(asyncio.Event()), flood(100_000)
        proxy.d.behaviour = chosen(lambda seen: endless if seen.body["prompt"] == "deaf" else answer)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
        reader, half = await connect(proxy.url)
        half.write((head.format(100) + "{").encode())
        await waits(proxy, held_bytes=1)
        streaming = await proxy.begin()
        whole = asyncio.create_task(proxy.post())
        _, deaf = await connect(proxy.url)
        deaf.transport.pause_reading()
        body = '{"prompt": "deaf", "stream": true}'
        deaf.write((head.format(len(body)) + body).encode())
        await eventually(lambda: len(proxy.d.requests) == 3)
        proxy.terminate()
        error = json.loads((await streaming.content.read()).removeprefix(b"data: "))["error"]
        assert (error["code"], error["type"]) == (503, "service_unavailable_error")
        assert "had to stop" in error["message"]
        assert (await whole).status == 503
        assert "had to stop" in (await (await whole).json())["error"]["message"]
        assert b" 503 " in await reader.readline()
        await proxy.ended()
        await eventually(lambda: all(seen.aborted for seen in proxy.d.requests))
        assert "requests were cut off" in proxy.command.log
        deaf.close()
        half.close()


async def test_a_second_signal_ends_it_at_once() -> None:
    async with served("--drain-seconds", "1000") as proxy:
        proxy.d.behaviour = stream(asyncio.Event())
        streaming = await proxy.begin()
        proxy.command.process.send_signal(signal.SIGINT)
        await proxy.says("stopping: 1 requests")
        assert proxy.command.process.poll() is None
        proxy.terminate()
        assert b'"code":503' in await streaming.content.read()
        await proxy.ended()


async def test_a_proxy_that_is_killed_and_started_again_serves_after_a_ping() -> None:
    port, again = str(free_ports()), []
    async with served("--port", port) as proxy:
        assert (await proxy.post()).status == 200
        proxy.command.process.kill()
        await asyncio.to_thread(proxy.command.process.wait)
        with running("--port", port, "--discovery", proxy.discovery):
            async with asyncio.timeout(DEADLINE * 2):
                while 200 not in again:
                    try:
                        response = await proxy.post()
                    except aiohttp.ClientError:  # it is not up yet
                        continue
                    again.append(response.status)
                    assert response.status == 200 or response.headers["Retry-After"]
            assert set(again) <= {200, 503}
            assert (await proxy.post()).status == 200


# Options from the command line, the environment and a file.


def given(*argv: str, **environ: str) -> argparse.Namespace:
    """As the real command reads them; the names of variables without their prefix."""
    return options.read(
        options.make_parser(), argv, {f"{settings.PREFIX}{name}": text for name, text in environ.items()}
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "proxy.toml"


def refused(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as end:
        given(*argv, **environ)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_the_command_line_comes_first_then_the_environment_then_the_file(file: Path) -> None:
    """The environment may name the file."""
    file.write_text(
        "max-requests = 1\nmax_waiting = 2\nretries = 3\nmax-wait = 0.5\nadmin-token = 't'\n"
        "discovery = '127.0.0.1:5'\nprivate = true\nallow-insecure = false\n"
    )
    more = {"MAX_REQUESTS": "20", "MAX_WAITING": "30", "LOG_LEVEL": "ERROR"}
    for read in (
        given("--config", str(file), "--max-requests", "10", **more),
        given("--max-requests", "10", CONFIG=str(file), **more),
    ):
        assert (read.max_requests, read.max_waiting, read.retries, read.max_wait) == (10, 30, 3, 0.5)
        assert (str(read.discovery), read.private, read.admin_token) == ("127.0.0.1:5", True, "t")
        assert (read.log_level, read.port, read.allow_insecure) == ("ERROR", 10001, False)


def test_bounds_for_bodies_and_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    read = given(
        *("--max-body-mib", "3", "--max-body-values", "1000", "--body-seconds", "2.5"), MAX_CONNECTIONS="90"
    )
    monkeypatch.setattr("resource.getrlimit", lambda _: (1000, 1000))
    limits = options.limits(read)
    assert (limits.max_body, limits.max_values, limits.body_seconds) == (3 << 20, 1000, 2.5)
    assert limits.max_connections == 90
    monkeypatch.setattr("resource.getrlimit", lambda _: (60, 60))
    assert options.limits(read).max_connections == 20, "a request needs three descriptors"
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert options.limits(read).max_connections == 90


def test_however_an_option_is_spelled() -> None:
    for text, is_on in (("1", True), ("true", True), ("No", False), ("", False)):
        assert given(LOG_REQUESTS=text).log_requests is is_on, "a switch in the environment"
    for spelling in (["--max-requests=7"], ["--max-requests", "7"]):
        assert given(*spelling, MAX_REQUESTS="nonsense").max_requests == 7
    assert given(ADMIN_TOKEN="--port").admin_token == "--port", "a value, although it begins with a dash"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-request = 5", "`max-request`, which is no option: did you mean `max-requests`?"),
        ("nonsense = 5", "`nonsense`, which is no option: --help lists the options"),
        ("port = 'http'", "`port` in {file}: 'http' is not a port"),
        ("port = true", "True is no value for this option"),
        ("port = [1, 2]", "expected one value, not a list"),
        ("dispatch = 'random'", "'random' is none of concurrent, sequential"),
        ("private = 'maybe'", "'maybe' is neither true nor false"),
        ("port = ", "is not TOML"),
        ("[section]", "`section`, which is no option"),
        ('api-key = ["a-key", ""]', "an empty key would let every client in"),
        ("api-key = []", "an empty key would let every client in"),
    ],
)
def test_a_mistake_in_a_file(text: str, said: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    assert said.format(file=file) in refused(capsys, "--config", str(file))


def test_a_mistake_in_the_environment_names_the_variable(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert "P2PKV_PROXY_RETRIES: 'x' is not a whole number" in refused(capsys, RETRIES="x")
    assert "P2PKV_PROXY_LOG_FORMAT: 'xml' is none of text, json" in refused(capsys, LOG_FORMAT="xml")
    assert "an empty key would let every client in" in refused(capsys, API_KEY="")
    assert "P2PKV_PROXY_CONFIG: expected a value, not an empty text" in refused(capsys, CONFIG="")
    assert "/nowhere/p.toml cannot be read: No such file" in refused(capsys, "--config=/nowhere/p.toml")
    assert "expected one argument" in refused(capsys, "--config")
    with caplog.at_level(logging.WARNING):
        given(MAX_REQEUSTS="5")
    assert "P2PKV_PROXY_MAX_REQEUSTS is set, and there is no such option" in caplog.text


def test_what_kubernetes_sets_beside_a_service_is_not_for_us(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read = given(
            PORT="tcp://10.0.0.7:10001",
            PORT_10001_TCP="tcp://10.0.0.7:10001",
            PORT_10001_TCP_PORT="10001",
            SERVICE_HOST="10.0.0.7",
            SERVICE_PORT="10001",
        )
    assert read.port == 10001 and caplog.text == ""
    assert given(PORT="8000").port == 8000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--port 70000", "'70000' is not a port"),
        ("--port http", "'http' is not a port"),
        ("--discovery 30001", "is not an address"),
        ("--discovery 0.0.0.0:30001", "there is no secret: any process that pings it"),
        ("--secret-file /nonexistent", "cannot be read"),
        ("--plain-discovery 30001", "is not an address"),
        ("--dispatch random", "invalid choice"),
        ("--max-requests 0", "'0' is not a whole number of at least 1"),
        ("--max-waiting -1", "'-1' is not a whole number of at least 0"),
        ("--max-held-mib 1.5", "'1.5' is not a whole number of at least 1"),
        ("--retries x", "'x' is not a whole number of at least 0"),
        ("--max-wait soon", "'soon' is no number of seconds"),
        ("--drain-seconds inf", "'inf' is no number of seconds"),
        ("--drain-seconds nan", "'nan' is no number of seconds"),
        ("--polcy x", "unrecognized arguments"),
        ("--prefill-policy fastest", "invalid choice: 'fastest'"),
        ("--session-header X/Chat", "'X/Chat' is no name of an HTTP header, such as X-Session-Id"),
        ("--skip-prefill-below -1", "'-1' is not a whole number of at least 0"),
        ("--prefix-memory 0", "'0' is not a whole number of at least 1"),
        ("--prefill http://10.0.0.7:8100", "names no ZMQ address: expected URL=HOST:PORT"),
        ("--decode https://a:8100=a:21001", "is HTTPS: the proxy speaks plain HTTP to instances"),
        ("--prefill http://a=a:21001", "'a' is not an address"),
        ("--prefill a:1=a:2 --decode b:3=a:2", "a:2 is listed twice"),
        ("--admin 10001", "'10001' is not an address"),
        ("--ssl-certfile /a/file", "both --ssl-certfile and --ssl-keyfile"),
        ("--private", "--private needs an --admin-token"),
        ("--allowed-origins [a", "'[a' is no list in JSON"),
        ("--allowed-methods [1]", "'[1]' is no list of texts"),
        ("--tenant-header X-Tenant", "--tenant-header needs --tenants"),
        ("--tenants /nowhere/tenants.toml", "cannot be read: No such file"),
        ("--api-key=", "an empty key would let every client in"),
        ("--ssl-certfile= --ssl-keyfile=", "--ssl-certfile: expected a value, not an empty text"),
        ("--host=", "--host: expected a value, not an empty text"),
        ("--config=", "--config: expected a value, not an empty text"),
        ("--secret-file=", "--secret-file: expected a value, not an empty text"),
        *(
            (f"--alone-share {share}", f"{share!r} is no share: expected more than 0 and at most 1")
            for share in ("0", "1.5", "-1", "nan", "much")
        ),
    ],
)
def test_a_wrong_argument_is_explained(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_the_version_is_said_and_every_option_and_policy_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for argument in ("--version", "--help"):
        with pytest.raises(SystemExit) as end:
            cli.main([argument])
        assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("p2pkv-proxy ")
    assert [name for name in POLICIES if f"\n    {name} " not in said] == []
    for action in options.make_parser()._actions:
        assert (action.help and len(action.help) > 10) or action.dest == "log_level", action


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        ([], 256),
        (["--alone-share", "1"], 1024),
        (["--max-requests", "8"], 2),
        (["--max-requests", "1"], 1),
        (["--no-decode-alone"], 0),
    ],
)
def test_the_share_of_d_alone_in_places(arguments: list[str], places: int) -> None:
    assert options.limits(options.make_parser().parse_args(arguments)).decode_alone == places
