"""Options: defaults, numbers as strings, the former connector's names, and a sentence for each bad one."""

import re
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pkv.config import DEFAULT_KV_PORT, MIB, ConfigError, Options
from p2pkv.pairing import Address


def options(extra: dict[str, Any] | None = None, **changes: Any) -> Options:
    arguments: dict[str, Any] = {
        "role": "kv_producer",
        "kv_port": None,
        "default_host": "127.0.0.1",
        "has_gpu": False,
        "environ": {},
    }
    return Options.from_extra(extra or {}, **(arguments | changes))


def refused(extra: dict[str, Any] | None = None, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        options(extra, **changes)
    return str(caught.value)


class TestDefaults:
    def test_the_key_of_the_warm_up_is_that_of_the_api_and_is_not_shown(self) -> None:
        environ = {"VLLM_API_KEY": "from outside"}
        assert options(environ=environ).warm_up_api_key == "from outside"
        made = options({"warm_up_api_key": "given"}, environ=environ)
        assert made.warm_up_api_key == "given" and "given" not in repr(made)
        assert "warm_up_api_key is a int" in refused({"warm_up_api_key": 12345})
        assert "12345" not in refused({"warm_up_api_key": 12345})

    def test_a_gpu_gets_more_staging(self) -> None:
        card = {"has_gpu": True, "gpu_bytes": 80 << 30}
        assert options(**card).staging_bytes == 640 * MIB
        assert options({"staging_bytes": 16 * MIB, "link": "nccl"}, **card).staging_bytes == 16 * MIB
        for total in (0, 1, 17_179_869_183, 85_520_809_984, 1 << 40):
            chosen = options(has_gpu=True, gpu_bytes=total).staging_bytes
            assert 64 * MIB <= chosen <= 1024 * MIB and chosen % options().chunk_bytes == 0

    @pytest.mark.parametrize(
        ("gpu", "staging", "chunk"),
        [(16, None, 8), (80, None, 40), (141, None, 64), (80, 2048, 64), (80, 512, 32), (80, 64, 8)],
    )
    def test_a_gpu_gets_larger_chunks_where_staging_has_room(
        self, gpu: int, staging: int | None, chunk: int
    ) -> None:
        given = {} if staging is None else {"staging_bytes": staging * MIB}
        for read in (given, {name: str(value) for name, value in given.items()}):
            made = options(read, has_gpu=True, gpu_bytes=gpu << 30)
            assert (made.chunk_bytes, made.nccl_group_bytes) == (chunk * MIB, 2 * chunk * MIB)
        assert options(given).chunk_bytes == 8 * MIB
        assert options(given | {"chunk_bytes": MIB}, has_gpu=True).chunk_bytes == MIB

    def test_null_and_empty_mean_not_set(self) -> None:
        assert options({"proxy_ip": "", "proxy_port": "", "http_port": None, "host": None}) == options()


class TestReading:
    def test_numbers_may_be_strings(self) -> None:
        extra = {
            "host": "[::1]",
            "proxy_ip": "127.0.0.1",
            "proxy_port": "30001",
            "http_port": "8100",
            "staging_bytes": "33554432",
            "chunk_bytes": 1048576.0,
            "lease_seconds": "2.5",
            "stall_seconds": 60,
            "max_links": "8",
            "verify": "true",
            "allow_insecure": False,
            "link": "host",
            "discovery": "plain",
        }
        made = options(extra, role="kv_consumer", kv_port="22001")
        assert (made.role, made.address) == ("D", Address("::1", 22001))
        assert (made.proxies, made.http_address) == ((Address("127.0.0.1", 30001),), Address("::1", 8100))
        assert (made.staging_bytes, made.chunk_bytes, made.max_links) == (32 * MIB, MIB, 8)
        assert (made.lease_seconds, made.stall_seconds, made.link) == (2.5, 60, "host")
        assert (made.allow_insecure, made.notes) == (False, ())
        assert made.verify is True

    def test_several_proxies(self) -> None:
        made = options({"proxy_ip": "10.0.0.1, [fd00::0:2],Proxy.,10.0.0.1", "proxy_port": 9, "http_port": 1})
        assert made.proxies == (Address("10.0.0.1", 9), Address("fd00::2", 9), Address("proxy", 9))
        made = options({"proxy_ip": "a, A:8,[fd00::0:2]:7,a:8,::1", "proxy_port": 9, "http_port": 1})
        assert list(map(str, made.proxies)) == ["a:9", "a:8", "[fd00::2]:7", "[::1]:9"]
        assert options().proxies == () and "no proxy" in options({"http_port": 8100}).notes[0]

    @given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
    def test_any_value_is_understood_or_refused(self, value: object) -> None:
        for name in Options.__struct_fields__:
            if name not in ("role", "kv_port", "notes"):
                try:
                    options({name: value})
                except ConfigError as error:
                    assert name in str(error)


class TestFormerNames:
    EXAMPLE: ClassVar = {  # what vLLM's disaggregated_prefill.sh and disagg_example_p2p_nccl_xpyd.sh have
        "proxy_ip": "0.0.0.0",
        "proxy_port": "30001",
        "http_ip": "127.0.0.1",
        "http_port": "20001",
        "send_type": "PUT_ASYNC",
        "nccl_num_channels": "16",
        "mem_pool_size_gb": "1e1",
    }

    def test_what_a_user_of_the_former_connector_wrote_still_works(self) -> None:
        made = options(self.EXAMPLE)
        assert (made.proxies, made.nccl_num_channels) == ((Address("0.0.0.0", 30001),), 16)
        assert [note.split()[0] for note in made.notes] == ["mem_pool_size_gb", "send_type", "http_ip"]
        assert "staging_bytes" in made.notes[0]

    def test_kv_both_was_a_p(self) -> None:
        """Its example proxy takes no more pings after one of another role than P and D."""
        note = options(self.EXAMPLE, role="kv_both", former=True).notes[3]
        assert note.endswith("set kv_producer, or leave proxy_ip out")
        for changes in ({"role": "kv_both"}, {"former": True}):
            assert len(options(self.EXAMPLE, **changes).notes) == 3


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "closest"),
        [("stagin_bytes", "staging_bytes"), ("proxyport", "proxy_port"), ("LINK", "link")],
    )
    def test_unknown_names(self, name: str, closest: str) -> None:
        for value in (None, 5):
            said = refused({name: value})
            assert repr(name) in said and f"did you mean {closest!r}" in said
        for name in ("kv_port", "kv_role", "kv_load_failure_policy"):
            assert f"{name} belongs beside kv_connector_extra_config" in refused({name: "recompute"})
        assert "is no option of p2pkv. The options are host, " in refused({"engine": 1})

    @pytest.mark.parametrize("name", ["proxy_port", "http_port", "kv_port"])
    @pytest.mark.parametrize("value", [0, -1, 65536, "70000"])
    def test_ports_out_of_range(self, name: str, value: object) -> None:
        extra = {"proxy_ip": "127.0.0.1", "proxy_port": 1, "http_port": 1}
        said = refused(extra, kv_port=value) if name == "kv_port" else refused(extra | {name: value})
        assert said == f"{name} is {value!r}: expected a whole number from 1 to 65535; correct it"

    def test_ports_that_are_no_number(self) -> None:
        for value in ("eighty", "80.5", True, [80], "nan", float("inf"), 10**400, "9" * 5000):
            for said in (refused({"http_port": value}), refused(kv_port=value)):
                assert re.match("(http|kv)_port is .*: expected", said)
                assert len(said) < 200

    def test_the_ports_of_a_data_parallel_engine_end_behind_the_last(self) -> None:
        made = options({}, kv_port=65500, engine=(8, 4, True))
        assert str(made.address) == "127.0.0.1:65532" and "ports 65532 to 65535" in made.ports
        said = refused(kv_port=65500, engine=(9, 4, True))
        assert "data-parallel rank 9" in said and "lower kv_port" in said

    @pytest.mark.parametrize(
        ("extra", "changes", "told"),
        [
            ({"proxy_ip": "127.0.0.1", "http_port": 1}, {}, "proxy_ip is set and proxy_port is not"),
            ({"proxy_port": 30001, "http_port": 1}, {}, "proxy_port is set and proxy_ip is not"),
            ({"proxy_ip": "127.0.0.1", "proxy_port": 30001}, {}, "http_port is not"),
            ({"staging_bytes": MIB, "chunk_bytes": 2 * MIB}, {}, str(2 * MIB)),
            (
                {"staging_bytes": MIB, "chunk_bytes": MIB // 4 + 1},
                {"role": "kv_both"},
                "a quarter of the staging",
            ),
            ({"link": "rdma"}, {}, "expected one of auto, host, ipc, nccl"),
            ({"link": "nccl"}, {}, "needs a CUDA device"),
            ({"link": "host"}, {"has_gpu": True}, "moves KV that is in CPU memory"),
            ({}, {"role": ""}, "expected kv_producer"),
            ({}, {"role": "P"}, "kv_role is 'P'"),
            *(({"host": host}, {}, "advertised") for host in ("0.0.0.0", "::", "[::]")),
            ({}, {"environ": {"P2PKV_SECRET": "hush"}}, "has 4 bytes: expected at least 16"),
            ({"secret_file": "/nonexistent"}, {}, "cannot be read"),
            ({"discovery": "curve"}, {}, "there is no secret"),
        ],
    )
    def test_what_does_not_go_together_is_refused(
        self, extra: dict[str, Any], changes: dict[str, Any], told: str
    ) -> None:
        said = refused(extra, **changes)
        assert told in said and "hush" not in said

    def test_a_name_that_means_loopback_here_is_pointed_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Debian's /etc/hosts has 127.0.1.1 for the machine's own name."""
        for address, notes in (("127.0.1.1", 1), ("10.0.0.7", 0)):
            found = [(0, 0, 0, "", (address, 0))]
            monkeypatch.setattr("p2pkv.config.getaddrinfo", lambda *_, found=found: found)
            assert len(options({"host": "node-7"}, environ={"P2PKV_SECRET": SECRET}).notes) == notes

    @pytest.mark.parametrize(
        ("role", "whose"),
        [("kv_consumer", "this instance"), ("kv_producer", "a D with the same staging_bytes")],
    )
    def test_chunks_of_more_than_a_quarter_of_staging_are_pointed_out(self, role: str, whose: str) -> None:
        """`tests/engine/test_backpressure.py` shows that messages are that short then."""
        sizes = {"staging_bytes": 8 * MIB, "chunk_bytes": 2 * MIB}
        assert options(sizes, role=role).notes == ()
        (note,) = options(sizes | {"chunk_bytes": 2 * MIB + 1}, role=role).notes
        assert f"{whose} takes messages of at most {2 * MIB} bytes, a quarter" in note
        assert note.endswith("raise staging_bytes or lower chunk_bytes")

    def test_kv_ahead_needs_more_than_what_is_kept_for_admitted_requests(self) -> None:
        sizes = {"staging_bytes": 4 * MIB, "chunk_bytes": 2 * MIB}
        assert options(sizes).prefetch_bytes == 0
        said = refused(sizes | {"prefetch_bytes": MIB})
        assert said.startswith(
            f"prefetch_bytes is set and staging_bytes only {4 * MIB}: expected more than 2 chunks"
        )
        assert said.endswith("raise staging_bytes or lower chunk_bytes")
        enough = sizes | {"prefetch_bytes": MIB, "staging_bytes": 4 * MIB + 1}
        notes = [str(options(enough, role=role).notes) for role in ("kv_producer", "kv_consumer")]
        assert ["no effect on a P" in each for each in notes] == [True, False]

    @pytest.mark.parametrize(
        ("name", "host"),
        [
            *product(["host", "proxy_ip"], ["a b", "300.1.1.1", "10.0.0.1,"]),
            ("host", "10.0.0.1:5"),
            ("proxy_ip", "10.0.0.1:0"),
            ("proxy_ip", "10.0.0.1:65536"),
        ],
    )
    def test_hosts(self, name: str, host: str) -> None:
        said = refused({"proxy_port": 1, "http_port": 1} | {name: host})
        told = {"host": "its port is the option kv_port", "proxy_ip": "HOST:PORT, several with commas"}
        assert said.startswith(f"{name}: ") and said.endswith(told[name])

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("host", 7.5, "a text in quotes"),
            ("proxy_ip", ["127.0.0.1"], "a text in quotes"),
            ("secret_file", 7, "a text in quotes"),
            ("weights_name", "s3://" + 252 * "x", "a text in quotes of at most 256 characters"),
            ("verify", "yes", "true or false"),
            ("discovery", "CURVE", "one of curve, plain"),
            ("chunk_bytes", 512, "a whole number from 1024 to 1073741824"),
            ("staging_bytes", 1 << 41, "a whole number from 1024 to 1099511627776"),
            ("idle_wait_ms", "\ud800", "a number from 0 to 100"),
            ("warm_up_seconds", -1, "a number from 0 to 1000000000"),
            *(
                (name, value, "a number from 0.001 to 1000000000")
                for name in ("lease_seconds", "stall_seconds")
                for value in (0, "-1", "inf", "nan", "soon")
            ),
            ("allowed_peers", 7, 'a list of networks, as ["10.0.0.0/8"]'),
            ("mem_pool_size_gb", True, "a number"),
            ("send_type", "SHOVE", "one of GET, PUT, PUT_ASYNC"),
        ],
    )
    def test_each_type_says_what_it_expected(self, name: str, value: object, expected: str) -> None:
        said = refused({name: value})
        assert said.startswith(f"{name} is {repr(value)[:38]}")
        assert said.endswith(f": expected {expected}; correct it")

    def test_made_by_hand_it_checks_itself_too(self) -> None:
        assert Options(role="D", host="LOCALHOST").address == Address("localhost", DEFAULT_KV_PORT)
        with pytest.raises(ConfigError, match="max_links is 0"):
            Options(role="D", host="localhost", max_links=0)
        with pytest.raises(ConfigError, match="expected an address that peers can connect to"):
            Options(role="D", host="::")


SECRET = "correct horse battery staple"


class TestSecurity:
    def test_a_secret_asks_for_curve(self, tmp_path: Path) -> None:
        file = tmp_path / "secret"
        file.write_text(f"{SECRET}\n")
        for extra, environ in (({"secret_file": str(file)}, {}), ({}, {"P2PKV_SECRET": SECRET})):
            made = options(extra, environ=environ, default_host="10.0.0.1")
            assert (made.secret, made.discovery, made.notes) == (SECRET.encode(), "curve", ())
            assert SECRET not in repr(made) and SECRET not in str(made)

    def test_discovery_may_be_plain_beside_a_secret(self) -> None:
        made = options({"discovery": "plain"}, environ={"P2PKV_SECRET": SECRET})
        assert (made.discovery, made.notes) == ("plain", ())

    def test_the_former_name_pings_in_the_clear_and_says_so(self) -> None:
        proxy = {"proxy_ip": "127.0.0.1", "proxy_port": 30001, "http_port": 8100}
        environ = {"P2PKV_SECRET": SECRET}
        made = options(proxy, former=True, environ=environ)
        assert made.discovery == "plain"
        assert "former connector's name implies discovery 'plain'" in made.notes[0]
        asked = options(proxy | {"discovery": "curve"}, former=True, environ=environ)
        assert (asked.discovery, asked.notes) == ("curve", ())
        assert options(proxy, former=True).notes == ()

    @pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "localhost.example", "node-7"])
    def test_off_loopback_needs_a_secret_or_a_word(self, host: str) -> None:
        said = refused({"host": host})
        assert f"host is {host}" in said and "P2PKV_SECRET" in said and "allow_insecure" in said
        (reminded,) = options({"allow_insecure": True, "host": host}).notes
        assert f"{Address(host, DEFAULT_KV_PORT)} is unauthenticated" in reminded
        assert options({"host": host}, environ={"P2PKV_SECRET": SECRET}).notes == ()

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
    def test_loopback_needs_nothing(self, host: str) -> None:
        assert options({"host": host}).notes == ()

    def test_allowed_peers(self) -> None:
        for value in (["10.0.0.0/8", "fd00::/8"], "10.0.0.0/8, fd00::/8"):
            allowed = options({"allowed_peers": value}).allowed_peers
            assert allowed is not None and str(allowed) == "10.0.0.0/8, fd00::/8"
        for value in ([], "10.0.0.0/99", ["node-7"], [7], {"10.0.0.0/8": 1}):
            assert refused({"allowed_peers": value}).startswith("allowed_peers")
