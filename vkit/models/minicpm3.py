"""MiniCPM 3: MiniCPM's scaled residuals around latent attention. Source: Hu et al. 2024; OpenBMB 2024."""

from __future__ import annotations

from vkit.layers import DecoderLayer, LatentAttention, PreNormLayer, RotaryEmbedding
from vkit.models.deepseek import latent_scale, latent_shape
from vkit.models.minicpm import MiniCPMForCausalLM


class MiniCPM3ForCausalLM(MiniCPMForCausalLM):
    """Half-split rope on the rotating part of a head."""

    def make_rotary(self) -> None:
        """The rope of the rotating parts."""
        self.shape = latent_shape(self.config)
        self.rotary = RotaryEmbedding(self.config.rope(self.options.max_model_len, head_dim=self.shape.rope_dim))

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        attention = LatentAttention(
            layer,
            self.hidden_size,
            self.shape,
            rotary=self.rotary,
            scale=latent_scale(self.shape, self.rotary.spec),
            bias=self.config.flag("attention_bias", default=False),
        )
        norms = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        return PreNormLayer(attention, self.make_mlp(layer), *norms, residual_multiplier=self.residual_multiplier)
