"""Starts vLLM instances whose ranks are on two hosts, i.e. network namespaces, and compares what they do.

Runs inside the first namespace; the second is entered by its process:
`python nodes_driver.py MODEL FOLDER KEEPER P D`, where P and D are tensor-parallel sizes: 1, or 2 of which
each host has one.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from chaos.namespaces import HOSTS

from p2pkv.control.endpoint import inspect
from p2pkv.control.security import members_of
from p2pkv.demo.processes import ServerProcess, free_ports, wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.pairing import Address
from p2pkv.trust import SECRET_VARIABLE
from support.servers.data_parallel import serves_as_one
from support.servers.fleet import GAUGES, SETTINGS, by_vllm_serve, probing_server

SECRET = "a secret that all instances of these tests share"
FIRST, SECOND = HOSTS["P"], HOSTS["D"]
ALL_ADDRESSES = ("--host", "0.0.0.0")


def inside(keeper: str | None) -> list[str]:
    """What to put before a command that has a host's network, or that of `keeper`, and memory of its own."""
    there = ["nsenter", "--target", keeper, "--net", "--preserve-credentials", "--"] if keeper else []
    own = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$0" "$@"']
    return [*there, *own]


class Instance:
    """P or D, of so many ranks. The HTTP server is on the first host."""

    def __init__(
        self, model: Path, folder: Path, keeper: str, role: Any, ranks: int, proxy: ProxyServer
    ) -> None:
        probes, port, master = folder / "probes", free_ports(ranks), free_ports()
        self.addresses = [Address(FIRST, port)]
        spread: list[str] = []
        if ranks > 1:
            self.addresses.append(Address(SECOND, port + 1))
            spread = [
                *("--tensor-parallel-size", str(ranks), "--nnodes", "2"),
                *("--master-addr", FIRST, "--master-port", str(master)),
            ]

        def server(rank: int, host: str) -> VllmServer:
            return probing_server(
                model,
                role,
                probes,
                kv_port=port,
                proxy=(FIRST, proxy.discovery_port),
                extra_args=[
                    *(*SETTINGS, *ALL_ADDRESSES, *spread),
                    *(["--node-rank", str(rank)] if spread else []),
                ],
                extra_config={"host": host},
                env={SECRET_VARIABLE: SECRET, "VLLM_HOST_IP": host, "GLOO_SOCKET_IFNAME": "cable"},
                name=f"{role}-{host}",
            )

        self.http = server(0, FIRST)
        self.http.command = [*inside(None), *self.http.command]
        self.processes: list[ServerProcess] = [self.http]
        if spread:
            second = by_vllm_serve(server(1, SECOND), "--headless")
            second.command = [*inside(keeper), *second.command]
            self.processes.append(second)

    def rests(self) -> None:
        members = members_of(SECRET.encode())
        held: dict[str, object] = {}

        def at_rest() -> bool:
            reports = [inspect(address, members=members) for address in self.addresses]
            held.clear()
            held.update(
                (f"{name} of rank {rank}", report[name])
                for rank, report in enumerate(reports)
                for name in GAUGES
                if report.get(name)
            )
            return not held

        try:
            wait_until(at_rest, "rest", 30.0)
        except TimeoutError:
            raise AssertionError(f"{self.http.name} is not back at its baseline: {held}") from None


def main(model: Path, folder: Path, keeper: str, sizes: Sequence[int]) -> None:
    probes = folder / "probes"
    probes.mkdir()
    os.environ[SECRET_VARIABLE] = SECRET
    proxy = ProxyServer(log_path=folder / "proxy.log", extra_args=["--allow-insecure"])
    proxy.command[proxy.command.index("--discovery") + 1] = f"{FIRST}:{proxy.discovery_port}"
    p, d = (
        Instance(model, folder, keeper, role, size, proxy) for role, size in zip("PD", sizes, strict=True)
    )
    single = VllmServer(model, extra_args=SETTINGS, name="single", log_path=folder / "single.log")
    servers = [*p.processes, *d.processes, proxy, single]
    with ExitStack() as stack:
        for each in servers:
            stack.enter_context(each)
        try:
            for each in (p.http, d.http, proxy, single):
                each.wait_ready(240.0)
            count = serves_as_one(proxy.base_url, single.base_url, probes, f"{sizes}")
            for each in (p, d):
                each.rests()
            print(f"TP {sizes[0]} to {sizes[1]} on two hosts: {count} prompts, equal blocks and answers")
        except BaseException:
            for each in servers:
                print(each.log_tail(60))
            raise


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops the servers
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], [int(size) for size in sys.argv[4:]])
