"""What a tenant may have. Plain data; who reads it from a file: scheduler_service/tenants.py."""

from dataclasses import dataclass

from scheduler_service.core.types import RequestClass

EVERYBODY_ELSE = "*"


@dataclass(frozen=True, slots=True)
class Terms:
    """A tenant's share, and how much it may have waiting or running: requests, and tokens that those may need."""

    weight: float = 1.0
    max_requests: float = float("inf")
    max_tokens: float = float("inf")
    best_class: RequestClass = RequestClass.INTERACTIVE  # it may ask for better ones, and is served as this
    local_drafts: bool = False  # no drafter of another process may read its texts
