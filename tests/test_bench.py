"""The bench command's parts on made-up timings: order, statistics, the check of answers, pictures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_rig import EMPTY, MadeUpSystem, made_up

from dspine_local import Engine
from dspine_local.bench.profile import load_profile
from dspine_local.bench.report import ALL, BenchReport, Spread, make_report, spread, summarize_system
from dspine_local.bench.run import Measurement, make_tasks, run_systems, schedule
from dspine_local.bench.systems import Task, default_modes, parse_modes
from dspine_local.checks import OptionError
from dspine_local.costs import DraftCosts
from dspine_local.evaluation.prompts import Prompt, load_prompts, own_prompts

TASKS = [Task("math", "one", (1,)), Task("math", "two", (2,)), Task("chat", "three", (3,))]
COSTS = DraftCosts([(1, 10.0), (2, 20.0)], [(1, 5.0)])


def report_of(measurements: list[Measurement], **more: Any) -> BenchReport:
    names = dict.fromkeys(m.system for m in measurements)
    systems = [MadeUpSystem(name, [], is_ours=not name.startswith("server")) for name in names]
    return make_report(systems, TASKS, measurements, setting={}, **more)


def test_modes() -> None:
    assert parse_modes("plain, fixed:3,auto") == {"plain": 0, "fixed:3": 3, "auto": None}
    assert list(default_modes(15)) == ["plain", "fixed:3", "fixed:7", "auto"]
    assert list(default_modes(5)) == ["plain", "fixed:3", "auto"]
    assert list(default_modes(0)) == ["plain"]
    for wrong in ("", "plain,", "fast", "fixed", "fixed:0", "fixed:-1", "fixed:x", "plain,plain", "fixed:1234567"):
        with pytest.raises(OptionError, match="different modes of plain, fixed:K and auto"):
            parse_modes(wrong)


def test_every_system_is_first_equally_often_and_for_every_prompt() -> None:
    order = schedule(3, 6, 3)
    assert len(order) == len(set(order)) == 54
    turns = [order[i : i + 3] for i in range(0, 54, 3)]
    assert all(len({(r, task) for r, task, _ in turn}) == 1 for turn in turns)  # nobody else in between
    assert all(sorted(system for _, _, system in turn) == [0, 1, 2] for turn in turns)
    for place in range(3):
        assert Counter(turn[place][2] for turn in turns) == {0: 6, 1: 6, 2: 6}
    firsts = {(turn[0][1], turn[0][2]) for turn in turns}
    assert len(firsts) == 18


def test_the_run_follows_the_schedule_after_a_warm_up() -> None:
    record: list[tuple[str, str]] = []
    systems = [MadeUpSystem("a", record), MadeUpSystem("b", record)]
    steps: list[tuple[int, int]] = []
    found = run_systems(
        systems, TASKS, n_repetitions=2, max_tokens=8, report=lambda done, total, _: steps.append((done, total))
    )
    assert record[:2] == [("a", "one"), ("b", "one")]
    assert [(m.system, TASKS[m.task].text) for m in found] == record[2:]
    assert record[2:6] == [("a", "one"), ("b", "one"), ("b", "two"), ("a", "two")]
    assert [m.repetition for m in found] == [0] * 6 + [1] * 6
    assert steps == [(i, 14) for i in range(1, 15)]


def test_medians_and_quartiles() -> None:
    assert spread([]) is None
    assert spread([3.0]) == Spread(1, 3.0, 3.0, 3.0)
    assert spread([4.0, 1.0, 2.0, 3.0, 100.0]) == Spread(5, 2.0, 3.0, 4.0)


def test_speedup_is_over_pairs() -> None:
    """A machine that becomes slower hits both of a pair: 2 in each of them, whatever the medians say."""
    measurements = []
    for repetition, plain in enumerate((10.0, 5.0, 1.0)):
        measurements.append(made_up("plain", 0, repetition, plain))
        if repetition != 1:
            measurements.append(made_up("auto", 0, repetition, 2 * plain))
    result = summarize_system("auto", ALL, measurements)
    assert result.speedup == Spread(2, 2.0, 2.0, 2.0)
    assert result.tokens_per_second == Spread(2, 6.5, 11.0, 15.5)
    assert result.acceptance_length == 1.0
    assert result.prefill_s == 0.5
    assert summarize_system("auto", ALL, measurements[1:2]).speedup is None


def test_short_answers_have_no_speed() -> None:
    measurements = [made_up("plain", 0, 0, 10.0), made_up("plain", 1, 0, 99.0, n=7), made_up("plain", 2, 0, 99.0, n=1)]
    result = summarize_system("plain", ALL, measurements)
    assert (result.n_answers, result.n_short) == (3, 2)
    assert result.tokens_per_second == Spread(1, 10.0, 10.0, 10.0)
    assert summarize_system("plain", ALL, measurements[1:]).tokens_per_second is None


def test_shares_and_counts_add_up() -> None:
    counts = {"drafted_per_position": (2, 2), "accepted_per_position": (2, 0), "rounds_per_draft_length": (0, 0, 2)}
    a = replace(EMPTY, rounds=2, accepted=2, draft_s=1.0, verify_s=2.0, commit_s=0.5, other_s=0.5, **counts)
    b = replace(EMPTY, rounds=1, verify_s=6.0, rounds_per_draft_length=(1,))
    measurements = [
        made_up("auto", 0, 0, 10.0, stats=a, n_timed=4, n_rounds=2),
        made_up("auto", 1, 0, 10.0, stats=b, n_timed=1, n_rounds=1),
    ]
    result = summarize_system("auto", ALL, measurements)
    assert result.acceptance_length == 5 / 3
    assert result.shares is not None
    assert (result.shares.draft, result.shares.verify, result.shares.rest) == (0.1, 0.8, 0.1)
    assert result.accepted_per_position == (1.0, 0.0)
    assert result.rounds_per_draft_length == (1, 0, 2)


def test_results_by_category() -> None:
    measurements = [made_up(name, task, 0, speed + task) for task in range(3) for name, speed in
                    (("plain", 10.0), ("auto", 20.0))]  # fmt: skip
    report = report_of(measurements)
    assert [(r.category, r.system, r.n_answers) for r in report.results] == [
        *(("math", name, 2) for name in ("plain", "auto")),
        *(("chat", name, 1) for name in ("plain", "auto")),
        *((ALL, name, 3) for name in ("plain", "auto")),
    ]
    assert report.identical


@pytest.mark.parametrize(
    ("tokens", "position"), [((2, *range(99)), 100), ((2, *range(50), 7, *range(49)), 51), ((), 0), ((3, 1), 0)]
)
def test_a_difference_is_found_and_placed(tokens: tuple[int, ...], position: int) -> None:
    measurements = [made_up(name, task, r, 10.0) for r in range(2) for task in range(3) for name in ("plain", "auto")]
    changed = next(i for i, m in enumerate(measurements) if (m.system, m.task, m.repetition) == ("auto", 2, 1))
    measurements[changed] = made_up("auto", 2, 1, 10.0, tokens=tokens)
    report = report_of(measurements)
    assert not report.identical
    (difference,) = report.differences
    assert (difference.system, difference.repetition, difference.position) == ("auto", 1, position)
    assert (difference.category, difference.prompt) == ("chat", "three")
    assert report.to_json()["identical"] is False


def test_a_mode_that_differs_from_itself_is_found() -> None:
    measurements = [made_up("plain", 0, 0, 10.0), made_up("plain", 0, 1, 10.0, tokens=(5,))]
    assert [d.repetition for d in report_of(measurements).differences] == [1]


def test_servers_may_differ_and_are_counted() -> None:
    measurements = [made_up("plain", task, 0, 10.0) for task in range(3)]
    measurements += [
        made_up("server a", 0, 0, 10.0, text=" 0\n", clock="timings", tokens=None, stats=None),
        made_up("server a", 1, 0, 10.0, text="other", clock="wall", tokens=None, stats=None),
    ]
    report = report_of(measurements)
    assert report.identical
    (endpoint,) = report.endpoints
    assert (endpoint.clock, endpoint.n_answers, endpoint.n_same_text) == ("wall", 2, 1)
    result = next(r for r in report.results if r.system == "server a" and r.category == ALL)
    assert result.shares is None
    assert result.accepted_per_position == ()


def test_repeated_and_long_prompts_are_refused(tiny_pair: tuple[Path, Path]) -> None:
    engine = Engine(tiny_pair[0], n_ctx=64, n_threads=1)
    prompts = [Prompt("a", ("x",)), Prompt("b", ("y", "second turn")), Prompt("c", ("x",))]
    assert [task.text for task in make_tasks(engine, prompts[:2], 8)] == ["x", "y"]
    with pytest.raises(ValueError, match=r"prompts 1 and 3 are the same \('x'\)"):
        make_tasks(engine, prompts, 8)
    with pytest.raises(ValueError, match=r"prompt 1 \('x'\) has \d+ tokens, .* the context of 64"):
        make_tasks(engine, prompts, 60)


def test_own_prompts_are_found_and_differ() -> None:
    prompts = load_prompts(own_prompts())
    assert len({prompt.turns[0] for prompt in prompts}) == len(prompts) == 80


@pytest.fixture
def drawn() -> BenchReport:
    pytest.importorskip("matplotlib")
    stats = replace(EMPTY, rounds=2, verify_s=1.0, drafted_per_position=(2, 1), accepted_per_position=(1, 0))
    measurements = [made_up("plain", 0, 0, 10.0), made_up("fixed:2", 0, 0, 20.0, stats=stats)]
    return report_of(measurements, costs=COSTS, profile=load_profile("qwen3-8b"))


def test_pictures_beside_a_prefix_or_in_a_folder(drawn: BenchReport, tmp_path: Path) -> None:
    from dspine_local.bench.plot import plot_report

    names = ["speedup", "acceptance", "costs"]
    assert plot_report(drawn, tmp_path / "run") == [tmp_path / f"run-{name}.png" for name in names]
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "costs.png").write_text("old")
    assert plot_report(drawn, tmp_path / "pictures") == [tmp_path / "pictures" / f"{name}.png" for name in names]
    pictures = sorted(tmp_path.rglob("*.png"))
    assert len(pictures) == 6
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_only_pictures_with_figures_are_drawn(drawn: BenchReport, tmp_path: Path) -> None:
    from dspine_local.bench.plot import plot_report

    only_plain = replace(report_of([made_up("plain", 0, 0, 10.0)]), profile=None)
    assert plot_report(only_plain, tmp_path) == [tmp_path / "speedup.png"]
    assert plot_report(replace(drawn, results=(), costs=None), tmp_path) == []


def test_pictures_are_whole_or_not_there(drawn: BenchReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    from dspine_local.bench.plot import plot_report

    def interrupted(_figure: Figure, path: Path, **_options: Any) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plot_report(drawn, tmp_path)
    assert list(tmp_path.iterdir()) == []
