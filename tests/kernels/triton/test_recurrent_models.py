"""Small checkpoints through runner and cache with the Triton kernels: which of them a step reaches, and its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vkit import kernels
from vkit.cache.groups import CacheKind
from vkit.kernels import dispatch
from vkit.loaders import open_checkpoint
from vkit.models import build_model
from vkit.runner import Runner
from vkit.sequence import Plan, ScheduledSequence, Sequence
from vkit.types import SamplingParams

GOLDENS = Path(__file__).resolve().parents[4] / "shared" / "goldens" / "models"
PROMPT, TOKENS = 5, 7


@dataclasses.dataclass(frozen=True)
class Options:
    """The part of EngineConfig that models and runners read."""

    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    max_model_len: int = 128
    block_size: int = 16
    max_num_seqs: int = 4


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The ops that ran, with the kernels offered for the host as cards have them."""
    from vkit.kernels.triton import backend

    found: set[str] = set()

    def find(op: str, dtype: torch.dtype, /) -> dispatch.Op | None:
        own = backend.find(op, dtype)
        if own is not None:
            found.add(op)
        return own

    offered = dispatch.Backend("triton", "cpu", find)
    monkeypatch.setitem(dispatch._backends, "cpu", [*dispatch.backends("cpu"), offered])
    with kernels.using_backend("cpu", "triton"):
        yield found


def logits_of(name: str, options: Options, token_ids: list[int]) -> torch.Tensor:
    """Logits after the prompt and after each token that follows."""
    runner = Runner(build_model(open_checkpoint(GOLDENS / name), options), options, 60)  # type: ignore[arg-type]
    # Groups share the pages of one pool, so no two may own the same block; a state is one block.
    blocks = [
        [1 + 8 * index] if group.kind is CacheKind.STATE else list(range(1 + 8 * index, 9 + 8 * index))
        for index, group in enumerate(runner.store.groups)
    ]
    sequence = Sequence("a", token_ids, len(token_ids), SamplingParams(temperature=0.0), 0.0, block_ids=blocks)
    rows, start = [], 0
    for step, stop in enumerate(range(PROMPT, len(token_ids) + 1)):
        sequence.num_computed_tokens = stop
        share = ScheduledSequence(sequence, start, stop - start, 1, True)
        rows.append(runner.forward(Plan(step, [share], [])).clone())
        start = stop
    return torch.cat(rows).float()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("qwen3_5", {"causal_conv1d", "gated_delta_net", "log_decay", "paged_attention", "write_kv"}),
        ("kimi_linear", {"causal_conv1d", "gated_delta_net", "log_decay", "paged_attention", "write_kv"}),
        ("nemotron_h", {"causal_conv1d", "mamba2_scan"}),
        ("deepseek_v3", {"paged_attention", "write_kv"}),
    ],
)
def test_a_model_of_each_kind_gives_its_recorded_logits(name: str, ops: set[str], reached: set[str]) -> None:
    golden = load_file(GOLDENS / name / "golden.safetensors")
    found = logits_of(name, Options(), golden["input_ids"][:TOKENS].tolist())
    assert reached >= ops
    torch.testing.assert_close(found, golden["logits"][PROMPT - 1 : TOKENS].float(), atol=2e-4, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["float8_e4m3fn", "int8"])
def test_a_narrow_cache(cache: str, reached: set[str]) -> None:
    options = dataclasses.replace(Options(), kv_cache_dtype=cache)
    token_ids = load_file(GOLDENS / "llama" / "golden.safetensors")["input_ids"][:TOKENS].tolist()
    found = logits_of("llama", options, token_ids)
    assert reached >= {"paged_attention", "write_kv"}
    with kernels.using_backend("cpu", "reference"):
        expected = logits_of("llama", options, token_ids)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-3)
