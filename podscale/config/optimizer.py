"""Optimizer section: update rules, their options, and the running average of the weights.

Options of one rule alone are in a section under its name (Neumann: Krishnan 2018; preconditioned nonlinear conjugate
gradient: Adya 2018; Shampoo; Adam; RMSProp). An option that the chosen rule does not have may stand at its default, as
resolved documents write it; any other value is refused.
"""

from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import BaseModel, model_validator

from podscale.config.fields import Section, conflict_error, result_field
from podscale.util.formatting import join_words


class NeumannSection(Section):
    """Table 1 of the paper, and choices that its algorithm 2 leaves open. See docs/explanation/optimizers.md."""

    alpha: float = result_field(
        1e-7, "Pull towards the running average of the weights: alpha x distance squared.", ge=0
    )
    beta: float = result_field(
        1e-5,
        "Push away from it: beta x number of variables / distance squared; 0 with `alpha` 0: no regulariser.",
        ge=0,
    )
    gamma: float = result_field(0.99, "Decay of that average at each step.", ge=0, lt=1)
    momentum_start: float = result_field(0.5, "Lowest momentum.", ge=0, lt=1)
    momentum_end: float = result_field(0.9, "Highest momentum.", ge=0, lt=1)
    momentum_time: Literal["updates", "since_reset", "epochs"] = result_field(
        "updates",
        "What t counts in the momentum 1 - 1 / (1 + t) between those two: steps since the SGD phase, steps since "
        "the last reset, or epochs since the SGD phase (the paper says no more than t).",
    )
    sgd_epochs: float = result_field(5.0, "Plain SGD this long before the method begins.", ge=0)
    reset_epochs: float = result_field(10.0, "First time between two resets of the momentum; doubled after each.", gt=0)
    on_reset: Literal["hold", "move"] = result_field(
        "hold",
        "`hold`: a reset sets the momentum alone, weights and average stay. `move`: they move, as in other steps.",
    )
    moves_by: Literal["current", "previous"] = result_field(
        "current", "Momentum by which line 11 moves the weights: of this step (ICLR), or the last (arXiv, as quoted)."
    )

    @model_validator(mode="after")
    def _check_neumann(self) -> "NeumannSection":
        if self.momentum_start > self.momentum_end:
            raise conflict_error(
                "momentum_start", f"above momentum_end {self.momentum_end}, to which it rises", got=self.momentum_start
            )
        if self.beta > 0 and self.sgd_epochs == 0:
            raise conflict_error(
                "sgd_epochs",
                "without a phase of SGD the weights begin on their average, and the push of beta has no direction and "
                "no bound",
                got=0,
                hint="Set sgd_epochs above 0, or beta to 0.",
            )
        return self


class NlcgSection(Section):
    """Choices that the authors' program offers, with its defaults. See docs/explanation/optimizers.md."""

    beta: Literal["fletcher_reeves", "polak_ribiere"] = result_field(
        "fletcher_reeves",
        "Share of the last direction in the next, within 0 and 1. `polak_ribiere` keeps one vector more.",
    )
    step: Literal["step", "online", "none"] = result_field(
        "step",
        "How the loss scales the learning rate. `step`: its running average against that of five steps ago. "
        "`online`: the loss of every step against its running average. `none`: not at all.",
    )
    tolerance: float = result_field(
        1.0, "Multiplies the rises of the loss that the table of `step` and `online` names.", gt=0
    )
    lars_coefficient: float = result_field(
        0.0, "Scale each layer's gradient in proportion to |w| / |g| first; 0 = not. The authors suggest 0.001.", ge=0
    )
    norm_gradient_scale: float = result_field(
        1.0, "Multiplies the gradients of batch norm's scale and shift; the authors' program offers 0.01.", gt=0, le=1
    )
    restart_every: int = result_field(0, "Steps after which the direction is the steepest again; 0 = never.", ge=0)
    forget_every: int = result_field(0, "Steps after which the preconditioner is the identity again; 0 = never.", ge=0)


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
    start_step: int = result_field(1, "First preconditioned step, from 0; those before it follow the graft.", ge=0)
    every_steps: int = result_field(1, "Steps between two in which inverse roots are taken.", ge=1)
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


class AdamSection(Section):
    decoupled: bool = result_field(False, "Decay beside the gradient instead of in it (AdamW; Loshchilov 2019).")


class RmspropSection(Section):
    decay: float = result_field(0.9, "Decay of the average of squared gradients (Hinton 2012).", ge=0, lt=1)
    variant: Literal["torch", "tensorflow"] = result_field(
        "torch",
        "`torch`: the average begins at 0, and eps is added to its root. `tensorflow`: it begins at 1, and eps is "
        "added under the root; its momentum buffer holds the learning rate (set momentum_form=unscaled).",
    )


OptimizerName = Literal["sgd", "lars", "lamb", "adam", "rmsprop", "nlcg", "neumann", "shampoo"]
OPTIMIZER_NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)


class OptimizerSection(Section):
    name: OptimizerName = result_field("sgd", "Update rule.")
    momentum: float = result_field(0.9, "Momentum of the gradient average (LAMB, Adam: beta 1).", ge=0, lt=1)
    momentum_form: Literal["unscaled", "scaled", "ratio_inside"] | None = result_field(
        None,
        "Where the learning rate stands: `unscaled` inside the momentum buffer (the default of LARS), `scaled` outside "
        "(the default of SGD), LARS's ratio with it; `ratio_inside`: the ratio inside, the learning rate outside.",
    )
    nesterov: bool = result_field(False, "Nesterov's look-ahead form of momentum; SGD, LARS and Shampoo.")
    weight_decay: float = result_field(1e-4, "L2 decay; not applied to batch norm and biases.", ge=0)
    decay_all: bool = result_field(False, "Apply weight decay (and LARS scaling) to batch norm and biases too.")
    adapt_all: bool = result_field(
        False,
        "LARS, LAMB and NLCG with `lars_coefficient`: scale batch norm and biases too, although they do not decay.",
    )
    skip: tuple[str, ...] = result_field(
        (), "Further parameters that neither decay nor are scaled, by name or pattern (such as `fc.*`)."
    )
    trust: Literal["sum_of_norms", "norm_of_sum"] = result_field(
        "sum_of_norms", "LARS: what the weight's norm is set against, |g| + decay |w| (You 2017) or |g + decay w|."
    )
    trust_coefficient: float = result_field(0.001, "LARS eta (You 2017).", gt=0)
    trust_clip: bool = result_field(
        False, "LARS: no layer moves faster than the learning rate (LARC). LAMB: no ratio is above 1."
    )
    eps: float | None = result_field(
        None,
        "LARS: added to the denominator of the ratio (default 0). LAMB, Adam, RMSProp: to that of the update (1e-6, "
        "1e-8, 1e-8).",
        ge=0,
    )
    beta2: float = result_field(0.999, "LAMB, Adam: decay of the average of squared gradients.", ge=0, lt=1)
    clip_norm: float = result_field(
        1.0, "LAMB: longer gradients (over all parameters) are cut to this norm; 0 = none.", ge=0
    )
    adam: AdamSection = AdamSection()
    rmsprop: RmspropSection = RmspropSection()
    shampoo: ShampooSection = ShampooSection()
    nlcg: NlcgSection = NlcgSection()
    neumann: NeumannSection = NeumannSection()

    @property
    def effective_momentum_form(self) -> Literal["unscaled", "scaled", "ratio_inside"]:
        """Momentum form in use."""
        return self.momentum_form or ("unscaled" if self.name == "lars" else "scaled")

    def has_option(self, option: str) -> bool:
        """Return True if the chosen optimizer has an option of this section."""
        return self.name in optimizers_with(option)

    @property
    def effective_eps(self) -> float:
        """Epsilon in use."""
        return self.eps if self.eps is not None else DEFAULT_EPS.get(self.name, 0.0)


DEFAULT_EPS: dict[str, float] = {"lamb": 1e-6, "adam": 1e-8, "rmsprop": 1e-8}
"""Defaults of `eps` that are not 0, by rule."""

JAX_OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "lars", "lamb", "adam", "rmsprop")
"""Optimizers of the JAX engine."""

OPTIMIZERS_WITH_OPTION: dict[str, tuple[OptimizerName, ...]] = {
    "momentum": ("sgd", "lars", "lamb", "adam", "rmsprop", "shampoo"),
    "momentum_form": ("sgd", "lars", "rmsprop"),
    "nesterov": ("sgd", "lars", "shampoo"),
    "adapt_all": ("lars", "lamb", "nlcg"),
    "trust": ("lars",),
    "trust_coefficient": ("lars",),
    "trust_clip": ("lars", "lamb"),
    "eps": ("lars", "lamb", "adam", "rmsprop"),
    "beta2": ("lamb", "adam"),
    "clip_norm": ("lamb",),
}
"""Optimizers by option. A missing option belongs to all, a section to the optimizer of its name."""


def optimizers_with(option: str) -> tuple[str, ...]:
    """Return the optimizers that have an option or section."""
    return (option,) if option in OPTIMIZER_NAMES else OPTIMIZERS_WITH_OPTION.get(option, OPTIMIZER_NAMES)


def unsupported_options(section: OptimizerSection) -> Iterator[str]:
    """Yield the options that are set but not supported by the chosen optimizer."""
    for option in type(section).model_fields:
        if not section.has_option(option):
            yield from (
                f"{option}{inner}" for inner in _changed_options(getattr(section, option), _default_of(section, option))
            )


def check_optimizer_options(section: OptimizerSection) -> None:
    """Raise if an option of other optimizers is set."""
    for option in unsupported_options(section):
        supporting = optimizers_with(option.partition(".")[0])
        raise conflict_error(
            f"train.optimizer.{option}",
            f"an option of {join_words(supporting)}, and train.optimizer.name is {section.name}",
            hint="Leave it out.",
        )


def _default_of(section: OptimizerSection, option: str) -> Any:
    return type(section).model_fields[option].default


def _changed_options(value: Any, default: Any) -> Iterator[str]:
    """Yield the suffix of each name that differs from its default: "" for a value, `.option` within a section."""
    if not isinstance(value, BaseModel):
        yield from ("",) if value != default else ()
        return
    for name in type(value).model_fields:
        yield from (f".{name}{end}" for end in _changed_options(getattr(value, name), getattr(default, name)))


class EmaSection(Section):
    """Exponential moving average of the trained weights."""

    decay: float | None = result_field(
        None,
        "Keep average = decay x average + (1 - decay) x weights, of the weights and of batch norm's running "
        "statistics; default: none is kept.",
        gt=0,
        lt=1,
    )
    every_steps: int = result_field(1, "Steps between two updates of that average.", ge=1)
