"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: what requests may choose by model name."""

from __future__ import annotations

from typing import Any, Protocol, cast

from litestar.response.base import Response
from msgspec import Struct

from vkit.errors import ModelLoadError
from vkit.server.call import Call
from vkit.server.problems import bad_request, clip, not_found


class LoadAdapterBody(Struct):
    """POST /v1/load_lora_adapter: a folder in PEFT's layout, on the server's disk."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(Struct):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class AdaptableEngine(Protocol):
    """What an engine offers that takes adapters."""

    async def load_lora(self, name: str, path: str) -> None:
        """Load an adapter under a name."""

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter."""


async def load_lora_adapter(call: Call) -> Response[Any]:
    """Load an adapter."""
    body = await call.body(LoadAdapterBody)
    if not body.lora_path:
        raise bad_request("lora_path: must not be empty", "lora_path")
    if body.lora_name in call.settings.served_model_names:
        raise bad_request(f"lora_name: {clip(body.lora_name)!r} is the name of the model itself", "lora_name")
    engine = cast(AdaptableEngine, call.state.engine)
    try:
        await engine.load_lora(body.lora_name, body.lora_path)
    except ModelLoadError as error:
        raise bad_request(f"lora_path: {error}", "lora_path") from None
    return _said(call, f"Success: LoRA adapter '{body.lora_name}' added.")


async def unload_lora_adapter(call: Call) -> Response[Any]:
    """Forget an adapter; requests under way finish with it."""
    body = await call.body(UnloadAdapterBody)
    if body.lora_name not in call.state.lora_names:
        raise not_found(f"lora_name: no adapter is called {clip(body.lora_name)!r}", "lora_name")
    engine = cast(AdaptableEngine, call.state.engine)
    await engine.unload_lora(body.lora_name)
    return _said(call, f"Success: LoRA adapter '{body.lora_name}' removed.")


def _said(call: Call, text: str) -> Response[Any]:
    return Response(text, status_code=200, media_type="text/plain", headers=call.headers())
