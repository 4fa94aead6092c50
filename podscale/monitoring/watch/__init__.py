"""A run as it stands, for people: from its records and its metrics, on this machine or on a cluster."""
