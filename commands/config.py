"""`vkit config`: the settings a command would run with, and where each came from."""

from __future__ import annotations

import os
from typing import Annotated, Any, cast

import typer

from vkit import env
from vkit.cli import RootGroup, warn
from vkit.command import CONFIG_NAME, Command, Source
from vkit.commands import _options, _render
from vkit.errors import UsageError

app = typer.Typer()


@app.command("config", context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def config(
    ctx: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="The command to ask about.")] = "complete",
    json: _options.JsonFlag = False,
    config_file: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="The configuration file COMMAND would get.")
    ] = None,
) -> None:
    """Show settings and where each came from.

    The settings are those COMMAND would run with. Flags of COMMAND may follow its name; they count as given on its
    command line.
    """
    root_ctx = cast(typer.Context, ctx.find_root())
    root = root_ctx.command
    assert isinstance(root, RootGroup)
    target = root.get_command(root_ctx, command)
    if target is None:
        raise UsageError(f"COMMAND: no such command: {command}")
    if not isinstance(target, Command):
        raise UsageError(f"COMMAND: {command} is a group of commands, which has no settings of its own")
    args = [*(("--config", config_file) if config_file else ()), *ctx.args]
    settings = _settings(target, cast(typer.Context, target.make_context(command, args, parent=root_ctx)))
    variables = [
        {"name": variable.name, "value": _plain(variable.read()), "source": _variable_source(variable)}
        for variable in env.VARIABLES
    ]
    for name in _unknown_variables(root, root_ctx):
        warn(f"{name} is set, but no command has such a flag")
    if json:
        _render.write_json({"command": command, "settings": settings, "variables": variables})
        return
    rows = [[row["flag"], _shown(row["value"]), row["source"] + _place(row)] for row in settings]
    _render.table(f"vkit {command}", ["flag", "value", "from"], rows)
    _render.write_text("\n")
    rows = [[row["name"], _shown(row["value"]), row["source"]] for row in variables]
    _render.table("environment", ["variable", "value", "from"], rows)


def _settings(command: Command, ctx: typer.Context) -> list[dict[str, Any]]:
    rows = []
    for flag, param in command.flags.items():
        if param.name == CONFIG_NAME:
            continue
        source, place = command.source_of(ctx, param)
        value = ctx.params.get(param.name)
        if param.hide_input and value:
            value = "(hidden)"
        rows.append({"flag": flag, "value": _plain(value), "source": source.value, "place": place})
    return rows


def _variable_source(variable: env.Variable[Any]) -> str:
    return (Source.ENVIRONMENT if variable.name in os.environ else Source.DEFAULT).value


def _unknown_variables(root: RootGroup, root_ctx: typer.Context) -> list[str]:
    """VKIT_* names in the environment that nothing reads."""
    known = {variable.name for variable in env.VARIABLES}
    for command in root.usable_commands(root_ctx).values():
        if isinstance(command, Command):
            known.update(env.flag_variable(flag) for flag in command.flags)
    return sorted(name for name in os.environ if name.startswith(env.PREFIX) and name not in known)


def _place(row: dict[str, Any]) -> str:
    return f" {row['place']}" if row["place"] else ""


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
