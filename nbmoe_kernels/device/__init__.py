"""The closed vocabulary of device ops, one file a mechanism."""
