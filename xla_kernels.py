# Copyright 2026 the authors of xla_kernels.  SPDX-License-Identifier: Apache-2.0
"""Call kernels written in Python (Numba, Numba CUDA, NVIDIA Warp) from JAX.

A wrapper turns a kernel into a JAX function.  On a CPU, a call is about as fast as a call of a C++ function through
XLA's FFI.  This module is one file, to copy into a project or to install.

    import jax, jax.numpy as jnp
    from xla_kernels import numba_kernel

    @numba_kernel(outs=lambda x, y: x)           # the output has the shape and dtype of x
    def add(x, y, out):
        out[:] = x + y

    add(jnp.arange(3.0), jnp.ones(3))            # also under jit, vmap, scan, shard_map and export

A Numba kernel on CPUs may also return its outputs: `numba_kernel(lambda x: 2 * x, outs=lambda x: x)`.  The other main
public names are `numba_cuda_kernel`, `numba_cuda_callable`, `warp_kernel`, and `XLACustomKernel`, an operation with
several backends.  `warp_kernel(differentiable=True)` and an `XLACustomKernel` with rules have derivatives.  Wrap other
kernels in `jax.custom_vjp` to differentiate them.

The contract:

- A mistake raises an error that names its fix.  The list below and the wrappers' docstrings say what is not checked.
- The caller's arrays do not change, except by the stores listed below.  If a kernel updates an argument whose old value
  is used again, XLA copies it first.
- New outputs and `scratch` buffers start from zeros, unless `zero_outputs=False`.

Not checked, and the user's responsibility:

- indices, by default: an index out of bounds corrupts memory, as in C
- stores to inputs by your own intrinsics, overloads and types, by C or C++ code that Numba kernels call, through raw
  addresses, and by the Python code of a `numba_cuda_callable`
- stores to global device arrays
- static parameters of your own types whose `__eq__` is true for different values: a call may use an earlier value
- globals that another thread assigns during a compilation: the kernel may contain the old or the new value

The module needs Python 3.12, jax 0.9 and NumPy 2.0, or later versions.  All wrappers need Numba 0.63 or later, whose
LLVM compiles the handlers.  Warp kernels also need Warp 1.14 or later.  `python -m xla_kernels` shows which backends
work here.
"""

# A map of this file.
#
#     1  JAX               differences between versions of JAX, and small helpers that JAX lacks
#     2  C structs         the structs of XLA's C API that a handler reads and writes
#     3  Targets           captured values, fingerprints, names, registration, lifetimes
#     4  Specs and inputs  checks of declared outputs and of arguments, while the user's call is on the stack
#     5  The primitive     one call of one target, its partitioning over a mesh, and `_Wrapper`
#     6  The handler       the machine code that XLA calls, and the scheduler that runs the slices of a batch
#     7  Numba on CPUs     the wrapper, and the emitter that calls the code that Numba compiled
#     8  Stores            the arrays that a kernel only reads, and those to which it may store
#     9  Numba CUDA        the wrappers, launch configurations, and the emitter that launches a kernel
#     10 Warp              the wrapper, its derivative, and the emitter that launches a kernel on CPUs and GPUs
#     11 XLACustomKernel   one operation with many backends, for all transformations of JAX
#     12 Backends          a table of the backends, and the self-check
#     13 Warnings          about Warp kernels: gradients that Warp gets wrong, and deferred statics
#
# A section mostly uses the sections above it.  The main exceptions: 3 uses `_Signature` and `_decorated_backend` of 5,
# 5 uses `_NUMBA_INSTALL` of 7 and `_BACKENDS` of 12, 3 uses functions of 9 for batches on GPUs, 7 uses 8.1, and 10
# calls the two functions of 13 that warn.  A new backend needs a section like section 7, a row in `_BACKENDS`, and a
# `def_..._kernel` method.
#
# A call of a `numba_kernel`, from the user to XLA.  The other backends have similar steps:
#
#     `_Wrapper.__call__`                       converts the arguments, and evaluates `outs`
#     `_NumbaKernel._find_target`               checks the call
#       `_TargetRegistry.numba_target_name`     looks up the target, or compiles, names and registers it:
#         `_NumbaCompiler`                      compiles the kernel, and checks its accesses to inputs and outputs
#         `_HandlerBuilder`, with an emitter    writes the handler
#     `_CallParams.bind`                        binds the primitive
#     `_call_lowering`                          lowers the primitive to a custom call, which XLA compiles and runs
#     the handler, with `run_batch`             runs the kernel, once per slice
#
# `_Wrapper`, section 6 and section 11 begin with more detailed diagrams, of a wrapper, a handler and an op.
#
# Glossary.
#
#     spec               a `jax.ShapeDtypeStruct`: the shape and dtype of an array
#     buffer             an input, output or scratch array of a call
#     scratch buffer     a temporary array that a kernel gets after its outputs, and that is not returned
#     in-out argument    an argument that a kernel updates: its old value is an input, and its new value an output
#     result             a result of the custom call: the outputs come first, then the scratch buffers
#     alias              a pair (i, j): result j of the custom call starts with the value of input i
#     batch, slice       a call under `vmap`; an element of a batch, for which the kernel runs once
#     step               the number of bytes from one slice of a buffer to the next; 0 if that is the same slice
#     replicated         of an operand: passed whole to each device of a mesh, instead of partitioned
#     operand            an input as the primitive gets it, with its batch dimensions
#     wrapper            the object that `numba_kernel` and the other public functions return
#     op                 an `XLACustomKernel`
#     static parameter   a keyword argument of an op, such as `power=2`, whose value is fixed when JAX traces the call
#     argument by value  of a Warp kernel: one that is not an array; its value is fixed when JAX traces the call
#     generator          a function of an op's static parameters that returns a kernel
#     decorated kernel   a kernel that is already decorated with `@njit`, `@cuda.jit` or `@wp.kernel`
#     callable           of `numba_cuda_callable`: a Python function that runs in each call and launches CUDA kernels
#     helper             a `@njit`, `@cuda.jit` or `@wp.func` function that a kernel references
#     captured values    the globals, closure variables and defaults that a kernel references
#     signature          a `_Signature`: the dtypes and ranks of the buffers of a call, its aliases and zeroed results
#     explicit signature the argument types in a Numba decorator: @njit("float64(float64)")
#     specialization     the signature, options and name for which a kernel is compiled
#     target             a custom-call target: a name under which XLA finds a handler
#     label              the name of a kernel, such as "add", in signatures
#     title              the name of a wrapper or kernel in messages, such as "numba_kernel 'add'", or "Kernel 'add'"
#     handler            the machine code that XLA calls for a target
#     frame              the XLA_FFI_CallFrame with which XLA calls a handler: the buffers and attributes of the call
#     inner loop         the function of a handler that runs consecutive slices
#     emitter            the object that writes a backend's part of a handler
#     argument map       the buffer of each parameter of a kernel, and how it is passed
#     adapter            a function of all buffers, in order, that calls a kernel with the arguments that it takes
#     fingerprint        the code, options and captured values of a Numba kernel, in a form that can be compared
#     launch attribute   the int64 array `launch` of a custom call, which configures a launch; empty for Numba on CPUs
#     batch launch       a launch on a GPU for many slices of a batch, which lie along z of the grid

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import copy
import ctypes
import dataclasses
import dis
import enum
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

__version__ = "0.8.0"
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
# 1. JAX: differences between its versions, and small helpers that it lacks.
#
# Checked with jax 0.9.0 to 0.12.0.1.  The main undocumented parts of JAX in use, and tests that fail if they change:
#
# - `jax.interpreters.ad`, `.batching` and `.mlir` define a primitive (5.1, 11.3, 11.4, 11.6): most tests.
# - `ctx.platforms` and `ctx.module_context` of lowering rules: test_op_kernel_is_chosen_by_lowering_platform,
#   test_side_effect_on_mesh_needs_shard_map_over_all_axes.
# - `_apply_primitive` marks functions that `jax_debug_nans` must not run again: test_debug_nans_detects_nan_of_kernel.
# - `aval.sharding` has the mesh of a type, and `aval.manual_axis_type` (`aval.vma` if jax < 0.11) its varying axes:
#   test_xla_partitions_batch_without_communication.
# - The effect of `jax.ffi.ffi_call` is read from a jaxpr (`_side_effects`):
#   test_side_effect_keeps_unused_and_equal_calls.
# - `val` of the tracers of `vmap` is the batched value: test_op_vjp_rule_handles_integers_and_structured_outs.
# - `jax.export` reads `disabled_checks` after lowering (`export_checks`): test_exported_kernel_accepts_symbolic_shape.

_Spec = jax.ShapeDtypeStruct
_SYMBOLIC_TYPES = (ad.Zero, ad.UndefinedPrimal)  # derivative rules may get these instead of arrays
_Primitive: Any = type(jax.lax.add_p)  # jax.extend.core.Primitive, without the slow import of jax.extend

# For `warnings.warn(skip_file_prefixes=...)`, so that warnings point to the user's line.  CPython 3.12 and 3.13 do not
# accept a whole file name as a prefix, so the last letter of this file's name is left out.
_INTERNAL_FILE_PREFIXES = (__file__[:-1], os.path.join(os.path.dirname(jax.__file__), ""))

_LOG = logging.getLogger(__name__)


def _import(module: str, needed_by: str, install: str) -> Any:
    """Import an optional package.  If that fails, raise an error with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{needed_by} needs {package} ({error}). Install it: {install}") from error


def _counted(n: int, noun: str) -> str:
    """Return a number and a noun, such as "1 input" or "2 inputs"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


# -- 1.1 Platforms and devices -------------------------------------------------------------------------
# Lowering rules, and so targets and wrappers, call the platform of NVIDIA GPUs "cuda".  JAX's devices and ops (11) call
# it "gpu", which is also AMD's "rocm".  Only XLA's registration of handlers needs "CUDA".


def _platform_name(platform: str) -> str:
    """Return the name that ops use: "gpu" instead of "cuda" and "rocm", and any other platform unchanged."""
    return "gpu" if platform in ("cuda", "rocm") else platform


def _default_platform() -> str:
    """Return "cpu", "gpu", ...: where JAX runs a program, unless its inputs are committed to other devices."""
    device_or_platform = jax.config.jax_default_device or jax.default_backend()
    return _platform_name(getattr(device_or_platform, "platform", device_or_platform))


def _local_devices(platform: str) -> list:
    """Return the devices of this process on a platform.  If JAX does not have the platform, return an empty list."""
    with contextlib.suppress(RuntimeError):
        return jax.local_devices(backend=platform)
    return []


# -- 1.2 Calling primitives, tracing, lowering ---------------------------------------------------------


def _define_impl(primitive: Any, param_name: str) -> None:
    """Let JAX compile and run a primitive that is bound outside of `jax.jit`.  The primitive has one parameter."""
    bind: Any = functools.partial(primitive.bind)  # unlike a bound method, a partial can have attributes
    bind.__name__ = bind.__qualname__ = primitive.name  # JAX names the compiled program after it
    bind._apply_primitive = True  # otherwise jax_debug_nans calls `bind` again, up to a RecursionError
    jitted = jax.jit(bind, static_argnames=param_name)

    @primitive.def_impl
    def impl(*args: Any, **params: Any) -> Any:
        # Under `jax.disable_jit`, `jitted` would bind the primitive again, and so call this function forever.
        with jax.disable_jit(False):
            return jitted(*args, **params)


def _lowering_platforms(ctx: Any) -> Sequence[str]:
    """Return the platforms for which a lowering rule generates code: those of the program, or a subset of them."""
    return ctx.platforms or ctx.module_context.platforms


def _lower(function: Callable, ctx: Any, operands: Sequence) -> Any:
    """Return the lowered results of `function(*operands)`, a function of arrays that returns a sequence of arrays."""
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


@functools.cache
def _side_effects() -> frozenset:
    """Return the effects of a `jax.ffi.ffi_call` with side effects.  JAX has rules for them.

    The call is only traced, so its target need not exist.
    """
    call = jax.ffi.ffi_call("xla_kernels.effect", (), has_side_effect=True)
    return frozenset(jax.make_jaxpr(call)().effects)


def _with_vjp(function: Callable, forward: Callable, backward: Callable) -> Callable:
    """Add a VJP rule to a function.  Its inputs may be batched NumPy arrays, and may vary over different mesh axes."""
    with_vjp = jax.custom_vjp(function)
    with_vjp.defvjp(forward, backward)
    return lambda *args: with_vjp(*map(_numpy_to_jax, _make_varying(args)))


def _numpy_to_jax(x: Any) -> Any:
    """If `x` is a NumPy array, or a `vmap` tracer of one, return it as a JAX array.  Otherwise return `x`.

    Under `jax.jit`, `jax.custom_vjp` rejects such tracers (jax 0.11 and 0.12), and `jnp.asarray` does not change them.
    """
    value = x
    while isinstance(value, jax.core.Tracer):
        value = getattr(value, "val", None)  # the batched value of a tracer of `vmap`; other tracers have none
    return jax.numpy.copy(x) if isinstance(value, np.ndarray) else x  # XLA removes this copy


def _batch_in_front(x: Any, dim: int | None, size: int) -> Any:
    """Return an operand with its batch dimension in front.  If it has none, broadcast it to `size`."""
    if not isinstance(x, jax.Array):
        x = np.asarray(x)  # jax < 0.9.2 cannot move axes of a `TypedNdArray`, a constant of a jaxpr
    return batching.bdim_at_front(x, dim, size)


def _zeros(like: Any) -> Any:
    """Return `jnp.zeros_like(like)`, but keep 64 bits even if x64 is disabled."""
    return ad.instantiate_zeros(ad.Zero(jax.core.ShapedArray(like.shape, like.dtype)))


def _zero_tangent(x: Any) -> Any:
    """Return the symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


# -- 1.3 Meshes, and the types of values on them -------------------------------------------------------


def _mesh_of(avals: Sequence) -> Any:
    """Return the mesh of the first type that has one, or the current mesh, which may be empty.

    A mesh with explicit axes is part of types even where it is not the current mesh.
    """
    for aval in avals:
        if not aval.sharding.mesh.empty:
            return aval.sharding.mesh
    return jax.sharding.get_abstract_mesh()


def _varying_axes(aval: Any) -> frozenset:
    """Return the manual mesh axes over which a value varies inside `shard_map`."""
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.11
        return aval.manual_axis_type.varying
    return aval.vma


def _all_varying_axes(avals: Iterable) -> frozenset:
    """Return the manual mesh axes over which at least one of the values varies."""
    return frozenset().union(*map(_varying_axes, avals))


def _varying_kwargs(axes: frozenset) -> dict[str, Any]:
    """Return the keyword arguments that make an abstract value or a spec vary over these axes.

    A generator of an op may pass its `outs` to Pallas as `out_shape`, and Pallas needs these axes to type its results.
    """
    if not axes:
        return {}
    if hasattr(jax.sharding, "ManualAxisType"):  # jax >= 0.11
        return {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    return {"vma": axes}


def _out_aval(shape: tuple, dtype: Any, in_avals: Sequence, partition: Sequence = ()) -> Any:
    """Return the abstract value of a result, on the mesh of the inputs, sharded like `PartitionSpec(*partition)`."""
    mesh = _mesh_of(in_avals)
    if mesh.empty:  # without a mesh, no value varies
        return jax.core.ShapedArray(shape, dtype)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*partition))
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, **_varying_kwargs(_all_varying_axes(in_avals)))


def _batch_partition(operand_axes_per_dim: Iterable[Iterable[Any]]) -> list:
    """For each batch dimension, return the first mesh axis that an operand is sharded over, or None.

    Two operands, of which the second is sharded over "x" in dimension 0: [[None, "x"], [None, None]] -> ["x", None].
    """
    return [next(filter(None, axes), None) for axes in operand_axes_per_dim]


def _make_varying(args: Sequence) -> list:
    """Cast inputs to vary over the same manual mesh axes.  The transpose of a cast sums cotangents over these axes."""
    axes = _all_varying_axes(map(jax.typeof, args))
    return [jax.lax.pcast(x, tuple(axes - _varying_axes(jax.typeof(x))), to="varying") for x in args]


def _sharded_like(x: Any, aval: Any) -> Any:
    """Return `x` with the sharding of `aval`.  Only meshes with explicit axes have shardings in types."""
    is_explicit = jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types
    return jax.sharding.reshard(x, aval.sharding) if is_explicit else x


def _num_partitions(ctx: Any) -> int:
    """Return the number of devices over which XLA partitions the program.

    Inside `shard_map`, these are the devices along the axes that are not manual.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):  # inside `shard_map`
        mesh = _mesh_of([*ctx.avals_in, *ctx.avals_out])
        return math.prod(size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)
    return getattr(context, "num_devices", 1)


# ======================================================================================================
# 2. C structs: the part of jaxlib/include/xla/ffi/api/c_api.h that a handler reads and writes.
#
# The names and the order of fields are those of jaxlib 0.12 (test_mirrored_structs_equal_the_header).  In jaxlib 0.9,
# some structs have other names.  A later jaxlib may add fields at the end of a struct, which a handler does not read.
# If XLA moves fields or changes their types, it increments the API's major version, and rejects handlers of older ones.

_PTR = ctypes.c_void_p  # a pointer of any type
_I64 = ctypes.c_int64
_I32 = ctypes.c_int32  # also C enums
_SIZE = ctypes.c_size_t

_API_MAJOR = 0  # XLA_FFI_API_MAJOR
_STAGE_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_EXTENSION_METADATA = 1  # XLA_FFI_Extension_Metadata
_ERROR_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_COMMAND_BUFFER_COMPATIBLE = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE: CUDA graphs can capture the handler


def _struct(**fields: Any) -> Any:
    """Return a ctypes struct with these fields."""
    return type("Struct", (ctypes.Structure,), {"_fields_": list(fields.items())})


def _extensible_struct(**fields: Any) -> Any:
    """Return a ctypes struct of the two fields that nearly all structs of XLA begin with, and of these fields."""
    return _struct(
        struct_size=_SIZE,  # of this struct, in bytes
        extension_start=_PTR,  # a linked list of `XLA_FFI_InternalExtension`, or 0
        **fields,
    )


# -- registration: XLA calls the handler once with an extension of type _EXTENSION_METADATA --

XLA_FFI_InternalExtension = _struct(struct_size=_SIZE, type=_I32, next=_PTR)
XLA_FFI_Api_Version = _extensible_struct(major_version=_I32, minor_version=_I32)
XLA_FFI_Metadata = _struct(struct_size=_SIZE, api_version=XLA_FFI_Api_Version, traits=_I32)
XLA_FFI_Metadata_Extension = _struct(
    extension_base=XLA_FFI_InternalExtension,
    metadata=ctypes.POINTER(XLA_FFI_Metadata),  # the handler writes its version and its traits here
)

# -- the inputs, outputs and attributes of a call --

XLA_FFI_Buffer = _extensible_struct(
    dtype=_I32,
    data=_PTR,
    rank=_I64,
    dims=_PTR,  # int64[rank]
)
XLA_FFI_Array = _struct(  # the value of an attribute, such as `launch`
    dtype=_I32,
    size=_SIZE,  # number of elements
    data=_PTR,
)
XLA_FFI_Args = _extensible_struct(
    size=_I64,  # number of inputs
    types=_PTR,  # not read, because all inputs are buffers
    args=_PTR,  # XLA_FFI_Buffer*[size]
)
XLA_FFI_Rets = _extensible_struct(
    size=_I64,  # number of results: outputs, then scratch buffers
    types=_PTR,  # not read, because all results are buffers
    rets=_PTR,  # XLA_FFI_Buffer*[size]
)
XLA_FFI_Attrs = _extensible_struct(
    size=_I64,  # 1, because `launch` is the only attribute
    types=_PTR,  # not read
    names=_PTR,  # not read
    attrs=_PTR,  # XLA_FFI_Array*[size]
)

# -- the arguments of API functions: `XLA_FFI_Error* function(arguments*)`.  Their `ctx` is `XLA_FFI_CallFrame.ctx`. --

XLA_FFI_Error_Create_Args = _extensible_struct(
    message=_PTR,  # a C string, which XLA copies
    errc=_I32,
)
XLA_FFI_Error_Destroy_Args = _extensible_struct(error=_PTR)
XLA_FFI_ThreadPool_Schedule_Args = _extensible_struct(
    ctx=_PTR,
    task=_PTR,  # a function that XLA calls with `data` on a thread of its pool
    data=_PTR,
)
XLA_FFI_ThreadPool_NumThreads_Args = _extensible_struct(
    ctx=_PTR,
    num_threads=_PTR,  # int64*, a result
)
XLA_FFI_Stream_Get_Args = _extensible_struct(
    ctx=_PTR,
    stream=_PTR,  # a result
)
XLA_FFI_DeviceOrdinal_Get_Args = _extensible_struct(
    ctx=_PTR,
    device_ordinal=_I32,  # a result
)

XLA_FFI_Api = _extensible_struct(
    api_version=XLA_FFI_Api_Version,
    internal_api=_PTR,
    # The addresses of the API functions, in XLA's order:
    XLA_FFI_Error_Create=_PTR,
    XLA_FFI_Error_GetDetails=_PTR,
    XLA_FFI_Error_Destroy=_PTR,
    XLA_FFI_Handler_Register=_PTR,
    XLA_FFI_Stream_Get=_PTR,
    XLA_FFI_Type_Register=_PTR,
    XLA_FFI_InvokeContext_Get=_PTR,
    XLA_FFI_State_Set=_PTR,
    XLA_FFI_State_Get=_PTR,
    XLA_FFI_DeviceMemory_Allocate=_PTR,
    XLA_FFI_DeviceMemory_Free=_PTR,
    XLA_FFI_ThreadPool_Schedule=_PTR,
    XLA_FFI_ThreadPool_NumThreads=_PTR,
    XLA_FFI_Future_Create=_PTR,
    XLA_FFI_Future_SetAvailable=_PTR,
    XLA_FFI_Future_SetError=_PTR,
    XLA_FFI_RunId_Get=_PTR,
    XLA_FFI_DeviceOrdinal_Get=_PTR,
)

XLA_FFI_CallFrame = _extensible_struct(  # the argument of a handler
    api=ctypes.POINTER(XLA_FFI_Api),
    ctx=_PTR,  # XLA_FFI_InvokeContext*
    stage=_I32,
    args=XLA_FFI_Args,
    rets=XLA_FFI_Rets,
    attrs=XLA_FFI_Attrs,
)


# ======================================================================================================
# 3. Targets: captured values, fingerprints, names, registration, lifetimes.
#
# XLA programs refer to handlers only by target names, which XLA looks up in the process that runs the program.  Another
# process may have compiled the program: programs can be exported, and JAX caches them on disk.  Therefore:
# - A target name contains a hash, which is the same in all processes while the kernel is unchanged.
# - Within a process, kernels that may differ never have the same target name, even if their hashes are equal (3.3).
#
# Each call of this function creates a kernel:
#
#     def scaled(x, factor):
#         return numba_kernel(lambda x: factor * x, outs=lambda x: x)(x)
#
# Kernels with equal factors have the same fingerprint (3.2), and share a target.  A new factor changes the fingerprint,
# and so compiles a handler, which stays registered forever.  A factor that changes often should be an input.
#
# Numba reads captured values when it compiles a specialization.  If a captured variable is reassigned later, the
# specialization keeps the old value.  A call with another dtype or rank, and a new wrapper of a plain function, read
# the new value.  A new wrapper of a decorated kernel does not, because the kernel keeps its specializations.

# -- 3.1 Captured values -------------------------------------------------------------------------------
# The globals, closure variables and defaults that the code of a kernel references.  They are used for fingerprints
# (3.2), for checks of stores (8), and to find the CUDA package that a callable uses (9.3).


def _py_func(kernel: Any) -> Any:
    """Return the Python function of a Numba or Warp kernel.  Return any other object itself."""
    if hasattr(kernel, "adj"):  # only kernels and functions of Warp have this attribute
        return getattr(kernel, "func", None) or kernel
    dispatcher = getattr(kernel, "_dispatcher", kernel)  # numba.vectorize keeps its dispatcher there
    return getattr(dispatcher, "py_func", None) or kernel


# NumPy, Numba, and the part of Python's library that Numba compiles.  Their attributes are expected to stay the same.
_LIBRARY_MODULES = frozenset("_operator builtins cmath heapq math numba numba_cuda_mlir numpy operator".split())


def _is_library_module(name: Any) -> bool:
    """Return whether the module of this name, or the package that it is in, is one of `_LIBRARY_MODULES`."""
    return str(name).partition(".")[0] in _LIBRARY_MODULES


_EMPTY_CODE = compile("", "", "exec")


def _code_of(kernel: Any) -> types.CodeType:
    """Return the code of a kernel.  If it has no Python function, return an empty code object."""
    return getattr(_py_func(kernel), "__code__", _EMPTY_CODE)


@functools.lru_cache(maxsize=1024)
def _referenced_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a code object and in nested functions, each name once."""
    return tuple(dict.fromkeys(name for part in _code_and_nested(code) for name in part.co_names))


def _code_and_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, followed by those of nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_and_nested(constant)


def _referenced_variables(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals, builtins and closure variables that the code of a function may reference.

    A code object does not tell globals and attributes apart.  If the code has `x.size`, and there is a global `size`,
    the result includes `size`.
    """
    names = _referenced_names(function.__code__)
    namespace = collections.ChainMap(function.__globals__, vars(builtins))
    variables = {name: namespace[name] for name in names if name in namespace}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # the cell is empty: the variable is not assigned yet
            variables[name] = cell.cell_contents
    return variables


def _captured_values(kernel: Any) -> list[tuple[str, Any]]:
    """Return a (name, value) pair for each variable and default that a kernel references, and for their parts.

    The parts are the items of tuples and lists, and the attributes of modules, except of library modules.  As in
    `_referenced_variables`, each name in the code may be an attribute of each module.  For `sizes.ROW[0]`:

        [("sizes", <module 'sizes'>), ("ROW", (3, 4)), ("ROW", 3), ("ROW", 4), ("(defaults)", None), ...]

    If the kernel has no Python function, return no pairs.
    """
    function = _py_func(kernel)
    if not isinstance(function, types.FunctionType):
        return []
    attributes = _referenced_names(function.__code__)
    pairs: list[tuple[str, Any]] = []
    visited_modules: list[types.ModuleType] = []  # modules may import each other

    def add(name: str, value: Any) -> None:
        for part in _value_and_items(value):
            pairs.append((name, part))
            if isinstance(part, types.ModuleType) and not _is_library_module(part.__name__):
                add_attributes(part)

    def add_attributes(module: types.ModuleType) -> None:
        if module not in visited_modules:
            visited_modules.append(module)
            for attribute in attributes:
                if attribute in vars(module):
                    add(attribute, vars(module)[attribute])

    for name, value in _referenced_variables(function).items():
        add(name, value)
    add("(defaults)", function.__defaults__)
    add("(keyword defaults)", tuple((function.__kwdefaults__ or {}).items()))
    return pairs


def _value_and_items(value: Any, container_ids: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield a value, and the items of a tuple or list, recursively: (1, [2]) yields (1, [2]), 1, [2] and 2.

    `container_ids` has the `id` of each tuple and list around the value, because a list may contain itself.
    """
    yield value
    if isinstance(value, (tuple, list)) and id(value) not in container_ids:
        for item in value:
            yield from _value_and_items(item, (*container_ids, id(value)))


def _kernel_and_helpers(kernel: Any) -> list[Any]:
    """Return a kernel, followed by its helpers: the jitted functions that it references, directly or indirectly."""
    functions = [kernel]
    for function in functions:  # the list grows in this loop
        for _, value in _captured_values(function):
            if _decorated_backend(value) in ("numba", "numba_cuda") and value not in functions:
                functions.append(value)
    return functions


# -- 3.2 Fingerprints: which kernels compile to the same machine code ----------------------------------
# Numba, unlike Warp, has no hash of a kernel that covers captured values.  So a fingerprint has a line of text for each
# option, code object and captured value of a kernel and its helpers.  The text is equal in all processes, so target
# names contain its hash.  Numba kernels with different fingerprints never share a target.
#
# Code, literals and small arrays have an exact text: equal texts mean equal values.  For a tuple or list, this is true
# together with the lines of its items.  Other values only have a summary, which may be the same for two values, such
# as two helpers that one `def` creates.  So they are also compared by identity.  For example:
#
#     n = 2.0
#     @numba.njit(fastmath=True)
#     def kernel(x, out):
#         out[0] = helper(n * x[0])
#
# has these lines among others (where True and 2.0 stand for their pickles).  Only the line of `helper` has a summary.
#
#     code = 9700740100... ('helper', 'n') ...
#     fastmath = bool True
#     helper = CPUDispatcher __main__ helper
#     n = float 2.0
#     code = 97007c0064...                         (of the helper)


class _IdentityKey:
    """A dictionary key that compares by identity and keeps its object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: Any) -> bool:
        # No isinstance: `other` may be of the class from before a reload (see `_REGISTRY`).
        return hasattr(other, "value") and self.value is other.value


class _Fingerprint(NamedTuple):
    """The code, options and captured values of a kernel and its helpers."""

    text: str
    compared_by_identity: tuple[_IdentityKey, ...]  # the values without an exact text


def _fingerprint(kernel: Any) -> _Fingerprint:
    """Return the fingerprint of a kernel and its helpers."""
    lines = []
    compared_by_identity = []
    for function in _kernel_and_helpers(kernel):
        for name, value in _options_and_code(function) + _captured_values(function):
            text = _exact_text(value)
            if text is None:
                text = _summary(value)
                compared_by_identity.append(_IdentityKey(value))
            lines.append(f"{name} = {text}")
    return _Fingerprint("\n".join(lines), tuple(compared_by_identity))


def _options_and_code(function: Any) -> list[tuple[str, Any]]:
    """Return (name, value) pairs: the options and the code of one function, and the items of their values."""
    values = dict(getattr(function, "targetoptions", {}))
    # numba_cuda_mlir, a package for CUDA (9.3), assigns this option when it compiles a kernel.  An equal kernel that is
    # not compiled yet lacks it, so its value must not count.
    values.pop("chip", None)
    # `locals={"n": numba.int8}`.  The text of a type is hashed into target names.  Different types may have the same
    # text, so the type is an item, too, and is compared by identity.
    variable_types = sorted(getattr(function, "locals", {}).items())
    values["locals"] = [(variable, str(numba_type), numba_type) for variable, numba_type in variable_types]
    # The text of a class, not the class: numba_cuda_mlir creates one for each kernel, so no kernels would be equal.
    values["pipeline"] = str(getattr(getattr(function, "_compiler", None), "pipeline_class", None))
    # The class of Numba's cache shows whether the kernel has `cache=True`.  Its machine code may then come from a file,
    # with the captured values of another process.  Kernels without `cache=True` must not share this code.
    values["cache"] = type(getattr(function, "_cache", None)).__name__
    values["code"] = getattr(_py_func(function), "__code__", None)
    return [(name, part) for name in sorted(values) for part in _value_and_items(values[name])]


_LITERAL_TYPES = (bool, int, float, complex, str, bytes, slice, types.NoneType, types.EllipsisType)


def _exact_text(value: Any) -> str | None:
    """Return a text that determines a value, and is equal in all processes.  If there is none, return None.

    For a tuple or list, it is only the type and the length.  Callers add the texts of the items (`_value_and_items`).
    """
    cls = type(value)
    if cls in _LITERAL_TYPES or isinstance(value, np.generic):
        # A pickle also tells NaNs and dtypes apart.  The protocol is fixed, because the default depends on Python.
        return f"{cls.__name__} {pickle.dumps(value, protocol=4)!r}"
    if cls in (tuple, list):
        return f"{cls.__name__} of {len(value)}"
    if cls in (set, frozenset) and all(map(_is_literal, value)):  # such as fastmath={"nnan"}, or `x in {(1, 2)}`
        return f"{cls.__name__} {sorted(map(repr, value))}"
    if _is_plain_array(value) and _is_embedded_by_numba(value):
        return f"{_summary(value)} {hashlib.blake2b(value.tobytes()).hexdigest()}"
    if cls is types.CodeType:
        return _code_text(value)
    return None


def _is_literal(value: Any) -> bool:
    """Return whether the type of a value is in `_LITERAL_TYPES`, or the value is a tuple of such values."""
    return all(map(_is_literal, value)) if type(value) is tuple else type(value) in _LITERAL_TYPES


def _summary(value: Any) -> str:
    """Return a text that is equal in all processes, such as "CPUDispatcher __main__ helper" or "float32 (3,) (4,)"."""
    if _is_plain_array(value):
        return f"{value.dtype} {value.shape} {value.strides}"
    return f"{type(value).__name__} {getattr(value, '__module__', '')} {getattr(value, '__name__', '')}"


def _code_text(code: types.CodeType) -> str:
    """Return a text that determines what a code object does.  It has no line numbers, so the source may move."""
    # Each constant has an exact text, because it is a literal, a tuple, a frozenset of literals, or a code object.
    constants = list(map(_exact_text, _value_and_items(code.co_consts)))
    counts_and_flags = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {(*names, *counts_and_flags)} {constants}"


def _is_plain_array(value: Any) -> bool:
    """Return whether a value is a NumPy array of elements that are not Python objects."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _is_embedded_by_numba(array: np.ndarray) -> bool:
    """Return whether Numba copies the elements of a global array into the machine code, instead of its address."""
    size_limit = 10**6  # the local variable of this name in Numba's `BaseContext.make_constant_array`
    return array.flags.forc and array.nbytes <= size_limit  # forc: contiguous in the order of Fortran or C


def _can_share_target(kernel: Any) -> bool:
    """Return whether the fingerprint of a kernel covers all that decides its machine code.

    It covers the current captured values.  The machine code of a decorated kernel that is already compiled may contain
    older ones.  So a decorated kernel can share a target only if it has no overload yet.
    """
    is_plain_function = isinstance(kernel, types.FunctionType)
    has_no_overloads = not getattr(kernel, "overloads", True)  # True: a ufunc does not show whether it is compiled
    # Numba reads attributes of the function, such as `__wrapped__` for the parameters.  A fingerprint has none of them.
    # Helpers are compared by identity, so equal fingerprints have the same helpers, with the same attributes.
    has_no_attributes = not vars(_py_func(kernel))
    return (is_plain_function or has_no_overloads) and has_no_attributes


def _machine_code_of_helpers(kernel: Any) -> tuple[_IdentityKey, ...]:
    """Return an identity key of each helper's machine code: its first overload, or None if it is not compiled yet.

    `Dispatcher.recompile` replaces all overloads of a helper, and the new ones may contain other captured values.  Any
    other compilation adds an overload at the end.  So the first overload shows whether the helper was recompiled.
    """
    overloads = [getattr(helper, "overloads", {}).values() for helper in _kernel_and_helpers(kernel)[1:]]
    return tuple(_IdentityKey(next(iter(overloads_of_helper), None)) for overloads_of_helper in overloads)


# -- 3.3 Target names ----------------------------------------------------------------------------------
# A target name is `<prefix>.<_INTERFACE_VERSION>.<hash>`, such as `xla_kernels.add.9.3f0c5a...`.  It is never freed.
#
#                      prefix                       the hash covers
#     with `name=`     the user's name              the platform, `str(signature)` and the launch layout
#     without          `<this module>.<kernel>`     the same, `zeroed`, the options, and the text of the fingerprint
#
# - With `name=`, exported programs find the kernel even if its code or options were edited, so the hash does not cover
#   these.  A name that is in use already is an error.  JAX exports only programs of kernels with `name=` (3.8).
# - Without `name=`, programs in JAX's persistent cache find the kernel if it has not changed.  Different kernels may
#   have the same hash.  Then the second one gets a number.  Another process may number them differently:
#
#       process A, which creates K1 and K2:     K1 is `h`, K2 is `h.2`
#       process B, which only creates K2:       K2 is `h`
#
#   So if B calls K2, it may get the executable that A compiled for K1, because both call `h`.  This is harmless.  The
#   executable contains the name `h`, not the kernel K1, and XLA looks the name up in B, where it is K2.  All else in an
#   executable follows from the program, which is its key in the cache.

# The version of the interface between programs and handlers: the buffers, and the layout of the attribute `launch`.
# Increment it when they change.  It is in each target name, so no exported program calls a handler of another version.
_INTERFACE_VERSION = 9


class _Specialization(NamedTuple):
    """The signature, options and name for which a kernel is compiled."""

    signature: _Signature  # (5.1) the name of the kernel (`label`), and the dtypes, ranks, ... of its buffers
    options: tuple[Any, ...]  # all options that change the machine code; for Warp also `_current_kernel_key(kernel)`
    platform: str  # "cpu" or "cuda", JAX's name of the platform when it lowers a program
    requested_name: str | None  # the user's `name=`
    launch_layout: str = ""  # for Warp, which words of the launch attribute are replaced by pointers (10.4)

    def base_name(self, fingerprint_text: str = "") -> str:
        """Return the target name without a number, as in the table above.  Only Numba kernels have a fingerprint."""
        parts = [self.platform, str(self.signature), self.launch_layout]
        if self.requested_name:
            prefix = self.requested_name
        else:
            prefix = f"{__name__}.{self.signature.label}"
            # `str(signature)` lacks `zeroed`, because exported programs do not depend on it: the handler writes zeros.
            parts += [str(self.signature.zeroed), fingerprint_text, *map(str, self.options)]
        return f"{prefix}.{_INTERFACE_VERSION}.{_hash(*parts)}"


def _hash(*parts: str) -> str:
    """Return a hash of 96 bits that is equal in all processes."""
    return hashlib.blake2b("\n".join(parts).encode("utf-8", "replace"), digest_size=12).hexdigest()


def _check_name_is_free(base_name: str, specialization: _Specialization) -> None:
    """Raise a ValueError if the user requested the name, and it is in use."""
    requested_name = specialization.requested_name
    if requested_name and base_name in _USED_TARGET_NAMES:
        raise ValueError(
            f"name= must be unique for a signature. name={requested_name!r} is in use for "
            f"{specialization.signature}, by another kernel of this process, or by this one with other options or "
            f"captured values. Choose a new name, such as name={requested_name + '_2'!r}, or restart Python if you "
            "have edited the kernel."
        )


def _first_unused_name(base_name: str) -> tuple[str, int]:
    """Return the first of `<base name>`, `<base name>.2`, `<base name>.3`, ... that is unused, and its number."""
    target_name = base_name
    number = 1
    while target_name in _USED_TARGET_NAMES:
        number += 1
        target_name = f"{base_name}.{number}"
    return target_name, number


# -- 3.4 Registered handlers ---------------------------------------------------------------------------
# State that all copies of this file in a process share, including vendored, reloaded and older copies.  So its keys,
# such as "names", must not change.  It is the namespace of a module that exists only in `sys.modules`.  A copy reads
# only its own handlers.  The others are there to stay alive.
_PROCESS_STATE: dict[str, Any] = vars(
    sys.modules.setdefault("_xla_kernels_shared", types.ModuleType("_xla_kernels_shared"))
)
_REGISTRY_LOCK: threading.RLock = _PROCESS_STATE.setdefault("lock", threading.RLock())
_USED_TARGET_NAMES: set[str] = _PROCESS_STATE.setdefault("names", set())
_COMPILED_HANDLERS: dict[str, _CompiledHandler] = _PROCESS_STATE.setdefault("targets", {})  # {target name: handler}


def _native_lock_address(name: str) -> int:
    """Return the address of a lock for machine code (`_Emitter.lock_address`), which all copies of this file share.

    The lock is CPython's PyThread_type_lock, which machine code can acquire without the GIL.
    """
    if name not in _PROCESS_STATE:
        # A new function object: setting the `restype` of the one in `ctypes.pythonapi` would change it for all modules.
        allocate = ctypes.CFUNCTYPE(_PTR)(("PyThread_allocate_lock", ctypes.pythonapi))
        address = allocate()
        if not address:
            raise MemoryError(f"CPython cannot allocate a lock for machine code ({name}).")
        _PROCESS_STATE.setdefault(name, address)  # atomic: if two threads allocate a lock, both use the first one
    return _PROCESS_STATE[name]


class _CompiledHandler(NamedTuple):
    """A handler in memory, and the objects that it uses."""

    address: int
    keep_alive: list[Any]  # LLVM's engines, the machine code of the kernel, callbacks
    data: Any = None  # the handler's `_HandlerData`
    batch_upgrade: _CudaBatchUpgrade | None = None  # Numba CUDA on a GPU: see 9.6


def _register_with_xla(target_name: str, platform: str, compiled: _CompiledHandler) -> None:
    """Register a handler for all programs that call this target."""
    jax.ffi.register_ffi_target_as_batch_partitionable(target_name)
    handler = jax.ffi.pycapsule(ctypes.c_void_p(compiled.address))
    jax.ffi.register_ffi_target(target_name, handler, "CUDA" if platform == "cuda" else platform)
    # XLA has the address now.  So nothing may fail before the next line, which keeps the handler alive forever.
    _COMPILED_HANDLERS[target_name] = compiled


# -- 3.5 The registry: finding, compiling and registering targets --------------------------------------

# Compiles a kernel and its handler.  Returns None if this process only lowers the program, because it has no device.
_HandlerFactory = Callable[[], "_CompiledHandler | None"]

_MANY_COMPILATIONS = 50  # warn once, when this many kernels with one `base_name` (equal texts) were compiled


class _TargetRegistry:
    """The target names of all kernels of this module.

    If several threads look up a new kernel, one of them compiles it, and the others wait for it.
    """

    def __init__(self) -> None:
        # Numba: {owner: {specialization: target name}}.  The owner is a decorated kernel, or the wrapper of a plain
        # function.  An owner keeps its targets, even if a captured variable is reassigned.
        self.names_by_owner: Any = weakref.WeakKeyDictionary()
        # Numba kernels that can share a target: {(specialization, fingerprint, `_machine_code_of_helpers`): name}.
        self.shared_names: dict[tuple[_Specialization, _Fingerprint, tuple[_IdentityKey, ...]], str] = {}
        self.warp_names: dict[_Specialization, str] = {}  # {specialization: target name}
        self.exportable_names: set[str] = set()  # the target names that begin with the user's `name=`
        self.compile_lock = threading.RLock()  # threads would wait anyway: Numba compiles on one thread at a time

    def numba_target_name(
        self, wrapper: Any, specialization: _Specialization, compile_handler: _HandlerFactory, freezes_globals: bool
    ) -> str:
        """Return the target name of a Numba kernel.  If it has no target yet, share one, or compile and register it.

        If `freezes_globals` is False, Python runs the kernel, and reads globals on each run: a callable, or a kernel in
        Numba's CUDA simulator.  It shares no target, because globals that are equal now may be reassigned later.
        """
        kernel = wrapper.kernel
        owner = wrapper if isinstance(kernel, types.FunctionType) else kernel
        with _REGISTRY_LOCK:
            names = self.names_by_owner.setdefault(owner, {})
        if specialization not in names:
            with self.compile_lock:
                if specialization not in names:  # otherwise another thread compiled the kernel while this one waited
                    name = self._share_or_compile(kernel, specialization, compile_handler, freezes_globals)
                    names[specialization] = name
        return names[specialization]

    def _share_or_compile(
        self, kernel: Any, specialization: _Specialization, compile_handler: _HandlerFactory, freezes_globals: bool
    ) -> str:
        """Return the target name of an equal kernel, if there is one.  Otherwise compile and register this kernel."""
        fingerprint = _fingerprint(kernel)
        if not freezes_globals or not _can_share_target(kernel):
            return self._compile_and_register(specialization, compile_handler, fingerprint.text)
        name = self.shared_names.get((specialization, fingerprint, _machine_code_of_helpers(kernel)))
        if name is None:
            name = self._compile_and_register(specialization, compile_handler, fingerprint.text)
            # Compiling a kernel compiles its helpers, which changes the third part of the key.
            self.shared_names[specialization, fingerprint, _machine_code_of_helpers(kernel)] = name
        return name

    def warp_target_name(self, specialization: _Specialization, compile_handler: _HandlerFactory) -> str:
        """Return the target name of a Warp kernel.  If no equal kernel has a target, compile and register the handler.

        Warp's hash of the kernel is one of the options, so kernels with equal specializations are equal.  The caller
        holds `_WARP_LOCK`.
        """
        if specialization not in self.warp_names:
            self.warp_names[specialization] = self._compile_and_register(specialization, compile_handler)
        return self.warp_names[specialization]

    def _compile_and_register(
        self, specialization: _Specialization, compile_handler: _HandlerFactory, fingerprint_text: str = ""
    ) -> str:
        """Compile a handler, register it under an unused target name, and return the name.

        The name is reserved last.  If the compilation or the registration fails, the name stays free.
        """
        base_name = specialization.base_name(fingerprint_text)
        _check_name_is_free(base_name, specialization)  # an early exit, without the lock: saves a compilation
        compiled = compile_handler()
        with _REGISTRY_LOCK:
            _check_name_is_free(base_name, specialization)  # another thread may have taken it during the compilation
            target_name, number = _first_unused_name(base_name)
            if compiled is not None:
                _register_with_xla(target_name, specialization.platform, compiled)
            _USED_TARGET_NAMES.add(target_name)
            if specialization.requested_name:
                self.exportable_names.add(target_name)
        if number == _MANY_COMPILATIONS:
            _warn_of_many_compilations(specialization.signature.label, number)
        return target_name


def _warn_of_many_compilations(label: str, number: int) -> None:
    warnings.warn(
        f"This process has compiled {number} kernels {label!r} with the same code. The kernel, or an object that it "
        "captures, was created again each time. Each compilation takes time, and memory that is never freed. Create "
        "the kernel and its helpers once, outside of the function that calls it.",
        skip_file_prefixes=_INTERNAL_FILE_PREFIXES,
    )


# importlib.reload keeps `globals()`, and so the registry with its old methods, but redefines the classes of its keys.
# Old and new keys can be equal: NamedTuples compare as tuples, whatever their classes, and `_IdentityKey`s compare
# identities.
# Other copies of this file, which may be other versions, have registries of their own.
_REGISTRY: _TargetRegistry = globals().get("_REGISTRY") or _TargetRegistry()


# -- 3.6 Locks and lifetimes ---------------------------------------------------------------------------
# Locks, in the order in which a thread acquires them:
#     1. `_TargetRegistry.compile_lock` (Numba) or `_WARP_LOCK` (Warp): held while a kernel is compiled and registered
#     2. `_REGISTRY_LOCK`: held to look up `names_by_owner`, and to choose and register a name; never to compile
# A thread that holds a lock of section 9 (`_CudaBatchUpgrade.lock`, `_GPUS_LOCK`) acquires neither of these.  The locks
# of `_native_lock_address` are acquired only by machine code, which runs slices.
#
# Lifetimes.  XLA keeps the address of a registered handler forever, so all that the handler uses lives forever, too.
#
#     object               lives                                  kept alive by
#     wrapper              while the user or JAX refers to it     the user; functions in JAX's caches
#     kernel               as long as its wrappers and traces     its wrappers; `_WarpLaunch`, in JAX's caches
#     Numba CUDA kernel    forever, once it is registered         `_CudaBatchUpgrade`, which compiles it again
#     captured value       forever, if it has no exact text       `shared_names`, for example an array above 1 MB
#     `_CallTarget`        as long as the wrapper and its traces  JAX's caches, under a weak reference to the wrapper
#     `_CompiledHandler`   forever, once it is registered         `_COMPILED_HANDLERS`
#     its machine code     forever                                `_CompiledHandler.keep_alive`
#     XLA executable       while JAX caches it                    JAX's caches; it refers to handlers only by name

# -- 3.7 The target of a call --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class _CallTarget:
    """The target of a call, its launch attribute, and texts for errors.  Batch dimensions do not change them.

    Calls with different launches can have the same target.  A `_CallTarget` must not refer to its wrapper.  JAX caches
    it in dictionaries with weak references to wrappers as keys.  A value that refers to its key would never be freed.
    """

    name: str  # the target
    launch_attribute: tuple[int, ...] = ()  # Numba CUDA: the fields of a `_LaunchConfig`.  Warp: see 10.4
    is_noop: bool = False  # whether no thread runs, because the grid is empty
    platform: str | None = None  # None for a `_WarpCallTarget`
    # Parts of error messages:
    title: str = ""  # the wrapper, such as "numba_kernel 'add'"
    platform_phrase: str = ""  # such as "runs on CPUs"
    derivative_advice: str = ""  # how to get a derivative

    def __repr__(self) -> str:
        return f"{self.name}{self.launch_attribute}"

    def prepare_lowering(self, platform: str, has_batch: bool = False) -> _CallTarget:
        """Check the platform, finish the compilation and registration for it, and return the target to call.

        A Numba kernel was registered when its call was traced, so return `self`.  For a batch on a GPU, also compile
        the kernel for a batch launch.  If that fails, log the reason.  `_WarpCallTarget` overrides this method, records
        the launch, and calls this method only to raise the error.

        Raises:
          NotImplementedError: if the kernel does not run on the platform.
        """
        if platform != self.platform:
            raise NotImplementedError(
                f"{self.title} {self.platform_phrase}. This call is compiled for the platform {platform!r}. Move its "
                f"inputs: x = jax.device_put(x, jax.devices({self.platform or 'cpu'!r})[0])."
            )
        compiled = _COMPILED_HANDLERS.get(self.name)  # None if the program is only lowered here
        if has_batch and compiled and compiled.batch_upgrade:
            reason = compiled.batch_upgrade.apply(_LaunchConfig(*self.launch_attribute))
            if reason:
                _log_per_slice_fallback(self.title, reason)
        return self


# -- 3.8 Exports ---------------------------------------------------------------------------------------


class export_checks:
    """The `jax.export.DisabledSafetyCheck`s of all kernels with `name=`, to export programs that call these kernels.

    JAX iterates over this object after lowering, so it can be created before the first trace.  A process that loads an
    exported program must first trace the kernels, by a call or by `jax.eval_shape`.  Then XLA finds them by name.
    Shapes may be symbolic.  For Warp kernels, and for CUDA kernels with `launch_dims=`, only the batch dimensions that
    `vmap` adds may be symbolic.

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
        return map(jax.export.DisabledSafetyCheck.custom_call, sorted(_REGISTRY.exportable_names))


# ======================================================================================================
# 4. Specs and inputs: checks of declared outputs and of arguments, while the user's call is on the stack.

# -- 4.1 Specs: declared shapes and dtypes -------------------------------------------------------------


def _has_shape_and_dtype(x: Any) -> bool:
    """Return whether an object, such as an array or a spec, has a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)  # the class np.float32 has both


def _format_spec(spec: Any) -> str:
    """Return a spec in the notation of jaxprs, such as float32[3,4].  Return `str` of any other object."""
    if not _has_shape_and_dtype(spec):
        return str(spec)
    sizes = ",".join(map(str, spec.shape))
    return f"{getattr(spec.dtype, 'name', spec.dtype)}[{sizes}]"


def _flatten_specs(specs: Any) -> tuple[list, Any]:
    """Return the leaves of a pytree of specs, in JAX's order, and its structure.

    Arrays, tracers and symbolic zeros are replaced by their abstract values.
    """

    def is_leaf(x: Any) -> bool:
        return hasattr(x, "aval") or _has_shape_and_dtype(x)

    leaves, structure = jax.tree.flatten(specs, is_leaf)
    return [getattr(x, "aval", x) for x in leaves], structure


def _contains_dict(structure: Any) -> bool:
    """Return whether a pytree structure contains a mapping."""
    node = structure.node_data()  # (type of the container, ...), or None for a leaf
    return node is not None and (issubclass(node[0], Mapping) or any(map(_contains_dict, structure.children())))


def _check_has_layout(dtype: Any, subject: str) -> None:
    """Raise an error for a dtype of JAX that has no memory layout, such as the dtype of a random key."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(
            f"{subject} must have a dtype of numbers; got {dtype}, which has no memory layout. Convert "
            "random keys: jax.random.key_data(key)."
        )


def _normalize_specs(specs: Any, subject: str, ins: Sequence[_Spec] | None = None) -> tuple[list[_Spec], Any]:
    """Return the leaves of a pytree of declared specs as `ShapeDtypeStruct`s, and its structure.

    `subject` is the option, as the subject of error messages, such as "numba_kernel 'add': outs".  `ins` are the specs
    of the inputs, or None if a wrapper is being created, and its inputs are unknown.
    """
    if specs is None:
        raise TypeError(
            f"{subject} is missing. Declare the outputs, for example outs=lambda x: x. A wrapper without outputs "
            "needs outs=() and has_side_effect=True."
        )
    leaves, structure = _flatten_specs(specs)
    normalized = []
    for i, leaf in enumerate(leaves):
        leaf_subject = f"{subject}[{i}]" if len(leaves) > 1 else subject
        normalized.append(_normalize_spec(leaf, leaf_subject, ins))
    return normalized, structure


def _normalize_spec(declared: Any, subject: str, ins: Sequence[_Spec] | None) -> _Spec:
    """Return one declared spec as a `ShapeDtypeStruct`.  See `_normalize_specs` for `subject` and `ins`."""
    if not _has_shape_and_dtype(declared):
        raise TypeError(
            f"{subject} must be a spec with .shape and .dtype; got {declared!r} of type {type(declared).__name__}. "
            "Write jax.ShapeDtypeStruct(shape, dtype), or a function of the inputs' specs, such as outs=lambda x: x."
        )
    _check_has_layout(declared.dtype, subject)
    try:
        # JAX converts the sizes to Python ints or symbolic sizes.  The dtype has no effect.
        shape = jax.core.ShapedArray(declared.shape, np.float32).shape
    except TypeError as error:
        raise _shape_error(subject, declared.shape) from error
    if any(isinstance(size, int) and size < 0 for size in shape):
        raise ValueError(f"{subject} must have sizes of at least 0. Its shape is {shape}. Write max(size, 0).")
    dtype = np.dtype(declared.dtype)
    # If x64 is disabled, JAX truncates dtypes of 64 bits.  The dtype of an input is kept, so that `outs=lambda x: x`
    # always holds.  While a wrapper is being created, all dtypes are kept.  Its calls truncate them.
    keeps_64_bits = jax.config.jax_explicit_x64_dtypes.name == "ALLOW"
    if ins is None or any(x.dtype == dtype for x in ins) or keeps_64_bits:
        return _Spec(shape, dtype)
    truncated = jax.dtypes.canonicalize_dtype(dtype)
    if truncated != dtype:
        warnings.warn(
            f"{subject} declares {dtype}, which JAX truncates to {truncated}. Declare {truncated}, or set "
            'jax.config.update("jax_enable_x64", True).',
            skip_file_prefixes=_INTERNAL_FILE_PREFIXES,
        )
    return _Spec(shape, truncated)


_SIZE_ADVICE = (
    "If a size is an argument, make it a static Python value: a variable of the closure, or jax.jit(f, "
    "static_argnums=...). If a size depends on data, declare a fixed capacity, such as "
    "outs=jax.ShapeDtypeStruct((n_max,), dtype), and return the count as one more output."
)


def _shape_error(subject: str, shape: Any) -> TypeError:
    """Return the error for a shape that is not a tuple of ints."""
    rule = f"{subject} must have a shape of Python ints."
    if not isinstance(shape, Iterable):
        return TypeError(f"{rule} Got {shape}. A shape is a tuple, such as (3,).")
    for size in shape:
        if isinstance(size, (jax.core.Tracer, _Spec)):
            return TypeError(f"{rule} The size {_format_spec(size)} has no value while JAX traces. {_SIZE_ADVICE}")
        if isinstance(size, (tuple, list)):
            return TypeError(f"{rule} {shape} contains the shape {size}. Unpack it: (2, *x.shape).")
    return TypeError(f"{rule} Got {shape}. Compute sizes with integers, such as x.size // 2.")


# -- 4.2 Options that are functions of the inputs ------------------------------------------------------


def _call_with_specs(
    function: Callable, title: str, option: str, specs: Sequence, parameters: Sequence[str] = ()
) -> Any:
    """Call the value of an option that is a function of the inputs' specs, such as `outs=lambda x: x`.

    For Warp, `specs` also contains values.  Error messages show the title of the wrapper or op, the name of the option,
    and the names of all parameters of the kernel, if they are known.
    """
    try:
        return function(*specs)
    except (AttributeError, IndexError, TypeError) as error:
        problem = _arity_problem(function, option, len(specs), parameters) or _spec_problem(option, specs, error)
        raise TypeError(f"{title}: {problem}") from error


def _arity_problem(function: Callable, option: str, n_in: int, parameters: Sequence[str]) -> str:
    """Return the error text if a function does not take one argument per input; otherwise an empty string."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return ""
    if _can_bind(signature, n_in):
        return ""
    positional = [name for name, p in signature.parameters.items() if p.kind is not p.KEYWORD_ONLY]
    passed = [parameters[i] if i < len(parameters) else f"x{i}" for i in range(n_in)]
    problem = (
        f"{option} is called with all inputs by position, and nothing else. The call has the inputs "
        f"({', '.join(passed)}), but {option} takes {signature}."
    )
    function_head = f"{option}=lambda {', '.join(passed)}:"
    fix = f"{function_head} ..."
    for name, p in signature.parameters.items():
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            return f"{problem} Give {name!r} a default value, or write {function_head} f(..., {name}=...)"
    if missing := ", ".join(map(repr, positional[n_in:])):
        return f"{problem} Pass {missing} to the call, or write {fix}"
    extra = ", ".join(map(repr, passed[len(positional) :]))
    if extra and n_in == len(parameters):  # all parameters are passed, so the last ones are probably outputs
        return f"{problem} If {extra} is an output, do not pass {extra}: it is returned. Otherwise write {fix}"
    return f"{problem} Write {fix}"


def _can_bind(signature: inspect.Signature, n_arguments: int) -> bool:
    """Return whether a function can be called with this number of positional arguments."""
    try:
        signature.bind(*range(n_arguments))
    except TypeError:
        return False
    return True


def _spec_problem(option: str, specs: Sequence, error: Exception) -> str:
    """Return the error text for an exception in a function of the inputs' specs."""
    shown = ", ".join(map(_format_spec, specs))
    raised = f"{option}, called with the specs ({shown}), raised {type(error).__name__}: {error}. "
    *_, (raising_frame, _) = traceback.walk_tb(error.__traceback__)
    # If the constructor of ShapeDtypeStruct raised the error, the shape was not a tuple.
    if raising_frame.f_code is _Spec.__init__.__code__:
        return f"{raised}A shape is a tuple. Write jax.ShapeDtypeStruct((x.size,), x.dtype)."
    prefix = f"{raised}Arrays are passed as specs, which have .shape and .dtype but no values."
    if isinstance(error, IndexError):
        return f"{prefix} Check the indices of shapes."
    if isinstance(error, AttributeError) and error.name and not hasattr(jax.Array, error.name):  # x.shap, not x.sum
        return f"{prefix} Check the spelling of {error.name!r}."
    return f"{prefix} For the specs of what a function f returns, write jax.eval_shape(f, x). {_SIZE_ADVICE}"


# -- 4.3 Inputs ----------------------------------------------------------------------------------------


def _input_name(i: int, title: str, parameters: Sequence[str]) -> str:
    """Return the name of an input for error messages, such as "numba_kernel 'add': input 0 ('x')"."""
    parameter = f" ({parameters[i]!r})" if i < len(parameters) else ""
    prefix = f"{title}: " if title else ""
    return f"{prefix}input {i}{parameter}"


def _input_specs(args: Sequence, title: str = "", parameters: Sequence[str] = ()) -> list[_Spec]:
    """Return the specs of converted inputs.  Raise an error if a dtype has no memory layout (random keys)."""
    avals = list(map(jax.typeof, args))
    for i, aval in enumerate(avals):
        _check_has_layout(aval.dtype, _input_name(i, title, parameters))
    return [_Spec(aval.shape, aval.dtype) for aval in avals]


# Values of these types are passed to JAX unchecked.  `_convert_input` adds the types that JAX has accepted.  np.ndarray
# is never included, because the dtype of a NumPy array must be checked.
_FAST_PATH_TYPES: set[type] = {bool, int, float, complex}
# NumPy arrays of these dtypes, in native byte order, are also passed to JAX unchecked.  `_convert_input` rejects other
# byte orders.  A jitted function would not reject a byte-swapped array: after a call with a native array, it reads the
# bytes as native (jax 0.12).
_FAST_PATH_DTYPES = frozenset(map(np.dtype, "?bhilqBHILQefdFD"))


def _convert_inputs(args: Sequence, title: str, parameters: Sequence[str] = ()) -> tuple[Any, bool]:
    """Return the inputs as values that JAX accepts, and whether one of them is traced."""
    inputs = list(args)
    for i, x in enumerate(args):
        if type(x) in _FAST_PATH_TYPES or (type(x) is np.ndarray and x.dtype in _FAST_PATH_DTYPES):
            continue
        variable = parameters[i] if i < len(parameters) else "x"
        inputs[i] = _convert_input(x, _input_name(i, title, parameters), variable)
    return inputs, any(isinstance(x, jax.core.Tracer) for x in inputs)


def _convert_input(x: Any, name: str, variable: str) -> Any:
    """Return an input as a value that JAX accepts.  Error messages show its name and, in the fix, the variable."""
    if getattr(x, "__jax_array__", None):  # in jax 0.12, all tracers have this attribute, and in most it is None
        x = x.__jax_array__()
    if isinstance(x, jax.Ref):  # before the next check, because a traced Ref is also a Tracer
        raise TypeError(f"{name} must be an array; got a jax.Ref. Pass its value, {variable}[...].")
    if isinstance(x, jax.core.Tracer):
        return x
    if isinstance(x, _Spec):
        raise TypeError(
            f"{name} must be an array; got a ShapeDtypeStruct, which has no values. Pass an array, or write "
            f"jax.eval_shape(f, {variable})."
        )
    if _jax_accepts(x):
        if not isinstance(x, np.ndarray):
            _FAST_PATH_TYPES.add(type(x))
        return x
    try:
        return _from_dlpack(x)
    except Exception as error:
        shown = f"of dtype {x.dtype}" if _has_shape_and_dtype(x) else repr(x)
        raise TypeError(
            f"{name} must be a number or an array of numbers (of JAX, NumPy or a library with DLPack); got "
            f"{type(x).__name__} {shown:.80}. {_input_advice(x, variable, error)}"
        ) from error


def _jax_accepts(x: Any) -> bool:
    """Return whether JAX accepts an object as an array.  It rejects, for example, arrays in a foreign byte order."""
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


def _from_dlpack(x: Any) -> Any:
    """Return an array of another library as a JAX array, which shares its memory unless it is strided."""
    try:
        return jax.dlpack.from_dlpack(x)
    except Exception:  # XLA rejects strided arrays, such as a column of a matrix
        with contextlib.suppress(Exception):
            return jax.dlpack.from_dlpack(x.contiguous())  # a method of PyTorch and Warp
        raise


def _input_advice(x: Any, variable: str, error: Exception) -> str:
    """Return the fix for an object that cannot be an input.  `error` is the exception of `_from_dlpack`."""
    if isinstance(x, (list, tuple)):
        return f"Convert it, jnp.array({variable}), or pass its elements one by one."
    if isinstance(x, Mapping):
        return f"Pass its values one by one, {variable}[key]."
    if isinstance(x, (np.ndarray, np.generic)):
        return _dtype_advice(x.dtype, variable)
    if hasattr(x, "__dlpack__"):
        return f"DLPack cannot share it ({error}). Pass a NumPy array, in PyTorch {variable}.detach().cpu().numpy()."
    if hasattr(x, "__float__") and not isinstance(x, type):  # such as a Fraction
        return f"Convert it, float({variable})."
    return "A constant is not an input. Use a variable of the kernel's closure, or a keyword parameter of an op."


def _dtype_advice(dtype: np.dtype, variable: str) -> str:
    """Return the fix for a NumPy array whose dtype JAX does not have."""
    if dtype.names:
        return f"Pass the fields of a structured array one by one, {variable}[{dtype.names[0]!r}]."
    if dtype.kind in "mM":
        return f'Pass dates and durations as integers, {variable}.view("int64").'
    if not dtype.isnative:
        return f'Convert the byte order, {variable}.astype({variable}.dtype.newbyteorder("=")).'
    widest = {"f": "float64", "c": "complex128"}.get(dtype.kind, "float32")  # of longdouble, clongdouble, other kinds
    return f'Cast it to a dtype of JAX, {variable}.astype("{widest}").'


# ======================================================================================================
# 5. The primitive: one call of one target, its partitioning over a mesh, and the wrapper that binds it.
#
# A wrapper (5.6) finds the target of a call, and binds the primitive `xla_kernel` (5.1) with it.
# This section relies on undocumented behaviour of XLA, Shardy and Numba:
# - how XLA partitions a batch, and how Shardy writes a rule (5.2; test_xla_partitions_batch_without_communication)
# - two bugs of XLA (`_protect_outputs`; test_gpu_row_update_does_not_overwrite_kernel_input,
#   test_call_that_computes_all_loop_state_is_not_hoisted)
# - fusions that copy aliased operands (`_protect_aliased_operands`; test_inplace_update_adds_no_copy_in_loop)
# - Numba's pickles of functions (`_Wrapper`; test_wrapper_without_module_variable_is_pickled_by_value)

# -- 5.1 The primitive: its parameter, and its rules for JAX's interpreters ----------------------------


class _Signature(NamedTuple):
    """The buffers of one slice: inputs, then results (outputs, then scratch).  Result j is buffer `n_in + j`."""

    label: str  # the name of the kernel
    n_in: int  # number of inputs
    dtypes: tuple[np.dtype, ...]  # of each buffer
    ranks: tuple[int, ...]  # of each buffer, without batch dimensions
    aliases: tuple[tuple[int, int], ...] = ()  # (i, j): result j is aliased to input i
    zeroed: tuple[int, ...] = ()  # (j, ...): the results that start from zeros

    def __str__(self) -> str:
        """Return the part of the signature that exported programs rely on.  Changing this text breaks them.

        Every target name contains a hash of it.  Target names without the user's `name=` also contain a hash of
        `zeroed` (`_Specialization.base_name`).
        """
        shown = [f"{dtype.name}[{','.join(':' * rank)}]" for dtype, rank in zip(self.dtypes, self.ranks, strict=True)]
        parts = [f"({', '.join(shown[: self.n_in])}) -> ({', '.join(shown[self.n_in :])})"]
        parts += [f"output {j} aliased to input {i}" for i, j in self.aliases]  # "output": any result
        return "; ".join(parts)

    @property
    def unaliased_inputs(self) -> set[int]:
        """Return the inputs that a kernel must not change, because no result is aliased to them."""
        return set(range(self.n_in)).difference(dict(self.aliases))


@dataclasses.dataclass(frozen=True)
class _CallParams:
    """The parameter of the primitive: the buffers of one slice, the target, and the batch.

    The custom call has two kinds of results: outputs, which the primitive returns, and scratch buffers, which it drops.
    """

    ins: tuple[_Spec, ...]
    outs: tuple[_Spec, ...]
    scratch: tuple[_Spec, ...]
    aliases: tuple[tuple[int, int], ...]  # (i, j): result j of the custom call starts with the value of input i
    zeroed: tuple[int, ...]  # the results of the custom call that start from zeros
    has_side_effect: bool
    target: Any = None  # a `_CallTarget`, once it is found
    batch: tuple[int, ...] = ()  # one leading dimension per `vmap`, the innermost `vmap` last

    @property
    def results(self) -> tuple[_Spec, ...]:
        """The specs of the results of the custom call."""
        return self.outs + self.scratch

    @property
    def buffers(self) -> tuple[_Spec, ...]:
        """The specs of the buffers, in the order in which the handler gets them."""
        return self.ins + self.results

    def signature(self, label: str) -> _Signature:
        """Return the signature of the handler for this call.  The label names the kernel."""
        dtypes = tuple(np.dtype(spec.dtype) for spec in self.buffers)
        ranks = tuple(len(spec.shape) for spec in self.buffers)
        return _Signature(label, len(self.ins), dtypes, ranks, self.aliases, self.zeroed)

    def bind(self, args: Sequence) -> list:
        """Bind the primitive, and return the outputs."""
        return _call_p.bind(*args, call=self)


def _call_abstract_eval(*ins: Any, call: _CallParams) -> tuple:
    """Return the abstract values of the outputs, and the effects."""
    operand_axes = []  # with explicit sharding: for each batch dimension, the mesh axes of the operands that have it
    for d in range(len(call.batch)):
        batched = [x for x in ins if x.shape[d] != 1]  # size 1: an unbatched operand (`_call_batching`)
        operand_axes.append([x.sharding.spec[d] for x in batched])
    partition = _batch_partition(operand_axes)
    avals = [_out_aval((*call.batch, *out.shape), out.dtype, ins, partition) for out in call.outs]
    return avals, _side_effects() if call.has_side_effect else frozenset()


def _call_batching(args: Any, dims: Any, *, call: _CallParams) -> Any:
    """Add one leading dimension to every operand.  It has size 1 for unbatched operands, unless they are aliased."""
    size = next(x.shape[dim] for x, dim in zip(args, dims) if dim is not None)
    sizes = [1 if dim is None else size for dim in dims]
    for i, _ in call.aliases:
        sizes[i] = size  # each slice updates its own copy of the operand
    operands = list(map(_batch_in_front, args, dims, sizes))
    return dataclasses.replace(call, batch=(size, *call.batch)).bind(operands), [0] * len(call.outs)


def _call_jvp(primals: Sequence, tangents: Sequence, *, call: _CallParams) -> tuple:
    """Return zero tangents if all outputs are integers; otherwise raise an error."""
    if any(jax.dtypes.issubdtype(out.dtype, np.inexact) for out in call.outs):
        raise TypeError(
            f"{call.target.title} has no JVP rule. {call.target.derivative_advice}To define a rule, write "
            "f = jax.custom_vjp(kernel), f.defvjp(forward, backward) for grad, or f = jax.custom_jvp(kernel), "
            "f.defjvp(rule) for jvp and hessian. Or use an XLACustomKernel, with op.def_vjp_rule(forward, backward)."
        )
    outputs = call.bind(primals)
    return outputs, list(map(_zero_tangent, outputs))


def _call_transpose(cts: Sequence, *operands: Any, call: _CallParams) -> list:
    """Raise an error, because kernels have no transpose."""
    raise NotImplementedError(
        f"{call.target.title} has no transpose. `grad` transposes a kernel if the rule of a jax.custom_jvp calls it "
        "with tangents. Instead, write f = jax.custom_vjp(kernel), f.defvjp(forward, backward). Or use an "
        "XLACustomKernel, with op.def_transpose_rule(rule)."
    )


def _call_lowering(ctx: Any, *operands: Any, call: _CallParams) -> Any:
    """Lower a call to a custom call of its target."""
    n_devices = _num_partitions(ctx)
    if call.has_side_effect and n_devices > 1:
        raise NotImplementedError(
            "A call with side effects cannot be partitioned, because XLA does not define on which devices it runs. "
            f"{call.target.title} has side effects, and the program is compiled for {n_devices} devices. Call it in a "
            "shard_map over all axes of the mesh: jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)."
        )
    # If no kernel runs, write no custom call.  In a command buffer, XLA rejects one that launches nothing (jax < 0.10).
    if call.target.is_noop or 0 in call.batch:
        return _lower_initial_values(ctx, operands, call.aliases)
    n_partitioned = _num_partitioned_dims(call, n_devices)
    if n_partitioned:
        outputs = _lower_partitioned_call(ctx, operands, call, n_partitioned)
    else:
        result_avals = [jax.core.ShapedArray((*call.batch, *spec.shape), spec.dtype) for spec in call.results]
        outputs = _lower_custom_call(ctx, operands, call, ctx.avals_in, result_avals)
    return _protect_outputs(ctx, outputs, returns_tuple=len(call.results) > 1)


def _lower_initial_values(ctx: Any, operands: Any, aliases: Sequence[tuple[int, int]]) -> Any:
    """Return the outputs of a call that runs no kernel: aliased inputs, or zeros."""

    def initial_values(*ins: Any) -> list:
        aliased = {j: ins[i] for i, j in aliases}
        return [aliased[j] if j in aliased else _zeros(aval) for j, aval in enumerate(ctx.avals_out)]

    return _lower(initial_values, ctx, operands)


def _lower_custom_call(
    ctx: Any, operands: Any, call: _CallParams, operand_avals: Sequence, result_avals: Sequence, **attributes: Any
) -> Any:
    """Write a custom call, and return its outputs.

    Its results, with the types `result_avals`, include scratch buffers.  `attributes` are those besides `launch`.
    """
    platform, *_ = _lowering_platforms(ctx)
    target = call.target.prepare_lowering(platform, bool(call.batch))
    if platform == "cpu" and call.aliases:
        operands = _protect_aliased_operands(ctx, operands, call, operand_avals)
    lower = jax.ffi.ffi_lowering(
        target.name,
        operand_output_aliases=dict(call.aliases),  # XLA may ignore this; the handler copies if it does
        has_side_effect=call.has_side_effect,
        extra_attributes=attributes,
    )
    ctx = ctx.replace(avals_in=operand_avals, avals_out=result_avals)
    results = lower(ctx, *operands, launch=np.array(target.launch_attribute, np.int64))
    return results[: len(call.outs)]


def _protect_aliased_operands(ctx: Any, operands: Any, call: _CallParams, avals: Sequence) -> Any:
    """Put a barrier before aliased operands, so that XLA does not fuse their producers (CPU).

    In a loop over a `v` of 20 MB, `kernel(v.at[i].set(2.0), i)` takes 1 us per step, and 1,400 us without the barrier
    (jax 0.12), because a fusion cannot update `v` in place, and copies it.  On GPUs the barrier has no benefit, and
    would add a copy of an operand such as `w[i]`, which XLA otherwise passes as a part of `w`.
    """
    return _lower_barriers(ctx, operands, avals, {i for i, _ in call.aliases})


def _protect_outputs(ctx: Any, outputs: Any, returns_tuple: bool) -> Any:
    """Put a barrier after a custom call if one of two bugs of XLA may affect it (jax 0.11.2 and 0.12).

    - Dynamic-slice fusion on GPUs: a custom call writes its result directly into the array that a dynamic-update-slice
      updates, even if the call reads this array.  So the call overwrites its own input.
    - Loop-invariant code motion on all platforms: if a tuple of results is the whole state of a `while_loop`, XLA
      mistakes the custom call for a `tuple` instruction.  So it moves the call out of the loop, and the state never
      changes.
    """
    if returns_tuple or "cuda" in _lowering_platforms(ctx):
        return _lower_barriers(ctx, outputs, ctx.avals_out, range(len(outputs)))
    return outputs


def _lower_barriers(ctx: Any, values: Any, avals: Sequence, indices: Container[int]) -> Any:
    """Pass the values with these indices through optimization barriers, across which XLA moves and fuses nothing."""

    def with_barriers(*values: Any) -> list:
        return [jax.lax.optimization_barrier(x) if k in indices else x for k, x in enumerate(values)]

    return _lower_without_shardings(with_barriers, ctx, values, avals, avals)


def _lower_without_shardings(
    function: Callable, ctx: Any, operands: Sequence, avals_in: Sequence, avals_out: Sequence
) -> Any:
    """Lower a function that only reshapes or broadcasts values, or adds barriers.

    On meshes with explicit axes, types contain shardings.  The function is traced without them.
    """

    def without_shardings(avals: Sequence) -> list:
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in avals]

    ctx = ctx.replace(avals_in=without_shardings(avals_in), avals_out=without_shardings(avals_out))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return _lower(function, ctx, operands)


_call_p = _Primitive("xla_kernel")
_call_p.multiple_results = True
_define_impl(_call_p, "call")
_call_p.def_effectful_abstract_eval(_call_abstract_eval)
ad.primitive_jvps[_call_p] = _call_jvp
ad.primitive_transposes[_call_p] = _call_transpose
batching.primitive_batchers[_call_p] = _call_batching
mlir.register_lowering(_call_p, _call_lowering)  # for other platforms: `prepare_lowering` raises the error
for _platform in ("cpu", "cuda"):  # a program that is lowered for both gets a custom call for each
    mlir.register_lowering(_call_p, _call_lowering, platform=_platform)


# -- 5.2 Partitioning a batch over a mesh --------------------------------------------------------------
# Under plain `jit`, XLA partitions a batch: each device runs the call on its part of the slices.  XLA compares the rank
# of each operand and result with the attribute `num_batch_dims` (custom_call_batch_partitioner.cc).  If the rank is
# greater, XLA partitions the first `num_batch_dims` dimensions.  Otherwise, it replicates the operand.  So partitioned
# arrays are padded with ones.  For example, on four devices, x has a batch of 8, w has none, and `num_batch_dims` is 3:
#
#                              one slice    primitive    custom call    on each device
#     x        partitioned     [6]          [8,6]        [8,1,1,1,6]    [2,1,1,1,6]
#     w        replicated      [6,6]        [1,6,6]      [6,6]          [6,6]
#     result   partitioned     [6]          [8,6]        [8,1,1,1,6]    [2,1,1,1,6]
#
# In general, let p be the number of batch dimensions that are partitioned (`n_partitioned`, 1 in the example), and r
# the largest rank of a slice among the operands (`max_slice_rank`, 2).  With r + 1 ones and `num_batch_dims` = p + r:
#
#     rank of a partitioned array  >  p + r  >=  rank of a replicated operand
#
# Batch dimensions that are not partitioned come after the ones.  If some of the vmaps batch an operand and others do
# not, it is broadcast to the whole batch, and partitioned.  The dimensions of a slice are never partitioned: XLA
# gathers them.


def _num_partitioned_dims(call: _CallParams, n_devices: int) -> int:
    """Return the number of leading batch dimensions that XLA may partition.

    These are the first dimensions whose sizes are multiples of the number of all devices.  XLA would pad other sizes.
    If the kernel raises an error on the padding, the other devices wait forever.  The devices of some of the mesh axes
    are not enough: a slice `x[:4]` of an array over 8 devices stays sharded over 8, so XLA pads the size 4 to 8.
    """
    shapes = [call.batch, *(spec.shape for spec in call.buffers)]
    has_known_sizes = all(isinstance(size, int) for shape in shapes for size in shape)  # Shardy's rule needs them
    if n_devices == 1 or not call.results or not has_known_sizes:
        return 0
    return len(list(itertools.takewhile(lambda size: size % n_devices == 0, call.batch)))


def _lower_partitioned_call(ctx: Any, operands: Any, call: _CallParams, n_partitioned: int) -> Any:
    """Write a custom call whose first `n_partitioned` batch dimensions XLA may partition, and return its outputs."""
    batch = call.batch
    is_partitioned = _partitioned_operands(ctx.avals_in, len(batch))
    max_slice_rank = max(len(spec.shape) for spec in call.ins)
    leading_sizes = [*batch[:n_partitioned], *[1] * (max_slice_rank + 1)]

    def padded_aval(spec: _Spec, partitioned: bool = True) -> Any:
        batch_sizes = [*leading_sizes, *batch[n_partitioned:]] if partitioned else []
        return jax.core.ShapedArray((*batch_sizes, *spec.shape), spec.dtype)

    operand_avals = list(map(padded_aval, call.ins, is_partitioned))
    result_avals = list(map(padded_aval, call.results))

    def reshape_operands(*operands: Any) -> list:
        reshaped = []
        for x, spec, aval, partitioned in zip(operands, call.ins, operand_avals, is_partitioned):
            full = jax.numpy.broadcast_to(x, (*batch, *spec.shape)) if partitioned else x
            reshaped.append(jax.lax.reshape(full, aval.shape))
        return reshaped

    def reshape_outputs(*outputs: Any) -> list:
        return [jax.lax.reshape(x, aval.shape) for x, aval in zip(outputs, ctx.avals_out)]

    attributes = {
        "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(n_partitioned + max_slice_rank)}),
        "sdy.sharding_rule": _sharding_rule(operand_avals, is_partitioned, result_avals, len(leading_sizes)),
    }
    operands = _lower_without_shardings(reshape_operands, ctx, operands, ctx.avals_in, operand_avals)
    outputs = _lower_custom_call(ctx, operands, call, operand_avals, result_avals, **attributes)
    return _lower_without_shardings(reshape_outputs, ctx, outputs, result_avals[: len(call.outs)], ctx.avals_out)


def _partitioned_operands(avals_in: Sequence, depth: int) -> list[bool]:
    """Return for each operand whether it is partitioned.  `depth` is the number of batch dimensions.

    Batched operands are partitioned, and unbatched ones replicated, with one exception.  For the whole call, XLA uses
    one sharding of the batch: the merged shardings of the operands (FindCommonSharding).  If a replicated operand
    follows a partitioned one, XLA cannot merge them, and uses the sharding of operand 0.  So operand 0 must then be
    partitioned; otherwise each device runs the whole batch.  For example, if only x is batched:

        operands (v, x)       v is replicated
        operands (x, w)       w is replicated
        operands (v, x, w)    w is replicated; v is broadcast to the batch and partitioned
    """
    is_partitioned = [any(size != 1 for size in x.shape[:depth]) for x in avals_in]
    first_batched = is_partitioned.index(True)  # one exists: a partitioned batch dimension has a size > 1
    if not all(is_partitioned[first_batched:]):
        is_partitioned[0] = True
    return is_partitioned


def _sharding_rule(operand_avals: Sequence, is_partitioned: Sequence, result_avals: Sequence, n_leading: int) -> Any:
    """Return Shardy's sharding rule of a call.

    A rule assigns a factor to each dimension of each operand and result.  Dimensions with the same factor have the same
    sharding.  The first `n_leading` dimensions (the partitioned batch dimensions, and the ones) have the same factors
    in all partitioned arrays.  Each other dimension has a factor of its own, because XLA gathers it.  In the example
    at the top of 5.2, the rule of the operands (x, w) is:

        ([a,b,c,d,e], [f,g]) -> ([a,b,c,d,h])    with n_leading=4, a=8, b=c=d=1, e=f=g=h=6
    """
    from jax.extend.mlir.dialects import sdy  # not at the top, because the import takes 36 ms

    factor_sizes = list(result_avals[0].shape[:n_leading])  # `assign_factors` appends to it

    def assign_factors(x: Any, partitioned: bool = True) -> Any:
        factors = list(range(n_leading)) if partitioned else []
        for size in x.shape[len(factors) :]:
            factors.append(len(factor_sizes))
            factor_sizes.append(size)
        return sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get([factor]) for factor in factors])

    operand_factors = list(map(assign_factors, operand_avals, is_partitioned))
    result_factors = list(map(assign_factors, result_avals))
    return sdy.OpShardingRuleAttr.get(factor_sizes, operand_factors, result_factors)


# -- 5.3 For wrappers and ops: parameters and options --------------------------------------------------


def _parameter_names(kernel: Any) -> tuple[str, ...]:
    """Return the names of the kernel's leading parameters that can be passed by position and by name, in order."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(_py_func(kernel)).parameters.values()
        named = itertools.takewhile(lambda parameter: parameter.kind is parameter.POSITIONAL_OR_KEYWORD, parameters)
        return tuple(x.name for x in named)
    return ()


def _input_signature(parameters: Sequence[str], outs: Any) -> inspect.Signature:
    """Return the `__signature__` of a wrapper, which tells `jax.custom_vjp` the order of arguments passed by name.

    For `kernel(x, y, out)` and `outs=lambda a, b: a`, the signature is `(x, y)`.  It is `(*args)` if `outs` is not a
    function of required positional parameters, or has more of them than the kernel has named parameters.
    """
    with contextlib.suppress(TypeError, ValueError):
        outs_parameters = inspect.signature(outs).parameters.values()
        are_inputs = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in outs_parameters)
        if are_inputs and len(outs_parameters) <= len(parameters):
            names = parameters[: len(outs_parameters)]
            return inspect.Signature([inspect.Parameter(name, p.kind) for name, p in zip(names, outs_parameters)])
    return inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


# The names that `jax.pure_callback` accepts.  Only the sequential ones have an effect here.  With None, the default,
# `jax.pure_callback` rejects `vmap`, but a wrapper supports it.
_VMAP_METHODS = (None, "sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized")


@dataclasses.dataclass(kw_only=True)
class _Options:
    """The options of a public function.  Most mistakes that do not depend on the inputs are found on construction."""

    outs: Any  # a pytree of specs, or a function of the inputs' specs
    vmap_method: str | None
    input_output_aliases: Any  # {index or name of an input: index of an output}
    has_side_effect: bool
    scratch: Any  # like `outs`
    zero_outputs: bool | None  # None: zeros, and an error if a kernel never stores; True: zeros; False: uninitialized
    # Not every public function has the following options.
    in_out_argnames: Any = None
    scalars: Any = False  # names of parameters; True: all 0-d inputs
    name: str | None = None  # part of the target name, for exported programs

    def __post_init__(self) -> None:
        if self.vmap_method not in _VMAP_METHODS:
            raise ValueError(
                f"vmap_method must be one of {_VMAP_METHODS}; got {self.vmap_method!r}. To run the elements of a batch "
                'in order, on one thread, write vmap_method="sequential". Otherwise omit it.'
            )
        if not callable(self.outs) or isinstance(self.outs, type):  # a class, such as jnp.float32, is a mistake
            _normalize_specs(self.outs, "outs")
        self.scratch = () if self.scratch is None else self.scratch
        self.input_output_aliases = dict(self.input_output_aliases or {})
        self.in_out_argnames = _as_names(self.in_out_argnames)
        self.scalar_names = [] if isinstance(self.scalars, bool) else _as_names(self.scalars)
        for name in self.scalar_names:
            if name in self.in_out_argnames:
                raise ValueError(
                    f"A scalar cannot be updated in place. {name!r} is in scalars and in in_out_argnames. Remove it "
                    f"from scalars, and write {name}[()] in the kernel."
                )

    @property
    def in_order(self) -> bool:
        """Return whether the slices of a batch must run one after another, on one thread."""
        return self.vmap_method in ("sequential", "sequential_unrolled")

    @property
    def checks_outputs(self) -> bool:
        """Return whether it is an error if a kernel never stores to an output."""
        return self.zero_outputs is None


def _as_names(names: Any) -> Collection:
    """Return an option's names as a list; keep a set a set."""
    if names is None:
        return []
    if isinstance(names, str) or not isinstance(names, Iterable):
        return [names]
    return names if isinstance(names, (set, frozenset)) else list(names)


def _wrapper_or_decorator(wrapper_class: type[_Wrapper], kernel: Any, options: _Options) -> Any:
    """Return the wrapper of a kernel, or a decorator if the kernel is None."""
    if kernel is None:
        return functools.partial(wrapper_class, options=options)
    return wrapper_class(kernel, options)


def _check_call_signature(
    signature: inspect.Signature, subject: str, args: Sequence, params: Iterable[str] = (), advice: str = ""
) -> None:
    """Raise an error if a CUDA callable, or a function of an op (section 11), does not take these arguments.

    Args:
      signature, subject: the signature of the user's function, and the function, as the subject of the message.
      args: the positional arguments: specs, or texts that describe them, such as "a stream".
      params: the names of the keyword arguments.
      advice: a more likely fix, such as "To register a function f of arrays, pass lambda: f."  Default: none.
    """
    try:
        signature.bind(*args, **dict.fromkeys(params))
    except TypeError as error:
        passed = ", ".join([*map(_format_spec, args), *map("{}=".format, params)])
        fix = "declare a parameter for each argument."
        if str(error).startswith("missing"):  # "missing a required argument: 'x'"
            fix = "remove the parameters that are not passed."
            if not args:  # a generator of an op gets only the op's static parameters
                fix = "pass the missing parameters to the op by name, such as op(x, n=3, outs=...), or remove them."
        fixes = f"{advice} Otherwise, {fix}" if advice else fix[0].upper() + fix[1:]
        raise TypeError(f"{subject} takes {signature}, but this call passes ({passed}): {error}. {fixes}") from None


# -- 5.4 For wrappers and ops: advice about kernels and options ----------------------------------------


def _decorated_backend(kernel: Any) -> str | None:
    """Return the backend of a decorated kernel, or None for anything else."""
    for cls in type(kernel).__mro__:
        package = str(cls.__module__).partition(".")[0]
        for backend, row in _BACKENDS.items():
            if f"{package}.{cls.__name__}" in row.kernel_classes:
                return backend
    return None


_KERNEL_TYPE_ADVICE = {  # {name of a type whose objects a public function does not take as kernels: fix}
    "partial": "Write a function that calls it, with the constants in its closure: def kernel(x, out): f(x, out, n).",
    "method": "Write a function outside of the class. Pass arrays of `self` as inputs, and keep constants in variables "
    "of its closure.",
    "function": "Decorate it.",  # a plain function is a kernel of `numba_kernel`, but not of CUDA and Warp wrappers
    "ufunc": "If it is NumPy's, call it in a function: lambda x: np.{name}(x). If it is from numba.vectorize, drop "
    "target='parallel': `vmap` already uses all cores.",
    "builtin_function_or_method": "Call it in a function: lambda x: {name}(x).",
    "PjitFunction": "JAX calls kernels, and kernels cannot call JAX. Write a Python function, with np. for jnp.",
}


def _unsupported_kernel_error(title: str, takes: str, kernel: Any) -> TypeError:
    """Return the error for an object that a public function does not take as a kernel."""
    backend = _decorated_backend(kernel)
    type_name = type(kernel).__name__
    advice = f"Use {backend}_kernel." if backend else _KERNEL_TYPE_ADVICE.get(type_name, "")
    advice = advice.format(name=getattr(kernel, "__name__", "f"))
    return TypeError(f"{title} takes {takes}; got {type_name} {kernel!r}. {advice}".rstrip())


_MISPLACED_OPTIONS = {  # {keyword argument that no public function takes: where it belongs}
    **dict.fromkeys(
        ("boundscheck", "cache", "debug", "error_model", "fastmath", "inline", "nogil", "parallel"),
        "Pass it to the decorator of the kernel, such as @numba.njit({name}={value!r}).",
    ),
    "dim": "Pass launch_dims={value!r}. (A numba_kernel is not launched: it loops over the elements.)",
    "device": "JAX chooses the device. Put the inputs on it: x = jax.device_put(x, device).",
}


def _with_option_advice[F: Callable](function: F) -> F:
    """Return a public function that rejects `_MISPLACED_OPTIONS` with an error that names the fix."""

    def with_advice(*args: Any, **options: Any) -> Any:
        for name, value in options.items():
            if name in _MISPLACED_OPTIONS:
                fix = _MISPLACED_OPTIONS[name].format(name=name, value=value)
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}. {fix}")
        return function(*args, **options)

    wrapped: Any = functools.update_wrapper(with_advice, function)
    return wrapped


# -- 5.5 For wrappers and ops: a cache, and pickles ----------------------------------------------------


class _BoundedCache(dict):
    """A cache that clears itself when it is full.  Until then, concurrent callers get the same value for a key."""

    def keep(self, key: Any, value: Any) -> Any:
        """Store a value, unless the key has one.  Return the value of the key."""
        if len(self) >= 1024:
            self.clear()
        return self.setdefault(key, value)


class _PickledByReference:
    """An object that is pickled by reference, as top-level functions are, if a variable of a module holds it.

    The reference consists of the names of the module and the variable, which may have any name:

        a variable of an importable module     by reference
        otherwise, an op or a Warp wrapper     by reference to a variable of `__main__`, or an error
        otherwise                              by value: the kernel's code and the options

    A copy of the object is the object itself.
    """

    title: str  # for errors

    def __deepcopy__(self, memo: dict | None = None) -> Any:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple:
        # `__main__` comes last, because it is the same module only in the processes of a pool.  `builtins._` is the
        # last result at the prompt.
        importable = [name for name in list(sys.modules) if name not in ("__main__", "__mp_main__", "builtins")]
        return self._reference_from(importable) or self._reduce_if_not_importable()

    def _reference_from(self, module_names: Iterable[str]) -> tuple:
        """Return a reference to the first variable of these modules that holds this object, or an empty tuple."""
        for module_name in module_names:
            for variable, value in list(getattr(sys.modules.get(module_name), "__dict__", {}).items()):
                if value is self:
                    return pkgutil.resolve_name, (f"{module_name}:{variable}",)
        return ()

    def _reduce_if_not_importable(self) -> tuple:
        """Return the value of `__reduce__` if no importable module holds the object.  `_Wrapper` overrides this."""
        if reference := self._reference_from(["__main__"]):
            return reference
        raise pickle.PicklingError(
            f"{self.title} is pickled by reference, as functions are, but no variable of a module holds it. Assign it "
            "to a variable at the top level of a module that the other process can import."
        )


def _loaded(data: bytes) -> Any:
    """Recreate a wrapper from the data of `_Wrapper._reduce_if_not_importable`."""
    # Do not rename this function, because pickles contain its name.
    make, *args = pickle.loads(data)
    return make(*args)


# -- 5.6 The wrapper -----------------------------------------------------------------------------------


class _Wrapper(_PickledByReference):
    """A kernel as a JAX function.

    For example, `f = numba_kernel(add, outs=lambda x, y: x)` is called with two arrays of float32[3].  Each method
    calls the indented ones below it:

        __call__(x, y=y)                         puts the arguments in order: (x, y)
          _call_by_position((x, y))              converts arguments that JAX does not accept, such as arrays of PyTorch
            jax.jit(...)                         calls `_traced_call` once per combination of shapes and dtypes
              _traced_call(x, y)                 evaluates `outs`: ins = [float32[3]] * 2, outs = [float32[3]]
                _bind_primitive(ins, outs, x, y) returns the list of outputs, which has the specs `outs`
                  _call_params(ins, outs)        adds scratch buffers, aliases and the target
                    _find_target(call)           returns the target.  If it is new, compiles and registers the kernel
                  _CallParams.bind([x, y])       binds the primitive

    Each backend defines `_find_target`, and some override the methods with "(hook)" in their docstrings.
    `_WarpKernel.__call__` first separates the arguments by value from the arrays.
    """

    decorator: str  # the name of the public function, for error messages

    def __init__(self, kernel: Any, options: _Options, parameters: tuple[str, ...] | None = None) -> None:
        """Create the wrapper, and check the options that name parameters.

        `parameters` are the names of the parameters that take arrays, in order.  Default: `_parameter_names`.
        """
        self.kernel = kernel
        self.options: Any = options  # subclasses of `_Options` have options of their own
        self.parameters = _parameter_names(kernel) if parameters is None else parameters
        self.all_parameters: Sequence[str] = self.parameters  # Warp: also the parameters with arguments by value
        self._copy_metadata(kernel)
        self.title = f"{self.decorator} {self.__name__!r}"  # for errors, such as "numba_kernel 'add'"
        if self.parameters[:1] == ("self",):
            raise TypeError(f"{self.title} is a method, and `self` is not an array. {_KERNEL_TYPE_ADVICE['method']}")
        self.__signature__ = _input_signature(self.parameters, options.outs)
        self._check_names("in_out_argnames", options.in_out_argnames)
        # The first outputs are the in-out arguments, in the order of the kernel's parameters.  A list must have this
        # order, because a user reads it as the order of the outputs.  A set is accepted in any order.
        self.in_outs = [name for name in self.parameters if name in options.in_out_argnames]
        if isinstance(options.in_out_argnames, list) and options.in_out_argnames != self.in_outs:
            raise ValueError(
                f"{self.title}: in_out_argnames must be in the order of the kernel's parameters; got "
                f"{options.in_out_argnames}. Write in_out_argnames={self.in_outs}; outs and the results have the same "
                "order."
            )

        def traced_call(*args: Any) -> Any:
            return self._traced_call(*args)

        traced_call.__name__ = traced_call.__qualname__ = self.__name__  # this name appears in jaxprs and profiles
        self._jitted_call = jax.jit(traced_call)

    def _copy_metadata(self, kernel: Any) -> None:
        """Copy the kernel's name and docstring, as `functools.wraps` does, but not its annotations.

        The annotations describe the kernel, which returns None and has parameters for its outputs.  Runtime type
        checkers would apply them to the calls of the wrapper.
        """
        functools.update_wrapper(self, _py_func(kernel), assigned=("__module__", "__qualname__", "__doc__"), updated=())
        self.__name__ = getattr(kernel, "__name__", None) or getattr(kernel, "key", None) or type(kernel).__name__
        self.__annotations__ = {}  # otherwise the annotations of this class
        self.__wrapped__ = kernel

    def __repr__(self) -> str:
        return f"<{self.decorator} {self.__name__}>"

    def _reduce_if_not_importable(self) -> tuple:
        """Pickle the wrapper by value: its kernel and options.  (hook)"""
        serialize = _import("numba.core.serialize", "a pickle", _NUMBA_INSTALL)
        return _loaded, (serialize.dumps((type(self), self.kernel, self.options)),)

    # -- arguments -------------------------------------------------------------------------------------

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        """Call the kernel with arguments by position or by name, and return its outputs in the structure of `outs`."""
        if named:
            args = tuple(self._arguments_by_name(args, named).values())
        return self._call_by_position(args)

    def _call_by_position(self, args: Sequence) -> Any:
        """Call a jitted function of the arguments.  If one is traced, add the call to the caller's program instead."""
        if _FAST_PATH_TYPES.issuperset(map(type, args)):
            return self._jitted_call(*args)
        args, is_traced = _convert_inputs(args, self.title, self.parameters)
        return self._traced_call(*args) if is_traced else self._jitted_call(*args)

    def _arguments_by_name(self, args: Sequence, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, in the order of the kernel's parameters."""
        n = len(args) + len(named)
        names = self.parameters[:n]
        arguments = {**dict(zip(names, args)), **named}
        has_wrong_count = len(arguments) != n  # too many, or a name that is also passed by position
        if has_wrong_count or arguments.keys() != set(names):  # an unknown name, or a gap in the parameters
            missing = next((f"{name!r} is missing. " for name in names if name not in arguments), "")
            raise self._wrong_arity(
                f"got {len(args)} by position and ({', '.join(named)}) by name. {missing}Pass each input once."
            )
        return {name: arguments[name] for name in names}

    def _wrong_arity(self, problem: str) -> TypeError:
        """Return the error for a call with wrong arguments."""
        if not self.all_parameters:
            return TypeError(f"{self.title} takes its inputs by position only; {problem}")
        shown = ", ".join(self.all_parameters)
        return TypeError(f"{self.title} takes the parameters ({shown}), inputs first; {problem}")

    def _check_names(self, option: str, names: Collection[str]) -> None:
        """Raise an error if an option names something that is not an array parameter."""
        for name in names:
            if name not in self.parameters:
                shown = ", ".join(self.parameters)
                raise ValueError(
                    f"{self.title}: {option}={names} must contain names of array parameters, and {name!r} is not one. "
                    f"Choose from ({shown})."
                )

    # -- from inputs to the primitive ------------------------------------------------------------------

    def _traced_call(self, *args: Any) -> Any:
        """Return the outputs in the structure of `outs`.  JAX traces this function."""
        ins = _input_specs(args, self.title, self.parameters)
        outs, structure = self._declared_specs("outs", ins)
        return structure.unflatten(self._bind_primitive(ins, outs, *args))

    def _bind_primitive(self, ins: list[_Spec], outs: list[_Spec], *args: Any) -> list:
        """Bind the primitive, and return the outputs.  (hook)"""
        return self._call_params(ins, outs).bind(args)

    def _call_params(self, ins: list[_Spec], outs: list[_Spec]) -> _CallParams:
        """Return the parameter of the primitive, including the target, for these inputs and declared outputs."""
        scratch, _ = self._declared_specs("scratch", ins)
        aliases = self._resolve_aliases(ins, outs)  # {input: result}
        for i in self._inputs_to_copy(len(ins)):
            if i not in aliases:  # alias a scratch buffer to the input, so that XLA copies the input to it
                aliases[i] = len(outs) + len(scratch)
                scratch.append(ins[i])
        unaliased = tuple(j for j in range(len(outs) + len(scratch)) if j not in aliases.values())
        call = _CallParams(
            ins=tuple(ins),
            outs=tuple(outs),
            scratch=tuple(scratch),
            aliases=tuple(sorted(aliases.items())),
            zeroed=() if self.options.zero_outputs is False else unaliased,
            has_side_effect=self.options.has_side_effect,
        )
        return dataclasses.replace(call, target=self._find_target(call))

    def _inputs_to_copy(self, n_in: int) -> list[int]:
        """Return the inputs of which the kernel gets a copy, because it may store to them.  (hook)"""
        return []

    def _find_target(self, call: _CallParams) -> _CallTarget:
        """Check the dtypes and parameters of a call, and return its target.

        If JAX has a device on which the kernel runs, compile it here, so that the user's call raises the errors.
        """
        raise NotImplementedError

    def _check_dtypes(self, call: _CallParams, allowed: frozenset[str], why_not: str) -> None:
        """Raise an error for a dtype that is not allowed.  `why_not` is like "for which Numba CUDA has no arrays"."""
        for role, specs in (("input", call.ins), ("output", call.outs), ("scratch buffer", call.scratch)):
            for i, spec in enumerate(specs):
                if np.dtype(spec.dtype).name not in allowed:
                    fix = f"Declare jax.ShapeDtypeStruct({spec.shape}, jnp.float32)."
                    if role == "input":
                        fix = "Cast it, and cast the result back: f(x.astype(jnp.float32)).astype(x.dtype)."
                    raise TypeError(f"{self.title}: {role} {i} is {_format_spec(spec)}, of a dtype {why_not}. {fix}")

    # -- options that depend on the inputs -------------------------------------------------------------

    def _argument_names(self, ins: Sequence[_Spec]) -> Sequence[str]:
        """Return the names of a call's arguments: the leading parameters, with Warp's arguments by value among them."""
        n_values = len(self.all_parameters) - len(self.parameters)
        return self.all_parameters[: len(ins) + n_values]

    def _option_value(self, option: str, ins: Sequence) -> Any:
        """Return the value of an option.  If it is a function, call it with the specs of the inputs.  (hook)"""
        value = getattr(self.options, option)
        if not callable(value):
            return value
        return _call_with_specs(value, self.title, option, ins, self.all_parameters)

    def _declared_specs(self, option: str, ins: Sequence[_Spec]) -> tuple[list[_Spec], Any]:
        """Return the specs that `outs` or `scratch` declares for these inputs, and their structure."""
        specs, structure = _normalize_specs(self._option_value(option, ins), f"{self.title}: {option}", ins)
        if _contains_dict(structure):
            raise TypeError(
                f"{self.title}: {option} must not contain a dict, because a kernel takes its outputs by position, "
                f"and not by key. Got {structure}. Use a tuple, {option}=(spec, ...), or a NamedTuple."
            )
        if option == "outs" and not specs and not self.options.has_side_effect:
            raise ValueError(
                f"{self.title} has no outputs, so JAX would never run it. Declare outputs in outs, or pass "
                "has_side_effect=True."
            )
        return specs, structure

    def _resolve_aliases(self, ins: Sequence[_Spec], outs: Sequence[_Spec]) -> dict[int, int]:
        """Return {input: the output aliased to it} for the in-out arguments and `input_output_aliases`, checked."""
        aliases: dict[int, int] = {}
        for j, name in enumerate(self.in_outs):
            i = self._input_index(name, len(ins))
            self._check_in_out_spec(name, i, j, ins, outs)
            aliases[i] = j
        for key, j in self.options.input_output_aliases.items():
            i = self._input_index(key, len(ins))
            if problem := self._alias_problem(i, j, ins, outs, aliases):
                raise ValueError(f"{self.title}: input_output_aliases={{{key!r}: {j!r}}}: {problem}")
            aliases[i] = j
        return aliases

    @staticmethod
    def _alias_problem(i: Any, j: Any, ins: Sequence[_Spec], outs: Sequence[_Spec], aliases: Mapping[int, int]) -> str:
        """Return the error text if output j cannot be aliased to input i; otherwise an empty string."""
        for role, index, specs in (("input", i, ins), ("output", j, outs)):
            if not specs:
                return f"the call has no {role}s. Remove the alias."
            if not hasattr(index, "__index__") or index not in range(len(specs)):
                numbered = ", ".join(f"{k}: {_format_spec(spec)}" for k, spec in enumerate(specs))
                return f"there is no {role} {index!r}. The {role}s are {numbered}. Use one of these indices."
        if i in aliases:
            return f"an input must have one alias only. Input {i} is aliased to output {aliases[i]}. Remove an alias."
        if j in aliases.values():
            return f"an output must have one alias only. Output {j} is aliased to another input. Remove an alias."
        if ins[i] != outs[j]:
            return (
                "an output must have the shape and dtype of the input that it is aliased to. Input "
                f"{i} is {_format_spec(ins[i])}, and output {j} is {_format_spec(outs[j])}. Change outs[{j}]."
            )
        return ""

    def _input_index(self, key: int | str, n_in: int) -> int:
        """Return the index of an aliased input, whose key in the options is its index or its name.  (hook)"""
        if not isinstance(key, str):
            return key
        names = self.parameters[:n_in]
        if key not in names:
            advice = "Use one of these names."
            if key in self.parameters:
                advice = f"To update {key!r} in place, pass its initial value to the call: {key}=x."
            raise ValueError(
                f"{self.title}: in_out_argnames, and keys of input_output_aliases, must be inputs. {key!r} is not an "
                f"input of this call, whose inputs are ({', '.join(names)}). {advice}"
            )
        return names.index(key)

    def _check_in_out_spec(self, name: str, i: int, j: int, ins: Sequence[_Spec], outs: Sequence[_Spec]) -> None:
        """Raise an error if output j does not have the spec of input i, which is the in-out argument `name`."""
        declared = outs[j] if j < len(outs) else None
        if ins[i] == declared:
            return
        shown = "missing" if declared is None else _format_spec(declared)
        arguments = ", ".join(self._argument_names(ins))
        names = [*self.in_outs, "..."] if len(outs) > len(self.in_outs) else self.in_outs
        fixed_outs = f"({', '.join(names)})" if len(names) > 1 else names[0]
        raise ValueError(
            f"{self.title}: outs must begin with the specs of the in-out arguments. {name!r} is "
            f"{_format_spec(ins[i])}, but outs[{j}] is {shown}. Write outs=lambda {arguments}: {fixed_outs}."
        )

    def _check_no_separate_outputs(self, call: _CallParams) -> None:
        """Raise an error if the kernel has two parameters for an in-out argument, such as `kernel(v, v_out)`:

            numba_kernel 'kernel': an in-out argument has one parameter, which is both input and output. With
            in_out_argnames=['v'], the kernel takes (v, v_out). Remove 'v_out', and store to 'v': `v[...] = ...` instead
            of `v_out[...] = ...`.

        Call this only for a kernel that does not fit the call.
        """
        n_in = len(call.ins)
        extra = self.parameters[n_in : n_in + len(self.in_outs)]
        if len(self.parameters) == len(call.buffers) and extra:
            raise TypeError(
                f"{self.title}: an in-out argument has one parameter, which is both input and output. With "
                f"in_out_argnames={self.in_outs}, the kernel takes ({', '.join(self.all_parameters)}). Remove "
                f"{', '.join(map(repr, extra))}, and store to {', '.join(map(repr, self.in_outs))}: "
                f"`{self.in_outs[0]}[...] = ...` instead of `{extra[0]}[...] = ...`."
            )


# -- 5.7 Errors about the stores of a kernel -----------------------------------------------------------


def _check_outputs_are_stored(
    title: str, buffer_of: Mapping[str, int], stored: Container, call: _CallParams, fix_index: str
) -> None:
    """Raise an error if a kernel has no store to an output or in-out argument.  For example:

        Kernel 'f' never stores to output 'out'. `out = ...` only creates a local variable. Write `out[:] = ...`. If the
        kernel need not store to it, pass zero_outputs=True: the output then consists of zeros.

    An aliased output has the memory of its input, so a store to either is enough.  For example, in both calls, output 0
    (buffer 1) is aliased to input 0 (buffer 0), for which only the second kernel has a parameter:

        kernel(v),      in_out_argnames=["v"]          buffer_of = {"v": 1}
        kernel(x, out), input_output_aliases={0: 0}    buffer_of = {"x": 0, "out": 1}

    Args:
      title: the kernel, "Kernel 'f'" in the message above.
      buffer_of: {parameter: the index of its buffer}.  For an in-out argument, this is the buffer of the output.
      stored: the buffers to which the kernel may store.
      call: the call.  Its scratch buffers are not checked.
      fix_index: the index in the statement that the message suggests, ":" in the message above.
    """
    n_in = len(call.ins)
    aliased_input_of = {n_in + j: i for i, j in call.aliases}  # {buffer of an output: the input with the same memory}
    for name, buffer in buffer_of.items():
        is_output = n_in <= buffer < n_in + len(call.outs)
        aliased_input = aliased_input_of.get(buffer)
        if not is_output or buffer in stored or aliased_input in stored:
            continue
        has_alias = aliased_input is not None
        is_in_out = has_alias and aliased_input not in buffer_of.values()  # it has no parameter for the input
        kind = "in-out argument" if is_in_out else "output"
        unstored_value = f"keeps the value of input {aliased_input}" if has_alias else "consists of zeros"
        shown_index = fix_index if call.buffers[buffer].shape else "()"
        raise TypeError(
            f"{title} never stores to {kind} {name!r}. `{name} = ...` only creates a local variable. "
            f"Write `{name}[{shown_index}] = ...`. If the kernel need not store to it, pass "
            f"zero_outputs=True: the {kind} then {unstored_value}."
        )


_READ_ONLY_RULE = "Inputs are read-only, because JAX may share them"
_READ_ONLY_ADVICE = (
    f"{_READ_ONLY_RULE}. Global arrays are read-only, too. Write to an output (a parameter after the inputs), list the "
    "input in in_out_argnames, or alias an output to it with input_output_aliases."
)


def _any_of(names: Sequence[str]) -> str:
    """Return names for a sentence, such as "'x' or 'y'"."""
    return " or ".join(map(repr, names))


def _read_only_input_error(problem: str, names: Sequence[str], more: str = "") -> TypeError:
    """Return the error for a kernel that writes, or may write, to one of the inputs with these names.

    With the problem "Kernel 'f' writes to input 'x' (`x[0] = 0`)." the message is:

        Inputs are read-only, because JAX may share them. Kernel 'f' writes to input 'x' (`x[0] = 0`). Write to an
        output, or list the input in in_out_argnames=['x'].

    `more` is appended.  It begins with a space or a newline.
    """
    fix = f"Write to an output, or list the input in in_out_argnames=[{names[0]!r}]."
    return TypeError(f"{_READ_ONLY_RULE}. {problem} {fix}{more}")


# ======================================================================================================
# 6. The native handler: machine code for `XLA_FFI_Error* handler(XLA_FFI_CallFrame*)`, generated with llvmlite.
#
# XLA calls `handler` with an XLA_FFI_CallFrame, the frame.  It refers to the buffers of a call: inputs, then results
# (outputs, then scratch).  The batch dimensions of a buffer come before the dimensions of a slice.  A batch dimension
# along which a buffer does not vary has size 1, and broadcasts.  A replicated input has no batch dimensions (5.2).
# Three C functions run a call:
#
#     handler(frame)                            prepares the results
#         run_batch(frame, ...)                 splits a batch into inner loops, and chooses their threads (6.4)
#             inner_loop(frame, buffers, ...)   calls the kernel for `count` consecutive slices
#
# Without a batch, `handler` calls `inner_loop` for one slice.  In an inner loop, each buffer has a pointer to its first
# slice and a step to the next one, as in the inner loops of NumPy's ufuncs.
#
# `run_batch` is the batch scheduler, compiled once per process.  The code of the other two (6.6) depends on the
# signature (5.1) and the emitter.  The emitter of a backend (6.1) writes the part of `inner_loop` that runs the slices.
#
# Invariants:
# - Threads.  `handler` runs on a thread of XLA without the GIL.  Each slice is run (on a GPU: launched) by one thread,
#   and exactly once, unless another slice fails.
# - Order.  A result aliased to an input holds the input's values before any slice runs.
# - Lifetimes.  The frame and the buffers live until `handler` returns.  Loaded machine code lives forever (3.3).
# - Errors.  An XLA_FFI_Error* belongs to the function that receives it, which returns it or destroys it.
#
# This section relies on undocumented behaviour of XLA, Numba and the C library:
# - XLA's threads (6.4; test_slices_run_on_several_threads_unless_sequential)
# - aliases that XLA loses (`_copy_aliased_input`; test_aliased_output_starts_from_input_without_xla_alias)
# - Numba's `cgutils`, and the CPU for which it compiles (`magic_tuple`; all tests of kernels)
# - glibc's default floating-point environment (`_FE_DFL_ENV`;
#   test_fork_reload_and_concurrent_batches_succeed_on_eight_devices)

# -- 6.1 The interface to backends: arrays, emitters, and messages of errors ---------------------------


class _KernelArray(NamedTuple):
    """A slice of a buffer, as a row-major array.  Its address and dimensions are values of the generated code.

    In a batch launch, the array has one more dimension in front: the slices of the launch.
    """

    pointer: _Value
    dims: Sequence[_Value]
    itemsize: int  # bytes of an element

    def strides(self, unit: int) -> list[_Value]:
        """Return the stride of each dimension.  `unit` is the stride of the last one: 1, or `itemsize` for bytes."""
        strides: list[_Value] = [unit] if self.dims else []
        for size in reversed(self.dims[1:]):
            strides.insert(0, strides[0] * size)
        return strides


class _Emitter:
    """The part of a handler that a backend provides: the code of an inner loop, which runs consecutive slices.

    If `code_key` is a tuple, handlers may share object code (`_build_handler`).  So the key and the signature must
    determine the code that `write` generates.  This code must not contain addresses of objects, or the name of the
    kernel.  It reads addresses from the `_HandlerData` of each handler.
    """

    code_key: tuple | None = None  # None: the code is not shared.  Code for GPUs never is.
    kernel_address: int = 0  # of the compiled kernel
    report_address: int = 0  # Numba on CPUs: of a C function that takes a Python exception, and returns its message
    # A `_native_lock_address` that is held while slices run, or 0.  Kernels with the same lock never overlap.
    lock_address: int = 0
    in_order: bool = True  # whether the thread that XLA calls from runs or launches all slices of a call, in order
    starts_threads: bool = False  # whether the kernel starts threads, which inherit the floating-point environment
    libcuda: _LibCuda | None = None  # the CUDA driver, if the buffers are in a GPU's memory
    traits: int = 0  # XLA_FFI_Metadata.traits: 0 or, on GPUs, `_COMMAND_BUFFER_COMPATIBLE`

    def write(self, ir: _HandlerBuilder, frame: _StructPointer, buffers: _StructPointer, count: _Int64) -> None:
        """Generate the part of the C function `inner_loop(frame, buffers, count)` that runs the slices.

        Instructions within `with ir.each_slice(buffers, count) as arrays` run once per slice, and those within
        `ir.each_batch_launch` once per batch launch.  If a slice fails, return its error with `ir.fail_inner_loop`.
        """
        raise NotImplementedError


# {thread: its last error message}.  `XLA_FFI_Error_Create`, which is called next, copies the message.
_ERROR_MESSAGES: dict[int, Any] = {}


def _store_error_message(error: BaseException, label: str, advice: str = "") -> int:
    """Store the message of a kernel's exception, with advice, as a C string, and return its address.

    If this function raised, the callbacks named `report` (6.6, 7.4, 9.5) would return an undefined address.  Only a
    KeyboardInterrupt could cause that, but they take microseconds.  The callback of `_CallbackEmitter` may take long,
    because it runs a user's function, so its message is set beforehand.
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    if "destination is read-only" in text:  # the text of NumPy's error
        advice = _READ_ONLY_ADVICE
    if len(text) > 10_000:
        text = text[:10_000] + " [...]"
    if advice:
        text = f"{text}. {advice}"
    text = f"{text} (raised in a call of kernel '{label}')".replace("\0", "\\0")
    _ERROR_MESSAGES[threading.get_ident()] = message = ctypes.create_string_buffer(text.encode("utf-8", "replace"))
    return ctypes.addressof(message)


# -- 6.2 An IR builder: LLVM instructions from Python's operators --------------------------------------
# The Python code below generates machine code.  It runs once, when a handler is compiled, and not in a call.  An
# `_Int64` or `_StructPointer` object stands for a run-time value, which exists only when the machine code runs.  Its
# operators and attributes, and the methods of the builder `ir`, add instructions to the generated function:
#
#     Python                                        generated C
#     y = x + 1                                     int64_t y = x + 1;          (x is an _Int64)
#     value = struct.field                          value = struct->field;      (each mention is a new load)
#     struct.field = value                          struct->field = value;
#     total = ir.variable(0)                        int64_t total = 0;
#     total.current = total.current + x             total = total + x;
#     error = ir.call("f", x, 8)                    int64_t error = f(x, 8);
#     with ir.if_(x > 0): ...                       if (x > 0) { ... }
#     with ir.loop(n) as i: ...                     for (int64_t i = 0; i < n; i++) { ... }
#     ir.ret(x)                                     return x;
#     ir.ret(x, when=y)                             if (y) return x;            (x is evaluated in any case)
#
# `if` and `for` of Python decide which instructions are generated: `for k in range(3)` generates its body three times.
# In 6.6, the number of buffers, the ranks and the aliases are Python values, from the signature.  In 6.4, even the
# number of buffers is a run-time value, because all handlers share this code.
#
# Docstrings here, in 7.4, 9.5 and 10.4 describe the generated code.  "Return x" means that the Python function returns
# an object that stands for x.  `define` makes x the result of a C function.  `ret` and `fail_inner_loop` end the
# generated function, but not the Python function:
#
#     with ir.if_(error):
#         ir.ret(error)     # generates `return error;`
#
# The only Python functions that run in calls are those passed to `ctypes.CFUNCTYPE`, and the functions that they call.

type _Value = _Int64 | int  # a run-time value; an int is a constant of the generated code


class _Int64:
    """A run-time value: a 64-bit integer or address.  Its operators generate instructions."""

    def __init__(self, ir: _IRBuilder, value: Any) -> None:
        self.ir = ir
        self.value = value  # llvmlite's value

    def _calculate(self, instruction: str, other: _Value) -> _Int64:
        add_instruction = getattr(self.ir.llvm_builder, instruction)
        return _Int64(self.ir, add_instruction(self.value, self.ir.llvm_value(other)))

    def _compare(self, relation: str, other: _Value) -> _Int64:
        bit = self.ir.llvm_builder.icmp_signed(relation, self.value, self.ir.llvm_value(other))
        return _Int64(self.ir, self.ir.llvm_builder.zext(bit, self.ir.i64))

    __add__ = __radd__ = functools.partialmethod(_calculate, "add")
    __sub__ = functools.partialmethod(_calculate, "sub")
    __mul__ = __rmul__ = functools.partialmethod(_calculate, "mul")
    # These two truncate as in C.  Python's operators differ only for negative operands.
    __floordiv__ = functools.partialmethod(_calculate, "sdiv")
    __mod__ = functools.partialmethod(_calculate, "srem")
    __and__ = functools.partialmethod(_calculate, "and_")
    __or__ = functools.partialmethod(_calculate, "or_")
    # Comparisons give 1 or 0.
    __lt__ = functools.partialmethod(_compare, "<")
    __gt__ = functools.partialmethod(_compare, ">")
    __ge__ = functools.partialmethod(_compare, ">=")
    __eq__ = functools.partialmethod(_compare, "==")  # type: ignore[assignment]
    __ne__ = functools.partialmethod(_compare, "!=")  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError(
            "An _Int64 has no truth value, because its value exists only when the generated code runs. Write "
            "`with ir.if_(x):` instead of `if x:`. If x and y are 0 or 1, write `x & y` instead of `x and y`."
        )


class _StructPointer(_Int64):
    """The address of a C struct, or of an array of structs.

    Reading an attribute generates a load of the field, and assigning to it a store.  So no field may have the name of
    an attribute of this class.  `pointer[i]` is the address of struct i of an array.
    """

    def __init__(self, ir: _IRBuilder, struct_type: Any, address: _Value) -> None:
        vars(self).update(ir=ir, struct_type=struct_type, value=ir.llvm_value(address))  # bypasses `__setattr__`

    def __getitem__(self, index: _Value) -> _StructPointer:
        return _StructPointer(self.ir, self.struct_type, self + index * ctypes.sizeof(self.struct_type))

    def address_of(self, field: str) -> _Int64:
        return self + getattr(self.struct_type, field).offset

    def __getattr__(self, field: str) -> Any:
        address = self.address_of(field)  # raises an AttributeError for an unknown field
        field_type = dict(self.struct_type._fields_)[field]
        if issubclass(field_type, ctypes.Structure):  # a struct within the struct is not loaded
            return _StructPointer(self.ir, field_type, address)
        value = self.ir.load(address, ctypes.sizeof(field_type))
        if issubclass(field_type, ctypes._Pointer):
            return _StructPointer(self.ir, field_type._type_, value)
        return value

    def __setattr__(self, field: str, value: Any) -> None:
        self.ir.store(value, self.address_of(field), getattr(self.struct_type, field).size)


class _Variable(ctypes.Structure):
    """A variable on the stack of the generated function."""

    _fields_ = (("current", _I64),)


# From 2 KiB on, glibc's memset uses `rep stosb`, which takes 40 ns to start on an AMD EPYC.  To avoid it, less than
# 8 KiB is zeroed in pieces of 1 KiB.
_MIN_WHOLE_MEMSET_NBYTES = 1 << 13


class _IRBuilder:
    """An LLVM module, and methods that generate its functions and instructions.

    Every parameter and result of a function is a 64-bit integer or an address.  C functions with int or void are also
    called like this, because x86-64 and arm64 pass an int in a 64-bit register.  The upper half of an int result is
    undefined.  LLVM's optimization passes for IR, which would take another 10 to 20 ms, are not run.
    """

    def __init__(self) -> None:
        import llvmlite.binding as llvm
        import llvmlite.ir
        from numba.core import cgutils

        self.llvm = llvm
        self.llvmlite_ir = llvmlite.ir
        self.cgutils = cgutils
        self.i64 = llvmlite.ir.IntType(64)
        self.module = llvmlite.ir.Module()
        self.module.triple = llvm.get_process_triple()
        self.machine = _target_machine()
        self.module.data_layout = str(self.machine.target_data)
        self.llvm_builder: Any = None  # llvmlite's IRBuilder, which adds instructions to the current function

    # -- functions --

    def define(self, body: Callable[..., Any], *parameters: Any) -> None:
        """Generate a C function.

        Args:
          body: a Python function that generates the instructions.  The C function has the same name.  `body` is called
            with a `_Int64` or `_StructPointer` for each parameter.  It returns the result of the C function, or None if
            it has called `ret`.
          parameters: the type of each parameter: `_I64`, or a struct for a pointer to such a struct.
        """
        function = self.llvmlite_ir.Function(self.module, self._function_type(len(parameters)), body.__name__)
        self.llvm_builder = self.llvmlite_ir.IRBuilder(function.append_basic_block())
        arguments: list[_Int64] = []
        for parameter, argument in zip(parameters, function.args, strict=True):
            value = _Int64(self, argument)
            arguments.append(value if parameter is _I64 else _StructPointer(self, parameter, value))
        result = body(*arguments)
        if result is not None:
            self.ret(result)

    def compile(self) -> bytes:
        """Return the object code of the module."""
        module = self.llvm.parse_assembly(str(self.module))
        module.verify()
        return self.machine.emit_object(module)

    def call(self, function: Any, *args: Any) -> _Int64:
        """Call a C function, given as for `llvm_value`, and return its result."""
        pointer = self.llvm_builder.inttoptr(self.llvm_value(function), self._function_type(len(args)).as_pointer())
        return _Int64(self, self.llvm_builder.call(pointer, [self.llvm_value(x) for x in args]))

    def _function_type(self, n_parameters: int) -> Any:
        return self.llvmlite_ir.FunctionType(self.i64, [self.i64] * n_parameters)

    def call_api(self, frame: _StructPointer, name: str, args: _StructPointer) -> _Int64:
        """Call a function of XLA's API, and return its XLA_FFI_Error*, which is 0 for success."""
        return self.call(getattr(frame.api, f"XLA_FFI_{name}"), args)

    # -- values and memory --

    def llvm_value(self, x: Any) -> Any:
        """Return llvmlite's value of an `_Int64`, an int, a ctypes pointer or the name of a C function.

        The function is in this module, or it is found when the code is loaded: in CPython or the C library.
        """
        if isinstance(x, _Int64):
            return x.value
        if isinstance(x, str):
            any_type = self._function_type(0)  # `call` casts the pointer to the type of the call
            return self.cgutils.get_or_insert_function(self.module, any_type, x).ptrtoint(self.i64)
        return self.llvmlite_ir.Constant(self.i64, x if isinstance(x, int) else ctypes.cast(x, _PTR).value)

    def _pointer(self, address: _Value, nbytes: int = 1) -> Any:
        """Return llvmlite's pointer to an integer of this size."""
        return self.llvm_builder.inttoptr(self.llvm_value(address), self.llvmlite_ir.IntType(8 * nbytes).as_pointer())

    def load(self, address: _Value, nbytes: int = 8) -> _Int64:
        """Load a signed integer of this size."""
        value = self.llvm_builder.load(self._pointer(address, nbytes))
        return _Int64(self, self.llvm_builder.sext(value, self.i64))  # unchanged if it has 8 bytes

    def store(self, value: Any, address: _Value, nbytes: int = 8) -> None:
        """Store an integer of this size."""
        truncated = self.llvm_builder.trunc(self.llvm_value(value), self.llvmlite_ir.IntType(8 * nbytes))
        self.llvm_builder.store(truncated, self._pointer(address, nbytes))

    def copy_bytes(self, destination: _Value, source: _Value, nbytes: _Value) -> None:
        pointers = self._pointer(destination), self._pointer(source)
        self.cgutils.raw_memcpy(self.llvm_builder, *pointers, self.llvm_value(nbytes), 1)

    def set_to_zeros(self, address: _Int64, nbytes: _Int64) -> None:
        piece_nbytes = self.select(nbytes < _MIN_WHOLE_MEMSET_NBYTES, 1024, nbytes)  # `nbytes`: the loop runs once
        bounds = self.llvm_value(0), self.llvm_value(nbytes), self.llvm_value(piece_nbytes)
        with self.cgutils.for_range_slice(self.llvm_builder, *bounds) as (index, _):
            start = _Int64(self, index)
            n = self.minimum(nbytes - start, piece_nbytes)
            self.cgutils.memset(self.llvm_builder, self._pointer(address + start), self.llvm_value(n), 0)

    def alloca(self, c_type: Any, count: _Value = 1) -> Any:
        """Allocate `count` structs or int64s on the stack.  Return a `_StructPointer` or an `_Int64`, respectively.

        If the count is constant, the memory is allocated once per call of the function, even within a loop.
        """
        n_words = count * (ctypes.sizeof(c_type) // 8)
        if isinstance(n_words, int):
            with self.llvm_builder.goto_entry_block():
                memory = self.llvm_builder.alloca(self.i64, n_words)
        else:
            memory = self.llvm_builder.alloca(self.i64, n_words.value)
        address = _Int64(self, self.llvm_builder.ptrtoint(memory, self.i64))
        return address if c_type is _I64 else _StructPointer(self, c_type, address)

    def variable(self, start: _Value) -> _StructPointer:
        """Return a variable on the stack.  Its attribute `current` can be read and assigned to, also within loops."""
        return self.new_struct(_Variable, current=start)

    def array(self, values: Sequence[_Value]) -> _Int64:
        """Return the address of an int64 array on the stack that holds these values."""
        address = self.alloca(_I64, len(values))
        for i, value in enumerate(values):
            self.store(value, address + 8 * i)
        return address

    def new_struct(self, struct_type: Any, **fields: Any) -> _StructPointer:
        """Return a struct on the stack with these fields, and with its size if it is one of XLA's."""
        pointer = self.alloca(struct_type)
        if struct_type._fields_[0][0] == "struct_size":
            fields |= {"struct_size": ctypes.sizeof(struct_type), "extension_start": 0}
        for name, value in fields.items():
            setattr(pointer, name, value)
        return pointer

    def atomic(self, operation: str, address: _Int64, operand: _Value) -> _Int64:
        """Apply "add", "sub" or "xchg" to an int64, sequentially consistently.  Return the old value."""
        pointer = self._pointer(address, 8)
        return _Int64(self, self.llvm_builder.atomic_rmw(operation, pointer, self.llvm_value(operand), "seq_cst"))

    # -- control flow --

    def ret(self, value: _Value, when: _Int64 | None = None) -> None:
        """End the generated function, which returns `value`.  With `when`, only if this condition is not 0."""
        if when is None:
            self.llvm_builder.ret(self.llvm_value(value))
            return
        with self.if_(when):
            self.ret(value)

    def if_(self, condition: _Int64) -> Any:
        """Generate an `if`: instructions within this context manager run only if the condition is not 0.

        LLVM places these instructions after the others, because most conditions stand for errors or rare cases.
        """
        return self.llvm_builder.if_then(self._is_true(condition), likely=False)

    def select(self, condition: _Value, yes: _Value, no: _Value) -> _Int64:
        """Return one of two values, both of which are computed (LLVM's select)."""
        values = self.llvm_value(yes), self.llvm_value(no)
        return _Int64(self, self.llvm_builder.select(self._is_true(condition), *values))

    def _is_true(self, condition: _Value) -> Any:
        return self.llvm_builder.icmp_signed("!=", self.llvm_value(condition), self.llvm_value(0))

    def minimum(self, first: _Int64, *others: _Value) -> _Int64:
        return functools.reduce(lambda x, y: self.select(x < y, x, y), others, first)

    @contextlib.contextmanager
    def loop(self, count: _Value) -> Iterator[_Int64]:
        """Generate a loop, and yield its index, which counts from 0 to `count - 1`."""
        with self.cgutils.for_range(self.llvm_builder, self.llvm_value(count)) as loop:
            yield _Int64(self, loop.index)

    @contextlib.contextmanager
    def forever(self) -> Iterator[None]:
        """Generate a loop that ends only when the generated function returns."""
        body = self.llvm_builder.append_basic_block()
        self.llvm_builder.branch(body)
        self.llvm_builder.position_at_end(body)
        yield
        self.llvm_builder.branch(body)


# -- 6.3 Compiling and loading machine code ------------------------------------------------------------
# Compiling a handler takes 8 ms, and loading its object code 1.5 ms.  So handlers share it (`_Emitter.code_key`).


def _target_machine() -> Any:
    """Return LLVM's target machine for Numba's CPU.

    Numba's own target machine optimizes more.  This one generates code at level 1, which is enough for handlers.
    """
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target

    # The CPU of this machine, unless Numba's settings name another one.  The call also initializes LLVM.
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    arch = llvm.Target.from_triple(triple)
    reloc = "static" if arch.name.startswith("x86") else "default"  # as Numba: LLVM's JIT needs "static" on x86
    return arch.create_target_machine(cpu=cpu, features=features, opt=1, reloc=reloc, codemodel="jitdefault", jit=True)


def _load_code(code: bytes) -> Any:
    """Load object code, and return the execution engine, which keeps the code in memory as long as it lives."""
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
#     run_batch                         computes strides and rows, and chooses one of three ways:
#         run_range                     on this thread: for one slice, or if the slices must run in order
#             inner_loop (6.6)          on consecutive slices
#         run_parallel                  on several threads: if an earlier call showed that this pays off
#             allocate_shared_state     allocates the state that the threads share
#             worker_loop               on each thread: claims chunks of slices and runs them
#                 run_range             (as above)
#         run_serial_and_measure        otherwise: on this thread, until the time of a slice is known
#             run_range, run_parallel   (as above)
#
# In NumPy's terms, picture each buffer as a C-contiguous array b whose elements are whole slices, so that b.itemsize is
# the size of a slice in bytes.  Batch dimensions broadcast as in NumPy.  A row is a range of slices in which the step
# from one slice to the next is constant in each buffer:
#
#     shape = np.broadcast_shapes(*[b.shape for b in bs])         # of the batch
#     n_slices = math.prod(shape)
#     strides = [np.broadcast_to(b, shape).strides for b in bs]   # in bytes; 0 where the size 1 broadcasts
#     if all(b.size in (1, n_slices) for b in bs):                # the whole batch is a row
#         row_length, steps = n_slices, [0 if b.size == 1 else b.itemsize for b in bs]
#     else:                                                       # the rows are along the last dimension
#         row_length, steps = shape[-1], [s[-1] for s in strides]
#     for i in range(0, n_slices, row_length):
#         inner_loop([address of slice i of b for b in bs], steps, row_length)     # simplified
#
# The code splits long rows into several inner loops (`max_inner_loop_nbytes`).


class _BatchedBuffer(ctypes.Structure):
    """A buffer of a call: the address of one slice, and the way to the others."""

    _fields_ = (
        ("pointer", _PTR),  # address of the current slice
        ("step", _I64),  # bytes to the next slice of a row: `slice_nbytes`, or 0 if that is the same slice
        ("batch_dims", _PTR),  # int64[]: the batch dimensions, which end where `dims` begins
        ("dims", _PTR),  # int64[]: the dimensions of a slice
        ("slice_nbytes", _I64),  # bytes of a slice: `b.itemsize` above
        ("n_own_slices", _I64),  # the product of its own batch dimensions: `b.size` above, which `run_batch` computes
    )


class _HandlerData(ctypes.Structure):
    """The global variable `data` of a handler's code.  Handlers with the same code load a copy each."""

    _fields_ = (
        # Hints, which any thread may overwrite at any time, so they may come from different calls:
        ("measured_ticks", _I64),  # time of a slice when it was last measured
        ("measured_nbytes_per_slice", _I64),  # `_Batch.nbytes_per_slice` at that time, a cheap proxy for the shapes
        # Set by `_build_handler`:
        ("n_buffers", _I64),  # number of buffers, including scratch
        ("max_inner_loop_nbytes", _I64),  # an inner loop of several slices has about this many bytes at most
        ("inner_loop", _PTR),  # the handler's function inner_loop(frame, buffers, count)
        ("run_batch", _PTR),  # the scheduler's run_batch(frame, handler_data, buffers, depth)
        # Copies of the emitter's fields (`_Emitter`):
        ("in_order", _I64),
        ("kernel_address", _PTR),
        ("lock_address", _PTR),
        ("report_address", _PTR),
    )


class _Batch(ctypes.Structure):
    """A call with batch dimensions, on the stack of the caller's thread."""

    _fields_ = (
        ("frame", ctypes.POINTER(XLA_FFI_CallFrame)),
        ("handler_data", ctypes.POINTER(_HandlerData)),
        ("buffers", ctypes.POINTER(_BatchedBuffer)),  # all buffers of the call, at their first slices
        ("depth", _I64),  # number of batch dimensions, at least 1
        ("shape", _PTR),  # int64[depth]: the batch dimensions
        ("strides", _PTR),  # int64[depth][n_buffers]: bytes to the next position; 0 if the size 1 broadcasts
        ("n_slices", _I64),  # number of slices: the product of `shape`
        ("nbytes_per_slice", _I64),  # bytes of a slice in all buffers: the sum of their `slice_nbytes`
        ("row_length", _I64),  # number of slices in a row; an inner loop does not cross the end of a row
        ("max_inner_loop_length", _I64),  # in slices
    )


class _SharedState(ctypes.Structure):
    """The state of a batch that several threads run.  It is on the heap, because queued tasks may outlive the call."""

    _fields_ = (
        ("batch", ctypes.POINTER(_Batch)),  # valid as long as `n_unsettled` is not 0
        ("next_slice", _I64),  # atomic: the first slice that is not claimed; `n_slices` or more if none is left
        ("n_slices", _I64),  # `_Batch.n_slices`, because a late task must not read `batch`
        ("chunk_length", _I64),  # number of slices that a thread claims at a time
        ("n_unsettled", _I64),  # atomic: number of slices that are not settled (finished or cancelled)
        ("refcount", _I64),  # atomic: one for each worker loop, queued or running, and one for the caller
        ("error", _PTR),  # atomic: the last XLA_FFI_Error*, or 0
        ("done_lock", _PTR),  # a PyThread_type_lock, which is locked until `n_unsettled` is 0
    )


_WAIT_LOCK = 1  # pythread.h: PyThread_acquire_lock waits until the lock is free

# Estimates, in microseconds of work:
_MIN_MEASURABLE_US = 1  # `run_serial_and_measure` does not extrapolate from a shorter time
_MIN_PARALLEL_US = 40  # for less work, it does not pay off to wake threads
_US_PER_TASK = 15  # one task is queued per 15 us of work, so more than chunks; if no chunk is left, a task ends at once
_CHUNK_US = 20  # a thread claims this much work at a time; not all of its share, because cores differ in speed


class _BatchScheduler(_IRBuilder):
    """The machine code of the batch scheduler, compiled once per process.

    Each public method generates the C function of the same name.  Each private method generates a part of its callers'
    code.  For example, `run_range` generates this function:

        XLA_FFI_Error* run_range(_Batch* batch, int64_t first, int64_t stop) {
            _BatchedBuffer buffers[batch->handler_data->n_buffers];
            int64_t next_index = first;
            for (;;) {
                int64_t index = next_index;
                if (index >= stop) return 0;
                ...  // the code of _point_to_slice(batch, buffers, index)
                int64_t rest_of_row = batch->row_length - index % batch->row_length;
                int64_t count = min(rest_of_row, stop - index, batch->max_inner_loop_length);
                XLA_FFI_Error* error = batch->handler_data->inner_loop(batch->frame, buffers, count);
                if (error) return error;
                next_index = index + count;
            }
        }

    C functions return an XLA_FFI_Error*, or 0 for success, with two exceptions: `now` returns ticks, and
    `allocate_shared_state` an address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_cycle_counter = self.module.triple.startswith("x86_64")
        self.ticks_per_us = 3000 if self.has_cycle_counter else 1000  # on x86 2000 to 4000: close enough for estimates
        # A function is defined before its callers.  `llvm_value` declares unknown functions as external.
        self.define(self.now)
        self.define(self.run_range, _Batch, _I64, _I64)
        self.define(self.worker_loop, _SharedState)
        self.define(self.allocate_shared_state)
        self.define(self.run_parallel, _Batch, _I64, _I64)
        self.define(self.run_serial_and_measure, _Batch)
        self.define(self.run_batch, XLA_FFI_CallFrame, _HandlerData, _BatchedBuffer, _I64)

    # -- the strides and rows of a batch --

    def run_batch(
        self, frame: _StructPointer, handler_data: _StructPointer, buffers: _StructPointer, depth: _Int64
    ) -> _Int64:
        """Run a call with `depth` batch dimensions, at least one.  The buffers point to their first slices."""
        batch = self.new_struct(_Batch, frame=frame, handler_data=handler_data, buffers=buffers, depth=depth)
        batch.shape = self.alloca(_I64, depth)
        batch.strides = self.alloca(_I64, depth * handler_data.n_buffers)
        batch.n_slices = 1
        batch.nbytes_per_slice = 0
        with self.loop(handler_data.n_buffers) as k:
            buffers[k].n_own_slices = 1
            batch.nbytes_per_slice = batch.nbytes_per_slice + buffers[k].slice_nbytes
        with self.loop(depth) as i:
            self._add_dimension(batch, depth - 1 - i)
        self._choose_rows(batch)
        # The last `+ 1` allows at least one slice; the first avoids a division by zero if all buffers are empty.
        batch.max_inner_loop_length = handler_data.max_inner_loop_nbytes // (batch.nbytes_per_slice + 1) + 1
        with self.if_((batch.n_slices < 2) | handler_data.in_order):
            self.ret(self.call("run_range", batch, 0, batch.n_slices))
        is_measured = handler_data.measured_nbytes_per_slice == batch.nbytes_per_slice
        ticks_per_slice = self.select(is_measured, handler_data.measured_ticks, 0)
        work_us = ticks_per_slice * batch.n_slices // self.ticks_per_us
        with self.if_(work_us > _MIN_PARALLEL_US):
            self.ret(self.call("run_parallel", batch, 0, work_us))
        return self.call("run_serial_and_measure", batch)

    def _add_dimension(self, batch: _StructPointer, axis: _Int64) -> None:
        """Compute the size of a batch dimension and its stride in each buffer, and multiply numbers of slices by it."""
        n_buffers = batch.handler_data.n_buffers
        size = self.variable(1)
        with self.loop(n_buffers) as k:
            buffer = batch.buffers[k]
            own_size = self.variable(1)  # stays 1 if the buffer has no batch dimensions
            with self.if_(buffer.batch_dims != buffer.dims):
                own_size.current = self.load(buffer.batch_dims + axis * 8)
            broadcasts = own_size.current == 1
            size.current = self.select(broadcasts, size.current, own_size.current)
            # So far, `n_own_slices` is the product of the later dimensions.
            stride = self.select(broadcasts, 0, buffer.slice_nbytes * buffer.n_own_slices)
            self.store(stride, self._stride_address(batch, axis, k))
            buffer.n_own_slices = buffer.n_own_slices * own_size.current
        self.store(size.current, batch.shape + axis * 8)
        batch.n_slices = batch.n_slices * size.current

    def _stride_address(self, batch: _StructPointer, axis: _Int64, k: _Int64) -> _Int64:
        return batch.strides + (axis * batch.handler_data.n_buffers + k) * 8

    def _choose_rows(self, batch: _StructPointer) -> None:
        """Choose how many slices a row has, and the step of each buffer in it."""
        is_one_row = self.variable(1)
        with self.loop(batch.handler_data.n_buffers) as k:
            buffer = batch.buffers[k]
            has_one_or_all = (buffer.n_own_slices == 1) | (buffer.n_own_slices == batch.n_slices)
            is_one_row.current = is_one_row.current & has_one_or_all
        last_axis = batch.depth - 1
        batch.row_length = self.select(is_one_row.current, batch.n_slices, self.load(batch.shape + last_axis * 8))
        with self.loop(batch.handler_data.n_buffers) as k:
            buffer = batch.buffers[k]
            step = self.select(buffer.n_own_slices == 1, 0, buffer.slice_nbytes)
            last_stride = self.load(self._stride_address(batch, last_axis, k))
            buffer.step = self.select(is_one_row.current, step, last_stride)

    # -- a range of slices on one thread --

    def run_range(self, batch: _StructPointer, first: _Int64, stop: _Int64) -> None:
        """Run the slices [first, stop), one inner loop after another.  If one fails, return its error at once."""
        buffers = self.alloca(_BatchedBuffer, batch.handler_data.n_buffers)
        next_index = self.variable(first)
        with self.forever():
            index = next_index.current
            self.ret(0, when=index >= stop)
            self._point_to_slice(batch, buffers, index)
            rest_of_row = batch.row_length - index % batch.row_length
            count = self.minimum(rest_of_row, stop - index, batch.max_inner_loop_length)
            error = self.call(batch.handler_data.inner_loop, batch.frame, buffers, count)
            self.ret(error, when=error)
            next_index.current = index + count

    def _point_to_slice(self, batch: _StructPointer, buffers: _StructPointer, index: _Int64) -> None:
        """Copy the buffers of a batch to `buffers`, with their pointers at slice `index`.

        For example, slice 4 of a batch of 2 x 3 slices is at the position (1, 1).  A buffer of 2 x 3 slices of 100
        bytes has the strides (300, 100), so its slice begins at byte 400.  A buffer of 1 x 3 slices has the strides
        (0, 100), so its slice begins at byte 100.
        """
        n_buffers = batch.handler_data.n_buffers
        self.copy_bytes(buffers, batch.buffers, n_buffers * ctypes.sizeof(_BatchedBuffer))
        rest = self.variable(index)
        with self.loop(batch.depth) as i:
            axis = batch.depth - 1 - i
            size = self.load(batch.shape + axis * 8)
            position = rest.current % size
            rest.current = rest.current // size
            with self.loop(n_buffers) as k:
                stride = self.load(self._stride_address(batch, axis, k))
                buffers[k].pointer = buffers[k].pointer + position * stride

    # -- whether threads pay off --

    def run_serial_and_measure(self, batch: _StructPointer) -> None:
        """Run the slices on this thread, in ranges of 1, 8, 64, ... slices, until threads pay off for the rest.

        If a range took at least 1 us, its time predicts the work of the rest.  A shorter range predicts nothing, but
        the next one then takes only about 8 us, for which threads would not pay off.
        """
        start = self.variable(0)
        count = self.variable(1)
        with self.forever():
            stop = start.current + count.current
            began = self.call("now")
            error = self.call("run_range", batch, start.current, stop)
            ticks = self.call("now") - began
            rest = batch.n_slices - stop
            self.ret(error, when=error | (rest == 0))  # returns an error, or 0 once the last slice is finished
            with self.if_(ticks > self.ticks_per_us * _MIN_MEASURABLE_US):
                self._record_time(batch, ticks, count.current)
                work_us = ticks * rest // count.current // self.ticks_per_us
                with self.if_(work_us > _MIN_PARALLEL_US):
                    self.ret(self.call("run_parallel", batch, stop, work_us))
            start.current = stop
            count.current = self.minimum(count.current * 8, rest)

    def _record_time(self, batch: _StructPointer, ticks: _Int64, count: _Int64) -> None:
        """Record the time of `count` slices, so that `run_batch` can estimate the work of later calls."""
        batch.handler_data.measured_ticks = ticks // count
        batch.handler_data.measured_nbytes_per_slice = batch.nbytes_per_slice

    def now(self) -> _Int64:
        """Return the time of a monotonic clock in ticks: cycles on x86, nanoseconds elsewhere."""
        if self.has_cycle_counter:  # `clock_gettime` may take 400 ns where it is a system call, and Windows lacks it
            counter = self.module.declare_intrinsic("llvm.readcyclecounter", (), self._function_type(0))
            return _Int64(self, self.llvm_builder.call(counter, []))
        timespec = self.alloca(_I64, 2)  # seconds and nanoseconds
        self.call("clock_gettime", time.CLOCK_MONOTONIC, timespec)
        return self.load(timespec) * 10**9 + self.load(timespec + 8)

    # -- a range of slices on several threads --
    # - Claims.  A thread claims a chunk of slices by an atomic fetch-and-add of `next_slice`.  No other thread runs it.
    # - Completion.  When a chunk is settled, its thread subtracts the slices from `n_unsettled`.  The thread that
    #   reaches 0 releases `done_lock`, which wakes the caller.
    # - Visibility.  Each thread writes to the buffers before its subtraction, which is sequentially consistent.  So the
    #   caller, which waits for the subtraction that reaches 0, sees the writes of all threads.
    # - Cancellation.  If a slice fails, its thread cancels the rest of its chunk and all slices that are not claimed.
    #   It moves `next_slice` beyond `n_slices`, and subtracts these slices from `n_unsettled`.  Chunks of other threads
    #   still run.  If several slices fail, the call returns one of their errors, not necessarily the first.
    # - No deadlock.  Callers may be on threads of the pool, so a task may be queued behind a caller that waits.  So
    #   callers wait only for claimed slices, never for queued tasks.  A task that starts late finds no slices to claim.
    # - Memory.  The thread that drops the last reference frees the shared state.

    def run_parallel(self, batch: _StructPointer, first: _Int64, work_us: _Int64) -> _Int64:
        """Run the slices from `first` on, about `work_us` microseconds in total, on as many threads as pay off."""
        shared = _StructPointer(self, _SharedState, self.call("allocate_shared_state"))
        with self.if_(shared == 0):  # not enough memory
            self.ret(self.call("run_range", batch, first, batch.n_slices))
        n_threads = self.variable(1)
        address = n_threads.address_of("current")  # XLA writes the number here.  Without a thread pool it stays 1.
        args = self.new_struct(XLA_FFI_ThreadPool_NumThreads_Args, ctx=batch.frame.ctx, num_threads=address)
        self._destroy_error(batch.frame, self.call_api(batch.frame, "ThreadPool_NumThreads", args))
        rest = batch.n_slices - first
        n_tasks = self.minimum(n_threads.current - 1, rest - 1, work_us // _US_PER_TASK)
        shared.batch = batch
        shared.next_slice = first
        shared.n_slices = batch.n_slices
        shared.chunk_length = rest * _CHUNK_US // work_us + 1
        shared.n_unsettled = rest
        shared.refcount = n_tasks + 2  # the worker loops of the tasks and of this thread, and the caller
        shared.error = 0
        self.call("PyThread_acquire_lock", shared.done_lock, _WAIT_LOCK)  # does not wait: the lock is new
        # Each task calls the C function `worker_loop(shared)`.
        args = self.new_struct(XLA_FFI_ThreadPool_Schedule_Args, ctx=batch.frame.ctx, task="worker_loop", data=shared)
        with self.loop(n_tasks):
            self.call_api(batch.frame, "ThreadPool_Schedule", args)  # fails only without a pool, and then n_tasks is 0
        self.call("worker_loop", shared)
        self.call("PyThread_acquire_lock", shared.done_lock, _WAIT_LOCK)  # waits until the last slice is settled
        error = shared.error
        self._drop_reference(shared)
        return error

    def allocate_shared_state(self) -> _Int64:
        """Return the address of a new `_SharedState` with a lock, or 0 if there is no memory."""
        shared = _StructPointer(self, _SharedState, self.call("PyMem_RawMalloc", ctypes.sizeof(_SharedState)))
        self.ret(0, when=shared == 0)
        lock = self.call("PyThread_allocate_lock")
        with self.if_(lock == 0):
            self.call("PyMem_RawFree", shared)
            self.ret(0)
        shared.done_lock = lock
        return shared

    def worker_loop(self, shared: _StructPointer) -> None:
        """Claim chunks of slices and run them, until there are no more.  Each thread that shares a batch runs this."""
        with self.forever():
            first = self.atomic("add", shared.address_of("next_slice"), shared.chunk_length)
            with self.if_(first >= shared.n_slices):
                self._drop_reference(shared)
                self.ret(0)
            stop = self.minimum(first + shared.chunk_length, shared.n_slices)
            began = self.call("now")
            error = self.call("run_range", shared.batch, first, stop)
            ticks = self.call("now") - began
            n_settled = self.variable(stop - first)
            # The estimate may be wrong, for example from a short last chunk.  If it is low, `run_serial_and_measure`
            # measures the next call.  If it is high, the next call wakes threads for too little work, and they measure.
            with self.if_(error == 0):
                self._record_time(shared.batch, ticks, stop - first)
            with self.if_(error):
                n_settled.current = n_settled.current + self._cancel_unclaimed(shared)
                self._destroy_error(shared.batch.frame, self.atomic("xchg", shared.address_of("error"), error))
            n_unsettled_before = self.atomic("sub", shared.address_of("n_unsettled"), n_settled.current)
            # From here on `n_unsettled` may be 0, and `shared.batch` invalid.  A claimed slice keeps it above 0.
            with self.if_(n_unsettled_before == n_settled.current):  # these were the last ones
                self.call("PyThread_release_lock", shared.done_lock)

    def _cancel_unclaimed(self, shared: _StructPointer) -> _Int64:
        """Cancel all slices that no thread has claimed, and return their number."""
        first_unclaimed = self.atomic("add", shared.address_of("next_slice"), shared.n_slices)
        return shared.n_slices - self.minimum(first_unclaimed, shared.n_slices)

    def _drop_reference(self, shared: _StructPointer) -> None:
        """Drop a reference to the shared state.  The last one frees the memory."""
        with self.if_(self.atomic("sub", shared.address_of("refcount"), 1) == 1):
            self.call("PyThread_free_lock", shared.done_lock)
            self.call("PyMem_RawFree", shared)

    def _destroy_error(self, frame: _StructPointer, error: _Int64) -> None:
        """Destroy an XLA_FFI_Error*, unless it is 0."""
        with self.if_(error):
            self.call_api(frame, "Error_Destroy", self.new_struct(XLA_FFI_Error_Destroy_Args, error=error))


@functools.cache
def _scheduler_engine() -> Any:
    """Return the execution engine with the functions of the batch scheduler."""
    return _load_code(_BatchScheduler().compile())


# -- 6.5 CUDA's driver ---------------------------------------------------------------------------------

# cuda.h: CUfunction_attribute and CUdevice_attribute
_FUNC_MAX_THREADS_PER_BLOCK = 0
_FUNC_STATIC_SHARED_BYTES = 1
_FUNC_MAX_DYNAMIC_SHARED_BYTES = 8
_DEVICE_MAX_SHARED_BYTES_OPTIN = 97


class _LibCuda:
    """The library libcuda (CUDA's driver).  Python calls it with these methods, and handlers call its addresses."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def address(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, name), _PTR).value or 0

    def describe(self, code: int) -> str:
        """Return CUDA's name for an error code."""
        name = ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        return (name.value or b"an unknown error").decode()

    def exceeded_limits_text(self, function: int, config: _LaunchConfig) -> str:
        """Return a text with the limits of a CUfunction that a launch exceeds, or an empty text."""
        threads = "threads in a block, because of its registers or launch bounds"
        text = ""
        for attribute, size, unit in (
            (_FUNC_MAX_THREADS_PER_BLOCK, config.threads_per_block, threads),
            (_FUNC_MAX_DYNAMIC_SHARED_BYTES, config.shared_mem, "bytes of dynamic shared memory"),
        ):
            with contextlib.suppress(RuntimeError):  # after some errors, every call of the driver fails
                limit = self.function_attribute(function, attribute)
                if size > limit:
                    text += f"; on this GPU the kernel can have at most {limit} {unit}, and the launch has {size}"
        return text

    def function_attribute(self, function: int, attribute: int) -> int:
        """Return an attribute of a CUfunction."""
        return self.get(_I32, "cuFuncGetAttribute", attribute, _PTR(function))

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver.  Raise a RuntimeError if it fails."""
        if code := getattr(self.library, name)(*args):
            raise RuntimeError(f"{name} failed with {self.describe(code)}")

    def get(self, kind: Any, name: str, *args: Any) -> int:
        """Call a function of the driver whose first argument points to its result, and return the result, a `kind`."""
        result = kind()
        self.call(name, ctypes.byref(result), *args)
        return result.value or 0  # the value of a null pointer is None

    @contextlib.contextmanager
    def keeping_context(self) -> Iterator:
        """Restore the current context at the end, because Warp may make another one current."""
        context = self.get(_PTR, "cuCtxGetCurrent")
        try:
            yield
        finally:
            self.call("cuCtxSetCurrent", _PTR(context))

    def load(self, cubin: bytes, entry: str, ordinal: int) -> int:
        """Load machine code in the current context, and return the CUfunction `entry`.  It is never unloaded.

        Its launches may have as much dynamic shared memory as the device allows.
        """
        module = self.get(_PTR, "cuModuleLoadData", cubin)
        function = self.get(_PTR, "cuModuleGetFunction", _PTR(module), entry.encode())
        max_shared_bytes = self.get(_I32, "cuDeviceGetAttribute", _DEVICE_MAX_SHARED_BYTES_OPTIN, ordinal)
        max_dynamic_bytes = max_shared_bytes - self.function_attribute(function, _FUNC_STATIC_SHARED_BYTES)
        self.call("cuFuncSetAttribute", _PTR(function), _FUNC_MAX_DYNAMIC_SHARED_BYTES, max_dynamic_bytes)
        return function


# -- 6.6 The handler of one signature and one emitter --------------------------------------------------

_HANDLER_CODE: dict[tuple, bytes] = {}  # {the key of `_build_handler`: object code}

# On a CPU, the slices of an inner loop have at most about this size in all buffers together, unless it is one slice.
# So zeroed results are still in the L1 cache, which is often this large, when the slices run.  Larger slices are zeroed
# one at a time.  Zeroing 64 slices of 400 KB at once would take up to 70% of the time of a sum x + y.
_INNER_LOOP_NBYTES = 1 << 15

_HUGE_PAGE_MIN_NBYTES = 1 << 22  # NumPy uses huge pages from this size on, too
_MADV_HUGEPAGE = 14  # Linux, sys/mman.h
_FE_DFL_ENV = -1  # Linux, fenv.h on x86-64 and arm64: this pointer stands for the default environment
_FENV_WORDS = 32  # more than fenv_t has: 4 words on x86-64, 1 on arm64


def _build_handler(signature: _Signature, emitter: _Emitter) -> _CompiledHandler:
    """Compile a handler, or reuse the object code of one with the same signature and `code_key`, and load it."""
    # Only code for CPUs is shared.  It does not depend on the label, callbacks or traits.
    key = signature._replace(label=""), emitter.code_key, emitter.starts_threads, bool(emitter.lock_address)
    code = _HANDLER_CODE.get(key)  # None if `code_key` is None, because such code is not stored
    callbacks = []
    if code is None:
        builder = _HandlerBuilder(signature, emitter)
        callbacks = builder.callbacks
        code = builder.compile()
        if emitter.code_key is not None:
            _HANDLER_CODE[key] = code
    engine = _load_code(code)
    scheduler_engine = _scheduler_engine()
    data = _HandlerData.from_address(engine.get_global_value_address("data"))
    data.n_buffers = len(signature.ranks)
    data.max_inner_loop_nbytes = 1 << 62 if emitter.libcuda else _INNER_LOOP_NBYTES  # one launch may run all slices
    data.inner_loop = engine.get_function_address("inner_loop")
    data.run_batch = scheduler_engine.get_function_address("run_batch")
    data.in_order = emitter.in_order
    data.kernel_address = emitter.kernel_address
    data.lock_address = emitter.lock_address
    data.report_address = emitter.report_address
    keep_alive = [engine, scheduler_engine, emitter, callbacks]
    return _CompiledHandler(engine.get_function_address("handler"), keep_alive=keep_alive, data=data)


class _HandlerBuilder(_IRBuilder):
    """The module with a handler's `_HandlerData`, and its C functions `handler` and `inner_loop`."""

    def __init__(self, signature: _Signature, emitter: _Emitter) -> None:
        super().__init__()
        self.signature = signature
        self.emitter = emitter
        self.sets_environment = emitter.starts_threads and sys.platform == "linux"  # `_FE_DFL_ENV` is valid only there
        self.callbacks: list = []  # Python functions that the code calls, except those of the emitter
        self.handler_data = self._global_handler_data()
        self.define(self.inner_loop, XLA_FFI_CallFrame, _BatchedBuffer, _I64)
        self.define(self.handler, XLA_FFI_CallFrame)

    def _global_handler_data(self) -> _StructPointer:
        """Define the global variable `data`, a `_HandlerData` that `_build_handler` fills in after loading."""
        words = self.llvmlite_ir.ArrayType(self.i64, len(_HandlerData._fields_))
        memory = self.llvmlite_ir.GlobalVariable(self.module, words, "data")
        memory.initializer = self.llvmlite_ir.Constant(words, None)  # zeros
        return _StructPointer(self, _HandlerData, _Int64(self, memory.ptrtoint(self.i64)))

    # -- inner loops --

    def inner_loop(self, frame: _StructPointer, buffers: _StructPointer, count: _Int64) -> int:
        """Run `count` consecutive slices.  On a CPU, first zero their parts of the buffers in `signature.zeroed`.

        Results have all batch dimensions at full size, so these parts are contiguous.
        """
        if not self.emitter.libcuda:  # on a GPU, `_prepare_results` has zeroed all slices
            for j in self.signature.zeroed:
                result = buffers[self.signature.n_in + j]
                self.set_to_zeros(result.pointer, result.slice_nbytes * count)
        self._lock_and_set_environment()
        self.emitter.write(self, frame, buffers, count)
        return 0  # for `ret`, which reverts `_lock_and_set_environment`

    def _lock_and_set_environment(self) -> None:
        """Acquire the emitter's lock.  If the kernel starts threads, set the default floating-point environment.

        XLA's threads flush subnormal numbers to zero.  If such a thread starts Numba's threads, they inherit this, and
        it would later change the results of parallel functions outside of JAX.
        """
        if self.emitter.lock_address:
            self.call("PyThread_acquire_lock", self.handler_data.lock_address, _WAIT_LOCK)
        if self.sets_environment:
            self.saved_environment = self.alloca(_I64, _FENV_WORDS)
            self.call("fegetenv", self.saved_environment)
            self.call("fesetenv", _FE_DFL_ENV)

    def ret(self, value: _Value, when: _Int64 | None = None) -> None:
        """End the generated function.  If it is `inner_loop`, first revert `_lock_and_set_environment`."""
        if when is None and self.llvm_builder.function.name == "inner_loop":
            if self.sets_environment:
                self.call("fesetenv", self.saved_environment)
            if self.emitter.lock_address:
                self.call("PyThread_release_lock", self.handler_data.lock_address)
        super().ret(value, when)

    @contextlib.contextmanager
    def each_slice(self, buffers: _StructPointer, count: _Int64) -> Iterator[list[_KernelArray]]:
        """Generate a loop over `count` slices, and yield the arrays of one slice."""
        first_arrays = self._first_arrays(buffers)
        steps = [buffers[k].step for k in range(len(first_arrays))]
        with self.loop(count) as i:
            yield [x._replace(pointer=x.pointer + step * i) for x, step in zip(first_arrays, steps, strict=True)]

    @contextlib.contextmanager
    def each_batch_launch(
        self, buffers: _StructPointer, count: _Int64, max_slices: int
    ) -> Iterator[tuple[list[_KernelArray], _Int64]]:
        """Generate a loop over batch launches, each of at most `max_slices` of `count` slices.

        Yields:
          The arrays of a launch, and its number of slices.  The first dimension of an array is that number, or 1 if its
          step is 0, because all slices share the array or are empty.
        """
        first_arrays = self._first_arrays(buffers)
        with self.loop((count + (max_slices - 1)) // max_slices) as launch:
            start = launch * max_slices
            n_slices = self.minimum(count - start, max_slices)
            arrays = []
            for k, array in enumerate(first_arrays):
                step = buffers[k].step
                dims = [self.select(step == 0, 1, n_slices), *array.dims]
                arrays.append(_KernelArray(array.pointer + step * start, dims, array.itemsize))
            yield arrays, n_slices

    def _first_arrays(self, buffers: _StructPointer) -> list[_KernelArray]:
        """Return the arrays of the first slice, to which the buffers point."""
        arrays = []
        for k, (dtype, rank) in enumerate(zip(self.signature.dtypes, self.signature.ranks, strict=True)):
            buffer = buffers[k]
            dims = [self.load(buffer.dims + 8 * axis) for axis in range(rank)]
            arrays.append(_KernelArray(buffer.pointer, dims, dtype.itemsize))
        return arrays

    # -- a call --

    def handler(self, frame: _StructPointer) -> _Int64:
        """Run a call: one slice, or a batch.  If XLA is registering the handler, describe the handler instead."""
        with self.if_(frame.extension_start):
            extension = _StructPointer(self, XLA_FFI_Metadata_Extension, frame.extension_start)
            with self.if_(extension.extension_base.type == _EXTENSION_METADATA):
                self._describe_handler(frame, extension.metadata)
                self.ret(0)
        self.ret(0, when=frame.stage != _STAGE_EXECUTE)
        xla_buffers = self._xla_buffers(frame)
        depth = self._batch_depth(xla_buffers)
        buffers = self._batched_buffers(xla_buffers)
        self._prepare_results(frame, xla_buffers, buffers, depth)
        with self.if_(depth):
            self.ret(self.call(self.handler_data.run_batch, frame, self.handler_data, buffers, depth))
        return self.call("inner_loop", frame, buffers, 1)

    def _describe_handler(self, frame: _StructPointer, metadata: _StructPointer) -> None:
        """Report the traits and the API version of the handler."""
        metadata.traits = self.emitter.traits
        metadata.api_version.major_version = _API_MAJOR
        # XLA rejects a minor version that is newer than its own.
        metadata.api_version.minor_version = frame.api.api_version.minor_version

    def _xla_buffers(self, frame: _StructPointer) -> list[_StructPointer]:
        """Return XLA's buffers, in the order of the signature.

        Their number and dtypes need no check, because the target name contains a hash of the signature.
        """
        n_in = self.signature.n_in
        args = frame.args.args
        rets = frame.rets.rets
        addresses = [args + 8 * i for i in range(n_in)]
        addresses += [rets + 8 * j for j in range(len(self.signature.ranks) - n_in)]
        return [_StructPointer(self, XLA_FFI_Buffer, self.load(address)) for address in addresses]

    def _batch_depth(self, xla_buffers: Sequence[_StructPointer]) -> _Int64:
        """Return the number of batch dimensions of the call: the rank of the last buffer, minus the rank of its slices.

        Results have all batch dimensions.  So do the inputs of a call without results, which is not partitioned (5.2).
        """
        return xla_buffers[-1].rank - self.signature.ranks[-1] if xla_buffers else _Int64(self, self.llvm_value(0))

    def _batched_buffers(self, xla_buffers: Sequence[_StructPointer]) -> _StructPointer:
        """Return an array of `_BatchedBuffer` at their first slices.

        For an input to which a result is aliased, the kernel gets the memory of the result.
        """
        signature = self.signature
        result_of_input = dict(signature.aliases)
        buffers = self.alloca(_BatchedBuffer, len(signature.ranks))
        for k, (dtype, rank) in enumerate(zip(signature.dtypes, signature.ranks, strict=True)):
            xla_buffer = xla_buffers[k]
            if k in result_of_input:
                xla_buffer = xla_buffers[signature.n_in + result_of_input[k]]
            dims = xla_buffer.dims + (xla_buffer.rank - rank) * 8
            sizes = [self.load(dims + 8 * axis) for axis in range(rank)]
            buffer = buffers[k]
            buffer.pointer = xla_buffer.data
            buffer.step = 0
            buffer.batch_dims = xla_buffer.dims
            buffer.dims = dims
            buffer.slice_nbytes = math.prod(sizes) * dtype.itemsize
        return buffers

    # -- results before the first slice runs --

    def _prepare_results(
        self, frame: _StructPointer, xla_buffers: Sequence[_StructPointer], buffers: _StructPointer, depth: _Int64
    ) -> None:
        """Prepare all slices of the results: huge pages on a CPU, zeros on a GPU, values of aliased inputs."""
        signature = self.signature
        input_of_result = {j: i for i, j in signature.aliases}
        for j, result in enumerate(xla_buffers[signature.n_in :]):
            nbytes = self.variable(buffers[signature.n_in + j].slice_nbytes)
            with self.loop(depth) as axis:
                nbytes.current = nbytes.current * self.load(result.dims + 8 * axis)
            if not self.emitter.libcuda:
                self._use_huge_pages(result.data, nbytes.current)
            elif j in signature.zeroed:  # on a CPU, `inner_loop` zeroes
                self._write_gpu_memory(frame, nbytes.current, "cuMemsetD8Async", result.data, 0)
            if j in input_of_result:
                source = xla_buffers[input_of_result[j]].data
                self._copy_aliased_input(frame, result.data, source, nbytes.current)

    def _use_huge_pages(self, data: _Int64, nbytes: _Int64) -> None:
        """Ask Linux for huge pages under a large result, as NumPy does.  An add of 1e7 float32: 31 instead of 48 ms."""
        if sys.platform == "linux":
            with self.if_(nbytes >= _HUGE_PAGE_MIN_NBYTES):
                first_page = (data + (mmap.PAGESIZE - 1)) & -mmap.PAGESIZE
                self.call("madvise", first_page, data + nbytes - first_page, _MADV_HUGEPAGE)

    def _copy_aliased_input(self, frame: _StructPointer, result: _Int64, source: _Int64, nbytes: _Int64) -> None:
        """Copy an input to the result that is aliased to it, unless both have the same memory.

        Both have the same shape, including batch dimensions.  Normally XLA passes one address for both, after it has
        copied the input if that is needed later.  One exception: a dynamic-slice fusion on GPUs (XLA of jax 0.11.2)
        loses the alias, and the result is uninitialized.  No exception is known on CPUs.
        """
        with self.if_(source != result):
            if self.emitter.libcuda:
                self._write_gpu_memory(frame, nbytes, "cuMemcpyDtoDAsync_v2", result, source)
            else:
                self.copy_bytes(result, source, nbytes)

    def _write_gpu_memory(self, frame: _StructPointer, nbytes: _Int64, driver_function: str, *args: _Value) -> None:
        """Call `driver_function(*args, nbytes, stream)`, which CUDA graphs can capture.  If it fails, end `handler`."""
        libcuda, label = self.emitter.libcuda, self.signature.label
        assert libcuda is not None

        def report(code: int) -> int:  # runs in Python, if the driver has failed
            text = (
                f"{driver_function} could not initialize an output or scratch buffer ({libcuda.describe(code)}). If a "
                "kernel has accessed memory out of bounds, all later calls of the CUDA driver fail. To find this "
                "kernel, run `compute-sanitizer python script.py`."
            )
            return _store_error_message(RuntimeError(text), label)

        callback = ctypes.CFUNCTYPE(_PTR, _I32)(report)
        self.callbacks.append(callback)
        with self.if_(nbytes > 0):
            code = self.call(libcuda.address(driver_function), *args, nbytes, self.load_stream(frame))
            with self.if_(code & 0xFFFF_FFFF):  # the result is a C int
                self.ret(self._create_error(frame, self.call(callback, code)))

    def _create_error(self, frame: _StructPointer, message: _Int64) -> _Int64:
        """Create an XLA_FFI_Error*.  `message` is the address of a C string, which XLA copies."""
        args = self.new_struct(XLA_FFI_Error_Create_Args, message=message, errc=_ERROR_INTERNAL)
        return self.call_api(frame, "Error_Create", args)

    # -- for emitters --

    def fail_inner_loop(self, frame: _StructPointer, message: _Int64) -> None:
        """End the generated `inner_loop`, which returns an error.  `message` is the address of a C string."""
        self.ret(self._create_error(frame, message))

    def launch_attribute_address(self, frame: _StructPointer) -> _Int64:
        """Return the address of the elements of the launch attribute, which is the only attribute of a call."""
        return _StructPointer(self, XLA_FFI_Array, self.load(frame.attrs.attrs)).data

    def load_stream(self, frame: _StructPointer) -> _Int64:
        """Load the stream of the call."""
        return self._query_xla(frame, "Stream_Get", XLA_FFI_Stream_Get_Args).stream

    def load_stream_and_device(self, frame: _StructPointer) -> tuple[_Int64, _Int64]:
        """Load the stream and the CUDA ordinal of the call."""
        ordinal = self._query_xla(frame, "DeviceOrdinal_Get", XLA_FFI_DeviceOrdinal_Get_Args).device_ordinal
        return self.load_stream(frame), ordinal

    def _query_xla(self, frame: _StructPointer, function: str, args_struct: Any) -> Any:
        """Return a struct that a function of XLA's API fills in.  If it fails, end the function with the error."""
        args = self.new_struct(args_struct, ctx=frame.ctx)
        error = self.call_api(frame, function, args)
        self.ret(error, when=error)
        return args


# -- 6.7 Slices that run in Python ---------------------------------------------------------------------


class _CallbackEmitter(_Emitter):
    """An emitter that runs each slice by calling a Python function under the GIL, for kernels without machine code.

    Machine code and Python exchange an int64 array.  For an input x[3,4] and an output y[4], it contains:

        address of x, 3, 4, address of y, 4, launch_address, stream, ordinal, address of an error message or 0
    """

    def __init__(self, signature: _Signature, body: Callable[..., None], libcuda: _LibCuda | None = None) -> None:
        """Create an emitter.

        Args:
          signature: the signature of the handler.
          body: `body(buffers, launch_address, stream, ordinal)` runs one slice.  An exception that it raises becomes
            the error of the call.  The arguments are a list of (address, shape), the address of the launch attribute,
            the CUDA stream and the device ordinal.  On CPUs, the last two are 0.
          libcuda: the CUDA driver, if the buffers are in a GPU's memory.  Default: None.
        """
        self.libcuda = libcuda
        i_message = len(signature.ranks) + sum(signature.ranks) + 3  # the index of the last element

        def callback(words: Any) -> None:  # runs in each call
            message = 0
            try:
                values = iter(words[:i_message])
                buffers = [(next(values), tuple(itertools.islice(values, rank))) for rank in signature.ranks]
                launch_address, stream, ordinal = values  # the three words after the buffers
                body(buffers, launch_address, stream, ordinal)
            except BaseException as error:  # no exception may unwind into XLA
                message = _store_error_message(error, signature.label)
            words[i_message] = message

        self.callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(_I64))(callback)
        # The last element starts as this message.  The callback overwrites it at its end, but a KeyboardInterrupt may
        # end the callback before its first line.
        interrupted = f"KeyboardInterrupt (raised in a call of kernel '{signature.label}')"
        self.interrupted = ctypes.create_string_buffer(interrupted.encode("utf-8", "replace"))

    def write(self, ir: _HandlerBuilder, frame: _StructPointer, buffers: _StructPointer, count: _Int64) -> None:
        stream_and_device = ir.load_stream_and_device(frame) if self.libcuda else (0, 0)
        with ir.each_slice(buffers, count) as arrays:
            words = [word for array in arrays for word in (array.pointer, *array.dims)]
            words += [ir.launch_attribute_address(frame), *stream_and_device, ctypes.addressof(self.interrupted)]
            memory = ir.array(words)
            ir.call(self.callback, memory)
            message = ir.load(memory + 8 * (len(words) - 1))
            with ir.if_(message):
                ir.fail_inner_loop(frame, message)


# ======================================================================================================
# 7. Numba on CPUs: a wrapper, and an emitter that calls the code that Numba compiles.
#
# For each slice, the handler calls a function that Numba has compiled, an overload in Numba's terms.  It is a function
# of all buffers: it takes the inputs, outputs and scratch of a call, in order, as arrays.  If the kernel has other
# parameters, or returns its outputs, this function is an adapter that calls the kernel (see `_ArgumentMap`).
#
# 7.1 to 7.3 are shared with section 9.  The rest is for CPUs only.
#
# This section uses many undocumented parts of Numba.  If Numba changes one of the following, results may silently be
# wrong.  Only the tests detect this, so copies of this file need them, too.
#
#     `_numba_array_members`         the members of an array that a compiled function takes
#     `_is_store_to_readonly`        the texts of errors about stores to read-only arrays
#     `_jitted_kernel`               the class of a dispatcher's cache, and the class of its compiler
#     `_uses_threads`                the name of the function that starts threads
#     `_check_no_object_mode`        the class of object mode
#     `_numba_ir` (8.1)              the IR that `compiler.run_frontend` returns
#     `_may_bypass_readonly` (8.1)   the functions that write to read-only arrays, and gufuncs

_NUMBA_INSTALL = "pip install numba"
_NUMBA_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128".split()
)


@_with_option_advice
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

    XLA calls the kernel's machine code, without Python and without the GIL.  The function works under `jit`, `scan`,
    `cond`, `vmap`, `shard_map` and `export`.  To define its derivative, use `jax.custom_vjp` or `XLACustomKernel`.

    The kernel takes C-contiguous arrays by position, in one of two calling conventions:

        kernel(*inputs, *outputs, *scratch)      # stores to its outputs, which start from zeros, and returns nothing
        kernel(*inputs)                          # returns an output, or a tuple of outputs

    Inputs are read-only.  In the first convention, a 0-d input is a 0-d array, which the kernel reads with `n[()]`,
    unless `scalars` lists it.  In the second one, it is a scalar.

    Args:
      kernel: a function decorated with `numba.njit`, `numba.vectorize` or `numba.guvectorize`, or a plain function,
        which is jitted.  If it is omitted, `numba_kernel(outs=...)` is a decorator.
      outs: the outputs: a `jax.ShapeDtypeStruct` (anything with `.shape` and `.dtype`), a pytree of them without dicts,
        or a function that takes the `ShapeDtypeStruct` of each input, and returns one of these.
      vmap_method: optional string, one of the names that `jax.pure_callback` accepts.  By default, batch elements are
        divided among XLA's threads.  With "sequential" and "sequential_unrolled", they run in order, on one thread.
      input_output_aliases: optional dict from inputs (indices or names) to indices of outputs.  With `{i: j}`, output j
        starts with the value of input i, and uses its memory if XLA can.  The kernel gets the same array for both, and
        may store to either.
      in_out_argnames: optional sequence of the parameters that the kernel updates in place (`v[:] = 0.5 * v + x`), in
        the order of the kernel's parameters.  Each is an input, and its new value is an output.  `outs` begins with
        their specs.  With in_out_argnames=["v"] and outs=lambda x, v: (v, y_spec), the two calling conventions are
        kernel(x, v, y), and kernel(x, v), which updates v and returns y.
      scalars: sequence of the 0-d inputs that the kernel gets as scalars, or True for all.  Default False.  0-d in-out
        arguments stay arrays.  A new value of a scalar compiles nothing.
      has_side_effect: boolean, whether the call is kept even if its results are not used.  Default False.
      scratch: optional spec, tuple of specs, or function like `outs`: temporary buffers, which are passed after the
        outputs, start from zeros and are not returned.  Under `vmap`, each batch element has its own.
      zero_outputs: optional boolean, the initial value of new outputs and scratch:
        - None (the default): zeros.  It is an error if the kernel never stores to an output.
        - True: zeros.  The kernel need not store to its outputs.
        - False: uninitialized memory, for kernels that store to every element.  This saves up to a quarter of the time
          of `out[i] = x[i] + y[i]`, depending on the size.
        For a product, a minimum or a maximum, first store the initial value (`out[:] = np.inf`), or alias the output
        to an input.  Outputs that the kernel returns, or that are aliased to an input, are not zeroed.
      name: optional string, the prefix of the name by which exported programs find the kernel (see `export_checks`).

    Returns:
      A function of the inputs, which are passed by position or by name.  Its result has the structure of `outs`.

    Raises:
      TypeError: if a dtype has no CPU arithmetic in Numba (float16, bfloat16, float8, sub-byte types); if the number of
        arguments is wrong; if the kernel cannot be compiled, or uses object mode (see `jax.pure_callback`); if Numba
        finds a store to an input; if the kernel never stores to an output and `zero_outputs` is None; if a returned
        value has another rank than in `outs`, or a dtype that NumPy does not cast to the declared one ("same_kind").
      ValueError: if `vmap_method` is unknown, aliases or `scalars` do not fit the call, or `name` is in use.
      RuntimeError: if the environment variable NUMBA_DISABLE_JIT is set.
      jax.errors.JaxRuntimeError or, if jaxlib runs a function compiled by `jax.jit`, ValueError: if the kernel raises
        an exception, whose type and text are in the message, or if a returned value has another shape than in `outs`.

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

    Notes on compilation:

    - A kernel is compiled once for each combination of dtypes and ranks.  At that time, Numba reads globals and closure
      variables.  To use new values, wrap a plain function again, or define the kernel again.  This compiles another
      kernel (0.2 to 0.5 s, and 1 to 3 MB of memory that are never freed), unless the values are equal to earlier ones.
    - Explicit signatures of a `numba.njit` kernel are ignored.  `cache=True` works.  Integer division by zero raises,
      unless the kernel has `error_model="numpy"`.
    - Numba does not reject all stores to read-only arrays: it accepts `np.fill_diagonal(x, 0)` and `x.flat[0] = 1`.  A
      kernel with such functions, or with a helper that has an explicit signature, gets copies of the inputs that it may
      write to.  Stores in your own intrinsics and overloads, through raw addresses (`x.ctypes`) and in C code are not
      detected.

    Notes on execution:

    - XLA may merge two equal calls, even if the kernel draws random numbers, unless `has_side_effect=True`.  Two calls
      with side effects are not ordered, unless one uses a result of the other.
    - In a `cond` with a batched predicate, the kernel also runs in the branch that is not taken, and its exceptions are
      raised.  In a batched `while_loop`, it also runs on batch elements that have finished.
    - Kernels run on XLA's threads.  `np.random.seed` and `numba.set_num_threads` are per thread, so calls outside of
      the kernel do not affect it.  Ctrl-C does not stop a kernel that never ends; Ctrl-\\ does.
    - If the kernel calls a C library that is not thread-safe, use `vmap_method="sequential"`.
    - A kernel with `parallel=True` uses Numba's threads, one batch element after another.  If
      `numba.threading_layer()` is workqueue, do not call a parallel function yourself while JAX runs a parallel kernel,
      because Numba would end the process.
    """
    options = dict(locals())  # all arguments by name
    del options["kernel"]
    return _wrapper_or_decorator(_NumbaKernel, kernel, _Options(**options))


# -- 7.1 Argument maps: which buffer is passed to which parameter (shared with section 9) --------------
# The buffers of a call have indices: first the inputs, then the outputs, then scratch.  An in-out argument has two
# buffers, its input and its output, which starts with the value of the input.  The kernel gets the output, at the
# position of the input.  For example, with inputs x and v, in_out_argnames=["v"] and outs=(v, y):
#
#     the buffers                       0: x    1: v    2: the new v    3: y
#     kernel(x, v, y)                   gets the buffers 0, 2, 3
#     kernel(x, v), which returns y     gets the buffers 0, 2; the result is stored to buffer 3
#
# A kernel that returns its outputs has no scratch, and runs on CPUs only.


class _ArgumentMap(NamedTuple):
    """The mapping of the buffers b0, b1, ... of a call to the parameters and returned values of a kernel.

    `args`, `scalars`, `copied` and `results` contain indices of buffers.  A position in `args` is the position of a
    parameter.  Do not rename the class and its fields: the `repr` of a map is hashed into the names of targets.

    The adapter of an argument map is a function of all buffers that calls the kernel.  For example, if `kernel(x, n)`
    takes a 0-d input n as a scalar and returns its output, the adapter is:

        def adapter(b0, b1, b2):                       # x, n, and the output
            returned = kernel(b0, b1[()])
            if returned.shape != b2.shape: raise ShapeError(returned.shape, b2.shape)
            b2[...] = returned

    If a dispatcher takes all buffers as they are, in their order, it needs no adapter.
    """

    n_buffers: int
    args: tuple[int, ...]  # the buffer for each parameter
    scalars: frozenset[int] = frozenset()  # the 0-d inputs passed as scalars, if they are in `args`
    copied: frozenset[int] = frozenset()  # the buffers in `args` of which the kernel gets copies, for CPUs
    results: tuple[int, ...] = ()  # the output for each returned value; empty if the kernel stores to its outputs
    slice_ranks: Any = None  # for `_BatchArgumentMap` (9.6), because a subclass of a NamedTuple cannot add fields

    @property
    def returns_outputs(self) -> bool:
        """Whether the kernel returns its outputs, except for in-out arguments."""
        return bool(self.results)

    def is_identity_for(self, kernel: Any) -> bool:
        """Return whether the kernel takes all buffers as they are, in their order, so that it needs no adapter."""
        parameters = inspect.signature(_py_func(kernel)).parameters
        if any(x.kind is x.VAR_POSITIONAL for x in parameters.values()):
            return False  # Numba compiles `*args` as one tuple
        return self == _ArgumentMap(len(parameters), tuple(range(len(parameters))))

    def named_args(self, parameters: Sequence[str]) -> list[tuple[str, int]]:
        """Return the name and the buffer of each argument.  Arguments beyond these parameters belong to `*args`."""
        others = [f"argument {i}" for i in range(len(parameters), len(self.args))]
        return list(zip([*parameters, *others], self.args))

    def names_of(self, buffers: Container, parameters: Sequence[str]) -> list[str]:
        """Return the names of the arguments that are these buffers."""
        return [name for name, buffer in self.named_args(parameters) if buffer in buffers]

    def maybe_written_buffers(self, only_read_positions: Container) -> set[int]:
        """Return the buffers that the kernel may write to: all except those of parameters at these positions."""
        return {buffer for position, buffer in enumerate(self.args) if position not in only_read_positions}

    def protected_inputs(self, signature: _Signature) -> set[int]:
        """Return the inputs that the kernel must not write to: all except scalars, and those aliased to an output."""
        return signature.unaliased_inputs - self.scalars

    def make_adapter(self, kernel: Any, *last_lines: str, **namespace: Any) -> Callable[..., Any]:
        """Return the adapter, a Python function.

        `last_lines` follow the call of the kernel, and use the variable `returned` and the variables in `namespace`.
        """
        parameters = ", ".join(f"b{buffer}" for buffer in range(self.n_buffers))
        arguments = ", ".join(map(self._expression, self.args))
        lines = [f"def adapter({parameters}):", f"returned = kernel({arguments})", *last_lines]
        namespace["kernel"] = kernel
        exec("\n    ".join(lines), namespace)
        return namespace["adapter"]

    def _expression(self, buffer: int) -> str:
        """Return the expression of an argument in the adapter's source."""
        if buffer in self.scalars:
            return f"b{buffer}[()]"
        return f"b{buffer}.copy()" if buffer in self.copied else f"b{buffer}"


def _zero_dim_inputs(ins: Sequence[_Spec]) -> frozenset[int]:
    """Return the indices of the 0-d inputs."""
    return frozenset(i for i, spec in enumerate(ins) if not spec.shape)


class _NumbaWrapper(_Wrapper):
    """A wrapper of a Numba kernel, for CPUs (`_NumbaKernel`) or for GPUs (`_CudaWrapper`)."""

    def __init__(self, kernel: Any, options: _Options) -> None:
        super().__init__(kernel, options)
        self._check_names("scalars", options.scalar_names)

    def _argument_maps(self, call: _CallParams, may_return: bool) -> list[_ArgumentMap]:
        """Return the argument maps that fit the number of the kernel's parameters; raise an error if there is none.

        The first one is for a kernel that stores to its outputs.  If `may_return`, another one is for a kernel that
        returns its outputs.  This requires outputs other than in-out arguments, and no scratch.
        """
        n_in = len(call.ins)
        n_buffers = len(call.buffers)
        args = list(range(n_in))
        for j, name in enumerate(self.in_outs):  # in-out arguments are the first outputs
            args[self.parameters.index(name)] = n_in + j
        remaining = tuple(range(n_in + len(self.in_outs), n_buffers))  # the other outputs, and scratch
        maps = [_ArgumentMap(n_buffers, (*args, *remaining), self._scalar_inputs(call.ins))]
        if may_return and remaining and not call.scratch:
            maps.append(_ArgumentMap(n_buffers, tuple(args), _zero_dim_inputs(call.ins), results=remaining))
        python_signature = inspect.signature(_py_func(self.kernel))
        if fitting_maps := [x for x in maps if _can_bind(python_signature, len(x.args))]:
            return fitting_maps
        # If the kernel has two parameters for in-out argument v, such as kernel(v, new_v), this error is more specific.
        self._check_no_separate_outputs(call)
        raise self._wrong_parameters_error(call, maps)

    def _wrong_parameters_error(self, call: _CallParams, maps: list[_ArgumentMap]) -> TypeError:
        """Return the error for a kernel whose number of parameters fits none of these argument maps."""
        n_in = len(call.ins)
        n_outs = len(call.outs)
        other_outputs = ["output"] * (n_outs - len(self.in_outs))
        roles = ["input"] * n_in + self.in_outs + other_outputs + ["scratch"] * len(call.scratch)
        # Such as "(input, v, output) or (input, v)" with in_out_argnames=["v"].
        expected = " or ".join(f"({', '.join(roles[buffer] for buffer in x.args)})" for x in maps)
        return TypeError(
            f"Kernel {self.__name__!r} takes {inspect.signature(_py_func(self.kernel))}. This call has "
            f"{_counted(n_in, 'input')}, and outs declares {_counted(n_outs, 'output')}, so the parameters must be "
            f"{expected}. Correct the call, outs or the kernel. If a parameter is both input and output, list it in "
            "in_out_argnames. If it is a constant, wrap the kernel in a function that has the constant in its closure."
        )

    def _scalar_inputs(self, ins: Sequence[_Spec]) -> frozenset[int]:
        """Return the inputs that the option `scalars` selects.  Raise an error if one is not a 0-d input."""
        zero_dim = _zero_dim_inputs(ins)
        if self.options.scalars is True:
            return zero_dim
        scalars = {name: self.parameters.index(name) for name in self.options.scalar_names}
        for name, i in scalars.items():
            if i not in zero_dim:
                kind, or_pass = "an output or scratch", ""
                if i < len(ins):
                    kind, or_pass = _format_spec(ins[i]), ", or pass a number (under vmap, one for each batch element)"
                raise ValueError(
                    f"{self.title}: a scalar is a 0-d input. {name!r} in scalars={self.options.scalar_names} is "
                    f"{kind}. Remove it from scalars{or_pass}."
                )
        return frozenset(scalars.values())


# -- 7.2 Errors of the compiler, with advice (shared with section 9) -----------------------------------

# Numba 0.63 to 0.68 raise an AttributeError with this text for `x += 1`, if x is read-only.
_INPLACE_CRASH_TEXT = "'NoneType' object has no attribute 'args'"
_STORE_TO_READONLY = r"Cannot modify readonly array|setitem\(readonly array|explicit output that is read-only"
# {pattern in Numba's error: advice}.  The first match counts.  The comments above a pattern show texts that it matches.
_ADVICE = {
    # Cannot modify readonly array of type: readonly array(float32, 1d, C)
    # >>> setitem(readonly array(float32, 1d, C), Literal[int](0), Literal[int](77))
    _STORE_TO_READONLY: _READ_ONLY_ADVICE,
    # CUDA kernel must have void return type but got int64.
    # No conversion from int64 to none for '$26return_value.2'
    r"must have void return type|No conversion from .* to none for": (
        "A kernel with parameters for its outputs returns nothing. Write the value to an output: `out[:] = value`."
    ),
    # Known signatures: * (Array(float64, 1, 'C', False, aligned=True),) -> float64
    # Type of #7 arg mismatch: double* != float*
    r"Known signatures:|arg mismatch: ": (
        "The explicit signature of a helper or gufunc does not fit this call. Remove the signature. If its types "
        'have 64 bits, you may set jax.config.update("jax_enable_x64", True) instead.'
    ),
    # Unknown attribute 'normal' of type Module(<module 'jax.random' from '...'>)
    r"Module\(<module 'jax\.random'": "Kernels cannot call JAX. Draw before the call, and pass the noise as an input.",
    # Unknown attribute 'sin' of type Module(<module 'jax.numpy' from '...'>)
    # Cannot determine Numba type of <class 'jaxlib._jax.PjitFunction'>
    r"Module\(<module 'jax|<class 'jax[^']*(PjitFunction|ufunc|custom_[jv][jv]p)'": (
        "A kernel cannot call JAX. Write np. instead of jnp., and loops instead of jax.lax and jax.vmap."
    ),
    # Cannot determine Numba type of <class 'jax._src.interpreters.partial_eval.DynamicJaxprTracer'>
    # >>> setitem(array(float32, 1d, C), slice<a:b>, readonly buffer(float32, 1d, C))
    r"<class 'jax|readonly buffer\(": (
        "A kernel cannot capture a JAX array. Pass it as an input, or, if it is a constant, capture np.asarray(array)."
    ),
    # Unknown attribute 'at' of type array(float32, 1d, C)
    r"attribute 'at' of type .*array": "NumPy arrays have no `.at`. Write out[i] = 1.0 instead of out.at[i].set(1.0).",
    # Unknown attribute 'j0' of type Module(<module 'scipy.special' from '...'>)
    # Cannot determine Numba type of <class 'numpy.ufunc'>
    r"Module\(<module 'scipy|<class 'numpy\.ufunc'": (
        "Numba does not support this function. Use math.erf and math.gamma, or, on CPUs, SciPy's C functions through "
        "numba.extending.get_cython_function_address "
        "(https://numba.readthedocs.io/en/stable/extending/high-level.html#importing-cython-functions)."
    ),
    # Untyped global name 'breakpoint'
    r"Module\(<module 'pdb|name 'breakpoint'": (
        "It calls a debugger, which compiled code cannot. Remove the call. To debug the kernel in Python, call its "
        "Python function (wrapper.__wrapped__, or its .py_func) with NumPy arrays."
    ),
    # Use of unsupported opcode (IMPORT_NAME) found.
    r"IMPORT_NAME": "A kernel cannot import. Import outside of the kernel.",
    # Cannot determine Numba type of <class 'xla_kernels._NumbaKernel'>
    rf"<class '{re.escape(__name__)}\.": (
        "A kernel cannot call a wrapper or an op. Call the @numba.njit function in it: wrapper.__wrapped__."
    ),
    # Cannot determine Numba type of <class 'function'>
    r"<class '(function|functools\.partial)'": (
        "A kernel can only call jitted functions. Decorate the helper with @numba.njit (for a GPU: @cuda.jit)."
    ),
    # Untyped global name 'params': Cannot determine Numba type of <class 'dict'>
    # A list as a global: The use of a reflected list(int64)<iv=None> type, assigned to variable 'a' in globals, ...
    # A list as a closure variable: <numba.core.base.OverloadSelector object at 0x7fd4f23e9f90>, (List(int64, True),)
    r"Untyped global name|' in globals|, \(List\(": (
        "A kernel can capture numbers, tuples, NumPy arrays and some builtins, but no dict, list or object. Pass its "
        "values as inputs, or, outside of the kernel, assign them to variables: gain = params['gain']."
    ),
    # Cannot bind 'args=(...) kws={...}' to signature '(x, out, *, n=3)' due to "TypeError: ..."
    # tuple index out of range (Numba 0.63)
    r"Cannot bind 'args=.*\*, |^tuple index out of range$": (
        "Parameters are passed by position. Make the keyword-only parameter an input, or a variable of the closure."
    ),
    # >>> getitem(float32, Tuple())
    r"getitem\((u?int|float|complex|bool)\d*, Tuple\(\)": (
        "A 0-d input is a scalar if the kernel returns its outputs, or if scalars= lists it. Write q instead of q[()]."
    ),
}


def _error_text(error: Exception) -> str:
    """Return the text of a Numba error.  Replace Numba's AttributeError for `x += 1` by its meaning."""
    text = str(error) or type(error).__name__
    return "Cannot modify readonly array: it is updated in place" if _INPLACE_CRASH_TEXT in text else text


def _is_store_to_readonly(error: Exception) -> bool:
    """Return whether a Numba error says that a kernel stores to a read-only array."""
    return re.search(_STORE_TO_READONLY, _error_text(error)) is not None


def _compile_error(compiler: str, signature: _Signature, error: Exception) -> TypeError:
    """Return the error for a kernel that cannot be compiled, with advice and the compiler's text."""
    text = _error_text(error)
    advice = next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, text)), None)
    # For `2 * n` with a 0-d array n, numba-cuda says <ufunc 'multiply'>, and numba-cuda-mlir says 'Float' object has no
    # attribute 'dtype'.
    is_about_0d = re.search(r"\b0d\b|^<ufunc '\w+'>$|object has no attribute 'dtype'", text)
    if advice is None and 0 in signature.ranks and is_about_0d:
        advice = (
            "A 0-d array has no items n[i]; under vmap, arrays lack the batch dimension. Read and write it with n[()], "
            "or list an input in scalars=['n'] and read n."
        )
    summary = f"{compiler} cannot compile kernel {signature.label!r} for {signature}."
    return TypeError(f"{summary} {advice}\n{text}" if advice else f"{summary}\n{text}")


# -- 7.3 Array types, and compiling for read-only arrays (shared with section 9) -----------------------


def _numba_array_members(array: _KernelArray) -> list[Any]:
    """Return an array as Numba passes it: meminfo, parent (both null), nitems, itemsize, data, shape, strides."""
    return [0, 0, math.prod(array.dims), array.itemsize, array.pointer, *array.dims, *array.strides(array.itemsize)]


def _array_types(types_module: Any, signature: _Signature, readonly: bool = True) -> tuple[Any, ...]:
    """Return the Numba types of all buffers: C-contiguous arrays.

    If `readonly`, inputs are read-only, unless an output is aliased to them.

    `types_module` is `numba.types`, or the same module of a Numba CUDA package.
    """
    array_types = []
    for buffer, (dtype, rank) in enumerate(zip(signature.dtypes, signature.ranks, strict=True)):
        element = types_module.boolean if dtype.kind == "b" else getattr(types_module, dtype.name)
        is_readonly = readonly and buffer in signature.unaliased_inputs
        array_types.append(types_module.Array(element, rank, "C", is_readonly))
    return tuple(array_types)


def _is_ufunc(kernel: Any) -> bool:
    """Return whether a decorated kernel is a ufunc or gufunc of Numba, which is not a dispatcher."""
    return not hasattr(kernel, "_can_compile")


def _has_explicit_signatures(dispatcher: Any) -> bool:
    """Return whether a dispatcher has explicit signatures.  Then Numba compiles no others."""
    return not dispatcher._can_compile


def _compile_readonly_or_writable(
    compiler_name: str, compile_for: Callable[[tuple], Any], types_module: Any, signature: _Signature
) -> tuple[Any, Exception | None]:
    """Compile a kernel for read-only inputs.  If that fails, compile it for writable inputs.

    For example, a helper with an explicit signature accepts only writable arrays.  `compile_for` compiles the kernel
    for a tuple of types, one for each buffer (see `_array_types`).  Return its result, and the error for read-only
    inputs, or None if they work.
    """
    try:
        return compile_for(_array_types(types_module, signature)), None
    except Exception as readonly_error:
        try:
            return compile_for(_array_types(types_module, signature, readonly=False)), readonly_error
        except Exception:
            raise _compile_error(compiler_name, signature, readonly_error) from readonly_error


# -- 7.4 The emitter: Numba's calling convention, exceptions and threads -------------------------------
# As in section 6, `ir` only writes code.  The code runs when XLA calls the handler.


def _uses_threads(overload: Any, kernel: Any) -> bool:
    """Return whether the machine code starts Numba's threads, or may call a parallel helper through a pointer."""
    # The LLVM module has the kernel and the helpers that it calls directly.  Of helpers that it may call through
    # pointers, only the options are known.
    _, *helpers = _kernel_and_helpers(kernel)
    if any(getattr(helper, "targetoptions", {}).get("parallel") for helper in helpers):
        return True
    return "@numba_parallel_for(" in str(_llvm_module(overload))


class _NumbaEmitter(_Emitter):
    """An emitter that calls a compiled function of all buffers for each slice.  `_Emitter` explains the attributes."""

    def __init__(self, label: str, overload: Any, kernel: Any, in_order: bool) -> None:
        import numba

        def report(exception_address: int) -> int:
            """Return the address of the message of an exception."""
            if exception_address:
                exception = ctypes.cast(exception_address, ctypes.py_object).value
            else:  # a helper in object mode was called through a function pointer, so `_check_no_object_mode` missed it
                exception = RuntimeError("object mode raised an exception, which is lost. Use jax.pure_callback")
            advice = ""
            if type(exception) in (IndexError, ZeroDivisionError):  # usually raised by Numba, not by the user's `raise`
                advice = "To find the line, call the kernel's Python function with NumPy arrays"
            return _store_error_message(exception, label, advice)

        callback = ctypes.CFUNCTYPE(_PTR, _PTR)(report)
        self.code_key = ("numba",)
        self.kernel_address = overload.library.get_pointer_to_function(overload.fndesc.llvm_func_name)
        self.report_address = ctypes.cast(callback, _PTR).value or 0
        self.keep_alive = overload, callback  # the owners of these addresses
        uses_threads = _uses_threads(overload, kernel)
        self.in_order = in_order or uses_threads  # Numba's threads use all cores, so slices need no threads
        self.starts_threads = uses_threads
        if uses_threads:
            numba.get_num_threads()  # starts Numba's threads; before that, the threading layer is unknown
            if numba.threading_layer() == "workqueue":  # it aborts the process if two threads enter it
                self.lock_address = _native_lock_address("workqueue_lock")

    def write(self, ir: _HandlerBuilder, frame: _StructPointer, buffers: _StructPointer, count: _Int64) -> None:
        """Call the kernel for each slice.  If its status is an error, return the exception's message to XLA."""
        from numba.core import types as nbtypes
        from numba.core.registry import cpu_target

        context = cpu_target.target_context
        call_conv = context.call_conv
        builder = ir.llvm_builder
        address = ir.handler_data.kernel_address  # the copy of `self.kernel_address` that the code reads when it runs
        with ir.each_slice(buffers, count) as arrays:
            params = [ir.llvm_value(member) for array in arrays for member in _numba_array_members(array)]
            # In machine code, an array is passed as its members.  Here each of them is an integer, also the pointers.
            param_types = [nbtypes.intp] * len(params)
            pointer_type = call_conv.get_function_type(nbtypes.none, param_types).as_pointer()
            function = builder.inttoptr(address.value, pointer_type)
            status, _ = call_conv.call_function(builder, function, nbtypes.none, param_types, params)
            with builder.if_then(status.is_error, likely=False):
                ir.fail_inner_loop(frame, self._write_error_message(ir, context, status))

    def _write_error_message(self, ir: _HandlerBuilder, context: Any, status: Any) -> _Int64:
        """Create the Python exception of a status, and return the address of its message."""
        python = context.get_python_api(ir.llvm_builder)
        gil = python.gil_ensure()
        context.call_conv.raise_error(ir.llvm_builder, python, status)
        error = ir.call("PyErr_GetRaisedException")
        message = ir.call(ir.handler_data.report_address, error)
        ir.call("Py_DecRef", error)
        python.gil_release(gil)
        return message


# -- 7.5 Returned values -------------------------------------------------------------------------------


class ShapeError(ValueError):  # no underscore, because its name is in the error's text
    """A kernel returned an array whose shape differs from the one that `outs` declares."""

    def __str__(self) -> str:
        returned, declared = self.args
        fix = "If the shape depends on the data, declare a fixed capacity in outs, and return a count, too"
        return f"an array of shape {returned} is returned, where outs declares {declared}. {fix}"


def _returned_leaves(numba_type: Any, expression: str = "returned") -> dict[str, Any]:
    """Return {expression: Numba type} for the scalars and arrays in a returned value.

    For a tuple of an array and a float, it is {"returned[0]": array(float32, 1d, C), "returned[1]": float64}.
    """
    from numba import types as nbtypes

    if numba_type == nbtypes.none:
        return {}
    if not isinstance(numba_type, nbtypes.BaseTuple):
        return {expression: nbtypes.unliteral(numba_type)}
    leaves = {}
    for i, item in enumerate(numba_type):
        leaves.update(_returned_leaves(item, f"{expression}[{i}]"))
    return leaves


def _fix_for_returned_type(numba_type: Any, dtype: np.dtype, rank: int) -> str:
    """Return the fix if a value of this type cannot be stored to an output; otherwise an empty string."""
    from numba import types as nbtypes

    returned_dtype, returned_rank = str(numba_type), 0
    if isinstance(numba_type, nbtypes.Array):
        returned_dtype, returned_rank = str(numba_type.dtype), numba_type.ndim
    if returned_rank != rank:
        return f"Return an array with {_counted(rank, 'dimension')}" if rank else "Return a number"
    fix = f"Return x.astype(np.{dtype})" if rank else f"Return np.{dtype}(x)"
    if returned_dtype not in _NUMBA_DTYPES:
        return fix
    if np.can_cast(returned_dtype, dtype, "same_kind"):
        return ""
    jax_dtype = jax.dtypes.canonicalize_dtype(returned_dtype)  # float32 for float64, if x64 is disabled
    return f"{fix}, or declare {jax_dtype} in outs"


# -- 7.6 Compiling -------------------------------------------------------------------------------------


def _check_no_object_mode(kernel: Any, title: str) -> None:
    """Raise an error if a kernel or a helper references Numba's object mode, under any name.

    Object mode needs the GIL.  If it raises an exception on one of XLA's threads, Numba loses the exception.
    """
    for function in _kernel_and_helpers(kernel):
        names = _referenced_names(_code_of(function))
        type_names = [type(value).__name__ for _, value in _captured_values(function)]
        if "objmode" in names or "_ObjModeContextType" in type_names:
            raise TypeError(
                f"A kernel runs without Python. {title} uses Numba's object mode, which needs the GIL. Call Python "
                "with jax.pure_callback, besides the kernel or instead of it."
            )


@dataclasses.dataclass
class _NumbaCompiler:
    """The compilation of one kernel for one signature.

    Most methods call the methods below them:

        compile_kernel_and_handler
          _try_argument_maps            tries each calling convention that fits the number of parameters
            _compile_protecting_inputs  checks stores to inputs; if necessary, compiles again, with copies
              _compile_for_buffers      compiles the kernel for read-only inputs; if that fails, for writable inputs
                _compile_kernel         compiles the kernel itself, and returns the type of its result
                _check_returned_values  (or `_check_returns_nothing`) checks this type
                _jitted_adapter         creates the adapter, if the kernel needs one
            _check_outputs              checks stores to outputs
    """

    kernel: Any  # a dispatcher or a ufunc (`_jitted_kernel`)
    parameters: Sequence[str]  # the names of the kernel's parameters
    signature: _Signature
    call: _CallParams  # needed for errors, because a signature has no shapes, and outputs and scratch look the same
    checks_outputs: bool  # whether it is an error if the kernel never stores to an output

    @property
    def title(self) -> str:
        return f"Kernel {self.signature.label!r}"

    @functools.cached_property
    def only_read_positions(self) -> set[int]:
        """The positions of the parameters that the kernel only reads, as Numba's IR shows."""
        return _positions_only_read_in_numba_ir(self.kernel)

    def compile_kernel_and_handler(self, argument_maps: list[_ArgumentMap], in_order: bool) -> _CompiledHandler:
        """Compile the kernel with the first argument map that works, and the handler that calls it."""
        began = time.perf_counter()
        _check_no_object_mode(self.kernel, self.title)
        argument_map, overload = self._try_argument_maps(argument_maps)
        signature = self.signature
        if argument_map.returns_outputs:
            signature = signature._replace(zeroed=())  # every element of an output is stored
        emitter = _NumbaEmitter(signature.label, overload, self.kernel, in_order)
        compiled = _build_handler(signature, emitter)
        spent_ms = 1e3 * (time.perf_counter() - began)
        slices = "run in order" if emitter.in_order else "are divided among threads"
        _LOG.debug(f"compiled {signature.label} for {signature} in {spent_ms:.0f} ms; batch elements {slices}")
        return compiled

    def _try_argument_maps(self, argument_maps: list[_ArgumentMap]) -> tuple[_ArgumentMap, Any]:
        """Return the first argument map with which the kernel compiles, and the compiled function of all buffers.

        There are two maps only if the kernel has `*args` or default values.  If none works, raise the first error.
        """
        from numba import NumbaPerformanceWarning, NumbaTypeSafetyWarning

        errors = []
        with warnings.catch_warnings():
            # With parallel=True, Numba warns if it finds nothing that can run in parallel.
            warnings.simplefilter("ignore", NumbaPerformanceWarning)
            # Numba warns if a typed dict or list takes a read-only array as a writable one.  The kernel gets a copy.
            warnings.filterwarnings("ignore", "unsafe cast from .*rray", NumbaTypeSafetyWarning)
            for argument_map in argument_maps:
                try:
                    overload = self._compile_protecting_inputs(argument_map)
                    self._check_outputs(argument_map)
                    return argument_map, overload
                except TypeError as error:
                    errors.append(error)
        raise errors[0]

    def _compile_protecting_inputs(self, argument_map: _ArgumentMap) -> Any:
        """Return a compiled function of all buffers that does not change inputs, or raise an error.

        This is the table at the top of 8.1.
        """
        overload, readonly_error = self._compile_for_buffers(argument_map)
        if readonly_error is None and not _may_bypass_readonly(self.kernel):
            return overload  # without bypasses, Numba rejects all stores to read-only arrays, and it has found none
        # The inputs that the kernel must not write to, and for which neither Numba's IR nor LLVM proves this:
        maybe_written = argument_map.maybe_written_buffers(self.only_read_positions)
        maybe_written -= _buffers_only_read_in_llvm(overload, self.signature)
        maybe_written &= argument_map.protected_inputs(self.signature)
        if not maybe_written:
            return overload
        if readonly_error is not None and _is_store_to_readonly(readonly_error):
            names = argument_map.names_of(maybe_written, self.parameters)
            raise self._store_to_input_error(names, readonly_error) from readonly_error
        # It is unknown whether the kernel writes to these inputs.  For example, it passes one to a helper with an
        # explicit signature for writable arrays.
        _LOG.debug(f"{self.title} gets copies of its inputs {sorted(maybe_written)}, because it may write to them")
        overload, _ = self._compile_for_buffers(argument_map._replace(copied=frozenset(maybe_written)))
        return overload  # even if it takes writable inputs: the kernel only reads those that are not copied

    def _store_to_input_error(self, names: Sequence[str], readonly_error: Exception) -> TypeError:
        """Return the error for a kernel in which Numba found a store to one of these inputs."""
        verb = "writes" if len(names) == 1 else "may write"  # Numba's error does not name the array
        problem = f"{self.title} {verb} to input {_any_of(names)}."
        more = f" To change a copy only, write to {names[0]}.copy().\n{_error_text(readonly_error)}"
        return _read_only_input_error(problem, names, more)

    def _compile_for_buffers(self, argument_map: _ArgumentMap) -> tuple[Any, Exception | None]:
        """Return a compiled function of all buffers, and the error for read-only inputs, or None if they work."""
        from numba import types as nbtypes

        compile_kernel = functools.partial(self._compile_kernel, argument_map)
        returned_type, readonly_error = _compile_readonly_or_writable("Numba", compile_kernel, nbtypes, self.signature)
        if argument_map.returns_outputs:
            self._check_returned_values(argument_map.results, returned_type)
        else:
            self._check_returns_nothing(returned_type)
        if _is_ufunc(self.kernel) or not argument_map.is_identity_for(self.kernel):
            function = self._jitted_adapter(argument_map, returned_type)
        else:
            function = self.kernel  # is compiled already, so `compile` does nothing
        buffer_types = _array_types(nbtypes, self.signature, readonly=readonly_error is None)
        try:
            function.compile(buffer_types)
        except Exception as error:
            raise _compile_error("Numba", self.signature, error) from error
        return function.overloads[buffer_types], readonly_error

    def _compile_kernel(self, argument_map: _ArgumentMap, buffer_types: tuple) -> Any:
        """Compile the kernel for buffers of these types, and return the Numba type of its result."""
        from numba.core.registry import cpu_target

        argument_types = []
        for buffer in argument_map.args:
            argument_type = buffer_types[buffer]
            if buffer in argument_map.scalars:
                argument_type = argument_type.dtype
            elif buffer in argument_map.copied:
                argument_type = argument_type.copy(readonly=False)
            argument_types.append(argument_type)
        # To find the type of a call, Numba compiles the called function.
        context = cpu_target.typing_context
        context.refresh()
        call_type = context.resolve_value_type(self.kernel).get_call_type(context, tuple(argument_types), {})
        return call_type.return_type

    def _jitted_adapter(self, argument_map: _ArgumentMap, returned_type: Any) -> Any:
        """Return a dispatcher of the adapter, which also stores the values that the kernel returns, if any."""
        import numba
        from numba import types as nbtypes

        leaves = _returned_leaves(returned_type)
        # If outputs 0 and 1 are aliased to x and y, and the kernel returns (y, x), the store of output 0 changes x.  So
        # the arrays are copied before the first store.  For one output, Numba's assignment handles overlaps.
        may_overlap = self.signature.aliases and len(leaves) > 1
        copy_lines = []
        store_lines = []
        for (value, numba_type), buffer in zip(leaves.items(), argument_map.results, strict=True):
            if may_overlap and isinstance(numba_type, nbtypes.Array):
                copy_lines.append(f"copy{buffer} = {value}.copy()")
                value = f"copy{buffer}"
            if self.signature.ranks[buffer]:
                shapes = f"{value}.shape, b{buffer}.shape"
                store_lines.append(f"if {value}.shape != b{buffer}.shape: raise ShapeError({shapes})")
            store_lines.append(f"b{buffer}[...] = {value}")
        return numba.njit(argument_map.make_adapter(self.kernel, *copy_lines, *store_lines, ShapeError=ShapeError))

    def _check_returns_nothing(self, returned_type: Any) -> None:
        """Raise an error if a kernel that stores to its outputs returns a value."""
        if _returned_leaves(returned_type):
            raise TypeError(
                f"A kernel with parameters for its outputs returns nothing. {self.title} returns {returned_type}. "
                "Remove the `return`, and store to the outputs (`out[:] = ...`). Or remove the parameters for outputs, "
                "and keep the `return`."
            )

    def _check_returned_values(self, buffers: Sequence[int], returned_type: Any) -> None:
        """Raise an error if a kernel does not return a value that fits each of these buffers, which are outputs."""
        values = _returned_leaves(returned_type).values()
        if len(values) != len(buffers):
            raise TypeError(
                f"A kernel that takes only its inputs returns one value for each new output. {self.title} returns "
                f"{returned_type}, and outs declares {_counted(len(buffers), 'new output')}. Correct the `return`, or "
                "outs."
            )
        for value_type, buffer in zip(values, buffers, strict=True):
            dtype = self.signature.dtypes[buffer]
            rank = self.signature.ranks[buffer]
            if fix := _fix_for_returned_type(value_type, dtype, rank):
                declared = f"array({dtype}, {rank}d)" if rank else dtype
                raise TypeError(
                    "A returned value has the rank that outs declares, and a dtype that NumPy casts to the declared "
                    f"one ('same_kind': float64 to float32, not float to int). {self.title} returns {value_type} for "
                    f"output {buffer - self.signature.n_in}, not {declared}. {fix}."
                )

    def _check_outputs(self, argument_map: _ArgumentMap) -> None:
        """Raise an error if the kernel surely never stores to an output."""
        if not self.checks_outputs:
            return
        buffer_of = dict(argument_map.named_args(self.parameters))
        maybe_stored = argument_map.maybe_written_buffers(self.only_read_positions)
        # The error advises: `out[:] = ...`.
        _check_outputs_are_stored(self.title, buffer_of, maybe_stored, self.call, fix_index=":")


# -- 7.7 The wrapper -----------------------------------------------------------------------------------


class _NumbaKernel(_NumbaWrapper):
    """The wrapper that `numba_kernel` returns."""

    decorator = "numba_kernel"

    def __init__(self, kernel: Any, options: _Options) -> None:
        if not isinstance(kernel, types.FunctionType) and _decorated_backend(kernel) != "numba":
            takes = "a plain function, or one that is decorated with numba.njit, vectorize or guvectorize"
            raise _unsupported_kernel_error("numba_kernel", takes, kernel)
        super().__init__(kernel, options)

    def _find_target(self, call: _CallParams) -> _CallTarget:
        """Return the target of a call; if it is new, compile the kernel."""
        numba = _import("numba", "numba_kernel", _NUMBA_INSTALL)
        if numba.config.DISABLE_JIT:
            raise RuntimeError(
                f"{self.title} must be compiled. The environment variable NUMBA_DISABLE_JIT=1 disables this. Unset it. "
                "To debug the kernel in Python, call the plain function with NumPy arrays."
            )
        self._check_dtypes(call, _NUMBA_DTYPES, "for which Numba has no CPU arithmetic")
        signature = call.signature(self.__name__)
        argument_maps = self._argument_maps(call, may_return=True)
        options = self.options

        def compile_handler() -> _CompiledHandler:
            compiler = _NumbaCompiler(self._jitted_kernel(), self.parameters, signature, call, options.checks_outputs)
            return compiler.compile_kernel_and_handler(argument_maps, options.in_order)

        key_options = "numba", options.in_order, numba.config.BOUNDSCHECK, options.checks_outputs, *argument_maps
        specialization = _Specialization(signature, key_options, "cpu", options.name)
        name = _REGISTRY.numba_target_name(self, specialization, compile_handler, freezes_globals=True)
        platform_phrase = "runs on the CPU; for GPUs there are numba_cuda_kernel and warp_kernel, or jax.pure_callback"
        return _CallTarget(name, platform="cpu", title=self.title, platform_phrase=platform_phrase)

    def _jitted_kernel(self) -> Any:
        """Return the kernel as a ufunc, or as a dispatcher that can be compiled for read-only arrays.

        A dispatcher with explicit signatures compiles for no others, so it is recreated without them.
        """
        import numba

        kernel = self.kernel
        if isinstance(kernel, types.FunctionType):
            return numba.njit(kernel)
        if _is_ufunc(kernel):
            return kernel
        # The option `inline` is dropped, too: if Numba inlines a kernel into an adapter, its other options are lost.
        is_inlined = kernel.targetoptions.get("inline", "never") != "never"
        if not _has_explicit_signatures(kernel) and not is_inlined:
            return kernel
        options = {key: value for key, value in kernel.targetoptions.items() if key != "inline"}
        pipeline = kernel._compiler.pipeline_class
        dispatcher = numba.jit(locals=kernel.locals, pipeline_class=pipeline, **options)(kernel.py_func)
        if type(kernel._cache).__name__ != "NullCache":  # cache=True, which is not one of the `targetoptions`
            dispatcher.enable_caching()
        return dispatcher


# ======================================================================================================
# 8. Stores: the arrays that a kernel only reads, and those to which it may store.
#
# For Numba kernels on CPUs and GPUs, this follows from Numba's types, its IR and LLVM's IR (8.1), and for Warp kernels
# from their source (8.2 to 8.4).

# -- 8.1 Numba: which buffers a kernel only reads ------------------------------------------------------
# A kernel must not change its inputs (`numba_kernel` lists the stores that are not detected).  So an input is accepted
# or copied, or there is an error (7.6 and 9.4).  For each input, the first row that is true counts:
#
#                                                                                 on CPUs     on GPUs
#     the whole kernel compiles for read-only arrays, and uses nothing that       accepted    accepted
#     bypasses them (CPUs: `_may_bypass_readonly`, GPUs: `_find_store_to_readonly`)
#     Numba's IR proves that the kernel only reads this input                     accepted    accepted
#     LLVM's IR proves that the kernel only reads this input                      accepted    (not used)
#     the kernel does not compile for read-only arrays, because of a store        error       error
#     otherwise: the kernel may write to this input                               copied      error
#
# If a kernel does write to a copy, the caller's array does not change.  With read-only arrays, Numba also rejects
# stores through views, tuples and helpers.  Numba's IR proves, for example, that `np.dot` only reads its operands.
# LLVM infers the parameter attributes `readonly` (the function does not write through this pointer, or pointers derived
# from it) and `readnone`.  Plain loops and array expressions usually get them.  Kernels with tuples of arrays, BLAS,
# exceptions and parallel loops often do not.
#
# Numba's IR also finds outputs to which a kernel forgets to store: those that it only reads.  LLVM's attributes do not
# show this, because LLVM removes stores of the old value: `v[i] *= scale` with scale = 1.0.

# The names of functions, attributes and modules for which Numba 0.63 to 0.68 ignores that an array is read-only.  They
# write to it, or give writable views of it: `x.flat[0] = 1`, `np.nditer`, typed lists and dicts of arrays,
# `np.nan_to_num(x, copy=False)`, `np.dot(a, b, out=x)`.  Any function or attribute with such a name counts.  At worst,
# an input is copied without need.
_READONLY_BYPASSES = frozenset(
    "Dict List ascontiguousarray asfortranarray dict dot fill_diagonal flat nan_to_num nditer typed".split()
)


def _may_bypass_readonly(kernel: Any) -> bool:
    """Return whether a kernel or a helper uses a function or container that may write to a read-only array.

    This uses code and captured values, because kernels from Numba's cache have no inferred types of variables.
    """
    for function in _kernel_and_helpers(kernel):
        code = _code_of(function)
        captured = [value for _, value in _captured_values(function)]
        names = {*_referenced_names(code), *(getattr(value, "__name__", "") for value in captured)}
        # A gufunc stores to the arguments after its inputs.
        calls_gufunc = any(hasattr(value, "gufunc_builder") for value in [function, *captured])
        # In Numba, a dict display is a typed dict.
        instructions = {x.opname for part in _code_and_nested(code) for x in dis.get_instructions(part)}
        builds_dict = instructions & {"BUILD_MAP", "BUILD_CONST_KEY_MAP"}
        if calls_gufunc or builds_dict or names & _READONLY_BYPASSES:
            return True
    return False


def _buffers_only_read_in_llvm(overload: Any, signature: _Signature) -> set[int]:
    """Return the buffers that an overload does not write to, as LLVM proves.  Its parameters are all buffers."""
    only_read = set()
    arguments = _optimized_llvm_function(overload).arguments
    _result_pointer, _exception_pointer = itertools.islice(arguments, 2)
    for buffer, rank in enumerate(signature.ranks):
        # Each `islice` takes the next arguments of the iterator: the members of one array (`_numba_array_members`).
        _meminfo, _parent, _nitems, _itemsize, data, *_ = itertools.islice(arguments, 5 + 2 * rank)
        if {b"readonly", b"readnone"}.intersection(data.attributes):
            only_read.add(buffer)
    return only_read


def _optimized_llvm_function(overload: Any) -> Any:
    """Return the LLVM function of an overload, with the attributes that LLVM's optimizer infers for its arguments."""
    module = _llvm_module(overload)
    name = overload.fndesc.llvm_func_name
    function = module.get_function(name)
    # LLVM's optimizer puts `writeonly` or `readnone` on the pointer to the result.  If both are missing, the module is
    # not optimized yet, because of debug=True or NUMBA_OPT=0.
    if {b"writeonly", b"readnone"}.intersection(next(function.arguments).attributes):
        return function
    module = module.clone()
    manager, builder = overload.library._codegen._module_pass_manager(opt=3)
    manager.run(module, builder)
    return module.get_function(name)


def _llvm_module(overload: Any) -> Any:
    """Return the LLVM module of an overload, with all that the function calls."""
    # An overload from Numba's cache has its code in `_shared_module`, and no `_final_module`.
    return overload.library._shared_module or overload.library._final_module


def _numba_ir(kernel: Any) -> Any:
    """Return Numba's IR of a kernel or helper, or None if Numba cannot read it.

    This is no error here: the compiler reports it, and the CUDA simulator can run kernels that Numba cannot compile.
    """
    from numba.core import compiler

    with contextlib.suppress(Exception):
        return compiler.run_frontend(_py_func(kernel))
    return None


def _positions_only_read_in_numba_ir(kernel: Any, call_stack: tuple = ()) -> set[int]:
    """Return the positions of the parameters that a kernel or helper only reads, as far as Numba's IR shows."""
    only_read = _names_only_read_in_numba_ir(kernel, call_stack)
    parameters = inspect.signature(_py_func(kernel)).parameters
    return {position for position, name in enumerate(parameters) if name in only_read}


def _names_only_read_in_numba_ir(kernel: Any, call_stack: tuple = ()) -> set[str]:
    """Return the names of the parameters, globals and closure variables that a kernel or helper only reads.

    Globals and closure variables matter because CUDA kernels can store to device arrays in them
    (`_maybe_written_device_arrays`).  If Numba cannot read the function, the set is empty: everything may be stored to.
    The set is also empty for a function that never returns, so that a kernel that only raises is not reported for
    outputs without stores.  `call_stack` contains the callers that are being analyzed, to stop at recursion.
    """
    from numba.core import ir as nbir

    numba_ir = _numba_ir(kernel)
    blocks = numba_ir.blocks.values() if numba_ir else ()
    if not any(isinstance(block.terminator, nbir.Return) for block in blocks):
        return set()
    return _VariableUses(kernel, numba_ir, call_stack).only_read_names()


# The attributes of arrays that give no access to elements, unlike `.T` and `.flat` (also for 8.2 and section 13).
_ARRAY_METADATA = frozenset("shape size ndim dtype strides itemsize nbytes".split())


class _VariableUses:
    """The uses of variables in a function, from Numba's IR in SSA form (one assignment per variable).

    A use that is not known to be a read counts as a store.  This is safe: at worst, an input is copied (on GPUs,
    rejected) without need.  On CPUs, `items[i] = x[i]` counts as a store to x, because `items` may be a list, and
    `x[i]` an array.  So does `f(x[i])`, unless `f` is a helper that only reads.  For example, Numba's IR of
    `v = x[0]; v[1] = 2.0; n = x.shape` is:

        v = getitem(value=x, index=$0)       # `v` may be a view of `x`: `x` is a base of `v`
        v[$1] = $2                           # a store to `v`, and so to `x`
        n = getattr(value=x, attr=shape)     # only reads `x`

    `return x` is not a store to x.  In a caller, the result counts as a view of x (see `_add_call`).
    """

    def __init__(self, kernel: Any, numba_ir: Any, call_stack: tuple) -> None:
        from numba.core import ssa

        self.numba_ir = numba_ir
        self.call_stack = (*call_stack, kernel)
        self.is_cuda = _decorated_backend(kernel) == "numba_cuda"
        self.names: dict[str, str] = {}  # {variable: the parameter, global or closure variable that it is}
        # {name: the `ir.Var`s that the variable may be a view of}
        self.bases_of: dict[str, list] = collections.defaultdict(list)
        self.maybe_stored: list = []  # the `ir.Var`s that may be stored to
        # This also puts `numba_ir` itself into SSA form.
        for block in ssa.reconstruct_ssa(numba_ir).blocks.values():
            for statement in block.body:
                self._add(statement)

    def only_read_names(self) -> set[str]:
        """Return the names of the parameters, globals and closure variables without a store."""
        stored = set()
        pending = [*self.maybe_stored]
        while pending:
            variable = pending.pop().name
            if variable not in stored:
                stored.add(variable)
                pending += self.bases_of[variable]  # a store to a view is also a store to its bases
        return set(self.names.values()) - {self.names.get(variable) for variable in stored}

    def _add(self, statement: Any) -> None:
        """Add the uses in a statement."""
        from numba.core import ir as nbir

        used = statement.list_vars()
        is_assignment = isinstance(statement, nbir.Assign)
        if is_assignment:
            used.remove(statement.target)
        value = statement.value if is_assignment else statement
        match value:
            case nbir.Arg() | nbir.Global() | nbir.FreeVar():
                self.names[statement.target.name] = value.name
            case nbir.Expr(op="call"):
                self._add_call(statement.target.name, value)
            case nbir.Return() | nbir.Expr(op="binop" | "unary"):
                pass
            case nbir.Expr(op="getattr") if value.attr in _ARRAY_METADATA:
                pass
            case nbir.Var() | nbir.Expr(op="getattr" | "getitem" | "static_getitem" | "phi" | "cast"):
                self.bases_of[statement.target.name] += used
            # CUDA has no lists and dicts.  So the value that is stored to an array is not an array.
            case nbir.SetItem() | nbir.StaticSetItem() if self.is_cuda:
                self.maybe_stored.append(statement.target)
            case nbir.Expr(op="inplace_binop") if self.is_cuda:
                self.maybe_stored.append(value.lhs)
            # Any other statement may store.  On CPUs, this includes `a_list[0] = x`: later statements may store to x
            # through the list.
            case _:
                self.maybe_stored += used

    def _add_call(self, result: str, call: Any) -> None:
        """Add the uses in a call, whose result is assigned to the variable `result`.

            the call                        counts as a store to              the result counts as a view of
            np.dot(x, y), x.dot(y)          other arguments, such as `out`    nothing
            x.view(dtype)                   its arguments, but not x          x
            helper(x, y)                    arguments that it may store to    arguments that it only reads
            helper(x, *more, y=y)           `more` and y, too                 arguments that it only reads
            other calls: x.f(y), f(y)       x and y                           nothing

        The other calls include recursive calls of helpers.  Their results need no bases, because x and y count as
        stored to already.
        """
        function, method = self._called_function(call.func)
        only_read: Container = ()  # the positions of arguments that are only read
        if function is np.dot:
            only_read = (0, 1)
        elif method == "dot":
            only_read = (0,)
        elif method == "view":
            self.bases_of[result].append(call.func)  # `x.view` is a view of `x`
        elif _decorated_backend(function) and function not in self.call_stack:
            only_read = _positions_only_read_in_numba_ir(function, self.call_stack)
            self.bases_of[result] += [x for position, x in enumerate(call.args) if position in only_read]
        else:
            self.maybe_stored.append(call.func)  # for the method `x.f`, this is a view of x
        self.maybe_stored += [x for position, x in enumerate(call.args) if position not in only_read]
        self.maybe_stored += [x for _, x in call.kws]
        if call.vararg:
            self.maybe_stored.append(call.vararg)

    def _called_function(self, variable: Any) -> tuple[Any, str]:
        """Return (function, "") for a captured function, (None, "dot") for the method `x.dot`, or else (None, "").

        A reassigned variable is unknown: the function called by `f = g; if c: f = h; f(x)` may store to x.
        """
        from numba.core import errors, ir_utils

        with contextlib.suppress(errors.ConstantInferenceError):
            return self.numba_ir.infer_constant(variable.name), ""
        definition = ir_utils.guard(ir_utils.get_definition, self.numba_ir, variable)
        is_attribute = getattr(definition, "op", None) == "getattr"
        return None, definition.attr if is_attribute else ""


# -- 8.2 Warp: the views and stores of a kernel --------------------------------------------------------
# Warp has no read-only arrays, and its own marks (`verify_autograd_array_access`) miss stores through structs and
# tiles.  So an abstract interpretation of the kernel and of the functions that it calls finds the stores:
#
#     def kernel(x: rows, y: floats, z: floats, out: floats):
#         row = x[wp.tid()]       # row is a view of x
#         row[0] = 1.0            # an exact store to x
#         a = y
#         if row[1] > 0.0:
#             a = out             # a is a view of y or out
#         a[0] = 1.0              # an ambiguous store to y or out
#         cpp_function(z)         # a possible store to z
#
# A store is of one of three kinds.  The kind does not say whether the statement runs, or whether the overload of a
# helper that contains it is called:
#
#     kind         the statement or call                                     if its array may be an input
#     exact        stores to the array of one parameter                      an error
#     possible     may store, or only read: a call of C++ code or of an      an error
#                  unknown function, or one that passes `x[i]` by
#                  reference, even if several parameters are candidates
#     ambiguous    stores to the array of one of several parameters          the kernel gets a copy (`_inputs_to_copy`)
#
# Ambiguous stores occur in correct kernels, such as those that swap two variables in a loop.  If such a store does go
# to the input, only the copy changes.  If a possible store does happen, it is probably meant for the input, so a copy
# would lose values.
#
# The analysis is flow-insensitive: it ignores the order of statements, and adds to the views in variables until there
# are no new views (a fixpoint).  It does not distinguish the fields of a struct: with `box = Box(x, out)`, a store to
# `box.out[i]` is ambiguous.  It is too strict for `boxes[0] = box`, which counts as a store to the arrays in `box`.

_RETURNED = "return"  # the key of the returned value among variables.  `return` is a keyword, so none has this name


class _View(NamedTuple):
    """A possible view of the array of a parameter: a value may be this view, or a struct that contains it.

    For example, if the parameter `x` is an array with two dimensions, the views in these values are:

        x                             {_View("x", 2, False)}
        x[i]                          {_View("x", 1, False)}
        x[i, j]                       none, because it is a number
        wp.zeros(...)                 none, because it is not the array of a parameter
        box, after box.pos = x        {_View("x", 2, True)}
        boxes, after boxes[i] = box   {_View("x", inf, True)}, so that `boxes[i]` still has all dimensions of `x`
        boxes[i], boxes[i].pos        {_View("x", inf, True)}
    """

    parameter: str  # an array, or a struct with arrays
    # An upper bound of the ndim of the view.  It decides whether `v[i]` is a view, or an element.  It is infinite if it
    # is unknown, for arrays of structs with arrays (above), and for tuples: after `t = (x, y)`, `t[0]` has all
    # dimensions of `x`.
    max_ndim: float
    # Whether the value may be a struct.  It is True for `box`, and for `box.pos`, because a field may be a struct, too.
    # If it is True, `.size` may be an array, and an assignment of the value to `boxes[i]` stores views in `boxes`.
    maybe_struct: bool


class _Store(NamedTuple):
    """A statement or call that stores, or may store, to the array of a parameter."""

    parameters: frozenset[str]  # it stores to the array of one of these parameters
    node: ast.AST  # the statement or call
    function: Any  # the kernel or helper that contains the node
    is_possible: bool  # whether it is a possible store, which perhaps only reads

    @property
    def is_ambiguous(self) -> bool:
        return len(self.parameters) > 1 and not self.is_possible


def _union(sets: Iterable[set]) -> set:
    return set().union(*sets)


def _replace_all(views: Iterable[_View], **fields: Any) -> set[_View]:
    return {view._replace(**fields) for view in views}


class _KernelAnalysis:
    """The stores of a Warp kernel to the arrays of its parameters, found by analyses of the kernel and its helpers."""

    def __init__(self, kernel: Any) -> None:
        self.analyses: dict[Any, _FunctionAnalysis] = {}  # of the kernel and its helpers
        pending = collections.deque([kernel])
        while pending:
            function = pending.popleft()
            if function not in self.analyses:
                self.analyses[function] = analysis = _FunctionAnalysis(function, self.analyses)
                for callee in analysis.callees.values():
                    pending.extend(filter(_is_user_function, _overloads(callee)))
        self._repeat_until_stable(_FunctionAnalysis.find_views)
        # Afterwards: with incomplete views, an ambiguous store would be taken for an exact one.
        self._repeat_until_stable(_FunctionAnalysis.find_stores)
        # {parameter of the kernel: a store to its array}.  Stores that are errors for inputs precede ambiguous ones.
        self.stores: dict[str, _Store] = {}
        for store in sorted(self.analyses[kernel].stores, key=lambda store: store.is_ambiguous):
            for parameter in store.parameters:
                self.stores.setdefault(parameter, store)

    def _repeat_until_stable(self, find: Callable[[_FunctionAnalysis], int]) -> None:
        """Repeat a search in all functions until the number of its results does not grow any more."""
        n_before, n_found = -1, 0
        while n_before != n_found:
            n_before, n_found = n_found, sum(map(find, self.analyses.values()))


class _FunctionAnalysis:
    """The views in the variables of one Warp function, and its stores, in terms of its parameters.

    For example, `tail(a)` returns `a[1:]`, a view of `a`.  So in the analysis of a caller, `tail(x)` is a view of `x`.

    Warp <= 1.19 accepts only assignments to a variable, a field, an element, or a tuple of variables, as in
    `a, b = x, y` and `a, b = f(x)`.  It rejects `a = b = x`, `a: T = x` and `:=`.  The variable of a loop is a number.
    If a later version accepts more, `find_views` and `find_stores` need more cases.
    """

    def __init__(self, function: Any, analyses: Mapping[Any, _FunctionAnalysis]) -> None:
        self.function = function
        self.analyses = analyses  # of `_KernelAnalysis`, which adds others later
        self.captured = _referenced_variables(_py_func(function))  # including builtins of Python
        self.nodes = [node for statement in function.adj.tree.body[0].body for node in ast.walk(statement)]
        # {call: the called function, builtin, struct or other value}
        self.callees = {node: _callee(node.func, self.captured) for node in self.nodes if isinstance(node, ast.Call)}
        self.views: dict[str, set[_View]] = collections.defaultdict(set)  # in each variable, and in `_RETURNED`
        self.stores: list[_Store] = []
        for name, warp_type in _parameter_types(function).items():
            if max_ndim := _max_ndim(warp_type):
                # An array with unknown ndim has structs as elements.
                maybe_struct = not _is_array_type(warp_type) or max_ndim == math.inf
                self.views[name] = {_View(name, max_ndim, maybe_struct)}

    # -- views --

    def find_views(self) -> int:
        """Add the views in each variable, and in the returned value.  Return the number of views so far."""
        for node in self.nodes:
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=variables)], value=ast.Tuple(elts=values)):
                    for variable, value in zip(variables, values):
                        self._assign(variable, self._views_in(value))
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, self._views_in(value))
                case ast.Return(value=ast.expr() as value):
                    self.views[_RETURNED] |= self._views_in(value)
                case ast.Call():
                    for callee in filter(_is_user_function, _overloads(self.callees[node])):
                        self._assign_to_arguments(node, callee)
        return sum(map(len, self.views.values()))

    def _assign(self, target: ast.expr, views: set[_View]) -> None:
        """Add views to the variables of a target."""
        match target:
            case ast.Name(id=name):
                self.views[name] |= views
            case ast.Tuple(elts=variables):
                for variable in variables:
                    self._assign(variable, views)
            case ast.Attribute(value=struct):
                self._assign(struct, _replace_all(views, maybe_struct=True))
            case ast.Subscript(value=array):
                # Only elements that are structs contain views.  `array[k]` must keep all dimensions of these views.
                self._assign(array, _replace_all((view for view in views if view.maybe_struct), max_ndim=math.inf))

    def _views_in(self, expression: ast.expr) -> set[_View]:
        """Return the views that the value of an expression may be, or contain."""
        match expression:
            case ast.Name(id=name):
                return self.views[name]
            case ast.Subscript(value=owner, slice=index):
                indices = index.elts if isinstance(index, ast.Tuple) else [index]
                n_removed = sum(map(self._removes_dimension, indices))
                parts = (view._replace(max_ndim=view.max_ndim - n_removed) for view in self._views_in(owner))
                # Without dimensions, it is an element instead of a view: a number, vector or matrix, or a struct
                # without arrays.  (With arrays, `max_ndim` is infinite.)
                return {view for view in parts if view.max_ndim > 0}
            case ast.Attribute(value=owner, attr=name):  # `x.size` is a number, but a struct may have an array `size`
                return {view for view in self._views_in(owner) if view.maybe_struct or name not in _ARRAY_METADATA}
            case ast.Tuple(elts=values):
                return _replace_all(self._views_in_any(values), max_ndim=math.inf)
            case ast.IfExp(body=first, orelse=second):
                return self._views_in_any([first, second])
            case ast.Call():
                callees = _overloads(self.callees[expression])
                return _union(self._views_in_result(expression, callee) for callee in callees)
        return set()  # other expressions have no arrays

    def _views_in_any(self, expressions: Iterable[ast.expr]) -> set[_View]:
        """Return the views in the values of several expressions."""
        return _union(map(self._views_in, expressions))

    def _removes_dimension(self, index: ast.expr) -> bool:
        """Return whether an index selects one element of a dimension, unlike a slice."""
        if isinstance(index, ast.Slice):
            return False
        # If the function references Python's `slice`, as in `s = slice(0, 2)`, any index but a constant may be a slice.
        return isinstance(index, ast.Constant) or "slice" not in self.captured

    def _views_in_result(self, node: ast.Call, callee: Any) -> set[_View]:
        """Return the views in the result of a call."""
        if _is_user_function(callee):
            return self._translated_views(node, callee, _RETURNED)
        views = self._views_in_any(_arguments(node))
        match _effect(callee):
            case _Effect.RETURNS_ARGUMENT:  # perhaps in a struct
                return _replace_all(views, maybe_struct=True)
            case _Effect.RETURNS_VIEW:
                return _replace_all(views, max_ndim=math.inf)
        return set()

    def _assign_to_arguments(self, node: ast.Call, callee: Any) -> None:
        """Add the views that a user's function assigns to parts of its arguments, as in `boxes[0].pos = x`."""
        for parameter, warp_type in _parameter_types(callee).items():
            # Other arguments are passed by value, so assignments change only the variables of the function.
            if _is_reference(warp_type) or _is_array_of_structs(warp_type):
                views = self._translated_views(node, callee, parameter)
                for argument in _arguments_for(node, callee, parameter):
                    self._assign(argument, views)

    def _translated_views(self, node: ast.Call, callee: Any, variable: str) -> set[_View]:
        """Return the views in a variable of the callee, in terms of the parameters of the caller, this function.

        For example, if `tail(a)` returns a view of `a`, the result of `tail(x)` has the views in `x`.
        """
        # The ndim comes from the declared types of the called function.  That of an argument may be unknown.
        return {
            _View(view.parameter, inner.max_ndim, inner.maybe_struct or view.maybe_struct)
            for inner in self.analyses[callee].views[variable]
            for view in self._views_in_argument(node, callee, inner.parameter)
        }

    def _views_in_argument(self, node: ast.Call, callee: Any, parameter: str) -> set[_View]:
        """Return the views in the argument for a parameter of a user's function."""
        arguments = _arguments_for(node, callee, parameter)
        views = self._views_in_any(arguments)
        if _is_reference(_parameter_types(callee)[parameter]):  # a store to a reference to `x[i]` stores to `x`
            views |= _union(map(self._views_stored_to, arguments))
        return views

    # -- stores --

    def find_stores(self) -> int:
        """Add the stores to the arrays of the parameters.  Return the number of stores so far."""
        for node in self.nodes:
            match node:
                case ast.Assign(targets=[target]) | ast.AugAssign(target=target):
                    self._add_store(self._views_stored_to(target), node)
                case ast.Call():
                    for callee in _overloads(self.callees[node]):
                        self._add_stores_of_call(node, callee)
        return len(self.stores)

    def _views_stored_to(self, target: ast.expr) -> set[_View]:
        """Return the candidates for a store: an assignment to this target may store to one of these views.

        x[i] = 1.0, x[i].y = 1.0    the views in `x`
        x[i][0] = 1.0               the views in `x`, because `x[i]` may be a vector, and in `x[i]`, if it is a row
        v = 1.0, box.n = 1.0        none, because variables are not in arrays
        """
        match target:
            case ast.Subscript(value=owner):
                return self._views_in(owner) | self._views_stored_to(owner)
            case ast.Attribute(value=owner):
                return self._views_stored_to(owner)
        return set()

    def _add_stores_of_call(self, node: ast.Call, callee: Any) -> None:
        """Add the stores of the called function to the arguments of a call."""
        if _is_user_function(callee):
            for parameter in _parameter_types(callee):
                self._add_store(self._views_possibly_stored_to(node, callee, parameter), node, is_possible=True)
            for store in list(self.analyses[callee].stores):  # a copy, because the callee may be this function
                views = _union(self._views_in_argument(node, callee, name) for name in store.parameters)
                self._add_store(views, store.node, store.function, store.is_possible)
            return
        effect = _effect(callee)
        if effect is _Effect.STORES:
            # With keywords only, any of them may be the first parameter.
            self._add_store(self._views_in_any(node.args[:1] or _arguments(node)), node)
        elif effect is _Effect.UNKNOWN:
            self._add_store(self._views_in_any(_arguments(node)), node, is_possible=True)

    def _views_possibly_stored_to(self, node: ast.Call, callee: Any, parameter: str) -> set[_View]:
        """Return the views to which a user's function may store, without an assignment that shows it."""
        if getattr(callee, "native_snippet", None):  # C++ code
            return self._views_in_argument(node, callee, parameter)
        if _is_reference(_parameter_types(callee)[parameter]):  # `p = 1.0` looks like an assignment to a local variable
            return _union(map(self._views_stored_to, _arguments_for(node, callee, parameter)))
        return set()

    def _add_store(self, views: set[_View], node: ast.AST, function: Any = None, is_possible: bool = False) -> None:
        """Add a store to one of these views, by a node of this function or of another one."""
        parameters = frozenset(view.parameter for view in views)
        store = _Store(parameters, node, function or self.function, is_possible)
        if parameters and store not in self.stores:
            self.stores.append(store)


# -- 8.3 Warp: errors about stores ---------------------------------------------------------------------


def _check_stores(
    wrapper: _Wrapper, call: _CallParams, analysis: _KernelAnalysis, buffer_of: Mapping[str, int]
) -> None:
    """Raise an error if a Warp kernel stores to an input, or never stores to an output or in-out argument.

    Outputs are not checked if the user set `zero_outputs`, to True or False.  The kernel then need not store to them.

    `buffer_of` is {array parameter: the index of its buffer}.  Inputs have the first indices, followed by outputs and
    scratch.  For example, with inputs x and v, in_out_argnames=["v"], and outs=(v, y):

        {"x": 0, "v": 2, "y": 3}       # v has the index of its output
        {"x": 4, "v": 2, "y": 3}       # if the kernel has ambiguous stores to x: the index of a copy of x
    """
    protected_inputs = call.signature(wrapper.__name__).unaliased_inputs
    for name, store in analysis.stores.items():
        if buffer_of.get(name) not in protected_inputs:  # an output, scratch, an aliased input, a copy, or no array
            continue
        place = f"(`{ast.unparse(store.node):.80}` in function {_py_func(store.function).__name__!r})"
        if not store.is_possible:  # nor ambiguous, because ambiguous stores go to copies
            raise _read_only_input_error(f"{wrapper.title} writes to input {name!r} {place}.", [name])
        raise _read_only_input_error(
            f"{wrapper.title} may write to input {name!r} {place}.",
            [name],
            f" If this statement only reads {name!r}, list {name!r} in in_out_argnames nevertheless, add its spec to "
            "outs (in-out arguments come first), and ignore the additional result.",
        )
    if wrapper.options.checks_outputs:
        stored = {buffer for name, buffer in buffer_of.items() if name in analysis.stores}
        # The error advises: `out[i] = ...`.
        _check_outputs_are_stored(wrapper.title, buffer_of, stored, call, fix_index="i")


# -- 8.4 Warp: lookups for 8.2, of types, called functions and arguments -------------------------------
# Sections 10 and 13 use some of them, too.  Warp is optional, but where there is a kernel, it is loaded.  So its
# modules are in `sys.modules`.


def _parameter_types(function: Any) -> dict[str, Any]:
    return {parameter.label: parameter.type for parameter in function.adj.args}


def _is_array_type(warp_type: Any) -> bool:
    """Return whether the type of a parameter is an array: `wp.array`, or another class such as `wp.indexedarray`."""
    return hasattr(warp_type, "ndim")


def _is_reference(warp_type: Any) -> bool:
    """Return whether a parameter takes a variable or an element, such as `x[i]`, by reference (Warp >= 1.19)."""
    return type(warp_type).__name__ == "Reference"


def _is_warp_struct(value: Any) -> bool:
    """Return whether a value is what `@wp.struct` returns: the type of a parameter, and a constructor."""
    return isinstance(value, sys.modules["warp._src.codegen"].Struct)


def _is_array_of_structs(warp_type: Any) -> bool:
    return _is_array_type(warp_type) and _is_warp_struct(warp_type.dtype)


def _max_ndim(warp_type: Any) -> float:
    """Return the largest ndim of the arrays in a value of this type, 0 without arrays, or infinity if it is unknown."""
    if _is_warp_struct(warp_type):
        return max((_max_ndim(field.type) for field in warp_type.vars.values()), default=0)
    if isinstance(warp_type, type) and warp_type is not Any:  # a number, vector or matrix (`Any` is a type, too)
        return 0
    if _is_array_of_structs(warp_type) and _max_ndim(warp_type.dtype):
        return math.inf  # the structs have arrays
    return getattr(warp_type, "ndim", math.inf)


def _is_warp_function(value: Any) -> bool:
    return isinstance(value, sys.modules["warp._src.context"].Function)


def _is_user_function(value: Any) -> bool:
    return _is_warp_function(value) and not value.is_builtin()


def _builtin_name(value: Any) -> str:
    """Return the name of a builtin of Warp, or an empty string for other objects."""
    return value.key if _is_warp_function(value) and value.is_builtin() else ""


def _callee(node: ast.expr, captured: Mapping[str, Any]) -> Any:
    """Return the value to which the expression before the parentheses of a call refers, or None.

    As in Warp, captured functions and structs of Warp come before builtins, and other captured values come last.  So
    `wp.array` is the builtin of this name, not the captured class.  Builtins are found by the last name only: any
    `module.array` is this builtin.
    """
    value = _captured_value(node, captured)
    if _is_warp_function(value) or _is_warp_struct(value):
        return value
    name = getattr(node, "attr", getattr(node, "id", ""))
    return sys.modules["warp._src.context"].builtin_functions.get(name, value)


def _captured_value(node: ast.expr, captured: Mapping[str, Any]) -> Any:
    """Return the value of a name such as `wp.tid`, or None."""
    if hasattr(node, "warp_func"):  # Warp has replaced `wp.static(function)` by this node
        return node.warp_func
    match node:
        case ast.Name(id=name):
            return captured.get(name)
        case ast.Attribute(value=owner, attr=name):
            return getattr(_captured_value(owner, captured), name, None)
    return None


def _overloads(callee: Any) -> list:
    """Return all overloads of a user's Warp function, because any may be called.  For another object, return [it]."""
    if not _is_user_function(callee):
        return [callee]
    return [callee, *callee.user_overloads.values(), *callee.user_templates.values()]


class _Effect(enum.Enum):
    """The effect of a call on its array arguments."""

    READS = "only reads"
    STORES = "stores to the first argument"
    RETURNS_ARGUMENT = "returns an argument, or a struct with it, such as Box(x, y)"
    RETURNS_VIEW = "returns a view of an argument, with any ndim"
    # All arguments count as stored to, so it does not matter whether the result is a view of them.
    UNKNOWN = "may store to all arguments"


# Warp's builtins with array parameters, or parameters of any type.  Those that are not listed have unknown effects.
_BUILTINS = {
    _Effect.READS: "len lower_bound print printf sample_cdf tile_load tile_load_indexed volume_sample_index "
    "volume_sample_grad_index",
    _Effect.STORES: "atomic_add atomic_sub atomic_min atomic_max atomic_and atomic_or atomic_xor atomic_cas "
    "atomic_exch tile_atomic_add tile_atomic_add_indexed tile_store tile_store_indexed",
    _Effect.RETURNS_ARGUMENT: "copy select where",  # `copy` of an array does not copy its elements
    _Effect.RETURNS_VIEW: "array view",  # `wp.array(ptr=..., shape=...)` is a builtin in kernels
}
_EFFECTS = {name: effect for effect, names in _BUILTINS.items() for name in names.split()}


def _effect(callee: Any) -> _Effect:
    """Return the effect of a call of a builtin, struct or other value that is not a user's function."""
    if isinstance(callee, type):  # a type of numbers, vectors or matrices, which takes numbers
        return _Effect.READS
    if _is_warp_struct(callee):  # its constructor
        return _Effect.RETURNS_ARGUMENT
    if not _is_warp_function(callee):  # for example, a function that is an argument
        return _Effect.UNKNOWN
    builtins_with_name = [callee, *callee.overloads]
    warp_types = itertools.chain(*(builtin.input_types.values() for builtin in builtins_with_name))
    takes_arrays = any(warp_type is Any or _is_array_type(warp_type) for warp_type in warp_types)
    return _EFFECTS.get(callee.key, _Effect.UNKNOWN if takes_arrays else _Effect.READS)


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _arguments_for(node: ast.Call, function: Any, parameter: str) -> list[ast.expr]:
    """Return the arguments that a parameter of a user's function may get.  Empty if the parameter uses its default."""
    # After a starred argument, the positions are unknown, so the parameter may get any argument.  (`_views_in` finds
    # nothing in the starred one.  That is right, because Warp <= 1.19 rejects `*` of a tuple of arrays.)
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return _arguments(node)
    arguments = dict(zip(_parameter_types(function), node.args)) | {kw.arg: kw.value for kw in node.keywords}
    return [arguments[parameter]] if parameter in arguments else []


# ======================================================================================================
# 9. Numba CUDA: wrappers, launch configurations, and emitters of code that calls cuLaunchKernel.
#
# Two packages compile kernels of `@cuda.jit`: numba-cuda (0.30), and its successor numba-cuda-mlir (0.6).  If there is
# no numba-cuda, Numba's own CUDA target takes its place.  Numba's simulator runs kernels in Python, on the CPU.
#
# From the user's call to a launch on a GPU:
#
#     `_CudaKernel._find_target`              chooses the launch configuration (9.1), and checks the call (9.2)
#       `_CudaCompiler`, for a package (9.3)  compiles the kernel, checks its stores to inputs, and loads it (9.4)
#         `_CudaEmitter`                      writes a handler that launches the kernel once per slice (9.5)
#     `_CudaBatchUpgrade`                     when a batch is lowered: one launch for many slices (9.6)
#
# For a `numba_cuda_callable`, and for a kernel in the simulator, the handler calls Python for each slice:
#
#     the handler, with a `_CallbackEmitter` (6.7)
#       `run_slice`, in `callback_emitter`    converts addresses to arrays of the package (9.3) or the simulator (9.7)
#         `launch`                            runs the function of the callable (9.2), or the simulator (9.7)
#
# Section 10 uses 9.1, `_cuda_ordinals` (9.4), 9.5 and the fallback reasons of 9.6 for Warp's kernels.
#
# Most of what this section uses of the packages is not documented.  If a package removes a name, there is an error.  If
# one of the following changes, results may silently be wrong.  Tests with the fixtures `package_cuda` and
# `counting_cuda` detect this, except for the last row, which needs a GPU.  So copies of this file need the tests, too.
#
#     the layout of a kernel's parameters                               `param_words`
#     the options and functions that need more than cuLaunchKernel      `_check_launch`
#     the uses of z, in PTX and in Numba's IR                           `_PTX_USES_Z`, `_n_cuda_grid_indices`
#     the functions that write to read-only arrays, and typed code      `_find_store_to_readonly`
#     compiled code keeps global arrays alive                           `_CudaLauncher`
#     XLA makes the context of the call's device current                `write_launch_setup`
#     the attribute `_numba_type_` of device arrays                     `_read_only_class`

_CUDA_DTYPES = _NUMBA_DTYPES | {"float16"}
_CUDA_INSTALL = 'pip install "jax[cuda13]" "numba-cuda-mlir[cu13]" (CUDA 12: cuda12, cu12)'
# In errors: "numba_cuda_kernel 'add' runs on NVIDIA GPUs (...). ... This call is compiled for the platform 'cpu'. ..."
_CUDA_PLATFORM_PHRASE = (
    f"runs on NVIDIA GPUs ({_CUDA_INSTALL}). If NUMBA_ENABLE_CUDASIM=1 is set, kernels of numba.cuda run in Python on "
    "CPUs. For compiled code on CPUs, use numba_kernel"
)


@_with_option_advice
def numba_cuda_kernel(
    kernel: Any = None,
    outs: Any = None,
    *,
    grid: Any = None,
    block: Any = None,
    launch_dims: Any = None,
    threads_per_block: int | None = None,
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
    """Return a JAX function that launches a Numba CUDA kernel.

    The kernel takes row-major device arrays, stores to its outputs, and returns nothing:

        kernel(*inputs, *outputs, *scratch)

    Inputs are read-only, unless an output is aliased to them.  Machine code launches the kernel on XLA's stream,
    without Python and the GIL.  XLA may capture the launch in a CUDA graph.  Without a GPU, a program can still be
    lowered for CUDA and exported.

    `vmap` launches the kernel once for up to 65,535 batch elements, which are the blocks along z and run in any order.
    Each batch element has its own launch, in order, in these cases (this module's logger shows the reason at level
    DEBUG when the batch is lowered):

    - `vmap_method="sequential"`;
    - the grid has several blocks along z;
    - the kernel reads `blockIdx.z` or `gridDim.z`, as `cuda.grid(3)` does, or the number of its launch (`%gridid`);
    - the kernel uses clusters, calls external functions, or may write to a global device array;
    - the kernel does not compile for batches, or then allows fewer threads in a block than the launch has;
    - captured values have changed since the kernel was compiled.

    New outputs are zeroed (`zero_outputs`) by one `cuMemsetD8Async` per output, even in a batch.

    A global device array is not copied.  The kernel uses its memory, which is never freed, and may write to it.

    An exception in a CUDA kernel is not reported.  With numba-cuda-mlir, all GPUs must have the same architecture.

    If NUMBA_ENABLE_CUDASIM=1 is set before Numba is imported, kernels of `numba.cuda` run in Python on JAX's CPU
    backend.

    Args:
      kernel: A function decorated with `@cuda.jit` of `numba` (numba-cuda) or `numba_cuda_mlir`.  If it is omitted,
        `numba_cuda_kernel(outs=...)` is a decorator to put above `@cuda.jit`.
      outs, vmap_method, input_output_aliases, in_out_argnames, scalars, has_side_effect, scratch, zero_outputs, name:
        See `numba_kernel`.
      grid: The number of blocks: an int or a tuple of up to three ints (x, y, z).  Requires `block`.  If the grid
        depends on shapes, use `launch_dims`, or create a wrapper in each call.  All wrappers share the compiled kernel.
      block: The number of threads in a block: an int or a tuple of up to three ints (x, y, z).
      launch_dims: Replaces `grid` and `block`.  The number of threads: an int, a tuple of up to three ints (x, y, z),
        or a function of the inputs' specs that returns one of these.  The grid consists of whole blocks, so the kernel
        must check indices (`if i < out.size`).  If a number is 0, nothing is launched.  Adjacent threads differ in x,
        so let x be the last dimension of a matrix:

            launch_dims=lambda m: m.shape[::-1]    # (columns, rows)
            column, row = cuda.grid(2)             # in the kernel, for m[row, column]

      threads_per_block: The block size, an int, only for one-dimensional `launch_dims`.  Default 256.  For two
        dimensions the block is 16x16, for three 8x8x4.
      shared_mem: The bytes of dynamic shared memory, an int.  Default 0.  The device's opt-in maximum is allowed.

    Returns:
      A function of the inputs, `f(*inputs)`.  Its results have the structure of `outs`.

    Raises:
      TypeError: See `numba_kernel`.  Also if a kernel needs more than one plain call of cuLaunchKernel (`debug=True`,
        cooperative kernels).  Use `numba_cuda_callable` for these.
      ValueError: See `numba_kernel`.  Also in these cases:

        - Not exactly one of these is given: `launch_dims`, or both `grid` and `block`.
        - A number exceeds CUDA's limits (1,024 threads in a block).
        - `threads_per_block` is given but not used.
        - `launch_dims` does not have the n dimensions of the kernel's `cuda.grid(n)`.  This is not checked if the
          kernel reads an attribute y or z of any object, such as `cuda.blockIdx.y`.

      NotImplementedError: If the call is compiled for a platform other than CUDA, and the simulator is not enabled.
      jax.errors.JaxRuntimeError: If a launch fails.  The text has CUDA's error, and the limit that was exceeded.

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
    return _wrapper_or_decorator(_CudaKernel, options.pop("kernel"), _CudaOptions(**options))


@_with_option_advice
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
    """Return a JAX function that calls a Python function, which launches Numba CUDA kernels.

    The Python function runs on every call.  It takes device arrays and a stream, and returns nothing:

        func(*inputs, *outputs, *scratch, stream)

    It may allocate temporary arrays (`cuda.device_array_like(x)`), copy arrays
    (`tmp.copy_to_device(x, stream=stream)`), and read them (`x.copy_to_host(stream=stream)`, then
    `stream.synchronize()`).  These rules are its own responsibility:

    - Launch every kernel on the stream: `kernel[grid, block, stream](...)`.  Other streams do not wait for the inputs.
    - Store the results to the outputs, and change no input.
    - Do not use the arguments after the call, and do not call JAX.
    - Create only one wrapper of a function: each compiles a handler, which keeps the function and its captured values
      forever.

    Inputs are read-only device arrays, unless an output is aliased to them.  The launch of a kernel that assigns to an
    element of an input raises an error.  These stores are not noticed:

    - atomics and stores with cache hints, and stores to the results of `x.squeeze()` and `x.split(n)`;
    - stores of a kernel with explicit signatures, or of one that numba-cuda-mlir has already compiled for writable
      arrays;
    - all stores, if a helper of a referenced kernel has explicit signatures.  Numba-cuda passes only writable arrays to
      such helpers, so the check is off, whatever the package.

    The function need not synchronize.  The device of the call is current.  `vmap` calls the function once per batch
    element.  Calls hold the GIL, and are not captured in CUDA graphs.  A program with a callable cannot be exported.

    Args:
      func: A Python function or method.  Its arrays and stream belong to the CUDA package (`numba.cuda` or
        `numba_cuda_mlir`) whose module `cuda`, or one of whose kernels, is a captured value of `func` (a global,
        closure variable or default, also in a tuple or list).  If there is none, they belong to the package that is
        imported.  Of two such packages, the simulator comes first, then `numba_cuda_mlir`.
      outs, vmap_method, input_output_aliases, has_side_effect, scratch, zero_outputs: See `numba_kernel`.  `scratch`
        provides temporary arrays without an allocation.

    Returns:
      A function of the inputs, `f(*inputs)`.  Its results have the structure of `outs`.

    Raises:
      TypeError: If `func` is not a Python function or method, or does not take these arguments.  Also for wrong options
        or inputs, see `numba_kernel`.
      ValueError: See `numba_kernel`.
      NotImplementedError: If the call is compiled for a platform other than CUDA, and the simulator is not enabled.
      jax.errors.JaxRuntimeError: If `func` raises an exception, with its type and text.

    Example:
      >>> from numba import cuda
      >>> @cuda.jit
      ... def scale(x, out):
      ...     i = cuda.grid(1)
      ...     if i < out.size:
      ...         out[i] = 2 * x[i]
      >>> @numba_cuda_callable(outs=lambda x: x)
      ... def scale_twice(x, out, stream):
      ...     tmp = cuda.device_array_like(x)
      ...     scale[out.size // 256 + 1, 256, stream](x, tmp)
      ...     scale[out.size // 256 + 1, 256, stream](tmp, out)
      >>> scale_twice(np.ones(3, np.float32)).tolist()
      [4.0, 4.0, 4.0]
    """
    options = dict(locals())  # all arguments by name
    return _wrapper_or_decorator(_CudaCallable, options.pop("func"), _Options(**options))


# -- 9.1 Launch configurations -------------------------------------------------------------------------
# Sizes are in the order (x, y, z).  Missing ones are 1.
#
#     option         unit                                         default
#     launch_dims    threads of the grid, in each dimension       none: `grid` and `block` are given
#     block          threads of a block, in each dimension        `threads_per_block`, or `_DEFAULT_BLOCKS`
#     grid           blocks, in each dimension                    `launch_dims` / `block`, rounded up
#     shared_mem     bytes of dynamic shared memory of a block    0
#
# For example, launch_dims=(100, 30) has block=(16, 16, 1) and grid=(7, 2, 1).  The launch attribute of the call is
# [7, 2, 1, 16, 16, 1, 0], the fields of a `_LaunchConfig`.


class _LaunchConfig(NamedTuple):
    """A launch configuration, in the order of cuLaunchKernel's parameters.

    Its fields are ints, and `_Int64`s in generated code.  The launch attribute of a Numba CUDA call consists of these
    int64s.  That of a Warp call on a GPU begins with them.
    """

    grid_x: Any  # blocks
    grid_y: Any
    grid_z: Any
    block_x: Any  # threads
    block_y: Any
    block_z: Any
    shared_mem: Any  # bytes of dynamic shared memory

    @property
    def grid(self) -> tuple:
        return self[:3]

    @property
    def block(self) -> tuple:
        return self[3:6]

    @property
    def threads_per_block(self) -> Any:
        return math.prod(self.block)


_CUDA_LAUNCH_WORDS = len(_LaunchConfig._fields)
_CUDA_MAX_THREADS = 1024  # in a block
_CUDA_MAX_GRID_YZ = 65535  # blocks along y, and along z
_DEFAULT_BLOCKS = {1: (256, 1, 1), 2: (16, 16, 1), 3: (8, 8, 4)}  # by the number of dimensions of `launch_dims`


def _load_launch_config(ir: _HandlerBuilder, frame: _StructPointer) -> _LaunchConfig:
    """Load the launch configuration of the call."""
    first = ir.launch_attribute_address(frame)
    return _LaunchConfig(*[ir.load(first + 8 * i) for i in range(_CUDA_LAUNCH_WORDS)])


def _read_launch_config(address: int) -> _LaunchConfig:
    """Read the launch configuration at the address of a launch attribute, in Python."""
    return _LaunchConfig(*(_I64 * _CUDA_LAUNCH_WORDS).from_address(address))


class _SizesOption(NamedTuple):
    """An option that is an int, or a tuple of one to three ints (x, y, z), and its limits."""

    name: str
    minimum: int
    maxima: tuple[int, int, int]
    fix: str  # a sentence for errors

    def xyz(self, value: Any, origin: str = "") -> tuple[int, int, int]:
        """Return the sizes x, y and z.  Raise an error if one is out of range.

        `origin` says where the value comes from, if the user has not passed it: ", from launch_dims=(16, 1600000)" in

            grid.y must be an int from 0 to 65535; got 100000 in grid=(1, 100000, 1), from launch_dims=(16, 1600000).
        """
        name = self.name
        error_text = f"{name} must be an int or a tuple of 1 to 3 ints; got {value!r}. Pass {name}=(x, y), for example."
        sizes = _ints(value, error_text)
        if not 1 <= len(sizes) <= 3:
            raise ValueError(error_text)
        xyz = (*sizes, 1, 1)[:3]
        for axis, size, maximum in zip("xyz", xyz, self.maxima):
            if not self.minimum <= size <= maximum:
                raise ValueError(
                    f"{name}.{axis} must be an int from {self.minimum} to {maximum}; got {size} in "
                    f"{name}={xyz}{origin}. {self.fix}"
                )
        return xyz


_GRID_FIX = (
    "If there are too many blocks, put the largest size in x, and exchange the indices in the kernel. Or let each "
    "thread run several elements: for i in range(cuda.grid(1), n, cuda.gridsize(1))."
)
_GRID = _SizesOption("grid", 0, (2**31 - 1, _CUDA_MAX_GRID_YZ, _CUDA_MAX_GRID_YZ), _GRID_FIX)
_BLOCK = _SizesOption(
    "block", 1, (_CUDA_MAX_THREADS, _CUDA_MAX_THREADS, 64), "Pass block=256, or block=(16, 16), and enough blocks."
)
_LAUNCH_DIMS = _SizesOption("launch_dims", 0, (sys.maxsize,) * 3, "For example, launch_dims=lambda x: x.size.")


def _ints(value: Any, error_text: str) -> tuple:
    """Return an int, or several ints, as a tuple.  Raise a TypeError for other values."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(error_text) from None


def _int_in_range(name: str, value: Any, minimum: int, maximum: int, fix: str) -> int:
    """Return the value of an option as an int.  Raise an error if it is not an int, or is out of range."""
    error_text = f"{name} must be an int from {minimum} to {maximum}; got {value!r}. {fix}"
    [number] = _ints((value,), error_text)
    if not minimum <= number <= maximum:
        raise ValueError(error_text)
    return number


@dataclasses.dataclass(kw_only=True)
class _CudaOptions(_Options):
    """The arguments of `numba_cuda_kernel`, except for the kernel."""

    grid: Any
    block: Any
    launch_dims: Any
    threads_per_block: int | None
    shared_mem: int

    def __post_init__(self) -> None:
        super().__post_init__()
        names = "grid", "block", "launch_dims", "threads_per_block"
        given = [name for name in names if getattr(self, name) is not None]
        if given not in (["grid", "block"], ["launch_dims"], ["launch_dims", "threads_per_block"]):
            raise ValueError(
                "A launch takes either both grid and block, or launch_dims and perhaps threads_per_block; got "
                f"{' and '.join(given) or 'none of them'}. Pass launch_dims=lambda x: x.size, or grid=n_blocks, "
                "block=256."
            )
        self.shared_mem = _int_in_range("shared_mem", self.shared_mem, 0, 2**31 - 1, "Pass shared_mem=4 * n_floats.")
        if (size := self.threads_per_block) is not None:
            fix = "Pass threads_per_block=256."
            self.threads_per_block = _int_in_range("threads_per_block", size, 1, _CUDA_MAX_THREADS, fix)

    def launch_config(self, launch_dims: Any) -> _LaunchConfig:
        """Return the launch configuration for these `launch_dims`.  If they are None, use `grid` and `block`."""
        if launch_dims is None:
            config = _LaunchConfig(*_GRID.xyz(self.grid), *_BLOCK.xyz(self.block), self.shared_mem)
            if config.threads_per_block > _CUDA_MAX_THREADS:
                raise ValueError(
                    f"A block has at most {_CUDA_MAX_THREADS} threads; block={config.block} has "
                    f"{config.threads_per_block}. {_BLOCK.fix}"
                )
            return config
        n_threads = _LAUNCH_DIMS.xyz(launch_dims)
        n_dims = np.size(launch_dims)  # 1 for an int
        block = _DEFAULT_BLOCKS[n_dims]
        if self.threads_per_block:
            if n_dims > 1:
                raise ValueError(
                    "threads_per_block is for launch_dims of one dimension; got threads_per_block="
                    f"{self.threads_per_block} and launch_dims={launch_dims}. Remove threads_per_block, or pass "
                    "grid=(x, y), block=(x, y) instead of these two."
                )
            block = self.threads_per_block, 1, 1
        n_blocks = tuple(-(-size // block_size) for size, block_size in zip(n_threads, block, strict=True))
        return _LaunchConfig(*_GRID.xyz(n_blocks, f", from launch_dims={launch_dims}"), *block, self.shared_mem)


def _check_n_indices(title: str, launch_text: str, n_dims: int, n_indices: int, index_function: str) -> None:
    """Raise an error if the number of launch dimensions differs from the number of indices of a thread.

    With more dimensions than indices, threads repeat the same work.  With fewer, an index is always 0.  For example,
    if `launch_text` is "launch_dims=7", the error is:

        launch_dims needs one int for each index of a thread. numba_cuda_kernel 'add': launch_dims=7 has 1 dimension,
        but cuda.grid returns 2 values. For example, pass launch_dims=(64, 64).
    """
    if n_dims != n_indices:
        raise ValueError(
            f"launch_dims needs one int for each index of a thread. {title}: {launch_text} has "
            f"{_counted(n_dims, 'dimension')}, but {index_function} returns {_counted(n_indices, 'value')}. "
            f"For example, pass launch_dims={(64,) * max(n_indices, 1)}."  # a Warp kernel may have no index
        )


def _n_cuda_grid_indices(kernel: Any) -> int:
    """Return the largest constant n of the calls `cuda.grid(n)` in a kernel and its helpers, or 0 if there is none.

    Also return 0 if they read an attribute y or z of any object, because `cuda.blockIdx.y`, for example, is an index.
    """
    n_indices = 0
    for function in _kernel_and_helpers(kernel):
        numba_ir = _numba_ir(function)
        for block in numba_ir.blocks.values() if numba_ir else ():
            if any(x.attr in ("y", "z") for x in block.find_exprs("getattr")):
                return 0
            for call in block.find_exprs("call"):
                n_indices = max(n_indices, _n_of_cuda_grid(numba_ir, call))
    return n_indices


def _n_of_cuda_grid(numba_ir: Any, call: Any) -> int:
    """Return n if a call in Numba's IR is `cuda.grid(n)`, and n is constant.  Otherwise return 0."""
    from numba.core.ir_utils import find_callname, find_const, guard

    name, module = guard(find_callname, numba_ir, call) or ("", "")
    args = (*call.args, *dict(call.kws).values())
    if args and name == "grid" and _is_library_module(str(module)):
        return guard(find_const, numba_ir, args[0]) or 0
    return 0


# -- 9.2 The wrappers ----------------------------------------------------------------------------------


class _CudaWrapper(_NumbaWrapper):
    """A wrapper of a Numba CUDA kernel (`_CudaKernel`), or of a function that launches kernels (`_CudaCallable`)."""

    def _bind_primitive(self, ins: list[_Spec], outs: list[_Spec], *args: Any) -> list:
        """Return the results of the call as a list, after moving aliased operands to the memory of the device."""
        operands = list(args)
        call = self._call_params(ins, outs)
        for i, _ in call.aliases:
            if jax.typeof(args[i]).memory_space == jax.memory.Space.Host:
                # XLA does not compile aliases between host and device memory (jax 0.11.2): "E1200:
                # CompileTimeHostOffloadOutputLocationMismatch".
                operands[i] = jax.device_put(args[i], jax.memory.Space.Device)
        return call.bind(operands)

    def _checked_signature(self, call: _CallParams) -> _Signature:
        """Return the signature of a call.  Raise an error if Numba is missing, or has no arrays of a dtype."""
        _import("numba", self.decorator, _CUDA_INSTALL)
        self._check_dtypes(call, _CUDA_DTYPES, "for which Numba CUDA has no arrays")
        return call.signature(self.__name__)

    def _target(
        self,
        package: Any,
        signature: _Signature,
        compile_handler: Callable,
        freezes_globals: bool,
        *handler_options: Any,
    ) -> _CallTarget:
        """Return the target of a call with this signature.  If it is new, compile and register its handler.

        If `freezes_globals`, machine code keeps the values of globals.  Otherwise Python reads them on each run, and
        the target is not shared (3.5).  The kernel, the signature and `handler_options` determine the handler.
        """
        all_options = "cuda", package.module, *handler_options
        specialization = _Specialization(signature, all_options, package.platform, self.options.name)
        name = _REGISTRY.numba_target_name(self, specialization, compile_handler, freezes_globals)
        return _CallTarget(name, platform=package.platform, title=self.title, platform_phrase=_CUDA_PLATFORM_PHRASE)


class _CudaKernel(_CudaWrapper):
    """The wrapper of a Numba CUDA kernel."""

    decorator = "numba_cuda_kernel"

    def __init__(self, kernel: Any, options: _CudaOptions) -> None:
        if _decorated_backend(kernel) != "numba_cuda":
            takes = "a function decorated with @cuda.jit of numba or numba_cuda_mlir (without [grid, block])"
            raise _unsupported_kernel_error("numba_cuda_kernel", takes, kernel)
        if getattr(kernel, "targetoptions", {}).get("device"):  # the simulator's kernels have no options
            raise TypeError(
                f"numba_cuda_kernel takes a kernel; {kernel.__name__!r} is a device function. Remove device=True from "
                "@cuda.jit, or call the function in a kernel."
            )
        super().__init__(kernel, options)
        self.package: Any = _cuda_package(kernel)
        if not callable(options.launch_dims):
            options.launch_config(options.launch_dims)  # raises an error for wrong options

    def __getitem__(self, config: Any) -> Any:
        raise TypeError(
            f"{self.title} is called as a function of its inputs, without [grid, block]; got [{config}]. Give the grid "
            "and the block when you create the wrapper: numba_cuda_kernel(kernel, outs, grid=..., block=...)."
        )

    def _find_target(self, call: _CallParams) -> _CallTarget:
        package = self.package
        options = self.options
        signature = self._checked_signature(call)
        launch_dims = self._option_value("launch_dims", call.ins)
        config = options.launch_config(launch_dims)
        if launch_dims is not None and (n_indices := _n_cuda_grid_indices(self.kernel)):
            _check_n_indices(self.title, f"launch_dims={launch_dims}", np.size(launch_dims), n_indices, "cuda.grid")
        [argument_map] = self._argument_maps(call, may_return=False)  # one calling convention, so one map
        compile_handler = functools.partial(self._compile_handler, call, signature, argument_map)
        freezes_globals = isinstance(package, _CudaPackage)  # the simulator runs Python
        handler_options = argument_map, options.in_order, options.checks_outputs
        target = self._target(package, signature, compile_handler, freezes_globals, *handler_options)
        target = dataclasses.replace(target, launch_attribute=tuple(config), is_noop=0 in config.grid)
        if options.name and not options.in_order:
            # With `name`, the target has the same name in all processes, so a trace in process B serves a program that
            # process A exported.  B does not lower this program, so the kernel is compiled for batches now:
            #
            #     exported = jax.export.export(jax.jit(jax.vmap(wrapper)), ...)(x)     # process A
            #     jax.eval_shape(wrapper, x[0])                                        # process B: compiled here
            #     exported.call(x)                                                     # process B: one launch
            target.prepare_lowering(package.platform, has_batch=True)
        return target

    def _compile_handler(
        self, call: _CallParams, signature: _Signature, argument_map: _ArgumentMap
    ) -> _CompiledHandler | None:
        """Compile the kernel and its handler, and check the stores.  If there is no device, only check the outputs."""
        package = self.package
        only_read = _positions_only_read_in_numba_ir(self.kernel)
        stored = argument_map.maybe_written_buffers(only_read)  # the buffers to which the kernel may store
        if not _local_devices(package.platform):
            handler = None  # this process only lowers programs
        elif isinstance(package, _CudaSimulator):
            handler = package.kernel_handler(self.kernel, argument_map, signature)
        else:
            maybe_written_inputs = stored & argument_map.protected_inputs(signature)
            to_check = argument_map.names_of(maybe_written_inputs, self.parameters)
            compiler = _CudaCompiler(package, self.kernel, argument_map, signature, self.options.in_order, to_check)
            handler = compiler.compile_kernel_and_handler()
        if self.options.checks_outputs:
            buffer_of = dict(argument_map.named_args(self.parameters))
            _check_outputs_are_stored(self.title, buffer_of, stored, call, fix_index="i")
        return handler


class _CudaCallable(_CudaWrapper):
    """The wrapper of a Python function that launches Numba CUDA kernels."""

    decorator = "numba_cuda_callable"

    def __init__(self, func: Any, options: _Options) -> None:
        if not isinstance(func, (types.FunctionType, types.MethodType)):
            takes = "a Python function that launches kernels (for one kernel use numba_cuda_kernel)"
            raise _unsupported_kernel_error("numba_cuda_callable", takes, func)
        super().__init__(func, options)

    def _find_target(self, call: _CallParams) -> _CallTarget:
        signature = self._checked_signature(call)
        function = getattr(self.kernel, "__func__", self.kernel)  # of a method
        package = _callable_package(function)
        _check_call_signature(inspect.signature(self.kernel), self.title, [*call.buffers, "a stream"])
        device_functions = [x for x in _kernel_and_helpers(function) if getattr(x, "targetoptions", {}).get("device")]
        # The check of inputs is off if a helper has explicit signatures: numba-cuda 0.30 passes it no read-only arrays.
        readonly_inputs = set() if any(map(_has_explicit_signatures, device_functions)) else signature.unaliased_inputs
        # The handler keeps `launch` alive forever, so `launch` must not refer to the wrapper and its caches.
        launch = functools.partial(_run_callable, self.kernel, self.title)

        def compile_handler() -> _CompiledHandler | None:
            if not _local_devices(package.platform):  # this process only lowers programs
                return None
            return _build_handler(signature, package.callback_emitter(signature, launch, readonly_inputs))

        return self._target(package, signature, compile_handler, freezes_globals=False)


# {regular expression of an error of a package or of NumPy: the problem and the fix}
_CALLABLE_ERRORS = {
    r"Cannot modify readonly array|setitem\(readonly array|destination is read-only": (
        f"{_READ_ONLY_RULE}. A launch or an assignment writes to one. Write to an output, or alias an output to the "
        "input: input_output_aliases={i: j}. For a temporary copy: tmp = cuda.device_array_like(x); "
        "tmp.copy_to_device(x, stream=stream)."
    ),
    "Unsupported stream type|Expected a Stream object": (
        "The arrays and the stream of a callable belong to one CUDA package. Its kernel belongs to another one. "
        "Reference the package of the kernel by a default: def launch(x, out, stream, cuda=cuda)."
    ),
}


def _run_callable(func: Callable, title: str, arrays: list, stream: Any, _launch_address: int) -> None:
    """Run one slice of a `numba_cuda_callable`, as `launch` in the diagram of section 9.  `title` is for errors."""
    try:
        returned = func(*arrays, stream)
    except Exception as error:
        for pattern, problem_and_fix in _CALLABLE_ERRORS.items():
            if re.search(pattern, str(error)):
                raise TypeError(f"{title}: {problem_and_fix} The package reports: {error}") from error
        raise
    if returned is not None:
        raise TypeError(
            f"A callable returns nothing; {title} returned {type(returned).__name__}. Let its kernels store the "
            "results to the outputs, and remove `return` or `yield`."
        )


# -- 9.3 The packages ----------------------------------------------------------------------------------


# All copies of this file share the locks in `_PROCESS_STATE` (3.4).
_GPUS_LOCK: threading.RLock = _PROCESS_STATE.setdefault("gpus_lock", threading.RLock())
# While the simulator runs a kernel, it replaces globals of the kernel's module, such as `cuda`.
_CUDASIM_LOCK: threading.RLock = _PROCESS_STATE.setdefault("cudasim_lock", threading.RLock())

# Both classes have `module`, the name of a module `cuda`; `platform`, where JAX calls kernels; and `callback_emitter`.
type _PackageOrSimulator = _CudaPackage | _CudaSimulator


def _uses_cudasim() -> bool:
    """Return whether kernels of `numba.cuda` run in the simulator.  Numba reads the variable when it is imported."""
    is_set = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    return bool(getattr(sys.modules.get("numba.core.config"), "ENABLE_CUDASIM", is_set))


@dataclasses.dataclass(frozen=True, eq=False)
class _CudaPackage:
    """A package that compiles kernels for GPUs: numba-cuda or numba-cuda-mlir."""

    module: str  # the name of the package's module `cuda`
    device_inline: str  # the option `inline` of a device function that an adapter calls
    # An overload is the package's object for a compiled kernel.
    ptx_and_entry: Callable[[Any], tuple[str, str]]  # overload -> its PTX, and its name there
    cubin: Callable[[Any], Any]  # overload -> its machine code (numba-cuda: for the current device)
    param_words: Callable[[_KernelArray], list]  # array -> the int64 parameters that a kernel takes for it
    platform: str = "cuda"  # the platform on which JAX calls the package's kernels

    @property
    def cuda(self) -> Any:
        return importlib.import_module(self.module)

    @contextlib.contextmanager
    def on_device(self, ordinal: int) -> Iterator:
        """Make the primary context of a device current, which is also the one that XLA uses."""
        with _GPUS_LOCK:  # numba_cuda_mlir fails if two threads read `cuda.gpus` for the first time at once
            device = self.cuda.gpus[ordinal]
        device.__enter__()  # pushes a context: the driver's stack [..., XLA's] becomes [..., XLA's, device's]
        try:
            yield
        finally:
            # `__exit__` pops the top of the stack, which is right, and asserts that it was the device's context.  This
            # may be wrong: if JAX frees an array of another GPU meanwhile, it replaces the top by that GPU's context.
            with contextlib.suppress(AssertionError):
                device.__exit__(None, None, None)

    def callback_emitter(self, signature: _Signature, launch: Callable, readonly_inputs: Container) -> _CallbackEmitter:
        """Return an emitter that calls `launch(arrays, stream, launch_address)` in Python for each slice.

        The arrays and the stream are objects of the package.  `launch_address` is the address of the launch attribute,
        and `readonly_inputs` has the indices of the inputs that are read-only arrays.
        """

        def run_slice(buffers: list, launch_address: int, stream: int, ordinal: int) -> None:
            with self.on_device(ordinal):
                arrays = []
                for k, ((pointer, shape), dtype) in enumerate(zip(buffers, signature.dtypes, strict=True)):
                    interface = {"shape": shape, "typestr": dtype.str, "data": (pointer, False), "version": 3}
                    interface["stream"] = stream  # the default stream for copies and fills of the array
                    array = self.cuda.from_cuda_array_interface(interface, sync=False)
                    arrays.append(_as_read_only(array) if k in readonly_inputs else array)
                launch(arrays, self.cuda.external_stream(stream), launch_address)

        return _CallbackEmitter(signature, run_slice, _LibCuda())


def _memref_descriptor(array: _KernelArray) -> list[_Value]:
    """Return an array as MLIR passes it: allocated and aligned pointer, offset, shape, strides in elements."""
    return [array.pointer, array.pointer, 0, *array.dims, *array.strides(unit=1)]


def _numba_cubin(overload: Any) -> bytes:
    cubin = overload._codelibrary.get_cubin()
    return getattr(cubin, "code", cubin)  # numba-cuda returns an object, Numba's own CUDA target returns bytes


_NUMBA_CUDA = _CudaPackage(
    module="numba.cuda",
    device_inline="never",  # its default
    ptx_and_entry=lambda overload: (overload._codelibrary.get_asm_str(), overload.entry_name),
    cubin=_numba_cubin,
    param_words=_numba_array_members,
)
_NUMBA_CUDA_MLIR = _CudaPackage(
    module="numba_cuda_mlir.cuda",
    device_inline="always",  # otherwise the user's kernel, which the adapter calls, has no shared memory
    ptx_and_entry=lambda overload: (overload.ptx, overload.metadata["func_name"]),
    cubin=lambda overload: overload.metadata["cubin"],  # for the device that was current at compile time
    param_words=_memref_descriptor,
)

# The packages have no option for read-only device arrays.  So an input of a callable gets a subclass of its class:
#
#     kernel[...](x)       does not compile if it stores to x, because `_numba_type_` is a read-only type
#     x[0] = 1             raises an error, like all Python methods that write
#     x[1:], x.view(...)   are read-only, too


def _as_read_only(device_array: Any) -> Any:
    """Make a device array read-only, and return it."""
    array_class: Any = type(device_array)
    device_array.__class__ = _read_only_class(array_class)
    return device_array


@functools.cache
def _read_only_class(device_array_class: Any) -> type:
    """Return a subclass of a package's device arrays that is read-only for kernels and for Python."""

    class _ReadOnlyDeviceArray(device_array_class):
        @property
        def _numba_type_(self) -> Any:
            return super()._numba_type_.copy(readonly=True)

        def _refuse_write(self, *args: Any, **kwargs: Any) -> None:
            raise TypeError("The destination is read-only.")  # NumPy's words, which `_CALLABLE_ERRORS` recognizes

        __setitem__ = setitem = copy_to_device = _refuse_write

        def view(self, dtype: Any) -> Any:
            return _as_read_only(super().view(dtype))  # slices have `type(self)`, but views have the base class

    return _ReadOnlyDeviceArray


def _cuda_package(value: Any) -> _PackageOrSimulator | None:
    """Return the package of a kernel, of a module `cuda` or of an instance of its classes; None for other values."""
    module = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
    if module.startswith("numba_cuda_mlir"):
        return _NUMBA_CUDA_MLIR
    # The module `numba` has the attribute `cuda`, so a function that references only `numba` may use `numba.cuda`.
    if module == "numba" or module.startswith(("numba.cuda", "numba_cuda")):
        return _CUDA_SIMULATOR if _uses_cudasim() else _NUMBA_CUDA
    return None


def _callable_package(func: Any) -> _PackageOrSimulator:
    """Return the package whose arrays and stream a callable gets.

    A package is captured if the callable captures one of its kernels, or its module `cuda`:

        kernel[1, 8, stream](x, out)               # captured: the package of `kernel`
        self.kernels["f"][1, 8, stream](x, out)    # nothing is captured

    The module `numba` counts as numba-cuda, or as the simulator if it is enabled.  Of several packages, `max` returns
    the first in `packages`.  There numba-cuda-mlir precedes numba-cuda, because its callables may capture `numba`, too,
    for `numba.float32`.
    """
    packages: list = [_CUDA_SIMULATOR, _NUMBA_CUDA_MLIR] if _uses_cudasim() else [_NUMBA_CUDA_MLIR, _NUMBA_CUDA]
    with _CUDASIM_LOCK:  # while a kernel runs in the simulator, it has other globals
        captured = {_cuda_package(x) for function in _kernel_and_helpers(func) for _, x in _captured_values(function)}
    installed = [x for x in packages if importlib.util.find_spec(x.module.partition(".")[0])]
    # A captured package beats one that is only imported, which beats the order of `packages`.
    return max(installed, key=lambda x: (x in captured, x.module in sys.modules))


# -- 9.4 Compiling -------------------------------------------------------------------------------------


def _cuda_ordinals() -> list[int]:
    """Return the CUDA ordinals of JAX's GPUs, or an empty list if JAX has none."""
    return sorted(device.local_hardware_id for device in _local_devices("cuda"))


class _CompiledKernel(NamedTuple):
    """A kernel that a package has compiled."""

    overload: Any  # the package's object
    ptx: str
    entry: str  # the name of the kernel in the PTX


@dataclasses.dataclass(frozen=True)
class _CudaCompiler:
    """The compilation of one kernel for one signature, by numba-cuda or numba-cuda-mlir."""

    package: _CudaPackage
    kernel: Any  # the user's
    argument_map: _ArgumentMap
    signature: _Signature
    in_order: bool  # whether the slices of a batch must run in order
    # The names of the inputs that the kernel must not write to, unless Numba's IR proves that it only reads them:
    inputs_to_check: list[str]

    def compile_kernel_and_handler(self) -> _CompiledHandler:
        """Compile the kernel, and a handler that launches it once per slice.

        When a batch is lowered, the `batch_upgrade` of the handler compiles the batch kernel.  It changes `data` and
        `keep_alive`, which the returned handler shares with the one that the upgrade refers to.
        """
        compiled = self.compile()
        handler = _build_handler(self.signature, _CudaEmitter(self.package, self.load(compiled)))
        return handler._replace(batch_upgrade=_CudaBatchUpgrade(self, compiled, handler))

    def compile(self) -> _CompiledKernel:
        """Compile the kernel, and check its stores to inputs and its launch."""
        kernel = self._kernel_to_compile()
        with self.package.on_device(_cuda_ordinals()[0]):
            overload = self._compile_protecting_inputs(kernel)
            compiled = _CompiledKernel(overload, *self.package.ptx_and_entry(overload))
        self._check_launch(compiled)
        return compiled

    def load(self, compiled: _CompiledKernel) -> _CudaLauncher:
        """Load a compiled kernel on each GPU."""
        libcuda = _LibCuda()
        functions = {}
        max_threads = _CUDA_MAX_THREADS
        for ordinal in _cuda_ordinals():
            with self.package.on_device(ordinal):
                cubin = self.package.cubin(compiled.overload)
                functions[ordinal] = function = libcuda.load(cubin, compiled.entry, ordinal)
                max_threads = min(max_threads, libcuda.function_attribute(function, _FUNC_MAX_THREADS_PER_BLOCK))
        return _CudaLauncher(self.signature.label, libcuda, functions, compiled.overload, max_threads)

    def _kernel_to_compile(self) -> Any:
        """Return the kernel or its adapter, as a dispatcher that takes all buffers and has no explicit signatures."""
        kernel = self.kernel
        if not self.argument_map.is_identity_for(kernel):
            device_function = _copy_dispatcher(kernel, device=True, inline=self.package.device_inline)
            adapter = self.argument_map.make_adapter(device_function, cuda=self.package.cuda)
            return type(kernel)(adapter, dict(kernel.targetoptions))
        return _copy_dispatcher(kernel) if _has_explicit_signatures(kernel) else kernel

    def _compile_protecting_inputs(self, kernel: Any) -> Any:
        """Compile a kernel of all buffers for the current device.  Raise an error if it may write to an input.

        A kernel compiles for read-only inputs, unless Numba finds a store to one, or the kernel passes one to a helper
        with an explicit signature.  The first row that fits counts:

            1. it compiles neither for read-only inputs nor for writable ones    error
            2. there are no `inputs_to_check`                                    accepted
            3. it compiles only for writable inputs                              error
            4. it has a statement for which Numba ignores read-only arrays       error
            5. otherwise: Numba has found no store                               accepted
        """
        import numba

        package = self.package
        signature = self.signature
        nbtypes = package.cuda.types
        if not hasattr(nbtypes, "Array"):  # the CUDA target that is a part of Numba uses Numba's types
            nbtypes = numba.types
        # Row 1 raises.  `readonly_error` is None if the kernel compiles for read-only inputs.
        overload, readonly_error = _compile_readonly_or_writable(package.module, kernel.compile, nbtypes, signature)
        if not self.inputs_to_check:  # row 2
            return overload
        if readonly_error:  # row 3
            raise self._writable_only_error(readonly_error) from readonly_error
        # Numba stores kernels in its cache without their types.
        annotation = getattr(overload, "type_annotation", None) or (
            _copy_dispatcher(kernel).compile(_array_types(nbtypes, signature)).type_annotation
        )
        if statement := _find_store_to_readonly(annotation):  # row 4
            names = self.inputs_to_check
            problem = f"Kernel {signature.label!r} may write to input {_any_of(names)}"
            raise _read_only_input_error(
                f"{problem}: Numba CUDA ignores that the array is read-only in {statement}.", names
            )
        return overload

    def _writable_only_error(self, readonly_error: Exception) -> TypeError:
        """Return the error for a kernel that compiles only for writable inputs, and may write to one of them."""
        names = self.inputs_to_check
        title = f"Kernel {self.signature.label!r}"
        text = _error_text(readonly_error)
        if _is_store_to_readonly(readonly_error):
            return _read_only_input_error(f"{title} writes to input {_any_of(names)}.", names, f"\n{text}")
        return _read_only_input_error(
            f"{title} may write to input {_any_of(names)}: it compiles only for writable arrays.",
            names,
            " If it only reads the input, decorate its helpers with @cuda.jit(device=True), without signatures.\n"
            f"Numba's error for read-only arrays:\n{text}",
        )

    def _check_launch(self, compiled: _CompiledKernel) -> None:
        """Raise a TypeError if one call of cuLaunchKernel, with the parameters of a handler, cannot launch a kernel.

        A handler passes integers of 64 bits.  A kernel with other parameters would read arbitrary memory.
        """
        # For two integers, PTX has `.visible .entry add(.param .u64 add_param_0, .param .u64 add_param_1)`.
        examples = [_KernelArray(pointer=0, dims=[1] * rank, itemsize=1) for rank in self.signature.ranks]
        n_words = sum(len(self.package.param_words(array)) for array in examples)
        param = r"\s*\.param\s+(?:\.align\s+\d+\s+)?\.u64\s+\w+\s*,?"
        entry_with_params = rf"\.entry\s+{re.escape(compiled.entry)}\s*\((?:{param}){{{n_words}}}\s*\)"
        if self.kernel.targetoptions.get("debug"):
            obstacle = "debug=True, so Numba must read an error code after each launch"
        elif "cudaCG" in compiled.ptx:  # functions of `cuda.cg`
            obstacle = "a cooperative launch, for which cuLaunchKernel is not enough"
        elif not re.search(entry_with_params, compiled.ptx):
            obstacle = f"parameters in a layout of {self.package.module} that this library does not know"
        else:
            return
        raise TypeError(
            f"numba_cuda_kernel {self.signature.label!r} has {obstacle}. Launch the kernel in a Python function, and "
            "wrap it with numba_cuda_callable."
        )


def _copy_dispatcher(kernel: Any, **more_options: Any) -> Any:
    """Return a dispatcher of the same function and options, without explicit signatures, compiled code or a cache."""
    return type(kernel)(kernel.py_func, dict(kernel.targetoptions, **more_options))


# Functions of Numba CUDA that store to their first argument, even if it is read-only, besides those of `cuda.atomic`.
_CUDA_STORES = frozenset({"stcg", "stcs", "stwb", "stwt"})


def _find_store_to_readonly(kernel_annotation: Any) -> str | None:
    """Return a statement in which Numba CUDA may store to a read-only array; None if there is none.

    `kernel_annotation` has the types that Numba inferred for a kernel.  They show these statements, also in helpers:
    atomics, stores with cache hints, stores through `.flat` and, in numba-cuda-mlir 0.6.0, writable results of `.view`.
    Numba itself rejects other assignments to elements of read-only arrays.
    """
    annotations = [kernel_annotation]
    for annotation in annotations:  # the list grows in this loop
        for statement, signature in annotation.calltypes.items():
            if type(statement).__name__ in ("SetItem", "StaticSetItem"):  # each package has its own classes
                if _is_readonly(getattr(signature.args[0], "array_type", None)):  # the array of `x.flat`
                    return _statement_text(statement)
            elif signature and getattr(statement, "op", None) == "call":  # `print` has no `op`
                callee_type = annotation.typemap[statement.func.name]
                if _may_store_to_readonly(callee_type, signature):
                    return _statement_text(statement)
                dispatcher = getattr(callee_type, "dispatcher", None)  # of a helper; other functions have none
                # Numba stores no helpers in its cache.  So this process has compiled the helper, and it has types.
                helper = dispatcher.overloads.get(signature.args) if dispatcher else None
                if helper and helper.type_annotation not in annotations:
                    annotations.append(helper.type_annotation)
    return None


def _may_store_to_readonly(callee_type: Any, signature: Any) -> bool:
    """Return whether a function with this Numba type and signature may write to a read-only array."""
    function = getattr(callee_type, "typing_key", None)  # a function; for a method, a text such as "Array.view"
    if function == "Array.view":
        return _is_readonly(callee_type.this) and not _is_readonly(signature.return_type)
    name = getattr(function, "__qualname__", "")
    is_store = name.startswith("atomic.") or name in _CUDA_STORES
    return is_store and _is_library_module(function.__module__) and _is_readonly(signature.args[0])


def _is_readonly(array_type: Any) -> bool:
    """Return whether a Numba array type is read-only.  None is not."""
    return not getattr(array_type, "mutable", True)


def _statement_text(statement: Any) -> str:
    """Return the source line of a statement in Numba's IR, or its place if there is no source."""
    location = statement.loc
    line = linecache.getline(location.filename, location.line).strip()
    return f"`{line:.80}` (line {location.line})" if line else f"line {location.line} of {location.filename}"


# -- 9.5 A launch per slice ----------------------------------------------------------------------------
# Nothing here depends on the package that has compiled a kernel, except for the layout of parameters (`param_words`).
#
# As in section 6, functions with a parameter `ir` (the builder) run once, to generate code of a handler.  Their
# docstrings describe the generated code: "Load x" means that the handler loads x in each call.


class _CudaLauncher:
    """A kernel that is loaded on each GPU, and a generator of code that launches it.  The handler keeps it alive."""

    def __init__(
        self, label: str, libcuda: _LibCuda, functions: Mapping, keep_alive: Any, max_threads: int = _CUDA_MAX_THREADS
    ) -> None:
        """Create a launcher.  `functions` has a CUfunction for each CUDA ordinal."""
        self.libcuda = libcuda
        self.keep_alive = keep_alive  # the compiled kernel, which refers to its global arrays; for Warp, the modules
        self.max_threads = max_threads  # the most threads that a block of the kernel can have on every GPU
        self.functions = (_I64 * (max(functions) + 1))()  # by CUDA ordinal, for handlers
        for ordinal, function in functions.items():
            self.functions[ordinal] = function
        self.label = label
        self.report = ctypes.CFUNCTYPE(_PTR, _I32, _PTR, _I64, _PTR)(self._store_launch_error)

    def _store_launch_error(self, code: int, function: int, grid_z: int, launch_address: int) -> int:
        """Return the address of the message for a launch that failed.  Handlers call this method, as `report`."""
        config = _read_launch_config(launch_address)._replace(grid_z=grid_z)
        shown = f"grid={config.grid}, block={config.block}, shared_mem={config.shared_mem}"
        exceeded = self.libcuda.exceeded_limits_text(function, config)
        text = f"{self.libcuda.describe(code)}, from a launch with {shown}{exceeded}"
        return _store_error_message(RuntimeError(text), self.label)

    def write_launch_setup(self, ir: _HandlerBuilder, frame: _StructPointer) -> Callable:
        """Load what all launches of a call share.  Return a Python function that generates the code of one launch.

        The Python function takes the addresses of the kernel's parameters, and optionally another size z of the grid.
        """
        stream, ordinal = ir.load_stream_and_device(frame)
        function = ir.load(ordinal * 8 + ctypes.addressof(self.functions))
        config = _load_launch_config(ir, frame)

        def write_launch(param_addresses: list, grid_z: Any = config.grid_z) -> None:
            extra = 0  # the last parameter of cuLaunchKernel
            args = function, *config._replace(grid_z=grid_z), stream, ir.array(param_addresses), extra
            code = ir.call(self.libcuda.address("cuLaunchKernel"), *args)  # C takes the low 32 bits of sizes
            with ir.if_(code & 0xFFFF_FFFF):  # the result is a C int
                launch_address = ir.launch_attribute_address(frame)
                ir.fail_inner_loop(frame, ir.call(self.report, code, function, grid_z, launch_address))

        return write_launch


class _CudaEmitter(_Emitter):
    """An emitter of code that launches a kernel once per slice."""

    traits = _COMMAND_BUFFER_COMPATIBLE  # the handler only launches and sets zeros, so a CUDA graph can replay all

    def __init__(self, package: _CudaPackage, launcher: _CudaLauncher) -> None:
        self.package = package
        self.launcher = launcher
        self.libcuda = launcher.libcuda  # for `_HandlerBuilder`, which also sets new outputs to zeros with it

    def write(self, ir: _HandlerBuilder, frame: _StructPointer, buffers: _StructPointer, count: _Int64) -> None:
        write_launch = self.launcher.write_launch_setup(ir, frame)
        with ir.each_slice(buffers, count) as arrays:
            write_launch(self._store_params(ir, arrays))

    def _store_params(self, ir: _HandlerBuilder, arrays: Sequence[_KernelArray]) -> list:
        """Store the kernel's parameters on the stack, and return their addresses."""
        words = [word for array in arrays for word in self.package.param_words(array)]
        first = ir.array(words)
        return [first + 8 * i for i in range(len(words))]


# -- 9.6 A batch in one launch -------------------------------------------------------------------------
# On a GPU, a batch is one launch per 65,535 slices, which are the blocks along z.  In order of time:
#
#     first trace of a call        compiles the kernel for one slice, and registers a handler, whose inner loop has a
#                                  launch per slice (9.5)
#     first lowering of a batch    compiles the batch kernel, and a new inner loop, which launches the batch kernel;
#     (with `name`: first trace)   replaces the old inner loop in the registered handler
#     later calls                  run the new inner loop, even for one slice; if the launch uses z, or has too many
#                                  threads in a block for the batch kernel, the new inner loop calls the old one
#
# The replacement assigns `_HandlerData.inner_loop`, so existing and exported programs use the new code, too.  A CUDA
# graph that XLA captured before still has one launch per slice.  It stays valid, because machine code lives forever.
#
# The batch kernel takes arrays whose first dimension is the batch.  For example, with 8 slices of shape (3, 4):
#
#     signature of the handler    rank 2: batch dimensions are not a part of it
#     `each_batch_launch`         yields an array of shape (8, 3, 4), or (1, 3, 4) if all slices share it
#     batch kernel                compiled for rank 3; an adapter (`_BatchArgumentMap`) selects the slice by blockIdx.z
#     user's kernel               gets an array of shape (3, 4)


class _BatchLaunchUnsupported(Exception):
    """Raised if a batch on a GPU needs one launch per slice.  The message is the reason."""


def _fallback_reason(error: Exception) -> str:
    """Return the reason for a launch per slice: the text of an exception, which may have any type."""
    return str(error) if isinstance(error, _BatchLaunchUnsupported) else f"{type(error).__name__}: {error}"


def _log_per_slice_fallback(title: str, reason: str) -> None:
    """Log the reason, as one line of at most 1,000 characters."""
    _LOG.debug("%s falls back to one launch per slice: %.1000s", title, " ".join(reason.split()))


# A batch launch changes blockIdx.z, gridDim.z and the number of the launch.  If the PTX of a kernel matches one of two
# patterns, the kernel may depend on them, so a batch has a launch per slice.
#
#                            matches, for example                        does not match
#     `_PTX_USES_Z`          mov.u32 %r1, %ctaid.z;                      mov.u32 %r1, %ctaid.x;
#     `_PTX_CALLS_EXTERNAL`  .extern .func (.param .b32 r) f (...);      .extern .func (.param .b32 r) vprintf (...);
_PTX_USES_Z = re.compile(
    r"%n?ctaid(?!\.[xy])[.\w]*"  # blockIdx or gridDim: z, or the vector, `mov.v4.u32 {%r1, %r2, %r3, %r4}, %nctaid;`
    r"|%gridid"  # the number of the launch
    r"|%\w*cluster\w*|\.\w+cluster\b"  # clusters of blocks, which may lie along z: %cluster_ctaid, .explicitcluster
)
_FUNCTIONS_WITHOUT_Z = r"(?:vprintf|__assertfail|malloc|free)\b|numba_|NRT_"  # of CUDA and of Numba's runtime
_PTX_CALLS_EXTERNAL = re.compile(rf"\.extern\s+\.func\s*(?:\([^)]*\)\s*)?(?!{_FUNCTIONS_WITHOUT_Z})\w+")


def _maybe_written_device_arrays(kernel: Any) -> list[str]:
    """Return the names of the global device arrays that a kernel or one of its helpers may write to.

    If slices write to one array, they must run in order.
    """
    return [
        name
        for function in _kernel_and_helpers(kernel)
        for name, value in _captured_values(function)
        if hasattr(value, "__cuda_array_interface__") and not isinstance(value, types.ModuleType)
        if name not in _names_only_read_in_numba_ir(function)
    ]


class _BatchArgumentMap(_ArgumentMap):
    """The argument map of a batch kernel.  Its adapter passes slice `blockIdx.z` of each buffer to the user's kernel:

        scalar, or array of rank 1 or more    b0[z]
        0-d array                             b0[z : z + 1].reshape(()), because b0[z] is a scalar

    `slice_ranks` is never None, so `is_identity_for` is False: a batch kernel always needs the adapter.
    """

    def _expression(self, buffer: int) -> str:
        z = f"min(cuda.blockIdx.z, b{buffer}.shape[0] - 1)"  # 0 if all slices share the array
        if buffer in self.scalars or self.slice_ranks[buffer]:
            return f"b{buffer}[{z}]"
        return f"b{buffer}[{z} : {z} + 1].reshape(())"


class _CudaBatchEmitter(_CudaEmitter):
    """An emitter of code that launches the batch kernel once for many slices.

    One handler serves calls with different launch attributes, so the code checks the launch of each call.
    """

    def __init__(self, package: _CudaPackage, launcher: _CudaLauncher, old_inner_loop: int) -> None:
        """Create an emitter.  `old_inner_loop` is the address of the inner loop that `_CudaEmitter` has written."""
        super().__init__(package, launcher)
        self.old_inner_loop = old_inner_loop

    def write(self, ir: _HandlerBuilder, frame: _StructPointer, buffers: _StructPointer, count: _Int64) -> None:
        config = _load_launch_config(ir, frame)
        with ir.if_((config.grid_z > 1) | (config.threads_per_block > self.launcher.max_threads)):
            ir.ret(ir.call(self.old_inner_loop, frame, buffers, count))
        write_launch = self.launcher.write_launch_setup(ir, frame)
        with ir.each_batch_launch(buffers, count, _CUDA_MAX_GRID_YZ) as (arrays, n_slices):
            write_launch(self._store_params(ir, arrays), grid_z=n_slices)


# {overload of a kernel for one slice: the fingerprint of the kernel when a wrapper first used the overload}
#
# The batch kernel is compiled later than the kernel for one slice.  Each compilation reads the captured values.  If the
# fingerprint has changed in between, the batch kernel is not used:
#
#     scale = 2.0; call(x)               # compiles the kernel for one slice, with 2.0
#     scale = 3.0; jax.vmap(call)(x)     # a batch kernel would have 3.0, so each slice has a launch, with 2.0
#
# Several wrappers of a kernel may use one overload.  The first one stores the fingerprint.
#
# Known limit: the user launches the kernel, reassigns a global, and then calls a wrapper.  If the kernel compiles only
# for writable inputs, the wrapper uses the overload of the launch, and does not notice that its value is older.
_FINGERPRINT_OF_OVERLOAD: Any = weakref.WeakKeyDictionary()


class _CudaBatchUpgrade:
    """The upgrade of a registered handler to batch launches, at most once."""

    def __init__(self, compiler: _CudaCompiler, compiled: _CompiledKernel, handler: _CompiledHandler) -> None:
        """Create an upgrade.  The compiler and the compiled kernel are those for one slice."""
        self.compiler = compiler
        self.ptx = compiled.ptx
        self.fingerprint = _FINGERPRINT_OF_OVERLOAD.setdefault(compiled.overload, _fingerprint(compiler.kernel))
        self.handler = handler
        self.lock = threading.Lock()
        # The batch kernel is compiled only once, under the lock.  This sets one of two attributes:
        self.batch_launcher: _CudaLauncher | None = None
        self.failure = ""  # why there is no batch kernel

    def apply(self, config: _LaunchConfig) -> str:
        """Compile the batch kernel, and replace the inner loop, unless this was tried before or the launch uses z.

        Return why a batch with this launch still has a launch per slice, or an empty text if one launch runs many
        slices.
        """
        if config.grid_z > 1:
            return f"the slices would be the blocks along z, and the launch uses z: grid={config.grid}"
        with self.lock:
            if not (self.batch_launcher or self.failure):
                try:
                    batch_launcher = self._compile_batch_kernel()
                    self._replace_inner_loop(batch_launcher)
                    self.batch_launcher = batch_launcher
                except Exception as error:
                    self.failure = _fallback_reason(error)
        launcher = self.batch_launcher
        if launcher and config.threads_per_block > launcher.max_threads:
            return f"a block of the batch kernel can have {launcher.max_threads} threads, and block={config.block}"
        return self.failure

    def _compile_batch_kernel(self) -> _CudaLauncher:
        """Compile and load the batch kernel.  Raise an error if the slices cannot be the blocks along z."""
        compiler = self.compiler
        slice_ranks = compiler.signature.ranks
        if compiler.in_order:
            raise _BatchLaunchUnsupported('vmap_method="sequential" runs slices in order')
        if found := _PTX_CALLS_EXTERNAL.search(self.ptx):
            raise _BatchLaunchUnsupported(f"the kernel calls external functions, which may use z: {found[0]}")
        if found := _PTX_USES_Z.search(self.ptx):
            raise _BatchLaunchUnsupported(f"the slices would be the blocks along z, and the kernel uses {found[0]}")
        if names := _maybe_written_device_arrays(compiler.kernel):
            raise _BatchLaunchUnsupported(f"the kernel may write to global device arrays: {', '.join(names)}")
        batch_compiler = dataclasses.replace(
            compiler,
            argument_map=_BatchArgumentMap(**(compiler.argument_map._asdict() | {"slice_ranks": slice_ranks})),
            signature=compiler.signature._replace(ranks=tuple(rank + 1 for rank in slice_ranks)),
            inputs_to_check=[],  # the kernel for one slice has passed the check
        )
        launcher = batch_compiler.load(batch_compiler.compile())
        if _fingerprint(compiler.kernel) != self.fingerprint:
            raise _BatchLaunchUnsupported("captured values have changed since the kernel was compiled")
        return launcher

    def _replace_inner_loop(self, launcher: _CudaLauncher) -> None:
        """Replace the inner loop of the registered handler by a loop that launches the batch kernel."""
        handler_data = self.handler.data
        emitter = _CudaBatchEmitter(self.compiler.package, launcher, handler_data.inner_loop)
        # Of this second handler, only the inner loop is used.  It has the signature of a slice, like the first one.
        batch_handler = _build_handler(self.compiler.signature, emitter)
        self.handler.keep_alive.append(batch_handler)
        # Concurrent calls load this aligned word.  Both the old and the new value are valid.
        handler_data.inner_loop = batch_handler.data.inner_loop


# -- 9.7 Numba's simulator -----------------------------------------------------------------------------


class _CudaSimulator:
    """Numba's simulator, which runs one kernel at a time, in Python.  NumPy rejects stores to read-only inputs."""

    module = "numba.cuda"
    platform = "cpu"

    def kernel_handler(self, kernel: Any, argument_map: _ArgumentMap, signature: _Signature) -> _CompiledHandler:
        """Return a handler that runs a kernel for each slice."""
        from numba import cuda

        adapter = argument_map.make_adapter(kernel.py_func)

        def call_adapter(*buffers: Any) -> None:
            adapter(*buffers)

        # To run a function f, the simulator replaces the module `cuda` in the globals of f:
        #
        #     f.__globals__["cuda"] = <an object with the threadIdx, ... of a simulated thread>
        #     f(*arrays)
        #
        # The user's code reads `cuda` in the kernel's globals.  The adapter has other globals (`make_adapter`).  So the
        # simulator gets a copy of `call_adapter` with the kernel's globals.
        f = types.FunctionType(call_adapter.__code__, kernel.py_func.__globals__, closure=call_adapter.__closure__)
        simulated = cuda.jit(f)

        def launch(arrays: list, stream: Any, launch_address: int) -> None:
            config = _read_launch_config(launch_address)
            simulated[config.grid, config.block, stream, config.shared_mem](*arrays)

        return _build_handler(signature, self.callback_emitter(signature, launch, signature.unaliased_inputs))

    def callback_emitter(self, signature: _Signature, launch: Callable, readonly_inputs: Container) -> _CallbackEmitter:
        """Return an emitter that calls `launch` for each slice.  See `_CudaPackage.callback_emitter`."""
        from numba import cuda
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        def run_slice(buffers: list, launch_address: int, *_: int) -> None:
            # Kernels run on copies: after Ctrl-C, threads may still write after XLA has freed the buffers.
            views = []
            for (pointer, shape), dtype in zip(buffers, signature.dtypes, strict=True):
                memory = (ctypes.c_char * (dtype.itemsize * math.prod(shape))).from_address(pointer)
                views.append(np.ndarray(shape, dtype, memory))
            copies = [view.copy() for view in views]
            for i, j in signature.aliases:
                copies[i] = copies[signature.n_in + j]  # an aliased input shares memory with its output
            for k, array in enumerate(copies):
                array.flags.writeable = k not in readonly_inputs
            with _CUDASIM_LOCK:
                launch(list(map(FakeCUDAArray, copies)), cuda.stream(), launch_address)
            for k in range(signature.n_in, len(views)):
                views[k][...] = copies[k]

        return _CallbackEmitter(signature, run_slice)


_CUDA_SIMULATOR = _CudaSimulator()


# ======================================================================================================
# 10. Warp: a wrapper with a derivative, and an emitter that calls Warp's code on CPUs and GPUs.
#
# A call of a `warp_kernel`, from the user to XLA:
#
#     `_WarpKernel.__call__`                    separates the arrays from the values that are passed by value
#     `_WarpKernel._find_target`                checks the arrays, and the kernel's stores to them (section 8)
#     `_WarpCallTarget.prepare_lowering`        registers a handler: for JAX's default platform when the call is traced,
#                                               and for another one when the call is lowered
#       `_WarpLaunch.record`                      Warp compiles the kernel, and records a launch of it
#       `_WarpEmitter`                            writes a handler that repeats this launch with the buffers of a call
#
# The recorded launch has placeholders: unusual numbers in place of the pointers to buffers, which the handler replaces.
# If JAX differentiates the call, `_WarpKernel._backward` takes the last three steps for Warp's adjoint of the kernel.
#
# A new version of Warp is supported if all tests named test_warp pass.  So far, these are 1.14, 1.16, 1.18 and 1.19.
# This section depends on these internals of Warp:
#
#     attributes of kernels, modules and types              `_parse_parameter`, `_current_kernel_key`
#     how a launch is recorded, packed and run              `_WarpLaunch.record`, `_packed_parameters`
#     options that the hash of a kernel does not cover      `_current_kernel_key`
#     the grid of a launch                                  `_WarpLaunch.cuda_launch_config`
#     which launches need more than one kernel launch       `_WarpLaunch._check_recorded`
#     tiles on CPUs have one memory for all threads         `_WarpCpuEmitter`
#     kernels with a loop over the grid do not use its z    10.5, test_warp_batch_is_one_launch_or_logs_why_not
#
# Most changes of the first two raise errors.  Changes of the others may show only in the tests.

_WARP_INSTALL = "pip install warp-lang numba"
_WARP_DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64".split()
_WARP_LOCK: threading.RLock = _PROCESS_STATE.setdefault("warp_lock", threading.RLock())
_WARP_MAX_DIMS = 4
_WARP_MAX_EXTENT = 2**31 - 1  # Warp stores extents, strides in bytes and thread indices in 32-bit integers
_WARP_MAX_THREADS_X = 2**24  # along x of a grid, for kernels without a loop over the grid


# -- 10.1 The public functions -------------------------------------------------------------------------


@_with_option_advice
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
    """Return a JAX function that launches an NVIDIA Warp kernel, on CPUs and GPUs.

    The kernel stores to its outputs, and returns nothing:

        kernel(*inputs, *outputs, *scratch)

    **Arrays.** Parameters of the type `wp.array` get JAX arrays.  The elements of vectors and matrices are trailing
    dimensions: an array of `wp.vec3` is a JAX array of shape (n, 3).  An input of one vector may have shape (3,)
    instead of (1, 3), and an input of one number may have shape ().  Outputs and in-out arguments must have all
    dimensions.  An argument of None is a null array.

    **Inputs are read-only.**  If a kernel stores to an input, its call raises an error when JAX traces it.  If the
    array of a store is not known (`z[i] = 1.0`, where `z` is `x` or `out`), the kernel gets a copy of the input.

    **Values.** Parameters of all other types (scalars, vectors, matrices, structs) are passed by value.  Values must be
    known when JAX traces the call, and each new value recompiles the traced function.  If a number changes often, such
    as a time step, make the parameter a `wp.array` of one element.

    **New outputs and scratch buffers start from zeros.**  That is right for sums (`wp.atomic_add(out, ...)`), and wrong
    for products, minima and maxima.  For these, pass the start value as an in-out argument (`in_out_argnames`).

    **Launch dimensions.** If `launch_dims` is omitted, it is the shape of the first array, without the dimensions of
    vectors and matrices.  Arrays of one number, vector or matrix are skipped:

        x: wp.array2d(dtype=wp.vec3)    # a JAX array of shape (4, 5, 3)
        i, j = wp.tid()                 # launch_dims=(4, 5)

    It must be given if `wp.tid()` returns another number of indices, or if another array begins with other dimensions,
    such as (5, 4).  Arrays that begin with (4, 5) or (1, 1), or have fewer dimensions, are accepted.

    A kernel with more threads than elements writes beyond arrays and corrupts memory, unless it checks its indices.  To
    find such a kernel, set `wp.config.mode = "debug"` before its first call.

    **Batches.** On CPUs, the batch elements of a `vmap` are divided among threads.  On GPUs, one launch runs up to
    65,535 batch elements, in no order, so a block must not wait for a block of another batch element.  Each batch
    element has its own launch, in order, in these cases (this module's logger shows the reason at level DEBUG):

    - `vmap_method="sequential"`;
    - the kernel has C++ code, adjoints or code transformers of your own, or calls a function that is an argument;
    - Warp cannot compile the batch kernel, or this kernel exceeds a limit of the GPU, such as its registers;
    - captured values have changed since the kernel was compiled.

    **Redefinition.** Calls may use the helpers and constants of an earlier trace.  If you redefine one, create the
    wrapper again.  If a loop or factory creates kernels, use `@wp.kernel(module="unique")`, so that Warp builds each
    one alone.  In one module, Warp does not distinguish kernels that differ only in an int beyond 32 bits or in the
    last digits of a float, so one may run the code of the other.  Give such constants a type, such as
    `wp.float64(0.1)`.

    Args:
      kernel: A function decorated with `wp.kernel`.  A generic kernel needs `wp.overload`.  If it is omitted,
        `warp_kernel(outs=...)` is a decorator to put above `@wp.kernel`.
      outs: A `jax.ShapeDtypeStruct`, a pytree of them, or a function of the inputs that returns one, as for
        `numba_kernel`.  The function gets the specs of arrays, and the values as they are.
      launch_dims: The number of threads for each index of `wp.tid()`: an int, a tuple of up to 4 ints, or a function of
        the inputs that returns one of these.  The function gets the same arguments as `outs`.  If a number is 0,
        nothing is launched, and new outputs are zeros, even if `zero_outputs=False`.  Default: see "Launch dimensions".
      block_dim: The number of threads in a block on GPUs, an int up to 1,024.  On CPUs, it has no effect.  Default 256.
      tiled: Whether blocks work on tiles, as with `wp.launch_tiled`, a bool.  If True, `launch_dims` counts blocks, in
        up to 3 dimensions.  Default False.
      vmap_method, input_output_aliases, in_out_argnames, has_side_effect, scratch, zero_outputs, name: See
        `numba_kernel`.
      differentiable: Whether arrays of floats have reverse-mode derivatives, computed by Warp's adjoint of the kernel,
        a bool.  There are only first derivatives.  They are wrong for some kernels, such as products in a loop that
        Warp does not unroll.  Most of these raise a warning, not all.  Default False.

    Returns:
      A function of the inputs, `f(*inputs)`, by position or by name.  Its results have the structure of `outs`.

    Raises:
      TypeError: If the kernel is generic, a parameter has an unsupported type, the number of arguments is wrong, an
        array has a wrong shape or dtype, the kernel writes to an input, or a value is traced.
      ValueError: If `launch_dims` is missing or out of range.  If, for tiles on GPUs, the total number of threads is
        not a multiple of `block_dim`.  If a value is out of range, an extent or stride needs more than 32 bits, an
        option does not support `differentiable`, or the kernel has no adjoint.
      NotImplementedError: If Warp needs more than one plain kernel launch: deterministic mode and clusters on GPUs,
        `enable_cpu_blocks` with tiles on CPUs.  Use `wp.jax_kernel`.  Also if an array has a symbolic dimension, and if
        a program for CUDA is lowered without a GPU.
      ImportError: If Warp or Numba is missing.
      Exception: If Warp rejects a value, or cannot build the kernel.  Most are RuntimeErrors.

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
    return _wrapper_or_decorator(_WarpKernel, options.pop("kernel"), _WarpOptions(**options))


def jaxtype_to_warptype(dtype: Any) -> Any:
    """Return the Warp scalar type of a dtype, to annotate the parameter of a kernel.

    Args:
      dtype: A dtype, or anything that `numpy.dtype` accepts.

    Returns:
      A type such as `wp.float32`.

    Raises:
      ValueError: If Warp has no such type.

    Example:
      >>> jaxtype_to_warptype("float32").__name__
      'float32'
    """
    wp = _import("warp", "jaxtype_to_warptype", _WARP_INSTALL)
    try:
        return wp.dtype_from_jax(np.dtype(dtype))
    except TypeError:
        known = ", ".join(_WARP_DTYPES)
        raise ValueError(
            f"Warp has no scalar type for dtype {dtype!r}. Cast the array to one of: {known}. Pass complex numbers as "
            "two arrays, x.real and x.imag."
        ) from None


def jaxinfo_to_warpinfo(info: Any) -> Any:
    """Return the Warp array type of a spec or an array, to annotate the parameter of a kernel.

    Args:
      info: Anything with `.shape` and `.dtype`.

    Returns:
      A `wp.array` type of scalars, with the same number of dimensions.

    Raises:
      ValueError: If `info` does not have 1 to 4 dimensions, or if Warp lacks the dtype.

    Example:
      >>> jaxinfo_to_warpinfo(np.ones((3, 4), np.float32)).ndim
      2
    """
    ndim = len(info.shape)
    if not 1 <= ndim <= _WARP_MAX_DIMS:
        raise ValueError(
            f"Warp arrays have 1 to {_WARP_MAX_DIMS} dimensions. Got {_format_spec(info)}, with {ndim}. "
            "Reshape it, such as x.reshape(-1)."
        )
    wp = _import("warp", "jaxinfo_to_warpinfo", _WARP_INSTALL)
    return wp.array(dtype=jaxtype_to_warptype(info.dtype), ndim=ndim)


# -- 10.2 The wrapper ----------------------------------------------------------------------------------


class _ArrayField(NamedTuple):
    """A field of a `wp.array` with a pointer to a buffer: ("x", "data") for `x`, ("x", "grad") for its gradient."""

    parameter: str  # the name of the kernel's parameter
    field: str  # "data" or, in a launch of the adjoint, "grad"


def _last_buffer_of_each(names: Iterable) -> dict[Any, int]:
    """Return {parameter or `_ArrayField`: index of the buffer that Warp gets}.  `names` has one for each buffer.

    Of several buffers of one name, Warp gets the last: the output of an in-out argument, or the copy of an input.
    """
    return {name: buffer for buffer, name in enumerate(names)}


@dataclasses.dataclass(kw_only=True)
class _WarpOptions(_Options):
    """The options of `warp_kernel`."""

    launch_dims: Any
    block_dim: int
    tiled: bool
    differentiable: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block_dim = _int_in_range("block_dim", self.block_dim, 1, _CUDA_MAX_THREADS, "Pass block_dim=256.")
        if self.tiled and self.launch_dims is None:
            raise ValueError(
                "tiled=True needs the number of blocks. launch_dims is missing. Pass launch_dims=n_blocks, or "
                "a function of the inputs, such as launch_dims=lambda x: x.shape[0] // 64."
            )
        scratch = jax.tree.leaves(self.scratch)  # a list, because a spec is false if its first dimension is 0
        if self.differentiable and (self.in_out_argnames or self.input_output_aliases or scratch):
            raise ValueError(
                "A kernel with differentiable=True must not overwrite an input or use scratch, because its adjoint "
                f"reads its arrays again. Got in_out_argnames={self.in_out_argnames}, input_output_aliases="
                f"{self.input_output_aliases}, scratch={scratch}. Remove them. Write to a new output, with its spec "
                "in outs."
            )


class _WarpKernel(_Wrapper):
    """A Warp kernel as a JAX function, with fixed values for some of its parameters.

    The user's wrapper has no fixed values.  Its calls separate the arrays from the values, and pass the arrays to the
    `_WarpKernel` for these values.  Without values, this is the user's wrapper itself.  Otherwise:

        f(x, 2.0)  ->  _WarpKernel(kernel, options, fixed={"factor": 2.0})._call_by_position([x])

    For `kernel(x, factor, out)`:

        attribute         the user's wrapper          the wrapper for factor=2.0
        fixed             {}                          {"factor": 2.0}
        parameters        ("x", "factor", "out")      ("x", "out")
        all_parameters    ("x", "factor", "out")      ("x", "factor", "out")
        warp_params       {"x": `_WarpParam`, ...}    the same, of all parameters
    """

    decorator = "warp_kernel"

    def __init__(self, kernel: Any, options: Any, fixed: Mapping[str, Any] | None = None) -> None:
        wp = _import("warp", "warp_kernel", _WARP_INSTALL)
        if not isinstance(kernel, wp.Kernel):
            raise _unsupported_kernel_error("warp_kernel", "a function decorated with warp.kernel", kernel)
        if kernel.is_generic:
            raise TypeError(
                f"warp_kernel takes no generic kernel. {kernel.func.__name__!r} is generic. Pass an overload, such as "
                "wp.overload(kernel, [wp.array(dtype=float), wp.array(dtype=float)])."
            )
        self.warp_params = {arg.label: _parse_parameter(wp, kernel, arg) for arg in kernel.adj.args}
        self.value_names = {name for name, param in self.warp_params.items() if param.is_value}
        # {parameter: value}.  None is a null array.  The values are copied, because the caller may change a struct, and
        # later traces, for other shapes, need the same values.
        self.fixed = copy.deepcopy(fixed or {})
        super().__init__(kernel, options, tuple(name for name in self.warp_params if name not in self.fixed))
        self.all_parameters = tuple(self.warp_params)
        self.wrapper_by_values = _BoundedCache({(): self})  # {key of the fixed values: wrapper}

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        """Separate the arrays from the values, and call the wrapper for these values."""
        # The fast path: only arrays, all by position.  `None in args` would compare the elements of arrays.
        if not named and not self.value_names and types.NoneType not in map(type, args):
            return self._call_by_position(args)
        arguments = self._arguments_by_name(args, named)
        fixed = {}
        for name, x in arguments.items():
            if name in self.value_names or x is None:
                fixed[name] = self.warp_params[name].check_value(x)
        key = _values_key(fixed)
        cache = self.wrapper_by_values
        wrapper = cache.get(key) or cache.keep(key, _WarpKernel(self.kernel, self.options, fixed))
        return wrapper._call_by_position([x for name, x in arguments.items() if name not in fixed])

    def _reduce_if_not_importable(self) -> tuple:
        """Pickle only by reference, as ops do.  By value, the process that loads it would get a second Warp module."""
        return _PickledByReference._reduce_if_not_importable(self)

    # -- options that refer to arguments ---------------------------------------------------------------

    def _input_index(self, key: Any, n_in: int) -> int:
        """Return the index of an aliased input among the arrays.

        A key that is an integer is a position among all parameters, including those of values.
        """
        if not isinstance(key, str):
            is_position = hasattr(key, "__index__") and 0 <= key < len(self.all_parameters)
            key = self.all_parameters[key] if is_position else f"argument {key}"  # the latter is rejected as a name
        return super()._input_index(key, n_in)

    def _option_value(self, name: str, ins: Sequence[_Spec]) -> Any:
        """Return the value of an option.  If it is a function, it gets all arguments of the call, including values."""
        arguments: list[Any] = list(ins)
        for position, parameter in enumerate(self.warp_params):
            if parameter in self.fixed:
                arguments.insert(position, self.fixed[parameter])
        return super()._option_value(name, arguments)

    # -- from a call to a target -----------------------------------------------------------------------

    def _inputs_to_copy(self, n_in: int) -> list[int]:
        """Return the inputs to which the kernel has only ambiguous stores (section 8)."""
        stores = _warp_analysis(self.kernel).stores
        ambiguous = {name for name, store in stores.items() if store.is_ambiguous}
        return [i for i, name in enumerate(self.parameters[:n_in]) if name in ambiguous]

    def _find_target(self, call: _CallParams) -> _CallTarget:
        """Check the arrays of a call, and return its target.

        For example, the buffers of a call of `kernel(x, io, out, tmp)` are, if the kernel gets a copy of `x`:

            index    0        1         2         3         4          5
            name     x        io        io        out       tmp        x
            role     input    in-out    in-out    output    scratch    input (the copy)
        """
        n_in = len(call.ins)
        # A copy is a result after the outputs that is aliased to its input.  The user's scratch buffers have no alias.
        copied = [self.parameters[i] for i, j in call.aliases if j >= len(call.outs)]
        names = [*self.parameters[:n_in], *self.in_outs, *self.parameters[n_in:], *copied]
        if len(names) != len(call.buffers):
            self._check_no_separate_outputs(call)
            n_outs = len(call.buffers) - n_in - len(copied)
            raise self._wrong_arity(
                f"got {_counted(n_in + len(self.fixed), 'input')} and {_counted(n_outs, 'output')}, including scratch. "
                "Pass each input to the call, and declare each output in outs, and scratch in scratch. If a parameter "
                "is both input and output, list it in in_out_argnames."
            )
        for buffer, (name, spec) in enumerate(zip(names, call.buffers)):
            if name in self.in_outs:
                role = "in-out"
            elif buffer < n_in or name in copied:
                role = "input"
            else:
                role = "output" if buffer < n_in + len(call.outs) else "scratch"
            self.warp_params[name].check_array(spec, role)
        analysis = _warp_analysis(self.kernel)
        _check_stores(self, call, analysis, _last_buffer_of_each(names))
        _warn_of_deferred_static(self.kernel, self.title)
        return self._make_target(call, [_ArrayField(name, "data") for name in names], call.ins, analysis)

    def _make_target(
        self, call: _CallParams, fields: Sequence[_ArrayField], user_ins: Sequence[_Spec], analysis: _KernelAnalysis
    ) -> _WarpCallTarget:
        """Return the target that launches the kernel, or its adjoint, on the buffers of a call.

        Args:
          fields: for each buffer of the call, the field that points to it.
          user_ins: the specs of the user's inputs, for options that are functions.
        """
        buffer_of_field = _last_buffer_of_each(fields)
        array_dims = {
            name: self.warp_params[name].array_dims(call.buffers[buffer].shape)
            for (name, _), buffer in buffer_of_field.items()
        }
        launch_dims = self._launch_dims(user_ins, array_dims, analysis)
        label = self.__name__
        launch = _WarpLaunch(
            title=self.title,
            label=label,
            kernel=self.kernel,
            fixed=self.fixed,
            array_dims=array_dims,
            key=(_current_kernel_key(self.kernel), _values_key(self.fixed), *array_dims.items()),
            field_buffers=tuple(buffer_of_field.items()),
            launch_dims=launch_dims,
            block_dim=self.options.block_dim,
            is_tiled=self.options.tiled,
            uses_tiles=_uses_tiles(analysis),
            in_order=self.options.in_order,
        )
        target = _WarpCallTarget(
            name=label,  # only for messages: the name of the target is not known yet
            is_noop=0 in launch_dims,
            title=self.title,
            launch=launch,
            signature=call.signature(label),
            requested_name=self.options.name,
        )
        # Build the kernel while JAX traces the call, so that errors of the build show the user's call.
        platform = _default_platform()
        if platform == "gpu" and _cuda_ordinals():
            platform = "cuda"
        if platform in ("cpu", "cuda") and not target.is_noop:
            target.prepare_lowering(platform)  # registers a handler, which the lowering then finds in the registry
            if self.options.name and platform == "cuda":
                # A program that another process exported may call this name for a batch.  It is not lowered here.
                target.prepare_lowering(platform, has_batch=True)
        return target

    # -- launch dimensions -----------------------------------------------------------------------------

    def _launch_dims(
        self, user_ins: Sequence[_Spec], array_dims: Mapping[str, tuple[int, ...]], analysis: _KernelAnalysis
    ) -> tuple[int, ...]:
        """Return the dimensions of a launch in threads, or in blocks if it is tiled."""
        n_indices = _n_tid_indices(analysis)
        launch_dims = self._option_value("launch_dims", user_ins)
        if launch_dims is None:
            launch_dims = self._default_launch_dims(user_ins, array_dims, n_indices)
        most_dims = _WARP_MAX_DIMS - 1 if self.options.tiled else _WARP_MAX_DIMS
        rule = (
            f"{self.title}: launch_dims must be 1 to {most_dims} ints from 0 to {_WARP_MAX_EXTENT}. "
            f"Got {launch_dims!r}. Pass an int, a tuple, or a function of the inputs, such as "
            "launch_dims=lambda x: x.shape[0]."
        )
        dims = _ints(launch_dims, rule)
        if not 1 <= len(dims) <= most_dims or min(dims) < 0 or max(dims) > _WARP_MAX_EXTENT:
            raise ValueError(rule)
        # A kernel without `wp.tid()` may have any `launch_dims`.  With tiles, the last index of `wp.tid()` may be the
        # thread of a block, for which `launch_dims` has no number.
        if n_indices and not (self.options.tiled or _uses_tiles(analysis)):
            _check_n_indices(self.title, f"launch_dims={launch_dims}", len(dims), n_indices, "wp.tid()")
        return dims

    def _default_launch_dims(
        self, user_ins: Sequence[_Spec], array_dims: Mapping[str, tuple[int, ...]], n_indices: int
    ) -> tuple[int, ...]:
        """Return the dimensions of the first array that has not one element, one for each index of `wp.tid()`.

        Every other array must begin with the same dimensions, or with ones.  Otherwise, any choice might leave out
        elements or write beyond an array.  For example, if the first array has the dimensions (4, 5), another array may
        have (4, 5, 7) or (1, 1, 7), but not (5, 4).  Two kinds of arrays may have any dimensions: those of one element
        (a parameter, or a total), and those with fewer dimensions (a value for each row).  If all have one element, the
        first array counts.
        """
        not_single = {name: dims for name, dims in array_dims.items() if math.prod(dims) != 1}
        first, first_dims = next(iter((not_single or array_dims).items()), ("", ()))
        n_dims = len(first_dims)
        for name, dims in not_single.items():
            if len(dims) >= n_dims and dims[:n_dims] not in (first_dims, (1,) * n_dims):
                shown = ", ".join(self._argument_names(user_ins))
                raise ValueError(
                    f"{self.title}: launch_dims may be omitted only if all arrays begin with the same dimensions. "
                    f"{first!r} has {first_dims}, and {name!r} has {dims}. "
                    f"Pass the number of threads, or a function of the inputs: launch_dims=lambda {shown}: ..."
                )
        # Without `launch_dims`, a kernel needs `wp.tid()`, and tiles do not matter.
        launch_text = f"launch_dims is missing, and the shape of the first array, {first_dims},"
        _check_n_indices(self.title, launch_text, n_dims, n_indices, "wp.tid()")
        return first_dims

    # -- derivatives -----------------------------------------------------------------------------------

    def _bind_primitive(self, ins: list[_Spec], outs: list[_Spec], *args: Any) -> list:
        """Return the results of the call as a list, with a VJP rule if `differentiable=True`."""
        without_vjp = functools.partial(super()._bind_primitive, ins, outs)
        if not self.options.differentiable:
            return without_vjp(*args)

        def forward(*args: Any) -> tuple[list, Any]:
            results = without_vjp(*args)
            return results, (args, results)

        return _with_vjp(without_vjp, forward, self._backward)(*args)

    def _backward(self, residuals: Any, cotangents: Sequence) -> tuple:
        """Launch the adjoint, and return the cotangents of the inputs."""
        args, outs = residuals
        call, operands, gradients = self._adjoint_call(_input_specs(args), _input_specs(outs))
        data = dict(zip(self.parameters, [*args, *outs], strict=True))
        cotangent_of = dict(zip(self.parameters[len(args) :], cotangents, strict=True))
        values = [data[name] if field == "data" else cotangent_of[name] for name, field in operands]
        results = call.bind(_make_varying(values))
        gradient_of = dict(zip(gradients, results[len(results) - len(gradients) :], strict=True))
        return tuple(
            _sharded_like(gradient_of[name], jax.typeof(x)) if name in gradient_of else None  # for JAX, None is zero
            for name, x in zip(self.parameters, args)
        )

    def _adjoint_call(self, args: list[_Spec], outs: list[_Spec]) -> tuple[_CallParams, list[_ArrayField], list[str]]:
        """Return the call of the adjoint, its operands, and the inputs whose gradients are its last results.

        For example, the buffers of the adjoint of `kernel(x, out)` are, with `d_x` for the gradient of `x`:

            index          0          1          2          3              4              5
            array          x          out        d_out      out            d_out          d_x
            role           operand    operand    operand    overwritten    overwritten    gradient
            starts with                                     buffer 1       buffer 2       zeros

        Warp's adjoint overwrites the cotangents, such as `d_out`, and adds to the gradients of the inputs.  First, it
        repeats the kernel.  It leaves out the stores in the kernel's body, but perhaps not those in helpers.  So every
        array to which the kernel or a helper stores counts as overwritten.
        """
        spec_of = dict(zip(self.parameters, [*args, *outs], strict=True))
        floats = [name for name, spec in spec_of.items() if jax.dtypes.issubdtype(spec.dtype, np.floating)]
        gradients = [name for name in self.parameters[: len(args)] if name in floats]
        analysis = _warp_analysis(self.kernel)
        maybe_stored = self.parameters if _has_unanalyzed_code(analysis) else analysis.stores
        operands = [_ArrayField(name, "data") for name in self.parameters]
        operands += [_ArrayField(name, "grad") for name in floats if name not in gradients]
        overwritten = [x for x in operands if x.field == "grad" or x.parameter in maybe_stored]
        results = overwritten + [_ArrayField(name, "grad") for name in gradients]
        call = _CallParams(
            ins=tuple(spec_of[x.parameter] for x in operands),
            outs=tuple(spec_of[x.parameter] for x in results),
            scratch=(),
            aliases=tuple((operands.index(x), result) for result, x in enumerate(overwritten)),
            zeroed=tuple(range(len(overwritten), len(results))),
            has_side_effect=self.options.has_side_effect,
        )
        target = self._make_target(call, operands + results, args, analysis)
        # `float_arrays` includes null arrays, because there is one warning for all calls of the kernel.
        arrays = [param for param in self.warp_params.values() if not param.is_value]
        float_arrays = {param.name for param in arrays if jax.dtypes.issubdtype(param.dtype, np.floating)}
        _warn_of_wrong_gradients(self.kernel, float_arrays, self.title)
        return dataclasses.replace(call, target=target), operands, gradients


# -- 10.3 Warp's lock; a kernel: its parameters, its code and its stores -------------------------------


@contextlib.contextmanager
def _warp_session() -> Iterator[Any]:
    """Hold the lock of Warp, and yield the initialized package `warp`.

    The lock is needed because Warp's builds of modules are not thread-safe.  While it is held, Warp prints only
    warnings, unless the user has changed the log level from INFO, its default.
    """
    wp = _import("warp", "warp_kernel", _WARP_INSTALL)
    with _WARP_LOCK:
        level = wp.config.log_level
        try:
            if level == logging.INFO:  # the default
                wp.config.log_level = logging.WARNING
            wp.init()
            yield wp
        finally:
            wp.config.log_level = level


@dataclasses.dataclass
class _WarpParam:
    """A parameter of a kernel, which takes an array or a value, and the checks of its argument.

    For example, `x: wp.array2d(dtype=wp.vec3)` takes a JAX array float32[:,:,3].
    """

    title: str  # for error messages: "warp_kernel 'f': argument 'x'"
    name: str  # x
    type: Any  # Warp's type
    dtype: np.dtype | None  # of the scalars: float32; None for a struct
    element_shape: tuple[int, ...]  # (3,); () if the elements are scalars
    ndim: int  # number of dimensions of the array, without those of its elements: 2; 0 for a value

    @property
    def is_value(self) -> bool:
        return self.ndim == 0

    def array_dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions of an array of this shape, without those of its elements."""
        dims = shape[: len(shape) - len(self.element_shape)]
        return tuple(dims) or (1,) * self.ndim  # an input of one element may omit them

    def __str__(self) -> str:
        """Return the JAX array that the parameter takes, such as float32[:,3], or the type of its value."""
        scalar = self.dtype.name if self.dtype is not None else f"struct {self.type.key}"
        dims = [":"] * self.ndim + [*map(str, self.element_shape)]
        return f"{scalar}[{','.join(dims)}]" if dims else scalar

    def check_value(self, value: Any) -> Any:
        """Return an argument that is passed by value, in a form that Warp takes.  Raise an error if it does not fit."""
        if isinstance(value, jax.core.Tracer):
            if self.dtype is None:
                fix = f"Create the {self.type.key} outside of jax.jit, as a variable of the closure"
            else:
                element = "..." if self.element_shape else f"wp.{self.dtype}"
                fix = (
                    "Pass a concrete value: jax.jit(f, static_argnums=...). Or annotate the parameter as "
                    f"wp.array(dtype={element}), and read its element [0]"
                )
            raise self._error(TypeError, value, fix)
        if self.dtype == np.uint64 and hasattr(value, "id"):  # such as `wp.HashGrid` and `wp.Mesh`
            raise self._error(TypeError, value, f"Pass its id: {self.name}.id")
        if self.dtype is None and not isinstance(getattr(value, "_ctype", None), self.type.ctype):
            # Warp does not check this: it would read the memory of any object as this struct.
            raise self._error(TypeError, value, f"Pass an instance of {self.type.key}")
        if self.dtype is not None and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            for number in _python_numbers(value).ravel():
                # Warp does not check this: the number would wrap around.
                if isinstance(number, (int, np.integer)) and not limits.min <= number <= limits.max:
                    raise self._error(ValueError, value, f"Pass a number from {limits.min} to {limits.max}")
        return np.asarray(value) if isinstance(value, jax.Array) else value

    def check_array(self, spec: _Spec, role: str) -> None:
        """Raise an error if the parameter cannot take an array of this spec.

        `role` is "input", "in-out", "output" or "scratch".
        """
        if self.is_value:
            raise self._error(TypeError, spec, "Values are inputs. Move this parameter before the outputs")
        if spec.dtype != self.dtype:
            raise self._error(TypeError, spec, self._dtype_fix(spec, role))
        has_dims = len(spec.shape) >= self.ndim and spec.shape[self.ndim :] == self.element_shape
        omits_dims = spec.shape == self.element_shape  # an array of one element
        if not has_dims and not omits_dims:
            raise self._error(TypeError, spec, self._shape_fix(spec, role))
        if omits_dims and role != "input":
            # It may be a mistake: an output float32[] of a kernel that stores to out[i], or an output float32[3] that
            # was meant as three elements of the type vec3.  Then the kernel would write beyond the buffer.
            one = (1,) * self.ndim + self.element_shape
            reshape = f", and pass {self.name}.reshape{one}" if role == "in-out" else ""
            fix = f"For a single element, declare {_spec_code(one, self.dtype)} in outs{reshape}"
            raise self._error(TypeError, spec, fix)
        if not all(isinstance(size, int) for size in spec.shape):
            raise self._error(
                NotImplementedError,
                spec,
                "A launch needs known dimensions, not symbolic ones. Export a program for each shape",
            )
        largest_extent = max(spec.shape, default=1)
        largest_stride = math.prod(spec.shape[1:]) * spec.dtype.itemsize
        if max(largest_extent, largest_stride) > _WARP_MAX_EXTENT:
            axis = self.ndim - 1 if largest_stride > _WARP_MAX_EXTENT else spec.shape.index(largest_extent)
            fix = (
                f"Warp needs extents, and strides in bytes, up to {_WARP_MAX_EXTENT}. The largest are {largest_extent} "
                f"and {largest_stride}. Call the kernel for each part: jnp.array_split({self.name}, 2, axis={axis})"
            )
            raise self._error(ValueError, spec, fix)

    def _error(self, kind: type[Exception], argument: Any, fix: str) -> Exception:
        """Return the error for a value, or for the spec of an array, that cannot be the argument."""
        rule = f"is passed by value, as {self}" if self.is_value else f"must be an array {self}"
        if isinstance(argument, jax.core.Tracer):
            shown = f"a traced {_format_spec(argument)}"
        elif isinstance(argument, jax.ShapeDtypeStruct):
            shown = _format_spec(argument)
        else:
            shown = f"{type(argument).__name__} {argument!r:.80}"
        return kind(f"{self.title} {rule}. Got {shown}. {fix}.")

    def _dtype_fix(self, spec: _Spec, role: str) -> str:
        is_input = role in ("input", "in-out")
        fix = f"Cast it: {self.name} = jnp.asarray({self.name}, jnp.{self.dtype})"
        if not is_input:
            fix = f"Declare it with its dtype: {_spec_code(spec.shape, self.dtype)}"
        if jax.dtypes.canonicalize_dtype(self.dtype) != self.dtype:  # JAX takes 32 bits instead of 64
            return f'{fix}, after jax.config.update("jax_enable_x64", True)'
        if is_input and not self.element_shape and spec.dtype.name in _WARP_DTYPES:
            fix += f". Or annotate the parameter as wp.array(dtype=wp.{spec.dtype}, ndim={self.ndim})"
        return fix

    def _shape_fix(self, spec: _Spec, role: str) -> str:
        if self.element_shape:
            sizes = "n, m, k, l, "[: 3 * self.ndim]
            shape = f"({sizes}{', '.join(map(str, self.element_shape))})"
            fix = f"The elements of vectors and matrices are trailing dimensions: shape {shape}"
            if role == "input" and spec.shape[:1] == self.element_shape and len(spec.shape) == self.ndim + 1:
                fix += f". Move the first dimension: jnp.moveaxis({self.name}, 0, -1)"
            elif role == "input" and self.ndim == 1:
                fix += f". Reshape it: {self.name}.reshape{(-1, *self.element_shape)}"
            return fix
        if len(spec.shape) > _WARP_MAX_DIMS:
            return f"Warp arrays have at most {_WARP_MAX_DIMS} dimensions. Reshape it, such as {self.name}.reshape(-1)"
        fix = f"Annotate the parameter as wp.array(dtype=wp.{self.dtype}, ndim={len(spec.shape)})"
        if role in ("output", "scratch") and len(spec.shape) > self.ndim:
            fix += f". Or declare {_spec_code(spec.shape[: self.ndim], self.dtype)}"
        return fix


def _spec_code(shape: Sequence[Any], dtype: Any) -> str:
    return f"jax.ShapeDtypeStruct({tuple(shape)}, jnp.{dtype})"


def _parse_parameter(wp: Any, kernel: Any, argument: Any) -> _WarpParam:
    """Return the `_WarpParam` for one of `kernel.adj.args`, or raise an error if its type is not supported."""
    title = f"warp_kernel {kernel.func.__name__!r}: argument {argument.label!r}"
    warp_type = argument.type
    # The type is a wp.array or, for wp.array2d[float], an annotation that refers to this class.
    is_array = getattr(warp_type, "_concrete_cls", type(warp_type)) is wp.array
    element = warp_type.dtype if is_array else warp_type
    dtypes = {getattr(wp, name): np.dtype(name) for name in _WARP_DTYPES}
    dtypes |= {float: np.dtype("f4"), int: np.dtype("i4"), bool: np.dtype("?"), wp.handle: np.dtype("u8")}
    dtype = dtypes.get(getattr(element, "_wp_scalar_type_", element))
    has_arrays = _max_ndim(warp_type) > 0
    # A struct that is passed by value.  This excludes arrays of structs, which JAX does not have, and structs with
    # arrays, whose pointers the handler would not replace.
    is_struct_value = _is_warp_struct(element) and not has_arrays
    if dtype is None and not is_struct_value:
        fix = f"Annotate it as a wp.array. Instead of an indexedarray, pass {argument.label}[indices]."
        if _is_warp_struct(element):
            fields = ", ".join(f"{argument.label}_{name}" for name in element.vars)
            fix = f"Replace it by {'an array' if is_array else 'a parameter'} for each field: {fields}."
        raise TypeError(
            f"{title} must be a scalar, vector or matrix, an array of these, or a struct without arrays. "
            f"Got {getattr(warp_type, 'key', warp_type)!r}. {fix}"
        )
    element_shape = tuple(getattr(element, "_shape_", ()))
    ndim = warp_type.ndim if is_array else 0
    return _WarpParam(title, argument.label, warp_type, dtype, element_shape, ndim)


def _python_numbers(value: Any) -> np.ndarray:
    """Return the numbers of a value as an array of Python objects.  A scalar of Warp has its number in `value`."""
    return np.asarray(getattr(value, "value", value), object)


def _value_key(value: Any) -> tuple:
    """Return a key that is equal only for values that the kernel, and options such as `outs`, cannot tell apart."""
    if hasattr(value, "_ctype"):  # a struct of Warp, which holds a C struct
        return type(value), bytes(value._ctype)
    numbers = str(_python_numbers(value).tolist())  # as text, because 0.0 == -0.0, and nan != nan
    return type(value), getattr(value, "dtype", None), numbers


def _values_key(fixed: Mapping[str, Any]) -> tuple:
    """Return a key of the values of parameters."""
    return tuple([(name, _value_key(value)) for name, value in fixed.items()])


def _warp_options(kernel: Any) -> dict[str, Any]:
    """Return the options with which Warp compiles a kernel: those of its module, and its own."""
    return kernel.module.resolve_options(sys.modules["warp"].config) | kernel.options


def _current_kernel_key(kernel: Any) -> tuple[str, ...]:
    """Return a key of a kernel as it is now, after letting Warp hash it again, because it may have changed.

    Kernels with equal keys have the same machine code, except for deferred statics (13.2) and `block_dim`.  The key
    contains the module's name, because Warp builds each module on its own.
    """
    with _warp_session() as wp:
        # If a build of the kernel has failed, Warp < 1.19 leaves it out of later builds, without an error.
        kernel.adj.skip_build = False
        kernel.module.get_module_hash()  # sets `hash`, and `grid_stride` where Warp has it, of the module's kernels
        # Warp 1.14 stores the `block_dim` of the last launch in the options.
        options = _warp_options(kernel) | {"block_dim": None}
        return wp.__version__, kernel.module.name, kernel.hash.hex(), str(options)


_WARP_ANALYSES = _BoundedCache()  # {`_current_kernel_key(kernel)`: `_KernelAnalysis`}


def _warp_analysis(kernel: Any) -> _KernelAnalysis:
    """Return the analysis of a kernel as it is now (section 8)."""
    key = _current_kernel_key(kernel)
    return _WARP_ANALYSES.get(key) or _WARP_ANALYSES.keep(key, _KernelAnalysis(kernel))


def _n_tid_indices(analysis: _KernelAnalysis) -> int:
    """Return the largest number of indices that one `wp.tid()` returns, or 0 if there is none."""
    n_indices = 0
    for function_analysis in analysis.analyses.values():
        for node in function_analysis.nodes:
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call() as call):  # `i, j = wp.tid()`
                    n_targets = len(targets)
                case ast.Call() as call:  # any call, including the one above
                    n_targets = 1
                case _:
                    continue
            if _builtin_name(function_analysis.callees[call]) == "tid":
                n_indices = max(n_indices, n_targets)
    return n_indices


def _uses_tiles(analysis: _KernelAnalysis) -> bool:
    """Return whether the kernel or a helper calls builtins for tiles."""
    return any(
        _builtin_name(callee).startswith(("tile", "untile"))
        for function_analysis in analysis.analyses.values()
        for callee in function_analysis.callees.values()
    )


def _has_unanalyzed_code(analysis: _KernelAnalysis) -> bool:
    """Return whether there is C++ code, a user-defined adjoint, or a call of a function that is an argument."""
    for function, function_analysis in analysis.analyses.items():
        if any(getattr(function, name, None) for name in ("native_snippet", "custom_grad_func", "custom_replay_func")):
            return True
        # In Warp >= 1.19, a parameter `f` may be a function, which the kernel calls as `f(x)`.
        callees = function_analysis.callees.items()
        if any(callee is None and isinstance(node.func, ast.Name) for node, callee in callees):
            return True
    return False


# -- 10.4 A launch: recorded by Warp, repeated by the handler ------------------------------------------
# Warp packs the arguments of a launch into the parameters of the compiled function.  Their layout differs between
# versions of Warp.  So the only assumption is that pointers are in it, unchanged and in whole words of 8 bytes:
#
#     trace or lower   Warp records a launch with the real shapes and values, and with placeholders as the pointers.
#                      The packed parameters, as words of 8 bytes, go into the launch attribute.  On GPUs, a
#                      `_LaunchConfig` precedes them.
#     call             The handler copies these words.  For each slice, it replaces each placeholder by the pointer
#                      to the buffer, and calls the compiled function (CPU) or cuLaunchKernel (GPU).
#
# A batch launch (10.5) also has placeholders for the step of each buffer: the number of bytes from one slice to the
# next, or 0 if all slices share the buffer.

_STEP = "_xla_step_{}"  # the parameter of a batch kernel with the step of a buffer


def _placeholder_word(buffer: int, is_step: bool) -> int:
    """Return the placeholder of the pointer to a buffer, or of its step.

    It is improbable that another word of a launch equals it.  A pointer is aligned to 16 bytes, as Warp expects.
    """
    return 0x5EED_0F0A_C417_0000 + 16 * buffer + 8 * is_step


class _Placeholder(NamedTuple):
    """The place of a placeholder among the words of a launch.  Target names contain a hash of its `repr`."""

    position: int  # index of the word
    buffer: int  # index of the buffer
    is_step: bool  # whether it stands for the step of the buffer; otherwise for the pointer


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WarpLaunch:
    """The launch of a kernel, or of its adjoint, with its shapes and values, on any device.

    It is hashable, as part of a `_WarpCallTarget`: `key` stands for the fields that are not compared.
    """

    title: str  # of the wrapper, for errors of tracing and lowering: "warp_kernel 'f'"
    label: str  # its `__name__`, for errors of calls: "f"
    kernel: Any = dataclasses.field(compare=False)
    fixed: Mapping[str, Any] = dataclasses.field(compare=False)  # values, and None for null arrays
    array_dims: Mapping[str, tuple[int, ...]] = dataclasses.field(compare=False)  # without those of elements
    key: tuple  # determines `kernel`, `fixed` and `array_dims`
    field_buffers: tuple[tuple[_ArrayField, int], ...]  # (field, index of its buffer)
    launch_dims: tuple[int, ...]
    block_dim: int
    is_tiled: bool  # whether `launch_dims` counts blocks
    uses_tiles: bool  # whether the kernel calls builtins for tiles
    in_order: bool  # whether the slices of a batch must run in order
    is_batch_launch: bool = False  # whether `kernel` is a batch kernel (10.5)

    def for_batch(self) -> _WarpLaunch:
        """Return the launch of the batch kernel (10.5), or raise the reason why there is none."""
        if self.in_order:
            raise _BatchLaunchUnsupported("vmap_method says that slices run in order")
        return dataclasses.replace(self, kernel=_batch_kernel(self.kernel, self.field_buffers), is_batch_launch=True)

    def record(self, wp: Any, device: str) -> Any:
        """Return Warp's record of the launch on a device, with placeholders.  This compiles and loads the kernel."""
        warp_types = _parameter_types(self.kernel)
        arguments, gradients = self._arguments_and_gradients(wp, warp_types, device)
        block_dim = 1 if device == "cpu" else self.block_dim
        # Warp counts threads.  As in `wp.launch_tiled`, the last dimension of tiled launches is the thread of a block.
        dims = (*self.launch_dims, block_dim) if self.is_tiled else self.launch_dims
        options: dict[str, Any] = {"device": device, "block_dim": block_dim, "record_cmd": True}
        if gradients:  # so this is a launch of the adjoint
            self._check_has_adjoint()
            # Warp expects a gradient for each parameter.  That of a value is zero and not used.
            adjoint_inputs = [gradients.get(name) if _is_array_type(t) else t() for name, t in warp_types.items()]
            options |= {"adj_inputs": adjoint_inputs, "adjoint": True}
        try:
            recorded = wp.launch(self.kernel, dims, [arguments[name] for name in warp_types], **options)
        except Exception as error:
            error.add_note(f"This was raised for {self.title}.")
            raise
        self._check_recorded(wp, recorded, device)
        return recorded

    def _arguments_and_gradients(self, wp: Any, warp_types: dict, device: str) -> tuple[dict, dict]:
        """Return {parameter: argument} and {parameter: gradient}, with placeholders as the pointers of arrays."""
        arguments = dict(self.fixed)
        gradients: dict[str, Any] = {}
        for (name, field), buffer in self.field_buffers:
            pointer = _placeholder_word(buffer, is_step=False)
            dims, dtype = self.array_dims[name], warp_types[name].dtype
            passed = gradients if field == "grad" else arguments
            passed[name] = wp.array(ptr=pointer, shape=dims, dtype=dtype, device=device)
            if self.is_batch_launch:
                arguments[_STEP.format(buffer)] = _placeholder_word(buffer, is_step=True)
        for name, gradient in gradients.items():
            arguments[name].grad = gradient  # in Warp, an array refers to its gradient
        return arguments, gradients

    def _check_has_adjoint(self) -> None:
        if not _warp_options(self.kernel)["enable_backward"]:
            raise ValueError(
                f"{self.title}: a gradient needs Warp's adjoint of the kernel. enable_backward is False in the options "
                "of the kernel or of its module. Decorate the kernel with @wp.kernel(enable_backward=True)."
            )

    def _check_recorded(self, wp: Any, recorded: Any, device: str) -> None:
        """Raise an error if the kernel was not built, or if Warp needs more than one plain kernel launch."""
        if recorded is None:  # some versions of Warp report a failed build only once
            raise RuntimeError(
                f"{self.title}: Warp cannot build kernel {self.kernel.key!r}. It has reported the error before, in its "
                "first exception or its output. Correct the kernel, and decorate it again."
            )
        if type(recorded).__name__ != "Launch":
            feature = "Warp's deterministic mode"
        elif getattr(recorded, "cluster_dim", 1) != 1:
            feature = "clusters"
        elif device == "cpu" and getattr(wp.config, "enable_cpu_blocks", False) and (self.is_tiled or self.uses_tiles):
            feature = "wp.config.enable_cpu_blocks"
        else:
            return
        raise NotImplementedError(
            f"{self.title}: a call must need only one plain kernel launch. Warp needs more with {feature}. Switch this "
            "off, or call the kernel with wp.jax_kernel."
        )

    def placeholders_in(self, words: Sequence[int]) -> tuple[_Placeholder, ...]:
        """Return the places of the placeholders among the words of a launch.  Raise an error if one is missing."""
        meaning_of = {}  # {placeholder: (buffer, is_step)}
        for _, buffer in self.field_buffers:
            for is_step in (False, True) if self.is_batch_launch else (False,):
                meaning_of[_placeholder_word(buffer, is_step)] = buffer, is_step
        if not meaning_of.keys() <= set(words):
            raise NotImplementedError(
                f"{self.title}: this version of Warp passes arrays in an unknown way. Use another version of Warp, or "
                "call the kernel with wp.jax_kernel."
            )
        return tuple(_Placeholder(i, *meaning_of[word]) for i, word in enumerate(words) if word in meaning_of)

    def cuda_launch_config(self, recorded: Any, shared_mem: int) -> _LaunchConfig:
        """Return the launch configuration.  This copies `wp_cuda_launch_kernel` of warp.cu."""
        n_threads = recorded.bounds.size
        if n_threads % self.block_dim and self.uses_tiles:
            raise ValueError(
                f"{self.title}: all {self.block_dim} threads of a block work on a tile. "
                f"launch_dims={self.launch_dims} are {n_threads} threads, which is not a multiple of "
                f"{self.block_dim}. Pass tiled=True, and the number of blocks as launch_dims."
            )
        grid_x = n_blocks = -(-n_threads // self.block_dim)  # rounded up, here and below
        # The recording has set `grid_stride`.  In Warp 1.14, it is missing, and all kernels have the loop.
        if not getattr(self.kernel, "grid_stride", True):  # without a loop over the grid
            grid_x = min(n_blocks, _WARP_MAX_THREADS_X // self.block_dim)  # the other blocks are along y
        grid_y = -(-n_blocks // grid_x)
        return _LaunchConfig(
            grid_x=grid_x, grid_y=grid_y, grid_z=1, block_x=self.block_dim, block_y=1, block_z=1, shared_mem=shared_mem
        )


def _packed_parameters(recorded: Any) -> list[bytes]:
    """Return the packed parameters of a recorded launch, each padded to words of 8 bytes.

    On CPUs, Warp packs the parameters only when a launch runs.  So we run the launch with a Python function in place
    of the kernel, which keeps what it gets.
    """
    parameters = recorded.params  # ctypes objects
    if recorded.device.is_cpu:
        parameters = []

        def keep_parameters(*args: Any) -> None:
            parameters.extend(getattr(arg, "_obj", arg) for arg in args)  # `_obj` of what ctypes.byref returns

        dry_run = copy.copy(recorded)
        dry_run.hooks = types.SimpleNamespace(forward=keep_parameters, backward=keep_parameters)
        dry_run.launch()
    # `bytes(n)` is n zeros, here as many as are missing to a multiple of 8.
    return [bytes(parameter) + bytes(-ctypes.sizeof(parameter) % 8) for parameter in parameters]


class _WarpEmitter(_Emitter):
    """An emitter that repeats a recorded launch for each slice or, as a batch launch, for many slices."""

    def __init__(self, launch: _WarpLaunch, recorded: Sequence[Any]) -> None:
        """Read the recorded launches, one for each device of a platform.  The first one has the words of all."""
        self.recorded = recorded  # keeps Warp's modules loaded
        self.direction = "backward" if recorded[0].adjoint else "forward"
        # The address of the compiled function on each device.  If there was none, `wp.launch` has raised an error.
        self.addresses: list[Any] = [ctypes.cast(getattr(x.hooks, self.direction), _PTR).value for x in recorded]
        parameters = _packed_parameters(recorded[0])
        self.launch_attribute = tuple(memoryview(b"".join(parameters)).cast("q").tolist())  # the words of the launch
        self.param_sizes = tuple(len(parameter) // 8 for parameter in parameters)  # in words
        self.placeholders = launch.placeholders_in(self.launch_attribute)
        self.is_batch_launch = launch.is_batch_launch

    def copy_parameters(self, ir: _HandlerBuilder, frame: _StructPointer, first_word: int = 0) -> list[_Int64]:
        """Copy the parameters from the launch attribute to the stack, and return the address of each.

        They begin at `first_word`.  For example, for a first parameter of 2 words, and a second one of 3:

            words of the launch attribute     on CPUs     on GPUs      result
            fields of a `_LaunchConfig`                   0 to 6
            first parameter                   0, 1        7, 8         address
            second parameter                  2, 3, 4     9, 10, 11    address + 16
        """
        n_words = sum(self.param_sizes)
        address = ir.alloca(_I64, n_words)
        ir.copy_bytes(address, ir.launch_attribute_address(frame) + 8 * first_word, 8 * n_words)
        return [address + 8 * sum(self.param_sizes[:i]) for i in range(len(self.param_sizes))]

    def replace_placeholders(
        self, ir: _HandlerBuilder, params: Sequence[_Int64], arrays: Sequence[_KernelArray], buffers: _StructPointer
    ) -> None:
        """Store pointers and steps in the parameters.  The positions of placeholders count from `params[0]`."""
        for position, buffer, is_step in self.placeholders:
            value = buffers[buffer].step if is_step else arrays[buffer].pointer
            ir.store(value, params[0] + 8 * position)


class _WarpCpuEmitter(_WarpEmitter):
    """An emitter that calls the compiled function."""

    def __init__(self, launch: _WarpLaunch, recorded: Sequence[Any]) -> None:
        super().__init__(launch, recorded)
        # `_build_handler` reads these attributes of an `_Emitter`, and copies the addresses to the handler's data.
        self.kernel_address = self.addresses[0]
        self.in_order = launch.in_order or launch.uses_tiles
        if launch.uses_tiles:
            # On CPUs, Warp has one static pointer to the memory of tiles (tile.h), so such kernels must not overlap.
            self.lock_address = _native_lock_address("tile_lock")
        self.code_key = "warp", self.param_sizes, self.placeholders

    def write(self, ir: _HandlerBuilder, frame: _StructPointer, buffers: _StructPointer, count: _Int64) -> None:
        params = self.copy_parameters(ir, frame)
        with ir.each_slice(buffers, count) as arrays:
            self.replace_placeholders(ir, params, arrays, buffers)
            ir.call(ir.handler_data.kernel_address, *params)


class _WarpCudaEmitter(_WarpEmitter):
    """An emitter that calls cuLaunchKernel.  Launches on a stream run in order."""

    traits = _COMMAND_BUFFER_COMPATIBLE  # the handler only launches, and always the same

    def __init__(self, launch: _WarpLaunch, recorded: Sequence[Any]) -> None:
        super().__init__(launch, recorded)
        config = launch.cuda_launch_config(recorded[0], getattr(recorded[0].hooks, f"{self.direction}_smem_bytes"))
        self.launch_attribute = (*config, *self.launch_attribute)
        self.libcuda = libcuda = _LibCuda()
        functions = dict(zip(_cuda_ordinals(), self.addresses, strict=True))
        self.launcher = _CudaLauncher(launch.label, libcuda, functions, recorded)
        if self.is_batch_launch:
            for function in self.addresses:
                # The batch kernel may need more registers than the user's kernel.
                if exceeded := libcuda.exceeded_limits_text(function, config):
                    raise _BatchLaunchUnsupported(f"the batch kernel exceeds a limit{exceeded}")

    def write(self, ir: _HandlerBuilder, frame: _StructPointer, buffers: _StructPointer, count: _Int64) -> None:
        params = self.copy_parameters(ir, frame, first_word=_CUDA_LAUNCH_WORDS)  # they follow the `_LaunchConfig`
        write_launch = self.launcher.write_launch_setup(ir, frame)
        if self.is_batch_launch:
            with ir.each_batch_launch(buffers, count, _CUDA_MAX_GRID_YZ) as (arrays, n_slices):
                self.replace_placeholders(ir, params, arrays, buffers)
                write_launch(params, grid_z=n_slices)
        else:
            with ir.each_slice(buffers, count) as arrays:
                self.replace_placeholders(ir, params, arrays, buffers)
                write_launch(params)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class _WarpCallTarget(_CallTarget):
    """The launch of a call whose platform is not known yet.

    JAX carries it in the primitive's parameters, so it is hashable.  The lowering exchanges it for the `_CallTarget` of
    a platform, which `prepare_lowering` returns.
    """

    launch: _WarpLaunch
    signature: _Signature
    requested_name: str | None  # the user's `name=`
    platform_phrase: str = "runs on CPUs, and on NVIDIA GPUs where JAX has one"
    derivative_advice: str = (
        "warp_kernel(kernel, outs, differentiable=True) gives only first derivatives in reverse mode (grad). "
    )

    def prepare_lowering(self, platform: str, has_batch: bool = False) -> _CallTarget:
        """Record the launch on a platform, register a handler, and return its target.

        For a batch on a GPU, this is the launch of the batch kernel, if it can have one.
        """
        devices = ["cpu"] if platform == "cpu" else []
        if platform == "cuda":
            devices = [f"cuda:{ordinal}" for ordinal in _cuda_ordinals()]
        if not devices:
            return super().prepare_lowering(platform)  # raises an error, because Warp has no device of the platform
        if platform == "cuda" and has_batch:
            try:
                return self._register(self.launch.for_batch(), platform, devices)
            except Exception as error:  # any error, because those that are not due to the batch are raised again below
                _log_per_slice_fallback(self.title, _fallback_reason(error))
        return self._register(self.launch, platform, devices)

    def _register(self, launch: _WarpLaunch, platform: str, devices: Sequence[str]) -> _CallTarget:
        """Record a launch on these devices, and register a handler."""
        # Warp may make the context of another device current.
        context = _LibCuda().keeping_context() if platform == "cuda" else contextlib.nullcontext()
        with _warp_session() as wp, context:
            recorded = [launch.record(wp, device) for device in devices]
            emitter = (_WarpCudaEmitter if platform == "cuda" else _WarpCpuEmitter)(launch, recorded)
            # The adjoint of a kernel has another layout: it has more parameters.
            options = "warp", launch.in_order, _current_kernel_key(launch.kernel), launch.block_dim
            layout = str((platform, emitter.param_sizes, emitter.placeholders))
            specialization = _Specialization(self.signature, options, platform, self.requested_name, layout)

            def compile_handler() -> _CompiledHandler:
                _import("numba", "warp_kernel", _NUMBA_INSTALL)  # its LLVM compiles the handler
                return _build_handler(self.signature, emitter)

            name = _REGISTRY.warp_target_name(specialization, compile_handler)
        return _CallTarget(name, emitter.launch_attribute, platform=platform)


# -- 10.5 A batch in one launch ------------------------------------------------------------------------
# On a GPU, a batch is one launch per 65,535 slices, which are the blocks along z.  The launched kernel is a copy of the
# user's kernel, the batch kernel.  Its first lines advance the pointer of each array to the slice of the block:
#
#     def kernel(x, factor, out):         def kernel(x, factor, out):
#         i = wp.tid()                        x = _xla_advance_0(x, _xla_step_0)
#         out[i] = factor * x[i]              out = _xla_advance_1(out, _xla_step_1)
#                                             i = wp.tid()
#                                             out[i] = factor * x[i]
#
# `_xla_advance_0` adds z times the step of buffer 0 to the pointer of its array.  The steps are added only to the
# annotations of the function, and not to its `def` line, because Warp takes the parameters from the annotations.
#
# The batch kernel is compiled with `grid_stride=True`.  Warp then generates a loop over the grid along x, and leaves z
# free.  Warp's adjoints find the gradient of an array in its field `grad`, whose pointer is advanced, too.
#
# Kernels that `_create_batch_kernel` cannot copy get a launch for each slice.  For example, C++ code of the user may
# read z, and the user's own adjoints do not use the field `grad`.

_ADVANCE = "_xla_advance_{}"  # the function that advances the array at a buffer
# C++, where `decltype(&*p)` is the type of the pointer p, and not of a reference to it.
_ADVANCE_SNIPPET = "auto& p = array.{field}; p = (decltype(&*p))((char*)p + blockIdx.z * step); return array;"
_ADVANCE_SOURCE = "@wp.func_native()\ndef advance(array, step): ..."  # Warp looks for the decorator in this source
_BATCH_KERNELS = _BoundedCache()  # {(`_current_kernel_key(kernel)`, field_buffers): batch kernel}


def _batch_kernel(kernel: Any, field_buffers: tuple) -> Any:
    """Return the kernel whose blocks with index z run slice z.  `field_buffers` is as in `_WarpLaunch`."""
    with _warp_session() as wp:
        key = _current_kernel_key(kernel), field_buffers
        return _BATCH_KERNELS.get(key) or _BATCH_KERNELS.keep(key, _create_batch_kernel(wp, kernel, field_buffers))


def _create_batch_kernel(wp: Any, kernel: Any, field_buffers: tuple) -> Any:
    """Create a batch kernel, or raise the reason why the kernel cannot have one."""
    if _has_unanalyzed_code(_warp_analysis(kernel)) or kernel.adj.transformers:
        raise _BatchLaunchUnsupported(
            "it has C++ code, adjoints or code transformers of your own, or calls a function that is an argument"
        )
    source = kernel.adj.source
    annotations = _parameter_types(kernel)
    variables = _referenced_variables(kernel.func)
    # A copy has the same hash, unless captured values have changed since Warp read them.
    plain_copy = _copy_kernel(kernel, source, annotations, variables)
    plain_copy.module.get_module_hash()  # updates `plain_copy.hash`
    if plain_copy.hash != kernel.hash:
        raise _BatchLaunchUnsupported("captured values have changed since Warp read them")
    statements = []
    for (name, field), buffer in field_buffers:
        advance, step = _ADVANCE.format(buffer), _STEP.format(buffer)
        variables[advance] = _advance_function(wp, advance, annotations[name], field)
        annotations[step] = wp.int64
        statements.append(f"{name} = {advance}({name}, {step})")
    tree: Any = ast.parse(source)
    tree.body[0].body[:0] = ast.parse("\n".join(statements)).body
    return _copy_kernel(kernel, ast.unparse(tree), annotations, variables, grid_stride=True)


def _advance_function(wp: Any, key: str, array_type: Any, field: str) -> Any:
    """Return Warp's native function that advances an array, or its gradient, to the slice of the block."""

    def advance(array: Any, step: Any) -> Any: ...  # only for its parameters: Warp compiles the C++ snippet

    advance.__annotations__ = {"array": array_type, "step": wp.int64, "return": array_type}
    return wp.Function(advance, key, "", native_snippet=_ADVANCE_SNIPPET.format(field=field), source=_ADVANCE_SOURCE)


def _copy_kernel(kernel: Any, source: str, annotations: dict, variables: dict, **options: Any) -> Any:
    """Return a kernel with this source, in a module of its own.

    Warp compiles `source`.  It also needs a function, in which it looks up the types of the parameters (annotations)
    and the values of names (globals and closure).  The function's code never runs.
    """
    function = types.FunctionType(kernel.func.__code__, variables, closure=kernel.func.__closure__)
    function.__annotations__ = dict(annotations)
    # Warp tells modules apart by their names, so the name contains a hash.
    module = type(kernel.module)(f"{kernel.key}_{_hash(kernel.module.name, kernel.hash.hex(), source)}", None)
    module.options.update(kernel.module.options)
    return type(kernel)(function, kernel.key, module, {**kernel.options, **options}, source=source)


# ======================================================================================================
# 11. XLACustomKernel: one operation, many backends, all of JAX's transformations.
# An op is a JAX primitive.  The platform, and with it the backend, is known only when a call is lowered.  Each function
# calls the indented ones below it.  Those that begin with `_op_` are called by JAX:
#
#     XLACustomKernel.__call__         converts the operands, and evaluates `outs`
#       _OpCall.apply                  finds mistakes early, and adds the VJP rule, if there is one
#         _OpPrimitive.bind            binds the primitive, whose only parameter is the `_OpCall`
#           _op_abstract_eval          returns the types of the outputs
#           _op_batching               under `vmap`: records the vmap in the `_OpCall`
#           _op_jvp, _op_transpose     under `grad`: call the user's rules
#           _op_lowering               chooses the `KernelEntry` for the platform and the backend
#             _kernel_jaxpr            traces the kernel
#               _run_kernel_on_batch   applies the recorded vmaps
#                 _run_kernel_on_slice   calls the kernel
#                   _generated_function  calls the generator, once for equal arguments
#
# A generator is a function of the static parameters that returns the kernel.  In this section, a rule is always a
# function of the user, such as a JVP rule, and `ins` are the operands of a call.  Outputs have three forms:
#
#     outs            the user's argument: a pytree of specs, or a function that returns one
#     declared_outs   the pytree of specs
#     out_specs       its leaves, as `ShapeDtypeStruct`s, for one slice: the parameter `outs` of generators and rules
#
# Besides the parts of JAX that are listed in section 1, this section relies on these details:
# - The message of the error for a missing batching rule begins with "Batching rule for".
# - Constants of a jaxpr may be tracers.
# - The class of an ordered effect has "Ordered" in its name.
#
# The public names, such as `kg` (kernel generator), `asdefault` and `def_jvp_rule2`, are those of BrainEvent, a library
# that uses this class.  Only BrainEvent needs the methods at the end of the class, and rules that return an undefined
# primal for a zero.

# -- 11.1 The op: registration, dispatch, rules --------------------------------------------------------


class XLACustomKernel(_PickledByReference):
    """An operation with kernels for several backends.  All of JAX's transformations apply to it.

        op(*ins, outs=..., backend=None, **params)

    Register kernels with `def_kernel` and its shorthands, such as `def_numba_kernel`.  Under `vmap`, the kernel of the
    chosen backend is batched.  Derivatives come from the rules that you define: `def_jvp_rule`, `def_jvp_rule2`,
    `def_transpose_rule` or `def_vjp_rule`.  An op lives as long as the process.

    An op has no side effects.  JAX drops a call if its outputs are unused, and it does not order calls.  If `vmap`
    batches the predicate of a `cond`, both branches run, and errors of either branch are raised.  If `vmap` batches the
    condition of a `while_loop`, the kernel also runs for batch elements that have finished.

    Args:
      name: str.  The name in jaxprs and error messages.  It need not be unique.
      doc: str or None.  The docstring of this op.  Default None: the docstring of the class.

    Args of a call:
      ins: arrays, Python scalars, or objects with `__dlpack__`, such as arrays of Warp, PyTorch and CuPy.
      outs: a `jax.ShapeDtypeStruct` (or any object with `.shape` and `.dtype`), a pytree of these, or a function of the
        operands' abstract values that returns one of these.  It describes the outputs.  If it contains a dict, the
        kernel must return a dict with the same keys, because JAX sorts outputs by key.  Decorated kernels return no
        dicts.  For them, declare a tuple, or a NamedTuple such as `Range(low=spec, high=spec)`.
      backend: str or None.  A registered backend.  Default None: the default backend of the platform.
      params: hashable static parameters, which generators and rules receive.  They are compared with `==`, except that
        values of different types differ, such as 1, 1.0 and True.

    Returns:
      The outputs, in the structure of `outs`.

    Raises:
      TypeError: if a parameter is not hashable (such as a traced value), or if an operand is not an array.
      ValueError: if the backend is not registered, or if the outputs of a kernel do not match `outs`.
      NotImplementedError: if no kernel is registered for the platform and `backend` is None, or if JAX needs a rule
        that is not defined.
      Exception: errors of generators and kernels, with a note that names the op and the backend.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> op = XLACustomKernel("axpy")
      >>> _ = op.def_kernel("jax", "cpu", lambda alpha: lambda x, y: alpha * x + y)
      >>> op.def_jvp_rule2(lambda t, x, y, alpha: alpha * t, lambda t, x, y, alpha: t)
      >>> print(jax.grad(lambda x: op(x, x, outs=x, alpha=2.0).sum())(jnp.ones(3)))
      [3. 3. 3.]
    """

    def __init__(self, name: str, doc: str | None = None) -> None:
        self.name = self.__name__ = name
        self.title = f"XLACustomKernel {name!r}"  # for error messages
        self.primitive = _OpPrimitive(self)
        self._entries: dict[str, dict[str, KernelEntry]] = {}  # {platform: {backend: entry}}
        self._explicit_defaults: dict[str, str] = {}  # {platform: backend}, from asdefault=True and set_default
        self._rules = _Rules()
        self._op_calls = _BoundedCache()  # {(outs, backend, static parameters): _OpCall}
        self._was_called = False  # for registrations after a call, see `_set_rules`
        self._lowered: dict[tuple[str, str | None], KernelEntry] = {}  # {(platform, backend of the call): entry}
        self.__doc__ = doc or self.__doc__

    def __call__(self, /, *ins: Any, outs: Any, backend: str | None = None, **params: Any) -> Any:
        """Call the op.  The docstring of the class describes the arguments."""
        has_tracers = False
        # `_FAST_PATH_TYPES` has the types of scalars and arrays that need no conversion.  Tracers are not among them.
        if not _FAST_PATH_TYPES.issuperset(map(type, ins)):
            ins, has_tracers = _convert_inputs(ins, self.title)
        declared_outs = outs
        if callable(outs):
            avals = [getattr(x, "aval", None) or jax.typeof(x) for x in ins]  # `typeof` alone is slower
            declared_outs = _call_with_specs(outs, self.title, "outs", avals)
        key = (_outs_key(declared_outs), backend, _StaticParams(params) if params else None)
        try:
            op_call = self._op_calls.get(key)
        except TypeError:  # a parameter or a shape in outs is not hashable
            op_call = None
        if op_call is None:
            _check_hashable(self.title, params)
            op_call = self._create_op_call(declared_outs, backend, **params)
            with contextlib.suppress(TypeError):  # raised if a shape in outs contains arrays
                op_call = self._op_calls.keep(key, op_call)  # the stored call: another thread may have been faster
        return op_call.apply(*ins) if has_tracers else op_call.jitted(*ins)

    def _create_op_call(self, /, outs: Any = (), backend: str | None = None, **params: Any) -> _OpCall:
        """Return the `_OpCall` for declared outs, and record that the op was called, see `_set_rules`."""
        self._was_called = True
        # The dtypes stay as declared, also if x64 is disabled: `with_dtypes_for` truncates them in each trace.
        out_specs, out_tree = _normalize_specs(outs, f"{self.title}: outs")
        return _OpCall(self, tuple(out_specs), out_tree, backend, _StaticParams(params))

    def __repr__(self) -> str:
        return f"<{self.title}: {self._registered_text()}>"

    # -- registration ----------------------------------------------------------------------------------

    def def_kernel(self, backend: str, platform: str, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a kernel for a backend and a platform.

            op.def_kernel(backend, platform, kg)
            @op.def_kernel(backend, platform)

        A kernel that is registered again replaces the previous one, even in functions that were compiled with it.  For
        this, JAX's caches are cleared, so all functions of the process are compiled again when they are called.

        Args:
          backend: str.  Any name.  For `"numba"`, `"warp"`, `"numba_cuda"`, `"pallas"`, `"triton"` and `"cuda_raw"`
            there are shorthands, such as `def_numba_kernel`.
          platform: str.  `"cpu"`, `"gpu"` or `"tpu"`.  `"cuda"` and `"rocm"` mean `"gpu"`.
          kg: a decorated kernel (`@njit`, `@cuda.jit`, `@wp.kernel`), a wrapper such as `numba_kernel(...)`, or a
            kernel generator.  A generator is a plain function `kg(outs=..., **params)`, called with the static
            parameters of a call, and with `outs` (a flat tuple of specs) if it has such a parameter.  It returns a
            decorated kernel, a wrapper, or a function that JAX can trace.  Default None: return a decorator.
          asdefault: bool.  Whether this backend becomes the default of the platform.  Default False: the first
            registered backend is the default.
          options: for a decorated kernel, the options of `numba_kernel`, `numba_cuda_kernel` or `warp_kernel`, such as
            `launch_dims` and `zero_outputs`.

        Returns:
          `kg`, or a decorator if `kg` is None.  The shorthands return the same.

        Raises:
          TypeError: if an option is unknown or has no effect in an op, if there are options for a generator, or if a
            shorthand gets a decorated kernel of another backend.
          ValueError: if `platform` is a variant of one of JAX's names, such as `"cuda12"`.

        Example:
          >>> op = XLACustomKernel("power")
          >>> @op.def_kernel("jax", "cpu")
          ... def power(n):
          ...     return lambda x: x**n
          >>> print(op(2.0, outs=lambda x: x, n=3))
          8.0
        """
        return self._register_kernel(backend, [platform], asdefault, options, kg, is_shorthand=False)

    def def_numba_kernel(self, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register an `@njit` kernel, or a generator of one, as backend `"numba"` for CPUs.

        The options are those of `numba_kernel`.  `def_kernel` describes the other arguments.

        Example:
          >>> import numba
          >>> op = XLACustomKernel("add_one")
          >>> @op.def_numba_kernel
          ... @numba.njit
          ... def add_one(x, out):
          ...     out[...] = x + 1
          >>> print(op(np.ones(3, np.float32), outs=lambda x: x))
          [2. 2. 2.]
        """
        return self._register_kernel("numba", ["cpu"], asdefault, options, kg)

    def def_warp_kernel(self, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a `@wp.kernel`, or a generator of one, as backend `"warp"` for GPUs and CPUs.

        The options are those of `warp_kernel`.  `def_kernel` describes the other arguments.  On CPUs, the kernel is a
        fallback: it is the default only if no other backend is registered.  `asdefault` concerns GPUs only.

        Example:
          >>> import warp as wp
          >>> op = XLACustomKernel("add_one")
          >>> @op.def_warp_kernel
          ... @wp.kernel
          ... def add_one(x: wp.array(dtype=float), out: wp.array(dtype=float)):
          ...     i = wp.tid()
          ...     out[i] = x[i] + 1.0
          >>> op(np.ones(3, np.float32), outs=lambda x: x).tolist()
          [2.0, 2.0, 2.0]
        """
        return self._register_kernel("warp", ["gpu", "cpu"], asdefault, options, kg)

    def def_numba_cuda_kernel(self, kg: Any = None, asdefault: bool = False, **options: Any) -> Any:
        """Register a `@cuda.jit` kernel, or a generator of one, as backend `"numba_cuda"` for GPUs.

        The options are those of `numba_cuda_kernel`.  A `@cuda.jit` kernel needs `launch_dims`, or `grid` and `block`.
        A generator takes no options.  It returns a wrapper, `numba_cuda_kernel(kernel, outs, launch_dims=...)`.
        `def_kernel` describes the other arguments.  In Numba's simulator, the kernel is also a fallback on CPUs.

        Example:
          >>> from numba import cuda
          >>> op = XLACustomKernel("add_one")
          >>> @op.def_numba_cuda_kernel(launch_dims=lambda x: x.size)
          ... @cuda.jit
          ... def add_one(x, out):
          ...     i = cuda.grid(1)
          ...     if i < out.size:
          ...         out[i] = x[i] + 1
          >>> op(np.ones(3, np.float32), outs=lambda x: x).tolist()
          [2.0, 2.0, 2.0]
        """
        platforms = ["gpu", "cpu"] if _uses_cudasim() else ["gpu"]
        return self._register_kernel("numba_cuda", platforms, asdefault, options, kg)

    def def_pallas_kernel(self, platform: str, kg: Any = None, asdefault: bool = False) -> Any:
        """Register a generator of a Pallas kernel as backend `"pallas"`.

        The generator returns a function that calls `pallas_call`, on CPUs in interpret mode.  `def_kernel` describes
        the arguments.

        Example:
          >>> from jax.experimental import pallas
          >>> def add_one(x_ref, out_ref):
          ...     out_ref[...] = x_ref[...] + 1
          >>> op = XLACustomKernel("add_one")
          >>> _ = op.def_pallas_kernel("cpu", lambda outs: pallas.pallas_call(add_one, outs[0], interpret=True))
          >>> print(op(np.ones(3, np.float32), outs=lambda x: x))
          [2. 2. 2.]
        """
        return self._register_kernel("pallas", [platform], asdefault, {}, kg)

    def def_triton_kernel(self, kg: Any = None, asdefault: bool = False) -> Any:
        """Register a generator for GPUs as backend `"triton"`.  It returns a function that calls a Triton kernel."""
        return self._register_kernel("triton", ["gpu"], asdefault, {}, kg)

    def def_cuda_raw_kernel(self, kg: Any = None, asdefault: bool = False) -> Any:
        """Register a generator for GPUs as backend `"cuda_raw"`.  It returns a function that calls a C++ kernel."""
        return self._register_kernel("cuda_raw", ["gpu"], asdefault, {}, kg)

    def _register_kernel(
        self, backend: str, platforms: list[str], asdefault: bool, options: dict, kg: Any, is_shorthand: bool = True
    ) -> Any:
        """Register a kernel for the first platform, and as a fallback for the others."""
        if not isinstance(backend, str) or not isinstance(platforms[0], str):
            raise TypeError(
                f"{self.title}: a backend and a platform are strings. Got {backend!r} and {platforms[0]!r}. Write "
                'op.def_kernel("numba", "cpu", kernel).'
            )
        if kg is None:
            return lambda kernel: self._register_kernel(backend, platforms, asdefault, options, kernel, is_shorthand)
        decorated_backend = _decorated_backend(kg)
        if is_shorthand and decorated_backend not in (None, backend):  # `def_kernel` takes any name for a backend
            raise TypeError(
                f"{self.title}: def_{backend}_kernel takes kernels of its own backend. Got {kg!r}. "
                f"Register it with op.def_{decorated_backend}_kernel(kernel)."
            )
        generator = _as_generator(self.title, backend, kg, decorated_backend, options)
        main_platform = self._normalize_platform(platforms[0])
        for platform in map(self._normalize_platform, platforms):
            entries = self._entries.setdefault(platform, {})
            is_fallback = platform != main_platform
            if is_fallback and backend in entries and not entries[backend].fallback:
                continue  # a fallback does not replace a kernel that `def_kernel` registered
            entries[backend] = KernelEntry(backend, platform, generator, is_fallback, options)
        if asdefault:
            self._explicit_defaults[main_platform] = backend
        self._clear_caches_if_entries_changed()
        return kg

    def _normalize_platform(self, platform: str) -> str:
        """Return the name under which kernels for a platform are registered.

        Raise an error for a variant of one of JAX's names, such as "CPU", "gpus", "cuda12" and "gpu:0".  Other names,
        such as "metal", are accepted, because plugins add platforms.
        """
        match = re.fullmatch(r"(?i)(cpu|gpu|tpu|cuda|rocm)s?[\W\d]*", platform)
        if match and platform != (name := match[1].lower()):
            raise ValueError(
                f"{self.title}: a platform is 'cpu', 'gpu' ('cuda', 'rocm') or 'tpu'. Got {platform!r}. Write "
                f"{_platform_name(name)!r}."
            )
        return _platform_name(platform)

    # -- dispatch --------------------------------------------------------------------------------------

    @property
    def defaults(self) -> dict[str, str]:
        """A new dict with the default backend of each platform that has a kernel."""
        return {platform: self._select_entry(platform, None).backend for platform in list(self._entries)}

    def get_default(self, platform: str) -> str | None:
        """Return the default backend of a platform (see `def_kernel`), or None if the platform has no kernel."""
        return self.defaults.get(self._normalize_platform(platform))

    def set_default(self, platform: str, backend: str) -> None:
        """Set the default backend of a platform (see `def_kernel`), even for functions that are compiled already.

        A ValueError is raised if the backend is not registered for the platform.
        """
        name = self._normalize_platform(platform)
        self._explicit_defaults[name] = self._select_entry(name, backend).backend
        self._clear_caches_if_entries_changed()

    def available_backends(self, platform: str) -> list[str]:
        """Return the backends that are registered for a platform (see `def_kernel`), in order of registration."""
        return list(self._entries.get(self._normalize_platform(platform), {}))

    def _find_entry(self, platform: str, backend: str | None) -> KernelEntry | None:
        """Return the kernel for a platform and the argument `backend` of a call, or None if there is none."""
        entries = dict(self._entries.get(platform, {}))  # a copy, because threads may register kernels
        if backend is None:
            backend = self._explicit_defaults.get(platform)
        if backend is None:  # choose the first kernel that is not a fallback, or the first fallback
            return min(entries.values(), key=operator.attrgetter("fallback"), default=None)
        return entries.get(backend)

    def _select_entry(self, platform: str, backend: str | None) -> KernelEntry:
        """Return the kernel for a platform and the argument `backend` of a call, or raise if there is none."""
        entry = self._find_entry(platform, backend)
        if entry is not None:
            return entry
        missing = "kernel" if backend is None else f"backend {backend!r}"
        text = (
            f"{self.title} has no {missing} for platform {platform!r}. Registered: {self._registered_text()}. Choose "
            "a registered backend, move the inputs of a call with jax.device_put(x, device), or register a kernel: "
            f"op.def_kernel({backend or 'jax'!r}, {platform!r}, kernel)."
        )
        raise NotImplementedError(text) if backend is None else ValueError(text)

    def _registered_text(self) -> str:
        """Return all platforms and their backends as a text."""
        return "; ".join(f"{name}: {', '.join(entries)}" for name, entries in [*self._entries.items()]) or "nothing"

    # -- rules -----------------------------------------------------------------------------------------

    def def_batching_rule(self, fun: Callable) -> Callable:
        """Define how `vmap` batches the op.

            fun(args, axes, **params) -> (outputs, output_axes)

        Without a batching rule, the kernel of the backend is batched.  The batching rule runs when `vmap` is traced.
        If the op also has a JVP or transpose rule, the batching rule runs later, when a call is lowered, and must not
        use traced values of its closure.

        Args:
          fun: a function.  `args` holds the operands.  `axes` holds the position of the batch axis for each operand,
            which is 0, or None for an unbatched operand.  `params` is described in `def_jvp_rule`.  `fun` returns the
            outputs and their batch axes: two lists, or one output and one axis.

        Returns:
          `fun`.  The methods `def_..._rule` that take one function are also decorators.

        Example:
          >>> op = XLACustomKernel("exp")
          >>> _ = op.def_kernel("jax", "cpu", lambda: jax.numpy.exp)
          >>> _ = op.def_batching_rule(lambda args, axes: (jax.numpy.exp(args[0]), axes[0]))
          >>> print(jax.vmap(lambda x: op(x, outs=x))(np.zeros(2, np.float32)))
          [1. 1.]
        """
        self._set_rules(batching=_adapt_user_function(fun, f"{self.title}: the batching rule"))
        return fun

    def def_jvp_rule(self, fun: Callable) -> Callable:
        """Define the JVP rule as one function.

            fun(primals, tangents, **params) -> (outputs, output_tangents)

        Args:
          fun: a function of two tuples with an item for each operand.  A zero tangent is a `jax.interpreters.ad.Zero`.
            `fun` returns two lists with an item for each output.  The tangent of an output may be None for zero.
            `params` holds the static parameters of the call, `outs` (a flat tuple of specs) and `backend`.  A rule may
            omit the parameters `outs` and `backend`.  An op that the rule calls uses its default backend.  To use the
            backend of the call instead, pass `backend=backend`.

        Example:
          >>> op = XLACustomKernel("square")
          >>> _ = op.def_kernel("jax", "cpu", lambda: lambda x: x * x)
          >>> @op.def_jvp_rule
          ... def jvp(primals, tangents):
          ...     (x,), (t,) = primals, tangents
          ...     return [x * x], [2 * x * t]
          >>> print(jax.grad(lambda x: op(x, outs=x))(3.0))
          6.0
        """
        checked = _adapt_user_function(fun, f"{self.title}: the JVP rule")
        self._set_rules(jvp=functools.partial(_apply_jvp_rule, checked), vjp=None)
        return fun

    def def_jvp_rule2(self, *jvp_rules: Callable | None) -> None:
        """Define the JVP rule as one function for each operand.

            rule(tangent, *primals, **params) -> output tangents

        The tangent of the outputs is the sum over the operands.  An operand whose rule is None has the derivative zero.

        Args:
          jvp_rules: a function or None for each operand, see `defjvp`.
        """
        subject = f"{self.title}: the JVP rule for operand"
        rules = [rule and _adapt_user_function(rule, f"{subject} {i}") for i, rule in enumerate(jvp_rules)]
        self._set_rules(jvp=functools.partial(_apply_jvp_rule2, rules), vjp=None)

    def def_transpose_rule(self, fun: Callable) -> Callable:
        """Define the transpose rule, if the op is linear in some of its operands.

            fun(cotangents, *operands, **params) -> operand cotangents

        Args:
          fun: a function.  `cotangents` is a list with an item for each output; a zero is a `jax.interpreters.ad.Zero`.
            An operand in which the op is linear is an `ad.UndefinedPrimal` (`ad.is_undefined_primal(x)` is True).
            `params` is described in `def_jvp_rule`.  `fun` returns a list with an item for each operand.  It is a
            cotangent if the op is linear in the operand.  Otherwise it is ignored, and may be None.

        Example:
          >>> op = XLACustomKernel("scale")
          >>> _ = op.def_kernel("jax", "cpu", lambda factor: lambda x: factor * x)
          >>> op.def_jvp_rule2(lambda t, x, outs, factor: op(t, outs=outs[0], factor=factor))
          >>> _ = op.def_transpose_rule(lambda cotangents, x, factor: [factor * cotangents[0]])
          >>> print(jax.grad(lambda x: op(x, outs=x, factor=3.0))(1.0))
          3.0
        """
        self._set_rules(transpose=_adapt_user_function(fun, f"{self.title}: the transpose rule"))
        return fun

    def def_vjp_rule(self, fwd: Callable, bwd: Callable) -> None:
        """Define the VJP rule as two functions, for example if a kernel computes the backward pass.

            fwd(*operands, **params) -> (outputs, residuals)
            bwd(residuals, cotangents, **params) -> operand cotangents

        The op then supports reverse mode only.  `fwd` may call the op, because JAX does not differentiate this call.
        A JVP rule and a VJP rule replace each other.

        Args:
          fwd: a function.  Its outputs are usually those of the op.  `params` is described in `def_jvp_rule`.  After a
            call with `outs=spec`, the parameter `outs` of the rule is `(spec,)`, but the outputs and the cotangents are
            single arrays.
          bwd: a function.  It returns a cotangent for each operand, or None for zero.

        Example:
          >>> op = XLACustomKernel("square")
          >>> _ = op.def_kernel("jax", "cpu", lambda: lambda x: x * x)
          >>> op.def_vjp_rule(lambda x, outs: (op(x, outs=outs[0]), x), lambda x, ct: (2 * x * ct,))
          >>> print(jax.grad(lambda x: op(x, outs=lambda x: x))(3.0))
          6.0
        """
        fwd = _adapt_user_function(fwd, f"{self.title}: fwd of the VJP rule")
        bwd = _adapt_user_function(bwd, f"{self.title}: bwd of the VJP rule")
        self._set_rules(vjp=(fwd, bwd), jvp=None)

    # -- registration after a call ---------------------------------------------------------------------
    # A new rule, kernel or default also reaches functions that JAX has traced or compiled.  JAX cannot drop only the
    # functions that call one op, so it drops all, and compiles them again when they are called.  To avoid this, the
    # caches are cleared only if the op was called before a rule changes, or if a lowered call would use another entry.

    def _set_rules(self, **rules: Any) -> None:
        """Replace the rules that are passed by name."""
        old_rules, self._rules = self._rules, dataclasses.replace(self._rules, **rules)
        if self._was_called and self._rules != old_rules:
            self._clear_jax_caches()

    def _clear_caches_if_entries_changed(self) -> None:
        """Clear JAX's caches if another kernel now serves calls that were lowered before."""
        lowered = list(self._lowered.items())  # a copy, because threads may lower calls
        if any(self._find_entry(platform, backend) is not entry for (platform, backend), entry in lowered):
            self._clear_jax_caches()

    def _clear_jax_caches(self) -> None:
        """Let JAX trace and compile all functions again."""
        self._lowered = {}
        jax.clear_caches()

    # -- timing ----------------------------------------------------------------------------------------

    def benchmark(self, /, *ins: Any, outs: Any, backend: str | None = None, **params: Any) -> _OpBenchmark:
        """Time a call of the op under `jax.jit` on the default platform.

            op.benchmark(*ins, outs=..., backend=None, **params)

        Args:
          ins, outs, params: as for a call of the op.
          backend: str or None.  The backend to time.  Default None: all backends of the platform.

        Returns:
          A table, which prints as text.  Each of its `.rows` has the fields `backend`, `first_ms` (the first call,
          including compilation), `median_us`, `difference` (the maximum difference from the outputs of the first
          backend that runs) and `error` (the error message of a backend that fails).
        """
        platform = _default_platform()
        self._select_entry(platform, backend)  # raises if there is none
        args = jax.device_put(_convert_inputs(ins, self.title)[0])
        rows = []
        reference = None
        for name in [backend] if backend else self.available_backends(platform):
            jitted = jax.jit(functools.partial(self, outs=outs, backend=name, **params))
            try:
                first_s, median_s = _time_calls(jitted, args)
                outputs = jitted(*args)
                reference = outputs if reference is None else reference
                rows.append(_BenchmarkRow(name, 1e3 * first_s, 1e6 * median_s, _max_difference(outputs, reference)))
            except Exception as error:
                rows.append(_BenchmarkRow(name, error=f"{type(error).__name__}: {error}".partition("\n")[0]))
        return _OpBenchmark(rows)

    # -- for BrainEvent, which also reads these private attributes -------------------------------------

    _call_fn: Callable | None = None  # prepares and checks operands, and calls the op
    _benchmark_data_fn: Callable | None = None  # creates benchmark data
    _tags: Collection[str] = frozenset()  # words that describe the op, such as "sparse"

    def def_call(self, fn: Callable) -> Callable:
        """Set the function that `call` calls, and return it."""
        self._call_fn = fn
        return fn

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that `def_call` has set.  Default: the op."""
        return (self._call_fn or self)(*args, **kwargs)

    def def_benchmark_data(self, fn: Callable) -> Callable:
        """Set a function that creates benchmark data, and return it."""
        self._benchmark_data_fn = fn
        return fn

    def def_tags(self, *tags: str) -> None:
        """Set the tags of the op."""
        self._tags = set(tags)

    def register_general_batching(self) -> None:
        """Remove the batching rule, so that the kernel of the backend is batched again."""
        self._set_rules(batching=None)


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The rules of an op, which the methods `def_..._rule` describe.  A rule of None is not defined."""

    batching: Callable | None = None
    jvp: Callable | None = None  # (op_call, primals, tangents) -> ..., from `_apply_jvp_rule` or `_apply_jvp_rule2`
    transpose: Callable | None = None
    vjp: tuple[Callable, Callable] | None = None  # (fwd, bwd)


@dataclasses.dataclass(frozen=True, eq=False)  # entries are compared by identity
class KernelEntry:
    """A kernel that is registered with an `XLACustomKernel`.  `def_kernel` creates it.

    Attributes:
      backend: str.  The backend for which the kernel is registered.
      platform: str.  `"cpu"`, `"gpu"`, `"tpu"`, or the name of a platform of a plugin.
      kernel_generator: the registered generator.  For a decorated kernel or a wrapper, a generator that returns it.
      fallback: bool.  Whether the kernel is the default only if the platform has no other kernels: Warp on CPUs, and
        Numba CUDA in Numba's simulator.  Default False.
      options: dict.  The options of a decorated kernel.  Default {}.
    """

    backend: str
    platform: str
    kernel_generator: Callable
    fallback: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# -- 11.2 Calls: keys of caches, and the parameter of the primitive ------------------------------------


def _outs_key(declared_outs: Any) -> tuple:
    """Return a key that is equal for equal structures of equal specs, so that they are checked only once."""
    if _has_shape_and_dtype(declared_outs):
        return (declared_outs.shape, declared_outs.dtype)
    if type(declared_outs) in (list, tuple):  # `jax.tree.flatten` takes 4 us, which is a quarter of an eager call
        return (type(declared_outs), *map(_outs_key, declared_outs))
    leaves, tree = _flatten_specs(declared_outs)
    # A leaf that is not a spec is a mistake of the user.  `_normalize_specs` rejects it.
    return (tree, *[(x.shape, x.dtype) if _has_shape_and_dtype(x) else x for x in leaves])


class _StaticParams(dict):
    """The static parameters of a call, {name: value}, as a dict with a hash.

    Its `==` and its hash also distinguish types and signs of zeros: 1, 1.0 and True, and 0.0 and -0.0.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__(params)
        self.key = tuple([(name, _static_value_key(value)) for name, value in sorted(params.items())])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StaticParams) and self.key == other.key

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.key)


def _static_value_key(value: Any) -> tuple:
    """Return a key of the value of a static parameter; see `_StaticParams`."""
    cls = type(value)
    if isinstance(value, tuple):
        return (cls, *map(_static_value_key, value))
    if isinstance(value, frozenset):  # equal sets may be iterated in different orders
        return (cls, frozenset(map(_static_value_key, value)))
    if cls in (float, complex) or isinstance(value, np.inexact):
        return (cls, np.asarray(value).tobytes())  # NaN is not equal to itself, but its bytes are
    return (cls, value)


def _check_hashable(title: str, params: dict[str, Any]) -> None:
    """Raise if a static parameter is not hashable."""
    for name, value in params.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{title}: parameters are static, so they must be hashable. Parameter {name!r} is {value!r:.80} of "
                f"type {type(value).__name__}. Pass a number or a tuple, or pass an array as an operand. If it is an "
                f'argument of a function under jax.jit, add static_argnames="{name}".'
            ) from None


def _trace_context() -> tuple:
    """Return the current mesh, and whether x64 is enabled, for keys of caches: types of new arrays depend on them."""
    return jax.sharding.get_abstract_mesh(), jax.config.jax_enable_x64


@dataclasses.dataclass(frozen=True)
class _OpCall:
    """The outs, backend and static parameters of a call of an op, and the vmaps that were recorded so far (11.4)."""

    op: XLACustomKernel = dataclasses.field(repr=False)
    out_specs: tuple[_Spec, ...]  # the leaves of the user's outs, for one slice
    out_tree: Any  # the structure of the user's outs
    backend: str | None
    params: _StaticParams
    vmaps: tuple[_RecordedVmap, ...] = ()  # the outermost first

    @property
    def batched_out_specs(self) -> list[_Spec]:
        """The specs of the outputs, including the batch."""
        batch_shape = [vmap.size for vmap in self.vmaps]
        return [_Spec((*batch_shape, *out.shape), out.dtype) for out in self.out_specs]

    @property
    def in_axes_per_vmap(self) -> list[tuple]:
        """The `in_axes` of each recorded vmap, the outermost first."""
        return [vmap.in_axes for vmap in self.vmaps]

    @property
    def rule_params(self) -> dict[str, Any]:
        """The keyword arguments of the user's rules."""
        return {**self.params, "outs": self.out_specs, "backend": self.backend}

    @functools.cached_property
    def jitted(self) -> Callable:
        """The compiled call, for operands that are arrays."""
        return jax.jit(self.apply)

    def apply(self, *ins: Any) -> Any:
        """Bind the primitive, with the VJP rule if there is one, and return the outputs in the structure of outs."""
        op_call = self.with_dtypes_for(ins)
        op_call.check_kernel(ins)
        vjp_rule = self.op._rules.vjp
        outputs = _bind_with_vjp(op_call, ins, *vjp_rule) if vjp_rule else op_call.bind(*ins)
        return self.out_tree.unflatten(outputs)

    def with_dtypes_for(self, ins: Sequence) -> _OpCall:
        """Return this call with the dtypes of its outputs for these operands.

        If x64 is disabled, a declared float64 becomes float32, with a warning, unless an operand is float64.  This is
        done for each trace, and not when the `_OpCall` is created, because calls with and without x64 share one.
        """
        out_specs, _ = _normalize_specs(self.out_specs, f"{self.op.title}: outs", _input_specs(ins))
        return dataclasses.replace(self, out_specs=tuple(out_specs))

    def check_kernel(self, ins: Sequence) -> None:
        """If this process has only CPUs, trace the kernel for CPUs, so that its errors are raised at the user's call.

        With other devices, the platform is only known at lowering, which then raises the errors.
        """
        # `jax_default_device` may name a device that is not of the default backend.
        has_only_cpus = jax.default_backend() == _default_platform() == "cpu"
        entry = self.op._find_entry("cpu", self.backend)
        # Without an entry, the lowering raises an error, unless it is for another platform, as in an export.
        if has_only_cpus and entry:
            _check_kernel_once(self, entry, tuple(map(jax.typeof, ins)), _trace_context())

    def bind(self, *ins: Any) -> list:
        """Bind the primitive, and return the outputs as a flat list."""
        return self.op.primitive.bind(*ins, _op_call=self)

    def under_vmap(self, vmap: _RecordedVmap) -> _OpCall:
        """Return this call with one more recorded vmap, the outermost."""
        return dataclasses.replace(self, vmaps=(vmap, *self.vmaps))


@functools.lru_cache(maxsize=4096)
def _check_kernel_once(op_call: _OpCall, entry: KernelEntry, avals: tuple, trace_context: tuple) -> None:
    """Raise if a kernel cannot be traced.  The cache checks a kernel once for equal arguments."""
    _kernel_jaxpr(op_call, entry, avals)


# -- 11.3 The primitive: abstract evaluation and lowering ----------------------------------------------


class _OpPrimitive(_Primitive):
    """The primitive of an op.  Its only parameter is `_op_call`.

    BrainEvent binds the primitive directly, and calls its transpose rule from `ad.primitive_transposes`.  It passes
    `outs`, `backend` and static parameters, so these two methods accept them instead of `_op_call`.
    """

    multiple_results = True

    def __init__(self, op: XLACustomKernel) -> None:
        super().__init__(op.name)
        self.op = op
        _define_impl(self, "_op_call")  # for calls outside of `jax.jit`, which compile once per `_op_call`
        self.def_abstract_eval(_op_abstract_eval)
        ad.primitive_jvps[self] = _op_jvp
        ad.primitive_transposes[self] = self.transpose
        batching.primitive_batchers[self] = _op_batching
        for platform in (None, "cpu", "gpu", "tpu"):
            # Each platform has a function object of its own.  Otherwise JAX would lower a call once for all of them.
            mlir.register_lowering(self, functools.partial(_op_lowering), platform=platform)

    def bind(self, /, *args: Any, _op_call: _OpCall | None = None, **call_params: Any) -> list:
        _op_call = _op_call or self.op._create_op_call(**call_params)
        varying = _make_varying(args)  # inside `shard_map`, the outputs vary over the mesh axes of all operands
        return super().bind(*varying, _op_call=_op_call)

    def transpose(self, /, cts: Sequence, *operands: Any, _op_call: _OpCall | None = None, **call_params: Any) -> list:
        _op_call = _op_call or self.op._create_op_call(**call_params)
        return _op_transpose(cts, *operands, _op_call=_op_call)


def _op_abstract_eval(*avals: Any, _op_call: _OpCall) -> list:
    """Return the abstract values of the outputs.

    Their batch dimensions are sharded like those of the operands.  Their other dimensions are not sharded.  For
    example, two vmaps batch x, and only the inner one batches w:

        x: float32[8@a,4@b,3]   axes per vmap (0, 0)      mesh axes ["a", "b"]
        w: float32[4@b,3]       axes per vmap (None, 0)   mesh axes [None, "b"]
        an output: float32[8@a,4@b,3]                     mesh axes ["a", "b"], for each vmap the first that is not None
    """
    axes_per_vmap = zip(*_op_call.in_axes_per_vmap)  # of each operand; without vmaps, this is empty
    mesh_axes_per_operand = map(_batch_mesh_axes, avals, axes_per_vmap)
    partition = _batch_partition(zip(*mesh_axes_per_operand))  # `zip` gives the mesh axes of all operands per vmap
    # `_out_aval` takes the mesh, and the manual axes over which an output varies, from `avals`.
    return [_out_aval(out.shape, out.dtype, avals, partition) for out in _op_call.batched_out_specs]


def _batch_mesh_axes(aval: Any, axis_per_vmap: tuple) -> list:
    """For each vmap, return the mesh axis over which an operand is sharded in the dimension of this vmap, or None."""
    mesh_axes = []
    partition = list(aval.sharding.spec)
    for axis in axis_per_vmap:  # the vmaps that batch the operand have its first dimensions, in the same order
        mesh_axes.append(None if axis is None else partition.pop(0))
    return mesh_axes


def _op_lowering(ctx: Any, *ins: Any, _op_call: _OpCall) -> Any:
    """Lower the kernel of the backend for the platform that JAX compiles for."""
    # The first platform stands for all.  There are several only if one rule serves them: cuda and rocm, which have the
    # same kernels, or the platforms of plugins, of which a process usually has one.
    platform = _platform_name(_lowering_platforms(ctx)[0])
    entry = _op_call.op._select_entry(platform, _op_call.backend)
    _op_call.op._lowered[platform, _op_call.backend] = entry
    closed_jaxpr = _kernel_jaxpr(_op_call, entry, ctx.avals_in)
    return _lower(functools.partial(jax.core.eval_jaxpr, closed_jaxpr.jaxpr, closed_jaxpr.consts), ctx, ins)


# -- 11.4 Batching: recorded vmaps ---------------------------------------------------------------------
# Generators, `outs` and the user's derivative rules are for one slice.  The backend, which knows how to run a batch, is
# chosen at lowering.  So a `vmap` is only recorded in the `_OpCall`.  Later, `_replay_vmaps` applies the recorded vmaps
# to the kernel, or to the user's derivative rule.  For example, with x: float32[8,3] and w: float32[3]:
#
#     jax.vmap(lambda x, w: op(x, w, outs=x), (0, None))(x, w)
#
#     `_OpCall.apply`   binds slices of x    vmaps = ()
#     `_op_batching`    binds all of x       vmaps = (_RecordedVmap(in_axes=(0, None), size=8),)
#     `_op_jvp`         under `grad`, runs   jax.vmap(JVP rule, (0, None, 0, None))(x, w, tangent of x, tangent of w)
#     `_op_lowering`    lowers               jax.vmap(kernel, (0, None))(x, w)
#
# A batching rule of the user is for the innermost vmap.  Outer vmaps are replayed with `jax.vmap`, around the rule.
#
#     the op also has            the innermost vmap
#     nothing, or a VJP rule     runs the batching rule at once, which can use traced values
#     a JVP or transpose rule    is recorded with the batching rule, which runs at lowering
#
# If the batching rule ran at once in the second case, JAX would differentiate its operations instead of using the rule
# of the op.  Their derivatives may differ from those of the op (surrogate gradients), or not exist.  If the batching
# rule calls `general_batching_rule`, that vmap is recorded without the batching rule, to avoid endless recursion.


class _RecordedVmap(NamedTuple):
    """A `vmap` of an op.  The batch axis of each batched operand is in front."""

    in_axes: tuple[int | None, ...]  # for each operand: 0, or None if it is unbatched
    size: int
    batching_rule: Any = None  # the user's, to run at lowering; None: `jax.vmap` batches the kernel


def _op_batching(args: Sequence, axes: Sequence, *, _op_call: _OpCall) -> tuple:
    """Record a vmap, or run the user's batching rule."""
    rules = _op_call.op._rules
    vmap, ins = _record_vmap(args, axes)
    if rules.batching and not _op_call.vmaps:  # only for the innermost vmap, which JAX applies first
        vmap = vmap._replace(batching_rule=rules.batching)
    if vmap.batching_rule and not rules.jvp and not rules.transpose:
        outputs = _run_batching_rule(_op_call, vmap, *ins)
    else:
        outputs = _op_call.under_vmap(vmap).bind(*ins)
    return outputs, [0] * len(outputs)


def _record_vmap(args: Sequence, axes: Sequence[int | None]) -> tuple[_RecordedVmap, list]:
    """Return the record of a vmap, and the operands with the batch axis in front."""
    in_axes = tuple([None if axis is None else 0 for axis in axes])
    ins = [jax.numpy.moveaxis(x, axis, 0) if axis else x for x, axis in zip(args, axes)]  # None or 0: nothing to move
    return _RecordedVmap(in_axes, ins[in_axes.index(0)].shape[0]), ins


def _replay_vmaps(
    function: Callable, in_axes_per_vmap: Sequence, args: Sequence, vmap_function: Callable = jax.vmap
) -> Any:
    """Call a function for one slice under vmaps, which are given by their `in_axes`, the outermost first.

    `args` may contain symbolic zeros and undefined primals.  They are pytrees without leaves, which `jax.vmap` does not
    slice, so they are sliced here.
    """
    for in_axes in in_axes_per_vmap:
        args = list(map(_slice_if_symbolic, args, in_axes))
    for in_axes in reversed(in_axes_per_vmap):  # the innermost is applied first
        function = vmap_function(function, in_axes)
    return function(*args)


def _slice_if_symbolic(x: Any, axis: int | None) -> Any:
    """Return a symbolic zero or undefined primal with the shape of one slice, and anything else unchanged."""
    if axis is None or type(x) not in _SYMBOLIC_TYPES:
        return x
    return type(x)(_out_aval(x.aval.shape[1:], x.aval.dtype, [x.aval], x.aval.sharding.spec[1:]))


def _sequential_vmap(function: Callable, in_axes: tuple) -> Callable:
    """Return a function like `jax.vmap(function, in_axes)` that runs one slice after another."""

    def mapped(*ins: Any) -> Any:
        batched = {i: x for i, x in enumerate(ins) if in_axes[i] is not None}
        return jax.lax.map(lambda slices: function(*[slices.get(i, x) for i, x in enumerate(ins)]), batched)

    return mapped


def _kernel_jaxpr(op_call: _OpCall, entry: KernelEntry, avals: Sequence) -> Any:
    """Return the jaxpr of a kernel under the recorded vmaps.

    If the kernel calls a primitive that has no batching rule in JAX, the slices run one after another.
    """

    def trace(vmap_function: Callable) -> Any:
        return jax.make_jaxpr(functools.partial(_run_kernel_on_batch, op_call, entry, vmap_function))(*avals)

    try:
        closed_jaxpr = trace(jax.vmap)
    except NotImplementedError as error:
        if not str(error).startswith("Batching rule for"):
            raise
        closed_jaxpr = trace(_sequential_vmap)
    _check_lowerable(op_call.op.title, closed_jaxpr)
    return closed_jaxpr


def _run_kernel_on_batch(op_call: _OpCall, entry: KernelEntry, vmap_function: Callable, *ins: Any) -> list:
    """Return the outputs of a kernel under the recorded vmaps, with `jax.vmap` or `_sequential_vmap`."""
    out_specs = op_call.batched_out_specs
    if out_specs and all(0 in out.shape for out in out_specs):
        return list(map(_zeros, out_specs))  # not every backend accepts calls whose outputs are all empty
    function: Callable = functools.partial(_run_kernel_on_slice, op_call, entry)
    in_axes_per_vmap = op_call.in_axes_per_vmap
    if op_call.vmaps and op_call.vmaps[-1].batching_rule:
        function = functools.partial(_run_batching_rule, op_call, op_call.vmaps[-1])
        in_axes_per_vmap = in_axes_per_vmap[:-1]
    return _replay_vmaps(function, in_axes_per_vmap, ins, vmap_function)


def _check_lowerable(title: str, closed_jaxpr: Any) -> None:
    """Raise if a kernel has ordered effects, or uses traced values or vmap axes, which do not exist at lowering."""
    for x in closed_jaxpr.consts:
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"{title}: a kernel or a batching rule must not use traced values of its closure. Got {x!r:.80}. "
                "Pass the value as an operand: op(x, value, outs=...)."
            )
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    for effect in closed_jaxpr.effects:
        is_ordered = "Ordered" in type(effect).__name__  # when an op is lowered, JAX has no tokens for such effects
        axis = getattr(effect, "name", None)  # the effect of a collective has the name of its axis
        uses_vmap_axis = axis not in (None, *manual_axes)
        if is_ordered or uses_vmap_axis:
            raise NotImplementedError(
                f"{title}: a kernel must not have ordered effects, such as jax.debug.print(..., ordered=True), nor "
                f"use axes of a vmap. It has {effect}. Remove it, or call the generator's function instead of the op."
            )


def _run_batching_rule(op_call: _OpCall, vmap: _RecordedVmap, *ins: Any) -> list:
    """Return the outputs of the user's batching rule, with the batch axis in front."""
    subject = f"{op_call.op.title}: the batching rule"
    returned = vmap.batching_rule(ins, vmap.in_axes, **op_call.rule_params)
    outputs, axes = _checked_pair(subject, returned, "outputs, axes")
    if not isinstance(outputs, (list, tuple)):
        outputs, axes = [outputs], [axes]
    if not isinstance(axes, (list, tuple)) or len(outputs) != len(axes):
        raise ValueError(
            f"{subject} must return an axis for each output. It returned {_counted(len(outputs), 'output')} and the "
            f"axes {axes}. Return (outputs, [0] * len(outputs)) if the batch axes are in front."
        )
    in_front = [_batch_in_front(x, axis, vmap.size) for x, axis in zip(outputs, axes)]
    expected = dataclasses.replace(op_call, vmaps=(vmap,)).batched_out_specs
    return _checked_arrays(subject, in_front, "outs declares, with the batch axis in front,", expected)


def general_batching_rule(prim: Any, args: Sequence, axes: Sequence[int | None], /, **params: Any) -> tuple:
    """Batch an op, or a primitive that has no batching rule.

        general_batching_rule(prim, args, axes, **params) -> (outputs, output_axes)

    For an op, this is the default: the vmap is recorded, and the chosen backend batches its kernel.  For any other
    primitive or function, `jax.lax.map` runs the batch elements one after another.

    Args:
      prim: an `XLACustomKernel`, its `primitive`, another primitive, or a function of arrays.
      args: a sequence of operands.
      axes: the batch axis of each operand, or None for an unbatched operand.  At least one is not None.
      params: the parameters of the primitive.  An op needs `outs`, as specs of one batch element.

    Returns:
      The outputs, and the batch axis of each output, which is 0, in the same structure.

    Raises:
      TypeError: if `prim` is an op and `outs` is missing or is a function.

    Example:
      >>> out, axis = general_batching_rule(lambda x, y: x @ y, (np.ones((5, 3)), np.ones(3)), (0, None))
      >>> print(out.shape, axis)
      (5,) 0
    """
    vmap, ins = _record_vmap(args, axes)
    primitive = prim.primitive if isinstance(prim, XLACustomKernel) else prim
    if isinstance(primitive, _OpPrimitive):
        outs = params.get("outs")
        if outs is None or callable(outs):
            raise TypeError(
                f"general_batching_rule needs outs of {primitive.op.title}, as specs of one batch element. Got "
                f"{outs!r}. Pass outs=jax.ShapeDtypeStruct(shape, dtype)."
            )
        op_call = primitive.op._create_op_call(**params)
        outputs = op_call.out_tree.unflatten(op_call.under_vmap(vmap).bind(*ins))
    else:
        function = functools.partial(prim.bind if isinstance(prim, _Primitive) else prim, **params)
        outputs = _sequential_vmap(function, vmap.in_axes)(*ins)
    return outputs, jax.tree.map(lambda _: 0, outputs)


# -- 11.5 Kernels: from a registered kernel to the outputs of one slice --------------------------------


def _as_generator(title: str, backend: str, kg: Any, decorated_backend: str | None, options: dict) -> Callable:
    """Return a generator: the user's own, or one that returns a decorated kernel or wrapper."""
    _check_kernel_options(f"{title}: the kernel of backend {backend!r}", kg, decorated_backend, options)
    if decorated_backend or isinstance(kg, _Wrapper):
        return functools.partial(_generate_fixed_kernel, kg)
    advice = f"A plain function is a generator, which returns the kernel. {_kernel_advice(backend)}"
    return _adapt_user_function(kg, f"{title}: the generator of backend {backend!r}", advice)


_OPTIONS_WITHOUT_EFFECT = {  # {option of a wrapper that an op cannot use: why, and the fix}
    "outs": "Remove outs=, because each call of an op declares its outputs: op(x, outs=lambda x: x).",
    "has_side_effect": "JAX drops a call of an op if its outputs are unused. Call the wrapper itself instead of an op.",
    "differentiable": "Remove differentiable=, because the rules of an op define its derivatives. With "
    "f = warp_kernel(kernel, outs, differentiable=True), write op.def_vjp_rule(lambda *ins: jax.vjp(f, *ins), "
    "lambda vjp, ct: vjp(ct)).",
}


def _check_kernel_options(subject: str, kg: Any, decorated_backend: str | None, options: dict) -> None:
    """Raise if the options of a registration are not those of the wrapper of the kernel."""
    if not options:
        return
    for name, advice in _OPTIONS_WITHOUT_EFFECT.items():
        if options.get(name, False) is not False:
            raise TypeError(f"{subject} cannot have the option {name}. Got {name}={options[name]!r:.80}. {advice}")
    if decorated_backend is None:
        raise TypeError(
            f"{subject} takes no options, because it is not a decorated kernel. Got {', '.join(options)} with {kg!r}. "
            "Decorate the kernel, or pass the options to a wrapper: numba_kernel(kernel, outs, ...)."
        )
    wrap = _BACKENDS[decorated_backend].wrap
    try:
        inspect.signature(wrap).bind(kg, (), **options)  # () for `outs`, because only the names of options are checked
    except TypeError as error:
        raise TypeError(
            f"{subject} takes the options of {wrap.__name__}: {error}. Remove this option, or correct its name."
        ) from None


def _generate_fixed_kernel(kernel: Any, /, outs: tuple, **params: Any) -> Any:
    """Serve as the generator of a decorated kernel or a wrapper, which are the same for all static parameters."""
    if params:
        shown = ", ".join(params)
        raise TypeError(
            f"A decorated kernel or a wrapper takes no static parameters. Got {shown} for {kernel!r}. "
            f"Register a generator that creates the kernel: lambda {shown}: make_kernel({shown})."
        )
    return kernel


def _adapt_user_function(fun: Callable, subject: str, advice: str = "") -> Callable:
    """Return a rule or generator of the user that ignores the arguments `outs` and `backend` if it does not take them.

    `advice` is a fix for errors about its signature.
    """
    if not callable(fun):
        raise TypeError(f"{subject} must be a function. Got {fun!r}. Pass a function. {advice}".rstrip())
    parameters = inspect.signature(fun).parameters
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    ignored = set() if accepts_all else {"outs", "backend"} - parameters.keys()

    @functools.wraps(fun)
    def adapted(*args: Any, **params: Any) -> Any:
        for name in ignored & params.keys():
            del params[name]
        return _call_or_explain(fun, subject, advice, *args, **params)

    return adapted


def _call_or_explain(fun: Callable, subject: str, advice: str, /, *args: Any, **params: Any) -> Any:
    """Call a user's function.  If the arguments do not fit its signature, the error says so, and shows `advice`."""
    try:
        return fun(*args, **params)
    except TypeError:  # raised by the call, or in the body of `fun`
        _check_call_signature(inspect.signature(fun), subject, args, params, advice)
        raise


def _call_generated_function(function: Callable, subject: str, backend: str, ins: Sequence) -> Any:
    """Call the function of a generator.  If it may be a `kernel(x, out)` without its decorator, errors say so."""
    # A function with `__wrapped__`, such as `jax.vmap(f)`, may have another signature than `inspect` reports.
    is_plain_function = isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__")
    if is_plain_function and backend in _BACKENDS:
        return _call_or_explain(function, subject, _kernel_advice(backend), *ins)
    return function(*ins)


def _kernel_advice(backend: str) -> str:
    """Return the advice for a kernel that was registered where a generator is expected."""
    if backend in _BACKENDS:
        return f"If the function is a kernel, decorate it with {_BACKENDS[backend].decorator}."
    return "To register a function f of arrays, pass lambda: f."


def _run_kernel_on_slice(op_call: _OpCall, entry: KernelEntry, *ins: Any) -> list:
    """Return the outputs of a kernel for one slice, as a flat list."""
    subject = f"{op_call.op.title}: the kernel of backend {entry.backend!r} for platform {entry.platform!r}"
    # Inside `shard_map`, the generator may need the axes over which the outputs vary, for example for `pallas_call`.
    varying = _varying_kwargs(_all_varying_axes(map(jax.typeof, ins)))
    outs = tuple([_Spec(out.shape, out.dtype, **varying) for out in op_call.out_specs])
    try:
        function = _generated_function(entry, outs, op_call.params, _trace_context())
        returned = _call_generated_function(function, subject, entry.backend, ins)
    except Exception as error:
        others = [name for name in op_call.op.available_backends(entry.platform) if name != entry.backend]
        advice = f" To use another backend meanwhile, pass backend=, one of {', '.join(others)}." if others else ""
        error.add_note(f"Raised by {subject}, or by its generator.{advice}")
        raise
    return _checked_outputs(subject, returned, op_call)


@functools.lru_cache(maxsize=4096)
def _generated_function(
    entry: KernelEntry, outs: tuple[_Spec, ...], params: _StaticParams, trace_context: tuple
) -> Callable:
    """Call a generator, and return its function.  If the generator returns a decorated kernel, return its wrapper.

    The cache calls a generator once for equal arguments.  `trace_context` is one of them, because the constants that a
    generator creates depend on it.
    """
    with _evaluation_during_trace():
        function = entry.kernel_generator(**params, outs=outs)
        decorated_backend = _decorated_backend(function)
        if decorated_backend:
            function = _BACKENDS[decorated_backend].wrap(function, outs, **entry.options)
    if not callable(function):
        raise TypeError(
            f"A generator must return a decorated kernel, a wrapper, or a function of arrays. Got {function!r}. "
            f"{_kernel_advice(entry.backend)}"
        )
    if isinstance(function, _Wrapper) and function.options.has_side_effect:
        raise TypeError(
            f"A kernel of an op cannot have side effects. {function!r} has has_side_effect=True. "
            f"{_OPTIONS_WITHOUT_EFFECT['has_side_effect']}"
        )
    return function


@contextlib.contextmanager
def _evaluation_during_trace() -> Iterator[None]:
    """Let JAX evaluate operations at once, although it traces a function.  Other traces can then use the results.

    Inside `shard_map` over explicit axes, `jnp.ones` would get a manual sharding, which no array outside of a trace can
    have (an AssertionError in jax 0.9 to 0.12).  So manual axes look automatic here.  This is safe, because a generator
    gets only static arguments, and computes the same on each device.  `jax.lax.axis_index` raises an error here.
    """
    mesh = jax.sharding.get_abstract_mesh()
    without_manual = mesh.update_axis_types(dict.fromkeys(mesh.manual_axes, jax.sharding.AxisType.Auto))
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(without_manual):
        yield


# -- 11.6 Derivatives: rules for one slice -------------------------------------------------------------
# The user's JVP and transpose rules are for one slice.  If JAX applies them to a call with recorded vmaps, these vmaps
# are applied to the rule.  In the example of 11.4, a rule takes and returns arrays of shape [3]:
#
#     the JVP rule takes           x, w, and their tangents (in_axes 0, None, 0, None)
#     the JVP rule returns         out, and its tangent
#     the transpose rule takes     out's cotangent, x and w (in_axes 0, 0, None)
#     the transpose rule returns   the cotangents of x and w
#
# Outside of the vmap, the cotangent of w has the shape [8,3], one for each slice.  `_op_transpose` adds these up.


def _op_jvp(primals: Sequence, tangents: Sequence, *, _op_call: _OpCall) -> tuple:
    """Apply the op's JVP rule under the recorded vmaps."""
    op = _op_call.op
    apply_rule = op._rules.jvp
    if apply_rule is None:
        raise NotImplementedError(
            f"The derivative of an op needs a rule. {op.title} has no JVP rule. For grad, write "
            "op.def_vjp_rule(forward, backward). For jvp and grad, write op.def_jvp_rule2(rule, ...). To exclude an "
            "operand, pass jax.lax.stop_gradient(x)."
        )
    slice_call = dataclasses.replace(_op_call, vmaps=())
    n_primals = len(primals)

    def jvp_of_slice(*values: Any) -> tuple:
        return apply_rule(slice_call, values[:n_primals], values[n_primals:])

    in_axes_per_vmap = [(*in_axes, *in_axes) for in_axes in _op_call.in_axes_per_vmap]  # the tangents are batched alike
    outputs, tangents_out = _replay_vmaps(jvp_of_slice, in_axes_per_vmap, [*primals, *tangents])
    # `_apply_jvp_rule` returns None for zero.  `_sum_jvp_terms` returns a symbolic zero, with the shape of a slice.
    zero_types = (ad.Zero, type(None))
    return outputs, [_zero_tangent(x) if type(t) in zero_types else t for x, t in zip(outputs, tangents_out)]


def _apply_jvp_rule(rule: Callable, op_call: _OpCall, primals: Sequence, tangents: Sequence) -> tuple:
    """Return the outputs of one slice, and their tangents.  `rule` is the argument of `def_jvp_rule`."""
    subject = f"{op_call.op.title}: the JVP rule"
    returned = rule(primals, tangents, **op_call.rule_params)
    outputs, tangents_out = _checked_pair(subject, returned, "outputs, tangents")
    outputs = _checked_arrays(subject, jax.tree.leaves(outputs), "outs declares", op_call.out_specs)
    return outputs, _checked_tangents(subject, tangents_out, "the outputs are", map(jax.typeof, outputs))


def _apply_jvp_rule2(rules: Sequence, op_call: _OpCall, primals: Sequence, tangents: Sequence) -> tuple:
    """Return the outputs of one slice, and their tangents.  `rules` are the arguments of `def_jvp_rule2`."""
    outputs = op_call.bind(*primals)
    return outputs, _sum_jvp_terms(op_call.op.title, rules, primals, tangents, outputs, op_call.rule_params)


def _sum_jvp_terms(
    title: str, rules: Sequence, primals: Sequence, tangents: Sequence, outputs: Sequence, params: dict
) -> list:
    """Return the sum of the output tangents of the rules, which are one for each operand."""
    if len(rules) != len(primals):
        raise ValueError(
            f"{title}: each operand needs a JVP rule, or None. Got {len(rules)} JVP rules for {len(primals)} operands. "
            f"Pass {len(primals)} rules to def_jvp_rule2 or defjvp."
        )
    avals = list(map(jax.typeof, outputs))
    totals = list(map(_zero_tangent, outputs))
    for i, (rule, tangent) in enumerate(zip(rules, tangents)):
        if rule is None or type(tangent) is ad.Zero:
            continue
        subject = f"{title}: the JVP rule for operand {i}"
        terms = _checked_tangents(subject, rule(tangent, *primals, **params), "the outputs are", avals)
        totals = [t if term is None else ad.add_tangents(t, term) for t, term in zip(totals, terms)]
    return totals


def _op_transpose(cts: Sequence, *operands: Any, _op_call: _OpCall) -> list:
    """Apply the op's transpose rule under the recorded vmaps."""
    op = _op_call.op
    rule = op._rules.transpose
    if rule is None:
        raise NotImplementedError(
            f"`grad` transposes the operations that a JVP rule applies to tangents. {op.title} is one of them, and has "
            "no transpose rule. Define its def_transpose_rule(...), or compute the tangents with jax.numpy. Or give "
            "the op that has the JVP rule a def_vjp_rule(...) instead."
        )
    if all(type(ct) is ad.Zero for ct in cts):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    n_cts = len(cts)

    def transpose_of_slice(*values: Any) -> list:
        ct_slices, xs = list(values[:n_cts]), values[n_cts:]
        avals = [x.aval if ad.is_undefined_primal(x) else None for x in xs]
        returned = rule(ct_slices, *xs, **_op_call.rule_params)
        return _checked_tangents(f"{op.title}: the transpose rule", returned, "the operands are", avals)

    in_axes_per_vmap = [(*[0] * n_cts, *in_axes) for in_axes in _op_call.in_axes_per_vmap]  # each output is batched
    cts_out = _replay_vmaps(transpose_of_slice, in_axes_per_vmap, [*cts, *operands])
    for i, ct in enumerate(cts_out):
        if ct is not None:
            # The dimensions of the vmaps in which this operand is unbatched.
            summed_dims = [d for d, vmap in enumerate(_op_call.vmaps) if vmap.in_axes[i] is None]
            cts_out[i] = jax.lax.reduce_sum(ct, summed_dims)
    return cts_out


def _bind_with_vjp(op_call: _OpCall, ins: Sequence, fwd: Callable, bwd: Callable) -> list:
    """Bind the primitive with the op's VJP rule."""
    avals = list(map(jax.typeof, ins))
    params = op_call.rule_params
    fwd_subject = f"{op_call.op.title}: fwd of the VJP rule"
    bwd_subject = f"{op_call.op.title}: bwd of the VJP rule"

    def forward(*ins: Any) -> tuple:
        returned = fwd(*ins, **params)
        outputs, residuals = _checked_pair(fwd_subject, returned, "outputs, residuals (None if bwd needs none)")
        return _checked_outputs(fwd_subject, outputs, op_call), residuals

    def backward(residuals: Any, cotangents: Any) -> tuple:
        returned = bwd(residuals, op_call.out_tree.unflatten(cotangents), **params)
        return tuple(_checked_tangents(bwd_subject, returned, "the operands are", avals))

    return _with_vjp(op_call.bind, forward, backward)(*ins)


def defjvp(primitive: Any, *jvp_rules: Callable | None) -> None:
    """Define the JVP rule of an op or a primitive as one function for each operand.

        rule(tangent, *primals, **params) -> output tangents

    Args:
      primitive: an `XLACustomKernel`, its `primitive`, or another JAX primitive.
      jvp_rules: a function for each operand, or None for a zero derivative.  The function returns the contribution of
        the operand's tangent to the tangents of the outputs: an array for one output, otherwise a list or tuple, with
        None for zero.  It is called only if the operand is differentiated.  `params` is described in
        `XLACustomKernel.def_jvp_rule`.  For another primitive, it holds the parameters of the primitive.

    Raises:
      TypeError: if `primitive` is neither an op nor a primitive.

    Example:
      >>> op = XLACustomKernel("multiply")
      >>> _ = op.def_kernel("jax", "cpu", lambda: lambda x, y: x * y)
      >>> defjvp(op, lambda t, x, y: t * y, lambda t, x, y: x * t)
      >>> print(jax.grad(lambda x: op(x, 3.0, outs=lambda x, y: x))(2.0))
      3.0
    """
    if isinstance(primitive, _OpPrimitive):
        primitive = primitive.op
    if isinstance(primitive, XLACustomKernel):
        primitive.def_jvp_rule2(*jvp_rules)
    elif isinstance(primitive, _Primitive):
        ad.primitive_jvps[primitive] = functools.partial(_primitive_jvp, primitive, jvp_rules)
    else:
        raise TypeError(
            f"defjvp takes an XLACustomKernel or a jax Primitive. Got {primitive!r}. For a function, use "
            "jax.custom_jvp."
        )


def _primitive_jvp(primitive: Any, rules: Sequence, primals: Any, tangents: Any, /, **params: Any) -> tuple:
    """Apply the rules of `defjvp` to a primitive that is not an op."""
    returned = primitive.bind(*primals, **params)
    outputs = returned if primitive.multiple_results else [returned]
    tangents_out = _sum_jvp_terms(f"Primitive {primitive.name!r}", rules, primals, tangents, outputs, params)
    return returned, tangents_out if primitive.multiple_results else tangents_out[0]


# -- 11.7 Checks of the results of kernels and rules ---------------------------------------------------


def _checked_outputs(subject: str, returned: Any, op_call: _OpCall) -> list:
    """Return the outputs of a kernel or rule as a flat list of arrays, or raise if they do not match `outs`.

    The containers may differ from those of `outs`, except dicts: JAX sorts their keys, so other dicts may hold the
    outputs in another order.  The structures must be equal if `outs` has a dict, or if a returned dict has several
    leaves.
    """
    leaves, structure = jax.tree.flatten(returned)
    must_match_exactly = _contains_dict(op_call.out_tree) or (_contains_dict(structure) and len(leaves) > 1)
    if must_match_exactly and structure != op_call.out_tree:
        raise ValueError(
            f"{subject} returned {structure}, but outs declares {op_call.out_tree}. Where one of them has a "
            "dict, the other one needs a dict with the same keys. Return what outs declares, or use tuples in both."
        )
    return _checked_arrays(subject, leaves, "outs declares", op_call.out_specs, ", or correct outs")


def _checked_pair(subject: str, returned: Any, expected: str) -> Any:
    """Return the pair that a rule returned, or raise if it is not a pair."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise TypeError(f"{subject} must return a pair. Got {returned!r:.80}. Return {expected}.")
    return returned


def _checked_arrays(
    subject: str, returned: Sequence, expected_phrase: str, expected: Sequence, advice: str = ""
) -> list:
    """Return the values that a kernel or rule returned, as arrays.  Raise if their number, shapes or dtypes are wrong.

    A value of None is the zero of a rule, and has no shape or dtype to check.  An expected spec of None allows any
    value, and is shown as `any`.  With the phrase "the outputs are" and the advice ", or None for zero", an error is:

        XLACustomKernel 'f': the JVP rule returned (float32[2], None), but the outputs are (float32[3], any). Return
        (float32[3], any), or None for zero.
    """

    def fits(array: Any, spec: Any) -> bool:
        return array is None or spec is None or (array.shape, array.dtype) == (spec.shape, spec.dtype)

    # JAX arrays are kept as they are, because `asarray` truncates 64 bits.
    arrays = [x if x is None or isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in returned]
    if len(arrays) == len(expected) and all(map(fits, arrays, expected)):
        return arrays
    shown = map(_format_spec, arrays)
    wanted = ["any" if spec is None else _format_spec(spec) for spec in expected]
    raise ValueError(
        f"{subject} returned ({', '.join(shown)}), but {expected_phrase} ({', '.join(wanted)}). Return "
        f"({', '.join(wanted)}){advice}."
    )


def _checked_tangents(subject: str, returned: Any, expected_phrase: str, avals: Iterable) -> list:
    """Return the tangents or cotangents that a rule returned as arrays, with None for those that are zero or not used.

    value of the rule                  aval                result
    float32[3]                         float32[3]          the array, sharded like the aval
    None, ad.Zero, undefined primal    float32[3]          None, for zero
    any                                int32[3] or None    None, because JAX uses no derivative here
    """
    if not isinstance(returned, (list, tuple)):
        returned = [returned]
    values = [None if isinstance(x, _SYMBOLIC_TYPES) else x for x in returned]
    used_avals = [aval if aval and jax.dtypes.issubdtype(aval.dtype, np.inexact) else None for aval in avals]
    arrays = _checked_arrays(subject, values, expected_phrase, used_avals, ", or None for zero")
    return [None if x is None or aval is None else _sharded_like(x, aval) for x, aval in zip(arrays, used_avals)]


# -- 11.8 Timing ---------------------------------------------------------------------------------------


class _BenchmarkRow(NamedTuple):
    backend: str
    first_ms: float = math.nan
    median_us: float = math.nan
    difference: float = math.nan
    error: str = ""


class _OpBenchmark(NamedTuple):
    """The result of `XLACustomKernel.benchmark`."""

    rows: list[_BenchmarkRow]

    def __repr__(self) -> str:
        lines = ["backend         first (ms)   median (us)  difference"]
        for backend, first, median, difference, error in self.rows:
            lines.append(f"{backend:<14}{first:>12.2f}{median:>14.2f}  {error or f'{difference:.3g}'}")
        return "\n".join(lines)


def _time_calls(function: Callable, args: Sequence) -> tuple[float, float]:
    """Return the time of the first call and the median of further calls, in seconds."""
    timer = timeit.Timer(lambda: jax.block_until_ready(function(*args)))
    first_s = timer.timeit(1)
    n_repetitions = int(np.clip(0.2 / timer.timeit(1), 5, 10_000))  # about 0.2 s in all, unless calls are slow
    return first_s, float(np.median(timer.repeat(n_repetitions, 1)))


def _max_difference(outputs: Any, reference: Any) -> float:
    """Return the maximum absolute difference.  Equal infinities, and NaNs in the same place, do not differ."""
    maxima = [0.0]
    for leaves in zip(jax.tree.leaves(outputs), jax.tree.leaves(reference)):
        x, y = [np.asarray(leaf, complex) for leaf in leaves]  # bools cannot be subtracted
        differs = ~np.isclose(x, y, 0, 0, equal_nan=True)
        maxima.append(np.max(np.abs(x[differs] - y[differs]), initial=0.0))
    return np.max(maxima)


# ======================================================================================================
# 12. Backends: what each needs, and how it wraps decorated kernels; and the self-check, python -m xla_kernels.


class _Backend(NamedTuple):
    """A backend whose kernels have a decorator.  An op may have other backends, with any names."""

    install_hints: dict[str, str]  # {platform: how to install the backend for it}
    kernel_classes: tuple[str, ...]  # of decorated kernels, as "top-level package.Class", so nothing is imported
    decorator: str  # for error messages
    wrap: Callable  # (decorated kernel, outs, **options) -> wrapper
    make_check: Callable[[], Any]  # returns a wrapper that computes 2 * x + y, for the self-check


def _make_numba_cuda_check() -> Callable:
    """Return a wrapper of Numba CUDA for the self-check."""
    package = "numba_cuda_mlir" if importlib.util.find_spec("numba_cuda_mlir") else "numba"
    cuda = _import(f"{package}.cuda", "the check of numba_cuda", _CUDA_INSTALL)

    @cuda.jit
    def kernel(x: Any, y: Any, out: Any) -> None:
        i = cuda.grid(1)
        if i < out.size:
            out[i] = 2 * x[i] + y[i]

    return numba_cuda_kernel(kernel, outs=lambda x, y: x, launch_dims=lambda x, y: x.shape)


def _make_warp_check() -> Callable:
    """Return a wrapper of Warp for the self-check."""
    wp = _import("warp", "the check of warp", _WARP_INSTALL)

    def kernel(x, y, out):  # type: ignore[no-untyped-def]
        i = wp.tid()
        out[i] = 2.0 * x[i] + y[i]

    # `wp` is a local variable, so annotations in the source would not find it.
    kernel.__annotations__ = dict.fromkeys(("x", "y", "out"), wp.array(dtype=wp.float32))
    return warp_kernel(wp.kernel(kernel), outs=lambda x, y: x)


_BACKENDS = {
    "numba": _Backend(
        install_hints={"cpu": _NUMBA_INSTALL},
        kernel_classes=("numba.Dispatcher", "numba.DUFunc", "numba.GUFunc"),
        decorator="@numba.njit",
        wrap=numba_kernel,
        make_check=lambda: numba_kernel(lambda x, y: 2 * x + y, outs=lambda x, y: x),
    ),
    "warp": _Backend(
        install_hints={"cpu": _WARP_INSTALL, "gpu": 'an NVIDIA GPU, pip install "jax[cuda13]" warp-lang numba'},
        kernel_classes=("warp.Kernel",),
        decorator="@wp.kernel",
        wrap=warp_kernel,
        make_check=_make_warp_check,
    ),
    "numba_cuda": _Backend(
        install_hints={"gpu": f"an NVIDIA GPU, {_CUDA_INSTALL}"},
        kernel_classes=(
            "numba.CUDADispatcher",
            "numba.FakeCUDAKernel",
            "numba_cuda.CUDADispatcher",
            "numba_cuda.FakeCUDAKernel",
            "numba_cuda_mlir.MLIRDispatcher",
        ),
        decorator="@cuda.jit",
        wrap=numba_cuda_kernel,
        make_check=_make_numba_cuda_check,
    ),
}


def _self_check() -> int:
    """Run `2 * x + y` on each backend, and print the results.

    Returns:
      The exit status: 1 if a backend fails whose packages can be imported, otherwise 0.
    """
    print(f"xla_kernels {__version__}, Python {sys.version.split()[0]}, jax {jax.__version__}, NumPy {np.__version__}")
    print(f"platform {jax.default_backend()}, {jax.device_count()} device(s)\n")
    status = 0
    for name, backend in _BACKENDS.items():
        for platform, install_hint in backend.install_hints.items():
            try:
                report = f"works, {_check_and_time(backend, platform):.2f} µs per call under jit"
            except ImportError as error:
                report = f"not available: {error}\n{' ' * 17}to get it: {install_hint}"
            except Exception as error:
                status = 1
                report = f"FAILED: {type(error).__name__}: {error}"
            print(f"{name:11} {platform:4} {report}")
    return status


def _check_and_time(backend: _Backend, platform: str) -> float:
    """Compare the results of a backend with NumPy's, and return the time of a call in a loop, in microseconds.

    Raises:
      ImportError: if the backend or the platform is missing.
    """
    devices = _local_devices(platform)
    if not devices:
        raise ImportError(f"JAX finds no {platform}")
    kernel = backend.make_check()
    x = np.arange(16, dtype=np.float32)
    y = x + 1
    operands = jax.device_put((x, y), devices[0])
    np.testing.assert_array_equal(kernel(*operands), 2 * x + y)
    n_calls = 10_000
    loop = jax.jit(lambda x, y: jax.lax.fori_loop(0, n_calls, lambda i, z: kernel(y, z), x))
    _, median_s = _time_calls(loop, operands)
    return 1e6 * median_s / n_calls


# ======================================================================================================
# 13. Warnings about Warp kernels: gradients that Warp gets wrong, and deferred statics.
#
# Section 10 calls `_warn_of_wrong_gradients` and `_warn_of_deferred_static`.  Nothing else uses 13.1 and 13.2, so they
# can be deleted together with these two calls.  Checked with Warp 1.14, 1.16, 1.18 and 1.19.


# -- 13.1 Gradients that Warp gets wrong ---------------------------------------------------------------
# The adjoint of a function is the function that Warp generates to compute its gradients.  It has two passes:
#
# 1. Forward: it repeats the function, without stores to arrays, and without dynamic loops.  A loop is dynamic if Warp
#    does not unroll it: it has a `break`, no constant length, or more than `max_unroll` iterations.
# 2. Backward: it goes back through the statements, and computes gradients from the values of the variables.  At a
#    dynamic loop, it goes through the iterations, those of a `for` backwards and those of a `while` forwards.  It
#    repeats each iteration, and then computes its gradients.
#
# So some variables have wrong values in the second pass.  Warp does not warn of this.  For example:
#
#     s = float(1.0)
#     for j in range(x.shape[0]):
#         s = s * x[j]
#
# The gradient of the factor x[j] is the old `s` times the gradient of the new `s`.  The repeated iteration has
# overwritten the old `s`, so the adjoint uses the new one.  Before the first repeated iteration, `s` is 1, because the
# adjoint has skipped the loop until then.  For x = (2, 3, 5):
#
#     iteration                             j = 2        j = 1         j = 0
#     gradient of the new `s`               1            1 * 5 = 5     5 * 3 = 15
#     old `s`, which the gradient needs     2 * 3 = 6    2             1
#     right gradient of x[j]                6 * 1 = 6    2 * 5 = 10    1 * 15 = 15
#     new `s`, which the adjoint uses       1 * 5 = 5    5 * 3 = 15    15 * 2 = 30
#     gradient by the adjoint               5 * 1 = 5    15 * 5 = 75   30 * 15 = 450
#
# A sum such as `s += x[j]` is correct, because its adjoint uses no values.  But a loop with `break` may be wrong even
# for a sum.  In a `for`, the adjoint starts at the end of the range, and goes back only to the `break`.
#
# Values that are wrong in the adjoint are called stale here:
#
# - the variables that a dynamic loop assigns: after the loop, and in each iteration until they are assigned
# - the elements of an array that are read before the last store to it, because the adjoint reads the final elements.
#   `out[i] = ...` and `out[i] += ...` count as stores, `wp.atomic_add` does not.
# - all that is computed from stale values
#
# Values that are computed from inputs with gradients are called active.  The values that the adjoint of an operation
# uses are its residuals.
#
# `_GradientCheck` finds the operations whose adjoints use stale values.  It does not find:
#
# - random numbers in dynamic loops, whose state is stale
# - `continue` in unrolled loops (Warp < 1.19)
# - elements of arrays in structs, and elements that are read, and changed later by an atomic operation, a called
#   function, or an earlier line in the next iteration:
#
#       for j in range(9):
#           out[j] = y[j]
#           s += out[j + 1] * out[j + 1]
#
# It may warn needlessly about an element that is read before a store to another element, a `break` in a loop without
# gradients, a loop that Warp unrolls because of a `wp.static`, and some `while` loops.  The tests compare its verdicts
# with JAX and finite differences on CPUs.

_CHECKED_KERNELS: Any = weakref.WeakSet()  # kernels that were checked already; the result is the same for all calls

# Builtins without an adjoint in Warp (`is_differentiable` is false) whose derivatives are not zero, such as those of
# `randf(state, low, high)` with respect to its bounds.  Chosen by hand.
_WITHOUT_ADJOINT = frozenset(
    "frac randf store atomic_exch atomic_cas tile_max tile_min tile_reduce tile_sort tile_full tile_from_thread "
    "tile_scan_inclusive tile_scan_exclusive tile_scan_max_inclusive tile_scan_min_inclusive tile_diag_add "
    "tile_cholesky_inplace tile_cholesky_solve tile_cholesky_solve_inplace tile_lower_solve tile_lower_solve_inplace "
    "tile_upper_solve tile_upper_solve_inplace".split()
)
_ATOMIC_SUMS = ("atomic_add", "atomic_sub")

# The advice of the warnings.  {} is `max_unroll`.
_STALE_ADVICE = (
    "If a loop assigns it, give the loop a constant length of at most {}. If it counts the iterations of a `while`, "
    "write a `for`. If the loop only adds, move it into a wp.func that returns the sum. If it is read from an output, "
    "store to this output only once."
)
_BREAK_ADVICE = (
    "If the length of the loop is a constant of at most {}, write `running = False` instead of `break`, and put the "
    "other statements under `if running:`. Otherwise, write `for j in range(count(x, i)):`, where the wp.func `count` "
    "returns the number of iterations. Ignore warnings about `count`: an int has no gradient."
)
_ATOMIC_ADVICE = (
    "If you do not need the old value, do not assign the result. If only one thread updates the element, add in a "
    "local variable, and store it at the end. Otherwise, compute this part in JAX, before or after the kernel."
)
_NO_ADJOINT_ADVICE = "Replace it by functions with an adjoint, or compute this part in JAX, before or after the kernel."


class _GradientCheck:
    """A search of a kernel or helper of Warp for operations whose adjoints are wrong.

    `check_block` goes through statements in their order, and adds to `problems`.  For example, after the loop above, in
    a kernel with the arrays `x` and `out`:

        active    {"x", "out", "s"}    # `s` is computed from `x`
        stale     {"s", "j"}           # the loop assigns them
    """

    def __init__(self, function: Any, active_parameters: set[str], max_unroll: int) -> None:
        self.filename = function.adj.filename
        self.first_line = function.adj.fun_lineno
        self.max_unroll = max_unroll  # Warp unrolls loops of at most this constant number of iterations
        self.problems: dict[str, str] = {}  # {line: text of a warning about its first problem}
        # {captured or local variable: its value, or None if it is not constant}
        self.constants = _referenced_variables(_py_func(function))
        self.stale: set[str] = set()  # the stale variables, without arrays
        self.arrays = {arg.label for arg in function.adj.args if _is_array_type(arg.type)}  # never in `stale`
        nodes = [node for node in ast.walk(function.adj.tree) if isinstance(node, (ast.Assign, ast.AugAssign))]
        assignments = [(_assigned_names(node), node) for node in nodes]
        self.last_stores = dict.fromkeys(self.arrays, 0)  # {array: line of its last store, or 0}
        for names, node in assignments:
            for array in names & self.arrays:
                self.last_stores[array] = max(self.last_stores[array], node.end_lineno or 0)
        self.active = active_parameters.copy()  # and all variables that are computed from them
        n_before = 0
        while n_before != len(self.active):  # repeat until no variable is added
            n_before = len(self.active)
            for names, node in assignments:
                if self.is_active(node.value):
                    self.active |= names - self.arrays

    def check_block(self, statements: Iterable[ast.stmt]) -> None:
        """Check the operations of statements, one after the other, and update the stale variables."""
        for node in statements:
            if isinstance(node, ast.AugAssign):  # `x += y` is `x = x + y`
                new_value = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
                node = ast.Assign([node.target], new_value)
            # The test of a `while` is checked here, before the variables that its loop assigns become stale.  It is
            # right in the adjoint, which goes through the iterations from the first one on.
            self.check_operations(node)
            match node:
                case ast.Assign(targets=[target], value=value):
                    self.assign(target, value)
                case ast.If(body=body, orelse=orelse):
                    stale_before = self.stale.copy()
                    constants_before = self.constants.copy()
                    self.check_block(body)
                    stale_after_body = self.stale
                    self.stale = stale_before
                    self.constants = constants_before
                    self.check_block(orelse)
                    self.stale |= stale_after_body
                    self.constants |= dict.fromkeys(_assigned_names(node))  # the values depend on the branch
                case ast.For() | ast.While():
                    self.check_loop(node)
                case ast.Break():
                    self.report(node, "is wrong in a loop with", _BREAK_ADVICE)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Update the stale variables and the constants after an assignment."""
        variables = _assigned_names(target) - self.arrays
        if self.find_stale(value):
            self.stale |= variables
        elif isinstance(target, (ast.Name, ast.Tuple)):  # if `v[0]` is assigned, the rest of `v` may be stale
            self.stale -= variables
        self.constants |= dict.fromkeys(variables)
        if isinstance(target, ast.Name):
            self.constants[target.id] = self.constant(value)

    def check_loop(self, loop: ast.For | ast.While) -> None:
        """Check the body of a loop once, or, if Warp unrolls the loop, once for each index."""
        indices = self.unrolled_indices(loop)
        assigned: set[str] = set()
        if indices is None:
            indices = [None]  # of a dynamic loop, one iteration is checked, in which the index is not constant
            assigned = _assigned_names(loop) - self.arrays
        for index in indices:
            self.stale |= assigned  # at the start of an iteration
            self.constants |= dict.fromkeys(assigned)
            match loop:
                case ast.For(target=ast.Name(id=variable)):
                    self.stale.discard(variable)
                    self.constants[variable] = index
            self.check_block(loop.body)
        self.stale |= assigned  # after the loop

    def unrolled_indices(self, loop: ast.For | ast.While) -> Sequence | None:
        """Return the indices of a loop that Warp unrolls, or None for a dynamic loop.

        Loops with `break` are not distinguished.  The `break` is reported, and other problems once it is removed.
        """
        if isinstance(loop, ast.While) or not isinstance(loop.iter, ast.Call):
            return None
        # If a bound is not constant, the step is 0, or the length exceeds `sys.maxsize`, there is an exception.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            indices = range(*map(self.constant, loop.iter.args))  # Warp accepts no other function than `range`
            if len(indices) <= self.max_unroll:
                return indices
        return None

    def constant(self, node: ast.expr) -> Any:
        """Return the value of a number or constant variable, otherwise None.  As in Warp, `2 * 2` has no value."""
        try:
            return ast.literal_eval(node)
        except ValueError:
            return _captured_value(node, self.constants)

    def check_operations(self, statement: ast.stmt) -> None:
        """Report the operations of a statement whose adjoints are wrong.  Nested statements are not included."""
        expressions = [x for x in ast.iter_child_nodes(statement) if isinstance(x, ast.expr)]
        for node in [statement, *itertools.chain(*map(ast.walk, expressions))]:
            if isinstance(node, ast.Call) and self.is_active(node):
                name = self.builtin_name(node)
                if name in _WITHOUT_ADJOINT:
                    self.report(node, "takes 0 for the derivative of", _NO_ADJOINT_ADVICE)
                # An atomic sum has an adjoint for the value that it adds, but not for the old value that it returns.
                uses_result = not (isinstance(statement, ast.Expr) and statement.value is node)
                if name in _ATOMIC_SUMS and uses_result:
                    self.report(node, "takes 0 for the derivative of the result of", _ATOMIC_ADVICE)
            for value in self.residuals(node):
                if stale := self.find_stale(value):
                    self.report(node, f"uses a wrong value of {stale!r} in", _STALE_ADVICE)

    def report(self, node: Any, problem: str, advice: str) -> None:
        """Add a problem, unless its line has one already.  For example:

        Warp's adjoint uses a wrong value of 's' in `s * x[j]` (line 9 of kernels.py). If a loop assigns it, ...
        """
        line = f"line {node.lineno + self.first_line - 1} of {self.filename}"
        source = ast.unparse(node).partition("\n")[0]  # of an `if` or a loop, the first line
        text = f"Warp's adjoint {problem} `{source:.60}` ({line}). {advice.format(self.max_unroll)}"
        self.problems.setdefault(line, text)

    def residuals(self, node: ast.AST) -> list[ast.expr]:
        """Return the residuals of a statement or expression: the parts whose values its adjoint uses.

        Other parts may be stale without harm.  Tests and indices come first, because they are also checked in inactive
        expressions.  An index is a residual of its own subscript only: `x[n[j]]` has `n[j]`, and `n[j]` has `j`.
        """
        match node:
            case ast.If(test=x) | ast.While(test=x) | ast.IfExp(test=x) | ast.For(iter=x) | ast.Subscript(slice=x):
                return [x]
            case ast.expr() if not self.is_active(node):
                return []  # it has no gradient
            case ast.BinOp(left=left, op=ast.Mult() | ast.MatMult(), right=right):
                # adj_left += adj * right, and adj_right += adj * left: an active factor needs the other one's value.
                return [other for factor, other in ((left, right), (right, left)) if self.is_active(factor)]
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                # adj_left += adj / right, and adj_right -= adj * left / right**2.
                return [left, right] if self.is_active(right) else [right]
            case ast.Call() if self.builtin_name(node) in _ATOMIC_SUMS:
                return node.args[1:-1]  # only the indices, between the array and the added value
            case ast.Call() if self.builtin_name(node) == "where":
                return node.args[:1]  # the condition
            case ast.Call() if isinstance(_captured_value(node.func, self.constants), type):
                return []  # casts and constructors of vectors are linear
            case ast.BinOp(op=ast.Pow()) | ast.Call():
                return [node]  # `find_stale` searches all its operands
        return []  # sums, negation, `%`, comparisons and other nodes, whose adjoints use no values

    def builtin_name(self, node: ast.Call) -> str:
        return _builtin_name(_callee(node.func, self.constants))

    def is_active(self, node: ast.AST) -> bool:
        """Return whether an expression is computed from values with gradients."""
        return not self.active.isdisjoint(_operand_names(node))

    def find_stale(self, node: ast.AST) -> str:
        """Return a stale variable or element from which an expression is computed, or an empty string."""
        for part in _operands(node):
            match part:
                case ast.Name(id=name) if name in self.stale:
                    return name
                case ast.Subscript(value=ast.Name(id=name)) if part.lineno <= self.last_stores.get(name, 0):
                    return ast.unparse(part)  # an element of an output, read before the last store to it
        return ""


def _operands(node: ast.AST) -> Iterator[ast.AST]:
    """Yield an expression and its parts, without indices, and without x in `x.shape`."""
    if isinstance(node, ast.Attribute) and node.attr in _ARRAY_METADATA:
        return
    yield node
    for child in [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node):
        yield from _operands(child)


def _operand_names(node: ast.AST) -> set[str]:
    return {x.id for x in _operands(node) if isinstance(x, ast.Name)}


def _assigned_names(node: ast.AST) -> set[str]:
    """Return the variables that a statement assigns as a whole or in part: {"a"} for `a.b[i].c = 1.0`."""
    return _union(_operand_names(x) for x in ast.walk(node) if isinstance(getattr(x, "ctx", None), ast.Store))


def _warn_of_wrong_gradients(kernel: Any, float_arrays: set[str], title: str) -> None:
    """Warn of the operations of a kernel and its helpers whose adjoints are wrong, once for each kernel.

    `float_arrays` are the parameters of the kernel that are arrays of floats.  They are the same in all calls.
    """
    if kernel in _CHECKED_KERNELS:
        return
    is_int = sys.modules["warp"].types.type_is_int
    problems = {}
    for function in _warp_analysis(kernel).analyses:  # the kernel and its helpers
        active_parameters = float_arrays
        if function is not kernel:  # any parameter of a helper may have a gradient, except integers
            dtypes = {arg.label: getattr(arg.type, "dtype", arg.type) for arg in function.adj.args}
            active_parameters = {name for name, dtype in dtypes.items() if not is_int(dtype)}
        check = _GradientCheck(function, active_parameters, _warp_options(kernel)["max_unroll"])
        check.check_block(function.adj.tree.body[0].body)
        problems.update(check.problems)
    _CHECKED_KERNELS.add(kernel)
    for problem in problems.values():
        warnings.warn(
            f"{title}: the gradient may be wrong. {problem} To check the gradient of a function f that calls "
            'this kernel: import jax.test_util; jax.test_util.check_grads(f, args, order=1, modes=["rev"], eps=1e-3).',
            skip_file_prefixes=_INTERNAL_FILE_PREFIXES,
        )


# -- 13.2 Deferred statics -----------------------------------------------------------------------------


def _warn_of_deferred_static(kernel: Any, title: str) -> None:
    """Warn if Warp may run the code of another kernel instead, because the two differ only in a deferred static.

    A `wp.static` is deferred if it uses the variable of a loop.  Warp evaluates it when it builds the module:

        def make(table):
            @wp.kernel
            def f(out: wp.array(dtype=float)):
                for j in range(2):
                    out[j] = wp.static(table[j])     # a deferred static
            return f

        f, g = make((1.0, 2.0)), make((3.0, 4.0))    # kernels of one module

    Before it builds them, it hashes the kernels.  The hash covers neither the values of deferred statics nor objects
    such as the tuple `table`.  So `f` and `g` have the same hash, and Warp builds only one of the two, and adds
    the values to the `adj.deferred_static_expressions` of this one.  The other kernel may run its code, also with
    `wp.launch`.

    The caller has called `_current_kernel_key`, so that `has_unresolved_static_expressions` is up to date.  There may
    be a warning without need if the kernels also differ in a value that Warp hashes, such as a captured number.
    """
    has_deferred_statics = kernel.adj.has_unresolved_static_expressions
    was_built = bool(kernel.adj.deferred_static_expressions)
    if not has_deferred_statics or was_built:
        return
    with _WARP_LOCK:
        same_source = [other for other in kernel.module._get_live_kernels() if other.adj.source == kernel.adj.source]
    if len({_captured_key(other.func) for other in same_source}) > 1:
        warnings.warn(
            f"{title} may run the code of another kernel. Warp takes kernels of one module for the same kernel if they "
            "differ only in the value of a wp.static in a loop, and another kernel of this module differs only in "
            'captured values. Decorate these kernels with @wp.kernel(module="unique").',
            skip_file_prefixes=_INTERNAL_FILE_PREFIXES,
        )


def _captured_key(function: Any) -> tuple:
    """Return a key of the values that a function captures, except for Warp functions, which Warp hashes itself."""
    values = _captured_values(function)
    return tuple((name, _exact_text(value) or id(value)) for name, value in values if not hasattr(value, "adj"))


# ======================================================================================================
# The end of the file.  The self-check of section 12 runs after all definitions, because it uses all sections.

if __name__ == "__main__":
    sys.exit(_self_check())
