"""``dspine-local bench``: speed with and without drafting, and beside other servers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from dspine_local.bench.endpoint import connect, parse_endpoints
from dspine_local.bench.plot import plot_paths, plot_report
from dspine_local.bench.profile import PUBLISHED, load_profile
from dspine_local.bench.report import BenchReport, make_report
from dspine_local.bench.run import make_tasks, run_systems
from dspine_local.bench.setting import describe_setting
from dspine_local.bench.simulation import SimulatedEngine
from dspine_local.bench.systems import DEFAULT_MODES, EngineMode, System, default_modes, parse_modes
from dspine_local.bench.tables import show, warn_of_differences
from dspine_local.checks import UINT32_MAX, OptionError, need_integer
from dspine_local.cli.arguments import add_model_arguments, add_predict_argument, engine_options
from dspine_local.cli.console import OutputConsole
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
        "--prompts", metavar="PATH", type=Path, help="a .jsonl file or a folder of them (default: the project's own 80)"
    )
    parser.add_argument("--limit", metavar="N", type=int, help="prompts per category (default: all)")
    add_predict_argument(parser, 128)
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
    for name in ("max_tokens", "repetitions", *(("limit",) if args.limit is not None else ())):
        need_integer(name, getattr(args, name), 1)
    need_integer("seed", args.seed, 0, UINT32_MAX)
    request = GenerationOptions(
        max_tokens=args.max_tokens, sampling=SamplingOptions(temperature=args.temperature, seed=args.seed)
    )
    wanted = _wanted_modes(args)
    if args.plot is not None:
        plot_paths(args.plot)
    prompts = load_prompts(own_prompts() if args.prompts is None else args.prompts, limit=args.limit)
    open_engine = _engine_opener(args)
    endpoints = [
        connect(name, url, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
        for name, url in parse_endpoints(args.endpoints).items()
    ]
    engine = open_engine()
    modes = default_modes(engine.max_draft) if wanted is None else wanted
    if any(n_draft is not None and n_draft > engine.max_draft for n_draft in modes.values()):
        raise OptionError("compare", args.compare, f"drafts of {engine.max_draft} tokens at most by this drafter")
    tasks = make_tasks(engine, prompts, args.max_tokens)
    ours = [EngineMode(name, engine, n_draft, request) for name, n_draft in modes.items()]
    systems: list[System] = [*ours, *endpoints]
    simulated = engine if isinstance(engine, SimulatedEngine) else None
    with progress_bar("Measuring", unit="steps") as progress:
        measurements = run_systems(
            systems,
            tasks,
            n_repetitions=args.repetitions,
            max_tokens=args.max_tokens,
            simulated=simulated,
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
        profile=None if simulated is None else simulated.profile,
        costs=engine.draft_costs,
        n_replaced=0 if simulated is None else simulated.n_replaced,
    )
    return _tell(args, report)


def _wanted_modes(args: argparse.Namespace) -> dict[str, int | None] | None:
    """What ``--compare`` names; None is the default, which depends on the drafter."""
    if args.compare is None:
        return None
    modes = parse_modes(args.compare)
    if args.model_draft is None and any(n_draft != 0 for n_draft in modes.values()):
        raise ValueError(f"--compare {args.compare} needs a drafter: -md DRAFTER.gguf")
    return modes


def _engine_opener(args: argparse.Namespace) -> Callable[[], Engine]:
    """Loads the models; everything else that can be wrong with them is told at once."""
    options = engine_options(args)
    if args.acceptance_profile is None:
        return partial(Engine, args.model, args.model_draft, options)
    if args.model_draft is None or args.temperature != 0:
        raise ValueError("--acceptance-profile needs a drafter (-md) and temperature 0")
    profile = load_profile(args.acceptance_profile)
    return partial(SimulatedEngine, args.model, args.model_draft, options, profile, seed=args.seed)


def _tell(args: argparse.Namespace, report: BenchReport) -> int:
    """Print and draw the report; the exit code. Figures come first: drawing can fail."""
    if args.json:
        print(json.dumps(report.to_json()), flush=True)
    else:
        show(OutputConsole(), report)
    if args.plot is not None:
        for path in plot_report(report, args.plot):
            if not args.json:
                print(f"wrote {path}")
    if not report.identical:
        warn_of_differences(Console(stderr=True), report)
        return 1
    return 0
