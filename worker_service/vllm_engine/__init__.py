"""vLLM as a worker's engine: its EngineCore fills the port, and everything else of a worker stays. It runs in vLLM's
own environment, and imports neither our engine's tensors nor what they need."""
