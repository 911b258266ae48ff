"""What will be done: sizes, rows, steps, and what each stage costs. Made before any weight is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from vkit.video.h3.request import Partition, Task

StageName = Literal["encode", "condition", "denoise", "decode_video", "decode_audio", "mux"]
"""In the order they run: text to embeddings, pictures and sounds to latents, the loop, latents to frames and sound."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage. Memory is what the stage adds to the process, on the device it runs on."""

    name: StageName
    num_flops: float
    seconds: float
    """From the operations counted and the speed of matrix products measured on this device."""
    weight_bytes: int
    peak_bytes: int
    """Weights, activations and workspace together."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows of the packed sequence."""

    text: int
    condition_video: int
    condition_audio: int
    audio: int
    video: int

    @property
    def total(self) -> int:
        """All rows."""
        return self.text + self.condition_video + self.condition_audio + self.audio + self.video


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """A request, resolved."""

    task: Task
    partition: Partition | None
    width: int
    height: int
    num_frames: int
    fps: int
    latent_t: int
    latent_h: int
    latent_w: int
    audio_t: int
    """Latent steps of each channel."""
    steps: int
    num_forwards: int
    seed: int
    rows: RowPlan
    stages: tuple[StagePlan, ...]
    disk_bytes: int
    """Written to the working directory: frames, sound, checkpoints and the muxed file."""
    device: str
    dtype: str
    offload: str
    warnings: tuple[str, ...]
    """What differs from what was asked for, and what may disappoint: one line each, to be shown."""

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.num_frames / self.fps

    @property
    def seconds(self) -> float:
        """Expected time of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def peak_bytes(self) -> int:
        """The most memory any stage needs: they run one after the other, each freeing what it held."""
        return max((stage.peak_bytes for stage in self.stages), default=0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        value = asdict(self)
        value["warnings"] = list(self.warnings)
        value["rows"]["total"] = self.rows.total
        return value | {"duration": self.duration, "seconds": self.seconds, "peak_bytes": self.peak_bytes}
