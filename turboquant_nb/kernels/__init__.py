"Kernels in Triton; nothing here is imported until it is needed."
