"""The linear fit and its predictions, audits and updates."""
