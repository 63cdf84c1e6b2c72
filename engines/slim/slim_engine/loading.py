"""Builds the models of an engine from checkpoint folders and options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slim_engine.checkpoint import digest
from slim_engine.config import TargetConfig, drafter_config, target_config
from slim_engine.dflash import DFlashDrafter
from slim_engine.draft_head import DraftHead
from slim_engine.drafting import Drafter
from slim_engine.errors import CheckpointError
from slim_engine.head import TargetHead
from slim_engine.linear import Compute
from slim_engine.ngram import NgramDrafter
from slim_engine.policy import Policy
from slim_engine.round import Models
from slim_engine.target import TargetModel
from slim_engine.tunables import Tunables, load_tunables


@dataclass(frozen=True)
class EngineOptions:
    """target: folder. drafter: folder, "ngram" or "none". speculation False: the drafter is not even loaded."""

    target: Path
    drafter: str = "none"
    compute: Compute = "float32"
    speculation: bool = True
    max_len: int = 2048
    max_requests: int = 8

    @property
    def method(self) -> str:
        """none, ngram or dflash."""
        if not self.speculation or self.drafter == "none":
            return "none"
        return "ngram" if self.drafter == "ngram" else "dflash"


@dataclass(frozen=True)
class Loaded:
    """Models ready to run, and what `/server_info` says of them."""

    models: Models
    config: TargetConfig
    options: EngineOptions
    tunables: Tunables
    target_sha256: str
    drafter_sha256: str | None
    max_len: int


def load(options: EngineOptions, tunables: Tunables | None = None) -> Loaded:
    """Reads the checkpoints and lays out the weights. Raises CheckpointError, TunableError."""
    tunables = load_tunables() if tunables is None else tunables
    folder = _folder(options.target, "target")
    config = target_config(folder)
    max_len = min(options.max_len, config.max_position)
    pack = tunables["pack_rows"]
    target = TargetModel(folder, config, options.compute, pack, max_len)
    head = TargetHead(target.head_weight, options.compute, pack)
    drafter, drafter_sha = _drafter(options, tunables, config, target, head, max_len)
    policy = Policy(drafter.max_drafts if drafter else 0, tunables["verify_drafts"])
    return Loaded(
        Models(target, head, drafter, policy), config, options, tunables, digest(folder), drafter_sha, max_len
    )


def _drafter(
    options: EngineOptions,
    tunables: Tunables,
    config: TargetConfig,
    target: TargetModel,
    head: TargetHead,
    max_len: int,
) -> tuple[Drafter | None, str | None]:
    if options.method == "none":
        return None, None
    if options.method == "ngram":
        return NgramDrafter(tunables["ngram_min"], tunables["ngram_max"], tunables["ngram_drafts"]), None
    folder = _folder(Path(options.drafter), "drafter")
    shape = drafter_config(folder, config)
    draft_head = DraftHead(head.linear, shape.output_multiplier, shape.final_logit_softcapping)
    drafter = DFlashDrafter(folder, shape, target, draft_head, options.compute, tunables["pack_rows"], max_len)
    drafter.trim_block = tunables["draft_only_verified"]
    return drafter, digest(folder)


def _folder(path: Path, what: str) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{what} {path} is not a folder (a drafter may also be `ngram` or `none`)")
    return path
