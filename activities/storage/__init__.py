"""Storage: the only user of fsspec, every artifact path, staged commits."""
