"""The CPU kernels: one small C++ library with a plain C interface, called through ctypes."""
