"""What a round costs in the simulator. The formula of `laps-sd simulate` lives here and nowhere else."""

from dataclasses import dataclass

from scheduler_service.core.costs import CostProfile


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds. `t_verify_slope`: by which share each further request of the batch lengthens the verification. A
    target over N stages verifies k drafts in k * t_token + t_verify and N - 1 links, one token at a time in k times
    all that."""

    t_draft_ms: float = 1.0
    t_verify_ms: float = 30.0
    t_verify_slope: float = 0.05
    t_token_ms: float = 0.0
    t_prefill_ms_per_token: float = 0.1
    t_resume_ms: float = 0.0
    t_offload_ms_per_token: float = 0.0
    t_links_ms: float = 0.0  # of a pass: over all links between the stages of a target that is spread by layers

    def step_s(
        self, draft_len: int, batch: int, verified: int, prefilled: int, resumed: int, restored: int = 0
    ) -> float:
        """Seconds of one step: `batch` requests, and in all `verified`, `prefilled` and `restored` (from the host's
        memory) tokens and `resumed` requests."""
        return 1e-3 * (
            draft_len * self.t_draft_ms
            + self.t_verify_ms * (1 + self.t_verify_slope * (batch - 1))
            + self.t_token_ms * verified
            + self.t_prefill_ms_per_token * prefilled
            + self.t_resume_ms * resumed
            + self.t_offload_ms_per_token * restored  # for both ways
            + self.t_links_ms
        )

    def profile(self) -> CostProfile:
        """As a worker would report it."""
        return CostProfile(
            draft_s=1e-3 * self.t_draft_ms,
            verify_s=1e-3 * (self.t_verify_ms + self.t_token_ms + self.t_links_ms),
            verify_slope_s=1e-3 * (self.t_verify_ms * self.t_verify_slope + self.t_token_ms),
            prefill_token_s=1e-3 * self.t_prefill_ms_per_token,
            resume_s=1e-3 * self.t_resume_ms,
            verify_token_s=1e-3 * self.t_token_ms,
            offload_block_s=1e-3 * self.t_offload_ms_per_token,  # its blocks are of one token
        )

    @classmethod
    def of(cls, profile: CostProfile) -> "StepCosts":
        """The costs whose profile this is."""
        verify_s = max(profile.verify_s - profile.verify_token_s, 1e-6)
        return cls(
            t_draft_ms=1e3 * profile.draft_s,
            t_verify_ms=1e3 * verify_s,
            t_verify_slope=max(profile.verify_slope_s - profile.verify_token_s, 0.0) / verify_s,
            t_token_ms=1e3 * profile.verify_token_s,
            t_prefill_ms_per_token=1e3 * profile.prefill_token_s,
            t_resume_ms=1e3 * profile.resume_s,
            t_offload_ms_per_token=1e3 * profile.offload_block_s,
        )
