"""What is checked before weights are read."""

from __future__ import annotations

import logging
import sys
import textwrap
from pathlib import Path

import pytest

from vkit import LLM, EngineArgs, InvalidRequest, SamplingParams, UsageError
from vkit.benchmark.synthetic import write_synthetic
from vkit.loading import check_model, load_model

PROCESSORS = """
    class Always:
        def __init__(self, vocab_size):
            self.vocab_size = vocab_size

        @classmethod
        def validate_params(cls, params):
            if params.extra_args.get("strength", 0) < 0:
                raise ValueError("strength: must not be negative")

        def is_argmax_invariant(self):
            return False

        def update_state(self, update):
            if update is not None and update.added:
                self.strength = update.added[0].params.extra_args.get("strength", 0)

        def apply(self, logits):
            logits[:, 7] += self.strength
            return logits


    class Broken(Always):
        def __init__(self, vocab_size):
            raise RuntimeError("no")


    NOTHING = 3
"""


@pytest.fixture
def processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `steering_for_tests` that can be imported."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "steering_for_tests.py").write_text(textwrap.dedent(PROCESSORS))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "steering_for_tests", raising=False)


@pytest.mark.usefixtures("processors")
def test_logits_processors_by_name(tmp_path: Path) -> None:
    model = str(write_synthetic(tmp_path))
    with LLM(model, logits_processors=["steering_for_tests:Always"], max_model_len=64, threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, extra_args={"strength": 1e6})
        assert llm.generate([[1, 2]], params)[0].outputs[0].token_ids == [7, 7, 7]
        with pytest.raises(InvalidRequest, match="strength: must not be negative") as caught:
            llm.generate([[1, 2]], params.with_(extra_args={"strength": -1}))
        assert caught.value.param == "extra_args"


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module_here:X", "cannot be imported"),
        ("steering_for_tests:Missing", "is no class with is_argmax_invariant, update_state, apply"),
        ("steering_for_tests:NOTHING", "is no class"),
    ],
)
def test_names_of_no_processor_are_refused_before_weights(tmp_path: Path, path: str, said: str) -> None:
    model = str(write_synthetic(tmp_path))
    with pytest.raises(UsageError, match=f"--logits-processors: .*{said}"):
        check_model(EngineArgs(model=model, logits_processors=path))


@pytest.mark.usefixtures("processors")
def test_a_processor_that_cannot_be_built_is_told(tmp_path: Path) -> None:
    args = EngineArgs(model=str(write_synthetic(tmp_path)), logits_processors="steering_for_tests:Broken", threads=1)
    with pytest.raises(UsageError, match="steering_for_tests:Broken: cannot be built: RuntimeError"):
        load_model(args)


def test_settings_reach_the_engine(tmp_path: Path) -> None:
    model = str(write_synthetic(tmp_path))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    args = EngineArgs(
        model=model,
        kv_cache_metrics=True,
        kv_cache_dtype="bfloat16",
        dtype="float32",
        chat_template=template,
        chat_template_content_format="openai",
        threads=1,
    )
    loaded = load_model(args)
    try:
        assert loaded.chat_template is not None
        assert loaded.chat_template.content_format == "openai"
        assert loaded.compile_template(template).content_format == "openai"
        families = {family.name: family for family in loaded.engine.metric_families()}
        assert families["vllm:cache_config_info"].samples[0].labels["cache_dtype"] == "bfloat16"
        assert any("kv_block" in name for name in families)
        assert loaded.served_model_names == (tmp_path.name,)
    finally:
        loaded.close()


def test_overrides_the_checkpoint_does_not_know_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("vkit"), "warning", lambda text, *args: lines.append(text % args))
    model = str(write_synthetic(tmp_path))
    check_model(EngineArgs(model=model, hf_overrides={"vocab_sise": 1, "no_such_key": 2, "hidden_act": "silu"}))
    (line,) = [line for line in lines if line.startswith("--hf-overrides")]
    assert "no_such_key, vocab_sise" in line
    assert "hidden_act" not in line
