"""From `EngineArgs` to a running engine: open the files, check that all fits, build the model, put the parts together.

The one place that knows every part. Nothing is read twice, and no weight byte before every check has passed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vkit.adapters import AdapterRegistry, open_adapters
from vkit.cache.connector import ConnectorContext, KVConnector, WorkerSide
from vkit.cache.groups import CacheGroup, LayerCacheSpec, group_layers
from vkit.config import EngineArgs, EngineConfig, resolve_dtype
from vkit.connectors import cache_identity, check_connector_name, make_connector
from vkit.connectors.identity import SHARED_HASH_SEED
from vkit.description import (
    check_num_devices,
    checkpoint_dtype,
    describe_model,
    device_facts,
    media_processor_of,
    open_files,
    share_of,
)
from vkit.device import check_kernels, find_device, return_freed_memory
from vkit.distributed import ALONE
from vkit.engine import Engine, EngineSettings
from vkit.errors import InvalidRequest, UsageError
from vkit.inputs import InputProcessor, MarksOf
from vkit.kv_transfer import KVTransferConfig
from vkit.loaders.checkpoint import Checkpoint
from vkit.media import KINDS, MediaProcessor
from vkit.media.conversation import with_placeholders
from vkit.memory import PoolSizing
from vkit.models import HFConfig, model_class
from vkit.parallel.launch import check_launch, find_launch
from vkit.parallel.shared_model import SharedModel
from vkit.parallel.team import Team
from vkit.parsers.events import ReplyContext
from vkit.parsers.output import OutputParsers, open_parsers
from vkit.plugged_processors import PluggedProcessor, find_processors
from vkit.pooling import EmbeddingForm, Pooling, embedding_form
from vkit.resident import ProgressCallback, ResidentModel, configure_kernels
from vkit.scheduler import SchedulerLimits
from vkit.speculation.checkpoints import DraftPlan
from vkit.speculation.drafter import ModelProposer
from vkit.speculation.proposer import Proposer
from vkit.speculation.support import check_plugins, check_processors, make_proposer
from vkit.structured.late import LateCompiler
from vkit.text.template import ChatTemplate
from vkit.text.tokenizer import Tokenizer, load_tokenizer
from vkit.types import ReasoningMarks

logger = logging.getLogger("vkit")


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
    embedding: EmbeddingForm | None = None
    """What the vectors are like, where the model makes embeddings."""
    adapters: AdapterRegistry | None = None
    """What requests may choose among; None: the engine runs without adapters."""

    @property
    def required_adapters(self) -> AdapterRegistry:
        """The adapters.

        Raises:
            InvalidRequest: the engine runs without any.
        """
        if self.adapters is None:
            raise InvalidRequest("lora: this engine runs without adapters", param="lora", remedy="use --enable-lora")
        return self.adapters

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
        if self.inputs.media is not None and template.content_format == "string":
            messages = with_placeholders(messages, self.inputs.media)
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
    parsers: OutputParsers
    """How replies are read."""
    processors: tuple[PluggedProcessor, ...] = ()
    """Batch-level logits processors, installed and named."""
    embedding: EmbeddingForm | None = None
    adapters: AdapterRegistry | None = None
    media: MediaProcessor | None = None
    drafting: DraftPlan | None = None
    """How tokens are drafted, if they are."""
    sizing: PoolSizing | None = None
    """What the size of the cache follows from; None: it stays as it is."""

    def load(self, progress: ProgressCallback | None = None) -> LoadedModel:
        """An engine with the weights in memory.

        Raises:
            UsageError: a variable asks for kernels that this machine cannot run.
            ModelLoadError: the weights cannot be read.
        """
        config, checkpoint, tokenizer = self.config, self.checkpoint, self.tokenizer
        check_kernels(config.device)  # here, since it may compile them: what is refused sooner needs none
        configure_kernels(config)
        groups = group_layers(list(self.cache_specs))
        vocab_size = HFConfig(checkpoint.config).integer("vocab_size", default=tokenizer.vocab_size)
        plugins = [processor.build(vocab_size) for processor in self.processors]
        checks = tuple(processor.check for processor in self.processors if processor.check is not None)
        if self.drafting is not None:
            check_plugins(plugins)
            checks = (*checks, check_processors)
        announced = _Announced()
        connector = self._connector(groups, announced)
        worker = None if connector is None else connector.worker
        resident, shared = self._in_memory(progress, worker)
        config = resident.config
        runner = resident if shared is None else shared
        proposer = _proposer(self.drafting, resident) if self.drafting is not None else None
        embedding = self.embedding
        own = engine_settings(config, vocab_size, embedding.pooling if embedding is not None else None)
        engine = Engine(own, runner, groups, tokenizer, plugins=plugins, proposer=proposer, connector=connector)
        announced.engine = engine
        if shared is not None:
            shared.watch_with(engine.fail)
        grammars = LateCompiler(tokenizer, tokenizer.eos_token_ids | _configured_ends(checkpoint))
        inputs = InputProcessor(
            max_model_len=config.max_model_len,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            max_logprobs=config.max_logprobs,
            generation_config=checkpoint.generation_config,
            compile_grammar=grammars.compile,
            reasoning_marks=_marks_of(self.parsers) if self.parsers.parses_reasoning else None,
            checks=checks,
            media=self.media,
            media_limits={
                kind: config.limit_mm_per_prompt[kind] for kind in KINDS if kind in config.limit_mm_per_prompt
            },
            max_whole_media=_max_whole_media(config),
            max_encoded_media=None if config.enable_chunked_prefill else config.max_num_encoder_input_tokens,
            splits_media=not config.disable_chunked_mm_input,
            embeds=embedding is not None,
            find_adapter=self.adapters.find if self.adapters is not None else None,
        )
        settings = {"architecture": checkpoint.architecture, **_shown(config)}
        settings["logits_processors"] = [processor.name for processor in self.processors]
        return_freed_memory()

        def close() -> None:
            grammars.close()
            runner.close()

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
            embedding=embedding,
            adapters=self.adapters,
        )

    def _in_memory(
        self, progress: ProgressCallback | None, worker: WorkerSide | None
    ) -> tuple[ResidentModel, SharedModel | None]:
        """This process's model, and what runs it together with the other ranks, if there are any."""
        config, checkpoint = self.config, self.checkpoint
        if config.tensor_parallel_size == 1:
            return ResidentModel(checkpoint, config, progress, worker, self.drafting, ALONE, self.sizing), None
        team = Team(config, find_launch())
        with ExitStack() as undo:
            undo.callback(team.kill)
            # Without a sizing: ranks must agree on their cache, and each would measure its own.
            resident = ResidentModel(checkpoint, config, progress, worker, self.drafting, team.ranks)
            team.wait_ready()
            undo.pop_all()
        return resident, SharedModel(resident, team)

    def _connector(self, groups: list[CacheGroup], announced: _Announced) -> KVConnector | None:
        chosen = self.config.kv_transfer_config
        if chosen is None:
            return None
        return make_connector(
            ConnectorContext(
                config=chosen,
                groups=tuple(groups),
                block_size=self.config.block_size,
                identity=cache_identity(self.config, self.checkpoint, self.cache_specs),
                model_name=self.checkpoint.name,
                dtype=self.config.kv_cache_dtype,
                specs=tuple(self.cache_specs),
                notify=announced,
            )
        )


@dataclass(slots=True)
class _Announced:
    """Wakes the engine, once there is one."""

    engine: Engine | None = None

    def __call__(self) -> None:
        if self.engine is not None:
            self.engine.wake()


def check_model(args: EngineArgs, *, compiles_template: bool = True) -> CheckedModel:
    """The model that `args` names, checked; no weight byte is read.

    Without `compiles_template` the model's own chat template is compiled when the first conversation comes.

    Raises:
        UsageError: a setting that cannot be.
        ModelLoadError: files missing or damaged, an unsupported model, or too little memory.
    """
    if args.structured_outputs_backend != "auto" or args.enable_jump_forward:
        from vkit.structured.compiler import require_backend
    if args.structured_outputs_backend != "auto":
        require_backend("--structured-outputs-backend")
    if args.enable_jump_forward:
        require_backend("--enable-jump-forward")
    if isinstance(args.kv_transfer_config, KVTransferConfig):
        check_connector_name(args.kv_transfer_config.kv_connector)
    launch = find_launch()
    check_launch(args.tensor_parallel_size, launch)
    if launch is not None and launch.rank > 0:
        from vkit.parallel.follower import follow_torchrun

        raise SystemExit(follow_torchrun(args, launch))
    device = find_device(args.device)
    check_num_devices(args, device, launch)
    machine = device_facts(device)
    checkpoint = open_files(args, lambda found: resolve_dtype(args.dtype, checkpoint_dtype(found), machine))
    tokenizer = load_tokenizer(
        Path(args.tokenizer) if args.tokenizer else checkpoint,
        tokenizer_config=Path(args.tokenizer_config) if args.tokenizer_config else None,
    )
    processors = find_processors(args.logits_processors)
    template = _chat_template(tokenizer, args.chat_template, args.chat_template_content_format, compiles_template)
    parsers = open_parsers(
        args.tool_parser,
        args.reasoning_parser,
        chat_template=template.source if template is not None else None,
        text_of=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False),
    )
    described = describe_model(checkpoint, args, device)
    embeds = getattr(model_class(checkpoint.architecture), "embeds", False)
    embedding = embedding_form(checkpoint, HFConfig(checkpoint.config).integer("hidden_size")) if embeds else None
    if embedding is not None and args.capture_sizes:
        raise UsageError(f"--cudagraph-capture-sizes: {checkpoint.name} makes embeddings, whose steps are not captured")
    media = media_processor_of(checkpoint, args, device, tokenizer)
    facts = dataclasses.replace(described.facts, media_kinds=media.kinds if media is not None else ())
    own_share = share_of(machine, args, launch)
    config = args.resolve(facts, own_share)
    if described.drafting is not None:
        if described.drafting.drafts_with_model and args.kv_transfer_config is not None:
            method = described.drafting.settings.method
            raise UsageError(
                f"--kv-transfer-config: cannot go with drafts of {method}, whose own cache entries no connector keeps",
                remedy="use ngram or suffix, or leave one of them out",
            )
        if embedding is not None:
            raise UsageError(f"--speculative-config: {checkpoint.name} makes embeddings and generates no tokens")
        config = dataclasses.replace(config, speculation=described.drafting.settings)
    for note in config.notes:
        logger.warning("%s", note)
    adapters = _adapters(checkpoint, config) if config.enable_lora else None
    return CheckedModel(
        config,
        checkpoint,
        tokenizer,
        template,
        described.specs,
        parsers,
        processors,
        embedding,
        adapters,
        media,
        described.drafting,
        PoolSizing(args, facts, own_share),
    )


def _max_whole_media(config: EngineConfig) -> int:
    """Most tokens of one item that a step can hold."""
    return min(config.max_num_batched_tokens, config.long_prefill_token_threshold or config.max_num_batched_tokens)


def _adapters(checkpoint: Checkpoint, config: EngineConfig) -> AdapterRegistry:
    """The adapters named at start."""
    modules = dict(item.split("=", 1) for item in config.lora_modules)
    for name in modules.keys() & set(config.served_model_name):
        raise UsageError(f"--lora-modules: {name!r} is the name of the model itself")
    return open_adapters(checkpoint, config, {name: Path(path) for name, path in modules.items()})


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


def engine_settings(config: EngineConfig, vocab_size: int, pooling: Pooling | None = None) -> EngineSettings:
    """The engine's own part of the configuration. A model that embeds fills its context with the prompt alone."""
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len + (pooling is not None),
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        max_num_encoder_input_tokens=config.max_num_encoder_input_tokens,
        disable_chunked_mm_input=config.disable_chunked_mm_input,
        max_loras=config.max_loras,
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
        keeps_tokens_on_device=keeps_tokens_on_device(config) and pooling is None,
        enable_jump_forward=config.enable_jump_forward,
        logprobs_mode=config.logprobs_mode,
        seed=config.seed,
        cache_dtype=config.kv_cache_dtype,
        prefix_caching_seed=None if config.kv_transfer_config is None else SHARED_HASH_SEED,
        loads_kv=config.kv_transfer_config is None or config.kv_transfer_config.loads,
        recomputes_kv=config.kv_transfer_config is not None
        and config.kv_transfer_config.kv_load_failure_policy == "recompute",
        measures_blocks=config.kv_cache_metrics,
        pooling=pooling,
    )


def keeps_tokens_on_device(config: EngineConfig) -> bool:
    """Whether a step is launched before the host knows the tokens of the one before it.

    On a CPU a launch is the step itself: there the next one is planned beside it, and no more.
    """
    is_alone = config.tensor_parallel_size == 1 and config.kv_transfer_config is None
    return config.device == "cuda" and is_alone and config.speculation is None


def _marks_of(parsers: OutputParsers) -> MarksOf:
    """What the parsers say of the thoughts after a prompt."""

    def marks(prompt_text: str, variables: Mapping[str, Any]) -> ReasoningMarks | None:
        return parsers.reasoning_marks(ReplyContext(prompt_text, (), chat_template_kwargs=variables))

    return marks


def _configured_ends(checkpoint: Checkpoint) -> frozenset[int]:
    """Further ids that end an output, by generation_config.json."""
    ends = checkpoint.generation_config.get("eos_token_id")
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def _chat_template(
    tokenizer: Tokenizer, override: str | None, content_format: str, compiles_now: bool
) -> ChatTemplate | None:
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
        return ChatTemplate.for_tokenizer(tokenizer, content_format=content_format, compiles_late=not compiles_now)
    except InvalidRequest as error:
        logger.warning("the model's chat template cannot be used: %s", error.message)
        return None


def _shown(config: EngineConfig) -> dict[str, Any]:
    """The configuration in plain JSON values."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if config.speculation is not None:
        values["speculation"] = dataclasses.asdict(config.speculation)
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, KVTransferConfig):
        return {**value.as_json(), "kv_connector_extra_config": "set" if value.kv_connector_extra_config else None}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return dict(value) if isinstance(value, Mapping) else value
