"""The application: the command line, its data, runs on disk and their reports."""
