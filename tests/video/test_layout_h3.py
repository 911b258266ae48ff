"""Packed rows, noise and schedule against the reference."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vkit.errors import InvalidRequest
from vkit.video.h3 import rows, sampler
from vkit.video.h3.layout import LatentSize, ReferenceBlock, pack, timestep_of_kind

NUM_CASES = 7


def _block(ref: dict[str, int | str]) -> ReferenceBlock:
    kind = ref["kind"]
    if kind == "audio":
        return ReferenceBlock("audio", None, int(ref["audio_t"]))
    size = LatentSize(int(ref.get("t", 1)), int(ref["h"]), int(ref["w"]))
    return ReferenceBlock("image" if kind == "image" else "video", size, int(ref.get("audio_t", 0)))


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_every_layout_of_the_reference(goldens: Path, index: int) -> None:
    cases = json.loads((goldens / "layout" / "cases.json").read_text())
    assert len(cases) == NUM_CASES
    case, want = cases[index], load_file(goldens / "layout" / f"case{index}.safetensors")
    layout = pack(
        case["text_tags"],
        LatentSize(case["t"], case["h"], case["w"]),
        case["a"],
        keyframes=case.get("anchors", ()),
        references=[_block(ref) for ref in case.get("refs", ())],
    )
    assert layout.num_rows == case["rows"]
    assert np.array_equal(layout.positions, want["position_ids"].numpy())
    assert np.array_equal(layout.tags, want["token_tags"].numpy())
    for name in ("video_indices", "audio_indices", "text_indices"):
        assert np.array_equal(getattr(layout, name), want[name].numpy()), name
    assert layout.num_condition_video_rows == int(want["num_condition_video_rows"])
    assert layout.num_condition_audio_rows == int(want["num_condition_audio_rows"])
    of_kind = timestep_of_kind(0.25, 0.5, 0.999)
    per_row = torch.tensor([of_kind[kind] for kind in layout.kinds.tolist()])
    values, indices = want["timestep_values_tv0.25_ta0.5"], want["timestep_indices_tv0.25_ta0.5"]
    assert torch.equal(per_row, values[indices])
    covered = [row for start, stop, _, _ in layout.segments() for row in range(start, stop)]
    assert covered == list(range(layout.num_rows))
    for start, stop, kind, tag in layout.segments():
        assert set(layout.kinds[start:stop]) == {kind}
        assert set(layout.tags[start:stop]) == {tag}


def test_rows_are_frame_major_with_the_channel_outermost() -> None:
    latent = torch.arange(3 * 2 * 4 * 6, dtype=torch.float32).reshape(3, 2, 4, 6)
    matrix = rows.to_rows(latent)
    for row, (t, y, x) in enumerate(itertools.product(range(2), range(2), range(3))):
        for feature in range(12):
            c, dy, dx = feature // 4, feature // 2 % 2, feature % 2
            assert matrix[row, feature] == latent[c, t, 2 * y + dy, 2 * x + dx]
    assert torch.equal(rows.from_rows(matrix, 2, 4, 6), latent)
    sound = torch.randn(2, 5, 7)
    assert torch.equal(rows.audio_to_rows(sound)[7 + 3], sound[1, :, 3])
    assert torch.equal(rows.audio_from_rows(rows.audio_to_rows(sound)), sound)


def test_noise_is_normal_and_the_reference_s(goldens: Path) -> None:
    for name, want in load_file(goldens / "rng" / "normal_draws.safetensors").items():
        seed = int(name.partition(".")[0].removeprefix("seed"))
        assert torch.allclose(rows.normal(seed, *want.shape), want, rtol=0, atol=5e-7), name
    noise = rows.video_noise(1, 24, 7, 16, 16)
    assert abs(float(noise.std()) - 1) < 0.02
    assert float(noise.abs().max()) > 3, "uniform noise would end at its bounds"


def test_schedules_of_the_reference(goldens: Path) -> None:
    cases = json.loads((goldens / "scheduler" / "sigmas.json").read_text())
    for case in cases:
        if case["num_steps"] < 2:
            with pytest.raises(InvalidRequest, match="at least 2"):
                sampler.sigmas(case["num_steps"], case["shift"])
            continue
        got = sampler.sigmas(case["num_steps"], case["shift"])
        assert len(got) == len(case["sigmas"]) == case["forwards"] + 1
        assert torch.allclose(got, torch.tensor(case["sigmas"]), rtol=0, atol=1.2e-7)
        assert torch.allclose(1 - got[:-1], torch.tensor(case["timesteps"]), rtol=0, atol=1.2e-7)


def test_steps_of_the_reference(goldens: Path) -> None:
    trace = load_file(goldens / "scheduler" / "euler_trace.safetensors")
    names = {name.rpartition(".")[0] for name in trace}
    assert len(names) == 3
    for name in names:
        steps, _, shift = name.removeprefix("n").partition("_s")
        schedule = sampler.sigmas(int(steps), float(shift))
        x = trace[f"{name}.states"][0]
        for index, velocity in enumerate(trace[f"{name}.velocities"]):
            x = sampler.euler_step(x, velocity, schedule[index], schedule[index + 1])
            assert torch.allclose(x, trace[f"{name}.states"][index + 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("points", "shift"), [(1, 3.0), (0, 3.0), (5, 0.0), (5, -1.0), (5, float("nan"))])
def test_schedules_that_make_no_step(points: int, shift: float) -> None:
    with pytest.raises(InvalidRequest, match=r"steps|flow_shift"):
        sampler.sigmas(points, shift)
