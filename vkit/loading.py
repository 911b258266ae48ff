"""From `EngineArgs` to a running engine: open the files, check that all fits, build the model, put the parts together.

The one place that knows every part. Nothing is read twice, and no weight byte before every check has passed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vkit import discovery, kernels
from vkit.cache.groups import LayerCacheSpec, group_layers
from vkit.config import (
    CacheGroupFacts,
    DeviceFacts,
    EngineArgs,
    EngineConfig,
    ModelFacts,
    resolve_dtype,
    resolve_kv_cache_dtype,
)
from vkit.device import Device, find_device, return_freed_memory
from vkit.engine import Engine, EngineSettings
from vkit.errors import InvalidRequest, UsageError
from vkit.inputs import InputProcessor
from vkit.loaders import open_checkpoint
from vkit.loaders.checkpoint import Checkpoint
from vkit.logits import BatchLogitsProcessor
from vkit.models import HFConfig, build_model, create_model
from vkit.models.base import CausalLM
from vkit.models.hf_config import CONTEXT_KEYS
from vkit.runner import PreparedStep, Runner
from vkit.scheduler import SchedulerLimits
from vkit.sequence import Plan
from vkit.speculation.support import check_plugins, check_processors, make_proposer
from vkit.structured.compiler import GrammarCompiler, require_backend
from vkit.text.template import ChatTemplate
from vkit.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("vkit")

ProgressCallback = Callable[[int, int], None]
"""(bytes loaded, bytes in all)"""

PROCESSOR_GROUP = "vkit.logits_processors"
DEFAULT_CONTEXT = 2048
"""Context limit of a model whose configuration names none."""

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class ResidentModel:
    """The model and its runner while they are in memory, and the way back when they are not."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, progress: ProgressCallback | None) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._model: CausalLM | None = build_model(checkpoint, config, progress)
        self._runner: Runner | None = Runner(self._model, config, config.num_blocks)

    copies_states = Runner.copies_states

    def prepare(self, plan: Plan) -> PreparedStep:
        """Host work of a step."""
        assert self._runner is not None, "a sleeping model runs no steps"
        return self._runner.prepare(plan)

    def execute(self, step: PreparedStep) -> Tensor:
        """Logits (R, V) float32 of a prepared step."""
        assert self._runner is not None, "a sleeping model runs no steps"
        return self._runner.execute(step)

    def sleep(self, level: int) -> None:
        """Give up the cache; at level 2, and wherever weights are not in host memory anyway, the weights."""
        self._runner = None
        if level == 2 or self._config.device != "cpu":
            self._model = None

    def wake_up(self, tags: frozenset[str]) -> None:
        """Bring back "weights", "kv_cache" or both. The cache needs the weights first."""
        if self._model is None and "weights" in tags:
            self._model = build_model(self._checkpoint, self._config)
        if self._runner is None and "kv_cache" in tags:
            if self._model is None:
                raise InvalidRequest("tags: the weights must be woken before, or with, the kv_cache", param="tags")
            self._runner = Runner(self._model, self._config, self._config.num_blocks)

    def close(self) -> None:
        """Free everything."""
        self._runner = self._model = None
        self._checkpoint.close()


@dataclass(slots=True)
class LoadedModel:
    """An engine and what stands around it."""

    engine: Engine
    inputs: InputProcessor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    settings: Mapping[str, Any]
    """The effective configuration in plain JSON values."""
    on_close: Callable[[], None] = lambda: None

    @property
    def required_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            InvalidRequest: there is none.
        """
        if self.tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer")
        return self.tokenizer

    @property
    def tokenizer_info(self) -> Mapping[str, Any]:
        """The tokenizer's settings and template, for display."""
        info = {} if self.tokenizer is None else dict(self.tokenizer.settings)
        if self.chat_template is not None:
            info["chat_template"] = self.chat_template.source
        return info

    def compile_template(self, source: str) -> ChatTemplate:
        """A template of a request's own.

        Raises:
            InvalidRequest: it does not compile.
        """
        return ChatTemplate.for_tokenizer(self.required_tokenizer, override=source)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Raises:
            InvalidRequest: no template, or it refused the messages.
        """
        template = self.chat_template if chat_template is None else self.compile_template(chat_template)
        if template is None:
            raise InvalidRequest(
                "the model has no chat template", param="messages", remedy="give one with --chat-template"
            )
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **dict(variables or {})
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **keywords: Any) -> list[int]:
        """Token ids of a conversation: the template writes the special tokens, so none are added."""
        text = self.render_chat(messages, **keywords)
        return self.inputs.encode(text, add_special_tokens=False, parse_special=True)

    def close(self) -> None:
        """Free the model. May be called twice."""
        on_close, self.on_close = self.on_close, lambda: None
        on_close()


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model whose files and settings have passed every check that needs no weights."""

    config: EngineConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    cache_specs: Sequence[LayerCacheSpec | None]

    def load(self, progress: ProgressCallback | None = None) -> LoadedModel:
        """An engine with the weights in memory.

        Raises:
            ModelLoadError: the weights cannot be read.
        """
        config, checkpoint, tokenizer = self.config, self.checkpoint, self.tokenizer
        torch.set_num_threads(config.threads)
        kernels.configure(config.device, num_threads=config.threads, is_exact=config.cpu_precision == "exact")
        vocab_size = HFConfig(checkpoint.config).integer("vocab_size", default=tokenizer.vocab_size)
        plugins, checks = _plugins(vocab_size)
        proposer = None
        if config.speculation is not None:
            check_plugins(plugins)
            checks = (*checks, check_processors)
            proposer = make_proposer(config.speculation)
        resident = ResidentModel(checkpoint, config, progress)
        groups = group_layers(list(self.cache_specs))
        engine = Engine(
            engine_settings(config, vocab_size), resident, groups, tokenizer, plugins=plugins, proposer=proposer
        )
        grammars = GrammarCompiler(tokenizer, tokenizer.eos_token_ids | _configured_ends(checkpoint))
        inputs = InputProcessor(
            max_model_len=config.max_model_len,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            max_logprobs=config.max_logprobs,
            generation_config=checkpoint.generation_config,
            compile_grammar=grammars.compile,
            checks=checks,
        )
        settings = {"architecture": checkpoint.architecture, **_shown(config)}
        return_freed_memory()

        def close() -> None:
            grammars.close()
            resident.close()

        return LoadedModel(engine, inputs, tokenizer, self.chat_template, settings, close)


def check_model(args: EngineArgs) -> CheckedModel:
    """The model that `args` names, checked; no weight byte is read.

    Raises:
        UsageError: a setting that cannot be.
        ModelLoadError: files missing or damaged, an unsupported model, or too little memory.
    """
    if args.structured_outputs_backend != "auto":
        require_backend("--structured-outputs-backend")
    if args.enable_jump_forward:
        require_backend("--enable-jump-forward")
    device = find_device(args.device)
    checkpoint = open_checkpoint(Path(args.model), use_mmap=not args.no_mmap)
    if isinstance(args.hf_overrides, Mapping):
        if unknown := sorted(args.hf_overrides.keys() - checkpoint.config.keys()):
            logger.warning("--hf-overrides: the checkpoint's config has no %s; added as given", ", ".join(unknown))
        checkpoint.config.update(args.hf_overrides)
    tokenizer = load_tokenizer(
        Path(args.tokenizer) if args.tokenizer else checkpoint,
        tokenizer_config=Path(args.tokenizer_config) if args.tokenizer_config else None,
    )
    template = _chat_template(tokenizer, args.chat_template)
    specs = create_model(checkpoint, _provisional(args, checkpoint, device)).cache_specs()
    config = args.resolve(_model_facts(checkpoint, args, specs), _device_facts(device))
    for note in config.notes:
        logger.warning("%s", note)
    return CheckedModel(config, checkpoint, tokenizer, template, specs)


def load_model(args: EngineArgs, progress: ProgressCallback | None = None) -> LoadedModel:
    """An engine for the model that `args` names.

    Raises:
        UsageError: a setting that cannot be.
        ModelLoadError: files missing or damaged, an unsupported model, or too little memory.
    """
    return check_model(args).load(progress)


def engine_settings(config: EngineConfig, vocab_size: int) -> EngineSettings:
    """The engine's own part of the configuration."""
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
    )
    return EngineSettings(
        limits=limits,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        vocab_size=vocab_size,
        scheduling_policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_caching_hash_algo=config.prefix_caching_hash_algo,
        async_scheduling=config.async_scheduling,
        enable_jump_forward=config.enable_jump_forward,
        logprobs_mode=config.logprobs_mode,
        seed=config.seed,
        cache_dtype=config.dtype,
    )


@dataclass(frozen=True, slots=True)
class _Provisional:
    """Enough of a configuration to ask a model what it caches."""

    device: str
    dtype: str
    kv_cache_dtype: str
    max_model_len: int


def _provisional(args: EngineArgs, checkpoint: Checkpoint, device: Device) -> _Provisional:
    facts, own = _device_facts(device), _checkpoint_dtype(checkpoint)
    dtype, cache_dtype = resolve_dtype(args.dtype, own, facts), resolve_kv_cache_dtype(args, own, facts)
    return _Provisional(device.kind, dtype, cache_dtype, args.max_model_len or _context_limit(checkpoint))


def _device_facts(device: Device) -> DeviceFacts:
    return DeviceFacts(
        kind="cuda" if device.kind == "cuda" else "cpu",
        total_bytes=device.total_bytes,
        available_bytes=device.available_bytes,
        num_threads=device.num_threads,
        dtypes=device.dtypes,
    )


def _model_facts(checkpoint: Checkpoint, args: EngineArgs, specs: list[LayerCacheSpec | None]) -> ModelFacts:
    groups = []
    num_states = 1 + (args.speculation.num_speculative_tokens or 1 if args.speculation is not None else 0)
    for group in group_layers(specs):
        units = [spec.bytes_per_unit for spec in (specs[layer] for layer in group.layers) if spec is not None]
        groups.append(CacheGroupFacts(str(group.kind), len(group.layers), max(units), group.window, num_states))
    config = HFConfig(checkpoint.config)
    num_experts = config.optional_integer(*_EXPERT_KEYS)
    per_token, per_seq = _activation_bytes(config)
    return ModelFacts(
        name=checkpoint.name,
        architecture=checkpoint.architecture,
        format=checkpoint.format,
        dtype=_checkpoint_dtype(checkpoint),
        max_model_len=_context_limit(checkpoint),
        num_weight_bytes=checkpoint.num_weight_bytes,
        cache_groups=tuple(groups),
        is_moe=num_experts is not None and num_experts > 1,
        num_activation_bytes=(args.max_num_batched_tokens or 2048) * per_token + args.max_num_seqs * per_seq,
        activation_bytes_per_token=per_token,
        activation_bytes_per_seq=per_seq,
    )


def _activation_bytes(config: HFConfig) -> tuple[int, int]:
    """An estimate of one step's peak, per token and per sequence: ten hidden states and two MLP widths; the logits."""
    hidden = config.integer("hidden_size", "n_embd", default=0)
    intermediate = config.integer("intermediate_size", "n_inner", default=4 * hidden)
    vocabulary = config.integer("vocab_size", default=0)
    return 4 * (10 * hidden + 2 * intermediate), 4 * 2 * vocabulary


def _context_limit(checkpoint: Checkpoint) -> int:
    return HFConfig(checkpoint.config).integer(*CONTEXT_KEYS, default=DEFAULT_CONTEXT)


def _configured_ends(checkpoint: Checkpoint) -> frozenset[int]:
    """Further ids that end an output, by generation_config.json."""
    ends = checkpoint.generation_config.get("eos_token_id")
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def _checkpoint_dtype(checkpoint: Checkpoint) -> str:
    """What the checkpoint's values are; a GGUF file of packed weights says nothing, and is no float32 file."""
    default = "bfloat16" if checkpoint.format == "gguf" else "float32"
    return HFConfig(checkpoint.config).text("dtype", "torch_dtype", default=default).removeprefix("torch.")


def _chat_template(tokenizer: Tokenizer, override: str | None) -> ChatTemplate | None:
    """The template given (a file, or the text itself), else the model's own, else None."""
    if override is not None:
        path = Path(override)
        is_text = "{" in override or "\n" in override
        if not is_text and not path.is_file():
            raise UsageError(f"--chat-template: {override}: no such file, and no template either")
        source = override if is_text else path.read_text(encoding="utf-8")
        try:
            return ChatTemplate.for_tokenizer(tokenizer, override=source)
        except InvalidRequest as error:
            raise UsageError(f"--chat-template: {error.message}") from None
    if not tokenizer.chat_templates:
        return None
    try:
        return ChatTemplate.for_tokenizer(tokenizer)
    except InvalidRequest as error:
        logger.warning("the model's chat template cannot be used: %s", error.message)
        return None


def _plugins(vocab_size: int) -> tuple[list[BatchLogitsProcessor], tuple[Callable[[Any], None], ...]]:
    """Installed batch-level logits processors, and their say on each request."""
    processors: list[BatchLogitsProcessor] = []
    checks: list[Callable[[Any], None]] = []
    found = discovery.find(PROCESSOR_GROUP)
    for problem in found.problems:
        logger.warning("%s", problem)
    for offer in found.offers.values():
        factory, processor = discovery.load(offer, lambda factory: (factory, factory(vocab_size)))
        processors.append(processor)
        check = getattr(factory, "validate_params", None)
        if check is not None:
            checks.append(check)
    return processors, tuple(checks)


def _shown(config: EngineConfig) -> dict[str, Any]:
    """The configuration in plain JSON values."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if config.speculation is not None:
        values["speculation"] = dataclasses.asdict(config.speculation)
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
