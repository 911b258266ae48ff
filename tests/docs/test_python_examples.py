"""Every example of docs/python.md runs as it stands."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

import vkit

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT.parent / "shared" / "goldens" / "models"
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.S | re.M)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

pytestmark = pytest.mark.skipif(not GOLDENS.is_dir(), reason="needs the shared goldens")


@pytest.mark.parametrize("code", BLOCKS, ids=[f"{i}" for i in range(len(BLOCKS))])
def test_example(code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The golden model has no tokenizer of its own and is small; both are the test's business, not the reader's."""
    small: dict[str, Any] = {"tokenizer": str(GOLDENS / "byte_tokenizer"), "threads": 1}
    monkeypatch.setattr(vkit, "LLM", functools.partial(vkit.LLM, **small), raising=False)
    monkeypatch.setattr(vkit, "EngineArgs", functools.partial(vkit.EngineArgs, **small), raising=False)
    names = {"MODEL": GOLDENS / "llama", "EMBEDDING_MODEL": GOLDENS / "llama_embed", "TEMPLATE": TEMPLATE}
    exec(compile(code, "docs/python.md", "exec"), {name: str(value) for name, value in names.items()})
