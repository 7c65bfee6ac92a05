"""`make gpu-check`: what the engine does on a GPU, in one run of nine minutes. No tests of pytest's are here.

A machine with a GPU may have nothing but torch, transformers, numpy and safetensors, and no network: what is imported
here, and what that imports, needs no more.
"""
