"""The OpenAI routes: completions, chat, responses, models, tokenize."""

from __future__ import annotations

from vkit.server.openai.chat import chat_completions, render_chat_completions
from vkit.server.openai.completions import completions, render_completions
from vkit.server.openai.models import get_model, list_models
from vkit.server.openai.schemas import (
    ChatBody,
    ChatReply,
    CompletionBody,
    CompletionReply,
    DetokenizeBody,
    DetokenizeReply,
    ModelCard,
    ModelList,
    Rendered,
    TokenizeBody,
    TokenizeReply,
)
from vkit.server.openai.tokenize import detokenize, tokenize, tokenizer_info
from vkit.server.routes import Route
from vkit.server.schema import Json
from vkit.server.settings import ServerSettings


def openai_routes(settings: ServerSettings) -> list[Route]:
    """The routes of this family."""
    post, get = ("POST",), ("GET",)
    routes = [
        Route(
            post,
            "/v1/completions",
            completions,
            "Complete prompts",
            "completions",
            needs_engine=True,
            body=CompletionBody,
            reply=CompletionReply,
            streams=True,
        ),
        Route(
            post,
            "/v1/completions/render",
            render_completions,
            "Show what /v1/completions would run",
            "completions",
            needs_engine=True,
            body=CompletionBody,
            reply=list[Rendered],
        ),
        Route(
            post,
            "/v1/chat/completions",
            chat_completions,
            "Answer a conversation",
            "chat",
            needs_engine=True,
            body=ChatBody,
            reply=ChatReply,
            streams=True,
        ),
        Route(
            post,
            "/v1/chat/completions/render",
            render_chat_completions,
            "Show what /v1/chat/completions would run",
            "chat",
            needs_engine=True,
            body=ChatBody,
            reply=Rendered,
        ),
        Route(get, "/v1/models", list_models, "List served names", "models", reply=ModelList),
        Route(get, "/v1/models/{model_id:path}", get_model, "Show one served name", "models", reply=ModelCard),
        Route(
            post,
            "/tokenize",
            tokenize,
            "Text or chat to token ids",
            "tokens",
            needs_engine=True,
            body=TokenizeBody,
            reply=TokenizeReply,
        ),
        Route(
            post,
            "/detokenize",
            detokenize,
            "Token ids to text",
            "tokens",
            needs_engine=True,
            body=DetokenizeBody,
            reply=DetokenizeReply,
        ),
    ]
    if settings.enable_tokenizer_info_endpoint:
        routes.append(
            Route(
                get,
                "/tokenizer_info",
                tokenizer_info,
                "Show the tokenizer's configuration",
                "tokens",
                needs_engine=True,
                reply=Json,
            )
        )
    return routes
