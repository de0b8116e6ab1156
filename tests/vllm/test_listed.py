"""Real servers that are listed on the command line of a proxy that they do not ping."""

from __future__ import annotations

from pathlib import Path

from p2pkv.demo import answers
from p2pkv.demo.servers import ProxyServer, VllmServer
from support.servers.fleet import (
    BLOCK,
    MODEL_NAME,
    Fleet,
    Traffic,
    assert_at_rest,
    assert_same,
    kv_bytes,
    tokens,
)


def listed(server: VllmServer) -> str:
    return f"{server.base_url}={server.zmq_address}"


def test_two_proxies_that_list_the_same_servers_side_by_side(fleet: Fleet, logs: Path) -> None:
    """Each knows what the two fit, from their ranks; and one serves when the other has gone."""
    arguments = ("--prefill", listed(fleet.p), "--decode", listed(fleet.d))
    one, other = (
        ProxyServer(extra_args=arguments, log_path=logs / f"proxy-listed-{number}.log") for number in range(2)
    )

    def same_answer(proxy: ProxyServer, seed: str) -> None:
        prompt, traffic = tokens(3 * BLOCK, f"listed {seed}"), Traffic(fleet)
        got = answers.complete(proxy.base_url, MODEL_NAME, prompt)
        assert_same(answers.complete(fleet.single.base_url, MODEL_NAME, prompt), got)
        # D computes the last token by itself.
        assert traffic.scattered(at_least=kv_bytes(0, 3 * BLOCK - 1)) > 0

    with other:
        with one:
            for number, proxy in enumerate((one, other)):
                proxy.wait_ready()
                same_answer(proxy, f"beside {number}")
        same_answer(other, "after the other one")
    for proxy in (one, other):
        log = proxy.log_path.read_text()
        assert log.count("is ready") == 2 and "not known" not in log, log
    assert_at_rest(fleet)
