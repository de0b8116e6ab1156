"""The model and the vLLM servers of bench_pair.py, bench_pool.py and before_after.py."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from p2pkv.demo.processes import group_members
from p2pkv.demo.servers import VllmServer
from p2pkv.demo.tiny_model import llama_8b_geometry

_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
_BFLOAT16 = "avx512_bf16" in _FLAGS or "amx_bf16" in _FLAGS
# A CPU that does not compute in bfloat16 is slow with it. Half the heads in float32 have as many bytes of KV.
MODEL = (
    llama_8b_geometry() if _BFLOAT16 else replace(llama_8b_geometry(), dtype="float32", heads=4, kv_heads=4)
)
MODEL_SAID = f"{MODEL.layers} layers x {MODEL.kv_heads} KV heads x {MODEL.head_dim}, {MODEL.dtype}"
NAME = "llama-8b-kv"


@dataclass(frozen=True)
class ServerSettings:
    """What all servers of a run have in common.

    Attributes:
        model: folder of the model; longest: tokens of the longest prompt with its answer.
        chunk: tokens that a server computes in one step.
        kv_gib: memory of each server's KV cache; logs: a folder.
    """

    model: Path
    longest: int
    chunk: int
    kv_gib: int
    logs: Path

    def server(self, name: str, **more: Any) -> VllmServer:
        """Not started yet."""
        settings = [
            *("--served-model-name", NAME, "--dtype", MODEL.dtype, "--block-size", "32"),
            *("--max-model-len", str(self.longest), "--max-num-batched-tokens", str(self.chunk)),
            "--no-enable-prefix-caching",
        ]
        log = self.logs / f"{name}.log"
        log.unlink(missing_ok=True)
        return VllmServer(
            self.model, extra_args=settings, name=name, kv_cache_gib=self.kv_gib, log_path=log, **more
        )


def pair_headers(p: VllmServer, d: VllmServer) -> dict[str, str]:
    name = f"___prefill_addr_{p.zmq_address}___decode_addr_{d.zmq_address}_{uuid.uuid4().hex}"
    return {"X-Request-Id": name}


def memory_gib(servers: Sequence[VllmServer]) -> float:
    """Memory of all processes of these servers, each shared page counted once for its sharers."""
    total = 0
    for number in [member for server in servers for member in group_members(server.pid)]:
        try:
            total += psutil.Process(number).memory_full_info().pss
        except psutil.Error:
            continue
    return total / (1 << 30)
