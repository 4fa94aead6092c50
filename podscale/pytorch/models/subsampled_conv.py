"""Strided 1x1 convolutions without oneDNN's faulty kernel, in every network that Podscale builds.

oneDNN's AVX2 kernel for the weight gradient of a strided 1x1 convolution writes past its buffer if there are fewer than
8 input channels in channels_last order and the stride divides the image (oneDNN 3.13.3 in torch 2.15, also in 2.11).
The heap is corrupt then: the process aborts or hangs in the kernel. Kernels of stride 1 are not affected. Convolutions
in groups or with padding have another kernel.

A transposed 1x1 convolution with `output_padding` and fewer than 8 output channels meets the faulty kernel too. It is
left as it is, because classifiers do not have it.
"""

from torch import Tensor, nn
from torch.nn import functional as F

ONEDNN_SAFE_CHANNELS = 8
"""Minimum input channels of oneDNN's AVX2 kernel for strided 1x1 convolutions."""


class SubsampledConv(nn.Conv2d):
    """Strided 1x1 convolution that, on a CPU, drops the unused pixels first. Same parameters, same result."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_cpu:
            return super()._conv_forward(x, weight, bias)  # type: ignore[no-any-return]
        rows, columns = self.stride
        return F.conv2d(x[..., ::rows, ::columns], weight, bias)


def subsample_convs(network: nn.Module) -> nn.Module:
    """Turn the convolutions of `network` that can meet the kernel into `SubsampledConv`, in place; return the network.

    Only the class of a layer changes, as in torch.nn.utils.parametrize: parameters, hooks and shared layers remain. A
    subclass of nn.Conv2d keeps its own forward. One that calls F.conv2d itself is not affected.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and _can_meet_the_kernel(module):
            kind = type(module)
            module.__class__ = SubsampledConv if kind is nn.Conv2d else type(kind.__name__, (SubsampledConv, kind), {})
    return network


def _can_meet_the_kernel(conv: nn.Conv2d) -> bool:
    return (
        conv.kernel_size == (1, 1)
        and conv.stride != (1, 1)
        and conv.in_channels < ONEDNN_SAFE_CHANNELS
        and conv.groups == 1
        and conv.padding in ((0, 0), "valid")
        and type(conv)._conv_forward is nn.Conv2d._conv_forward
    )
