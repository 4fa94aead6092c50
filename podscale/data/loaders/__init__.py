"""Loaders, one module each. A new one implements `podscale.data.loaders.base.Loader`; `build_loader` names it."""
