"""Fast import of kfp without its API client, which takes three quarters of two to three seconds.

`import kfp` loads the client and every model of the Kubernetes API, unless an environment variable marks the process as
a running component. Compiling and local runs need neither. Without the variable, as in a later kfp, the import is slow.
"""

import os
import warnings

_SWITCH = "_KFP_RUNTIME"
_before = os.environ.get(_SWITCH)
os.environ[_SWITCH] = "true"
try:
    import kfp  # noqa: F401
finally:
    if _before is None:
        del os.environ[_SWITCH]
    else:
        os.environ[_SWITCH] = _before

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about future default images, which we do not use
    from kfp import compiler, dsl, local

__all__ = ["compiler", "dsl", "local"]
