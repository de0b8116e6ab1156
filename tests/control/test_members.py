"""Keys that follow from a secret, and the ZAP handler that asks for them."""

import secrets
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from p2pkv.control import security as module
from p2pkv.control.security import Members, NoCurve, ZapHandler, members_of
from p2pkv.trust import Networks

SECRET = b"a secret of the tests"


class Socket(dict[int, Any]):
    """Keeps the options that a ZMQ socket is given; libzmq does not return keys."""

    setsockopt = dict.__setitem__


def keys_of(secret: bytes) -> dict[str, bytes]:
    """All keys that sockets get from the members who know `secret`, by what they are for; 32 bytes each."""
    members, keys = Members(secret), {}
    for server in ("rank", "proxy"):
        dials, listens = Socket(), Socket()
        members.join(dials, server)
        members.serve(listens, server)
        keys[f"{server}, public"] = dials[zmq.CURVE_SERVERKEY]
        keys[f"{server}, secret"] = listens[zmq.CURVE_SECRETKEY]
        keys["member, public"] = dials[zmq.CURVE_PUBLICKEY]
        keys["member, secret"] = dials[zmq.CURVE_SECRETKEY]
    return {name: z85.decode(key) for name, key in keys.items()}


MEMBER = keys_of(SECRET)["member, public"]
REQUEST = [b"id", b"", b"1.0", b"7", b"p2pkv", b"10.0.0.9", b"", b"CURVE", MEMBER]


def test_the_same_secret_gives_the_same_keys_and_another_one_others() -> None:
    assert keys_of(SECRET) == keys_of(bytes(SECRET))
    assert len({*keys_of(SECRET).values(), *keys_of(b"another secret!!").values()}) == 12
    assert Members(SECRET).include(MEMBER) and not Members(b"another secret!!").include(MEMBER)


def test_the_secret_is_not_in_the_keys_and_nothing_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in keys_of(SECRET).values():
        assert SECRET not in key and SECRET not in z85.encode(key)
        assert len(key) == 32
    assert repr(Members(SECRET)) == "Members()"
    assert members_of(None) is None
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(NoCurve, match="built without CURVE"):
        module.Members(SECRET)


def test_members_are_admitted_and_a_question_cut_short_gets_no_answer() -> None:
    reply, refusal = ZapHandler(Members(SECRET), None).answer(REQUEST)
    assert (reply, refusal) == ([b"id", b"", b"1.0", b"7", b"200", b"", b"member", b""], "")
    for length in range(8):
        assert ZapHandler(Members(SECRET), None).answer(REQUEST[:length]) == ([], "")


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
