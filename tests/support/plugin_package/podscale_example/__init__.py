"""A model, a source, an optimizer and an augmentation for Podscale."""
