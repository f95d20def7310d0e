"""What is wrong with an installation, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from dspine_local.doctor.examine import Diagnosis


@dataclass(frozen=True)
class Problem:
    """What was found, and what helps."""

    found: str
    remedy: str


def problems(diagnosis: Diagnosis) -> list[Problem]:
    """Everything that is wrong, the gravest first."""
    return [*_wrong_versions(diagnosis), *_missing_operations(diagnosis), *_unused(diagnosis), *_cache(diagnosis)]


def _wrong_versions(diagnosis: Diagnosis) -> list[Problem]:
    installed = diagnosis.versions["llama-cpp-python"]
    found = []
    if diagnosis.wanted_llama is not None and installed != diagnosis.wanted_llama:
        found.append(
            Problem(
                f"llama-cpp-python {installed} is installed, dspine-local is made for {diagnosis.wanted_llama}",
                f"pip install llama-cpp-python=={diagnosis.wanted_llama}, then install dspine-local again",
            )
        )
    if not diagnosis.layouts_work:
        found.append(
            Problem(
                "this build of llama.cpp crashes with Intel AMX, which is therefore not used",
                "compile llama-cpp-python with GCC 13 or Clang: the CPU is then faster",
            )
        )
    return found


def _missing_operations(diagnosis: Diagnosis) -> list[Problem]:
    found = []
    for device in diagnosis.devices:
        missing = [
            f"{operation.name} on {operation.operand}" if operation.operand else operation.name
            for operation in diagnosis.graphs.operations
            if device.name in operation.unsupported
        ]
        if missing:
            found.append(
                Problem(
                    f"{device.name} cannot run the drafter: it lacks {', '.join(missing)}",
                    "--drafter-device CPU, or another type of the drafter (dspine-local quantize)",
                )
            )
    return found


def _unused(diagnosis: Diagnosis) -> list[Problem]:
    if not diagnosis.has_nvidia_driver or any(device.is_gpu for device in diagnosis.devices):
        return []
    return [
        Problem(
            "an NVIDIA driver is installed, but llama.cpp knows no GPU",
            'CMAKE_ARGS="-DGGML_CUDA=ON" pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python '
            f"llama-cpp-python=={diagnosis.versions['llama-cpp-python']} (docs/devices.md)",
        )
    ]


def _cache(diagnosis: Diagnosis) -> list[Problem]:
    if diagnosis.cache_writable:
        return []
    return [
        Problem(
            f"'{diagnosis.cache_folder}' cannot be written: costs are measured anew at every start",
            "make it writable, or set XDG_CACHE_HOME",
        )
    ]
