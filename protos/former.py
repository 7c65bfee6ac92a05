"""Answers calls of version 1 of the links, which the scheduler no longer serves, with a sentence. Nothing else."""

import time
from math import inf
from typing import Any

import grpc
import structlog

from protos import version
from protos.errors import Incompatible
from protos.serving import abort

LOG_EVERY_S = 60.0  # a worker or gateway of version 1 calls several times a second, for ever
_PEERS = {"/laps_sd.v1.WorkerLink/": "worker", "/laps_sd.v1.GatewayLink/": "gateway"}


class FormerLinks(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc is not typed
    """Both links as version 1 called them. For `Server.grpc.add_generic_rpc_handlers`."""

    def __init__(self) -> None:
        self._logged_at = dict.fromkeys(_PEERS.values(), -inf)

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        for path, peer in _PEERS.items():
            if details.method.startswith(path):
                return grpc.stream_stream_rpc_method_handler(self._refusal(peer))
        return None

    def _refusal(self, peer: str) -> Any:
        async def refuse(requests: Any, context: Any) -> None:
            try:
                version.agree(1, 1, peer)
            except Incompatible as error:
                if (now := time.monotonic()) - self._logged_at[peer] >= LOG_EVERY_S:
                    self._logged_at[peer] = now
                    structlog.get_logger().warning(f"{peer}_refused", reason=error.message)
                await abort(context, error)

        return refuse
