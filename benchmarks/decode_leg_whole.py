"""P2pKvConnector whose P pushes a prompt when all of it is computed: the baseline of pushing layer by layer.

Loaded by a P of decode_leg.py through `kv_connector_module_path`.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from p2pkv.connector import P2pKvConnector
from p2pkv.engine import commands as do
from p2pkv.engine.thread import Rank


class WholeRequestConnector(P2pKvConnector):
    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self.worker is not None
        hold_back(self.worker.rank, len(set(self._worker._indices.values())))


def hold_back(rank: Rank, layers: int) -> None:
    """Let `rank` hear of a prompt's KV only from the sweep over all layers after its last tokens."""
    hand_over, tokens = rank.do, dict[str, float]()

    def do_(command: do.Command) -> None:
        if isinstance(command, do.OfferPrompt):
            tokens[command.key] = command.tokens
        elif isinstance(command, do.Forget):
            tokens.pop(command.key, None)
        elif isinstance(command, do.Computed):
            swept = command.layer == 0 and command.layer_stop == layers
            whole = tuple((key, stop) for key, stop in command.prompts if stop >= tokens.get(key, inf))
            if not (swept and whole):
                return
            command = replace(command, prompts=whole)
        hand_over(command)

    rank.do = do_  # type: ignore[method-assign]
