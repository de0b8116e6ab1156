"""What the two ends of an NCCL link tell each other through the control plane."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from p2pkv.links.base import LinkError
from p2pkv.links.blobs import Nonce
from p2pkv.links.nccl_api import UNIQUE_ID_BYTES, version_name

UniqueId = Annotated[bytes, Meta(min_length=UNIQUE_ID_BYTES, max_length=UNIQUE_ID_BYTES)]
Version = Annotated[int, Meta(ge=1, lt=1 << 31)]


class Invitation(Struct, frozen=True, forbid_unknown_fields=True):
    """P's first word: the communicator's name, P's NCCL, and a random tag that the answer repeats."""

    kind: Literal["nccl"]
    version: Literal[1]
    tag: Nonce
    nccl: Version
    unique_id: UniqueId


class Acceptance(Struct, frozen=True, forbid_unknown_fields=True):
    """D's answer: `answers` is the invitation's tag."""

    kind: Literal["nccl"]
    version: Literal[1]
    answers: Nonce
    nccl: Version


def check_versions(mine: int, theirs: int) -> None:
    """Raises LinkError unless both ends load the very same NCCL; others may hang instead of failing."""
    if mine != theirs:
        raise LinkError(
            f"this rank has NCCL {version_name(mine)} and its peer NCCL {version_name(theirs)}: both must be "
            "the same; install the same nvidia-nccl package on both sides (see `p2pkv doctor`)"
        )
