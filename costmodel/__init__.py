"""The cost model: what a decode round must cost on a machine, what it does cost, and what closing each gap would gain.

Imports nothing of ours and no torch. `analyse` is the front door; docs/cost-model.md explains the arithmetic.
"""

from __future__ import annotations

from .analyse import analyse, bound_of, shapes
from .arithmetic import FORMATS, W12_BITS, Regime, round_work
from .drafters import drafter_shape
from .errors import CostModelError
from .gaps import Gap, GapTable, gap_table, predicted_gain
from .hardware import Hardware, load_sheet, resolve_hardware, sheet_names
from .probe import measure_machine, measured_machine, this_machine
from .render import machine_table, rich_table
from .roofline import Bound, RoundBound, bounds_by_format, round_bound
from .targets import target_shape
from .trace import Profile, attribute, load_events

__all__ = [
    "FORMATS", "W12_BITS", "Bound", "CostModelError", "Gap", "GapTable", "Hardware", "Profile", "Regime", "RoundBound",
    "analyse", "attribute", "bound_of", "bounds_by_format", "drafter_shape", "gap_table", "load_events", "load_sheet",
    "machine_table", "measure_machine", "measured_machine", "predicted_gain", "resolve_hardware",
    "rich_table", "round_bound", "round_work", "shapes", "sheet_names", "target_shape", "this_machine",
]  # fmt: skip
