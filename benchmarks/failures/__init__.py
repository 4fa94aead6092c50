"""Goodput and jobs of runs whose nodes fail at published rates."""
