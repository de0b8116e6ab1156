"""docs/operations.md gives numbers of the proxy: they are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pkv_proxy import admission, app, relay, upstream
from p2pkv_proxy.cli import _limits, _parser
from p2pkv_proxy.errors import retry_after
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership import instance, registry

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "operations.md").read_text().split())


@pytest.mark.parametrize(
    "option",
    [
        "max_requests",
        "max_waiting",
        "max_wait",
        "max_body_mib",
        "max_body_values",
        "max_messages",
        "body_seconds",
        "max_connections",
        "max_held_mib",
        "retries",
        "alone_share",
        "lease_seconds",
        "first_token_seconds",
        "event_seconds",
        "drain_seconds",
    ],
)
def test_defaults(option: str) -> None:
    default = _parser().get_default(option)
    assert f"| `--{option.replace('_', '-')}` | {default:g} |" in PAGE


@pytest.mark.parametrize(
    "sentence",
    [
        f"A body that has not come whole after {Limits().body_seconds:g} seconds gets 408",
        f"a connection on which no request comes is closed after {app.IDLE_SECONDS:g}.",
        f"A client that takes nothing of its answer for {relay.STALL_SECONDS:g} seconds",
        f"(in {instance._BREAKER_WINDOW_SECONDS:g} s, a hundred at most) five or more, and at least half",
        f"up to {instance._BREAKER_LONGEST_PAUSE:g}. Then one request is its trial",
        "at most a fifth of the requests of the last ten seconds, or ten, whichever is more",
        "what it was at fails after 20 s",
        f"whose pings have stopped for {instance.LIFE:g} seconds while their connection stands is silent",
        f"no new one has come for {instance.LIFE:g} seconds, when its port refuses, or after "
        f"{registry.LEASE:g} seconds of silence",
    ],
)
def test_sentences(sentence: str) -> None:
    assert sentence in PAGE


def test_numbers_in_words() -> None:
    assert (
        instance._BREAKER_OUTCOMES,
        instance._BREAKER_FAILURES,
        instance._BREAKER_SHARE,
        instance._BREAKER_FIRST_PAUSE,
    ) == (100, 5, 0.5, 1.0)
    assert (admission._SHARE, admission._WINDOW_SECONDS) == (0.2, 10.0)
    assert admission._PER_SECOND * admission._WINDOW_SECONDS == 10
    idle, interval, probes = upstream._KEEPALIVE_PROBES.values()
    assert idle + interval * probes == 20


def test_retry_after() -> None:
    assert "a `Retry-After` of 3 to 6 seconds" in PAGE
    assert {retry_after()["Retry-After"] for _ in range(200)} == {"3", "4", "5", "6"}


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
    assert _limits(_parser().parse_args(arguments)).alone == places


@pytest.mark.parametrize("share", ["0", "1.5", "-1", "nan", "much"])
def test_what_is_no_share(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["--alone-share", share])
    assert f"{share!r} is no share: expected more than 0 and at most 1" in capsys.readouterr().err
