"""The types of the C module; its docstrings say what everything means."""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, Protocol, TypeAlias, TypedDict, TypeVar, final, overload

_A = TypeVar("_A")
_Out = TypeVar("_Out")

_DTypeName: TypeAlias = Literal["float16", "bfloat16", "float32"]

class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...

_Stream: TypeAlias = int | _CudaStream | _TorchStream | _CupyStream

class _Kernel(TypedDict):
    name: str
    family: str
    in_dtype: _DTypeName
    out_dtype: tuple[_DTypeName, ...]
    order: Literal["nn", "nt", "tn", "tt"] | None
    tile: tuple[int, int, int]
    stages: int
    cluster: tuple[int, int, int]
    warps: tuple[int, int] | None
    align_bytes: int
    in_order: bool
    threads: int
    smem_bytes: int
    arch: str

class _Device(TypedDict):
    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    smem_block_bytes: int
    smem_sm_bytes: int
    l2_bytes: int
    families: list[str]

class _Copy(TypedDict):
    operand: Literal["a", "b"]
    rows: int
    cols: int
    transposed: bool
    row_elems: int
    batches: int
    bytes: int

class _Plan(TypedDict):
    kernel: str | None
    family: str | None
    order: NotRequired[Literal["nn", "nt", "tn", "tt"] | None]
    tile: NotRequired[tuple[int, int, int] | None]
    stages: NotRequired[int | None]
    cluster: NotRequired[tuple[int, int, int] | None]
    swap: NotRequired[bool]
    ptx: NotRequired[bool]
    splits: NotRequired[int]
    k_per_split: NotRequired[int]
    raster_group: NotRequired[int]
    tiles_m: NotRequired[int]
    tiles_n: NotRequired[int]
    tiles: NotRequired[int]
    grid: NotRequired[int]
    copies: NotRequired[list[_Copy]]
    workspace_bytes: NotRequired[int]
    cycles: NotRequired[int]
    why: str | None

class _Explanation(_Plan):
    shape: tuple[int, ...]
    mnk: tuple[int, int, int]
    batch: tuple[int, ...]
    in_dtype: _DTypeName
    out_dtype: _DTypeName
    device: str
    launches: int

class CudaError(RuntimeError):
    code: int

@final
class Array:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> _DTypeName: ...
    @property
    def device(self) -> str: ...
    @property
    def ndim(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# With `out` the result is out itself, else an array of a's own framework: of a's type for the frameworks' arrays, an
# Array for capsules and bare interfaces.
@overload
def matmul(
    a: Any,
    b: Any,
    /,
    *,
    out: _Out,
    out_dtype: Any = None,
    stream: _Stream | None = None,
    kernel: str | None = None,
    batch_invariant: bool | None = None,
) -> _Out: ...
@overload
def matmul(
    a: _A,
    b: Any,
    /,
    *,
    out: None = None,
    out_dtype: Any = None,
    stream: _Stream | None = None,
    kernel: str | None = None,
    batch_invariant: bool | None = None,
) -> _A: ...
def explain(
    a: Any,
    b: Any,
    /,
    *,
    out: Any = None,
    out_dtype: Any = None,
    stream: _Stream | None = None,
    kernel: str | None = None,
    batch_invariant: bool | None = None,
) -> _Explanation: ...
def kernels() -> list[_Kernel]: ...
def devices() -> list[_Device]: ...
def _time(
    a: Any,
    b: Any,
    launches: int,
    /,
    *,
    out: Any = None,
    out_dtype: Any = None,
    stream: _Stream | None = None,
    kernel: str | None = None,
    batch_invariant: bool | None = None,
) -> float: ...
def _upload(array: Any, device: int = 0, /) -> Array: ...
def _download(array: Array, /) -> Any: ...
def _synchronize(device: int = 0, stream: int = 1, /) -> None: ...
def _plan(
    shape_mnk: tuple[int, int, int],
    in_dtype: str,
    out_dtype: str,
    a: tuple[int, int, int],
    b: tuple[int, int, int],
    c: tuple[int, int, int],
    batch: Sequence[tuple[int, int, int, int]],
    device: dict[str, int],
    kernel: str | None = None,
    batch_invariant: bool = False,
    tuned: tuple[float, float, float] | None = None,
) -> _Plan: ...
def _plan_fuzz(count: int, seed: int, /) -> None: ...
