"""Arguments that several commands share, named as in llama.cpp where it has them, and the options they stand for.

Each argument's ``dest`` is the name of its option, so that an ``OptionError`` can be told in the command line's words.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from dspine_local.checks import check_encodable, decode_utf8
from dspine_local.options import (
    CACHE_TYPES,
    DRAFTER_CACHE_TYPES,
    FLASH_ATTN,
    SAMPLERS,
    SPLIT_MODES,
    EngineOptions,
    SamplingOptions,
)
from dspine_local.rpc import connect


def option_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The command line's name of each option: the first long one."""
    return {
        action.dest: next((flag for flag in action.option_strings if flag.startswith("--")), action.option_strings[0])
        for action in parser._actions
        if action.option_strings
    }


def add_threads_argument(parser: argparse._ActionsContainer) -> None:
    """The number of CPU threads."""
    parser.add_argument(
        "-t",
        "--threads",
        dest="n_threads",
        metavar="N",
        type=_threads,
        default=0,
        help="CPU threads, 512 at most (default: 0, one per core)",
    )


def add_predict_argument(parser: argparse._ActionsContainer, default: int, text: str = "tokens per answer") -> None:
    """The answer's length; a ``default`` below 0 is no limit, and not shown."""
    parser.add_argument(
        *("-n", "--predict", "--n-predict"),
        dest="max_tokens",
        metavar="N",
        type=int,
        default=default,
        help=f"{text} (default: to the end of the context)" if default < 0 else text,
    )


def add_parallel_argument(parser: argparse._ActionsContainer) -> None:
    """The number of slots."""
    parser.add_argument(
        "-np",
        "--parallel",
        dest="n_parallel",
        metavar="N",
        type=int,
        default=1,
        help="slots: requests at the same time; they share -c",
    )


def add_model_arguments(
    parser: argparse.ArgumentParser,
    *,
    drafter: str = "its drafter; without one, plain decoding",
    default_length: str = "chosen every round by measurement",
    draft_length: bool = True,
    need_model: bool = True,
    strict: bool = False,
) -> None:
    """Target, drafter and how they are loaded.

    Args:
        drafter: Help of ``-md``.
        default_length: What is drafted without ``--n-draft``, for its help.
        draft_length: Whether there is ``--n-draft``; without it the length is chosen automatically.
        need_model: Whether ``-m`` must be given.
        strict: Whether there is ``--strict``.
    """
    defaults = EngineOptions()
    group = parser.add_argument_group("models")
    group.add_argument("-m", "--model", metavar="TARGET.gguf", required=need_model, help="the target")
    group.add_argument(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        metavar="DRAFTER.gguf",
        help=drafter,
    )
    if draft_length:
        group.add_argument(
            "--n-draft",
            metavar="K",
            type=int,
            help=f"tokens drafted per round (default: {default_length}; 0 is plain decoding)",
        )
    else:
        parser.set_defaults(n_draft=None)
    if strict:
        group.add_argument(
            "--strict",
            action="store_true",
            help="draft only as much as changes no bit of the answer here, by `dspine-local audit`, or a short one now",
        )
    else:
        parser.set_defaults(strict=False)
    group.add_argument(
        "-c",
        "--ctx-size",
        dest="n_ctx",
        metavar="N",
        type=_positions,
        default=defaults.n_ctx,
        help="positions for prompt and answer; 0 is what the target was trained for, 'auto' as "
        "many of these as fit into memory",
    )
    for short, long, name, text in (
        ("-b", "--batch-size", "n_batch", "tokens of one decode at most"),
        ("-ub", "--ubatch-size", "n_ubatch", "tokens of one compute graph at most"),
    ):
        group.add_argument(
            *(short, long),
            dest=name,
            metavar="N",
            type=int,
            default=getattr(defaults, name),
            help=text,
        )
    add_threads_argument(group)
    group.add_argument(
        "-tb",
        "--threads-batch",
        dest="n_threads_batch",
        metavar="N",
        type=_threads,
        default=0,
        help="CPU threads for longer batches (default: as -t)",
    )
    group.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        dest="n_gpu_layers",
        metavar="N",
        type=_layers,
        default=defaults.n_gpu_layers,
        help="layers of the target in device memory; -1 or 'all' is all (default)",
    )
    _add_device_arguments(group)
    group.add_argument("-fa", "--flash-attn", choices=FLASH_ATTN, default=defaults.flash_attn, help="flash attention")
    types: tuple[tuple[tuple[str, ...], str, str, tuple[str, ...]], ...] = (
        (("-ctk", "--cache-type-k"), "cache_type_k", "the target's keys", CACHE_TYPES),
        (("-ctv", "--cache-type-v"), "cache_type_v", "the target's values", CACHE_TYPES),
        (
            ("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"),
            "draft_k",
            "the drafter's keys",
            DRAFTER_CACHE_TYPES,
        ),
        (
            ("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"),
            "draft_v",
            "its values, the same as of its keys",
            DRAFTER_CACHE_TYPES,
        ),
    )
    for flags, name, text, choices in types:
        group.add_argument(
            *flags,
            dest=name,
            metavar="TYPE",
            choices=choices,
            default="f16",
            help=f"type of {text}: {', '.join(choices)}",
        )
    group.add_argument("--no-mmap", action="store_true", help="read the target's file instead of mapping it")


def _add_device_arguments(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        *("-dev", "--device"),
        dest="devices",
        metavar="NAMES",
        type=_devices,
        help="devices for the target's layers, separated by commas, or 'none' for the CPU alone (default: all; "
        "`dspine-local doctor` lists them)",
    )
    group.add_argument(
        *("-devd", "--device-draft", "--spec-draft-device", "--drafter-device"),
        dest="drafter_device",
        metavar="NAME",
        type=lambda name: "CPU" if name == "none" else name,
        help="the drafter's device (default: where the target's output matrix lies)",
    )
    group.add_argument(
        *("-sm", "--split-mode"),
        choices=SPLIT_MODES,
        default=EngineOptions().split_mode,
        help="layers over all devices, or none: all layers on the first",
    )
    group.add_argument(
        *("-ts", "--tensor-split"),
        metavar="X,...",
        type=_shares,
        default=(),
        help="shares of the devices, in their order (default: by free memory)",
    )
    group.add_argument(
        "--rpc",
        dest="rpc_servers",
        metavar="HOST:PORT,...",
        type=_names_by_comma,
        default=(),
        help="machines that run llama.cpp's rpc-server: their devices join this one's",
    )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """What ``add_model_arguments`` parsed.

    Raises:
        ValueError: A value out of range, or the drafter's keys and values of two types.
    """
    if args.draft_k != args.draft_v:
        raise ValueError(
            f"--cache-type-k-draft {args.draft_k} and --cache-type-v-draft {args.draft_v}, expected the same: the "
            "drafter keeps keys and values in one type"
        )
    if args.n_draft and args.model is not None and args.model_draft is None:
        raise ValueError(f"--n-draft {args.n_draft} needs a drafter: -md DRAFTER.gguf")
    connect(args.rpc_servers)
    names = (
        *("devices", "split_mode", "tensor_split", "drafter_device"),
        *("n_ctx", "n_batch", "n_ubatch", "n_gpu_layers", "n_threads", "n_threads_batch", "n_draft"),
        *("flash_attn", "cache_type_k", "cache_type_v", "strict"),
    )
    return EngineOptions(
        cache_type_drafter=args.draft_k, use_mmap=not args.no_mmap, **{name: getattr(args, name) for name in names}
    )


_SAMPLING = (
    (("--temp", "--temperature"), "temperature", "0 is greedy"),
    (("--top-k",), "top_k", "keep the K most likely tokens, 0 or less is all"),
    (("--top-p",), "top_p", "keep the most likely tokens up to this probability, 1 is all"),
    (("--min-p",), "min_p", "drop tokens less likely than this share of the most likely, 0 is none"),
    (("--typical", "--typical-p"), "typical_p", "locally typical sampling, 1 is off"),
    (("--top-nsigma", "--top-n-sigma"), "top_n_sigma", "keep logits within N standard deviations, -1 is off"),
    (("--xtc-probability",), "xtc_probability", "chance that XTC drops the likeliest tokens but one, 0 is off"),
    (("--xtc-threshold",), "xtc_threshold", "probability from which a token is one of these, above 0.5 is off"),
    (("--dynatemp-range",), "dynatemp_range", "how far the temperature follows the entropy, 0 is off"),
    (("--dynatemp-exp",), "dynatemp_exponent", "exponent of the dynamic temperature"),
    (("--repeat-last-n",), "repeat_last_n", "tokens that penalties look back on, 0 is off, -1 the context"),
    (("--repeat-penalty",), "repeat_penalty", "1 is off"),
    (("--presence-penalty",), "presence_penalty", "0 is off"),
    (("--frequency-penalty",), "frequency_penalty", "0 is off"),
    (("--dry-multiplier",), "dry_multiplier", "strength of DRY, which penalizes repeated sequences, 0 is off"),
    (("--dry-base",), "dry_base", "growth of the penalty per repeated token, below 1 is off"),
    (("--dry-allowed-length",), "dry_allowed_length", "tokens that may repeat without penalty"),
    (("--dry-penalty-last-n",), "dry_penalty_last_n", "tokens that DRY looks back on, 0 is off, -1 the context"),
    (("--min-keep",), "min_keep", "tokens that top-p, min-p, typical and XTC leave at least"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; llama.cpp's names, and its server's defaults."""
    defaults = SamplingOptions()
    group = parser.add_argument_group("sampling")
    group.add_argument("-s", "--seed", metavar="N", type=int, default=-1, help="32 bits; -1 draws one (default)")
    for flags, name, text in _SAMPLING:
        default = getattr(defaults, name)
        group.add_argument(*flags, dest=name, metavar="X", type=type(default), default=default, help=f"{text}")
    group.add_argument(
        "--samplers",
        metavar="NAMES",
        type=_names,
        default=defaults.samplers,
        help="in this order, separated by ';'; one that is missing is not used (default: " + ";".join(SAMPLERS) + ")",
    )
    group.add_argument(
        "--dry-sequence-breaker",
        dest="dry_sequence_breakers",
        metavar="TEXT",
        action="append",
        help="ends a repetition, in place of line break, colon, quotation mark and asterisk; may be repeated",
    )
    group.add_argument(
        "-l",
        "--logit-bias",
        metavar="TOKEN-X",
        type=_bias,
        action="append",
        default=[],
        help="change a token's logit, such as 15043+1, 15043-1 or 15043-inf; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", help="never end the answer by itself")
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument("--grammar", metavar="GBNF", default="", help="a grammar that the answer follows")
    grammar.add_argument("--grammar-file", metavar="FILE", help="read the grammar from a file")


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """What ``add_sampling_arguments`` parsed.

    Raises:
        FileNotFoundError: No such grammar file.
        ValueError: A value out of range, or a grammar that is not UTF-8.
    """
    grammar = given_text("--grammar", args.grammar)
    if args.grammar_file is not None:
        grammar = decode_utf8(f"the file '{args.grammar_file}'", Path(args.grammar_file).read_bytes())
        if not grammar.strip():
            raise ValueError(f"the grammar file '{args.grammar_file}' is empty")
    chosen = {name: getattr(args, name) for _, name, _ in _SAMPLING}
    if args.dry_sequence_breakers is not None:
        chosen["dry_sequence_breakers"] = tuple(
            given_text("--dry-sequence-breaker", t) for t in args.dry_sequence_breakers
        )
    return SamplingOptions(
        seed=args.seed,
        samplers=args.samplers,
        ignore_eos=args.ignore_eos,
        grammar=grammar,
        logit_bias=tuple(args.logit_bias),
        **chosen,
    )


def given_text(name: str, text: str) -> str:
    """A text from the command line.

    Raises:
        ValueError: Its bytes are not UTF-8.
    """
    check_encodable(name, text)
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(";") if name.strip())


def _names_by_comma(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _devices(text: str) -> tuple[str, ...]:
    names = _names_by_comma(text)
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}, expected names of devices, or 'none' for the CPU alone")
    return () if names == ("none",) else names


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in re.split("[,/]", text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected numbers separated by commas, such as 3,1") from None


def _threads(text: str) -> int:
    """llama.cpp takes -1 for its own choice, too."""
    return 0 if text == "-1" else _integer(text, "a number of threads")


def _positions(text: str) -> int | None:
    return None if text == "auto" else _integer(text, "a number of positions, or 'auto'")


def _layers(text: str) -> int:
    return -1 if text == "all" else _integer(text, "a number of layers, or 'all'")


def _integer(text: str, expected: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}") from None


def _bias(text: str) -> tuple[int, float]:
    parts = re.fullmatch(r"(\d+)([+-][^+-].*)", text)
    try:
        if parts is not None:
            return int(parts[1]), float(parts[2])
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}, expected TOKEN+X or TOKEN-X, such as 15043-1")
