"""The endpoints, one module per family."""
