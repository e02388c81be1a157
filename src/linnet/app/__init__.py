"""The application: the command line, its data and runs on disk."""
