"""Real vLLM: a prefill and a decode server with the proxy answer as a single server does.

In each setting of SETTINGS, the cheapest first; on a CPU too, so that these lines are tried where no GPU is.
With `verify` every chunk's checksum is compared: that D's blocks hold what P's held is shown by that, and the
answers show that the blocks are used. Answers in bfloat16 may part where two tokens are as good as equal.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from gpu.figures import figure

from p2pkv.control.endpoint import inspect
from p2pkv.demo import answers, client
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import TinyLlama, ensure_model
from p2pkv.pairing import Address

pytestmark = [pytest.mark.vllm, pytest.mark.servers, pytest.mark.timeout(600)]

NAME = "tiny"
LENGTHS = (1, 15, 16, 17, 300, 1500)
LOAD_PROMPTS = 8
LOAD_TOKENS = 1200
STREAM_TOKENS = 300
LEASE_SECONDS = 5
ARGUMENTS = (
    *("--served-model-name", NAME, "--max-model-len", "2048"),
    *("--max-num-batched-tokens", "512", "--enable-prefix-caching"),
)
BF16_TIE = 0.25
"""Log-probabilities of two tokens that are nearer than that may change places: the logits of a small model
lie at some 16, where two neighbours of bfloat16 are 0.06 apart."""


@dataclass(frozen=True)
class Setting:
    """What the servers run with.

    Attributes:
        p, d: CUDA_VISIBLE_DEVICES of each; "" on a CPU.
        graphs: vLLM's cudagraph_mode; "" means --enforce-eager.
        link: what carries KV between GPUs.
    """

    name: str
    p: str
    d: str
    tp: int = 1
    graphs: str = ""
    link: str = "nccl"

    @property
    def gpu(self) -> bool:
        return bool(self.p)

    def arguments(self) -> tuple[str, ...]:
        given = [*ARGUMENTS, "--dtype", "bfloat16" if self.gpu else "float32"]
        given += ["--block-size", "16" if self.gpu else "32"]
        given += ["--tensor-parallel-size", str(self.tp)]
        if self.gpu:
            # Not a share of the card: vLLM would take what another server has there for its own. It checks at
            # its start that the share is free all the same, so a small one.
            given += ["--kv-cache-memory-bytes", str(512 << 20)]  # needs a GPU
            given += ["--gpu-memory-utilization", "0.05"]  # needs a GPU
        if self.graphs:
            given += ["--compilation-config", f'{{"cudagraph_mode": "{self.graphs}"}}']  # needs a GPU
        return tuple(given)


def setting(name: str, *marks: Any, **how: Any) -> Any:
    return pytest.param(Setting(name, **how), id=name, marks=marks)


SETTINGS = [
    setting("cpu", pytest.mark.long, p="", d=""),
    setting("one-gpu", pytest.mark.gpu, p="0", d="0"),
    setting("one-gpu-graphs", pytest.mark.gpu, p="0", d="0", graphs="FULL_AND_PIECEWISE"),
    setting("one-gpu-ipc", pytest.mark.gpu, p="0", d="0", link="ipc"),
    setting("two-gpus-ipc", pytest.mark.two_gpus, p="0", d="1", link="ipc"),
    setting("two-gpus", pytest.mark.two_gpus, p="0", d="1"),
    setting("two-gpus-piecewise", pytest.mark.two_gpus, p="0", d="1", graphs="PIECEWISE"),
    setting("two-gpus-full", pytest.mark.two_gpus, p="0", d="1", graphs="FULL_AND_PIECEWISE"),
    setting("two-gpus-tp2", pytest.mark.two_gpus, p="0,1", d="0,1", tp=2, graphs="FULL_AND_PIECEWISE"),
]


@dataclass(frozen=True)
class Servers:
    """A pair behind a proxy, and a server that does all by itself."""

    setting: Setting
    vocab: int
    proxy: ProxyServer
    p: VllmServer
    d: VllmServer
    single: VllmServer

    def prompt(self, seed: str, length: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(300, self.vocab) for _ in range(length)]

    def counters(self, rank: int = 0) -> Mapping[str, Any]:
        """Once no load is under way: a prompt of one token may be answered before its transfer has ended."""
        address = Address.parse(self.d.zmq_address).shifted(rank)
        wait_until(lambda: not int(inspect(address)["loads"]), "the end of D's loads")
        return inspect(address)

    def differs(self, expected: answers.Answer, got: answers.Answer) -> str | None:
        return answers.difference(expected, got, BF16_TIE if self.setting.gpu else answers.TIE)


@pytest.fixture(scope="module", params=SETTINGS)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Started together: with --kv-cache-memory-bytes none takes another's memory for its own."""
    chosen: Setting = request.param
    # FlashAttention takes head sizes from 64 on in all its versions.
    shape = TinyLlama(dtype="bfloat16", head_dim=64) if chosen.gpu else TinyLlama()
    model = ensure_model(shape, tmp_path_factory.mktemp("models"))
    logs = tmp_path_factory.mktemp("logs")
    proxy = ProxyServer(log_path=logs / "proxy.log")
    settings = {
        "link": chosen.link if chosen.gpu else "host",
        "staging_bytes": 64 << 20,
        "lease_seconds": LEASE_SECONDS,
        "verify": True,
    }

    def server(name: str, cards: str, **options: Any) -> VllmServer:
        environment = {"CUDA_VISIBLE_DEVICES": cards}
        if chosen.tp > 1:  # vLLM's communicator is NCCL's first one, and so decides for p2pkv's
            environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # needs a GPU
        return VllmServer(
            model,
            extra_args=chosen.arguments(),
            env=environment if cards else {},
            eager=not chosen.graphs,
            name=name,
            log_path=logs / f"{name}.log",
            **options,
        )

    paired = {"proxy": proxy.discovery, "extra_config": settings, "ranks": chosen.tp}
    recompute = {"load_failure_policy": "recompute"}
    with ExitStack() as stack:
        p = server("P", chosen.p, role="P", **paired)
        d = server("D", chosen.d, role="D", **paired, **recompute)
        single = server("single", chosen.p)
        for each in (proxy, p, d, single):
            stack.enter_context(each)
        for each in (p, d, single, proxy):
            each.wait_ready()
        yield Servers(chosen, shape.vocab, proxy, p, d, single)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_pair_answers_as_a_single_server(servers: Servers, length: int) -> None:
    prompt = servers.prompt(f"gpu {length}", length)
    before = servers.counters()
    (expected,) = answers.complete(servers.single.base_url, NAME, prompt)
    (pair,) = answers.complete(servers.proxy.base_url, NAME, prompt)
    assert servers.differs(expected, pair) is None
    after = servers.counters()
    if length > 1:
        assert int(after["transfers_loaded"]) == int(before["transfers_loaded"]) + 1
    assert int(after["transfers_failed"]) == int(after["chunks_corrupt"]) == 0


class Stream(threading.Thread):
    """One long answer of the pair, token by token, and when each token came."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.error: Exception | None = None
        body = {"model": NAME, "prompt": servers.prompt("stream", 40), "max_tokens": STREAM_TOKENS}
        body |= {"temperature": 0.0, "ignore_eos": True}
        self._chunks = client.stream(f"{servers.proxy.base_url}/v1/completions", body)
        self.start()

    def run(self) -> None:
        try:
            for _ in self._chunks:
                self.times.append(time.monotonic())
        except Exception as error:
            self.error = error

    def longest_pause(self) -> float:
        """Seconds between two tokens, once all have come."""
        self.join(300.0)
        assert not self.is_alive() and self.error is None, f"the stream broke: {self.error}"
        assert len(self.times) > STREAM_TOKENS // 2
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


def test_a_stream_that_breaks_is_reported_on_a_cpu() -> None:
    nowhere = SimpleNamespace(
        proxy=SimpleNamespace(base_url="http://127.0.0.1:1"), prompt=lambda seed, length: [1]
    )
    with pytest.raises(AssertionError, match="the stream broke: "):
        Stream(nowhere).longest_pause()  # type: ignore[arg-type]


class Load:
    """Long prompts for the pair, all at once, and their answers."""

    def __init__(self, servers: Servers, seed: str) -> None:
        self.prompts = [servers.prompt(f"{seed} {number}", LOAD_TOKENS) for number in range(LOAD_PROMPTS)]
        self.answers: list[answers.Answer] = []
        self._thread = threading.Thread(target=self._ask, args=(servers,), daemon=True)
        self._thread.start()

    def _ask(self, servers: Servers) -> None:
        self.answers = answers.complete(servers.proxy.base_url, NAME, self.prompts, max_tokens=8)

    def finish(self, servers: Servers) -> None:
        """The pair answers all of them as the single server does."""
        self._thread.join(300.0)
        assert len(self.answers) == LOAD_PROMPTS, "the pair has not answered all prompts"
        expected = answers.complete(servers.single.base_url, NAME, self.prompts, max_tokens=8)
        wrong = [servers.differs(want, have) for want, have in zip(expected, self.answers, strict=True)]
        assert wrong == [None] * LOAD_PROMPTS


def test_d_decodes_while_prompts_arrive(servers: Servers) -> None:
    """The answers are right, and the longest pause between two tokens of one that runs is a figure."""
    quiet = Stream(servers).longest_pause()
    stream = Stream(servers)
    load = Load(servers, "load")
    pause = stream.longest_pause()
    load.finish(servers)
    figure("longest pause between tokens, nothing else running", quiet, "s", servers.setting.name)
    figure("longest pause between tokens, prompts arriving", pause, "s", servers.setting.name)


def test_d_decodes_on_when_p_is_killed(servers: Servers) -> None:
    """The last test of a setting: P is gone afterwards. D computes what P owed."""
    before = int(servers.counters()["receives_posted"]), int(servers.counters()["chunks_scattered"])
    stream = Stream(servers)
    wait_until(lambda: len(stream.times) > 3, "the stream's first tokens", 60.0)
    load = Load(servers, "killed")
    # D has granted something, or has just got it: P is in the midst of it.
    wait_until(
        lambda: (
            int((seen := servers.counters())["receives_posted"]) > before[0]
            or int(seen["chunks_scattered"]) > before[1]
        ),
        "a push under way",
        60.0,
    )
    servers.p.kill()
    pause = stream.longest_pause()
    load.finish(servers)
    figure("longest pause between tokens, P killed", pause, "s", servers.setting.name)
