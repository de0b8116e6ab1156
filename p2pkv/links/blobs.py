"""What the two ends of a host link tell each other through the control plane: checked, bounded, no pickle."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from p2pkv.links.base import LinkError

MAX_BLOB_BYTES = 4096
NONCE_BYTES = 16

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Text = Annotated[str, Meta(max_length=64)]


class Place(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a process runs, as far as sharing memory goes: which boot of which host, which pid namespace."""

    boot: Text
    pids: Number


class Invitation(Struct, frozen=True, forbid_unknown_fields=True):
    """P's first word: `nonce` is random; `place` is None if P does not want to share memory."""

    kind: Literal["host"]
    version: Literal[1]
    nonce: Nonce
    place: Place | None


class SharedArena(Struct, frozen=True, forbid_unknown_fields=True):
    """An arena that P may open as /proc/`pid`/fd/`fd`; `inode` tells it from any other file."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    fd: Annotated[int, Meta(ge=0, lt=1 << 31)]
    inode: Number


class Acceptance(Struct, frozen=True, forbid_unknown_fields=True):
    """D's answer: `answers` repeats the invitation's nonce; `host` is numeric; `window` is in bytes;
    `place` is None where the system cannot tell it."""

    kind: Literal["host"]
    version: Literal[1]
    answers: Nonce
    nonce: Nonce
    window: Annotated[int, Meta(ge=1, le=1 << 44)]
    place: Place | None
    shared: SharedArena | None
    host: Text
    port: Port


_Blob = TypeVar("_Blob", bound=Struct)


def encode(blob: Struct) -> bytes:
    """The blob's bytes (msgpack)."""
    return msgspec.msgpack.encode(blob)


def decode(blob: bytes, kind: type[_Blob], link: str = "host") -> _Blob:
    """The `kind` of blob in `blob`, for links of kind `link`.

    Raises LinkError, and nothing else, for whatever is not one.
    """
    name = kind.__name__.lower()
    if len(blob) > MAX_BLOB_BYTES:
        raise LinkError(f"the link {name} has {len(blob)} bytes; at most {MAX_BLOB_BYTES} are expected")
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise LinkError(
            f"not a link {name} of kind {link} ({error}); both sides need the same `link` setting and p2pkv "
            "version"
        ) from None


@functools.cache
def here() -> Place | None:
    """This process's place, or None where the system cannot tell it (no Linux, no /proc)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return Place(boot=boot[:64], pids=os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return None
