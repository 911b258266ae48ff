"""Models that several ranks share, against the recorded logits and continuations of one.

The ranks are threads here, each with its own model and cache, over the same process groups that processes use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vkit import kernels
from vkit.distributed import Ranks
from vkit.distributed.groups import open_group
from vkit.errors import UsageError
from vkit.kernels import ExpertMatrix
from vkit.layers.sharded import GatheredLinear, SummedLinear
from vkit.loaders import open_checkpoint
from vkit.models import build_model, create_model
from vkit.models.sharding import SHARED_ARCHITECTURES
from vkit.quantization import QuantizedTensor
from vkit.quantization.quantize import quantize

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
TOLERANCE = 5e-4
FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2", "qwen3_moe", "mixtral", "gemma", "gemma2", "olmo2"),
    *("olmo3", "granite", "glm4", "phi", "phi3", "stablelm", "stablelm_parallel", "opt", "cohere", "cohere2"),
    *("internlm2", "internlm3", "minicpm", "minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "qwen3_5"),
    *("qwen3_5_moe", "kimi_linear", "nemotron_h", "gemma4", "gemma4_moe", "gemma4_unified", "laguna"),
    *("muse_glimmer", "qwen3_vl"),
]
QUICK = ["llama", "internlm3", "olmo2", "qwen3_5", "nemotron_h", "deepseek_v3", "mixtral", "gemma4"]
OF_FOUR = [
    "llama",
    "internlm3",
    "nemotron_h",
    "cohere",
    "stablelm",
    "olmo2",
    "deepseek_v3",
    "mixtral",
    "gemma4",
    "gpt2",
]
"""Four ranks share two key-value heads, and one, and two groups of a recurrent layer."""
SAME_DECODERS = {
    *("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"),
    *("MuseGlimmerForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
}
"""Architectures whose decoder is that of one in FAMILIES."""

pytestmark = pytest.mark.skipif(not GOLDENS.is_dir(), reason="needs the shared goldens")


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` gives on each of `size` ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> Any:
        own = store if rank == 0 else dist.TCPStore("127.0.0.1", store.port, is_master=False)
        group = open_group(own, rank, size, torch.device("cpu"), "127.0.0.1")
        try:
            return work(Ranks(rank, size, group))
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool, kernels.using_backend("cpu", "reference"):
        return [future.result(timeout=120) for future in [pool.submit(run, rank) for rank in range(size)]]


def continuation(driver: Any, prompt: list[int], steps: int, chunk: int = 7) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt, and the greedy tokens after it."""
    sequence = driver.start("a", prompt)
    logits = []
    while sequence.num_output_tokens < steps:
        share = driver.share(sequence, chunk, all_logits=True)
        (rows,) = driver.run([share])
        if sequence.num_output_tokens == 0:
            logits.append(rows)
        if share.samples:
            sequence.token_ids.append(int(rows[-1].argmax()))
    return torch.cat(logits), sequence.token_ids[sequence.num_prompt_tokens :]


@pytest.fixture
def run_shared(
    load_golden: Callable[..., Any], make_driver: Callable[..., Any], make_options: Callable[..., Any]
) -> Callable[..., list[tuple[Any, torch.Tensor, list[int]]]]:
    """Model, prompt logits and continuation on each of some ranks."""

    def run(open_: Callable[[], Any], size: int, prompt: list[int], steps: int) -> list[Any]:
        options = make_options(block_size=16)

        def work(ranks: Ranks) -> Any:
            model = build_model(open_(), options, ranks=ranks)
            return model, *continuation(make_driver(model, options, seed=7), prompt, steps)

        results = on_ranks(size, work)
        assert all(torch.equal(logits, results[0][1]) for _, logits, _ in results), "ranks see the same bits"
        return results

    return run


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in QUICK),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in OF_FOUR),
    ],
)
def test_logits_and_continuations_are_those_of_one(
    name: str, size: int, load_golden: Callable[..., Any], run_shared: Callable[..., Any]
) -> None:
    golden = load_golden(name)
    for _, logits, tokens in run_shared(lambda: open_checkpoint(GOLDENS / name), size, golden.prompt(), 12):
        torch.testing.assert_close(logits, golden.logits(), atol=TOLERANCE, rtol=0)
        assert tokens == golden.greedy()[:12]


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_gguf_files_are_shared(name: str, load_golden: Callable[..., Any], run_shared: Callable[..., Any]) -> None:
    """The value heads of qwen3_5 are tiled there."""
    golden, path = load_golden(name), GOLDENS / name / "model-f32.gguf"
    for _, logits, tokens in run_shared(lambda: open_checkpoint(path), 2, golden.prompt(), 12):
        torch.testing.assert_close(logits, golden.logits(), atol=TOLERANCE, rtol=0)
        assert tokens == golden.greedy()[:12]


def test_hidden_states_of_a_model_that_embeds(load_golden: Callable[..., Any], run_shared: Callable[..., Any]) -> None:
    golden = load_golden("llama_embed")
    for _, hidden, _ in run_shared(lambda: open_checkpoint(GOLDENS / "llama_embed"), 2, golden.prompt(), 1):
        torch.testing.assert_close(hidden, golden.tensors["hidden"], atol=1e-4, rtol=0)


def test_packed_gguf_files_are_cut_at_block_edges(
    load_golden: Callable[..., Any],
    run_shared: Callable[..., Any],
    load_model: Callable[..., Any],
    make_driver: Callable[..., Any],
    make_options: Callable[..., Any],
) -> None:
    """Blocks of 32: heads of 64 columns in all are cut in two for two ranks, and inputs are gathered for four."""
    golden, options = load_golden("llama"), make_options(block_size=16)
    with kernels.using_backend("cpu", "reference"):
        alone = load_model("llama", options, file="model-q8_0.gguf")
        expected, tokens = continuation(make_driver(alone, options, seed=7), golden.prompt(), 8)
    path = GOLDENS / "llama" / "model-q8_0.gguf"
    for size, form in ((2, SummedLinear), (4, GatheredLinear)):
        for model, logits, found in run_shared(lambda: open_checkpoint(path), size, golden.prompt(), 8):
            attention = model.model.layers[0].self_attn
            assert isinstance(attention.o_proj._method, form)
            assert isinstance(model.model.embed_tokens.weight, QuantizedTensor)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
            assert found == tokens


@pytest.mark.parametrize(
    "name",
    [
        *("awq", "ct_fp8_dynamic"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("ct_int4", "ct_int4_asym", "ct_int8_w8a8", "fp8_block", "fp8_static", "gptq", "gptq_8bit"),
                *("mxfp4_ct", "nvfp4_modelopt", "nvfp4a16_ct", "gptq_act_order", "nvfp4_ct"),
            )
        ),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_quantised_checkpoints_are_shared(
    name: str, size: int, load_golden: Callable[..., Any], run_shared: Callable[..., Any]
) -> None:
    """Whatever the size of their groups, and where activations are rounded by the range of all of a row."""
    golden = load_golden(f"quant/{name}")
    expected = golden.tensors.get("logits_actq", golden.logits())
    for _, logits, _ in run_shared(lambda: open_checkpoint(GOLDENS / "quant" / name), size, golden.prompt(), 1):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("vocab_size", [200, 60])
def test_vocabularies_that_ranks_do_not_divide_are_padded(
    vocab_size: int,
    load_golden: Callable[..., Any],
    run_shared: Callable[..., Any],
    make_checkpoint: Callable[..., Any],
    make_driver: Callable[..., Any],
    make_options: Callable[..., Any],
) -> None:
    """200 rows are 128 and 72; of 60 the second rank has none."""

    def cut() -> Any:
        checkpoint = make_checkpoint("llama", vocab_size=vocab_size)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in checkpoint.tensors:
                checkpoint.tensors[name] = checkpoint.tensors[name][:vocab_size]
        checkpoint.release_pages = lambda: None
        return checkpoint

    options = make_options(block_size=16)
    prompt = [token_id % vocab_size for token_id in load_golden("llama").prompt()]
    with kernels.using_backend("cpu", "reference"):
        alone = make_driver(build_model(cut(), options), options, seed=7)
        expected, tokens = continuation(alone, prompt, 8)
    for model, logits, found in run_shared(cut, 2, prompt, 8):
        assert logits.shape[1] == vocab_size
        assert model.model.embed_tokens.weight.shape[0] in (128, 72, 60, 0)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        assert found == tokens


def test_experts_that_cannot_be_cut_are_shared_whole(
    load_golden: Callable[..., Any],
    run_shared: Callable[..., Any],
    make_checkpoint: Callable[..., Any],
    make_driver: Callable[..., Any],
    make_options: Callable[..., Any],
) -> None:
    """An expert of 32 columns is one block of 32, so each of two ranks has half of the experts."""

    def packed() -> Any:
        checkpoint = make_checkpoint("mixtral")
        for name, tensor in checkpoint.tensors.items():
            if ".experts." in name:
                checkpoint.tensors[name] = QuantizedTensor(quantize(tensor, "Q8_0"), "Q8_0", tuple(tensor.shape))
        checkpoint.release_pages = lambda: None
        return checkpoint

    options, prompt = make_options(block_size=16), load_golden("mixtral").prompt()
    with kernels.using_backend("cpu", "reference"):
        alone = build_model(packed(), options)
        expected, tokens = continuation(make_driver(alone, options, seed=7), prompt, 8)
    num_experts = alone.config.num_experts
    for model, logits, found in run_shared(packed, 2, prompt, 8):
        assert len(model.model.layers[0].mlp.experts._down_matrix.weights) == num_experts // 2
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert found == tokens


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("llama", 3, ["4 attention heads", "3 ranks", "2, 4 would do"]),
        ("qwen3_5", 4, ["2 key heads of a recurrent layer", "4 ranks", "2 would do"]),
        ("deepseek_v4", 2, ["DeepseekV4ForCausalLM"]),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_loads(
    name: str, size: int, words: list[str], make_options: Callable[..., Any]
) -> None:
    checkpoint = open_checkpoint(GOLDENS / name)
    with pytest.raises(UsageError, match="--tensor-parallel-size") as raised:
        create_model(checkpoint, make_options(), ranks=Ranks(0, size))
    assert all(word in str(raised.value) for word in words)


def test_every_family_that_is_shared_is_checked() -> None:
    judged = {json.loads((GOLDENS / name / "config.json").read_text())["architectures"][0] for name in FAMILIES}
    assert judged | SAME_DECODERS == SHARED_ARCHITECTURES


def test_a_rank_keeps_no_more_than_its_share(run_shared: Callable[..., Any], load_golden: Callable[..., Any]) -> None:
    (one, *_), (other, *_) = run_shared(
        lambda: open_checkpoint(GOLDENS / "mixtral"), 2, load_golden("mixtral").prompt(), 1
    )
    for model in (one, other):
        layer = model.model.layers[0]
        assert layer.self_attn.qkv_proj._method.out_features == (4 + 2 + 2) * 16 // 2
        down: ExpertMatrix = layer.mlp.experts._down_matrix
        assert {tuple(weight.shape) for weight in down.weights} == {(64, 16)}
        storage = {weight.untyped_storage().nbytes() for weight in down.weights}
        assert max(storage) <= down.weights[0].nbytes * len(down.weights)
