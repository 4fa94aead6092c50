"""Experiment trackers, which show the metrics of runs in other tools.

Each tracker is a process (`__main__`) in the leading pod that follows metrics.jsonl, so it cannot delay the ranks. If
it fails, the run continues with a warning. Each launch passes all records to the tracker, from the first one on.
"""
