"""`python -m protos.health HOST:PORT [SERVICE]`: exit status 0 if grpc.health.v1 says SERVING. For container checks.

With LAPS_SD_TLS_CA, _CERT and _KEY in the environment it uses mutual TLS, except for http://HOST:PORT.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.tls import Tls

TIMEOUT_S = 5.0
PLAINTEXT = "http://"


def is_serving(target: str, service: str = "") -> bool:
    """Whether the server says that `service` is ready. False if it cannot be reached or does not know the service."""
    credentials = None if target.startswith(PLAINTEXT) else Tls().channel_credentials()
    target = target.removeprefix(PLAINTEXT)
    with grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m protos.health HOST:PORT [SERVICE]")
    sys.exit(0 if is_serving(*sys.argv[1:]) else 1)
