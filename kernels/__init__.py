"""Kernels, one folder each: reference, Triton (GPU), C++ (CPU) where it pays, shapes, benchmark.

Data plane: may import nothing of ours.
"""
