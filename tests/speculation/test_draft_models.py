"""Drafting with models: the MTP head against recorded logits, and every method through the whole engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.recorder import CallRecorder
from vkit import kernels, resident
from vkit.errors import ModelLoadError, UsageError
from vkit.kernels import embedding
from vkit.llm import LLM
from vkit.loaders import open_checkpoint
from vkit.models import build_model
from vkit.runner import Runner
from vkit.sequence import Plan, ScheduledSequence, Sequence, SequenceStatus
from vkit.types import SamplingParams

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


class Options:
    """The part of EngineConfig that models and runners read."""

    device = "cpu"
    dtype = kv_cache_dtype = "float32"
    max_model_len = 128
    block_size = 16
    max_num_seqs = 4


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A golden with a tokenizer; with changes to its config, and without the tensors of some prefix."""

    def make(name: str, *, without: str = "", folder: str = "target", **config: Any) -> Path:
        path = tmp_path / folder
        for source in (GOLDENS / "byte_tokenizer", GOLDENS / name):
            shutil.copytree(source, path, dirs_exist_ok=True, copy_function=shutil.copyfile)
        values = {**json.loads((path / "config.json").read_text()), **config}
        (path / "config.json").write_text(json.dumps(values))
        if without:
            tensors = load_file(path / "model.safetensors")
            kept = {key: tensor for key, tensor in tensors.items() if not key.startswith(without)}
            save_file(kept, path / "model.safetensors")
        return path

    return make


def llm_for(path: Path, speculation: dict[str, Any] | None, **settings: Any) -> LLM:
    values = {"max_model_len": 112, "block_size": 16, "num_blocks": 60, "max_num_seqs": 4, **settings}
    return LLM(str(path), dtype="float32", max_num_batched_tokens=24, speculative_config=speculation, **values)


def counts_of(llm: LLM) -> dict[str, float]:
    return {family.name: family.samples[0].value for family in llm.metrics() if family.samples}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_head_scores_as_recorded(name: str, chunk: int) -> None:
    golden = load_file(GOLDENS / name / "golden.safetensors")
    prompt = golden["input_ids"].tolist()
    model = build_model(open_checkpoint(GOLDENS / name), Options(), has_draft_head=True)  # type: ignore[arg-type]
    runner = Runner(model, Options(), num_blocks=20)  # type: ignore[arg-type]
    sequence = Sequence("a", prompt, len(prompt), SamplingParams(), 0.0, status=SequenceStatus.RUNNING)
    sequence.block_ids = [[1] if group.kind == "state" else list(range(2, 10)) for group in runner.store.groups]
    rows = []
    with torch.inference_mode():
        for start in range(0, len(prompt) - 1, chunk):
            count = min(chunk, len(prompt) - 1 - start)
            step = runner.prepare(Plan(1, [ScheduledSequence(sequence, start, count, 0, False)]))
            hidden = model.forward(step.batch)
            assert model.mtp is not None
            following = torch.tensor(prompt[start + 1 : start + 1 + count])
            rows.append(model.compute_logits(model.mtp(hidden, replace(step.batch, token_ids=following))))
    torch.testing.assert_close(torch.cat(rows), golden["mtp_logits"], atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "speculation", "settings"),
    [
        ("qwen3_5", {"method": "mtp"}, {}),
        ("qwen3_5", {"method": "mtp", "num_speculative_tokens": 3}, {"enable_prefix_caching": True, "num_blocks": 28}),
        ("qwen3_5", {"prompt_lookup_min": 1, "num_speculative_tokens": 5}, {"async_scheduling": True}),
        ("nemotron_h", {"prompt_lookup_min": 1, "num_speculative_tokens": 4}, {"enable_prefix_caching": True}),
        pytest.param("kimi_linear", {"prompt_lookup_min": 1, "num_speculative_tokens": 3}, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", {"method": "mtp", "num_speculative_tokens": 2}, {}, marks=pytest.mark.slow),
        ("gemma3", {"prompt_lookup_min": 1, "num_speculative_tokens": 8}, {"enable_prefix_caching": True}),
    ],
)
def test_recorded_continuations(
    name: str, speculation: dict[str, Any], settings: dict[str, Any], checkpoint: Callable[..., Path]
) -> None:
    golden = load_file(GOLDENS / name / "golden.safetensors")
    prompts = [golden[f"input_ids{suffix}"].tolist() for suffix in ("", "_b")] * 2
    expected = [golden[f"greedy{suffix}"].tolist() for suffix in ("", "_b")] * 2
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with llm_for(checkpoint(name), speculation, **settings) as llm:
        for _ in range(2):  # the second time, beginnings may be in the cache
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert counts_of(llm)["vllm:spec_decode_num_draft_tokens"] > 0


def test_a_model_that_drafts_for_itself_is_always_right(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("llama")
    golden = load_file(GOLDENS / "llama" / "golden.safetensors")
    prompts = [{"prompt_token_ids": golden[f"input_ids{suffix}"].tolist()} for suffix in ("", "_b")]
    params = [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)] * 2
    with llm_for(path, {"model": str(path), "num_speculative_tokens": 4}) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [o.outputs[0].token_ids for o in outputs] == [golden["greedy"].tolist(), golden["greedy_b"].tolist()]
        counts = counts_of(llm)
    assert counts["vllm:spec_decode_num_accepted_tokens"] == counts["vllm:spec_decode_num_draft_tokens"] > 40


def test_drawn_drafts_of_the_same_model_all_stand(checkpoint: Callable[..., Path]) -> None:
    """q equals p, so that min(1, p / q) is 1 up to rounding."""
    path = checkpoint("llama")
    speculation = {"model": str(path), "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"}
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5, n=3)
    with llm_for(path, speculation) as llm:
        first = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
        counts = counts_of(llm)
        again = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
    assert [o.token_ids for o in first[0].outputs] == [o.token_ids for o in again[0].outputs]
    assert len({tuple(o.token_ids) for o in first[0].outputs}) == 3
    assert counts["vllm:spec_decode_num_accepted_tokens"] >= 0.97 * counts["vllm:spec_decode_num_draft_tokens"] > 0


def test_another_model_may_draft(checkpoint: Callable[..., Path]) -> None:
    """Of another architecture, with sliding windows; drafted for a recurrent model, with preemption."""
    golden = load_file(GOLDENS / "qwen3_5" / "golden.safetensors")
    draft = checkpoint("mistral", folder="draft")
    prompts = [golden[f"input_ids{suffix}"].tolist() for suffix in ("", "_b")] * 2
    expected = [golden[f"greedy{suffix}"].tolist() for suffix in ("", "_b")] * 2
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    speculation = {"model": str(draft), "num_speculative_tokens": 3}
    with llm_for(checkpoint("qwen3_5"), speculation, num_blocks=40) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        counts = counts_of(llm)
    assert counts["vllm:spec_decode_num_draft_tokens"] > 0


def test_sleep_and_wake_with_a_draft_model(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("llama")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with llm_for(path, {"model": str(path), "num_speculative_tokens": 2}) as llm:
        before = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].token_ids
        llm.sleep(2)
        llm.wake_up()
        assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].token_ids == before


def test_nothing_is_captured_beside_a_draft_model(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token after three steps of four: a step without drafts, which a capture would serve and leave no batch of."""
    recorder = CallRecorder()
    monkeypatch.setattr(resident, "recorder_for", lambda device: recorder)
    path = checkpoint("llama")
    golden = load_file(GOLDENS / "llama" / "golden.safetensors")
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    prompts = [{"prompt_token_ids": golden["input_ids"].tolist()}]
    with llm_for(path, None) as llm:
        assert llm.generate(prompts, params)[0].outputs[0].token_ids == golden["greedy"].tolist()[:14]
    assert recorder.num_recorded > 0  # the stand-in is asked where nothing drafts
    recorder.num_recorded = 0
    with llm_for(path, {"model": str(path), "num_speculative_tokens": 3}) as llm:
        assert llm.generate(prompts, params)[0].outputs[0].token_ids == golden["greedy"].tolist()[:14]
    assert recorder.num_recorded == 0


@pytest.mark.parametrize("is_eager", [False, True])
def test_enforce_eager_counts_for_a_draft_model_too(
    is_eager: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped: list[Any] = []

    def wrap_step(device_type: str, step: Any) -> Any:
        wrapped.append(step)
        return step

    monkeypatch.setattr(kernels, "wrap_step", wrap_step)
    path = checkpoint("llama")
    with llm_for(path, {"model": str(path), "num_speculative_tokens": 2}, enforce_eager=is_eager):
        assert len(wrapped) == (0 if is_eager else 2)


def test_refused_by_name(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    target = checkpoint("llama")
    with pytest.raises(UsageError, match=r"mtp: .*has no MTP head"):
        llm_for(target, {"method": "mtp"})
    with pytest.raises(UsageError, match="vocabulary of 300"):
        llm_for(target, {"model": str(checkpoint("qwen2", folder="a", vocab_size=300)), "num_speculative_tokens": 2})
    small = checkpoint("qwen2", folder="b", max_position_embeddings=64)
    with pytest.raises(UsageError, match="made for 64 tokens"):
        llm_for(target, {"model": str(small), "num_speculative_tokens": 2})
    with pytest.raises(UsageError, match="recurrent layers"):
        llm_for(target, {"model": str(checkpoint("nemotron_h", folder="c")), "num_speculative_tokens": 2})
    with pytest.raises(ModelLoadError):
        llm_for(target, {"model": str(tmp_path / "nowhere"), "num_speculative_tokens": 2})
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    with pytest.raises(UsageError, match="--kv-transfer-config: cannot go with drafts of draft_model"):
        llm_for(target, {"model": str(target), "num_speculative_tokens": 2}, kv_transfer_config=transfer)
    headless = checkpoint("qwen3_5", folder="d", without="mtp.")
    with pytest.raises(UsageError, match="has no MTP head"):
        llm_for(headless, {"method": "mtp", "num_speculative_tokens": 2})


def test_hidden_rows_are_picked_by_place() -> None:
    """What the loop of further drafts rests on."""
    hidden = torch.arange(12.0).view(4, 3)
    assert embedding(torch.tensor([3, 1]), hidden).tolist() == [[9.0, 10.0, 11.0], [3.0, 4.0, 5.0]]
