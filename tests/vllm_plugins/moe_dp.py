"""Lets vLLM's CPU build serve a mixture of experts with data-parallel ranks.

Each layer gathers the tokens of all ranks before its experts, and gives each rank its sums back after them.
vLLM 0.32 has neither collective for the CPU, and its kernel for experts takes all of them to be on this rank.
A plug-in of vLLM, for the servers of tests: see `plugin_environment` in `support.servers`.
"""

import inspect
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed


@cache
def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    leave_out_experts_of_others()


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Stands in for `DeviceCommunicatorBase.all_gatherv`, and does what that of `CudaCommunicator` does: the
    rows of all ranks in their order, `sizes[r]` of rank r. Gloo gathers tensors of one shape, so that each
    rank sends as many rows as the longest."""
    if dim != 0:
        raise NotImplementedError("all_gatherv gathers along dimension 0 only")
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [len(input_)] * self.world_size
    if len(input_) != sizes[self.rank_in_group]:
        raise ValueError(f"{len(input_)} rows, but rank {self.rank_in_group} has {sizes[self.rank_in_group]}")
    sent = input_.new_zeros(max(sizes), *input_.shape[1:])
    sent[: sizes[self.rank_in_group]] = input_
    gathered = [torch.empty_like(sent) for _ in sizes]
    torch.distributed.all_gather(gathered, sent, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Stands in for `DeviceCommunicatorBase.reduce_scatterv`, and does what that of `CudaCommunicator` does:
    this rank's `sizes[rank_in_group]` rows of the sum over all ranks. Each rank computes the whole sum, and
    keeps its part."""
    if dim != 0:
        raise NotImplementedError("reduce_scatterv scatters along dimension 0 only")
    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=self.device_group)
    sizes = sizes or [len(total) // self.world_size] * self.world_size
    return total.split(sizes)[self.rank_in_group].clone()


def leave_out_experts_of_others() -> None:
    """Stands in for the use of `expert_map` in `CPUUnquantizedExperts.apply`: it is ignored there, so that
    the kernel reads beyond its weights where ranks share the experts (`--enable-expert-parallel`). A token's
    expert of another rank becomes the first of this one, with weight 0."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply
    signature = inspect.signature(apply)

    @wraps(apply)
    def apply_own(*args: Any, **named: Any) -> None:
        given = signature.bind(*args, **named).arguments
        if (expert_map := given["expert_map"]) is not None:
            own = expert_map[given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0.0)
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
        apply(**given)

    CPUUnquantizedExperts.apply = apply_own
