"""Counters of the server in Prometheus' format: llama-server's names, and our own with ``dspine:`` in front."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dspine_local.costs import DraftCosts
from dspine_local.generation import Generation

logger = logging.getLogger("dspine_local.server")

_WARN_AFTER_DRAFTED = 200

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


class Metrics(Collector):
    """Sums over all requests; fed by the scheduler's thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.prompt_tokens = self.prompt_s = 0.0
        self.predicted_tokens = self.predicted_s = 0.0
        self.n_tokens_max = self.n_rounds = self.n_busy = 0
        self.n_drafts = self.n_drafted = self.n_accepted = 0
        self.accepted_at: list[int] = []
        self.rounds_by_draft: list[int] = []
        self.round_s = dict.fromkeys(("draft", "verify", "commit", "other"), 0.0)
        self.busy: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.costs: Callable[[], DraftCosts | None] = lambda: None
        self.checkpoint_bytes: Callable[[], int] = lambda: 0
        self.exact_lengths: tuple[int, ...] | None = None
        self._warned = False
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_round(self, n_busy: int) -> None:
        """A round with so many busy slots."""
        with self._lock:
            self.n_rounds += 1
            self.n_busy += n_busy

    def count_request(self, generation: Generation) -> None:
        """A request that has ended, however it did."""
        stats = generation.stats
        if stats is None:
            return
        with self._lock:
            self.prompt_tokens += stats.prompt_tokens - stats.reused_tokens
            self.prompt_s += stats.prefill_s
            self.predicted_tokens += stats.generated
            self.predicted_s += stats.draft_s + stats.verify_s + stats.commit_s + stats.other_s
            self.n_tokens_max = max(self.n_tokens_max, stats.prompt_tokens + stats.generated)
            self.n_drafts += sum(stats.rounds_per_draft_length[1:])
            self.n_drafted += stats.drafted
            self.n_accepted += stats.accepted
            _add(self.accepted_at, stats.accepted_per_position)
            _add(self.rounds_by_draft, stats.rounds_per_draft_length)
            for part in self.round_s:
                self.round_s[part] += getattr(stats, f"{part}_s")
            useless = self.n_drafted >= _WARN_AFTER_DRAFTED and self.n_accepted == 0 and not self._warned
            self._warned |= useless
        if useless:
            logger.warning(
                "none of %d drafted tokens was accepted: is the drafter made for this very target (same weights and "
                "vocabulary), converted with --target, and the chat template the model's own?",
                self.n_drafted,
            )

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All metrics; called by the registry."""
        n_processing, n_deferred = self.busy()
        yield GaugeMetricFamily(
            "dspine:checkpoint_bytes", "Memory of states that slots can go back to.", value=self.checkpoint_bytes()
        )
        yield from _costs(self.costs())
        yield from _strict(self.exact_lengths)
        with self._lock:
            for name, text, value in (
                ("prompt_tokens", "Number of prompt tokens processed.", self.prompt_tokens),
                ("prompt_seconds", "Prompt process time in seconds.", self.prompt_s),
                ("tokens_predicted", "Number of generation tokens processed.", self.predicted_tokens),
                ("tokens_predicted_seconds", "Predict process time in seconds.", self.predicted_s),
                ("n_decode", "Rounds, each one decode of the target.", self.n_rounds),
                ("spec_decode_num_draft_tokens", "Tokens drafted.", self.n_drafted),
                ("spec_decode_num_accepted_tokens", "Drafted tokens that the target accepted.", self.n_accepted),
                ("spec_decode_num_drafts", "Rounds that verified a draft.", self.n_drafts),
            ):
                yield CounterMetricFamily(f"llamacpp:{name}", text, value=value)
            for name, text, value in (
                (
                    "prompt_tokens_seconds",
                    "Average prompt throughput in tokens/s.",
                    _rate(self.prompt_tokens, self.prompt_s),
                ),
                (
                    "predicted_tokens_seconds",
                    "Average generation throughput in tokens/s.",
                    _rate(self.predicted_tokens, self.predicted_s),
                ),
                ("requests_processing", "Number of requests processing.", n_processing),
                ("requests_deferred", "Number of requests deferred.", n_deferred),
                ("n_tokens_max", "Largest observed number of tokens of a request.", self.n_tokens_max),
                (
                    "n_busy_slots_per_decode",
                    "Average number of busy slots per round.",
                    _rate(self.n_busy, self.n_rounds),
                ),
            ):
                yield GaugeMetricFamily(f"llamacpp:{name}", text, value=value)
            for name, text, label, values in (
                (
                    "llamacpp:spec_decode_num_accepted_tokens_per_pos",
                    "Accepted tokens by position in the draft.",
                    "position",
                    dict(enumerate(self.accepted_at)),
                ),
                (
                    "dspine:rounds",
                    "Rounds of requests by drafted tokens that they verified; 0 is plain decoding.",
                    "n_draft",
                    dict(enumerate(self.rounds_by_draft)),
                ),
                ("dspine:round_seconds", "Time of the rounds of requests by what it went into.", "part", self.round_s),
            ):
                yield _labelled(CounterMetricFamily(name, text, labels=[label]), values)


def _costs(costs: DraftCosts | None) -> Iterator[Metric]:
    """What the automatic draft length goes by now."""
    if costs is None:
        return
    for name, text, points in (
        ("verify", "What a decode of the target costs, by its tokens.", costs.verify),
        ("draft", "What a call of the drafter costs, by slots times drafted tokens.", costs.draft),
    ):
        family = GaugeMetricFamily(f"dspine:{name}_cost_seconds", text, labels=["tokens"])
        yield _labelled(family, {n: us / 1e6 for n, us in points})


def _strict(exact_lengths: Sequence[int] | None) -> Iterator[Metric]:
    """Whether drafts are restricted, and to what."""
    yield GaugeMetricFamily(
        "dspine:strict", "1: only exact draft lengths are used.", value=0 if exact_lengths is None else 1
    )
    if exact_lengths is not None:
        text = "Draft lengths that are exact somewhere in the context; none, and nothing is drafted."
        family = GaugeMetricFamily("dspine:exact_draft_length", text, labels=["n_draft"])
        yield _labelled(family, dict.fromkeys(exact_lengths, 1))


def _labelled(family: Family, values: Mapping[Any, float]) -> Family:
    for label, value in values.items():
        family.add_metric([str(label)], value)
    return family


def _add(sums: list[int], counts: Sequence[int]) -> None:
    sums += [0] * (len(counts) - len(sums))
    for i, count in enumerate(counts):
        sums[i] += count


def _rate(amount: float, time: float) -> float:
    return amount / time if time > 0 else 0.0
