"""Measured costs in the user's cache: found again, measured anew when anything differs, never trusted blindly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import DrafterFactory, TargetFactory

from dspine_local import Engine, SamplingOptions, _native
from dspine_local.convert import convert_checkpoint

PROMPT = "The quick brown fox"
GREEDY = SamplingOptions(temperature=0)


@pytest.fixture
def models(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """Target and drafter, and a cache folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = tiny_target("llama", "q8_0")
    drafter = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(tiny), drafter, target=tiny.path)
    return tiny.path, drafter


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One entry per measurement."""
    made: list[float] = []
    measure = _native.measure_costs

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs["budget_s"])
        return measure(*args, **kwargs)

    monkeypatch.setattr(_native, "measure_costs", counted)
    return made


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.json"))


def test_measured_once_and_found_again(models: tuple[Path, Path], sweeps: list[float], tmp_path: Path) -> None:
    engines = [Engine(*models, n_ctx=256, n_threads=1) for _ in range(2)]
    assert len(sweeps) == 1
    (file,) = cached(tmp_path)
    content = json.loads(file.read_text())
    columns = [n for n, _ in content["verify"]]
    assert columns[0] == 1
    assert columns[-1] == engines[0].max_draft + 1
    assert all(us > 0 for _, us in content["verify"] + content["draft"])
    for engine in engines:
        costs = engine.draft_costs
        assert costs is not None
        assert [list(point) for point in costs.verify] == content["verify"]
        assert engine.cache_lengths() == (0, 0)
        assert engine.generate(PROMPT, max_tokens=4, sampling=GREEDY).read()


@pytest.mark.parametrize("options", [{"n_threads": 2}, {"n_parallel": 2}, {"cache_type_k": "f32", "flash_attn": "off"}])
def test_other_settings_are_measured_for_themselves(
    models: tuple[Path, Path], sweeps: list[float], tmp_path: Path, options: dict[str, Any]
) -> None:
    usual = {"n_ctx": 256, "n_threads": 1}
    Engine(*models, **usual)
    Engine(*models, **(usual | options))
    assert len(sweeps) == 2
    assert len(cached(tmp_path)) == 2


def test_a_fixed_length_measures_nothing(models: tuple[Path, Path], sweeps: list[float], tmp_path: Path) -> None:
    for n_draft in (0, 3):
        assert Engine(*models, n_ctx=256, n_draft=n_draft).draft_costs is None
    Engine(models[0], n_ctx=256)
    assert not sweeps
    assert not cached(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "{",
        '{"format": 1, "verify": [], "draft": []}',
        '{"format": 1, "verify": [[1, -5]], "draft": [[1, 1]]}',
        '{"format": 999, "verify": [[1, 5]], "draft": [[1, 1]]}',
        '{"format": 1, "verify": [[1, NaN]], "draft": [[1, 1]]}',
    ],
)
def test_a_damaged_cache_is_measured_again(
    models: tuple[Path, Path], sweeps: list[float], tmp_path: Path, damage: str
) -> None:
    Engine(*models, n_ctx=256, n_threads=1)
    (file,) = cached(tmp_path)
    file.write_text(damage)
    Engine(*models, n_ctx=256, n_threads=1)
    assert len(sweeps) == 2
    assert json.loads(file.read_text())["draft"]


def test_a_cache_that_cannot_be_written_is_no_error(
    models: tuple[Path, Path], sweeps: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert Engine(*models, n_ctx=256, n_threads=1).generate(PROMPT, max_tokens=4, sampling=GREEDY).read()
    assert len(sweeps) == 1
    assert "could not be kept" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "drafter.gguf"]
