"""Parity of the native decoder with the reference path and with Pillow, over photographs."""
