"""What a client generates code from holds nothing internal."""

from collections.abc import Iterator

from google.protobuf.descriptor import FileDescriptor

from protos.v1 import inference_pb2


def imported(file: FileDescriptor) -> Iterator[FileDescriptor]:
    """The file, and everything that it imports."""
    yield file
    for other in file.dependencies:
        yield from imported(other)


def test_the_public_interface_imports_only_public_files() -> None:
    packages = {file.package for file in imported(inference_pb2.DESCRIPTOR)}
    assert packages == {"laps_sd.v1", "google.protobuf"}


def test_the_service_and_the_calls_that_clients_know_keep_their_names() -> None:
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    assert service.full_name == "laps_sd.v1.Inference"
    assert {"Generate", "Resume", "Cancel"} <= set(service.methods_by_name)
