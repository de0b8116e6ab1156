"""p2pkv: moves the KV cache of a prompt from a vLLM prefill instance to a decode instance, layer by layer."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("p2pkv")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"

__all__ = ["__version__"]
