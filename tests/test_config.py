"""Engine settings: refusals name the flag, sizing follows the documented order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vkit.config import EngineArgs
from vkit.errors import ExitStatus, OutOfMemoryPreflight, UsageError
from vkit.facts import CacheGroupFacts, DeviceFacts, ModelFacts

GIB = 2**30

FULL = CacheGroupFacts("full", num_layers=4, bytes_per_unit=1024)
"""4 KiB per token over its layers: 128 KiB per block of 32."""


def model_facts(**changes: Any) -> ModelFacts:
    facts = ModelFacts(
        name="toy",
        architecture="LlamaForCausalLM",
        format="safetensors",
        dtype="bfloat16",
        max_model_len=2048,
        num_weight_bytes=GIB,
        cache_groups=(FULL,),
    )
    return dataclasses.replace(facts, **changes)


def device_facts(**changes: Any) -> DeviceFacts:
    facts = DeviceFacts(kind="cpu", total_bytes=8 * GIB, available_bytes=8 * GIB, num_threads=2)
    return dataclasses.replace(facts, **changes)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("model", "", "--model"),
        ("tokenizer", "", "--tokenizer"),
        ("dtype", "int7", "--dtype"),
        ("device", "tpu", "--device"),
        ("block_size", 0, "--block-size"),
        ("block_size", True, "--block-size"),
        ("num_blocks", -1, "--num-blocks"),
        ("kv_cache_memory", 0, "--kv-cache-memory"),
        ("gpu_memory_utilization", 1.5, "--gpu-memory-utilization"),
        ("gpu_memory_utilization", float("nan"), "--gpu-memory-utilization"),
        ("max_model_len", -1, "--max-model-len"),
        ("max_num_seqs", 0, "--max-num-seqs"),
        ("max_num_batched_tokens", 1.5, "--max-num-batched-tokens"),
        ("enable_prefix_caching", "yes", "--enable-prefix-caching"),
        ("scheduling_policy", "lifo", "--scheduling-policy"),
        ("max_logprobs", -2, "--max-logprobs"),
        ("logprobs_mode", "cooked", "--logprobs-mode"),
        ("hf_overrides", "{", "--hf-overrides"),
        ("hf_overrides", "[1]", "--hf-overrides"),
        ("threads", -1, "--threads"),
        ("threads", 1_000_000, "--threads"),
        ("cpu_precision", "sloppy", "--cpu-precision"),
        ("kv_cache_dtype", "int3", "--kv-cache-dtype"),
        ("prefix_caching_hash_algo", "crc32", "--prefix-caching-hash-algo"),
        ("seed", 2**64, "--seed"),
        ("enforce_eager", "yes", "--enforce-eager"),
        ("cudagraph_capture_sizes", "1,two", "--cudagraph-capture-sizes"),
        ("cudagraph_capture_sizes", [4, 0], "--cudagraph-capture-sizes"),
        ("cudagraph_capture_sizes", [], "--cudagraph-capture-sizes"),
    ],
)
def test_bad_value_names_its_flag(field: str, value: object, flag: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: ") as caught:
        EngineArgs(**{"model": "m", field: value})  # type: ignore[arg-type]
    assert caught.value.exit_status == ExitStatus.USAGE


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="blok_size"):
        EngineArgs(model="m", blok_size=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "--max-num-batched-tokens"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 200, "max_model_len": 400},
            "--max-num-batched-tokens",
        ),
        ({"max_num_partial_prefills": 1, "max_long_partial_prefills": 2}, "--max-long-partial-prefills"),
        ({"enable_chunked_prefill": False, "max_num_partial_prefills": 1}, "--max-num-partial-prefills"),
        ({"device": "cuda", "cpu_precision": "exact"}, "--cpu-precision"),
        ({"cudagraph_capture_sizes": "1,2", "enforce_eager": True}, "--cudagraph-capture-sizes"),
        ({"cudagraph_capture_sizes": [200], "max_num_seqs": 100}, "--cudagraph-capture-sizes"),
        ({"cudagraph_capture_sizes": [2], "tensor_parallel_size": 2}, "--cudagraph-capture-sizes"),
        ({"deterministic": True, "tensor_parallel_size": 3}, "--deterministic"),
        (
            {"cudagraph_capture_sizes": [2], "speculative_config": {"model": "d", "num_speculative_tokens": 2}},
            "--cudagraph-capture-sizes",
        ),
    ],
)
def test_contradictions_are_refused(args: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: "):
        EngineArgs(model="m", **args)


def test_json_overrides_may_be_text_or_mapping() -> None:
    as_text = EngineArgs(model="m", hf_overrides='{"rope_theta": 5.0}')
    assert as_text == EngineArgs(model="m", hf_overrides={"rope_theta": 5.0})
    assert as_text.resolve(model_facts(), device_facts()).hf_overrides == {"rope_theta": 5.0}


class TestTokenBudget:
    @pytest.mark.parametrize(
        ("args", "is_moe", "expected"),
        [
            ({}, False, 2048),
            ({}, True, 8192),
            ({"max_num_seqs": 8}, True, 4096),
            ({"max_num_seqs": 4000}, False, 4000),
            ({"max_num_batched_tokens": 300}, True, 300),
        ],
    )
    def test_by_architecture(self, args: dict[str, Any], is_moe: bool, expected: int) -> None:
        config = EngineArgs(model="m", **args).resolve(model_facts(is_moe=is_moe), device_facts())
        assert config.max_num_batched_tokens == expected

    def test_without_chunks_a_whole_prompt_must_fit(self) -> None:
        facts = model_facts(max_model_len=4096)
        config = EngineArgs(model="m", enable_chunked_prefill=False).resolve(facts, device_facts())
        assert config.max_num_batched_tokens == 4096
        args = EngineArgs(model="m", enable_chunked_prefill=False, max_num_batched_tokens=1024)
        with pytest.raises(UsageError, match="--max-num-batched-tokens: 1024 is below the context of 4096"):
            args.resolve(facts, device_facts())


class TestContext:
    def test_zero_takes_the_models_limit(self) -> None:
        assert EngineArgs(model="m").resolve(model_facts(), device_facts()).max_model_len == 2048

    def test_beyond_the_model_is_refused_with_the_way_to_say_so(self) -> None:
        with pytest.raises(UsageError, match=r"--max-model-len: 4096 is above the 2048 .*--hf-overrides"):
            EngineArgs(model="m", max_model_len=4096).resolve(model_facts(), device_facts())


class TestPoolOrder:
    def test_num_blocks_comes_first(self) -> None:
        args = EngineArgs(model="m", num_blocks=100, kv_cache_memory=GIB, gpu_memory_utilization=0.5)
        assert args.resolve(model_facts(), device_facts()).num_blocks == 100

    def test_then_kv_cache_memory(self) -> None:
        args = EngineArgs(model="m", num_blocks=0, kv_cache_memory=128 * 1024 * 90, gpu_memory_utilization=0.5)
        assert args.resolve(model_facts(), device_facts()).num_blocks == 90

    def test_then_the_share_of_memory(self) -> None:
        args = EngineArgs(model="m", gpu_memory_utilization=0.5)
        facts = model_facts(num_activation_bytes=GIB)
        assert args.resolve(facts, device_facts()).num_blocks == 2 * GIB // (128 * 1024)

    def test_share_leaves_alone_what_others_use(self) -> None:
        args = EngineArgs(model="m", gpu_memory_utilization=0.5)
        device = device_facts(available_bytes=7 * GIB)
        assert args.resolve(model_facts(), device).num_blocks == 2 * GIB // (128 * 1024)

    def test_zero_blocks_mean_ninety_two_percent(self) -> None:
        config = EngineArgs(model="m", num_blocks=0).resolve(model_facts(), device_facts())
        assert config.num_blocks == (int(8 * GIB * 0.92) - GIB) // (128 * 1024)

    def test_default_is_256(self) -> None:
        assert EngineArgs(model="m").resolve(model_facts(), device_facts()).num_blocks == 256

    def test_default_is_raised_for_one_long_sequence(self) -> None:
        facts = model_facts(max_model_len=32 * 1000)
        config = EngineArgs(model="m").resolve(facts, device_facts())
        assert (config.num_blocks, config.max_model_len, config.notes) == (1001, 32000, ())


class TestPoolTooSmall:
    def test_models_own_context_is_lowered_with_one_line(self) -> None:
        config = EngineArgs(model="m", num_blocks=11).resolve(model_facts(), device_facts())
        assert config.max_model_len == 320
        (line,) = config.notes
        assert "from 2048 to 320" in line
        assert "--max-model-len" in line

    def test_explicit_context_is_an_error_that_says_what_fits(self) -> None:
        args = EngineArgs(model="m", num_blocks=11, max_model_len=1024)
        with pytest.raises(OutOfMemoryPreflight, match=r"1024 tokens needs 33 .*gives 11 .*--max-model-len 320"):
            args.resolve(model_facts(), device_facts())

    def test_byte_budget_below_a_block_is_an_error(self) -> None:
        with pytest.raises(UsageError, match="--kv-cache-memory: 100 bytes"):
            EngineArgs(model="m", kv_cache_memory=100).resolve(model_facts(), device_facts())

    def test_weights_that_do_not_fit(self) -> None:
        facts = model_facts(num_weight_bytes=9 * GIB)
        with pytest.raises(OutOfMemoryPreflight, match=r"weights 9.00 GiB .*8.00 GiB of 8.00 GiB") as caught:
            EngineArgs(model="m").resolve(facts, device_facts())
        assert "leave weights in the file with --offload-config" in str(caught.value.remedy)
        with pytest.raises(OutOfMemoryPreflight) as caught:
            EngineArgs(model="m").resolve(facts, device_facts(kind="cuda"))
        assert "--offload-config" not in str(caught.value.remedy), "only a CPU leaves weights in the file"

    def test_explicit_pool_beyond_memory_names_the_length_that_fits(self) -> None:
        facts = model_facts(max_model_len=10_000_000, num_weight_bytes=0)
        args = EngineArgs(model="m", num_blocks=100_000)
        with pytest.raises(OutOfMemoryPreflight, match=r"--max-model-len 2097120 .*--num-blocks 65536"):
            args.resolve(facts, device_facts())

    @pytest.mark.parametrize(
        ("args", "flag"),
        [
            ({"max_num_seqs": 1_000_000}, "max_num_seqs"),
            ({"max_num_batched_tokens": 10_000_000}, "max_num_batched_tokens"),
            ({"gpu_memory_utilization": 0.01}, "gpu_memory_utilization"),
        ],
    )
    def test_the_flag_at_fault_is_named_with_a_value_that_fits(self, args: dict[str, Any], flag: str) -> None:
        def resolve(**given: Any) -> None:
            asked = EngineArgs(model="m", **given)
            num_bytes = (asked.max_num_batched_tokens or 2048) * 10_000 + asked.max_num_seqs * 100_000
            facts = model_facts(
                num_activation_bytes=num_bytes, activation_bytes_per_token=10_000, activation_bytes_per_seq=100_000
            )
            asked.resolve(facts, device_facts())

        name = "--" + flag.replace("_", "-")
        with pytest.raises(OutOfMemoryPreflight, match=f"^{name} {args[flag]}: .*{name} .* would fit") as caught:
            resolve(**args)
        assert caught.value.remedy is not None
        value = float(caught.value.remedy.split()[1])
        resolve(**{flag: value if value < 1 else int(value)})


class TestHybridGroups:
    def test_a_block_costs_the_largest_page_in_every_slab(self) -> None:
        state = CacheGroupFacts("state", num_layers=6, bytes_per_unit=50_000)
        facts = model_facts(cache_groups=(FULL, state))
        assert facts.bytes_per_block(32) == 6 * 50_000
        assert facts.blocks_for(2048, 32, 2048) == 64 + 1

    def test_a_window_bounds_what_one_sequence_holds(self) -> None:
        sliding = CacheGroupFacts("sliding", num_layers=4, bytes_per_unit=1024, window=128)
        facts = model_facts(cache_groups=(sliding,))
        assert facts.blocks_for(100_000, 32, 64) == 7
        assert facts.blocks_for(32, 32, 64) == 1

    def test_a_model_without_cache_needs_no_memory(self) -> None:
        config = EngineArgs(model="m").resolve(model_facts(cache_groups=()), device_facts())
        assert config.num_blocks == 256

    def test_prefix_caching_defaults_to_full_attention_only(self) -> None:
        sliding = CacheGroupFacts("sliding", num_layers=4, bytes_per_unit=1024, window=128)
        hybrid = model_facts(cache_groups=(FULL, sliding))
        assert EngineArgs(model="m").resolve(model_facts(), device_facts()).enable_prefix_caching
        assert not EngineArgs(model="m").resolve(hybrid, device_facts()).enable_prefix_caching
        assert EngineArgs(model="m", enable_prefix_caching=True).resolve(hybrid, device_facts()).enable_prefix_caching


class TestOtherDecisions:
    def test_lpm_without_prefix_caching_says_so(self) -> None:
        args = EngineArgs(model="m", scheduling_policy="lpm", enable_prefix_caching=False)
        config = args.resolve(model_facts(), device_facts())
        assert config.scheduling_policy == "fcfs"
        assert "lpm" in config.notes[0]

    def test_long_prompt_threshold_defaults_to_four_percent_where_it_is_needed(self) -> None:
        assert EngineArgs(model="m").resolve(model_facts(), device_facts()).long_prefill_token_threshold == 0
        limited = EngineArgs(model="m", max_num_partial_prefills=2).resolve(model_facts(), device_facts())
        assert limited.long_prefill_token_threshold == 81

    @pytest.mark.parametrize(
        ("asked", "own", "expected"),
        [("auto", "bfloat16", "bfloat16"), ("auto", "float16", "float32"), ("float16", "bfloat16", "float16")],
    )
    def test_dtype(self, asked: str, own: str, expected: str) -> None:
        config = EngineArgs(model="m", dtype=asked).resolve(model_facts(dtype=own), device_facts())
        assert config.dtype == expected

    @pytest.mark.parametrize(
        ("args", "own", "dtypes", "expected"),
        [
            ({}, "bfloat16", {"float32"}, "bfloat16"),
            ({}, "float16", {"float32"}, "bfloat16"),
            ({}, "float32", {"float32"}, "float32"),
            ({}, "bfloat16", {"float32", "bfloat16"}, "bfloat16"),
            ({"cpu_precision": "exact"}, "bfloat16", {"float32"}, "float32"),
            ({"dtype": "float32"}, "bfloat16", {"float32"}, "float32"),
            ({"kv_cache_dtype": "float16"}, "bfloat16", {"float32"}, "float16"),
        ],
    )
    def test_kv_cache_dtype(self, args: dict[str, Any], own: str, dtypes: set[str], expected: str) -> None:
        device = device_facts(dtypes=frozenset(dtypes))
        assert EngineArgs(model="m", **args).resolve(model_facts(dtype=own), device).kv_cache_dtype == expected

    def test_sizes_to_capture_are_a_list_or_a_text(self) -> None:
        cuda = device_facts(kind="cuda")
        for given in ("8, 1,4,8", [8, 4, 1], (1, 4, 8)):
            config = EngineArgs(model="m", cudagraph_capture_sizes=given).resolve(model_facts(), cuda)
            assert config.cudagraph_capture_sizes == (1, 4, 8)
        config = EngineArgs(model="m", enforce_eager=True).resolve(model_facts(), cuda)
        assert (config.enforce_eager, config.cudagraph_capture_sizes) == (True, ())

    def test_threads_and_overlap_come_from_the_device(self) -> None:
        config = EngineArgs(model="m").resolve(model_facts(), device_facts(num_threads=7))
        assert (config.threads, config.async_scheduling) == (7, False)
        assert EngineArgs(model="m").resolve(model_facts(), device_facts(kind="cuda")).async_scheduling

    @pytest.mark.parametrize(
        ("args", "kind", "flag"),
        [
            ({"device": "cuda"}, "cpu", "--device"),
            ({"cpu_precision": "exact"}, "cuda", "--cpu-precision"),
            ({"gguf_dequantize": True}, "cpu", "--gguf-dequantize"),
            ({"cudagraph_capture_sizes": "1"}, "cpu", "--cudagraph-capture-sizes"),
            ({"deterministic": True}, "cuda", "--deterministic"),
        ],
    )
    def test_flags_that_could_not_work_are_refused(self, args: dict[str, Any], kind: str, flag: str) -> None:
        with pytest.raises(UsageError, match=f"^{flag}: "):
            EngineArgs(model="m", **args).resolve(model_facts(), device_facts(kind=kind))
