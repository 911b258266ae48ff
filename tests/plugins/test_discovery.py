"""The plug-in seam, proven with real distributions in a folder on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HELLO = '''
from typing import Annotated
import typer
from vkit import UsageError

def hello(name: Annotated[str, typer.Option("--name", help="Whom to greet.")] = "world") -> None:
    """Greet somebody."""
    if name == "nobody":
        raise UsageError("--name: nobody is there")
    print(f"hello {name}")

group = typer.Typer(help="Several greetings.")

@group.command()
def morning(name: str = "world") -> None:
    """Greet in the morning."""
    print(f"good morning {name}")

@group.command()
def night() -> None:
    """Greet at night."""
    print("good night")

number = 7
'''

Install = Callable[..., None]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


@pytest.fixture
def install(site: Path) -> Install:
    """Put a distribution there, as an installer would leave it."""

    def put(name: str, entry_points: str, module: str = "", source: str = HELLO, group: str = "vkit.commands") -> None:
        info = site / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")
        (site / f"{module or name.replace('-', '_')}.py").write_text(source)

    return put


@pytest.fixture
def run(site: Path) -> Run:
    def start(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("VKIT_")}
        return subprocess.run(
            [sys.executable, "-m", "vkit", *args],
            capture_output=True,
            text=True,
            timeout=200,
            env={**clean, "PYTHONPATH": str(site), **variables},
        )

    return start


def test_a_plugin_adds_a_command(install: Install, run: Run) -> None:
    install("vkit-hello", "hello = vkit_hello:hello")
    assert "Greet somebody." in run("--help").stdout
    assert run("hello", "--name", "Ann").stdout == "hello Ann\n"
    assert "--config" in run("hello", "--help").stdout
    assert run("hello", VKIT_NAME="Bea").stdout == "hello Bea\n"
    refused = run("hello", "--name", "nobody")
    assert (refused.returncode, refused.stderr) == (2, "vkit: error: --name: nobody is there\n")
    misspelt = run("hello", "--nam", "x")
    assert (misspelt.returncode, "--name" in misspelt.stderr) == (2, True)


def test_a_plugin_may_be_a_group(install: Install, run: Run) -> None:
    install("vkit-hello", "greet = vkit_hello:group")
    assert run("greet", "morning", "--name", "Ann").stdout == "good morning Ann\n"
    assert run("greet", "morning", VKIT_NAME="Bea").stdout == "good morning Bea\n"
    assert "morning" in run("greet", "--help").stdout
    assert run("greet", "noon").returncode == 2
    script = run("completion", "bash").stdout
    assert "'greet morning'" in script


def test_nothing_of_a_plugin_is_imported_for_another_command(install: Install, run: Run) -> None:
    install("vkit-loud", "loud = vkit_loud:hello", source="print('imported')\n" + HELLO)
    assert run("models").stdout.count("imported") == 0
    assert run("loud").stdout.count("imported") == 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_here", "ModuleNotFoundError"),
        ("1/0", "ZeroDivisionError"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("", "AttributeError"),
        ("hello = 7", "TypeError"),
        ("def hello(x: 'NoSuchType') -> None: ...", "NameError"),
    ],
)
def test_a_broken_plugin_is_one_line_and_the_rest_works(install: Install, run: Run, source: str, reason: str) -> None:
    install("vkit-broken", "broken = vkit_broken:hello", source=source)
    listed = run("--help")
    assert listed.returncode == 0
    assert "complete" in listed.stdout
    assert "broken" not in listed.stdout
    (line,) = listed.stderr.splitlines()
    assert "vkit-broken 1.5" in line
    assert reason in line
    itself = run("broken")
    assert itself.returncode == 1
    assert itself.stderr.startswith("vkit: error: vkit-broken 1.5")
    assert len(itself.stderr.splitlines()) == 1


def test_a_broken_plugin_does_not_concern_another_command(install: Install, run: Run) -> None:
    install("vkit-broken", "broken = vkit_broken:hello", source="1/0")
    assert run("models").stderr == ""


def test_a_builtin_name_cannot_be_taken(install: Install, run: Run) -> None:
    install("vkit-greedy", "models = vkit_greedy:hello")
    listed = run("--help")
    (line,) = listed.stderr.splitlines()
    assert "vkit-greedy 1.5" in line
    assert "models" in line
    ran = run("models")
    assert "hello world" not in ran.stdout
    assert "vkit-greedy 1.5" in ran.stderr
    assert "vkit-greedy" not in run("completion", "bash").stdout
    assert run("--version").stderr == ""


def test_two_plugins_claiming_one_name_are_reported(install: Install, run: Run) -> None:
    install("vkit-b", "hello = vkit_b:hello", source=HELLO.replace("hello {", "hello from b {"))
    install("vkit-a", "hello = vkit_a:hello", source=HELLO.replace("hello {", "hello from a {"))
    ran = run("hello")
    assert ran.stdout == "hello from a world\n"
    (line,) = ran.stderr.splitlines()
    assert "vkit-a 1.5" in line
    assert "vkit-b 1.5" in line
    chosen = run("hello", VKIT_PLUGINS="vkit_B")
    assert (chosen.stdout, chosen.stderr) == ("hello from b world\n", "")


def test_the_variable_limits_what_loads(install: Install, run: Run) -> None:
    install("vkit-a", "aaa = vkit_a:hello")
    install("vkit-b", "bbb = vkit_b:hello")
    install("vkit-c", "ccc = vkit_c:hello", group="vkit.models")
    both = run("--help", VKIT_PLUGINS="vkit-a,vkit_b").stdout
    assert "aaa" in both
    assert "bbb" in both
    one = run("--help", VKIT_PLUGINS="vkit-b")
    assert "aaa" not in one.stdout
    assert "bbb" in one.stdout
    none = run("--help", VKIT_PLUGINS="")
    assert "aaa" not in none.stdout
    assert "complete" in none.stdout
    assert run("aaa", VKIT_PLUGINS="").returncode == 2
    assert run("models", VKIT_PLUGINS="vkit-c").stderr == ""
    unknown = run("models", VKIT_PLUGINS="vkit-x")
    assert unknown.returncode == 0
    assert "vkit-x" in unknown.stderr


def test_doctor_names_plugins_and_their_problems(install: Install, run: Run) -> None:
    install("vkit-a", "aaa = vkit_a:hello\nmodels = vkit_a:hello")
    shown = run("doctor").stdout
    assert "aaa (vkit-a 1.5)" in shown
    assert "'models' is built in" in shown
