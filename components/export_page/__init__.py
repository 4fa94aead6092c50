"""The export component with a page."""
