"""SVG charts: lines, bars, a stacked bar, a heat map and the reliability diagram.

Values show on hover by CSS and SVG titles instead of scripts, so that the file works in a sandbox. Colours are CSS
classes and variables (style.css), so that light and dark pages share one drawing.
"""
