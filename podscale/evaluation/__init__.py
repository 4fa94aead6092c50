"""What a trained model achieved, from its predictions alone: scores, evaluation.json, report and model card."""
