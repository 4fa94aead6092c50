"""The section about Shampoo, read where the optimizer is of that name."""

from typing import Literal

from podscale.config.fields import result_field
from podscale.config.section import Section


class ShampooSection(Section):
    """Distributed Shampoo (Anil 2020); defaults are those of the code of Google's MLPerf 1.0 entry, `roots` is ours."""

    beta2: float = result_field(
        0.999, "Decay of the moving averages of gradient statistics; 1 = their sum (Gupta 2018).", gt=0, le=1
    )
    eps: float = result_field(1e-6, "Added to the diagonal of statistics before inverse roots are taken.", gt=0)
    block: int = result_field(128, "Most rows of a matrix: longer dimensions are cut, small neighbours merged.", ge=2)
    vectors: bool = result_field(True, "Precondition batch norm and biases too; else they follow the graft alone.")
    exponent: int | None = result_field(
        None, "p of the inverse p-th roots; default: twice the dimensions of a block.", ge=1, le=16
    )
    start_step: int = result_field(1, "First preconditioned update, from 0; those before it follow the graft.", ge=0)
    every_steps: int = result_field(1, "Updates between two in which inverse roots are taken.", ge=1)
    graft: Literal["sgd", "adagrad", "rmsprop"] = result_field(
        "sgd", "The rule that says how long the update of each parameter is (Agarwal 2020); Shampoo says whither."
    )
    graft_eps: float = result_field(1e-10, "Added to the root in the grafts adagrad and rmsprop.", gt=0)
    roots: Literal["eigh", "newton"] = result_field(
        "eigh",
        "How inverse roots are taken: from eigenvalues, or by a coupled Newton iteration of matrix products, which "
        "never waits for the device and fails where statistics are too nearly singular (the old root is kept then).",
    )
    roots_precision: Literal["fp64", "fp32"] = result_field("fp64", "Arithmetic of the inverse roots; kept in fp32.")
