"""All settings, in `--additional-config '{"laps_sd": {...}}'`, refused in one sentence if wrong. Nothing of
vLLM is imported here, and nothing is read from the environment."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, field_validator, model_validator

from laps_sd_vllm.versions import Unsupported
from scheduler_service.core.policies import Policy, make_policy

KEY = "laps_sd"


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["observe", "order"] = Field(
        "observe", description="observe: vLLM's own order, and what others would do"
    )
    policy: str = Field("default", description="as `laps-sd up --policy`")
    policy_set: tuple[str, ...] = Field((), description="name=value, as often as needed")
    slots: StrictInt | None = Field(
        None,
        ge=1,
        le=65_536,
        description="requests that run at a time; null: --max-num-seqs, on the V2 runner 3/4 of it",
    )
    draft_len: Literal["all", "auto"] | int = Field(
        "all", description="drafts verified a round: all that the drafter makes, as many as pay, or at most so many"
    )
    predictor: Literal["online", "none"] = Field("online", description="of output lengths and acceptance")
    learned: Path | Literal[False] | None = Field(
        None, description="file of what was learned, one a data-parallel rank; null: in vLLM's cache; false: none"
    )
    compare: bool = Field(True, description="simulate other policies on the requests of the last ten minutes")
    compare_every_s: float = Field(60.0, ge=1, le=86_400, description="at most so often")
    plan_limit_ms: float = Field(5.0, gt=0, le=1000, description="three plans in a row beyond it: stock order for good")

    @field_validator("learned")
    @classmethod
    def _learned_is_a_file(cls, learned: Path | Literal[False] | None) -> Path | Literal[False] | None:
        if not learned:
            return learned
        try:
            file = learned.expanduser()
        except RuntimeError as error:  # ~somebody who is not known here
            raise ValueError(str(error)) from None
        if file.is_dir():
            raise ValueError("this is a folder")
        return file

    @field_validator("draft_len", mode="before")
    @classmethod
    def _draft_len_is_a_number_or_a_word(cls, told: object) -> object:
        if told in ("all", "auto") or (type(told) is int and 0 <= told <= 64):
            return told
        raise ValueError("must be all, auto or a number from 0 to 64")

    @model_validator(mode="after")
    def _policy_exists(self) -> "Settings":
        self.make_policy()
        return self

    def make_policy(self) -> Policy:
        return make_policy(self.policy, self.policy_set)


def read(additional_config: Any) -> Settings:
    """Raises Unsupported, in one sentence that names the key."""
    given = additional_config if isinstance(additional_config, dict) else {}
    wrong = next((key for key in given if get_close_matches(str(key).lower(), [KEY], 1, 0.8)), None)
    if wrong is not None and KEY not in given:
        raise Unsupported(f"{wrong!r} in --additional-config is nobody's; did you mean {KEY!r}?")
    asked = given.get(KEY, {})
    if not isinstance(asked, dict):
        raise Unsupported(f"{KEY} must be an object of settings, not {asked!r}")
    try:
        return Settings.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:1])
        if first["type"] == "extra_forbidden":
            known = ", ".join(Settings.model_fields)
            raise Unsupported(f"{KEY}.{name} is not a setting; known: {known}") from None
        if not name:
            raise Unsupported(f"{KEY}: {first['msg'].removeprefix('Value error, ')}") from None
        problem = first["msg"].removeprefix("Value error, ")
        raise Unsupported(f"{KEY}.{name}: {problem}, not {asked.get(name)!r}") from None
