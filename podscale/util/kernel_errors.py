"""Errors of Triton's kernels, without an import of Triton before one is raised."""

from subprocess import SubprocessError


def triton_errors() -> tuple[type[Exception], ...]:
    """Return Triton's own error: code that it cannot compile, or too many registers or bytes of shared memory."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return what is raised if a kernel cannot be compiled or launched here, for want of a C compiler too."""
    return (RuntimeError, OSError, SubprocessError, *triton_errors())
