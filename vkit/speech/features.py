"""Log-mel features as Parakeet was trained on.

Source: Slaney, Auditory Toolbox, 1998 (mel scale and area norm); NVIDIA NeMo's feature extractor settings.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE_RATE = 16000
FFT_SIZE = 512
WINDOW = 400
HOP = 160
PREEMPHASIS = 0.97
LOG_FLOOR = 2.0**-24
STD_FLOOR = 1e-5


class MelFeatures:
    """Waveforms to features, normalised over each waveform."""

    def __init__(self, num_mels: int, device: torch.device) -> None:
        window = torch.hann_window(WINDOW, periodic=False, dtype=torch.float64)
        margin = (FFT_SIZE - WINDOW) // 2
        self._window = torch.nn.functional.pad(window, (margin, margin)).to(device, torch.float32)
        self._filters = mel_filters(num_mels).to(device, torch.float32)
        self._device = device

    def __call__(self, samples: Tensor) -> Tensor:
        """Samples (N,) at 16 kHz -> features (N // 160, mels) float32, mean 0 and deviation 1 per mel bin."""
        x = samples.to(self._device, torch.float32)
        x = torch.cat([x[:1], x[1:] - PREEMPHASIS * x[:-1]])
        frames = torch.nn.functional.pad(x, (FFT_SIZE // 2, FFT_SIZE // 2)).unfold(0, FFT_SIZE, HOP)
        power = torch.fft.rfft(frames * self._window).abs().square()
        mels = torch.log(power @ self._filters + LOG_FLOOR)[: len(samples) // HOP]
        mean, std = mels.mean(0), mels.std(0, unbiased=True)
        return (mels - mean) / (std + STD_FLOOR)


def mel_filters(num_mels: int) -> Tensor:
    """Triangles (257, mels) float64 from power spectrum to mel bins, of equal area."""
    points = _to_hertz(torch.linspace(0.0, _to_mel(SAMPLE_RATE / 2), num_mels + 2, dtype=torch.float64))
    bins = torch.arange(FFT_SIZE // 2 + 1, dtype=torch.float64) * (SAMPLE_RATE / FFT_SIZE)
    low, peak, high = points[:-2], points[1:-1], points[2:]
    rising = (bins[:, None] - low) / (peak - low)
    falling = (high - bins[:, None]) / (high - peak)
    return torch.minimum(rising, falling).clamp(min=0.0) * (2.0 / (high - low))


def _to_mel(hertz: float) -> float:
    if hertz < 1000.0:
        return 3.0 * hertz / 200.0
    return 15.0 + 27.0 * math.log(hertz / 1000.0) / math.log(6.4)


def _to_hertz(mels: Tensor) -> Tensor:
    return torch.where(mels < 15.0, mels * (200.0 / 3.0), 1000.0 * torch.exp((mels - 15.0) * (math.log(6.4) / 27.0)))
