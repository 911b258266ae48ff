"""A whole model of random weights in a few megabytes: `python -m vkit.video.h3.tiny DIR`.

Every part and companion file of the released model, in the released spelling, at sizes that run in seconds. What it
renders is noise: nothing was ever trained. It shows that the machinery works.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vkit.video.h3.request import Partition, VideoModelPaths

HIDDEN, HEADS, HEAD_DIM, FFN, LAYERS, REFINERS = 64, 2, 32, 96, 3, 1
LATENTS, AUDIO_LATENTS, TEXT_DIM = 4, 8, 32
TIME_INPUT, TIME_HIDDEN, TIME_DIM, ROPE_FREQS = 32, 48, 24, 4
VISION_DEPTH, VISION_WIDTH, VISION_INNER = 2, 32, 48
SPECIAL_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
NUM_BYTES = 256
VAE_WIDTHS, VAE_SPACE, VAE_TIME, VAE_GROUPS = (4, 8, 8, 16), (2, 2, 2, 2), (1, 2, 2, 1), 4
VAE_HEADS, VAE_HEAD_DIM, VAE_DECODER_LAYERS, VAE_REGISTERS = 2, 24, 1, 4
AUDIO_CONFIG: dict[str, Any] = {
    "encoder_dim": 2,
    "encoder_rates": [2, 4, 4, 5, 5],
    "latent_dim": 32,
    "latent_channels": AUDIO_LATENTS,
    "num_attention_heads": 2,
    "decoder_dim": 32,
    "decoder_rates": [8, 5, 5, 4],
    "decoder_kernel_sizes": [16, 9, 9, 8],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3]],
    "sampling_rate": 32_000,
    "latents_mean": [0.1 * index for index in range(AUDIO_LATENTS)],
    "latents_std": [1.0 + 0.1 * index for index in range(AUDIO_LATENTS)],
}


class _Draw:
    """Random tensors of a size that keeps signals at about their level."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> Tensor:
        """A weight; its inputs are all dimensions but the first."""
        return torch.randn(shape, generator=self._generator) * (gain / math.sqrt(math.prod(shape[1:])))

    def gain(self, size: int) -> Tensor:
        """A norm's weight, about 1."""
        return 1 + 0.1 * torch.randn(size, generator=self._generator)

    def bias(self, *shape: int) -> Tensor:
        """A small bias."""
        return 0.05 * torch.randn(shape, generator=self._generator)


def make_tiny(folder: Path, *, partition: Partition = "fl2va", seed: int = 0) -> VideoModelPaths:
    """Write a model of random weights below `folder`; returns where its parts are."""
    dit, encoder, video, audio = (folder / name for name in ("dit", "encoder", "video_vae", "audio_vae"))
    for place in (dit, encoder, video / "source", audio):
        place.mkdir(parents=True, exist_ok=True)
    _write_dit(dit, partition, _Draw(seed))
    _write_encoder(encoder, _Draw(seed + 1))
    _write_video_vae(video, _Draw(seed + 2))
    _write_audio_vae(audio, _Draw(seed + 3))
    return VideoModelPaths(
        dit=dit, encoder=encoder, tokenizer=encoder / "tokenizer.json", video_vae=video, audio_vae=audio
    )


def dit_tensors(draw: _Draw) -> dict[str, Tensor]:
    """The transformer, in release names with contiguous qkv rows."""
    width = HEADS * HEAD_DIM
    tensors = {
        "video_patch_proj.weight": draw.matrix(HIDDEN, 4 * LATENTS),
        "video_patch_proj.bias": draw.bias(HIDDEN),
        "audio_patch_proj.weight": draw.matrix(HIDDEN, AUDIO_LATENTS),
        "audio_patch_proj.bias": draw.bias(HIDDEN),
        "condition_proj.weight": draw.matrix(HIDDEN, TEXT_DIM),
        "condition_proj.bias": draw.bias(HIDDEN),
        "time_embedder.proj_in.weight": draw.matrix(TIME_HIDDEN, TIME_INPUT),
        "time_embedder.proj_in.bias": draw.bias(TIME_HIDDEN),
        "time_embedder.proj_out.weight": draw.matrix(TIME_DIM, TIME_HIDDEN),
        "time_embedder.proj_out.bias": draw.bias(TIME_DIM),
        "rope.inv_freq": 10000.0 ** (-torch.arange(ROPE_FREQS) / ROPE_FREQS),
        "token_refiner.final_norm.weight": draw.gain(HIDDEN),
        "final_layer.norm.weight": draw.gain(HIDDEN),
        "final_layer.adaln_proj.linear.weight": draw.matrix(2 * HIDDEN, TIME_DIM),
        "final_layer.adaln_proj.linear.bias": draw.bias(2 * HIDDEN),
        "final_layer.video_out.weight": draw.matrix(4 * LATENTS, HIDDEN),
        "final_layer.video_out.bias": draw.bias(4 * LATENTS),
        "final_layer.audio_out.weight": draw.matrix(AUDIO_LATENTS, HIDDEN),
        "final_layer.audio_out.bias": draw.bias(AUDIO_LATENTS),
    }
    prefixes = [f"token_refiner.blocks.{index}." for index in range(REFINERS)]
    prefixes += [f"blocks.{index}." for index in range(LAYERS)]
    for prefix in prefixes:
        tensors |= {
            f"{prefix}norm1.weight": draw.gain(HIDDEN),
            f"{prefix}norm2.weight": draw.gain(HIDDEN),
            f"{prefix}attn.qkv_proj.weight": draw.matrix(3 * width, HIDDEN),
            f"{prefix}attn.q_norm.weight": draw.gain(HEAD_DIM),
            f"{prefix}attn.k_norm.weight": draw.gain(HEAD_DIM),
            f"{prefix}attn.out_proj.weight": draw.matrix(HIDDEN, width),
            f"{prefix}mlp.fc1.weight": draw.matrix(2 * FFN, HIDDEN),
            f"{prefix}mlp.fc2.weight": draw.matrix(HIDDEN, FFN),
        }
        if prefix.startswith("blocks."):
            tensors[f"{prefix}adaln_proj.linear.weight"] = draw.matrix(18 * HIDDEN, TIME_DIM)
            tensors[f"{prefix}adaln_proj.linear.bias"] = draw.bias(18 * HIDDEN)
    return tensors


def _write_dit(folder: Path, partition: Partition, draw: _Draw) -> None:
    """Two shards with an index: so the rows of qkv are grouped by head, as in the release."""
    tensors = dit_tensors(draw)
    for name in [name for name in tensors if name.endswith("qkv_proj.weight")]:
        split = tensors[name].view(3, HEADS, HEAD_DIM, HIDDEN)
        tensors[name] = split.transpose(0, 1).reshape(3 * HEADS * HEAD_DIM, HIDDEN)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    _json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    _json(
        folder / "config.json",
        {
            "hidden_size": HIDDEN,
            "num_layers": LAYERS,
            "token_refiner_num_layers": REFINERS,
            "num_attention_heads": HEADS,
            "attention_head_dim": HEAD_DIM,
            "ffn_hidden_size": FFN,
            "latents_dim": LATENTS,
            "audio_latents_dim": AUDIO_LATENTS,
            "patch_size": [1, 2, 2],
            "text_dim": TEXT_DIM,
            "rope_inv_freq_len": ROPE_FREQS,
        },
    )
    _json(folder / "model_index.json", {"_minimax_h3": {"partition": partition}})


def _write_encoder(folder: Path, draw: _Draw) -> None:
    heads, kv_heads, dim, inner, layers = 2, 1, 16, 48, 2
    vocab = NUM_BYTES + len(SPECIAL_TOKENS)
    base = "model.language_model."
    tensors = {f"{base}embed_tokens.weight": torch.randn(vocab, TEXT_DIM, generator=torch.Generator().manual_seed(9))}
    for index in range(layers):
        prefix = f"{base}layers.{index}."
        tensors |= {
            f"{prefix}input_layernorm.weight": draw.gain(TEXT_DIM),
            f"{prefix}post_attention_layernorm.weight": draw.gain(TEXT_DIM),
            f"{prefix}self_attn.q_proj.weight": draw.matrix(heads * dim, TEXT_DIM),
            f"{prefix}self_attn.k_proj.weight": draw.matrix(kv_heads * dim, TEXT_DIM),
            f"{prefix}self_attn.v_proj.weight": draw.matrix(kv_heads * dim, TEXT_DIM),
            f"{prefix}self_attn.o_proj.weight": draw.matrix(TEXT_DIM, heads * dim),
            f"{prefix}self_attn.q_norm.weight": draw.gain(dim),
            f"{prefix}self_attn.k_norm.weight": draw.gain(dim),
            f"{prefix}mlp.gate_proj.weight": draw.matrix(inner, TEXT_DIM),
            f"{prefix}mlp.up_proj.weight": draw.matrix(inner, TEXT_DIM),
            f"{prefix}mlp.down_proj.weight": draw.matrix(TEXT_DIM, inner),
        }
    vision = {
        "depth": VISION_DEPTH,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": VISION_INNER,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": TEXT_DIM,
        "deepstack_visual_indexes": [0],
        "hidden_act": "gelu_pytorch_tanh",
    }
    tensors |= {f"model.visual.{name}": tensor for name, tensor in _vision_tensors(draw).items()}
    save_file(tensors, folder / "model.safetensors")
    ids = {token: NUM_BYTES + index for index, token in enumerate(SPECIAL_TOKENS)}
    _json(
        folder / "config.json",
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": {
                "rms_norm_eps": 1e-6,
                "rope_theta": 5e6,
                "rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
            },
            "vision_config": vision,
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
        },
    )
    _write_tokenizer(folder / "tokenizer.json")


def _vision_tensors(draw: _Draw) -> dict[str, Tensor]:
    width, merged = VISION_WIDTH, 4 * VISION_WIDTH
    tensors = {
        "patch_embed.proj.weight": draw.matrix(width, 3, 2, 16, 16),
        "patch_embed.proj.bias": draw.bias(width),
        "pos_embed.weight": draw.matrix(16, width),
    }

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw.gain(size), draw.bias(size)

    def linear(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw.matrix(rows, columns), draw.bias(rows)

    for index in range(VISION_DEPTH):
        norm(f"blocks.{index}.norm1", width)
        norm(f"blocks.{index}.norm2", width)
        linear(f"blocks.{index}.attn.qkv", 3 * width, width)
        linear(f"blocks.{index}.attn.proj", width, width)
        linear(f"blocks.{index}.mlp.linear_fc1", VISION_INNER, width)
        linear(f"blocks.{index}.mlp.linear_fc2", width, VISION_INNER)
    for name, size in (("merger", width), ("deepstack_merger_list.0", merged)):
        norm(f"{name}.norm", size)
        linear(f"{name}.linear_fc1", merged, merged)
        linear(f"{name}.linear_fc2", TEXT_DIM, merged)
    return tensors


def _write_tokenizer(path: Path) -> None:
    """One token per byte, and the special ones after them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path))


def _write_video_vae(folder: Path, draw: _Draw) -> None:
    width = VAE_HEADS * VAE_HEAD_DIM
    ratio = math.prod(VAE_SPACE)
    tensors: dict[str, Tensor] = {
        "decoder.register_tokens": draw.bias(1, VAE_REGISTERS, width),
        "decoder.mask_token": torch.zeros(1, 1, width),
    }

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw.gain(size), draw.bias(size)

    def layer(name: str, *shape: int, gain: float = 1.0) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw.matrix(*shape, gain=gain), draw.bias(shape[0])

    layer("encoder.conv_in", VAE_WIDTHS[0], 3, 3, 3, 3)
    before = VAE_WIDTHS[0]
    for level, size in enumerate(VAE_WIDTHS):
        name = f"encoder.down.{level}"
        norm(f"{name}.block.0.norm1", before)
        norm(f"{name}.block.0.norm2", size)
        layer(f"{name}.block.0.conv1", size, before, 3, 3, 3)
        if size != before:
            layer(f"{name}.block.0.nin_shortcut", size, before, 1, 1, 1)
        before = size
        layer(f"{name}.block.0.conv2", size, size, 3, 3, 3)
        layer(f"{name}.downsample.conv", size, size, 3, 3, 3)
    norm("encoder.norm_out", VAE_WIDTHS[-1])
    layer("encoder.conv_out", 2 * LATENTS, VAE_WIDTHS[-1], 3, 3, 3)
    layer("quant_conv", 2 * LATENTS, 2 * LATENTS, 1, 1, 1)
    layer("post_quant_conv", LATENTS, LATENTS, 1, 1, 1)
    layer("decoder.x_embedder", width, LATENTS)
    for index in range(VAE_DECODER_LAYERS):
        name = f"decoder.transformer_blocks.{index}"
        tensors[f"{name}.norm1.weight"], tensors[f"{name}.norm2.weight"] = draw.gain(width), draw.gain(width)
        tensors[f"{name}.scale1"], tensors[f"{name}.scale2"] = draw.gain(width), draw.gain(width)
        layer(f"{name}.attn.to_qkv", 3 * width, width)
        layer(f"{name}.attn.to_out", width, width)
        layer(f"{name}.ff.w1", 8 * width, width)
        layer(f"{name}.ff.w2", width, 4 * width)
    norm("decoder.norm_out", width)
    layer("decoder.proj_out", 3 * 4 * ratio**2, width, gain=0.7)
    save_file(tensors, folder / "source" / "model.safetensors")
    _json(
        folder / "config.json",
        {
            "source_path": "source",
            "source_safetensors_path": "model.safetensors",
            "vae_clip_length": 17,
            "vae_token_drop": 3,
            "vae_encoder_tiling": 1,
            "vae_decoder_tiling": 1,
            "vae_tile_size": 256,
            "vae_tile_overlap_min": 64,
            "latent_channels": LATENTS,
            "latents_mean": [0.1, -0.2, 0.3, 0.0],
            "latents_std": [1.0, 1.2, 0.9, 1.1],
        },
    )
    _json(
        folder / "source" / "config.json",
        {
            "ch": VAE_WIDTHS[0],
            "ch_mult": [size // VAE_WIDTHS[0] for size in VAE_WIDTHS],
            "z_channels": LATENTS,
            "num_res_blocks": 1,
            "norm_num_groups": VAE_GROUPS,
            "space_down": list(VAE_SPACE),
            "time_down": list(VAE_TIME),
            "vae_ratio": ratio,
            "vae_ratio_t": 4,
            "vit_decoder_kwargs": {
                "heads": VAE_HEADS,
                "dim_head": VAE_HEAD_DIM,
                "num_layers": VAE_DECODER_LAYERS,
                "rope_theta": 100.0,
                "rope_dim_ratio": 0.75,
            },
        },
    )


def _write_audio_vae(folder: Path, draw: _Draw) -> None:
    c = AUDIO_CONFIG
    tensors: dict[str, Tensor] = {}

    def conv(name: str, *shape: int, num_out: int | None = None, gain: float = 1.0) -> None:
        """A weight-normalised convolution; `num_out` where the first dimension is not the output's."""
        weight = draw.matrix(*shape, gain=gain)
        tensors[f"{name}.weight_g"] = weight.flatten(1).norm(dim=1).view(-1, 1, 1)
        tensors[f"{name}.weight_v"] = weight
        tensors[f"{name}.bias"] = draw.bias(shape[0] if num_out is None else num_out)

    def plain(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw.matrix(*shape), draw.bias(shape[0])

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw.gain(size), draw.bias(size)

    width, latent = c["encoder_dim"], c["latent_dim"]
    conv("encoder.block.0", width, 1, 7)
    for level, rate in enumerate(c["encoder_rates"], start=1):
        for unit in range(3):
            name = f"encoder.block.{level}.block.{unit}.block"
            tensors[f"{name}.0.alpha"], tensors[f"{name}.2.alpha"] = torch.ones(1, width, 1), torch.ones(1, width, 1)
            conv(f"{name}.1", width, width, 7, gain=0.5)
            conv(f"{name}.3", width, width, 1, gain=0.5)
        tensors[f"encoder.block.{level}.block.3.alpha"] = torch.ones(1, width, 1)
        conv(f"encoder.block.{level}.block.4", 2 * width, width, 2 * rate)
        width *= 2
    last = len(c["encoder_rates"]) + 1
    tensors[f"encoder.block.{last}.alpha"] = torch.ones(1, width, 1)
    conv(f"encoder.block.{last + 1}", latent, width, 3)
    norm("pre_block.norm1", latent)
    norm("pre_block.norm3", latent)
    norm("pre_block.norm2", AUDIO_LATENTS)
    norm("pre_block.mlp.norm", AUDIO_LATENTS)
    plain("pre_block.proj", AUDIO_LATENTS, latent)
    tensors["pre_block.attn.qkv.weight"] = draw.matrix(3 * latent, latent)
    for name in ("q_bias", "v_bias"):
        tensors[f"pre_block.attn.{name}"] = draw.bias(latent)
    tensors["pre_block.attn.zero_k_bias"] = torch.zeros(latent)
    plain("pre_block.attn.proj", AUDIO_LATENTS, AUDIO_LATENTS)
    plain("pre_block.mlp.w0", 2 * AUDIO_LATENTS, AUDIO_LATENTS)
    plain("pre_block.mlp.w1", 2 * AUDIO_LATENTS, AUDIO_LATENTS)
    plain("pre_block.mlp.w2", AUDIO_LATENTS, 2 * AUDIO_LATENTS)
    plain("mean_proj", AUDIO_LATENTS, AUDIO_LATENTS, 1)
    plain("logs_proj", AUDIO_LATENTS, AUDIO_LATENTS, 1)
    plain("dec_in_proj", latent, AUDIO_LATENTS, 1)
    width = c["decoder_dim"]
    conv("decoder.conv_pre", width, latent, 7)

    def activation(name: str, size: int) -> None:
        tensors[f"{name}.act.alpha"], tensors[f"{name}.act.beta"] = torch.zeros(size), torch.zeros(size)

    for stage, kernel in enumerate(c["decoder_kernel_sizes"]):
        conv(f"decoder.ups.{stage}.0", width, width // 2, kernel, num_out=width // 2)
        width //= 2
        size = c["resblock_kernel_sizes"][0]
        for position in range(len(c["resblock_dilation_sizes"][0])):
            conv(f"decoder.resblocks.{stage}.convs1.{position}", width, width, size, gain=0.5)
            conv(f"decoder.resblocks.{stage}.convs2.{position}", width, width, size, gain=0.5)
            activation(f"decoder.resblocks.{stage}.activations.{2 * position}", width)
            activation(f"decoder.resblocks.{stage}.activations.{2 * position + 1}", width)
    activation("decoder.activation_post", width)
    conv("decoder.conv_post", 1, width, 7, gain=0.5)
    tensors.pop("decoder.conv_post.bias")
    save_file(tensors, folder / "model.safetensors")
    _json(folder / "config.json", c)


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Write the model into the folder named by the one argument (and its partition, if a second one says so)."""
    if not 1 <= len(arguments) <= 2 or arguments[0].startswith("-") or arguments[1:] not in ([], ["fl2va"], ["ref2va"]):
        print("usage: python -m vkit.video.h3.tiny DIR [fl2va|ref2va]", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    partition: Partition = "ref2va" if arguments[1:] == ["ref2va"] else "fl2va"
    paths = make_tiny(folder, partition=partition)
    print(f"--dit {paths.dit} --encoder {paths.encoder} --video-vae {paths.video_vae} --audio-vae {paths.audio_vae}")
    print(f"a random model of partition {partition}: what it renders is noise", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
