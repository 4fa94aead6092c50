"""Scores of a trained model from its predictions, and evaluation.json."""
