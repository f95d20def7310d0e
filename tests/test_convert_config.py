"""Every config key is used, known to be harmless, or refused with its name and value."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ABSENT, Draft, files_in, read_gguf
from random_drafters import random_checkpoint

from dspine_local.convert import convert_checkpoint
from dspine_local.convert.config import HARMLESS
from dspine_local.errors import ModelFormatError

pytestmark = pytest.mark.native

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def refusal(draft: Draft, tmp_path: Path) -> str:
    """The message that a checkpoint is refused with; nothing may be left behind."""
    folder = draft.write(tmp_path / "drafter")
    with pytest.raises(ModelFormatError) as error:
        convert_checkpoint(folder, tmp_path / "out.gguf")
    assert files_in(tmp_path) == {"drafter"}
    return str(error.value)


def metadata_of(draft: Draft, tmp_path: Path) -> dict[str, Any]:
    convert_checkpoint(draft.write(tmp_path / "drafter"), tmp_path / "out.gguf")
    return read_gguf(tmp_path / "out.gguf")[0]


REFUSED: list[tuple[str, Any]] = [
    ("architectures", ["Qwen3ForCausalLM"]),
    ("architectures", ["DSpineDraftModel", "DFlashDraftModel"]),
    ("architectures", []),
    ("model_type", "llama"),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("attention_bias", 0),
    ("mlp_bias", True),
    ("tie_word_embeddings", "no"),
    ("is_causal", False),
    ("is_causal", 1),
    ("dflash_config.causal", False),
    ("hidden_size", 0),
    ("hidden_size", 64.0),
    ("hidden_size", True),
    ("hidden_size", 1 << 40),
    ("intermediate_size", -1),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", "3"),
    ("num_attention_heads", 3),
    ("num_key_value_heads", 3),
    ("head_dim", 15),
    ("vocab_size", 1),
    ("draft_vocab_size", 100),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", math.nan),
    ("max_position_embeddings", 0),
    ("num_target_layers", 0),
    ("num_target_layers", 6),
    ("block_size", 1),
    ("block_size", 65),
    ("block_size", 16),
    ("dflash_config.block_size", 16),
    ("dflash_config.mask_token_id", -1),
    ("dflash_config.mask_token_id", 320),
    ("dflash_config.mask_token_id", "319"),
    ("dflash_config.target_layer_ids", []),
    ("dflash_config.target_layer_ids", [1, 3, 8]),
    ("dflash_config.target_layer_ids", [1, 3, -1]),
    ("dflash_config.target_layer_ids", [1, 3, 3]),
    ("dflash_config.target_layer_ids", [1, 3, 5.0]),
    ("dflash_config.target_layer_ids", 5),
    ("dspine_config.transfer_rank", 0),
    ("dspine_config.message_size", None),
    ("dspine_config.top_k", 0),
    ("dspine_config.top_k", 257),
    ("dspine_config.top_k", 4.5),
    ("dspine_config", []),
    ("dflash_config", "x"),
    ("layer_types", ["full_attention"] * 2),
    ("layer_types", ["full_attention", "full_attention", "chunked_attention"]),
    ("layer_types", "full_attention"),
    ("use_sliding_window", "yes"),
    ("sliding_window", 0),
    ("rope_theta", 0),
    ("rope_theta", "1e6"),
    ("rope_parameters.rope_theta", -1.0),
    ("rope_parameters.rope_type", "dynamic"),
    ("rope_parameters.rope_type", "longrope"),
    ("rope_parameters.type", "linear"),
    ("rope_parameters.factor", 4.0),
    ("rope_parameters.partial_rotary_factor", 0.5),
    ("rope_parameters", [1]),
    ("partial_rotary_factor", 0.5),
    # Keys that other drafters have and this converter cannot honour.
    ("final_logit_softcapping", 30.0),
    ("quantization_config", {"quant_method": "awq"}),
    ("dflash_config.use_swa", True),
    ("dflash_config.conv_kernel_size", 4),
    ("dspine_config.refinement_steps", 2),
    ("rope_parameters.full_attention", {"rope_theta": 1e4}),
]


@pytest.mark.parametrize(("path", "value"), REFUSED, ids=lambda value: str(value)[:40])
def test_wrong_values_are_refused_by_name(path: str, value: Any, tmp_path: Path) -> None:
    draft = Draft.golden()
    draft.set(path, value)
    message = refusal(draft, tmp_path)
    assert path.rpartition(".")[2] in message
    assert "expected" in message or value is None


@pytest.mark.parametrize(
    "path",
    [
        "architectures",
        "dflash_config",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "num_target_layers",
        "dflash_config.mask_token_id",
        "dflash_config.target_layer_ids",
        "dspine_config.transfer_rank",
        "dspine_config.message_size",
        "dspine_config.top_k",
    ],
)
def test_required_keys_are_asked_for_by_name(path: str, tmp_path: Path) -> None:
    draft = Draft.golden()
    draft.set(path, ABSENT)
    assert f"has no {path}" in refusal(draft, tmp_path)


@pytest.mark.parametrize("section", ["", "dflash_config", "dspine_config", "rope_parameters"])
def test_unknown_keys_are_refused_whatever_their_value(section: str, tmp_path: Path) -> None:
    for value in (1, None, False, "x" * 200, {"a": []}):
        draft = Draft.golden()
        path = f"{section}.mystery".lstrip(".")
        draft.set(path, value)
        message = refusal(draft, tmp_path)
        assert re.search(rf"{re.escape(path)} = .{{1,80}}, expected no such key", message)


def test_no_key_of_the_golden_configs_is_dropped(tmp_path: Path) -> None:
    """Any key with a meaning is refused when it holds nonsense; the harmless ones are listed, with reasons."""
    config = Draft.golden().config
    for section in ("", "dflash_config", "dspine_config", "rope_parameters"):
        values = config[section] if section else config
        for key in values:
            if key in HARMLESS.get(section, {}):
                assert HARMLESS[section][key]
                continue
            draft = Draft.golden()
            draft.set(f"{section}.{key}".lstrip("."), {"nonsense": []})
            assert key in refusal(draft, tmp_path)


def test_harmless_keys_change_nothing(tmp_path: Path) -> None:
    draft = Draft.golden()
    convert_checkpoint(draft.write(tmp_path / "a" / "drafter"), tmp_path / "a.gguf")
    for section, keys in HARMLESS.items():
        for key in keys:
            if key != "_name_or_path":
                draft.set(f"{section}.{key}".lstrip("."), "anything")
    for path, value in [("tie_word_embeddings", True), ("attention_bias", None), ("draft_vocab_size", 320)]:
        draft.set(path, value)
    convert_checkpoint(draft.write(tmp_path / "b" / "drafter"), tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_the_last_layer_cannot_be_tapped_and_the_message_says_why(tmp_path: Path) -> None:
    draft = Draft.golden()
    draft.set("dflash_config.target_layer_ids", [1, 3, 7])
    message = refusal(draft, tmp_path)
    assert "layers 0 to 6" in message
    assert "llama.cpp gives the inputs of layers" in message
    draft.set("dflash_config.target_layer_ids", [6, 3, 0])
    assert metadata_of(draft, tmp_path)["dspine.target_layers"] == [7, 4, 1]


def test_block_size_may_stand_in_either_place(tmp_path: Path) -> None:
    for kept, dropped in [("block_size", "dflash_config.block_size"), ("dflash_config.block_size", "block_size")]:
        draft = Draft.golden()
        draft.set(dropped, ABSENT)
        convert_checkpoint(draft.write(tmp_path / "drafter"), tmp_path / "out.gguf", overwrite=True)
        assert read_gguf(tmp_path / "out.gguf")[0]["dspine.block_size"] == 8, kept
    draft.set("dflash_config.block_size", ABSENT)
    with pytest.raises(ModelFormatError, match="has no block_size"):
        convert_checkpoint(draft.write(tmp_path / "drafter"), tmp_path / "out.gguf", overwrite=True)


def test_without_dspine_config_the_widths_need_the_matrix(tmp_path: Path) -> None:
    draft = Draft.golden()
    draft.set("dspine_config", ABSENT)
    del draft.tensors["injection.message.weight"]
    assert "no dspine_config, and no matrix 'injection.message.weight'" in refusal(draft, tmp_path)


def test_dflash_drafters_have_no_dspine_config(tmp_path: Path) -> None:
    folder = random_checkpoint(
        tmp_path / "drafter", architecture="DFlashDraftModel", config_changes={"dspine_config": {"top_k": 4}}
    )
    with pytest.raises(ModelFormatError, match="dspine_config"):
        convert_checkpoint(folder, tmp_path / "out.gguf")


def test_dflash_causality_may_not_be_given_twice_differently(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "drafter", architecture="DFlashDraftModel", is_causal=True)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["causal"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match=r"dflash_config\.causal = false, expected the same as is_causal = true"):
        convert_checkpoint(folder, tmp_path / "out.gguf")


class TestSlidingWindow:
    def test_needs_a_layer_that_slides(self, tmp_path: Path) -> None:
        draft = Draft.golden()
        draft.config |= {"use_sliding_window": True, "sliding_window": 16}
        assert "dspine.attention.sliding_window" not in metadata_of(draft, tmp_path)

    def test_is_off_without_use_sliding_window(self, tmp_path: Path) -> None:
        draft = Draft.golden("sliding_window")
        draft.set("use_sliding_window", False)
        metadata = metadata_of(draft, tmp_path)
        assert not any("sliding" in key for key in metadata)

    @pytest.mark.parametrize("key", ["use_sliding_window", "sliding_window", "layer_types"])
    def test_must_be_said_in_full(self, key: str, tmp_path: Path) -> None:
        draft = Draft.golden("sliding_window")
        draft.set(key, ABSENT)
        assert key in refusal(draft, tmp_path)


class TestRope:
    @pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
    @pytest.mark.parametrize("type_key", ["rope_type", "type"])
    def test_linear(self, place: str, type_key: str, tmp_path: Path) -> None:
        draft = Draft.golden()
        draft.set("rope_parameters", ABSENT)
        draft.set(place, {type_key: "linear", "factor": 2})
        metadata = metadata_of(draft, tmp_path)
        assert metadata["dspine.rope.freq_base"] == 1e6
        assert metadata["dspine.rope.scaling.type"] == "linear"
        assert metadata["dspine.rope.scaling.factor"] == 2.0
        assert not any("yarn" in key or "attn_factor" in key for key in metadata)

    @pytest.mark.parametrize(
        ("more", "attn_factor"),
        [
            ({}, 0.1 * math.log(4) + 1),
            ({"attention_factor": 1.5}, 1.5),
            ({"mscale": 0.7, "mscale_all_dim": 2.0}, (0.07 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
            ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
            ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.5, "truncate": True}, 1.5),
        ],
    )
    def test_yarn(self, more: dict[str, float], attn_factor: float, tmp_path: Path) -> None:
        draft = Draft.golden()
        draft.set("rope_parameters", {"rope_theta": 1e6, **YARN, **more})
        metadata = metadata_of(draft, tmp_path)
        assert metadata["dspine.rope.scaling.type"] == "yarn"
        assert metadata["dspine.rope.scaling.factor"] == 4.0
        assert metadata["dspine.rope.scaling.original_context_length"] == 1024
        assert metadata["dspine.rope.scaling.attn_factor"] == pytest.approx(attn_factor)
        assert metadata["dspine.rope.scaling.yarn_beta_fast"] == 32.0
        assert metadata["dspine.rope.scaling.yarn_beta_slow"] == 1.0

    def test_yarn_defaults(self, tmp_path: Path) -> None:
        draft = Draft.golden()
        draft.set("rope_parameters", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2})
        metadata = metadata_of(draft, tmp_path)
        assert metadata["dspine.rope.scaling.original_context_length"] == 4096
        assert metadata["dspine.rope.scaling.yarn_beta_fast"] == 16.0
        assert metadata["dspine.rope.scaling.yarn_beta_slow"] == 2.0

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("factor", 0.5),
            ("factor", ABSENT),
            ("attention_factor", 0),
            ("mscale", 0.7),
            ("mscale_all_dim", 0.7),
            ("truncate", False),
            ("beta_fast", 0.5),
            ("original_max_position_embeddings", 0),
            ("short_factor", [1.0]),
        ],
    )
    def test_yarn_refuses(self, key: str, value: Any, tmp_path: Path) -> None:
        draft = Draft.golden()
        draft.set("rope_parameters", dict(YARN))
        draft.set(f"rope_parameters.{key}", value)
        assert f"rope_parameters.{key}" in refusal(draft, tmp_path)

    def test_bases_must_agree(self, tmp_path: Path) -> None:
        draft = Draft.golden()
        draft.set("rope_theta", 10000.0)
        message = refusal(draft, tmp_path)
        assert "rope_theta = 10000" in message
        assert "rope_parameters.rope_theta = 1e+06" in message

    def test_scalings_must_agree(self, tmp_path: Path) -> None:
        draft = Draft.golden()
        draft.set("rope_scaling", dict(YARN))
        assert "rope_scaling says" in refusal(draft, tmp_path)
        draft.set("rope_parameters", {"rope_theta": 1e6, **YARN})
        assert metadata_of(draft, tmp_path)["dspine.rope.scaling.type"] == "yarn"

    def test_base_is_needed(self, tmp_path: Path) -> None:
        draft = Draft.golden()
        draft.set("rope_theta", ABSENT)
        draft.set("rope_parameters", {"rope_type": "default"})
        assert "has no rope_theta" in refusal(draft, tmp_path)

    def test_null_scaling_is_none(self, tmp_path: Path) -> None:
        draft = Draft.golden()
        draft.set("rope_parameters", ABSENT)
        draft.set("rope_scaling", None)
        assert metadata_of(draft, tmp_path)["dspine.rope.scaling.type"] == "none"
