"""``dspine-local train``: a drafter for a target of one's own."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_local.cli.arguments import add_threads_argument
from dspine_local.command import Loading
from dspine_local.progress import progress_bar

if TYPE_CHECKING:
    from dspine_local.train.pipeline import PipelineOptions

STAGES = ("data", "features", "train")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "train",
        help="train a drafter for a target",
        description="Train a drafter from nothing but the target's GGUF: let it answer prompts, keep what it thought, "
        "learn from that. Every stage goes on where it was stopped (Ctrl-C) when the same command is given again. The "
        "result is OUT/<kind>/checkpoint, for `dspine-local convert`. Needs the extra 'train' (torch).",
    )
    parser.add_argument("--target", metavar="TARGET.gguf", type=Path, required=True, help="the target")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder for everything that is made")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all", help="run one stage only")
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="folder of this run in DIR (default: the kind)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of prompts, answers and training")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of PyTorch")
    add_threads_argument(parser)
    _add_data_arguments(parser)
    _add_drafter_arguments(parser)
    _add_training_arguments(parser)
    parser.set_defaults(run=run)


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="one prompt per line, or JSONL with 'prompt'; without, the target makes up prompts of its own",
    )
    group.add_argument(
        "--tokens",
        dest="n_tokens",
        metavar="N",
        type=int,
        default=800_000,
        help="answer tokens in all",
    )
    group.add_argument("--max-prompt", metavar="N", type=int, default=160, help="tokens")
    group.add_argument("--max-answer", metavar="N", type=int, default=256, help="tokens")
    group.add_argument("--greedy-share", metavar="X", type=float, default=0.5, help="answers at temperature 0")
    group.add_argument("--shard-size", metavar="N", type=int, default=512, help="conversations per file")
    group.add_argument("--parallel", dest="n_parallel", metavar="N", type=int, default=32, help="conversations at once")
    group.add_argument(
        "--backend",
        choices=("native", "torch"),
        default="native",
        help="what answers: llama.cpp, or PyTorch for dense llama and qwen3 targets, which gives the features as well",
    )


def _add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafter")
    group.add_argument("--kind", choices=("dspine", "dflash"), default="dspine", help="with injection, or without")
    group.add_argument("--layers", dest="n_layers", metavar="N", type=int, default=3, help="of the drafter")
    group.add_argument("--block-size", metavar="N", type=int, default=8, help="the anchor and N - 1 proposals")
    group.add_argument("--rank", metavar="N", type=int, default=128, help="width of the transfer space")
    group.add_argument("--message-size", metavar="N", type=int, default=64, help="width of what a slot tells the next")
    group.add_argument("--top-k", metavar="N", type=int, default=16, help="candidates per slot")
    group.add_argument("--taps", metavar="LAYER", type=int, nargs="+", help="target layers to read, from 0")
    group.add_argument("--mask-token", metavar="ID", type=int, help="a token that answers do not contain")


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--steps", dest="n_steps", metavar="N", type=int, default=5_000, help="optimizer steps")
    group.add_argument(
        "--lr",
        dest="learning_rate",
        metavar="X",
        type=float,
        default=3e-3,
        help="peak learning rate",
    )
    group.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="of the matrices")
    group.add_argument("--sequences", dest="n_sequences", metavar="N", type=int, default=6, help="per step")
    group.add_argument("--anchors", dest="n_anchors", metavar="N", type=int, default=32, help="blocks of each")
    group.add_argument(
        "--decay",
        metavar="X",
        type=float,
        default=2.5,
        help="slot j weighs exp(-(j - 1) / X) in the loss",
    )
    group.add_argument(
        "--short-share",
        metavar="X",
        type=float,
        default=0.75,
        help="part of the steps with blocks of half the length, for causal drafters only",
    )
    group.add_argument(
        "--live-features",
        action="store_true",
        help="leave out the features stage and compute them in every step, in PyTorch: for a GPU",
    )
    group.add_argument("--eval-every", metavar="N", type=int, default=500, help="steps")
    group.add_argument("--from-scratch", action="store_true", help="do not start the layers from the target's")


def run(args: argparse.Namespace) -> int:
    """Run the stages; errors are raised."""
    if find_spec("torch") is None:
        raise ValueError("training needs PyTorch: pip install 'dspine-local[train]'")
    with Loading():
        import torch

        from dspine_local.train.pipeline import (
            check_inputs,
            checkpoint_folder,
            run_data,
            run_features,
            run_training,
        )

    options = _options(args)
    stages = STAGES if args.stage == "all" else (args.stage,)
    check_inputs(options, stages)
    if args.n_threads:
        torch.set_num_threads(args.n_threads)
    if "data" in stages:
        with progress_bar("Answering", unit="steps") as report:
            n_tokens = run_data(options, report)
        used_up = "" if n_tokens >= options.data.n_tokens else ": the prompts are used up"
        print(f"data: {n_tokens:,} answer tokens in {options.out / 'data'}{used_up}", flush=True)
    if "features" in stages and not args.live_features:
        with progress_bar("Features", unit="steps") as report:
            n_shards = run_features(options, report)
        print(f"features: {n_shards} shards in {options.out / 'features'}", flush=True)
    if "train" in stages:
        with progress_bar("Training", unit="steps") as report:
            acceptance = run_training(options, report)
        if acceptance is not None:
            print(f"training: acceptance length {acceptance.length:.3f} on held-out answers")
        print(f"checkpoint: {checkpoint_folder(options)}")
    return 0


def _options(args: argparse.Namespace) -> PipelineOptions:
    import torch

    from dspine_local.train.data import DataOptions
    from dspine_local.train.options import TrainOptions
    from dspine_local.train.pipeline import DrafterOptions, PipelineOptions

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return PipelineOptions(
        target=args.target,
        out=args.out,
        run=args.run_name,
        device=device,
        backend=args.backend,
        live_features=args.live_features,
        data=DataOptions(
            n_tokens=args.n_tokens,
            prompts=args.prompts,
            max_prompt=args.max_prompt,
            max_answer=args.max_answer,
            greedy_share=args.greedy_share,
            shard_size=args.shard_size,
            n_parallel=args.n_parallel,
            n_threads=args.n_threads,
            seed=args.seed,
        ),
        drafter=DrafterOptions(
            kind=args.kind,
            n_layers=args.n_layers,
            block_size=args.block_size,
            rank=args.rank,
            message_size=args.message_size,
            top_k=args.top_k,
            taps=args.taps,
            mask_token=args.mask_token,
        ),
        train=TrainOptions(
            n_steps=args.n_steps,
            learning_rate=args.learning_rate,
            optimizer=args.optimizer,
            n_sequences=args.n_sequences,
            n_anchors=args.n_anchors,
            decay=args.decay,
            short_share=args.short_share,
            eval_every=args.eval_every,
            from_target=not args.from_scratch,
            seed=args.seed,
        ),
    )
