"""The container image that the components name unless a run document says otherwise (launch.image)."""

IMAGE = "podscale-base:latest"
