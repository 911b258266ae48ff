"""From `EngineArgs` to a running engine: open the files, check that all fits, build the model, put the parts together.

The one place that knows every part. Nothing is read twice, and no weight byte before every check has passed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
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
from vkit.inputs import InputProcessor, MarksOf, RequestCheck
from vkit.loaders import open_checkpoint
from vkit.loaders.checkpoint import Checkpoint
from vkit.logits import BatchLogitsProcessor, BatchLogitsProcessorFactory
from vkit.models import HFConfig, build_model, create_model
from vkit.models.base import CausalLM
from vkit.models.hf_config import CONTEXT_KEYS
from vkit.parsers.events import ReplyContext
from vkit.parsers.output import OutputParsers, open_parsers
from vkit.runner import PreparedStep, Runner
from vkit.scheduler import SchedulerLimits
from vkit.sequence import Plan, StepSamples
from vkit.speculation.checkpoints import DraftPlan, has_draft_head, plan_drafts
from vkit.speculation.drafter import Drafter, ModelProposer
from vkit.speculation.proposer import Drafts, Proposer
from vkit.speculation.support import check_plugins, check_processors, make_proposer
from vkit.structured.compiler import GrammarCompiler, require_backend
from vkit.text.template import ChatTemplate
from vkit.text.tokenizer import Tokenizer, load_tokenizer
from vkit.types import ReasoningMarks

logger = logging.getLogger("vkit")

ProgressCallback = Callable[[int, int], None]
"""(bytes loaded, bytes in all)"""

PROCESSOR_GROUP = "vkit.logits_processors"
_PROCESSOR_METHODS = ("is_argmax_invariant", "update_state", "apply")
DEFAULT_CONTEXT = 2048
"""Context limit of a model whose configuration names none."""

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class ResidentModel:
    """The model and its runner while they are in memory, and the way back when they are not."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        progress: ProgressCallback | None,
        drafting: DraftPlan | None = None,
    ) -> None:
        """`drafting`: how tokens are drafted, if they are."""
        self._checkpoint = checkpoint
        self._config = config
        self._drafting = drafting
        self._drafter: Drafter | None = None
        self._model: CausalLM | None = None
        self._load_weights(progress)
        self._runner: Runner | None = self._new_runner()

    copies_states = Runner.copies_states

    def _load_weights(self, progress: ProgressCallback | None = None) -> None:
        config, drafting = self._config, self._drafting
        self._model = build_model(
            self._checkpoint, config, progress, has_draft_head=has_draft_head(config.speculation, self._checkpoint)
        )
        if drafting is not None and drafting.drafts_with_model:
            self._drafter = drafting.build(self._model, config)

    def _new_runner(self) -> Runner:
        assert self._model is not None, "weights come before the cache"
        specs = self._drafting.specs if self._drafting is not None else ()
        return Runner(self._model, self._config, self._config.num_blocks, drafter=self._drafter, draft_specs=specs)

    def draft(self, plan: Plan, samples: StepSamples) -> list[Drafts]:
        """Drafts for each item of the step that was run last."""
        assert self._runner is not None, "a sleeping model runs no steps"
        return self._runner.draft(plan, samples)

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
            self._model = self._drafter = None

    def wake_up(self, tags: frozenset[str]) -> None:
        """Bring back "weights", "kv_cache" or both. The cache needs the weights first."""
        if self._model is None and "weights" in tags:
            self._load_weights()
        if self._runner is None and "kv_cache" in tags:
            if self._model is None:
                raise InvalidRequest("tags: the weights must be woken before, or with, the kv_cache", param="tags")
            self._runner = self._new_runner()

    def close(self) -> None:
        """Free everything."""
        self._runner = self._model = self._drafter = None
        self._checkpoint.close()
        if self._drafting is not None:
            self._drafting.close()


@dataclass(slots=True)
class LoadedModel:
    """An engine and what stands around it."""

    engine: Engine
    inputs: InputProcessor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    settings: Mapping[str, Any]
    """The effective configuration in plain JSON values."""
    parsers: OutputParsers = field(default_factory=lambda: OutputParsers(None, None))
    """How replies are read."""
    served_model_names: tuple[str, ...] = ("model",)
    """What requests may call the model; the first is shown."""
    chat_template_content_format: str = "auto"
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
        return ChatTemplate.for_tokenizer(
            self.required_tokenizer, override=source, content_format=self.chat_template_content_format
        )

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
class _Processor:
    """A batch-level logits processor that can be built."""

    name: str
    factory: BatchLogitsProcessorFactory

    @property
    def check(self) -> RequestCheck | None:
        """Its say on each request."""
        found: RequestCheck | None = getattr(self.factory, "validate_params", None)
        return found

    def build(self, vocab_size: int) -> BatchLogitsProcessor:
        """A processor for one engine.

        Raises:
            UsageError: it cannot be built.
        """
        try:
            return self.factory(vocab_size)
        except Exception as error:  # somebody else's code
            raise UsageError(f"logits processor {self.name}: cannot be built: {error!r}") from None


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model whose files and settings have passed every check that needs no weights."""

    config: EngineConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    cache_specs: Sequence[LayerCacheSpec | None]
    parsers: OutputParsers
    """How replies are read."""
    processors: tuple[_Processor, ...] = ()
    """Batch-level logits processors, installed and named."""
    drafting: DraftPlan | None = None
    """How tokens are drafted, if they are."""

    def load(self, progress: ProgressCallback | None = None) -> LoadedModel:
        """An engine with the weights in memory.

        Raises:
            ModelLoadError: the weights cannot be read.
        """
        config, checkpoint, tokenizer = self.config, self.checkpoint, self.tokenizer
        torch.set_num_threads(config.threads)
        kernels.configure(config.device, num_threads=config.threads, is_exact=config.cpu_precision == "exact")
        vocab_size = HFConfig(checkpoint.config).integer("vocab_size", default=tokenizer.vocab_size)
        plugins = [processor.build(vocab_size) for processor in self.processors]
        checks = tuple(processor.check for processor in self.processors if processor.check is not None)
        if self.drafting is not None:
            check_plugins(plugins)
            checks = (*checks, check_processors)
        resident = ResidentModel(checkpoint, config, progress, self.drafting)
        proposer = _proposer(self.drafting, resident) if self.drafting is not None else None
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
            reasoning_marks=_marks_of(self.parsers) if self.parsers.parses_reasoning else None,
            checks=checks,
        )
        settings = {"architecture": checkpoint.architecture, **_shown(config)}
        settings["logits_processors"] = [processor.name for processor in self.processors]
        return_freed_memory()

        def close() -> None:
            grammars.close()
            resident.close()

        return LoadedModel(
            engine,
            inputs,
            tokenizer,
            self.chat_template,
            settings,
            self.parsers,
            config.served_model_name,
            config.chat_template_content_format,
            on_close=close,
        )


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
    processors = _processors(args.logits_processors)
    template = _chat_template(tokenizer, args.chat_template, args.chat_template_content_format)
    parsers = open_parsers(
        args.tool_parser,
        args.reasoning_parser,
        chat_template=template.source if template is not None else None,
        text_of=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False),
    )
    described = describe_model(checkpoint, args, device)
    config = args.resolve(described.facts, _device_facts(device))
    if described.drafting is not None:
        config = dataclasses.replace(config, speculation=described.drafting.settings)
    for note in config.notes:
        logger.warning("%s", note)
    return CheckedModel(
        config, checkpoint, tokenizer, template, described.specs, parsers, processors, described.drafting
    )


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a model without its weights."""

    facts: ModelFacts
    """What settings depend on."""
    specs: list[LayerCacheSpec | None]
    """What each layer caches, those of a drafter last."""
    drafting: DraftPlan | None


def describe_model(checkpoint: Checkpoint, args: EngineArgs, device: Device) -> ModelDescription:
    """The description of a model; no weight byte is read.

    Raises:
        ModelLoadError: the architecture is not computed here, or its configuration contradicts itself.
        UsageError: tokens cannot be drafted as asked.
    """
    provisional = _provisional(args, checkpoint, device)
    model = create_model(checkpoint, provisional, has_draft_head=has_draft_head(args.speculation, checkpoint))
    drafting = None
    specs = model.cache_specs()
    if args.speculation is not None:
        drafting = plan_drafts(args.speculation, checkpoint, model, provisional, use_mmap=not args.no_mmap)
        specs += drafting.specs
    return ModelDescription(_model_facts(checkpoint, args, specs, drafting), specs, drafting)


def _proposer(drafting: DraftPlan, resident: ResidentModel) -> Proposer:
    if not drafting.drafts_with_model:
        return make_proposer(drafting.settings)
    return ModelProposer(
        resident,
        max_drafts=drafting.num_drafts,
        num_lookahead=drafting.num_lookahead,
        needs_hidden_states=drafting.settings.method == "mtp",
    )


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
        cache_dtype=config.kv_cache_dtype,
        measures_blocks=config.kv_cache_metrics,
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


def _model_facts(
    checkpoint: Checkpoint, args: EngineArgs, specs: list[LayerCacheSpec | None], drafting: DraftPlan | None
) -> ModelFacts:
    groups = []
    num_states = 1 + (drafting.num_drafts if drafting is not None else 0)
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
        num_weight_bytes=checkpoint.num_weight_bytes + (drafting.num_weight_bytes if drafting is not None else 0),
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


def _marks_of(parsers: OutputParsers) -> MarksOf:
    """What the parsers say of the thoughts after a prompt."""

    def marks(prompt_text: str, variables: Mapping[str, Any]) -> ReasoningMarks | None:
        return parsers.reasoning_marks(ReplyContext(prompt_text, (), chat_template_kwargs=variables))

    return marks


def _configured_ends(checkpoint: Checkpoint) -> frozenset[int]:
    """Further ids that end an output, by generation_config.json."""
    ends = checkpoint.generation_config.get("eos_token_id")
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def _checkpoint_dtype(checkpoint: Checkpoint) -> str:
    """What the checkpoint's values are; a GGUF file of packed weights says nothing, and is no float32 file."""
    default = "bfloat16" if checkpoint.format == "gguf" else "float32"
    return HFConfig(checkpoint.config).text("dtype", "torch_dtype", default=default).removeprefix("torch.")


def _chat_template(tokenizer: Tokenizer, override: str | None, content_format: str) -> ChatTemplate | None:
    """The template given (a file, or the text itself), else the model's own, else None."""
    if override is not None:
        path = Path(override)
        is_text = "{" in override or "\n" in override
        if not is_text and not path.is_file():
            raise UsageError(f"--chat-template: {override}: no such file, and no template either")
        source = override if is_text else path.read_text(encoding="utf-8")
        try:
            return ChatTemplate.for_tokenizer(tokenizer, override=source, content_format=content_format)
        except InvalidRequest as error:
            raise UsageError(f"--chat-template: {error.message}") from None
    if not tokenizer.chat_templates:
        return None
    try:
        return ChatTemplate.for_tokenizer(tokenizer, content_format=content_format)
    except InvalidRequest as error:
        logger.warning("the model's chat template cannot be used: %s", error.message)
        return None


def _processors(named: Sequence[str]) -> tuple[_Processor, ...]:
    """The batch-level logits processors that are installed, then those that were named.

    Raises:
        UsageError: a name that leads to no class.
    """
    found = discovery.find(PROCESSOR_GROUP)
    for problem in found.problems:
        logger.warning("%s", problem)
    installed = [
        _Processor(offer.name, discovery.load(offer, lambda factory: factory)) for offer in found.offers.values()
    ]
    return (*installed, *(_Processor(path, _class_at(path)) for path in named))


def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = import_module(module)
    except Exception as error:  # somebody else's code, and a sentence is due whatever it does
        raise UsageError(f"--logits-processors: {module} cannot be imported: {error!r}") from None
    for part in name.split("."):
        found = getattr(found, part, None)
    missing = [name for name in _PROCESSOR_METHODS if not callable(getattr(found, name, None))]
    if not isinstance(found, type) or missing:
        raise UsageError(
            f"--logits-processors: {path} is no class with {', '.join(_PROCESSOR_METHODS)}",
            remedy="docs/python.md says what a logits processor is",
        )
    return found


def _shown(config: EngineConfig) -> dict[str, Any]:
    """The configuration in plain JSON values."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if config.speculation is not None:
        values["speculation"] = dataclasses.asdict(config.speculation)
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
