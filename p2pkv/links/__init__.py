"""The data plane: links of several kinds behind the seam in `base`."""

from __future__ import annotations

import torch

from p2pkv.links.base import Inbound, LinkError, LinkFactory, Outbound, Receive, Send
from p2pkv.trust import Networks

KINDS = ("auto", "host", "nccl")


def make_factory(
    kind: str,
    *,
    host: str,
    staging_bytes: int,
    shared_memory: bool = True,
    device: torch.device | None = None,
    nccl_channels: int = 8,
    allowed: Networks | None = None,
) -> LinkFactory:
    """The factory of links for one rank.

    Args:
        kind: `host`, `nccl`, or `auto`: `nccl` where torch has a CUDA device, else `host`.
        host: address or name of this machine that peers can dial.
        staging_bytes: bound on local copies of what is being sent; for `nccl` the slots in device memory.
        shared_memory: whether host links may share memory with ranks of the same machine.
        device: where the KV is; for `nccl` the current CUDA device by default.
        nccl_channels: the most channels of an NCCL communicator.
        allowed: networks outside of which host links dial nobody; NCCL finds its ways itself.

    Raises ValueError for an unknown kind, for one that this machine lacks, a bad host, or no memory.
    """
    if kind not in KINDS:
        raise ValueError(f"link is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind == "nccl" or (kind == "auto" and _has_cuda()):
        from p2pkv.links.nccl import cuda_links

        return cuda_links(staging_bytes, device=device, channels=nccl_channels)
    from p2pkv.links.host import HostLinks

    return HostLinks(host, staging_bytes, shared_memory, allowed)


def _has_cuda() -> bool:
    return torch.cuda.is_available()


__all__ = [
    "KINDS",
    "Inbound",
    "LinkError",
    "LinkFactory",
    "Outbound",
    "Receive",
    "Send",
    "make_factory",
]
