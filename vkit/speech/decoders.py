"""From the encoder's vectors to tokens and the frames they were heard at: CTC, RNN-T and TDT, greedily.

Source: Graves et al. 2006 (CTC); Graves 2012 (RNN-T); Xu et al. 2023 (TDT).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from vkit.models.hf_config import HFConfig


@dataclass(slots=True)
class Heard:
    """Tokens of one recording, and the encoder frame of each."""

    token_ids: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)

    def add(self, token_id: int, frame: int) -> None:
        """One more token."""
        self.token_ids.append(token_id)
        self.frames.append(frame)


class Decoder(Protocol):
    """What turns encoder vectors into tokens."""

    def decode(self, encoded: Tensor) -> Heard:
        """Encoder vectors (T, H) of one recording -> its tokens."""


class CTCHead(nn.Module):
    """One token or blank per frame; equal neighbours are one token."""

    def __init__(self, config: HFConfig, hidden_size: int) -> None:
        super().__init__()
        self.ctc_head = nn.Conv1d(hidden_size, config.integer("vocab_size"), 1)
        self._blank = config.integer("pad_token_id")

    def logits(self, encoded: Tensor) -> Tensor:
        """(T, H) -> (T, V)."""
        scores: Tensor = self.ctc_head(encoded.t()[None])[0].t()
        return scores

    def decode(self, encoded: Tensor) -> Heard:
        """Tokens of one recording."""
        heard, before = Heard(), self._blank
        for frame, token_id in enumerate(self.logits(encoded).argmax(-1).tolist()):
            if token_id not in (before, self._blank):
                heard.add(token_id, frame)
            before = token_id
        return heard


State = tuple[Tensor, Tensor]


class Predictor(nn.Module):
    """A language model over the tokens heard so far."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        width, num_layers = config.integer("decoder_hidden_size"), config.integer("num_decoder_layers")
        self.embedding = nn.Embedding(config.integer("vocab_size"), width)
        self.lstm = nn.LSTM(width, width, num_layers)
        self.decoder_projector = nn.Linear(width, width)

    def step(self, token_id: int, state: State | None) -> tuple[Tensor, State]:
        """After one more token: its projection (D,), and the state. None is the state of nothing heard."""
        row = self.embedding.weight[token_id][None]
        y, after = self.lstm(row, state)
        return self.decoder_projector(y)[0], after


class Joint(nn.Module):
    """Scores of encoder and predictor together."""

    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, num_outputs)

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """(..., D) and (..., D) -> (..., outputs)."""
        scores: Tensor = self.head(torch.relu(encoded + predicted))
        return scores


class Transducer(nn.Module):
    """RNN-T, and TDT where the configuration has durations: scores after the vocabulary say how far to go on."""

    def __init__(self, config: HFConfig, hidden_size: int, durations: tuple[int, ...] = ()) -> None:
        super().__init__()
        width = config.integer("decoder_hidden_size")
        self._vocab_size = config.integer("vocab_size")
        self._blank = config.integer("blank_token_id")
        self._durations = durations
        self._max_symbols = config.integer("max_symbols_per_step", default=10)
        self.encoder_projector = nn.Linear(hidden_size, width)
        self.decoder = Predictor(config)
        self.joint = Joint(width, self._vocab_size + len(durations))

    def decode(self, encoded: Tensor) -> Heard:
        """Tokens of one recording."""
        heard, frame, num_here = Heard(), 0, 0
        projected = self.encoder_projector(encoded)
        predicted, state = self.decoder.step(self._blank, None)
        while frame < len(projected):
            scores = self.joint(projected[frame], predicted)
            token_id = int(scores[: self._vocab_size].argmax())
            is_blank = token_id == self._blank
            if not is_blank:
                heard.add(token_id, frame)
                predicted, state = self.decoder.step(token_id, state)
                num_here += 1
            advance = self._advance(scores, is_blank, num_here)
            if advance:
                frame, num_here = frame + advance, 0
        return heard

    def _advance(self, scores: Tensor, is_blank: bool, num_here: int) -> int:
        """Frames to go on by. A blank always goes on, and so do too many tokens at one frame."""
        at_least = 1 if is_blank or num_here >= self._max_symbols else 0
        if not self._durations:
            return at_least
        return max(self._durations[int(scores[self._vocab_size :].argmax())], at_least)
