"""slim: a small CPU engine for block-speculative decoding. Runs as a server (`python -m slim_engine.server`); imports nothing of SpecPilot."""

__version__ = "0.1.0"
