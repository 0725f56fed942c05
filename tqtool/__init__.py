"""tqtool."""
