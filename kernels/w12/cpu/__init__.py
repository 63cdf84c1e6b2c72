"""W12 on the CPU: C++ kernels for AVX2 (AVX-512 where the processor has it), their loader, and the plain-torch reference.

Nothing is compiled or loaded on import. `linear` is what an engine uses; `reference` is what it is tested against.
"""
