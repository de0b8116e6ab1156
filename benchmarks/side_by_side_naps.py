"""vLLM's other connectors with p2pkv's naps in the place of vLLM's spinning, for side_by_side.py alone.

The naps help any connector whose requests wait. These classes say which steps are idle, as p2pkv's own does;
their idle steps do not wait for news.
"""

from __future__ import annotations

from typing import Any

from side_by_side_mooncake import MooncakeConnector as Mooncake
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector as Example

from p2pkv.connector.vllm_patches import SPIN_WAIT


class _Naps:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        SPIN_WAIT.install()

    def register_kv_caches(self, *args: Any, **kwargs: Any) -> Any:
        SPIN_WAIT.worker = True
        return super().register_kv_caches(*args, **kwargs)  # type: ignore[misc]

    def build_connector_meta(self, output: Any) -> Any:
        SPIN_WAIT.idle = output.total_num_scheduled_tokens == 0
        return super().build_connector_meta(output)  # type: ignore[misc]

    def bind_connector_metadata(self, metadata: Any) -> Any:
        SPIN_WAIT.idle = True  # until a layer is computed
        return super().bind_connector_metadata(metadata)  # type: ignore[misc]

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> Any:
        SPIN_WAIT.idle = False
        return super().save_kv_layer(*args, **kwargs)  # type: ignore[misc]


class ExampleConnector(_Naps, Example): ...


class MooncakeConnector(_Naps, Mooncake): ...


def __getattr__(name: str) -> Any:
    """NIXL's connectors, which only an environment with NIXL can load."""
    if name not in ("NixlConnector", "NixlPushConnector"):
        raise AttributeError(name)
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

    return type(name, (_Naps, getattr(nixl, name)), {"__module__": __name__})
