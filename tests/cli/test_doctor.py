"""`p2pkv doctor`: a rank that runs is asked; NCCL and CUDA; two hosts, with a real link between them."""

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from msgspec.structs import replace

from p2pkv.cli import link_check, main
from p2pkv.cli.doctor import examine, ipc_sentence
from p2pkv.cli.findings import Finding
from p2pkv.control.security import members_of
from p2pkv.demo.processes import free_ports
from p2pkv.engine.core_liveness import Beat
from p2pkv.links.base import LinkError, LinkFactory
from p2pkv.links.host import HostLinks
from p2pkv.pairing import Address
from p2pkv.trust import SECRET_VARIABLE
from support.cuda.ipc import SimulatedGpu, SimulatedMemory
from support.engine.engines import Geometry, engines, make_engine, on_engine_thread
from support.links.memory import MemoryNetwork
from support.links.pairs import nccl_links
from support.nccl.fakes import fake_nccl4py, install
from support.waiting import wait_for

SECRET = "a secret of the tests"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory"
busy = Mock(side_effect=RuntimeError("busy"))


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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rank", "127.0.0.1:9", "--secret-file", "/nonexistent"], "secret_file '/nonexistent' cannot be"),
        (["--secret-file", "/nonexistent"], "secret:    not usable (secret_file '/nonexistent'"),
        (["--link", "nccl"], "--link is for --listen and --connect"),
        (["--rank", "127.0.0.1:9", "--link", "nccl"], "--link is for --listen and --connect"),
    ],
)
def test_what_cannot_be_used_is_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 1
    assert f"[!!] {sentence}" in capsys.readouterr().out


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("spoil", "what", "words"),
    [
        (lambda patch: patch.setenv("VLLM_PLUGINS", "a,p2pkv"), "plug-in", ""),
        (lambda patch: patch.setenv("VLLM_PLUGINS", "a,b"), "plug-in", "VLLM_PLUGINS is 'a,b'; add p2pkv"),
        (lambda patch: patch.setattr(f"{FACTORY}.get_connector_class_by_name", Mock()), "plug-in", "another"),
        (lambda patch: patch.setitem(sys.modules, "p2pkv.connector", None), "plug-in", "p2pkv.connector"),
        (lambda patch: patch.setattr("vllm.platforms.current_platform", Mock()), "vLLM", "finds no device"),
        (lambda patch: patch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1"), "vLLM", "unset it"),
        (lambda patch: patch.setenv(SECRET_VARIABLE, SECRET), "secret", ""),
        (lambda patch: patch.setenv(SECRET_VARIABLE, "short"), "secret", "has 5 bytes: expected at least"),
        (lambda patch: patch.setattr("torch.cuda.is_available", busy), "torch", "not usable (busy)"),
    ],
)
def test_what_a_server_would_meet_is_a_fault(
    spoil: Callable[[pytest.MonkeyPatch], None], what: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    found = next(finding for finding in examine() if finding.about == what)
    assert found.ok is not bool(words) and words in found.sentence and SECRET not in found.sentence


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("p2pkv.cli.doctor", ["doctor"]),
        ("p2pkv.cli.link_check", ["doctor", "--pair", "127.0.0.1:9", "127.0.0.1:10"]),
    ],
)
def test_what_the_command_needs_and_is_not_installed_is_named(
    missing: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delattr("p2pkv.cli.link_check")
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    assert "brings: install vLLM" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["p2pkv.cli.doctor.run", "importlib.import_module"])
def test_who_interrupts_it_sees_no_traceback(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, Mock(side_effect=KeyboardInterrupt))
    assert main(["doctor"]) == 130


def test_one_question_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--listen", "127.0.0.1:9", "--connect", "127.0.0.1:10"])
    assert "not allowed with argument --listen" in capsys.readouterr().err


# NCCL and CUDA.


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No binding is installed."""
    nothing = {"cupy": None, "nccl": None, "nccl__bindings": None, "nccl__bindings__nccl": None}
    install(monkeypatch, **nothing)
    for name in ("NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS"):
        monkeypatch.setenv(name, "8")
    return monkeypatch


def about(what: str) -> Finding:
    (found,) = [finding for finding in examine() if finding.about == what]
    return found


@pytest.mark.parametrize("device", [False, True])
def test_no_binding_is_a_fault_with_a_device(patch: pytest.MonkeyPatch, device: bool) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: device)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    found = about("NCCL link")
    assert found.ok is not device
    said = "extra cuda12 or cuda13" if device else "not usable: nccl4py cannot be imported"
    assert said in found.sentence
    assert about("kernels").sentence.startswith("CuPy cannot be imported" if device else "of no concern")
    patch.setattr("p2pkv.kv.copiers.CupyLauncher", Mock())
    assert about("kernels").sentence.startswith("CuPy compiles" if device else "of no concern")


def test_a_library_that_torch_lacks_is_named(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("p2pkv.cli.doctor._nccl", lambda: ctypes.CDLL("libnothing.so"))
    assert "not usable (libnothing.so" in about("NCCL link").sentence


@pytest.mark.parametrize("device", [True, False])
def test_version_binding_and_library_are_shown(patch: pytest.MonkeyPatch, device: bool) -> None:
    module, _ = fake_nccl4py()
    install(patch, nccl__bindings__nccl=module)
    patch.setattr(torch.cuda, "is_available", lambda: device)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    found = about("NCCL link")
    assert found.ok and "NCCL 2.32.3 through nccl4py 0.6.0 (" in found.sentence
    assert ("torch finds no CUDA device" in found.sentence) is not device


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", None, "the default 8 hardware queues"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "32 hardware queues (CUDA_DEVICE_MAX_CONNECTIONS);"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "leave it unset, or take up to 32"),
        ("NCCL_CUMEM_ENABLE", None, "cuMem as NCCL chooses"),
        ("NCCL_CUMEM_ENABLE", "0", "NCCL_CUMEM_ENABLE is 0"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", "NCCL_LAUNCH_ORDER_IMPLICIT is 1: NCCL fails"),
    ],
)
def test_what_a_gpus_server_inherits_is_shown(
    patch: pytest.MonkeyPatch, name: str, value: str | None, words: str
) -> None:
    patch.delenv(name, raising=False)
    if value is not None:
        patch.setenv(name, value)
    found = about("CUDA")
    assert found.ok and words in found.sentence


def test_the_ipc_link_without_a_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    assert about("IPC link").sentence == "not usable: torch finds no CUDA device"


def test_which_devices_the_ipc_link_joins() -> None:
    first, second, third = (SimulatedMemory(SimulatedGpu(), b"GPU %d..........." % n) for n in range(3))
    first.unreachable.add(third.card)
    second.unreachable.add(third.card)
    assert ipc_sentence([first]) == (
        "usable between processes of one user on one GPU, within one network namespace"
    )
    assert "on one GPU, and between devices 0 and 1, within" in ipc_sentence([first, second, third])
    second.can_export = False
    assert ipc_sentence([first, second]).startswith("not usable on device 1, whose memory")


# On two hosts: ranks that are asked, and two doctors with a real link between them.


ROOT = Path(__file__).parents[2]
OTHER = "another one of the tests"
SECONDS = 250.0
"""For a process: on a busy machine its imports alone take minutes."""


@pytest.fixture
def address() -> Address:
    return Address("127.0.0.1", free_ports())


class Doctor:
    def __init__(self, log: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "p2pkv.cli", "doctor", *arguments],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self._log.read_text()

    def ended(self) -> tuple[int, str]:
        return self.process.wait(SECONDS), self.said()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Doctor]]:
    """Starts doctors; one that listens does so when this returns, however busy the machine is."""
    doctors: list[Doctor] = []

    def start(*arguments: str, **environment: str) -> Doctor:
        doctors.append(made := Doctor(tmp_path / f"doctor-{len(doctors)}", arguments, environment))
        if "--listen" in arguments:
            wait_for(lambda: "doctor --connect" in made.said() or made.process.poll() is not None, SECONDS)
        return made

    yield start
    for each in doctors:
        each.process.kill()
        each.process.wait()


# In two processes.


@pytest.mark.timeout(3 * SECONDS)
def test_two_doctors_build_a_link_and_move_messages(address: Address, start: Callable[..., Doctor]) -> None:
    p = start("--listen", str(address), "--link", "host")
    d = start("--connect", str(address), "--link", "host")
    (on_d, said_d), (on_p, said_p) = d.ended(), p.ended()
    assert (on_p, on_d) == (0, 0), said_p + said_d
    assert f"p2pkv doctor --connect {address}" in said_p
    for said in (said_p, said_d):
        assert "[ok] link:      host on both" in said
        assert "this side by lo (127.0.0.1), the other by lo (127.0.0.1)" in said
    measured = re.search(
        r"4 messages of 8 MiB came over .+ as they were sent, and 32 more at (\S+) GB/s", said_d
    )
    assert measured and f"the other side received it at {measured[1]} GB/s" in said_p


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
        except link_check.CheckFailed as failure:
            self.failure = str(failure)

    def about(self, what: str) -> Finding:
        (found,) = (each for each in self.found if each.about == what)
        return found


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch, address: Address) -> Callable[..., tuple[Side, Side]]:
    """Both doctors, with these factories; returns when both have ended."""

    def check(on_p: LinkFactory, on_d: LinkFactory) -> tuple[Side, Side]:
        factories = {"P": on_p, "D": on_d}
        monkeypatch.setattr(link_check, "make_factory", lambda kind, **_: factories[kind])
        p = Side(lambda: link_check.listen(address, None, "P"))
        d = Side(lambda: link_check.connect(address, None, "D"))
        for side in (p, d):
            side.join(60.0)
            assert not side.is_alive()
        return p, d

    return check


def tcp() -> HostLinks:
    return HostLinks("127.0.0.1", link_check.STAGING_BYTES, shared_memory=False)


def nccl_end(version: int = 23203) -> LinkFactory:
    return nccl_links(version=version, staging=link_check.STAGING_BYTES)


@pytest.mark.parametrize(("make", "way"), [(tcp, "tcp"), (nccl_end, "nccl 2.32.3")])
def test_every_kind_of_link(
    make: Callable[[], LinkFactory], way: str, sides: Callable[..., tuple[Side, Side]]
) -> None:
    p, d = sides(make(), make())
    assert (p.failure, d.failure) == ("", "")
    assert all(each.ok for each in (*p.found, *d.found))
    assert f"over {way} as they were sent" in d.about("data").sentence
    assert p.about("data").sentence.startswith("the other side received it at ")


def test_doctors_with_two_secrets_say_so(
    address: Address, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One who was not admitted has not ended the check of the others."""
    monkeypatch.setattr(link_check, "make_factory", lambda kind, **_: tcp())
    p = Side(lambda: link_check.listen(address, members_of(SECRET.encode()), "host"))
    for secret in (OTHER, SECRET):
        d = Side(lambda secret=secret: link_check.connect(address, members_of(secret.encode()), "host"))
        d.join(60.0)
        assert ("secret" in d.failure) is (secret == OTHER)
    p.join(60.0)
    assert p.failure == d.failure == "" and all(each.ok for each in (*p.found, *d.found))
    assert "[--] a connection to" in capsys.readouterr().out


def test_two_versions_of_nccl_are_named_and_no_link_is_built(
    sides: Callable[..., tuple[Side, Side]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    p, d = sides(nccl_end(23203), nccl_end(22809))
    assert (p.failure, d.failure) == ("", "")
    for side, here, there in ((p, "2.32.3", "2.28.9"), (d, "2.28.9", "2.32.3")):
        found = side.about("link")
        assert not found.ok and "nvidia-nccl package" in found.sentence
        assert found.sentence.startswith(f"nccl {here} on this side and nccl {there} on the other")
        assert side.about("NCCL_SOCKET_IFNAME").sentence == "eth7 on this side, eth7 on the other"
        assert not [each for each in side.found if each.about == "data"]


def test_other_bytes_than_were_sent_are_seen(
    sides: Callable[..., tuple[Side, Side]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = link_check.contents_of

    def contents(number: int, device: torch.device) -> torch.Tensor:
        """P makes its own with number 0 and writes the number over it; D asks for each number."""
        made = right(number, device)
        made[-1] += number
        return made

    monkeypatch.setattr(link_check, "contents_of", contents)
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
    monkeypatch.setattr(links, "invite", Mock(side_effect=LinkError("no such interface")))
    p, d = sides(links, tcp())
    assert (p.failure, d.failure) == ("no such interface", "the other side failed: no such interface")


def test_an_instance_that_listens_is_no_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    network = MemoryNetwork()
    monkeypatch.setattr(link_check, "ANSWER_SECONDS", 2.0)
    with (
        engines(Geometry(), Geometry(), lambda side, rank: network.rank()) as (p, _),
        pytest.raises(link_check.CheckFailed, match="for running instances use --pair"),
    ):
        next(link_check.connect(p.address, None, "host"))


def test_nobody_listens(
    address: Address, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link_check, "ANSWER_SECONDS", 0.5)
    assert main(["doctor", "--connect", str(address), "--link", "host"]) == 1
    assert (
        f"[!!] nothing answers at {address}: is `p2pkv doctor --listen {address}`" in capsys.readouterr().out
    )


def test_off_loopback_a_doctor_wants_a_secret_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--listen", "10.0.0.1:21001"]) == 1
    assert "[!!] 10.0.0.1:21001 may be reached by other machines, and there is no" in capsys.readouterr().out


def test_the_interface_of_an_address() -> None:
    assert link_check.interface_of("127.0.0.1") == "lo"
    assert link_check.interface_of("192.0.2.1") is None
    assert link_check.way_to("127.0.0.1") == "lo (127.0.0.1)"
    if os.path.exists("/proc/net/if_inet6") and "00000000000000000000000000000001" in Path(
        "/proc/net/if_inet6"
    ).read_text(encoding="ascii"):
        assert link_check.interface_of("::1") == "lo"


# Instances that run.


def test_all_ranks_of_a_pair_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    network = MemoryNetwork()
    with engines(Geometry(tp=2), Geometry(), lambda side, rank: network.rank()) as (p, d):
        ask = ["doctor", "--pair", str(p.address), str(d.address)]
        assert main(ask) == 0
        said = capsys.readouterr().out
        assert f"{p.address} has role P, from here by lo (127.0.0.1); all 2 of its ranks answer" in said
        assert "all 1 of its ranks answer; links that are up: 0" in said
        assert "[ok] link:      memory on both" in said
        assert main(["doctor", "--pair", str(d.address), str(p.address)]) == 1
        said = capsys.readouterr().out
        assert f"[!!] P:         {d.address} has role D" in said and "expected kv_role kv_producer or" in said
        core = d.ranks[0].rank.core
        on_engine_thread(
            d.ranks[0].rank, lambda: core.steps.note(Beat(steps=1, work=False, paused=True), 0.0)
        )
        assert main(ask) == 1
        assert "links that are up: 0; it cannot serve now: paused" in capsys.readouterr().out
        context = p.ranks[1].rank.context
        context.hello = replace(context.hello, weights="another node's")
        first = p.ranks[0].rank.context
        first.hello = replace(first.hello, instance=str(p.address))
        assert main(ask) == 1
        said = capsys.readouterr().out
        assert "[!!] P rank 1:  it and rank 0 differ in weights: start" in said
        assert "links that are up: 0; ask its other data-parallel engines too" in said
        p.ranks[1].rank.stop()
        assert main(ask) == 1
        assert f"[!!] P rank 1:  nothing at {p.address.shifted(1)} answered" in capsys.readouterr().out


def test_what_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    network = MemoryNetwork()
    with engines(Geometry(), Geometry(layers=(6,)), lambda side, rank: network.rank()) as (p, d):
        *_, fit = link_check.ask_instances(p.address, d.address, None)
        assert not fit.ok and "P and D do not fit: layers in all (4 and 6) differ" in fit.sentence
    one, two = Geometry(), Geometry()
    with engines(one, two, lambda side, rank: network.rank(), secret=SECRET.encode()) as (p, d):
        members = members_of(SECRET.encode())
        assert all(found.ok for found in link_check.ask_instances(p.address, d.address, members))
        assert not any(found.ok for found in link_check.ask_instances(p.address, d.address, None))
