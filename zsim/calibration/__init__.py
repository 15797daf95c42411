"""Measurements become data files: numbers with `origin: measured`, their spread, and where they come from."""
