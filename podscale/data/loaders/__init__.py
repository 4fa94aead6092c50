"""Loaders, one module each. A new one implements `loaders.base.Loader` and is added to `build_loader`."""
