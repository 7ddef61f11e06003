"""For roots.py and linalg.py: test matrices, other methods, the costs of a root, and products in a limited workspace."""
