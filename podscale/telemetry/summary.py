"""The figures of an exposition as plain data, for a file that outlives the endpoint."""

import math

from prometheus_client.parser import text_string_to_metric_families

SeriesValue = float | None


def series_values(text: str) -> dict[str, SeriesValue]:
    """Every sample by its series as PromQL writes it, without the buckets of histograms; None for NaN and infinity."""
    return {
        _series_name(sample.name, sample.labels): sample.value if math.isfinite(sample.value) else None
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def _series_name(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{_escape_label(value)}"' for key, value in labels.items())
    return f"{name}{{{inside}}}" if inside else name


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
