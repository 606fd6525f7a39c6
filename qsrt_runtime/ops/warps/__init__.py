"""What kernels share that decode by warps, with the labels of 3 bits in shared memory."""
