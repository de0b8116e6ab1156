"""What vLLM makes of batches when it has loaded the plug-in deepseek_v4.

Arguments: a model's folder, a JSON file with batches, and the JSON file to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping
from vllm.v1.attention.backends.mla.indexer import build_prefill_chunk_metadata
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices

BLOCK, WINDOW = 256, 128


def answer(batch: dict[str, Any]) -> dict[str, list[int]]:
    """Of each request a batch has the tokens of this step and those before it, and of each token its slot."""
    queries, contexts = torch.tensor(batch["queries"]), torch.tensor(batch["contexts"])
    starts = torch.zeros(len(queries) + 1, dtype=torch.int32)
    starts[1:] = queries.cumsum(0)
    lengths = (queries + contexts).int()
    table = torch.tensor(batch["table"], dtype=torch.int32)
    slots = torch.tensor(batch["slots"])
    tokens, padded = int(starts[-1]), int(starts[-1]) + batch["padding"]
    requests = torch.full((padded,), -7, dtype=torch.int32)
    found = {"requests": compute_token_to_req_indices(starts, requests, tokens, padded)}
    for ratio in (4, 128):
        found[f"slots {ratio}"] = get_compressed_slot_mapping(
            tokens, slots, starts, lengths, table, BLOCK // ratio, ratio
        )
    rows = lengths // 4
    step = slice(0, tokens)
    chunk = build_prefill_chunk_metadata(
        0, len(queries), starts, starts, lengths, rows, rows, table, 4, query_slice=step
    )
    assert chunk is not None
    found |= {"first": chunk.cu_seqlen_ks, "past": chunk.cu_seqlen_ke, "owners": chunk.token_to_seq}
    found["gathered"] = torch.full((len(queries),), -7, dtype=torch.int32)
    sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL(
        found["gathered"], lengths, starts, torch.zeros_like(lengths), len(queries), 0, WINDOW
    )
    return {name: values.tolist() for name, values in found.items()}


def main(model: str, batches: str, answers: str) -> None:
    load_general_plugins()
    has_amx = torch.cpu._is_amx_tile_supported
    config = EngineArgs(model=model, max_model_len=4096, max_num_batched_tokens=512).create_engine_config()
    found = {
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "amx_untouched": torch.cpu._is_amx_tile_supported is has_amx,
        "tiles": DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler(None, 3),
        "layer_types": [value for name, value in vars(sparse_swa).items() if name.startswith("_LAYER_TYPE_")],
        "batches": [answer(batch) for batch in json.loads(Path(batches).read_text())],
    }
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
