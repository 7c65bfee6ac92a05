"""Logs of a service: its own words, and warnings of libraries that use `logging`."""

import json
import os
import subprocess
import sys

from tests.waiting import WAIT_S

SERVICE = r"""
import asyncio, logging
from protos.channels import LINK_MESSAGE_BYTES
from protos.logs import configure_logs
from protos.serving import Server, channel
from protos.v1 import inference_pb2, inference_pb2_grpc

class Broken(inference_pb2_grpc.InferenceServicer):
    async def Stats(self, request, context):
        raise ZeroDivisionError("what a client wrote")

async def main():
    server = Server((), LINK_MESSAGE_BYTES)
    inference_pb2_grpc.add_InferenceServicer_to_server(Broken(), server.grpc)
    port = server.grpc.add_insecure_port("127.0.0.1:0")
    await server.grpc.start()
    async with channel(f"127.0.0.1:{port}") as link:
        try:
            await inference_pb2_grpc.InferenceStub(link).Stats(inference_pb2.StatsRequest())
        except Exception:
            pass
    await server.grpc.stop(None)

configure_logs("test", worker="w-1")
asyncio.run(main())
logging.getLogger("a.library").warning("%d is odd", 3)
logging.getLogger("a.library").log(35, "is of a level between\nand goes on with what a client wrote")
logging.getLogger("a.library").setLevel(logging.INFO)
logging.getLogger("a.library").info("is left out")
"""


def test_what_libraries_say_is_a_line_and_a_broken_handler_is_told_without_its_message() -> None:
    """gRPC catches what a handler raises: the log is the only place where anybody can see it."""
    # As `laps-sd` and the image give it to services: the lines of gRPC's C++ core are no JSON.
    environment = os.environ | {"GRPC_VERBOSITY": "ERROR"}
    ended = subprocess.run(
        [sys.executable, "-c", SERVICE], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    broken, odd, between = map(json.loads, ended.stderr.splitlines())
    assert {(line["service"], line["worker"]) for line in (broken, odd, between)} == {("test", "w-1")}
    assert (broken["level"], broken["logger"]) == ("error", "grpc._cython.cygrpc")
    assert broken["trace"][0] == "ZeroDivisionError"
    assert any(frame.endswith(" Stats") for frame in broken["trace"])
    assert "client wrote" not in ended.stderr
    assert (odd["level"], odd["event"], odd["logger"]) == ("warning", "3 is odd", "a.library")
    assert (between["level"], between["event"]) == ("warning", "is of a level between")
