"""Other people's routers as processes, for tests."""

import os
import sys
from pathlib import Path

import pytest
from environments import Unavailable, environment

from p2pkv.demo.processes import ServerProcess, free_ports
from p2pkv.demo.servers import LOOPBACK
from support import classic_router

VLLM_ROUTER = "vllm-router==0.1.17"
MODES = {"default": (), "moriio-write": ("--kv-connector", "moriio")}
"""What makes vllm-router ask P first and then D, and what makes it ask both at once."""
ROUTERS = ("original", *MODES)
"""The stand-in for the original connector's example proxy, and vllm-router's modes."""


class RouterProcess(ServerProcess):
    """A router on 127.0.0.1 that instances find by their pings; healthy when it knows a P and a D.

    Args:
        options: DISCOVERY in them stands for the address to which instances send their pings, `discovery`.
    """

    def __init__(
        self, name: str, program: list[str], options: list[str], logs: Path, discovery: tuple[str, int]
    ) -> None:
        port = free_ports()
        self.base_url = f"http://{LOOPBACK}:{port}"
        command = [*program, "--host", LOOPBACK, "--port", str(port)]
        command += [each.replace("DISCOVERY", "{}:{}".format(*discovery)) for each in options]
        super().__init__(
            name,
            command,
            health_url=f"{self.base_url}/health",
            log_path=logs / f"{name}.log",
            env=dict(os.environ),
        )


def router(name: str, config: pytest.Config, logs: Path, discovery: tuple[str, int]) -> RouterProcess:
    """One of ROUTERS. Skips the test, with the reason, where vllm-router cannot be had."""
    if name == "original":
        program = [sys.executable, classic_router.__file__]
        return RouterProcess("classic-router", program, ["--discovery", "DISCOVERY"], logs, discovery)
    try:
        made = environment(config.cache.mkdir("environments"), VLLM_ROUTER)
    except Unavailable as error:
        pytest.skip(str(error))
    options = ["--vllm-pd-disaggregation", "--vllm-discovery-address", "DISCOVERY"]
    options += ["--policy", "round_robin", "--prometheus-port", str(free_ports()), *MODES[name]]
    program = [str(made / "bin" / "vllm-router")]
    return RouterProcess(f"vllm-router-{name}", program, options, logs, discovery)
