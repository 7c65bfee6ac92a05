"""A tiny model as `laps-sd pull` makes it of a GGUF, the GGUF, and how weights that cannot be had are refused."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from transformers import AutoModelForCausalLM

from tests.tiny_model import make_tiny_model
from worker_service import own_engine
from worker_service.config import Settings
from worker_service.model_files import ModelError
from worker_service.stored_bits import keep

GGUF = "model.gguf"
# Of each tensor's last word; what is not here is whole. Several kinds meet in one product.
KINDS = {"attn_q": "Q4_1", "attn_k": "Q4_0", "attn_v": "Q8_0", "attn_output": "Q5_0"}
KINDS |= {"ffn_gate": "Q4_1", "ffn_up": "Q5_1", "ffn_down": "Q4_0", "token_embd": "Q8_0"}


def make_converted(folder: Path, *, tied: bool = True) -> Path:
    """A tiny model of a GGUF with weights of several kinds; the GGUF lies beside it."""
    make_tiny_model(folder, tied=tied)
    write_gguf(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    keep(folder / GGUF, model, folder)
    return folder


def write_gguf(folder: Path, without: str = "") -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    writer = gguf.GGUFWriter(folder / GGUF, "llama")
    writer.add_block_count(2)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, weight in model.named_parameters():
        stored = names.get_name(name.removesuffix(".weight"))
        assert stored is not None
        values, heads = weight.detach().numpy(), {"attn_q": 4, "attn_k": 2}.get(stored.split(".")[-1])
        if heads:  # llama.cpp turns neighbours where transformers turns halves
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = KINDS.get(stored.split(".")[-1])
        if stored == without:
            continue
        if kind is None:
            writer.add_tensor(f"{stored}.weight", np.ascontiguousarray(values))
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{stored}.weight", quantize(np.ascontiguousarray(values), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def refused(folder: Path, weights: str, match: str, **more: str) -> None:
    settings = {"device": "cpu", "dtype": "float32", "weights": weights} | more
    with pytest.raises(ModelError, match=match) as found:
        own_engine.load_share(Settings(model=str(folder), **settings), None)
    assert "\n" not in str(found.value)
