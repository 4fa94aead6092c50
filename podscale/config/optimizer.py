"""The section of a run document that says how weights are updated, and which of its options belong to which rule.

What one rule alone needs stands in a section of its own under its name. An option that the chosen rule does not have
may stand at its default, as resolved documents write it; any other value is refused, never quietly left aside.
"""

from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import BaseModel

from podscale.config.baselines import AdamSection, RmspropSection
from podscale.config.conflict import conflict_error
from podscale.config.fields import result_field
from podscale.config.neumann import NeumannSection
from podscale.config.nlcg import NlcgSection
from podscale.config.section import Section
from podscale.config.shampoo import ShampooSection
from podscale.util.formatting import join_words

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
        """The momentum form in use."""
        return self.momentum_form or ("unscaled" if self.name == "lars" else "scaled")

    def has_option(self, option: str) -> bool:
        """Whether the chosen rule has an option, by its name in this section."""
        return self.name in optimizers_with(option)

    @property
    def effective_eps(self) -> float:
        """The epsilon in use."""
        return self.eps if self.eps is not None else DEFAULT_EPS.get(self.name, 0.0)


DEFAULT_EPS: dict[str, float] = {"lamb": 1e-6, "adam": 1e-8, "rmsprop": 1e-8}
"""Where the default of `eps` is not 0."""

JAX_OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "lars", "lamb", "adam", "rmsprop")
"""The rules that the JAX engine has, too."""

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
"""The rules that have an option; what is not named here all of them have, or, a section, the rule that it names."""


def optimizers_with(option: str) -> tuple[str, ...]:
    """The rules that an option of the section belongs to, by its name there: `nesterov`, or a section's."""
    return (option,) if option in OPTIMIZER_NAMES else OPTIMIZERS_WITH_OPTION.get(option, OPTIMIZER_NAMES)


def unsupported_options(section: OptimizerSection) -> Iterator[str]:
    """The options, by their names within the section, that are set and that the chosen rule does not have."""
    for option in type(section).model_fields:
        if not section.has_option(option):
            yield from (
                f"{option}{inner}" for inner in _changed_options(getattr(section, option), _default_of(section, option))
            )


def check_optimizer_options(section: OptimizerSection) -> None:
    """Raises where an option is given that belongs to other rules."""
    for option in unsupported_options(section):
        have = optimizers_with(option.partition(".")[0])
        raise conflict_error(
            f"train.optimizer.{option}",
            f"an option of {join_words(have)}, and train.optimizer.name is {section.name}",
            hint="Leave it out.",
        )


def _default_of(section: OptimizerSection, option: str) -> Any:
    return type(section).model_fields[option].default


def _changed_options(value: Any, default: Any) -> Iterator[str]:
    """The ends of the names of what differs from its default: of options within a section, or nothing more."""
    if not isinstance(value, BaseModel):
        yield from ("",) if value != default else ()
        return
    for name in type(value).model_fields:
        yield from (f".{name}{end}" for end in _changed_options(getattr(value, name), getattr(default, name)))
