"""Bytes and operations of one decode round, by component, from the shapes alone.

A round of a speculative engine is one draft pass (the tapped hidden states of the tokens committed last time
become context keys and values; then one block per request goes through the drafter and the draft head) and one
target pass over `rows` tokens per request. An autoregressive round is a target pass over one row.

What is counted:
- weights once per pass, at the weight format's width; a matrix that both `draft.kv` and `draft.qkv` apply is
  counted in `draft.kv` only, so that the sum stays a lower bound for an engine that fuses the two;
- keys and values (and the recurrent state) of the context, read once per request and layer, and the new rows written;
- activations that the round hands from one matrix to the next. They normally stay in the last-level cache, so
  `roofline.py` charges them to memory only when one step's activations exceed that cache.
- two operations per multiply-add. Softmax, norms and activation functions are left out: they are below 1 % and
  leaving them out keeps the bound a bound.
`launches` counts the dependent steps of a component (each at least one kernel launch or thread barrier);
norms, embedding, sampling fuse into their neighbours and count none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .errors import CostModelError
from .shapes import SCOPES, Attention, DrafterShape, Matrix, Recurrent, TargetShape

W12_BITS = 12.03
"""Average width of the 12-bit lossless weight format with its escapes (facts 6)."""
FORMATS = {"float32": 32.0, "bfloat16": 16.0, "w12": W12_BITS}
"""Weight formats by name, in bits per weight."""


@dataclass(frozen=True)
class Regime:
    """The load for which a round is computed."""

    rows: int = 1
    """Target rows per request in a round: 1 for autoregression, verified drafts + 1 for speculation."""
    requests: int = 1
    context_len: int = 512
    """Tokens already in the caches, per request."""
    weight_bits: float = 16.0
    kv_bits: float = 16.0
    activation_bits: float = 32.0
    draft_rows: int | None = None
    """Block tokens per request in the draft pass; None: the drafter's block size if more than one row is verified,
    else no draft pass."""
    accepted_length: float = 1.0
    """Tokens committed per round: so many context rows enter the drafter's caches."""
    draft_vocab: int | None = None
    """Rows of the draft head where the drafter uses a reduced one; None: the target's whole vocabulary."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.requests < 1 or self.context_len < 0:
            raise CostModelError(f"regime: rows and requests must be at least 1, context_len at least 0: {self}")
        if self.weight_bits <= 0 or self.kv_bits <= 0 or self.accepted_length < 0:
            raise CostModelError(f"regime: bits must be positive, accepted_length not negative: {self}")


@dataclass(frozen=True)
class Work:
    """What one component moves and computes in a round. Bytes and operations, not times."""

    component: str
    weight_bytes: float = 0.0
    state_bytes: float = 0.0
    """Keys, values, recurrent state and gathered table rows."""
    activation_bytes: float = 0.0
    """All activations in and out; `step_activation_bytes` is the largest single step of them."""
    step_activation_bytes: float = 0.0
    operations: float = 0.0
    launches: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.component,
            self.weight_bytes + other.weight_bytes,
            self.state_bytes + other.state_bytes,
            self.activation_bytes + other.activation_bytes,
            max(self.step_activation_bytes, other.step_activation_bytes),
            self.operations + other.operations,
            self.launches + other.launches,
        )

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations per byte of weights and state."""
        moved = self.weight_bytes + self.state_bytes
        return self.operations / moved if moved else 0.0


def round_work(target: TargetShape, drafter: DrafterShape | None, regime: Regime) -> list[Work]:
    """Return the work of one decode round, one entry per component, in the order of the round."""
    parts = _target_pass(target, regime)
    if drafter is not None and (regime.rows > 1 or regime.draft_rows):
        if drafter.hidden != target.hidden:
            raise CostModelError(
                f"drafter hidden size {drafter.hidden} differs from the target's {target.hidden}: not its drafter"
            )
        parts = [*_draft_pass(target, drafter, regime), *parts]
    return _merge([*parts, Work("sample"), Work("host")])


def _merge(parts: Iterable[Work]) -> list[Work]:
    found: dict[str, Work] = {}
    for part in parts:
        found[part.component] = found[part.component] + part if part.component in found else part
    return [found[name] for name in SCOPES if name in found]


def matmul(matrix: Matrix, rows: float, regime: Regime, *, weights: bool = True) -> Work:
    """Work of one weight matrix over `rows` rows; `weights=False` when its bytes were counted elsewhere."""
    bits = regime.weight_bits if matrix.packed else 16.0
    step = rows * (matrix.n + matrix.k) * regime.activation_bits / 8
    return Work(
        matrix.scope,
        weight_bytes=matrix.params * bits / 8 if weights else 0.0,
        activation_bytes=step * matrix.count,
        step_activation_bytes=step,
        operations=2.0 * matrix.params * rows,
        launches=matrix.count,
    )


def attention(scope: str, layer: Attention, rows: int, regime: Regime) -> Work:
    """Work of the softmax attention layers: K and V of the visible context once, plus the block's own rows."""
    seen = layer.visible(regime.context_len)
    width = 2 * layer.kv_heads * layer.head_dim
    kv_positions = regime.requests * (seen + rows)
    pairs = rows * (seen + (rows + 1) / 2) * regime.requests
    return Work(
        scope,
        state_bytes=layer.layers * kv_positions * width * regime.kv_bits / 8,
        operations=4.0 * layer.layers * layer.q_heads * layer.head_dim * pairs,
        launches=layer.layers,
    )


def recurrent(scope: str, layer: Recurrent, rows: int, regime: Regime) -> Work:
    """Work of gated-delta-rule layers: the state is read and written once per round (facts 7.3, closed form)."""
    cells = layer.heads * layer.key_dim * layer.value_dim
    window = layer.conv_channels * (layer.conv_width - 1) * 2.0
    return Work(
        scope,
        state_bytes=regime.requests * (2.0 * layer.state_bytes + layer.layers * 2 * window),
        operations=regime.requests * rows * layer.layers * (6.0 * cells + 2.0 * layer.conv_channels * layer.conv_width),
        launches=layer.layers,
    )


def _target_pass(target: TargetShape, regime: Regime) -> list[Work]:
    rows = regime.rows * regime.requests
    parts = [
        Work("target.embed", state_bytes=rows * target.hidden * 2.0),
        Work("target.norm", weight_bytes=(target.norm_params + target.hidden) * 2.0),
    ]
    parts += [replace(matmul(m, rows, regime), launches=m.count if m.packed else 0) for m in target.matrices]
    parts += [attention("target.attention", layer, regime.rows, regime) for layer in target.attention]
    parts += [recurrent("target.attention", layer, regime.rows, regime) for layer in target.recurrent]
    return parts


def _draft_pass(target: TargetShape, drafter: DrafterShape, regime: Regime) -> list[Work]:
    block = regime.draft_rows or drafter.block_size
    rows, context_rows = block * regime.requests, regime.accepted_length * regime.requests
    slots = max(block - 1, 1) * regime.requests
    parts = [Work("draft.norm", weight_bytes=drafter.norm_params * 2.0)]
    for matrix in drafter.matrices:
        if matrix.scope == "draft.fc":
            parts.append(matmul(matrix, context_rows, regime))
        elif matrix.scope == "draft.kv":
            parts.append(matmul(matrix, context_rows, regime))
            own = replace(matrix, scope="draft.qkv")
            parts.append(replace(matmul(own, rows, regime, weights=False), launches=0))
        elif matrix.scope == "draft.selector":
            parts.append(_selector(matrix, drafter, slots, regime))
        else:
            parts.append(matmul(matrix, rows, regime))
    parts += [attention("draft.attention", layer, block, regime) for layer in drafter.attention]
    if drafter.conv_params:
        parts.append(Work("draft.conv", weight_bytes=drafter.conv_params * 2.0))
    parts.append(
        matmul(Matrix("draft.head", "lm_head", regime.draft_vocab or target.vocab, target.hidden), slots, regime)
    )
    return parts


def _selector(matrix: Matrix, drafter: DrafterShape, slots: int, regime: Regime) -> Work:
    """DFlash2's candidate selector: the projection, then top_k dot products of length rank, slot after slot."""
    gathered = slots * (drafter.selector_top_k + 1) * drafter.selector_rank * 2.0
    walk = Work(
        "draft.selector",
        state_bytes=gathered,
        operations=2.0 * slots * drafter.selector_top_k * drafter.selector_rank,
        launches=1,
    )
    return matmul(matrix, slots, regime) + walk
