"""The memory of mechanisms: what made an engine faster, under which conditions, and how that is known.

A mechanism is a reviewable patch with preconditions; an effect is one measured and gated outcome of it on
one deployment. Recall *adds* candidates for a run to try; it never forbids one, and nothing here is believed
without being measured and gated again. This package imports nothing of ours and never touches a worktree.
"""

from .errors import (
    InvalidMechanismError,
    MemoryError_,
    NoSuchMechanismError,
    SchemaTooNewError,
    SeedError,
    StoreUnavailableError,
    TamperedError,
)
from .records import (
    Effect,
    Hardware,
    Mechanism,
    Preconditions,
    Recalled,
    RecallQuery,
    Regime,
    Stats,
    StoredMechanism,
)
from .store import MemoryStore

__all__ = [
    "Effect",
    "Hardware",
    "InvalidMechanismError",
    "Mechanism",
    "MemoryError_",
    "MemoryStore",
    "NoSuchMechanismError",
    "Preconditions",
    "RecallQuery",
    "Recalled",
    "Regime",
    "SchemaTooNewError",
    "SeedError",
    "Stats",
    "StoreUnavailableError",
    "StoredMechanism",
    "TamperedError",
]
