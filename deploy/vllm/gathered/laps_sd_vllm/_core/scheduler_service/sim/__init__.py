"""A discrete-event simulator: a second shell around the scheduling core, under a virtual clock. No wire, no Redis."""
