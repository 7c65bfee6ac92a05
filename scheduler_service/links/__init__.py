"""The gRPC streams of workers and gateways. They carry messages; every decision is made elsewhere."""
