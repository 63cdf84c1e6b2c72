"""W12 on the CPU: C++ kernels for AVX2 and, opt in, AVX-512, their loader, and the plain-torch reference.

Nothing is compiled or loaded on import. `linear` is what an engine uses; `reference` is what it is tested against.
"""
