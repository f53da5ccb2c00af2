"""Hand-written CUDA tensor-core GEMM kernels for the arrays of PyTorch, CuPy, JAX, Numba and NumPy.

    tcgemm.matmul(a, b)    the product, an array of a's framework
    tcgemm.explain(a, b)   the kernel that would run, and why
    tcgemm.kernels()       the compiled kernels
    tcgemm.devices()       the CUDA devices and what runs there

`python -m tcgemm` runs, checks and times one product on the best device there is.
"""

from pkgutil import extend_path

# In a source tree the package has no _core of its own: then the installed one's is found.
__path__ = extend_path(__path__, __name__)

from ._core import Array, CudaError, devices, explain, kernels, matmul  # noqa: E402

__all__ = ["Array", "CudaError", "devices", "explain", "kernels", "matmul"]
__version__ = "0.1.0"
