"""Small checkpoints through runner, cache and the Triton kernels, interpreted: logits are those recorded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vkit import kernels
from vkit.kernels import dispatch
from vkit.kernels.planes import as_rows
from vkit.kernels.triton import backend
from vkit.loaders import open_checkpoint
from vkit.models import build_model
from vkit.quantization import QuantizedTensor
from vkit.runner import Runner
from vkit.sequence import Plan, ScheduledSequence, Sequence
from vkit.types import SamplingParams

GOLDENS = Path(__file__).resolve().parents[4] / "shared" / "goldens" / "models"


@dataclasses.dataclass(frozen=True)
class Options:
    """The part of EngineConfig that models and runners read."""

    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    max_model_len: int = 128
    block_size: int = 16
    max_num_seqs: int = 4


@pytest.fixture(autouse=True)
def _on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend as cards have it, offered for the host."""
    interpreted = dispatch.Backend("triton", "cpu", backend.find, pack=backend.pack, pack_scaled=as_rows)
    monkeypatch.setitem(dispatch._backends, "cpu", [*dispatch.backends("cpu"), interpreted])
    with kernels.using_backend("cpu", "triton"):
        yield


def logits_of(checkpoint: Any, token_ids: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of every position of a prompt that is computed in pieces."""
    options = Options()
    runner = Runner(build_model(checkpoint, options), options, 20)  # type: ignore[arg-type]
    blocks = [list(range(1, 9)) for _ in runner.store.groups]
    sequence = Sequence("a", token_ids, len(token_ids), SamplingParams(temperature=0.0), 0.0, block_ids=blocks)
    rows = []
    for step, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(token_ids)], strict=True)):
        sequence.num_computed_tokens = stop
        share = ScheduledSequence(sequence, start, stop - start, stop - start, stop == len(token_ids))
        rows.append(runner.forward(Plan(step, [share], [])).clone())
    return torch.cat(rows)


def test_a_gguf_file(caplog: pytest.LogCaptureFixture) -> None:
    """Eight-bit blocks, prefill and one token at a time; every packed weight was laid out in planes."""
    golden = load_file(GOLDENS / "llama" / "golden.safetensors")
    prompt, recorded = golden["input_ids"][:3].tolist(), golden["logits"][:3]
    checkpoint = open_checkpoint(GOLDENS / "llama" / "model-q8_0.gguf")
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        logits = logits_of(checkpoint, prompt, [len(prompt) - 1])
    weight = build_model(checkpoint, Options()).model.embed_tokens.weight  # type: ignore[arg-type, attr-defined]
    assert isinstance(weight, QuantizedTensor)
    assert weight.qtype == "Q8_0_PLANES"
    assert not [line for line in caplog.messages if "quantized" in line]
    with kernels.using_backend("cpu", "reference"):
        torch.testing.assert_close(logits, logits_of(checkpoint, prompt, []), atol=1e-4, rtol=0)
    assert float((logits - recorded).abs().max()) < 0.02 * float(recorded.max() - recorded.min())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "gptq_act_order", "fp8_block", "nvfp4_modelopt")],
)
def test_quantised_checkpoints(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Logits of the dequantised weights under plain activations, whatever the checkpoint asks of activations."""
    from vkit.kernels.triton import fallback

    fallback.forget()
    golden = load_file(GOLDENS / "quant" / name / "golden.safetensors")
    length = 3
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        logits = logits_of(
            open_checkpoint(GOLDENS / "quant" / name), golden["input_ids"][:length].tolist(), [length - 1]
        )
    torch.testing.assert_close(logits, golden["logits"][:length], atol=1e-4, rtol=0)
    assert not [line for line in caplog.messages if "scaled_linear: no triton kernel" in line]
