"""What the build needs beyond setuptools: finding nvcc, compiling kernels/ into fatbins, the PEP 517 hooks."""
