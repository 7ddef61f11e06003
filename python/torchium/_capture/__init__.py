"""What each layer saw: hooks, and the calls of layers that they record."""
