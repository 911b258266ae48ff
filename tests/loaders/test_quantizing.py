"""--quantization: refused where the file is something else; plain weights in eight-bit floats by the formula."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from vkit import LLM, SamplingParams
from vkit.errors import UsageError
from vkit.kernels import ScaledMatrix
from vkit.loaders import open_checkpoint
from vkit.loaders.quantizing import ExpandedCheckpoint, quantized_as, to_fp8

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_blocks_are_expanded(dtype: torch.dtype) -> None:
    """Against the numbers of the gguf package."""
    path = MODELS / "llama" / "model-q8_0.gguf"
    packed, expanded = open_checkpoint(path), ExpandedCheckpoint(open_checkpoint(path), dtype)
    assert expanded.quantization is None
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    values = gguf.quants.dequantize(stored["blk.0.ffn_up.weight"].data, gguf.GGMLQuantizationType.Q8_0)
    found = expanded.load("model.layers.0.mlp.up_proj.weight")
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, torch.from_numpy(values).to(dtype))
    names = [name for name in packed.tensor_names() if packed.tensor_info(name).is_packed]
    assert names
    for name in names:
        weight, info = expanded.load(name), expanded.tensor_info(name)
        assert isinstance(weight, torch.Tensor)
        assert (weight.dtype, tuple(weight.shape), weight.nbytes) == (info.dtype, info.shape, info.nbytes)
    plain = packed.tensor_names() - set(names)
    assert all(expanded.tensor_info(name) == packed.tensor_info(name) for name in plain)
    expanded.close()


def test_a_model_runs_with_expanded_blocks() -> None:
    """The packed model's exact products, in the dtype that was asked for, at the size that was promised."""
    settings = {"tokenizer": str(MODELS / "byte_tokenizer"), "num_blocks": 20, "max_model_len": 64, "threads": 1}
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
    results = []
    for extra in ({"cpu_precision": "exact"}, {"gguf_dequantize": True}):
        with LLM(str(MODELS / "llama" / "model-q8_0.gguf"), dtype="float32", **settings, **extra) as model:
            (output,) = model.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
            completion = output.outputs[0]
            assert completion.logprobs is not None
            results.append((completion.token_ids, [entry[0].logprob for entry in completion.logprobs]))
    assert results[0][0] == results[1][0]
    assert results[1][1] == pytest.approx(results[0][1], abs=1e-4)
    with pytest.raises(UsageError, match="--gguf-dequantize: llama is a safetensors checkpoint"):
        LLM(str(MODELS / "llama"), gguf_dequantize=True, **settings)
