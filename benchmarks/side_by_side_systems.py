"""The systems that side_by_side.py compares: their environment, their servers, and how each is asked.

NIXL and Mooncake are installed into an environment of their own, `.side/` beside `.venv/`: it sees every
package of this Python and adds theirs. What cannot be had is told in words (`Environment.missing`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from side_by_side_load import Asker, Asking, Taken

from p2pkv.demo import client
from p2pkv.demo.processes import free_ports, group_members
from p2pkv.demo.servers import LOOPBACK, ProxyServer, VllmServer
from p2pkv.demo.tiny_model import llama_8b_geometry

_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
_BFLOAT16 = "avx512_bf16" in _FLAGS or "amx_bf16" in _FLAGS
# A CPU that does not compute in bfloat16 is slow with it. Half the heads in float32 have as many bytes of KV.
MODEL = (
    llama_8b_geometry() if _BFLOAT16 else replace(llama_8b_geometry(), dtype="float32", heads=4, kv_heads=4)
)
MODEL_SAID = f"{MODEL.layers} layers x {MODEL.kv_heads} KV heads x {MODEL.head_dim}, {MODEL.dtype}"
NAME = "llama-8b-kv"
PACKAGES = {
    "nixl": ("nixl==1.5.1", "nixl-cu12==1.5.1"),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
}
PROBES = {"nixl": "import nixl._api", "mooncake": "from mooncake.engine import TransferEngine"}
SYSTEM_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
"""What Mooncake's engine is linked to, even where it moves bytes by TCP alone."""

INSTALL_SECONDS = 240.0

# The environment of NIXL and Mooncake.


@dataclass
class Environment:
    """`python` runs with NIXL and Mooncake; `missing` says of each that is not there why not."""

    python: Path
    folder: Path
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs so that the unpacked system libraries are found."""
        libraries = sorted({str(file.parent) for file in (self.folder / "system").rglob("*.so*")})
        before = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": os.pathsep.join([*libraries, *([before] if before else [])])}


def environment(folder: Path, wanted: Sequence[str]) -> Environment:
    """Make `folder` if it is not there, and install what is wanted into it; a second run only looks."""
    folder = folder.absolute()
    made = Environment(folder / "bin" / "python", folder)
    if not wanted:
        return made
    if not made.python.exists():
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    ours = [path for path in sys.path if path.endswith("site-packages") and Path(path) != own]
    # addsitedir, since the packages of this Python may themselves be links to elsewhere (.pth files).
    (own / "beneath.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
    for name in wanted:
        if sentence := _install(made, name):
            made.missing[name] = sentence
    return made


def _install(made: Environment, name: str) -> str | None:
    """Have `name`; None, or a sentence that says why it cannot be had."""
    if _probe(made, name) is None:
        return None
    pip = [sys.executable, "-m", "pip", "--python", str(made.python), "install", "--quiet"]
    pip += ["--no-deps", "--disable-pip-version-check", *PACKAGES[name]]
    if error := _command(pip, made.folder):
        return f"pip cannot install {' '.join(PACKAGES[name])}: {error}"
    error = _probe(made, name)
    if error and "libibverbs" in error:
        if error := _unpack_libraries(made.folder):
            return f"{name} needs the system library libibverbs.so.1, and apt cannot get it: {error}"
        error = _probe(made, name)
    return error and f"{name} is installed, and cannot be imported: {error}"


def _probe(made: Environment, name: str) -> str | None:
    return _command([str(made.python), "-c", PROBES[name]], made.folder, made.variables)


def _unpack_libraries(folder: Path) -> str | None:
    """Unpack Debian's packages under `folder`; nothing of the machine's own is changed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return "this machine has no apt-get; install libibverbs yourself"
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    if error := _command(["apt-get", "download", *SYSTEM_PACKAGES], packages):
        return error
    for file in packages.glob("*.deb"):
        if error := _command(["dpkg-deb", "--extract", str(file), str(folder / "system")], packages):
            return error
    return None


def _command(command: list[str], cwd: Path, variables: Mapping[str, str] | None = None) -> str | None:
    """None if it ended well, else the last line that it wrote."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {INSTALL_SECONDS:g} s"
    lines = (done.stderr + done.stdout).strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit status {done.returncode}")


# The servers.


@dataclass(frozen=True)
class Workshop:
    """What every server is made with.

    Attributes:
        model: folder of the model; longest: the longest prompt plus answer, in tokens.
        kv_gib: memory of each server's KV cache; chunk: tokens that a server computes in one step.
        scratch: a folder that is gone after the run; logs: where the servers' logs go.
    """

    model: Path
    longest: int
    kv_gib: int
    block: int
    chunk: int
    environment: Environment
    scratch: Path
    logs: Path

    def server(self, name: str, *, python: Path | None = None, **more: Any) -> VllmServer:
        """A server that is not started yet; `python` is another one than ours."""
        settings = [
            *("--served-model-name", NAME, "--dtype", MODEL.dtype, "--block-size", str(self.block)),
            *("--max-model-len", str(self.longest), "--max-num-batched-tokens", str(self.chunk)),
            "--no-enable-prefix-caching",
        ]
        here = str(Path(__file__).parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        env = {"PYTHONPATH": path, **more.pop("env", {})}
        if python is not None:
            env |= self.environment.variables
        log = self.logs / f"{name}.log"
        log.unlink(missing_ok=True)
        server = VllmServer(
            self.model,
            extra_args=settings,
            name=name,
            env=env,
            kv_cache_gib=self.kv_gib,
            log_path=log,
            **more,
        )
        if python is not None:
            server.command[0] = str(python)
        return server


@dataclass
class System:
    """One row of the tables: servers, and a way to ask them.

    Attributes:
        name: what the tables call it. title: the same in a few more words.
        servers: the vLLM servers that it needs; P is the first, D the last.
        way: asks it for one answer.
        after: called when nothing is under way, to leave nothing behind.
        longest: tokens of the longest prompt that it bears; None: any.
    """

    name: str
    title: str
    servers: list[VllmServer]
    way: Callable[[Asker, Asking], Any]
    after: Callable[[], None] = lambda: None
    longest: int | None = None

    @property
    def is_pair(self) -> bool:
        return len(self.servers) == 2 and self.name != "round robin"

    async def ask(self, asker: Asker, one: Asking) -> Taken:
        taken: Taken = await self.way(asker, one)
        return taken


def plain(server: VllmServer) -> System:
    async def way(asker: Asker, one: Asking) -> Taken:
        return await asker.single(server.base_url, one)

    return System("plain", "one plain server", [server], way)


def round_robin(servers: list[VllmServer]) -> System:
    turn = [0]

    async def way(asker: Asker, one: Asking) -> Taken:
        turn[0] += 1
        return await asker.single(servers[turn[0] % len(servers)].base_url, one)

    return System("round robin", "two plain servers, round robin", servers, way)


def p2pkv_pair(shop: Workshop, tag: str, naps: bool, proxy: ProxyServer | None) -> list[VllmServer]:
    more: dict[str, Any] = {"proxy": proxy.discovery if proxy else None}
    if not naps:
        more["extra_config"] = {"idle_wait_ms": 0}
    return [shop.server(f"p2pkv{tag}-{role}", role=role, **more) for role in ("P", "D")]


def p2pkv(name: str, title: str, pair: list[VllmServer], *, first: bool) -> System:
    p, d = pair

    async def way(asker: Asker, one: Asking) -> Taken:
        one.headers = pair_headers(p, d)
        if first:
            return await asker.in_turn(p.base_url, d.base_url, one)
        return await asker.at_once(p.base_url, d.base_url, one)

    return System(name, title, pair, way)


def through_proxy(name: str, title: str, pair: list[VllmServer], proxy: ProxyServer) -> System:
    async def way(asker: Asker, one: Asking) -> Taken:
        return await asker.single(proxy.base_url, one)

    return System(name, title, pair, way)


def pair_headers(p: VllmServer, d: VllmServer) -> dict[str, str]:
    name = f"___prefill_addr_{p.zmq_address}___decode_addr_{d.zmq_address}_{uuid.uuid4().hex}"
    return {"X-Request-Id": name}


def _module(naps: bool) -> dict[str, str]:
    """Where a connector that naps comes from."""
    return {"kv_connector_module_path": "side_by_side_naps"} if naps else {}


def example(shop: Workshop, name: str, title: str, naps: bool) -> System:
    """vLLM's ExampleConnector: KV in files. Of a prompt in several steps it keeps the last step's KV only."""
    files = shop.scratch / name.replace(" ", "-")
    files.mkdir()

    def server(role: str) -> VllmServer:
        return shop.server(
            f"{name.replace(' ', '-')}-{role}",
            kv_transfer_config={
                **_module(naps),
                "kv_connector": "ExampleConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"shared_storage_path": str(files)},
            },
        )

    pair = [server("kv_producer"), server("kv_consumer")]

    async def way(asker: Asker, one: Asking) -> Taken:
        return await asker.in_turn(pair[0].base_url, pair[1].base_url, one)

    def forget() -> None:
        for folder in files.iterdir():
            shutil.rmtree(folder)

    return System(name, title, pair, way, forget, shop.chunk)


def nixl(shop: Workshop, name: str, title: str, naps: bool, connector: str) -> System:
    """NIXL over UCX; D reads from P, or P writes to D with NixlPushConnector. P is asked first."""

    def server(role: str) -> VllmServer:
        return shop.server(
            f"{name.replace(' ', '-')}-{role}",
            python=shop.environment.python,
            env={
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports()),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            },
            kv_transfer_config={
                **_module(naps),
                "kv_connector": connector,
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "fail",
            },
        )

    # NixlPushConnector refuses kv_both; the pull connector takes either role.
    pair = [server("kv_producer"), server("kv_consumer")]

    async def way(asker: Asker, one: Asking) -> Taken:
        one.p_more = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        one.d_more = lambda answer: {"kv_transfer_params": answer.get("kv_transfer_params")}
        return await asker.in_turn(pair[0].base_url, pair[1].base_url, one)

    return System(name, title, pair, way)


def mooncake(shop: Workshop, name: str, title: str, naps: bool) -> System:
    """Mooncake over TCP; P and D are asked at once, as its router does. side_by_side_mooncake.py has why."""
    bootstrap = free_ports()

    def server(role: str) -> VllmServer:
        return shop.server(
            f"{name.replace(' ', '-')}-{role}",
            python=shop.environment.python,
            env={
                "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
                "VLLM_HOST_IP": LOOPBACK,
            },
            kv_transfer_config={
                "kv_connector": "MooncakeConnector",
                "kv_connector_module_path": "side_by_side_naps" if naps else "side_by_side_mooncake",
                "kv_role": role,
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
            },
        )

    pair = [server("kv_producer"), server("kv_consumer")]
    address = f"http://{LOOPBACK}:{bootstrap}"
    engine: list[str] = []

    async def way(asker: Asker, one: Asking) -> Taken:
        if not engine:
            known = json.loads(client.get(f"{address}/query"))
            engine.append(next(iter(known.values()))["engine_id"])
        transfer = uuid.uuid4().hex
        one.p_more = {
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer,
            }
        }
        to_d = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": address,
            "remote_engine_id": engine[0],
            "transfer_id": transfer,
        }
        one.d_more = lambda _answer: {"kv_transfer_params": to_d}
        return await asker.at_once(pair[0].base_url, pair[1].base_url, one)

    return System(name, title, pair, way)


# What the servers say of themselves.


def external_tokens(system: System) -> float:
    """Tokens that D has taken from P so far, by vLLM's own count."""
    found = client.metrics(system.servers[-1].base_url)
    return found.get("vllm:external_prefix_cache_hits_total", 0.0)


def cpu_seconds(server: VllmServer) -> dict[str, float]:
    """CPU time that the server's worker and engine core have used so far."""
    used = {"worker": 0.0, "engine core": 0.0}
    for number in group_members(server.pid):
        try:
            process = psutil.Process(number)
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        role = "worker" if "Worker" in title else "engine core" if "EngineCore" in title else None
        if role:
            used[role] += times.user + times.system
    return used


def memory_gib(servers: Sequence[VllmServer]) -> float:
    """Memory of all processes of these servers, each shared page counted once for its sharers."""
    total = 0
    for number in [member for server in servers for member in group_members(server.pid)]:
        try:
            total += psutil.Process(number).memory_full_info().pss
        except psutil.Error:
            continue
    return total / (1 << 30)
