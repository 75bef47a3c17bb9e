"""The bench on NVIDIA GPUs: one GPU a rank, torch tensors as buffers, CUDA's own clock. Needs torch."""
