"""The `vkit` program: the root command and the one boundary between errors and exit status.

The root knows no command by itself; it asks `discovery` for names and imports a command's module when it is needed.
Everything below `main` raises; only `main` turns an error into one line on stderr and a status.
"""

from __future__ import annotations

import difflib
import errno
import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import cached_property
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from vkit import __version__, discovery, env
from vkit.command import command_of, group_of
from vkit.errors import ExitStatus, UsageError, VkitError
from vkit.plain_option import with_plain_values

PROGRAM = "vkit"
TERMINATED = 128 + signal.SIGTERM
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class RootGroup(TyperGroup):
    """The root command: subcommands are found through entry points and imported on demand."""

    @cached_property
    def found(self) -> discovery.Found:
        """What installed distributions offer, asked once per run."""
        return discovery.find(discovery.COMMANDS)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Names of all commands in alphabetical order; nothing is imported."""
        return sorted(self.found.offers)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | TyperGroup | None:  # type: ignore[override]
        """The command of that name, or None if nobody offers it.

        Raises:
            PluginError: its distribution failed to load, or offers no command.
        """
        offer = self.found.offers.get(cmd_name)
        return None if offer is None else discovery.load(offer, lambda target: as_command(target, cmd_name))

    def usable_commands(self, ctx: typer.Context) -> dict[str, TyperCommand | TyperGroup]:
        """Every command that loads; one line on stderr for each problem."""
        for line in self.found.problems:
            warn(line)
        usable = {}
        for name in self.list_commands(ctx):
            try:
                command = self.get_command(ctx, name)
            except discovery.PluginError as error:
                warn(str(error))
            else:
                assert command is not None
                usable[name] = command
        return usable

    def get_help_option_names(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Spellings of the help flag, in a fixed order."""
        return list(ctx.help_option_names)

    def get_help_option(self, ctx: typer.Context) -> TyperOption | None:  # type: ignore[override]
        """The help flag."""
        option = super().get_help_option(ctx)
        return None if option is None else with_plain_values(option)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[Any, Any, list[str]]:  # type: ignore[override]
        """The command that `args` begin with, telling on stderr if others claimed its name."""
        name = args[0]
        if not name.startswith("-") and name not in self.found.offers and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, self.list_commands(ctx))
            raise UsageError(
                f"no such command: {name}",
                remedy=f"did you mean {' or '.join(close)}?" if close else f"{PROGRAM} --help lists them",
            )
        for line in (*self.found.missing, self.found.clashes.get(name)):
            if line is not None:
                warn(line)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """List the commands; those that do not load are named on stderr and left out."""
        commands = {name: command for name, command in self.usable_commands(ctx).items() if not command.hidden}
        room = formatter.width - 6 - max(map(len, commands), default=0)
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(room)) for name, command in commands.items()])


def as_command(target: object, name: str) -> TyperCommand | TyperGroup:
    """The command that an entry point's function or Typer application makes.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(target, typer.Typer):
        return group_of(target, name)
    if callable(target):
        return command_of(target, name)
    raise TypeError(f"expected a function or a Typer application, got {target!r}")


app = typer.Typer(
    cls=RootGroup,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"Every flag can also be set as VKIT_<FLAG> or in a --config file. {PROGRAM} COMMAND --help says more.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run open language models: complete, chat, measure and serve over one engine."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def root_command() -> RootGroup:
    """The root of the live command tree."""
    command = typer.main.get_command(app)
    assert isinstance(command, RootGroup)
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (the process's own arguments if None) and return its exit status."""
    try:
        stop_on_sigterm()
        prepare_streams()
        log_to_stderr()
        result = root_command().main(
            list(sys.argv[1:] if argv is None else argv), prog_name=PROGRAM, standalone_mode=False
        )
        sys.stdout.flush()
        status = result if isinstance(result, int) else int(ExitStatus.OK)
        if status == ExitStatus.INTERRUPTED:
            say("interrupted")
        return status
    except VkitError as error:
        return fail(str(error), error.exit_status, error)
    except typer.TyperException as error:
        return fail(usage_message(error), error.exit_code, error)
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        forget_stdout()
        return ExitStatus.FAILURE
    except SystemExit as error:
        if error.code == ExitStatus.FAILURE and isinstance(error.__context__, OSError):
            forget_stdout()  # typer met the closed pipe first
        return error.code if isinstance(error.code, int) else ExitStatus.FAILURE
    except Exception as error:
        lost = output_fault(error) if isinstance(error, OSError) else None
        if lost is not None:
            forget_stdout()
            return fail(f"standard output: {lost}", ExitStatus.FAILURE, error)
        if isinstance(error, OSError) and error.strerror and (error.filename or error.errno in _FULL):
            where = f"{error.filename}: " if error.filename else "a file could not be written: "
            return fail(where + _lower_first(error.strerror), ExitStatus.FAILURE, error)
        reason = " ".join(str(error).split())
        return fail(f"internal: {type(error).__name__}: {reason}", ExitStatus.FAILURE, error, is_bug=True)


def fail(message: str, status: int, error: BaseException, *, is_bug: bool = False) -> int:
    """Report an error on one line and return its status."""
    if env.TRACEBACK.read(_valid_environ(env.TRACEBACK)):
        traceback.print_exception(error, file=sys.stderr)
    elif is_bug:
        message += f" ({env.TRACEBACK.name}=1 shows where)"
    say(f"error: {message}")
    return int(status)


def say(message: str) -> None:
    """Write one line to stderr, with control characters made visible."""
    line = "".join(c if c.isprintable() else " " if c in "\n\t\r" else repr(c)[1:-1] for c in message)
    print(f"{PROGRAM}: {line}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Write one warning line to stderr."""
    say(f"warning: {message}")


def usage_message(error: typer.TyperException) -> str:
    """One line that names the flag or argument at fault."""
    text = error.message.rstrip(".").removeprefix("Value error, ")
    param = getattr(error, "param", None)
    option_name = getattr(error, "option_name", None)
    possibilities = getattr(error, "possibilities", None)
    if param is not None:
        flag = next((name for name in param.opts if name.startswith("--")), param.name.upper())
        if type(error).__name__ == "MissingParameter":
            kind = "option" if flag.startswith("--") else "argument"
            return f"{flag}: this {kind} is required"
        return f"{flag}: {_lower_first(text)}"
    if possibilities:
        text += f" (did you mean {' or '.join(sorted(possibilities))}?)"
    if option_name is not None and option_name not in text:
        text = f"{option_name}: {text}"
    ctx = getattr(error, "ctx", None)
    help_hint = f"; {ctx.command_path} --help lists what there is" if ctx is not None and not possibilities else ""
    return _lower_first(text) + help_hint


def stop_on_sigterm() -> None:
    """End cleanly on SIGTERM: open resources are closed on the way out. Only the main thread may ask for it."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)


def prepare_streams() -> None:
    """Make sure that any text can be written, and that results which cannot be are not lost in silence."""
    if sys.stdout is None:  # closed by the caller; a descriptor to read from refuses what is written, as a closed one
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if not re.fullmatch(r"utf-?8", stream.encoding or "", re.IGNORECASE) and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def log_to_stderr() -> None:
    """Show warnings of the library as lines of the program's own."""
    logger = logging.getLogger(PROGRAM)
    if not logger.handlers:
        handler = _StderrLines()
        logger.addHandler(handler)
        logger.propagate = False


class _StderrLines(logging.Handler):
    """Writes each record to whatever sys.stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


def output_fault(error: OSError) -> str | None:
    """Why stdout takes no more text, if that is what `error` came from, else None."""
    if error.errno == errno.EBADF:
        return "closed"
    if error.errno not in _FULL:
        return None
    try:
        sys.stdout.write("\n")  # a full disk may be another file's
        sys.stdout.flush()
    except OSError as fault:
        return _lower_first(fault.strerror or str(fault))
    return None


def forget_stdout() -> None:
    """Point stdout nowhere, so that the interpreter's last flush does not complain about a reader that left."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    finally:
        os.close(devnull)


def _valid_environ(variable: env.Variable[Any]) -> dict[str, str]:
    """The environment without a malformed value of `variable`: reporting one error must not raise another."""
    try:
        variable.read()
    except UsageError:
        return {}
    return dict(os.environ)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
