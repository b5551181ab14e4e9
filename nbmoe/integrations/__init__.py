"""nbmoe inside other frameworks. Each module imports its own, and nothing imports these."""
