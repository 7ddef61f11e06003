"""Hooks that record the calls of layers."""
