# SPDX-License-Identifier: Apache-2.0
"""Call kernels written in Python (Numba, Numba CUDA, Warp) from JAX, at the cost of C++.

One file to copy or to install.  It turns a kernel into a JAX operation through XLA's foreign function
interface: the handler that XLA calls is compiled to machine code, so no Python runs on the call path.

    import jax, jax.numpy as jnp
    from xla_kernels import numba_kernel

    @numba_kernel(outs=lambda x, y: x)
    def add(x, y, out):
        for i in range(x.size):
            out[i] = x[i] + y[i]

    add(jnp.arange(3.0), jnp.ones(3))            # works under jit, vmap, scan, shard_map, export

`python -m xla_kernels` shows which backends work on this machine.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import itertools
import math
import operator
import os
import re
import sys
import tempfile
import threading
import timeit
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir, xla

__version__ = "0.1.0"
__all__ = [
    "KernelEntry",
    "XLACustomKernel",
    "defjvp",
    "export_checks",
    "general_batching_rule",
    "jax_callable",
    "jax_kernel",
    "jaxinfo_to_warpinfo",
    "jaxtype_to_warptype",
    "numba_cuda_callable",
    "numba_cuda_kernel",
    "numba_kernel",
    "warp_kernel",
]

# ======================================================================================================
# 1. JAX: all that differs between its versions, and all that it does not document.
# Checked on jax 0.7.2, 0.10.2 and 0.12.0.1.
# ======================================================================================================

Spec = jax.ShapeDtypeStruct
_jax: Any = jax  # for names that not every version has
Primitive: Any = type(jax.lax.add_p)  # jax.extend.core.Primitive, without the 36 ms that importing jax.extend takes


def _varying_axes(aval: Any) -> frozenset:
    """The manual mesh axes over which a value varies inside `shard_map`."""
    if (axis_type := getattr(aval, "manual_axis_type", None)) is not None:  # jax >= 0.11
        return axis_type.varying
    return getattr(aval, "vma", None) or frozenset()


def _mesh_of(avals: Sequence[Any]) -> Any:
    """The mesh that is part of a type (of an explicit mesh also where none is current), or the current one."""
    meshes = [x.sharding.mesh for x in avals]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _out_aval(shape: tuple, dtype: Any, ins: Sequence[Any], axes: Sequence[Any] = ()) -> Any:
    """The abstract value of a result: where those of `ins` are, its first dimensions split over these mesh axes."""
    varying, mesh = frozenset().union(*map(_varying_axes, ins)), _mesh_of(ins)
    if mesh.empty:
        return jax.core.ShapedArray(shape, dtype)
    axes = (*axes, *[None] * (len(shape) - len(axes)))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    if hasattr(jax.sharding, "ManualAxisType"):  # jax >= 0.11
        axis_type = jax.sharding.ManualAxisType(varying=varying)
        return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=axis_type)
    return _jax.core.ShapedArray(shape, dtype, sharding=sharding, vma=varying)


def _make_varying(args: Sequence[Any]) -> list[Any]:
    """Cast inputs to vary over the same mesh axes, as JAX's own operations do under `check_vma=True`.

    The cast is what makes the transposed operation sum the cotangent of a replicated input.
    """
    axes = [_varying_axes(jax.typeof(x)) for x in args]
    union = frozenset().union(*axes)
    return [_cast_varying(x, tuple(union - own)) if union - own else x for x, own in zip(args, axes, strict=True)]


def _cast_varying(x: Any, axes: tuple) -> Any:
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else _jax.lax.pvary(x, axes)  # jax 0.7


@functools.cache
def _side_effect() -> frozenset:
    """The effect of `jax.ffi.ffi_call(has_side_effect=True)`, which jax knows how to keep and to order."""
    call = jax.ffi.ffi_call("xla_kernels.effect", Spec((), np.float32), has_side_effect=True)
    return frozenset(jax.make_jaxpr(call)().effects)


def _is_partitioned(ctx: Any) -> bool:
    """Whether XLA may split what is lowered over a mesh: under jax.jit, and not in shard_map or pmap.

    Nor in what is exported, as custom_partitioning calls a Python function of this process.
    """
    context, parameters = ctx.module_context.axis_context, ctx.module_context.lowering_parameters
    if not isinstance(context, mlir.ShardingContext) or parameters.for_export:
        return False
    return context.num_devices > 1 and context.abstract_mesh is not None


def _eval_jaxpr(closed: Any, args: Sequence[Any]) -> list[Any]:
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def _varying_spec(spec: Spec, varying: frozenset) -> Spec:
    """`spec` for code that makes arrays inside `shard_map`, such as Pallas, and must know how they vary."""
    if not varying:
        return spec
    if hasattr(jax.sharding, "ManualAxisType"):  # jax >= 0.11
        return Spec(spec.shape, spec.dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying))
    return _jax.ShapeDtypeStruct(spec.shape, spec.dtype, vma=varying)


def _without_mesh() -> Any:
    """A scope in which no mesh is current, for what is traced on one device of a partitioned computation."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _sharded_like(x: Any, aval: Any) -> Any:
    """`x` with the sharding of `aval`, where that is part of the type: on meshes of explicit axes."""
    wanted = getattr(aval, "sharding", None)
    kinds = getattr(getattr(wanted, "mesh", None), "axis_types", None) or ()
    return jax.sharding.reshard(x, wanted) if jax.sharding.AxisType.Explicit in kinds else x


def _as_one_primitive(function: Any) -> Any:
    """Keep `jax_debug_nans` from running a jitted function again piece by piece: it is one primitive."""
    function._apply_primitive = True
    return function


def _zeros(shape: tuple, dtype: Any) -> Any:
    """`jnp.zeros`, which truncates to 32 bits where x64 is disabled, without that."""
    return ad.instantiate_zeros(ad.Zero(jax.core.ShapedArray(shape, dtype)))


def _need_devices(primitive: Any) -> None:
    """Have JAX tell the lowering of `primitive` its devices, as custom_partitioning inside of it needs them."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def _is_jax_value(x: Any) -> bool:
    """JAX's own kinds of constants, such as the LiteralArray of jax 0.7, are not all jax.Array or numbers."""
    return type(x).__module__.partition(".")[0] in ("jax", "jaxlib") and _is_spec(x) and not isinstance(x, Spec)


def _allows_64_bits() -> bool:
    """Whether 64 bits that are asked for are kept where x64 is disabled."""
    return getattr(getattr(jax.config, "jax_explicit_x64_dtypes", None), "name", "") == "ALLOW"  # jax >= 0.8


def _platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule is asked for: "cpu", "cuda", "rocm", "tpu"."""
    return tuple(getattr(ctx, "platforms", None) or ctx.module_context.platforms)


# ======================================================================================================
# The C structs of jaxlib/include/xla/ffi/api/c_api.h that a handler reads and writes.
# Structs only ever grow at their end, so a mirror of the older one serves all; a test compares them.
# ======================================================================================================

_PTR, _I64, _I32, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_size_t
_STAGE_EXECUTE = 3
_EXTENSION_METADATA = 1
_ERROR_INVALID_ARGUMENT, _ERROR_INTERNAL = 3, 13
_COMMAND_BUFFER_COMPATIBLE = 1
_HUGE_PAGE_MIN, _MADV_HUGEPAGE = 1 << 22, 14  # bytes, from which on NumPy does it too; sys/mman.h of Linux


def _struct(name: str, *, header: Any = True, **fields: Any) -> Any:
    """A ctypes mirror of one C struct; nearly all begin with their size and an extension pointer."""
    start = [("struct_size", _SIZE), ("extension_start", _PTR)] if header else []
    return type(name, (ctypes.Structure,), {"_fields_": start + list(fields.items())})


XLA_FFI_InternalExtension = _struct("XLA_FFI_InternalExtension", header=False, struct_size=_SIZE, type=_I32, next=_PTR)
XLA_FFI_Api_Version = _struct("XLA_FFI_Api_Version", major_version=_I32, minor_version=_I32)
XLA_FFI_Metadata = _struct(
    "XLA_FFI_Metadata", header=False, struct_size=_SIZE, api_version=XLA_FFI_Api_Version, traits=ctypes.c_uint32
)
XLA_FFI_Metadata_Extension = _struct(
    "XLA_FFI_Metadata_Extension", header=False, extension_base=XLA_FFI_InternalExtension, metadata=_PTR
)
XLA_FFI_Buffer = _struct("XLA_FFI_Buffer", dtype=_I32, data=_PTR, rank=_I64, dims=_PTR)
XLA_FFI_ByteSpan = _struct("XLA_FFI_ByteSpan", header=False, ptr=_PTR, len=_SIZE)
XLA_FFI_Array = _struct("XLA_FFI_Array", header=False, dtype=_I32, size=_SIZE, data=_PTR)
XLA_FFI_Args = _struct("XLA_FFI_Args", size=_I64, types=_PTR, args=_PTR)
XLA_FFI_Rets = _struct("XLA_FFI_Rets", size=_I64, types=_PTR, rets=_PTR)
XLA_FFI_Attrs = _struct("XLA_FFI_Attrs", size=_I64, types=_PTR, names=_PTR, attrs=_PTR)
XLA_FFI_CallFrame = _struct(
    "XLA_FFI_CallFrame", api=_PTR, ctx=_PTR, stage=_I32, args=XLA_FFI_Args, rets=XLA_FFI_Rets, attrs=XLA_FFI_Attrs
)
XLA_FFI_Error_Create_Args = _struct("XLA_FFI_Error_Create_Args", message=_PTR, errc=_I32)
XLA_FFI_Stream_Get_Args = _struct("XLA_FFI_Stream_Get_Args", ctx=_PTR, stream=_PTR)
XLA_FFI_DeviceOrdinal_Get_Args = _struct("XLA_FFI_DeviceOrdinal_Get_Args", ctx=_PTR, device_ordinal=_I32)
_API_FUNCTIONS = (
    "Error_Create Error_GetDetails Error_Destroy Handler_Register Stream_Get Type_Register InvokeContext_Get "
    "State_Set State_Get DeviceMemory_Allocate DeviceMemory_Free ThreadPool_Schedule ThreadPool_NumThreads "
    "Future_Create Future_SetAvailable Future_SetError RunId_Get DeviceOrdinal_Get"
).split()
XLA_FFI_Api = _struct(
    "XLA_FFI_Api",
    api_version=XLA_FFI_Api_Version,
    internal_api=_PTR,
    **{f"XLA_FFI_{name}": _PTR for name in _API_FUNCTIONS},
)

_XLA_FFI_DATA_TYPES = {
    "bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9,
    "float16": 10, "float32": 11, "float64": 12, "complex64": 15, "bfloat16": 16, "complex128": 18,
}  # fmt: skip


@functools.cache
def _ffi_api_version() -> tuple[int, int]:
    """The FFI version to report in the handshake: that of the installed jaxlib, which accepts no newer one.

    Without its header, 0.1: the version of jaxlib 0.7.2, whose structs are the ones used here.
    """
    try:
        with open(os.path.join(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h"), encoding="utf-8") as header:
            text = header.read()
        major, minor = (int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR"))  # type: ignore[index]
    except (OSError, TypeError):
        return 0, 1
    return major, minor


# ======================================================================================================
# Content digests: equal kernels (code, closures, globals, helpers, options) get equal names.
# ======================================================================================================

# Code in these packages, and in the standard library, does not change while a process runs: names stand for content.
_STABLE_PACKAGES = frozenset({"jax", "jaxlib", "llvmlite", "numba", "numba_cuda_mlir", "numpy", "scipy", "warp"})


@functools.cache
def _is_stable_module(name: str) -> bool:
    package = name.partition(".")[0]
    if package not in sys.stdlib_module_names:
        return package in _STABLE_PACKAGES
    file = getattr(sys.modules.get(package), "__file__", None)  # a user's code.py is not the library's
    return file is None or os.path.abspath(file).startswith(os.path.dirname(os.path.abspath(os.__file__)))


def _digest(*objects: Any) -> str:
    """A hash of the content of `objects` that is equal in every process, up to 96 bits.

    Functions count by code, defaults, closure and the globals they read, helpers included.  An object
    of unknown kind counts by identity: never mixed up with another, but not equal across processes.
    """
    return _Digester().add(tuple(objects)).hash.hexdigest()


def _names_read(kernel: Any) -> frozenset[str]:
    """Every attribute and global name that a function and its helpers read."""
    digester = _Digester()
    digester.add(kernel)
    return frozenset(digester.names)


class _Digester:
    """Feeds one object to a hash, and what it refers to by their own digests."""

    def __init__(self, parent: _Digester | None = None, obj: Any = None) -> None:
        self.hash = hashlib.blake2b(digest_size=12)
        # id -> depth of the objects that are being visited, to end recursion
        self.path: dict[int, int] = {**parent.path, id(obj): len(parent.path)} if parent else {}
        # id -> (digest, the object, kept alive)
        self.memo: dict[int, tuple[bytes, Any]] = parent.memo if parent else {}
        self.names: set[str] = parent.names if parent else set()

    def add(self, obj: Any) -> _Digester:
        if isinstance(obj, (type(None), bool, int, float, complex, str, bytes, type(...), range, slice)):
            return self.text(type(obj).__name__, repr(obj))
        if id(obj) in self.path:
            return self.text("recursion", str(self.path[id(obj)]))
        if id(obj) not in self.memo:
            child = _Digester(self, obj)
            child.visit(obj)
            self.memo[id(obj)] = child.hash.digest(), obj
        self.hash.update(self.memo[id(obj)][0])
        return self

    def visit(self, obj: Any) -> None:
        for kinds, feed in _FEEDERS:
            if isinstance(obj, kinds):
                feed(self, obj)
                return
        self.other(obj)

    def text(self, *parts: str) -> _Digester:
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            self.hash.update(b"%d:" % len(data) + data)
        return self

    def sequence(self, obj: Any) -> None:
        self.text(type(obj).__name__, str(len(obj)), str(getattr(obj, "_fields", "")))
        for item in obj:
            self.add(item)

    def unordered(self, obj: Any) -> None:
        self.text(type(obj).__name__, *sorted(_Digester(self, obj).add(item).hash.hexdigest() for item in obj))

    def mapping(self, obj: Any) -> None:
        self.unordered(list(obj.items()))

    def array(self, obj: Any) -> None:
        self.text("array", str(obj.dtype), str(np.shape(obj)))
        if obj.dtype.hasobject:
            self.sequence(obj.ravel().tolist())
        else:
            self.hash.update(np.ascontiguousarray(obj).tobytes())

    def code(self, obj: types.CodeType) -> None:
        self.names.update(obj.co_names, (c for c in obj.co_consts if isinstance(c, str)))  # getattr(x, "flat")
        if "dot" in obj.co_names and max(_call_lengths(obj), default=0) > 2:
            self.names.add("dot(out)")
        self.text("code", obj.co_name, str((obj.co_argcount, obj.co_kwonlyargcount, obj.co_flags)))
        self.text(repr((obj.co_names, obj.co_varnames, obj.co_freevars, obj.co_cellvars)))
        self.hash.update(obj.co_code + getattr(obj, "co_exceptiontable", b""))
        self.add(obj.co_consts)

    def function(self, obj: types.FunctionType) -> None:
        if _is_stable(obj):
            self.stable(obj)
            return
        self.add(obj.__code__).add(obj.__defaults__).add(obj.__kwdefaults__)
        for overload in _numba_overloads(obj):
            self.add(overload)
        for cell in obj.__closure__ or ():
            try:
                self.reference(cell.cell_contents, obj.__code__)
            except ValueError:  # a cell that is not filled yet
                self.text("empty")
        for name in sorted(_global_names(obj.__code__) & obj.__globals__.keys()):
            self.text("global", name).reference(obj.__globals__[name], obj.__code__)

    def reference(self, value: Any, code: types.CodeType) -> None:
        """A value that the code refers to; of a module, the attributes that the code may read."""
        if value is np.dot and max(_call_lengths(code), default=0) > 2:  # perhaps under another name
            self.names.add("dot(out)")
        if not isinstance(value, types.ModuleType):
            self.add(value)
        elif _is_stable_module(value.__name__) or id(value) in self.path:
            self.text("module", value.__name__)
        else:
            child = _Digester(self, value).text("module", value.__name__)
            for name in sorted(vars(value).keys() & _attribute_names(code)):
                child.text(name).reference(vars(value)[name], code)
            self.hash.update(child.hash.digest())

    def cls(self, obj: type) -> None:
        self.text("class", obj.__module__, obj.__qualname__)
        self.names.update((obj.__name__, *(base.__name__ for base in (type(obj), *obj.__mro__))))
        if issubclass(obj, enum.Enum):
            self.sequence([(member.name, member.value) for member in obj])
        elif hasattr(obj, "_fields"):
            self.add(obj._fields)
        elif not _is_stable(obj):
            self.identity(obj)

    def stable(self, obj: Any) -> _Digester:
        """A function of a package that does not change, under whatever name the code knows it."""
        self.names.add(obj.__name__)
        return self.text("function", str(obj.__module__), obj.__qualname__)

    def other(self, obj: Any) -> _Digester:
        """Objects known by what they carry: Numba's dispatchers and types, Warp's kernels, plain callables."""
        kind = type(obj)
        self.text(kind.__module__, kind.__qualname__)
        package = kind.__module__.partition(".")[0]
        if package in ("numba", "numba_cuda_mlir") and (parts := _numba_content(obj)) is not None:
            self.names.add(kind.__name__)
            return self.add(parts)
        if isinstance(obj, np.dtype):
            return self.text(repr(obj))
        owner = type(getattr(obj, "__self__", None))  # functions of numpy.random and random are methods
        if isinstance(obj, (types.MethodType, types.BuiltinMethodType)) and owner not in (type(None), types.ModuleType):
            return self.text(owner.__module__, obj.__name__) if _is_stable(owner) else self.identity(obj)
        if isinstance(obj, (np.ufunc, types.BuiltinFunctionType)):
            self.names.add(obj.__name__)
            return self.text(obj.__name__, str(getattr(obj, "__module__", "")))
        return self.stable(obj) if hasattr(obj, "__qualname__") and _is_stable(obj) else self.identity(obj)

    def identity(self, obj: Any) -> _Digester:
        with _LOCK:
            token = _STORE.objects.setdefault(id(obj), (len(_STORE.objects), obj))[0]
        return self.text("object", str(os.getpid()), str(token))


_FEEDERS: tuple[tuple[Any, Callable[[_Digester, Any], Any]], ...] = (
    (enum.Enum, lambda self, obj: self.add(type(obj)).text(obj.name)),
    ((np.ndarray, np.generic), _Digester.array),
    ((tuple, list), _Digester.sequence),
    ((set, frozenset), _Digester.unordered),
    ((dict, types.MappingProxyType), _Digester.mapping),
    (types.CodeType, _Digester.code),
    (types.FunctionType, _Digester.function),
    (types.ModuleType, lambda self, obj: self.text("module", obj.__name__)),
    (type, _Digester.cls),
)


def _is_stable(obj: Any) -> bool:
    return _is_stable_module(getattr(obj, "__module__", None) or "")


@functools.lru_cache(maxsize=1024)
def _call_lengths(code: types.CodeType) -> frozenset[int]:
    return frozenset(i.arg or 0 for i in dis.get_instructions(code) if i.opname.startswith("CALL"))


@functools.lru_cache(maxsize=1024)
def _attribute_names(code: types.CodeType) -> frozenset[str]:
    nested = (_attribute_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*nested)


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """Every global name that the code reads, code nested in it included."""
    nested = (_global_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    loads = (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(loads).union(*nested)


# ======================================================================================================
# Targets: what is registered with XLA, under which name.  XLA keeps raw pointers, so nothing is ever freed.
# ======================================================================================================


class _Store(types.ModuleType):
    """What all copies of this file share, and what outlives a reload: XLA knows a target until the process ends."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lock = threading.RLock()
        self.targets: dict[tuple[str, str], Any] = {}  # (name, platform) -> what `make` returned
        self.objects: dict[int, tuple[int, Any]] = {}  # objects known by identity, kept alive


_STORE: Any = sys.modules.setdefault("_xla_kernels_store_1", _Store("_xla_kernels_store_1"))
_LOCK: threading.RLock = _STORE.lock


def _native_lock(name: str) -> int:
    """A lock of the whole process, made when it is first asked for: CPython's, as it can be taken without the GIL."""
    with _LOCK:
        if not getattr(_STORE, name, 0):
            allocate = ctypes.pythonapi.PyThread_allocate_lock
            allocate.restype = _PTR
            setattr(_STORE, name, allocate())
        return getattr(_STORE, name)


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """A handler in memory: its address, what must stay alive with it, and what its wrapper should know."""

    address: int
    keep: Any = dataclasses.field(repr=False)
    copy_inputs: tuple[int, ...] = ()


def _register(name: str, platform: str, make: Callable[[], _Compiled]) -> _Compiled:
    """Register the target once per process; `make` compiles its handler and runs only if the name is new."""
    with _LOCK:
        compiled = _STORE.targets.get((name, platform))
        if compiled is None:
            compiled = make()
            capsule = jax.ffi.pycapsule(ctypes.c_void_p(compiled.address))
            jax.ffi.register_ffi_target(name, capsule, platform={"cuda": "CUDA"}.get(platform, platform), api_version=1)
            _STORE.targets[name, platform] = compiled
        return compiled


def export_checks() -> list[Any]:
    """The safety checks to disable when a program that calls kernels is exported.

    `jax.export` refuses custom calls that it does not know.  The names of kernels made here derive from
    their content, so an exported program finds them again in every process that has traced the same
    kernels (calling them, or `jax.eval_shape` of them, is enough).

    Returns:
      One `jax.export.DisabledSafetyCheck` for each kernel registered so far.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax import export
      >>> @numba_kernel(outs=lambda x: x)
      ... def double(x, out):
      ...     out[:] = 2 * x
      >>> spec = jax.ShapeDtypeStruct((3,), jnp.float32)
      >>> _ = jax.eval_shape(double, spec)
      >>> data = export.export(jax.jit(double), disabled_checks=export_checks())(spec).serialize()
      >>> export.deserialize(data).call(jnp.arange(3.0)).tolist()
      [0.0, 2.0, 4.0]
    """
    from jax import export

    with _LOCK:
        return [export.DisabledSafetyCheck.custom_call(name) for name in sorted({name for name, _ in _STORE.targets})]


# ======================================================================================================
# Specs and inputs: what comes in and what goes out, checked where the user's call is on the stack.
# ======================================================================================================

_VMAP_METHODS = (None, "sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized")


def _is_spec(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)  # the class np.float32 has both


def _flat_specs(specs: Any, what: str, ins: Sequence[Spec] | None = None) -> tuple[list[Spec], Any]:
    """The leaves of a pytree of specs as ShapeDtypeStructs, and its structure; with JAX's dtypes for these inputs."""
    leaves, tree = jax.tree_util.tree_flatten(specs, is_leaf=_is_spec)
    return [_spec(leaf, f"{what}[{i}]" if len(leaves) > 1 else what, ins) for i, leaf in enumerate(leaves)], tree


def _spec(x: Any, what: str, ins: Sequence[Spec] | None) -> Spec:
    if not _is_spec(x):
        raise TypeError(
            f"{what} must be specs with .shape and .dtype such as jax.ShapeDtypeStruct(shape, dtype), "
            f"a pytree of them, or a callable of the inputs that returns them; got {x!r} of type {type(x).__name__}"
            + ("; a shape needs a dtype with it" if isinstance(x, int) else "")
            + ("; a dtype needs a shape with it" if isinstance(x, (type, np.dtype)) else "")
        )
    shape = tuple(d if not isinstance(d, (int, np.integer)) else operator.index(d) for d in x.shape)
    if any(isinstance(d, int) and d < 0 for d in shape):
        raise ValueError(f"{what} has a negative dimension in its shape {shape}")
    _check_dtype(x.dtype, what)
    dtype = np.dtype(x.dtype)
    allowed = dtype if ins is None else _allowed_dtype(dtype, ins)
    if allowed != dtype:
        warnings.warn(
            f"{what} asks for {dtype}, which JAX truncates to {allowed} unless jax_enable_x64 is set", stacklevel=2
        )
    return Spec(shape, allowed)


def _check_dtype(dtype: Any, what: str) -> None:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(
            f"{what} has the JAX-only dtype {dtype}, which has no memory layout for kernels; "
            "pass plain arrays, e.g. jax.random.key_data(key)"
        )
    if issubclass(np.dtype(dtype).type, (np.flexible, np.object_, np.datetime64, np.timedelta64)):
        raise TypeError(
            f"{what} has the dtype {dtype}; JAX has arrays of booleans, integers, floats and complex numbers: pass "
            "each field of a structured array as an array of its own, and of objects what is numbers"
        )


def _allowed_dtype(dtype: Any, ins: Sequence[Spec]) -> np.dtype:
    """The dtype of an output that is declared with `dtype`.

    64 bits only where x64 is enabled, or allowed when asked for, or an input has that dtype all the same.
    """
    dtype = np.dtype(dtype)
    keep = _allows_64_bits() or any(x.dtype == dtype for x in ins)
    return np.dtype(dtype if keep else jax.dtypes.canonicalize_dtype(dtype))


def _input_spec(x: Any, i: int) -> Spec:
    dtype = x.dtype if _is_spec(x) else jax.dtypes.result_type(x)
    _check_dtype(dtype, f"input {i}")
    is_array = isinstance(x, jax.Array)  # or a tracer; of 64 bits, perhaps, also where x64 is disabled
    return Spec(np.shape(x), dtype if is_array else jax.dtypes.canonicalize_dtype(dtype))


def _input_specs(args: Sequence[Any]) -> list[Spec]:
    return [_input_spec(x, i) for i, x in enumerate(args)]


_ARRAY_TYPES: set[type] = {np.ndarray, bool, int, float, complex}  # grows by jax.Array, NumPy scalars


def _as_inputs(args: Sequence[Any], name: str) -> tuple[Sequence[Any], bool]:
    """The inputs as JAX can take them, and whether one of them is being traced."""
    traced = False
    for i, x in enumerate(args):
        if type(x) not in _ARRAY_TYPES:
            if isinstance(x, jax.core.Tracer):
                traced = True
            elif _is_jax_value(x) or isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex)):
                _ARRAY_TYPES.add(type(x))
            else:
                args = [*args[:i], _from_foreign(x, i, name), *args[i + 1 :]]
    return args, traced


def _from_foreign(x: Any, i: int, name: str) -> Any:
    """Arrays of other libraries, without a copy where JAX can share their memory."""
    if hasattr(x, "__jax_array__"):
        return x.__jax_array__()
    if hasattr(x, "__dlpack__"):
        return jax.dlpack.from_dlpack(x)
    hint = "pass its leaves one by one" if isinstance(x, (list, tuple, dict)) else "convert it with jnp.asarray"
    raise TypeError(f"{name}: input {i} must be an array or a number; got {type(x).__name__} {x!r:.80}; {hint}")


def _check_aliases(
    aliases: Mapping[int, int], ins: Sequence[Spec], outs: Sequence[Spec]
) -> tuple[tuple[int, int], ...]:
    for i, j in aliases.items():
        for what, k, specs in (("input", i, ins), ("output", j, outs)):
            if not 0 <= k < len(specs):
                raise ValueError(
                    f"input_output_aliases={dict(aliases)}: there is no {what} {k}; "
                    f"the call has {len(specs)} {what}s, numbered from 0"
                )
        if (ins[i].shape, ins[i].dtype) != (outs[j].shape, outs[j].dtype):
            raise ValueError(
                f"input_output_aliases={dict(aliases)}: input {i} ({_show(ins[i])}) and output {j} ({_show(outs[j])}) "
                "share memory, so shape and dtype must be equal"
            )
    if len(set(aliases.values())) < len(aliases):
        raise ValueError(f"input_output_aliases={dict(aliases)}: an output can alias one input only")
    return tuple(sorted(aliases.items()))


def _show(spec: Any) -> str:
    """A spec as people write it: float32[3,4]."""
    return f"{np.dtype(spec.dtype).name}[{','.join(map(str, spec.shape))}]"


# ======================================================================================================
# Partitioning under jax.jit: what XLA may split over a mesh, for wrappers and ops alike.
# ======================================================================================================


@dataclasses.dataclass(frozen=True)
class _ShardingRule:
    """The names of the dimensions of every operand and output: those of one name are split alike.

    A name that one array alone has stays whole.  Names from this file begin with two underscores.
    """

    owner: str
    text: str
    ins: tuple[tuple[str, ...], ...]
    outs: tuple[tuple[str, ...], ...]
    depth: int = 0  # the number of vmaps

    @classmethod
    def parse(cls, owner: str, text: str) -> _ShardingRule:
        left, arrow, right = str(text).partition("->")
        sides = [[tuple(part.split()) for part in side.split(",")] for side in (left, right)]
        names = [name for side in sides for part in side for name in part]
        if not arrow or not all(name.isidentifier() for name in names):
            raise ValueError(
                f"{owner}: a sharding rule names the dimensions of every operand and output, "
                f"separated by spaces, as in 'b i, i j -> b j'; got {text!r}"
            )
        repeated = [part for side in sides for part in side if len(set(part)) != len(part)]
        if repeated:
            raise ValueError(f"{owner}: a dimension name occurs twice in one array: {text!r}")
        ins = () if not left.strip() else tuple(sides[0])
        return cls(owner, text, ins, tuple(sides[1]))

    @classmethod
    def whole(cls, ins: Sequence[Any], outs: Sequence[Any]) -> _ShardingRule:
        """The rule of a kernel that was given none."""
        return cls("", "", _own_names("in", ins), _own_names("out", outs))

    def check(self, ins: Sequence[Spec], outs: Sequence[Spec]) -> None:
        """Raise unless the rule fits the arrays of a call."""
        for names, specs, what in ((self.ins, ins, "operands"), (self.outs, outs, "outputs")):
            ranks, found = [len(n) for n in names], [len(s.shape) for s in specs]
            if ranks != found:
                raise ValueError(
                    f"{self.owner}: the sharding rule {self.text!r} is for {what} of ranks "
                    f"{ranks}, but the call has {what} of ranks {found}; correct the rule or the call"
                )
        sizes: dict[str, Any] = {}
        for name, size in zip(sum(self.ins + self.outs, ()), sum((s.shape for s in (*ins, *outs)), ())):
            if sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"{self.owner}: in the sharding rule {self.text!r} the name {name!r} stands "
                    f"for the sizes {sizes[name]} and {size}; give dimensions of different sizes different names"
                )

    def batched(self, flags: Sequence[bool], shared: int = 0) -> _ShardingRule:
        """The rule under one more vmap, which an operand without flag has `shared` dimensions of its own for."""
        name = f"__vmap{self.depth}"
        front = [(name,) if flag else (f"{name}_{i}",) * shared for i, flag in enumerate(flags)]
        ins, outs = tuple(a + b for a, b in zip(front, self.ins)), tuple((name, *names) for names in self.outs)
        return dataclasses.replace(self, ins=ins, outs=outs, depth=self.depth + 1)

    def adjoint(self, wrt: Sequence[int], of: Sequence[int]) -> _ShardingRule:
        """The rule of (operands, outputs, cotangents) -> (cotangents, gradients)."""
        cts, grads = tuple(self.outs[j] for j in of), tuple(self.ins[i] for i in wrt)
        return dataclasses.replace(self, ins=self.ins + self.outs + cts, outs=cts + grads)

    @property
    def split(self) -> set[str]:
        """The names that may be split: what some output lacks is reduced, what no operand has is unknown to a shard."""
        return functools.reduce(operator.and_, map(set, self.outs), set().union(*self.ins))

    def shardings(self, mesh: Any, args: Sequence[Any], results: Sequence[Any]) -> tuple[list, list]:
        """The shardings of operands and outputs in which every dimension name has one meaning, and splits evenly."""
        axes: dict[str, Any] = {}
        free = self.split
        taken: set[str] = set()
        for names, info in zip(self.ins + self.outs, (*args, *results)):
            for name, size, entry in zip(names, info.shape, getattr(info.sharding, "spec", None) or ()):
                mine = entry if isinstance(entry, tuple) else (entry,) if entry else ()
                count = math.prod(mesh.shape[axis] for axis in mine)
                if mine and name in free and taken.isdisjoint(mine) and size % count == 0:
                    axes[name] = entry
                    free.remove(name)
                    taken.update(mine)
        specs = [jax.sharding.PartitionSpec(*map(axes.get, names)) for names in self.ins + self.outs]
        places = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
        return places[: len(self.ins)], places[len(self.ins) :]

    def out_avals(self, ins: Sequence[Any], outs: Sequence[tuple]) -> list[Any]:
        """The abstract values of results of these shapes and dtypes; those that the rule does not know are last."""
        mesh = _mesh_of(ins)
        axes = [] if mesh.empty else [sharding.spec for sharding in self.shardings(mesh, ins, ())[1]]
        axes += [()] * (len(outs) - len(axes))
        return [_out_aval(shape, dtype, ins, own) for (shape, dtype), own in zip(outs, axes, strict=True)]

    def partitioned(self, run: Callable[..., list], outs: Sequence[Spec]) -> Callable[..., Any]:
        """`run(outs, *ins)` as a function of `ins` that XLA may run on shards of them, with the `outs` of a shard."""
        from jax.experimental.custom_partitioning import custom_partitioning

        def call(*ins: Any) -> tuple:
            closed, n = jax.make_jaxpr(functools.partial(run, outs))(*ins), len(ins)
            rule = dataclasses.replace(self, ins=self.ins + _own_names("const", closed.consts))
            sides = [", ".join(" ".join(f"d{n}" for n in names) for names in side) for side in (rule.ins, rule.outs)]

            def whole(*args: Any) -> tuple:
                return tuple(jax.core.eval_jaxpr(closed.jaxpr, args[n:], *args[:n]))

            def partition(mesh: Any, args: Any, results: Any) -> tuple:
                given, returned = rule.shardings(mesh, args, results)
                local = [Spec(s.shard_shape(out.shape), out.dtype) for s, out in zip(returned, outs)]

                def shard(*args: Any) -> tuple:
                    with _without_mesh():
                        jaxpr = jax.make_jaxpr(functools.partial(run, local))(*args[:n]).jaxpr
                        return tuple(jax.core.eval_jaxpr(jaxpr, args[n:], *args[:n]))

                return mesh, shard, tuple(returned), tuple(given)

            def infer(*on: Any) -> tuple:
                return tuple(rule.shardings(*on)[1])

            function = custom_partitioning(whole)
            function.def_partition(
                partition=partition, infer_sharding_from_operands=infer, sharding_rule=" -> ".join(sides)
            )
            return function(*ins, *closed.consts)

        return call


def _own_names(kind: str, arrays: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(f"__{kind}{i}_{d}" for d in range(np.ndim(x))) for i, x in enumerate(arrays))


# ======================================================================================================
# The primitive behind every wrapper: one call of one target.
# ======================================================================================================


@dataclasses.dataclass(frozen=True, repr=False)
class _Target:
    """What a call runs: a registered name, and the integers that this call's shapes and options give it.

    It knows no wrapper: JAX's caches hold it, and would keep alive the function that they are keyed by.
    `localize(ins, outs)`, where XLA may split the kernel's own dimensions, is the call on a shard: its target, all
    outputs and aliases.
    """

    name: str
    attrs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    copy_inputs: tuple[int, ...] = ()  # those that the kernel may write to
    makes: Mapping[str, Callable[[], _Compiled]] = dataclasses.field(compare=False, default_factory=dict)
    runs: str = dataclasses.field(compare=False, default="")  # where it runs, for the error on another platform
    check: Callable[[], None] = dataclasses.field(compare=False, default=lambda: None)  # as far as it can be, off a GPU
    localize: Callable[..., tuple] | None = dataclasses.field(compare=False, default=None)

    def __repr__(self) -> str:
        return self.name

    def register(self, platform: str) -> Any:
        """Register the handler, before a call is compiled for a platform."""
        if platform not in self.makes:
            raise NotImplementedError(
                f"{self.runs}; this computation is compiled for {platform!r}: move it with jax.device_put or "
                "jax.jit(..., device=...)"
            )
        if platform == "cpu" or _cuda_ordinals():
            return _register(self.name, platform, self.makes[platform])
        return self.check()  # lowered on a machine without a GPU: it is registered where the program runs

    def announce(self) -> None:
        """Register the handler for this machine, so that what cannot be compiled fails where it is traced.

        An exported program finds the name in processes that only trace; `export_checks` names those of other machines.
        """
        platform = {"gpu": "cuda"}.get(_default_platform(), _default_platform())
        if platform in self.makes:
            self.register(platform)
        else:
            for elsewhere in self.makes:
                _STORE.targets.setdefault((self.name, elsewhere), None)


def _bind_call(*args: Any, rule: _ShardingRule, has_side_effect: bool, **params: Any) -> list:
    """Bind the primitive for a call: one of its own where XLA's partitioner must be told what to do with it."""
    told = rule.ins and rule.outs and (rule.split or has_side_effect)
    return (_split_call_p if told else _call_p).bind(*args, rule=rule, has_side_effect=has_side_effect, **params)


def _call_abstract_eval(*ins: Any, outs: Sequence[tuple], has_side_effect: bool, rule: Any, **_: Any) -> tuple:
    return rule.out_avals(ins, outs), _side_effect() if has_side_effect else frozenset()


def _call_lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
    target, aliases, has_side_effect = (params[name] for name in ("target", "aliases", "has_side_effect"))
    for platform in _platforms(ctx):
        target.register(platform)
    if ctx.primitive is _split_call_p and _is_partitioned(ctx):
        return _split_call_lowering(ctx, *operands, **params)
    rule = jax.ffi.ffi_lowering(target.name, operand_output_aliases=dict(aliases), has_side_effect=has_side_effect)
    return rule(ctx, *operands, **{name: np.array(values, np.int64) for name, values in target.attrs})


def _split_call_lowering(
    ctx: Any, *operands: Any, rule: _ShardingRule, target: _Target, outs: Any, **params: Any
) -> Any:
    """Give XLA the call on a shard: of the results that the rule knows, as nobody asks for those behind them."""
    specs, n, depth = [Spec(*out) for out in outs], len(rule.outs), rule.depth

    def run(results: Sequence[Spec], *ins: Any) -> list:
        localize = target.localize or (lambda *_: (target, _slices(specs, depth), params["aliases"]))
        local, every, aliases = localize(_slices(ins, depth), _slices(results, depth))
        hidden = [Spec((*results[0].shape[:depth], *s.shape), s.dtype) for s in every[n:]]
        full = tuple((s.shape, s.dtype) for s in (*results, *hidden))
        return _call_p.bind(*ins, rule=rule, target=local, outs=full, **{**params, "aliases": aliases})[:n]

    def call(*ins: Any) -> list:
        return [*rule.partitioned(run, specs[:n])(*ins), *[_zeros(s.shape, s.dtype) for s in specs[n:]]]

    results = mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    if params["has_side_effect"]:
        results[0].owner.attributes["has_side_effect"] = mlir.ir_attribute(True)
    return results


def _slices(arrays: Sequence[Any], depth: int) -> list[Spec]:
    return [Spec(x.shape[depth:], x.dtype) for x in arrays]


def _call_batching(
    args: Sequence[Any], dims: Sequence[Any], *, outs: Any, aliases: Any, rule: Any, **params: Any
) -> Any:
    """One more leading dimension everywhere; size 1 says that an operand is the same for every slice."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    own = [d is not None or i in dict(aliases) for i, d in enumerate(dims)]  # what is written to is not shared
    args = [
        jax.lax.broadcast(x, (size if own[i] else 1,)) if d is None else jax.numpy.moveaxis(x, d, 0)
        for i, (x, d) in enumerate(zip(args, dims, strict=True))
    ]
    outs = tuple(((size, *shape), dtype) for shape, dtype in outs)
    return _bind_call(*args, outs=outs, aliases=aliases, rule=rule.batched(own, 1), **params), [0] * len(outs)


def _call_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, target: _Target, outs: Any, **params: Any) -> tuple:
    if any(jax.dtypes.issubdtype(dtype, np.inexact) for _, dtype in outs):
        raise TypeError(
            f"kernel {target.name!r} has no derivative: wrap it in jax.custom_vjp or jax.custom_jvp, or register it "
            "with XLACustomKernel and give that a rule (def_jvp_rule, def_vjp_rule)"
        )
    results = _bind_call(*primals, target=target, outs=outs, **params)
    return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


_call_p, _split_call_p = Primitive("xla_kernel"), Primitive("xla_kernel")
_need_devices(_split_call_p)
for _primitive in (_call_p, _split_call_p):
    _primitive.multiple_results = True
    _primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))
    _primitive.def_effectful_abstract_eval(_call_abstract_eval)
    ad.primitive_jvps[_primitive] = _call_jvp
    batching.primitive_batchers[_primitive] = _call_batching
    mlir.register_lowering(_primitive, _call_lowering)


def _python(kernel: Any) -> Any:
    """The Python function of a kernel: of what Numba jitted or vectorized, or Warp decorated; a plain one is itself."""
    function = getattr(getattr(kernel, "_dispatcher", kernel), "py_func", None)
    return function or (kernel.func if hasattr(kernel, "adj") else kernel)


def _parameters(kernel: Any) -> tuple[str, ...]:
    """The names by which a kernel's arguments can be given, in order."""
    with contextlib.suppress(TypeError, ValueError):
        found = inspect.signature(_python(kernel)).parameters.values()
        return tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD)
    return ()


def _input_signature(kernel: Any, outs: Any) -> inspect.Signature:
    """The signature of a wrapper: the first parameters of the kernel, as many as `outs` takes, or any number."""
    plain, default = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    with contextlib.suppress(TypeError, ValueError):
        own, given = (list(inspect.signature(f).parameters.values()) for f in (_python(kernel), outs))
        if len(given) <= len(own) and all(p.kind == plain and p.default is default for p in [*own, *given]):
            return inspect.Signature([inspect.Parameter(p.name, plain) for p in own[: len(given)]])
    return inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """What the user said about a kernel, checked at once where it does not depend on the inputs.

    The fields are the parameters of the public function; `numba_kernel` documents those that all wrappers share.
    """

    outs: Any
    vmap_method: str | None = None
    input_output_aliases: Mapping[int | str, int] | None = None
    in_out_argnames: Sequence[str] | None = None
    has_side_effect: bool = False
    scratch: Any = None
    sharding_rule: str | None = None

    def __post_init__(self) -> None:
        if self.vmap_method not in _VMAP_METHODS:
            raise ValueError(
                f"vmap_method must be one of {_VMAP_METHODS}, which all run the kernel once per slice; "
                f"got {self.vmap_method!r}"
            )
        try:
            self.aliases()
        except (AttributeError, TypeError):
            raise TypeError(
                "input_output_aliases must be a dict from the positions or names of inputs to the positions of "
                f"outputs, {{0: 0}}; got {self.input_output_aliases!r}"
            ) from None
        if not callable(self.outs) or isinstance(self.outs, type):  # such as jnp.float32
            _flat_specs(self.outs, "outs")

    def aliases(self) -> dict[int | str, int]:
        given = (self.input_output_aliases or {}).items()
        return {i if isinstance(i, str) else operator.index(i): operator.index(j) for i, j in given}


def _wrap(wrapper: type[_Wrapper], given: dict[str, Any]) -> Any:
    """The wrapper that the arguments of a public function ask for, the kernel first; without one, a decorator."""
    kernel, *values = given.values()
    options = wrapper.options_type(**dict(zip([*given][1:], values, strict=True)))
    make = lambda kernel: wrapper(kernel, options)
    return make if kernel is None else make(kernel)


class _Recent(dict):
    """The newest entries only: what changes on every call must not fill the memory."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: Any, value: Any) -> Any:
        with _LOCK:
            while len(self) >= self.most:
                del self[next(iter(self))]
            self[key] = value
        return value


class _Wrapper:
    """A kernel as a JAX function: checks a call, finds its target, binds the primitive."""

    decorator: str  # the public function that made it, for error messages
    options_type: type[_Options] = _Options

    def __init__(
        self, kernel: Any, options: Any, keywords: tuple[str, ...] = (), static: Mapping[str, Any] | None = None
    ) -> None:
        self.kernel, self.options = kernel, options
        self.parameters = _parameters(kernel)
        self.keywords = keywords  # the parameters of the last inputs, where those do not follow the ones before
        self.static = static or {}  # the arguments that are no arrays, by parameter
        self.variants = _Recent(256)  # this kernel with other keywords and static arguments
        self._check_names("in_out_argnames", list(options.in_out_argnames or ()))
        self._check_names("input_output_aliases", [i for i in options.aliases() if isinstance(i, str)])
        self.__name__ = getattr(kernel, "__name__", None) or getattr(kernel, "key", None) or type(kernel).__name__
        self.__doc__ = getattr(kernel, "__doc__", None)
        self.__wrapped__ = kernel
        text = options.sharding_rule
        self.rule = None if text is None else _ShardingRule.parse(f"{self.decorator} {self.__name__!r}", text)
        self.__signature__ = _input_signature(kernel, options.outs)  # jax.custom_vjp and others bind arguments by it
        if options.outs is None:
            raise TypeError(
                f"{self.decorator}({self.__name__}): outs is missing: the results' shapes and dtypes, such as "
                f"@{self.decorator}(outs=lambda x: x) for one like the input, or () for none"
            )

        def call(*args: Any) -> Any:
            return self._trace(*args)

        call.__name__ = call.__qualname__ = self.__name__
        self._jitted = jax.jit(call)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named:
            return self._call_by_name(args, named)
        args, traced = _as_inputs(args, self.__name__)  # type: ignore[assignment]
        try:
            return self._trace(*args) if traced else self._jitted(*args)
        except TypeError:
            _input_specs(args)  # says more of a dtype that JAX does not have
            raise

    def _call_by_name(self, args: tuple, named: dict[str, Any]) -> Any:
        """A call with arguments by keyword: arrays are inputs, and a Python value is static."""
        static = {name: x for name, x in named.items() if not self._is_input(name, x)}
        free = [name for name in self.parameters if name not in static]
        if wrong := [name for name in named if name not in (*free[len(args) :], *(static.keys() & self.parameters))]:
            raise TypeError(
                f"{self.__name__}({', '.join(self.parameters)}) got {wrong[0]!r} by keyword, which is no parameter of "
                f"it or is given by position already ({len(args)} are)"
            )
        last = [name for name in free if name in named]
        follow_on = free[len(args) :][: len(last)] == last
        variant = self._variant(() if follow_on else tuple(last), static)
        return _Wrapper.__call__(variant, *args, *[named[name] for name in last])

    def _array_parameters(self) -> Sequence[str]:
        return self.parameters

    def _check_callables(where: str, functions: Sequence[Any]) -> None:
    for fun in functions:
        if not callable(fun):
            raise TypeError(f"{where}: a rule must be callable, got {fun!r}")


def _unknown_backend(op: XLACustomKernel, platform: str | None, backend: Any) -> str:
    where = f" for platform {platform!r}" if platform else ""
    new = f"; register a new one with def_kernel({backend!r}, {platform or 'cpu'!r}, ...)" if backend else ""
    return (
        f"XLACustomKernel {op.name!r} has no backend {backend!r}{where}; registered: {_registered(op)}. Use one of "
        f"these, or backend=None for the default{new}"
    )


def _registered(op: XLACustomKernel) -> str:
    listed = [f"{platform}: {', '.join(entries)}" for platform, entries in op._kernels.items() if entries]
    return "; ".join(listed) or "nothing"


def _default_platform() -> str:
    """The platform that a computation traced now is expected to run on."""
    device = jax.config.jax_default_device
    if device is None:
        return _platform_name(jax.default_backend())
    return _platform_name(device if isinstance(device, str) else device.platform)


def _platform_of(ins: Sequence[Any]) -> str:
    """The platform on which jax.jit runs a function of `ins`."""
    for x in ins:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            return _platform_name(next(iter(x.devices())).platform)
    return _default_platform()


def _platform_name(platform: str) -> str:
    return "gpu" if platform in _GPU_NAMES else platform


# -- 11.2 A call: from op(...) to its primitive --------------------------------------------------------
# Knows operands, outs and static parameters, and checks them where the user's call is on the stack.
# Does not know kernels, but for running a generator abstractly, so that its errors too are raised there.

_SPEC_TYPES: tuple[type, ...] = (Spec, jax.core.ShapedArray)
_OPTIONAL_PARAMS = ("outs", "backend")  # what a rule or a generator may leave out of its signature
_HIDDEN_PARAMS = ("_batch", "_types")  # what a rule never sees: the recorded vmaps, and the types of the parameters
_JAX_PARAMS = tuple("avals_in ctx effects eqn key primitive self".split())  # arguments of functions of JAX


def _find_call(op: XLACustomKernel, args: Sequence[Any], outs: Any, backend: Any, params: dict) -> _OpCall:
    """What serves a call with these outs, backend and parameters: checked when it is new, then remembered."""
    if callable(outs):
        outs = outs(*[getattr(x, "aval", None) or _input_spec(x, i) for i, x in enumerate(args)])
    if type(outs) in _SPEC_TYPES:  # the usual case, at half the price
        key: Any = ("call", outs.shape, outs.dtype, backend)
    else:
        leaves, tree = jax.tree_util.tree_flatten(outs, is_leaf=_is_spec)
        shown = tuple([(tuple(getattr(s, "shape", ())), getattr(s, "dtype", None)) for s in leaves])
        key = ("call", tree, shown, backend)
    try:
        if params:
            key += _tagged_items(params)
        call = op._recent.get(key)
    except TypeError:  # something is not hashable: the checks in _new_call say what
        call = None
    return call or op._recent.keep(key, _new_call(op, args, outs, backend, params))


def _new_call(op: XLACustomKernel, args: Sequence[Any], outs: Any, backend: Any, params: dict) -> _OpCall:
    _check_static_params(op, params)
    _check_backend_name(op, backend)
    _flat_specs(outs, f"XLACustomKernel {op.name!r}: outs", _input_specs(args))
    leaves, tree = jax.tree_util.tree_flatten(outs, is_leaf=_is_spec)
    return _OpCall(op, tree, tuple(Spec(s.shape, s.dtype) for s in leaves), backend, params)


class _OpCall:
    """An op with fixed outs, backend and static parameters; eager calls go through its `jitted`."""

    def __init__(self, op: XLACustomKernel, tree: Any, specs: tuple, backend: str | None, params: dict) -> None:
        self.op, self.tree, self.specs, self.backend, self.params = op, tree, specs, backend, params
        self.jitted = jax.jit(self.bind)
        self._key = (specs, backend, _tagged_items(params))

    def bind(self, *ins: Any) -> Any:
        """The op on tracers (or, under disable_jit, on arrays)."""
        vjp = self.op._rules.get("vjp")
        return self.bind_primitive(*ins) if vjp is None else _bind_with_vjp(self, ins, *vjp)

    def bind_primitive(self, *ins: Any) -> Any:
        if "sharding" in self.op._rules:
            self.op._rules["sharding"].check(_input_specs(ins), self.specs)
        results = _bind(self.op.primitive, _make_varying(ins), self.options(_input_specs(ins)))
        return jax.tree_util.tree_unflatten(self.tree, results)

    def options(self, ins: Sequence[Spec]) -> dict:
        # the dtypes are decided here and not on construction: jax_enable_x64 can change between two calls
        outs = tuple(Spec(s.shape, _allowed_dtype(s.dtype, ins)) for s in self.specs)
        return {**self.params, "outs": outs, "backend": self.backend}

    def check(self, ins: Sequence[Any]) -> None:
        """Run the generator abstractly, so that what is wrong with it is reported where the op is called."""
        op, platform = self.op, _default_platform()
        if op._kernels and self.backend not in op._choices(platform):
            return  # it may be lowered for another platform, which has it; if not, the lowering reports it
        entry = op._entry(platform, self.backend)
        specs = tuple(_input_specs(ins))
        key = ("check", entry, self._key, specs)
        if key in op._recent:
            return
        try:
            jax.eval_shape(_kernel_function(op, entry, self.options(specs)), *ins)
        except RuntimeError:
            # with several platforms on the machine, the guess may be wrong: leave it to the lowering
            if jax.default_backend() == "cpu":
                raise
            return
        op._recent.keep(key, True)


def _bind(primitive: Any, args: Sequence[Any], params: dict) -> Any:
    """Bind a primitive; that of an op with the types of its parameters, as JAX's caches find 1, 1.0 and True equal."""
    if primitive in _OPS:
        hidden = (*_OPTIONAL_PARAMS, *_HIDDEN_PARAMS)
        types_ = _tagged_items({name: value for name, value in params.items() if name not in hidden})
        params = {**params, "_types": types_} if types_ else params
    return primitive.bind(*args, **params)


def _visible(params: dict) -> dict:
    return {name: value for name, value in params.items() if name not in _HIDDEN_PARAMS}


def _tagged_items(params: dict) -> tuple:
    return tuple([(name, _tagged(value)) for name, value in params.items()])


def _tagged(value: Any) -> tuple:
    """A key that tells apart what Python calls equal: 1, 1.0 and True, 0.0 and -0.0."""
    if isinstance(value, tuple):
        return (type(value), *[_tagged(v) for v in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), value, *[_tagged(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare])
    if isinstance(value, (float, complex, np.inexact)):
        return type(value), repr(value)
    return type(value), value


def _check_static_params(op: XLACustomKernel, params: dict) -> None:
    for name, value in params.items():
        if name in _HIDDEN_PARAMS or name in _JAX_PARAMS:
            raise TypeError(f"XLACustomKernel {op.name!r}: the parameter name {name!r} is reserved; use another one")
        where = f"XLACustomKernel {op.name!r}: parameter {name!r}"
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"{where} is traced ({value}), but keyword parameters are static. Compile the caller with "
                f"jax.jit(..., static_argnames={name!r}), or pass the value as an operand"
            )
        _check_hashable(value, where, "Pass a number or a tuple, or pass the array as an operand")


def _check_hashable(value: Any, what: str, fix: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{what} must be hashable, got {value!r:.80} of type {type(value).__name__}. {fix}") from None


def _check_backend_name(op: XLACustomKernel, backend: Any) -> None:
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"XLACustomKernel {op.name!r}: backend must be a string or None, got {backend!r}")
    if not any(backend in entries for entries in op._kernels.values()):
        raise ValueError(_unknown_backend(op, None, backend))


# -- 11.3 A kernel: from a generator, or a ready kernel, to a function to trace ------------------------
# Knows one slice and one backend.  Does not know vmap, nor what the call was traced for.


def _as_generator(op: XLACustomKernel, backend: str, kg: Any, options: dict) -> Callable[..., Any]:
    if options.get("has_side_effect"):
        raise TypeError(
            f"XLACustomKernel {op.name!r}: has_side_effect=True has no place here: a call of the op whose results "
            "nobody uses is dropped; call numba_kernel, numba_cuda_kernel or warp_kernel themselves for effects"
        )
    if _ready_kind(kg) is not None:
        return _ready_generator(op, kg, options)
    if not callable(kg):
        raise TypeError(
            f"XLACustomKernel {op.name!r}: the kernel of backend {backend!r} must be callable (a generator, or a "
            f"Numba, Numba CUDA or Warp kernel), got {kg!r}"
        )
    if options:
        given = ", ".join(options)
        raise TypeError(
            f"XLACustomKernel {op.name!r}: {given} can be given with a ready kernel only; a generator passes them to "
            "numba_kernel, numba_cuda_kernel or warp_kernel itself"
        )
    return _tolerant(kg)


def _ready_generator(op: XLACustomKernel, kernel: Any, options: dict) -> Callable[..., Any]:
    """The generator of a kernel that is registered ready."""

    def generate(outs: tuple, **params: Any) -> Callable[..., Any]:
        if params:
            raise TypeError(
                f"static parameters ({', '.join(map(repr, params))}) need a generator, but the {_ready_kind(kernel)} "
                f"kernel of XLACustomKernel {op.name!r} was registered ready. Register a function of the parameters "
                "that returns the kernel, or pass the values as operands"
            )
        return _wrap_ready(kernel, outs, options)

    return generate


def _wrap_ready(kernel: Any, outs: tuple, options: dict) -> Any:
    """A ready kernel as a function of arrays; anything else as it is."""
    row = _BACKENDS.get(_ready_kind(kernel) or "")
    return row.wrap(kernel, outs, **options) if row else kernel


def _ready_kind(kernel: Any) -> str | None:
    """The backend of a compiled kernel (`@njit`, `@cuda.jit`, `@wp.kernel`); None for anything else."""
    for cls in type(kernel).__mro__:
        name = f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
        for backend, row in _BACKENDS.items():
            if name in row.ready:
                return backend
    return "wrapper" if isinstance(kernel, _Wrapper) else None


def _tolerant(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, called without those of `outs` and `backend` that its signature does not take."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return fun
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return fun
    dropped = set(_OPTIONAL_PARAMS) - {p.name for p in parameters}
    if not dropped:
        return fun

    @functools.wraps(fun)
    def call(*args: Any, **params: Any) -> Any:
        return fun(*args, **{name: value for name, value in params.items() if name not in dropped})

    return call


def _kernel_function(op: XLACustomKernel, entry: KernelEntry, options: dict) -> Callable[..., list]:
    """The kernel of `entry` as a function of one slice's operands that returns the flat, checked list of results."""
    outs = options["outs"]
    static = {name: value for name, value in _visible(options).items() if name != "backend"}

    def run(*ins: Any) -> list:
        if outs and all(0 in s.shape for s in outs):  # nothing to compute, and not every backend takes empty arrays
            return [_zeros(s.shape, s.dtype) for s in outs]
        try:
            varying = frozenset().union(*[_varying_axes(jax.typeof(x)) for x in ins])
            kernel = entry.kernel_generator(**{**static, "outs": tuple(_varying_spec(s, varying) for s in outs)})
            kernel = _wrap_ready(kernel, outs, {})
            if not callable(kernel):
                raise TypeError(f"the generator must return the function to trace, got {kernel!r}")
            results = kernel(*ins)
        except Exception as error:
            raise RuntimeError(_kernel_failed(op, entry, error)) from error
        return _checked_results(op, entry, results, outs)

    return run


def _kernel_failed(op: XLACustomKernel, entry: KernelEntry, error: Exception) -> str:
    others = [b for b in op.available_backends(entry.platform) if b != entry.backend]
    choice = (
        f"other backends registered for {entry.platform!r}: {', '.join(others)}; choose one with backend={others[0]!r}"
        if others
        else f"no other backend is registered for {entry.platform!r}"
    )
    return (
        f"XLACustomKernel {op.name!r}: the kernel of backend {entry.backend!r} for platform {entry.platform!r} raised "
        f"{type(error).__name__}: {error} ({choice})"
    )


def _checked_results(op: XLACustomKernel, entry: KernelEntry, results: Any, outs: tuple) -> list:
    leaves = jax.tree.leaves(results)
    found = [leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf) for leaf in leaves]
    came = [_show(x) for x in found]
    declared = [_show(s) for s in outs]
    if came == declared:
        return found
    raise ValueError(
        f"XLACustomKernel {op.name!r}: the kernel of backend {entry.backend!r} for platform {entry.platform!r} "
        f"returned ({', '.join(came)}), but outs declares ({', '.join(declared)}). Return as many arrays as outs has, "
        "each of the declared shape and dtype, or correct outs"
    )


# -- 11.4 The primitive: what JAX's interpreters ask ---------------------------------------------------
# All hooks are installed once, when the op is made; each looks up the op's newest rule when JAX asks.

_OPS: dict[Any, XLACustomKernel] = {}  # by primitive
_IN_JAX_CACHES: set[tuple] = (
    set()
)  # (op, "rules") of what was traced; (op, platform, backend or None) of what was lowered


def _install_hooks(op: XLACustomKernel) -> None:
    primitive = op.primitive
    _OPS[primitive] = op
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(_op_impl, op))
    primitive.def_abstract_eval(functools.partial(_op_abstract_eval, op))
    ad.primitive_jvps[primitive] = functools.partial(_op_jvp, op)
    ad.primitive_transposes[primitive] = functools.partial(_op_transpose, op)
    batching.primitive_batchers[primitive] = functools.partial(_op_batching, op)
    for platform in (None, "cpu", "gpu", "tpu"):
        mlir.register_lowering(primitive, functools.partial(_op_lowering, op, platform), platform=platform)


def _op_impl(op: XLACustomKernel, /, *ins: Any, **options: Any) -> list:
    """Run the primitive on arrays: through a jit of its own, kept by parameters and by their types."""
    key = ("impl", _tagged_items(options))
    call = op._recent.get(key)
    if call is None:

        def run(*ins: Any) -> list:
            return op.primitive.bind(*ins, **options)

        call = op._recent.keep(key, jax.jit(_as_one_primitive(run)))
    with jax.disable_jit(False):
        return call(*ins)


def _op_abstract_eval(op: XLACustomKernel, /, *avals: Any, outs: tuple, _batch: tuple = (), **params: Any) -> list:
    _IN_JAX_CACHES.add((op, "rules"))
    sizes = tuple(size for size, _ in reversed(_batch))
    return _op_sharding(op, avals, outs, _batch).out_avals(avals, [((*sizes, *out.shape), out.dtype) for out in outs])


def _op_sharding(op: XLACustomKernel, ins: Sequence[Any], outs: tuple, batch: tuple) -> _ShardingRule:
    """The sharding rule of the op under the recorded vmaps."""
    depths = [sum(flags[i] for _, flags in batch) for i in range(len(ins))]
    slices = [_slices([x], depth)[0] for x, depth in zip(ins, depths)]
    rule = op._rules.get("sharding") or _ShardingRule.whole(slices, outs)
    for _, flags in batch:
        rule = rule.batched(flags)
    return rule


def _op_lowering(op: XLACustomKernel, platform: str | None, ctx: Any, /, *ins: Any, **options: Any) -> Any:
    platform = platform or _platform_name(_platforms(ctx)[0])
    backend = options.get("backend")
    entry = op._entry(platform, backend)
    _IN_JAX_CACHES.add((op, platform, backend))

    def make(outs: tuple, batch: tuple) -> Callable[..., list]:
        return _batched_function(_kernel_function(op, entry, {**options, "outs": outs}), outs, batch)

    def run(results: Sequence[Spec], *ins: Any) -> list:
        sizes = reversed(results[0].shape[: len(batch)])
        local = tuple((size, flags) for size, (_, flags) in zip(sizes, batch))
        return make(tuple(_slices(results, len(batch))), local)(*ins)

    outs, batch = options["outs"], options.get("_batch", ())
    function, rule = make(outs, batch), _op_sharding(op, ctx.avals_in, outs, batch)
    if rule.split and _is_partitioned(ctx):
        function = rule.partitioned(run, _slices(ctx.avals_out, 0))
    return mlir.lower_fun(function, multiple_results=True)(ctx, *ins)


def _forget(*stale: tuple) -> None:
    """Have JAX trace and lower again what was made with a stale choice: it can only drop all its caches at once."""
    if not _IN_JAX_CACHES.isdisjoint(stale):
        _IN_JAX_CACHES.clear()
        jax.clear_caches()


# -- 11.5 Batching -------------------------------------------------------------------------------------
# A vmap of an op binds its primitive again, with (size, which operands are batched) added to the parameter `_batch`.
# Specs, rules and generators stay those of one slice.  The lowering, which knows the platform and with it the backend,
# applies the recorded vmaps to the kernel, innermost first: jax.vmap, by the rules of what the backend traces (a
# wrapper loops natively, Pallas and JAX code have their own), or jax.lax.map where that has none.  Derivatives of
# recorded calls apply a rule in the same way.  Nothing here is decided before the backend is known.


def general_batching_rule(
    prim: Any, args: Sequence[Any], axes: Sequence[int | None], /, **params: Any
) -> tuple[Any, Any]:
    """Batch an op or primitive without a rule of its own; what :class:`XLACustomKernel` uses by default.

    An op is bound once, with the batch recorded, and its backend's own `vmap` does the work. For any other primitive
    or function a `jax.lax.map` applies it to the slices.

    Args:
      prim: an :class:`XLACustomKernel`, its `primitive`, or any primitive or function of arrays.
      args: the operands.
      axes: the batched axis of each operand, or None.
      params: the parameters, by keyword.

    Returns:
      The outputs and, in the same structure, their batched axes: 0, or None if no operand is batched.

    Example:
      >>> import jax.numpy as jnp
      >>> out, axis = general_batching_rule(lambda x, y: x @ y, (jnp.ones((5, 3)), jnp.ones(3)), (0, None))
      >>> print(out.shape, axis)
      (5,) 0
    """
    if not any(axis is not None for axis in axes):
        out = _apply(prim, args, params)
        return out, jax.tree_util.tree_map(lambda _: None, out)
    moved = [x if axis in (0, None) else jax.numpy.moveaxis(x, axis, 0) for x, axis in zip(args, axes)]
    flags = tuple(axis is not None for axis in axes)
    if getattr(prim, "primitive", prim) in _OPS:
        out = _record_vmap(prim, moved, flags, params)
    else:
        out = _sequential(lambda *xs: _apply(prim, xs, params), flags)(*moved)
    return out, jax.tree.map(lambda _: 0, out)


def _op_batching(op: XLACustomKernel, args: Sequence[Any], axes: Sequence[Any], /, **params: Any) -> Any:
    rule = op._rules.get("batching")
    if rule is None or "_batch" in params:  # recorded before: a user's rule is for the op on one slice
        return general_batching_rule(op.primitive, args, axes, **params)
    return rule(args, axes, **_visible(params))


def _record_vmap(prim: Any, ins: Sequence[Any], flags: tuple, params: dict) -> Any:
    """Bind an op or its primitive with one more vmap, over the first axis of the flagged operands."""
    size = next(x.shape[0] for x, batched in zip(ins, flags) if batched)
    specs, tree = jax.tree.flatten(params["outs"])
    batch = (*params.get("_batch", ()), (size, flags))
    _need_devices(getattr(prim, "primitive", prim))
    options = {"backend": None, **params, "outs": tuple(specs), "_batch": batch}
    results = _bind(getattr(prim, "primitive", prim), _make_varying(ins), options)
    return results if isinstance(prim, Primitive) else jax.tree_util.tree_unflatten(tree, results)


def _apply(prim: Any, args: Sequence[Any], params: dict) -> Any:
    return _bind(prim, args, params) if isinstance(prim, Primitive) else prim(*args, **params)


def _batched_function(run: Callable[..., list], outs: tuple, batch: tuple) -> Callable[..., list]:
    """`run` under the recorded vmaps: by the backend's own rules, or slice by slice where it has none."""
    if not batch:
        return run
    sizes = tuple(size for size, _ in reversed(batch))
    if 0 in sizes:
        return lambda *ins: [_zeros((*sizes, *s.shape), s.dtype) for s in outs]

    def staged(*ins: Any) -> list:  # the generator runs outside the vmaps, so that its errors stay its own
        return _eval_jaxpr(jax.make_jaxpr(run)(*ins), ins)

    def batched(*ins: Any) -> list:
        try:
            jaxpr = jax.make_jaxpr(_under_vmaps(staged, batch))(*ins)  # tried apart: a failure leaves nothing behind
        except NotImplementedError:
            return functools.reduce(_sequential, [flags for _, flags in batch], run)(*ins)
        return _eval_jaxpr(jaxpr, ins)

    return batched


def _under_vmaps(fun: Callable[..., Any], batch: Sequence[tuple]) -> Callable[..., Any]:
    """`fun`, which is for one slice, under the recorded vmaps; a Zero or UndefinedPrimal has nothing to batch."""
    for size, flags in batch:
        fun = jax.vmap(fun, in_axes=tuple(0 if b else None for b in flags), axis_size=size)
    return fun


def _sequential(run: Callable[..., Any], flags: tuple) -> Callable[..., Any]:
    """`run` mapped over the first axis of the flagged operands, one slice at a time."""

    def mapped(*ins: Any) -> Any:
        def one(slices: tuple) -> Any:
            rest = iter(slices)
            return run(*[next(rest) if b else x for x, b in zip(ins, flags)])

        return jax.lax.map(one, tuple(x for x, b in zip(ins, flags) if b))

    return mapped


# -- 11.6 Derivatives ----------------------------------------------------------------------------------
# Knows tangents and cotangents, symbolic zeros among them.  Rules are for one slice; 11.5 has them applied to batches.

_NO_RULE = {
    "jvp": "has no derivative: define one with def_jvp_rule2 (one rule per operand), def_jvp_rule or def_vjp_rule, or "
    "keep it out of differentiation with jax.lax.stop_gradient",
    "transpose": "has no transpose, which reverse-mode differentiation of its derivative needs: define one with "
    "def_transpose_rule, write the derivative with jax.numpy, or use def_vjp_rule",
}


def defjvp(primitive: Any, *jvp_rules: Callable[..., Any] | None) -> None:
    """Define the derivative of an op or primitive by one rule per operand.

    Args:
      primitive: an :class:`XLACustomKernel`, or a JAX primitive with one or several results.
      jvp_rules: one per operand: `rule(tangent, *primals, **params)` returns the tangents of the outputs that this
        operand's tangent causes, in any container (one array if there is one output; None for zero). None in place of
        a rule: the operand contributes nothing. `params` holds `outs`, `backend` and the static parameters of the
        call; a rule may leave out the first two.

    A rule is only called for an operand that is differentiated: zero tangents are never materialized.

    Raises:
      TypeError: `primitive` is neither op nor primitive, or a rule is not callable.
      ValueError: when differentiated, if the number of rules is not the number of operands, or if a rule returns
        tangents that do not match the outputs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> op = XLACustomKernel("multiply")
      >>> _ = op.def_kernel("jax", "cpu", lambda: lambda x, y: x * y)
      >>> defjvp(op, lambda t, x, y: t * y, lambda t, x, y: x * t)
      >>> print(jax.grad(lambda x: op(x, 3.0, outs=lambda x, y: x))(2.0))
      3.0
    """
    primitive = getattr(primitive, "primitive", primitive)
    if not isinstance(primitive, Primitive):
        raise TypeError(f"defjvp: expected an XLACustomKernel or a jax Primitive, got {primitive!r}")
    _check_callables("defjvp", [r for r in jvp_rules if r is not None])
    rules = [None if r is None else _tolerant(r) for r in jvp_rules]
    rule = functools.partial(_jvp_by_operand, primitive, rules)
    if primitive in _OPS:
        _OPS[primitive]._set_rule("jvp", rule)
    else:
        ad.primitive_jvps[primitive] = rule


def _op_jvp(op: XLACustomKernel, primals: Any, tangents: Any, /, **params: Any) -> tuple:
    """The op's jvp rule, which is for one slice, under the recorded vmaps."""
    rule, count, visible = _rule(op, "jvp"), len(primals), _visible(params)

    def one(*values: Any) -> tuple:
        primals, tangents = values[:count], values[count:]
        outputs, found = rule(primals, _with_zeros(tangents, primals), **visible)
        return outputs, _with_zeros(found, outputs)

    batch = [(size, flags * 2) for size, flags in params.get("_batch", ())]
    outputs, found = _under_vmaps(one, batch)(*primals, *tangents)
    return outputs, _with_zeros(found, outputs)


def _bind_with_vjp(call: _OpCall, ins: Sequence[Any], fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Any:
    """Bind the op with its vjp rule, whose functions get the options of a call with these operands."""
    options = call.options(_input_specs(ins))

    def backward(residuals: Any, cotangents: Any) -> tuple:
        found = bwd(residuals, cotangents, **options)
        found = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if len(found) != len(ins):
            raise ValueError(
                f"the vjp rule of XLACustomKernel {call.op.name!r} returned {len(found)} cotangents for {len(ins)} "
                "operands; return one per operand, None for zero"
            )
        return found

    bound = jax.custom_vjp(call.bind_primitive)
    bound.defvjp(lambda *ins: fwd(*ins, **options), backward)
    return bound(*ins)


def _op_transpose(op: XLACustomKernel, cotangents: Any, /, *args: Any, **params: Any) -> list:
    """The op's transpose rule, which is for one slice, under the recorded vmaps."""
    rule, count, visible, batch = _rule(op, "transpose"), len(cotangents), _visible(params), params.get("_batch", ())

    def one(*values: Any) -> list:
        cts, operands = list(values[:count]), values[count:]
        return _checked_cotangents(op, rule(cts, *operands, **visible), operands)

    batched = _under_vmaps(one, [(size, (True,) * count + flags) for size, flags in batch])
    cts = [_slice_of(ct, len(batch)) for ct in cotangents]
    found = batched(*cts, *[_slice_of(x, sum(flags[i] for _, flags in batch)) for i, x in enumerate(args)])
    shared = [[k for k, (_, flags) in enumerate(reversed(batch)) if not flags[i]] for i in range(len(args))]
    return [
        _as_cotangent(ct, x, axes) if ad.is_undefined_primal(x) else None for ct, x, axes in zip(found, args, shared)
    ]


def _rule(op: XLACustomKernel, kind: str) -> Callable[..., Any]:
    if kind not in op._rules:
        raise NotImplementedError(f"XLACustomKernel {op.name!r} {_NO_RULE[kind]}")
    return op._rules[kind]


def _jvp_by_operand(primitive: Any, rules: Sequence[Any], primals: Any, tangents: Any, /, **params: Any) -> tuple:
    if len(rules) != len(primals):
        raise ValueError(
            f"{primitive.name!r} was given {len(rules)} jvp rules, but it has {len(primals)} operands; give one rule "
            "per operand, None for zero"
        )
    results = _bind(primitive, primals, params)
    outputs = list(results) if primitive.multiple_results else [results]
    totals = _with_zeros([None] * len(outputs), outputs)
    for index, (rule, tangent) in enumerate(zip(rules, tangents)):
        if rule is not None and type(tangent) is not ad.Zero:
            parts = _tangents(primitive, index, rule(tangent, *primals, **params), outputs)
            totals = [ad.add_tangents(*_vary_nonzero(a, b)) for a, b in zip(totals, parts)]
    return (outputs, totals) if primitive.multiple_results else (outputs[0], totals[0])


def _tangents(primitive: Any, index: int, found: Any, outputs: list) -> list:
    """What the rule for operand `index` returned, as one tangent (or Zero) per output."""
    leaves = jax.tree.leaves(found, is_leaf=lambda t: t is None or isinstance(t, ad.Zero))
    where = f"the jvp rule of {primitive.name!r} for operand {index}"
    if len(leaves) != len(outputs):
        raise ValueError(
            f"{where} returned {len(leaves)} tangents for {len(outputs)} outputs; return one per output, None for zero"
        )
    tangents = [t if type(t) is ad.Zero else jax.numpy.asarray(t) for t in _with_zeros(leaves, outputs)]
    for t, y in zip(tangents, outputs):
        if type(t) is not ad.Zero and _show(t) != _show(y):
            raise ValueError(f"{where} returned {_show(t)} for an output {_show(y)}; the two must agree")
    return tangents


def _with_zeros(tangents: Sequence[Any], values: Sequence[Any]) -> list:
    """The tangents of `values`: a new Zero for None, for a Zero (of another shape, perhaps), and for an integer's."""
    zeros: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in values]
    missing = [t is None or type(t) is ad.Zero or z.aval.dtype == jax.dtypes.float0 for t, z in zip(tangents, zeros)]
    return [z if m else t for t, z, m in zip(tangents, zeros, missing)]


def _vary_nonzero(a: Any, b: Any) -> list:
    return [a, b] if isinstance(a, ad.Zero) or isinstance(b, ad.Zero) else _make_varying((a, b))


def _slice_of(x: Any, depth: int) -> Any:
    """What is symbolic, as one slice under `depth` vmaps sees it; anything else as it is."""
    if not depth or type(x) not in (ad.Zero, ad.UndefinedPrimal):
        return x
    return type(x)(_out_aval(x.aval.shape[depth:], x.aval.dtype, [x.aval], x.aval.sharding.spec[depth:]))


def _checked_cotangents(op: XLACustomKernel, found: Any, args: Sequence[Any]) -> list:
    """One cotangent per operand; None for those that are known, whatever the rule returned for them."""
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    if len(found) != len(args):
        raise ValueError(
            f"the transpose rule of XLACustomKernel {op.name!r} returned {len(found)} cotangents for {len(args)} "
            "operands; return one per operand, None for those that are known"
        )
    return [_as_cotangent(ct, x) if ad.is_undefined_primal(x) else None for ct, x in zip(found, args)]


def _as_cotangent(ct: Any, operand: Any, shared: Sequence[int] = ()) -> Any:
    """The cotangent of an operand; one that slices share, along some axes, gets the sum of theirs."""
    if ct is None or isinstance(ct, ad.Zero):
        return ad.Zero(operand.aval)
    return _sharded_like(jax.lax.reduce_sum(ct, shared) if shared else ct, operand.aval)


# -- 11.7 Benchmark ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _OpBenchmark:
    """What :meth:`XLACustomKernel.benchmark` returns; prints as a table."""

    name: str
    platform: str
    rows: tuple[_BenchmarkRow, ...]

    def __repr__(self) -> str:
        lines = [f"{self.name} on {self.platform}", f"{'backend':<14}{'first (ms)':>12}{'median (us)':>14}  difference"]
        for row in self.rows:
            if row.error is not None:
                lines.append(f"{row.backend:<14}{'failed':>12}{'':>14}  {row.error}")
            else:
                lines.append(f"{row.backend:<14}{row.first_ms:>12.2f}{row.median_us:>14.2f}  {row.difference:.3g}")
        return "\n".join(lines)


class _BenchmarkRow(NamedTuple):
    backend: str
    first_ms: float | None
    median_us: float | None
    difference: float | None
    error: str | None


def _benchmark(op: XLACustomKernel, ins: Sequence[Any], outs: Any, params: dict) -> _OpBenchmark:
    args = tuple(_as_inputs(ins, op.name)[0])
    platform = _platform_of(args)
    op._entry(platform, None)
    rows: list[_BenchmarkRow] = []
    reference: Any = None
    for backend in op.available_backends(platform):
        run = jax.jit(functools.partial(op, outs=outs, backend=backend, **params))
        row, results = _time_backend(backend, run, args, reference)
        reference = results if reference is None else reference
        rows.append(row)
    return _OpBenchmark(op.name, platform, tuple(rows))


def _time_backend(backend: str, run: Callable[..., Any], ins: tuple, reference: Any) -> tuple[_BenchmarkRow, Any]:
    timer = timeit.Timer(lambda: jax.block_until_ready(run(*ins)))
    try:
        first, results = timer.timeit(1), run(*ins)
        times = timer.repeat(min(10_000, max(5, int(0.2 / timer.timeit(1)))), 1)
    except Exception as error:  # reported as the row of this backend
        message = (str(error).splitlines() or [""])[0]
        return _BenchmarkRow(backend, None, None, None, f"{type(error).__name__}: {message}"), None
    difference = 0.0 if reference is None else _largest_difference(reference, results)
    return _BenchmarkRow(backend, first * 1e3, np.median(times) * 1e6, difference, None), results


def _largest_difference(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b))
    wide = [(np.asarray(x).astype(complex), np.asarray(y).astype(complex)) for x, y in pairs]
    return max((float(np.max(np.abs(x - y), initial=0.0)) for x, y in wide), default=0.0)


# ======================================================================================================
# 12. Backends: one row each; and the self-check, python -m xla_kernels
# To add a backend takes a section like those of Numba and Warp (what it needs installed, its dtypes, a wrapper, an
# emitter), a kernel to check it and a row here, and a `def_..._kernel` beside those of XLACustomKernel.
# ======================================================================================================


class _Backend(NamedTuple):
    """What the rest of this file knows of a backend."""

    platforms: dict[str, str]  # where it runs -> how to get it there; an op takes all but the first as a fallback
    ready: tuple[str, ...]  # package and class of compiled kernels: as names, so that nothing is imported for them
    wrap: Callable[..., Any]  # (ready kernel, outs, **options) -> function of arrays
    check: Callable[[], Any]  # makes the function that the self-check calls: 2 * x + y


def _wrap_numba_cuda(kernel: Any, outs: tuple, **options: Any) -> Any:
    """By default, one thread per element of the first output."""
    given = options.keys() & {"grid", "block", "launch_dims"}
    return numba_cuda_kernel(kernel, outs, **(options if given else {**options, "launch_dims": outs[0].shape}))


def _check_numba() -> Callable:
    def kernel(x: Any, y: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = 2 * x[i] + y[i]

    return numba_kernel(kernel, outs=lambda x, y: x)


def _check_numba_cuda() -> Callable:
    cuda = _cuda_packages(None, "the check of numba_cuda")[0].cuda

    def kernel(x: Any, y: Any, out: Any) -> None:
        i = cuda.grid(1)
        if i < out.size:
            out[i] = 2 * x[i] + y[i]

    return numba_cuda_kernel(kernel, outs=lambda x, y: x, launch_dims=lambda x, y: x.shape)


def _check_warp() -> Callable:
    wp = _warp("the check of warp")

    def kernel(x, y, out):  # type: ignore[no-untyped-def]
        i = wp.tid()
        out[i] = 2.0 * x[i] + y[i]

    kernel.__annotations__ = dict.fromkeys(("x", "y", "out"), wp.array(dtype=wp.float32))
    return warp_kernel(wp.kernel(kernel), outs=lambda x, y: x)


_BACKENDS = {
    "numba": _Backend({"cpu": _NUMBA_INSTALL}, ("numba.Dispatcher",), numba_kernel, _check_numba),
    "warp": _Backend(
        {"gpu": f"an NVIDIA GPU, jax[cuda13], {_WARP_INSTALL}", "cpu": _WARP_INSTALL},
        ("warp.Kernel",),
        warp_kernel,
        _check_warp,
    ),
    "numba_cuda": _Backend(
        {"gpu": f"an NVIDIA GPU, {_CUDA_INSTALL}"},
        (
            *("numba.CUDADispatcher", "numba.FakeCUDAKernel", "numba_cuda.CUDADispatcher", "numba_cuda.FakeCUDAKernel"),
            "numba_cuda_mlir.MLIRDispatcher",
        ),
        _wrap_numba_cuda,
        _check_numba_cuda,
    ),
}


def _self_check() -> int:
    """Run `2 * x + y` through every backend; returns 1 if one that is installed is wrong."""
    print(f"xla_kernels {__version__}, Python {sys.version.split()[0]}, jax {jax.__version__}, NumPy {np.__version__}")
    print(f"platform {jax.default_backend()}, {jax.device_count()} device(s), XLA FFI API {_ffi_api_version()}")
    compilers = [package.name for package in _CUDA_PACKAGES.values() if package.is_installed()]
    print(f"plain functions become CUDA kernels by {', else '.join(compilers) or 'nothing that is installed'}\n")
    failed = False
    rows = [(name, row, *where) for name, row in _BACKENDS.items() for where in reversed(row.platforms.items())]
    for name, row, platform, install in rows:
        try:
            device = jax.devices(platform)[0]
            call = row.check()
        except (ImportError, RuntimeError) as error:
            reason = error if isinstance(error, ImportError) else f"JAX finds no {platform}"
            print(f"{name:11} {platform:4} not available: {reason}\n{'':17}to get it: {install}")
            continue
        try:
            print(f"{name:11} {platform:4} works, {_cost_per_call(call, device):.2f} µs per call under jit")
        except Exception as error:
            failed = True
            print(f"{name:11} {platform:4} FAILED: {type(error).__name__}: {error}")
    return int(failed)


def _cost_per_call(call: Callable, device: Any, steps: int = 10_000) -> float:
    """Compare a call with NumPy, then time a loop of calls: microseconds for each, the best of five."""
    x, y = (jax.device_put(np.arange(n, n + 16, dtype=np.float32), device) for n in (1, 2))
    np.testing.assert_array_equal(call(x, y), 2 * np.asarray(x) + np.asarray(y))
    loop = jax.jit(lambda x, y: jax.lax.fori_loop(0, steps, lambda i, z: call(y, z), x))
    timer = timeit.Timer(lambda: loop(x, y).block_until_ready())
    timer.timeit(1)
    return min(timer.repeat(5, 1)) / steps * 1e6


if __name__ == "__main__":
    sys.exit(_self_check())
