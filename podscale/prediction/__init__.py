"""Predictions of a trained model for any images."""
