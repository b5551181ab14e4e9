"""The checked engine: the interpreted one with shadow memory and vector clocks on top."""
