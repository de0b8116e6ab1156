"""Paged KV memory of one rank: where the rows of KV lie, and how they get to and from the wire.

Importing it needs numpy and torch; xxhash (CPU) and CuPy (CUDA) are imported where they are used. Nothing
here knows vLLM, the protocol or a link.
"""

from p2pkv.kv.cache import PagedCache, RankCache
from p2pkv.page_packings import DENSE, cpu_codec

__all__ = ["DENSE", "PagedCache", "RankCache", "cpu_codec"]
