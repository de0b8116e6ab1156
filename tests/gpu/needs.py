"""Says what the GPU tests lack on this machine. Exit code 1 if not even pytest could run them.

A script of the standard library, for Python 3.11 and newer: on a bare machine nothing else is sure.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

NEEDED = {"torch": "a CUDA build of torch", "pytest": "pytest", "numpy": "numpy"}
"""By module: without these no test can run."""

WHEELS = {"msgspec": "msgspec", "zmq": "pyzmq"}
"""By module, the wheels that some files need besides. vLLM is not one of them: it is too large to carry."""

VLLM = "vllm"

FILES = {
    "test_needs.py": (),
    "test_kernels.py": (),
    "test_first_day.py": (),
    "test_push.py": ("msgspec", "zmq"),
    "test_bench_gpu.py": ("msgspec", "zmq"),
    "test_servers.py": ("msgspec", "zmq"),
    "test_models.py": ("msgspec", "zmq"),
    "test_first_day_steps.py": ("msgspec", "zmq"),
}
"""The modules of WHEELS that a file imports, itself or by what it imports."""


def present(module: str) -> bool:
    """Whether it is installed, and no mere folder of that name, as tests/vllm is; it is not imported."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def lacking(modules: tuple[str, ...]) -> str:
    """Which of these modules of WHEELS, or VLLM, are missing, as a reason; empty if none."""
    missing = [WHEELS.get(module, "vLLM") for module in modules if not present(module)]
    return f"needs {' and '.join(missing)}, not installed here: carry the wheels" if missing else ""


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - whichever Python the machine has runs this
        print(f"p2pkv needs Python 3.11 or newer, not {sys.version.split()[0]}: say GPU_PYTHON=...")
        return 1
    missing = [what for module, what in NEEDED.items() if not present(module)]
    if missing:
        print(f"{sys.executable} lacks {', '.join(missing)}: install them, or carry their wheels here")
        return 1
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    print(
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, devices: {count} {', '.join(cards)}".rstrip()
    )
    if not present("cupy"):
        print("CuPy is missing (cupy-cuda12x or cupy-cuda13x): everything on a GPU will be skipped")
    if count < 2:
        print(f"{count or 'no'} CUDA device{'s' * (count != 1)}: what needs more will be skipped")
    if missing := [wheel for module, wheel in WHEELS.items() if not present(module)]:
        files = ", ".join(name for name, modules in FILES.items() if lacking(modules))
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        names = " ".join(missing)
        print(f"{' and '.join(missing)} missing: {files} will be skipped. For a machine without network:")
        print(f"pip download --no-deps --only-binary :all: --python-version {python} -d wheels {names}")
        print("and on it: pip install --no-index --no-deps --target site wheels/*; export PYTHONPATH=site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
