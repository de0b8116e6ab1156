"""vLLM's MooncakeConnector on a machine without a GPU, for side_by_side.py alone.

The connector asks torch for the current accelerator, and torch raises where there is none. The CPU's
platform takes any device number, so that 0 is as good an answer as another. Nothing else is changed.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0

__all__ = ["MooncakeConnector"]
