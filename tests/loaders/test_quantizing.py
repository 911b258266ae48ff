"""--quantization: refused where the file is something else; plain weights in eight-bit floats by the formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vkit import LLM, SamplingParams
from vkit.errors import UsageError
from vkit.kernels import ScaledMatrix
from vkit.loaders import open_checkpoint
from vkit.loaders.quantizing import quantized_as, to_fp8

MODELS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("quant/awq", "awq"),
        ("quant/gptq", "gptq"),
        ("quant/nvfp4_ct", "compressed-tensors"),
        ("quant/fp8_static", "fp8"),
        ("quant/nvfp4_modelopt", "modelopt"),
        ("llama/model-q8_0.gguf", "gguf"),
        ("llama", None),
    ],
)
def test_agreement_changes_nothing(path: str, asked: str | None) -> None:
    checkpoint = open_checkpoint(MODELS / path)
    assert quantized_as(checkpoint, asked) is checkpoint


@pytest.mark.parametrize(
    ("path", "asked", "message"),
    [
        ("quant/awq", "gptq", "gptq was asked for, but awq is awq"),
        ("quant/awq", "fp8", "fp8 was asked for, but awq is awq"),
        ("llama/model-q8_0.gguf", "fp8", "but model-q8_0 is gguf"),
        ("llama", "awq", "but llama is not quantised .only fp8 can be made of plain weights"),
    ],
)
def test_contradictions_are_refused(path: str, asked: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"--quantization: .*{message}"):
        quantized_as(open_checkpoint(MODELS / path), asked)
    with pytest.raises(UsageError, match="--quantization: "):
        LLM(str(MODELS / path), tokenizer=str(MODELS / "byte_tokenizer"), quantization=asked)


def test_a_name_nobody_knows() -> None:
    with pytest.raises(UsageError, match=r"--quantization: expected one of awq, .*; got 'int3'"):
        LLM(str(MODELS / "llama"), quantization="int3")


def test_scales_and_codes() -> None:
    weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    packed = to_fp8(weight)
    assert packed.scales[3, 0] == 1
    assert torch.equal(packed.scales[:3, 0], weight[:3].abs().amax(1) / 448)
    expected = (weight / packed.scales).to(torch.float8_e4m3fn).float() * packed.scales
    assert torch.equal(packed.dequantize(torch.float32), expected)
    assert packed.inputs is not None
    assert (packed.inputs.kind, packed.inputs.scope) == ("e4m3", "token")


def test_what_is_rounded() -> None:
    """Linear layers are; embeddings, norms, routers and the head are not."""
    checkpoint = quantized_as(open_checkpoint(MODELS / "qwen3_moe"), "fp8")
    kinds = {name: checkpoint.tensor_info(name).qtype for name in checkpoint.tensor_names()}
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "fp8"
    assert kinds["model.layers.0.mlp.experts.3.down_proj.weight"] == "fp8"
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"):
        assert kinds[name] is None, name
    weight = checkpoint.load("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(weight, ScaledMatrix)
    assert weight.nbytes == checkpoint.tensor_info("model.layers.0.self_attn.q_proj.weight").nbytes


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_answers_stay_near(name: str) -> None:
    """First tokens of the golden continuation survive eight bits."""
    from safetensors.torch import load_file

    golden = load_file(MODELS / name / "golden.safetensors")
    prompt = golden["input_ids"].tolist()
    with LLM(str(MODELS / name), tokenizer=str(MODELS / "byte_tokenizer"), quantization="fp8") as llm:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, ignore_eos=True))
    expected = torch.log_softmax(golden["logits"][-1], -1)
    first = output.outputs[0]
    assert first.logprobs is not None
    found = first.logprobs[0][0].logprob
    assert abs(found - float(expected[first.token_ids[0]])) < 0.3
