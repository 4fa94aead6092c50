"""HTTP server of a trained model's predictions."""
