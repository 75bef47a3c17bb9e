"""The bench: every backend on the same buffers, in one run, under one clock, verified, with intervals and
ceilings."""
