"""From engine settings to a served model: check the files, open the socket, load, serve."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

from vkit.async_engine import AsyncLLM
from vkit.config import EngineArgs, flag_of
from vkit.errors import ExitStatus, UsageError
from vkit.loaders import open_checkpoint
from vkit.loading import check_model
from vkit.models import SPEECH_MODELS
from vkit.server.engine_protocol import Engine
from vkit.server.lifecycle import NetworkSettings, Service, open_socket
from vkit.server.settings import ModelKind, ServerSettings
from vkit.server.state import ServerState
from vkit.server.video.opening import VideoOnlyEngine, open_jobs
from vkit.speech.engine import SpeechEngine
from vkit.speech.transcriber import check_speech_model


def serve_model(args: EngineArgs, settings: ServerSettings, network: NetworkSettings) -> ExitStatus:
    """Serve until told to stop; the process's exit status.

    Raises:
        UsageError: a setting that cannot be, or an address that cannot be had.
        ModelLoadError: a fault of the checkpoint, found before any port opens.
    """
    if speech_architecture(args):
        return _serve_speech(args, settings, network)
    videos = None if settings.video is None else open_jobs(settings.video)
    checked = check_model(args)
    if checked.embedding is not None:
        settings = replace(settings, model_kind=ModelKind.EMBEDDING)
    settings = replace(settings, enable_lora=args.enable_lora)
    state = ServerState(settings, max_model_len=checked.config.max_model_len)
    state.parsers = checked.parsers
    state.videos = videos

    async def load() -> Engine:
        return await asyncio.to_thread(lambda: AsyncLLM.from_loaded(checked.load()))

    return Service(state, network, load, open_socket(network)).run()


def serve_videos(args: EngineArgs, settings: ServerSettings, network: NetworkSettings) -> ExitStatus:
    """Serve videos alone until told to stop; the process's exit status. Settings of text models are refused.

    Raises:
        UsageError, ModelLoadError: before any port opens.
    """
    assert settings.video is not None, "the command said so"
    _refuse_settings(args, _COMMAND_ARGS, "without a text model")
    state = ServerState(replace(settings, model_kind=ModelKind.VIDEO))
    state.videos = open_jobs(settings.video)
    shown = {"architecture": "MiniMaxH3", "model": str(settings.video.paths.dit)}

    async def load() -> Engine:
        return cast("Engine", VideoOnlyEngine(shown))

    return Service(state, network, load, open_socket(network)).run()


_COMMAND_ARGS = frozenset(("model", "max_num_seqs", "max_logprobs", "served_model_name"))
"""Engine settings that the command itself always sets."""

_SPEECH_ARGS = frozenset(
    (
        *("model", "tokenizer", "tokenizer_config", "device", "dtype", "threads", "no_mmap"),
        *("max_num_seqs", "max_logprobs", "served_model_name"),
    )
)
"""Engine settings that mean something for a speech model, and those the command itself always sets."""


def speech_architecture(args: EngineArgs) -> bool:
    """Whether the checkpoint is a speech model's."""
    checkpoint = open_checkpoint(Path(args.model), use_mmap=not args.no_mmap)
    try:
        return checkpoint.architecture in SPEECH_MODELS
    finally:
        checkpoint.close()


def _serve_speech(args: EngineArgs, settings: ServerSettings, network: NetworkSettings) -> ExitStatus:
    _refuse_settings(args, _SPEECH_ARGS, "on a speech model")
    if settings.video is not None:
        raise UsageError("--video-dit: not together with a speech model")
    checked = check_speech_model(
        Path(args.model),
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        tokenizer=Path(args.tokenizer) if args.tokenizer else None,
        tokenizer_config=Path(args.tokenizer_config) if args.tokenizer_config else None,
        use_mmap=not args.no_mmap,
    )
    state = ServerState(replace(settings, model_kind=ModelKind.SPEECH))
    shown = {
        "architecture": checked.checkpoint.architecture,
        "model": args.model,
        "device": checked.device,
        "dtype": str(checked.dtype).removeprefix("torch."),
        "threads": checked.num_threads,
    }

    def load_speech() -> Engine:
        engine = SpeechEngine(checked.load(), checked.tokenizer, shown, max_num_seqs=args.max_num_seqs)
        return cast(Engine, engine)  # routes that ask for more answer 501 on a speech model

    async def load() -> Engine:
        return await asyncio.to_thread(load_speech)

    return Service(state, network, load, open_socket(network)).run()


def _refuse_settings(args: EngineArgs, meant: frozenset[str], where: str) -> None:
    """Refuse engine settings that would change nothing."""
    default = EngineArgs(model=args.model)
    for field in fields(EngineArgs):
        if field.name not in meant and getattr(args, field.name) != getattr(default, field.name):
            raise UsageError(f"{flag_of(field.name)}: has no effect {where}")
