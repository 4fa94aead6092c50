"""Tables of networks with branches. The catalogue reads layers and costs from a table; an engine builds from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from podscale.models.spec import LayerSpec, Window, WindowPath


@dataclass(frozen=True)
class ConvNode:
    """A convolution without bias, batch norm and ReLU: parameters <name>.conv.* and <name>.bn.*.

    With `same_padding` a stride of 1 keeps the side; without it nothing is padded. `kernel` is rows and columns.
    """

    name: str
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    same_padding: bool = True

    @property
    def padding(self) -> tuple[int, int]:
        rows, columns = self.kernel
        return (rows // 2, columns // 2) if self.same_padding else (0, 0)

    @property
    def path(self) -> WindowPath:
        """Windows along the side of an image; none if padded with stride 1."""
        if self.same_padding and self.stride == 1:
            return ()
        assert self.kernel[0] == self.kernel[1], "a long kernel keeps both sides"
        return (Window(self.kernel[0], self.stride, self.padding[0]),)


@dataclass(frozen=True)
class PoolNode:
    """Largest value or mean of each window; if `count_padding`, a mean counts the zeros outside the image."""

    kind: Literal["max", "average"]
    window: Window
    count_padding: bool = True


@dataclass(frozen=True)
class BranchNode:
    """Parallel branches from the same input, their outputs concatenated."""

    branches: tuple["Nodes", ...]


@dataclass(frozen=True)
class ResidualNode:
    """x + scale * projection(branches of x), then ReLU unless it is linear; the projection is a 1x1 with bias."""

    projection: str
    branches: BranchNode
    scale: float
    is_linear: bool = False


Node = ConvNode | PoolNode | BranchNode | ResidualNode
Nodes = tuple[Node, ...]


@dataclass(frozen=True)
class BranchTable:
    """A network: stages one after the other, global average, dropout, classifier.

    Args:
        auxiliary: second head of training, which ends in a global average and a classifier too; () if there is none.
        auxiliary_after: stage, from 0, whose output the auxiliary head takes.
    """

    stages: tuple[Nodes, ...]
    classifier: str
    auxiliary: Nodes = ()
    auxiliary_after: int = 0
    auxiliary_classifier: str = ""

    def layers(self, classes: int) -> Iterator[LayerSpec]:
        """Yield the layers in the order of the forward pass."""
        walker = LayerWalker(3, ())
        for number, stage in enumerate(self.stages):
            yield from walker.walk(stage)
            if self.auxiliary and number == self.auxiliary_after:
                head = LayerWalker(walker.channels, walker.path, auxiliary=True)
                yield from head.walk(self.auxiliary)
                yield LayerSpec(self.auxiliary_classifier, "linear", head.channels, classes, bias=True, auxiliary=True)
        yield LayerSpec(self.classifier, "linear", walker.channels, classes, bias=True)


class LayerWalker:
    """Walk over nodes that tracks the number of channels and the windows along the images' side."""

    def __init__(self, channels: int, path: WindowPath, *, auxiliary: bool = False) -> None:
        self.channels, self.path, self._auxiliary = channels, path, auxiliary

    def walk(self, nodes: Sequence[Node]) -> Iterator[LayerSpec]:
        for node in nodes:
            match node:
                case ConvNode():
                    yield self._convolution(node)
                case PoolNode():
                    self.path += () if node.window.stride == 1 else (node.window,)
                case BranchNode():
                    yield from self._branches(node)
                case ResidualNode():
                    yield from self._residual(node)

    def _convolution(self, node: ConvNode) -> LayerSpec:
        inputs, self.channels = self.channels, node.out_channels
        self.path += node.path
        return LayerSpec(
            f"{node.name}.conv",
            "convolution",
            inputs,
            node.out_channels,
            node.kernel,
            node.stride,
            node.padding,
            norm=f"{node.name}.bn",
            path=self.path,
            auxiliary=self._auxiliary,
        )

    def _branches(self, node: BranchNode) -> Iterator[LayerSpec]:
        walkers = [LayerWalker(self.channels, self.path, auxiliary=self._auxiliary) for _ in node.branches]
        for walker, branch in zip(walkers, node.branches, strict=True):
            yield from walker.walk(branch)
        self.channels, self.path = sum(walker.channels for walker in walkers), walkers[0].path

    def _residual(self, node: ResidualNode) -> Iterator[LayerSpec]:
        outputs = self.channels
        yield from self._branches(node.branches)
        inputs, self.channels = self.channels, outputs
        yield LayerSpec(node.projection, "convolution", inputs, outputs, bias=True, path=self.path)
