"""p2pkv: moves the KV cache of a prompt from a vLLM prefill instance to a decode instance, layer by layer."""

from __future__ import annotations

__version__ = "0.1.0"
