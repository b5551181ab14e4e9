"""Bad inputs: each gets a typed error that names it, before any launch, with outputs untouched."""
