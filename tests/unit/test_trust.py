"""The shared secret as it is read, and networks as they are written."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pkv.trust import MIN_SECRET_BYTES, SECRET_VARIABLE, Networks, TrustError, read_secret

LONG = "0123456789abcdef"


def refused(file: str | None, environ: dict[str, str]) -> str:
    with pytest.raises(TrustError) as caught:
        read_secret(file, environ)
    return str(caught.value)


def test_no_secret_is_none() -> None:
    assert read_secret(None, {}) is None
    assert read_secret(None, {SECRET_VARIABLE: ""}) is None


def test_file_and_environment_give_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for text in (LONG, "schlüssel-schlüssel"):
        file.write_text(f"{text}\n", encoding="utf-8")
        assert read_secret(str(file), {}) == read_secret(None, {SECRET_VARIABLE: text}) == text.encode()


def test_both_at_once_are_refused() -> None:
    assert "expected one of them" in refused("/nonexistent", {SECRET_VARIABLE: LONG})


@pytest.mark.parametrize("text", [" ", "hush", LONG[1:], f"  {LONG[1:]}\n"], ids=range(4))
def test_too_short(text: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    for said in (refused(str(file), {}), refused(None, {SECRET_VARIABLE: text})):
        assert f"expected at least {MIN_SECRET_BYTES}" in said and "openssl rand" in said
        assert not text.strip() or text.strip() not in said


def test_a_file_that_is_no_secret(tmp_path: Path) -> None:
    assert "is it the right file?" in refused("/dev/zero", {})
    assert "cannot be read" in refused(str(tmp_path), {})
    assert "cannot be read" in refused(str(tmp_path / "absent"), {})
    assert "cannot be read" in refused("a\0b", {})


@pytest.mark.parametrize(
    ("host", "admitted"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("11.1.2.3", False),
        ("fd00::7", True),
        ("fe00::7", False),
        ("node-7", False),
        ("10.1.2.3.example", False),
        ("", False),
    ],
)
def test_networks(host: str, admitted: bool) -> None:
    assert Networks.parse(["10.0.0.0/8", " fd00::/8 "]).admits(host) is admitted


@pytest.mark.parametrize("texts", [[], ["10.0.0.1/8"], ["10.0.0.0/33"], ["node"], [""], ["10.0.0.0/8", "x"]])
def test_what_is_no_network(texts: list[str]) -> None:
    with pytest.raises(TrustError, match="expected"):
        Networks.parse(texts)


@given(st.text(max_size=50))
def test_any_text_is_in_a_network_or_not(host: str) -> None:
    assert Networks.parse(["0.0.0.0/0"]).admits(host) in (True, False)
