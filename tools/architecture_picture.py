"""Write docs/images/architecture.svg and the table of packages in docs/explanation/architecture.md.

    python -m tools.architecture_picture

The packages and their allowed imports are the table of the architecture test. The arrows are the imports that the
modules have. An arrow that follows from two others is left out. Packages are placed in layers by the Sugiyama method:
the layer of a package is its longest path to `util`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import fmean

from tests.repository.test_architecture import MODULES, PACKAGES, ROOT, modules_of, package_of

PICTURE = ROOT / "docs/images/architecture.svg"
PAGE = ROOT / "docs/explanation/architecture.md"
BEGIN, END = "<!-- packages: python -m tools.architecture_picture -->\n", "<!-- end of packages -->\n"

PURPOSES = {
    "util": ("helpers, errors", "Helpers without knowledge of a run; errors; the table of environment variables"),
    "config": ("run document", "The run document: sections, checks, reading"),
    "hardware": ("GPUs, TPUs, links", "Accelerators, machine types, links, time of a collective"),
    "data": ("images to batches", "Images to shard sets to batches"),
    "runs": ("run directory", "The run directory: every file that one stage hands to the next"),
    "telemetry": ("metrics, events", "Metrics, events, goodput and trackers of a run"),
    "distributed": ("ranks, heartbeats", "Contract between launcher and worker, and between ranks"),
    "models": ("shapes of networks", "Networks as data: parameter names, shapes, roles, FLOPs"),
    "training": (
        "the training loop",
        "The training loop, schedules and parameter layout of both engines; no framework",
    ),
    "pytorch": ("PyTorch engine", "The PyTorch engine"),
    "jax": ("JAX engine", "The JAX engine, for TPUs; the same module names where the part is the same"),
    "evaluation": ("scores", "Scores from predictions; evaluation.json"),
    "report": ("report.html", "report.html, model card, charts"),
    "prediction": ("podscale predict", "Predictions of a trained model for any images"),
    "export": ("podscale export", "Files of a trained model in common formats, checked against it"),
    "serving": ("podscale serve", "Server of predictions over HTTP: batches, limits, metrics"),
    "launch": ("one pod's workers", "One pod: supervisor, workers, restarts"),
    "kubernetes": ("jobs of a cluster", "Jobs: render, submit, watch, stop, diagnose"),
    "stages": ("a function a stage", "One function for each stage, in this pod or as a job"),
    "monitoring": ("alerts, dashboards", "Rules, alerts, dashboards, local Prometheus, live view"),
    "bench": ("podscale bench", "Benchmarks of this machine and its links"),
    "study": ("podscale study", "Studies: many runs of one document"),
    "components": ("KFP components", "Components of Kubeflow Pipelines, in `components/` at the top of the repository"),
    "pipelines": ("KFP pipelines", "Pipelines and presets, in `pipelines/` at the top of the repository"),
    "api": ("import podscale", "The Python API: the commands as functions"),
    "cli": ("podscale ...", "The command line"),
}
"""Purpose of each package: for its box in the picture, and for its row in the table."""

Node = tuple[str, int]
"""Package and layer, or a bend of an arrow (named after the arrow) and layer."""
Graph = dict[str, set[str]]

BOX_WIDTH, BOX_HEIGHT, BEND_WIDTH, GAP, LAYER_HEIGHT, MARGIN, HEAD_LENGTH = 132, 44, 10, 22, 84, 24, 6
SWEEPS = 60

STYLE = """
    .page { fill: #ffffff } .box { fill: #eef3fb; stroke: #3b6db4 } .arrow { fill: none; stroke: #6b7785 }
    .head { fill: #6b7785 } .name { fill: #14213a; font-weight: 600; font-size: 14px }
    .note { fill: #46536b; font-size: 11px }
    text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; text-anchor: middle }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .box { fill: #17243a; stroke: #6a9be0 } .arrow { stroke: #8e9bab }
      .head { fill: #8e9bab } .name { fill: #eef3fb } .note { fill: #b3c0d4 }
    }
"""


def imports_of_packages() -> Graph:
    """Return the packages that the modules of each package import."""
    graph: Graph = {package: set() for package in PACKAGES}
    for module in MODULES:
        others = {package_of(name) for name in modules_of(module)}
        if package_of(module) in graph:
            graph[package_of(module)] |= (others & PACKAGES.keys()) - {package_of(module)}
    return graph


def reduce_transitively(graph: Graph) -> Graph:
    """Return a graph without the arrows that follow from longer paths."""

    def reachable(package: str) -> set[str]:
        return graph[package].union(*(reachable(other) for other in graph[package]))

    return {
        package: below - set[str]().union(*(reachable(other) for other in below)) for package, below in graph.items()
    }


def layers_of(graph: Graph) -> dict[str, int]:
    """Return the longest path from each package to the bottom."""
    layers: dict[str, int] = {}
    for package in PACKAGES:  # lowest first
        layers[package] = max((layers[other] + 1 for other in graph[package]), default=0)
    return layers


def route(graph: Graph, layers: dict[str, int]) -> list[list[Node]]:
    """Return the nodes that each arrow passes, from top to bottom, a node a layer."""
    paths = []
    for package in PACKAGES:
        for other in sorted(graph[package], key=list(PACKAGES).index):
            bends = [(f"{package}>{other}", layer) for layer in range(layers[package] - 1, layers[other], -1)]
            paths.append([(package, layers[package]), *bends, (other, layers[other])])
    return paths


def width(node: Node) -> int:
    return BOX_WIDTH if node[0] in PACKAGES else BEND_WIDTH


def assign_x(paths: list[list[Node]], layers: dict[str, int]) -> dict[Node, float]:
    """Return the x of each node's centre: near the mean of its neighbours, without an overlap in a layer."""
    rows: dict[int, list[Node]] = defaultdict(list)
    for node in dict.fromkeys(
        [*((package, layer) for package, layer in layers.items()), *(n for p in paths for n in p)]
    ):
        rows[node[1]].append(node)
    neighbours: dict[Node, list[Node]] = defaultdict(list)
    for path in paths:
        for upper, lower in pairwise(path):
            neighbours[upper].append(lower)
            neighbours[lower].append(upper)
    x = {node: float(number * (BOX_WIDTH + GAP)) for row in rows.values() for number, node in enumerate(row)}
    for sweep in range(SWEEPS):
        step = 1 if sweep % 2 else -1
        for layer in sorted(rows, reverse=step < 0):
            _spread(rows[layer], x, lambda node: _target(node, neighbours[node], x))
    left = min(x[node] - width(node) / 2 for node in x)
    return {node: round(value - left + MARGIN, 1) for node, value in x.items()}


def _target(node: Node, others: list[Node], x: dict[Node, float]) -> float:
    return fmean(x[other] for other in others) if others else x[node]


def _spread(row: list[Node], x: dict[Node, float], target: Callable[[Node], float]) -> None:
    """Sort a layer by the targets of its nodes and move overlapping nodes apart, around their common mean."""
    targets = {node: target(node) for node in row}
    row.sort(key=lambda node: (targets[node], node))
    groups: list[tuple[list[Node], list[float]]] = []
    for node in row:
        groups.append(([node], [0.0]))
        while len(groups) > 1 and _centre(*groups[-1], targets) - _centre(*groups[-2], targets) < _distance(
            groups[-2], groups[-1]
        ):
            nodes, offsets = groups.pop()
            first = _distance(groups[-1], (nodes, offsets))
            groups[-1] = ([*groups[-1][0], *nodes], [*groups[-1][1], *(first + offset for offset in offsets)])
    for nodes, offsets in groups:
        start = _centre(nodes, offsets, targets)
        x.update({node: start + offset for node, offset in zip(nodes, offsets, strict=True)})


def _centre(nodes: list[Node], offsets: list[float], targets: dict[Node, float]) -> float:
    """Return the x of a group's first node that brings the group nearest to its targets."""
    return fmean(targets[node] - offset for node, offset in zip(nodes, offsets, strict=True))


def _distance(left: tuple[list[Node], list[float]], right: tuple[list[Node], list[float]]) -> float:
    """Return the least distance between the first nodes of two groups side by side."""
    return left[1][-1] + (width(left[0][-1]) + width(right[0][0])) / 2 + GAP


def draw_arrow(path: list[Node], x: dict[Node, float], y: Callable[[int], float]) -> str:
    """Return an arrow from the lower edge of a box to the upper edge of another, through its bends."""
    half = BOX_HEIGHT / 2
    start, *bends, end = [(x[node], y(node[1])) for node in path]
    stops = [
        *((x1, y1 - half, y1 + half) for x1, y1 in bends),
        (end[0], end[1] - half - HEAD_LENGTH, end[1] - half - HEAD_LENGTH),
    ]
    x0, y0 = start[0], start[1] + half
    commands = [f"M{x0:g} {y0:g}"]
    for x1, y1, lower in stops:  # straight down beside the boxes of a layer
        middle = (y0 + y1) / 2
        commands.append(f"C{x0:g} {middle:g} {x1:g} {middle:g} {x1:g} {y1:g}" + (f"V{lower:g}" if lower > y1 else ""))
        x0, y0 = x1, lower
    return f'  <path class="arrow" marker-end="url(#head)" d="{" ".join(commands)}"/>'


def draw_box(package: str, x: float, y: float) -> list[str]:
    left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
    return [
        f'  <rect class="box" x="{left:g}" y="{top:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>',
        f'  <text class="name" x="{x:g}" y="{y - 3:g}">{package}</text>',
        f'  <text class="note" x="{x:g}" y="{y + 13:g}">{PURPOSES[package][0]}</text>',
    ]


def render_picture() -> str:
    graph = reduce_transitively(imports_of_packages())
    layers = layers_of(graph)
    paths = route(graph, layers)
    x = assign_x(paths, layers)
    highest = max(layers.values())

    def y(layer: int) -> float:
        return MARGIN + BOX_HEIGHT / 2 + (highest - layer) * LAYER_HEIGHT

    wide, high = max(x[node] + width(node) / 2 for node in x) + MARGIN, y(0) + BOX_HEIGHT / 2 + MARGIN
    size = f'width="{wide:g}" height="{high:g}"'
    boxes = [line for package, layer in layers.items() for line in draw_box(package, x[package, layer], y(layer))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" {size} role="img">',
            "  <title>Packages of Podscale and their imports</title>",
            f"  <style>{STYLE}  </style>",
            '  <marker id="head" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
            '    <path class="head" d="M0 0L8 4L0 8z"/>',
            "  </marker>",
            f'  <rect class="page" {size}/>',
            *(draw_arrow(path, x, y) for path in paths),
            *boxes,
            "</svg>",
            "",
        ]
    )


def render_table() -> str:
    """Return the packages, highest first, with their purpose and allowed imports."""
    rows = [
        f"| `{package}` | {PURPOSES[package][1]} | {_names(PACKAGES[package].split())} |"
        for package in reversed(PACKAGES)
    ]
    return "\n".join(["| package, highest first | purpose | may import |", "|---|---|---|", *rows, ""])


def _names(packages: Iterable[str]) -> str:
    return ", ".join(f"`{package}`" for package in packages) or "nothing"


def render_page(page: str) -> str:
    """Return the page with a new table."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{render_table()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    PICTURE.write_text(render_picture(), encoding="utf-8")
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
