"""Instances with ranks on two hosts, i.e. network namespaces: D's blocks are P's, answers one server's."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos.namespaces import Cable, laid

from support.servers.fleet import needs_cpu_build

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TESTS = Path(__file__).parents[1]
SECONDS = 500.0


cable = pytest.fixture(laid)


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_on_two_hosts(
    fleet_keeper: Any, cable: Cable, tiny_model: Path, tmp_path: Path, p: int, d: int
) -> None:
    """Tensor-parallel sizes. With a stage on each host vLLM's CPU build fails at the first prompt."""
    needs_cpu_build()
    fleet_keeper.stop()
    script = str(Path(__file__).with_name("nodes_driver.py"))
    command = [sys.executable, script, str(tiny_model), str(tmp_path), *map(str, (cable.keeper("D"), p, d))]
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    with subprocess.Popen(
        [*cable.inside("P"), *command],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as driver:
        try:
            output = driver.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            driver.terminate()
            output = driver.communicate(timeout=90.0)[0]
    assert driver.returncode == 0, output
    print(output)
