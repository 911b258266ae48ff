"""Engine settings: what the user said (`EngineArgs`) and what will be done (`EngineConfig`). No torch.

`EngineArgs` is checked on construction; `EngineArgs.resolve` joins it with what is known of the model and the device
into one frozen `EngineConfig`. The sizing rules and start-up constraints are pure functions here, so that they can be
tested without a model. Field names equal the command-line flags.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vkit.errors import UsageError
from vkit.facts import DeviceFacts, ModelFacts
from vkit.kv_transfer import KVTransferConfig
from vkit.pool_size import size_pool
from vkit.speculative_config import METHODS_OF_TOKENS, SpeculativeSettings, parse_speculative_config
from vkit.weight_offload import EXPERT_FLAG, FLAG, MAX_CALM_SEQS, ExpertCacheSize, OffloadConfig

DEFAULT_MAX_LORAS = 4
DENSE_TOKEN_BUDGET = 2048
MOE_TOKEN_BUDGET = 8192
MOE_SMALL_BATCH_TOKEN_BUDGET = 4096
SMALL_BATCH_SEQS = 8
MIN_THREAD_LIMIT = 256
THREADS_PER_CORE = 4
LONG_PREFILL_SHARE = 0.04
"""Share of `max_model_len` above which a prompt counts as long, unless a threshold is given."""


DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2", "int8")
NARROW_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""What the flag calls them -> what torch calls them."""
SCHEDULING_POLICIES = ("fcfs", "priority", "lpm")
PREFIX_CACHING_HASH_ALGOS = ("sha256", "sha256_cbor")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
QUANTIZATIONS = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gguf", "gptq", "modelopt")
"""Values of --quantization: what a checkpoint can be stored as."""
CPU_PRECISIONS = ("fast", "exact")
STRUCTURED_OUTPUTS_BACKENDS = ("auto", "llguidance")
CONTENT_FORMATS = ("auto", "string", "openai")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArgs:
    """What the user said about the engine; unset values are None or 0 and are decided in `resolve`.

    Raises:
        UsageError: a value out of range; the message names the flag.
    """

    model: str
    """A checkpoint directory or a `.gguf` file; `vkit.resolve_model` turns a hub repository id into one."""
    tokenizer: str | None = None
    """A directory or file to take the tokenizer from instead of the model."""
    tokenizer_config: str | None = None
    """A file that replaces the checkpoint's tokenizer_config.json."""
    chat_template: str | None = None
    """A template file, or the template itself, that replaces the model's own."""
    chat_template_content_format: str = "auto"
    """How templates get message contents: "string", "openai" (lists of parts), or "auto": what the template reads."""
    served_model_name: str | Sequence[str] | None = None
    """Names that requests may call the model; the first is shown. None: the base name of `model`."""
    tool_parser: str = "hermes"
    """How `AsyncLLM.chat` and the server read tool calls; "auto" asks the chat template, "none" reads none."""
    reasoning_parser: str = "none"
    """How thoughts are told from answers; "auto" asks the chat template, "none": they are not."""
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 32
    num_blocks: int | None = None
    """KV blocks; 0: sized from memory; None: 256, raised to what one sequence of max_model_len needs."""
    kv_cache_memory: int | None = None
    """Bytes for the KV cache."""
    gpu_memory_utilization: float | None = None
    """Share of the device's memory the engine may use."""
    max_model_len: int = 0
    """Context limit in tokens; 0: the model's own."""
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 0
    """Most tokens one step runs through the model; 0: by architecture."""
    enable_prefix_caching: bool | None = None
    """None: on for models made only of full attention."""
    scheduling_policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step; 0: no limit of its own."""
    mmproj: str | None = None
    """A GGUF file with the tower that goes with a GGUF language model."""
    max_num_encoder_input_tokens: int = 0
    """Most prompt tokens whose media one step encodes, and most that are kept encoded; 0: the token budget."""
    disable_chunked_mm_input: bool = False
    """A step computes all tokens of a media item or none."""
    limit_mm_per_prompt: Mapping[str, int] | str | None = None
    """Most items per kind in one prompt; a mapping, or a JSON object as text. A kind that is left out has no limit."""
    max_num_partial_prefills: int = 0
    """Most prompts that may be mid-prefill at a time; 0: no limit."""
    max_long_partial_prefills: int = 0
    """Most long prompts that may be mid-prefill at a time; 0: no limit."""
    prefix_caching_hash_algo: str = "sha256"
    async_scheduling: bool | None = None
    """Plan the next step while the device runs this one; None: on for CUDA."""
    enforce_eager: bool = False
    """Run every step op by op: no captured decoding steps on CUDA, no recorded program on a CPU."""
    cudagraph_capture_sizes: Sequence[int] | str | None = None
    """Numbers of sequences that decoding steps are captured for, a list or "1,2,4"; None: 1, 2, 4, 8, and so on."""
    enable_jump_forward: bool = False
    """Append tokens that a grammar leaves no choice about without a step for each."""
    structured_outputs_backend: str = "auto"
    enable_lora: bool = False
    """Let requests choose low-rank adapters."""
    lora_modules: Sequence[str] | Mapping[str, str] = ()
    """Adapters to load at start: name=path each, or a mapping from name to path."""
    max_loras: int | None = None
    """Most different adapters that run at a time; None: 4."""
    seed: int | None = None
    """Seed of requests that bring none; None: a fresh one per process."""
    quantization: str | None = None
    """What the weights must be stored as; "fp8" also makes eight-bit floats of plain weights as they are read."""
    hf_overrides: Mapping[str, Any] | str | None = None
    """Keys of config.json to replace; a mapping, or a JSON object as text."""
    logprobs_mode: str = "raw_logprobs"
    logits_processors: str | Sequence[str] = ()
    """Classes that edit every step's logits, as "module:Class", beside the installed ones."""
    kv_cache_metrics: bool = False
    """Measure how long blocks of the KV cache live, idle and wait to be used again."""
    max_logprobs: int = 20
    """Most log-probabilities a request may ask for per position; -1: no limit."""
    deterministic: bool = False
    """Results never depend on which requests share a batch."""
    tensor_parallel_size: int = 1
    """Ranks that share the model, each in a process and on a device of its own."""
    threads: int = 0
    """CPU threads of each rank; 0: as many as this process may use, divided among the ranks on this host."""
    cpu_precision: str = "fast"
    kv_cache_dtype: str = "auto"
    """How keys and values are kept; auto: see `resolve_kv_cache_dtype`."""
    gguf_dequantize: bool = False
    """Expand GGUF blocks to the compute dtype at load instead of keeping them packed."""
    no_mmap: bool = False
    """Read weight files instead of mapping them."""
    speculative_config: SpeculativeSettings | Mapping[str, Any] | str | None = None
    """How to draft tokens: settings, a mapping, or a JSON object as text."""
    offload_config: OffloadConfig | Mapping[str, Any] | str | None = None
    """Weights that stay out of memory between uses; a mapping, or a JSON object as text."""
    moe_expert_cache: ExpertCacheSize | int | str | None = None
    """Routed experts of each layer that are in memory at a time: a number, or a size such as 2GB; None: all."""
    kv_transfer_config: KVTransferConfig | Mapping[str, Any] | str | None = None
    """Where cache entries come from and go to besides this engine; a mapping, or a JSON object as text."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise UsageError(f"--model: expected a directory or a .gguf file, got {self.model!r}")
        for name in ("tokenizer", "tokenizer_config", "chat_template", "mmproj", "tool_parser", "reasoning_parser"):
            value = getattr(self, name)
            if (value is not None or name.endswith("_parser")) and (not isinstance(value, str) or not value):
                raise UsageError(f"{flag_of(name)}: expected a non-empty string, got {value!r}")
        object.__setattr__(self, "served_model_name", _names(self.served_model_name))
        object.__setattr__(self, "logits_processors", _class_paths(self.logits_processors))
        object.__setattr__(self, "lora_modules", _named_paths(self.lora_modules))
        if not self.enable_lora and (self.lora_modules or self.max_loras is not None):
            flag = "--lora-modules" if self.lora_modules else "--max-loras"
            raise UsageError(f"{flag}: needs --enable-lora")
        if self.max_loras is not None:
            _check_int("max_loras", self.max_loras, 1)
        _check_choice("chat_template_content_format", self.chat_template_content_format, CONTENT_FORMATS)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("device", self.device, DEVICES)
        _check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _check_choice("prefix_caching_hash_algo", self.prefix_caching_hash_algo, PREFIX_CACHING_HASH_ALGOS)
        _check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        _check_choice("structured_outputs_backend", self.structured_outputs_backend, STRUCTURED_OUTPUTS_BACKENDS)
        _check_choice("cpu_precision", self.cpu_precision, CPU_PRECISIONS)
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_int("block_size", self.block_size, 1)
        _check_int("max_num_seqs", self.max_num_seqs, 1)
        _check_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        _check_int("max_logprobs", self.max_logprobs, -1)
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "max_num_encoder_input_tokens",
            "threads",
        ):
            _check_int(name, getattr(self, name), 0)
        _check_threads(self.threads)
        if self.num_blocks is not None:
            _check_int("num_blocks", self.num_blocks, 0)
        if self.kv_cache_memory is not None:
            _check_int("kv_cache_memory", self.kv_cache_memory, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.gpu_memory_utilization is not None:
            _check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        for name in ("enable_prefix_caching", "async_scheduling"):
            if getattr(self, name) is not None:
                _check_bool(name, getattr(self, name))
        object.__setattr__(self, "cudagraph_capture_sizes", _capture_sizes(self.cudagraph_capture_sizes))
        for name in (
            "disable_chunked_mm_input",
            "enable_chunked_prefill",
            "enforce_eager",
            "enable_jump_forward",
            "enable_lora",
            "deterministic",
            "gguf_dequantize",
            "no_mmap",
            "kv_cache_metrics",
        ):
            _check_bool(name, getattr(self, name))
        # The frozen value is completed once, here, before anyone sees it.
        object.__setattr__(self, "hf_overrides", _json_object("hf_overrides", self.hf_overrides))
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", parse_speculative_config(self.speculative_config))
        object.__setattr__(self, "limit_mm_per_prompt", _media_limits(self.limit_mm_per_prompt))
        if self.offload_config is not None:
            object.__setattr__(self, "offload_config", OffloadConfig.parse(self.offload_config))
        if self.moe_expert_cache is not None:
            object.__setattr__(self, "moe_expert_cache", ExpertCacheSize.parse(self.moe_expert_cache))
        if self.kv_transfer_config is not None:
            object.__setattr__(self, "kv_transfer_config", KVTransferConfig.parse(self.kv_transfer_config))
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Refuse values that contradict each other whatever the model is."""
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"--max-num-batched-tokens: {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs};"
                " every running sequence needs one token per step"
            )
        if not self.enable_chunked_prefill and 0 < self.max_num_batched_tokens < self.max_model_len:
            raise UsageError(
                f"--max-num-batched-tokens: {self.max_num_batched_tokens} is below --max-model-len"
                f" {self.max_model_len}, which --no-enable-chunked-prefill does not allow"
            )
        if 0 < self.max_num_partial_prefills < self.max_long_partial_prefills:
            raise UsageError(
                f"--max-long-partial-prefills: {self.max_long_partial_prefills} is above"
                f" --max-num-partial-prefills {self.max_num_partial_prefills}"
            )
        if not self.enable_chunked_prefill:
            for name in ("long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills"):
                if getattr(self, name):
                    raise UsageError(f"{flag_of(name)}: cuts prompts, so it needs --enable-chunked-prefill")
        if self.device == "cuda" and self.cpu_precision != "fast":
            raise UsageError(f"--cpu-precision: {self.cpu_precision} has no effect with --device cuda")
        if self.capture_sizes:
            if self.enforce_eager:
                raise UsageError("--cudagraph-capture-sizes: nothing is captured with --enforce-eager")
            if self.capture_sizes[-1] > self.max_num_seqs:
                raise UsageError(
                    f"--cudagraph-capture-sizes: {self.capture_sizes[-1]} is above --max-num-seqs {self.max_num_seqs}"
                )
            if self.speculation is not None and self.speculation.method not in METHODS_OF_TOKENS:
                raise UsageError(
                    f"--cudagraph-capture-sizes: nothing is captured with drafts of {self.speculation.method}",
                    remedy=f"leave it out, or draft with one of {', '.join(METHODS_OF_TOKENS)}",
                )
        if self.tensor_parallel_size > 1:
            self._check_shared()

    def _check_shared(self) -> None:
        """Refuse what several ranks do not do together."""
        speculation = self.speculation
        refused = {
            "--cudagraph-capture-sizes": bool(self.capture_sizes),
            # Two numbers add up alike in any order; three and more in an order that goes with the size of the step.
            "--deterministic": self.deterministic and self.tensor_parallel_size > 2,
            "--enable-lora": self.enable_lora,
            "--kv-transfer-config": self.kv_transfer_config is not None,
            "--offload-config": self.offload_config is not None,
            "--moe-expert-cache": self.moe_expert_cache is not None,
            f"--speculative-config: method: {speculation.method if speculation else ''}": speculation is not None
            and speculation.method not in METHODS_OF_TOKENS,
        }
        for what, is_given in refused.items():
            if is_given:
                raise UsageError(
                    f"{what}: does not work with --tensor-parallel-size {self.tensor_parallel_size}",
                    remedy="leave one of them out",
                )

    @property
    def speculation(self) -> SpeculativeSettings | None:
        """How to draft tokens; None: not at all."""
        settings = self.speculative_config
        assert settings is None or isinstance(settings, SpeculativeSettings)
        return settings

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Numbers of sequences that decoding steps are captured for, ascending; none: chosen by the engine."""
        sizes = self.cudagraph_capture_sizes
        assert sizes is None or isinstance(sizes, tuple)
        return sizes or ()

    def _check_media(self, model: ModelFacts) -> None:
        """Refuse what only means something for models that take media."""
        if model.media_kinds:
            unknown = [kind for kind in self.limit_mm_per_prompt or () if kind not in model.media_kinds]
            if unknown:
                known = ", ".join(model.media_kinds)
                raise UsageError(f"--limit-mm-per-prompt: {model.name} takes {known}, not {unknown[0]}")
            return
        for name in ("limit_mm_per_prompt", "max_num_encoder_input_tokens", "disable_chunked_mm_input"):
            if getattr(self, name):
                raise UsageError(f"{flag_of(name)}: {model.name} takes text only")

    def resolve(self, model: ModelFacts, device: DeviceFacts) -> EngineConfig:
        """Decide every setting for this model on this device.

        Raises:
            UsageError: a flag that contradicts the model or the device.
            OutOfMemoryPreflight: weights and one sequence do not fit; says what is needed and what would fit.
        """
        if self.device not in ("auto", device.kind):
            raise UsageError(f"--device: {self.device} was asked for, but the device found is {device.kind}")
        if device.kind == "cuda" and self.cpu_precision != "fast":
            raise UsageError(f"--cpu-precision: {self.cpu_precision} has no effect on {device.kind}")
        if device.kind != "cuda" and self.capture_sizes:
            raise UsageError(f"--cudagraph-capture-sizes: has no effect on {device.kind}, only with --device cuda")
        if device.kind == "cuda" and self.deterministic:
            raise UsageError(
                "--deterministic: not on cuda, where products of one token and of several add in another order",
                remedy="leave it out, or run with --device cpu",
            )
        if self.gguf_dequantize and model.format != "gguf":
            raise UsageError(f"--gguf-dequantize: {model.name} is a {model.format} checkpoint, not a GGUF file")
        self._check_media(model)
        notes: list[str] = []
        max_model_len = checked_max_model_len(self.max_model_len, model)
        token_budget = resolve_token_budget(self, max_model_len, model.is_moe)
        block_size = model.block_size_for(self.block_size)
        if block_size != self.block_size:
            notes.append(
                f"--block-size raised from {self.block_size} to {block_size} tokens, which fill the page of a recurrent"
                " state or hold whole compressed entries"
            )
        pool = size_pool(self, model, device, max_model_len, token_budget)
        notes.extend(pool.notes)
        prefix_caching = self.enable_prefix_caching
        if prefix_caching is None:
            prefix_caching = model.is_full_attention_only
        policy = self.scheduling_policy
        if policy == "lpm" and not prefix_caching:
            notes.append("--scheduling-policy lpm needs prefix caching, which is off; requests run in arrival order")
            policy = "fcfs"
        threshold = self.long_prefill_token_threshold
        if threshold == 0 and (self.max_num_partial_prefills or self.max_long_partial_prefills):
            threshold = max(1, int(pool.max_model_len * LONG_PREFILL_SHARE))
        overrides = self.hf_overrides
        assert overrides is None or isinstance(overrides, Mapping)
        limits = self.limit_mm_per_prompt
        assert isinstance(limits, Mapping)
        transfer = self.kv_transfer_config
        assert transfer is None or isinstance(transfer, KVTransferConfig)
        offload, experts = self.offload_config, self.moe_expert_cache
        assert offload is None or isinstance(offload, OffloadConfig)
        assert experts is None or isinstance(experts, ExpertCacheSize)
        notes.extend(offload_notes(offload, experts, self.max_num_seqs, device))
        return EngineConfig(
            model=self.model,
            tokenizer=self.tokenizer,
            tokenizer_config=self.tokenizer_config,
            chat_template=self.chat_template,
            chat_template_content_format=self.chat_template_content_format,
            served_model_name=tuple(self.served_model_name or (_base_name(self.model),)),
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            dtype=resolve_dtype(self.dtype, model.dtype, device),
            device=device.kind,
            block_size=block_size,
            num_blocks=pool.num_blocks,
            max_model_len=pool.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=token_budget,
            enable_prefix_caching=prefix_caching,
            scheduling_policy=policy,
            enable_chunked_prefill=self.enable_chunked_prefill,
            long_prefill_token_threshold=threshold,
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_long_partial_prefills=self.max_long_partial_prefills,
            mmproj=self.mmproj,
            max_num_encoder_input_tokens=self.max_num_encoder_input_tokens or token_budget,
            disable_chunked_mm_input=self.disable_chunked_mm_input,
            limit_mm_per_prompt=limits,
            prefix_caching_hash_algo=self.prefix_caching_hash_algo,
            async_scheduling=device.kind == "cuda" if self.async_scheduling is None else self.async_scheduling,
            enforce_eager=self.enforce_eager,
            cudagraph_capture_sizes=self.capture_sizes,
            enable_jump_forward=self.enable_jump_forward,
            enable_lora=self.enable_lora,
            lora_modules=tuple(self.lora_modules),
            max_loras=(self.max_loras or DEFAULT_MAX_LORAS) if self.enable_lora else 0,
            structured_outputs_backend="llguidance",
            seed=self.seed,
            quantization=self.quantization,
            hf_overrides=dict(overrides or {}),
            logprobs_mode=self.logprobs_mode,
            logits_processors=tuple(self.logits_processors),
            kv_cache_metrics=self.kv_cache_metrics,
            max_logprobs=self.max_logprobs,
            deterministic=self.deterministic,
            tensor_parallel_size=self.tensor_parallel_size,
            threads=self.threads or device.num_threads,
            cpu_precision=self.cpu_precision,
            kv_cache_dtype=resolve_kv_cache_dtype(self, model.dtype, device),
            gguf_dequantize=self.gguf_dequantize,
            no_mmap=self.no_mmap,
            speculation=self.speculation,
            kv_transfer_config=transfer,
            offload_config=offload,
            moe_expert_cache=experts,
            notes=tuple(notes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Every engine setting, decided. Nobody changes it afterwards."""

    model: str
    tokenizer: str | None = None
    tokenizer_config: str | None = None
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    served_model_name: tuple[str, ...] = ()
    tool_parser: str = "hermes"
    reasoning_parser: str = "none"
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    device: str
    """"cpu" or "cuda"."""
    block_size: int
    num_blocks: int
    """Size of the pool, the null block included."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    scheduling_policy: str
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    max_num_partial_prefills: int
    max_long_partial_prefills: int
    mmproj: str | None = None
    max_num_encoder_input_tokens: int = 0
    disable_chunked_mm_input: bool = False
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
    prefix_caching_hash_algo: str
    async_scheduling: bool
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] = ()
    """Numbers of sequences that decoding steps are captured for; none: the engine's own choice."""
    enable_jump_forward: bool
    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()
    """Adapters to load at start, name=path each."""
    max_loras: int = 0
    """Most different adapters that run at a time; 0: requests cannot choose any."""
    structured_outputs_backend: str
    """What compiles and follows grammars; decided even where none is installed: requests that need it are refused."""
    seed: int | None
    quantization: str | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    logprobs_mode: str
    logits_processors: tuple[str, ...] = ()
    kv_cache_metrics: bool = False
    max_logprobs: int
    deterministic: bool
    tensor_parallel_size: int = 1
    threads: int
    cpu_precision: str
    kv_cache_dtype: str
    gguf_dequantize: bool
    no_mmap: bool
    speculation: SpeculativeSettings | None = None
    kv_transfer_config: KVTransferConfig | None = None
    offload_config: OffloadConfig | None = None
    moe_expert_cache: ExpertCacheSize | None = None
    notes: tuple[str, ...] = ()
    """Lines to log once: what was lowered, raised or replaced, and why."""


def _names(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    names = (given,) if isinstance(given, str) else given
    if names is not None and (not names or not all(isinstance(name, str) and name for name in names)):
        raise UsageError(f"--served-model-name: expected a name or several, none of them empty, got {given!r}")
    return None if names is None else tuple(dict.fromkeys(names))


def _named_paths(given: Sequence[str] | Mapping[str, str]) -> tuple[str, ...]:
    if isinstance(given, Mapping):
        given = tuple(f"{name}={path}" for name, path in given.items())
    items = (given,) if isinstance(given, str) else tuple(given)
    names = []
    for item in items:
        name, _, path = item.partition("=") if isinstance(item, str) else ("", "", "")
        if not name or not path:
            raise UsageError(f"--lora-modules: expected NAME=PATH, got {item!r}")
        names.append(name)
    if len(set(names)) < len(names):
        raise UsageError(f"--lora-modules: a name is given twice: {', '.join(names)}")
    return items


def _class_paths(given: str | Sequence[str]) -> tuple[str, ...]:
    paths = (given,) if isinstance(given, str) else tuple(given)
    for path in paths:
        parts = path.split(":") if isinstance(path, str) else ()
        if len(parts) != 2 or not all(part.isidentifier() for whole in parts for part in whole.split(".")):
            raise UsageError(f"--logits-processors: expected module:Class, got {path!r}")
    return tuple(dict.fromkeys(paths))


def _capture_sizes(given: Sequence[int] | str | None) -> tuple[int, ...] | None:
    """The numbers, ascending; a text is a list with commas."""
    if given is None:
        return None
    items = given.split(",") if isinstance(given, str) else list(given)
    sizes = [int(item) if isinstance(item, str) and item.strip().isdigit() else item for item in items]
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise UsageError(f"--cudagraph-capture-sizes: expected positive numbers such as 1,2,4,8, got {given!r}")
    return tuple(sorted({size for size in sizes if isinstance(size, int)}))


def _base_name(model: str) -> str:
    """The last part of a path, without .gguf."""
    return os.path.basename(os.path.normpath(model)).removesuffix(".gguf")


def flag_of(field_name: str) -> str:
    """The command-line flag of an `EngineArgs` field."""
    return "--" + field_name.replace("_", "-")


def checked_max_model_len(asked: int, model: ModelFacts) -> int:
    """The context limit asked for, or the model's own for 0.

    Raises:
        UsageError: above the model's limit.
    """
    if asked > model.max_model_len:
        raise UsageError(
            f"--max-model-len: {asked} is above the {model.max_model_len} tokens {model.name} was made for",
            remedy="to go beyond, say so: --hf-overrides '{\"max_position_embeddings\": N}'",
        )
    return asked or model.max_model_len


def resolve_token_budget(args: EngineArgs, max_model_len: int, is_moe: bool) -> int:
    """Most tokens one step runs through the model.

    Raises:
        UsageError: an explicit budget below max_model_len although prompts may not be cut.
    """
    if args.max_num_batched_tokens:
        if not args.enable_chunked_prefill and args.max_num_batched_tokens < max_model_len:
            raise UsageError(
                f"--max-num-batched-tokens: {args.max_num_batched_tokens} is below the context of {max_model_len}"
                " tokens, which --no-enable-chunked-prefill does not allow",
                remedy=f"lower --max-model-len or raise the budget to {max_model_len}",
            )
        return args.max_num_batched_tokens
    budget = DENSE_TOKEN_BUDGET
    if is_moe:
        budget = MOE_SMALL_BATCH_TOKEN_BUDGET if args.max_num_seqs <= SMALL_BATCH_SEQS else MOE_TOKEN_BUDGET
    if not args.enable_chunked_prefill:
        budget = max(budget, max_model_len)
    return max(budget, args.max_num_seqs)


def resolve_dtype(asked: str, checkpoint_dtype: str, device: DeviceFacts) -> str:
    """The compute dtype: the one asked for; for auto the checkpoint's where the device is fast in it, else float32."""
    if asked != "auto":
        return asked
    return checkpoint_dtype if checkpoint_dtype in device.dtypes else "float32"


def resolve_kv_cache_dtype(args: EngineArgs, checkpoint_dtype: str, device: DeviceFacts) -> str:
    """What keys and values are kept in: the dtype asked for; for auto the compute dtype, or bfloat16 if that is wider.

    On a CPU activations are float32 whatever the weights are; halving the cache halves what attention reads. Not so for
    float32 checkpoints, which ask for full precision, nor with `--cpu-precision exact`.
    """
    if args.kv_cache_dtype != "auto":
        return NARROW_CACHE_DTYPES.get(args.kv_cache_dtype, args.kv_cache_dtype)
    dtype = resolve_dtype(args.dtype, checkpoint_dtype, device)
    is_wider = dtype == "float32" and args.dtype == "auto" and checkpoint_dtype != "float32"
    return "bfloat16" if device.kind == "cpu" and is_wider and args.cpu_precision == "fast" else dtype


def offload_notes(
    offload: OffloadConfig | None, experts: ExpertCacheSize | None, max_num_seqs: int, device: DeviceFacts
) -> list[str]:
    """What to say about weights that stay out of memory.

    Raises:
        UsageError: a device where they cannot.
    """
    notes = []
    offloads = offload is not None
    if device.kind != "cpu" and (offloads or experts is not None):
        raise UsageError(f"{FLAG if offloads else EXPERT_FLAG}: only with --device cpu so far")
    if offloads:
        notes.append(
            f"{FLAG}: weights stay in the file and are copied for each use; with less memory than they need they are"
            " read from the disk at every step, which is slow"
        )
    if experts is not None and max_num_seqs > MAX_CALM_SEQS:
        notes.append(
            f"{EXPERT_FLAG}: {max_num_seqs} sequences at a time choose so many experts that each step reads most of"
            f" them; --max-num-seqs {MAX_CALM_SEQS} or less is faster"
        )
    return notes


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{flag_of(name)}: expected one of {', '.join(choices)}; got {value!r}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{flag_of(name)}: expected true or false, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{flag_of(name)}: expected an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise UsageError(f"{flag_of(name)}: must be {limit}, got {value}")


def _check_threads(threads: int) -> None:
    """Refuse what no machine gains from and what thread libraries crash on."""
    limit = max(MIN_THREAD_LIMIT, THREADS_PER_CORE * (os.cpu_count() or 1))
    if threads > limit:
        raise UsageError(
            f"--threads: must be at most {limit} on this machine, got {threads}",
            remedy="0 takes as many as this process may use",
        )


def _check_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise UsageError(f"{flag_of(name)}: must be above 0 and at most 1, got {value!r}")


MEDIA_KINDS = ("image", "video", "audio")


def _media_limits(value: object) -> dict[str, int]:
    """Most items per kind, by kind."""
    limits = _json_object("limit_mm_per_prompt", value) or {}
    for kind, limit in limits.items():
        _check_choice("limit_mm_per_prompt", kind, MEDIA_KINDS)
        _check_int("limit_mm_per_prompt", limit, 0)
    return limits


def _json_object(name: str, value: object) -> dict[str, Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{flag_of(name)}: not JSON: {error}") from None
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{flag_of(name)}: expected a JSON object, got {value!r}")
    return dict(value)
