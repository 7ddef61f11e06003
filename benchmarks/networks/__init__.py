"""Networks whose steps are measured, and K-FAC over the layers of one, as it is usually written."""
