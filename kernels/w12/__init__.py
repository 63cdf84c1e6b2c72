"""W12: BF16 weights held losslessly in 12 bits, and the matrix products that read them so.

A BF16 word is sign, eight exponent bits and seven mantissa bits. The exponents of one weight matrix span few values, so
four bits say which of fifteen neighbours a weight has; the rare rest (about one weight in five thousand) is listed with
its true word. `format` holds the logical planes, `container` the checkpoint on disk, `cpu` the C++ product; the GPU
kernels lie beside them. Everything here runs in the engine's process: torch is allowed, the control plane is not.
"""
