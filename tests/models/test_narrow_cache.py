"""fp8 and int8 caches behind whole models: how far logits move, what is refused, what connectors make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vkit import LLM, SamplingParams, kernels
from vkit.errors import UsageError
from vkit.layers import Attention

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
PROMPT = [3 + i * 7 % 190 for i in range(60)]
SETTINGS: dict[str, Any] = {
    "tokenizer": str(GOLDENS / "byte_tokenizer"),
    "dtype": "float32",
    "block_size": 16,
    "num_blocks": 40,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "threads": 1,
}


def logprobs(model: LLM) -> torch.Tensor:
    """Of every prompt position."""
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    (output,) = model.generate([{"prompt_token_ids": PROMPT}], params)
    assert output.prompt_logprobs is not None
    return torch.tensor([entry[0].logprob for entry in output.prompt_logprobs[1:] if entry is not None])


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "native" and kernels.backends("cpu")[0].unavailable:
        pytest.skip("no native kernels here")
    with kernels.using_backend("cpu", request.param):
        yield request.param


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4"])
@pytest.mark.parametrize(("dtype", "factor"), [("int8", 6), ("fp8", 25), ("fp8_e4m3", 25), ("fp8_e5m2", 50)])
def test_errors_are_those_of_the_format(name: str, dtype: str, factor: int, backend: str) -> None:
    """bfloat16 keeps 8 bits of a value, e4m3 4 and e5m2 3: errors are 16 and 32 times as large, with some room."""
    with LLM(str(GOLDENS / name), **SETTINGS, kv_cache_dtype="float32") as model:
        expected = logprobs(model)
    with LLM(str(GOLDENS / name), **SETTINGS, kv_cache_dtype="bfloat16") as model:
        usual = (logprobs(model) - expected).abs().mean()
    with LLM(str(GOLDENS / name), **SETTINGS, kv_cache_dtype=dtype) as model:
        error = (logprobs(model) - expected).abs()
        shown = {"int8": "int8", "fp8_e5m2": "float8_e5m2"}.get(dtype, "float8_e4m3fn")
        info = [s for f in model.metrics() if f.name == "vllm:cache_config_info" for s in f.samples]
    assert 0 < error.mean() < factor * usual
    assert info[0].labels["cache_dtype"] == shown


def test_scales_of_the_file_take_part_in_both_directions(backend: str) -> None:
    """Numbers that fp8 cannot hold without scales come out right with them."""
    results = []
    for k_scale, v_scale in ((1.0, 1.0), (0.5, 2.0), (1024.0, 1.0 / 1024)):
        with LLM(str(GOLDENS / "llama"), **SETTINGS, kv_cache_dtype="fp8") as model:
            resident: Any = model._loaded.engine.runner
            for _, module in resident._model.walk():
                if isinstance(module, Attention):
                    module.k_scale, module.v_scale = k_scale, v_scale
            results.append(logprobs(model))
    # Powers of two move exponents alone: the same codes, unless they leave the range of fp8.
    assert (results[1] - results[0]).abs().mean() < 0.01
    assert (results[2] - results[0]).abs().mean() > 0.05


def test_pages_are_as_small_as_promised() -> None:
    sizes = {}
    for dtype in ("bfloat16", "fp8", "int8"):
        with LLM(str(GOLDENS / "llama"), **SETTINGS, kv_cache_dtype=dtype) as model:
            resident: Any = model._loaded.engine.runner
            sizes[dtype] = resident._runner.store.num_bytes
            head_dim = resident._runner.store.kv[0][0].shape[-1] - (4 if dtype == "int8" else 0)
    assert sizes["fp8"] * 2 == sizes["bfloat16"]
    assert sizes["int8"] * head_dim == sizes["fp8"] * (head_dim + 4)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_latent_attention_is_refused(dtype: str) -> None:
    with pytest.raises(UsageError, match="--kv-cache-dtype: latent attention"):
        LLM(str(GOLDENS / "deepseek_v2"), **SETTINGS, kv_cache_dtype=dtype)


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8"])
def test_connectors_carry_narrow_pages(tmp_path: Path, dtype: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    config = {
        "kv_connector": "FileConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"root_dir": str(tmp_path)},
    }
    outputs = []
    for transfer in (None, config, config):
        with LLM(str(GOLDENS / "llama"), **SETTINGS, kv_cache_dtype=dtype, kv_transfer_config=transfer) as model:
            outputs += model.generate([{"prompt_token_ids": PROMPT}], params)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 48]


def test_recurrent_models_keep_their_states(request: pytest.FixtureRequest) -> None:
    """Their attention layers narrow, their states as they were."""
    with LLM(str(GOLDENS / "nemotron_h"), **SETTINGS, kv_cache_dtype="int8") as model:
        assert logprobs(model).isfinite().all()
