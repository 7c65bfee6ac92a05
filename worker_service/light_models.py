"""Plain models of the Llama family, read without the transformers library: their configuration, tokenizer and weights.
Whatever in their files is not known here has models.py load them, which also says what is wrong with them.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from worker_service.engine import native
from worker_service.engine.few_bits import Groups
from worker_service.engine.llama import SIZES, Llama, LlamaConfig, plain_config
from worker_service.engine.packed import Packed, PackedLinear
from worker_service.model_files import CONFIG, TOKENIZER, ModelError, end_ids, loaded_files
from worker_service.stored_bits import kept

_log = logging.getLogger(__name__)

# What a configuration may say beside its sizes: these values, or anything where it changes nothing that is computed.
_ONLY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "rope_scaling": None, "rope_interleaved": False, "pretraining_tp": 1,
}  # fmt: skip
_ANY = {
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters", "tie_word_embeddings",
    "eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id", "dtype", "torch_dtype", "attention_dropout",
    "initializer_range", "is_llama_config", "transformers_version", "transformers.js_config", "use_cache",
    "_name_or_path", "_model_name_or_path",
}  # fmt: skip
# Of a tokenizer: transformers takes tokenizer.json of these classes as it is, if no more is said than this.
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_SAID = {"tokenizer_class", "backend", "is_local", "local_files_only", "model_max_length",
         "clean_up_tokenization_spaces", *_SPECIAL}  # fmt: skip


class LightTokenizer:
    """A tokenizer of the tokenizers library, with what the service asks of one of transformers."""

    is_fast = True

    def __init__(self, backend: Tokenizer, special: dict[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer, self.special_tokens_map, self.chat_template = backend, special, chat_template

    @property
    def eos_token_id(self) -> int | None:
        token: int | None = self.backend_tokenizer.token_to_id(self.special_tokens_map.get("eos_token", ""))
        return token

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary


def light_config(folder: Path) -> LlamaConfig | None:
    """None: it is no plain model of the Llama family."""
    said = _read(folder / CONFIG)
    if not _ONLY.items() >= {name: value for name, value in said.items() if name not in {*_ANY, *SIZES}}.items():
        return None
    return plain_config(said) if "model_type" in said else None


def light_tokenizer(folder: Path) -> LightTokenizer | None:
    """None: only transformers knows what it makes of its files."""
    said, template = _read(folder / "tokenizer_config.json"), folder / "chat_template.jinja"
    if said.get("tokenizer_class") not in _CLASSES or not set(said) <= _SAID:
        return None
    special = {name: said[name] for name in _SPECIAL if name in said}
    if not all(isinstance(token, str) for token in special.values()) or (folder / "special_tokens_map.json").exists():
        return None
    try:
        backend = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception:  # the library raises nothing more exact
        return None
    added = {each.content for each in backend.get_added_tokens_decoder().values()}
    if not added.issuperset(special.values()) or (folder / "added_tokens.json").exists():  # transformers would add them
        return None
    try:
        return LightTokenizer(backend, special, template.read_text("utf-8") if template.is_file() else None)
    except ValueError:
        return None


def light_weights(folder: Path, config: LlamaConfig, dtype: torch.dtype, weights: str = "auto") -> Llama | None:
    """The model on the CPU, in eval mode. None: its weights are not what the configuration says.

    Weights of few bits that were kept (stored_bits.py) take the place of those that they stand for: each pass has less
    to read. In float32 no bit of a result changes; in bfloat16 these weights are not rounded. Only where whole ones are
    multiplied in tiles, which is faster, has `weights` to say stored.
    """
    model = Llama(config)
    try:
        found = dict(_tensors(folder, set(model.state_dict())))  # mapped into memory, not read yet
        head = found.pop("lm_head.weight", None) if config.tie_word_embeddings else None
        if head is not None and not torch.equal(head, found["model.embed_tokens.weight"]):
            return None  # transformers does not tie them then
        kinds = {found[name].dtype for name in found.keys() & model.matrices}
        if len(kinds) > 1 or torch.float16 in kinds:  # its own pass computes in the type of the file
            return None
        for name in found.keys() - model.matrices:
            found[name] = found[name].to(dtype, copy=True)
        if config.tie_word_embeddings:
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        model.load_state_dict(found, assign=True)
        few = kept(folder) if weights == "stored" or few_bits_pay(dtype) else {}
        if dtype != torch.float32 and not model.matrices <= few.keys():  # whole ones have the type of the file
            few = {}
        if weights == "stored" and not few:
            return None
        _make_small(model, few, dtype)
    except ModelError as error:
        _log.warning("weights are read by transformers: %s", error)
        return None
    except (OSError, SafetensorError, RuntimeError, KeyError):
        return None
    return model.requires_grad_(False).eval()


def few_bits_pay(dtype: torch.dtype) -> bool:
    """Whether the native decoder's passes with weights of few bits are faster on this processor."""
    return dtype == torch.float32 or not native.has_tiles()


def _make_small(model: Llama, few: Mapping[str, Callable[[], Groups]], dtype: torch.dtype) -> None:
    """Embeddings stay as they are: few of their rows are read."""
    for name in model.matrices | {"lm_head.weight"}:
        tied = name == "lm_head.weight" and model.config.tie_word_embeddings
        if (read := few.get("model.embed_tokens.weight" if tied else name)) is None:
            continue
        layer, groups = name.removesuffix(".weight"), read()
        n, k = groups.numbers.shape
        like = torch.nn.Linear(k, n, bias=False, dtype=dtype, device="meta")
        if model.get_submodule(layer).weight.shape != like.weight.shape:
            raise KeyError(name)
        model.set_submodule(layer, PackedLinear(like, Packed(groups)))


def eos_ids(folder: Path, config: LlamaConfig, tokenizer: LightTokenizer) -> frozenset[int]:
    """The ids that end an output. Raises ModelError."""
    generation = _read(folder / "generation_config.json").get("eos_token_id")
    return end_ids((generation, config.eos_token_id, tokenizer.eos_token_id), config.vocab_size)


def _tensors(folder: Path, wanted: set[str]) -> Iterator[tuple[str, Any]]:
    for file in loaded_files(folder):
        with safe_open(file, "pt") as opened:
            for name in wanted.intersection(opened.keys()):
                yield name, opened.get_tensor(name)


def _read(file: Path) -> dict[str, Any]:
    """Empty where there is no such file, or no table in it."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
