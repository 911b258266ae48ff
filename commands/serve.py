"""`vkit serve`: one HTTP server for OpenAI, Anthropic, token-level and NIM clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vkit.commands import _options, _render, _serve_options
from vkit.env import NIM_SERVED_MODEL_NAME
from vkit.errors import ExitStatus, MissingExtra, UsageError
from vkit.starting import starting


@_options.expands_flags
def serve(
    *,
    sources: _options.ModelFlags,
    network: _serve_options.NetworkFlags,
    api: _serve_options.ApiFlags,
    log: _serve_options.LogFlags,
    video: _serve_options.VideoFlags,
    max_num_seqs: _options.MaxNumSeqs = 8,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            help="Seed of requests that bring none.",
            show_default="random",
            rich_help_panel=_options.ENGINE_PANEL,
        ),
    ] = None,
    engine: _options.EngineFlags,
    lora: _options.LoraFlags,
    enable_scale_out: Annotated[bool, typer.Option("--enable-scale-out", hidden=True)] = False,
) -> None:
    """Serve a model over HTTP."""
    _refuse_foreign(enable_scale_out=enable_scale_out)
    from vkit import EngineArgs, resolve_model

    if video.video_only:
        if sources.model is not None:
            raise UsageError("--model: with --video-only no text model is served")
        path = video.served_path
    else:
        path = resolve_model(
            sources.model, revision=sources.revision, download_dir=sources.download_dir, say=_render.note
        )
    names = _served_names(api, path)
    keywords: dict[str, Any] = {
        **sources.engine_keywords(),
        **engine.engine_keywords(),
        **lora.engine_keywords(),
        # The routes keep to --max-logprobs; what they need for themselves (beams) may be more.
        "max_logprobs": -1,
        "logprobs_mode": api.logprobs_mode,
        "served_model_name": names,
        "chat_template_content_format": api.chat_template_content_format,
        "logits_processors": tuple(api.logits_processors or ()),
        "kv_cache_metrics": api.kv_cache_metrics,
        "tool_parser": api.tool_call_parser,
        "reasoning_parser": api.reasoning_parser,
        "seed": seed,
    }
    args = EngineArgs(model=str(path), max_num_seqs=max_num_seqs, **keywords)
    from vkit.server.settings import check_parsers

    check_parsers(api.tool_call_parser, api.reasoning_parser)
    try:
        with starting():
            from vkit.server.logs import set_up_logging
            from vkit.server.serving import serve_model, serve_videos
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("litestar", "uvicorn", "prometheus_client"):
            raise
        raise MissingExtra("vkit serve", "serve") from None
    settings = _serve_options.server_settings(
        sources.model or str(path),
        names,
        network,
        api,
        log,
        video,
        scheduling_policy=engine.scheduling_policy,
    )
    set_up_logging(log.log_level, log.log_format)
    if api.enable_auto_tool_choice:
        _render.note("--enable-auto-tool-choice: on already, models may always choose to call tools")
    run = serve_videos if video.video_only else serve_model
    status = run(args, settings, network.network_settings())
    if status is not ExitStatus.OK:
        raise typer.Exit(status)


def _served_names(api: _serve_options.ApiFlags, path: Path) -> tuple[str, ...]:
    """Names for clients: the flag's, else NIM's variable, else the model's base name."""
    given = api.served_model_name or NIM_SERVED_MODEL_NAME.read()
    if given:
        return tuple(dict.fromkeys(given))
    return (path.stem if path.suffix == ".gguf" else path.name,)


def _refuse_foreign(*, enable_scale_out: bool) -> None:
    """Refuse flags of other servers that ask for what this one never does."""
    if enable_scale_out:
        raise UsageError("--enable-scale-out: this is one server", remedy="replicas are the business of `vkit deploy`")
