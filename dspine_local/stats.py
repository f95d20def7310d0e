"""What a request cost and what drafting saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dspine_local import _native


@dataclass(frozen=True)
class GenerationStats:
    """Statistics of one request; times in seconds.

    ``rounds`` are verify decodes after the prompt. Each emits its accepted draft and one token more, so
    ``generated == 1 + rounds + accepted``. ``acceptance_length`` is emitted tokens per round (None without a round).
    ``drafted_per_position[i]`` counts how often a draft's token i was verified, ``accepted_per_position[i]`` how often
    it was accepted, ``rounds_per_draft_length[k]`` how many rounds verified k drafted tokens. ``draft_s``,
    ``verify_s``, ``commit_s`` and ``other_s`` add up to the time of the rounds; a round that other requests share
    counts whole. ``exact_draft_lengths`` are those that a strict engine uses; None of one that is not.
    """

    prompt_tokens: int
    reused_tokens: int
    generated: int
    rounds: int
    drafted: int
    accepted: int
    acceptance_length: float | None
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    rounds_per_draft_length: tuple[int, ...]
    prefill_s: float
    draft_s: float
    verify_s: float
    commit_s: float
    other_s: float
    tokens_per_second: float | None
    exact_draft_lengths: tuple[int, ...] | None = None

    @classmethod
    def from_native(cls, stats: _native.RequestStats) -> GenerationStats:
        """From the native engine's counters."""
        rounds_s = stats.round_us / 1e6
        draft_s, verify_s, commit_s = stats.draft_us / 1e6, stats.verify_us / 1e6, stats.commit_us / 1e6
        emitted = stats.n_rounds + stats.n_accepted
        return cls(
            prompt_tokens=stats.n_prompt,
            reused_tokens=stats.n_reused,
            generated=stats.n_generated,
            rounds=stats.n_rounds,
            drafted=stats.n_drafted,
            accepted=stats.n_accepted,
            acceptance_length=emitted / stats.n_rounds if stats.n_rounds else None,
            drafted_per_position=tuple(stats.drafted_at),
            accepted_per_position=tuple(stats.accepted_at),
            rounds_per_draft_length=tuple(stats.rounds_by_draft),
            prefill_s=stats.prefill_us / 1e6,
            draft_s=draft_s,
            verify_s=verify_s,
            commit_s=commit_s,
            other_s=rounds_s - draft_s - verify_s - commit_s,
            tokens_per_second=emitted / rounds_s if rounds_s > 0 else None,
        )

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        parts = ["1 token" if self.generated == 1 else f"{self.generated} tokens"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.drafted and self.acceptance_length is not None:
            parts.append(f"acceptance length {self.acceptance_length:.2f} ({self.accepted} of {self.drafted} accepted)")
        elif self.rounds and len(self.rounds_per_draft_length) > 1 and self.exact_draft_lengths != ():
            parts.append("no drafts")
        if self.reused_tokens:
            parts.append(f"{self.reused_tokens} of {self.prompt_tokens} prompt tokens reused")
        if self.exact_draft_lengths is not None:
            parts.append("strict" if self.exact_draft_lengths else "strict: no drafts")
        return ", ".join(parts)
