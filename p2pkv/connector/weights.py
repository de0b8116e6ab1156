"""Which weights an instance serves: equal for copies of a model or adapter, whatever their path or name."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

log = logging.getLogger("p2pkv")

SAMPLE_BYTES = 1 << 16
"""Bytes hashed at both ends of each weight file."""

SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def fingerprint(config: VllmConfig) -> str:
    """24 hex digits over the sizes and sampled bytes of the weight files.

    Without files (weights that are random, or not on this machine) the model's configuration stands
    in for them.
    """
    model, dummy = config.model_config, str(config.load_config.load_format) == "dummy"
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{model.dtype} {model.quantization} {dummy}".encode())
    files = [] if dummy else _files(_folder(str(model.model), model.revision))
    for file in files:
        _sample(digest, file)
    if not files:
        digest.update(f"{model.seed if dummy else ''} {_settings(model)}".encode())
        log.info("no weight files for %s: peers are told apart by the model's configuration", model.model)
    return digest.hexdigest()


@lru_cache(maxsize=256)
def adapter_fingerprint(path: str, number: int) -> str:
    """The same for an adapter: 24 hex digits, or "" if its files are not on this machine.

    `number` is vLLM's own of this adapter, and new when another one is loaded from the same path.
    """
    files = _files(_folder(path, None), (*SUFFIXES, ".json"))
    digest = hashlib.blake2b(digest_size=12)
    for file in files:
        _sample(digest, file)
    return digest.hexdigest() if files else ""


def _files(folder: Path | None, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes) if folder else []


def _sample(digest: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as data:
        digest.update(data.read(SAMPLE_BYTES))
        data.seek(max(0, size - SAMPLE_BYTES))
        digest.update(data.read(SAMPLE_BYTES))


def _settings(model: ModelConfig) -> str:
    """The model's configuration without what depends on the machine."""
    settings = json.loads(model.hf_config.to_json_string())
    for name in ("_name_or_path", "transformers_version"):
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True)


def _folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
