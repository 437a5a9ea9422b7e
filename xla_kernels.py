# Copyright 2026 the authors of xla_kernels.  SPDX-License-Identifier: Apache-2.0
"""Call kernels written in Python (Numba, Numba CUDA, Warp) from JAX; on a CPU at the cost of C++.

One file to copy or to install.  The handler that XLA's foreign function interface calls is compiled to machine code:
no Python runs during a call, except for errors and for kernels that must run in Python (`_CallbackEmitter`).

    import jax, jax.numpy as jnp
    from xla_kernels import numba_kernel

    @numba_kernel(outs=lambda x, y: x)
    def add(x, y, out):
        out[:] = x + y

    add(jnp.arange(3.0), jnp.ones(3))            # works under jit, vmap, scan, shard_map, export

A mistake either works as it was meant, or is refused with what to do instead, as far as shapes, dtypes and the source
show it: not an index out of bounds, nor an element of an output that the kernel never stores to.  What takes intent is
the user's own responsibility, as in Numba, Warp and C++: own intrinsics, jitclasses and overloads that store to their
arguments, raw addresses (C and C++ code, too), containers that hide an array, classes that lie in `__eq__`, and globals
that another thread assigns while a kernel is compiled.

`python -m xla_kernels` shows which backends work on this machine.  Needs Python 3.12, jax 0.9 and NumPy 2.0; the
Numba and Warp backends need Numba 0.63, that of Warp also Warp 1.14.

A map of this file:

    1  JAX               what differs between its versions, what it does not document, and what it lacks
    2  C structs         those of XLA that a handler reads and writes: what a new jaxlib may change
    3  Targets           captured values, which kernels share a target, registration, lifetimes
    4  Specs and inputs  what comes in and goes out, checked where the user's call is on the stack
    5  The primitive     one call of one target, split over a mesh by XLA; and `_Wrapper`, which all backends share
    6  The handler       machine code that XLA calls: it runs a kernel for each slice of a batch
    7  Numba on CPUs     the wrapper, and the code that runs one slice
    8  Source analysis   the array accesses of Warp and Numba CUDA kernels
    9  Numba CUDA        the wrappers, launch configurations, and the code that launches a kernel
    10 Warp              the wrapper with a derivative, and the code that launches a kernel on CPUs and GPUs
    11 XLACustomKernel   one operation, many backends, all of JAX's transformations
    12 Backends          one row each, and the self-check

A call: `_Wrapper.__call__` -> `jax.jit` -> `_Wrapper._trace` -> `_Wrapper._resolve` -> `_NumbaKernel._find_target` ->
`_TargetRegistry.find_or_compile`, which compiles it (`_compile_numba` -> `_Handler`, for which `_NumbaEmitter` writes
what runs a slice), names and registers it -> `_CallParams.bind` -> `_call_lowering` -> XLA -> the code of `_Handler`
and `_BatchScheduler`.
An op under grad of vmap: `XLACustomKernel.__call__` -> `_OpParams.trace` -> `_op_batching`, which records the vmap ->
`_op_jvp`, `_op_transpose`, which vmap the user's rules -> `_op_lowering`, which knows the platform -> `_OpParams.run`
-> `_run_slice` -> the call of a wrapper, as above.
The order of a kernel's arguments: above `_NumbaWrapper`; in `_WarpKernel._find_target`.
An exception in a slice: `_NumbaEmitter`, `_store_error_message`, `_BatchScheduler.run_range` and `.worker_loop`.
A new backend takes a section like 7 to 9, a row in `_BACKENDS`, and a `def_..._kernel`.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import copy
import ctypes
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import inspect
import itertools
import linecache
import logging
import math
import mmap
import operator
import os
import pickle
import pkgutil
import re
import sys
import threading
import time
import timeit
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir

__version__ = "0.7.0"
__all__ = [
    "KernelEntry",
    "XLACustomKernel",
    "defjvp",
    "export_checks",
    "general_batching_rule",
    "jaxinfo_to_warpinfo",
    "jaxtype_to_warptype",
    "numba_cuda_callable",
    "numba_cuda_kernel",
    "numba_kernel",
    "warp_kernel",
]

# ======================================================================================================
# 1. JAX: what differs between its versions, what it does not document, and what it lacks.
# Checked on 0.9.0 to 0.12.0.1.  What JAX's interpreters ask of a primitive is in 5.1, 5.2 and 11.4 to 11.6.
# A new JAX may change the context of lowering rules and what `mlir`, `ad` and `batching` export: errors would say so.
# From inside JAX:
# - `_apply_primitive`, a mark on a function that keeps `jax_debug_nans` from running it again (test_debug_nans)
# - the effect of `jax.ffi.ffi_call`, read from a jaxpr (test_a_side_effect_keeps...)
# - where a mesh and varying axes stand in a type, and `axis_context` (test_xla_splits_a_batch, the matrix's shard_map)

Spec = jax.ShapeDtypeStruct
_SYMBOLIC = (ad.Zero, ad.UndefinedPrimal)  # what rules of derivatives may get in the place of an array
Primitive: Any = type(jax.lax.add_p)  # jax.extend.core.Primitive, without the 36 ms that importing jax.extend takes


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
    """The platform that a computation which is traced now will probably run on."""
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
    bind: Any = functools.partial(primitive.bind, **params)
    bind.__name__ = bind.__qualname__ = primitive.name
    bind._apply_primitive = True  # or jax_debug_nans runs it without jit, again and again
    return jax.jit(bind)


def _apply_primitive(primitive: Any, *args: Any, **params: Any) -> Any:
    """Compile and run one primitive: what JAX asks for when a primitive is bound to arrays, outside of `jax.jit`."""
    with jax.disable_jit(False):  # or this would bind it to arrays again
        return _jitted_primitive(primitive, **params)(*args)


def _lower(function: Callable, ctx: Any, operands: Sequence) -> Any:
    """Trace a function of the operands, which returns a sequence, and lower it."""
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


@functools.cache
def _side_effect() -> frozenset:
    """The effect of `jax.ffi.ffi_call(has_side_effect=True)`, which JAX knows how to keep and to order."""
    call = jax.ffi.ffi_call("xla_kernels.effect", (), has_side_effect=True)
    return frozenset(jax.make_jaxpr(call)().effects)


def _with_vjp(function: Callable, forward: Callable, backward: Callable) -> Callable:
    """A `jax.custom_vjp` that also takes inputs which vary over different axes, and batches of NumPy arrays."""
    with_vjp = jax.custom_vjp(function)
    with_vjp.defvjp(forward, backward)
    return lambda *args: with_vjp(*map(_without_numpy, _make_varying(args)))


def _without_numpy(x: Any) -> Any:
    """The same value; where `vmap` batches a NumPy array in `jit`, as one of JAX, which custom_vjp wants (to 0.12)."""
    value = x
    while isinstance(value, jax.core.Tracer):
        value = getattr(value, "val", None)  # what vmap batches
    return jax.numpy.copy(x) if isinstance(value, np.ndarray) else x  # which XLA does not copy


def _batch_in_front(x: Any, dim: int | None, size: int) -> Any:
    """An operand with its batch, which gets this size if it has none, as the first dimension."""
    if not isinstance(x, jax.Array):  # jax before 0.9.2 cannot transpose its own constants
        x = np.asarray(x)
    return batching.bdim_at_front(x, dim, size)


def _zeros(like: Any) -> Any:
    """`jnp.zeros_like`, but without truncation to 32 bits where x64 is disabled."""
    return ad.instantiate_zeros(ad.Zero(jax.core.ShapedArray(like.shape, like.dtype)))


# -- meshes, and the types of values on them -----------------------------------------------------------


def _mesh_of(avals: Sequence) -> Any:
    """The mesh that is part of a type (of an explicit mesh also where none is current), or the current one."""
    for aval in avals:
        if not aval.sharding.mesh.empty:
            return aval.sharding.mesh
    return jax.sharding.get_abstract_mesh()


def _varying_axes(aval: Any) -> frozenset:
    """The manual mesh axes over which a value varies inside `shard_map`."""
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.11
        return aval.manual_axis_type.varying
    return aval.vma


def _all_varying_axes(avals: Iterable) -> frozenset:
    return frozenset().union(*map(_varying_axes, avals))


def _varying(axes: frozenset) -> dict[str, Any]:
    """Arguments for an abstract value, or a spec, that varies over these axes (Pallas makes arrays of specs)."""
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
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, **_varying(_all_varying_axes(ins)))


def _make_varying(args: Sequence) -> list:
    """Inputs cast to vary over the same axes: the cast's transpose sums the cotangents of a replicated input."""
    axes = _all_varying_axes(map(jax.typeof, args))
    return [jax.lax.pcast(x, tuple(axes - _varying_axes(jax.typeof(x))), to="varying") for x in args]


def _sharded_like(x: Any, aval: Any) -> Any:
    """`x` with the sharding of `aval`, where that is part of the type: on meshes of explicit axes."""
    is_explicit = jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types
    return jax.sharding.reshard(x, aval.sharding) if is_explicit else x


def _devices_to_split_over(ctx: Any) -> int:
    """Over how many devices XLA splits what is lowered: in `shard_map`, those of the axes that are not manual."""
    context = ctx.module_context.axis_context
    if not isinstance(context, mlir.SPMDAxisContext):
        return getattr(context, "num_devices", 1)
    mesh = _mesh_of([*ctx.avals_in, *ctx.avals_out])
    return math.prod(size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)


# ======================================================================================================
# 2. The C structs of jaxlib/include/xla/ffi/api/c_api.h that a handler reads and writes.
# XLA adds fields at the end of a struct only, so these fit every later jaxlib (test_mirrored_structs_equal_the_header).
# A new major version may change anything: XLA refuses a handler that reports another one.

_API_MAJOR = 0

_PTR = ctypes.c_void_p
_I64 = ctypes.c_int64
_I32 = ctypes.c_int32
_SIZE = ctypes.c_size_t
_STAGE_EXECUTE = 3
_EXTENSION_METADATA = 1
_ERROR_INTERNAL = 13
_COMMAND_BUFFER_COMPATIBLE = 1


def _struct(**fields: Any) -> Any:
    return type("Struct", (ctypes.Structure,), {"_fields_": list(fields.items())})


def _sized_struct(**fields: Any) -> Any:
    """A struct that begins with its own size and a list of extensions, as nearly all do."""
    return _struct(struct_size=_SIZE, extension_start=_PTR, **fields)


XLA_FFI_InternalExtension = _struct(struct_size=_SIZE, type=_I32, next=_PTR)
XLA_FFI_Api_Version = _sized_struct(major_version=_I32, minor_version=_I32)
XLA_FFI_Metadata = _struct(struct_size=_SIZE, api_version=XLA_FFI_Api_Version, traits=_I32)
XLA_FFI_Metadata_Extension = _struct(
    extension_base=XLA_FFI_InternalExtension, metadata=ctypes.POINTER(XLA_FFI_Metadata)
)
XLA_FFI_Buffer = _sized_struct(dtype=_I32, data=_PTR, rank=_I64, dims=_PTR)
XLA_FFI_Array = _struct(dtype=_I32, size=_SIZE, data=_PTR)
XLA_FFI_Args = _sized_struct(size=_I64, types=_PTR, args=_PTR)
XLA_FFI_Rets = _sized_struct(size=_I64, types=_PTR, rets=_PTR)
XLA_FFI_Attrs = _sized_struct(size=_I64, types=_PTR, names=_PTR, attrs=_PTR)
XLA_FFI_Error_Create_Args = _sized_struct(message=_PTR, errc=_I32)
XLA_FFI_Error_Destroy_Args = _sized_struct(error=_PTR)
XLA_FFI_ThreadPool_Schedule_Args = _sized_struct(ctx=_PTR, task=_PTR, data=_PTR)
XLA_FFI_ThreadPool_NumThreads_Args = _sized_struct(ctx=_PTR, num_threads=_PTR)
XLA_FFI_Stream_Get_Args = _sized_struct(ctx=_PTR, stream=_PTR)
XLA_FFI_DeviceOrdinal_Get_Args = _sized_struct(ctx=_PTR, device_ordinal=_I32)
_API_FUNCTIONS = (
    "Error_Create Error_GetDetails Error_Destroy Handler_Register Stream_Get Type_Register InvokeContext_Get "
    "State_Set State_Get DeviceMemory_Allocate DeviceMemory_Free ThreadPool_Schedule ThreadPool_NumThreads "
    "Future_Create Future_SetAvailable Future_SetError RunId_Get DeviceOrdinal_Get"
).split()
XLA_FFI_Api = _sized_struct(
    api_version=XLA_FFI_Api_Version, internal_api=_PTR, **{f"XLA_FFI_{name}": _PTR for name in _API_FUNCTIONS}
)

XLA_FFI_CallFrame = _sized_struct(
    api=ctypes.POINTER(XLA_FFI_Api), ctx=_PTR, stage=_I32, args=XLA_FFI_Args, rets=XLA_FFI_Rets, attrs=XLA_FFI_Attrs
)


# ======================================================================================================
# 3. Targets: captured values, fingerprints, names, registration, lifetimes.
#
# A handler is the machine code that XLA calls to run a kernel (section 6).  XLA programs refer to handlers by target
# names, which XLA looks up in the process that runs the program.  The program may come from JAX's persistent cache or
# from another process.  Therefore two kernels of one process that may differ must never have the same target name.
#
# - A kernel is identified by its object: a plain function, or a decorated kernel (`@njit`, `@cuda.jit`, `@wp.kernel`).
# - The captured values of a kernel are the globals, closure variables and defaults that its code references.  Numba
#   reads them once, when it compiles the kernel.
# - If a `def` recreates a kernel, or a function is wrapped again, and the captured values are equal, the existing
#   target is shared.  Otherwise a kernel that is defined in a function would be compiled on each call of that function,
#   and each copy would stay registered forever.
# - A target name contains a hash of the kernel's code and captured values.  So it rarely depends on the order in which
#   kernels are created, and programs in JAX's persistent cache find their kernels.  Only `name=` guarantees this.

# The version of the interface between programs and handlers: the buffers, and the layout of the attribute `launch`.
# Increment it when the interface changes.  It is part of each target name, so that an exported program never calls a
# handler of another version.
_INTERFACE_VERSION = 9

_LOG = logging.getLogger(__name__)

# State that all copies of this file in a process share, including vendored and reloaded copies.
_PROCESS_STATE: dict[str, Any] = vars(
    sys.modules.setdefault("_xla_kernels_shared", types.ModuleType("_xla_kernels_shared"))
)
_REGISTRY_LOCK: threading.RLock = _PROCESS_STATE.setdefault("lock", threading.RLock())
_USED_TARGET_NAMES: set[str] = _PROCESS_STATE.setdefault("names", set())
_COMPILED_HANDLERS: dict[str, _CompiledHandler] = _PROCESS_STATE.setdefault("targets", {})  # by target name


def _native_lock(name: str) -> int:
    """Return the address of a lock for machine code, which all copies of this file share.

    The lock is CPython's PyThread_type_lock, which can be taken without the GIL.
    """
    allocate = ctypes.pythonapi.PyThread_allocate_lock
    allocate.restype = _PTR
    return _PROCESS_STATE.setdefault(name, allocate())  # atomic: if two threads allocate, the first lock is used


# -- 3.1 Captured values -------------------------------------------------------------------------------
# The values that the code of a kernel references.  Three parts of this file use them: fingerprints (3.2), the analysis
# of the source (8), and callables (9.2), whose captured values show which CUDA package they use.


def _py_func(kernel: Any) -> Any:
    """Return the Python function of a Numba or Warp kernel; return a plain function itself."""
    if hasattr(kernel, "adj"):  # Warp
        return getattr(kernel, "func", None) or kernel
    dispatcher = getattr(kernel, "_dispatcher", kernel)  # numba.vectorize keeps its dispatcher there
    return getattr(dispatcher, "py_func", None) or kernel


_LIBRARIES = frozenset("_operator builtins cmath heapq math numba numba_cuda_mlir numpy operator".split())


def _is_library_module(name: Any) -> bool:
    """Return whether a module is part of a library, whose attributes are not expected to be reassigned."""
    return str(name).partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=1024)
def _referenced_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a code object and in nested functions, each name once."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _referenced_names(constant)
    return tuple(dict.fromkeys(names))


def _captured_variables(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals, builtins and closure variables that the code of a function may reference.

    A code object does not tell globals and attributes apart.  If the code has `x.size`, and there is a global `size`,
    the result includes `size`.
    """
    scope = collections.ChainMap(function.__globals__, vars(builtins))
    variables = {name: scope[name] for name in _referenced_names(function.__code__) if name in scope}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # the cell is empty: the variable is not assigned yet
            variables[name] = cell.cell_contents
    return variables


def _captured_values(function: Any) -> list[tuple[str, Any]]:
    """Return a (name, value) pair for each variable and default of a function, and for each part of these values.

    If the object is not a Python function, return no pairs.
    """
    if not isinstance(function, types.FunctionType):
        return []
    variables = _captured_variables(function).items()
    keyword_defaults = (function.__kwdefaults__ or {}).items()
    values = [*variables, *keyword_defaults, ("defaults", function.__defaults__)]
    return _with_parts(values, _referenced_names(function.__code__))


def _with_parts(values: Iterable[tuple[str, Any]], attributes: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """Return (name, value) pairs, followed by pairs for the items of tuples and lists, and for attributes of modules.

    Attributes are included if their names are in `attributes`, and if the module is not part of a library.
    """
    found = list(values)
    searched = set()  # modules, which may refer to each other
    for name, value in found:  # the list grows in this loop
        if isinstance(value, (tuple, list)):
            found += [(name, item) for item in value]
        elif isinstance(value, types.ModuleType) and not _is_library_module(value.__name__) and value not in searched:
            searched.add(value)
            found += [(attribute, vars(value)[attribute]) for attribute in attributes if attribute in vars(value)]
    return found


def _kernel_and_helpers(kernel: Any) -> list[Any]:
    """Return a kernel, followed by its helpers: the jitted functions that it references, directly or indirectly."""
    functions = [kernel]
    for function in functions:  # the list grows in this loop
        for _, value in _captured_values(_py_func(function)):
            if _decorated_backend(value) in ("numba", "numba_cuda") and value not in functions:
                functions.append(value)
    return functions


def _all_captured_values(kernel: Any) -> list[tuple[str, Any]]:
    """Return the (name, value) pairs of all values that a kernel and its helpers capture."""
    return [pair for function in _kernel_and_helpers(kernel) for pair in _captured_values(_py_func(function))]


# -- 3.2 Fingerprints: which kernels compile to the same machine code ----------------------------------
# Numba has no hash of a kernel that covers captured values.  So `_fingerprint` writes a line of text for each option,
# code object and captured value of a kernel and its helpers.  The text is equal in all processes.  If no text can tell
# a value apart from others, the value is also compared by identity.  In this example, that is the helper:
#
#     n = 2.0                              text                                       identities
#     @numba.njit(fastmath=True)           code = 9700740100... ('helper', 'n') ...
#     def kernel(x, out):                  fastmath = bool b'\x80\x04\x88.'
#         out[0] = helper(n * x[0])        ...
#                                          helper = CPUDispatcher __main__ helper     helper
#                                          n = float b'\x80\x04\x95\n...'
#                                          code = 97007c0064... (of the helper)


class _IdentityKey:
    """A dictionary key that compares by identity and keeps its object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: Any) -> bool:
        return self.value is getattr(other, "value", None)  # of any class, because importlib.reload redefines this one


class _Fingerprint(NamedTuple):
    """All that decides the machine code of a kernel.  Kernels with equal fingerprints can share a target."""

    text: str  # equal in all processes, so that target names can contain its hash
    identities: tuple[_IdentityKey, ...]  # the values that the text does not tell apart from others


def _fingerprint(kernel: Any) -> _Fingerprint:
    """Return the fingerprint of a kernel and its helpers."""
    lines = []
    identities = []
    for function in _kernel_and_helpers(kernel):
        for name, value in _compiler_inputs(function):
            text = _exact_text(value)
            if text is None:
                text = _inexact_text(value)
                identities.append(_IdentityKey(value))
            lines.append(f"{name} = {text}")
    return _Fingerprint("\n".join(lines), tuple(identities))


def _compiler_inputs(function: Any) -> list[tuple[str, Any]]:
    """Return a (name, value) pair for each option, the code and each captured value of one function."""
    python_function = _py_func(function)
    options = dict(getattr(function, "targetoptions", {}))
    options["chip"] = None  # numba_cuda_mlir assigns this option when it compiles
    options["locals"] = sorted(getattr(function, "locals", {}).items())
    # The class as text, because numba_cuda_mlir creates a class for each dispatcher.
    options["pipeline"] = str(getattr(getattr(function, "_compiler", None), "pipeline_class", None))
    # With `cache=True` the machine code may come from a file, and may have captured other values.
    options["cache"] = type(getattr(function, "_cache", None))
    options["code"] = getattr(python_function, "__code__", None)
    return [*_with_parts(sorted(options.items())), *_captured_values(python_function)]


_LITERAL_TYPES = (bool, int, float, complex, str, bytes, slice)


def _exact_text(value: Any) -> str | None:
    """Return a text that is equal in all processes and differs for different values; None if there is no such text."""
    kind = type(value)
    if kind in _LITERAL_TYPES or isinstance(value, np.generic):
        return f"{kind.__name__} {pickle.dumps(value, protocol=4)!r}"  # a pickle tells -0.0, NaNs and dtypes apart
    if kind in (tuple, list):
        return f"{kind.__name__} of {len(value)}"  # the items have lines of their own (`_with_parts`)
    if kind in (set, frozenset):  # options, such as those of fastmath
        return f"{kind.__name__} {sorted(map(repr, value))}"
    if _is_plain_array(value) and _is_embedded_by_numba(value):
        return f"{_inexact_text(value)} {hashlib.blake2b(value.tobytes()).hexdigest()}"
    if kind is types.CodeType:
        return _code_text(value)
    return None


def _inexact_text(value: Any) -> str:
    """Return a text that is equal in all processes, but may be the same for different values."""
    if _is_plain_array(value):
        return f"{value.dtype} {value.shape} {value.strides}"
    return f"{type(value).__name__} {getattr(value, '__module__', '')} {getattr(value, '__name__', '')}"


def _code_text(code: types.CodeType) -> str:
    """Return a text that determines what a code object does.  It has no line numbers, so the source may move."""
    constants = []
    for _, constant in _with_parts([("", code.co_consts)]):
        constants.append(_exact_text(constant) or _inexact_text(constant))  # inexact only for None and Ellipsis
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, *counts
    return f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {names} {constants}"


def _is_plain_array(value: Any) -> bool:
    """Return whether a value is a NumPy array of elements that are not Python objects."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _is_embedded_by_numba(array: np.ndarray) -> bool:
    """Return whether Numba copies a global array into the machine code (`BaseContext.make_constant_array`).

    The machine code reads other arrays at run time, at their addresses.
    """
    return array.flags.forc and array.nbytes <= 10**6


def _is_reusable(kernel: Any) -> bool:
    """Return whether kernels with the fingerprint of this one can share its machine code."""
    if not isinstance(kernel, types.FunctionType) and getattr(kernel, "overloads", True):
        return False  # compiled before, maybe with other captured values; a ufunc has no overloads that show this
    return not vars(_py_func(kernel))  # attributes, such as __wrapped__, are not part of a fingerprint


def _first_overloads(kernel: Any) -> tuple[_IdentityKey, ...]:
    """Return the first overload of each helper, which is None if the helper is not compiled yet.

    `Dispatcher.recompile` replaces overloads.  The new ones may have captured other values.
    """
    overloads = []
    for helper in _kernel_and_helpers(kernel)[1:]:
        overloads.append(_IdentityKey(next(iter(getattr(helper, "overloads", {}).values()), None)))
    return tuple(overloads)


# -- 3.3 Targets: names, registration, lifetimes -------------------------------------------------------
# A target name is `<prefix>.<_INTERFACE_VERSION>.<hash>`.  The prefix is the user's `name=`, or `<module>.<kernel>`.
# A registered name is permanent, and unique in the process.  There are two naming schemes:
#
#     Numba   Compile first, then name.  If no kernel with an equal fingerprint has a target, `find_or_compile` compiles
#             the kernel.  Then the text of the fingerprint is hashed.  If another kernel has the same text, but other
#             identities, the name gets a number: `<prefix>.<_INTERFACE_VERSION>.<hash>.2`.
#     Warp    Name by content.  Warp hashes each kernel, and compiles kernels with equal hashes only once.  So this
#             hash, the options and the layout of a launch decide the name.  If a handler of this content exists,
#             `find_or_register` returns its name, otherwise it compiles a handler.
#
# Lifetimes.  XLA keeps the address of a registered handler forever, so all that the handler uses lives forever, too.
#
#     object               lives as long as                       kept alive by
#     wrapper              the user or JAX refers to it           the user; functions in JAX's caches
#     kernel               its wrappers; Numba CUDA: forever      its wrappers; `_CudaBatch`, to compile it once more
#     captured values      forever, if the kernel is reusable     the keys of `names_by_fingerprint`
#     `_Target`            traces that bind it                    JAX's caches.  It keeps a Warp kernel alive, too.
#     `_CompiledHandler`   forever, once it is registered         `_COMPILED_HANDLERS`
#     machine code         its `_CompiledHandler`                 `_CompiledHandler.keep_alive`
#     XLA executable       JAX caches it                          JAX's caches; it refers to handlers only by name


class _CompiledHandler(NamedTuple):
    """A handler in memory, and what belongs to it."""

    address: int
    keep_alive: list[Any]  # LLVM's engines, the compiled kernel, callbacks
    data: Any = None  # the handler's `_HandlerData`
    batch: _CudaBatch | None = None  # on a GPU: prepares a single launch for a batch


def _register_with_xla(target_name: str, platform: str, compiled: _CompiledHandler) -> None:
    """Register a handler for all programs that call this target."""
    # In this order, XLA gets the address in the last step that can fail, and the handler is kept alive from then on.
    jax.ffi.register_ffi_target_as_batch_partitionable(target_name)
    handler = jax.ffi.pycapsule(ctypes.c_void_p(compiled.address))
    jax.ffi.register_ffi_target(target_name, handler, platform.replace("cuda", "CUDA"))
    _COMPILED_HANDLERS[target_name] = compiled


class _Specialization(NamedTuple):
    """All that decides the target of a kernel, besides the kernel itself.

    It consists of tuples, because they stay equal when importlib.reload redefines their classes.
    """

    signature: _Signature
    options: tuple[Any, ...]  # all options that change the machine code; for Warp also the kernel (`_warp_content`)
    platform: str  # "cpu" or "cuda"
    requested_name: str | None  # the user's `name=`
    launch_layout: str = ""  # the layout of the attribute `launch`, if handlers have different ones (Warp)


class _TargetRegistry:
    """The target names of all kernels of this module.

    If several threads look up a new kernel, one of them compiles it, and the others wait for `compile_lock`.  A thread
    that chooses a name holds `_REGISTRY_LOCK`, because names are unique among all copies of this file.
    """

    def __init__(self) -> None:
        # {owner: {specialization: target name}}.  The owner is a dispatcher, or the wrapper of a plain function.
        self.names_by_owner: Any = weakref.WeakKeyDictionary()
        # {(specialization, fingerprint, first overloads of helpers): target name}, only of reusable Numba kernels.
        self.names_by_fingerprint: dict[tuple, str] = {}
        # {specialization: target name}, only of Warp kernels.
        self.names_by_content: dict[_Specialization, str] = {}
        self.exportable_names: set[str] = set()  # the target names that begin with the user's `name=`
        self.compile_lock = threading.RLock()  # Numba compiles on one thread at a time, too

    def find_or_compile(
        self,
        wrapper: Any,
        specialization: _Specialization,
        compile_kernel: Callable[[], _CompiledHandler | None],
        freezes_globals: bool = True,
    ) -> str:
        """Return the target name of a Numba kernel.  If it has none, reuse an equal kernel's, or compile and register.

        Args:
          wrapper: the `_Wrapper` of the kernel.
          specialization: the `_Specialization` that the call needs.
          compile_kernel: a function that compiles the kernel.  It returns None if another process will run the program,
            and this process only lowers it.
          freezes_globals: False if Python reads globals on each run, in callables and in Numba's simulator.  Then no
            other kernel shares the target.  Default True.
        """
        kernel = wrapper.kernel
        # A dispatcher captures values once.  A plain function that is wrapped again captures them again.
        owner = wrapper if isinstance(kernel, types.FunctionType) else kernel
        with _REGISTRY_LOCK:
            names = self.names_by_owner.setdefault(owner, {})
        if specialization not in names:
            with self.compile_lock:
                if specialization not in names:  # otherwise another thread has compiled the kernel in the meantime
                    name = self._reuse_or_compile(kernel, specialization, compile_kernel, freezes_globals)
                    names[specialization] = name
        return names[specialization]

    def _reuse_or_compile(
        self,
        kernel: Any,
        specialization: _Specialization,
        compile_kernel: Callable[[], _CompiledHandler | None],
        freezes_globals: bool,
    ) -> str:
        """Return the target name of an equal kernel.  If there is none, compile and register this kernel."""
        fingerprint = _fingerprint(kernel)
        if not (freezes_globals and _is_reusable(kernel)):
            return self._register(specialization, compile_kernel(), fingerprint.text)
        key = specialization, fingerprint, _first_overloads(kernel)
        if key not in self.names_by_fingerprint:
            name = self._register(specialization, compile_kernel(), fingerprint.text)
            key = specialization, fingerprint, _first_overloads(kernel)  # by now Numba has compiled the helpers
            self.names_by_fingerprint[key] = name
        return self.names_by_fingerprint[key]

    def find_or_register(self, specialization: _Specialization, compile_handler: Callable[[], _CompiledHandler]) -> str:
        """Return the target name of a Warp kernel.  If it has none, compile and register its handler.

        The caller holds `_WARP_LOCK`.
        """
        if specialization not in self.names_by_content:
            self.names_by_content[specialization] = self._register(specialization, compile_handler())
        return self.names_by_content[specialization]

    def _register(self, specialization: _Specialization, compiled: _CompiledHandler | None, *kernel_text: str) -> str:
        """Register a handler under an unused target name, and return the name.

        The name is reserved last.  If the registration fails, the name stays free for another attempt.
        """
        signature, options, platform, requested_name, launch_layout = specialization
        hashed = [str(signature), launch_layout]
        if not requested_name:  # with `name=`, an exported program finds the kernel even if it was edited
            hashed += [*kernel_text, *map(str, options)]
        prefix = requested_name or f"{__name__}.{signature.label}"
        target_name = f"{prefix}.{_INTERFACE_VERSION}.{_hash(*hashed)}"
        with _REGISTRY_LOCK:
            if requested_name and target_name in _USED_TARGET_NAMES:
                raise ValueError(
                    f"A name= stands for one kernel of a process. name={requested_name!r} is in use for {signature}, "
                    "by another kernel of this process, or by this one with other options or captured values. Pass a "
                    f"new name, such as name={requested_name + '_2'!r}, or create the kernel and its helpers only once."
                )
            target_name = _numbered(target_name, signature.label)
            if compiled is not None:
                _register_with_xla(target_name, platform, compiled)
            _USED_TARGET_NAMES.add(target_name)
            if requested_name:
                self.exportable_names.add(target_name)
        return target_name


def _numbered(target_name: str, label: str) -> str:
    """Return the target name; if it is in use, return the first of `<name>.2`, `<name>.3`, ... that is not."""
    numbered = target_name
    number = 1
    while numbered in _USED_TARGET_NAMES:
        number += 1
        numbered = f"{target_name}.{number}"
    if number == _MANY_COMPILATIONS:
        warnings.warn(
            f"Kernel {label!r} was compiled {number} times from the same code, because it, or an object that it "
            "captures, was created again each time. A compilation takes about 75 ms, and 1 MB that is never freed. "
            "Create the kernel and its helpers once, outside of the function that calls it.",
            skip_file_prefixes=_INTERNAL_FILE_PREFIXES,
        )
    return numbered


_MANY_COMPILATIONS = 50
_REGISTRY: _TargetRegistry = globals().get("_REGISTRY") or _TargetRegistry()  # importlib.reload keeps the registry


def _hash(*parts: str) -> str:
    """Return a hash of 96 bits that is equal in all processes."""
    return hashlib.blake2b("\n".join(parts).encode("utf-8", "replace"), digest_size=12).hexdigest()


@dataclasses.dataclass(frozen=True, repr=False)
class _Target:
    """The target of a call, and the value of its attribute `launch`.  A batch has the same target.

    A target must not refer to its wrapper: JAX keeps a target as long as the wrapper lives, so neither would be freed.
    """

    name: str
    launch: tuple[int, ...] = ()  # the integers that the handler reads, which depend on shapes and options
    is_noop: bool = False  # whether the launch is empty for these shapes and options
    platform: str = ""
    # For error messages: the name of the wrapper, the platforms it runs on, and how to get a derivative.
    title: str = ""
    where: str = ""
    derivative: str = ""

    def __repr__(self) -> str:
        return f"{self.name}{self.launch}"

    def registered_for(self, platform: str, has_batch: bool = False) -> _Target:
        """Return the target that runs the call on a platform.  On a GPU, also prepare a single launch for a batch.

        Raises:
          NotImplementedError: if the kernel does not run on the platform.
        """
        if platform != self.platform:
            raise NotImplementedError(
                f"{self.title} {self.where}. This call is compiled for the platform {platform!r}. Move its inputs to "
                "a device that the kernel runs on: x = jax.device_put(x, device)."
            )
        compiled = _COMPILED_HANDLERS.get(self.name)  # None if another process will run the program
        if has_batch and compiled and compiled.batch:
            with _log_per_slice_fallback(self.title):
                compiled.batch.prepare(grid=self.launch[:3], block=self.launch[3:6])
        return self


class _BatchLaunchUnsupported(Exception):
    """The reason why a batch on a GPU is not a single launch, but one launch per slice."""


@contextlib.contextmanager
def _log_per_slice_fallback(title: str) -> Iterator[None]:
    """Catch any exception while a single launch is prepared for a batch, and log it as the reason for the fallback."""
    try:
        yield
    except Exception as error:  # if a kernel cannot be compiled, Numba and Warp raise exceptions of many types
        kind = "" if isinstance(error, _BatchLaunchUnsupported) else f"{type(error).__name__}: "
        _LOG.debug("%s: a batch is a launch for each slice: %s%.1000s", title, kind, " ".join(str(error).split()))


class export_checks:
    """A `jax.export.DisabledSafetyCheck` for each kernel with `name=`, to export programs that call these kernels.

    JAX reads the checks after lowering, so they can be created before the first trace.  A process that loads an
    exported program must first trace the kernels, by a call or by `jax.eval_shape`.  Then XLA finds them by name.
    Shapes may be symbolic.  For Warp kernels, and with `launch_dims`, only dimensions of `vmap` may be symbolic.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax import export
      >>> double = numba_kernel(lambda x: 2 * x, outs=lambda x: x, name="double")
      >>> spec = jax.ShapeDtypeStruct((3,), jnp.float32)
      >>> data = export.export(jax.jit(double), disabled_checks=export_checks())(spec).serialize()
      >>> export.deserialize(data).call(jnp.arange(3.0)).tolist()
      [0.0, 2.0, 4.0]
    """

    def __iter__(self) -> Iterator:
        from jax import export

        return map(export.DisabledSafetyCheck.custom_call, sorted(_REGISTRY.exportable_names))


# ======================================================================================================
# 4. Specs and inputs: what comes in and what goes out, checked where the user's call is on the stack.
# A spec is the shape and dtype of an array.
# From inside JAX: its fast path looks at no byte order.


def _is_spec(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)  # the class np.float32 has both


def _format_spec(spec: Any) -> str:
    """A spec as people write it: float32[3,4]."""
    if not _is_spec(spec):
        return str(spec)
    sizes = ",".join(map(str, spec.shape))
    return f"{getattr(spec.dtype, 'name', spec.dtype)}[{sizes}]"


def _flatten_specs(tree: Any) -> tuple[list, Any]:
    """The specs of a pytree, in JAX's order, and its structure."""
    leaves, structure = jax.tree.flatten(tree, lambda x: hasattr(x, "aval") or _is_spec(x))
    return [getattr(x, "aval", x) for x in leaves], structure  # arrays and symbolic values have one


def _contains_dict(structure: Any) -> bool:
    node = structure.node_data()  # None of a leaf
    return node and (issubclass(node[0], Mapping) or any(map(_contains_dict, structure.children())))


def _check_dtype(dtype: Any, what: str) -> None:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{what} has the dtype {dtype}, which has no memory layout: pass jax.random.key_data(key)")


def _normalize_specs(specs: Any, what: str, ins: Sequence[Spec] | None = None) -> tuple[list[Spec], Any]:
    """The leaves of a pytree of declared specs as ShapeDtypeStructs, and its structure.

    With `ins` they get the dtypes that JAX allows beside these inputs.
    """
    if specs is None:
        raise TypeError(f"{what} is missing: give specs, such as outs=lambda x: x; for none, () and has_side_effect")
    leaves, tree = _flatten_specs(specs)
    declared = []
    for i, leaf in enumerate(leaves):
        name = f"{what}[{i}]" if len(leaves) > 1 else what
        declared.append(_normalize_spec(leaf, name, ins))
    return declared, tree


def _normalize_spec(x: Any, what: str, ins: Sequence[Spec] | None) -> Spec:
    if not _is_spec(x):
        raise TypeError(
            f"{what} must be specs with both .shape and .dtype, such as jax.ShapeDtypeStruct(shape, dtype), or a "
            f"callable of the inputs' specs that returns them; got {x!r} of type {type(x).__name__}"
        )
    _check_dtype(x.dtype, what)
    try:
        shape = jax.core.ShapedArray(x.shape, np.float32).shape  # checked, of Python's ints and of symbolic sizes
    except TypeError as error:
        raise TypeError(f"{what}: {_GETS_SPECS}; a shape is flat, such as (2, *x.shape): {error}") from error
    if any(isinstance(size, int) and size < 0 for size in shape):
        raise ValueError(f"{what} has a negative dimension in its shape {shape}")
    dtype = np.dtype(x.dtype)
    if ins is None:
        return Spec(shape, dtype)
    is_allowed = jax.config.jax_explicit_x64_dtypes.name == "ALLOW" or any(x.dtype == dtype for x in ins)
    allowed = dtype if is_allowed else jax.dtypes.canonicalize_dtype(dtype)  # of 64 bits if x64 is enabled
    if allowed != dtype:
        warnings.warn(
            f"{what} asks for {dtype}, which JAX truncates to {allowed} unless jax_enable_x64 is set",
            skip_file_prefixes=_INTERNAL_FILE_PREFIXES,
        )
    return Spec(shape, allowed)


# CPython 3.12 and 3.13 take no whole name for a prefix, so this file's lacks the last letter.
_INTERNAL_FILE_PREFIXES = (__file__[:-1], os.path.join(os.path.dirname(jax.__file__), ""))


def _input_name(i: int, title: str, parameters: Sequence[str]) -> str:
    name = f" ({parameters[i]!r})" if i < len(parameters) else ""
    return f"{title}: input {i}{name}" if title else f"input {i}"


def _input_specs(args: Sequence, title: str = "", parameters: Sequence[str] = ()) -> list[Spec]:
    avals = list(map(jax.typeof, args))
    for i, aval in enumerate(avals):
        _check_dtype(aval.dtype, _input_name(i, title, parameters))
    return [Spec(aval.shape, aval.dtype) for aval in avals]


# Exact types that JAX takes, which are quick to find; it grows.  NumPy's array is none: its dtype is looked at.
_INPUT_TYPES: set[type] = {bool, int, float, complex}
# In native byte order: jitted functions that know such an array read other byte orders as native, too (jax 0.12).
_PLAIN_DTYPES = frozenset(map(np.dtype, "?bhilqBHILQefdFD"))


def _convert_inputs(args: Sequence, title: str, parameters: Sequence[str] = ()) -> tuple[Any, bool]:
    """The inputs as JAX can take them, and whether one of them is being traced."""
    is_traced = False
    inputs = list(args)
    for i, x in enumerate(args):
        if type(x) in _INPUT_TYPES or (type(x) is np.ndarray and x.dtype in _PLAIN_DTYPES):
            continue
        name = _input_name(i, title, parameters)
        if getattr(x, "__jax_array__", None):  # of a tracer it is None
            x = inputs[i] = x.__jax_array__()
        if isinstance(x, jax.Ref):
            raise TypeError(f"{name} is a jax.Ref: pass its value, ref[...]")
        if isinstance(x, jax.core.Tracer):
            is_traced = True
        else:
            inputs[i] = _convert_input(x, name)
    return inputs, is_traced


def _convert_input(x: Any, name: str) -> Any:
    """An array of another library becomes one of JAX's, which shares its memory."""
    with contextlib.suppress(TypeError):
        jax.typeof(x)
        if not isinstance(x, np.ndarray):
            _INPUT_TYPES.add(type(x))
        return x
    try:
        return jax.dlpack.from_dlpack(x)
    except Exception as error:
        with contextlib.suppress(Exception):  # of PyTorch and Warp: XLA does not take memory with gaps, as of a column
            return jax.dlpack.from_dlpack(x.contiguous())
        raise TypeError(
            f"{name} must be a number or an array of numbers; got {type(x).__name__} {getattr(x, 'dtype', x)!s:.80}: "
            "pass the leaves of a container and the fields of a structured array one by one, and an array of another "
            f'byte order as x.astype(x.dtype.newbyteorder("=")) ({error})'
        ) from error


def _call_with_specs(option: Callable, what: str, *specs: Any) -> Any:
    """Call an option that is a function of the inputs' specs; the error says so if it wants their values."""
    try:
        return option(*specs)
    except (AttributeError, IndexError, TypeError) as error:
        shown = ", ".join(map(_format_spec, specs))
        raise TypeError(f"{what} of ({shown}): {error}: {_GETS_SPECS}") from error


_GETS_SPECS = (
    "a function gets specs (.shape and .dtype) of arrays, no values; jax.eval_shape(f, ...) gives those of what f "
    "returns; a size must be known before the call, such as n in outs=jax.ShapeDtypeStruct((n,), dtype), or is a fixed "
    "capacity, with a count as one more output"
)


def _check_call_signature(signature: inspect.Signature, what: str, args: Sequence, params: Iterable[str] = ()) -> None:
    try:
        signature.bind(*args, **dict.fromkeys(params))
    except TypeError as error:
        shown = ", ".join([*map(_format_spec, args), *map("{}=".format, params)])
        fix = "" if args else ", or pass what it lacks to op(...) by name"  # a generator gets params alone
        raise TypeError(
            f"{what} takes {signature}, but this call gives it ({shown}): {error}; give it one parameter for each{fix}"
        ) from None


# ======================================================================================================
# 5. The primitive behind every wrapper: one call of one target.
# A wrapper (5.4) finds the target of a call, and binds the primitive `xla_kernel` (5.1) with it.
# From inside XLA and Numba:
# - how XLA splits a batch, and how Shardy writes a rule (5.2; test_xla_splits_a_batch)
# - two wrong passes (`_call_lowering`; test_a_loop_whose_whole_state_is_what_a_kernel_gives)
# - which fusions work in place (test_state_that_a_kernel_changes_is_copied_where_that_of_jax_is)
# - Numba's pickles of functions (`_Wrapper._reduce_without_module`; test_copies_and_pickles...)

# -- 5.1 The primitive: what JAX's interpreters ask ----------------------------------------------------
# An alias (i, j) says that output j starts with the value of input i.  A wrapper has the user's aliases, by name or
# number; a `_CallParams` has aliases by number.
# Only the results of a kernel are results of the primitive.  XLA's custom call has more outputs: scratch.


@dataclasses.dataclass(frozen=True)
class _CallParams:
    """The parameter of the primitive: the buffers of one slice, what runs it once that is found, and the batch."""

    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]  # the results, then scratch
    n_results: int
    aliases: tuple[tuple[int, int], ...]
    zeroed: tuple[int, ...]  # the buffers in `outs` that start from zeros
    has_side_effect: bool
    target: Any = None
    batch: tuple[int, ...] = ()  # the dimension that each `vmap` has added in front, the last one's first

    def signature(self, label: str) -> _Signature:
        specs = self.ins + self.outs
        dtypes = tuple(np.dtype(spec.dtype) for spec in specs)
        ranks = tuple(len(spec.shape) for spec in specs)
        return _Signature(label, len(self.ins), dtypes, ranks, self.aliases, self.zeroed)

    def bind(self, args: Sequence) -> list:
        """The results of the primitive."""
        return _call_p.bind(*args, call=self)


def _batch_axes(specs: Iterable[Iterable[Any]]) -> list:
    """The mesh axes of each dimension of a batch, by what the operands have there: a name, several, or None."""
    return [next(filter(None, axes), None) for axes in specs]


def _call_abstract_eval(*ins: Any, call: _CallParams) -> tuple:
    split = _batch_axes([x.sharding.spec[d] for x in ins if x.shape[d] != 1] for d in range(len(call.batch)))
    results = call.outs[: call.n_results]
    avals = [_out_aval((*call.batch, *out.shape), out.dtype, ins, split) for out in results]
    if call.has_side_effect:
        return avals, _side_effect()
    return avals, frozenset()


def _platforms(ctx: Any) -> Sequence[str]:
    """The platforms that a lowering rule is asked for."""
    return ctx.platforms or ctx.module_context.platforms


def _call_lowering(ctx: Any, *operands: Any, call: _CallParams) -> Any:
    n_devices = _devices_to_split_over(ctx)
    if call.has_side_effect and n_devices > 1:
        raise NotImplementedError(
            f"{call.target.title} has side effects, and XLA does not say on which devices it runs them: over several, "
            "call it in a jax.shard_map over all axes of the mesh"
        )
    if call.target.is_noop or 0 in call.batch:  # XLA before jax 0.10 refuses this in a command buffer
        return _lower_to_starts(ctx, operands, call.aliases)
    outs = [jax.core.ShapedArray((*call.batch, *out.shape), out.dtype) for out in call.outs]
    is_known = all(isinstance(size, int) for x in (*ctx.avals_in, *outs) for size in x.shape)  # as Shardy's rules want
    n_split = 0
    if outs and n_devices > 1 and is_known:
        while n_split < len(call.batch) and call.batch[n_split] % n_devices == 0:
            n_split += 1
    if n_split:
        results = _lower_to_split_call(ctx, operands, call, outs, n_split)
    else:
        results = _lower_to_custom_call(ctx, operands, call, ctx.avals_in, outs)
    # Two passes of XLA are wrong (jax 0.11.2 and 0.12).  A dynamic-slice fusion on GPUs lets a call write straight into
    # the array that is updated, even if the call reads it.  And what moves invariant code out of a `while_loop` takes a
    # call whose outputs are the whole state of the loop for a tuple, and its operands for the elements.
    if "cuda" in _platforms(ctx) or len(outs) > 1:
        return _lower_barriers(ctx, results, ctx.avals_out, range(len(results)))
    return results


def _lower_to_custom_call(
    ctx: Any, operands: Any, call: _CallParams, ins: Sequence, outs: Sequence, **attributes: Any
) -> Any:
    """The results of the custom call.

    An alias lets XLA save a copy; it is the handler that makes sure that the output starts with the input.
    """
    platform, *_ = _platforms(ctx)  # cpu and cuda have rules of their own, and no other has kernels
    target = call.target.registered_for(platform, bool(call.batch))
    # A fusion with what makes an aliased operand could not work in its memory: `kernel(v.at[i].set(2.0), i)` in a loop
    # over 20 MB took 1,400 us a step for 1 (CPU, jax 0.12).  GPUs gain nothing, and would copy slices that are fused.
    if platform == "cpu" and call.aliases:
        operands = _lower_barriers(ctx, operands, ins, dict(call.aliases))
    lower = jax.ffi.ffi_lowering(
        target.name,
        operand_output_aliases=dict(call.aliases),
        has_side_effect=call.has_side_effect,
        extra_attributes=attributes,
    )
    values = lower(ctx.replace(avals_in=ins, avals_out=outs), *operands, launch=np.array(target.launch, np.int64))
    return values[: call.n_results]


def _lower_barriers(ctx: Any, values: Any, avals: Sequence, numbers: Container[int]) -> Any:
    """The same values: XLA fuses, moves and merges no code over the barriers of those with these numbers."""

    def keep(*values: Any) -> list:
        return [jax.lax.optimization_barrier(x) if k in numbers else x for k, x in enumerate(values)]

    return _lower_untyped(keep, ctx, values, avals, avals)


def _lower_to_starts(ctx: Any, operands: Any, aliases: Sequence[tuple[int, int]]) -> Any:
    """The outputs of a call that runs nothing: what they start from, an input or zeros."""

    def start(*ins: Any) -> list:
        outs = [*map(_zeros, ctx.avals_out)]
        for i, j in aliases:
            outs[j] = ins[i]
        return outs

    return _lower(start, ctx, operands)


def _call_batching(args: Any, dims: Any, *, call: _CallParams) -> Any:
    """One more leading dimension everywhere; size 1 says that an operand is the same for every slice."""
    size = next(x.shape[dim] for x, dim in zip(args, dims) if dim is not None)
    sizes = [1 if dim is None else size for dim in dims]
    for i, _ in call.aliases:
        sizes[i] = size  # each slice of the output starts with one of the input
    ins = map(_batch_in_front, args, dims, sizes)
    batched = dataclasses.replace(call, batch=(size, *call.batch))
    return batched.bind([*ins]), [0] * call.n_results


def _call_jvp(primals: Sequence, tangents: Sequence, *, call: _CallParams) -> tuple:
    if any(jax.dtypes.issubdtype(out.dtype, np.inexact) for out in call.outs[: call.n_results]):
        raise TypeError(
            f"{call.target.title} has no (further) derivative: {call.target.derivative}use jax.custom_vjp for grad, "
            "jax.custom_jvp for jvp and hessian, or an XLACustomKernel's rules; jax.lax.stop_gradient(x) for inputs "
            "that need none; a kernel that a rule calls needs a rule of its own where that is differentiated again"
        )
    results = call.bind(primals)
    return results, list(map(_zero_tangent, results))


def _call_transpose(cts: Sequence, *operands: Any, call: _CallParams) -> list:
    raise NotImplementedError(
        f"{call.target.title} cannot be transposed, as grad of a jax.custom_jvp does where its rule calls this with "
        "tangents: use jax.custom_vjp, or an XLACustomKernel's rules"
    )


_call_p = Primitive("xla_kernel")
_call_p.multiple_results = True
_call_p.def_impl(functools.partial(_apply_primitive, _call_p))
_call_p.def_effectful_abstract_eval(_call_abstract_eval)
ad.primitive_jvps[_call_p] = _call_jvp
ad.primitive_transposes[_call_p] = _call_transpose
batching.primitive_batchers[_call_p] = _call_batching
mlir.register_lowering(_call_p, _call_lowering)
for _platform in ("cpu", "cuda"):  # so each gets a call of its own where a program is lowered for both
    mlir.register_lowering(_call_p, _call_lowering, platform=_platform)


# -- 5.2 Over a mesh: XLA splits a batch ---------------------------------------------------------------
# Under plain `jit` XLA's partitioner for batches (custom_call_batch_partitioner.cc) runs a call on each device's part
# of the batch.  It splits the first `num_batch_dims` dimensions of every operand that has more of them, and leaves
# others whole.  So, for eight slices of x and a w that they share, on four devices:
#
#              one slice    bound to the primitive    passed to XLA    num_batch_dims    on each device
#       x      [6]          [8,6]                     [8,1,1,1,6]      3, so split       [2,1,1,1,6]
#       w      [6,6]        [1,6,6]                   [6,6]            3, so whole       [6,6]
#       out    [6]          [8,6]                     [8,1,1,1,6]      3, so split       [2,1,1,1,6]
#
# - An operand that all slices share is passed with the kernel's own rank.  The batch gets dimensions of size 1, so that
#   every split operand has more dimensions than any shared one.
# - An operand that only some of the vmaps batch is broadcast.  So is a shared first operand, if another shared operand
#   follows a batched one: where shardings differ, XLA takes the first operand's for all (FindCommonSharding).
# - Only leading dimensions that the number of all devices divides are split: a kernel that raises on XLA's padding
#   leaves other devices waiting.  That axes of a mesh divide one is not enough: `x[:4]` stays split over all eight.
# The kernel's own dimensions are gathered: only `jax.shard_map` splits them.


def _lower_to_split_call(ctx: Any, operands: Any, call: _CallParams, outs: Sequence, n_split: int) -> Any:
    """The results of a call of which XLA may split the first `n_split` dimensions of the batch."""
    batch = call.batch
    depth = len(batch)
    is_whole = _are_whole(ctx.avals_in, depth)
    n_ones = max(len(x.shape) for x in ctx.avals_in) - depth
    n_batch_dims = n_split + n_ones
    ones = (1,) * (n_ones + 1)  # one more, as XLA leaves operands of just `n_batch_dims` whole
    leading = (*batch[:n_split], *ones, *batch[n_split:])

    def passed(x: Any, whole: bool = False) -> Any:
        """The abstract value that the call gets or returns in the place of `x`."""
        return jax.core.ShapedArray((*(() if whole else leading), *x.shape[depth:]), x.dtype)

    def reshape_operands(*operands: Any) -> list:
        reshaped = []
        for x, aval, whole in zip(operands, ins, is_whole):
            if not whole:
                x = jax.numpy.broadcast_to(x, (*batch, *x.shape[depth:]))
            reshaped.append(jax.lax.reshape(x, aval.shape))
        return reshaped

    def reshape_results(*results: Any) -> list:
        return [jax.lax.reshape(x, aval.shape) for x, aval in zip(results, ctx.avals_out)]

    ins = list(map(passed, ctx.avals_in, is_whole))
    passed_outs = list(map(passed, outs))
    attributes = {
        "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(n_batch_dims)}),
        "sdy.sharding_rule": _sharding_rule(ins, is_whole, passed_outs, n_common=n_batch_dims + 1),
    }
    operands = _lower_untyped(reshape_operands, ctx, operands, ctx.avals_in, ins)
    results = _lower_to_custom_call(ctx, operands, call, ins, passed_outs, **attributes)
    return _lower_untyped(reshape_results, ctx, results, passed_outs[: call.n_results], ctx.avals_out)


def _lower_untyped(function: Callable, ctx: Any, operands: Sequence, ins: Sequence, outs: Sequence) -> Any:
    """Lower a function that only changes shapes, with types without the shardings that explicit meshes add."""
    avals = [[jax.core.ShapedArray(x.shape, x.dtype) for x in arrays] for arrays in (ins, outs)]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return _lower(function, ctx.replace(avals_in=avals[0], avals_out=avals[1]), operands)


def _are_whole(ins: Sequence, depth: int) -> list[bool]:
    """Which operands are passed without batch: those that all slices share, but for the first in one case (above)."""
    is_shared = [all(size == 1 for size in x.shape[:depth]) for x in ins]
    follows_batched = [shared and not all(is_shared[:i]) for i, shared in enumerate(is_shared)]
    if any(follows_batched):
        is_shared[0] = False
    return is_shared


def _sharding_rule(ins: Sequence, is_whole: Sequence[bool], outs: Sequence, n_common: int) -> Any:
    """Shardy's rule of a call: arrays have so many leading dimensions in common; each other one is of its own."""
    from jax.extend.mlir.dialects import sdy  # here, as it takes 36 ms

    sizes = list(outs[0].shape[:n_common])

    def dimensions(x: Any, whole: bool = False) -> Any:
        n_shared = 0 if whole else n_common
        own_sizes = x.shape[n_shared:]
        numbers = [*range(n_shared), *range(len(sizes), len(sizes) + len(own_sizes))]
        sizes.extend(own_sizes)
        return sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get([number]) for number in numbers])

    operands = list(map(dimensions, ins, is_whole))
    results = list(map(dimensions, outs))
    return sdy.OpShardingRuleAttr.get(sizes, operands, results)


# -- 5.3 What a public function is given: a kernel, and options ----------------------------------------


def _parameters(kernel: Any) -> tuple[str, ...]:
    """The names by which a kernel's arguments can be given, in order; none if the first have no names."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(_py_func(kernel)).parameters.values()
        named = itertools.takewhile(lambda parameter: parameter.kind is parameter.POSITIONAL_OR_KEYWORD, parameters)
        return tuple(x.name for x in named)
    return ()


def _input_signature(parameters: Sequence[str], outs: Any) -> inspect.Signature:
    """By which JAX binds arguments: the first parameters of the kernel, as many as `outs` takes, or any number."""
    with contextlib.suppress(TypeError, ValueError):
        taken_by_outs = inspect.signature(outs).parameters.values()
        has_only_inputs = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in taken_by_outs)
        if has_only_inputs and len(taken_by_outs) <= len(parameters):
            names = parameters[: len(taken_by_outs)]
            return inspect.Signature([inspect.Parameter(name, p.kind) for name, p in zip(names, taken_by_outs)])
    return inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


def _decorated_backend(kernel: Any) -> str | None:
    """The backend of a compiled kernel (`@njit`, `@cuda.jit`, `@wp.kernel`), "wrapper" for ours; else None."""
    for cls in type(kernel).__mro__:
        package = str(cls.__module__).partition(".")[0]
        for backend, row in _BACKENDS.items():
            if f"{package}.{cls.__name__}" in row.ready:
                return backend
    return "wrapper" if isinstance(kernel, _Wrapper) else None


def _unsupported_kernel_error(user: str, takes: str, kernel: Any) -> TypeError:
    kind = _decorated_backend(kernel)
    name = type(kernel).__name__
    hint = f"; for this one there is {kind}_kernel" if kind in _BACKENDS else _WAYS_OUT.get(name, "")
    return TypeError(f"{user} takes {takes}; got {name} {kernel!r}{hint}")


_WAYS_OUT = {  # by the name of a type
    "partial": "; write a function that calls it, whose closure has the constants",
    "method": "; write a function outside of the class: what it reads of `self` is an input, or in its closure",
    "ufunc": "; call it in a function, lambda x: np.sin(x), and make your own by numba.vectorize without target= "
    'instead of target="parallel": vmap uses all cores',
    "builtin_function_or_method": "; call it in a function, lambda x: math.sin(x)",
    "PjitFunction": "; JAX calls kernels, and not the other way: give a Python function, with np. for jnp.",
}


_VMAP_METHODS = (None, "sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized")


@dataclasses.dataclass(kw_only=True)
class _Options:
    """The arguments of a public function but its kernel, checked at once as far as that is possible without inputs."""

    outs: Any
    vmap_method: str | None
    input_output_aliases: Any
    has_side_effect: bool
    scratch: Any
    zero_outputs: bool | None
    in_out_argnames: Any = None  # the last three are not options of all
    scalars: Any = False
    name: str | None = None

    def __post_init__(self) -> None:
        if self.vmap_method not in _VMAP_METHODS:
            raise ValueError(f"vmap_method must be one of {_VMAP_METHODS}; got {self.vmap_method!r}")
        if not callable(self.outs) or isinstance(self.outs, type):  # such as jnp.float32
            _normalize_specs(self.outs, "outs")
        self.scratch = () if self.scratch is None else self.scratch
        self.input_output_aliases = dict(self.input_output_aliases or {})
        self.in_out_argnames = _as_list(self.in_out_argnames)
        if not isinstance(self.scalars, bool):
            self.scalars = _as_list(self.scalars)

    @property
    def in_order(self) -> bool:
        """Whether the slices of a batch run one after another, on one thread."""
        return str(self.vmap_method).startswith("sequential")


def _as_list(names: Any) -> Collection:
    """An option that names parameters: the names are checked where the parameters are known."""
    if names is None:
        return []
    if isinstance(names, (set, frozenset)):
        return names  # which has no order to be wrong
    return list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]


def _make_wrapper(make_wrapper: Callable[..., _Wrapper], kernel: Any, options: _Options) -> Any:
    """The wrapper that a public function returns; a decorator if the kernel is None."""
    if kernel is None:
        return functools.partial(make_wrapper, options=options)
    return make_wrapper(kernel, options)


class _BoundedCache(dict):
    """Forgets all when it is full, as keys may change on every call; threads get one value for one key."""

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) >= 1024:
            self.clear()
        return self.setdefault(key, value)


class _PickledByReference:
    """What is itself in copies, and in pickles its variable of a module that other processes import, too."""

    title: str  # for errors

    def __deepcopy__(self, memo: dict | None = None) -> Any:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple:
        # The main module is another one elsewhere, and builtins have the prompt's last result.
        others = [name for name in list(sys.modules) if not name.endswith(("main__", "builtins"))]
        return self._variable_of(others) or self._reduce_without_module()

    def _variable_of(self, modules: Iterable[str]) -> tuple:
        for name in modules:
            for variable, value in list(getattr(sys.modules.get(name), "__dict__", {}).items()):
                if value is self:
                    return pkgutil.resolve_name, (f"{name}:{variable}",)
        return ()

    def _reduce_without_module(self) -> tuple:
        """By a variable of the main module, which the processes of a pool have, too."""
        if variable := self._variable_of(["__main__"]):
            return variable
        raise pickle.PicklingError(f"{self.title} is pickled by name: keep it in a variable of a module to import")


def _loaded(data: bytes) -> Any:
    make, *args = pickle.loads(data)
    return make(*args)


# -- 5.4 The wrapper -----------------------------------------------------------------------------------


class _Wrapper(_PickledByReference):
    """A kernel as a JAX function.

    A backend gives `_find_target`: it checks dtypes and arguments, and names what runs a call, which it compiles where
    there is a device of the platform (Warp in `_WarpTarget.registered_for`).  It may override `__call__` and `_leaves`,
    and the small methods that name parameters or look at options.
    """

    decorator: str  # the public function that made it, for error messages
    _find_target: Callable[[_CallParams], _Target]

    def __init__(self, kernel: Any, options: Any, parameters: tuple[str, ...] | None = None) -> None:
        self.kernel = kernel
        self.options = options
        self.parameters = _parameters(kernel) if parameters is None else parameters
        functools.update_wrapper(self, _py_func(kernel), updated=())
        self.__name__ = getattr(kernel, "__name__", None) or getattr(kernel, "key", None) or type(kernel).__name__
        self.__wrapped__ = kernel
        self.title = f"{self.decorator} {self.__name__!r}"  # for errors
        if self.parameters[:1] == ("self",):
            raise TypeError(f"{self.title} is a method, whose `self` is no array{_WAYS_OUT['method']}")
        self.__signature__ = _input_signature(self.parameters, options.outs)
        self._check_names("in_out_argnames", options.in_out_argnames)
        # those that are returned too: the first outputs start with them
        self.in_outs = [name for name in self.parameters if name in options.in_out_argnames]
        if isinstance(options.in_out_argnames, list) and options.in_out_argnames != self.in_outs:
            raise ValueError(
                f"{self.title}: in_out_argnames={options.in_out_argnames} must be in the kernel's order, as outs and "
                f"the results are: {self.in_outs}"
            )

        def call(*args: Any) -> Any:
            return self._trace(*args)

        call.__name__ = call.__qualname__ = self.__name__
        self._jitted = jax.jit(call)

    def __repr__(self) -> str:
        return f"<{self.decorator} {self.__name__}>"

    def _reduce_without_module(self) -> tuple:
        """By value: the kernel with its code, and the options, as plain `pickle` can read them."""
        serialize = _import("numba.core.serialize", "a pickle", _NUMBA_INSTALL)
        return _loaded, (serialize.dumps((type(self), self.kernel, self.options)),)

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        if named:
            args = tuple(self._bound(args, named).values())
        return self._call_inputs(args)

    def _call_inputs(self, args: Sequence) -> Any:
        is_traced = False
        if not _INPUT_TYPES.issuperset(map(type, args)):
            args, is_traced = _convert_inputs(args, self.title, self.parameters)
        return self._trace(*args) if is_traced else self._jitted(*args)

    def _bound(self, args: Sequence, named: Mapping[str, Any]) -> dict[str, Any]:
        """What the first parameters get, by position and by name."""
        n = len(args) + len(named)
        names = self.parameters[:n]
        bound = dict(zip(names, args), **named)
        if len(bound) != n or bound.keys() != set(names):
            raise self._wrong_arity(f"got {len(args)} by position and ({', '.join(named)}) by name")
        return {name: bound[name] for name in names}

    def _wrong_arity(self, problem: str) -> TypeError:
        takes = f"({', '.join(self.parameters)}), inputs first" if self.parameters else "by position only"
        return TypeError(f"{self.title} takes the parameters {takes}; {problem}")

    def _check_names(self, option: str, names: Collection[str]) -> None:
        for name in names:
            if name not in self.parameters:
                shown = ", ".join(self.parameters)
                raise ValueError(f"{option}={names}: {name!r} must be the name of an array parameter: {shown}")

    # -- from inputs to the primitive ------------------------------------------------------------------

    def _trace(self, *args: Any) -> Any:
        ins = _input_specs(args, self.title, self.parameters)
        outs, tree = self._specs("outs", ins)
        return tree.unflatten(self._leaves(outs, *args))

    def _specs(self, what: str, ins: Sequence[Spec]) -> tuple[list[Spec], Any]:
        """The specs that an option gives for these inputs, in the order of the kernel's parameters."""
        specs, tree = _normalize_specs(self._for_inputs(what, ins), f"{self.title}: {what}", ins)
        if _contains_dict(tree):
            raise TypeError(f"{self.title}: {what} is a dict, whose keys JAX sorts: give a tuple, or a NamedTuple")
        if what == "outs" and not specs and not self.options.has_side_effect:
            raise ValueError(f"{self.title} has no outputs, so JAX would never run it: say has_side_effect=True")
        return specs, tree

    def _leaves(self, outs: list[Spec], *args: Any) -> list:
        return self._resolve(_input_specs(args), outs).bind(args)

    def _resolve(self, ins: list[Spec], outs: list[Spec]) -> _CallParams:
        """The call with these inputs and declared outputs, and what runs it."""
        scratch, _ = self._specs("scratch", ins)
        aliases = self._resolve_aliases(ins, outs)
        buffers = tuple(ins), (*outs, *scratch), len(outs)
        zeroed = set() if self.options.zero_outputs is False else {*range(len(buffers[1]))} - {*aliases.values()}
        call = _CallParams(*buffers, tuple(aliases.items()), tuple(sorted(zeroed)), self.options.has_side_effect)
        return dataclasses.replace(call, target=self._find_target(call))

    def _for_inputs(self, what: str, ins: Sequence[Spec]) -> Any:
        """The value of an option that may be a callable of the inputs."""
        option = getattr(self.options, what)
        if not callable(option):
            return option
        return _call_with_specs(option, f"{self.title}: {what}", *ins)

    def _resolve_aliases(self, ins: Sequence[Spec], outs: Sequence[Spec]) -> dict[int, int]:
        """Which output starts with which input, checked: the aliases that the user gave, and in-out arguments."""
        inputs = dict(enumerate(map(_format_spec, ins)))
        outputs = dict(enumerate(map(_format_spec, outs)))
        aliases: dict[int, int] = {}
        for key, j in [*self.options.input_output_aliases.items(), *zip(self.in_outs, itertools.count())]:
            i = self._input_number(key, len(ins))
            if i in aliases or j in aliases.values() or i not in inputs or inputs[i] != outputs.get(j):
                raise ValueError(
                    f"{self.title}: output {j} cannot start from input {key!r}: an input can start one output, an "
                    "output can start from one input, of equal shape and dtype; in_out_argnames start the first of "
                    f"outs, in order; inputs: {inputs}; outputs: {outputs}"
                )
            aliases[i] = j
        return dict(sorted(aliases.items()))

    def _input_number(self, key: int | str, n_in: int) -> int:
        """The number of an input that an alias names."""
        if not isinstance(key, str):
            return key
        names = self.parameters[:n_in]
        if key not in names:
            raise ValueError(
                f"{self.title}: {key!r} is not the name of an input; this call has {names}: what is both input and "
                "output stands before the other outputs, kernel(in..., out...)"
            )
        return names.index(key)

    def _check_dtypes(self, call: _CallParams, allowed: frozenset[str], refused: str) -> None:
        for what, specs in (("input", call.ins), ("output", call.outs)):  # scratch too
            for i, spec in enumerate(specs):
                if np.dtype(spec.dtype).name not in allowed:
                    raise TypeError(
                        f"{self.title}: {what} {i} is {_format_spec(spec)}, a dtype {refused}; cast it, and the "
                        "result back: "
                        "f(x.astype(jnp.float32)).astype(x.dtype)"
                    )


def _never_stored_error(title: str, name: str, store: str, returns: str = "") -> TypeError:
    """Return the error for an output, or an in-out argument, to which a kernel never stores."""
    fix = f"Write `{store}`"
    if returns:
        fix += f", or remove the parameter {name!r} and {returns}"
    return TypeError(
        f"{title} never stores to {name!r}. `{name} = ...` only creates a local variable. {fix}. "
        "If zeros are what you want, set zero_outputs=True."
    )


# ======================================================================================================
# 6. The native handler: machine code for `XLA_FFI_Error* handler(XLA_FFI_CallFrame*)`, written in LLVM.
#
# XLA calls `handler` with the buffers of a call.  Batch dimensions come before the dimensions of the kernel.  If all
# slices share a buffer, these dimensions have size 1, which broadcasts, or are left out (5.2).
#   1. `handler` initializes aliased and zeroed outputs.  Without a batch it calls `inner_loop` for the one slice.
#   2. `inner_loop(frame, buffers, count)` calls the kernel for `count` slices.  Each buffer has a pointer to its first
#      slice, and a step to the next one, as in the inner loops of NumPy's ufuncs.
# Both are compiled for each signature.  The emitter of a backend writes the part of `inner_loop` that runs one slice.
#   3. `run_batch` runs a call with a batch.  It splits the batch into inner loops, and chooses the threads that run
#      them.  This is the batch scheduler (6.4), which is compiled once per process.
# Relies on sections 2 and 3, 9.3 for GPUs, Numba, llvmlite, and the C API of CPython.
# From inside XLA, Numba and the C library:
# - XLA's threads (test_each_slice_runs_once_on_any_thread_unless_in_order), and where it loses an alias
#   (test_what_starts_with_an_input_does_where_xla_lost_the_alias)
# - Numba's `cgutils`, and the CPU that it compiles for (`magic_tuple`): all tests of kernels
# - the default mode of floats of glibc (`_FE_DFL_ENV`; test_the_life_of_a_process...)

# -- 6.1 What a backend gives: a signature, and an emitter ---------------------------------------------
# One slice: its buffers and their dimensions.


class _Signature(NamedTuple):
    """The buffers that a handler expects, inputs then outputs, as the kernel sees them (without batch)."""

    label: str
    n_in: int
    dtypes: tuple[np.dtype, ...]
    ranks: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...] = ()  # (input, the output that starts with it)
    zeroed: tuple[int, ...] = ()  # the outputs and scratch buffers that start from zeros

    def __str__(self) -> str:
        shown = []
        for dtype, rank in zip(self.dtypes, self.ranks, strict=True):
            shown.append(f"{dtype.name}[{','.join(':' * rank)}]")
        parts = [f"({', '.join(shown[: self.n_in])}) -> ({', '.join(shown[self.n_in :])})"]
        parts += [f"output {j} starts as input {i}" for i, j in self.aliases]
        return "; ".join(parts)


class _SliceArray(NamedTuple):
    """One buffer of a slice, in row-major order: its address, the kernel's dimensions and the size of an element."""

    pointer: Any
    dims: list[Any]
    itemsize: int

    def strides(self, unit: int) -> list[Any]:
        """From one position to the next in each dimension, where an element is `unit` long."""
        strides = [unit]
        for size in reversed(self.dims[1:]):
            strides.insert(0, strides[0] * size)
        return strides[: len(self.dims)]


class _Emitter:
    """The part of a handler that a backend gives: how one slice is run.

    `_compile_handler` keeps an emitter as long as the process lives, with all that it refers to: machine code has
    addresses of that.

    Handlers of equal signature and `code_key` share their code, which the first one's `write` has written.  So it holds
    no address: what differs between kernels, `entry`, `report` and `lock`, it loads from the memory of each handler,
    `handler.data`.  Where `code_key` is None, addresses may be constants.

    `in_order` is about the slices of one call: False lets several threads run them at once.  `lock` is about all calls:
    while one holds it, no slices run of any other kernel with that lock, in any copy of this file.

    `write` writes a part of the C function `inner_loop(frame, buffers, count)`, in which `handler.frame`, `.buffers`
    and `.count` are its arguments: `_Handler` sets them before, and `frame` again for the function `handler`.
    """

    traits = 0
    lock = 0  # address of a lock (`_native_lock`) that is held while slices run; 0: none
    in_order = True  # slices run one after another, on the thread that XLA calls from
    starts_threads = False  # of its own, which inherit how the thread that starts them computes with floats
    libcuda: _LibCuda | None = None  # where the buffers lie in a GPU's memory
    entry = report = 0  # addresses that go to `_HandlerData`, as several kernels share the code
    code_key: Any = None  # handlers of equal signature and key share their code; None: not shared
    # Writes what is done once for a call, and under `with handler.each_slice() as arrays` what runs one slice.
    write: Callable[[_Handler], None]


# -- 6.2 Writing LLVM ----------------------------------------------------------------------------------
# Integers, addresses, structs, calls and control flow, as Python's operators and methods.  A Python function becomes a
# C function: it is called once, with words that stand for the arguments, and writes an instruction for each operation.


class _Int64:
    """A 64-bit integer or address in the code that is being written; Python's operators write instructions."""

    def __init__(self, code: _IRBuilder, value: Any) -> None:
        self.code = code
        self.value = value

    def _calculate(self, operation: str, other: Any) -> _Int64:
        operands = self.value, self.code.value(other)
        return _Int64(self.code, getattr(self.code.builder, operation)(*operands))

    def _compare(self, relation: str, other: Any) -> _Int64:
        bit = self.code.builder.icmp_signed(relation, self.value, self.code.value(other))
        return _Int64(self.code, self.code.builder.zext(bit, self.code.i64))

    __add__ = __radd__ = functools.partialmethod(_calculate, "add")
    __sub__ = functools.partialmethod(_calculate, "sub")
    __mul__ = __rmul__ = functools.partialmethod(_calculate, "mul")
    __floordiv__ = functools.partialmethod(_calculate, "sdiv")
    __mod__ = functools.partialmethod(_calculate, "srem")
    __and__ = functools.partialmethod(_calculate, "and_")
    __or__ = functools.partialmethod(_calculate, "or_")
    __lt__ = functools.partialmethod(_compare, "<")
    __gt__ = functools.partialmethod(_compare, ">")
    __ge__ = functools.partialmethod(_compare, ">=")
    __eq__ = functools.partialmethod(_compare, "==")  # type: ignore[assignment]
    __ne__ = functools.partialmethod(_compare, "!=")  # type: ignore[assignment]


class _StructPointer(_Int64):
    """The address of a C struct: to read a field loads it, to set one stores it; an index finds one in an array."""

    def __init__(self, code: _IRBuilder, kind: Any, address: Any) -> None:
        vars(self).update(code=code, kind=kind, value=code.value(address))

    def __getitem__(self, index: Any) -> _StructPointer:
        return _StructPointer(self.code, self.kind, self + index * ctypes.sizeof(self.kind))

    def address_of(self, field: str) -> _Int64:
        return self + getattr(self.kind, field).offset

    def __getattr__(self, field: str) -> Any:
        kind = dict(self.kind._fields_)[field]
        address = self.address_of(field)
        if issubclass(kind, ctypes.Structure):
            return _StructPointer(self.code, kind, address)
        word = self.code.load(address, ctypes.sizeof(kind))
        return _StructPointer(self.code, kind._type_, word) if issubclass(kind, ctypes._Pointer) else word

    def __setattr__(self, field: str, value: Any) -> None:
        self.code.store(value, self.address_of(field), getattr(self.kind, field).size)


class _Variable(ctypes.Structure):
    """A variable on the stack."""

    _fields_ = (("current", _I64),)


class _IRBuilder:
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
        self.machine = _target_machine()
        self.module.data_layout = str(self.machine.target_data)
        self.builder: Any = None

    # -- functions --

    def define(self, name: str, body: Callable[..., Any], *parameters: Any) -> None:
        """Write a C function, which returns an integer or an address.

        Args:
          name: the name of the C function.
          body: a function that writes the instructions.  It gets a `_Int64` or `_StructPointer` for each parameter.
          parameters: the type of each parameter: `_I64`, or a struct for a pointer to such a struct.
        """
        function = self.ir.Function(self.module, self._function_type(len(parameters)), name)
        self.builder = self.ir.IRBuilder(function.append_basic_block())
        arguments: list[_Int64] = []
        for kind, value in zip(parameters, function.args, strict=True):
            word = _Int64(self, value)
            arguments.append(word if kind is _I64 else _StructPointer(self, kind, word))
        result = body(*arguments)
        if result is not None:  # None: the body has returned already
            self.ret(result)

    def compile(self) -> bytes:
        """Object code."""
        module = self.llvm.parse_assembly(str(self.module))
        module.verify()
        return self.machine.emit_object(module)

    def call(self, function: Any, *args: Any) -> _Int64:
        """Call a function, as `value` takes it, with words; it returns one."""
        pointer = self.builder.inttoptr(self.value(function), self._function_type(len(args)).as_pointer())
        return _Int64(self, self.builder.call(pointer, [self.value(x) for x in args]))

    def _function_type(self, n_parameters: int) -> Any:
        return self.ir.FunctionType(self.i64, [self.i64] * n_parameters)

    def api(self, frame: Any, name: str, args: Any) -> _Int64:
        """Call a function of XLA's API table; it gives an XLA_FFI_Error* or 0."""
        return self.call(getattr(frame.api, f"XLA_FFI_{name}"), args)

    # -- values and memory --

    def value(self, x: Any) -> Any:
        """LLVM's value of a word, a number, or the address of a C function, also by its name.

        The name is of a function of this module, or of CPython or the C library, where it is found on loading.
        """
        if isinstance(x, _Int64):
            return x.value
        if isinstance(x, str):
            return self.cgutils.get_or_insert_function(self.module, self._function_type(0), x).ptrtoint(self.i64)
        return self.ir.Constant(self.i64, x if isinstance(x, int) else ctypes.cast(x, _PTR).value)

    def pointer(self, address: Any, size: int = 1) -> Any:
        """LLVM's pointer to an integer of so many bytes."""
        return self.builder.inttoptr(self.value(address), self.ir.IntType(8 * size).as_pointer())

    def load(self, address: Any, size: int = 8) -> _Int64:
        value = self.builder.load(self.pointer(address, size))
        return _Int64(self, value if size == 8 else self.builder.sext(value, self.i64))

    def store(self, value: Any, address: Any, size: int = 8) -> None:
        value = self.value(value)
        if size != 8:
            value = self.builder.trunc(value, self.ir.IntType(8 * size))
        self.builder.store(value, self.pointer(address, size))

    def copy_bytes(self, target: Any, source: Any, nbytes: Any) -> None:
        self.cgutils.raw_memcpy(self.builder, self.pointer(target), self.pointer(source), self.value(nbytes), 1)

    def alloca(self, kind: Any, count: Any = 1) -> _StructPointer:
        """So many structs or words on the stack; a constant count is allocated once, in the entry block."""
        words = count * (ctypes.sizeof(kind) // 8)
        if isinstance(words, int):
            with self.builder.goto_entry_block():
                memory = self.builder.alloca(self.i64, words)
        else:
            memory = self.builder.alloca(self.i64, words.value)
        return _StructPointer(self, kind, _Int64(self, self.builder.ptrtoint(memory, self.i64)))

    def variable(self, start: Any) -> _StructPointer:
        """A word on the stack, `.current`, for what a loop changes."""
        variable = self.alloca(_Variable)
        variable.current = start
        return variable

    def array(self, values: Sequence[Any]) -> _Int64:
        """The address of these words in a row on the stack."""
        first = self.alloca(_I64, len(values))
        for i, value in enumerate(values):
            self.store(value, first + 8 * i)
        return first

    def new(self, kind: Any, **fields: Any) -> Any:
        """A struct on the stack, with its size filled in if it is one of XLA's."""
        struct = self.alloca(kind)
        if kind._fields_[0][0] == "struct_size":
            fields |= {"struct_size": ctypes.sizeof(kind), "extension_start": 0}
        for name, value in fields.items():
            setattr(struct, name, value)
        return struct

    def atomic(self, operation: str, address: Any, value: Any) -> _Int64:
        """LLVM's atomic "add", "sub" or "xchg" of a word: returns what it was."""
        return _Int64(self, self.builder.atomic_rmw(operation, self.pointer(address, 8), self.value(value), "seq_cst"))

    # -- control flow --

    def ret(self, value: Any, when: Any = True) -> None:
        """Return from the function."""
        with self.if_(when):
            self.builder.ret(self.value(value))

    def if_(self, condition: Any, likely: bool | None = None) -> Any:
        """What stands under `with code.if_(condition)` runs if that is not 0."""
        if condition is True:
            return contextlib.nullcontext()
        return self.builder.if_then(self._is_true(condition), likely)

    def select(self, condition: Any, yes: Any, no: Any) -> _Int64:
        """One of two words (LLVM's select): both are computed."""
        words = self.value(yes), self.value(no)
        return _Int64(self, self.builder.select(self._is_true(condition), *words))

    def _is_true(self, condition: Any) -> Any:
        return self.builder.icmp_signed("!=", self.value(condition), self.value(0))

    def minimum(self, first: Any, second: Any) -> _Int64:
        return self.select(first < second, first, second)

    @contextlib.contextmanager
    def loop(self, count: Any) -> Iterator[_Int64]:
        with self.cgutils.for_range(self.builder, self.value(count)) as loop:
            yield _Int64(self, loop.index)

    @contextlib.contextmanager
    def forever(self) -> Iterator[None]:
        """A loop that only returning from the function ends."""
        body = self.builder.append_basic_block()
        self.builder.branch(body)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(body)


# -- 6.3 Machine code: made and loaded -----------------------------------------------------------------
# Object code has no address of a kernel in it: what differs between kernels is in its memory (`_HandlerData`).  So the
# code of a handler is compiled once for each signature, and loaded again for each kernel: 1.5 ms instead of 8.


def _target_machine() -> Any:
    """A target machine of LLVM; Numba's own always optimizes, which handlers do not need."""
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target

    # for this machine's CPU, unless Numba's settings name another; also initializes LLVM as its version wants it
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    arch = llvm.Target.from_triple(triple)
    reloc = "static" if arch.name.startswith("x86") else "default"
    return arch.create_target_machine(cpu=cpu, features=features, opt=1, reloc=reloc, codemodel="jitdefault", jit=True)


def _load_code(code: bytes) -> Any:
    """An execution engine with this object code, which stays in memory as long as the engine does."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


# -- 6.4 The batch scheduler: which slices run, and on which threads -----------------------------------
# Machine code that all handlers share.  It loops over the slices of a batch, and lets XLA's thread pool run them in
# parallel if that pays off.  It does not depend on dtypes, nor on the kernel: a handler's `inner_loop` runs the slices.
# Indented functions are called by the function above them:
#
#     handler (6.5)
#         run_batch                         computes strides and inner loops, and chooses one of three ways:
#             run_range                     on this thread: for one slice, or if the slices must run in order
#             run_parallel                  on several threads: if an earlier call showed that this pays off
#                 worker_loop               on each thread: claims chunks of slices and runs them
#                     run_range
#             run_serial_and_measure        otherwise: on this thread, until the time of a slice is known
#                 run_range, run_parallel
#     run_range
#         inner_loop (6.5)                  calls the kernel for consecutive slices
#
# Batch dimensions broadcast as in NumPy.  Let each buffer b be a C-contiguous array whose elements are slices, so that
# b.itemsize is the size of a slice in bytes.  Then strides and inner loops are computed as follows:
#
#     shape = np.broadcast_shapes(*[b.shape for b in buffers])         # of the batch
#     count = math.prod(shape)
#     strides = [np.broadcast_to(b, shape).strides for b in buffers]   # in bytes; 0 where the size 1 broadcasts
#     if all(b.size in (1, count) for b in buffers):                   # a single inner loop runs the whole batch
#         inner_count, steps = count, [0 if b.size == 1 else b.itemsize for b in buffers]
#     else:                                                            # inner loops run along the last dimension
#         inner_count, steps = shape[-1], [s[-1] for s in strides]
#     for i in range(0, count, inner_count): inner_loop([pointer to slice i of b for b in buffers], steps, inner_count)


class _BatchedBuffer(ctypes.Structure):
    """An input or output of a call: the address of one slice, and the way to the others."""

    _fields_ = (
        ("pointer", _PTR),  # address of the current slice
        ("step", _I64),  # bytes to the next slice of an inner loop; 0 if that is the same slice
        ("dims", _PTR),  # int64[]: the kernel's dimensions; the `depth` batch dimensions lie directly before them
        ("depth", _I64),  # number of batch dimensions: that of the call, or 0
        ("slice_nbytes", _I64),  # bytes of a slice
        ("n_slices", _I64),  # number of slices: the product of the batch dimensions
    )


class _HandlerData(ctypes.Structure):
    """The data of a handler, in its memory.  Several handlers may share their code, but not their data."""

    _fields_ = (
        # Hints that any thread may overwrite at any time:
        ("measured_ticks", _I64),  # time of a slice when it was last measured
        ("measured_nbytes", _I64),  # `_Batch.slice_nbytes` at that time
        # Set by `_compile_handler`:
        ("n_buffers", _I64),  # number of inputs and outputs
        ("inner_loop", _PTR),  # the handler's function inner_loop(frame, buffers, count)
        ("run_batch", _PTR),  # the scheduler's function run_batch(frame, handler, buffers, depth)
        ("in_order", _I64),  # 1 if slices must run one after another, on the caller's thread
        ("entry", _PTR),  # `_Emitter.entry`: the compiled kernel
        ("lock", _PTR),  # `_Emitter.lock`: a PyThread_type_lock that is held while slices run, or 0
        ("report", _PTR),  # `_Emitter.report`: a function that turns an exception into a message
    )


class _Batch(ctypes.Structure):
    """A call with batch dimensions, on the stack of the caller's thread."""

    _fields_ = (
        ("frame", ctypes.POINTER(XLA_FFI_CallFrame)),
        ("handler", ctypes.POINTER(_HandlerData)),
        ("buffers", ctypes.POINTER(_BatchedBuffer)),  # all inputs and outputs, at their first slices
        ("depth", _I64),  # number of batch dimensions
        ("sizes", _PTR),  # int64[depth]: the batch dimensions, innermost first
        ("strides", _PTR),  # int64[depth][n_buffers]: bytes from one position to the next; 0 if the size 1 broadcasts
        ("count", _I64),  # number of slices: the product of `sizes`
        ("inner_count", _I64),  # number of slices in an inner loop; each starts at a multiple of this number
        ("slice_nbytes", _I64),  # bytes of a slice, of all buffers together
    )


class _SharedBatch(ctypes.Structure):
    """A batch that several threads run.  It is on the heap, because queued tasks may outlive the call."""

    _fields_ = (
        ("batch", ctypes.POINTER(_Batch)),  # valid as long as `remaining` is not 0
        ("next", _I64),  # atomic: the first slice that is not claimed; `count` or more if there is none, or cancelled
        ("count", _I64),  # number of slices
        ("chunk", _I64),  # number of slices that a thread claims at a time
        ("remaining", _I64),  # atomic: number of slices that are neither done nor cancelled
        ("refcount", _I64),  # atomic: one for each worker loop, queued or running, and one for the caller
        ("error", _PTR),  # atomic: the last XLA_FFI_Error*, or 0
        ("done_lock", _PTR),  # a PyThread_type_lock, which is locked until `remaining` is 0
    )


# Estimates, in microseconds of work:
_MIN_MEASURABLE_US = 1  # a shorter time does not predict how long other slices take
_MIN_PARALLEL_US = 40  # for less work, it does not pay off to wake threads
_MIN_US_PER_THREAD = 15  # each thread that is woken must have this much work
_CHUNK_US = 20  # a thread claims this much work at a time: little, because cores differ in speed


class _BatchScheduler(_IRBuilder):
    """The machine code of the batch scheduler, compiled once per process.

    Each public method writes the instructions of the C function of the same name.  C functions return an
    XLA_FFI_Error*, or 0 for success; `now` returns ticks.  Python's `if` and `for` decide which instructions are
    written, whereas `when`, `loop` and `forever` write branches and loops.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_cycle_counter = self.module.triple.startswith("x86_64")
        self.ticks_per_us = 3000 if self.has_cycle_counter else 1000  # on x86 2000 to 4000: close enough for estimates
        # The C functions and the types of their parameters.  A function is defined before the functions that call it.
        self.define("now", self.now)
        self.define("run_range", self.run_range, _Batch, _I64, _I64)
        self.define("worker_loop", self.worker_loop, _SharedBatch)
        self.define("run_parallel", self.run_parallel, _Batch, _I64, _I64)
        self.define("run_serial_and_measure", self.run_serial_and_measure, _Batch)
        self.define("run_batch", self.run_batch, XLA_FFI_CallFrame, _HandlerData, _BatchedBuffer, _I64)

    # -- the strides and inner loops of a batch --

    def run_batch(
        self, frame: _StructPointer, handler: _StructPointer, buffers: _StructPointer, depth: _Int64
    ) -> _Int64:
        """Run a call with `depth` batch dimensions.  The buffers are at their first slices."""
        batch = self.new(_Batch, frame=frame, handler=handler, buffers=buffers, depth=depth, count=1, slice_nbytes=0)
        batch.sizes = self.alloca(_I64, depth)
        batch.strides = self.alloca(_I64, depth * handler.n_buffers)
        with self.loop(depth) as d:
            self._compute_strides(batch, d)
        self._choose_inner_loops(batch)
        with self.if_((batch.count < 2) | handler.in_order):
            self.ret(self.call("run_range", batch, 0, batch.count))
        is_measured = handler.measured_nbytes == batch.slice_nbytes  # 0 or 1
        work = handler.measured_ticks * is_measured * batch.count // self.ticks_per_us
        with self.if_(work > _MIN_PARALLEL_US):
            self.ret(self.call("run_parallel", batch, 0, work))
        return self.call("run_serial_and_measure", batch)

    def _compute_strides(self, batch: _StructPointer, d: _Int64) -> None:
        """Compute the size of batch dimension d, and its stride in each buffer.  Dimension 0 is the innermost."""
        n_buffers = batch.handler.n_buffers
        size = self.variable(1)
        with self.loop(n_buffers) as k:
            buffer = batch.buffers[k]
            own_size = self.variable(1)  # remains 1 if all slices share the buffer, and batch dimensions are left out
            with self.if_(buffer.depth > 0):
                own_size.current = self.load(buffer.dims - (d + 1) * 8)
            broadcasts = own_size.current == 1
            size.current = self.select(broadcasts, size.current, own_size.current)
            stride = self.select(broadcasts, 0, buffer.slice_nbytes * buffer.n_slices)
            self.store(stride, batch.strides + (d * n_buffers + k) * 8)
            buffer.n_slices = buffer.n_slices * own_size.current
        self.store(size.current, batch.sizes + d * 8)
        batch.count = batch.count * size.current

    def _choose_inner_loops(self, batch: _StructPointer) -> None:
        """Choose how many slices an inner loop has, and the step of each buffer in it."""
        is_one_loop = self.variable(1)
        with self.loop(batch.handler.n_buffers) as k:
            buffer = batch.buffers[k]
            has_one_or_all = (buffer.n_slices == 1) | (buffer.n_slices == batch.count)
            is_one_loop.current = is_one_loop.current & has_one_or_all
            batch.slice_nbytes = batch.slice_nbytes + buffer.slice_nbytes
        batch.inner_count = self.select(is_one_loop.current, batch.count, self.load(batch.sizes))
        with self.loop(batch.handler.n_buffers) as k:
            buffer = batch.buffers[k]
            step = self.select(buffer.n_slices == 1, 0, buffer.slice_nbytes)
            buffer.step = self.select(is_one_loop.current, step, self.load(batch.strides + k * 8))

    # -- a range of slices on one thread --

    def run_range(self, batch: _StructPointer, first: _Int64, stop: _Int64) -> None:
        """Run the slices [first, stop), one inner loop after another.  If a slice fails, return its error at once."""
        buffers = self.alloca(_BatchedBuffer, batch.handler.n_buffers)
        start = self.variable(first)
        with self.forever():
            index = start.current
            self.ret(0, when=index >= stop)
            self._point_to_slice(batch, buffers, index)
            count = self.minimum(batch.inner_count - index % batch.inner_count, stop - index)
            error = self.call(batch.handler.inner_loop, batch.frame, buffers, count)
            self.ret(error, when=error)
            start.current = index + count

    def _point_to_slice(self, batch: _StructPointer, buffers: _StructPointer, index: _Int64) -> None:
        """Copy the buffers of a batch to `buffers`, with their pointers at slice `index`.

        For example, slice 4 of a batch of 2 x 3 slices is at the position (1, 1).  A buffer of 2 x 3 slices of 100
        bytes has the strides (300, 100), so its slice begins at byte 400.  A buffer of 1 x 3 slices has the strides
        (0, 100), so its slice begins at byte 100.
        """
        n_buffers = batch.handler.n_buffers
        self.copy_bytes(buffers, batch.buffers, n_buffers * ctypes.sizeof(_BatchedBuffer))
        rest = self.variable(index)
        with self.loop(batch.depth) as d:
            size = self.load(batch.sizes + d * 8)
            position = rest.current % size
            rest.current = rest.current // size
            with self.loop(n_buffers) as k:
                stride = self.load(batch.strides + (d * n_buffers + k) * 8)
                buffers[k].pointer = buffers[k].pointer + position * stride

    # -- whether threads pay off --

    def run_serial_and_measure(self, batch: _StructPointer) -> None:
        """Run the slices on this thread, until they prove slow enough to run the rest on several threads.

        The ranges have 1, 8, 64, ... slices.  If a range is too short for the clock, eight times as many slices are
        still cheap to run on one thread.
        """
        start = self.variable(0)
        count = self.variable(1)
        with self.forever():
            stop = start.current + count.current
            began = self.call("now")
            error = self.call("run_range", batch, start.current, stop)
            ticks = self.call("now") - began
            rest = batch.count - stop
            self.ret(error, when=error | (rest == 0))
            with self.if_(ticks > self.ticks_per_us * _MIN_MEASURABLE_US):
                self._record_time(batch, ticks, count.current)
                work = ticks * rest // count.current // self.ticks_per_us
                with self.if_(work > _MIN_PARALLEL_US):
                    self.ret(self.call("run_parallel", batch, stop, work))
            start.current = stop
            count.current = self.minimum(count.current * 8, rest)

    def _record_time(self, batch: _StructPointer, ticks: _Int64, count: _Int64) -> None:
        """Record the time of `count` slices, so that `run_batch` can estimate the work of later calls."""
        batch.handler.measured_ticks = ticks // count
        batch.handler.measured_nbytes = batch.slice_nbytes

    def now(self) -> _Int64:
        """Return the time of a monotonic clock in ticks: cycles on x86, nanoseconds elsewhere."""
        if self.has_cycle_counter:  # a system call may take 400 ns
            counter = self.module.declare_intrinsic("llvm.readcyclecounter", (), self._function_type(0))
            return _Int64(self, self.builder.call(counter, []))
        timespec = self.alloca(_I64, 2)  # seconds and nanoseconds
        self.call("clock_gettime", time.CLOCK_MONOTONIC, timespec)
        return self.load(timespec) * 10**9 + self.load(timespec + 8)

    # -- a range of slices on several threads --
    # - Claims.  A thread claims a chunk of slices by an atomic fetch-and-add of `next`, so each slice has one thread.
    # - Completion.  When a chunk is done, its thread subtracts the slices from `remaining`.  The thread that reaches 0
    #   releases `done_lock`.  This wakes the caller, which returns, so from then on `batch` is invalid.
    # - Cancellation.  If a slice fails, its thread cancels the rest of its chunk and all slices that are not claimed.
    #   It moves `next` beyond `count`, and subtracts these slices from `remaining`.  Chunks of other threads still run.
    #   If several slices fail, the call returns one of their errors, not necessarily the first.
    # - No deadlock.  The caller waits only for claimed slices, never for queued tasks, because a task may be queued
    #   behind another caller that waits.  A task that starts late finds no slices to claim.
    # - Memory.  The thread that drops the last reference frees the shared batch.

    def run_parallel(self, batch: _StructPointer, first: _Int64, work: _Int64) -> _Int64:
        """Run the slices from `first` on, about `work` microseconds in total, on as many threads as pay off."""
        n_threads = self.variable(1)  # remains 1 if the call has no thread pool
        args = self.new(XLA_FFI_ThreadPool_NumThreads_Args, ctx=batch.frame.ctx, num_threads=n_threads)
        self._destroy_error(batch.frame, self.api(batch.frame, "ThreadPool_NumThreads", args))
        n_slices = batch.count - first
        n_tasks = self.minimum(self.minimum(n_threads.current, n_slices) - 1, work // _MIN_US_PER_THREAD)
        shared = self._allocate_shared_batch(batch, first)
        shared.batch = batch
        shared.next = first
        shared.count = batch.count
        shared.chunk = n_slices * _CHUNK_US // work + 1
        shared.remaining = n_slices
        shared.refcount = n_tasks + 2  # the worker loops of the tasks and of this thread, and the caller
        shared.error = 0
        self.call("PyThread_acquire_lock", shared.done_lock, 1)
        args = self.new(XLA_FFI_ThreadPool_Schedule_Args, ctx=batch.frame.ctx, task="worker_loop", data=shared)
        with self.loop(n_tasks):
            self.api(batch.frame, "ThreadPool_Schedule", args)  # fails only if there is no thread pool
        self.call("worker_loop", shared)
        self.call("PyThread_acquire_lock", shared.done_lock, 1)  # waits until no slices remain
        error = shared.error
        self._drop_reference(shared)
        return error

    def _allocate_shared_batch(self, batch: _StructPointer, first: _Int64) -> _StructPointer:
        """Allocate a `_SharedBatch` and its lock.  If there is no memory, run the slices on this thread and return."""
        memory = self.call("PyMem_RawMalloc", ctypes.sizeof(_SharedBatch))
        with self.if_(memory == 0, likely=False):
            self.ret(self.call("run_range", batch, first, batch.count))
        lock = self.call("PyThread_allocate_lock")
        with self.if_(lock == 0, likely=False):
            self.call("PyMem_RawFree", memory)
            self.ret(self.call("run_range", batch, first, batch.count))
        shared = _StructPointer(self, _SharedBatch, memory)
        shared.done_lock = lock
        return shared

    def worker_loop(self, shared: _StructPointer) -> None:
        """Claim chunks of slices and run them, until there are no more.  Each thread that shares a batch runs this."""
        with self.forever():
            first = self.atomic("add", shared.address_of("next"), shared.chunk)
            with self.if_(first >= shared.count):
                self._drop_reference(shared)
                self.ret(0)
            stop = self.minimum(first + shared.chunk, shared.count)
            began = self.call("now")
            error = self.call("run_range", shared.batch, first, stop)
            self._record_time(shared.batch, self.call("now") - began, stop - first)
            n_finished = self.variable(stop - first)
            with self.if_(error):
                n_finished.current = n_finished.current + self._cancel_unclaimed(shared)
                self._destroy_error(shared.batch.frame, self.atomic("xchg", shared.address_of("error"), error))
            n_before = self.atomic("sub", shared.address_of("remaining"), n_finished.current)
            with self.if_(n_before == n_finished.current):  # no slices remain
                self.call("PyThread_release_lock", shared.done_lock)

    def _cancel_unclaimed(self, shared: _StructPointer) -> _Int64:
        """Cancel all slices that no thread has claimed, and return their number."""
        first_unclaimed = self.atomic("add", shared.address_of("next"), shared.count)
        return shared.count - self.minimum(first_unclaimed, shared.count)

    def _drop_reference(self, shared: _StructPointer) -> None:
        """Drop a reference to a shared batch.  The last one frees the memory."""
        with self.if_(self.atomic("sub", shared.address_of("refcount"), 1) == 1):
            self.call("PyThread_free_lock", shared.done_lock)
            self.call("PyMem_RawFree", shared)

    def _destroy_error(self, frame: _StructPointer, error: _Int64) -> None:
        """Destroy an XLA_FFI_Error*, unless it is 0."""
        with self.if_(error):
            self.api(frame, "Error_Destroy", self.new(XLA_FFI_Error_Destroy_Args, error=error))


@functools.cache
def _batch_scheduler() -> Any:
    """Return the execution engine with the functions of the batch scheduler."""
    return _load_code(_BatchScheduler().compile())


# -- 6.5 A handler -------------------------------------------------------------------------------------
# One signature and one emitter.  Leaves batches to the batch scheduler.


_HANDLERS: dict[tuple, bytes] = {}  # the object code of those that several kernels share


# Of Linux and its C libraries:
_HUGE_PAGE_MIN = 1 << 22  # bytes, from which on NumPy asks for huge pages too
_MADV_HUGEPAGE = 14  # sys/mman.h
_FE_DFL_ENV = -1  # fenv.h on x86-64 and on arm64
_FENV_WORDS = 32  # more than fenv_t has there: 4 and 1


def _compile_handler(signature: _Signature, emitter: _Emitter) -> _CompiledHandler:
    """Compile a handler, or take the code of another one of this signature, and load it."""
    key = signature._replace(label=""), emitter.code_key
    code = _HANDLERS.get(key)
    if code is None:
        code = _Handler(signature, emitter).compile()
        if emitter.code_key is not None:
            _HANDLERS[key] = code
    engine = _load_code(code)
    scheduler = _batch_scheduler()
    data = _HandlerData.from_address(engine.get_global_value_address("data"))
    data.n_buffers = len(signature.ranks)
    data.inner_loop = engine.get_function_address("inner_loop")
    data.run_batch = scheduler.get_function_address("run_batch")
    for name in ("in_order", "entry", "lock", "report"):
        setattr(data, name, getattr(emitter, name))
    return _CompiledHandler(engine.get_function_address("handler"), [engine, scheduler, emitter], data)


class _Handler(_IRBuilder):
    """Writes what is compiled for one signature."""

    def __init__(self, signature: _Signature, emitter: _Emitter) -> None:
        super().__init__()
        self.signature = signature
        self.emitter = emitter
        memory = self.ir.GlobalVariable(self.module, self.ir.ArrayType(self.i64, len(_HandlerData._fields_)), "data")
        memory.initializer = self.ir.Constant(memory.value_type, None)  # zeros
        self.data = _StructPointer(self, _HandlerData, _Int64(self, memory.ptrtoint(self.i64)))
        is_enclosed = emitter.lock or emitter.starts_threads
        parameters = XLA_FFI_CallFrame, _BatchedBuffer, _I64
        self.define("bare_inner_loop" if is_enclosed else "inner_loop", self._inner_loop, *parameters)
        if is_enclosed:
            self.define("inner_loop", self._enclosed_inner_loop, *parameters)
        self.define("handler", self._handler, XLA_FFI_CallFrame)

    # -- slices --

    def _inner_loop(self, frame: Any, buffers: Any, count: Any) -> Any:
        self.frame = frame
        self.buffers = buffers
        self.count = count
        if not self.emitter.libcuda:  # on a GPU, `_start_outputs` has filled all slices at once
            for j in self.signature.zeroed:
                buffer = buffers[self.signature.n_in + j]
                self._fill(buffer.pointer, 0, buffer.slice_nbytes * count)  # the slices are contiguous
        self.emitter.write(self)
        return 0

    def _enclosed_inner_loop(self, frame: Any, buffers: Any, count: Any) -> Any:
        """Slices that run while the emitter's lock is held, and as the C library computes with floats by default.

        XLA's threads take subnormal numbers for 0, and threads that they start inherit that: without the default mode
        the result depends on who starts a thread, also in the user's own parallel functions.
        """
        resets_floats = self.emitter.starts_threads and sys.platform == "linux"
        if self.emitter.lock:
            self.call("PyThread_acquire_lock", self.data.lock, 1)
        if resets_floats:
            mode = self.alloca(_I64, _FENV_WORDS)
            self.call("fegetenv", mode)
            self.call("fesetenv", _FE_DFL_ENV)
        error = self.call("bare_inner_loop", frame, buffers, count)
        if resets_floats:
            self.call("fesetenv", mode)
        if self.emitter.lock:
            self.call("PyThread_release_lock", self.data.lock)
        return error

    @contextlib.contextmanager
    def each_slice(self) -> Iterator[list[_SliceArray]]:
        """A loop over the slices, in which the emitter writes what runs one of them on its arrays."""
        firsts = self._first_slice()
        steps = [self.buffers[k].step for k in range(len(firsts))]
        with self.loop(self.count) as i:
            yield [first._replace(pointer=first.pointer + step * i) for first, step in zip(firsts, steps, strict=True)]

    @contextlib.contextmanager
    def each_chunk(self, most: int) -> Iterator[tuple[list[_SliceArray], _Int64]]:
        """A loop over chunks of at most so many slices: arrays with the slices as first dimension, and their number.

        An array that is the same for all slices has the size 1 there.
        """
        firsts = self._first_slice()
        with self.loop((self.count + (most - 1)) // most) as chunk:
            start = chunk * most
            count = self.minimum(self.count - start, most)
            arrays = []
            for k, first in enumerate(firsts):
                step = self.buffers[k].step
                is_shared = step == 0
                dims = [self.select(is_shared, 1, count), *first.dims]
                arrays.append(_SliceArray(first.pointer + step * start, dims, first.itemsize))
            yield arrays, count

    def _first_slice(self) -> list[_SliceArray]:
        """Return the arrays of the first slice, to which the buffers point."""
        arrays = []
        for k, (dtype, rank) in enumerate(zip(self.signature.dtypes, self.signature.ranks, strict=True)):
            buffer = self.buffers[k]
            dims = [self.load(buffer.dims + 8 * axis) for axis in range(rank)]
            arrays.append(_SliceArray(buffer.pointer, dims, dtype.itemsize))
        return arrays

    # -- the call --

    def _handler(self, frame: Any) -> Any:
        """Run a call: at once if it has no batch, else by the batch scheduler."""
        self.frame = frame
        with self.if_(frame.extension_start, likely=False):
            self._register(_StructPointer(self, XLA_FFI_Metadata_Extension, frame.extension_start))
        self.ret(0, when=frame.stage != _STAGE_EXECUTE)
        xla_buffers, depth = self._read_buffers()
        buffers = self._batched_buffers(xla_buffers)
        self._start_outputs(xla_buffers, buffers, depth)
        with self.if_(depth == 0):
            self.ret(self.call("inner_loop", frame, buffers, 1))
        return self.call(self.data.run_batch, frame, self.data, buffers, depth)

    def _register(self, extension: Any) -> None:
        """On registration XLA asks for the API version and traits, through an extension.

        The minor version is XLA's own: it accepts no newer one.
        """
        with self.if_(extension.extension_base.type == _EXTENSION_METADATA):
            extension.metadata.traits = self.emitter.traits
            version = extension.metadata.api_version
            version.major_version = _API_MAJOR
            version.minor_version = self.frame.api.api_version.minor_version
            self.ret(0)

    def _read_buffers(self) -> tuple[list[Any], _Int64]:
        """The buffers, and how many batch dimensions they have.

        They are those of the signature, which is in the hash of the target's name.
        """
        args = self.frame.args.args
        rets = self.frame.rets.rets
        ranks = self.signature.ranks
        n_in = self.signature.n_in
        addresses = [args + 8 * i for i in range(n_in)]
        addresses += [rets + 8 * j for j in range(len(ranks) - n_in)]
        xla_buffers = [_StructPointer(self, XLA_FFI_Buffer, self.load(address)) for address in addresses]
        return xla_buffers, xla_buffers[-1].rank - ranks[-1] if xla_buffers else _Int64(self, self.value(0))

    def _start_outputs(self, xla_buffers: Sequence[Any], buffers: _StructPointer, depth: _Int64) -> None:
        """Write the values that outputs start with, for all slices at once.

        XLA gives an output that starts with an input the memory of that input, or of a copy; but not always: in a
        dynamic-slice fusion on GPUs (XLA of jax 0.11.2) the alias is lost, and the output is uninitialized.
        """
        signature = self.signature
        sources = {j: xla_buffers[i].data for i, j in signature.aliases}
        for j, out in enumerate(xla_buffers[signature.n_in :]):
            nbytes = self.variable(buffers[signature.n_in + j].slice_nbytes)
            with self.loop(depth) as d:
                nbytes.current = nbytes.current * self.load(out.dims + 8 * d)
            if not self.emitter.libcuda:
                self._use_huge_pages(out.data, nbytes.current)
            elif j in signature.zeroed:
                self._fill(out.data, 0, nbytes.current)
            if j in sources:
                with self.if_(sources[j] != out.data, likely=False):
                    self._fill(out.data, sources[j], nbytes.current)

    def _use_huge_pages(self, data: Any, nbytes: Any) -> None:
        """Ask Linux for huge pages under a large output, as NumPy does for its arrays."""
        # To fault XLA's fresh memory in by 4 KiB pages took 40 ms of the 43 ms of an add of 1e7 float32.
        if sys.platform == "linux":
            with self.if_(nbytes >= _HUGE_PAGE_MIN, likely=False):
                first_page = (data + (mmap.PAGESIZE - 1)) & -mmap.PAGESIZE
                self.call("madvise", first_page, data + nbytes - first_page, _MADV_HUGEPAGE)

    def _fill(self, data: Any, source: Any, nbytes: Any) -> None:
        """Copy `source` to `data`; if `source` is 0, write zeros."""
        if self.emitter.libcuda:
            with self.if_(nbytes > 0):
                _write_cuda_fill(self, self.emitter.libcuda, data, source, nbytes)
        elif isinstance(source, int):
            self.cgutils.memset(self.builder, self.pointer(data), self.value(nbytes), 0)
        else:
            self.copy_bytes(data, source, nbytes)

    def _batched_buffers(self, xla_buffers: Sequence[Any]) -> _StructPointer:
        """Return the buffers at their first slices.  Of an aliased input, the kernel gets the memory of the output."""
        signature = self.signature
        aliased = dict(signature.aliases)
        buffers = self.alloca(_BatchedBuffer, len(signature.ranks))
        for k, (dtype, rank) in enumerate(zip(signature.dtypes, signature.ranks, strict=True)):
            xla_buffer = xla_buffers[signature.n_in + aliased[k]] if k in aliased else xla_buffers[k]
            depth = xla_buffer.rank - rank
            dims = xla_buffer.dims + depth * 8
            sizes = [self.load(dims + 8 * axis) for axis in range(rank)]
            buffer = buffers[k]
            buffer.pointer = xla_buffer.data
            buffer.step = 0
            buffer.dims = dims
            buffer.depth = depth
            buffer.slice_nbytes = math.prod(sizes) * dtype.itemsize
            buffer.n_slices = 1
        return buffers

    # -- for emitters --

    def fail(self, message: Any, when: Any = True) -> None:
        """Return an error from the function; `message` is the address of a text, which XLA copies."""
        with self.if_(when, likely=False):
            args = self.new(XLA_FFI_Error_Create_Args, message=message, errc=_ERROR_INTERNAL)
            self.ret(self.api(self.frame, "Error_Create", args))

    def text(self, text: str) -> _Int64:
        """The address of a text."""
        characters = self.cgutils.make_bytearray(text.encode("utf-8", "replace") + b"\0")
        return _Int64(self, self.cgutils.global_constant(self.module, "text", characters).ptrtoint(self.i64))

    @property
    def launch(self) -> _Int64:
        """The address of the integers of a call's one attribute, `launch`, which may be none."""
        return _StructPointer(self, XLA_FFI_Array, self.load(self.frame.attrs.attrs)).data


# -- 6.6 Slices that run in Python ---------------------------------------------------------------------
# The GIL, arrays and messages of errors.


class _CallbackEmitter(_Emitter):
    """Runs a slice by calling Python, under the GIL: for what cannot be native."""

    # `body(buffers, launch, stream, ordinal)` gets the address and dimensions of each buffer, the address of the
    # attribute `launch` and, with `libcuda`, a CUDA stream and device.  What it raises the user sees.
    def __init__(self, signature: _Signature, body: Callable[..., None], libcuda: Any = None) -> None:
        self.libcuda = libcuda
        n_words = len(signature.ranks) + sum(signature.ranks) + 3

        def callback(words: Any) -> None:
            message = 0
            try:
                numbers = iter(words[:n_words])
                buffers = [(next(numbers), tuple(itertools.islice(numbers, rank))) for rank in signature.ranks]
                body(buffers, *numbers)
            except BaseException as error:  # nothing may unwind into XLA
                message = _store_error_message(error, signature.label)
            words[n_words] = message

        self.callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(_I64))(callback)

    def write(self, handler: _Handler) -> None:
        place = _write_stream_and_device(handler) if self.libcuda else (0, 0)
        # An interrupt may end the callback before its first line: then this stands where its message belongs.
        interrupted = handler.text(f"KeyboardInterrupt (raised in kernel '{handler.signature.label}')")
        with handler.each_slice() as arrays:
            words = [word for array in arrays for word in (array.pointer, *array.dims)]
            words += [handler.launch, *place, interrupted]
            memory = handler.array(words)
            handler.call(self.callback, memory)
            message = handler.load(memory + 8 * (len(words) - 1))
            handler.fail(message, when=message)


_ERROR_MESSAGES: dict[int, Any] = {}  # by thread: a text must live until XLA has copied it


def _store_error_message(error: BaseException, label: str) -> int:
    """The address of the text for JAX's error.  Never raises, as its caller is machine code."""
    text = "".join(traceback.format_exception_only(error)).strip()
    hint = f". {_READ_ONLY_ADVICE}" if "destination is read-only" in text else ""  # as NumPy says it
    text = f"{text[:10_000]}{hint} (raised in kernel '{label}')".replace("\0", "\\0")
    _ERROR_MESSAGES[threading.get_ident()] = message = ctypes.create_string_buffer(text.encode("utf-8", "replace"))
    return ctypes.addressof(message)


# ======================================================================================================
# 7. Numba on CPUs: a wrapper, and an emitter that calls the code that Numba compiles.
#
# A new version of Numba may break:
# - with an error: `library._final_module`, `library._shared_module`, `type_annotation.calltypes`, `.typemap` and
#   `.blocks`, the status that `call_conv.call_function` returns;
# - silently: the members of arrays (`_numba_array_members`; the matrix of the tests shows it), functions that write to
#   read-only arrays (7.3; the tests' table of mistakes), and the name of the call that starts threads in LLVM's text
#   (`_uses_threads`; test_the_life_of_a_process...).

_NUMBA_INSTALL = "pip install numba"
# A new dtype is added in three places: to the names that a backend supports (_NUMBA_DTYPES, _CUDA_DTYPES,
# _WARP_DTYPES); to the conversion there (`_array_types`, which looks the name up in Numba; `_NumbaCuda.callback`, which
# uses the `typestr`; `_warp_param`); and to the docstrings, which list unsupported dtypes.
_NUMBA_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128".split()
)
_UPDATED_IN_PLACE = (
    "'NoneType' object has no attribute 'args'"  # Numba's text for `x += 1` if x is read-only (0.63-0.68)
)
_READ_ONLY_ADVICE = (
    "Inputs are read-only, because JAX may share them, and so are global arrays. Write to an output (a parameter after "
    "the inputs), list the input in in_out_argnames, or start an output from it with input_output_aliases."
)
# {pattern in the text of Numba's error: advice}.  The first pattern that matches counts.
_ADVICE = {
    r"Cannot modify readonly array|setitem\(readonly array|explicit output that is read-only|"
    + _UPDATED_IN_PLACE: _READ_ONLY_ADVICE,
    r"must have void return type|to none": "A kernel with parameters for its outputs returns nothing, but this one "
    "returns a value. Write it to an output: `out[:] = value`.",
    r"(?s)Known signatures:.*64|mismatch: (double|i64)": "JAX truncates 64-bit inputs to 32 bits, but the kernel has a "
    'signature of 64 bits. Set jax.config.update("jax_enable_x64", True), or remove the signature.',
    r"Module\(<module 'jax\.random'": "A kernel cannot draw from jax.random. Draw before the call, and pass the noise "
    "as an input.",
    r"Module\(<module 'jax|<class 'jax[^']*(PjitFunction|ufunc|custom_[jv][jv]p)'": "A kernel cannot call JAX. Write "
    "np. instead of jnp., and loops instead of jax.lax and jax.vmap.",
    r"<class 'jax|readonly buffer\(": "A kernel cannot capture a JAX array. Pass it as an input, or, if it is a "
    "constant, capture np.asarray(array).",
    r"attribute 'at' of type .*array": "NumPy arrays have no `.at`. Write out[i] = 1.0 instead of out.at[i].set(1.0).",
    r"Module\(<module 'scipy|<class 'numpy\.ufunc'": "Numba does not support this function. Use math.erf and "
    "math.gamma, or, on CPUs, SciPy's C functions through get_cython_function_address, as `bessel` in the project's "
    "EXAMPLES.md does.",
    r"Module\(<module 'pdb|name 'breakpoint'": "A compiled kernel has no debugger. Debug it in Python with NumPy "
    "arrays: call wrapper.__wrapped__, or its .py_func if it is decorated.",
    r"IMPORT_NAME": "A kernel cannot import. Import outside of the kernel.",
    rf"<class '{re.escape(__name__)}\.": "A kernel cannot call a wrapper or an op. Call the @numba.njit function in "
    "it: wrapper.__wrapped__.",
    r"<class '(function|functools\.partial)'": "A kernel can only call jitted functions. Decorate the helper with "
    "@numba.njit (for a GPU: @cuda.jit).",
    r"Untyped global name|' in globals|, \(List\(": "A kernel can capture numbers, tuples and NumPy arrays, but no "
    "dict, list or object. Pass its values as inputs, or assign them to variables: gain = params['gain'].",
    r"Cannot bind 'args=.*\*, |^tuple index out of range$": "A kernel's parameters are passed by position, so "
    "none can be keyword-only. Make it an input, or a variable of the closure.",  # Numba 0.63 only has the second text
    r"getitem\((u?int|float|complex|bool)\d*, Tuple\(\)": "A 0-d input is a scalar here, because the kernel returns "
    "its outputs, or because scalars= lists it. Write q instead of q[()].",
}
_RETURNED = "returned_by_kernel"  # in adapters: numba_cuda_mlir 0.6.0 cannot compile `return kernel()`


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
    zero_outputs: bool | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Return a JAX function that runs a Numba kernel on the CPU.

    The kernel has one of two calling conventions:

        kernel(in..., out..., scratch...)      # writes its outputs, and returns nothing
        kernel(in...) -> out or (out, ...)     # returns its outputs

    Arrays are C-contiguous NumPy arrays.  A 0-d input is an array in the first convention (read it with `n[()]`, or
    list it in `scalars`), and a scalar in the second.

    XLA calls the kernel's machine code, without Python and without the GIL.  The function works under `jit`, `scan`,
    `cond`, `vmap`, `shard_map` and `export`.  It has no derivative; to define one, use `jax.custom_vjp` or
    `XLACustomKernel`.

    **Outputs start from zeros.**  Zeros are the right start for sums only.  For a product, a minimum or a maximum,
    store the start first (`out[:] = np.inf`), or alias the output to an input.  If the kernel stores to every element,
    `zero_outputs=False` saves the zeroing.  For `out[i] = x[i] + y[i]`, zeroing takes 2% of the time of a call on 16
    floats, 10% on 1,000, 35% on 100,000 and 17% on 1,000,000; under `vmap` up to 8%.  Outputs that are returned, and
    outputs aliased to an input, are not zeroed.

    **Inputs never change.**  Numba compiles the kernel for read-only arrays, so most writes to inputs do not compile.
    If the kernel uses a function for which Numba ignores read-only arrays (`x.flat[0] = 1`,
    `np.fill_diagonal(x, 0)`), or if it only compiles for writable arrays, LLVM must prove that it does not write to
    its inputs.  Otherwise the call raises an error; then let the kernel work on a copy, `x.copy()`.  The check does not
    see into your own intrinsics and overloads, raw addresses (`x.ctypes`) and C code.

    **State is updated in place** with `in_out_argnames`.  Assign to elements, `v[:] = 0.5 * v + x`.  The statement
    `v = 0.5 * v + x` only creates a local variable.

    **Compilation.**  A kernel is compiled once for each combination of dtypes and ranks.  At that time Numba reads
    globals and closure variables.  If a plain function is wrapped again, they are read again.  Recreated kernels share
    their code if their captured values are equal.  `cache=True` works, also with explicit signatures.  Integer
    division by zero raises, unless the kernel is decorated with `error_model="numpy"`.

    **Execution.**  XLA may merge two equal calls, even if the kernel draws random numbers, unless
    `has_side_effect=True`.  Two calls with side effects are not ordered, unless one uses a result of the other.  Under
    `vmap`, `cond` becomes `select`, so the kernel also runs in a branch that is not taken, and its exceptions are
    raised.  In a batched `while_loop`, the kernel also runs on the last state of batch elements that have finished.
    Kernels run on XLA's threads, so `np.random.seed` and `numba.set_num_threads`, which are per thread, have no effect.
    Ctrl-C does not stop a kernel that never ends; Ctrl-\\ does.

    **Threads.**  Batch elements of a `vmap` may run at the same time on several threads.  If the kernel calls a C
    library that is not thread-safe, use `vmap_method="sequential"`.  A kernel with `parallel=True` uses Numba's
    threads, one batch element after another.  If `numba.threading_layer()` is workqueue, do not call a parallel
    function yourself while JAX runs a parallel kernel, because Numba would end the process.

    Args:
      kernel: a function decorated with `numba.njit`, `numba.vectorize` or `numba.guvectorize`, or a plain function,
        which is jitted.  Without a kernel, `numba_kernel(outs=...)` is a decorator.
      outs: a `jax.ShapeDtypeStruct` (anything with `.shape` and `.dtype`), a pytree of them without dicts (JAX would
        sort their keys), or a function of the inputs' `ShapeDtypeStruct`s that returns one of these.  The function
        runs when a call is traced.  The result has the structure of `outs`.
      vmap_method: None, or one of the names that `jax.pure_callback` accepts.  With "sequential" and
        "sequential_unrolled" the elements of a batch run in order, on one thread.  Otherwise XLA's threads share them.
        The results are the same.  Default None.
      input_output_aliases: a dict `{i: j}`.  Output j starts with the value of input i (a number or a name), and uses
        its memory if XLA can.  The kernel gets the same array for both.  The caller's array never changes.  Default
        None.
      in_out_argnames: names of parameters that the kernel updates in place, in the order of its parameters.  Each is
        an input, and its new value is a result.  `outs` begins with their specs.  Default None.
      scalars: names of 0-d inputs that the kernel takes as scalars, or True for all.  Default False.  To compile a
        constant into the kernel, use a closure variable instead.  Each value then is a kernel of its own, which takes
        about 0.1 s and 1 MB that is never freed; 0.25 s and 3 MB if it has whole-array expressions or returns arrays.
      has_side_effect: True keeps the call even if its results are not used.  Default False.
      scratch: temporary buffers: a spec, a tuple of specs, or a function like `outs`.  They are passed after the
        outputs, start from zeros and are not returned.  Under `vmap`, each batch element has its own.  Default None.
      zero_outputs: None zeroes new outputs and scratch, and raises an error if the kernel never stores to an output.
        True zeroes them without this check, for outputs that may stay zero.  False leaves them uninitialized.  Default
        None.
      name: the prefix of the kernel's name in exported programs, which find the kernel by it (see `export_checks`).
        Default None.

    Raises:
      TypeError: if a dtype has no CPU arithmetic in Numba (float16, bfloat16, float8, sub-byte types); if the number of
        arguments is wrong; if the kernel may write to an input, or never stores to an output; if it cannot be compiled,
        or uses object mode (see `jax.pure_callback`); if a result has another rank than in `outs`, or a dtype that
        NumPy does not cast to the declared one ("same_kind").
      ValueError: if `vmap_method` is unknown, aliases or `scalars` do not fit the call, or `name` is in use.
      jax.errors.JaxRuntimeError: if the kernel raises an exception; the message has its type and text (a jitted
        function may raise ValueError instead); or if a result has another shape than in `outs`.

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
    options = dict(locals())  # all arguments by name
    return _make_wrapper(_NumbaKernel, options.pop("kernel"), _Options(**options))


# -- 7.1 The wrapper: which buffer of a call is passed to which parameter of the kernel ----------------
# The buffers of a call are numbered: the inputs, then the outputs, then scratch.  An in-out argument has two buffers of
# the same value, that of its input and that of its output.  The kernel gets the output's.  The arguments, in order:
#
#     a kernel that writes its outputs     the inputs (in-out arguments in their places), the other outputs, scratch
#     a kernel that returns its outputs    the inputs (in-out arguments in their places); no scratch is possible
#                                          Its results are stored to the outputs after those of in-out arguments.
#
# Numba kernels for GPUs use the first convention only.


class _NumbaWrapper(_Wrapper):
    """A wrapper of a Numba kernel, for CPUs (`_NumbaKernel`) or for GPUs (`_CudaWrapper`)."""

    def __init__(self, kernel: Any, options: _Options) -> None:
        super().__init__(kernel, options)
        if options.scalars is True:
            self.scalars = set(self.parameters)
        else:
            self.scalars = set(options.scalars or ())
            self._check_names("scalars", options.scalars or ())
            for name in self.in_outs:
                if name in self.scalars:
                    raise ValueError(
                        f"{self.title}: a scalar cannot be an in-out argument, because the kernel cannot change it. "
                        f"{name!r} is in both scalars and in_out_argnames. Remove it from scalars, and read "
                        f"{name}[()]."
                    )

    def _argument_maps(self, call: _CallParams, may_return: bool) -> list[_ArgumentMap]:
        """Return the argument maps that fit the kernel's parameters: of one or, if it may return, both conventions."""
        n_inputs = len(call.ins)
        n_buffers = n_inputs + len(call.outs)
        input_buffers = list(range(n_inputs))
        for in_out_number, name in enumerate(self.in_outs):  # in-out arguments are the first outputs
            input_buffers[self.parameters.index(name)] = n_inputs + in_out_number
        new_buffers = tuple(range(n_inputs + len(self.in_outs), n_buffers))  # the other outputs, and scratch
        zero_dim = frozenset(i for i, spec in enumerate(call.ins) if not spec.shape)
        scalars = frozenset(i for i in zero_dim if i < len(self.parameters) and self.parameters[i] in self.scalars)
        self._check_scalars(call.ins)
        maps = [_ArgumentMap(n_buffers, (*input_buffers, *new_buffers), scalars)]
        if may_return and new_buffers and len(call.outs) == call.n_results:
            maps.append(_ArgumentMap(n_buffers, tuple(input_buffers), zero_dim, new_buffers))
        kernel_signature = inspect.signature(_py_func(self.kernel))
        fitting = []
        for argument_map in maps:
            with contextlib.suppress(TypeError):
                kernel_signature.bind(*argument_map.args)
                fitting.append(argument_map)
        if not fitting:
            returns = ", or takes the inputs only and returns the outputs" if may_return else ""
            raise TypeError(
                f"A kernel takes its inputs, outputs and scratch by position{returns}. Kernel {self.__name__!r} takes "
                f"{kernel_signature}, but this call has {n_inputs} inputs and {n_buffers - n_inputs} outputs, scratch "
                "included. List a parameter that is both input and output in in_out_argnames, or wrap the kernel in a "
                "function that has constants in its closure."
            )
        return fitting

    def _check_scalars(self, ins: Sequence[Spec]) -> None:
        """Raise an error if a name that the user gave in `scalars` is not a 0-d input of this call."""
        if self.options.scalars is True:
            return
        for name in self.parameters:
            if name not in self.scalars:
                continue
            i = self.parameters.index(name)
            kind = _format_spec(ins[i]) if i < len(ins) else "an output or scratch"
            if i >= len(ins) or ins[i].shape:
                raise ValueError(
                    f"{self.title}: a scalar is an input without dimensions. {name!r} in "
                    f"scalars={self.options.scalars} is {kind}. Remove it from scalars, or pass a number (under vmap, "
                    "one for each batch element)."
                )


class _NumbaKernel(_NumbaWrapper):
    """The wrapper that `numba_kernel` returns."""

    decorator = "numba_kernel"

    def __init__(self, kernel: Any, options: _Options) -> None:
        if not isinstance(kernel, types.FunctionType) and _decorated_backend(kernel) != "numba":
            raise _unsupported_kernel_error(
                "numba_kernel", "a function decorated with numba.njit or a plain function", kernel
            )
        super().__init__(kernel, options)

    def _find_target(self, call: _CallParams) -> _Target:
        """Return the target of a call; if it is new, compile the kernel."""
        numba = _import("numba", "numba_kernel", _NUMBA_INSTALL)
        if numba.config.DISABLE_JIT:
            raise RuntimeError(
                f"{self.title} must be compiled. The environment variable NUMBA_DISABLE_JIT=1 disables this. Unset it; "
                "to debug the kernel in Python, call the plain function with NumPy arrays."
            )
        self._check_dtypes(call, _NUMBA_DTYPES, "for which Numba has no CPU arithmetic")
        signature = call.signature(self.__name__)
        argument_maps = self._argument_maps(call, may_return=True)
        in_order = self.options.in_order
        checks_outputs = self.options.zero_outputs is None

        def compile_kernel() -> _CompiledHandler:
            compiler = _NumbaCompiler(self._dispatcher(), self.parameters, signature, call.n_results, checks_outputs)
            return compiler.compile_handler(argument_maps, in_order)

        options = "numba", in_order, numba.config.BOUNDSCHECK, checks_outputs, *argument_maps
        specialization = _Specialization(signature, options, "cpu", self.options.name)
        name = _REGISTRY.find_or_compile(self, specialization, compile_kernel)
        where = (
            "runs on the CPU; for GPUs there are numba_cuda_kernel and warp_kernel, and jax.pure_callback calls this "
            "one's function"
        )
        return _Target(name, platform="cpu", title=self.title, where=where)

    def _dispatcher(self) -> Any:
        """Return a Numba dispatcher that can compile the kernel for read-only arrays."""
        import numba

        kernel = self.kernel
        if isinstance(kernel, types.FunctionType):
            return numba.njit(kernel)
        # If a kernel has explicit signatures, it compiles no others.  If Numba inlined the kernel into an adapter, the
        # kernel's own options would be lost.
        is_inlined = getattr(kernel, "targetoptions", {}).get("inline", "never") != "never"
        if getattr(kernel, "_can_compile", True) and not is_inlined:
            return kernel
        return _recreate_dispatcher(kernel)


def _recreate_dispatcher(kernel: Any) -> Any:
    """Return a new dispatcher of the same function and options, without signatures, inlining and Numba's cache."""
    import numba

    options = {key: value for key, value in kernel.targetoptions.items() if key != "inline"}
    pipeline = kernel._compiler.pipeline_class
    return numba.jit(locals=kernel.locals, pipeline_class=pipeline, **options)(kernel.py_func)


class _ArgumentMap(NamedTuple):
    """How a kernel is called with the buffers b0, b1, ... of a call.

    Every number in an argument map is the number of a buffer.  A position in `args` is the position of a parameter.
    """

    n_buffers: int
    args: tuple[int, ...]  # the buffer for each parameter
    scalars: frozenset[int] = frozenset()  # the buffers in `args` whose only element is passed, as a scalar
    results: tuple[int, ...] = ()  # the buffer for each value that the kernel returns; empty if it writes its outputs
    # On a GPU, the ranks of the buffers of one slice.  Then buffers have the batch as first dimension, and the adapter
    # passes slice `blockIdx.z`.  None: buffers are those of one slice.
    slice_ranks: tuple[int, ...] | None = None

    def is_plain_for(self, kernel: Any) -> bool:
        """Return whether the kernel takes all buffers as they are, in their order."""
        n_parameters = len(inspect.signature(_py_func(kernel)).parameters)
        takes_all = self == _ArgumentMap(n_parameters, tuple(range(n_parameters)))
        return takes_all and n_parameters == len(_parameters(kernel))

    def _expression(self, buffer: int) -> str:
        """Return the expression of an argument in the adapter's source."""
        if self.slice_ranks is None:
            return f"b{buffer}[()]" if buffer in self.scalars else f"b{buffer}"
        z = f"min(cuda.blockIdx.z, b{buffer}.shape[0] - 1)"  # size 1 broadcasts
        if buffer in self.scalars or self.slice_ranks[buffer]:
            return f"b{buffer}[{z}]"
        return f"b{buffer}[{z} : {z} + 1].reshape(())"

    def adapter(self, kernel: Any, *last_lines: str, **namespace: Any) -> Callable[..., Any]:
        """Return a Python function of all buffers that calls `kernel` and then runs `last_lines`.

        For three buffers, of which the first is a scalar and the last is a result:

            def adapter(b0, b1, b2):
                returned_by_kernel = kernel(b0[()], b1)
                b2[...] = returned_by_kernel
        """
        parameters = ", ".join(f"b{buffer}" for buffer in range(self.n_buffers))
        arguments = ", ".join(map(self._expression, self.args))
        lines = [f"def adapter({parameters}):", f"{_RETURNED} = kernel({arguments})", *last_lines]
        namespace["kernel"] = kernel
        exec("\n    ".join(lines), namespace)
        return namespace["adapter"]


# -- 7.2 Compiling -------------------------------------------------------------------------------------


class _NumbaCompiler:
    """The compilation of one kernel for one signature.

    Inputs are compiled as read-only arrays.  If that fails, they are compiled as writable arrays, because a kernel may
    call helpers with explicit signatures, which only take writable ones.  Then `_check_inputs` requires a proof.
    """

    def __init__(
        self, kernel: Any, parameters: Sequence[str], signature: _Signature, n_results: int, checks_outputs: bool
    ) -> None:
        self.kernel = kernel
        self.parameters = parameters
        self.signature = signature
        self.n_results = n_results
        self.checks_outputs = checks_outputs
        self.title = f"Kernel {signature.label!r}"

    def compile_handler(self, argument_maps: list[_ArgumentMap], in_order: bool) -> _CompiledHandler:
        """Compile the kernel with the first argument map that works, and the handler that calls it."""
        began = time.perf_counter()
        if _uses_object_mode(self.kernel):
            raise TypeError(
                f"A kernel runs without Python. {self.title} uses Numba's object mode, which needs the GIL. Call "
                "Python with jax.pure_callback, beside the kernel or instead of it."
            )
        argument_map, overload = self._compile_first(argument_maps)
        signature = self.signature
        if argument_map.results:
            signature = signature._replace(zeroed=())  # every element of an output is stored
        emitter = _NumbaEmitter(signature.label, overload, _uses_threads(overload, self.kernel), in_order)
        compiled = _compile_handler(signature, emitter)
        slices = "run in order" if emitter.in_order else "share threads"
        spent = f"{1e3 * (time.perf_counter() - began):.0f} ms"
        _LOG.debug(f"compiled {signature.label} for {signature} in {spent}; slices {slices}")
        return compiled

    def _compile_first(self, argument_maps: list[_ArgumentMap]) -> tuple[_ArgumentMap, Any]:
        """Return the first argument map with which the kernel compiles, and the compiled function of all buffers.

        If there is none, raise the error of the first map.
        """
        errors = []
        for argument_map in argument_maps:
            try:
                return argument_map, self._compile(argument_map)
            except TypeError as error:
                errors.append(error)
        raise errors[0]

    def _compile(self, argument_map: _ArgumentMap) -> Any:
        """Return the compiled function that takes all buffers, after all checks."""
        from numba import types as nbtypes

        buffer_types = _array_types(nbtypes, self.signature)
        refusal: Exception | None = None  # Numba's error for read-only inputs
        try:
            call = self._compile_call(argument_map, buffer_types)
        except Exception as error:
            refusal = error
            buffer_types = _array_types(nbtypes, self.signature, readonly=False)
            call = self._compile_writable_call(argument_map, buffer_types, refusal)
        self._check_returned_types(argument_map, call)
        if argument_map.results:
            call = self._compile_stores(argument_map, call, buffer_types)
        unwritten = _unwritten_buffers(call, self.signature)
        self._check_inputs(argument_map, call, unwritten, refusal)
        unstored = self._unstored_output(argument_map, call, unwritten)
        if unstored is not None:
            raise self._unstored_error(argument_map, unstored)
        return call.overload

    def _compile_call(self, argument_map: _ArgumentMap, buffer_types: tuple) -> _CompiledCall:
        """Compile a call of the kernel with buffers of these types; use an adapter only if it is needed."""
        import numba

        can_compile = getattr(self.kernel, "_can_compile", False)  # False for ufuncs
        if can_compile and argument_map.is_plain_for(self.kernel):
            return _compile_types(self.kernel, buffer_types)
        if can_compile and argument_map.results and len(argument_map.args) == len(self.parameters):
            types_of_arguments = []
            for buffer in argument_map.args:
                is_scalar = buffer in argument_map.scalars
                types_of_arguments.append(buffer_types[buffer].dtype if is_scalar else buffer_types[buffer])
            return _compile_types(self.kernel, tuple(types_of_arguments))
        adapter = numba.njit(argument_map.adapter(self.kernel, f"return {_RETURNED}"))
        return _compile_types(adapter, buffer_types)

    def _compile_writable_call(
        self, argument_map: _ArgumentMap, buffer_types: tuple, refusal: Exception
    ) -> _CompiledCall:
        """Compile a call with writable inputs.  If that fails, too, raise the error for read-only inputs."""
        with contextlib.suppress(Exception):
            return self._compile_call(argument_map, buffer_types)
        raise _compile_error("Numba", self.signature, refusal) from refusal

    # -- results --

    def _check_returned_types(self, argument_map: _ArgumentMap, call: _CompiledCall) -> None:
        """Raise an error if the kernel does not return what `outs` declares."""
        returned = call.overload.signature.return_type
        kinds = list(_returned_leaves(returned).values())
        declared = [(self.signature.dtypes[buffer], self.signature.ranks[buffer]) for buffer in argument_map.results]
        wrong = [(kind, spec) for kind, spec in zip(kinds, declared) if not _can_store(kind, *spec)]
        if not wrong and len(kinds) == len(declared):
            return
        if not argument_map.results:
            unwritten = _unwritten_buffers(call, self.signature)
            unstored = self._unstored_output(argument_map, call, unwritten)
            if unstored is not None:
                raise self._unstored_error(argument_map, unstored, "keep the `return`")
            raise TypeError(
                f"A kernel with parameters for its outputs returns nothing. {self.title} returns {returned}, not "
                "nothing. Remove the `return`, or wrap the kernel in a function that drops the result."
            )
        shown = ", ".join(f"{dtype.name}[{','.join(':' * rank)}]" for dtype, rank in declared)
        fix = "Return one value for each of outs"
        for kind, (dtype, rank) in wrong:
            element, returned_rank = _element_and_rank(kind)
            if len(kinds) == len(declared) and returned_rank == rank:
                cast = f"x.astype(np.{dtype})" if rank else f"np.{dtype}(x)"
                fix = f"Return {cast}, or declare {element} in outs"
        raise TypeError(
            "A kernel that takes only its inputs returns what outs declares; results are cast within a kind (float64 "
            f"to float32), not to another. {self.title} returns {returned}, not {shown}. {fix}."
        )

    def _compile_stores(self, argument_map: _ArgumentMap, call: _CompiledCall, buffer_types: tuple) -> _CompiledCall:
        """Compile a function of all buffers that stores to the outputs what the call returns."""
        import numba
        from numba import types as nbtypes

        leaves = _returned_leaves(call.overload.signature.return_type)
        copies = []
        stores = []
        for (value, kind), buffer in zip(leaves.items(), argument_map.results, strict=True):
            if self.signature.aliases and len(leaves) > 1 and isinstance(kind, nbtypes.Array):
                copies.append(f"r{buffer} = {value}.copy()")  # it may be a view of an output that is stored to before
                value = f"r{buffer}"
            if self.signature.ranks[buffer]:
                stores.append(f"if {value}.shape != b{buffer}.shape: raise ShapeError({value}.shape, b{buffer}.shape)")
            stores.append(f"b{buffer}[...] = {value}")
        if call.dispatcher is not self.kernel:  # an adapter, which takes all buffers
            n_buffers = argument_map.n_buffers
            argument_map = _ArgumentMap(n_buffers, tuple(range(n_buffers)))
        adapter = argument_map.adapter(call.dispatcher, *copies, *stores, ShapeError=ShapeError)
        return _compile_types(numba.njit(adapter), buffer_types)

    # -- checks of reads and writes (7.3) --

    def _check_inputs(
        self, argument_map: _ArgumentMap, call: _CompiledCall, unwritten: set[int], refusal: Exception | None
    ) -> None:
        """Raise an error if the kernel may write to an input."""
        n_inputs = self.signature.n_in
        aliased = dict(self.signature.aliases)
        names = []  # of the inputs that LLVM does not prove to be unwritten
        for position, buffer in enumerate(argument_map.args):
            if buffer < n_inputs and buffer not in {*unwritten, *argument_map.scalars, *aliased}:
                names.append(self._parameter(position))
        if not names:
            return
        shown = " or ".join(map(repr, names))
        fix = (
            f"Write to an output, or list the input in in_out_argnames=[{names[0]!r}]. If the kernel does not write to "
            f"it, or only needs a copy, use {names[0]}.copy() there."
        )
        if refusal:
            text = _numba_text(refusal)
            verb = "writes" if _find_advice(text) == _READ_ONLY_ADVICE else "may write"
            raise TypeError(
                f"Inputs are read-only, because JAX may share them. {self.title} {verb} to its input {shown}: it "
                f"compiles only for writable arrays. {fix}\nNumba's error for read-only arrays:\n{_plain_text(text)}"
            ) from refusal
        statement = _find_bypass(call)
        if statement is not None:
            raise TypeError(
                f"Inputs are read-only, because JAX may share them. {self.title} may write to its input {shown}: "
                f"Numba ignores that the array is read-only in {statement}. {fix}"
            )

    def _unstored_output(self, argument_map: _ArgumentMap, call: _CompiledCall, unwritten: set[int]) -> int | None:
        """Return the position of the first output to which the kernel surely never stores."""
        if not self.checks_outputs:
            return None
        n_inputs = self.signature.n_in
        outputs = range(n_inputs, n_inputs + self.n_results)
        for position, buffer in enumerate(argument_map.args):
            is_unwritten_output = buffer in outputs and buffer in unwritten
            if is_unwritten_output and _may_return(call.overload) and not _may_store(call, buffer):
                return position
        return None

    def _unstored_error(self, argument_map: _ArgumentMap, position: int, returns: str = "") -> TypeError:
        name = self._parameter(position)
        rank = self.signature.ranks[argument_map.args[position]]
        return _never_stored_error(self.title, name, f"{name}[:] = ..." if rank else f"{name}[()] = ...", returns)

    def _parameter(self, position: int) -> str:
        """Return the name of the parameter at a position."""
        return self.parameters[position] if position < len(self.parameters) else f"argument {position}"


class _CompiledCall(NamedTuple):
    """A function that Numba has compiled for some types."""

    dispatcher: Any
    overload: Any


def _compile_types(dispatcher: Any, argument_types: tuple) -> _CompiledCall:
    """Compile a dispatcher for these types."""
    import numba

    with warnings.catch_warnings():
        # With parallel=True, Numba warns if it finds nothing that can run in parallel.
        warnings.simplefilter("ignore", numba.NumbaPerformanceWarning)
        # Numba warns if a typed dict or list takes a read-only array as a writable one.  `_find_bypass` finds that.
        warnings.filterwarnings("ignore", "unsafe cast from .*rray", numba.NumbaTypeSafetyWarning)
        dispatcher.compile(argument_types)
    return _CompiledCall(dispatcher, dispatcher.overloads[argument_types])


def _array_types(nbtypes: Any, signature: _Signature, readonly: bool = True) -> tuple[Any, ...]:
    """Return the Numba types of all buffers: row-major arrays, of which inputs are read-only by default."""
    array_types = []
    for buffer, (dtype, rank) in enumerate(zip(signature.dtypes, signature.ranks, strict=True)):
        element = nbtypes.boolean if dtype.kind == "b" else getattr(nbtypes, dtype.name)
        is_input = buffer < signature.n_in
        array_types.append(nbtypes.Array(element, rank, "C", readonly and is_input))
    return tuple(array_types)


class ShapeError(ValueError):
    """A kernel returned an array whose shape differs from the one that `outs` declares."""

    def __str__(self) -> str:
        returned, declared = self.args
        return f"it returned an array of shape {returned}, where outs declares {declared}"


def _returned_leaves(kind: Any, expression: str = _RETURNED) -> dict[str, Any]:
    """Return {expression: Numba type} for the scalars and arrays in a returned value."""
    from numba import types as nbtypes

    if kind == nbtypes.none:
        return {}
    if not isinstance(kind, nbtypes.BaseTuple):
        return {expression: nbtypes.unliteral(kind)}
    leaves = {}
    for i, item in enumerate(kind):
        leaves.update(_returned_leaves(item, f"{expression}[{i}]"))
    return leaves


def _can_store(kind: Any, dtype: np.dtype, rank: int) -> bool:
    """Return whether NumPy would store a value of a Numba type to an output, for example with `out=`."""
    from numba import from_dtype

    element, returned_rank = _element_and_rank(kind)
    castable = [from_dtype(np.dtype(name)) for name in _NUMBA_DTYPES if np.can_cast(name, dtype, "same_kind")]
    return element in castable and returned_rank == rank


def _element_and_rank(kind: Any) -> tuple[Any, int | None]:
    """Return the element type and the rank of an array or a number.  The rank of any other value is None."""
    from numba import types as nbtypes

    if isinstance(kind, nbtypes.Array):
        return kind.dtype, kind.ndim
    return kind, 0 if isinstance(kind, (nbtypes.Number, nbtypes.Boolean)) else None


def _numba_text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _plain_text(text: str) -> str:
    """Return the text of a Numba error; replace the one that is a fault of Numba."""
    return "it updates an array in place" if _UPDATED_IN_PLACE in text else text


def _find_advice(text: str) -> str | None:
    """Return the advice for the text of a Numba error, or None."""
    return next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, text)), None)


def _compile_error(compiler: str, signature: _Signature, error: Exception) -> TypeError:
    """Return the error for a kernel that cannot be compiled, with advice and the compiler's text."""
    text = _numba_text(error)
    advice = _find_advice(text)
    zero_dim = [i for i in range(signature.n_in) if signature.ranks[i] == 0]
    if advice is None and 0 in signature.ranks:
        shown = f" (input {', '.join(map(str, zero_dim))})" if zero_dim else ""
        advice = (
            f"An array without dimensions{shown} has no items n[i]; under vmap, each slice may have none. Read and "
            "write it with n[()], or list an input in scalars=['n'] and read it as n."
        )
    parts = [f"{compiler} cannot compile kernel {signature.label!r} for {signature}.", *([advice] if advice else [])]
    return TypeError(f"{' '.join(parts)}\n{_plain_text(text)}")


# -- 7.3 Reads and writes: what Numba's types and LLVM say about the buffers of a kernel ---------------
# An input is safe in one of three cases, in this order:
# 1. LLVM proves that the machine code does not write to it.  LLVM infers the parameter attributes `readonly` (the
#    function does not write through this pointer, or pointers derived from it) and `readnone`.  Plain loops and array
#    expressions get them; kernels with tuples of arrays, BLAS, exceptions and parallel loops often do not.
# 2. The kernel compiles for read-only arrays, and no statement bypasses them.  The types that Numba inferred show this
#    for the kernel and its helpers, including views, tuples, aliases and closures.
# 3. Otherwise the kernel is rejected.  This is the case for statements that bypass read-only arrays, and for kernels
#    that compile for writable arrays only.
#
# An output is surely never stored to if LLVM infers `readonly` or `readnone`, and if no statement may store to it.  The
# second condition is needed because LLVM removes stores of the old value: `v[i] *= scale` with scale = 1.0.


def _unwritten_buffers(call: _CompiledCall, signature: _Signature) -> set[int]:
    """Return the buffers to which the machine code of a function of all buffers does not write, as LLVM proves."""
    function = _llvm_function(call.overload)
    attributes = [b" ".join(argument.attributes).decode() for argument in function.arguments]
    unwritten = set()
    member = 2  # after the pointers to the returned value and to the exception
    for buffer, rank in enumerate(signature.ranks):
        data = member + _DATA_MEMBER
        if data < len(attributes) and re.search(r"\b(readonly|readnone)\b", attributes[data]):
            unwritten.add(buffer)
        member += _DATA_MEMBER + 1 + 2 * rank  # data, shape and strides
    return unwritten


def _llvm_function(overload: Any) -> Any:
    """Return the LLVM function of an overload, from an optimized module."""
    library = overload.library
    module = library._shared_module or library._final_module  # overloads from Numba's cache have the first one only
    name = overload.fndesc.llvm_func_name
    function = module.get_function(name)
    result_attributes = b" ".join(next(function.arguments).attributes)
    # An optimized function has one of these on the pointer to its result.  With NUMBA_OPT=0 it has none.
    if b"writeonly" in result_attributes or b"readnone" in result_attributes:
        return function
    optimized = module.clone()
    manager, builder = library._codegen._module_pass_manager(opt=3)
    manager.run(optimized, builder)
    return optimized.get_function(name)


def _may_return(overload: Any) -> bool:
    """Return whether a function may return without an exception: whether its status may be 0."""
    return re.search(r"\bret i32 (0\b|%)", str(_llvm_function(overload))) is not None


def _arrays_in(kind: Any) -> Iterator[Any]:
    """Yield the array types in a Numba type, such as a tuple, a list, a dict or an iterator of arrays."""
    from numba import types as nbtypes

    if isinstance(kind, nbtypes.Buffer):
        yield kind
    elif isinstance(kind, nbtypes.BaseTuple):
        for item in kind:
            yield from _arrays_in(item)
    else:
        for attribute in ("array_type", "dtype", "item_type", "value_type"):
            inner = getattr(kind, attribute, None)
            if isinstance(inner, nbtypes.Type):
                yield from _arrays_in(inner)


def _has_readonly(*kinds: Any) -> bool:
    """Return whether one of these Numba types is a read-only array, or contains one."""
    return any(not array.mutable for kind in kinds for array in _arrays_in(kind))


# {function for which Numba ignores read-only arrays: (position of the argument, condition on the types of the returned
# value and of the arguments)}.  The function writes to this argument, or returns a writable array in its memory.  Numba
# 0.63 to 0.68 are known to have no others.
_READONLY_BYPASSES: dict[Any, tuple[int, Callable[..., bool]]] = {
    # Numba >= 0.64; it copies if the layout differs.
    np.ascontiguousarray: (0, lambda returned, a: returned.mutable and (a.ndim < 2 or a.layout == "C")),
    np.asfortranarray: (0, lambda returned, a: returned.mutable and (a.ndim < 2 or a.layout == "F")),
    np.dot: (2, lambda *_: True),  # out=
    np.fill_diagonal: (0, lambda *_: True),
    np.nan_to_num: (
        0,
        lambda _, a, *options: bool(options) or a.dtype.name.startswith(("int", "uint", "bool")),
    ),  # copy=
    np.nditer: (0, lambda *_: True),  # yields writable views
}


def _find_bypass(call: _CompiledCall) -> str | None:
    """Return a statement, in a function or its helpers, that bypasses read-only arrays; None if there is none."""
    calls = [call]
    visited = set()
    for current in calls:  # the list grows in this loop
        if id(current.overload) in visited:
            continue
        visited.add(id(current.overload))
        if not _has_types(current) and not _references_bypass(current.dispatcher):
            continue
        annotation = _with_types(current).overload.type_annotation
        for statement, target, kinds, returned in _typed_statements(annotation):
            helpers = _called_helpers(target, kinds)
            if helpers is None or _is_bypass(target, kinds, returned):
                return _show_statement(statement)
            calls += helpers
    return None


def _has_types(call: _CompiledCall) -> bool:
    """Return whether Numba has the inferred types of a function.  Numba's cache keeps them as a text only."""
    return hasattr(call.overload.type_annotation, "calltypes")


def _with_types(call: _CompiledCall) -> _CompiledCall:
    """Return the call itself if Numba has its inferred types, otherwise compile it again without Numba's cache."""
    if _has_types(call):
        return call
    return _compile_types(_recreate_dispatcher(call.dispatcher), call.overload.signature.args)


def _typed_statements(annotation: Any) -> Iterator[tuple[Any, Any, list, Any]]:
    """Yield (statement, type of its target, types of its arguments, returned type) for calls and stores to items.

    The target of a call is the function, and the target of a store is the container.
    """
    from numba.core import ir

    for statement, signature in annotation.calltypes.items():
        if signature is None:
            continue
        if isinstance(statement, (ir.SetItem, ir.StaticSetItem)):
            yield statement, signature.args[0], [*signature.args[1:]], None
        elif isinstance(statement, ir.Expr):
            function = getattr(statement, "func", None) if statement.op == "call" else None
            target = annotation.typemap.get(getattr(function, "name", None))
            yield statement, target, [*signature.args], signature.return_type
    for statement in _statements(annotation.blocks):
        if not isinstance(statement, ir.Assign) or not isinstance(statement.value, ir.Expr):
            continue
        if statement.value.op == "build_map":  # stores to a typed dict
            items = [annotation.typemap[item.name] for pair in statement.value.items for item in pair]
            yield statement, annotation.typemap[statement.target.name], items, None


def _statements(blocks: Mapping[int, Any]) -> Iterator[Any]:
    """Yield the statements of a function in Numba's IR, including those of parallel loops."""
    for block in blocks.values():
        for statement in block.body:
            yield statement
            if hasattr(statement, "loop_body"):  # a Parfor
                yield from statement.init_block.body
                yield from _statements(statement.loop_body)


def _is_bypass(target: Any, kinds: list, returned: Any) -> bool:
    """Return whether a call, or a store to an item, may make a read-only array writable."""
    from numba import types as nbtypes

    if isinstance(target, nbtypes.NumpyFlatType):  # `x.flat[0] = 1`
        return _has_readonly(target)
    container = getattr(target, "this", target)  # of a bound method
    if isinstance(container, (nbtypes.ListType, nbtypes.DictType)):  # typed containers take any array as writable
        return any(array.mutable for array in _arrays_in(container)) and _has_readonly(*kinds)
    function = getattr(target, "typing_key", None)
    for known, (position, condition) in _READONLY_BYPASSES.items():
        if function is known and position < len(kinds) and _has_readonly(kinds[position]):
            given = [kind for kind in kinds if not isinstance(kind, nbtypes.Omitted)]  # without defaults
            return condition(returned, *given)
    return False


def _called_helpers(target: Any, kinds: list) -> list[_CompiledCall] | None:
    """Return the helpers that a call runs with read-only arrays, as Numba compiled them for these types.

    A gufunc is compiled for writable arrays.  So compile its function for read-only inputs; return None if that fails.
    """
    from numba import types as nbtypes

    if not _has_readonly(*kinds):
        return []
    gufunc = getattr(getattr(target, "typing_key", None), "gufunc_builder", None)
    if gufunc is not None:
        return _gufunc_loops(gufunc)
    dispatcher = getattr(target, "dispatcher", None)
    if dispatcher is not None:
        overload = dispatcher.overloads.get(tuple(kinds))
        return [_CompiledCall(dispatcher, overload)] if overload else []  # a call of itself is not compiled yet
    helpers = []
    for kind in kinds:  # a library function that calls a helper, such as functools.reduce
        if isinstance(kind, nbtypes.Dispatcher):
            helpers += [_CompiledCall(kind.dispatcher, overload) for overload in kind.dispatcher.overloads.values()]
    return helpers


def _gufunc_loops(builder: Any) -> list[_CompiledCall] | None:
    """Compile the function of a gufunc with read-only inputs.  Return None if that fails."""
    import numba
    from numba import types as nbtypes

    n_inputs = len(builder.sin)
    loops = []
    for signature in builder._cres:
        kinds = []
        for i, kind in enumerate(signature.args):
            is_input_array = i < n_inputs and isinstance(kind, nbtypes.Array)
            kinds.append(kind.copy(readonly=True) if is_input_array else kind)
        try:
            loops.append(_compile_types(numba.njit(builder.py_func), tuple(kinds)))
        except Exception:
            return None
    return loops


def _references_bypass(kernel: Any) -> bool:
    """Return whether a kernel or a helper references a function or a container for which `_is_bypass` may be true.

    This only needs the code.  It spares kernels from Numba's cache a second compilation.
    """
    names = {"flat", "typed", "Dict", "List", "dict", *(function.__name__ for function in _READONLY_BYPASSES)}
    functions = [_IdentityKey(function) for function in _READONLY_BYPASSES]
    for helper in _kernel_and_helpers(kernel):
        function = _py_func(helper)
        code = getattr(function, "__code__", _no_code)
        if names.intersection(_referenced_names(code)) or _builds_dict(code):
            return True
        for _, value in _captured_values(function):
            if hasattr(value, "gufunc_builder") or _IdentityKey(value) in functions:
                return True
            if str(getattr(value, "__module__", "")).startswith("numba.typed"):
                return True
    return False


def _builds_dict(code: types.CodeType) -> bool:
    """Return whether a code object, or a nested one, has a dict display, which is a typed dict in Numba."""
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    has_map = any(
        instruction.opname in ("BUILD_MAP", "BUILD_CONST_KEY_MAP") for instruction in dis.get_instructions(code)
    )
    return has_map or any(map(_builds_dict, nested))


def _show_statement(statement: Any) -> str:
    """Return the source line of a statement, or its place if there is no source."""
    location = statement.loc
    line = linecache.getline(location.filename, location.line).strip()
    return f"`{line:.80}` (line {location.line})" if line else f"line {location.line} of {location.filename}"


def _may_store(call: _CompiledCall, position: int, callers: tuple = ()) -> bool:
    """Return whether a function may store to its argument at this position, or to a view of it.

    Only uses that surely read count as reads, such as `x[i]`, `x.size` and `0.5 * x`.
    """
    from numba.core import ir

    call = _with_types(call)
    annotation = call.overload.type_annotation
    statements = list(_statements(annotation.blocks))
    assignments = [statement for statement in statements if isinstance(statement, ir.Assign)]
    aliases: set[str] = set()  # the variables that are the argument itself
    n_before = -1
    while len(aliases) > n_before:
        n_before = len(aliases)
        for assignment in assignments:
            value = assignment.value
            is_argument = isinstance(value, ir.Arg) and value.index == position
            if is_argument or (isinstance(value, ir.Var) and value.name in aliases):
                aliases.add(assignment.target.name)
    return any(_statement_may_store(x, aliases, annotation, (*callers, call.dispatcher)) for x in statements)


def _statement_may_store(statement: Any, aliases: set[str], annotation: Any, callers: tuple) -> bool:
    """Return whether a statement may store to one of the arrays in `aliases`, or may create a view of it."""
    from numba import types as nbtypes
    from numba.core import ir

    if hasattr(statement, "loop_body"):  # a Parfor, whose statements are checked one by one
        return False
    used = {variable.name for variable in statement.list_vars()}
    if isinstance(statement, ir.Assign):
        used.discard(statement.target.name)
    if not used & aliases or isinstance(statement, ir.Del):
        return False
    if isinstance(statement, (ir.SetItem, ir.StaticSetItem)):
        return statement.target.name in aliases
    if not isinstance(statement, ir.Assign):
        return True
    value = statement.value
    if isinstance(value, ir.Var):
        return False  # an alias
    if not isinstance(value, ir.Expr):
        return True
    if value.op in ("getattr", "getitem", "static_getitem"):
        result = annotation.typemap.get(statement.target.name)
        is_number = isinstance(result, (nbtypes.Number, nbtypes.Boolean, nbtypes.DType))
        is_shape = isinstance(result, nbtypes.UniTuple) and isinstance(result.dtype, nbtypes.Integer)
        return not (is_number or is_shape)
    if value.op == "call":
        dispatcher = getattr(annotation.typemap.get(value.func.name), "dispatcher", None)
        overload = dispatcher and dispatcher.overloads.get(annotation.calltypes[value].args)
        if not overload or value.kws or value.vararg or dispatcher in callers:
            return True
        helper = _CompiledCall(dispatcher, overload)
        positions = [i for i, argument in enumerate(value.args) if argument.name in aliases]
        return any(_may_store(helper, i, callers) for i in positions)
    return value.op not in ("binop", "unary", "arrayexpr")


# -- 7.4 What the code of a kernel uses ----------------------------------------------------------------


def _uses_object_mode(kernel: Any) -> bool:
    """Return whether a kernel or a helper references Numba's object mode, under any name.

    If Python raises an exception in object mode on one of XLA's threads, Numba loses it.
    """
    for function in _kernel_and_helpers(kernel):
        names = _referenced_names(getattr(_py_func(function), "__code__", _no_code))
        kinds = [type(value).__name__ for _, value in _captured_values(_py_func(function))]
        if "objmode" in names or "_ObjModeContextType" in kinds:
            return True
    return False


def _uses_threads(overload: Any, kernel: Any) -> bool:
    """Return whether the machine code starts Numba's threads, or may call a parallel helper through a pointer."""
    helpers = _kernel_and_helpers(kernel)[1:]
    if any(getattr(helper, "targetoptions", {}).get("parallel") for helper in helpers):
        return True
    module = overload.library._shared_module or overload.library._final_module  # with all that the function calls
    return "@numba_parallel_for(" in str(module)


# -- 7.5 The emitter: Numba's calling convention, exceptions and threads -------------------------------

_DATA_MEMBER = 4  # the position of the data pointer in `_numba_array_members`


def _numba_array_members(array: _SliceArray) -> list[Any]:
    """Return an array as Numba passes it: meminfo, parent, nitems, itemsize, data, shape, strides."""
    return [0, 0, math.prod(array.dims), array.itemsize, array.pointer, *array.dims, *array.strides(array.itemsize)]


class _NumbaEmitter(_Emitter):
    """An emitter that calls a compiled function of all buffers for each slice."""

    def __init__(self, label: str, overload: Any, uses_threads: bool, in_order: bool) -> None:
        import numba

        self.entry = overload.library.get_pointer_to_function(overload.fndesc.llvm_func_name)
        self.in_order = in_order or uses_threads  # Numba's threads use all cores
        self.starts_threads = uses_threads
        if uses_threads:
            numba.get_num_threads()  # starts Numba's threads; before that, the threading layer is unknown
            if numba.threading_layer() == "workqueue":  # it aborts the process if two threads enter it
                self.lock = _native_lock("workqueue_lock")

        def report(error: int) -> int:
            if not error:  # the exception belongs to another thread: object mode in a function pointer
                return _store_error_message(RuntimeError("an exception that is lost in object mode"), label)
            return _store_error_message(ctypes.cast(error, ctypes.py_object).value, label)

        callback = ctypes.CFUNCTYPE(_PTR, _PTR)(report)
        self.report = ctypes.cast(callback, _PTR).value or 0
        self.alive = overload, callback
        self.code_key = "numba", bool(self.lock), self.starts_threads

    def write(self, handler: _Handler) -> None:
        """Write the call for each slice.  If its status is an error, end the call with the exception's message."""
        from numba.core import types as nbtypes
        from numba.core.registry import cpu_target

        context = cpu_target.target_context
        conv = context.call_conv
        builder = handler.builder
        address = handler.data.entry
        with handler.each_slice() as arrays:
            params = [handler.value(member) for array in arrays for member in _numba_array_members(array)]
            kinds = [nbtypes.intp] * len(params)  # the members of arrays are parameters; pointers are integers here
            kind = conv.get_function_type(nbtypes.none, kinds).as_pointer()
            entry = builder.inttoptr(address.value, kind)
            status, _ = conv.call_function(builder, entry, nbtypes.none, kinds, params)
            with builder.if_then(status.is_error, likely=False):
                handler.fail(self._message(handler, context, status))

    def _message(self, handler: _Handler, context: Any, status: Any) -> _Int64:
        """Write code that creates the Python exception, and return the address of its message."""
        python = context.get_python_api(handler.builder)
        gil = python.gil_ensure()
        context.call_conv.raise_error(handler.builder, python, status)
        error = handler.call("PyErr_GetRaisedException")
        message = handler.call(handler.data.report, error)
        handler.call("Py_DecRef", error)
        python.gil_release(gil)
        return message


# ======================================================================================================
# 8. Source analysis: what the source of a Warp or Numba CUDA kernel does to its arrays.
# A small interpreter of Python's syntax trees, for Numba, Numba CUDA and Warp.  A variable is the set of what it may
# be: views of parameters, functions, modules; branches and loops join these sets.
# - What is not modelled (a call of something unknown, a starred argument, ...) is an "unknown" access to each array
#   that it gets.  An output then counts as stored to; an input does where no read-only type of Numba guards it.
# - A file may have been edited since Python read it: a source counts only if it compiles to the kernel's own code.
# What takes intent is not looked for: own intrinsics and overloads that store, addresses, C and C++ code.


class _Interpreter:
    """Runs statements; `names` has what each variable may be, as a set: of what, `value` says."""

    def __init__(self) -> None:
        self.names: dict[str, set] = {}

    def value(self, node: Any) -> set:
        """What an expression may be."""
        raise NotImplementedError

    def run(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            self.statement(node)

    def statement(self, node: Any) -> None:
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                self.value(test)
                self.branches(body, orelse)
            case ast.For(target=target, iter=iterated, body=body, orelse=orelse):
                item = ast.Subscript(iterated, ast.Constant(0))
                self.loop([ast.copy_location(ast.Assign([target], item), node), *body])
                self.run(orelse)
            case ast.While(test=test, body=body, orelse=orelse):
                self.loop([test, *body])
                self.run(orelse)
            case ast.expr():
                self.value(node)
            case ast.AST():  # expressions, and blocks that may run
                for _, field in ast.iter_fields(node):
                    self.branches(field if isinstance(field, list) else [field], [])

    def branches(self, *blocks: Sequence[Any]) -> None:
        before = self.names
        ends = []
        for block in blocks:
            self.names = dict(before)
            self.run(block)
            ends.append(self.names)
        self.names = {}
        for name, found in itertools.chain(*(end.items() for end in ends)):
            self.names[name] = self.names.get(name, set()) | found

    def loop(self, body: Sequence[Any]) -> None:
        """Run a loop until no variable may be anything else, as one may be what the body assigns further down."""
        before = None
        while self.names != before:
            before = self.names
            self.branches(body, [])


class _ArrayView(NamedTuple):
    """An array that lies in the memory of a parameter."""

    parameter: str
    ndim: float = math.inf  # that also of what has arrays in it, such as a tuple
    is_unguarded: bool = False  # Numba takes it for writable, even if the parameter is read-only


class _Access(NamedTuple):
    """What a source does to the array of a parameter."""

    kind: str  # "stores"; "updates": `x[i] += 1`, `x[i] = 2 * x[i]`, atomics; "unknown"
    text: str  # of the source
    is_unguarded: bool  # Numba lets it pass, even if the parameter is read-only


# Functions of NumPy, Numba CUDA and Warp, and attributes and methods of arrays, by name.
_UPDATES = re.compile(r"(?:^|\.)(?:atomic\.\w+|(?:tile_)?atomic_\w+|ufunc\.at)$")
_STORES = re.compile(
    r"(?:^|\.)(?:tile_store\w*|st(?:cg|cs|wb|wt)|copyto|fill_diagonal|nan_to_num|put|place|shuffle|"
    r"ndarray\.(?:fill|itemset|partition|resize|sort))$"
)
_VIEWS = re.compile(
    r"(?:^|\.)(?:T|real|imag|flat|view|where|select|as\w*array\w*|frombuffer|nditer|reshape|ravel|transpose|squeeze|"
    r"expand_dims|swapaxes|moveaxis|broadcast_\w+|atleast_\w+|flip\w*|rot90|diagonal|\w*split|trim_zeros|as_strided|"
    r"sliding_window_view|zip|enumerate|reversed|iter|next|list|tuple)$"
)
_WARP_READS = re.compile(r"(?:^|\.)(?:copy|len|lower_bound|print|sample_cdf|tile_load(?:_indexed)?|volume_sample\w*)$")
_UNGUARDED = frozenset(  # what Numba lets a kernel write by to an input
    "ascontiguousarray asfortranarray at copyto fill_diagonal flat frombuffer nan_to_num nditer".split()
)
_ARRAY_METADATA = frozenset("shape size ndim dtype strides itemsize nbytes".split())  # of an array
_INPUTS_BEFORE_OUT = {"dot": 2, "around": 2, "round": 2, "clip": 3}  # of functions that Numba gives an `out`
_GLOBAL = "global "  # in front of the name of a global array on a GPU, in the place of a parameter's


class _ArrayAccesses(_Interpreter):
    """What the source of a kernel, and of the functions that it calls, does to its arrays.

    `given` has what each argument of the kernel is: a view of the parameter, or None for what is no array.
    """

    def __init__(self, kernel: Any, given: Sequence[_ArrayView | None]) -> None:
        super().__init__()
        self.accesses: dict[str, list[_Access]] = collections.defaultdict(list)
        self.replayed: set[str] = set()  # the parameters that Warp's adjoint of the kernel changes again
        self.n_indices = 0  # the most that a call of `wp.tid()` or `cuda.grid(n)` gives
        self.launches_without_stream: list[str] = []
        self.uses_tiles = False  # of Warp
        self.has_own_code = False  # C++, or adjoints of the user's
        # Of each function that was read, or is being read, with these arguments: what it may return.
        self.results: dict[tuple[Any, frozenset], set] = {}
        self.n_targets: dict[ast.expr, int] = {}  # of the assignments of these calls
        self.depth = 0  # of calls
        self.tests: list[ast.expr] = []  # of the `if`s around a statement
        start = ast.Call(ast.Name("source not found: kernel"), [], [])
        arguments = [{view} - {None} for view in given]
        try:
            self.call(kernel, arguments, {}, start)
        except RecursionError:  # in sums of hundreds of terms
            self.note("unknown", set().union(*arguments), start)

    def note(self, kind: str, found: Iterable, node: ast.AST) -> None:
        """Note an access to arrays.  Numba refuses a statement that assigns to an input, and lets functions pass."""
        for view in _arrays(found):
            is_unguarded = view.is_unguarded or isinstance(node, ast.expr)
            self.accesses[view.parameter].append(_Access(kind, ast.unparse(node), is_unguarded))
            if self.depth > 1 or kind == "unknown":
                self.replayed.add(view.parameter)

    # -- functions --

    def call(self, function: Any, given: list[set], named: dict[str, set], node: ast.Call) -> set:
        """What a function may return for these arguments, after a note of what it does to them."""
        if hasattr(function, "gufunc_builder"):  # gets writable arrays, of other ranks
            given = [_inside(x, is_unguarded=True) for x in given]
        if overloads := self.users_functions(function):
            return set().union(*[self.read(x, given, named, node) for x in overloads])
        everything = set().union(*given, *named.values())
        first = given[0] if given else everything
        name = _name_of(function, node)
        own_name = name.rpartition(".")[2]
        if name == "tid":
            self.n_indices = max(self.n_indices, self.n_targets.get(node, 1))
        elif own_name == "grid":
            given_numbers = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, int)]
            self.n_indices = max([self.n_indices, *given_numbers])
        self.uses_tiles |= name.startswith(("tile", "untile"))
        copies_by_default = own_name == "nan_to_num" and len(given) < 2 and "copy" not in named
        if _UPDATES.search(name):
            self.note("updates", first, node)
        elif _STORES.search(name) and not copies_by_default and "copy=True" not in ast.unparse(node):
            self.note("stores", first, node)
        elif _VIEWS.search(name):
            is_of_one = not any(isinstance(x, ast.Tuple) for x in node.args)  # unlike np.nditer((x, out))
            return _inside(everything, own_name in _UNGUARDED and is_of_one)
        elif _only_reads(function, name):
            n_in = getattr(function, "nin", _INPUTS_BEFORE_OUT.get(own_name, len(given)))
            outs = set().union(*given[n_in:], named.get("out", set()))
            inputs = {view.parameter for view in _arrays(set().union(*given[:n_in]))}
            is_update = inputs.intersection(view.parameter for view in _arrays(outs))
            self.note("updates" if is_update else "stores", outs, node)
        else:
            if not isinstance(function, type) and not hasattr(function, "vars"):  # else a type or struct holds them
                self.note("unknown", everything, node)
            return _inside(everything)
        return set()

    def users_functions(self, function: Any) -> list:
        """The function, if its source is the user's; all of Warp's overloads, as it may choose any.

        Numba calls a plain function by an overload alone, of which this may be no more than the name.
        """
        if hasattr(function, "user_overloads"):
            overloads = *function.user_overloads.values(), *function.user_templates.values()
            return [] if function.is_builtin() else [function, *overloads]
        python = _py_func(function)
        is_jitted = isinstance(python, types.FunctionType) and (python is not function or self.depth == 0)
        is_users = is_jitted and not _is_library_module(python.__module__) and not _is_ufunc(function)
        return [function] if is_users or isinstance(function, ast.FunctionDef) else []

    def read(self, function: Any, given: list[set], named: dict[str, set], node: ast.Call) -> set:
        """Read a function of the user's, called with these arguments."""
        tree = _syntax_tree(function)
        everything = set().union(*given, *named.values())
        parameters = [*tree.args.posonlyargs, *tree.args.args] if tree else []
        for parameter, argument in zip(parameters, node.args):
            if parameter.annotation and "ref[" in ast.unparse(parameter.annotation):  # Warp's, to an element
                self.note("unknown", self.value(_root(argument)), node)
        own_code = [getattr(function, x, None) for x in ("native_snippet", "custom_grad_func", "custom_replay_func")]
        if tree is None or any(own_code):
            self.has_own_code = True
            self.replayed |= {view.parameter for view in _arrays(everything)}
        if tree is None or own_code[0]:  # no source, or C++
            names = _UNGUARDED.intersection(_referenced_names(getattr(_py_func(function), "__code__", _no_code)))
            text = f"source not found: {_name_of(function, node)}, which names {', '.join(sorted(names))}"
            self.note("stores" if names else "unknown", everything, ast.Name(text) if names else node)
            return _inside(everything)
        arguments = {**dict(zip([x.arg for x in parameters], given)), **named}
        if tree.args.vararg:
            arguments[tree.args.vararg.arg] = _inside(set().union(*given[len(parameters) :]))
        key = function, frozenset((name, frozenset(found)) for name, found in arguments.items())
        if key not in self.results:
            self.results[key] = set()  # for a function that calls itself
            self.results[key] = self.read_body(function, tree, arguments)
        return self.results[key]

    def read_body(self, function: Any, tree: Any, arguments: dict[str, set]) -> set:
        outer = self.names
        if tree is not function:  # else it is nested, and sees the variables of the function around it
            self.names = {}
            for name, value in _captured_variables(_py_func(function)).items():
                with contextlib.suppress(TypeError):  # of what has no hash
                    self.names[name] = {_ArrayView(_GLOBAL + name) if _is_device_array(value) else value}
        self.names = {**self.names, **arguments, "return": set()}
        self.depth += 1
        self.run(tree.body if isinstance(tree.body, list) else [ast.Return(tree.body)])
        self.depth -= 1
        returned = self.names["return"]
        self.names = outer
        return returned

    # -- statements --

    def statement(self, node: Any) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                self.n_targets[value] = len(getattr(targets[0], "elts", "1"))
                for target in targets:
                    parts, values = _parts(target, value)
                    found = list(map(self.value, values))  # before any is assigned, as in `a, b = b, a`
                    for part, found_for_part in zip(parts, found):
                        self.assign(part, found_for_part, node)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, self.value(value), node)
            case ast.AugAssign(target=target, value=value):
                self.value(value)
                self.note("updates", self.place(target), node)
            case ast.If(test=test):
                self.tests.append(test)
                super().statement(node)
                self.tests.pop()
            case ast.FunctionDef(name=name):
                self.names[name] = {node}
            case ast.Return(value=ast.expr() as value):
                self.names["return"] = self.names["return"] | self.value(value)
            case _:
                super().statement(node)

    def assign(self, target: Any, found: set, node: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = found
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for part in targets:
                    self.assign(part, _indexed(found, 1), node)
            case ast.Attribute(value=ast.Name(id=name)):  # of a struct of Warp's, which then may have an array in it
                self.names[name] = self.names.get(name, set()) | _inside(found)
            case _:
                is_update = _is_update(target, node.value) or any(_reads(test, target) for test in self.tests)
                self.note("updates" if is_update else "stores", self.place(target), node)

    def place(self, target: Any) -> set:
        """The arrays that a target may be, or be a part of."""
        self.value(target)
        arrays = set(_arrays(self.value(getattr(target, "value", target))))
        if not arrays:  # a component of an element, such as x[i][0]
            arrays = set(_arrays(self.value(_root(target))))
            self.replayed |= {view.parameter for view in arrays}
        return arrays

    # -- expressions --

    def value(self, node: Any) -> set:
        """What an expression may be, but for numbers."""
        match node:
            case ast.Name(id=name):
                return {node.warp_func} if hasattr(node, "warp_func") else self.names.get(name, set())
            case ast.Attribute(value=owner, attr=name):
                return set().union(*[_attribute(x, name) for x in self.value(owner)])
            case ast.Subscript(value=owner, slice=index):
                self.value(index)
                found = self.value(owner)
                kernels = {x for x in found if hasattr(x, "py_func")}  # of `kernel[grid, block, stream]`
                if kernels and isinstance(index, ast.Tuple) and len(index.elts) < 3:
                    self.launches_without_stream.append(ast.unparse(node))
                return kernels | _indexed(found, _count_indices(index))
            case ast.Call():
                return self.called(node)
        found = set().union(*map(self.value, ast.iter_child_nodes(node)))
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare)):
            return set()
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            return found
        if not isinstance(node, (ast.Tuple, ast.List)):
            self.note("unknown", found, node)
        return _inside(found)

    def called(self, node: ast.Call) -> set:
        given = [self.value(x) for x in node.args]
        named = {str(x.arg): self.value(x.value) for x in node.keywords}
        functions = self.value(node.func) or {None}
        if isinstance(node.func, ast.Attribute) and (owners := _arrays(self.value(node.func.value))):  # a method
            given = [set(owners), *given]
            functions = {getattr(np.ndarray, node.func.attr, None)}
        if any(isinstance(x, ast.Starred) for x in node.args):
            functions = {None}
        return set().union(*[self.call(function, given, named, node) for function in functions])


def _arrays(found: Iterable) -> list[_ArrayView]:
    return [x for x in found if isinstance(x, _ArrayView)]


def _inside(found: Iterable, is_unguarded: bool = False) -> set:
    """What has these in it, or is a view of them."""
    return {x._replace(ndim=math.inf, is_unguarded=is_unguarded or x.is_unguarded) for x in _arrays(found)}


def _indexed(found: Iterable, n: int) -> set:
    """What an index of so many dimensions gives: views of what has more, and nothing for numbers."""
    return {x._replace(ndim=x.ndim - n) for x in _arrays(found) if x.ndim > n}


def _attribute(owner: Any, name: str) -> set:
    if isinstance(owner, _ArrayView):
        is_fact = name in _ARRAY_METADATA and owner.ndim < math.inf  # else it may be a field of a struct
        return set() if is_fact else _inside({owner}, name in _UNGUARDED)
    with contextlib.suppress(Exception):  # of modules that load what is asked for, and of what has no hash
        return {getattr(owner, name)}
    return {name}  # Warp has most of its functions by name alone


def _count_indices(index: Any) -> int:
    """How many dimensions an index takes away."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return sum(not isinstance(x, ast.Slice) and getattr(x, "value", 0) not in (..., None) for x in parts)


def _root(target: Any) -> Any:
    while isinstance(target, (ast.Subscript, ast.Attribute)):
        target = target.value
    return target


def _parts(target: Any, value: Any) -> tuple[list, list]:
    """What an assignment assigns to, and what it assigns there."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            return targets, values
    return [target], [value]


def _is_update(target: Any, value: Any) -> bool:
    """Whether the value of an assignment is surely made of what it assigns to: `x[i] = f(x[i])`, `x[:] = f(x) + y`.

    A value that is chosen is, if what chooses reads the target: `x[i] = y if y > x[i] else x[i]`.
    """
    nodes = list(ast.walk(value))
    calls = [x for x in nodes if isinstance(x, ast.Call)]
    tests = [x.test for x in nodes if isinstance(x, ast.IfExp)]
    tests += [x.args[0] for x in calls if re.search(r"\b(where|select)$", ast.unparse(x.func))]
    if tests:
        return any(_reads(test, target) for test in tests)
    operands = [x for node in nodes if isinstance(node, ast.BinOp) for x in (node.left, node.right)]
    for call in calls:
        if not re.search(r"(len|ndim|shape|size|_like)$", ast.unparse(call.func)):  # which look at no elements
            operands += call.args
    of_whole = ast.unparse(target).removesuffix("[:]").removesuffix("[...]")
    return _reads(value, target) or any(isinstance(x, ast.Name) and x.id == of_whole for x in operands)


def _reads(node: Any, target: Any) -> bool:
    """Whether an expression reads what an assignment assigns to."""
    same = [x for x in ast.walk(node) if type(x) is type(target) and _names_of(x) == _names_of(target)]
    return ast.unparse(target) in map(ast.unparse, same)


def _names_of(target: Any) -> str:
    return getattr(_root(target), "id", "")


def _is_device_array(value: Any) -> bool:
    return not isinstance(value, types.ModuleType) and hasattr(value, "__cuda_array_interface__")


def _is_ufunc(function: Any) -> bool:
    return hasattr(function, "nin") and not hasattr(function, "gufunc_builder")


def _only_reads(function: Any, name: str) -> bool:
    """Whether this is a function of Python's, NumPy's or Warp's that changes no array but what it gets as `out`."""
    if isinstance(function, str) or hasattr(function, "native_func"):  # Warp's
        return bool(_WARP_READS.search(name))
    module = str(getattr(getattr(function, "__objclass__", function), "__module__", None))
    return _is_ufunc(function) or (_is_library_module(module) and not module.startswith("numba"))


def _name_of(function: Any, node: Any) -> str:
    """`atomic.add`, `fill_diagonal`: its own name, which for Warp is a key; of what is unknown, that in the code."""
    for name in (function, getattr(function, "key", None), getattr(function, "__qualname__", None)):
        if isinstance(name, str):
            return name
    return ast.unparse(getattr(node, "func", node))


_no_code = compile("", "", "exec")


def _syntax_tree(function: Any) -> Any:
    """The syntax tree of a function; None where there is no source that is its own."""
    if isinstance(function, ast.AST):  # a def in a kernel
        return function
    if hasattr(function, "adj"):  # Warp keeps it
        return function.adj.tree.body[0]
    code = getattr(_py_func(function), "__code__", None)
    return _trees_of(code.co_filename, "".join(linecache.getlines(code.co_filename))).get(code) if code else None


@functools.lru_cache(maxsize=8)
def _trees_of(file: str, text: str) -> dict[types.CodeType, Any]:
    """The syntax tree of each function in a file, by what it compiles to; not of lambdas that share a line."""
    trees = {}
    nodes = collections.defaultdict(list)
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                first_line = [*getattr(node, "decorator_list", ()), node][0].lineno
                nodes[first_line, getattr(node, "name", "<lambda>")].append(node)
        codes = [compile(text, file, "exec", dont_inherit=True)]
        for code in codes:  # which grows
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            found = nodes[code.co_firstlineno, code.co_name]
            if len(found) == 1:
                trees[code] = found[0]
    return trees


# -- 8.4 Checks ----------------------------------------------------------------------------------------


def _check_accesses(
    wrapper: _Wrapper, call: _CallParams, accesses: _ArrayAccesses, buffers: Mapping[str, int], is_guarded: bool
) -> None:
    """Raise an error if a kernel writes to an input, or never stores to an output.

    `buffers` has the number of each array parameter's buffer.  `is_guarded` says that the compiler refuses the writes
    to inputs that it sees.
    """
    n_in = len(call.ins)
    aliases = dict(call.aliases)
    for name, k in buffers.items():
        found = accesses.accesses[name]
        if k < n_in and k not in aliases:
            writes = [x for x in found if x.is_unguarded and x.kind != "unknown"] if is_guarded else found
            if writes:
                raise _written_input_error(wrapper.title, name, writes[0])
        elif k >= n_in and k - n_in < call.n_results and wrapper.options.zero_outputs is None and not found:
            raise _never_stored_error(wrapper.title, name, f"{name}[i] = ...")


def _written_input_error(title: str, name: str, access: _Access) -> TypeError:
    does = "may write" if access.kind == "unknown" else "writes"
    return TypeError(
        f"{title} {does} to its input {name!r} by `{access.text:.80}`, and JAX may share inputs: write to an output, "
        f"or name {name!r} in in_out_argnames"
    )


def _check_n_indices(title: str, launch: str, n: int, n_indices: int, function: str) -> None:
    """Raise an error if a launch has other dimensions than the kernel asks an index of."""
    if n != n_indices:
        raise ValueError(
            f"{title}: {launch} is for {n} indices, but {function} gives {n_indices}: threads would repeat, "
            "or an index stay 0; launch_dims has a number for each index, and none for the elements of vectors"
        )


def _check_form(wrapper: _NumbaWrapper, call: _CallParams, form: _ArgumentMap, is_guarded: bool) -> None:
    """Check what a Numba CUDA kernel does to the arrays that this argument map gives it."""
    specs = call.ins + call.outs
    given: list[_ArrayView | None] = []
    buffers: dict[str, int] = {}
    for position, k in enumerate(form.args):
        name = wrapper.parameters[position] if position < len(wrapper.parameters) else f"argument {position}"
        if k in form.scalars:
            given.append(None)
        else:
            given.append(_ArrayView(name, len(specs[k].shape)))
            buffers[name] = k
    _check_accesses(wrapper, call, _ArrayAccesses(wrapper.kernel, given), buffers, is_guarded)


# ======================================================================================================
# 9. Numba CUDA: wrappers, launch configurations, and an emitter that calls cuLaunchKernel.
#
# numba-cuda (0.30), its successor numba-cuda-mlir (0.6) and Numba's simulator compile; the driver loads and launches.
# What a new one of these may break.
# - Loudly: `compile`, `targetoptions`, `py_func`, `_can_compile` of dispatchers; of what they make `_codelibrary` and
#   `entry_name`, or `ptx` and `metadata`; `cuda.gpus`, `from_cuda_array_interface`, `external_stream`; the simulator's
#   `FakeCUDAArray`.
# - Silently, so that all tests named test_fakecuda must pass before it counts as supported: the meaning of parameters,
#   what a launch needs besides (`check_launch`), how z shows in PTX (`_ASKS_FOR_Z`), that compiled code keeps arrays
#   alive, and that the context of the call's device is current when XLA calls a handler.

_CUDA_DTYPES = _NUMBA_DTYPES | {"float16"}
_CUDA_BLOCKS = {2: (16, 16), 3: (8, 8, 4)}  # threads per block over launch_dims of two and three dimensions
_CUDA_LIMITS = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64), "launch_dims": (sys.maxsize,) * 3}
_CUDA_LAUNCH_WORDS = 7  # of grid, block and shared_mem: with these the attribute `launch` of a call on a GPU begins
_CUDA_INSTALL = 'pip install "jax[cuda13]" "numba-cuda-mlir[cu13]" (CUDA 12: cuda12, cu12)'
_CUDA_WHERE = (
    f"runs on NVIDIA GPUs ({_CUDA_INSTALL}) or, of numba.cuda where NUMBA_ENABLE_CUDASIM=1 is set, on CPUs alone, "
    "in Python; for CPUs use numba_kernel"
)
_GPUS_LOCK: threading.RLock = _PROCESS_STATE.setdefault("gpus_lock", threading.RLock())
# The simulator keeps the running kernel in globals, also in those of the kernel's module.
_CUDASIM_LOCK: threading.RLock = _PROCESS_STATE.setdefault("cudasim_lock", threading.RLock())


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
    zero_outputs: bool | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Make a Numba CUDA kernel a JAX function.

    The kernel is called as `kernel(in..., out..., scratch...)` with row-major device arrays (inputs read-only),
    writes its outputs and returns nothing.  Machine code launches it on XLA's stream: no Python, no GIL, and XLA may
    capture the launch in a CUDA graph.  Without a GPU a program that calls it can be lowered for CUDA, and exported.

    A `vmap` is one launch (per 65,535 slices) whose blocks along z are the slices: so no block may wait for one of
    another slice.  Each slice is a launch, in order, with `vmap_method="sequential"`, for a grid with several blocks
    along z, and for a kernel that asks for z of its blocks or grid, is part of a cluster, or may write to a global
    array on the device; this module's logger says why, at level DEBUG.

    A global array on the device is read where it lies, and stays in memory for ever; a kernel that writes to it
    changes JAX's array.  A kernel cannot raise: CUDA has no exceptions.

    With NUMBA_ENABLE_CUDASIM=1 (set before Numba is imported) kernels of `numba.cuda` run in Python on JAX's CPU
    backend.

    Args:
      kernel: a function decorated with `@cuda.jit` of `numba` (numba-cuda) or of its successor, `numba_cuda_mlir`.
        Without it, `numba_cuda_kernel(outs=...)` is a decorator, above `@cuda.jit`.
      outs, vmap_method, input_output_aliases, in_out_argnames, scalars, has_side_effect, scratch, zero_outputs,
        name: as for `numba_kernel`.
      grid, block: blocks in the grid and threads in a block: ints or tuples of up to three (x, y, z).  Where they
        depend on the inputs, make the wrapper inside of the function that calls it.
      launch_dims: instead of both, the number of threads: an int or a tuple of up to three (x, y, z), or a callable
        like `outs`.  For a matrix it is `x.shape[::-1]` with `j, i = cuda.grid(2)`, as adjacent threads differ in x,
        and `x.shape` with `i, j`.  Whole blocks cover it, so the kernel must guard the edge (`if i < out.size`).  With
        no threads at all nothing is launched, and outputs are what they start from, or zeros.
      threads_per_block: block size over one-dimensional `launch_dims`: over two it is 16x16, over three 8x8x4.
      shared_mem: bytes of dynamic shared memory, up to the device's opt-in maximum.

    Raises:
      TypeError: as `numba_kernel`; and for kernels whose launch is more than one call of CUDA's driver (`debug=True`,
        cooperative ones): for these there is `numba_cuda_callable`.
      ValueError: also neither or both launch forms, or one beyond CUDA's limits (1,024 threads in a block); an output
        that starts with an array in the memory of the host.
      NotImplementedError: on a platform other than CUDA, without the simulator.
      jax.errors.JaxRuntimeError: with CUDA's name for the error of a launch that failed, and the limit of the kernel
        that it exceeds.

    Example:
      >>> from numba import cuda
      >>> @numba_cuda_kernel(outs=lambda x, y: x, launch_dims=lambda x, y: x.size)
      ... @cuda.jit
      ... def add(x, y, out):
      ...     i = cuda.grid(1)
      ...     if i < out.size:
      ...         out[i] = x[i] + y[i]
      >>> add(np.ones(3), np.ones(3)).tolist()
      [2.0, 2.0, 2.0]
    """
    options = dict(locals())  # all arguments by name
    return _make_wrapper(_CudaKernel, options.pop("kernel"), _CudaOptions(**options))


def numba_cuda_callable(
    func: Any = None,
    outs: Any = None,
    *,
    vmap_method: str | None = None,
    input_output_aliases: Mapping[int | str, int] | None = None,
    has_side_effect: bool = False,
    scratch: Any = None,
    zero_outputs: bool | None = None,
) -> Callable[..., Any]:
    """Make a Python function that launches Numba CUDA kernels a JAX function.

    `func(in..., out..., scratch..., stream)` runs on every call, with device arrays and a stream of the package that
    it names, and the right device current.  It launches any number of kernels on that stream
    (`kernel[grid, block, stream](...)`), writes the outputs and not the inputs, keeps no array, calls no jax
    function, and need not synchronize.  `vmap` calls it once per slice.  What its source, and that of its kernels,
    shows of writes to inputs, outputs that are only added to, and launches without the stream is refused.

    Make it once: another function that a generator made counts as another.

    Args:
      func: the function (or a method).  Its code, that of nested functions included, names a kernel, or `cuda` of
        `numba` or of `numba_cuda_mlir`: as a global, in its closure, as a default, or in a module of yours.
      outs, vmap_method, input_output_aliases, has_side_effect, scratch, zero_outputs: as for `numba_kernel`; `scratch`
        gives temporary buffers without an allocation.

    Raises:
      TypeError, ValueError, NotImplementedError: as `numba_cuda_kernel`.
      jax.errors.JaxRuntimeError: with the type and text of an exception that `func` raised.

    Example:
      >>> from numba import cuda
      >>> @cuda.jit
      ... def scale(x, out):
      ...     i = cuda.grid(1)
      ...     if i < out.size:
      ...         out[i] = 2 * x[i]
      >>> @numba_cuda_callable(outs=lambda x: x)
      ... def scale_twice(x, out, stream):
      ...     scale[out.size // 256 + 1, 256, stream](x, out)
      ...     scale[out.size // 256 + 1, 256, stream](out, out)
      >>> scale_twice(np.ones(3, np.float32)).tolist()
      [4.0, 4.0, 4.0]
    """
    options = dict(locals())  # all arguments by name
    return _make_wrapper(_CudaCallable, options.pop("func"), _Options(**options))


# -- 9.1 Wrappers, and launch configurations ----------------------------------------------------------
# What is to run, on a GPU or in a simulator, and CUDA's limits.


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


@dataclasses.dataclass(kw_only=True)
class _CudaOptions(_Options):
    grid: Any
    block: Any
    launch_dims: Any
    threads_per_block: int
    shared_mem: int

    def __post_init__(self) -> None:
        super().__post_init__()
        forms = [name for name in ("grid", "block", "launch_dims") if getattr(self, name) is not None]
        if forms not in (["grid", "block"], ["launch_dims"]):
            raise ValueError(f"give either both grid and block, or launch_dims; got {' and '.join(forms) or 'neither'}")
        what = f"shared_mem must be a number of bytes; got {self.shared_mem!r}"
        (self.shared_mem,) = _ints((self.shared_mem,), what)
        if not 0 <= self.shared_mem < 2**31:
            raise ValueError(what)
        what = f"threads_per_block must be an int, or give grid and block; got {self.threads_per_block!r}"
        _ints((self.threads_per_block,), what)


def _launch_at(address: int) -> tuple[int, ...]:
    return tuple((_I64 * _CUDA_LAUNCH_WORDS).from_address(address))


class _CudaWrapper(_NumbaWrapper):
    """What one kernel and a callable share."""

    def _target_of(
        self,
        package: _NumbaCuda,
        call: _CallParams,
        compile_kernel: Callable[[_Signature], _CompiledHandler | None],
        *options: Any,
        freezes_globals: bool = False,
    ) -> _Target:
        """What `compile_kernel` makes of the signature of a call; or nothing, where a program is only lowered."""
        _import("numba", self.decorator, _CUDA_INSTALL)
        self._check_dtypes(call, _CUDA_DTYPES, "that Numba CUDA has no arrays of")
        signature = call.signature(self.__name__)
        platform = package.platform
        compile_here = functools.partial(compile_kernel, signature)
        options = "cuda", package.module, *options
        specialization = _Specialization(signature, options, platform, self.options.name)
        name = _REGISTRY.find_or_compile(self, specialization, compile_here, freezes_globals)
        return _Target(name, platform=platform, title=self.title, where=_CUDA_WHERE)


class _CudaKernel(_CudaWrapper):
    decorator = "numba_cuda_kernel"

    def __init__(self, kernel: Any, options: _CudaOptions) -> None:
        if _decorated_backend(kernel) != "numba_cuda" or getattr(kernel, "targetoptions", {}).get("device"):
            takes = "a function decorated with @cuda.jit of numba or numba_cuda_mlir (without [grid, block])"
            raise _unsupported_kernel_error("numba_cuda_kernel", takes, kernel)
        super().__init__(kernel, options)
        self.package: Any = _cuda_package(kernel)
        if not callable(options.launch_dims):
            self._launch_configuration([])

    def __getitem__(self, launch: Any) -> Any:
        raise TypeError(
            f"{self.title} is called as a function of its inputs; its launch is given where it is made: grid=, block="
        )

    def _find_target(self, call: _CallParams) -> _Target:
        package = self.package
        launch = self._launch_configuration(call.ins, _ArrayAccesses(self.kernel, []).n_indices)
        [form] = self._argument_maps(call, may_return=False)
        in_order = self.options.in_order
        is_checked = self.options.zero_outputs is not False

        def compile_kernel(signature: _Signature) -> _CompiledHandler | None:
            compiled = package.compile(self.kernel, form, in_order, signature) if package.runs_here else None
            _check_form(self, call, form, is_guarded=True)
            return compiled

        freezes_globals = package.platform == "cuda"  # Python reads a variable on each run
        options = form, in_order, is_checked
        target = self._target_of(package, call, compile_kernel, *options, freezes_globals=freezes_globals)
        target = dataclasses.replace(target, launch=launch, is_noop=0 in launch[:3])
        if self.options.name and not in_order:  # for exported programs, whose process may lower no batch
            target.registered_for(package.platform, has_batch=True)
        return target

    def _launch_configuration(self, ins: Sequence[Spec], n_indices: int = 0) -> tuple[int, ...]:
        grid = self.options.grid
        block = self.options.block
        dims = self._for_inputs("launch_dims", ins)
        if dims is not None:
            rank = len(dims) if isinstance(dims, (tuple, list)) else 1
            block = _dim3("block", _CUDA_BLOCKS.get(rank, self.options.threads_per_block))
            threads = _dim3("launch_dims", dims)
            if n_indices:
                _check_n_indices(self.title, f"launch_dims={dims}", rank, n_indices, "cuda.grid")
            grid = tuple(-(-size // per_block) for size, per_block in zip(threads, block, strict=True))
        return *_dim3("grid", grid), *_dim3("block", block), self.options.shared_mem


class _CudaCallable(_CudaWrapper):
    decorator = "numba_cuda_callable"

    def __init__(self, func: Any, options: _Options) -> None:
        if not isinstance(func, (types.FunctionType, types.MethodType)):
            takes = "a Python function that launches kernels (for one kernel use numba_cuda_kernel)"
            raise _unsupported_kernel_error("numba_cuda_callable", takes, func)
        super().__init__(func, options)

    def _find_target(self, call: _CallParams) -> _Target:
        package = _cuda_package_named_by(self.kernel, self.title)
        _check_call_signature(inspect.signature(self.kernel), self.title, [*call.ins, *call.outs, "a stream"])
        self._check_launches(call)

        function = self.kernel  # what runs it lives for ever: not so the wrapper

        def run(arrays: list, stream: Any, _: int) -> None:
            if function(*arrays, stream) is not None:
                raise TypeError("it returns a value: launch kernels that write to the outputs, and return nothing")

        def compile_callable(signature: _Signature) -> _CompiledHandler | None:
            return _compile_handler(signature, package.callback(signature, run)) if package.runs_here else None

        return self._target_of(package, call, compile_callable)

    def _check_launches(self, call: _CallParams) -> None:
        """Check what the kernels do to the arrays, as far as the source of the function shows it."""
        views = [
            _ArrayView(name, len(x.shape), is_unguarded=True) for name, x in zip(self.parameters, call.ins + call.outs)
        ]
        source = _ArrayAccesses(self.kernel, views)
        for launch in source.launches_without_stream:
            raise TypeError(
                f"{self.title} launches `{launch}` on another stream than XLA's, where it may run before its inputs "
                "are there: kernel[grid, block, stream](...)"
            )
        buffers = {view.parameter: k for k, view in enumerate(views)}
        _check_accesses(self, call, source, buffers, is_guarded=True)


# -- 9.2 The packages that compile kernels, and the driver --------------------------------------------
# All that differs between numba-cuda, its successor and the simulator.


class _NumbaCuda:
    """numba-cuda, or the CUDA target that Numba comes with.  Its successor and the simulator are this with changes."""

    module = "numba.cuda"
    platform = "cuda"
    inline = "never"
    params = staticmethod(_numba_array_members)  # one array as kernels take it

    @property
    def cuda(self) -> Any:
        return importlib.import_module(self.module)

    @property
    def runs_here(self) -> bool:
        return self.platform == "cpu" or bool(_cuda_ordinals())

    # -- compiling --

    def compile(self, kernel: Any, form: _ArgumentMap, in_order: bool, signature: _Signature) -> _CompiledHandler:
        """A handler that launches a kernel: for each slice of a batch, until `_CudaBatch` makes it launch it once."""
        first_fingerprint = _FIRST_FINGERPRINTS.setdefault(kernel, _fingerprint(kernel))
        launcher = self.launcher(self.adapted(kernel, form), signature)
        handler = _compile_handler(signature, _CudaEmitter(self, launcher))

        def compile_in_z() -> tuple[_CompiledHandler, int]:
            if in_order:
                raise _BatchLaunchUnsupported("vmap_method says that slices run in order")
            if asks := _ASKS_FOR_Z.search(launcher.ptx):
                raise _BatchLaunchUnsupported(f"blocks along z are the slices, and its PTX has {asks[0]}")
            if names := _device_arrays_written_by(kernel):
                raise _BatchLaunchUnsupported(f"it may write to global arrays on the device: {', '.join(names)}")
            of_batch = signature._replace(ranks=tuple(rank + 1 for rank in signature.ranks))
            in_z = self.launcher(self.adapted(kernel, form._replace(slice_ranks=signature.ranks)), of_batch)
            if _fingerprint(kernel) != first_fingerprint:
                raise _BatchLaunchUnsupported("it reads other values now than when it was compiled")
            with self.on_device(_cuda_ordinals()[0]):
                most_threads = min(in_z.libcuda.limit(_PTR(function), 0) for function in in_z.table if function)
            emitter = _CudaEmitter(self, in_z, handler.data.inner_loop, most_threads)
            return _compile_handler(signature, emitter), most_threads

        return handler._replace(batch=_CudaBatch(handler, compile_in_z))

    def adapted(self, kernel: Any, form: _ArgumentMap) -> Any:
        """The dispatcher of a kernel that takes all buffers: its own, or that of one which calls it on the device."""
        is_plain = form.is_plain_for(kernel)
        if is_plain and getattr(kernel, "_can_compile", True):
            return kernel
        function = kernel.py_func  # of explicit signatures
        options = kernel.targetoptions
        if not is_plain:
            on_device = type(kernel)(function, {**options, "device": True, "inline": self.inline})
            function = form.adapter(on_device, cuda=self.cuda)
        return type(kernel)(function, dict(options))

    def launcher(self, dispatcher: Any, signature: _Signature) -> _CudaLauncher:
        """Compile a kernel for our arrays, and load it for every GPU."""
        ordinals = _cuda_ordinals()
        with self.on_device(ordinals[0]):
            compiled = self.compile_typed(dispatcher, signature)
            ptx, entry, _ = self.code(compiled)
        self.check_launch(dispatcher, ptx, entry, signature)
        libcuda = _LibCuda()
        functions = {}
        for ordinal in ordinals:
            with self.on_device(ordinal):
                functions[ordinal] = libcuda.load(self.code(compiled)[2], entry, ordinal)
        return _CudaLauncher(signature.label, libcuda, functions, compiled, ptx)

    def compile_typed(self, dispatcher: Any, signature: _Signature) -> Any:
        """Compile for the current device: a TypeError if that cannot be."""
        import numba

        nbtypes = self.cuda.types if hasattr(self.cuda.types, "Array") else numba.types  # of the CUDA target of Numba
        try:
            return dispatcher.compile(_array_types(nbtypes, signature))
        except Exception as error:
            raise _compile_error(self.module, signature, error) from error

    def check_launch(self, dispatcher: Any, ptx: str, entry: str, signature: _Signature) -> None:
        """A TypeError for what cuLaunchKernel alone, with the parameters that a handler packs, cannot launch."""
        n_params = sum(len(self.params(_SliceArray(0, [1] * rank, 1))) for rank in signature.ranks)
        found = re.search(rf"\.entry\s+{re.escape(entry)}\s*\(([^)]*)\)", ptx)
        declared = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", found[1]) if found else []
        extras = {
            "debug=True": dispatcher.targetoptions.get("debug"),  # Numba reads an error code back after the launch
            "a cooperative launch": "cudaCG" in ptx,
            f"parameters that this version of {self.module} packs in another way": declared != ["u64"] * n_params,
        }
        for extra, is_used in extras.items():
            if is_used:
                raise TypeError(
                    f"numba_cuda_kernel {signature.label!r} has {extra}: its launch is more than one call of CUDA's "
                    "driver, and a handler makes no other; launch it in a function, by numba_cuda_callable"
                )

    def code(self, compiled: Any) -> tuple[str, str, bytes]:
        """PTX, the name of its entry, and the machine code for the current device."""
        library = compiled._codelibrary
        cubin = library.get_cubin()
        return library.get_asm_str(), compiled.entry_name, getattr(cubin, "code", cubin)

    # -- running --

    @contextlib.contextmanager
    def on_device(self, ordinal: int) -> Iterator:
        """Make a device's primary context current, which XLA uses, too."""
        with _GPUS_LOCK:  # two threads that look at the list for the first time at once fail in numba_cuda_mlir
            device = self.cuda.gpus[ordinal]
        device.__enter__()
        try:
            yield
        finally:
            # When JAX has freed an array of another GPU, that GPU's context is current, and Numba's assertion fails.
            with contextlib.suppress(AssertionError):
                device.__exit__(None, None, None)

    def callback(self, signature: _Signature, run: Callable[[list, Any, int], None]) -> _CallbackEmitter:
        """Calls `run(arrays, stream, launch)` in Python for every slice, with the call's device current."""

        def body(buffers: list[tuple[int, tuple]], launch: int, stream: int, ordinal: int) -> None:
            with self.on_device(ordinal):
                arrays = []
                for (pointer, shape), dtype in zip(buffers, signature.dtypes, strict=True):
                    view = {"shape": shape, "typestr": dtype.str, "data": (pointer, False), "version": 3}
                    view["stream"] = stream  # copies and fills of the array run on it too
                    arrays.append(self.cuda.from_cuda_array_interface(view, sync=False))
                run(arrays, self.cuda.external_stream(stream), launch)

        return _CallbackEmitter(signature, body, _LibCuda())


class _NumbaCudaMlir(_NumbaCuda):
    """numba-cuda-mlir, as of 0.6.0.  It has no simulator, and compiles for the GPU at hand only."""

    module = "numba_cuda_mlir.cuda"
    inline = "always"  # else a kernel that another one calls has no shared memory

    def code(self, compiled: Any) -> tuple[str, str, bytes]:
        return compiled.ptx, compiled.metadata["func_name"], compiled.metadata["cubin"]

    def params(self, array: _SliceArray) -> list[Any]:  # type: ignore[override]
        """Data, data again, offset, shape, strides in elements."""
        return [array.pointer, array.pointer, 0, *array.dims, *array.strides(1)]


class _CudaSimulator(_NumbaCuda):
    """Numba's simulator, which runs one kernel at a time, in Python."""

    platform = "cpu"

    def compile(self, kernel: Any, form: _ArgumentMap, in_order: bool, signature: _Signature) -> _CompiledHandler:
        function = form.adapter(kernel.py_func)

        def launched(*buffers: Any) -> None:
            function(*buffers)

        # The simulator replaces `cuda` in the globals of what it launches: these must be the kernel's.
        namespace = kernel.py_func.__globals__
        simulated = self.cuda.jit(types.FunctionType(launched.__code__, namespace, closure=launched.__closure__))

        def run(arrays: list, stream: Any, launch: int) -> None:
            words = _launch_at(launch)
            simulated[words[:3], words[3:6], stream, words[6]](*arrays)

        return _compile_handler(signature, self.callback(signature, run))

    def callback(self, signature: _Signature, run: Callable[[list, Any, int], None]) -> _CallbackEmitter:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        def body(buffers: list[tuple[int, tuple]], launch: int, *_: int) -> None:
            # On copies: after an interrupt threads of the simulator go on, and XLA's memory is gone.
            views = []
            copies = []
            for k, ((pointer, shape), dtype) in enumerate(zip(buffers, signature.dtypes, strict=True)):
                memory = (ctypes.c_char * (dtype.itemsize * math.prod(shape))).from_address(pointer)
                views.append(np.ndarray(shape, dtype, memory))
                copies.append(views[k].copy())
                copies[k].flags.writeable = k >= signature.n_in
            with _CUDASIM_LOCK:
                run(list(map(FakeCUDAArray, copies)), self.cuda.stream(), launch)
            for k in range(signature.n_in, len(views)):
                views[k][...] = copies[k]

        return _CallbackEmitter(signature, body)


_NUMBA_CUDA = _NumbaCuda()
_NUMBA_CUDA_MLIR = _NumbaCudaMlir()
_CUDA_SIMULATOR = _CudaSimulator()


def _uses_cudasim() -> bool:
    """Whether kernels run in Numba's simulator: as the environment says, or said when Numba was imported."""
    config = sys.modules.get("numba.core.config")
    if config:
        return bool(getattr(config, "ENABLE_CUDASIM", False))
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def _cuda_package(value: Any) -> _NumbaCuda | None:
    """The package of a kernel, or of a module `cuda`; None for other values."""
    module = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
    if module.partition(".")[0] == "numba_cuda_mlir":
        return _NUMBA_CUDA_MLIR
    if module == "numba" or module.startswith(("numba.cuda", "numba_cuda")):
        return _CUDA_SIMULATOR if _uses_cudasim() else _NUMBA_CUDA
    return None


def _cuda_package_named_by(func: Any, title: str) -> _NumbaCuda:
    """The package that makes the arrays and the stream of a callable: the one that its code names."""
    function = getattr(func, "__func__", func)  # of a method
    with _CUDASIM_LOCK:  # a simulated kernel may be running with its globals replaced
        found = {_cuda_package(value) for _, value in _all_captured_values(function)}
    for package in (_NUMBA_CUDA_MLIR, _NUMBA_CUDA, _CUDA_SIMULATOR):
        if package in found:
            return package
    raise TypeError(
        f"{title} names neither a kernel nor the `cuda` of numba or numba_cuda_mlir, whose arrays it would get: name "
        "one in its code, as a global, in its closure, or as a default of a parameter"
    )


def _cuda_ordinals() -> list[int]:
    """The CUDA ordinals of this process's GPUs, empty where JAX has none."""
    return sorted(device.local_hardware_id for device in _local_devices("cuda"))


class _LibCuda:
    """libcuda: called from Python here, and by address from handlers."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def address(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, name), _PTR).value or 0

    def describe(self, code: int) -> str:
        """CUDA's name for an error."""
        name = ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        return (name.value or b"an unknown error").decode()

    def exceeded(self, function: int, launch: tuple[int, ...]) -> str:
        """The limits of a CUfunction that a launch exceeds."""
        text = ""
        for attribute, what, size in (
            (0, "threads in a block, by its registers and launch_bounds", math.prod(launch[3:6])),
            (8, "bytes of dynamic shared memory", launch[6]),
        ):
            limit = self.limit(_PTR(function), attribute)
            if size > limit:
                text += f"; on this GPU the kernel has at most {limit} {what}: {size} are too many"
        return text

    def limit(self, function: Any, attribute: int) -> int:
        """An attribute of a CUfunction."""
        limit = _I32(2**31 - 1)
        self.library.cuFuncGetAttribute(ctypes.byref(limit), attribute, function)
        return limit.value

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

    def load(self, cubin: bytes, entry: str, ordinal: int) -> int:
        """The CUfunction `entry` in the current context, allowed all the shared memory that the device has."""
        module = _PTR()
        function = _PTR()
        most = _I32()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        self.call("cuDeviceGetAttribute", ctypes.byref(most), 97, ordinal)  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        static = self.limit(function, 1)  # SHARED_SIZE_BYTES
        self.call("cuFuncSetAttribute", function, 8, most.value - static)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        return function.value or 0


# -- 9.3 From a kernel to a handler -------------------------------------------------------------------
# Streams, devices and launches, whatever compiled the kernel.

# What in PTX says that a kernel knows of the z of its blocks or grid, or calls code of others that may: then z cannot
# count slices.
_ASKS_FOR_Z = re.compile(
    r"%n?ctaid(?!\.[xy])[.\w]*|%gridid|%\w*cluster\w*|\.\w+cluster\b|"
    r"\.extern\s+\.func\s*(?:\([^)]*\)\s*)?(?!vprintf|__assertfail|malloc|free|numba_|NRT_)\w+"
)
# The fingerprint of each kernel when it was first compiled: each compilation captures values again.
_FIRST_FINGERPRINTS: Any = weakref.WeakKeyDictionary()


def _device_arrays_written_by(kernel: Any) -> list[str]:
    """Global arrays on the device that a kernel, or a function that it calls, may write to: workspaces, counters."""
    source = _ArrayAccesses(kernel, [])
    names = [name for name, value in _all_captured_values(kernel) if _is_device_array(value)]
    return [name for name in names if source.has_own_code or source.accesses[_GLOBAL + name]]


def _ask_xla(handler: _Handler, function: str, kind: Any) -> Any:
    """What a function of XLA's API fills in, or the end of the handler with its error."""
    args = handler.new(kind, ctx=handler.frame.ctx)
    error = handler.api(handler.frame, function, args)
    handler.ret(error, when=error)
    return args


def _cuda_stream(handler: _Handler) -> _Int64:
    return _ask_xla(handler, "Stream_Get", XLA_FFI_Stream_Get_Args).stream


def _write_cuda_fill(handler: _Handler, libcuda: _LibCuda, target: _Int64, source: Any, nbytes: _Int64) -> None:
    """Copy `source`, or write zeros if that is 0, on the call's stream, as CUDA graphs can capture it."""
    function = "cuMemsetD8Async" if isinstance(source, int) else "cuMemcpyDtoDAsync_v2"
    code = handler.call(libcuda.address(function), target, source, nbytes, _cuda_stream(handler))
    text = f"{function} failed where an output of kernel '{handler.signature.label}' gets its first values"
    handler.fail(handler.text(text), when=code & 0xFFFF_FFFF)  # a C int


def _write_stream_and_device(handler: _Handler) -> tuple[_Int64, _Int64]:
    """The stream and the CUDA ordinal of the call."""
    ordinal = _ask_xla(handler, "DeviceOrdinal_Get", XLA_FFI_DeviceOrdinal_Get_Args).device_ordinal
    return _cuda_stream(handler), ordinal


def _launch_words(handler: _Handler) -> list[_Int64]:
    first = handler.launch
    return [handler.load(first + 8 * i) for i in range(_CUDA_LAUNCH_WORDS)]


class _CudaLauncher:
    """cuLaunchKernel, from a handler: on XLA's stream, with what was loaded for the call's device."""

    # `functions` are CUfunctions by CUDA ordinal, which `compiled` keeps alive, with the global arrays that they read.
    def __init__(
        self, label: str, libcuda: _LibCuda, functions: Mapping[int, int], compiled: Any, ptx: str = ""
    ) -> None:
        self.libcuda = libcuda
        self.compiled = compiled
        self.ptx = ptx
        self.table = (_I64 * (max(functions) + 1))()
        for ordinal, function in functions.items():
            self.table[ordinal] = function

        def report(code: int, function: int, address: int) -> int:
            launch = _launch_at(address)
            shown = f"grid={launch[:3]}, block={launch[3:6]}, shared_mem={launch[6]}"
            text = f"{libcuda.describe(code)}, from a launch with {shown}{libcuda.exceeded(function, launch)}"
            return _store_error_message(RuntimeError(text), label)

        self.report = ctypes.CFUNCTYPE(_PTR, _I32, _PTR, _PTR)(report)

    def launch_in(self, handler: _Handler) -> Callable[..., None]:
        """Write what all launches of a call share; returns what writes one, for parameters at these addresses."""
        stream, ordinal = _write_stream_and_device(handler)
        function = handler.load(ordinal * 8 + ctypes.addressof(self.table))
        x, y, z, *others = _launch_words(handler)

        def start(params: Sequence[Any], z: Any = z) -> None:
            args = function, x, y, z, *others, stream, handler.array(params), 0
            code = handler.call(self.libcuda.address("cuLaunchKernel"), *args)
            with handler.if_(code & 0xFFFF_FFFF, likely=False):  # a C int
                handler.fail(handler.call(self.report, code, function, handler.launch))

        return start


class _CudaEmitter(_Emitter):
    traits = _COMMAND_BUFFER_COMPATIBLE  # nothing but launches, the same ones whenever it is called

    # With `for_each_slice` arrays have the slices as first dimension, and these are the blocks along z.  It is the
    # address of another handler's `inner_loop`, which launches each: for calls whose blocks have a z, or too many
    # threads.
    def __init__(
        self, package: _NumbaCuda, launcher: _CudaLauncher, for_each_slice: int = 0, most_threads: int = 0
    ) -> None:
        self.package = package
        self.launcher = launcher
        self.libcuda = launcher.libcuda
        self.for_each_slice = for_each_slice
        self.most_threads = most_threads

    def write(self, handler: _Handler) -> None:
        if self.for_each_slice:
            launch = _launch_words(handler)
            has_z = launch[2] > 1
            with handler.if_(has_z | (math.prod(launch[3:6]) > self.most_threads), likely=False):
                handler.ret(handler.call(self.for_each_slice, handler.frame, handler.buffers, handler.count))
        start = self.launcher.launch_in(handler)
        if self.for_each_slice:
            with handler.each_chunk(_CUDA_LIMITS["grid"][2]) as (arrays, count):
                start(self._params(handler, arrays), z=count)
        else:
            with handler.each_slice() as arrays:
                start(self._params(handler, arrays))

    def _params(self, handler: _Handler, arrays: Sequence[_SliceArray]) -> list[_Int64]:
        """The addresses of the kernel's parameters."""
        params = [word for array in arrays for word in self.package.params(array)]
        first = handler.array(params)
        return [first + 8 * i for i in range(len(params))]


class _CudaBatch:
    """Makes the handler of a kernel launch it once for a batch, from when a batch is first lowered.

    The target name does not change, so existing and exported programs use the new code, too.
    """

    def __init__(self, handler: _CompiledHandler, compile_in_z: Callable[[], tuple[_CompiledHandler, int]]) -> None:
        self.handler = handler  # which launches each slice
        self.compile_in_z = compile_in_z  # gives another one, and how many threads its blocks may have
        self.most_threads: int | None = None
        self.lock = threading.Lock()

    def prepare(self, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
        """A `_BatchLaunchUnsupported`, or what the package raises, says why a batch of such launches stays as it is."""
        if grid[2] > 1:
            raise _BatchLaunchUnsupported(f"blocks along z are the slices, and it has some of its own: {grid=}")
        with self.lock:
            if self.most_threads is None:
                self.most_threads = sys.maxsize  # what fails says so once, and is not tried again
                in_z, self.most_threads = self.compile_in_z()
                self.handler.keep_alive.append(in_z)
                # Concurrent calls load this aligned word.  Both the old and the new value are valid.
                self.handler.data.inner_loop = in_z.data.inner_loop
        if math.prod(block) > self.most_threads:
            raise _BatchLaunchUnsupported(f"it may then have {self.most_threads} threads in a block, and {block=}")


# ======================================================================================================
# 10. Warp: a wrapper with a derivative, and an emitter that calls Warp's code on CPUs and GPUs.
#
# What a new Warp may break.
# - Loudly: attributes of kernels, modules, and types of arrays, structs and elements (`_warp_param`, `_warp_content`).
# - Silently, so that all tests named test_warp must pass before a version counts as supported: what the hash of a
#   kernel leaves out (`_warp_content`); how a launch is recorded, packed and run (`_record`, `_warp_blocks`), its grid
#   (`cuda_launch`), and which launches are more than the start of a kernel (`_record`); that tiles on CPUs have one
#   memory for all threads (`_WarpEmitter`); that kernels which loop over the grid know of no z, and how functions of
#   C++ are made (10.5: test_warp_a_batch_is_one_launch counts launches).

_WARP_INSTALL = "pip install warp-lang numba"
_WARP_DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64".split()
_WARP_LOCK: threading.RLock = _PROCESS_STATE.setdefault("warp_lock", threading.RLock())
_WARP_MAX_DIMS = 4
_WARP_MAX_EXTENT = 2**31 - 1  # Warp keeps extents, strides in bytes and thread indices in 32-bit integers


# -- 10.1 The wrapper ----------------------------------------------------------------------------------


def warp_kernel(
    kernel: Any = None,
    outs: Any = None,
    *,
    launch_dims: Any = None,
    block_dim: int = 256,
    tiled: bool = False,
    vmap_method: str | None = None,
    input_output_aliases: Mapping[int | str, int] | None = None,
    in_out_argnames: Sequence[str] | None = None,
    has_side_effect: bool = False,
    scratch: Any = None,
    zero_outputs: bool | None = None,
    name: str | None = None,
    differentiable: bool = False,
) -> Callable[..., Any]:
    """Make an NVIDIA Warp kernel a JAX function, on CPUs and GPUs.

    The kernel's parameters are the inputs, then the outputs, then the scratch buffers.  Arrays of vectors and matrices
    have the elements in trailing dimensions; an array of one element may be 0-d, and None is a null array.  A kernel
    that writes to an input is refused.  A `vmap` is one call: on a CPU threads share its slices; on a GPU it is one
    launch (per 65,535 slices), so no block may wait for one of another slice; or a launch for each, in order, with
    `vmap_method="sequential"`, and for kernels with C++, adjoints or code transformers of your own (this module's
    logger says why, at level DEBUG).

    Other parameters (scalars, vectors, matrices, structs) take values that are known when JAX traces; each new one
    compiles the call again, so what changes, such as a time step, is better a `warp.array` of one element.  Functions
    and constants that a kernel names are those of when JAX traced the call; if you define them anew, make the wrapper
    anew.  For kernels made in a loop, `warp.kernel(module="unique")` saves builds of whole modules.  Kernels of one
    module (or unique ones) that differ only in an int beyond 32 bits or a float's last digits are the same kernel to
    Warp; give such constants a type.

    Args:
      kernel: a function decorated with `warp.kernel`, not generic; without it, `warp_kernel(outs=...)` is a decorator.
      outs: as for `numba_kernel`; a callable gets arrays as specs, and values as they are.  If the launch is empty,
        outputs that start from no input are zero.
      launch_dims: the number of threads for each index that `wp.tid()` gives: an int, a tuple of up to 4, or a callable
        of the inputs (of their JAX shapes, in one slice of a `vmap`).  It may be left out if the first array of more
        than one element has as many dimensions as `wp.tid()` gives indices, and each other array that has so many
        begins with the same ones, or with ones of size 1.  Dimensions of elements do not count.  More threads than
        elements write beyond arrays, which corrupts memory: `warp.config.mode = "debug"`, set before the first call,
        finds that.
      block_dim: threads per block on a GPU; a block on the CPU has one.
      tiled: True for kernels whose blocks work on tiles, as `warp.launch_tiled` starts them: `launch_dims`, up to 3,
        counts blocks.
      vmap_method, input_output_aliases, in_out_argnames, has_side_effect, scratch, name: as for `numba_kernel`.
      zero_outputs: True starts every output but the aliased ones from zeros, in each slice of a `vmap`.  By default a
        kernel that only updates an output, as `out[i] += v` does, is refused unless the output starts from an input;
        False says that the kernel itself stores there before.
      differentiable: True gives reverse mode, first derivatives only, through the kernel's own adjoint, for arrays of
        floats.

    Returns:
      A function whose result has the structure of `outs`.

    Raises:
      TypeError: a generic kernel; arrays that do not fit or that it must not write to; traced values.
      ValueError: launch dimensions that are out of range or missing; what does not go with `differentiable`.
      RuntimeError: Warp's own, for a value of a wrong type.
      NotImplementedError: launches that are more than the start of a kernel (on GPUs Warp's deterministic mode and
        clusters, its blocks on CPUs), for which there is `warp.jax_kernel`; to compile for CUDA where JAX has no GPU.

    Example:
      >>> import jax.numpy as jnp, warp as wp
      >>> @wp.kernel
      ... def scale(x: wp.array(dtype=float), factor: float, out: wp.array(dtype=float)):
      ...     i = wp.tid()
      ...     out[i] = factor * x[i]
      >>> warp_kernel(scale, outs=lambda x, factor: x)(jnp.arange(3.0), 2.0).tolist()
      [0.0, 2.0, 4.0]
    """
    options = dict(locals())  # all arguments by name
    return _make_wrapper(_WarpKernel, options.pop("kernel"), _WarpOptions(**options))


@dataclasses.dataclass(kw_only=True)
class _WarpOptions(_Options):
    launch_dims: Any
    block_dim: int
    tiled: bool
    differentiable: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        what = f"block_dim must be an int of at least 1; got {self.block_dim!r}"
        (self.block_dim,) = _ints((self.block_dim,), what)
        if self.block_dim < 1:
            raise ValueError(what)
        if self.tiled and self.launch_dims is None:
            raise ValueError("tiled=True needs launch_dims, the number of blocks")
        if self.differentiable and (self.input_output_aliases or self.in_out_argnames or self.scratch):
            raise ValueError(
                "differentiable=True does not go with in_out_argnames, input_output_aliases or scratch: the adjoint "
                "needs the values that a kernel overwrites; write what changes, and what is in scratch, to new outputs"
            )


class _WarpKernel(_Wrapper):
    """A kernel, or one with `values` for some parameters: those that are no arrays, and None for null arrays.

    A call with values is passed on to a wrapper for these values, which has a jitted function of the other inputs.
    """

    decorator = "warp_kernel"

    def __init__(self, kernel: Any, options: Any, values: Mapping[str, Any] | None = None) -> None:
        wp = _import("warp", "warp_kernel", _WARP_INSTALL)
        if not isinstance(kernel, wp.Kernel):
            raise _unsupported_kernel_error("warp_kernel", "a function decorated with warp.kernel", kernel)
        if kernel.is_generic:
            fix = "wp.overload(kernel, [types of its parameters]) gives one that is not"
            raise TypeError(f"warp_kernel takes no generic kernel such as {kernel.func.__name__!r}: {fix}")
        self.params = {x.label: _warp_param(wp, kernel, x) for x in kernel.adj.args}
        self.values = copy.deepcopy(values or {})  # for later traces, too: structs may change
        super().__init__(kernel, options, tuple(name for name in self.params if name not in self.values))
        self.by_values = _BoundedCache({(): self})  # this kernel with other values
        self.by_value_names = {name for name, param in self.params.items() if not param.ndim}

    def _input_number(self, key: Any, n_in: int) -> int:
        name = dict(enumerate(self.params)).get(key, key)  # a number counts all arguments of a call, values too
        return super()._input_number(name, n_in)

    # -- from a call to its inputs ---------------------------------------------------------------------

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        if not named and not self.by_value_names and types.NoneType not in map(type, args):
            return self._call_inputs(args)
        arguments = self._bound(args, named)
        valued = [name for name, x in arguments.items() if name in self.by_value_names or x is None]
        values = {name: self.params[name].as_value(arguments.pop(name)) for name in valued}
        key = tuple([(name, _value_key(x)) for name, x in values.items()])
        wrapper = self.by_values.get(key) or self.by_values.keep(key, _WarpKernel(self.kernel, self.options, values))
        return wrapper._call_inputs([*arguments.values()])

    # A pickle by value would have all of the kernel's module, which is then there twice.
    _reduce_without_module = _PickledByReference._reduce_without_module

    def _for_inputs(self, what: str, ins: Sequence[Spec]) -> Any:
        """An option, which may be a callable of all that the call got, values included."""
        arguments: list[Any] = [*ins]
        names = [*self.params]
        for name, value in self.values.items():  # in the kernel's order
            arguments.insert(names.index(name), value)
        return super()._for_inputs(what, arguments)

    # -- from a call to a target -----------------------------------------------------------------------

    def _find_target(self, call: _CallParams) -> _Target:
        n_in = len(call.ins)
        specs = call.ins + call.outs
        names = [*self.parameters[:n_in], *self.in_outs, *self.parameters[n_in:]]  # of each buffer
        if len(names) != len(specs):
            raise self._wrong_arity(
                f"got {n_in} inputs and {len(call.outs)} outputs (what changes in place is in in_out_argnames, and "
                "counts as both)"
            )
        for name, spec in zip(names, specs):
            self.params[name].check(spec)
        buffers = {name: k for k, name in enumerate(names)}
        _check_accesses(self, call, _warp_array_accesses(self.kernel), buffers, is_guarded=False)
        return self._target(call, {(name, "data"): k for name, k in buffers.items()}, call.ins)

    def _target(
        self, call: _CallParams, buffers: Mapping[tuple[str, str], int], user_ins: Sequence[Spec]
    ) -> _WarpTarget:
        """What launches the kernel, or with gradients its adjoint, on the buffers of a call.

        `buffers` has their numbers, as in `_WarpTarget.arrays`.  Options that are callables get `user_ins`.
        """
        options = self.options
        specs = call.ins + call.outs
        arrays = [(name, field, k, self.params[name].dims(specs[k].shape)) for (name, field), k in buffers.items()]
        launch_dims = self._launch_dims(user_ins, {name: dims for name, *_, dims in arrays})
        in_place = ", if it changes nothing in place" if call.aliases else ""
        target = _WarpTarget(
            self.__name__,
            is_noop=0 in launch_dims,
            title=self.title,
            where="runs on CPUs, and on NVIDIA GPUs where JAX has one",
            derivative="" if options.differentiable else f"say differentiable=True for reverse mode{in_place}, or ",
            kernel=self.kernel,
            values=self.values,
            key=(_warp_content(self.kernel), *map(_value_key, self.values.values())),
            arrays=tuple(arrays),
            launch_dims=launch_dims,
            block_dim=options.block_dim,
            is_tiled=options.tiled,
            signature=call.signature(self.__name__),
            given_name=options.name,
            in_order=options.in_order,
        )
        platform = _default_platform().replace("gpu", "cuda")
        if platform in ("cpu", "cuda") and not target.is_noop:
            target.registered_for(platform)
            if options.name:  # for exported programs, whose process may lower no batch
                target.registered_for(platform, has_batch=True)
        return target

    def _launch_dims(self, user_ins: Sequence[Spec], arrays: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The dimensions of a launch, by default those of the arrays; if it is tiled, of its blocks."""
        launch_dims = self._for_inputs("launch_dims", user_ins)
        launch = f"launch_dims={launch_dims}"
        is_missing = launch_dims is None
        if is_missing:
            launch_dims = self._dims_of_arrays(arrays, [*self.params][: len(user_ins) + len(self.values)])
            launch = f"launch_dims is missing, and the shape of the first array, {launch_dims},"
        most = _WARP_MAX_DIMS - self.options.tiled
        limits = f"1 to {most} numbers from 0 to {_WARP_MAX_EXTENT}"
        what = f"{self.title}: launch_dims must be {limits}; got {launch_dims!r}"
        dims = _ints(launch_dims, what)
        source = _warp_array_accesses(self.kernel)
        has_blocks = self.options.tiled or source.uses_tiles  # whose threads are a last dimension
        if is_missing or (source.n_indices and not has_blocks):
            _check_n_indices(self.title, launch, len(dims), source.n_indices, "wp.tid()")
        if not 1 <= len(dims) <= most or min(dims) < 0 or max(dims) > _WARP_MAX_EXTENT:
            raise ValueError(what)
        return dims

    def _dims_of_arrays(self, arrays: Mapping[str, tuple[int, ...]], inputs: Sequence[str]) -> tuple[int, ...]:
        """Those of the arrays, where they agree: a guess would leave elements out, or go beyond."""
        sized = {name: dims for name, dims in arrays.items() if math.prod(dims) != 1}
        first, first_dims = next(iter((sized or arrays).items()), ("", ()))
        n = len(first_dims)
        for name, dims in sized.items():
            if len(dims) >= n and dims[:n] not in (first_dims, (1,) * n):
                raise ValueError(
                    f"{self.title}: launch_dims is missing, and arrays differ, {first!r} of shape {first_dims} and "
                    f"{name!r} of {dims}: give the number of threads, or a function of the inputs, as "
                    f"launch_dims=lambda {', '.join(inputs)}: ..."
                )
        return first_dims

    # -- derivatives -----------------------------------------------------------------------------------

    def _leaves(self, outs: list[Spec], *args: Any) -> list:
        plain = functools.partial(super()._leaves, outs)
        if not self.options.differentiable:
            return plain(*args)

        def forward(*args: Any) -> tuple[list, Any]:
            results = plain(*args)
            return results, (args, results)

        return _with_vjp(plain, forward, self._backward)(*args)

    def _backward(self, residuals: Any, cotangents: Sequence) -> tuple:
        """One adjoint launch, whose last results are the gradients of the inputs of floats."""
        args, outs = residuals
        operands = _make_varying([*args, *outs, *(cotangents[j] for j in _floats(outs))])
        call = self._resolve_adjoint(_input_specs(args), _input_specs(outs))
        cotangents_of_args: list[Any] = [None] * len(args)  # a zero, for JAX
        for i, gradient in zip(reversed(_floats(args)), reversed(call.bind(operands))):
            cotangents_of_args[i] = _sharded_like(gradient, jax.typeof(args[i]))
        return tuple(cotangents_of_args)

    def _resolve_adjoint(self, args: list[Spec], outs: list[Spec]) -> _CallParams:
        """The call of the adjoint: (inputs, outputs, cotangents) -> (what it changes, gradients).

        It changes what it replays of the kernel, and the cotangents.  Gradients start from zeros.
        """
        names = self.parameters
        float_args = _floats(args)
        float_outs = _floats(outs)
        ins = (*args, *outs, *(outs[j] for j in float_outs))
        operands = [(name, "data") for name in names] + [(names[len(args) + j], "grad") for j in float_outs]
        buffers = {buffer: k for k, buffer in enumerate(operands)}
        replayed = _warp_array_accesses(self.kernel).replayed
        changed = [k for (name, field), k in buffers.items() if field == "grad" or name in replayed]
        buffers |= {(names[i], "grad"): k for k, i in enumerate(float_args, start=len(ins) + len(changed))}
        results = tuple([ins[k] for k in (*changed, *float_args)])
        aliases = tuple([(k, j) for j, k in enumerate(changed)])
        zeroed = tuple(range(len(changed), len(results)))
        call = _CallParams(ins, results, len(results), aliases, zeroed, self.options.has_side_effect)
        target = self._target(call, buffers, args)
        _warn_of_stale_values(self.kernel, self.params, self.title)
        return dataclasses.replace(call, target=target)


def _floats(arrays: Sequence[Any]) -> list[int]:
    """The numbers of the arrays of floats."""
    return [k for k, x in enumerate(arrays) if jax.dtypes.issubdtype(x.dtype, np.floating)]


# -- 10.2 Warp itself: import, silence, types ----------------------------------------------------------
# Code for some versions of Warp names them, here and in 10.3.  Checked on 1.14 and 1.19.


@contextlib.contextmanager
def _warp_session() -> Iterator[Any]:
    """Warp, initialized, silent unless the user raised the verbosity, and locked, as building modules is not safe."""
    wp = _import("warp", "warp_kernel", _WARP_INSTALL)
    with _WARP_LOCK:
        level = wp.config.log_level
        try:
            if level == 20:  # INFO, the default
                wp.config.log_level = 30
            wp.init()
            yield wp
        finally:
            wp.config.log_level = level


def jaxtype_to_warptype(dtype: Any) -> Any:
    """The Warp scalar type of what NumPy reads as a dtype; a ValueError for one that Warp lacks."""
    wp = _import("warp", "jaxtype_to_warptype", _WARP_INSTALL)
    scalars = {np.dtype(name): getattr(wp, name) for name in _WARP_DTYPES}
    try:
        return scalars[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise ValueError(f"Warp has no scalar type for dtype {dtype!r}; it has {', '.join(_WARP_DTYPES)}") from None


def jaxinfo_to_warpinfo(info: Any) -> Any:
    """The Warp array type, for annotations, of anything with `.dtype` and a `.shape` of 1 to 4 dimensions (ValueError).

    Example:
      >>> jaxinfo_to_warpinfo(np.ones((3, 4), np.float32)).ndim
      2
    """
    ndim = len(info.shape)
    if not 1 <= ndim <= _WARP_MAX_DIMS:
        what = f"Warp arrays have 1 to {_WARP_MAX_DIMS} dimensions; got {ndim} in {_format_spec(info)}"
        raise ValueError(f"{what}; reshape it to (1,), or to fewer dimensions")
    wp = _import("warp", "jaxinfo_to_warpinfo", _WARP_INSTALL)
    return wp.array(dtype=jaxtype_to_warptype(info.dtype), ndim=ndim)


# -- 10.3 The parameters of a kernel, and its content --------------------------------------------------


@dataclasses.dataclass
class _WarpParam:
    """One parameter: an array of `ndim` dimensions, or what is passed by value (`ndim` is 0)."""

    title: str  # for errors
    type: Any
    dtype: np.dtype | None  # of the scalars; None for a struct
    inner: tuple[int, ...]  # the shape of one element: () for scalars, (3,) for vec3
    ndim: int

    def dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The dimensions of an array without those of its elements; an array of one element may have no others."""
        outer = shape[: len(shape) - len(self.inner)]
        return tuple(outer) or (1,) * self.ndim

    def __str__(self) -> str:
        scalar = self.dtype.name if self.dtype else f"struct {self.type.key}"
        dims = [":"] * self.ndim + [*map(str, self.inner)]
        return f"{scalar}[{','.join(dims)}]" if dims else scalar

    def as_value(self, value: Any) -> Any:
        """What a call gives, which JAX must know."""
        if isinstance(value, jax.core.Tracer):
            fix = "make it a warp.array of one element, or give a Python value (under jax.jit a static argument)"
            raise TypeError(self._refused(value, f"which JAX traces: {fix}"))
        if self.dtype is None and not isinstance(getattr(value, "_ctype", None), self.type.ctype):
            raise TypeError(self._refused(value, "not an instance of that struct"))  # Warp would read it as one
        if self.dtype and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            for n in _objects(value).ravel():
                if isinstance(n, (int, np.integer)) and not limits.min <= n <= limits.max:  # Warp would wrap it around
                    raise ValueError(self._refused(value, "which is out of its range"))
        return np.asarray(value) if isinstance(value, jax.Array) else value

    def _refused(self, value: Any, why: str) -> str:
        return f"{self.title} ({self}) is passed by value; got {type(value).__name__} {value!r:.80}, {why}"

    def check(self, spec: Spec) -> None:
        """Raise if an array of this spec cannot be the argument."""
        what = f"{self.title} is a warp.array, {self} for JAX; got {_format_spec(spec)}"
        if spec.dtype != self.dtype:
            fix = f"cast it by jnp.asarray(x, jnp.{self.dtype}), or annotate it with jaxinfo_to_warpinfo"
            if str(self.dtype).endswith("64"):
                fix = f"JAX keeps 64 bits `with jax.enable_x64(True): x = jnp.asarray(x, jnp.{self.dtype})`"
            raise TypeError(f"{what}: wrong dtype; {fix}")
        is_array = len(spec.shape) >= self.ndim and spec.shape[self.ndim :] == self.inner
        if not is_array and spec.shape != self.inner:  # that of one element
            raise TypeError(f"{what}: wrong shape; trailing dimensions hold the elements of a vector or matrix")
        if not all(isinstance(n, int) for n in spec.shape):
            raise NotImplementedError(f"{what}: a launch has known dimensions; export a program for each shape")
        if max(1, *spec.shape, math.prod(spec.shape[1:]) * spec.dtype.itemsize) > _WARP_MAX_EXTENT:
            raise ValueError(f"{what}: Warp counts extents and strides in 32 bits, at most {_WARP_MAX_EXTENT}")


def _warp_param(wp: Any, kernel: Any, argument: Any) -> _WarpParam:
    title = f"warp_kernel {kernel.func.__name__!r}: argument {argument.label!r}"
    warp_type = argument.type
    scalars = {getattr(wp, name): np.dtype(name) for name in _WARP_DTYPES}
    scalars |= {float: np.dtype("f4"), int: np.dtype("i4"), bool: np.dtype("?"), wp.handle: np.dtype("u8")}
    is_array = isinstance(warp_type, wp.array) or getattr(warp_type, "_concrete_cls", None) is wp.array
    element = warp_type.dtype if is_array else warp_type
    dtype = scalars.get(getattr(element, "_wp_scalar_type_", element))
    is_plain_struct = hasattr(element, "vars") and not _points_to_arrays(warp_type)
    if dtype is None and not is_plain_struct:
        raise TypeError(
            f"{title} is {getattr(element, 'key', warp_type)!r}; supported are scalars, vectors and matrices, arrays "
            "of those, and structs without arrays: give the kernel one parameter for each field"
        )
    inner = tuple(getattr(element, "_shape_", ()))
    return _WarpParam(title, warp_type, dtype, inner, ndim=warp_type.ndim if is_array else 0)


def _points_to_arrays(warp_type: Any) -> bool:
    """Whether this is the type of arrays, or of structs with these."""
    fields = getattr(warp_type, "vars", {}).values()
    return hasattr(warp_type, "ndim") or any(_points_to_arrays(field.type) for field in fields)


def _warp_content(kernel: Any) -> tuple[str, ...]:
    """What decides a kernel's machine code: its module, Warp's hash (of code, constants, types), and options.

    Warp's hash does not tell apart some constants, such as those of float64, but what it builds is a module's own; a
    kernel that is made again in a unique module gets the module, and is the kernel, that Warp has for that hash.
    """
    with _warp_session() as wp:
        # Warp < 1.19 makes an empty kernel, in silence, of what it could not build before.
        kernel.adj.skip_build = False
        kernel.module.get_module_hash()  # also hashes the kernels
        options = kernel.module.resolve_options(wp.config) | kernel.options
        options["block_dim"] = None  # in Warp 1.14 that of the last launch
        return wp.__version__, kernel.module.name, kernel.hash.hex(), str(options)


_WARP_SOURCES = _BoundedCache()  # content -> `_ArrayAccesses`


def _warp_array_accesses(kernel: Any) -> _ArrayAccesses:
    content = _warp_content(kernel)
    given = [_ArrayView(x.label, x.type.ndim) if hasattr(x.type, "ndim") else None for x in kernel.adj.args]
    return _WARP_SOURCES.get(content) or _WARP_SOURCES.keep(content, _ArrayAccesses(kernel, given))


def _objects(value: Any) -> np.ndarray:
    """The numbers of a value, as Python's: Warp's scalars keep theirs in `value`."""
    return np.asarray(getattr(value, "value", value), object)


def _value_key(value: Any) -> tuple:
    """Tells values apart, for the kernel and for functions such as `outs`, which get what a call gives."""
    if hasattr(value, "__ctype__"):  # a struct
        return type(value), bytes(value.__ctype__())
    return type(value), getattr(value, "dtype", None), str(_objects(value).tolist())


# -- 10.4 A launch, as Warp records it -----------------------------------------------------------------
# How Warp packs a launch into blocks of memory differs between versions.  So where a call is traced or lowered, Warp
# records a launch, with stand-ins for the pointers to its buffers.  The attribute `launch` has the bytes of the blocks;
# a handler copies them, and writes the pointers of a slice where stand-ins stood.


def _placeholder_pointer(k: int) -> int:
    """What stands for the pointer to buffer k, or for ~k, the bytes from one slice of it to the next.

    A number that no other is by accident, aligned as pointers are.
    """
    return 0x5EED_0F0A_C417_0000 + 16 * k


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class _WarpTarget(_Target):
    """What Warp must know to record a launch of a kernel, or of its adjoint.

    `name` is for messages; `registered_for` returns a `_Target` with the registered name.
    """

    kernel: Any = dataclasses.field(compare=False)
    values: Mapping[str, Any] = dataclasses.field(compare=False)
    key: tuple  # compared for these two
    # (name of a parameter, "data" or "grad", number of the buffer, dimensions of the array there)
    arrays: tuple[tuple[str, str, int, tuple[int, ...]], ...]
    launch_dims: tuple[int, ...]
    block_dim: int
    is_tiled: bool
    signature: _Signature
    given_name: str | None  # the user's `name=`
    in_order: bool
    is_in_z: bool = False  # the kernel is one that `_kernel_in_z` made

    def registered_for(self, platform: str, has_batch: bool = False) -> _Target:
        """Record a launch, and register what starts it."""
        devices = {"cpu": ["cpu"], "cuda": [f"cuda:{n}" for n in _cuda_ordinals()]}.get(platform)
        if not devices:
            return super().registered_for(platform)  # raises
        if platform == "cuda" and has_batch:
            with _log_per_slice_fallback(self.title):
                return self._in_z().registered_for(platform)
        context = _LibCuda().keeping_context() if platform == "cuda" else contextlib.nullcontext()
        with _warp_session() as wp, context:  # Warp may leave another device's context current
            emitter = _WarpEmitter(self, [self._record(wp, device) for device in devices])
            # The content may be another one than where the kernel was traced.
            content = "warp", self.in_order, _warp_content(self.kernel), self.block_dim
            layout = str((platform, emitter.block_sizes, emitter.pointers))
            specialization = _Specialization(self.signature, content, platform, self.given_name, layout)

            def compile_handler() -> _CompiledHandler:
                _import("numba", "warp_kernel compiles what XLA calls with Numba's LLVM: it", _NUMBA_INSTALL)
                return _compile_handler(self.signature, emitter)

            name = _REGISTRY.find_or_register(specialization, compile_handler)
        return _Target(name, emitter.launch, platform=platform, title=self.title, where=self.where)

    def _in_z(self) -> _WarpTarget:
        """What runs a batch by one launch (10.5)."""
        if self.in_order:
            raise _BatchLaunchUnsupported("vmap_method says that slices run in order")
        buffers = tuple([array[:3] for array in self.arrays])
        return dataclasses.replace(self, kernel=_kernel_in_z(self.kernel, buffers), is_in_z=True)

    def _record(self, wp: Any, device: str) -> Any:
        """Warp's recorded launch, with stand-ins for pointers; compiles and loads the kernel."""
        warp_types = {arg.label: arg.type for arg in self.kernel.adj.args}
        data = dict(self.values)
        grad: dict[str, Any] = {}
        for name, field, k, dims in reversed(self.arrays):  # gradients first
            dtype = warp_types[name].dtype
            array = wp.array(ptr=_placeholder_pointer(k), shape=dims, dtype=dtype, device=device, grad=grad.get(name))
            (data if field == "data" else grad)[name] = array
            if self.is_in_z:
                data[_STEP.format(k)] = _placeholder_pointer(~k)
        inputs = [data[name] for name in warp_types]
        block_dim = 1 if device == "cpu" else self.block_dim
        dims = (*self.launch_dims, block_dim) if self.is_tiled else self.launch_dims
        options: dict[str, Any] = {"device": device, "block_dim": block_dim, "record_cmd": True}
        note = f"This was raised for {self.title}"
        if grad:
            gradients = [grad.get(name) if hasattr(t, "ndim") else t() for name, t in warp_types.items()]
            options |= {"adj_inputs": gradients, "adjoint": True}
            note += ", whose adjoint enable_backward=False leaves out (of the kernel, its module, or in warp.config)"
        try:
            command = wp.launch(self.kernel, dims, inputs, **options)
        except Exception as error:
            error.add_note(note)
            raise
        if command is None:  # some versions of Warp report a failed build once only
            raise RuntimeError(f"Warp cannot build kernel {self.kernel.key!r}: see its first error, or its log")
        wants_blocks = device == "cpu" and getattr(wp.config, "enable_cpu_blocks", False)
        has_blocks = wants_blocks and (self.is_tiled or _warp_array_accesses(self.kernel).uses_tiles)
        if has_blocks or type(command).__name__ != "Launch" or getattr(command, "cluster_dim", 1) != 1:
            raise NotImplementedError(
                f"{self.title}: in deterministic mode, of clusters, or of enable_cpu_blocks' blocks, a launch is more "
                "than the start of a kernel: call it by warp.jax_kernel"
            )
        return command

    def pointers_in(self, words: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(number of the word, k) for each stand-in."""
        numbers = [k for _, _, k, _ in self.arrays]
        if self.is_in_z:
            numbers += [~k for k in numbers]
        by_stand_in = {_placeholder_pointer(k): k for k in numbers}
        if not by_stand_in.keys() <= set(words):
            raise NotImplementedError(f"{self.title}: this Warp passes arrays in an unknown way: use warp.jax_kernel")
        return tuple([(n, by_stand_in[word]) for n, word in enumerate(words) if word in by_stand_in])

    def cuda_launch(self, command: Any, shared_mem: int) -> tuple[int, ...]:
        """As `wp_cuda_launch_kernel` (warp.cu) has it: without a loop in the kernel, an axis has 2**24 threads."""
        threads = self.block_dim
        n_threads = command.bounds.size
        if n_threads % threads and _warp_array_accesses(self.kernel).uses_tiles:
            raise ValueError(
                f"{self.title}: all {threads} threads of a block work on a tile, and launch_dims={self.launch_dims} "
                f"are {n_threads} threads: with tiled=True launch_dims counts blocks"
            )
        blocks = -(-n_threads // threads)
        has_loop = getattr(self.kernel, "grid_stride", True)  # set when the content was read
        x = blocks if has_loop else min(blocks, 2**24 // threads)
        return x, -(-blocks // x), 1, threads, 1, 1, shared_mem


def _warp_blocks(command: Any) -> list[bytes]:
    """The memory of each parameter, padded to words.  A launch on the CPU is run for that, with nothing behind it."""
    passed = list(command.params)
    if command.device.is_cpu:
        passed.clear()

        def run_nothing(*args: Any) -> None:
            passed.extend(getattr(arg, "_obj", arg) for arg in args)  # of pointers made by ctypes.byref

        empty = copy.copy(command)
        empty.hooks = types.SimpleNamespace(forward=run_nothing, backward=run_nothing)
        empty.launch()
    blocks = map(bytes, passed)
    return [block + bytes(-len(block) % 8) for block in blocks]


class _WarpEmitter(_Emitter):
    """Copies the memory of a launch that Warp recorded, and for each slice starts the kernel's machine code."""

    def __init__(self, target: _WarpTarget, commands: Sequence[Any]) -> None:
        command = commands[0]  # what is passed is the same on each device of a platform
        direction = "backward" if command.adjoint else "forward"
        self.commands = commands  # keep Warp's modules loaded
        self.entries = [ctypes.cast(getattr(x.hooks, direction), _PTR).value or 0 for x in commands]
        blocks = _warp_blocks(command)
        words = memoryview(b"".join(blocks)).cast("q").tolist()
        self.block_sizes = tuple([len(block) // 8 for block in blocks])
        self.pointers = target.pointers_in(words)
        self.is_in_z = target.is_in_z
        if command.device.is_cpu:
            self.launch = tuple(words)
            self.entry = self.entries[0]
            if _warp_array_accesses(target.kernel).uses_tiles:
                # Warp keeps the CPU memory of tiles behind one static pointer (tile.h): such kernels must not overlap.
                self.lock = _native_lock("tile_lock")
            self.in_order = target.in_order or bool(self.lock)
            self.code_key = "warp", self.block_sizes, self.pointers, bool(self.lock)
            return
        self.libcuda = _LibCuda()
        launch = target.cuda_launch(command, getattr(command.hooks, f"{direction}_smem_bytes"))
        self.launch = (*launch, *words)
        functions = dict(zip(_cuda_ordinals(), self.entries, strict=True))
        self.launcher = _CudaLauncher(target.signature.label, self.libcuda, functions, commands)
        self.traits = _COMMAND_BUFFER_COMPATIBLE  # it only launches, always the same
        exceeded = max([self.libcuda.exceeded(entry, launch) for entry in self.entries])
        if self.is_in_z and exceeded:  # it may take more registers
            raise _BatchLaunchUnsupported(f"it does not fit then{exceeded}")

    def write(self, handler: _Handler) -> None:
        offset = 8 * _CUDA_LAUNCH_WORDS if self.libcuda else 0
        words = handler.alloca(_I64, sum(self.block_sizes))
        handler.copy_bytes(words, handler.launch + offset, 8 * sum(self.block_sizes))
        blocks = [words + 8 * start for start in itertools.accumulate(self.block_sizes[:-1], initial=0)]
        start: Any = None
        if self.libcuda:
            start = self.launcher.launch_in(handler)

        def point_to(arrays: Sequence[_SliceArray]) -> None:
            for n, k in self.pointers:
                handler.store(arrays[k].pointer if k >= 0 else handler.buffers[~k].step, words + 8 * n)

        if self.is_in_z:
            with handler.each_chunk(_CUDA_LIMITS["grid"][2]) as (arrays, count):
                point_to(arrays)
                start(blocks, z=count)
            return
        with handler.each_slice() as arrays:
            point_to(arrays)
            if start:
                start(blocks)
            else:
                handler.call(handler.data.entry, *blocks)


# -- 10.5 A batch in one launch ------------------------------------------------------------------------
# On a GPU the blocks along z are the slices of a batch, as Warp counts threads along x alone, if kernels loop over the
# grid.  A second kernel is the first one with lines in front that move each array to the slice of the block, by a step
# in bytes that the handler writes where it writes pointers: 0 if all slices share an array.
#
#     def kernel(x, factor, out):         def kernel(x, factor, out, _xla_step_0, _xla_step_1):
#         i = wp.tid()                        x = _xla_move_0(x, _xla_step_0)
#         out[i] = factor * x[i]              out = _xla_move_1(out, _xla_step_1)
#                                             i = wp.tid()
#                                             out[i] = factor * x[i]
#
# C++ of the user's may ask for z, and the user's own adjoints look for gradients where those of moved arrays are not:
# such kernels are launched for each slice.

_STEP = "_xla_step_{}"
_MOVE_SOURCE = "@wp.func_native()\ndef move(array, step): ..."  # where Warp looks for the decorator
_MOVE_SNIPPET = "auto& p = array.{field}; p = (decltype(&*p))((char*)p + blockIdx.z * step); return array;"
_KERNELS_IN_Z = _BoundedCache()  # (content, buffers) -> the kernel whose slices are along z


def _kernel_in_z(kernel: Any, buffers: tuple[tuple[str, str, int], ...]) -> Any:
    """The kernel whose blocks z work on slice z of these arrays and gradients."""
    with _warp_session() as wp:
        key = _warp_content(kernel), buffers
        return _KERNELS_IN_Z.get(key) or _KERNELS_IN_Z.keep(key, _make_kernel_in_z(wp, kernel, buffers))


def _make_kernel_in_z(wp: Any, kernel: Any, buffers: Sequence[tuple[str, str, int]]) -> Any:
    source = kernel.adj.source
    if _warp_array_accesses(kernel).has_own_code or kernel.adj.transformers:  # which would see another source
        raise _BatchLaunchUnsupported("it calls C++, or has adjoints or code transformers, of your own")
    annotations = {arg.label: arg.type for arg in kernel.adj.args}
    names = _captured_variables(kernel.func)
    same = _kernel_like(kernel, source, annotations, names)
    same.module.get_module_hash()  # also hashes the kernels
    if same.hash != kernel.hash:
        raise _BatchLaunchUnsupported("what it names is something else now than when Warp read it")
    lines = []
    for name, field, k in buffers:

        def move(array: Any, step: Any) -> Any: ...  # in C++ alone

        kind = annotations[name]
        move.__annotations__ = {"array": kind, "step": wp.int64, "return": kind}
        snippet = _MOVE_SNIPPET.format(field=field)
        key = f"_xla_move_{k}"
        names[key] = wp.Function(move, key, "", module=same.module, native_snippet=snippet, source=_MOVE_SOURCE)
        annotations[_STEP.format(k)] = wp.int64
        lines.append(f"{name} = {key}({name}, {_STEP.format(k)})")
    tree: Any = ast.parse(source)
    tree.body[0].body[:0] = ast.parse("\n".join(lines)).body
    return _kernel_like(kernel, ast.unparse(tree), annotations, names, grid_stride=True)


def _kernel_like(kernel: Any, source: str, annotations: dict, names: dict, **options: Any) -> Any:
    """A kernel in a module of its own, with this source, and these values for the names in it."""
    function = types.FunctionType(kernel.func.__code__, names, closure=kernel.func.__closure__)
    function.__annotations__ = dict(annotations)
    # Warp tells modules apart by name.
    module = type(kernel.module)(f"{kernel.key}_{_hash(kernel.module.name, kernel.hash.hex(), source)}", None)
    module.options.update(kernel.module.options)
    return type(kernel)(function, kernel.key, module, {**kernel.options, **options}, source=source)


# -- 10.6 Gradients that Warp gets wrong ---------------------------------------------------------------
# Warp's adjoint goes back through a loop of unknown length with the values that variables have at other times: what a
# loop assigns is stale.  That is right for sums, whose adjoint needs no values, and silently wrong for products, for
# functions and powers of what was summed, for conditions and for indices (compared with finite differences, Warp 1.14
# to 1.19).  So is `o[i] = o[i] * y`, which overwrites what the adjoint needs.


_WARNED_OF: Any = weakref.WeakSet()  # kernels
_GRADIENT = "has a gradient"


class _StaleValues(_Interpreter):
    """Where the adjoint of a function needs a value that is stale: `found` has {(file, line): (variable, text)}.

    Here a variable, or an expression, is the set of the stale variables in it, and _GRADIENT if it has one.
    """

    def __init__(self, function: Any, inert: Container[str], max_unroll: int) -> None:
        super().__init__()
        self.adj = function.adj
        self.max_unroll = max_unroll
        self.overwritten = ""  # the element that is being assigned
        self.found: dict[tuple[str, int], tuple[str, str]] = {}
        tree = _syntax_tree(function)
        self.parameters = {x.arg for x in tree.args.args}
        self.names = {name: {_GRADIENT} for name in self.parameters if name not in inert}
        self.variables = _captured_variables(_py_func(function))
        self.run(tree.body)

    def need(self, node: Any, found: set) -> None:
        for name in sorted(found - {_GRADIENT}):
            place = self.adj.filename, node.lineno + self.adj.fun_lineno - 1
            self.found.setdefault(place, (name, ast.unparse(node)))

    def statement(self, node: Any) -> None:
        match node:
            case ast.Assign(targets=[target], value=value):
                self.assign(target, value)
            case ast.AugAssign(target=target, op=op, value=value):
                self.assign(target, ast.copy_location(ast.BinOp(target, op, value), node))
            case ast.If(test=test):
                self.need(test, self.value(test))
                super().statement(node)
            case ast.Break():
                self.need(node, {"the loop that it leaves"})
            case ast.For(target=target, iter=iterated, body=body):
                self.need(iterated, self.value(iterated))  # such as a length that a loop has counted
                run = self.run if self.is_unrolled(iterated, body) else self.loop
                run([ast.Assign([target], ast.Constant(0)), *body])
            case ast.While(test=test, body=body):
                self.need(test, self.value(test))  # before the loop: what it counts itself, Warp counts anew
                self.loop(body)
            case _:
                super().statement(node)

    def is_unrolled(self, iterated: Any, body: Sequence[ast.stmt]) -> bool:
        leaves_early = any(isinstance(x, (ast.Break, ast.Continue)) for s in body for x in ast.walk(s))
        with contextlib.suppress(AttributeError, TypeError):  # it is no range, or of a number that is not known
            return len(range(*map(self.constant, iterated.args))) <= self.max_unroll and not leaves_early
        return False

    def constant(self, node: Any) -> Any:
        """The value of a number, of a global variable or an attribute of one, or of arithmetic with these."""
        if not any(isinstance(x, (ast.Call, ast.Subscript)) for x in ast.walk(node)):
            with contextlib.suppress(Exception):
                return eval(ast.unparse(node), {}, self.variables)
        return None

    def loop(self, body: Sequence[Any]) -> None:
        for name in set().union(*map(self.stored_names, body)):
            self.names[name] = self.names.get(name, set()) | {name}
        super().loop(body)

    def stored_names(self, node: ast.AST) -> set[str]:
        """The variables that are assigned there, or a part of which is: not the arrays of parameters."""
        targets = [x for x in ast.walk(node) if isinstance(getattr(x, "ctx", None), ast.Store)]
        return {getattr(_root(x), "id", "") for x in targets} - self.parameters

    def assign(self, target: Any, value: Any) -> None:
        self.overwritten = ast.unparse(target)
        found = self.value(value)
        self.overwritten = ""
        self.value(target)  # with indices
        for name in self.stored_names(target):
            if isinstance(target, (ast.Subscript, ast.Attribute)):  # of which the rest stays
                found = found | self.names.get(name, set())
            self.names[name] = {x if x == _GRADIENT else name for x in found}

    def value(self, node: Any) -> set:
        match node:
            case ast.Name(id=name):
                return self.names.get(name, set())
            case ast.Attribute(attr=name) if name in _ARRAY_METADATA:
                return set()
            case ast.Subscript(value=array, slice=index):
                self.need(node, self.value(index))
                return self.value(array) | ({ast.unparse(node)} & {self.overwritten})
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.value(left), self.value(right)
                if _GRADIENT in a | b and not _is_linear(op, a, b):
                    self.need(node, a | b)
                return a | b
            case ast.Call():
                return self.call(node)
            case ast.IfExp(test=test):
                self.need(test, self.value(test))
        found = set().union(*map(self.value, ast.iter_child_nodes(node)))
        return found - {_GRADIENT} if isinstance(node, ast.Compare) else found

    def call(self, node: ast.Call) -> set:
        values = list(map(self.value, [*node.args, *node.keywords]))
        found = set().union(*values)
        if ast.unparse(node.func).endswith(("atomic_add", "atomic_sub")):
            self.need(node, set().union(*values[1:-1]))
        elif _GRADIENT in found and not isinstance(self.constant(node.func), type):  # which is linear, as wp.vec3 is
            self.need(node, found)
        return found


def _is_linear(op: ast.operator, a: set, b: set) -> bool:
    """Whether the adjoint of `a op b` needs neither value: what is empty has no gradient, and is never stale."""
    if isinstance(op, (ast.Mult, ast.MatMult)):
        return not a or not b
    return isinstance(op, (ast.Add, ast.Sub)) or (isinstance(op, ast.Div) and not b)


def _warn_of_stale_values(kernel: Any, params: Mapping[str, _WarpParam], title: str) -> None:
    """Warn of a gradient that is wrong, once for each kernel."""
    if kernel in _WARNED_OF:
        return
    inert = {name for name, param in params.items() if not param.ndim or np.dtype(param.dtype).kind != "f"}
    max_unroll = {**kernel.module.options, **kernel.options}.get("max_unroll")
    max_unroll = 16 if max_unroll is None else max_unroll  # Warp's own
    found: dict[tuple[str, int], tuple[str, str]] = {}
    for n, function in enumerate(dict.fromkeys(function for function, _ in _warp_array_accesses(kernel).results)):
        found |= _StaleValues(function, () if n else inert, max_unroll).found  # the first is the kernel
    for (file, line), (name, text) in found.items():
        warnings.warn(
            f"{title}: the gradient may be wrong: Warp's adjoint needs {name!r} as it was in `{text:.60}` (line {line} "
            f"of {file}), and has its value at another time.  Put the loop into a wp.func that returns "
            f"what it sums up, or give it a constant length of at most {max_unroll}; then compare the gradient by "
            'jax.test_util.check_grads(f, args, order=1, modes=["rev"])',
            skip_file_prefixes=_INTERNAL_FILE_PREFIXES,
        )
    _WARNED_OF.add(kernel)


# ======================================================================================================
# 11. XLACustomKernel: one operation, many backends, all of JAX's transformations.
# An op is a JAX primitive.  A call binds it with the static parameters; only its lowering knows the platform, and so
# the backend: it traces that backend's kernel and lowers the result.  Until then all transformations act on the
# primitive, with the derivative rules of the user.
#
# What it takes from inside JAX, beside what interpreters ask of a primitive: "Batching rule for", which begins an error
# where a primitive has none; tracers among the constants of a jaxpr; the class names of a jaxpr's effects; `val` of
# tracers (`_without_numpy`).
#
# What serves BrainEvent alone: the methods from `def_call` to `def_benchmark_data`, `register_general_batching`; that
# the primitive and its transpose rule can be called by hand, the latter without outs (`_OpPrimitive.op_params`); and
# that rules may return an undefined operand for zero (`_from_rule`).

# -- 11.1 The op: registration, dispatch, rules --------------------------------------------------------


class XLACustomKernel(_PickledByReference):
    """An operation with kernels for several backends that takes part in all of JAX's transformations.

    Kernels are registered with the `def_*_kernel` methods: as a *generator*, which is called with the static parameters
    of a call and returns the function to trace, or ready-made (`@njit`, `@cuda.jit`, `@wp.kernel`). `vmap` is handed to
    the backend's own batching rules. Derivatives are given by the `def_*_rule` methods. An op is never collected.

    An op has no side effects: a call whose results nobody uses is dropped, and two calls are not ordered. Under `vmap`
    a `cond` becomes a `select`: a kernel in a branch that is not taken runs, too, and what it raises is raised; in a
    `while_loop` it runs for slices that have finished, too, with their last state.

    Args:
      name: shown in jaxprs and error messages; it need not be unique.
      doc: the docstring of this op.

    Calling the op, `op(*ins, outs=..., backend=None, **params)`:
      ins: arrays, Python scalars, or anything with `__dlpack__` (Warp, PyTorch and CuPy arrays).
      outs: what the op returns: a `jax.ShapeDtypeStruct` (or anything with `.shape` and `.dtype`), a pytree of them,
        or a callable of the operands' abstract values that returns one. JAX sorts the keys of a dict, so a kernel must
        return a dict of these keys for it; for ready kernels, which return tuples, a NamedTuple keeps names and order.
      backend: a registered one; by default that of the platform which the computation is lowered for.
      params: static, hashable parameters, handed to generators and rules.  Values of a class with an `__eq__` of its
        own that are equal are one (but 1, 1.0 and True are three).

    Raises:
      TypeError: a parameter is not hashable, such as a traced value, or an operand is no array.
      ValueError: the backend is unknown, or a kernel returns something else than `outs` declares.
      NotImplementedError: there is no kernel for the platform, or a derivative without a rule is asked for.
      What a generator or kernel raises, with a note of the op and the backend.

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
        self.primitive = _OpPrimitive(self)
        self._kernels: dict[str, dict[str, KernelEntry]] = {}  # by platform and backend
        self._chosen: dict[str, str] = {}  # platform -> default set by asdefault=True or set_default
        self._rules: dict[str, Any] = {}  # "batching", "jvp", "transpose", "vjp": the newest of each, or None
        self._is_traced = False  # whether JAX's caches may hold traces with the present kernels and rules
        self._calls = _BoundedCache()  # by their outs, backend and static parameters
        self._checked = _BoundedCache()  # calls whose kernels were traced for their errors
        self._functions = _BoundedCache()  # what generators returned
        self._call_fn: Callable = self
        self._benchmark_data_fn: Callable | None = None
        self._tags: set[str] = set()
        self.__doc__ = doc or self.__doc__

    def __call__(self, /, *ins: Any, outs: Any, backend: str | None = None, **params: Any) -> Any:
        """Apply the op; see the class for the arguments."""
        is_traced = False
        for x in ins:
            if type(x) not in _INPUT_TYPES:
                ins, is_traced = _convert_inputs(ins, self.title)
                break
        if callable(outs):
            avals = [getattr(x, "aval", None) or jax.typeof(x) for x in ins]
            outs = _call_with_specs(outs, f"{self.title}: outs", *avals)
        key = _outs_key(outs), backend, _tagged(params) if params else ()
        try:
            call = self._calls[key]
        except (KeyError, TypeError):
            call = self._new_call(outs, backend, params, key)
        if not is_traced:
            return call.jitted(*ins)
        call.check(ins)
        return call.trace(*ins)

    def _new_call(self, outs: Any, backend: str | None, params: dict, key: Any) -> _OpParams:
        for name, value in params.items():
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{self.title}: parameter {name!r} must be hashable, as parameters are static; got {value!r:.80} "
                    f"of type {type(value).__name__}: pass a number or a tuple (of a function under jax.jit, one of "
                    "its static_argnames), or pass an array as an operand"
                ) from None
        call = self.primitive.op_params(outs, backend, **params)
        with contextlib.suppress(TypeError):  # sizes that are arrays cannot be hashed
            return self._calls.keep(key, call)
        return call

    def __repr__(self) -> str:
        return f"<{self.title}: {self._registered()}>"

    # -- registration ----------------------------------------------------------------------------------

    def def_kernel(self, backend: str, platform: str, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a kernel for a backend and a platform; returns it, or a decorator where it is left out.

        It replaces the backend's kernel, also in functions that were compiled with the old one: these are traced again.

        Args:
          backend: any name; `"numba"`, `"warp"`, `"numba_cuda"`, `"pallas"`, `"triton"`, `"cuda_raw"` have shorthands.
          platform: `"cpu"`, `"gpu"` or `"tpu"` (`"cuda"` and `"rocm"` mean `"gpu"`).
          kg: a ready kernel, or a generator, `kg(outs=..., **params)`, which may leave out `outs` (a tuple); it returns
            a ready kernel, a wrapper such as `numba_kernel(kernel, outs=outs[0])`, or a function that JAX traces.
          asdefault: make this backend the platform's default; otherwise the first one registered is.
          options: for a ready kernel, passed to `numba_kernel`, `numba_cuda_kernel` or `warp_kernel`.
        """
        return self._define(backend, [platform], kg, asdefault, options)

    def def_numba_kernel(self, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a Numba kernel (a generator, or `@njit`) for the CPU; see :meth:`def_kernel`."""
        return self._define("numba", ["cpu"], kg, asdefault, options)

    def def_warp_kernel(self, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a Warp kernel for GPU and CPU, there as the default if nothing else is; see :meth:`def_kernel`."""
        return self._define("warp", ["gpu", "cpu"], kg, asdefault, options)

    def def_numba_cuda_kernel(self, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a Numba CUDA kernel (a generator, or `@cuda.jit`) for the GPU; see :meth:`def_kernel`.

        A `@cuda.jit` kernel is given its launch: `launch_dims`, or `grid` and `block`.
        """
        platforms = ["gpu", "cpu"] if _uses_cudasim() else ["gpu"]  # in the simulator as Warp: where nothing else is
        return self._define("numba_cuda", platforms, kg, asdefault, options)

    def def_pallas_kernel(self, platform: str, kg: Any = None, asdefault: bool = False) -> Any:
        """Register a Pallas kernel for `"gpu"`, `"tpu"`, or (in interpret mode) `"cpu"`; see :meth:`def_kernel`."""
        return self._define("pallas", [platform], kg, asdefault, {})

    def def_triton_kernel(self, kg: Any = None, asdefault: bool = False) -> Any:
        """Register a generator of a Triton kernel for the GPU; see :meth:`def_kernel`."""
        return self._define("triton", ["gpu"], kg, asdefault, {})

    def def_cuda_raw_kernel(self, kg: Any = None, asdefault: bool = False) -> Any:
        """Register a generator of a kernel compiled from CUDA C++ for the GPU; see :meth:`def_kernel`."""
        return self._define("cuda_raw", ["gpu"], kg, asdefault, {})

    def _define(self, backend: str, platforms: Sequence[str], kg: Any, asdefault: bool, options: dict) -> Any:
        """Register a kernel for `platforms`: on those after the first it is a fallback."""
        if not isinstance(backend, str) or not isinstance(platforms[0], str):
            raise TypeError(f"{self.title}: backend and platform must be names, got {backend!r} and {platforms[0]!r}")
        if kg is None:
            return functools.partial(self._define, backend, platforms, asdefault=asdefault, options=options)
        generator = _as_generator(f"{self.title}: the kernel of backend {backend!r}", kg, options)
        for i, platform in enumerate(map(_platform_name, platforms)):
            entries = self._kernels.setdefault(platform, {})
            if i > 0 and backend in entries and not entries[backend].fallback:
                continue  # registered for this platform itself
            entries[backend] = KernelEntry(backend, platform, generator, fallback=i > 0)
        if asdefault:
            self._chosen[_platform_name(platforms[0])] = backend
        self._drop_traces()
        return kg

    def _drop_traces(self) -> None:
        """Drop what generators made, and JAX's traces with earlier kernels or rules, for which all its caches go."""
        self._functions = _BoundedCache()
        if self._is_traced:
            self._is_traced = False
            jax.clear_caches()
            _jitted_primitive.cache_clear()

    # -- dispatch --------------------------------------------------------------------------------------

    @property
    def defaults(self) -> dict[str, str]:
        """The default backend of every platform that has a kernel (a copy)."""
        return {platform: self._choices(platform)[None].backend for platform in list(self._kernels)}

    def get_default(self, platform: str) -> str | None:
        """The default backend of `platform`, or None where it has no kernel."""
        return self.defaults.get(_platform_name(platform))

    def set_default(self, platform: str, backend: str) -> None:
        """Make `backend`, which must be registered, the default of `platform`, also in functions compiled before."""
        name = _platform_name(platform)
        self._chosen[name] = self._entry(name, backend).backend
        self._drop_traces()

    def available_backends(self, platform: str) -> list[str]:
        """The backends registered for `platform`, in order of registration."""
        return list(self._kernels.get(_platform_name(platform), {}))

    def _choices(self, platform: str) -> dict[str | None, KernelEntry]:
        """The kernel for each `backend` that a call may name; None is the default."""
        choices: dict[Any, KernelEntry] = dict(self._kernels.get(platform, {}))  # a copy, as threads may register
        if choices:
            first = min(choices.values(), key=operator.attrgetter("fallback"))
            choices[None] = choices.get(self._chosen.get(platform), first)
        return choices

    def _entry(self, platform: str, backend: str | None) -> KernelEntry:
        """The kernel that serves a call, or an error that says what is registered."""
        choices = self._choices(platform)
        if backend in choices:
            return choices[backend]
        missing = "kernel" if backend is None else f"backend {backend!r}"
        text = (
            f"{self.title} has no {missing} for platform {platform!r}; registered: {self._registered()}; "
            "choose one of these (backend=, jax.default_device), or register another with def_kernel"
        )
        raise NotImplementedError(text) if backend is None else ValueError(text)

    def _registered(self) -> str:
        return "; ".join(f"{name}: {', '.join(entries)}" for name, entries in [*self._kernels.items()]) or "nothing"

    # -- rules -----------------------------------------------------------------------------------------

    def def_batching_rule(self, fun: Callable) -> Callable:
        """Override batching: `fun(args, axes, **params) -> (outputs, output_axes)`; usable as a decorator.

        `axes` holds 0 for a batched operand, else None; `params` is as in :meth:`def_jvp_rule`. Outputs and their axes
        are lists, or one of each. The rule runs when the op is lowered: derivatives are by the op's rules, and it must
        not close over traced values.
        """
        return self._define_rule("batching", fun)

    def register_general_batching(self) -> None:
        """Restore the batching rule that every op starts with (:func:`general_batching_rule`)."""
        self._set_rule("batching", None)

    def def_jvp_rule(self, fun: Callable) -> Callable:
        """Define the derivative by one function, `fun(primals, tangents, **params) -> (outputs, tangents_out)`.

        A tangent that is zero is a `jax.interpreters.ad.Zero`; outputs and their tangents are lists, and a tangent may
        be None for zero. `params` holds `outs`, `backend` and the static parameters of the call; every rule may leave
        out the first two. An op that a rule calls runs its default backend, unless it is given `backend=backend`.
        Usable as a decorator.
        """
        return self._define_rule("jvp", fun)

    def def_jvp_rule2(self, *jvp_rules: Callable | None) -> None:
        """Define the derivative by one rule per operand; see :func:`defjvp`."""
        what = f"{self.title}: def_jvp_rule2: the rule of operand"
        self._set_rule(
            "jvp", [rule and _drop_unaccepted_kwargs(rule, f"{what} {i}") for i, rule in enumerate(jvp_rules)]
        )

    def def_transpose_rule(self, fun: Callable) -> Callable:
        """Define the transpose of an op that is linear in some operands; usable as a decorator.

        `fun(cotangents, *operands, **params)` gets a list with one cotangent per output (`ad.Zero` where it is zero),
        and an `ad.UndefinedPrimal` for every operand that the op is linear in (`ad.is_undefined_primal`). It returns
        one cotangent per operand: None for those that are known. It works under `vmap`, too, where JAX's
        `linear_call` has no batching rule.
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
        what = f"{self.title}: a rule of def_vjp_rule"
        self._set_rule("vjp", (_drop_unaccepted_kwargs(fwd, what), _drop_unaccepted_kwargs(bwd, what)))

    def _define_rule(self, kind: str, fun: Callable) -> Callable:
        self._set_rule(kind, _drop_unaccepted_kwargs(fun, f"{self.title}: a {kind} rule"))
        return fun

    def _set_rule(self, kind: str, rule: Any) -> None:
        """Replace a rule (None: by the default)."""
        if kind == "jvp":
            self._rules["vjp"] = None  # of the two, the newest counts
        self._rules[kind] = rule
        self._drop_traces()

    # -- what BrainEvent's operators attach to an op ---------------------------------------------------

    def def_call(self, fn: Callable) -> Callable:
        """Attach the function that :meth:`call` calls: the op with its operands prepared and checked."""
        self._call_fn = fn
        return fn

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function attached by :meth:`def_call`, or the op."""
        return self._call_fn(*args, **kwargs)

    def def_tags(self, *tags: str) -> None:
        """Attach words to find the op by."""
        self._tags = set(tags)

    def def_benchmark_data(self, fn: Callable) -> Callable:
        """Attach a function that makes benchmark data."""
        self._benchmark_data_fn = fn
        return fn

    def benchmark(self, /, *ins: Any, outs: Any, backend: str | None = None, **params: Any) -> _OpBenchmark:
        """Time `op(*ins, outs=outs, **params)` under `jax.jit`: by one backend, or by all of the default platform.

        The result prints as a table.  Each of its `.rows` has `backend`, `first_ms` (the first call, with compilation),
        `median_us`, `difference` (the largest one from the first backend that ran, in double precision) and `error`.
        """
        platform = _default_platform()
        self._entry(platform, backend)  # raises where there is none
        args = jax.device_put(_convert_inputs(ins, self.title)[0])
        rows = []
        reference = None
        for name in [backend] if backend else self.available_backends(platform):
            call = jax.jit(functools.partial(self, outs=outs, backend=name, **params))
            timer = timeit.Timer(lambda call=call: jax.block_until_ready(call(*args)))  # type: ignore[misc]
            try:
                first = timer.timeit(1)
                times = timer.repeat(int(np.clip(0.2 / timer.timeit(1), 5, 10_000)), 1)
                results = np.concatenate([np.ravel(x) for x in [*jax.tree.leaves(call(*args)), 0j]])
                reference = results if reference is None else reference
                differs = ~np.isclose(results, reference, 0, 0, equal_nan=True)
                difference = np.max(np.abs(results[differs] - reference[differs]), initial=0.0)
                rows.append(_BenchmarkRow(name, 1e3 * first, 1e6 * np.median(times), difference))
            except Exception as error:
                rows.append(_BenchmarkRow(name, error=f"{type(error).__name__}: {error}".partition("\n")[0]))
        return _OpBenchmark(rows)


class _BenchmarkRow(NamedTuple):
    backend: str
    first_ms: float = math.nan
    median_us: float = math.nan
    difference: float = math.nan
    error: str = ""


class _OpBenchmark(NamedTuple):
    rows: list

    def __repr__(self) -> str:
        lines = ["backend         first (ms)   median (us)  difference"]
        for backend, first, median, difference, error in self.rows:
            lines.append(f"{backend:<14}{first:>12.2f}{median:>14.2f}  {error or f'{difference:.3g}'}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, eq=False)
class KernelEntry:
    """One kernel of an :class:`XLACustomKernel`, made by `def_kernel`.

    `kernel_generator` is what was registered, or for a ready kernel a generator that returns its wrapper. A `fallback`
    (Warp on the CPU, Numba's simulator of CUDA) serves, unless asked for by name, only where the platform has no other.
    """

    backend: str
    platform: str
    kernel_generator: Callable
    fallback: bool = False


# -- 11.2 A call: from op(...) to its primitive --------------------------------------------------------


def _outs_key(outs: Any) -> tuple:
    """Equal for equal structures of equal specs.  To flatten a list costs an eager call more than JAX's own work."""
    kind = type(outs)
    if kind is list or kind is tuple:
        return kind, tuple([_outs_key(x) for x in outs])
    if kind is Spec or _is_spec(outs):
        return outs.shape, outs.dtype
    leaves, tree = _flatten_specs(outs)
    return tree, *[(x.shape, x.dtype) if _is_spec(x) else x for x in leaves]


def _tagged(value: Any) -> Any:
    """A key that differs for values which Python finds equal: 1, 1.0 and True; 0.0 and -0.0."""
    kind = type(value)
    if kind is dict:  # the parameters of a call
        return tuple([(name, _tagged(x)) for name, x in sorted(value.items())])
    if isinstance(value, (tuple, frozenset)):
        return kind, *map(_tagged, value)
    if kind in (float, complex) or isinstance(value, np.inexact):  # also NaN, which is not equal to itself
        return kind, np.asarray(value).tobytes()
    return kind, value


# -- 11.3 A kernel: from a generator, or a ready kernel, to its results --------------------------------
# For one slice and one backend.


def _as_generator(kernel: str, kg: Any, options: dict) -> Callable:
    """The generator of a ready kernel; any other is the user's own function, which `KernelEntry` holds as it is."""
    kind = _decorated_backend(kg)
    if options and kind not in _BACKENDS:
        raise TypeError(f"{kernel}: {', '.join(options)} can be given with a ready kernel only; else in its wrapper")
    if kind is not None:
        return functools.partial(_wrap_decorated, kg, options)
    if not callable(kg):
        raise TypeError(f"{kernel} (a generator, or a Numba, Numba CUDA or Warp kernel) must be callable, got {kg!r}")
    return kg


def _wrap_decorated(kernel: Any, options: dict, /, outs: tuple, **params: Any) -> Any:
    """A ready kernel as a function of arrays; anything else as it is."""
    kind = _decorated_backend(kernel)
    if params:
        raise TypeError(f"static parameters {list(params)} need a generator that makes this {kind} kernel of them")
    return _BACKENDS[kind].wrap(kernel, outs, **options) if kind in _BACKENDS else kernel


def _drop_unaccepted_kwargs(fun: Callable, what: str) -> Callable:
    """`fun`, called without those of `outs` and `backend` that its signature does not take."""
    signature = inspect.signature(fun)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    unwanted = set() if takes_all else {"outs", "backend"} - signature.parameters.keys()

    @functools.wraps(fun)
    def call(*args: Any, **params: Any) -> Any:
        for name in unwanted & params.keys():
            del params[name]
        try:
            return fun(*args, **params)
        except TypeError:
            _check_call_signature(signature, what, args, params)
            raise

    return call


def _run_slice(op_params: _OpParams, entry: KernelEntry, *ins: Any) -> list:
    """The flat list of results of a kernel for the operands of one slice."""
    what = f"{op_params.op.title}: the kernel of backend {entry.backend!r} for platform {entry.platform!r}"
    try:
        results = _function_of_arrays(op_params, entry, ins)(*ins)
    except Exception as error:
        error.add_note(f"{what} raised this; backend= chooses another of {op_params.op!r}")
        raise
    return _outputs(what, results, op_params.outs, op_params.tree)


def _function_of_arrays(op_params: _OpParams, entry: KernelEntry, ins: Sequence) -> Callable:
    """What the generator returns for these parameters and outs, which it is asked for once."""
    axes = _all_varying_axes(map(jax.typeof, ins))
    mesh = jax.sharding.get_abstract_mesh()  # an array that the generator makes has it in its type
    key = entry, op_params.outs, axes, mesh, op_params.key, jax.config.jax_enable_x64
    functions = op_params.op._functions
    known = functions.get(key)
    if known:
        return known
    outs = tuple([Spec(out.shape, out.dtype, **_varying(axes)) for out in op_params.outs])
    what = (
        f"{op_params.op.title}: the generator (any plain function is one: @numba.njit makes a Numba kernel, lambda: f "
        "gives a function f)"
    )
    # What it computes with jax.numpy serves other traces, too: so it is an array, no tracer, and has no manual axes.
    without_manual = mesh.update_axis_types(dict.fromkeys(mesh.manual_axes, jax.sharding.AxisType.Auto))
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(without_manual):
        returned = _drop_unaccepted_kwargs(entry.kernel_generator, what)(**op_params.params, outs=outs)
        function = _wrap_decorated(returned, {}, op_params.outs)
    if not callable(function):
        raise TypeError(f"the generator must return the function to trace, got {function!r}")
    if getattr(getattr(function, "options", None), "has_side_effect", False):
        raise TypeError("an op has no side effects, as a call with unused results is dropped: call the kernel itself")
    return functions.keep(key, function)


def _outputs(what: str, returned: Any, outs: Sequence, tree: Any) -> list:
    """The outputs that a kernel or a rule returned, as arrays: in any container, but dicts only as declared."""
    leaves, structure = jax.tree.flatten(returned)
    if structure != tree and (_contains_dict(tree) or (_contains_dict(structure) and len(leaves) > 1)):
        fix = "return that, or declare a tuple, or a NamedTuple, which keeps names and order"
        raise ValueError(f"{what} returned {structure}, but outs declares {tree}: {fix}")
    return _as_declared(what, leaves, "outs declares", outs)


def _as_declared(what: str, returned: Sequence, declares: str, expected: Sequence) -> list:
    """What a kernel or a rule returned, as arrays of these shapes and dtypes; None fits everything, on either side."""
    # no asarray of arrays, as it truncates 64 bits
    arrays = [x if x is None or isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in returned]
    shown = list(map(_format_spec, arrays))
    wanted = list(map(_format_spec, expected))
    misfits = [pair for pair in zip(shown, wanted) if pair[0] != pair[1] and "None" not in pair]
    if len(shown) != len(wanted) or misfits:
        fix = "return as many, of equal shape and dtype (None for zero in a rule), or correct what is declared"
        raise ValueError(f"{what} returned ({', '.join(shown)}), but {declares} ({', '.join(wanted)}): {fix}")
    return arrays


# -- 11.4 The primitive: its rules for JAX's interpreters ----------------------------------------------
# Each rule looks up what the op has now when JAX asks.  JAX keeps the answers until `_drop_traces` drops them.


class _OpPrimitive(Primitive):
    """The primitive of an op, whose one parameter is an `_OpParams`: bound by hand, it is given what makes one."""

    multiple_results = True

    def __init__(self, op: XLACustomKernel) -> None:
        super().__init__(op.name)
        self.op = op
        self.def_impl(functools.partial(_apply_primitive, self))
        self.def_abstract_eval(self.jax_rule(_op_abstract_eval))
        ad.primitive_jvps[self] = self.jax_rule(_op_jvp)
        ad.primitive_transposes[self] = self.jax_rule(_op_transpose)
        batching.primitive_batchers[self] = self.jax_rule(_op_batching)
        for platform in (None, "cpu", "gpu", "tpu"):  # a rule for each platform, or JAX would lower for several at once
            mlir.register_lowering(self, self.jax_rule(_op_lowering), platform=platform)

    def jax_rule(self, function: Callable) -> Callable:
        """A rule for JAX's interpreters: `function`, with an `_OpParams` before its other arguments."""

        def call(*args: Any, **params: Any) -> Any:
            self.op._is_traced = True
            return function(self.op_params(**params), *args)

        return call

    def op_params(self, /, outs: Any = (), backend: Any = None, _op_params: Any = None, **params: Any) -> _OpParams:
        """The one parameter, also where the others are given by hand: BrainEvent calls rules without outs."""
        if _op_params:
            return _op_params
        specs, tree = _normalize_specs(outs, f"{self.op.title}: outs")
        return _OpParams(self.op, tuple(specs), backend, params, _tagged(params), tree)

    def bind(self, /, *args: Any, **params: Any) -> Any:
        return super().bind(*_make_varying(args), _op_params=self.op_params(**params))


@dataclasses.dataclass(frozen=True)
class _OpParams:
    """A call of an op, or what its primitive is bound with then: the same, with the dtypes that JAX allows."""

    op: XLACustomKernel = dataclasses.field(repr=False)
    outs: tuple  # of one slice
    backend: str | None
    params: dict[str, Any] = dataclasses.field(compare=False)  # static; in one, as they may have any name
    key: tuple = dataclasses.field(repr=False)  # of params, for JAX's caches, which would take 1 and 1.0 for the same
    tree: Any  # the structure of outs
    vmaps: tuple = ()  # the recorded ones (11.5): the `in_axes` of each
    batch: tuple[int, ...] = ()  # and its size
    batching_rule: Callable | None = None  # of the user, if it does the innermost of the vmaps

    @property
    def batched_outs(self) -> list[Spec]:
        return [Spec((*self.batch, *out.shape), out.dtype) for out in self.outs]

    @property
    def rule_params(self) -> dict[str, Any]:
        """What a user's rules get, which are for one slice."""
        return {**self.params, "outs": self.outs, "backend": self.backend}

    @functools.cached_property
    def jitted(self) -> Callable:
        """For calls on arrays."""
        return jax.jit(self.trace)

    def trace(self, *ins: Any) -> Any:
        """A call on tracers (or, under disable_jit, on arrays)."""
        self.op._is_traced = True  # here, too, as a vjp rule that JAX's caches hold need not bind the primitive
        op_params = self.allowed(ins)
        rule = self.op._rules.get("vjp")
        results = _bind_with_vjp(op_params, ins, *rule) if rule else op_params.bind(*ins)
        return self.tree.unflatten(results)

    def allowed(self, ins: Sequence) -> _OpParams:
        """With the dtypes that JAX allows now: jax_enable_x64 can change between two calls."""
        outs, _ = _normalize_specs(self.outs, f"{self.op.title}: outs", _input_specs(ins))
        return dataclasses.replace(self, outs=tuple(outs))

    def check(self, ins: Sequence) -> None:
        """Trace the kernel that will probably run, once for these inputs, so that its errors are raised here."""
        entry = self.op._choices(_default_platform()).get(self.backend)
        key = (self, entry, jax.sharding.get_abstract_mesh(), *_input_specs(ins))
        # Without a kernel, or where the platform may be another one, the lowering raises.
        if entry and key not in self.op._checked and jax.default_backend() == "cpu":
            op_params = self.allowed(ins)
            if not op_params.is_empty:
                op_params.traced(entry, ins)
            self.op._checked.keep(key, True)

    def bind(self, *ins: Any) -> list:
        return self.op.primitive.bind(*ins, _op_params=self)

    def bind_batch(self, args: Sequence, axes: Sequence[int | None]) -> list:
        """Bind with one more vmap; the batched axes of the results are in front."""
        in_axes, batch = _with_axes_in_front(args, axes)
        size = batch[in_axes.index(0)].shape[0]
        outer = dataclasses.replace(self, batch=(size, *self.batch), vmaps=(in_axes, *self.vmaps))
        return outer.bind(*batch)

    @property
    def is_empty(self) -> bool:
        """Whether no result has elements, which not every backend takes."""
        return bool(self.outs) and all(0 in out.shape for out in self.batched_outs)

    def run(self, entry: KernelEntry, *ins: Any) -> list:
        """The results of a kernel."""
        if self.is_empty:
            return list(map(_zeros, self.batched_outs))
        closed = self.traced(entry, ins)  # as a whole first: a failure must leave nothing behind
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *ins)

    def traced(self, entry: KernelEntry, ins: Sequence) -> Any:
        """The jaxpr of a kernel: for a batch by the batching rules of what it calls, or else slice by slice."""
        run_slice: Any = functools.partial(_run_slice, self, entry)
        vmaps = self.vmaps
        if self.batching_rule:
            run_slice = functools.partial(_run_batching_rule, self, vmaps[-1])
            vmaps = vmaps[:-1]
        try:
            closed = jax.make_jaxpr(functools.reduce(jax.vmap, reversed(vmaps), run_slice))(*ins)
        except NotImplementedError as error:
            if not str(error).startswith("Batching rule for"):  # JAX's words where a primitive has none (0.9 to 0.12)
                raise
            closed = jax.make_jaxpr(functools.reduce(_sequential, reversed(vmaps), run_slice))(*ins)
        _check_closed(self.op.title, closed)
        return closed


def _check_closed(title: str, closed: Any) -> None:
    """Raise if a kernel's jaxpr needs traced values of the program, or axes of `vmap`: at lowering they are gone."""
    if any(isinstance(x, jax.core.Tracer) for x in closed.consts):
        raise TypeError(f"{title}: a kernel, or a batching rule, closes over a traced value: pass it as an operand")
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    for effect in closed.effects:
        # JAX has no tokens for ordered effects when an op is lowered.  That of a collective has the `name` of an axis.
        if "Ordered" in type(effect).__name__ or getattr(effect, "name", None) not in (None, *manual_axes):
            raise NotImplementedError(
                f"{title} has no ordered effects, and no axes of a vmap, here {effect}: call its kernel itself"
            )


def _op_abstract_eval(op_params: _OpParams, *avals: Any) -> list:
    specs = [iter(aval.sharding.spec) for aval in avals]
    candidates = []
    for in_axes in op_params.vmaps:  # each is the next dimension of the operands that it batches
        candidates.append([next(spec) for spec, axis in zip(specs, in_axes) if axis == 0])
    axes = _batch_axes(candidates)
    return [_out_aval(out.shape, out.dtype, avals, axes) for out in op_params.batched_outs]


def _op_lowering(op_params: _OpParams, ctx: Any, *ins: Any) -> Any:
    platforms = _platforms(ctx)
    entry = op_params.op._entry(_platform_name(platforms[0]), op_params.backend)
    return _lower(functools.partial(op_params.run, entry), ctx, ins)


# -- 11.5 Batching: recorded vmaps ---------------------------------------------------------------------
# Generators, `outs` and rules of the user are for one slice, and how a batch is best run only the backend knows, when
# the op is lowered.  So a `vmap` of an op is recorded: it binds the primitive once more, with its axis in front of the
# batched operands.  `_OpParams.vmaps` has the `in_axes` of each, the outermost first.  By these `jax.vmap` then batches
# what runs a slice, or is a rule (11.6).
#
# An op's own batching rule runs at once, as any of JAX's, so it may be differentiated and close over traced values.
# But that of an op with derivative rules runs at lowering: what it runs may have no derivatives, or others than the
# op (surrogate gradients).  It does the innermost of the recorded vmaps, but not of those that the rule itself binds
# by `general_batching_rule`, or lowering would never end.


def general_batching_rule(prim: Any, args: Sequence, axes: Sequence[int | None], /, **params: Any) -> tuple:
    """Batch an op or primitive without a rule of its own; what :class:`XLACustomKernel` uses by default.

    Args:
      prim: an :class:`XLACustomKernel` or its `primitive`, which is bound once, with the batch recorded, and leaves the
        work to its backend's own `vmap`; or any primitive or function of arrays, for a `jax.lax.map` over the slices.
      args, params: its operands, and its parameters by keyword: for an op `outs`, those of one slice, too.
      axes: the batched axis of each operand, or None; one of them at least is batched.

    Returns:
      The outputs and, in the same structure, their batched axes, which are 0.

    Example:
      >>> out, axis = general_batching_rule(lambda x, y: x @ y, (np.ones((5, 3)), np.ones(3)), (0, None))
      >>> print(out.shape, axis)
      (5,) 0
    """
    primitive = getattr(prim, "primitive", prim)
    if isinstance(primitive, _OpPrimitive):
        if "outs" not in params or callable(params["outs"]):
            raise TypeError(f"general_batching_rule: outs of {primitive.op.title} is missing: give one slice's specs")
        op_params = primitive.op_params(**params)
        out = op_params.tree.unflatten(op_params.bind_batch(args, axes))
    else:
        function = functools.partial(getattr(prim, "bind", prim), **params)
        in_axes, batch = _with_axes_in_front(args, axes)
        out = _sequential(function, in_axes)(*batch)
    return out, jax.tree.map(lambda _: 0, out)


def _op_batching(op_params: _OpParams, args: Sequence, axes: Sequence) -> tuple:
    rule = op_params.op._rules.get("batching")
    if rule and not op_params.vmaps:  # it is for the op on one slice, not on the batch of a recorded vmap
        op_params = dataclasses.replace(op_params, batching_rule=rule)
        if op_params.op._rules.keys().isdisjoint({"jvp", "transpose"}):
            in_axes, batch = _with_axes_in_front(args, axes)
            results = _run_batching_rule(op_params, in_axes, *batch)
            return results, [0] * len(results)
    results = op_params.bind_batch(args, axes)
    return results, [0] * len(results)


def _run_batching_rule(op_params: Any, in_axes: tuple, *batch: Any) -> list:
    """The results of the user's rule for one vmap, whose axis is in front."""
    what = f"the batching rule of {op_params.op.name!r}"
    results, axes = op_params.batching_rule(batch, in_axes, **op_params.rule_params)
    if not isinstance(results, (list, tuple)):
        results, axes = [results], [axes]
    size = batch[in_axes.index(0)].shape[0]
    in_front = [_batch_in_front(x, axis, size) for x, axis in zip(results, axes, strict=True)]
    expected = [Spec((size, *out.shape), out.dtype) for out in op_params.outs]
    return _as_declared(what, in_front, "outs, with the batch in front, are", expected)


def _with_axes_in_front(args: Sequence, axes: Sequence[int | None]) -> tuple[tuple, list]:
    """The `in_axes` of a batch, and the batch."""
    in_axes = tuple([None if axis is None else 0 for axis in axes])
    return in_axes, [jax.numpy.moveaxis(x, axis, 0) if axis else x for x, axis in zip(args, axes)]


def _sequential(function: Callable, in_axes: tuple) -> Callable:
    """`jax.vmap(function, in_axes)`, but one slice at a time."""

    def mapped(*ins: Any) -> Any:
        def of_slice(slices: list) -> Any:
            remaining = iter(slices)
            return function(*[x if axis is None else next(remaining) for x, axis in zip(ins, in_axes)])

        return jax.lax.map(of_slice, [x for x, axis in zip(ins, in_axes) if axis is not None])

    return mapped


# -- 11.6 Derivatives ----------------------------------------------------------------------------------
# A user's rule is vmapped by the recorded vmaps: tangents are batched as their primals, cotangents by all, as outputs.
# JAX gives rules `ad.Zero` and `ad.UndefinedPrimal`, which `jax.vmap` cannot batch: `_symbolic_slice` gives them the
# shape of a slice.  A rule may return a zero as None, `ad.Zero` or an undefined primal: `_from_rule` makes it None.


def defjvp(primitive: Any, *jvp_rules: Callable | None) -> None:
    """Define the derivative of an op or primitive by one rule per operand.

    Args:
      primitive: an :class:`XLACustomKernel`, or a JAX primitive with one or several results.
      jvp_rules: one per operand: `rule(tangent, *primals, **params)` returns the tangents of the outputs that this
        operand's tangent causes, in a list or tuple (one array if there is one output; None for zero), and is only
        called for an operand that is differentiated. None in place of a rule: the operand contributes nothing.
        `params` is as in :meth:`XLACustomKernel.def_jvp_rule`.

    Example:
      >>> op = XLACustomKernel("multiply")
      >>> _ = op.def_kernel("jax", "cpu", lambda: lambda x, y: x * y)
      >>> defjvp(op, lambda t, x, y: t * y, lambda t, x, y: x * t)
      >>> print(jax.grad(lambda x: op(x, 3.0, outs=lambda x, y: x))(2.0))
      3.0
    """
    op = getattr(primitive, "op", primitive)
    if isinstance(op, XLACustomKernel):
        op.def_jvp_rule2(*jvp_rules)
    elif isinstance(op, Primitive):
        ad.primitive_jvps[op] = functools.partial(_jvp_of_primitive, op, jvp_rules)
    else:
        raise TypeError(f"defjvp: expected an XLACustomKernel or a jax Primitive, got {op!r}")


def _jvp_of_primitive(primitive: Any, rules: Sequence, primals: Any, tangents: Any, /, **params: Any) -> tuple:
    """The jvp rule of a primitive that is no op."""
    results = primitive.bind(*primals, **params)
    outputs = results if primitive.multiple_results else [results]
    tangents_out = _jvp_by_operand(primitive.name, rules, primals, tangents, outputs, params)
    return results, tangents_out if primitive.multiple_results else tangents_out[0]


def _jvp_by_operand(
    name: str, rules: Sequence, primals: Sequence, tangents: Sequence, outputs: Sequence, params: dict
) -> list:
    """The tangents of the outputs: what each operand's rule gives, added up."""
    if len(rules) != len(primals):
        raise ValueError(f"{name!r} has {len(rules)} jvp rules for {len(primals)} operands; give each one")
    avals = list(map(jax.typeof, outputs))
    totals: list = list(map(_zero_tangent, outputs))
    for i, (rule, tangent) in enumerate(zip(rules, tangents)):
        if rule is None or type(tangent) is ad.Zero:
            continue
        returned = rule(tangent, *primals, **params)
        what = f"the jvp rule of {name!r} for operand {i}"
        for j, term in enumerate(_from_rule(what, returned, "the outputs are", avals)):
            if term is not None:
                totals[j] = ad.add_tangents(totals[j], term)
    return totals


def _op_jvp(op_params: _OpParams, primals: Sequence, tangents: Sequence) -> tuple:
    """The op's jvp rule, which is for one slice, under the recorded vmaps."""
    rule = _derivative_rule(op_params.op, "jvp")
    what = f"the jvp rule of {op_params.op.name!r}"
    one_slice = dataclasses.replace(op_params, vmaps=(), batch=(), batching_rule=None)

    def of_slice(primals: tuple, tangents: tuple) -> tuple:
        if isinstance(rule, list):  # of `defjvp`
            outputs = one_slice.bind(*primals)
            tangents_out = _jvp_by_operand(op_params.op.name, rule, primals, tangents, outputs, op_params.rule_params)
        else:
            outputs, tangents_out = rule(primals, tangents, **op_params.rule_params)
            outputs = _as_declared(what, jax.tree.leaves(outputs), "outs declares", op_params.outs)
        return outputs, _from_rule(what, tangents_out, "the outputs are", list(map(jax.typeof, outputs)))

    vmaps = [(in_axes, in_axes) for in_axes in op_params.vmaps]
    outputs, tangents_out = _vmap_rule(of_slice, vmaps, primals, tangents)
    return outputs, [_zero_tangent(x) if t is None else t for x, t in zip(outputs, tangents_out)]


def _zero_tangent(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _op_transpose(op_params: _OpParams, cts: Sequence, *operands: Any) -> list:
    """The op's transpose rule, which is for one slice, under the recorded vmaps."""
    rule = _derivative_rule(op_params.op, "transpose")
    if all(type(ct) is ad.Zero for ct in cts):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    what = f"the transpose rule of {op_params.op.name!r}"

    def of_slice(cts: tuple, operands: tuple) -> list:
        avals = [x.aval if ad.is_undefined_primal(x) else None for x in operands]
        return _from_rule(what, rule(list(cts), *operands, **op_params.rule_params), "the operands are", avals)

    vmaps = [((0,) * len(cts), in_axes) for in_axes in op_params.vmaps]
    results = _vmap_rule(of_slice, vmaps, cts, operands)
    for i, ct in enumerate(results):
        if ct is not None:
            shared = [d for d, in_axes in enumerate(op_params.vmaps) if in_axes[i] is None]
            results[i] = jax.lax.reduce_sum(ct, shared)  # over the slices that share the operand
    return results


def _vmap_rule(of_slice: Callable, vmaps: Sequence[tuple], *groups: Sequence) -> Any:
    """A user's rule of groups of values, such as (primals, tangents), under vmaps: `in_axes` for each of the groups."""
    slices = list(map(tuple, groups))
    for in_axes in vmaps:
        slices = [tuple(map(_symbolic_slice, values, axes)) for values, axes in zip(slices, in_axes)]
    return functools.reduce(jax.vmap, reversed(vmaps), of_slice)(*slices)


def _symbolic_slice(x: Any, axis: int | None) -> Any:
    """A symbolic value with the shape of a slice of its first dimension; anything else as it is."""
    if axis is None or type(x) not in _SYMBOLIC:
        return x
    return type(x)(_out_aval(x.aval.shape[1:], x.aval.dtype, [x.aval], x.aval.sharding.spec[1:]))


def _bind_with_vjp(op_params: _OpParams, ins: Sequence, fwd: Callable, bwd: Callable) -> list:
    """Bind the op with its vjp rule."""
    avals = list(map(jax.typeof, ins))
    params = op_params.rule_params
    what = f"the vjp rule of {op_params.op.name!r}"

    def forward(*ins: Any) -> tuple:
        returned = fwd(*ins, **params)
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise TypeError(f"{what}: fwd must return (results, residuals); got {returned!r:.80}")
        return _outputs(what, returned[0], op_params.outs, op_params.tree), returned[1]

    def backward(residuals: Any, cotangents: Any) -> tuple:
        returned = bwd(residuals, op_params.tree.unflatten(cotangents), **params)
        return tuple(_from_rule(what, returned, "the operands are", avals))

    return _with_vjp(op_params.bind, forward, backward)(*ins)


def _from_rule(what: str, returned: Any, declares: str, avals: Sequence) -> list:
    """What a rule returned, as arrays of these types: None for zeros, and where a type is None or has no derivative."""
    if not isinstance(returned, (list, tuple)):
        returned = [returned]
    terms = [None if isinstance(x, _SYMBOLIC) else x for x in returned]
    expected = [aval if aval and jax.dtypes.issubdtype(aval.dtype, np.inexact) else None for aval in avals]
    arrays = _as_declared(what, terms, declares, expected)
    return [None if x is None or aval is None else _sharded_like(x, aval) for x, aval in zip(arrays, expected)]


def _derivative_rule(op: XLACustomKernel, kind: str) -> Any:
    rule = op._rules.get(kind)
    if rule is None:
        raise NotImplementedError(
            f"{op.title} has no {kind} rule, which a derivative needs: use def_{kind}_rule, def_jvp_rule2 (where one "
            "calls the op on tangents, in jax.numpy) or def_vjp_rule, or keep the op out with jax.lax.stop_gradient"
        )
    return rule


# ======================================================================================================
# 12. Backends: one row each; and the self-check, python -m xla_kernels.
# What each backend needs, and how it takes a ready kernel.


class _Backend(NamedTuple):
    platforms: dict[str, str]  # where it runs -> how to get it there
    ready: tuple[str, ...]  # packages and classes of compiled kernels: as names, so that nothing is imported for them
    wrap: Callable  # (ready kernel, outs, **options) -> function of arrays
    check: Callable[[], Any]  # makes the function that the self-check calls: 2 * x + y


def _check_numba() -> Callable:
    def kernel(x: Any, y: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = 2 * x[i] + y[i]

    return numba_kernel(kernel, outs=lambda x, y: x)


def _check_numba_cuda() -> Callable:
    package = "numba_cuda_mlir" if importlib.util.find_spec("numba_cuda_mlir") else "numba"
    cuda = _import(f"{package}.cuda", "the check of numba_cuda", _CUDA_INSTALL)

    @cuda.jit
    def kernel(x: Any, y: Any, out: Any) -> None:
        i = cuda.grid(1)
        if i < out.size:
            out[i] = 2 * x[i] + y[i]

    return numba_cuda_kernel(kernel, outs=lambda x, y: x, launch_dims=lambda x, y: x.shape)


def _check_warp() -> Callable:
    wp = _import("warp", "the check of warp", _WARP_INSTALL)

    def kernel(x, y, out):  # type: ignore[no-untyped-def]
        i = wp.tid()
        out[i] = 2.0 * x[i] + y[i]

    kernel.__annotations__ = dict.fromkeys(("x", "y", "out"), wp.array(dtype=wp.float32))
    return warp_kernel(wp.kernel(kernel), outs=lambda x, y: x)


_BACKENDS = {
    "numba": _Backend(
        platforms={"cpu": _NUMBA_INSTALL},
        ready=("numba.Dispatcher", "numba.DUFunc", "numba.GUFunc"),
        wrap=numba_kernel,
        check=_check_numba,
    ),
    "warp": _Backend(
        platforms={"cpu": _WARP_INSTALL, "gpu": 'an NVIDIA GPU, pip install "jax[cuda13]" warp-lang numba'},
        ready=("warp.Kernel",),
        wrap=warp_kernel,
        check=_check_warp,
    ),
    "numba_cuda": _Backend(
        platforms={"gpu": f"an NVIDIA GPU, {_CUDA_INSTALL}"},
        ready=(
            *("numba.CUDADispatcher", "numba.FakeCUDAKernel"),
            *("numba_cuda.CUDADispatcher", "numba_cuda.FakeCUDAKernel", "numba_cuda_mlir.MLIRDispatcher"),
        ),
        wrap=numba_cuda_kernel,
        check=_check_numba_cuda,
    ),
}


def _self_check() -> int:
    """Run `2 * x + y` through every backend; returns 1 if one that is installed is wrong."""
    print(f"xla_kernels {__version__}, Python {sys.version.split()[0]}, jax {jax.__version__}, NumPy {np.__version__}")
    print(f"platform {jax.default_backend()}, {jax.device_count()} device(s)\n")
    status = 0
    for name, backend in _BACKENDS.items():
        for platform, install in backend.platforms.items():
            try:
                devices = _local_devices(platform)
                if not devices:
                    raise ImportError(f"JAX finds no {platform}")
                result = f"works, {_cost_per_call(backend.check(), devices[0]):.2f} µs per call under jit"
            except ImportError as error:
                result = f"not available: {error}\n{'':17}to get it: {install}"
            except Exception as error:
                status = 1
                result = f"FAILED: {type(error).__name__}: {error}"
            print(f"{name:11} {platform:4} {result}")
    return status


def _cost_per_call(call: Callable, device: Any) -> float:
    """Compare a call with NumPy, then time it in a loop: microseconds, at best."""
    x = np.arange(16, dtype=np.float32)
    y = x + 1
    operands = jax.device_put((x, y), device)
    np.testing.assert_array_equal(call(*operands), 2 * x + y)
    loop = jax.jit(lambda x, y: jax.lax.fori_loop(0, 10_000, lambda i, z: call(y, z), x))
    timer = timeit.Timer(lambda: loop(*operands).block_until_ready())
    return min(timer.repeat(6, 1)) / 10_000 * 1e6  # the first one compiles


if __name__ == "__main__":
    sys.exit(_self_check())
