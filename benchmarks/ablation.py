"""What every part of a drafter, and every quantization, is worth in acceptance length: one row per change.

    python benchmarks/ablation.py [--checkpoint DIR] [--limit N] [-n TOKENS] [--json]

Parts are switched off in copies of the trained checkpoint, not trained again: a write matrix of zeros writes nothing,
and one candidate per slot leaves the last write nothing to choose. A drafter trained without a part would make up for
some of what is lost here, so these rows say what the trained drafter relies on, not what a simpler method would reach.
Targets are requantized from the demo's. Acceptance lengths are counted at temperature 0: load does not change them.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common import environment, parser, print_environment, requantize, table
from safetensors.torch import load_file, save_file

from dspine_local import Engine
from dspine_local.convert import convert_checkpoint
from dspine_local.demo import drafter_checkpoint, smollm2_path
from dspine_local.evaluation.measure import EvaluationReport, evaluate
from dspine_local.evaluation.prompts import Prompt, load_prompts, own_prompts
from dspine_local.progress import progress_bar

CODES = "transfer_codes"
WRITE = re.compile(r"injection\.writes\.(\d+)\.weight")
N_CTX, N_PARALLEL = 1024, 4


@dataclass(frozen=True)
class Case:
    """One row: what is left of the drafter, its type, and the target's type (None: the demo's own, Q4_1).

    Attributes:
        writes: Layers whose write is on.
        one_candidate: Nothing is left for the last write to choose from.
        codes: Predecessors whose token is known say so: the anchor in every layer, and any in the last write.
    """

    name: str
    writes: Literal["all", "last", "none"] = "all"
    one_candidate: bool = False
    codes: bool = True
    outtype: str = "q8_0"
    target: str | None = "Q8_0"


CASES = (
    Case("whole"),
    Case("no last-write refinement", one_candidate=True),
    Case("nor the anchor's code", one_candidate=True, codes=False),
    Case("a write in the last layer only", writes="last"),
    Case("no injection", writes="none", one_candidate=True),
    Case("drafter Q6_K", outtype="q6_k"),
    Case("drafter Q4_K", outtype="q4_k"),
    Case("drafter Q4_0", outtype="q4_0"),
    Case("target Q4_K_M", target="Q4_K_M"),
    Case("target Q4_1", target=None),
)


def ablated(checkpoint: Path, case: Case, out: Path) -> Path:
    """A copy of the checkpoint without what the case leaves out; the checkpoint itself when that is nothing."""
    if case.writes == "all" and case.codes and not case.one_candidate:
        return checkpoint
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    if case.one_candidate:
        config["dspine_config"]["top_k"] = 1
    last = str(config["num_hidden_layers"] - 1)
    for name, tensor in tensors.items():
        write = WRITE.fullmatch(name)
        is_off = write and (case.writes == "none" or (case.writes == "last" and write[1] != last))
        if is_off or (name == CODES and not case.codes):
            tensor.zero_()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    return out


def measure(case: Case, checkpoint: Path, prompts: Sequence[Prompt], max_tokens: int, work: Path) -> EvaluationReport:
    """Acceptance of one case on all prompts, with drafts of the whole block."""
    demo = smollm2_path()
    target = requantize(demo, work / f"{case.target}.gguf", case.target) if case.target else demo
    drafter = work / "drafter.gguf"
    source = ablated(checkpoint, case, work / "ablated")
    convert_checkpoint(source, drafter, outtype=case.outtype, target=target, overwrite=True)
    engine = Engine(target, drafter, n_ctx=N_CTX * N_PARALLEL, n_parallel=N_PARALLEL)
    with progress_bar(case.name, unit="steps") as report:
        return evaluate(engine, prompts, max_tokens=max_tokens, report=report)


def row(name: str, result: EvaluationReport) -> list[str]:
    """The mean, every category, and the mean share of drafts accepted up to the first positions."""
    shares = [
        sum(c.accepted_by_position[i] for c in result.categories) / len(result.categories)
        for i in range(min(3, result.n_draft))
    ]
    lengths = [result.mean, *(c.acceptance_length for c in result.categories)]
    return [name, *(f"{length:.3f}" for length in lengths if length), *(f"{100 * share:.1f}%" for share in shares)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--checkpoint", type=Path, default=drafter_checkpoint())
    options.add_argument("--limit", type=int, help="prompts of each category (default: all)")
    options.add_argument("-n", dest="max_tokens", type=int, default=96, help="tokens of each answer (default: 96)")
    args = options.parse_args()
    prompts = load_prompts(own_prompts(), limit=args.limit)
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work_dir or Path(temporary)
        results = {case.name: measure(case, args.checkpoint, prompts, args.max_tokens, work) for case in CASES}
    if args.json:
        print(json.dumps({"environment": environment(), "results": {k: r.to_json() for k, r in results.items()}}))
        return
    print_environment()
    print()
    categories = [c.category for c in results["whole"].categories]
    header = ["", "mean", *categories, "first", "second", "third"]
    print(table(header, [row(name, result) for name, result in results.items()]))


if __name__ == "__main__":
    main()
