"""MiniMax-H3: a transformer step against the peak of matrix products, memory against the plan, a table on paper.

    python -P benchmarks/h3.py step [--device cpu|cuda] [--dtype bfloat16|float32] [--rows N] [--threads N]
        [--clock wall|cpu]
    python -P benchmarks/h3.py memory
    python -P benchmarks/h3.py table [--tflops 989 --attention-share 0.6 --product-share 0.75]

`step`: a random model of middle size. Steps and plain products of the step's own shapes take turns in one run, so that
whatever else the machine does hits both; the figure is the median of their paired ratios. On a busy machine
`--clock cpu` with one thread counts processor time instead.
`memory`: peak resident memory of a run of its own process above what it held before, against the plan's.
`table`: counted operations of the full model over what a card is said to do. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional

from vkit.video.h3 import costs, geometry
from vkit.video.h3.dit import DiT
from vkit.video.h3.dit_config import DiTConfig
from vkit.video.h3.dit_weights import DiTWeights
from vkit.video.h3.layout import LatentSize, pack, timestep_of_kind
from vkit.video.h3.weights import Residency

MIDDLE = {"hidden": 1536, "heads": 16, "head_dim": 128, "ffn": 4096, "layers": 4}
FULL = DiTConfig(50, 2, 5376, 56, 128, 14336, 24, 32, 5120, 256, 5376, 2688, 16)
TEXT_ROWS = 64


def random_dit(
    folder: Path, dtype: torch.dtype, *, hidden: int, heads: int, head_dim: int, ffn: int, layers: int
) -> Path:
    """A transformer of random weights in one file."""
    width = heads * head_dim

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) / math.sqrt(shape[-1])).to(dtype)

    shapes = {
        "video_patch_proj": (hidden, 96), "audio_patch_proj": (hidden, 32), "condition_proj": (hidden, 512),
        "time_embedder.proj_in": (hidden, 256), "time_embedder.proj_out": (256, hidden),
        "final_layer.adaln_proj.linear": (2 * hidden, 256), "final_layer.video_out": (96, hidden),
        "final_layer.audio_out": (32, hidden),
    }  # fmt: skip
    tensors = {f"{name}.weight": draw(*shape) for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": torch.zeros(shape[0], dtype=dtype) for name, shape in shapes.items()}
    tensors |= {
        name: torch.ones(hidden, dtype=dtype) for name in ("token_refiner.final_norm.weight", "final_layer.norm.weight")
    }
    tensors["rope.inv_freq"] = 10000.0 ** (-torch.arange(16) / 16)
    for prefix in [f"blocks.{index}." for index in range(layers)] + ["token_refiner.blocks.0."]:
        for name in ("norm1", "norm2"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=dtype)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}attn.{name}.weight"] = torch.ones(head_dim, dtype=dtype)
        tensors[f"{prefix}attn.qkv_proj.weight"] = draw(3 * width, hidden)
        tensors[f"{prefix}attn.out_proj.weight"] = draw(hidden, width)
        tensors[f"{prefix}mlp.fc1.weight"] = draw(2 * ffn, hidden)
        tensors[f"{prefix}mlp.fc2.weight"] = draw(hidden, ffn)
        if prefix.startswith("blocks."):
            tensors[f"{prefix}adaln_proj.linear.weight"] = draw(18 * hidden, 256)
            tensors[f"{prefix}adaln_proj.linear.bias"] = torch.zeros(18 * hidden, dtype=dtype)
    path = folder / "dit-fl2va.safetensors"
    save_file(tensors, path)
    return path


def timed(run: Callable[[], object], device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def step(device: str, dtype: torch.dtype, rows: int, rounds: int, clock: Callable[[], float]) -> None:
    """Print the paired ratios of a step to plain products."""
    with tempfile.TemporaryDirectory() as folder:
        weights = DiTWeights(random_dit(Path(folder), dtype, **MIDDLE))
        c = weights.config
        dit = DiT(weights, Residency(torch.device(device), "none"), dtype)
        side = 2 * round(math.sqrt(rows / 7))
        layout = pack([1] * TEXT_ROWS, LatentSize(7, side, side), 37)
        of_kind = timestep_of_kind(0.3, 0.5, 0.999)
        with torch.inference_mode():
            modulations = dit.modulations(list(of_kind.values()))
            text = dit.refine_text(torch.randn(TEXT_ROWS, c.text_dim))
            video = torch.randn(len(layout.video_indices), 96)
            audio = torch.randn(len(layout.audio_indices), 32)
            rope = dit.rope(layout)

            def forward() -> object:
                return dit.forward(layout, text, video, audio, rope, modulations, of_kind)

            # The peak: the best shape of product this machine has, at the rows of the step.
            x = torch.randn(layout.num_rows, c.hidden_size, device=device, dtype=dtype)
            w = torch.randn(2 * c.ffn_hidden_size, c.hidden_size, device=device, dtype=dtype)
            product_flops = 2.0 * len(x) * w.numel()
            work = costs.dit_forward(c, layout.num_rows)
            forward()
            timed(lambda: functional.linear(x, w), device, clock)
            shares, steps = [], []
            for _ in range(rounds):
                peak = product_flops / min(timed(lambda: functional.linear(x, w), device, clock) for _ in range(3))
                steps.append(timed(forward, device, clock))
                peak = max(
                    peak, product_flops / min(timed(lambda: functional.linear(x, w), device, clock) for _ in range(3))
                )
                shares.append(work.total / steps[-1] / peak)
        peak_tflops = work.total / statistics.median(steps) / statistics.median(shares) / 1e12
        print(
            f"{layout.num_rows} rows, {c.num_layers} blocks of {c.hidden_size} wide, {dtype}, {device}: "
            f"{statistics.median(steps):.3f} s a step, {work.total / 1e12:.3f} TFLOP "
            f"({100 * work.attention / work.total:.0f} % attention), "
            f"{100 * statistics.median(shares):.0f} % of {peak_tflops:.2f} TFLOP/s of plain products "
            f"(lowest {100 * min(shares):.0f} %, highest {100 * max(shares):.0f} %)"
        )


MEMORY_RUN = """
import json, sys, resource
from pathlib import Path
import numpy as np, psutil, torch
from vkit.video.h3.pipeline import VideoPipeline
from vkit.video.h3.request import VideoModelPaths, VideoOptions, VideoRequest
folder, offload, side = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(folder / "e.f32").write_bytes(np.random.default_rng(0).normal(size=(64, 512)).astype("<f4").tobytes())
request = VideoRequest(prompt_embeds=folder / "e.f32", num_frames=22, width=side, height=side, steps=3)
paths = VideoModelPaths(dit=folder / "dit-fl2va.safetensors")
with VideoPipeline.open(paths, VideoOptions(offload=offload)) as pipeline:
    plan = pipeline.plan(request, denoise_only=True)
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")
    result = pipeline.generate(request, folder / f"work-{offload}-{side}", denoise_only=True)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    stage = {stage.name: stage.peak_bytes for stage in plan.stages}["denoise"]
    print(json.dumps({"peak": int(peak.split()[1]) * 1024 - before, "plan": stage}))
"""


def memory() -> None:
    """Print peak memory of whole runs against their plans (Linux: the peak is reset just before the run)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_dit(folder, torch.bfloat16, **MIDDLE)
        for offload in ("none", "disk"):
            for side in (512, 768):
                command = [sys.executable, "-P", "-c", MEMORY_RUN, str(folder), offload, str(side)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                peak, plan = found["peak"] / 1e6, found["plan"] / 1e6
                excess = 100 * (plan / peak - 1)
                print(f"offload {offload}, {side}x{side}: peak {peak:.0f} MB, plan {plan:.0f} MB ({excess:+.0f} %)")


def table(tflops: float, product_share: float, attention_share: float) -> None:
    """Print expected times of the full model on a card, from counted operations."""
    print("| size | frames | rows | PFLOP a step | attention | s a step | 49 steps |")
    print("|---|---|---|---|---|---|---|")
    for width, height, frames in ((960, 544, 124), (1344, 768, 124), (1344, 768, 209), (1344, 768, 345)):
        size = LatentSize(geometry.latent_frames(frames), height // 16, width // 16)
        rows = 128 + 2 * geometry.audio_latents(frames) + size.rows
        work = costs.dit_forward(FULL, rows)
        seconds = work.products / (product_share * tflops * 1e12) + work.attention / (attention_share * tflops * 1e12)
        share = 100 * work.attention / work.total
        minutes = 49 * seconds / 60
        cells = f"{width}x{height} | {frames} | {rows} | {work.total / 1e15:.2f} | {share:.0f} %"
        print(f"| {cells} | {seconds:.1f} | {minutes:.1f} min |")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "memory", "table"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, default=1792)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tflops", type=float, default=989.0, help="dense bfloat16 peak of the card")
    parser.add_argument("--product-share", type=float, default=0.75)
    parser.add_argument("--attention-share", type=float, default=0.6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.what == "step":
        clock = time.process_time if given.clock == "cpu" else time.perf_counter
        step(given.device, getattr(torch, given.dtype), given.rows, given.rounds, clock)
    elif given.what == "memory":
        memory()
    else:
        table(given.tflops, given.product_share, given.attention_share)


if __name__ == "__main__":
    main()
