"""Tests of xla_kernels: the matrix of operations, backends, transformations and dtypes, then tests by topic."""

# The sections of this file:
#
#     The matrix        every operation, on every backend, under every transformation, with every dtype
#     Helpers           specs, kernels from strings, threads and processes, for the tests of all sections
#     Numba             captured values, shapes, calling conventions, inputs, initial values, aliases, loops, targets
#     Numba CUDA        the processes of the fake driver and of the simulator, kernels, launches, batch launches
#     Warp              values, derivatives, targets, batch launches, inputs, initial values, gradients, launches
#     Only on a GPU     loops, devices and command buffers of XLA
#     XLACustomKernel   inputs, dispatch, generators, rules for derivatives and batches, benchmarks
#     Several devices   partitioned batches
#     Mistakes          a table of mistakes, and the errors that they raise
#     C structs         the structs of XLA's API
#     Processes         tests that need a process of their own, copies of the library's file, and its self-check
#     conftest.py       the conditions for skips, and the check of logged reasons
#     Documents         programs, links and tables in the documents, the docstrings, and the figure
#
# Marks and fixtures say where a test runs.  Without one of these, it runs on the CPU.
#
#     needs_cuda             on a GPU, and in Numba's simulator (test_cuda_tests_pass_in_simulator)
#     needs("simulator")     in the simulator
#     package_cuda           once for each package, with a fake CUDA driver (test_cuda_tests_pass_with_fake_driver)
#     counting_cuda          with the fake driver and each package, and on a GPU
#     warp_platform          on the CPU, and on a GPU
#     needs_fake_warp_gpu    with a fake GPU for Warp, in a process without a GPU
#     counting_warp          with the fake GPU for Warp, or on a GPU
#     needs_warp_gpu         on a GPU
#     needs("gpu")           on a GPU
#
# conftest.py defines the other conditions of `needs`, and the fakes.
#
# Terms:
#
#     wrapper       a function of JAX arrays that calls a kernel, such as the result of `numba_kernel`
#     op            an XLACustomKernel
#     handler       the machine code that XLA calls, and that calls or launches a kernel
#     target        the name of a handler in programs
#     slice         an element of a batch
#     batch launch  one CUDA launch for many slices

import ast
import collections
import ctypes
import dataclasses
import doctest
import enum
import functools
import gc
import importlib.util
import inspect
import itertools
import json
import linecache
import math
import multiprocessing
import operator
import os
import pathlib
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import timeit
import types
import typing
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from copy import copy as shallow_copy
from copy import deepcopy
from fractions import Fraction  # noqa: F401  # in a table of expressions
from functools import partial

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest
from jax import export
from jax._src import xla_bridge
from jax.errors import JaxRuntimeError
from jax.experimental import serialize_executable
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from numba.core.event import install_recorder
from numba.core.runtime import _nrt_python, rtsys

import conftest
import xla_kernels as xk
from conftest import lower_for_cuda, program_for_cuda, run_for_cuda, targets_in, x64

try:
    import warp as wp
except ImportError:
    wp = None


def is_successor(package_cuda):
    """Return whether a `cuda` module is that of numba-cuda-mlir, the successor of numba-cuda."""
    return getattr(package_cuda, "__name__", "") == "numba_cuda_mlir.cuda"


cuda = conftest.cuda_module()


# ======================================================================================================
# The matrix: every operation, on every backend, under every transformation, with every dtype
#
# A cell of the matrix is one test, such as `test_matrix[hadamard-numba-vmap-float32]`.  It runs one kernel and compares
# the results with a reference: the same operation, computed by NumPy or, under a transformation, by JAX.  If the
# backend calls an op, all other kernels of the op raise, so a cell cannot pass by running another backend's kernel.  At
# the end of a run, conftest.py prints how many cells passed.
#
#     TRANSFORMATIONS   `vmap` and others: functions that call an operation.  They are written in two classes.
#     OPERATIONS        `add` and others: a class with a reference, and one kernel for all languages or one for each
#     Language          Numba, Cuda, Warp, Pallas, Jax: how kernels are written, decorated and wrapped
#     BACKENDS          `numba_parallel` and others: a language, with options for its kernels and wrappers
#
# The classes of transformations, operations and languages are namespaces: they have no instances, and their functions
# take no `self`.
#
# Fields named `unsupported_...` list what cannot run, with the text of the error (see test_unsupported_cell_raises).
# The fields `left_out`, `transformations` and `dtypes` select the cells of an operation and of a backend, so that few
# cells test the same code (see `has_cell`).
#
# To add an elementwise operation, write a subclass of `Operation`.  It has cells on all backends, under the
# transformations that each backend lists:
#
#     class Scale(Operation):
#         name = "scale"
#         shapes = ((9,),)  # of the inputs
#
#         def reference(x):
#             return 2 * x
#
#         def element(i, x, out):  # writes out[i], in every language
#             out[i] = Scalar(2.0) * x[i]
#
# Run its cells with `pytest -n 0 -k "test_matrix and scale" --require=numba,warp,pallas`.  Cells that need a GPU are
# skipped without one.  Derivatives come from the reference; `differentiate` can define other rules.
#
# To add a backend of an existing language, add a row to BACKENDS, for example
#
#     "numba_fastmath": Backend(Numba, needs="numba", decorator_options={"fastmath": True}),
#
# Run its cells with `pytest -n 0 -k "test_matrix and numba_fastmath"`.  Without a GPU, cells of a `Cuda` backend run in
# Numba's simulator: `NUMBA_ENABLE_CUDASIM=1 JAX_PLATFORMS=cpu pytest ...`.  test_cuda_tests_pass_in_simulator runs only
# the cells that `runs_in_simulator` selects.  For a new backend, this is `blend` under `vmap`.
#
# To add a transformation, write a function in `Forward` or `Derivatives`.  For a new language, write a subclass of
# `Language`.


class Dtype(typing.NamedTuple):
    tolerance: float = 0.0  # relative
    needs_x64: bool = False  # JAX has it only with jax_enable_x64


DTYPES = {
    "float32": Dtype(1e-5),
    "bool": Dtype(),
    **dict.fromkeys(["int8", "int16", "int32", "uint8", "uint16", "uint32"], Dtype()),
    **dict.fromkeys(["int64", "uint64"], Dtype(needs_x64=True)),
    "float16": Dtype(1e-2),
    "bfloat16": Dtype(5e-2),
    "complex64": Dtype(1e-5),
    **dict.fromkeys(["float64", "complex128"], Dtype(1e-12, needs_x64=True)),
}


def all_but(names, *excluded):
    assert {*excluded} <= {*names}
    return tuple(name for name in names if name not in excluded)


# -- helpers of the transformations ---------------------------------------------------------------------


def vmap_first(call, inputs):
    """Map the first axis of the first input; the other inputs are unbatched."""
    return jax.vmap(call, (0, *[None] * (len(inputs) - 1)))


def vmap_pairs(call, inputs):
    """Map the first input in an inner vmap, and the others in an outer vmap, so that each pair of slices occurs."""
    return jax.vmap(vmap_first(call, inputs), (None, *[0] * (len(inputs) - 1)), axis_size=2)


def scan_slices(call, batch, *others):
    return jax.lax.scan(lambda _, x: (None, call(x, *others)), None, batch)[1]


def default_platform():
    return (jax.config.jax_default_device or jax.devices()[0]).platform


P = jax.sharding.PartitionSpec
PARTITIONED, REPLICATED = P("d"), P()
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


def four_device_mesh(*shape, axis_type=AUTO):
    """Return a mesh of this shape, with the axes "d" and "e"."""
    devices = np.array(jax.devices(default_platform())[:4]).reshape(shape)
    return jax.sharding.Mesh(devices, ("d", "e")[: len(shape)], axis_types=(axis_type,) * len(shape))


def shard_first(call, inputs, out_specs=PARTITIONED):
    """Call on four devices, with the first input partitioned and the others replicated."""
    in_specs = (PARTITIONED, *[REPLICATED] * (len(inputs) - 1))
    return jax.shard_map(call, mesh=four_device_mesh(4), in_specs=in_specs, out_specs=out_specs)


def is_real(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def zero_tangent(x):
    return np.zeros(x.shape, x.dtype if is_real(x) else jax.dtypes.float0)


def gradient(call, inputs):
    """Return the function that computes the gradients of sum(sin(results)) by all real inputs."""

    def sum_of_sines(*inputs):
        return sum(jnp.sin(result).sum() for result in call(*inputs) if is_real(result))

    gradients = jax.grad(sum_of_sines, [i for i, x in enumerate(inputs) if is_real(x)])
    return lambda *inputs: list(gradients(*inputs))


def export_call(call, *inputs):
    """Export a call for the default platform, and return the bytes."""
    jax.eval_shape(call, *inputs)  # registers the targets, which `export_checks` names
    checks = [*xk.export_checks(), export.DisabledSafetyCheck.platform()]
    platform = {"cpu": "cpu", "gpu": "cuda"}[default_platform()]
    return export.export(jax.jit(call), platforms=[platform], disabled_checks=checks)(*inputs).serialize()


def load_exported(serialized):
    return export.deserialize(bytearray(serialized)).call


@functools.cache
def another_process():
    """Return a pool of one process, which hashes strings with another seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()  # the process starts with its first task
    return pool


def run_exported_elsewhere(call, *inputs, traced=None):
    """Export a picklable call, and run the program in another process, which registers the targets by a trace.

    By default, that process traces the same call.
    """
    exported = export_call(call, *inputs)
    needs = ["gpu"] * (default_platform() == "gpu")
    run = partial(load_and_run, needs, jax.config.jax_enable_x64, exported, traced or call)
    return another_process().submit(run, inputs).result()


def load_and_run(needs, is_x64, exported, traced, inputs):
    """Trace a call, and run an exported program."""
    with conftest.computing_for(needs), x64(is_x64):
        jax.jit(traced).lower(*inputs)
        return jax.tree.map(np.asarray, load_exported(exported)(*inputs))


# -- the transformations -------------------------------------------------------------------------------
# Each is a function of `call`, `inputs` and `batch`, and returns arrays.  `call` is the operation on a backend: a
# function that returns a list of arrays.  `batch` has eight slices of each input.


class Forward:
    """The transformations that compute no derivatives."""

    def eager(call, inputs, batch):
        return call(*inputs)

    def jit(call, inputs, batch):
        return jax.jit(call)(*inputs)

    def vmap(call, inputs, batch):
        return vmap_first(call, inputs)(batch[0], *inputs[1:])

    def vmap_last_axis(call, inputs, batch):
        last = [jnp.moveaxis(x, 0, -1) for x in batch]
        results = jax.vmap(call, in_axes=-1, out_axes=-1)(*last)
        return [jnp.moveaxis(result, -1, 0) for result in results]

    def vmap_nested(call, inputs, batch):
        return jax.jit(vmap_pairs(call, inputs))(batch[0], *[x[:2] for x in batch[1:]])

    def vmap_empty(call, inputs, batch):
        """Map a batch without slices.  Concatenate a batch of two, because an empty result has no values to check."""
        vmapped = vmap_first(call, inputs)
        parts = [vmapped(slices, *inputs[1:]) for slices in (batch[0][:0], batch[0][:2])]
        return [jnp.concatenate(results) for results in zip(*parts)]

    def scan(call, inputs, batch):
        return jax.jit(partial(scan_slices, call))(batch[0][:4], *inputs[1:])

    def while_loop(call, inputs, batch):
        def step(i_and_results):
            i, _ = i_and_results
            return i + 1, call(jnp.asarray(batch[0])[i], *inputs[1:])

        _, results = jax.lax.while_loop(lambda i_and_results: i_and_results[0] < 4, step, (1, call(*inputs)))
        return results

    def cond(call, inputs, batch):
        @jax.jit
        def choose(second):
            return jax.lax.cond(second, lambda: call(batch[0][1], *inputs[1:]), lambda: call(*inputs))

        return choose(True), choose(False)

    def pmap(call, inputs, batch):
        devices = list(four_device_mesh(4).devices)
        in_axes = (0, *[None] * (len(inputs) - 1))
        return jax.pmap(call, in_axes=in_axes, devices=devices)(batch[0][:4], *inputs[1:])

    def shard_map(call, inputs, batch):
        sharded = shard_first(vmap_first(call, inputs), inputs)
        return jax.jit(sharded)(batch[0], *inputs[1:])

    def jit_over_mesh(call, inputs, batch):
        first = jax.device_put(batch[0], jax.sharding.NamedSharding(four_device_mesh(4), PARTITIONED))
        return jax.jit(vmap_first(call, inputs))(first, *inputs[1:])

    def export(call, inputs, batch):
        return run_exported_elsewhere(call, *inputs)


class Derivatives:
    """The transformations that differentiate."""

    def jvp(call, inputs, batch):
        tangents = tuple(x[1] if is_real(x) else zero_tangent(x[1]) for x in batch)
        results, tangents_out = jax.jvp(call, inputs, tangents)
        return results, list(filter(is_real, tangents_out))

    def grad(call, inputs, batch):
        return gradient(call, inputs)(*inputs)

    def grad_of_vmap(call, inputs, batch):
        """Differentiate a batch: the gradient of an unbatched input is the sum over the slices."""
        return jax.jit(gradient(vmap_first(call, inputs), inputs))(batch[0], *inputs[1:])

    def grad_of_nested_vmap(call, inputs, batch):
        return jax.jit(gradient(vmap_pairs(call, inputs), inputs))(batch[0], *[x[:2] for x in batch[1:]])

    def vmap_of_grad(call, inputs, batch):
        return jax.jit(vmap_first(gradient(call, inputs), inputs))(batch[0], *inputs[1:])

    def grad_of_scan(call, inputs, batch):
        return jax.jit(gradient(partial(scan_slices, call), inputs))(batch[0][:4], *inputs[1:])

    def grad_of_shard_map(call, inputs, batch):
        """Differentiate a sharded batch: the gradient of a replicated input is the sum over the devices."""
        sharded = shard_first(vmap_first(call, inputs), inputs)
        return jax.jit(gradient(sharded, inputs))(batch[0], *inputs[1:])

    def shard_map_of_grad(call, inputs, batch):
        """Differentiate on each device: shard_map sums the cotangent of a replicated input over the devices."""
        gradients = gradient(vmap_first(call, inputs), inputs)
        out_specs = [PARTITIONED, *[REPLICATED for x in inputs[1:] if is_real(x)]]
        return jax.jit(shard_first(gradients, inputs, out_specs))(batch[0], *inputs[1:])

    def jvp_of_grad(call, inputs, batch):
        """Compute a Hessian-vector product, forward over reverse."""
        return Derivatives.jvp(jax.jit(gradient(call, inputs)), inputs, batch)


def functions_of(namespace):
    return {name: function for name, function in vars(namespace).items() if inspect.isfunction(function)}


TRANSFORMATIONS = {**functions_of(Forward), **functions_of(Derivatives)}
FORWARD, DERIVATIVES = tuple(functions_of(Forward)), tuple(functions_of(Derivatives))
VMAPS = ("vmap", "vmap_last_axis", "vmap_nested", "vmap_empty")
ON_FOUR_DEVICES = ("pmap", "shard_map", "jit_over_mesh", "grad_of_shard_map", "shard_map_of_grad")
SAME_RESULTS_AS = {  # the reference runs under this simpler transformation instead
    "jit": "eager",
    "export": "eager",
    "shard_map": "vmap",
    "jit_over_mesh": "vmap",
    "grad_of_shard_map": "grad_of_vmap",
    "shard_map_of_grad": "grad_of_vmap",
}


# -- the operations ------------------------------------------------------------------------------------
# Names that an `element` uses beside its arguments.  They have values in the kernels that are made from it.
Scalar = None  # converts a number to the dtype of the outputs
rate = None  # a static parameter of the call


def random_array(rng, shape, dtype):
    """Draw normally distributed numbers, or small integers."""
    if dtype.kind in "biu":
        return rng.integers(0, 2 if dtype.kind == "b" else 5, shape).astype(dtype)
    numbers = rng.standard_normal(shape)
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.standard_normal(shape)
    return numbers.astype(dtype)


OPERATIONS = {}  # by name


class Operation:
    """The base class of operations.  A subclass has a name, a reference, and an `element` or whole kernels.

    `reference(*inputs, **params)` computes the outputs from NumPy arrays and from JAX arrays: it uses operators,
    methods that both have, or `jax.numpy`.

    `element(i, ..., inputs..., outputs..., scratch...)` is the body of a kernel that stores one element of the outputs.
    It has one index for each axis of the first output, which is named `out`.  It is compiled in every language, so it
    uses only arithmetic, comparisons, `if` and `Scalar`.  If a language needs a kernel of its own, the class has a
    method `numba_kernel`, `cuda_kernel` or `warp_kernel`, which is the whole kernel.
    """

    name = ""
    dtypes = ("float32",)  # of the outputs (see `has_cell`)
    shapes = ()  # of the inputs
    params = {}  # static parameters of the call
    options = {}  # of the wrappers
    launch_dims = None  # if a launch does not have one thread for each element of the first output
    unsupported_backends = {}  # backend: the text of the error under each transformation, which is tested under `grad`
    left_out = {}  # backend: why the operation has no kernel for it
    transformations = tuple(TRANSFORMATIONS)  # that have cells; `hadamard` has cells of all

    def __init_subclass__(cls):
        assert cls.name.isidentifier() and cls.name not in OPERATIONS, f"{cls.__name__} needs a name of its own"
        OPERATIONS[cls.name] = cls

    @classmethod
    def inputs(cls, rng, dtype):
        return [random_array(rng, shape, dtype) for shape in cls.shapes]

    @classmethod
    def differentiate(cls, op):
        """Give an op a JVP rule: the results are the kernel's, and their tangents those of the reference."""
        reference = partial(cls.reference, **cls.params)

        @op.def_jvp_rule
        def jvp(primals, tangents, **params):
            tangents = tuple(zero_tangent(x) if isinstance(t, ad.Zero) else t for x, t in zip(primals, tangents))
            _, tangents_out = jax.jvp(reference, tuple(primals), tangents)
            return op(*primals, **params), jax.tree.leaves(tangents_out)


class Add(Operation):
    """Arithmetic in every dtype."""

    name = "add"
    dtypes = all_but(DTYPES, "bool")
    shapes = ((9,), (9,))
    transformations = ("eager", "vmap")
    reference = operator.add

    def element(i, x, y, out):
        out[i] = x[i] + y[i]


class Hadamard(Operation):
    """Twice the Hadamard product: two axes and a constant.  The rules for derivatives call the op."""

    name = "hadamard"
    dtypes = ("float32", "float64")
    shapes = ((3, 5), (3, 5))
    reference = lambda x, y: 2 * x * y

    def element(i, j, x, y, out):
        out[i, j] = Scalar(2.0) * x[i, j] * y[i, j]

    @classmethod
    def differentiate(cls, op):
        """Give an op rules that call it on the backend of the call."""

        def tangent_of_x(tangent, x, y, **params):
            return op(tangent, y, **params)

        def tangent_of_y(tangent, x, y, **params):
            return op(x, tangent, **params)

        op.def_jvp_rule2(tangent_of_x, tangent_of_y)

        @op.def_transpose_rule
        def transpose(cotangents, x, y, **params):
            (cotangent,) = cotangents
            if ad.is_undefined_primal(x):
                return *op(cotangent, y, **params), None
            return None, *op(x, cotangent, **params)


class Transposed(Operation):
    """Three axes, and an output whose shape is not that of an input."""

    name = "transposed"
    dtypes = ("float32", "bool")
    shapes = ((2, 3, 4),)
    transformations = ("eager", "vmap")
    reference = lambda x: x.T

    def element(i, j, k, x, out):
        out[i, j, k] = x[k, j, i]


class CsrEvent(Operation):
    """The sum of the rows of a sparse matrix that spike, and their number: integers, bool, atomics, two outputs."""

    name = "csr_event"
    rows, columns = 12, 9
    launch_dims = (rows,)
    left_out = {
        "numba_parallel": "rows share columns, so the loop over rows is not parallel",
        "pallas": "adds to elements that other programs add to",
    }  # fmt: skip
    transformations = all_but(
        TRANSFORMATIONS, "jit", "vmap_last_axis", "cond", "pmap", "jit_over_mesh", "export", "grad_of_nested_vmap",
        "grad_of_scan", "jvp_of_grad",
    )  # fmt: skip

    @classmethod
    def inputs(cls, rng, dtype):
        counts = rng.integers(0, 5, cls.rows)
        indptr = np.append(0, counts.cumsum()).astype(np.int32)
        row_indices = [rng.choice(cls.columns, count, replace=False) for count in counts]
        indices = np.concatenate(row_indices).astype(np.int32)
        return [random_array(rng, indices.size, dtype), indices, indptr, rng.random(cls.rows) < 0.5]

    def reference(data, indices, indptr, spikes):
        elements, columns = np.arange(indices.size), np.arange(CsrEvent.columns)
        in_row = (indptr[:-1, None] <= elements) & (elements < indptr[1:, None])
        in_column = indices[:, None] == columns
        return (spikes @ in_row * data) @ in_column.astype(data.dtype), spikes.sum(keepdims=True).astype(np.int32)

    def numba_kernel(data, indices, indptr, spikes, out, count):
        for i in range(spikes.size):
            if spikes[i]:
                count[0] += 1
                for k in range(indptr[i], indptr[i + 1]):
                    out[indices[k]] += data[k]

    def cuda_kernel(data, indices, indptr, spikes, out, count):
        i = cuda.grid(1)
        if i < spikes.size and spikes[i]:
            cuda.atomic.add(count, 0, 1)
            for k in range(indptr[i], indptr[i + 1]):
                cuda.atomic.add(out, indices[k], data[k])

    def warp_kernel(data, indices, indptr, spikes, out, count):
        i = wp.tid()
        if spikes[i]:
            wp.atomic_add(count, 0, 1)
            for k in range(indptr[i], indptr[i + 1]):
                wp.atomic_add(out, indices[k], data[k])


class Blend(Operation):
    """An output aliased to an input (which most batches do not map), a scratch buffer, and a static parameter."""

    name = "blend"
    shapes = ((9,), (9,))
    params = {"rate": 0.1}
    options = {"input_output_aliases": {1: 0}, "scratch": lambda v, current: v}
    unsupported_backends = {"warp_differentiable": "must not overwrite an input or use scratch, because its adjoint"}
    left_out = {"pallas": "reads an output that is aliased to an input, and has a scratch buffer"}
    transformations = (*FORWARD, "jvp", "grad")

    def reference(v, current, rate):
        return v + (current - v) * v.dtype.type(rate)

    def element(i, v, current, out, work):
        work[i] = (out[i] - v[i]) * Scalar(rate)
        out[i] = v[i] + work[i]


def inputs_and_batch(operation, dtype):
    """Return the inputs of an operation, and eight slices of each, whose elements are rotated.

    A rotated `indptr` of csr_event decreases once.  This row is empty, for the kernels and for the reference.
    """
    inputs = operation.inputs(np.random.default_rng(0), np.dtype(dtype))
    batch = [np.stack([np.roll(x, k) for k in range(8)]) for x in inputs]
    return tuple(inputs), tuple(batch)


def reference_of(operation):
    """Return the reference as a function of the inputs that returns a list, like a call of the operation."""
    return lambda *inputs: jax.tree.leaves(operation.reference(*inputs, **operation.params))


@functools.cache
def expected_results(operation, transformation, dtype):
    """Return the results of the reference: NumPy's or, under a transformation, JAX's."""
    program = TRANSFORMATIONS[SAME_RESULTS_AS.get(transformation, transformation)]
    return program(reference_of(operation), *inputs_and_batch(operation, dtype))


@functools.cache
def specs_of(operation, dtype):
    """Return the specs of the inputs, the outputs and the scratch buffers of an operation."""
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operation.inputs(np.random.default_rng(0), dtype)]
    outs = jax.eval_shape(reference_of(operation), *inputs)
    scratch = [operation.options["scratch"](*inputs)] if "scratch" in operation.options else []
    return inputs, outs, scratch


# -- the languages -------------------------------------------------------------------------------------


def kernel_source(element, language, n_indices):
    """Return the source of a kernel: the statements of an element below the opening lines of the language.

    In Numba, the kernel of the operation `Scale` above is:

        def kernel(x, out):
            for i in numba.prange(out.shape[0]):
                out[i] = Scalar(2.0) * x[i]
    """
    parameters = list(inspect.signature(element).parameters)
    indices, buffers = parameters[:n_indices], parameters[n_indices:]
    lines, indent = [], ""
    for line in [f"def kernel({', '.join(buffers)}):", *language.opening(indices)]:
        lines.append(indent + line + "\n")
        if line.endswith(":"):
            indent += "    "
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(element))).body
    return "".join(lines) + textwrap.indent("\n".join(map(ast.unparse, definition.body)), indent)


@functools.cache
def kernel_function(operation, language, dtype):
    """Return the undecorated kernel of an operation: its own for the language, or one made from its `element`."""
    method = f"{language.__name__.lower()}_kernel"
    namespace = {**globals(), **operation.params, "Scalar": language.scalar(dtype)}
    if hasattr(operation, method):
        return types.FunctionType(getattr(operation, method).__code__, namespace)
    assert hasattr(operation, "element"), f"{operation} needs `element`, `{method}`, or a reason in `left_out`."
    _, (out, *_), _ = specs_of(operation, dtype)
    source = kernel_source(operation.element, language, out.ndim)
    file = f"<{method} of {operation.name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Warp reads the source there
    exec(compile(source, file, "exec"), namespace)
    return namespace["kernel"]


class Language:
    """A language of kernels.  Those that write source text have three functions; the others override `kernel`:

    `opening(indices)` yields the lines that give the indices of an element their values; a line that ends in ":" opens
    a block.  `decorate(function, buffers, **options)` decorates a kernel for buffers of these specs.
    `wrap(operation, kernel, outs, name, **options)` returns a function of the inputs that calls the kernel.
    """

    unsupported_dtypes = {}  # dtype: the text of the error

    def scalar(dtype):
        """Return the value of the name `Scalar` in kernels."""
        return dtype.type

    @classmethod
    def kernel(cls, operation, dtype, **options):
        """Return the decorated kernel of an operation."""
        inputs, outs, scratch = specs_of(operation, dtype)
        return cls.decorate(kernel_function(operation, cls, dtype), (*inputs, *outs, *scratch), **options)


class Numba(Language):
    unsupported_dtypes = dict.fromkeys(["float16", "bfloat16"], "of a dtype for which Numba has no CPU arithmetic")

    def opening(indices):
        for axis, index in enumerate(indices):
            loop = "range" if axis else "numba.prange"
            yield f"for {index} in {loop}(out.shape[{axis}]):"

    @functools.cache
    def decorate(function, buffers, **options):
        return numba.njit(function, **options)

    def wrap(operation, kernel, outs, name, **options):
        return xk.numba_kernel(kernel, outs, name=name, **options, **operation.options)


class Cuda(Language):
    unsupported_dtypes = {"bfloat16": "of a dtype for which Numba CUDA has no arrays"}

    def opening(indices):
        yield f"{', '.join(indices)} = cuda.grid({len(indices)})"
        for axis, index in enumerate(indices):
            yield f"if {index} < out.shape[{axis}]:"

    @functools.cache
    def decorate(function, buffers, **options):
        return cuda.jit(function, **options)

    def grid_and_block(operation, outs):
        """Return small blocks, because Numba's simulator starts all threads."""
        dims = operation.launch_dims or outs[0].shape
        return tuple(size // 2 + 1 for size in dims), (2,) * len(dims)

    def wrap(operation, kernel, outs, name, **options):
        grid, block = Cuda.grid_and_block(operation, outs)
        return xk.numba_cuda_kernel(kernel, outs, grid=grid, block=block, name=name, **options, **operation.options)

    def wrap_callable(operation, kernel, outs, name):
        """Wrap a Python function that launches the kernel.  Callables have no names."""
        grid, block = Cuda.grid_and_block(operation, outs)

        def launch(*buffers_and_stream):
            *buffers, stream = buffers_and_stream
            kernel[grid, block, stream](*buffers)

        return xk.numba_cuda_callable(launch, outs, **operation.options)


class Warp(Language):
    unsupported_dtypes = dict.fromkeys(["complex64", "complex128"], "Warp has no scalar type for dtype")

    def opening(indices):
        yield f"{', '.join(indices)} = wp.tid()"

    def scalar(dtype):
        return xk.jaxtype_to_warptype(dtype)

    @functools.cache
    def decorate(function, buffers, **options):
        for parameter, spec in zip(inspect.signature(function).parameters, buffers, strict=True):
            function.__annotations__[parameter] = xk.jaxinfo_to_warpinfo(spec)
        return wp.kernel(function, module="unique", **options)

    def wrap(operation, kernel, outs, name, **options):
        launch_dims = operation.launch_dims or outs[0].shape
        return xk.warp_kernel(kernel, outs, launch_dims=launch_dims, name=name, **options, **operation.options)


class Pallas(Language):
    """Pallas interpreted, with one program for each element."""

    @classmethod
    def kernel(cls, operation, dtype):
        return types.FunctionType(operation.element.__code__, {**globals(), **operation.params, "Scalar": dtype.type})

    def wrap(operation, element, outs, name):
        from jax.experimental import pallas  # needs absl

        def kernel(*refs):
            element(*[pallas.program_id(axis) for axis in range(outs[0].ndim)], *refs)

        return pallas.pallas_call(kernel, outs, interpret=True, grid=outs[0].shape)


class Jax(Language):
    """JAX functions: the reference."""

    @classmethod
    def kernel(cls, operation, dtype):
        return reference_of(operation)

    def wrap(operation, reference, outs, name):
        return reference


# -- the backends --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)  # equal only to itself, so that it is hashable
class Backend:
    """A way to call kernels of a language."""

    language: type[Language]
    needs: str  # a row of CONDITIONS in conftest.py
    is_op: bool = True  # a kernel of an XLACustomKernel; otherwise a wrapper that is called directly
    decorator_options: dict = dataclasses.field(default_factory=dict)
    wrapper_options: dict = dataclasses.field(default_factory=dict)
    wrap: Callable | None = None  # instead of the language's
    unsupported_transformations: dict = dataclasses.field(default_factory=dict)  # transformation: the text of the error
    transformations: tuple = tuple(TRANSFORMATIONS)  # that have cells; another backend of the language has the others
    swept_dtypes: tuple = tuple(DTYPES)  # those in DTYPE_SWEEP that have cells (see `has_cell`)


NO_DERIVATIVES = dict.fromkeys(DERIVATIVES, "has no JVP rule")
ONLY_VJP = {"jvp": "can't apply forward-mode autodiff", "jvp_of_grad": "gives only first derivatives in reverse mode"}
WRAPPER = {"is_op": False, "unsupported_transformations": NO_DERIVATIVES, "swept_dtypes": ()}  # ops sweep them
JAX_CODE = {  # under the other transformations, the library only calls the function
    "transformations": ("eager", "vmap", "vmap_empty", "grad"),
    "swept_dtypes": tuple(Numba.unsupported_dtypes),  # on which the ops of Numba cannot run
}  # fmt: skip

BACKENDS = {  # `numba` and other short names are kernels of an op; `numba_kernel` and the like are wrappers
    "numba": Backend(Numba, needs="numba"),
    "numba_parallel": Backend(
        Numba, needs="numba", decorator_options={"parallel": True}, transformations=all_but(FORWARD, "export"),
        swept_dtypes=(),
    ),
    "numba_cuda": Backend(Cuda, needs="cuda"),  # on a GPU, or in Numba's simulator
    "numba_cuda_callable": Backend(
        Cuda, needs="cuda", wrap=Cuda.wrap_callable, transformations=FORWARD, swept_dtypes=(),
        unsupported_transformations={"export": "Cannot serialize code with custom calls"},  # a callable is Python code
    ),
    "warp": Backend(Warp, needs="warp"),  # on the CPU
    "warp_gpu": Backend(Warp, needs="warp_gpu"),
    "pallas": Backend(Pallas, needs="pallas", **JAX_CODE),
    "jax": Backend(Jax, needs="jax", **JAX_CODE),
    "numba_kernel": Backend(Numba, needs="numba", **WRAPPER),
    "numba_cuda_kernel": Backend(Cuda, needs="cuda", **WRAPPER),
    "numba_cuda_sequential": Backend(
        Cuda, needs="cuda", **WRAPPER, wrapper_options={"vmap_method": "sequential"}, transformations=VMAPS
    ),
    "warp_kernel": Backend(Warp, needs="warp", **WRAPPER),
    "warp_differentiable": Backend(
        Warp, needs="warp", is_op=False, unsupported_transformations=ONLY_VJP,
        wrapper_options={"differentiable": True}, swept_dtypes=("float64",),
    ),
}  # fmt: skip


def raise_not_called(outs, **params):
    raise AssertionError("This call does not run on its own backend.")


@functools.cache
def op_on_backend(operation, backend_name):
    """Return an op that has the kernel of this backend, and raises on all other backends and by default."""
    op = xk.XLACustomKernel(operation.name)
    for platform in ("cpu", "gpu"):
        for other in ("default", *BACKENDS):  # the first backend is the default of the op
            op.def_kernel(other, platform, raise_not_called)
    platform = conftest.platform_of([BACKENDS[backend_name].needs])
    op.def_kernel(backend_name, platform, partial(generate, operation, backend_name))
    operation.differentiate(op)
    return op


def generate(operation, backend_name, outs, **params):
    """Return the function of the inputs that a backend runs: a generator, as `XLACustomKernel.def_kernel` takes it.

    Each kernel has a name, by which an exported program finds it in another process.
    """
    assert params == operation.params
    backend = BACKENDS[backend_name]
    kernel = backend.language.kernel(operation, outs[0].dtype, **backend.decorator_options)
    wrap = backend.wrap or backend.language.wrap
    return wrap(operation, kernel, outs, name=f"{operation.name}_{backend_name}", **backend.wrapper_options)


def call_backend(operation, backend_name, dtype, *inputs):
    """Call an operation on a backend, and return a list of arrays."""
    _, outs, _ = specs_of(operation, dtype)
    if BACKENDS[backend_name].is_op:
        return op_on_backend(operation, backend_name)(*inputs, outs=outs, backend=backend_name, **operation.params)
    return generate(operation, backend_name, outs, **operation.params)(*inputs)


# -- the cells -----------------------------------------------------------------------------------------

DTYPE_SWEEP = {  # transformation: the dtypes that it runs with (see `has_cell`)
    "eager": tuple(DTYPES),
    "vmap": tuple(DTYPES),
    "jvp": ("float32", "float64"),
    "grad": ("float32", "float64"),
}


def expected_error(operation, backend_name, transformation, dtype):
    """Return the text of the error that a combination raises, or None if it can run."""
    backend = BACKENDS[backend_name]
    return (
        operation.unsupported_backends.get(backend_name)
        or backend.unsupported_transformations.get(transformation)
        or backend.language.unsupported_dtypes.get(dtype)
    )


def has_cell(operation, backend_name, transformation, dtype):
    """Return whether a combination can run, and tests something that the other cells do not.

    The first dtype of an operation has cells under all its transformations.  Its other dtypes have cells only under
    the transformations of DTYPE_SWEEP, on the backends that have them in `swept_dtypes`.
    """
    backend = BACKENDS[backend_name]
    if backend_name in operation.left_out or expected_error(operation, backend_name, transformation, dtype):
        return False
    if transformation not in operation.transformations or transformation not in backend.transformations:
        return False
    is_swept = dtype in backend.swept_dtypes and dtype in DTYPE_SWEEP.get(transformation, ())
    return is_swept or dtype == operation.dtypes[0]


def cell_parameter(operation, backend_name, transformation, dtype):
    """Return a cell as a parameter of the test, with the conditions that it needs."""
    needed = [BACKENDS[backend_name].needs, *["four devices"] * (transformation in ON_FOUR_DEVICES)]
    return pytest.param(operation.name, backend_name, transformation, dtype, marks=pytest.mark.needs(*needed))


CELLS = [  # those of one operation are neighbours, because they share compiled kernels
    cell_parameter(*cell)
    for operation in OPERATIONS.values()
    for cell in itertools.product([operation], BACKENDS, TRANSFORMATIONS, operation.dtypes)
    if has_cell(*cell)
]


UNSUPPORTED_CELLS = [  # for the fields `unsupported_...` of operations, backends and languages
    # One for each entry, but a language's are tested on each backend that sweeps dtypes, and only under `eager`.
    *[cell_parameter(operation, name, "grad", operation.dtypes[0])
      for operation in OPERATIONS.values() for name in operation.unsupported_backends],
    *[cell_parameter(Hadamard, name, transformation, "float32")
      for name, backend in BACKENDS.items()
      for transformation in backend.transformations if transformation in backend.unsupported_transformations],
    *[cell_parameter(Add, name, "eager", dtype)
      for name, backend in BACKENDS.items() if backend.swept_dtypes for dtype in backend.language.unsupported_dtypes],
]  # fmt: skip


def check_close(results, expected, tolerance=1e-5):
    """Compare the structure of the results, and each array with `check_array_close`."""
    assert jax.tree.leaves(results), "nothing to compare"
    jax.tree.map(partial(check_array_close, tolerance), results, expected)


def check_array_close(tolerance, result, expected):
    """Compare shape, dtype and values.  Numbers and lists stand for float32 arrays."""
    assert not isinstance(expected, tuple), "one array instead of several"
    if not hasattr(expected, "dtype"):
        expected = np.asarray(expected, np.float32)
    assert (np.shape(result), result.dtype) == (expected.shape, expected.dtype)
    largest = np.max(np.abs(expected), initial=0)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance * min(1, largest))


def check_cell(name, backend_name, transformation, dtype):
    """Compare values, shapes, dtypes and structure with the reference, and the inputs with their copies."""
    operation = OPERATIONS[name]
    before = inputs_and_batch(operation, dtype)
    call = partial(call_backend, operation, backend_name, np.dtype(dtype))
    with x64(DTYPES[dtype].needs_x64):
        inputs, batch = jax.tree.map(jnp.array, before)  # arrays of the device, which a kernel could change
        results = TRANSFORMATIONS[transformation](call, inputs, batch)
        check_close(results, expected_results(operation, transformation, dtype), DTYPES[dtype].tolerance)
    jax.tree.map(np.testing.assert_array_equal, (inputs, batch), before)


@pytest.mark.parametrize("name, backend_name, transformation, dtype", CELLS)
def test_matrix(name, backend_name, transformation, dtype):
    check_cell(name, backend_name, transformation, dtype)


@pytest.mark.parametrize("name, backend_name, transformation, dtype", UNSUPPORTED_CELLS)
def test_unsupported_cell_raises(name, backend_name, transformation, dtype):
    error = expected_error(OPERATIONS[name], backend_name, transformation, dtype)
    with pytest.raises((TypeError, ValueError), match=error):
        check_cell(name, backend_name, transformation, dtype)


def test_names_in_the_tables_of_the_matrix_exist():
    """A misspelled name would have no effect."""
    transformations = {*SAME_RESULTS_AS, *SAME_RESULTS_AS.values(), *VMAPS, *ON_FOUR_DEVICES, *DTYPE_SWEEP}
    dtypes = {*itertools.chain(*DTYPE_SWEEP.values(), *[cls.unsupported_dtypes for cls in Language.__subclasses__()])}
    for operation in OPERATIONS.values():
        transformations |= {*operation.transformations}
        dtypes |= {*operation.dtypes}
        assert {*operation.unsupported_backends, *operation.left_out} <= BACKENDS.keys()
    for backend in BACKENDS.values():
        transformations |= {*backend.transformations, *backend.unsupported_transformations}
        dtypes |= {*backend.swept_dtypes}
    assert transformations <= TRANSFORMATIONS.keys() and dtypes <= DTYPES.keys()


COMPILED_LANGUAGES = [language for language in Language.__subclasses__() if language not in (Pallas, Jax)]


@pytest.mark.parametrize("language", COMPILED_LANGUAGES, ids=lambda language: language.__name__)
def test_language_has_cells_of_all_transformations_and_dtypes(language):
    cells = [cell.values for cell in CELLS if BACKENDS[cell.values[1]].language is language]
    assert {transformation for _, _, transformation, _ in cells} == TRANSFORMATIONS.keys()
    assert {dtype for _, _, _, dtype in cells} == {*all_but(DTYPES, *language.unsupported_dtypes)}


# ======================================================================================================
# Helpers for the tests of all sections
#
# A typical test makes a kernel, wraps it, calls the wrapper and checks the result:
#
#     call = wrap(kernel_from_body("out[0] = 2 * x[0]"))  # `numba_kernel`, with one output like the first input
#     check_close(call(ONES), [2, 0, 0, 0])
#
# Most kernels are strings, in tables.  The library analyzes the compiled code of a Numba kernel, not its source, so a
# kernel from a string is checked like any other.  These functions create kernels:
#
#     kernel_from_body       a function with this body, and by default the parameters `x, out`
#     kernel_storing         a function that stores an expression to out[0]
#     njit_from_body         the same as kernel_from_body, with @njit
#     new_cuda_kernel        the same with @cuda.jit, and compiled again for each test
#     callable_from_body     a function of `x, out, stream` for `numba_cuda_callable`
#     warp_kernel_from_body  a kernel with @wp.kernel; `warp_kernels_from` creates many, by default in separate modules
#
# These wrap one: `wrap` (Numba), `wrap_cuda` and `new_cuda_wrapper` (a new kernel), and `warp_product`.

needs_four_devices = pytest.mark.needs("four devices")
needs_cuda = pytest.mark.needs("cuda")  # a GPU, or Numba's simulator
needs_warp, needs_warp_gpu = pytest.mark.needs("warp"), pytest.mark.needs("warp_gpu")
needs_fake_warp_gpu = pytest.mark.needs("warp", "no gpu")  # the fake replaces JAX's list of GPUs


# -- specs, and kernels of Numba on CPUs -----------------------------------------------------------------


def spec(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def like_first(x, *others):
    """Return the spec of the first input.  As `outs`, this declares one output like it."""
    return x


def like_last(*inputs):
    return inputs[-1]


def uniform(*shape, seed=0):
    """Return random float32 numbers from -2 to 2."""
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(np.float32)


ONES, SPEC_4 = np.ones(4, np.float32), spec(4)  # an input and its spec
ONE_TO_8 = np.arange(1.0, 9.0, dtype=np.float32)
WEIGHTS = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
ROWS = np.stack([ONE_TO_8, ONE_TO_8 + 1, 2 * ONE_TO_8])
IN_ORDER = {"vmap_method": "sequential"}


def identity(x):
    return x


def function_from(source, *, name="kernel", **values):
    """Execute source with the names of this file and `values` as globals, and return the function of this name.

    Its source is not available to `inspect`.
    """
    namespace = {**globals(), **values}
    exec(source, namespace)
    return namespace[name]


def kernel_from_body(code, parameters="x, out", **values):
    """Return a function with this body, and with `values` as globals."""
    return function_from(f"def kernel({parameters}):\n{textwrap.indent(code, '    ')}", **values)


def kernel_storing(expression, **values):
    """Return a kernel that stores this expression to out[0]."""
    return kernel_from_body(f"out[0] = {expression}", **values)


KERNEL_NUMBERS = itertools.count(1)


def new_name(text):
    """Return a new name for a target, because a registered name is permanent.  A test may run twice in a process."""
    return f"{text}_{next(KERNEL_NUMBERS)}"


@xk.numba_kernel(outs=like_first)
def copy_elements(x, out):
    for i in np.ndindex(x.shape):
        out[i] = x[i]


@xk.numba_kernel(outs=like_first)
def add_one(x, out):
    for i in range(x.size):
        out[i] = x[i] + 1


def wrap(kernel=add_one.__wrapped__, outs=like_first, **options):
    """Wrap a Numba kernel.  By default it has one output like its first input."""
    return xk.numba_kernel(kernel, outs, **options)


# -- ops ---------------------------------------------------------------------------------------------


def op_with_generator(generator):
    """Return an op with one kernel for the CPU, which `generator` creates."""
    op = xk.XLACustomKernel("op")
    op.def_kernel("jax", "cpu", generator)
    return op


def op_with_kernel(function):
    """Return an op whose kernel is `function`.  The static parameters of a call are its keyword arguments."""
    return op_with_generator(lambda outs, **parameters: partial(function, **parameters))


def generator_adding(value):
    """Return a generator of a kernel that adds `value`."""
    return lambda: partial(operator.add, value)


def op_adding(**values):
    """Return an op with a backend for each keyword.  Its kernel adds the value."""
    op = xk.XLACustomKernel("op")
    for backend, value in values.items():
        op.def_kernel(backend, "cpu", generator_adding(value))
    return op


def as_function(op):
    """Return an op as a function of its inputs.  Its output has the spec of the first."""
    return partial(op, outs=like_first)


def sum_of(f):
    """Return a scalar function, for gradients."""
    return lambda *operands: f(*operands).sum()


def on_mesh(x, *axes, mesh):
    """Return an array whose dimensions are partitioned over these axes of a mesh."""
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*axes)))


@pytest.mark.parametrize(
    "results",
    [ONES.astype(np.int32), ONES[:3], 1.1 * ONES, [ONES], []],
    ids=["dtype", "shape", "value", "list", "empty"],
)
def test_check_close_rejects_other_results(results):
    check_close(ONES, [1, 1, 1, 1])
    with pytest.raises((AssertionError, ValueError)):
        check_close(results, [1, 1, 1, 1])


# -- messages, targets, threads and processes -----------------------------------------------------------


def pattern_of(text):
    """Return the regular expression for a message.  The text is literal, except that `.*` stands for anything."""
    return "(?s)" + ".*".join(map(re.escape, text.split(".*")))


RUNTIME_ERRORS = (ValueError, JaxRuntimeError)  # jaxlib's fast path raises the first


def error_of(call, *args):
    """Return the message of the error that a call raises at run time."""
    with pytest.raises(RUNTIME_ERRORS) as caught:
        jax.block_until_ready(call(*args))
    return str(caught.value)


def target_of(function, *specs):
    """Return the name of the first custom-call target in the lowered function."""
    return targets_in(jax.jit(function).lower(*specs).as_text())[0]


def in_threads(work, args):
    """Run `work(arg)` in one thread per argument, all at once, and return the results or raise the first exception."""
    barrier = threading.Barrier(len(args))

    def work_with_others(arg):
        barrier.wait()
        return work(arg)

    with ThreadPoolExecutor(len(args)) as pool:
        return list(pool.map(work_with_others, args))


def record_calls(monkeypatch, owner, name):
    """Return a list to which each call of this function appends its arguments."""
    calls, function = [], getattr(owner, name)

    def record(*args):
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(owner, name, record)
    return calls


ROOT = pathlib.Path(__file__).parent


def run_python(*args, cwd=ROOT, timeout=900, **environment):
    """Run Python in a new process, check its exit code, and return its output."""
    search_path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, search_path)), "PYTHONUTF8": "1"}
    environment = {**os.environ, **paths, **environment}
    command = [sys.executable, *map(str, args)]
    pipes = {"capture_output": True, "encoding": "utf-8", "timeout": timeout}
    process = subprocess.run(command, cwd=cwd, env=environment, **pipes)
    output = f"exit code {process.returncode}\n{process.stdout[-4000:]}\n{process.stderr[-20_000:]}"
    assert process.returncode == 0, output
    return process.stdout


def run_in_new_process(*functions, **environment):
    """Run functions of this file as tests, one after another, in a new process.

    pytest shows the values in a failed assertion.  It has no fixtures and hooks of conftest.py, which create JAX's
    backends and record the calls of the GPU's driver.
    """
    names = [function.__name__ for function in functions]
    options = ["-qs", "-n", "0", "-p", "no:cacheprovider", "--noconftest", "-o", f"python_functions={' '.join(names)}"]
    environment = {"JAX_PLATFORMS": "cpu", "PYTEST_ADDOPTS": "", **environment}
    run_python("-m", "pytest", *options, *[f"{__file__}::{name}" for name in names], timeout=300, **environment)


# ======================================================================================================
# Numba kernels on CPUs, and the parts that all wrappers share: captured values, inputs, the primitive, the handler

# -- captured values: which kernels share compiled code -------------------------------------------------


def jitted_helper(expression, **values):
    """Return a jitted function of `a` with these globals."""
    return numba.njit(function_from(f"def helper(a):\n    return {expression}", name="helper", **values))


def result_of(kernel, x=ONES):
    return float(wrap(kernel)(x).ravel()[0])


def test_defaults_of_wrapped_kernel_distinguish_kernels():
    """Numba reads the signature of a kernel, with its defaults, from the function in `__wrapped__`."""
    plain, wrapping = [kernel_from_body("out[0] = n * x[0] + 0.125", "x, out, n=3") for _ in range(2)]
    wrapping.__wrapped__ = kernel_from_body("out[0] = n * x[0] + 0.125", "x, out, n=4")
    assert result_of(plain) == 3.125
    assert result_of(wrapping) == 4.125


def test_fields_of_captured_named_tuples_distinguish_kernels():
    """The classes have the same name, and the tuples are equal."""
    for fields, expected in ("first second", 2), ("second first", 3):
        pair = collections.namedtuple("Pair", fields)(2, 3)
        assert result_of(kernel_storing("pair.first", pair=pair)) == expected


def test_boundscheck_of_numba_config_recompiles_kernel(monkeypatch):
    kernel = kernel_storing("x[x.size] + 0.375")
    jax.eval_shape(wrap(kernel), ONES)
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    assert "IndexError" in error_of(wrap(kernel), ONES)


@pytest.mark.parametrize("signature, total", [  # the totals differ, so that no case finds code of the other
    ([], 200), (["void(f4[::1], f4[::1])"], 201)
], ids=["without signature", "explicit signature"])  # fmt: skip
def test_numba_options_distinguish_kernels_of_equal_code(signature, total):
    """The library recreates a kernel with an explicit signature, because it compiles for no other types."""
    overflows = kernel_from_body(f"total = {total}; out[0] = total")
    for kind, expected in ((numba.int8, total - 256), (numba.int64, total)):
        assert result_of(numba.njit(*signature, locals={"total": kind})(overflows)) == expected
    divides = kernel_storing(f"{total} / (x[0] - 1)")
    assert result_of(numba.njit(*signature, error_model="numpy")(divides)) == math.inf
    assert "ZeroDivisionError" in error_of(wrap(numba.njit(*signature)(divides)), ONES)


def test_kernel_with_compiler_pipeline_does_not_share_code_of_equal_kernel():
    class Rejects(numba.core.compiler.Compiler):
        def define_pipelines(self):
            raise numba.TypingError("by the pipeline")

    kernel = kernel_storing("x[0] + 0.625")
    assert result_of(numba.njit(kernel)) == 1.625
    with pytest.raises(TypeError, match="by the pipeline"):
        wrap(numba.njit(pipeline_class=Rejects)(kernel))(ONES)


def test_globals_are_read_once_per_compiled_signature():
    """A direct call of a decorated kernel compiles it, too."""
    jitted = numba.njit(kernel_storing("number", number=1))
    jitted(np.frombuffer(ONES.tobytes(), np.float32), ONES.copy())  # read-only like an input
    jitted.py_func.__globals__["number"] = 2
    for _ in range(2):
        assert result_of(jitted) == 1
        jax.clear_caches()
    assert result_of(jitted, ONES.astype(np.int32)) == 2  # another signature
    assert result_of(jitted.py_func) == result_of(numba.njit(jitted.py_func)) == 2


def test_assignment_to_variable_of_captured_module_recompiles_kernel():
    """`importlib.reload` assigns all variables of a module again."""
    config = types.ModuleType("config")
    kernel = kernel_from_body("out[0] = config.K * x[0]", config=config)
    for value in (2, 3):
        config.K = value
        assert result_of(kernel) == value


@pytest.mark.parametrize("jit", [identity, numba.njit], ids=["plain", "njit"])
def test_recompiles_only_when_captured_value_changes(jit):
    twice, table = numba.njit(lambda a: 2 * a), np.array([1.0, 2.5])

    def make(factors, kind, table):
        def kernel(x, out):
            for i in range(x.size):
                out[i] = twice(factors[0] * x[i]) + kind(table[1])

        return kernel

    for values, n_compilations, expected in [
        (((3,), numba.float32, table), 1, 8.5),
        (((4,), numba.float32, table), 1, 10.5),
        (((3,), numba.int8, table), 1, 8),
        (((3,), numba.float32, 2 * table), 1, 11),
        (((3,), numba.float32, table.copy()), 0, 8.5),
    ]:
        with install_recorder("numba:compile") as recorder:
            for n in (1, 2):
                np.testing.assert_array_equal(wrap(jit(make(*values)))(np.ones(n, np.float32)), [expected] * n)
        compiled = [event.data["dispatcher"].py_func.__name__ for _, event in recorder.buffer if event.is_start]
        assert compiled.count("kernel") == n_compilations


@pytest.mark.parametrize("options, slices", [
    ({}, "are divided among threads"), ({"vmap_method": "sequential"}, "run in order")
], ids=["default", "sequential"])  # fmt: skip
def test_compilation_is_logged(caplog, options, slices):
    caplog.set_level("DEBUG", logger=xk.__name__)
    wrap(kernel_storing(f"x[0] + {next(KERNEL_NUMBERS)}"), **options)(ONES)
    assert re.search(rf"compiled kernel for \(float32\[:\]\) .* ms; batch elements {slices}\n", caplog.text)


def test_repeated_compilation_warns_once(monkeypatch):
    monkeypatch.setattr(xk, "_MANY_COMPILATIONS", 3)
    kernels = [kernel_from_body("out[0] = twice(x[0])", twice=jitted_helper("2 * a")) for _ in range(4)]
    with pytest.warns(UserWarning, match="compiled 3 kernels .*Create the kernel and its helpers once") as caught:
        for kernel in kernels:
            jax.eval_shape(wrap(kernel), ONES)
    assert result_of(kernels[0]) == result_of(kernels[3]) == 2
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("size, step", [(4, 2), (200_000, 1)], ids=["strided", "large"])
def test_modified_captured_array_recompiles_kernel(size, step):
    """Numba does not copy large or strided arrays.  A kernel with an equal array must not see the change."""
    array, equal = np.ones(size)[::step], np.ones(size)[::step]
    assert result_of(kernel_storing("array[0]", array=array)) == 1
    array[:] = 2
    assert result_of(kernel_storing("array[0]", array=array)) == 2
    assert result_of(kernel_storing("array[0]", array=equal)) == 1


def test_recompiled_helper_recompiles_kernel():
    """Until it is recompiled, the helper keeps the number with which it was compiled."""
    helper = jitted_helper("a + number", number=1)
    add_number = lambda: result_of(kernel_storing("helper(x[0])", helper=helper))
    assert add_number() == 2
    helper.py_func.__globals__["number"] = 5
    assert add_number() == 2
    helper.recompile()
    assert add_number() == 6


def test_cycles_of_captured_values_are_traversed_once():
    """There are millions of paths through the modules.  `x.size` does not reference the global list `size`."""
    recursive = [1.0]
    recursive.append(recursive)
    modules = {f"module_{i}": types.ModuleType(f"module_{i}") for i in range(10)}
    for module in modules.values():
        vars(module).update(modules, CONSTANT=0.5)
    sum_of_constants = " + ".join(f"{name}.CONSTANT" for name in modules)
    assert result_of(kernel_storing(f"{sum_of_constants} + x.size", size=recursive, **modules)) == 5 + ONES.size


def test_native_lock_is_allocated_once_unless_allocation_fails(monkeypatch):
    name = new_name("lock")
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CFUNCTYPE", lambda *types: lambda PyThread_allocate_lock: lambda: None)
        with pytest.raises(MemoryError, match="lock for machine code"):
            xk._native_lock_address(name)
    address = xk._native_lock_address(name)
    assert address and xk._native_lock_address(name) == address


OP_OF_THIS_MODULE = xk.XLACustomKernel("another name than the variable")
_also_add_one = wrap(add_one.__wrapped__)


@pytest.mark.parametrize("kept", [_also_add_one, OP_OF_THIS_MODULE], ids=["numba_kernel", "XLACustomKernel"])
def test_copies_and_pickles_of_module_variable_are_identical(kept):
    assert pickle.loads(pickle.dumps([kept]))[0] is deepcopy(kept) is shallow_copy(kept) is kept


def test_wrapper_without_module_variable_is_pickled_by_value(monkeypatch):
    """Another process does not have the variables of `__main__`, so these wrappers are pickled by value, too."""
    divisor = 2

    @numba.njit(fastmath=True)
    def halve(x, out):
        out[0] = x[0] / divisor

    of_main = wrap(function_from("def kernel(x, out): out[0] = x[0] / 2", __name__="__main__"))
    monkeypatch.setattr(sys.modules["__main__"], "of_main", of_main, raising=False)
    monkeypatch.setattr("builtins._", of_main, raising=False)  # the last result at the prompt
    for kernel in (wrap(halve), of_main):
        assert another_process().submit(kernel, ONES).result()[0] == 0.5


# -- transformations of a wrapper -----------------------------------------------------------------------
# The matrix runs the others, and so do the tests of ops.


def runs_in_python():
    return True


@numba.extending.overload(runs_in_python)
def _compile_runs_in_python():
    return lambda: False


def test_lowered_program_calls_no_python():
    """The only custom call is the target of the kernel, as opposed to that of a callback.  It runs machine code."""
    kernel = wrap(kernel_from_body("for i in range(x.size): out[i] = x[i] + (2 if runs_in_python() else 1)"))

    def compiled(function):
        return jax.jit(function).lower(ROWS).compile()

    def targets(program):
        return set(re.findall(r"custom_call_target=\"([^\"]+)", program.as_text()))

    program = compiled(lambda x: jax.lax.fori_loop(0, 3, lambda _, v: jax.vmap(kernel)(v), x))
    assert targets(program) == {target_of(kernel, ONE_TO_8)}
    check_close(program(ROWS), ROWS + 3)
    assert "python" in str(targets(compiled(lambda x: jax.pure_callback(np.sin, x, x))))


def test_exported_kernel_accepts_symbolic_shape():
    (n,) = export.symbolic_shape("n")
    triple = wrap(kernel_from_body("for i in range(x.size): out[i] = 3 * x[i]"), name="triple")  # not traced before
    program = export.export(jax.jit(triple), disabled_checks=xk.export_checks())(spec(n))
    for size in (1, 5, 8):
        np.testing.assert_array_equal(program.call(np.ones(size, np.float32)), np.full(size, 3.0))


def test_integer_outputs_have_zero_tangents_also_beside_float_scratch():
    sign = wrap(kernel_from_body("out[0] = x[0] > 0", "x, out, scratch"), spec(4, dtype=np.int32), scratch=like_first)
    out, tangent = jax.jvp(sign, (ONES,), (ONES,))
    assert out.dtype == jnp.int32 and tangent.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(jax.grad(lambda x: (x * sign(x)).sum())(ONES), [1, 0, 0, 0])


@pytest.mark.parametrize("is_donated", [True, False], ids=["donated", "kept"])
def test_in_out_argument_is_updated_in_place_only_if_donated(is_donated):
    program = jax.jit(wrap(kernel_from_body("v[0] += 1", "v"), in_out_argnames=["v"]), donate_argnums=(0,) * is_donated)
    v = jnp.zeros(1000)
    address = v.unsafe_buffer_pointer()
    result = program(v)
    assert result[0] == 1
    assert v.is_deleted() == is_donated
    assert (result.unsafe_buffer_pointer() == address) == is_donated


# -- any shape, layout and batch -----------------------------------------------------------------------


@xk.numba_kernel(outs=lambda x, y: (x, jax.ShapeDtypeStruct((), x.dtype)))
def running_sum(x, y, out, total):
    """Couples all elements of a slice, so any mix-up of rows, batches or strides changes the result."""
    up_to_here = x.size * y[()]
    for i in np.ndindex(x.shape):
        up_to_here += x[i]
        out[i] = up_to_here
    total[()] = up_to_here


def running_sum_in_jax(x, y):
    start = (x.size * y).astype(x.dtype)
    up_to_each = np.tri(x.size, dtype=x.dtype) @ x.ravel()
    return start + up_to_each.reshape(x.shape), start + x.sum(dtype=x.dtype)


def random_nested_vmap(rng, rank, dtype):
    """Return a batch of arrays of this rank, a batch of scalars, and the `in_axes` of each vmap, innermost first.

    For example, [(0, None), (1, 0)] stands for jax.vmap(jax.vmap(f, (0, None)), (1, 0)).  An extent may be 0.
    """
    shapes = [rng.choice([0, 1, 1, 2, 2, 3, 3, 5, 5], rank).tolist(), []]
    in_axes_of_vmaps = []
    for size in rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 3], rng.integers(0, 4)).tolist():
        in_axes = [None, None]
        for k in ([0], [1], [0, 1])[rng.integers(3)]:
            in_axes[k] = int(rng.integers(0, len(shapes[k]) + 1))
            shapes[k].insert(in_axes[k], size)
        in_axes_of_vmaps.append(tuple(in_axes))
    return [rng.integers(0, 4, shape).astype(dtype) for shape in shapes], in_axes_of_vmaps


@pytest.mark.parametrize("rank, dtype", [(0, "float32"), (2, "complex64"), (3, "int8")])
def test_nested_vmap_matches_jax(rank, dtype):
    rng = np.random.default_rng(rank)
    cases = [random_nested_vmap(rng, rank, dtype) for _ in range(8)]

    @partial(jax.jit, static_argnums=0)
    def run(function):
        return [functools.reduce(jax.vmap, in_axes, function)(*operands) for operands, in_axes in cases]

    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), run(running_sum), run(running_sum_in_jax))


def test_empty_batch_traced_with_x64_may_be_lowered_without():
    with x64(True):
        traced = jax.jit(jax.vmap(add_one)).trace(np.zeros((0, 3)))
    assert "-> (tensor<0x3xf64>" in traced.lower().as_text()


def test_batch_of_empty_arrays_runs_kernel():
    """Without side effects, XLA would remove the call, because its result is empty."""
    fail = wrap(kernel_from_body("raise ValueError('called')"), has_side_effect=True)
    assert "called" in error_of(jax.vmap(fail), np.zeros((4, 0)))


C_FUNCTIONS = {
    "clock": numba.types.ExternalFunction("clock", numba.types.int64()),
    "usleep": numba.types.ExternalFunction("usleep", numba.types.int32(numba.types.uint32)),
    "pthread_self": numba.types.ExternalFunction("pthread_self", numba.types.uint64()),
}
# A kernel that reports the CPU time of the process, which does not decrease, and its thread.  A second run for the same
# slice changes its result.  While a thread sleeps, its core is free for the others, so they claim slices on a busy
# machine, too.
slow_kernel = kernel_from_body(
    "time[0] = clock(); usleep(20_000); x[0] = 2 * x[0] + 1; thread[0] = pthread_self()", "x, time, thread",
    **C_FUNCTIONS,
)  # fmt: skip


def run_slow_batch(**options):
    """Run a batch of 40 slices, which take 0.8 s on one thread, and check the results.

    Return the number of threads that ran the slices, and the times of their starts.
    """
    outs = spec(1, dtype="float64"), spec(1, dtype="int64"), spec(1, dtype="uint64")
    call = wrap(slow_kernel, outs, in_out_argnames=["x"], **options)
    x = np.arange(40.0).reshape(2, 20, 1)
    with x64(True):
        results, times, threads = jax.jit(jax.vmap(jax.vmap(call)))(x)
    np.testing.assert_array_equal(results, 2 * x + 1)
    return len(np.unique(threads)), times.ravel().tolist()


@pytest.mark.needs("cores")
@pytest.mark.parametrize("method", [None, "sequential", "sequential_unrolled"])
def test_slices_run_on_several_threads_unless_sequential(method):
    n_threads, times = run_slow_batch(vmap_method=method)
    if method is None:
        assert n_threads > 1
    else:
        assert n_threads == 1 and times == sorted(times) and times[0] < times[-1]


@pytest.mark.needs("cores")
@pytest.mark.parametrize("function", ["PyMem_RawMalloc", "PyThread_allocate_lock"])
def test_batch_runs_on_one_thread_if_allocation_fails(function, monkeypatch):
    """The scheduler is compiled with 0 for the results of this function: the allocation fails."""
    replaced = []

    class OutOfMemory(xk._BatchScheduler):
        def call(self, called, *args):
            if isinstance(called, str) and called == function:
                replaced.append(args)
                return xk._Int64(self, self.llvm_value(0))
            return super().call(called, *args)

    scheduler = xk._load_code(OutOfMemory().compile())
    assert replaced
    monkeypatch.setattr(xk, "_scheduler_engine", lambda: scheduler)
    name = new_name(f"without_{function}")  # a new target, because those of other tests have another scheduler
    n_threads, _ = run_slow_batch(name=name)
    assert n_threads == 1


# -- calling conventions -------------------------------------------------------------------------------


@pytest.mark.parametrize("outs, signature", [(like_first, "(*args)"), (identity, "(x)"), (spec(3), "(*args)")])
def test_custom_vjp_accepts_wrapper_with_signature_of_outs(outs, signature):
    call = wrap(add_one.__wrapped__, outs)
    assert str(inspect.signature(call)) == signature
    with_vjp = jax.custom_vjp(call)
    with_vjp.defvjp(lambda x: (call(x), x), lambda x, ct: (x * ct,))
    np.testing.assert_array_equal(jax.grad(lambda x: with_vjp(x).sum())(jnp.arange(3.0)), [0, 1, 2])


def test_wrapper_has_metadata_but_no_annotations_of_its_kernel():
    """Runtime type checkers would check the results by them: the kernel returns None, and its wrapper an array."""

    def kernel(x: np.ndarray, out: np.ndarray) -> None:
        """Add one."""

    add = wrap(kernel, identity)
    assert typing.get_type_hints(add) == add.__annotations__ == {}
    assert (add.__doc__, add.__name__, add.__module__) == ("Add one.", "kernel", __name__)
    assert repr(add) == "<numba_kernel kernel>" and add.__wrapped__ is kernel
    assert typing.get_type_hints(functools.wraps(add)(lambda x: add(x))) == {}


def swap(x, y):
    return y, x


def first_and_rest(x):
    return x[0], (x[1:], x[2])


def larger(x, y):
    return x if x[0] > y[0] else y


def scale_n(x, n, alpha, out):
    out[:] = 0
    out[:n] = alpha * x[:n]


def scale_n_in_numpy(x, n, alpha):
    return np.where(np.arange(x.size) < n, alpha * x, 0)


Pair = collections.namedtuple("Pair", "first second")
TWO_SCALARS, TWO_COUNTS = np.array([1.25, 1.5], np.float32), np.array([2, 1], np.int32)
TWO_ROWS = np.array([[1, 1.5, 1.75], [2, 1.25, 1.125]], np.float32)


class Convention(typing.NamedTuple):
    kernel: typing.Any  # a function, or the parameters and body of a kernel
    outs: typing.Any
    in_python: Callable  # the same function of a slice
    inputs: list  # with two slices
    options: dict = {}


CONVENTIONS = {
    "returns a scalar": Convention(
        lambda x: x.argmax(), spec(dtype=np.int32), lambda x: np.int32(x.argmax()), [TWO_ROWS]),
    "returns another layout": Convention(lambda x: x.T, spec(3, 1), np.transpose, [TWO_ROWS[:, None]]),
    "returns a view": Convention(lambda x: x[::-1], like_first, np.flip, [TWO_ROWS]),
    "returns a new array": Convention(lambda x, y: x * y[1], like_first, lambda x, y: x * y[1], [TWO_ROWS, -TWO_ROWS]),
    "returns one of its inputs": Convention(larger, like_first, larger, [TWO_ROWS, TWO_ROWS[::-1]]),
    "returns a tuple": Convention(
        first_and_rest, (spec(), (spec(2), spec())), first_and_rest, [TWO_ROWS], {"scratch": ()}),
    "returns constants": Convention(
        lambda x: (x[0], 3, True), (spec(), spec(dtype=np.int32), spec(dtype=bool)),
        lambda x: (x[0], np.int32(3), np.bool_(True)), [TWO_ROWS]),
    "returns a NamedTuple": Convention(
        swap, lambda x, y: Pair(x, y), lambda x, y: Pair(y, x), [TWO_ROWS, -TWO_ROWS]),
    "returns aliased outputs": Convention(
        swap, swap, swap, [TWO_ROWS, -TWO_ROWS], {"input_output_aliases": {0: 0, 1: 1}}),
    "star args": Convention(("*a", "a[-1][0] = a[0][0]"), spec(1), lambda x, y: x[:1], [TWO_ROWS, -TWO_ROWS]),
    "star args of a helper": Convention(
        ("x, *rest", "store_in(*rest)"), spec(1), lambda x: np.float32([77]), [TWO_ROWS]),
    "a default": Convention(("x, out, n=3", "out[0] = n * x[0]"), spec(1), lambda x: 3 * x[:1], [TWO_ROWS]),
    "vectorize": Convention(numba.vectorize(lambda x, y: x + y), like_last, np.add, [TWO_SCALARS, TWO_ROWS]),
    "scalars": Convention(
        scale_n, like_first, scale_n_in_numpy, [TWO_ROWS, TWO_COUNTS, TWO_SCALARS], {"scalars": True}),
    "scalars in star args": Convention(
        ("*a", "a[-1][()] = max(a[0], a[1])"), like_first, np.maximum, [TWO_SCALARS, np.float32([1, 2])],
        {"scalars": True}),
    "aliased by name": Convention(
        ("x, start, out", "for i in range(3): out[i] += x[i]"), like_first, np.add, [TWO_ROWS, TWO_ROWS + 1],
        {"input_output_aliases": {"start": 0}}),
    "two scratch buffers": Convention(
        ("x, out, s, n", "n[0] += 1; s[0] += n[0] * x[1]; out[0] = s[0]"), spec(1), lambda x: x[1:2], [TWO_ROWS],
        {"scratch": lambda x: (x, spec(1, dtype=np.int32))}),
    "NamedTuple outs": Convention(
        ("x, first, second", "first[0] = 2 * x[0]; second[()] = x[0]"), Pair(spec(1), spec()),
        lambda x: Pair(2 * x[:1], x[0]), [TWO_ROWS]),
    "in-out arguments of a set": Convention(
        ("a, b, s", "a[0] = b[1]; b[0] = s[0] = a[1]"), [spec(3)] * 2,
        lambda a, b: [np.append(b[1], a[1:]), np.append(a[1], b[1:])], [TWO_ROWS, -TWO_ROWS],
        {"in_out_argnames": {"b", "a"}, "scratch": spec(1)}),
    "nothing stored": Convention(
        ("v, out", "pass"), [spec(3)] * 2, lambda v: [v, 0 * v], [TWO_ROWS],
        {"in_out_argnames": ["v"], "zero_outputs": True}),
    "in-out": Convention(
        ("x, total, out", "for i in range(3):\n    total[i] += x[i]\n    out[i] = 2 * total[i]"),
        lambda x, total: (total, x), lambda x, total: (x + total, 2 * (x + total)), [TWO_ROWS, TWO_ROWS + 1],
        {"in_out_argnames": ["total"], "zero_outputs": True}),
}  # fmt: skip


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=[*CONVENTIONS])
def test_calling_convention_matches_python_with_and_without_vmap(convention):
    kernel, outs, in_python, inputs, options = convention
    if isinstance(kernel, tuple):
        parameters, body = kernel
        kernel = kernel_from_body(body, parameters)
    wrapper = wrap(kernel, outs, **options)

    def of_each_slice(function):
        results = map(function, *inputs)
        return jax.tree.map(lambda *slices: np.stack(slices), *results)

    expected = of_each_slice(in_python)
    check_close(of_each_slice(wrapper), expected, 1e-6)
    check_close(jax.vmap(wrapper)(*inputs), expected, 1e-6)


def test_keyword_arguments_bind_to_parameters_of_kernel():
    check_close(jax.jit(wrap(scale_n, scalars=True))(ONES, alpha=1.5, n=2), [1.5, 1.5, 0, 0])


@pytest.mark.parametrize("is_enabled", [False, True], ids=["32 bits", "x64"])
def test_returned_values_are_cast_to_declared_dtypes(is_enabled):
    """Python numbers have 64 bits in Numba."""

    def kernel(x):
        return x.argmax(), 0.5 * x, x.size, x[0] > 1

    x, dtypes = np.float32(UNSORTED), (np.int16, np.float32, np.float32, np.int8)
    outs = tuple(spec(*shape, dtype=dtype) for shape, dtype in zip([(), (4,), (), ()], dtypes))
    with x64(is_enabled):
        results = wrap(kernel, outs)(x)
    expected = tuple(np.asarray(value, dtype) for value, dtype in zip(kernel(x), dtypes))
    check_close(results, expected)  # of these dtypes


# -- inputs never change, and correct programs run -------------------------------------------------------
# Tables of kernels for `x` and `out` of four floats.  Mistakes must raise an error, and correct programs match NumPy.
# The kernels are strings, because the checks analyze compiled code, not source.  Most of them store one element only,
# because Numba takes three times as long to compile `out[:] = x`.

UNSORTED = [3.0, 1.0, 4.0, 2.0]  # the input `x`

# Helpers of the kernels.  Those with a signature take only arrays that are writable.
jitted_add_one = numba.njit(add_one.__wrapped__)
gu_add_one = numba.guvectorize("(n)->(n)")(add_one.__wrapped__)
add_one_with_signature = numba.njit("void(f4[::1], f4[::1])")(add_one.__wrapped__)
vectorized_square = numba.vectorize(lambda x: x * x)
itself_or = numba.njit(lambda array, other, choice: array if choice else other)


@numba.njit
def store_in(array):
    array.flat[0] = 77


@numba.njit("void(f4[::1])")
def store_with_signature(array):
    array[0] = 77


@numba.guvectorize("(n)->(n)")
def gu_store(x, out):
    x[0] = 77
    out[0] = x[0] + 1


@numba.njit
def store_in_copy(array, copy):
    if copy:
        array = array.copy()
    array[0] = 77
    return array[0]


@numba.njit
def views_of(array):
    yield array[:2]
    yield array[2:]


def njit_from_body(code, parameters="x, out", **options):
    return numba.njit(parallel="prange" in code, **options)(kernel_from_body(code, parameters))


WRITES_TO_INPUT = {  # statements that Numba's read-only array types reject
    "output of a ufunc": "np.add(x, 77, x)", "fill": "x.fill(77)", "mask": "x[x > 1] = 77",
    "shuffle": "np.random.shuffle(x)", "reshape": "x.reshape((2, 2))[0, 0] = 77",
    "asarray": "y = np.asarray(x)\ny[0] = 77", "view": "y = x.view(np.int32)\ny[0] = 77",
    "slice object": "s = slice(0, 2)\ny = x[s]\ny[0] = 77", "newaxis": "y = x[np.newaxis]\ny[0, 0] = 77",
    "resize": "y = np.resize(x, x.size)\ny[0] = 77", "branch": "y = out\nif x[0] > 1: y = x\ny[0] = 77",
    "swap": "a, b = x, out\na, b = b, a\nb[0] = 77", "loop over tuple": "for a in (x, x): a[0] = 77",
    "list": "b = [x] + [out]\nb[0][0] = 77", "tuple": "b = (x,) + (out,)\nb[0][0] = 77",
    "NamedTuple": "Pair(x, out).first[0] = 77", "zip": "for a, o in zip(x.reshape((2, 2)), out): a[0] = 77",
    "result of helper": "itself_or(x, out, True)[0] = 77", "generator": "for p in views_of(x): p[0] = 77",
    "closure": "def write():\n    x[0] = 77\nwrite()", "lambda": "(lambda a: a.fill(77))(x)",
    "helper": "store_in_copy(x, False)", "nan_to_num": "y = np.nan_to_num(x.view(np.int32))\ny[0] = 77",
    "parallel loop": "for i in numba.prange(4): x[i] = 77",
}  # fmt: skip


@pytest.mark.parametrize("code", WRITES_TO_INPUT.values(), ids=[*WRITES_TO_INPUT])
def test_write_to_input_raises(code):
    kernel = njit_from_body(f"{code}\nout[0] = 1")
    with pytest.raises(TypeError, match=r"(?s)[Ii]nputs are read-only.*in_out_argnames"):
        jax.eval_shape(wrap(kernel), SPEC_4)


# Statements for which Numba ignores read-only arrays, or that need writable arrays; the value of the copy after them.
WRITES_TO_COPY = {
    "flat": ("x.flat[0] = 77", [77, 1, 4, 2]),
    "flat in a tuple": ("for f in (x.T.flat, out.flat):\n    f[1] = 77", [3, 77, 4, 2]),
    "flat in a generator": ("for p in views_of(x):\n    p.flat[0] = 77", [77, 1, 77, 2]),
    "flat in a NamedTuple": ("Pair(x, out).first.flat[0] = 77", [77, 1, 4, 2]),
    "flat after a branch": ("y = out\nif x[0] > 1: y = x\ny.flat[0] = 77", [77, 1, 4, 2]),
    "renamed helper": ("store = store_in\nstore(x[1:])", [3, 77, 4, 2]),
    "renamed function of NumPy": ("fill = np.fill_diagonal\nfill(x.reshape((2, 2)), 77)", [77, 1, 4, 77]),
    "lambda": ("(lambda a: np.fill_diagonal(a, 77))(x.reshape((2, 2)))", [77, 1, 4, 77]),
    "out= of dot": ("np.dot(np.eye(4, dtype=x.dtype), x + 1, out=x)", [4, 2, 5, 3]),
    "third argument of dot": ("np.dot(np.eye(4, dtype=x.dtype), x + 1, x)", [4, 2, 5, 3]),
    "nditer": ("for v, o in np.nditer((x, out)):\n    v[()] = 77", [77, 77, 77, 77]),
    "gufunc": ("gu_store(x, out)", [77, 1, 4, 2]),
    "list": ("for a in [x, out]:\n    a[0] = 77", [77, 1, 4, 2]),
    "changed list": ("b = [out, out]\nb[0] = x\nb[0][0] = 77", [77, 1, 4, 2]),
    "typed list": ("l = numba.typed.List([out])\nl.append(x)\nl[1][0] = 77", [77, 1, 4, 2]),
    "dict": ("d = {0: out, 1: x}\nd[1][0] = 77", [77, 1, 4, 2]),
    "output of helper with signature": ("add_one_with_signature(out, x)", [1, 1, 1, 1]),
    "helper with signature": ("store_with_signature(x)", [77, 1, 4, 2]),
}


def named_rows(table):
    """Return the rows of a table as parameters, with their names as IDs."""
    return [pytest.param(*row, id=name) for name, row in table.items()]


@pytest.mark.parametrize("code, changed", [
    *named_rows(WRITES_TO_COPY),
    *[pytest.param(f"y = np.{name}(x)\nnp.add(x, 77, y)", [80, 78, 81, 79], id=name,
                   marks=pytest.mark.needs("numba 0.64"))  # in earlier versions, y is read-only
      for name in ("ascontiguousarray", "asfortranarray")],
])  # fmt: skip
def test_write_that_numba_does_not_reject_changes_a_copy_of_input(code, changed):
    """The last line adds 0, because `out[i] = x[i]` could count as a use of x that may store."""
    x = jnp.array(UNSORTED)
    call = wrap(njit_from_body(f"{code}\nfor i in range(4): out[i] = x[i] + 0"))
    assert call(x).tolist() == changed
    assert jax.vmap(call)(jnp.stack([x, x])).tolist() == [changed] * 2
    assert x.tolist() == UNSORTED


def test_nan_to_num_and_gufunc_change_a_copy_of_unbatched_input():
    for kernel, first, expected in (
        (kernel_from_body("np.nan_to_num(x, copy=False); out[0] = x[0]"), np.nan, 0), (gu_store, 3, 78)
    ):  # fmt: skip
        x = jnp.array([first, 1])
        assert jax.vmap(wrap(kernel), in_axes=None, axis_size=2)(x).tolist() == [[expected, 0]] * 2
        np.testing.assert_array_equal(x, [first, 1])


CORRECT = {
    # loops, slices and expressions
    "expression": "out[:] = 2 * x", "reversed": "out[...] = x[::-1]",
    "ndindex": "for i in np.ndindex(x.shape): out[i] = x[i]",
    "flat": "for i, v in enumerate(x.flat): out[i] = v\nout.flat[1] = x.flat[2]",
    "divmod": "out[0], out[1] = divmod(x[2], x[0])", "annotation": "o: np.ndarray = out\no[1] = x[0]",
    "slice object": "half = slice(0, 2)\no = out[half]\no[:] = x[half]",
    "reshape": "out.reshape((2, 2))[:, 1] = x[:2]", "raise": "if x[0] > 100: raise ValueError('large')\nout[0] = x[0]",
    "parallel sum": "s = 0.0\nfor i in numba.prange(4): s += x[i]\nout[0] = s",
    # outputs that start from zeros
    "sum into output": "for i in range(4):\n    for k in range(4): out[i] += x[k]", "count": "out[int(x[1])] += 1",
    "fill": "out.fill(1)\nout[2] = x[2]", "shuffle": "np.random.shuffle(out)\nout[0] = x[0]",
    # stores of old values, which LLVM removes
    "all": "out[:] = out", "product": "for i in range(4): out[i] *= 1.0", "view": "w = out[:2]\nw[0] = w[0]",
    "store in helper": "store_in_copy(out, False)",
    # stores to copies of an input, or beside it
    "copy": "x = x.copy()\nx[0] = 77\nout[0] = x[0]", "sum": "y = x\ny = y + 1\ny[0] = 0\nout[0] = y[1]",
    "astype": "y = x.astype(np.int32)\ny[0] = 5\nout[0] = y[0]", "flatten": "y = x.flatten()\ny[0] = 5\nout[0] = y[0]",
    "new array": "y = np.array([x[1], 2])\ny[0] = 3\nout[0] = y[0]",
    "where": "y = np.where(x > 1, x, 0)\ny[0] = 5\nout[0] = y[2]",
    "nan_to_num": "y = np.nan_to_num(x)\ny[0] = 5\nout[0] = y[0]", "copy in helper": "out[0] = store_in_copy(x, True)",
    "index array": "y = x.reshape((2, 2))[np.array([1, 0])]\nnp.fill_diagonal(y, 0)\nout[0] = y[0, 1]",
    "tuple": "y = np.zeros(4)\npair = x, y\npair[1][0] = 5\nout[0] = y[0]",
    "output in tuple": "pair = x, out\npair[1][0] = 5",
    "NamedTuple": "p = Pair(x, np.ones(4, np.float32))\np.second[0] = 7\nout[0] = p.first[0]",
    "swap": "a = x.copy()\nb = x + 1\nfor _ in range(3):\n    b[0] = a[0] + 1\n    a, b = b, a\nout[0] = a[0]",
    "list of copies": "b = [x.copy(), x + 1]\nfor i in range(4): b[1 - i % 2][0] = b[i % 2][0] + 1\nout[0] = b[0][0]",
    "dict of copies": "d = {0: x.copy()}\nd[0][0] = 9\nout[0] = d[0][0]",
    # lists and other collections
    "list of numbers": "order = list(x)\norder.reverse()\nout[0] = order[0]",
    "list comprehension": "l = [v for v in x if v > 1]\nl.append(5.0)\nout[0] = len(l)",
    "nested tuple": "t = (x[0], (x[1], x[2]))\nout[0] = t[1][0]",
    "list of inputs": "l = [x, x]\nfor a in l: out[0] += a[0]",
    "typed list": "l = numba.typed.List([out])\nl[0][0] = x[0]",
    "zip": "for row, o in zip(x.reshape((2, 2)), out.reshape((2, 2))): np.multiply(row, 2, o)",
    # helpers
    "star args": "jitted_add_one(*(x, out))", "signature": "add_one_with_signature(x, out)",
    "helper that may return an input": "out[0] = itself_or(x, out, True)[1]",
    "generator": "for p in views_of(x): out[0] += p[0]",
    "lambdas": "a, b = (lambda v: v), (lambda v: -v)\nout[0] = b(a(x[0]))",
    "closure": "def inner(i):\n    return x[i] * 2\nout[0] = inner(1)", "ufunc": "out[:] = vectorized_square(x)",
    "gufunc": "gu_add_one(x, out)\nout[0] += np.ascontiguousarray(x)[0]",
    # NumPy's functions
    "dot": "np.dot(np.ones((4, 4), x.dtype), x, out)", "fill_diagonal": "np.fill_diagonal(out.reshape((2, 2)), x[0])",
    "cumsum": "out[:] = np.cumsum(x)", "concatenate": "out[0] = np.concatenate((x[2:], x[:2]))[0]",
    "nditer": "for v, o in np.nditer((x, out)): out[0] += v.item() + o.item()",
}  # fmt: skip


@pytest.mark.parametrize("code", [
    *named_rows({name: [code] for name, code in CORRECT.items()}),
    pytest.param("y = np.ascontiguousarray(x.reshape((2, 2)).T)\ny[0] = 0\nout[0] = y[1, 0]", id="ascontiguousarray",
                 marks=pytest.mark.needs("numba 0.64")),  # in earlier versions, y is read-only
])  # fmt: skip
def test_correct_kernel_matches_numpy(code):
    kernel = njit_from_body(code)
    batch = np.float32([UNSORTED, [2, 3, 1, 4]])
    expected = np.zeros_like(batch)
    for x, out in zip(batch, expected):
        kernel.py_func(x.copy(), out)
    np.testing.assert_allclose(wrap(kernel)(batch[0]), expected[0], rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(wrap(kernel))(batch), expected, rtol=1e-6)


NEVER_STORES = {  # parameters, body, the fix in the message, options
    "output": ("x, out", "out = x + 1", "`out[:] = ...`.*the output then consists of zeros.", {}),
    "read output": ("x, out", "for i in range(x.size): y = x[i] + out[i]", "`out[:] = ...`", {}),
    "parallel loop": ("x, out", "for i in numba.prange(4): y = x[i]\nout = x + 1", "`out[:] = ...`", {}),
    "0-d output": ("x, total", "total = x[0]", "`total[()] = ...`", {"outs": spec()}),
    "in-out argument": ("v, x", "v = 0.5 * v + x", "in-out argument 'v'.*`v[:] = ...`", {"in_out_argnames": ["v"]}),
    "aliased output": ("x, out", "y = x[0]", "output 'out'.* value of input 0.", {"input_output_aliases": {0: 0}}),
    "second output": ("x, out, last", "out[0] = x[0]\nlast = x[-1]", "`last[()] = ...`", {"outs": (SPEC_4, spec())}),
}


@pytest.mark.parametrize("parameters, code, fix, options", named_rows(NEVER_STORES))
def test_output_never_stored_to_raises(parameters, code, fix, options):
    """This includes a kernel that was accepted with `zero_outputs=True`."""
    inputs = [ONES, ONES] if "in_out_argnames" in options else [ONES]
    kernel = njit_from_body(code, parameters)
    jax.eval_shape(wrap(kernel, zero_outputs=True, **options), *inputs)
    with pytest.raises(TypeError, match=pattern_of(f"never stores to.*{fix}")):
        jax.eval_shape(wrap(kernel, **options), *inputs)


@pytest.mark.filterwarnings("ignore:Could not find source")
@pytest.mark.parametrize("option", ["debug", "boundscheck"])
def test_debug_and_boundscheck_do_not_change_checks(option):
    for code, text in (("x[0] = 77", "writes to"), ("out = x", "never stores")):
        with pytest.raises(TypeError, match=text):
            jax.eval_shape(wrap(njit_from_body(code, **{option: True})), ONES)
    x = jnp.arange(3.0)
    for code, expected in ("x.flat[0] = 77\nout[0] = x[0]", [77, 0, 0]), ("add_one_with_signature(x, out)", [1, 2, 3]):
        assert wrap(njit_from_body(code, **{option: True}))(x).tolist() == expected
        assert x.tolist() == [0, 1, 2]


CACHED_KERNELS = {  # bodies of kernels that Numba caches, and a part of the error message or the result
    "x[0] = 77; out[0] = 1": "in_out_argnames",
    "store_in(x); out[0] = x[0]": "[77.0, 0.0, 0.0, 0.0]",
    "d = {0: out}; d[1] = x; d[1][0] = 77; out[0] = x[0]": "[77.0, 0.0, 0.0, 0.0]",
    "out = x[0]": "never stores",
    "y = np.ascontiguousarray(x); out[0] = y[1]": "[1.0, 0.0, 0.0, 0.0]",
    "out[0] = [v for v in (x, x)][0][2]": "[4.0, 0.0, 0.0, 0.0]",
    "copy_elements(np.ones((4, 4), np.float32) @ x, out)": "[10.0, 10.0, 10.0, 10.0]",
    "for i in numba.prange(4): out[i] = 2 * x[i]": "[6.0, 2.0, 8.0, 4.0]",
    "out[1] = x[0]  # has an explicit signature": "[0.0, 3.0, 0.0, 0.0]",
}
CACHED_HELPERS = {"store_in(a)": "a.flat[0] = 77", "copy_elements(x, out)": "for i in range(4): out[i] = x[i]"}


def results_of_cached_kernels(folder):
    """Return the results of `result_of_cached_kernel`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "CACHE_DIR", str(folder / "cache"))
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "cached_kernels", raising=False)  # of an earlier run
        module = importlib.import_module("cached_kernels")
        return [result_of_cached_kernel(getattr(module, f"kernel_{i}")) for i in range(len(CACHED_KERNELS))]


def result_of_cached_kernel(kernel):
    """Return the result or the message, the input, whether the cache had the code, and the compiled functions."""
    x = jnp.array(UNSORTED)
    with install_recorder("numba:compile") as recorder:
        try:
            result = str(wrap(kernel)(x).tolist())
        except TypeError as error:
            result = str(error).partition("\n")[0]
    compiled = {event.data["dispatcher"].py_func.__name__ for _, event in recorder.buffer}
    return result, x.tolist(), kernel.stats.cache_hits.total() > 0, compiled


def test_second_process_loads_cached_kernels_and_checks_them(tmp_path):
    """The second process compiles kernel_0 for the error, but no other kernel or helper."""
    functions = CACHED_HELPERS | {f"kernel_{i}(x, out)": body for i, body in enumerate(CACHED_KERNELS)}
    source = "import numba, numpy as np\n"
    for signature, body in functions.items():
        types_of_kernel = "'void(f4[::1], f4[::1])'" if "explicit signature" in body else None
        source += f"@numba.njit({types_of_kernel}, cache=True, parallel={'prange' in body})\n"
        source += f"def {signature}:\n    {body}\n"
    (tmp_path / "cached_kernels.py").write_text(source)
    here = results_of_cached_kernels(tmp_path)
    elsewhere = another_process().submit(results_of_cached_kernels, tmp_path).result()
    for i, expected in enumerate(CACHED_KERNELS.values()):
        result, x, was_cached, compiled = here[i]
        assert expected in result and x == UNSORTED and not was_cached and f"kernel_{i}" in compiled
        *same, was_cached, compiled = elsewhere[i]
        assert same == [result, UNSORTED] and was_cached
        assert not compiled & {"store_in", "copy_elements", *[f"kernel_{k}" for k in range(1, len(here))]}


def test_uncached_kernel_does_not_share_code_of_equal_cached_kernel(tmp_path):
    """The file of the cache keeps the number of the first round.  Numba caches only functions that have a file."""
    path = tmp_path / "kernels.py"
    path.write_text("def kernel(x, out):\n    out[0] = x[0] + number")
    for number, from_cache, uncached in (1, 2, 2), (2, 2, 3):
        namespace = {"number": number, "__name__": __name__}
        exec(compile(path.read_text(), path, "exec"), namespace)
        assert result_of(numba.njit(cache=True)(namespace["kernel"])) == from_cache
        assert result_of(numba.njit(namespace["kernel"])) == uncached


LARGE_SPEC = spec(100_000)


def n_allocations(program, *args):
    """Return how often Numba's machine code allocates memory in a call of a compiled program."""
    _nrt_python.memsys_enable_stats()
    before = rtsys.get_allocation_stats().alloc
    jax.block_until_ready(program(*args))
    allocated = rtsys.get_allocation_stats().alloc - before
    _nrt_python.memsys_disable_stats()
    return allocated


def test_inputs_are_not_copied():
    """This includes kernels and helpers with a signature of writable arrays, and unbatched inputs of a batch."""
    calls_add = njit_from_body("y = x\nadd_one_with_signature(y, out)")
    shared = jax.vmap(wrap(kernel_from_body("out[0] = x[0] + y[-1]", "x, y, out")), (0, None))
    copying = wrap(kernel_from_body("y = x.copy(); np.add(y, 1, out)"))
    for kernel, *specs in (
        (wrap(add_one_with_signature), LARGE_SPEC), (wrap(calls_add), LARGE_SPEC), (shared, spec(8, 1), LARGE_SPEC),
        (copying, LARGE_SPEC),
    ):  # fmt: skip
        program = jax.jit(kernel).lower(*specs).compile()
        inputs = [np.ones(each.shape, np.float32) for each in specs]
        np.testing.assert_array_equal(program(*inputs), np.full(program.out_info.shape, 2))
        assert n_allocations(program, *inputs) == (kernel is copying)
        assert 0 <= program.memory_analysis().temp_size_in_bytes < 1000  # the copies by XLA, which uses some bytes


COPIED_INPUTS = {  # a statement, and the inputs that are copied before it
    "read by flat": ("for i in range(4): out[i] = x.flat[i]", []),
    "store by flat": ("for i in range(4): x.flat[i] = out[i]", ["[1]"]),
    "dot of inputs": ("np.dot(A, x, out)", []),
    "dot of inputs by method": ("out[:] = A.dot(x)", []),
    "dot into input": ("np.dot(A, out, x)", ["[1]"]),
}


@pytest.mark.needs("scipy")  # for np.dot
@pytest.mark.parametrize("statement, copied", named_rows(COPIED_INPUTS))
def test_input_is_copied_only_if_the_kernel_may_store_to_it(statement, copied, caplog):
    """Numba ignores read-only arrays in both functions, and LLVM proves that most of these kernels only read x."""
    caplog.set_level("DEBUG", logger=xk.__name__)
    kernel = numba.njit(kernel_from_body(statement, "A, x, out"))
    jax.eval_shape(wrap(kernel, like_last, zero_outputs=True), spec(4, 4), SPEC_4)
    assert re.findall(r"gets copies of its inputs (\S+),", caplog.text) == copied


# -- new outputs start from zeros ------------------------------------------------------------------------


def call_with_dirty_outputs(wrapper, batch, operands, n_outs=1):
    """Call a handler with outputs that hold sevens when it starts.

    The first inputs of the kernel, which it does not use, are the memory of its outputs.  For `kernel(sevens, x, out)`:

        jax.ffi.ffi_call(target, spec_of_out, input_output_aliases={0: 0})(sevens, x)

    The wrapper has no such alias, so its handler must overwrite the sevens with zeros.
    """
    sevens = [jnp.full_like(operands[0], 7)] * n_outs
    specs = [spec(*x.shape[len(batch) :]) for x in (*sevens, *operands)]
    outs = [spec(*x.shape) for x in sevens]
    aliases = {j: j for j in range(n_outs)}
    call = jax.ffi.ffi_call(target_of(wrapper, *specs), outs, input_output_aliases=aliases)
    return [np.asarray(out) for out in jax.jit(call)(*sevens, *operands)]


class DirtyCall(typing.NamedTuple):
    body: str = "for i in range(x.size):\n    if x[i] > 0: out[i] = x[i]"
    batch: tuple = (3, 4)
    size: int = 5  # of a slice
    options: dict = {}


DIRTY_CALLS = {
    # kernels that store to some elements only, or read outputs before they store to them
    "conditional store": DirtyCall(),
    "split read-modify-write": DirtyCall("for i in range(x.size):\n    t = out[i]\n    t += x[i]\n    out[i] = t"),
    "running maximum": DirtyCall("for i in range(x.size):\n    t = out[0]\n    if t < x[i]: out[0] = x[i]"),
    "array expression": DirtyCall("out += x"),
    # batches
    "no batch": DirtyCall(batch=()),
    "one slice": DirtyCall(batch=(1,), options={"zero_outputs": True}),  # as by default
    "empty batch": DirtyCall(batch=(2, 0)),
    "empty slices": DirtyCall(batch=(3,), size=0),
    "many short slices": DirtyCall(batch=(1000,), size=16),
    "sequential": DirtyCall(batch=(7,), options=IN_ORDER),
    "sequential, two slices in a zeroed block": DirtyCall(batch=(3,), size=2_000, options=IN_ORDER),
    "sequential, slice larger than a zeroed block": DirtyCall(batch=(3,), size=40_000, options=IN_ORDER),
}


@pytest.mark.parametrize("body, batch, size, options", named_rows(DIRTY_CALLS))
def test_outputs_start_from_zeros_in_each_slice(body, batch, size, options):
    wrapper = wrap(kernel_from_body(body, "sevens, x, out"), **options)
    x = np.random.default_rng(0).normal(size=(*batch, size)).astype(np.float32)
    expected = np.zeros_like(x)
    for index in np.ndindex(batch):
        wrapper.__wrapped__(None, x[index], expected[index])
    for _ in range(2):  # the first call measures how long a slice takes, the second one may use several threads
        np.testing.assert_array_equal(call_with_dirty_outputs(wrapper, batch, [x]), [expected])


@pytest.mark.needs("cores")
def test_outputs_start_from_zeros_on_several_threads():
    code = "usleep(20_000); out[0] += x[0]; out[1] = (pthread_self() >> 12) & 0xFFFFF"  # an integer below 2**20
    wrapper, x = wrap(kernel_from_body(code, "sevens, x, out", **C_FUNCTIONS)), uniform(40, 3)
    [results] = call_with_dirty_outputs(wrapper, [40], [x])
    assert len(np.unique(results[:, 1])) > 1
    np.testing.assert_array_equal(results[:, [0, 2]], np.stack([x[:, 0], np.zeros(40)], axis=1))


each_batch = pytest.mark.parametrize("batch", [(), (3, 2)], ids=["no batch", "nested batch"])


@each_batch
def test_outputs_keep_contents_of_their_memory_if_zero_outputs_is_false(batch):
    wrapper = wrap(kernel_from_body("out[0] = x[0]", "sevens, x, out"), zero_outputs=False)
    expected = np.full((*batch, 3), 7)
    expected[..., 0] = 1
    results = call_with_dirty_outputs(wrapper, batch, [np.ones((*batch, 3), np.float32)])
    np.testing.assert_array_equal(results, [expected])


@each_batch
def test_scratch_and_0d_outputs_start_from_zeros(batch):
    body = "scratch[()] += x[()]; out[()] += 2 * scratch[()]"
    kernel = kernel_from_body(body, "sevens, sevens_too, x, out, scratch")
    x = uniform(*batch)
    wrapper = wrap(kernel, spec(), scratch=spec())
    results = call_with_dirty_outputs(wrapper, batch, [x], n_outs=2)
    np.testing.assert_array_equal(results, [2 * x, x])


# -- aliases and scratch buffers -----------------------------------------------------------------------


@each_batch
def test_aliased_output_starts_from_input_without_xla_alias(batch):
    """For XLA an alias is a hint, which fusions of slices on GPUs lose.  This program has no alias."""
    accumulate = wrap(kernel_from_body("out[0] += x[0] + x[3]", "acc, x, out"), input_output_aliases={0: 0})
    acc, x = jnp.full((*batch, 2), 10.0), jnp.ones((*batch, 4))
    call = jax.ffi.ffi_call(target_of(accumulate, spec(2), spec(4)), spec(*batch, 2))
    np.testing.assert_array_equal(call(acc, x), acc.at[..., 0].set(12))
    assert (acc == 10).all()


@pytest.mark.parametrize("store", ["x[0] = 77", "x.flat[0] = 77"])
def test_store_through_aliased_input_changes_output(store):
    """The kernel gets the memory of the output, not a copy of the input.  In a list, y may also be written to."""
    kernel = kernel_from_body(f"{store}; arrays = [y, y]; out[1] = arrays[0][0]", "x, y, out")
    x, y = jnp.ones(3), jnp.full(3, 5.0)
    assert wrap(kernel, input_output_aliases={0: 0})(x, y).tolist() == [77, 5, 1]
    assert (x.tolist(), y.tolist()) == ([1, 1, 1], [5, 5, 5])


def test_call_without_outputs_runs_each_slice_if_last_input_is_unbatched():
    kernel = kernel_from_body("if x[0] == last[0]: raise ValueError('found')", "x, last")
    call = jax.jit(jax.vmap(wrap(kernel, (), has_side_effect=True), in_axes=(0, None)))
    x = jnp.arange(5.0)[:, None]
    assert call(x, jnp.full(1, 5.0)) == ()
    jax.effects_barrier()
    for element in x:
        assert "found" in error_of(call, x, element)


def test_scratch_is_not_a_result():
    """Otherwise, jax_debug_nans would check it."""
    x = np.ones((2, 1), np.float32)
    call = jax.vmap(wrap(kernel_from_body("s[0] = np.nan; out[0] = 1", "x, out, s"), scratch=spec(2)))
    with jax.debug_nans(True):
        check_close(call(x), x)
    (equation,) = jax.make_jaxpr(call)(x).eqns
    assert len(equation.outvars) == 1


# -- in-place updates, side effects and loops -----------------------------------------------------------


def store_before_update(add_1, v):
    return jax.lax.fori_loop(0, 9, lambda i, v: add_1(v.at[i].set(2), i), v)


def read_before_update(add_1, v):
    """Order the read before the update by a barrier."""

    def step(i, state):
        v, total = state
        v, y = jax.lax.optimization_barrier((v, v[i]))
        return add_1(v, i), total + y

    return jax.lax.fori_loop(0, 9, step, (v, 0.0))


add_1_at = wrap(kernel_from_body("v[i] += 1", "v, i"), in_out_argnames=["v"], scalars=["i"])


def add_1_in_op(v, i):
    return op_with_generator(lambda outs: add_1_at)(v, i, outs=like_first)


def copies_of_state(function):
    """Return how often a program copies the whole state, in loops and elsewhere."""
    loops, entry = jax.jit(function).lower(LARGE_SPEC).compile().as_text().split("\nENTRY ")
    return [len(re.findall(r"= f32\[[\d,]{6,}\]\S* copy\(", code)) for code in (loops, entry)]


def add_1_in_jax(v, i):
    return v.at[i].add(1)


each_inplace_update = pytest.mark.parametrize("program, add_1", [
    (store_before_update, add_1_at), (store_before_update, add_1_in_op), (read_before_update, add_1_at)
], ids=["store before update", "store before update in op", "read before update"])  # fmt: skip


@each_inplace_update
def test_inplace_update_matches_jax_in_loop(program, add_1):
    check_close(program(add_1, jnp.arange(100.0)), program(add_1_in_jax, jnp.arange(100.0)))


@pytest.mark.needs("jax 0.11.2")
@each_inplace_update
def test_inplace_update_adds_no_copy_in_loop(program, add_1):
    """A state that a loop still needs is copied, which shows that `copies_of_state` finds copies."""
    in_loops, elsewhere = copies_of_state(partial(program, add_1))
    assert in_loops == 0 and elsewhere <= copies_of_state(partial(program, add_1_in_jax))[1]
    assert all(copies_of_state(lambda v: jax.lax.fori_loop(0, 9, lambda i, _: add_1_at(v, i), v)))


@pytest.mark.parametrize("wrap_kernel", [
    # `warp_kernels` is defined in the section on Warp
    wrap, *[pytest.param(lambda **options: xk.warp_kernel(warp_kernels().add_up, like_first, **options), marks=marks)
            for marks in (needs_warp, needs_warp_gpu)],
], ids=["numba", "warp", "warp_gpu"])  # fmt: skip
@pytest.mark.parametrize("has_side_effect", [True, False], ids=["side effect", "pure"])
def test_side_effect_keeps_unused_and_equal_calls(has_side_effect, wrap_kernel):
    call = wrap_kernel(has_side_effect=has_side_effect)

    def twice_in_a_scan(x):
        return jax.lax.scan(lambda carry, _: (2 * carry, (call(carry), call(carry))), x, None, length=3)[0]

    program = jax.jit(twice_in_a_scan).lower(SPEC_4).compile()
    assert program.as_text().count("custom-call(") == (2 if has_side_effect else 0)
    np.testing.assert_array_equal(program(ONES), 8 * ONES)


def test_call_that_computes_all_loop_state_is_not_hoisted():
    """If all of a loop's state is the result of a call, XLA moves this call out of the loop, which then never ends."""
    next_state = kernel_from_body("new_v[()] = 0.5 * v; new_n[()] = n + 1", "v, n, new_v, new_n")
    kernel = jax.vmap(wrap(next_state, lambda v, n: (v, n)))
    checks = []

    def goes_on(n):
        checks.append(n)
        return np.bool_(n.max() < 10 and len(checks) < 50)

    def condition(state):
        return jax.pure_callback(goes_on, spec(dtype=bool), state[1])

    v, n = jax.lax.while_loop(condition, lambda state: kernel(*state), (8 * ONES, np.zeros(4, np.int32)))
    np.testing.assert_array_equal(v, ONES / 128)
    np.testing.assert_array_equal(n, [10, 10, 10, 10])


# -- registered targets: threads, lifetimes, copies of the library --------------------------------------


def test_named_kernel_has_a_target_for_each_signature():
    call = wrap(name=new_name("for_two_dtypes"))
    for dtype in np.float32, np.int32:
        np.testing.assert_array_equal(call(np.ones(3, dtype)), [2, 2, 2])


def test_concurrent_wrappers_of_one_kernel_share_a_target():
    """Two targets cannot have one name, so a second registration would raise an error."""
    name = new_name("wrapped_by_threads")
    results = in_threads(lambda _: wrap(jitted_add_one, name=name)(ONES), range(3))
    np.testing.assert_array_equal(results, [ONES + 1] * 3)


def test_registered_handler_outlives_its_wrapper():
    """XLA keeps raw pointers to registered handlers."""
    wrapper = wrap(kernel_storing("x[0] + 0.5"))
    program = jax.jit(wrapper).lower(ONES).compile()
    owners = xk._COMPILED_HANDLERS[target_of(wrapper, ONES)].keep_alive
    owner_of_machine_code, reference = weakref.ref(owners[0]), weakref.ref(wrapper)
    del wrapper, owners
    jax.clear_caches()
    gc.collect()
    assert reference() is None and owner_of_machine_code() is not None
    assert program(ONES)[0] == 1.5


def test_copies_of_library_work_in_one_process():
    """One copy is vendored under another name, and another one replaces this module."""
    modules = [xk]
    for name in ("package.vendored", "xla_kernels"):
        found = importlib.util.spec_from_file_location(name, xk.__file__)
        module = importlib.util.module_from_spec(found)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, name, module)
            found.loader.exec_module(module)
        modules.append(module)
    first, second, third = [module.numba_kernel(add_one.__wrapped__, like_first) for module in modules]
    np.testing.assert_array_equal(jax.jit(lambda x: third(second(first(x))))(ONES), ONES + 3)


# -- target names in several processes -----------------------------------------------------------------


def load_beside_other_kernel(program):
    """Load an exported program in a process that has another kernel of the same name."""
    assert wrap(kernel_from_body("for i in range(x.size): out[i] = x[i] + 2"), name="mine")(ONES)[0] == 3
    return np.asarray(load_exported(program)(ONES))


def kernels_closing_over(expression, values):
    """Return the kernels that one `def` creates, one for each value of `v` in the expression."""
    source = f"def make(v):\n    def kernel(x, out):\n        out[0] = {expression}\n    return kernel"
    return list(map(function_from(source, name="make"), values))


def compile_variants(step):
    """Compile kernels that differ in captured values, helpers or options.  `step` of -1 reverses their order."""
    rows = np.arange(4).reshape(2, 2)
    helpers = [jitted_helper("a + n", n=n) for n in (6, 7)]
    options_with_set = {"fastmath": {"nnan", "nsz", "arcp", "contract"}}  # the order of a set depends on the process
    kernels = [
        *kernels_closing_over("math.copysign(np.array([v]).itemsize + x[0], v)", [0.0, -0.0, True, np.float32(1)]),
        *kernels_closing_over("x[0] + v[1, 0] + 0.75", [rows, rows.T]),
        *kernels_closing_over("v(x[0])", [math.sin, math.cos, *helpers]),
        *map(kernel_storing, ["np.sinh(x[0])", "np.cosh(x[0])", "x[0] + 40", "x[0] + 50"]),
        *map(kernel_storing, ["80 + (x.size in {4, 9})", "80 + (x.size in {5, 9})"]),  # constants of type frozenset
        numba.njit(**options_with_set)(kernel_storing("x[0] / 7")),
    ]
    return [jax.jit(wrap(kernel, spec(1))).lower(SPEC_4).compile() for kernel in kernels[::step]]


def load_serialized_variants(serialized):
    compile_variants(-1)
    load = serialize_executable.deserialize_and_load
    return [load(*data, execution_devices=jax.devices()[:1])(ONES) for data in serialized]


@pytest.mark.processes
def test_target_names_do_not_depend_on_creation_order():
    """A process finds its own kernels for the executables that another process serialized."""
    compiled = compile_variants(1)
    here = np.concatenate([program(ONES) for program in compiled])
    assert len(set(here)) == len(here)  # a wrong kernel would change a result
    serialized = list(map(serialize_executable.serialize, compiled))
    loaded = another_process().submit(load_serialized_variants, serialized).result()
    np.testing.assert_array_equal(np.concatenate(loaded), here)


def test_exported_kernel_is_found_by_name_in_another_process():
    exported = export_call(wrap(name="mine"), SPEC_4)
    elsewhere = another_process().submit(load_beside_other_kernel, exported)
    np.testing.assert_array_equal(elsewhere.result(), 3 * ONES)  # by the kernel of that process, which adds 2


def test_failed_compile_releases_name():
    """In a notebook, the cell runs again after the missing global is defined or the kernel is corrected."""
    kernel, name = kernel_storing("late"), new_name("corrected")
    call = wrap(kernel)
    for failing in (call, wrap(kernel, name=name)):
        with pytest.raises(TypeError, match="cannot compile"):
            failing(ONES)
    kernel.__globals__["late"] = 5
    assert call(ONES)[0] == 5
    assert wrap(name=name)(ONES)[0] == 2


def test_failed_registration_releases_name(monkeypatch):
    def register(*args, **options):
        raise RuntimeError("XLA rejects the handler")

    name = new_name("registered_later")
    first, second = [wrap(kernel_storing(f"x[0] + {n}"), name=name) for n in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(jax.ffi, "register_ffi_target", register)
        with pytest.raises(RuntimeError, match="XLA rejects the handler"):
            first(ONES)
    assert second(ONES)[0] == 3
    with pytest.raises(ValueError, match=f"{name}.*is in use"):
        first(ONES)


def test_redefined_kernel_keeps_its_name_if_unchanged():
    """`importlib.reload` redefines a kernel, possibly some lines further down."""
    for n in range(2):
        kernel = function_from("\n" * n + "def kernel(x, out):\n    out[0] = math.floor(x[0]) + constant", constant=1)
        assert wrap(kernel, name="defined again")(ONES)[0] == 2
    changed = kernel_storing("math.floor(x[0]) + constant", constant=5)
    with pytest.raises(ValueError, match=r"'defined again' is in use.*another kernel of this process.*name='def"):
        wrap(changed, name="defined again")(ONES)
    assert wrap(changed)(ONES)[0] == 6


# ======================================================================================================
# Numba CUDA

# -- the processes with the fake driver and with the simulator -------------------------------------------

CUDA_PACKAGES = {"numba_cuda_mlir.cuda": "numba-cuda-mlir", "numba.cuda": "numba-cuda"}  # by their `cuda` modules


def outcomes_elsewhere(tests, *options, folder, **environment):
    """Run tests of this file in a process with this environment, and return {test: "passed" or the skip's reason}.

    No test may fail.  Each name must be that of a test, with or without parameters.  Without names, all tests run.
    """
    path = folder / "outcomes"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--outcomes-out={path}", *options]
    selected = [f"{__file__}::{test}" for test in tests] or [__file__]
    run_python("-m", "pytest", *selected, *options, **environment)
    return json.loads(path.read_text())


def names_of_tests_needing(*conditions):
    """Return the names of the test functions with a mark `needs` that has one of these conditions."""

    def is_selected(test):
        marks = getattr(test, "pytestmark", [])
        return any(mark.name == "needs" and {*conditions} & {*mark.args} for mark in marks)

    return [name for name, value in globals().items() if name.startswith("test_") and is_selected(value)]


def matrix_tests(is_selected):
    """Return the names of the tests of these cells."""
    return [f"test_matrix[{'-'.join(cell.values)}]" for cell in CELLS if is_selected(*cell.values)]


def check_passed(outcomes, tests, skips_for=()):
    """Check that each test passed, except for parameters that are skipped because of the conditions `skips_for`."""
    skips = {f"{name}: {conftest.missing(name)}" for name in skips_for if conftest.missing(name)}
    for test in tests:
        found = {outcome for name, outcome in outcomes.items() if name.partition("[")[0] == test}
        assert "passed" in found and found <= {"passed", *skips}, (test, found)


@pytest.mark.processes
@pytest.mark.needs("linux", "outside simulator", "outside fake driver", "no gpu", "gcc", "cuda installed")
def test_cuda_tests_pass_with_fake_driver(tmp_path):
    """Run the tests that need the fake driver.  Those for a package that is not installed are skipped."""
    flags = "-shared -fPIC -w -Wl,-soname,libcuda.so.1 -o libcuda.so.1".split()
    subprocess.run(["gcc", *flags, ROOT / ".ci/fake_cuda_driver.c", "-ldl"], cwd=tmp_path, check=True)
    environment = {
        "JAX_PLATFORMS": "cpu",
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "NUMBA_CUDA_DRIVER": str(tmp_path / "libcuda.so.1"),
        "XLA_KERNELS_FAKE_CUDA": "1",
    }
    outcomes = outcomes_elsewhere([], "--needing=fake driver", folder=tmp_path, **environment)
    assert outcomes
    check_passed(outcomes, {test.partition("[")[0] for test in outcomes}, skips_for=CUDA_PACKAGES.values())


def runs_in_simulator(operation, backend, transformation, dtype):
    """Return whether a cell differs from those of other backends in how it calls CUDA.

    XLA treats calls alike on the CPU and on GPUs.  So the simulator runs operations and wrappers in a batch, each dtype
    alone, nested and empty batches, and calls from several threads.
    """
    if operation == "blend" and transformation == "vmap":
        return BACKENDS[backend].language is Cuda
    return backend == "numba_cuda" and (
        (transformation == "vmap" and dtype == OPERATIONS[operation].dtypes[0])
        or (transformation == "eager" and (operation == "add" or dtype == "bool"))
        or (transformation in ("vmap_nested", "vmap_empty", "pmap") and operation == "blend")
    )


@pytest.mark.processes
@pytest.mark.needs("outside simulator")
def test_cuda_tests_pass_in_simulator(tmp_path):
    """Run the tests that need Numba CUDA.  Numba reads NUMBA_ENABLE_CUDASIM when it is imported."""
    documents = ["test_docstring_examples_print_documented_output", "test_documented_program_prints_documented_output"]
    tests, cells = [*names_of_tests_needing("cuda", "simulator"), *documents], matrix_tests(runs_in_simulator)
    environment = {"NUMBA_ENABLE_CUDASIM": "1", "JAX_PLATFORMS": "cpu"}
    outcomes = outcomes_elsewhere([*tests, *cells], "--needing=cuda,simulator", folder=tmp_path, **environment)
    check_passed(outcomes, [*tests, "test_matrix"])
    assert {*cells} <= outcomes.keys()


# -- kernels ---------------------------------------------------------------------------------------------


def cuda_add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


cuda_jit = cuda.jit if cuda else identity  # without a package, tests are only collected
cuda_helper = cuda.jit(device=True) if cuda else identity


# -- the packages that compile CUDA kernels ------------------------------------------------------------

FAKE_DRIVER_PACKAGES = [
    pytest.param(module, marks=pytest.mark.needs("fake driver", package)) for module, package in CUDA_PACKAGES.items()
]


def for_package(package_cuda, function, **names):
    """Return a copy of a function whose globals have this `cuda` and these names."""
    names = {**function.__globals__, "cuda": package_cuda, **names}
    return types.FunctionType(function.__code__, names, function.__name__)


def new_cuda_kernel(package_cuda, parameters, body="cuda.grid(1)", *, names={}, **options):
    """Return a kernel that no other test has compiled, because its code has a number of its own."""
    function = kernel_from_body(f"{body}\nnumber = {next(KERNEL_NUMBERS)}", parameters, cuda=package_cuda, **names)
    return package_cuda.jit(**options)(function)


ONE_THREAD = {"grid": 1, "block": 1}


def new_cuda_wrapper(package_cuda, parameters="x, out", body="cuda.grid(1)", **options):
    """Wrap a kernel that no other test has compiled.  By default it has one thread, and stores nothing."""
    options = {"outs": like_first, "zero_outputs": True, **ONE_THREAD, **options}
    return xk.numba_cuda_kernel(new_cuda_kernel(package_cuda, parameters, body), **options)


def wrap_cuda(kernel, **options):
    """Wrap a kernel for arrays of seven elements."""
    return xk.numba_cuda_kernel(kernel, **{"outs": like_first, "launch_dims": 7, "threads_per_block": 8, **options})


def trace_cuda(kernel=None, outs=SPEC_4, **options):
    """Trace a call of a CUDA kernel.  This compiles nothing, so it needs no GPU."""
    return jax.eval_shape(xk.numba_cuda_kernel(kernel or cuda.jit(add_one.__wrapped__), outs, **options), SPEC_4)


def callable_from_body(body, **values):
    """Return a callable that references `cuda`, because the library finds the package of a callable by its globals."""
    return kernel_from_body(f"cuda\n{body}", "x, out, stream", cuda=cuda, **values)


# -- calls without a GPU ---------------------------------------------------------------------------------


@pytest.mark.needs("cuda decorates", "outside simulator")
def test_cuda_empty_launch_adds_no_custom_call():
    """XLA cannot capture an empty launch in a CUDA graph."""
    options = {"launch_dims": lambda x: x.size - 3, "input_output_aliases": {0: 1}, "zero_outputs": False}
    call = xk.numba_cuda_kernel(cuda.jit(lambda x, y, z: None), lambda x: (x, x), **options)
    assert "custom_call" in lower_for_cuda(jax.vmap(call), spec(1, 4))
    assert "custom_call" not in lower_for_cuda(jax.vmap(call), spec(0, 4))
    assert "custom_call" not in lower_for_cuda(call, spec(3))
    check_close(run_for_cuda(call, jnp.arange(3.0)), ([0, 0, 0], [0, 1, 2]))


@pytest.mark.needs("no gpu", "cuda decorates", "outside simulator")
def test_cuda_kernel_without_gpu_raises():
    call = wrap_cuda(cuda.jit(cuda_add))
    for f in (call, call, jax.jit(call)):  # the second call does not use the result of a failed first one
        with pytest.raises(NotImplementedError, match=r"'cuda_add' .*NUMBA_ENABLE_CUDASIM=1.*numba_kernel"):
            f(ONES, ONES)


# -- CUDA kernels that write to inputs, or never store to outputs -----------------------------------------
# Each row is the body of a kernel of `x` and `out`.

FIRST_TWO = slice(0, 2)


@cuda_helper  # np.place and np.random.shuffle change their arguments, but helpers of these names need not
def place(a, i, value):
    a[i] = value


@cuda_helper
def increment(a, i):
    cuda.atomic.add(a, i, 1)


@cuda_helper
def shuffle(a, i):
    return a[i] + 1


TUPLE_OF_HELPERS = (increment,)


def run_one_thread(code):
    """Return the output of a kernel, and check that its input has not changed."""
    x = jnp.array(UNSORTED)
    try:
        return jax.block_until_ready(new_cuda_wrapper(cuda, body=code)(x))
    finally:
        assert x.tolist() == UNSORTED


CUDA_WRITES_TO_INPUT = {  # in ways that Numba CUDA does not reject
    "star args": "increment(*(x, 0))", "flat": "x.flat[0] = 1", "atomic": "cuda.atomic.add(x, 0, 1)",
    "helper": "increment(x, 0)", "helper in a tuple": "TUPLE_OF_HELPERS[0](x, 0)",
    "slice": "part = x[FIRST_TWO]\ncuda.atomic.max(part, 0, 1)",
    "closure": "f = lambda i: cuda.atomic.add(x, i, out[i])\nf(0)",
    "tuple": "pair = (x,) + (out,)\ncuda.atomic.add(pair[0], 0, 1)",
    "loop": "for _ in range(2):\n    cuda.atomic.add(out, 0, 1)\n    out = x",
}  # fmt: skip


if is_successor(cuda):  # numba-cuda-mlir 0.6 cannot compile two of these kernels
    del CUDA_WRITES_TO_INPUT["star args"], CUDA_WRITES_TO_INPUT["flat"]


@needs_cuda
@pytest.mark.parametrize("code, verb", [
    *[pytest.param(code, "may write", id=name) for name, code in CUDA_WRITES_TO_INPUT.items()],
    # Of the two packages, only numba-cuda rejects this statement.
    pytest.param("x.view(np.int32)[0] = 1", "may write" if is_successor(cuda) else "writes", id="view"),
])  # fmt: skip
def test_cuda_write_to_input_raises(code, verb):
    """The simulator raises NumPy's error for read-only arrays."""
    text = rf"(?s) {verb} to input 'x'.*in_out_argnames"
    if conftest.SIMULATOR:
        text = "(destination|array) is read-only"
    with pytest.raises((TypeError, *RUNTIME_ERRORS), match=text):
        run_one_thread(code)


CUDA_CORRECT = {  # a body, and the element that it stores to `out` if the first element of `x` is 3
    "atomic": ("cuda.atomic.add(out, 0, x[0])", 3),
    "helpers": ("place(out, 0, shuffle(x, 0))", 4),
    "slice": ("part = out[FIRST_TWO]\npart[0] = x[0]", 3),
    "closure": ("def store(i, value):\n    out[i] = value\nstore(0, x[0])", 3),
    "lambda": ("f = lambda i: cuda.atomic.add(out, i, x[i])\nf(0)", 3),
    "view": ("bits = x.view(np.int32)\nout[0] = bits[0]", 0x40400000),
    "tuple": ("pair = x, out\npair[1][0] = pair[0][0]", 3),
    "swap": ("a, b = out, x\na, b = b, a\nb[0] = a[0]", 3),
}
each_correct_cuda_kernel = pytest.mark.parametrize("code, stored", named_rows(CUDA_CORRECT))


@needs_cuda
@each_correct_cuda_kernel
def test_cuda_correct_kernel_stores_expected_element(code, stored):
    check_close(run_one_thread(code), [stored, 0, 0, 0])


@pytest.mark.needs("cuda decorates")
@pytest.mark.parametrize("code", ["out = x", "y = out[0] + 1"], ids=["assigns", "reads"])
def test_cuda_output_or_in_out_argument_never_stored_to_raises(code):
    wrap_kernel = partial(xk.numba_cuda_kernel, new_cuda_kernel(cuda, "x, out", code), like_first, **ONE_THREAD)
    jax.eval_shape(wrap_kernel(zero_outputs=True), SPEC_4)  # must not affect the next wrappers
    with pytest.raises(TypeError, match="never stores to output 'out'"):
        jax.eval_shape(wrap_kernel(), SPEC_4)
    with pytest.raises(TypeError, match="never stores to in-out argument 'out'"):
        jax.eval_shape(wrap_kernel(in_out_argnames=["out"]), SPEC_4, SPEC_4)


@pytest.mark.needs("cuda decorates")
def test_cuda_helper_named_grid_does_not_count_as_cuda_grid():
    """For a kernel that calls `cuda.grid(3)`, launch_dims=1 is an error."""
    grid = cuda.jit(device=True)(function_from("def grid(n): return n", name="grid"))
    trace_cuda(cuda.jit(kernel_storing("grid(3)", grid=grid)), launch_dims=1)


# -- with the fake CUDA driver ----------------------------------------------------------------------------


class DeviceArray:
    """An object with the interface of a device array."""

    def __init__(self, shape=(8,), dtype="float32", address=0x7000):
        typestr = np.dtype(dtype).str
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (address, False), "version": 3}


# The parameters of a launch are words of 64 bits.  Each array has words for its address, shape, strides and others:
#
#     numba-cuda         0, 0, the number of elements, the size of an element, address, *shape, *strides
#     numba-cuda-mlir    address, address, 0, *shape, *strides


def first_words(package_cuda, arrays):
    """Return the indices of the first words of arrays of these specs, and at last the number of all words."""
    n_words = 3 if is_successor(package_cuda) else 5  # before the shape
    return list(itertools.accumulate((n_words + 2 * array.ndim for array in arrays), initial=0))


def check_params(fake_cuda, package_cuda, params, arrays):
    """Check the parameters of a launch by a handler, and return the addresses of the arrays.

    The package must pass equal parameters if it launches a kernel for arrays of these specs at these addresses.
    """
    address_word = 0 if is_successor(package_cuda) else 4
    addresses = [params[first + address_word] for first in first_words(package_cuda, arrays)[:-1]]
    kernel = new_cuda_kernel(package_cuda, ", ".join(f"x{k}" for k in range(len(arrays))))
    device_arrays = [DeviceArray(array.shape, array.dtype, address) for array, address in zip(arrays, addresses)]
    fake_cuda.log()
    kernel[1, 1](*map(package_cuda.as_cuda_array, device_arrays))
    [(_, params_by_package)] = fake_cuda.log()
    assert params == params_by_package
    return addresses


@pytest.fixture(params=FAKE_DRIVER_PACKAGES)
def package_cuda(request, fake_cuda):
    """Return the `cuda` module of a package, in a process that has the fake driver."""
    return importlib.import_module(request.param)


def array_and_address(shape, dtype="float32"):
    """Return an array that XLA passes to handlers without a copy, and its address."""
    array = jax.device_put(np.zeros(shape, dtype))
    return array, array.unsafe_buffer_pointer()


def test_cuda_handler_packs_arrays_like_package(fake_cuda, package_cuda):
    """The arrays have zero to three dimensions, and the dtypes of Numba CUDA that do not need x64."""
    dtypes = [dtype for dtype in DTYPES if dtype not in Cuda.unsupported_dtypes and not DTYPES[dtype].needs_x64]
    inputs, expected = zip(*[array_and_address((2, 3, 4)[: k % 4], dtype) for k, dtype in enumerate(dtypes)])
    out, scratch = spec(4, 5, dtype="int16"), spec(6)
    call = new_cuda_wrapper(package_cuda, ", ".join([*dtypes, "out", "scratch"]), outs=out, scratch=scratch)
    arrays = [*inputs, out, scratch]
    fake_cuda.set(n_params=first_words(package_cuda, arrays)[-1])
    [(_, params)] = fake_cuda.launches(call, *inputs)
    addresses = check_params(fake_cuda, package_cuda, params, arrays)
    assert addresses[:-2] == list(expected)
    assert 0 not in addresses and len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("options, launch", [
    ({"launch_dims": 256}, "1,1,1 x 256,1,1 +0"),
    ({"launch_dims": (17, 33)}, "2,3,1 x 16,16,1 +0"),
    ({"launch_dims": (9, 8, 5)}, "2,1,2 x 8,8,4 +0"),
    ({"grid": (2, 3), "block": (4, 5, 6), "shared_mem": 64}, "2,3,1 x 4,5,6 +64"),
], ids=["launch_dims 1d", "launch_dims 2d", "launch_dims 3d", "grid and block"])  # fmt: skip
def test_cuda_handler_launches_on_device_and_stream_of_call(fake_cuda, package_cuda, options, launch):
    """One memset zeros all slices before two launches."""
    options = {**IN_ORDER, "zero_outputs": True, **options}
    call = jax.vmap(xk.numba_cuda_kernel(new_cuda_kernel(package_cuda, "x, out", "pass"), like_first, **options))
    batch = jnp.ones((2, 3))
    for device in 0, 1:
        fake_cuda.set(device=device)
        assert not run_for_cuda(call, batch).any()
        assert fake_cuda.log() == [["set 24 bytes", 0], *[[f"native {device}: {launch}", []]] * 2]
    assert fake_cuda.traits(call, batch) == {1}


Launch = collections.namedtuple("Launch", "grid first_x first_y first_out")  # the first slices of x, y and out


@pytest.mark.parametrize("grid, n_x, n_y, expected", [  # `n_x` slices of x, each with all `n_y` slices of y
    ((7, 2), 3, 2, [Launch("7,2,3", 0, 0, 0), Launch("7,2,3", 0, 1, 3)]),
    ((7, 2), 65_538, 1, [Launch("7,2,65535", 0, 0, 0), Launch("7,2,3", 65_535, 0, 65_535)]),
    ((7, 1, 2), 3, 2, [Launch("7,1,2", x, y, 3 * y + x) for y in range(2) for x in range(3)]),
], ids=["slices along z", "more slices than blocks along z", "grid with z"])  # fmt: skip
def test_cuda_nested_batch_takes_few_launches(fake_cuda, package_cuda, grid, n_x, n_y, expected):
    """In a batch launch, slices are the first dimension of each array.  Its size is 1 if the array is not batched."""

    def arrays_of_launch(n):
        return [spec(n, 5), spec(1, 5), spec(n, 5)] if len(grid) == 2 else [spec(5)] * 3

    call = new_cuda_wrapper(package_cuda, "x, y, out", block=32, grid=grid)
    (x, x_data), (y, y_data) = array_and_address((n_x, 5)), array_and_address((n_y, 5))
    nested = jax.vmap(jax.vmap(call, in_axes=(0, None)), in_axes=(None, 0))
    fake_cuda.set(n_params=first_words(package_cuda, arrays_of_launch(1))[-1])
    launches = fake_cuda.launches(nested, x, y)
    assert [text for text, _ in launches] == [f"native 0: {launch.grid} x 32,1,1 +0" for launch in expected]
    addresses = []
    for launch, (_, params) in zip(expected, launches):
        n_slices = int(launch.grid.split(",")[2])
        addresses.append(check_params(fake_cuda, package_cuda, params, arrays_of_launch(n_slices)))
    slices = (np.array(addresses) - [x_data, y_data, addresses[0][2]]) / x[0].nbytes
    assert slices.tolist() == [[launch.first_x, launch.first_y, launch.first_out] for launch in expected]


@pytest.mark.parametrize("function, text, n_launches", [
    ("cuModuleLoadData", "cuModuleLoadData failed with CUDA_ERROR_OUT_OF_MEMORY", 0),
    ("cuMemsetD8Async", "could not initialize an output or scratch buffer (CUDA_ERROR_OUT_OF_MEMORY). If a kernel", 0),
    ("cuLaunchKernel", "RuntimeError: CUDA_ERROR_OUT_OF_MEMORY, from a launch with grid=(1, 2, 1), "
     "block=(64, 4, 1), shared_mem=300000; on this GPU the kernel can have at most 128 threads in a block, because of "
     "its registers or launch bounds, and the launch has 256; on this GPU the kernel can have at most 232320 bytes of "
     "dynamic shared memory, and the launch has 300000 (raised in a call of kernel 'kernel')", 1),
], ids=["load", "memset", "launch"])  # fmt: skip
def test_cuda_driver_error_fails_only_its_call(fake_cuda, package_cuda, function, text, n_launches):
    options = {"grid": (1, 2), "block": (64, 4), "shared_mem": 300_000, **IN_ORDER}
    call = jax.vmap(new_cuda_wrapper(package_cuda, **options))
    batch = jnp.ones((4, 2))
    fake_cuda.fail(function)
    with pytest.raises((ValueError, RuntimeError), match=pattern_of(text)):  # while it is lowered, or at run time
        run_for_cuda(call, batch)
    launch = ["native 0: 1,2,1 x 64,4,1 +300000", []]
    assert fake_cuda.log().count(launch) == n_launches
    assert fake_cuda.launches(call, batch) == [launch] * 4


def test_cuda_driver_error_of_batch_launch_names_its_grid(fake_cuda, package_cuda):
    fake_cuda.fail("cuLaunchKernel")
    with pytest.raises(RUNTIME_ERRORS, match=pattern_of("grid=(1, 1, 4)")):
        run_for_cuda(jax.vmap(new_cuda_wrapper(package_cuda)), jnp.ones((4, 2)))


def helpers_for_package(package_cuda):
    helpers = {helper.__name__: for_package(package_cuda, helper.py_func) for helper in (place, increment, shuffle)}
    return {name: package_cuda.jit(device=True)(helper) for name, helper in helpers.items()}


FAKE_DRIVER_MISTAKES = {  # body of a kernel, options, text of the error
    "store to input": ("x[0] = out[0]", {}, "Inputs are read-only.*writes to input 'x'. Write to an output"),
    "store to input in helper": ("increment(x, 0)", {}, "may write to input 'x'"),
    **{f"store with cache hint {name}": (f"cuda.{name}(x, 0, 1.0)", {}, "may write to input 'x': Numba CUDA ignores")
       for name in ("stcg", "stcs", "stwb", "stwt")},
    "returned value": ("return 1.0", {}, "for (float32[:]).*returns nothing"),
    "unknown attribute": ("out[0] = x.nope", {}, "for (float32[:]).*nope"),
    "call of JAX": ("out[0] = jnp.sin(x[0])", {}, "A kernel cannot call JAX"),
    "captured dict": ("out[0] = a[0]", {}, "A kernel can capture numbers"),
    "device function": ("out[0] = x[0]", {"device": True}, "'kernel' is a device function. Remove device=True"),
    "debug": ("cuda.grid(1)", {"debug": True, "opt": False}, "'kernel' has debug=True.*numba_cuda_callable"),
    "cooperative": ("cuda.cg.this_grid().sync()", {}, "'kernel' has a cooperative launch.*numba_cuda_callable"),
    "0-d array": ("out[0] = n * x[0]", {"parameters": "x, n, out", "inputs": [ONES, 2.0]},
                  "Read and write it with n[()], or list an input in scalars=['n']"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Could not find source for function")  # a warning about debug kernels
@pytest.mark.parametrize("body, options, text", named_rows(FAKE_DRIVER_MISTAKES))
def test_cuda_mistake_raises_when_traced(fake_cuda, monkeypatch, package_cuda, body, options, text):
    """Both packages get the same error, although their own errors differ."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = {"parameters": "x, out", "inputs": [ONES], **options}
    inputs, names = options.pop("inputs"), {"jnp": jnp, "a": {0: 2.0}, **helpers_for_package(package_cuda)}
    kernel = new_cuda_kernel(package_cuda, body=body, names=names, **options)
    with pytest.raises(TypeError, match=pattern_of(text)):
        jax.eval_shape(xk.numba_cuda_kernel(kernel, like_first, **ONE_THREAD), *inputs)


@each_correct_cuda_kernel
def test_cuda_correct_kernel_is_launched(fake_cuda, package_cuda, code, stored):
    kernel = new_cuda_kernel(package_cuda, "x, out", code, names=helpers_for_package(package_cuda))
    assert len(fake_cuda.launches(xk.numba_cuda_kernel(kernel, like_first, **ONE_THREAD), ONES)) == 1


def test_cuda_callable_launches_on_device_and_stream_of_call(fake_cuda, package_cuda):
    """The callable references its package by the default of a parameter."""

    def launch(x, out, stream, kernel=new_cuda_kernel(package_cuda, "x, out")):
        kernel[1, 8, stream](x, out)

    fake_cuda.set(device=1)
    assert fake_cuda.launches(xk.numba_cuda_callable(launch, like_first), ONES) == [["numba 1: 1,1,1 x 8,1,1 +0", []]]


@pytest.mark.parametrize("is_lowered", [False, True], ids=["not lowered", "lowered"])
def test_cuda_only_lowered_program_keeps_captured_array(fake_cuda, package_cuda, is_lowered):
    """The global is set to another value before the program runs."""
    kernel = new_cuda_kernel(package_cuda, "x, out", "table[0]", names={"table": DeviceArray()})
    values = kernel.py_func.__globals__
    array = weakref.ref(values["table"])
    # numba-cuda-mlir 0.6.0 cannot compile this kernel for batch launches.
    call = xk.numba_cuda_kernel(kernel, like_first, zero_outputs=True, **IN_ORDER, **ONE_THREAD)
    program = program_for_cuda(jax.vmap(call), jnp.ones(4)) if is_lowered else None
    values["table"] = None
    del kernel, call
    jax.clear_caches()
    gc.collect()
    assert (array() is not None) == is_lowered
    if program:
        program(jnp.ones(4))


class CacheableKernels:
    """Kernels and a helper.  They have source text, which Numba's cache and the library read."""

    def store_by_another_name_in_def(x, out):
        def write():
            store(x, 0, 1.0)  # noqa: F821

        write()
        out[0] = x[0]

    def read_by_helper(x, out):
        i = cuda.grid(1)
        cuda.syncthreads()
        if i < out.shape[0]:
            out[i] = square(x, i)  # noqa: F821
            print(i)

    def square(x, i):
        tile = cuda.shared.array(8, "float32")
        tile[i] = cuda.fma(x[i], x[i], x[i]) + cuda.shfl_sync(-1, i, 0)
        return math.sqrt(tile[i])


@pytest.mark.parametrize("kernel, is_correct", [
    pytest.param(CacheableKernels.store_by_another_name_in_def, False, id="writes to input"),
    pytest.param(CacheableKernels.read_by_helper, True, id="reads input in helper"),
])  # fmt: skip
def test_cuda_cached_kernel_is_analyzed_but_not_recompiled(
    fake_cuda, package_cuda, tmp_path, monkeypatch, kernel, is_correct
):
    """The second kernel is another object, as in another process."""
    config = "numba_cuda_mlir.numba_cuda.core.config" if is_successor(package_cuda) else "numba.core.config"
    monkeypatch.setattr(sys.modules[config], "CACHE_DIR", str(tmp_path))
    for n_found in (0, 1):
        square = package_cuda.jit(device=True)(for_package(package_cuda, CacheableKernels.square))
        names = {"square": square, "store": package_cuda.stwt}
        cached = package_cuda.jit(cache=True)(for_package(package_cuda, kernel, **names))
        call = xk.numba_cuda_kernel(cached, like_first, **ONE_THREAD)
        if is_correct:
            assert len(fake_cuda.launches(call, ONES)) == 1
        else:
            with pytest.raises(TypeError, match=r"(?s)may write to input 'x'.*in_out_argnames"):
                run_for_cuda(call, ONES)
        assert (cached.stats.cache_hits.total(), cached.stats.cache_misses.total()) == (n_found, 1 - n_found)


# -- on a GPU, or in Numba's simulator -----------------------------------------------------------------


@needs_cuda
def test_cuda_kernel_takes_shared_memory_scalars_and_in_out_argument():
    options = {"in_out_argnames": ["y"], "scalars": ["n", "a"], "grid": 1, "block": 8}

    offset = 16_000  # 64 kB, more than the default limit of 48 KiB
    float32 = np.float32 if is_successor(cuda) else numba.float32  # the simulator takes no dtype

    @xk.numba_cuda_kernel(outs=spec(8), shared_mem=4 * (offset + 8), **options)
    @cuda.jit
    def axpy(n, a, x, y):
        tile, i = cuda.shared.array(0, float32), cuda.grid(1)
        tile[offset + 7 - i] = x[i]
        cuda.syncthreads()
        if i < n:
            y[i] += a * tile[offset + i]

    x, counts = np.arange(8, dtype=np.float32), np.array([5, 3])
    expected = 3 * x + np.where(x < counts[:, None], 2 * x[::-1], 0)
    check_close(jax.jit(axpy)(n=5, a=2.0, x=x, y=3 * x), expected[0])
    check_close(jax.vmap(axpy, (0, None, None, 0))(counts, 2.0, x, np.stack([3 * x, 3 * x])), expected)


add_kernel = cuda_jit(cuda_add)
copy_kernel = cuda_jit(kernel_from_body("i = cuda.grid(1)\nif i < out.size: out[i] = x[i]"))
accumulate_kernel = cuda_jit(kernel_from_body("i = cuda.grid(1)\nif i < out.size: cuda.atomic.add(out, i, x[i])"))
CUDA_KERNELS = (add_kernel,)
WORKSPACES = {}  # by shape, kept between calls


@functools.cache
def add_with_signature():
    return cuda.jit("void(float32[:], float32[:], float32[:])")(cuda_add)  # this compiles at once, for a device


class Callables:
    """Callables that store 2 * x to `out`."""

    def copies_to_host(x, out, stream):
        values = x.copy_to_host(stream=stream)
        stream.synchronize()
        out.copy_to_device(2 * values, stream=stream)

    def passes_slices_to_kernel_in_tuple(x, out, stream):
        for part in slice(0, 2), slice(2, None):
            CUDA_KERNELS[0][1, 8, stream](x[part], x[part], out[part])

    def launches_kernel_with_signature(x, out, stream):
        add_with_signature()[1, 8, stream](x, x, out)

    def updates_zeros(x, out, stream):
        for _ in range(2):
            accumulate_kernel[1, 8, stream](x, out)

    def keeps_workspace(x, out, stream):
        if x.shape not in WORKSPACES:
            WORKSPACES[x.shape] = cuda.device_array(x.shape, x.dtype)
        copy_kernel[1, 8, stream](x, WORKSPACES[x.shape])
        add_kernel[1, 8, stream](WORKSPACES[x.shape], x, out)

    def takes_all_arguments(*arrays):
        x, out, stream = arrays
        add_kernel.forall(x.size, 0, stream)(x, x, out)

    class Method:
        """Launches a kernel that its code does not reference."""

        kernels = (add_kernel,)

        def launch(self, x, out, stream):
            self.kernels[0][1, 8, stream](x, x, out)

    is_a_method = Method().launch


@needs_cuda
@pytest.mark.parametrize("style", [*functions_of(Callables), "is_a_method"])
def test_cuda_callable_accepts_indirect_launches(style):
    """Callables are ordinary Python.  No correct one is rejected."""
    call = xk.numba_cuda_callable(vars(Callables)[style], like_first)
    batch = uniform(2, 5)
    check_close(call(batch[0]), 2 * batch[0])
    check_close(jax.jit(jax.vmap(call))(batch), 2 * batch)


@needs_cuda
def test_cuda_helper_with_signature_may_read_input():
    """numba-cuda passes no read-only array to such a helper, so the library reads its source."""

    @cuda.jit("float32(float32[:], int64)", device=True)
    def twice_element(x, i):
        return 2 * x[i]

    @cuda.jit
    def kernel(x, n, out):
        for i in range(cuda.grid(1), n, 8):
            out[i] = twice_element(x, i)

    call = xk.numba_cuda_kernel(kernel, like_first, grid=1, block=8, scalars=["n"])
    batch = uniform(2, 5)
    check_close(jax.vmap(call, (0, None))(batch, 5), 2 * batch)


CALLABLE_WRITES = {  # statements of a callable
    "launch": "store_1[1, 8, stream](x)",
    "launch with slice": "store_1[1, 8, stream](x[1:])",
    "launch with view": "store_1[1, 8, stream](x.view(np.float32))",
    "assignment": "x[0] = 1",
    "copy from host": "x.copy_to_device(np.zeros(x.shape, x.dtype), stream=stream)",
}


@needs_cuda
@pytest.mark.parametrize("style", CALLABLE_WRITES)
def test_cuda_callable_that_writes_to_input_raises(style):
    store_1 = new_cuda_kernel(cuda, "out", "i = cuda.grid(1)\nif i < out.size: out[i] = 1")
    launch = kernel_from_body(CALLABLE_WRITES[style], "x, out, stream", store_1=store_1)
    x = jnp.arange(5.0, dtype=jnp.float32)
    error = error_of(xk.numba_cuda_callable(launch, like_first), x)
    advice = r"Inputs are read-only.*input_output_aliases=\{i: j\}.*device_array_like"
    assert re.search(rf"(?s)numba_cuda_callable 'kernel': {advice}", error)
    np.testing.assert_array_equal(x, np.arange(5))


@needs_cuda
@pytest.mark.parametrize("body, result", [
    ("out[i] = 5; cuda.syncthreads(); out[i] = x[i] + 1", 6), ("x[i] = 7; out[i] += 1", 8),
], ids=["stores to output", "stores to input"])  # fmt: skip
def test_cuda_aliased_input_shares_memory_with_output(body, result):
    kernel = new_cuda_kernel(cuda, "x, out", f"i = cuda.grid(1); {body}")
    launch = lambda x, out, stream: kernel[1, 4, stream](x, out)
    x = jnp.zeros(4)
    for call in (
        xk.numba_cuda_kernel(kernel, like_first, grid=1, block=4, input_output_aliases={0: 0}),
        xk.numba_cuda_callable(launch, like_first, input_output_aliases={"x": 0}),
    ):
        np.testing.assert_array_equal(call(x), [result] * 4)
        np.testing.assert_array_equal(x, [0, 0, 0, 0])


@needs_cuda
@pytest.mark.parametrize("axis, launch_dims", [("y", (3, 2)), ("z", (3, 1, 2))], ids=["y", "z"])
def test_cuda_kernel_with_thread_indices_takes_more_launch_dims_than_cuda_grid(axis, launch_dims):
    body = f"i = cuda.grid(1); j = cuda.threadIdx.{axis}\nif i < 3 and j < 2: out[j, i] = x[j, i] + 1"
    kernel = new_cuda_kernel(cuda, "x, out", body)
    call = xk.numba_cuda_kernel(kernel, like_first, launch_dims=launch_dims)
    np.testing.assert_array_equal(call(jnp.ones((2, 3))), np.full((2, 3), 2))


@needs_cuda
@pytest.mark.parametrize("has_side_effect, n_calls", [(True, 1), (False, 0)], ids=["side effect", "pure"])
def test_cuda_side_effect_keeps_call_without_uses(has_side_effect, n_calls):
    """The callable counts its calls, and the program does not use its output."""
    shapes = []
    count_call = callable_from_body("shapes.append(x.shape)", shapes=shapes)
    call = xk.numba_cuda_callable(count_call, like_first, has_side_effect=has_side_effect)
    check_close(jax.block_until_ready(jax.jit(lambda x: (call(x), 2 * x)[1])(ONES)), 2 * ONES)
    jax.effects_barrier()
    assert len(shapes) == n_calls


@needs_cuda
@pytest.mark.parametrize("body, text", [
    ("raise LookupError(f'no table for {x.shape}')",
     r"LookupError: .*no table for \(1, 3\).* \(raised in a call of kernel 'kernel'\)"),
    ("yield", "A callable returns nothing; numba_cuda_callable 'kernel' returned generator"),
], ids=["exception", "generator"])  # fmt: skip
def test_cuda_error_in_callable_names_it(body, text):
    assert re.search(text, error_of(xk.numba_cuda_callable(callable_from_body(body), like_first), jnp.ones((1, 3))))


@needs_cuda
def test_cuda_callable_reads_globals_in_each_call():
    """So it shares no target with an equal callable whose globals are equal when it is traced."""
    lists = [], [], []
    for found in lists[:2]:
        function = callable_from_body("found.append(x.shape)", found=found)
        call = xk.numba_cuda_callable(function, like_first)
        jax.block_until_ready(call(ONES))
    function.__globals__["found"] = lists[2]
    jax.block_until_ready(call(ONES))
    assert lists == ([ONES.shape],) * 3


@needs_cuda
def test_cuda_op_passes_launch_to_decorated_kernel():
    op = xk.XLACustomKernel("add")
    op.def_numba_cuda_kernel(cuda.jit(cuda_add), launch_dims=lambda x, y: x.shape)
    x = uniform(3, 4)
    check_close(jax.vmap(as_function(op))(x, x), 2 * x)


@pytest.mark.parametrize("launch, fix", [
    ("store_1[1, 8, stream](x)", "Inputs are read-only.*input_output_aliases={i: j}"),
    ("store_1[1, 8, object()](out)", "belongs to another one.*cuda=cuda"),
], ids=["write to input", "stream of another package"])  # fmt: skip
def test_cuda_package_error_in_callable_gets_fix(fake_cuda, package_cuda, launch, fix):
    """Each package has its own message.  To a package, any object is like a stream of another package."""
    store_1 = new_cuda_kernel(package_cuda, "out", "i = cuda.grid(1)\nif i < out.size: out[i] = 1")
    launch = kernel_from_body(f"cuda\n{launch}", "x, out, stream", cuda=package_cuda, store_1=store_1)
    error = error_of(partial(run_for_cuda, xk.numba_cuda_callable(launch, like_first)), ONES)
    assert re.search(pattern_of(f"numba_cuda_callable 'kernel': .*{fix}.* The package reports: "), error)


@pytest.mark.needs("simulator")
def test_cuda_error_in_simulator_names_thread_and_next_kernel_runs():
    store_to_input = cuda.jit(kernel_from_body("x[0] = out[0] = 1"))
    error = error_of(xk.numba_cuda_kernel(store_to_input, like_first, **ONE_THREAD), ONES)
    text = "tid=[0, 0, 0] ctaid=[0, 0, 0]: assignment destination is read-only. Inputs are read-only, because JAX"
    assert f"ValueError: {text}" in error
    check_close(wrap_cuda(add_kernel)(ONES, ONES), 2 * ONES)


@pytest.mark.needs("simulator")
def test_cuda_kernel_takes_0d_array():
    scale = kernel_from_body("i = cuda.grid(1); out[i] = x[i] * a[()]", "x, a, out", cuda=cuda)
    call = xk.numba_cuda_kernel(cuda.jit(scale), like_first, grid=1, block=4)
    check_close(call(ONES, np.float32(3)), 3 * ONES)


# -- batch launches, with the fake driver and each package, or on a GPU ----------------------------------


def run_on_gpu(function, *args):
    return jax.block_until_ready(jax.jit(function)(*args))


TWO_BATCHES = uniform(3, 7), uniform(3, 7, seed=1)  # two batches of three slices
BATCH_AND_UNBATCHED = uniform(3, 7), uniform(7, seed=1)  # a batch and an unbatched operand
FIRST_IS_BATCHED = (0, None)


class CountingGpu(typing.NamedTuple):
    """A GPU, or a fake one, with handlers that count their launches."""

    driver_calls: conftest.DriverRecorder
    run: Callable  # (function, *args) -> the results of a program for CUDA
    cuda: types.ModuleType | None = None  # the package of Numba CUDA
    computes: bool = True  # False with the fake driver, which runs no kernel

    def check(self, work, n_launches, expected):
        """Call a function without arguments, and check its results and the number of launches."""
        results, found = self.driver_calls.run(work)
        assert found == n_launches
        if self.computes:
            check_close(results, expected, 1e-4)

    def check_batch(self, function, inputs, n_launches, expected, axes=0):
        self.check(lambda: self.run(jax.vmap(function, axes), *inputs), n_launches, expected)

    def check_concurrent_batches(self, call, expected):
        """Lower and run batches of four sizes at the same time.  Each is one launch, of copies of TWO_BATCHES."""

        def run_batch(n):
            return self.run(jax.vmap(call), *[np.tile(x, (n, 1)) for x in TWO_BATCHES])

        sizes = [1, 2, 3, 4]
        self.check(lambda: in_threads(run_batch, sizes), len(sizes), [np.tile(expected, (n, 1)) for n in sizes])


needs_gpu_and_cuda = pytest.mark.needs("gpu", "cuda", "outside simulator")


@pytest.fixture(params=[*FAKE_DRIVER_PACKAGES, pytest.param("gpu", marks=needs_gpu_and_cuda)])
def counting_cuda(request, driver_calls):
    if request.param == "gpu":
        return CountingGpu(driver_calls, run_on_gpu, cuda)
    request.getfixturevalue("fake_cuda")
    return CountingGpu(driver_calls, run_for_cuda, importlib.import_module(request.param), computes=False)


IF_BELOW_7 = "i = cuda.grid(1)\nif i < 7: "
SHIFT_AND_ADD = f"{IF_BELOW_7}out[i] = x[max(i - 1, 0)] + y[i]"
REVERSE = """i = cuda.grid(1)
tile = cuda.shared.array(8, "float32")
tile[cuda.threadIdx.x] = x[min(i, 6)]
cuda.syncthreads()
if i < 7: out[i] = tile[6 - cuda.threadIdx.x] + y[i]"""


class CudaBatch(typing.NamedTuple):
    """A kernel and a batch of inputs, by default of three slices of seven elements."""

    parameters: str
    body: str
    in_jax: Callable  # the same function of a slice
    inputs: tuple = TWO_BATCHES
    axes: typing.Any = 0  # of the inputs, for vmap
    options: dict = {}
    reason: str | None = None  # why three slices are three launches
    reason_of_successor: str | None = None  # the same, for numba-cuda-mlir


def shift_and_add(x, y):
    return x[..., [0, *range(6)]] + y


CUDA_BATCHES = {
    "stencil": CudaBatch("x, y, out", SHIFT_AND_ADD, shift_and_add),
    "in-out and scalar": CudaBatch(
        "x, a, y", f"{IF_BELOW_7}y[i] = 2 * y[i] + a * x[i]", lambda x, a, y: 2 * y + a * x,
        (TWO_BATCHES[0], uniform(3), TWO_BATCHES[1]),
        options={"outs": like_last, "in_out_argnames": ["y"], "scalars": ["a"]}),
    "shared memory and unbatched operand": CudaBatch(
        "x, y, out", REVERSE, lambda x, y: x[::-1] + y, BATCH_AND_UNBATCHED, FIRST_IS_BATCHED),
    "no elements": CudaBatch(
        "x, z, out", f"{IF_BELOW_7}out[i] = x[i] + z.size", lambda x, z: x, (TWO_BATCHES[0], np.zeros((3, 0), "f4"))),
    "0-d array": CudaBatch(
        "x, a, out", f"{IF_BELOW_7}out[i] = x[i] * a[()]", operator.mul, (TWO_BATCHES[0], uniform(3)),
        reason_of_successor="TypeError: .*cannot compile"),
    "reads gridDim.z": CudaBatch(
        "x, y, out", f"{IF_BELOW_7}out[i] = x[i] + cuda.gridDim.z", lambda x, y: x + 1,
        reason="the slices would be the blocks along z, and the kernel uses %n?ctaid.z"),
}  # fmt: skip


@pytest.mark.parametrize("batch", CUDA_BATCHES.values(), ids=[*CUDA_BATCHES])
def test_cuda_batch_is_one_launch_or_logs_why_not(counting_cuda, batch, fallback_reasons):
    reason = batch.reason or (batch.reason_of_successor if is_successor(counting_cuda.cuda) else None)
    kernel = new_cuda_kernel(counting_cuda.cuda, batch.parameters, batch.body)
    call = wrap_cuda(kernel, **batch.options)
    expected = jax.vmap(batch.in_jax, batch.axes)(*batch.inputs)
    counting_cuda.check_batch(call, batch.inputs, 3 if reason else 1, expected, batch.axes)
    found = fallback_reasons()
    assert len(found) == bool(reason) and all(re.match(reason, text) for text in found)


def test_cuda_sequential_wrapper_prevents_only_its_own_batch_launches(counting_cuda, fallback_reasons):
    kernel = new_cuda_kernel(counting_cuda.cuda, "x, y, out", SHIFT_AND_ADD)
    in_order = {'vmap_method="sequential" runs slices in order'}
    for options, n_launches, reasons in ({}, 1, set()), (IN_ORDER, 3, in_order), ({}, 1, set()):
        counting_cuda.check_batch(wrap_cuda(kernel, **options), TWO_BATCHES, n_launches, shift_and_add(*TWO_BATCHES))
        assert fallback_reasons() == reasons


@pytest.mark.parametrize("zero_outputs, n_memsets", [(None, 3), (True, 3), (False, 0)], ids=["default", "zeros", "no"])
@pytest.mark.parametrize("is_callable, n_launches", [(False, 1), (True, 0)], ids=["kernel", "callable"])
def test_cuda_batch_has_one_memset_per_new_buffer(counting_cuda, zero_outputs, n_memsets, is_callable, n_launches):
    """New buffers are the outputs and scratch buffers without aliases.  Launches by callables are not counted."""
    body = f"{IF_BELOW_7}a[i] = x[i]; b[i] = x[i]{' + b[i]' if n_memsets else ''}; tmp[i] = c[i]; c[i] = x[i]"
    kernel = new_cuda_kernel(counting_cuda.cuda, "x, y, c, a, b, tmp", body)

    def launch(x, y, c, a, b, tmp, stream):
        kernel[1, 8, stream](x, y, c, a, b, tmp)

    options = {"scratch": like_first, "input_output_aliases": {1: 0}, "zero_outputs": zero_outputs}
    outs = lambda x, y: (y, x, x)
    call = xk.numba_cuda_callable(launch, outs, **options) if is_callable else wrap_cuda(kernel, outs=outs, **options)
    counting_cuda.check_batch(call, TWO_BATCHES, n_launches, (TWO_BATCHES[0],) * 3)
    assert counting_cuda.driver_calls.memsets == [4 * 3 * 7] * n_memsets


@pytest.mark.parametrize("body, counts", [
    ("out[0] = table[0]", [0, 0, 0]),
    ("if cuda.grid(1) == 0:\n    table[0] += 1\n    out[0] = table[0]", [1, 2, 3]),
], ids=["reads", "writes"])  # fmt: skip
def test_cuda_write_to_global_array_prevents_batch_launch(counting_cuda, body, counts, fallback_reasons):
    """A helper accesses the array.  The slices of one launch would race."""
    package = counting_cuda.cuda
    table = package.to_device(np.zeros(8, "f4")) if counting_cuda.computes else DeviceArray()
    helper = new_cuda_kernel(package, "out", body, names={"table": table}, device=True)
    kernel = new_cuda_kernel(package, "x, out", "helper(out)", names={"helper": helper})
    n_launches, expected = 3 if any(counts) else 1, np.float32(counts)[:, None]
    counting_cuda.check_batch(wrap_cuda(kernel, outs=spec(1)), TWO_BATCHES[:1], n_launches, expected)
    assert fallback_reasons() == ({"the kernel may write to global device arrays: table"} if any(counts) else set())


def test_cuda_changed_captured_value_prevents_batch_launch(counting_cuda, fallback_reasons):
    """Numba compiles a kernel once for each dtype, with the values that the globals have at that time.

    All wrappers of the kernel use this code, so a launch per slice has the old value, too.
    """
    kernel = new_cuda_kernel(counting_cuda.cuda, "x, out", f"{IF_BELOW_7}out[i] = factor * x[i]", names={"factor": 0})
    values = kernel.py_func.__globals__
    rows = [  # dtype, the factor with which it is compiled, the factor at the launch, options, number of launches
        ("f4", 2, 3, {}, 3), ("f4", 2, 3, {"zero_outputs": False}, 3), ("u4", 2, 2, {}, 1), ("i4", 3, 3, {}, 1),
        ("i2", 3, 2, {}, 3),
    ]  # fmt: skip
    for dtype, compiled_factor, *_ in rows:
        values["factor"] = compiled_factor
        counting_cuda.run(wrap_cuda(kernel), np.arange(7, dtype=dtype))
    for dtype, compiled_factor, new_factor, options, n_launches in rows:
        values["factor"] = new_factor
        batch = np.arange(21, dtype=dtype).reshape(3, 7)
        counting_cuda.check_batch(wrap_cuda(kernel, **options), [batch], n_launches, compiled_factor * batch)
        text = "captured values have changed since the kernel was compiled"
        assert fallback_reasons() == ({text} if n_launches == 3 else set())


def test_cuda_exported_batch_of_named_kernel_is_one_launch(counting_cuda):
    """The batch launch is compiled with the first trace, because another process may run only exported programs."""
    kernel = new_cuda_kernel(counting_cuda.cuda, "x, out", f"{IF_BELOW_7}out[i] = factor * x[i]", names={"factor": 2.0})
    call = wrap_cuda(kernel, name=f"batch.{counting_cuda.cuda.__name__}")
    jax.eval_shape(call, spec(7))
    kernel.py_func.__globals__["factor"] = 3.0
    (n,) = export.symbolic_shape("n")
    exported = program_for_cuda(jax.vmap(call), spec(n, 7))
    x, _ = TWO_BATCHES
    counting_cuda.check_batch(call, [x], 1, 2 * x)
    counting_cuda.check(lambda: exported(x), 1, 2 * x)


def test_cuda_large_blocks_and_grids_with_z_prevent_batch_launch(counting_cuda, fallback_reasons, monkeypatch):
    """The wrappers share a handler, which decides in each call."""
    attribute_of_driver = xk._LibCuda.function_attribute

    def function_attribute(libcuda, function, attribute):
        is_limit = attribute == xk._FUNC_MAX_THREADS_PER_BLOCK
        return 7 if is_limit else attribute_of_driver(libcuda, function, attribute)

    monkeypatch.setattr(xk._LibCuda, "function_attribute", function_attribute)
    kernel = new_cuda_kernel(counting_cuda.cuda, "x, y, out", SHIFT_AND_ADD)
    too_many = "a block of the batch kernel can have 7 threads, and block=(8, 1, 1)"
    has_z = "the slices would be the blocks along z, and the launch uses z: grid=(2, 1, 2)"
    for grid, block, n, reason in (1, 8, 3, too_many), (2, 4, 1, None), ((2, 1, 2), 4, 3, has_z), (1, 8, 3, too_many):
        call = xk.numba_cuda_kernel(kernel, like_first, grid=grid, block=block)
        counting_cuda.check_batch(call, TWO_BATCHES, n, shift_and_add(*TWO_BATCHES))
        assert fallback_reasons() == {reason} - {None}


def test_cuda_concurrent_batches_are_one_launch_each(counting_cuda):
    call = wrap_cuda(new_cuda_kernel(counting_cuda.cuda, "x, y, out", SHIFT_AND_ADD))
    counting_cuda.check_concurrent_batches(call, shift_and_add(*TWO_BATCHES))


USES_OF_Z = [
    "mov.u32 %r1, %ctaid.z;",
    "mov.v4.u32 {%r1, %r2, %r3, %r4}, %nctaid;",
    "mov.u64 %rd1, %gridid;",
    ".entry kernel() .explicitcluster {",
    "mov.u32 %r1, %cluster_ctaid.x;",
    ".extern .func (.param .b32 result) of_the_user (.param .b64 x);",
    ".extern .func (.param .b32 result) free_energy (.param .b64 x);",
]
WITHOUT_Z = """
.extern .func (.param .b32 result) vprintf (.param .b64 x);
.extern .func __assertfail (.param .b64 x);
.extern .func (.param .b64 result) malloc (.param .b64 x);
.extern .func free (.param .b64 x);
.extern .func (.param .b64 result) numba_gil_ensure ();
.extern .func (.param .b64 result) NRT_Allocate (.param .b64 x);
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.z; mov.u32 %r3, %tid.z; mov.u32 %r4, %nctaid.y;"""


def test_cuda_ptx_that_uses_z_is_recognized():
    patterns = xk._PTX_USES_Z, xk._PTX_CALLS_EXTERNAL
    for ptx in USES_OF_Z:
        assert any(pattern.search(WITHOUT_Z + ptx) for pattern in patterns)
    assert not any(pattern.search(WITHOUT_Z) for pattern in patterns)


# ======================================================================================================
# Warp

floats = wp and wp.array(dtype=float)


# -- kernels compiled from text -------------------------------------------------------------------------
# Warp builds a module at a time, so the kernels of a table share a module.  They are compiled from text, because Warp
# reads the source of a kernel.  For example, "add to out": ("x: floats, out: floats", "add(out, i, x[i])") becomes:
#
#     @wp.kernel(module=module, enable_backward=False)
#     def add_to_out(x: floats, out: floats):
#         i = wp.tid()
#         add(out, i, x[i])
#
# All kernels may use these definitions.  Other tables have more definitions beside them.


WARP_DEFINITIONS = """
import warp as wp
from typing import Any
floats = wp.array(dtype=float)
ints = wp.array(dtype=int)
vectors = wp.array(dtype=wp.vec2)
matrices = wp.array(dtype=wp.mat22)
rows = wp.array2d(dtype=float)
halves = wp.array3d(dtype=wp.float16)
cubes = wp.array4d(dtype=float)
FACTOR = wp.constant(2.5)
@wp.struct
class Params: a: float; n: int
@wp.struct
class Holder: a: floats
@wp.struct
class Inner: axis: wp.vec3
@wp.struct
class Settings: gain: float; inner: Inner; turn: wp.mat22
@wp.func
def add(a: floats, i: int, value: float): a[i] += value
@wp.func
def tail(a: floats): return a[1:]
@wp.func
def double(a: floats, count: ints, i: int): return 2.0 * a[i]
@wp.func
def double_again(a: floats, count: ints, i: int): return 2.0 * a[i]
@wp.func
def times_double_again(a: floats, count: ints, i: int): return a[i] * double_again(a, count, i)
@wp.func_grad(double)  # with the derivative 3, which differs from that of `double`
def triple_adjoint(a: floats, count: ints, i: int, adj_ret: float):
    wp.adjoint[a][i] += 3.0 * adj_ret
    a[i] = 9.0
    wp.atomic_add(count, 0, 1)
@wp.func_replay(double_again)  # the adjoint of `times_double_again` uses this value, which differs, too
def replay_as_triple(a: floats, count: ints, i: int):
    wp.atomic_add(count, 0, 1)
    return 3.0 * a[i]
@wp.func_native("return x + 1.0f;")
def add_one_in_cpp(x: float) -> float: ...
@wp.func_native('''
    static int inside;
    int count = __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < patience && count < 2; i++)
        count = __atomic_load_n(&inside, __ATOMIC_SEQ_CST);
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    return count;
''')
def count_threads(patience: float) -> float: ...  # waits for a second thread, at most `patience` rounds
"""


def warp_kernels_from(sources, module="unique", has_adjoints=False, definitions=""):
    """Return {name: kernel} for {name: (parameters, body)}.

    A body without `wp.tid()` gets the first line `i = wp.tid()`.  `definitions` has more structs and functions.
    """
    text = WARP_DEFINITIONS + definitions
    identifiers = {name: re.sub(r"\W+", "_", str(name)).strip("_") for name in sources}
    for name, (parameters, body) in sources.items():
        start = "" if "wp.tid()" in body else "i = wp.tid()\n"
        text += f"@wp.kernel(module=module, enable_backward={has_adjoints})\n"
        text += f"def {identifiers[name]}({parameters}):\n{textwrap.indent(start + body, '    ')}\n"
    file = f"<kernels {next(KERNEL_NUMBERS)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # Warp reads sources there
    namespace = {"__name__": "kernels", "module": module if module == "unique" else wp.get_module(module)}
    exec(compile(text, file, "exec"), namespace)
    return {name: namespace[identifiers[name]] for name in sources}


def warp_kernel_from_body(parameters, body, has_adjoint=False):
    return warp_kernels_from({"kernel": (parameters, body)}, has_adjoints=has_adjoint)["kernel"]


WARP_KERNELS = {
    "matvec": ("m: matrices, v: vectors, out: vectors", "out[i] = m[i] * v[i]"),
    "squares_of_rows": ("x: rows, out: floats", "out[i] = x[i, 0] * x[i, 0]"),
    "histogram": ("index: ints, weight: float, acc: floats", "wp.atomic_add(acc, index[i], weight)"),
    "takes_doubles": ("x: wp.array(dtype=wp.float64), out: floats", "out[i] = float(x[i])"),
    "returns_doubles": ("x: floats, out: wp.array(dtype=wp.float64)", "out[i] = wp.float64(x[i])"),
    "takes_arrays_in_structs": ("h: Holder, out: floats", "out[i] = h.a[i]"),
    "takes_arrays_of_structs": ("h: wp.array(dtype=Params), out: floats", "out[i] = h[i].a"),
    "takes_indices": ("t: wp.indexedarray(dtype=float), out: floats", "out[i] = t[i]"),
    "takes_many_kinds": ("x: floats, factor: floats, kind: int, on: bool, h: wp.handle, out: floats",
                         "out[i] = float(kind) + float(h)\nif x:\n    out[i] += x[i]\n"
                         "if on and factor:\n    out[i] *= factor[i % factor.shape[0]]"),
    "takes_nothing": ("", "pass"),
    "takes_anything": ("x: wp.array(dtype=Any), out: wp.array(dtype=Any)", "out[i] = x[i]"),
    "add_up": ("x: floats, out: floats", "wp.atomic_add(out, 0, x[i])"),
}  # fmt: skip
WARP_DIFFERENTIABLE_KERNELS = {
    "multiply": ("x: floats, y: floats, out: floats", "out[i] = x[i] * y[i]"),
    "all_types": (
        "x: wp.array(dtype=wp.vec3), i: wp.int8, v: wp.vec3h, m: wp.mat33, s: Settings, n: wp.uint64, w: rows, o: rows",
        "r, c = wp.tid()\nvalues = float(i) + float(v[1]) + m[2, 1] + s.gain + s.inner.axis[2] + s.turn[1, 0]\n"
        "o[r, c] = x[r][0] * w[r, c] + values + float(n)"),
    "store_and_add": ("x: floats, y: floats, out: floats",
                      "out[i] = x[i]\nif x[i] > 2.0:\n    out[i] = y[i]\nadd(out, i, x[i] * x[i])"),
    "custom_adjoint": ("count: ints, y: floats, out: floats", "out[i] = y[i] * double(y, count, i)"),
    "custom_replay": ("count: ints, y: floats, out: floats", "out[i] = times_double_again(y, count, i)"),
}  # fmt: skip


@functools.cache
def warp_kernels():
    wp.init()  # vectors of halves need it
    differentiable = warp_kernels_from(WARP_DIFFERENTIABLE_KERNELS, "differentiable kernels", True)
    return types.SimpleNamespace(**warp_kernels_from(WARP_KERNELS, "kernels"), **differentiable)


TWO_VECTORS = uniform(5), uniform(5, seed=1)
THREE_FLOATS, THREE_INTS = uniform(3), np.arange(3, dtype=np.int32)
X_AND_W = uniform(2, 3), uniform(2, 3, seed=1)  # the inputs of `all_types`


def warp_product(**options):
    return xk.warp_kernel(warp_kernels().multiply, like_first, **options)


def histogram(**options):
    return xk.warp_kernel(warp_kernels().histogram, spec(3), **options)


@functools.cache
def values_of_all_types():
    """Return arguments for the parameters of `all_types` that are not arrays, by name."""
    settings = warp_kernels().all_types.func.__annotations__["s"]()
    settings.gain = 1.5
    settings.inner.axis = wp.vec3(1.0, 2.0, 3.0)
    return {"i": -3, "v": wp.vec3h(4.0, 5.0, 6.0), "m": wp.mat33(*range(9)), "s": settings, "n": 8}


def call_all_types(x, w, name=None, **others):
    """Call `all_types` with these values, or with others."""
    options = {"launch_dims": (2, 3), "block_dim": 4, "differentiable": True, "name": name}
    return xk.warp_kernel(warp_kernels().all_types, like_last, **options)(
        x, *(values_of_all_types() | others).values(), w
    )


def all_types_in_jax(x, w):
    """Return what `all_types` computes from `values_of_all_types`."""
    return x[:, :1] * w + (-3 + 5 + 7 + 1.5 + 3 + 8)


@pytest.fixture(params=[pytest.param("cpu", marks=needs_warp), pytest.param("gpu", marks=needs_warp_gpu)])
def warp_platform(request):
    """The platform on which the test computes."""
    return request.param


# -- arguments that are passed by value -----------------------------------------------------------------


def test_warp_values_of_any_library_share_a_target(warp_platform):
    """Python, NumPy, JAX and Warp values are launch data, so they do not change the target."""
    expected = gradient(all_types_in_jax, X_AND_W)(*X_AND_W)
    typed = {"i": wp.int8(-3), "n": np.uint64(8)}
    plain = {"v": np.array([4, 5, 6], np.float16), "m": jnp.arange(9).reshape(3, 3), "n": jnp.uint8(8)}
    for values in (typed, plain):
        call = partial(call_all_types, **values)
        assert target_of(call, *X_AND_W) == target_of(call_all_types, *X_AND_W)
        check_close(gradient(call, X_AND_W)(*X_AND_W), expected, 1e-4)
    others = partial(call_all_types, i=3, m=[[1, 2, 3]] * 3, n=9)
    check_close(others(*X_AND_W), all_types_in_jax(*X_AND_W) + 6 + 1 - 5)
    assert target_of(others, *X_AND_W) == target_of(call_all_types, *X_AND_W)


@needs_warp
def test_warp_exported_program_contains_values():
    """The other process traces a call with other values, which has the same target."""
    call = partial(call_all_types, name="of_all_types")
    results = run_exported_elsewhere(call, *X_AND_W, traced=partial(call, i=3, n=9))
    check_close(results, all_types_in_jax(*X_AND_W))


def traced_all_types():
    """Return a function that calls `all_types` with values, and a list that grows with each trace."""
    traced, (x, w) = [], X_AND_W

    def outs(*args):
        traced.append(args)
        return args[-1]

    f = xk.warp_kernel(warp_kernels().all_types, outs, launch_dims=lambda *args: args[-1].shape)
    return lambda n_rows=2, **others: f(x[:n_rows], *(values_of_all_types() | others).values(), w[:n_rows]), traced


@needs_warp
def test_warp_retraces_if_struct_field_or_dtype_of_value_changes():
    """Structs are compared by their fields, because a caller may change a struct.  `outs` may use the dtypes."""
    call, traced = traced_all_types()
    settings = values_of_all_types()["s"]
    for gain, n_traced in (1.5, 1), (4.0, 2), (1.5, 2):
        settings.gain = gain
        check_close(call(s=settings), all_types_in_jax(*X_AND_W) + gain - 1.5)
        assert len(traced) == n_traced
    call(s=deepcopy(settings))
    assert len(traced) == 2
    for dtype, n_traced in ("f4", 3), ("f8", 4), ("f4", 4):
        call(m=np.arange(9, dtype=dtype).reshape(3, 3))
        assert len(traced) == n_traced
    call(n=wp.uint64(8))  # instead of 8: `outs` may use the type, too
    assert len(traced) == 5


@needs_warp
def test_warp_trace_uses_copy_of_struct():
    """JAX passes the struct of the first call to later traces with an equal struct, for other shapes."""
    call, traced = traced_all_types()
    settings = deepcopy(values_of_all_types()["s"])
    call(s=settings)
    settings.gain = 4.0
    check_close(call(1), all_types_in_jax(*X_AND_W)[:1])
    assert len(traced) == 2


# -- derivatives ---------------------------------------------------------------------------------------


def test_warp_adjoint_preserves_outputs_and_cotangents(warp_platform):
    """In its adjoint, Warp calls functions again, and it overwrites cotangents."""
    options = {"differentiable": True, "zero_outputs": False}  # the kernel stores to `out` before it adds to it
    f = xk.warp_kernel(warp_kernels().store_and_add, like_first, **options)
    out, pullback = jax.vjp(f, jnp.arange(1.0, 5.0), jnp.ones(4))
    ct = jnp.arange(4.0)
    check_close(pullback(ct), ([0, 5, 12, 24], [0, 0, 2, 3]))
    check_close((ct, out), ([0, 1, 2, 3], [2, 6, 10, 17]))


@pytest.mark.parametrize("kernel", ["custom_adjoint", "custom_replay"])
def test_warp_custom_gradient_is_used_and_preserves_inputs(kernel, warp_platform):
    """The kernels compute y * 2y, and the gradient is 2y + 3y instead of 4y.  Both functions also write to inputs."""
    f = xk.warp_kernel(getattr(warp_kernels(), kernel), like_last, differentiable=True)
    count, y, ct = jnp.zeros(3, jnp.int32), jnp.arange(1.0, 4.0), jnp.arange(3.0)
    out, pullback = jax.vjp(lambda y: f(count, y), y)
    check_close(pullback(ct), (5 * jnp.arange(1.0, 4.0) * ct,))
    check_close((count, y, ct, out), (np.zeros(3, np.int32), [1, 2, 3], [0, 1, 2], [2, 8, 18]))


# -- targets, threads ------------------------------------------------------------------------------------


def kernel_with_constant(constant):
    """Create a kernel as a generator would.  Each call adds a kernel of this name to one module, and so rebuilds it."""
    c = wp.constant(constant)

    @wp.kernel(module=wp.get_module("generated"), enable_backward=False)
    def scaled(x: floats, out: floats):
        i = wp.tid()
        out[i] = c * x[i]

    return xk.warp_kernel(scaled, like_first)


def test_warp_kernel_keeps_its_constant_if_module_is_rebuilt(warp_platform):
    x = jnp.arange(3.0)
    first = kernel_with_constant(2.0)
    for constant in (2.0, 3.0):
        check_close(kernel_with_constant(constant)(x), constant * x)
    check_close(first(x), 2 * x)


def test_warp_target_depends_on_block_dim_and_module_options(warp_platform, monkeypatch):
    """Warp's hash of a kernel contains neither."""
    first, other, again = (target_of(warp_product(block_dim=n), *TWO_VECTORS) for n in (32, 64, 32))
    assert first == again != other
    x = jnp.arange(3.0)
    options = wp.get_module("generated").options
    before, again = [target_of(kernel_with_constant(2.0), x) for _ in range(2)]
    monkeypatch.setitem(options, "fast_math", not options["fast_math"])
    assert before == again != target_of(kernel_with_constant(2.0), x)
    check_close(kernel_with_constant(2.0)(x), 2 * x)


def test_warp_threads_share_a_module_and_restore_log_level(warp_platform, monkeypatch):
    """The library changes `wp.config.log_level` while it builds."""
    monkeypatch.setattr(wp.config, "log_level", 20)
    initialize = wp.init

    def initialize_slowly():  # without a lock, threads would overlap
        time.sleep(0.02)
        initialize()

    monkeypatch.setattr(wp, "init", initialize_slowly)
    functions = {constant: kernel_with_constant(constant) for constant in (1.0, 2.0, 3.0)}
    constants, (x, _) = [*functions, *functions], TWO_VECTORS
    results = in_threads(lambda constant: functions[constant](x), constants)
    check_close(results, [constant * x for constant in constants])
    assert wp.config.log_level == 20


COUNT_THREADS = "out[0] = count_threads(x[0])"


@needs_warp
@pytest.mark.needs("cores")
@pytest.mark.parametrize("body, options, n_callers, is_parallel", [
    (COUNT_THREADS, {}, 1, True),
    (COUNT_THREADS, IN_ORDER, 1, False),
    (f"wp.tile_store(out, wp.tile_load(x, shape=1))\n{COUNT_THREADS}", {"tiled": True}, 4, False),
], ids=["any order", "sequential", "tiled"])  # fmt: skip
def test_warp_slices_run_on_several_threads_unless_sequential_or_tiled(body, options, n_callers, is_parallel):
    """Each slice waits for a second thread.  On CPUs, Warp has one memory for the tiles of all threads."""
    kernel = warp_kernel_from_body("x: floats, out: floats", body)
    run = jax.jit(jax.vmap(xk.warp_kernel(kernel, like_first, launch_dims=1, **options)))
    counts = in_threads(lambda x: np.max(run(x)), [np.full((16, 1), 1e8, np.float32)] * n_callers)
    assert (max(counts) > 1) == is_parallel


# -- launches on the fake GPU ----------------------------------------------------------------------------


@needs_fake_warp_gpu
def test_warp_launches_on_device_and_stream_of_call(fake_warp_gpu):
    """The batch and its adjoint are one launch each."""
    args = uniform(3, 2, 3), X_AND_W[1]
    f, expected = vmap_first(call_all_types, args), vmap_first(all_types_in_jax, args)
    check_close(run_for_cuda(gradient(f, args), *args), gradient(expected, args)(*args), 1e-4)
    assert fake_warp_gpu.traits(gradient(f, args), *args) == {1}
    grid, block, shared_memory, stream, device = (2, 1, 3), (4, 1, 1), 4 + 1, 0x5EED, 1  # the last three of the fakes
    assert fake_warp_gpu.launches == [(grid, block, shared_memory, stream, device)] * 2


@needs_fake_warp_gpu
@pytest.mark.needs("warp 1.15")
def test_warp_grid_without_grid_stride_matches_wp_launch(fake_warp_gpu):
    """Warp's `wp_cuda_launch_kernel` has at most 2**24 threads along x: 2**19 blocks of 32.  The others are along y."""

    @wp.kernel(module="unique", grid_stride=False)
    def nothing(out: floats):
        wp.tid()

    run_for_cuda(xk.warp_kernel(nothing, spec(1), launch_dims=2**24 + 1, block_dim=32, zero_outputs=True))
    assert [grid for grid, *_ in fake_warp_gpu.launches] == [(2**19, 2, 1)]


# -- batch launches: on the fake GPU, and on a real one --------------------------------------------------


class WarpBatch(typing.NamedTuple):
    """A kernel and a batch of inputs, by default of three slices of seven elements."""

    body: str
    in_jax: Callable  # the same function of a slice
    inputs: tuple = TWO_BATCHES
    parameters: str = "x: floats, y: floats, out: floats"
    options: typing.Any = types.MappingProxyType({})
    values: tuple = ()  # arguments after the inputs
    axes: typing.Any = 0  # of the inputs, for vmap
    is_gradient: bool = False  # whether the test computes the gradient of the kernel
    reason: str | None = None  # why three slices are three launches


# A batch kernel begins with a statement for each array parameter, such as `x = move(x, step)`.  This kernel assigns to
# its parameters, too, and passes them to functions.
REASSIGNED_PARAMETERS = """if i == 6: return
z = out
for k in range(wp.static(6)):
    if k == i:
        x = y
if i % 2 == 0:
    z[i] = x[i] * FACTOR
else:
    add(out, i, tail(x)[0])"""
X_OUT = "x: floats, out: floats"
ADD_TWICE_Y = "out[i] = x[i] + 2.0 * y[i]"
STENCIL = "out[i] = wp.sin(x[i]) * y[i] + x[wp.max(i - 1, 0)]"
SQUARES_OF_ROWS = "row = x[i]\ns = float(0.0)\nfor j in range(row.shape[0]):\n    s += row[j] * row[j]\nout[i] = s"
DOUBLE_TILES = "i, t = wp.tid()\nwp.tile_store(out, 2.0 * wp.tile_load(x, shape=64, offset=i * 64), offset=i * 64)"
USER_CODE = "it has C++ code, adjoints or code transformers of your own, or calls a function that is an argument"


def add_twice_y(x, y, *others):
    return x + 2 * y


def twice(x):
    return 2 * x


@jax.custom_jvp
def twice_with_derivative_3(x):
    return 2 * x


twice_with_derivative_3.defjvp(lambda primals, tangents: (2 * primals[0], 3 * tangents[0]))


WARP_BATCHES = {
    "unbatched operand": WarpBatch(ADD_TWICE_Y, add_twice_y, BATCH_AND_UNBATCHED, axes=FIRST_IS_BATCHED),
    "large blocks": WarpBatch(
        ADD_TWICE_Y, add_twice_y, (uniform(3, 1030), uniform(3, 1030, seed=1)), options={"block_dim": 1024}),
    "four dimensions": WarpBatch(
        "i, j, k, m = wp.tid()\nout[i, j, k, m] = x[i, j, k, m] + float(12 * i + 6 * j + 2 * k + m)",
        lambda x: x + np.arange(24, dtype="f4").reshape(x.shape), (uniform(3, 2, 2, 3, 2),), "x: cubes, out: cubes"),
    "dtypes and views": WarpBatch(
        "i, j, k = wp.tid()\nout[i, j, k] = wp.where(c[i], x[i][j, k] + wp.float16(b[i]), wp.float16(q[i][3]))",
        lambda x, b, c, q: jnp.where(c[:, None, None], x + b[:, None, None], q[:, 3:, None]).astype("f2"),
        (uniform(3, 2, 3, 2).astype("f2"), np.arange(6, dtype="u1").reshape(3, 2), np.eye(3, 2, dtype=bool),
         uniform(3, 2, 4)),
        "x: halves, b: wp.array(dtype=wp.uint8), c: wp.array(dtype=wp.bool), q: wp.array(dtype=wp.quat), out: halves"),
    "in-out from unbatched operand": WarpBatch(
        "y[i] = x[i] + 2.0 * y[i]", add_twice_y, BATCH_AND_UNBATCHED, "x: floats, y: floats",
        {"outs": like_last, "in_out_argnames": ["y"]}, axes=FIRST_IS_BATCHED),
    "values": WarpBatch(
        "out[i] = x[i] + v[1] + float(s)\nif none:\n    out[i] = none[i]", lambda x: x + 7, TWO_BATCHES[:1],
        "x: floats, v: wp.vec3, s: wp.int64, none: floats, out: floats", values=((1, 2, 3), 5, None)),
    "gradient": WarpBatch(STENCIL, lambda x, y: jnp.sin(x) * y + shift_and_add(x, 0), is_gradient=True),
    "gradient of matrices and vectors": WarpBatch(
        "out[i] = m[i] * v[i]", lambda m, v: jnp.einsum("nij,nj->ni", m, v), (uniform(3, 6, 2, 2), uniform(6, 2)),
        "m: matrices, v: vectors, out: vectors", {"outs": like_last}, axes=FIRST_IS_BATCHED, is_gradient=True),
    "gradient of views of rows": WarpBatch(
        SQUARES_OF_ROWS, lambda x: (x * x).sum(1), (uniform(3, 2, 4),), "x: rows, out: floats",
        {"outs": spec(2), "launch_dims": 2}, is_gradient=True),
    "gradient of different outputs": WarpBatch(
        "squares[i] = x[i] * x[k[i]]\nwp.atomic_add(sines, 0, wp.sin(x[i]))\ncount[i] = 1",
        lambda x, k: (x * x[k], jnp.sin(x).sum()), (uniform(3, 5), np.array([1, 1, 3, 0, 2], np.int32)),
        "x: floats, k: ints, squares: floats, sines: floats, count: ints",
        {"outs": (spec(5), spec(1), spec(5, dtype=np.int32)), "zero_outputs": True}, axes=FIRST_IS_BATCHED,
        is_gradient=True),
    "gradient of tiles": WarpBatch(
        DOUBLE_TILES, twice, (uniform(3, 128),), X_OUT, {"launch_dims": 2, "tiled": True, "block_dim": 64},
        is_gradient=True),
    "empty and 0-d": WarpBatch(
        "out[i] = x[i] + 2.0 * y[0] + float(z.shape[0])", add_twice_y,
        (TWO_BATCHES[0], uniform(3), np.zeros((3, 0), np.float32)), "x: floats, y: floats, z: floats, out: floats",
        {"launch_dims": 7}),
    "reassigned parameters": WarpBatch(
        REASSIGNED_PARAMETERS, lambda x, y: jnp.where(np.arange(7) % 2, y[1], 2.5 * y).at[6].set(0),
        options={"zero_outputs": True}),
    "overload": WarpBatch(
        "out[i] = x[i] + x[i]", twice, TWO_BATCHES[:1], "x: wp.array(dtype=Any), out: wp.array(dtype=Any)"),
    "sequential": WarpBatch(
        ADD_TWICE_Y, add_twice_y, options=IN_ORDER, reason="vmap_method says that slices run in order"),
    "C++": WarpBatch("out[i] = add_one_in_cpp(x[i])", lambda x: x + 1, TWO_BATCHES[:1], X_OUT, reason=USER_CODE),
    "gradient with a custom adjoint": WarpBatch(
        "out[i] = y[i] * double(y, count, i)", lambda count, y: y * twice_with_derivative_3(y),
        (np.zeros((3, 7), np.int32), TWO_BATCHES[0]), "count: ints, y: floats, out: floats", {"outs": like_last},
        is_gradient=True, reason=USER_CODE),
}  # fmt: skip


@functools.cache
def batch_kernels():
    """Return {name: kernel} for WARP_BATCHES."""
    modules = collections.defaultdict(dict)
    for name, batch in WARP_BATCHES.items():  # Warp builds a module again for blocks of another size, as of tiles
        module = "tiles" if "tiled" in batch.options else "gradients of batches" if batch.is_gradient else "batches"
        modules[module][name] = batch.parameters, batch.body
    kernels = {}
    for module, sources in modules.items():
        kernels |= warp_kernels_from(sources, module, has_adjoints=module != "batches")
    return kernels | {"overload": wp.overload(kernels["overload"], [floats, floats])}


def batch_wrapper(name):
    batch = WARP_BATCHES[name]
    return xk.warp_kernel(
        batch_kernels()[name], **{"outs": like_first, "differentiable": batch.is_gradient, **batch.options}
    )


def batch_and_reference(name):
    """Return a kernel, or its gradient, as a function of a slice of the inputs, and the results of the batch in JAX."""
    batch, call = WARP_BATCHES[name], batch_wrapper(name)
    function, in_jax = lambda *slices: call(*slices, *batch.values), batch.in_jax
    if batch.is_gradient:
        function, in_jax = gradient(call, batch.inputs), gradient(in_jax, batch.inputs)
    return function, jax.vmap(in_jax, batch.axes)(*batch.inputs)


@pytest.fixture(params=[pytest.param("fake", marks=needs_fake_warp_gpu), pytest.param("gpu", marks=needs_warp_gpu)])
def counting_warp(request, driver_calls):
    if request.param == "gpu":
        return CountingGpu(driver_calls, run_on_gpu)
    request.getfixturevalue("fake_warp_gpu")
    return CountingGpu(driver_calls, run_for_cuda)


@pytest.mark.parametrize("name", WARP_BATCHES)
def test_warp_batch_is_one_launch_or_logs_why_not(counting_warp, name, fallback_reasons):
    """Rows with a reason are three launches, for three slices.  A gradient has a second launch, of the adjoint."""
    batch, (function, expected) = WARP_BATCHES[name], batch_and_reference(name)
    n_launches = (3 if batch.reason else 1) * (2 if batch.is_gradient else 1)
    counting_warp.check_batch(function, batch.inputs, n_launches, expected, batch.axes)
    assert fallback_reasons() == {batch.reason} - {None}


@needs_warp
@pytest.mark.parametrize("name", [
    "unbatched operand", "dtypes and views", "in-out from unbatched operand", "values", "gradient",
    "gradient of different outputs", "gradient of tiles", "empty and 0-d", "sequential",
])  # fmt: skip
def test_warp_batch_on_cpu_matches_jax(name):
    """On a CPU, a batch is a launch per slice.  The other kernels of the table differ in their batch launches only."""
    batch, (function, expected) = WARP_BATCHES[name], batch_and_reference(name)
    check_close(jax.jit(jax.vmap(function, batch.axes))(*batch.inputs), expected, 1e-4)


@pytest.mark.parametrize("n_threads", [1, 64], ids=["one thread", "whole blocks"])
def test_warp_tiles_need_whole_blocks_on_gpu(warp_platform, n_threads):
    """On a CPU, a block has one thread."""
    kernel, x = batch_kernels()["gradient of tiles"], uniform(128)
    f = xk.warp_kernel(kernel, like_first, launch_dims=(2, n_threads), block_dim=64)
    if warp_platform == "cpu" or n_threads == 64:
        check_close(f(x), 2 * x)
    else:
        with pytest.raises(ValueError, match=r"all 64 threads of a block .* are 2 threads.*Pass tiled=True"):
            f(x)


def new_warp_kernel(**options):
    """Return a new kernel for x + factor * y, and its factor, which no other kernel has."""
    factor = next(KERNEL_NUMBERS)

    @wp.kernel(module="unique", enable_backward=False, **options)
    def add_multiple(x: floats, y: floats, out: floats):
        i = wp.tid()
        out[i] = x[i] + float(factor) * y[i]

    return add_multiple, factor


@pytest.mark.parametrize("options", [
    {}, pytest.param({"grid_stride": False}, marks=pytest.mark.needs("warp 1.15"))
], ids=["default", "no grid_stride"])  # fmt: skip
def test_warp_batch_kernel_is_built_once_for_all_threads_and_operands(counting_warp, monkeypatch, options):
    built = record_calls(monkeypatch, xk, "_create_batch_kernel")
    kernel, factor = new_warp_kernel(**options)
    call, (x, y) = xk.warp_kernel(kernel, like_first), TWO_BATCHES
    counting_warp.check_concurrent_batches(call, x + factor * y)
    x, y = BATCH_AND_UNBATCHED
    counting_warp.check_batch(call, (x, y), 1, x + factor * y, FIRST_IS_BATCHED)
    assert len(built) == 1


@pytest.mark.parametrize("axes, x_shape, y_shape, n_launches", [
    # in_axes from the outer vmap to the inner one; a grid has 65,535 blocks along z
    pytest.param([(0, None), (0, None)], (3, 2, 7), (7,), 1, id="constant stride"),
    pytest.param([(0, None), (None, 0)], (3, 7), (2, 7), 3, id="no constant stride"),
    pytest.param([(0, 0)], (70_000, 7), (70_000, 7), 2, id="70,000 slices"),
])  # fmt: skip
def test_warp_nested_batch_takes_few_launches(counting_warp, axes, x_shape, y_shape, n_launches):
    call, in_jax = batch_wrapper("unbatched operand"), add_twice_y
    for in_axes in reversed(axes):
        call, in_jax = jax.vmap(call, in_axes), jax.vmap(in_jax, in_axes)
    x, y = uniform(*x_shape), uniform(*y_shape, seed=1)
    counting_warp.check(lambda: counting_warp.run(call, x, y), n_launches, in_jax(x, y))


@needs_fake_warp_gpu
def test_warp_batch_kernel_is_built_at_trace_if_named(fake_warp_gpu, monkeypatch):
    """An exported program may contain a batch, and run in a process that lowers no batch."""
    monkeypatch.setattr(xk, "_default_platform", lambda: "gpu")
    kernel, _ = new_warp_kernel()
    rows = [  # options, and how many handlers a trace adds, and the trace and a batch together
        ({}, 1, 2),
        ({"name": new_name("two")}, 2, 2),
        ({"name": new_name("one"), **IN_ORDER}, 1, 1),
    ]
    for options, by_trace, by_both in rows:
        call = xk.warp_kernel(kernel, like_first, **options)
        before = len(fake_warp_gpu.handlers)
        jax.eval_shape(call, spec(7), spec(7))
        assert len(fake_warp_gpu.handlers) == before + by_trace
        run_for_cuda(jax.vmap(call), *TWO_BATCHES)
        assert len(fake_warp_gpu.handlers) == before + by_both


BUILD_FAILED = r"\w+: .* build failed"
if conftest.missing("warp 1.15"):  # Warp 1.14 reports it only once, so a second lowering logs the AttributeError
    BUILD_FAILED += "|AttributeError: .*'hooks'"
FALLBACK_CAUSES = {  # a pattern of the logged reasons, and a function that changes the kernel or the library
    "code transformers": (
        re.escape(USER_CODE), lambda patch, kernel: patch.setattr(kernel.adj, "transformers", [ast.NodeTransformer()])),
    "changed captured value": (
        "captured values have changed",
        lambda patch, kernel: patch.setattr(kernel.func.__closure__[0], "cell_contents", 0.5)),
    "failed build": (
        BUILD_FAILED, lambda patch, kernel: patch.setattr(xk, "_ADVANCE_SNIPPET", "this is no C++ {field}")),
    "too many registers": (
        "the batch kernel exceeds a limit; .* at most 255 thre",
        lambda patch, kernel: patch.setattr(xk._LibCuda, "function_attribute", lambda *args: 255)),
}  # fmt: skip


@pytest.mark.parametrize("pattern, change", named_rows(FALLBACK_CAUSES))
def test_warp_batch_not_in_one_launch_logs_reason(counting_warp, fallback_reasons, monkeypatch, pattern, change):
    """The first call compiles the kernel, so later launches also use the values captured then."""
    kernel, factor = new_warp_kernel()
    call, (x, y) = xk.warp_kernel(kernel, like_first), TWO_BATCHES
    counting_warp.run(call, x[0], y[0])
    change(monkeypatch, kernel)
    counting_warp.check_batch(call, TWO_BATCHES, 3, x + factor * y)
    reasons = fallback_reasons()
    assert reasons and all(re.match(pattern, text) for text in reasons)


# -- read-only inputs, outputs that start from zeros -----------------------------------------------------

WARP_PROGRAM_DEFINITIONS = """
@wp.struct
class Quantity: size: floats
@wp.struct
class Vectors: a: vectors
@wp.struct
class Box: pos: floats; mass: floats
@wp.struct
class Scaled: a: floats; n: float
@wp.func
def add_product(p: float, q: float, a: floats): a[0] += p * q
@wp.func
def add_by_keywords(a: floats, i: int): add(i=i, a=a, value=1.0)
@wp.func
def store(a: floats, i: int, value: float): a[i] = value
@wp.func
def store(a: floats, i: int): store(a, i, 3.0)
@wp.func
def store_generic(a: Any, i: int): a[i] = 1.0
@wp.func
def load_or_store(a: floats): return a[0]
@wp.func
def load_or_store(a: Any, i: int): a[i] = 1.0
@wp.func
def load(a: floats, i: int, n: int): return a[i + n]
@wp.func
def load(a: floats, i: int): return load(a, i, 0)
@wp.func
def negative(a: floats, i: int): return -a[i]
@wp.func
def second_and_tail(a: floats): return a[1], a[1:]
@wp.func
def both_tails(a: floats, b: floats): return a[1:], b[1:]
@wp.func
def set_pos(b: Box, i: int): b.pos[i] = 2.0 * b.mass[i]
@wp.func
def replace_pos(b: Box, a: floats): b.pos = a
@wp.func
def fill(boxes: wp.array(dtype=Box), a: floats): boxes[0].pos = a
@wp.func
def set_first(boxes: wp.array(dtype=Box), i: int): boxes[0].pos[i] = 1.0
@wp.func
def set_first_through_view(boxes: wp.array(dtype=Box), i: int): pos = boxes[0].pos; pos[i] = 1.0
@wp.func
def sine(h: Holder, i: int): return wp.sin(h.a[i])
@wp.func
def increment_copy(q: Vectors, i: int): v = q.a[i]; v[0] += 1.0; return v[0]
@wp.func
def choose(first: bool, a: floats, b: floats):
    if first: return a
    return b
@wp.func_native("a.data[i] = 1.0f;")
def store_in_cpp(a: floats, i: int): ...
if hasattr(wp, "ref"):  # Warp >= 1.19
    @wp.func
    def set_ref(r: wp.ref[float]): r = 1.0
    @wp.func_native("r = 1.0f;")
    def set_in_cpp(r: wp.ref[float]): ...
    @wp.func
    def set_field(r: wp.ref[Box], i: int): r.pos[i] = 1.0
    @wp.func
    def fill_by_reference(r: wp.ref[Box], a: floats): r.pos = a
    @wp.func
    def replace_by_reference(r: wp.ref[floats], a: floats): r = a
"""  # fmt: skip
WARP_PROGRAMS = {  # {what the kernel does: {name: body}}.  The parameters are x, y and out
    "writes to y": {
        "a starred vector before an array": "v = wp.vec2(1.0, 2.0)\nadd_product(*v, y)",
        "element": "y[i] = 1.0",
        "atomic by keywords": "wp.atomic_add(arr=y, i=i, value=1.0)",
        "tile": "wp.tile_store(y, wp.tile_load(out, shape=2))",
        "function with keywords": "add_by_keywords(y, i)",
        "slice from a function": "tail(y)[i] = 1.0",
        "slice of a slice from a function": "s = slice(0, 2, 1)\nz = tail(y)\nw = z[s]\nw[0] = 1.0",
        "tuple from a function": "second, z = second_and_tail(y)\nz[i] = second",
        "field of a struct": "h = Holder()\nh.a = y\nadd(h.a, i, 1.0)",
        "field named like metadata": "q = Quantity()\nq.size = y\nq.size[i] = 1.0",
        "field of a struct in an array": "s = wp.zeros(shape=2, dtype=Holder)\ns[0] = Holder(y)\ns[0].a[i] = 1.0",
        "struct in an array that a function fills":
            "s = wp.zeros(shape=2, dtype=Box)\nfill(s, y)\ns[0].pos[i] = 1.0",
        "functions that fill and use an array of structs":
            "s = wp.zeros(shape=2, dtype=Box)\nfill(s, y)\nset_first(s, i)",
        "view of a field of a struct in an array in a function":
            "s = wp.zeros(shape=2, dtype=Box)\nfill(s, y)\nset_first_through_view(s, i)",
        "function": "store(y, i, 1.0)",
        "overload by keywords": "store(a=y, i=i, value=1.0)",
        "generic function": "store_generic(y, i)",
        "generic overload": "load_or_store(y, i)",
        "element after an ambiguous store": "z = out\nif i > 0:\n    z = y\nz[i] = 1.0\ny[i] = 2.0",
    },
    "writes to x": {
        "component": "x[i][0] = 1.0",
        "where": "wp.where(i > 0, x, x)[i][0] = 1.0",
    },
    "may write to y": {
        "builtin with an output parameter": "wp.dense_solve(n=1, A=out, L=out, b=out, x=y)",
        "C++": "store_in_cpp(y, i)",
    },
    "writes to y by reference": {
        "field of a struct": "b = Box()\nb.pos = y\nset_field(b, i)",
        "struct that a function fills": "b = Box()\nfill_by_reference(b, y)\nb.pos[i] = 1.0",
        "array that a function assigns": "b = Box()\nreplace_by_reference(b.pos, y)\nb.pos[i] = 1.0",
    },
    "may write to y by reference": {
        "element": "set_ref(y[i])",
        "C++": "set_in_cpp(y[i])",
    },
    "writes to y or out": {
        "variable after a branch": "z = out\nif i > 0:\n    z = y\nz[i] = 1.0",
        "variables swapped in a loop":
            "src = y\ndst = out\ndst[i] = src[i]\n"
            "for k in range(2):\n    src, dst = dst, src\n    dst[i] = src[i] + 1.0",
        "variable of the previous iteration": "z = out\nfor k in range(2):\n    z[k] = 1.0\n    z = y",
        "function of a struct": "b = Box(y, out)\nset_pos(b, i)",
        "copied struct": "b = Box(out, y)\nc = b\nc.pos = y\nc.pos[i] = 1.0",
        "field after a branch": "b = Box()\nb.mass = out\nb.pos = out\nif i > 0:\n    b.pos = y\nb.pos[i] = 1.0",
        "branch in a function": "choose(i > 0, y, out)[i] = 1.0",
    },
    "updates out": {
        "atomic sum": "wp.atomic_add(out, 0, y[i])",
        "augmented assignment": "out[i] += 1.0",
        "conditional store": "if y[i] > 0.5:\n    out[i] = y[i]",
        "tile": "wp.tile_atomic_add(out, wp.tile_load(y, shape=2))",
        "function with keywords": "add_by_keywords(out, i)",
        "field of a struct": "h = Holder()\nh.a = out\nwp.atomic_add(h.a, i, 1.0)",
    },
    "updates vectors": {"component": "out[i].y -= 1.0"},
    "stores to out": {  # and changes no input
        "element": "out[i] = y[i]",
        "tile": "wp.tile_store(out, wp.tile_load(y, shape=2))",
        "conditional expression": "for k in range(3):\n    out[i] = out[i] + y[k] if k > 0 else y[k]",
        "swapped variables": "src = y\ndst = out\nsrc, dst = dst, src\nsrc[i] = dst[i]",
        "copy of a vector and lower_bound":
            "v = x[i]\nv[0] = 9.0\nn = wp.lower_bound(y, -9.0) + len(y)\nout[i] = v[0] + x[i][0] + float(n)",
        "sample_cdf": "out[i] = float(wp.sample_cdf(wp.rand_init(7, i), y))",
        "function of a struct": "b = Box(out, y)\nset_pos(b, i)",
        "copied struct": "b = Box(pos=out, mass=y)\nc = b\nc.mass = c.pos\nb.pos[i] = b.mass[i]",
        "function that changes its struct": "b = Box(out, y)\nreplace_pos(b, y)\nb.pos[i] = b.mass[i]",
        "pair of slices": "a, b = both_tails(y, out)\nb[i] = a[i]\nout[0] = 1.0",
        "functions": "store(out, i, negative(y, i))",
        "functions that call other overloads": "store(out, i)\nout[i] += load(y, i)",
        "wp.copy": "z = wp.copy(out)\nz[i] = y[i]",
        "where": "w = wp.where(i > 0, y, y)\nout[i] = w[i] + float(w.shape[0])",
        "elements of structs in functions":
            "h = Holder()\nh.a = y\nout[i] = wp.sin(h.a[i]) + sine(h, i) + wp.sin(wp.where(i > 0, y, y)[i])",
        "copy of a vector in a struct":
            "q = Vectors()\nq.a = x\nv = q.a[i]\nv[0] = 9.0\nout[i] = v[0] + increment_copy(q, i)",
        "size in a struct": "m = Scaled()\nm.a = out\nm.n = float(y.size)\nm.a[i] = m.n + y[i]",
        "starred vector": "v = wp.vec2(y[i], 1.0)\nout[i] = wp.max(*v)",
        "array and number assigned together": "a, b = x, y[i]\nv = a[i]\nv[0] = b\nout[i] = v[0]",
        "while loop": "k = int(0)\nwhile k < 2:\n    out[k] = y[k]\n    k += 1",
        "branch in a function": "choose(True, out, out)[i] = choose(i > 0, y, y)[i]",
    },
    "stores to out by reference": {
        "element": "set_ref(out[i])",
        "struct that a function fills": "b = Box()\nfill_by_reference(b, y)\nout[i] = b.pos[i]",
    },
    "never stores": {
        "shape": "n = out.shape[0]",
        "length": "if i > 9:\n    n = len(out)",
        "assignment to the variable": "out = y",
        "read through a struct": "b = Box(y, out)\nm = b.mass[i] + b.pos[i]",
    },
}  # fmt: skip
EFFECTS_BY_REFERENCE = (  # Warp >= 1.19
    "writes to y by reference", "may write to y by reference", "stores to out by reference"
)  # fmt: skip
VECTORS_AND_FLOATS = uniform(3, 2), uniform(3, seed=1)  # x and y


@functools.cache
def warp_programs():
    """Return {(what the kernel does, name): kernel} for the table above, with one module for all."""
    sources = {}
    for effect, bodies in WARP_PROGRAMS.items():
        type_of_out = "vectors" if effect == "updates vectors" else "floats"
        for name, body in bodies.items():
            if effect not in EFFECTS_BY_REFERENCE or not conftest.missing("warp 1.19"):
                sources[effect, name] = f"x: vectors, y: floats, out: {type_of_out}", body
    return warp_kernels_from(sources, "programs", definitions=WARP_PROGRAM_DEFINITIONS)


def each_program(*effects):
    """Parametrize a test by the programs that have one of these effects."""
    marks = {effect: pytest.mark.needs("warp 1.19") for effect in EFFECTS_BY_REFERENCE}
    return pytest.mark.parametrize("effect, name", [
        pytest.param(effect, name, id=f"{effect}: {name}", marks=marks.get(effect, ()))
        for effect in effects for name in WARP_PROGRAMS[effect]
    ])  # fmt: skip


def after_wp_launch(kernel, out):
    """Return the arrays after `wp.launch` with two threads.  The output starts from `out`."""
    pairs = zip((*VECTORS_AND_FLOATS, out), kernel.adj.args)
    arrays = [wp.array(np.array(array), dtype=arg.type.dtype, device="cpu") for array, arg in pairs]
    wp.launch(kernel, dim=2, inputs=arrays, device="cpu")
    return tuple(array.numpy() for array in arrays)


@needs_warp
@each_program(
    "writes to x", "writes to y", "writes to y by reference", "may write to y", "may write to y by reference"
)  # fmt: skip
def test_warp_write_to_input_raises(effect, name):
    """As in-out arguments, the same kernels give what `wp.launch` gives."""
    kernel = warp_programs()[effect, name]
    verb, written = re.match("(writes|may write) to ([xy])", effect).groups()
    advice = f".*only reads '{written}'" if verb == "may write" else ""
    text = rf" {verb} to input '{written}' \(`.*` in function '\w+'\).*in_out_argnames{advice}"
    with pytest.raises(TypeError, match=text):
        jax.eval_shape(xk.warp_kernel(kernel, like_last, launch_dims=2, zero_outputs=False), *VECTORS_AND_FLOATS)
    options = {"in_out_argnames": ["x", "y"], "zero_outputs": True, "launch_dims": 2}
    results = xk.warp_kernel(kernel, lambda x, y: (x, y, y), **options)(*VECTORS_AND_FLOATS)
    check_close(results, after_wp_launch(kernel, np.zeros(3, np.float32)))


@needs_warp
@each_program("writes to y or out")
def test_warp_ambiguous_write_changes_a_copy_of_input(effect, name):
    """The output is as after `wp.launch` with a copy of y.  In a batch, each slice has a copy of its own."""
    kernel, (x, y) = warp_programs()[effect, name], map(jnp.array, VECTORS_AND_FLOATS)
    f = xk.warp_kernel(kernel, like_last, launch_dims=2)
    expected = after_wp_launch(kernel, np.zeros(3, np.float32))[2]
    check_close(f(x, y), expected)
    check_close(jax.vmap(f, (0, None))(jnp.stack([x, x]), y), [expected, expected])
    jax.tree.map(np.testing.assert_array_equal, (x, y), VECTORS_AND_FLOATS)


@needs_warp
@each_program("updates out", "updates vectors", "stores to out", "stores to out by reference")
def test_warp_correct_kernel_matches_wp_launch(effect, name):
    """Outputs start from zeros, or from an in-out argument."""
    kernel, out = warp_programs()[effect, name], spec(3, 2) if effect == "updates vectors" else spec(3)
    zeros, start = np.zeros(out.shape, np.float32), uniform(*out.shape)
    check_close(xk.warp_kernel(kernel, out, launch_dims=2)(*VECTORS_AND_FLOATS), after_wp_launch(kernel, zeros)[2])
    in_place = xk.warp_kernel(kernel, out, launch_dims=2, in_out_argnames=["out"])
    check_close(in_place(*VECTORS_AND_FLOATS, start), after_wp_launch(kernel, start)[2])


@needs_warp
@each_program("never stores")
def test_warp_output_never_stored_to_raises(effect, name):
    """In-out arguments are rejected, too, because they would return the old values.  Scratch is not."""
    kernel = warp_programs()[effect, name]

    def trace(*args, outs=like_last, **options):
        return jax.eval_shape(xk.warp_kernel(kernel, outs, launch_dims=2, **options), *args)

    message = r"never stores to .*'out'.*Write `out\[i\] = \.\.\.`.*zero_outputs=True"
    for args, options in ((), {}), (VECTORS_AND_FLOATS[1:], {"in_out_argnames": ["out"]}):
        with pytest.raises(TypeError, match=message):
            trace(*VECTORS_AND_FLOATS, *args, **options)
    for zero_outputs in (True, False):
        trace(*VECTORS_AND_FLOATS, zero_outputs=zero_outputs)
    trace(*VECTORS_AND_FLOATS, outs=(), scratch=spec(3), has_side_effect=True)


@pytest.mark.parametrize("key", [2, "v"], ids=["position", "name"])
def test_warp_alias_key_is_position_among_all_arguments_or_name(key, warp_platform):
    """The kernel may store through the aliased input, because it shares its memory with the output."""
    kernel = warp_kernel_from_body("x: floats, gain: float, v: floats, out: floats", "v[i] += gain * x[i]")
    f = xk.warp_kernel(kernel, like_first, input_output_aliases={key: 0})
    x, before = TWO_VECTORS
    v, batch = jnp.array(before), jnp.stack([before, -before])
    check_close(f(x, 2.0, v), before + 2 * x)
    check_close(jax.vmap(lambda v: f(x, 2.0, v))(batch), [2 * x + before, 2 * x - before])
    check_close((v, batch), (before, [before, -before]), 0)


SUM_OF_POSITIVE = "if x[i] > 0.0:\n    out[i] = x[i]\n    work[i] += 1.0\nwp.atomic_add(total, 0, work[i])"


def warp_sum_of_positive(**options):
    """Wrap a kernel that stores to some elements of an output, and adds to another output and to scratch.

    It has three inputs that it does not use, with the shapes of these buffers.
    """
    parameters = ("unused", "unused_total", "unused_work", "x", "out", "total", "work")
    kernel = warp_kernel_from_body(": floats, ".join(parameters) + ": floats", SUM_OF_POSITIVE)
    outs = lambda *inputs: (inputs[-1], spec(1))
    return xk.warp_kernel(kernel, outs, scratch=like_last, launch_dims=50, **options)


@pytest.mark.parametrize("zero_outputs, start", [(None, 0), (False, 7)], ids=["default", "zero_outputs=False"])
def test_warp_outputs_and_scratch_start_from_zeros(zero_outputs, start, warp_platform, monkeypatch):
    """XLA is told that the buffers share the memory of the first three inputs, which hold sevens.

    Without zeros, the kernel reads the sevens.  This shows that the buffers do share this memory.
    """
    lower, aliases = jax.ffi.ffi_lowering, {0: 0, 1: 1, 2: 2}
    with_aliases = lambda target, **options: lower(target, **{**options, "operand_output_aliases": aliases})
    monkeypatch.setattr(jax.ffi, "ffi_lowering", with_aliases)
    call, x = warp_sum_of_positive(zero_outputs=zero_outputs), uniform(6, 50)
    sevens, seven = np.full_like(x, 7), np.full((6, 1), 7, np.float32)
    work = start + (x > 0).astype("f4")
    batch, expected = (sevens, seven, sevens, x), (np.where(x > 0, x, start), start + work.sum(1, keepdims=True))
    check_close(jax.jit(jax.vmap(call))(*batch), expected)
    check_close(jax.jit(call)(*[rows[0] for rows in batch]), tuple(rows[0] for rows in expected))


def test_warp_batch_zeroes_each_new_buffer_once(counting_warp):
    """The output and the scratch buffer have 50 elements in each of 6 slices, and the sum has one."""
    call, driver_calls, x = jax.vmap(warp_sum_of_positive()), counting_warp.driver_calls, uniform(6, 50)
    _, n_launches = driver_calls.run(lambda: counting_warp.run(call, x, x[:, :1], x, x))
    assert (n_launches, sorted(driver_calls.memsets)) == (1, [4 * 6, 4 * 6 * 50, 4 * 6 * 50])


@needs_warp
def test_warp_single_vector_may_omit_leading_dimension():
    m, v = uniform(2, 2), uniform(2)
    check_close(xk.warp_kernel(warp_kernels().matvec, spec(1, 2))(m, v), (m @ v)[None])


def kernel_with_table(table, module):
    """Create a kernel whose `wp.static` is evaluated only in the build, because `j` is the variable of a loop."""

    @wp.kernel(module=module, enable_backward=False)
    def weighted(x: floats, out: floats):
        i = wp.tid()
        for j in range(2):
            out[i] += x[i] * wp.static(table[j])

    return xk.warp_kernel(weighted, like_first)


STATIC_TABLES = {  # module, factors of kernels, whether each is called before the next is created, whether it warns
    "one module": ("static tables", [1.0, 2.0, 3.0, 4.0], False, True),
    "unique modules": ("unique", [1.0, 2.0], False, False),
    "equal tables": ("equal tables", [2.0, 2.0, 2.0, 2.0], False, False),
    "one after another": ("tables in turn", [1.0, 2.0], True, False),
}


@needs_warp
@pytest.mark.parametrize("case", STATIC_TABLES)
def test_warp_deferred_static_warns_if_kernels_look_equal(case, recwarn):
    module, factors, in_turn, warns = STATIC_TABLES[case]
    module = module if module == "unique" else wp.get_module(module)
    kernels = []
    for factor in factors:
        kernels.append(kernel_with_table((factor, 2 * factor), module))
        if in_turn:
            kernels[-1](THREE_FLOATS)
    warnings.simplefilter("always")
    results = [kernel(THREE_FLOATS) for kernel in kernels]
    found = [warning for warning in recwarn if "may run the code of another kernel" in str(warning.message)]
    assert bool(found) == warns
    if warns:
        assert re.search(r"'weighted' .*wp.static.*module=\"unique\"", str(found[0].message))
        assert found[0].filename == __file__
    else:
        check_close(results, [3 * factor * THREE_FLOATS for factor in factors])


# -- gradients: where Warp's adjoint is wrong, a warning is raised ---------------------------------------


def row_loop(statement, then="out[i] = s", start="0.0", length="x.shape[1]"):
    """Return statements that update `s` in a loop, by default over the elements of a row, and those after the loop."""
    return f"s = float({start})\nfor j in range({length}):\n    {statement}\n{then}"


ADD, COUNT = "s += x[i, j]", "m = int(0)\nfor j in range(x.shape[1]):\n    m += 1\n"


def square_of_sum(x):
    return x.sum() ** 2


WARP_GRADIENT_DEFINITIONS = """
@wp.func
def times_row(p: float, x: rows, i: int):
    for j in range(x.shape[1]): p = p * x[i, j]  # wrong: p
    return p
@wp.func
def params_times_row(p: Params, x: rows, i: int):
    for j in range(x.shape[1]): p.a = p.a * x[i, j]  # wrong: p
    return p.a
@wp.func
def mean(x: rows, i: int, n: int):
    s = float(0.0)
    for j in range(n): s += x[i, j]
    return s / float(n)
@wp.func
def small_elements(x: rows, i: int):
    n = int(0)
    while n < 2 and x[i, n] < 1.2: n += 1
    return n
"""
# The body for a row of x, and the same function in JAX.  The test expects a warning exactly if the code has a comment,
# for example `# wrong: s`: Warp's adjoint of this line uses a wrong value of `s`.
WARP_GRADIENTS = {
    "sum of squares": (row_loop("s += x[i, j] * x[i, j]"), lambda x: x @ x),
    "decaying sum": (row_loop("s = 0.5 * s + x[i, j]"), lambda x: x @ 0.5 ** jnp.arange(3, -1, -1)),
    "mean in a function": ("s = mean(x, i, 4)\nout[i] = s * s", lambda x: x.mean() ** 2),
    "branch in a loop": (row_loop("if x[i, j] > 0.9: s += x[i, j]"), lambda x: x @ (x > 0.9)),
    "branch that assigns a stale value": (
        row_loop(ADD, "a = x[i, 0]\nif i < 5:\n    a = s\nout[i] = a * a  # wrong: a"), square_of_sum),
    "stale condition of while": (
        f"{COUNT}k = int(0)\nwhile k < m:  # wrong: m\n    k += 1\n    out[i] += x[i, 0]", lambda x: 4 * x[0]),
    "counted length": (f"{COUNT}s = float(0.0)\nfor j in range(m):  # wrong: m\n    {ADD}\nout[i] = s", jnp.sum),
    "maximum by a branch": (
        "s = x[i, 0]\nfor j in range(x.shape[1]):\n    if x[i, j] > s:  # wrong: s\n        s = x[i, j]\nout[i] = s",
        jnp.max),
    "value passed through three variables": (
        "a, b, c = float(0.0), float(0.0), float(0.0)\n"
        + row_loop("s += a * a  # wrong: a\n    a = b\n    b = c\n    c = x[i, j]"), lambda x: x[0] ** 2),
    "quotient": (row_loop("s = s / x[i, j]  # wrong: s", start="1.0"), lambda x: 1 / jnp.prod(x)),
    "while loop": (
        "s = float(0.0)\nj = int(0)\nwhile j < x.shape[1]:\n    s += x[i, j]  # wrong: j\n    j += 1\nout[i] = s",
        jnp.sum),
    "length from a tuple": (
        "n = 4\nm = 4\nn, m = x.shape[1], 4\n" + row_loop("s = s * x[i, j]  # wrong: s", start="1.0", length="n"),
        jnp.prod),
    "length from a branch": (
        "n = 20\nif i < 5:\n    n = 4\n" + row_loop("s = s * x[i, j]  # wrong: s", start="1.0", length="n"), jnp.prod),
    "updated output": ("out[i] = x[i, 0]\nout[i] *= x[i, 1]  # wrong: out[i]", lambda x: x[0] * x[1]),
    "output updated on two lines": (
        "out[i] = x[i, 0]\nout[i] = (x[i, 1] *  # wrong: out[i]\n    out[i])", lambda x: x[0] * x[1]),
    "longest loop that is unrolled": (row_loop("s = s * x[i, 0]", start="1.0", length="16"), lambda x: x[0] ** 16),
    "loop too long to unroll": (
        row_loop("s = s * x[i, 0]  # wrong: s", start="1.0", length="17"), lambda x: x[0] ** 17),
    "length that Warp does not evaluate": (
        row_loop("s = s * x[i, j]  # wrong: s", start="1.0", length="2 * 2"), jnp.prod),
    "assigned parameter of a function": (
        "out[i] = times_row(x[i, 0], x, i)  # in it, wrong: p", lambda x: x[0] * x.prod()),
    "assigned struct": (
        "p = Params()\np.a = x[i, 0]\nout[i] = params_times_row(p, x, i)  # in it, wrong: p",
        lambda x: x[0] * x.prod()),
    "unrolled triangle": (
        "s = float(1.0)\nfor k in range(4):\n    for j in range(k):\n        s = s * x[i, j]\nout[i] = s",
        lambda x: x[0] ** 3 * x[1] ** 2 * x[2]),
    "step of a loop is the index of an unrolled loop": (
        "s = float(0.0)\nfor j in range(1, 3):\n    for k in range(0, 3, j):\n        s += x[i, k]\nout[i] = s",
        lambda x: 2 * x[0] + x[1] + 2 * x[2]),
    "sum of doubles": (
        "s = wp.float64(0.0)\nfor j in range(x.shape[1]):\n    s += wp.float64(x[i, j])\nout[i] = float(s)", jnp.sum),
    "sum or zero": (row_loop(ADD, "out[i] = wp.where(i < 5, s, 0.0)"), jnp.sum),
    "shape of an output": ("out[i] = x[i, 0] * float(out.shape[0])", lambda x: 3 * x[0]),
    "earlier iteration": (
        "t = float(0.0)\n" + row_loop("t += s * s  # wrong: s\n    s += x[i, j]", "out[i] = t"),
        lambda x: ((jnp.cumsum(x) - x) ** 2).sum()),
    "component of a vector": (
        "v = wp.vec3(0.0, 0.0, 0.0)\n" + row_loop("v[0] += x[i, j]", "out[i] = v[0] * v[0]  # wrong: v"),
        square_of_sum),
    "component assigned after a loop": (
        "v = wp.vec3(0.0, 0.0, 0.0)\n"
        + row_loop("v[0] += x[i, j]", "v[1] = x[i, 0]\nout[i] = v[0] * v[0]  # wrong: v"), square_of_sum),
    "index in a condition": (
        "s = float(0.0)\nj = int(0)\nwhile j < 2:\n    j += 1\n"
        "if x[i, j] > 0.9:  # wrong: j\n    s = x[i, 0]\nout[i] = s", lambda x: x[0] * (x[2] > 0.9)),
    "output read before": (
        "t = out[i]\nif t < x[i, 0]:  # wrong: t\n    out[i] = x[i, 0] * x[i, 0]", lambda x: x[0] ** 2),
    "output updated after an unrolled loop": (
        "for j in range(3):\n    out[i] = x[i, j]\nt = out[i] * out[i]  # wrong: out[i]\nout[i] = t",
        lambda x: x[2] ** 2),
    "output updated after nested loops": (
        "for j in range(x.shape[1]):\n    for k in range(x.shape[1]):\n        out[i] = x[i, j]\n"
        "t = out[i] * out[i]  # wrong: out[i]\nout[i] = t", lambda x: x[3] ** 2),
    "linear update of an output": (
        "out[i] = x[i, 0]\nt = out[i]\nout[i] = 2.0 * t + x[i, 1]", lambda x: 2 * x[0] + x[1]),
    "break in a loop": (
        row_loop("if j == 4:\n        break  # wrong: break\n    s += x[i, 0]", length="20"), lambda x: 4 * x[0]),
    "flag instead of break": (
        "running = bool(True)\n"
        + row_loop("if s > 1.0: running = False\n    if running: s += x[i, j]", "out[i] = s * s", length="4"),
        lambda x: jnp.where(x[0] > 1, x[0], x[0] + x[1]) ** 2),
    "counted iterations instead of break": (
        row_loop("s += x[i, j] * x[i, j]", length="small_elements(x, i)"),
        lambda x: jnp.where(x[0] < 1.2, x[0] ** 2 + x[1] ** 2 * (x[1] < 1.2), 0)),
}  # fmt: skip

STORE_TILE = "t = wp.tile_load(x[i], shape=4)\nwp.tile_store(out, {}, offset=i)"
WARP_WITHOUT_ADJOINT = {  # Warp has no adjoint, although the derivative is not zero
    "frac": "out[i] = wp.frac(x[i, 0])",
    "atomic_exch": "n = wp.atomic_exch(out, i, 2.0 * x[i, 0])",
    "atomic_cas": "n = wp.atomic_cas(out, i, 0.0, 3.0 * x[i, 0])",
    "result of atomic_add": "n = wp.atomic_add(out, i, x[i, 0])\nout[i] = wp.atomic_add(out, i, x[i, 1])",
    "tile_max": STORE_TILE.format("wp.tile_max(t)"),
    "tile_min": STORE_TILE.format("wp.tile_min(t)"),
    "tile_reduce": STORE_TILE.format("wp.tile_reduce(wp.mul, t)"),
    "tile_scan": STORE_TILE.format("wp.tile_view(wp.tile_scan_inclusive(t), offset=(2,), shape=(1,))"),
    "tile_cholesky": "m = wp.tile_load(x, shape=(2, 2))\nb = wp.tile_load(x[2], shape=2)\n"
                     "out[i] = wp.tile_cholesky_solve(wp.tile_cholesky(m), b)[0]",
}  # fmt: skip
WARP_WITH_ADJOINT = {  # similar kernels with a correct gradient
    "zero derivatives": "out[i] = wp.floor(x[i, 0]) + wp.sign(x[i, 1]) + wp.round(x[i, 2]) + x[i, 3]",
    "length": "out[i] = float(len(out)) * x[i, 0]",
    "atomic_add": "wp.atomic_add(out, i, wp.sin(x[i, 0]))",
    "atomic_max": "wp.atomic_max(out, i, x[i, 0])",
    "tile_sum": STORE_TILE.format("wp.tile_sum(t)"),
}


@functools.cache
def gradient_kernels():
    """Return {name: kernel} for the tables of gradients."""
    bodies = {name: body for name, (body, _) in WARP_GRADIENTS.items()} | WARP_WITHOUT_ADJOINT | WARP_WITH_ADJOINT
    sources = {name: ("x: rows, out: floats", body) for name, body in bodies.items()}
    return warp_kernels_from(sources, "gradients", has_adjoints=True, definitions=WARP_GRADIENT_DEFINITIONS)


GRADIENT_INPUT = np.float32([[1.1, 0.7, 1.3, 0.9], [0.5, 1.5, 0.8, 1.2], [1.4, 1.1, 0.6, 1.7]])


@needs_warp
@pytest.mark.parametrize("name", WARP_GRADIENTS)
def test_warp_gradient_is_correct_or_warns_once(name):
    """The library warns exactly where Warp computes a wrong gradient.  This fails if a newer Warp corrects one."""
    body, in_jax = WARP_GRADIENTS[name]
    kernel, x = gradient_kernels()[name], GRADIENT_INPUT

    def call(x):
        return xk.warp_kernel(kernel, spec(3), launch_dims=3, differentiable=True)(x)

    def results_and_gradient(call, x):
        results, pullback = jax.vjp(call, x)
        return results, *pullback(jnp.ones(3))

    with warnings.catch_warnings(record=True, action="always") as caught:
        results, found = results_and_gradient(call, x)
        jax.eval_shape(partial(results_and_gradient, call), x)  # does not warn again
    expected_results, expected = results_and_gradient(jax.vmap(in_jax), x)
    check_close(results, expected_results)
    wrong = re.search("wrong: (.*)", body)
    texts = [str(warning.message) for warning in caught if "gradient" in str(warning.message)]
    assert len(texts) == bool(wrong)
    if not wrong:
        check_close(found, expected, 1e-3)
    else:
        assert not np.allclose(found, expected, 1e-3)
        variable = re.escape(wrong[1])
        cause = f"uses a wrong value of '{variable}' in .*|is wrong in a loop with `{variable}`"
        pattern = rf"'{kernel.key}': the gradient .*({cause}) \(line (\d+) of (.*)\)\. .*jax.test_util.check_grads"
        _, line, file = re.search(pattern, texts[0]).groups()
        assert linecache.getline(file, int(line)).endswith(f" wrong: {wrong[1]}\n")


@needs_warp
@pytest.mark.parametrize("name", WARP_WITHOUT_ADJOINT | WARP_WITH_ADJOINT)
def test_warp_gradient_warns_exactly_for_builtins_without_adjoint(name):
    """The expected gradient is a difference quotient."""
    kernel, x = gradient_kernels()[name], GRADIENT_INPUT
    f = xk.warp_kernel(kernel, spec(3), launch_dims=3, block_dim=1, differentiable=True)
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = jax.grad(lambda x: f(x).sum())(x)
    steps = 2.0**-8 * np.eye(12, dtype=np.float32).reshape(12, 3, 4)
    expected = np.reshape([(f(x + step).sum() - f(x - step).sum()) / 2.0**-7 for step in steps], (3, 4))
    texts = [str(warning.message) for warning in caught if "gradient" in str(warning.message)]
    assert all("takes 0 for the derivative" in text for text in texts)
    has_adjoint = name in WARP_WITH_ADJOINT
    assert np.allclose(found, expected, atol=0.02) == has_adjoint == (not texts)


@needs_warp
@pytest.mark.parametrize("x, body, max_unroll", [
    ("wp.array2d(dtype=wp.bfloat16)", "s = wp.bfloat16(1.0)\nfor j in range(x.shape[1]):\n    s = s * x[i, j]\n"
     "out[i] = float(s)", 16),
    ("rows", row_loop("s = s * x[i, j]", start="1.0", length="3"), 0),
    ("rows", "s = i\nfor j in range(x.shape[1]):\n    wp.atomic_add(out, s, x[i, j])\n    s = 0", 16),
], ids=["bfloat16", "loop not unrolled", "changed index of atomic sum"])  # fmt: skip
def test_warp_gradient_with_wrong_value_warns(x, body, max_unroll):
    kernel = warp_kernel_from_body(f"x: {x}, out: floats", body, True)
    kernel.module.options["max_unroll"] = max_unroll
    f = xk.warp_kernel(kernel, spec(3), launch_dims=3, differentiable=True)
    inputs = spec(3, 3, dtype=jnp.bfloat16 if "bfloat16" in x else np.float32)
    with pytest.warns(UserWarning, match="uses a wrong value of 's'"):
        jax.eval_shape(jax.grad(lambda x: f(x).sum()), inputs)


@needs_warp
def test_warp_gradient_warns_if_first_call_has_null_array():
    body = "s = float(1.0)\nif x:\n    for j in range(x.shape[0]):\n        s = s * x[j]\nout[i] = s + y[i]"
    kernel = warp_kernel_from_body("x: floats, y: floats, out: floats", body, True)
    f = xk.warp_kernel(kernel, like_last, differentiable=True)
    with pytest.warns(UserWarning, match="uses a wrong value of 's'"):
        jax.eval_shape(jax.grad(lambda y: f(None, y).sum()), spec(3))
        jax.eval_shape(jax.grad(lambda x: f(x, x).sum()), spec(3))


# -- launches ------------------------------------------------------------------------------------------


def test_warp_empty_launch_returns_zeros_or_aliased_input(warp_platform):
    """The program has no custom call, so XLA creates the zeros."""
    options = {"launch_dims": 0, "in_out_argnames": ["out"]}
    add_up = jax.vmap(xk.warp_kernel(warp_kernels().add_up, like_last, **options), (None, 0))
    copies_input = xk.warp_kernel(warp_programs()["writes to y or out", "copied struct"], like_last, launch_dims=0)
    x, starts = jnp.arange(4.0), jnp.ones((2, 3))
    for function, inputs, expected in (
        (add_up, (x, starts), starts), (warp_product(launch_dims=0), (x, x), 0 * x), (warp_product(), (x[:0],) * 2, []),
        (copies_input, VECTORS_AND_FLOATS, np.zeros(3, np.float32)),
    ):  # fmt: skip
        check_close(function(*inputs), expected)
        assert not targets_in(jax.jit(function).lower(*inputs).as_text())


@needs_warp
@pytest.mark.parametrize("x, start, launch_dims, n_dims, n_indices", [
    ("rows", "i = wp.tid()", None, 2, 1),
    ("vectors", "i, j = wp.tid()", None, 1, 2),
    ("vectors", "i = 0  # instead of wp.tid()", None, 1, 0),
    ("vectors", "i = wp.tid()\ni, j = wp.tid()", None, 1, 2),
    ("vectors", "i = wp.tid()", (3, 2), 2, 1),
    ("vectors", "i, j = wp.tid()", 3, 1, 2),
], ids=["matrix", "vectors", "no wp.tid", "two calls of wp.tid", "too many dims", "too few dims"])  # fmt: skip
def test_warp_launch_dims_must_match_indices_of_tid(x, start, launch_dims, n_dims, n_indices):
    """Kernels without `wp.tid` accept any launch, but have no default."""
    kernel = warp_kernel_from_body(f"x: {x}, y: floats, out: floats", f"{start}\nout[i] = y[i]")

    def trace(launch_dims):
        jax.eval_shape(xk.warp_kernel(kernel, like_last, launch_dims=launch_dims), spec(3, 2), spec(3))

    missing = "" if launch_dims else "launch_dims is missing, .*"
    counts = rf"has {n_dims} dimensions?, but wp.tid\(\) returns {n_indices} values?"
    text = rf"'kernel': {missing}.*{counts}\..*launch_dims=\(64,"
    with pytest.raises(ValueError, match=text):
        trace(launch_dims)
    for n_dims in [n_indices] if n_indices else (1, 2):
        trace((0,) * n_dims)


@functools.cache
def adding_kernel():
    body = "wp.atomic_add(out, 0, x[0] * s * y[0])"
    return warp_kernel_from_body("x: floats, y: floats, s: float, out: floats", body)


@needs_warp
@pytest.mark.parametrize(
    "x, y, out, n_threads", [(3, 1, 3, 3), (3, (), 1, 3), (1, 3, 3, 3), ((), 3, 1, 3), ((), 1, 1, 1)]
)
def test_warp_default_launch_has_shape_of_arrays_with_several_elements(x, y, out, n_threads):
    """Each thread adds 2 to out[0]."""
    call = xk.warp_kernel(adding_kernel(), spec(out), zero_outputs=True)
    assert call(np.ones(x, "f4"), np.ones(y, "f4"), 2.0)[0] == 2 * n_threads


@needs_warp
@pytest.mark.parametrize("x, y, out, text", [
    (3, 2, 3, "'x' .*3,.*'y' .*2,"), (3, 3, 2, "'x' .*3,.*'out'"), (1, 3, 2, "'y' .*3,.*'out'"),
])  # fmt: skip
def test_warp_default_launch_of_different_shapes_raises(x, y, out, text):
    advice = r"\. Pass the number of threads, or a function of the inputs: launch_dims=lambda x, y, s: \.\.\."
    with pytest.raises(ValueError, match=f"{text}.*{advice}"):
        jax.eval_shape(lambda x, y: xk.warp_kernel(adding_kernel(), spec(out))(x, y, 2.0), spec(x), spec(y))


@pytest.mark.needs("warp 1.19")
def test_warp_deterministic_mode_is_ignored_on_cpu(monkeypatch):
    """`wp.launch` ignores it there, too."""
    monkeypatch.setattr(wp.config, "deterministic", wp.DeterministicMode.RUN_TO_RUN)
    kernel = warp_kernel_from_body("x: floats, y: floats, out: floats", "wp.atomic_add(out, 0, x[i] * y[i])", True)
    out, pullback = jax.vjp(xk.warp_kernel(kernel, spec(1), differentiable=True), *TWO_VECTORS)
    check_close((out, pullback(jnp.ones(1))), (np.vdot(*TWO_VECTORS)[None], TWO_VECTORS[::-1]))


# -- arguments -----------------------------------------------------------------------------------------


def test_warp_accepts_enums_numbers_and_null_arrays(warp_platform):
    """Launches with null arrays at different positions do not share machine code."""
    kind = enum.IntFlag("Kind", "A B").B
    x = jnp.arange(3.0)
    f = xk.warp_kernel(warp_kernels().takes_many_kinds, spec(3), launch_dims=3)
    check_close(f(x, jnp.float32(2), kind, 1, 1), [6, 8, 10])
    check_close(f(x, h=1, on=True, kind=kind, factor=None), [3, 4, 5])
    check_close(f(None, x, kind, True, 1), 3 * x)


@needs_warp
def test_warp_arguments_bind_by_position_or_name():
    f = histogram(zero_outputs=True)
    check_close(f(weight=jnp.int32(2), index=THREE_INTS), [2, 2, 2])
    check_close(jax.jit(f, static_argnums=1)(THREE_INTS, 0.5), [0.5, 0.5, 0.5])


@needs_warp
def test_warp_cpu_blocks_raise_only_for_tiles(monkeypatch):
    """Warp >= 1.19 has this setting."""
    monkeypatch.setattr(wp.config, "enable_cpu_blocks", True, raising=False)
    check_close(warp_product(block_dim=4)(*TWO_VECTORS), np.multiply(*TWO_VECTORS))
    x = jnp.zeros(128)
    for options in {"launch_dims": 2, "tiled": True}, {"launch_dims": (2, 64)}:
        with pytest.raises(NotImplementedError, match=r"more with wp\.config\.enable_cpu_blocks"):
            xk.warp_kernel(batch_kernels()["gradient of tiles"], like_first, block_dim=64, **options)(x)


@needs_warp
def test_warp_deterministic_launch_raises(monkeypatch):
    """On GPUs, Warp's deterministic mode records another kind of launch."""
    launch = type("DeterministicLaunch", (wp.Launch,), {"__init__": lambda self: None})()
    monkeypatch.setattr(wp, "launch", lambda *args, **options: launch)
    with pytest.raises(NotImplementedError, match=r"'multiply': .*deterministic mode.*call the .* with wp.jax_kernel"):
        warp_product(launch_dims=2)(*TWO_VECTORS)


@needs_warp
@pytest.mark.parametrize("platforms", [
    pytest.param(["cpu"], id="cpu"), pytest.param(["cpu", "cuda"], marks=needs_warp_gpu, id="cpu and gpu"),
])  # fmt: skip
def test_warp_exported_program_accepts_symbolic_batch_size(platforms):
    """The target has the same name on each platform, but its launch data differ."""
    (n,) = export.symbolic_shape("n")
    f = jax.vmap(warp_product(launch_dims=lambda x, y: x.shape, name="any number of slices"))
    program = export.export(jax.jit(f), platforms=platforms, disabled_checks=xk.export_checks())(spec(n, 5), spec(n, 5))
    for platform in platforms:
        x = jax.device_put(uniform(3, 5), jax.devices(platform)[0])
        check_close(export.deserialize(program.serialize()).call(x, x), x * x)


@needs_warp
def test_warp_build_error_is_raised_on_every_call():
    """Warp < 1.19 leaves a kernel that failed out of later builds."""

    @wp.kernel(module=wp.get_module("broken"))
    def broken(x: floats, out: floats):
        out[wp.tid()] = undefined_thing(x[wp.tid()])  # noqa: F821

    for _ in range(3):
        with pytest.raises(KeyError, match="undefined_thing"):
            xk.warp_kernel(broken, like_first)(jnp.arange(3.0))


def store_out_of_bounds_in_debug_mode():
    wp.config.mode = "debug"
    wp.config.use_precompiled_headers = False  # faster for one build
    kernel = warp_kernel_from_body("x: floats, out: floats", "out[int(x[0])] = 1.0")
    store = xk.warp_kernel(kernel, like_first, launch_dims=1)
    print(store(jnp.full(3, 2.0)), flush=True)
    store(jnp.full(3, 3.0)).block_until_ready()


@pytest.mark.processes
@needs_warp
def test_warp_debug_mode_aborts_at_index_out_of_bounds():
    """In its own process, because Warp ends the process with the failed assertion."""
    outcome = r"(?s)exit code (?!0\n).*\[0\. 0\. 1\.\]\n.*Assertion failed: 'i .*arr\.shape\[0\]'"
    with pytest.raises(AssertionError, match=outcome):
        run_in_new_process(store_out_of_bounds_in_debug_mode)


# ======================================================================================================
# Only on a GPU: Numba CUDA and Warp


def integers(*shape):
    """Return float32 numbers whose sums and products are exact."""
    return np.random.default_rng(sum(shape)).integers(-8, 9, shape).astype(np.float32)


def gradient_of_half_square_of_sum():
    add = xk.warp_kernel(Warp.kernel(Add, np.dtype("float32")), like_first, differentiable=True)
    return jax.grad(lambda v, d: (add(v, d) ** 2).sum() / 2)


@pytest.mark.needs("gpu", "cuda installed")
@pytest.mark.parametrize("new_kernel", [  # functions that compute v + d from the initial values of their outputs
    pytest.param(lambda: new_cuda_wrapper(
        cuda, "v, d", "i = cuda.grid(1); v[i] += d[i]", block=64, in_out_argnames=["v"]), id="in-out"),
    pytest.param(lambda: new_cuda_wrapper(
        cuda, "v, d, out, tmp", "i = cuda.grid(1); out[i] += v[i]; tmp[i] = d[i]; out[i] += tmp[i]", block=64,
        scratch=like_first), id="zeroed"),
    pytest.param(lambda: xk.numba_cuda_callable(
        lambda v, d, out, stream: add_kernel[1, 64, stream](out, d, out), like_first, input_output_aliases={0: 0}),
        id="aliased callable"),
    pytest.param(lambda: xk.warp_kernel(
        warp_kernel_from_body("v: floats, d: floats", "v[i] += d[i]"), like_first, in_out_argnames=["v"]),
        id="warp in-out", marks=needs_warp_gpu),
    pytest.param(gradient_of_half_square_of_sum, id="warp differentiable", marks=needs_warp_gpu),  # by v, it is v + d
])  # fmt: skip
def test_gpu_outputs_have_initial_values_in_loops(new_kernel):
    """XLA fuses slices of 256 bytes in loops, and loses the alias of a kernel in the fusion (jax 0.11.2)."""
    kernel = new_kernel()
    numbers = integers(11, 64)
    v, rows = numbers[0], numbers[1:]

    def each_row(v, rows):
        return jax.lax.scan(lambda v, row: (v, kernel(v, row)), v, rows)[1]

    def batches(v, rows):
        return jax.lax.map(lambda batch: jax.vmap(kernel)(batch, batch), jnp.stack([rows, rows]))

    def carried(v, rows):
        return jax.lax.scan(lambda v, row: (kernel(v, row), None), v, rows)[0]

    def late(x):  # the same numbers, from an operation that takes longer than a kernel
        return (jnp.eye(4096) @ jnp.pad(x, (0, 4032)))[:64]

    def in_stream_order(v, rows):
        return jax.lax.scan(lambda v, row: (late(kernel(v, late(row))), None), v, rows)[0]

    sums = v + rows.sum(axis=0)
    for program, expected in (each_row, v + rows), (batches, [2 * rows] * 2), (carried, sums), (in_stream_order, sums):
        donated = (0,) * (program is carried)
        np.testing.assert_array_equal(jax.jit(program, donate_argnums=donated)(*map(jnp.array, (v, rows))), expected)


@pytest.mark.needs("gpu", "cuda installed")
def test_gpu_row_update_does_not_overwrite_kernel_input():
    """XLA's dynamic-slice fusion lets a kernel write to the array that it reads (jax 0.11.2)."""

    @xk.numba_cuda_kernel(outs=lambda v, w: (v, w), grid=1, block=64)
    @cuda.jit
    def left_and_right(v, w, left, right):
        i = cuda.grid(1)
        left[i] = v[(i + 63) % 64] + w[i]
        right[i] = v[(i + 1) % 64] - w[i]

    def replace_two_rows(k, m):
        left, right = left_and_right(m[k], m[0])
        return m.at[k].set(left).at[0].set(right)

    m = integers(4, 64)
    result = jax.jit(lambda m: jax.lax.fori_loop(0, 4, replace_two_rows, m))(m)
    for k in range(4):
        m[k], m[0] = np.roll(m[k], 1) + m[0], np.roll(m[k], -1) - m[0]
    np.testing.assert_array_equal(result, m)


@pytest.mark.needs("gpu", "cuda installed")
def test_gpu_kernel_takes_inputs_on_each_device_and_in_pinned_host_memory():
    call = wrap_cuda(cuda.jit(cuda_add))
    copy_in_place = wrap_cuda(copy_kernel, input_output_aliases={0: 0})
    for k, device in enumerate(jax.local_devices(backend="cuda")):
        numbers = np.arange(7, dtype=np.float32) + k
        for place in device, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"):
            x = jax.device_put(numbers, place)
            out = call(x, x)
            assert out.devices() == {device}
            np.testing.assert_array_equal(out, 2 * numbers)
            np.testing.assert_array_equal(jax.jit(copy_in_place)(x), numbers)


@pytest.mark.processes
@pytest.mark.needs("gpu", "cuda installed", "warp_gpu")
def test_gpu_handlers_call_the_driver_without_recorder():
    """In all other tests on a GPU, launches and memsets pass through the callbacks of conftest.py."""
    tests = test_cuda_op_passes_launch_to_decorated_kernel, test_op_accepts_warp_kernel_with_options
    run_in_new_process(*tests, JAX_PLATFORMS="cuda,cpu")


# XLA's list of the steps of a program: a command buffer, with a custom call in it
CALL_IN_COMMAND_BUFFER = re.compile(r"^( *)\d+: kCommandBuffer.*\n(\1 +.*\n)*?\1 +\d+: kCustomCall", re.MULTILINE)


@pytest.mark.processes
@pytest.mark.needs("gpu", "cuda installed")
def test_gpu_kernels_run_in_command_buffers(tmp_path):
    """Tests that run on the GPU pass with a CUDA graph for each computation."""
    flags = [
        "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL,DYNAMIC_SLICE_FUSION",
        "--xla_gpu_graph_min_graph_size=1",
        f"--xla_dump_to={tmp_path}",
        "--xla_dump_hlo_module_re=axpy",  # in test_cuda_kernel_takes_shared_memory_scalars_and_in_out_argument
    ]
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

    def updates_in_batch(operation, backend, transformation, dtype):
        is_on_gpu = backend in ("numba_cuda", "warp_gpu")
        return is_on_gpu and transformation == "vmap" and operation in ("blend", "csr_event")

    tests = [*names_of_tests_needing("cuda"), "test_gpu_outputs_have_initial_values_in_loops"]
    if not conftest.missing("warp_gpu"):
        tests.append("test_warp_values_of_any_library_share_a_target")
    selected = [*tests, *matrix_tests(updates_in_batch)]
    outcomes = outcomes_elsewhere(selected, "-k", "not cpu", folder=tmp_path, XLA_FLAGS=flags)
    check_passed(outcomes, [*tests, "test_matrix"], skips_for=["warp_gpu"])
    programs = [path.read_text() for path in tmp_path.rglob("*thunk_sequence*.txt")]
    assert any(map(CALL_IN_COMMAND_BUFFER.search, programs))


# ======================================================================================================
# XLACustomKernel

# -- transformations that the matrix does not have -----------------------------------------------------


@numba.njit
def numba_multiply(x, y, out):
    for i in np.ndindex(out.shape):
        out[i] = x[i] * y[i]


multiply_p = Primitive("multiply_without_batching_rule")  # like most hand-written primitives
multiply_p.def_abstract_eval(like_first)
mlir.register_lowering(multiply_p, mlir.lower_fun(operator.mul, multiple_results=False))


def multiply_op(generator=lambda: operator.mul):
    op = op_with_generator(generator)
    Hadamard.differentiate(op)
    return op


op_with_vjp_rule = op_with_kernel(operator.mul)
op_with_vjp_rule.def_vjp_rule(
    lambda x, y: (op_with_vjp_rule(x, y, outs=like_first), (x, y)), lambda xy, ct: (ct * xy[1], ct * xy[0])
)
WITHOUT_BATCHING_RULE = as_function(multiply_op(lambda: multiply_p.bind))
WITH_VJP_RULE = as_function(op_with_vjp_rule)


@needs_four_devices
@pytest.mark.parametrize("multiply, transformation", [
    (WITHOUT_BATCHING_RULE, "vmap_nested"),
    (WITHOUT_BATCHING_RULE, "grad_of_shard_map"),
    (WITH_VJP_RULE, "shard_map_of_grad"),
], ids=["primitive in vmap", "primitive in shard_map", "VJP rule in shard_map"])  # fmt: skip
def test_op_with_vjp_rule_or_primitive_without_batching_rule_transforms_like_jax(multiply, transformation):
    program, inputs = TRANSFORMATIONS[transformation], inputs_and_batch(Hadamard, "float32")
    results, expected = [program(lambda x, y: [f(x, y)], *inputs) for f in (multiply, operator.mul)]
    check_close(results, expected)


@needs_four_devices
def test_op_kernel_may_use_mesh_axes_but_no_vmap_axes():
    total = as_function(op_with_kernel(lambda x: jax.lax.psum(x, "d")))
    with pytest.raises(NotImplementedError, match=r"'op': .* nor use axes of a vmap. It has NamedAxisEffect.*d"):
        jax.vmap(total, axis_name="d")(ONE_TO_8)
    on_devices = jax.shard_map(total, mesh=four_device_mesh(4), in_specs=P("d"), out_specs=P("d"))
    check_close(on_devices(ONE_TO_8[:4]), [10, 10, 10, 10])


# -- outs, inputs, static parameters -------------------------------------------------------------------

SPECS = [spec(8), spec(8, dtype=bool), spec(4), [spec(8)], (spec(8),), (spec(0), spec(8)), {"low": spec(8)}, ()]
OUTS = [  # `outs`, and the specs that it declares
    *zip(SPECS, SPECS),
    ([ONE_TO_8, types.SimpleNamespace(shape=[3], dtype="int32", adj=None)], [spec(8), spec(3, dtype=np.int32)]),
]


def test_op_result_has_structure_of_outs():
    """One op serves all: its cache of calls has shapes, dtypes and structure in its keys."""
    declared = []  # the last item is the structure for the next trace

    def ones(x):
        return jax.tree.map(lambda out: jnp.ones(out.shape, out.dtype), declared[-1])

    op = op_with_kernel(ones)
    for outs, specs in OUTS:
        declared.append(specs)
        call = partial(op, outs=outs)
        for result in call(ONE_TO_8), jax.jit(call)(ONE_TO_8):
            assert jax.eval_shape(like_first, result) == specs
            assert all(leaf.all() for leaf in jax.tree.leaves(result))


def test_op_without_inputs_returns_structure_of_outs_not_of_kernel():
    check_close(op_with_kernel(lambda: {"pair": np.float32([3, 4])})(outs=spec(2)), [3, 4])


class DlpackArray:
    """An array with no other interface than DLPack.  NumPy 2.0 requires these methods on the class."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def contiguous(self):
        return DlpackArray(self.array.copy())


def test_op_accepts_numbers_and_arrays_of_other_libraries():
    """Arrays may be strided views."""
    negative = as_function(op_with_kernel(operator.neg))
    for operand in (2, types.SimpleNamespace(__jax_array__=lambda: jnp.int32(2))):
        check_close(negative(operand), np.int32(-2))
    for array in (ONE_TO_8, ROWS[:, 1], ROWS[::-1]):
        check_close(negative(DlpackArray(array)), -array)
    check_close(jax.jit(lambda x: negative(types.SimpleNamespace(__jax_array__=lambda: x)))(ONES), -ONES)


def test_op_distinguishes_equal_parameters_of_other_types():
    """The kernel adds the position of the parameter in `values`."""
    zero, minus_zero = np.float32(0.0), np.float32(-0.0)
    values = [1, 1.0, True, np.float32(1), 0.0, -0.0, (zero,), (minus_zero,), frozenset({1}), frozenset({1.0})]
    values += [0j, -0j]
    op = op_with_kernel(lambda x, k: x + [*map(repr, values)].index(repr(k)))
    call = lambda x: [op(x, outs=spec(), k=k) for k in values]
    assert call(0.0) == jax.jit(call)(0.0) == [*range(len(values))]


@pytest.mark.parametrize("call", [
    pytest.param(lambda x, outs: wrap(outs=outs)(x), id="wrapper"),
    pytest.param(op_with_generator(lambda outs: wrap(outs=outs)), id="op"),
])  # fmt: skip
def test_disabled_x64_truncates_outs_but_not_arrays(call):
    """JAX does the same, unless `jax_explicit_x64_dtypes` allows 64 bits."""
    with x64():
        x = jnp.arange(3) + 2**40
    same_dtype = partial(call, outs=like_first)
    for f in same_dtype, jax.jit(same_dtype):
        got = np.asarray(f(x))
        assert got.dtype == np.int64 and got[0] == 2**40 + 1
        assert f(np.arange(3)).dtype == np.int32
    increment = partial(call, outs=spec(3, dtype=np.int64))
    with pytest.warns(UserWarning, match="outs declares int64, which JAX truncates to int32.*jax_enable_x64") as caught:
        assert increment(np.arange(3)).dtype == np.int32
    assert {warning.filename for warning in caught} == {__file__}
    with conftest.configured("jax_explicit_x64_dtypes", "allow"):
        assert increment(np.arange(3)).dtype == np.int64


def test_op_lists_backends_and_keeps_call_docstring_and_benchmark_data():
    op = op_adding(a=1, b=2)
    assert repr(op) == "<XLACustomKernel 'op': cpu: a, b>"
    assert (op.get_default("cpu"), op.available_backends("cpu")) == ("a", ["a", "b"])
    assert (op.get_default("tpu"), op.available_backends("tpu")) == (None, [])
    assert op.call(ONE_TO_8[0], outs=spec()) == 2  # the op itself, until `def_call` defines another function
    op.def_call(lambda x, backend=None: (x, backend))
    assert op.call(1, backend="numba") == (1, "numba")
    assert op.def_benchmark_data(generator_adding) is generator_adding
    assert xk.XLACustomKernel("op", doc="Adds.").__doc__ == "Adds."


@pytest.mark.needs("brainevent")
def test_signatures_accept_arguments_of_brainevent():
    """Only its `benchmark` has another signature.  Required arguments are given by position, the others by name."""
    with warnings.catch_warnings(action="ignore"):
        theirs = importlib.import_module("brainevent._op")
    functions = "KernelEntry XLACustomKernel defjvp general_batching_rule jaxinfo_to_warpinfo jaxtype_to_warptype"
    wrappers = "numba_cuda_callable numba_cuda_kernel numba_kernel"
    pairs = [(getattr(xk, name), getattr(theirs, name)) for name in f"{functions} {wrappers}".split()]
    for name, method in inspect.getmembers(theirs.XLACustomKernel, inspect.isfunction):
        if not name.startswith("_") and name != "benchmark":
            pairs.append((getattr(xk.XLACustomKernel, name), method))
    for our_function, their_function in pairs:
        parameters = inspect.signature(their_function).parameters.values()
        required = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty}
        inspect.signature(our_function).bind(*required, **named)


# -- registration and dispatch -------------------------------------------------------------------------


REGISTRATIONS = {  # a change to an op with the backends "a" (the default), which adds 1, and "b": the result for 0
    "kernel for a GPU": (lambda op: op.def_kernel("jax", "gpu", generator_adding(2)), 1),
    "other backend": (lambda op: op.def_kernel("c", "cpu", generator_adding(3)), 1),
    "kernel for Numba CUDA": (lambda op: op.def_numba_cuda_kernel(generator_adding(2)), 1),
    "default of a TPU": (lambda op: op.def_kernel("jax", "tpu", generator_adding(2), asdefault=True), 1),
    "same default": (lambda op: op.set_default("cpu", "a"), 1),
    "same batching rule": (lambda op: op.register_general_batching(), 1),
    "replaced kernel": (lambda op: op.def_kernel("a", "cpu", generator_adding(3)), 3),
    "new default kernel": (lambda op: op.def_kernel("c", "cpu", generator_adding(3), asdefault=True), 3),
    "other default": (lambda op: op.set_default("cpu", "b"), 2),
}


@pytest.mark.parametrize("change, result", named_rows(REGISTRATIONS))
def test_op_registration_clears_caches_exactly_if_it_changes_results(change, result, monkeypatch):
    """`jax.clear_caches` recompiles all functions of the process.  An op that was never traced needs no call of it."""
    op = op_adding(a=1, b=2)
    batched = jax.jit(jax.vmap(as_function(op)))
    calls = [as_function(op), batched, jax.jit(as_function(op_with_kernel(batched)))]
    assert [call(np.zeros(1)) for call in calls] == [1, 1, 1]
    cleared = record_calls(monkeypatch, jax, "clear_caches")
    change(op_adding(a=1, b=2))
    assert not cleared
    change(op)
    assert len(cleared) == (result != 1)
    assert [call(np.zeros(1)) for call in calls] == [result] * 3


def test_op_rule_reaches_jitted_function_that_failed_without_it(monkeypatch):
    op = op_adding(a=1)
    forward = jax.jit(lambda x: jax.vjp(as_function(op), x)[0])
    with pytest.raises(NotImplementedError):
        forward(0.0)
    cleared = record_calls(monkeypatch, jax, "clear_caches")
    op.def_vjp_rule(lambda x: (x + 3, None), lambda residuals, ct: ct)
    assert len(cleared) == 1 and forward(0.0) == 3 and as_function(op)(0.0) == 1


def test_op_new_default_keeps_code_of_explicit_backend(monkeypatch):
    """The compiled call names its backend, so a new default does not affect it.  A new kernel does."""
    op = xk.XLACustomKernel("op")
    op.def_warp_kernel(generator_adding(1))
    by_default, by_name = jax.jit(as_function(op)), jax.jit(partial(op, outs=like_first, backend="warp"))
    assert by_name(0) == 1
    cleared = record_calls(monkeypatch, jax, "clear_caches")
    op.def_numba_kernel(generator_adding(2))
    assert not cleared and by_name(0) == 1 and by_default(0) == 2
    op.def_warp_kernel(generator_adding(3))
    assert len(cleared) == 1 and by_name(0) == 3 and by_default(0) == 2


def test_op_warp_is_cpu_default_only_without_other_backend():
    op = xk.XLACustomKernel("warp")
    call = partial(op, 0, outs=like_first)
    op.def_warp_kernel(generator_adding(1), asdefault=True)
    assert op.defaults == {"gpu": "warp", "cpu": "warp"} and call() == 1
    op.def_numba_kernel(generator_adding(2))
    assert op.defaults == {"gpu": "warp", "cpu": "numba"}
    assert call() == 2 and call(backend="warp") == 1
    op.def_kernel("warp", "cpu", generator_adding(3))  # explicit, so a kernel for the GPU does not replace it
    op.def_warp_kernel(generator_adding(4))
    assert call(backend="warp") == 3


@pytest.mark.parametrize("method, args, platform, backend", [
    ("def_numba_kernel", (), "cpu", "numba"),
    ("def_warp_kernel", (), "gpu", "warp"),
    ("def_numba_cuda_kernel", (), "gpu", "numba_cuda"),
    ("def_pallas_kernel", ("cuda",), "gpu", "pallas"),
    ("def_triton_kernel", (), "gpu", "triton"),
    ("def_cuda_raw_kernel", (), "gpu", "cuda_raw"),
    ("def_kernel", ("mine", "tpu"), "tpu", "mine"),
    ("def_kernel", ("mine", "rocm"), "gpu", "mine"),
    ("def_kernel", ("mine", "METAL"), "METAL", "mine"),  # a plugin
])  # fmt: skip
def test_op_registration_methods_choose_platform_and_default(method, args, platform, backend):
    op, generator = xk.XLACustomKernel("op"), generator_adding(1)
    op.def_kernel("first", platform, generator)
    define = getattr(op, method)
    assert define(*args, generator) is generator and op.defaults[platform] == "first"
    assert op.available_backends(platform) == ["first", backend]
    assert define(*args, asdefault=True)(generator) is generator and op.defaults[platform] == backend


def test_op_kernel_is_chosen_by_lowering_platform():
    op, values = xk.XLACustomKernel("where"), {"cpu": 1.0, "cuda": 2.0, "tpu": 3.0}
    for platform, value in values.items():
        op.def_kernel("jax", platform, generator_adding(value))
    text = jax.jit(as_function(op)).trace(ONE_TO_8).lower(lowering_platforms=tuple(values)).as_text()
    assert re.findall(r"dense<(\d)\.", text) == ["1", "2", "3"]
    op.def_kernel("other", "gpu", generator_adding(4.0))
    assert "dense<4." in lower_for_cuda(partial(op, outs=like_first, backend="other"), ONE_TO_8)


# -- generators and decorated kernels --------------------------------------------------------------------


@needs_four_devices
def test_op_generator_result_works_on_any_mesh():
    """The generator computes an array when the mesh is set."""
    double = as_function(op_with_generator(lambda outs: partial(jnp.multiply, 2 * jnp.ones(4))))
    rows = np.ones((8, 4), np.float32)
    for mesh in (four_device_mesh(4, axis_type=EXPLICIT), four_device_mesh(2, 2, axis_type=EXPLICIT)):
        split = jax.shard_map(double, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        with jax.set_mesh(mesh):
            for f in (split, jax.jit(double)):
                check_close(f(on_mesh(rows, "d", mesh=mesh)), 2 * rows)
    check_close(double(rows), 2 * rows)


def test_op_kernel_is_checked_again_after_x64_changes():
    """Tracing a call checks the kernel.  The outcome of the check may depend on x64."""
    count = partial(op_with_kernel(lambda x: jnp.arange(x.size)), outs=spec(8, dtype=np.int32))
    check_close(count(ONE_TO_8), np.arange(8, dtype=np.int32))
    with x64(), pytest.raises(ValueError, match=re.escape("returned (int64[8])")):
        jax.make_jaxpr(count)(ONE_TO_8)


def test_op_generator_is_called_again_only_for_other_parameters_x64_or_kernel():
    generated = []

    def generator(outs, power):
        generated.append((outs[0].shape, power))
        return lambda x: x**power

    op = op_with_generator(generator)
    for power in (1, 2, 1):
        jax.clear_caches()
        call = partial(op, outs=like_first, power=power)
        check_close(jax.jit(call)(ONE_TO_8), ONE_TO_8**power)
        check_close(jax.vmap(call)(ROWS), ROWS**power)
    assert generated == [((8,), 1), ((8,), 2)]
    with x64():  # the generator may create constants, of another dtype
        op(ONE_TO_8, outs=like_first, power=1)
    assert len(generated) == 3
    op.def_kernel("jax", "cpu", generator)
    op(ONE_TO_8, outs=like_first, power=1)
    assert len(generated) == 4


@pytest.mark.parametrize("kernel, options", [
    (wrap(numba_multiply), {}),
    (lambda outs: numba_multiply, {}),
    (numba.njit(kernel_from_body("for i in range(out.size): out[i] *= y[i]", "x, y, out")),
     {"input_output_aliases": {0: 0}}),
    (numba.guvectorize("(n),(n)->(n)")(numba_multiply.py_func), {}),
], ids=["wrapper", "generator", "in place", "guvectorize"])  # fmt: skip
def test_op_accepts_decorated_kernels(kernel, options):
    op = xk.XLACustomKernel("multiply")
    assert op.def_numba_kernel(**options)(kernel) is kernel
    check_close(op(ONE_TO_8, WEIGHTS, outs=[spec(8)])[0], ONE_TO_8 * WEIGHTS)


@needs_warp
def test_op_accepts_warp_kernel_with_options():
    op = xk.XLACustomKernel("add_up")
    op.def_warp_kernel(warp_kernels().add_up, launch_dims=3)
    check_close(jax.vmap(partial(op, outs=spec(2)))(np.float32([[0, 1, 2, 9], [3, 4, 5, 9]])), [[3, 0], [12, 0]])


def test_op_outputs_of_decorated_kernels_start_from_zeros():
    """With `zero_outputs=False`, the kernel has another target."""
    kernel = kernel_from_body("out[0] += x[0]", "sevens, x, out")
    op = xk.XLACustomKernel("adds")
    op.def_numba_kernel(numba.njit(kernel))
    op.def_kernel("generated", "cpu", lambda: numba.njit(kernel))
    op.def_kernel("uninitialized", "cpu", numba.njit(kernel), zero_outputs=False)
    calls = [partial(op, outs=like_first, backend=backend) for backend in op.available_backends("cpu")]
    check_close(call_with_dirty_outputs(calls[0], (), [ONE_TO_8]), [[ONE_TO_8[0], *7 * [0]]])
    zeroed, generated, uninitialized = (target_of(call, ONE_TO_8, ONE_TO_8) for call in calls)
    assert zeroed == generated != uninitialized


# -- JVP, VJP, transpose and batching rules --------------------------------------------------------------


def test_op_vjp_rule_handles_integers_and_structured_outs():
    """Cotangents have the structure of outs.  The rule may return a float0 cotangent for an integer."""

    def sine_and_signs(x, n, a):
        return {"sine": jnp.sin(a * x), "times_sign": jnp.sign(x).astype(np.int32) * n}

    def backward(x, cotangents, a):
        return a * jnp.cos(a * x) * cotangents["sine"], np.zeros((), jax.dtypes.float0)

    op = op_with_kernel(sine_and_signs)
    op.def_vjp_rule(lambda x, n, a: (sine_and_signs(x, n, a), x), backward)

    @partial(jax.vmap, in_axes=(0, None))
    def sine(x, n):
        outs = {"sine": x, "times_sign": spec(*x.shape, dtype=np.int32)}
        return op(x, n, outs=outs, a=2.0)["sine"]

    check_close(jax.jit(lambda: sine(ROWS, 3))(), np.sin(2 * ROWS))  # a custom_vjp of JAX needs jit here
    check_close(jax.jit(lambda: jax.vmap(sine, (0, None))(ROWS[None], 3))(), np.sin(2 * ROWS[None]))
    x_gradient, n_gradient = jax.grad(sum_of(sine), (0, 1), allow_int=True)(ROWS, 3)
    check_close(x_gradient, 2 * np.cos(2 * ROWS))
    assert n_gradient.dtype == jax.dtypes.float0
    second_derivative = jax.jit(jax.grad(sum_of(jax.grad(sum_of(sine)))))(ROWS, 3)
    check_close(second_derivative, -4 * np.sin(2 * ROWS), tolerance=2e-5)


def test_op_rules_differentiate_complex_operands():
    op = op_with_kernel(lambda x: x * x)
    gradient_of_real_part = jax.grad(lambda x: op(x, outs=like_first).real)
    op.def_jvp_rule2(lambda t, x: 2 * x * t)
    check_close(gradient_of_real_part(1 + 2j), np.complex64(2 + 4j))
    op.def_vjp_rule(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,))
    check_close(gradient_of_real_part(1 + 2j), np.complex64(2 + 4j))


def test_op_rules_are_not_called_without_tangents_or_cotangents():
    op, seen = op_with_kernel(operator.mul), []

    @op.def_transpose_rule
    def transpose(cotangents, x, y):
        seen.append(cotangents)
        return None, None

    op.def_jvp_rule2(lambda t, x, y: op(t, y, outs=t), lambda t, x, y: pytest.fail("y has no tangent"))
    multiply = jax.vmap(lambda x: op(x, WEIGHTS, outs=x))
    check_close(jax.grad(lambda x: multiply(multiply(x)).sum())(ROWS), np.zeros_like(ROWS))
    assert len(seen) == 1


def test_op_jvp_rule_gets_zero_tangents_of_slice_shape():
    op = op_with_kernel(operator.mul)

    @op.def_jvp_rule
    def jvp(primals, tangents):
        x, y = primals
        x_dot, y_dot = map(ad.instantiate_zeros, tangents)
        return [x * y], [x_dot * y + x * y_dot]

    multiply = jax.vmap(as_function(op))
    check_close(jax.grad(sum_of(lambda x: multiply(x, ROWS + 1)))(ROWS), ROWS + 1)


RULE_ERRORS = {  # method, rules, error text
    "number of JVP rules": ("def_jvp_rule2", [None], "1 JVP rules for 2 operands. Pass 2 rules"),
    "JVP": ("def_jvp_rule", [lambda x, t: (x[:1], [t[0].astype(int)])], "(int32[8]), but the outputs are (float32[8])"),
    "JVP pair": ("def_jvp_rule", [lambda x, t: x[0]], "must return a pair. Got "),
    "batching pair": ("def_batching_rule", [lambda args, axes: args[0]], "must return a pair. Got "),
    "transpose": ("def_transpose_rule", [lambda cts, x, y: cts], "but the operands are (any, float32[8])"),
    "VJP": ("def_vjp_rule", [lambda x, y: x * y, lambda y, ct: (ct, ct)], "Return outputs, residuals"),
    "batching": ("def_batching_rule", [lambda args, axes: (args[:1], [None])],
                 "(float32[3,3,8]), but outs declares, with the batch"),
    "axes": ("def_batching_rule", [lambda args, axes: (args[:1], [])], "It returned 1 output and the axes []"),
}  # fmt: skip


@pytest.mark.parametrize("method, rules, text", named_rows(RULE_ERRORS))
def test_op_rule_with_wrong_result_raises(method, rules, text):
    """The results of rules for derivatives are compared with the specs of one slice."""
    op = multiply_op()
    getattr(op, method)(*rules)
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        jax.grad(sum_of(jax.vmap(as_function(op))), (0, 1))(ROWS, ROWS)


def test_op_redefined_rules_reach_compiled_functions():
    op = op_adding(a=1)
    derivative = jax.jit(jax.grad(as_function(op)))
    of_batch = jax.jit(jax.vmap(lambda x: op.primitive.bind(x, outs=(spec(),))[0]))  # a caller may bind the primitive
    for value in (2, 3):
        op.def_jvp_rule(lambda primals, tangents, value=value: (primals, [value * tangents[0]]))
        assert derivative(0.0) == value
        op.def_vjp_rule(lambda x: (x, None), lambda residuals, ct, value=value: -value * ct)
        assert derivative(0.0) == -value
        op.def_batching_rule(lambda args, axes, value=value: ([value * args[0]], axes))
        assert of_batch(jnp.ones(1)) == value
    op.register_general_batching()
    assert of_batch(jnp.ones(1)) == 2  # by the kernel, which adds 1


def test_defjvp_accepts_primitive():
    xk.defjvp(multiply_p, lambda t, x, y: t * y, None)
    multiply = jax.jit(multiply_p.bind)
    check_close(jax.jvp(multiply, (ONE_TO_8, ROWS[1]), (WEIGHTS, ROWS[2])), (ONE_TO_8 * ROWS[1], WEIGHTS * ROWS[1]))


OP_RETURNING_DICT = op_with_kernel(lambda x, y: {"product": x * y})


@pytest.mark.parametrize("primitive, options, expected", [
    (multiply_p, {}, ROWS * ONE_TO_8),
    (OP_RETURNING_DICT, {"outs": {"product": spec(8)}}, {"product": ROWS * ONE_TO_8}),
    (OP_RETURNING_DICT.primitive, {"outs": {"product": spec(8)}}, {"product": ROWS * ONE_TO_8}),
], ids=["primitive of JAX", "op", "primitive of op"])  # fmt: skip
def test_general_batching_rule_accepts_op_or_primitive(primitive, options, expected):
    rule = jax.jit(lambda *operands: xk.general_batching_rule(primitive, operands, (1, None), **options))
    check_close(rule(ROWS.T, ONE_TO_8), (expected, jax.tree.map(lambda _: np.int32(0), expected)))


def test_op_batching_rule_may_call_general_batching_rule():
    op = op_with_kernel(operator.mul)
    op.def_batching_rule(lambda args, axes, outs: xk.general_batching_rule(op, args, axes, outs=outs[0]))
    x = np.stack([ROWS, -ROWS])
    check_close(jax.vmap(jax.vmap(as_function(op)))(x, x + 1), x * (x + 1))


@pytest.mark.parametrize("jvp_rules, gradient", [([], 6), ([lambda t, x, y: t, None], 1)], ids=[
    "derivative of the batching rule", "JVP rule"])  # fmt: skip
def test_op_batching_rule_handles_innermost_vmap(jvp_rules, gradient):
    """The rule multiplies by the number of slices, 3, too.  Without a JVP rule, JAX differentiates it."""
    op = op_with_kernel(operator.mul)
    if jvp_rules:
        op.def_jvp_rule2(*jvp_rules)
    op.def_batching_rule(lambda args, axes: ([len(args[0]) * (args[0] * args[1]).T], [-1]))
    nested = jax.vmap(jax.vmap(as_function(op), (1, None)))
    x, twos = np.stack([ROWS, -ROWS]), np.full((2, 8), 2, np.float32)
    operands = x.swapaxes(1, 2), twos
    check_close(nested(*operands), 6 * x)
    check_close(jax.grad(sum_of(nested))(*operands), np.full((2, 8, 3), gradient, np.float32))


def test_op_batching_rule_may_use_traced_values_beside_vjp_rule():
    """The VJP rule replaces the JVP rule, beside which a batching rule must not use traced values."""
    op = op_with_kernel(operator.neg)
    op.def_jvp_rule2(lambda t, x: -t)
    op.def_vjp_rule(lambda x: (-x, None), lambda _, ct: (-ct,))

    @jax.jit
    def batch(scale):
        op.def_batching_rule(lambda args, axes: ([scale * args[0]], axes))
        return jax.vmap(as_function(op))(ONES)

    check_close(batch(2.0), 2 * ONES)


def test_op_transpose_rule_is_used_instead_of_transposed_batching_rule():
    op = op_with_kernel(lambda x: 2 * x)
    op.def_transpose_rule(lambda cts, x: [5 * cts[0]])
    op.def_batching_rule(lambda args, axes: ([2 * args[0]], axes))
    check_close(jax.linear_transpose(jax.vmap(as_function(op)), ONES)(ONES), (5 * ONES,))


# -- debugging and timing ------------------------------------------------------------------------------


def test_debug_nans_detects_nan_of_kernel():
    kernel = wrap(kernel_storing("np.log(x[0])"))
    op = op_with_kernel(kernel)

    def bind(x):
        return op.primitive.bind(x, outs=(spec(1),))[0]

    for log in (as_function(op), bind, jax.disable_jit()(kernel)):
        with jax.debug_nans(True):
            check_close(log(jnp.ones(1)), [0])
            with pytest.raises(FloatingPointError):
                log(-jnp.ones(1))


def raise_key_error(*args):
    raise KeyError("boom")


def test_op_benchmark_shows_difference_or_error_of_each_backend():
    op = op_adding(a=1, b=np.nan, c=1.5)
    op.def_kernel("bad", "cpu", raise_key_error)
    op.def_kernel("far", "gpu", generator_adding(1))
    result = op.benchmark(ONE_TO_8, outs=like_first)
    assert re.fullmatch(r"backend .*\na .*\d  0\nb .*\d  nan\nc .*\d  0.5\nbad .*nan  .*KeyError.*", str(result))
    assert op_adding(a=np.nan, b=np.nan).benchmark(ONE_TO_8, outs=like_first).rows[1].difference == 0


def test_op_benchmark_measures_first_call_in_ms_and_median_in_us(monkeypatch):
    """The calls advance a fake clock."""
    durations = iter([  # of the calls, in seconds
        8,  # the first call
        1,  # sets the number of repetitions, 5
        2, 2, 32, 2, 2,  # the repetitions; their mean is 8
        0,  # computes the outputs
    ])  # fmt: skip
    times = [0]

    def add_one_and_advance_clock(x):
        times.append(times[-1] + next(durations))
        return x + 1

    monkeypatch.setattr("timeit.Timer", partial(timeit.Timer, timer=lambda: times[-1]))
    op = op_with_kernel(lambda x: jax.pure_callback(add_one_and_advance_clock, x, x))
    (row,) = op.benchmark(ONE_TO_8, outs=like_first, backend="jax").rows
    assert (row.backend, row.first_ms, row.median_us, row.difference) == ("jax", 8000, 2_000_000, 0)


# ======================================================================================================
# Several devices: XLA partitions the batch dimensions of a call over a mesh, and gathers the other dimensions


@xk.numba_kernel(outs=lambda x, v, *_: (v, spec(dtype=np.int32)), input_output_aliases={1: 0}, scratch=like_last)
def add_to_v(x, v, y, z, out, count, work):
    for i in range(z.size):
        work[i] = x[()] * z[i]
        out[i] += work[i] + y[0, 0]
    count[()] = z.size


COLLECTIVES = re.compile(r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")

A846 = np.random.default_rng(0).random((8, 4, 6), np.float32)  # the digits of a name are the shape
A86, A6, A8, B8 = A846[:, 0], A846[0, 1], A846[:, 1, 0], A846[:, 2, 0]
A44, B44 = A846[0, :, :4], A846[1, :, :4]
multiply_in_op, multiply_in_jax = as_function(multiply_op(numba_multiply)), as_function(multiply_op())
multiply_all_pairs = jax.vmap(jax.vmap(multiply_in_op, (None, 0)), (0, None))
multiply_rows = jax.vmap(multiply_in_op, (0, None))


def multiply_rows_over_d(x, y):
    options = {"in_specs": (P("d"), P()), "out_specs": P("d"), "axis_names": {"d"}}
    return jax.shard_map(jax.vmap(multiply_rows, (0, None)), mesh=four_device_mesh(2, 2), **options)(x, y)


gradient_of_squares = jax.grad(lambda x, y: (multiply_rows(x, y) ** 2).sum())


def grad_of_sum(multiply):
    return jax.grad(sum_of(multiply), (0, 1))


def compile_for_mesh(axis_type, function, operands):
    """Return a function compiled for a mesh of (2, 2) devices, and its arguments.  An operand is (array, partition)."""
    mesh = four_device_mesh(2, 2, axis_type=axis_type)
    args = [on_mesh(x, *partition, mesh=mesh) for x, partition in operands]
    return jax.jit(function).lower(*args).compile(), args


def communicates(executable):
    return COLLECTIVES.search(executable.as_text()) is not None


@needs_four_devices
@pytest.mark.parametrize("axis_type, function, operands, expected", [
    (AUTO, multiply_rows_over_d, [(A846, P("d", "e")), (A6, P())], A846 * A6),
    (AUTO, jax.vmap(add_to_v, (None, 0, None, 0)),
     [(A8[0], P()), (A86, P("d")), (A846[0], P()), (A86, P("d"))],
     ((1 + A8[0]) * A86 + A846[0, 0, 0], np.full(8, 6, np.int32))),
    (AUTO, multiply_all_pairs, [(A44, P("d")), (B44, P("e"))], A44[:, None] * B44),
    (EXPLICIT, jax.vmap(multiply_rows), [(A846, P(None, ("e", "d"))), (A86, P())], A846 * A86[:, None]),
    (EXPLICIT, gradient_of_squares, [(A44, P("d")), (B44[0], P())], 2 * A44 * B44[0] ** 2),
], ids=["shard_map over one axis", "aliases and scratch", "nested batch over both axes", "dimension over both axes",
        "gradient"])  # fmt: skip
def test_xla_partitions_batch_without_communication(axis_type, function, operands, expected):
    executable, args = compile_for_mesh(axis_type, function, operands)
    check_close(executable(*args), expected)
    assert not communicates(executable)


@needs_four_devices
@pytest.mark.parametrize("axis_type, function, operands, expected", [
    (AUTO, multiply_in_op, [(A8, P("d")), (B8, P("d"))], A8 * B8),  # with explicit axes JAX rejects it
    (EXPLICIT, multiply_in_jax, [(A8, P("d")), (B8, P())], A8 * B8),
    (EXPLICIT, grad_of_sum(multiply_in_jax), [(A8, P("d")), (B8, P())], (B8, A8)),
    (EXPLICIT, grad_of_sum(WITH_VJP_RULE), [(A8, P("d")), (B8, P())], (B8, A8)),
], ids=["both partitioned", "one replicated", "gradients", "gradients by a VJP rule"])  # fmt: skip
def test_xla_gathers_operands_without_batch(axis_type, function, operands, expected):
    executable, args = compile_for_mesh(axis_type, function, operands)
    check_close(executable(*args), expected)
    assert communicates(executable)


@needs_four_devices
def test_wrapper_works_in_eager_shard_map_and_checkpoint():
    multiply = jax.custom_vjp(plain := wrap(numba_multiply))
    multiply.defvjp(lambda x, y: (plain(x, y), (x, y)), lambda xy, ct: (ct * xy[1], ct * xy[0]))
    split = jax.shard_map(multiply, mesh=four_device_mesh(4), in_specs=P("d"), out_specs=P("d"))
    check_close(split(A8, B8), A8 * B8)
    for f in (multiply, split):
        check_close(grad_of_sum(jax.checkpoint(f))(A8, B8), (B8, A8))


@needs_four_devices
def test_side_effect_on_mesh_needs_shard_map_over_all_axes():
    """Otherwise XLA decides on which devices a kernel runs."""

    def over_axis(f, axis, **mesh):
        return jax.shard_map(f, in_specs=P(axis), out_specs=P(axis), axis_names={axis}, **mesh)

    mesh = four_device_mesh(2, 2)
    kernel = wrap(copy_elements.__wrapped__, has_side_effect=True)
    with pytest.raises(NotImplementedError, match=r"'copy_elements' has side effects.*shard_map over all axes"):
        jax.jit(over_axis(kernel, "d", mesh=mesh))(A44)
    over_both = over_axis(over_axis(kernel, "e"), "d", mesh=mesh)
    check_close(jax.jit(over_both)(A44), A44)


# ======================================================================================================
# Mistakes: each raises an error that states the rule, the offending value and the fix
#
# A row has an expression that makes the mistake, the exception, and parts of its message with `.*` between them.  Some
# rows also have a condition of conftest.py.


def call_body(code, **values):
    return wrap(kernel_from_body(code, **values))(ONES)


ODD_TEXT = "größe 日本 \U0001f600 a\0" + "x" * 1_000_000
NO_VALUES = "Arrays are passed as specs, which have .shape and .dtype but no values. .*a fixed capacity"

NUMBA_MISTAKES = [  # and mistakes with which all wrappers deal in the same way
    # when a wrapper is created
    ("wrap(partial(identity))", TypeError, "a plain function, or .*guvectorize; got partial.*closure"),
    ("wrap(types.MethodType(identity, 3))", TypeError, "got method.*outside of the class"),
    ("wrap(lambda self, x: x)", TypeError, "is a method, and `self` is not an array. Write a function"),
    ("wrap(np.sin)", TypeError, "<ufunc 'sin'>. .*: lambda x: np.sin(x). .*drop target='parallel'"),
    ("wrap(abs)", TypeError, "got builtin_function_or_method .*in a function: lambda x: abs(x)"),
    ("wrap(jnp.sin)", TypeError, "got PjitFunction .*Write a Python function, with np. for jnp."),
    ('wrap(identity, [SPEC_4, "f4"])', TypeError, "outs[1] .*got 'f4' of type str. Write jax.ShapeDtypeStruct"),
    ("wrap(identity, jnp.float32)", TypeError, "got <class 'jax.numpy.float32'> .*Write jax.ShapeDtypeStruct"),
    ("wrap(identity, spec(-1))", ValueError, "sizes of at least 0. Its shape is (-1,). Write max(size, 0)"),
    ("wrap(scalars=3)", ValueError, "scalars=[3] must contain names of array parameters, and 3 is not one"),
    ("wrap(cache=True)", TypeError, "unexpected keyword argument 'cache'. .* @numba.njit(cache=True)"),
    ('wrap(device="cpu")', TypeError, "unexpected keyword argument 'device'. .*jax.device_put(x, device)"),
    ('wrap(vmap_method="loop")', ValueError, "vmap_method must be one of .*'sequential'.*got 'loop'"),
    ('wrap(in_out_argnames=["t"])', ValueError, "in_out_argnames=.*'t' is not one. Choose from (x, out)"),
    ('wrap(in_out_argnames=["out", "x"])', ValueError, "['out', 'x']. Write in_out_argnames=['x', 'out']"),
    ('wrap(in_out_argnames=["x"], scalars=["x"])', ValueError, "Remove it from scalars, and write x[()]"),
    # inputs
    ("add_one([1, 2])", TypeError, "input 0 ('x') .*got list [1, 2]. Convert it, jnp.array(x)"),
    ('add_one({"a": ONES})', TypeError, "got dict .*Pass its values one by one, x[key]"),
    ('add_one("fast")', TypeError, "got str 'fast'. .*a variable of the kernel's closure"),
    ("add_one(Fraction(1, 2))", TypeError, "got Fraction Fraction(1, 2). Convert it, float(x)"),
    ('add_one(np.array(["2020"], "M8[D]"))', TypeError, 'got ndarray of dtype datetime64[D]. .*x.view("int64")'),
    ("add_one(np.array([1.0, 2], object))", TypeError, 'got ndarray of dtype object. .*x.astype("float32")'),
    ('add_one(np.zeros(3, [("a", "f4")]))', TypeError, "got ndarray of dtype [('a', '<f4')]. .*x['a']"),
    ("add_one(types.SimpleNamespace(__dlpack__=None))",
     TypeError, "DLPack cannot share it (.*). Pass a NumPy array, in PyTorch x.detach().cpu().numpy()"),
    ("add_one(jax.new_ref(jnp.ones(4)))", TypeError, "input 0 .*got a jax.Ref. Pass its value, x[...]"),
    ('add_one(ONES.astype(">f4"))', TypeError, "got ndarray of dtype >f4.*newbyteorder("),
    ("add_one(SPEC_4)", TypeError, "got a ShapeDtypeStruct, which has no values. Pass an array"),
    ("add_one(jax.random.key(0))", TypeError, "input 0 .*got key<fry>, .*random keys: jax.random.key_data(key)"),
    ('wrap(scalars=["out"])(ONES)', ValueError, "a scalar is a 0-d input. 'out' in scalars=['out'] is an output"),
    ('wrap(scalars=["x"])(ONES)', ValueError, "'x' in scalars=['x'] is float32[4]. .*, or pass a number"),
    # outputs and scratch buffers
    ("wrap(outs=())(ONES)", ValueError, "has no outputs, so JAX would never run it. .*pass has_side_effect=True"),
    ("wrap(scratch=spec(4, dtype=jnp.bfloat16))(ONES)",
     TypeError, "scratch buffer 0 is bfloat16[4], .*Declare jax.ShapeDtypeStruct((4,), jnp.float32)"),
    ("wrap(outs=lambda x: x[x > 1])(ONES)", TypeError, f"raised TypeError: .*{NO_VALUES}"),
    ("wrap(outs=lambda x: x.shap)(ONES)", TypeError, "raised AttributeError: .*Check the spelling of 'shap'."),
    ("wrap(outs=types.SimpleNamespace(shape=None, dtype=np.float32))",
     TypeError, "of Python ints. Got None. A shape is a tuple, such as (3,)."),
    ("wrap(scratch=lambda x: spec(x.shape[1]))(ONES)",
     TypeError, "scratch, .*, raised IndexError: .*Check the indices of shapes"),
    ("wrap(outs=lambda x: spec(2, x.shape))(ONES)", TypeError, "(2, (4,)) contains .*Unpack it: (2, *x.shape)"),
    ("wrap(outs=lambda x: spec(x.size / 2))(ONES)", TypeError, "of Python ints. Got (2.0,). .*x.size // 2"),
    ("wrap(outs=lambda x: jax.ShapeDtypeStruct(x.size, x.dtype))(ONES)",
     TypeError, "A shape is a tuple. Write jax.ShapeDtypeStruct((x.size,), x.dtype)"),
    ("jax.jit(lambda n, x: wrap(outs=lambda x: spec(n))(x))(4, ONES)",
     TypeError, "a shape of Python ints. The size int32[] has no value .*jax.jit(f, static_argnums=...)"),
    ("wrap(outs=lambda x: x.shape)(ONES)", TypeError, "got 4 of type int. Write jax.ShapeDtypeStruct(shape"),
    ("wrap(scale_n, identity)(ONES, 2, 3.0)",
     TypeError, "inputs (x, n, alpha), but outs takes (x). Write outs=lambda x, n, alpha: ..."),
    ("wrap(scale_n, lambda x, n, alpha: x)(ONES)",
     TypeError, "inputs (x), but outs takes (x, n, alpha). Pass 'n', 'alpha' to the call, or write outs="),
    ("wrap(outs=lambda x, *, n: x)(ONES)", TypeError, "outs takes (x, *, n). Give 'n' a default value, or .* n=...)"),
    ("wrap(lambda x, out, last: None, identity)(ONES, ONES, ONES)",
     TypeError, "outs takes (x). If 'out', 'last' is an output, do not pass 'out', 'last'"),
    ('wrap(outs={"out": SPEC_4})(ONES)', TypeError, "Use a tuple, outs=(spec, ...), or a NamedTuple"),
    ('wrap(outs=[SPEC_4, {"out": SPEC_4}])(ONES)', TypeError, "must not contain a dict, because .*by position"),
    # outputs that are aliased to inputs
    ("wrap(input_output_aliases={0: -1})(ONES)", ValueError, "there is no output -1. The outputs are 0"),
    ("wrap(outs=(), has_side_effect=True, input_output_aliases={0: 0})(ONES)",
     ValueError, "{0: 0}: the call has no outputs. Remove the alias"),
    ("wrap(input_output_aliases={2: 0})(ONES)", ValueError, "there is no input 2. The inputs are 0"),
    ("wrap(input_output_aliases={0: 0.0})(ONES)", ValueError, "there is no output 0.0. The outputs are 0"),
    ('wrap(input_output_aliases={"y": 0})(ONES)', ValueError, "'y' is not an input of this call"),
    ("wrap(input_output_aliases={0: 0, 1: 0})(ONES, ONES)", ValueError, "Output 0 is aliased to another input"),
    ("wrap(outs=spec(3), input_output_aliases={0: 0})(ONES)",
     ValueError, "Input 0 is float32[4], and output 0 is float32[3]. Change outs[0]"),
    ('wrap(in_out_argnames=["out"])(ONES)',
     ValueError, "(x). To update 'out' in place, pass its initial value .*: out=x"),
    ('wrap(outs=[SPEC_4] * 2, in_out_argnames=["x"], input_output_aliases={0: 1})(ONES)',
     ValueError, "an input must have one alias only. Input 0 is aliased to output 0. Remove an alias"),
    ('wrap(outs=[spec(3), SPEC_4], in_out_argnames=["x"])(ONES)',
     ValueError, "'x' is float32[4], but outs[0] is float32[3]. Write outs=lambda x: (x, ...)"),
    ('wrap(lambda x, y: 0, in_out_argnames=["x", "y"])(ONES, ONES)', ValueError, "outs[1] is missing. .*(x, y)"),
    ('wrap(lambda state, state_out: None, identity, in_out_argnames=["state"])(ONES)',
     TypeError, "has one parameter, .*(state, state_out). Remove 'state_out', and store to 'state': `state[...]"),
    # the arguments of the kernel
    ("wrap(outs=[SPEC_4] * 2)(ONES)", TypeError, "takes (x, out). .*1 input, .*2 outputs, .*, output, output) or ("),
    ("wrap(lambda x, out, *, n=3: None)(ONES)", TypeError, "Make the keyword-only parameter an input"),
    ("wrap(scale_n)(ONES, alpha=ONES[0])", TypeError, "got 1 by position and (alpha) by name. 'n' is missing"),
    ("wrap(scale_n)(ONES, 2, 3.0, ONES, x=ONES)", TypeError, "got 4 by position and (x) by name. Pass each input once"),
    ("wrap(lambda x: (x, x), scratch=SPEC_4)(ONES)", TypeError, "takes (x). .*must be (input, output, scratch)"),
    ("wrap(lambda x, /, n, out: None)(ONES, n=ONES[0])", TypeError, "by position only; got 1 .*(n) by name"),
    ("wrap(scale_n)(ONES, 2, 3.0)", TypeError, "has no items n[i]; .*write it with n[()], .*scalars=['n']"),
    ("wrap(lambda x, q: x * q[()])(ONES, 2.0)", TypeError, "A 0-d input is a scalar .*Write q instead of q[()]"),
    # kernels that Numba does not compile
    ('call_body("x += 77")', TypeError, "input 'x'. Write to an output, .*in_out_argnames=['x'].* x.copy()"),
    ('call_body("jnp.sin(x)", jnp=jnp)', TypeError, "Write np. instead of jnp., and loops instead of jax.lax"),
    ('call_body("jax.random.normal(x[0])", jax=jax)', TypeError, "Draw before the call, and pass the noise"),
    ('call_body("out.at[0].set(1.0)")', TypeError, "Write out[i] = 1.0 instead of out.at[i].set(1.0)"),
    ('call_body("import math; out[0] = math.sin(x[0])")', TypeError, "Import outside of the kernel"),
    ('call_body("wrapped(x)", wrapped=add_one)', TypeError, "Call the @numba.njit function in it"),
    ('call_body("helper(x, out)", helper=identity)', TypeError, "Decorate the helper with @numba.njit"),
    ("""call_body("out[0] = a['b']", a={"b": 2.0})""", TypeError, "no dict, list or object. Pass its values"),
    ('call_body("out[:] = a", a=jnp.ones(4))', TypeError, "capture a JAX array. Pass it"),
    ('call_body("breakpoint()")', TypeError, "Remove the call. To debug .*wrapper.__wrapped__, or its .py_func"),
    (r'call_body("with numba.objmode():\n    print()")', TypeError, "uses Numba's object mode.*jax.pure_callback"),
    (r'call_body("with python():\n    print()", python=numba.objmode)', TypeError, "uses Numba's object mode"),
    # stores and returned values
    ('call_body("out = x + 1; return out")', TypeError, "Or remove the parameters for outputs, and keep the `return`"),
    ('call_body("out[0] = x[0]; return x.size")', TypeError, "returns int64. Remove the `return`"),
    ("wrap(lambda x: x / 2)(np.int32(1))", TypeError, "not int32. Return np.int32(x), or declare float32"),
    ("wrap(lambda x: (0.5 * x, x[0]), lambda x: (x, spec(dtype=np.int32)))(np.arange(3))",
     TypeError, "1d, C) for output 0, not array(int32, 1d). Return x.astype(np.int32), or declare float32 in outs"),
    ('wrap(lambda v, x: (x, x[0]), [SPEC_4, SPEC_4, spec(dtype=np.int32)], in_out_argnames=["v"])(ONES, ONES)',
     TypeError, "float32 for output 2, not int32. Return np.int32(x), or declare float32 in outs"),
    ("wrap(lambda x: x[0])(ONES)",
     TypeError, "float32 for output 0, not array(float32, 1d). Return an array with 1 dimension"),
    ("wrap(lambda x: (x, x))(ONES)",
     TypeError, "returns .*, and outs declares 1 new output. Correct the `return`, or outs"),
    ('call_body("out[0] = f(x)[0]", f=numba.njit("f8[::1](f8[::1])")(identity))',
     TypeError, 'Remove the signature. .*set jax.config.update("jax_enable_x64", True) instead'),
    ('wrap(numba.guvectorize(["f8[:], f8[:]"], "(n)->(n)")(add_one.__wrapped__))(ONES)',
     TypeError, "explicit signature of a helper or gufunc does not fit this call. Remove the signature"),
    # transformations
    ("jax.jvp(add_one, [ONES], [ONES])",
     TypeError, "write f = jax.custom_vjp(kernel), .* for grad, or f = jax.custom_jvp(kernel)"),
    ("jax.jvp(wrap(outs=spec(4, dtype=np.complex64)), [ONES], [ONES])", TypeError, "has no JVP rule"),
    ("jax.linear_transpose(add_one, ONES)(ONES)",
     NotImplementedError, "has no transpose. .* write f = jax.custom_vjp(kernel)"),
    ("lower_for_cuda(add_one, ONES)", NotImplementedError, "numba_cuda_kernel and warp_kernel"),
    # when the kernel runs
    ("wrap(identity, spec(2))(ONES)", RUNTIME_ERRORS, "of shape (4,) is returned, where outs declares (2,)"),
    ("wrap(lambda x: x.reshape((4, 1)), spec(4, 2))(ONES)",
     RUNTIME_ERRORS, "of shape (4, 1) is returned, where outs declares (4, 2)"),
    ('call_body(f"raise LookupError({ODD_TEXT!r})")',
     RUNTIME_ERRORS, "LookupError: größe 日本 \U0001f600 a.*x [...] (raised in a call of kernel 'kernel')"),
    ('jax.pmap(wrap(kernel_storing("1 // int(x[0] - 1)")))(ONES[None])',
     RUNTIME_ERRORS, "ZeroDivisionError: integer division by zero. To find the line, .*(raised in .* 'kernel')"),
    ('wrap(njit_from_body("out[x.size] = 1", boundscheck=True))(ONES)',
     RUNTIME_ERRORS, "IndexError: index .*To find the line, .*raised in a call of kernel 'kernel'"),
    ('wrap(name="in use")(ONES), wrap(kernel_storing("undefined"), name="in use")(ONES)',
     ValueError, "'in use' is in use .*Choose a new name, such as name='in use_2'"),
    ('add_one(np.ones(4, "float128"))', TypeError, 'got ndarray of dtype float128. .*x.astype("float64")', "float128"),
    ('call_body("j0(x[0])", j0=importlib.import_module("scipy.special").j0)',
     TypeError, "Use math.erf and math.gamma, or, on CPUs, SciPy's", "scipy"),
]  # fmt: skip


@cuda_helper
def sum_of_indices():
    i, j = cuda.grid(2)
    return i + j


CUDA_MISTAKES = [
    ("trace_cuda()", ValueError, "grid and block, or launch_dims"),
    ("trace_cuda(grid=1.5, block=1)", TypeError, "grid must be an int or .*got 1.5. Pass grid=(x, y)"),
    ("trace_cuda(grid=1, block=(32, 64))", ValueError, "block=(32, 64, 1) has 2048. Pass block=256, or"),
    ("trace_cuda(grid=1, block=(1, 1, 65))", ValueError, "block.z must be an int from 1 to 64; got 65"),
    ("trace_cuda(launch_dims=(1, 65535 * 16 + 1))",
     ValueError, "got 65536 in grid=(1, 65536, 1), from launch_dims=(1, 1048561). .*put the largest size in x"),
    ("trace_cuda(launch_dims=lambda x: x.sum())", TypeError, f"with the specs (float32[4]), raised .*{NO_VALUES}"),
    ("trace_cuda(launch_dims=1, threads_per_block=2048)", ValueError, "1 to 1024; got 2048"),
    ("trace_cuda(grid=1, block=64, threads_per_block=256)", ValueError, "grid and block and threads_per_block."),
    ("trace_cuda(launch_dims=lambda x: (3, 4), threads_per_block=64)",
     ValueError, "got threads_per_block=64 and launch_dims=(3, 4). Remove threads_per_block"),
    ("trace_cuda(launch_dims=1, shared_mem=-1)", ValueError, "shared_mem must be an int from 0 .*; got -1"),
    ("trace_cuda(outs=spec(3, dtype=jnp.bfloat16), launch_dims=1)",
     TypeError, "output 0 is bfloat16[3], of a dtype .*Declare jax.ShapeDtypeStruct((3,), jnp.float32)"),
    ("trace_cuda(numba.njit(identity), launch_dims=1)", TypeError, "@cuda.jit of numba .*Use numba_kernel"),
    ("xk.numba_cuda_callable(3, spec(3))(ONES)", TypeError, "for one kernel use numba_cuda_kernel.*int 3"),
    ('jax.eval_shape(xk.numba_cuda_callable(callable_from_body("pass"), SPEC_4), SPEC_4, SPEC_4)',
     TypeError, "(x, out, stream).*passes (float32[4], "),
    ("xk.numba_cuda_kernel(cuda.jit(cuda_add), like_first, launch_dims=3)[1, 64]",
     TypeError, "is called as a function of its inputs.*numba_cuda_kernel(kernel, outs, grid=..., block=...)"),
    ('trace_cuda(cuda.jit(kernel_from_body("i, j = cuda.grid(2); out[i] = j")), launch_dims=3)',
     ValueError, "launch_dims=3 has 1 .*grid returns 2"),
    ('trace_cuda(cuda.jit(kernel_from_body("out[cuda.grid(ndim=2)] = 1")), launch_dims=3)',
     ValueError, "launch_dims=3 has 1 .*grid returns 2"),
    ('trace_cuda(cuda.jit(kernel_from_body("out[0] = sum_of_indices()")), launch_dims=3)',
     ValueError, "launch_dims=3 has 1 .*grid returns 2"),
]  # fmt: skip


def trace_warp(name, *args, outs=like_first, **options):
    """Trace a call of a kernel of `warp_kernels`."""
    return jax.eval_shape(xk.warp_kernel(getattr(warp_kernels(), name), outs, **options), *args)


trace_product = partial(trace_warp, "multiply", spec(3), spec(3))
call_with = partial(call_all_types, *X_AND_W)

WARP_MISTAKES = [
    # arrays
    ('trace_warp("multiply", spec(3, dtype=np.int32), spec(3))',
     TypeError, "an array float32[:]. Got int32[3]. Cast it: x = jnp.asarray(x, jnp.float32)"),
    ('trace_warp("takes_doubles", spec(3))', TypeError, 'jnp.asarray(x, jnp.float64), after .*"jax_enable_x64", True)'),
    ('trace_warp("matvec", spec(3, 2, 2), spec(3, 4))',
     TypeError, "'v' must be an array float32[:,2]. Got float32[3,4].*: shape (n, 2). Reshape it: v.reshape(-1, 2)"),
    ('trace_warp("returns_doubles", spec(3))', TypeError, 'jnp.float64), after .*"jax_enable_x64", True)'),
    ('trace_warp("matvec", spec(3, 2, 2), spec(2, 3))',
     TypeError, "Got float32[2,3]. .*: shape (n, 2). Move the first dimension: jnp.moveaxis(v, 0, -1)"),
    ("trace_product(outs=spec(3, 2))", TypeError, "Got float32[3,2]. .*ndim=2). Or .*((3,), jnp.float32)"),
    ('trace_warp("multiply", spec(1, 1, 1, 1, 3), spec(3))',
     TypeError, "Got float32[1,1,1,1,3]. Warp arrays have at most 4 dimensions. Reshape it, such as .*reshape(-1)"),
    ("trace_product(outs=spec(3, dtype=np.int32))", TypeError, "Declare it .*((3,), jnp.float32)"),
    ('trace_warp("matvec", spec(2, 2), spec(2), outs=spec(2))',
     TypeError, "For a single element, declare .*((1, 2), jnp.float32)"),
    ('trace_product(spec(), outs=spec(), in_out_argnames=["out"])',
     TypeError, "'out' must be an array float32[:]. Got float32[]. For .*((1,), .*) in outs, and pass out.reshape(1,)"),
    ('trace_warp("multiply", spec(*export.symbolic_shape("n")), spec(3))',
     NotImplementedError, "Got float32[n]. A launch needs known dimensions, not symbolic ones. Export a program for"),
    ('trace_warp("multiply", spec(2**31), spec(3))', ValueError, "are 2147483648 and 4. .*split(x, 2, axis=0)"),
    ('trace_warp("squares_of_rows", spec(2, 2**29))', ValueError, "are 536870912 and 2147483648. .*, axis=1)"),
    ("jax.jvp(warp_product(), [ONES] * 2, [ONES] * 2)",
     TypeError, "warp_kernel(kernel, outs, differentiable=True) gives only first .* f = jax.custom_vjp(kernel)"),
    ("jax.hessian(sum_of(warp_product(differentiable=True)))(ONES, ONES)",
     TypeError, "only first derivatives .*jvp and hessian"),
    ("jax.grad(sum_of(xk.warp_kernel(warp_kernels().add_up, spec(1), differentiable=True)))(ONES)",
     ValueError, "enable_backward is False.*@wp.kernel(enable_backward=True)"),
    ('xk.XLACustomKernel("f").def_warp_kernel(warp_kernels().multiply, differentiable=True)',
     TypeError, "Got differentiable=True. Remove .*, write op.def_vjp_rule(lambda *ins: "),
    ('trace_warp("multiply", spec(3))', TypeError, "the parameters (x, y, out).* got 1 input and 1 output, "),
    ("xk.warp_kernel(warp_kernels().histogram, (spec(3), spec(3)))(THREE_INTS, 0.5)",
     TypeError, "the parameters (index, weight, acc).* got 2 inputs and 2 outputs, "),
    ('trace_warp("takes_arrays_in_structs")',
     TypeError, "'h' must be .* Got 'Holder'. .*a parameter for each field: h_a."),
    ('trace_warp("takes_arrays_of_structs")',
     TypeError, "'h' must be .* Got array(ndim=1, .*an array for each field: h_a, h_n."),
    ('trace_warp("takes_indices")',
     TypeError, "'t' must be a scalar, vector or matrix, an array .* Got .*indexedarray.* pass t[indices]."),
    ('trace_warp("takes_anything")', TypeError, "'takes_anything' is generic. .*such as wp.overload(kernel, "),
    # launches, and outputs that are aliased to inputs
    ("trace_product(dim=3)", TypeError, "unexpected keyword argument 'dim'. Pass launch_dims=3"),
    ('trace_warp("takes_nothing", outs=(), has_side_effect=True)',
     ValueError, "launch_dims is missing, and the shape of the first array, (), has 0 dimensions"),
    ('trace_product(launch_dims="3")', TypeError, "launch_dims must be 1 to 4 ints from 0 to .*. Got '3'"),
    ("trace_product(launch_dims=-1)", ValueError, "1 to 4 ints from 0 to 2147483647. Got -1"),
    ("trace_product(tiled=True)", ValueError, "number of blocks. launch_dims is missing. Pass launch_dims="),
    ("trace_product(block_dim=2048)", ValueError, "block_dim must be an int from 1 to 1024; got 2048"),
    ("trace_product(tiled=True, launch_dims=(1,) * 4)", ValueError, "1 to 3 ints .*Got (1, 1, 1, 1)."),
    ('trace_warp("histogram", in_out_argnames=["acc"], differentiable=True)',
     ValueError, "must not overwrite an input or use scratch, .*. Got in_out_argnames=['acc'], .*. Write to a new"),
    ("trace_product(scratch=spec(), differentiable=True)",
     ValueError, "scratch=[ShapeDtypeStruct(shape=(), dtype=float32)]. Remove them. Write to a new output"),
    # values and types
    ("call_with(s=1)", TypeError, "'s' is passed by value, .*Got int 1. Pass an instance of"),
    ("jax.eval_shape(lambda s: call_with(s=s), spec())",
     TypeError, "'s' is passed by value, .*Got a traced float32[]. Create the Settings outside of jax.jit"),
    ("jax.vmap(histogram(), (None, 0))(THREE_INTS, THREE_FLOATS)",
     TypeError, "'weight' is passed by value, as float32. Got a traced float32[]. .*static_argnums.*dtype=wp.float32)"),
    ("histogram()(THREE_INTS, index=3)",
     TypeError, "(index, w.*, inputs first; got 1 by position and (index) by name"),
    ("histogram(input_output_aliases={1: 0})(THREE_INTS, 0.5)", ValueError, "'weight' is not an input"),
    ("histogram(input_output_aliases={5: 0})(THREE_INTS, 0.5)", ValueError, "'argument 5' is not an input"),
    ("call_with(m=[1.0, 2.0])", Exception, "param m .*warp_kernel 'all_types'"),  # Warp's own text
    ('call_with(n=wp.HashGrid(2, 2, 2, device="cpu"))',
     TypeError, "'n' is passed by value, as uint64. Got HashGrid <.*>. Pass its id: n.id"),
    ("call_with(i=np.array(300))", ValueError, "as int8. Got ndarray array(300). .*-128 to 127"),
    ("xk.warp_kernel(like_first, spec())", TypeError, "takes a function decorated with warp.kernel; got"),
    ("xk.jaxtype_to_warptype(np.complex64)", ValueError, "Warp has no scalar type .* one of: bool, .*float64"),
    ("xk.jaxinfo_to_warpinfo(spec())", ValueError, "1 to 4 dimensions. Got float32[], with 0. Reshape it"),
    ("pickle.dumps(warp_product())", pickle.PicklingError, "'multiply'.*to a variable at the top level"),
]  # fmt: skip


def broken_op():
    op = xk.XLACustomKernel("broken")
    op.def_kernel("shape", "cpu", lambda: lambda x: jnp.reshape(x, (4, 2)))
    op.def_kernel("raising", "cpu", lambda: raise_key_error)
    op.def_kernel("nothing", "cpu", lambda: None)
    op.def_kernel("far", "gpu", generator_adding(1))
    op.def_kernel("undecorated", "cpu", add_one.__wrapped__)
    op.def_kernel("needs n", "cpu", lambda n: identity)
    op.def_kernel("effects", "cpu", lambda: wrap(has_side_effect=True))
    op.def_kernel("ordered", "cpu", lambda: partial(jax.experimental.io_callback, abs, spec(8), ordered=True))
    op.def_numba_kernel(numba_multiply)
    return op


def call_broken(backend, **params):
    """Call a broken op.  A compiled batch must raise the same type of error."""
    call = partial(broken_op(), outs=like_first, backend=backend, **params)
    try:
        call(ONE_TO_8)
    except Exception as error:
        with pytest.raises(type(error), match="'broken'"):
            jax.jit(jax.vmap(call))(ROWS)
        raise


def call_undecorated(method, is_generated=False):
    """Call an op whose kernel lacks its decorator.  If `is_generated`, a generator returns the kernel."""
    op = xk.XLACustomKernel("undecorated")
    kernel = add_one.__wrapped__
    getattr(op, method)((lambda: kernel) if is_generated else kernel)
    op(ONES, outs=like_first)


def differentiate_op_whose_rule_calls_it():
    op = op_adding(a=1)
    op.def_jvp_rule2(lambda tangent, x: op(tangent, outs=like_first))
    jax.grad(as_function(op))(1.0)


def add_in_op(x):
    """Call an op with a valid input, and then with this one."""
    add = as_function(op_adding(a=1))
    add(ONES)
    add(x)


NJIT_ITSELF = numba.njit(identity)
empty_op = partial(xk.XLACustomKernel, "empty")  # a new op for each mistake
OP_MISTAKES = [
    # inputs
    ("add_in_op(jax.new_ref(jnp.ones(4)))", TypeError, "'op': input 0.*got a jax.Ref. Pass its value, x[...]"),
    ('add_in_op(ONES.astype(">f4"))', TypeError, "'op': input 0.*got ndarray of dtype >f4.*newbyteorder("),
    ('add_in_op(ONES.astype(jnp.bfloat16)), add_in_op(ONES.astype(">f4"))',  # each array of NumPy is checked
     TypeError, "'op': input 0.*got ndarray of dtype >f4.*newbyteorder("),
    ("add_in_op([1.0])", TypeError, "'op': input 0.*a number or an array.*got list [1.0]. .*jnp.array(x)"),
    # calls
    ("jax.grad(lambda x: op_with_kernel(lambda y: x * y)(1.0, outs=spec()))(1.0)",
     TypeError, "'op': .* traced values of its closure. Got .*Pass the value as an operand: op(x, value,"),
    ('op_with_kernel(lambda x: (x.min(), x.max()))(ONES, outs={"low": spec(), "high": spec()})',
     ValueError, "'op'.*returned .*, but outs declares .*with the same keys. .* or use tuples"),
    ('call_broken("shape")', ValueError, "'shape' .* returned (float32[4,2]), but outs declares (float32[8])"),
    ('call_broken("far")', ValueError, "'far' for platform 'cpu'. Registered: cpu: shape, .*, numba; gpu: far. "),
    ('call_broken("")', ValueError, "no backend '' for platform 'cpu'"),
    ('call_broken("raising")', KeyError, "Raised by .* backend 'raising' .*or by its generator. .*pass backend="),
    ('call_broken("nothing")', TypeError, "must return a decorated kernel.*Got None. .*pass lambda: f"),
    ('call_broken("undecorated")', TypeError, "'undecorated' takes (x, out).* a function f .*pass lambda: f"),
    ('call_broken("numba", alpha=2)', TypeError, "Got alpha .*: lambda alpha: make_kernel(alpha)"),
    ('call_broken("needs n")', TypeError, "the generator of backend 'needs n' takes (n)"),
    ("empty_op()(ONES, outs=lambda x: x.T)", TypeError, "got <function .*Write jax.ShapeDtypeStruct(shape"),
    ("empty_op()(ONES, outs=None)", TypeError, "'empty': outs is missing. .*outs=lambda x: x. A wrapper"),
    ("jax.jit(as_function(empty_op()))(ONES, k=2.0)", TypeError, "hashable. Parameter 'k' is .*static_argnames=\"k\""),
    ("xk.general_batching_rule(empty_op(), (ONES,), (0,))", TypeError, "needs outs of .*'empty', .* Got None"),
    ("as_function(empty_op())(ONES)", NotImplementedError, "Registered: nothing. .*def_kernel('jax', 'cpu', kernel)"),
    # registration
    ('empty_op().def_kernel(1, "cpu", identity)', TypeError, "backend and a platform are strings. Got 1 and"),
    ('empty_op().def_kernel("a", "cpu", "text")', TypeError, "function. Got 'text'. .* a generator, .*lambda: f"),
    ('empty_op().def_kernel("a", "cuda12", identity)', ValueError, "Got 'cuda12'. Write 'gpu'"),
    ("empty_op().def_numba_kernel(identity, grid=3)", TypeError, "Got grid with .* Decorate the kernel, or pass"),
    ("empty_op().def_numba_kernel(add_one, grid=3)", TypeError, "<numba_kernel .*, or pass the options to a wrapper"),
    ("empty_op().def_numba_kernel(NJIT_ITSELF, grid=3)", TypeError, "unexpected keyword argument 'grid'"),
    ("empty_op().def_numba_kernel(NJIT_ITSELF, outs=ONES)", TypeError, "Got outs=array.*: op(x, outs=lambda x: x)"),
    ("empty_op().def_warp_kernel(NJIT_ITSELF)", TypeError, "own backend. .*op.def_numba_kernel(kernel)"),
    ('call_undecorated("def_numba_kernel")', TypeError, "takes (x, out).*is a kernel, decorate it with @numba.njit"),
    ('call_undecorated("def_warp_kernel")', TypeError, "takes (x, out).*is a kernel, decorate it with @wp.kernel"),
    ('call_undecorated("def_numba_kernel", True)', TypeError, "(x, out).*decorate .* with @numba.njit"),
    ('call_broken("effects")', TypeError, "has has_side_effect=True. .* Call the wrapper itself"),
    ("xk.defjvp(3)", TypeError, "defjvp takes an XLACustomKernel or a jax Primitive. Got 3"),
    ('empty_op().def_jvp_rule2(None, "wrong")', TypeError, "operand 1 must be a function. Got 'wrong'"),
    # transformations
    ('call_broken("ordered")', NotImplementedError, "ordered effects, .* call the generator's function instead"),
    ("differentiate_op_whose_rule_calls_it()",
     NotImplementedError, "is one of them.*Define its def_transpose_rule(...), or .*def_vjp_rule(...) instead"),
    ("jax.grad(as_function(empty_op()))(1.0)", NotImplementedError, "has no JVP rule. .*op.def_vjp_rule(f"),
    ('pickle.dumps(xk.XLACustomKernel("local"))', pickle.PicklingError, "'local'.*a variable at the top level"),
]  # fmt: skip


def mistakes(backend, table, condition):
    """Return the rows of a table as parameters of the test, with the expressions as IDs."""
    needs = pytest.mark.needs
    return [
        pytest.param(expression, error, text, marks=needs(condition, *others), id=f"{backend}: {expression}")
        for expression, error, text, *others in table
    ]


@pytest.mark.parametrize("expression, error, text", [
    *mistakes("numba", NUMBA_MISTAKES, "numba"), *mistakes("cuda", CUDA_MISTAKES, "cuda decorates"),
    *mistakes("warp", WARP_MISTAKES, "warp"), *mistakes("op", OP_MISTAKES, "numba"),
])  # fmt: skip
def test_mistake_raises_error_with_fix(expression, error, text):
    """A valid call before it has no influence on the mistake, and the mistake has none on a later one."""
    np.testing.assert_array_equal(add_one(ONES), ONES + 1)
    with pytest.raises(error) as caught:
        jax.block_until_ready(eval(expression, globals()))
    first_line = str(caught.value).partition("\n")[0]  # Numba's own message may follow
    assert re.search(pattern_of(text), "\n".join([first_line, *getattr(caught.value, "__notes__", [])]))
    assert "'NoneType' object" not in str(caught.value)  # an internal error of Numba
    np.testing.assert_array_equal(add_one(ONES), ONES + 1)


def test_fix_of_unsupported_dtype_works():
    """The message contains an expression with casts."""
    x = jnp.ones(4, np.float16)
    with pytest.raises(TypeError, match=r"'add_one': input 0 is float16\[4\]") as caught:
        add_one(x)
    result = eval(str(caught.value).partition("back: ")[2].removesuffix("."), {"f": add_one, "x": x, "jnp": jnp})
    np.testing.assert_array_equal(result, x + 1, strict=True)


def test_callback_interrupted_before_its_start_raises():
    """If Ctrl-C interrupts ctypes before the Python function starts, ctypes returns to the handler as usual."""
    signature = xk._Signature("kernel", 1, (np.dtype("f4"),) * 2, (1, 1))
    emitter = xk._CallbackEmitter(signature, print)
    emitter.callback = type(emitter.callback)(lambda words: None)
    target = new_name("interrupted")
    xk._register_with_xla(target, "cpu", xk._build_handler(signature, emitter))
    call = partial(jax.ffi.ffi_call(target, SPEC_4), launch=np.zeros(0, np.int64))
    assert "KeyboardInterrupt (raised in a call of kernel 'kernel')" in error_of(call, ONES)


def test_concurrent_kernel_errors_keep_messages():
    """XLA copies the message after the handler has returned, while kernels of other threads fail."""
    call = wrap(kernel_from_body("out[0] = x[0]\nif x[0] < 0: raise ValueError('negative element', x[0])"))

    def work(number):
        x = np.full(1, number, np.float32)
        for _ in range(40):
            assert call(x)[0] == number
            assert f"('negative element', -{number}.0)" in error_of(call, -x)

    in_threads(work, range(1, 9))


@pytest.mark.parametrize("is_leaking", [False, True], ids=["kernel", "kernel and a leak"])
def test_failed_call_leaks_no_object(is_leaking):
    """A leaked object is at least one block per call.  The second case shows that the test would find one.

    JAX < 0.11 allocates more blocks in the first 400 calls, and threads of other tests also allocate.
    """
    call = jax.jit(wrap(kernel_from_body("raise LookupError('no such number')")))
    leaked = []

    def new_blocks():
        gc.collect()
        blocks = sys.getallocatedblocks()
        for _ in range(200):
            error_of(call, ONES)
            if is_leaking:
                leaked.append(object())
        gc.collect()
        return sys.getallocatedblocks() - blocks

    assert any(new_blocks() < 150 for _ in range(8)) != is_leaking


# ======================================================================================================
# C structs


def fields_in_header(text, name):
    """Return the name and the size in bytes of each field of a struct."""
    body = re.search(rf"struct {name} \{{(.*?)\}}", text, re.DOTALL)[1]
    fields = []
    for declaration in body.split(";")[:-1]:
        *kind, field = re.findall(r"\w+|\*", declaration)
        has_8_bytes = set(kind) & {"*", "size_t", "int64_t", "_XLA_FFI_API_STRUCT_FIELD"}
        struct_or_enum = getattr(xk, kind[-1], ctypes.c_int32)
        fields.append((field, 8 if has_8_bytes else ctypes.sizeof(struct_or_enum)))
    return fields


def test_mirrored_structs_equal_the_header():
    """The header of a later jaxlib may have more fields at the end of a struct."""
    path = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    names_in_jaxlib_0_9 = {  # by their names in later versions
        "XLA_FFI_InternalExtension": "XLA_FFI_Extension_Base",
        "XLA_FFI_Error_GetDetails": "XLA_FFI_Error_GetMessage",
        "XLA_FFI_InvokeContext_Get": "XLA_FFI_ExecutionContext_Get",
    }
    for name, older in names_in_jaxlib_0_9.items():
        text = text if name in text else text.replace(older, name)
    structs = {name: value for name, value in vars(xk).items() if name.startswith("XLA_FFI_")}
    assert structs
    for name, struct in structs.items():
        fields = [(field, ctypes.sizeof(kind)) for field, kind in struct._fields_]
        assert fields == fields_in_header(text, name)[: len(fields)]


# ======================================================================================================
# Processes of their own.  Some run several programs, because a process takes 3 s to start


def fork_and_reload():
    """Check kernels after registration before JAX has a backend, in a forked process, and after a reload."""
    assert not xla_bridge.backends_are_initialized()  # an import of this file creates no backend
    held = jax.jit(add_one)
    jax.eval_shape(add_one, ONES)  # this registers the kernel

    def check():
        new = xk.numba_kernel(add_one.__wrapped__, like_first)
        assert held(ONES)[3] == jax.vmap(new)(ONES[None])[0, 3] == 2

    child = multiprocessing.get_context("fork").Process(target=check)
    child.start()
    child.join()
    assert child.exitcode == 0, "the forked process"
    jitted = numba.njit(add_one.__wrapped__)
    for is_reloaded in (False, True):
        if is_reloaded:
            importlib.reload(xk)
        check()
        for name, kernel in (("plain", add_one.__wrapped__), ("jitted", jitted)):
            assert xk.numba_kernel(kernel, like_first, name=name)(ONES)[0] == 2


RESULTS_AT_EXIT = []  # of kernels that still run when the process exits


def share_xla_threads():
    """Run nested batches on all devices in 16 threads.  They share XLA's thread pool, and must not wait for it."""

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
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
    jitted = jax.jit(nest(None))
    pmapped = jax.pmap(jax.vmap(jax.vmap(wrap(spin), (0, 0)), (0, None)), in_axes=(0, None))
    sharded = jax.jit(jax.shard_map(nest(None), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")))

    def work(thread):
        for _ in range(10):  # ten rounds found a lost wake-up
            for f in (jitted, pmapped, sharded):
                np.testing.assert_array_equal(f(x, y), expected)
            assert "bad slice" in error_of(jitted, bad, y)

    pmapped(x, y)  # in one thread, because the cache of pmap fails if several threads trace it (jax 0.9)
    in_threads(work, range(16))
    RESULTS_AT_EXIT.extend(pmapped(x + i, y) for i in range(100))


def run_seven_slices_on_eight_devices():
    """Run a batch whose slices lie on several devices, and gather its results."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
    replicated, partitioned = [jax.sharding.NamedSharding(mesh, P(*axes)) for axes in ((), "d")]
    kernel = jax.vmap(wrap(kernel_from_body("if x[0] > 8: raise ValueError('too large')\nout[0] = x[0]")))
    double = lambda x: jax.lax.with_sharding_constraint(2 * kernel(x[:7]), replicated)
    seven_slices = jax.jit(double, in_shardings=partitioned)
    slices = jax.device_put(np.arange(8, dtype=np.float32)[:, None], partitioned)
    assert seven_slices(slices)[6] == 12
    assert "too large" in error_of(seven_slices, 2 * slices)
    # The devices divide the inner dimension, 8, but XLA would pad the outer one, and the devices would deadlock.
    eight_of_each = lambda x: jax.lax.with_sharding_constraint(jax.vmap(kernel)(x[:7]), replicated)
    large = np.broadcast_to(2 * np.asarray(slices)[:, None], (8, 8, 1))
    assert "too large" in error_of(jax.jit(eight_of_each, in_shardings=partitioned), large)


def keep_subnormal_numbers():
    """Check that kernels and Numba's own threads keep subnormal numbers, although XLA flushes them to zero."""

    @numba.njit(parallel=True)
    def halve(x, out):
        for i in numba.prange(x.size):
            out[i] = x[i] * np.float32(0.5)
        if np.isnan(x[0]):
            raise ValueError("nan")

    def by_numba():
        out = np.empty_like(tiny)
        halve(tiny, out)
        return out

    tiny = np.full(4096, 1e-40, np.float32)
    wrap(kernel_storing("x[0] + 0.875"))(tiny)  # a serial kernel, with which `halve` must not share its handler's code
    kernel = wrap(halve)
    assert np.asarray(jax.pmap(kernel)(np.stack([tiny] * 4))).all()  # XLA's threads start Numba's
    assert np.asarray(kernel(tiny)).all() and by_numba().all()
    assert "nan" in error_of(kernel, tiny * np.nan) and by_numba().all()
    by_kernel, by_xla = map(np.asarray, jax.jit(lambda x: (kernel(x), x * np.float32(0.5)))(tiny))
    assert by_kernel.all() and not by_xla.any()  # XLA's mode is restored after the kernel


def enter_workqueue_from_several_threads():
    """Run parallel kernels in six threads.  Numba's workqueue aborts a process in which two threads enter it."""

    @numba.njit(parallel=True)
    def direct(x, out):
        for i in numba.prange(x.size):
            out[i] = x[i] + 1
        if x[0] < 0:
            raise ValueError("negative")

    def through_helper(x, out):
        direct(x, out)

    array = numba.float32[::1]
    jit = partial(numba.njit, numba.void(array.copy(readonly=True), array))
    functions = jit()(copy_elements.__wrapped__), jit(parallel=True)(direct.py_func)

    def through_pointers(x, out):
        for function in functions:
            function(x, out)

    wrap(kernel_from_body("out[0] = x[0]"))(ONES)  # a kernel of the same signature that needs no lock

    def work(kernel_and_rounds):
        kernel, n_rounds = kernel_and_rounds
        f = wrap(kernel)
        for _ in range(n_rounds):
            if kernel is not through_pointers:  # Numba loses exceptions of functions that are called through pointers
                assert "negative" in error_of(f, -ONES)
            assert (jax.pmap(f)(np.ones((4, 1000), np.float32)) == 2).all()

    in_threads(work, [(direct, 50), (through_helper, 3), (through_pointers, 3)] * 2)


@pytest.mark.processes
@pytest.mark.needs("glibc")
def test_fork_reload_and_concurrent_batches_succeed_on_eight_devices():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NUMBA_THREADING_LAYER": "omp"}
    programs = fork_and_reload, keep_subnormal_numbers, run_seven_slices_on_eight_devices, share_xla_threads
    run_in_new_process(*programs, **environment)


@pytest.mark.processes
@pytest.mark.needs("glibc", "four devices")
def test_parallel_kernels_in_workqueue_run_from_several_threads():
    functions = keep_subnormal_numbers, enter_workqueue_from_several_threads
    run_in_new_process(*functions, NUMBA_THREADING_LAYER="workqueue")


# -- a copy of the file, and its self-check --------------------------------------------------------------


USE_COPY = """
import sys
import jax.numpy as jnp
import my_kernels

def loaded():
    return sorted({"numba", "warp", "llvmlite", "numba_cuda_mlir", "xla_kernels"} & sys.modules.keys())

def kernel(x, out):
    for i in range(x.size):
        out[i] = x[i]

my_kernels.XLACustomKernel("op").def_warp_kernel(kernel)
print(loaded())
call = my_kernels.numba_kernel(kernel, lambda x: x)
print(call(jnp.ones(3)), loaded())
"""


@pytest.mark.processes
def test_copy_of_file_loads_backends_on_use(tmp_path):
    """The copy has another name."""
    shutil.copy(ROOT / "xla_kernels.py", tmp_path / "my_kernels.py")
    at_import, after_use = run_python("-c", USE_COPY, cwd=tmp_path).splitlines()
    assert (at_import, after_use) == ("[]", "[1. 1. 1.] ['llvmlite', 'numba']")


@pytest.mark.parametrize("name, packages", [("numba", "numba"), ("warp", "warp-lang numba")])
def test_missing_backend_error_names_package(name, packages, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # cannot be imported
    text = rf"{name}_kernel needs {name} .*None in sys.modules\)\. Install it: pip install {packages}(\n|$)"
    with pytest.raises(ImportError, match=text):
        getattr(xk, f"{name}_kernel")(copy_elements.__wrapped__, like_first)(ONES)


@pytest.mark.parametrize("warp_module, status", [
    (wp, 0), (None, 0), (types.ModuleType("warp"), 1)
], ids=["as installed", "missing warp", "broken warp"])  # fmt: skip
def test_self_check_reports_working_missing_and_broken_backends(capsys, monkeypatch, warp_module, status):
    is_available = warp_module and not conftest.missing("warp")
    monkeypatch.setitem(sys.modules, "warp", warp_module)
    works = r" +works, [\d.]+ µs per call under jit"
    warp_report = " +FAILED: " if status else works if is_available else " +not available: "
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(xk.__file__, run_name="__main__")
    report = capsys.readouterr().out
    assert re.search(f"^numba +cpu{works}", report, re.MULTILINE), report
    assert re.search(f"^warp +cpu{warp_report}", report, re.MULTILINE), report
    assert ended.value.code == status


# ======================================================================================================
# conftest.py: conditions


@pytest.mark.needs("numba")
def test_conftest_skips_test_or_fails_with_require(request, monkeypatch):
    setup = partial(conftest.pytest_runtest_setup, request.node)
    monkeypatch.setattr(request.config.option, "require", ["numba", "warp"])
    setup()
    monkeypatch.setattr(conftest, "missing", {"numba": "numba is not installed"}.get)
    outcomes = pytest.fail.Exception, pytest.skip.Exception  # both are caught, because a skip would skip this test
    reason = "numba: numba is not installed"
    for required, outcome, text in ("numba", outcomes[0], f"--require={reason}"), ("warp", outcomes[1], reason):
        request.config.option.require = [required]
        with pytest.raises(outcomes) as caught:
            setup()
        assert (caught.type, str(caught.value)) == (outcome, text)


@pytest.mark.parametrize("option", ["require", "needing"])
def test_conftest_rejects_unknown_condition(request, monkeypatch, option):
    monkeypatch.setattr(request.config.option, option, ["numb"])
    with pytest.raises(pytest.UsageError, match=f"--{option}=numb: unknown; choose from numba, "):
        conftest.pytest_configure(request.config)


def test_conftest_raises_if_installed_package_cannot_be_imported(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    for package in "broken", "not_installed":
        monkeypatch.setitem(conftest.CONDITIONS, package, conftest.Condition(package=package))
    assert conftest.missing("not_installed") == "not_installed is not installed"
    with pytest.raises(ModuleNotFoundError):
        conftest.missing("broken")


@pytest.mark.parametrize("requirement, needed", [("warp", "four devices"), ("warp_gpu", "four gpus")])
def test_conftest_needs_four_gpus_if_test_computes_on_gpu(monkeypatch, requirement, needed):
    monkeypatch.setattr(conftest, "gpu", lambda: "the first GPU")
    marks = [pytest.mark.needs(requirement), pytest.mark.needs("linux", "four devices")]
    test = types.SimpleNamespace(iter_markers={"needs": marks}.get)
    assert conftest.requirements_of(test) == [requirement, "linux", needed]


@pytest.mark.parametrize("reason, is_exception", [
    ("KeyError: 'boom'", True), ("AssertionError: ", True),
    ("captured values have changed since the kernel was compiled", False),
], ids=["text", "no text", "no exception"])  # fmt: skip
def test_conftest_rejects_exception_as_reason_for_per_slice_launches(caplog, reason, is_exception):
    check_of_test = inspect.unwrap(conftest.no_exception_is_taken_for_a_fallback)(caplog)
    next(check_of_test)
    xk._log_per_slice_fallback("'f'", reason)
    with pytest.raises(AssertionError if is_exception else StopIteration):
        next(check_of_test)
    caplog.clear()  # for the check of this test


def test_conftest_table_of_matrix_counts_passed_cells():
    outcomes = {
        "test_matrix[add-numba-vmap-float32]": "passed",
        "test_matrix[add-numba-jvp-float32]": "failed",
        "test_matrix[csr_event-warp_gpu-vmap-int8]": "warp_gpu: JAX has no GPU here",
        "test_matrix[csr_event-numba-vmap-int8]": "passed",
        "test_unsupported_cell_raises[add-numba-eager-float16]": "passed",
    }
    assert conftest.table_of_matrix(outcomes).splitlines() == [
        "| operation | numba | warp_gpu |",
        "| --- | --- | --- |",
        "| add | 1 / 2 | 0 / 0 |",
        "| csr_event | 1 / 1 | 0 / 1 |",
    ]
    assert conftest.table_of_matrix({"test_unsupported_cell_raises[add-numba-eager-float16]": "passed"}) == ""


# ======================================================================================================
# Documents, docstrings and figures

DOCUMENTS = (  # the first two have programs
    "README.md", ".github/EXAMPLES.md", ".github/BENCHMARK.md", ".github/CHANGELOG.md", ".github/CONTRIBUTING.md"
)  # fmt: skip


def text_of(document):
    return (ROOT / document).read_text(encoding="utf-8")


def sections_of(document):
    """Return (heading, text) for each section of a document.  The first one is the text below the title."""
    return [tuple(section.split("\n", 1)) for section in text_of(document).split("\n## ")]


PROGRAM = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)  # with its output
NEEDED_FOR = {"warp as wp": "warp", "import cuda": "cuda", "scipy": "scipy"}  # by a text in the program


def documented_programs():
    """Yield the code and the expected output of each Python block in the first two documents.

    A block that does not begin with an import continues the block before it.  The output is in a comment after each
    print, or in a text block below.
    """
    for document in DOCUMENTS[:2]:
        code = ""
        for heading, text in sections_of(document):
            for block, output in PROGRAM.findall(text):
                code = block if block.startswith("import") else code + block
                comments = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
                needs = pytest.mark.needs("numba", *[name for sign, name in NEEDED_FOR.items() if sign in code])
                yield pytest.param(code, " ".join([*comments, output]), marks=needs, id=f"{document} {heading}")


@pytest.mark.parametrize("code, prints", list(documented_programs()))  # without any, the collection fails
def test_documented_program_prints_documented_output(code, prints, tmp_path, monkeypatch, capsys):
    if cuda:  # the installed package, or the simulator
        code = code.replace("from numba_cuda_mlir import cuda", f"import {cuda.__name__} as cuda")
    path = tmp_path / "block.py"
    path.write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.split() == prints.split()


def docstring_examples():
    """Yield the docstrings with examples.  Examples of Numba CUDA run only in the simulator."""
    for examples in doctest.DocTestFinder().find(xk):
        source = "".join(example.source for example in examples.examples)
        if source:
            marks = [pytest.mark.needs("warp")] if re.search(r"\b(wp|warp)\b|_warp", source) else []
            marks += [pytest.mark.needs("simulator")] * ("import cuda" in source)
            yield pytest.param(examples, id=examples.name, marks=marks)


@pytest.mark.parametrize("examples", list(docstring_examples()))
def test_docstring_examples_print_documented_output(examples):
    # Keep the globals: Warp builds the kernels of all examples as one module.
    assert doctest.DocTestRunner().run(examples, clear_globs=False).failed == 0


def test_speed_figure_equals_readme_table():
    """The figure's texts are the labels, the values in the same order, and the title."""
    row = re.search(r"^\| add 16 elements, in `fori_loop` \|(.*)\|$", text_of("README.md"), re.MULTILINE)[1]
    values_of_table = [float(cell) for cell in row.split("|") if cell.strip(" –")]
    below_the_axis = text_of(".github/speed.svg").partition("lower is better")[2]
    *texts, _title = re.findall(r">([^<>]+)</text>", below_the_axis)
    half = len(texts) // 2
    value_of = dict(zip(texts[:half], map(float, texts[half:]), strict=True))
    labels = ["numba_kernel", "warp_kernel", "C++ for XLA", "brainevent.numba_kernel", "warp.jax_kernel"]
    assert [value_of[label] for label in [*labels, "jax.pure_callback"]] == values_of_table


def anchors_of(text):
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


each_document = pytest.mark.parametrize("document", DOCUMENTS)


@each_document
def test_document_closes_its_code_blocks(document):
    """After an unclosed block, no program of the document is found."""
    fences = re.findall(r"^```(\w*)$", text_of(document), re.MULTILINE)
    assert len(fences) % 2 == 0 and not any(fences[1::2])
    assert set(fences[::2]) <= {"python", "text", "sh", ""}


@each_document
def test_document_links_to_existing_files_and_headings(document):
    prose = re.sub(r"^```.*?^```$", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (ROOT / document).parent / path if path else ROOT / document
            assert target.is_file(), link
            assert not anchor or anchor in anchors_of(target.read_text(encoding="utf-8")), link


def test_readme_contains_all_public_names():
    assert set(xk.__all__) <= set(re.findall(r"`(\w+)", text_of("README.md")))


def test_readme_benchmark_rows_are_in_benchmark_document():
    rows = re.findall(r"^\|.*$", dict(sections_of("README.md"))["Benchmark"], re.MULTILINE)
    assert len(rows) > 2 and set(rows) <= set(text_of(".github/BENCHMARK.md").splitlines())
