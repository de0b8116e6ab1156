import pytest

from support.cuda.kernels import NO_GCC, CpuLauncher, compiled


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> CpuLauncher:
    if NO_GCC:
        pytest.skip(NO_GCC)
    return CpuLauncher(compiled(tmp_path_factory.mktemp("kernels")))
