"""A drafter's config is refused with the key that is wrong, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specpilot.drafters import check_drafter
from specpilot.errors import ModelError
from tests.helpers.command_line import fails, local_deployment, specpilot
from tests.specpilot.loop.setting import CONFIG, DRAFTER_CONFIG

SHIPPED = Path(__file__).parents[2] / "deployments" / "cpu_c1_smollm2-135m_dflash" / "drafter"


def folder(where: Path, drafter: dict[str, Any] | str, target: dict[str, Any] = CONFIG) -> tuple[Path, Path]:
    """Checkpoint folders of a drafter and a target with these configs."""
    for name, config in (("drafter", drafter), ("checkpoint", target)):
        (where / name).mkdir()
        (where / name / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        (where / name / "model.safetensors").write_bytes(b"weights")
    return where / "drafter", where / "checkpoint"


def nested(**changes: Any) -> dict[str, Any]:
    return DRAFTER_CONFIG | {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], **changes}}


def test_the_shipped_drafter_has_blocks_of_8() -> None:
    assert check_drafter(SHIPPED) == 8


def test_dflash_config_wins_and_the_published_default_is_16(tmp_path: Path) -> None:
    assert check_drafter(*folder(tmp_path, nested(block_size=4))) == 4
    (tmp_path / "drafter/config.json").write_text(json.dumps({k: v for k, v in nested().items() if k != "block_size"}))
    assert check_drafter(tmp_path / "drafter", tmp_path / "checkpoint") == 16


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ({k: v for k, v in DRAFTER_CONFIG.items() if k != "hidden_size"}, "`hidden_size` must be a positive integer"),
        ({k: v for k, v in DRAFTER_CONFIG.items() if k != "vocab_size"}, "`vocab_size`"),
        (DRAFTER_CONFIG | {"architectures": ["LlamaForCausalLM"]}, "is not a DFlash drafter"),
        (DRAFTER_CONFIG | {"dflash_config": 3}, "wrong type"),
        (nested(block_size=0), "block_size 0: allowed are 2 to 32"),
        (nested(block_size=33), "block_size 33: allowed are 2 to 32"),
        (nested(block_size=True), "block_size True"),
        (nested(block_size="eight"), "wrong type"),
        (nested(mask_token_id=None), "mask_token_id None"),
        (nested(mask_token_id=512), "mask_token_id 512: must be a token below vocab_size 512"),
        (DRAFTER_CONFIG | {"hidden_size": 128}, "hidden_size 128, but the target has 64"),
        (DRAFTER_CONFIG | {"vocab_size": 1024}, "vocab_size 1024, but the target has 512"),
        (DRAFTER_CONFIG | {"num_target_layers": 30}, "num_target_layers 30, but the target has 2 layers"),
        (nested(target_layer_ids=[0, 2]), "target_layer_ids [0, 2] are not layers of the target, 0 to 1"),
    ],
)
def test_broken_configs(tmp_path: Path, config: dict[str, Any] | str, told: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_drafter(*folder(tmp_path, config))
    assert told in caught.value.message and str(tmp_path / "drafter/config.json") in caught.value.message
    assert caught.value.exit_code == 4


def test_validate_says_so(tmp_path: Path) -> None:
    file = local_deployment(tmp_path)
    folder(tmp_path, nested(block_size=99))
    words = ("deployments", "validate", str(file), "--set", "drafter={method: dflash, path: drafter}")
    assert "block_size 99" in fails(4, *words)
    (tmp_path / "drafter/config.json").write_text(json.dumps(DRAFTER_CONFIG))
    assert specpilot(*words).returncode == 0
