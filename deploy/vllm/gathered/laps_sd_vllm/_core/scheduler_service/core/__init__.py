"""Pure scheduling: observe events, plan rounds. No clock, no randomness, no I/O, no logging; standard library only."""
