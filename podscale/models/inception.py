"""Inception-V3 (Szegedy 2015) and Inception-ResNet-V2 (Szegedy 2016) as tables.

Names, channels and paddings are those of published weights: torchvision's of Inception-V3 and timm's of
Inception-ResNet-V2. At 1000 classes the first has 27,161,264 parameters with its auxiliary head and 23,834,568 without,
the second 55,843,464.
"""

from collections.abc import Callable, Iterator

from podscale.config import ModelSection
from podscale.models.branches import BranchNode, BranchTable, ConvNode, Node, Nodes, PoolNode, ResidualNode
from podscale.models.spec import LayerSpec, Window

INCEPTION_NAMES = ("inception_v3", "inception_resnet_v2")
MAX_POOL_HALF = PoolNode("max", Window(3, 2, 0))
BLOCKS_35, BLOCKS_17, BLOCKS_8 = 10, 20, 9
"""Residual blocks by the side of their images (299 px at the input); a last one at 8 px is linear, with scale 1."""


def layers(model: ModelSection, classes: int) -> Iterator[LayerSpec]:
    return inception_table(model).layers(classes)


def inception_table(model: ModelSection) -> BranchTable:
    write = ConvBuilder(model.width)
    return _resnet_v2(write) if model.name == "inception_resnet_v2" else _v3(write, model.has_auxiliary_head)


class ConvBuilder:
    """Builder of convolutions with the papers' channels at width 64, and in proportion at others."""

    def __init__(self, width: int, prefix: str = "") -> None:
        self._width, self._prefix = width, prefix

    def block(self, name: str) -> "ConvBuilder":
        """Return the builder of a block's convolutions."""
        return ConvBuilder(self._width, f"{name}.")

    def conv(self, name: str, outputs: int, rows: int = 1, columns: int = 0) -> ConvNode:
        """Return a rows x columns (default: square) convolution with stride 1 and same padding.

        `outputs` are its channels at width 64.
        """
        return ConvNode(self._prefix + name, outputs * self._width // 64, (rows, columns or rows))

    def valid_conv(self, name: str, outputs: int, kernel: int, stride: int = 1) -> ConvNode:
        """Return a kernel x kernel convolution without padding; `outputs` are its channels at width 64."""
        return ConvNode(self._prefix + name, outputs * self._width // 64, (kernel, kernel), stride, same_padding=False)


def parallel(*branches: Nodes) -> BranchNode:
    return BranchNode(branches)


def _v3(write: ConvBuilder, auxiliary: bool) -> BranchTable:
    conv, valid = write.conv, write.valid_conv
    stem: Nodes = (
        valid("Conv2d_1a_3x3", 32, 3, stride=2),
        valid("Conv2d_2a_3x3", 32, 3),
        conv("Conv2d_2b_3x3", 64, 3),
        MAX_POOL_HALF,
        conv("Conv2d_3b_1x1", 80),
        valid("Conv2d_4a_3x3", 192, 3),
        MAX_POOL_HALF,
    )
    at_35 = tuple(_factorised_5(write.block(f"Mixed_5{x}"), pooled) for x, pooled in (("b", 32), ("c", 64), ("d", 64)))
    widths = (("b", 128), ("c", 160), ("d", 160), ("e", 192))
    at_17 = (
        _reduction_6(write.block("Mixed_6a")),
        *(_factorised_7(write.block(f"Mixed_6{x}"), inner) for x, inner in widths),
    )
    at_8 = (
        _reduction_7(write.block("Mixed_7a")),
        _expanded_8(write.block("Mixed_7b")),
        _expanded_8(write.block("Mixed_7c")),
    )
    head = (PoolNode("average", Window(5, 3, 0)), conv("AuxLogits.conv0", 128), valid("AuxLogits.conv1", 768, 5))
    return BranchTable(
        (stem, at_35, at_17, at_8),
        classifier="fc",
        auxiliary=head if auxiliary else (),
        auxiliary_after=2,
        auxiliary_classifier="AuxLogits.fc",
    )


def _factorised_5(block: ConvBuilder, pooled: int) -> Node:
    """Figure 5 of Szegedy 2015: a 5x5 as two 3x3 in one branch."""
    conv = block.conv
    return parallel(
        (conv("branch1x1", 64),),
        (conv("branch5x5_1", 48), conv("branch5x5_2", 64, 5)),
        (conv("branch3x3dbl_1", 64), conv("branch3x3dbl_2", 96, 3), conv("branch3x3dbl_3", 96, 3)),
        (PoolNode("average", Window(3, 1, 1)), conv("branch_pool", pooled)),
    )


def _reduction_6(block: ConvBuilder) -> Node:
    conv, valid = block.conv, block.valid_conv
    return parallel(
        (valid("branch3x3", 384, 3, stride=2),),
        (conv("branch3x3dbl_1", 64), conv("branch3x3dbl_2", 96, 3), valid("branch3x3dbl_3", 96, 3, stride=2)),
        (MAX_POOL_HALF,),
    )


def _factorised_7(block: ConvBuilder, inner: int) -> Node:
    """Figure 6: 7x7 as 1x7 and 7x1."""
    conv = block.conv
    return parallel(
        (conv("branch1x1", 192),),
        (conv("branch7x7_1", inner), conv("branch7x7_2", inner, 1, 7), conv("branch7x7_3", 192, 7, 1)),
        (
            conv("branch7x7dbl_1", inner),
            conv("branch7x7dbl_2", inner, 7, 1),
            conv("branch7x7dbl_3", inner, 1, 7),
            conv("branch7x7dbl_4", inner, 7, 1),
            conv("branch7x7dbl_5", 192, 1, 7),
        ),
        (PoolNode("average", Window(3, 1, 1)), conv("branch_pool", 192)),
    )


def _reduction_7(block: ConvBuilder) -> Node:
    conv, valid = block.conv, block.valid_conv
    return parallel(
        (conv("branch3x3_1", 192), valid("branch3x3_2", 320, 3, stride=2)),
        (
            conv("branch7x7x3_1", 192),
            conv("branch7x7x3_2", 192, 1, 7),
            conv("branch7x7x3_3", 192, 7, 1),
            valid("branch7x7x3_4", 192, 3, stride=2),
        ),
        (MAX_POOL_HALF,),
    )


def _expanded_8(block: ConvBuilder) -> Node:
    """Figure 7: 3x3 as parallel 1x3 and 3x1, for many channels on the smallest images."""
    conv = block.conv

    def fork(name: str) -> Node:
        return parallel((conv(f"{name}a", 384, 1, 3),), (conv(f"{name}b", 384, 3, 1),))

    return parallel(
        (conv("branch1x1", 320),),
        (conv("branch3x3_1", 384), fork("branch3x3_2")),
        (conv("branch3x3dbl_1", 448), conv("branch3x3dbl_2", 384, 3), fork("branch3x3dbl_3")),
        (PoolNode("average", Window(3, 1, 1)), conv("branch_pool", 192)),
    )


def _resnet_v2(write: ConvBuilder) -> BranchTable:
    conv, valid = write.conv, write.valid_conv
    stem: Nodes = (
        valid("conv2d_1a", 32, 3, stride=2),
        valid("conv2d_2a", 32, 3),
        conv("conv2d_2b", 64, 3),
        MAX_POOL_HALF,
        conv("conv2d_3b", 80),
        valid("conv2d_4a", 192, 3),
        MAX_POOL_HALF,
    )
    at_35 = (
        _mixed_5b(write.block("mixed_5b")),
        *(_residual(write, f"repeat.{number}", _branches_35, 0.17) for number in range(BLOCKS_35)),
    )
    at_17 = (
        _reduction_a(write.block("mixed_6a")),
        *(_residual(write, f"repeat_1.{number}", _branches_17, 0.10) for number in range(BLOCKS_17)),
    )
    at_8 = (
        _reduction_b(write.block("mixed_7a")),
        *(_residual(write, f"repeat_2.{number}", _branches_8, 0.20) for number in range(BLOCKS_8)),
        _residual(write, "block8", _branches_8, 1.0, is_linear=True),
        conv("conv2d_7b", 1536),
    )
    return BranchTable((stem, at_35, at_17, at_8), classifier="classif")


def _residual(
    write: ConvBuilder, name: str, branches: Callable[[ConvBuilder], BranchNode], scale: float, is_linear: bool = False
) -> ResidualNode:
    return ResidualNode(f"{name}.conv2d", branches(write.block(name)), scale, is_linear)


def _mixed_5b(block: ConvBuilder) -> Node:
    conv = block.conv
    return parallel(
        (conv("branch0", 96),),
        (conv("branch1.0", 48), conv("branch1.1", 64, 5)),
        (conv("branch2.0", 64), conv("branch2.1", 96, 3), conv("branch2.2", 96, 3)),
        (PoolNode("average", Window(3, 1, 1), count_padding=False), conv("branch3.1", 64)),
    )


def _branches_35(block: ConvBuilder) -> BranchNode:
    """Figure 16 of Szegedy 2016."""
    conv = block.conv
    return parallel(
        (conv("branch0", 32),),
        (conv("branch1.0", 32), conv("branch1.1", 32, 3)),
        (conv("branch2.0", 32), conv("branch2.1", 48, 3), conv("branch2.2", 64, 3)),
    )


def _reduction_a(block: ConvBuilder) -> Node:
    conv, valid = block.conv, block.valid_conv
    return parallel(
        (valid("branch0", 384, 3, stride=2),),
        (conv("branch1.0", 256), conv("branch1.1", 256, 3), valid("branch1.2", 384, 3, stride=2)),
        (MAX_POOL_HALF,),
    )


def _branches_17(block: ConvBuilder) -> BranchNode:
    """Figure 17."""
    conv = block.conv
    return parallel(
        (conv("branch0", 192),),
        (conv("branch1.0", 128), conv("branch1.1", 160, 1, 7), conv("branch1.2", 192, 7, 1)),
    )


def _reduction_b(block: ConvBuilder) -> Node:
    conv, valid = block.conv, block.valid_conv
    return parallel(
        (conv("branch0.0", 256), valid("branch0.1", 384, 3, stride=2)),
        (conv("branch1.0", 256), valid("branch1.1", 288, 3, stride=2)),
        (conv("branch2.0", 256), conv("branch2.1", 288, 3), valid("branch2.2", 320, 3, stride=2)),
        (MAX_POOL_HALF,),
    )


def _branches_8(block: ConvBuilder) -> BranchNode:
    """Figure 19."""
    conv = block.conv
    return parallel(
        (conv("branch0", 192),),
        (conv("branch1.0", 192), conv("branch1.1", 224, 1, 3), conv("branch1.2", 256, 3, 1)),
    )
