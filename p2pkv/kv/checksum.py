"""The checksum of a staged message: P computes it behind the gather, and D before it believes the bytes.

There are two algorithms, each the fast one of its device. A CPU takes XXH3. CUDA takes the *fold*: each word
of 8 bytes is mixed with its index, and all of them are added up modulo 2**64, so the order of the threads
does not matter. The mixing is invertible, so a change within one word always changes the sum. Both
algorithms find accidents. Neither is safe against bytes that were chosen.
"""

from dataclasses import dataclass

import torch

XXH3 = "xxh3-64"
FOLD = "fold-64"

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31


@dataclass(frozen=True, slots=True)
class Known:
    """A checksum that has been computed: `value` may be read at once."""

    digest: bytes
    known: bool = True

    def value(self) -> bytes:
        return self.digest


class Queued:
    """A sum, int64 [1], that a device may still be computing: its copy to the host is queued behind it. Wait
    for a fence recorded after the call that made this before `value` is read."""

    known = False

    def __init__(self, total: torch.Tensor, host: torch.Tensor | None = None) -> None:
        """`host`: int64 [1] to copy it to, pinned; None: memory is taken for it."""
        made = torch.empty(1, dtype=torch.int64, pin_memory=total.is_cuda) if host is None else host
        self._host = made.copy_(total, non_blocking=True)

    def value(self) -> bytes:
        return (int(self._host) & _MASK).to_bytes(8, "big")


Checksum = Known | Queued
"""The checksum of one buffer; its `value` is 8 bytes."""


def digest_on_host(buffer: torch.Tensor) -> Checksum:
    """XXH3 of uint8 [n] on a CPU; a large one with the interpreter's lock released."""
    import xxhash  # here, since a rank on a GPU does without

    return Known(xxhash.xxh3_64_digest(buffer.numpy().data))


def digest_by_torch(buffer: torch.Tensor) -> Checksum:
    """The fold of uint8 [n], queued on the current stream in some ten operations; used without the kernel.
    Int64 wraps, as the kernel's unsigned words do."""
    count = -(-buffer.numel() // 8)
    padded = torch.zeros(8 * count, dtype=torch.uint8, device=buffer.device)
    padded[: buffer.numel()] = buffer
    words = padded.view(torch.int64)
    words ^= torch.arange(1, count + 1, device=buffer.device) * _signed(_STEP)
    for shift, factor in _MIX:
        words ^= _shifted(words, shift)
        words *= _signed(factor)
    words ^= _shifted(words, _LAST)
    return Queued(words.sum().reshape(1))


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Unsigned: torch's own shift fills up with the sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
