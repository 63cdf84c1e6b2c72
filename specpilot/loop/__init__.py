"""The orchestrator: a durable workflow over the journal.

`run.py` is the front (optimize, resume); one file per phase of a round. Everything that costs time is a
journal step: recorded before and after it acts, never repeated once finished. This room decides what
happens next; it measures nothing itself (`specpilot.evaluation`) and judges nothing itself (`specpilot.gate`).
"""
