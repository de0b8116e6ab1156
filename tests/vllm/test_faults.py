"""Real servers that die, that do not fit, or that are started wrongly."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from p2pkv.demo import client
from p2pkv.demo.processes import ServerFailed, wait_until
from p2pkv.demo.servers import VllmServer
from p2pkv.demo.tiny_model import TinyLlama, ensure_model
from support.servers.fleet import (
    FORKED,
    LEASE,
    Fleet,
    assert_same,
    at_rest,
    complete,
    counter,
    forked,
    paired_headers,
    probing_server,
    tokens,
)


def terminate(server: VllmServer) -> None:
    """All of its processes are told to stop, as Ctrl-C and systemd do."""
    os.killpg(server.pid, signal.SIGTERM)


@pytest.mark.parametrize("end", [VllmServer.kill, pytest.param(terminate, marks=pytest.mark.long)])
def test_p_is_killed_in_mid_transfer(
    fleet: Fleet,
    taker: VllmServer,
    launch: Callable[..., None],
    tiny_model: Path,
    tmp_path: Path,
    end: Callable[[VllmServer], None],
) -> None:
    """Two prompts are half pushed when P dies: one D recomputes, that of the fleet fails its request."""
    config = {"lease_seconds": LEASE, "chunk_bytes": 16384}
    p = probing_server(tiny_model, "P", tmp_path, name="mortal", plugins=FORKED, extra_config=config)
    launch(p)
    decoders = {"recompute": taker, "fail": fleet.d}
    failed = {policy: counter(d, "transfers_failed") for policy, d in decoders.items()}
    hold = tmp_path / "hold-mortal"
    hold.write_text("2 2")
    prompts = {policy: tokens(150, f"{end.__name__} {policy}") for policy in decoders}
    with ThreadPoolExecutor(4) as pool:
        headers = {policy: paired_headers(p, d) for policy, d in decoders.items()}
        got = {
            policy: pool.submit(complete, d, prompts[policy], headers=headers[policy])
            for policy, d in decoders.items()
        }
        for policy in decoders:
            pool.submit(complete, p, prompts[policy], 1, headers=headers[policy])
        wait_until(hold.with_suffix(".held").exists, "P's forward to be held at its third layer", 60.0)
        end(p)
        assert_same([complete(fleet.single, prompts["recompute"])], [got["recompute"].result(60)])
        with pytest.raises(client.RequestFailed) as error:
            got["fail"].result(60)
        assert error.value.status == 500
    for policy, d in decoders.items():
        prompt = tokens(40, f"after {end.__name__} {policy}")
        assert_same([complete(fleet.single, prompt)], [complete(d, prompt)])
        wait_until(lambda d=d, before=failed[policy]: counter(d, "transfers_failed") > before, "its failure")
        at_rest(d)


@pytest.mark.long
def test_servers_that_are_started_wrongly_say_why(fleet: Fleet, tiny_model: Path, tmp_path: Path) -> None:
    """An option that does not exist, and a port that is taken; tests/connector has the others."""
    wrong = {
        "lease_second": {"extra_config": {"lease_second": 5}},
        "another process uses this port": {"kv_port": fleet.p.kv_port},
    }
    servers = {
        words: forked(tiny_model, tmp_path, f"{number}", role="D", **options)
        for number, (words, options) in enumerate(wrong.items())
    }
    with ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server)
        for words, server in servers.items():
            with pytest.raises(ServerFailed):
                server.wait_ready()
            assert words in server.log_path.read_text()


@pytest.mark.long
def test_a_d_of_another_model_is_refused(fleet: Fleet, launch: Callable[..., None], tmp_path: Path) -> None:
    other = ensure_model(TinyLlama(seed=99), tmp_path)
    d = forked(other, tmp_path, "other", role="D", load_failure_policy="fail", connector="P2pNcclConnector")
    launch(d)
    with pytest.raises(client.RequestFailed):
        complete(d, tokens(50, "other model"), headers=paired_headers(fleet.p, d))
    log = d.log_path.read_text()
    assert "weights differ" in log and fleet.p.zmq_address in log and d.zmq_address in log
