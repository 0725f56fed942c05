"""Planner and folds: what a rotation does to each tensor of a checkpoint, and doing it."""
