"""A simulation in which every round is reported and planned, for callers that look at each. The lean loop passes over
rounds that change nothing. No policy and no clock of its own lives here."""

from scheduler_service.sim.simulator import Simulation


class Plain(Simulation):
    LEAN = False
