"""Fits that are watched in use."""
