"""The linear fit and everything it answers."""
