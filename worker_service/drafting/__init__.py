"""The drafter as a service: a small model in a process of its own guesses what follows the texts of many workers."""
