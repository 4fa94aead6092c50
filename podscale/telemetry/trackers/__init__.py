"""Experiment trackers, which show the metrics of runs in other tools.

Each tracker is a process (`__main__`) in the leading pod. It follows metrics.jsonl, so it cannot delay the ranks, and
its failure is a warning. Every launch sends it all records from the first one; each tracker's module describes how it
treats records that it already has.
"""
