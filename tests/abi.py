"""kernels/abi.h's structs for ctypes."""

import ctypes

I16, I32, I64, U32, PTR = (ctypes.c_int16, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p)


def struct(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": [(n, t) for t, names in fields for n in names.split()]})


Dim = struct("Dim", (I64, "size a b c"))
Gemm = struct(
    "Gemm",
    *((PTR, "a b c"), (I64, "m n k a_row a_col b_row b_col c_row c_col c_split k_per_split tiles_m tiles_n tiles")),
    *((I32, "splits raster_group c_dtype c_vec_bytes batch_ndim c_tma"), (Dim * 6, "batch")),
)
