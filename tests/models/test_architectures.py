"""The table of architecture names: every one is computed, or refused with the reason."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from vkit.errors import ModelLoadError
from vkit.models import BUILTIN_MODELS, KNOWN_BUT_REFUSED, SPEECH_MODELS, model_class

MODELS_PAGE = Path(__file__).resolve().parents[3] / "shared" / "specs" / "models.md"
ADDED = ("Qwen2ForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "DeepseekV3ForCausalLM", "Cohere2ForCausalLM")
REFUSED = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "MiniMaxM2ForCausalLM", "Dots3NoteForCausalLM")
DRAFTS = ("Qwen3_5MTP", "Qwen3_5MoeMTP", "DFlashDraftModel", "Qwen3DSparkModel")
"""Models that only propose tokens for another; none of them answers by itself."""


def table() -> list[str]:
    """The class names of the specification's table."""
    rows = re.findall(r"^\| \d+ \| (\w+)", MODELS_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 40
    return rows


NAMES = [*table(), *ADDED, *REFUSED, *DRAFTS]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_computed_or_refused_with_a_reason(name: str) -> None:
    if name in BUILTIN_MODELS:
        module = importlib.import_module(f"vkit.models.{BUILTIN_MODELS[name]}")
        assert model_class(name) is getattr(module, name)
        assert name not in KNOWN_BUT_REFUSED
        return
    with pytest.raises(ModelLoadError, match=re.escape(repr(name))) as caught:
        model_class(name)
    message = str(caught.value)
    assert "is not supported" not in message, "known, so it must say why instead of listing all others"
    reason = "vkit transcribe" if name in SPEECH_MODELS else KNOWN_BUT_REFUSED[name]
    assert reason in message


def test_what_is_refused_is_what_nobody_can_run() -> None:
    assert {name for name in NAMES if name not in BUILTIN_MODELS} == {
        "KimiK3ForConditionalGeneration", *REFUSED, *SPEECH_MODELS, *DRAFTS,
    }  # fmt: skip


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ModelLoadError, match=r"'NoSuchModel' is not supported .*known: .*LlamaForCausalLM"):
        model_class("NoSuchModel")
