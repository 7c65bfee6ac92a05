"""The course of one request: what all rounds that it still needs will bring, summed up. Decides nothing, runs nothing.

With fixed draft lengths every round of a job is known beforehand. So the state of a request after any of its rounds is
read off sums, however many rounds that is ahead.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from scheduler_service.core.beliefs import MAX_WINDOW, Acceptance
from scheduler_service.core.entry import Entry
from scheduler_service.sim.workload import Job


class Course:
    """From the state of an entry on; place 0 is that state, and place `end` is after its last round. Each round before
    that brings output."""

    __slots__ = ("_drafted", "_hits", "_means", "_rejected", "_seen", "_skipped", "drafting", "end", "even", "tokens")

    tokens: Sequence[int]  # of output, by place
    drafting: Sequence[int]  # rounds with drafts, by place

    def __init__(self, job: Job, entry: Entry, draft_len: int, *, keep_means: bool) -> None:
        seen = self._seen = entry.acceptance
        # Rounds that no acceptance counts: one that computed the prompt and drafted nothing.
        self._skipped = int(entry.prefill_owed > 0 and not job.drafts(job.round(seen.rounds, entry.emitted), draft_len))
        self.even = not job.drafted and draft_len <= job.draft_len  # every round drafts as much
        if self.even:
            self._sum_up_script(job, entry.emitted, draft_len)
        else:
            self._sum_up_rounds(job, entry.emitted, draft_len)
        self.end = len(self.tokens) - 1
        self._means: list[float] | None = self._running_means() if keep_means else None

    def _sum_up_script(self, job: Job, emitted: int, draft_len: int) -> None:
        seen, script = self._seen, job.accepted or (0,)
        if draft_len < job.draft_len:
            script = tuple([min(accepted, draft_len) for accepted in script])
        first = seen.rounds % len(script)
        lasts = (job.output_tokens - emitted) // (sum(script) + len(script)) + 1
        ahead = (script[first:] + script[:first]) * lasts
        tokens = list(accumulate([accepted + 1 for accepted in ahead], initial=emitted))
        end = bisect_left(tokens, job.output_tokens)
        del tokens[end + 1 :]
        hits = [*ahead[: end - 1], min(ahead[end - 1], job.output_tokens - tokens[end - 1])]
        tokens[end] = job.output_tokens
        new = tokens[end] - tokens[end - 1]
        rejected = [accepted < draft_len for accepted in hits]
        rejected[-1] = hits[-1] < draft_len and new > hits[-1]
        self.tokens = tokens
        self._hits = list(accumulate(hits, initial=seen.accepted))
        self._rejected = list(accumulate(rejected, initial=seen.rejected))
        self._drafted: Sequence[int] = [seen.drafted] * (end + 1)
        self.drafting = [0] * (end + 1)
        if draft_len:
            self._drafted = range(seen.drafted, seen.drafted + draft_len * (end + 1), draft_len)
            self.drafting = range(end + 1)

    def _sum_up_rounds(self, job: Job, emitted: int, draft_len: int) -> None:
        seen, counted = self._seen, self._seen.rounds
        self.tokens, self._hits, self._rejected = [emitted], [seen.accepted], [seen.rejected]
        self._drafted, self.drafting = [seen.drafted], [0]
        while emitted < job.output_tokens:
            round = job.round(counted, emitted)
            drafts = job.drafts(round, draft_len)
            accepted = job.accepts(round, drafts)
            new = min(accepted + 1, job.output_tokens - emitted)
            accepted = min(accepted, new)
            counted += len(self.tokens) > 1 or not self._skipped
            emitted += new
            self.tokens.append(emitted)
            self._hits.append(self._hits[-1] + accepted)
            self._rejected.append(self._rejected[-1] + (accepted < drafts and new > accepted))
            self._drafted.append(self._drafted[-1] + drafts)
            self.drafting.append(self.drafting[-1] + (drafts > 0))

    def _running_means(self) -> list[float]:
        """Of acceptance, after each counted round: those that are kept of before, and of all that come."""
        counted = range(1 + self._skipped, self.end + 1)
        means = [self._hits[place] / self._drafted[place] if self._drafted[place] else 0.0 for place in counted]
        return [*self._seen.means, *means]

    def acceptance(self, place: int) -> Acceptance:
        """What its rounds will have shown then."""
        seen = self._seen
        counted = max(0, place - self._skipped)
        if not counted:
            return seen
        means = seen.means
        if self._means is not None:
            upto = len(seen.means) + counted
            means = tuple(self._means[max(0, upto - MAX_WINDOW) : upto])
        rounds, drafted = seen.rounds + counted, self._drafted[place]
        return Acceptance(rounds, drafted, self._hits[place], self._rejected[place], means)

    def drafts(self, place: int) -> int:
        """Tokens that are drafted in the round after that place."""
        return self._drafted[place + 1] - self._drafted[place]

    def place_of(self, entry: Entry) -> int | None:
        """Where on this course the entry stands; None: on another, since it lost its KV on the way."""
        place = bisect_left(self.tokens, entry.emitted)
        same = self.tokens[place] == entry.emitted and self.acceptance(place) == entry.acceptance
        return place if same else None
