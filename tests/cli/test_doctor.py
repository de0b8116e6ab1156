"""`p2pkv doctor --rank`: asking a rank that runs, with its secret and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_support import Geometry, make_engine
from memory_links import MemoryNetwork

from p2pkv.cli import main
from p2pkv.trust import SECRET_VARIABLE

SECRET = "a secret of the tests"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.mark.parametrize("way", ["file", "environment"])
def test_a_rank_tells_members_what_it_counts(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = MemoryNetwork()
    engine = make_engine("P", Geometry(), lambda rank: network.rank(), secret=SECRET.encode())
    try:
        ask = ["doctor", "--rank", str(engine.address)]
        assert main(ask) == 1
        assert "does it need a secret" in capsys.readouterr().out
        if way == "file":
            (tmp_path / "secret").write_text(SECRET)
            ask += ["--secret-file", str(tmp_path / "secret")]
        else:
            monkeypatch.setenv(SECRET_VARIABLE, SECRET)
        assert main(ask) == 0
    finally:
        engine.stop()
    said = capsys.readouterr().out
    assert "handshakes_failed    1" in said and SECRET not in said


def test_a_bad_secret_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--rank", "127.0.0.1:9", "--secret-file", "/nonexistent"]) == 1
    assert "[!!] secret_file '/nonexistent' cannot be read" in capsys.readouterr().out


def test_one_question_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--listen", "127.0.0.1:9", "--connect", "127.0.0.1:10"])
    assert "not allowed with argument --listen" in capsys.readouterr().err
