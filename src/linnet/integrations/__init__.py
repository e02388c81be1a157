"""Adapters to optional packages, imported only when used."""
