"""The run's report in a terminal."""

from __future__ import annotations

from itertools import groupby

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspine_local.bench.report import ALL, MIN_TOKENS, BenchReport, Spread, SystemResult
from dspine_local.costs import DraftCosts

_SHOWN_LENGTHS = (1, 3, 7, 15)


def show(console: Console, report: BenchReport) -> None:
    """The tables for people."""
    machine, versions, run = (report.setting[key] for key in ("machine", "versions", "run"))
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, {report.setting['n_threads']} threads; dspine-local "
        f"{versions['dspine-local']}, llama-cpp-python {versions['llama-cpp-python']}; {run['n_prompts']} prompts, "
        f"{run['max_tokens']} tokens, {run['repetitions']} repetitions, temperature {run['temperature']:g}",
        highlight=False,
    )
    if report.profile is not None:
        mean = report.profile.mean_emitted(report.setting["max_draft"])
        console.print(
            f"ACCEPTANCE IS SIMULATED, by the profile '{report.profile.name}' ({report.profile.source}): {mean:.2f} "
            f"tokens per round with drafts of {report.setting['max_draft']}. The drafter costs what it costs here, but "
            "its tokens are not its own.",
            style="bold yellow",
            highlight=False,
        )
    table = Table(box=SIMPLE, collapse_padding=True, pad_edge=False)
    for title in ("", "tokens/s", "speed-up", "length", "prompt", "of time"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for category, results in groupby(report.results, key=lambda result: result.category):
        style = "bold" if category == ALL else None
        table.add_section()
        table.add_row(category, style=style)
        for result in results:
            table.add_row(*_cells(result), style=style)
    console.print(table)
    console.print(
        "Medians (quartiles). Length: tokens per decode. Prompt: milliseconds to read it. Of time: percent in draft/"
        "verify/rest of all rounds."
    )
    if report.costs is not None and (lines := break_even(report.costs)):
        console.print(f"What a round costs here, in plain decodes, and the length from which it pays: {lines}.")
    n_short = sum(r.n_short for r in report.results if r.category == ALL)
    if n_short:
        console.print(f"{n_short} answers had fewer than {MIN_TOKENS} tokens: they are not in tokens/s and speed-up.")
    for endpoint in report.endpoints:
        clock = (
            "timed by the server itself"
            if endpoint.clock == "timings"
            else "it tells no timings: WALL TIME of whole requests, their prompts included"
        )
        console.print(
            f"{endpoint.system}: {clock}; {endpoint.n_same_text} of {endpoint.n_answers} answers have our text.",
            highlight=False,
        )
    if report.n_replaced:
        console.print(
            f"{report.n_replaced} tokens were replaced by those of plain decoding, to stay on its answers: this target "
            "rounds differently in batches (docs/lossless.md)."
        )
    elif report.identical:
        console.print("All modes gave the same answers.")


def break_even(costs: DraftCosts) -> str:
    """Of a few draft lengths, what a round costs; as many tokens must come out of it."""
    verify, draft = dict(costs.verify), dict(costs.draft)
    if 1 not in verify:
        return ""
    rounds = {k: (verify[k + 1] + draft[k]) / verify[1] for k in _SHOWN_LENGTHS if k in draft and k + 1 in verify}
    return ", ".join(f"{cost:.1f} with drafts of {k}" for k, cost in rounds.items())


def warn_of_differences(console: Console, report: BenchReport) -> None:
    """Say it loudly; at most ten of them one by one."""
    lines = [f"THE MODES DID NOT GIVE THE SAME ANSWERS: {len(report.differences)} differ"]
    lines += [
        f"  {d.system}, {d.category}, repetition {d.repetition + 1}, from token {d.position + 1}: {d.prompt[:60]!r}"
        for d in report.differences[:10]
    ]
    console.print(Text("\n".join(lines), style="bold red"))


def _cells(result: SystemResult) -> list[str]:
    shares = result.shares
    return [
        f"  {result.system}",
        _spread(result.tokens_per_second),
        _spread(result.speedup),
        "" if result.acceptance_length is None else f"{result.acceptance_length:.2f}",
        "" if result.prefill_s is None else f"{1e3 * result.prefill_s:.0f}",
        "" if shares is None else "/".join(f"{100 * x:.0f}" for x in (shares.draft, shares.verify, shares.rest)),
    ]


def _spread(value: Spread | None) -> str:
    if value is None:
        return ""
    digits = 2 if value.median < 10 else 1 if value.median < 100 else 0
    return f"{value.median:.{digits}f} ({value.q1:.{digits}f}-{value.q3:.{digits}f})"
