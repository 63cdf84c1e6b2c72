"""What a person sees of a run: the live view, the closing summary, and one self-contained HTML report.

Reads plain records that the loop builds from the journal; starts nothing, measures nothing.
"""
