"""The plug-in of docs/plugins.md, built and installed as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT.parent / "shared" / "goldens" / "models"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-in installed by pip."""
    source = tmp_path_factory.mktemp("vkit-count")
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    files = re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["pyproject.toml", "vkit_count.py"]
    for name, text in files:
        (source / name).write_text(text, encoding="utf-8")
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(target), str(source)], check=True, timeout=120)
    return target


def run(site: Path, *args: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VKIT_")}
    return subprocess.run(
        [sys.executable, "-m", "vkit", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, "PYTHONPATH": str(site)},
    )


def test_it_adds_its_command(site: Path, tmp_path: Path) -> None:
    assert "Count the tokens of a text." in run(site, "--help").stdout
    assert "TEXT" in run(site, "count", "--help").stdout
    refused = run(site, "count", "")
    assert (refused.returncode, refused.stderr) == (2, "vkit: error: TEXT: is empty\n")
    model = tmp_path / "model"
    shutil.copytree(GOLDENS / "byte_tokenizer", model, copy_function=shutil.copyfile)
    model.chmod(0o755)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / "llama" / name, model / name)
    counted = run(site, "count", "é😀", "--model", str(model))
    assert (counted.returncode, counted.stdout) == (0, "6\n"), counted.stderr
