"""GET /v1/models: every served name, in a form that OpenAI and Anthropic clients both read."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from litestar.response.base import Response

from vkit.server.call import Call
from vkit.server.openai.schemas import ModelCard, ModelList, ModelPermission


async def list_models(call: Call) -> Response[Any]:
    """All served names."""
    names = (*call.settings.served_model_names, *call.state.lora_names)
    cards = [model_card(call, name) for name in names]
    return call.json(ModelList(data=cards, first_id=names[0], last_id=names[-1]))


async def get_model(call: Call) -> Response[Any]:
    """One served name; names may contain slashes."""
    name = str(call.request.path_params["model_id"]).lstrip("/")
    if not name:
        return await list_models(call)
    call.state.served_name(name)
    return call.json(model_card(call, name))


def model_card(call: Call, name: str) -> ModelCard:
    """What is said about one served name; the same at every call."""
    created = call.state.created
    engine = call.state.loaded_engine
    permission = ModelPermission(id=f"modelperm-{hashlib.sha256(name.encode()).hexdigest()[:24]}", created=created)
    return ModelCard(
        id=name,
        created=created,
        root=call.settings.model_argument,
        parent=call.settings.served_model_names[0] if call.state.lora_of(name) is not None else None,
        max_model_len=(None if engine is None else engine.max_model_len) or None,
        permission=[permission],
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
