"""The flags of `vkit serve`, grouped as its help page shows them, and what they become."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vkit.errors import UsageError

if TYPE_CHECKING:
    from vkit.server.lifecycle import NetworkSettings
    from vkit.server.settings import CorsSettings, ServerSettings
    from vkit.server.video.opening import VideoSettings

DEFAULT_MAX_BODY_BYTES = 256 * 1024 * 1024


def _network(*flags: str, help: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Network", **settings)


def _api(*flags: str, help: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="API", **settings)


def _video(*flags: str, help: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Video", **settings)


def _log(*flags: str, help: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Logging", **settings)


@dataclass(frozen=True)
class NetworkFlags:
    """Where the server listens, and who may call it."""

    host: Annotated[str, _network("--host", help="Address to listen on.")] = "0.0.0.0"
    port: Annotated[int, _network("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000
    uds: Annotated[
        str | None, _network("--uds", metavar="PATH", help="Listen on this Unix socket instead of a port.")
    ] = None
    root_path: Annotated[
        str, _network("--root-path", metavar="/X", help="Path under which a reverse proxy shows the server.")
    ] = ""
    api_key: Annotated[
        list[str] | None,
        _network("--api-key", metavar="KEY", help="Ask for this key; may be given several times."),
    ] = None
    allowed_origins: Annotated[
        str | None,
        _network("--allowed-origins", metavar="JSON", help='Origins whose pages may call, such as ["*"].'),
    ] = None
    allowed_methods: Annotated[
        str | None, _network("--allowed-methods", metavar="JSON", help="Methods those pages may use.")
    ] = None
    allowed_headers: Annotated[
        str | None, _network("--allowed-headers", metavar="JSON", help="Headers those pages may send.")
    ] = None
    allow_credentials: Annotated[
        bool, _network("--allow-credentials", help="Those pages may send cookies and keys of the browser.")
    ] = False
    ssl_keyfile: Annotated[str | None, _network("--ssl-keyfile", metavar="FILE", help="Private key for TLS.")] = None
    ssl_certfile: Annotated[str | None, _network("--ssl-certfile", metavar="FILE", help="Certificate for TLS.")] = None
    ssl_ca_certs: Annotated[
        str | None, _network("--ssl-ca-certs", metavar="FILE", help="Authorities of client certificates.")
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        _network("--ssl-cert-reqs", min=0, max=2, help="Client certificates: 0 none, 1 optional, 2 required."),
    ] = 0
    enable_ssl_refresh: Annotated[
        bool, _network("--enable-ssl-refresh", help="Load key and certificate again when their files change.")
    ] = False
    max_request_body_size: Annotated[
        int, _network("--max-request-body-size", min=1, help="Largest request body in bytes.")
    ] = DEFAULT_MAX_BODY_BYTES
    max_num_queued_reqs: Annotated[
        int, _network("--max-num-queued-reqs", min=0, help="Refuse requests when more would wait; 0: no limit.")
    ] = 0
    shutdown_timeout: Annotated[
        float, _network("--shutdown-timeout", min=0, help="Seconds that running requests get to finish at the end.")
    ] = 30.0
    sse_keep_alive_interval: Annotated[
        float, _network("--sse-keep-alive-interval", min=0, help="Seconds between comments on silent streams; 0: none.")
    ] = 0.0

    def __post_init__(self) -> None:
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise UsageError(f"--root-path: expected /something, got {self.root_path!r}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            missing = "--ssl-certfile" if self.ssl_keyfile else "--ssl-keyfile"
            raise UsageError(f"{missing}: key and certificate are needed together")
        if not self.ssl_certfile and (self.ssl_ca_certs or self.ssl_cert_reqs or self.enable_ssl_refresh):
            raise UsageError("--ssl-certfile: the other TLS flags need it")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise UsageError("--ssl-ca-certs: --ssl-cert-reqs needs it")
        for key in self.api_key or ():
            if not key.strip():
                raise UsageError("--api-key: must not be empty")
        if self.allowed_origins is None and (self.allowed_methods or self.allowed_headers or self.allow_credentials):
            raise UsageError("--allowed-origins: the other CORS flags need it")

    def network_settings(self) -> NetworkSettings:
        """Where to listen."""
        from vkit.server.lifecycle import NetworkSettings

        return NetworkSettings(
            host=self.host,
            port=self.port,
            uds=self.uds,
            ssl_keyfile=self.ssl_keyfile,
            ssl_certfile=self.ssl_certfile,
            ssl_ca_certs=self.ssl_ca_certs,
            ssl_cert_reqs=self.ssl_cert_reqs,
            ssl_refresh=self.enable_ssl_refresh,
        )

    def cors(self) -> CorsSettings | None:
        """Which pages may call; None: no page."""
        from vkit.server.settings import CorsSettings

        if self.allowed_origins is None:
            return None
        return CorsSettings(
            origins=json_strings("--allowed-origins", self.allowed_origins),
            methods=json_strings("--allowed-methods", self.allowed_methods) or ("*",),
            headers=json_strings("--allowed-headers", self.allowed_headers) or ("*",),
            allow_credentials=self.allow_credentials,
        )


@dataclass(frozen=True)
class ApiFlags:
    """How the routes behave."""

    served_model_name: Annotated[
        list[str] | None,
        _api(
            "--served-model-name",
            metavar="NAME...",
            help="Names of the model for clients; the first is primary.",
            show_default="the model's base name",
        ),
    ] = None
    enable_force_include_usage: Annotated[
        bool, _api("--enable-force-include-usage", help="Token counts in every stream chunk.")
    ] = False
    reject_unknown_fields: Annotated[
        bool, _api("--reject-unknown-fields", help="Refuse requests with unknown fields instead of naming them.")
    ] = False
    enable_request_id_headers: Annotated[
        bool,
        _api("--enable-request-id-headers/--no-enable-request-id-headers", help="Send X-Request-Id with every reply."),
    ] = True
    enable_prompt_tokens_details: Annotated[
        bool, _api("--enable-prompt-tokens-details", help="Count cached prompt tokens in every usage object.")
    ] = False
    enable_per_request_metrics: Annotated[
        bool, _api("--enable-per-request-metrics", help="Times of each request in its reply.")
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, _api("--enable-tokenizer-info-endpoint", help="Serve GET /tokenizer_info.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, _api("--return-tokens-as-token-ids", help="Write tokens in log-probabilities as token_id:N.")
    ] = False
    max_logprobs: Annotated[
        int, _api("--max-logprobs", min=-1, help="Most log-probabilities per position; -1: no limit.")
    ] = 20
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"],
        _api("--logprobs-mode", help="Which values log-probabilities report."),
    ] = "raw_logprobs"
    logits_processors: Annotated[
        list[str] | None,
        _api(
            "--logits-processors",
            metavar="MODULE:CLASS",
            help="A class that edits every step's logits, beside the installed ones; repeatable.",
        ),
    ] = None
    max_n: Annotated[int, _api("--max-n", min=1, max=16384, help="Most choices per prompt.")] = 128
    generation_config: Annotated[
        str,
        _api("--generation-config", metavar="auto|vllm|DIR", help="Sampling defaults: the model's, none, or DIR's."),
    ] = "auto"
    override_generation_config: Annotated[
        str | None,
        _api("--override-generation-config", metavar="JSON", help="Sampling defaults over those of the model."),
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        _api(
            "--chat-template-content-format",
            help="How templates get message contents: text, or lists of parts; auto looks at the template.",
        ),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        str | None,
        _api("--default-chat-template-kwargs", metavar="JSON", help="Template variables where a request has none."),
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        _api(
            "--trust-request-chat-template/--no-trust-request-chat-template",
            help="Accept templates that requests bring; they run in a sandbox.",
        ),
    ] = True
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        _api("--exclude-tools-when-tool-choice-none", help="Hide the tools from the model when none may be called."),
    ] = False
    tool_call_parser: Annotated[
        str,
        _api(
            "--tool-call-parser",
            metavar="NAME",
            help="How tool calls are read; auto asks the chat template, none reads none.",
        ),
    ] = "hermes"
    reasoning_parser: Annotated[
        str,
        _api("--reasoning-parser", metavar="NAME", help="How thoughts are told from answers; auto asks the template."),
    ] = "none"
    reasoning_effort_map: Annotated[
        str | None,
        _api("--reasoning-effort-map", metavar="JSON", help="What the chat template is told in place of an effort."),
    ] = None
    reasoning_field: Annotated[
        Literal["both", "reasoning", "reasoning_content"],
        _api("--reasoning-field", help="Names under which chat replies carry thoughts."),
    ] = "both"
    enable_auto_tool_choice: Annotated[
        bool, _api("--enable-auto-tool-choice", help="Accepted: models may always choose to call tools.")
    ] = False
    response_role: Annotated[str, _api("--response-role", help="Role of the replies.")] = "assistant"
    responses_store_max_entries: Annotated[
        int, _api("--responses-store-max-entries", min=1, help="Most responses kept for later requests.")
    ] = 1000
    responses_store_ttl: Annotated[
        float, _api("--responses-store-ttl", min=0, help="Seconds a response is kept; 0: as long as there is room.")
    ] = 3600.0
    disable_responses_store: Annotated[bool, _api("--disable-responses-store", help="Keep no responses.")] = False
    kv_cache_metrics: Annotated[
        bool, _api("--kv-cache-metrics", help="Measure how long blocks of the KV cache live and idle.")
    ] = False
    disable_metrics: Annotated[bool, _api("--disable-metrics", help="Serve no /metrics.")] = False
    disable_docs: Annotated[bool, _api("--disable-docs", help="Serve no /docs and no /openapi.json.")] = False
    trust_request_mm_kwargs: Annotated[
        bool, _api("--trust-request-mm-kwargs", help="Requests may say how their images and videos are prepared.")
    ] = False
    allowed_local_media_path: Annotated[
        list[Path] | None,
        _api(
            "--allowed-local-media-path",
            metavar="DIR",
            help="Requests may name files under this folder; may be given several times.",
            show_default="none",
        ),
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        _api(
            "--allowed-media-domains",
            metavar="HOST",
            help="Download media from this host and its subdomains alone; may be given several times.",
            show_default="any host",
        ),
    ] = None
    repository_override: Annotated[
        str, _api("--repository-override", metavar="TEXT", help="What metadata and manifest report under this name.")
    ] = ""

    def __post_init__(self) -> None:
        if self.enable_auto_tool_choice and self.tool_call_parser == "none":
            raise UsageError("--enable-auto-tool-choice: contradicts --tool-call-parser none")
        if self.kv_cache_metrics and self.disable_metrics:
            raise UsageError("--kv-cache-metrics: contradicts --disable-metrics")
        if any(not name for name in self.served_model_name or ()):
            raise UsageError("--served-model-name: a name must not be empty")
        for folder in self.allowed_local_media_path or ():
            if not folder.is_dir():
                raise UsageError(f"--allowed-local-media-path: {folder}: no such folder")
        for host in self.allowed_media_domains or ():
            if not host.strip(".") or set(host) & set("/: "):
                raise UsageError(f"--allowed-media-domains: expected a host name, got {host!r}")


@dataclass(frozen=True)
class VideoFlags:
    """The model that makes videos, and its jobs."""

    video_dit: Annotated[
        Path | None, _video("--video-dit", metavar="PATH", help="Serve /v1/videos with this diffusion transformer.")
    ] = None
    video_partition: Annotated[
        Literal["fl2va", "ref2va"] | None,
        _video("--video-partition", help="Which weights these are.", show_default="from the index or the file name"),
    ] = None
    video_vae: Annotated[Path | None, _video("--video-vae", metavar="PATH", help="Autoencoder of pictures.")] = None
    video_vae_config: Annotated[
        Path | None, _video("--video-vae-config", metavar="FILE", help="Its configuration.")
    ] = None
    audio_vae: Annotated[
        Path | None, _video("--audio-vae", metavar="PATH", help="Autoencoder of sound; without it clips are silent.")
    ] = None
    audio_vae_config: Annotated[
        Path | None, _video("--audio-vae-config", metavar="FILE", help="Its configuration.")
    ] = None
    video_encoder: Annotated[Path | None, _video("--video-encoder", metavar="PATH", help="Text encoder.")] = None
    video_tokenizer: Annotated[
        Path | None, _video("--video-tokenizer", metavar="FILE", help="Tokenizer of the text encoder.")
    ] = None
    video_prompt_embeds: Annotated[
        Path | None,
        _video("--video-prompt-embeds", metavar="FILE", help="Render these embeddings in place of every prompt."),
    ] = None
    video_workdir: Annotated[
        Path | None,
        _video(
            "--video-workdir",
            metavar="DIR",
            help="Folder of the jobs, which then survive a restart.",
            show_default="a temporary one",
        ),
    ] = None
    video_ffmpeg: Annotated[
        Path | None,
        _video("--video-ffmpeg", metavar="PATH", help="Program that writes MP4.", show_default="in-process"),
    ] = None
    video_device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, _video("--video-device", help="Where videos are computed.")
    ] = None
    video_dequant_bf16: Annotated[
        bool, _video("--video-dequant-bf16", help="Expand packed weights of the transformer when they are loaded.")
    ] = False
    video_openai_status: Annotated[
        bool, _video("--video-openai-status", help="Call the states of jobs in_progress and completed.")
    ] = False
    video_only: Annotated[bool, _video("--video-only", help="Serve no text model.")] = False
    video_max_queued_jobs: Annotated[
        int | None, _video("--video-max-queued-jobs", min=0, help="Most jobs that may wait.", show_default="16")
    ] = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if self.video_dit is None:
            if given:
                raise UsageError(f"--{given[0].replace('_', '-')}: needs --video-dit")
            return
        for name in given:
            value = getattr(self, name)
            if isinstance(value, Path) and name not in ("video_workdir", "video_ffmpeg") and not value.exists():
                raise UsageError(f"--{name.replace('_', '-')}: {value}: no such file or folder")
        for name in ("video_vae", "audio_vae"):
            if getattr(self, f"{name}_config") is not None and getattr(self, name) is None:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag}-config: needs --{flag}")
        if self.video_prompt_embeds is None and self.video_encoder is None:
            raise UsageError("--video-encoder: needed beside --video-dit, or --video-prompt-embeds in its place")
        if self.video_vae is None:
            raise UsageError("--video-vae: needed beside --video-dit")

    @property
    def served_path(self) -> Path:
        """The model of a server that has no other."""
        assert self.video_dit is not None, "--video-only needs it"
        return self.video_dit

    def settings(self, readable: tuple[Path, ...]) -> VideoSettings | None:
        """What the server needs to know; None without a video model."""
        if self.video_dit is None:
            return None
        from vkit.server.video.opening import VideoSettings
        from vkit.video.h3.request import VideoModelPaths, VideoOptions

        return VideoSettings(
            paths=VideoModelPaths(
                dit=self.video_dit,
                partition=self.video_partition,
                encoder=self.video_encoder,
                tokenizer=self.video_tokenizer,
                video_vae=self.video_vae,
                video_vae_config=self.video_vae_config,
                audio_vae=self.audio_vae,
                audio_vae_config=self.audio_vae_config,
            ),
            options=VideoOptions(dequant_bf16=self.video_dequant_bf16, device=self.video_device or "auto"),
            prompt_embeds=self.video_prompt_embeds,
            workdir=self.video_workdir,
            ffmpeg=self.video_ffmpeg,
            readable=readable,
            max_queued_jobs=16 if self.video_max_queued_jobs is None else self.video_max_queued_jobs,
        )


@dataclass(frozen=True)
class LogFlags:
    """What the server writes on stderr."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _log("--log-level", help="How much is logged.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], _log("--log-format", help="Lines for people, or one JSON object each.")
    ] = "text"
    enable_log_requests: Annotated[
        bool, _log("--enable-log-requests/--disable-log-requests", help="Log prompts and parameters.")
    ] = False
    enable_log_outputs: Annotated[
        bool, _log("--enable-log-outputs", help="Log what is generated; needs --enable-log-requests.")
    ] = False
    max_log_len: Annotated[
        int, _log("--max-log-len", min=0, help="Most characters or ids of a prompt or output in the log.")
    ] = 256
    disable_access_log: Annotated[bool, _log("--disable-access-log", help="Log no requests.")] = False
    disable_access_log_for_endpoints: Annotated[
        str | None,
        _log(
            "--disable-access-log-for-endpoints",
            metavar="/A,/B",
            help="Log no requests to these paths.",
            show_default="health, ping and metrics paths",
        ),
    ] = None
    access_log_all: Annotated[bool, _log("--access-log-all", help="Log requests to health and metrics paths too.")] = (
        False
    )
    log_error_stack: Annotated[bool, _log("--log-error-stack", help="Log where a refused request was refused.")] = False

    def __post_init__(self) -> None:
        if self.enable_log_outputs and not self.enable_log_requests:
            raise UsageError("--enable-log-outputs: needs --enable-log-requests")
        if self.access_log_all and self.disable_access_log:
            raise UsageError("--access-log-all: contradicts --disable-access-log")
        if self.access_log_all and self.disable_access_log_for_endpoints is not None:
            raise UsageError("--access-log-all: contradicts --disable-access-log-for-endpoints")

    def access_log_excluded(self) -> tuple[str, ...]:
        """Paths whose requests are not logged."""
        from vkit.server.settings import QUIET_PATHS

        if self.access_log_all:
            return ()
        if self.disable_access_log_for_endpoints is None:
            return QUIET_PATHS
        return tuple(path.strip() for path in self.disable_access_log_for_endpoints.split(",") if path.strip())


def server_settings(
    model: str,
    names: tuple[str, ...],
    network: NetworkFlags,
    api: ApiFlags,
    log: LogFlags,
    video: VideoFlags,
    *,
    scheduling_policy: str,
) -> ServerSettings:
    """Everything the routes need to know.

    Raises:
        UsageError: a value that is not what its flag takes.
    """
    from vkit.media.sources import MediaAccess
    from vkit.server.settings import ServerSettings

    return ServerSettings(
        served_model_names=names,
        model_argument=model,
        api_keys=tuple(network.api_key or ()),
        root_path=network.root_path,
        cors=network.cors(),
        max_request_body_size=network.max_request_body_size,
        reject_unknown_fields=api.reject_unknown_fields,
        max_num_queued_reqs=network.max_num_queued_reqs,
        sse_keep_alive_interval=network.sse_keep_alive_interval,
        enable_request_id_headers=api.enable_request_id_headers,
        enable_log_requests=log.enable_log_requests,
        enable_log_outputs=log.enable_log_outputs,
        max_log_len=log.max_log_len,
        disable_access_log=log.disable_access_log,
        access_log_excluded=log.access_log_excluded(),
        log_error_stack=log.log_error_stack,
        disable_metrics=api.disable_metrics,
        disable_docs=api.disable_docs,
        enable_tokenizer_info_endpoint=api.enable_tokenizer_info_endpoint,
        enable_prompt_tokens_details=api.enable_prompt_tokens_details,
        enable_per_request_metrics=api.enable_per_request_metrics,
        enable_force_include_usage=api.enable_force_include_usage,
        return_tokens_as_token_ids=api.return_tokens_as_token_ids,
        max_logprobs=api.max_logprobs,
        max_n=api.max_n,
        generation_config=generation_config(api.generation_config),
        override_generation_config=json_object("--override-generation-config", api.override_generation_config),
        scheduling_policy=scheduling_policy,
        reasoning_effort_map=effort_map(api.reasoning_effort_map),
        reasoning_field=api.reasoning_field,
        default_chat_template_kwargs=json_object("--default-chat-template-kwargs", api.default_chat_template_kwargs),
        trust_request_chat_template=api.trust_request_chat_template,
        exclude_tools_when_tool_choice_none=api.exclude_tools_when_tool_choice_none,
        response_role=api.response_role,
        responses_store_max_entries=api.responses_store_max_entries,
        responses_store_ttl_s=api.responses_store_ttl,
        enable_responses_store=not api.disable_responses_store,
        repository_override=api.repository_override,
        video=video.settings(tuple(api.allowed_local_media_path or ())),
        video_openai_status=video.video_openai_status,
        trust_request_mm_kwargs=api.trust_request_mm_kwargs,
        media_access=MediaAccess(
            allowed_domains=tuple(host.strip(".") for host in api.allowed_media_domains or ()),
            allowed_local_paths=tuple(api.allowed_local_media_path or ()),
        ),
        shutdown_timeout_s=network.shutdown_timeout,
    )


def generation_config(source: str) -> dict[str, Any] | None:
    """Sampling defaults that replace the model's; None: the model's own.

    Raises:
        UsageError: a folder without a readable generation_config.json.
    """
    if source == "auto":
        return None
    if source == "vllm":
        return {}
    path = Path(source) / "generation_config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--generation-config: {path}: {error.strerror or error}", remedy="give auto, vllm, or a folder"
        ) from None
    return json_object("--generation-config", text)


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """A JSON object; empty for None.

    Raises:
        UsageError: something else.
    """
    if text is None:
        return {}
    value = _json(flag, text)
    if not isinstance(value, dict):
        raise UsageError(f"{flag}: expected a JSON object, got {text!r}")
    return value


def effort_map(text: str | None) -> dict[str, Any]:
    """What stands in for which reasoning effort; empty for None.

    Raises:
        UsageError: not a JSON object, or one with a key that is no effort.
    """
    from vkit.server.settings import EFFORTS

    value = json_object("--reasoning-effort-map", text)
    for name in value:
        if name not in EFFORTS:
            raise UsageError(f"--reasoning-effort-map: expected keys among {', '.join(EFFORTS)}, got {name!r}")
    return value


def json_strings(flag: str, text: str | None) -> tuple[str, ...]:
    """A JSON list of strings; empty for None.

    Raises:
        UsageError: something else.
    """
    if text is None:
        return ()
    value = _json(flag, text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f'{flag}: expected a JSON list of strings such as ["*"], got {text!r}')
    return tuple(value)


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag}: not JSON: {error}") from None
