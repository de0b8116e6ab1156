"""Paged KV memory of one rank: where the rows of KV lie, and how they get to and from the wire.

numpy and torch only; nothing here knows vLLM, the protocol or a link.
"""

from __future__ import annotations

from p2pkv.kv.cache import PagedCache
from p2pkv.kv.codecs import DENSE, cpu_codec
from p2pkv.kv.device import PASSED, Fence, make_recorder, own_stream

__all__ = ["DENSE", "PASSED", "Fence", "PagedCache", "cpu_codec", "make_recorder", "own_stream"]
