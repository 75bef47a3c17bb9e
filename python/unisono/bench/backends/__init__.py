"""The built-in backends, one file for each library. `base` has their protocol."""
