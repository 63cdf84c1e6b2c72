"""What a run hands back: a self-contained engine with its evidence, or one reviewable patch per mechanism.

Reads the run folder; writes only the destination, which appears complete or not at all. Imports contracts, journal,
workspace, deployment and models of ours. What the exported folder itself runs lives in `files/` and stands alone.
"""

from specpilot.export.export import ExportResult, export_run

__all__ = ["ExportResult", "export_run"]
