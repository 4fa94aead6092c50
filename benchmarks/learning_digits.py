"""The learning proof on the digits that come with Podscale: every training in seconds, for anybody."""

from learning_parts import COMMON, Arm, Base, Batches, Groups, Part, Proof, Rule
from trials import Get, Settings

DIGITS: Settings = {
    **COMMON,
    "data.shard_bytes": 2**20,
    "input.image_size": 8,
    "input.crop": {"scale": [0.7, 1.0], "ratio": [0.85, 1.18], "flip": 0.0},
    "input.mean": [0.3, 0.3, 0.3],
    "input.std": [0.35, 0.35, 0.35],
    "model.stem": "small",
    "model.width": 8,
    "train.epochs": 20,
    "train.global_batch": 64,
    "train.schedule.learning_rate": 0.1,
    "train.schedule.warmup_epochs": 5,
}
BASE = Base("digits", DIGITS)
SGD = Rule("sgd", 0.1, linear=True)
LAMB = Rule("lamb", 0.01, settings={"train.optimizer.weight_decay": 0.01})
"""Its decay is added to the direction after Adam's division, so it is not the others' number; 0.01 is ours."""
BATCHES = Batches(BASE, (64, 256, 1024), (SGD, Rule("lars", 8.0), LAMB))

SPANS = {64: "16 ranks", 16: "4 ranks", 4: "1 rank"}
REFERENCE = BATCHES.sweep(SGD, 256)
"""The sweep whose best rate part (b) trains with."""


def batch_norm_spans(get: Get) -> Groups:
    """Ranks of 4 images that share statistics: all 64 of them, 16, 4 and 1."""
    rate = REFERENCE.best(get)
    if rate is None:
        return {}
    settings = REFERENCE.settings(rate)
    smaller = [
        Arm(f"{name}: span {span}", BASE.repeated({**settings, "model.batch_norm.span": span}), ("top-1",), span)
        for span, name in SPANS.items()
    ]
    return {"": [Arm("all 64 ranks: span 256", BASE.repeated(settings), ("top-1",), 256), *smaller]}


SETTING = [
    "What the techniques for large batches do to accuracy on the 1,797 handwritten digits that come with Podscale:",
    "the questions that [photographs](learning.md) answer, on any machine, with no files, in seconds a training. A",
    "training is one process with one thread: `podscale train` with a ResNet-18 of width 8 (stem without pooling) on",
    "1,438 images of 8 x 8 pixels, random crops of 0.7 to 1 of the area, 20 epochs, label smoothing 0.1, momentum",
    "0.9, decay 5e-4 (LAMB 0.01), five epochs of warm-up from 0, then polynomial decay of power 2 to 0. Top-1 is that",
    "of the last evaluation, on the 359 held-out images: one image is 0.28 points.",
    "",
    "Deviations are over seeds, which change initial weights, sample order and crops. `from the first` is the",
    "difference of the means to the first row with its 95 % interval (Student's t, pooled variance); where the",
    "interval holds 0, it is `within noise`. The interval knows the noise of training alone, not that of having 359",
    "images to judge by, which all rows share.",
    "",
    "`python benchmarks/learning.py digits --work FOLDER` trains what FOLDER has no record of and writes this; where",
    "n is below 3, the rest was not trained yet.",
    "",
]

PROOF = Proof(
    BASE,
    "Learning on digits",
    "learning-digits",
    SETTING,
    {
        "a": Part(
            "Large batches: SGD, LARS and LAMB",
            BATCHES.groups,
            "Batch 1,024 is 71 % of the data set. At equal epochs, do LARS (You 2017; Ying 2018 with it) and LAMB (You "
            "2020) keep what SGD loses? All have the same warm-up, decay of the rate and momentum; each has a sweep of "
            "its learning rate by factors of 2 at each batch (three rates, up to two more where the best was at the "
            "edge; among equal accuracies the smaller loss decides), with the first of the three seeds, which flatters "
            "the chosen rates a little, alike for all. `Linear rule` is the best rate of SGD at batch 64 times batch / "
            "64 (Goyal 2017).",
            "",
            BATCHES.sweeps(),
            "batch",
        ),
        "b": Part(
            "Batch norm over groups of small ranks",
            batch_norm_spans,
            "Each of 64 ranks would have 4 images of a batch of 256 (a span smaller than a rank's batch is computed in "
            "sub-batches, so one process stands for all of them), trained by SGD at its best rate there.",
            "",
            [REFERENCE],
            "images that share statistics",
        ),
    },
)
