"""The one error of the cost model. It is a `ValueError`, so that the folder can be used without the rest."""

from __future__ import annotations


class CostModelError(ValueError):
    """Something in a config, sheet or trace makes the arithmetic impossible. The text says where and what to do."""
