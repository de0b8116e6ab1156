"""Which requests are the same: transfer keys, pairs and prompt digests of vLLM's requests."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from p2pkv.connector.weights import adapter_fingerprint
from p2pkv.control.warm_up import REQUEST_MARK
from p2pkv.pairing import Address, PairingError, find_pair, transfer_key

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("p2pkv")


@dataclass(frozen=True)
class Paired:
    """A request that names a P and a D."""

    key: str
    child: int
    prefill: Address
    decode: Address


class Pairs:
    """Finds the pair in request ids, and warns once of each way in which there is none.

    `mine` is the address that this instance advertises, `side` which half of a pair it must be.
    """

    def __init__(self, mine: Address, side: str) -> None:
        self._mine = mine
        self._side = side
        self._warned: set[str] = set()

    def of(self, request: Request) -> Paired | None:
        """The pair, or None for a request that this instance serves by itself."""
        params = request.kv_transfer_params
        transfer_id = params.get("transfer_id") if isinstance(params, dict) else None
        try:
            pair = find_pair(request.request_id)
            if pair is None:
                if REQUEST_MARK not in request.request_id:
                    self._warn(
                        "none", "a request names no pair of P and D in its id; it is served here, alone"
                    )
                return None
            named = transfer_key(request.request_id, transfer_id if isinstance(transfer_id, str) else None)
        except PairingError as error:
            self._warn("malformed", f"{error}; the request is served here, alone")
            return None
        here = pair.prefill if self._side == "P" else pair.decode
        if here != self._mine:
            self._warn(
                f"other {here}",
                f"a request names {here} as its {self._side}, but this instance is {self._mine}: "
                "it is served here, alone; check the router's addresses",
            )
            return None
        return Paired(named.key, named.child, pair.prefill, pair.decode)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned and len(self._warned) < 100:
            self._warned.add(kind)
            log.warning("%s", text)


def prompt_digest(request: Request) -> bytes:
    """16 bytes over everything that the KV of a prompt depends on, weights apart.

    These are the things that vLLM's own block hashes cover: token ids, multimodal inputs and their
    places, adapter, cache salt, prompt embeddings.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(label: str, data: bytes) -> None:
        digest.update(f"{label}:{len(data)}:".encode())
        digest.update(data)

    if request.prompt_token_ids is not None:
        add("tokens", np.asarray(request.prompt_token_ids, dtype="<i8").tobytes())
    for feature in request.mm_features or ():
        place = feature.mm_position
        add("media", f"{feature.identifier}@{place.offset}+{place.length}".encode())
    if request.lora_request is not None:
        lora = request.lora_request
        files = adapter_fingerprint(lora.lora_path, lora.lora_int_id)
        add("adapter", f"{lora.lora_name}@{files}".encode())
    if request.cache_salt:
        add("salt", request.cache_salt.encode())
    if request.prompt_embeds is not None:
        add("embeds", request.prompt_embeds.detach().float().cpu().numpy().tobytes())
    return digest.digest()
