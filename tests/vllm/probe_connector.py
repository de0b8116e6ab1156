"""P2pKvConnector that also writes down what the pages hold, token by token, on P and on D.

Loaded by real vLLM servers through `kv_connector_module_path`. For each transfer it appends one JSON
line to `$P2PKV_PROBE_DIR/P.<rank's address>.jsonl` when P's request has ended, or to `D.<address>.jsonl`
when D's load has: the key, the rank, the first token, and for each KV group, layer and head of this rank one
short hash per token, over that token's K and V. tests/support/servers/probes.py reads them.

Of rows that stand for several tokens each of their tokens has the row's hash.

`$P2PKV_PROBE_HOLD` names a file: while it exists, P's forward stops at the layer that the file names, in
a step that works on as many prompts as it names (`<layer> <prompts>`), so that a test can kill a P in
the middle of a push. The file `<name>.held` appears when it has stopped.

With `$P2PKV_PROBE_POISON` set, D fills every block that a load is given with bytes that are NaN in each type
of numbers, before the load begins: an answer shows whether D reads what was not sent.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from p2pkv.connector import P2pKvConnector
from p2pkv.engine.commands import Blocks, Event, Loaded
from p2pkv.kv.cache import PagedCache
from p2pkv.page_packings import DENSE, packing_of
from p2pkv.protocol.handshake import RowFormat, shapes
from p2pkv.protocol.messages import KvGroup
from p2pkv.sharding import Shape


class ProbeConnector(P2pKvConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder = Path(os.environ["P2PKV_PROBE_DIR"])
        self._hold = Path(os.environ.get("P2PKV_PROBE_HOLD", "/nonexistent"))
        self._prompts: dict[str, tuple[Blocks, int]] = {}
        self._asked: dict[str, tuple[Blocks, int, int]] = {}
        self._poisons = bool(os.environ.get("P2PKV_PROBE_POISON"))
        self._layers: dict[str, torch.Tensor] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = kv_caches
        super().register_kv_caches(kv_caches)
        rank, tell_core = self.worker.rank, self.worker._wakeup.send
        take_events, noting = rank.events, Lock()

        def note(event: Event) -> None:
            """Before vLLM knows: the request's first step overwrites its states."""
            with noting:
                if isinstance(event, Loaded) and event.key in self._asked:
                    blocks, start, stop = self._asked.pop(event.key)
                    self._write("D", event.key, blocks, start, stop)

        def note_and_tell(event: Event) -> None:
            """On the engine thread, which has put the event where the forward thread may take it already."""
            note(event)
            tell_core(event)

        def note_and_take() -> list[Event]:
            events = take_events()
            for event in events:
                note(event)
            return events

        rank.on_event = note_and_tell
        rank.events = note_and_take

    def _poison(self, blocks: Blocks, start: int) -> None:
        for group, table in zip(self._kv_cache_config.kv_cache_groups, blocks, strict=True):
            for block in set(table[start // group.kv_cache_spec.block_size :]) - {0}:
                for name in group.layer_names:
                    self._layers[name][block].view(torch.uint8).fill_(255)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        if self.worker is not None:
            for prefill in connector_metadata.prefills:
                self._prompts[prefill.blocks.key] = (prefill.blocks.blocks, prefill.stop)
            for ended in connector_metadata.sent:
                blocks, stop = self._prompts.pop(ended.key, ((), 0))
                self._write("P", ended.key, blocks, 0, stop)
            for _, load in connector_metadata.loads:
                self._asked[load.key] = (load.blocks, load.start, load.stop)
                if self._poisons and load.blocks:  # none where D has all of the prompt
                    self._poison(load.blocks, load.start)
        super().bind_connector_metadata(connector_metadata)

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, *args, **kwargs)
        under_way = self.worker._computed.prompts if self.worker is not None else ()
        if self.worker is not None and self._hold.exists() and under_way:
            layer, prompts = map(int, self._hold.read_text().split())
            if self.worker._indices.get(layer_name) == layer and len(under_way) >= prompts:
                self._hold.with_suffix(".held").touch()
                end = time.monotonic() + 60
                while self._hold.exists() and time.monotonic() < end:
                    time.sleep(0.01)

    def _write(self, side: str, key: str, blocks: Blocks, start: int, stop: int) -> None:
        if stop <= start:
            return
        context = self.worker.rank.context
        said = context.hello.cache
        note = {
            "key": key,
            "rank": context.hello.rank,
            "world": said.stages * said.tp,
            "start": start,
            "groups": [
                self._group(cache, group, shape, blocks, start, stop)
                for cache, group, shape in zip(context.cache.groups, said.groups, shapes(said), strict=True)
            ],
        }
        with (self._folder / f"{side}.{context.hello.address}.jsonl").open("a") as out:
            out.write(json.dumps(note) + "\n")

    def _group(
        self, cache: PagedCache, said: KvGroup, shape: Shape, blocks: Blocks, start: int, stop: int
    ) -> dict[str, Any]:
        """What the pages of one KV group hold of tokens [start, stop), or of those that are in its window."""
        unit = cache.unit_tokens if cache.codec == DENSE else 1
        start, stop = RowFormat(DENSE, unit, 1, said.once, said.window, said.block, said.chunked).needed(
            start, stop
        )
        first = start // cache.unit_tokens * cache.unit_tokens
        buffer = torch.empty(cache.nbytes(cache.layers, first, stop, cache.heads), dtype=torch.uint8)
        cache.gather(buffer, (0, cache.layers), (first, stop), (0, cache.heads), blocks)
        units = buffer.numel() // (cache.layers * cache.heads * cache.row_bytes)
        rows = buffer.view(cache.layers, units, cache.heads, cache.row_bytes)
        stage, rank = divmod(self.worker.rank.context.hello.rank, shape.tp)
        return {
            "start": start,
            "once": said.once,
            "unlike": not said.once and cache.row_bytes > 16,
            "tokens": unit,
            "heads": list(shape.rank_heads.ranks[rank]),
            "first_layer": shape.stage_layers.ranks[stage].start,
            "layers": [
                self._hashes(cache, said.dtype, rows[layer], start - first, stop - first)
                for layer in range(cache.layers)
            ],
        }

    def _hashes(
        self, cache: PagedCache, kind: str, rows: torch.Tensor, first: int, stop: int
    ) -> list[list[str]]:
        """By head, one hash for each of the tokens [first, stop) of one layer. rows: uint8 [unit, head,
        row_bytes]."""
        if cache.codec == DENSE or cache.unit_tokens == 1:
            tokens = rows.transpose(0, 1).repeat_interleave(cache.unit_tokens, dim=1)
        else:
            dtype = getattr(torch, kind)
            units, heads, _ = rows.shape
            bits = torch.int16 if dtype.itemsize == 2 else torch.int32
            pages = rows.view(bits).view(units, heads, -1)
            dense = pages.clone().view(units, heads, cache.unit_tokens, -1)
            packing_of(cache.codec).unpack(dense.numpy(), pages.numpy())
            tokens = dense.permute(1, 0, 2, 3).reshape(heads, units * cache.unit_tokens, -1)
        data = tokens[:, first:stop].contiguous().view(torch.uint8).numpy()
        return [[hashlib.blake2b(one.tobytes(), digest_size=6).hexdigest() for one in head] for head in data]
