"""The kernels compiled for real GPUs, by NVRTC as CuPy calls it. That takes no GPU; running them would."""

import re
from typing import Any

import cupy
import pytest
from cupy.cuda import compiler

from p2pkv.kv.copiers import LOADS, WIDTHS, kernel_names, kernel_source

GPUS = {"A100": "80", "H100 and H200": "90", "B200": "100", "RTX PRO 6000 Blackwell": "120"}


class Unloaded(cupy.cuda.function.Module):  # type: ignore[misc]
    """What CuPy has compiled, kept where it would be loaded onto a device."""

    def load(self, binary: bytes) -> None:
        self.binary = binary


class Recorded(compiler._NVRTCProgram):  # type: ignore[misc]
    """A program of NVRTC's that notes its options."""

    options: tuple[str, ...] = ()

    def compile(self, options: tuple[str, ...] = (), log_stream: Any = None) -> Any:
        Recorded.options = options
        return super().compile(options, log_stream)


def compiled(patch: pytest.MonkeyPatch, gpu: str, ptx: bool = False, source: str | None = None) -> bytes:
    """What `cupy.RawModule(code=source)` would load on such a GPU: it is asked nothing that needs one."""
    for_this_device = compiler._get_arch_for_options_for_nvrtc
    patch.setattr(compiler, "_get_arch_for_options_for_nvrtc", for_this_device.__wrapped__)
    patch.setattr(compiler, "_use_ptx", ptx)
    patch.setattr(compiler, "_NVRTCProgram", Recorded)
    patch.setattr(compiler.function, "Module", Unloaded)
    patch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    module = cupy._core.core.compile_with_cache(
        source or kernel_source(), (), GPUS[gpu], prepend_cupy_headers=False
    )
    return bytes(module.binary)


@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_is_compiled_to_machine_code(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = compiled(monkeypatch, gpu)
    assert binary.startswith(b"\x7fELF")
    sections = {name.decode() for name in re.findall(rb"\0\.text\.(\w+)(?=\0)", binary)}
    assert sections == set(kernel_names())
    assert f"-arch=sm_{GPUS[gpu]}" in Recorded.options and "-ftz=true" in Recorded.options


@pytest.mark.parametrize("gpu", GPUS)
def test_an_access_is_as_wide_as_its_kernel_says_and_stays_in_registers(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the loop over a thread's loads were not unrolled, they would go through local memory."""
    text = compiled(monkeypatch, gpu, ptx=True).decode()
    assert f".target sm_{GPUS[gpu]}" in text
    assert ".local" not in text
    kernels = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", text, re.DOTALL))
    assert set(kernels) == set(kernel_names())
    for width in WIDTHS:
        for way in ("gather", "scatter"):
            accesses = re.findall(
                r"^\s*(ld|st)\.(?:global\.)?(?:v(\d)\.)?[usb](\d+)", kernels[f"p2pkv_{way}_{width}"], re.M
            )
            nbytes = [(what, int(many or 1) * int(bits) // 8) for what, many, bits in accesses]
            assert {size for what, size in nbytes if what == "st"} == {width}
            # The layers' addresses and the block table are read, too.
            assert {size for what, size in nbytes if what == "ld"} == {width, 8, 4}
            assert nbytes.count(("ld", width)) >= LOADS


def test_a_mistake_in_the_text_fails_with_nvrtcs_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = kernel_source().replace("units + first;", "units + frist;")
    assert broken != kernel_source()
    with pytest.raises(compiler.CompileException, match='error: identifier "frist" is undefined'):
        compiled(monkeypatch, "H100 and H200", source=broken)
