"""Which probe a worker uses: its name or directory becomes one, or a clear error. Nothing is read here."""

from pathlib import Path

from worker_service.engine.length_head import CONFIG, LengthHead, LengthProbe, load_length_head
from worker_service.engine.shape import text_config
from worker_service.model_files import ModelError, at_home
from worker_service.models import LoadedModel

# The probes that come with LAPS-SD, each in a directory named like the model that it was made for.
_BUNDLED = Path(__file__).parent / "engine" / "length_heads"


def find_head(name: str, target: LoadedModel) -> LengthHead | None:
    """Of the probe `none`, `default`, or in a directory. Raises ModelError.

    `default`: the probe that comes with LAPS-SD where there is one for this very target, else none.
    """
    if name == "none":
        return None
    folder = _BUNDLED / target.name if name == "default" else at_home(name)
    if name == "default" and not (folder / CONFIG).is_file():
        return None
    try:
        head = load_length_head(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"probe {folder}: {error}") from error
    if head.config.fingerprint != target.fingerprint:
        if name == "default":
            return None
        raise ModelError(f"probe {folder}: it was made for {head.config.target}, and these are not its weights")
    if head.config.hidden_size != (size := text_config(target.model.config).hidden_size):
        sizes = f"{head.config.hidden_size} numbers, those of {target.name} have {size}"
        raise ModelError(f"probe {folder}: it reads hidden states of {sizes}")
    return head


def make_probe(name: str, target: LoadedModel) -> LengthProbe | None:
    """As `find_head`, on the target's device."""
    head = find_head(name, target)
    return LengthProbe(head, target.device) if head else None
