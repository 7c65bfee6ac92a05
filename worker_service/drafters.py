"""Which drafter a worker uses: its name or directory becomes one, or a clear error. Nothing is drafted here."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from protos.tls import Tls
from worker_service.draft_post import LinkPost
from worker_service.engine.drafting.blended import Blended
from worker_service.engine.drafting.drafter import USUAL, Drafter, FirstOf, NoDrafter, Price
from worker_service.engine.drafting.eagle import EagleHead, load_eagle
from worker_service.engine.drafting.eagle_drafter import EagleDrafter
from worker_service.engine.drafting.head import CONFIG, load_head
from worker_service.engine.drafting.head_drafter import HeadDrafter
from worker_service.engine.drafting.model import ModelDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.drafting.remote_drafter import RemoteDrafter
from worker_service.engine.drafting.shielded import Shielded
from worker_service.engine.drafting.sparing import Sparing
from worker_service.engine.shape import text_config
from worker_service.model_files import ModelError, at_home, is_eagle
from worker_service.models import LoadedModel, load

# The draft heads that come with LAPS-SD, each in a directory named like the model that it was made for.
_BUNDLED = Path(__file__).parent / "engine" / "drafting" / "heads"
REMOTE = "remote:"


class Caller(NamedTuple):
    """Who calls a drafter elsewhere. `names`: what its certificate must be for, one of them; none: its host."""

    worker_id: str = "worker"
    names: Sequence[str] = ()
    tls: Tls | None = None


def make_drafter(
    name: str,
    target: LoadedModel,
    *,
    blocks: int,
    block_tokens: int,
    attention: str = "auto",
    caller: Caller | None = None,
) -> Drafter:
    """`none`, `ngram`, `default`, the directory of a head, ours or EAGLE-3, or of a causal LM, or `remote:HOST:PORT`,
    also several with commas. Raises ModelError.

    `default`: the head that comes with LAPS-SD where there is one for this target, else `ngram`. `blocks` of
    `block_tokens` are the KV memory of a drafter that needs any; a causal LM's `attention` is of that kind.
    """
    if name.startswith(REMOTE):
        return _remote(name.removeprefix(REMOTE), target, caller or Caller())
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        return NgramDrafter()
    if name == "default":
        folder = _BUNDLED / target.name
        return _head(folder, target) if (folder / CONFIG).is_file() else NgramDrafter()
    folder = at_home(name)
    if (folder / CONFIG).is_file():
        return _head(folder, target)
    if not folder.is_dir():
        raise ModelError(f"drafter {name!r} is neither none, ngram nor default, and there is no such directory")
    if is_eagle(folder):
        return _eagle(folder, target, blocks, block_tokens)
    return _model(folder, target, blocks, block_tokens, attention)


def _head(folder: Path, target: LoadedModel) -> Drafter:
    embeddings, output = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    digest, size = vocabulary_digest(target.tokenizer), embeddings.shape[1]
    try:
        head = load_head(folder)
        if (head.config.vocabulary, head.config.hidden_size) != (digest, size):
            raise ValueError(f"it was made for {head.config.target}, not for {target.name}")
        return with_lookup(Sparing(HeadDrafter(head, embeddings, output)))
    except (OSError, ValueError) as error:
        raise ModelError(f"drafter {folder}: {error}") from error


def _eagle(folder: Path, target: LoadedModel, blocks: int, block_tokens: int) -> Drafter:
    try:
        return with_lookup(Sparing(eagle_drafter(load_eagle(folder), target, blocks=blocks, block_tokens=block_tokens)))
    except (OSError, ValueError) as error:
        raise ModelError(f"drafter {folder}: {error}") from error


def eagle_drafter(
    head: EagleHead, target: LoadedModel, *, blocks: int, block_tokens: int, **options: Price
) -> EagleDrafter:
    """The head on this target. `options`: the price of its drafts, until another is told. Raises ValueError where
    they do not fit together."""
    config, text = head.config, text_config(target.model.config)
    same = config.layer.vocab_size == text.vocab_size
    if not same or config.vocabulary not in (None, vocabulary_digest(target.tokenizer)):
        raise ValueError(f"it was made for another vocabulary than the {text.vocab_size} tokens of {target.name}")
    if config.target_hidden_size != text.hidden_size:
        sizes = f"{config.target_hidden_size} numbers, those of {target.name} have {text.hidden_size}"
        raise ValueError(f"it was made for hidden states of {sizes}")
    layers, count = config.layers_of(text.num_hidden_layers), text.num_hidden_layers
    if list(layers) != sorted(set(layers)) or not all(0 <= layer <= count for layer in layers):
        raise ValueError(f"it reads layers {', '.join(map(str, layers))}, and {target.name} has {count}")
    return EagleDrafter(
        head,
        layers,
        target.model.get_input_embeddings().weight,
        context_tokens=target.context_tokens,
        blocks=blocks,
        block_tokens=block_tokens,
        **options,
    )


def with_lookup(drafter: Drafter) -> Drafter:
    """`drafter` beside a lookup of n-grams: where tokens repeat, what followed them is a good guess, and free."""
    return Blended(NgramDrafter(least=USUAL.least), drafter)


def behind_lookup(drafter: Drafter) -> Drafter:
    """`drafter` for requests in which no two tokens repeat. What followed a single token before is a guess where it has
    none."""
    return FirstOf(NgramDrafter(shortest=2, least=USUAL.least), drafter, NgramDrafter(longest=1, least=USUAL.least))


def _remote(addresses: str, target: LoadedModel, caller: Caller) -> Drafter:
    """Drafts of another process, and of lookups where those are late."""
    post = LinkPost(
        {
            "drafters": addresses.split(","),
            "names": list(caller.names),
            "tls": (caller.tls or Tls()).model_dump(mode="json"),
            "worker_id": caller.worker_id,
            "vocabulary": vocabulary_digest(target.tokenizer),
        }
    )
    return behind_lookup(Shielded(RemoteDrafter(post, os.urandom(32))))


def _model(folder: Path, target: LoadedModel, blocks: int, block_tokens: int, attention: str) -> Drafter:
    draft = load(str(folder), str(target.device), str(target.dtype).removeprefix("torch."))
    if vocabulary_digest(draft.tokenizer) != vocabulary_digest(target.tokenizer):
        raise ModelError(f"drafter {folder} has another tokenizer than {target.name}: its tokens mean something else")
    sizes = {"context_tokens": draft.context_tokens, "blocks": blocks, "block_tokens": block_tokens}
    return ModelDrafter(draft.model, **sizes, attention=attention)


def vocabulary_digest(tokenizer: Any) -> str:
    """Equal where every token has the same text, however the tokenizer is written down."""
    vocabulary = tokenizer.get_vocab()
    tokens = [(token, vocabulary[token]) for token in sorted(vocabulary)]  # strings alone sort four times as fast
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
