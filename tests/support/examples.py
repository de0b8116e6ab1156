"""What examples/ start, as p2pkv reads it."""

import json
from pathlib import Path

from p2pkv.config import Options

EXAMPLES = Path(__file__).parents[2] / "examples"


def option(command: list[str], name: str) -> str:
    """The value of an option in either spelling, `--name value` or `--name=value`."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word.partition("=")[0] == name:
            return word.partition("=")[2] or following
    raise AssertionError(f"{name} is not in {command}")


def options_of(command: list[str], has_gpu: bool, environ: dict[str, str] | None = None) -> Options:
    """What p2pkv reads in a command that starts vLLM."""
    transfer = json.loads(option(command, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "P2pKvConnector"
    return Options.from_extra(
        transfer["kv_connector_extra_config"],
        role=transfer["kv_role"],
        kv_port=transfer["kv_port"],
        default_host="127.0.0.1",
        has_gpu=has_gpu,
        environ=environ or {},
    )
