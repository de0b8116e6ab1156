"""One of two ranks that have loaded the plug-in moe_dp: what vLLM's functions give it.

Arguments: the rank, a port, a file of torch with cases, and the one to write.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.plugins import load_general_plugins


def answer(communicator: CpuCommunicator, case: dict[str, Any], rank: int) -> list[torch.Tensor]:
    match case["call"]:
        case "all_gatherv":
            return communicator.all_gatherv(case["inputs"][rank], 0, case["sizes"])
        case "reduce_scatterv":
            return [communicator.reduce_scatterv(each, 0, case["sizes"]) for each in case["inputs"][rank]]
        case _:
            return [experts(case, rank)]


def experts(case: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
    """What the experts on this rank add to each token: the first half of them, or the second."""
    count = len(case["w13"]) // 2
    expert_map = torch.full((2 * count,), -1, dtype=torch.int32)
    mine = slice(rank * count, (rank + 1) * count)
    expert_map[mine] = torch.arange(count, dtype=torch.int32)
    output = torch.empty_like(case["tokens"])
    isa = CPUUnquantizedExperts.isa
    CPUUnquantizedExperts.apply(
        SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa=isa),
        output=output,
        hidden_states=case["tokens"],
        w1=cpu_prepack_moe_weight(case["w13"][mine].contiguous(), isa),
        w2=cpu_prepack_moe_weight(case["w2"][mine].contiguous(), isa),
        topk_weights=case["weights"],
        topk_ids=case["chosen"],
        activation=SimpleNamespace(value="silu"),
        global_num_experts=2 * count,
        expert_map=expert_map,
        a1q_scale=None,
        a2_scale=None,
        workspace13=None,
        workspace2=None,
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    return output


def main(rank: str, port: str, cases: str, answers: str) -> None:
    load_general_plugins()
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2
    )
    group = torch.distributed.group.WORLD
    communicator = CpuCommunicator(group, device_group=group, unique_name="dp:0")
    torch.save([answer(communicator, case, int(rank)) for case in torch.load(cases)], answers)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
