"""The memory plan against what llama.cpp and ggml really allocate, and what loading makes of it."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import multiprocessing
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DrafterFactory, SmolFactory, TargetFactory

from dspine_local import Engine, _native
from dspine_local.cli import main
from dspine_local.cli.fit import parse_size
from dspine_local.convert import convert_checkpoint
from dspine_local.errors import BackendError, PairingError
from dspine_local.loading import longest_draft
from dspine_local.options import EngineOptions
from dspine_local.planning import measure as measuring
from dspine_local.planning.devices import Budgets
from dspine_local.planning.fit import Planner
from dspine_local.planning.load import fitting_context
from dspine_local.planning.measure import CPU, PlannedFiles, measure
from dspine_local.planning.shapes import SHAPES, target_tensors, write_shape

MIB, GIB = 1 << 20, 1 << 30
ROOMY = Budgets({CPU: 64 * GIB}, assumed=False)


@pytest.fixture(scope="module")
def pairs(
    tiny_target: TargetFactory,
    tiny_drafter: DrafterFactory,
    smollm2: SmolFactory,
    trained_drafter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, PlannedFiles]:
    """Target and drafter of every kind."""
    folder = tmp_path_factory.mktemp("plans")
    found = {"smollm2": PlannedFiles(str(smollm2("q8_0")), str(trained_drafter))}
    for name, arch, options in (
        ("hybrid", "qwen35", {}),
        ("moe", "qwen3moe", {}),
        ("sliding", "llama", {"sliding_window": 64}),
    ):
        target = tiny_target(arch)
        drafter = folder / f"{name}.gguf"
        convert_checkpoint(tiny_drafter(target, **options), drafter, outtype="f32", target=target.path)
        found[name] = PlannedFiles(str(target.path), str(drafter))
    return found


def allocated(files: PlannedFiles, options: EngineOptions, n_draft: int) -> Counter[str]:
    """Bytes by part of a pair that is loaded and has decoded, by ggml's and llama.cpp's own count."""
    target = _native.Target(
        files.target, n_ctx=options.n_ctx or 0, n_seq=options.n_parallel, n_rollback=n_draft, use_mmap=False
    )
    parts: Counter[str] = Counter()
    if files.drafter is not None:
        drafter = _native.Drafter(files.drafter, target.tensors(), n_seq=options.n_parallel, n_ctx=target.n_ctx_seq)
        target.enable_taps(drafter.target_layers)
        parts.update({f"drafter {part}": n_bytes for _, part, n_bytes in drafter.memory()})
    target.decode(0, [5, 6, 7])
    parts.update({f"target {part}": n_bytes for _, part, n_bytes in target.memory()})
    return parts


@pytest.mark.parametrize("n_parallel", [1, 4])
@pytest.mark.parametrize("n_ctx", [512, 4096, 8192])
@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("kind", ["smollm2", "hybrid", "moe", "sliding"])
def test_plan_is_what_is_allocated(
    pairs: dict[str, PlannedFiles], kind: str, with_drafter: bool, n_ctx: int, n_parallel: int
) -> None:
    files = pairs[kind] if with_drafter else replace(pairs[kind], drafter=None)
    n_draft = longest_draft(files.drafter, None) if files.drafter else 0
    options = EngineOptions(n_ctx=n_ctx, n_parallel=n_parallel)
    planned = {line.part: line.n_bytes for line in measure(files, options, n_ctx, n_draft).lines}
    planned.pop("vocabulary, graphs")  # in no buffer: see the process
    real = allocated(files, options, n_draft)

    state = ("target KV cache", "recurrent state", "recurrent snapshots")
    assert sum(planned.get(part, 0) for part in state) == pytest.approx(real["target cache"], rel=0.03)
    for part, name in (("target weights", "target weights"), ("target compute", "target compute")):
        assert planned[part] == pytest.approx(real[name], rel=0.03)
    assert planned.get("drafter weights", 0) + planned.get("drafter codes", 0) == real["drafter weights"]
    for part in ("drafter cache", "drafter compute"):
        assert planned.get(part, 0) == pytest.approx(real[part], rel=0.03)
    assert sum(planned.values()) == pytest.approx(sum(real.values()), rel=0.03)


def process_growth(files: PlannedFiles, options: EngineOptions, n_draft: int) -> tuple[int, int]:
    """Bytes that are planned, and that this process grows by for an answer behind a prompt that fills a batch."""

    def own_memory() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))

    planned = sum(line.n_bytes for line in measure(files, options, options.n_ctx or 0, n_draft).lines)
    before = own_memory()
    engine = Engine(files.target, files.drafter, options)
    prompt = engine.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 60)
    engine.generate(prompt[: engine.n_ctx - 40], max_tokens=30).read()
    return planned, own_memory() - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of a process")
@pytest.mark.parametrize("with_drafter", [True, False])
def test_plan_is_what_a_process_grows_by(pairs: dict[str, PlannedFiles], with_drafter: bool) -> None:
    """``benchmarks/process_memory.py`` measures more cases."""
    files = pairs["smollm2"] if with_drafter else replace(pairs["smollm2"], drafter=None)
    options = EngineOptions(n_ctx=2048, use_mmap=False)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process whose memory nothing else has shaped
        planned, real = pool.apply(process_growth, (files, options, 7 if with_drafter else 0))
    assert real == pytest.approx(planned, rel=0.03)


def test_snapshots_that_are_counted_are_those_that_would_be_allocated(
    pairs: dict[str, PlannedFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(n_parallel=4)
    exact = {x.part: x.n_bytes for x in measure(pairs["hybrid"], options, 4096, 15).lines}
    monkeypatch.setattr(measuring, "MAX_SNAPSHOT_BYTES", 0)
    counted = {x.part: x.n_bytes for x in measure(pairs["hybrid"], options, 4096, 15).lines}
    for part in exact.keys() - {"target compute"}:
        assert counted[part] == exact[part]
    assert sum(counted.values()) == pytest.approx(sum(exact.values()), rel=0.03)
    assert exact["recurrent snapshots"] == 15 * exact["recurrent state"]


def test_sliding_drafters_cache_does_not_grow_with_the_context(pairs: dict[str, PlannedFiles]) -> None:
    def cache(n_ctx: int) -> int:
        lines = measure(pairs["sliding"], EngineOptions(), n_ctx, 15).lines
        return next(x.n_bytes for x in lines if x.part == "drafter cache")

    assert cache(512) == cache(8192)


def test_planned_models_cannot_compute(pairs: dict[str, PlannedFiles]) -> None:
    files = pairs["hybrid"]
    assert files.drafter is not None
    target = _native.Target(files.target, planned=True)
    with pytest.raises(ValueError, match="only planned"):
        target.decode(0, [1])
    drafter = _native.Drafter(files.drafter, target.tensors())
    with pytest.raises(ValueError, match="only planned"):
        drafter.commit(0, np.zeros((1, drafter.n_taps * drafter.n_embd), np.float32))
    with pytest.raises(ValueError, match="no committed features"):
        drafter.draft([(0, 1)], 1)


def test_plan_of_the_wrong_pair_is_refused(pairs: dict[str, PlannedFiles]) -> None:
    with pytest.raises(PairingError):
        measure(PlannedFiles(pairs["moe"].target, pairs["smollm2"].drafter), EngineOptions(), 512, 7)


@pytest.mark.parametrize("n_parallel", [1, 4])
def test_largest_context_fits_and_the_next_does_not(pairs: dict[str, PlannedFiles], n_parallel: int) -> None:
    options = EngineOptions(n_parallel=n_parallel)
    needed = Planner(pairs["smollm2"], ROOMY, 7).plan(options, 4096).needed(CPU)
    planner = Planner(pairs["smollm2"], Budgets({CPU: needed + 100}, assumed=False), 7)
    largest = planner.largest(options)
    assert largest is not None
    assert largest.n_ctx == 4096
    assert largest.fits
    assert not planner.plan(options, 4096 + 256 * n_parallel).fits


def test_largest_context_is_the_trained_one_or_none(pairs: dict[str, PlannedFiles]) -> None:
    largest = Planner(pairs["smollm2"], ROOMY, 7).largest(EngineOptions())
    assert largest is not None
    assert largest.n_ctx == 8192
    assert Planner(pairs["smollm2"], Budgets({CPU: 64 * MIB}, assumed=False), 7).largest(EngineOptions()) is None


def test_advice_is_measured_and_begins_with_the_cheapest(pairs: dict[str, PlannedFiles]) -> None:
    needed = Planner(pairs["hybrid"], ROOMY, 15).plan(EngineOptions(n_parallel=4), 8192).needed(CPU)
    planner = Planner(pairs["hybrid"], Budgets({CPU: needed - 1}, assumed=False), 15)
    advice = planner.advice(EngineOptions(n_parallel=4), 8192)
    assert [a.change for a in advice] == [
        *(
            "-ub 128",
            "-ctk q8_0 -ctv q8_0",
            "--n-draft 7",
            "-np 1 -c 2048",
            "-c 7168",
            "-ctk q4_0 -ctv q4_0",
            "no drafter",
        )
    ]
    assert all(a.fits and a.saves > 0 for a in advice)


def test_27b_plan_by_its_formulas(tmp_path: Path) -> None:
    files = write_shape("qwen3.8-27b", "Q4_K_M", "q8_0", tmp_path)
    shape = SHAPES["qwen3.8-27b"]
    assert shape.delta is not None
    options = EngineOptions(cache_type_k="q8_0", cache_type_v="q8_0")
    planner = Planner(files, Budgets({"assumed device": 32 * GIB, CPU: 64 * GIB}, assumed=True), 15)
    plan = planner.plan(options, 65536)
    q8_0 = 34 / 32  # bytes per value
    conv = 3 * (2 * 16 * 128 + 48 * 128)
    assert plan.part("target KV cache") == 16 * 65536 * 2 * 4 * 256 * q8_0
    assert plan.part("recurrent state") == 48 * (conv + 48 * 128 * 128) * 4
    assert plan.part("recurrent snapshots") == 15 * plan.part("recurrent state")
    assert plan.part("logits and taps") == (16 * shape.n_vocab + 5 * 512 * shape.n_embd) * 4
    assert plan.part("drafter codes") == shape.n_vocab * 1024 * q8_0
    assert plan.part("drafter cache") == 5 * 65600 * 2 * 8 * 128 * 2
    n_weights = sum(math.prod(size) for _, size in target_tensors(shape))
    assert n_weights == pytest.approx(26.9e9, rel=0.01)
    assert plan.part("target weights") / n_weights * 8 == pytest.approx(4.9, abs=0.1)
    assert plan.fits
    # The files look whole and take no room.
    assert Path(files.target).stat().st_size > 15 * GIB
    assert Path(files.target).stat().st_blocks * 512 < 1 * MIB


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_read_as_models(tmp_path: Path, name: str) -> None:
    files = write_shape(name, "q8_0", "q8_0", tmp_path)
    lines = measure(files, EngineOptions(), 512, 15).lines
    n_weights = sum(math.prod(size) for _, size in target_tensors(SHAPES[name]))
    weights = sum(x.n_bytes for x in lines if x.part == "target weights")
    assert weights == pytest.approx(n_weights * 34 / 32, rel=0.01)


def test_explicit_context_loads_where_only_the_reserve_is_missing(pairs: dict[str, PlannedFiles]) -> None:
    plan = Planner(pairs["smollm2"], ROOMY, 7).plan(EngineOptions(), 2048)
    bare = plan.needed(CPU) - plan.part("reserve")
    options = EngineOptions(n_ctx=2048, use_mmap=False)
    assert fitting_context(pairs["smollm2"], options, 7, Budgets({CPU: bare}, assumed=False)) == 2048
    with pytest.raises(BackendError, match=r"(?s)does not fit: .*target KV cache.*-ctk q8_0"):
        fitting_context(pairs["smollm2"], options, 7, Budgets({CPU: bare - 1}, assumed=False))
    # What is mapped may be larger than what is free.
    mapped = replace(options, use_mmap=True)
    assert fitting_context(pairs["smollm2"], mapped, 7, Budgets({CPU: bare - 1}, assumed=False)) == 2048


def test_automatic_context(pairs: dict[str, PlannedFiles]) -> None:
    files = pairs["smollm2"]
    needed = Planner(files, ROOMY, 7).plan(EngineOptions(), 2048).needed(CPU)
    auto = EngineOptions(n_ctx=None)
    assert fitting_context(files, auto, 7, Budgets({CPU: needed}, assumed=False)) == 2048
    assert fitting_context(files, auto, 7, ROOMY) == 8192
    assert Engine(files.target, n_ctx=None).n_ctx == 8192


def test_command(pairs: dict[str, PlannedFiles], capsys: pytest.CaptureFixture[str]) -> None:
    files = pairs["smollm2"]
    models = ["fit", "-m", files.target, "-md", str(files.drafter), "-c", "4096"]
    assert main([*models, "--ram", "2GiB"]) == 0
    text = capsys.readouterr().out
    assert "4,096 positions, 1 slot, drafts of up to 7" in text
    assert "has 8,192 positions" in text

    def plan(*arguments: str, code: int) -> dict[str, Any]:
        assert main([*models, "--json", *arguments]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    short = plan("--ram", "400MiB", code=1)
    assert not short["fits"]
    assert short["devices"][CPU]["missing"] > 0
    assert short["advice"]
    assert short["largest_n_ctx"] == 0
    assert plan("--ram", "600MiB", "-c", "auto", code=0)["n_ctx"] < 8192
    assert plan("--ram", "2GiB", "--n-draft", "3", code=0)["n_draft"] == 3


def test_a_context_smaller_than_plans_try_is_the_largest_if_it_fits(
    pairs: dict[str, PlannedFiles], capsys: pytest.CaptureFixture[str]
) -> None:
    files = pairs["smollm2"]
    needed = Planner(files, ROOMY, 7).plan(EngineOptions(n_parallel=4), 256).needed(CPU)
    assert (
        main(["fit", "-m", files.target, "-md", str(files.drafter), *f"-np 4 -c 256 --ram {needed} --json".split()])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["largest_n_ctx"] >= 256


def test_command_without_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--model-shape", "qwen3-8b", "--vram", "8GiB", "-c", "40960"]) == 1
    text = capsys.readouterr().out
    assert "It does not fit" in text
    assert "-c " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected one of --model and --model-shape"),
        (["--model-shape", "qwen3-8b", "-m", "x"], "expected one of --model and --model-shape"),
        (["--model-shape", "gpt-5"], "unknown model shape 'gpt-5'"),
        (["--model-shape", "qwen3-8b", "--quant", "Q9"], "unknown quantization 'Q9'"),
        (["--model-shape", "qwen3-8b", "-ngl", "4", "--vram", "8G"], "no such device"),
        (["-m", "missing.gguf"], "missing.gguf"),
        (["-m", "missing.gguf", "--quant", "Q8_0"], "--quant and --drafter-quant belong to --model-shape"),
        (["-m", "missing.gguf", "--drafter-quant", "none"], "--quant and --drafter-quant belong to --model-shape"),
    ],
)
def test_command_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("24GiB", 24 * GIB), ("512M", 512 * MIB), ("1.5g", 1.5 * GIB), ("1TB", 1024 * GIB), ("7000000", 7e6)],
)
def test_sizes(text: str, n_bytes: float) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["32", "0", "٣GiB", "1e9", "GiB", "1000", "0.5K"])
def test_sizes_that_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "-m", "x.gguf", "--ram", text])
    assert "expected a size such as 24GiB" in capsys.readouterr().err


@pytest.mark.parametrize("names", ["", ",", " , "])
def test_devices_without_a_name_are_refused(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "-m", "x.gguf", "--device", names])
    assert "expected names of devices" in capsys.readouterr().err
