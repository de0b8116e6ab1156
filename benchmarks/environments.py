"""Environments for other people's programs that p2pkv is tried with: each has its own, and is made once."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

INSTALL_SECONDS = 240.0
_DONE = ".installed"


class Unavailable(Exception):
    """The packages cannot be had here; the text says why, in one line."""


def environment(folder: Path, *requirements: str, ours: bool = False) -> Path:
    """A folder with an environment that has these packages; its programs are under `bin`.

    It is made below `folder`, and kept there for the next call with the same requirements. With `ours`, it
    also sees the packages of this Python. Raises Unavailable.
    """
    wanted = "\n".join([*requirements, f"ours={ours}", sys.version])
    made = folder.absolute() / hashlib.blake2b(wanted.encode(), digest_size=6).hexdigest()
    if (made / _DONE).exists():
        return made
    venv.EnvBuilder(with_pip=False, symlinks=True, clear=True).create(made)
    python = made / "bin" / "python"
    if ours:
        _show_ours(made)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    _run([*pip, "--disable-pip-version-check", *requirements], " ".join(requirements))
    (made / _DONE).write_text(wanted)
    return made


def _show_ours(made: Path) -> None:
    own = made / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    folders = [path for path in sys.path if path.endswith("site-packages") and Path(path) != own]
    # addsitedir, since the packages of this Python may themselves be links to elsewhere (.pth files).
    (own / "beneath.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in folders))


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not install {what} within {INSTALL_SECONDS:g} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1] if lines else f"exit status {done.returncode}"
        raise Unavailable(f"pip cannot install {what}: {why}")
