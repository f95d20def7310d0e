"""Arguments that several commands share, named as in llama.cpp, and the options they stand for."""

from __future__ import annotations

import argparse

from dspine_local.options import EngineOptions, SamplingOptions

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, drafter and how they are loaded."""
    defaults = EngineOptions()
    group = parser.add_argument_group("models")
    group.add_argument("-m", "--model", metavar="TARGET.gguf", required=True, help="the target")
    group.add_argument("-md", "--model-draft", metavar="DRAFTER.gguf", help="its drafter; without one, plain decoding")
    group.add_argument(
        "--n-draft", metavar="K", type=int, help="tokens drafted per round (default: 7, or what the drafter can)"
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        metavar="N",
        type=int,
        default=defaults.n_ctx,
        help="positions for prompt and answer (default: %(default)s); 0 is what the target was trained for",
    )
    group.add_argument(
        "-b", "--batch-size", metavar="N", type=int, default=defaults.n_batch, help="default: %(default)s"
    )
    group.add_argument(
        "-ub", "--ubatch-size", metavar="N", type=int, default=defaults.n_ubatch, help="default: %(default)s"
    )
    group.add_argument("-t", "--threads", metavar="N", type=int, default=0, help="CPU threads (default: one per core)")
    group.add_argument(
        "-ngl",
        "--gpu-layers",
        metavar="N",
        type=int,
        default=defaults.n_gpu_layers,
        help="layers of the target in device memory (default: all)",
    )
    group.add_argument("-fa", "--flash-attn", choices=("on", "off", "auto"), default=defaults.flash_attn)
    group.add_argument(
        "-ctk", "--cache-type-k", choices=CACHE_TYPES, default=defaults.cache_type_k, help="default: f16"
    )
    group.add_argument(
        "-ctv", "--cache-type-v", choices=CACHE_TYPES, default=defaults.cache_type_v, help="default: f16"
    )
    group.add_argument("--no-mmap", action="store_true", help="read the target's file instead of mapping it")


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """What ``add_model_arguments`` parsed."""
    return EngineOptions(
        n_ctx=args.ctx_size,
        n_batch=args.batch_size,
        n_ubatch=args.ubatch_size,
        n_gpu_layers=args.gpu_layers,
        n_threads=args.threads,
        flash_attn=args.flash_attn,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        n_draft=args.n_draft,
        use_mmap=not args.no_mmap,
    )


_SAMPLING = (
    ("--temp", "temperature", "0 is greedy"),
    ("--top-k", "top_k", "keep the K most likely tokens, 0 is all"),
    ("--top-p", "top_p", "keep the most likely tokens up to this probability, 1 is all"),
    ("--min-p", "min_p", "drop tokens less likely than this share of the most likely, 0 is none"),
    ("--typical", "typical_p", "locally typical sampling, 1 is off"),
    ("--top-nsigma", "top_n_sigma", "keep logits within N standard deviations of the largest, -1 is off"),
    ("--repeat-last-n", "repeat_last_n", "tokens that penalties look back on, -1 is the context"),
    ("--repeat-penalty", "repeat_penalty", "1 is off"),
    ("--presence-penalty", "presence_penalty", "0 is off"),
    ("--frequency-penalty", "frequency_penalty", "0 is off"),
    ("--dry-multiplier", "dry_multiplier", "0 is off"),
    ("--xtc-probability", "xtc_probability", "0 is off"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; llama.cpp's names and defaults."""
    defaults = SamplingOptions()
    group = parser.add_argument_group("sampling")
    group.add_argument("-s", "--seed", metavar="N", type=int, default=-1, help="-1 draws one (default)")
    for flag, name, text in _SAMPLING:
        default = getattr(defaults, name)
        group.add_argument(
            flag, dest=name, metavar="X", type=type(default), default=default, help=f"{text} (default: %(default)s)"
        )
    group.add_argument("--ignore-eos", action="store_true", help="never end the answer by itself")
    group.add_argument("--grammar", metavar="GBNF", default="", help="a grammar that the answer follows")


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """What ``add_sampling_arguments`` parsed."""
    chosen = {name: getattr(args, name) for _, name, _ in _SAMPLING}
    return SamplingOptions(seed=args.seed & 0xFFFFFFFF, ignore_eos=args.ignore_eos, grammar=args.grammar, **chosen)
