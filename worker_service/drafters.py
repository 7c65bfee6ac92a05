"""Which drafter a worker uses: its name or directory becomes one, or a clear error. Nothing is drafted here."""

import hashlib
import json
from pathlib import Path
from typing import Any

from worker_service.engine.drafting.drafter import Drafter, FirstOf, NoDrafter
from worker_service.engine.drafting.head import CONFIG, load_head
from worker_service.engine.drafting.head_drafter import HeadDrafter
from worker_service.engine.drafting.model import ModelDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.model_files import ModelError
from worker_service.models import LoadedModel, load

# The draft heads that come with LAPS-SD, each in a directory named like the model that it was made for.
_BUNDLED = Path(__file__).parent / "engine" / "drafting" / "heads"


def make_drafter(name: str, target: LoadedModel, *, blocks: int, block_tokens: int) -> Drafter:
    """`none`, `ngram`, `default`, or the directory of a head or of a causal LM. Raises ModelError.

    `default`: the head that comes with LAPS-SD where there is one for this target, else `ngram`. `blocks` of
    `block_tokens` are the KV memory of a drafter that needs any.
    """
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        return NgramDrafter()
    if name == "default":
        folder = _BUNDLED / target.name
        return _head(folder, target) if (folder / CONFIG).is_file() else NgramDrafter()
    folder = Path(name).expanduser()
    if (folder / CONFIG).is_file():
        return _head(folder, target)
    if not folder.is_dir():
        raise ModelError(f"drafter {name!r} is neither none, ngram nor default, and there is no such directory")
    return _model(folder, target, blocks, block_tokens)


def _head(folder: Path, target: LoadedModel) -> Drafter:
    embeddings, output = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    digest, size = vocabulary_digest(target.tokenizer), embeddings.shape[1]
    try:
        head = load_head(folder)
        if (head.config.vocabulary, head.config.hidden_size) != (digest, size):
            raise ValueError(f"it was made for {head.config.target}, not for {target.name}")
        return with_lookup(HeadDrafter(head, embeddings, output))
    except (OSError, ValueError) as error:
        raise ModelError(f"drafter {folder}: {error}") from error


def with_lookup(drafter: Drafter) -> Drafter:
    """`drafter` behind a lookup of n-grams: where tokens repeat, what followed them is a better guess, and free."""
    return FirstOf(NgramDrafter(longest=6, shortest=2, cautious=True), drafter)


def _model(folder: Path, target: LoadedModel, blocks: int, block_tokens: int) -> Drafter:
    draft = load(str(folder), str(target.device), str(target.dtype).removeprefix("torch."))
    if vocabulary_digest(draft.tokenizer) != vocabulary_digest(target.tokenizer):
        raise ModelError(f"drafter {folder} has another tokenizer than {target.name}: its tokens mean something else")
    return ModelDrafter(draft.model, context_tokens=draft.context_tokens, blocks=blocks, block_tokens=block_tokens)


def vocabulary_digest(tokenizer: Any) -> str:
    """Equal where every token has the same text, however the tokenizer is written down."""
    tokens = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
