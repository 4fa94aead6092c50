"""A collapsed ensemble against one long run, restarts and the mean of weights."""
