"""What only CUDA workers import: nothing on the CPU path may, for it needs triton."""
