"""`vkit serve`: what its flags become, and what it refuses before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of serve_model: (EngineArgs, ServerSettings, NetworkSettings)."""
    from vkit.errors import ExitStatus
    from vkit.server import serving

    calls: list[Any] = []

    def record(*args: Any) -> ExitStatus:
        calls.append(args)
        return ExitStatus.OK

    monkeypatch.setattr(serving, "serve_model", record)
    return calls


@pytest.fixture
def serve(vkit_run: Run, served: list[Any], model_file: Path) -> Run:
    return lambda *args, **kw: vkit_run("serve", "--model", str(model_file), *args, **kw)


def test_defaults(serve: Run, served: list[Any]) -> None:
    result = serve()
    assert result.status == 0, result.stderr
    ((args, settings, network),) = served
    assert (network.host, network.port, network.uds) == ("0.0.0.0", 8000, None)
    assert settings.served_model_names == ("model",)
    assert (args.max_num_seqs, args.block_size, args.num_blocks) == (8, 32, None)
    assert (settings.max_logprobs, settings.max_n, settings.max_request_body_size) == (20, 128, 268435456)
    assert settings.api_keys == ()
    assert settings.cors is None
    assert settings.shutdown_timeout_s == 30
    assert settings.enable_request_id_headers is True
    assert "/health" in settings.access_log_excluded
    assert settings.generation_config is None


def test_flags(serve: Run, served: list[Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    result = serve(
        *("--served-model-name", "a", "b", "c", "--port=0", "--host", "127.0.0.1", "--root-path", "/x"),
        *("--api-key", "k1", "--api-key", "k2", "--allowed-origins", '["http://a"]', "--allow-credentials"),
        *("--max-num-seqs", "4", "--scheduling-policy", "priority", "--seed", "5", "--max-logprobs", "-1"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", str(tmp_path)),
        *("--override-generation-config", '{"top_k": 3}', "--no-trust-request-chat-template"),
        *("--enable-log-requests", "--enable-log-outputs", "--access-log-all", "--disable-docs", "--disable-metrics"),
        *("--responses-store-ttl", "5", "--disable-responses-store", "--no-enable-request-id-headers"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}', "--max-num-queued-reqs", "7"),
    )
    assert result.status == 0, result.stderr
    ((args, settings, network),) = served
    assert settings.served_model_names == ("a", "b", "c")
    assert (network.host, network.port) == ("127.0.0.1", 0)
    assert settings.api_keys == ("k1", "k2")
    assert (settings.cors.origins, settings.cors.allow_credentials) == (("http://a",), True)
    assert (args.max_num_seqs, args.scheduling_policy, args.seed) == (4, "priority", 5)
    assert (args.logprobs_mode, settings.scheduling_policy) == ("processed_logprobs", "priority")
    assert settings.generation_config == {"temperature": 0.5}
    assert settings.override_generation_config == {"top_k": 3}
    assert settings.trust_request_chat_template is False
    assert settings.access_log_excluded == ()
    assert settings.default_chat_template_kwargs == {"enable_thinking": False}
    assert (settings.enable_responses_store, settings.responses_store_ttl_s) == (False, 5)
    assert settings.max_num_queued_reqs == 7
    assert settings.root_path == "/x"
    assert (args.kv_cache_metrics, args.logits_processors, args.chat_template_content_format) == (False, (), "auto")
    assert (args.tool_parser, args.reasoning_parser, args.served_model_name) == ("hermes", "none", ("a", "b", "c"))


def test_flags_that_steer_the_engine(serve: Run, served: list[Any]) -> None:
    result = serve(
        *("--kv-cache-metrics", "--chat-template-content-format", "openai", "--tool-call-parser", "glm45"),
        *("--reasoning-parser", "auto", "--logits-processors", "one:A", "--logits-processors", "two.three:B"),
    )
    assert result.status == 0, result.stderr
    ((args, _, _),) = served
    assert (args.kv_cache_metrics, args.logits_processors) == (True, ("one:A", "two.three:B"))
    assert args.chat_template_content_format == "openai"
    assert (args.tool_parser, args.reasoning_parser) == ("glm45", "auto")


def test_flags_of_the_engine_that_cannot_be(serve: Run, served: list[Any]) -> None:
    for flags, flag in (
        (("--logits-processors", "nothing"), "--logits-processors"),
        (("--logits-processors", "a:b:c"), "--logits-processors"),
        (("--chat-template-content-format", "xml"), "--chat-template-content-format"),
        (("--kv-cache-metrics", "--disable-metrics"), "--kv-cache-metrics"),
    ):
        result = serve(*flags)
        assert (result.status, served) == (2, [])
        assert flag in result.stderr


def test_environment_and_file(serve: Run, served: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("port: 9000\nserved-model-name: [x, y]\nmax-n: 4\n")
    monkeypatch.setenv("VKIT_MAX_N", "9")
    monkeypatch.setenv("VKIT_API_KEY", '["secret"]')
    assert serve("--config", str(config), "--port", "9001").status == 0
    ((_, settings, network),) = served
    assert network.port == 9001
    assert settings.served_model_names == ("x", "y")
    assert settings.max_n == 9
    assert settings.api_keys == ("secret",)


def test_names_from_nim(serve: Run, served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIM_SERVED_MODEL_NAME", "nim/model,other")
    assert serve().status == 0
    assert served[0][1].served_model_names == ("nim/model", "other")
    assert serve("--served-model-name", "mine").status == 0
    assert served[1][1].served_model_names == ("mine",)


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (("--port", "70000"), "--port"),
        (("--port", "x"), "--port"),
        (("--block-size", "24"), "--block-size"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--ssl-keyfile", "x"), "--ssl-certfile"),
        (("--ssl-cert-reqs", "2"), "--ssl-certfile"),
        (("--enable-log-outputs",), "--enable-log-outputs"),
        (("--allowed-origins", "*"), "--allowed-origins"),
        (("--allowed-methods", '["GET"]'), "--allowed-origins"),
        (("--root-path", "x/"), "--root-path"),
        (("--override-generation-config", "[1]"), "--override-generation-config"),
        (("--override-generation-config", "{"), "--override-generation-config"),
        (("--generation-config", "/nowhere"), "--generation-config"),
        (("--api-key", " "), "--api-key"),
        (("--access-log-all", "--disable-access-log"), "--access-log-all"),
        (("--trust-remote-code",), "--trust-remote-code"),
        (("--enable-scale-out",), "--enable-scale-out"),
        (("--enable-prefix-caching", "--disable-radix-attention"), "--disable-radix-attention"),
        (("--tool-call-parser", "nobody"), "--tool-call-parser"),
        (("--reasoning-parser", "nobody"), "--reasoning-parser"),
        (("--enable-auto-tool-choice", "--tool-call-parser", "none"), "--enable-auto-tool-choice"),
        (("--reasoning-field", "x"), "--reasoning-field"),
        (("--no-such-flag", "x"), "--no-such-flag"),
        (("--served-model-name",), "--served-model-name"),
    ],
)
def test_refusals_name_the_flag(serve: Run, served: list[Any], args: tuple[str, ...], flag: str) -> None:
    result = serve(*args)
    assert result.status == 2
    assert flag in result.error
    assert served == []
