"""Rewriting a model in place, after every decision has been made and checked."""
