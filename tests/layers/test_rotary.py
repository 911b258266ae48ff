"""Rope scaling against formulas written out in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vkit.errors import ModelLoadError
from vkit.layers.rotary import RopeSpec, cos_sin_table, frequencies_of
from vkit.models.hf_config import HFConfig

WIDTH, BASE = 16, 10000.0


def spec(kind: str, max_model_len: int = 512, width: int = WIDTH, **scaling: Any) -> RopeSpec:
    return RopeSpec(32, width, BASE, 1024, max_model_len, kind, scaling)


def plain(base: float = BASE, width: int = WIDTH) -> list[float]:
    return [base ** (-2 * i / width) for i in range(width // 2)]


def check(given: RopeSpec, expected: list[float], magnitude: float = 1.0) -> None:
    frequencies, factor = frequencies_of(given)
    assert frequencies.dtype == torch.float32
    assert frequencies.tolist() == pytest.approx(expected, rel=1e-5)
    assert factor == pytest.approx(magnitude, rel=1e-6)


def test_default_and_table() -> None:
    check(spec("default"), plain())
    table = cos_sin_table(spec("default", max_model_len=7))
    assert table.shape == (7, WIDTH)
    assert table.dtype == torch.float32
    angles = [6 * value for value in plain()]
    assert table[6].tolist() == pytest.approx([*map(math.cos, angles), *map(math.sin, angles)], abs=1e-6)


def test_linear() -> None:
    check(spec("linear", factor=4.0), [value / 4 for value in plain()])


def test_dynamic() -> None:
    check(spec("dynamic", factor=2.0, max_model_len=1024), plain())
    stretch = (2.0 * 4096 / 1024 - 1.0) ** (WIDTH / (WIDTH - 2))
    check(spec("dynamic", factor=2.0, max_model_len=4096), plain(BASE * stretch))


def test_llama3() -> None:
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    expected = []
    for value in plain():
        wavelength = 2 * math.pi / value
        if wavelength > original / low:
            expected.append(value / factor)
        elif wavelength < original / high:
            expected.append(value)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * value / factor + smooth * value)
    assert len({round(e / p, 6) for e, p in zip(expected, plain(), strict=True)}) > 2  # all three branches
    check(
        spec(
            "llama3",
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        ),
        expected,
    )


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(truncate: bool) -> None:
    factor, original = 4.0, 256

    def dimension(rotations: float) -> float:
        return WIDTH * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(BASE))

    low, high = dimension(32), dimension(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, WIDTH - 1)
    expected = []
    for i, value in enumerate(plain()):
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        expected.append(value / factor * ramp + value * (1 - ramp))
    scaling: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": original, "truncate": truncate}
    check(spec("yarn", **scaling), expected, 0.1 * math.log(factor) + 1)
    check(spec("yarn", **scaling, attention_factor=1.25), expected, 1.25)
    check(spec("yarn", **scaling, mscale=1.0, mscale_all_dim=1.0), expected, 1.0)
    ratio = (0.1 * 0.7 * math.log(factor) + 1) / (0.1 * 2.0 * math.log(factor) + 1)
    check(spec("yarn", **scaling, mscale=0.7, mscale_all_dim=2.0), expected, ratio)


def test_longrope() -> None:
    long, short = [1.0 + i for i in range(8)], [1.0 + i / 10 for i in range(8)]
    scaling: dict[str, Any] = {
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": 256,
    }
    magnitude = math.sqrt(1 + math.log(1024 / 256) / math.log(256))
    check(
        spec("longrope", max_model_len=256, **scaling), [p / s for p, s in zip(plain(), short, strict=True)], magnitude
    )
    check(
        spec("longrope", max_model_len=257, **scaling), [p / s for p, s in zip(plain(), long, strict=True)], magnitude
    )


def test_proportional() -> None:
    check(spec("proportional", partial_rotary_factor=0.25), [*plain()[:2], *[0.0] * 6])


def test_frequency_divisors() -> None:
    divisors = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 1e30]
    check(spec("frequency_divisors", divisors=divisors), [p / d for p, d in zip(plain(), divisors, strict=True)])


@pytest.mark.parametrize(
    ("kind", "scaling", "message"),
    [
        ("linear", {}, "type linear: expected a number for factor, got None"),
        ("llama3", {"factor": 8.0}, "expected a number for original_max_position_embeddings"),
        ("longrope", {"short_factor": [1.0]}, "short_factor must list 8 numbers"),
        ("yarn", {"factor": "4"}, "expected a number for factor, got '4'"),
    ],
)
def test_errors(kind: str, scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        frequencies_of(spec(kind, **scaling))


def test_config_keys() -> None:
    base = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 1024}
    old = HFConfig({**base, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}).rope(32)
    new = HFConfig({**base, "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}}).rope(32)
    assert (old.base, old.kind, old.width) == (new.base, new.kind, new.width) == (500.0, "linear", 16)
    partial = HFConfig({**base, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}).rope(32)
    assert partial.width == 8
    su = HFConfig({**base, "original_max_position_embeddings": 64, "rope_scaling": {"type": "su"}}).rope(32)
    assert (su.kind, su.original_length) == ("longrope", 64)
