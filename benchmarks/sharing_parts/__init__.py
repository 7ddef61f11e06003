"""For distributed.py: steps and exchanges without each other, and the plan for many ranks."""
