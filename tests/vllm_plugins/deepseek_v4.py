"""Lets vLLM's CPU build serve DeepSeek V4 on a machine without Triton and AMX.

vLLM 0.32's CPU kernels for this model need neither, but the code around them does. Nothing here reads or
writes KV. A plug-in of vLLM, for the servers of tests: see `plugin_environment` in `support.servers`.
"""

from functools import cache, wraps
from typing import Any

import torch


@cache
def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.triton_utils import HAS_TRITON

    allow_prefix_caching()
    plan_no_tiles()
    if not HAS_TRITON:
        run_metadata_kernels()


def allow_prefix_caching() -> None:
    """Stands in for AMX in `CpuPlatform.check_and_update_config`, which switches prefix caching and chunked
    prefill off without it. The kernels use AVX-512 where there is no AMX. AMX is pretended for the length of
    that call only: elsewhere vLLM chooses kernels by it."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    @wraps(check)
    def check_as_if_with_amx(_cls: type, vllm_config: Any) -> None:
        has_amx = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            check(vllm_config)
        finally:
            torch.cpu._is_amx_tile_supported = has_amx

    CpuPlatform.check_and_update_config = classmethod(check_as_if_with_amx)


def plan_no_tiles() -> None:
    """Stands in for `DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler`, which leaves out two of the
    layer types that `DeepseekSparseSWAMetadataBuilder.build` asks for. The answer is the one of its base
    class for a step that decodes nothing: no plan for any type."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder as Base

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, Any]:
        return Base.build_tile_scheduler(self, 0)

    Builder.build_tile_scheduler = build_tile_scheduler


def run_metadata_kernels() -> None:
    """Runs vLLM's Triton kernels for metadata in Triton's interpreter.

    Where vLLM finds no Triton for its device, its modules have a placeholder for `triton.language`, and
    kernels that are plain functions. `_compute_swa_indices_and_lens_kernel` does nothing here: it would run a
    program for each token, and vLLM's CPU code never reads what it writes.
    """
    import triton
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("the plug-in deepseek_v4 needs TRITON_INTERPRET=1 in the environment")
    for module in (compressor_utils, indexer, metadata, sparse_swa):
        module.tl = triton.language
    metadata._token_request_mapping_kernel = triton.jit(metadata._token_request_mapping_kernel)
    for owner in (
        compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL,
        indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL,
        sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL,
    ):
        owner.kernel = triton.jit(owner.kernel)
    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL.launch = lambda *_: None
