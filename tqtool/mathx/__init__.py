"""mathx."""
