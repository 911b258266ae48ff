"""From engine settings to a served model: check the files, open the socket, load, serve."""

from __future__ import annotations

import asyncio

from vkit.async_engine import AsyncLLM
from vkit.config import EngineArgs
from vkit.errors import ExitStatus
from vkit.loading import check_model
from vkit.server.engine_protocol import Engine
from vkit.server.lifecycle import NetworkSettings, Service, open_socket
from vkit.server.settings import ServerSettings
from vkit.server.state import ServerState


def serve_model(args: EngineArgs, settings: ServerSettings, network: NetworkSettings) -> ExitStatus:
    """Serve until told to stop; the process's exit status.

    Raises:
        UsageError: a setting that cannot be, or an address that cannot be had.
        ModelLoadError: a fault of the checkpoint, found before any port opens.
    """
    checked = check_model(args)
    state = ServerState(settings, max_model_len=checked.config.max_model_len)
    state.parsers = checked.parsers

    async def load() -> Engine:
        return await asyncio.to_thread(lambda: AsyncLLM.from_loaded(checked.load()))

    return Service(state, network, load, open_socket(network)).run()
