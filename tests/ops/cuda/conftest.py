"""CUDA kernels run under an emulator on a CPU (`emulator.h`), and on the GPU itself where there is one."""
