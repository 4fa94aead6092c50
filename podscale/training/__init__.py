"""What both engines do alike, whatever they compute with.

The loop and its decisions, what a training tells the outside, how ranks agree and learn of each other's end.
"""
