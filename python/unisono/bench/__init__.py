"""The bench: measures every backend on the same buffers, in one run, by one clock, and checks the results."""
