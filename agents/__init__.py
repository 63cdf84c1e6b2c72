"""Workers: those who propose changes to an engine. They propose and edit; they never judge.

`base` is what passes between a worker and the loop; `recall` replays mechanisms from memory, `search` tunes
declared knobs, `external` lets a person or any other agent in, `learning` turns an accepted change into a
mechanism. Git, the journal, measuring and the gate stay with `specpilot/loop`. Imports costmodel and memory
of ours, nothing else. Prompts of workers that use a language model go to `agents/roles/`, one text file each.
"""

from .base import (
    AgentError,
    ClaimDraft,
    ComponentGap,
    DoesNotApplyError,
    FileEdit,
    PatchEdit,
    Proposal,
    WorkContext,
    Worker,
)
from .external import Submission, claim_template, parse_claim, render_brief
from .learning import mechanism_from
from .recall import RecallWorker
from .search import SearchSession, SearchWorker

__all__ = [
    "AgentError",
    "ClaimDraft",
    "ComponentGap",
    "DoesNotApplyError",
    "FileEdit",
    "PatchEdit",
    "Proposal",
    "RecallWorker",
    "SearchSession",
    "SearchWorker",
    "Submission",
    "WorkContext",
    "Worker",
    "claim_template",
    "mechanism_from",
    "parse_claim",
    "render_brief",
]
