"""The libraries with which this engine computes and communicates, by version: they must be the same on all ranks."""

from podscale.version import installed

DALI_PACKAGES = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")


def library_versions() -> dict[str, str]:
    """Versions by name; "none" where it is not there."""
    import torch
    from torch import distributed as dist

    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    return {
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl)) or "none",
        "cuDNN": _cudnn(),
        "torchvision": installed("torchvision") or "none",
        "DALI": next(filter(None, map(installed, DALI_PACKAGES)), "none"),
    }


def _cudnn() -> str:
    import torch

    try:
        return str(torch.backends.cudnn.version() or "none")
    except RuntimeError:  # a build for CUDA whose CUDA libraries were left out, as in the CPU image
        return "none"
