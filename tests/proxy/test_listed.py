"""Instances that the command line lists: there while /health answers, paired by what their ranks say."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_behaviours import streams
from proxy_fakes import DEADLINE, Deployment, FakeInstance, Line, asked, deployed, join, ping, serve
from proxy_process import served

from p2pkv.control.endpoint import Endpoint
from p2pkv.control.security import Members
from p2pkv.demo.processes import free_ports
from p2pkv.pairing import Address
from p2pkv.protocol.messages import Inspect, Report, decode, encode
from p2pkv_proxy import options
from p2pkv_proxy.membership.instance import ListedSource, Role
from p2pkv_proxy.membership.listed import ListedInstance
from p2pkv_proxy.membership.registry import Registry
from support.waiting import eventually

OLD = "protocol=1, weights=aa, link=host"
NEW = "protocol=2, weights=aa, link=host"
SECRET = b"a secret of the tests"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.membership.listed._PERIOD_SECONDS", 0.05)
    monkeypatch.setattr("p2pkv_proxy.membership.listed._RANK_SECONDS", 0.5)


class FakeRank:
    """Rank 0 as far as it answers Inspect; `says` may change at will. `inspected`: how often it was asked."""

    def __init__(self, role: Role, members: Members | None = None, /, **says: Any) -> None:
        self.role: Role = role
        self.says = {"role": role, "rank": 0, "ranks": 1, "incarnation": "first", "fit": "", **says}
        self.inspected = 0
        place = Address("127.0.0.1", free_ports())
        self.address = str(place)
        self._endpoint = Endpoint(place, members)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._endpoint.wait(0.05)
            for connection, question in self._endpoint.receive():
                assert isinstance(decode(question), Inspect)
                self.inspected += 1
                connection.send(encode(Report(dict(self.says))))

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE)
        self._endpoint.close()


@asynccontextmanager
async def listing(*those: FakeInstance | FakeRank, **options: Any) -> AsyncIterator[Deployment]:
    """A proxy to which these are listed: they serve and do not ping, and have these ranks or none."""
    async with AsyncExitStack() as cleanup:
        instances, listed = list[FakeInstance](), list[ListedInstance]()
        for each in those:
            if isinstance(each, FakeRank):
                cleanup.callback(each.stop)
                each = FakeInstance(each.role, zmq_address=each.address)
            await serve(cleanup, each)
            instances.append(each)
            listed.append(ListedInstance.parse(each.role, f"http://{each.http_address}={each.zmq_address}"))
        async with deployed("concurrent", life=0.5, listed=listed, **options) as deployment:
            deployment.instances += instances
            yield deployment


async def test_listed_instances_serve_without_a_ping_and_whatever_they_fit() -> None:
    """Nobody answers at their ZMQ addresses."""
    async with listing(FakeInstance("P"), FakeInstance("D")) as deployment:
        await deployment.add("D", fit=NEW)
        await deployment.ready(prefill=1, decode=2)
        await deployment.serves(4)
        assert asked(deployment.prefills) == [4], "the one that says what it fits is paired, too"
        assert asked(deployment.decodes) == [2, 2]
        p, d = deployment.p, deployment.d
        assert all(f"___prefill_addr_{p.zmq_address}___" in seen.request_id for seen in p.requests)
        assert all(f"___decode_addr_{d.zmq_address}_" in seen.request_id for seen in d.requests)
        assert deployment.registry.misfits() == {}


async def test_they_come_and_go_as_their_health_says(caplog: pytest.LogCaptureFixture) -> None:
    p, d = FakeInstance("P", health=503), FakeInstance("D")
    async with listing(p, d, alone_share=0) as deployment:
        await deployment.ready(prefill=0, decode=1)
        assert (await deployment.post()).status == 503
        p.health = 200
        await deployment.ready(prefill=1, decode=1)
        assert (await deployment.post()).status == 200
        await d.stop()
        await deployment.ready(prefill=1, decode=0)
        await eventually(lambda: deployment.registry.known("D") == [], "it is gone")
        await d.start()
        await deployment.ready(prefill=1, decode=1)
        assert (await deployment.post()).status == 200
        p.health = 500
        await deployment.ready(prefill=0, decode=1)
    assert "which is listed, gets no requests: its /health answered 503" in caplog.text
    assert f"decode instance {d.http_address}, which is listed, gets no requests: its /health" in caplog.text


async def test_one_whose_health_hangs_is_silent_and_the_others_are_preferred(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv_proxy.membership.listed._TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    dead = FakeInstance("P")
    dead.frozen = True
    async with listing(FakeInstance("D"), FakeInstance("D"), dead) as deployment:
        never = f"prefill instance {dead.http_address}, which is listed: it gets no requests: its"
        await eventually(lambda: never in caplog.text)
        await deployment.ready(prefill=0, decode=2)
        frozen, other = deployment.decodes
        frozen.frozen = True
        states = {frozen.http_address: "silent", other.http_address: "ready"}
        await eventually(
            lambda: (
                {each.ping.http_address: deployment.proxy.state_of(each) for each in deployment.everyone()}
                == states
            )
        )
        await deployment.serves(3)
        assert asked(deployment.decodes) == [0, 3] and caplog.text.count("/health does not") == 1
        frozen.frozen = dead.frozen = False


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "members"])
async def test_what_they_fit_is_learnt_from_their_first_ranks(secret: bytes | None) -> None:
    members = None if secret is None else Members(secret)
    old, new = FakeRank("P", members, fit=OLD), FakeRank("P", members, fit=NEW, ranks=2)
    async with listing(old, new, FakeRank("D", members, fit=NEW), members=members) as deployment:
        await deployment.ready(prefill=2, decode=1)
        await deployment.serves(4)
        assert [len(each.requests) for each in deployment.prefills] == [0, 4]
        sizes = {each.ping.zmq_address: each.ping.tp_size for each in deployment.registry.known("P")}
        assert sizes == {old.address: 1, new.address: 2}
        assert old.inspected == 1, "once while it is up"


async def test_a_rank_that_cannot_be_asked_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart, which may change what it fits."""
    monkeypatch.setattr("p2pkv_proxy.membership.listed._ASK_AGAIN_SECONDS", 0.1)
    p = FakeRank("P", fit=OLD)
    async with listing(p, FakeRank("D", fit=NEW)) as deployment:

        async def fits(*fit: str) -> None:
            await eventually(lambda: [each.ping.fit for each in deployment.registry.known("P")] == [*fit])

        await fits(OLD)
        await deployment.ready(prefill=1, decode=1)
        await deployment.serves(1)
        assert asked(deployment.prefills) == [0], "they do not fit"
        await deployment.p.stop()
        await eventually(lambda: deployment.routable("P") == [])
        p.says["fit"] = 7  # which is no answer
        await deployment.p.start()
        await fits("")
        p.says |= {"fit": NEW, "incarnation": "second"}
        await fits(NEW)
        await deployment.ready(prefill=1, decode=1)
        assert deployment.registry.known("P")[0].ping.incarnation == "second"
        await deployment.serves(1)
        assert asked(deployment.prefills) == [1]


async def test_what_the_proxy_lacks_makes_no_listed_instance_unready() -> None:
    """Descriptors for another connection to its /health."""
    tried = 0

    def lacks(*_: Any) -> Any:
        nonlocal tried
        tried += 1
        raise OSError(errno.EMFILE, "Too many open files")

    async with listing(FakeInstance("D")) as deployment:
        await deployment.ready(prefill=0, decode=1)
        kept = deployment.proxy.session.pooled
        connector = kept.connector
        kept._connector = aiohttp.TCPConnector(limit=0, socket_factory=lacks)
        try:
            await eventually(lambda: tried > 3)
            assert len(deployment.routable("D")) == 1
        finally:
            kept._connector = connector


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"role": "D"}, "is rank 0 of a decode instance, and rank 0 of a prefill instance was expected"),
        ({"rank": 1}, "is rank 1 of a prefill instance, and rank 0"),
    ],
)
async def test_another_instance_than_the_list_says_gets_nothing_and_it_is_said(
    says: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    rank = FakeRank("P", **says)
    async with listing(rank, FakeInstance("D")) as deployment:
        await eventually(lambda: words in caplog.text, words)
        await deployment.ready(prefill=0, decode=1)
        rank.says |= {"role": "P", "rank": 0}
        await deployment.ready(prefill=1, decode=1)
    assert caplog.text.count(words) == 1


@pytest.mark.parametrize("says", [{"fit": "x" * 600}, {"ranks": 0}, {"incarnation": 5}, {"fit": "\n"}])
async def test_a_rank_that_says_nonsense_is_one_that_says_nothing(says: dict[str, Any]) -> None:
    async with listing(FakeRank("P", **says), FakeInstance("D")) as deployment:
        await deployment.ready(prefill=1, decode=1)
        (p,) = deployment.registry.known("P")
        assert p.fits_unknown and p.ping.fit == p.ping.incarnation == ""
        assert (await deployment.post()).status == 200
        assert asked(deployment.prefills) == [1]


@pytest.mark.parametrize(("role", "prefill"), [("D", 1), ("both", 2)])
async def test_who_pings_by_itself_is_left_to_its_pings(role: Any, prefill: int) -> None:
    async with listing(FakeInstance("P"), FakeInstance("D", fit=NEW)) as deployment:
        await deployment.ready(prefill=1, decode=1)
        (listed_d,) = deployment.registry.known("D")
        assert listed_d.fits_unknown
        deployment.d.role = role
        pinger = deployment.begin_ping(deployment.d)
        await eventually(lambda: [each.ping.fit for each in deployment.registry.known("D")] == [NEW])
        await deployment.ready(prefill, decode=1)
        assert not deployment.registry.known("D")[0].fits_unknown
        healths = deployment.d.healths
        pinger.stop()
        await eventually(lambda: deployment.d.healths > healths + 5, "the list is looked at again")
        assert deployment.routable("D") == [], "it stops, although its /health still answers"
        await deployment.d.stop()
        await eventually(lambda: not listed_d.source.pinged, "its port has been found closed")
        await deployment.d.start()
        await deployment.ready(prefill=1, decode=1)
        assert deployment.registry.claims_refused == 0


@pytest.mark.parametrize("role", ["D", "both"])
async def test_who_pinged_before_it_was_well_is_left_to_its_pings(role: Any) -> None:
    rank = FakeRank("D", fit=NEW)
    async with listing(rank) as deployment:
        deployment.d.health, deployment.d.role = 503, role
        deployment.begin_ping(deployment.d)
        await eventually(lambda: len(deployment.registry.known("D")) == 1)
        deployment.d.health = 200
        await eventually(lambda: deployment.routable("D") == [deployment.d.http_address])
        (well,) = deployment.registry.known("D")
        begin = well.last_sign
        await eventually(lambda: well.last_sign > begin + 0.5)  # ten looks of the list's
        assert [each.role for each in deployment.registry.known("D")] == [role]
        assert deployment.registry.claims_refused == 0


def test_a_ping_that_says_what_the_list_says_takes_over_too() -> None:
    registry, source = Registry(), ListedSource()
    instance = registry.observe(ping("D"), 0.0, source)
    assert instance is not None and instance.fits_unknown
    other = join(registry, ping("P", 1, protocol=2, fit=NEW))
    assert instance.matches(other) and other.matches(instance)
    assert registry.observe(ping("D"), 1.0, Line()) is None
    assert source.pinged and instance.source is not source
    assert not instance.matches(other), "a ping that says nothing is one of protocol 1"


async def test_of_two_proxies_side_by_side_one_is_killed_and_the_other_goes_on() -> None:
    async with listing(FakeRank("P", fit=NEW), FakeRank("D", fit=NEW)) as deployment:
        p, d = deployment.p, deployment.d
        await deployment.ready(prefill=1, decode=1)
        lists = [
            *("--prefill", f"http://{p.http_address}={p.zmq_address}"),
            *("--decode", f"{d.http_address}={d.zmq_address}"),
        ]
        async with served(*lists, prefill=0, decode=0) as other:
            await other.ready(1, 1)
            release = asyncio.Event()
            d.behaviour = streams(release)
            lost, kept = await other.begin(), await deployment.begin()
            other.command.process.kill()
            await eventually(lambda: sum(seen.aborted for seen in d.requests) == 1, "D hears of it")
            release.set()
            assert b"second" in await kept.read()
            lost.close()
            assert (await deployment.post()).status == 200
        assert len(d.requests) == len(p.requests) == 3


def test_the_three_ways_to_list(tmp_path: Path) -> None:
    def listed_by(argv: list[str], environ: dict[str, str]) -> list[str]:
        found: list[ListedInstance] = options.read(options.make_parser(), argv, environ).prefill
        return [f"{each.http}={each.zmq}" for each in found]

    one, two = "10.0.0.7:8100=10.0.0.7:21001", "node-8:8100=[fd00::8]:21001"
    file = tmp_path / "proxy.toml"
    file.write_text(f'prefill = ["http://{one}", "{two}"]\n')
    assert listed_by(["--prefill", "http://10.0.0.7:8100/=10.0.0.7:21001", "--prefill", two], {}) == [
        one,
        two,
    ]
    assert listed_by([], {"P2PKV_PROXY_PREFILL": f"{one}, http://{two}"}) == [one, two]
    assert listed_by([], {"P2PKV_PROXY_PREFILL": ""}) == [], "as an empty value in a compose file"
    assert listed_by(["--config", str(file)], {}) == [one, two]
    assert listed_by(["--config", str(file), "--prefill", two], {}) == [two]
    assert listed_by([], {}) == []
    parsed = ListedInstance.parse("D", two)
    assert (parsed.http, parsed.zmq) == (Address("node-8", 8100), Address("fd00::8", 21001))
