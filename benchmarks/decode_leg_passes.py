"""P2pKvConnector that also counts the scheduler's passes in which nothing is computed.

Loaded by the D of decode_leg.py through `kv_connector_module_path`. The count is the first eight bytes
of the file that `$P2PKV_PASSES` names, as an unsigned little-endian number.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from p2pkv.connector import P2pKvConnector


class CountingConnector(P2pKvConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file = os.open(os.environ["P2PKV_PASSES"], os.O_WRONLY | os.O_CREAT, 0o600)
        self._passes = 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            self._passes += 1
            os.pwrite(self._file, struct.pack("<Q", self._passes), 0)
        return super().build_connector_meta(scheduler_output)
