"""Options that take plain values by themselves: the same values and the same complaints as typer's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.core import TyperCommand, TyperOption

from vkit.plain_option import PlainOption, with_plain_values


def _holder(
    text: str | None = None,
    greeting: str = "hello",
    count: int | None = None,
    ranged: Annotated[int, typer.Option(min=1, max=9)] = 3,
    clamped: Annotated[int, typer.Option(min=1, max=9, clamp=True)] = 3,
    ratio: Annotated[float, typer.Option(min=0.0)] = 0.5,
    kind: Literal["auto", "cpu"] = "auto",
    loose: Annotated[Literal["auto", "cpu"], typer.Option(case_sensitive=False)] = "auto",
    texts: list[str] | None = None,
    counts: list[int] | None = None,
    place: Path | None = None,
    pair: tuple[int, str] = (1, "a"),
    switch: bool = False,
    parsed: Annotated[str, typer.Option(parser=lambda text: str(text).upper())] = "x",
    required: Annotated[str, typer.Option()] = ...,  # type: ignore[assignment]
) -> None: ...


def _options() -> list[TyperOption]:
    app = typer.Typer(add_completion=False)
    app.command()(_holder)
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand)
    return [param for param in command.params if isinstance(param, TyperOption)]


TEXTS = ["", " ", "0", "1", "-1", "+1", "007", " 5 ", "1_0", "9", "10", "0x1", "1e3", "1.5", "-0.5", ".5", "5.", "nan"]
TEXTS += ["inf", "auto", "AUTO", "cpu", "gpu", "é", "\udc80", "٣", "9" * 19, "9" * 40, "0." + "3" * 20, "a b"]
VALUES: list[Any] = [None, True, False, 3, -3, 40, 2.5, -2.5, float("nan"), *TEXTS, Path("x")]
VALUES += [["1", "2"], ["a", "\udc80"], [], (), ("1", "x"), (2, "x"), ["1"], [None], [1, 2]]


def _outcome(option: TyperOption, value: Any) -> tuple[str, str]:
    ctx = typer.Context(TyperCommand("c"))
    try:
        made = option.process_value(ctx, value)
    except (typer.TyperException, TypeError, ValueError, AssertionError) as error:
        return type(error).__name__, str(getattr(error, "message", error))
    return type(made).__name__, repr(made)


@pytest.mark.parametrize("name", [option.name for option in _options()])
def test_values_and_complaints_are_typers_own(name: str) -> None:
    (ours,) = (with_plain_values(option) for option in _options() if option.name == name)
    (theirs,) = (option for option in _options() if option.name == name)
    assert type(ours) is PlainOption
    assert type(theirs) is TyperOption
    for value in VALUES:
        assert _outcome(ours, value) == _outcome(theirs, value), value


def test_an_option_of_another_class_is_left_alone() -> None:
    class Own(TyperOption):
        pass

    (option, *_) = _options()
    option.__class__ = Own
    assert type(with_plain_values(option)) is Own


def test_plain_flags_need_no_pydantic(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from vkit.cli import main\n"
        "flags = ['--prompt', 'é', '--max-tokens', '3', '--temperature', '0.5', '--stop', 'x', '--seed', '1']\n"
        f"status = main(['complete', *flags, '--device', 'cpu', '--model', {str(tmp_path / 'none')!r}])\n"
        "print(status, [name for name in ('pydantic', 'torch', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.stdout.split(maxsplit=1)[1] == "[]\n", done.stderr
    assert "--model" in done.stderr
