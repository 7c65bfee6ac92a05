"""Whose a work folder is: what lies there was made of one target, by answers of one kind. Nothing is generated here."""

import json
from argparse import Namespace

from worker_service.model_files import ModelError
from worker_service.models import LoadedModel


def claim(options: Namespace, target: LoadedModel) -> None:
    """Make the work folder, or go on in it. Raises ModelError if what it holds was made of another model or of other
    answers."""
    about = {
        "target": target.fingerprint,
        "max_tokens": options.max_tokens,
        "max_prompt_tokens": options.max_prompt_tokens,
        "temperature": options.temperature,
    }
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / "about.json"
    try:
        known = json.loads(file.read_text())
    except FileNotFoundError:
        file.write_text(json.dumps(about, indent=1) + "\n")
        return
    except ValueError:
        known = {}
    if other := [name for name, value in about.items() if known.get(name) != value]:
        told = f"{options.work} holds samples of another {' and '.join(other)}"
        raise ModelError(f"{told}; give --work another folder, or remove this one")
