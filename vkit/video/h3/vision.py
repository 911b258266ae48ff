"""What the conditioner sees of pictures and clips: pixels to patches, and the tower over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vkit.errors import CheckpointError
from vkit.layers import Placement
from vkit.media.resize import BICUBIC, resize
from vkit.models.hf_config import HFConfig
from vkit.models.qwen_vision import Grid, QwenVisionTower
from vkit.quantization import Weight
from vkit.video.h3.encoder_weights import EncoderWeights
from vkit.video.h3.geometry import FramePair, Size, encoder_size
from vkit.video.h3.presentation import VisionBlock

Frames = npt.NDArray[np.uint8]
IMAGE_PIXELS = (65_536, 16_777_216)
CLIP_PIXELS = (4_096, 25_165_824)
"""Fewest and most pixels, over all sampled frames of a clip."""


@dataclass(frozen=True, slots=True)
class PatchShape:
    """Sizes that decide how pixels become patches."""

    patch: int
    merge: int
    frames: int

    @property
    def step(self) -> int:
        """Sides of what the tower sees are multiples of this."""
        return self.patch * self.merge


def patch_shape(weights: EncoderWeights) -> PatchShape:
    """The tower's sizes, from its configuration."""
    config = HFConfig(dict(weights.config.vision))
    return PatchShape(
        config.integer("patch_size", default=16),
        config.integer("spatial_merge_size", default=2),
        config.integer("temporal_patch_size", default=2),
    )


def image_size(size: Size, shape: PatchShape) -> Size:
    """The size at which a picture is shown."""
    return encoder_size(size, 1, min_pixels=IMAGE_PIXELS[0], max_pixels=IMAGE_PIXELS[1], step=shape.step)


def clip_size(size: Size, pairs: Sequence[FramePair], shape: PatchShape) -> Size:
    """The size at which the sampled frames of a clip are shown."""
    count = 2 * len(pairs)
    return encoder_size(size, count, min_pixels=CLIP_PIXELS[0], max_pixels=CLIP_PIXELS[1], step=shape.step)


def block_of(size: Size, shape: PatchShape, *, is_clip: bool) -> VisionBlock:
    """The run of pads for one picture or one pair of frames of this size."""
    return VisionBlock("video" if is_clip else "image", size.height // shape.step, size.width // shape.step)


def features(frames: Frames, size: Size, shape: PatchShape) -> tuple[Tensor, Grid]:
    """Patches (n, 3 · frames · p · p) of a picture, or of sampled frames two by two, and their grid.

    frames (N, H, W, 3): one picture, shown in both frames of its pair, or an even number of frames.
    """
    scaled = resize(frames, size.height, size.width, BICUBIC)
    pixels = torch.from_numpy(scaled).permute(0, 3, 1, 2).to(torch.float32) / 255
    pixels = (pixels - 0.5) / 0.5
    if len(pixels) == 1:
        pixels = pixels.expand(shape.frames, -1, -1, -1)
    p, m = shape.patch, shape.merge
    grid = (len(pixels) // shape.frames, size.height // p, size.width // p)
    split = pixels.reshape(grid[0], shape.frames, 3, grid[1] // m, m, p, grid[2] // m, m, p)
    ordered = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(grid[0] * grid[1] * grid[2], -1), grid


class VisionTower:
    """The tower, loaded from the conditioner's files."""

    def __init__(self, weights: EncoderWeights, device: torch.device, dtype: torch.dtype) -> None:
        """Read and place the tower's weights.

        Raises:
            CheckpointError: a tensor is missing or misshapen.
        """
        self._tower = QwenVisionTower(HFConfig(dict(weights.config.vision)))
        stored = weights.vision_names()
        placement = Placement(device, dtype)
        for prefix, module in self._tower.walk():
            tensors: dict[str, Weight] = {}
            for slot in module.slots():
                name = prefix + slot.name
                if name not in stored:
                    raise CheckpointError(f"{weights.path}: tensor 'visual.{name}' is missing")
                tensors[slot.name] = weights.vision_tensor(name, slot.shape)
            module.set_tensors(tensors, placement)

    def __call__(self, parts: Sequence[tuple[Tensor, Grid]]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Merged rows of all parts, and the deeper features that go with them."""
        if not parts:
            raise ValueError("VisionTower: no parts, expected at least one picture")
        encoded = [self._tower.encode(patches, [grid]) for patches, grid in parts]
        rows = torch.cat([item.embeddings for item in encoded])
        deeper = tuple(torch.cat(level) for level in zip(*(item.features for item in encoded), strict=True))
        return rows, deeper
