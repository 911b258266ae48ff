"""A tiny random Llama with a byte tokenizer, to try the harness where there is no model. Its text means nothing."""

from __future__ import annotations

import json
from pathlib import Path

NUM_BYTES = 256
BOS, EOS = "<s>", "</s>"
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": NUM_BYTES + 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": NUM_BYTES,
    "eos_token_id": NUM_BYTES + 1,
    "torch_dtype": "float32",
}


def write_synthetic(folder: Path, seed: int = 0) -> Path:
    """`folder`, now holding a checkpoint of 0.15 million random weights with config.json and tokenizer.json."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.02, shape).astype(np.float32)
        for name, shape in _shapes().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}), encoding="utf-8"
    )
    _write_tokenizer(folder / "tokenizer.json")
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = 64, 128, NUM_BYTES + 2
    keys = 2 * 16
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.save(str(path))
