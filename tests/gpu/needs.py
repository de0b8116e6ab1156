"""Says what the GPU tests lack on this machine. Exit code 1 if not even pytest could run them.

A script of the standard library, for Python 3.11 and newer: on a bare machine nothing else is sure.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

NEEDED = {
    "torch": "a CUDA build of torch",
    "pytest": "pytest",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "zmq": "pyzmq",
}


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - whichever Python the machine has runs this
        print(f"p2pkv needs Python 3.11 or newer, not {sys.version.split()[0]}: say GPU_PYTHON=...")
        return 1
    missing = [what for module, what in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"{sys.executable} lacks {', '.join(missing)}: install them, or carry their wheels here")
        return 1
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    print(
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, devices: {count} {', '.join(cards)}".rstrip()
    )
    if importlib.util.find_spec("cupy") is None:
        print("CuPy is missing (cupy-cuda12x or cupy-cuda13x): everything on a GPU will be skipped")
    if count < 2:
        print(f"{count or 'no'} CUDA device{'s' * (count != 1)}: what needs more will be skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
