"""``dspine-local bench``: speed with and without drafting, and beside other servers."""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspine_local.bench.endpoint import connect, parse_endpoints
from dspine_local.bench.plot import plot_paths, plot_report
from dspine_local.bench.profile import PUBLISHED, load_profile
from dspine_local.bench.report import ALL, MIN_TOKENS, BenchReport, Spread, SystemResult, make_report
from dspine_local.bench.run import make_tasks, run_systems
from dspine_local.bench.setting import describe_setting
from dspine_local.bench.simulation import SimulatedEngine
from dspine_local.bench.systems import DEFAULT_MODES, EngineMode, System, default_modes, parse_modes
from dspine_local.checks import UINT32_MAX, OptionError, need_integer
from dspine_local.cli.arguments import add_model_arguments, engine_options
from dspine_local.engine import Engine
from dspine_local.evaluation.prompts import load_prompts, own_prompts
from dspine_local.options import GenerationOptions, SamplingOptions
from dspine_local.progress import progress_bar


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed with and without drafting, and beside other servers",
        description="Answer the same prompts in several ways, in turn, several times, and print tokens per second "
        "(medians and quartiles), speed-up against plain decoding, acceptance length and where the time goes. Checks "
        "that all modes give the same answers; exit code 1 if not. What the figures mean: docs/benchmarking.md.",
    )
    parser.add_argument(
        "--compare",
        metavar="MODES",
        help="plain (no drafting), fixed:K (drafts of K tokens) and auto (chosen every round), separated by commas "
        f"(default: {','.join(DEFAULT_MODES)}, as far as the drafter goes; without a drafter: plain)",
    )
    parser.add_argument(
        "--endpoint",
        dest="endpoints",
        metavar="NAME=URL",
        action="append",
        default=[],
        help="measure this server beside them, by llama-server's timings or by wall time; may be repeated",
    )
    parser.add_argument(
        "--acceptance-profile",
        metavar="PROFILE",
        help="simulate a drafter of this quality: the given drafter runs, but its tokens are right as often as the "
        f"profile says; {', '.join(PUBLISHED)}, or a JSON file",
    )
    parser.add_argument(
        "--prompts", metavar="PATH", type=Path, help="a .jsonl file or a folder of them (default: the 80 of eval)"
    )
    parser.add_argument("--limit", metavar="N", type=int, help="prompts per category (default: all)")
    parser.add_argument(
        *("-n", "--predict", "--n-predict"),
        dest="max_tokens",
        metavar="N",
        type=int,
        default=128,
        help="tokens per answer (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions", metavar="R", type=int, default=3, help="answers of each system per prompt (default: 3)"
    )
    parser.add_argument(
        *("--temp", "--temperature"),
        dest="temperature",
        metavar="X",
        type=float,
        default=0.0,
        help="0 is greedy (default); above, every answer has the same seed",
    )
    parser.add_argument(
        *("-s", "--seed"), metavar="N", type=int, default=1, help="of sampling and of simulated acceptance (default: 1)"
    )
    parser.add_argument(
        "--plot",
        metavar="PATH",
        type=Path,
        help="draw speedup.png, acceptance.png and costs.png in this folder, or PATH-speedup.png and so on; older "
        "pictures are replaced",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser, draft_length=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; 1 when our modes differ. Other errors are raised."""
    for name, low in (("max_tokens", 1), ("repetitions", 1), *((("limit", 1),) if args.limit is not None else ())):
        need_integer(name, getattr(args, name), low)
    need_integer("seed", args.seed, 0, UINT32_MAX)
    sampling = SamplingOptions(temperature=args.temperature, seed=args.seed)
    profile = None if args.acceptance_profile is None else load_profile(args.acceptance_profile)
    if profile is not None and (args.model_draft is None or args.temperature != 0):
        raise ValueError("--acceptance-profile needs a drafter (-md) and temperature 0")
    wanted = None if args.compare is None else parse_modes(args.compare)
    if wanted and args.model_draft is None and any(n != 0 for n in wanted.values()):
        raise ValueError(f"--compare {args.compare} needs a drafter: -md DRAFTER.gguf")
    if args.plot is not None:
        plot_paths(args.plot)
    options = engine_options(args)
    prompts = load_prompts(own_prompts() if args.prompts is None else args.prompts, limit=args.limit)
    endpoints = [
        connect(name, url, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
        for name, url in parse_endpoints(args.endpoints).items()
    ]
    if profile is None:
        engine = Engine(args.model, args.model_draft, options)
    else:
        engine = SimulatedEngine(args.model, args.model_draft, options, profile, seed=args.seed)
    modes = default_modes(engine.max_draft) if wanted is None else wanted
    for n_draft in modes.values():
        if n_draft is not None and n_draft > engine.max_draft:
            raise OptionError("compare", args.compare, f"drafts of {engine.max_draft} tokens at most by this drafter")
    tasks = make_tasks(engine, prompts, args.max_tokens)
    request = GenerationOptions(max_tokens=args.max_tokens, sampling=sampling)
    ours = [EngineMode(name, engine, n_draft, request) for name, n_draft in modes.items()]
    systems: list[System] = [*ours, *endpoints]
    with progress_bar("Measuring", unit="steps") as progress:
        measurements = run_systems(
            systems,
            tasks,
            n_repetitions=args.repetitions,
            max_tokens=args.max_tokens,
            simulated=engine if isinstance(engine, SimulatedEngine) else None,
            report=progress,
        )
    run_options = {
        "prompts": "own" if args.prompts is None else args.prompts.name,
        "n_prompts": len(tasks),
        **{name: getattr(args, name) for name in ("limit", "max_tokens", "repetitions", "temperature", "seed")},
    }
    report = make_report(
        systems,
        tasks,
        measurements,
        setting=describe_setting(engine, args.model, args.model_draft, endpoints, run_options),
        profile=profile,
        costs=engine.draft_costs,
    )
    written = [] if args.plot is None else plot_report(report, args.plot)
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        show(Console(), report)
        for path in written:
            print(f"wrote {path}")
    if not report.identical:
        warn_of_differences(Console(stderr=True), report)
        return 1
    return 0


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
    if report.identical:
        console.print("All modes gave the same answers.")


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
