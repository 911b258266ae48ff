"""Kernels written in CUDA C++, compiled by nvcc at their first use."""
