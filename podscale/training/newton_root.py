"""Constants of the Newton iteration for inverse roots, which Shampoo of both engines has."""

NEWTON_ITERATIONS = 60
"""Most iterations: each multiplies a small eigenvalue by (1 + 1/p) ^ p, at least 2; the last few converge
quadratically."""
NEWTON_TOLERANCE = {4: 1e-6, 8: 1e-12}
"""Largest difference from the identity at which a matrix has converged, by the bytes of its numbers."""
MAX_NEWTON_ERROR = 0.1
"""Largest difference from the identity after all iterations at which the root is used."""
