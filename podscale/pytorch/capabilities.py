"""What the installed PyTorch can use here, for `podscale doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """Versions and devices; empty strings and lists where there is none."""

    version: str
    cuda: str
    gpus: list[str]
    gloo: bool
    nccl: str


def probe() -> Capabilities:
    """Asks PyTorch; nothing is allocated on a device."""
    import torch
    import torch.distributed

    available = torch.distributed.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Capabilities(
        version=torch.__version__,
        cuda=torch.version.cuda or "",
        gpus=gpus,
        gloo=available and torch.distributed.is_gloo_available(),
        nccl=nccl if available else "",
    )
