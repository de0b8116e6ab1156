"""An engine for Ray Serve LLM that computes nothing, in place of vLLM (`RAYLLM_VLLM_ENGINE_CLS`).

Each request leaves a note in `$P2PKV_STUB_NOTES`, and waits until the other role has had the same one: so it
is answered only if Ray asks P and D at once and under one id. D answers with that id.
"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray.llm._internal.serve.core.configs.openai_api_models import CompletionResponse
from ray.llm._internal.serve.core.engine.protocol import LLMEngine

SECONDS = 60.0


class StubEngine(LLMEngine):
    def __init__(self, llm_config: Any) -> None:
        self._config = llm_config

    async def start(self) -> None:
        # As Ray's own engine: it makes the connector's backend and calls its setup.
        self._config.setup_engine_backend()

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        transfer = self._config.engine_kwargs["kv_transfer_config"]
        name = hashlib.sha256(request.request_id.encode()).hexdigest()[:16]
        role, other = ("P", "D") if transfer["kv_role"] == "kv_producer" else ("D", "P")
        notes = Path(os.environ["P2PKV_STUB_NOTES"])
        note = {"id": request.request_id, "max_tokens": request.max_tokens, "kv_port": transfer["kv_port"]}
        written = notes / f"{role}-{name}.part"
        written.write_text(json.dumps({**note, "stream": bool(request.stream)}))
        written.rename(notes / f"{role}-{name}.json")
        end = time.monotonic() + SECONDS
        while not (notes / f"{other}-{name}.json").exists():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{other} was not asked for {request.request_id} at the same time as {role}"
                )
            await asyncio.sleep(0.02)
        yield CompletionResponse(
            id=request.request_id,
            model="tiny",
            choices=[{"index": 0, "text": request.request_id, "finish_reason": "length", "logprobs": None}],
            usage={"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1},
        )

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def resolve_lora(self, lora_model: Any) -> None:
        raise NotImplementedError

    async def reset_prefix_cache(self) -> None:
        pass
