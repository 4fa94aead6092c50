"""Optimizer section: optimizers, their options, and the running average of the weights.

Options of one optimizer alone are in a section of its name: `neumann` (Krishnan 2018), `nlcg` (preconditioned nonlinear
conjugate gradient, Adya 2018), `shampoo`, `muon`, `adam` and `rmsprop`. An option that the chosen optimizer does not
have may be set to its default only, because resolved documents contain every option.
"""

from typing import Annotated, Literal, get_args

from pydantic import JsonValue, WithJsonSchema, model_validator

from podscale.config.fields import (
    Section,
    changed_options,
    check_choice,
    check_plugin_options,
    choice_schema,
    conflict_error,
    result_field,
)
from podscale.util.formatting import join_words


class NeumannSection(Section):
    """Table 1 of Krishnan 2018, and choices that its algorithm 2 leaves open. See docs/explanation/optimizers.md."""

    alpha: float = result_field(
        1e-7, "Pull towards the running average of the weights: alpha x distance squared.", ge=0
    )
    beta: float = result_field(
        1e-5,
        "Push away from that average: beta x number of variables / distance squared. No regulariser if `alpha` and "
        "`beta` are 0.",
        ge=0,
    )
    gamma: float = result_field(0.99, "Decay of that average at each step.", ge=0, lt=1)
    momentum_start: float = result_field(0.5, "Minimal momentum.", ge=0, lt=1)
    momentum_end: float = result_field(0.9, "Maximal momentum.", ge=0, lt=1)
    momentum_time: Literal["updates", "since_reset", "epochs"] = result_field(
        "updates",
        "Unit of t in the momentum 1 - 1 / (1 + t), clipped to momentum_start and momentum_end: steps since the SGD "
        "phase, steps since the last reset, or epochs since the SGD phase (the paper says only t).",
    )
    sgd_epochs: float = result_field(5.0, "Length of the SGD phase before the method begins, epochs.", ge=0)
    reset_epochs: float = result_field(
        10.0, "Epochs until the first reset of the momentum; the interval doubles after each reset.", gt=0
    )
    on_reset: Literal["hold", "move"] = result_field(
        "hold",
        "Effect of a reset on the weights and their average, which the paper leaves open. `hold`: none; only the "
        "momentum buffer is set. `move`: they change as in other steps.",
    )
    moves_by: Literal["current", "previous"] = result_field(
        "current",
        "Momentum buffer that line 11 of the algorithm adds to the weights. `current`: that of this step (the paper's "
        "ICLR version). `previous`: that of the step before (its arXiv version, as quoted).",
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
                "without an SGD phase the weights equal their average at first, so the push of beta has no direction "
                "and no bound",
                got=0,
                hint="Set sgd_epochs above 0, or beta to 0.",
            )
        return self


class NlcgSection(Section):
    """Options of the authors' program (Adya 2018), with its defaults. See docs/explanation/optimizers.md."""

    variant: Literal["displacement", "released"] = result_field(
        "displacement",
        "Previous step that the method uses, and loss that `online` compares with. `displacement`: the change of the "
        "weights as it was made, and the average of the earlier losses. `released`: as in the authors' program, the "
        "direction before a part of its predecessor was removed, at the rate of the present step, and the average "
        "that includes the present loss.",
    )
    beta: Literal["fletcher_reeves", "polak_ribiere"] = result_field(
        "fletcher_reeves",
        "Formula of beta, the weight of the last direction in the next, clipped to [0, 1]. `polak_ribiere` keeps one "
        "more vector.",
    )
    step: Literal["step", "online", "none"] = result_field(
        "step",
        "Adaptation of the learning rate to the loss: a rise lowers the rate. `step`: a rise of the running average "
        "over that of five steps ago. `online`: a rise of the step's loss over the running average (see `variant`). "
        "`none`: off.",
    )
    tolerance: float = result_field(
        1.0, "Factor on the rises of the loss (1 % to 15 %) at which `step` and `online` lower the rate.", gt=0
    )
    lars_coefficient: float = result_field(
        0.0, "Scale each layer's gradient in proportion to |w| / |g| first; 0 = off. The authors suggest 0.001.", ge=0
    )
    norm_gradient_scale: float = result_field(
        1.0, "Factor on the gradients of batch norm's scale and shift; the authors' program offers 0.01.", gt=0, le=1
    )
    restart_every: int = result_field(0, "Steps between restarts from the steepest descent direction; 0 = never.", ge=0)
    forget_every: int = result_field(0, "Steps between resets of the preconditioner to the identity; 0 = never.", ge=0)


class ShampooSection(Section):
    """Distributed Shampoo (Anil 2020); defaults as in the code of Google's MLPerf 1.0 entry, except `roots`."""

    beta2: float = result_field(
        0.999, "Decay of the moving averages of gradient statistics; 1 = their sum (Gupta 2018).", gt=0, le=1
    )
    eps: float = result_field(1e-6, "Added to the diagonal of the statistics before the inverse roots.", gt=0)
    block: int = result_field(
        128, "Maximum length of a block's dimensions: longer ones are cut, small neighbouring ones merged.", ge=2
    )
    vectors: bool = result_field(True, "Precondition batch norm and biases too; otherwise only the graft updates them.")
    exponent: int | None = result_field(
        None, "p of the inverse p-th roots; default: twice the number of dimensions of the block.", ge=1, le=16
    )
    start_step: int = result_field(1, "First preconditioned step, from 0; earlier steps use the graft.", ge=0)
    every_steps: int = result_field(1, "Steps between two computations of the inverse roots.", ge=1)
    graft: Literal["sgd", "adagrad", "rmsprop"] = result_field(
        "sgd",
        "Rule that sets the length of each parameter's update (grafting, Agarwal 2020); Shampoo sets the direction.",
    )
    graft_eps: float = result_field(1e-10, "Added to the root in the grafts adagrad and rmsprop.", gt=0)
    roots: Literal["eigh", "newton"] = result_field(
        "eigh",
        "Computation of the inverse roots: by eigenvalues, or by a coupled Newton iteration of matrix products, which "
        "never waits for the device. If the statistics are too nearly singular for it, the old root is kept.",
    )
    roots_precision: Literal["fp64", "fp32"] = result_field(
        "fp64", "Precision in which inverse roots are computed; they are kept in fp32."
    )


class MuonSection(Section):
    """Muon (Jordan 2024)."""

    iterations: int = result_field(5, "Newton-Schulz iterations that orthogonalise a matrix.", ge=1, le=30)
    scale: Literal["aspect", "rms"] = result_field(
        "aspect",
        "Factor of an orthogonalised matrix of r rows and c columns. `aspect`: sqrt(max(1, r / c)) (Jordan 2024). "
        "`rms`: 0.2 sqrt(max(r, c)), with which learning rates of AdamW apply (Liu 2025).",
    )
    ends: bool = result_field(
        False, "Orthogonalise the first and the last weight matrix too, those of the input and the output layer."
    )
    other_rate: float = result_field(
        1.0,
        "Factor of the learning rate of all parameters that are not orthogonalised; SGD with the same momentum updates "
        "them.",
        gt=0,
    )
    precision: Literal["fp32", "bf16"] = result_field("fp32", "Precision of the Newton-Schulz iterations.")


class AdamSection(Section):
    decoupled: bool = result_field(False, "Decoupled weight decay (AdamW; Loshchilov 2019).")


class RmspropSection(Section):
    decay: float = result_field(0.9, "Decay of the average of squared gradients (Hinton 2012).", ge=0, lt=1)
    variant: Literal["torch", "tensorflow"] = result_field(
        "torch",
        "`torch`: the average begins at 0, and eps is added to its root. `tensorflow`: it begins at 1, and eps is "
        "added under the root; the momentum buffer contains the learning rate (set momentum_form=unscaled).",
    )


OptimizerName = Literal["sgd", "lars", "lamb", "adam", "rmsprop", "nlcg", "neumann", "shampoo", "muon"]
OPTIMIZER_NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)


class OptimizerSection(Section):
    name: Annotated[str, WithJsonSchema(choice_schema(OPTIMIZER_NAMES))] = result_field(
        "sgd", "Optimizer; `plugin:NAME`: of an installed plug-in; `python:MODULE:CALLABLE`: of your own code."
    )
    options: dict[str, JsonValue] = result_field({}, "Options of the optimizer of a plug-in or of your own code.")
    momentum: float = result_field(0.9, "Momentum (LAMB, Adam: beta 1).", ge=0, lt=1)
    momentum_form: Literal["unscaled", "scaled", "ratio_inside"] | None = result_field(
        None,
        "Position of the learning rate r in the momentum rule for an update u. `unscaled`: in the buffer, m = b m + "
        "r u, w -= m (default of LARS). `scaled`: outside, m = b m + u, w -= r m, with LARS's ratio also outside "
        "(default of SGD). `ratio_inside`: LARS's ratio in the buffer, the learning rate outside.",
    )
    nesterov: bool = result_field(False, "Nesterov momentum; SGD, LARS, Shampoo and Muon.")
    weight_decay: float = result_field(1e-4, "L2 weight decay; not applied to batch norm and biases.", ge=0)
    decay_all: bool = result_field(False, "Apply weight decay (and LARS scaling) to batch norm and biases too.")
    decay_biases: bool = result_field(
        False,
        "Apply weight decay, but no LARS scaling, to biases too, as an L2 term over all variables but batch norm's "
        "does (the code of Codreanu 2017, Adya 2018 and Ying 2018).",
    )
    adapt_all: bool = result_field(
        False,
        "LARS, LAMB and NLCG with `lars_coefficient`: apply the layer-wise scaling to batch norm and biases too, but "
        "no weight decay.",
    )
    skip: tuple[str, ...] = result_field(
        (), "Further parameters without weight decay and scaling, by name or pattern (such as `fc.*`)."
    )
    trust: Literal["sum_of_norms", "norm_of_sum", "l2_in_loss"] = result_field(
        "sum_of_norms",
        "LARS: denominator of the trust ratio, whose numerator is |w|. `sum_of_norms`: |g| + decay |w| (You 2017). "
        "`norm_of_sum`: |g + decay w|. `l2_in_loss`: |g + decay w| + decay |w|, as in Google's code of 2018 to August "
        "2019, whose loss had the L2 term while the ratio added it again.",
    )
    trust_coefficient: float = result_field(0.001, "LARS: trust coefficient eta (You 2017).", gt=0)
    trust_clip: bool = result_field(
        False, "LARS: limit every layer's learning rate to the global one (LARC). LAMB: limit the trust ratio to 1."
    )
    eps: float | None = result_field(
        None,
        "LARS: added to the denominator of the trust ratio (default 0). LAMB, Adam, RMSProp: added to the denominator "
        "of the update (defaults 1e-6, 1e-8, 1e-8).",
        ge=0,
    )
    beta2: float = result_field(0.999, "LAMB, Adam: decay of the average of squared gradients.", ge=0, lt=1)
    clip_norm: float = result_field(
        1.0, "LAMB: maximal norm of the gradient over all parameters; a longer one is scaled down. 0 = no limit.", ge=0
    )
    adam: AdamSection = AdamSection()
    rmsprop: RmspropSection = RmspropSection()
    shampoo: ShampooSection = ShampooSection()
    muon: MuonSection = MuonSection()
    nlcg: NlcgSection = NlcgSection()
    neumann: NeumannSection = NeumannSection()

    @model_validator(mode="after")
    def _check_name(self) -> "OptimizerSection":
        check_choice("name", self.name, OPTIMIZER_NAMES)
        check_plugin_options(self.name, self.options)
        return self

    @property
    def is_plugin(self) -> bool:
        """Return True for the optimizer of a plug-in."""
        return self.name not in OPTIMIZER_NAMES

    @property
    def effective_momentum_form(self) -> Literal["unscaled", "scaled", "ratio_inside"]:
        """Momentum form in use: the document's, or the optimizer's default."""
        return self.momentum_form or ("unscaled" if self.name == "lars" else "scaled")

    def has_option(self, option: str) -> bool:
        """Return True if the chosen optimizer has an option of this section."""
        return has_optimizer_option(self.name, option)

    @property
    def effective_eps(self) -> float:
        """Epsilon in use: the document's, or the optimizer's default."""
        return self.eps if self.eps is not None else DEFAULT_EPS.get(self.name, 0.0)


DEFAULT_EPS: dict[str, float] = {"lamb": 1e-6, "adam": 1e-8, "rmsprop": 1e-8}
"""Defaults of `eps` that are not 0, by optimizer."""

OPTIMIZERS_WITH_OPTION: dict[str, tuple[OptimizerName, ...]] = {
    "momentum": ("sgd", "lars", "lamb", "adam", "rmsprop", "shampoo", "muon"),
    "momentum_form": ("sgd", "lars", "rmsprop"),
    "nesterov": ("sgd", "lars", "shampoo", "muon"),
    "adapt_all": ("lars", "lamb", "nlcg"),
    "trust": ("lars",),
    "trust_coefficient": ("lars",),
    "trust_clip": ("lars", "lamb"),
    "eps": ("lars", "lamb", "adam", "rmsprop"),
    "beta2": ("lamb", "adam"),
    "clip_norm": ("lamb",),
}
"""Optimizers that have an option. All have an option that is not listed; a section belongs to the one of its name."""


def optimizers_with(option: str) -> tuple[str, ...]:
    """Return the optimizers that have an option or section."""
    return (option,) if option in OPTIMIZER_NAMES else OPTIMIZERS_WITH_OPTION.get(option, OPTIMIZER_NAMES)


def has_optimizer_option(name: str, option: str) -> bool:
    """Return True if an optimizer has an option; that of a plug-in has momentum, and what all have."""
    if name in OPTIMIZER_NAMES:
        return name in optimizers_with(option)
    return option == "momentum" or not (option in OPTIMIZER_NAMES or option in OPTIMIZERS_WITH_OPTION)


def check_optimizer_options(section: OptimizerSection) -> None:
    """Raise a conflict error if the section sets an option that the chosen optimizer does not have."""
    for option, _ in changed_options(section):
        owner = option.partition(".")[0]
        if not section.has_option(owner):
            raise conflict_error(
                f"train.optimizer.{option}",
                f"an option of {join_words(optimizers_with(owner))}, and train.optimizer.name is {section.name}",
                hint="Leave it out.",
            )


class EmaSection(Section):
    """Exponential moving average of the trained weights."""

    decay: float | None = result_field(
        None,
        "Decay of the average, decay x average + (1 - decay) x weights, of the weights and of batch norm's running "
        "statistics; default: no average.",
        gt=0,
        lt=1,
    )
    every_steps: int = result_field(1, "Steps between two updates of the average.", ge=1)
