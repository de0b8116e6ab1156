"""Paged KV memory of one rank: where the rows of KV lie, and how they get to and from the wire.

numpy and torch only; nothing here knows vLLM, the protocol or a link.
"""

from __future__ import annotations

from p2pkv.pages.codecs import DENSE, cpu_codec
from p2pkv.pages.device import PASSED, Fence, make_recorder, own_stream
from p2pkv.pages.geometry import PagedCache

__all__ = ["DENSE", "PASSED", "Fence", "PagedCache", "cpu_codec", "make_recorder", "own_stream"]
