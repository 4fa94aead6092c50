"""The KFP components: one stage each, thin calls of the library. Installed as podscale.components."""
