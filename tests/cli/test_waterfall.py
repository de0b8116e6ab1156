"""Stamps of requests, and the table that `p2pkv waterfall` makes of them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pkv.cli import main
from p2pkv.cli.waterfall import Row, read, rows
from p2pkv.stamps import VARIABLE, Stamps, unique_of, wanted

ONE, TWO = f"{1:032x}", f"{2:032x}"
ID = f"cmpl-___prefill_addr_127.0.0.1:1___decode_addr_127.0.0.1:2_{ONE}-0-0123abcd"
KEY = f"pair:{ONE}:0123456789ab/0"


@pytest.mark.parametrize(("name", "unique"), [(ID, ONE), (KEY, ONE), (TWO, TWO), ("cmpl-1-0", "")])
def test_all_names_of_a_request_have_its_digits(name: str, unique: str) -> None:
    assert unique_of(name) == unique


def stamped(folder: Path) -> None:
    proxy, p = Stamps("proxy", str(folder)), Stamps("P", str(folder))
    for at, (unique, more) in enumerate([(ONE, 0.0), (TWO, 0.002)]):
        proxy.stamp("in", unique, 10.0 + at)
        p.stamp("request", unique, 10.003 + at + more)
        p.stamp("request", unique, 11.0 + at)  # the first counts
        p.stamp("bytes", unique, 10.004 + at, again=True)
        p.stamp("bytes", unique, 10.008 + at, again=True)  # the last does
    p.stamp("retried", ONE, 10.5)
    p.stamp("nobody's", "cmpl-1-0", 10.0)


def test_a_table_has_the_medians_of_each_station(tmp_path: Path) -> None:
    stamped(tmp_path)
    ways = read(tmp_path)
    assert set(ways) == {ONE, TWO}
    made = [
        (row.who, row.station, round(row.after, 3), round(row.step, 3), row.of) for row in rows(ways.values())
    ]
    assert made == [
        ("proxy", "in", 0.0, 0.0, 2),
        ("P", "request", 4.0, 4.0, 2),
        ("P", "bytes", 8.0, 4.0, 2),
        ("P", "retried", 500.0, 492.0, 1),
    ]


def test_a_line_that_is_cut_off_and_a_rare_station_are_left_out(tmp_path: Path) -> None:
    for number in range(3):
        Stamps("P", str(tmp_path)).stamp("request", f"{number:032x}", float(number))
    Stamps("P", str(tmp_path)).stamp("retried", ONE, 3.0)
    with next(tmp_path.glob("*.stamps")).open("a") as file:
        file.write("4.0\tP\treq")
    assert rows(read(tmp_path).values()) == [Row("P", "request", 0.0, 0.0, 3)]


def test_the_command_shows_all_or_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamped(tmp_path)
    assert main(["waterfall", str(tmp_path)]) == 0
    assert "   4.00   4.00  P       request" in capsys.readouterr().out
    assert main(["waterfall", str(tmp_path), "--request", TWO]) == 0
    assert "   5.00   5.00  P       request" in capsys.readouterr().out
    assert main(["waterfall", str(tmp_path), "--request", ID.replace(ONE, TWO)]) == 0
    assert "   5.00   5.00  P       request" in capsys.readouterr().out
    assert main(["waterfall", str(tmp_path), "--request", "none"]) == 1
    assert "no stamps of request 'none': expected its 32 hex digits" in capsys.readouterr().err
    (tmp_path / "folder.stamps").mkdir()
    with pytest.raises(SystemExit, match="1"):
        main(["waterfall", str(tmp_path)])
    assert "p2pkv waterfall: [Errno 21] Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(("full", "status", "said"), [(True, 1, "No space left"), (False, 141, "")])
def test_what_nobody_can_read_leaves_no_traceback(full: bool, status: int, said: str, tmp_path: Path) -> None:
    stamped(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as device:
        out = device.fileno() if full else writer
        command = [sys.executable, "-m", "p2pkv.cli", "waterfall", str(tmp_path)]
        done = subprocess.run(
            command, check=False, stdout=out, stderr=subprocess.PIPE, text=True, timeout=100
        )
    os.close(writer)
    assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == bool(said)


def test_methods_are_wrapped_only_where_stamps_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert wanted() is None and not caplog.messages
    for nowhere in ("P", "P:", f"P:{tmp_path}/not there"):
        monkeypatch.setenv(VARIABLE, nowhere)
        assert wanted() is None
        assert "no folder; expected such as P:/tmp/stamps" in caplog.messages.pop()
    Stamps("P", f"{tmp_path}/not there").stamp("request", ONE)  # a disk that is full or gone fails no request
    monkeypatch.setenv(VARIABLE, f"P:{tmp_path}")
    stamps = wanted()

    class Engine:
        def add(self, request: str, many: int = 1) -> int:
            return many

    def of(_: Any, request: str, **__: Any) -> list[str]:
        return [request]

    stamps.wrap(Engine, "add", "comes", of)
    stamps.wrap(Engine, "add", "is there", of, after=True)
    assert Engine().add(ID, many=3) == 3
    (way,) = read(tmp_path).values()
    assert list(way) == [("P", "comes"), ("P", "is there")]
