"""The page of a fit or of a run: one self-contained HTML file."""
