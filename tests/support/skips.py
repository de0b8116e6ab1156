"""Which tests may be skipped, and why. A skip that is not in the table fails the run.

A test that is skipped shows nothing, and the exit status would be 0. With `--ci` (as .ci/run has it) a skip
for want of something that the machine of the CI has fails, too.
"""

import re
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Allowed:
    """Tests whose names begin with `where` may be skipped for a reason that has `reason` in it, a regular
    expression. `why`: why that is right. `on_ci`: the machine of the CI lacks it, too.
    """

    where: str
    reason: str
    why: str
    on_ci: bool = False


ALLOWED = (
    # Nothing is missing.
    Allowed(
        "tests/vllm/test_shapes.py",
        "no prefixes are cached here",
        "these instances run without prefix caching",
        on_ci=True,
    ),
    Allowed("tests/unit/test_pages.py", "not a git repository", "git lists what the repository holds"),
    Allowed("tests/vllm/test_upgrade.py", "git's history", "a shallow clone has no earlier version"),
    # Hardware.
    Allowed("tests/gpu/", r"needs \d CUDA device", "make gpu-test runs them on a GPU", on_ci=True),
    Allowed("tests/gpu/", "needs CuPy|is not installed", "make gpu-test says what is missing", on_ci=True),
    Allowed(
        "tests/cli/test_bench.py", "there is a CUDA device", "it tests the sentence of a machine without one"
    ),
    Allowed("tests/links/test_nccl_bindings.py", "there is a CUDA device", "the same"),
    Allowed("tests/kv/test_codecs.py", "has no AMX", "vLLM's kernel is the reference", on_ci=True),
    Allowed("tests/vllm/test_shapes.py", "has no AMX", "vLLM packs so only there", on_ci=True),
    Allowed("tests/vllm/test_deepseek_v4.py", "has no AVX-512", "vLLM serves it only there", on_ci=True),
    Allowed("tests/vllm/test_hybrid_faults.py", "has no AVX-512", "the same", on_ci=True),
    Allowed("tests/links/test_host.py", "no IPv6", "an address of each kind is needed"),
    # Programs that are no Python packages.
    Allowed("tests/kv/", "gcc is not installed", "it compiles the kernels for a CPU"),
    Allowed("tests/links/test_mps_check.py", "gcc is not installed", "it compiles a pretend NVML"),
    Allowed("tests/proxy/test_instances.py", "no Chromium", "a browser of the machine's", on_ci=True),
    Allowed(
        "tests/chaos/test_partitions.py",
        "network namespace|there is no",
        "it takes a kernel that permits new network namespaces; in a container it seldom does",
        on_ci=True,
    ),
    # Packages with a part of the requirements only, or that a test installs by itself.
    Allowed(
        "tests/", "vLLM is not installed|needs vLLM|not built for a CPU", "p2pkv's other parts need no vLLM"
    ),
    Allowed(
        "tests/links/test_nccl_bindings.py",
        "cannot be imported here|NCCL",
        "CuPy and nccl4py come with the requirements for CUDA",
    ),
    Allowed("tests/proxy/test_metrics.py", "opentelemetry", "the extra `traces`"),
    Allowed("tests/proxy/test_deployments.py", "pip", "validators, from a package index"),
    Allowed("tests/vllm/test_routers.py", "pip", "vllm-router and Ray, from a package index"),
    Allowed("tests/vllm/test_other_clients.py", "pip", "LiteLLM, from a package index"),
    Allowed("tests/vllm/test_endpoints.py", "there is no curl", "a program of the system"),
    Allowed("tests/connector/", "the sources of vLLM", "the next version's, from a package index"),
)


class Skips:
    def __init__(self, ci: bool) -> None:
        self._ci = ci
        self._unexpected: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped(report.nodeid, report.longrepr)

    def _skipped(self, name: str, said: object) -> None:
        reason = str(said[2] if isinstance(said, tuple) else said).removeprefix("Skipped: ")
        if not any(
            name.startswith(each.where) and re.search(each.reason, reason) and (each.on_ci or not self._ci)
            for each in ALLOWED
        ):
            self._unexpected.append(f"{name}: {reason}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unexpected:
            terminalreporter.section("skipped, and not in tests/support/skips.py" + " for the CI" * self._ci)
            for each in self._unexpected:
                terminalreporter.line(each)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ci", action="store_true", help="fail for a skip for want of something that the CI's machine has"
    )


def pytest_configure(config: pytest.Config) -> None:
    # With xdist the reports come together in the process that has started the others.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(config.getoption("ci")))
