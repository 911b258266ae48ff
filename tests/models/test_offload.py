"""Weights that stay out of memory: the same output, bounded memory, every refusal."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vkit import LLM, SamplingParams, kernels
from vkit.config import EngineArgs
from vkit.conversion import convert
from vkit.errors import ModelLoadError, UsageError
from vkit.layers import Experts
from vkit.layers.streaming import ByteRange, ExpertCache, FileReader, StoredMatrix
from vkit.weight_offload import ExpertCacheSize, OffloadConfig

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
_random = random.Random(3)
PROMPTS = [[_random.randrange(3, 200) for _ in range(length)] for length in (41, 7, 90)]
SETTINGS: dict[str, Any] = {
    "tokenizer": str(GOLDENS / "byte_tokenizer"),
    "dtype": "float32",
    "block_size": 16,
    "num_blocks": 60,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "threads": 1,
}


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "native" and kernels.backends("cpu")[0].unavailable:
        pytest.skip("no native kernels here")
    with kernels.using_backend("cpu", request.param):
        yield request.param


def answers(name: str, **settings: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities, which tell apart what tokens do not."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
    with LLM(str(GOLDENS / name), **{**SETTINGS, **settings}) as model:
        outputs = model.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    results = []
    for output in outputs:
        (completion,) = output.outputs
        assert completion.logprobs is not None
        results.append((completion.token_ids, [entry[0].logprob for entry in completion.logprobs]))
    return results


def check_same(
    got: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]], backend: str
) -> None:
    """Bit for bit; in plain torch, whose products depend on where in memory a weight begins, to rounding."""
    if backend == "native":
        assert got == expected
        return
    for (tokens, values), (wanted, close) in zip(got, expected, strict=True):
        assert tokens == wanted
        assert values == pytest.approx(close, abs=1e-4)


# Routed experts


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "nemotron_h", "gemma4_moe"])
def test_streamed_experts_say_what_resident_ones_say(name: str, backend: str) -> None:
    """Bit for bit, with the fewest places, a few more, and as many as there are experts."""
    expected = answers(name)
    with LLM(str(GOLDENS / name), **SETTINGS) as model:
        config = model._loaded.engine.runner._checkpoint.config  # type: ignore[attr-defined]
    config = config.get("text_config", config)
    top_k = config.get("num_experts_per_tok") or config["top_k_experts"]
    for slots in (top_k, top_k + 1, 10_000):
        check_same(answers(name, moe_expert_cache=slots), expected, backend)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_files_experts_are_streamed(name: str, kind: str, tmp_path: Path, backend: str) -> None:
    """Plain and packed, from a file that `vkit convert` wrote."""
    file = tmp_path / f"{name}.gguf"
    convert(GOLDENS / name, file, type=kind)
    check_same(answers(str(file), moe_expert_cache=2), answers(str(file)), backend)


def test_places_hold_and_memory_is_bounded() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    with LLM(str(GOLDENS / "mixtral"), **SETTINGS, moe_expert_cache=2) as model:
        resident: Any = model._loaded.engine.runner
        caches = [module.cache for _, module in resident._model.walk() if isinstance(module, Experts)]
        most = 0
        for prompt in PROMPTS:
            model.generate([{"prompt_token_ids": prompt}], params)
            most = max(most, *(len(cache.held) for cache in caches))
        assert most == 2
        assert sum(cache.num_misses for cache in caches) > 2 * len(caches)
        assert resident._reader.num_bytes > 0
        model.sleep(2)
        model.wake_up()
        assert model.generate([{"prompt_token_ids": PROMPTS[0]}], params)


def stored(tmp_path: Path, num_experts: int) -> StoredMatrix:
    """A matrix of 2 x 4 float32 per expert, all values its number."""
    file = tmp_path / "experts"
    values = torch.arange(num_experts, dtype=torch.float32).repeat_interleave(8)
    file.write_bytes(values.numpy().tobytes())
    ranges = tuple(ByteRange(file, 32 * index, 32) for index in range(num_experts))
    return StoredMatrix(ranges, (2, 4), torch.float32, None, None)


def test_the_coldest_gives_up_its_place(tmp_path: Path) -> None:
    reader = FileReader()
    cache = ExpertCache([stored(tmp_path, 6)], 3, reader)
    for experts in ([0, 1], [0, 2], [0, 2]):
        cache.note(experts, 1)
        (matrix,) = cache.take(experts)
        assert [weight[0, 0].item() for weight in matrix.weights] == experts  # type: ignore[index]
    assert (cache.held, cache.num_misses) == ([0, 1, 2], 3)
    cache.note([3], 1)
    cache.take([3])  # 1 was chosen least
    assert cache.held == [0, 2, 3]
    cache.note([4, 5], 1)
    cache.take([4, 5])  # 3 was chosen as often as they, longest ago; then 2 and 0 by how often
    assert cache.held == [0, 4, 5]
    for _ in range(3):
        cache.note([4], 16)  # what was chosen long ago counts half, and half again
    cache.note([1], 1)
    cache.take([1, 4])
    assert cache.held == [0, 1, 4] or cache.held == [1, 4, 5]
    reader.close()


def test_a_file_that_has_become_shorter_is_told(tmp_path: Path) -> None:
    matrix = stored(tmp_path, 2)
    os.truncate(tmp_path / "experts", 40)
    reader = FileReader()
    with pytest.raises(OSError, match="has become shorter"):
        ExpertCache([matrix], 2, reader).take([0, 1])
    reader.close()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mixtral", {"moe_expert_cache": 1}, "1 experts per layer are fewer than the 2 that every token chooses"),
        ("mixtral", {"moe_expert_cache": "0.000001GB"}, "0 experts per layer are fewer than the 2"),
        ("llama", {"moe_expert_cache": 2}, "--moe-expert-cache: llama has no routed experts"),
        ("mixtral", {"moe_expert_cache": 2, "no_mmap": True}, "not in the file as they are used"),
        ("llama", {"offload_config": {"prefetch": {"offload_group_size": 2}}}, "on a CPU both are one"),
        (
            "llama",
            {"offload_config": {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["experts"]}}},
            "no linear weight with experts in its name",
        ),
    ],
)
def test_what_cannot_be_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, ModelLoadError), match=message):
        LLM(str(GOLDENS / name), **{**SETTINGS, **settings})


def test_the_size_advised_is_one_that_does() -> None:
    model = str(GOLDENS / "mixtral")
    with pytest.raises(UsageError) as failure:
        LLM(model, **SETTINGS, moe_expert_cache="0.000001GB")
    advised = re.search(r"or ([\d.]+GB) \([\d,]+ bytes\)", str(failure.value))
    assert advised is not None, failure.value
    with LLM(model, **SETTINGS, moe_expert_cache=advised[1]) as found:
        assert found is not None


def test_many_sequences_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(GOLDENS / "mixtral"), **{**SETTINGS, "max_num_seqs": 5}, moe_expert_cache=2):
        assert "--max-num-seqs 4 or less is faster" in caplog.text


@pytest.mark.parametrize("value", [0, -1, "x", "GB", "0GB", "2MB", True, 1.5])
def test_sizes_that_make_no_sense(value: Any) -> None:
    with pytest.raises(UsageError, match="--moe-expert-cache: expected a number of experts"):
        EngineArgs(model="m", moe_expert_cache=value)


def test_sizes() -> None:
    assert ExpertCacheSize.parse("7").slots_of(10**6, 4) == 7
    assert ExpertCacheSize.parse("0.5GB").slots_of(2**20, 4) == 128


# Whole weights


@pytest.mark.parametrize("name", ["llama", "llama/model-q8_0.gguf", "quant/fp8_static", "gpt2", "phi"])
@pytest.mark.parametrize("gigabytes", [1e-5, 1])
def test_offloaded_weights_say_what_resident_ones_say(name: str, gigabytes: float, backend: str) -> None:
    config = {"uva": {"cpu_offload_gb": gigabytes}}
    check_same(answers(name, offload_config=config), answers(name), backend)


def test_the_budget_is_looked_at_before_each_weight_and_segments_match_whole() -> None:
    def names(**uva: Any) -> list[str]:
        from vkit.models.offload import plan_offload

        with LLM(str(GOLDENS / "llama"), **SETTINGS) as model:
            resident: Any = model._loaded.engine.runner
            config = OffloadConfig.parse({"uva": uva})
            return sorted(plan_offload(resident._model, resident._checkpoint, config, None, 1).names)

    assert len(names(cpu_offload_gb=1e-9)) == 1
    down = names(cpu_offload_gb=1, cpu_offload_params=["down_proj"])
    assert down == [f"model.layers.{i}.mlp.down_proj.weight" for i in range(3)]
    assert names(cpu_offload_gb=1, cpu_offload_params=["layers.1.mlp"]) == [
        f"model.layers.1.mlp.{part}_proj.weight" for part in ("down", "gate", "up")
    ]


def test_slowness_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(GOLDENS / "llama"), **SETTINGS, offload_config={"uva": {"cpu_offload_gb": 1}}):
        assert "read from the disk at every step, which is slow" in caplog.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ({"offload_backend": "disk"}, "offload_backend: expected one of auto, uva, prefetch"),
        ({"uva": {"cpu_offload_gb": -1}}, r"uva\.cpu_offload_gb: expected a number of GB"),
        ({"uva": {"cpu_offload": 1}}, "unknown key 'cpu_offload', did you mean cpu_offload_gb"),
        ({"uvaa": {}}, "unknown key 'uvaa', did you mean uva"),
        ({"uva": {"cpu_offload_gb": 1, "cpu_offload_params": "x"}}, "expected a list of name segments"),
        ({"offload_backend": "uva"}, "uva.cpu_offload_gb: must be above 0"),
        ({"offload_backend": "prefetch"}, "prefetch.offload_group_size: must be above 0"),
        ({}, "asks for nothing"),
        ("{}", "asks for nothing"),
        ({"prefetch": {}}, "asks for nothing"),
        ({"uva": {"cpu_offload_gb": 0}}, "asks for nothing"),
        (
            {"offload_backend": "uva", "uva": {"cpu_offload_gb": 1}, "prefetch": {"offload_params": ["a"]}},
            r"prefetch\.offload_params: the backend is uva, which does not use it",
        ),
        ({"prefetch": {"offload_group_size": 2, "offload_num_in_group": 3}}, "at most offload_group_size"),
        (
            {"prefetch": {"offload_group_size": 2, "offload_prefetch_step": 0}},
            "offload_prefetch_step: expected an integer",
        ),
    ],
)
def test_offload_settings_that_cannot_be(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineArgs(model="m", offload_config=value)


MEASURE = """
import sys
from vkit import LLM, SamplingParams
def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
settings = dict(tokenizer=sys.argv[2], block_size=16, num_blocks=20, max_model_len=64, max_num_seqs=1, threads=1)
if sys.argv[3] != "0":
    settings["moe_expert_cache"] = int(sys.argv[3])
before = anonymous()
with LLM(sys.argv[1], **settings) as model:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    out = model.generate([{"prompt_token_ids": list(range(3, 30))}], params)
    print(anonymous() - before, *out[0].outputs[0].token_ids)
"""


def large_moe(folder: Path) -> Path:
    """A small Mixtral whose 160 experts per layer are all that weighs anything, random."""
    import json

    from safetensors.torch import load_file, save_file

    folder.mkdir()
    config = json.loads((GOLDENS / "mixtral" / "config.json").read_text())
    tensors = load_file(GOLDENS / "mixtral" / "model.safetensors")
    hidden, wide, num_experts = config["hidden_size"], 4096, 160
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(torch.bfloat16)

    kept = {name: value.to(torch.bfloat16) for name, value in tensors.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        where = f"model.layers.{layer}.block_sparse_moe"
        kept[f"{where}.gate.weight"] = values(num_experts, hidden)
        for expert in range(num_experts):
            for part in ("w1", "w3"):
                kept[f"{where}.experts.{expert}.{part}.weight"] = values(wide, hidden)
            kept[f"{where}.experts.{expert}.w2.weight"] = values(hidden, wide)
    config.update(intermediate_size=wide, num_local_experts=num_experts, torch_dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_memory_grows_by_the_places_and_not_by_the_experts(tmp_path: Path) -> None:
    model = large_moe(tmp_path / "moe")
    weights = (model / "model.safetensors").stat().st_size / 1024
    results = {}
    for slots in ("0", "2"):
        command = [sys.executable, "-c", MEASURE, str(model), str(GOLDENS / "byte_tokenizer"), slots]
        growth, *tokens = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        results[slots] = (int(growth), tokens)
    assert results["2"][1] == results["0"][1]
    assert results["0"][0] > 0.8 * weights
    assert results["2"][0] < 0.5 * results["0"][0]
