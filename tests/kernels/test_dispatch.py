"""Choosing implementations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vkit import kernels
from vkit.kernels import Backend, dispatch


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry of one's own."""
    monkeypatch.setattr(dispatch, "_backends", {"cpu": [], "cuda": []})
    monkeypatch.setattr(dispatch, "_builtin_loaded", {"cpu", "cuda"})
    monkeypatch.setattr(dispatch, "_reported", set())
    dispatch._forget_choices()
    yield
    dispatch._forget_choices()


def test_a_backend_that_refuses_to_load_refuses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch in its place would be a surprise."""

    def refuse(module: str) -> None:
        raise ValueError(f"{module}: no such level")

    monkeypatch.setattr(dispatch, "_builtin_loaded", set())
    monkeypatch.setattr(dispatch.importlib, "import_module", refuse)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such level"):
            kernels.backends("cpu")


def only_scale(marker: float, dtype: torch.dtype = torch.float32) -> Any:
    def find(op: str, wanted: torch.dtype) -> Any:
        return (lambda x, factor: x * 0 + marker) if op == "scale" and wanted is dtype else None

    return find


def test_a_backend_serves_what_it_has_and_the_reference_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2)
    assert kernels.scale(x, 3.0).tolist() == [3.0, 3.0]
    kernels.register_backend(Backend("fast", "cpu", only_scale(7.0)))
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        assert kernels.scale(x, 3.0).tolist() == [7.0, 7.0]
        for _ in range(3):
            assert kernels.scale(x.bfloat16(), 3.0).tolist() == [3.0, 3.0]
            assert kernels.add(x, x).tolist() == [2.0, 2.0]
    assert [record.message for record in caplog.records] == [
        "scale: no fast kernel for torch.bfloat16; plain torch runs it",
        "add: no fast kernel for torch.float32; plain torch runs it",
    ]


def test_an_unusable_backend_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    kernels.register_backend(Backend("fast", "cpu", only_scale(7.0), unavailable="no compiler found"))
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        assert kernels.scale(torch.ones(1), 3.0).tolist() == [3.0]
        kernels.add(torch.ones(1), torch.ones(1))
    assert [record.message for record in caplog.records] == [
        "fast kernels are not used: no compiler found; plain torch runs"
    ]


def test_the_callers_word_wins() -> None:
    x = torch.ones(1)
    kernels.register_backend(Backend("first", "cpu", only_scale(1.5)))
    kernels.register_backend(Backend("second", "cpu", only_scale(2.5)))
    kernels.register_backend(Backend("broken", "cpu", only_scale(3.5), unavailable="no AMX"))
    assert kernels.scale(x, 9.0).item() == 1.5
    with kernels.using_backend("cpu", "second"):
        assert kernels.scale(x, 9.0).item() == 2.5
        with kernels.using_backend("cpu", "reference"):
            assert kernels.scale(x, 9.0).item() == 9.0
        assert kernels.scale(x, 9.0).item() == 2.5
    assert kernels.scale(x, 9.0).item() == 1.5
    with pytest.raises(ValueError, match=r"backend 'third', expected one of first, second, broken, reference for cpu"):
        kernels.use_backend("cpu", "third")
    with pytest.raises(ValueError, match=r"backend 'broken' cannot run here: no AMX"):
        kernels.use_backend("cpu", "broken")


def test_the_first_backend_may_wrap_steps_and_lay_out_pages() -> None:
    def step(batch: object) -> torch.Tensor:
        return torch.zeros(1)

    pages = torch.zeros(3, 2 * 4 * 2 * 8 * 4, dtype=torch.uint8)
    assert kernels.wrap_step("cpu", step) is step
    k, v = kernels.kv_layout(pages, 4, 2, (8, 8), torch.float32)
    assert k.shape == v.shape == (3, 4, 2, 8)
    k.fill_(1.0)
    assert not v.any()
    layout = lambda *arguments: (pages[:, :1], pages[:, 1:])  # noqa: E731
    kernels.register_backend(
        Backend("fast", "cpu", only_scale(1.0), wrap_step=lambda inner: lambda b: inner(b) + 1, kv_layout=layout)
    )
    assert kernels.wrap_step("cpu", step)(None).item() == 1.0
    assert kernels.kv_layout(pages, 4, 2, (8, 8), torch.float32)[0].shape == (3, 1)


def test_unknown_op() -> None:
    with pytest.raises(AttributeError, match="no op named 'warp'"):
        _ = dispatch.ops(torch.ones(1)).warp
