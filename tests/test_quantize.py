"""Drafters and targets in other types: exact, whole or not at all, and refused where it would lose something unsaid."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
from conftest import DrafterFactory, TargetFactory
from gguf.quants import dequantize
from gguf_damage import Damage

from dspine_local import _native
from dspine_local.cli import main
from dspine_local.convert import OUTTYPES, convert_checkpoint
from dspine_local.errors import BackendError, ModelFormatError
from dspine_local.quantize import quantize_file
from dspine_local.quantize.imatrix import read_imatrix
from dspine_local.quantize.overrides import TypeOverride, parse_override

pytestmark = pytest.mark.native

TYPES = sorted(OUTTYPES)


@pytest.fixture(scope="module")
def drafter(tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter in f32 with rows of 256, which every type divides, and some that only few do."""
    tiny = tiny_target("llama", n_embd=256)
    path = tmp_path_factory.mktemp("drafter") / "f32.gguf"
    convert_checkpoint(tiny_drafter(tiny), path, outtype="f32", target=tiny.path)
    return path


def arrays(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Type and float32 values by tensor, decoded by gguf-py."""
    return {
        t.name: (t.tensor_type.name.lower(), dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(path).tensors
    }


def metadata(path: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


class TestDrafters:
    @pytest.mark.parametrize("type_name", TYPES)
    def test_gives_what_the_converter_gives(self, type_name: str, drafter: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.gguf"
        report = quantize_file(drafter, out, type_name)
        for name, (stored, values) in arrays(drafter).items():
            found, decoded = arrays(out)[name]
            if values.ndim == 1:
                assert found == "f32"
                assert np.array_equal(decoded, values)
                continue
            again = _native.quantize(np.ascontiguousarray(values, dtype=np.float32), found)
            assert np.array_equal(decoded, _native.dequantize(again, found)), (name, stored)
        assert report.bytes_after == sum(t.n_bytes for t in _native.GgufFile(str(out)).tensors())
        assert report.bytes_before == sum(t.n_bytes for t in _native.GgufFile(str(drafter)).tensors())
        assert {name for name, _ in arrays(out).values()} == set(report.types)

    @pytest.mark.parametrize("source_type", TYPES)
    @pytest.mark.parametrize("type_name", ["f32", "q8_0", "q4_k"])
    def test_any_type_to_any(self, source_type: str, type_name: str, drafter: Path, tmp_path: Path) -> None:
        first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
        quantize_file(drafter, first, source_type)
        quantize_file(first, second, type_name, allow_requantize=True)
        for name, (stored, values) in arrays(first).items():
            found, decoded = arrays(second)[name]
            if stored == found:
                assert np.array_equal(decoded, values)  # copied, not rounded again
            elif values.ndim > 1:
                again = _native.quantize(np.ascontiguousarray(values, dtype=np.float32), found)
                assert np.array_equal(decoded, _native.dequantize(again, found))

    def test_metadata_stays(self, drafter: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.gguf"
        quantize_file(drafter, out, "q4_0")
        before, after = metadata(drafter), metadata(out)
        assert after.pop("general.file_type") == gguf.LlamaFileType.MOSTLY_Q4_0
        before.pop("general.file_type")
        assert before == after

    def test_types_of_single_tensors(self, drafter: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.gguf"
        overrides = [TypeOverride("ffn_down", "q8_0"), TypeOverride(r"^inject\.codes$", "f16")]
        quantize_file(drafter, out, "Q4_K_M", overrides=overrides)
        types = {name: found for name, (found, _) in arrays(out).items()}
        assert types["inject.codes"] == "f16"
        assert types["blk.0.ffn_down.weight"] == "q8_0"
        assert types["blk.0.attn_q.weight"] == "q4_k"

    @pytest.mark.parametrize(
        ("pattern", "message"),
        [("attn_q.weight", "used together need one type, found .*attn_q.weight q8_0"), ("nothing", "no tensor's name")],
    )
    def test_wrong_patterns_are_refused(self, pattern: str, message: str, drafter: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=message):
            quantize_file(drafter, tmp_path / "out.gguf", "q4_0", overrides=[TypeOverride(pattern, "q8_0")])
        assert list(tmp_path.iterdir()) == []

    def test_quantizing_twice_needs_to_be_allowed(self, drafter: Path, tmp_path: Path) -> None:
        first = tmp_path / "first.gguf"
        quantize_file(drafter, first, "q8_0")
        with pytest.raises(ValueError, match="as q8_0, which is quantized already"):
            quantize_file(first, tmp_path / "second.gguf", "q4_0")
        quantize_file(first, tmp_path / "second.gguf", "q8_0")  # nothing is lost
        assert sorted(p.name for p in tmp_path.iterdir()) == ["first.gguf", "second.gguf"]

    def test_importance_changes_the_rounding(self, drafter: Path, tmp_path: Path) -> None:
        name = "blk.0.ffn_gate.weight"
        weights = np.linspace(0.01, 10, 256, dtype=np.float32)
        matrix = write_gguf_imatrix(tmp_path / "imatrix.gguf", {name: weights})
        plain, careful = tmp_path / "plain.gguf", tmp_path / "careful.gguf"
        quantize_file(drafter, plain, "q4_k")
        report = quantize_file(drafter, careful, "q4_k", imatrix=matrix)
        assert report.n_importance == 1
        true = arrays(drafter)[name][1]
        errors = [float((weights * (arrays(p)[name][1] - true) ** 2).sum()) for p in (plain, careful)]
        assert errors[1] < errors[0]
        others = [n for n in arrays(plain) if n != name]
        assert all(np.array_equal(arrays(plain)[n][1], arrays(careful)[n][1]) for n in others)

    def test_a_wrong_number_of_threads_is_refused(self, drafter: Path, tmp_path: Path) -> None:
        for n_threads in ("-5", "1000"):
            assert main(["quantize", str(drafter), str(tmp_path / "out.gguf"), "q8_0", "-t", n_threads]) == 2
        assert not list(tmp_path.iterdir())

    def test_an_importance_matrix_of_something_else_is_refused(self, drafter: Path, tmp_path: Path) -> None:
        other = write_gguf_imatrix(tmp_path / "other.gguf", {"blk.9.attn_k.weight": np.ones(256, np.float32)})
        with pytest.raises(ValueError, match="no entry for any tensor"):
            quantize_file(drafter, tmp_path / "out.gguf", "q4_0", imatrix=other)
        narrow = write_gguf_imatrix(tmp_path / "narrow.gguf", {"blk.0.attn_q.weight": np.ones(8, np.float32)})
        with pytest.raises(ValueError, match=r"8 values for 'blk.0.attn_q.weight', expected 256"):
            quantize_file(drafter, tmp_path / "out.gguf", "q4_0", imatrix=narrow)


def write_gguf_imatrix(path: Path, entries: dict[str, np.ndarray], n_calls: float = 4.0) -> Path:
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    for name, values in entries.items():
        writer.add_tensor(f"{name}.in_sum2", values.reshape(1, -1) * np.float32(n_calls))
        writer.add_tensor(f"{name}.counts", np.array([[n_calls]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestImatrix:
    def test_both_formats_say_the_same(self, tmp_path: Path) -> None:
        entries = {"a.weight": np.arange(1, 9, dtype=np.float32), "b.weight": np.ones(4, np.float32)}
        old = struct.pack("<i", len(entries))
        for name, values in entries.items():
            old += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, values.size)
            old += (values * 4).tobytes()
        (tmp_path / "old.dat").write_bytes(old + struct.pack("<i", 10) + b"\0")  # what follows is the data set's name
        for path in (tmp_path / "old.dat", write_gguf_imatrix(tmp_path / "new.gguf", entries)):
            found = read_imatrix(path)
            assert found.keys() == entries.keys()
            assert all(np.array_equal(found[name], entries[name]) for name in entries)

    @pytest.mark.parametrize(
        "data",
        [b"", b"\0\0\0\0", b"\1\0\0\0", struct.pack("<iii", 1, 1 << 20, 0), struct.pack("<ii", 1, 1) + b"a"],
    )
    def test_damage_is_refused(self, data: bytes, tmp_path: Path) -> None:
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(ModelFormatError, match="no importance matrix"):
            read_imatrix(tmp_path / "bad")

    def test_what_is_not_a_number_is_refused(self, tmp_path: Path) -> None:
        path = write_gguf_imatrix(tmp_path / "nan.gguf", {"a.weight": np.full(4, np.nan, np.float32)})
        with pytest.raises(ModelFormatError, match=r"'a.weight' that are negative or not finite"):
            read_imatrix(path)


class TestTargets:
    @pytest.mark.parametrize("type_name", ["Q8_0", "q4_k_m", "Q6_K", "f16"])
    def test_is_llama_cpps_own_file(self, type_name: str, tiny_target: TargetFactory, tmp_path: Path) -> None:
        source = tiny_target("llama", n_embd=256).path
        report = quantize_file(source, tmp_path / "ours.gguf", type_name)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = int(next(t for t in gguf.LlamaFileType if t.name.endswith(f"_{type_name.upper()}")))
        expected = tmp_path / "expected.gguf"
        assert llama_cpp.llama_model_quantize(str(source).encode(), str(expected).encode(), params) == 0
        assert (tmp_path / "ours.gguf").read_bytes() == expected.read_bytes()
        dry = quantize_file(source, tmp_path / "dry.gguf", type_name, dry_run=True)
        assert not (tmp_path / "dry.gguf").exists()
        assert (dry.bytes_after, dry.types) == (report.bytes_after, report.types)

    def test_types_of_single_tensors(self, tiny_target: TargetFactory, tmp_path: Path) -> None:
        source = tiny_target("llama", n_embd=256).path
        report = quantize_file(source, tmp_path / "o.gguf", "q4_0", overrides=[parse_override("ffn_down=q8_0")])
        assert report.types["q8_0"] >= 1
        types = {name: found for name, (found, _) in arrays(tmp_path / "o.gguf").items()}
        assert types["blk.0.ffn_down.weight"] == "q8_0"

    def test_importance_reaches_llama_cpp(self, tiny_target: TargetFactory, tmp_path: Path) -> None:
        source = tiny_target("llama", n_embd=256).path
        matrix = write_gguf_imatrix(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": np.linspace(0.1, 9, 256, dtype="f4")})
        plain = quantize_file(source, tmp_path / "plain.gguf", "q4_k_s")
        careful = quantize_file(source, tmp_path / "careful.gguf", "q4_k_s", imatrix=matrix)
        assert (plain.n_importance, careful.n_importance) == (None, 1)
        found = [arrays(tmp_path / name)["blk.0.ffn_up.weight"][1] for name in ("plain.gguf", "careful.gguf")]
        assert not np.array_equal(*found)

    def test_names_of_an_importance_matrix_are_only_names(self, tiny_target: TargetFactory, tmp_path: Path) -> None:
        source = tiny_target("llama", n_embd=256).path
        entries = {name: np.ones(256, np.float32) for name in ("file", "allow_pickle", "blk.0.ffn_up.weight", "a/b")}
        matrix = write_gguf_imatrix(tmp_path / "m.gguf", entries)
        assert quantize_file(source, tmp_path / "out.gguf", "q4_k_s", imatrix=matrix).n_importance == 1
        other = write_gguf_imatrix(tmp_path / "other.gguf", {"blk.99.ffn_up.weight": np.ones(256, np.float32)})
        with pytest.raises(ValueError, match="no entry for any tensor of this target"):
            quantize_file(source, tmp_path / "no.gguf", "q4_k_s", imatrix=other)
        assert not (tmp_path / "no.gguf").exists()

    def test_a_second_rounding_is_refused(self, tiny_target: TargetFactory, tmp_path: Path) -> None:
        source = tiny_target("llama", "q8_0", n_embd=256).path
        for dry_run in (False, True):
            with pytest.raises(ValueError, match=r"as q8_0, which is quantized already: .*--allow-requantize"):
                quantize_file(source, tmp_path / "out.gguf", "q4_0", dry_run=dry_run)
        assert list(tmp_path.iterdir()) == []

    def test_llama_cpps_words_when_it_refuses(self, tiny_target: TargetFactory, tmp_path: Path) -> None:
        source = tiny_target("llama", n_embd=256).path
        with pytest.raises(BackendError, match="importance matrix"):
            quantize_file(source, tmp_path / "out.gguf", "iq2_xxs")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("type_name", ["i32", "f64", "q8_k", "q8_1", "mystery"])
    def test_types_that_no_weights_have_are_refused(
        self, type_name: str, tiny_target: TargetFactory, tmp_path: Path
    ) -> None:
        source = tiny_target("llama", n_embd=256).path
        with pytest.raises(ValueError, match=f"unknown tensor type '{type_name}' for 'ffn_down'"):
            quantize_file(source, tmp_path / "out.gguf", "q8_0", overrides=[TypeOverride("ffn_down", type_name)])
        assert list(tmp_path.iterdir()) == []

    def test_damaged_targets_end_in_an_error(self, tiny_target: TargetFactory, tmp_path: Path) -> None:
        out = tmp_path / "out.gguf"
        refused = 0
        damage = Damage(tiny_target("llama", n_embd=256).path)
        damaged = tmp_path / "damaged.gguf"
        for seed in range(12):
            damaged.write_bytes(damage.make(seed)[1])
            try:
                quantize_file(damaged, out, "q8_0", overwrite=True)
            except (ModelFormatError, BackendError, ValueError):
                refused += 1
                assert not out.exists()
            out.unlink(missing_ok=True)
        assert refused > 0


class TestFiles:
    @pytest.mark.parametrize("link", [False, True])
    def test_the_input_is_never_replaced(self, link: bool, drafter: Path, tmp_path: Path) -> None:
        source = tmp_path / "in.gguf"
        source.write_bytes(drafter.read_bytes())
        out = tmp_path / "link.gguf" if link else source
        if link:
            out.symlink_to(source)
        with pytest.raises(ValueError, match="would replace an input"):
            quantize_file(source, out, "q8_0", overwrite=True)
        assert source.read_bytes() == drafter.read_bytes()

    def test_an_existing_file_stays_unless_forced(self, drafter: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.gguf"
        out.write_bytes(b"mine")
        with pytest.raises(FileExistsError, match="--force"):
            quantize_file(drafter, out, "q8_0")
        assert out.read_bytes() == b"mine"
        quantize_file(drafter, out, "q8_0", overwrite=True)
        assert out.read_bytes()[:4] == b"GGUF"

    @pytest.mark.parametrize("type_name", ["q9_9", "", "mostly_q8_0"])
    def test_unknown_types(self, type_name: str, drafter: Path, tiny_target: TargetFactory, tmp_path: Path) -> None:
        for source in (drafter, tiny_target("llama", n_embd=256).path):
            with pytest.raises(ValueError, match=r"unknown (output )?type"):
                quantize_file(source, tmp_path / "out.gguf", type_name)

    def test_not_a_model(self, tmp_path: Path) -> None:
        (tmp_path / "text.gguf").write_text("hello")
        with pytest.raises(ModelFormatError):
            quantize_file(tmp_path / "text.gguf", tmp_path / "out.gguf", "q8_0")
        with pytest.raises(FileNotFoundError):
            quantize_file(tmp_path / "no.gguf", tmp_path / "out.gguf", "q8_0")
        with pytest.raises(ModelFormatError, match="names no architecture"):
            quantize_file(
                write_gguf_imatrix(tmp_path / "i.gguf", {"a": np.ones(4, np.float32)}), tmp_path / "out.gguf", "q8_0"
            )

    @pytest.mark.parametrize("kind", ["drafter", "target"])
    def test_ctrl_c_leaves_nothing(self, kind: str, drafter: Path, tiny_target: TargetFactory, tmp_path: Path) -> None:
        source = drafter if kind == "drafter" else tiny_target("llama", n_embd=256).path
        command = [sys.executable, "-m", "dspine_local", "quantize", str(source), str(tmp_path / "out.gguf"), "q4_k"]
        for wait in (0.3, 0.6, 0.9, 1.2):
            running = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            time.sleep(wait)
            running.send_signal(signal.SIGINT)
            running.wait(timeout=30)
            left = [p.name for p in tmp_path.iterdir()]
            assert left in ([], ["out.gguf"])
            if left:  # it was done before
                assert arrays(tmp_path / "out.gguf").keys() == arrays(source).keys()
                (tmp_path / "out.gguf").unlink()
