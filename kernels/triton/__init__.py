"""The CUDA backend's Triton kernels. Importing this package loads no triton; its modules do."""
