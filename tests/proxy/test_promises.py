"""The fixed limits that docs/operations.md gives of the proxy are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from p2pkv_proxy import admission, app, relay, upstream
from p2pkv_proxy.cli import _limits, _parser
from p2pkv_proxy.errors import retry_after
from p2pkv_proxy.membership import instance

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
ROWS = [
    [cell.strip() for cell in row.strip("|").split(" | ")]
    for row in PAGE.split("| fixed limit | value |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
]


def test_the_fixed_limits_of_the_page() -> None:
    """Row by row, the numbers of the second cell."""
    idle, interval, probes = upstream._KEEPALIVE_PROBES.values()
    always = admission._PER_SECOND * admission._WINDOW_SECONDS
    waits = sorted({int(retry_after()["Retry-After"]) for _ in range(200)})
    expected = [
        ("Retry-After", [waits[0], waits[-1]]),
        ("connection without a request", [app.IDLE_SECONDS]),
        ("client that reads nothing", [relay.STALL_SECONDS]),
        ("retries", [admission._SHARE, admission._WINDOW_SECONDS, always]),
        (
            "a pause",
            [
                instance._BREAKER_FAILURES,
                instance._BREAKER_SHARE,
                instance._BREAKER_WINDOW_SECONDS,
                instance._BREAKER_OUTCOMES,
            ],
        ),
        ("a pause lasts", [instance._BREAKER_FIRST_PAUSE, instance._BREAKER_LONGEST_PAUSE]),
        ("silent", [instance.LIFE]),
        ("vanished", [idle + interval * probes]),
    ]
    assert len(ROWS) == len(expected)
    for (what, value), (named, numbers) in zip(ROWS, expected, strict=True):
        assert named in what
        assert [float(each) for each in re.findall(r"[\d.]+", value)] == numbers, what


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
