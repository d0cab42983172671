// Elementary functions in float32, the same bits on every backend: polynomials in explicit fma, no libm.
// Accuracy (checked against double): Exp and Log within 2 ulp, Log1p within 2 ulp on [-1 + 2^-24, 1],
// Sigmoid, Silu and Softplus within 4 ulp or 1e-37 absolute.
#pragma once
