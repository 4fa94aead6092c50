"""KFP components, one per stage, installed as podscale.components."""

IMAGE = "podscale-base:latest"
"""Default container image of the components; launch.image of the run document replaces it."""
