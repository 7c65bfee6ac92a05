"""Deterministic simulation of the whole service under faults: each schedule is one integer.

See docs/explanation/reliability.md."""
