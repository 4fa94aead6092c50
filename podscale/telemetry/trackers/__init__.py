"""Experiment trackers: the figures of a training for people, in the tools in which they compare runs.

Each tracker is a process of its own (`__main__`) in the pod that leads. It follows metrics.jsonl and costs the ranks
nothing: it cannot hold them up, and its failure is a warning. In every launch of a run it is given all records again,
from the first; what each one does about those that it had before stands in its module.
"""
