"""Figures read from a trace: where the time goes, what memory holds, what a difference comes from."""
