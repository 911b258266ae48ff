"""Every architecture: a golden safetensors model, converted by the rules of the format, loads back as what it was.

Tensor names of the converted file come from the `gguf` package, values from the specification's forward transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vkit.errors import CheckpointError, ModelLoadError
from vkit.loaders import Checkpoint, open_checkpoint
from vkit.loaders.gguf_architectures import ARCHITECTURES
from vkit.quantization import QuantizedTensor

Config = dict[str, Any]
Write = Callable[..., bytes]

IRRELEVANT = {
    # Of training, of generation, or of the library that wrote the file.
    "attention_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "hidden_dropout", "initializer_range", "use_cache",
    "transformers_version", "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "add_cross_attention", "reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx", "scale_attn_weights",
    "max_window_layers", "use_bidirectional_attention", "pad_token_id",
    # Said by layer_types, or by rope_theta and rope_scaling.
    "sliding_window_pattern", "_sliding_window_pattern", "rope_parameters",
}  # fmt: skip


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Forward map of q and k rows: on each head [2, D/2] -> [D/2, 2]."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@dataclass(frozen=True)
class Case:
    """A golden and how its architecture converts."""

    golden: str
    arch: str
    keys: dict[str, Any] = field(default_factory=dict)
    permuted: bool = False
    plus_one: bool = False
    vectors: dict[str, list[float]] = field(default_factory=dict)


CASES = [
    Case("llama", "llama", permuted=True,
         vectors={"rope_freqs": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}),
    Case("mistral", "llama", {"attention.sliding_window": 16}, permuted=True),
    Case("mixtral", "llama", {"expert_count": 6, "expert_used_count": 2}, permuted=True),
    Case("mistral", "mistral3", {"attention.sliding_window": 16}, permuted=True),
    Case("internlm3", "internlm2", permuted=True),
    Case("qwen2", "qwen2"),
    Case("qwen3", "qwen3"),
    Case("qwen3_moe", "qwen3moe",
         {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}),
    Case("gemma", "gemma", plus_one=True),
    Case("gemma2", "gemma2",
         {"attention.sliding_window": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0,
          "attention.scale": 24**-0.5}, plus_one=True),
    Case("gemma3", "gemma3",
         {"attention.sliding_window": 16, "attention.scale": 24**-0.5, "rope.freq_base_swa": 10000.0,
          "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, plus_one=True),
    Case("gpt2", "gpt2"),
    Case("phi", "phi2", {"rope.dimension_count": 8}),
    Case("phi3", "phi3", {"rope.dimension_count": 12, "rope.scaling.original_context_length": 32},
         vectors={"rope_factors_long": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
                  "rope_factors_short": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}),
    Case("granite", "granite",
         {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.05, "logit_scale": 8.0}, permuted=True),
    Case("minicpm", "minicpm",
         {"embedding_scale": 12.0, "residual_scale": 1.4 / math.sqrt(3), "logit_scale": 64 / 256}, permuted=True),
    Case("olmo2", "olmo2"),
    Case("olmo3", "olmo2",
         {"attention.sliding_window": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
          "rope.scaling.original_context_length": 32, "rope.scaling.yarn_attn_factor": 1.2079441541679836,
          "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}),
    Case("glm4", "glm4", {"rope.dimension_count": 8}),
    Case("cohere", "command-r", {"logit_scale": 0.5}),
    Case("cohere2", "cohere2", {"logit_scale": 0.25, "attention.sliding_window": 16}),
    Case("stablelm", "stablelm", {"rope.dimension_count": 4}),
    Case("stablelm_parallel", "stablelm", {"rope.dimension_count": 4}),
]  # fmt: skip


def metadata_of(config: Config, case: Case) -> dict[str, Any]:
    """The keys a converter writes for a Hugging Face configuration."""
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    head_dim = config.get("head_dim") or hidden // heads
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    keys = {
        "block_count": config.get("num_hidden_layers") or config["n_layer"],
        "context_length": config.get("max_position_embeddings") or config["n_positions"],
        "embedding_length": hidden,
        "feed_forward_length": config.get("intermediate_size") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(theta),
        "vocab_size": config["vocab_size"],
    }
    for hf, key in {
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
    }.items():
        if hf in config:
            keys[key] = config[hf]
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return {"general.architecture": case.arch} | {f"{case.arch}.{k}": v for k, v in (keys | case.keys).items()} | ids


def converted(golden: Checkpoint, case: Case) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """The golden's tensors as a converter writes them."""
    import gguf

    config = golden.config
    num_layers = config.get("num_hidden_layers") or config["n_layer"]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == case.arch)
    name_map = gguf.get_tensor_name_map(arch, num_layers)
    arrays: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name in golden.tensor_names():
        array = golden.load(name)
        assert isinstance(array, torch.Tensor)
        values = array.numpy()
        if case.permuted and ".q_proj." in name:
            values = interleaved(values, config["num_attention_heads"])
        if case.permuted and ".k_proj." in name:
            values = interleaved(values, config["num_key_value_heads"])
        if case.plus_one and "norm" in name:
            values = values + 1
        if case.arch == "gpt2" and ".h." in name and values.ndim == 2:
            values = values.T
        if ".experts." in name:
            before, _, rest = name.partition(".experts.")
            number, _, rest = rest.partition(".")
            stacks.setdefault(f"{before}.experts.{rest}", {})[int(number)] = values
            continue
        if "layernorm.norms." in name:
            before, _, rest = name.partition(".norms.")
            stacks.setdefault(f"{before}.weight", {})[int(rest.partition(".")[0])] = values
            continue
        arrays[name] = values
    arrays |= {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}
    tensors = {}
    for name, values in arrays.items():
        gguf_name = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        tensors[gguf_name] = (values.shape, "F32", np.ascontiguousarray(values, np.float32).tobytes())
    for name, numbers in case.vectors.items():
        tensors[f"{name}.weight"] = ((len(numbers),), "F32", np.array(numbers, np.float32).tobytes())
    return tensors


@pytest.fixture(params=CASES, ids=lambda case: f"{case.golden}-{case.arch}")
def case(request: pytest.FixtureRequest) -> Case:
    value = request.param
    assert isinstance(value, Case)
    return value


@pytest.fixture
def golden(shared: Path, case: Case) -> Checkpoint:
    return open_checkpoint(shared / "goldens/models" / case.golden)


@pytest.fixture
def loaded(tmp_path: Path, golden: Checkpoint, case: Case, gguf_file: Write) -> Checkpoint:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file(metadata_of(golden.config, case), converted(golden, case)))
    return open_checkpoint(path)


def test_tensors(golden: Checkpoint, loaded: Checkpoint, case: Case) -> None:
    names = golden.tensor_names()
    for name in sorted(loaded.tensor_names()):
        weight, info = loaded.load(name), loaded.tensor_info(name)
        assert isinstance(weight, torch.Tensor)
        assert (tuple(weight.shape), weight.dtype) == (info.shape, info.dtype)
        if ".experts." in name and name not in names:
            before, _, rest = name.partition(".experts.")
            members = [f"{before}.experts.{i}.{rest}" for i in range(weight.shape[0])]
            expected = torch.stack([golden.load(member) for member in members])
            names -= set(members)
        else:
            expected = golden.load(name)
            names.remove(name)
        tolerance = 1.2e-7 if case.plus_one and "norm" in name else 0
        torch.testing.assert_close(weight, expected, atol=tolerance, rtol=0, msg=name)
    assert not names, "tensors of the golden that the file does not give"


def test_config(golden: Checkpoint, loaded: Checkpoint, case: Case) -> None:
    config, expected = loaded.config, golden.config
    wrong = {
        key: (config.get(key), value)
        for key, value in expected.items()
        if key not in IRRELEVANT and not same(config.get(key), value) and key != "rope_scaling"
    }
    if case.arch == "internlm2":  # loads as the Llama it is
        assert wrong.pop("architectures") == (["LlamaForCausalLM"], ["InternLM3ForCausalLM"])
        wrong = {key: pair for key, pair in wrong.items() if key not in ("model_type", "bias", "qkv_bias")}
    if expected.get("head_dim", 0) is None:
        del wrong["head_dim"]
    if expected.get("n_inner", 0) is None:
        assert wrong.pop("n_inner") == (4 * expected["n_embd"], None)
    if config.get("sliding_window") is None and set(expected.get("layer_types", [])) == {FULL}:
        del wrong["layer_types"]
    if case.arch == "mistral3":
        assert config["sliding_window"] == 16
    assert wrong == {}
    parameters = expected.get("rope_parameters", {})
    if "rope_theta" in parameters:
        assert config["rope_theta"] == parameters["rope_theta"]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)  # the file keeps float32
    return bool(one == other)


EXPECTED_SCALING = {
    "llama": {"rope_type": "frequency_divisors", "divisors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]},
    "gemma3": {"rope_type": "linear", "factor": 8.0},
    "phi3": {
        "rope_type": "longrope",
        "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
        "short_factor": pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4, 1.5]),
        "original_max_position_embeddings": 32,
    },
    "olmo3": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": pytest.approx(1.2079441541679836),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}


def test_rope_scaling(loaded: Checkpoint, case: Case) -> None:
    assert loaded.config.get("rope_scaling") == EXPECTED_SCALING.get(case.golden)


def test_every_architecture_has_a_case() -> None:
    """Those whose layers differ are tested through the converter (tests/conversion), qwen3vl beside its tower
    (tests/loaders/test_mmproj.py), against logits."""
    mixed = {name for name, item in ARCHITECTURES.items() if item.config.__module__.endswith("_mixed")}
    assert {case.arch for case in CASES} | {"qwen35", "qwen3vl"} | mixed == set(ARCHITECTURES)


def test_qwen35() -> None:
    """The golden's own GGUF file beside its safetensors: tensors equal, value heads in tiled order."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models" / "qwen3_5"
    plain, packed = open_checkpoint(folder), open_checkpoint(folder / "model-f32.gguf")
    text = plain.config["text_config"]
    for key in packed.config.keys() & text.keys() - IRRELEVANT - {"bos_token_id", "eos_token_id", "dtype"}:
        assert packed.config[key] == text[key], key
    assert packed.config["partial_rotary_factor"] == 0.25
    num_keys, num_values, value_dim = 2, 4, 16
    order = torch.tensor(
        [k * (num_values // num_keys) + j for j in range(num_values // num_keys) for k in range(num_keys)]
    )
    rows = (order[:, None] * value_dim + torch.arange(value_dim)).flatten()
    keys = torch.arange(2 * num_keys * 16)
    takes = {"A_log": order, "dt_bias": order, "in_proj_a.weight": order, "in_proj_b.weight": order}
    takes |= {"in_proj_z.weight": rows} | dict.fromkeys(
        ("in_proj_qkv.weight", "conv1d.weight"), torch.cat([keys, len(keys) + rows])
    )
    for name in packed.tensor_names():
        expected = plain.load(name.replace("model.", "model.language_model.", 1))
        found = packed.load(name)
        assert isinstance(expected, torch.Tensor)
        assert isinstance(found, torch.Tensor)
        assert packed.tensor_info(name).shape == tuple(expected.shape)
        part = name.partition("linear_attn.")[2]
        expected = (
            expected[:, rows] if part == "out_proj.weight" else expected[takes[part]] if part in takes else expected
        )
        torch.testing.assert_close(found, expected)
    assert len(packed.tensor_names()) == len(
        [name for name in plain.tensor_names() if "visual" not in name and "mtp" not in name]
    )


SLIDING, FULL = "sliding_attention", "full_attention"


def tiny(keys: dict[str, Any], arch: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The tiny llama metadata under another architecture's name, with changes; None deletes a key."""
    renamed = {key.replace("llama.", f"{arch}.", 1) if key.startswith("llama.") else key: v for key, v in keys.items()}
    renamed["general.architecture"] = arch
    for key, value in changes.items():
        renamed[f"{arch}.{key}"] = value
    return {key: value for key, value in renamed.items() if value is not None}


@pytest.fixture
def open_tiny(
    tmp_path: Path, gguf_file: Write, llama_keys: dict[str, Any], llama_tensors: dict[str, Any]
) -> Callable[..., Checkpoint]:
    """Opens the tiny llama file under another architecture's name, with changed keys and more tensors."""

    def open_(arch: str, changes: dict[str, Any], **more: Any) -> Checkpoint:
        path = tmp_path / "tiny.gguf"
        tensors = llama_tensors | {name.replace("__", "."): value for name, value in more.items()}
        path.write_bytes(gguf_file(tiny(llama_keys, arch, changes), tensors))
        return open_checkpoint(path)

    return open_


def vector(*numbers: float) -> tuple[tuple[int, ...], str, bytes]:
    return (len(numbers),), "F32", np.array(numbers, np.float32).tobytes()


@pytest.mark.parametrize(
    ("arch", "changes", "expected"),
    [
        ("gemma3", {}, {"sliding_window": None, "layer_types": [FULL], "query_pre_attn_scalar": 8.0}),
        ("gemma3", {"attention.sliding_window": 8}, {"layer_types": [SLIDING], "rope_local_base_freq": 10000.0}),
        ("gemma3", {"attention.sliding_window": 8, "attention.sliding_window_pattern": np.array([False])},
         {"layer_types": [FULL]}),
        ("gemma3", {"attention.sliding_window": 8, "attention.sliding_window_pattern": 1}, {"layer_types": [FULL]}),
        ("gemma2", {}, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}),
        ("gemma2", {"final_logit_softcapping": 0.0}, {"final_logit_softcapping": None}),
        ("minicpm", {}, {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}),
        ("llama", {"pooling_type": 3}, {"architectures": ["LlamaModel"], "pooling_type": "last"}),
        ("llama", {"rope.freq_base": None}, {"rope_theta": 10000.0}),
        ("llama", {"attention.head_count_kv": np.array([2, 2], np.int32)}, {"num_key_value_heads": 2}),
        ("llama", {"attention.head_count_kv": None, "attention.head_count": 2}, {"num_key_value_heads": 2}),
        ("llama", {"rope.scaling.type": "none"}, {"rope_scaling": None}),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {"rope_scaling": None}),
        ("llama", {"rope.scale_linear": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("mistral3",
         {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 8,
          "rope.scaling.yarn_log_multiplier": 1.0},
         {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "mscale": 1.0,
                           "mscale_all_dim": 1.0}}),
    ],
)  # fmt: skip
def test_defaults_and_variants(
    open_tiny: Callable[..., Checkpoint], arch: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = open_tiny(arch, changes).config
    assert {key: config[key] for key in expected} == expected


def test_gemma_27b_scales_by_the_width_per_head(
    open_tiny: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vkit.loaders import gguf_config

    changes = {"attention.key_length": 16, "attention.value_length": 16}
    assert open_tiny("gemma3", changes).config["query_pre_attn_scalar"] == 16
    monkeypatch.setitem(gguf_config.GEMMA_27B_LAYERS, "gemma3", 1)
    assert open_tiny("gemma3", changes).config["query_pre_attn_scalar"] == 32 / 4


def test_draft_layers_are_counted_apart(open_tiny: Callable[..., Checkpoint]) -> None:
    config = open_tiny("llama", {"block_count": 2, "nextn_predict_layers": 1}).config
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (1, 1)


def test_divisors_and_linear_scaling_multiply(open_tiny: Callable[..., Checkpoint]) -> None:
    changes = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    config = open_tiny("llama", changes, rope_freqs__weight=vector(1, 2, 4, 8)).config
    assert config["rope_scaling"] == {"rope_type": "frequency_divisors", "divisors": [2.0, 4.0, 8.0, 16.0]}


@pytest.mark.parametrize(
    ("arch", "changes", "expected"),
    [
        ("llama", {"block_count": None}, r"'llama\.block_count' is missing"),
        ("llama", {"attention.layer_norm_rms_epsilon": None}, r"'llama\.attention\.layer_norm_rms_epsilon' is missing"),
        ("granite", {}, r"'granite\.embedding_scale' is missing"),
        ("cohere2", {}, r"'cohere2\.attention\.layer_norm_epsilon' is missing"),
        ("llama", {"block_count": "3"}, "is a str, expected an integer"),
        ("llama", {"block_count": True}, "is True, expected an integer"),
        ("llama", {"block_count": 2**31}, "is 2147483648, but the file holds only 11 tensors"),
        ("llama", {"nextn_predict_layers": 1}, "leaves no layer"),
        ("llama", {"attention.head_count": 0}, "is 0, expected at least 1"),
        ("llama", {"attention.head_count": 3}, "3 attention heads cannot share 2"),
        ("llama", {"attention.head_count": 6, "attention.head_count_kv": 6}, "do not divide"),
        ("llama", {"attention.head_count": 16, "attention.head_count_kv": 16}, "cannot be cut into 16 heads"),
        ("llama", {"rope.freq_base": -1.0}, "is -1.0, expected a positive number"),
        ("llama", {"rope.freq_base": math.nan}, "is nan, expected a finite number"),
        ("llama", {"rope.dimension_count": 64}, "expected an even number up to the head size"),
        ("llama", {"embedding_length": 64}, "has 32 columns, but the embedding length is 64"),
        ("llama", {"rope.scaling.type": "yarn"}, r"rope\.scaling\.factor' is missing"),
        ("llama", {"rope.scaling.type": "linear"}, r"rope\.scaling\.factor' is missing"),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "is 0.0, expected a positive number"),
        ("llama", {"rope.scaling.type": "longrope"}, "longrope needs both tensors"),
        ("llama", {"pooling_type": 9}, "is 9, expected 0 to 3"),
        ("gemma3", {"attention.scale": -1.0}, "expected a positive number"),
        ("gemma3", {"attention.sliding_window": 8, "attention.sliding_window_pattern": np.array([], bool)},
         "has 0 flags, expected one for each of 1 layers"),
        ("minicpm", {"logit_scale": 0.0}, "expected a positive number"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(
    open_tiny: Callable[..., Checkpoint], arch: str, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError, match=expected) as caught:
        open_tiny(arch, changes)
    assert "tiny.gguf: " in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "changes", "expected"),
    [
        ("llama", {"attention.head_count_kv": np.array([2, 1], np.int32)}, "differs from layer to layer"),
        ("llama", {"attention.key_length": 8, "attention.value_length": 16}, "a value head of 16 beside a key head"),
        ("llama", {"rope.dimension_count": 4}, "a rotary width other than the head size 8"),
        ("llama", {"rope.scaling.type": "ntk"}, "rope scaling type 'ntk'"),
        ("mistral3", {"attention.temperature_scale": 0.1}, "a temperature scale"),
        ("qwen3moe", {"expert_gating_func": 2}, "gating function other than softmax"),
        ("llama",
         {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 8,
          "rope.scaling.yarn_ext_factor": 0.5}, "extrapolation factor"),
    ],
)  # fmt: skip
def test_what_no_model_can_do_is_refused(
    open_tiny: Callable[..., Checkpoint], arch: str, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelLoadError, match=expected):
        open_tiny(arch, changes)


@pytest.mark.parametrize("numbers", [(1.0, 2.0, 3.0), (1.0, 2.0, 0.0, 3.0), (1.0, math.inf, 2.0, 3.0)])
def test_bad_rope_vectors_are_refused(open_tiny: Callable[..., Checkpoint], numbers: tuple[float, ...]) -> None:
    with pytest.raises(CheckpointError, match="rope_freqs"):
        open_tiny("llama", {}, rope_freqs__weight=vector(*numbers))


def test_expert_per_tensor_files(open_tiny: Callable[..., Checkpoint]) -> None:
    matrix = ((32, 32), "F32", bytes(4096))
    more = {f"blk__0__ffn_{kind}__{e}__weight": matrix for kind in ("gate", "up", "down") for e in (0, 1)}
    names = open_tiny("llama", {"expert_count": 2, "expert_used_count": 1}, **more).tensor_names()
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert {f"{prefix}.{e}.w{n}.weight" for e in (0, 1) for n in (1, 2, 3)} <= names


def test_fused_phi2_projection_is_split(tmp_path: Path, gguf_file: Write, shared: Path) -> None:
    golden = open_checkpoint(shared / "goldens/models/phi")
    case = next(case for case in CASES if case.golden == "phi")
    tensors = converted(golden, case)
    for suffix in ("weight", "bias"):
        parts = [tensors.pop(f"blk.0.attn_{part}.{suffix}") for part in "qkv"]
        rows = sum(part[0][0] for part in parts)
        tensors[f"blk.0.attn_qkv.{suffix}"] = (rows, *parts[0][0][1:]), "F32", b"".join(part[2] for part in parts)
    path = tmp_path / "fused.gguf"
    path.write_bytes(gguf_file(metadata_of(golden.config, case), tensors))
    loaded = open_checkpoint(path)
    assert loaded.tensor_names() == golden.tensor_names()
    for name in golden.tensor_names():
        assert torch.equal(loaded.load(name), golden.load(name)), name
    assert loaded.num_weight_bytes == golden.num_weight_bytes


def test_packed_rows_move_like_dense_rows(
    tmp_path: Path, gguf_file: Write, llama_keys: dict[str, Any], llama_tensors: dict[str, Any]
) -> None:
    """q and k of a quantised file come back in half-split order without touching a block."""
    from gguf import GGMLQuantizationType, quants

    rng = np.random.default_rng(1)
    weight = rng.standard_normal((16, 32)).astype(np.float32)
    packed = quants.quantize(interleaved(weight, 2), GGMLQuantizationType.Q8_0)
    llama_tensors["blk.0.attn_k.weight"] = ((16, 32), "Q8_0", packed.tobytes())
    path = tmp_path / "q8.gguf"
    path.write_bytes(gguf_file(llama_keys, llama_tensors))
    loaded = open_checkpoint(path).load("model.layers.0.self_attn.k_proj.weight")
    assert isinstance(loaded, QuantizedTensor)
    expected = quants.dequantize(quants.quantize(weight, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert np.array_equal(loaded.dequantize().numpy(), expected)


def test_packed_gpt2_weight_is_transposed(tmp_path: Path, gguf_file: Write, shared: Path) -> None:
    from gguf import GGMLQuantizationType, quants

    golden = open_checkpoint(shared / "goldens/models/gpt2")
    case = next(case for case in CASES if case.golden == "gpt2")
    tensors = converted(golden, case)
    shape, _, raw = tensors["blk.0.ffn_up.weight"]
    packed = quants.quantize(np.frombuffer(raw, np.float32).reshape(shape), GGMLQuantizationType.Q8_0)
    tensors["blk.0.ffn_up.weight"] = shape, "Q8_0", packed.tobytes()
    path = tmp_path / "gpt2.gguf"
    path.write_bytes(gguf_file(metadata_of(golden.config, case), tensors))
    loaded = open_checkpoint(path)
    name = "transformer.h.0.mlp.c_fc.weight"
    weight, expected = loaded.load(name), golden.load(name)
    assert isinstance(weight, QuantizedTensor)
    assert weight.is_transposed
    assert weight.shape == loaded.tensor_info(name).shape == tuple(expected.shape) == (64, 256)
    torch.testing.assert_close(weight.dequantize(), expected, atol=0.02, rtol=0)
    assert weight.t().shape == (256, 64)
