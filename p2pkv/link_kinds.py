"""The kinds of links between a rank of P and a rank of D.

A new kind is one file of its name in `p2pkv/links` with a function `make_links`, and an entry in `KINDS`: the
option `link` and its documentation, `p2pkv doctor`, `p2pkv bench` and the links' contract tests read it from
here, and the handshake compares `LinkFactory.kind`.
"""

from dataclasses import dataclass
from typing import Literal

AUTO = "auto"


@dataclass(frozen=True)
class LinkKind:
    """One kind, named as the option `link` has it; `between`: what it connects, for docs/options.md.

    `memory`: where the KV lies that it moves. `p2pkv.links.<name>` has `make_links(LinkSettings) ->
    LinkFactory`, which raises ValueError where this machine cannot have such links. It is imported when used.
    """

    name: str
    memory: Literal["cpu", "cuda"]
    between: str


_BETWEEN_PROCESSES = "between two processes on one GPU, or on GPUs of one host that reach each other's memory"

KINDS = {
    kind.name: kind
    for kind in (
        LinkKind("host", "cpu", "where the KV cache is in CPU memory (shared memory or TCP)"),
        LinkKind("nccl", "cuda", "between GPUs"),
        LinkKind("ipc", "cuda", _BETWEEN_PROCESSES),
    )
}
"""By name. `auto` is the first whose memory is that of the machine's KV cache."""

NAMES = (AUTO, *KINDS)
"""What the option `link` may be."""


def kind_of(name: str, has_gpu: bool) -> LinkKind:
    """The kind with this name; for `auto`, the one for KV on a GPU or in CPU memory. Raises ValueError for an
    unknown name, and for a kind that needs a GPU where there is none."""
    memory = "cuda" if has_gpu else "cpu"
    if name == AUTO:
        return next(kind for kind in KINDS.values() if kind.memory == memory)
    if name not in KINDS:
        raise ValueError(f"link is {name!r}; it must be one of {', '.join(NAMES)}")
    kind = KINDS[name]
    if kind.memory == "cuda" and not has_gpu:
        raise ValueError(
            f"link is {name!r}, which needs a CUDA device, and there is none; use {_others('cpu')}"
        )
    return kind


def _others(memory: str) -> str:
    fitting = [kind.name for kind in KINDS.values() if kind.memory == memory]
    return " or ".join(repr(name) for name in (AUTO, *fitting))


def refuse_other_memory(name: str, has_gpu: bool) -> None:
    """Raises ValueError for a kind that does not move KV where that of this instance lies."""
    kind = kind_of(name, has_gpu)
    if kind.memory == "cpu" and has_gpu:
        raise ValueError(
            f"link is {name!r}, which moves KV that is in CPU memory, and here it is on a CUDA device; use "
            f"{_others('cuda')}"
        )
