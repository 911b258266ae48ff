"""The made-up model is a checkpoint that the usual libraries read."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from tokenizers import Tokenizer

from vkit.benchmark.synthetic import write_synthetic


def test_weights_fit_the_config_and_repeat_by_seed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        folder.mkdir()
        assert write_synthetic(folder, seed) == folder
    config = json.loads((folders[0] / "config.json").read_text())
    with safe_open(str(folders[0] / "model.safetensors"), "np") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == [vocab, hidden]
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == [kv_width, hidden]
    assert shapes["model.layers.0.mlp.down_proj.weight"] == [hidden, config["intermediate_size"]]
    assert len(shapes) == 3 + 9 * config["num_hidden_layers"]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again != other


def test_every_byte_is_a_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_synthetic(tmp_path) / "tokenizer.json"))
    text = "héllo wörld 😀\n\x00"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    config = json.loads((tmp_path / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<s>") == config["bos_token_id"]
    assert tokenizer.token_to_id("</s>") == config["eos_token_id"]
