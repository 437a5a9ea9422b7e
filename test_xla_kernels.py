"""Tests of xla_kernels: the matrix of operations, backends and transformations, and everything that broke elsewhere."""

import ast
import builtins
import collections
import contextlib
import ctypes
import dataclasses
import decimal
import doctest
import enum
import errno
import functools
import gc
import importlib.util
import inspect
import itertools
import json
import linecache
import math
import operator
import os
import pathlib
import pickle
import re
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
import traceback
import types
import typing
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy as shallow_copy
from copy import deepcopy
from functools import partial
from operator import methodcaller
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest
from jax import export
from jax.experimental import checkify
from jax.interpreters import ad, batching, mlir

import conftest
import xla_kernels as xk
from conftest import x64

try:
    from numba import cuda
except ImportError:  # numba-cuda is too old for NumPy
    cuda = None
if not conftest.SIMULATOR and getattr(cuda, "implementation", "Built-in") == "Built-in":  # without numba-cuda
    with contextlib.suppress(ImportError):
        from numba_cuda_mlir import cuda
cuda_float32 = np.float32 if "mlir" in getattr(cuda, "__name__", "") else numba.float32  # the simulator takes no dtype
try:
    import warp as wp
except ImportError:
    wp = None
try:
    from jax.experimental import pallas as pl
except ImportError:  # it needs absl with old versions of jax
    pl = None


# ======================================================================================================
# The matrix: operations x backends x transformations x dtypes, each a table here.
# Every cell runs a kernel: as it is and compares it with NumPy, or transformed and compares it with plain JAX.
# At the end of a run, conftest.py prints which cells passed.
#
# To add an operation: a class, and a row of OPS.  A transformation: a function, and a row of TRANSFORMS.
# A backend: a function that wraps a kernel, and a row of BACKENDS; of another language, also a row of LANGUAGES; and
# one of PACKAGES in conftest.py, where it needs a package that no other test does.
# ======================================================================================================


class Dtype(typing.NamedTuple):
    tolerance: float = 0.0  # relative
    needs_x64: bool = False  # JAX has it only with jax_enable_x64


DTYPES = {
    "bool": Dtype(),
    "int8": Dtype(),
    "int16": Dtype(),
    "int32": Dtype(),
    "int64": Dtype(needs_x64=True),
    "uint8": Dtype(),
    "uint16": Dtype(),
    "uint32": Dtype(),
    "uint64": Dtype(needs_x64=True),
    "float16": Dtype(1e-2),
    "bfloat16": Dtype(5e-2),
    "float32": Dtype(1e-5),
    "float64": Dtype(1e-12, needs_x64=True),
    "complex64": Dtype(1e-5),
    "complex128": Dtype(1e-12, needs_x64=True),
}
NUMBERS = tuple(DTYPES)[1:]
ONE_OF_EACH_KIND = ("int32", "float32", "float64", "complex64")


def random_array(rng, shape, dtype):
    """Normally distributed numbers, or small integers."""
    if dtype.kind in "biu":
        return rng.integers(0, 2 if dtype.kind == "b" else 5, shape).astype(dtype)
    numbers = rng.standard_normal(shape)
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.standard_normal(shape)
    return numbers.astype(dtype)


def arrays(*shapes):
    """Makes the inputs of an operation: arrays of these shapes."""

    def inputs(rng, dtype):
        return [random_array(rng, shape, dtype) for shape in shapes]

    return inputs


# -- the operations ------------------------------------------------------------------------------------
# `reference` computes the operation, with NumPy or with JAX as its inputs are; it may be a ufunc.
# `element` is the body of a kernel that writes element i (or i, j, k) of the outputs, in all languages;
# `numba`, `cuda`, `warp`, `jax` and `pallas` are whole kernels, where that does not do.
# `differentiate` gives an op its rules, where the derivative of the reference does not do.

# What an `element` may use besides its arguments; `matrix_kernel` gives them their values.
Scalar = None  # makes a number of the outputs' dtype
where = None  # where(condition, a, b)
alpha = None  # the static parameter of the call


class Reversed:
    def reference(x):
        return x[::-1]

    def element(i, x, out):
        out[i] = x[x.shape[0] - 1 - i]


class Add:
    reference = np.add

    def element(i, x, y, out):
        out[i] = x[i] + y[i]


class LeakyRelu:
    def reference(x, alpha):
        return x * (x > 0) + x.dtype.type(alpha) * x * (x <= 0)

    def element(i, x, out):
        out[i] = where(x[i] > Scalar(0.0), x[i], Scalar(alpha) * x[i])


class Hadamard:
    reference = np.multiply

    def element(i, j, x, y, out):
        out[i, j] = x[i, j] * y[i, j]

    def differentiate(op):
        """The derivative and the transpose are the operation itself, on the backend of the call."""

        def of_x(tangent, x, y, **params):
            return op(tangent, y, **params)

        def of_y(tangent, x, y, **params):
            return op(x, tangent, **params)

        op.def_jvp_rule2(of_x, of_y)

        @op.def_transpose_rule
        def transpose(cotangents, x, y, **params):
            (cotangent,) = cotangents
            if ad.is_undefined_primal(x):
                return *op(cotangent, y, **params), None
            return None, *op(x, cotangent, **params)


class Matvec:
    reference = operator.matmul

    def element(i, a, x, out):
        total = Scalar(0.0)
        for j in range(x.shape[0]):
            total += a[i, j] * x[j]
        out[i] = total


class Outer:
    def reference(x, y):
        return x[:, None] * y

    def element(i, j, x, y, out):
        out[i, j] = x[i] * y[j]


class Transposed:
    def reference(x):
        return x.T

    def element(i, j, k, x, out):
        out[i, j, k] = x[k, j, i]


class CsrEvent:
    """The sum of the rows of a sparse matrix that spike, and how many do."""

    rows, columns = 12, 9

    def inputs(rng, dtype):
        counts = rng.integers(0, 5, CsrEvent.rows)
        indptr = np.append(0, counts.cumsum()).astype(np.int32)
        row_indices = [rng.choice(CsrEvent.columns, count, replace=False) for count in counts]
        indices = np.concatenate(row_indices).astype(np.int32)
        return [random_array(rng, indices.size, dtype), indices, indptr, rng.random(CsrEvent.rows) < 0.5]

    def reference(data, indices, indptr, spikes):
        elements, columns = np.arange(indices.size), np.arange(CsrEvent.columns)
        in_row = (indptr[:-1, None] <= elements) & (elements < indptr[1:, None])
        in_column = indices[:, None] == columns
        return (spikes @ in_row * data) @ in_column.astype(data.dtype), spikes.sum(keepdims=True).astype(np.int32)

    def numba(data, indices, indptr, spikes, out, count):
        for i in range(spikes.size):  # rows share columns, so not parallel
            if spikes[i]:
                count[0] += 1
                for k in range(indptr[i], indptr[i + 1]):
                    out[indices[k]] += data[k]

    def cuda(data, indices, indptr, spikes, out, count):
        i = cuda.grid(1)
        if i < spikes.size and spikes[i]:
            cuda.atomic.add(count, 0, 1)
            for k in range(indptr[i], indptr[i + 1]):
                cuda.atomic.add(out, indices[k], data[k])

    def warp(data, indices, indptr, spikes, out, count):
        i = wp.tid()
        if spikes[i]:
            wp.atomic_add(count, 0, 1)
            for k in range(indptr[i], indptr[i + 1]):
                wp.atomic_add(out, indices[k], data[k])

    def jax(data, indices, indptr, spikes):
        first, stop = indptr[:-1], indptr[1:]
        steps = (spikes & (first < stop)).astype(np.int32)
        steps = jnp.zeros(data.size + 1, np.int32).at[first].add(steps).at[stop].add(-steps)
        active = steps.cumsum()[:-1]
        out = jnp.zeros(CsrEvent.columns, data.dtype).at[indices].add(data * active)
        return out, jnp.count_nonzero(spikes, keepdims=True).astype(np.int32)

    def pallas(data, indices, indptr, spikes, out, count):
        out[...] = jnp.zeros_like(out)
        count[...] = jnp.zeros_like(count)

        def add_element(k, _):
            out[indices[k]] += data[k]

        def add_row(i, _):
            stop = jnp.where(spikes[i], indptr[i + 1], indptr[i])
            jax.lax.fori_loop(indptr[i], stop, add_element, None)
            count[0] += spikes[i].astype(np.int32)

        jax.lax.fori_loop(0, spikes.size, add_row, None)


class Lif:
    def reference(v, current):
        u = v + (current - v) * v.dtype.type(0.1)
        return u * (u <= 1), u > 1

    def element(i, v, current, new_v, spikes):
        u = v[i] + (current[i] - v[i]) * Scalar(0.1)
        spikes[i] = u > Scalar(1.0)
        new_v[i] = where(u > Scalar(1.0), Scalar(0.0), u)


class InPlace:
    def reference(v, current):
        return v + (current - v) * v.dtype.type(0.1)

    def element(i, v, current, out):
        out[i] = out[i] + (current[i] - out[i]) * Scalar(0.1)


class Blend:
    reference = InPlace.reference

    def element(i, v, current, out, work):
        work[i] = (out[i] - v[i]) * Scalar(0.1)
        out[i] = v[i] + work[i]


class Op(typing.NamedTuple):
    """An operation of the matrix."""

    kernels: type  # its kernels and its reference
    inputs: Callable  # (rng, dtype) -> NumPy arrays
    dtypes: tuple = ("float32", "float64")  # those of "eager" and "vmap"; the other transformations have float32
    state: bool = False  # the first output can be the first input of the next step
    threads: tuple | None = None  # where there is not one for each element of the first output
    params: typing.Any = types.MappingProxyType({})  # static parameters of the call
    options: typing.Any = types.MappingProxyType({})  # of the wrappers


OPS = {
    "reversed": Op(Reversed, arrays(9), tuple(DTYPES)),  # computes nothing
    "add": Op(Add, arrays(9, 9), NUMBERS, state=True),
    "leaky_relu": Op(LeakyRelu, arrays(9), state=True, params={"alpha": 0.25}),  # a static parameter
    "hadamard": Op(Hadamard, arrays((3, 5), (3, 5)), ONE_OF_EACH_KIND, state=True),  # two dimensions
    "matvec": Op(Matvec, arrays((6, 6), 6)),  # inputs of different ranks
    "outer": Op(Outer, arrays(4, 3)),  # an output like no input
    "transposed": Op(Transposed, arrays((2, 3, 4))),  # three dimensions
    "csr_event": Op(  # integers, bool, atomics, outputs of two shapes
        CsrEvent, CsrEvent.inputs, threads=(CsrEvent.rows,), options={"zero_outputs": True}
    ),
    "lif": Op(Lif, arrays(9, 9), state=True),  # outputs of two dtypes
    "in_place": Op(InPlace, arrays(9, 9), state=True, options={"input_output_aliases": {0: 0}}),
    "blend": Op(  # starts as the input that vmap shares
        Blend, arrays(9, 9), state=True, options={"input_output_aliases": {1: 0}, "scratch": lambda v, current: v}
    ),
}


# -- languages, and what a kernel of each is made of ---------------------------------------------------


def numba_loops(indices, out):
    for axis, index in enumerate(indices):
        loop = "range" if axis else "numba.prange"
        yield f"for {index} in {loop}({out}.shape[{axis}]):"


def cuda_thread(indices, out):
    yield f"{', '.join(indices)} = cuda.grid({len(indices)})"
    inside = [f"{index} < {out}.shape[{axis}]" for axis, index in enumerate(indices)]
    yield f"if {' and '.join(inside)}:"


def warp_thread(indices, out):
    yield f"{', '.join(indices)} = wp.tid()"


def choose(condition, a, b):
    return a if condition else b


def annotated(kernel, arrays):
    kernel.__annotations__.update({name: xk.jaxinfo_to_warpinfo(x) for name, x in arrays.items()})
    return wp.kernel(kernel, module="unique")


class Language(typing.NamedTuple):
    """How `matrix_kernel` makes a kernel of an `element`."""

    start: Callable | None  # (indices, out) -> the lines before the element's; None: JAX traces it as it is
    where: Callable  # () -> `where`
    lacks: tuple = ()  # dtypes that it has no arrays of
    scalar: Callable = operator.attrgetter("type")  # dtype -> `Scalar`
    finish: Callable = lambda kernel, arrays: kernel  # (a Python function, the specs of its parameters) -> the kernel


COMPLEX = ("complex64", "complex128")
NOT_IN_WARP = COMPLEX if hasattr(wp, "bfloat16") else (*COMPLEX, "bfloat16")
LANGUAGES = {
    "numba": Language(numba_loops, functools.cache(lambda: numba.njit(choose)), ("float16", "bfloat16")),
    "cuda": Language(cuda_thread, functools.cache(lambda: cuda.jit(device=True)(choose)), ("bfloat16",)),
    "warp": Language(warp_thread, lambda: wp.where, NOT_IN_WARP, lambda d: xk.jaxtype_to_warptype(d), annotated),
    "pallas": Language(None, lambda: jnp.where, COMPLEX),
    "jax": Language(None, lambda: jnp.where),
}


def dtypes_of(language):
    """The names of the dtypes that kernels in a language have arrays of."""
    return [name for name in DTYPES if name not in LANGUAGES[language].lacks]


def reference_of(name):
    """The reference of an operation; a ufunc is NumPy's or JAX's, as its inputs are."""
    reference = OPS[name].kernels.reference
    if not isinstance(reference, np.ufunc):
        return partial(reference, **OPS[name].params)

    def ufunc(*inputs):
        library = jnp if isinstance(inputs[0], jax.Array) else np
        return getattr(library, reference.__name__)(*inputs)

    return ufunc


@functools.cache
def specs_of(name, dtype):
    """Of the inputs, the outputs and the scratch of an operation."""
    op = OPS[name]
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in op.inputs(np.random.default_rng(0), dtype)]
    outs = jax.tree.leaves(jax.eval_shape(reference_of(name), *inputs))
    scratch = jax.tree.leaves(op.options.get("scratch", lambda *inputs: [])(*inputs))
    return inputs, outs, scratch


@functools.cache
def matrix_kernel(name, language, dtype, **params):
    """The kernel of an operation in a language."""
    start, make_where, _, scalar, finish = LANGUAGES[language]
    op, specs = OPS[name], specs_of(name, dtype)
    body = getattr(op.kernels, language, None) or op.kernels.element
    namespace = globals() | {"Scalar": scalar(dtype), "where": make_where(), **params}
    if start is None:
        return types.FunctionType(body.__code__, namespace)
    parameters = list(inspect.signature(body).parameters)
    arrays = parameters[-sum(map(len, specs)) :]
    indices, out = parameters[: -len(arrays)], arrays[len(specs[0])]
    head = [f"def {op.kernels.__name__}({', '.join(arrays)}):"]
    if indices:
        head += start(indices, out)
    source = source_of(head, body)
    file = f"<{name} in {language}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Warp reads it there
    exec(compile(source, file, "exec"), namespace)
    return finish(namespace[op.kernels.__name__], dict(zip(arrays, itertools.chain(*specs), strict=True)))


def source_of(head, body):
    """These lines, and below them the statements of a function."""
    lines, depth = [], 0
    for line in head:
        lines.append(" " * depth + line)
        depth += line.endswith(":")
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(body))).body
    for statement in function.body:
        lines.append(textwrap.indent(ast.unparse(statement), " " * depth))
    return "\n".join(lines) + "\n"


# -- backends: functions of an operation, its kernel and `outs` that return what JAX calls -------------

numba_jit = functools.cache(numba.njit)


def in_numba(op, kernel, outs, parallel=False):
    return xk.numba_kernel(numba_jit(kernel, parallel=parallel), outs, **op.options)


def in_warp(op, kernel, outs):
    return xk.warp_kernel(kernel, outs, launch_dims=op.threads or outs[0].shape, **op.options)


def grid_and_block(op, outs):
    """Of small blocks, as Numba's simulator starts all threads."""
    dims = op.threads or outs[0].shape
    block = {1: (8,), 2: (2, 4), 3: (2, 2, 2)}[len(dims)]
    return tuple(-(-size // threads) for size, threads in zip(dims, block)), block


def in_cuda(op, kernel, outs):
    grid, block = grid_and_block(op, outs)
    return xk.numba_cuda_kernel(kernel, outs, grid=grid, block=block, **op.options)


def in_cuda_callable(op, kernel, outs):
    """Python that launches the kernel."""
    grid, block = grid_and_block(op, outs)
    compiled = cuda.jit(kernel)

    def launch(*arrays_and_stream):
        *arrays, stream = arrays_and_stream
        compiled[grid, block, stream](*arrays)

    return xk.numba_cuda_callable(launch, outs, **op.options)


class Cell:
    """An output of which one element is seen."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, index):
        return self.value

    def __setitem__(self, index, value):
        self.value = value


def in_jax(op, element, outs):
    """All elements by a vmap over their indices."""

    def kernel(*inputs):
        starts = [jnp.zeros(x.shape, x.dtype) for x in with_scratch(op, outs)]
        for i, j in op.options.get("input_output_aliases", {}).items():
            starts[j] = inputs[i]

        def at(indices, starts):
            cells = list(map(Cell, starts))
            element(*indices, *inputs, *cells)
            return [cell.value.astype(out.dtype) for cell, out in zip(cells, outs)]

        indices = [index.ravel() for index in jnp.indices(outs[0].shape)]
        results = jax.vmap(at)(indices, [start.ravel() for start in starts])
        return [result.reshape(out.shape) for result, out in zip(results, outs)]

    return element if hasattr(op.kernels, "jax") else kernel


def with_scratch(op, outs):
    """The outputs and the scratch, which is like the first output."""
    return [*outs, *outs[: len(op.options.keys() & {"scratch"})]]


def in_pallas(op, element, outs):
    """A program for each element, interpreted."""

    def kernel(*refs):
        element(*[pl.program_id(axis) for axis in range(outs[0].ndim)], *refs)

    whole = hasattr(op.kernels, "pallas")
    options = {"grid": () if whole else outs[0].shape, "interpret": True}
    options["input_output_aliases"] = dict(op.options.get("input_output_aliases", {}))
    call = pl.pallas_call(element if whole else kernel, with_scratch(op, outs), **options)
    return lambda *inputs: call(*inputs)[: len(outs)]


class Backend(typing.NamedTuple):
    language: str  # in which its kernels are written: a row of LANGUAGES
    needs: str  # what must be there: see conftest.CONDITIONS
    wrap: Callable  # (op, kernel, outs) -> a function of the inputs
    without: typing.Any = types.MappingProxyType({})  # transformation: why this backend cannot have it


SHARD_MAPS = ("shard_map", "eager_shard_map", "grad_of_shard_map", "shard_map_of_grad")
NO_SHARD_MAP = dict.fromkeys(SHARD_MAPS, "Pallas does not interpret under check_vma=True")
BACKENDS = {
    "numba": Backend("numba", "numba", in_numba),  # on the CPU, in one thread
    "numba_parallel": Backend("numba", "numba", partial(in_numba, parallel=True)),
    "numba_cuda": Backend("cuda", "cuda", in_cuda),  # a GPU, or Numba's simulator
    "numba_cuda_callable": Backend("cuda", "cuda", in_cuda_callable),
    "warp": Backend("warp", "warp", in_warp),  # on the CPU
    "warp_gpu": Backend("warp", "warp_gpu", in_warp),
    "pallas": Backend("pallas", "pallas", in_pallas, NO_SHARD_MAP),
    "jax": Backend("jax", "jax", in_jax),
}


def refuse(outs, **params):
    raise AssertionError("a call that lost its backend")


@functools.cache
def custom_kernel(name):
    """The operation with every backend, each for the platform on which this machine can run it."""
    op = xk.XLACustomKernel(name)
    for platform in ("cpu", "gpu"):
        op.def_kernel("none", platform, refuse)  # the default, as it is the first: a cell must get what it asks for
    for backend in BACKENDS:
        generator = partial(generate, name, backend)
        op.def_kernel(backend, conftest.platform_of([BACKENDS[backend].needs]), generator)
    differentiate = getattr(OPS[name].kernels, "differentiate", partial(differentiate_reference, name))
    differentiate(op)
    return op


def generate(name, backend, outs, **params):
    """What `XLACustomKernel.def_kernel` takes, for each backend: a function of `outs` and the static parameters."""
    language, _, wrap, _ = BACKENDS[backend]
    return wrap(OPS[name], matrix_kernel(name, language, outs[0].dtype, **params), outs)


def differentiate_reference(name, op):
    """The results are the kernel's; their tangents are those of the reference."""

    @op.def_jvp_rule
    def jvp(primals, tangents, **params):
        tangents = tuple(zero_tangent(x) if isinstance(t, ad.Zero) else t for x, t in zip(primals, tangents))
        _, tangents_out = jax.jvp(reference_of(name), tuple(primals), tangents)
        tangents_out = [None if t.dtype == jax.dtypes.float0 else t for t in jax.tree.leaves(tangents_out)]
        return op(*primals, **params), tangents_out


def zero_tangent(x):
    return np.zeros(x.shape, x.dtype if is_real(x) else jax.dtypes.float0)


def is_real(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


# -- the transformations -------------------------------------------------------------------------------


class Transformations:
    """Programs of an operation: functions of `call`, inputs, and a batch of eight slices of each, that return arrays.

    `call` returns a list of arrays: those of a kernel, or, with the reference, what is right.
    """

    def eager(call, inputs, batch):
        return call(*inputs)

    def jit(call, inputs, batch):
        return jax.jit(call)(*inputs)

    def without_jit(call, inputs, batch):
        with jax.disable_jit():
            return call(*inputs)

    def vmap(call, inputs, batch):
        return over_first(call, inputs)(batch[0], *inputs[1:])

    def vmap_every_input(call, inputs, batch):
        return jax.vmap(call)(*batch)

    def vmap_other_axes(call, inputs, batch):
        last = [jnp.moveaxis(x, 0, -1) for x in batch]
        return jax.vmap(call, in_axes=-1, out_axes=-1)(*last)

    def vmap_nested(call, inputs, batch):
        return jax.jit(all_pairs(call, inputs))(batch[0], *[x[:2] for x in batch[1:]])

    def vmap_of_nothing(call, inputs, batch):
        return over_first(call, inputs)(batch[0][:0], *inputs[1:])

    def lax_map(call, inputs, batch):
        """Batches of slices, and what is left over."""
        return jax.lax.map(lambda x: call(x, *inputs[1:]), batch[0][:5], batch_size=2)

    def scan(call, inputs, batch):
        return jax.jit(partial(scan_slices, call))(batch[0][:4], *inputs[1:])

    def loop_of_state(call, inputs, batch):
        return jax.jit(partial(last_state, call))(*inputs)

    def while_loop(call, inputs, batch):
        """Until the results of a slice no longer follow from the step."""

        def step(i_and_results):
            i, _ = i_and_results
            return i + 1, call(jnp.asarray(batch[0])[i], *inputs[1:])

        @jax.jit
        def run(first):
            return jax.lax.while_loop(lambda i_and_results: i_and_results[0] < 4, step, (1, first))

        return run(call(*inputs))

    def cond(call, inputs, batch):
        @jax.jit
        def chosen(second):
            return jax.lax.cond(second, lambda: call(batch[0][1], *inputs[1:]), lambda: call(*inputs))

        return chosen(True), chosen(False)

    def shard_map(call, inputs, batch):
        split = over_devices(over_first(call, inputs), inputs)
        return jax.jit(split)(batch[0], *inputs[1:])

    def eager_shard_map(call, inputs, batch):
        return over_devices(over_first(call, inputs), inputs)(batch[0], *inputs[1:])

    def jit_over_mesh(call, inputs, batch):
        """XLA splits the batch."""
        first = jax.device_put(batch[0], jax.sharding.NamedSharding(mesh_of_four(), SPLIT))
        return jax.jit(over_first(call, inputs))(first, *inputs[1:])

    def jvp(call, inputs, batch):
        return jax.jvp(call, inputs, tuple(x[1] if is_real(x) else zero_tangent(x[1]) for x in batch))

    def grad(call, inputs, batch):
        return gradient(call, inputs)(*inputs)

    def grad_of_vmap(call, inputs, batch):
        """The gradient of the shared input adds up those of the slices."""
        return jax.jit(gradient(over_first(call, inputs), inputs))(batch[0], *inputs[1:])

    def grad_of_nested_vmap(call, inputs, batch):
        return jax.jit(gradient(all_pairs(call, inputs), inputs))(batch[0], *[x[:2] for x in batch[1:]])

    def vmap_of_grad(call, inputs, batch):
        return jax.jit(over_first(gradient(call, inputs), inputs))(batch[0], *inputs[1:])

    def grad_of_scan(call, inputs, batch):
        return jax.jit(gradient(partial(scan_slices, call), inputs))(batch[0][:4], *inputs[1:])

    def grad_of_shard_map(call, inputs, batch):
        """The gradient of the replicated input adds up those of the devices."""
        split = over_devices(over_first(call, inputs), inputs)
        return jax.jit(gradient(split, inputs))(batch[0], *inputs[1:])

    def shard_map_of_grad(call, inputs, batch):
        """The cotangent of a replicated input is summed over the devices."""
        gradients = gradient(over_first(call, inputs), inputs)
        out_specs = (SPLIT, *[REPLICATED for x in inputs[1:] if is_real(x)])
        return jax.jit(over_devices(gradients, inputs, out_specs))(batch[0], *inputs[1:])

    def jvp_of_grad(call, inputs, batch):
        """Forward over reverse: the change of the gradients in a direction."""
        return Transformations.jvp(jax.jit(gradient(call, inputs)), inputs, batch)

    def checkpoint(call, inputs, batch):
        """Computes again in the backward pass."""
        return jax.jit(gradient(jax.checkpoint(call), inputs))(*inputs)

    def export(call, inputs, batch):
        """Serialized and read again; test_export_and_reload does so in a new process."""
        return read_exported(export_here(call, *inputs))(*inputs)


def over_first(call, inputs, **options):
    """A vmap over the first input, with the others shared."""
    return jax.vmap(call, (0, *[None] * (len(inputs) - 1)), **options)


def over_others(call, inputs, **options):
    return jax.vmap(call, (None, *[0] * (len(inputs) - 1)), **options)


def all_pairs(call, inputs):
    """Slices of the first input, with each slice of the others."""
    return over_others(over_first(call, inputs), inputs, axis_size=2)


def scan_slices(call, batch, *others):
    return jax.lax.scan(lambda _, x: (None, call(x, *others)), None, batch)[1]


def last_state(call, state, *others):
    return [jax.lax.fori_loop(0, 3, lambda _, state: call(state, *others)[0], state)]


def default_platform():
    """Of JAX, "cpu" or "gpu"."""
    return (jax.config.jax_default_device or jax.devices()[0]).platform


def mesh_of_four():
    devices = jax.devices(default_platform())
    if len(devices) < 4:
        pytest.skip("needs four devices")
    return jax.sharding.Mesh(np.array(devices[:4]), "i")


SPLIT, REPLICATED = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()


def over_devices(call, inputs, out_specs=SPLIT):
    """A call on four devices: each has its part of the first input, and the others whole."""
    in_specs = (SPLIT, *[REPLICATED] * (len(inputs) - 1))
    return jax.shard_map(call, mesh=mesh_of_four(), in_specs=in_specs, out_specs=out_specs)


def gradient(call, inputs, total=jnp.sum):
    """The gradients by all inputs of real numbers, of the sum of sines of what a call gives, which is not linear."""

    def sum_of_sines(*inputs):
        return sum(jnp.sin(result).sum() for result in call(*inputs) if is_real(result))

    return jax.grad(sum_of_sines, [i for i, x in enumerate(inputs) if is_real(x)])


def exported_for(platform, function, *args):
    """A function exported for a platform, on which it need not run."""
    jax.eval_shape(function, *args)  # registers the targets, which `export_checks` names
    checks = [*xk.export_checks(), export.DisabledSafetyCheck.platform()]
    return export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)(*args)


def export_here(call, *inputs):
    """The bytes of a call exported for the platform on which it runs here."""
    platform = {"cpu": "cpu", "gpu": "cuda"}[default_platform()]
    return exported_for(platform, call, *inputs).serialize()


def read_exported(serialized):
    return export.deserialize(bytearray(serialized)).call


class Transform(typing.NamedTuple):
    every_dtype: bool = False
    needs_state: bool = False


TRANSFORMS = {
    "eager": Transform(every_dtype=True),
    "jit": Transform(),
    "without_jit": Transform(),
    "vmap": Transform(every_dtype=True),
    "vmap_every_input": Transform(),
    "vmap_other_axes": Transform(),
    "vmap_nested": Transform(),
    "vmap_of_nothing": Transform(),
    "lax_map": Transform(),
    "scan": Transform(),
    "loop_of_state": Transform(needs_state=True),
    "while_loop": Transform(),
    "cond": Transform(),
    "shard_map": Transform(),
    "eager_shard_map": Transform(),
    "jit_over_mesh": Transform(),
    "jvp": Transform(),
    "grad": Transform(),
    "grad_of_vmap": Transform(),
    "grad_of_nested_vmap": Transform(),
    "vmap_of_grad": Transform(),
    "grad_of_scan": Transform(),
    "grad_of_shard_map": Transform(),
    "shard_map_of_grad": Transform(),
    "jvp_of_grad": Transform(),
    "checkpoint": Transform(),
    "export": Transform(),
}


# -- the cells -----------------------------------------------------------------------------------------


def left_out(op, backend, transformation):
    """Why there is no such cell, or None."""
    if TRANSFORMS[transformation].needs_state and not OPS[op].state:
        return "its first output is not its next first input"
    kernels, language = OPS[op].kernels, BACKENDS[backend].language
    if not (hasattr(kernels, language) or hasattr(kernels, "element")):
        return f"{op} has no kernel in {language}"
    return BACKENDS[backend].without.get(transformation)


def all_cells():
    """Neighbours share what is right."""
    for transformation, op in itertools.product(TRANSFORMS, OPS):
        dtypes = ["float32"]
        if TRANSFORMS[transformation].every_dtype:
            dtypes = OPS[op].dtypes
        for dtype, backend in itertools.product(dtypes, BACKENDS):
            if dtype in dtypes_of(BACKENDS[backend].language):
                yield op, backend, transformation, dtype


def aligned_copy(x):
    """A copy at an address that XLA needs no copy for, so that a kernel could write to it."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def inputs_and_batch(op, dtype):
    """The inputs of an operation, and eight slices of each that differ."""
    inputs = OPS[op].inputs(np.random.default_rng(0), np.dtype(dtype))
    batch = [np.stack([np.roll(x, k) for k in range(8)]) for x in inputs]
    return tuple(map(aligned_copy, inputs)), tuple(map(aligned_copy, batch))


def call_and_reference(name, backend, dtype="float32"):
    """The operation on a backend, and its reference: functions of arrays that return lists."""

    def reference(*inputs):
        return jax.tree.leaves(reference_of(name)(*inputs))

    def call(*inputs):
        _, outs, _ = specs_of(name, np.dtype(dtype))
        return custom_kernel(name)(*inputs, outs=outs, backend=backend, **OPS[name].params)

    return call, reference


@functools.cache
def what_is_right(op, transformation, dtype):
    """By NumPy for the kernel as it is, else by JAX, compiled as one."""
    _, reference = call_and_reference(op, None)
    program = partial(getattr(Transformations, transformation), reference)
    if transformation != "eager":
        program = jax.jit(program)
    return program(*inputs_and_batch(op, dtype))


def check_close(results, expected, tolerance):
    for result, array in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert (result.shape, result.dtype) == (array.shape, array.dtype)
        if array.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(result, array, rtol=tolerance, atol=tolerance)


def marked(cell):
    """A cell as a parameter: one that is left out is a skip, so that its reason shows in the grid."""
    reason = left_out(*cell[:3])
    return pytest.param(*cell, marks=[pytest.mark.skip(reason=reason)] if reason else [])


@pytest.mark.parametrize("op, backend, transformation, dtype", list(map(marked, all_cells())))
def test_matrix(op, backend, transformation, dtype):
    call, _ = call_and_reference(op, backend, dtype)
    arrays = inputs_and_batch(op, dtype)
    before = jax.tree.map(np.copy, arrays)
    with x64(DTYPES[dtype].needs_x64):
        expected = what_is_right(op, transformation, dtype)
        results = getattr(Transformations, transformation)(call, *arrays)
    check_close(results, expected, DTYPES[dtype].tolerance)
    jax.tree.map(np.testing.assert_array_equal, arrays, before)


@pytest.mark.processes
@pytest.mark.needs("compiler")
def test_matrix_in_the_simulator(tmp_path, record_property):
    """Which Numba decides on when it is imported."""
    path = tmp_path / "cells"
    tests = "test_matrix and -numba_cuda"
    run_pytest("-k", tests, f"--cells-out={path}", NUMBA_ENABLE_CUDASIM="1", JAX_PLATFORMS="cpu")
    outcomes = json.loads(path.read_text())
    passed = [cell for cell, outcome in outcomes if outcome == "passed"]
    skipped = [cell[:3] for cell, outcome in outcomes if outcome != "passed"]
    assert {op for op, *_ in passed} == OPS.keys()
    assert all(left_out(*cell) for cell in skipped)
    record_property("simulated", passed)


# ======================================================================================================
# The package: README, imports, vendored copies, several processes
# ======================================================================================================

ROOT = pathlib.Path(__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_python(*args, cwd=ROOT, timeout=900, rc=0, **environment):
    """Run Python in a fresh process that must end with `rc`; returns its output, or fails with it."""
    search_path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, search_path)), "PYTHONUTF8": "1"}
    environment = {**os.environ, **paths, **environment}
    command = [sys.executable, *map(str, args)]
    pipes = {"capture_output": True, "encoding": "utf-8", "timeout": timeout}
    process = subprocess.run(command, cwd=cwd, env=environment, **pipes)
    assert process.returncode == rc, (
        f"exit code {process.returncode}\n{process.stdout[-4000:]}\n{process.stderr[-4000:]}"
    )
    return process.stdout


README_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

README_PRINTS = {  # a function that a block of the README defines: what the block needs, and all that it prints
    "cumulative_max": ("numba", """
        [1. 3. 3.]
        [[2. 2. 2.]
         [5. 5. 5.]]
        """),
    "with_warp": ("warp", """
        [1. 3. 5. 7.] [1. 3. 5. 7.]
        [[3. 1. 1. 1.]
         [1. 3. 1. 1.]
         [1. 1. 3. 1.]
         [1. 1. 1. 3.]]
        [ 4. 12. 20. 28.]
        scale_add on cpu
        backend ... first (ms) ... median (us) ... difference
        numba ... 0
        warp ... 0
        XLACustomKernel('scale_add')
          cpu: numba (default), warp
          gpu: warp (default)
          rules: jvp
        """),
    "cuba": ("numba", """
        5... Hz, ... µs per step
        """),
    "decay": ("numba", """
        (Array([1.9, 0.9, 1.9], dtype=float32), Array(2, dtype=int32))
        """),
    "smoothed": ("gcc", """
        [1. 1. 1.]
        [[2. 1. 0.]
         [1. 1. 1.]
         [0. 1. 2.]]
        """),
    "error_function": ("cffi libm", """
        [[0. ... 0.8427...]
         [0.9953... 0.9999...]]
        """),
    "square_kernel": ("numba", """
        P...('d',) False
        """),
}  # fmt: skip


def readme_block(function):
    return next(block for block in README_BLOCKS if f"def {function}(" in block)


@pytest.mark.parametrize("function", [
    pytest.param(name, marks=pytest.mark.needs(*needs.split())) for name, (needs, _) in README_PRINTS.items()
])  # fmt: skip
def test_readme_blocks_print_what_they_should(function, tmp_path, monkeypatch, capsys):
    assert len(README_BLOCKS) == len(README_PRINTS), "say in README_PRINTS what each block prints"
    _, expected = README_PRINTS[function]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")  # which one of them sets, as the first thing in a process
    pathlib.Path("block.py").write_text(readme_block(function), encoding="utf-8")
    runpy.run_path("block.py", run_name="__main__")
    printed = capsys.readouterr().out
    expected = textwrap.dedent(expected).lstrip()
    assert doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS), printed


def test_readme_installs_extras_that_exist():
    """pip only warns of others."""
    named = set(",".join(re.findall(r"\.\[([\w,]+)\]", README)).split(","))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"warp", "test", "cuda13"} <= named <= extras.keys()


BACKENDS_LOAD_ON_USE = """
import sys, jax.numpy as jnp, xla_kernels

def loaded():
    return sorted({"numba", "warp", "llvmlite", "cuda"} & sys.modules.keys())

def kernel(x, out):
    out[:] = x

print(loaded())
copy = xla_kernels.numba_kernel(kernel, lambda x: x)
sys.modules["numba"] = None  # cannot be imported
try:
    copy(jnp.ones(3))
except ImportError as error:
    print(error)
del sys.modules["numba"]
print(copy(jnp.ones(3)), loaded())
"""


@pytest.mark.processes
def test_backends_load_on_use_and_a_missing_one_is_explained():
    at_import, error, after_use = run_python("-c", BACKENDS_LOAD_ON_USE).splitlines()
    assert at_import == "[]"
    assert re.fullmatch(r"numba_kernel needs numba \(.*None in sys.modules\); install it: pip install numba.*", error)
    assert after_use == "[1. 1. 1.] ['llvmlite', 'numba']"


def docstring_examples():
    """Those of Warp need it, the others do not."""
    for examples in doctest.DocTestFinder().find(xk):
        source = "".join(example.source for example in examples.examples)
        if source:
            marks = [pytest.mark.needs("warp")] if re.search(r"\b(wp|warp)\b|_warp", source) else []
            yield pytest.param(examples, id=examples.name, marks=marks)


@pytest.mark.parametrize("examples", list(docstring_examples()))
def test_docstring_examples(examples):
    assert doctest.DocTestRunner().run(examples).failed == 0


WORKS = r"works, [\d.]+ µs per call under jit"


@pytest.mark.processes
@pytest.mark.parametrize("numba_computes, args, rc, numba_says", [
    ("2 * x[i] + y[i]", ["my_kernels.py"], 0, WORKS),
    ("3 * x[i] + y[i]", ["-m", "my_kernels"], 1, "FAILED: AssertionError"),  # wrong; Warp still works
], ids=["right", "wrong"])  # fmt: skip
def test_self_check_of_the_file_alone(numba_computes, args, rc, numba_says, tmp_path):
    """Under another name, in an empty folder."""
    text = (ROOT / "xla_kernels.py").read_text(encoding="utf-8")
    text = text.replace("out[i] = 2 * x[i] + y[i]", f"out[i] = {numba_computes}")
    (tmp_path / "my_kernels.py").write_text(text, encoding="utf-8")
    report = run_python(*args, cwd=tmp_path, rc=rc, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    warp_says = "not available: " if conftest.missing("warp") else WORKS
    assert re.search(f"^numba +cpu +{numba_says}", report, re.MULTILINE), report
    assert re.search(f"^warp +cpu +{warp_says}", report, re.MULTILINE), report


# -- export: a fresh process that traces the same kernels finds them under the same names --------------

EXPORTED = ("leaky_relu", "csr_event")  # with a static parameter, and with an output that starts as zeros


def exported_calls():
    """(name, call, reference, inputs) with those backends that run here."""
    for op, (backend, (_, needs, *_)) in itertools.product(EXPORTED, BACKENDS.items()):
        if not conftest.missing(needs):
            inputs, _ = inputs_and_batch(op, "float32")
            with conftest.computing_for([needs]):
                yield f"{op}-{backend}", *call_and_reference(op, backend), inputs
    if not conftest.missing("warp"):
        yield "structs-warp", call_every, every_in_jax, EVERY


def check_exported(folder):
    """In the fresh process."""
    for name, call, reference, inputs in exported_calls():
        jax.jit(call).lower(*inputs)
        exported = pathlib.Path(folder, name).read_bytes()
        check_close(read_exported(exported)(*inputs), reference(*inputs), 1e-5)
        print(name)


@pytest.mark.processes
def test_export_and_reload(tmp_path):
    """Also where Python hashes text in another way."""
    names = []
    for name, call, _, inputs in exported_calls():
        (tmp_path / name).write_bytes(export_here(call, *inputs))
        names.append(name)
    assert "csr_event-numba" in names
    code = f"import test_xla_kernels; test_xla_kernels.check_exported({str(tmp_path)!r})"
    assert run_python("-c", code, PYTHONHASHSEED="1").splitlines() == names


# -- several processes ---------------------------------------------------------------------------------

DISTRIBUTED = """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
    P = jax.sharding.PartitionSpec
    square = xk.XLACustomKernel("square")
    square.def_sharding_rule("i -> i")
    @square.def_numba_kernel
    @numba.njit
    def kernel(x, out):
        for i in range(x.size):
            out[i] = x[i] * x[i]
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), "d"), P("d"))
    x = jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8, dtype=np.float32)[index])
    total = jax.jit(lambda x: square(x, outs=x).sum())(x)
    print("devices", len(jax.devices()), "total", float(total))
    """


@pytest.mark.processes
def test_two_processes_share_a_mesh():
    """An op is split over the four devices of both."""
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        _, port = listening.getsockname()

    def run_process(number):
        return run_code(DISTRIBUTED, port, number, XLA_FLAGS="--xla_force_host_platform_device_count=2")

    with ThreadPoolExecutor(2) as pool:
        for output in pool.map(run_process, range(2)):
            assert "devices 4 total 140.0" in output


# ======================================================================================================
# Programs: other libraries with kernels in them, as users write it
# ======================================================================================================


@pytest.mark.needs("numpyro")
def test_program_numpyro_sampler():
    """A likelihood and its gradient in one pass of a Numba kernel, under NUTS with two chains in a batch."""
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer import MCMC, NUTS

    @numba.njit
    def normal_loss(mean, scale, y, loss, gradient):
        loss[()] = 0.0
        gradient[:] = 0.0
        for value in y:
            z = (value - mean[()]) / scale[()]
            loss[()] += 0.5 * z * z + math.log(scale[()])
            gradient[0] -= z / scale[()]
            gradient[1] += (1 - z * z) / scale[()]

    op = xk.XLACustomKernel("normal_loss")
    op.def_numba_kernel(normal_loss)
    y = jnp.asarray(np.random.default_rng(0).normal(2, 0.5, size=400), jnp.float32)

    def forward(*inputs, outs):
        loss, gradient = op(*inputs, outs=outs)
        return [loss, gradient], gradient

    def backward(gradient, cotangents):
        return cotangents[0] * gradient[0], cotangents[0] * gradient[1], None

    op.def_vjp_rule(forward, backward)

    def model():
        mean = numpyro.sample("mean", dist.Normal(0, 10))
        scale = numpyro.sample("scale", dist.Uniform(0.1, 10))
        loss, _ = op(mean, scale, y, outs=(spec(), spec(2)))
        numpyro.factor("likelihood", -loss)

    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    chains = MCMC(NUTS(model), num_warmup=200, num_samples=200, **options)
    chains.run(jax.random.key(0))
    samples = chains.get_samples()
    assert abs(samples["mean"].mean() - y.mean()) < 0.02
    assert abs(samples["scale"].mean() - y.std()) < 0.02


@pytest.mark.needs("diffrax")
def test_program_diffrax_ode():
    """Heat flow on a ring, integrated by diffrax with a Numba right-hand side, also under vmap: waves decay."""
    import diffrax

    @xk.numba_kernel(outs=like_first)
    def heat(y, dy):
        for i in range(y.size):
            dy[i] = y[i - 1] - 2 * y[i] + y[(i + 1) % y.size]

    def solve(y):
        steps = diffrax.PIDController(rtol=1e-5, atol=1e-6)
        problem = diffrax.ODETerm(lambda t, y, _: heat(y)), diffrax.Tsit5(), 0, 2, 0.1, y
        return diffrax.diffeqsolve(*problem, stepsize_controller=steps).ys[-1]

    angles = 2 * np.pi / 60 * np.array([1, 2, 5])
    waves = np.cos(np.outer(angles, np.arange(60))).astype(np.float32)
    decayed = waves * np.exp(4 * np.cos(angles) - 4)[:, None]
    np.testing.assert_allclose(jax.jit(solve)(waves[0]), decayed[0], atol=1e-4)
    np.testing.assert_allclose(jax.vmap(solve)(waves), decayed, atol=1e-4)


@pytest.mark.needs("equinox", "optax", "warp")
def test_program_equinox_warp_training():
    """Springs of unknown stiffness: equinox and optax learn it through the adjoint of a Warp kernel, in a scan."""
    import equinox as eqx
    import optax

    @wp.kernel
    def pull(x: wp.array(dtype=float), stiffness: wp.array(dtype=float), force: wp.array(dtype=float)):
        i = wp.tid()
        force[i] = stiffness[i] * wp.sin(x[i])

    force = xk.warp_kernel(pull, outs=like_first, differentiable=True)

    class Springs(eqx.Module):
        stiffness: jax.Array

        def __call__(self, x):
            """The positions after ten steps."""
            return jax.lax.scan(lambda x, _: (x - 0.1 * force(x, self.stiffness), None), x, length=10)[0]

    xs = jnp.asarray(np.random.default_rng(0).uniform(-0.5, 0.5, (16, 8)), jnp.float32)
    stiffness, optimizer = jnp.linspace(0.5, 1.5, 8), optax.adam(0.05)
    targets = jax.vmap(Springs(stiffness))(xs)

    def loss(model):
        return jnp.mean((jax.vmap(model)(xs) - targets) ** 2)

    @eqx.filter_jit
    def train(model, state):
        updates, state = optimizer.update(eqx.filter_grad(loss)(model), state)
        return eqx.apply_updates(model, updates), state

    model = Springs(jnp.ones(8))
    state = optimizer.init(model)
    for _ in range(200):
        model, state = train(model, state)
    np.testing.assert_allclose(model.stiffness, stiffness, atol=0.05)


# ======================================================================================================
# Numba on CPU, and with it what all wrappers share: the C interface, names, inputs, the primitive, the handler
# ======================================================================================================


def spec(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def like_first(x, *others):
    """As `outs`: one output like the first input."""
    return x


F32, FLOATS = np.ones(4, np.float32), spec(4)  # an input, and its spec


@xk.numba_kernel(outs=like_first)
def copy(x, out):
    for i in np.ndindex(x.shape):
        out[i] = x[i]


@xk.numba_kernel(outs=like_first)
def add_one(x, out):
    for i in range(x.size):
        out[i] = x[i] + 1


def wrap(kernel=add_one.__wrapped__, outs=like_first, **options):
    return xk.numba_kernel(kernel, outs, **options)


def kernel_from(source, *, name="kernel", **values):
    """The function of this name that some source defines, with these values as its globals."""
    namespace = {"np": np, "numba": numba, "math": math, **values}
    exec(textwrap.dedent(source), namespace)
    return namespace[name]


def runs(code, parameters="x, out", **values):
    """A kernel with this body."""
    return kernel_from(f"def kernel({parameters}):\n    {code}", **values)


def reads(expression, **values):
    """A kernel whose result is this expression."""
    return runs(f"out[0] = {expression}", **values)


def custom_call_of(function, *specs):
    """The line of the lowered program that calls the kernel."""
    text = jax.jit(function).lower(*specs).as_text()
    return next(line for line in text.splitlines() if re.search(r'custom_call @"?xla_kernels', line))


def target_of(function, *specs):
    """The name under which XLA finds the kernel."""
    return re.search(r"custom_call @\"?(xla_kernels[\w.]*)", custom_call_of(function, *specs))[1]


def hidden_outputs_of(function, *specs):
    """How many outputs the kernel's call has besides those that it returns: copies of inputs that it may write to."""
    results = custom_call_of(function, *specs).rpartition("->")[2]
    returned = jax.tree.leaves(jax.eval_shape(function, *specs))
    return results.count("tensor<") - len(returned)


def in_threads(work, args):
    """Run `work(arg)` in a thread for each argument; what one of them raises is raised here."""
    with ThreadPoolExecutor(len(args)) as pool:
        list(pool.map(work, args))


def error_of(call, *args):
    """The text of the error that a kernel's call raises: a ValueError comes from jaxlib's fast path."""
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError)) as caught:
        jax.block_until_ready(call(*args))
    return str(caught.value)


IN_A_PROCESS = """
import math, os, re, sys, textwrap, warnings
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numba, numpy as np, pytest
import xla_kernels as xk

ones = np.ones(4, np.float32)
"""


def run_code(code, *argv, **env):
    """Run `code` in a fresh interpreter that has these imports and functions; returns its output."""
    functions = like_first, add_one.__wrapped__, wrap, kernel_from, runs, reads, in_threads, error_of
    sources = [IN_A_PROCESS, *map(inspect.getsource, functions), textwrap.dedent(code)]
    return run_python("-c", "\n".join(sources), *argv, timeout=300, **{"JAX_PLATFORMS": "cpu", **env})


# -- the C interface -----------------------------------------------------------------------------------

RENAMED_IN_HEADER = {  # since jaxlib 0.7.2; the functions kept their places
    "XLA_FFI_Error_GetMessage": "XLA_FFI_Error_GetDetails",
    "XLA_FFI_TypeId_Register": "XLA_FFI_Type_Register",
    "XLA_FFI_ExecutionContext_Get": "XLA_FFI_InvokeContext_Get",
    "XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension",
}
SIZES = {"*": 8, "size_t": 8, "int64_t": 8, "int": 4, "int32_t": 4, "uint32_t": 4, "XLA_FFI_Handler_Traits": 4,
         "XLA_FFI_DataType": 4, "XLA_FFI_ExecutionStage": 4, "XLA_FFI_Error_Code": 4, "XLA_FFI_Extension_Type": 4,
         "XLA_FFI_InternalExtension_Type": 4}  # fmt: skip


def c_header():
    """The text of XLA's header with the names of the newest version."""
    path = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"void* \1", text)
    for old, new in RENAMED_IN_HEADER.items():
        text = text.replace(old, new)
    return text


def fields_in_header(text, name):
    """(name, type) of every field of a struct: the name of another struct, or its size."""
    body = re.search(rf"struct {name} \{{(.*?)\}}", text, re.DOTALL)[1]
    fields = []
    for declaration in body.split(";")[:-1]:
        pattern = r"(?:const |struct )?(\w+)\s*(\**)\s*(\w+)"
        kind, stars, field = re.fullmatch(pattern, " ".join(declaration.split())).groups()
        if stars:
            kind = "*"
        fields.append((field, SIZES.get(kind, kind)))
    return fields


def mirrored_fields(struct):
    fields = []
    for name, kind in struct._fields_:
        is_struct = issubclass(kind, ctypes.Structure)
        fields.append((name, kind.__name__ if is_struct else ctypes.sizeof(kind)))
    return fields


def test_mirrored_structs_equal_the_header():
    """Which may have more fields at the end of a struct."""
    structs = [value for name, value in vars(xk).items() if name.startswith("XLA_FFI_") and isinstance(value, type)]
    assert len(structs) == 17
    for struct in structs:
        fields = mirrored_fields(struct)
        assert fields == fields_in_header(c_header(), struct.__name__)[: len(fields)]


# -- names ---------------------------------------------------------------------------------------------


def name_of(kernel):
    """Under which XLA finds what was compiled for a kernel."""
    return target_of(wrap(kernel), FLOATS)


def names_of(kernels):
    """Those of kernels of which no two are equal; each stays the same."""
    names = [name_of(kernel) for kernel in kernels]
    assert names == [name_of(kernel) for kernel in kernels]
    assert len(set(names)) == len(names) > 1
    return names


def helper(expression, jit=numba.njit, **values):
    """A function of `a`, with these values as its globals."""
    return jit(kernel_from(f"def helper(a):\n    return {expression}", name="helper", **values))


def calls(function):
    return reads("function(x[0])", function=function)


def module_with(**values):
    module = types.ModuleType("module_with_values")
    module.__dict__.update(values)
    return module


def add_first(values):
    def kernel(x, out):
        out[0] = x[0] + values[0]

    return kernel


def third(x, out):
    out[0] = x[0] / 3


RECURSION = """
    @numba.njit
    def f(n):
        return 0 if n < 1 else 1 + g(n - 1)
    @numba.njit
    def g(n):
        return 0 if n < 1 else 10 + {}(n - 1)
    def kernel(x, out):
        out[0] = f(5)
    """
LINES_BEFORE = itertools.count()
signed = numba.njit("float32(float32)")


@functools.cache
def used_again():
    """Functions that gain code, or cannot, where they are used."""
    return helper("a + 7", numba.vectorize), (helper("a + 1", signed), helper("a + 2", signed))


def equal_kernels():
    """Kernels of new objects, equal to those that this made before."""
    vectorized, pair = used_again()
    return {
        "closure": add_first(np.arange(3.0)),
        "helper of helper": calls(helper("inner(a) * 2", inner=helper("a + 1"))),
        "vectorize": calls(vectorized),
        "functions with signatures": reads("pair[int(x[0])](x[1])", pair=pair),
        "line moved": kernel_from("\n" * next(LINES_BEFORE) + "def kernel(x, out):\n    out[0] = 1"),
        "recursion": kernel_from(RECURSION.format("f")),
        "object mode": runs("with numba.objmode():\n        print()\n    out[0] = 1"),
    }


@pytest.mark.filterwarnings("ignore:First-class function type")
def test_equal_content_is_one_target():
    first = {case: name_of(kernel) for case, kernel in equal_kernels().items()}
    assert len(set(first.values())) == len(first)
    assert {case: name_of(kernel) for case, kernel in equal_kernels().items()} == first


class HiddenFloat(float):
    """Does not show what it holds."""

    def __repr__(self):
        return "0"


Mode = enum.Enum("Mode", "SLOW FAST")
PAIRS = [collections.namedtuple("Pair", fields) for fields in ("a b", "b a")]


@numba.guvectorize(["void(float32[:], float32[:])"], "(n)->(n)")
def gu_swap(a, out):
    a[0], out[0] = 77, a[0]


@numba.extending.intrinsic
def poke(typing_context, a):
    def write(context, builder, signature, args):
        array = context.make_array(a)(context, builder, args[0])
        builder.store(context.get_constant(a.dtype, 77), array.data)
        return context.get_dummy_value()

    return numba.void(a), write


def reads_each(values, expression="v", **others):
    """For each value of `v` a kernel whose result is the expression."""
    return [reads(expression, v=value, **others) for value in values]


def holds_each(values):
    """For each value a kernel with a function of it, which is not called: Numba need not know such values."""
    return [runs("uncalled = lambda: v\n    out[0] = 1", v=value) for value in values]


EXPRESSIONS = ["x[0] + 1", "x[0] - 1", "x[0] + 2", "x[0] + 1.0", "math.sin(x[0])", "math.cos(x[0])",
               "(lambda a: a + 1)(x[0])", "(lambda a: a + 2)(x[0])"]  # fmt: skip
NUMBA_OPTIONS = [
    {"fastmath": False}, {"fastmath": True}, {"fastmath": {"nnan"}}, {"fastmath": {"ninf"}}, {"parallel": True},
    {"error_model": "numpy"}, {"locals": {"total": numba.int8}}, {"locals": {"total": numba.int64}},
]  # fmt: skip
HELPERS = [
    helper("a + 1"), helper("a + 2"), helper("a + n", n=1), helper("a + n", n=2),
    helper("inner(a)", inner=helper("a + 1")), helper("inner(a)", inner=helper("a + 2")),
    helper("a + n", n=3, __name__="numpy"), helper("a + n", n=4, __name__="numpy"),  # of which they are not
    helper("a + 1", numba.vectorize), helper("a + 2", numba.vectorize), helper("a + 1", numba.vectorize(["f4(f4)"])),
]  # fmt: skip
MODULES = [module_with(helper=helper("a + 1")), module_with(helper=helper("a + 2"))]
BY_CONTENT = {  # kernels of which no two are equal, and which are the same in another process
    "code": [reads(expression) for expression in EXPRESSIONS],
    "defaults": [reads("x[0] + n", parameters="x, out, n=1"), reads("x[0] + n", parameters="x, out, n=2")],
    "options": [numba.njit(**options)(third) for options in NUMBA_OPTIONS],
    "helpers": reads_each(HELPERS, "v(x[0])"),
    "modules": reads_each(MODULES, "v.helper(x[0])"),
    "recursion": [kernel_from(RECURSION.format(called)) for called in "fg"],
    "submodules": [reads("package.v.helper(x[0])", package=module_with(v=module)) for module in MODULES],
    "numbers": holds_each([
        1, True, 1.0, 0.0, -0.0, math.nan, -math.nan, math.inf, 2, 2**40, 10**5000, 1j, -0.0j, None, ...,
        np.float64(2), np.float32(2), np.int64(2), np.longlong(2), np.bool_(True),
    ]),
    "text": holds_each(["a", b"a", np.str_("a"), "a" * 2]),
    "tuples": holds_each([(0, 1), (0.0, 1.0), (1, 0), (0, (1,)), frozenset({0, 1}), range(3), slice(3)]),
    "arrays": holds_each([
        np.arange(3), np.arange(3.0), np.arange(1, 4), np.arange(3)[::-1].copy(), np.arange(4), np.eye(2),
        np.arange(4).reshape(2, 2), np.ones((2, 3)), np.ones((2, 3), order="F"),
        np.frombuffer(np.arange(3).tobytes(), int), np.arange(3, dtype=">i8"), np.arange(3).view(np.recarray),
    ]),
    "dtypes": holds_each([
        np.float32, np.dtype("f4"), np.dtype(">f4"), np.dtype([("a", "f4"), ("b", "f8")]),
        np.dtype([("a", "f4"), ("b", "f8")], align=True),
    ]),
    "functions": holds_each([np.sin, math.sin, len, np.random.normal, operator.add, numba.objmode, ValueError]),
    "types of Numba": holds_each([numba.f4, numba.f8[:], numba.f4(numba.f8), numba.typed.List, numba.prange]),
}  # fmt: skip
BY_IDENTITY = {  # which are others in another process
    "enums": [Mode, Mode.SLOW, Mode.FAST],
    "values of a subclass": [HiddenFloat(1), HiddenFloat(2)],
    "classes": [*PAIRS, type("Own", (), {}), type("Own", (), {})],
    "named tuples": [pair(1, 2) for pair in PAIRS],
    "types of named tuples": [numba.types.NamedUniTuple(numba.float64, 2, pair) for pair in PAIRS],
    "functions of Numba": [gu_swap, poke],
    "modules as objects": [types.ModuleType("module"), types.ModuleType("module")],
    "objects": [object(), object(), np.array([None]), np.array([None])],
}


@pytest.mark.parametrize("case", BY_CONTENT)
def test_kernels_count_by_all_they_are(case, monkeypatch):
    names = names_of(BY_CONTENT[case])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert names_of(BY_CONTENT[case]) == names


@pytest.mark.parametrize("case", BY_IDENTITY)
def test_what_is_rare_counts_by_identity(case, monkeypatch):
    kernels = holds_each(BY_IDENTITY[case])
    names = names_of(kernels)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not set(names_of(kernels)) & set(names)


@pytest.mark.parametrize("names_before", [0, 300])
def test_of_a_module_counts_what_is_read(names_before):
    """From 256 names on, Python splits an instruction in two."""
    numbers = {f"number{i}": i for i in range(names_before)}
    module = module_with(helper=helper("a + 1"), other=helper("a + 2"), name=object())
    kernel = runs(f"{'; '.join([*numbers, 'pass'])}\n    out[0] = module.helper(x[0])", module=module, **numbers)
    before = name_of(kernel)
    module.other = helper("a + 3")
    assert name_of(kernel) == before
    module.helper = helper("a + 4")
    assert name_of(kernel) != before
    module.helper = helper("a + 1")
    assert name_of(kernel) == before


def test_of_a_module_in_a_variable_counts_what_changes_inside_of_it():
    inner = module_with(value=1.0)
    array = np.ones(3)
    module = module_with(array=array, pair=(array, 1), inner=inner)
    kernel = runs("own = module\n    out[0] = own.array[0]", module=module)
    before = name_of(kernel)
    assert name_of(kernel) == before
    array[0] = 5.0
    changed = name_of(kernel)
    assert changed != before
    inner.value = 2.0
    assert name_of(kernel) not in (before, changed)


@pytest.mark.parametrize("setting, value", [("BOUNDSCHECK", 1), ("DEBUGINFO_DEFAULT", 1), ("LOOP_VECTORIZE", 0)])
def test_settings_of_numba_make_another_target(setting, value, monkeypatch):
    before = name_of(third)
    monkeypatch.setattr(numba.config, setting, value)
    assert name_of(third) != before


def lazy_module(number):
    lazy = type("LazyModule", (types.ModuleType,), {"constant": property(lambda module: number)})
    return lazy("lazy")


def edited(kernel, namespace, name, *values):
    """The kernel, while what it reads changes."""
    for value in values:
        namespace[name] = value
        yield kernel


def edited_global(decorate):
    function = reads("number")
    return edited(decorate(function), function.__globals__, "number", 1, 10)


def jitable_is_nan(fastmath):
    """Of which `nnan` says that there are no NaNs."""
    is_nan = kernel_from("def is_nan(a):\n    return 1.0 if a != a else 0.0", name="is_nan")
    return numba.extending.register_jitable(fastmath=fastmath)(is_nan)


def typed(expression, n):
    """What an overload gives to compile."""
    return kernel_from(f"def typed(a):\n    return lambda a: {expression}", name="typed", n=n)


def function_without_body():
    return kernel_from("def helper(a):\n    pass", name="helper")


def overloaded_methods():
    for n in (1, 2):
        numba.extending.overload_method(numba.types.Array, "plus_something")(typed("a[0] + n", n))
        yield reads("x.plus_something()")


def foreign_functions():
    function = ctypes.CDLL(None).labs
    for restype in (ctypes.c_long, ctypes.c_int8):
        function.restype, function.argtypes = restype, [ctypes.c_long]
        yield reads("function(300)", function=function)


OWN_ARRAY = np.ones(3).view(type("OwnArray", (np.ndarray,), {}))
LOOK_ALIKES = {  # kernels that a name could take for each other, and that compute different things
    "fields of named tuples": reads_each([pair(1, 2) for pair in PAIRS], "v.a"),
    "lazy modules": reads_each([lazy_module(1), lazy_module(2)], "v.constant"),
    "edited array of a subclass": edited(reads("v[0]", v=OWN_ARRAY), OWN_ARRAY, 0, 1, 5),
    "edited global of njit": edited_global(numba.njit),
    "edited global of guvectorize": edited_global(numba.guvectorize("(n)->(n)")),
    "added to builtins": edited(reads("added"), vars(builtins), "added", 1, 2),
    "options of register_jitable": reads_each(map(jitable_is_nan, (set(), {"nnan"})), "v(x[0] + np.nan)"),
    "overload_method": overloaded_methods(),
    "foreign function": foreign_functions(),
}


@pytest.mark.parametrize("case", LOOK_ALIKES)
def test_kernels_that_differ_give_different_results(case):
    x = jnp.zeros(1)
    results = [float(wrap(kernel)(x)[0]) for kernel in LOOK_ALIKES[case]]
    assert len(set(results)) == len(results) > 1, results


def test_a_function_without_overloads_is_not_another_of_its_name():
    functions = [function_without_body(), function_without_body()]
    for function, n in zip(functions, (1, 2)):
        numba.extending.overload(function)(typed("a + n", n))
    for i, result in ((0, 2), (1, 3), (0, 2)):
        assert wrap(calls(functions[i]))(F32)[0] == result
    with pytest.raises(TypeError, match="Numba cannot compile"):
        wrap(calls(function_without_body()))(F32)


@pytest.mark.parametrize("size, step", [(4, 1), (4, 2), (200_000, 1)])
def test_an_array_that_changes_is_its_own(size, step):
    """Numba reads large and strided arrays where they are: a kernel over another one must not see this one change."""
    array = np.ones(size)[::step]
    assert wrap(add_first(array))(F32)[0] == 2
    array[:] = 2
    assert wrap(add_first(array))(F32)[0] == 3
    assert wrap(add_first(np.ones(size)[::step]))(F32)[0] == 2


def test_a_helper_that_was_compiled_before_an_edit_is_its_own():
    """Numba keeps what a helper read when it was compiled: who uses a new one must not get its code."""
    compiled = helper("a + n", n=71)  # which no other test has compiled
    assert wrap(calls(compiled))(F32)[0] == 72
    assert wrap(calls(helper("a + n", n=71)))(F32)[0] == 72
    compiled.py_func.__globals__["n"] = 72
    assert wrap(calls(compiled))(F32)[0] == 72  # as Numba has it
    assert wrap(calls(helper("a + n", n=72)))(F32)[0] == 73


def test_different_signatures_are_different_targets():
    names = [target_of(copy, x) for x in (FLOATS, spec(4, dtype=np.int32), spec(2, 2), spec())]
    assert len(set(names)) == 4
    assert target_of(copy, spec(9)) == names[0]
    assert target_of(jax.vmap(copy), spec(3, 4)) == names[0]


def test_a_variable_that_a_kernel_reads_may_get_its_value_later():
    @wrap
    def kernel(x, out):
        out[0] = later

    with pytest.raises(TypeError, match="Numba cannot compile"):
        kernel(F32)
    later = 7
    assert kernel(F32)[0] == 7


KEPT_OP = xk.XLACustomKernel("KEPT_OP")


@pytest.mark.parametrize("name", ["add_one", "KEPT_OP"])
def test_copies_and_pickles_are_those_of_a_function(name, monkeypatch):
    kept = globals()[name]
    data = pickle.dumps([kept])
    assert pickle.loads(data)[0] is kept
    assert deepcopy([kept])[0] is kept
    assert shallow_copy(kept) is kept
    monkeypatch.setitem(globals(), name, None)
    assert pickle.loads(data) == [None]  # the name is all that is kept
    with pytest.raises(pickle.PicklingError, match=name):
        pickle.dumps(kept)


# -- errors --------------------------------------------------------------------------------------------


def _axpy(a, x, y):
    return a * x + y


def _positional(x, /, n, out):
    out[:] = n * x


def _head(x, n, alpha, out):
    out[:] = 0
    for i in range(n):
        out[i] = alpha * x[i]


def _running(x, total, out):
    for i in range(x.size):
        total[i] += x[i]
        out[i] = 2 * total[i]


@xk.numba_kernel(outs=like_first)
def refuse_negative(x, out):
    for i in range(x.size):
        if x[i] < 0:
            raise ValueError("negative element", x[i])
        out[i] = x[i]


def transpose_of(x):
    return x.T


def itself(x):
    return x


@numba.njit("f8(f8[:])")
def first_double(x):
    return x[0]


def add_one_to_a_key():
    return add_one(jax.random.key(0))


def raises(text):
    """A function whose kernel raises an error with this text."""
    return wrap(runs(f"raise ArithmeticError({text!r})"))


NAMES = "must be a list of names of parameters"
cuda_head, head = xk.numba_cuda_callable(_head, like_first), wrap(_head)
unary_op = xk.XLACustomKernel("unary")
unary_op.def_numba_kernel(numba.njit(add_one.__wrapped__))
TRACED_WITH_AN_ERROR = partial(jax.eval_shape, wrap(reads("x.nothing")))  # not only when the kernel runs
ANOTHER_NUMBER = r"outs takes \(x, y\), but this call gives it \(float32\[4\]\): missing .*'y'; give it one parameter"
ERRORS = {  # text of the error, a function, and its inputs
    TypeError: [
        # when a wrapper is made
        ("numba_kernel takes a function .*numba.njit or a plain function; got int 3", partial(wrap, kernel=3)),
        (r"outs\[1\] must be specs .*got 'f4' of type str", partial(wrap, outs=[FLOATS, "f4"])),
        ("outs is missing: .*outs=lambda x: x", partial(wrap, outs=None)),
        ("outs must be specs with both .shape and .dtype.* got .*float32", partial(wrap, outs=jnp.float32)),
        (r"input_output_aliases must be a dict .*; got \[\(0, 0\)\]", partial(wrap, input_output_aliases=[(0, 0)])),
        (rf'scalars {NAMES}, such as \["x"\]; got 3', partial(wrap, scalars=3)),
        (f"scalars {NAMES}.*; got 'x'", partial(wrap, scalars="x")),
        (rf"in_out_argnames {NAMES}.*; got \[0\]", partial(wrap, in_out_argnames=[0])),
        ("block_dim must be an int, .*; got 'a'", partial(xk.warp_kernel, outs=like_first, block_dim="a")),
        # inputs
        (r"add_one: input 0 must be an array .*; got list \[1, 2\]; pass its leaves", add_one, [1, 2]),
        ("input 0 must be an array or a number; got str 'ab'; convert it", add_one, "ab"),
        ("input 0 .*structured", wrap(itself), np.zeros(3, "f4,i4")),
        (r"input 0 .*key<.*pass jax.random.key_data", add_one_to_a_key),
        # outputs
        ("outs must be specs .*got 1.5 of type", wrap(outs=lambda x: 1.5), F32),
        (r"scratch 0 is bfloat16\[4\]", wrap(scratch=spec(4, dtype=jnp.bfloat16)), F32),
        (f"numba_kernel 'add_one': {ANOTHER_NUMBER} for each input", wrap(outs=lambda x, y: x), F32),
        (f"XLACustomKernel 'unary': {ANOTHER_NUMBER} for each input", partial(unary_op, outs=lambda x, y: x), F32),
        ("unsupported operand", wrap(outs=lambda x: x + "a"), F32),  # an error inside of `outs` stays itself
        # the arguments of the kernel
        (r"'add_one' takes \(x, out\), but .* 1 inputs and 2 outputs: .*in_out_argn", wrap(outs=[FLOATS] * 2), F32),
        ("takes the 2 inputs alone, so it must return the outputs", wrap(outs=FLOATS), F32, F32),
        ("1 inputs and 2 outputs and scratch buffers", wrap(scratch=FLOATS), F32),
        ("1 arguments .* and {'n': 3} by keyword, .* its parameters: arrays, for the f", partial(cuda_head, n=3), F32),
        (r"_head\(x, n, alpha, out\) got 1 .* and {'m': 2} by keyword", partial(head, m=2), F32),
        ("got 1 arguments by position and {'x': array.* by keyword", partial(head, x=F32), F32),
        (r"by position only\) got 1 arguments .* {'n': 3} by keyword", partial(wrap(_positional), n=3), F32),
        ("'n' is no array.* must be hashable, got .* of type list", partial(head, n=[2], alpha=1.0), F32),
        (r"n\[\(\)\], or name it in scalars=", head, F32, 2, 3.0),
        # what the kernel does
        ("'kernel' returns int64, not nothing: with parameters", wrap(runs("return x.size")), F32),
        (r"array\(float32.*, not int32\[:\]", wrap(itself, spec(4, dtype=np.int32)), F32),
        ("jax_enable_x64 is set", wrap(first_double), F32),
        (r"(?s)cannot compile .*'kernel' for \(float32\[:\]\) -> \(float.*nothing", TRACED_WITH_AN_ERROR, FLOATS),
        # transformations
        ("no derivative.*jax.custom_vjp", partial(jax.jvp, add_one, [F32]), [F32]),
    ],
    ValueError: [
        ("vmap_method must be one of .*got 'loop'", partial(wrap, vmap_method="loop")),
        ("numba_kernel 'add_one': a sharding rule names .*; got 3", partial(wrap, sharding_rule=3)),
        (r"negative.*\(-1,\)", partial(wrap, outs=spec(-1))),
        ("'t' must be the name of an array para", partial(wrap, kernel=_running, in_out_argnames=["t"])),
        ("'t' must be the name of an array para", partial(wrap, kernel=_running, scalars=["t"])),
        (r"of ranks \[\[2\], \[1\]\], but the call has \[\[1\], \[1\]\]", wrap(sharding_rule="i j -> i"), F32),
        ("gives the sizes 4 and 3 one name, 'i'", wrap(outs=spec(3), sharding_rule="i -> i"), F32),
        ("{1: 0}: there is no input 1; the call has 1 .* from 0", wrap(input_output_aliases={1: 0}), F32),
        ("there is no output -1", wrap(input_output_aliases={0: -1}), F32),
        (
            r"input 0 \(float32\[4\]\) and output 0 \(float32\[3\]\) must be equal",
            wrap(outs=spec(3), input_output_aliases={0: 0}),
            F32,
        ),
        ("an output can alias one input", wrap(outs=FLOATS, input_output_aliases={0: 0, 1: 0}), F32, F32),
        ("'out' is not the name of an input", wrap(_running, in_out_argnames=["out"]), F32),
        (
            "input 0 cannot start both output 1 and output 0",
            wrap(outs=FLOATS, in_out_argnames=["x"], input_output_aliases={0: 1}),
            F32,
        ),
    ],
    jax.errors.JaxRuntimeError: [  # when the kernel runs
        (r"shape', \(4,\), .* declares', \(2,\)", wrap(transpose_of, spec(2)), F32),
        (r"destination is read-only .raised in", wrap(runs("with numba.objmode():\n        x[0] = 77")), F32),
        (r"ValueError: \('negative element', -1.0\) \(raised in .*'refuse_negative'\)", refuse_negative, -F32),
        ("ArithmeticError: größe 日本 \U0001f600 .raised in", raises("größe 日本 \U0001f600"), F32),
        ("ArithmeticError: a", raises("a\udc80b"), F32),
        ("ArithmeticError: a.*raised in kernel", raises("a\0b"), F32),
        ("ArithmeticError: xxx", raises("x" * 1_000_000), F32),
    ],
}


@pytest.mark.parametrize("kind, text, call, inputs", [
    (kind, text, call, inputs) for kind in ERRORS for text, call, *inputs in ERRORS[kind]
])  # fmt: skip
def test_errors_say_what_is_wrong(kind, text, call, inputs):
    with pytest.raises(kind, match=text):
        jax.block_until_ready(call(*inputs))
    np.testing.assert_array_equal(add_one(F32), F32 + 1)  # the process goes on


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "int4", "uint4"])
def test_a_dtype_without_arithmetic_in_numba_is_refused_with_casts_that_can_be_pasted(dtype):
    x = jnp.array([0, 1, 1, 2]).astype(dtype)
    refused = rf"'add_one': input 0 is {dtype}\[4\], a dtype for which Numba has .*; cast it, and the result back: "
    with pytest.raises(TypeError, match=refused) as caught:
        add_one(x)
    result = eval(str(caught.value).partition("back: ")[2], {"f": add_one, "x": x, "jnp": jnp})
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.astype(int), [1, 2, 2, 3])


class ErrorWithoutText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class OwnError(LookupError):
    pass


def fail_in_python():
    raise KeyError("from Python")


ERROR_OF_CODE = {
    "out[0] = 1 // int(x[0] - 1)": "ZeroDivisionError: integer division by zero",
    "raise OwnError('mine', 3)": r"OwnError: \('mine', 3\)",
    "raise ErrorWithoutText()": r"ErrorWithoutText \(its text cannot be shown\)",
    "raise StopIteration": "StopIteration",
    "with numba.objmode(): fail_in_python()": "KeyError: 'from Python'",
}


@pytest.mark.parametrize("code", ERROR_OF_CODE)
def test_exception_in_a_kernel_becomes_an_error(code):
    kernel = wrap(runs(code, **globals()))
    batch = np.ones((4, 4), np.float32)
    buffer = "(Buffer Definition Event: )?"  # what pmap of jaxlib 0.7 adds
    text = f"^INTERNAL: {buffer}{ERROR_OF_CODE[code]}.*raised in kernel 'kernel'"
    for call, x in ((kernel, F32), (jax.jit(kernel), F32), (jax.vmap(kernel), batch), (jax.pmap(kernel), batch)):
        assert re.match(text, error_of(call, x))
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is OwnError]  # it was given back


def test_threads_that_raise_in_a_loop():
    """What a call takes (references, the GIL, memory) is given back where its kernel fails, on every thread.

    The text of an error lives until XLA has copied it, also where other threads fail meanwhile.
    """

    def work(number):
        x = np.full(1, number, np.float32)
        for _ in range(40):
            assert refuse_negative(x)[0] == number
            assert f"('negative element', -{number}.0)" in error_of(refuse_negative, -x)

    in_threads(work, range(1, 9))


def test_another_platform_is_an_error_that_says_what_to_use():
    with pytest.raises(NotImplementedError, match=r"runs on the CPU; .* numba_cuda_kernel .* compiled for 'cuda'"):
        jax.jit(add_one).trace(F32).lower(lowering_platforms=("cuda",))


# -- transformations -----------------------------------------------------------------------------------
# Of a wrapper; the matrix and the tests of ops have those that need nothing of its primitive.

P = jax.sharding.PartitionSpec


@pytest.mark.parametrize("spec", [P("i"), P(("i", "j")), P()])
def test_shard_map_of_a_scan(spec):
    def add_three(x):
        return jax.lax.scan(lambda x, _: (add_one(x), None), x, length=3)[0]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("i", "j"))
    sharded = jax.shard_map(add_three, mesh=mesh, in_specs=spec, out_specs=spec)
    x = np.arange(8, dtype=np.float32)
    for found in (sharded(x), jax.jit(sharded)(x), jax.vmap(sharded)(x[None])[0]):
        np.testing.assert_array_equal(found, x + 3)


def test_programs_are_exported_with_symbolic_shapes():
    (n,) = export.symbolic_shape("n")
    triple = wrap(runs("out[:] = 3 * x"))  # which nothing has traced before
    program = export.export(jax.jit(triple), disabled_checks=xk.export_checks())(spec(n))
    for size in (1, 5, 8):
        np.testing.assert_array_equal(program.call(np.ones(size, np.float32)), np.full(size, 3.0))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_with_other_scratch_on_a_shard_are_not_one(order):
    """The two ask for the same scratch for the whole array."""
    size_of_scratch = runs("out[:] = scratch.size", "x, out, scratch")
    options = {"sharding_rule": "i -> i"}
    fixed = wrap(size_of_scratch, scratch=spec(8), **options)
    of_shard = wrap(size_of_scratch, scratch=lambda x: x, **options)
    calls = fixed, of_shard
    results = jax.jit(lambda x: [calls[i](x) for i in order])(on_mesh(np.ones(8, np.float32), "d"))
    assert [result[0] for result in results] == [(8, 2)[i] for i in order]


def test_integer_outputs_and_scratch_need_no_derivative():
    sign = wrap(runs("out[:] = np.sign(x)", "x, out, scratch"), spec(4, dtype=np.int32), scratch=like_first)
    out, tangent = jax.jvp(sign, (F32,), (F32,))
    assert out.dtype == jnp.int32 and tangent.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(jax.grad(lambda x: (x * sign(x)).sum())(F32), [1, 1, 1, 1])


# -- any shape, layout and batch -----------------------------------------------------------------------


@xk.numba_kernel(outs=lambda x, y: (x, jax.ShapeDtypeStruct((), x.dtype)))
def running_sum(x, y, out, total):
    """Couples all elements of a slice, so any mix-up of rows, batches or strides changes the result."""
    acc = x.size * y[()]
    for i in np.ndindex(x.shape):
        acc += x[i]
        out[i] = acc
    total[()] = acc


def running_sum_in_jax(x, y):
    start = (x.size * y).astype(x.dtype)
    out = start + x.ravel().cumsum(dtype=x.dtype)
    return out.reshape(x.shape), start + x.sum(dtype=x.dtype)


def check_running_sums(found, expected):
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), found, expected)


def test_numpy_views_are_taken_as_they_are():
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for view in (base.T, base[:, ::-1, ::2], np.asfortranarray(base), base[1:1], base.astype(">f4").astype("f4")):
        expected = running_sum_in_jax(jnp.asarray(view), jnp.float32(1))
        check_running_sums(running_sum(view, 1), expected)
        check_running_sums(jax.jit(lambda x: running_sum(x.T, 1))(view.T), expected)


def random_nest(rng, rank, dtype):
    """Operands, and for each vmap over them, from the outermost in, its axes."""
    shapes = {"x": rng.choice([0, 1, 2, 3, 5, 7], rank, p=[0.06, 0.2, 0.2, 0.2, 0.2, 0.14]).tolist(), "y": []}
    nest = []
    for size in rng.choice([0, 1, 2, 3], rng.integers(0, 4), p=[0.08, 0.22, 0.35, 0.35]).tolist():
        axes = {"x": None, "y": None}
        for name in (["x"], ["y"], ["x", "y"])[rng.integers(3)]:
            axes[name] = int(rng.integers(0, len(shapes[name]) + 1))
            shapes[name].insert(axes[name], size)
        nest.insert(0, tuple(axes.values()))
    return [rng.integers(0, 4, shape).astype(dtype) for shape in shapes.values()], nest


@pytest.mark.parametrize("rank, dtype", [
    (0, "float32"), (1, "float32"), (2, "float32"), (4, "float32"), (2, "int8"), (2, "complex64"),
])  # fmt: skip
def test_any_nest_of_vmaps_is_a_loop_over_slices(rank, dtype):
    rng = np.random.default_rng(rank)
    cases = [random_nest(rng, rank, dtype) for _ in range(40)]

    @partial(jax.jit, static_argnums=0)
    def run(function, operands):
        results = []
        for (_, nest), (x, y) in zip(cases, operands):
            vmapped = function
            for axes in reversed(nest):
                vmapped = jax.vmap(vmapped, axes)
            results.append(vmapped(x, y))
        return results

    operands = [operands for operands, _ in cases]
    check_running_sums(run(running_sum, operands), run(running_sum_in_jax, operands))


@numba.extending.intrinsic
def thread_id(typing_context):
    from llvmlite import ir

    def write(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(64), [])
        pthread_self = numba.core.cgutils.get_or_insert_function(builder.module, kind, "pthread_self")
        return builder.call(pthread_self, [])

    return numba.types.uint64(), write


def spin_on_a_thread(x, out):
    """Some 50 µs of work; says which thread did it."""
    total = 0.0
    for i in range(5000):
        total += math.sin(x[0] + i)
    out[0] = total
    out[1] = thread_id()


needs_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2 or sys.platform == "win32", reason="needs cores that share")


@needs_cores
@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all", None])
def test_slices_of_a_batch_run_on_all_threads_unless_in_order(method):
    spin = wrap(spin_on_a_thread, spec(2, dtype="float64"), vmap_method=method)
    x = np.arange(128.0).reshape(2, 64, 1)
    in_order = method in ("sequential", "sequential_unrolled")
    with x64(True):
        batched = jax.jit(jax.vmap(jax.vmap(spin)))
        expected = [[spin(value)[0] for value in row] for row in x]
        for _ in range(100):  # a busy machine may leave the caller alone
            sums, threads = np.moveaxis(batched(x), -1, 0)
            np.testing.assert_array_equal(sums, expected)
            on_one_thread = len(np.unique(threads)) == 1
            if in_order or not on_one_thread:
                break
    assert on_one_thread == in_order


def test_no_argument():
    count = wrap(runs("out[:] = np.arange(out.size)", "out"), [spec(3, dtype=np.int32)])
    np.testing.assert_array_equal(count()[0], [0, 1, 2])
    np.testing.assert_array_equal(jax.vmap(lambda x: x + count()[0])(np.zeros(2, np.int32)), [[0, 1, 2]] * 2)


# -- kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outs, signature", [(like_first, "(*args)"), (itself, "(x)"), (spec(3), "(*args)")])
def test_wrappers_show_their_kernel_and_the_signature_of_their_inputs(outs, signature):
    """By which jax.custom_vjp binds arguments."""
    assert repr(add_one) == "<numba_kernel add_one>"
    square = wrap(lambda x: x * x, outs)
    assert str(inspect.signature(square)) == signature
    with_vjp = jax.custom_vjp(square)
    with_vjp.defvjp(lambda x: (square(x), x), lambda x, ct: (2 * x * ct,))
    np.testing.assert_array_equal(jax.grad(lambda x: with_vjp(x).sum())(jnp.arange(3.0)), [0, 2, 4])


def like_second(a, x, y):
    return x


def _scaled_head(x, n, alpha):
    return np.where(np.arange(x.size) < n, alpha * x, 0).astype(np.float32)


def _window(x, n, weight=1.0, power=1.0):
    return np.full(n, weight * x[0] ** power)


def window_outs(x, power, *, n):
    return spec(n)


def _mean(self):
    return self.mean()


def _sum_and_twice(x):
    return x.sum(), (2 * x, x.size)


@dataclasses.dataclass
class Work:
    """As `scratch`: a function that cannot be hashed."""

    dtype: str

    def __call__(self, x):
        return {"twice": x, "n": spec(dtype=self.dtype)}


@xk.numba_kernel(outs=like_first, scratch=Work("int32"))
def reverse(x, out, n, work):
    n[()] = x.size
    work[:] = x
    for i in range(n[()]):
        out[i] = work[x.size - 1 - i]


@xk.numba_kernel(outs=lambda x, y: (x, y), input_output_aliases={1: 1})
def add_both(x, y, first, second):
    first[:] = x + y
    second += x


SCALARS, VECTORS = np.array([1.25, 1.5], np.float32), np.array([[1, 1.5, 1.75], [2, 1.25, 1.125]], np.float32)
THREE_INPUTS = [SCALARS, VECTORS, VECTORS + 1]
THREE_FLOATS, COUNT = spec(3), spec(dtype=np.int32)
in_out = wrap(_running, lambda x, total: (total, x), in_out_argnames=iter(["total"]))
shifted = runs("for i in range(x.size): out[i] = x[i] + y", "x, y, out")
typed_add_one = numba.njit(["void(f8[:],f8[:])", "void(f4[:],f4[:])"])(add_one.__wrapped__)
typed_in_c_order = numba.njit("void(f4[::1],f4[::1])")(add_one.__wrapped__)
gu_shifted = numba.guvectorize("(n),()->(n)")(shifted)
positive_part = numba.vectorize(lambda a: a if a > 0 else 0 * a)
typed_gu_shifted = numba.guvectorize(["void(f4[:],f4,f4[:])"], "(n),()->(n)")(shifted)
ONE_LINERS = {  # a function as it is, the same in Python, two slices of each input, and what goes by keyword
    "returns a scalar": (wrap(lambda self: self.mean(), spec(), scratch=()), _mean, [], {"self": VECTORS}),
    "returns another layout": (wrap(transpose_of, spec(3, 1)), np.transpose, [VECTORS[:, None]], {}),
    "returns a tuple": (wrap(_sum_and_twice, (spec(), (THREE_FLOATS, COUNT))), _sum_and_twice, [VECTORS], {}),
    "star args": (wrap(runs("a[-1][:] = a[0]", "*a")), like_first, [VECTORS, VECTORS + 1], {}),
    "a default": (wrap(runs("out[:] = n * x", "x, out, n=3")), lambda x: 3 * x, [VECTORS], {}),
    "typed": (wrap(typed_add_one), lambda x: x + 1, [VECTORS], {}),
    "typed in C order": (wrap(typed_in_c_order), lambda x: x + 1, [VECTORS], {}),
    "vectorize": (wrap(numba.vectorize(_axpy), like_second), _axpy, THREE_INPUTS, {}),
    "typed vectorize": (wrap(numba.vectorize(["f4(f4,f4,f4)"])(_axpy), THREE_FLOATS), _axpy, THREE_INPUTS, {}),
    "guvectorize": (wrap(gu_shifted, THREE_FLOATS), np.add, [VECTORS, SCALARS], {}),
    "typed guvectorize": (wrap(typed_gu_shifted, THREE_FLOATS), np.add, [VECTORS, SCALARS], {}),
    "a constant": (wrap(_window, lambda x, n: spec(n)), _window, [VECTORS], {"n": 3}),
    "an input past a default": (wrap(_window, window_outs), _window, [VECTORS], {"power": SCALARS, "n": 3}),
    "scalars": (wrap(_head, scalars=True), _scaled_head, [VECTORS], {"alpha": SCALARS, "n": np.full(2, 2, np.int32)}),
    "a named scalar": (wrap(_head, THREE_FLOATS, scalars=["alpha"]), _scaled_head, [VECTORS], {"alpha": 3.0, "n": 2}),
    "in-out": (in_out, lambda x, total: (x + total, 2 * (x + total)), [VECTORS], {"total": VECTORS + 1}),
    "scratch": (reverse, lambda x: x[::-1], [VECTORS], {}),
    "an alias": (add_both, lambda x, y: (x + y, x + y), [VECTORS, VECTORS + 1], {}),
    "in place": (wrap(runs("x += 1", "x"), THREE_FLOATS, in_out_argnames=["x"]), lambda x: x + 1, [VECTORS], {}),
}


def check_slices(function, expected, inputs, named):
    """Compare the two slices of all inputs, alone and under vmap; what is no array is the same in both."""
    constants = {name: value for name, value in named.items() if not isinstance(value, np.ndarray)}
    arrays = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}

    def slices_of(function):
        slices = [jax.tree.map(operator.itemgetter(i), (inputs, arrays)) for i in range(2)]
        results = [function(*args, **named_arrays, **constants) for args, named_arrays in slices]
        return jax.tree.map(lambda *slices: np.stack(slices), *results)

    vmapped = jax.vmap(lambda args, named_arrays: function(*args, **named_arrays, **constants))
    for found in (slices_of(function), vmapped(inputs, arrays)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, slices_of(expected))


@pytest.mark.parametrize("name", ONE_LINERS)
def test_numba_functions_in_one_line(name):
    check_slices(*ONE_LINERS[name])


# Double precision, as these libraries are made for.
POINTS, OTHER_POINTS = np.random.default_rng(1).uniform(0.1, 1, (2, 2, 8))
SORTED_POINTS = np.sort(POINTS)
LIBRARY_FUNCTIONS = {  # function: outs, inputs, constants
    "pynndescent.distances.euclidean": (spec(dtype=float), [POINTS, OTHER_POINTS], {}),
    "umap.distances.minkowski": (spec(dtype=float), [POINTS, OTHER_POINTS], {"p": 3}),
    "stumpy.core._rolling_nanstd_1d": (spec(6, dtype=float), [POINTS], {"w": 3}),
    "quantecon.lorenz_curve": ((spec(9, dtype=float), spec(9, dtype=float)), [POINTS], {}),
    "quantecon.util.searchsorted": (spec(dtype=int), [SORTED_POINTS, OTHER_POINTS[:, 0]], {}),
    "numba_stats.norm._cdf": (spec(8, dtype=float), [POINTS, OTHER_POINTS[:, 0], OTHER_POINTS[:, 1]], {}),
    "interpolation.interp": (spec(8, dtype=float), [SORTED_POINTS, OTHER_POINTS, (POINTS + OTHER_POINTS) / 2], {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIBRARY_FUNCTIONS)
def test_library_functions_in_one_line(name):
    module, _, function = name.rpartition(".")
    function = getattr(pytest.importorskip(module, exc_type=ImportError), function)
    outs, inputs, constants = LIBRARY_FUNCTIONS[name]
    with x64():
        check_slices(wrap(function, outs), function, inputs, constants)


# -- inputs are never changed --------------------------------------------------------------------------


@numba.experimental.jitclass([("a", numba.float32[::1])])
class Holder:
    def __init__(self, a):
        self.a = a

    def put(self, value):
        self.a[0] = value


add_in_place = numba.vectorize(lambda a, b: a + b)
RECORDS = np.dtype([("a", np.float32)])
contiguous, fill = np.ascontiguousarray, np.fill_diagonal  # under another name
memset = ctypes.CDLL(None).memset
memset.argtypes, memset.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
square_of_ones = np.ones((4, 4), np.float32)

REFUSED_WRITES = [  # Numba sees that a read-only array is written to
    "x[0] = 77", "x[1:] = 77", "x[x > 0] = 77", "x[::-1].sort()", "x.fill(77)", "np.random.shuffle(x)",
    "x.view(np.int32)[0] = 77", "x.reshape((2, 2))[0, 0] = 77", "x.T[0] = 77", "np.asarray(x)[0] = 77",
    "l = [out, x]; l[1][0] = 77", "a = out if out.size == 0 else x; a[0] = 77",
]  # fmt: skip
COPIED_WRITES = [  # Numba does not, so that the kernel runs on a copy
    "x += 77", "np.add(x, 77, x)", "gu_swap(x, out)", "for a in (x, out): a[0] = 77", "np.nan_to_num(x, False)",
    "np.dot(square_of_ones, out, x)", "np.dot(square_of_ones, out, out=x)", "a = (square_of_ones, out, x); np.dot(*a)",
    "x.flat[0] = 77", "for v in np.nditer(x): v[()] = 77", "fill(x.reshape((2, 2)), 77)",
    "l = numba.typed.List(); l.append(out); l.append(x); l[1][0] = 77",
    "d = numba.typed.Dict(); d[0] = out; d[1] = x; d[1][0] = 77",
    "x.view(RECORDS)[0].a = 77", "np.frombuffer(x, RECORDS)[0].a = 77",
    "add_in_place.at(x, np.arange(1), np.float32(77))",
    "with numba.objmode(y='float32[::1]'):\n        y = np.asarray(x)\n    y += 77",
    "Holder(x).put(77)", "poke(x)", "memset(x.ctypes, 77, 4)", "memset(getattr(x, 'ctypes'), 77, 4)",
]  # fmt: skip
CONTIGUOUS_WRITES = [  # refused before Numba 0.64, copied since: numba/numba#10390 makes these arrays writable
    "np.asfortranarray(x)[0] = 77", "contiguous(x)[0] = 77",
]  # fmt: skip
(REFUSED_WRITES if numba.version_info.short < (0, 64) else COPIED_WRITES).extend(CONTIGUOUS_WRITES)


def writes(code, **options):
    """A kernel that writes to its input, and then to its output."""
    return wrap(numba.njit(**options)(runs(f"{code}\n    out[:] = x", **globals())))


@pytest.mark.parametrize("code", REFUSED_WRITES)
def test_a_kernel_that_writes_to_an_input_is_refused(code):
    with pytest.raises(TypeError, match=r"(?s)inputs are read-only, .*use input_output_aliases.*readonly array"):
        writes(code)(F32)


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaWarning")  # `at` is experimental
@pytest.mark.parametrize("parallel, code", [
    *itertools.product([False], COPIED_WRITES),
    *itertools.product([True], ["x += 77", "x.flat[0] = 77"]),
])  # fmt: skip
def test_a_kernel_that_may_write_to_an_input_gets_a_copy(code, parallel):
    write = writes(code, parallel=parallel)
    x = jnp.array([4.0, np.nan, 2.0, 1.0], jnp.float32)
    seen = write(x)
    np.testing.assert_array_equal(x, [4, np.nan, 2, 1])
    assert not np.array_equal(seen, x, equal_nan=True)  # what the kernel wrote to its copy, it reads there
    assert hidden_outputs_of(write, FLOATS) == 1


def add_by_overload(x, out):
    """Has an overload that takes writable arrays only."""


@numba.extending.overload(add_by_overload)
def _(x, out):
    return add_one.__wrapped__ if x == numba.float32[::1] else None


def test_a_kernel_that_only_reads_gets_no_copies():
    """Also where it gives an input to what is compiled for writable arrays."""
    call = "function(x, out)"
    kernels = [
        runs("out[:] = x + 1"), runs("for i, v in enumerate(x.flat): out[i] = v + 1"),
        runs(call, function=typed_in_c_order), runs(call, function=add_by_overload),
    ]  # fmt: skip
    for kernel in map(wrap, kernels):
        np.testing.assert_array_equal(kernel(F32), F32 + 1)
        assert hidden_outputs_of(kernel, FLOATS) == 0


def test_only_the_input_that_a_kernel_may_write_to_is_copied():
    kernel = wrap(runs("out[:] = x[0] + y\n    memset(x.ctypes, 0, 0)", "x, y, out", memset=memset), lambda x, y: y)
    np.testing.assert_array_equal(kernel(F32[None], 2 * F32), 3 * F32)
    assert hidden_outputs_of(kernel, spec(1, 4), FLOATS) == 1


# -- aliases, scratch, effects -------------------------------------------------------------------------


@xk.numba_kernel(outs=like_first, input_output_aliases={0: 0})
def accumulate(acc, x, out):
    for i in range(x.size):
        out[0] += x[i]


@pytest.mark.parametrize("batch", [(), (3,), (3, 2)])
def test_what_starts_with_an_input_does_where_xla_lost_the_alias(batch):
    """An alias is a hint: fusions of slices on GPUs lose it.  Here the programs have none."""
    assert "output_operand_alias<" in custom_call_of(accumulate, spec(2), spec(4))  # where XLA gets one
    acc, x = jnp.broadcast_to(jnp.array([10.0, 5.0]), (*batch, 2)), jnp.broadcast_to(jnp.arange(4.0), (*batch, 4))
    call = jax.ffi.ffi_call(target_of(accumulate, spec(2), spec(4)), spec(*batch, 2))
    np.testing.assert_array_equal(call(acc, x), np.broadcast_to([16, 5], (*batch, 2)))
    np.testing.assert_array_equal(acc, np.broadcast_to([10, 5], (*batch, 2)))
    call = jax.ffi.ffi_call(target_of(writes("x.flat[0] = 77"), FLOATS), [spec(*batch, 4)] * 2)
    np.testing.assert_array_equal(call(x)[0], np.broadcast_to([77, 1, 2, 3], (*batch, 4)))
    np.testing.assert_array_equal(x, np.broadcast_to(np.arange(4), (*batch, 4)))


def test_zero_outputs_start_every_slice_from_zeros():
    def adds(x, kept, out):
        out += x
        kept += x

    add = wrap(adds, lambda x, y: (y, x), zero_outputs=True, in_out_argnames=["kept"])
    x = jnp.ones((2, 300_000))  # memory that was used before is likely to be found again
    for _ in range(3):
        for kept, out in (jax.vmap(add)(x, x), jax.jit(jax.vmap(add))(x, x), add(x[0], x[1])):
            assert (out == 1).all() and (kept == 2).all()


@pytest.mark.parametrize("kept", [True, False])
def test_a_side_effect_keeps_an_unused_call(kept):
    call = wrap(has_side_effect=kept)

    def unused_in_a_scan(x):
        return jax.lax.scan(lambda carry, _: (2 * carry, call(carry).sum()), x, None, length=3)[0]

    compiled = jax.jit(unused_in_a_scan).lower(FLOATS).compile()
    assert ("custom-call" in compiled.as_text()) == kept
    np.testing.assert_array_equal(compiled(F32), 8 * F32)


# -- many threads, and what is registered --------------------------------------------------------------


def names_with(part):
    """The names of registered targets that have this in them."""
    return [check.is_custom_call() for check in xk.export_checks() if part in check.is_custom_call()]


def test_threads_that_trace_the_same_kernels_register_each_once():
    """16 threads race for 3 kernels of 2 dtypes each: a target that is registered twice is an error of XLA's."""
    start = threading.Barrier(16)

    def work(number):
        start.wait()
        for i in range(6):
            value = (number + i) % 3
            code = "def from_many_threads(x, out): out[:] = x + value"
            add = wrap(kernel_from(code, name="from_many_threads", value=value))
            x = np.arange(1 + i, dtype=np.float32 if i < 3 else np.int32)
            np.testing.assert_array_equal(jax.jit(lambda x: copy(add(x)))(x), x + value)
            np.testing.assert_array_equal(jax.vmap(add)(x[None]), x[None] + value)

    in_threads(work, range(16))
    assert len(names_with("from_many_threads")) == 6


def test_export_checks_are_those_of_the_kernels_registered_when_they_are_read():
    checks = xk.export_checks()
    before = names_with("")
    name = target_of(wrap(runs("out[:] = x - 11")), FLOATS)
    assert re.fullmatch(r"xla_kernels\.kernel\.4\.[0-9a-f]{24}", name)  # 4 is the version of what copies of it share
    after = [check.is_custom_call() for check in checks]
    assert after == sorted([*before, name])
    assert len(checks) == len(after)
    assert [check.is_custom_call() for check in checks[:2]] == after[:2]
    with_platforms = [export.DisabledSafetyCheck.platform()]
    assert (checks + with_platforms)[-1] is with_platforms[0]


def test_collected_wrappers_leave_their_kernels():
    """XLA keeps raw pointers to what was registered."""
    compiled = []
    for value in range(10):
        compiled.append(jax.jit(wrap(reads("x[0] + value", value=value))).lower(F32).compile())
    gc.collect()
    jax.clear_caches()
    gc.collect()
    assert [float(call(F32)[0]) for call in compiled] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("outs, args", [
    (FLOATS, ()), (FLOATS, (F32, F32)), ([FLOATS, FLOATS], (F32,)),
    (FLOATS, (F32.astype(np.int32),)), (FLOATS, (F32.astype(jnp.bfloat16),)), (spec(4, dtype=np.int32), (F32,)),
    (FLOATS, (F32[0],)), (spec(), (F32[0],)), (spec(2, 4), (F32,)), (FLOATS, (F32[None],)),
])  # fmt: skip
def test_buffers_of_another_count_rank_or_dtype_are_an_error(outs, args):
    """As another program of the same names could pass them."""
    target = target_of(add_one, FLOATS)
    error = error_of(jax.ffi.ffi_call(target, outs), *args)
    assert "INVALID_ARGUMENT" in error and "'add_one' was called with other buffers than" in error


def load_copy(name, path=xk.__file__):
    """Another copy of the file in this process, under a name that it has while it is loaded."""
    spec = importlib.util.spec_from_file_location(name, path)
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, copy)
        spec.loader.exec_module(copy)
    return copy


def test_two_copies_of_this_file_in_a_process():
    """Vendored copies under other names, and one that replaces this module."""
    names = ["vendored_a", "package.vendored_b", "xla_kernels", "xla_kernels"]
    kernels = [module.numba_kernel(add_one.__wrapped__, like_first) for module in (xk, *map(load_copy, names))]

    @jax.jit
    def chain(x):
        for kernel in kernels:
            x = kernel(x)
        return x

    np.testing.assert_array_equal(chain(F32), [6, 6, 6, 6])


def test_kernels_run_where_jax_has_lost_private_names(monkeypatch):
    from jax._src import dispatch

    with monkeypatch.context() as patch:
        patch.delattr(dispatch, "prim_requires_devices_during_lowering")
        patch.setitem(sys.modules, "jax.interpreters.xla", None)
        copy = load_copy("without_private_names")
    add = copy.numba_kernel(add_one.__wrapped__, like_first)
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(add)(x[0]), [1, 2, 3])
    np.testing.assert_array_equal(jax.vmap(add)(x), x + 1)


def headers_of_version(major, minor, folder):
    """A folder with XLA's headers, as far as they say their version."""
    header = folder / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#define XLA_FFI_API_MAJOR {major}\n#define XLA_FFI_API_MINOR {minor}\n")
    return str(folder)


def test_an_unknown_major_version_of_the_interface_is_refused(monkeypatch, tmp_path):
    headers = headers_of_version(1, 4, tmp_path)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: headers)
    refused = r"version 1\.4 of XLA's FFI, and xla_kernels .* knows 0\.x: install an older jaxlib, or a newer"
    with pytest.raises(NotImplementedError, match=refused):
        load_copy("of_another_version").numba_kernel(add_one.__wrapped__, like_first)(F32)


def test_without_jit_the_kernel_is_plain_python(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    seen = []

    def shows(x, out):
        seen.append((x.tolist(), out.shape, x.flags.writeable))
        if x[0] < 0:
            raise KeyError("negative", x[0].item())
        out[:] = x + 1

    show = wrap(shows)
    np.testing.assert_array_equal(show(np.ones(2, np.float32)), [2, 2])
    assert seen == [([1, 1], (2,), False)]
    np.testing.assert_array_equal(jax.vmap(show)(np.ones((3, 2), np.float32)), np.full((3, 2), 2))
    assert "KeyError: ('negative', -1.0)" in error_of(show, -F32)
    np.testing.assert_array_equal(wrap(lambda x, factor=3.0: factor * x)(F32), 3 * F32)
    assert "returned as many values as no call" in error_of(wrap(lambda x: (x, x)), F32)
    np.testing.assert_array_equal(wrap(positive_part)(-F32), 0 * F32)
    for name in ("typed", "vectorize", "guvectorize"):
        check_slices(*ONE_LINERS[name])


TYPED = """
    import xla_kernels as xk

    def kernel(x, out): ...

    reveal_type(xk.numba_kernel(kernel, outs=lambda x: x))
    reveal_type(xk.numba_kernel(outs=lambda x: x, vmap_method="sequential"))
    reveal_type(xk.warp_kernel(kernel, outs=lambda x: x, block_dim=128))
    xk.numba_kernel(kernel, outs=lambda x: x, vmap_metod="sequential")
    """


def test_type_checkers_know_what_public_functions_take_and_return(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TYPED))
    options = ["--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path / 'cache'}"]  # not JAX
    said = run_python("-m", "mypy", *options, program, ROOT / "xla_kernels.py", rc=1, MYPYPATH=str(ROOT))
    assert said.count('Revealed type is "def (*Any, **Any) -> Any"') == 3  # of a wrapper, and of a decorator's result
    assert 'error: Unexpected keyword argument "vmap_metod"' in said


# -- processes -----------------------------------------------------------------------------------------
# What only a process of its own can show.  Those of one kind run in one process, as it takes 3 s to start.


SHARED_BATCHES = """
    if sys.argv[1:]:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # a pool of one thread

    def spin(x, y, out):
        total = 0.0
        for i in range(300):
            total += np.sin(x[0] * y[0] + i)
        if x[1] < 0:
            raise ValueError("bad slice")
        out[0], out[1] = total, x[1]

    def nest(method):
        kernel = wrap(spin, vmap_method=method)
        return jax.vmap(jax.vmap(jax.vmap(kernel, (0, 0)), (0, None)), (0, None))

    x = np.arange(8 * 5 * 6 * 2, dtype=np.float32).reshape(8, 5, 6, 2)
    y = np.arange(1, 7, dtype=np.float32)[:, None]
    bad = x.copy()
    bad[3, 2, 2, 1] = bad[5, 4, 1, 1] = -1
    expected = np.asarray(nest("sequential")(x, y))
    mesh, P = jax.sharding.Mesh(np.array(jax.devices()), ("i",)), jax.sharding.PartitionSpec
    jitted = jax.jit(nest(None))
    pmapped = jax.pmap(jax.vmap(jax.vmap(wrap(spin), (0, 0)), (0, None)), in_axes=(0, None))
    sharded = jax.jit(jax.shard_map(nest(None), mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")))

    def work(count):
        for _ in range(count):
            for f in (jitted, pmapped, sharded):
                np.testing.assert_array_equal(f(x, y), expected)
            assert "bad slice" in error_of(jitted, bad, y)

    in_threads(work, [10] * 16)
    running = [pmapped(x + i, y) for i in range(100)]  # when the process ends
    """


@pytest.mark.parametrize("threads", [(), ("one",)], ids=["all threads", "one thread"])
def test_batches_of_many_callers_on_many_devices(threads):
    """16 callers of 8 devices share XLA's threads, which none may wait for; ten rounds find a lost wake-up."""
    if threads and not hasattr(os, "sched_setaffinity"):
        pytest.skip("the number of XLA's threads is that of the cores, which only Linux restricts")
    run_code(SHARED_BATCHES, *threads, XLA_FLAGS="--xla_force_host_platform_device_count=8")


LIFE_OF_A_PROCESS = """
    import importlib, multiprocessing

    # A kernel is registered before JAX has a backend, and the process forks.
    jax.eval_shape(add_one, ones)

    def check_in_child():
        assert add_one(ones)[3] == 2

    child = multiprocessing.get_context("fork").Process(target=check_in_child)
    child.start()
    child.join()
    assert child.exitcode == 0, "the forked process"
    jax.config.update("jax_platforms", "cpu")
    assert add_one(ones)[3] == 2, "registered before the backend started"

    # The module is loaded again, in its place and anew.
    held = jax.jit(add_one)

    def check(module):
        new = module.numba_kernel(add_one.__wrapped__, like_first)
        for kernel in (add_one, held, new):
            assert kernel(ones)[3] == 2
        assert jax.vmap(new)(ones[None])[0, 3] == 2

    check(xk)
    check(importlib.reload(xk))
    del sys.modules["xla_kernels"]
    check(importlib.import_module("xla_kernels"))
    """


def test_the_life_of_a_process():
    """Fork, late start of the backend, reload."""
    run_code(LIFE_OF_A_PROCESS)


MEMORY = """
    import resource

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

    def growth(run, count, warm_up):
        run(warm_up)
        before = resident()
        run(count)
        return resident() - before

    @jax.jit
    def calls(count):
        return jax.lax.fori_loop(0, count, lambda i, x: add_one(x) * 0.5, ones)

    def retraces(count):
        for _ in range(count):
            jax.make_jaxpr(wrap(reads("x[0] + value", value=2.5)))(ones)

    failing = wrap(runs("raise ValueError('no')"))

    def errors(count):
        for _ in range(count):
            assert error_of(failing, ones)

    assert growth(lambda count: calls(count).block_until_ready(), 1_000_000, 1000) < 5
    assert growth(retraces, 600, 100) < 15
    assert growth(errors, 1000, 500) < 5  # MiB
    """


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_calls_retraces_and_errors():
    run_code(MEMORY)


WORKQUEUE = """
    import contextlib

    @numba.njit(parallel=True)
    def helper(x, out):
        for i in numba.prange(x.size):
            out[i] = x[i] + 1
        if x[0] < 0:
            raise ValueError("negative")

    @numba.njit
    def direct(x, out):
        helper(x, out)

    def work(kernel):
        f = wrap(kernel)
        for i in range(50 if kernel is direct else 3):
            assert f(np.ones(5000, np.float32))[-1] == 2
            with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):  # which Numba loses behind a pointer
                jax.block_until_ready(f(-np.ones(10, np.float32)))
            assert (jax.pmap(f)(np.ones((4, 1000), np.float32)) == 2).all()

    warnings.simplefilter("error")
    work(direct)  # kept on disk, as nothing was compiled before
    warnings.simplefilter("ignore")  # functions in tuples are experimental
    jit = numba.njit("void(float32[::1], float32[::1])", parallel=True)
    functions = (jit(helper.py_func), jit(lambda x, out: helper(x, out)))

    def through_tuple(x, out):
        for i in range(2):
            functions[i](x, out)

    @numba.cfunc("void(CPointer(float32), CPointer(float32), int64)")
    def callback(x, out, n):
        helper(numba.carray(x, (n,)), numba.carray(out, (n,)))

    def through_pointer(x, out):
        callback(x.ctypes, out.ctypes, x.size)

    later = numba.njit(parallel=True)(helper.py_func)  # compiled by the first call

    def in_python(x, out):
        later(x, out)

    def through_python(x, out):
        with numba.objmode():
            in_python(x, out)

    in_threads(work, [through_python, direct, through_tuple, through_pointer] * 2)
    """


def test_parallel_kernels_entered_at_once(tmp_path):
    """Numba's workqueue aborts a process in which two threads enter it, also by a kernel that is kept on disk."""
    for _ in range(2):
        run_code(WORKQUEUE, NUMBA_THREADING_LAYER="workqueue", JAX_COMPILATION_CACHE_DIR=str(tmp_path))
        assert kept_files(tmp_path)  # which the second process finds


# ======================================================================================================
# Kernels on disk
# ======================================================================================================

# What a process does with kernels of each kind: prints the result of each, and which Numba or JAX compiled.
ON_DISK = r"""
    import ctypes, enum, functools, json, llvmlite.binding, random
    from numba.core.event import install_recorder

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
    os.getpid = lambda: 1  # as in containers
    changed = sys.argv[1:] == ["changed"]
    increment = 2 if changed else 1
    Mode = enum.Enum("Mode", "SLOW FAST")
    labs = ctypes.CDLL(None).labs
    labs.argtypes, labs.restype = [ctypes.c_long], ctypes.c_long
    compiled_before = numba.njit("float32(float32)")(lambda a: a)

    absolute = numba.types.ExternalFunction("absolute", numba.int64(numba.int64))

    def external(x):
        größe = kernel_from("def größe(x, out): out[0] = absolute(-3)", name="größe", absolute=absolute)
        call = wrap(größe)
        if changed:  # LLVM does not know the symbol that the code on disk needs
            jax.eval_shape(call, x)
            return x
        llvmlite.binding.add_symbol("absolute", ctypes.cast(labs, ctypes.c_void_p).value)
        return call(x)

    op = xk.XLACustomKernel("on_disk")
    op.def_numba_kernel(lambda scale, outs: wrap(lambda x: x * scale))
    random_functions = {"normal": np.random.normal, "gauss": random.gauss}
    number_and_size = np.zeros((), np.float32), np.zeros((), np.int32)
    calls = {
        "plain": add_one,
        "generator": lambda x: op(x, outs=x, scale=4.0),
        "returns": wrap(lambda x: (x[0] + x[1], x.size), number_and_size),
        "constant": functools.partial(wrap(runs("out[0] = x[0] + n", "x, n, out")), n=3),
        "vmap": lambda x: jax.vmap(wrap(lambda x: x * 2))(jnp.ones((3, 4))),
        "parallel": wrap(numba.njit(parallel=True)(runs("for i in numba.prange(x.size): out[i] = x[i] + 1"))),
        "raises": wrap(runs("raise ValueError('from', x.size)")),
        "writes": wrap(runs("x.flat[0] = 7; out[:] = x")),
        "vectorized": wrap(numba.vectorize(lambda x: x * 5)),
        "constants": wrap(reads("np.pi + table[x.size - 1] + math.sin(x[0])", table=np.arange(4.0))),
        "functions": wrap(reads("total(x) + 0 * normal() + 0 * gauss(0, 1)", total=np.sum, **random_functions)),
        "with_global": wrap(reads("x[0] + increment", increment=increment)),
        "with_helper": wrap(reads("add(x[0])", add=numba.njit(lambda a: a + increment))),
        "with_option": wrap(numba.njit(fastmath=changed)(reads("x[0]"))),
        "by_identity": wrap(reads("Mode.FAST.value", Mode=Mode)),
        "in_place": wrap(reads("large[0]", large=np.ones(200_000))),
        "foreign": wrap(reads("labs(-3)", labs=labs)),
        "through_python": wrap(runs("with numba.objmode():\n        print(end='')\n    out[0] = 1")),
        "helper_compiled_before": wrap(reads("helper(x[0])", helper=compiled_before)),
        "external": external,
    }
    results, by_numba, by_jax = {}, [], []
    for name, call in calls.items():
        x = jnp.asarray(ones)
        hits.clear()
        with install_recorder("numba:compile") as recorder:
            try:
                results[name] = float(np.ravel(jax.tree.leaves(call(x))[0])[0])
            except jax.errors.JaxRuntimeError as error:
                results[name] = re.search(r"ValueError.*", str(error))[0]
        if recorder.buffer:
            by_numba.append(name)
        if not any(hits):
            by_jax.append(name)
        assert (np.asarray(x) == 1).all()  # no input was written to
    print("RESULTS", json.dumps([results, by_numba, by_jax]))
    """
OF_A_PROCESS = {"by_identity", "in_place", "foreign"}  # kernels that are others in each
CHANGED = {"with_global": 3.0, "with_helper": 3.0, "with_option": 1.0, "external": 1.0}  # the new results


def on_disk(folder, *args):
    """The results of a process that keeps its kernels there, and the names of those that Numba and JAX compiled."""
    out = run_code(ON_DISK, *args, JAX_COMPILATION_CACHE_DIR=str(folder))
    results, by_numba, by_jax = json.loads(out.partition("RESULTS")[2])
    return results, set(by_numba), set(by_jax)


def kept_files(folder):
    return sorted((folder / "xla_kernels").iterdir())


def damage(files):
    """Each file in another way: cut, one bit changed, empty, that of another kernel, no file of ours."""
    contents = [file.read_bytes() for file in files]
    flipped = bytearray(contents[1])
    flipped[-1] ^= 1
    for file, content in zip(files, itertools.cycle((contents[0][:-1], flipped, b"", contents[4], b"other" * 1000))):
        file.write_bytes(content)


def test_a_second_process_compiles_what_changed_and_what_is_not_kept(tmp_path):
    results, by_numba, by_jax = on_disk(tmp_path)
    assert by_numba == by_jax == set(results)
    files = kept_files(tmp_path)
    not_kept = OF_A_PROCESS | {"through_python", "helper_compiled_before"}
    assert len(files) == len(results) - len(not_kept) + 1  # what all handlers have in common

    again, by_numba, by_jax = on_disk(tmp_path, "changed")
    assert again == results | CHANGED
    assert by_numba == not_kept | set(CHANGED)
    assert by_jax == OF_A_PROCESS | set(CHANGED)

    assert all(file.name.isascii() for file in files)
    [driver] = tmp_path.glob("xla_kernels/driver-*")
    code_of_driver = driver.read_bytes()
    damage(files)
    damaged = [file.read_bytes() for file in files]
    again, by_numba, _ = on_disk(tmp_path)
    assert again == results and by_numba == set(results)
    assert all(file.read_bytes() != content for file, content in zip(files, damaged, strict=True))
    assert driver.read_bytes() == code_of_driver  # no address of a process is in it


@pytest.fixture
def kept_in(tmp_path):
    """The folder in which kernels are kept meanwhile."""
    with conftest.configured("jax_compilation_cache_dir", str(tmp_path)):
        yield tmp_path / "xla_kernels"


def test_another_machine_or_version_finds_other_files(monkeypatch, kept_in, tmp_path):
    """Copies of this file, each of which writes what its handlers share unless it finds that."""
    headers = headers_of_version(0, 99, tmp_path)
    edited_file = tmp_path / "edited.py"
    edited_file.write_text(pathlib.Path(xk.__file__).read_text() + "# edited\n")

    def number_of_files(path=xk.__file__):
        copy = load_copy(f"copy_{next(KERNEL_NUMBERS)}", path)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # XLA knows no handlers of another version
            copy.numba_kernel(add_one.__wrapped__, like_first)(F32)
        return len(list(kept_in.glob("driver-*")))

    assert number_of_files() == number_of_files() == 1
    assert number_of_files(edited_file) == 2
    for already, (owner, name, value) in enumerate([
        (numba, "__version__", "0"), (importlib.import_module("llvmlite"), "__version__", "0"),
        (np, "__version__", "0"), (jax.ffi, "include_dir", lambda: headers), (numba.config, "CPU_NAME", "generic"),
    ], 2):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert number_of_files() == already + 1, name
    assert number_of_files() == 7


@pytest.mark.parametrize("enabled, place, number", [(True, "kept", 2), (False, "kept", 0), (True, "gs://kept", 0)])
def test_kernels_are_kept_beside_the_programs_of_jax(enabled, place, number, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    in_folder = conftest.configured("jax_compilation_cache_dir", place)
    with conftest.configured("jax_enable_compilation_cache", enabled), in_folder:
        load_copy(f"copy_{next(KERNEL_NUMBERS)}").numba_kernel(add_one.__wrapped__, like_first)(F32)
    assert len(list(tmp_path.glob("**/*.xla_kernel"))) == len(list(tmp_path.glob("kept/xla_kernels/*"))) == number


def disk_is_full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("owner, name", [(os, "makedirs"), (os, "replace"), (xk, "open")])
def test_a_folder_that_takes_no_files_costs_only_the_caching(monkeypatch, kept_in, owner, name):
    monkeypatch.setattr(owner, name, disk_is_full, raising=owner is os)
    assert wrap(reads(f"x[0] + {len(name)}"))(F32)[0] == 1 + len(name)
    assert not kept_in.exists() or not list(kept_in.iterdir())


def test_code_is_not_written_under_a_name_that_it_has_no_more(kept_in):
    """Here a global changes while Numba compiles."""

    class Edit(numba.core.event.Listener):
        def on_start(self, event):
            kernel.__globals__["value"] = 2

        def on_end(self, event):
            pass

    kernel = reads("x[0] + 1000 * value", value=1)  # of its own, as its target gets the code of the other value
    with numba.core.event.install_listener("numba:compile", Edit()):
        wrap(kernel)(F32)
    assert not list(kept_in.glob("*kernel-*"))
    wrap(reads("x[0] + 1001"))(F32)
    assert list(kept_in.glob("*kernel-*"))


CACHED_BY_NUMBA = """
    from numba.core.event import install_recorder
    sys.path.insert(0, sys.argv[1])
    import cached
    with install_recorder("numba:compile") as recorder:
        print(wrap(cached.kernel)(ones)[0], len(recorder.buffer) > 0)
    print(wrap(reads("helper(x[0])", helper=cached.helper))(ones)[0])  # not as in Numba's cache
    jax.config.update("jax_compilation_cache_dir", sys.argv[1] + "/kept")
    print(wrap(reads("helper(x[0]) * 2", helper=cached.helper))(ones)[0])
    """
CACHED = """
    import constants, numba

    @numba.njit(cache=True)
    def helper(a):
        return a + constants.n

    @numba.njit(cache=True)
    def kernel(x, out):
        out[:] = helper(x[0])
    """


def test_kernels_that_numba_caches_are_kept_without_a_setting_and_see_changes(tmp_path):
    def results(n):
        (tmp_path / "constants.py").write_text(f"n = {n}\n")
        return run_code(CACHED_BY_NUMBA, tmp_path, JAX_COMPILATION_CACHE_DIR="").split()

    (tmp_path / "cached.py").write_text(textwrap.dedent(CACHED))
    assert results(1) == ["2.0", "True", "2.0", "4.0"]
    assert results(1) == ["2.0", "False", "2.0", "4.0"]
    assert results(30) == ["31.0", "True", "31.0", "62.0"]
    assert len(list(tmp_path.glob("kept/xla_kernels/kernel-*"))) == 2  # of the last one, with each constant


COUNTED = """
    import runpy
    from numba.core.event import install_recorder
    with install_recorder("numba:compile") as recorder:
        runpy.run_path(sys.argv[1])
    print("compiled:", len(recorder.buffer) > 0)
    """


@pytest.mark.processes
def test_the_first_example_of_the_readme_is_compiled_once(tmp_path):
    """The second process prints the same, and Numba compiles nothing in it."""
    (tmp_path / "block.py").write_text(README_BLOCKS[0], encoding="utf-8")
    environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept")}
    first, second = [run_code(COUNTED, tmp_path / "block.py", **environment) for _ in range(2)]
    assert first.endswith("compiled: True\n")
    assert second == first.replace("compiled: True", "compiled: False")


STARTS_TOGETHER = """
import numpy as np
import xla_kernels as xk

for n in range(4):
    add = xk.numba_kernel(lambda x, n=n: x + n, lambda x: x)
    print(int(add(np.zeros(1, np.float32))[0]), end=" ", flush=True)
"""


def start_on_disk(folder):
    """A process that keeps kernels there, in no time that it has to wait for."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", STARTS_TOGETHER], stdout=subprocess.PIPE, env=environment, text=True)


def test_processes_that_start_together_and_are_killed_leave_whole_files(tmp_path):
    processes = [start_on_disk(tmp_path) for _ in range(4)]
    for process in processes[:2]:  # as it writes
        process.stdout.read(2)
        process.kill()
    outputs = [process.communicate()[0] for process in processes]
    assert outputs[2:] == ["0 1 2 3 "] * 2
    before = {file: file.read_bytes() for file in kept_files(tmp_path) if file.suffix == ".xla_kernel"}
    assert len(before) == 5  # with what all handlers have in common
    assert start_on_disk(tmp_path).communicate()[0] == "0 1 2 3 "
    assert all(file.read_bytes() == content for file, content in before.items())  # found, so not written again


# ======================================================================================================
# Numba CUDA
# ======================================================================================================

simulated = pytest.mark.needs("simulator")
compiled = pytest.mark.needs("compiler")
on_gpu = pytest.mark.gpu
on_device = pytest.mark.needs("cuda")  # on a GPU or, in the same way, in the simulator


def cuda_copy(x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i]


def cuda_add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


def cuda_axpy(n, a, x, y):
    tile, i = cuda.shared.array(8, cuda_float32), cuda.grid(1)
    tile[i] = x[i]
    cuda.syncthreads()
    if i < n:
        y[i] += a * tile[i]


def axpy_op(kernel, scalars):
    """Takes the array x, the array y that it changes, and n and a, which are scalars or constants."""
    return xk.numba_cuda_kernel(kernel, spec(8), in_out_argnames=["y"], scalars=scalars, grid=1, block=8)


in_axpy = pytest.mark.parametrize("scalars", [("n", "a"), True, ()], ids=["scalars", "all scalars", "constants"])


def cuda_op(kernel, outs=like_first, **options):
    """`kernel` with a thread for each element of its first input."""
    return xk.numba_cuda_kernel(kernel, outs, launch_dims=lambda x, *_: x.size, threads_per_block=8, **options)


def run_pytest(*args, **environment):
    """Run tests of this file in a process with another environment; returns the numbers of its last line."""
    out = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, *args, **environment)
    return {outcome: int(number) for number, outcome in re.findall(r"(\d+) (\w+)", out.splitlines()[-1])}


# -- the packages that compile CUDA kernels ------------------------------------------------------------


@functools.cache
def kind_of(package):
    """Which CUDA package this is here: "built-in" is Numba's own, "stand-in" what the fake driver's tests have."""
    try:
        package_cuda = importlib.import_module(f"{package}.cuda")
        if hasattr(package_cuda, "compiles_nothing"):
            return "stand-in"
        cuda_ptx(package_cuda, lambda x: None, 1)
    except ImportError:
        return "missing, or without NVVM"
    return "built-in" if getattr(package_cuda, "implementation", "") == "Built-in" else package


def fixture_of_packages(*without):
    @pytest.fixture(params=["numba_cuda_mlir", "numba"])
    def package_cuda(request):
        kind = kind_of(request.param)
        if kind in ("missing, or without NVVM", *without):
            pytest.skip(f"{request.param} is {kind}")
        return importlib.import_module(f"{request.param}.cuda")

    return package_cuda


# The module `cuda` of each package that compiles CUDA kernels: numba-cuda's successor, and numba-cuda.
package_cuda = fixture_of_packages()
compiling_cuda = fixture_of_packages("stand-in")
batching_cuda = fixture_of_packages("built-in")  # it does not compile the kernel that runs a batch
compiling_batching_cuda = fixture_of_packages("stand-in", "built-in")


def is_successor(package_cuda):
    return package_cuda.__name__ == "numba_cuda_mlir.cuda"


def written_for(package_cuda, function):
    """The same kernel with the `cuda` of a package."""
    float32 = np.float32 if is_successor(package_cuda) else numba.float32
    names = {"cuda": package_cuda, "cuda_float32": float32}
    return types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)


KERNEL_NUMBERS = itertools.count(1)


def own_kernel(package_cuda, parameters, body="cuda.grid(1)"):
    """A kernel that no other test has compiled."""
    return runs(f"{body}\n    number", parameters, cuda=package_cuda, number=next(KERNEL_NUMBERS))


def cuda_ptx(package_cuda, function, *ranks):
    """PTX for compute capability 9.0, which takes no driver, for arrays of int64."""
    if is_successor(package_cuda):  # it asks for the capability of a GPU, whatever it compiles for
        importlib.import_module("numba_cuda_mlir.tools")._cached_cc = (9, 0)
    nbtypes = package_cuda.types if hasattr(package_cuda.types, "Array") else numba.types
    argtypes = tuple([nbtypes.Array(nbtypes.int64, rank, "C") for rank in ranks])
    return package_cuda.compile(function, argtypes, device=False, abi="numba", cc=(9, 0))[0]


PTX_READS = {  # which parameters of an array of rank 3 an expression reads
    "numba": {".size": {2}, ".itemsize": {3}, "[0, 0, 0]": {4}, ".shape[0]": {5}, ".shape[1]": {6}, ".shape[2]": {7},
              ".strides[0]": {8}, ".strides[1]": {9}, ".strides[2]": {10}},
    "numba_cuda_mlir": {"[0, 0, 0]": {1, 2}, ".shape[0]": {3}, ".shape[1]": {4}, ".shape[2]": {5},
                        "[1, 0, 0]": {1, 2, 6}, "[0, 1, 0]": {1, 2, 7}, "[0, 0, 1]": {1, 2, 8}},
}  # fmt: skip


@compiled
def test_cuda_parameters_mean_what_the_handler_packs(compiling_cuda):
    read_by = PTX_READS[compiling_cuda.__name__.partition(".")[0]]
    for expression, numbers in read_by.items():
        ptx = cuda_ptx(compiling_cuda, runs(f"x[0, 0, 0] += x{expression}", "x"), 3)
        loads = re.findall(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]", ptx)
        registers = {int(number): register for register, number in loads}
        assert set(registers) == numbers | read_by["[0, 0, 0]"], expression
        if len(numbers) == 3:  # strides count elements, here of 8 bytes
            assert re.search(rf"shl\.b64\s+%\w+, {registers[max(numbers)]}, 3;", ptx)


# -- without a GPU: what XLA is told -------------------------------------------------------------------


def lower_for_cuda(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def run_for_cuda(function, *args):
    """Lower for CUDA, and run that program on the CPU."""
    return jax.block_until_ready(exported_for("cuda", function, *args).call(*args))


def cuda_target(function, *args):
    """The name of a kernel's target, in a program for CUDA."""
    return re.search(r"custom_call @([\w.]+)", lower_for_cuda(function, *args))[1]


@compiled
@pytest.mark.parametrize("body, copies", [("out[0] = x.view(np.float32)[0]", 1), ("out[0] = x[0]", 0)])
def test_cuda_kernel_that_may_write_to_an_input_gets_a_copy(body, copies):
    text = lower_for_cuda(cuda_op(own_kernel(cuda, "x, out", body)), spec(4))
    assert text.count("output_operand_alias<") == copies


@compiled
def test_cuda_nothing_to_run_is_no_call():
    """XLA may not capture an empty launch in a CUDA graph."""
    kernel = lambda x, y, z: None
    op = xk.numba_cuda_kernel(kernel, lambda x: (x, x), launch_dims=lambda x: x.size - 3, input_output_aliases={0: 1})
    assert "custom_call" in lower_for_cuda(jax.vmap(op), spec(1, 4))
    assert "custom_call" not in lower_for_cuda(jax.vmap(op), spec(0, 4))
    assert "custom_call" not in lower_for_cuda(op, spec(3))
    zeros, kept = run_for_cuda(op, jnp.arange(3.0))
    np.testing.assert_array_equal(zeros, [0, 0, 0])
    np.testing.assert_array_equal(kept, [0, 1, 2])


@compiled
def test_cuda_ready_kernel_whose_output_has_too_many_dimensions_for_a_launch():
    op = xk.XLACustomKernel("four")
    op.def_numba_cuda_kernel(cuda.jit(cuda_copy))
    with pytest.raises(RuntimeError, match=r"shape \(2, 3, 4, 5\), and CUDA has 3: register it with launch_dims="):
        lower_for_cuda(lambda x: op(x, outs=spec(2, 3, 4, 5)), F32)


@compiled
def test_cuda_wrappers_can_be_freed():
    wrapper = xk.numba_cuda_kernel(lambda x, out: None, like_first, grid=1, block=1)
    jax.eval_shape(wrapper, F32)
    freed = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert freed() is None


@compiled
def test_cuda_targets_derive_from_content(package_cuda):
    def target(factor, jit=package_cuda.jit, dtype="float32"):
        def kernel(x, out):
            out[0] = factor * x[0]

        return cuda_target(xk.numba_cuda_kernel(jit(kernel), like_first, **BLOCK), spec(1, dtype=dtype))

    plain, fast = like_first, package_cuda.jit(fastmath=True)
    names = [target(2), target(2, plain), target(2, fast), target(3), target(2, dtype="int32")]
    assert len(set(names)) == 5
    assert names[:2] == [target(2), target(2, plain)]
    if is_successor(package_cuda):  # which notes the GPU that it compiles for
        assert target(2, package_cuda.jit(chip="sm_90")) == names[0]


@compiled
@pytest.mark.parametrize("body, reason", [
    ("x[0] = out[0]", "; its inputs are read-only, because JAX may share them: write to an output, .*"),
    ("out[0] = x.nope", ""),
    ("return 1", "; it returns a value: write to the output arrays and return nothing"),
])  # fmt: skip
def test_cuda_kernel_that_cannot_be_compiled(body, reason, package_cuda):
    op = xk.numba_cuda_kernel(package_cuda.jit(runs(body)), like_first, grid=1, block=1)
    refused = r" cannot compile kernel 'kernel' for \(float32\[:\]\) -> \(float32\[:\]\)"
    with pytest.raises(TypeError, match=f"(Numba CUDA|numba_cuda_mlir){refused}{reason}:\n"):
        lower_for_cuda(op, spec(1))


HOST_KERNEL = numba.njit(lambda x, out: None)
BLOCK = {"grid": 1, "block": 1}


@pytest.mark.parametrize("error, options, text", [
    (ValueError, {}, "give either both grid and block, or launch_dims; got none"),
    (ValueError, {**BLOCK, "launch_dims": 1}, "or launch_dims; got grid and block and launch_dims"),
    (ValueError, {"launch_dims": (1, 2, 3, 4)}, "must be an int or a tuple of 1 to 3 ints; got (1, 2, 3, 4)"),
    (TypeError, {"grid": 1.5, "block": 1}, "grid must be an int or a tuple of 1 to 3 ints; got 1.5"),
    (ValueError, {"grid": 1, "block": (32, 64)}, "at most 1024 threads; block=(32, 64, 1) has 2048"),
    (ValueError, {"grid": 1, "block": (1, 1, 65)}, "block.z must be from 1 to 64; got 65"),
    (ValueError, {"grid": 1, "block": 0}, "block.x must be from 1 to 1024; got 0"),
    (ValueError, {"grid": 2**31, "block": 1}, "from 0 to 2147483647; got 2147483648 in grid=(2147483648, 1, 1)"),
    (ValueError, {"grid": (1, 65536), "block": 1}, "grid.y must be from 0 to 65535; got 65536"),
    (ValueError, {"grid": (1, 1, 65536), "block": 1}, "grid.z must be from 0 to 65535; got 65536"),
    (ValueError, {"launch_dims": lambda x: -3}, "got -3 in launch_dims=(-3, 1, 1)"),
    (ValueError, {"launch_dims": 1, "threads_per_block": 2048}, "from 1 to 1024; got 2048"),
    (TypeError, {"launch_dims": 1, "threads_per_block": (8, 8)}, "threads_per_block must be an int, or "),
    (ValueError, {**BLOCK, "shared_mem": -1}, "shared_mem must be a number of bytes; got -1"),
    (ValueError, {**BLOCK, "shared_mem": 2**31}, "must be a number of bytes; got 2147483648"),
    (TypeError, {**BLOCK, "outs": spec(3, dtype=jnp.bfloat16)},
     "output 0 is bfloat16[3], a dtype that Numba CUDA has no arrays of"),
    (TypeError, {**BLOCK, "outs": [spec(3)] * 2}, "this call has 1 inputs and 2 outputs"),
    (TypeError, {**BLOCK, "kernel": HOST_KERNEL},
     "takes a function decorated with numba.cuda.jit (without [grid, block]) or a plain function; got"),
])  # fmt: skip
def test_cuda_refused_kernel(error, options, text):
    options = {"kernel": lambda x, out: None, "outs": spec(3), **options}
    with pytest.raises(error, match=re.escape(text)):
        jax.eval_shape(xk.numba_cuda_kernel(**options), spec(3))


@pytest.mark.parametrize("func, text", [
    (3, r"takes a Python function that launches kernels \(for one kernel use numba_cuda_kernel\); got .*int 3"),
    (HOST_KERNEL, r"takes a Python function that launches kernels \(for .*; got .*CPUDispatcher"),
    (lambda x, out, stream: None, r"takes \(x, out, stream\), but this call has 2 inputs, 1 outputs and scratch "
     r"buffers, and a stream: func\(in..., out..., stream\)"),
])  # fmt: skip
def test_cuda_refused_callable(func, text):
    with pytest.raises(TypeError, match=text):
        jax.eval_shape(xk.numba_cuda_callable(func, spec(3)), spec(3), spec(3))


@pytest.mark.needs("no gpu", "compiler")
def test_cuda_without_gpu_or_simulator():
    kernel = cuda_op(cuda_copy)
    text = (
        r"numba_cuda_kernel 'cuda_copy' runs on NVIDIA GPUs \(pip install .*\), or in Python if "
        r"NUMBA_ENABLE_CUDASIM=1 was set; for CPUs use numba_kernel; .* compiled for 'cpu'"
    )
    for call in (kernel, kernel, jax.jit(kernel)):
        with pytest.raises(NotImplementedError, match=text):
            call(F32)


def test_cuda_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, getattr(cuda, "__name__", "numba.cuda"), None)  # what `cuda_copy` reads
    with pytest.raises(ImportError, match=r"numba_cuda_kernel needs numba\w* .*pip install 'xla_kernels\[cuda13\]'"):
        cuda_op(cuda_copy)(F32)


# -- without a GPU: what the driver is asked to do -----------------------------------------------------
# In one process with a `libcuda.so.1` that has two GPUs, keeps a log, and runs no kernel.  Programs are lowered for
# CUDA and run on the CPU, whose memory the fake GPUs share; handlers are told their stream and device as on a GPU.

FAKE_DRIVER = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef int R; typedef void *P; typedef uint64_t D; typedef unsigned U;

// what tests set and read
int device, n_params;
static char failing[64];  // the function that fails when it is called next
void fail(const char *function) { strcpy(failing, function); }
static char log_[1 << 16]; static int used; static pthread_mutex_t logging = PTHREAD_MUTEX_INITIALIZER;
#define LOG(...) do { pthread_mutex_lock(&logging); used += snprintf(log_ + used, sizeof log_ - used, __VA_ARGS__); \
                      pthread_mutex_unlock(&logging); } while (0)
const char *take_log(void) { log_[used] = 0; used = 0; return log_; }

static R outcome(const char *function) {
  if (strcmp(failing, function)) { return 0; }
  *failing = 0;
  return 2;
}
static const char *on_stream(P s) { return s == (P)0x5eed ? "" : s ? " on another stream" : " on stream 0"; }

// the driver: context 0x1000 + 16 n is device n's; a function loaded in it has the context in its upper half
static uintptr_t next_ = 0x20000;
static __thread uintptr_t stack[64]; static __thread int top;
#define SUCCEEDS(name) R name(void) { return 0; }
SUCCEEDS(cuInit) SUCCEEDS(cuStreamSynchronize) SUCCEEDS(cuModuleUnload) SUCCEEDS(cuMemsetD8_v2)
SUCCEEDS(cuLinkAddData_v2) SUCCEEDS(cuLinkAddFile_v2) SUCCEEDS(cuLinkDestroy) SUCCEEDS(cuMemcpyDtoH_v2)
SUCCEEDS(cuKernelGetFunction) SUCCEEDS(cuMemGetInfo_v2) SUCCEEDS(cuDeviceGetUuid) SUCCEEDS(cuDeviceGetName)
SUCCEEDS(cuPointerGetAttribute) SUCCEEDS(cuIpcOpenMemHandle)
R cuDeviceGet(int *d, int i) { *d = i; return 0; }
R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
R cuDeviceGetCount(int *n) { *n = 2; return 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : a == 97 ? 232448 : 1024; return 0; }
R cuDevicePrimaryCtxRetain(P *c, int d) { *c = (P)(uintptr_t)(0x1000 + 16 * d); return 0; }
R cuCtxPushCurrent_v2(P c) { stack[top++] = (uintptr_t)c; return 0; }
R cuCtxPopCurrent_v2(P *c) { if (!top) return 201; *c = (P)stack[--top]; return 0; }
R cuCtxGetCurrent(P *c) { *c = top ? (P)stack[top - 1] : 0; return 0; }
R cuCtxSetCurrent(P c) { stack[top ? top - 1 : top++] = (uintptr_t)c; return 0; }
R cuCtxGetDevice(int *d) { *d = top ? (stack[top - 1] - 0x1000) / 16 : device; return 0; }  // XLA has its own current
R cuStreamGetCtx(P s, P *c) { return cuCtxGetCurrent(c); }
R cuModuleLoadData(P *m, const char *image) {
  *m = (P)(next_ += 16);
  return memcmp(image, "\177ELF", 4) ? 200 : outcome(__func__);
}
R cuModuleLoadDataEx(P *m, P image, U n, P o, P v) { *m = (P)((next_ += 16) | 1u << 30); return 0; }  // Numba's way
R cuModuleGetFunction(P *f, uintptr_t m, P name) { *f = (P)(m >> 30 ? m : m | stack[top - 1] << 32); return 0; }
R cuFuncSetAttribute(P f, int a, int v) { LOG("attribute %d=%d\n", a, v); return 0; }
R cuFuncGetAttribute(int *v, int a, P f) { *v = a == 1 ? 128 : 64; return 0; }
R cuLibraryLoadData(P *l, P c, P a, P b, U n, P d, P e, U m) { *l = (P)(next_ += 16); return 0; }
R cuLibraryGetKernel(P *k, P l, P name) { *k = l; return 0; }
R cuLibraryGetGlobal(D *p, size_t *n, P l, P s) { *p = 0x1234; *n = 4; return 0; }
R cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, P f, int b, size_t s) { *n = 4; return 0; }
R cuModuleGetGlobal_v2(D *p, size_t *n, P m, P s) { *p = 0x1234; *n = 4; return 0; }
R cuLinkCreate_v2(U n, P a, P b, P *s) { *s = (P)9; return 0; }
R cuLinkComplete(P s, P *o, size_t *n) { static char cubin[] = "\177ELF"; *o = cubin; *n = 5; return 0; }
R cuGetErrorName(int e, const char **s) { *s = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "another"; return 0; }
R cuGetErrorString(int e, const char **s) { *s = e == 2 ? "out of memory" : "another"; return 0; }
R cuMemcpyDtoDAsync_v2(P to, P from, size_t n, P stream) {
  LOG("copy %zu bytes%s\n", n, on_stream(stream));
  memmove(to, from, n);
  return 0;
}
R cuMemsetD8Async(P to, unsigned char value, size_t n, P stream) {
  if (*on_stream(stream)) { return 0; }  // Numba's own
  LOG("set %zu bytes to %d\n", n, value);
  memset(to, value, n);
  return outcome(__func__);
}
R cuLaunchKernel(P f, U gx, U gy, U gz, U bx, U by, U bz, U shared, P stream, D **params, P extra) {
  uintptr_t loaded_in = (uintptr_t)f >> 32, context = loaded_in ? loaded_in : top ? stack[top - 1] : 0;
  char words[4096] = "", *end = words;
  if (n_params) { end += sprintf(end, " words"); }
  for (int i = 0; i < n_params; i++) { end += sprintf(end, " %llu", (unsigned long long)*params[i]); }
  LOG("%s %d: %u,%u,%u x %u,%u,%u +%u%s%s\n", loaded_in ? "native" : "numba", (int)(context - 0x1000) / 16,
      gx, gy, gz, bx, by, bz, shared, on_stream(stream), words);
  return outcome(__func__);
}
R cuLaunchCooperativeKernel(P f, U a, U b, U c, U d, U e, U g, U shared, P stream, P params) {
  return cuLaunchKernel(f, a, b, c, d, e, g, shared, stream, params, 0);
}
typedef struct { U gx, gy, gz, bx, by, bz, shared; P stream; } Config;
R cuLaunchKernelEx(const Config *c, P f, P params, P extra) {
  return cuLaunchKernel(f, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, params, extra);
}
R cuGetProcAddress_v2(const char *name, P *result, int version, D flags, int *status) {
  char versioned[128];
  P self = dlopen("libcuda.so.1", RTLD_LAZY);
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *result = dlsym(self, versioned);
  if (!*result) { *result = dlsym(self, name); }
  if (!*result) { *result = (P)cuInit; }
  if (status) { *status = 0; }
  return 0;
}
"""

# Stands in for numba_cuda_mlir where that is not installed: handlers and launches can be tested with no compiler.
NO_COMPILER = """
import ctypes, types as modules
from numba import types
compiles_nothing, driver = True, ctypes.CDLL("libcuda.so.1")
class Device:
    compute_capability = 9, 0
    def __init__(self, context):
        self.context = ctypes.c_void_p(context)
    def __enter__(self):
        driver.cuCtxPushCurrent_v2(self.context)
    def __exit__(self, *error):
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
gpus = Device(0x1000), Device(0x1010)
grid = None
class Dispatcher:
    __module__ = "numba_cuda_mlir.descriptor"
    def __init__(self, function, options):
        self.py_func, self.targetoptions, self.extensions, self._module_setup_callbacks = function, options, [], []
        self.__name__ = function.__name__
    def compile(self, arrays):
        words = ", ".join(".param .u64 word" for array in arrays for _ in range(3 + 2 * array.ndim))
        found = {"func_name": "entry", "cubin": b"\\x7fELF", "targetoptions": {}}
        return modules.SimpleNamespace(ptx=f".entry entry({words})", metadata=found, _type_annotation=None)
def jit(**options):
    return lambda function: Dispatcher(function, options)
"""


# How many of the tests below run with each kind of package; one more takes no package.
FAKE_DRIVER_TESTS = {"numba_cuda_mlir": 30, "numba": 31, "built-in": 26, "stand-in": 14}


@pytest.mark.processes
@pytest.mark.needs("compiler", "real driver", "no gpu", "gcc")
def test_cuda_fake_driver(tmp_path):
    """Runs the tests below, in a process with the fake driver."""
    (tmp_path / "fake.c").write_text(FAKE_DRIVER)
    flags = "-shared -fPIC -w -Wl,-soname,libcuda.so.1 -o libcuda.so.1 fake.c -ldl".split()
    subprocess.run(["gcc", *flags], cwd=tmp_path, check=True)
    environment = {
        "JAX_PLATFORMS": "cpu",
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "NUMBA_CUDA_DRIVER": str(tmp_path / "libcuda.so.1"),
        "XLA_KERNELS_FAKE_CUDA": "1",
    }
    kinds = [kind_of("numba_cuda_mlir"), kind_of("numba")]
    if importlib.util.find_spec("numba_cuda_mlir") is None:
        (tmp_path / "numba_cuda_mlir").mkdir()
        (tmp_path / "numba_cuda_mlir/__init__.py").touch()
        (tmp_path / "numba_cuda_mlir/cuda.py").write_text(NO_COMPILER)
        environment["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        kinds.append("stand-in")
    passed = run_pytest("-k", "test_fakecuda", **environment)["passed"]
    assert passed == 1 + sum(FAKE_DRIVER_TESTS.get(kind, 0) for kind in kinds)


class FakeGpus:
    """The two GPUs of the fake driver: JAX lists them, and XLA tells handlers for CUDA a stream and a device."""

    HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.take_log.restype = ctypes.c_char_p
        self.handlers, self.all_traits = {}, {}  # by the name of the target
        self.local_devices, self.register = jax.local_devices, jax.ffi.register_ffi_target

    def with_gpus(self, *args, backend=None, **options):
        if backend == "cuda":
            return [types.SimpleNamespace(local_hardware_id=ordinal) for ordinal in (0, 1)]
        return self.local_devices(*args, backend=backend, **options)

    def register_for_cpu(self, name, handler, platform="cpu", **options):
        if platform == "CUDA":
            native = self.HANDLER(capsule_address(handler))
            self.handlers[name] = self.HANDLER(functools.partial(self.call, name, native))
            handler = jax.ffi.pycapsule(ctypes.cast(self.handlers[name], ctypes.c_void_p))
        self.register(name, handler, "cpu", **options)

    def call(self, name, handler, frame_address):
        """Call a handler with an API that has a GPU; or, with an extension, ask for its metadata."""
        frame = xk.XLA_FFI_CallFrame.from_address(frame_address)
        if frame.extension_start:
            error = handler(frame_address)
            extension = xk.XLA_FFI_Metadata_Extension.from_address(frame.extension_start)
            self.all_traits[name] = xk.XLA_FFI_Metadata.from_address(extension.metadata).traits
            return error
        api = xk.XLA_FFI_Api.from_buffer_copy(xk.XLA_FFI_Api.from_address(frame.api))
        give_stream, give_ordinal = self.HANDLER(self.give_stream), self.HANDLER(self.give_ordinal)
        api.XLA_FFI_Stream_Get = ctypes.cast(give_stream, ctypes.c_void_p)
        if self.get("device") >= 0:  # else XLA knows it, as on the CPU
            api.XLA_FFI_DeviceOrdinal_Get = ctypes.cast(give_ordinal, ctypes.c_void_p)
        frame.api = ctypes.addressof(api)
        return handler(frame_address)

    def give_stream(self, args):
        xk.XLA_FFI_Stream_Get_Args.from_address(args).stream = 0x5EED

    def give_ordinal(self, args):
        xk.XLA_FFI_DeviceOrdinal_Get_Args.from_address(args).device_ordinal = self.get("device")

    def set(self, **values):
        for name, value in values.items():
            ctypes.c_int.in_dll(self.driver, name).value = value

    def get(self, name):
        return ctypes.c_int.in_dll(self.driver, name).value

    def log(self):
        """What the driver was asked for since the last time."""
        return self.driver.take_log().decode().splitlines()

    def launches(self, function, *args):
        """What a call launched: on which device, grid, block, and shared memory."""
        self.log()
        run_for_cuda(function, *args)
        return [line for line in self.log() if " x " in line]

    def launches_and_addresses(self, package_cuda, arrays_of_launches, function, *args):
        """The same, and the addresses of the arrays that each launch got: like these, and in row-major order."""
        self.set(n_params=sum(len(packed_array(package_cuda, 0, array)) for array in arrays_of_launches[0]))
        launches, addresses = [], []
        for line, arrays in zip(self.launches(function, *args), arrays_of_launches, strict=True):
            launch, words = line.split(" words ")
            words = [int(word) for word in words.split()]
            launches.append(launch)
            addresses.append([])
            for array in arrays:
                address = words[0 if is_successor(package_cuda) else 4]
                expected = packed_array(package_cuda, address, array)
                assert words[: len(expected)] == expected
                del words[: len(expected)]
                addresses[-1].append(address)
        return launches, addresses

    def traits(self, function, *args):
        """What XLA is told about the handler of a kernel: 1 is compatible with command buffers."""
        return self.all_traits[cuda_target(function, *args)]


def packed_array(package_cuda, address, array):
    """The words that PTX of the package reads of an array in row-major order."""
    shape, itemsize = array.shape, array.dtype.itemsize
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if is_successor(package_cuda):  # data, data again, offset, shape, strides in elements
        return [address, address, 0, *shape, *strides]
    # meminfo, parent, size, size of an element, data, shape, strides in bytes
    return [0, 0, math.prod(shape), itemsize, address, *shape, *[itemsize * stride for stride in strides]]


fake_gpus = functools.cache(FakeGpus)  # the same ones for all tests, as XLA never forgets a handler


@pytest.fixture
def gpus(monkeypatch):
    if reason := conftest.missing("fake driver"):
        pytest.skip(reason)
    found = fake_gpus()
    monkeypatch.setattr(jax, "local_devices", found.with_gpus)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", found.register_for_cpu)
    found.set(device=0, n_params=0)
    found.driver.fail(b"")
    found.log()
    return found


def aligned(shape, dtype="float32"):
    """An array that JAX takes over without a copy, and its address, which is that of the handler's buffer."""
    array = jax.device_put(np.zeros(shape, dtype))
    return array, array.unsafe_buffer_pointer()


def own_op(package_cuda, parameters="x, out", **options):
    """A kernel that no other test has compiled, in one block of one thread if nothing else is said."""
    return xk.numba_cuda_kernel(own_kernel(package_cuda, parameters), like_first, **BLOCK | options)


ONE_THREAD = "native 0: 1,1,1 x 1,1,1 +0"  # the launch of such a kernel


def test_fakecuda_packs_arrays(gpus, package_cuda):
    """Of each dtype, with one to three dimensions and with none."""
    dtypes = [name for name in dtypes_of("cuda") if not DTYPES[name].needs_x64]
    inputs, expected = [], []
    for k, dtype in enumerate(dtypes):
        x, address = aligned((2, 3, 4)[: k % 4], dtype)
        inputs.append(x)
        expected.append(address)
    out, scratch = spec(4, 5, dtype="int16"), spec(6)
    kernel = own_kernel(package_cuda, ", ".join([*dtypes, "out", "scratch"]))
    op = xk.numba_cuda_kernel(kernel, out, scratch=scratch, **BLOCK)
    _, [addresses] = gpus.launches_and_addresses(package_cuda, [[*inputs, out, scratch]], op, *inputs)
    assert addresses[:-2] == expected
    assert len({0, *addresses}) == 1 + len(addresses)


def test_fakecuda_launches_natively_on_each_device_that_jax_lists(gpus, package_cuda):
    op = own_op(package_cuda, grid=(2, 3), block=(4, 5, 6), shared_mem=64)
    run_for_cuda(op, F32)
    # 227 KiB less the kernel's static shared memory are allowed on both
    assert gpus.log() == ["attribute 8=232320", "attribute 8=232320", "native 0: 2,3,1 x 4,5,6 +64"]
    assert gpus.traits(op, F32) == 1
    gpus.set(device=1)
    assert gpus.launches(op, F32) == ["native 1: 2,3,1 x 4,5,6 +64"]
    for device in 2, 3, 10**9:  # the last one far beyond the table of functions
        gpus.set(device=device)
        with pytest.raises(Exception, match="kernel 'kernel' is not loaded on this GPU, which JAX did not list"):
            run_for_cuda(op, F32)
    assert not gpus.log()


def test_fakecuda_jax_may_free_an_array_of_another_gpu_meanwhile(gpus, monkeypatch, compiling_cuda):
    """XLA leaves the context of that GPU current."""
    kernel = compiling_cuda.jit(own_kernel(compiling_cuda, "x, out"))
    compile_ = type(kernel).compile

    def compile_and_free(*args):
        compiled = compile_(*args)
        gpus.driver.cuCtxSetCurrent(ctypes.c_void_p(0x1010))
        return compiled

    monkeypatch.setattr(type(kernel), "compile", compile_and_free)
    assert gpus.launches(xk.numba_cuda_kernel(kernel, like_first, **BLOCK), F32) == [ONE_THREAD]


def test_fakecuda_asks_xla_for_the_device(gpus, package_cuda):
    """By XLA's own function, which knows the CPU's devices, too."""
    program = exported_for("cuda", own_op(package_cuda), spec(4)).call
    xla_knows = jax.__version_info__ >= (0, 8)  # before that the handler asks CUDA
    gpus.set(device=-1 if xla_knows else 0)
    gpus.log()
    jax.block_until_ready(jax.pmap(program)(jnp.ones((2, 4))))
    assert sorted(gpus.log()) == [ONE_THREAD, ONE_THREAD.replace("0:", "1:") if xla_knows else ONE_THREAD]


def test_fakecuda_one_handler_serves_every_shape_and_launch(gpus, package_cuda):
    kernel = own_kernel(package_cuda, "x, out")
    before = len(gpus.handlers)
    for launch_dims, launch in (
        ((256,), "1,1,1 x 256,1,1"),
        ((257,), "2,1,1 x 256,1,1"),
        ((17, 33), "2,3,1 x 16,16,1"),
        ((9, 8, 5), "2,1,2 x 8,8,4"),
    ):
        op = xk.numba_cuda_kernel(kernel, like_first, launch_dims=launch_dims)
        assert gpus.launches(op, jnp.ones(math.prod(launch_dims))) == [f"native 0: {launch} +0"]
    assert len(gpus.handlers) == before + 1


def nested_batches(op, gpus, package_cuda, arrays_of_launches):
    """The launches of a batch of two of a batch of three, and where x, y and out start in each."""
    (x, x_data), (y, y_data) = aligned((3, 5)), aligned((2, 5))
    nested = jax.vmap(jax.vmap(op, in_axes=(0, None)), in_axes=(None, 0))
    launches, addresses = gpus.launches_and_addresses(package_cuda, arrays_of_launches, nested, x, y)
    _, _, out_data = addresses[0]
    return launches, (np.array(addresses) - [x_data, y_data, out_data]).tolist()


def test_fakecuda_nested_batches_are_one_launch_per_row(gpus, batching_cuda):
    """Slices are the blocks' z; arrays have them as first dimension, of size 1 where they are not batched."""
    op = own_op(batching_cuda, "x, y, out", grid=(7, 2), block=32)
    assert gpus.launches(op, F32, F32) == ["native 0: 7,2,1 x 32,1,1 +0"]
    launches, starts = nested_batches(op, gpus, batching_cuda, [[spec(3, 5), spec(1, 5), spec(3, 5)]] * 2)
    assert launches == ["native 0: 7,2,3 x 32,1,1 +0"] * 2
    assert starts == [[0, 0, 0], [0, 20, 60]]


@pytest.mark.parametrize("options, z", [
    ({"grid": 7, "vmap_method": "sequential"}, 1),
    ({"grid": (7, 1, 2)}, 2),
], ids=["sequential", "z of the launch"])  # fmt: skip
def test_fakecuda_launches_per_slice(gpus, package_cuda, options, z):
    """In the order of slices; an operand that is not batched is not copied."""
    op = own_op(package_cuda, "x, y, out", block=32, **options)
    launches, starts = nested_batches(op, gpus, package_cuda, [[spec(5)] * 3] * 6)
    assert launches == [f"native 0: 7,1,{z} x 32,1,1 +0"] * 6
    assert starts == [[0, 0, 0], [20, 0, 20], [40, 0, 40], [0, 20, 60], [20, 20, 80], [40, 20, 100]]


def test_fakecuda_more_slices_than_a_grid_has_blocks(gpus, batching_cuda):
    x, x_data = aligned((65_538, 1))
    chunks = [[spec(65_535, 1)] * 2, [spec(3, 1)] * 2]
    op = jax.vmap(own_op(batching_cuda))
    launches, [first, second] = gpus.launches_and_addresses(batching_cuda, chunks, op, x)
    assert launches == ["native 0: 1,1,65535 x 1,1,1 +0", "native 0: 1,1,3 x 1,1,1 +0"]
    assert np.subtract(second, first).tolist() == [4 * 65_535] * 2 and first[0] == x_data


@pytest.mark.parametrize("body", ["out[0] = cuda.blockIdx.z", "cuda.threadfence()"])
def test_fakecuda_kernels_that_know_of_z_or_wait_are_launched_per_slice(gpus, compiling_cuda, body):
    if "fence" in body and is_successor(compiling_cuda):
        pytest.skip("numba-cuda-mlir 0.6.0 fails to compile cuda.threadfence()")
    op = xk.numba_cuda_kernel(own_kernel(compiling_cuda, "x, out", body), like_first, **BLOCK)
    assert gpus.launches(jax.vmap(op), jnp.ones((4, 3))) == [ONE_THREAD] * 4


def without_aliases(ffi_lowering):
    """XLA is not told of them, as if it forgot them, which it does in a dynamic-slice fusion on GPUs (jax 0.11.2)."""

    def lowering(name, *, operand_output_aliases, **options):
        return ffi_lowering(name, **options)

    return lowering


ALIAS = {"input_output_aliases": {0: 0}}


@pytest.mark.parametrize("options, is_lost, starts, value", [
    (ALIAS, False, [], 1),
    (ALIAS, True, ["copy 24 bytes"], 1),
    ({"zero_outputs": True}, False, ["set 24 bytes to 0"], 0),
])  # fmt: skip
def test_fakecuda_outputs_start_before_the_launches(gpus, monkeypatch, package_cuda, options, is_lost, starts, value):
    """All slices at once, on the stream of the call."""
    if is_lost:
        monkeypatch.setattr(jax.ffi, "ffi_lowering", without_aliases(jax.ffi.ffi_lowering))
    out = run_for_cuda(jax.vmap(own_op(package_cuda, **options)), jnp.ones((2, 3)))
    np.testing.assert_array_equal(out, [[value] * 3] * 2)
    log = [line for line in gpus.log() if "attribute" not in line]
    assert log[: len(starts)] == starts
    assert all("native" in line for line in log[len(starts) :])


@pytest.mark.parametrize("function, text, n_launches", [
    ("cuModuleLoadData", "cuModuleLoadData failed with CUDA_ERROR_OUT_OF_MEMORY: out of memory", 0),
    ("cuMemsetD8Async", "RuntimeError: CUDA_ERROR_OUT_OF_MEMORY: out of memory, when an output got its first values "
     "(raised in kernel 'kernel')", 0),
    ("cuLaunchKernel", "RuntimeError: CUDA_ERROR_OUT_OF_MEMORY: out of memory, from a launch with grid=(1, 2, 1), "
     "block=(64, 1, 1), shared_mem=300000 (raised in kernel 'kernel')", 1),
])  # fmt: skip
def test_fakecuda_a_failure_ends_the_call_and_no_other(gpus, package_cuda, function, text, n_launches):
    op = own_op(package_cuda, grid=(1, 2), block=64, shared_mem=300_000, vmap_method="sequential", zero_outputs=True)
    batch = jnp.ones((4, 2))
    gpus.driver.fail(function.encode())
    with pytest.raises(Exception, match=re.escape(text)):
        run_for_cuda(jax.vmap(op), batch)
    launch = "native 0: 1,2,1 x 64,1,1 +300000"
    assert gpus.log().count(launch) == n_launches
    assert gpus.launches(jax.vmap(op), batch) == [launch] * 4


def test_fakecuda_callables_may_be_captured_if_one_says_so(gpus):
    def launch(x, out, stream):
        pass

    assert gpus.traits(xk.numba_cuda_callable(launch, like_first), F32) == 0
    assert gpus.traits(xk.numba_cuda_callable(launch, like_first, command_buffer=True), F32) == 1


@pytest.mark.filterwarnings("ignore:Could not find source for function")  # that debug kernels would name
@pytest.mark.parametrize("kind, stream", [
    ("debug", " on stream 0"),  # on which Numba reads the error code of a debug kernel
    ("cooperative", ""),
    ("another layout", ""),
    ("compiled for each grid", ""),
])  # fmt: skip
def test_fakecuda_kernels_that_python_launches(gpus, monkeypatch, compiling_cuda, kind, stream):
    body = "cuda.cg.this_grid().sync()" if kind == "cooperative" else "cuda.grid(1)"
    options = {"debug": True, "opt": False} if kind == "debug" else {}
    kernel = compiling_cuda.jit(**options)(own_kernel(compiling_cuda, "x, out", body))
    monkeypatch.setattr(type(kernel), "compile", compiling(kind, type(kernel).compile))
    op = jax.vmap(xk.numba_cuda_kernel(kernel, like_first, grid=(2, 3), block=8, shared_mem=64))
    gpus.set(device=1)
    assert gpus.launches(op, jnp.ones((2, 9))) == [f"numba 1: 2,3,1 x 8,1,1 +64{stream}"] * 2
    assert gpus.traits(op, spec(2, 9)) == 0


def compiling(kind, compile_):
    """Compiles as a package might: for a given grid only, or for arrays by reference."""
    refusals = ["whole-function planner requires launch metadata, No launch config set for this thread"]

    def compile_otherwise(dispatcher, *args):
        if kind == "compiled for each grid" and refusals:
            raise RuntimeError(refusals.pop())
        found = compile_(dispatcher, *args)
        parameters = "(.param .u64 a, .param .align 8 .b8 b[56])"
        if kind == "another layout" and hasattr(found, "ptx"):
            found.ptx = f".entry {found.metadata['func_name']}{parameters}"
        elif kind == "another layout":
            found._codelibrary.get_asm_str = lambda: f".entry {found.entry_name}{parameters}"
        return found

    return compile_otherwise


def test_fakecuda_callable(gpus, compiling_cuda):
    seen, kernel = [], compiling_cuda.jit(own_kernel(compiling_cuda, "x, out"))

    @xk.numba_cuda_callable(outs=lambda x: jax.ShapeDtypeStruct((2, 3), "int8"), scratch=like_first)
    def call(x, out, tmp, stream):
        for array in x, out, tmp:
            seen.append((array.shape, str(array.dtype)))
        kernel[1, 8, stream](x, tmp)

    gpus.set(device=1)
    assert gpus.launches(call, jnp.arange(5).astype("float16")) == ["numba 1: 1,1,1 x 8,1,1 +0"]
    assert seen == [((5,), "float16"), ((2, 3), "int8"), ((5,), "float16")]


@pytest.mark.parametrize("static", [{}, {"out": 3}], ids=["launched", "called by what is launched"])
@pytest.mark.parametrize("body, refused", [
    ("cuda.atomic.add(x[1:], 0, 1)", "its inputs are read-only"),
    ("return 1.0", "it returns a value"),
])  # fmt: skip
def test_fakecuda_refused_kernels(gpus, compiling_cuda, body, refused, static):
    kernel = compiling_cuda.jit(runs(body, cuda=compiling_cuda))
    op = xk.numba_cuda_kernel(kernel, () if static else like_first, has_side_effect=True, **BLOCK)
    with pytest.raises(TypeError, match=f"kernel 'kernel' .*; {refused}"):
        run_for_cuda(functools.partial(op, **static), F32)


def cuda_count(x, out):
    cuda.atomic.add(x, 0, 1.0)


def test_fakecuda_a_kernel_in_numbas_cache_is_refused_again(gpus, compiling_cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for _ in range(2):
        kernel = compiling_cuda.jit(cache=True)(written_for(compiling_cuda, cuda_count))
        with pytest.raises(TypeError, match="its inputs are read-only"):
            run_for_cuda(xk.numba_cuda_kernel(kernel, like_first, **BLOCK), F32)


@in_axpy
def test_fakecuda_kernel_that_does_not_take_buffers(gpus, compiling_batching_cuda, scalars):
    kernel = written_for(compiling_batching_cuda, cuda_axpy)
    kernel = compiling_batching_cuda.jit(fastmath=True, lineinfo=True)(kernel)
    op = axpy_op(kernel, scalars)
    call = lambda x: op(n=8, a=2.0, x=x, y=x)
    assert gpus.launches(call, jnp.ones(8)) == ["native 0: 1,1,1 x 8,1,1 +0"]
    assert gpus.launches(jax.vmap(call), jnp.ones((4, 8))) == ["native 0: 1,1,4 x 8,1,1 +0"]


def test_fakecuda_explicit_signature(gpus, compiling_cuda):
    explicit = compiling_cuda.jit("void(float32[:], float32[:])")(own_kernel(compiling_cuda, "x, out"))
    assert gpus.launches(xk.numba_cuda_kernel(explicit, like_first, **BLOCK), F32) == [ONE_THREAD]


# -- the simulator, and the same on a GPU --------------------------------------------------------------


@compiled
@pytest.mark.processes
def test_cuda_simulator():
    """Runs what needs a device on the simulator, which Numba decides on when it is imported."""
    cells = [backend for _, backend, _, _ in all_cells() if backend.startswith("numba_cuda")]
    tests = "test_on_cuda or test_cudasim or (test_matrix and numba_cuda) or test_export_and"
    outcomes = run_pytest("-k", tests, NUMBA_ENABLE_CUDASIM="1", JAX_PLATFORMS="cpu")
    del outcomes["deselected"]
    assert outcomes == {"passed": len(cells) + 1 + 19}  # export, and the tests of this section


@on_device
@pytest.mark.parametrize("jitted", [False, True])
@in_axpy
def test_on_cuda_kernel_that_does_not_take_buffers(scalars, jitted):
    op = axpy_op(cuda.jit(cuda_axpy) if jitted else cuda_axpy, scalars)
    x = jnp.arange(8.0)
    for n in 5, 3:
        call = functools.partial(op, n=n, a=2.0, x=x)
        expected = np.where(x < n, 5 * x, 3 * x)
        np.testing.assert_array_equal(call(y=3 * x), expected)
        slices = jax.vmap(lambda y: call(y=y))(jnp.stack([3 * x, 3 * x]))
        np.testing.assert_array_equal(slices, [expected, expected])


@on_device
def test_on_cuda_op_runs_where_its_kernels_do():
    op = xk.XLACustomKernel("copy")
    op.def_numba_cuda_kernel(functools.partial(cuda_op, cuda_copy))
    np.testing.assert_array_equal(op(F32, outs=spec(4)), F32)


@on_device
def test_on_cuda_dynamic_shared_memory():
    @xk.numba_cuda_kernel(outs=like_first, grid=3, block=8, shared_mem=4 * 16_008)  # above the usual 48 KiB
    def reverse_blocks(x, out):
        tile = cuda.shared.array(0, cuda_float32)
        i, t = cuda.grid(1), cuda.threadIdx.x
        tile[16_000 + t] = x[i]
        cuda.syncthreads()
        out[i] = tile[16_000 + cuda.blockDim.x - 1 - t]

    x = jnp.arange(24, dtype=jnp.float32)
    np.testing.assert_array_equal(reverse_blocks(x), x.reshape(3, 8)[:, ::-1].ravel())


@on_device
def test_on_cuda_operands_without_dimensions_and_without_batch():
    @cuda_op
    def scale(x, factor, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = factor[()] * x[i]

    x, factors = jnp.arange(5.0), jnp.array([2.0, 3.0])
    np.testing.assert_array_equal(scale(x, factors[0]), [0, 2, 4, 6, 8])
    np.testing.assert_array_equal(jax.vmap(scale, (None, 0))(x, factors), [[0, 2, 4, 6, 8], [0, 3, 6, 9, 12]])


@on_device
def test_on_cuda_arrays_without_elements():
    for op in cuda_op(cuda_copy), xk.numba_cuda_kernel(cuda_copy, like_first, grid=1, block=4):
        assert op(jnp.zeros(0)).shape == (0,)
        assert jax.vmap(op)(jnp.zeros((0, 3))).shape == (0, 3)
        assert jax.vmap(op)(jnp.zeros((3, 0))).shape == (3, 0)
    np.testing.assert_array_equal(cuda_op(cuda_copy, spec(2))(jnp.zeros(0)), [0, 0])


@on_device
def test_on_cuda_callable_launches_several_kernels():
    """By way of a temporary buffer and of an array of its own, eagerly and for every slice."""
    add = cuda.jit(cuda_add)

    @xk.numba_cuda_callable(outs=like_first, scratch=like_first)
    def five_times(x, out, tmp, stream):
        own = cuda.device_array(x.shape, x.dtype)
        for a, b, total in (x, x, tmp), (tmp, x, own), (tmp, own, out):
            add[1, 8, stream](a, b, total)

    x = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    np.testing.assert_array_equal(five_times(x[0, 0]), 5 * x[0, 0])
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(five_times)))(x), 5 * x)


@on_device
def test_on_cuda_exceptions_of_callables_reach_the_user():
    @xk.numba_cuda_callable(outs=like_first)
    def refuse(x, out, stream):
        raise LookupError(f"no table for {x.shape}", cuda)

    with pytest.raises(Exception, match=r"LookupError: .*no table for \(1, 3\).* \(raised in kernel 'refuse'\)"):
        jax.block_until_ready(refuse(jnp.ones((1, 3))))


@on_device
def test_on_cuda_equal_closures_share_a_target():
    def scale_by(factor):
        @cuda.jit(device=True)
        def scaled(value):
            return factor * value

        def kernel(x, out):
            out[0] = scaled(x[0])

        return xk.numba_cuda_kernel(cuda.jit(kernel), like_first, **BLOCK)

    before = len(xk.export_checks())
    assert [scale_by(factor)(F32)[0] for factor in (2, 3, 2, 3)] == [2, 3, 2, 3]
    assert len(xk.export_checks()) == before + 2


@simulated
def test_cudasim_input_is_read_only_and_errors_name_the_thread():
    op = xk.numba_cuda_kernel(runs("x[0] = 1"), like_first, **BLOCK)
    text = "tid=[0, 0, 0] ctaid=[0, 0, 0]: assignment destination is read-only (raised in kernel 'kernel')"
    with pytest.raises(Exception, match=re.escape(f"ValueError: {text}")):
        jax.block_until_ready(op(F32))
    np.testing.assert_array_equal(cuda_op(cuda_add)(F32, F32), F32 + F32)


@simulated
@pytest.mark.parametrize("static", [{}, {"n": 3}], ids=["launched", "called by what is launched"])
def test_cudasim_refuses_a_kernel_that_returns(static):
    op = xk.numba_cuda_kernel(runs("return 1", ", ".join(["x", *static, "out"])), spec(3), **BLOCK)
    with pytest.raises(Exception, match="the kernel returns a value: write to the output arrays"):
        jax.block_until_ready(op(F32, **static))


@simulated
def test_cudasim_runs_one_kernel_at_a_time():
    """The simulator keeps the running kernel in globals."""
    rows = np.arange(96, dtype=np.float32).reshape(8, 12)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(cuda_op(cuda_copy), rows))
    np.testing.assert_array_equal(results, rows)


@simulated
def test_cudasim_refuses_kernels_of_the_successor():
    members = {"__module__": "numba_cuda_mlir.descriptor", "py_func": staticmethod(cuda_copy), "__name__": "cuda_copy"}
    op = cuda_op(type("MLIRDispatcher", (), members)())
    with pytest.raises(NotImplementedError, match="'cuda_copy' is written for numba_cuda_mlir, which has no simulator"):
        op(F32)


@simulated
def test_cudasim_runs_on_cpu_only():
    with pytest.raises(NotImplementedError, match=r"runs on the CPU only where NUMBA_ENABLE_CUDASIM=1 .* for 'cuda'"):
        lower_for_cuda(cuda_op(cuda_copy), spec(3))


# -- with a GPU ----------------------------------------------------------------------------------------

CUDA_ON_DISK = """
    from numba import cuda

    compiled = []
    dispatcher = type(cuda.jit(like_first))
    compile_ = dispatcher.compile
    dispatcher.compile = lambda *args: compiled.append(args) or compile_(*args)
    added = int(sys.argv[1])

    def helper(a):
        return a * 2 + added

    def run(helper):
        kernel = cuda.jit(runs("out[0] = helper(x[0])", helper=helper))
        call = xk.numba_cuda_kernel(kernel, like_first, grid=1, block=1)
        print(call(ones)[0], jax.vmap(call)(jnp.ones((3, 4)))[2, 0], len(compiled) > 0)

    used = cuda.jit(device=True)(helper)
    run(used)
    added += 10
    run(used)  # with the code from before the change, if Numba compiled it
    run(cuda.jit(device=True)(helper))
    """


@on_gpu
def test_gpu_kernels_on_disk(tmp_path):
    def results(added):
        environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cuda,cpu"}
        first, _, last = run_code(CUDA_ON_DISK, added, **environment).splitlines()[-3:]
        return first, last

    assert results(1) == ("3.0 3.0 True", "13.0 13.0 True")
    assert results(1) == ("3.0 3.0 False", "13.0 13.0 False")
    assert results(2) == ("4.0 4.0 True", "14.0 14.0 True")


def gpu_copy(how):
    """A kernel that copies its input, launched in each way that there is."""
    if how == "native":
        return cuda_op(cuda_copy)
    if how == "debug":
        return cuda_op(cuda.jit(debug=True, opt=False)(cuda_copy))
    if how == "warp":
        pytest.importorskip("warp")
        relu = matrix_kernel("leaky_relu", "warp", np.dtype("float32"), alpha=0.5)  # copies positive numbers
        return xk.warp_kernel(relu, like_first)
    copy = cuda.jit(cuda_copy)
    return xk.numba_cuda_callable(lambda x, out, stream: copy[x.size // 256 + 1, 256, stream](x, out), like_first)


@on_gpu
@pytest.mark.parametrize("how", ["native", "debug", "callable", "warp"])
def test_gpu_stream_order_under_load(how):
    """The kernel stands between two XLA operations that take their time, many times over."""

    def square(a, k):  # the factor tells a late result from an early one
        b = a @ a
        return (k + 1) * b / jnp.max(b)

    def chain(copy, a):
        for k in range(20):
            a = square(copy(square(a, k).ravel()).reshape(a.shape), k)
        return a

    a = jnp.asarray(np.random.default_rng(3).uniform(size=(512, 512)).astype("float32"))
    expected = jax.jit(functools.partial(chain, like_first))(a)
    run = jax.jit(functools.partial(chain, gpu_copy(how)))
    for _ in range(2):
        np.testing.assert_allclose(run(a), expected, rtol=1e-2)


@pytest.fixture
def launches(monkeypatch):
    """The grids of all launches of kernels that are compiled from now on."""
    grids, driver = [], ctypes.CDLL("libcuda.so.1")
    number, pointer = ctypes.c_uint32, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, *[number] * 7, pointer, pointer, pointer)

    def launch(function, *args):
        grids.append(args[:3])
        return kind(("cuLaunchKernel", driver))(function, *args)

    class Library(ctypes.CDLL):
        cuLaunchKernel = kind(launch)

    monkeypatch.setattr(ctypes, "CDLL", Library)
    yield grids
    KEPT.append(Library)  # targets are never freed


KEPT = []


def integers(*shape):
    """float32 numbers whose sums and products are exact."""
    return np.random.default_rng(sum(shape)).integers(-8, 9, shape).astype(np.float32)


STARTING = {  # kernels for v + d: parameters, what they do for each i, options, and constants of the call
    "aliased": ("v, d, out", "out[i] += d[i]", {"input_output_aliases": {0: 0}}, {}),
    "in_out": ("v, d", "v[i] += d[i]", {"in_out_argnames": ["v"]}, {}),
    "zeros": ("v, d, out, tmp", "out[i] += v[i]; tmp[i] = d[i]; out[i] += tmp[i]",
              {"zero_outputs": True, "scratch": lambda v, d: v}, {}),
    "scalars": ("v, d, a, n, out", "out[i] = v[i] * a + d[i] * n", {"scalars": ["a"]}, {"a": np.float32(1), "n": 1}),
}  # fmt: skip


def starting_kernel(how):
    """A function that gives v + d, by a kernel whose outputs start from something, or that takes other things."""
    if how in STARTING:
        parameters, statements, options, constants = STARTING[how]
        kernel = own_kernel(cuda, parameters, f"i = cuda.grid(1)\n    if i < v.size: {statements}")
        op = xk.numba_cuda_kernel(kernel, lambda v, *_: v, launch_dims=lambda v, *_: v.size, **options)
        return functools.partial(op, **constants)
    pytest.importorskip("warp")
    if how == "warp differentiable":
        add = xk.warp_kernel(matrix_kernel("add", "warp", np.dtype("float32")), like_first, differentiable=True)
        return jax.grad(lambda v, d: (add(v, d) ** 2).sum() / 2)

    @wp.kernel(module="unique")
    def add_in_place(v: wp.array(dtype=float), d: wp.array(dtype=float)):
        i = wp.tid()
        v[i] = v[i] + d[i]

    return xk.warp_kernel(add_in_place, like_first, in_out_argnames=["v"])


@on_gpu
@pytest.mark.parametrize("options", [
    {"xla_gpu_enable_command_buffer": ""},
    {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1},
], ids=["launched", "command buffers"])  # fmt: skip
@pytest.mark.parametrize("how", [*STARTING, "warp in_out", "warp differentiable"])
def test_gpu_outputs_start_right_in_loops(how, options):
    """XLA fuses slices of 256 bytes in loops, and loses the alias of a kernel in the fusion (jax 0.11.2)."""
    kernel = starting_kernel(how)
    numbers = integers(6, 64)
    v, rows = numbers[0], numbers[1:]

    def each_row(v, rows):
        return jax.lax.scan(lambda v, row: (v, kernel(v, row)), v, rows)[1]

    def batches(v, rows):
        return jax.lax.map(lambda batch: jax.vmap(kernel)(batch, batch), jnp.stack([rows, rows]))

    def carried(v, rows):
        return jax.lax.scan(lambda v, row: (kernel(v, row), None), v, rows)[0]

    def run(program, **donation):
        return jax.jit(program, compiler_options=options, **donation)(jnp.asarray(v), jnp.asarray(rows))

    np.testing.assert_array_equal(run(each_row), v + rows)
    np.testing.assert_array_equal(run(batches), [2 * rows, 2 * rows])
    np.testing.assert_array_equal(run(carried, donate_argnums=0), v + rows.sum(axis=0))


@on_gpu
@pytest.mark.parametrize("inner, outer, x, y, grids", [
    ((0, None), (0, None), (40, 25, 40), (40,), [(1, 1, 1000)]),
    ((0, 0), (0, 0), (3, 5, 40), (3, 5, 40), [(1, 1, 15)]),
    ((0, None), (None, 0), (5, 40), (3, 40), [(1, 1, 5)] * 3),
    ((0, 0), (0, 0), (1, 1, 40), (1, 1, 40), [(1, 1, 1)]),
    ((0, 0), (0, 0), (2, 0, 40), (2, 0, 40), []),
])  # fmt: skip
def test_gpu_batches_in_one_launch_or_one_per_row(launches, inner, outer, x, y, grids):
    kernel = own_kernel(cuda, "x, y, out", "i = cuda.grid(1)\n    if i < x.size: out[i] = x[i] + y[i]")
    add = xk.numba_cuda_kernel(kernel, like_first, grid=1, block=64)
    x, y = integers(*x), integers(*y)
    results, expected = [jax.vmap(jax.vmap(function, inner), outer)(x, y) for function in (jax.jit(add), jnp.add)]
    np.testing.assert_array_equal(results, expected)
    assert launches == grids


@on_gpu
def test_gpu_a_row_that_a_kernel_reads_and_the_program_replaces():
    """XLA's dynamic-slice fusion lets a kernel write into the array that it reads (jax 0.11.2)."""

    @xk.numba_cuda_kernel(outs=lambda v, w: (v, w), launch_dims=64)
    def left_and_right(v, w, left, right):
        i = cuda.grid(1)
        if i < v.size:
            left[i] = v[i - 1 if i > 0 else v.size - 1] + w[i]
            right[i] = v[(i + 1) % v.size] - w[i]

    def replace_two_rows(k, m):
        left, right = left_and_right(m[k], m[0])
        return m.at[k].set(left).at[0].set(right)

    m = integers(4, 64)
    result = jax.jit(lambda m: jax.lax.fori_loop(0, 4, replace_two_rows, m))(m)
    for k in range(4):
        m[k], m[0] = np.roll(m[k], 1) + m[0], np.roll(m[k], -1) - m[0]
    np.testing.assert_array_equal(result, m)


@on_gpu
@pytest.mark.parametrize("captured", ["", "FUSION,CUBLAS,CUSTOM_CALL"], ids=["launched", "command buffers"])
def test_gpu_command_buffers(captured):
    """Tests that run on the GPU, with CUDA graphs off, and on for every computation."""
    flags = f"--xla_gpu_enable_command_buffer={captured} --xla_gpu_graph_min_graph_size=1"
    tests = "test_on_cuda or stream_order or (gpu and (test_warp_ops or test_warp_grad))"
    outcomes = run_pytest("-k", tests, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}")
    assert outcomes["passed"] >= 15  # more with Warp


@on_gpu
def test_gpu_callable_in_a_command_buffer():
    """XLA replays the launches, on fresh memory, without calling the function."""
    copy, calls = cuda.jit("void(float32[::1], float32[::1])")(cuda_copy), []

    @xk.numba_cuda_callable(outs=like_first, command_buffer=True)
    def op(x, out, stream):
        calls.append(1)
        copy[1, 32, stream](x, out)

    x = jnp.arange(8.0)
    step = jax.jit(lambda x: op(op(x * 2) + 1), compiler_options={"xla_gpu_graph_min_graph_size": 1})
    for k in range(20):
        np.testing.assert_array_equal(step(x + k), (x + k) * 2 + 1)
    assert len(calls) < 40


@on_gpu
def test_gpu_a_kernel_that_writes_to_an_input_changes_a_copy():
    """In every slice of a batch, which shares the input."""
    body = "i = cuda.grid(1)\n    if i < x.size:\n        cuda.stwt(x, i, x[i] + y[i])\n        out[i] = x[i]"
    add = cuda_op(own_kernel(cuda, "x, y, out", body))
    x, y = jnp.arange(4.0), jnp.ones((3, 4))
    np.testing.assert_array_equal(jax.vmap(add, (None, 0))(x, y), x + y)
    np.testing.assert_array_equal(x, [0, 1, 2, 3])


@on_gpu
def test_gpu_every_device():
    op = jax.jit(cuda_op(cuda_add))
    for k, device in enumerate(jax.local_devices(backend="cuda")):
        x = jax.device_put(np.arange(9, dtype=np.float32) + k, device)
        out = op(x, x)
        assert out.devices() == {device}
        np.testing.assert_array_equal(out, 2 * x)


@on_gpu
def test_gpu_cuda_cooperative_goes_through_python():
    kernel = own_kernel(cuda, "x, out", "cuda.cg.this_grid().sync(); out[0] = x[0]")
    np.testing.assert_array_equal(xk.numba_cuda_kernel(cuda.jit(kernel), spec(1), grid=2, block=8)(F32), [1])


# ======================================================================================================
# Warp
# ======================================================================================================

needs_warp = pytest.mark.needs("warp")
unique_kernel = wp and wp.kernel(module="unique")
floats = wp and wp.array(dtype=float)
rows_of_floats = wp and wp.array2d(dtype=float)
ints = wp and wp.array(dtype=wp.int32)


def sample(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(np.float32)


def check_equal(actual, expected, rtol=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol), actual, expected)


# -- kernels, how they are wrapped, and the same in JAX ------------------------------------------------


@functools.cache
def warp_kernels():
    """The kernels of this section; made on first use, so that the file loads without Warp."""

    @unique_kernel
    def multiply(x: floats, y: floats, out: floats):
        i = wp.tid()
        out[i] = x[i] * y[i]

    @unique_kernel
    def outer(x: floats, y: floats, out: rows_of_floats):
        i, j = wp.tid()
        out[i, j] = x[i] * y[j]

    @unique_kernel
    def matvec(m: wp.array(dtype=wp.mat22), v: wp.array(dtype=wp.vec2), out: wp.array(dtype=wp.vec2)):
        i = wp.tid()
        out[i] = m[i] * v[i]

    @unique_kernel
    def flip(x: wp.array4d(dtype=float), out: wp.array4d(dtype=float)):
        i, j, k, n = wp.tid()
        out[n, k, j, i] = x[i, j, k, n]

    @unique_kernel
    def squares_of_rows(x: rows_of_floats, out: floats):
        i = wp.tid()
        row = x[i]
        total = float(0.0)  # noqa: UP018
        for j in range(row.shape[0]):
            total += row[j] * row[j]
        out[i] = total

    @unique_kernel
    def smooth(x: floats, k: ints, squares: floats, sines: floats, count: ints):
        i = wp.tid()
        squares[i] = x[i] * x[k[i]]
        if i < sines.shape[0]:
            sines[i] = wp.sin(x[i])
        count[i] = 1

    @unique_kernel
    def tally(x: floats, out: floats):
        wp.atomic_add(out, 0, x[wp.tid()])

    @unique_kernel
    def scratchy(x: floats, out: floats, buffer: floats):
        i = wp.tid()
        buffer[i] = 3.0 * x[i]
        out[i] = buffer[i] + 1.0

    @unique_kernel
    def in_place(v: floats, current: floats, out: floats):
        i = wp.tid()
        out[i] += (current[i] - out[i]) * 0.1

    @unique_kernel
    def histogram(index: ints, weight: float, acc: floats):
        wp.atomic_add(acc, index[wp.tid()], weight)

    @unique_kernel
    def double_tiles(x: floats, out: floats):
        i = wp.tid()
        t = wp.tile_load(x, shape=64, offset=i * 64, storage="shared")
        wp.tile_store(out, t * 2.0, offset=i * 64)

    @unique_kernel
    def takes_doubles(x: wp.array(dtype=wp.float64)):
        wp.tid()

    @unique_kernel
    def takes_no_array(factor: float):
        wp.tid()

    return types.SimpleNamespace(**locals())


def smooth_in_jax(x, k):
    return x * x[k], jnp.sin(x[:3]), jnp.ones(5, jnp.int32)


def matvec_in_jax(m, v):
    return (m @ v[..., None])[..., 0]


class WarpCase(typing.NamedTuple):
    options: dict  # of warp_kernel
    args: tuple  # of a call
    reference: Callable  # the same in JAX


PAIR = sample(5), sample(5, seed=1)
SMOOTH = {"outs": (spec(5), spec(3), spec(5, dtype=np.int32)), "launch_dims": 5}
WARP_CASES = {  # by the name of the kernel
    "multiply": WarpCase({"outs": like_first}, PAIR, jnp.multiply),
    "outer": WarpCase({"outs": spec(3, 4), "launch_dims": (3, 4)}, (sample(3), sample(4, seed=1)), jnp.outer),
    "matvec": WarpCase({"outs": spec(3, 2)}, (sample(3, 2, 2), sample(3, 2)), matvec_in_jax),
    "flip": WarpCase({"outs": spec(5, 4, 3, 2)}, (sample(2, 3, 4, 5),), jnp.transpose),
    "squares_of_rows": WarpCase({"outs": spec(2), "launch_dims": 2}, (sample(2, 3),), lambda x: (x * x).sum(1)),
    "smooth": WarpCase(SMOOTH, (sample(5), np.array([1, 1, 3, 0, 2], np.int32)), smooth_in_jax),
    "tally": WarpCase({"outs": spec(1), "zero_outputs": True}, (sample(5),), lambda x: x.sum(keepdims=True)),
    "scratchy": WarpCase({"outs": like_first, "scratch": like_first}, (sample(5),), lambda x: 3 * x + 1),
    "in_place": WarpCase({"outs": spec(5), "input_output_aliases": {"v": 0}}, PAIR, lambda v, c: v + (c - v) * 0.1),
}


def wrapped(name, **options):
    """A kernel of the table, wrapped as its case says."""
    return xk.warp_kernel(getattr(warp_kernels(), name), **{**WARP_CASES[name].options, **options})


def batched(name, axis=0, **options):
    """A kernel of the table, the same in JAX, and arguments: a batch of the first, whose slices share the others."""
    case = WARP_CASES[name]
    first, *others = case.args
    in_axes = axis, *[None] * len(others)
    batch = np.stack([first, 2 * first, 3 * first], axis)
    return jax.vmap(wrapped(name, **options), in_axes), jax.vmap(case.reference, in_axes), (batch, *others)


def double_by_tiles(block_dim):
    """Blocks of 64 elements each."""
    options = {"launch_dims": lambda x: x.size // 64, "tiled": True, "block_dim": block_dim}
    return xk.warp_kernel(warp_kernels().double_tiles, like_first, **options)


@functools.cache
def kernel_of_every_kind():
    """A kernel with a parameter of every kind, and values for those passed by value, by name."""
    wp.init()  # vectors of halves need it

    @wp.struct
    class Inner:
        axis: wp.vec3

    @wp.struct
    class Settings:
        gain: float
        inner: Inner

    @unique_kernel
    def every(x: wp.array(dtype=wp.vec3), i: wp.int8, v: wp.vec3h, m: wp.mat33, s: Settings, n: wp.uint64,
              w: rows_of_floats, out: rows_of_floats):  # fmt: skip
        r, c = wp.tid()
        values = float(i) + float(v[1]) + m[2, 1] + s.gain + s.inner.axis[2] + float(n)
        out[r, c] = x[r][0] * w[r, c] + values

    settings = Settings()
    settings.gain = 1.5
    settings.inner.axis = wp.vec3(1.0, 2.0, 3.0)
    values = {"i": -3, "v": wp.vec3h(4.0, 5.0, 6.0), "m": wp.mat33(*range(9)), "s": settings, "n": 8}
    return every, values


EVERY = sample(2, 3), sample(2, 3, seed=1)


def call_every(x, w, differentiable=True, **others):
    """A call with those values, or others."""
    kernel, values = kernel_of_every_kind()
    options = {"launch_dims": (2, 3), "block_dim": 2, "differentiable": differentiable}
    return xk.warp_kernel(kernel, spec(2, 3), **options)(x, *(values | others).values(), w)


def every_in_jax(x, w):
    """The same for those values."""
    return x[:, :1] * w + (-3 + 5 + 7 + 1.5 + 3 + 8)


# -- the ways in which a Warp kernel is started --------------------------------------------------------


def with_unknown_bounds(launch):
    """A recorded launch of a Warp that passes more than the library knows."""

    class Bounds(ctypes.Structure):
        _fields_: typing.ClassVar = [*type(launch.bounds)._fields_, ("unknown", ctypes.c_int64)]

    known = bytes(launch.bounds)
    launch.bounds = Bounds.from_buffer_copy(known.ljust(ctypes.sizeof(Bounds), b"\0"))
    launch.params[0] = launch.bounds
    return launch


def packed_otherwise(launch):
    """A recorded launch of a Warp that packs arrays otherwise, in structs of the same size."""
    launch.params[1].strides[0] += 4
    return launch


def compile_anew(monkeypatch):
    """All kernels: their targets have other names from now on."""
    monkeypatch.setattr(xk, "__name__", f"xla_kernels_{os.urandom(4).hex()}")


def change_recorded_launches(monkeypatch, change):
    compile_anew(monkeypatch)
    launch = wp.launch

    def launching(*args, record_cmd=False, **options):
        launched = launch(*args, record_cmd=record_cmd, **options)
        return change(launched) if record_cmd else launched

    monkeypatch.setattr(wp, "launch", launching)


@needs_warp
@pytest.mark.parametrize("change, n_replays", [(None, 0), (with_unknown_bounds, 1), (packed_otherwise, 1)])
def test_warp_replays_launches_that_the_library_does_not_know(change, n_replays, monkeypatch):
    if change:
        change_recorded_launches(monkeypatch, change)
    f = wrapped("multiply")
    check_equal(f(*PAIR), PAIR[0] * PAIR[1])
    replays = []
    monkeypatch.setattr(wp.Launch, "launch", lambda launch: replays.append(launch))
    jax.block_until_ready(f(*PAIR))
    assert len(replays) == n_replays


NEEDED_BY_PATH = {"native": "warp", "replay": "warp", "gpu": "warp_gpu"}


@pytest.fixture(params=[pytest.param(path, marks=pytest.mark.needs(need)) for path, need in NEEDED_BY_PATH.items()])
def warp_path(request, monkeypatch):
    """On the CPU, natively and (as of a Warp that is not known) by replaying its recorded launch; and on a GPU."""
    if request.param == "replay":
        change_recorded_launches(monkeypatch, with_unknown_bounds)
    return request.param


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WARP_CASES)
def test_warp_ops(name, warp_path):
    case = WARP_CASES[name]
    check_equal(wrapped(name)(*case.args), case.reference(*case.args))
    f, reference, args = batched(name, axis=1)
    check_equal(f(*args), reference(*args))


def gradient_of(function, by=(0, 1)):
    """That of the sum of the squares of all results, so that these are in it."""

    def loss(*args):
        return sum((result**2).sum() for result in jax.tree.leaves(function(*args)))

    return jax.grad(loss, by)


def test_warp_values(warp_path):
    """Python's, NumPy's and Warp's; they are data of one target."""
    typed = {"i": wp.int8(-3), "n": np.uint64(8)}
    plain = {"v": np.array([4, 5, 6], np.float16), "m": [[0, 1, 2], [3, 4, 5], [6, 7, 8]]}
    others = {"i": 3, "n": 9}
    calls = [functools.partial(call_every, **values) for values in (typed, plain, others)]
    for call in calls[:2]:
        check_equal(gradient_of(call)(*EVERY), gradient_of(every_in_jax)(*EVERY), rtol=1e-4)
    assert len({target_of(call, *EVERY) for call in calls}) == 1


@needs_warp
def test_warp_struct_that_changes_is_another_value():
    every, values = kernel_of_every_kind()
    settings = deepcopy(values["s"])
    x, w = EVERY
    gains_seen_by_outs = []

    def outs(*args):
        gains_seen_by_outs.append(args[4].gain)
        return args[-1]

    f = xk.warp_kernel(every, outs, launch_dims=(2, 3))

    def call(x, settings):
        return f(x, *(values | {"s": settings}).values(), w)

    check_equal(call(x, settings), every_in_jax(x, w))
    settings.gain = 4.0
    check_equal(call(x, settings), every_in_jax(x, w) + 2.5)
    jax.eval_shape(lambda x: call(x, values["s"]), x)  # for `outs` these equal what that got at first
    assert gains_seen_by_outs[-1] == 1.5


@needs_warp
@pytest.mark.parametrize("convert, argument, text", [
    (xk.jaxtype_to_warptype, np.complex64, r"Warp has no scalar type for dtype .*it has bool, int8, .*float64"),
    (xk.jaxtype_to_warptype, "nonsense", "Warp has no scalar type for dtype 'nonsense'"),
    (xk.jaxinfo_to_warpinfo, spec(), r"1 to 4 dimensions; got 0 in float32\[\]; reshape it to \(1,\)"),
    (xk.jaxinfo_to_warpinfo, spec(1, 1, 1, 1, 1), r"1 to 4 dimensions; got 5 in float32\[1,1,1,1,1\]$"),
])  # fmt: skip
def test_warp_has_no_such_array(convert, argument, text):
    with pytest.raises(ValueError, match=text):
        convert(argument)


def add_to_histogram(index, weight, acc):
    """Where an input is also the output."""
    f = xk.warp_kernel(warp_kernels().histogram, lambda index, weight, acc: acc, in_out_argnames=["acc"])
    return f(index, weight, acc)


def test_warp_in_out(warp_path):
    rows, acc = jnp.array([[0, 0, 0, 0], [1, 1, 1, 2]]), jnp.ones(3)
    of_rows = jax.vmap(add_to_histogram, (0, None, None))
    check_equal(of_rows(rows, 0.5, acc), [[3, 1, 1], [1, 2.5, 1.5]])
    check_equal(acc, [1, 1, 1])


def test_warp_traced_values(warp_path):
    """Those of JAX, which are for the CPU alone."""
    index, zeros = jnp.array([0, 2, 2]), jnp.zeros(3)
    with pytest.raises(NotImplementedError, match=r"traced values for \['weight'\].* warp.array of shape \(1,\)"):
        lower_for_cuda(add_to_histogram, index, 0.5, zeros)
    if warp_path == "gpu":
        return
    check_equal(add_to_histogram(index, jnp.int32(4), zeros), [4, 0, 8])
    of_weights = jax.vmap(add_to_histogram, (None, 0, None))
    check_equal(of_weights(index, jnp.array([0.5, 2.0]), zeros), [[0.5, 0, 1], [2, 0, 4]])


@needs_warp
def test_warp_empty_launches_and_arrays():
    """There is no launch: outputs are zeros, or what they start from."""
    f, x = wrapped("multiply", launch_dims=0), jnp.ones(1000)
    assert not f(x, x).any()
    f, (v, current) = wrapped("in_place", launch_dims=0), PAIR
    check_equal(f(v, current), v)
    check_equal(jax.vmap(f, (None, 0))(v, np.stack([current, v])), np.stack([v, v]))
    empty = jnp.zeros(0)
    assert wrapped("multiply")(empty, empty).shape == (0,)


def test_warp_tiles(warp_path):
    f, x = double_by_tiles(block_dim=64), np.arange(3 * 128, dtype=np.float32).reshape(3, 128)
    check_equal(f(x[0]), 2 * x[0])
    check_equal(jax.vmap(f)(x), 2 * x)


# -- derivatives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, by", [("smooth", 0), ("squares_of_rows", 0), ("matvec", (0, 1)), ("outer", (0, 1))])
def test_warp_grad(name, by, warp_path):
    """Of several outputs, through views, of vectors and matrices; the gradient of what a batch shares is summed."""
    f, in_jax, args = batched(name, differentiable=True)
    check_equal(gradient_of(f, by)(*args), gradient_of(in_jax, by)(*args), rtol=1e-4)


def test_warp_cotangent_is_not_changed(warp_path):
    """An adjoint changes its cotangent alone, of which it gets a copy, and stores no output again."""
    pullback = jax.vjp(wrapped("multiply", differentiable=True), jnp.arange(4.0), jnp.ones(4))[1]
    ct = jnp.ones(4)
    check_equal(pullback(ct), ([1, 1, 1, 1], [0, 1, 2, 3]))
    check_equal(ct, [1, 1, 1, 1])
    assert jax.jit(pullback).lower(ct).as_text().count("output_operand_alias<") == 1


def test_warp_gradient_of_an_element_written_twice(warp_path):
    @unique_kernel
    def pick(a: floats, b: floats, out: floats):
        i = wp.tid()
        out[i] = a[i]
        if a[i] > 2.0:
            out[i] = b[i]

    f = xk.warp_kernel(pick, like_first, differentiable=True)
    gradients = jax.grad(sum_of(f), (0, 1))(jnp.arange(1.0, 5.0), jnp.ones(4))
    check_equal(gradients, ([1, 1, 0, 0], [0, 0, 1, 1]))


@needs_warp
def test_warp_adjoints_change_no_outputs():
    """Warp runs the functions that a kernel calls again in the adjoint."""

    @wp.func
    def add(a: floats, i: int, v: float):
        a[i] += v

    @unique_kernel
    def squares(x: floats, out: floats):
        i = wp.tid()
        out[i] = 0.0
        add(out, i, x[i] * x[i])

    out, vjp = jax.vjp(xk.warp_kernel(squares, like_first, differentiable=True), jnp.arange(3.0))
    check_equal(vjp(jnp.ones(3))[0], [0, 2, 4])
    check_equal(out, [0, 1, 4])


@needs_warp
def test_warp_kernel_without_an_adjoint():
    @wp.kernel(enable_backward=False, module="unique")
    def forward_only(x: floats, out: floats):
        out[wp.tid()] = x[wp.tid()]

    f = xk.warp_kernel(forward_only, like_first, differentiable=True)
    with pytest.raises(RuntimeError) as raised:
        jax.grad(sum_of(f))(jnp.arange(3.0))
    assert "differentiable=True needs enable_backward=True" in "".join(raised.value.__notes__)


# -- names, lifetime, threads --------------------------------------------------------------------------


def kernel_with_a_constant(constant):
    """As generators make them: each call adds a kernel of the same name to one module, which is then built again."""
    c = wp.constant(constant)

    @wp.kernel(module=wp.get_module("generated"))
    def scaled(x: floats, out: floats):
        i = wp.tid()
        out[i] = c * x[i]

    return xk.warp_kernel(scaled, like_first)


def test_warp_generated_kernels_share_a_target_if_equal(warp_path, monkeypatch):
    """Options of the module and Warp's settings count, which are no part of Warp's own hash."""
    x = jnp.arange(3.0)
    first = kernel_with_a_constant(2.0)

    def name_of(constant):
        return target_of(kernel_with_a_constant(constant), x)

    names = [target_of(first, x), name_of(2.0), name_of(3.0)]
    check_equal(first(x), 2 * x)
    check_equal(kernel_with_a_constant(3.0)(x), 3 * x)
    check_equal(first(x), 2 * x)  # although its module was built again
    options = wp.get_module("generated").options
    monkeypatch.setitem(options, "fast_math", not options["fast_math"])
    names.append(name_of(2.0))
    monkeypatch.setattr(wp.config, "verify_fp", True)
    names.append(name_of(2.0))
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_warp_threads_that_add_kernels_to_one_module(warp_path, monkeypatch):
    """How much Warp prints, which the library changes for a while, is the user's choice afterwards."""
    setting, choice = ("log_level", 20) if hasattr(wp.config, "log_level") else ("quiet", False)
    monkeypatch.setattr(wp.config, setting, choice)

    def work(i):
        @wp.kernel(module=wp.get_module("threaded"))
        def shifted(x: floats, shift: float, out: floats):
            j = wp.tid()
            out[j] = x[j] + shift

        check_equal(xk.warp_kernel(shifted, like_first)(PAIR[0], float(i)), PAIR[0] + i)

    in_threads(work, range(16))
    assert getattr(wp.config, setting) == choice


@needs_warp
def test_warp_builds_again_after_another_thread_disturbed_it(monkeypatch):
    """By threads alone it is met once in many runs.  Warp < 1.19 notes that it does not build, and then never does."""
    f = kernel_with_a_constant(17.0)
    errors = [RuntimeError("dictionary changed size during iteration"), KeyError("scaled")]
    module = type(wp.get_module("generated"))
    load = module.load

    def disturbed(*args, **options):
        if errors:
            raise errors.pop()
        return load(*args, **options)

    monkeypatch.setattr(module, "load", disturbed)
    check_equal(f(PAIR[0]), 17 * PAIR[0])
    assert not errors


def meeting():
    """A Warp function: how many threads of the CPU are inside of it; the first waits a while for a second."""
    code = """
        static int inside;
        int count = __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
        for (int i = 0; i < patience && count < 2; i++)
            count = __atomic_load_n(&inside, __ATOMIC_SEQ_CST);
        __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
        return count;
    """

    @wp.func_native(code)
    def meet(patience: int) -> int: ...

    return meet


PATIENCE = np.full((16, 1), 2_000_000, np.int32)


@needs_warp
@needs_cores
@pytest.mark.parametrize("method", [None, "sequential"])
def test_warp_slices_of_a_batch_run_on_all_threads_unless_in_order(method):
    meet = meeting()

    @unique_kernel
    def meets(patience: ints, out: ints):
        out[0] = meet(patience[0])

    run = jax.jit(jax.vmap(xk.warp_kernel(meets, like_first, vmap_method=method)))
    most_at_once = 1
    for _ in range(100):  # a busy machine may leave the caller alone
        most_at_once = max(most_at_once, run(PATIENCE).max())
        if method == "sequential" or most_at_once > 1:
            break
    assert (most_at_once > 1) == (method != "sequential")


@needs_warp
def test_warp_kernels_on_tiles_never_overlap_on_the_cpu():
    """Warp keeps the memory of all tiles behind one pointer there."""
    meet = meeting()

    @unique_kernel
    def meets(patience: ints, out: ints):
        wp.tile_store(out, wp.tile_load(patience, shape=1))
        out[0] = meet(patience[0])

    run = jax.jit(jax.vmap(xk.warp_kernel(meets, like_first, launch_dims=1, tiled=True)))

    def work(patience):
        check_equal(run(patience), np.ones((16, 1)))

    in_threads(work, [PATIENCE] * 4)


# -- without a GPU: the path for GPUs, on the CPU ------------------------------------------------------


def capsule_address(capsule):
    """The address of the C function in a PyCapsule."""
    name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return pointer(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, name(capsule))


class FakeGpu(FakeGpus):
    """CUDA device 1, made of the CPU.  For JAX and XLA it is one of two GPUs; and it stands in for

    Warp: a launch on a GPU is recorded on the CPU;
    libcuda: a launch runs what was recorded, with the parameters that the handler passed.
    """

    STREAM = 0x5EED
    run = staticmethod(run_for_cuda)
    kept: typing.ClassVar = []  # XLA never forgets a handler

    def __init__(self, monkeypatch):
        self.handlers, self.all_traits = {}, {}
        self.local_devices, self.register = jax.local_devices, jax.ffi.register_ffi_target
        self.library, self.load_library = self.make_library(), ctypes.CDLL
        self.record_on_cpu, self.run_on_cpu = wp.launch, wp.Launch.launch
        self.ordinal = 1
        self.recorded = {}  # by the address of the machine code
        self.launches = []  # by libcuda: (grid, block, shared memory, stream)
        self.python_launches = []  # the streams of those by Warp
        make_array = wp.array.__init__

        def make_on_cpu(array, *args, **options):
            make_array(array, *args, **{**options, "device": "cpu"})

        def launch_by_warp(launch, stream):
            self.python_launches.append(stream.cuda_stream)
            self.run_on_cpu(launch)

        compile_anew(monkeypatch)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", self.with_gpus)
        monkeypatch.setattr(jax.ffi, "register_ffi_target", self.register_for_cpu)
        monkeypatch.setattr(ctypes, "CDLL", self.open_library)
        monkeypatch.setattr(wp, "launch", self.record)
        monkeypatch.setattr(wp.array, "__init__", make_on_cpu)
        monkeypatch.setattr(wp.Launch, "launch", launch_by_warp)
        self.kept.append(self)

    @property
    def grids(self):
        return [grid for grid, *_ in self.launches]

    def get(self, name):
        return self.ordinal

    def record(self, kernel, *args, device, block_dim, **options):
        launch = self.record_on_cpu(kernel, *args, device="cpu", block_dim=1, **options)
        forward, backward = launch.hooks.forward, launch.hooks.backward
        shared_memory = block_dim + int(device.removeprefix("cuda:"))  # tells one recording from another
        launch.hooks = type(launch.hooks)(forward, backward, shared_memory, shared_memory)
        code = backward if launch.adjoint else forward
        self.recorded[ctypes.cast(code, ctypes.c_void_p).value] = launch
        return launch

    def open_library(self, name, *args, **options):
        return self.library if name == "libcuda.so.1" else self.load_library(name, *args, **options)

    def make_library(self):
        code, number, size, pointer = ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p
        launch = ctypes.CFUNCTYPE(code, pointer, *[number] * 7, pointer, ctypes.POINTER(pointer), pointer)
        copy = ctypes.CFUNCTYPE(code, pointer, pointer, size, pointer)
        fill = ctypes.CFUNCTYPE(code, pointer, ctypes.c_ubyte, size, pointer)
        get_device = ctypes.CFUNCTYPE(code, ctypes.POINTER(code))
        return types.SimpleNamespace(
            cuLaunchKernel=launch(self.launch),
            cuMemcpyDtoDAsync_v2=copy(self.copy),
            cuMemsetD8Async=fill(self.fill),
            cuCtxGetDevice=get_device(self.get_device),
            cuCtxGetCurrent=lambda context: 0,
            cuCtxSetCurrent=lambda context: 0,
        )

    def launch(self, function, gx, gy, gz, bx, by, bz, shared_memory, stream, params, extra):
        self.launches.append(((gx, gy, gz), (bx, by, bz), shared_memory, stream))
        launch = self.recorded[function]
        for param, passed in zip(launch.params, params):
            ctypes.memmove(ctypes.addressof(param), passed, ctypes.sizeof(param))
        self.run_on_cpu(launch)
        return 0

    def copy(self, target, source, size, stream):
        ctypes.memmove(target, source, size)
        return 0

    def fill(self, target, value, size, stream):
        ctypes.memset(target, value, size)
        return 0

    def get_device(self, ordinal):
        ordinal[0] = self.ordinal
        return 0


@pytest.fixture
def fake_gpu(monkeypatch):
    return FakeGpu(monkeypatch)


@needs_warp
def test_warp_runs_on_no_tpu():
    with pytest.raises(NotImplementedError, match=r"Warp kernel 'outer' runs on CPUs and NVIDIA GPUs; .* 'tpu'"):
        jax.jit(wrapped("outer")).trace(*WARP_CASES["outer"].args).lower(lowering_platforms=("tpu",))


@needs_warp
@pytest.mark.parametrize("is_known", [True, False])
def test_warp_on_fake_gpu(is_known, monkeypatch):
    """Where a handler calls libcuda, and where it goes through Warp's own launch."""
    if not is_known:
        change_recorded_launches(monkeypatch, with_unknown_bounds)
    gpu = FakeGpu(monkeypatch)
    f, in_jax, args = batched("squares_of_rows", differentiable=True)
    check_equal(gpu.run(gradient_of(f, 0), *args), gradient_of(in_jax, 0)(*args))
    is_command_buffer_compatible = int(is_known)
    assert set(gpu.all_traits.values()) == {is_command_buffer_compatible}
    if is_known:  # three slices in one launch, and the adjoint of each
        recorded_for_the_device = 256 + gpu.ordinal
        assert gpu.launches == [((1, 1, 1), (256, 1, 1), recorded_for_the_device, gpu.STREAM)] * 4
    else:
        assert gpu.python_launches == [gpu.STREAM] * 6


@needs_warp
def test_warp_tiles_on_fake_gpu(fake_gpu):
    """Warp makes code for a number of threads per block, on which the memory of tiles depends."""
    x = jnp.arange(128.0)
    check_equal(fake_gpu.run(double_by_tiles(block_dim=32), x), 2 * x)
    assert fake_gpu.launches == [((2, 1, 1), (32, 1, 1), 32 + fake_gpu.ordinal, fake_gpu.STREAM)]
    [launch] = fake_gpu.recorded.values()
    passed = bytes(launch.params[0])
    launch.set_dim((2, 32))
    assert passed == bytes(launch.params[0])


@needs_warp
def test_warp_kernel_is_not_loaded_on_another_gpu(fake_gpu):
    fake_gpu.ordinal = 2
    with pytest.raises(Exception, match="kernel 'multiply' is not loaded on this GPU"):
        fake_gpu.run(wrapped("multiply"), *PAIR)


@needs_warp
def test_warp_values_on_fake_gpu(fake_gpu):
    check_equal(fake_gpu.run(gradient_of(call_every), *EVERY), gradient_of(every_in_jax)(*EVERY))
    assert set(fake_gpu.grids) == {(3, 1, 1)}


def kernel_with_grid_stride(grid_stride):
    options = {} if grid_stride else {"grid_stride": False}
    if not options.keys() <= inspect.signature(wp.kernel).parameters.keys():
        pytest.skip("kernels without a grid stride came with Warp 1.15")

    @wp.kernel(module="unique", **options)
    def nothing(out: floats):
        wp.tid()

    return nothing


GRIDS_OF_WARP = [  # launch_dims, block_dim, grid_stride, and the grid of wp_cuda_launch_kernel (warp.cu)
    (257, 256, True, [2, 1, 1]),
    ((2**20, 2**20), 256, True, [2**31 - 1, 1, 1]),
    (1, 1024, False, [1, 1, 1]),
    (2**24, 256, False, [2**16, 1, 1]),
    (2**24 + 1, 256, False, [2**16, 2, 1]),
    ((2**24, 2**16), 32, False, [2**19, 65535, 2]),
]


@needs_warp
@pytest.mark.parametrize("dims, block_dim, grid_stride, grid", GRIDS_OF_WARP)
def test_warp_grid_is_that_of_wp_cuda_launch_kernel(dims, block_dim, grid_stride, grid):
    f = xk.warp_kernel(kernel_with_grid_stride(grid_stride), spec(1), launch_dims=dims, block_dim=block_dim)
    numbers = re.search(r"launch = (?:array<i64: |dense<\[)([\d, ]+)", lower_for_cuda(f))[1]
    assert json.loads(f"[{numbers}]")[:6] == [*grid, block_dim, 1, 1]


@needs_warp
def test_warp_launch_too_large_without_a_grid_stride():
    f = xk.warp_kernel(kernel_with_grid_stride(False), spec(1), launch_dims=(2**30, 2**30), block_dim=32)
    with pytest.raises(ValueError, match=r"Warp kernel 'nothing': 1152921504606846976 threads are too many"):
        jax.eval_shape(f)


# -- a batch in one launch -----------------------------------------------------------------------------

STORE = "out[i] = 2.0 * x[i] + y[i]"
BATCHED_BODIES = {  # what the body of a kernel has: the body, options of warp_kernel; each launches a batch once
    "wp.tid() in expressions": ("out[wp.tid()] = 2.0 * x[wp.tid()] + y[wp.tid()]", {}),
    "wp.tid() in a loop": (
        f"for k in range(x.shape[0]):\n    i = wp.tid()\n    i += k\n    if k == 0:\n        {STORE}", {},
    ),
    "code before wp.tid()": (
        f"'''Documented.'''\nn = x.shape[0]\ni = wp.tid()\nif i >= n:\n    return\n{STORE}", {"launch_dims": 300},
    ),
    "functions": ("i = wp.tid()\nput(out, i, twice(a=x, i=i) + y[i])", {}),
    "other names": (
        "i = wp.tid()\nz = x\npart = out[1:]\n"
        "if i == 0:\n    out[0] = 2.0 * z[0] + y[0]\nelse:\n    part[i - 1] = 2.0 * z[i] + y[-5 + i]", {},
    ),
}  # fmt: skip
SLICED_BODIES = {  # the same for those that launch once per slice
    "wp.block_dim() by another name": (f"i = wp.tid()\nif threads() > 0:\n    {STORE}", {}),
    "C": ("i = wp.tid()\nout[i] = twice_in_c(x[i]) + y[i]", {}),
    "wp.static": ("i = wp.tid()\nout[i] = wp.static(2.0) * x[i] + y[i]", {}),
    "threads that may wait": (
        f"i = wp.tid()\nwhile wp.atomic_add(out, i, 0.0) != 0.0:\n    pass\n{STORE}", {"zero_outputs": True},
    ),
    "other dimensions": (f"i = wp.tid()\n{STORE}", {"launch_dims": (5, 1)}),
    "no wp.tid()": (f"for i in range(5):\n    {STORE}", {"launch_dims": 1}),
    "in order": (f"i = wp.tid()\n{STORE}", {"vmap_method": "sequential"}),
}  # fmt: skip
BODIES = BATCHED_BODIES | SLICED_BODIES
FUNCTIONS = """
import warp as wp
from warp import block_dim as threads
factor = 2.0
floats = wp.array(dtype=float)
@wp.func
def put(a: floats, i: int, value: float):
    a[i] = value
@wp.func
def twice(a: floats, i: int):
    return factor * a[i]
@wp.func_native("return 2.0f * x;")
def twice_in_c(x: float) -> float: ...
"""


def kernel_from_file(tmp_path, functions, parameters, body):
    """A kernel with this body, which may call these functions; Warp reads the source."""
    path = tmp_path / "kernels.py"
    body = textwrap.indent(body, "    ")
    path.write_text(f"{functions}\n@wp.kernel(module='unique')\ndef kernel({parameters}):\n{body}\n")
    return runpy.run_path(path)["kernel"]


def kernel_with_body(body, tmp_path):
    return kernel_from_file(tmp_path, FUNCTIONS, "x: floats, y: floats, out: floats", body)


@pytest.fixture(params=[pytest.param("fake", marks=needs_warp), pytest.param("real", marks=on_gpu)])
def warp_gpu(request, monkeypatch):
    """A GPU that runs functions and says the `grids` of the launches: one made of the CPU, and a real one."""
    if request.param == "fake":
        return FakeGpu(monkeypatch)
    compile_anew(monkeypatch)
    grids = request.getfixturevalue("launches")
    return types.SimpleNamespace(run=lambda f, *args: jax.jit(f)(*args), grids=grids)


@pytest.mark.parametrize("what", BODIES)
def test_warp_batches_on_a_gpu(what, warp_gpu, tmp_path):
    body, options = BODIES[what]
    f = xk.warp_kernel(kernel_with_body(body, tmp_path), like_first, **options)
    x, y = integers(3, 5), integers(5)
    check_equal(warp_gpu.run(jax.vmap(f, (0, None)), x, y), 2 * x + y)
    assert len(warp_gpu.grids) == (1 if what in BATCHED_BODIES else 3)


@pytest.mark.parametrize("name", WARP_CASES)
def test_warp_ops_in_one_launch_on_a_gpu(name, warp_gpu):
    f, reference, args = batched(name)
    check_equal(warp_gpu.run(f, *args), reference(*args))
    assert len(warp_gpu.grids) == (3 if name == "flip" else 1)  # Warp has no fifth dimension


def test_large_warp_batch_is_one_launch_on_a_gpu(warp_gpu):
    x, y = integers(1000, 5), integers(5)
    check_equal(warp_gpu.run(jax.vmap(wrapped("multiply"), (0, None)), x, y), x * y)
    assert warp_gpu.grids == [(20, 1, 1)]  # of 256 threads


NESTED_BATCHES = [  # in_axes of the inner and of the outer vmap, shapes, and how many launches there are
    ((0, 0), (0, 0), (2, 5, 3), (2, 5, 4), 1),
    ((0, None), (None, 0), (5, 3), (2, 4), 2),
]


@pytest.mark.parametrize("inner, outermost, x_shape, y_shape, count", NESTED_BATCHES)
def test_nested_warp_batches_are_one_launch_or_one_per_row_on_a_gpu(
    inner, outermost, x_shape, y_shape, count, warp_gpu
):
    x, y = integers(*x_shape), integers(*y_shape)

    def nested(function):
        return jax.vmap(jax.vmap(function, inner), outermost)

    check_equal(warp_gpu.run(nested(wrapped("outer")), x, y), nested(jnp.outer)(x, y))
    assert len(warp_gpu.grids) == count


@needs_warp
def test_warp_null_and_0d_arrays_in_one_launch_on_fake_gpu(fake_gpu, tmp_path):
    kernel = kernel_with_body("i = wp.tid()\nout[i] = 2.0 * x[0]\nif y:\n    out[i] += y[i]", tmp_path)
    f = xk.warp_kernel(kernel, spec(1), launch_dims=1)
    x = jnp.arange(3.0)
    check_equal(fake_gpu.run(jax.vmap(lambda x: f(x, None)), x), 2 * x[:, None])
    check_equal(fake_gpu.run(jax.vmap(f, (0, None)), x, jnp.ones(1)), 2 * x[:, None] + 1)
    assert len(fake_gpu.launches) == 2


@needs_warp
def test_warp_batch_of_a_kernel_whose_constants_changed(fake_gpu, tmp_path):
    """Warp reads constants when it builds a kernel, and one for batches would be built later."""
    kernel = kernel_with_body(BODIES["functions"][0], tmp_path)
    f = xk.warp_kernel(kernel, like_first)
    x = jnp.arange(5.0)
    check_equal(fake_gpu.run(f, x, x), 3 * x)
    kernel.func.__globals__["factor"] = 7.0
    batch = jnp.stack([x, -x])
    check_equal(fake_gpu.run(jax.vmap(f), batch, batch), 3 * batch)


@on_gpu
@pytest.mark.parametrize("name", ["in_place", "scratchy", "tally"])
def test_gpu_warp_batches_in_command_buffers(name, launches, monkeypatch):
    """All that the one launch of a batch starts from."""
    compile_anew(monkeypatch)
    f, reference, args = batched(name)
    captured = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
    run = jax.jit(f, compiler_options=captured)
    for _ in range(3):
        check_equal(run(*args), reference(*args))
    assert 1 <= len(launches) <= 3  # a CUDA graph launches no more


# -- inputs are never changed --------------------------------------------------------------------------

FUNCTIONS_OF_VECTORS = """
import warp as wp
vectors = wp.array(dtype=wp.vec2)
@wp.func
def put(a: vectors, i: int):
    a[i] = wp.vec2(1.0, 2.0)
@wp.func
def put_by_name(a: vectors, i: int):
    put(i=i, a=a)
@wp.func
def get(a: vectors, i: int):
    return a[i]
@wp.func_native("a.data[0][0] = 1.0f;")
def poke(a: vectors): ...
"""
WARP_WRITES = {  # how: the statement that writes to the input, and the copies that the kernel gets; None: it is refused
    "item": ("x[i] = wp.vec2(1.0, 2.0)", None),
    "part": ("x[i][0] = 1.0", None),
    "atomic": ("wp.atomic_add(x, i, wp.vec2(1.0, 2.0))", None),
    "function of a function": ("put_by_name(x, i)", 1),
    "view": ("part = x[1:]\npart[0] = wp.vec2(1.0, 2.0)", 1),
    "C": ("poke(x)", 1),
    "reads": ("y = x[1:]\ns = x[i][0] + get(y, 0)[0] + get(a=x, i=i).x + float(x.shape[0])", 0),
}


@needs_warp
@pytest.mark.parametrize("how", WARP_WRITES)
def test_warp_inputs_are_never_changed(how, tmp_path):
    """A kernel that writes to one by name is refused; one that may, through a function or a view, gets a copy."""
    statement, copies = WARP_WRITES[how]
    body = f"i = wp.tid()\n{statement}\nout[i] = x[i]"
    kernel = kernel_from_file(tmp_path, FUNCTIONS_OF_VECTORS, "x: vectors, out: vectors", body)
    x = jnp.zeros((3, 2))
    f = xk.warp_kernel(kernel, like_first, launch_dims=3)
    if copies is None:
        with pytest.raises(TypeError, match="Warp kernel 'kernel' writes to its input 'x', which JAX may share: name"):
            f(x)
        f = xk.warp_kernel(kernel, lambda x: (x, x), launch_dims=3, in_out_argnames=["x"])
    else:
        assert hidden_outputs_of(f, x) == copies
    for result in jax.tree.leaves((f(x), jax.vmap(f)(x[None]))):
        assert result.any() == (how != "reads")
    assert (x == 0).all()


# -- errors --------------------------------------------------------------------------------------------

THREE, INTEGERS = sample(3), np.arange(3, dtype=np.int32)
REFUSED_BY_WARP_KERNEL = [  # error, its text, kernel, arguments of the call, if there is one, and options
    (TypeError, r"'multiply': argument 'x' is a warp.array, float32\[:\] .*int32\[3\]: wrong dtype", "multiply",
     (INTEGERS, THREE), {}),
    (TypeError, r"'y' .*got float32\[3,1\]: wrong number of dimensions", "multiply", (THREE, sample(3, 1)), {}),
    (TypeError, r"'v' .*float32\[:,2\].*: wrong inner", "matvec", (sample(3, 2, 2), sample(3, 4)), {}),
    (TypeError, r"'out' .*got int32\[3\]: wrong dtype", "multiply", (THREE, THREE), {"outs": spec(3, dtype=np.int32)}),
    (TypeError, r"with jax.enable_x64\(True\): x = jnp.asarray\(x, jnp.float64\)", "takes_doubles", (THREE,),
     {"outs": ()}),
    (TypeError, r"the parameters \(x, y, out\).* gives it 1 inputs and 1 outputs", "multiply", (THREE,), {}),
    (TypeError, r"launch_dims must be an int or a tuple of ints; got", "multiply", None, {"launch_dims": "3"}),
    (ValueError, r"1 to 4 numbers from 0 to 2147483647; got \(-1,\)", "multiply", None, {"launch_dims": -1}),
    (ValueError, r"must be 1 to 4 numbers from 0 to 2147483647; got \(\)", "takes_no_array", (1.0,), {"outs": ()}),
    (ValueError, r"1 to 4 .*got \(2147483648,\)", "multiply", (THREE, THREE), {"launch_dims": lambda x, y: 2**31}),
    (ValueError, r"block_dim must be 1 to 1024 threads; got 2048", "multiply", None, {"block_dim": 2048}),
    (ValueError, r"sharding_rule splits arrays, so launch_dims=4 must be a callable", "multiply", None,
     {"launch_dims": 4, "sharding_rule": "i -> i"}),
    (ValueError, r"tiled=True needs launch_dims, the number of blocks", "multiply", None, {"tiled": True}),
    (ValueError, r"tiled launch_dims .* 1 to 3", "multiply", None, {"tiled": True, "launch_dims": (1,) * 4}),
    (ValueError, r"True does not go with in_out", "histogram", None,
     {"in_out_argnames": ["acc"], "differentiable": True}),
    (ValueError, r"not go with .* or scratch", "scratchy", None, {"scratch": spec(3), "differentiable": True}),
    (ValueError, r"'weight' must be the name of an array", "histogram", None, {"input_output_aliases": {1: 0}}),
]  # fmt: skip


@needs_warp
@pytest.mark.parametrize("error, text, kernel, args, options", REFUSED_BY_WARP_KERNEL)
def test_warp_refuses(error, text, kernel, args, options):
    with pytest.raises(error, match=text):
        f = xk.warp_kernel(getattr(warp_kernels(), kernel), **{"outs": like_first, **options})
        if args is not None:
            f(*args)


REFUSED_VALUES = [  # error, its text, a parameter of `kernel_of_every_kind`, another value for it, does JAX trace that?
    (TypeError, r"'s' \(struct .*Settings\) is passed .*got int 1, not an instance", "s", 1, False),
    (TypeError, r"'m' \(float32\[3,3\]\) is passed by value; got", "m", [1.0, 2.0], False),
    (TypeError, r"'i' \(int8\) is passed by value; got float 1.5", "i", 1.5, False),
    (ValueError, r"'i' \(int8\) is passed by value; 300 is out of its range", "i", 300, False),
    (TypeError, r"'s' \(struct .*Settings\) is passed .*got", "s", 3, True),
    (TypeError, r"'n' \(uint64\) is passed by value; got .*64 bits without", "n", 3, True),
]


@needs_warp
@pytest.mark.parametrize("error, text, name, value, is_traced", REFUSED_VALUES)
def test_warp_refuses_values(error, text, name, value, is_traced):
    def call(value):
        return call_every(*EVERY, differentiable=False, **{name: value})

    with pytest.raises(error, match=text):
        jax.eval_shape(call, value) if is_traced else call(value)


def test_warp_arguments_as_kernels_take_them(warp_path):
    @unique_kernel
    def scaled(x: floats, factor: floats, kind: int, on: bool, h: wp.handle, out: floats):
        i = wp.tid()
        out[i] = x[i] + float(kind) + float(h)
        if on and factor:
            out[i] *= factor[0]

    kind = enum.IntFlag("Kind", "A B").B
    x = jnp.arange(3.0)
    f = xk.warp_kernel(scaled, like_first)
    check_equal(f(x, jnp.float32(2), kind, 1, 1), [6, 8, 10])
    for null_array in (None, jnp.zeros(0)):
        check_equal(f(x, null_array, kind, 1, 1), [3, 4, 5])
        check_equal(f(x, h=1, on=True, kind=kind, factor=null_array), [3, 4, 5])
    with pytest.raises(TypeError, match=r"the parameters \(x, factor, .*5 arguments by position and x by keyword"):
        f(x, x, 1, True, 1, x=x)
    with pytest.raises(TypeError, match="values, then outputs and scratch; this call gives it 2 arguments by position"):
        f(x, x)


@needs_warp
def test_warp_generic_kernels():
    """Those that do not build spare the others."""
    anything = wp.array(dtype=typing.Any)

    @unique_kernel
    def plus(x: anything, y: anything, out: anything):
        out[wp.tid()] = x[wp.tid()] + y[wp.tid()]

    f = xk.warp_kernel(plus, like_first)
    with pytest.raises(Exception, match="Input types must be the same"):
        f(jnp.arange(3.0), jnp.arange(3))
    for x in (jnp.arange(3), jnp.ones((3, 2)), jnp.ones((3, 2, 2))):  # numbers, vectors, matrices
        check_equal(jax.vmap(f)(y=x[None], x=2 * x[None]), 3 * x[None])
    with pytest.raises(TypeError, match=r"generic Warp kernel 'plus' takes \('x', 'y', 'out'\); this call gives"):
        f(x)
    concrete = wp.overload(plus, [floats] * 3)
    check_equal(xk.warp_kernel(concrete, like_first)(*PAIR), PAIR[0] + PAIR[1])


@needs_warp
def test_warp_refuses_structs_of_arrays_and_plain_functions():
    @wp.struct
    class Holder:
        values: floats

    @unique_kernel
    def holding(h: Holder, out: floats):
        out[wp.tid()] = h.values[wp.tid()]

    with pytest.raises(TypeError, match=r"parameter 'h' is .*; supported are scalars, .* and structs without arrays"):
        xk.warp_kernel(holding, spec(3))
    with pytest.raises(TypeError, match=r"takes a function decorated with warp.kernel; got function"):
        xk.warp_kernel(like_first, spec(3))


@needs_warp
def test_warp_build_error_stays_an_error():
    @unique_kernel
    def broken(x: floats, out: floats):
        out[wp.tid()] = undefined_thing(x[wp.tid()])  # noqa: F821

    for _ in range(3):
        with pytest.raises(Exception, match="undefined_thing"):
            xk.warp_kernel(broken, like_first)(jnp.arange(3.0))


# -- Warp's own functions, no Warp ---------------------------------------------------------------------


@needs_warp
def test_warp_jax_kernel_and_jax_callable_are_warps_own():
    multiply = warp_kernels().multiply

    def square(x: floats, out: floats):
        wp.launch(multiply, dim=x.shape, inputs=[x, x], outputs=[out])

    for f in (xk.jax_kernel(multiply, num_outputs=1), xk.jax_callable(square, num_outputs=1)):
        assert type(f).__module__.startswith("warp.")


def test_warp_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "warp", None)
    with pytest.raises(ImportError, match=r"warp_kernel needs warp .*install it: pip install warp-lang numba"):
        xk.warp_kernel(like_first, spec(3))


@needs_warp
def test_warp_needs_numbas_llvm(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    needs = r"warp_kernel compiles what XLA calls with Numba's LLVM: it needs numba \(.*install it: pip install numba\n"
    with pytest.raises(ImportError, match=needs):
        wrapped("multiply", block_dim=32)(*PAIR)  # of its own: nothing has compiled it


# ======================================================================================================
# XLACustomKernel
# ======================================================================================================

VECTOR = np.arange(1.0, 9.0, dtype=np.float32)
WEIGHTS = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
ROWS = np.stack([VECTOR, VECTOR + 1, 2 * VECTOR])


def op_with(generator, rule=None):
    """An op with one kernel, for the CPU."""
    op = xk.XLACustomKernel("op")
    op.def_kernel("jax", "cpu", generator)
    if rule:
        op.def_sharding_rule(rule)
    return op


def op_of(function, rule=None):
    """An op whose kernel is `function`; the static parameters of a call are its keyword arguments."""

    def generator(outs, **parameters):
        return partial(function, **parameters)

    return op_with(generator, rule)


def add_to(value):
    """The generator of a kernel that adds `value`."""

    def generator():
        return partial(operator.add, value)

    return generator


def op_adding(**values):
    """An op with a backend for each keyword, which adds its value."""
    op = xk.XLACustomKernel("op")
    for backend, value in values.items():
        op.def_kernel(backend, "cpu", add_to(value))
    return op


def call_op(op):
    """An op as a function of its operands, whose result is like the first."""
    return partial(op, outs=like_first)


def from_zero(op, **options):
    """What an op that adds gives for 0: the value."""
    return float(op(0.0, outs=like_first, **options))


def eager_and_jitted(f):
    return f, jax.jit(f)


def numba_multiply(x, y, out):
    for i in np.ndindex(out.shape):
        out[i] = x[i] * y[i]


def numba_add(x, y, out):
    for i in range(x.size):
        out[i] = x[i] + y[i]


# -- under JAX's transformations -----------------------------------------------------------------------

multiply_p = xk.Primitive("multiply_without_batching_rule")  # as most hand-written primitives
multiply_p.def_abstract_eval(like_first)
mlir.register_lowering(multiply_p, mlir.lower_fun(operator.mul, multiple_results=False))

PRODUCT_KERNELS = {
    "jax": lambda: operator.mul,
    "numba": numba.njit(numba_multiply),
    "pallas": lambda outs: in_pallas(operator.mul, outs),
    "no_batching": lambda: multiply_p.bind,
}


def define_derivative_by_itself(op):
    """The derivative of a product and its transpose are products."""

    def tangent_of_x(t, x, y):
        return op(t, y, outs=like_first)

    def tangent_of_y(t, x, y):
        return op(x, t, outs=like_first)

    @op.def_transpose_rule
    def transpose(cotangents, x, y, outs):
        (ct,) = cotangents
        if ad.is_undefined_primal(x):
            return op(ct, y, outs=outs[0]), y
        return x, op(x, ct, outs=outs[0])

    op.def_jvp_rule2(tangent_of_x, tangent_of_y)


def define_backward_pass(op):
    def forward(x, y):
        return op(x, y, outs=like_first), (x, y)

    def backward(operands, ct):
        x, y = operands
        return ct * y, ct * x

    op.def_vjp_rule(forward, backward)


def product_op(backend="jax", rule=None, define_derivative=define_derivative_by_itself):
    """The elementwise product."""
    op = op_with(PRODUCT_KERNELS[backend], rule)
    define_derivative(op)
    return op


def product_of(*args):
    """The same as a function of two arrays."""
    return call_op(product_op(*args))


def sum_of(f):
    """A function whose gradient can be asked for."""
    return lambda *operands: f(*operands).sum()


def sum_of_squares_of(f):
    return lambda *operands: (f(*operands) ** 2).sum()


def _mesh_sharding(*spec, shape=(4,), **options):
    """A sharding over four devices: a row of them, "d", or two by two, "d" and "e"."""
    devices = np.array(jax.devices()[:4]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("d", "e")[: len(shape)], **options)
    return jax.sharding.NamedSharding(mesh, P(*spec))


def on_mesh(x, *axes):
    """An array on four devices, split over these axes of their mesh."""
    return jax.device_put(x, _mesh_sharding(*axes))


def _shard_map(f, in_specs, out_specs):
    return jax.shard_map(f, mesh=_mesh_sharding().mesh, in_specs=in_specs, out_specs=out_specs)


# What is done to the product, or to the same in JAX, beyond the transformations of the matrix.


def of_nothing(product):
    batched = jax.vmap(product, (0, None))
    return product(VECTOR[:0], WEIGHTS[:0]), batched(ROWS[:0], WEIGHTS)


def without_jit(product):
    with jax.disable_jit():
        return product(VECTOR, WEIGHTS), jax.vmap(product)(ROWS[:2, None], ROWS[:2, None])


def grad_of_nested_vmap(product):
    """Each vmap is over another operand, and of another size."""
    pairs = jax.vmap(jax.vmap(product, (0, None)), (None, 0))
    return jax.grad(sum_of_squares_of(pairs), (0, 1))(ROWS, ROWS[:2])


def eager_shard_map(product):
    return _shard_map(product, (P("d"), P()), P("d"))(VECTOR, WEIGHTS[:2])


def grad_of_shard_map(product):
    squares = sum_of_squares_of(_shard_map(product, (P("d"), P()), P("d")))
    return jax.grad(squares, (0, 1))(VECTOR, WEIGHTS[:2])


def shard_map_of_grad(product):
    """The cotangent of a replicated operand is summed over the devices."""
    return _shard_map(jax.grad(sum_of(product), 1), (P("d"), P()), P())(VECTOR, WEIGHTS[:2])


def assert_same(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("backend", PRODUCT_KERNELS)
@pytest.mark.parametrize("program", [
    of_nothing, without_jit, grad_of_nested_vmap, eager_shard_map, shard_map_of_grad
])  # fmt: skip
def test_op_under_transformations(program, backend):
    if backend == "pallas" and "shard_map" in program.__name__:
        pytest.skip("Pallas does not interpret under check_vma=True")
    jax.tree.map(assert_same, program(product_of(backend)), program(operator.mul))


@pytest.mark.parametrize("program", [grad_of_shard_map, shard_map_of_grad])
def test_op_vjp_rule_in_shard_map_may_have_a_replicated_operand(program):
    product = product_of("jax", None, define_backward_pass)
    jax.tree.map(assert_same, program(product), program(operator.mul))


def test_op_shard_map_adds_tangents_of_which_one_is_replicated():
    op = op_of(operator.add)
    op.def_jvp_rule2(lambda t, x, y: t, lambda t, x, y: t)

    def tangent(x, y):
        return jax.jvp(call_op(op), (x, y), (x, y))[1]

    sums = _shard_map(tangent, (P("d"), P()), P("d"))(VECTOR, np.float32([10, 20]))
    check_equal(sums, [11, 22, 13, 24, 15, 26, 17, 28])


@pytest.mark.parametrize("backend, is_loop", [("numba", False), ("no_batching", True)])
def test_op_vmap_runs_the_backend_natively_or_else_in_a_loop(backend, is_loop):
    batched = jax.jit(jax.vmap(product_of(backend))).lower(ROWS, ROWS).as_text()
    assert ("while" in batched) == is_loop
    assert batched.count("custom_call") == (backend == "numba")


# -- outs, operands, parameters ------------------------------------------------------------------------

ONE_SPEC = [spec(8), spec(8, dtype=bool), spec(4)]
SPECS = [*ONE_SPEC, *[[out] for out in ONE_SPEC], (spec(8),), {"a": spec(8)}, {"b": spec(8)}, ()]
DESCRIBED = types.SimpleNamespace(shape=[3], dtype="int32")
OUTS = [  # what `outs` may be, and as what it is understood
    *zip(SPECS, SPECS),
    (lambda x: (x, {"x": x}), (spec(8), {"x": spec(8)})),
    ([jnp.zeros(8), DESCRIBED], [spec(8), spec(3, dtype=np.int32)]),
]


def zeros_generator(outs):
    def kernel(x):
        return [jnp.zeros(out.shape, out.dtype) for out in outs]

    return kernel


def test_op_returns_what_outs_describes():
    """What an op remembers of a call is for its shapes, its dtypes and its structure."""
    op = op_with(zeros_generator)
    for outs, understood in OUTS:
        call = partial(op, outs=outs)
        for f in (call, jax.jit(call), jax.disable_jit()(call)):
            assert jax.eval_shape(like_first, f(VECTOR)) == understood


def test_op_without_operands_may_return_any_container_of_numpys_arrays():
    result = np.float32([3, 4])
    for f in eager_and_jitted(partial(op_of(lambda: {"a": result}), outs=spec(2))):
        check_equal(f(), result)


def test_op_operands_may_be_numbers_or_arrays_of_other_libraries():
    two = jnp.int32(2)
    of_dlpack = types.SimpleNamespace(__dlpack__=two.__dlpack__, __dlpack_device__=two.__dlpack_device__)
    of_jax_array = types.SimpleNamespace(__jax_array__=lambda: two)
    double = call_op(op_of(lambda x: x + x))
    for operand in (2, of_dlpack, of_jax_array):
        for f in eager_and_jitted(partial(double, operand)):
            assert f() == 4 and f().dtype == np.int32


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float
    table: typing.Any = dataclasses.field(default=(), hash=False)


EQUAL_PARAMETERS = {  # Python calls them equal; their representations have different lengths
    "numbers": (1, 1.0, True, np.float32(1)),
    "zeros": (0.0, -0.0),
    "ranges": (range(0, 9, 9), range(0, 10, 10)),
    "dataclasses in tuples": ((Config(0.0),), (Config(-0.0),)),
    "frozensets": (frozenset([1]), frozenset([1.0]), frozenset([True])),
    "decimals": (decimal.Decimal("1"), decimal.Decimal("1.0")),
    "dates": (np.datetime64("2020"), np.datetime64("2020-01-01")),
}


@pytest.mark.parametrize("kind", EQUAL_PARAMETERS)
def test_op_tells_equal_parameters_apart(kind):
    op = op_of(lambda x, k: x + len(repr(k)))
    values = EQUAL_PARAMETERS[kind]
    assert len(set(values)) == 1

    def call(x):
        return [op(x, outs=spec(), k=k) for k in values]

    def bind(x):
        return [op.primitive.bind(x, outs=(spec(),), k=k)[0] for k in values]

    for f in (call, jax.jit(call), bind, jax.jit(bind)):
        assert f(0.0) == [len(repr(k)) for k in values]


PARAMETER_NAMES = (  # of arguments of the library's functions, and of JAX's
    "args axes batch call cotangents entry fun function ins kernel name op options outputs platform primals prim rule "
    "rules run spec specs tangents traced value values _types avals_in avals_out axis_data call_jaxpr ctx dims effects "
    "enabled_errors eqn eqn_ctx error key lowering_rule ordered_effects primitive self vals"
)


def test_op_parameters_of_any_name():
    names = PARAMETER_NAMES.split()
    op = op_of(lambda x, **parameters: x * sum(parameters.values()))

    def scale(x):
        return op(x, outs=like_first, **dict.fromkeys(names, 0.125))

    op.def_jvp_rule2(lambda t, *primals, **parameters: scale(t))
    op.def_transpose_rule(lambda cts, *operands, **parameters: [scale(cts[0])])
    checkpointed = jax.checkpoint(scale, policy=jax.checkpoint_policies.dots_saveable)
    gradient = jax.grad(lambda x: checkpointed(x) ** 2)
    x = jnp.arange(3.0)
    check_equal(jax.vmap(gradient)(x), 2 * (len(names) / 8) ** 2 * x)
    _, scaled = checkify.checkify(jax.jit(scale), errors=checkify.all_checks)(x)
    check_equal(scaled, len(names) / 8 * x)


@pytest.mark.parametrize("name", ["_batch", "_static"])
def test_op_parameters_that_the_primitive_has_already(name):
    with pytest.raises(TypeError, match=f"the parameter name '{name}' is reserved; use another one"):
        op_adding(a=1)(VECTOR, outs=VECTOR, **{name: 3.0})


# -- arrays of 64 bits ---------------------------------------------------------------------------------

HAS_EXPLICIT_X64 = hasattr(jax.config, "jax_explicit_x64_dtypes")  # jax >= 0.8
TRUNCATED = "asks for int64, which JAX truncates to int32" if HAS_EXPLICIT_X64 else "int64"


def increment_kernel(outs):
    return wrap(outs=outs)


def increment_op(outs):
    return partial(op_with(increment_kernel), outs=outs)


@pytest.mark.parametrize("made_by", [increment_kernel, increment_op])
def test_arrays_of_64_bits_keep_them_where_x64_is_disabled(made_by):
    """JAX lets such arrays be, whether x64 was enabled when they were made or (jax >= 0.8) they were allowed."""
    with x64():
        x = jnp.arange(5) + 2**40
    for f in eager_and_jitted(made_by(like_first)):
        got = np.asarray(f(x))
        assert got.dtype == np.int64 and got[0] == 2**40 + 1
        assert f(np.arange(3)).dtype == np.int32  # as everywhere in JAX


@pytest.mark.parametrize("made_by", [increment_kernel, increment_op])
def test_outs_of_64_bits_are_truncated_as_jax_does(made_by):
    increment = made_by(spec(3, dtype=np.int64))
    with x64():
        assert increment(np.arange(3)).dtype == np.int64
    with pytest.warns(UserWarning, match=TRUNCATED):
        assert increment(np.arange(3)).dtype == np.int32
    if HAS_EXPLICIT_X64:
        with conftest.configured("jax_explicit_x64_dtypes", "allow"):
            assert increment(np.arange(3)).dtype == np.int64


@pytest.mark.skipif(not HAS_EXPLICIT_X64, reason="this JAX computes in 32 bits then")
def test_op_of_64_bits_where_x64_is_disabled():
    op = op_of(operator.add)
    op.def_jvp_rule2(lambda t, x, y: op(t, jax.lax.sub(y, y), outs=t), None)
    op.def_transpose_rule(lambda cts, x, y: [cts[0], None])
    add = call_op(op)
    with x64():
        x = jnp.arange(3.0) + 2**40
    batch = jnp.stack([x, x])
    assert jax.vmap(add)(batch[:, :0], batch[:, :0]).dtype == np.float64
    gradient = jax.grad(lambda x: jax.lax.reduce_sum(jax.vmap(add, (None, 0))(x, batch), (0, 1)))(x)
    assert gradient.dtype == np.float64 and gradient.tolist() == [2, 2, 2]


# -- registration and dispatch -------------------------------------------------------------------------


def test_op_first_backend_is_the_default_and_others_can_be_chosen():
    op = op_adding(a=1, b=2)
    assert op.defaults == {"cpu": "a"} and op.get_default("cpu") == "a"
    assert op.available_backends("cpu") == ["a", "b"]
    assert from_zero(op) == 1 and from_zero(op, backend="b") == 2
    assert op.get_default("tpu") is None and op.available_backends("tpu") == []


CHANGES = {  # the options of calls, what changes then, how often JAX's caches are cleared, and what such calls give
    "new default": ({}, methodcaller("set_default", "cpu", "b"), 1, 2),
    "same default": ({}, methodcaller("set_default", "cpu", "a"), 0, 1),
    "registered again": ({}, methodcaller("def_kernel", "a", "cpu", add_to(5)), 1, 5),
    "another backend": ({}, methodcaller("def_kernel", "c", "cpu", add_to(3)), 0, 1),
    "chosen backend": ({"backend": "b"}, methodcaller("def_kernel", "b", "cpu", add_to(3)), 1, 3),
    "default of others": ({"backend": "b"}, methodcaller("set_default", "cpu", "b"), 0, 2),
}


@pytest.mark.parametrize("case", CHANGES)
def test_op_change_reaches_warm_functions_and_clears_caches_only_if_it_must(case, monkeypatch):
    options, change, clears, changed = CHANGES[case]
    op = op_adding(a=1, b=2)
    add = partial(op, outs=like_first, **options)
    cleared, clear_caches = [], jax.clear_caches
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(clear_caches()))
    calls = add, jax.jit(jax.vmap(add))
    for call in calls:
        call(jnp.zeros(1))
    change(op)
    assert len(cleared) == clears
    for call in calls:
        assert call(jnp.zeros(1)) == changed


def test_op_warp_serves_the_cpu_only_where_nothing_else_does():
    op = xk.XLACustomKernel("warp")
    op.def_warp_kernel(add_to(1), asdefault=True)
    assert op.defaults == {"gpu": "warp", "cpu": "warp"} and from_zero(op) == 1
    op.def_numba_kernel(add_to(2))
    assert op.defaults == {"gpu": "warp", "cpu": "numba"}
    assert from_zero(op) == 2 and from_zero(op, backend="warp") == 1
    op.set_default("cpu", "warp")
    op.def_kernel("jax", "cpu", add_to(3))
    assert from_zero(op) == 1


SHORTHANDS = {  # method: the platform and the backend that it registers for, and its arguments
    "def_numba_kernel": ("cpu", "numba", ()),
    "def_warp_kernel": ("gpu", "warp", ()),
    "def_numba_cuda_kernel": ("gpu", "numba_cuda", ()),
    "def_pallas_kernel": ("gpu", "pallas", ("cuda",)),
    "def_triton_kernel": ("gpu", "triton", ()),
    "def_cuda_raw_kernel": ("gpu", "cuda_raw", ()),
    "def_kernel": ("tpu", "mine", ("mine", "tpu")),
}


@pytest.mark.parametrize("name", SHORTHANDS)
def test_op_shorthands_and_decorators(name):
    platform, backend, args = SHORTHANDS[name]
    op, generator = xk.XLACustomKernel("op"), add_to(1)
    define = getattr(op, name)
    assert define(*args, generator) is generator and op.defaults[platform] == backend
    op.def_kernel("first", platform, generator, asdefault=True)
    assert define(*args)(generator) is generator and op.defaults[platform] == "first"
    assert define(*args, asdefault=True)(generator) is generator and op.defaults[platform] == backend
    entry = op._kernels[platform][backend]  # BrainEvent reads it
    assert (entry.backend, entry.platform, entry.kernel_generator) == (backend, platform, generator)


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda", "tpu")], ids="+".join)
def test_op_platform_is_that_of_the_lowering(platforms):
    op, values = xk.XLACustomKernel("where"), {"cpu": 1.0, "cuda": 2.0, "tpu": 3.0}
    for platform, value in values.items():
        op.def_kernel("jax", platform, add_to(value))
    text = jax.jit(call_op(op)).trace(VECTOR).lower(lowering_platforms=platforms).as_text()
    for platform, value in values.items():
        assert (f"dense<{value}" in text) == (platform in platforms)


def test_op_repr():
    op = op_adding(a=1, b=2)
    op.def_kernel("c", "gpu", add_to(1))
    assert repr(op) == "XLACustomKernel('op')\n  cpu: a (default), b\n  gpu: c (default)"
    op.def_jvp_rule2(None)
    op.def_batching_rule(lambda args, axes: (args, axes))
    op.def_sharding_rule("->")
    assert repr(op).endswith("\n  rules: batching, jvp, sharding")
    op.register_general_batching()
    assert repr(op).endswith("\n  rules: jvp, sharding")


def test_op_doc_tags_and_call():
    op = xk.XLACustomKernel("op", doc="Adds one.")
    assert op.__doc__ == "Adds one."
    op.def_tags("csr", "binary")
    assert op._tags == {"csr", "binary"}  # BrainEvent finds ops by them
    with pytest.raises(ValueError, match="no call function"):
        op.call(1)
    op.def_call(lambda x, backend=None: (x, backend))
    assert op.call(1, backend="numba") == (1, "numba")
    assert op.def_benchmark_data(add_to) is add_to


class Parameter:
    """Equal to itself only."""


def test_op_keeps_what_it_made_for_the_newest_calls_only():
    """A parameter that changes on every call must not fill the memory."""
    op, alive = op_adding(a=1), weakref.WeakSet()

    def many_calls(x):
        for _ in range(1_100):
            parameter = Parameter()
            alive.add(parameter)
            with contextlib.suppress(ValueError):  # before anything is traced, which JAX would keep
                op(x, outs=x, backend="missing", parameter=parameter)
        return x

    jax.eval_shape(many_calls, VECTOR)
    gc.collect()
    assert 0 < len(alive) <= 1_024


# -- ready kernels -------------------------------------------------------------------------------------

jitted_add = numba.njit(numba_add)
READY_KERNELS = {
    "wrapper": wrap(jitted_add),
    "generator of a dispatcher": lambda outs: jitted_add,
    "vectorize": numba.vectorize(lambda x, y: x + y),
    "guvectorize": numba.guvectorize("(n),(n)->(n)")(numba_add),
}


@pytest.mark.parametrize("kind", READY_KERNELS)
def test_op_takes_ready_kernels(kind):
    op = xk.XLACustomKernel("add")
    kernel = READY_KERNELS[kind]
    assert op.def_numba_kernel(kernel) is kernel
    check_equal(op(VECTOR, WEIGHTS, outs=[spec(8)])[0], VECTOR + WEIGHTS)


def test_op_ready_kernel_with_options():
    accumulate = numba.njit(runs("out[:] += x", "total, x, out"))
    op = xk.XLACustomKernel("accumulate")
    op.def_numba_kernel(input_output_aliases={0: 0})(accumulate)
    check_equal(op(VECTOR, WEIGHTS, outs=like_first), VECTOR + WEIGHTS)


KERNEL_CLASSES = {  # the class of a kernel and its bases, with their packages: the backend
    "numba.Dispatcher": "numba",
    "numba.CUDADispatcher numba.Dispatcher": "numba_cuda",
    "numba.FakeCUDAKernel": "numba_cuda",
    "numba_cuda.CUDADispatcher": "numba_cuda",
    "numba_cuda.FakeCUDAKernel": "numba_cuda",
    "numba_cuda_mlir.MLIRDispatcher": "numba_cuda",
    "mine.Derived warp.Kernel": "warp",
    "numba.Kernel": None,
}


@pytest.mark.parametrize("classes", KERNEL_CLASSES)
def test_kernels_are_known_by_their_class(classes):
    """Nothing is imported for it."""
    kernel_class = object
    for path in reversed(classes.split()):
        package, name = path.split(".")
        namespace = {"__module__": f"{package}.somewhere", "__repr__": lambda self: "kernel"}
        kernel_class = type(name, (kernel_class,), namespace)
    backend = KERNEL_CLASSES[classes]
    hint = f"; for this one there is {backend}_kernel" if backend else ""
    other_wrapper = xk.numba_cuda_kernel if backend == "numba" else xk.numba_kernel
    with pytest.raises(TypeError, match=rf"got \w+ kernel{hint}$"):
        other_wrapper(kernel_class(), like_first)


def test_op_registration_imports_no_backend(monkeypatch):
    backends = {"numba", "warp", "llvmlite", "numba_cuda", "numba_cuda_mlir", "cuda"}
    for name in list(sys.modules):
        if name.partition(".")[0] in backends:
            monkeypatch.delitem(sys.modules, name)
    op = xk.XLACustomKernel("f")
    for define in (op.def_numba_kernel, op.def_warp_kernel, op.def_numba_cuda_kernel, op.def_jvp_rule2):
        define(add_to(1))
    assert backends.isdisjoint(sys.modules)


# -- errors --------------------------------------------------------------------------------------------


def raise_key_error(*args):
    raise KeyError("boom")


BROKEN_KERNELS = {
    "two": lambda x: (x, x),
    "shape": lambda x: jnp.reshape(x, (4, 2)),
    "raising": raise_key_error,
    "nothing": None,
}


def broken_op():
    op = xk.XLACustomKernel("broken")
    for backend, kernel in BROKEN_KERNELS.items():
        op.def_kernel(backend, "cpu", lambda kernel=kernel: kernel)
    op.def_kernel("far", "gpu", add_to(1))
    op.def_numba_kernel(jitted_add)
    return op


RETURNED = (
    "XLACustomKernel 'broken': the kernel of backend '{}' for platform 'cpu' returned ({}), "
    "but outs declares (float32[8]): return as many, of equal shape and dtype"
)
RAISED = (
    "XLACustomKernel 'broken': the kernel of backend 'raising' for platform 'cpu' raised KeyError: 'boom' "
    "('cpu' has two, shape, raising, nothing, numba: choose with backend=)"
)
UNKNOWN = (
    "XLACustomKernel 'broken' has no backend 'nmba' for platform 'cpu'; registered: cpu: two, shape, raising, nothing, "
    "numba; gpu: far; choose one of these (backend=, jax.default_device), or register another with def_kernel"
)
NOT_HASHABLE = (
    "XLACustomKernel 'broken': parameter 'alpha' must be hashable, got [1, 2] of type list. Pass a number or a "
    "tuple, or pass the array as an operand"
)
NOT_SPECS = "XLACustomKernel 'broken': outs must be specs with both .shape and .dtype"
NO_OUTS = "XLACustomKernel 'broken': outs is missing: give the results' specs, such as outs=lambda x: x"
NOT_FOR_READY = "raised TypeError: static parameters ['alpha'] need a generator that makes this numba kernel of them"
OP_ERRORS = {  # the error, its text, the options of a call
    "two results": (ValueError, RETURNED.format("two", "float32[8], float32[8]"), {"backend": "two"}),
    "wrong shape": (ValueError, RETURNED.format("shape", "float32[4,2]"), {"backend": "shape"}),
    "unknown backend": (ValueError, UNKNOWN, {"backend": "nmba"}),
    "backend ''": (ValueError, "has no backend '' for platform 'cpu'; registered: cpu: two", {"backend": ""}),
    "kernel raises": (RuntimeError, RAISED, {"backend": "raising"}),
    "no function": (RuntimeError, "must return the function to trace, got None", {"backend": "nothing"}),
    "ready kernel": (RuntimeError, NOT_FOR_READY, {"backend": "numba", "alpha": 2}),
    "unknown parameter": (RuntimeError, "unexpected keyword argument 'alpha'", {"backend": "two", "alpha": 2}),
    "list": (TypeError, NOT_HASHABLE, {"alpha": [1, 2]}),
    "list inside": (TypeError, "parameter 'alpha' must be hashable", {"alpha": (Config(1.0, table=[1]),)}),
    "outs: a dtype": (TypeError, NOT_SPECS, {"outs": np.float32}),
    "outs: None": (TypeError, NO_OUTS, {"outs": None}),
}


def uses_of(call):
    """A function of one operand, called in different ways with an array of 8 elements."""
    return {
        "eager": partial(call, VECTOR),
        "jit": partial(jax.jit(call), VECTOR),
        "vmap": partial(jax.vmap(call), ROWS),
    }


@pytest.mark.parametrize("use", ["eager", "jit", "vmap"])
@pytest.mark.parametrize("case", OP_ERRORS)
def test_op_errors(case, use):
    error, text, options = OP_ERRORS[case]
    call = partial(broken_op(), **{"outs": spec(8), "backend": "two", **options})
    with pytest.raises(error, match=re.escape(text)) as raised:
        uses_of(call)[use]()
    if case == "kernel raises":
        shown = "".join(traceback.format_exception(raised.value))
        assert "\nKeyError: 'boom'\n" in shown


def test_op_backend_of_another_platform_can_be_traced_and_lowered_there_alone():
    call = partial(broken_op(), outs=like_first, backend="far")
    assert "stablehlo.add" in lower_for_cuda(call, VECTOR)
    for use in uses_of(call).values():
        with pytest.raises(ValueError, match="'broken' has no backend 'far' for platform 'cpu'; registered: cpu:"):
            use()


def test_op_errors_for_some_shapes_are_raised_by_the_call():
    call = partial(broken_op(), outs=spec(4, 2), backend="shape")
    jax.make_jaxpr(call)(VECTOR)
    with pytest.raises(RuntimeError, match="the kernel of backend 'shape' for platform 'cpu' raised TypeError"):
        jax.make_jaxpr(call)(VECTOR[:5])


def test_op_without_a_kernel_for_the_platform():
    op = xk.XLACustomKernel("empty")
    for call in (op, op.benchmark):
        with pytest.raises(NotImplementedError, match="'empty' has no kernel for platform 'cpu'; registered: nothing"):
            call(VECTOR, outs=like_first)
    op.def_kernel("jax", "gpu", add_to(1))
    with pytest.raises(NotImplementedError, match="no kernel for platform 'cpu'; registered: gpu: jax; choose"):
        op(VECTOR, outs=like_first)


TRACED = "'op': parameter 'k' is traced"
NAMES_IN_RULE = "'op': a sharding rule names each array's dimensions, 'b i, i j -> b j'; got '{}'"
NO_RULE = "'op' has no {0} rule, which a derivative needs: use def_{0}_rule"
NO_EFFECTS = "'numba' cannot have side effects"
MISUSES = [  # the error, its text, what is done to an op
    (TypeError, "backend must be a name, got 1", methodcaller("def_kernel", 1, "cpu", add_to(1))),
    (ValueError, "backend must be a name, got ''", methodcaller("def_kernel", "", "cpu", add_to(1))),
    (TypeError, "platform must be a name, got 1", methodcaller("def_kernel", "a", 1, add_to(1))),
    (TypeError, "Warp kernel) must be callable, got 'kernel'", methodcaller("def_kernel", "a", "cpu", "kernel")),
    (TypeError, "grid can be given with a ready kernel only", methodcaller("def_numba_kernel", add_to(1), grid=3)),
    (TypeError, NO_EFFECTS, methodcaller("def_numba_kernel", jitted_add, has_side_effect=True)),
    (TypeError, "defjvp: a rule must be callable, got 3", methodcaller("def_jvp_rule2", 3)),
    (TypeError, "defjvp: expected an XLACustomKernel or a jax Primitive, got 3", lambda op: xk.defjvp(3)),
    (TypeError, TRACED, lambda op: jax.jit(call_op(op))(1.0, k=2.0)),
    (ValueError, "must be 'gpu', 'tpu' or 'cpu', got 'gpus'", methodcaller("def_pallas_kernel", "gpus", add_to(1))),
    (ValueError, "no backend 'c' for platform 'cpu'; registered: cpu", methodcaller("set_default", "cpu", "c")),
    (ValueError, "no backend '' for platform 'cpu'; registered: cpu", methodcaller("set_default", "cpu", None)),
    (ValueError, NAMES_IN_RULE.format("i, i"), methodcaller("def_sharding_rule", "i, i")),
    (ValueError, NAMES_IN_RULE.format("... i -> i"), methodcaller("def_sharding_rule", "... i -> i")),
    (ValueError, NAMES_IN_RULE.format("i i -> i"), methodcaller("def_sharding_rule", "i i -> i")),
    (NotImplementedError, NO_RULE.format("jvp"), lambda op: jax.grad(call_op(op))(1.0)),
    (NotImplementedError, NO_RULE.format("transpose"), lambda op: jax.linear_transpose(call_op(op), 1.0)(1.0)),
]


@pytest.mark.parametrize("error, text, misuse", MISUSES)
def test_op_misuse(error, text, misuse):
    with pytest.raises(error, match=re.escape(text)):
        misuse(op_adding(a=1))


# -- derivatives, and rules of one's own for batches ---------------------------------------------------


def like_sine_and_signs(x, n):
    return {"sine": x, "times_sign": spec(*x.shape, dtype=np.int32)}


def sine_and_signs(x, n, a):
    """Two outputs of two dtypes: sin(a x) and, as integers, n times the signs."""
    return jnp.sin(a * x), jnp.sign(x).astype(np.int32) * n


def tangent_of_sine(t, x, a):
    return a * jnp.cos(a * x) * t


def define_jvp_rule(op):
    @op.def_jvp_rule
    def rule(primals, tangents, a, **options):
        outputs = op.primitive.bind(*primals, a=a, **options)
        return outputs, [tangent_of_sine(tangents[0], primals[0], a), None]


def define_jvp_rules_by_operand(op):
    """A tangent of integers, which have none, counts as None."""

    def rule(t, x, n, a):
        return [tangent_of_sine(t, x, a), 0 * n]

    op.def_jvp_rule2(rule, None)


def define_vjp_rule(op):
    """It gets and returns what has the structure of outs; the cotangent of an integer may be JAX's own of no bits."""

    def forward(x, n, a):
        return op(x, n, outs=like_sine_and_signs, a=a), x

    def backward(x, cotangents, a):
        return tangent_of_sine(cotangents["sine"], x, a), np.zeros((), jax.dtypes.float0)

    op.def_vjp_rule(forward, backward)


def directional_derivative(f):
    return jax.jvp(f, (VECTOR,), (WEIGHTS,))


def second_derivative(f):
    return jax.jit(jax.grad(sum_of(jax.grad(sum_of_squares_of(f)))))(VECTOR)


def grad_of_vmap(f):
    return jax.grad(sum_of_squares_of(jax.vmap(f)))(ROWS)


def grad_by_an_integer(f):
    gradient, nothing = jax.grad(sum_of(f), (0, 1), allow_int=True)(VECTOR, np.int32(2))
    return gradient, nothing.dtype == jax.dtypes.float0


@pytest.mark.parametrize("derivative", [directional_derivative, second_derivative, grad_of_vmap, grad_by_an_integer])
@pytest.mark.parametrize("define_rule", [define_jvp_rule, define_jvp_rules_by_operand, define_vjp_rule])
def test_op_derivative_rules(define_rule, derivative):
    if define_rule is define_vjp_rule and derivative is directional_derivative:
        pytest.skip("a vjp rule has no forward mode")
    op = op_of(sine_and_signs)
    define_rule(op)

    def sine(x, n=1):
        return op(x, n, outs=like_sine_and_signs, a=2.0)["sine"]

    def sine_in_jax(x, n=1):
        return jnp.sin(2.0 * x)

    check_equal(derivative(sine), derivative(sine_in_jax), rtol=2e-5)


def test_op_rules_see_no_zero_tangents_and_no_call_without_cotangents():
    op, seen = op_of(operator.mul), []

    def tangent_of_x(t, x, y):
        seen.append("x")
        return op(t, y, outs=t)

    @op.def_transpose_rule
    def transpose(cotangents, x, y):
        seen.append("transpose")
        return [None, None]

    op.def_jvp_rule2(tangent_of_x, lambda t, x, y: pytest.fail("y has no tangent"))
    product_with_weights = jax.vmap(lambda x: op(x, WEIGHTS, outs=x))
    gradient = jax.grad(lambda x: product_with_weights(product_with_weights(x)).sum())
    check_equal(gradient(ROWS), np.zeros((3, 8)))
    assert seen == ["x", "x", "transpose"]


def test_op_output_without_tangent_stays_symbolic():
    op = op_adding(a=1)
    op.def_jvp_rule2(None)

    def value_and_tangent(x):
        return jax.jvp(lambda x: op(x, outs=x) * 2, (x,), (x,))

    assert str(jax.make_jaxpr(value_and_tangent)(1.0)).count("mul") == 1  # none for the tangent


OUTPUTS, OPERANDS = "but the outputs are (float32[8])", "but the operands are (float32[8], float32[8])"
TOO_FEW_FOR_TRANSPOSE = "transpose rule of 'op' returned (float32[8]), but the operands are (None, float32[8])"
RULE_ERRORS = {  # the method that defines a rule of the product, its arguments, and what the error says
    "jvps: too few": ("def_jvp_rule2", [None], "'op' has 1 jvp rules for 2 operands"),
    "jvps: shape": ("def_jvp_rule2", [None, lambda t, x, y: t[:2]], f"operand 1 returned (float32[2]), {OUTPUTS}"),
    "jvp: no output": ("def_jvp_rule", [lambda x, t: ([], t[:1])], "returned (), but outs declares (float32[8])"),
    "jvp: dtype": ("def_jvp_rule", [lambda x, t: (x[:1], [t[0].astype(int)])], f"returned (int32[8]), {OUTPUTS}"),
    "transpose": ("def_transpose_rule", [lambda cts, x, y: cts], TOO_FEW_FOR_TRANSPOSE),
    "vjp: scalar": ("def_vjp_rule", [lambda x, y: (x, y), lambda y, ct: (None, 0.0)], f"(None, float32[]), {OPERANDS}"),
    "vjp: dict": ("def_vjp_rule", [lambda x, y: (x, y), lambda y, ct: {"x": ct}], "return a tuple, in the order of"),
}


@pytest.mark.parametrize("case", RULE_ERRORS)
def test_op_rule_errors(case):
    """Also under vmap, where shapes are those of one slice."""
    method, args, text = RULE_ERRORS[case]
    op = product_op()
    getattr(op, method)(*args)
    for product, x in ((call_op(op), VECTOR), (jax.vmap(call_op(op)), ROWS)):
        with pytest.raises((ValueError, TypeError), match=re.escape(text)):
            jax.grad(sum_of(product), (0, 1))(x, x)


def define_derivative(op, value, rule):
    """A rule that holds no call of the op, and makes the derivative `value`."""
    if rule == "jvp":
        op.def_jvp_rule(lambda primals, tangents: (primals, [value * tangents[0]]))
    else:
        op.def_vjp_rule(lambda x: (x, None), lambda residuals, ct: value * ct)


@pytest.mark.parametrize("is_bound_by_hand", [False, True])
def test_op_newest_derivative_reaches_warm_functions(is_bound_by_hand):
    """A primitive that is bound by hand knows jvp rules only."""
    op = op_adding(a=1)
    call = call_op(op)
    if is_bound_by_hand:
        call = lambda x: op.primitive.bind(x, outs=(spec(),))[0]
    derivative = jax.jit(jax.grad(call))
    for value, rule, newest_jvp in ((1, "jvp", 1), (5, "vjp", 1), (7, "vjp", 1), (9, "jvp", 9)):
        define_derivative(op, value, rule)
        assert derivative(0.0) == (newest_jvp if is_bound_by_hand else value)
        assert ("vjp" in repr(op)) == (rule == "vjp")


def test_op_newest_batching_rule_reaches_warm_functions():
    op = op_adding(a=1)
    batched = jax.jit(jax.vmap(call_op(op)))
    for value in (2, 3):
        op.def_batching_rule(lambda args, axes, value=value: ([value * args[0]], axes))
        assert batched(jnp.ones(1)) == value


def test_defjvp_and_general_batching_take_a_primitive_of_someone_else():
    square_p = xk.Primitive("square")
    square_p.def_impl(jnp.square)
    square_p.def_abstract_eval(like_first)
    mlir.register_lowering(square_p, mlir.lower_fun(jnp.square, multiple_results=False))
    batching.primitive_batchers[square_p] = partial(xk.general_batching_rule, square_p)
    xk.defjvp(square_p, lambda t, x: 2 * x * t)
    check_equal(jax.jvp(square_p.bind, (VECTOR,), (WEIGHTS,)), (VECTOR**2, 2 * VECTOR * WEIGHTS))
    check_equal(jax.vmap(square_p.bind, 1)(ROWS.T), ROWS**2)


def test_general_batching_rule_takes_outs_as_a_call_of_the_op_does():
    """Axes may count from the end."""
    rows, axis = xk.general_batching_rule(product_op(), (ROWS.T, WEIGHTS), (-1, None), outs=like_first)
    check_equal(rows, ROWS * WEIGHTS)
    assert axis == 0


def test_general_batching_rule_where_nothing_is_batched():
    outputs, axes = xk.general_batching_rule(lambda x: (x, x), (VECTOR,), (None,))
    assert axes == (None, None)
    check_equal(outputs, (VECTOR, VECTOR))


def test_op_batching_rules_as_brainevent_writes_them():
    """The product with a vector becomes one with a matrix, where the vectors alone are batched."""
    op = op_of(lambda a, v, scale: a @ v * scale)
    seen = []

    @op.def_batching_rule
    def rule(args, axes, **options):
        seen.append(tuple(axes))
        if tuple(axes) != (None, 0):
            return xk.general_batching_rule(op, args, axes, **options)
        matrix, vectors = args
        options["outs"] = (spec(3, 3),)
        return op(matrix, vectors.T, **options), [-1]

    matrix = ROWS @ ROWS.T
    products = 2 * matrix @ matrix.T
    product = partial(op, outs=spec(3), scale=2.0)
    of_matrices = jax.vmap(product, (0, None))
    check_equal(jax.vmap(product, (None, 0))(matrix, matrix), products)
    check_equal(jax.vmap(of_matrices, (None, 0))(np.stack([matrix, matrix]), matrix)[:, 1], products)
    assert seen == [(None, 0), (0, None)]


BATCHING_RULE_ERRORS = {  # outputs and axes that a rule returns, and their slices as the error shows them
    "no axis": ([ROWS], [None], "float32[3,8]"),
    "axes of no output": ([ROWS], [], ""),
}


@pytest.mark.parametrize("case", BATCHING_RULE_ERRORS)
def test_op_batching_rule_errors(case):
    outputs, axes, shown = BATCHING_RULE_ERRORS[case]
    op = product_op()
    op.def_batching_rule(lambda args, in_axes: (outputs, axes))
    text = f"the batching rule of 'op' returned ({shown}), but the slices of outs are (float32[8])"
    with pytest.raises(ValueError, match=re.escape(text)):
        jax.vmap(call_op(op))(ROWS, ROWS)


def test_op_rules_can_be_called_and_primitives_bound_as_brainevent_does():
    op = product_op()
    op.def_transpose_rule(lambda cts, x, y, **options: (cts[0], x))
    linear = ad.UndefinedPrimal(jax.typeof(jnp.asarray(VECTOR)))
    transpose = ad.primitive_transposes[op.primitive]
    check_equal(transpose([WEIGHTS], linear, WEIGHTS, backend=None)[0], WEIGHTS)
    (out,) = op.primitive.bind(VECTOR, WEIGHTS, outs=(spec(8),), backend=None)
    check_equal(out, VECTOR * WEIGHTS)


def test_rules_take_ops_of_another_copy_of_the_file():
    op = load_copy("xla_kernels_of_someone_else").XLACustomKernel("tripled")
    op.def_kernel("jax", "cpu", lambda: lambda x: 3 * x)
    xk.defjvp(op, lambda t, x: 3 * t)
    x = jnp.arange(3.0)
    check_equal(jax.grad(sum_of(jax.vmap(call_op(op))))(x), [3, 3, 3])
    batch, _ = xk.general_batching_rule(op, (x,), (0,), outs=spec())
    check_equal(batch, 3 * x)


# -- over several devices ------------------------------------------------------------------------------

COLLECTIVES = re.compile(r"\b(all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(")


def numba_product(rule):
    return xk.numba_kernel(numba_multiply, like_first, sharding_rule=rule)


def in_place_product(rule):
    """x * y in the memory of x, with scratch and a hidden copy of y."""

    def multiply(x, y, out, work):
        memset(y.ctypes, 0, 0)  # which could write to y
        work[:] = out * y
        out[:] = work

    options = {"input_output_aliases": {0: 0}, "scratch": like_first, "sharding_rule": rule}
    return xk.numba_kernel(multiply, like_first, **options)


def warp_product(rule):
    return xk.warp_kernel(warp_kernels().multiply, like_first, differentiable=True, sharding_rule=rule)


SPLIT_PRODUCTS = {  # kind: x * y, with a sharding rule or None
    "numba": numba_product,
    "gspmd": numba_product,
    "explicit": numba_product,
    "in place": in_place_product,
    "warp": warp_product,
    "op numba": partial(product_of, "numba"),
    "op no_batching": partial(product_of, "no_batching"),
}


def as_it_is(product):
    return product


def of_batch(product):
    """A batch of x; all slices share y."""
    return jax.vmap(product, (0, None))


def of_pairs(product):
    return jax.vmap(jax.vmap(product, (None, 0)), (0, None))


def of_inner_batch(product):
    return jax.vmap(jax.vmap(product, (0, None)))


def of_first_three(product):
    return lambda x, y: jax.vmap(product)(x[:3], y[:3])


def times_x(product):
    """Its result is wanted as x is split."""
    return lambda x, y: product(x, y) * x


def gradient_of_batch(product):
    return jax.grad(sum_of_squares_of(of_batch(product)))


class Split(typing.NamedTuple):
    """A product of arrays that are split over a mesh of two by two devices, "d" and "e"."""

    transform: Callable  # what is done to the product of two vectors
    operands: tuple
    placed: list  # how each operand is split
    result: tuple  # how the result is split
    rule: str | None = None
    may_use: frozenset = frozenset()  # collectives: what the devices may exchange


CUBE = np.arange(128.0, dtype=np.float32).reshape(8, 4, 4)
XS, YS = CUBE[:2]
X, Y = XS[0], YS[0]
INNER = (None, ("e", "d"))
GATHER = frozenset({"all-gather"})
EXCHANGE = frozenset({"all-gather", "all-to-all", "collective-permute"})
SPLITS = {
    "vmap": Split(of_batch, (XS, Y), [("d",), ()], ("d",)),
    "crossed": Split(of_pairs, (XS, YS), [("d",), ("e",)], ("d", "e")),
    "one axis for both": Split(of_pairs, (XS, YS), [("d",), ("d",)], ("d",), may_use=GATHER),
    "inner": Split(of_inner_batch, (CUBE, CUBE[:, 0]), [INNER, ()], INNER),
    "disagreeing": Split(jax.vmap, (XS, YS), [("d",), (None, "d")], ("d",), may_use=EXCHANGE),
    "disagreeing axes": Split(as_it_is, (X, Y), [("d",), ("e",)], ("d",), "i, i -> i", EXCHANGE),  # the first one's
    "kernel's own": Split(jax.vmap, (XS, YS), [(None, "d"), ()], (), may_use=GATHER),
    "uneven": Split(of_first_three, (XS, YS), [("d",), ()], (), may_use=GATHER),
    "empty": Split(jax.vmap, (XS[:0], YS[:0]), [("d",), ()], ()),
    "rule and vmap": Split(of_batch, (XS, Y), [("d", "e"), ("e",)], ("d", "e"), rule="i, i -> i"),
    "rule of outputs": Split(times_x, (X, Y), [("d",), ()], ("d",), rule="i, i -> j", may_use=GATHER),
    "grad": Split(gradient_of_batch, (XS, Y), [("d", "e"), ("e",)], ("d", "e"), rule="i, i -> i"),
}
OF_ALL_KINDS = ("vmap", "crossed", "rule and vmap")
SPLIT_CASES = [
    *itertools.product([name for name in SPLITS if name not in ("disagreeing axes", "grad")], ["numba"]),
    *itertools.product(["disagreeing axes"], ["gspmd", "explicit"]),  # Shardy replicates then
    *itertools.product(OF_ALL_KINDS, ["gspmd", "explicit", "in place"]),
    *itertools.product([*OF_ALL_KINDS, "grad"], ["op numba", "op no_batching"]),
    *[pytest.param(program, "warp", marks=pytest.mark.needs("warp")) for program in (*OF_ALL_KINDS, "grad")],
]


@pytest.mark.parametrize("program, kind", SPLIT_CASES)
def test_what_is_sharded_stays_sharded(program, kind):
    split = SPLITS[program]
    function = split.transform(SPLIT_PRODUCTS[kind](split.rule))
    sharding = partial(_mesh_sharding, shape=(2, 2))
    if kind == "explicit":
        sharding = partial(sharding, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    operands = [jax.device_put(x, sharding(*axes)) for x, axes in zip(split.operands, split.placed)]
    with conftest.configured("jax_use_shardy_partitioner", kind != "gspmd"):
        compiled = jax.jit(function).lower(*operands).compile()
    assert split.may_use.issuperset(COLLECTIVES.findall(compiled.as_text()))
    result = compiled(*operands)
    assert_same(result, split.transform(operator.mul)(*split.operands))
    assert result.sharding.is_equivalent_to(sharding(*split.result), result.ndim)


@pytest.mark.parametrize("kind", ["numba", "op no_batching"])
def test_a_batch_is_split_over_the_current_mesh(kind):
    """JAX's search for concrete shardings does not find it."""
    product = jax.vmap(SPLIT_PRODUCTS[kind](None))

    def split_product(x, y):
        return product(jax.lax.with_sharding_constraint(x, P("d")), y)

    with jax.set_mesh(_mesh_sharding().mesh):
        compiled = jax.jit(split_product).lower(XS, YS).compile()
        assert not COLLECTIVES.search(compiled.as_text())
        check_equal(compiled(XS, YS), XS * YS)


@pytest.mark.parametrize("kind", ["numba", "op numba"])
@pytest.mark.parametrize("shape, rule", [((2, 2, 4), None), ((2, 8), "i, i -> i")])
def test_a_batch_may_be_split_over_a_part_of_an_axis(shape, rule, kind):
    product = SPLIT_PRODUCTS[kind](rule)
    for _ in shape[:-1]:
        product = jax.vmap(product)

    @jax.jit
    def squares(x):
        x = x.reshape(shape)
        return product(x, x).ravel()

    x = XS.ravel()  # four of its 16 elements on each device
    check_equal(squares(on_mesh(x, "d")), x * x)


@xk.numba_kernel(outs=like_first, has_side_effect=True)
def copy_aloud(x, out):
    print("slice")
    out[:] = x


COPIES_ALOUD = {  # programs of four slices on four devices, or of one on each
    "batch": jax.vmap(copy_aloud),
    "replicated": lambda x: copy_aloud(x[0]),
    "result unused": lambda x: jax.vmap(copy_aloud)(x)[:0],
}


@pytest.mark.parametrize("program", COPIES_ALOUD)
def test_side_effects_of_what_is_sharded_happen_on_each_device(program, capfd):
    jax.block_until_ready(jax.jit(COPIES_ALOUD[program])(on_mesh(XS, "d")))
    assert capfd.readouterr().out.count("slice") == 4


def over_axis(f, axis, **mesh):
    """`f` in a shard_map over one axis of the mesh alone."""
    return jax.shard_map(f, in_specs=P(axis), out_specs=P(axis), axis_names={axis}, **mesh)


def test_side_effects_need_a_sharding_that_says_where():
    two_by_two = _mesh_sharding(shape=(2, 2)).mesh
    without_outputs = wrap(runs("pass", "x"), outs=(), has_side_effect=True)
    over_half_a_mesh = over_axis(copy_aloud, "d", mesh=two_by_two)
    for f, x in ((without_outputs, on_mesh(XS, "d")), (over_half_a_mesh, XS)):
        with pytest.raises(NotImplementedError, match="cannot tell on which devices: over several, give it an input"):
            jax.jit(f)(x)
    over_both = over_axis(over_axis(copy_aloud, "e"), "d", mesh=two_by_two)
    check_equal(jax.jit(over_both)(XS), XS)


def test_export_of_what_is_sharded():
    x = on_mesh(XS, "d")
    product = jax.jit(jax.vmap(SPLIT_PRODUCTS["op numba"](None)))
    check_equal(product(x, x), XS * XS)  # and export_checks knows its kernel
    exported = export.export(product, disabled_checks=xk.export_checks())(x, x)
    check_equal(jax.jit(exported.call)(x, x), XS * XS)


def addresses(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_donation_of_what_is_sharded():
    x = jax.jit(jnp.negative)(on_mesh(XS, "d"))  # no view of NumPy's memory
    y = on_mesh(YS, "d")
    before = addresses(x)
    product = jax.jit(jax.vmap(in_place_product(None)), donate_argnums=0)(x, y)
    assert addresses(product) == before
    check_equal(product, -XS * YS)


# -- sharding rules ------------------------------------------------------------------------------------


def test_op_sharding_rule_and_constants():
    """One of JAX, one of NumPy, and one made of the shape, which is another one on a shard."""
    table, numpy_table = jnp.arange(3.0), np.arange(3.0, dtype=np.float32)

    def quintuple(x):
        size = np.float32([x.shape[0]])
        return (x[:, None] * table * numpy_table).sum(1) * size / x.shape[0]

    run = call_op(op_of(quintuple, rule="i -> i"))
    x = on_mesh(VECTOR, "d")
    y = jax.jit(run)(x)
    check_equal(y, 5 * VECTOR)
    assert y.sharding == x.sharding
    check_equal(jax.jit(jax.vmap(run))(jnp.stack([x, x])), [5 * VECTOR] * 2)


@pytest.mark.parametrize("axes", [("d",), (None, "d")], ids=str)
def test_op_sharding_rule_gathers_what_is_reduced(axes):
    op = op_of(operator.matmul, rule="i j, j -> i")
    matrix = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    multiply = jax.jit(partial(op, outs=spec(8)))
    check_equal(multiply(on_mesh(matrix, *axes), on_mesh(VECTOR, "d")), matrix @ VECTOR)


def test_op_sharding_rule_is_for_arrays_of_its_ranks():
    with pytest.raises(ValueError, match=r"'i, i -> i' is for .* of ranks \[\[1, 1\], \[1\]\], but the call has"):
        product_of("jax", "i, i -> i")(ROWS, ROWS)


def square_on_the_host(x):
    return jax.pure_callback(np.square, x, x, vmap_method="sequential")


def square_small_numbers_on_the_host(x):
    return jax.lax.cond(x[0] < 100, square_on_the_host, jnp.square, x)


def square_and_print(x):
    jax.debug.print("{}", x)
    return x * x


@pytest.mark.parametrize("is_called_by_an_op", [False, True])
@pytest.mark.parametrize("kernel", [jnp.square, square_small_numbers_on_the_host, square_and_print])
def test_op_is_partitioned_unless_its_kernel_calls_python(kernel, is_called_by_an_op):
    """Wherever the callback is: under a condition, or in the kernel of an op that the kernel calls."""
    op = op_of(kernel, "i -> i")
    call = call_op(op_of(call_op(op), "i -> i") if is_called_by_an_op else op)
    x = on_mesh(VECTOR, "d")
    is_partitioned = "CustomSPMDPartitioning" in jax.jit(call).lower(x).as_text()
    assert is_partitioned == (kernel is jnp.square)
    check_equal(jax.jit(call)(x), VECTOR * VECTOR)
    check_equal(jax.jit(jax.vmap(call))(on_mesh(XS, "d")), XS * XS)


def name_in_persistent_cache(kernel):
    """What tells JAX's persistent cache one kernel from another, where XLA may split it."""
    x = on_mesh(VECTOR, "d")
    text = jax.jit(call_op(op_of(kernel, "i -> i"))).lower(x).as_text()
    (name,) = set(re.findall(r'xla_kernel = "(\w+)"', text))
    return name


COMPUTED_ON_A_MESH = {  # two kernels, whose own jaxprs have the same text but for the first
    "functions": (jnp.sin, jnp.cos),
    "arrays of a jitted function": (jax.jit(lambda x: x + ROWS[0, :1]), jax.jit(lambda x: x + ROWS[1, :1])),
    "ops": (call_op(op_of(jnp.sin)), call_op(op_of(jnp.cos))),
}


@pytest.mark.parametrize("kind", COMPUTED_ON_A_MESH)
def test_op_on_a_mesh_is_named_by_what_its_kernel_computes(kind):
    kernel, another = COMPUTED_ON_A_MESH[kind]
    name = name_in_persistent_cache(kernel)
    assert name_in_persistent_cache(kernel) == name
    assert name_in_persistent_cache(another) != name


def test_op_ordered_effects_are_refused():
    def print_in_order(x):
        jax.debug.print("{}", x, ordered=True)
        return x

    for f in eager_and_jitted(call_op(op_of(print_in_order))):
        with pytest.raises(NotImplementedError, match=r"'op' has no ordered effects; call its kernel itself: .*Order"):
            f(VECTOR)


@pytest.mark.parametrize("define_derivative", [define_derivative_by_itself, define_backward_pass])
@pytest.mark.parametrize("x_axes, y_axes", [(("d",), ()), ((), ("d",))])
@pytest.mark.parametrize("rule", [None, "i, i -> i"])
def test_op_on_a_mesh_of_explicit_axes(rule, x_axes, y_axes, define_derivative):
    """Also where its operands are split differently."""
    product = product_of("jax", rule, define_derivative)
    with jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        x, y = jax.device_put(VECTOR, P(*x_axes)), jax.device_put(WEIGHTS, P(*y_axes))
        check_equal(jax.jit(product)(x, y), VECTOR * WEIGHTS)
        x_gradient, y_gradient = jax.jit(jax.grad(sum_of(product), (0, 1)))(x, y)
        check_equal(x_gradient, WEIGHTS)
        check_equal(y_gradient, VECTOR)


# -- debugging and timing ------------------------------------------------------------------------------


@xk.numba_kernel(outs=like_first)
def log_loop(x, out):
    for i in np.ndindex(x.shape):
        out[i] = np.log(x[i])


log_op = op_of(log_loop)
LOGARITHMS = {  # also of what is bound to arrays by hand
    "eager": call_op(log_op),
    "primitive": lambda x: log_op.primitive.bind(x, outs=(spec(2),))[0],
    "wrapper": jax.disable_jit()(log_loop),
}


@pytest.mark.parametrize("kind", LOGARITHMS)
def test_debug_nans(kind):
    log = LOGARITHMS[kind]
    with jax.debug_nans(True):
        check_equal(log(jnp.ones(2)), np.zeros(2))
        with pytest.raises(FloatingPointError):
            log(-jnp.ones(2))


def test_op_benchmark_compares_backends():
    op = op_adding(a=1, b=np.nan, c=1.5)
    op.def_kernel("bad", "cpu", raise_key_error)
    op.def_kernel("far", "gpu", add_to(1))
    result = op.benchmark(VECTOR, outs=like_first)
    a, b, c, bad = result.rows
    assert (a.difference, c.difference, bad.difference) == (0, 0.5, None) and np.isnan(b.difference)  # from a
    assert a.first_ms > 0 and a.median_us > 0 and a.error is None
    assert bad.first_ms is None and "KeyError" in bad.error
    table = r"op on cpu\nbackend .*\na .*\d  0\nb .*\d  nan\nc .*\d  0.5\nbad .*nan  .*KeyError.*"
    assert re.fullmatch(table, str(result))


# ======================================================================================================
# A network of spiking neurons, the README's whole program
# CUBA, benchmark 2 of Brette et al. (2007): leaky integrate-and-fire neurons, 80% of them excitatory, 80 synapses each.
# ======================================================================================================

EL, VT, VR, REFRACTORY = np.float32(-49), np.float32(-50), np.float32(-60), np.int32(50)  # mV, and steps of 0.1 ms
DECAY_V, DECAY_E, DECAY_I = np.exp(np.float32(-0.1) / np.float32([20, 5, 10]))  # exact: the equations are linear
GAIN_E, GAIN_I = np.float32(-1 / 3) * (DECAY_E - DECAY_V), np.float32(-1) * (DECAY_I - DECAY_V)


def neurons(_v, _ge, _gi, _wait, v, ge, gi, wait, spiking, count):
    """Advances the neurons in place, and lists those that spike."""
    for i in range(v.size):
        u = EL + (v[i] - EL) * DECAY_V + ge[i] * GAIN_E + gi[i] * GAIN_I
        u = v[i] if wait[i] > 1 else u
        v[i] = VR if u > VT else u
        wait[i] = REFRACTORY if u > VT else wait[i] - np.int32(1)
        ge[i] *= DECAY_E
        gi[i] *= DECAY_I
    count[0] = 0
    for i in range(v.size):
        if wait[i] == REFRACTORY:
            spiking[count[0]] = i
            count[0] += 1


def synapses(_ge, _gi, spiking, count, indptr, indices, ge, gi):
    """Adds up the synapses of the listed neurons: an event-driven product with a sparse matrix in CSR form."""
    for i in spiking[: count[0]]:
        for k in range(indptr[i], indptr[i + 1]):
            j = np.uint32(indices[k])  # unsigned, so that Numba need not look for negative indices
            if i < 0.8 * ge.size:
                ge[j] += np.float32(1.62)
            else:
                gi[j] -= np.float32(9)


def random_csr(n_rows, n_columns):
    """indptr and indices of a matrix with 80 columns in a row."""
    rng = np.random.default_rng(1)
    indptr = np.r_[0, rng.binomial(n_columns, 80 / n_columns, n_rows).cumsum()]
    return jnp.asarray(indptr, jnp.int32), jnp.asarray(rng.integers(0, n_columns, indptr[-1]), jnp.int32)


def first_state(n):
    v = np.random.default_rng(2).uniform(VR, VT, n)
    return jnp.asarray(v, jnp.float32), jnp.zeros(n), jnp.zeros(n), jnp.zeros(n, jnp.int32)


def cuba(n, numba_kernel=xk.numba_kernel):
    """A step of the network: its state -> the next one, the neurons that spike, and their number."""
    spiking, count = spec(n, dtype=jnp.int32), spec(1, dtype=jnp.int32)
    advance = numba_kernel(neurons, lambda *s: (*s, spiking, count), input_output_aliases={0: 0, 1: 1, 2: 2, 3: 3})
    transmit = numba_kernel(synapses, lambda ge, gi, *_: (ge, gi), input_output_aliases={0: 0, 1: 1})
    csr = random_csr(n, n)

    def step(state):
        v, ge, gi, wait, spiking, count = advance(*state)
        ge, gi = transmit(ge, gi, spiking, count, *csr)
        return (v, ge, gi, wait), spiking, count[0]

    return step


def spike_counts(step, steps):
    """A function of the first state that returns how many neurons spike in each step."""

    def counted(state, _):
        state, _, count = step(state)
        return state, count

    return jax.jit(lambda state: jax.lax.scan(counted, state, length=steps)[1])


def test_network_of_spiking_neurons():
    """It spikes at the rate that Brette et al. report."""
    counts = spike_counts(cuba(4000), 2000)(first_state(4000))
    assert 4 < counts.sum() / 4000 / 0.2 < 8


# ======================================================================================================
# Benchmarks: pytest --bench [--bench-out=PREFIX].  They measure what the README cites, and assert no time.
# Each comparison runs in a process of its own; its paths take turns, round by round.
# ======================================================================================================


def compare(paths, unit="µs", case="", rounds=7):
    """Rows of one table: `paths` maps a name to a function that prepares it and returns one that measures once."""
    rows, running = [], []
    for name, prepare in paths.items():
        row = {"case": case, "path": name, "unit": unit}
        rows.append(row)
        try:
            run = prepare()
            run()
            running.append((row, run, []))
        except Exception as error:
            row["note"] = f"{error!r:.150}"
    for _ in range(rounds):
        for _, run, samples in running:
            samples.append(run())
    for row, _, samples in running:
        row.update(value=statistics.median(samples), min=min(samples), max=max(samples), rounds=rounds)
        if "value" in rows[0]:
            row["ratio"] = row["value"] / rows[0]["value"]
    return rows


def over(paths, measure):
    """`paths` with every function handed to `measure` when its turn to be prepared comes."""
    return {name: partial(measure, make) for name, make in paths.items()}


def seconds(work, *args):
    """How long a call of `work` and what it returns take."""
    start = time.perf_counter()
    jax.block_until_ready(work(*args))
    return time.perf_counter() - start


def averaged(repeat, first):
    """A function that measures one of the n calls that repeat(n) makes, in µs, with an n that takes about 20 ms."""
    repeat(first)
    n = max(1, int(0.02 * first / seconds(repeat, first)))
    repeat(n)
    return lambda: seconds(repeat, n) / n * 1e6


def timed(function, *args):
    """A function that measures one call of `function` in µs."""

    def repeat(n):
        for _ in range(n):
            result = function(*args)
        return result

    return averaged(repeat, 2)


def timed_loop(f, x, y):
    """A function that measures one `f(x, y)` inside `lax.fori_loop`, in µs."""

    def repeat(steps):
        return run(x, steps)

    @partial(jax.jit, static_argnums=1)
    def run(x, steps):
        return jax.lax.fori_loop(0, steps, lambda _, a: f(a, y), x)

    return averaged(repeat, max(1, min(100, int(2e6 / x.size))))


# -- one addition, along every path: functions of the output's spec ------------------------------------


def add_in(language):
    return matrix_kernel("add", language, np.dtype("float32"))


def add_numba(out):
    return xk.numba_kernel(numba_jit(add_in("numba")), out)


def add_cuda(out):
    return xk.numba_cuda_kernel(add_in("cuda"), out, launch_dims=out.size)


def add_warp(out):
    return xk.warp_kernel(add_in("warp"), out)


def add_op(out):
    op = xk.XLACustomKernel("bench_add")
    op.def_numba_kernel(numba_jit(add_in("numba")))
    return partial(op, outs=out)


def add_warp_jax(out):
    call = wp.jax_kernel(add_in("warp"))
    return lambda x, y: call(x, y)[0]


def add_brainevent(out):
    import brainevent

    return brainevent.numba_kernel(numba_jit(add_in("numba")), outs=out, vmap_method="sequential")


def add_brainevent_cuda(out):
    import brainevent

    return brainevent.numba_cuda_kernel(cuda.jit(add_in("cuda")), outs=out, launch_dims=out.size)


def add_on_the_host(out):
    return partial(jax.pure_callback, np.add, out, vmap_method="sequential")


def add_in_jax(out):
    return jax.jit(operator.add)


CPP_ADD = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
using Array = ffi::Buffer<ffi::F32>;
static ffi::Error Add(Array x, Array y, ffi::Result<Array> out) {
  const float *a = x.typed_data(), *b = y.typed_data();
  float *c = out->typed_data();
  for (size_t i = 0, n = x.element_count(); i < n; ++i) c[i] = a[i] + b[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(handler, Add, ffi::Ffi::Bind().Arg<Array>().Arg<Array>().Ret<Array>());
"""


@functools.cache
def register_cpp():
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}"]
    with tempfile.TemporaryDirectory() as folder:
        source, path = pathlib.Path(folder, "library.cc"), pathlib.Path(folder, "library.so")
        source.write_text(CPP_ADD)
        subprocess.run(["g++", *flags, source, "-o", path], check=True)
        library = ctypes.CDLL(str(path))
    jax.ffi.register_ffi_target("bench_add", jax.ffi.pycapsule(library.handler), platform="cpu")


def add_cpp(out):
    register_cpp()
    return jax.ffi.ffi_call("bench_add", out, vmap_method="sequential")


ADD = {
    "cpu": {
        "numba_kernel": add_numba,
        "warp_kernel": add_warp,
        "XLACustomKernel (Numba)": add_op,
        "C++ FFI handler": add_cpp,
        "brainevent.numba_kernel": add_brainevent,
        "warp.jax_kernel": add_warp_jax,
        "jax.pure_callback": add_on_the_host,
        "a jitted x + y": add_in_jax,
    },
    "gpu": {
        "numba_cuda_kernel": add_cuda,
        "warp_kernel": add_warp,
        "brainevent.numba_cuda_kernel": add_brainevent_cuda,
        "warp.jax_kernel": add_warp_jax,
        "jax.pure_callback": add_on_the_host,
        "a jitted x + y": add_in_jax,
    },
}


def adders():
    """The paths of the platform."""
    return over(ADD[jax.default_backend()], checked)


def checked(make, out):
    """The path, after a look at its answer: a fast wrong one is worth no row."""
    add = make(out)
    x = jnp.arange(out.size, dtype=out.dtype)
    np.testing.assert_array_equal(add(x, x), x + x)
    return add


def pair(*shape):
    return jnp.ones(shape), jnp.full(shape, 1e-3)


# -- the comparisons -----------------------------------------------------------------------------------


def bench_per_call():
    """One call on 16 elements inside fori_loop"""
    paths = adders()
    del paths["a jitted x + y"]  # XLA makes one addition of all
    return compare(over(paths, lambda make: timed_loop(make(spec(16)), *pair(16))))


def bench_large():
    """One call on 1,000,000 elements inside fori_loop"""
    return compare(over(adders(), lambda make: timed_loop(make(spec(1_000_000)), *pair(1_000_000))))


def bench_eager():
    """One eager call on 16 elements"""
    return compare(over(adders(), lambda make: timed(make(spec(16)), *pair(16))))


def bench_vmap():
    """vmap over 1,000 slices of 16 elements"""
    return compare(over(adders(), lambda make: timed(jax.jit(jax.vmap(make(spec(16)))), *pair(1000, 16))))


def spin(x, out):
    """Some 100 µs for each element."""
    for i in range(x.size):
        total = np.float32(0)
        for j in range(20_000):
            total += math.sin(x[i] + np.float32(j))
        out[i] = total


def bench_slices():
    """vmap over 64 slices of 100 µs, on all cores and in order"""

    def batched(method):
        call = xk.numba_kernel(spin, like_first, vmap_method=method)
        return timed(jax.jit(jax.vmap(call)), jnp.arange(64.0).reshape(64, 1))

    paths = {"numba_kernel": partial(batched, None), 'vmap_method="sequential"': partial(batched, "sequential")}
    return compare(paths, case=f"{os.cpu_count()} cores")


START = """
import math, time
import jax, numba, numpy as np

start = time.perf_counter()
import xla_kernels as xk
"""
KERNEL = """
@numba.njit(cache=True)
def kernel_{0}(x, y, out):
    for i in range(x.size):
        out[i] = math.sin(x[i]) ** {0} + y[i]
"""
FIRST_RESULT = """
x = np.ones(16, np.float32)
kernels = [xk.numba_kernel(kernel, lambda x, y: x) for name, kernel in globals().items() if name.startswith("kernel_")]
jax.block_until_ready(jax.jit(lambda x: [kernel(x, x) for kernel in kernels])(x))
print(1e3 * (time.perf_counter() - start))
"""


def bench_start():
    """From importing this library to the first result of 20 kernels with cache=True"""
    program = START + "".join(map(KERNEL.format, range(20))) + FIRST_RESULT

    def first_and_next():
        """The times of two processes that share a folder."""
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "kernels.py")
            file.write_text(program)
            settings = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            return [float(run_python(file, **settings)) for _ in range(2)]

    pairs = [first_and_next() for _ in range(4)]
    first, following = [iter(times) for times in zip(*pairs)]
    return compare(
        {"the first process": lambda: partial(next, first), "the next": lambda: partial(next, following)},
        "ms",
        rounds=3,
    )


# -- the network of spiking neurons, by others ---------------------------------------------------------


def cuba_brainevent(n):
    """The same as brainevent's users write it."""
    import brainevent

    excitatory = n * 4 // 5

    def weights(n_rows, weight):
        indptr, indices = random_csr(n_rows, n)
        return brainevent.CSR((jnp.float32([weight]), indices, indptr), shape=(n_rows, n))

    excite, inhibit = weights(excitatory, 1.62), weights(n - excitatory, -9)

    def step(state):
        v, ge, gi, wait = state
        u = EL + (v - EL) * DECAY_V + ge * GAIN_E + gi * GAIN_I
        u = jnp.where(wait > 1, v, u)
        spikes = u > VT
        ge = ge * DECAY_E + brainevent.BinaryArray(spikes[:excitatory]) @ excite
        gi = gi * DECAY_I + brainevent.BinaryArray(spikes[excitatory:]) @ inhibit
        return (jnp.where(spikes, VR, u), ge, gi, jnp.where(spikes, REFRACTORY, wait - 1)), None, spikes.sum()

    return step


def brainevent_kernel(kernel, outs, **options):
    import brainevent

    return lambda *args: brainevent.numba_kernel(numba.njit(kernel), outs=outs(*args), **options)(*args)


BRIAN2 = """
import sys
from brian2 import *
n, steps, dtype, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
set_device("cpp_standalone", build_on_run=False)
prefs.core.default_float_dtype = getattr(np, dtype)
equations = '''
dv/dt = (ge + gi - (v + 49*mV)) / (20*ms) : volt (unless refractory)
dge/dt = -ge / (5*ms) : volt
dgi/dt = -gi / (10*ms) : volt
'''
neurons = NeuronGroup(n, equations, threshold="v > -50*mV", reset="v = -60*mV", refractory=5*ms, method="exact")
neurons.v = "-60*mV + rand() * 10*mV"
excitatory = Synapses(neurons[:n * 4 // 5], neurons, on_pre="ge += 1.62*mV")
inhibitory = Synapses(neurons[n * 4 // 5:], neurons, on_pre="gi -= 9*mV")
excitatory.connect(p=80 / n)
inhibitory.connect(p=80 / n)
run(steps * 0.1*ms)
device.build(directory=folder, compile=True, run=False)
"""


def brian2_program(n, steps, dtype):
    """A function that runs Brian2's compiled program and reads the time of a step that it reports."""
    kept = tempfile.TemporaryDirectory()
    folder = pathlib.Path(kept.name)
    run_python("-W", "ignore", "-c", BRIAN2, n, steps, dtype, folder, cwd=folder)

    def once():
        subprocess.run([folder / "main"], check=True, capture_output=True, cwd=kept.name)
        return float((folder / "results" / "last_run_info.txt").read_text().split()[0]) / steps * 1e6

    return once


def bench_network(steps=5_000):
    """CUBA network (Brette et al. 2007), 80 synapses a neuron: one step of 0.1 ms"""
    networks = {
        "numba_kernel": cuba,
        "the same with brainevent.numba_kernel": partial(cuba, numba_kernel=brainevent_kernel),
        "brainevent BinaryArray @ CSR, neurons in jnp": cuba_brainevent,
    }
    rows = []
    for n in (4_000, 40_000):

        def stepping(network):
            once = timed(spike_counts(network(n), steps), first_state(n))
            return lambda: once() / steps

        paths = over(networks, stepping)
        paths["Brian2 C++ standalone"] = partial(brian2_program, n, steps, "float64")
        paths["Brian2 C++ standalone, float32"] = partial(brian2_program, n, steps, "float32")
        rows += compare(paths, case=f"{n:,} neurons")
    return rows


def bench_spikes(n=4_000, steps=5_000, shown=250):
    """Spikes of the CUBA network in half a second"""
    step = cuba(n)

    def stepping(state, _):
        state, _, _ = step(state)
        return state, state[3][:: n // shown] == REFRACTORY

    _, spikes = jax.jit(lambda state: jax.lax.scan(stepping, state, length=steps))(first_state(n))
    times, numbers = np.nonzero(np.asarray(spikes))
    raster = [[float(t), int(i)] for t, i in zip(np.round(times * 0.1, 1), numbers)]
    return [{"case": "", "path": "rate", "unit": "Hz", "value": len(raster) / shown / (steps * 1e-4), "raster": raster}]


# -- the tests that measure ----------------------------------------------------------------------------

CPU_ONLY = {"slices", "start", "network", "spikes"}
PICTURES = {"per_call": "speed", "spikes": "raster"}
BENCHMARKS = {name[6:]: function for name, function in list(globals().items()) if name.startswith("bench_")}


@pytest.mark.bench
@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_bench(name, platform, bench_table):
    title, picture = BENCHMARKS[name].__doc__, PICTURES.get(name)
    settings = {"JAX_PLATFORMS": "cpu", "timeout": None}
    if platform == "gpu":  # where pure_callback needs the CPU as well, and a hang is to cost one comparison only
        settings = {"JAX_PLATFORMS": "cuda,cpu", "timeout": 150}
        title, picture = f"{title} (GPU)", None
        if name in CPU_ONLY:
            pytest.skip("is about CPUs")
    report = run_python("-W", "ignore", __file__, name, **settings)
    bench_table(title, {"rows": json.loads(report.splitlines()[-1]), "picture": picture})


def test_pictures_of_the_benchmark():
    """Well-formed, and longer bars for what takes longer."""
    rows = [{"path": "numba_kernel", "value": 0.1, "unit": "µs"}, {"path": "a < b", "value": 100, "unit": "µs"}]
    bars = ElementTree.fromstring(conftest.speed_picture("title", rows))
    widths = [float(bar.get("width")) for bar in bars.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] < widths[1] < 1000
    assert {"a < b", "100 µs"} <= {text.text for text in bars.iter("{http://www.w3.org/2000/svg}text")}
    ElementTree.fromstring(conftest.raster_picture("title", [{"raster": [[0.1, 3], [2.0, 1]]}]))


if __name__ == "__main__":  # one comparison, in a process of its own
    print(json.dumps(BENCHMARKS[sys.argv[1]]()))
