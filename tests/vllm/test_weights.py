"""Real servers whose weights change: afterwards they answer as one that was started with the new ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from p2pkv.demo import answers, client
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model
from support.servers.fleet import (
    BLOCK,
    MODEL,
    MODEL_NAME,
    SETTINGS,
    ask_all,
    asking,
    assert_same,
    at_rest,
    counter,
    start_all,
    tokens,
)

pytestmark = pytest.mark.long

AT_ONCE = 4
KNOWN = [tokens(length, f"known {length}") for length in (BLOCK - 7, 3 * BLOCK, 200, 300)]
"""Prompts that are in the prefix caches of both sides whenever the weights change."""


@dataclass(frozen=True)
class Servers:
    """P on two ranks, D, the proxy, and a plain server for each of two models that differ in weights only."""

    p: VllmServer
    d: VllmServer
    proxy: ProxyServer
    models: dict[str, Path]
    singles: dict[str, VllmServer]

    def rest(self) -> None:
        at_rest(self.p, ranks=2)
        at_rest(self.d)

    def expected(self, prompts: Sequence[list[int]], model: str) -> list[Answer]:
        return ask_all(self.singles[model].base_url, prompts, at_once=AT_ONCE)

    def assert_answers(self, prompts: Sequence[list[int]], model: str, moves: bool) -> None:
        """The pair answers as a server of this model does. `moves`: D loads KV from P, else it loads none."""
        before = self.moved()
        assert_same(self.expected(prompts, model), ask_all(self.proxy.base_url, prompts, at_once=AT_ONCE))
        self.rest()
        loaded, failed, scattered = (now - then for now, then in zip(self.moved(), before, strict=True))
        if moves:
            assert (loaded, failed) == (len(prompts), 0) and scattered
        else:
            assert (loaded, failed, scattered) == (0, len(prompts), 0)

    def moved(self) -> list[float]:
        names = ("transfers_loaded", "transfers_failed", "bytes_scattered")
        return [counter(self.d, name) for name in names]


def fresh(name: str) -> list[list[int]]:
    """Prompts that no cache knows, and some that continue a known one."""
    return [
        tokens(250, name),
        [*KNOWN[2], *tokens(40, f"{name} more")],
        [*KNOWN[0], *tokens(70, f"{name} more")],
    ]


def call(server: VllmServer, method: str, **kwargs: str) -> None:
    body = {"method": method, "kwargs": kwargs}
    client.post(f"{server.base_url}/collective_rpc", body, timeout_seconds=180.0)


@contextmanager
def load(servers: Servers, name: str) -> Iterator[None]:
    """Requests through the proxy all the while, new prompts and known ones; each is answered."""
    done: list[int] = []

    def ask(number: int) -> None:
        prompt = [*KNOWN[number % len(KNOWN)], *tokens(30, f"{name} {number // 2}")]
        done.append(len(answers.complete(servers.proxy.base_url, MODEL_NAME, prompt, max_tokens=24)))

    with asking(AT_ONCE, ask) as one_has_failed:
        wait_until(lambda: len(done) >= AT_ONCE or one_has_failed(), "the load", 60.0)
        yield
        before = len(done)
        wait_until(lambda: len(done) >= before + AT_ONCE or one_has_failed(), "the load afterwards", 60.0)
    servers.rest()


@pytest.fixture(scope="module")
def running(tiny_model: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    models = {
        "old": tiny_model,
        "new": ensure_model(replace(MODEL, seed=MODEL.seed + 1), tmp_path_factory.mktemp("models")),
    }
    proxy = ProxyServer(log_path=logs / "weights-proxy.log")
    settings = (*SETTINGS, "--weight-transfer-config", '{"backend": "nccl"}')
    common = {
        "proxy": proxy.discovery,
        "env": {"VLLM_SERVER_DEV_MODE": "1"},
        "load_failure_policy": "recompute",
    }
    p = VllmServer(
        tiny_model, role="P", ranks=2, name="weights-P", log_path=logs / "weights-P.log",
        extra_args=(*settings, "--tensor-parallel-size", "2"), **common,
    )  # fmt: skip
    d = VllmServer(
        tiny_model, role="D", name="weights-D", log_path=logs / "weights-D.log", extra_args=settings,
        extra_config={"prefetch_bytes": 1 << 22}, **common,
    )  # fmt: skip
    singles = {
        name: VllmServer(model, extra_args=SETTINGS, name=name, log_path=logs / f"weights-{name}.log")
        for name, model in models.items()
    }
    with ExitStack() as stack:
        start_all(stack, p, d, *singles.values(), proxy)
        yield Servers(p, d, proxy, models, singles)


@pytest.fixture
def servers(running: Servers, servers_on_failure: Callable[..., None]) -> Servers:
    """P and D have the old weights, under the same name, and the known prompts in their caches."""
    servers_on_failure(running.p, running.d, running.proxy)
    for server in (running.p, running.d):
        call(server, "reload_weights", weights_path=str(running.models["old"]))
    running.rest()
    ask_all(running.proxy.base_url, KNOWN, at_once=AT_ONCE)
    running.rest()
    return running


@pytest.mark.parametrize("first", ["P", "D"])
def test_weights_that_are_loaded_anew_on_one_side_and_then_on_the_other_under_load(
    servers: Servers, first: str
) -> None:
    sides = [servers.p, servers.d] if first == "P" else [servers.d, servers.p]
    servers.assert_answers(fresh(f"{first} before"), "old", moves=True)
    path = str(servers.models["new"])
    with load(servers, f"{first} 1"):
        call(sides[0], "reload_weights", weights_path=path)
    # D decides what the answers are.
    now = "old" if first == "P" else "new"
    servers.assert_answers(fresh(f"{first} between"), now, moves=False)
    assert_same(servers.expected(KNOWN, now), ask_all(servers.d.base_url, KNOWN, at_once=AT_ONCE))
    with load(servers, f"{first} 2"):
        call(sides[1], "reload_weights", weights_path=path)
    servers.assert_answers(fresh(f"{first} after"), "new", moves=True)
    for server in (servers.proxy, servers.d, servers.p):
        assert_same(servers.expected(KNOWN, "new"), ask_all(server.base_url, KNOWN, at_once=AT_ONCE))
    servers.rest()


def test_an_update_in_several_calls_with_a_version(servers: Servers) -> None:
    """Nothing is sent, so weights stay: what is seen is when KV moves. vLLM cannot compute in between."""
    for server, version in ((servers.p, {"weight_version": "step-1"}), (servers.d, {})):
        client.post(f"{server.base_url}/start_weight_update", {})
        client.post(f"{server.base_url}/finish_weight_update", version)
        servers.assert_answers(fresh(f"finished on {server.name}"), "old", moves=False)
    client.post(f"{servers.d.base_url}/update_weight_version", {"new_version": "step-1"})
    servers.assert_answers(fresh("both"), "old", moves=True)


@pytest.mark.parametrize("side", ["P", "D"])
def test_caches_that_are_reset_under_load(servers: Servers, side: str) -> None:
    server = servers.p if side == "P" else servers.d
    with load(servers, f"reset {side}"):
        client.post(f"{server.base_url}/reset_prefix_cache?reset_external=true", {})
    servers.assert_answers(fresh(f"reset {side}"), "old", moves=True)
