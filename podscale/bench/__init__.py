"""Measurements for people: `podscale bench`. Nothing here is used by a run."""
