"""The command class behind every subcommand, built in or plugged in: where option values come from.

Command line, then `VKIT_<FLAG>`, then `--config FILE.yaml`, then the default. Done here once for every flag of every
command; no command reads the environment or a configuration file itself.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from vkit import env
from vkit.errors import UsageError
from vkit.plain_option import with_plain_values

CONFIG_FLAG = "--config"
CONFIG_NAME = "config"
_ELSEWHERE = "vkit.elsewhere"
_ON_LINE = "vkit.on_line"


class Source(StrEnum):
    """Where a value came from."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    CONFIG_FILE = "config file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Given:
    """A value from the environment or a configuration file, ready for the option's own checks."""

    value: Any
    source: Source
    place: str
    """The variable or file, as messages name it."""


class Command(TyperCommand):
    """A command whose every flag can also be set by environment and configuration file."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        # Plain help: at 80 columns typer's rich tables cut long flag names short.
        super().__init__(name, **{**settings, "rich_markup_mode": None})
        if not any(CONFIG_FLAG in param.opts for param in self.params):
            self.params.append(_config_option())
        for param in self.params:
            if isinstance(param, TyperOption):
                with_plain_values(param)
            if isinstance(param, TyperOption) and param.metavar is None and param.type_descriptor.is_ranged:
                param.metavar = param.type_descriptor.ranged_type_name.upper()  # the range itself follows the help

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse `args`, filling what they leave open from environment and configuration file.

        Raises:
            UsageError: a malformed variable or file, an unknown key, or two contradicting spellings of one flag.
        """
        args = spread_values(self.get_params(ctx), args)
        on_line = list(occurrences(self.get_params(ctx), args, stop_at_argument=not ctx.allow_interspersed_args))
        asks_for_help = any(given.spelling in ctx.help_option_names for given in on_line)
        if ctx.resilient_parsing or asks_for_help:  # which no malformed variable may prevent
            return super().parse_args(ctx, args)
        _check_spellings(on_line)
        elsewhere = self._given_elsewhere(ctx, on_line)
        ctx.default_map = {name: given.value for name, given in elsewhere.items()}
        ctx.meta[_ELSEWHERE] = elsewhere
        ctx.meta[_ON_LINE] = on_line
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            _add_given_value(error, on_line, elsewhere)
            raise

    def get_help_option_names(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Spellings of the help flag, in a fixed order."""
        return list(ctx.help_option_names)

    def get_help_option(self, ctx: typer.Context) -> TyperOption | None:  # type: ignore[override]
        """The help flag."""
        option = super().get_help_option(ctx)
        return None if option is None else with_plain_values(option)

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the sections of the help page that list arguments and flags, one per panel."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_option = isinstance(param, TyperOption)
                title = getattr(param, "rich_help_panel", None) or ("Options" if is_option else "Arguments")
                panels.setdefault(title, []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)

    @property
    def flags(self) -> dict[str, TyperOption]:
        """Every option by its first long spelling, in order of declaration."""
        return {flag_of(param): param for param in self.params if isinstance(param, TyperOption)}

    def given_on_line(self, ctx: typer.Context) -> list[tuple[str, str | None]]:
        """(parameter, text) of every option on the command line of `ctx`, in order: for flags whose order matters."""
        on_line: list[Occurrence] = ctx.meta.get(_ON_LINE, [])
        return [(given.param.name, given.value) for given in on_line]

    def source_of(self, ctx: typer.Context, param: TyperOption) -> tuple[Source, str | None]:
        """Where the value of `param` in `ctx` came from, and the variable or file that held it."""
        origin = ctx.get_parameter_source(param.name)
        if origin is not None and origin.name == "COMMANDLINE":
            return Source.COMMAND_LINE, None
        given: Mapping[str, Given] = ctx.meta.get(_ELSEWHERE, {})
        if param.name in given:
            return given[param.name].source, given[param.name].place
        return Source.DEFAULT, None

    def _given_elsewhere(self, ctx: typer.Context, on_line: Sequence[Occurrence]) -> dict[str, Given]:
        """Values for what the command line leaves open: the environment's, over the configuration file's."""
        taken = {given.param.name: given.value for given in on_line}
        from_env = {
            param.name: Given(_from_text(param, text, variable), Source.ENVIRONMENT, variable)
            for flag, param in self.flags.items()
            if (text := os.environ.get(variable := env.flag_variable(flag))) is not None and param.name not in taken
        }
        path = taken.get(CONFIG_NAME) or (from_env[CONFIG_NAME].value if CONFIG_NAME in from_env else None)
        if path is None:
            return from_env
        from_file = self._from_file(ctx, Path(path))
        return {name: given for name, given in {**from_file, **from_env}.items() if name not in taken}

    def _from_file(self, ctx: typer.Context, path: Path) -> dict[str, Given]:
        """Values of a configuration file, with the section of this command over its top level.

        Raises:
            UsageError: an unreadable file, an unknown key, or a value no flag can take.
        """
        settings = read_config_file(path)
        commands = _command_names(ctx)
        values: dict[str, Given] = {}
        for section in (None, *_own_sections(ctx)):
            entries = settings if section is None else settings.get(section, {})
            keys: dict[str, str] = {}
            for key, value in entries.items():
                if section is None and key in commands and isinstance(value, dict):
                    continue
                place = f"{key!r} in {path}" if section is None else f"{section}: {key!r} in {path}"
                param = self._param_for_key(key, place, ctx)
                earlier = keys.setdefault(param.name, key)
                if earlier != key:
                    raise UsageError(f"{place}: {earlier!r} sets the same flag", remedy="keep one of them")
                values[param.name] = Given(_from_yaml(param, value, place), Source.CONFIG_FILE, str(path))
        return values

    def _param_for_key(self, key: str, place: str, ctx: typer.Context) -> TyperOption:
        by_key = {spelling.lstrip("-"): param for param in self.flags.values() for spelling in param.opts}
        by_key.pop(CONFIG_FLAG.lstrip("-"), None)
        wanted = key.replace("_", "-")
        if wanted in by_key:
            return by_key[wanted]
        close = difflib.get_close_matches(wanted, by_key, n=1)
        raise UsageError(
            f"{place}: {ctx.command_path} has no flag --{wanted}",
            remedy=f"closest: {close[0]}" if close else "keys are flag names, or a command's name over such keys",
        )


def _add_given_value(
    error: typer.TyperException, on_line: Sequence[Occurrence], elsewhere: Mapping[str, Given]
) -> None:
    """Complete an option's complaint with what was given, and where."""
    name: str = getattr(getattr(error, "param", None), "name", "")
    texts = [given.value for given in on_line if given.param.name == name and given.value is not None]
    if texts:
        error.message = error.message.rstrip(".") + f", got {texts[-1]!r}"
    elif name in elsewhere:
        error.message = error.message.rstrip(".") + f", got {elsewhere[name].value!r} from {elsewhere[name].place}"


def _check_spellings(on_line: Sequence[Occurrence]) -> None:
    """Refuse an option that takes one value and is given two, and a boolean one in two spellings.

    The spellings of a boolean option contradict each other, or are aliases.
    """
    seen: dict[str, Occurrence] = {}
    for given in on_line:
        earlier = seen.setdefault(given.param.name, given)
        if earlier is given or given.param.multiple:
            continue
        if earlier.spelling != given.spelling and given.param.secondary_opts:
            raise UsageError(f"{given.spelling}: {earlier.spelling} was given too", remedy="give one of them")
        if given.value is not None and not given.param.is_flag and not getattr(given.param, "count", False):
            told = f"{earlier.value!r} and {given.value!r}"
            raise UsageError(f"{given.spelling}: given twice, {told}", remedy="give one of them")


def flag_of(param: TyperOption) -> str:
    """An option's first long spelling, its name everywhere."""
    return next((spelling for spelling in param.opts if spelling.startswith("--")), param.opts[0])


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One option on the command line."""

    param: TyperOption
    spelling: str
    value: str | None
    """The text after it; None for a flag, and where the value is missing."""


def occurrences(
    params: Sequence[object], args: Sequence[str], *, stop_at_argument: bool = False
) -> Iterator[Occurrence]:
    """Every option in `args`, in order. Values are not taken for options; `--` ends the search."""
    spellings = {
        spelling: param
        for param in params
        if isinstance(param, TyperOption)
        for spelling in (*param.opts, *param.secondary_opts)
    }
    rest = iter(args)
    for token in rest:
        if token == "--":
            return
        spelling, is_joined, joined = token.partition("=")
        param = spellings.get(spelling)
        if param is None:
            if stop_at_argument and not token.startswith("-"):
                return
            continue
        if is_joined:
            yield Occurrence(param, spelling, joined)
        elif param.is_flag or param.count:
            yield Occurrence(param, spelling, None)
        else:
            yield Occurrence(param, spelling, next(rest, None))


def spread_values(params: Sequence[object], args: Sequence[str]) -> list[str]:
    """`args` with `--flag a b` as `--flag a --flag b`, for repeatable flags whose metavar ends in dots."""
    spreading = {
        spelling
        for param in params
        if isinstance(param, TyperOption) and param.multiple and (param.metavar or "").endswith("...")
        for spelling in param.opts
    }
    made: list[str] = []
    current: str | None = None
    num_values = 0
    for token in args:
        if token.startswith("-"):
            current, num_values = (token if token in spreading else None), 0
        elif current is not None:
            num_values += 1
            if num_values > 1:
                made.append(current)
        made.append(token)
    return made


def read_config_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file gives an empty one.

    Raises:
        UsageError: missing, unreadable, not YAML, or not a mapping with text keys.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader), path)
    except OSError as error:
        raise UsageError(f"{CONFIG_FLAG}: {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{CONFIG_FLAG}: {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"{CONFIG_FLAG}: {path}: expected a mapping of flag names to values")
    return content


def _check_keys(node: Any, path: Path) -> None:
    """Refuse a key that stands twice in one mapping of a composed file; YAML readers keep the last one in silence."""
    entries = node.value if node is not None and node.id == "mapping" else []
    seen: set[str] = set()
    for key, value in entries:
        if isinstance(key.value, str) and key.value in seen:
            line = key.start_mark.line + 1
            raise UsageError(f"{CONFIG_FLAG}: {path}: {key.value!r} is given twice, again on line {line}")
        if isinstance(key.value, str):
            seen.add(key.value)
        _check_keys(value, path)


def command_of(function: Callable[..., Any], name: str) -> Command:
    """The command that runs `function`, with its parameters as flags and its docstring as help."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=Command)(function)
    command = typer.main.get_command(app)
    assert isinstance(command, Command)
    return command


def group_of(app: typer.Typer, name: str) -> TyperCommand | TyperGroup:
    """The command tree of a Typer application, every command of it a `Command`."""
    _adopt(app)
    command = typer.main.get_command(app)
    command.name = name
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


def _adopt(app: typer.Typer) -> None:
    app._add_completion = False
    for info in app.registered_commands:
        if info.cls is None or info.cls is TyperCommand:
            info.cls = Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _adopt(group.typer_instance)


@cache
def _config_option() -> TyperOption:
    """The `--config` flag that every command has."""

    def holder(
        config: str | None = typer.Option(
            None,
            CONFIG_FLAG,
            metavar="FILE",
            help="YAML file with values for flags that neither the command line nor the environment sets.",
            expose_value=False,
        ),
    ) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(holder)
    (option,) = typer.main.get_command(app).params
    assert isinstance(option, TyperOption)
    return option


def _from_text(param: TyperOption, text: str, variable: str) -> Any:
    """A variable's text as the option's own checks expect it."""
    if param.is_flag:
        try:
            return env.parse_bool(text)
        except ValueError as error:
            raise UsageError(f"{variable}: {error}, got {text!r}") from None
    if not param.multiple:
        return text
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{variable}: expected a JSON list: {error}") from None
    complaint = f"{variable}: expected a JSON list of strings, got {text!r}"
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise UsageError(complaint)
    return values


def _from_yaml(param: TyperOption, value: object, place: str) -> Any:
    """A configuration value as the option's own checks expect it."""
    if param.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{place}: expected true or false, got {value!r}")
        return value
    if param.multiple:
        return _texts(value, f"{place}: expected a list of strings, got {value!r}")
    if isinstance(value, dict | list):
        return json.dumps(value)  # a flag that takes JSON; any other one refuses the text by itself
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{place}: expected a string or a number, got {value!r}")
    return str(value)


def _texts(values: object, complaint: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(item, str | int | float) for item in values):
        raise UsageError(complaint)
    return [str(item) for item in values]


def _command_names(ctx: typer.Context) -> list[str]:
    root = ctx.find_root().command
    return root.list_commands(ctx.find_root()) if isinstance(root, TyperGroup) else []


def _own_sections(ctx: typer.Context) -> tuple[str, ...]:
    """The section of a configuration file that belongs to this command, as a tuple of none or one."""
    parts = ctx.command_path.split()[1:]
    return (parts[0],) if parts else ()
