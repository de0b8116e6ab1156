"""P and D whole but for the model: vLLM's schedulers, our connectors, real ranks, links and pages."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from p2pkv.connector import connector
from p2pkv.control.announcer import Announcement, EngineHealth
from p2pkv.control.discovery import DISCOVERY_VERSION
from p2pkv.protocol.messages import PROTOCOL_VERSION
from support.connector.instances import BLOCK, tokens
from support.connector.real_ranks import ask_both, finish, listening, pings


def test_members_of_one_secret_transfer_and_ping_as_members(engines: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of the tests")
    with listening(b"a secret of the tests") as (proxy, place):
        p, d = engines(1, 2, secret_file=str(tmp_path / "secret"), **place)
        ask_both(p, d, "k", tokens(40))
        finish(p, d)
        assert set(d.ended.values()) == {"length"} and sum(d.computed.values()) == 5
        assert {ping.type for ping in pings(proxy, 2).values()} == {"P", "D"}


@pytest.mark.parametrize("off", [False, True], ids=["warm", "as it is"])
def test_what_the_first_rank_announces(engines: Any, monkeypatch: pytest.MonkeyPatch, off: bool) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    monkeypatch.setattr(connector, "Announcer", announcer := Mock())
    more = {"warm_up_seconds": 0} if off else {"warm_up_tls": True, "stall_seconds": 70}
    engines(1, 2, proxy_ip="127.0.0.1", proxy_port=9, http_port=8100, **more)
    calls = [call.args for call in announcer.call_args_list]
    assert all(standing() == EngineHealth() for _, _, standing in calls), "both may get requests"
    made: list[Announcement] = [announcement for announcement, _, _ in calls]
    assert [each.ping.type for each in made] == ["P", "D"], "only the first rank of an instance announces it"
    assert made[0].ping.fit == made[1].ping.fit != "", "with another TP they fit all the same"
    assert f"protocol={PROTOCOL_VERSION}, weights=" in made[0].ping.fit
    assert {(each.ping.version, each.ping.protocol) for each in made} == {
        (DISCOVERY_VERSION, PROTOCOL_VERSION)
    }
    assert [each.ping.partners for each in made] == [0, 64]
    for each in made:
        assert (each.proxies, each.secret) == (("127.0.0.1:9",), None)
        assert each.ping.http_address == "127.0.0.1:8100"
        if off:
            assert each.warm_up is None
            continue
        assert each.stall_seconds == 70 and each.warm_up is not None
        assert (each.warm_up.url, each.warm_up.api_key) == ("https://127.0.0.1:8100", "a key")
        assert each.warm_up.tokens == 3 * BLOCK + 1 and each.warm_up.model == each.ping.model


def test_each_rank_looks_who_else_computes_on_its_card(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(connector, "warn_of_turns", lambda device: looked.append(device.type))
    engines(1, 2)
    assert looked == ["cpu"] * 3


def test_prompts_with_a_common_beginning_in_one_step(engines: Any) -> None:
    """P's later prompts take as cached what the first one computes in the same step, while D asks."""
    p, d = engines(1, 1, budget=400, chunk_bytes=4096)
    ask_both(p, d, "the link is built", tokens(20, "first"))
    finish(p, d)

    def let_d_ask_and_p_push() -> None:
        for _ in range(40):
            d.step()
            time.sleep(0.001)

    p.meanwhile = let_d_ask_and_p_push
    for index in range(4):
        ask_both(p, d, index, [*tokens(64), index, 1, 2, 3])
    finish(p, d)
    assert set(d.ended.values()) == {"length"}
    assert p.count("bytes_before_last_layer") > 0, "nothing was pushed during the step"
