"""Manual pages and completion scripts equal the live command tree, and the shells take them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vkit.manual import GENERATED, SHELLS, Node, command_tree, completion_script, write_all

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tree() -> Node:
    before = os.environ.get("VKIT_PLUGINS")
    os.environ["VKIT_PLUGINS"] = ""
    try:
        return command_tree()
    finally:
        os.environ.pop("VKIT_PLUGINS")
        if before is not None:
            os.environ["VKIT_PLUGINS"] = before


def test_committed_files_equal_what_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKIT_PLUGINS", "")
    written = {path.relative_to(tmp_path) for path in write_all(tmp_path)}
    committed = {p.relative_to(ROOT) for folder in ("man", "completions") for p in (ROOT / folder).iterdir()}
    assert written == committed, "run python -m vkit.manual"
    for path in written:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text(), f"{path}: run python -m vkit.manual"


def test_the_first_line_says_generated_and_by_what() -> None:
    assert "python -m vkit.manual" in GENERATED
    for folder in ("man", "completions"):
        for path in (ROOT / folder).iterdir():
            first, second = path.read_text().splitlines()[:2]
            # compinit recognises a zsh function by its first line alone.
            assert GENERATED in (second if first == "#compdef vkit" else first), path


def test_pages_name_every_flag_and_default(tree: Node) -> None:
    page = (ROOT / "man" / "vkit-complete.1").read_text()
    (complete,) = [node for node in tree.children if node.path[-1] == "complete"]
    assert len(complete.flags) > 35
    for flag in complete.flags:
        for spelling in flag.spellings:
            assert spelling.replace("-", r"\-") in page
    assert "Default: 16." in page
    assert "VKIT_PLUGINS" in (ROOT / "man" / "vkit.1").read_text()


@pytest.mark.skipif(shutil.which("man") is None, reason="no man here")
def test_pages_format_without_complaint() -> None:
    for page in (ROOT / "man").iterdir():
        done = subprocess.run(
            ["man", "--warnings", "-l", "-E", "UTF-8", str(page)],
            capture_output=True,
            text=True,
            env={**os.environ, "MANWIDTH": "100", "MANPAGER": "cat"},
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert "vkit" in done.stdout


def complete_in_bash(line: str) -> list[str]:
    """What TAB offers after `line` in bash."""
    code = f"""
source {ROOT / "completions" / "vkit.bash"}
COMP_LINE={line!r}
COMP_WORDS=({line})
if [[ "$COMP_LINE" == *" " ]]; then COMP_WORDS+=(""); fi
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
compopt() {{ echo "compopt $*" >&2; }}
_vkit
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("vkit com", ["complete", "completion"]),
        ("vkit complete --max-t", ["--max-tokens"]),
        ("vkit complete --device ", ["auto", "cpu", "cuda"]),
        ("vkit complete --device c", ["cpu", "cuda"]),
        ("vkit complete --stream --dtype fl", ["float32", "float16"]),
        ("vkit complete --dtype b", ["bfloat16"]),
        ("vkit completion ", ["bash", "zsh", "fish"]),
        ("vkit complete --no-enable-pre", ["--no-enable-prefix-caching"]),
        ("vkit complete --max-tokens ", []),
    ],
)
def test_bash_completes(line: str, offered: list[str]) -> None:
    assert complete_in_bash(line) == offered


def test_bash_offers_all_commands(tree: Node) -> None:
    assert complete_in_bash("vkit ") == [child.path[-1] for child in tree.children]


@pytest.mark.parametrize(
    ("shell", "check"), [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "-n"])]
)
def test_scripts_parse(shell: str, check: list[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([*check, str(ROOT / "completions" / SHELLS[shell])], capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_every_shell_knows_every_command_flag_and_choice(tree: Node) -> None:
    for shell in SHELLS:
        script = completion_script(shell, tree)
        for node in tree.walk():
            assert node.path[-1] in script
            for flag in node.flags:
                for spelling in flag.spellings:
                    assert spelling.lstrip("-") in script
                for choice in flag.choices:
                    assert choice in script


def test_the_readme_lists_every_command(tree: Node) -> None:
    rows = re.findall(r"^\| `vkit ([\w-]+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == [child.path[-1] for child in tree.children]
