"""``dspine-local doctor``: what it finds here, and what it says where something is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import DrafterFactory, TargetFactory

from dspine_local import _native
from dspine_local.cli import main
from dspine_local.convert import convert_checkpoint
from dspine_local.doctor import Device, Diagnosis, Operation, examine, problems
from dspine_local.doctor.examine import _writable
from dspine_local.options import EngineOptions

GPU = Device("Vulkan0", "a card", True, 1 << 30, 8 << 30)


@pytest.fixture(scope="module")
def healthy() -> Diagnosis:
    """This machine, as if nothing were wrong with it."""
    found = examine(None, EngineOptions())
    return replace(found, layouts_work=True, has_nvidia_driver=False, cache_writable=True)


def test_this_machine() -> None:
    found = examine(None, EngineOptions())
    assert [device.name for device in found.devices] == [name for name, *_ in _native.devices()]
    assert found.versions["llama-cpp-python"] == found.wanted_llama
    assert found.graphs.target is None
    assert found.graphs.splits == (1, 1)  # one device: nothing to split


def test_the_cpu_can_do_every_operation_of_every_kind_of_drafter(healthy: Diagnosis) -> None:
    operations = {(operation.name, operation.operand): operation for operation in healthy.graphs.operations}
    assert not any(operation.unsupported for operation in operations.values())
    n_layers = 5  # of the shape
    assert operations["FLASH_ATTN_EXT", "f16"].n_nodes["CPU"] == n_layers
    assert operations["MUL_MAT", "q8_0"].n_nodes["CPU"] > 4 * n_layers


def test_operands_follow_the_drafter_and_its_cache(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target("qwen3")
    drafter = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(target), drafter, outtype="f16", target=target.path)
    arguments = ["doctor", "-m", str(target.path), "-md", str(drafter), "-ctkd", "f32", "-ctvd", "f32", "--json"]
    assert main(arguments) == 0
    graphs = json.loads(capsys.readouterr().out)["graphs"]
    assert (graphs["target"], graphs["drafter"]) == (str(target.path), str(drafter))
    operands = {(operation["name"], operation["operand"]) for operation in graphs["operations"]}
    assert {("MUL_MAT", "f16"), ("FLASH_ATTN_EXT", "f32"), ("SET_ROWS", "f32")} <= operands


def test_an_operation_that_a_device_lacks(healthy: Diagnosis) -> None:
    lacking = Operation("TOP_K", "f32", {"CPU": 0, GPU.name: 1}, (GPU.name,))
    graphs = replace(healthy.graphs, operations=(*healthy.graphs.operations, lacking))
    (problem,) = problems(replace(healthy, devices=(*healthy.devices, GPU), graphs=graphs))
    assert problem.found == "Vulkan0 cannot run the drafter: it lacks TOP_K on f32"
    assert "--drafter-device CPU" in problem.remedy


def test_what_is_wrong_is_said_with_what_helps(healthy: Diagnosis) -> None:
    assert problems(healthy) == []
    versions = {**healthy.versions, "llama-cpp-python": "0.3.1"}
    for wrong, found, remedy in (
        ({"versions": versions}, "llama-cpp-python 0.3.1 is installed", "pip install llama-cpp-python=="),
        ({"layouts_work": False}, "AMX", "GCC 13"),
        ({"has_nvidia_driver": True}, "llama.cpp knows no GPU", "-DGGML_CUDA=ON"),
        ({"cache_writable": False, "cache_folder": "/there"}, "'/there' cannot be written", "XDG_CACHE_HOME"),
    ):
        (problem,) = problems(replace(healthy, **wrong))  # type: ignore[arg-type]
        assert found in problem.found
        assert remedy in problem.remedy


def test_a_cache_folder_that_cannot_be_made_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "dspine-local", Path("/proc/nowhere/dspine-local")):
        assert not _writable(folder)
    assert _writable(tmp_path / "new" / "dspine-local")


def test_a_driver_with_its_gpu_is_no_problem(healthy: Diagnosis) -> None:
    assert problems(replace(healthy, has_nvidia_driver=True, devices=(*healthy.devices, GPU))) == []


def test_a_problem_is_the_exit_code(
    healthy: Diagnosis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ill = replace(healthy, cache_writable=False)
    monkeypatch.setattr("dspine_local.doctor.examine", lambda _files, _options: ill)
    assert main(["doctor"]) == 1
    assert "Problem: " in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert set(problem) == {"found", "remedy"}


def test_the_table_names_operations_and_parts(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    out = capsys.readouterr().out
    assert "FLASH_ATTN_EXT" in out
    assert "1 for a prompt, 1 for one token" in out
    assert max(map(len, out.splitlines())) <= 200  # the machine's line is the longest


def test_wrong_files_are_refused(
    tiny_target: TargetFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tiny_target("llama").path)
    (tmp_path / "text.gguf").write_text("no model")
    for arguments, message in (
        (["-m", target], "both --model and --model-draft"),
        (["-md", target], "both --model and --model-draft"),
        (["-m", target, "-md", str(tmp_path / "none.gguf")], "none.gguf"),
        (["-m", str(tmp_path / "text.gguf"), "-md", target], "expected a drafter"),
        (["-m", target, "-md", str(tmp_path / "text.gguf")], "text.gguf"),
        (["--device", "Nothing7"], "Nothing7"),
    ):
        assert main(["doctor", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_drafter_for_another_target_is_refused(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, target = tiny_target("llama"), tiny_target("llama", n_embd=96)
    drafter = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(other), drafter, outtype="f16", target=other.path)
    assert main(["doctor", "-m", str(target.path), "-md", str(drafter)]) == 2
    assert "a target with width 64, this target has 96" in capsys.readouterr().err
