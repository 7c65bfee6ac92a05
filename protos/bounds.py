"""Bounds of settings and answers that the command line and the services share, each declared once. No service is
imported for them, so that `laps-sd up --help` can tell them too."""

from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Interval

Port = Annotated[int, Interval(ge=0, le=65535)]  # 0: any free one
Slots = Annotated[int, Interval(ge=1, le=1024)]
KvTokens = Annotated[int, Ge(192)]  # what a worker's warm-up needs for one request
HostKvTokens = Annotated[int, Ge(0)]
DraftLen = Annotated[int, Interval(ge=0, le=64)]
StepTimeoutS = Annotated[float, Interval(gt=0, le=1_000_000)]  # the watchdog's timer cannot count 1e10
DrainS = Annotated[float, Ge(0)]
Dtype: TypeAlias = Literal["auto", "float32", "bfloat16"]
Weights: TypeAlias = Literal["auto", "int8", "int4", "stored"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

MOST_LISTED = 256  # requests of a page, and tenants in Stats, so that the cost of an answer stays bounded
PAGE = 50  # requests of a page where the caller does not say
