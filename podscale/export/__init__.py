"""Exported files of a trained model, checked against it."""
