"""Third stage: optimizes a drafter on features. Stopping and resuming gives the same weights as not stopping.

Nothing random has a state: sequences, anchors, sampled tokens and replaced blocks follow from seed and step.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspine_local.errors import BackendError, ModelFormatError
from dspine_local.files import need_regular
from dspine_local.train.acceptance import Acceptance, measure_acceptance
from dspine_local.train.batch import Batch, collate, draw_anchors, epoch_order, split
from dspine_local.train.export import export_checkpoint
from dspine_local.train.features import FeatureSet
from dspine_local.train.init import initialize
from dspine_local.train.live import Features, LiveFeatures
from dspine_local.train.losses import TokenSubset, block_loss, frequent_tokens
from dspine_local.train.model import Drafter
from dspine_local.train.options import TrainOptions
from dspine_local.train.shape import DrafterShape
from dspine_local.train.shards import write_whole
from dspine_local.train.torch_target import fast_dtype
from dspine_local.train.weights import TargetWeights

STATE_FILE, LOG_FILE, CHECKPOINT = "state.pt", "log.jsonl", "checkpoint"

Report = Callable[[int, int, str], None]


@dataclass
class Progress:
    """Where training is: all that a resumed run must know beside weights and optimizer.

    ``shards`` are those of the running epoch: what appears later is used from the next epoch on.
    """

    step: int = 0
    epoch: int = 0
    cursor: int = 0
    best: float = 0.0
    shards: tuple[str, ...] = ()


class Trainer:
    """One training run in a folder of its own.

    Args:
        folder: Of the run: ``state.pt``, ``log.jsonl`` and the best ``checkpoint/``.
        data: Shards of the data stage.
        features: Those of the features stage; None computes them for every step, which a GPU does in no time.
    """

    def __init__(
        self,
        folder: Path,
        target: TargetWeights,
        data: Path,
        features: Path | None,
        shape: DrafterShape,
        options: TrainOptions,
        device: str = "cpu",
    ) -> None:
        self.folder, self.options, self.shape = folder, options, shape
        self.device = torch.device(device)
        self._places, self._target = (data, features), target
        self.embedding = torch.from_numpy(np.array(target.embedding)).to(self.device)
        self.head = torch.from_numpy(np.array(target.head)).to(self.device)
        self.drafter = Drafter(shape)
        self.progress = Progress()
        self._interrupted = False
        state = self._read_state()
        if state is None:
            initialize(self.drafter, target, options.seed, from_target=options.from_target)
        self.drafter.to(self.device)
        self._optimizers = make_optimizers(self.drafter, options)
        if state is None:
            self.average = {name: value.clone() for name, value in self.drafter.state_dict().items()}
            self._begin_epoch(0)
            self._counts = self._count_tokens()
        else:
            self._restore(state)
        self._frequent, self._rare = frequent_tokens(self._counts, options.objective.n_frequent)

    def run(self, report: Report) -> Acceptance | None:
        """Train to the last step; the acceptance length measured last, None when there was nothing left to do.

        Raises:
            KeyboardInterrupt: Asked to stop; the state was saved.
            BackendError: The loss is no longer finite; the last good state and checkpoint are kept.
        """
        acceptance: Acceptance | None = None
        options, progress = self.options, self.progress
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._stop_between_steps():
            while progress.step < options.n_steps:
                values = self._step()
                progress.step += 1
                label = f"loss {values['loss']:.3f}, right {values.get('top1_refined', values['top1']):.3f}"
                report(progress.step, options.n_steps, f"{label}, best {progress.best:.3f}")
                last = progress.step == options.n_steps
                if progress.step % options.eval_every == 0 or last:
                    acceptance = self._evaluate()
                    values |= {"acceptance": acceptance.length, "by_position": acceptance.by_position}
                if progress.step % 10 == 0 or progress.step == 1 or last:
                    self._log(values)
                if progress.step % options.save_every == 0 or last or self._interrupted:
                    self._save()
                if self._interrupted:
                    raise KeyboardInterrupt
        return acceptance

    def _step(self) -> dict[str, Any]:
        options, step = self.options, self.progress.step
        rng = np.random.default_rng([options.seed, 2, step])
        batch = self._draw(rng).to(self.device)
        replaced = torch.from_numpy(rng.random(tuple(batch.anchors.shape)) < options.replacement_probability(step))
        subset = TokenSubset(
            self._frequent, self._rare, batch.labels[batch.weight > 0], options.objective.n_sampled, rng
        )
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=fast_dtype(self.device) == torch.bfloat16):
            parts = block_loss(
                self.drafter,
                batch,
                self.embedding,
                self.head,
                subset,
                options.objective,
                l1_share=options.l1_share(step),
                replaced=replaced.to(self.device) if self.shape.injection else None,
            )
        parts.total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), options.max_norm).item()
        if not np.isfinite(parts.values["loss"]) or not np.isfinite(norm):
            raise BackendError(
                f"training diverged at step {step}: loss {parts.values['loss']}, gradient norm {norm}; the last good "
                f"state is kept in '{self.folder}', try a smaller learning rate than {options.learning_rate:g}"
            )
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * options.rate(step)
            optimizer.step()
        share = options.average_share(step)
        with torch.no_grad():
            for name, value in self.drafter.named_parameters():
                self.average[name].lerp_(value, 1 - share)
        return {**parts.values, "norm": norm}

    def _draw(self, rng: np.random.Generator) -> Batch:
        options, progress = self.options, self.progress
        if progress.cursor + options.n_sequences > len(self._order):
            self._begin_epoch(progress.epoch + 1)
        chosen = self._order[progress.cursor : progress.cursor + options.n_sequences]
        progress.cursor += len(chosen)
        rows = self._features.rows(chosen)
        anchors = [draw_anchors(row.sequence, options.n_anchors, rng) for row in rows]
        n_slots = self.shape.block_size
        if self.shape.causal and rng.random() < options.short_share:
            n_slots = n_slots // 2 + 1
        return collate(rows, anchors, n_slots, self._features.scales, options.decay)

    def _begin_epoch(self, epoch: int) -> None:
        """Use all shards that are there by now."""
        self._open(self._find(None), epoch)
        self.progress.cursor = 0

    def _find(self, shards: Sequence[str] | None) -> Features:
        data, features = self._places
        if features is None:
            return LiveFeatures(data, self._target, self.shape.taps, self.device, shards)
        return FeatureSet(data, features, shards)

    def _open(self, features: Features, epoch: int) -> None:
        if tuple(features.taps) != self.shape.taps:
            raise ValueError(f"the features are of taps {features.taps}, the drafter has {list(self.shape.taps)}")
        for sequence in features.sequences:
            if max(sequence.tokens) >= self.shape.vocab_size:
                raise ModelFormatError(
                    f"the data in '{self._places[0]}' has token {max(sequence.tokens)}, the target has "
                    f"{self.shape.vocab_size} tokens: it was made with another one"
                )
        self._features = features
        train, held_out = split(features)
        if len(train) < self.options.n_sequences:
            raise ValueError(
                f"'{self._places[0]}' has {len(train)} answers to train on, expected at least "
                f"{self.options.n_sequences}, those of a step: more prompts or tokens, or fewer --sequences"
            )
        self._order = epoch_order(train, self.options.seed, epoch)
        greedy = [i for i in held_out if features.sequences[i].temperature == 0]
        self._held_out = features.rows((greedy or held_out)[: self.options.n_held_out])
        self.progress.epoch, self.progress.shards = epoch, tuple(features.shards)

    def _count_tokens(self) -> Tensor:
        counts = torch.zeros(self.shape.vocab_size, dtype=torch.int64)
        for sequence in self._features.sequences:
            counts += torch.bincount(
                torch.tensor(sequence.tokens[sequence.answer_start :]), minlength=self.shape.vocab_size
            )
        return counts.to(self.device)

    def _evaluate(self) -> Acceptance:
        current = {name: value.clone() for name, value in self.drafter.state_dict().items()}
        self.drafter.load_state_dict(self.average)
        try:
            acceptance = measure_acceptance(
                self.drafter, self._held_out, self._features.scales, self.embedding, self.head
            )
        finally:
            self.drafter.load_state_dict(current)
        if acceptance.length > self.progress.best:
            self.progress.best = acceptance.length
            export_checkpoint(self.folder / CHECKPOINT, self.shape, self.average, self._features.scales)
        return acceptance

    def _log(self, values: dict[str, Any]) -> None:
        entry = {"step": self.progress.step, "epoch": self.progress.epoch, **values}
        with (self.folder / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _save(self) -> None:
        state = {
            "progress": asdict(self.progress),
            "shape": asdict(self.shape),
            "options": asdict(self.options),
            "drafter": self.drafter.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "counts": self._counts,
        }
        write_whole(self.folder / STATE_FILE, lambda partial: torch.save(state, partial))

    def _read_state(self) -> dict[str, Any] | None:
        path = self.folder / STATE_FILE
        if not path.exists():
            return None
        need_regular(path, "the run's state")
        try:
            state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
            made_with = [dict(state[what]) for what in ("shape", "options")]
        except MemoryError:
            raise
        except Exception as error:  # whatever a damaged archive makes of it
            raise self._damaged(error) from error
        for what, stored, wanted in (
            ("shape", made_with[0], asdict(self.shape)),
            ("options", made_with[1], asdict(self.options)),
        ):
            changed = [name for name, value in wanted.items() if stored.get(name) != value]
            if changed:
                name = changed[0]
                raise ValueError(
                    f"'{path}' was made with {what} {name} = {stored.get(name)!r}, now {wanted[name]!r}: give the same "
                    "as before to resume, or another folder"
                )
        return state

    def _damaged(self, error: Exception) -> ModelFormatError:
        # Not what PyTorch says of it, which is long and recommends to trust the file.
        return ModelFormatError(
            f"'{self.folder / STATE_FILE}' is damaged ({type(error).__name__}): delete it to train from the beginning"
        )

    def _restore(self, state: dict[str, Any]) -> None:
        try:
            self.progress = Progress(**state["progress"])
            cursor = self.progress.cursor
            self.drafter.load_state_dict(state["drafter"])
            self.average = state["average"]
            for optimizer, stored in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(stored)
            self._counts = state["counts"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise self._damaged(error) from error
        self._open(self._find(self.progress.shards), self.progress.epoch)
        self.progress.cursor = cursor

    @contextmanager
    def _stop_between_steps(self) -> Iterator[None]:
        """Let Ctrl-C end the run after the running step, with its state saved."""

        def ask(_signal: int, _frame: object) -> None:
            self._interrupted = True

        try:
            before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: nobody can interrupt it
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make_optimizers(drafter: Drafter, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layers' matrices beside it. ``peak`` is each group's learning rate."""
    matrices, decayed, others = [], [], []
    for name, parameter in drafter.named_parameters():
        if parameter.ndim != 2:
            others.append(parameter)
        elif options.optimizer == "muon" and name.startswith("layers."):
            matrices.append(parameter)
        else:
            decayed.append(parameter)
    rate = options.learning_rate
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay, "peak": rate},
        {"params": others, "weight_decay": 0.0, "peak": rate},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=True)
    ]
    if matrices:
        group = [{"params": matrices, "peak": rate}]
        optimizers.append(
            torch.optim.Muon(
                group, lr=rate, weight_decay=options.weight_decay, ns_steps=4, adjust_lr_fn="match_rms_adamw"
            )
        )
    return optimizers
