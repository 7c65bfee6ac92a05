"""The draft-verify engine: models, KV, drafters, sampling. It knows tensors, and never RPC, queues or policies."""
