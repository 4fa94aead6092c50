"""Data: packing photographs into shards, and the ranks' waiting for them."""

from podscale.monitoring.dashboards.frame import Board
from podscale.monitoring.dashboards.panels import Query, Step, bars, figure, lines
from podscale.monitoring.dashboards.queries import BY_RANK, BY_RUN, DATA_WAIT, grown, rate, series, share
from podscale.monitoring.thresholds import DEFAULTS

UNPACKED = "Nothing packed in this time"
IDLE = "Nothing trained in this time"
PACKED = f"sum by ({BY_RUN}) ({series('shard_images')}) / sum by ({BY_RUN}) ({series('shard_planned_images')})"

NOW = [
    figure(
        "Packed",
        "Images packed, of those planned.",
        Query(PACKED),
        unit="percentunit",
        empty=UNPACKED,
        decimals=0,
    ),
    figure(
        "Packing",
        "Images packed per second, over both splits.",
        Query(rate("shard_images", BY_RUN)),
        unit="count:images/s",
        empty=UNPACKED,
    ),
    figure(
        "Shards finished",
        "Shards finished in the time shown.",
        Query(grown("shard_shards", BY_RUN), instant=True),
        unit="none",
        empty=UNPACKED,
    ),
    figure(
        "Images rejected",
        "Images not taken, in the time shown.",
        Query(grown("shard_rejects", BY_RUN), instant=True),
        unit="none",
        empty=UNPACKED,
        base="green",
        steps=[Step(1, "orange")],
    ),
    figure(
        "Waiting for data",
        "Share of the ranks' time in which the loop had no batch.",
        Query(DATA_WAIT),
        unit="percentunit",
        empty=IDLE,
        span=6,
        base="green",
        steps=[Step(0.1, "orange"), Step(DEFAULTS["dataWaitShare"], "red")],
        decimals=1,
    ),
    figure(
        "Records replaced",
        "Records that could not be decoded in training, in the time shown.",
        Query(grown("train_samples_skipped", BY_RUN), instant=True),
        unit="none",
        empty=IDLE,
        span=6,
        base="green",
        steps=[Step(1, "orange")],
    ),
]
SHARDING = [
    lines(
        "Images packed",
        "Images packed per second, by split.",
        Query(rate("shard_images", f"{BY_RUN}, split"), "{{run}} {{split}}"),
        unit="count:images/s",
        empty=UNPACKED,
        span=12,
    ),
    lines(
        "Bytes read and written",
        "From the source, and to shards.",
        Query(rate("shard_bytes", f"{BY_RUN}, direction"), "{{run}} {{direction}}"),
        unit="Bps",
        empty=UNPACKED,
        span=12,
    ),
    bars(
        "Images rejected, by reason",
        "In the time shown.",
        Query(f"sort_desc({grown('shard_rejects', 'reason')})", "{{reason}}", instant=True),
        unit="none",
        empty="No image was rejected",
        span=12,
    ),
    lines(
        "Where the packers' time goes",
        "Share of their wall time, by phase.",
        Query(share("shard_phase_seconds", "", "phase"), "{{phase}}"),
        unit="percentunit",
        empty=UNPACKED,
        span=12,
        stacked=True,
        largest=1,
    ),
]
INPUT = [
    lines(
        "Waiting for data, by rank",
        "Share of each chosen rank's time in which the loop had no batch; dashed: from where on the run is starved.",
        Query(share("train_phase_seconds", BY_RANK, "", 'phase="data_wait"', ranks=True), "{{run}} rank {{rank}}"),
        unit="percentunit",
        empty=IDLE,
        alert="PodscaleDataStarved",
        steps=[Step(DEFAULTS["dataWaitShare"], "red")],
    ),
    lines(
        "Batches ready",
        "Depth of each chosen rank's queue; at 0 the loop waits. Not of the loader dali.",
        Query(f"min by ({BY_RANK}) ({series('train_data_queue_depth', ranks=True)})", "{{run}} rank {{rank}}"),
        unit="none",
        empty="Nothing trained in this time with a loader that tells",
    ),
    lines(
        "Records replaced, by reason",
        "Records a second that could not be used, over the chosen ranks.",
        Query(rate("train_samples_skipped", f"{BY_RUN}, reason", ranks=True), "{{run}} {{reason}}"),
        unit="count:images/s",
        empty=IDLE,
        ceiling=1,
    ),
]
BOARD = Board(
    "data",
    "Data",
    "Packing of photographs into shards, and how long training waits for them.",
    {"Now": NOW, "Sharding": SHARDING, "Input of training": INPUT},
    ranks=True,
)
