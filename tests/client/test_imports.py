"""People who only call a service load the client, gRPC and protobuf, and nothing that the services need."""

import json
import subprocess
import sys

NEEDED = {"laps_sd", "protos", "grpc", "grpc_status", "google"}
BY_GRPC = {
    "grpc_health",
    "grpc_reflection",
    "grpc_tools",
    "cython_runtime",
    "typing_extensions",
}  # where they are installed
ASKED = """
import json, sys
before = set(sys.modules)
import laps_sd
from laps_sd import AsyncClient, Client
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
wire = [name for name in sys.modules if name.startswith("protos")]
print(json.dumps([sorted(loaded - set(sys.stdlib_module_names)), wire]))
"""


def test_the_client_loads_nothing_of_the_services() -> None:
    said = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=100, check=True).stdout
    loaded, of_the_wire = json.loads(said)
    assert {name for name in loaded if not name.startswith("_")} <= NEEDED | BY_GRPC
    assert set(of_the_wire) == {
        "protos",
        "protos.channels",
        "protos.errors",
        "protos.times",
        "protos.v1",
        "protos.v1.inference_pb2",
        "protos.v1.inference_pb2_grpc",
        "protos.v1.status_pb2",
        "protos.v1.types_pb2",
    }


def test_the_package_alone_loads_no_grpc() -> None:
    asked = "import sys, laps_sd; print('grpc' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=100, check=True).stdout
    assert said == "False\n"
