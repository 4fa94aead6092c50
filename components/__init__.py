"""The KFP components: one stage each, thin calls of the library. Installed as podscale.components.

The container image that the components name unless a run document says otherwise (launch.image).
"""

IMAGE = "podscale-base:latest"
