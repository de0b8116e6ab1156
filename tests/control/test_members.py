"""Keys that follow from a secret, and the gate that asks for them."""

from __future__ import annotations

import secrets

import pytest
import zmq
from zmq.utils import z85

from p2pkv.control import security as module
from p2pkv.control.security import Members, NoCurve, ZapHandler, members_of
from p2pkv.trust import Networks

SECRET = b"a secret of the tests"
MEMBER = Members(SECRET)._keys["member"]
REQUEST = [b"id", b"", b"1.0", b"7", b"p2pkv", b"10.0.0.9", b"", b"CURVE", z85.decode(MEMBER.public)]


def test_the_same_secret_gives_the_same_keys_and_another_one_others() -> None:
    assert Members(SECRET)._keys == Members(bytes(SECRET))._keys
    public = {keys.public for each in (SECRET, b"another secret!!") for keys in Members(each)._keys.values()}
    assert len(public) == 6


def test_the_secret_is_not_in_the_keys_and_nothing_shows_them() -> None:
    for keys in Members(SECRET)._keys.values():
        assert SECRET not in keys.public + keys.secret
        assert len(z85.decode(keys.public)) == len(z85.decode(keys.secret)) == 32
    assert repr(Members(SECRET)) == "Members()"


def test_no_secret_no_members() -> None:
    assert members_of(None) is None


def test_without_curve_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(NoCurve, match="built without CURVE"):
        module.Members(SECRET)


def test_members_are_admitted() -> None:
    reply, refusal = ZapHandler(Members(SECRET), None).answer(REQUEST)
    assert (reply, refusal) == ([b"id", b"", b"1.0", b"7", b"200", b"", b"member", b""], "")


@pytest.mark.parametrize(
    "change",
    [
        [b"CURVE", secrets.token_bytes(32)],
        [b"CURVE", b""],
        [b"CURVE"],
        [b"NULL"],
        [b"PLAIN", b"user", b"password"],
        [b"CURVE", REQUEST[-1], b"more"],
    ],
)
def test_others_are_not(change: list[bytes]) -> None:
    reply, refusal = ZapHandler(Members(SECRET), None).answer([*REQUEST[:7], *change])
    assert reply[4] == b"400"
    assert "10.0.0.9" in refusal and "members' key" in refusal


def test_networks_count_with_and_without_a_secret() -> None:
    here, elsewhere = Networks.parse(["10.0.0.0/8"]), Networks.parse(["192.168.0.0/16"])
    plain = [*REQUEST[:7], b"NULL"]
    for members, request in ((Members(SECRET), REQUEST), (None, plain)):
        assert ZapHandler(members, here).answer(request)[0][4] == b"200"
        reply, refusal = ZapHandler(members, elsewhere).answer(request)
        assert reply[4] == b"400" and "allowed_peers are 192.168.0.0/16" in refusal
    assert not ZapHandler(None, None).needed


@pytest.mark.parametrize("length", range(8))
def test_a_question_cut_short_gets_no_answer(length: int) -> None:
    assert ZapHandler(Members(SECRET), None).answer(REQUEST[:length]) == ([], "")
