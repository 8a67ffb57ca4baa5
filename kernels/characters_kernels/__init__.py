"""The step's own kernels. One op a file: reference in plain torch, Triton kernel, custom op, bench.

Dispatch is by device and explicit: CUDA tensors run the kernel, CPU tensors the reference, any
other device is torch's own error. Nothing falls back in silence. Knows nothing of the model.
"""
