"""The Anthropic Messages routes."""

from __future__ import annotations

from vkit.server.anthropic.messages import count_tokens, messages, render_messages
from vkit.server.anthropic.schemas import CountTokensBody, CountTokensReply, MessageReply, MessagesBody
from vkit.server.openai.schemas import Rendered
from vkit.server.routes import Route
from vkit.server.settings import ServerSettings


def anthropic_routes(settings: ServerSettings) -> list[Route]:
    """The routes of this family."""
    post, tag = ("POST",), "messages"
    return [
        Route(
            post,
            "/v1/messages",
            messages,
            "Answer a conversation",
            tag,
            needs_engine=True,
            body=MessagesBody,
            reply=MessageReply,
            streams=True,
        ),
        Route(
            post,
            "/v1/messages/count_tokens",
            count_tokens,
            "Length of a prompt in tokens",
            tag,
            needs_engine=True,
            body=CountTokensBody,
            reply=CountTokensReply,
        ),
        Route(
            post,
            "/v1/messages/render",
            render_messages,
            "Show what /v1/messages would run",
            tag,
            needs_engine=True,
            body=MessagesBody,
            reply=Rendered,
        ),
    ]
