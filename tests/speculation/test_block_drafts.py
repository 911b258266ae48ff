"""DFlash and DSpark drafts against their formulas in plain torch, over a target computed by transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vkit.config import EngineArgs
from vkit.errors import CheckpointError, ModelLoadError, UsageError
from vkit.inputs import InputProcessor
from vkit.loading import check_model
from vkit.types import OutputKind, SamplingParams

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
MASK = 250
Tensors = dict[str, torch.Tensor]


def draft_config(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A draft of two layers, the second with a window, for a target of that configuration."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"],
        "block_size": 4,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK},
        **changes,
    }


def draft_tensors(config: dict[str, Any], target_width: int, seed: int, *, rank: int = 0) -> Tensors:
    """Random weights large enough that drafts differ from place to place."""
    generator = torch.Generator().manual_seed(seed)
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    num_taps = len(config["dflash_config"]["target_layer_ids"])

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (2.0 / shape[-1] ** 0.5)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    tensors = {"fc.weight": make(width, num_taps * target_width), "hidden_norm.weight": norm(width)}
    tensors["norm.weight"] = norm(width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": make(heads, width),
            f"{prefix}self_attn.k_proj.weight": make(kv, width),
            f"{prefix}self_attn.v_proj.weight": make(kv, width),
            f"{prefix}self_attn.o_proj.weight": make(width, heads),
            f"{prefix}self_attn.q_norm.weight": norm(config["head_dim"]),
            f"{prefix}self_attn.k_norm.weight": norm(config["head_dim"]),
            f"{prefix}mlp.gate_proj.weight": make(inner, width),
            f"{prefix}mlp.up_proj.weight": make(inner, width),
            f"{prefix}mlp.down_proj.weight": make(width, inner),
            f"{prefix}input_layernorm.weight": norm(width),
            f"{prefix}post_attention_layernorm.weight": norm(width),
        }
    if rank:
        vocab_size = config["vocab_size"]
        tensors["markov_head.markov_w1.weight"] = 3 * make(vocab_size, rank)
        tensors["markov_head.markov_w2.weight"] = 3 * make(vocab_size, rank)
        tensors["confidence_head.weight"] = make(1, width)
    return tensors


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """x (n, heads, D) rotated, halves paired."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * base ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Reference:
    """Drafts by the formulas, everything anew each time."""

    def __init__(self, target: Path, config: dict[str, Any], tensors: Tensors, *, is_next_token: bool) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.config, self.tensors, self.is_next_token = config, tensors, is_next_token

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        tensors, config = self.tensors, self.config
        *context, anchor = token_ids
        streams = self.model(torch.tensor([context]), output_hidden_states=True).hidden_states
        taps = [streams[layer + 1][0] for layer in config["dflash_config"]["target_layer_ids"]]
        features = rms(torch.cat(taps, -1) @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
        masks = [MASK] * (count - 1 if self.is_next_token else count)
        embedding = tensors.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        x = embedding[torch.tensor([anchor, *masks])]
        for layer in range(config["num_hidden_layers"]):
            x = self.block(x, features, layer)
        hidden = rms(x, tensors["norm.weight"])
        head = tensors.get("lm_head.weight", self.model.get_output_embeddings().weight)
        scores = hidden @ head.T
        if not self.is_next_token:
            return scores[1:].argmax(-1).tolist()
        found, before = [], anchor
        for row in scores:
            bias = tensors["markov_head.markov_w2.weight"] @ tensors["markov_head.markov_w1.weight"][before]
            before = int((row + bias).argmax())
            found.append(before)
        return found

    def block(self, x: torch.Tensor, features: torch.Tensor, layer: int) -> torch.Tensor:
        config, tensors = self.config, self.tensors
        own = {key.split(".", 2)[2]: value for key, value in tensors.items() if key.startswith(f"layers.{layer}.")}
        normed = rms(x, own["input_layernorm.weight"])
        size, num_context = len(x), len(features)
        positions = torch.arange(num_context + size)

        def heads(value: torch.Tensor, name: str) -> torch.Tensor:
            return (value @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, config["head_dim"]))

        base = config["rope_theta"]
        q = turned(rms(heads(normed, "q"), own["self_attn.q_norm.weight"]), positions[num_context:], base)
        k = torch.cat([heads(features, "k"), heads(normed, "k")])
        k = turned(rms(k, own["self_attn.k_norm.weight"]), positions, base)
        v = torch.cat([heads(features, "v"), heads(normed, "v")])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config["head_dim"] ** -0.5
        if config["layer_types"][layer] == "sliding_attention":
            gap = positions[num_context:, None] - positions[None]
            scores = scores.masked_fill((gap < 0) | (gap >= config["sliding_window"]), -torch.inf)
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ own["self_attn.o_proj.weight"].T
        normed = rms(x, own["post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(normed @ own["mlp.gate_proj.weight"].T) * (
            normed @ own["mlp.up_proj.weight"].T
        )
        return x + gated @ own["mlp.down_proj.weight"].T


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    for source in (GOLDENS / "byte_tokenizer", GOLDENS / "qwen3"):
        shutil.copytree(source, path, dirs_exist_ok=True, copy_function=shutil.copyfile)
    return path


@pytest.fixture
def write_draft(tmp_path: Path, target: Path) -> Callable[..., tuple[Path, dict[str, Any], Tensors]]:
    def write(*, rank: int = 0, prefix: str = "", extra: Tensors | None = None, **changes: Any) -> Any:
        values = json.loads((target / "config.json").read_text())
        config = draft_config(values, **changes)
        tensors = {**draft_tensors(config, values["hidden_size"], 3, rank=rank), **(extra or {})}
        path = tmp_path / "draft"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        save_file({prefix + key: value for key, value in tensors.items()}, path / "model.safetensors")
        return path, config, tensors

    return write


def args_for(target: Path, **speculation: Any) -> EngineArgs:
    return EngineArgs(
        model=str(target),
        device="cpu",
        dtype="float32",
        max_model_len=112,
        block_size=16,
        num_blocks=60,
        max_num_seqs=3,
        max_num_batched_tokens=20,
        cpu_precision="exact",
        speculative_config=speculation,
    )


def compare(args: EngineArgs, reference: Reference) -> int:
    """Run three requests and compare the drafts of every step; how many were compared."""
    golden = load_file(GOLDENS / "qwen3" / "golden.safetensors")
    loaded = check_model(args).load()
    engine = loaded.engine
    inputs: InputProcessor = loaded.inputs
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    prompts = {"a": golden["input_ids"].tolist(), "b": golden["input_ids_b"].tolist(), "c": [9, 8, 7]}
    for name, prompt in prompts.items():
        engine.add_request(inputs.process({"prompt_token_ids": prompt}, params, request_id=name))
    found, num_compared = {}, 0
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
        for sequence in engine.scheduler.running:
            if sequence.draft_token_ids:
                expected = reference.drafts(sequence.token_ids, len(sequence.draft_token_ids))
                assert sequence.draft_token_ids == expected
                num_compared += 1
    assert found["a"] == golden["greedy"].tolist()
    assert found["b"] == golden["greedy_b"].tolist()
    engine.close()
    loaded.close()
    return num_compared


@pytest.mark.parametrize(("prefix", "count"), [("", 4), pytest.param("model.", 3, marks=pytest.mark.slow)])
def test_dflash(target: Path, write_draft: Any, prefix: str, count: int) -> None:
    path, config, tensors = write_draft(prefix=prefix)
    reference = Reference(target, config, tensors, is_next_token=False)
    assert compare(args_for(target, method="dflash", model=str(path), num_speculative_tokens=count), reference) > 25


@pytest.mark.parametrize("owns_ends", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dspark(target: Path, write_draft: Any, owns_ends: bool) -> None:
    width, vocab_size = (json.loads((target / "config.json").read_text())[key] for key in ("hidden_size", "vocab_size"))
    ends = {"embed_tokens.weight": torch.randn(vocab_size, width), "lm_head.weight": torch.randn(vocab_size, width)}
    settings = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "rank": 8}
    path, config, tensors = write_draft(extra=ends if owns_ends else None, **settings)
    reference = Reference(target, config, tensors, is_next_token=True)
    args = args_for(target, method="dspark", model=str(path), num_speculative_tokens=5)
    assert compare(args, reference) > 25
    without = Reference(target, config, {**tensors}, is_next_token=True)
    without.tensors["markov_head.markov_w2.weight"] = torch.zeros_like(tensors["markov_head.markov_w2.weight"])
    assert without.drafts([9, 8, 7], 5) != reference.drafts([9, 8, 7], 5), "the bias has a say"


@pytest.mark.parametrize(
    ("method", "count", "changes", "expected"),
    [
        ("dflash", 5, {}, "5 is above the draft's block size 4"),
        ("dspark", 3, {"architectures": ["Qwen3DSparkModel"], "rank": 8}, "3 is below the draft's block size 4"),
        ("dspark", 4, {}, "architecture DFlashDraftModel and model_type qwen3 is not built for dspark"),
        ("dspark", 4, {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel .* is not built for dspark"),
        ("dspark", 4, {"architectures": ["DSparkDraftModel"], "model_type": "kimi"}, "model_type kimi is not built"),
        ("dflash", 4, {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM .* is not built for dflash"),
        ("dflash", 4, {"hidden_size": 32}, "32 wide"),
        ("dflash", 4, {"draft_vocab_size": 100}, "reduced vocabulary"),
        ("dflash", 4, {"vocab_size": 300}, "vocabulary of 300"),
    ],
)
def test_refused_by_name(
    target: Path, write_draft: Any, method: str, count: int, changes: dict[str, Any], expected: str
) -> None:
    path, *_ = write_draft(**changes)
    with pytest.raises(UsageError, match=expected):
        check_model(args_for(target, method=method, model=str(path), num_speculative_tokens=count))


def test_damaged_drafts_are_refused_before_weights_are_read(target: Path, write_draft: Any) -> None:
    speculation = {"method": "dflash", "num_speculative_tokens": 4}
    path, *_ = write_draft(dflash_config={"target_layer_ids": [0, 99], "mask_token_id": MASK})
    with pytest.raises(ModelLoadError, match=r"target_layer_ids \[99\] name no layers"):
        check_model(args_for(target, model=str(path), **speculation))
    path, *_ = write_draft()
    tensors = load_file(path / "model.safetensors")
    del tensors["layers.1.self_attn.k_norm.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: layers\.1\.self_attn\.k_norm\.weight"):
        check_model(args_for(target, model=str(path), **speculation))
