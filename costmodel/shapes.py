"""The shape of a model as the cost model sees it: weight matrices, attention and recurrent layers, by scope.

A scope is the name under which an engine profiles a part of the decode round (`target.mlp`, `draft.fc` ...).
This module holds records and arithmetic on their own fields; reading configs is `targets.py` and `drafters.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET_SCOPES = (
    "target.embed", "target.norm", "target.qkv", "target.attention", "target.o", "target.mlp", "target.head",
)  # fmt: skip
DRAFT_SCOPES = (
    "draft.fc", "draft.kv", "draft.norm", "draft.qkv", "draft.attention", "draft.o", "draft.mlp",
    "draft.conv", "draft.head", "draft.selector",
)  # fmt: skip
OTHER_SCOPES = ("sample", "host")
SCOPES = DRAFT_SCOPES + TARGET_SCOPES + OTHER_SCOPES
"""Every component name, in the order of a decode round."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [n, k] that occurs `count` times (once a layer) and is read in full by every pass."""

    scope: str
    name: str
    n: int
    k: int
    count: int = 1
    packed: bool = True
    """Whether a weight format applies; small vectors and convolutions stay in the checkpoint's BF16."""

    @property
    def params(self) -> int:
        """Number of weights, all occurrences."""
        return self.n * self.k * self.count


@dataclass(frozen=True)
class Attention:
    """`layers` softmax attention layers with the same heads; `window` caps how much context they read."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def visible(self, context_len: int) -> int:
        """Context positions that one query reads."""
        return context_len if self.window is None else min(context_len, self.window)


@dataclass(frozen=True)
class Recurrent:
    """`layers` gated-delta-rule layers: a float32 state [heads, key_dim, value_dim] and a convolution window."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int

    @property
    def state_bytes(self) -> int:
        """Float32 state of one sequence over all layers, in bytes (facts 3.1: 151 MB for Qwen3.8-27B)."""
        return 4 * self.layers * self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class TargetShape:
    """A target model: what one forward pass reads and computes."""

    family: str
    hidden: int
    layers: int
    vocab: int
    matrices: tuple[Matrix, ...]
    attention: tuple[Attention, ...]
    recurrent: tuple[Recurrent, ...]
    norm_params: int
    """Norm weights inside the layers (the final norm is `hidden` more)."""
    tied: bool
    weight_bits: float
    """Width of the checkpoint's own weight format."""

    @property
    def head_params(self) -> int:
        """Weights of the language-model head [vocab, hidden]."""
        return self.vocab * self.hidden

    @property
    def layer_params(self) -> int:
        """Weights inside the decoder layers, norms included."""
        return sum(m.params for m in self.matrices if m.scope != "target.head") + self.norm_params

    @property
    def total_params(self) -> int:
        """Layers, embedding, head (once if tied) and final norm."""
        tables = 1 if self.tied else 2
        return self.layer_params + tables * self.head_params + self.hidden

    def read_bytes(self, bits: float = 16.0) -> float:
        """Bytes that one forward pass streams: layers and head; single embedding rows are ignored (facts 0)."""
        return (self.layer_params + self.head_params) * bits / 8


@dataclass(frozen=True)
class DrafterShape:
    """A block drafter (DFlash, DFlash2): its own layers; embedding and head are the target's."""

    family: str
    hidden: int
    layers: int
    block_size: int
    taps: int
    matrices: tuple[Matrix, ...]
    """`draft.kv` holds k_proj and v_proj, which serve context rows and block rows; `draft.qkv` holds q_proj."""
    attention: tuple[Attention, ...]
    norm_params: int
    conv_params: int
    """Base kernels of DFlash2's dynamic convolutions."""
    selector_rank: int
    selector_top_k: int
    vocab: int

    @property
    def codebook_params(self) -> int:
        """DFlash2's two candidate codebooks [vocab, rank]; a round reads only a few of their rows."""
        return 2 * self.vocab * self.selector_rank

    @property
    def streamed_params(self) -> int:
        """Own weights that one draft pass reads in full."""
        return sum(m.params for m in self.matrices) + self.norm_params + self.conv_params

    @property
    def total_params(self) -> int:
        """All weights in the drafter's checkpoint."""
        return self.streamed_params + self.codebook_params
