"""Names and shapes of tensors: everything expected is there, everything there is expected."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vkit import models
from vkit.errors import CheckpointError, ModelLoadError
from vkit.models import build_model, create_model, known_architectures, register_model


@pytest.fixture
def tiny(make_checkpoint: Callable[..., Any]) -> Any:
    return make_checkpoint("llama")


def test_missing_tensors_are_listed(tiny: Any, make_options: Callable[..., Any]) -> None:
    del tiny.tensors["model.layers.1.mlp.up_proj.weight"], tiny.tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensors: model.layers.1.mlp.up_proj.weight, lm_head.weight$"):
        build_model(tiny, make_options())


def test_unused_tensors_are_listed(tiny: Any, make_options: Callable[..., Any]) -> None:
    tiny.tensors["model.layers.0.surprise.weight"] = torch.ones(1)
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM does not use: model.layers.0.surprise.weight"):
        build_model(tiny, make_options())


def test_many_names_are_cut_short(tiny: Any, make_options: Callable[..., Any]) -> None:
    for name in [name for name in tiny.tensors if "layers" in name]:
        del tiny.tensors[name]
    with pytest.raises(CheckpointError, match=r"and 19 more$"):
        build_model(tiny, make_options())


def test_wrong_shapes_are_named(tiny: Any, make_options: Callable[..., Any]) -> None:
    tiny.tensors["model.norm.weight"] = torch.ones(65)
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \(65,\), the configuration means \(64,\)"):
        build_model(tiny, make_options())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_layers_beyond_the_configured_ones_are_listed(
    num_layers: int, make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    checkpoint = make_checkpoint("llama", num_hidden_layers=num_layers)
    checkpoint.tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(1)
    with pytest.raises(CheckpointError, match=rf"does not use: .*model\.layers\.{num_layers}\."):
        build_model(checkpoint, make_options())


def test_only_as_many_draft_layers_as_configured_are_ignorable(
    make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    checkpoint = make_checkpoint("llama", num_nextn_predict_layers=1)
    num_layers = checkpoint.config["num_hidden_layers"]
    checkpoint.tensors[f"model.layers.{num_layers}.eh_proj.weight"] = torch.ones(1)
    build_model(checkpoint, make_options())
    checkpoint.tensors[f"model.layers.{num_layers + 1}.eh_proj.weight"] = torch.ones(1)
    with pytest.raises(CheckpointError, match=rf"does not use: model\.layers\.{num_layers + 1}\.eh_proj\.weight \("):
        build_model(checkpoint, make_options())


def test_ignorable_tensors(tiny: Any, make_options: Callable[..., Any]) -> None:
    for name in (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "mtp.fc.weight",
        "model.layers.0.attn.masked_bias",
    ):
        tiny.tensors[name] = torch.ones(1)
    build_model(tiny, make_options())


def test_a_second_head_of_a_tied_model(
    make_checkpoint: Callable[..., Any], make_options: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_checkpoint("qwen3")
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"].clone()
    with caplog.at_level(logging.WARNING, logger="vkit.models"):
        build_model(checkpoint, make_options())
        assert not caplog.records
        checkpoint.tensors["lm_head.weight"][3, 4] += 1
        build_model(checkpoint, make_options())
    assert "lm_head.weight differs from the embedding and is ignored" in caplog.text


def test_untied_without_head_is_an_error(make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint("qwen3", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head.weight"):
        build_model(checkpoint, make_options())
    checkpoint = make_checkpoint("internlm2")
    del checkpoint.tensors["output.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensors: output.weight"):
        build_model(checkpoint, make_options())


def test_gpt2_without_prefix(make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint("gpt2")
    checkpoint.tensors = {name.removeprefix("transformer."): value for name, value in checkpoint.tensors.items()}
    checkpoint.tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    build_model(checkpoint, make_options())


def test_progress_ends_at_the_total(tiny: Any, make_options: Callable[..., Any]) -> None:
    seen: list[tuple[int, int]] = []
    build_model(tiny, make_options(), lambda done, total: seen.append((done, total)))
    total = tiny.num_weight_bytes
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 10


def test_weights_are_not_copied(tiny: Any, make_options: Callable[..., Any]) -> None:
    model: Any = build_model(tiny, make_options())
    assert model.model.embed_tokens.weight.data_ptr() == tiny.tensors["model.embed_tokens.weight"].data_ptr()


def test_without_weights(tiny: Any, make_options: Callable[..., Any]) -> None:
    """Cache specs and the tensor list need no weight; nothing is loaded."""
    tiny.load = None
    model = create_model(tiny, make_options(dtype="bfloat16", kv_cache_dtype="bfloat16"))
    specs = model.cache_specs()
    assert [spec.bytes_per_unit for spec in specs if spec is not None] == [2 * 2 * 16 * 2] * 3
    models.check_tensors(model, tiny)


def test_unknown_architecture(tiny: Any, make_options: Callable[..., Any]) -> None:
    tiny.architecture = "LlamaForCausalLmao"
    with pytest.raises(ModelLoadError, match=r"'LlamaForCausalLmao' is not supported \(known: .*LlamaForCausalLM"):
        build_model(tiny, make_options())


@pytest.mark.parametrize("architecture", sorted(models.KNOWN_BUT_REFUSED))
def test_known_but_refused(architecture: str, tiny: Any, make_options: Callable[..., Any]) -> None:
    tiny.architecture = architecture
    with pytest.raises(ModelLoadError, match=rf"'{architecture}' is known but not computed: \w+"):
        build_model(tiny, make_options())


def test_registering_an_architecture(
    tiny: Any, make_options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_registered", {})
    register_model("Mine", models.model_class("LlamaForCausalLM"))
    assert "Mine" in known_architectures()
    tiny.architecture = "Mine"
    assert create_model(tiny, make_options()).num_layers == 3


def test_an_entry_point_adds_an_architecture(
    tmp_path: Path, tiny: Any, make_options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("from vkit.models.llama import LlamaForCausalLM as Plugged\n")
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vkit.models]\nPluggedForCausalLM = mine:Plugged\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "PluggedForCausalLM" in known_architectures()
    tiny.architecture = "PluggedForCausalLM"
    assert create_model(tiny, make_options()).num_layers == 3


def test_every_builtin_name_resolves() -> None:
    for architecture in models.BUILTIN_MODELS:
        assert getattr(models.model_class(architecture), "__name__", None) == architecture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, r"config.json: hidden_size is missing"),
        ({"num_hidden_layers": -1}, r"config.json: num_hidden_layers must be at least 1, got -1"),
        ({"num_hidden_layers": 0}, r"config.json: num_hidden_layers must be at least 1, got 0"),
        ({"max_position_embeddings": 0}, r"config.json: max_position_embeddings must be at least 1, got 0"),
        ({"hidden_size": "64"}, r"config.json: hidden_size must be an integer, got '64'"),
        ({"rms_norm_eps": True}, r"config.json: rms_norm_eps must be a number, got True"),
        ({"hidden_act": "swoosh"}, r"config.json: hidden_act 'swoosh' is not supported \(known: silu"),
        ({"rope_scaling": {"rope_type": "spiral"}}, r"rope type 'spiral' is not supported"),
        ({"rope_scaling": 8}, r"config.json: rope_scaling must be an object, got 8"),
        ({"mlp_bias": 1}, r"config.json: mlp_bias must be true or false, got 1"),
    ],
)
def test_configuration_errors(
    changes: dict[str, Any], message: str, make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        build_model(make_checkpoint("llama", **changes), make_options())


def test_context_beyond_learned_positions(
    make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    for name in ("gpt2", "opt"):
        with pytest.raises(ModelLoadError, match=r"max_model_len 129 is above the 128"):
            create_model(make_checkpoint(name), make_options(max_model_len=129))


def test_settings_that_cannot_be(make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]) -> None:
    for name, key, value in (
        ("opt", "word_embed_proj_dim", 32),
        ("opt", "do_layer_norm_before", False),
        ("gpt2", "add_cross_attention", True),
        ("deepseek_v2", "topk_method", "best_of"),
        ("deepseek_v3", "scoring_func", "tanh"),
        ("kimi_linear", "mla_use_nope", False),
        ("kimi_linear", "moe_router_activation_func", "tanh"),
        ("kimi_linear", "linear_attn_config", {"full_attn_layers": [3], "kda_layers": "all"}),
        ("laguna", "gating", "per-token"),
        ("laguna", "moe_apply_router_weight_on_input", True),
        ("laguna", "num_attention_heads_per_layer", [4]),
        ("nemotron_h", "time_step_limit", [0.0, 1.0]),
        ("nemotron_h", "mamba_hidden_act", "gelu"),
        ("nemotron_h", "hybrid_override_pattern", "MX"),
    ):
        with pytest.raises(ModelLoadError, match=key):
            create_model(make_checkpoint(name, **{key: value}), make_options())


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3_5", "output_gate_type", "tanh"),
        ("qwen3_5", "mamba_ssm_dtype", "int8"),
        ("qwen3_5", "linear_value_head_order", "sorted"),
        ("gemma4", "layer_types", None),
        ("gemma4", "num_kv_shared_layers", 6),
        ("muse_glimmer", "layer_rope_theta", [1e4]),
    ],
)
def test_settings_of_a_text_part_that_cannot_be(
    name: str, key: str, value: object, make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    checkpoint = make_checkpoint(name)
    checkpoint.config["text_config"] = {**checkpoint.config["text_config"], key: value}
    with pytest.raises(ModelLoadError, match="shares keys" if key == "num_kv_shared_layers" else key):
        create_model(checkpoint, make_options())


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("qwen3_5", "Qwen3_5ForCausalLM"),
        ("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
        ("muse_glimmer", "MuseGlimmerForCausalLM"),
    ],
)
def test_text_only_exports(
    name: str, architecture: str, make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    """A flat configuration, no towers and no prefix of the text part; towers are ignored only where one may be."""
    whole = make_checkpoint(name)
    build_model(whole, make_options())
    checkpoint = make_checkpoint(name)
    checkpoint.config, checkpoint.architecture = checkpoint.config["text_config"], architecture
    checkpoint.tensors = {
        key.replace("model.language_model.", "model."): value
        for key, value in whole.tensors.items()
        if "visual" not in key and "vision" not in key
    }
    build_model(checkpoint, make_options())
    if name.startswith("qwen"):
        checkpoint.tensors["model.visual.pos_embed.weight"] = torch.ones(1)
        with pytest.raises(CheckpointError, match=r"does not use: model.visual.pos_embed.weight"):
            build_model(checkpoint, make_options())


def test_block_types_spell_the_pattern(make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]) -> None:
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "mamba", "moe"]
    checkpoint = make_checkpoint("nemotron_h", layers_block_type=kinds, hybrid_override_pattern=None)
    build_model(checkpoint, make_options())


def test_laguna_spellings(make_checkpoint: Callable[..., Any], make_options: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint("laguna")
    for ours, theirs in (("experts.e_score", "gate.e_score"), ("shared_expert.", "shared_experts.")):
        checkpoint.tensors = {key.replace(ours, theirs): value for key, value in checkpoint.tensors.items()}
    build_model(checkpoint, make_options())


def test_config_spellings(golden_path: Callable[[str], Path], make_options: Callable[..., Any]) -> None:
    """Old and new rope keys mean the same."""
    config = json.loads((golden_path("gemma3") / "config.json").read_text())
    old: Any = models.model_class("Gemma3ForCausalLM")(models.HFConfig(config), make_options())
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"):
        del config[key]
    del config["_sliding_window_pattern"]
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    new: Any = models.model_class("Gemma3ForCausalLM")(models.HFConfig({"text_config": config}), make_options())
    for one, other in ((old.rotary.spec, new.rotary.spec), (old.local_rotary.spec, new.local_rotary.spec)):
        assert (one.base, one.kind, one.width, one.scaling.get("factor")) == (
            other.base,
            other.kind,
            other.width,
            other.scaling.get("factor"),
        )
    assert old.cache_specs() == new.cache_specs()
