"""Importers: turn a model that arrives in a foreign container into a Hugging Face checkpoint folder.

May not touch the control plane, torch, or the network.
"""
