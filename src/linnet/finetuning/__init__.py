"""Recipes that fine-tune a network."""
