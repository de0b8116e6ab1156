"""The data plane: links of several kinds behind the seam in `base`."""

from __future__ import annotations

from p2pkv.links.base import Inbound, LinkError, LinkFactory, Outbound, Receive, Send

KINDS = ("auto", "host", "nccl")


def make_factory(kind: str, *, host: str, staging_bytes: int, shared_memory: bool = True) -> LinkFactory:
    """The factory of links for one rank.

    Args:
        kind: `host`, `nccl`, or `auto`: `nccl` where torch has a CUDA device, else `host`.
        host: address or name of this machine that peers can dial.
        staging_bytes: bound on local copies of what is being sent.
        shared_memory: whether host links may share memory with ranks of the same machine.

    Raises ValueError for an unknown kind, for one that this version or machine lacks, or a bad host.
    """
    if kind not in KINDS:
        raise ValueError(f"link is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind == "nccl" or (kind == "auto" and _has_cuda()):
        raise ValueError(
            "the NCCL link is not part of this version yet; set the option `link` to `host`, which moves KV "
            "through the CPU's memory"
        )
    from p2pkv.links.host import HostLinks

    return HostLinks(host, staging_bytes, shared_memory)


def _has_cuda() -> bool:
    import torch

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
