"""The same requests under several policies, one after the other: a question in JSON on stdin, an answer on stdout. The
scheduler runs it as a process of low priority, since it takes seconds. It decides nothing."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

from scheduler_service.sim.oracle import parts, simulated_policy
from scheduler_service.sim.results import summarise
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job


@dataclass(frozen=True, slots=True)
class Question:
    """`policies`: each a name, with settings behind colons; `oracle` too. Settings that a policy lacks are an error."""

    jobs: list[Job]
    fleet: SimFleet
    policies: list[str]


Answer = Mapping[str, Mapping[str, float]]  # policy -> name of a figure, as in sim/results.py -> value

QUESTION = TypeAdapter(Question)
ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


def side_by_side(question: Question) -> Answer:
    """The figures of each policy. Raises ValueError for a policy that there is not."""
    jobs, fleet = question.jobs, question.fleet
    policies = {name: simulated_policy(*parts(name), jobs, fleet.reference_draft) for name in question.policies}
    return {name: summarise(simulate(jobs, policy, fleet)) for name, policy in policies.items()}


def main() -> None:
    os.nice(19)  # serving goes first
    question = QUESTION.validate_json(sys.stdin.buffer.read())
    sys.stdout.buffer.write(ANSWER.dump_json(side_by_side(question)))


if __name__ == "__main__":
    main()
