"""`p2pkv doctor` on two hosts: ranks that are asked, and two doctors with a real link between them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from p2pkv.cli import main, pair
from p2pkv.cli.doctor import Finding
from p2pkv.control.security import members_of
from p2pkv.demo.processes import free_ports
from p2pkv.links.base import LinkError, LinkFactory
from p2pkv.links.host import HostLinks
from p2pkv.pairing import Address
from p2pkv.trust import SECRET_VARIABLE
from support.engine.engines import Geometry, engines
from support.links.memory import MemoryNetwork
from support.links.pairs import nccl_links

ROOT = Path(__file__).parents[2]
SECRET, OTHER = "a secret of the tests", "another one of the tests"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.fixture
def address() -> Address:
    return Address("127.0.0.1", free_ports())


def doctor(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "p2pkv.cli", "doctor", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def both(p: subprocess.Popen[str], d: subprocess.Popen[str]) -> tuple[str, str]:
    """What they have said at their ends."""
    try:
        return p.communicate(timeout=100)[0], d.communicate(timeout=100)[0]
    finally:
        for each in (p, d):
            each.kill()
            each.wait()


# In two processes.


@pytest.mark.parametrize("secret", ["", SECRET])
def test_two_doctors_build_a_link_and_move_messages(secret: str, address: Address) -> None:
    environment = {SECRET_VARIABLE: secret} if secret else {}
    p = doctor("--listen", str(address), "--link", "host", **environment)
    d = doctor("--connect", str(address), "--link", "host", **environment)
    on_p, on_d = both(p, d)
    assert (p.returncode, d.returncode) == (0, 0), on_p + on_d
    assert f"p2pkv doctor --connect {address}" in on_p
    for said in (on_p, on_d):
        assert "[ok] link:      host on both" in said
        assert "this side by lo (127.0.0.1), the other by lo (127.0.0.1)" in said
    measured = re.search(
        r"4 messages of 8 MiB came over .+ as they were sent, and 32 more at (\S+) GB/s", on_d
    )
    assert measured and f"the other side got it at {measured[1]} GB/s" in on_p


def test_doctors_with_two_secrets_say_so(address: Address) -> None:
    p = doctor("--listen", str(address), **{SECRET_VARIABLE: SECRET})
    d = doctor("--connect", str(address), **{SECRET_VARIABLE: OTHER})
    on_d, _ = d.communicate(timeout=100)
    again = doctor("--connect", str(address), **{SECRET_VARIABLE: SECRET})
    on_p, _ = both(p, again)
    assert d.returncode == 1 and "secret" in on_d and "Traceback" not in on_d
    assert p.returncode == again.returncode == 0, "one who was not admitted has ended the check of the others"
    assert "[--] a connection to" in on_p


# In two threads, with other links.


class Side(threading.Thread):
    """One doctor: what it has found, and why it failed, if it did."""

    def __init__(self, findings: Callable[[], Iterator[Finding]]) -> None:
        super().__init__(daemon=True)
        self.found: list[Finding] = []
        self.failure = ""
        self._findings = findings
        self.start()

    def run(self) -> None:
        try:
            self.found.extend(self._findings())
        except pair.CheckFailed as failure:
            self.failure = str(failure)

    def about(self, what: str) -> Finding:
        (found,) = (each for each in self.found if each.about == what)
        return found


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch, address: Address) -> Callable[..., tuple[Side, Side]]:
    """Both doctors, with these factories; returns when both have ended."""

    def check(on_p: LinkFactory, on_d: LinkFactory) -> tuple[Side, Side]:
        factories = {"P": on_p, "D": on_d}
        monkeypatch.setattr(pair, "make_factory", lambda kind, **_: factories[kind])
        p = Side(lambda: pair.listen(address, None, "P"))
        d = Side(lambda: pair.connect(address, None, "D"))
        for side in (p, d):
            side.join(60.0)
            assert not side.is_alive()
        return p, d

    return check


def tcp() -> HostLinks:
    return HostLinks("127.0.0.1", pair.STAGING_BYTES, shared_memory=False)


def nccl(blocking: bool, version: int = 23203) -> LinkFactory:
    return nccl_links(blocking=blocking, version=version, staging=pair.STAGING_BYTES)


@pytest.mark.parametrize(
    ("make", "way"),
    [(tcp, "tcp"), (lambda: nccl(True), "nccl 2.32.3"), (lambda: nccl(False), "nccl 2.32.3")],
    ids=["tcp", "nccl-blocking", "nccl-polled"],
)
def test_every_kind_of_link(
    make: Callable[[], LinkFactory], way: str, sides: Callable[..., tuple[Side, Side]]
) -> None:
    p, d = sides(make(), make())
    assert (p.failure, d.failure) == ("", "")
    assert all(each.ok for each in (*p.found, *d.found))
    assert f"over {way} as they were sent" in d.about("data").sentence
    assert p.about("data").sentence.startswith("the other side got it at ")


def test_two_versions_of_nccl_are_named_and_no_link_is_built(
    sides: Callable[..., tuple[Side, Side]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    p, d = sides(nccl(True, 23203), nccl(True, 22809))
    assert (p.failure, d.failure) == ("", "")
    for side, here, there in ((p, "2.32.3", "2.28.9"), (d, "2.28.9", "2.32.3")):
        found = side.about("link")
        assert not found.ok and "the same nvidia-nccl package" in found.sentence
        assert found.sentence.startswith(f"nccl {here} on this side and nccl {there} on the other")
        assert side.about("NCCL_SOCKET_IFNAME").sentence == "eth7 on this side, eth7 on the other"
        assert not [each for each in side.found if each.about == "data"]


def test_other_bytes_than_were_sent_are_seen(
    sides: Callable[..., tuple[Side, Side]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = pair.contents_of

    def contents(number: int, device: torch.device) -> torch.Tensor:
        """P makes its own with number 0 and writes the number over it; D asks for each number."""
        made = right(number, device)
        made[-1] += number
        return made

    monkeypatch.setattr(pair, "contents_of", contents)
    p, d = sides(tcp(), tcp())
    assert d.failure == "message 1 came with other bytes than were sent"
    assert p.failure == f"the other side failed: {d.failure}"


def test_a_link_that_breaks_ends_both_with_a_reason(
    sides: Callable[..., tuple[Side, Side]], monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tcp()
    accept = links.accept

    def broken(invitation: bytes, window: int) -> object:
        inbound, acceptance = accept(invitation, window)
        inbound.abort()
        return inbound, acceptance

    monkeypatch.setattr(links, "accept", broken)
    p, d = sides(tcp(), links)
    assert d.failure and p.failure


def test_a_link_that_p_cannot_begin_is_a_sentence_on_both_sides(
    sides: Callable[..., tuple[Side, Side]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's first call fails if it is told an interface that is not there."""
    links = tcp()

    def refuse() -> bytes:
        raise LinkError("no such interface")

    monkeypatch.setattr(links, "invite", refuse)
    p, d = sides(links, tcp())
    assert (p.failure, d.failure) == ("no such interface", "the other side failed: no such interface")


def test_nobody_listens(
    address: Address, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pair, "ANSWER_SECONDS", 0.5)
    assert main(["doctor", "--connect", str(address), "--link", "host"]) == 1
    assert (
        f"[!!] nothing answers at {address}: is `p2pkv doctor --listen {address}`" in capsys.readouterr().out
    )


def test_off_loopback_a_doctor_wants_a_secret_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--listen", "10.0.0.1:21001"]) == 1
    assert "[!!] 10.0.0.1:21001 may be reached by other machines, and there is no" in capsys.readouterr().out


def test_the_interface_of_an_address() -> None:
    assert pair.interface_of("127.0.0.1") == "lo"
    assert pair.interface_of("192.0.2.1") is None
    assert pair.way_to("127.0.0.1") == "lo (127.0.0.1)"
    if os.path.exists("/proc/net/if_inet6") and "00000000000000000000000000000001" in Path(
        "/proc/net/if_inet6"
    ).read_text(encoding="ascii"):
        assert pair.interface_of("::1") == "lo"


# Instances that run.


def test_all_ranks_of_a_pair_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    network = MemoryNetwork()
    with engines(Geometry(tp=2), Geometry(), lambda side, rank: network.rank()) as (p, d):
        ask = ["doctor", "--pair", str(p.address), str(d.address)]
        assert main(ask) == 0
        said = capsys.readouterr().out
        assert f"{p.address} is a P, from here by lo (127.0.0.1); all 2 of its ranks answer" in said
        assert "all 1 of its ranks answer; links that are up: 0" in said
        assert "[ok] link:      memory on both" in said
        assert main(["doctor", "--pair", str(d.address), str(p.address)]) == 1
        assert f"[!!] P:         {d.address} is a D" in capsys.readouterr().out
        p.ranks[1].rank.stop()
        assert main(ask) == 1
        assert f"[!!] P rank 1:  nothing at {p.address.shifted(1)} answered" in capsys.readouterr().out


def test_what_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    network = MemoryNetwork()
    one, two = Geometry(), Geometry()
    with engines(one, two, lambda side, rank: network.rank(), secret=SECRET.encode()) as (p, d):
        members = members_of(SECRET.encode())
        assert all(found.ok for found in pair.ask_instances(p.address, d.address, members))
        assert not any(found.ok for found in pair.ask_instances(p.address, d.address, None))
