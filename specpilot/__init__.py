"""SpecPilot: an agentic optimisation loop for speculative-decoding LLM engines with block drafters."""

__version__ = "0.1.0"
