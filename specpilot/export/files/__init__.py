"""Files that every exported engine carries: shell scripts and the stand-alone programs behind them.

The `.py` files here run from the export's `tools/` folder with the standard library (and `tokenizers`, which the
engine needs anyway); nothing of SpecPilot is imported. They are copied, never imported by SpecPilot.
"""
