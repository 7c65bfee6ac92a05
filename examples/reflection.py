"""gRPC without generated code: what there is to call, its messages, a call, all learned from the server's reflection.
`pip install grpcio-reflection`. With grpcurl:
grpcurl -plaintext -d '{"prompt": "1, 2, 3,", "max_tokens": 8}' 127.0.0.1:50051 laps_sd.v1.Inference/Generate"""

import os

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToJson
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

with grpc.insecure_channel(os.environ.get("LAPS_SD_SERVER", "127.0.0.1:50051")) as channel:
    described = ProtoReflectionDescriptorDatabase(channel)
    print("services:", *described.get_services())
    service = DescriptorPool(described).FindServiceByName("laps_sd.v1.Inference")
    for method in service.methods:
        print(f"{method.name}({method.input_type.name}) -> {method.output_type.name}")

    generate = service.methods_by_name["Generate"]
    ask = channel.unary_stream(
        "/laps_sd.v1.Inference/Generate",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(generate.output_type).FromString,
    )
    for chunk in ask(GetMessageClass(generate.input_type)(prompt="1, 2, 3,", max_tokens=8), timeout=60):
        print(MessageToJson(chunk, indent=None))
