"""Library versions that must be the same on all ranks, and capabilities of torch for `podscale doctor`."""

from dataclasses import dataclass

from podscale.version import installed


@dataclass(frozen=True)
class Capabilities:
    """Versions and devices; an empty string or list if there is none."""

    version: str
    cuda: str
    gpus: list[str]
    gloo: bool
    nccl: str


def probe() -> Capabilities:
    """Return the capabilities of the installed torch, without allocating on a device."""
    import torch
    import torch.distributed

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Capabilities(
        version=torch.__version__,
        cuda=torch.version.cuda or "",
        gpus=gpus,
        gloo=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        nccl=_nccl(),
    )


DALI_PACKAGES = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")


def library_versions() -> dict[str, str]:
    """Return versions by name; "none" if a library is not installed."""
    import torch

    return {
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "NCCL": _nccl() or "none",
        "cuDNN": _cudnn(),
        "torchvision": installed("torchvision") or "none",
        "DALI": next(filter(None, map(installed, DALI_PACKAGES)), "none"),
        "Pillow": installed("pillow") or "none",
        "simplejpeg": installed("simplejpeg") or "none",
    }


def _nccl() -> str:
    """Return the version of NCCL; "" without it."""
    import torch
    from torch import distributed as dist

    has_nccl = dist.is_available() and dist.is_nccl_available()
    return ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""


def _cudnn() -> str:
    import torch

    try:
        return str(torch.backends.cudnn.version() or "none")
    except RuntimeError:  # a CUDA build without its CUDA libraries, as in the CPU image
        return "none"
