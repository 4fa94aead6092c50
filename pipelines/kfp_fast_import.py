"""kfp without its API client, which is three quarters of the two to three seconds that importing kfp takes.

`import kfp` loads the client, and with it every model class of the Kubernetes API, unless it believes to be inside a
running component. Compiling and running here need neither. If a later kfp drops that switch, only the time is lost.
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
    warnings.simplefilter("ignore")  # notices about future default images; ours are always given
    from kfp import compiler, dsl, local

__all__ = ["compiler", "dsl", "local"]
