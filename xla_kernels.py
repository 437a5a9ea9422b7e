# SPDX-License-Identifier: Apache-2.0
"""Call kernels written in Python (Numba, Numba CUDA, Warp) from JAX, at the cost of C++.

One file to copy or to install.  The handler that XLA's foreign function interface calls is compiled to machine code:
no Python runs on the call path, but for errors and for what must be called in Python (`_CallbackEmitter`).

    import jax, jax.numpy as jnp
    from xla_kernels import numba_kernel

    @numba_kernel(outs=lambda x, y: x)
    def add(x, y, out):
        out[:] = x + y

    add(jnp.arange(3.0), jnp.ones(3))            # works under jit, vmap, scan, shard_map, export

`python -m xla_kernels` shows which backends work on this machine.

A map of this file, whose sections begin under a line of `=`:

    1  JAX               what differs between its versions, what it does not document, and what it lacks
    2  C structs         those of XLA that a handler reads and writes: what a new jaxlib may change
    3  Digests           names that equal kernels share, in every process, and that no others have
    4  Targets           what is registered with XLA under these names
    5  Specs and inputs  what comes in and goes out, checked where the user's call is on the stack
    6  Partitioning      what XLA may split over a mesh
    7  The primitive     one call of one target, and `_Wrapper`, which all backends share
    8  The handler       machine code that XLA calls: it runs a kernel for each slice of a batch
    9  Numba on CPU, 10 Numba CUDA, 11 Warp: wrappers, and what runs one slice
    12 XLACustomKernel   one operation, many backends, all of JAX's transformations
    13 Backends          one row each, and the self-check

A call, from Python to machine code: `numba_kernel` makes a `_NumbaKernel`; `_Wrapper.__call__` -> `_Wrapper._trace` ->
`_Wrapper._bind` -> `_Wrapper._resolve` -> `_NumbaKernel._find_target`, which names it (`_Digester`) and registers it
(`_Target.register` -> `_compile_numba` -> `_Handler`, for which `_NumbaEmitter` writes what runs a slice) ->
`_BoundCall.bind` -> `_call_lowering` -> XLA -> the machine code of `_Handler` and, for a batch, of `_Driver`.
An op under grad of vmap: `XLACustomKernel.__call__` -> `_find_call` -> `_OpCall.bind` (with a vjp rule
`_bind_with_vjp`: a `jax.custom_vjp`, whose functions JAX batches) -> `_op_batching`, which records the vmap ->
`_op_jvp`, `_op_transpose`, which vmap the user's rules -> `_op_lowering`, which knows the platform -> `_run_vmaps` ->
`_OpKernel.run_slice` -> the call of a wrapper, as above.
The order of a kernel's arguments: above `_NumbaWrapper`; `_CudaCode._callable_emitter` for callables; in
`_WarpKernel._find_target`.  A dtype: above `_XLA_FFI_DATA_TYPES`.
An exception in a slice: `_NumbaEmitter`, `_keep_message`, `_Driver.run`, `_Driver.work`.
A new backend takes four places: a section like 9 to 11 (what to install, dtypes, a public `..._kernel`, a `_Wrapper`,
an `_Emitter`), a row in `_BACKENDS` with a check like `_check_numba`, a `def_..._kernel`, and `_is_stable_module`.
What two copies of this file share: `_STORE`, if they are of one layout, and `_shared_locks`.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import copy
import ctypes
import dataclasses
import decimal
import dis
import functools
import hashlib
import importlib
import inspect
import itertools
import linecache
import math
import mmap
import operator
import os
import pickle
import re
import sys
import threading
import time
import timeit
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir

__version__ = "0.3.2"
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
# 1. JAX: what differs between its versions, what it does not document, and what it lacks.
# Checked on 0.7.2 to 0.12.0.1.  What JAX's interpreters ask of a primitive is in sections 6, 7 and 12.4 to 12.6.
#
# What a new JAX may break.
# - With an error: what a lowering rule knows (`_on_mesh`), `custom_partitioning` (`_ShardingRule`), what `mlir`, `ad`
#   and `batching` export.
# - Silently: `prim_requires_devices_during_lowering` (without it nothing is split over a mesh).

Spec = jax.ShapeDtypeStruct
Primitive: Any = type(jax.lax.add_p)  # jax.extend.core.Primitive, without the 36 ms that importing jax.extend takes
_LiteralArray: Any = getattr(sys.modules.get("jax._src.literals"), "LiteralArray", jax.Array)  # constants of jax 0.7


def _import(module: str, user: str, install: str) -> Any:
    """Import an optional package, or say what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{user} needs {package} ({error}); install it: {install}") from error


# -- platforms and devices -----------------------------------------------------------------------------


def _platform_name(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


def _default_platform() -> str:
    """The platform that a computation traced now is expected to run on."""
    device = jax.config.jax_default_device or jax.default_backend()
    return _platform_name(device if isinstance(device, str) else device.platform)


def _local_devices(platform: str) -> list:
    """The devices of this process, none where JAX has no such platform."""
    with contextlib.suppress(RuntimeError):
        return jax.local_devices(backend=platform)
    return []


# -- calling primitives, tracing, lowering -------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _jitted_primitive(primitive: Any, **params: Any) -> Callable:
    def bind(*args: Any) -> Any:
        return primitive.bind(*args, **params)

    bind.__name__ = bind.__qualname__ = primitive.name
    bind._apply_primitive = True  # type: ignore[attr-defined]  # or jax_debug_nans runs it again without jit, for ever
    return jax.jit(bind)


def _apply_primitive(primitive: Any, *args: Any, **params: Any) -> Any:
    """Compile and run one primitive: what JAX asks for when a primitive is bound to arrays, outside of `jax.jit`."""
    with jax.disable_jit(False):  # or this would bind it to arrays again
        return _jitted_primitive(primitive, **params)(*args)


def _eval_jaxpr(closed: Any, args: Sequence) -> list:
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def _lower(function: Callable, ctx: Any, operands: Sequence) -> Any:
    """Lower what a function of the operands, which returns a sequence, does."""
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


@functools.cache
def _side_effect() -> frozenset:
    """The effect of `jax.ffi.ffi_call(has_side_effect=True)`, which JAX knows how to keep and to order."""
    call = jax.ffi.ffi_call("xla_kernels.effect", Spec((), np.float32), has_side_effect=True)
    return frozenset(jax.make_jaxpr(call)().effects)


def _need_devices(primitive: Any) -> None:
    """Have JAX tell the lowering of `primitive` its devices, which `custom_partitioning` inside of it needs."""
    with contextlib.suppress(ImportError, AttributeError):  # private: without it nothing is split over a mesh
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)


# -- meshes, and the types of values on them -----------------------------------------------------------


def _mesh_of(avals: Sequence) -> Any:
    """The mesh that is part of a type (of an explicit mesh also where none is current), or the current one."""
    for aval in avals:
        if not aval.sharding.mesh.empty:
            return aval.sharding.mesh
    return jax.sharding.get_abstract_mesh()


def _varying_axes(aval: Any) -> frozenset:
    """The manual mesh axes over which a value varies inside `shard_map`."""
    axis_type = getattr(aval, "manual_axis_type", None)  # jax >= 0.11
    if axis_type is not None:
        return axis_type.varying
    return getattr(aval, "vma", None) or frozenset()


def _all_varying_axes(avals: Iterable) -> frozenset:
    return frozenset().union(*map(_varying_axes, avals))


def _varying(axes: frozenset) -> dict[str, Any]:
    """What tells an abstract value, or a spec (Pallas makes arrays of it), that it varies over these axes."""
    if not axes:
        return {}
    if hasattr(jax.sharding, "ManualAxisType"):  # jax >= 0.11
        return {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    return {"vma": axes}


def _out_aval(shape: tuple, dtype: Any, ins: Sequence, axes: Sequence = ()) -> Any:
    """The abstract value of a result of `ins`, on their mesh: its first dimensions are split over `axes`."""
    mesh = _mesh_of(ins)
    if mesh.empty:
        return jax.core.ShapedArray(shape, dtype)
    not_split = [None] * (len(shape) - len(axes))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes, *not_split))
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, **_varying(_all_varying_axes(ins)))


def _make_varying(args: Sequence) -> list:
    """Inputs cast to vary over the same axes: the cast's transpose sums the cotangents of a replicated input."""
    axes = _all_varying_axes(map(jax.typeof, args))
    return [_vary_over(axes, x) for x in args]


def _vary_over(axes: frozenset, x: Any) -> Any:
    missing = tuple(axes - _varying_axes(jax.typeof(x)))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # jax 0.7


def _sharded_like(x: Any, aval: Any) -> Any:
    """`x` with the sharding of `aval`, where that is part of the type: on meshes of explicit axes."""
    axis_types = aval.sharding.mesh.axis_types or ()
    if jax.sharding.AxisType.Explicit not in axis_types:
        return x
    return jax.sharding.reshard(x, aval.sharding)


def _on_mesh(ctx: Any) -> Any:
    """`ctx` with the mesh over which XLA may split what is lowered; None where it may not.

    That is in shard_map and pmap, on one device, and in an exported program, which cannot keep the Python function
    that `custom_partitioning` calls.
    """
    module = ctx.module_context
    context = module.axis_context
    if not isinstance(context, mlir.ShardingContext) or module.lowering_parameters.for_export:
        return None
    mesh = context.abstract_mesh or _mesh_of(ctx.avals_in)  # JAX looks for it in concrete shardings only
    if context.num_devices == 1 or mesh.size != context.num_devices or not context.device_assignment:
        return None
    with_mesh = dataclasses.replace(context, abstract_mesh=_halved_axes(mesh))
    return ctx.replace(module_context=module.replace(axis_context=with_mesh))


def _halved_axes(mesh: Any) -> Any:
    """The mesh with axes of size 2, as far as they divide.

    XLA may split a dimension over a part of an axis, as where a vmap of a vmap takes a sharded array in another shape.
    JAX has no name for the part, and raises: "dim_size=2 is not divisible by axis_size=4".
    """
    sizes: list[int] = []
    for size in mesh.axis_sizes:
        while size % 2 == 0:
            sizes.append(2)
            size //= 2
        sizes.append(size)
    names = tuple(map(str, range(len(sizes))))
    return jax.sharding.AbstractMesh(tuple(sizes), names)


def _auto_devices(ctx: Any) -> int:
    """Over how many devices XLA splits what is lowered: in `shard_map`, those of the axes that are not manual."""
    context = ctx.module_context.axis_context
    if not isinstance(context, mlir.SPMDAxisContext):
        return getattr(context, "num_devices", 1)
    mesh = _mesh_of([*ctx.avals_in, *ctx.avals_out])
    return math.prod(size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)


# -- dtypes of 64 bits ---------------------------------------------------------------------------------


def _zeros(like: Any) -> Any:
    """`jnp.zeros_like`, but without truncation to 32 bits where x64 is disabled."""
    return ad.instantiate_zeros(ad.Zero(jax.core.ShapedArray(like.shape, like.dtype)))


def _allowed_dtype(dtype: Any, ins: Sequence) -> np.dtype:
    """The dtype of a declared output: of 64 bits where x64 is enabled, or these are allowed, or an input has them."""
    setting = getattr(jax.config, "jax_explicit_x64_dtypes", None)  # jax >= 0.8
    if getattr(setting, "name", "") == "ALLOW" or any(x.dtype == dtype for x in ins):
        return np.dtype(dtype)
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


# ======================================================================================================
# 2. The C structs of jaxlib/include/xla/ffi/api/c_api.h that a handler reads and writes.
# XLA adds fields at the end of a struct only, so these, which are those of jaxlib 0.7.2, fit every later one; a test
# compares them with the installed header.  A new major version may change anything, so it is refused.

_API_MAJOR = 0

_PTR = ctypes.c_void_p
_I64 = ctypes.c_int64
_I32 = ctypes.c_int32
_SIZE = ctypes.c_size_t
_STAGE_EXECUTE = 3
_EXTENSION_METADATA = 1
_ERROR_INVALID_ARGUMENT = 3
_ERROR_INTERNAL = 13
_COMMAND_BUFFER_COMPATIBLE = 1


def _struct(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def _sized_struct(name: str, **fields: Any) -> Any:
    """A struct that begins with its own size and a list of extensions, as nearly all do."""
    return _struct(name, struct_size=_SIZE, extension_start=_PTR, **fields)


XLA_FFI_InternalExtension = _struct("XLA_FFI_InternalExtension", struct_size=_SIZE, type=_I32, next=_PTR)
XLA_FFI_Api_Version = _sized_struct("XLA_FFI_Api_Version", major_version=_I32, minor_version=_I32)
XLA_FFI_Metadata = _struct("XLA_FFI_Metadata", struct_size=_SIZE, api_version=XLA_FFI_Api_Version, traits=_I32)
XLA_FFI_Metadata_Extension = _struct(
    "XLA_FFI_Metadata_Extension", extension_base=XLA_FFI_InternalExtension, metadata=_PTR
)
XLA_FFI_Buffer = _sized_struct("XLA_FFI_Buffer", dtype=_I32, data=_PTR, rank=_I64, dims=_PTR)
XLA_FFI_Array = _struct("XLA_FFI_Array", dtype=_I32, size=_SIZE, data=_PTR)
XLA_FFI_Args = _sized_struct("XLA_FFI_Args", size=_I64, types=_PTR, args=_PTR)
XLA_FFI_Rets = _sized_struct("XLA_FFI_Rets", size=_I64, types=_PTR, rets=_PTR)
XLA_FFI_Attrs = _sized_struct("XLA_FFI_Attrs", size=_I64, types=_PTR, names=_PTR, attrs=_PTR)
XLA_FFI_CallFrame = _sized_struct(
    "XLA_FFI_CallFrame", api=_PTR, ctx=_PTR, stage=_I32, args=XLA_FFI_Args, rets=XLA_FFI_Rets, attrs=XLA_FFI_Attrs
)
XLA_FFI_Error_Create_Args = _sized_struct("XLA_FFI_Error_Create_Args", message=_PTR, errc=_I32)
XLA_FFI_Error_Destroy_Args = _sized_struct("XLA_FFI_Error_Destroy_Args", error=_PTR)
XLA_FFI_ThreadPool_Schedule_Args = _sized_struct("XLA_FFI_ThreadPool_Schedule_Args", ctx=_PTR, task=_PTR, data=_PTR)
XLA_FFI_ThreadPool_NumThreads_Args = _sized_struct("XLA_FFI_ThreadPool_NumThreads_Args", ctx=_PTR, num_threads=_PTR)
XLA_FFI_Stream_Get_Args = _sized_struct("XLA_FFI_Stream_Get_Args", ctx=_PTR, stream=_PTR)
XLA_FFI_DeviceOrdinal_Get_Args = _sized_struct("XLA_FFI_DeviceOrdinal_Get_Args", ctx=_PTR, device_ordinal=_I32)
_API_FUNCTIONS = (
    "Error_Create Error_GetDetails Error_Destroy Handler_Register Stream_Get Type_Register InvokeContext_Get "
    "State_Set State_Get DeviceMemory_Allocate DeviceMemory_Free ThreadPool_Schedule ThreadPool_NumThreads "
    "Future_Create Future_SetAvailable Future_SetError RunId_Get DeviceOrdinal_Get"
).split()
XLA_FFI_Api = _sized_struct(
    "XLA_FFI_Api",
    api_version=XLA_FFI_Api_Version,
    internal_api=_PTR,
    **{f"XLA_FFI_{name}": _PTR for name in _API_FUNCTIONS},
)

# A new dtype is added in four places: its number in c_api.h here; its name in what backends take (_NUMBA_DTYPES,
# _CUDA_DTYPES, _WARP_DTYPES); its type there (`_array_types`, which looks for that name in Numba;
# `_NumbaCuda.callback`, by `typestr`; `_warp_scalars`); the docstrings and the README, which say what is refused.
_XLA_FFI_DATA_TYPES = {
    "bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9,
    "float16": 10, "float32": 11, "float64": 12, "complex64": 15, "bfloat16": 16, "complex128": 18,
}  # fmt: skip


def _known_api_version() -> tuple[int, int]:
    """The version to report in the handshake: jaxlib's own, as it accepts no newer one."""
    major, minor = _ffi_api_version()
    if major != _API_MAJOR:
        raise NotImplementedError(
            f"jaxlib has version {major}.{minor} of XLA's FFI, and xla_kernels {__version__} knows {_API_MAJOR}.x: "
            "install an older jaxlib, or a newer xla_kernels"
        )
    return major, minor


@functools.cache
def _ffi_api_version() -> tuple[int, int]:
    """The version of jaxlib's interface, or 0.1 without its header."""
    path = os.path.join(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        with open(path, encoding="utf-8") as header:
            text = header.read()
    except OSError:
        text = ""
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return int(numbers.get("MAJOR", 0)), int(numbers.get("MINOR", 1))


# ======================================================================================================
# 3. Content digests: equal kernels get equal names; kernels that differ never share one.
#
# One walk over all that the code can reach, written to one hash.  An object counts
# 1. by its name and the package's version, if one that does not change while a process runs holds this very object;
# 2. by its content, if its type is in `_ATOMS`, `_VALUES` or `_NODES`, or `_numba_content` knows it;
# 3. else by its identity: kept alive and never taken for another, but not equal in other processes.
#
# Invariants:
# - What counts by content leaves nothing out that a compiler can see.
# - What may contain itself gets a number when it is met first, and counts by that from then on.
# - Of a module that may change counts what the code reads of it, as in `module.part.value`.  Code that does anything
#   else with it may read all of it: then it counts by identity, and so does each value that it holds; arrays and other
#   modules there count by their content as well.
# - An overload counts by identity where its name stands in the code, and so does a function that has one: another
#   function of this name may have other overloads.


@functools.cache
def _is_stable_module(name: str) -> bool:
    package = name.partition(".")[0]
    if package not in sys.stdlib_module_names:
        return package in "jax jaxlib llvmlite ml_dtypes numba numba_cuda_mlir numpy scipy warp".split()
    file = getattr(sys.modules.get(package), "__file__", None)  # a user's code.py is not the library's
    return file is None or os.path.abspath(file).startswith(os.path.dirname(os.path.abspath(os.__file__)))


def _is_stable_function(function: types.FunctionType) -> bool:
    """Whether a stable module defines a function, whatever that says of itself."""
    name = str(function.__globals__.get("__name__"))
    return _is_stable_module(name) and vars(sys.modules.get(name, types)) is function.__globals__


def _home(obj: Any) -> tuple[str, str] | None:
    """The stable module that holds this very object, and its name there."""
    own_module = getattr(obj, "__module__", None)
    if own_module is None and isinstance(obj, types.BuiltinFunctionType):
        own_module = type(obj.__self__).__module__
    for module in (own_module, "scipy.special"):  # whose ufuncs name no module
        if type(module) is str and _is_stable_module(module):
            for name, value in list(vars(sys.modules.get(module, types)).items()):
                if value is obj:
                    return module, name
    return None


def _version(module: str) -> Any:
    return getattr(sys.modules.get(module.partition(".")[0]), "__version__", None)


def _identity(obj: Any) -> tuple:
    # Two containers may have a process of the same number, and a forked process has its parent's token.  No lock: code
    # that holds another one comes here.
    number, _ = _OBJECTS.setdefault(id(obj), (next(_NUMBERS), obj))
    return "identity", _TOKEN, os.getpid(), number


def _never(array: np.ndarray) -> bool:
    return False


def _always(array: np.ndarray) -> bool:
    return True


def _digest(*objects: Any, in_place: Callable[[np.ndarray], bool] = _never) -> str:
    """A hash of `objects`, of 96 bits; see `_Digester`."""
    return _Digester(in_place).walk(*objects).hash.hexdigest()


class _Digester:
    """Writes objects to a hash, and notes what else is asked of them.

    `in_place` says of an array whether code reads it where it is: then its address counts, as its content may change.
    """

    def __init__(self, in_place: Callable[[np.ndarray], bool] = _never) -> None:
        self.hash = hashlib.blake2b(digest_size=12)
        self.in_place = in_place
        self.seen: dict[int, tuple[bytes, Any]] = {}  # id -> (number, the object, kept alive)
        self.names = {""}  # that stand in the code; the empty one is for what code calls without naming it
        self.calls_three = False  # whether code calls something with three arguments, as in np.dot(x, y, out)
        self.by_identity = False  # whether anything counts by it: then the hash is of this process only
        self.overloads = _users_overloads()

    def walk(self, *objects: Any) -> _Digester:
        """Write objects, and users' overloads of what is named in their code."""
        self.add(*objects)
        for name in sorted(self.names & self.overloads.keys()):
            self.names.add("overload")
            self.add(name, *map(self.identity, self.overloads[name]))
        return self

    def add(self, *objects: Any) -> _Digester:
        for obj in objects:
            kind: Any = type(obj)
            if kind in _ATOMS:
                self._write(kind.__name__, _ATOMS[kind](obj))
                if kind is str and obj.isidentifier():
                    self.names.add(obj)
            elif id(obj) in self.seen:
                self._write("seen", self.seen[id(obj)][0])
            else:
                self._add_parts(obj, _family(kind))
        return self

    def _add_parts(self, obj: Any, family: Any) -> None:
        parts = _VALUES[family](self, obj) if family in _VALUES else None
        if parts is None:
            self.seen[id(obj)] = b"%d" % len(self.seen), obj
            parts = self._node(obj, family)
        self._write(getattr(family, "__name__", "object"), b"%d" % len(parts))
        self.add(*parts)

    def _write(self, kind: str, data: bytes) -> None:
        self.hash.update(b"%s %d:%s" % (kind.encode(), len(data), data))

    def identity(self, obj: Any) -> tuple:
        self.by_identity = True
        return _identity(obj)

    def _node(self, obj: Any, family: Any) -> tuple:
        kind = type(obj)
        self.names.add(kind.__name__)
        if isinstance(obj, type):
            self.names.update(base.__name__ for base in obj.__mro__)
        if family is types.ModuleType:
            return self._module(obj)
        if home := _home(obj):
            self.names.add(getattr(obj, "__name__", home[1]))
            return *home, _version(home[0])
        if family in _NODES:
            return _NODES[family](self, obj)
        content = _numba_content(obj)
        if content is None:  # a guvectorize has a dispatcher, and with that reads globals that may change
            return *self.identity(obj), getattr(obj, "_dispatcher", None)
        return kind.__module__, kind.__name__, *content

    def _array(self, obj: np.ndarray) -> tuple:
        subclass = () if type(obj) is np.ndarray else (type(obj),)
        layout = *subclass, obj.dtype, obj.shape, obj.strides, obj.flags.writeable, obj.flags.aligned
        if self.in_place(obj) or obj.dtype.hasobject:
            return *layout, obj.ctypes.data, *self.identity(obj)
        return *layout, obj.tobytes()

    def _scalar(self, obj: np.generic) -> tuple | None:
        if type(obj) is not obj.dtype.type or obj.dtype.hasobject:
            return None
        return obj.dtype, obj.tobytes()

    def _code(self, obj: types.CodeType) -> tuple:
        facts = _code_facts(obj)
        self.names |= facts.names
        self.calls_three |= facts.calls_three
        return (facts.digest,)

    def _function(self, obj: types.FunctionType) -> tuple:
        """Its code, its defaults, and each name that the code reads with its value, where it has one."""
        self.names.add(obj.__name__)
        facts = _code_facts(obj.__code__)
        parts: list = [obj.__code__, obj.__defaults__, tuple((obj.__kwdefaults__ or {}).items())]
        namespace = collections.ChainMap(obj.__globals__, vars(builtins))  # as Numba looks names up
        parts += _values_at(facts.globals, namespace)
        parts += _values_at(facts.cells, _cell_contents(obj))
        if obj.__name__ in self.overloads:
            parts += self.identity(obj)
        return tuple(parts)

    def _module(self, obj: types.ModuleType) -> tuple:
        if not _is_open(obj):
            return obj.__name__, _version(obj.__name__)
        parts = list(self.identity(obj))
        for name, x in sorted(vars(obj).items()):
            parts += name, self.identity(x)
            if isinstance(x, (np.ndarray, tuple, types.ModuleType)):  # it may change and stay what it is
                parts.append(x)
        return tuple(parts)

    def _foreign_function(self, obj: Any) -> tuple:
        """Of ctypes, whose functions have types that can be set."""
        return *self.identity(obj), obj.restype, *(obj.argtypes or ())


def _is_open(obj: Any) -> bool:
    """Whether this is a module that may change."""
    if not isinstance(obj, types.ModuleType):
        return False
    name = str(vars(obj).get("__name__"))
    return sys.modules.get(name) is not obj or not _is_stable_module(name)


def _cell_contents(function: types.FunctionType) -> dict[str, Any]:
    """The variables of the functions around this one, as far as they are bound."""
    contents = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            contents[name] = cell.cell_contents
    return contents


def _values_at(paths: Iterable[tuple[str, ...]], namespace: Mapping[str, Any]) -> list[tuple]:
    """What code reads, each path with its value, of names that have one."""
    values = []
    for path in paths:
        if path[0] in namespace:
            values.append((path, *_read(namespace[path[0]], path[1:])))
    return values


def _read(obj: Any, attributes: tuple[str, ...]) -> tuple:
    """What `obj.a.b` is, as far as this leads through modules that may change; empty if it cannot be read."""
    for name in attributes:
        if not _is_open(obj):
            break
        try:
            obj = getattr(obj, name)
        except Exception:
            return ()
    return (obj,)


# Each gives the bytes that a value counts by.
_ATOMS: dict[type, Callable[[Any], bytes]] = {
    **dict.fromkeys((type(None), type(...), bool, str), lambda x: ascii(x).encode()),
    int: lambda x: b"%x" % x,
    float: lambda x: np.float64(x).tobytes(),  # tells NaNs apart
    complex: lambda x: np.complex128(x).tobytes(),
    bytes: bytes,
}
# Each gives the parts that an object counts by, or None.  Values hold nothing that may lead back to them, and are
# written anew wherever they stand: whether Python makes one object or two of equal constants must not count.
_VALUES: dict[Any, Callable[[_Digester, Any], tuple | None]] = {
    tuple: lambda self, x: x,
    NamedTuple: lambda self, x: (type(x), *x),
    frozenset: lambda self, x: tuple(sorted(x, key=repr)),
    range: lambda self, x: (x.start, x.stop, x.step),
    slice: lambda self, x: (x.start, x.stop, x.step),
    types.CodeType: _Digester._code,
    np.ndarray: _Digester._array,
    np.generic: _Digester._scalar,
    np.dtype: lambda self, x: (x.type, repr(x)),
}
_NODES: dict[Any, Callable[[_Digester, Any], tuple]] = {
    types.FunctionType: _Digester._function,
    types.MethodType: lambda self, x: (x.__func__, x.__self__),
    ctypes._CFuncPtr: _Digester._foreign_function,  # type: ignore[attr-defined]
}


@functools.lru_cache(maxsize=1024)
def _family(kind: type) -> Any:
    """The row of the tables for a type: its own, or that of a base whose subclasses add nothing that Numba sees."""
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return NamedTuple
    if kind in _VALUES or kind in _NODES:
        return kind
    bases = (np.ndarray, np.generic, np.dtype, types.ModuleType, ctypes._CFuncPtr)  # type: ignore[attr-defined]
    return next((base for base in bases if issubclass(kind, base)), None)


# Settings that differ between machines, or only say what is printed.
_LOCAL = "^_|NUM_THREADS|CACHE|PATH|_DIR$|BINARY|QUIET|VERBOSE|LOG_LEVEL|PRINT|VERSION"
_is_local = functools.cache(re.compile(_LOCAL, re.IGNORECASE).search)


def _settings(config: types.ModuleType) -> str:
    settings = {}
    for name, value in vars(config).items():
        if not (callable(value) or inspect.ismodule(value) or _is_local(name)):
            settings[name] = value
    return repr(sorted(settings.items()))


class _CodeFacts(NamedTuple):
    """Of code, with that nested in it."""

    digest: bytes
    names: frozenset[str]  # all that stand in it
    calls_three: bool
    globals: list[tuple[str, ...]]  # what it reads, as ("module", "part", "value")
    cells: list[tuple[str, ...]]  # what it reads of the functions around it


@functools.lru_cache(maxsize=1024)
def _code_facts(code: types.CodeType) -> _CodeFacts:
    digester = _Digester().add(
        (code.co_name, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        (code.co_code, code.co_exceptiontable, code.co_consts),
    )
    instructions = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    calls_three = digester.calls_three or any(map(_is_call_of_three, instructions))
    global_reads = _paths(instructions, ("LOAD_GLOBAL", "LOAD_NAME"))
    cell_reads = _paths(instructions, ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE"))
    for nested in code.co_consts:
        if isinstance(nested, types.CodeType):
            global_reads.update(_code_facts(nested).globals)
            cell_reads.update(_code_facts(nested).cells)
    of_functions_around = sorted(path for path in cell_reads if path[0] in code.co_freevars)
    names = frozenset(digester.names)
    return _CodeFacts(digester.hash.digest(), names, calls_three, sorted(global_reads), of_functions_around)


def _is_call_of_three(instruction: dis.Instruction) -> bool:
    """Whether this is a call of three arguments or more, or of those in a tuple."""
    if not instruction.opname.startswith("CALL"):
        return False
    return (instruction.arg or 0) > 2 or instruction.opname.endswith("EX")


def _paths(instructions: Sequence[dis.Instruction], roots: Sequence[str]) -> set[tuple[str, ...]]:
    """What code reads: a name that one of these instructions loads, with the attributes taken of it at once."""
    found: set[tuple[str, ...]] = set()
    path: tuple[str, ...] = ()
    for instruction in instructions:
        if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = *path, instruction.argval
            continue
        found.add(path)
        path = (instruction.argval,) if instruction.opname in roots else ()
    return found - {()}


# ======================================================================================================
# 4. Targets: what is registered with XLA, under which name.
# XLA keeps raw pointers to handlers, so whatever is registered stays in memory until the process ends.
# Knows names, platforms and addresses; does not know how a name came about.

# The version of what `_STORE` holds (digests too), of the attribute `launch` and of the buffers that a handler
# expects: raise it when one of them changes.  Names of targets hold it, so that the program of one version never calls
# the handler of another.
_LAYOUT = 4

# What copies of this file of one layout share, also one that is loaded again.
_STORE_NAME = f"_xla_kernels_store_{_LAYOUT}"
_STORE: Any = sys.modules.setdefault(_STORE_NAME, types.ModuleType(_STORE_NAME))
_LOCK: threading.RLock = vars(_STORE).setdefault("lock", threading.RLock())
_TARGETS: dict[tuple[str, str], Any] = vars(_STORE).setdefault("targets", {})  # (name, platform) -> _Compiled, or None
_OBJECTS: dict[int, tuple[int, Any]] = vars(_STORE).setdefault("objects", {})  # known by identity, kept alive
_NUMBERS: Iterator[int] = vars(_STORE).setdefault("numbers", itertools.count())  # for those
_TOKEN: str = vars(_STORE).setdefault("token", os.urandom(8).hex())  # of this process
_HELPERS: dict[int, Any] = vars(_STORE).setdefault("helpers", {})  # id -> _Helper


def _shared_locks() -> dict[str, Any]:
    """The locks that all copies of this file share, whatever their layout."""
    return vars(sys.modules.setdefault("_xla_kernels_locks", types.ModuleType("_xla_kernels_locks")))


def _native_lock(name: str) -> int:
    """The address of such a lock for machine code: CPython's, which can be taken without the GIL."""
    locks = _shared_locks()
    allocate = ctypes.pythonapi.PyThread_allocate_lock
    allocate.restype = _PTR
    return locks.get(name) or locks.setdefault(name, allocate())  # atomic; a lock that came too late is lost


class _Compiled(NamedTuple):
    """A handler in memory: its address, what must stay alive with it, and what its wrapper should know."""

    address: int
    alive: Any
    may_write: tuple[int, ...] = ()  # the inputs that the kernel may write to


@dataclasses.dataclass(frozen=True, repr=False)
class _Target:
    """What a call runs: a registered name, and the integers that this call's shapes and options give it.

    Most handlers run a single slice and batches alike.  A GPU kernel that runs a whole batch in one launch is compiled
    on its own, as the target `for_batches`: the first `vmap` of a call puts that in the place of this one.
    """

    # It must not refer to the wrapper: JAX keeps a target as long as the wrapper lives, so neither would ever be freed.
    name: str
    launch: tuple[int, ...] = ()  # the grid, with a 0 if nothing is to run, block and what else the handler reads
    may_write: tuple[int, ...] = ()  # the inputs that the kernel may write to
    for_batches: _Target | None = None
    # by platform; where the machine has no GPU to compile for, `check` does what it can
    compilers: Mapping[str, Callable[[], _Compiled]] = dataclasses.field(compare=False, default_factory=dict)
    check: Callable[[], None] = dataclasses.field(compare=False, default=lambda: None)
    # for errors: whose it is, and where it runs
    title: str = dataclasses.field(compare=False, default="")
    where: str = dataclasses.field(compare=False, default="")

    def __repr__(self) -> str:
        return f"{self.name}{self.launch or ''}"

    def under_vmaps(self, depth: int) -> _Target:
        """What runs a call under so many vmaps."""
        if depth and self.for_batches:
            return self.for_batches
        return self

    def register(self, platform: str) -> Any:
        """Compile and register the handler for a platform, unless one of this name is registered there."""
        if platform not in self.compilers:
            raise NotImplementedError(
                f"{self.title} {self.where}; this call is compiled for {platform!r}: move it by jax.device_put"
            )
        if platform == "cuda" and not _cuda_ordinals():  # it will be registered where the program runs
            return self.check()
        with _LOCK:
            compiled = _TARGETS.get((self.name, platform))
            if compiled is None:
                compiled = self.compilers[platform]()
                handler = jax.ffi.pycapsule(ctypes.c_void_p(compiled.address))
                jax.ffi.register_ffi_target(self.name, handler, platform.replace("cuda", "CUDA"))
                _TARGETS[self.name, platform] = compiled
            return compiled

    def register_where_traced(self) -> None:
        """Register the handler for this machine, for errors where it is traced; or name what others will register."""
        platform = _default_platform().replace("gpu", "cuda")
        if platform in self.compilers:
            self.register(platform)
            return
        with _LOCK:
            for elsewhere in self.compilers:
                _TARGETS.setdefault((self.name, elsewhere), None)


def export_checks() -> Sequence:
    """A `jax.export.DisabledSafetyCheck` for each kernel, to export programs that call kernels.

    The sequence has those that are registered when it is read, which JAX does after lowering: it need not know a kernel
    before.  The names derive from what a kernel contains, so a process that loads an exported program finds them again
    once it has traced the same kernels (calling them, or `jax.eval_shape` of them, is enough).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax import export
      >>> double = numba_kernel(lambda x: 2 * x, outs=lambda x: x)
      >>> spec = jax.ShapeDtypeStruct((3,), jnp.float32)
      >>> data = export.export(jax.jit(double), disabled_checks=export_checks())(spec).serialize()
      >>> export.deserialize(data).call(jnp.arange(3.0)).tolist()
      [0.0, 2.0, 4.0]
    """
    return _ExportChecks()


class _ExportChecks(Sequence):
    """See `export_checks`."""

    def _read(self) -> list:
        from jax import export

        with _LOCK:
            names = {name for name, _ in _TARGETS}
        return list(map(export.DisabledSafetyCheck.custom_call, sorted(names)))

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __iter__(self) -> Iterator:
        return iter(self._read())

    def __add__(self, others: Iterable) -> list:
        return [*self, *others]


# ======================================================================================================
# 5. Specs and inputs: what comes in and what goes out, checked where the user's call is on the stack.
# A spec is the shape and dtype of an array.  Knows shapes, dtypes, arrays of other libraries and static values; does
# not know kernels.


def _is_spec(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)  # the class np.float32 has both


def _show(spec: Any) -> str:
    """A spec as people write it: float32[3,4]."""
    if spec is None:
        return "None"
    sizes = ",".join(map(str, spec.shape))
    return f"{np.dtype(spec.dtype).name}[{sizes}]"


def _check_dtype(dtype: Any, what: str) -> None:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{what} has the dtype {dtype}, which has no memory layout: pass jax.random.key_data(key)")
    if issubclass(np.dtype(dtype).type, (np.flexible, np.object_, np.datetime64, np.timedelta64)):
        raise TypeError(f"{what} has the dtype {dtype}: pass numbers, each field of a structured array on its own")


def _flat_specs(specs: Any, what: str, ins: Sequence[Spec] | None = None) -> tuple[list[Spec], Any]:
    """The leaves of a pytree of declared specs as ShapeDtypeStructs, and its structure.

    With `ins` they get the dtypes that JAX allows beside these inputs.
    """
    leaves, tree = jax.tree_util.tree_flatten(specs, is_leaf=_is_spec)
    declared = []
    for i, leaf in enumerate(leaves):
        name = f"{what}[{i}]" if len(leaves) > 1 else what
        declared.append(_declared_spec(leaf, name, ins))
    return declared, tree


def _declared_spec(x: Any, what: str, ins: Sequence[Spec] | None) -> Spec:
    if not _is_spec(x):
        raise TypeError(
            f"{what} must be specs with both .shape and .dtype, such as jax.ShapeDtypeStruct(shape, dtype), or a "
            f"callable of the inputs that returns them; got {x!r} of type {type(x).__name__}"
        )
    shape = _checked_shape(x.shape, what)
    _check_dtype(x.dtype, what)
    dtype = np.dtype(x.dtype)
    if ins is None:
        return Spec(shape, dtype)
    allowed = _allowed_dtype(dtype, ins)
    if allowed != dtype:
        text = f"{what} asks for {dtype}, which JAX truncates to {allowed} unless jax_enable_x64 is set"
        warnings.warn(text, stacklevel=2)
    return Spec(shape, allowed)


def _checked_shape(shape: Sequence, what: str) -> tuple:
    """A shape with Python's ints; dimensions of symbolic shapes stay what they are."""
    if not isinstance(shape, Iterable) or any(isinstance(size, (float, str)) for size in shape):
        raise TypeError(f"{what} must have a tuple of ints as its shape; got {shape!r}")
    sizes = tuple(operator.index(size) if isinstance(size, (int, np.integer)) else size for size in shape)
    for size in sizes:
        if isinstance(size, int) and size < 0:
            raise ValueError(f"{what} has a negative dimension in its shape {sizes}")
    return sizes


def _input_spec(x: Any, i: int) -> Spec:
    dtype = x.dtype if _is_spec(x) else jax.dtypes.result_type(x)
    _check_dtype(dtype, f"input {i}")
    if not isinstance(x, jax.Array):  # or a tracer, which may be of 64 bits also where x64 is disabled
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return Spec(np.shape(x), dtype)


def _input_specs(args: Sequence) -> list[Spec]:
    return [_input_spec(x, i) for i, x in enumerate(args)]


_INPUT_CLASSES = (jax.Array, _LiteralArray, np.ndarray, np.generic, int, float, complex)
_INPUT_TYPES: set[type] = {np.ndarray, bool, int, float, complex}  # exact types, which are quick to find; it grows


def _as_inputs(args: Sequence, name: str) -> tuple[Sequence, bool]:
    """The inputs as JAX can take them, and whether one of them is being traced."""
    is_traced = False
    inputs = list(args)
    for i, x in enumerate(args):
        if type(x) in _INPUT_TYPES:
            continue
        if isinstance(x, jax.core.Tracer):
            is_traced = True
        elif isinstance(x, _INPUT_CLASSES):
            _INPUT_TYPES.add(type(x))
        else:
            inputs[i] = _from_foreign(x, i, name)
    return inputs, is_traced


def _from_foreign(x: Any, i: int, name: str) -> Any:
    """An array of another library as JAX's, without a copy where JAX can share its memory."""
    if hasattr(x, "__jax_array__"):
        return x.__jax_array__()
    if hasattr(x, "__dlpack__"):
        return jax.dlpack.from_dlpack(x)
    hint = "pass its leaves one by one" if isinstance(x, (list, tuple, dict)) else "convert it with jnp.asarray"
    raise TypeError(f"{name}: input {i} must be an array or a number; got {type(x).__name__} {x!r:.80}; {hint}")


def _call_option(function: Callable, what: str, args: Sequence, named: Mapping[str, Any]) -> Any:
    """Call an option that is a function of the inputs; the error says so if it takes another number of them."""
    try:
        return function(*args, **named)
    except TypeError:
        with contextlib.suppress(ValueError):  # what has no signature
            _check_takes(inspect.signature(function), what, args, named)
        raise


def _check_takes(signature: inspect.Signature, what: str, args: Sequence, named: Mapping[str, Any]) -> None:
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        shown = ", ".join(_show(x) if _is_spec(x) else repr(x) for x in args)
        raise TypeError(
            f"{what} takes {signature}, but this call gives it ({shown}): {error}; give it one parameter for each input"
        ) from None


# ======================================================================================================
# 6. Partitioning under jax.jit: how XLA may split a call over a mesh, for wrappers and ops alike.
#
# A sharding rule names the dimensions of all operands and outputs, as in "b i, i j -> b j"; those of one name are split
# alike.  A name that every output and some operand has is one over which the kernel works independently, such as b:
# each device then runs the kernel on its shard.  Any other dimension is gathered first, so that reductions stay right.
# A kernel without a rule gets names that occur once, and each `vmap` adds one name in front: so a batch is split.
# Which dimensions XLA splits, only its partitioner knows: that asks `custom_partitioning` for the shardings of a call,
# and then for what a device runs, which is traced with the shapes of its shard.
#
# Knows a mesh and the names of dimensions; kernels, and the vmaps around them, it takes as functions.


@dataclasses.dataclass(frozen=True)
class _ShardingRule:
    """The names of the dimensions of every operand and output.  Those that this file makes up begin with `__`."""

    owner: str  # who was given the rule, for errors
    text: str
    ins: tuple[tuple[str, ...], ...]
    outs: tuple[tuple[str, ...], ...]
    depth: int = 0  # the number of vmaps

    @classmethod
    def parse(cls, owner: str, text: str) -> _ShardingRule:
        left, arrow, right = str(text).partition("->")
        ins = _parse_names(left) if left.strip() else ()
        outs = _parse_names(right)
        if not arrow or not all(map(_are_names, ins + outs)):
            raise ValueError(f"{owner}: a sharding rule names each array's dimensions, 'b i, i j -> b j'; got {text!r}")
        return cls(owner, text, ins, outs)

    @classmethod
    def whole(cls, ins: Sequence, outs: Sequence) -> _ShardingRule:
        """The rule of a kernel that was given none."""
        return cls("", "", _unique_names("in", ins), _unique_names("out", outs))

    def check(self, ins: Sequence[Spec], outs: Sequence[Spec]) -> None:
        where = f"{self.owner}: the sharding rule {self.text!r}"
        ranks = [[*map(len, self.ins)], [*map(len, self.outs)]]
        ranks_of_call = [[*map(np.ndim, ins)], [*map(np.ndim, outs)]]
        if ranks != ranks_of_call:
            raise ValueError(f"{where} is for operands and outputs of ranks {ranks}, but the call has {ranks_of_call}")
        size_of: dict[str, Any] = {}
        for names, array in zip(self.ins + self.outs, [*ins, *outs], strict=True):
            for name, size in zip(names, array.shape, strict=True):
                first = size_of.setdefault(name, size)
                if first != size:
                    raise ValueError(f"{where} gives the sizes {first} and {size} one name, {name!r}; give them two")

    def batched(self, flags: Sequence[bool], shared: int = 0) -> _ShardingRule:
        """The rule under one more vmap; an operand without a flag gets `shared` dimensions of its own."""
        name = f"__vmap{self.depth}"
        ins = []
        for i, (is_batched, names) in enumerate(zip(flags, self.ins)):
            front = (name,) if is_batched else (f"{name}_{i}",) * shared
            ins.append(front + names)
        outs = tuple((name, *names) for names in self.outs)
        return dataclasses.replace(self, ins=tuple(ins), outs=outs, depth=self.depth + 1)

    def adjoint(self, wrt: Sequence[int], of: Sequence[int]) -> _ShardingRule:
        """The rule of (operands, outputs, cotangents) -> (cotangents, gradients)."""
        cotangents = tuple(self.outs[j] for j in of)
        gradients = tuple(self.ins[i] for i in wrt)
        return dataclasses.replace(self, ins=self.ins + self.outs + cotangents, outs=cotangents + gradients)

    @property
    def split(self) -> set[str]:
        """The names that may be split: what some output lacks is reduced, what no operand has is unknown to a shard."""
        return set().union(*self.ins).intersection(*self.outs)

    def partition_specs(self, mesh: Any, arrays: Sequence) -> list:
        """How each array is split, from what XLA has found so far: of the operands alone, at first.

        A name is split over the same mesh axes everywhere: those of the first array in which they divide it evenly and
        no other name has them.
        """
        undecided = self.split
        axes_of: dict[str, Any] = {}
        free = set(mesh.axis_names)
        for names, array in zip(self.ins + self.outs, arrays):
            spec = getattr(array.sharding, "spec", None) or ()
            for name, size, entry in zip(names, array.shape, spec):
                if not entry or name not in undecided:
                    continue
                axes = entry if isinstance(entry, tuple) else (entry,)
                is_even = size % math.prod(mesh.shape[axis] for axis in axes) == 0
                if is_even and free.issuperset(axes):
                    axes_of[name] = entry
                    undecided.remove(name)
                    free.difference_update(axes)
        return [jax.sharding.PartitionSpec(*map(axes_of.get, names)) for names in self.ins + self.outs]

    def out_avals(self, ins: Sequence, outs: Sequence[Spec]) -> list:
        """The abstract values of results with these specs; those that the rule does not know are last."""
        specs = self.partition_specs(_mesh_of(ins), ins)[len(self.ins) :]
        specs += [()] * (len(outs) - len(specs))
        return [_out_aval(out.shape, out.dtype, ins, spec) for out, spec in zip(outs, specs, strict=True)]

    def lower(self, ctx: Any, operands: Any, run: Callable, outs: Any, rest: Any = (), effect: bool = False) -> Any:
        """Lower `run(outs, *ins)` for XLA to split: a device runs it with the `outs` of its shard.

        The results for `rest`, scratch and hidden outputs, which nobody reads, are zeros.
        """
        closed = jax.make_jaxpr(functools.partial(run, outs))(*ctx.avals_in)
        jaxprs = list(_all_jaxprs(closed, ctx))
        if any(map(_calls_python, jaxprs)):  # custom_partitioning would not keep the Python function alive
            return _lower(functools.partial(run, outs), ctx, operands)
        partitioned = _Partitioned.of(self, closed, run, outs).function()

        def call(*ins: Any) -> list:
            return [*partitioned(*ins, *closed.consts), *map(_zeros, rest)]

        results = _lower(call, ctx, operands)
        # What custom_partitioning writes for keys of the persistent cache is an address, which can recur.
        content = {"xla_kernel": _digest(*map(str, jaxprs), *_constants(jaxprs))}
        attributes = results[0].owner.attributes
        attributes["has_side_effect"] = mlir.ir_attribute(effect)
        attributes["mhlo.frontend_attributes"] = mlir.ir_attribute(content)
        return results


@dataclasses.dataclass(frozen=True, eq=False)  # JAX takes its methods by identity
class _Partitioned:
    """`closed`, which is `run` with these `outs`, for XLA to split: a function of its operands and its constants."""

    rule: _ShardingRule  # that of the kernel, with the constants as operands that are not split
    n_operands: int
    closed: Any
    run: Callable[..., list]
    outs: Any

    @classmethod
    def of(cls, rule: _ShardingRule, closed: Any, run: Callable[..., list], outs: Any) -> _Partitioned:
        with_constants = dataclasses.replace(rule, ins=rule.ins + _unique_names("const", closed.consts))
        return cls(with_constants, len(rule.ins), closed, run, outs)

    def function(self) -> Callable:
        from jax.experimental.custom_partitioning import custom_partitioning

        names = f"{_write_names(self.rule.ins)} -> {_write_names(self.rule.outs)}"
        function = custom_partitioning(self.run_whole)
        function.def_partition(self.partition, self.infer_sharding, sharding_rule=names)
        return function

    def run_whole(self, *args: Any) -> tuple:
        operands, constants = args[: self.n_operands], args[self.n_operands :]
        return tuple(jax.core.eval_jaxpr(self.closed.jaxpr, constants, *operands))

    def run_shard(self, local_outs: list[Spec], *args: Any) -> tuple:
        """Constants that the trace of the whole has too are operands; those made of shapes are this shard's own."""
        operands, constants = args[: self.n_operands], args[self.n_operands :]
        operand_of = {id(const): arg for const, arg in zip(self.closed.consts, constants)}
        no_mesh = jax.sharding.AbstractMesh((), ())  # one device has none
        with jax.sharding.use_abstract_mesh(no_mesh):
            of_shard = jax.make_jaxpr(functools.partial(self.run, local_outs))(*operands)
            own_constants = [operand_of.get(id(const), const) for const in of_shard.consts]
            return tuple(jax.core.eval_jaxpr(of_shard.jaxpr, own_constants, *operands))

    def shardings(self, mesh: Any, args: Any, results: Any) -> tuple[tuple, tuple]:
        specs = self.rule.partition_specs(mesh, (*args, *results))
        found = tuple([jax.sharding.NamedSharding(mesh, spec) for spec in specs])
        return found[: len(args)], found[len(args) :]

    def infer_sharding(self, mesh: Any, args: Any, results: Any) -> tuple:
        _, of_results = self.shardings(mesh, args, results)
        return of_results

    def partition(self, mesh: Any, args: Any, results: Any) -> tuple:
        of_args, of_results = self.shardings(mesh, args, results)
        local_outs = []
        for sharding, out in zip(of_results, self.outs):
            local_outs.append(Spec(sharding.shard_shape(out.shape), out.dtype))
        return mesh, functools.partial(self.run_shard, local_outs), of_results, of_args


def _parse_names(side: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(array.split()) for array in side.split(","))


def _are_names(names: Sequence[str]) -> bool:
    is_unique = len(set(names)) == len(names)
    return is_unique and all(map(str.isidentifier, names))


def _write_names(arrays: Sequence[Sequence[str]]) -> str:
    """One side of a rule as `custom_partitioning` reads it, whose names begin with a letter."""
    written = []
    for names in arrays:
        written.append(" ".join(f"d{name}" for name in names))
    return ", ".join(written)


def _unique_names(kind: str, arrays: Sequence) -> tuple[tuple[str, ...], ...]:
    """A name of its own for each dimension, so that none is split."""
    names = []
    for i, x in enumerate(arrays):
        names.append(tuple(f"__{kind}{i}_{axis}" for axis in range(np.ndim(x))))
    return tuple(names)


def _all_jaxprs(jaxpr: Any, ctx: Any) -> Iterator:
    """A jaxpr with those in it, such as the body of a loop, and those of the kernels of ops that it calls."""
    yield jaxpr
    for equation in jaxpr.eqns:
        parts = jax.tree.leaves(equation.params)
        if _is_op(equation.primitive):
            parts.append(equation.primitive.kernel_jaxpr(ctx, equation))
        for part in parts:
            if hasattr(part, "eqns"):
                yield from _all_jaxprs(part, ctx)


def _calls_python(jaxpr: Any) -> bool:
    """Whether there is a callback among the equations of a jaxpr."""
    if jaxpr.effects - _side_effect():  # those of jax.debug and of io_callback; a handler with an effect is no Python
        return True
    return any("callback" in equation.params for equation in jaxpr.eqns)  # a pure_callback has no effect


def _constants(jaxprs: Sequence) -> list:
    """The arrays that jaxprs hold, which their text does not show."""
    constants = []
    for jaxpr in jaxprs:
        for constant in getattr(jaxpr, "consts", ()):
            with contextlib.suppress(TypeError):  # keys of random numbers
                constant = np.asarray(constant)
            constants.append(constant)
    return constants


# ======================================================================================================
# 7. The primitive behind every wrapper: one call of one target.
# A wrapper finds the target of a call, and binds the primitive `xla_kernel` with it; what JAX asks of the primitive
# (its outputs, its lowering, its vmap) stands first, then the wrapper.  Does not know a backend: it derives a wrapper.

# -- 7.1 The primitive: what JAX's interpreters ask ----------------------------------------------------
# An alias says that an output starts with an input.  A wrapper has those that the user gave, by name or number.  In a
# `_Call` they are by number and, once it is known what runs it, those of hidden outputs are among them.  `_BoundCall`
# and `_Signature`, which are compared, have them as pairs; in a `_Signature` the hidden ones stand apart.


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a kernel, without batch: its buffers, and what runs it, once that is found."""

    ins: list[Spec]
    outs: list[Spec]  # with scratch, and then the hidden ones
    aliases: dict[int, int]
    zeroed: tuple[int, ...] = ()  # the outputs that start from zeros
    n_scratch: int = 0
    target: Any = None

    def signature(self, label: str) -> _Signature:
        specs = [*self.ins, *self.outs]
        dtypes = tuple(np.dtype(spec.dtype) for spec in specs)
        ranks = tuple(len(spec.shape) for spec in specs)
        return _Signature(label, len(self.ins), dtypes, ranks, tuple(self.aliases.items()), self.zeroed)

    def run_by(self, target: _Target) -> _Call:
        """An input that the kernel may write to is aliased to a hidden output, which the kernel gets in its place."""
        outs = list(self.outs)
        aliases = dict(self.aliases)
        for i in target.may_write:
            if i not in aliases:
                aliases[i] = len(outs)
                outs.append(self.ins[i])
        return dataclasses.replace(self, outs=outs, aliases=aliases, target=target)


@dataclasses.dataclass(frozen=True)
class _BoundCall:
    """The parameter of the primitive: a call of a whole batch, each `vmap` having added a dimension in front."""

    target: _Target
    outs: tuple[Spec, ...]  # those that the rule names; then scratch and hidden ones, which nobody reads
    aliases: tuple[tuple[int, int], ...]
    rule: _ShardingRule
    has_side_effect: bool
    shape_options: tuple[Callable, ...]  # the user's functions of the inputs that `resolve` asks
    # (inputs, outputs) of one slice -> the call with a shard's shapes, where XLA splits the kernel's own dimensions
    resolve: Callable[[list[Spec], list[Spec]], _Call] = dataclasses.field(compare=False, repr=False)

    def bind(self, *args: Any) -> list:
        """Bind the primitive: another one, if XLA's partitioner must be told what to do with the call."""
        rule = self.rule
        if rule.ins and rule.outs and (rule.split or self.has_side_effect):
            return _split_call_p.bind(*args, call=self)
        return _call_p.bind(*args, call=self)

    @property
    def runs_nothing(self) -> bool:
        grid = self.target.launch[:3]
        batch_is_empty = any(0 in out.shape[: self.rule.depth] for out in self.outs)
        return 0 in grid or batch_is_empty


def _specs_of_slices(arrays: Sequence, depth: int) -> list[Spec]:
    """The specs of one slice, under so many vmaps."""
    return [Spec(x.shape[depth:], x.dtype) for x in arrays]


def _batches(batch: Sequence, slices: Sequence) -> tuple[Spec, ...]:
    """The specs of all slices, of a batch with these dimensions."""
    return tuple([Spec((*batch, *x.shape), x.dtype) for x in slices])


def _call_abstract_eval(*ins: Any, call: _BoundCall) -> tuple:
    avals = call.rule.out_avals(ins, call.outs)
    if call.has_side_effect:
        return avals, _side_effect()
    return avals, frozenset()


def _platforms(ctx: Any) -> Sequence[str]:
    """What a lowering rule lowers for."""
    return ctx.platforms or ctx.module_context.platforms


def _call_lowering(ctx: Any, *operands: Any, call: _BoundCall) -> Any:
    for platform in _platforms(ctx):
        call.target.register(platform)
    if ctx.primitive is _split_call_p:
        on_mesh = _on_mesh(ctx)
        if on_mesh:
            return _lower_on_shards(on_mesh, operands, call)
    if call.has_side_effect and _auto_devices(ctx) > 1:
        raise NotImplementedError(
            f"{call.target.title} has side effects, and XLA cannot tell on which devices: over several, give it an "
            "input and an output, and the program a mesh (jax.set_mesh), or call it in a jax.shard_map over all axes"
        )
    if call.runs_nothing:  # XLA before jax 0.10 refuses a call that launches nothing in a command buffer
        return _lower_to_starts(ctx, operands, call.aliases)
    return _lower_to_custom_call(ctx, operands, call)


def _lower_to_custom_call(ctx: Any, operands: Any, call: _BoundCall) -> Any:
    # An alias only lets XLA save a copy: that an output starts with an input is the handler's business.
    aliases = dict(call.aliases)
    name = call.target.name
    lower = jax.ffi.ffi_lowering(name, operand_output_aliases=aliases, has_side_effect=call.has_side_effect)
    attributes = {}
    if call.target.launch:
        attributes["launch"] = np.array(call.target.launch, np.int64)
    results = lower(ctx, *operands, **attributes)
    if "cuda" in _platforms(ctx):
        return _keep_from_updates(ctx, results)
    return results


def _keep_from_updates(ctx: Any, results: Any) -> Any:
    """Give XLA's dynamic-slice fusion no dynamic-update-slice that takes a result of a call.

    It would let the call write into the updated array, also where the call reads that array (XLA of jax 0.11.2).
    """

    def keep(*results: Any) -> list:
        return [jax.lax.optimization_barrier(result) for result in results]

    return _lower(keep, ctx.replace(avals_in=ctx.avals_out), results)


def _lower_to_starts(ctx: Any, operands: Any, aliases: Sequence[tuple[int, int]]) -> Any:
    """What the outputs of a call start from, without the call: an input, or zeros."""

    def start(*ins: Any) -> list:
        outs = [*map(_zeros, ctx.avals_out)]
        for i, j in aliases:
            outs[j] = ins[i]
        return outs

    return _lower(start, ctx, operands)


def _lower_on_shards(ctx: Any, operands: Any, call: _BoundCall) -> Any:
    """Give XLA the call on a shard: of the results that the rule knows, as nobody asks for those behind them."""
    depth = call.rule.depth
    n = len(call.rule.outs)

    def run(results: Sequence[Spec], *ins: Any) -> list:
        local = call.resolve(_specs_of_slices(ins, depth), _specs_of_slices(results, depth))
        batch = results[0].shape[:depth]
        shard = dataclasses.replace(
            call,
            target=local.target.under_vmaps(depth),
            outs=_batches(batch, local.outs),
            aliases=tuple(local.aliases.items()),
        )
        return _call_p.bind(*ins, call=shard)[:n]

    return call.rule.lower(ctx, operands, run, call.outs[:n], call.outs[n:], call.has_side_effect)


def _call_batching(args: Any, dims: Any, *, call: _BoundCall) -> Any:
    """One more leading dimension everywhere; size 1 says that an operand is the same for every slice."""
    target = call.target.under_vmaps(1)
    target.register_where_traced()
    size = next(x.shape[dim] for x, dim in zip(args, dims) if dim is not None)
    has_slices = [dim is not None for dim in dims]
    for i, _ in call.aliases:
        has_slices[i] = True  # each slice of the output starts with one of the input
    sizes = [size if has_slice else 1 for has_slice in has_slices]
    ins = map(batching.bdim_at_front, args, dims, sizes)
    outs = _batches([size], call.outs)
    batched = dataclasses.replace(call, target=target, outs=outs, rule=call.rule.batched(has_slices, 1))
    return batched.bind(*ins), [0] * len(outs)


def _call_jvp(primals: Sequence, tangents: Sequence, *, call: _BoundCall) -> tuple:
    outs = call.outs[: len(call.rule.outs)]
    if any(jax.dtypes.issubdtype(out.dtype, np.inexact) for out in outs):
        raise TypeError(f"{call.target.title} has no derivative: use jax.custom_vjp, or an XLACustomKernel's rules")
    results = call.bind(*primals)
    return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


_call_p = Primitive("xla_kernel")
_split_call_p = Primitive("xla_kernel")  # XLA's partitioner is told what to do with it
for _primitive in (_call_p, _split_call_p):
    _primitive.multiple_results = True
    _primitive.def_impl(functools.partial(_apply_primitive, _primitive))
    _primitive.def_effectful_abstract_eval(_call_abstract_eval)
    ad.primitive_jvps[_primitive] = _call_jvp
    batching.primitive_batchers[_primitive] = _call_batching
    mlir.register_lowering(_primitive, _call_lowering)
_need_devices(_split_call_p)


# -- 7.2 What a public function is given: a kernel, and options ----------------------------------------


def _python(kernel: Any) -> Any:
    """The Python function of a kernel: of what Numba jitted or vectorized, or Warp decorated; a plain one is itself."""
    dispatcher = getattr(kernel, "_dispatcher", kernel)  # where numba.vectorize keeps it
    function = getattr(dispatcher, "py_func", None)
    if function is None and hasattr(kernel, "adj"):  # Warp
        function = kernel.func
    return function or kernel


def _parameters(kernel: Any) -> tuple[str, ...]:
    """The names by which a kernel's arguments can be given, in order; none if the first have no names."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(_python(kernel)).parameters.values()
        named = itertools.takewhile(lambda parameter: parameter.kind is parameter.POSITIONAL_OR_KEYWORD, parameters)
        return tuple(parameter.name for parameter in named)
    return ()


def _input_signature(parameters: Sequence[str], outs: Any) -> inspect.Signature:
    """The signature of a wrapper: the first parameters of the kernel, as many as `outs` takes, or any number."""
    inputs = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    with contextlib.suppress(TypeError, ValueError):
        taken_by_outs = inspect.signature(outs).parameters.values()
        has_only_inputs = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in taken_by_outs)
        if has_only_inputs and len(taken_by_outs) <= len(parameters):
            names = parameters[: len(taken_by_outs)]
            inputs = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    return inspect.Signature(inputs)


def _ready_kind(kernel: Any) -> str | None:
    """The backend of a compiled kernel (`@njit`, `@cuda.jit`, `@wp.kernel`), "wrapper" for ours; else None."""
    for cls in type(kernel).__mro__:
        package = cls.__module__.partition(".")[0]
        for backend, row in _BACKENDS.items():
            if f"{package}.{cls.__name__}" in row.ready:
                return backend
    return "wrapper" if hasattr(kernel, "_call_by_name") else None  # of any copy of this file


def _wrong_kernel(user: str, takes: str, kernel: Any) -> TypeError:
    kind = _ready_kind(kernel)
    hint = f"; for this one there is {kind}_kernel" if kind in _BACKENDS else ""
    return TypeError(f"{user} takes {takes}; got {type(kernel).__name__} {kernel!r}{hint}")


_VMAP_METHODS = (None, "sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized")


class _Options(types.SimpleNamespace):
    """The arguments of a public function but its kernel, checked at once where that does not depend on inputs."""

    in_out_argnames: Sequence[str] | None = None  # of a function that has no such parameter
    scalars: Sequence[str] | bool = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.outs is None:
            raise TypeError("outs is missing: give the results' specs, such as outs=lambda x: x, or () for none")
        if self.vmap_method not in _VMAP_METHODS:
            raise ValueError(f"vmap_method must be one of {_VMAP_METHODS}; got {self.vmap_method!r}")
        if not callable(self.outs) or isinstance(self.outs, type):  # such as jnp.float32
            _flat_specs(self.outs, "outs")
        # The user's functions of the inputs, as part of JAX's keys: what has no hash of its own counts by identity.
        functions = filter(callable, map(vars(self).get, ("scratch", "launch_dims")))
        self.shape_options = tuple([functools.partial(x) if type(x).__hash__ is None else x for x in functions])
        self.input_output_aliases = self._checked_aliases()
        self.in_out_argnames = self._checked_names("in_out_argnames", self.in_out_argnames)
        if not isinstance(self.scalars, bool):
            self.scalars = self._checked_names("scalars", self.scalars)
        # whether the slices of a batch run one after another, on one thread
        self.in_order = str(self.vmap_method).startswith("sequential")

    def _checked_aliases(self) -> dict[int | str, int]:
        aliases = self.input_output_aliases or {}
        checked = {}
        try:
            for i, j in aliases.items():
                name_or_number = i if isinstance(i, str) else operator.index(i)
                checked[name_or_number] = operator.index(j)
        except (AttributeError, TypeError):
            raise TypeError(f"input_output_aliases must be a dict {{input: output}}; got {aliases!r}") from None
        return checked

    def _checked_names(self, option: str, names: Any) -> list[str]:
        if names is None:
            return []
        checked: list = list(names) if isinstance(names, Iterable) else [None]
        if isinstance(names, str) or not all(isinstance(name, str) for name in checked):
            raise TypeError(f'{option} must be a list of names of parameters, such as ["x"]; got {names!r}')
        return checked


def _wrap(make_wrapper: Callable[..., _Wrapper], arguments: dict, options_type: type[_Options] = _Options) -> Any:
    """The wrapper that the arguments of a public function ask for, the kernel first; without one, a decorator."""
    (_, kernel), *options = arguments.items()
    checked = options_type(**dict(options))

    def decorate(kernel: Any) -> _Wrapper:
        return make_wrapper(kernel, checked)

    return decorate if kernel is None else decorate(kernel)


def _check_aliases(aliases: Mapping[int, int], ins: Sequence[Spec], outs: Sequence[Spec]) -> None:
    where = f"input_output_aliases={aliases}"
    for i, j in aliases.items():
        for what, k, specs in (("input", i, ins), ("output", j, outs)):
            if not 0 <= k < len(specs):
                n = len(specs)
                raise ValueError(f"{where}: there is no {what} {k}; the call has {n} {what}s, numbered from 0")
        start = _show(ins[i])
        out = _show(outs[j])
        if start != out:
            raise ValueError(f"{where}: input {i} ({start}) and output {j} ({out}) must be equal in shape and dtype")
    if len(set(aliases.values())) < len(aliases):
        raise ValueError(f"{where}: an output can alias one input only")


class _Recent(dict):
    """The newest entries only: what changes on every call must not fill the memory."""

    most = 1024

    def keep(self, key: Any, value: Any) -> Any:
        with _LOCK:
            while len(self) >= self.most:
                oldest = next(iter(self))
                del self[oldest]
            self[key] = value
        return value


class _Kept:
    """Copied and pickled as a function is: a copy is the object itself, a pickle the name of a global variable."""

    __name__: str

    def __reduce__(self) -> str:
        return self.__name__


# -- 7.3 The wrapper -----------------------------------------------------------------------------------


class _Wrapper(_Kept):
    """A kernel as a JAX function.

    A call takes these steps; a backend gives or overrides those with a star, and these call no step but their own:
      `__call__`*      arguments that are no arrays (`_is_input`*) go into a variant of the wrapper (`_static_key`*);
                       `_call_inputs` has the others traced, by jax.jit unless they are already
      `_trace`*        reads the declared outputs (`_for_inputs`, `_option_arguments`*) and binds the primitive
      `_resolve`       finds what outputs start from, and scratch buffers
      `_find_target`*  checks dtypes and arguments, and names what runs the call
    """

    decorator: str  # the public function that made it, for error messages
    _find_target: Callable[[_Call], _Target]
    takes_constants = True  # by keyword
    by_value: Mapping[str, Any] = types.MappingProxyType({})  # Warp's parameters that are no arrays

    def __init__(self, kernel: Any, options: Any, order: tuple[str, ...] | None = None, static: Any = None) -> None:
        self.kernel = kernel
        self.options = options
        self.parameters = _parameters(kernel)
        self.order = self.parameters if order is None else order  # those that the inputs of a call go to
        self.static: Mapping[str, Any] = static or {}  # the arguments that are no arrays, by parameter
        self.variants = _Recent()  # this kernel with another order and static arguments
        self._describe(kernel)
        aliases = options.input_output_aliases
        self._check_names("in_out_argnames", options.in_out_argnames)
        self._check_names("input_output_aliases", [i for i in aliases if isinstance(i, str)])
        # those that are returned too, in the kernel's order: the first outputs start with them
        self.in_outs = [name for name in self.parameters if name in options.in_out_argnames]
        in_outs = [(name, j) for j, name in enumerate(self.in_outs)]
        self.aliases = self._one_output_each([*aliases.items(), *in_outs])
        self.rule: _ShardingRule | None = None
        if options.sharding_rule is not None:
            self.rule = _ShardingRule.parse(self.title, options.sharding_rule)
        self._jitted = jax.jit(self._function())

    def _describe(self, kernel: Any) -> None:
        """Look like the kernel's function, with the inputs as parameters: jax.custom_vjp binds arguments by them."""
        self.__name__ = getattr(kernel, "__name__", None) or getattr(kernel, "key", None) or type(kernel).__name__
        self.__module__ = getattr(_python(kernel), "__module__", None)  # type: ignore[assignment]
        self.__doc__ = getattr(kernel, "__doc__", None)
        self.__wrapped__ = kernel
        self.__signature__ = _input_signature(self.parameters, self.options.outs)
        self.title = f"{self.decorator} {self.__name__!r}"  # for errors

    def _function(self) -> Callable:
        def call(*args: Any) -> Any:
            return self._trace(*args)

        call.__name__ = call.__qualname__ = self.__name__
        return call

    def __repr__(self) -> str:
        return f"<{self.decorator} {self.__name__}>"

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        return self._call_by_name(args, named) if named else self._call_inputs(args)

    def _call_inputs(self, args: Sequence) -> Any:
        args, is_traced = _as_inputs(args, self.__name__)
        try:
            return self._trace(*args) if is_traced else self._jitted(*args)
        except TypeError:
            _input_specs(args)  # says more of a dtype that JAX does not have
            raise

    # -- arguments by name; those that are no arrays are static, and a variant has them ----------------

    def _call_by_name(self, args: Sequence, named: Mapping[str, Any]) -> Any:
        """A call with arguments by keyword: arrays are inputs, and a Python value is static."""
        static = {name: x for name, x in named.items() if not self._is_input(name, x)}
        free = [name for name in self.parameters if name not in static]
        arrays = dict(zip(free, args))
        if len(args) > len(free) or arrays.keys() & named or not named.keys() <= {*self.parameters}:
            raise self._wrong_keywords(args, named)
        for name in named.keys() - static:
            arrays[name] = named[name]
        inputs = tuple(name for name in free if name in arrays)
        values = [arrays[name] for name in inputs]
        if not static and inputs == self.parameters[: len(inputs)]:
            return self._call_inputs(values)
        if not self.takes_constants:
            raise self._wrong_keywords(args, named)
        return self._variant(inputs, static)._call_inputs(values)

    def _wrong_keywords(self, args: Sequence, named: Mapping[str, Any]) -> TypeError:
        kernel = f"{self.__name__}({', '.join(self.parameters) or 'by position only'})"
        also = "" if self.takes_constants else ": arrays, for the first of them"
        return TypeError(
            f"{kernel} got {len(args)} arguments by position and {named!r:.80} by keyword, where each must be another "
            f"of its parameters{also}"
        )

    def _variant(self, order: tuple[str, ...], static: Mapping[str, Any]) -> _Wrapper:
        key = order, self._static_key(static)
        known = self.variants.get(key)
        return known or self.variants.keep(key, type(self)(self.kernel, self.options, order, static))

    def _is_input(self, name: str, value: Any) -> bool:
        return _is_spec(value) or hasattr(value, "__jax_array__") or hasattr(value, "__dlpack__")

    def _static_key(self, static: Mapping[str, Any]) -> Any:
        """What tells one set of static arguments from another; raises for those that cannot be."""
        for name, value in static.items():
            what = f"{self.__name__}: {name!r} is no array but a constant of the compiled kernel, so it"
            _check_hashable(value, what, "Pass a tuple, or an array")
        return frozenset(_tagged(static))

    def _check_names(self, option: str, names: Sequence[str]) -> None:
        known = [name for name in self.parameters if name not in self.by_value]
        for name in names:
            if name not in known or names.count(name) > 1:
                shown = ", ".join(known)
                raise ValueError(f"{option}={names}: {name!r} must be the name of an array parameter, once: {shown}")

    # -- from inputs to the primitive ------------------------------------------------------------------

    def _trace(self, *args: Any) -> Any:
        ins = _input_specs(args)
        outs, tree = _flat_specs(self._for_inputs("outs", ins), "outs", ins)
        if self.rule:
            self.rule.check(ins, outs)
        results = self._bind(type(self)._resolve, args, outs, self.rule)
        return jax.tree_util.tree_unflatten(tree, results)

    def _bind(self, resolve: Callable[..., _Call], args: Any, outs: Any, rule: _ShardingRule | None) -> list:
        """Bind the primitive for the call that `resolve(wrapper, ins, outs)` makes."""
        ins = _input_specs(args)
        resolve_slice = functools.partial(resolve, self._without_caches())
        call = resolve_slice(ins, outs)
        bound = _BoundCall(
            call.target,
            tuple(call.outs),
            tuple(call.aliases.items()),
            rule or _ShardingRule.whole(ins, outs),
            bool(self.options.has_side_effect),
            self.options.shape_options,
            resolve_slice,
        )
        return bound.bind(*args)[: len(outs)]

    def _without_caches(self) -> _Wrapper:
        """A copy that JAX may keep as long as the wrapper lives, as it refers to nothing that JAX keeps it for."""
        wrapper = object.__new__(type(self))
        vars(wrapper).update(vars(self), _jitted=None, _vjp=None, variants=None)
        return wrapper

    def _resolve(self, ins: list[Spec], outs: list[Spec]) -> _Call:
        """The call with these inputs and declared outputs, and what runs it."""
        scratch, _ = _flat_specs(self._for_inputs("scratch", ins), "scratch", ins)
        aliases = self._numbered_aliases(len(ins))
        _check_aliases(aliases, ins, outs)
        zeroed: list[int] = []
        if self.options.zero_outputs:
            zeroed = [j for j in range(len(outs)) if j not in aliases.values()]
        call = _Call(ins, outs + scratch, aliases, tuple(zeroed), len(scratch))
        return call.run_by(self._find_target(call))

    def _for_inputs(self, what: str, ins: Sequence[Spec]) -> Any:
        """The value of an option that may be a callable of the inputs."""
        option = getattr(self.options, what)
        if not callable(option):
            return option
        args, named = self._option_arguments(option, ins)
        return _call_option(option, f"{self.title}: {what}", args, named)

    def _option_arguments(self, option: Callable, ins: Sequence[Spec]) -> tuple[Sequence, dict]:
        """The inputs, and the static arguments that a callable has parameters for."""
        args: list = list(ins)
        named = {}
        parameters = inspect.signature(option).parameters if self.static else {}
        for i, (name, parameter) in enumerate(parameters.items()):
            if name in self.static and parameter.kind is parameter.KEYWORD_ONLY:
                named[name] = self.static[name]
            elif name in self.static:
                args.insert(i, self.static[name])
        return args, named

    def _numbered_aliases(self, n_in: int) -> dict[int, int]:
        """Those of a call with so many inputs."""
        names = self.order[:n_in]
        numbered = []
        for i, j in self.aliases.items():
            if isinstance(i, str):
                if i not in names:
                    raise ValueError(f"{self.title}: {i!r} is not the name of an input; this call has {names}")
                i = names.index(i)
            numbered.append((i, j))
        return dict(sorted(self._one_output_each(numbered).items()))

    def _one_output_each(self, pairs: Iterable[tuple]) -> dict:
        """Aliases, of which no two are of one input: there is one memory for the output that starts with it."""
        aliases: dict = {}
        for i, j in pairs:
            if aliases.setdefault(i, j) != j:
                raise ValueError(
                    f"{self.title}: input {i!r} cannot start both output {aliases[i]} and output {j}: each starts one, "
                    "and those in in_out_argnames start the first outputs"
                )
        return aliases

    def _target_name(self, digest: str) -> str:
        """Begins with the name of this module, so that the copies of this file in a process do not meet."""
        return f"{__name__}.{self.__name__}.{_LAYOUT}.{digest}"

    def _check_dtypes(self, call: _Call, allowed: frozenset[str], refused: str) -> None:
        n_out = len(call.outs) - call.n_scratch
        for what, specs in (("input", call.ins), ("output", call.outs[:n_out]), ("scratch", call.outs[n_out:])):
            for i, spec in enumerate(specs):
                if np.dtype(spec.dtype).name not in allowed:
                    fix = "f(x.astype(jnp.float32)).astype(x.dtype)"
                    raise TypeError(
                        f"{self.title}: {what} {i} is {_show(spec)}, a dtype {refused}; cast it, and the result back: "
                        f"{fix}"
                    )


# ======================================================================================================
# 8. The native handler: machine code for `XLA_FFI_Error* handler(XLA_FFI_CallFrame*)`, written in LLVM.
#
# XLA calls `handler` with the buffers of a call.  The dimensions of a batch come before those of the kernel; a buffer
# that is the same for all slices has the size 1 there (size 1 broadcasts).
#   1. `handler` checks the buffers and writes what outputs start from.  Without a batch it runs the kernel at once.
#   2. `slices(frame, cursors, count)` runs the kernel on `count` slices.  A cursor knows where a buffer's slice is, and
#      how far it is to the next one.
# These are compiled for each kernel.  What they have in common is compiled once per process, in `_Driver`:
#   3. `drive` finds the slices of a batch, and the rows: slices that are one step apart in every buffer.
#   4. `run` runs a range of slices, row by row.
#   5. `probe` runs the first slices alone and measures them.  If it pays, XLA's threads and this one `share` the rest:
#      each takes chunk after chunk until none is left.
# The first slice that fails in time, which need not be the first of the batch, gives the call its error: nobody takes a
# chunk after that, and chunks that are being run elsewhere are waited for.
# Relies on sections 1 and 2, llvmlite, Numba's tools for it, and the C API of CPython.  The emitter of a backend writes
# what runs one slice.

# -- 8.1 What a backend gives: a signature, and an emitter ---------------------------------------------
# One slice: its buffers and their dimensions.


@dataclasses.dataclass(frozen=True)
class _Signature:
    """The buffers that a handler expects, inputs then outputs, as the kernel sees them (without batch)."""

    label: str
    n_in: int
    dtypes: tuple[np.dtype, ...]
    ranks: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...] = ()  # (input, the output that starts with it)
    zeroed: tuple[int, ...] = ()  # the outputs that start from zeros
    hidden: tuple[int, ...] = ()  # inputs, each with an output behind the others that starts with it

    def with_hidden(self, may_write: Sequence[int]) -> _Signature:
        """The signature with a hidden output for each of these inputs that no other output starts with."""
        aliased = [i for i, _ in self.aliases]
        return dataclasses.replace(self, hidden=tuple(i for i in may_write if i not in aliased))

    @property
    def starts(self) -> dict[int, int]:
        """Which output starts with an input, hidden ones too."""
        n_out = len(self.ranks) - self.n_in
        return dict(self.aliases) | {i: n_out + k for k, i in enumerate(self.hidden)}

    def __str__(self) -> str:
        shown = []
        for dtype, rank in zip(self.dtypes, self.ranks, strict=True):
            shown.append(f"{dtype.name}[{','.join(':' * rank)}]")
        parts = [f"({', '.join(shown[: self.n_in])}) -> ({', '.join(shown[self.n_in :])})"]
        parts += [f"output {j} starts as input {i}" for i, j in self.starts.items()]
        parts += [f"output {j} starts as zeros" for j in self.zeroed]
        return "; ".join(parts)


class _Array(NamedTuple):
    """One buffer of a slice: its address, the kernel's dimensions, strides in bytes and the size of an element."""

    pointer: Any
    dims: list[Any]
    strides: list[Any]
    itemsize: int

    @classmethod
    def row_major(cls, pointer: Any, dims: list[Any], itemsize: int) -> _Array:
        return cls(pointer, dims, _row_major(dims, itemsize), itemsize)


def _row_major(dims: Sequence[Any], unit: int) -> list[Any]:
    """The strides of an array whose elements are `unit` long."""
    strides = [unit]
    for size in reversed(dims[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: len(dims)]


class _Emitter:
    """The part of a handler that differs between backends: how one slice is run."""

    traits = 0
    # a lock to hold while slices run, as `_native_lock` gives it; 0 if only other processes that load the code need one
    lock: int | None = None
    uses_python = False  # slices take the GIL: their thread has a state of Python's all along, where exceptions wait
    in_order = True  # slices run one after another, on the thread that XLA calls from
    driver: _CudaDriver | None = None  # libcuda, where the buffers lie in a GPU's memory
    entry = report = 0  # for fields of `_Kernel`: addresses that code for any process cannot hold
    # writes what all slices share, and what runs one of them under `with handler.each_slice() as arrays`
    write: Callable[[_Handler], None]


# -- 8.2 Writing LLVM ----------------------------------------------------------------------------------
# Integers, addresses, structs, calls and control flow, as Python's operators and methods.  A Python function becomes a
# C function: it is called once, with words that stand for the arguments, and writes an instruction for each operation.


class _Word:
    """A 64-bit integer or address in the code that is being written; Python's operators write instructions."""

    def __init__(self, code: _Code, value: Any) -> None:
        self.code = code
        self.value = value

    def _calculate(self, operation: str, other: Any) -> _Word:
        if operation == "add" and isinstance(other, int) and other == 0:
            return self  # LLVM would keep a sum
        operands = self.value, self.code.value(other)
        return _Word(self.code, getattr(self.code.builder, operation)(*operands))

    def _compare(self, relation: str, other: Any) -> _Word:
        bit = self.code.builder.icmp_signed(relation, self.value, self.code.value(other))
        return _Word(self.code, self.code.builder.zext(bit, self.code.i64))

    __add__ = __radd__ = functools.partialmethod(_calculate, "add")
    __sub__ = functools.partialmethod(_calculate, "sub")
    __mul__ = __rmul__ = functools.partialmethod(_calculate, "mul")
    __floordiv__ = functools.partialmethod(_calculate, "sdiv")
    __mod__ = functools.partialmethod(_calculate, "srem")
    __and__ = functools.partialmethod(_calculate, "and_")
    __or__ = functools.partialmethod(_calculate, "or_")
    __lt__ = functools.partialmethod(_compare, "<")
    __gt__ = functools.partialmethod(_compare, ">")
    __le__ = functools.partialmethod(_compare, "<=")
    __ge__ = functools.partialmethod(_compare, ">=")
    __eq__ = functools.partialmethod(_compare, "==")  # type: ignore[assignment]
    __ne__ = functools.partialmethod(_compare, "!=")  # type: ignore[assignment]


class _Struct(_Word):
    """The address of a C struct: to read a field loads it, to set one stores it; an index finds one in an array."""

    def __init__(self, code: _Code, kind: Any, address: Any) -> None:
        vars(self).update(code=code, kind=kind, value=code.value(address))

    def __getitem__(self, index: Any) -> _Struct:
        return _Struct(self.code, self.kind, self + index * ctypes.sizeof(self.kind))

    def address_of(self, field: str) -> _Word:
        return self + getattr(self.kind, field).offset

    def __getattr__(self, field: str) -> Any:
        kind = dict(self.kind._fields_)[field]
        address = self.address_of(field)
        if issubclass(kind, ctypes.Structure):
            return _Struct(self.code, kind, address)
        return self.code.typed(field, self.code.load(address, ctypes.sizeof(kind)))

    def __setattr__(self, field: str, value: Any) -> None:
        self.code.store(value, self.address_of(field), getattr(self.kind, field).size)


class _Code:
    """An LLVM module that is being written, and the tools to write with; not optimized, which saves 40 ms a kernel."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm
        from llvmlite import ir
        from numba.core import cgutils

        self.llvm = llvm
        self.ir = ir
        self.cgutils = cgutils
        self.i64 = ir.IntType(64)
        self.module = ir.Module()
        self.module.triple = llvm.get_process_triple()
        self.module.data_layout = str(_target_machine().target_data)
        self.functions: dict[str, Any] = {}
        self.builder: Any = None

    # -- functions --

    def define(self, name: str, body: Callable[..., Any]) -> None:
        """Write a C function that takes integers and addresses, as `body` does, and returns one.

        Parameters whose names are in `_POINTED` arrive as structs.
        """
        names = inspect.signature(body).parameters
        function = self.ir.Function(self.module, self._function_type(names), name)
        self.functions[name] = function
        self.builder = self.ir.IRBuilder(function.append_basic_block())
        words = [_Word(self, argument) for argument in function.args]
        result = body(*map(self.typed, names, words))
        if result is not None:  # else it is a loop that never ends
            self.ret(result)

    def compile(self) -> _ObjectCode:
        module = self.llvm.parse_assembly(str(self.module))
        module.verify()
        return _ObjectCode(_target_machine().emit_object(module), _symbols_needed(module))

    def call(self, function: Any, *args: Any) -> _Word:
        """Call a function, as `value` takes it."""
        pointer = self.builder.inttoptr(self.value(function), self._function_type(args).as_pointer())
        return self._call_pointer(pointer, args)

    def external(self, name: str, *args: Any) -> _Word:
        """Call a function of CPython or the C library, which is found by its name when the code is loaded."""
        kind = self._function_type(args)
        function = self.cgutils.get_or_insert_function(self.module, kind, name)  # perhaps of Numba's types
        return self._call_pointer(self.builder.bitcast(function, kind.as_pointer()), args)

    def _function_type(self, parameters: Any) -> Any:
        return self.ir.FunctionType(self.i64, [self.i64] * len(parameters))

    def _call_pointer(self, pointer: Any, args: Sequence) -> _Word:
        return _Word(self, self.builder.call(pointer, list(map(self.value, args))))

    def api(self, frame: Any, name: str, args: Any) -> _Word:
        """Call a function of XLA's API table; it gives an XLA_FFI_Error* or 0."""
        return self.call(getattr(frame.api, f"XLA_FFI_{name}"), args)

    # -- values and memory --

    def value(self, x: Any) -> Any:
        """LLVM's value of a word, a number, or the address of a C function or, by its name, of one of this module."""
        if isinstance(x, _Word):
            return x.value
        if isinstance(x, str):
            return self.functions[x].ptrtoint(self.i64)
        number = x if isinstance(x, int) else ctypes.cast(x, _PTR).value
        return self.ir.Constant(self.i64, int(number or 0))

    def word(self, x: Any) -> _Word:
        return _Word(self, self.value(x))

    def typed(self, name: str, word: _Word) -> Any:
        """The struct that a field or parameter of this name points to, or the word as it is."""
        return _Struct(self, _POINTED[name], word) if name in _POINTED else word

    def pointer(self, address: Any, size: int = 1) -> Any:
        """LLVM's pointer to an integer of so many bytes."""
        return self.builder.inttoptr(self.value(address), self.ir.IntType(8 * size).as_pointer())

    def load(self, address: Any, size: int = 8) -> _Word:
        value = self.builder.load(self.pointer(address, size))
        return _Word(self, value if size == 8 else self.builder.sext(value, self.i64))

    def store(self, value: Any, address: Any, size: int = 8) -> None:
        value = self.value(value)
        if size != 8:
            value = self.builder.trunc(value, self.ir.IntType(8 * size))
        self.builder.store(value, self.pointer(address, size))

    def copy_bytes(self, target: Any, source: Any, nbytes: Any) -> None:
        self.cgutils.raw_memcpy(self.builder, self.pointer(target), self.pointer(source), self.value(nbytes), 1)

    def zero_bytes(self, target: Any, nbytes: Any) -> None:
        self.cgutils.memset(self.builder, self.pointer(target), self.value(nbytes), 0)

    def static(self, name: str, kind: Any, **fields: Any) -> _Struct:
        """A struct of words in the module's own memory, with these values at first."""
        values = [int(fields.get(field, 0)) for field, _ in kind._fields_]
        memory = self.ir.GlobalVariable(self.module, self.ir.ArrayType(self.i64, len(values)), name)
        memory.initializer = self.ir.Constant(memory.value_type, values)
        return _Struct(self, kind, _Word(self, memory.ptrtoint(self.i64)))

    def alloca(self, kind: Any, count: Any = 1) -> _Struct:
        """So many structs or words on the stack; a constant count is allocated once, in the entry block."""
        words = count * (ctypes.sizeof(kind) // 8)
        if isinstance(words, int):
            with self.builder.goto_entry_block():
                memory = self.builder.alloca(self.i64, words)
        else:
            memory = self.builder.alloca(self.i64, words.value)
        return _Struct(self, kind, _Word(self, self.builder.ptrtoint(memory, self.i64)))

    def variable(self, start: Any) -> _Struct:
        """A word on the stack, `.current`, for what a loop changes."""
        variable = self.alloca(_Variable)
        variable.current = start
        return variable

    def array(self, values: Sequence[Any]) -> _Word:
        """The address of these words in a row on the stack."""
        first = self.alloca(_I64, len(values))
        for i, value in enumerate(values):
            self.store(value, first + 8 * i)
        return first

    def zeros(self, nbytes: int) -> _Word:
        """The address of zeroed memory on the stack."""
        first = self.alloca(_I64, -(-nbytes // 8))
        self.zero_bytes(first, nbytes)
        return first

    def new(self, kind: Any, **fields: Any) -> Any:
        """A struct on the stack, with its size filled in if it is one of XLA's."""
        struct = self.alloca(kind)
        if kind._fields_[0][0] == "struct_size":
            fields |= {"struct_size": ctypes.sizeof(kind), "extension_start": 0}
        for name, value in fields.items():
            setattr(struct, name, value)
        return struct

    def atomic_add(self, address: Any, value: Any) -> _Word:
        """Atomic fetch-and-add: returns what the word was."""
        return _Word(self, self.builder.atomic_rmw("add", self.pointer(address, 8), self.value(value), "seq_cst"))

    def compare_and_swap(self, address: Any, old: Any, new: Any) -> _Word:
        """Whether a word was `old`, and is `new` now."""
        words = self.value(old), self.value(new)
        result = self.builder.cmpxchg(self.pointer(address, 8), *words, "seq_cst")
        return _Word(self, self.builder.zext(self.builder.extract_value(result, 1), self.i64))

    # -- control flow --

    def ret(self, value: Any, when: Any = True) -> None:
        """Return from the function."""
        with self.when(when):
            self.builder.ret(self.value(value))

    def when(self, condition: Any, likely: bool | None = None) -> Any:
        """What stands under `with code.when(condition)` runs if that is not 0."""
        if condition is True:
            return contextlib.nullcontext()
        return self.builder.if_then(self._is_true(condition), likely)

    def select(self, condition: Any, yes: Any, no: Any) -> _Word:
        """One of two words, both of which are there."""
        words = self.value(yes), self.value(no)
        return _Word(self, self.builder.select(self._is_true(condition), *words))

    def _is_true(self, condition: Any) -> Any:
        return self.builder.icmp_signed("!=", self.value(condition), self.value(0))

    def minimum(self, first: Any, second: Any) -> _Word:
        return self.select(first < second, first, second)

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any) -> Iterator[_Word]:
        with self.cgutils.for_range(self.builder, self.value(stop), self.value(start)) as loop:
            yield _Word(self, loop.index)

    @contextlib.contextmanager
    def forever(self) -> Iterator[None]:
        """A loop that only returning from the function ends."""
        body = self.builder.append_basic_block()
        self.builder.branch(body)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(body)


# -- 8.3 Machine code: made, loaded, kept on disk ------------------------------------------------------
# Object code has no address of this process in it: functions that it needs are found by name, and what else differs
# between processes is written into its memory (`_Kernel`).  So any process of the same machine can load it from a file.
# Knows files and object code.  Does not know how a name comes about.
#
# Invariants:
# - A file is what `_KernelFile.framed` makes of its content, byte by byte, or it is as if it were not there.
# - A file appears whole, as it is written beside and then renamed.  What the system refuses costs the caching only.
# - Loaded code has an execution engine of its own: different code of two processes can have the same symbols.
# - LLVM aborts a process whose code needs a symbol that is not there, so these are looked up before.


class _ObjectCode(NamedTuple):
    code: bytes
    symbols: list[str]  # the names of what it needs of the process


def _symbols_needed(module: Any) -> list[str]:
    defined = [*module.functions, *module.global_variables]
    return [x.name for x in defined if x.is_declaration and not x.name.startswith("llvm.")]


@functools.cache
def _target_machine() -> Any:
    """What makes machine code; not Numba's code generation, as that always optimizes."""
    return _new_target_machine()


def _new_target_machine() -> Any:
    import llvmlite.binding as llvm

    triple, cpu, features = _target_of_numba()
    arch = llvm.Target.from_triple(triple)
    reloc = "static" if arch.name.startswith("x86") else "default"
    return arch.create_target_machine(cpu=cpu, features=features, opt=1, reloc=reloc, codemodel="jitdefault", jit=True)


def _target_of_numba() -> tuple[str, str, str]:
    """The triple, CPU and features for which Numba compiles: of this machine, but for settings of Numba."""
    from numba.core.registry import cpu_target

    return cpu_target.target_context.codegen().magic_tuple()  # this also initializes LLVM, in the way of its version


def _load_code(code: bytes) -> Any:
    """An execution engine with this object code, which stays in memory as long as the engine does."""
    import llvmlite.binding as llvm

    machine = _new_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


@dataclasses.dataclass(frozen=True)
class _KernelFile:
    """Where what was compiled for a kernel is kept."""

    path: str
    key: str  # what that depends on
    is_current: Callable[[], bool]  # whether what the key was made of is still the same

    @classmethod
    def of_kernel(
        cls, kernel: Any, name: str, is_current: Callable[[], bool], more: Callable[[], Iterable] = tuple
    ) -> _KernelFile | None:
        """Of the kernel with this name; `more` says what else counts.  None where nothing is to be kept."""
        folder = _jax_folder() or getattr(getattr(kernel, "_cache", None), "cache_path", None)  # of njit(cache=True)
        return cls._find(folder, _python(kernel).__name__, lambda: (name, *more()), is_current)

    @classmethod
    def of_driver(cls) -> _KernelFile | None:
        return cls._find(_jax_folder(), "driver", tuple, lambda: True)

    @classmethod
    def _find(
        cls, folder: str | None, label: str, parts: Callable[[], tuple], is_current: Callable[[], bool]
    ) -> _KernelFile | None:
        if folder is None or _OWN_DIGEST is None:
            return None
        key = f"{_OWN_DIGEST} {_machine()} {parts()}\n"
        label = re.sub(r"\W", "_", label, flags=re.ASCII)[:80]  # any file system takes it
        return cls(os.path.join(folder, f"{label}-{_digest(key)}.xla_kernel"), key, is_current)

    def framed(self, content: bytes) -> bytes:
        return f"{self.key}{hashlib.blake2b(content).hexdigest()}\n".encode() + content

    def read(self) -> Any:
        """What another process wrote; None if there is nothing, or it is damaged."""
        with contextlib.suppress(Exception):  # the file may hold anything
            with open(self.path, "rb") as file:
                data = file.read()
            content = data[len(self.framed(b"")) :]
            return pickle.loads(content) if data == self.framed(content) else None
        return None

    def write(self, obj: Any) -> None:
        """Keep what every process would compile under this name."""
        if not self.is_current():
            return
        try:
            content = self.framed(pickle.dumps(obj))
        except Exception:  # something that is of this process only
            return
        temporary = f"{self.path}.{os.getpid()}.{os.urandom(4).hex()}"
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(content)
                os.replace(temporary, self.path)
            except OSError:
                os.unlink(temporary)


def _jax_folder() -> str | None:
    """A folder beside JAX's programs, where JAX keeps these on a local disk."""
    folder = str(jax.config.jax_compilation_cache_dir or "")
    if folder and jax.config.jax_enable_compilation_cache and "://" not in folder:
        return os.path.join(folder, "xla_kernels")
    return None


def _read_own_digest() -> str | None:
    """Of this file, whose text decides what it compiles; None where it is not on disk: then nothing is kept."""
    path = globals().get("__file__", "")
    try:
        with open(path, "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=12).hexdigest()
    except OSError:
        return None


_OWN_DIGEST = _read_own_digest()  # now: the file may change while a process runs


def _machine() -> str:
    """What compiled code depends on besides its kernel and this file."""
    import llvmlite
    import numba

    python = sys.implementation.cache_tag, getattr(sys, "abiflags", "")
    versions = numba.__version__, llvmlite.__version__, np.__version__, _known_api_version()
    return " ".join(map(str, (*versions, *python, *_target_of_numba())))


# -- 8.4 The driver: which slices, and on which threads ------------------------------------------------
# XLA's table of functions and its threads.  Does not know dtypes, nor what a slice does.


def _words(name: str, fields: str) -> Any:
    """A struct of 64-bit words."""
    return _struct(name, **dict.fromkeys(fields.split(), _I64))


_Variable = _words("_Variable", "current")

# Where a buffer's slice is: `data`; `dims` points to the kernel's dimensions, which those of the batch lie before;
# `nbytes` is the size of a slice, and `step` is how far the next slice of the row is: 0 if all share this one.
_Cursor = _words("_Cursor", "data step dims nbytes")

# A kernel, in the memory of its handler.  Outputs, whose memory is mapped on first use, begin at `first_output`.  The
# fields from `slices` on are addresses of this process, filled in when the code is loaded: `entry`, `lock` and
# `report` come from the emitter, the last four are functions of the driver.
_Kernel = _words("_Kernel", "n_buffers first_output in_order slices entry lock report answer error fill drive")

# A call with a batch.  The cursors stand at its first slice.  `sizes` are those of its `depth` dimensions, outermost
# first, `count` is their product; slices [k * row, (k + 1) * row) are one step apart.  For example, all pairs of three
# slices of x and two of y: buffers of 1 x 3, 2 x 1 and, for the output, 2 x 3 slices.  Neither x nor y has all six or
# only one, so a row is what the last dimension spans: three slices, along which x and the output go on by one slice,
# and y stays where it is (step 0).
_Batch = _words("_Batch", "frame kernel cursors depth sizes count row")

# A batch that several threads share.  On the heap, as queued tasks may outlive the call.
#   next     the first slice that nobody has taken (atomic fetch-and-add of `chunk`); beyond `count` nothing is left
#   workers  threads inside `work`, the caller too.  0 is final: a task that finds 0 leaves the batch alone
#   holders  references: one for each queued task and one for the caller; the last one frees the memory
#   error    the first XLA_FFI_Error*, by compare-and-swap; later ones are destroyed
#   idle     a lock that the last worker releases, to wake the caller
# The caller waits for workers only, never for queued tasks: these may stand behind callers that wait, a deadlock.
_Shared = _words("_Shared", "batch next count chunk workers holders error idle")

# What fields and parameters of these names point to.
_POINTED = {
    "frame": XLA_FFI_CallFrame,
    "api": XLA_FFI_Api,
    "metadata": XLA_FFI_Metadata,
    "kernel": _Kernel,
    "cursors": _Cursor,
    "batch": _Batch,
    "shared": _Shared,
}

# In microseconds of work:
_MEASURABLE = 1  # slices that took less do not tell how long others take
_WORTH_SHARING = 40  # a rest that takes less is not worth waking threads for
_WORTH_A_THREAD = 15  # there are no more threads than have so much to do
_CHUNK = 20  # what a thread takes at a time: as little as costs nothing, as cores may differ in speed

_HUGE_PAGE_MIN = 1 << 22  # bytes, from which on NumPy asks for huge pages too
_MADV_HUGEPAGE = 14  # sys/mman.h of Linux


class _Driver(_Code):
    """What all handlers have in common, compiled once.  Each public method is written as a C function.

    They are defined in order of use: a call by name needs the function to be there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ticks = self.static("ticks", _Variable)  # of the clock in a microsecond
        self.define("answer", self.answer)
        self.define("error", self.error)
        self.define("now", self.now)
        self.define("fill", self.fill)
        self.define("seek", self.seek)
        self.define("run", self.run)
        self.define("release", self.release)
        self.define("work", self.work)
        self.define("task", self.task)
        self.define("share", self.share)
        self.define("finish", self.finish)
        self.define("probe", self.probe)
        self.define("drive", self.drive)

    def answer(self, extension: Any, traits: Any) -> Any:
        """On registration XLA asks for the API version and traits, through an extension; returns whether it does."""
        position = self.variable(extension)
        with self.forever():
            found = _Struct(self, XLA_FFI_Metadata_Extension, position.current)
            self.ret(0, when=position.current == 0)
            with self.when(found.extension_base.type == _EXTENSION_METADATA):
                metadata = found.metadata
                metadata.traits = traits
                metadata.api_version.major_version, metadata.api_version.minor_version = _known_api_version()
                self.ret(1)
            position.current = found.extension_base.next

    def error(self, frame: Any, message: Any, code: Any) -> Any:
        """A new XLA_FFI_Error* with a copy of the message."""
        return self.api(frame, "Error_Create", self.new(XLA_FFI_Error_Create_Args, message=message, errc=code))

    def _destroy(self, frame: Any, error: Any) -> None:
        with self.when(error != 0):
            self.api(frame, "Error_Destroy", self.new(XLA_FFI_Error_Destroy_Args, error=error))

    def now(self) -> Any:
        """A clock that only goes on, in ticks: on x86 the processor's, as to ask the system may take 400 ns."""
        if self.module.triple.startswith("x86_64"):
            counter = self.module.declare_intrinsic("llvm.readcyclecounter", (), self.ir.FunctionType(self.i64, []))
            return _Word(self, self.builder.call(counter, []))
        timespec = self.alloca(_I64, 2)  # seconds and nanoseconds
        self.external("clock_gettime", time.CLOCK_MONOTONIC, timespec)
        return self.load(timespec) * 10**9 + self.load(timespec + 8)

    def fill(self, target: Any, source: Any, nbytes: Any) -> Any:
        """Write what starts an output in the memory of the host: a copy of `source`, or zeros if that is 0."""
        self._use_huge_pages(target, nbytes)
        with self.when(source == 0):
            self.zero_bytes(target, nbytes)
            self.ret(0)
        self.copy_bytes(target, source, nbytes)
        return 0

    def _use_huge_pages(self, data: Any, nbytes: Any) -> None:
        """Ask Linux for huge pages under a large output, as NumPy does for its arrays."""
        # To fault XLA's fresh memory in by 4 KiB pages took 40 ms of the 43 ms of an add of 1e7 float32.
        if sys.platform == "linux":
            with self.when(nbytes >= _HUGE_PAGE_MIN):
                skip = self.word(mmap.PAGESIZE) - data % mmap.PAGESIZE  # the range must start at a page
                self.external("madvise", data + skip, nbytes - skip, _MADV_HUGEPAGE)

    # -- a range of slices on one thread --

    def seek(self, batch: Any, cursors: Any, index: Any) -> Any:
        """Point `cursors` at slice `index`; gives the number of slices before it in its row."""
        kernel = batch.kernel
        with self.loop(0, kernel.n_buffers) as k:
            self.copy_bytes(cursors[k], batch.cursors[k], ctypes.sizeof(_Cursor))
        rest = self.variable(index)
        span = self.alloca(_I64, kernel.n_buffers)  # bytes that a step along the current dimension skips
        with self.loop(0, kernel.n_buffers) as k:
            self.store(cursors[k].nbytes, span + 8 * k)
        with self.loop(1, batch.depth + 1) as d:  # from the innermost dimension to the outermost
            size = self.load(batch.sizes + (batch.depth - d) * 8)
            position = rest.current % size
            rest.current = rest.current // size
            with self.loop(0, kernel.n_buffers) as k:
                cursor = cursors[k]
                own_size = self.load(cursor.dims - d * 8)
                skipped = self.load(span + 8 * k)
                cursor.data = cursor.data + self.select(own_size == 1, 0, position * skipped)  # size 1 broadcasts
                self.store(skipped * own_size, span + 8 * k)
        return index % batch.row

    def run(self, batch: Any, first: Any, stop: Any) -> Any:
        """Run the slices [first, stop), row by row, unless one fails; gives its XLA_FFI_Error*."""
        position = self.variable(first)
        cursors = self.alloca(_Cursor, batch.kernel.n_buffers)
        with self.forever():
            start = position.current
            self.ret(0, when=start >= stop)
            left_in_row = batch.row - self.call("seek", batch, cursors, start)
            count = self.minimum(left_in_row, stop - start)
            error = self.call(batch.kernel.slices, batch.frame, cursors, count)
            self.ret(error, when=error != 0)
            position.current = start + count

    # -- a batch on several threads: the invariants stand above `_Shared` --

    def release(self, shared: Any) -> Any:
        """Give up a reference; the last one frees the memory."""
        with self.when(self.atomic_add(shared.address_of("holders"), -1) == 1):
            self.external("PyThread_free_lock", shared.idle)
            self.external("PyMem_RawFree", shared)
        return 0

    def work(self, shared: Any) -> Any:
        """Take chunks and run them until none is left or one fails."""
        with self.forever():
            first = self.atomic_add(shared.address_of("next"), shared.chunk)
            self.ret(0, when=first >= shared.count)
            stop = self.minimum(first + shared.chunk, shared.count)
            error = self.call("run", shared.batch, first, stop)
            with self.when(error != 0):
                # `next` becomes more than any index: nothing is left for the others.
                self.atomic_add(shared.address_of("next"), shared.count)
                is_first = self.compare_and_swap(shared.address_of("error"), 0, error)
                with self.when(is_first == 0):
                    self._destroy(shared.batch.frame, error)
                self.ret(0)

    def task(self, shared: Any) -> Any:
        """What a thread of XLA runs: it joins the workers unless none is left, and as the last one wakes the caller."""
        with self.forever():  # until the number of workers does not change between reading it and adding one
            workers = self.atomic_add(shared.address_of("workers"), 0)
            with self.when(workers == 0):
                self.ret(self.call("release", shared))
            has_joined = self.compare_and_swap(shared.address_of("workers"), workers, workers + 1)
            with self.when(has_joined):
                self.call("work", shared)
                with self.when(self.atomic_add(shared.address_of("workers"), -1) == 1):
                    self.external("PyThread_release_lock", shared.idle)
                self.ret(self.call("release", shared))

    def share(self, batch: Any, first: Any, helpers: Any, chunk: Any) -> Any:
        """Run the slices from `first` on with so many threads of XLA, each of which may come or not."""
        shared = self.typed("shared", self.external("PyMem_RawMalloc", ctypes.sizeof(_Shared)))
        idle = self.external("PyThread_allocate_lock")
        with self.when((shared == 0) | (idle == 0)):  # out of memory, which one thread does not need
            self.ret(self.call("run", batch, first, batch.count))
        shared.batch = batch
        shared.next = first
        shared.count = batch.count
        shared.chunk = chunk
        shared.workers = 1
        shared.holders = helpers + 1
        shared.error = 0
        shared.idle = idle
        self.external("PyThread_acquire_lock", idle, 1)
        args = self.new(XLA_FFI_ThreadPool_Schedule_Args, ctx=batch.frame.ctx, task="task", data=shared)
        with self.loop(0, helpers):
            error = self.api(batch.frame, "ThreadPool_Schedule", args)
            with self.when(error != 0):
                self._destroy(batch.frame, error)
                self.call("release", shared)
        self.call("work", shared)
        with self.when(self.atomic_add(shared.address_of("workers"), -1) > 1):
            self.external("PyThread_acquire_lock", shared.idle, 1)
        error = shared.error
        self.call("release", shared)
        return error

    def finish(self, batch: Any, first: Any, work: Any) -> Any:
        """Run the slices from `first` on, which take `work` microseconds, on as many threads as pay."""
        n_threads = self.variable(0)  # XLA's, none where the call has none
        args = self.new(XLA_FFI_ThreadPool_NumThreads_Args, ctx=batch.frame.ctx, num_threads=n_threads)
        self._destroy(batch.frame, self.api(batch.frame, "ThreadPool_NumThreads", args))
        left = batch.count - first
        others = self.minimum(n_threads.current, left) - 1
        helpers = self.minimum(others, work // _WORTH_A_THREAD)
        chunk = left * _CHUNK // work
        with self.when(helpers > 0):
            self.ret(self.call("share", batch, first, helpers, self.select(chunk < 1, 1, chunk)))
        return self.call("run", batch, first, batch.count)

    def probe(self, batch: Any) -> Any:
        """Run slices on this thread, in ranges of 1, 8, 64, ..., until the time of one tells what to do with the rest.

        Ranges grow, as a short one takes less than the clock can measure; and as long as none takes longer than that,
        the rest may as well be run here.
        """
        ticks = self.ticks.current
        began = self.variable(self.call("now"))  # when the newest range did
        n_newest = self.variable(1)  # how many slices it has
        n_done = self.variable(1)
        error = self.call(batch.kernel.slices, batch.frame, batch.cursors, 1)
        self.ret(error, when=error != 0)
        with self.forever():
            left = batch.count - n_done.current
            self.ret(0, when=left == 0)
            now = self.call("now")
            took = now - began.current
            with self.when(took > ticks * _MEASURABLE):
                work = took * left // n_newest.current // ticks
                with self.when(work > _WORTH_SHARING):
                    self.ret(self.call("finish", batch, n_done.current, work))
            began.current = now
            n_newest.current = self.minimum(n_newest.current * 8, left)
            stop = n_done.current + n_newest.current
            error = self.call("run", batch, n_done.current, stop)
            self.ret(error, when=error != 0)
            n_done.current = stop

    # -- a call --

    def drive(self, frame: Any, kernel: Any, cursors: Any, depth: Any) -> Any:
        """Run a call with `depth` batch dimensions, whose first slice the cursors stand at."""
        batch = self.new(_Batch, frame=frame, kernel=kernel, cursors=cursors, depth=depth, count=1, row=1)
        batch.sizes = self.alloca(_I64, depth)
        with self.loop(0, depth) as d:
            size = self.variable(1)
            with self.loop(0, kernel.n_buffers) as k:
                own_size = self._batch_size(batch, k, d)
                size.current = self.select(own_size == 1, size.current, own_size)
            self.store(size.current, batch.sizes + d * 8)
            batch.count = batch.count * size.current
        with self.when(depth > 0):
            self._find_rows(batch)
        with self.loop(kernel.first_output, kernel.n_buffers) as k:
            self._use_huge_pages(cursors[k].data, cursors[k].nbytes * batch.count)
        with self.when((batch.count < 2) | kernel.in_order):
            with self.when(batch.count == batch.row):
                self.ret(self.call(kernel.slices, frame, cursors, batch.count))
            self.ret(self.call("run", batch, 0, batch.count))
        return self.call("probe", batch)

    def _batch_size(self, batch: Any, k: Any, d: Any) -> _Word:
        """The size of buffer k along dimension d of the batch, 0 being the outermost."""
        return self.load(batch.cursors[k].dims + (d - batch.depth) * 8)

    def _find_rows(self, batch: Any) -> None:
        """A row is the whole batch if every buffer has all slices or only one, else what its last dimension spans."""
        one_row = self.variable(1)
        with self.loop(0, batch.kernel.n_buffers) as k:
            own_count = self._own_count(batch, k)
            one_row.current = one_row.current & ((own_count == 1) | (own_count == batch.count))
        last = self.load(batch.sizes + (batch.depth - 1) * 8)
        batch.row = self.select(one_row.current, batch.count, last)
        with self.loop(0, batch.kernel.n_buffers) as k:
            cursor = batch.cursors[k]
            along_last = self._batch_size(batch, k, batch.depth - 1)
            along_row = self.select(one_row.current, self._own_count(batch, k), along_last)
            cursor.step = self.select(along_row == 1, 0, cursor.nbytes)

    def _own_count(self, batch: Any, k: Any) -> _Word:
        """How many slices buffer k has in memory."""
        count = self.variable(1)
        with self.loop(0, batch.depth) as d:
            count.current = count.current * self._batch_size(batch, k, d)
        return count.current


@functools.cache
def _driver() -> Any:
    """The execution engine that has the driver's functions."""
    file = _KernelFile.of_driver()
    code = file.read() if file else None
    if code is None:
        code, _ = _Driver().compile()
        if file:
            file.write(code)
    engine = _load_code(code)
    read_clock = ctypes.CFUNCTYPE(_I64)(engine.get_function_address("now"))
    began = time.perf_counter()
    ticks = read_clock()
    time.sleep(0.001)
    seconds = time.perf_counter() - began
    per_microsecond = int((read_clock() - ticks) / seconds / 1e6)
    _I64.from_address(engine.get_global_value_address("ticks")).value = max(1, per_microsecond)
    return engine


# -- 8.5 A handler -------------------------------------------------------------------------------------
# One signature and one emitter.  Leaves batches to the driver.


def _compile_handler(signature: _Signature, emitter: _Emitter) -> tuple[int, Any]:
    """Compile and load a handler; returns its address and what must stay alive with it."""
    handler = _Handler(signature, emitter)
    address, alive = _load_handler(emitter, handler.compile().code)
    return address, (alive, handler.alive)


def _load_handler(emitter: _Emitter, code: bytes) -> tuple[int, Any]:
    engine = _load_code(code)
    kernel = _Kernel.from_address(engine.get_global_value_address("kernel"))
    kernel.slices = engine.get_function_address("slices")
    kernel.entry = emitter.entry
    kernel.lock = emitter.lock or 0
    kernel.report = emitter.report
    driver = _driver()
    for name in ("answer", "error", "fill", "drive"):
        setattr(kernel, name, driver.get_function_address(name))
    return engine.get_function_address("handler"), (engine, driver, emitter)


class _Handler(_Code):
    """Writes what is compiled for one kernel and signature."""

    def __init__(self, signature: _Signature, emitter: _Emitter) -> None:
        super().__init__()
        self.signature = signature
        self.emitter = emitter
        self.alive: list[Any] = []  # what the machine code has the addresses of
        self.n_buffers = len(signature.ranks)
        self.first_output = self.n_buffers if emitter.driver else signature.n_in
        self.kernel = self.static(
            "kernel", _Kernel, n_buffers=self.n_buffers, first_output=self.first_output, in_order=emitter.in_order
        )
        if emitter.lock is not None or emitter.uses_python:
            self.define("unguarded", self._slices)
            self.define("slices", self._guarded_slices)
        else:
            self.define("slices", self._slices)
        self.define("handler", self._handler)

    # -- slices --

    def _slices(self, frame: Any, cursors: Any, count: Any) -> Any:
        self.frame = frame
        self.cursors = cursors
        self.count = count
        self.emitter.write(self)
        return 0

    def _guarded_slices(self, frame: Any, cursors: Any, count: Any) -> Any:
        """The same, with what the emitter has to hold, which is given back also if a slice fails."""
        lock = self.kernel.lock
        with self.when(lock != 0):
            self.external("PyThread_acquire_lock", lock, 1)
        if self.emitter.uses_python:
            gil = self.external("PyGILState_Ensure")
            thread_state = self.external("PyEval_SaveThread")
        error = self.call("unguarded", frame, cursors, count)
        if self.emitter.uses_python:
            self.external("PyEval_RestoreThread", thread_state)
            self.external("PyGILState_Release", gil)
        with self.when(lock != 0):
            self.external("PyThread_release_lock", lock)
        return error

    @contextlib.contextmanager
    def each_slice(self) -> Iterator[list[_Array]]:
        """A loop over the slices, in which the emitter writes what runs one of them on its arrays."""
        firsts = self._first_slice()
        steps = [self.cursors[k].step for k in range(len(firsts))]
        with self.loop(0, self.count) as i:
            yield [first._replace(pointer=first.pointer + step * i) for first, step in zip(firsts, steps, strict=True)]

    @contextlib.contextmanager
    def each_chunk(self, most: int) -> Iterator[tuple[list[_Array], _Word]]:
        """A loop over chunks of at most so many slices: arrays with the slices as first dimension, and their number.

        An array that is the same for all slices has the size 1 there.
        """
        firsts = self._first_slice()
        with self.loop(0, (self.count + (most - 1)) // most) as chunk:
            start = chunk * most
            count = self.minimum(self.count - start, most)
            arrays = []
            for k, first in enumerate(firsts):
                step = self.cursors[k].step
                is_shared = step == 0
                dims = [self.select(is_shared, 1, count), *first.dims]
                arrays.append(_Array.row_major(first.pointer + step * start, dims, first.itemsize))
            yield arrays, count

    def _first_slice(self) -> list[_Array]:
        """The arrays of the slice that the cursors stand at."""
        arrays = []
        for k, (dtype, rank) in enumerate(zip(self.signature.dtypes, self.signature.ranks, strict=True)):
            cursor = self.cursors[k]
            dims = [self.load(cursor.dims + 8 * axis) for axis in range(rank)]
            arrays.append(_Array.row_major(cursor.data, dims, dtype.itemsize))
        return arrays

    # -- the call --

    def _handler(self, frame: Any) -> Any:
        """Run a call: at once if it has no batch, else by the driver."""
        self.frame = frame
        with self.when(frame.extension_start != 0, likely=False):
            is_registration = self.call(self.kernel.answer, frame.extension_start, self.emitter.traits)
            self.ret(0, when=is_registration)
        self.ret(0, when=frame.stage != _STAGE_EXECUTE)
        buffers, depth = self._read_buffers()
        self._start_outputs(buffers)
        cursors = self._cursors(buffers, depth)
        needs_driver = depth
        for k in range(self.first_output, self.n_buffers):  # for huge pages
            needs_driver = needs_driver | (cursors[k].nbytes >= _HUGE_PAGE_MIN)
        with self.when(needs_driver == 0):
            self.ret(self.call("slices", frame, cursors, 1))
        return self.call(self.kernel.drive, frame, self.kernel, cursors, depth)

    def _read_buffers(self) -> tuple[list[Any], _Word]:
        """The buffers, after a check of their number, dtypes and ranks, and how many batch dimensions they have.

        Inputs come first, then outputs, the hidden ones last.
        """
        args = self.frame.args
        rets = self.frame.rets
        signature = self.signature
        kinds = list(zip(signature.dtypes, signature.ranks, strict=True))
        kinds += [kinds[i] for i in signature.hidden]
        n_in = signature.n_in
        n_out = len(kinds) - n_in
        text = f"kernel '{signature.label}' was called with other buffers than {signature}"
        self.fail(text, _ERROR_INVALID_ARGUMENT, when=(args.size != n_in) | (rets.size != n_out))
        addresses = [args.args + 8 * i for i in range(n_in)]
        addresses += [rets.rets + 8 * j for j in range(n_out)]
        buffers = [_Struct(self, XLA_FFI_Buffer, self.load(address)) for address in addresses]
        depth = buffers[0].rank - signature.ranks[0] if buffers else self.word(0)
        is_wrong = depth < 0
        for buffer, (dtype, rank) in zip(buffers, kinds, strict=True):
            is_wrong = is_wrong | (buffer.rank != depth + rank)
            is_wrong = is_wrong | (buffer.dtype != _XLA_FFI_DATA_TYPES[dtype.name])
        self.fail(text, _ERROR_INVALID_ARGUMENT, when=is_wrong)
        return buffers, depth

    def _start_outputs(self, buffers: Sequence[Any]) -> None:
        """Write what outputs start from, all slices at once.

        XLA gives an output that starts with an input the memory of that input, or of a copy; but not always: in a
        dynamic-slice fusion on GPUs (XLA of jax 0.11.2) the alias is lost, and the output is uninitialized.
        """
        outs = buffers[self.signature.n_in :]
        itemsizes = [dtype.itemsize for dtype in self.signature.dtypes]
        for i, j in self.signature.starts.items():
            with self.when(buffers[i].data != outs[j].data, likely=False):
                self._fill(outs[j], buffers[i].data, itemsizes[i])
        for j in self.signature.zeroed:
            self._fill(outs[j], 0, itemsizes[self.signature.n_in + j])

    def _fill(self, out: Any, source: Any, itemsize: int) -> None:
        """Write a copy of `source`, or zeros if that is 0, to an output with all its slices."""
        size = self.variable(itemsize)
        with self.loop(0, out.rank) as d:
            size.current = size.current * self.load(out.dims + 8 * d)
        nbytes = size.current
        if self.emitter.driver is None:
            self.call(self.kernel.fill, out.data, source, nbytes)
        else:
            with self.when(nbytes > 0):
                _cuda_fill(self, self.emitter.driver, out.data, source, nbytes)

    def _cursors(self, buffers: Sequence[Any], depth: _Word) -> _Struct:
        """Cursors at the first slice.  A kernel gets the output itself in the place of an input that it starts with."""
        signature = self.signature
        cursors = self.alloca(_Cursor, len(signature.ranks))
        for k, (dtype, rank) in enumerate(zip(signature.dtypes, signature.ranks, strict=True)):
            buffer = buffers[signature.n_in + signature.starts[k]] if k in signature.starts else buffers[k]
            dims = buffer.dims + depth * 8
            sizes = [self.load(dims + 8 * axis) for axis in range(rank)]
            cursor = cursors[k]
            cursor.data = buffer.data
            cursor.step = 0
            cursor.dims = dims
            cursor.nbytes = math.prod(sizes) * dtype.itemsize
        return cursors

    # -- for emitters --

    def fail(self, message: str | _Word, code: int = _ERROR_INTERNAL, when: Any = True) -> None:
        """Return an error from the function; the message is a text or, when the code runs, the address of one."""
        if isinstance(message, str):
            text = self.cgutils.make_bytearray(message.encode() + b"\0")
            constant = self.cgutils.global_constant(self.module, self.module.get_unique_name("text"), text)
            message = _Word(self, constant.ptrtoint(self.i64))
        with self.when(when, likely=False):
            self.ret(self.call(self.kernel.error, self.frame, message, code))

    @property
    def launch(self) -> _Word:
        """The address of the integers of a call's one attribute, `launch`."""
        return _Struct(self, XLA_FFI_Array, self.load(self.frame.attrs.attrs)).data


# -- 8.6 Slices that run in Python ---------------------------------------------------------------------
# The GIL, arrays and messages of errors.


class _CallbackEmitter(_Emitter):
    """Runs a slice by calling Python, under the GIL: for what cannot be native."""

    # `body(pointers, dims, launch, stream, ordinal)` gets the addresses and dimensions of the buffers, the address of
    # the attribute `launch` and, with a driver, a CUDA stream and device.  What it raises the user sees.
    def __init__(self, signature: _Signature, body: Callable[..., None], driver: Any = None) -> None:
        self.driver = driver
        ranks = signature.ranks
        n_words = len(ranks) + sum(ranks) + 2

        def callback(frame: int, words: Any) -> int | None:
            try:
                numbers = iter(words[:n_words])
                pointers = list(itertools.islice(numbers, len(ranks)))
                dims = [tuple(itertools.islice(numbers, rank)) for rank in ranks]
                stream, ordinal = numbers
                body(pointers, dims, _launch_address(frame), stream, ordinal)
            except BaseException as error:  # nothing may unwind into XLA
                return _keep_message(error, signature.label)
            return None

        self.callback = ctypes.CFUNCTYPE(_PTR, _PTR, ctypes.POINTER(_I64))(callback)

    def write(self, handler: _Handler) -> None:
        place = _cuda_place(handler, self.driver) if self.driver else (0, 0)
        with handler.each_slice() as arrays:
            words = [array.pointer for array in arrays]
            for array in arrays:
                words += array.dims
            message = handler.call(self.callback, handler.frame, handler.array([*words, *place]))
            handler.fail(message, when=message != 0)


def _launch_address(frame: int) -> int:
    """The address of the integers of a call's attribute `launch`, 0 if it has none."""
    attrs = XLA_FFI_CallFrame.from_address(frame).attrs
    if not attrs.size:
        return 0
    first = _SIZE.from_address(attrs.attrs).value
    return XLA_FFI_Array.from_address(first).data or 0


_MESSAGES: dict[int, Any] = {}  # by thread: a text must live until XLA has copied it


def _keep_message(error: BaseException | None, label: str) -> int:
    """The address of the text that the user should read in JAX's error.  Never raises: a C caller waits for it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = f"{type(error).__name__} (its text cannot be shown)"
    if error is None:  # Numba's object mode drops errors with the thread state
        text = "an exception in object mode, whose text is lost"
    text = f"{text[:10_000]} (raised in kernel '{label}')".replace("\0", "\\0")
    _MESSAGES[threading.get_ident()] = message = ctypes.create_string_buffer(text.encode("utf-8", "replace"))
    return ctypes.addressof(message)


def _host_arrays(signature: _Signature, pointers: Sequence[int], dims: Sequence[tuple]) -> list[np.ndarray]:
    """NumPy views of the slice's buffers in host memory; inputs are read-only."""
    arrays = []
    for dtype, address, shape in zip(signature.dtypes, pointers, dims, strict=True):
        memory = (ctypes.c_char * (dtype.itemsize * math.prod(shape))).from_address(address)
        arrays.append(np.ndarray(shape, dtype, memory))
        arrays[-1].flags.writeable = len(arrays) > signature.n_in
    return arrays


# ======================================================================================================
# 9. Numba on CPU: a wrapper, and an emitter that calls what Numba compiled.
# One slice of a call; the handler finds the slices.
#
# What a new Numba may break.
# - With an error: `library._final_module`, `_shared_module` and `_get_compiled_object`, `has_dynamic_globals`,
#   `lookup_environment`, `reload_init`, `_compiler.pipeline_class`, `gufunc_builder`, the status of
#   `call_conv.call_function`; for CUDA `_codelibrary`.
# - Silently, so that tests of each must pass before it counts as supported: the parameters of arrays
#   (`_numba_params`, `_not_only_read`), new ways to write to a read-only array (`_UNCHECKED_WRITERS`), how calls of
#   threads and C wrappers show in LLVM's text (`_uses_threads`), the symbols of environments (`_portable`), the
#   attributes `_can_compile`, `_cache._enabled` and `_cache_hits` of dispatchers, and where users' overloads are
#   (`_users_overloads`).

_NUMBA_INSTALL = "pip install numba"
_NUMBA_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128".split()
)
# Ways to write through a read-only array that Numba (0.61 to 0.68) does not refuse: functions, attributes, classes of
# objects.  A kernel that names one gets copies of the inputs that LLVM does not find to be only read.
_UNCHECKED_WRITERS = frozenset(
    "asfortranarray ascontiguousarray at CFunc ctypes Dict dot(out) fill_diagonal flat from_buffer frombuffer GUFunc "
    "_Intrinsic JitClassType List nan_to_num nditer objmode overload StructRefProxy view".split()
)
_WRITES = "Cannot modify readonly array"  # in what Numba says
_READ_ONLY = (
    "; its inputs are read-only, because JAX may share them: write to an output, name what it changes in "
    "in_out_argnames, or use input_output_aliases to start with an input's value"
)
_RETURNED = "returned_by_kernel"  # in code that calls it; numba_cuda_mlir 0.6.0 cannot compile `return kernel()`
# In LLVM's text: Numba's threads, or a call of what the text does not hold: through a pointer, or of a Python function.
_CALLS_OF_THREADS = re.compile(r"@numba_parallel_for\(|call [^@\n(]*(?:%[^\s(]+|inttoptr )\(|@PyObject_Call\w*\(")


def numba_kernel(
    kernel: Any = None,
    outs: Any = None,
    *,
    vmap_method: str | None = None,
    input_output_aliases: Mapping[int | str, int] | None = None,
    in_out_argnames: Sequence[str] | None = None,
    scalars: Sequence[str] | bool = False,
    has_side_effect: bool = False,
    scratch: Any = None,
    zero_outputs: bool = False,
    sharding_rule: str | None = None,
) -> Callable[..., Any]:
    """Make a Numba CPU kernel a JAX function.

    The kernel is called as `kernel(in..., out..., scratch...)` with C-contiguous NumPy arrays, writes its outputs and
    returns nothing; or it takes the inputs alone, 0-d ones as scalars, and returns the outputs.  Inputs are
    read-only.  XLA calls machine code: no Python, no GIL.  The result works under jit, scan, cond, vmap, shard_map
    and export; `vmap` runs the kernel once per slice inside one call.  It has no derivative of its own: see
    `XLACustomKernel` and `jax.custom_vjp`.

    What is no array and given by keyword (`f(x, n=3)`) is a constant of the compiled kernel: hashable, each new value
    compiles again, and callables such as `outs` get it, if they have a parameter of that name.

    XLA may make equal calls once, also of a kernel that draws random numbers: `has_side_effect=True` keeps each.
    What Numba keeps per thread (`np.random.seed`, `numba.set_num_threads`) is that of XLA's threads.

    Args:
      kernel: a function decorated with `numba.njit` (any options), `numba.vectorize` or `numba.guvectorize`, or a
        plain one, which is jitted.  Without it, `numba_kernel(outs=...)` is a decorator.
      outs: the outputs, uninitialized: a `jax.ShapeDtypeStruct` (anything with `.shape` and `.dtype`), a pytree of
        them, or a callable of the inputs' `ShapeDtypeStruct`s that returns one.  Results have its structure.
      vmap_method: "sequential" and "sequential_unrolled" run the slices of a batch in order on one thread; with any
        other, XLA's threads share the slices of a batch for which that pays.  The results are the same.
      input_output_aliases: `{i: j}`: output j starts with the value of input i (or of that name) and, where XLA can,
        in its memory.  The array that the caller holds is never changed.
      in_out_argnames: names of parameters that are given a value, changed by the kernel and returned: they count as
        inputs in the call and, in the kernel's order, as the first of `outs`.
      scalars: the names of 0-d inputs that a kernel which writes takes as scalars, or True for all of them; a number
        given by keyword is an input only if its parameter is named here.
      has_side_effect: True keeps the call even where its results are not used.
      scratch: like `outs`: uninitialized buffers passed after the outputs and not returned.
      zero_outputs: True starts every output but the aliased ones from zeros, in each slice of a `vmap`.
      sharding_rule: names of the dimensions of every input and output, as in `"i, i -> i"`, that lets `jax.jit` split
        the call over a mesh: see `XLACustomKernel.def_sharding_rule`.  What `vmap` adds needs no rule.

    Raises:
      TypeError: dtypes that Numba has no CPU arithmetic for (float16, bfloat16, float8, sub-byte), a wrong number of
        arguments, a kernel that writes to an input or cannot be typed, results of another dtype or rank than `outs`
        (64 bits may be declared as 32 where x64 is disabled).
      ValueError: an unknown `vmap_method`, aliases or a sharding rule that do not fit the call.
      jax.errors.JaxRuntimeError: with the type and text of an exception that the kernel raised (jaxlib's fast path
        for compiled functions makes it a ValueError), or for a result of another shape than `outs`.

    Example:
      >>> import jax.numpy as jnp, numba
      >>> @numba.njit
      ... def cumulative(x, out):
      ...     total = 0.0
      ...     for i in range(x.size):
      ...         total += x[i]
      ...         out[i] = total
      >>> cumsum = numba_kernel(cumulative, outs=lambda x: x)
      >>> cumsum(jnp.array([1.0, 2.0, 3.0])).tolist()
      [1.0, 3.0, 6.0]
    """
    return _wrap(_NumbaKernel, locals())


# -- 9.1 The wrapper, and the forms in which it may call a function ------------------------------------
# Which buffer goes to which parameter.  Does not compile.
#
# The arguments of a kernel, in order:
# - that writes: the inputs, an in-out argument in the place of its input but with the memory of its output; then the
#   other outputs; then scratch.  A 0-d input is an array, unless `scalars` names it.
# - that returns (on CPUs): the inputs alone, 0-d ones as scalars; what it returns goes to the outputs behind those of
#   in-out arguments.  It has no scratch.
# - Constants go by keyword to the parameters of their names, and then all others do too.
# Hidden outputs are no arguments: the kernel gets their memory in the place of an input's.


class _NumbaWrapper(_Wrapper):
    """What kernels for CPUs and GPUs share: which of their parameters gets what of a call."""

    def __init__(self, kernel: Any, *args: Any) -> None:
        super().__init__(kernel, *args)
        self.all_scalars = self.options.scalars is True
        self.scalars = [] if self.all_scalars else list(self.options.scalars or ())
        self._check_names("scalars", self.scalars)

    def _is_input(self, name: str, value: Any) -> bool:
        return super()._is_input(name, value) or name in self.scalars

    def _written_form(self, signature: _Signature) -> _Form | None:
        """The call of a function that writes its outputs; None if its parameters do not allow it."""
        results = self._results(signature)
        inputs = self._input_arguments(signature, scalars=self.all_scalars)
        return self._form(signature, [*inputs, *(f"b{k}" for k in results)], ())

    def _returned_form(self, signature: _Signature) -> _Form | None:
        """The call of a function that takes the inputs alone, 0-d ones as scalars, and returns the outputs."""
        results = self._results(signature)
        if jax.tree.leaves(self.options.scratch) or not results:
            return None
        return self._form(signature, self._input_arguments(signature, scalars=True), tuple(results))

    def _results(self, signature: _Signature) -> range:
        """The buffers of outputs and scratch, but for those that are in-out arguments."""
        return range(signature.n_in + len(self.in_outs), len(signature.ranks))

    def _input_arguments(self, signature: _Signature, scalars: bool) -> list[str]:
        """An expression for each input; in-out arguments are the first outputs."""
        arguments = []
        in_outs = iter(range(signature.n_in, len(signature.ranks)))
        for i in range(signature.n_in):
            name = self.order[i] if i < len(self.order) else None
            if name in self.in_outs:
                arguments.append(f"b{next(in_outs)}")
            elif not signature.ranks[i] and (scalars or name in self.scalars):
                arguments.append(f"b{i}[()]")
            else:
                arguments.append(f"b{i}")
        return arguments

    def _form(self, signature: _Signature, arguments: list[str], results: tuple[int, ...]) -> _Form | None:
        """The call with these arguments, in order, and the constants; None if the parameters do not allow it."""
        named = {}
        if self.order != self.parameters:  # some are not where they would be by position: all go by name
            inputs = self.order[: signature.n_in]
            others = [name for name in self.parameters if name not in inputs and name not in self.static]
            names = [*inputs, *others]
            if len(arguments) > len(names):
                return None
            named = dict(zip(names, arguments)) | {name: f"static_{name}" for name in self.static}
            arguments = []
        try:
            bound = inspect.signature(_python(self.kernel)).bind(*arguments, **named)
        except TypeError:
            return None
        by_name = tuple(bound.kwargs.items())
        return _Form(len(signature.ranks), bound.args, by_name, results, tuple(self.static.items()))

    def _allowed(self, signature: _Signature, forms: Sequence[_Form | None]) -> list[_Form]:
        """Those of some ways to call the function that its parameters allow; an error if there is none."""
        allowed = [form for form in forms if form]
        if allowed:
            return allowed
        n_in = signature.n_in
        n_out = len(signature.ranks) - n_in
        takes = inspect.signature(_python(self.kernel))
        scratch = " and scratch buffers" if jax.tree.leaves(self.options.scratch) else ""
        raise TypeError(
            f"kernel {self.__name__!r} takes {takes}, but this call has {n_in} inputs and "
            f"{n_out} outputs{scratch}: a kernel takes all, or the inputs alone and return "
            "the outputs. Give constants by keyword, name in in_out_argnames what is both, or wrap it in a function"
        )


class _NumbaKernel(_NumbaWrapper):
    decorator = "numba_kernel"

    def __init__(self, kernel: Any, *args: Any) -> None:
        if not isinstance(_python(kernel), types.FunctionType) or _ready_kind(kernel) not in (None, "numba"):
            raise _wrong_kernel("numba_kernel", "a function decorated with numba.njit or a plain function", kernel)
        super().__init__(kernel, *args)

    def _find_target(self, call: _Call) -> _Target:
        numba = _import("numba", "numba_kernel", _NUMBA_INSTALL)
        self._check_dtypes(call, _NUMBA_DTYPES, "for which Numba has no CPU arithmetic")
        signature = call.signature(self.__name__)
        forms = self._allowed(signature, [self._written_form(signature), self._returned_form(signature)])
        kernel = _identity(self.kernel) if numba.config.DISABLE_JIT else self.kernel  # Python reads all where it is
        in_order = self.options.in_order
        parts = "numba", kernel, numba.__version__, in_order, str(signature), *map(tuple, forms)

        def walk() -> _Digester:
            return _Digester(_numba_reads_in_place).walk(*parts, _settings(numba.config))

        kernel_name = _KernelName.of(self.kernel, walk)
        name = self._target_name(kernel_name.digest)
        find_file = functools.partial(kernel_name.file, name)
        make = functools.partial(_compile_numba, self.kernel, signature, forms, in_order, find_file)
        where = "runs on the CPU; for GPUs there are numba_cuda_kernel and warp_kernel"
        target = _Target(name, compilers={"cpu": make}, title=self.title, where=where)
        return dataclasses.replace(target, may_write=target.register("cpu").may_write)


class _Form(NamedTuple):
    """One way to call a function with the `n` buffers b0, b1, ... of a call: inputs, then outputs and scratch."""

    n: int
    args: tuple[str, ...]
    named: tuple[tuple[str, str], ...] = ()
    results: tuple[int, ...] = ()  # the buffers for what it returns; without any it writes to its arguments
    static: tuple[tuple[str, Any], ...] = ()  # the values of its constants

    @classmethod
    def plain(cls, n: int) -> _Form:
        return cls(n, tuple(f"b{k}" for k in range(n)))

    def for_batch(self, ranks: Sequence[int]) -> _Form:
        """The same call on the GPU, with slice z of buffers that have the slices of a batch as first dimension."""

        def slice_of(argument: str) -> str:
            buffer, is_scalar, _ = argument.partition("[()]")
            if not re.fullmatch(r"b\d+", buffer):  # a constant
                return argument
            z = f"min(cuda.blockIdx.z, {buffer}.shape[0] - 1)"  # size 1 broadcasts
            if is_scalar or ranks[int(buffer[1:])]:
                return f"{buffer}[{z}]"
            return f"{buffer}[{z} : {z} + 1].reshape(())"

        named = tuple((name, slice_of(argument)) for name, argument in self.named)
        return self._replace(args=tuple(map(slice_of, self.args)), named=named)

    @property
    def arrays(self) -> list[int]:
        """The buffers that are passed as arrays, not as scalars."""
        arguments = [*self.args, *dict(self.named).values()]
        return [k for k in range(self.n) if f"b{k}" in arguments]

    def adapter(self, kernel: Any, *ends: str, **namespace: Any) -> Callable[..., Any]:
        """A function of all buffers that calls `kernel`, and goes on with these lines."""
        parameters = ", ".join(_Form.plain(self.n).args)
        arguments = ", ".join([*self.args, *map("=".join, self.named)])
        lines = [f"def adapter({parameters}):", f"{_RETURNED} = kernel({arguments})", *ends]
        text = "\n    ".join(lines) + "\n"
        file = f"<adapter {_digest(text)}>"
        linecache.cache[file] = len(text), None, text.splitlines(True), file  # Numba (not 0.61) finds lines there
        namespace["kernel"] = kernel
        for name, value in self.static:
            namespace[f"static_{name}"] = value
        exec(compile(text, file, "exec"), namespace)
        return namespace["adapter"]


# -- 9.2 Compiling -------------------------------------------------------------------------------------
# Knows Numba's types, what its compiler refuses and which inputs its code may write to.  Does not know XLA.


def _numba_reads_in_place(array: np.ndarray) -> bool:
    """Whether Numba's code reads an array of its globals where it is; of others it has copies."""
    return array.nbytes > 10**6 or not array.flags.forc


def _array_types(nbtypes: Any, signature: _Signature, readonly: bool = True) -> tuple[Any, ...]:
    """Numba's types of row-major buffers, of which inputs may be read-only."""
    array_types = []
    for k, (dtype, rank) in enumerate(zip(signature.dtypes, signature.ranks, strict=True)):
        element = nbtypes.boolean if dtype.kind == "b" else getattr(nbtypes, dtype.name)
        is_input = k < signature.n_in
        array_types.append(nbtypes.Array(element, rank, "C", readonly and is_input))
    return tuple(array_types)


def _compile_numba(
    kernel: Any, signature: _Signature, forms: list[_Form], in_order: bool, find_file: Callable[[], _KernelFile | None]
) -> _Compiled:
    """Compile the kernel for the signature, and the handler that calls it; or load both."""
    import numba

    if numba.config.DISABLE_JIT:  # plain Python, for prints and pdb
        python = _CallbackEmitter(signature, _in_python(kernel, signature, forms))
        return _Compiled(*_compile_handler(signature, python))
    file = find_file()
    loaded = _load_kernel(file, signature.label, in_order) if file else None
    if loaded:
        return loaded
    code = _compile_code(kernel, signature, forms)
    emitter = _NumbaEmitter(signature.label, code, in_order)
    handler = _Handler(signature.with_hidden(code.may_write), emitter).compile()
    if file and code.may_keep:
        portable = _portable(code, handler)
        if portable:
            file.write(tuple(portable))
    return _Compiled(*_load_handler(emitter, handler.code), code.may_write)


class _NumbaCode(NamedTuple):
    """The machine code of a kernel, and what the wrapper and the handler must know of it."""

    entry: int  # its address
    alive: Any  # what must stay alive with it
    may_write: tuple[int, ...]  # the inputs that it may write to
    uses_threads: bool = False
    uses_python: bool = False
    may_keep: bool = False  # whether another process would compile the same


def _compile_code(kernel: Any, signature: _Signature, forms: list[_Form]) -> _NumbaCode:
    walked = _Digester(_numba_reads_in_place).walk(kernel, forms[0].static)
    names = walked.names
    if "dot" in names and walked.calls_three:
        names.add("dot(out)")  # which writes
    with _caches_disabled(_jitted(walked, kernel)):
        found = _first_that_compiles(functools.partial(_compile_form, kernel, signature, names), forms)
    entry = found.overload.library.get_pointer_to_function(found.overload.fndesc.llvm_func_name)
    may_write = _not_only_read(found.overload, signature) if found.may_write else ()
    uses_python = "objmode" in names
    # Else this is the code of explicit signatures, which Numba compiled when the kernel was decorated.
    is_new = not found.may_write or getattr(kernel, "_can_compile", True)
    return _NumbaCode(
        entry,
        found.overload,
        may_write,
        uses_threads=_uses_threads(found.overload),
        uses_python=uses_python,
        may_keep=is_new and not uses_python,
    )


@contextlib.contextmanager
def _caches_disabled(functions: list[Any]) -> Iterator[None]:
    """Compile these anew, and not from Numba's own cache on disk."""
    found = [getattr(function, "_cache", None) for function in functions]
    caches: list[Any] = [cache for cache in found if getattr(cache, "_enabled", False)]
    for cache in caches:
        cache.disable()
    try:
        yield
    finally:
        for cache in caches:
            cache.enable()


def _uses_threads(overload: Any) -> bool:
    """Whether the code may run Numba's threads, as its text has a call that could."""
    functions = str(_llvm(overload)).split("\ndefine ")[1:]  # of the kernel, and of all that it calls
    wrappers = re.compile(r'[^(]*@"?(_ZN7cpython|cfunc\.)')  # for calls from Python and C
    return any(_CALLS_OF_THREADS.search(text) for text in functions if not wrappers.match(text))


def _first_that_compiles(compile_: Callable[[Any], Any], candidates: Iterable[Any]) -> Any:
    """What `compile_` makes of the first that it does not refuse; else its first TypeError, or else its ImportError."""
    errors: list[Exception] = []
    for candidate in candidates:
        try:
            return compile_(candidate)
        except (TypeError, ImportError) as error:
            errors.append(error)
    raise min(errors, key=lambda error: isinstance(error, ImportError))


def _in_python(kernel: Any, signature: _Signature, forms: list[_Form]) -> Callable[..., None]:
    """A slice in plain Python, in the first form in which the kernel returns as much as that says."""
    function = getattr(kernel, "py_func", kernel)
    is_ufunc = not isinstance(function, types.FunctionType)  # these return what they write to
    calls = [form.adapter(function, f"return {_RETURNED}") for form in forms]

    def body(pointers: list[int], dims: list[tuple], *_: int) -> None:
        buffers = _host_arrays(signature, pointers, dims)
        for form, call in zip(forms, calls):
            returned = jax.tree_util.tree_leaves(call(*buffers))
            if is_ufunc and not form.results:
                return
            if len(returned) == len(form.results):
                break
        else:
            raise TypeError("the kernel returned as many values as no call with these outputs takes", len(returned))
        for k, leaf in zip(form.results, returned):
            if np.shape(leaf) != buffers[k].shape:
                raise ValueError("returned an array of shape", np.shape(leaf), "where outs declares", buffers[k].shape)
            buffers[k][...] = leaf

    return body


class _Found(NamedTuple):
    """What Numba compiled for one form of a call."""

    overload: Any
    may_write: bool  # whether its array types leave open that the kernel writes to an input


def _compile_form(kernel: Any, signature: _Signature, names: set[str], form: _Form) -> _Found:
    """Read-only inputs make Numba refuse a kernel that writes to one.

    What names writable arrays (explicit signatures, `locals`, `overload`s) may refuse them for another reason: then the
    kernel gets those.
    """
    from numba import types as nbtypes

    readonly = _array_types(nbtypes, signature)
    writable = _array_types(nbtypes, signature, readonly=False)
    has_signatures = not getattr(kernel, "_can_compile", True)
    argtypes = readonly
    may_write = not names.isdisjoint(_UNCHECKED_WRITERS)
    try:
        if has_signatures:  # Numba's own error if none of them fits
            _compile_call(form, kernel, writable)
        dispatcher = _compile_call(form, _fresh_dispatcher(kernel), readonly)
    except Exception as error:
        refusal = _refusal("Numba", signature, error, kernel, bool(form.results))
        if _WRITES in str(error):
            raise refusal from error
        argtypes = writable
        may_write = True
        try:
            dispatcher = _compile_call(form, kernel if has_signatures else _fresh_dispatcher(kernel), writable)
        except Exception:
            raise refusal from error
    return _Found(_compile_results(dispatcher, argtypes, signature, form), may_write)


def _compile_call(form: _Form, dispatcher: Any, argtypes: tuple) -> Any:
    """Compile a call with buffers of these types: of the dispatcher itself where it takes them as they are."""
    import numba

    parameters = inspect.signature(_python(dispatcher)).parameters
    is_plain = form == _Form.plain(len(parameters)) and len(parameters) == len(_parameters(dispatcher))
    if not is_plain or not getattr(dispatcher, "_can_compile", False):
        dispatcher = numba.njit(form.adapter(dispatcher, f"return {_RETURNED}"))
    with warnings.catch_warnings():  # a kernel that parallel=True finds nothing to do in is no news here
        warnings.simplefilter("ignore", numba.NumbaPerformanceWarning)
        dispatcher.compile(argtypes)
    return dispatcher


def _compile_results(dispatcher: Any, argtypes: tuple, signature: _Signature, form: _Form) -> Any:
    """What Numba compiled, after a check of what it returns, with that stored into the outputs."""
    import numba

    overload = dispatcher.overloads[argtypes]
    returned = overload.signature.return_type
    leaves = _returned_leaves(returned)
    declared = [(signature.dtypes[k], signature.ranks[k]) for k in form.results]
    if len(leaves) != len(declared) or not all(map(_is_declared, leaves.values(), declared)):
        shown = ", ".join(f"{dtype.name}[{','.join(':' * rank)}]" for dtype, rank in declared)
        raise TypeError(
            f"kernel {signature.label!r} returns {returned}, not {shown or 'nothing'}: with "
            "parameters for its outputs it writes to them, and with the inputs alone it returns what outs declares"
        )
    if not form.results:
        return overload
    stores = []
    for leaf, k in zip(leaves, form.results, strict=True):
        if signature.ranks[k]:
            text = f"'returned an array of shape', {leaf}.shape, 'where outs declares', b{k}.shape"
            stores.append(f"if {leaf}.shape != b{k}.shape: raise ValueError({text})")
        stores.append(f"b{k}[...] = {leaf}")
    stored = numba.njit(_Form.plain(form.n).adapter(dispatcher, *stores))
    stored.compile(argtypes)
    return stored.overloads[argtypes]


def _returned_leaves(kind: Any, expression: str = _RETURNED) -> dict[str, Any]:
    """The scalars and arrays in what a function returns: an expression for each -> its Numba type."""
    from numba import types as nbtypes

    if kind == nbtypes.none:
        return {}
    if not isinstance(kind, nbtypes.BaseTuple):
        is_0d = getattr(kind, "ndim", None) == 0
        return {expression + "[()]" * is_0d: nbtypes.unliteral(kind)}
    leaves = {}
    for i, item in enumerate(kind):
        leaves.update(_returned_leaves(item, f"{expression}[{i}]"))
    return leaves


def _is_declared(kind: Any, declared: tuple[np.dtype, int]) -> bool:
    """Whether a result has the declared dtype and rank; where x64 is disabled, 64 bits are declared as 32."""
    from numba import from_dtype

    dtype, rank = declared
    allowed = []
    for name in _NUMBA_DTYPES:
        if dtype in (np.dtype(name), jax.dtypes.canonicalize_dtype(name)):
            allowed.append(from_dtype(np.dtype(name)))
    return getattr(kind, "dtype", kind) in allowed and getattr(kind, "ndim", 0) == rank


def _refusal(by: str, signature: _Signature, error: Exception, kernel: Any = None, returns: bool = False) -> TypeError:
    """What a kernel that cannot be compiled has wrong, and what to do about it."""
    text = str(error) or type(error).__name__
    hint = f"; it takes the {signature.n_in} inputs alone, so it must return the outputs" if returns else ""
    explicit = [str(s) for s in getattr(kernel, "nopython_signatures", ())]
    if _WRITES in text or "setitem(readonly array" in text:
        hint += _READ_ONLY
    elif "must have void return type" in text or "to none" in text:
        hint += "; it returns a value: write to the output arrays and return nothing"
    elif not getattr(kernel, "_can_compile", True) and not jax.config.jax_enable_x64 and "64" in str(explicit):
        hint += f"; its signatures {explicit} have 64 bits, which JAX's arrays have where jax_enable_x64 is set"
    elif "0d, C" in text:
        hint += "; a 0-d input is a 0-d array: read it as n[()], or name it in scalars="
    return TypeError(f"{by} cannot compile kernel {signature.label!r} for {signature}{hint}:\n{text}")


def _llvm(overload: Any) -> Any:
    """The optimized code of a function with all that it calls; what comes from Numba's cache has it for linking."""
    return overload.library._shared_module or overload.library._final_module


def _not_only_read(overload: Any, signature: _Signature) -> tuple[int, ...]:
    """The inputs that LLVM does not find to be only read: through what the kernel is given, as far as it can follow."""
    parameters = list(_llvm(overload).get_function(overload.fndesc.llvm_func_name).arguments)
    may_write = []
    position = 2 + 4  # two addresses for results; of each array meminfo, parent, nitems, itemsize, data, shape, strides
    for i in range(signature.n_in):
        attributes = set(parameters[position].attributes)
        if attributes.isdisjoint({b"readonly", b"readnone"}):
            may_write.append(i)
        position += 5 + 2 * signature.ranks[i]
    return tuple(may_write)


def _fresh_dispatcher(kernel: Any) -> Any:
    """A new dispatcher with the kernel's options, so that its globals and helpers are read as they are now."""
    import numba

    if isinstance(kernel, types.FunctionType):
        return numba.njit(kernel)
    if builder := getattr(kernel, "gufunc_builder", None):
        signatures = [] if kernel.is_dynamic else [builder._sigs]
        return numba.guvectorize(*signatures, builder.signature, **builder.targetoptions)(builder.py_func)
    if isinstance(kernel, np.ufunc) or not hasattr(kernel, "py_func"):  # numba.vectorize
        signatures = [list(kernel._dispatcher.overloads)] if kernel._frozen else []
        return numba.vectorize(*signatures, **kernel._dispatcher.targetoptions)(kernel._dispatcher.py_func)
    pipeline = kernel._compiler.pipeline_class
    return type(kernel)(kernel.py_func, kernel.locals, dict(kernel.targetoptions), pipeline_class=pipeline)


# -- 9.3 The name of a kernel, and what Numba's objects count by ---------------------------------------
# Knows what defines them.  Does not know how they are compiled.


class _KernelName(NamedTuple):
    """The digest of all that compiling a kernel reads."""

    digest: str
    names: set[str]  # that stand in the code
    is_portable: bool  # whether other processes would compile the same under this name
    kernel: Any
    walk: Callable[[], _Digester]

    @classmethod
    def of(cls, kernel: Any, walk: Callable[[], _Digester]) -> _KernelName:
        """The digest of what `walk` writes, and of what is known of the helpers of the kernel."""
        walked = walk()
        helpers = [_look_at_helper(function, walked.in_place) for function in _jitted(walked, kernel)]
        for helper in helpers:
            if helper.content is None:
                walked.add(walked.identity(helper.function))
        has_known_helpers = all(helper.is_known and not _may_be_cached(helper.function) for helper in helpers)
        is_portable = has_known_helpers and not walked.by_identity and not _links_files(walked)
        return cls(walked.hash.hexdigest(), walked.names, is_portable, kernel, walk)

    def is_current(self) -> bool:
        return _KernelName.of(self.kernel, self.walk).digest == self.digest

    def file(self, target_name: str, more: Callable[[], Iterable] = tuple) -> _KernelFile | None:
        """Where the code is kept, if it depends on nothing but this name and what `more` says."""
        if not self.is_portable:
            return None
        return _KernelFile.of_kernel(self.kernel, target_name, self.is_current, more)


def _links_files(walked: _Digester) -> bool:
    """Whether a kernel is linked with files, of which its digest knows the names alone."""
    options = [getattr(obj, "targetoptions", None) or {} for _, obj in walked.seen.values()]
    return any(given.get("link") for given in options)


class _Helper(NamedTuple):
    """A jitted function that kernels call.  Numba compiles it once for its arguments' types, and keeps that code.

    Say a helper reads a global `n`, and a kernel that calls it is compiled while n is 1.  With n = 2 a new kernel still
    gets the helper's code of 1, so a name made of the content, 2, would be wrong: from then on the helper counts by
    identity.  A helper that Numba had compiled before it was seen here counts by its content as it was then, but is not
    kept on disk, as n may have been another.
    """

    function: Any
    content: str | None  # its digest when Numba compiled it; None for ever once that has changed
    is_known: bool  # False if Numba had compiled it before it was seen


def _jitted(walked: _Digester, kernel: Any) -> list[Any]:
    """The jitted functions that a kernel calls, itself too if it is recursive."""
    found = []
    for _, obj in walked.seen.values():
        is_jitted = hasattr(obj, "py_func") and hasattr(obj, "overloads")
        is_numbas = type(obj).__module__.startswith(("numba.", "numba_"))
        is_called = obj is not kernel or any(value is kernel for value in _values_read(_python(kernel)))
        if is_jitted and is_numbas and is_called:
            found.append(obj)
    return found


def _values_read(function: types.FunctionType) -> list[Any]:
    """What the names in a function stand for, of which code that calls itself reads its own."""
    return [*_cell_contents(function).values(), *map(function.__globals__.get, function.__code__.co_names)]


def _look_at_helper(function: Any, in_place: Callable[[np.ndarray], bool]) -> _Helper:
    """What is known of a helper's code, after a look at its content now."""
    content = _digest(function, in_place=in_place)
    known = _HELPERS.get(id(function))
    if known is None or not function.overloads:
        known = _Helper(function, content, not function.overloads)
    elif known.content != content:
        # It may have code from before the change for some types, and from after it for others.
        known = _Helper(function, None, False)
    _HELPERS[id(function)] = known
    return known


def _may_be_cached(function: Any) -> bool:
    """Whether code may be from Numba's own cache on disk, which does not see that a global or a helper changed."""
    if hasattr(function, "_cache_hits"):
        return bool(function._cache_hits)
    return getattr(getattr(function, "cache", None), "cache_path", None) is not None  # vectorize does not tell


def _numba_content(obj: Any) -> tuple | None:
    """What defines one of Numba's objects, None if that is not known: its Python function, signatures, options."""
    home = _home(type(obj))
    if not home or home[0].partition(".")[0] not in ("numba", "numba_cuda_mlir"):
        return None
    if hasattr(obj, "gufunc_builder") or isinstance(obj, type):
        return None
    if hasattr(obj, "py_func"):  # jit and cuda.jit
        return _dispatcher_content(obj)
    if hasattr(obj, "_dispatcher"):  # vectorize
        return obj._dispatcher, tuple(obj.types) if obj._frozen else None, obj.identity
    if hasattr(obj, "recvr"):  # a signature
        return obj.return_type, obj.args
    if hasattr(obj, "mangling_args"):  # a type: two that print alike may differ
        return (obj.key,)
    return None


def _dispatcher_content(obj: Any) -> tuple:
    # One that takes any types gains those of its calls: each has code of its own, so these do not count.
    explicit = None if getattr(obj, "_can_compile", True) else tuple(obj.nopython_signatures)
    pipeline = getattr(getattr(obj, "_compiler", None), "pipeline_class", None)
    options = dict(getattr(obj, "targetoptions", None) or {})
    if type(obj).__module__.startswith("numba_cuda_mlir"):  # makes a class for each dispatcher, and names the GPU
        pipeline = None
        options["chip"] = None
    return obj.py_func, explicit, _frozen(options), _frozen(getattr(obj, "locals", None)), pipeline


def _frozen(options: Any) -> Any:
    if isinstance(options, dict):
        return tuple((name, _frozen(options[name])) for name in sorted(options))
    return tuple(sorted(options, key=str)) if isinstance(options, (set, list)) else options


def _users_overloads() -> Mapping[str, list[Any]]:
    """What users gave to `numba.extending`, by the name that calls it; "" where code calls it without naming it."""
    registries = []
    for part in ("core", "cuda"):
        module = sys.modules.get(f"numba.{part}.typing.templates")
        registry = getattr(module, "builtin_registry", None)
        if registry:
            registries.append((registry, len(registry.functions), len(registry.attributes)))
    return _sorted_overloads(*registries)


@functools.lru_cache(maxsize=1)
def _sorted_overloads(*registries: tuple[Any, int, int]) -> Mapping[str, list[Any]]:
    by_name: dict[str, list[Any]] = {}
    for registry, *_ in registries:
        for template in (*registry.functions, *registry.attributes):
            if _is_users(template.key) or _is_users(getattr(template, "_overload_func", None)):
                by_name.setdefault(_name_in_code(template), []).append(template)
    return by_name


def _is_users(function: Any) -> bool:
    """Whether this is a function that no stable package defines; register_jitable has one of Numba's beside it."""
    return isinstance(function, types.FunctionType) and not _is_stable_function(function)


def _name_in_code(template: Any) -> str:
    if getattr(template.key, "__module__", None) in ("_operator", "builtins"):
        return ""
    return str(getattr(template, "_attr", None) or getattr(template.key, "__name__", ""))


# -- 9.4 Kernels on disk -------------------------------------------------------------------------------
# A kernel is written if every process would compile the same code under its name:
# - its digest counts nothing by identity, and is after compiling what it was before: nothing changed meanwhile;
# - Numba compiled its helpers after a digest of theirs (`_Helper.is_known`), and not from Numba's own cache;
# - its code has no address of this process in it, and the objects that it needs can be pickled (`_portable`).

_ADDRESS = re.compile(r"inttoptr \(i64 \d{5,} ")  # in LLVM's text


class _Portable(NamedTuple):
    """What another process needs to run a kernel without compiling it."""

    code: bytes
    symbol: str  # of its function
    environments: Mapping[str, list]  # the constants of its functions, by their symbols
    starts: Sequence[Callable[[], Any]]  # to call before: they start Numba's threads
    may_write: tuple[int, ...]
    uses_threads: bool
    handler: bytes
    symbols: list[str]  # that code and handler need of the process


def _portable(code: _NumbaCode, handler: _ObjectCode) -> _Portable | None:
    """None if the code is of this process only."""
    from numba.core.environment import lookup_environment

    overload = code.alive
    library = overload.library
    if library.has_dynamic_globals or overload.objectmode or overload.lifted:
        return None
    module = library._final_module
    if _ADDRESS.search(str(module)):
        return None
    names = [x.name for x in module.global_variables if x.name.startswith("_ZN08NumbaEnv")]
    return _Portable(
        code=library._get_compiled_object(),
        symbol=overload.fndesc.llvm_func_name,
        environments={name: getattr(lookup_environment(name), "consts", []) for name in names},
        starts=overload.reload_init,
        may_write=code.may_write,
        uses_threads=code.uses_threads,
        handler=handler.code,
        symbols=_symbols_needed(module) + handler.symbols,
    )


def _load_kernel(file: _KernelFile, label: str, in_order: bool) -> _Compiled | None:
    """What another process compiled, handler and all; None if there is nothing, or it cannot be used here."""
    kept = file.read()
    if kept is None:
        return None
    portable = _Portable(*kept)
    code = _link(portable)
    if code is None:
        return None
    return _Compiled(*_load_handler(_NumbaEmitter(label, code, in_order), portable.handler), code.may_write)


def _link(portable: _Portable) -> _NumbaCode | None:
    """Loaded code; None where a symbol is missing."""
    from numba.core.environment import Environment

    for start in portable.starts:
        start()
    if not _find_symbols(portable.symbols):
        return None
    engine = _load_code(portable.code)
    alive: list[Any] = [engine]
    for name, constants in portable.environments.items():
        alive.append(Environment({}))
        alive[-1].consts[:] = constants
        if address := engine.get_global_value_address(name):
            _PTR.from_address(address).value = id(alive[-1])
    entry = engine.get_function_address(portable.symbol)
    return _NumbaCode(entry, alive, portable.may_write, portable.uses_threads)


def _find_symbols(symbols: list[str]) -> bool:
    """Whether code can be linked, after as little of Numba as it takes: its registries alone take 0.6 s."""
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target
    from numba.core.runtime import rtsys

    context = cpu_target.target_context
    for load in (lambda: None, lambda: rtsys.initialize(context), context.refresh):
        load()
        if all(map(llvm.address_of_symbol, symbols)):
            return True
    return False


# -- 9.5 The emitter -----------------------------------------------------------------------------------
# Knows Numba's calling convention, exceptions and threads.  Does not know where arrays come from.


def _lock_of_numbas_threads() -> int:
    """What to hold while they run; 0 for a layer of threads that needs no lock."""
    import numba

    numba.get_num_threads()  # starts them, which decides on their layer
    is_workqueue = numba.threading_layer() == "workqueue"  # aborts the process when two threads enter it
    return _native_lock("workqueue_lock") if is_workqueue else 0


def _numba_params(array: _Array) -> list[Any]:
    """An array as Numba's functions and kernels take it: meminfo, parent, nitems, itemsize, data, shape, strides."""
    return [0, 0, math.prod(array.dims), array.itemsize, array.pointer, *array.dims, *array.strides]


class _NumbaEmitter(_Emitter):
    def __init__(self, label: str, code: _NumbaCode, in_order: bool) -> None:
        self.entry = code.entry
        self.in_order = in_order or code.uses_threads or code.uses_python
        self.uses_python = code.uses_python  # object mode drops an exception with the thread's state of Python
        if code.uses_threads:  # perhaps; Numba's, on all cores
            self.lock = _lock_of_numbas_threads()

        def report(error: int | None) -> int:
            return _keep_message(ctypes.cast(error, ctypes.py_object).value if error else None, label)

        callback = ctypes.CFUNCTYPE(_PTR, _PTR)(report)
        self.report = ctypes.cast(callback, _PTR).value or 0
        self.alive = code.alive, callback

    def write(self, handler: _Handler) -> None:
        from numba.core import types as nbtypes
        from numba.core.registry import cpu_target

        context = cpu_target.target_context
        conv = context.call_conv
        builder = handler.builder
        address = handler.kernel.entry
        with handler.each_slice() as arrays:
            params = [handler.value(word) for array in arrays for word in _numba_params(array)]
            kinds = [nbtypes.intp] * len(params)  # an array is passed as its words; pointers are integers here
            kind = conv.get_function_type(nbtypes.none, kinds).as_pointer()
            entry = builder.inttoptr(address.value, kind)
            status, _ = conv.call_function(builder, entry, nbtypes.none, kinds, params)
            with builder.if_then(status.is_error, likely=False):
                handler.fail(self._message(handler, context, status))

    def _message(self, handler: _Handler, context: Any, status: Any) -> _Word:
        """Materialize the Python exception and let `report` turn it into text."""
        python = context.get_python_api(handler.builder)
        gil = python.gil_ensure()
        context.call_conv.raise_error(handler.builder, python, status)
        parts = handler.alloca(_I64, 3)
        for fetch in ("PyErr_Fetch", "PyErr_NormalizeException"):  # Python 3.11 has bare values
            handler.external(fetch, parts, parts + 8, parts + 16)
        message = handler.call(handler.kernel.report, handler.load(parts + 8))
        for i in range(3):
            handler.external("Py_DecRef", handler.load(parts + 8 * i))
        python.gil_release(gil)
        return message


# ======================================================================================================
# 10. Numba CUDA: wrappers, launch configurations, and an emitter that calls cuLaunchKernel.
# Knows one slice of a call; the handler finds the slices.

_CUDA_DTYPES = _NUMBA_DTYPES | {"float16"}
_CUDA_UNCHECKED_WRITERS = _UNCHECKED_WRITERS | {"stcg", "stcs", "stwb", "stwt"}
_CUDA_BLOCKS = {2: (16, 16), 3: (8, 8, 4)}  # threads per block over launch_dims of two and three dimensions
_CUDA_LIMITS = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64), "launch_dims": (sys.maxsize,) * 3}
_CudaLaunch = _struct("_CudaLaunch", grid=_I64 * 3, block=_I64 * 3, shared_mem=_I64)  # begins the attribute `launch`
_CUDA_INSTALL = "pip install 'xla_kernels[cuda13]' (CUDA 12: [cuda12]), or numba-cuda-mlir[cu13] beside jax[cuda13]"
# The simulator keeps the running kernel in globals, also in those of the kernel's module.
_CUDASIM_LOCK: threading.RLock = _shared_locks().setdefault("cudasim_lock", threading.RLock())


def numba_cuda_kernel(
    kernel: Any = None,
    outs: Any = None,
    *,
    grid: Any = None,
    block: Any = None,
    launch_dims: Any = None,
    threads_per_block: int = 256,
    shared_mem: int = 0,
    vmap_method: str | None = None,
    input_output_aliases: Mapping[int | str, int] | None = None,
    in_out_argnames: Sequence[str] | None = None,
    scalars: Sequence[str] | bool = False,
    has_side_effect: bool = False,
    scratch: Any = None,
    zero_outputs: bool = False,
    sharding_rule: str | None = None,
) -> Callable[..., Any]:
    """Make a Numba CUDA kernel a JAX function.

    The kernel is called as `kernel(in..., out..., scratch...)` with row-major device arrays (inputs read-only),
    writes its outputs and returns nothing.  It is launched by machine code on XLA's stream: no Python, no GIL, and
    XLA may capture the launch in a CUDA graph.  Kernels compiled with `debug=True` and cooperative kernels are
    launched through Python.

    A `vmap` is one launch, whose blocks along z are the slices, where the grid of a call has one block there and the
    kernel neither asks for z nor waits for other blocks (as its PTX shows: memory fences and volatile loads count as
    waiting; blocks that wait by atomics alone do not show).  Else, and with `vmap_method="sequential"`, there is a
    launch for each slice.

    With NUMBA_ENABLE_CUDASIM=1 (set before Numba is imported) kernels that `numba.cuda` compiles run in Python on
    JAX's CPU backend.

    Args:
      kernel: a function decorated with `cuda.jit` of `numba` (numba-cuda) or of its successor, `numba_cuda_mlir`, or
        a plain one, which is jitted: by the one whose `cuda` it reads, else by the successor, else by `numba`.
      outs, vmap_method, input_output_aliases, in_out_argnames, scalars, has_side_effect, scratch, zero_outputs,
        sharding_rule, and constants by keyword: as for `numba_kernel`.  With in-out arguments, scalars or constants
        the kernel is compiled as a device function of one that passes them.
      grid, block: blocks in the grid and threads in a block: ints or tuples of up to three (x, y, z).
      launch_dims: instead of both, the number of threads, an int or a tuple of up to three, or a callable like
        `outs`.  Whole blocks cover it, so the kernel must guard the edge (`if i < out.size`).  With no threads at all
        nothing is launched, and outputs are zeros.
      threads_per_block: block size over one-dimensional `launch_dims`: over two it is 16x16, over three 8x8x4.
      shared_mem: bytes of dynamic shared memory, up to the device's opt-in maximum (48 KiB through Python).

    Raises:
      TypeError: as `numba_kernel`, for dtypes that Numba CUDA lacks.
      ValueError: also neither or both launch forms, or one beyond CUDA's limits (1,024 threads in a block).
      NotImplementedError: on a platform other than CUDA, without the simulator.
      jax.errors.JaxRuntimeError: with CUDA's name for the error of a launch that failed.

    Example:
      >>> from numba import cuda
      >>> @numba_cuda_kernel(outs=lambda x, y: x, launch_dims=lambda x, y: x.size)
      ... def add(x, y, out):
      ...     i = cuda.grid(1)
      ...     if i < out.size:
      ...         out[i] = x[i] + y[i]
    """
    return _wrap(_CudaKernel, locals())


def numba_cuda_callable(
    func: Any = None,
    outs: Any = None,
    *,
    vmap_method: str | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    has_side_effect: bool = False,
    scratch: Any = None,
    zero_outputs: bool = False,
    sharding_rule: str | None = None,
    command_buffer: bool = False,
) -> Callable[..., Any]:
    """Make a Python function that launches Numba CUDA kernels a JAX function.

    `func(in..., out..., scratch..., stream)` runs on every call, with device arrays and a stream of the package whose
    `cuda` it reads, on XLA's memory, and the right device current.  It launches any number of kernels on that stream
    (`kernel[grid, block, stream](...)`), writes the outputs and not the inputs, keeps no array, calls no jax
    function, and need not synchronize.  What it raises reaches the user.  `vmap` calls it once per slice.

    Args:
      func: the function.
      outs, vmap_method, input_output_aliases, has_side_effect, scratch, zero_outputs, sharding_rule: as for
        `numba_kernel`; `scratch` gives temporary buffers without an allocation.
      command_buffer: True lets XLA capture the launches in a CUDA graph and replay them without calling `func` again:
        only for functions that do nothing but launch kernels that are compiled already, the same ones every time.

    Raises:
      TypeError, ValueError, NotImplementedError: as `numba_cuda_kernel`.
      jax.errors.JaxRuntimeError: with the type and text of an exception that `func` raised.

    Example:
      >>> @numba_cuda_callable(outs=lambda x: x)
      ... def scale_twice(x, out, stream):
      ...     scale[out.size // 256 + 1, 256, stream](x, out)
      ...     scale[out.size // 256 + 1, 256, stream](out, out)
    """
    return _wrap(_CudaCallable, locals())


# -- 10.1 Wrappers, and launch configurations ----------------------------------------------------------
# What is to run, and CUDA's limits.  Does not know where it runs: on a GPU, or in a simulator.


def _ints(value: Any, what: str) -> tuple[int, ...]:
    """An int, or some of them; a TypeError if it is something else."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(what) from None


def _dim3(name: str, value: Any) -> tuple[int, ...]:
    """An int, or one to three of them, padded with ones and within the limits of every CUDA device."""
    what = f"{name} must be an int or a tuple of 1 to 3 ints; got {value!r}"
    numbers = _ints(value, what)
    if not 1 <= len(numbers) <= 3:
        raise ValueError(what)
    sizes = (*numbers, 1, 1)[:3]
    least = 1 if name == "block" else 0
    for axis, size, limit in zip("xyz", sizes, _CUDA_LIMITS[name], strict=True):
        if not least <= size <= limit:
            raise ValueError(f"{name}.{axis} must be from {least} to {limit}; got {size} in {name}={sizes}")
    n_threads = math.prod(sizes)
    if name == "block" and n_threads > 1024:
        raise ValueError(f"a CUDA block has at most 1024 threads; block={sizes} has {n_threads}")
    return sizes


class _CudaWrapper(_Wrapper):
    _code: Callable[[list[_NumbaCuda], _Signature], _CudaCode]  # raises TypeError for another number of arguments

    def _find_target(self, call: _Call) -> _Target:
        packages = _cuda_packages(self.kernel, self.decorator)
        platform = packages[0].platform
        launch = self._launch(call.ins)
        code = self._code(packages, call.signature(self.__name__))
        self._check_dtypes(call, _CUDA_DTYPES, "that Numba CUDA has no arrays of")
        kernel_name = _KernelName.of(self.kernel, code.walk)
        name = self._target_name(kernel_name.digest)
        # In PTX is not seen what is written to.
        writes_unseen = code.is_native and not kernel_name.names.isdisjoint(_CUDA_UNCHECKED_WRITERS)
        may_write = tuple(range(len(call.ins))) if writes_unseen else ()
        signature = code.signature.with_hidden(may_write)
        code = dataclasses.replace(code, signature=signature, find_file=functools.partial(kernel_name.file, name))
        where = f"runs on {packages[0].where}"
        compilers = {platform: code.compile}
        target = _Target(name, launch, may_write, compilers=compilers, check=code.check, title=self.title, where=where)
        target.register_where_traced()
        if not code.is_native or self.options.in_order:
            return target
        batch_code = dataclasses.replace(code, batched=True)
        for_batches = dataclasses.replace(target, name=f"{name}.batched", compilers={platform: batch_code.compile})
        return dataclasses.replace(target, for_batches=for_batches)

    def _launch(self, ins: list[Spec]) -> tuple[int, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class _CudaCode:
    """What runs, and how it gets ready.  Knows no wrapper: see `_Target`."""

    function: Any
    packages: list[_NumbaCuda]  # who may compile it
    signature: _Signature
    form: _Form | None = None  # how a kernel is called; a function that launches kernels has none
    command_buffer: bool = False
    find_file: Callable[..., _KernelFile | None] = lambda *_: None  # where machine code is kept
    batched: bool = False  # whether it runs a batch in one launch, where the kernel allows that

    @property
    def is_native(self) -> bool:
        """Whether it is compiled to machine code."""
        return self.form is not None and self.packages[0].platform == "cuda"

    def walk(self) -> _Digester:
        modules = [package.module for package in self.packages]
        how = self.form and tuple(self.form), self.command_buffer, str(self.signature), *modules
        in_place = _never if self.is_native else _always  # Python has no copies
        with _CUDASIM_LOCK:  # a simulated kernel may be running with its globals replaced
            return _Digester(in_place).walk(self.function, *how, _settings(sys.modules["numba"].config))

    def check(self) -> None:
        """Raise if a kernel cannot be compiled, as far as that can be told without a GPU."""
        with contextlib.suppress(ImportError, OSError, RuntimeError):  # no NVVM; or a package that needs a GPU
            if self.form:
                _first_that_compiles(self._compile_to_ptx, self.packages)

    def _compile_to_ptx(self, package: _NumbaCuda) -> Any:
        options = {"device": False, "abi": "numba", "cc": (9, 0)}  # which capability does not matter
        compile_ = functools.partial(package.cuda.compile, self._written(package), **options)
        return package.compile_typed(self.signature, compile_)

    def compile(self) -> _Compiled:
        if self.form:
            emitter = _first_that_compiles(self._kernel_emitter, self.packages)
        else:
            emitter = self._callable_emitter(self.packages[0])
        return _Compiled(*_compile_handler(self.signature, emitter))

    def _callable_emitter(self, package: _NumbaCuda) -> _Emitter:
        def run(arrays: list, stream: Any, _: int) -> None:
            with package.cuda.defer_cleanup() if self.command_buffer else contextlib.nullcontext():  # XLA may capture
                self.function(*arrays, stream)

        emitter = package.callback(self.signature, run)
        emitter.traits = _COMMAND_BUFFER_COMPATIBLE if self.command_buffer else 0
        return emitter

    def _kernel_emitter(self, package: _NumbaCuda) -> _Emitter:
        dispatcher = package.dispatcher(self.function, self._written(package))
        launcher = package.launcher(dispatcher, self.signature, self.find_file, "kernel")
        if launcher is None:
            return self._python_emitter(package, dispatcher)
        batch_launcher = self._batch_launcher(package) if self.batched and launcher.may_batch else None
        return _CudaEmitter(package, launcher, batch_launcher)

    def _python_emitter(self, package: _NumbaCuda, dispatcher: Any) -> _Emitter:
        """Launches through the package, in Python."""
        # After a launch Numba reads the error code of a debug kernel back on stream 0, which XLA's does not wait for.
        is_debug = getattr(dispatcher, "targetoptions", {}).get("debug")

        def run(arrays: list, stream: Any, launch: int) -> None:
            words = _CudaLaunch.from_address(launch)
            if is_debug:
                stream.synchronize()
                stream = 0
            dispatcher[tuple(words.grid), tuple(words.block), stream, words.shared_mem](*arrays)

        return package.callback(self.signature, run)

    def _batch_launcher(self, package: _NumbaCuda) -> _CudaLauncher | None:
        """Launches a kernel of arrays with one dimension more, each block of which runs the user's on slice z."""
        form: Any = self.form
        ranks = self.signature.ranks
        if not package.has_0d_slices and not all(ranks[k] for k in form.arrays):
            return None
        signature = dataclasses.replace(self.signature, ranks=tuple(rank + 1 for rank in ranks))
        with contextlib.suppress(Exception):  # what works as a kernel may not as a function that one calls
            adapter = form.for_batch(ranks).adapter(
                package.device_function(self.function), *package.ends, cuda=package.cuda
            )
            dispatcher = package.dispatcher(self.function, adapter)
            return package.launcher(dispatcher, signature, self.find_file, "batch")
        return None

    def _written(self, package: _NumbaCuda) -> Callable[..., Any]:
        """The function to compile: the kernel's own, or one of all buffers that calls it on the device."""
        if self.form is None or self.form == _Form.plain(self.form.n):
            return _python(self.function)
        return self.form.adapter(package.device_function(self.function), *package.ends)


class _CudaKernel(_NumbaWrapper, _CudaWrapper):
    decorator = "numba_cuda_kernel"

    def __init__(self, kernel: Any, *args: Any) -> None:
        if not isinstance(kernel, types.FunctionType) and _ready_kind(kernel) != "numba_cuda":
            takes = "a function decorated with numba.cuda.jit (without [grid, block]) or a plain function"
            raise _wrong_kernel("numba_cuda_kernel", takes, kernel)
        super().__init__(kernel, *args)
        options = self.options
        forms = [name for name in ("grid", "block", "launch_dims") if vars(options)[name] is not None]
        if forms not in (["grid", "block"], ["launch_dims"]):
            raise ValueError(f"give either both grid and block, or launch_dims; got {' and '.join(forms) or 'none'}")
        if not 0 <= operator.index(options.shared_mem) < 2**31:
            raise ValueError(f"shared_mem must be a number of bytes; got {options.shared_mem}")
        if not isinstance(options.threads_per_block, (int, np.integer)):
            raise TypeError(
                f"threads_per_block must be an int, or give grid and block; got {options.threads_per_block!r}"
            )
        _dim3("block", options.threads_per_block)
        if not callable(options.launch_dims):
            self._launch([])

    def _launch(self, ins: list[Spec]) -> tuple[int, ...]:
        """The words of `_CudaLaunch`."""
        grid = self.options.grid
        block = self.options.block
        dims = self._for_inputs("launch_dims", ins)
        if dims is not None:
            rank = len(dims) if isinstance(dims, (tuple, list)) else 1
            block = _dim3("block", _CUDA_BLOCKS.get(rank, self.options.threads_per_block))
            threads = _dim3("launch_dims", dims)
            grid = tuple(-(-size // per_block) for size, per_block in zip(threads, block, strict=True))
        return *_dim3("grid", grid), *_dim3("block", block), operator.index(self.options.shared_mem)

    def _code(self, packages: list[_NumbaCuda], signature: _Signature) -> _CudaCode:
        [form] = self._allowed(signature, [self._written_form(signature)])
        return _CudaCode(self.kernel, packages, signature, form)


class _CudaCallable(_CudaWrapper):
    decorator = "numba_cuda_callable"
    takes_constants = False

    def __init__(self, func: Any, options: _Options) -> None:
        if not callable(func) or hasattr(func, "py_func"):
            takes = "a Python function that launches kernels (for one kernel use numba_cuda_kernel)"
            raise _wrong_kernel("numba_cuda_callable", takes, func)
        super().__init__(func, options)

    def _code(self, packages: list[_NumbaCuda], signature: _Signature) -> _CudaCode:
        takes = inspect.signature(self.kernel)
        try:
            takes.bind(*signature.ranks, None)
        except TypeError:
            n_in = signature.n_in
            n_out = len(signature.ranks) - signature.n_in
            raise TypeError(
                f"numba_cuda_callable {self.__name__!r} takes {takes}, but this call has {n_in} inputs, "
                f"{n_out} outputs and scratch buffers, and a stream: func(in..., out..., stream)"
            ) from None
        return _CudaCode(self.kernel, packages, signature, command_buffer=bool(self.options.command_buffer))


# -- 10.2 The packages that compile kernels, and the driver --------------------------------------------
# All that differs between numba-cuda, its successor and the simulator.  Of handlers knows the layout of parameters.


class _NumbaCuda:
    """numba-cuda, or the CUDA target that Numba comes with.  Its successor and the simulator are this with changes."""

    name = "Numba CUDA"
    module = "numba.cuda"
    platform = "cuda"
    where = f"NVIDIA GPUs ({_CUDA_INSTALL}), or in Python if NUMBA_ENABLE_CUDASIM=1 was set; for CPUs use numba_kernel"
    refuses_with_any_error = False  # a kernel that it cannot compile; else with NumbaError or TypeError
    has_0d_slices = True  # reshapes a part of an array to ()
    device_options: Mapping[str, Any] = types.MappingProxyType({"device": True})
    ends: tuple[str, ...] = ()  # the last lines of a kernel that calls the user's
    params = staticmethod(_numba_params)  # one array as kernels take it

    @property
    def cuda(self) -> Any:
        return _import(self.module, "numba_cuda_kernel", _CUDA_INSTALL)

    def is_installed(self) -> bool:
        with contextlib.suppress(ImportError):
            return bool(self.cuda)
        return False

    # -- compiling --

    def dispatcher(self, kernel: Any, function: Any, **more: Any) -> Any:
        """A new dispatcher with the kernel's options, so that globals are read as they are now, and types are ours."""
        if isinstance(kernel, types.FunctionType):
            return self.cuda.jit(**more)(function)
        # Without Numba's own cache on disk, which sees no change of a global, and whose code has no types to check.
        return type(kernel)(function, {**kernel.targetoptions, **more})

    def device_function(self, kernel: Any) -> Any:
        """A kernel as a function that another kernel calls."""
        return self.dispatcher(kernel, _python(kernel), **self.device_options)

    def compile_typed(self, signature: _Signature, compile_: Callable[[tuple], Any]) -> Any:
        """Compile for our arrays: a TypeError if that cannot be, None if it must be compiled anew for each grid."""
        import numba

        nbtypes = self.cuda.types if hasattr(self.cuda.types, "Array") else numba.types  # of the CUDA target of Numba
        try:
            return compile_(_array_types(nbtypes, signature))
        except ImportError as error:  # Numba's CudaSupportError and NvvmSupportError are ImportErrors
            raise ImportError(f"{_refusal(self.name, signature, error)}; {_CUDA_INSTALL}") from error
        except Exception as error:
            if re.search("No launch config|requires launch metadata", str(error)):
                return None
            if self.refuses_with_any_error or isinstance(error, (numba.errors.NumbaError, TypeError)):
                raise _refusal(self.name, signature, error) from error
            raise

    def launcher(
        self, dispatcher: Any, signature: _Signature, find_file: Callable[..., _KernelFile | None], role: str
    ) -> _CudaLauncher | None:
        """Compile the kernel and load it for every GPU; None where a launch takes more than cuLaunchKernel."""
        file = find_file(lambda: (self.module, role, *self.machine()))
        carveout = dispatcher.targetoptions.get("shared_memory_carveout")
        percent = {"default": -1, "maxl1": 0, "maxshared": 100}.get(str(carveout).lower(), carveout)
        kept = file.read() if file else None
        if kept:
            with contextlib.suppress(RuntimeError):  # what the driver refuses is compiled anew
                return self._load(signature.label, percent, *kept)
        compiled = self._compiled(dispatcher, signature)
        if compiled and file:
            file.write(compiled)
        return self._load(signature.label, percent, *compiled) if compiled else None

    def _compiled(self, dispatcher: Any, signature: _Signature) -> tuple[str, dict[int, bytes], bool] | None:
        """The entry of a kernel, its machine code by CUDA ordinal, and whether it does the same for all z."""
        ordinals = _cuda_ordinals()
        n_params = 0
        for rank in signature.ranks:
            n_params += len(self.params(_Array.row_major(0, [1] * rank, 1)))
        with self.on_device(ordinals[0]):
            compiled = self.compile_typed(signature, functools.partial(_compile_cuda, dispatcher))
            if not compiled or any(self.extras(dispatcher, compiled)):
                return None
            ptx, entry, _ = self.code(compiled)
            if _ptx_params(ptx, entry) != ["u64"] * n_params:
                return None
        cubins = {}
        for ordinal in ordinals:
            with self.on_device(ordinal):
                _, _, cubins[ordinal] = self.code(compiled)
        return entry, cubins, _knows_no_z(ptx)

    def _load(
        self, label: str, carveout: int | None, entry: str, cubins: Mapping[int, bytes], may_batch: bool
    ) -> _CudaLauncher:
        driver = _CudaDriver()
        functions = {}
        for ordinal, cubin in cubins.items():
            with self.on_device(ordinal):
                functions[ordinal] = driver.load(cubin, entry, ordinal, carveout), 0
        return _CudaLauncher(label, driver, functions, may_batch)

    def machine(self) -> list[Any]:
        """What a file depends on besides its kernel: versions, and the GPUs of this process with their capabilities."""
        version = _I32()
        _CudaDriver().call("cuDriverGetVersion", ctypes.byref(version))
        gpus = [(ordinal, tuple(self.cuda.gpus[ordinal].compute_capability)) for ordinal in _cuda_ordinals()]
        return [version.value, _version("numba_cuda"), _version("numba_cuda_mlir"), *gpus]

    def extras(self, dispatcher: Any, compiled: Any) -> tuple:
        """What makes a launch more than cuLaunchKernel, where it is true."""
        return (
            compiled.debug,  # Numba reads an error code back after the launch
            compiled.cooperative,
            compiled.extensions,
            getattr(compiled._codelibrary, "_setup_functions", None),  # callbacks on Numba's own module
            getattr(compiled, "launch_config_sensitive", False),  # compiled anew for each grid
            getattr(dispatcher.targetctx, "enable_nrt", False),
        )

    def code(self, compiled: Any) -> tuple[str, str, bytes]:
        """PTX, the name of its entry, and the machine code for the current device."""
        library = compiled._codelibrary
        cubin = library.get_cubin()
        return library.get_asm_str(), compiled.entry_name, getattr(cubin, "code", cubin)

    # -- running --

    @contextlib.contextmanager
    def on_device(self, ordinal: int) -> Iterator:
        """With a device's primary context, which is XLA's too."""
        device = self.cuda.gpus[ordinal]
        device.__enter__()
        try:
            yield
        finally:
            # Where JAX meanwhile freed an array of another GPU, that GPU's context is current, which Numba asserts not.
            with contextlib.suppress(AssertionError):
                device.__exit__(None, None, None)

    def callback(self, signature: _Signature, run: Callable[[list, Any, int], None]) -> _CallbackEmitter:
        """Calls `run(arrays, stream, launch)` in Python for every slice, with the call's device current."""

        def body(buffers: list[int], dims: list[tuple], launch: int, stream: int, ordinal: int) -> None:
            with self.on_device(ordinal):
                arrays = []
                for pointer, shape, dtype in zip(buffers, dims, signature.dtypes, strict=True):
                    view = {"shape": shape, "typestr": dtype.str, "data": (pointer, False), "version": 3}
                    view["stream"] = stream  # copies and fills of the array run on it too
                    arrays.append(self.cuda.from_cuda_array_interface(view, sync=False))
                run(arrays, self.cuda.external_stream(stream), launch)

        return _CallbackEmitter(signature, body, _CudaDriver())


class _NumbaCudaMlir(_NumbaCuda):
    """numba-cuda-mlir, as of 0.6.0.  It has no simulator, and compiles for the GPU at hand only."""

    name = "numba_cuda_mlir"
    module = "numba_cuda_mlir.cuda"
    refuses_with_any_error = True
    has_0d_slices = False
    device_options = types.MappingProxyType({"device": True, "inline": "always"})  # else it has no shared memory

    def extras(self, dispatcher: Any, compiled: Any) -> tuple:
        names = ("use_cooperative", "setup_callbacks", "required_dynamic_shared_memory", "needs_nrt")
        callbacks = dispatcher.extensions, dispatcher._module_setup_callbacks
        return dispatcher.targetoptions.get("debug"), *callbacks, *map(compiled.metadata.get, names)

    def code(self, compiled: Any) -> tuple[str, str, bytes]:
        return compiled.ptx, compiled.metadata["func_name"], compiled.metadata["cubin"]

    def params(self, array: _Array) -> list[Any]:  # type: ignore[override]
        """Data, data again, offset, shape, strides in elements."""
        return [array.pointer, array.pointer, 0, *array.dims, *_row_major(array.dims, 1)]


class _CudaSimulator(_NumbaCuda):
    """Numba's simulator, which runs one kernel at a time, in Python."""

    platform = "cpu"
    where = "the CPU only where NUMBA_ENABLE_CUDASIM=1 is set; unset it"
    ends = (f"return {_RETURNED}",)

    def device_function(self, kernel: Any) -> Any:
        return _python(kernel)

    def dispatcher(self, kernel: Any, function: Any, **more: Any) -> Any:
        def launched(*buffers: Any) -> None:
            if function(*buffers) is not None:
                raise TypeError("the kernel returns a value: write to the output arrays and return nothing")

        # The simulator replaces `cuda` in the globals of what it launches: these must be the kernel's.
        code = launched.__code__
        name = function.__name__
        cells = launched.__closure__
        return self.cuda.jit(types.FunctionType(code, _python(kernel).__globals__, name, closure=cells))

    def launcher(self, *_: Any) -> None:
        """It has no machine code."""

    def callback(self, signature: _Signature, run: Callable[[list, Any, int], None]) -> _CallbackEmitter:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        def body(buffers: list[int], dims: list[tuple], launch: int, *_: int) -> None:
            with _CUDASIM_LOCK:
                arrays = [FakeCUDAArray(array) for array in _host_arrays(signature, buffers, dims)]
                run(arrays, self.cuda.stream(), launch)

        return _CallbackEmitter(signature, body)


_CUDA_PACKAGES = {"numba_cuda_mlir": _NumbaCudaMlir(), "numba": _NumbaCuda()}  # the successor first


def _uses_cudasim() -> bool:
    """Whether kernels run in Numba's simulator: as the environment says, or said when Numba was imported."""
    config = sys.modules.get("numba.core.config")
    if config:
        return bool(getattr(config, "ENABLE_CUDASIM", False))
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def _cuda_packages(function: Any, user: str) -> list[_NumbaCuda]:
    """Who may compile a kernel (or, for a callable, gives it arrays): the packages it reads, else who is installed."""
    _import("numba", user, _CUDA_INSTALL)
    roots = _packages_read(function)
    named = [package for root, package in _CUDA_PACKAGES.items() if root in roots]
    if _uses_cudasim():
        if named == [_CUDA_PACKAGES["numba_cuda_mlir"]]:
            raise NotImplementedError(
                f"{user} {_python(function).__name__!r} is written for numba_cuda_mlir, which has no simulator: unset "
                "NUMBA_ENABLE_CUDASIM to run it on a GPU, or write it with `from numba import cuda`"
            )
        return [_CudaSimulator()]
    candidates = named or list(_CUDA_PACKAGES.values())
    installed = [package for package in candidates if package.is_installed()]
    if not installed:
        wanted = named[0] if named else _CUDA_PACKAGES["numba"]
        _import(wanted.module, user, _CUDA_INSTALL)  # raises
    return installed


def _packages_read(function: Any) -> set[str]:
    """The packages of what a function reads, or of what a compiled kernel is."""
    objects = [function]
    if isinstance(function, types.FunctionType):
        with _CUDASIM_LOCK:  # a simulated kernel may be running with its globals replaced
            objects = [obj for _, obj in _Digester().walk(function).seen.values()]
    roots = set()
    for obj in objects:
        module = obj.__name__ if isinstance(obj, types.ModuleType) else type(obj).__module__
        for name in (module, getattr(obj, "__module__", "")):
            roots.add(str(name).partition(".")[0])
    return roots


def _cuda_ordinals() -> list[int]:
    """The CUDA ordinals of this process's GPUs, empty where JAX has none."""
    return sorted(device.local_hardware_id for device in _local_devices("cuda"))


class _CudaDriver:
    """libcuda: called from Python here, and by address from handlers."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def address(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, name), _PTR).value or 0

    def describe(self, code: int) -> str:
        """CUDA's name and text for an error."""
        parts = [ctypes.c_char_p(), ctypes.c_char_p()]
        self.library.cuGetErrorName(code, ctypes.byref(parts[0]))
        self.library.cuGetErrorString(code, ctypes.byref(parts[1]))
        return ": ".join(part.value.decode() for part in parts if part.value) or f"CUDA error {code}"

    def call(self, name: str, *args: Any) -> None:
        if code := getattr(self.library, name)(*args):
            raise RuntimeError(f"{name} failed with {self.describe(code)}")

    @contextlib.contextmanager
    def keeping_context(self) -> Iterator:
        context = _PTR()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        try:
            yield
        finally:
            self.call("cuCtxSetCurrent", context)

    def load(self, cubin: bytes, entry: str, ordinal: int, carveout: int | None) -> int:
        """The CUfunction `entry` in the current context, allowed all the shared memory that the device has."""
        module = _PTR()
        function = _PTR()
        limit = _I32()
        static = _I32()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        self.call("cuDeviceGetAttribute", ctypes.byref(limit), 97, ordinal)  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.call("cuFuncGetAttribute", ctypes.byref(static), 1, function)  # SHARED_SIZE_BYTES
        self.call("cuFuncSetAttribute", function, 8, limit.value - static.value)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        if carveout is not None:
            self.call("cuFuncSetAttribute", function, 9, carveout)  # PREFERRED_SHARED_MEMORY_CARVEOUT
        return function.value or 0


# -- 10.3 From a kernel to a handler -------------------------------------------------------------------
# Streams, devices and launches, native or through Python.  Does not know what compiled the kernel.


def _compile_cuda(dispatcher: Any, argtypes: tuple) -> Any:
    """Compile for the current device; atomics on inputs are refused here, as Numba does not."""
    compiled = dispatcher.compile(argtypes)
    annotation = compiled._type_annotation  # None for a kernel from Numba's cache
    if annotation:
        _refuse_atomics_on_inputs(annotation)
        for name, kind in annotation.typemap.items():
            if name.startswith(_RETURNED) and str(kind) != "none":
                raise TypeError(f"cannot cast {kind} to none")
    return compiled


def _refuse_atomics_on_inputs(annotation: Any) -> None:
    """Look at the calls of a kernel, by Numba's record of their types, and at those of the functions that it calls."""
    annotations = [annotation]  # grows by those
    for typed in annotations:
        for call, signature in typed.calltypes.items():
            if getattr(call, "op", None) != "call":
                continue
            called = typed.typemap[call.func.name]
            device_function = getattr(called, "dispatcher", None)
            if device_function:
                inner = getattr(device_function.overloads.get(signature.args), "type_annotation", None)
                if inner and inner not in annotations:
                    annotations.append(inner)
            elif "atomic" in str(called) and not getattr(signature.args[0], "mutable", True):
                raise TypeError(f"{_WRITES}: an atomic operation on an input, at {call.loc}")


def _ptx_params(ptx: str, entry: str) -> list[str]:
    """The types of a kernel's parameters in the order of its declaration."""
    found = re.search(rf"\.entry\s+{re.escape(entry)}\s*\(([^)]*)\)", ptx)
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", found[1]) if found else []


def _knows_no_z(ptx: str) -> bool:
    """Whether a kernel does the same in all blocks that differ in z, which may then stand for the slices of a batch.

    Memory fences and volatile loads are how blocks wait for each other, which they cannot if not all of them run.
    """
    linked_later = set(re.findall(r"\.extern\s+\.func\s*(?:\([^)]*\)\s*)?(\w+)", ptx))
    if not linked_later <= {"vprintf", "__assertfail", "malloc", "free"}:  # nobody sees what they do
        return False
    asks_for_z = r"%n?ctaid\.z|%gridid|%n?clusterid|%cluster_"
    waits = r"\b(membar|fence|griddepcontrol)\b|\.(volatile|acquire|release|acq_rel)\b"
    return not re.search(f"{asks_for_z}|{waits}", ptx)


def _ask_xla(handler: _Handler, function: str, kind: Any) -> Any:
    """What a function of XLA's API fills in, or the end of the handler with its error."""
    args = handler.new(kind, ctx=handler.frame.ctx)
    error = handler.api(handler.frame, function, args)
    handler.ret(error, when=error != 0)
    return args


def _cuda_stream(handler: _Handler) -> _Word:
    return _ask_xla(handler, "Stream_Get", XLA_FFI_Stream_Get_Args).stream


def _cuda_fill(handler: _Handler, driver: _CudaDriver, target: _Word, source: Any, nbytes: _Word) -> None:
    """Copy `source`, or write zeros if that is 0, on the call's stream, as CUDA graphs can capture it."""
    function = "cuMemsetD8Async" if isinstance(source, int) else "cuMemcpyDtoDAsync_v2"
    code = handler.call(driver.address(function), target, source, nbytes, _cuda_stream(handler))
    label = handler.signature.label

    def report(code: int) -> int:
        return _keep_message(RuntimeError(f"{driver.describe(code)}, when an output got its first values"), label)

    callback = ctypes.CFUNCTYPE(_PTR, _I32)(report)
    handler.alive.append(callback)
    with handler.when(code & 0xFFFF_FFFF, likely=False):  # a C int
        handler.fail(handler.call(callback, code))


def _cuda_place(handler: _Handler, driver: _CudaDriver) -> tuple[_Word, _Word]:
    """The stream and the CUDA ordinal of the call."""
    stream = _cuda_stream(handler)
    if _ffi_api_version() >= (0, 2):
        return stream, _ask_xla(handler, "DeviceOrdinal_Get", XLA_FFI_DeviceOrdinal_Get_Args).device_ordinal
    ordinal = handler.array([-1])  # jaxlib < 0.8 need not have that; XLA's context is current while it calls handlers
    handler.call(driver.address("cuCtxGetDevice"), ordinal)
    return stream, handler.load(ordinal, 4)


_CudaFunction = _words("_CudaFunction", "handle shared_mem")  # with the dynamic shared memory beyond that of the call


class _CudaLauncher:
    """cuLaunchKernel, from a handler: on XLA's stream, with what was loaded for the call's device."""

    # `functions` are those of `_CudaFunction`, by CUDA ordinal.  What `may_batch` can be launched with more blocks
    # along z.
    def __init__(
        self, label: str, driver: Any, functions: Mapping[int, tuple[int, int]], may_batch: bool = False
    ) -> None:
        self.label = label
        self.driver = driver
        self.may_batch = may_batch
        self.table = (_CudaFunction * (max(functions) + 2))()  # the last row is for all other devices
        for ordinal, function in functions.items():
            self.table[ordinal] = function

        def report(code: int, launch: Any, shared: int) -> int:
            words = launch.contents
            sizes = f"grid={tuple(words.grid)}, block={tuple(words.block)}, shared_mem={shared}"
            return _keep_message(RuntimeError(f"{driver.describe(code)}, from a launch with {sizes}"), label)

        self.report = ctypes.CFUNCTYPE(_PTR, _I32, ctypes.POINTER(_CudaLaunch), _I32)(report)

    def launch_in(self, handler: _Handler) -> Callable[..., None]:
        """Write what all launches share.

        Returns what writes one, for parameters at some addresses and so many blocks along z and x.
        """
        stream, ordinal = _cuda_place(handler, self.driver)
        last = len(self.table) - 1
        is_known = (ordinal >= 0) & (ordinal < last)
        table = _Struct(handler, _CudaFunction, ctypes.addressof(self.table))
        function = table[handler.select(is_known, ordinal, last)]
        handle = function.handle
        lost = f"kernel '{self.label}' is not loaded on this GPU, which JAX did not list as a local device"
        handler.fail(lost, when=handle == 0)
        attribute = handler.launch
        x, y, z, *block, shared = [handler.load(attribute + 8 * i) for i in range(7)]
        shared = shared + function.shared_mem

        def launch(params: Sequence[Any], z: Any = z, x: Any = x) -> None:
            args = handle, x, y, z, *block, shared, stream, handler.array(params), 0
            code = handler.call(self.driver.address("cuLaunchKernel"), *args)
            with handler.when(code & 0xFFFF_FFFF, likely=False):  # a C int
                handler.fail(handler.call(self.report, code, attribute, shared))

        return launch


class _CudaEmitter(_Emitter):
    traits = _COMMAND_BUFFER_COMPATIBLE  # nothing but launches, the same ones whenever it is called

    def __init__(
        self, package: _NumbaCuda, launcher: _CudaLauncher, batch_launcher: _CudaLauncher | None = None
    ) -> None:
        self.package = package
        self.launcher = launcher
        self.driver = launcher.driver
        self.batch_launcher = batch_launcher  # of arrays with the slices as first dimension, which are the grid's z

    def write(self, handler: _Handler) -> None:
        if self.batch_launcher:
            grid_z = handler.load(handler.launch + 16)
            with handler.when((handler.count > 1) & (grid_z == 1)):
                launch = self.batch_launcher.launch_in(handler)
                with handler.each_chunk(_CUDA_LIMITS["grid"][2]) as (arrays, count):
                    launch(self._params(handler, arrays), count)
                handler.ret(0)
        launch = self.launcher.launch_in(handler)
        with handler.each_slice() as arrays:
            launch(self._params(handler, arrays))

    def _params(self, handler: _Handler, arrays: Sequence[_Array]) -> list[_Word]:
        """The addresses of the kernel's parameters."""
        params = [word for array in arrays for word in self.package.params(array)]
        first = handler.array(params)
        return [first + 8 * i for i in range(len(params))]


# ======================================================================================================
# 11. Warp: a wrapper with a derivative, and an emitter that calls Warp's code on CPUs and GPUs.
# Knows one slice of a call; the handler finds the slices.

_WARP_INSTALL = "pip install warp-lang numba"
_WARP_DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64".split()
_WARP_WRITERS = re.compile(r"atomic_\w+|tile_store|tile_atomic_add")  # functions that write to their first argument
_WARP_READERS = frozenset({"len", "lower_bound", "tile_load", "tile_load_indexed"})  # those that only read an array
_WARP_PROPERTIES = frozenset({"dtype", "ndim", "shape", "size", "strides"})
# In the source of code that sees blocks, that runs other code than it names, or that is not what its source says:
_WARP_UNBATCHED = re.compile(r"\b(block_dim|\w*tile\w*|grad|static)\b|_xla_")
_WARP_MAX_DIMS = 4
_WARP_MAX_EXTENT = 2**31 - 1  # Warp keeps extents, strides in bytes and thread indices in 32-bit integers
# The attribute `launch`.  Behind it is what is passed by value.
_WarpExtents = _struct("_WarpExtents", dims=_I64 * _WARP_MAX_DIMS, ndim=_I64, size=_I64)  # ndim of them, their product
_WarpLaunch = _struct("_WarpLaunch", cuda=_CudaLaunch, on_gpu=_WarpExtents, on_cpu=_WarpExtents)
_WARP_BATCH_THREADS = 2**24  # in one launch: the grid of more is not one of Warp's first axis alone (warp.cu)
_STAND_IN_DIMS = (720720, 1024)  # of a recorded launch: Warp checks that clusters, of up to 16 blocks, divide the grid


# -- 11.1 The wrapper ----------------------------------------------------------------------------------
# Knows which buffer goes to which parameter, and the adjoint launch.  Does not know how a launch is made.


def warp_kernel(
    kernel: Any = None,
    outs: Any = None,
    *,
    launch_dims: Any = None,
    block_dim: int = 256,
    tiled: bool = False,
    vmap_method: str | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    in_out_argnames: Sequence[str] | None = None,
    has_side_effect: bool = False,
    scratch: Any = None,
    zero_outputs: bool = False,
    sharding_rule: str | None = None,
    differentiable: bool = False,
) -> Callable[..., Any]:
    """Make an NVIDIA Warp kernel a JAX function, on CPUs and GPUs.

    The kernel's parameters are the inputs, then the outputs, then the scratch buffers.  Arrays of vectors and
    matrices are JAX arrays with the elements in trailing dimensions; an array of one element may be 0-d, and None is a
    null array.  A generic kernel runs as the call's dtypes say.  A `vmap` is one call: on a CPU threads share its
    slices; on a GPU it is one launch, or one per slice of a kernel with arrays or launches of 4 dimensions, tiles, C,
    `wp.static`, atomics and `while` together, or another number of `wp.tid()` indices than `launch_dims` has.

    Parameters that are not arrays (scalars, vectors, matrices, structs) take Python or NumPy values as constants,
    and each new one compiles again: give what changes, such as a time step, as a JAX scalar.  That is read when
    the kernel runs, also where it is traced, on the CPU alone: for a GPU make it a `warp.array` of shape (1,).

    Warp builds a whole module again for each new kernel: in generators, `warp.kernel(module="unique")` saves that.

    Args:
      kernel: a function decorated with `warp.kernel`; without it, `warp_kernel(outs=...)` is a decorator.
      outs: as for `numba_kernel`; a callable gets what the call got, values included.  A kernel that adds into an
        output says `zero_outputs=True`, or names it in `in_out_argnames`; if the launch is empty all are zero.
      launch_dims: the number of threads: an int, a tuple of up to 4, or a callable of the inputs; by default the shape
        of the kernel's first array (without the dimensions of its elements).  With `sharding_rule` not a number.
      block_dim: threads per block on a GPU; a block on the CPU has one.
      tiled: True for kernels whose blocks work on tiles, as `warp.launch_tiled` starts them: `launch_dims`, up
        to 3, counts blocks, of `block_dim` threads each.
      vmap_method, input_output_aliases, in_out_argnames, has_side_effect, scratch, zero_outputs, sharding_rule: as
        for `numba_kernel`.
      differentiable: True gives reverse mode through the kernel's own adjoint, for arrays of floats.

    Returns:
      A function whose result has the structure of `outs`.

    Raises:
      TypeError: arguments or parameters of a type that does not fit; a traced value with `differentiable`.
      ValueError: launch dimensions out of range; in-out arguments, aliases or scratch with `differentiable`.
      NotImplementedError: a traced value for a parameter passed by value, on a GPU.

    Example:
      >>> import jax.numpy as jnp, warp as wp
      >>> @wp.kernel
      ... def scale(x: wp.array(dtype=float), factor: float, out: wp.array(dtype=float)):
      ...     i = wp.tid()
      ...     out[i] = factor * x[i]
      >>> warp_kernel(scale, outs=lambda x, factor: x)(jnp.arange(3.0), 2.0).tolist()
      [0.0, 2.0, 4.0]
    """
    return _wrap(_warp_wrapper, locals(), _WarpOptions)


def _warp_wrapper(kernel: Any, options: _Options) -> _Wrapper:
    if getattr(kernel, "is_generic", False):
        return _GenericWarpKernel(kernel, options)
    return _WarpKernel(kernel, options)


class _WarpOptions(_Options):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.block_dim: int = self._checked_block_dim()
        if self.tiled and self.launch_dims is None:
            raise ValueError("tiled=True needs launch_dims, the number of blocks")
        if self.launch_dims is not None and not callable(self.launch_dims):
            self.checked_dims(self.launch_dims)
            if self.sharding_rule:
                raise ValueError(f"sharding_rule splits arrays, so launch_dims={self.launch_dims!r} must be a callable")
        if self.differentiable and (self.input_output_aliases or self.in_out_argnames or self.scratch is not None):
            raise ValueError(
                "differentiable=True does not go with in_out_argnames, input_output_aliases or scratch: the adjoint "
                "needs the values that a kernel overwrites; return what is in scratch as an output"
            )

    def _checked_block_dim(self) -> int:
        block_dim = vars(self)["block_dim"]
        try:
            n_threads = operator.index(block_dim)
        except TypeError:
            raise TypeError(f"block_dim must be an int, the threads of a block; got {block_dim!r}") from None
        if not 1 <= n_threads <= 1024:
            raise ValueError(f"block_dim must be 1 to 1024 threads; got {n_threads}")
        return n_threads

    def checked_dims(self, launch_dims: Any) -> tuple[int, ...]:
        """The dimensions of a launch; if it is tiled, followed by 1 for the threads of a block."""
        dims = _ints(launch_dims, f"launch_dims must be an int or a tuple of ints; got {launch_dims!r}")
        what = "tiled launch_dims" if self.tiled else "launch_dims"
        most = _WARP_MAX_DIMS - 1 if self.tiled else _WARP_MAX_DIMS
        if not 1 <= len(dims) <= most or min(dims) < 0 or max(dims) > _WARP_MAX_EXTENT:
            raise ValueError(f"{what} must be 1 to {most} numbers from 0 to {_WARP_MAX_EXTENT}; got {dims}")
        return (*dims, 1) if self.tiled else dims


class _GenericWarpKernel(_Wrapper):
    """A generic kernel: a call runs the instance for its dtypes, and `dtype=Any` may stand for vectors and matrices."""

    decorator = "warp_kernel"

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        arguments = dict(zip(self.parameters, args)) | named
        instance = self._instance(arguments)
        wrapper = self.variants.get(instance)
        if wrapper is None:
            wrapper = self.variants.keep(instance, _WarpKernel(instance, self.options))
        return wrapper(*args, **named)

    def _instance(self, arguments: Mapping[str, Any]) -> Any:
        """Warp's kernel for the types of these arguments, of the outputs and of scratch."""
        wp = _warp("warp_kernel")
        in_order = [arguments[name] for name in self.parameters if name in arguments]
        ins = [_spec_or_value(x, i) for i, x in enumerate(in_order)]
        outs, _ = _flat_specs(self._for_inputs("outs", ins), "outs")
        scratch, _ = _flat_specs(self._for_inputs("scratch", ins), "scratch")
        n_in_outs = len(self.options.in_out_argnames)
        values = [*ins, *outs[n_in_outs:], *scratch]
        kinds = [arg.type for arg in self.kernel.adj.args]
        if len(kinds) != len(values):
            raise TypeError(f"generic Warp kernel {self.__name__!r} takes {self.parameters}; this call gives {values}")
        instance_types = [_warp_instance_type(wp, kind, value) for kind, value in zip(kinds, values, strict=True)]
        return wp.overload(self.kernel, instance_types)


def _spec_or_value(value: Any, i: int) -> Any:
    """The spec of an array, or a value that is passed by value."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return _input_spec(value, i)
    if hasattr(value, "__jax_array__") or hasattr(value, "__dlpack__"):
        return _input_spec(_from_foreign(value, i, "warp_kernel"), i)
    return value


def _warp_instance_type(wp: Any, kind: Any, value: Any) -> Any:
    """The type of a parameter, for what a call gives where it is generic."""
    with contextlib.suppress(TypeError):
        _warp_param(wp, "", "", kind)
        return kind  # it is not generic
    if not isinstance(value, (Spec, np.generic)):
        return type(value)
    ndim = getattr(kind, "ndim", len(value.shape))
    element = jaxtype_to_warptype(value.dtype)
    inner = value.shape[ndim:]
    if len(inner) == 1:
        element = wp.types.vector(*inner, element)
    elif inner:
        element = wp.types.matrix(inner, element)
    return wp.array(dtype=element, ndim=ndim) if ndim else element


class _WarpBuffers(NamedTuple):
    """What the buffers of a call hold; buffers are numbers: inputs, then outputs."""

    params: Sequence[_WarpParam]  # the first buffers hold one of these each: its array, or its traced value
    n_args: int  # so many of them are inputs of the user's call
    adjoints: Mapping[_WarpParam, int] | None = None  # in an adjoint launch: the cotangent or gradient of a parameter


class _WarpKernel(_Wrapper):
    decorator = "warp_kernel"

    def __init__(self, kernel: Any, *args: Any) -> None:
        wp = _warp("warp_kernel")
        if not isinstance(kernel, wp.Kernel):
            raise _wrong_kernel("warp_kernel", "a function decorated with warp.kernel", kernel)
        self.params = [_warp_param(wp, kernel.func.__name__, arg.label, arg.type) for arg in kernel.adj.args]
        self.by_value = {param.name: param for param in self.params if not param.ndim}
        super().__init__(kernel, *args)
        self.title = f"Warp kernel {self.__name__!r}"
        self._name_aliases()
        self.static = copy.deepcopy(self.static)  # callables get it when a call is traced again: structs may change
        self._pack_constants()
        self._vjp = jax.custom_vjp(super()._trace)
        self._vjp.defvjp(self._forward, self._backward)

    def _name_aliases(self) -> None:
        """Aliases by the names of parameters: by position they count all arguments of a call, values too."""
        names = dict(enumerate(self.parameters))
        self.aliases = self._one_output_each((names.get(i, i), j) for i, j in self.aliases.items())
        self._check_names("input_output_aliases", list(self.aliases))

    def _pack_constants(self) -> None:
        """The memory of the values, which ends the attribute `launch`, and where each begins there."""
        self.constants = b""
        self.constant_offsets: dict[str, int] = {}
        for name, param in self.by_value.items():
            if name in self.static:
                packed = param.pack(self.static[name])
                self.constant_offsets[name] = ctypes.sizeof(_WarpLaunch) + len(self.constants)
                self.constants += packed + bytes(-len(packed) % 8)

    # -- from a call to its inputs: values, and None for an array, are static --------------------------

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        has_null_arrays = any(x is None for x in args)
        if not named and not self.by_value and not has_null_arrays:
            return self._call_inputs(args)
        arguments = dict(zip(self.parameters, args)) | named
        count = len(args) + len(named)
        are_the_first = len(arguments) == count and arguments.keys() == {*self.parameters[:count]}
        if not are_the_first or not self.by_value.keys() <= arguments.keys():
            raise self._wrong_arity(f"{len(args)} arguments by position and {', '.join(named) or 'none'} by keyword")
        return self._call_by_name((), {name: self._as_value(name, x) for name, x in arguments.items()})

    def _is_input(self, name: str, value: Any) -> bool:
        if name in self.by_value:
            return isinstance(value, jax.Array)
        return value is not None

    def _as_value(self, name: str, value: Any) -> Any:
        """The argument; for a by-value parameter JAX's values get its dtype, and those on a GPU become NumPy's."""
        param = self.by_value.get(name)
        if param is None or not isinstance(value, jax.Array):
            return value
        is_traced = isinstance(value, jax.core.Tracer)
        if not is_traced and any(device.platform != "cpu" for device in value.devices()):
            return np.asarray(value)
        fits = param.takes(value) and _allowed_dtype(param.dtype, [value]) == param.dtype
        if self.options.differentiable or not fits:
            why = "differentiable=True needs a Python value, and so do 64 bits without jax_enable_x64"
            raise TypeError(f"{param.by_value_text}; got {value}: make it a warp.array of shape (1,) ({why})")
        return value if value.dtype == param.dtype else value.astype(param.dtype)

    def _static_key(self, static: Mapping[str, Any]) -> Any:
        key = dict.fromkeys(static)  # None for null arrays
        for name, param in self.by_value.items():
            if name in static:
                key[name] = type(static[name]), param.pack(static[name])  # functions such as `outs` get it as it is
        return frozenset(key.items())

    def _option_arguments(self, option: Callable[..., Any], ins: Sequence[Spec]) -> tuple[Sequence[Any], dict]:
        """All that the call got, values included."""
        specs = iter(ins)
        names = self.parameters[: len(ins) + len(self.static)]
        return [self.static[name] if name in self.static else next(specs) for name in names], {}

    def _wrong_arity(self, what_it_got: str) -> TypeError:
        return TypeError(
            f"{self.title} takes the parameters ({', '.join(self.parameters)}): inputs and values, "
            f"then outputs and scratch; this call gives it {what_it_got}"
        )

    # -- from a call to a target -----------------------------------------------------------------------

    def _find_target(self, call: _Call) -> _Target:
        n_arguments = len(call.ins) + len(self.static)
        if len(self.params) != n_arguments + len(call.outs) - len(self.in_outs):
            raise self._wrong_arity(
                f"{n_arguments} inputs and {len(call.outs)} outputs (in-out arguments count as both)"
            )
        inputs = [param for param in self.params[:n_arguments] if param.name not in self.static]
        in_outs = [param for param in inputs if param.name in self.in_outs]
        params = [*inputs, *in_outs, *self.params[n_arguments:]]  # of each buffer
        for param, spec in zip(params, call.ins + call.outs, strict=True):
            param.check(spec)
        for i, param in enumerate(inputs):
            if i not in call.aliases and param.use(self.kernel) == _WRITES_BY_NAME:
                raise TypeError(
                    f"{self.title} writes to its input {param.name!r}, which JAX may share: name it "
                    "in in_out_argnames, or write to an output"
                )
        return self._target(call, _WarpBuffers(params, len(call.ins)))

    def _target(self, call: _Call, buffers: _WarpBuffers) -> _Target:
        """What launches the kernel, or its adjoint, on these buffers."""
        with _warp_session() as wp:
            content = (wp.__version__, _settings(wp.config), *_warp_content(self.kernel))
        plan = self._plan(call, buffers)
        signature = call.signature(self.__name__).with_hidden(plan.may_write)
        launched = tuple(argument[1:] for argument in plan.arguments)
        name = self._target_name(_digest("warp", plan.block_dim, plan.in_order, launched, str(signature), *content))
        compilers = {"cpu": functools.partial(_compile_warp, plan, signature)}
        where = "runs on CPUs and NVIDIA GPUs"
        traced = [param.name for param in buffers.params if not param.ndim]
        if traced:  # a launch on a GPU takes values from the host
            where = f"has traced values for {traced}, which only CPUs take; make each a warp.array of shape (1,)"
        else:
            compilers["cuda"] = functools.partial(_compile_warp, plan, signature, on_gpu=True)
        launch = self._launch(call, buffers)
        target = _Target(name, launch, plan.may_write, compilers=compilers, title=self.title, where=where)
        target.register_where_traced()
        is_batched = buffers.adjoints is None and not plan.in_order and _cuda_ordinals() and _has_short_strides(call)
        if traced or not is_batched:
            return target
        batch_compilers = compilers | {"cuda": functools.partial(compilers["cuda"], batch_of=content[2:])}
        for_batches = dataclasses.replace(target, name=f"{name}.batched", compilers=batch_compilers)
        return dataclasses.replace(target, for_batches=for_batches)

    def _plan(self, call: _Call, buffers: _WarpBuffers) -> _WarpPlan:
        numbers = {param: k for k, param in enumerate(buffers.params)}
        adjoints = buffers.adjoints or {}
        arguments = []
        for param in self.params:
            constant = self.constant_offsets.get(param.name)
            arguments.append(_WarpArgument(param, numbers.get(param), adjoints.get(param), constant))
        is_adjoint = buffers.adjoints is not None
        if is_adjoint:
            arguments += [_WarpArgument(param, adjoints.get(param)) for param in self.params]
        may_write = []
        for k, param in enumerate(buffers.params[: len(call.ins)]):
            if param.use(self.kernel, is_adjoint) != _ONLY_READS:
                may_write.append(k)
        return _WarpPlan(self.kernel, tuple(arguments), self.options.block_dim, tuple(may_write), self.options.in_order)

    def _launch(self, call: _Call, buffers: _WarpBuffers) -> tuple[int, ...]:
        """The attribute `launch` of a call."""
        launch_dims = self._for_inputs("launch_dims", call.ins[: buffers.n_args])
        if launch_dims is None:
            specs = zip(buffers.params, call.ins + call.outs)
            shapes = [param.dims(spec.shape) for param, spec in specs if param.ndim]
            launch_dims = shapes[0] if shapes else ()
        dims = self.options.checked_dims(launch_dims)
        block_dim = self.options.block_dim
        gpu_dims = (*dims[:-1], block_dim) if self.options.tiled else dims
        has_grid_stride = getattr(self.kernel, "grid_stride", True)  # known once the content is; False since Warp 1.15
        grid = _warp_grid(self.title, math.prod(gpu_dims), block_dim, has_grid_stride)
        cuda = grid, (block_dim, 1, 1), 0
        launch = _WarpLaunch(cuda, _warp_extents(gpu_dims), _warp_extents(dims))
        return tuple(memoryview(bytes(launch) + self.constants).cast("q"))

    # -- derivatives -----------------------------------------------------------------------------------

    def _trace(self, *args: Any) -> Any:
        if self.options.differentiable:
            return self._vjp(*_make_varying(args))
        return super()._trace(*args)

    def _forward(self, *args: Any) -> tuple[Any, Any]:
        results = super()._trace(*args)
        return results, (args, jax.tree_util.tree_leaves(results))

    def _backward(self, residuals: Any, cotangents: Any) -> tuple:
        """One adjoint launch: (inputs, outputs, cotangents) -> (cotangents, which Warp may change, and gradients).

        Cotangents and gradients are those of floats; `owners` has the number of the operand that each belongs to.
        """
        args, outs = residuals
        n_args = len(args)
        float_ins = _floats(args)
        float_outs = _floats(outs)
        leaves = jax.tree_util.tree_leaves(cotangents)
        operands = _make_varying([*args, *outs, *(leaves[j] for j in float_outs)])
        owners = [n_args + j for j in float_outs] + float_ins
        specs = _input_specs(operands)
        rule = self.rule and self.rule.adjoint(float_ins, float_outs)

        def resolve(wrapper: _WarpKernel, ins: list[Spec], results: list[Spec]) -> _Call:
            return wrapper._resolve_adjoint(ins, results, n_args, owners)

        results = self._bind(resolve, operands, [specs[k] for k in owners], rule)
        gradients = results[len(float_outs) :]
        cotangents_of_args: list[Any] = [None] * n_args  # a zero, for JAX
        for i, gradient in zip(float_ins, gradients, strict=True):
            cotangents_of_args[i] = _sharded_like(gradient, jax.typeof(args[i]))
        return tuple(cotangents_of_args)

    def _resolve_adjoint(self, ins: list[Spec], results: list[Spec], n_args: int, owners: list[int]) -> _Call:
        """The call of the adjoint on these operands; results are cotangents, and zeros that gradients add to."""
        params = [param for param in self.params if param.name not in self.static]  # of inputs and outputs
        adjoints = {params[owner]: len(ins) + k for k, owner in enumerate(owners)}
        n_cotangents = len(ins) - len(params)
        aliases = {len(params) + k: k for k in range(n_cotangents)}
        call = _Call(ins, results, aliases, zeroed=tuple(range(n_cotangents, len(results))))
        return call.run_by(self._target(call, _WarpBuffers(params, n_args, adjoints)))


def _floats(arrays: Sequence[Any]) -> list[int]:
    """The numbers of those that are of floats."""
    return [k for k, x in enumerate(arrays) if jax.dtypes.issubdtype(x.dtype, np.floating)]


def _has_short_strides(call: _Call) -> bool:
    """Whether Warp can count the bytes from one slice of a batch to the next."""
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in call.ins + call.outs]
    return max(sizes, default=0) <= _WARP_MAX_EXTENT


# -- 11.2 Warp itself: import, silence, types ----------------------------------------------------------
# What differs between Warp's versions names the version, here and in 11.3; `_warp_layout` looks at what Warp does.
# Checked on 1.13, 1.15, 1.18 and 1.19.


def _warp(user: str, module: str = "warp") -> Any:
    return _import(module, user, _WARP_INSTALL)


@contextlib.contextmanager
def _warp_session() -> Iterator[Any]:
    """Warp, initialized, silent unless the user raised the verbosity, and locked, as loading modules is not safe."""
    wp = _warp("warp_kernel")
    with _LOCK:
        if hasattr(wp.config, "log_level"):  # Warp >= 1.14; touching `quiet` there prints a deprecation
            setting = "log_level"
            silent = max(wp.config.log_level, 30)
            is_verbose = wp.config.log_level < 20
        else:
            setting = "quiet"
            silent = True
            is_verbose = wp.config.verbose
        before = getattr(wp.config, setting)
        try:
            setattr(wp.config, setting, before if is_verbose else silent)
            wp.init()
            yield wp
        finally:
            setattr(wp.config, setting, before)


def _warp_scalars(wp: Any) -> dict[np.dtype, Any]:
    """NumPy dtype -> Warp scalar type, for those that the installed Warp has."""
    return {np.dtype(name): getattr(wp, name) for name in _WARP_DTYPES if hasattr(wp, name)}


def jaxtype_to_warptype(dtype: Any) -> Any:
    """The Warp scalar type of what NumPy reads as a dtype; a ValueError for one that the installed Warp lacks."""
    scalars = _warp_scalars(_warp("jaxtype_to_warptype"))
    try:
        return scalars[np.dtype(dtype)]
    except (KeyError, TypeError):
        names = ", ".join(key.name for key in scalars)
        raise ValueError(f"Warp has no scalar type for dtype {dtype!r}; it has {names}") from None


def jaxinfo_to_warpinfo(info: Any) -> Any:
    """The Warp array type, for annotations, of anything with `.dtype` and a `.shape` of 1 to 4 dimensions (ValueError).

    Example:
      >>> jaxinfo_to_warpinfo(np.ones((3, 4), np.float32)).ndim
      2
    """
    ndim = len(info.shape)
    if not 1 <= ndim <= _WARP_MAX_DIMS:
        hint = "; reshape it to (1,)" if ndim == 0 else ""
        raise ValueError(f"Warp arrays have 1 to {_WARP_MAX_DIMS} dimensions; got {ndim} in {_show(info)}{hint}")
    wp = _warp("jaxinfo_to_warpinfo")
    return wp.array(dtype=jaxtype_to_warptype(info.dtype), ndim=ndim)


def _warp_interop(name: str) -> Any:
    wp = _warp(name)
    if hasattr(wp, name):
        return getattr(wp, name)
    return getattr(_warp(name, "warp.jax_experimental.ffi"), name)  # before Warp 1.14


def jax_kernel(*args: Any, **options: Any) -> Any:
    """Warp's own `jax_kernel`, from wherever the installed Warp keeps it."""
    return _warp_interop("jax_kernel")(*args, **options)


def jax_callable(*args: Any, **options: Any) -> Any:
    """Warp's own `jax_callable`, from wherever the installed Warp keeps it."""
    return _warp_interop("jax_callable")(*args, **options)


# -- 11.3 The parameters of a kernel, and its content --------------------------------------------------
# Knows types and values.  Does not know calls.


@dataclasses.dataclass(frozen=True)
class _WarpParam:
    """One parameter: an array of `ndim` dimensions, or what is passed by value (`ndim` is 0)."""

    kernel: str
    name: str
    type: Any = dataclasses.field(compare=False)
    dtype: np.dtype | None  # of the scalars; None for a struct
    inner: tuple[int, ...]  # the shape of one element: () for scalars, (3,) for vec3
    ndim: int

    @property
    def nbytes(self) -> int:
        """The size of a value, or of one array element."""
        if self.dtype is None:
            return ctypes.sizeof(self.type.ctype)
        return self.dtype.itemsize * math.prod(self.inner)

    def dims(self, shape: Sequence[Any]) -> Sequence[Any]:
        """The dimensions of an array without those of its elements; an array of one element may lack dimensions."""
        outer = shape[: len(shape) - len(self.inner)]
        missing = [1] * (self.ndim - len(outer))
        return (*outer, *missing)

    @property
    def by_value_text(self) -> str:
        return f"Warp kernel {self.kernel!r}: parameter {self.name!r} ({self}) is passed by value"

    def __str__(self) -> str:
        scalar = self.dtype.name if self.dtype else f"struct {self.type.key}"
        dims = [":"] * self.ndim + [str(n) for n in self.inner]
        return f"{scalar}[{','.join(dims)}]" if dims else scalar

    def takes(self, array: Any) -> bool:
        """Whether an array can be given by value: of the right shape, and integers for integers and booleans."""
        if self.dtype is None or array.shape != self.inner:
            return False
        kinds = "biu" if self.dtype.kind in "biu" else "biuf"
        return array.dtype == self.dtype or array.dtype.kind in kinds

    def pack(self, value: Any) -> bytes:
        """The memory of a value."""
        refused = f"{self.by_value_text}; got {type(value).__name__} {value!r:.80}"
        if self.dtype is None:
            if not isinstance(getattr(value, "_ctype", None), self.type.ctype):
                raise TypeError(f"{refused}, not an instance of that struct")
            return bytes(value.__ctype__())
        if isinstance(value, self.type) and isinstance(value, ctypes.Array):
            return bytes(value)
        array = np.asarray(getattr(value, "value", value))  # Warp's scalars keep theirs in `value`
        if not self.takes(array):
            raise TypeError(refused)
        packed = array.astype(self.dtype)
        if packed.dtype.kind in "biu" and (packed != array).any():
            raise ValueError(f"{self.by_value_text}; {value!r:.80} is out of its range")
        return packed.tobytes()

    def check(self, spec: Spec) -> None:
        """Raise if an array of this spec cannot be the argument."""
        if not self.ndim:
            return
        what = f"Warp kernel {self.kernel!r}: argument {self.name!r} is a warp.array, {self} for JAX; got {_show(spec)}"
        if spec.dtype != self.dtype:
            raise TypeError(f"{what}: wrong dtype; {self._dtype_hint(spec)}")
        is_one_element = spec.shape == self.inner
        if len(spec.shape) != self.ndim + len(self.inner) and not is_one_element:
            raise TypeError(f"{what}: wrong number of dimensions")
        if self.inner and spec.shape[-len(self.inner) :] != self.inner:
            raise TypeError(f"{what}: wrong inner dimensions, which hold the elements of the vector or matrix")
        if not all(isinstance(n, int) for n in spec.shape):
            raise NotImplementedError(f"{what}: a launch has known dimensions; export a program for each shape")
        first_stride = math.prod(spec.shape[1:]) * spec.dtype.itemsize
        if max(1, *spec.shape, first_stride) > _WARP_MAX_EXTENT:
            raise ValueError(f"{what}: Warp counts extents and strides in 32 bits, at most {_WARP_MAX_EXTENT}")

    def _dtype_hint(self, spec: Spec) -> str:
        if np.dtype(spec.dtype).itemsize == 4 and str(self.dtype).endswith("64"):
            return f"JAX keeps 64 bits `with jax.enable_x64(True): x = jnp.asarray(x, jnp.{self.dtype})`"
        return "cast it, or annotate the parameter with jaxinfo_to_warpinfo(x)"

    def use(self, kernel: Any, adjoint: bool = False) -> int:
        """What a kernel, or its adjoint, does to it, as `_WarpUses` says."""
        if not self.ndim:
            return _ONLY_READS
        replayed = kernel.adj if adjoint else None
        return _WarpUses(replayed).of(kernel.adj, self.name, self.ndim)


def _warp_param(wp: Any, kernel: str, name: str, kind: Any) -> _WarpParam:
    scalars = {scalar: dtype for dtype, scalar in _warp_scalars(wp).items()}
    scalars |= {float: np.dtype("float32"), int: np.dtype("int32"), bool: np.dtype("bool")}
    scalars[wp.handle] = np.dtype("uint64")
    is_array = isinstance(kind, wp.array) or getattr(kind, "_concrete_cls", None) is wp.array
    element = kind.dtype if is_array else kind
    dtype = scalars.get(getattr(element, "_wp_scalar_type_", element))
    is_struct = not is_array and hasattr(element, "ctype") and hasattr(element, "vars")
    if dtype is None and (not is_struct or _holds_arrays(element)):
        raise TypeError(
            f"Warp kernel {kernel!r}: parameter {name!r} is {kind!r}; supported are scalars, vectors and matrices, "
            "arrays of those, and structs without arrays; of an array of structs make one array for each field"
        )
    inner = tuple(getattr(element, "_shape_", ()))
    return _WarpParam(kernel, name, kind, dtype, inner, kind.ndim if is_array else 0)


def _holds_arrays(kind: Any) -> bool:
    fields = getattr(kind, "vars", {}).values()
    return hasattr(kind, "ndim") or any(_holds_arrays(field.type) for field in fields)


def _warp_content(kernel: Any) -> tuple[str, str]:
    """What defines a kernel: Warp's hash (code, constants, functions, structs, types) and the options of its build."""

    def read() -> str:
        kernel.module.get_module_hash()  # also hashes the kernels
        return kernel.hash.hex()  # an AttributeError if another thread was faster

    options = {**kernel.module.options, **kernel.options, "block_dim": None}  # Warp 1.13 keeps the last launch's there
    return _despite_changes(kernel, read), str(sorted(options.items()))


def _despite_changes(kernel: Any, action: Callable[[], Any]) -> Any:
    """`action()`, again if another thread was adding a kernel to the module, which Warp does not guard against."""
    for attempt in itertools.count(1):
        try:
            return action()
        except Exception as error:
            for adjoint in _warp_adjoints(kernel.adj):
                adjoint.skip_build = False  # or Warp < 1.19 builds nothing from now on, silently
            kernel.module.mark_modified()
            is_race = type(error) in (AttributeError, KeyError, FileNotFoundError)  # Warp's own errors are subclasses
            is_race = is_race or "changed size during iteration" in str(error)
            if attempt == 10 or not is_race:
                if kernel.generic_parent:  # else the builds of its other instances fail
                    kernel.generic_parent.overloads.pop(kernel.sig, None)
                raise


def _warp_adjoints(adjoint: Any) -> list[Any]:
    """Warp's record of a kernel's code, and those of the functions that it may call."""
    return [adjoint, *(function.adj for function in _warp_functions(adjoint) if not function.is_builtin())]


def _warp_functions(adjoint: Any) -> list[Any]:
    """The functions that code names, Warp's own and all overloads of the users', and those that these name."""
    functions: list[Any] = []
    codes = [adjoint]  # grows by theirs
    for code in codes:
        for node in ast.walk(code.tree):
            named = None
            if isinstance(node, (ast.Name, ast.Attribute)):
                named = code.resolve_static_expression(node, eval_types=False)[0]
            for function in _overloads(named) if hasattr(named, "is_builtin") else []:
                if function not in functions:
                    functions.append(function)
                    codes += [] if function.is_builtin() else [function.adj]
    return functions


def _overloads(function: Any) -> list[Any]:
    if function.is_builtin():
        return [function]
    return [*function.user_overloads.values(), *function.user_templates.values()]


# What a kernel's code does to an array, as far as its syntax shows.  Warp marks what is written, too, but not for a
# cached binary, and it misses other names, C, tiles and views that functions return.
_ONLY_READS = 0
_MAY_WRITE = 1  # then the kernel gets a copy, where others need the array
_WRITES_BY_NAME = 2  # by the name of the parameter, which is refused for an input


@functools.lru_cache(maxsize=64)
def _parents(tree: Any) -> dict[Any, Any]:
    """What each node of a syntax tree is a part of."""
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


class _WarpUses:
    """A walk from the name of an array over all that is done to it, to views of it, and to its other names.

    Each use counts by the expression around it:
      a store to an element or a part     writes by name
      an index or a slice                 what is done to the view; an element only reads, unless a function gets it
      a property, such as `x.shape`       only reads
      an argument of a built-in function  writes by name, or only reads, if the function is known to
      an argument of a user's function    what the function does to its parameter, at most "may write"
      another name                        what is done under that name, at most "may write"
      anything else                       may write
    The worst use counts.  So "only reads" is what each use is known to do.
    """

    # `replayed` is the kernel whose adjoint is asked about: that runs its code again without its stores, but with those
    # of the functions that it calls.
    def __init__(self, replayed: Any = None) -> None:
        self.replayed = replayed
        self.seen = set[tuple]()

    def of(self, adjoint: Any, name: str, ndim: int) -> int:
        """The worst of the uses of `name`, of `ndim` dimensions; `adjoint` is Warp's record of the code."""
        key = id(adjoint), name, ndim
        if key in self.seen:
            return _ONLY_READS  # unless another use does more
        self.seen.add(key)
        names = [node for node in _parents(adjoint.tree) if isinstance(node, ast.Name) and node.id == name]
        worst = _ONLY_READS
        most = _WRITES_BY_NAME
        for node in names:
            if isinstance(node.ctx, ast.Load):
                worst = max(worst, self._of_node(adjoint, node, ndim))
            else:
                most = _MAY_WRITE  # the name may stand for another array
        return min(worst, most)

    def _of_node(self, adjoint: Any, node: Any, ndim: int) -> int:
        """What is done to an expression: to the array, a view of so many dimensions, or (0 or less) an element."""
        parents = _parents(adjoint.tree)
        user = parents[node]
        while isinstance(user, (ast.Subscript, ast.Attribute)) and user.value is node:  # x[...] or x.name
            if not isinstance(user.ctx, ast.Load) and adjoint is not self.replayed:
                return _WRITES_BY_NAME
            if isinstance(user, ast.Subscript):
                indices = user.slice.elts if isinstance(user.slice, ast.Tuple) else [user.slice]
                ndim -= sum(not isinstance(index, ast.Slice) for index in indices)
            elif ndim > 0:
                return _ONLY_READS if user.attr in _WARP_PROPERTIES else _MAY_WRITE
            node = user
            user = parents[node]
        targets: list[Any] = getattr(user, "targets", [])  # of an assignment
        if targets and ndim > 0 and all(isinstance(name, ast.Name) for name in targets):
            worst = max(self.of(adjoint, name.id, ndim) for name in targets)
            return min(worst, _MAY_WRITE)
        if isinstance(user, ast.keyword):
            return self._of_argument(adjoint, parents[user], user.arg, ndim)
        if isinstance(user, ast.Call) and node in user.args:
            return self._of_argument(adjoint, user, user.args.index(node), ndim)
        return _MAY_WRITE if ndim > 0 or isinstance(user, ast.Call) else _ONLY_READS

    def _of_argument(self, adjoint: Any, call: ast.Call, position: Any, ndim: int) -> int:
        """What a call does to an argument, given by its position or keyword."""
        function = adjoint.resolve_static_expression(call.func, eval_types=False)[0]
        if not hasattr(function, "user_overloads") or function.is_builtin():
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if position == 0 and _WARP_WRITERS.fullmatch(name):
                return _WRITES_BY_NAME
            return _MAY_WRITE if ndim > 0 and name not in _WARP_READERS else _ONLY_READS
        is_parameter = any(arg.label == getattr(call.func, "id", None) for arg in adjoint.args)
        if is_parameter or any(isinstance(arg, ast.Starred) for arg in call.args):
            return _MAY_WRITE
        worst = _ONLY_READS
        for overload in self._codes(function):
            for k, arg in enumerate(overload.adj.args):
                if position in (k, arg.label):
                    is_reference = hasattr(arg.type, "value_type")  # a wp.ref
                    is_known = not overload.native_snippet and not is_reference
                    worst = max(worst, self.of(overload.adj, arg.label, ndim) if is_known else _MAY_WRITE)
        return min(worst, _MAY_WRITE)

    def _codes(self, function: Any) -> list[Any]:
        """All that may run for a call of a function."""
        codes = _overloads(function)
        if self.replayed:
            for overload in _overloads(function):
                codes += [code for code in (overload.custom_replay_func, overload.custom_grad_func) if code]
        return codes


# -- 11.4 One target: what a launch is given, and its recording ----------------------------------------
# Knows how Warp records a launch.  Does not run it.


class _WarpArgument(NamedTuple):
    """What a launch passes for a parameter, or as its adjoint; buffers are numbers: inputs, then outputs."""

    param: _WarpParam
    buffer: int | None  # of an array, or of a traced value
    grad: int | None = None  # in an adjoint launch, the buffer where views of this array find its gradient
    constant: int | None = None  # where a value that is not traced starts in the attribute `launch`

    @property
    def is_array(self) -> bool:
        """Else it is a null array, or passed by value."""
        return self.param.ndim > 0 and self.buffer is not None

    def source(self, arrays: Any, attribute: Any) -> Any:
        """The address of what is passed by value, None for arrays and for the adjoint of a value."""
        if self.param.ndim:
            return None
        if self.buffer is not None:
            return arrays[self.buffer].pointer
        return None if self.constant is None else attribute + self.constant

    @property
    def nbytes(self) -> int:
        return ctypes.sizeof(_WarpArray) if self.param.ndim else self.param.nbytes


@dataclasses.dataclass(frozen=True)
class _WarpPlan:
    """How a target runs a kernel: forward or, where the arguments are followed by their adjoints, backward."""

    kernel: Any
    arguments: tuple[_WarpArgument, ...]
    block_dim: int
    may_write: tuple[int, ...]  # the inputs that the launch is not seen to only read
    in_order: bool  # on the CPU, the slices of a batch
    n_indices: int = 0  # of a kernel for batches: those of a thread in its slice

    def array(self, argument: _WarpArgument, arrays: Any, device: Any) -> Any:
        """Warp's array over the buffer of an argument, with its gradient."""
        grad = None
        if argument.grad is not None:
            grad = self.array(_WarpArgument(argument.param, argument.grad), arrays, device)
        dims = argument.param.dims(arrays[argument.buffer].dims)
        pointer = arrays[argument.buffer].pointer if math.prod(dims) else 0
        dtype = argument.param.type.dtype
        return _warp("warp_kernel").array(ptr=pointer, shape=tuple(dims), dtype=dtype, device=device, grad=grad)

    @property
    def stand_ins(self) -> dict[int, _Array]:
        """The arrays of a recorded launch, by buffer: two elements along each dimension."""
        arrays = {}
        for param, buffer, *_ in self.arguments:
            if param.ndim and buffer is not None:
                arrays[buffer] = _Array(4096 * (buffer + 1), [*[2] * param.ndim, *param.inner], [], param.nbytes)
        return arrays

    def _recorded_value(self, argument: _WarpArgument, device: str) -> Any:
        """A stand-in: of an array, None for a null array, or zeros by value."""
        param = argument.param
        if argument.is_array:
            return self.array(argument, self.stand_ins, device)
        return None if param.ndim else param.type()

    def record(self, device: str) -> Any:
        """Warp's recorded launch, with stand-ins for arrays and values; compiles and loads the kernel."""
        with _warp_session() as wp:
            if device == "cpu" and not wp.is_cpu_available():
                raise ImportError("Warp cannot compile for CPUs here: it was installed without its library warp-clang")
            values = [self._recorded_value(argument, device) for argument in self.arguments]
            n = len(self.kernel.adj.args)
            options = {
                "adj_inputs": values[n:],
                "adjoint": len(values) > n,
                "device": device,
                "block_dim": 1 if device == "cpu" else self.block_dim,
                "record_cmd": True,
            }
            launch = functools.partial(wp.launch, self.kernel, _STAND_IN_DIMS, values[:n], **options)
            try:
                recorded = _despite_changes(self.kernel, launch)
            except RuntimeError as error:
                if "backward kernel" in str(error):
                    error.add_note("differentiable=True needs enable_backward=True, in warp.config too")
                raise
            if recorded is None:  # some Warps report a failed build once only
                raise RuntimeError(f"Warp cannot build kernel {self.kernel.key!r}: see its first error, or its log")
            return recorded

    def record_all(self, driver: _CudaDriver | None) -> dict[int, Any]:
        """Warp's recorded launch for each device, by CUDA ordinal; 0 is the CPU."""
        if driver is None:
            return {0: self.record("cpu")}
        with driver.keeping_context():  # Warp leaves another one current
            return {n: self.record(f"cuda:{n}") for n in _cuda_ordinals()}


# -- 11.5 What a launch passes, and native launches ----------------------------------------------------
# Knows the memory of Warp's structs, as long as it is what Warp packs.  Does not call Python.
#
# Warp packs the parameters of a launch into blocks of memory: first the bounds of the launch, then an `array_t` or the
# value of each parameter.  No header of Warp promises how, so it is tried out: a launch is recorded with arrays whose
# addresses and dimensions are known, and what a handler would write is compared with what Warp packed, byte by byte.
# If they are equal, on each device alike, handlers write the blocks themselves and start the kernel's machine code.
# If they are not, as with a later Warp, or the launch does more than start a kernel (a deterministic one allocates, and
# clusters have a launch of their own), Python replays what Warp recorded: 11.6.


@functools.cache
def _flat(kind: Any) -> Any:
    """A struct without arrays: a field that is one becomes as many, `shape_0` and so on."""
    fields: dict[str, Any] = {}
    for name, field in kind._fields_:
        if issubclass(field, ctypes.Array):
            fields |= {f"{name}_{i}": field._type_ for i in range(field._length_)}
        else:
            fields[name] = field
    return _struct(kind.__name__, **fields)


_I32_ROW = _I32 * _WARP_MAX_DIMS
_WarpArray = _flat(  # array_t of warp/native/array.h
    _struct("_WarpArray", data=_PTR, grad=_PTR, shape=_I32_ROW, strides=_I32_ROW, ndim=ctypes.c_uint16)
)
_StructAt = Callable[[Any, int], Any]  # (kind, offset) -> the struct there, in the memory of a launch


@dataclasses.dataclass(frozen=True)
class _WarpLayout:
    """The memory of a launch: its blocks, one behind the other."""

    # On a GPU each block holds one argument or adjoint; on the CPU one holds all arguments, and one all adjoints.
    bounds: Any  # the struct in the first block
    blocks: tuple[int, ...]  # where each block begins, and where the last one ends
    arguments: tuple[int, ...]  # where each argument is, then each adjoint

    def write_bounds(self, struct_at: _StructAt, dims: Sequence[Any], ndim: Any, size: Any) -> None:
        """The bounds of a launch, as `_WarpExtents` has them."""
        kind = _flat(self.bounds)
        numbers = {f"shape_{axis}": n for axis, n in enumerate(dims)}
        dropped = [n for name, n in numbers.items() if not hasattr(kind, name)]  # threads along these share coordinates
        numbers |= {"ndim": ndim, "size": size, "coord_mult": math.prod(dropped)}
        bounds = struct_at(kind, 0)
        for name, number in numbers.items():
            if hasattr(kind, name):
                setattr(bounds, name, number)

    def write_arrays(self, struct_at: _StructAt, plan: _WarpPlan, arrays: Any) -> None:
        """The arrays of one slice, given by buffer; the dimensions of elements come last, uncounted."""
        for argument, offset in zip(plan.arguments, self.arguments, strict=True):
            param = argument.param
            if not param.ndim:
                continue
            struct = struct_at(_WarpArray, offset)
            struct.ndim = param.ndim  # all that a null array has
            if argument.grad is not None:
                struct.grad = arrays[argument.grad].pointer
            if argument.is_array:
                array = arrays[argument.buffer]
                struct.data = array.pointer
                dims = param.dims(array.dims)
                for axis, (n, stride) in enumerate(zip(dims, _row_major(dims, param.nbytes), strict=True)):
                    setattr(struct, f"shape_{axis}", n)
                    setattr(struct, f"strides_{axis}", stride)


def _warp_layout(plan: _WarpPlan, launches: Iterable[Any], on_cpu: bool) -> _WarpLayout | None:
    """The layout of what the recorded launches pass; None unless it is known, and the same on all devices."""
    layouts = {_layout_of(plan, launch, on_cpu) for launch in launches}
    return layouts.pop() if len(layouts) == 1 else None


def _layout_of(plan: _WarpPlan, launch: Any, on_cpu: bool) -> _WarpLayout | None:
    is_plain = type(launch).__name__ == "Launch" and getattr(launch, "cluster_dim", 1) == 1
    if not is_plain:
        return None
    blocks = _warp_cpu_blocks(launch) if on_cpu else launch.params
    memory = [_padded(bytes(block)) for block in blocks]
    starts = list(itertools.accumulate(map(len, memory), initial=0))
    places = _argument_places(starts, blocks, on_cpu)
    if [size for _, size in places] != [argument.nbytes for argument in plan.arguments]:
        return None
    layout = _WarpLayout(type(blocks[0]), tuple(starts), tuple(offset for offset, _ in places))
    is_known = {name for name, _ in layout.bounds._fields_} <= {"shape", "ndim", "size", "coord_mult"}
    return layout if is_known and _written_memory(layout, plan) == b"".join(memory) else None


def _argument_places(starts: Sequence[int], blocks: Sequence[Any], on_cpu: bool) -> list[tuple[int, int]]:
    """Offset and size of each argument, then of each adjoint."""
    places = []
    for start, block in zip(starts[1:], blocks[1:]):
        if not on_cpu:
            places.append((start, ctypes.sizeof(block)))
            continue
        for name, *_ in block._fields_:
            field = getattr(type(block), name)
            places.append((start + field.offset, field.size))
    return places


def _padded(memory: bytes) -> bytes:
    """As long as whole words."""
    return memory + bytes(-len(memory) % 8)


def _written_memory(layout: _WarpLayout, plan: _WarpPlan) -> bytearray:
    """What a handler would pass for the recorded launch, whose values are zeros."""
    memory = bytearray(layout.blocks[-1])

    def struct_at(kind: Any, offset: int) -> Any:
        return kind.from_buffer(memory, offset)

    layout.write_bounds(struct_at, *_warp_extents(_STAND_IN_DIMS))
    layout.write_arrays(struct_at, plan, plan.stand_ins)
    return memory


def _warp_cpu_blocks(launch: Any) -> list[Any]:
    """The structs whose addresses a recorded launch on the CPU passes: it is run, with nothing behind it."""
    passed: list[Any] = []

    def run_nothing(*args: Any) -> None:
        passed.extend(args)

    hooks = launch.hooks
    launch.hooks = types.SimpleNamespace(forward=run_nothing, backward=run_nothing)
    try:
        launch.launch()
    finally:
        launch.hooks = hooks
    return [getattr(arg, "_obj", arg) for arg in passed]  # of pointers made by ctypes.byref


class _WarpCode:
    """A kernel that is loaded on each device, and how a handler starts it."""

    def __init__(self, label: str, plan: _WarpPlan, driver: _CudaDriver | None) -> None:
        self.plan = plan
        self.driver = driver
        self.launches = plan.record_all(driver)  # which keep Warp's modules loaded
        self.layout: Any = _warp_layout(plan, self.launches.values(), on_cpu=driver is None)
        self.entries = {n: _warp_entry(launch) for n, launch in self.launches.items()}
        self.launcher = _CudaLauncher(label, driver, self.entries) if driver else None

    def extents(self, launch: Any) -> Any:
        """Those of the attribute `launch`."""
        return launch.on_gpu if self.driver else launch.on_cpu

    def launch_in(self, handler: _Handler) -> Callable[..., None]:
        """What writes a launch with blocks of memory at some addresses; on a GPU, of so many blocks along x."""
        if self.launcher:
            return self.launcher.launch_in(handler)
        entry, _ = self.entries[0]

        def launch(blocks: Sequence[Any]) -> None:
            handler.call(entry, *blocks)

        return launch


def _warp_entry(launch: Any) -> tuple[int, int]:
    """The machine code of a recorded launch, on a GPU a CUfunction, and the shared memory that it takes."""
    kind = "backward" if launch.adjoint else "forward"
    address = ctypes.cast(getattr(launch.hooks, kind), _PTR).value or 0
    return address, getattr(launch.hooks, f"{kind}_smem_bytes")


class _WarpLaunches:
    """Launches that a handler makes one after another, from the same memory."""

    def __init__(self, handler: _Handler, code: _WarpCode) -> None:
        self.handler = handler
        self.code = code
        self.launch = code.launch_in(handler)
        self.attribute = handler.launch
        *starts, nbytes = code.layout.blocks
        self.memory = handler.zeros(nbytes)
        self.blocks = [self.memory + start for start in starts]

    def _struct_at(self, kind: Any, offset: int) -> _Struct:
        return _Struct(self.handler, kind, self.memory + offset)

    def set_bounds(self, dims: Sequence[Any], ndim: Any, size: Any) -> None:
        self.code.layout.write_bounds(self._struct_at, dims, ndim, size)

    def run(self, slices: Sequence[_Array], **grid: Any) -> None:
        """One launch, on these arrays: empty ones are null."""
        handler = self.handler
        plan = self.code.plan
        layout = self.code.layout
        arrays = []
        for array in slices:
            is_empty = handler.word(math.prod(array.dims)) == 0
            arrays.append(array._replace(pointer=handler.select(is_empty, 0, array.pointer)))
        layout.write_arrays(self._struct_at, plan, arrays)
        for argument, offset in zip(plan.arguments, layout.arguments, strict=True):
            source = argument.source(arrays, self.attribute)
            if source is not None:
                handler.copy_bytes(self.memory + offset, source, argument.nbytes)
        self.launch(self.blocks, **grid)


class _WarpEmitter(_Emitter):
    """Writes the blocks of a launch, and starts the kernel's machine code."""

    def __init__(self, code: _WarpCode, batch_code: _WarpCode | None) -> None:
        self.code = code
        self.batch_code = batch_code  # whose threads have one more index, that of their slice
        self.driver = code.driver
        self.traits = _COMMAND_BUFFER_COMPATIBLE if self.driver else 0  # it only launches, always the same
        self.in_order = code.plan.in_order or self.driver is not None

    def write(self, handler: _Handler) -> None:
        extents = self.code.extents(_Struct(handler, _WarpLaunch, handler.launch))
        dims = [handler.load(extents.address_of("dims") + 8 * axis) for axis in range(_WARP_MAX_DIMS)]
        if self.batch_code:
            self._write_batch(handler, self.batch_code, dims, extents)
        launches = _WarpLaunches(handler, self.code)
        launches.set_bounds(dims, extents.ndim, extents.size)
        with handler.each_slice() as slices:
            launches.run(slices)

    def _write_batch(self, handler: _Handler, code: _WarpCode, dims: list[_Word], extents: Any) -> None:
        """Run all slices in one launch and return, if the launch has the dimensions that the kernel asks for."""
        size = extents.size
        block_dim = code.plan.block_dim
        fits = (extents.ndim == code.plan.n_indices) & (size > 0) & (size < _WARP_BATCH_THREADS)
        with handler.when((handler.count > 1) & fits):
            launches = _WarpLaunches(handler, code)
            most = handler.word(_WARP_BATCH_THREADS) // size
            with handler.each_chunk(most) as (arrays, count):
                n_threads = size * count
                launches.set_bounds([count, *dims[:-1]], extents.ndim + 1, n_threads)
                launches.run(arrays, x=(n_threads + (block_dim - 1)) // block_dim)
            handler.ret(0)


def _warp_extents(dims: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """As `_WarpExtents` has them: four dimensions, how many of them count, and their product."""
    ones = (1,) * (_WARP_MAX_DIMS - len(dims))
    return (*dims, *ones), len(dims), math.prod(dims)


def _warp_grid(title: str, n_threads: int, block_dim: int, has_grid_stride: bool) -> tuple[int, int, int]:
    """The grid of `wp_cuda_launch_kernel` (warp.cu): without a loop in the kernel, blocks spread over three axes."""
    blocks = -(-n_threads // block_dim)
    x = min(blocks, _CUDA_LIMITS["grid"][0])
    y = 1
    z = 1
    if blocks and not has_grid_stride:
        x = min(blocks, 2**24 // block_dim)
        y = min(-(-blocks // x), 65535)
        z = -(-blocks // (x * y))
    if z > 65535 or n_threads > sys.maxsize:
        limit = "" if has_grid_stride else " without a grid stride"
        raise ValueError(f"{title}: {n_threads} threads are too many for one launch{limit}")
    return x, y, z


# -- 11.6 Through Warp's own launch, where it is more than that ----------------------------------------
# Knows how to fill in and replay what was recorded.  Does not know its memory.
#
# Warp's `Launch` has methods that set the dimensions and pack an array anew.  What is passed by value has none that
# takes bytes, so these are copied into `Launch.params`, where it stands behind the bounds.  A recorded launch is one
# object: a lock is held from the first change until it is launched, on XLA's stream.


class _WarpReplay:
    """For a `_CallbackEmitter`: runs Warp's recorded launch on the arrays of a slice."""

    def __init__(self, code: _WarpCode) -> None:
        self.code = code
        self.lock = threading.Lock()

    def __call__(self, pointers: list[int], dims: list[tuple], attribute: int, stream: int, ordinal: int) -> None:
        launch = self.code.launches[ordinal]
        extents = self.code.extents(_WarpLaunch.from_address(attribute))
        with self.lock:
            launch.set_dim(tuple(extents.dims[: extents.ndim]))
            self._set_arguments(launch, pointers, dims, attribute)
            self._run(launch, stream)

    def _set_arguments(self, launch: Any, pointers: list[int], dims: list[tuple], attribute: int) -> None:
        """All but null arrays and the adjoints of values, which stay as they were recorded."""
        arrays = [_Array(pointer, [*shape], [], 0) for pointer, shape in zip(pointers, dims, strict=True)]
        plan = self.code.plan
        n = len(plan.kernel.adj.args)
        for i, argument in enumerate(plan.arguments):
            if argument.is_array:
                array = plan.array(argument, arrays, launch.device)
                launch.set_param_at_index(i % n, array, adjoint=i >= n)
            source = argument.source(arrays, attribute)
            if source is not None:
                ctypes.memmove(ctypes.byref(launch.params[1 + i]), source, argument.nbytes)

    def _run(self, launch: Any, stream: int) -> None:
        if self.code.driver is None:
            launch.launch()
            return
        wp = _warp("warp_kernel")
        # no wp.Stream: that would register XLA's stream with Warp, and unregister it under the feet of others
        xla_stream = types.SimpleNamespace(device=launch.device, cuda_stream=stream)
        if type(launch) is wp.Launch:
            launch.launch(stream=xla_stream)
            return
        with wp.ScopedStream(xla_stream, sync_enter=False):  # a deterministic one allocates, on Warp's current stream
            launch.launch(stream=xla_stream)


def _compile_warp(
    plan: _WarpPlan, signature: _Signature, on_gpu: bool = False, batch_of: tuple[str, str] | None = None
) -> _Compiled:
    """A handler for the CPU or for GPUs; for batches in one launch, too, if the kernel's content is given."""
    _import("numba", "warp_kernel compiles what XLA calls with Numba's LLVM: it", _NUMBA_INSTALL)
    driver = _CudaDriver() if on_gpu else None
    code = _WarpCode(signature.label, plan, driver)
    emitter: _Emitter
    if code.layout:
        emitter = _WarpEmitter(code, _batch_code(signature.label, code, batch_of) if batch_of else None)
    else:
        emitter = _CallbackEmitter(signature, _WarpReplay(code), driver)
    if not on_gpu and any("tile" in adjoint.source for adjoint in _warp_adjoints(plan.kernel.adj)):
        # Warp keeps the CPU memory of tiles behind one static pointer (tile.h): such kernels must not overlap
        emitter.lock = _native_lock("tile_lock")
        emitter.in_order = True
    return _Compiled(*_compile_handler(signature, emitter))


# -- 11.7 A batch in one launch ------------------------------------------------------------------------
# Knows the syntax of kernels.  Does not know handlers.
#
# A launch for each slice of a batch takes time, and leaves most of a GPU idle where slices are small.  So a second
# kernel is made from the syntax tree of the first: its arrays have one more dimension, its threads one more index:
#
#     def kernel(x, k, out):         def kernel(x, k, out):
#         i = wp.tid()                   _xla_slice, _xla_0 = wp.tid()
#         out[i] = k * x[i]              _xla_x = x[_xla_slice if x.shape[0] > 1 else 0]        # size 1 broadcasts
#                                        _xla_out = out[_xla_slice if out.shape[0] > 1 else 0]
#                                        i = _xla_0 + 0
#                                        _xla_out[i] = k * _xla_x[i]
#
# Each of its threads does what one of the first kernel does on its slice, if that knows its place by `wp.tid()` alone,
# with as many indices as the launch has dimensions.  Threads of two slices may share a block, so kernels that see
# blocks or work on tiles get a launch for each slice, and so do those with atomics and `while`, whose threads may wait
# for others.  C and `wp.static` are not looked into: a launch for each slice, too.


def _batch_code(label: str, slice_code: _WarpCode, content: tuple[str, str]) -> _WarpCode | None:
    """The code of a kernel of this content for batches; None if it gets a launch for each slice."""
    with contextlib.suppress(Exception):  # also of Warp: what compiles with parameters may not with views of them
        with _warp_session():
            batch_plan = _batch_plan(slice_code.plan, content)
        code = _WarpCode(label, batch_plan, slice_code.driver)
        return code if code.layout else None
    return None


def _batch_plan(plan: _WarpPlan, content: tuple[str, str]) -> _WarpPlan:
    """Raises an error for a kernel that gets a launch for each slice."""
    kernel = plan.kernel
    _check_batchable(kernel)
    # Warp reads constants when it builds a kernel: those of a copy that is built now must still be the same.
    kinds = {arg.label: arg.type for arg in kernel.adj.args}
    if _warp_content(_with_source(kernel, kernel.adj.source, kinds)) != content:
        raise ValueError("the kernel has changed")
    arguments = []
    for argument in plan.arguments:
        if argument.is_array:
            argument = argument._replace(param=_batch_param(argument.param))
            kinds[argument.param.name] = argument.param.type
        arguments.append(argument)
    batcher = _WarpBatcher([argument.param.name for argument in arguments if argument.is_array])
    batch_kernel = _with_source(kernel, batcher.batched(kernel.adj.source), kinds)
    [n_indices] = batcher.n_indices
    return dataclasses.replace(plan, kernel=batch_kernel, arguments=tuple(arguments), n_indices=n_indices)


def _batch_param(param: _WarpParam) -> _WarpParam:
    """The parameter for an array of all slices."""
    if param.ndim == _WARP_MAX_DIMS:
        raise ValueError("Warp has no arrays of so many dimensions")
    kind = _warp("warp_kernel").array(dtype=param.type.dtype, ndim=param.ndim + 1)
    return dataclasses.replace(param, type=kind, ndim=kind.ndim)


def _with_source(kernel: Any, source: str, kinds: Mapping[str, Any]) -> Any:
    """A Warp kernel like another one, in a module of its own, with another source and types of parameters."""
    python = kernel.func
    function = types.FunctionType(
        python.__code__, python.__globals__, python.__name__, python.__defaults__, python.__closure__
    )
    function.__annotations__ = dict(kinds)
    function.__module__ = python.__module__
    module = type(kernel.module)(f"{kernel.key}_{_digest(kernel.hash.hex(), source)[:12]}", None)
    module.options.update(kernel.module.options)
    return type(kernel)(function, key=kernel.key, module=module, options=dict(kernel.options), source=source)


class _WarpBatcher(ast.NodeTransformer):
    """Makes a kernel's source that of its kernel for batches; parameters of these names are arrays of all slices."""

    def __init__(self, arrays: list[str]) -> None:
        self.arrays = arrays
        self.tid = ""  # the function, as the source calls it
        self.n_indices = set[int]()  # for how many it is asked

    def batched(self, source: str) -> str:
        tree = ast.parse(source)
        function: Any = tree.body[0]
        function.decorator_list = []
        body = [self.visit(statement) for statement in function.body]
        n_indices = max(self.n_indices, default=0)
        indices = ["_xla_slice", *(f"_xla_{axis}" for axis in range(n_indices))]
        lines = [f"{', '.join(indices)} = {self.tid}()"]
        lines += [f"_xla_{name} = {name}[_xla_slice if {name}.shape[0] > 1 else 0]" for name in self.arrays]
        function.body = ast.parse("\n".join(lines)).body + body
        return ast.unparse(ast.fix_missing_locations(tree))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.arrays:
            node.id = f"_xla_{node.id}"
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        if _calls_tid(node.value) and isinstance(target, ast.Tuple):
            node.value = self._indices(node.value, len(target.elts))
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _calls_tid(node):
            return self._indices(node, 1)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "tid":
            raise ValueError("wp.tid gets another name")
        return self.generic_visit(node)

    def _indices(self, call: Any, count: int) -> ast.expr:
        self.tid = ast.unparse(call.func)
        self.n_indices.add(count)
        copies = [f"_xla_{axis} + 0" for axis in range(count)]  # as code may change what it gets in place
        return ast.parse(", ".join(copies), mode="eval").body


def _calls_tid(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "tid"


def _check_batchable(kernel: Any) -> None:
    """Raise unless all that threads know of each other and of the launch is memory and what `wp.tid()` says."""
    if not isinstance(kernel.func, types.FunctionType) or kernel.adj.transformers:
        raise ValueError("the source of the kernel is not all that it is")
    functions = _warp_functions(kernel.adj)
    words = [function.key for function in functions]
    words += [code.source for code in _warp_adjoints(kernel.adj)]
    text = " ".join(words)
    if _WARP_UNBATCHED.search(text) or any(_is_c(function) for function in functions):
        raise ValueError("the kernel may see blocks, or what nobody looks into")
    if "while" in text and "atomic_" in text:
        raise ValueError("threads may wait for each other")


def _is_c(function: Any) -> bool:
    """Whether a function is written in C by users, which Warp 1.19 lets them add to its own, too."""
    return bool(function.native_snippet) or getattr(function, "_has_external_builtin_contract", False)


# ======================================================================================================
# 12. XLACustomKernel: one operation, many backends, all of JAX's transformations.
# An op (12.1), a call of it (12.2), a kernel (12.3), and the rules of its primitive (12.4 to 12.6).
#
# An op is a JAX primitive.  A call binds it with the static parameters; only its lowering knows the platform, and so
# the backend: it traces that backend's kernel and lowers the result.  Until then all transformations act on the
# primitive, with the derivative rules of the user.  Who makes whom:
#
#   XLACustomKernel   kernels (a `KernelEntry` each), rules, and one `_OpPrimitive`
#     -> _OpCall      by the first op(...) with these outs, backend and static parameters; kept for the next ones.
#                     Each trace of the call binds the primitive
#     -> _OpBinding   of what the primitive was bound with, whenever JAX asks it for something: shapes, a vmap,
#                     derivatives, and at last the lowering, which has it run a kernel

# -- 12.1 The op: registration, dispatch, rules --------------------------------------------------------
# Holds kernels by platform and backend, and rules by kind.  Traces nothing: 12.2 is about calls.


class XLACustomKernel(_Kept):
    """An operation with kernels for several backends that takes part in all of JAX's transformations.

    Kernels are registered with the `def_*_kernel` methods: as a *generator*, which is called with the static parameters
    of a call and returns the function to trace, or ready-made (`@njit`, `@cuda.jit`, `@wp.kernel`). `vmap` is handed to
    the backend's own batching rules. Derivatives are for the `def_*_rule` methods.

    Args:
      name: shown in jaxprs and error messages; it need not be unique.
      doc: the docstring of this op.

    Calling the op, `op(*ins, outs=..., backend=None, **params)`:
      ins: arrays, Python scalars, or anything with `__dlpack__` (Warp, PyTorch and CuPy arrays).
      outs: what the op returns: a `jax.ShapeDtypeStruct` (or anything with `.shape` and `.dtype`), a pytree of them,
        or a callable of the operands' abstract values that returns one.
      backend: a registered one; by default that of the platform which the computation is lowered for.
      params: static, hashable parameters, handed to generators and rules.

    Raises:
      TypeError: a parameter is traced or not hashable, or an operand is no array.
      ValueError: the backend is unknown, or a kernel returns something else than `outs` declares.
      NotImplementedError: there is no kernel for the platform, or a derivative without a rule is asked for.
      RuntimeError: a generator or kernel raised; its exception is chained.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> op = XLACustomKernel("axpy")
      >>> _ = op.def_kernel("jax", "cpu", lambda outs, alpha: lambda x, y: alpha * x + y)
      >>> op.def_jvp_rule2(lambda t, x, y, alpha: alpha * t, lambda t, x, y, alpha: t)
      >>> print(jax.grad(lambda x: op(x, x, outs=lambda x, y: x, alpha=2.0).sum())(jnp.ones(3)))
      [3. 3. 3.]
    """

    def __init__(self, name: str, doc: str | None = None) -> None:
        self.name = self.__name__ = name
        self.title = f"XLACustomKernel {name!r}"  # for errors
        self.__module__ = None  # type: ignore[assignment]  # pickle looks for the one that has it
        self.primitive = _OpPrimitive(self)
        self._lock = threading.RLock()
        self._kernels: dict[str, dict[str, KernelEntry]] = {}
        self._chosen: dict[str, str] = {}  # platform -> default set by asdefault=True or set_default
        self._rules: dict[str, Any] = {}  # "batching", "jvp", "transpose", "vjp": the newest of each
        self._is_traced = False  # whether JAX's caches may hold what it made with a kernel or rule of now
        self._recent = _Recent()  # the calls by their outs, backend and static parameters
        self._call_fn: Callable | None = None
        self._benchmark_data_fn: Callable | None = None
        self._tags: set[str] = set()
        self.__doc__ = doc or self.__doc__

    def __call__(self, /, *ins: Any, outs: Any, backend: str | None = None, **params: Any) -> Any:
        """Apply the op; see the class for the arguments."""
        args, traced = _as_inputs(ins, self.name)
        call = _find_call(self, args, outs, backend, params)
        if not traced:
            return call.jitted(*args)
        call.check(args)
        return call.bind(*args)

    def __repr__(self) -> str:
        lines = [f"XLACustomKernel({self.name!r})"]
        for platform, default in self.defaults.items():
            names = list(self._kernels[platform])
            names[names.index(default)] += " (default)"
            lines.append(f"  {platform}: {', '.join(names)}")
        if self._rules:
            lines.append(f"  rules: {', '.join(sorted(self._rules))}")
        return "\n".join(lines)

    # -- registration ----------------------------------------------------------------------------------

    def def_kernel(
        self, backend: str, platform: str, kg: Callable | None = None, asdefault: bool = False, **options: Any
    ) -> Any:
        """Register a kernel for a backend and a platform; returns it, or a decorator where it is left out.

        It replaces the backend's kernel from the next call on, also in functions that were compiled with the old one.

        Args:
          backend: any name; `"numba"`, `"warp"`, `"numba_cuda"`, `"pallas"`, `"triton"`, `"cuda_raw"` have shorthands.
          platform: `"cpu"`, `"gpu"` or `"tpu"` (`"cuda"` and `"rocm"` mean `"gpu"`).
          kg: a generator, `kg(outs=..., **params)`, which may leave out `outs`, or a ready kernel.
          asdefault: make this backend the platform's default; otherwise the first one registered is.
          options: for a ready kernel, passed to `numba_kernel`, `numba_cuda_kernel` or `warp_kernel`.

        Raises:
          TypeError: `backend` or `platform` is not a string (empty: ValueError), or `kg` neither callable nor a kernel.

        Example:
          >>> op = XLACustomKernel("double")
          >>> _ = op.def_kernel("a", "cpu", lambda outs: lambda x: 2 * x)
          >>> _ = op.def_kernel("b", "cpu", lambda: lambda x: x + x, asdefault=True)
          >>> op.available_backends("cpu"), op.get_default("cpu")
          (['a', 'b'], 'b')
        """
        return self._define(backend, [platform], kg, asdefault, options)

    def def_numba_kernel(self, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a Numba kernel (a generator, or `@njit`) for the CPU; see :meth:`def_kernel`."""
        return self._define("numba", ["cpu"], kg, asdefault, options)

    def def_warp_kernel(self, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a Warp kernel for the GPU and, where it has no other kernel, the CPU; see :meth:`def_kernel`."""
        return self._define("warp", ["gpu", "cpu"], kg, asdefault, options)

    def def_numba_cuda_kernel(self, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a Numba CUDA kernel (a generator, or `@cuda.jit`) for the GPU; see :meth:`def_kernel`."""
        platforms = ["gpu"]
        if _uses_cudasim():
            platforms.append("cpu")  # Numba's simulator: as Warp, where there is no other kernel
        return self._define("numba_cuda", platforms, kg, asdefault, options)

    def def_pallas_kernel(self, platform: str, kg: Any = None, asdefault: bool = False) -> Any:
        """Register a Pallas kernel for `"gpu"`, `"tpu"`, or (in interpret mode) `"cpu"`; see :meth:`def_kernel`."""
        if _platform_name(platform) not in ("cpu", "gpu", "tpu"):
            raise ValueError(f"def_pallas_kernel: platform must be 'gpu', 'tpu' or 'cpu', got {platform!r}")
        return self._define("pallas", [platform], kg, asdefault, {})

    def def_triton_kernel(self, kg: Any = None, asdefault: bool = False) -> Any:
        """Register a generator of a Triton kernel for the GPU; see :meth:`def_kernel`."""
        return self._define("triton", ["gpu"], kg, asdefault, {})

    def def_cuda_raw_kernel(self, kg: Any = None, asdefault: bool = False) -> Any:
        """Register a generator of a kernel compiled from CUDA C++ for the GPU; see :meth:`def_kernel`."""
        return self._define("cuda_raw", ["gpu"], kg, asdefault, {})

    def _define(self, backend: str, platforms: Sequence[str], kg: Any, asdefault: bool, options: dict) -> Any:
        """Register a kernel for `platforms`: on those after the first it is a fallback."""
        if kg is None:
            return functools.partial(self._define, backend, platforms, asdefault=asdefault, options=options)
        _check_name("backend", backend)
        _check_name("platform", platforms[0])
        generator = _as_generator(f"{self.title}: the kernel of backend {backend!r}", kg, options)
        for i, platform in enumerate(map(_platform_name, platforms)):
            entry = KernelEntry(backend, platform, generator, fallback=i > 0)
            with self._lock:  # a new dict each time: other threads read without the lock
                self._kernels[platform] = {**self._kernels.get(platform, {}), backend: entry}
            if asdefault and not entry.fallback:
                self._chosen[platform] = backend
        self._trace_again()
        return kg

    def _trace_again(self) -> None:
        """Drop what JAX made with an earlier kernel or rule: it can only drop all its caches at once."""
        if self._is_traced:
            self._is_traced = False
            jax.clear_caches()

    # -- dispatch --------------------------------------------------------------------------------------

    @property
    def defaults(self) -> dict[str, str]:
        """The default backend of every platform that has a kernel (a copy)."""
        return {platform: self._choices(platform)[None].backend for platform in self._kernels}

    def get_default(self, platform: str) -> str | None:
        """The default backend of `platform`, or None where it has no kernel."""
        return self.defaults.get(_platform_name(platform))

    def set_default(self, platform: str, backend: str) -> None:
        """Make `backend` the default of `platform`, also in functions that were compiled with the old one.

        For those, all of JAX's caches are cleared.  A backend that the platform does not have is a ValueError.
        """
        name = _platform_name(platform)
        entry = self._entry(name, backend or "")  # None would be the default of now
        self._chosen[name] = entry.backend
        self._trace_again()

    def available_backends(self, platform: str) -> list[str]:
        """The backends registered for `platform`, in order of registration."""
        return list(self._kernels.get(_platform_name(platform), {}))

    def _choices(self, platform: str) -> dict[str | None, KernelEntry]:
        """The kernel for each `backend` that a call may name; None is the default."""
        chosen = self._chosen.get(platform)  # before the kernels, which `_define` sets first: so it is among them
        entries: dict[Any, KernelEntry] = self._kernels.get(platform, {})
        if not entries:
            return {}
        first = min(entries.values(), key=operator.attrgetter("fallback"))
        return {None: entries[chosen] if chosen else first, **entries}

    def _entry(self, platform: str, backend: str | None) -> KernelEntry:
        """The kernel that serves a call, or an error that says what is registered."""
        choices = self._choices(platform)
        if backend in choices:
            return choices[backend]
        registered = "; ".join(f"{name}: {', '.join(entries)}" for name, entries in self._kernels.items()) or "nothing"
        missing = "kernel" if backend is None else f"backend {backend!r}"
        text = (
            f"{self.title} has no {missing} for platform {platform!r}; registered: {registered}; "
            "choose one of these (backend=, jax.default_device), or register another with def_kernel"
        )
        raise NotImplementedError(text) if backend is None else ValueError(text)

    # -- rules -----------------------------------------------------------------------------------------

    def def_batching_rule(self, fun: Callable) -> Callable:
        """Override batching: `fun(args, axes, **params) -> (outputs, output_axes)`; usable as a decorator.

        `axes` holds the batched axis of each operand or None; `params` is as in :meth:`def_jvp_rule`.
        """
        return self._define_rule("batching", fun)

    def register_general_batching(self) -> None:
        """Restore the batching rule that every op starts with (:func:`general_batching_rule`)."""
        self._set_rule("batching", None)

    def def_jvp_rule(self, fun: Callable) -> Callable:
        """Define the derivative by one function, `fun(primals, tangents, **params) -> (outputs, tangents_out)`.

        A tangent that is zero is a `jax.interpreters.ad.Zero`; outputs and their tangents are lists, and a tangent may
        be None for zero. `params` holds `outs`, `backend` and the static parameters of the call; every rule may leave
        out the first two. Usable as a decorator.
        """
        return self._define_rule("jvp", fun)

    def def_jvp_rule2(self, *jvp_rules: Callable | None) -> None:
        """Define the derivative by one rule per operand; see :func:`defjvp`."""
        defjvp(self, *jvp_rules)

    def def_transpose_rule(self, fun: Callable) -> Callable:
        """Define the transpose of an op that is linear in some operands; usable as a decorator.

        `fun(cotangents, *operands, **params)` gets a list with one cotangent per output (`ad.Zero` where it is zero),
        and an `ad.UndefinedPrimal` for every operand that the op is linear in (`ad.is_undefined_primal`). It returns
        one cotangent per operand: None for those that are known.
        """
        return self._define_rule("transpose", fun)

    def def_vjp_rule(self, fwd: Callable, bwd: Callable) -> None:
        """Define the reverse-mode derivative by two functions, such as an op with a kernel for the backward pass has.

        Args:
          fwd: `fwd(*ins, **params) -> (results, residuals)`, with results (mostly those of the op itself) in the
            structure of the call's `outs`, and `params` as in :meth:`def_jvp_rule`.
          bwd: `bwd(residuals, cotangents, **params)`, with cotangents in that structure; returns one cotangent per
            operand, None for zero.

        Example:
          >>> op = XLACustomKernel("square")
          >>> _ = op.def_kernel("jax", "cpu", lambda: lambda x: x * x)
          >>> op.def_vjp_rule(lambda x, outs: (op(x, outs=outs[0]), x), lambda x, ct: (2 * x * ct,))
          >>> print(jax.grad(lambda x: op(x, outs=lambda x: x))(3.0))
          6.0
        """
        what = "def_vjp_rule: a rule"
        self._set_rule("vjp", (_tolerant(fwd, what), _tolerant(bwd, what)))

    def _define_rule(self, kind: str, fun: Callable) -> Callable:
        self._set_rule(kind, _tolerant(fun, f"{self.title}: a {kind} rule"))
        return fun

    def _set_rule(self, kind: str, rule: Any) -> None:
        """Replace a rule (None: by the default)."""
        with self._lock:
            rules = {**self._rules, kind: rule}  # a new dict: other threads read without the lock
            if kind == "jvp":
                rules["vjp"] = None  # of the two, the newest counts
            self._rules = {name: rule for name, rule in rules.items() if rule is not None}
        self._trace_again()

    # -- what BrainEvent's operators attach to an op ---------------------------------------------------

    def def_call(self, fn: Callable) -> Callable:
        """Attach the function that :meth:`call` calls: the op with its operands prepared and checked."""
        self._call_fn = fn
        return fn

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function attached by :meth:`def_call`."""
        if self._call_fn is None:
            raise ValueError(f"{self.title} has no call function; attach one with def_call(fn)")
        return self._call_fn(*args, **kwargs)

    def def_tags(self, *tags: str) -> None:
        """Attach words to find the op by."""
        self._tags = set(tags)

    def def_benchmark_data(self, fn: Callable) -> Callable:
        """Attach a function that makes benchmark data."""
        self._benchmark_data_fn = fn
        return fn

    def benchmark(self, *ins: Any, outs: Any, backend: str | None = None, **params: Any) -> _OpBenchmark:
        """Time a call, `op(*ins, outs=outs, **params)`, under `jax.jit`: one backend, or all of the operands' platform.

        Returns:
          A result that prints as a table; each of its `.rows` has `backend`, `first_ms` (first call, with compilation),
          `median_us` (of calls for about a fifth of a second), `difference` (largest absolute difference from the first
          backend that ran) and `error` (None unless the backend failed).

        Example:
          >>> op = XLACustomKernel("double")
          >>> _ = op.def_kernel("jax", "cpu", lambda: lambda x: 2 * x)
          >>> [row.backend for row in op.benchmark(np.ones(8), outs=lambda x: x).rows]
          ['jax']
        """
        args = jax.device_put(tuple(_as_inputs(ins, self.name)[0]))
        platform = _default_platform()
        if args:
            device, *_ = args[0].devices()
            platform = _platform_name(device.platform)
        self._entry(platform, backend)  # raises where there is none
        backends = self.available_backends(platform) if backend is None else [backend]
        result = _OpBenchmark(self.name, platform, [])
        reference: list = []
        for name in backends:
            call = jax.jit(functools.partial(self, outs=outs, backend=name, **params))
            try:
                first, median, results = _time_call(functools.partial(call, *args))
            except Exception as error:
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                result.rows.append(_BenchmarkRow(name, error=text))
                continue
            reference = reference or results
            difference = max(map(_largest_difference, results, reference), default=0.0)
            result.rows.append(_BenchmarkRow(name, first * 1e3, median * 1e6, difference))
        return result


class _BenchmarkRow(NamedTuple):
    backend: str
    first_ms: float | None = None
    median_us: float | None = None
    difference: float | None = None
    error: str | None = None


class _OpBenchmark(NamedTuple):
    name: str
    platform: str
    rows: list[_BenchmarkRow]

    def __repr__(self) -> str:
        lines = [f"{self.name} on {self.platform}", f"{'backend':<14}{'first (ms)':>12}{'median (us)':>14}  difference"]
        for backend, first, median, difference, error in self.rows:
            times = f"{first or math.nan:>12.2f}{median or math.nan:>14.2f}"
            lines.append(f"{backend:<14}{times}  {error or f'{difference:.3g}'}")
        return "\n".join(lines)


def _time_call(call: Callable[[], Any]) -> tuple[float, float, list]:
    """The seconds that the first call takes, those of the median of many, and the results."""
    timer = timeit.Timer(lambda: jax.block_until_ready(call()))
    first = timer.timeit(1)
    calls = int(0.2 / timer.timeit(1))
    times = timer.repeat(min(max(calls, 5), 10_000), 1)
    return first, float(np.median(times)), jax.tree.leaves(call())


def _largest_difference(x: Any, y: Any) -> float:
    """NaN, if one is."""
    gap = np.abs(np.asarray(x, complex) - np.asarray(y, complex))
    return float(np.max(gap, initial=0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class KernelEntry:
    """One kernel of an :class:`XLACustomKernel`: what `op._kernels[platform][backend]` holds, made by `def_kernel`.

    `kernel_generator` is the registered generator itself, or for a ready kernel one that returns its wrapper: called
    with the static parameters of a call, and with `outs` if it takes them, it returns the function to trace. A
    `fallback` (Warp on the CPU) serves, unless asked for by name, only where the platform has no other.
    """

    backend: str
    platform: str
    kernel_generator: Callable
    fallback: bool = False


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"def_kernel: {what} must be a name, got {name!r}")
    if not name:
        raise ValueError(f"def_kernel: {what} must be a name, got {name!r}")


# -- 12.2 A call: from op(...) to its primitive --------------------------------------------------------
# Knows operands, outs and static parameters, and checks them where the user's call is on the stack.
# Does not know kernels, but for tracing one, so that its errors too are raised there.

_SPEC_TYPES: tuple[type, ...] = (Spec, jax.core.ShapedArray)


def _find_call(op: XLACustomKernel, args: Sequence, outs: Any, backend: Any, params: dict) -> _OpCall:
    """What serves a call with these outs, backend and parameters: checked when it is new, then remembered."""
    if callable(outs) and not isinstance(outs, type):  # such as jnp.float32
        avals = [getattr(x, "aval", None) or _input_spec(x, i) for i, x in enumerate(args)]
        outs = _call_option(outs, f"{op.title}: outs", avals, {})
    try:
        key = (_outs_key(outs), backend, _tagged(params) if params else ())
        known = op._recent.get(key)
    except TypeError:  # something is not hashable: a new call raises and says what
        known = None
    if known:
        return known
    call = _OpCall(op, outs, backend, params)
    return op._recent.keep(key, call)


def _outs_key(outs: Any) -> tuple:
    if type(outs) in _SPEC_TYPES:  # the usual case, at half the price
        return outs.shape, outs.dtype
    leaves, tree = jax.tree_util.tree_flatten(outs, is_leaf=_is_spec)
    shown = [(tuple(x.shape), x.dtype) if _is_spec(x) else x for x in leaves]
    return tree, *shown


class _OpCall:
    """An op with fixed outs, backend and static parameters; eager calls go through its `jitted`."""

    def __init__(self, op: XLACustomKernel, outs: Any, backend: str | None, params: dict) -> None:
        self.what = f"{op.title}: outs"
        if outs is None:
            raise TypeError(f"{self.what} is missing: give the results' specs, such as outs=lambda x: x")
        _check_static_params(op.title, {"backend": backend, **params})
        self.specs, self.tree = _flat_specs(outs, self.what)
        self.op = op
        self.backend = backend
        self.params = params
        self.checked = _Recent()
        self.jitted = jax.jit(self.bind)

    def bind(self, *ins: Any) -> Any:
        """The op on tracers (or, under disable_jit, on arrays)."""
        self.op._is_traced = True  # also where the vjp rule, which JAX then holds, does not bind the primitive
        if "vjp" in self.op._rules:
            return _bind_with_vjp(self, ins, *self.op._rules["vjp"])
        return self.bind_primitive(*ins)

    def bind_primitive(self, *ins: Any) -> Any:
        results = self.op.primitive.bind(*ins, _binding=self.binding(ins))
        return jax.tree_util.tree_unflatten(self.tree, results)

    def binding(self, ins: Sequence) -> _OpBinding:
        # the dtypes are decided here and not on construction: jax_enable_x64 can change between two calls
        outs, _ = _flat_specs(self.specs, self.what, _input_specs(ins))
        return _OpBinding(self.op, tuple(outs), self.backend, self.params)

    def check(self, ins: Sequence) -> None:
        """Trace the kernel that will probably run, once for these inputs, so that its errors are raised here."""
        platform = _default_platform()
        platforms = [name for name in list(self.op._kernels) if self.backend in self.op._choices(name)]
        if platforms and platform not in platforms:
            return  # if it is lowered for this one after all, the lowering raises
        entry = self.op._entry(platform, self.backend)
        key = (entry, *_input_specs(ins))
        if key in self.checked:
            return
        try:
            jax.make_jaxpr(functools.partial(self.binding(ins).run, entry))(*ins)
        except RuntimeError:
            if jax.default_backend() == "cpu":  # else the platform may be another one: the lowering raises
                raise
        self.checked.keep(key, True)


def _check_static_params(op: str, params: dict) -> None:
    for name, value in params.items():
        if name == "_binding":
            raise TypeError(f"{op}: the parameter name {name!r} is reserved; use another one")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"{op}: parameter {name!r} is traced ({value}), but keyword parameters are static: pass it as an "
                f"operand, or compile the caller with jax.jit(..., static_argnames={name!r})"
            )
        _check_hashable(value, f"{op}: parameter {name!r}", "Pass a number or a tuple, or pass the array as an operand")


def _check_hashable(value: Any, what: str, fix: str) -> None:
    try:
        hash((value, _tagged(value)))
    except TypeError:
        raise TypeError(f"{what} must be hashable, got {value!r:.80} of type {type(value).__name__}. {fix}") from None


def _tagged(value: Any) -> Any:
    """A key that tells apart what Python calls equal: 1, 1.0 and True, 0.0 and -0.0, Decimal("1") and "1.0"."""
    if isinstance(value, dict):
        return tuple([(name, _tagged(x)) for name, x in value.items()])
    if isinstance(value, tuple):
        return type(value), *map(_tagged, value)
    if isinstance(value, frozenset):
        return type(value), frozenset(map(_tagged, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = [getattr(value, field.name) for field in dataclasses.fields(value) if field.compare]
        return type(value), value, *map(_tagged, compared)
    if isinstance(value, _DIFFERENT_IF_EQUAL):
        return type(value), repr(value)
    return type(value), value


_DIFFERENT_IF_EQUAL = (float, complex, np.generic, decimal.Decimal, range, slice)  # perhaps; their repr says all


# -- 12.3 A kernel: from a generator, or a ready kernel, to its results --------------------------------
# Knows one slice and one backend.  Does not know vmap, nor what the call was traced for.


def _as_generator(kernel: str, kg: Any, options: dict) -> Callable:
    """The generator of a ready kernel; any other is the user's own function, which `KernelEntry` holds as it is."""
    if options.get("has_side_effect"):
        raise TypeError(
            f"{kernel} cannot have side effects: a call of an op whose results nobody uses is dropped; call it directly"
        )
    if _ready_kind(kg) is not None:
        return functools.partial(_wrap_ready, kg, options)
    if options:
        raise TypeError(
            f"{kernel}: {', '.join(options)} can be given with a ready kernel only; a generator applies options itself"
        )
    if not callable(kg):
        raise TypeError(f"{kernel} (a generator, or a Numba, Numba CUDA or Warp kernel) must be callable, got {kg!r}")
    return kg


def _wrap_ready(kernel: Any, options: dict, /, outs: tuple, **params: Any) -> Any:
    """The generator of a ready kernel: it as a function of arrays; anything else as it is."""
    kind = _ready_kind(kernel)
    if params:
        raise TypeError(f"static parameters {list(params)} need a generator that makes this {kind} kernel of them")
    return _BACKENDS[kind].wrap(kernel, outs, **options) if kind in _BACKENDS else kernel


def _tolerant(fun: Callable, what: str = "") -> Callable:
    """`fun`, called without those of `outs` and `backend` that its signature does not take."""
    if not callable(fun):
        raise TypeError(f"{what} must be callable, got {fun!r}")
    unwanted: set[str] = set()
    with contextlib.suppress(TypeError, ValueError):  # no signature
        parameters = inspect.signature(fun).parameters
        kinds = [parameter.kind for parameter in parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            unwanted = {"outs", "backend"} - parameters.keys()

    @functools.wraps(fun)
    def call(*args: Any, **params: Any) -> Any:
        for name in unwanted & params.keys():
            del params[name]
        return fun(*args, **params)

    return call


def _run_slice(bound: _OpBinding, entry: KernelEntry, *ins: Any) -> list:
    """The flat list of results of a kernel for the operands of one slice."""
    what = f"{bound.op.title}: the kernel of backend {entry.backend!r} for platform {entry.platform!r}"
    try:
        results = _function_to_trace(bound, entry, ins)(*ins)
    except Exception as error:
        backends = ", ".join(bound.op.available_backends(entry.platform))
        choice = f"{entry.platform!r} has {backends}: choose with backend="
        raise RuntimeError(f"{what} raised {type(error).__name__}: {error} ({choice})") from error
    return _outputs(what, results, bound.slice_outs)


def _function_to_trace(bound: _OpBinding, entry: KernelEntry, ins: Sequence) -> Callable:
    """What the generator makes for these parameters and outs."""
    axes = _all_varying_axes(map(jax.typeof, ins))
    varying = [Spec(out.shape, out.dtype, **_varying(axes)) for out in bound.slice_outs]
    made = _tolerant(entry.kernel_generator)(**bound.params, outs=tuple(varying))
    function = _wrap_ready(made, {}, bound.slice_outs)
    if not callable(function):
        raise TypeError(f"the generator must return the function to trace, got {function!r}")
    return function


def _outputs(what: str, returned: Any, outs: Sequence) -> list:
    """The outputs that a kernel or a jvp rule returned in any container, as arrays."""
    arrays = list(map(_as_array, jax.tree.leaves(returned)))
    _check_returned(what, arrays, "outs declares", outs)
    return arrays


def _as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)  # which would truncate an array of 64 bits


def _check_returned(what: str, returned: Sequence, declares: str, expected: Sequence) -> None:
    """Compare shapes and dtypes; None fits everything, on either side."""
    shown = list(map(_show, returned))
    wanted = list(map(_show, expected))
    fits = [pair[0] == pair[1] or "None" in pair for pair in zip(shown, wanted)]
    if len(shown) != len(wanted) or not all(fits):
        raise ValueError(
            f"{what} returned ({', '.join(shown)}), but {declares} ({', '.join(wanted)}): return as many, of equal "
            "shape and dtype (None for zero in a rule), or correct what is declared"
        )


# -- 12.4 The primitive: its rules for JAX's interpreters ----------------------------------------------
# Each rule looks up what the op has now when JAX asks.  JAX keeps the answers until `_trace_again` drops them.


def _is_op(primitive: Any) -> bool:
    """Whether this is the primitive of an op, of any copy of this file."""
    return hasattr(primitive, "bind_batch")


class _OpPrimitive(Primitive):
    """The primitive of an op, whose one parameter is an `_OpBinding`: bound by hand, it is given what makes one."""

    multiple_results = True

    def __init__(self, op: XLACustomKernel) -> None:
        super().__init__(op.name)
        self.op = op
        self.def_impl(functools.partial(_apply_primitive, self))
        self.def_abstract_eval(self.jax_rule(_op_abstract_eval))
        ad.primitive_jvps[self] = self.jax_rule(_op_jvp)
        ad.primitive_transposes[self] = self.jax_rule(_op_transpose)
        batching.primitive_batchers[self] = self.jax_rule(_op_batching)
        for platform in (None, "cpu", "gpu", "tpu"):  # one for each, or JAX would lower for several at once
            mlir.register_lowering(self, self.jax_rule(_op_lowering), platform=platform)

    def jax_rule(self, function: Callable) -> Callable:
        """A rule for JAX's interpreters: `function`, with the binding before its other arguments."""

        def call(*args: Any, **params: Any) -> Any:
            self.op._is_traced = True
            return function(self.binding(**params), *args)

        return call

    def binding(
        self, /, outs: Sequence = (), backend: Any = None, _binding: _OpBinding | None = None, **params: Any
    ) -> _OpBinding:
        """That of the primitive's parameters; BrainEvent calls rules without outs."""
        return _binding or _OpBinding(self.op, tuple(outs), backend, params)

    def bind(self, /, *args: Any, **params: Any) -> Any:
        return super().bind(*_make_varying(args), _binding=self.binding(**params))

    def bind_batch(self, args: Sequence, axes: Sequence[int | None], /, **params: Any) -> list:
        """Bind with one more vmap; the batched axes of the results are in front."""
        in_axes, batch = _with_axes_in_front(args, axes)
        size = batch[in_axes.index(0)].shape[0]
        bound = self.binding(**params)
        outs = _batches([size], bound.outs)
        batched = dataclasses.replace(bound, outs=outs, vmaps=(in_axes, *bound.vmaps))
        return self.bind(*batch, _binding=batched)


@dataclasses.dataclass(frozen=True, eq=False)
class _OpBinding:
    """What the primitive of an op was bound with, or will be."""

    op: XLACustomKernel = dataclasses.field(repr=False)
    outs: tuple  # of the whole batch
    backend: str | None
    params: dict[str, Any]  # static; as one, because functions of JAX have arguments of any name
    vmaps: tuple = ()  # the recorded ones (12.5): the `in_axes` of each

    @functools.cached_property
    def key(self) -> tuple:
        """What JAX's caches compare; they would take equal static parameters of other types for the same."""
        return self.outs, self.backend, _tagged(self.params), self.vmaps

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: Any) -> bool:
        return type(other) is _OpBinding and self.key == other.key

    @property
    def slice_outs(self) -> tuple:
        return tuple(_specs_of_slices(self.outs, len(self.vmaps)))

    @property
    def rule_params(self) -> dict[str, Any]:
        """What a user's rules get, which are for one slice."""
        return {**self.params, "outs": self.slice_outs, "backend": self.backend}

    def run(self, entry: KernelEntry, *ins: Any) -> list:
        """The results of a kernel: for a batch by the batching rules of what it calls, or else slice by slice."""
        if self.outs and all(0 in out.shape for out in self.outs):  # nothing to compute, and not every backend could
            return [_zeros(out) for out in self.outs]
        run_slice = functools.partial(_run_slice, self, entry)
        if not self.vmaps:
            return run_slice(*ins)

        def staged(*ins: Any) -> list:  # the generator runs outside the vmaps, so that its errors stay its own
            return _eval_jaxpr(jax.make_jaxpr(run_slice)(*ins), ins)

        batched = _for_each_vmap(jax.vmap, staged, self.vmaps)
        try:
            closed = jax.make_jaxpr(batched)(*ins)  # first as a whole: a failure must leave nothing behind
        except NotImplementedError:  # something has no batching rule
            return _for_each_vmap(_sequential, run_slice, self.vmaps)(*ins)
        return _eval_jaxpr(closed, ins)


def _op_abstract_eval(bound: _OpBinding, *avals: Any) -> list:
    specs = [iter(aval.sharding.spec) for aval in avals]
    candidates = []
    for in_axes in bound.vmaps:  # each is the next dimension of the operands that it batches
        candidates.append([next(spec) for spec, axis in zip(specs, in_axes) if axis == 0])
    axes = _batch_axes(candidates)
    return [_out_aval(out.shape, out.dtype, avals, axes) for out in bound.outs]


def _batch_axes(candidates: Iterable[Sequence[Any]]) -> list:
    """The mesh axes over which each batch dimension of the results is split, on meshes of explicit axes.

    `candidates` has, for each dimension, what the operands' partition specs say there: the first one that is split
    decides, if no dimension before has its axes.
    """
    taken: set[str] = set()
    chosen: list[Any] = []
    for entries in candidates:
        chosen.append(None)
        for entry in entries:
            axes = entry if isinstance(entry, tuple) else (entry,)
            if entry and taken.isdisjoint(axes):
                taken.update(axes)
                chosen[-1] = entry
                break
    return chosen


def _op_lowering(bound: _OpBinding, ctx: Any, *ins: Any) -> Any:
    platforms = _platforms(ctx)
    entry = bound.op._entry(_platform_name(platforms[0]), bound.backend)
    try:
        return _lower(functools.partial(bound.run, entry), ctx, ins)
    except KeyError as error:
        if not any("Effect" in type(arg).__name__ for arg in error.args):
            raise
        # an ordered effect of the kernel, for which JAX has no token here
        text = f"{bound.op.title} has no ordered effects; call its kernel itself: {error}"
        raise NotImplementedError(text) from error


# -- 12.5 Batching: recorded vmaps ---------------------------------------------------------------------
# How a batch is best run, only the backend knows, and that is known only when the op is lowered.  So:
#
# 1. `vmap` of an op binds its primitive once more, with the axis of this vmap in front of the batched operands, and
#    records which these are: `_OpBinding.vmaps` has `in_axes`, as `jax.vmap` takes them, for each vmap, in the order
#    of their axes: the outermost first.
# 2. The lowering applies the recorded vmaps to the function of one slice, by `jax.vmap`: each wrapper, and all that JAX
#    can trace, has its own rule.  Where one has none, the batch is a `jax.lax.map`.
# 3. Derivative rules get the same vmaps, when JAX asks for them (12.6).
#
# All that a user writes sees one slice: generators, outs, rules.  Only `_OpBinding.outs` are those of the batch.


def general_batching_rule(prim: Any, args: Sequence, axes: Sequence[int | None], /, **params: Any) -> tuple:
    """Batch an op or primitive without a rule of its own; what :class:`XLACustomKernel` uses by default.

    Args:
      prim: an :class:`XLACustomKernel` or its `primitive`, which is bound once, with the batch recorded, and leaves the
        work to its backend's own `vmap`; or any primitive or function of arrays, for a `jax.lax.map` over the slices.
      args, params: its operands, and its parameters by keyword: for an op `outs`, those of one slice, too.
      axes: the batched axis of each operand, or None.

    Returns:
      The outputs and, in the same structure, their batched axes: 0, or None if no operand is batched.

    Raises:
      TypeError: `prim` is an op, and `outs` is missing.

    Example:
      >>> out, axis = general_batching_rule(lambda x, y: x @ y, (np.ones((5, 3)), np.ones(3)), (0, None))
      >>> print(out.shape, axis)
      (5,) 0
    """
    primitive = getattr(prim, "primitive", prim)
    if _is_op(primitive) and "outs" not in params:
        raise TypeError(f"general_batching_rule: outs, which op {primitive.name!r} needs, is missing: give one slice's")
    function = functools.partial(getattr(prim, "bind", prim), **params)
    if all(axis is None for axis in axes):
        out = function(*args)
        return out, jax.tree.map(lambda _: None, out)
    if _is_op(primitive):
        outs = params.pop("outs")
        if callable(outs):
            outs = _call_option(outs, "general_batching_rule: outs", list(map(_without_axis, args, axes)), {})
        outs, tree = jax.tree.flatten(outs)
        out = jax.tree.unflatten(tree, primitive.bind_batch(args, axes, outs=outs, **params))
    else:
        in_axes, batch = _with_axes_in_front(args, axes)
        out = _sequential(function, in_axes)(*batch)
    return out, jax.tree.map(lambda _: 0, out)


def _op_batching(bound: _OpBinding, args: Sequence, axes: Sequence) -> Any:
    rule = bound.op._rules.get("batching")
    if rule is None or bound.vmaps:  # a user's rule is for the op on one slice, not on the batch of a recorded vmap
        results = bound.op.primitive.bind_batch(args, axes, _binding=bound)
        return results, [0] * len(results)
    what = f"the batching rule of {bound.op.name!r}"
    results, result_axes = rule(args, axes, **bound.rule_params)
    if not isinstance(results, (list, tuple)) or not isinstance(result_axes, (list, tuple)):
        raise TypeError(f"{what} must return (results, their axes), two sequences; got {results}")
    _check_returned(what, list(map(_without_axis, results, result_axes)), "the slices of outs are", bound.outs)
    axes_from_the_front = [axis if axis is None else axis % np.ndim(x) for x, axis in zip(results, result_axes)]
    return results, axes_from_the_front


def _with_axes_in_front(args: Sequence, axes: Sequence[int | None]) -> tuple[tuple, list]:
    """The `in_axes` of a batch, and the batch."""
    in_axes = tuple([None if axis is None else 0 for axis in axes])
    return in_axes, [jax.numpy.moveaxis(x, axis, 0) if axis else x for x, axis in zip(args, axes)]


def _without_axis(x: Any, axis: int | None) -> Any:
    """The spec of a slice; the axis may count from the end, as JAX takes it."""
    sizes = list(np.shape(x))
    if axis is not None:
        del sizes[axis]
    return Spec(tuple(sizes), x.dtype)


def _for_each_vmap(transform: Callable, function: Callable, vmaps: Sequence) -> Callable:
    """`transform(function, in_axes)`, vmap around vmap."""
    for in_axes in reversed(vmaps):
        function = transform(function, in_axes)
    return function


def _sequential(function: Callable, in_axes: tuple) -> Callable:
    """`jax.vmap(function, in_axes)`, but one slice at a time."""

    def mapped(*ins: Any) -> Any:
        def of_slice(slices: Sequence) -> Any:
            return function(*[x if axis is None else one for x, one, axis in zip(ins, slices, in_axes)])

        return jax.lax.map(of_slice, [None if axis is None else x for x, axis in zip(ins, in_axes)])

    return mapped


# -- 12.6 Derivatives ----------------------------------------------------------------------------------
# A user's rule is a function of one slice; it is vmapped by the recorded vmaps (12.5), in which tangents are batched as
# their primals, and cotangents by all, as outputs are.
#
# Zeros are symbolic.  JAX gives rules an `ad.Zero`, in which `jax.vmap` finds nothing to batch, as in an
# `ad.UndefinedPrimal`: `_symbolic_slice` makes it one of a slice.  Rules may return zeros in any form: `_from_rule`
# makes them None.


def defjvp(primitive: Any, *jvp_rules: Callable | None) -> None:
    """Define the derivative of an op or primitive by one rule per operand.

    Args:
      primitive: an :class:`XLACustomKernel`, or a JAX primitive with one or several results.
      jvp_rules: one per operand: `rule(tangent, *primals, **params)` returns the tangents of the outputs that this
        operand's tangent causes, in any container (one array if there is one output; None for zero), and is only
        called for an operand that is differentiated. None in place of a rule: the operand contributes nothing.
        `params` is as in :meth:`XLACustomKernel.def_jvp_rule`.

    Raises:
      TypeError: `primitive` is neither op nor primitive, or a rule is not callable.
      ValueError: when differentiated, rules and operands differ in number, or tangents do not match the outputs.

    Example:
      >>> op = XLACustomKernel("multiply")
      >>> _ = op.def_kernel("jax", "cpu", lambda: lambda x, y: x * y)
      >>> defjvp(op, lambda t, x, y: t * y, lambda t, x, y: x * t)
      >>> print(jax.grad(lambda x: op(x, 3.0, outs=lambda x, y: x))(2.0))
      3.0
    """
    primitive = getattr(primitive, "primitive", primitive)
    if not isinstance(primitive, Primitive):
        raise TypeError(f"defjvp: expected an XLACustomKernel or a jax Primitive, got {primitive!r}")
    rules = [rule if rule is None else _tolerant(rule, "defjvp: a rule") for rule in jvp_rules]
    jvp = functools.partial(_jvp_by_operand, primitive, rules)
    if _is_op(primitive):
        primitive.op._set_rule("jvp", jvp)
    else:
        ad.primitive_jvps[primitive] = jvp


def _jvp_by_operand(primitive: Any, rules: Sequence, primals: Any, tangents: Any, /, **params: Any) -> tuple:
    """The jvp rule that adds up what each operand's rule gives."""
    if len(rules) != len(primals):
        raise ValueError(f"{primitive.name!r} has {len(rules)} jvp rules for {len(primals)} operands; give each one")
    results = primitive.bind(*primals, **params)
    outputs = list(results) if primitive.multiple_results else [results]
    avals = list(map(jax.typeof, outputs))
    totals: list = list(map(_zero_tangent, outputs))
    for i, (rule, tangent) in enumerate(zip(rules, tangents)):
        if rule is None or type(tangent) is ad.Zero:
            continue
        returned = jax.tree.leaves(rule(tangent, *primals, **params), is_leaf=_is_zero)
        what = f"the jvp rule of {primitive.name!r} for operand {i}"
        for j, term in enumerate(_from_rule(what, returned, "the outputs are", avals)):
            if term is not None:
                totals[j] = ad.add_tangents(totals[j], term)
    if primitive.multiple_results:
        return outputs, totals
    return outputs[0], totals[0]


def _op_jvp(bound: _OpBinding, primals: Sequence, tangents: Sequence) -> tuple:
    """The op's jvp rule, which is for one slice, under the recorded vmaps."""
    rule = _derivative_rule(bound.op, "jvp")
    what = f"the jvp rule of {bound.op.name!r}"
    params = bound.rule_params

    def of_slice(primals: tuple, tangents: tuple) -> tuple:
        outputs, tangents_out = rule(primals, tangents, **params)
        outputs = _outputs(what, outputs, params["outs"] or jax.tree.leaves(outputs))
        avals = list(map(jax.typeof, outputs))
        return outputs, _from_rule(what, tangents_out, "the outputs are", avals)

    vmaps = [(in_axes, in_axes) for in_axes in bound.vmaps]
    outputs, tangents_out = _vmap_rule(of_slice, vmaps, primals, tangents)
    return outputs, [_zero_tangent(x) if t is None else t for x, t in zip(outputs, tangents_out)]


def _zero_tangent(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _op_transpose(bound: _OpBinding, cts: Sequence, *operands: Any) -> list:
    """The op's transpose rule, which is for one slice, under the recorded vmaps."""
    rule = _derivative_rule(bound.op, "transpose")
    if all(type(ct) is ad.Zero for ct in cts):
        return [None] * len(operands)
    what = f"the transpose rule of {bound.op.name!r}"

    def of_slice(cts: tuple, operands: tuple) -> list:
        avals = [x.aval if ad.is_undefined_primal(x) else None for x in operands]
        return _from_rule(what, rule(list(cts), *operands, **bound.rule_params), "the operands are", avals)

    vmaps = [((0,) * len(cts), in_axes) for in_axes in bound.vmaps]
    results = _vmap_rule(of_slice, vmaps, cts, operands)
    for i, ct in enumerate(results):
        if ct is not None:
            shared = [d for d, in_axes in enumerate(bound.vmaps) if in_axes[i] is None]
            if shared:
                ct = jax.lax.reduce_sum(ct, shared)  # over the slices that share the operand
            results[i] = _sharded_like(ct, operands[i].aval)
    return results


def _vmap_rule(of_slice: Callable, vmaps: Sequence[tuple], *groups: Sequence) -> Any:
    """A user's rule of groups of values, such as (primals, tangents), under vmaps: `in_axes` for each of the groups."""
    slices = []
    for values, *vmaps_of_values in zip(groups, *vmaps):
        depths = [axes.count(0) for _, *axes in zip(values, *vmaps_of_values)]
        slices.append(tuple(map(_symbolic_slice, values, depths)))
    return _for_each_vmap(jax.vmap, of_slice, vmaps)(*slices)


def _symbolic_slice(x: Any, depth: int) -> Any:
    """What is symbolic, as one slice of `depth` batch dimensions sees it; anything else as it is."""
    if not depth or type(x) not in (ad.Zero, ad.UndefinedPrimal):
        return x
    aval = _out_aval(x.aval.shape[depth:], x.aval.dtype, [x.aval], x.aval.sharding.spec[depth:])
    return type(x)(aval)


def _bind_with_vjp(call: _OpCall, ins: Sequence, fwd: Callable, bwd: Callable) -> Any:
    """Bind the op with its vjp rule, whose functions get the parameters of a call with these operands."""
    ins = _make_varying(ins)
    avals = list(map(jax.typeof, ins))
    params = call.binding(ins).rule_params

    def backward(residuals: Any, cotangents: Any) -> tuple:
        returned = bwd(residuals, cotangents, **params)
        return tuple(_from_rule(f"the vjp rule of {call.op.name!r}", returned, "the operands are", avals))

    function = jax.custom_vjp(call.bind_primitive)
    function.defvjp(functools.partial(fwd, **params), backward)
    return function(*ins)


def _from_rule(what: str, returned: Any, declares: str, avals: Sequence) -> list:
    """What a rule returned, as arrays of these types: None for zeros, and where a type is None or has no derivative."""
    if isinstance(returned, dict):
        raise TypeError(f"{what} returned {returned!r:.80}: return a tuple, in the order of what it is for")
    if not isinstance(returned, (list, tuple)):
        returned = [returned]
    arrays = [None if _is_zero(x) else _as_array(x) for x in returned]
    expected = [aval if aval and jax.dtypes.issubdtype(aval.dtype, np.inexact) else None for aval in avals]
    _check_returned(what, arrays, declares, expected)
    return [None if x is None or aval is None else _sharded_like(x, aval) for x, aval in zip(arrays, expected)]


def _is_zero(x: Any) -> bool:
    return x is None or isinstance(x, (ad.Zero, ad.UndefinedPrimal))  # rules of BrainEvent return operands


def _derivative_rule(op: XLACustomKernel, kind: str) -> Callable:
    if kind not in op._rules:
        raise NotImplementedError(
            f"{op.title} has no {kind} rule, which a derivative needs: use def_{kind}_rule, or define "
            "the derivative with def_jvp_rule2 or def_vjp_rule, or keep the op out of it with jax.lax.stop_gradient"
        )
    return op._rules[kind]


# ======================================================================================================
# 13. Backends: one row each; and the self-check, python -m xla_kernels.
# Knows what each backend needs and how it takes a ready kernel.  Does not know how that is compiled.


class _Backend(NamedTuple):
    platforms: dict[str, str]  # where it runs -> how to get it there
    ready: tuple[str, ...]  # packages and classes of compiled kernels: as names, so that nothing is imported for them
    wrap: Callable  # (ready kernel, outs, **options) -> function of arrays
    check: Callable[[], Any]  # makes the function that the self-check calls: 2 * x + y


def _wrap_numba_cuda(kernel: Any, outs: tuple, **options: Any) -> Any:
    """By default, one thread per element of the first output that has dimensions."""
    if options.keys().isdisjoint({"grid", "block", "launch_dims"}):
        shapes = [out.shape for out in outs if out.shape]
        options["launch_dims"] = shapes[0] if shapes else 1
        if shapes and len(shapes[0]) > 3:
            raise ValueError(
                "a ready CUDA kernel gets a thread for each element of the first output that has dimensions, but that "
                f"is of shape {shapes[0]}, and CUDA has 3: register it with launch_dims=, or with grid= and block="
            )
    return numba_cuda_kernel(kernel, outs, **options)


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


_CUDA_DISPATCHERS = (
    "numba.CUDADispatcher",
    "numba.FakeCUDAKernel",
    "numba_cuda.CUDADispatcher",
    "numba_cuda.FakeCUDAKernel",
    "numba_cuda_mlir.MLIRDispatcher",
)
_BACKENDS = {
    "numba": _Backend(
        {"cpu": _NUMBA_INSTALL}, ("numba.Dispatcher", "numba.DUFunc", "numba.GUFunc"), numba_kernel, _check_numba
    ),
    "warp": _Backend(
        {"cpu": _WARP_INSTALL, "gpu": 'pip install "jax[cuda13]" warp-lang numba'},
        ("warp.Kernel",),
        warp_kernel,
        _check_warp,
    ),
    "numba_cuda": _Backend({"gpu": _CUDA_INSTALL}, _CUDA_DISPATCHERS, _wrap_numba_cuda, _check_numba_cuda),
}


def _self_check() -> int:
    """Run `2 * x + y` through every backend; returns 1 if one that is installed is wrong."""
    print(f"xla_kernels {__version__}, Python {sys.version.split()[0]}, jax {jax.__version__}, NumPy {np.__version__}")
    print(f"platform {jax.default_backend()}, {jax.device_count()} device(s), XLA FFI API {_ffi_api_version()}")
    compilers = [package.name for package in _CUDA_PACKAGES.values() if package.is_installed()]
    print(f"plain functions become CUDA kernels by {', else '.join(compilers) or 'nothing that is installed'}\n")
    status = 0
    for name, backend in _BACKENDS.items():
        for platform, install in backend.platforms.items():
            try:
                result = _check_backend(backend, platform)
            except ImportError as error:
                needs = "an NVIDIA GPU, " if platform == "gpu" else ""
                result = f"not available: {error}\n{'':17}to get it: {needs}{install}"
            except Exception as error:
                status = 1
                result = f"FAILED: {type(error).__name__}: {error}"
            print(f"{name:11} {platform:4} {result}")
    return status


def _check_backend(backend: _Backend, platform: str) -> str:
    devices = _local_devices(platform)
    if not devices:
        raise ImportError(f"JAX finds no {platform}")
    return f"works, {_cost_per_call(backend.check(), devices[0]):.2f} µs per call under jit"


def _cost_per_call(call: Callable, device: Any, steps: int = 10_000) -> float:
    """Compare a call with NumPy, then time a loop of calls: microseconds for each, at best."""
    a = np.arange(16, dtype=np.float32)
    b = a + 1
    x = jax.device_put(a, device)
    y = jax.device_put(b, device)
    np.testing.assert_array_equal(call(x, y), 2 * a + b)

    @jax.jit
    def loop(x: Any, y: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda i, z: call(y, z), x)

    timer = timeit.Timer(lambda: loop(x, y).block_until_ready())
    times = timer.repeat(6, 1)  # the first one compiles
    return min(times) / steps * 1e6


if __name__ == "__main__":
    sys.exit(_self_check())
