"""What all benchmarks share: timing, tables and checks, the style of plots, and the group of ranks."""
