"""Real vLLM as P, as D and as a single server, and the proxy: started together, on GPUs or a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from p2pkv.control.endpoint import inspect
from p2pkv.demo import answers
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import TinyLlama, TinyModel, ensure_model
from p2pkv.pairing import Address

NAME = "tiny"
LEASE_SECONDS = 5
START_SECONDS = 200.0
CPU_START_SECONDS = 300.0
LOG_LINES = 60
"""Of each server that has ended, or of all, in the text of what went wrong."""
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
        model: None for a tiny Llama.
        more: arguments of all three servers.
        larger: D's block is so many of P's.
        runner: VLLM_USE_V2_MODEL_RUNNER; "" leaves the choice to vLLM.
        tie: as BF16_TIE, on GPUs.
    """

    name: str
    p: str
    d: str
    tp: int = 1
    graphs: str = ""
    link: str = "nccl"
    model: TinyModel | None = None
    more: tuple[str, ...] = ()
    larger: int = 1
    runner: str = ""
    tie: float = BF16_TIE

    @property
    def gpu(self) -> bool:
        return bool(self.p)

    def arguments(self, larger: int = 1) -> tuple[str, ...]:
        given = [*ARGUMENTS, "--dtype", "bfloat16" if self.gpu else "float32"]
        given += ["--block-size", str((16 if self.gpu else 32) * larger)]
        given += ["--tensor-parallel-size", str(self.tp)]
        if self.gpu:
            # Not a share of the card: vLLM would take what another server has there for its own. It checks at
            # its start that the share is free all the same, so a small one.
            given += ["--kv-cache-memory-bytes", str(512 << 20)]  # needs a GPU
            given += ["--gpu-memory-utilization", "0.05"]  # needs a GPU
        if self.graphs:
            given += ["--compilation-config", f'{{"cudagraph_mode": "{self.graphs}"}}']  # needs a GPU
        return (*given, *self.more)


def setting(name: str, *marks: Any, **how: Any) -> Any:
    return pytest.param(Setting(name, **how), id=name, marks=marks)


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
        return answers.difference(expected, got, self.setting.tie if self.setting.gpu else answers.TIE)


@contextmanager
def started(chosen: Setting, folder: Path) -> Iterator[Servers]:
    """Started together: with --kv-cache-memory-bytes none takes another's memory for its own. What goes wrong
    meanwhile has the ends of logs in its text."""
    # FlashAttention takes head sizes from 64 on in all its versions.
    llama = TinyLlama(dtype="bfloat16", head_dim=64) if chosen.gpu else TinyLlama()
    shape = chosen.model or llama
    model = ensure_model(shape, folder)
    proxy = ProxyServer(log_path=folder / "proxy.log")
    settings = {
        "link": chosen.link if chosen.gpu else "host",
        "staging_bytes": 64 << 20,
        "lease_seconds": LEASE_SECONDS,
        "verify": True,
    }

    def server(name: str, cards: str, larger: int = 1, **options: Any) -> VllmServer:
        environment = {"CUDA_VISIBLE_DEVICES": cards} if cards else {}
        if chosen.runner:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = chosen.runner  # needs a GPU
        if chosen.tp > 1:  # vLLM's communicator is NCCL's first one, and so decides for p2pkv's
            environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # needs a GPU
        return VllmServer(
            model,
            extra_args=chosen.arguments(larger),
            env=environment,
            eager=not chosen.graphs,
            name=name,
            log_path=folder / f"{name}.log",
            **options,
        )

    paired = {"proxy": proxy.discovery, "extra_config": settings, "ranks": chosen.tp}
    p = server("P", chosen.p, role="P", **paired)
    d = server("D", chosen.d, chosen.larger, role="D", **paired, load_failure_policy="recompute")
    single = server("single", chosen.p)
    with ExitStack() as stack:
        try:
            for each in (proxy, p, d, single):
                stack.enter_context(each)
            for each in (p, d, single, proxy):
                each.wait_ready(START_SECONDS if chosen.gpu else CPU_START_SECONDS)
            yield Servers(chosen, shape.vocab, proxy, p, d, single)
        except Exception as error:
            for each in [each for each in (p, d, single) if not each.running()] or (p, d, single):
                error.add_note(f"{each.name}: {each.log_tail(LOG_LINES)}")
            raise
