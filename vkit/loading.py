"""From `EngineArgs` to a running engine: open the files, check that all fits, build the model, put the parts together.

The one place that knows every part. Nothing is read twice, and no weight byte before every check has passed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vkit import discovery, kernels
from vkit.adapters import AdapterRegistry, let_listen, open_adapters
from vkit.cache.connector import ConnectorContext, KVConnector, TransferReport, WorkerSide
from vkit.cache.groups import CacheGroup, LayerCacheSpec, group_layers
from vkit.config import (
    CacheGroupFacts,
    DeviceFacts,
    EngineArgs,
    EngineConfig,
    ModelFacts,
    resolve_dtype,
    resolve_kv_cache_dtype,
)
from vkit.connectors import cache_identity, check_connector_name, make_connector
from vkit.connectors.identity import SHARED_HASH_SEED
from vkit.device import Device, find_device, return_device_memory, return_freed_memory
from vkit.distributed import ALONE, Ranks
from vkit.engine import Engine, EngineSettings
from vkit.errors import InvalidRequest, UsageError
from vkit.graphs import recorder_for
from vkit.inputs import InputProcessor, MarksOf, RequestCheck
from vkit.kv_transfer import KVTransferConfig
from vkit.layers import AdapterSwitch, Experts
from vkit.layers.streaming import FileReader
from vkit.loaders import open_checkpoint
from vkit.loaders.checkpoint import Checkpoint
from vkit.loaders.mmproj import ProjectedCheckpoint
from vkit.loaders.quantizing import ExpandedCheckpoint, quantized_as
from vkit.logits import BatchLogitsProcessor, BatchLogitsProcessorFactory
from vkit.media import KINDS, MediaProcessor
from vkit.media.conversation import with_placeholders
from vkit.memory import MemoryMeter, MemoryProfile, PoolSizing, meter_for, profile_memory
from vkit.models import HFConfig, MediaContext, build_model, create_model, model_class
from vkit.models.base import CausalLM
from vkit.models.hf_config import CONTEXT_KEYS
from vkit.models.offload import OffloadPlan, apply_offload, plan_offload
from vkit.parallel.launch import Launch, check_launch, find_launch
from vkit.parallel.shared_model import SharedModel
from vkit.parallel.team import Team
from vkit.parsers.events import ReplyContext
from vkit.parsers.output import OutputParsers, open_parsers
from vkit.pooling import EmbeddingForm, Pooling, embedding_form
from vkit.runner import PreparedStep, Runner
from vkit.sampled import SampledTokens
from vkit.scheduler import SchedulerLimits
from vkit.sequence import Plan, StepSamples
from vkit.speculation.checkpoints import DraftPlan, has_draft_head, plan_drafts
from vkit.speculation.drafter import Drafter, ModelProposer
from vkit.speculation.proposer import Drafts, Proposer
from vkit.speculation.support import check_plugins, check_processors, make_proposer
from vkit.structured.late import LateCompiler
from vkit.text.template import ChatTemplate
from vkit.text.tokenizer import Tokenizer, load_tokenizer
from vkit.types import ReasoningMarks
from vkit.weight_offload import ExpertCacheSize, OffloadConfig

logger = logging.getLogger("vkit")

ProgressCallback = Callable[[int, int], None]
"""(bytes loaded, bytes in all)"""

PROCESSOR_GROUP = "vkit.logits_processors"
_PROCESSOR_METHODS = ("is_argmax_invariant", "update_state", "apply")
DEFAULT_CONTEXT = 2048
"""Context limit of a model whose configuration names none."""

_TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class ResidentModel:
    """The model and its runner while they are in memory, and the way back when they are not."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        progress: ProgressCallback | None,
        worker: WorkerSide | None = None,
        drafting: DraftPlan | None = None,
        ranks: Ranks = ALONE,
        sizing: PoolSizing | None = None,
    ) -> None:
        """`worker` moves cache entries for a connector. `drafting`: how tokens are drafted, if they are. `ranks`: who
        shares the model. `sizing`: how the cache is sized anew once it is measured what else takes memory."""
        self._ranks = ranks
        self._checkpoint = checkpoint
        self._config = config
        self._worker = worker
        self._drafting = drafting
        self._drafter: Drafter | None = None
        self._reader: FileReader | None = None
        self._switch = AdapterSwitch() if config.enable_lora else None
        self._model: CausalLM | None = self._build(progress)
        meter = meter_for(torch.device(config.device)) if sizing is not None else None
        if meter is not None and sizing is not None:
            self._config = sizing.resized(config, self._profile(meter, sizing.used_bytes))
        self._runner: Runner | None = self._new_runner()

    def _build(self, progress: ProgressCallback | None = None) -> CausalLM:
        config, drafting = self._config, self._drafting
        has_head = has_draft_head(config.speculation, self._checkpoint)
        model = build_model(self._checkpoint, config, progress, has_draft_head=has_head, ranks=self._ranks)
        if config.offload_config is not None or config.moe_expert_cache is not None:
            plan = _offload_plan(model, self._checkpoint, config.offload_config, config.moe_expert_cache)
            self._reader = apply_offload(model, self._checkpoint, plan)
        if self._switch is not None:
            let_listen(model, self._switch)
        if drafting is not None and drafting.drafts_with_model:
            self._drafter = drafting.build(model, config)
        return model

    copies_states = Runner.copies_states

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the cache as it came out."""
        return self._config

    def _profile(self, meter: MemoryMeter, used_before: int) -> MemoryProfile:
        config = self._config
        assert self._model is not None, "weights come before the profile"
        return profile_memory(
            meter,
            lambda: self._make_runner(num_blocks=1, worker=None),
            used_before=used_before,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            samples=not self._model.embeds,
        )

    def _new_runner(self) -> Runner:
        runner = self._make_runner(self._config.num_blocks, self._worker)
        runner.capture()
        return runner

    def _make_runner(self, num_blocks: int, worker: WorkerSide | None) -> Runner:
        assert self._model is not None, "weights come before the cache"
        config = self._config
        specs = self._drafting.specs if self._drafting is not None else ()
        captures = not config.enforce_eager and not self._model.embeds
        return Runner(
            self._model,
            config,
            num_blocks,
            self._switch,
            worker,
            drafter=self._drafter,
            draft_specs=specs,
            recorder=recorder_for(torch.device(config.device)) if captures else None,
            capture_sizes=config.cudagraph_capture_sizes,
            is_eager=config.enforce_eager,
        )

    def draft(self, plan: Plan, samples: StepSamples) -> list[Drafts]:
        """Drafts for each item of the step that was run last."""
        assert self._runner is not None, "a sleeping model runs no steps"
        return self._runner.draft(plan, samples)

    def prepare(self, plan: Plan, sampled: SampledTokens | None = None) -> PreparedStep:
        """Host work of a step. `sampled`: where the tokens are that only the device knows."""
        assert self._runner is not None, "a sleeping model runs no steps"
        return self._runner.prepare(plan, sampled)

    def execute(self, step: PreparedStep) -> Tensor:
        """Logits (R, V) float32 of a prepared step."""
        assert self._runner is not None, "a sleeping model runs no steps"
        return self._runner.execute(step)

    def exchange(self, meta: Any) -> None:
        """Let a cache connector work without a step."""
        assert self._runner is not None, "a sleeping model moves no cache entries"
        self._runner.exchange(meta)

    def transfer_report(self) -> TransferReport:
        """What became of a connector's loads and sends."""
        assert self._runner is not None, "a sleeping model moves no cache entries"
        return self._runner.transfer_report()

    def sleep(self, level: int) -> None:
        """Give up the cache; at level 2, and wherever weights are not in host memory anyway, the weights."""
        self._drop_runner()
        if level == 2 or self._config.device != "cpu":
            self._drafter = None
            self._drop_model()
        return_device_memory(torch.device(self._config.device))

    def wake_up(self, tags: frozenset[str]) -> None:
        """Bring back "weights", "kv_cache" or both. The cache needs the weights first."""
        if self._model is None and "weights" in tags:
            self._model = self._build()
        if self._runner is None and "kv_cache" in tags:
            if self._model is None:
                raise InvalidRequest("tags: the weights must be woken before, or with, the kv_cache", param="tags")
            self._runner = self._new_runner()

    def close(self) -> None:
        """Free everything."""
        self._drop_runner()
        self._drafter = None
        self._drop_model()
        return_device_memory(torch.device(self._config.device))
        self._checkpoint.close()
        if self._drafting is not None:
            self._drafting.close()

    def _drop_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _drop_model(self) -> None:
        self._model = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None


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
            ModelLoadError: the weights cannot be read.
        """
        config, checkpoint, tokenizer = self.config, self.checkpoint, self.tokenizer
        _configure(config)
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
    _check_num_devices(args, device, launch)
    machine = _device_facts(device)
    checkpoint = _open_files(args, lambda found: resolve_dtype(args.dtype, _checkpoint_dtype(found), machine))
    tokenizer = load_tokenizer(
        Path(args.tokenizer) if args.tokenizer else checkpoint,
        tokenizer_config=Path(args.tokenizer_config) if args.tokenizer_config else None,
    )
    processors = _processors(args.logits_processors)
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
    media = _media_processor(checkpoint, args, device, tokenizer)
    facts = dataclasses.replace(described.facts, media_kinds=media.kinds if media is not None else ())
    device_facts = _share_of(machine, args, launch)
    config = args.resolve(facts, device_facts)
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
        PoolSizing(args, facts, device_facts),
    )


class _FileSettings(Protocol):
    """Which files to read, and how."""

    @property
    def model(self) -> str:
        """The checkpoint."""

    @property
    def mmproj(self) -> str | None:
        """A tower's file."""

    @property
    def quantization(self) -> str | None:
        """What the weights must be stored as."""

    @property
    def hf_overrides(self) -> Mapping[str, Any] | str | None:
        """Keys of config.json to replace."""

    @property
    def no_mmap(self) -> bool:
        """Whether files are read instead of mapped."""

    @property
    def gguf_dequantize(self) -> bool:
        """Whether GGUF blocks are expanded."""


def _open_files(settings: _FileSettings, dtype_of: Callable[[Checkpoint], str]) -> Checkpoint:
    """`dtype_of`: the dtype that a checkpoint is computed in."""
    use_mmap = not settings.no_mmap
    checkpoint = quantized_as(open_checkpoint(Path(settings.model), use_mmap=use_mmap), settings.quantization)
    if settings.mmproj is not None:
        checkpoint = ProjectedCheckpoint(checkpoint, Path(settings.mmproj), use_mmap=use_mmap)
    overrides = settings.hf_overrides
    if isinstance(overrides, Mapping):
        if unknown := sorted(overrides.keys() - checkpoint.config.keys()):
            logger.warning("--hf-overrides: the checkpoint's config has no %s; added as given", ", ".join(unknown))
        checkpoint.config.update(overrides)
    if settings.gguf_dequantize and checkpoint.format == "gguf":
        checkpoint = ExpandedCheckpoint(checkpoint, getattr(torch, dtype_of(checkpoint)))
    return checkpoint


def _configure(config: EngineConfig) -> None:
    torch.set_num_threads(config.threads)
    kernels.configure(config.device, num_threads=config.threads, is_exact=config.cpu_precision == "exact")


def open_share(config: EngineConfig, ranks: Ranks) -> ResidentModel:
    """A rank's share of a model that rank 0 has checked, in memory.

    Raises:
        ModelLoadError: files missing or damaged on this rank's host.
    """
    _configure(config)
    return ResidentModel(_open_files(config, lambda _: config.dtype), config, None, ranks=ranks)


def _check_num_devices(args: EngineArgs, device: Device, launch: Launch | None) -> None:
    """Raises:
    UsageError: fewer cards on this host than ranks.
    """
    size = args.tensor_parallel_size if launch is None else launch.local_size
    if args.tensor_parallel_size == 1 or device.kind != "cuda":
        return
    if torch.cuda.device_count() < size:
        raise UsageError(
            f"--tensor-parallel-size: {size} ranks on this host need as many cards, {torch.cuda.device_count()} found"
        )


def _media_processor(
    checkpoint: Checkpoint, args: EngineArgs, device: Device, tokenizer: Tokenizer
) -> MediaProcessor | None:
    """How the model takes media; None if it takes text only."""
    context = MediaContext(
        checkpoint.preprocessor_config("image"),
        checkpoint.preprocessor_config("video"),
        tokenizer.token_text,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.token_id,
    )
    return create_model(checkpoint, _provisional(args, checkpoint, device)).media_processor(context)


def _max_whole_media(config: EngineConfig) -> int:
    """Most tokens of one item that a step can hold."""
    return min(config.max_num_batched_tokens, config.long_prefill_token_threshold or config.max_num_batched_tokens)


def _adapters(checkpoint: Checkpoint, config: EngineConfig) -> AdapterRegistry:
    """The adapters named at start."""
    modules = dict(item.split("=", 1) for item in config.lora_modules)
    for name in modules.keys() & set(config.served_model_name):
        raise UsageError(f"--lora-modules: {name!r} is the name of the model itself")
    return open_adapters(checkpoint, config, {name: Path(path) for name, path in modules.items()})


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
    ranks = Ranks(0, args.tensor_parallel_size)
    has_head = has_draft_head(args.speculation, checkpoint)
    model = create_model(checkpoint, provisional, has_draft_head=has_head, ranks=ranks)
    drafting = None
    specs = model.cache_specs()
    if args.speculation is not None:
        drafting = plan_drafts(args.speculation, checkpoint, model, provisional, use_mmap=not args.no_mmap)
        specs += drafting.specs
    facts = _model_facts(checkpoint, args, specs, drafting)
    offload, experts = args.offload_config, args.moe_expert_cache
    if isinstance(offload, OffloadConfig) or isinstance(experts, ExpertCacheSize):
        assert offload is None or isinstance(offload, OffloadConfig)
        assert experts is None or isinstance(experts, ExpertCacheSize)
        plan = _offload_plan(model, checkpoint, offload, experts)
        facts = dataclasses.replace(facts, num_weight_bytes=max(0, facts.num_weight_bytes - plan.saved_bytes))
    return ModelDescription(facts, specs, drafting)


def _proposer(drafting: DraftPlan, resident: ResidentModel) -> Proposer:
    if not drafting.drafts_with_model:
        return make_proposer(drafting.settings)
    return ModelProposer(
        resident,
        max_drafts=drafting.num_drafts,
        num_lookahead=drafting.num_lookahead,
        needs_hidden_states=drafting.settings.method == "mtp",
    )


def _offload_plan(
    model: CausalLM, checkpoint: Checkpoint, offload: OffloadConfig | None, experts: ExpertCacheSize | None
) -> OffloadPlan:
    top_k = HFConfig(checkpoint.config).optional_integer(*_TOP_K_KEYS)
    if experts is not None and top_k is None:
        if not any(isinstance(module, Experts) for _, module in model.walk()):
            raise UsageError(
                f"--moe-expert-cache: {checkpoint.name} has no routed experts", remedy="leave the flag out"
            )
        raise UsageError(f"--moe-expert-cache: {checkpoint.name} does not say how many experts a token chooses")
    return plan_offload(model, checkpoint, offload, experts, top_k or 1)


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
        granule = max(spec.granule for spec in (specs[layer] for layer in group.layers) if spec is not None)
        sizes = (str(group.kind), len(group.layers), max(units), group.window, granule, num_states)
        groups.append(CacheGroupFacts(*sizes))
    config = HFConfig(checkpoint.config)
    num_experts = config.optional_integer(*_EXPERT_KEYS)
    per_token, per_seq = _activation_bytes(config)
    return ModelFacts(
        name=checkpoint.name,
        architecture=checkpoint.architecture,
        format=checkpoint.format,
        dtype=_checkpoint_dtype(checkpoint),
        max_model_len=_context_limit(checkpoint),
        num_weight_bytes=checkpoint.num_weight_bytes // args.tensor_parallel_size
        + (drafting.num_weight_bytes if drafting is not None else 0),
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


def _share_of(device: DeviceFacts, args: EngineArgs, launch: Launch | None) -> DeviceFacts:
    """What one rank has of a device: its own card, or a part of the memory and threads of a host that ranks share."""
    num_ranks = args.tensor_parallel_size if launch is None else launch.local_size
    if num_ranks == 1 or device.kind != "cpu":
        return device
    return dataclasses.replace(
        device,
        total_bytes=device.total_bytes // num_ranks,
        available_bytes=device.available_bytes // num_ranks,
        num_threads=max(1, device.num_threads // num_ranks),
    )


def _checkpoint_dtype(checkpoint: Checkpoint) -> str:
    """What the checkpoint's values are; a GGUF file of packed weights says nothing, and is no float32 file."""
    default = "bfloat16" if checkpoint.format == "gguf" else "float32"
    return HFConfig(checkpoint.config).text("dtype", "torch_dtype", default=default).removeprefix("torch.")


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
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, KVTransferConfig):
        return {**value.as_json(), "kv_connector_extra_config": "set" if value.kv_connector_extra_config else None}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return dict(value) if isinstance(value, Mapping) else value
