"""Drafters: what proposes tokens for the target to verify. They know tensors and tokens, and no requests' order."""
