"""What is checked before weights are read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from vkit import EngineArgs
from vkit.benchmark.synthetic import write_synthetic
from vkit.loading import check_model


def test_overrides_the_checkpoint_does_not_know_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("vkit"), "warning", lambda text, *args: lines.append(text % args))
    model = str(write_synthetic(tmp_path))
    check_model(EngineArgs(model=model, hf_overrides={"vocab_sise": 1, "no_such_key": 2, "hidden_act": "silu"}))
    (line,) = [line for line in lines if line.startswith("--hf-overrides")]
    assert "no_such_key, vocab_sise" in line
    assert "hidden_act" not in line
