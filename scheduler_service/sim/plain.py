"""A simulation for who looks at each round, as the lean loop does not: every one is reported and planned."""

from scheduler_service.sim.simulator import Simulation


class Plain(Simulation):
    LEAN = False
