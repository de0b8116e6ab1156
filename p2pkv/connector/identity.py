"""What P and D must agree on: the weights, whatever their path; a request's pair, key and prompt digest."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
import xxhash
from vllm import envs

from p2pkv.config import ConfigError, InstanceRole, Role
from p2pkv.control.warm_up_prompts import REQUEST_MARK
from p2pkv.log import RateLimit
from p2pkv.pairing import Address, PairingError, find_pair, transfer_key

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

log = logging.getLogger("p2pkv")

_unread = RateLimit(seconds=600.0)
"""Limits the warnings about each adapter's path that cannot be read."""

ENDS_BYTES = 1 << 16
"""Bytes hashed at both ends of each weight file."""

SAMPLE_BYTES = 1 << 12
"""Bytes hashed of each sample between them."""

SAMPLES = 512
"""Places looked at in a file of which we do not know where its tensors lie."""

MAX_HEADER_BYTES = 1 << 27
"""A longer header is none of safetensors'."""

SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")

FILE_FORMATS = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt"),
        *("runai_streamer", "runai_streamer_sharded", "sharded_state", "bitsandbytes", "gguf"),
    }
)
"""vLLM's load formats that read files with these suffixes, where the model is."""

MACHINES_SETTINGS = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "max_model_len"}
)
"""Settings that may differ between P and D: where a model came from, and (MiniMax M2) the longest request."""

DRAFTERS_SETTINGS = frozenset(
    {
        *("max_position_embeddings", "num_lookahead_tokens", "dspark_draft_topk", "xpress_topc"),
        *("draft_vocab_size", "image_token_index", "layer_types", "no_rope_layers", "target_layer_count"),
    }
)
"""Settings of a drafter that do not count: what vLLM derives from --max-model-len and --speculative-config,
and what its classes write, in the last pipeline stage only, which alone has a drafter."""

Stamps = tuple[tuple[str, int, int], ...]
"""For each file: its path, the time of its last change in nanoseconds, its bytes."""

ADAPTER_FILES = ("adapter_config", "adapter_model")
"""The files that vLLM reads of an adapter's folder, without suffixes; a training leaves others there."""


def fingerprint(config: VllmConfig, name: str = "") -> str:
    """24 hex digits over the sizes and sampled bytes of the weight files, of every tensor of safetensors, and
    the model's configuration as vLLM has built it. `name`: the option weights_name.

    Other training changes all of a tensor, so it is seen whichever tensors it has changed. A few bytes that
    differ, as on a bad disk, are seen only where they are looked at: reading all of a large model from a
    network's disk would take minutes at each start. Raises ConfigError for want of both files and a name.
    """
    lora, adapters = config.lora_config, ""
    if lora is not None and (lora.target_modules is not None or lora.enable_tower_connector_lora):
        adapters = f"adapters {sorted(lora.target_modules or ())} {lora.enable_tower_connector_lora}"
    return _fingerprint(config.model_config, config.load_config, name, adapters=adapters)


def drafter_of(config: VllmConfig, name: str = "") -> str:
    """What P and D must have alike of a drafter that keeps KV (EAGLE, MTP, a draft model); "" without one.

    Its KV is of no use to another drafter; Gemma 4's MTP keeps none, and reads the model's. Where each module
    of several reads one token further than the one before it, the number of tokens decides which of them run.
    Raises ConfigError as `fingerprint` does.
    """
    drafting = config.speculative_config
    if drafting is None or not drafting.uses_draft_kv_cache() or drafting.use_gemma4_mtp():
        return ""
    draft = drafting.draft_model_config
    weights = ""
    if draft is not None and draft.model != config.model_config.model:
        load = drafting.draft_load_config or config.load_config
        weights = f" {_fingerprint(draft, load, name, DRAFTERS_SETTINGS)}"
    tokens = f" of {drafting.num_speculative_tokens} tokens" if drafting.use_multi_module_mtp() else ""
    return f"{drafting.method}{weights}{tokens}"


def _fingerprint(
    model: ModelConfig, load: LoadConfig, name: str, apart: frozenset[str] = frozenset(), adapters: str = ""
) -> str:
    """`apart`: names of settings that do not count; `adapters`: to what the model applies them."""
    digest = hashlib.blake2b(digest_size=12)
    quantized = f"{model.quantization} {getattr(model, 'quantization_config', None)}"
    if model.quantization == "humming":  # its configuration is in the environment
        how = envs.VLLM_HUMMING_ONLINE_QUANT_CONFIG, envs.VLLM_HUMMING_INPUT_QUANT_CONFIG
        quantized += json.dumps(how, sort_keys=True)
    classes = sorted(model.model_class_overrides.items())
    digest.update(f"{model.dtype} {quantized} {classes} {_by_length(model)}{adapters}".encode())
    for settings in (model.hf_config, model.hf_text_config):
        kept = _without(settings.to_dict(), apart | MACHINES_SETTINGS)
        digest.update(json.dumps(kept, sort_keys=True, default=lambda value: type(value).__name__).encode())
    if name:
        digest.update(f"weights_name {name}".encode())
    for file in () if name else _weight_files(model, load):
        _sample(digest, file)
    return digest.hexdigest()


def _weight_files(model: ModelConfig, load: LoadConfig) -> list[Path]:
    """The files that vLLM loads the weights from. Raises ConfigError if they are not to be found here."""
    source, kind = source_of_weights(model), str(load.load_format)
    if files := weight_files(source, model.revision, kind, load.download_dir):
        return files
    if kind in FILE_FORMATS:
        reason = f"there are no {', '.join(SUFFIXES)} files of {source} on this machine"
    else:
        reason = f"vLLM does not read the weights of {source} from files of its own (load format {kind})"
    raise ConfigError(
        f"{reason}: P and D must have the same weights, and p2pkv cannot compare these; give them a name "
        "with weights_name in kv_connector_extra_config, the same name on all instances with these "
        "weights and on no other"
    )


def source_of_weights(model: ModelConfig) -> str:
    """The folder, file or repository of the weights, which may not be that of the configuration."""
    return str(getattr(model, "model_weights", "") or model.model)


def weight_files(source: str, revision: str | None, kind: str, cache: str | None) -> list[Path]:
    """What vLLM reads on this machine with the load format `kind`; [] if it reads no files here. `cache`:
    where vLLM downloads to; None: where Hugging Face does."""
    if kind not in FILE_FORMATS:
        return []
    one = Path(source)
    return [one] if one.is_file() else _files_read(_folder(source, revision, cache), kind)


def _files_read(folder: Path | None, kind: str) -> list[Path]:
    """Of weights in several forms vLLM reads one, and downloads no other."""
    suffixes = {"npcache": (".bin",), "pt": (".pt",), "gguf": (".gguf",)}.get(kind, SUFFIXES)
    files = next(filter(None, (_files(folder, (suffix,)) for suffix in suffixes)), [])
    mistrals = [file for file in files if file.name.startswith("consolidated")]
    if mistrals and kind in ("auto", "mistral"):
        return mistrals
    if folder is None or not (index := folder / "model.safetensors.index.json").is_file():
        return files
    named = json.loads(index.read_bytes())["weight_map"].values()
    return [file for file in files if file.name in named] or files


def weights_in_files(files: Iterable[Path]) -> str:
    """24 hex digits over weight files as they are now."""
    digest = hashlib.blake2b(digest_size=12)
    for file in files:
        _sample(digest, file)
    return digest.hexdigest()


def adapter_fingerprint(adapter: LoRARequest) -> str:
    """An adapter's fingerprint: 24 hex digits, or "" if its files are not on this machine or cannot be read.

    vLLM reads the files once for each number that it gives an adapter; with `load_inplace` again for each
    step. So the files are read here once, and with `load_inplace` whenever they have changed.
    """
    path = os.path.expanduser(adapter.lora_path)
    try:
        changed = stamps(_adapter_files(path)) if getattr(adapter, "load_inplace", False) else ()
        return _adapter_digest(path, adapter.lora_int_id, changed)
    except OSError as error:
        if _unread.admits(path):
            log.warning(
                "an adapter is distinguished from others by its name alone, since "
                f"{path} cannot be read: {error}"
            )
        return ""


@lru_cache(maxsize=256)
def _adapter_digest(path: str, number: int, changed: Stamps) -> str:
    """`number`, `changed`: tell apart adapters that lay in one folder. Raises OSError, which is not kept."""
    return weights_in_files(_adapter_files(path))


def _adapter_files(path: str) -> list[Path]:
    """Raises OSError, also if there are none."""
    files = _files(_folder(path, None, None), (*SUFFIXES, ".json"))
    if not (files := [file for file in files if file.stem in ADAPTER_FILES]):
        raise FileNotFoundError("there are no files of an adapter on this machine")
    return files


def stamps(files: Iterable[Path]) -> Stamps:
    found = [(file, file.stat()) for file in files]
    return tuple((str(file), state.st_mtime_ns, state.st_size) for file, state in found)


def _files(folder: Path | None, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes) if folder else []


def _sample(digest: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as data:
        digest.update(data.read(ENDS_BYTES))
        data.seek(max(0, size - ENDS_BYTES))
        digest.update(data.read(ENDS_BYTES))
        for offset in _offsets(data, file, size):
            data.seek(offset)
            digest.update(data.read(SAMPLE_BYTES))


def _offsets(data: BinaryIO, file: Path, size: int) -> list[int]:
    """Where to look between the ends of a file: in the middle and at the end of every tensor, in order."""
    if file.suffix == ".safetensors" and (tensors := _tensors(data, size)):
        return [
            at for start, stop in tensors for at in ((start + stop) // 2, max(start, stop - SAMPLE_BYTES))
        ]
    return [size * number // SAMPLES for number in range(SAMPLES)] if size > 2 * ENDS_BYTES else []


def _tensors(data: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Where the tensors of a safetensors file lie in it; empty if it is not one."""
    data.seek(0)
    length = int.from_bytes(data.read(8), "little")
    if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
        return []
    try:
        header = json.loads(data.read(length))
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        found = sorted((8 + length + int(start), 8 + length + int(stop)) for start, stop in spans)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return found if all(0 <= start <= stop <= size for start, stop in found) else []


def _without(value: Any, apart: frozenset[str]) -> Any:
    """Settings without those in `apart`, and without None: each version of transformers adds some."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in apart and each is not None}
        return {str(key): _without(each, apart) for key, each in kept.items()}
    return [_without(each, apart) for each in value] if isinstance(value, list | tuple) else value


def _by_length(model: ModelConfig) -> str:
    """What --max-model-len has decided about KV: longrope's factors, and Llama 4's attention temperature.
    With `auto`, vLLM has built the model for its longest context, before it has found out what fits."""
    auto = model.original_max_model_len == -1
    longest = model.get_and_verify_max_len(-1) if auto else model.max_model_len
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    longropes = [each for each in ropes if each.get("rope_type") == "longrope"]
    starts = [each["original_max_position_embeddings"] for each in longropes]
    temperature: object = None
    if getattr(model.hf_text_config, "model_type", "") == "llama4_text":
        # By the rule of vLLM's `Llama4ForCausalLM`.
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        temperature = generation.get("attn_temperature_tuning", longest > 32768)
    return f"{[longest > start for start in starts]} {temperature}"


def _folder(model: str, revision: str | None, cache: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


@dataclass(frozen=True)
class Paired:
    """A request that names a P and a D. `side`: which of them this instance is. A router that knows no
    data-parallel ranks may name another engine of this instance than the one that has the request."""

    key: str
    prefill: Address
    decode: Address
    side: Role


class Pairs:
    """Finds the pair in request ids, and warns once of each way in which there is none.

    `mine` is the address that this engine advertises, `role` which half of a pair it may be, `ours` whether
    an address is an engine's of this instance.
    """

    def __init__(
        self, mine: Address, role: InstanceRole, ours: Callable[[Address], bool] | None = None
    ) -> None:
        self.mine = mine
        self.ours = ours or mine.__eq__
        self._role = role
        self._warned: set[str] = set()

    def of(self, request: Request) -> Paired | None:
        """The pair, or None for a request that this instance serves by itself."""
        params = request.kv_transfer_params
        transfer_id = params.get("transfer_id") if isinstance(params, dict) else None
        try:
            pair = find_pair(request.request_id)
            if pair is None:
                if REQUEST_MARK not in request.request_id and self._role != "both":
                    self._warn(
                        "none", "a request has no P and D in its id: it is served here, alone (logged once)"
                    )
                return None
            key = transfer_key(request.request_id, transfer_id if isinstance(transfer_id, str) else None)
        except PairingError as error:
            self._warn("malformed", f"{error}; the request is served here, alone")
            return None
        halves: dict[Role, Address] = {"P": pair.prefill, "D": pair.decode}
        if self._role != "both":
            halves = {self._role: halves[self._role]}
        mine = [side for side, address in halves.items() if address == self.mine]
        mine = mine or [side for side, address in halves.items() if self.ours(address)]
        if not mine:
            named = " and ".join(f"{address} as its {side}" for side, address in halves.items())
            self._warn(
                f"other {named}",
                f"a request names {named}, but this instance is {self.mine}: "
                "it is served here, alone; check the router's addresses",
            )
            return None
        if len(mine) == 2 and pair.prefill == pair.decode:
            return None  # nothing moves
        # Of two: an instance behind ours on this host may look like engines of ours.
        side = min(mine, key=lambda side: halves[side].port)
        return Paired(key, pair.prefill, pair.decode, side)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned and len(self._warned) < 100:
            self._warned.add(kind)
            log.warning("%s", text)


def prompt_digest(request: Request, without: int = 0) -> bytes:
    """16 bytes over everything that the KV of a prompt depends on, weights apart; of a prompt of token ids
    `without` so many of its last ones.

    These are the things that vLLM's own block hashes cover: token ids, multimodal inputs and their
    positions, adapter, cache salt, prompt embeddings. Multimodal inputs count by what the model is given of
    them: vLLM's identifier of an image has the path of the model in it, or is a number of the process.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(label: str, data: bytes) -> None:
        digest.update(f"{label}:{len(data)}:".encode())
        digest.update(data)

    if request.prompt_token_ids is not None:
        ids = request.prompt_token_ids[:-without] if without else request.prompt_token_ids
        add("tokens", struct.pack(f"<{len(ids)}q", *ids))  # three times as fast as numpy
    for feature in request.mm_features or ():
        position = feature.mm_position
        add("media", f"{feature.modality}@{position.offset}+{position.length}".encode())
        add("contents", _contents(feature))
    if (lora := request.lora_request) is not None:
        add("adapter", f"{lora.lora_name}@{adapter_fingerprint(lora)}".encode())
    if request.cache_salt:
        add("salt", request.cache_salt.encode())
    if request.prompt_embeds is not None:
        add("embeds", _tensor_digest(request.prompt_embeds))
        if request.prompt_is_token_ids is not None:
            add("which are tokens", bytes(request.prompt_is_token_ids))
    return digest.digest()


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    """The digest of a tensor's type, shape and elements, at the speed of its memory and with the
    interpreter's lock released: it may have hundreds of MiB, and vLLM's loop waits."""
    data = tensor.detach().cpu().contiguous()
    elements = xxhash.xxh3_128_digest(data.reshape(-1).view(torch.uint8).numpy().data)
    return f"{data.dtype}{list(data.shape)}".encode() + elements


def _contents(feature: MultiModalFeatureSpec) -> bytes:
    """A digest of what the model is given of an image, an audio or a video. vLLM's identifier where that is
    not in this process's memory: on a device, or shared by workers (--mm-processor-cache-type shm)."""
    item: Any = feature.data
    if (known := getattr(item, "p2pkv_digest", None)) is None:
        fields = sorted((item or {}).items())
        leaves = [leaf for name, field in fields for leaf in (name, *_leaves(field.data))]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
            return str(feature.identifier).encode()
        known = _digest_of(leaves)
        item.p2pkv_digest = known  # vLLM's cache gives the same item to later requests
    return bytes(known)


def _leaves(data: Any) -> Iterator[Any]:
    """The values in nested lists, each list with its length before them."""
    if isinstance(data, list | tuple):
        yield len(data)
        for each in data:
            yield from _leaves(each)
    else:
        yield torch.as_tensor(data) if isinstance(data, np.ndarray) else data


def _digest_of(leaves: Iterable[Any]) -> bytes:
    digest = xxhash.xxh3_128()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(_tensor_digest(leaf))
        else:
            digest.update(f"{type(leaf).__name__} {leaf!r}:".encode())
    return digest.digest()
