"""Starts the processes of a stage and looks after them; knows nothing of tensors and imports no framework."""
