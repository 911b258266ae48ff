"""The OpenAI routes: completions, chat, responses, models, tokenize."""

from __future__ import annotations

from vkit.server.openai.chat.routes import chat_completions, render_chat_completions
from vkit.server.openai.completions import completions, render_completions
from vkit.server.openai.embeddings import EmbeddingBody, EmbeddingReply, embeddings
from vkit.server.openai.models import get_model, list_models
from vkit.server.openai.responses.routes import (
    cancel_response,
    create_response,
    delete_response,
    get_response,
    list_input_items,
    render_response,
)
from vkit.server.openai.responses.schemas import DeletedResponse, ItemList, ResponseObject, ResponsesBody
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
from vkit.server.openai.transcriptions import Transcription, TranscriptionForm, transcriptions
from vkit.server.routes import Parameter, Route
from vkit.server.schema import Json
from vkit.server.settings import ModelKind, ServerSettings

ANY_MODEL = tuple(ModelKind)


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
        *_response_routes(),
        Route(get, "/v1/models", list_models, "List served names", "models", reply=ModelList),
        Route(get, "/v1/models/{model_id:path}", get_model, "Show one served name", "models", reply=ModelCard),
        Route(
            post,
            "/tokenize",
            tokenize,
            "Text or chat to token ids",
            "tokens",
            needs_engine=True,
            kinds=ANY_MODEL,
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
            kinds=ANY_MODEL,
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
                kinds=ANY_MODEL,
                reply=Json,
            )
        )
    return [*routes, *_routes_of(settings.model_kind)]


def _routes_of(kind: ModelKind) -> list[Route]:
    """Routes that only a certain kind of model has."""
    if kind is ModelKind.EMBEDDING:
        return [
            Route(
                ("POST",),
                "/v1/embeddings",
                embeddings,
                "One vector per input",
                "embeddings",
                needs_engine=True,
                kinds=(kind,),
                body=EmbeddingBody,
                reply=EmbeddingReply,
            )
        ]
    if kind is ModelKind.SPEECH:
        return [
            Route(
                ("POST",),
                "/v1/audio/transcriptions",
                transcriptions,
                "Text of a recording",
                "audio",
                needs_engine=True,
                kinds=(kind,),
                body=TranscriptionForm,
                is_form=True,
                reply=Transcription,
                streams=True,
            )
        ]
    return []


def _response_routes() -> list[Route]:
    tag = "responses"
    one = "/v1/responses/{response_id:str}"
    return [
        Route(
            ("POST",),
            "/v1/responses",
            create_response,
            "Answer, with memory",
            tag,
            needs_engine=True,
            body=ResponsesBody,
            reply=ResponseObject,
            streams=True,
        ),
        Route(
            ("POST",),
            "/v1/responses/render",
            render_response,
            "Show what /v1/responses would run",
            tag,
            needs_engine=True,
            body=ResponsesBody,
            reply=Rendered,
        ),
        Route(
            ("GET",),
            one,
            get_response,
            "Show a stored response",
            tag,
            reply=ResponseObject,
            streams=True,
            parameters=(
                Parameter("stream", bool, "Send its events"),
                Parameter("starting_after", int, "Only events with a higher sequence_number"),
            ),
        ),
        Route(
            ("GET",),
            f"{one}/input_items",
            list_input_items,
            "Input of a stored response",
            tag,
            reply=ItemList,
            parameters=(
                Parameter("order", str, "asc or desc"),
                Parameter("limit", int, "Most items, 1..100"),
                Parameter("after", str, "Begin after the item with this id"),
            ),
        ),
        Route(("POST",), f"{one}/cancel", cancel_response, "Stop a response", tag, reply=ResponseObject),
        Route(("DELETE",), one, delete_response, "Forget a stored response", tag, reply=DeletedResponse),
    ]
