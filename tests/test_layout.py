"""The plan of the house, enforced: who may import whom, which packages ship, and what a built distribution holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import vkit

ROOT = Path(__file__).parent.parent
FOLDERS = {"vkit": ROOT / "vkit", "vkit.commands": ROOT / "commands", "vkit.kernels": ROOT / "kernels"}
"""Import name -> folder, as pyproject.toml maps them."""

RANKS: dict[str, int] = {
    # A module imports only what has its own rank or a lower one. See docs/architecture.md.
    "vkit.errors": 0,
    "vkit.config": 1,
    "vkit.facts": 1,
    "vkit.pool_size": 1,
    "vkit.env": 1,
    "vkit.kv_transfer": 1,
    "vkit.media": 1,
    "vkit.speculative_config": 1,
    "vkit.starting": 1,
    "vkit.types": 1,
    "vkit.weight_offload": 1,
    "vkit.discovery": 2,
    "vkit.kernels": 2,
    "vkit.thinking": 2,
    "vkit.device": 3,
    "vkit.distributed": 3,
    "vkit.quantization": 3,
    "vkit.batch": 4,
    "vkit.block_table": 4,
    "vkit.cache": 4,
    "vkit.decode_inputs": 4,
    "vkit.layers": 4,
    "vkit.loaders": 4,
    "vkit.plan_arrays": 4,
    "vkit.policies": 4,
    "vkit.sampled": 4,
    "vkit.sequence": 4,
    "vkit.staging": 4,
    "vkit.text": 4,
    "vkit.connectors": 5,
    "vkit.graphs": 5,
    "vkit.logits": 5,
    "vkit.models": 5,
    "vkit.parsers": 5,
    "vkit.randomness": 5,
    "vkit.structured": 5,
    "vkit.token_logprobs": 5,
    "vkit.video": 5,
    "vkit.adapters": 6,
    "vkit.encoding": 6,
    "vkit.memory": 6,
    "vkit.metrics": 6,
    "vkit.pooling": 6,
    "vkit.runner": 6,
    "vkit.sampler": 6,
    "vkit.scheduler": 6,
    "vkit.speculation": 6,
    "vkit.speech": 6,
    "vkit.engine": 7,
    "vkit.inputs": 7,
    "vkit.outputs": 7,
    "vkit.beam_search": 8,
    "vkit.client": 8,
    "vkit.conversion": 8,
    "vkit.default_model": 8,
    "vkit.engine_thread": 8,
    "vkit.inspection": 8,
    "vkit.llm": 8,
    "vkit.description": 8,
    "vkit.loading": 8,
    "vkit.plugged_processors": 8,
    "vkit.resident": 8,
    "vkit.parallel": 8,
    "vkit.scoring": 8,
    "vkit.async_engine": 9,
    "vkit.benchmark": 9,
    "vkit.server": 9,
    "vkit.__main__": 10,
    "vkit.cli": 10,
    "vkit.command": 10,
    "vkit.manual": 10,
    "vkit.plain_option": 10,
    "vkit.commands": 11,
}
TORCH_FREE = [
    "vkit.errors",
    "vkit.types",
    "vkit.starting",
    "vkit.config",
    "vkit.facts",
    "vkit.pool_size",
    "vkit.env",
    "vkit.discovery",
    "vkit.command",
    "vkit.cli",
    "vkit.manual",
    "vkit.plain_option",
    "vkit.scheduler",
    "vkit.policies",
    "vkit.sequence",
    "vkit.thinking",
    "vkit.cache.blocks",
    "vkit.cache.prefix",
    "vkit.cache.groups",
    "vkit.cache.connector",
    "vkit.cache.transfer",
    "vkit.kv_transfer",
    "vkit.speculative_config",
    "vkit.speculation.earlier",
    "vkit.speculation.ngram",
    "vkit.speculation.proposer",
    "vkit.speculation.stats",
    "vkit.speculation.suffix",
    "vkit.speculation.support",
    "vkit.weight_offload",
    "vkit.media",
    "vkit.media.audio",
    "vkit.media.decoding",
    "vkit.media.sources",
    "vkit.video.errors",
    "vkit.video.h3.request",
    "vkit.video.h3.plan",
    "vkit.video.h3.geometry",
    "vkit.video.h3.pipeline",
]
CROSSING = {"vkit.kernels": {"vkit.kernels"}, "vkit.errors": set(), "vkit.types": {"vkit.errors", "vkit.types"}}
"""Parts that may import nothing of ours but what is listed."""

COMMANDS_MAY_IMPORT = {
    "vkit",
    "vkit.async_engine",
    "vkit.benchmark",
    "vkit.cli",
    "vkit.client",
    "vkit.command",
    "vkit.commands",
    "vkit.config",
    "vkit.conversion",
    "vkit.default_model",
    "vkit.device",
    "vkit.discovery",
    "vkit.engine",
    "vkit.env",
    "vkit.errors",
    "vkit.inspection",
    "vkit.kernels",
    "vkit.llm",
    "vkit.manual",
    "vkit.media",
    "vkit.models",
    "vkit.server",
    "vkit.speech",
    "vkit.starting",
    "vkit.text",
    "vkit.types",
    "vkit.video",
}


@dataclass(frozen=True)
class Import:
    """One import statement."""

    module: str
    name: str | None
    is_deferred: bool
    """Inside a function."""
    line: int


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module that ships."""
    for package, folder in FOLDERS.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            yield name, file


def imports_of(file: Path) -> list[Import]:
    """Every import of a file that runs; those for type checkers alone are left out."""
    found: list[Import] = []

    def visit(node: ast.AST, deferred: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child, deferred)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, None, deferred, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            found.extend(Import(node.module or "", alias.name, deferred, node.lineno) for alias in node.names)
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(file.read_text(encoding="utf-8")), False)
    return found


MODULES = dict(modules())
IMPORTS = {name: imports_of(file) for name, file in MODULES.items()}


def part_of(module: str) -> str:
    """The part of the house a module belongs to: vkit.cache for vkit.cache.blocks."""
    return ".".join(module.split(".")[:2])


def parts_imported(module: str) -> Iterator[tuple[str, Import]]:
    """(part, import) for everything of ours that a module imports."""
    for entry in IMPORTS[module]:
        if entry.module == "vkit" and entry.name and f"vkit.{entry.name}" in MODULES:
            yield f"vkit.{entry.name}", entry
        elif entry.module == "vkit" or entry.module.startswith("vkit."):
            yield part_of(entry.module), entry


def test_every_part_has_a_place() -> None:
    parts = {part_of(name) for name in MODULES} - {"vkit"}
    assert parts <= RANKS.keys(), "give the new part a rank in tests/test_layout.py"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module: str) -> None:
    if module == "vkit":  # the public names, resolved lazily
        assert {part for part, _ in parts_imported(module)} == set()
        return
    rank = RANKS[part_of(module)]
    for part, entry in parts_imported(module):
        if part == "vkit":
            assert rank >= RANKS["vkit.default_model"] or entry.name in ("__version__", None), entry
            continue
        assert RANKS[part] <= rank, f"{module}:{entry.line} imports {part}, which stands above it"
        allowed = CROSSING.get(part_of(module))
        assert allowed is None or part in allowed, f"{module}:{entry.line} imports {part}"


def test_the_engine_never_imports_commands_or_plugins() -> None:
    for module, entries in IMPORTS.items():
        for entry in entries:
            top = entry.module.split(".")[0]
            assert top not in ("commands", "kernels", "plugins"), f"{module}:{entry.line}"
            if part_of(module) != "vkit.commands":
                assert part_of(entry.module) != "vkit.commands", f"{module}:{entry.line}"


@pytest.mark.parametrize("module", [name for name in sorted(MODULES) if part_of(name) == "vkit.commands"])
def test_commands_use_the_front_door(module: str) -> None:
    for part, entry in parts_imported(module):
        assert part in COMMANDS_MAY_IMPORT, f"{module}:{entry.line}"
        private = [step for step in entry.module.split(".") if step.startswith("_")]
        assert not private or part == "vkit.commands", f"{module}:{entry.line}"


@pytest.mark.parametrize("module", [name for name in TORCH_FREE if name in MODULES])
def test_host_side_parts_import_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


def test_plugins_use_only_public_names() -> None:
    for file in sorted((ROOT / "plugins").glob("*/src/**/*.py")):
        for entry in imports_of(file):
            if entry.module.split(".")[0] == "vkit":
                assert entry.module == "vkit", f"{file}:{entry.line}"
                assert entry.name is None or entry.name in vkit.__all__, f"{file}:{entry.line}"


def test_every_public_name_resolves() -> None:
    assert set(vkit.__all__) <= set(dir(vkit))
    for name in vkit.__all__:
        assert getattr(vkit, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        vkit.no_such_name  # noqa: B018


# What ships


def project() -> dict:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


NATIVE_ENDINGS = {".cpp", ".h", ".hpp", ".cu", ".cuh", ".npz", ".html", ".css", ".js", ".svg"}


def native_sources() -> set[str]:
    """Sources outside Python that the wheel must carry, as paths inside it."""
    return {
        "/".join([*package.split("."), *file.relative_to(folder).parts])
        for package, folder in FOLDERS.items()
        for file in folder.rglob("*")
        if file.suffix in NATIVE_ENDINGS and "__pycache__" not in file.parts
    }


def test_the_package_list_equals_the_folders() -> None:
    found = {
        ".".join([package, *file.parent.relative_to(folder).parts])
        for package, folder in FOLDERS.items()
        for file in folder.rglob("*")
        if file.suffix in {".py", ".cpp", ".cu"} and "__pycache__" not in file.parts
    }
    declared = project()["tool"]["setuptools"]["packages"]
    assert declared == sorted(declared)
    assert set(declared) == found


def test_entry_points_equal_the_command_modules() -> None:
    declared = project()["project"]["entry-points"]["vkit.commands"]
    modules_named = {target.partition(":")[0] for target in declared.values()}
    files = {f"vkit.commands.{file.stem}" for file in (ROOT / "commands").glob("[!_]*.py")}
    assert modules_named == files


def test_every_folder_that_is_python_is_a_package() -> None:
    for folder in FOLDERS.values():
        for file in folder.rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), file


@pytest.mark.slow
def test_built_distributions_are_complete(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    clean = tmp_path / "source"
    for name in listed:
        if (ROOT / name).is_file():
            (clean / name).parent.mkdir(parents=True, exist_ok=True)
            (clean / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path / "out"
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(clean)],
        check=True,
        capture_output=True,
        timeout=280,
    )
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("commands/complete.py", "kernels/__init__.py", "vkit/py.typed", "LICENSE", "pyproject.toml"):
        assert name in sources
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    for module, file in MODULES.items():
        path = "/".join(module.split("."))
        assert f"{path}/__init__.py" in files if file.name == "__init__.py" else f"{path}.py" in files, module
    assert native_sources() <= files
    assert "vkit/py.typed" in files
    assert not [name for name in files if name.startswith(("commands/", "kernels/", "tests/", "plugins/"))]
    data = f"vkit-{vkit.__version__}.data/data/share"
    for page in (ROOT / "man").glob("*.1"):
        assert f"{data}/man/man1/{page.name}" in files
    for script in ("bash-completion/completions/vkit.bash", "zsh/site-functions/_vkit"):
        assert f"{data}/{script}" in files
    assert f"{data}/fish/vendor_completions.d/vkit.fish" in files


def test_the_editable_install_leaks_no_folder() -> None:
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) for n in ('commands', 'kernels', 'plugins')))"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT.parent, timeout=200).returncode == 0
