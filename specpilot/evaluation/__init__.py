"""Evaluation: starts engines, asks them questions, and says how fast they answered.

The clock, the token count and the arithmetic live here, in the evaluator's process; an engine under test can
influence none of them. This room knows nothing of gates, workers or rounds and never imports torch.
"""
