"""Parsers by name: one door for ours and everyone's."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vkit
from vkit.discovery import PluginError
from vkit.errors import UsageError
from vkit.parsers.reasoning_reader import ReasoningParser
from vkit.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, Registry, tool_parser_for
from vkit.parsers.tool_reader import ToolParser, ToolReader

PLUGIN = '''
from vkit import ToolReader

class Shouted(ToolReader):
    """CALL name!"""

    names = ("shouted",)
    marker = "CALL "
    marker_order = 5

    def read(self):
        if (yield from self.prose("CALL ")) is None:
            return
        name, _ = yield from self.take_until("!")
        self.open_call(name)
        self.close_call()

broken = 7
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a distribution with parsers on the path."""

    def put(entry_points: str) -> None:
        info = tmp_path / "loud_parsers-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud-parsers\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vkit.tool_parsers]\n{entry_points}\n")
        (tmp_path / "loud_parsers.py").write_text(PLUGIN)
        monkeypatch.syspath_prepend(tmp_path)

    yield put
    sys.modules.pop("loud_parsers", None)


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> Registry[ToolParser]:
    """The tool-call parsers; what a test adds goes again, and what is installed is looked for anew."""
    TOOL_PARSERS.names()
    monkeypatch.setattr(TOOL_PARSERS, "_classes", dict(TOOL_PARSERS._classes))
    monkeypatch.setattr(TOOL_PARSERS, "_offers", None)
    return TOOL_PARSERS


def test_an_unknown_name_lists_those_there_are() -> None:
    for refuse in (TOOL_PARSERS.check, tool_parser_for):
        with pytest.raises(UsageError, match=r"--tool-call-parser: 'hermse' .*auto, none, .*hermes.*xlam"):
            refuse("hermse")
    TOOL_PARSERS.check("auto")
    TOOL_PARSERS.check("none")
    TOOL_PARSERS.check("glm47")


def test_a_distribution_adds_a_parser(install: Callable[[str], None], parsers: Registry[ToolParser]) -> None:
    install("shouted = loud_parsers:Shouted")
    assert "loud_parsers" not in sys.modules
    assert "shouted" in parsers.names()
    assert "loud_parsers" not in sys.modules, "listing names imports nothing of others"
    reply = parsers.get("shouted")().parse("now CALL f! done")
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", "{}")]
    assert reply.content == "now done"
    found = parsers.detected("{{ 'CALL ' }}<tool_call>")
    assert found is not None
    assert found.names == ("shouted",)


def test_a_broken_parser_is_named_and_the_rest_works(
    install: Callable[[str], None], parsers: Registry[ToolParser], caplog: pytest.LogCaptureFixture
) -> None:
    install("broken = loud_parsers:broken\nhermes = loud_parsers:Shouted")
    with caplog.at_level(logging.WARNING, "vkit.parsers"):
        found = parsers.detected("<tool_call>")
    assert found is not None
    assert found.names == ("hermes",)
    assert "loud-parsers 1.0" in caplog.text
    assert "'hermes' is built in" in caplog.text
    with pytest.raises(PluginError, match=r"loud-parsers 1\.0: 'broken' cannot be loaded"):
        parsers.get("broken")


def test_registering(parsers: Registry[ToolParser]) -> None:
    class Mine(ToolReader):
        names = ("mine", "ours")

        def read(self) -> Any:
            return
            yield

    parsers.register(Mine)
    assert parsers.get("ours") is parsers.get("mine") is Mine
    parsers.register(Mine, "also_mine")
    assert parsers.get("also_mine") is Mine
    parsers.names()
    with pytest.raises(UsageError, match="hermes' is Hermes already"):
        parsers.register(Mine, "hermes")
    with pytest.raises(UsageError, match="'auto' has a meaning"):
        parsers.register(Mine, "auto")
    with pytest.raises(UsageError, match="a class with push, finish, parse"):
        parsers.register(int, "int")  # type: ignore[arg-type]


def test_public_names(monkeypatch: pytest.MonkeyPatch) -> None:
    REASONING_PARSERS.names()
    monkeypatch.setattr(REASONING_PARSERS, "_classes", dict(REASONING_PARSERS._classes))
    assert vkit.register_tool_parser.__module__ == "vkit.parsers.registry"
    assert vkit.register_reasoning_parser(_quiet(), "quiet").names == ("quiet",)


def _quiet() -> type[ReasoningParser]:
    class Quiet(vkit.ReasoningReader):
        names = ("quiet",)

        def read(self) -> Any:
            return
            yield

    return Quiet


def test_one_family_is_one_file() -> None:
    """No file outside a family's own names a family; what families build on does not know them."""
    folder = Path(vkit.__file__).parent / "parsers"
    families = {file.stem for file in (folder / "tools").glob("[!_]*.py")}
    assert len(families) == 36
    for file in folder.glob("*.py"):
        assert "vkit.parsers.tools." not in file.read_text(encoding="utf-8"), file


def test_no_torch() -> None:
    code = "import sys, vkit.parsers.output as o; o.open_parsers('auto', 'auto'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0
