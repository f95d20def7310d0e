"""The stages in order, each resumable, in one folder: data/, features/ and a run's own folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspine_local._native import vocab_sha256
from dspine_local.checks import (
    INT32_MAX,
    OptionError,
    need_choice,
    need_collection,
    need_integer,
    need_text,
)
from dspine_local.convert.config import MAX_BLOCK, MAX_LAYERS, MAX_TAPS, MAX_TOP_K, MAX_WIDTH
from dspine_local.engine import Engine
from dspine_local.files import need_regular, output_folder
from dspine_local.options import MAX_PARALLEL, EngineOptions
from dspine_local.train.acceptance import Acceptance
from dspine_local.train.complete import Completer, EngineCompleter
from dspine_local.train.data import DataOptions, Report, complete_shards, count_answer_tokens, generate_data
from dspine_local.train.features import default_taps, make_features
from dspine_local.train.options import TrainOptions
from dspine_local.train.prompts import GivenPrompts, PromptSource, SelfPrompts, read_prompts
from dspine_local.train.shape import KINDS, DrafterShape, shape_for_target
from dspine_local.train.shards import read_json, write_json
from dspine_local.train.torch_generate import TorchGenerator
from dspine_local.train.torch_target import TorchTarget, is_supported
from dspine_local.train.trainer import CHECKPOINT, LOG_FILE, STATE_FILE, Trainer
from dspine_local.train.weights import TargetWeights

STAGES = ("data", "features", "train")
# Options of the data stage that may change between runs: they only say how fast and how much.
FREE = ("n_tokens", "n_parallel", "n_threads")
OPTIONS_FILE = "options.json"


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """The drafter's dimensions, as far as they are free. None is a default that fits the target.

    Args:
        taps: Target layers, from 0, whose outputs are read.
        mask_token: Token whose embedding the proposals start from: one that answers do not contain.
    """

    kind: str = "dspine"
    n_layers: int = 3
    block_size: int = 8
    rank: int = 128
    message_size: int = 64
    top_k: int = 16
    taps: Sequence[int] | None = None
    mask_token: int | None = None

    def __post_init__(self) -> None:
        need_choice("kind", self.kind, KINDS)
        for name, low, high in (
            ("n_layers", 1, MAX_LAYERS),
            ("block_size", 2, MAX_BLOCK),
            ("rank", 1, MAX_WIDTH),
            ("message_size", 1, MAX_WIDTH),
            ("top_k", 1, MAX_TOP_K),
        ):
            need_integer(name, getattr(self, name), low, high)
        if self.taps is not None:
            for tap in need_collection("taps", self.taps, "layers"):
                need_integer("taps", tap, 0)
            if not 1 <= len(set(self.taps)) == len(self.taps) <= MAX_TAPS:
                raise OptionError("taps", list(self.taps), f"1 to {MAX_TAPS} different layers")
        if self.mask_token is not None:
            need_integer("mask_token", self.mask_token, 0)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Everything that one command needs; the folder keeps what was made with which options.

    Args:
        run: Name of the run's folder in ``out``; None is the drafter's kind.
        device: Of PyTorch: ``"cpu"`` or ``"cuda"``.
        backend: What answers and gives features: ``"native"`` (llama.cpp, every architecture that can be tapped), or
            ``"torch"`` (llama and qwen3: both at once).
        live_features: Keep no features, compute them in every step of training: for a GPU.
    """

    target: Path
    out: Path
    run: str | None = None
    device: str = "cpu"
    backend: str = "native"
    live_features: bool = False
    data: DataOptions = field(default_factory=DataOptions)
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    train: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        need_choice("device", self.device, ("cpu", "cuda"))
        need_choice("backend", self.backend, ("native", "torch"))
        if self.run is not None:
            need_text("run", self.run)
            if self.run in ("", ".", "..", *STAGES) or "/" in self.run:
                raise OptionError("run", self.run, f"the name of a folder, but not {' or '.join(STAGES[:2])}")

    @property
    def run_folder(self) -> Path:
        """Where the run's state and checkpoint are."""
        return self.out / (self.run or self.drafter.kind)


def check_inputs(options: PipelineOptions, stages: Sequence[str]) -> None:
    """Find what is wrong with target, prompts and folders before hours of work, and before anything is written.

    Args:
        stages: Those that will be run.
    Raises:
        FileNotFoundError: The target or the prompts are missing.
        ModelFormatError: They, or files of the folder, are not what they should be.
        ValueError: A value that does not fit the target or the machine, or a folder that was made with others.
    """
    for folder in (options.out, options.out / "data", options.out / "features", checkpoint_folder(options)):
        output_folder(folder)
    target = TargetWeights(options.target)
    drafter_shape(options, target)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("device", "cuda", "cpu: PyTorch sees no CUDA device")
    if (options.backend == "torch" or options.live_features) and not is_supported(target):
        raise ValueError(
            f"'{target.path}' (architecture '{target.arch}') has no forward pass in PyTorch here, expected a dense "
            "llama or qwen3: --backend native and no --live-features take every architecture that can be tapped"
        )
    if "data" in stages:
        if options.data.prompts is not None:
            read_prompts(options.data.prompts)
        _same_options(options.out / "data" / OPTIONS_FILE, _data_made_with(options))
        n_context, d = target.integer("context_length"), options.data
        need_integer("max_prompt", d.max_prompt, 1, n_context - 1)
        need_integer("max_answer", d.max_answer, 1, n_context - d.max_prompt)
        if options.backend == "native":
            need_integer("n_parallel", d.n_parallel, 1, min(MAX_PARALLEL, INT32_MAX // _positions(options)))
    uses_features = "features" in stages or ("train" in stages and not options.live_features)
    if uses_features:
        _same_options(options.out / "features" / OPTIONS_FILE, _features_made_with(options))
    _same_options(options.out / "data" / OPTIONS_FILE, {"target": _identity(options.target)})
    for path in (options.run_folder / STATE_FILE, options.run_folder / LOG_FILE):
        if os.path.lexists(path):
            need_regular(path, "a file of the run")


def run_data(options: PipelineOptions, report: Report) -> int:
    """The data stage; answer tokens in all."""
    folder = options.out / "data"
    made_with = _data_made_with(options)
    _same_options(folder / OPTIONS_FILE, made_with)
    if count_answer_tokens(folder) >= options.data.n_tokens:
        return count_answer_tokens(folder)
    per_slot = _positions(options)
    n_slots = options.data.n_parallel
    by_torch = options.backend == "torch"
    # The engine also tokenizes; answering by PyTorch it needs no room.
    engine = Engine(
        options.target,
        None,
        EngineOptions(
            n_ctx=64 if by_torch else per_slot * n_slots,
            n_parallel=1 if by_torch else n_slots,
            n_threads=options.data.n_threads,
        ),
    )
    completer: Completer = EngineCompleter(engine)
    features = None
    if by_torch:
        features = options.out / "features"
        _same_options(features / OPTIONS_FILE, _features_made_with(options))
        if options.data.n_threads:
            torch.set_num_threads(options.data.n_threads)
        torch_target = TorchTarget(TargetWeights(options.target), options.device)
        ends = {token for token in range(engine.target.n_vocab) if engine.target.is_end_of_generation(token)}
        completer = TorchGenerator(torch_target, ends, n_slots, per_slot, resolve_taps(options))
    sizes = {"n_prompts": options.data.shard_size, "max_prompt": options.data.max_prompt}
    source: PromptSource
    if options.data.prompts is None:
        source = SelfPrompts(completer, engine.tokenizer, seed=options.data.seed, **sizes)
    else:
        source = GivenPrompts(options.data.prompts, engine.tokenizer, **sizes)
    _remember(folder / OPTIONS_FILE, made_with)
    if features is not None:
        _remember(features / OPTIONS_FILE, _features_made_with(options))
    n_tokens = generate_data(completer, source, folder, options.data, report, features)
    if not n_tokens:
        raise ValueError(
            "the target made up no sound prompt: give a file with --prompts"
            if options.data.prompts is None
            else f"no prompt in '{options.data.prompts}' has at most {options.data.max_prompt} tokens (max_prompt), "
            "those of the chat template included"
        )
    return n_tokens


def run_features(options: PipelineOptions, report: Report) -> int:
    """The features stage; shards with features."""
    folder, data = options.out / "features", options.out / "data"
    if not complete_shards(data):
        raise FileNotFoundError(f"no data in '{data}', expected shards of the data stage")
    _same_options(folder / OPTIONS_FILE, _features_made_with(options))
    _remember(folder / OPTIONS_FILE, _features_made_with(options))
    return make_features(
        options.target,
        data,
        folder,
        resolve_taps(options),
        report,
        n_threads=options.data.n_threads,
        device=options.device,
        use_torch=options.backend == "torch",
    )


def run_training(options: PipelineOptions, report: Report) -> Acceptance | None:
    """The training stage; the acceptance length measured last."""
    target = TargetWeights(options.target)
    trainer = Trainer(
        options.run_folder,
        target,
        options.out / "data",
        None if options.live_features else options.out / "features",
        drafter_shape(options, target),
        options.train,
        options.device,
    )
    return trainer.run(report)


def checkpoint_folder(options: PipelineOptions) -> Path:
    """The run's best checkpoint."""
    return options.run_folder / CHECKPOINT


def drafter_shape(options: PipelineOptions, target: TargetWeights) -> DrafterShape:
    """The drafter's dimensions for this target."""
    d = options.drafter
    return shape_for_target(
        target,
        kind=d.kind,
        taps=resolve_taps(options),
        mask_token_id=default_mask(target) if d.mask_token is None else d.mask_token,
        n_layers=d.n_layers,
        block_size=d.block_size,
        rank=d.rank,
        message_size=d.message_size,
        top_k=d.top_k,
    )


def resolve_taps(options: PipelineOptions) -> tuple[int, ...]:
    """Layers to tap, numbered from 0; the last layer's output is nobody's input and cannot be."""
    if options.drafter.taps is not None:
        return tuple(options.drafter.taps)
    return tuple(default_taps(TargetWeights(options.target).n_layers))


def default_mask(target: TargetWeights) -> int:
    """A control token that no chat uses, else token 0."""
    tokens = target.key("tokenizer.ggml.tokens", prefixed=False)
    types = target.key("tokenizer.ggml.token_type", [], prefixed=False)
    used = {
        target.key(f"tokenizer.ggml.{name}_token_id", -1, prefixed=False) for name in ("bos", "eos", "eot", "padding")
    }
    template = target.key("tokenizer.chat_template", "", prefixed=False)
    control = [i for i, kind in enumerate(types) if kind == 3 and i not in used and tokens[i] not in template]
    return control[-1] if control else 0


def _positions(options: PipelineOptions) -> int:
    """Of one conversation, with room for what a chat template adds."""
    return options.data.max_prompt + options.data.max_answer + 32


def _data_made_with(options: PipelineOptions) -> dict[str, Any]:
    made_with = {name: value for name, value in asdict(options.data).items() if name not in FREE}
    return made_with | {"target": _identity(options.target), "backend": options.backend}


def _features_made_with(options: PipelineOptions) -> dict[str, Any]:
    return {"target": _identity(options.target), "taps": list(resolve_taps(options)), "backend": options.backend}


def _identity(target: Path) -> str:
    """Tells one target file from another wherever it lies."""
    return f"{target.name}, {target.stat().st_size} bytes, vocabulary {vocab_sha256(str(target))[:16]}"


def _same_options(path: Path, wanted: dict[str, Any]) -> None:
    """Refuse to use a folder that was made with anything else; one without a note is new."""
    if not os.path.lexists(path):
        return
    stored = read_json(path)
    for name, value in _plain(wanted).items():
        if stored.get(name) != value:
            raise ValueError(
                f"'{path.parent}' was made with {name} = {stored.get(name)!r}, now {value!r}: give the same as before "
                "to resume, or another folder"
            )


def _remember(path: Path, made_with: dict[str, Any]) -> None:
    if not path.exists():
        write_json(path, _plain(made_with))


def _plain(made_with: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in made_with.items()}
