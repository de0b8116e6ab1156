"""The scripts in examples/ start what they say, with options that p2pkv takes. The programs are stand-ins."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pkv.config import Options
from p2pkv.pairing import Address
from support.examples import EXAMPLES, options_of

STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys, time
program = pathlib.Path(sys.argv[0])
said = {{"program": program.name, "arguments": sys.argv[1:], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}}
written = program.parent / f"written-{{os.getpid()}}.json"
written.write_text(json.dumps(said))
written.rename(program.parent / f"started-{{os.getpid()}}.json")
end = time.monotonic() + 30
# The script asks with curl whether all serve, and stops them when one ends.
while program.name == "curl" and time.monotonic() < end:
    if len(list(program.parent.glob("started-*.json"))) == 4:
        break
    time.sleep(0.02)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with all programs that the scripts start; these only say what they were given."""
    for name in ("vllm", "python", "vllm-router", "p2pkv-proxy", "curl"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def started(programs: Path, *command: str, **environ: str) -> list[dict[str, Any]]:
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **environ}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    files = list(programs.glob("started-*.json"))
    assert files, done.stderr
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return [each for each in found if each["program"] != "curl"]


def pair_of(servers: list[dict[str, Any]], has_gpu: bool) -> dict[str, Options]:
    """By role, the options of a P and a D that ping the proxy of this host."""
    read = [options_of(each["arguments"], has_gpu) for each in servers]
    made = {each.role: each for each in read}
    assert sorted(made) == ["D", "P"]
    assert {each.proxies for each in read} == {(Address("127.0.0.1", 30001),)}
    assert made["P"].address != made["D"].address and made["P"].http_address != made["D"].http_address
    return made


def test_a_pair_on_two_gpus(programs: Path) -> None:
    script = str(EXAMPLES / "serve_pair_gpus.sh")
    found = started(programs, script, "a-model", "--max-model-len", "2048")
    servers = [each for each in found if each["program"] == "vllm"]
    assert sorted(each["gpus"] for each in servers) == ["0", "1"]
    assert all(each["arguments"][:2] == ["serve", "a-model"] for each in servers)
    assert all(each["arguments"][-2:] == ["--max-model-len", "2048"] for each in servers)
    assert {each.link for each in pair_of(servers, has_gpu=True).values()} == {"nccl"}


@pytest.mark.parametrize(("mode", "more"), [("default", []), ("write", ["--kv-connector", "moriio"])])
def test_a_pair_behind_vllm_router(programs: Path, mode: str, more: list[str]) -> None:
    script = str(EXAMPLES / "vllm_router.sh")
    found = started(programs, script, "a-model", "--max-model-len", "2048", MODE=mode)
    (router,) = [each for each in found if each["program"] == "vllm-router"]
    asked = router["arguments"]
    assert asked[-len(more) :] == more if more else "--kv-connector" not in asked
    assert asked[asked.index("--vllm-discovery-address") + 1] == "127.0.0.1:30001"
    servers = [each for each in found if each["program"] == "python"]
    assert {each.discovery for each in pair_of(servers, has_gpu=False).values()} == {"plain"}


@pytest.mark.parametrize(("what", "role"), [("prefill", "P"), ("decode", "D")])
def test_two_hosts(programs: Path, tmp_path: Path, what: str, role: str) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef" * 4 + "\n")
    (tmp_path / "secret").chmod(0o600)
    environ = {"HERE": "10.0.0.2", "PROXY": "10.0.0.1", "P2PKV_SECRET_FILE": str(tmp_path / "secret")}
    (server,) = started(programs, str(EXAMPLES / "serve_two_hosts.sh"), what, "a-model", **environ)
    made = options_of(server["arguments"], has_gpu=True)
    assert (made.role, made.proxies, made.discovery) == (role, (Address("10.0.0.1", 30001),), "curve")
    assert made.http_address == Address("10.0.0.2", 8100) and made.secret
    # As docs/install.md has it, which says so.
    assert "--gpu-memory-utilization 0.85 --shutdown-timeout 30" in " ".join(server["arguments"])
    assert any('"kv_load_failure_policy": "recompute"' in each for each in server["arguments"])
    (proxy,) = started(programs, str(EXAMPLES / "serve_two_hosts.sh"), "proxy", **environ)
    assert proxy["program"] == "p2pkv-proxy" and "--secret-file" in proxy["arguments"]


def test_what_is_missing_is_said(programs: Path) -> None:
    script = str(EXAMPLES / "serve_two_hosts.sh")
    environ = {name: value for name, value in os.environ.items() if name not in ("HERE", "PROXY")}
    done = subprocess.run([script, "decode"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "HERE: say this host's address" in done.stderr
