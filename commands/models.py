"""`vkit models`: models that are on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vkit.commands import _options, _render


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="Folders to look into as well.", show_default=False)
    ] = None,
    json: _options.JsonFlag = False,
) -> None:
    """List the models on this machine.

    The demo model, those in the cache of the hub, and those in given folders.
    """
    from vkit.default_model import local_models

    found = local_models(folders or ())
    if json:
        _render.write_json(
            [
                {
                    "name": model.name,
                    "format": model.format,
                    "num_bytes": model.num_bytes,
                    "path": str(model.path),
                    "origin": model.origin,
                }
                for model in found
            ]
        )
        return
    if not found:
        _render.note("no models found; vkit models DIR looks into a folder")
        return
    rows = [[model.name, model.format, _render.size(model.num_bytes), str(model.path)] for model in found]
    _render.table(None, ["name", "format", "size", "path"], rows)
