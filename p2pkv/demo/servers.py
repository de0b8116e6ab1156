"""Real vLLM servers and the proxy as child processes, for the demo, the tests and the benchmarks."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from p2pkv.demo.processes import ServerProcess, free_ports

LOOPBACK = "127.0.0.1"

Role = Literal["P", "D", "both"]
_KV_ROLE = {"P": "kv_producer", "D": "kv_consumer", "both": "kv_both"}


class VllmServer(ServerProcess):
    """One vLLM API server on 127.0.0.1, with p2pkv as its KV connector if it has a role.

    Args:
        model: directory or name of the model.
        role: "P" (prefill), "D" (decode), or None for a plain server without a connector.
        kv_port: first control port, rank r takes kv_port + r; default free ones.
        ranks: how many of them the instance has (TP x PP).
        http_port: port of the API; default a free one.
        proxy: (address, discovery port) of the proxy that is pinged; None for no pings.
        extra_args: more command-line arguments of vLLM.
        extra_config: more entries of `kv_connector_extra_config`; they win over those made here.
        env: more environment variables; they win over those made here.
        load_failure_policy: `kv_load_failure_policy`, "fail" or "recompute".
        connector: name of the connector, for users of an older name and for tests.
        connector_module: `kv_connector_module_path`, for a connector that is not registered.
        kv_transfer_config: used as it is in place of the one made here (another connector, a probe).
        kv_cache_gib: memory for the KV cache, in GiB, on a CPU.
        eager: whether the model runs without torch.compile and CUDA graphs.
        log_path: where stdout and stderr go; default a file of its own in the working directory's `.demo`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        role: Role | None = None,
        kv_port: int | None = None,
        ranks: int = 1,
        http_port: int | None = None,
        proxy: tuple[str, int] | None = None,
        extra_args: Sequence[str] = (),
        extra_config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        load_failure_policy: Literal["fail", "recompute"] | None = None,
        connector: str = "P2pKvConnector",
        connector_module: str | None = None,
        kv_transfer_config: Mapping[str, Any] | None = None,
        kv_cache_gib: int = 1,
        eager: bool = True,
        name: str | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.role = role
        self.http_port = http_port or free_ports()
        self.kv_port = kv_port or (free_ports(ranks) if role else None)
        self.base_url = f"http://{LOOPBACK}:{self.http_port}"
        name = name or (f"{role}-{self.http_port}" if role else f"vllm-{self.http_port}")
        transfer = dict(kv_transfer_config) if kv_transfer_config else None
        if transfer is None and role is not None:
            transfer = self._transfer_config(role, proxy, extra_config or {}, load_failure_policy)
            transfer["kv_connector"] = connector
            if connector_module is not None:
                transfer["kv_connector_module_path"] = connector_module
        super().__init__(
            name,
            _vllm_command(str(model), self.http_port, transfer, [*["--enforce-eager"] * eager, *extra_args]),
            health_url=f"{self.base_url}/health",
            log_path=log_path or Path(".demo", "logs", f"{name}.log"),
            env={**os.environ, **cpu_environment(kv_cache_gib), **(env or {})},
        )

    @property
    def zmq_address(self) -> str:
        """The control address that goes into request ids."""
        assert self.kv_port is not None, f"{self.name} has no connector"
        return f"{LOOPBACK}:{self.kv_port}"

    def _transfer_config(
        self, role: Role, proxy: tuple[str, int] | None, extra: Mapping[str, Any], policy: str | None
    ) -> dict[str, Any]:
        config: dict[str, Any] = {"host": LOOPBACK}
        if proxy is not None:
            # Strings, as the old connector's users write them.
            config |= {
                "proxy_ip": proxy[0],
                "proxy_port": str(proxy[1]),
                "http_port": str(self.http_port),
            }
        transfer: dict[str, Any] = {
            "kv_role": _KV_ROLE[role],
            "kv_port": self.kv_port,
            "kv_connector_extra_config": config | dict(extra),
        }
        if policy is not None:
            transfer["kv_load_failure_policy"] = policy
        return transfer


class ProxyServer(ServerProcess):
    """`p2pkv-proxy` on 127.0.0.1.

    Args:
        http_port: port for clients; default a free one.
        discovery_port: port that instances ping; default a free one.
        dispatch: "concurrent" (P and D at once) or "sequential" (D when P is done).
        prefill: how many P's must be there before it is ready.
        extra_args: more command-line arguments of the proxy.
        log_path: as for `VllmServer`.
    """

    def __init__(
        self,
        *,
        http_port: int | None = None,
        discovery_port: int | None = None,
        dispatch: Literal["concurrent", "sequential"] = "concurrent",
        prefill: int = 1,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.http_port = http_port or free_ports()
        self.discovery_port = discovery_port or free_ports()
        self.base_url = f"http://{LOOPBACK}:{self.http_port}"
        name = f"proxy-{self.http_port}"
        super().__init__(
            name,
            [
                *(sys.executable, "-m", "p2pkv_proxy"),
                *("--host", LOOPBACK, "--port", str(self.http_port)),
                *("--discovery", f"{LOOPBACK}:{self.discovery_port}", "--dispatch", dispatch),
                *extra_args,
            ],
            health_url=f"{self.base_url}/health?prefill={prefill}&decode=1",
            log_path=log_path or Path(".demo", "logs", f"{name}.log"),
            env={**os.environ, **(env or {})},
        )

    @property
    def discovery(self) -> tuple[str, int]:
        """What a `VllmServer` takes as its `proxy`."""
        return LOOPBACK, self.discovery_port


def cpu_environment(kv_cache_gib: int = 1) -> dict[str, str]:
    """Variables with which several small vLLM servers share one small machine, and stay off the network."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        # One thread each, bound nowhere: by default every server would bind itself to the same cores.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONUNBUFFERED": "1",
    }


def _vllm_command(
    model: str, http_port: int, transfer: Mapping[str, Any] | None, extra_args: Sequence[str]
) -> list[str]:
    # Not the `vllm` command: that of the CPU build looks for a distribution named vllm and fails.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", LOOPBACK, "--port", str(http_port)]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return command + list(extra_args)
