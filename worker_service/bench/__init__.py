"""`laps-sd bench engine`: the engine beside its peers, on the same prompts in one run. Serving never imports this."""
