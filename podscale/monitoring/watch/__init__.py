"""Live status of a run from its records and metrics, on this machine or on a cluster (`podscale watch`)."""
