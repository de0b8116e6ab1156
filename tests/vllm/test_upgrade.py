"""A rolling upgrade of real servers, as docs/operations.md and docs/promises.md describe it.

Two wheels are built: one of this tree, and one of another release. That is the version before this one, from
git's history, or a copy of this tree that is a release later, of another protocol. Each is installed into an
environment of its own. Two P and two D of the one are replaced by turns by those of the other, under sixteen
streams that never cease, and no request notices.
"""

import http.client
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import environment

import p2pkv
from p2pkv.control.endpoint import inspect
from p2pkv.demo import answers, client
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import ServerProcess, wait_until
from p2pkv.demo.servers import ProxyServer, Role, VllmServer
from p2pkv.pairing import Address
from p2pkv.protocol.messages import PROTOCOL_VERSION
from support import commands
from support.servers.deployments import TOKEN, http_address, order, states
from support.servers.fleet import MODEL_NAME, SETTINGS, ask_all, asking, at_rest, streamed, tokens

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PACKAGED = ("p2pkv", "proxy", "pyproject.toml", "README.md", "LICENSE")
"""What a wheel is built from."""
STREAMS = 16
PROMPTS = 32
TOKENS = 24
PAUSE_SECONDS = 1.0
"""Of a stream between two requests: a server that starts beside them needs its share of two cores."""
READY_SECONDS = 400.0


@dataclass(frozen=True)
class Release:
    """A wheel of p2pkv, installed. `home`: its environment, which has the packages of this one beneath;
    `version`: what p2pkv calls itself; `protocol`: PROTOCOL_VERSION of its ranks."""

    home: Path
    version: str
    protocol: int

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    def run_by(self, server: ServerProcess) -> None:
        server.command[0] = str(self.python)


ALONE = {"PYTHONSAFEPATH": "1", "PYTHONPATH": ""}
"""The working directory is the tree, whose p2pkv would come before the wheel's."""


def installed(home: Path) -> Release:
    """The release in this environment, whose Python imports the wheel and not the tree beneath it."""
    code = (
        "import json, p2pkv, p2pkv_proxy; from p2pkv.protocol.messages import PROTOCOL_VERSION as it; "
        "print(json.dumps([p2pkv.__file__, p2pkv_proxy.__file__, p2pkv.__version__, it]))"
    )
    printed = commands.run(
        home / "bin" / "python", "-c", code, env={**os.environ, **ALONE}, check=True
    ).stdout
    *files, version, protocol = json.loads(printed)
    assert all(Path(file).is_relative_to(home) for file in files), files
    return Release(home, version, protocol)


def this_tree(tree: Path) -> str:
    for each in PACKAGED:
        if (ROOT / each).is_dir():
            shutil.copytree(ROOT / each, tree / each, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / each, tree / each)
    return p2pkv.__version__


def version_before(tree: Path) -> str:
    """Put the last commit of the version before this one there; its version."""
    bump = git("log", "-1", "--format=%H", f'-Sversion = "{p2pkv.__version__}"', "--", "pyproject.toml")
    # Without such a commit, the version was changed in the working tree.
    former = f"{bump.stdout.decode().strip()}^" if bump.stdout else "HEAD"
    archive = git("archive", former, *PACKAGED)
    if archive.returncode:
        pytest.skip(f"git's history does not have the version before {p2pkv.__version__}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(tree, filter="data")
    version = str(tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"])
    assert version != p2pkv.__version__
    return version


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=60, check=False)


def another_protocol(tree: Path) -> str:
    """Put a release there whose protocol is another."""
    this_tree(tree)
    messages = tree / "p2pkv" / "protocol" / "messages.py"
    edit(messages, r"^PROTOCOL_VERSION = \d+$", f"PROTOCOL_VERSION = {PROTOCOL_VERSION + 1}")
    # What a version is for: an old rank could not read this one's messages.
    edit(messages, r'tag="Want"', 'tag="LaterWant"')
    edit(tree / "pyproject.toml", rf'^version = "{re.escape(p2pkv.__version__)}"$', 'version = "99.0.0"')
    return "99.0.0"


def edit(path: Path, pattern: str, text: str) -> None:
    edited, count = re.subn(pattern, text, path.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{path.name} has {count} places like {pattern}"
    path.write_text(edited)


def release(folder: Path, sources: Callable[[Path], str] = this_tree) -> Release:
    """A wheel of the sources that `sources` puts into a folder, in an environment of its own."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    version = sources(tree)
    offline = ("--no-deps", "--no-index")
    built = commands.run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", *offline),
        *("--wheel-dir", folder, tree),
        seconds=120.0,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("p2pkv-*.whl")
    # The p2pkv beneath may have the same version, and pip would leave it at that.
    made = installed(environment(folder / "home", *offline, "--ignore-installed", str(wheel), ours=True))
    assert made.version == version
    return made


class Streams:
    """Sixteen clients, each of which asks for one streamed answer after the other."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        self._url = url
        self._prompts = prompts
        self._expected: list[Answer] = []
        self.answered = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def expect_answers_of(self, server: VllmServer) -> None:
        self._expected = ask_all(server.base_url, self._prompts, at_once=STREAMS, max_tokens=TOKENS)

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """From here to the end of the block; then each client has had the rest of its last answer."""
        with asking(STREAMS, self._one):
            yield

    def _one(self, number: int) -> None:
        index = number % len(self._prompts)
        try:
            wrong = answers.difference(self._expected[index], self._ask(index))
        except (client.RequestFailed, http.client.HTTPException, OSError, ValueError) as error:
            wrong = repr(error)
        with self._lock:
            self.answered += 1
            if wrong:
                self.failures.append(f"prompt {index}: {wrong}")
        time.sleep(PAUSE_SECONDS)

    def _ask(self, index: int) -> Answer:
        body = {"model": MODEL_NAME, "prompt": self._prompts[index], "max_tokens": TOKENS, **answers.GREEDY}
        choices = []
        for event in client.stream(f"{self._url}/v1/completions", body):
            if "choices" not in event:
                raise ValueError(f"an event that is no part of an answer: {event}")
            choices += event["choices"]
        return streamed(choices, self._expected[index].margins)


@dataclass
class Rolling:
    """A fleet behind one proxy, of which one instance after the other is replaced. `running`: the instances,
    old and new; `releases`: of each instance that there has been, by its HTTP address; `loaded`: prompts
    whose KV the D's that have left had loaded."""

    proxy: ProxyServer
    streams: Streams
    running: list[VllmServer]
    releases: dict[str, Release]
    loaded: int = 0

    def status(self) -> dict:
        return json.loads(client.get(f"{self.proxy.base_url}/status"))

    def leave(self, server: VllmServer) -> None:
        order(self.proxy, server, "drain")
        wait_until(lambda: states(self.proxy, server) == ["drained"], f"{server.name} without work", 60.0)
        self.loaded += loaded(server)
        server.stop()
        self.running.remove(server)
        wait_until(lambda: not states(self.proxy, server), f"the end of {server.name} at the proxy", 60.0)

    def join(self, server: VllmServer, by: Release) -> None:
        server.wait_ready(READY_SECONDS)
        # It pings when it is warm.
        wait_until(lambda: states(self.proxy, server) == ["ready"], f"{server.name} at the proxy", 200.0)
        report = inspect(Address.parse(server.zmq_address))
        assert (report["p2pkv"], report["protocol"]) == (by.version, by.protocol)
        self.running.append(server)

    def flow(self, pairs: int) -> None:
        """Wait until each P and D that fit, so many pairs, have served a few more; no others may have."""
        before = self.pairs()
        fitting = {
            (http_address(p), http_address(d))
            for p, d in itertools.product(self.running, self.running)
            if (p.role, d.role) == ("P", "D") and self._fit(http_address(p), http_address(d))
        }
        assert len(fitting) == pairs

        def worked() -> set[tuple[str, str]]:
            return {pair for pair, total in (self.pairs() - before).items() if total >= 3}

        wait_until(lambda: bool(self.streams.failures) or worked() >= fitting, "work for all pairs", 120.0)
        assert self.streams.failures == []
        assert all(self._fit(*pair) for pair in self.pairs()), "P and D that do not fit were paired"

    def pairs(self) -> Counter[tuple[str, str]]:
        return Counter({(each["prefill"], each["decode"]): each["total"] for each in self.status()["pairs"]})

    def _fit(self, p: str, d: str) -> bool:
        return self.releases[p].protocol == self.releases[d].protocol


def loaded(server: VllmServer) -> int:
    """The prompts whose KV it has loaded (a P: none); no transfer of it may have failed."""
    report = inspect(Address.parse(server.zmq_address))
    assert report["transfers_failed"] == 0, report
    return int(report["transfers_loaded"])


OTHERS = {"the version before": version_before, "another protocol": another_protocol}


@pytest.fixture(
    params=[
        ("the version before", "this tree"),
        ("this tree", "the version before"),
        ("this tree", "another protocol"),
    ],
    ids=" to ".join,
)
def old_and_new(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Release, Release]:
    # The other one first: it may be a skip.
    (other,) = set(request.param) & OTHERS.keys()
    made = {other: release(tmp_path / "other", OTHERS[other]), "this tree": release(tmp_path / "this")}
    assert other == "the version before" or (
        made[other].protocol - PROTOCOL_VERSION == (other == "another protocol")
    )
    old, new = (made[each] for each in request.param)
    return old, new


@pytest.fixture
def rolling(
    old_and_new: tuple[Release, Release],
    tiny_model: Path,
    tmp_path: Path,
    servers_on_failure: Callable[..., None],
    fleet_keeper,
) -> Iterator[tuple[Rolling, list[tuple[VllmServer, VllmServer]]]]:
    """The fleet, and who replaces whom, in order; the new ones have not started."""
    fleet_keeper.stop()
    proxy = ProxyServer(
        prefill=2,
        # D alone is no way out here: a request that no P helps fails.
        extra_args=["--admin-token", TOKEN, "--no-decode-alone"],
        env={**os.environ, **ALONE},
        log_path=tmp_path / "proxy.log",
    )
    old_and_new[0].run_by(proxy)
    releases = {}

    def server(role: Role, number: int, by: Release) -> VllmServer:
        made = VllmServer(
            tiny_model,
            role=role,
            proxy=proxy.discovery,
            # Without a prefix cache every prompt moves from P to D, each time that it is asked.
            extra_args=[*SETTINGS, "--no-enable-prefix-caching"],
            load_failure_policy="fail" if role == "D" else None,
            env=ALONE,
            name=f"{role}{number} of {by.version}",
            log_path=tmp_path / f"{role}{number}-{by.version}.log",
        )
        by.run_by(made)
        releases[http_address(made)] = by
        return made

    changes = [
        (server(role, number, old_and_new[0]), server(role, number, old_and_new[1]))
        for number in (1, 2)
        for role in ("P", "D")
    ]
    servers_on_failure(proxy, *itertools.chain(*changes))
    prompts = [tokens(100 + 10 * number, f"upgrade {number}") for number in range(PROMPTS)]
    with ExitStack() as stack:
        for each in (proxy, *(old for old, _ in changes)):
            stack.enter_context(each)
        for _, new in changes:
            stack.callback(new.stop)
        made = Rolling(proxy, Streams(proxy.base_url, prompts), [], releases)
        for each, _ in changes:
            made.join(each, old_and_new[0])
        made.streams.expect_answers_of(made.running[-1])
        yield made, changes


@pytest.mark.timeout(1500)
def test_sixteen_streams_do_not_notice_a_rolling_upgrade(
    rolling: tuple[Rolling, list[tuple[VllmServer, VllmServer]]], old_and_new: tuple[Release, Release]
) -> None:
    """A P, a D, a P, a D: drained, stopped, and replaced by one that fits only others of its protocol."""
    fleet, changes = rolling
    # Of the fleet after each step: how many pairs fit, and what /health says of an instance that fits nobody.
    steps: tuple[tuple[int, list[str]], ...] = (
        (2, ["1 prefill instance fits no decode instance: they differ in protocol."]),
        (2, []),
        (2, ["1 decode instance fits no prefill instance: they differ in protocol."]),
        (4, []),
    )
    if old_and_new[0].protocol == old_and_new[1].protocol:
        steps = ((4, []),) * 4
    with fleet.streams.flowing():
        fleet.flow(pairs=4)
        for (old, new), (pairs, missing) in zip(changes, steps, strict=True):
            fleet.leave(old)
            new.start()
            fleet.join(new, old_and_new[1])
            fleet.flow(pairs)
            assert fleet.status()["missing"] == missing
    assert fleet.streams.failures == []
    assert [fleet.releases[http_address(each)] for each in fleet.running] == [old_and_new[1]] * 4
    assert {each["address"] for each in fleet.status()["instances"]} == {
        http_address(each) for each in fleet.running
    }
    for each in fleet.running:
        at_rest(each)
    # None was tried twice, and each answer came of one prompt that a D had loaded.
    moved = fleet.loaded + sum(map(loaded, fleet.running))
    assert fleet.status()["counters"]["retried"] == 0
    assert moved == fleet.streams.answered > 20 * STREAMS
