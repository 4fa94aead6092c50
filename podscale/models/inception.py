"""Inception-V3 (Szegedy 2015) and Inception-ResNet-V2 (Szegedy 2016) as tables.

Names, channels and paddings are those of published weights: torchvision's of Inception-V3 and timm's of
Inception-ResNet-V2. At 1000 classes the first has 27,161,264 parameters with its auxiliary head and 23,834,568 without,
the second 55,843,464.
"""

from collections.abc import Iterator

from podscale.config import ModelSection
from podscale.models.branches import BranchNode, BranchTable, ConvNode, Node, Nodes, PoolNode, ResidualNode
from podscale.models.spec import LayerSpec, Window

INCEPTION_NAMES = ("inception_v3", "inception_resnet_v2")
MAX_POOL_HALF = PoolNode("max", Window(3, 2, 0))
BLOCKS_35, BLOCKS_17, BLOCKS_8 = 10, 20, 9
"""Residual blocks at each size of image, named by its side for images of 299 px; one more at 8 px has no ReLU."""


def layers(model: ModelSection, classes: int) -> Iterator[LayerSpec]:
    return inception_table(model).layers(classes)


def inception_table(model: ModelSection) -> BranchTable:
    """Return the table of a document's network."""
    write = ConvBuilder(model.width)
    return _resnet_v2(write) if model.name == "inception_resnet_v2" else _v3(write, model.has_auxiliary_head)


class ConvBuilder:
    """Builder of convolutions with the papers' channels at width 64, and in proportion at others."""

    def __init__(self, width: int) -> None:
        self._width = width

    def conv(self, name: str, outputs: int, rows: int = 1, columns: int = 0) -> ConvNode:
        """Return a rows x columns (default: square) convolution with stride 1 and same padding."""
        return ConvNode(name, outputs * self._width // 64, (rows, columns or rows))

    def valid_conv(self, name: str, outputs: int, kernel: int, stride: int = 1) -> ConvNode:
        """Return a kernel x kernel convolution without padding."""
        return ConvNode(name, outputs * self._width // 64, (kernel, kernel), stride, same_padding=False)


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
    at_35 = (
        _factorised_5(write, "Mixed_5b", 32),
        _factorised_5(write, "Mixed_5c", 64),
        _factorised_5(write, "Mixed_5d", 64),
    )
    at_17 = (
        _reduction_6(write),
        _factorised_7(write, "Mixed_6b", 128),
        _factorised_7(write, "Mixed_6c", 160),
        _factorised_7(write, "Mixed_6d", 160),
        _factorised_7(write, "Mixed_6e", 192),
    )
    at_8 = (_reduction_7(write), _expanded_8(write, "Mixed_7b"), _expanded_8(write, "Mixed_7c"))
    head = (PoolNode("average", Window(5, 3, 0)), conv("AuxLogits.conv0", 128), valid("AuxLogits.conv1", 768, 5))
    return BranchTable(
        (stem, at_35, at_17, at_8),
        classifier="fc",
        auxiliary=head if auxiliary else (),
        auxiliary_after=2,
        auxiliary_classifier="AuxLogits.fc",
    )


def _factorised_5(write: ConvBuilder, name: str, pooled: int) -> Node:
    """Figure 5 of Szegedy 2015: a 5x5 as two 3x3 in one branch."""
    conv = write.conv
    return BranchNode(
        (
            (conv(f"{name}.branch1x1", 64),),
            (conv(f"{name}.branch5x5_1", 48), conv(f"{name}.branch5x5_2", 64, 5)),
            (
                conv(f"{name}.branch3x3dbl_1", 64),
                conv(f"{name}.branch3x3dbl_2", 96, 3),
                conv(f"{name}.branch3x3dbl_3", 96, 3),
            ),
            (PoolNode("average", Window(3, 1, 1)), conv(f"{name}.branch_pool", pooled)),
        )
    )


def _reduction_6(write: ConvBuilder) -> Node:
    conv, valid, name = write.conv, write.valid_conv, "Mixed_6a"
    return BranchNode(
        (
            (valid(f"{name}.branch3x3", 384, 3, stride=2),),
            (
                conv(f"{name}.branch3x3dbl_1", 64),
                conv(f"{name}.branch3x3dbl_2", 96, 3),
                valid(f"{name}.branch3x3dbl_3", 96, 3, stride=2),
            ),
            (MAX_POOL_HALF,),
        )
    )


def _factorised_7(write: ConvBuilder, name: str, inner: int) -> Node:
    """Figure 6: 7x7 as 1x7 and 7x1."""
    conv = write.conv
    return BranchNode(
        (
            (conv(f"{name}.branch1x1", 192),),
            (
                conv(f"{name}.branch7x7_1", inner),
                conv(f"{name}.branch7x7_2", inner, 1, 7),
                conv(f"{name}.branch7x7_3", 192, 7, 1),
            ),
            (
                conv(f"{name}.branch7x7dbl_1", inner),
                conv(f"{name}.branch7x7dbl_2", inner, 7, 1),
                conv(f"{name}.branch7x7dbl_3", inner, 1, 7),
                conv(f"{name}.branch7x7dbl_4", inner, 7, 1),
                conv(f"{name}.branch7x7dbl_5", 192, 1, 7),
            ),
            (PoolNode("average", Window(3, 1, 1)), conv(f"{name}.branch_pool", 192)),
        )
    )


def _reduction_7(write: ConvBuilder) -> Node:
    conv, valid, name = write.conv, write.valid_conv, "Mixed_7a"
    return BranchNode(
        (
            (conv(f"{name}.branch3x3_1", 192), valid(f"{name}.branch3x3_2", 320, 3, stride=2)),
            (
                conv(f"{name}.branch7x7x3_1", 192),
                conv(f"{name}.branch7x7x3_2", 192, 1, 7),
                conv(f"{name}.branch7x7x3_3", 192, 7, 1),
                valid(f"{name}.branch7x7x3_4", 192, 3, stride=2),
            ),
            (MAX_POOL_HALF,),
        )
    )


def _expanded_8(write: ConvBuilder, name: str) -> Node:
    """Figure 7: 3x3 as parallel 1x3 and 3x1, for many channels on the smallest images."""
    conv = write.conv

    def fork(before: str) -> Node:
        return BranchNode(((conv(f"{name}.{before}a", 384, 1, 3),), (conv(f"{name}.{before}b", 384, 3, 1),)))

    return BranchNode(
        (
            (conv(f"{name}.branch1x1", 320),),
            (conv(f"{name}.branch3x3_1", 384), fork("branch3x3_2")),
            (conv(f"{name}.branch3x3dbl_1", 448), conv(f"{name}.branch3x3dbl_2", 384, 3), fork("branch3x3dbl_3")),
            (PoolNode("average", Window(3, 1, 1)), conv(f"{name}.branch_pool", 192)),
        )
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
    at_35 = (_mixed_5b(write), *(_block_35(write, f"repeat.{number}") for number in range(BLOCKS_35)))
    at_17 = (_reduction_a(write), *(_block_17(write, f"repeat_1.{number}") for number in range(BLOCKS_17)))
    at_8 = (
        _reduction_b(write),
        *(_block_8(write, f"repeat_2.{number}") for number in range(BLOCKS_8)),
        _block_8(write, "block8", last=True),
        conv("conv2d_7b", 1536),
    )
    return BranchTable((stem, at_35, at_17, at_8), classifier="classif")


def _mixed_5b(write: ConvBuilder) -> Node:
    conv, name = write.conv, "mixed_5b"
    return BranchNode(
        (
            (conv(f"{name}.branch0", 96),),
            (conv(f"{name}.branch1.0", 48), conv(f"{name}.branch1.1", 64, 5)),
            (
                conv(f"{name}.branch2.0", 64),
                conv(f"{name}.branch2.1", 96, 3),
                conv(f"{name}.branch2.2", 96, 3),
            ),
            (PoolNode("average", Window(3, 1, 1), count_padding=False), conv(f"{name}.branch3.1", 64)),
        )
    )


def _block_35(write: ConvBuilder, name: str) -> Node:
    """Figure 16 of Szegedy 2016."""
    conv = write.conv
    branches = BranchNode(
        (
            (conv(f"{name}.branch0", 32),),
            (conv(f"{name}.branch1.0", 32), conv(f"{name}.branch1.1", 32, 3)),
            (
                conv(f"{name}.branch2.0", 32),
                conv(f"{name}.branch2.1", 48, 3),
                conv(f"{name}.branch2.2", 64, 3),
            ),
        )
    )
    return ResidualNode(f"{name}.conv2d", branches, 0.17)


def _reduction_a(write: ConvBuilder) -> Node:
    conv, valid, name = write.conv, write.valid_conv, "mixed_6a"
    return BranchNode(
        (
            (valid(f"{name}.branch0", 384, 3, stride=2),),
            (
                conv(f"{name}.branch1.0", 256),
                conv(f"{name}.branch1.1", 256, 3),
                valid(f"{name}.branch1.2", 384, 3, stride=2),
            ),
            (MAX_POOL_HALF,),
        )
    )


def _block_17(write: ConvBuilder, name: str) -> Node:
    """Figure 17."""
    conv = write.conv
    branches = BranchNode(
        (
            (conv(f"{name}.branch0", 192),),
            (
                conv(f"{name}.branch1.0", 128),
                conv(f"{name}.branch1.1", 160, 1, 7),
                conv(f"{name}.branch1.2", 192, 7, 1),
            ),
        )
    )
    return ResidualNode(f"{name}.conv2d", branches, 0.10)


def _reduction_b(write: ConvBuilder) -> Node:
    conv, valid, name = write.conv, write.valid_conv, "mixed_7a"
    return BranchNode(
        (
            (conv(f"{name}.branch0.0", 256), valid(f"{name}.branch0.1", 384, 3, stride=2)),
            (conv(f"{name}.branch1.0", 256), valid(f"{name}.branch1.1", 288, 3, stride=2)),
            (
                conv(f"{name}.branch2.0", 256),
                conv(f"{name}.branch2.1", 288, 3),
                valid(f"{name}.branch2.2", 320, 3, stride=2),
            ),
            (MAX_POOL_HALF,),
        )
    )


def _block_8(write: ConvBuilder, name: str, *, last: bool = False) -> Node:
    """Figure 19. The last block of the network is scaled by 1 and has no ReLU."""
    conv = write.conv
    branches = BranchNode(
        (
            (conv(f"{name}.branch0", 192),),
            (
                conv(f"{name}.branch1.0", 192),
                conv(f"{name}.branch1.1", 224, 1, 3),
                conv(f"{name}.branch1.2", 256, 3, 1),
            ),
        )
    )
    return ResidualNode(f"{name}.conv2d", branches, 1.0 if last else 0.20, is_linear=last)
