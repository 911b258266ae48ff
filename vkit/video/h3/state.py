"""A working directory: what a run leaves there so that another can go on where it was killed, bit for bit.

Everything is written beside its place and renamed into it, so a file is complete or not there. `state/` holds the
fingerprint of request and weights, the conditioning, and the loop's latest rows; every file of tensors carries a
checksum, so that damage is told instead of rendered.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vkit.errors import InvalidRequest
from vkit.loaders.tensors import TensorFiles
from vkit.video.errors import ResumeError
from vkit.video.frames import frame_path
from vkit.video.h3.conditioning import Conditions, TextRows
from vkit.video.h3.denoising import LoopState
from vkit.video.h3.model import H3Model
from vkit.video.h3.request import Reference, VideoRequest

STATE, REQUEST, TEXT, CONDITIONS, LATENTS = "state", "request.json", "text", "conditions", "latents"
JOB = "job.json"
SOUND_FILE = "audio.wav"
FORMAT = 2
CHECKSUM = "sha256"


class WorkDir:
    """A working directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = path / STATE

    @property
    def sound(self) -> Path:
        """Where the sound goes."""
        return self.path / SOUND_FILE

    def begin(self, fingerprint: Mapping[str, Any], *, resume: bool) -> None:
        """Take the directory for a new run, or for the run it holds the state of.

        Raises:
            InvalidRequest: it holds a video or a state, and `resume` is not asked for.
            ResumeError: there is nothing to continue, or something else.
        """
        request = self._state / REQUEST
        if resume:
            self._check(request, fingerprint)
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.check_free()
            self._state.mkdir()
            _write(request, json.dumps(fingerprint, indent=1).encode())
        except OSError as error:
            raise InvalidRequest(f"{self.path}: cannot be written to: {error.strerror}", param="workdir") from None

    def check_free(self) -> None:
        """Refuse a directory that holds a video or a state.

        Raises:
            InvalidRequest: it does.
        """
        taken = next((file for file in self._results() if file.exists()), None)
        if taken is not None:
            raise InvalidRequest(
                f"{self.path}: holds a run already ({taken.name})",
                param="workdir",
                remedy="resume it, or give another directory",
            )

    def save_text(self, text: TextRows) -> None:
        """Keep the prompt's rows."""
        self._save(TEXT, {"embeds": text.embeds, "tags": torch.tensor(text.tags, dtype=torch.int64)})

    def load_text(self) -> TextRows | None:
        """The prompt's rows, if they were kept."""
        kept = self._load(TEXT)
        if kept is None:
            return None
        found, _ = kept
        return TextRows(found["embeds"], tuple(found["tags"].tolist()))

    def save_conditions(self, conditions: Conditions) -> None:
        """Keep the conditions' latents."""
        tensors = {f"visual.{index}": latent for index, latent in enumerate(conditions.visual)}
        tensors |= {f"sound.{index}": rows for index, rows in enumerate(conditions.sounds) if rows is not None}
        self._save(CONDITIONS, tensors, kinds=json.dumps(conditions.kinds), sounds=str(len(conditions.sounds)))

    def load_conditions(self) -> Conditions | None:
        """The conditions' latents, if they were kept."""
        kept = self._load(CONDITIONS)
        if kept is None:
            return None
        found, about = kept
        visual = [found[f"visual.{index}"] for index in range(sum(name.startswith("visual.") for name in found))]
        sounds = tuple(found.get(f"sound.{index}") for index in range(int(about["sounds"])))
        return Conditions(tuple(visual), sounds, tuple(json.loads(about["kinds"])))

    def save_latents(self, state: LoopState) -> None:
        """Keep the loop's rows after a step."""
        self._save(LATENTS, {"video": state.video, "audio": state.audio, "step": torch.tensor(state.step)})

    def load_latents(self) -> LoopState | None:
        """The latest rows that were kept."""
        kept = self._load(LATENTS)
        if kept is None:
            return None
        found, _ = kept
        return LoopState(int(found["step"]), found["video"], found["audio"])

    def write_job(self, job: Mapping[str, Any]) -> None:
        """What was asked for and what became of it, for people and for programs."""
        _write(self.path / JOB, (json.dumps(job, indent=1) + "\n").encode())

    def _results(self) -> list[Path]:
        return [self._state, self.path / JOB, self.sound, frame_path(self.path, 0)]

    def _check(self, request: Path, fingerprint: Mapping[str, Any]) -> None:
        if not request.is_file():
            raise ResumeError(f"{self.path}: holds no run to resume", remedy="start without resume")
        try:
            stored = json.loads(request.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ResumeError(f"{request}: cannot be read: {error}") from None
        if not isinstance(stored, dict):
            raise ResumeError(f"{request}: is damaged: expected an object")
        wanted = json.loads(json.dumps(fingerprint))
        different = sorted(key for key in {*stored, *wanted} if stored.get(key) != wanted.get(key))
        if different:
            raise ResumeError(
                f"{self.path}: holds another run: {', '.join(different)} differ",
                remedy="repeat the same request, or use another directory",
            )

    def _save(self, name: str, tensors: Mapping[str, Tensor], **about: str) -> None:
        place = self._state / f"{name}.safetensors"
        partial = place.with_suffix(".partial")
        kept = {key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()}
        save_file(kept, partial, {**about, CHECKSUM: _digest(kept, about)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, place)
        _sync_folder(self._state)

    def _load(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """What `_save` was given; None if it never was.

        Raises:
            ResumeError: the file is not as it was written.
        """
        place = self._state / f"{name}.safetensors"
        if not place.is_file():
            return None
        remedy = "start anew in another directory"
        try:
            with safe_open(place, "pt") as file:
                about = dict(file.metadata() or {})
                # In memory of torch's own: a product's last bit may depend on how its operands are aligned.
                found = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError, ValueError) as error:
            raise ResumeError(f"{place}: is damaged: {error}", remedy=remedy) from None
        if about.pop(CHECKSUM, None) != _digest(found, about):
            raise ResumeError(f"{place}: is damaged: its checksum differs", remedy=remedy)
        return found, about


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """SHA-256 of names, types, shapes and bits, and of what is said about them."""
    digest = hashlib.sha256(json.dumps(sorted(about.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(model: H3Model, request: VideoRequest, *, denoise_only: bool) -> dict[str, Any]:
    """What must be equal for a run to be continued: the request, its input files, the weights, how they compute.

    Where layers wait is left out: it changes no bit.
    """
    asked = {item.name: _plain(getattr(request, item.name)) for item in fields(request)}
    options = model.options
    return {
        "format": FORMAT,
        **asked,
        "inputs": [_file_identity(path) for path in _input_paths(request)],
        **{f"weights of {part}": _weights_identity(files) for part, files in model.files()},
        "partition": model.partition,
        "qkv_layout": model.dit.qkv_layout,
        "dequant_bf16": options.dequant_bf16,
        "vision_conditioning": options.vision_conditioning,
        "device": model.device.kind,
        "dtype": str(model.dtype),
        "denoise_only": denoise_only,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Reference):
        return [value.kind, _plain(value.path), _plain(value.sound)]
    return value


def _input_paths(request: VideoRequest) -> list[Path]:
    single = [request.first_frame, request.last_frame, request.prompt_embeds]
    several = [path for item in request.references for path in (item.path, item.sound)]
    return [path for path in (*single, *several) if path is not None]


def _file_identity(path: Path) -> list[Any]:
    found = path.stat()
    return [str(path.absolute()), found.st_size, found.st_mtime_ns]


def _weights_identity(files: TensorFiles) -> list[Any]:
    members = sorted(files.path.glob("*.safetensors")) if files.path.is_dir() else [files.path]
    return [_file_identity(member) for member in members]


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _sync_folder(path: Path) -> None:
    """Make a rename last: on a system where folders cannot be opened it lasts by itself."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
