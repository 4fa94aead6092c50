"""What a run will cost before it runs: formulas with their sources, no framework."""
