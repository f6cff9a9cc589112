"""Kernels for NVIDIA GPUs, written in Triton. Its modules import triton, so they are imported on first use only."""
