"""Compiles the native kernels into the wheel where there is a C++ compiler; else they are left to the first use."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SWITCH = "VKIT_BUILD_NATIVE"
"""Environment variable of the build: 0 leaves the kernels to the first use."""


def load(name: str, path: Path) -> ModuleType:
    """A module of ours that imports nothing of ours, by its file: the package itself is not installed yet."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


compiler = load("_vkit_compiler", ROOT / "kernels" / "compiler.py")
sources = load("_vkit_sources", ROOT / "kernels" / "cpu" / "sources.py")


def chosen_compiler() -> str | None:
    """The compiler that will be called; None where the kernels are not built."""
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise SystemExit(f"{SWITCH}={switch}: expected 0 or 1")
    found: str | None = compiler.find_compiler()
    return found if switch == "1" and sys.platform.startswith("linux") else None


class BuildWithKernels(build_py):
    """The package, and the kernels beside their sources."""

    def run(self) -> None:
        """Build; a compiler that fails is reported and leaves the wheel without kernels."""
        super().run()
        command = chosen_compiler()
        if command is None or self.editable_mode:
            return
        folder = Path(self.build_lib) / "vkit" / "kernels" / "cpu"
        units = [compiler.Unit(*call) for call in sources.compiler_calls(folder)]
        key = compiler.source_key(units, list(folder.glob("*.h")), sources.FLAGS)
        try:
            compiler.compile_library(command, units, sources.FLAGS, folder / sources.library_name(key))
        except compiler.BuildError as error:
            print(f"the native kernels are left to the first use: {error}", file=sys.stderr)


class NativeDistribution(Distribution):
    """One that belongs to this machine's kind if it carries kernels."""

    def has_ext_modules(self) -> bool:
        """Whether there is machine code inside."""
        return chosen_compiler() is not None


class PlatformWheel(bdist_wheel):
    """Kernels need no particular Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """(py3, none, platform)."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(distclass=NativeDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
