"""Carry out one tensor's folds (stub: the native transform lands next)."""
