"""Kernels in CUDA C++, compiled on the spot, where Triton leaves too much of the hardware unused."""
