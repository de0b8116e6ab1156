"""Options from the command line, the environment and a file."""

from __future__ import annotations

import argparse
import logging
import resource
from pathlib import Path

import pytest

from p2pkv_proxy import cli, options, settings
from p2pkv_proxy.routing import POLICIES


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
    file.write_text("max-requests = 1\nmax_waiting = 2\nretries = 3\nmax-wait = 0.5\n")
    read = given(
        "--config", str(file), "--max-requests", "10", MAX_REQUESTS="20", MAX_WAITING="30", LOG_LEVEL="ERROR"
    )
    assert (read.max_requests, read.max_waiting, read.retries, read.max_wait) == (10, 30, 3, 0.5)
    assert read.log_level == "ERROR"
    assert read.port == 10001


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


def test_the_environment_may_name_the_file(file: Path) -> None:
    file.write_text('discovery = "127.0.0.1:5"\nprivate = true\nadmin-token = "t"\nallow-insecure = false\n')
    read = given(CONFIG=str(file))
    assert (str(read.discovery), read.private, read.admin_token) == ("127.0.0.1:5", True, "t")
    assert not read.allow_insecure


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
        ("--tenant-header X-Tenant", "--tenant-header needs --tenants"),
        ("--tenants /nowhere/tenants.toml", "cannot be read: No such file"),
        ("--api-key=", "an empty key would let every client in"),
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
