"""The export component."""
