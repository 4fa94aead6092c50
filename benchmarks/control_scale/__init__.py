"""Cost of control on a large cluster: launchers beside hundreds of runs."""
