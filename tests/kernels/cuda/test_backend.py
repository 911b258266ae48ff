"""Where the CUDA kernels are offered, what is said when they are not, and what is left to others."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vkit.kernels import Backend, dispatch
from vkit.kernels.compiler import BuildError
from vkit.kernels.cuda import backend, sources


def test_it_is_offered_for_cuda_alone_and_before_triton() -> None:
    assert backend.NAME not in [item.name for item in dispatch.backends("cpu")]
    assert [item.name for item in dispatch.backends("cuda")] == ["cuda", "triton"]


def test_it_needs_what_triton_needs_and_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.triton_backend, "unavailable", lambda: "the driver knows no card")
    assert backend.unavailable() == "the driver knows no card"
    monkeypatch.setattr(backend.triton_backend, "unavailable", lambda: None)
    monkeypatch.setattr(sources, "find_nvcc", lambda: "/usr/bin/nvcc")
    assert backend.unavailable() is None
    monkeypatch.setattr(sources, "find_nvcc", lambda: None)
    assert backend.unavailable() == "nvcc is not found (install the CUDA toolkit, or set CUDA_HOME)"


def test_the_named_toolkit_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sources.find_nvcc() == str(compiler)


def test_it_has_an_implementation_per_op_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from vkit.kernels.cuda.ops import OPS

    monkeypatch.setattr(backend, "_is_built", lambda: True)
    assert all(backend.find(op, torch.bfloat16) is OPS[op] for op in OPS)
    assert backend.find("rms_norm", torch.float32) is OPS["rms_norm"]
    assert backend.find("paged_attention", torch.float32) is None
    assert backend.find("rms_norm", torch.float64) is None
    assert backend.find("linear", torch.bfloat16) is None


def test_a_failed_build_is_said_once_and_leaves_everything_to_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vkit.kernels.cuda import library

    def fail() -> None:
        raise BuildError("nvcc failed: unsupported GPU architecture 'compute_200'")

    monkeypatch.setattr(library, "load_library", fail)
    backend._is_built.cache_clear()
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        assert backend.find("rms_norm", torch.bfloat16) is None
        assert backend.find("quantized_linear", torch.bfloat16) is None
    backend._is_built.cache_clear()
    assert [record.message for record in caplog.records] == [
        "cuda kernels are not used: nvcc failed: unsupported GPU architecture 'compute_200'; triton runs"
    ]


def test_a_card_whose_code_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loader: it names what is missing, and asks the driver for the targets."""
    from vkit.kernels.cuda import library

    load = sys.modules[library.__name__].__dict__["load_for"]
    monkeypatch.setattr(sources, "find_nvcc", lambda: None)
    with pytest.raises(BuildError, match="nvcc is not found"):
        load()
    monkeypatch.setattr(sources, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(library, "capabilities", lambda: "the driver knows no card")
    with pytest.raises(BuildError, match="the driver knows no card"):
        load()
    asked: dict[str, object] = {}

    def build(name: str, *arguments: object, **settings: object) -> Path:
        asked.update(name=name, flags=arguments[2], **settings)
        raise BuildError("enough")

    monkeypatch.setattr(library, "capabilities", lambda: [(9, 0), (8, 0), (9, 0)])
    monkeypatch.setattr(library, "build_library", build)
    with pytest.raises(BuildError, match="enough"):
        load()
    assert asked["compiler"] == "nvcc"
    assert "-gencode=arch=compute_80,code=sm_80" in str(asked["flags"])
    assert str(asked["flags"]).count("sm_90") == 1


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, host_library: object) -> None:
    from vkit.kernels.cuda import library

    class Longer(ctypes.Structure):
        _fields_ = (("x", ctypes.c_int64),)

    monkeypatch.setitem(library.CALLS, "rms_norm", Longer)
    with pytest.raises(BuildError, match="is of another version"):
        library.Library(Path(host_library._c._name))  # type: ignore[attr-defined]
    with pytest.raises(BuildError, match="cannot be loaded"):
        library.Library(Path("/nowhere.so"))


def test_an_error_code_is_an_error(host_library: object) -> None:
    from vkit.kernels.cuda.library import Library, Packed

    assert isinstance(host_library, Library)
    with pytest.raises(RuntimeError, match="packed: CUDA error 1"):
        host_library.start("packed", Packed(format=99), torch.device("cpu"))


def test_the_next_backend_takes_what_one_passes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x + 1

    def second(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x + 2

    monkeypatch.setattr(dispatch, "_backends", {"cpu": [], "cuda": []})
    dispatch.register_backend(Backend("one", "cpu", lambda op, dtype: first))
    dispatch.register_backend(Backend("two", "cpu", lambda op, dtype: second if op == "scale" else None))
    x = torch.ones(1)
    assert dispatch.next_best("scale", x, after="one") is second
    assert dispatch.next_best("add", x, after="one") is dispatch.reference_ops()["add"]
    assert dispatch.next_best("scale", x, after="two") is dispatch.reference_ops()["scale"]
    with dispatch.using_backend("cpu", "one"):
        assert dispatch.next_best("scale", x, after="one") is dispatch.reference_ops()["scale"]


def test_a_better_backend_that_cannot_run_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_backends", {"cpu": [], "cuda": []})
    monkeypatch.setattr(dispatch, "_reported", set())
    dispatch.register_backend(Backend("one", "cpu", lambda op, dtype: None, unavailable="nvcc is not found"))
    dispatch.register_backend(Backend("two", "cpu", lambda op, dtype: lambda x, factor: x))
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        for dtype in (torch.float32, torch.bfloat16):
            dispatch.ops(torch.ones(1, dtype=dtype)).scale(torch.ones(1), 2.0)
    dispatch._forget_choices()
    assert [record.message for record in caplog.records] == ["one kernels are not used: nvcc is not found; two runs"]


def test_a_machine_without_a_card_compiles_and_loads_nothing() -> None:
    code = (
        "import sys, torch; from vkit import kernels; kernels.backends('cuda');"
        "sys.exit('triton' in sys.modules or 'vkit.kernels.cuda.library' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
