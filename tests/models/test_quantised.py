"""Quantised checkpoints through the paged cache, against recorded logits: weights alone, and activations rounded."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vkit.errors import CheckpointError, ModelLoadError
from vkit.kernels import ScaledMatrix
from vkit.layers import Attention, Experts, Placement
from vkit.loaders import open_checkpoint
from vkit.models import build_model
from vkit.quantization import StackedLinear

Begin = Callable[..., tuple[Any, Any]]
"""Name and options -> golden and driver; see the conftest."""
ROUNDED = ["ct_fp8_dynamic", "ct_int8_w8a8", "fp8_block", "fp8_static", "nvfp4_ct", "nvfp4_modelopt"]
"""Those whose activations are rounded too."""
PLAIN = [
    *("awq", "ct_int4", "ct_int4_asym", "gptq", "gptq_8bit", "gptq_act_order"),
    *("mxfp4_ct", "nvfp4a16_ct"),
]
TOLERANCE = 1e-4
"""Ten times below what is asked of weights, far below what is asked of rounded activations."""


class WeightsOnly:
    """A checkpoint whose activations stay as they are."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def load(self, name: str) -> Any:
        weight = self._checkpoint.load(name)
        return dataclasses.replace(weight, inputs=None) if isinstance(weight, ScaledMatrix) else weight


def test_every_golden_is_judged(golden_path: Callable[[str], Path]) -> None:
    assert sorted(path.name for path in golden_path("quant").iterdir()) == sorted(ROUNDED + PLAIN)


@pytest.mark.parametrize("backend", ["reference", "native"], indirect=True)
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("name", PLAIN + ROUNDED)
@pytest.mark.usefixtures("backend")
def test_weights(
    name: str,
    chunk: int,
    golden_path: Callable[[str], Path],
    load_golden: Callable[..., Any],
    make_driver: Callable[..., Any],
    make_options: Callable[..., Any],
) -> None:
    """Plain activations: logits and greedy tokens are those of the dequantised weights."""
    golden, options = load_golden(f"quant/{name}"), make_options(block_size=4)
    model = build_model(WeightsOnly(open_checkpoint(golden_path(f"quant/{name}"))), options)  # type: ignore[arg-type]
    found = make_driver(model, options).continue_greedily({"a": golden.prompt()}, chunk)["a"]
    torch.testing.assert_close(found.logits, golden.logits(), atol=TOLERANCE, rtol=0)
    assert found.token_ids == golden.greedy()


@pytest.mark.parametrize("name", PLAIN + ROUNDED)
def test_fast_products(name: str, begin: Begin) -> None:
    """With what the machine has, activations rounded by 32 or not at all: logits nearly parallel to those recorded."""
    golden, driver = begin(f"quant/{name}", block_size=4)
    logits = driver.continue_greedily({"a": golden.prompt()}, 64, steps=1)["a"].logits
    assert torch.nn.functional.cosine_similarity(logits, golden.logits(), dim=1).min() > 0.999


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.usefixtures("backend")
def test_rounded_activations(name: str, chunk: int, begin: Begin) -> None:
    """As the checkpoint declares them."""
    golden, driver = begin(f"quant/{name}", block_size=4)
    logits = driver.continue_greedily({"a": golden.prompt()}, chunk, steps=1)["a"].logits
    torch.testing.assert_close(logits, golden.tensors["logits_actq"], atol=TOLERANCE, rtol=0)
    assert (logits - golden.logits()).abs().max() > 20 * TOLERANCE


@pytest.mark.parametrize("name", ["awq", "fp8_static", "nvfp4a16_ct"])
def test_bfloat16(name: str, begin: Begin) -> None:
    golden, driver = begin(f"quant/{name}", dtype="bfloat16", kv_cache_dtype="bfloat16")
    logits = driver.continue_greedily({"a": golden.prompt()}, 64, steps=1)["a"].logits
    expected = golden.tensors.get("logits_actq", golden.logits())
    assert (logits - expected).abs().max() < 0.05 * (expected.max() - expected.min())


@pytest.mark.parametrize("name", PLAIN + ROUNDED)
def test_weights_stay_packed(name: str, golden_path: Callable[[str], Path], make_options: Callable[..., Any]) -> None:
    """A model holds the file's bytes: codes are views of the mapping, and only zero points are spread to bytes."""
    checkpoint = open_checkpoint(golden_path(f"quant/{name}"))
    stored = sum(path.stat().st_size for path in checkpoint.path.glob("model.safetensors"))
    assert 0.9 * stored < checkpoint.num_weight_bytes <= stored
    model: Any = build_model(checkpoint, make_options())
    names = [name for name in checkpoint.tensor_names() if checkpoint.tensor_info(name).is_packed]
    assert len(names) == 14
    held = sum(checkpoint.load(name).nbytes for name in names)
    assert held <= 1.1 * sum(checkpoint.tensor_info(name).nbytes for name in names)
    method = model.model.layers[0].self_attn.qkv_proj._method
    assert isinstance(method, StackedLinear)
    weight: Any = method.parts[0]
    codes = weight.weight.codes
    again: Any = checkpoint.load("model.layers.0.self_attn.q_proj.weight")
    assert codes.data_ptr() == again.codes.data_ptr()


# What is refused


@pytest.fixture
def altered(tmp_path: Path, golden_path: Callable[[str], Path]) -> Callable[..., Path]:
    """A copy of a golden with some tensors changed (None: removed) and keys of its declaration changed."""

    def alter(name: str, tensors: dict[str, Any] | None = None, **keys: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(golden_path(f"quant/{name}"), folder)
        for path in folder.iterdir():
            path.chmod(0o644)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"].update(keys)
        (folder / "config.json").write_text(json.dumps(config))
        stored = load_file(folder / "model.safetensors")
        for tensor, value in (tensors or {}).items():
            stored[tensor] = value(stored[tensor]) if callable(value) else value
            if value is None:
                del stored[tensor]
        save_file({key: value.contiguous() for key, value in stored.items()}, folder / "model.safetensors")
        return folder

    return alter


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
MISSING = {
    "awq": ["qweight", "qzeros", "scales"],
    "gptq": ["qweight", "qzeros", "scales"],
    "gptq_act_order": ["g_idx"],
    "ct_int4": ["weight_packed", "weight_scale", "weight_shape"],
    "ct_int4_asym": ["weight_zero_point"],
    "ct_int8_w8a8": ["weight_scale"],
    "ct_fp8_dynamic": ["weight_scale"],
    "fp8_static": ["weight_scale", "input_scale"],
    "fp8_block": ["weight_scale_inv"],
    "nvfp4_ct": ["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"],
    "nvfp4_modelopt": ["weight", "weight_scale", "weight_scale_2", "input_scale"],
    "mxfp4_ct": ["weight_packed", "weight_scale"],
}


@pytest.mark.parametrize(("name", "suffix"), [(name, suffix) for name, all_ in MISSING.items() for suffix in all_])
def test_a_missing_tensor_is_named(name: str, suffix: str, altered: Callable[..., Path]) -> None:
    with pytest.raises(ModelLoadError, match=f"{Q}.{suffix} is missing, and the declared quantisation needs it"):
        open_checkpoint(altered(name, {f"{Q}.{suffix}": None}))


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("awq", "qzeros", lambda t: t[1:], r"has shape \(9, 16\), expected \(10, 16\)"),
        ("awq", "scales", lambda t: t.int(), r"is int32, expected float16 or bfloat16 or float32"),
        ("gptq", "scales", lambda t: t[:, 1:], r"has shape \(10, 127\), expected \(10, 128\)"),
        ("gptq", "g_idx", lambda t: t[1:], r"has shape \(319,\), expected \(320,\)"),
        ("ct_int4", "weight_scale", lambda t: t[:, 1:], r"has shape \(128, 9\), which does not fit"),
        ("ct_int4_asym", "weight_zero_point", lambda t: t[1:], r"has shape \(15, 5\), expected \(16, 5\)"),
        ("ct_int8_w8a8", "weight", lambda t: t.float(), r"is float32, expected int8"),
        ("fp8_block", "weight_scale_inv", lambda t: t[:, 1:], r"has shape \(1, 2\), expected \(1, 3\)"),
        ("fp8_static", "input_scale", lambda t: t.repeat(2), r"has shape \(2,\), expected \(\) or \(1,\)"),
        ("nvfp4_ct", "weight_scale", lambda t: t.float(), r"is float32, expected float8_e4m3fn"),
        ("mxfp4_ct", "weight_scale", lambda t: t[:, 1:], r"has shape \(128, 9\), expected \(128, 10\)"),
    ],
)
def test_a_wrong_tensor_is_named(name: str, suffix: str, change: Any, message: str, altered: Any) -> None:
    with pytest.raises(ModelLoadError, match=rf"{DOWN}\.{suffix} {message}"):
        open_checkpoint(altered(name, {f"{DOWN}.{suffix}": change}))


def test_scales_that_nobody_uses(altered: Callable[..., Path], make_options: Callable[..., Any]) -> None:
    folder = altered("ct_int4", {f"{Q}.input_scale": torch.ones(1)})
    with pytest.raises(CheckpointError, match=f"does not use: {Q}.input_scale"):
        build_model(open_checkpoint(folder), make_options())


def test_codes_of_a_layer_that_is_declared_plain(altered: Callable[..., Path]) -> None:
    with pytest.raises(ModelLoadError, match=f"{Q}.weight is float8_e4m3fn, and the configuration declares no format"):
        open_checkpoint(altered("fp8_static", ignored_layers=["lm_head", Q]))


def test_a_quantised_embedding(altered: Callable[..., Path], make_options: Callable[..., Any]) -> None:
    table = "model.embed_tokens"
    tensors = {
        f"{table}.weight": lambda t: t.to(torch.float8_e4m3fn),
        f"{table}.weight_scale": torch.ones(()),
        f"{table}.input_scale": torch.ones(()),
    }
    with pytest.raises(ModelLoadError, match="a quantised embedding has no loader"):
        build_model(open_checkpoint(altered("fp8_static", tensors)), make_options())


def test_impossible_groups_and_shapes_in_tensors(altered: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(altered("gptq_act_order", {f"{Q}.g_idx": lambda t: t + 1}))
    with pytest.raises(ModelLoadError, match=f"{Q}: g_idx names groups 1..4, expected 0..3"):
        checkpoint.load(f"{Q}.weight")
    checkpoint = open_checkpoint(altered("ct_int4", {f"{Q}.weight_shape": lambda t: t + 1}))
    with pytest.raises(ModelLoadError, match=rf"{Q}: weight_shape is \[129, 129\], expected \[128, 128\]"):
        checkpoint.load(f"{Q}.weight")


# What differs from the goldens and must work


def test_layers_that_lists_leave_plain(
    altered: Callable[..., Path], golden_path: Callable[[str], Path], make_options: Callable[..., Any]
) -> None:
    """By exact name, part of a name, glob and regular expression; the model then holds a dense layer among packed."""
    dense: Any = open_checkpoint(golden_path("quant/ct_int4")).load(f"{Q}.weight")
    plain = {f"{Q}.weight": dense.dequantize(torch.float16)}
    cases: dict[str, tuple[list[str], dict[str, Any]]] = {
        "fp8_static": (["weight_scale", "input_scale"], {"ignored_layers": [Q, "lm_head"]}),
        "awq": (["qweight", "qzeros", "scales"], {"modules_to_not_convert": ["layers.0.self_attn.q"]}),
        "nvfp4_modelopt": (["weight_scale", "weight_scale_2", "input_scale"], {"exclude_modules": ["*.0.*.q_proj"]}),
        "ct_int4": (["weight_packed", "weight_scale", "weight_shape"], {"ignore": [r"re:.*layers\.0.*q_proj$"]}),
        "gptq": (["qweight", "qzeros", "scales", "g_idx"], {"dynamic": {r"-:.*\.0\..*q_proj": {}}}),
    }
    for name, (suffixes, keys) in cases.items():
        folder = altered(name, {**{f"{Q}.{suffix}": None for suffix in suffixes}, **plain}, **keys)
        checkpoint = open_checkpoint(folder)
        assert not checkpoint.tensor_info(f"{Q}.weight").is_packed
        build_model(checkpoint, make_options())


@pytest.mark.parametrize("name", ["k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"])
def test_scales_of_the_cache(
    altered: Callable[..., Path], make_options: Callable[..., Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = "model.layers.0.self_attn."
    checkpoint = open_checkpoint(altered("fp8_static", {where + name: torch.tensor(0.25)}))
    assert where + name not in checkpoint.tensor_names()
    build_model(checkpoint, make_options())
    assert "scales of cached keys and values are not used" in caplog.text
    model = build_model(checkpoint, make_options(kv_cache_dtype="float8_e4m3fn"))
    layers = [module for _, module in model.walk() if isinstance(module, Attention)]
    assert [(layer.k_scale, layer.v_scale) for layer in layers[:2]] == [
        (0.25, 0.25 if name == "kv_scale" else 1.0),
        (1.0, 1.0),
    ]


def test_an_fp8_cache_without_scales_is_announced(
    altered: Callable[..., Path], make_options: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    build_model(open_checkpoint(altered("fp8_static", {})), make_options(kv_cache_dtype="float8_e5m2"))
    assert "no scales for an fp8 cache here: keys and values are rounded to fp8 with scale 1.0" in caplog.text


@pytest.mark.parametrize("backend", ["reference", "native"], indirect=True)
@pytest.mark.usefixtures("backend")
def test_experts(golden_path: Callable[[str], Path]) -> None:
    """Experts of codes and scales, each with a scale of its own, against plain torch."""
    checkpoint = open_checkpoint(golden_path("quant/nvfp4a16_ct"))
    experts = Experts(2, 128, 320, activation="silu")
    names = ("gate_proj", "up_proj", "down_proj")
    tensors: dict[str, Any] = {
        f"{i}.{name}.weight": checkpoint.load(f"model.layers.{i}.mlp.{name}.weight") for i in (0, 1) for name in names
    }
    experts.set_tensors(tensors, Placement(torch.device("cpu"), torch.float32))
    x, ids = torch.randn(3, 128), torch.tensor([[0], [1], [0]])
    expected = []
    for row, (i,) in zip(x, ids.tolist(), strict=True):
        gate, up, down = (tensors[f"{i}.{name}.weight"].dequantize() for name in names)
        expected.append(down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    torch.testing.assert_close(experts(x, torch.ones(3, 1), ids), torch.stack(expected))
