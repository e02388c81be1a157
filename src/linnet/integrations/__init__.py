"""Thin adapters to optional packages, which are imported here alone and only when they are asked for."""
