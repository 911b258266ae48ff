"""Sizes of the diffusion transformer."""

from __future__ import annotations

from dataclasses import dataclass

PATCH_VOLUME = 4
"""Latent pixels per row of the sequence."""


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """Sizes, from the shapes of the tensors; what shapes do not tell, from the configuration or the released values."""

    num_layers: int
    token_refiner_num_layers: int
    hidden_size: int
    num_attention_heads: int
    attention_head_dim: int
    ffn_hidden_size: int
    latents_dim: int
    audio_latents_dim: int
    text_dim: int
    timestep_input_dim: int | None
    """None in the curve form."""
    time_embed_hidden_size: int | None
    time_embed_dim: int
    rope_inv_freq_len: int
    adaln_curve_grid: int | None = None
    """Length of the table of timestep embeddings, in the curve form."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5

    @property
    def attention_width(self) -> int:
        """Width of all heads."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def rope_width(self) -> int:
        """Features of a head that are rotated."""
        return 6 * self.rope_inv_freq_len

    def as_params(self) -> dict[str, int]:
        """The sizes under their published names, for display."""
        return {
            "num_layers": self.num_layers,
            "token_refiner_num_layers": self.token_refiner_num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "attention_head_dim": self.attention_head_dim,
            "ffn_hidden_size": self.ffn_hidden_size,
            "latents_dim": self.latents_dim,
            "audio_latents_dim": self.audio_latents_dim,
            "patch_size_t": 1,
            "patch_size_h": 2,
            "patch_size_w": 2,
            "text_dim": self.text_dim,
            "timestep_input_dim": self.timestep_input_dim or 0,
            "time_embed_hidden_size": self.time_embed_hidden_size or 0,
            "time_embed_dim": self.time_embed_dim,
            "adaln_out_features": 18 * self.hidden_size,
            "final_adaln_out_features": 2 * self.hidden_size,
            "rope_inv_freq_len": self.rope_inv_freq_len,
            "video_row_width": PATCH_VOLUME * self.latents_dim,
            "rope_rot_dim": self.rope_width,
        }
