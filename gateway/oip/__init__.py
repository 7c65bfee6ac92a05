"""The Open Inference Protocol's door, with Triton's streams: on the gRPC port, over the same `Front` as the others."""
