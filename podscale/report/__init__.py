"""Report of a run: report.html and the model card."""
