"""The loaders, one file each; a new one implements `input.batch.Loader` and gets its name in `input.build`."""
