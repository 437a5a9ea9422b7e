"""Tests of xla_kernels: the matrix of operations, backends and transformations, and everything that broke elsewhere."""

import ast
import contextlib
import ctypes
import doctest
import enum
import functools
import gc
import importlib.util
import inspect
import io
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
import tempfile
import textwrap
import time
import types
import typing
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
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
from jax.experimental import serialize_executable
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import conftest
import xla_kernels as xk
from conftest import x64

try:
    from numba import cuda
except ImportError:  # numba-cuda is too old for NumPy
    cuda = None
has_numba_cuda = getattr(cuda, "implementation", "Built-in") != "Built-in"
if not conftest.SIMULATOR and (conftest.SUCCESSOR or not has_numba_cuda):
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
# The matrix: operations x backends x transformations x dtypes.
# Every cell runs a kernel and compares what it gives with a reference, which NumPy computes, or JAX where it is
# transformed.  All other kernels of the cell's operation raise, so it shows who ran.
# At the end of a run, conftest.py prints which cells passed, and why others are left out.
#
# To add an operation: a row of OPS, a class, and a row of OPERATIONS.  A transformation: its name in FORWARD or
# DERIVATIVES, and a function of that name in `Transformations`.  A backend: a row of BACKENDS, a function that wraps a
# kernel, and a row of WRAPPERS; of another language, also a row of LANGUAGES.
# ======================================================================================================


class Dtype(typing.NamedTuple):
    tolerance: float = 0.0  # relative
    needs_x64: bool = False  # JAX has it only with jax_enable_x64


DTYPES = {
    "bool": Dtype(),
    **dict.fromkeys(["int8", "int16", "int32", "uint8", "uint16", "uint32"], Dtype()),
    **dict.fromkeys(["int64", "uint64"], Dtype(needs_x64=True)),
    "float16": Dtype(1e-2),
    "bfloat16": Dtype(5e-2),
    **dict.fromkeys(["float32", "complex64"], Dtype(1e-5)),
    **dict.fromkeys(["float64", "complex128"], Dtype(1e-12, needs_x64=True)),
}
NUMBERS = tuple(name for name in DTYPES if name != "bool")
FLOAT32, FLOATING = ("float32",), ("float32", "float64")

OPS = {  # name: the dtypes that it is tested with
    "reversed": ("bool", "float32"),  # computes nothing
    "add": NUMBERS,  # arithmetic in every dtype
    "leaky_relu": FLOAT32,  # a static parameter
    "hadamard": ("int32", "float32", "float64", "complex64"),  # two dimensions; its derivative calls it
    "transposed": FLOAT32,  # three dimensions, an output like no input
    "csr_event": FLOATING,  # integers, bool, atomics, outputs of two shapes
    "lif": FLOATING,  # outputs of two dtypes
    "in_place": FLOAT32,  # an input that becomes the output
    "blend": FLOAT32,  # the same with an input that vmap shares, and scratch
}


class Backend(typing.NamedTuple):
    language: str  # in which its kernels are written: a row of LANGUAGES, or JAX
    needs: str  # what must be there: see conftest.py
    is_op: bool = True  # a kernel of an XLACustomKernel; else a wrapper that is called as it is


BACKENDS = {
    "numba": Backend("numba", "numba"),  # on the CPU, in one thread
    "numba_parallel": Backend("numba", "numba"),
    "numba_cuda": Backend("cuda", "cuda"),  # on a GPU, or in the simulator
    "numba_cuda_callable": Backend("cuda", "cuda"),  # Python that launches the kernel
    "warp": Backend("warp", "warp"),  # on the CPU
    "warp_gpu": Backend("warp", "warp_gpu"),
    "pallas": Backend("pallas", "pallas"),  # interpreted
    "jax": Backend("jax", "jax"),
    "numba_kernel": Backend("numba", "numba", is_op=False),
    "numba_cuda_kernel": Backend("cuda", "cuda", is_op=False),  # launches each slice of a batch
    "warp_kernel": Backend("warp", "warp", is_op=False),
    "differentiable": Backend("warp", "warp", is_op=False),  # warp_kernel with Warp's own adjoint
}

SHARD_MAPS = ("shard_map", "eager_shard_map", "grad_of_shard_map", "shard_map_of_grad")
FORWARD = (
    "eager", "jit", "without_jit", "vmap", "vmap_other_axes", "vmap_nested", "vmap_of_nothing", "scan",
    "loop_of_state", "while_loop", "cond", "pmap", "shard_map", "eager_shard_map", "jit_over_mesh", "export",
)  # fmt: skip
DERIVATIVES = (
    "jvp", "grad", "grad_of_vmap", "grad_of_nested_vmap", "vmap_of_grad", "grad_of_scan", "grad_of_shard_map",
    "shard_map_of_grad", "jvp_of_grad", "checkpoint",
)  # fmt: skip
TRANSFORMATIONS = FORWARD + DERIVATIVES


class Cells(typing.NamedTuple):
    """Cells of these names; of all names on an axis that is not given."""

    ops: tuple = tuple(OPS)
    backends: tuple = tuple(BACKENDS)
    transformations: tuple = TRANSFORMATIONS
    dtypes: tuple = tuple(DTYPES)


def all_but(names, *others):
    return tuple(name for name in names if name not in others)


def in_language(language):
    return tuple(name for name, backend in BACKENDS.items() if backend.language == language)


NO_ARRAYS_OF = {  # language: dtypes
    "numba": ("float16", "bfloat16"),
    "cuda": ("bfloat16",),
    "warp": ("complex64", "complex128"),
    "pallas": ("complex64", "complex128"),
    "jax": (),
}
WITH_EVERY_CELL = ("numba", "numba_cuda", "warp_gpu")  # of each language that this library calls
WITH_ALL_FEATURES = ("hadamard", "csr_event", "blend")  # shapes, dtypes, aliases, scratch, own and JAX's derivatives
OTHER_DTYPES = all_but(DTYPES, "float32")
LEFT_OUT = {  # why there are no such cells: what cannot be
    "the first output is not the next first input": [
        Cells(("reversed", "transposed", "csr_event"), transformations=("loop_of_state",))
    ],
    "its language has no arrays of this dtype": [
        Cells(backends=in_language(language), dtypes=dtypes) for language, dtypes in NO_ARRAYS_OF.items()
    ],
    "a function that launches kernels has no name": [
        Cells(backends=("numba_cuda_callable",), transformations=("export",))
    ],
    "Warp's adjoints are first derivatives in reverse mode, and change no arrays in place": [
        Cells(backends=("differentiable",), transformations=("jvp", "jvp_of_grad")),
        Cells(("in_place", "blend"), ("differentiable",)),
    ],
    "jax.custom_jvp has no tangents of integers that vary over devices": [
        Cells(("csr_event",), ("numba_kernel", "numba_cuda_kernel", "warp_kernel"), SHARD_MAPS[2:])
    ],
    # and what would show nothing new
    "all operations get their derivatives as csr_event or hadamard does": [
        Cells(all_but(OPS, "csr_event", "hadamard"), transformations=all_but(DERIVATIVES, "jvp", "grad"))
    ],
    "JAX's own code: a few of each kind": [
        Cells(
            backends=("pallas", "jax"),
            transformations=all_but(TRANSFORMATIONS, "eager", "vmap", "vmap_of_nothing", "grad"),
        )
    ],
    "rows share columns, so that no loop over rows or columns is parallel": [
        Cells(("csr_event",), ("numba_parallel", "pallas"))
    ],
    "hadamard, csr_event and blend have all that kernels are called with": [
        Cells(
            all_but(OPS, *WITH_ALL_FEATURES),
            all_but(BACKENDS, *WITH_EVERY_CELL),
            all_but(TRANSFORMATIONS, "eager", "vmap"),
        ),
        Cells(all_but(OPS, *WITH_ALL_FEATURES), transformations=("export",)),
    ],
    "other dtypes are called as float32 is": [
        Cells(transformations=all_but(FORWARD, "eager", "vmap"), dtypes=OTHER_DTYPES),
        Cells(transformations=DERIVATIVES, dtypes=all_but(DTYPES, *FLOATING)),
        Cells(transformations=all_but(DERIVATIVES, "jvp", "grad"), dtypes=OTHER_DTYPES),
        Cells(backends=all_but(BACKENDS, *WITH_EVERY_CELL, "warp", "differentiable"), dtypes=OTHER_DTYPES),
        Cells(backends=("warp",), transformations=DERIVATIVES, dtypes=OTHER_DTYPES),
        Cells(backends=("differentiable",), transformations=FORWARD, dtypes=OTHER_DTYPES),
    ],
}


def left_out(*cell):
    """Why there is no such cell, or None."""
    for reason, patterns in LEFT_OUT.items():
        for pattern in patterns:
            if all(name in names for name, names in zip(cell, pattern)):
                return reason
    return None


def possible_cells():
    """Neighbours share kernels, which are compiled once."""
    for op, dtypes in OPS.items():
        yield from itertools.product([op], BACKENDS, TRANSFORMATIONS, dtypes)


def all_cells():
    return [cell for cell in possible_cells() if left_out(*cell) is None]


def marked(cell):
    """A cell as a parameter, with what it needs."""
    _, backend, transformation, _ = cell
    needed = [BACKENDS[backend].needs]
    if transformation in ("pmap", "jit_over_mesh", *SHARD_MAPS):
        needed.append("four devices")
    return pytest.param(*cell, marks=pytest.mark.needs(*needed))


@pytest.mark.parametrize("op, backend, transformation, dtype", list(map(marked, all_cells())))
def test_matrix(op, backend, transformation, dtype):
    """Finds wrong numbers, shapes, dtypes and structures, another kernel's, and inputs that were changed."""
    inputs, batch = inputs_and_batch(op, dtype)
    before = jax.tree.map(np.copy, (inputs, batch))
    tolerance = DTYPES[dtype].tolerance
    call = partial(call_backend, op, backend, np.dtype(dtype))
    if transformation in DERIVATIVES:
        call = with_derivative(call, op, backend)
    with x64(DTYPES[dtype].needs_x64):
        results = getattr(Transformations, transformation)(call, inputs, batch)
        check_close(results, what_is_right(op, transformation, dtype), tolerance)
    jax.tree.map(np.testing.assert_array_equal, (inputs, batch), before)


# -- the operations ------------------------------------------------------------------------------------
# What an `element` may use besides its arguments; `matrix_kernel` gives them their values.
Scalar = None  # makes a number of the outputs' dtype
where = None  # where(condition, a, b)
alpha = None  # the static parameter of the call


def random_array(rng, shape, dtype):
    """Normally distributed numbers, or small integers."""
    if dtype.kind in "biu":
        return rng.integers(0, 2 if dtype.kind == "b" else 5, shape).astype(dtype)
    numbers = rng.standard_normal(shape)
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.standard_normal(shape)
    return numbers.astype(dtype)


def of_shapes(*shapes):
    """Makes the inputs of an operation: arrays of these shapes."""

    def inputs(rng, dtype):
        return [random_array(rng, shape, dtype) for shape in shapes]

    return inputs


class Operation:
    """What a row of OPS is.  Beside what stands here:

    `inputs(rng, dtype)` gives NumPy arrays.
    `reference` computes the operation, with NumPy or with JAX as its inputs are; it may be a ufunc.
    `element` is the body of a kernel that writes element i (or i, j, k) of the outputs, in all languages;
    `numba`, `cuda` and `warp` are whole kernels, where that does not do.
    `differentiate(op)` gives an op its rules, where the derivative of the reference does not do.
    """

    params = types.MappingProxyType({})  # static parameters of the call
    options = types.MappingProxyType({})  # of the wrappers
    threads = None  # where there is not one for each element of the first output


class Reversed(Operation):
    inputs = of_shapes(9)

    def reference(x):
        return x[::-1]

    def element(i, x, out):
        out[i] = x[x.shape[0] - 1 - i]


class Add(Operation):
    inputs = of_shapes(9, 9)
    reference = np.add

    def element(i, x, y, out):
        out[i] = x[i] + y[i]


class LeakyRelu(Operation):
    inputs = of_shapes(9)
    params = types.MappingProxyType({"alpha": 0.25})

    def reference(x, alpha):
        return x * (x > 0) + x.dtype.type(alpha) * x * (x <= 0)

    def element(i, x, out):
        out[i] = where(x[i] > Scalar(0.0), x[i], Scalar(alpha) * x[i])


class Hadamard(Operation):
    inputs = of_shapes((3, 5), (3, 5))
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


class Transposed(Operation):
    inputs = of_shapes((2, 3, 4))

    def reference(x):
        return x.T

    def element(i, j, k, x, out):
        out[i, j, k] = x[k, j, i]


class CsrEvent(Operation):
    """The sum of the rows of a sparse matrix that spike, and how many do."""

    rows, columns = 12, 9
    threads = (rows,)
    options = types.MappingProxyType({"zero_outputs": True})

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


class Lif(Operation):
    inputs = of_shapes(9, 9)

    def reference(v, current):
        u = v + (current - v) * v.dtype.type(0.1)
        return u * (u <= 1), u > 1

    def element(i, v, current, new_v, spikes):
        u = v[i] + (current[i] - v[i]) * Scalar(0.1)
        spikes[i] = u > Scalar(1.0)
        new_v[i] = where(u > Scalar(1.0), Scalar(0.0), u)


class InPlace(Operation):
    inputs = of_shapes(9, 9)
    options = types.MappingProxyType({"input_output_aliases": {0: 0}})

    def reference(v, current):
        return v + (current - v) * v.dtype.type(0.1)

    def element(i, v, current, out):
        out[i] = out[i] + (current[i] - out[i]) * Scalar(0.1)


class Blend(Operation):
    inputs = of_shapes(9, 9)
    options = types.MappingProxyType({"input_output_aliases": {1: 0}, "scratch": lambda v, current: v})
    reference = InPlace.reference

    def element(i, v, current, out, work):
        work[i] = (out[i] - v[i]) * Scalar(0.1)
        out[i] = v[i] + work[i]


OPERATIONS = {
    "reversed": Reversed, "add": Add, "leaky_relu": LeakyRelu, "hadamard": Hadamard, "transposed": Transposed,
    "csr_event": CsrEvent, "lif": Lif, "in_place": InPlace, "blend": Blend,
}  # fmt: skip


# -- the transformations -------------------------------------------------------------------------------


SAME_RESULTS_AS = {  # what is right is what the reference gives under this simpler one
    **dict.fromkeys(["jit", "without_jit", "export"], "eager"),
    **dict.fromkeys(["shard_map", "eager_shard_map", "jit_over_mesh"], "vmap"),
    **dict.fromkeys(["grad_of_shard_map", "shard_map_of_grad"], "grad_of_vmap"),
    "checkpoint": "grad",
}


class Transformations:
    """Programs of an operation: functions of `call`, inputs, and a batch of eight slices of each, that return arrays.

    `call` returns a list of arrays.
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

    def vmap_other_axes(call, inputs, batch):
        """Of every input."""
        last = [jnp.moveaxis(x, 0, -1) for x in batch]
        results = jax.vmap(call, in_axes=-1, out_axes=-1)(*last)
        return [jnp.moveaxis(result, -1, 0) for result in results]

    def vmap_nested(call, inputs, batch):
        return jax.jit(all_pairs(call, inputs))(batch[0], *[x[:2] for x in batch[1:]])

    def vmap_of_nothing(call, inputs, batch):
        """Before two slices, as nothing has no values."""
        vmapped = over_first(call, inputs)
        parts = [vmapped(slices, *inputs[1:]) for slices in (batch[0][:0], batch[0][:2])]
        return [jnp.concatenate(results) for results in zip(*parts)]

    def scan(call, inputs, batch):
        return jax.jit(partial(scan_slices, call))(batch[0][:4], *inputs[1:])

    def loop_of_state(call, inputs, batch):
        state, *others = inputs
        return jax.lax.fori_loop(0, 3, lambda _, state: call(state, *others)[0], state)

    def while_loop(call, inputs, batch):
        """Until the results of a slice no longer follow from the step."""

        def step(i_and_results):
            i, _ = i_and_results
            return i + 1, call(jnp.asarray(batch[0])[i], *inputs[1:])

        _, results = jax.lax.while_loop(lambda i_and_results: i_and_results[0] < 4, step, (1, call(*inputs)))
        return results

    def cond(call, inputs, batch):
        @jax.jit
        def chosen(second):
            return jax.lax.cond(second, lambda: call(batch[0][1], *inputs[1:]), lambda: call(*inputs))

        return chosen(True), chosen(False)

    def pmap(call, inputs, batch):
        devices = list(mesh_of_four().devices)
        in_axes = (0, *[None] * (len(inputs) - 1))
        return jax.pmap(call, in_axes=in_axes, devices=devices)(batch[0][:4], *inputs[1:])

    def shard_map(call, inputs, batch):
        split = over_devices(over_first(call, inputs), inputs)
        return jax.jit(split)(batch[0], *inputs[1:])

    def eager_shard_map(call, inputs, batch):
        return over_devices(over_first(call, inputs), inputs)(batch[0], *inputs[1:])

    def jit_over_mesh(call, inputs, batch):
        """XLA splits the batch."""
        first = jax.device_put(batch[0], jax.sharding.NamedSharding(mesh_of_four(), SPLIT))
        return jax.jit(over_first(call, inputs))(first, *inputs[1:])

    def export(call, inputs, batch):
        """To a process that has traced the same kernel."""
        return loaded_elsewhere(call, *inputs)

    def jvp(call, inputs, batch):
        tangents = tuple(x[1] if is_real(x) else zero_tangent(x[1]) for x in batch)
        results, tangents_out = jax.jvp(call, inputs, tangents)
        return results, list(filter(is_real, tangents_out))

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
        out_specs = [SPLIT, *[REPLICATED for x in inputs[1:] if is_real(x)]]
        return jax.jit(over_devices(gradients, inputs, out_specs))(batch[0], *inputs[1:])

    def jvp_of_grad(call, inputs, batch):
        """Forward over reverse: the change of the gradients in a direction."""
        return Transformations.jvp(jax.jit(gradient(call, inputs)), inputs, batch)

    def checkpoint(call, inputs, batch):
        """Computes again in the backward pass."""
        return jax.jit(gradient(jax.checkpoint(call), inputs))(*inputs)


def over_first(call, inputs):
    """A vmap over the first input, with the others shared."""
    return jax.vmap(call, (0, *[None] * (len(inputs) - 1)))


def all_pairs(call, inputs):
    """Slices of the first input, with each slice of the others."""
    return jax.vmap(over_first(call, inputs), (None, *[0] * (len(inputs) - 1)), axis_size=2)


def scan_slices(call, batch, *others):
    return jax.lax.scan(lambda _, x: (None, call(x, *others)), None, batch)[1]


def default_platform():
    """Of JAX, "cpu" or "gpu"."""
    return (jax.config.jax_default_device or jax.devices()[0]).platform


def mesh_of_four():
    return jax.sharding.Mesh(np.array(jax.devices(default_platform())[:4]).reshape(4), "i")


SPLIT, REPLICATED = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()


def over_devices(call, inputs, out_specs=SPLIT):
    """A call on four devices: each has its part of the first input, and the others whole."""
    in_specs = (SPLIT, *[REPLICATED] * (len(inputs) - 1))
    return jax.shard_map(call, mesh=mesh_of_four(), in_specs=in_specs, out_specs=out_specs)


def gradient(call, inputs):
    """The gradients by all inputs of real numbers, of the sum of sines of what a call gives, which is not linear."""

    def sum_of_sines(*inputs):
        return sum(jnp.sin(result).sum() for result in call(*inputs) if is_real(result))

    gradients = jax.grad(sum_of_sines, [i for i, x in enumerate(inputs) if is_real(x)])
    return lambda *inputs: list(gradients(*inputs))


def exported_here(call, *inputs):
    """The bytes of a call exported for the platform on which it runs here."""
    jax.eval_shape(call, *inputs)  # registers the targets, which `export_checks` names
    checks = [*xk.export_checks(), export.DisabledSafetyCheck.platform()]
    platform = {"cpu": "cpu", "gpu": "cuda"}[default_platform()]
    return export.export(jax.jit(call), platforms=[platform], disabled_checks=checks)(*inputs).serialize()


def read_exported(serialized):
    return export.deserialize(bytearray(serialized)).call


@functools.cache
def another_process():
    """It hashes text in another way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()  # it starts with the first task
    return pool


def loaded_elsewhere(call, *inputs):
    """What a call that can be pickled gives where it is exported here, and loaded in another process."""
    exported = exported_here(call, *inputs)
    needs = ["gpu"] * (default_platform() == "gpu")
    return another_process().submit(load_and_run, needs, exported, call, inputs).result()


def load_and_run(needs, exported, call, inputs):
    """In that process."""
    with conftest.computing_for(needs):
        jax.jit(call).lower(*inputs)
        return jax.tree.map(np.asarray, read_exported(exported)(*inputs))


# -- what a cell needs ---------------------------------------------------------------------------------


def aligned_copy(x):
    """A copy at an address that XLA needs no copy for, so that a kernel could write to it."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    at_address = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    at_address[...] = x
    return at_address


def inputs_and_batch(op, dtype):
    """The inputs of an operation, and eight slices of each that differ."""
    inputs = OPERATIONS[op].inputs(np.random.default_rng(0), np.dtype(dtype))
    batch = [np.stack([np.roll(x, k) for k in range(8)]) for x in inputs]
    return tuple(map(aligned_copy, inputs)), tuple(map(aligned_copy, batch))


def reference_of(name):
    """The reference of an operation; a ufunc is NumPy's or JAX's, as its inputs are."""
    reference = OPERATIONS[name].reference
    if not isinstance(reference, np.ufunc):
        return partial(reference, **OPERATIONS[name].params)

    def ufunc(*inputs):
        library = jnp if isinstance(inputs[0], jax.Array) else np
        return getattr(library, reference.__name__)(*inputs)

    return ufunc


def reference_list(name):
    """The reference of an operation as a function that returns a list."""
    return lambda *inputs: jax.tree.leaves(reference_of(name)(*inputs))


@functools.cache
def what_is_right(op, transformation, dtype):
    """What NumPy gives for the reference and, under a transformation, JAX."""
    program = getattr(Transformations, SAME_RESULTS_AS.get(transformation, transformation))
    return program(reference_list(op), *inputs_and_batch(op, dtype))


def check_close(results, expected, tolerance=1e-5):
    """Of one structure, shape and dtype, and close; Python's own numbers and lists have the dtype of the result."""

    def check(result, array):
        if not hasattr(array, "dtype"):
            array = np.asarray(array, result.dtype)
        assert (result.shape, result.dtype) == (array.shape, array.dtype)
        largest = np.max(np.abs(array), initial=0)
        np.testing.assert_allclose(result, array, rtol=tolerance, atol=tolerance * min(1, largest))

    jax.tree.map(check, results, expected)


# -- backends: functions of an operation, its kernel and `outs` that return what JAX calls -------------
# Each kernel has a name, by which another process finds it in an exported program.

numba_jit = functools.cache(numba.njit)
cuda_jit = functools.cache(lambda kernel: cuda.jit(kernel))


def in_numba(op, kernel, outs, name=None, parallel=False):
    return xk.numba_kernel(numba_jit(kernel, parallel=parallel), outs, name=name, **op.options)


def in_warp(op, kernel, outs, name=None, **options):
    return xk.warp_kernel(kernel, outs, launch_dims=op.threads or outs[0].shape, name=name, **options, **op.options)


def grid_and_block(op, outs):
    """Of small blocks, as Numba's simulator starts all threads."""
    dims = op.threads or outs[0].shape
    block = {1: (4,), 2: (2, 2), 3: (2, 2, 2)}[len(dims)]
    return tuple(-(-size // threads) for size, threads in zip(dims, block)), block


def in_cuda(op, kernel, outs, name=None, **options):
    grid, block = grid_and_block(op, outs)
    return xk.numba_cuda_kernel(cuda_jit(kernel), outs, grid=grid, block=block, name=name, **options, **op.options)


def in_cuda_callable(op, kernel, outs, name=None):
    grid, block = grid_and_block(op, outs)
    cuda_kernel = cuda_jit(kernel)

    def launch(*arrays_and_stream):
        *buffers, stream = arrays_and_stream
        cuda_kernel[grid, block, stream](*buffers)

    return xk.numba_cuda_callable(launch, outs, **op.options)


def in_jax(op, kernel, outs, name=None):
    return kernel


def in_pallas(op, element, outs, name=None):
    """A program for each element, interpreted."""

    def kernel(*refs):
        element(*[pl.program_id(axis) for axis in range(outs[0].ndim)], *refs)

    scratch = outs[: len(op.options.keys() & {"scratch"})]  # as an output, like the first
    options = {"grid": outs[0].shape, "input_output_aliases": dict(op.options.get("input_output_aliases", {}))}
    call = pl.pallas_call(kernel, [*outs, *scratch], interpret=True, **options)
    return lambda *inputs: call(*inputs)[: len(outs)]


WRAPPERS = {  # backend: a function of an operation, its kernel, its outs and a name
    "numba": in_numba,
    "numba_parallel": partial(in_numba, parallel=True),
    "numba_cuda": in_cuda,
    "numba_cuda_callable": in_cuda_callable,
    "warp": in_warp,
    "warp_gpu": in_warp,
    "pallas": in_pallas,
    "jax": in_jax,
    "numba_kernel": in_numba,
    "numba_cuda_kernel": partial(in_cuda, vmap_method="sequential"),
    "warp_kernel": in_warp,
    "differentiable": partial(in_warp, differentiable=True),
}


def generate_nothing(outs, **params):
    raise AssertionError("a call that lost its backend")


@functools.cache
def custom_kernel(name, backend):
    """The operation with the kernel of this backend, beside others that raise."""
    op = xk.XLACustomKernel(name)
    for platform in ("cpu", "gpu"):
        for other in ("the default, as it is the first", *BACKENDS):
            op.def_kernel(other, platform, generate_nothing)
    op.def_kernel(backend, conftest.platform_of([BACKENDS[backend].needs]), partial(generate, name, backend))
    differentiate = getattr(OPERATIONS[name], "differentiate", partial(differentiate_reference, name))
    differentiate(op)
    return op


def generate(name, backend, outs, **params):
    """What `XLACustomKernel.def_kernel` takes, for each backend: a function of `outs` and the static parameters."""
    kernel = matrix_kernel(name, BACKENDS[backend].language, outs[0].dtype, **params)
    return WRAPPERS[backend](OPERATIONS[name], kernel, outs, name=f"{name}_{backend}")


def differentiate_reference(name, op):
    """The results are the kernel's; their tangents are those of the reference."""

    @op.def_jvp_rule
    def jvp(primals, tangents, **params):
        tangents = tuple(zero_tangent(x) if isinstance(t, ad.Zero) else t for x, t in zip(primals, tangents))
        _, tangents_out = jax.jvp(reference_of(name), tuple(primals), tangents)
        tangents_out = [None if t.dtype == jax.dtypes.float0 else t for t in jax.tree.leaves(tangents_out)]
        return op(*primals, **params), tangents_out


@functools.cache
def bare_kernel(name, backend, dtype):
    _, outs, _ = specs_of(name, dtype)
    return generate(name, backend, outs, **OPERATIONS[name].params)


def call_backend(name, backend, dtype, *inputs):
    """A call of an operation on a backend, whose results are a list."""
    if not BACKENDS[backend].is_op:
        return bare_kernel(name, backend, dtype)(*inputs)
    _, outs, _ = specs_of(name, dtype)
    return custom_kernel(name, backend)(*inputs, outs=outs, backend=backend, **OPERATIONS[name].params)


def with_derivative(call, name, backend):
    """An op has its own, and Warp's adjoint is one; a bare wrapper gets it from jax.custom_jvp, with a rule in jnp."""
    if BACKENDS[backend].is_op or backend == "differentiable":
        return call
    with_rule = jax.custom_jvp(call)

    @with_rule.defjvp
    def jvp(primals, tangents):
        _, tangents_out = jax.jvp(reference_list(name), primals, tangents)
        return with_rule(*primals), tangents_out

    return with_rule


def zero_tangent(x):
    return np.zeros(x.shape, x.dtype if is_real(x) else jax.dtypes.float0)


def is_real(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


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


def as_warp_kernel(function, specs):
    function.__annotations__.update({name: xk.jaxinfo_to_warpinfo(array) for name, array in specs.items()})
    return wp.kernel(function, module="unique")


class Language(typing.NamedTuple):
    """How `matrix_kernel` makes a kernel of an `element`."""

    start: Callable | None  # (indices, out) -> the lines before the element's; None: Pallas traces it as it is
    where: Callable  # () -> `where`
    scalar: Callable = operator.attrgetter("type")  # dtype -> `Scalar`
    finish: Callable = lambda function, specs: function  # (a Python function, {parameter: spec}) -> the kernel


LANGUAGES = {
    "numba": Language(numba_loops, functools.cache(lambda: numba.njit(choose))),
    "cuda": Language(cuda_thread, functools.cache(lambda: cuda.jit(device=True)(choose))),
    "warp": Language(warp_thread, lambda: wp.where, lambda dtype: xk.jaxtype_to_warptype(dtype), as_warp_kernel),
    "pallas": Language(None, lambda: jnp.where),
}


def dtypes_of(language):
    """The names of the dtypes that kernels in a language have arrays of."""
    return all_but(DTYPES, *NO_ARRAYS_OF[language])


@functools.cache
def specs_of(name, dtype):
    """Of the inputs, the outputs and the scratch of an operation."""
    op = OPERATIONS[name]
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in op.inputs(np.random.default_rng(0), dtype)]
    outs = jax.tree.leaves(jax.eval_shape(reference_of(name), *inputs))
    scratch = jax.tree.leaves(op.options.get("scratch", lambda *inputs: [])(*inputs))
    return inputs, outs, scratch


@functools.cache
def matrix_kernel(name, language, dtype, **params):
    """The kernel of an operation in a language; JAX's is the reference."""
    if language == "jax":
        return reference_of(name)
    op, how, specs = OPERATIONS[name], LANGUAGES[language], specs_of(name, dtype)
    body = getattr(op, language, None) or op.element
    namespace = globals() | {"Scalar": how.scalar(dtype), "where": how.where(), **params}
    if how.start is None:
        return types.FunctionType(body.__code__, namespace)
    parameters = list(inspect.signature(body).parameters)
    names = parameters[-sum(map(len, specs)) :]
    indices, out = parameters[: -len(names)], names[len(specs[0])]
    source = kernel_source(op.__name__, language, body, names, indices, out)
    file = f"<{name} in {language}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Warp reads it there
    exec(compile(source, file, "exec"), namespace)
    return how.finish(namespace[op.__name__], dict(zip(names, itertools.chain(*specs), strict=True)))


def kernel_source(name, language, body, parameters, indices, out):
    """The text of a kernel: the statements of an element below what its language starts with."""
    opening = [f"def {name}({', '.join(parameters)}):"]
    if indices:
        opening += LANGUAGES[language].start(indices, out)
    lines, depth = [], 0
    for line in opening:
        lines.append(" " * depth + line)
        depth += 4 * line.endswith(":")
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(body))).body
    for statement in function.body:
        lines.append(textwrap.indent(ast.unparse(statement), " " * depth))
    return "\n".join(lines) + "\n"


# ======================================================================================================
# What the tests of all sections use: specs, kernels made of a line, processes
# ======================================================================================================


def spec(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def like_first(x, *others):
    """As `outs`: one output like the first input."""
    return x


def like_last(*inputs):
    return inputs[-1]


F32, FLOATS = np.ones(4, np.float32), spec(4)  # an input, and its spec
DESCRIBED = types.SimpleNamespace(shape=[3], dtype="int32", adj="of no graph of Warp's")


@xk.numba_kernel(outs=like_first)
def copy(x, out):
    for i in np.ndindex(x.shape):
        out[i] = x[i]


@xk.numba_kernel(outs=like_first)
def add_one(x, out):
    for i in range(x.size):
        out[i] = x[i] + 1


def on_first_call(make):
    """The function that `make` gives, made when it is called: nothing is compiled when this file is imported."""
    made = functools.cache(make)
    return lambda *args, **named: made()(*args, **named)


def wrap(kernel=add_one.__wrapped__, outs=like_first, **options):
    return xk.numba_kernel(kernel, outs, **options)


def kernel_from(source, *, name="kernel", **values):
    """The function of this name that some source defines, with these values as its globals."""
    namespace = {"np": np, "numba": numba, "math": math, **values}
    exec(textwrap.dedent(source), namespace)
    return namespace[name]


def runs(code, parameters="x, out", **values):
    """A kernel with this body, which has no source."""
    return kernel_from(f"def kernel({parameters}):\n    {code}", **values)


def reads(expression, **values):
    """A kernel whose result is this expression."""
    return runs(f"out[0] = {expression}", **values)


def target_of(function, *specs):
    """The name under which XLA finds the kernel."""
    return re.search(r"custom_call @\"?([\w.]+)", jax.jit(function).lower(*specs).as_text())[1]


def copied_bytes(function, *specs):
    """What a program copies beside its inputs and outputs."""
    lowered = getattr(function, "lower", jax.jit(function).lower)(*specs)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def in_threads(work, args):
    """Run `work(arg)` in a thread for each argument; what one of them raises is raised here."""
    with ThreadPoolExecutor(len(args)) as pool:
        list(pool.map(work, args))


RUNTIME_ERRORS = (ValueError, jax.errors.JaxRuntimeError)  # the first comes from jaxlib's fast path


def error_of(call, *args):
    """The text of the error that a kernel's call raises."""
    with pytest.raises(RUNTIME_ERRORS) as caught:
        jax.block_until_ready(call(*args))
    return str(caught.value)


IN_A_PROCESS = """
import math, os, pathlib, re, sys, textwrap, types, warnings
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numba, numpy as np, pytest
import xla_kernels as xk

ones = np.ones(4, np.float32)
RUNTIME_ERRORS = (ValueError, jax.errors.JaxRuntimeError)
"""


def run_code(code, *argv, **env):
    """Run `code` in a fresh interpreter that has these imports and functions; returns its output."""
    functions = like_first, add_one.__wrapped__, wrap, kernel_from, runs, reads, copied_bytes, in_threads, error_of
    sources = [IN_A_PROCESS, *map(inspect.getsource, functions), textwrap.dedent(code)]
    return run_python("-c", "\n".join(sources), *argv, timeout=300, **{"JAX_PLATFORMS": "cpu", **env})


# ======================================================================================================
# Mistakes: each is refused in words that say the rule, the value and the way out.  Every mistake is a row
# ======================================================================================================


def _axpy(a, x, y):
    return a * x + y


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


class AMethod:
    def kernel(self, x, out):
        out[:] = x


class OwnError(LookupError):
    pass


def raising(error):
    return wrap(runs(f"raise {error}", OwnError=OwnError))


@jax.custom_jvp
def kernel_on_tangents(x):
    return add_one(x)


kernel_on_tangents.defjvp(lambda primals, tangents: (add_one(*primals), add_one(*tangents)))


@jax.custom_vjp
def kernel_in_a_rule(x):
    return add_one(x)


kernel_in_a_rule.defvjp(lambda x: (add_one(x), x), lambda x, ct: (add_one(x) * ct,))
head = wrap(_head)
ODD_TEXT = "größe 日本 \U0001f600 a\0" + "x" * 1_000_000


def total_of_64_bits():
    total = numba.njit("float64(float64[::1])")(lambda x: x.sum())
    return wrap(runs("out[0] = total(x)", total=total))


def add_text():
    wrap(runs("return x + 'a'", "x"))(F32)


def add_to_input():
    wrap(runs("x += 1; out[:] = x"))(F32)


def one_number(x, out):
    out[0] = x[0]


def trace_cuda(kernel=None, outs=FLOATS, **options):
    """Trace a kernel of CUDA, which compiles nothing."""
    return jax.eval_shape(xk.numba_cuda_kernel(kernel or cuda.jit(one_number), outs, **options), FLOATS)


def trace_callable(function):
    return jax.eval_shape(xk.numba_cuda_callable(function, spec(3)), spec(3), spec(3))


def trace_warp(name, *args, outs=like_first, **options):
    """Trace a kernel of Warp's section."""
    return jax.eval_shape(xk.warp_kernel(getattr(warp_kernels(), name), outs, **options), *args)


def raise_key_error(*args):
    raise KeyError("boom")


def broken_op():
    op = xk.XLACustomKernel("broken")
    op.def_kernel("shape", "cpu", lambda: lambda x: jnp.reshape(x, (4, 2)))
    op.def_kernel("raising", "cpu", lambda: raise_key_error)
    op.def_kernel("nothing", "cpu", lambda: None)
    op.def_kernel("far", "gpu", add_to(1))
    op.def_kernel("undecorated", "cpu", add_one.__wrapped__)
    op.def_numba_kernel(numba_multiply)
    return op


def call_broken(outs=spec(8), backend="shape", **params):
    """Eagerly, and in a vmap under jit: both raise the same."""
    call = partial(broken_op(), outs=outs, backend=backend, **params)
    with pytest.raises(Exception) as first:
        call(VECTOR)
    with pytest.raises(first.type, match="'broken'"):
        jax.jit(jax.vmap(call))(ROWS)
    raise first.value


def scale_op():
    op = xk.XLACustomKernel("scale")
    op.def_kernel("jax", "cpu", lambda n: lambda x: n * x)
    return op


def call_scale(x, outs=like_first, **params):
    return scale_op()(x, outs=outs, **{"n": 2.0, **params})


def pickled_in_main(x):
    """What another process reads, whose `__main__` is another one."""
    main = sys.modules["__main__"]
    main.op_of_main = x
    try:
        data = pickle.dumps(x)
    finally:
        del main.op_of_main
    return pickle.loads(data)


def with_x64(kernel, x, outs=like_first):
    with x64():
        return wrap(kernel, outs)(x)


def with_scipy(call):
    """A call by the name of a function in scipy.special, in a kernel."""
    special = pytest.importorskip("scipy.special")
    return wrap(runs(f"out[0] = {call}(x[0])", special=special, j0=special.j0))(F32)


def print_in_order(x):
    jax.debug.print("{}", x, ordered=True)
    return x


def op_that_calls_itself():
    op = op_adding(a=1)
    op.def_jvp_rule2(lambda t, x: op(t, outs=like_first))
    return call_op(op)


def call_with_side_effects():
    op = op_with(lambda: wrap(has_side_effect=True))
    op(VECTOR, outs=like_first)


# What kernels cannot do, as a line of a beginner's program has it, and what the message says after Numba's reason.
CALLS_NO_JAX = "a kernel cannot call JAX: write np. for jnp., and loops for jax.lax and jax.vmap"
NUMBERS_ALONE = (
    "globals and closures can be numbers, tuples and NumPy arrays: what a dict, a list or an object has is an input"
)
WHAT_HELPS = [
    ("out[:] = jnp.sin(x)", {"jnp": jnp}, CALLS_NO_JAX),
    ("out[:] = jax.vmap(abs)(x)", {"jax": jax}, CALLS_NO_JAX),
    ("out[:] = sin(x)", {"sin": jnp.sin}, CALLS_NO_JAX),
    ("out[:] = add(x, x)", {"add": jnp.add}, CALLS_NO_JAX),
    ("out[:] = relu(x)", {"relu": jax.nn.relu}, CALLS_NO_JAX),
    ("out[:] = jax.random.normal(jax.random.key(0), (4,))", {"jax": jax},
     "noise is an input: draw it by jax.random before the call"),
    ("out.at[0].set(1.0)", {}, "write out[i] = 1.0 for out.at[i].set(1.0)"),
    ("import math; out[0] = math.sin(x[0])", {}, "import outside of the kernel"),
    ("out[:] = wrapped(x)", {"wrapped": add_one},
     "a kernel cannot call a wrapper or an op: call the @numba.njit function in it, wrapper.__wrapped__"),
    ("out[:] = op(x, out, 1)", {"op": scale_op()}, "a kernel cannot call a wrapper or an op"),
    ("copy(x, out)", {"copy": itself}, "a function that it calls needs @numba.njit (for a GPU @cuda.jit), too"),
    ("out[0] = a['gain']", {"a": {"gain": 2.0}}, NUMBERS_ALONE),
    ("out[0] = a.adj", {"a": DESCRIBED}, NUMBERS_ALONE),
    ("out[0] = a[0]", {"a": [2.0]}, NUMBERS_ALONE),
    ("breakpoint()", {}, "debug it in Python: wrapper.__wrapped__, or of @njit its .py_func, takes NumPy arrays"),
]  # fmt: skip
SPECS_NO_VALUES = ": a function gets specs (.shape and .dtype) of arrays, no values; jax.eval_shape(f, ...) gives"
C_FUNCTIONS = "math.erf and math.gamma; on CPUs SciPy's C functions by get_cython_function_address, as in `bessel`"
REGISTERED = "cpu: shape, raising, nothing, undecorated, numba; gpu: far"
# The backend, the exception, what it says (parts of the text, with .* between them), and what is done, or called with
# which inputs.
ERRORS = [
    # Numba, and what all wrappers share: when a wrapper is made
    ("numba", TypeError, "numba.njit or a plain function; got int 3", lambda: wrap(3)),
    ("numba", TypeError, "got partial.*closure", lambda: wrap(partial(itself))),
    ("numba", TypeError, "got method.*outside of the class", lambda: wrap(AMethod().kernel)),
    ("numba", TypeError, "'kernel' is a method.*outside of the class", lambda: wrap(AMethod.kernel)),
    ("numba", TypeError, "got CFunc", lambda: wrap(numba.cfunc("f4(f4)")(itself))),
    ("numba", TypeError, 'got ufunc.*instead of target="parallel"',
     lambda: wrap(numba.vectorize("f4(f4)", target="parallel")(itself))),
    ("numba", TypeError, "got ufunc <ufunc 'sin'>; call it in a function, lambda x: np.sin(x), ", lambda: wrap(np.sin)),
    ("numba", TypeError, "got ufunc <ufunc 'erf'>; call it in a function",
     lambda: wrap(pytest.importorskip("scipy.special").erf)),
    ("numba", TypeError, "got builtin_function_or_method .*; call it in a function, lambda x: math.sin(x)",
     lambda: wrap(abs)),
    ("numba", TypeError, "got PjitFunction .*: give a Python function, with np. for jnp.", lambda: wrap(jnp.sin)),
    ("numba", TypeError, "outs[1].*'f4'", lambda: wrap(outs=[FLOATS, "f4"])),
    ("numba", TypeError, "outs is missing", lambda: wrap(outs=None)),
    ("numba", TypeError, ".shape and .dtype", lambda: wrap(outs=jnp.float32)),
    ("numba", ValueError, "scalars=[3]: 3 must be the name of an array parameter", lambda: wrap(scalars=3)),
    ("numba", ValueError, "vmap_method.*'loop'", lambda: wrap(vmap_method="loop")),
    ("numba", ValueError, "negative.*(-1,)", lambda: wrap(outs=spec(-1))),
    ("numba", ValueError, "in_out_argnames=.*'t' must be the name of an array",
     lambda: wrap(_running, in_out_argnames=["t"])),
    ("numba", ValueError, "'x' is in scalars and in", lambda: wrap(in_out_argnames=["x"], scalars=["x"])),
    # inputs
    ("numba", TypeError, "input 0.*list.*leaves", lambda: add_one([1, 2])),
    ("numba", TypeError, "input 0.*structured", lambda: wrap(itself)(np.zeros(3, "f4,i4"))),
    ("numba", TypeError, "input 0.*key_data", lambda: add_one(jax.random.key(0))),
    # outputs, and what starts from an input
    ("numba", TypeError, "output 1 is bfloat16[4], a dtype for which",
     lambda: wrap(scratch=spec(4, dtype=jnp.bfloat16))(F32)),
    ("numba", TypeError, "outs of (float32[4]): .*missing 1 required positional argument: 'y'",
     lambda: wrap(outs=lambda x, y: x)(F32)),
    ("numba", TypeError, "'add_one': outs of (float32[4]): 'ShapeDtypeStruct' object is not subscriptable"
     + SPECS_NO_VALUES, lambda: wrap(outs=lambda x: x[0])(F32)),
    ("numba", TypeError, "has no attribute 'astype'" + SPECS_NO_VALUES,
     lambda: wrap(outs=lambda x: x.astype("f4"))(F32)),
    ("numba", TypeError, "'int' and 'ShapeDtypeStruct'" + SPECS_NO_VALUES, lambda: wrap(outs=lambda x: 2 * x)(F32)),
    ("numba", TypeError, "or is a fixed capacity, with a count as one more output",
     lambda: wrap(outs=lambda x: x[x > 1])(F32)),
    ("numba", TypeError, "outs of (float32[4], int32[]): .* not 'ShapeDtypeStruct': a function gets specs",
     lambda: wrap(outs=lambda x, n: spec(int(n)))(F32, np.int32(1))),
    ("numba", TypeError, "concatenate requires ndarray .*: a function gets specs",
     lambda: wrap(outs=lambda x: jnp.concatenate([x, x]))(F32)),
    ("numba", TypeError, "outs: a function gets specs .*; a shape is flat, such as (2, *x.shape): .*, got (2, (4,))",
     lambda: wrap(outs=lambda x: spec(2, x.shape))(F32)),
    ("numba", TypeError, "outs of (float32[4]): tuple index out of range: a function gets specs",
     lambda: wrap(outs=lambda x: spec(x.shape[1]))(F32)),
    ("numba", TypeError, "scratch of (float32[4]): .*: a function gets specs",
     lambda: wrap(scratch=lambda x: x[0])(F32)),
    ("numba", ValueError, "aliases={0: -1}.*an input can start one output",
     lambda: wrap(input_output_aliases={0: -1})(F32)),
    ("numba", ValueError, "an output can start from one input, of equal shape and dtype",
     lambda: wrap(outs=spec(3), input_output_aliases={0: 0})(F32)),
    ("numba", ValueError, "an output can start from one input",
     lambda: wrap(outs=FLOATS, input_output_aliases={0: 0, 1: 0})(F32, F32)),
    ("numba", ValueError, "'out' is not the name of an input.*before the other outputs",
     lambda: wrap(_running, in_out_argnames=["out"])(F32)),
    ("numba", ValueError, "{0: 1}, in_out_argnames=['x']: an input can start one output",
     lambda: wrap(_running, FLOATS, in_out_argnames=["x"], input_output_aliases={0: 1})(F32)),
    # the arguments of the kernel
    ("numba", TypeError, "takes (x, out), but this call has 1 inputs and 2 outputs: it takes all by position, or",
     lambda: wrap(outs=[FLOATS] * 2)(F32)),
    ("numba", TypeError, "a parameter cannot be keyword-only: make it an input, or a variable of the closure:",
     lambda: wrap(runs("out[:] = x + n", "x, out, *, n=3"))(F32)),
    ("numba", TypeError, "; a parameter cannot be keyword-only:", lambda: wrap(runs("return x + n", "x, *, n=3"))(F32)),
    ("numba", TypeError, "got 1 by position and (alpha) by name", lambda: head(F32, alpha=F32[0])),  # n is missing
    ("numba", TypeError, "got 1 by position and (x) by name", lambda: head(F32, x=F32)),  # by position and by keyword
    ("numba", TypeError, "position only", lambda: wrap(lambda x, /, n, out: None)(F32, n=F32[0])),
    ("numba", TypeError, "n[()].*scalars=", lambda: head(F32, 2, 3.0)),
    # what the kernel does
    ("numba", TypeError, "pure_callback", lambda: wrap(runs("with numba.objmode():\n        print()"))(F32)),
    ("numba", TypeError, "'kernel' returns int64", lambda: wrap(runs("return x.size"))(F32)),
    ("numba", TypeError, "not float32[:]: .*: cast by .astype(np.float32) or np.float32(...), or declare 64 bits",
     lambda: with_x64(lambda x: 0.5 * x, F32)),
    ("numba", TypeError, "returns int64, not int32[]: .*: cast by .astype(np.int32) or np.int32(...), or",
     lambda: with_x64(lambda x: x + 1, np.int32(1))),
    ("numba", TypeError, "not float32[:], float32[]: .*: cast by .astype(np.float32)",
     lambda: with_x64(lambda x: (0.5 * x, x[0]), F32, lambda x: (x, spec()))),
    ("numba", TypeError, "returns list(float64).*, not float32[]", lambda: wrap(lambda x: [1.0], spec())(F32)),
    ("numba", TypeError, "returns class(float32), not float32[]", lambda: wrap(lambda x: np.float32, spec())(F32)),
    ("numba", TypeError, "cannot compile", add_text),
    ("numba", TypeError, "in_out_argnames", add_to_input),
    ("numba", TypeError, "its inputs are read-only, .*: write to an output (a parameter after the inputs), name",
     lambda: wrap(outs=FLOATS)(F32, F32)),
    ("numba", TypeError, "; write out[i] = 1.0 for out.at[i].set(1.0):", lambda: wrap(lambda x: x.at[0].set(1.0))(F32)),
    *[("numba", TypeError, f"; {text}", wrap(runs(line, **values)), F32) for line, values, text in WHAT_HELPS],
    ("numba", TypeError, C_FUNCTIONS, lambda: with_scipy("special.j0")),
    ("numba", TypeError, C_FUNCTIONS, lambda: with_scipy("j0")),
    ("numba", TypeError, "drops the result",
     lambda: wrap(runs("x[0] = 1; return x", "x"), FLOATS, in_out_argnames=["x"])(F32)),
    ("numba", TypeError, "jax_enable_x64", lambda: total_of_64_bits()(F32)),
    ("numba", TypeError, "'kernel'.*array of JAX's, which must be an input",
     lambda: wrap(runs("out[:] = a", a=jnp.ones(4)))(F32)),
    # transformations
    ("numba", TypeError, "jax.custom_vjp for grad, jax.custom_jvp for jvp and hessian, or an XLACustomKernel's "
     "rules; jax.lax.stop_gradient(x) for inputs that need none", lambda: jax.jvp(add_one, [F32], [F32])),
    ("numba", TypeError, "a kernel that a rule calls needs a rule of its own where that is differentiated again",
     lambda: jax.jacobian(jax.jacobian(kernel_in_a_rule))(F32)),
    ("numba", NotImplementedError, "transposed, as grad of a jax.custom_jvp does where its rule calls this",
     lambda: jax.grad(lambda x: kernel_on_tangents(x)[0])(F32)),
    ("numba", NotImplementedError, "GPUs there are numba_cuda_kernel and warp_kernel, and jax.pure_callback",
     lambda: jax.jit(add_one).trace(F32).lower(lowering_platforms=("cuda",))),
    # when the kernel runs
    ("numba", jax.errors.JaxRuntimeError, "it returned an array of shape (4,), where outs declares (2,)",
     lambda: wrap(transpose_of, spec(2))(F32)),
    ("numba", jax.errors.JaxRuntimeError, "LookupError: größe 日本 \U0001f600 a.*raised in kernel 'kernel'",
     lambda: raising(f"LookupError({ODD_TEXT!r})")(F32)),
    ("numba", jax.errors.JaxRuntimeError, "OwnError: ('mine', 3)",
     lambda: jax.jit(raising("OwnError('mine', 3)"))(F32)),
    ("numba", jax.errors.JaxRuntimeError, "ZeroDivisionError",
     lambda: jax.pmap(wrap(runs("out[0] = 1 // int(x[0] - 1)")))(F32[None])),
    # Numba CUDA
    ("cuda", ValueError, "grid and block, or launch_dims", lambda: trace_cuda()),
    ("cuda", TypeError, "got 1.5", lambda: trace_cuda(grid=1.5, block=1)),
    ("cuda", ValueError, "2048", lambda: trace_cuda(grid=1, block=(32, 64))),
    ("cuda", ValueError, "block.z must be from 1 to 64; got 65", lambda: trace_cuda(grid=1, block=(1, 1, 65))),
    ("cuda", ValueError, "grid.y must be from 0 to 65535; got 65536", lambda: trace_cuda(grid=(1, 65536), block=1)),
    ("cuda", ValueError, "got -3", lambda: trace_cuda(launch_dims=lambda x: -3)),
    ("cuda", ValueError, "from 1 to 1024; got 2048", lambda: trace_cuda(launch_dims=1, threads_per_block=2048)),
    ("cuda", TypeError, "threads_per_block must be an int",
     lambda: trace_cuda(launch_dims=1, threads_per_block=(8, 8))),
    ("cuda", ValueError, "shared_mem must be a number of bytes; got -1", lambda: trace_cuda(**BLOCK, shared_mem=-1)),
    ("cuda", TypeError, "output 0 is bfloat16[3]", lambda: trace_cuda(outs=spec(3, dtype=jnp.bfloat16), **BLOCK)),
    ("cuda", TypeError, "@cuda.jit of numba or numba_cuda_mlir", lambda: trace_cuda(numba.njit(one_number), **BLOCK)),
    ("cuda", TypeError, "for this one there is numba_kernel", lambda: trace_cuda(numba_multiply, **BLOCK)),
    ("cuda", TypeError, "for one kernel use numba_cuda_kernel.*int 3", lambda: trace_callable(3)),
    ("cuda", TypeError, "names neither a kernel nor the `cuda`",
     lambda: trace_callable(lambda x, y, out, stream: math.pi)),
    ("cuda", TypeError, "(x, out, stream).*gives it (float32[3], .*, a stream)",
     lambda: trace_callable(lambda x, out, stream: cuda)),
    # Warp: arrays
    ("warp", TypeError, "'multiply': argument 'x' is .*int32[3]: wrong dtype; cast it by jnp.asarray(x, jnp.floa",
     lambda: trace_warp("multiply", INTEGERS, THREE)),
    ("warp", TypeError, "JAX keeps 64 bits .* x = jnp.asarray(x, jnp.float64)",
     lambda: trace_warp("takes_doubles", THREE)),
    ("warp", TypeError, "'v' .*float32[:,2].*: wrong shape", lambda: trace_warp("matvec", spec(3, 2, 2), spec(3, 4))),
    ("warp", NotImplementedError, "a launch has known dimensions",
     lambda: trace_warp("multiply", spec(*export.symbolic_shape("n")), THREE)),
    ("warp", ValueError, "Warp counts extents and strides in 32 bits",
     lambda: trace_warp("multiply", spec(2**31), THREE)),
    ("warp", ValueError, "Warp counts extents and strides in 32 bits",
     lambda: trace_warp("squares_of_rows", spec(2, 2**29))),
    ("warp", TypeError, "'multiply': outs of (float32[3], float32[3]): .*: a function gets specs",
     lambda: trace_warp("multiply", THREE, THREE, outs=lambda x, y: x[0])),
    ("warp", TypeError, "say differentiable=True for reverse mode, or use jax.custom_vjp for grad, jax",
     lambda: jax.jvp(product(), PAIR, PAIR)),
    ("warp", TypeError, "the parameters (x, y, out).* got 1 inputs and 1 outputs",
     lambda: trace_warp("multiply", THREE)),
    ("warp", TypeError, "'h' is 'Holder'; supported are .* one parameter for each field",
     lambda: trace_warp("takes_arrays_in_structs")),
    ("warp", TypeError, "'h' is 'Params'; supported are .* one parameter for each field",
     lambda: trace_warp("takes_arrays_of_structs")),
    ("warp", TypeError, "'t' is .*; supported are scalars, vectors and matrices, arrays of those, and structs",
     lambda: trace_warp("takes_indices")),
    ("warp", TypeError, "no generic kernel such as 'takes_anything': wp.overload(kernel, ",
     lambda: trace_warp("takes_anything")),
    # Warp: launches, and what starts from an input
    ("warp", ValueError, "launch_dims is missing, and the shape of the first array, (), does not do",
     lambda: trace_warp("takes_nothing", outs=(), has_side_effect=True)),
    ("warp", TypeError, "launch_dims must be 1 to 4 numbers from 0 to 2147483647; got '3'",
     lambda: trace_warp("multiply", THREE, THREE, launch_dims="3")),
    ("warp", ValueError, "1 to 4 numbers from 0 to 2147483647; got -1",
     lambda: trace_warp("multiply", THREE, THREE, launch_dims=-1)),
    ("warp", ValueError, "tiled=True needs launch_dims, the number of blocks",
     lambda: trace_warp("multiply", tiled=True)),
    ("warp", ValueError, "block_dim must be an int of at least 1; got 0", lambda: trace_warp("multiply", block_dim=0)),
    ("warp", ValueError, "launch_dims must be 1 to 3 numbers",
     lambda: trace_warp("multiply", THREE, THREE, tiled=True, launch_dims=(1,) * 4)),
    ("warp", ValueError, "True does not go with in_out",
     lambda: trace_warp("histogram", in_out_argnames=["acc"], differentiable=True)),
    # Warp: values and types
    ("warp", TypeError, "'s' (struct .*Settings) is passed .*got int 1, not an instance",
     lambda: call_every(*EVERY, s=1)),
    ("warp", Exception, "param m .*warp_kernel 'every'", lambda: call_every(*EVERY, m=[1.0, 2.0])),  # Warp's own text
    ("warp", Exception, " param i", lambda: call_every(*EVERY, i=1.5)),
    ("warp", ValueError, "Failed to convert argument for param v to vec3h",
     lambda: call_every(*EVERY, v=((1, 2), 3))),
    ("warp", ValueError, "'i' (int8) is passed by value; got int 300, which is out of its range",
     lambda: call_every(*EVERY, i=300)),
    ("warp", ValueError, "'i' (int8) is passed by value; .*300.*, which is",
     lambda: call_every(*EVERY, i=np.array(300))),
    ("warp", TypeError, "takes a function decorated with warp.kernel; got function",
     lambda: xk.warp_kernel(like_first, spec())),
    ("warp", ValueError, "Warp has no scalar type for dtype .*it has bool, .*float64",
     lambda: xk.jaxtype_to_warptype(np.complex64)),
    ("warp", ValueError, "1 to 4 dimensions; got 0 in float32[]; reshape it to (1,)",
     lambda: xk.jaxinfo_to_warpinfo(spec())),
    # ops: calls
    ("op", ValueError, "'shape' for platform 'cpu' returned (float32[4,2]), but outs declares (float32[8])",
     lambda: call_broken()),
    ("op", ValueError, f"no backend '' for platform 'cpu'; registered: {REGISTERED}", lambda: call_broken(backend="")),
    ("op", KeyError, "raised this; 'cpu' has shape, raising", lambda: call_broken(backend="raising")),
    ("op", TypeError, "got None", lambda: call_broken(backend="nothing")),
    ("op", TypeError, "lambda: f gives a function f) takes (x, out), but this call gives it ()",
     lambda: call_broken(backend="undecorated")),
    ("op", TypeError, "'scale': outs of (float32[4]): 'ShapedArray' object is not subscriptable" + SPECS_NO_VALUES,
     lambda: call_scale(F32, outs=lambda x: x[0])),
    ("op", TypeError, "'scale': outs of (float32[4]): unsupported operand .*: a function gets specs",
     lambda: jax.jit(partial(call_scale, outs=lambda x: 2 * x))(F32)),
    ("op", TypeError, "a callable of the inputs' specs that returns them; got <function",
     lambda: call_scale(F32, outs=lambda x: x.T)),
    ("op", TypeError, "'scale': the generator (.*) takes (n), .*; give it one .* for each, or call op(..., n=...)",
     lambda: scale_op()(F32, outs=FLOATS)),
    ("op", pickle.UnpicklingError, "op_of_main here: what is pickled by name travels by a variable of a module "
     "that both processes import, which is not __m", lambda: pickled_in_main(xk.XLACustomKernel("scale"))),
    ("op", TypeError, "['alpha'] need a generator", lambda: call_broken(backend="numba", alpha=2)),
    ("op", TypeError, "'alpha' must be hashable", lambda: call_broken(alpha=([1],))),
    ("op", TypeError, "parameter 'k' must be hashable, as parameters are static; got JitTracer",
     lambda: jax.jit(call_op(op_adding(a=1)))(1.0, k=2.0)),
    ("op", TypeError, "outs of XLACustomKernel 'op' is missing: give one slice's",
     lambda: xk.general_batching_rule(op_adding(a=1), (VECTOR,), (0,))),
    ("op", ValueError, "no call function", lambda: op_adding(a=1).call(1)),
    ("op", NotImplementedError, "no kernel for platform 'cpu'; registered: nothing",
     lambda: xk.XLACustomKernel("empty")(VECTOR, outs=like_first)),
    ("op", NotImplementedError, "no kernel for platform 'cpu'; registered: nothing",
     lambda: xk.XLACustomKernel("empty").benchmark(VECTOR, outs=like_first)),
    # ops: what is registered
    ("op", TypeError, "backend and platform must be names, got 1",
     lambda: op_adding(a=1).def_kernel(1, "cpu", add_to(1))),
    ("op", TypeError, "must be callable, got 'kernel'", lambda: op_adding(a=1).def_kernel("a", "cpu", "kernel")),
    ("op", TypeError, "grid can be given with a ready kernel only",
     lambda: op_adding(a=1).def_numba_kernel(add_to(1), grid=3)),
    ("op", TypeError, "an op has no side effects", call_with_side_effects),
    ("op", TypeError, "expected an XLACustomKernel or a jax Primitive, got 3", lambda: xk.defjvp(3)),
    ("op", TypeError, "'wrong' is not a callable object",
     lambda: op_adding(a=1).def_jvp_rule2(None, "wrong")),
    ("op", TypeError, "'wrong' is not a callable object",
     lambda: op_adding(a=1).def_vjp_rule(add_to(1), "wrong")),
    # ops: transformations
    ("op", NotImplementedError, "'op' has no ordered effects", lambda: call_op(op_of(print_in_order))(1.0)),
    ("op", NotImplementedError, "no ordered effects", lambda: jax.make_jaxpr(call_op(op_of(print_in_order)))(1.0)),
    ("op", NotImplementedError, "calls the op on tangents", lambda: jax.grad(op_that_calls_itself())(1.0)),
    ("op", NotImplementedError, "has no jvp rule", lambda: jax.grad(call_op(op_adding(a=1)))(1.0)),
    # wrappers: dicts
    ("numba", TypeError, "a tuple, or a NamedTuple", lambda: wrap(outs={"out": FLOATS})(F32)),
    ("numba", TypeError, "a tuple, or a NamedTuple", lambda: wrap(scratch={"s": FLOATS})(F32)),
]  # fmt: skip


def rows_of(errors, *marks):
    """The rows as parameters of a test, which `-k` finds by backend they are and by their text."""
    for backend, kind, text, call, *inputs in errors:
        needed = [pytest.mark.needs("warp")] if backend == "warp" else []
        name = " ".join(re.findall(r"\w+", text)[:6])
        yield pytest.param(kind, text, call, inputs, marks=[*needed, *marks], id=f"{backend}: {name}")


@pytest.mark.parametrize("kind, text, call, inputs", list(rows_of(ERRORS)))
def test_mistakes_are_refused(kind, text, call, inputs):
    pattern = "(?s)" + ".*".join(map(re.escape, text.split(".*")))
    with pytest.raises(kind) as caught:
        jax.block_until_ready(call(*inputs))
    first_line = str(caught.value).partition("\n")[0]  # below it may stand what Numba says
    assert re.search(pattern, "\n".join([first_line, *getattr(caught.value, "__notes__", [])]))
    np.testing.assert_array_equal(add_one(F32), F32 + 1)  # the process goes on


FIXES = {  # as the messages have them: a kernel, its outs, and what is right
    "np.float32(...)": (lambda x: np.float32(0.5) * x, FLOATS, F32 / 2),
    ".astype(np.float32)": (lambda x: (0.5 * x).astype(np.float32), FLOATS, F32 / 2),
    "64 bits in outs": (lambda x: 0.5 * x, spec(4, dtype=np.float64), F32 / 2),
    "lambda x: np.sin(x)": (lambda x: np.sin(x), FLOATS, np.sin(F32)),
    "eval_shape": (lambda x: x[:2] + x[2:], lambda x: jax.eval_shape(lambda x: x[:2] + x[2:], x), F32[:2] * 2),
    "(2, *x.shape)": (lambda x: np.stack((x, x)), lambda x: spec(2, *x.shape), np.ones((2, 4))),
    "wrapper.__wrapped__": (runs("f(x, out)", f=numba.njit(add_one.__wrapped__)), FLOATS, F32 + 1),
}


@pytest.mark.parametrize("fix", FIXES)
def test_the_fix_of_a_message_works(fix):
    kernel, outs, result = FIXES[fix]
    np.testing.assert_allclose(with_x64(kernel, F32, outs), result, rtol=1e-6)


def test_an_input_that_needs_no_gradient_needs_no_derivative():
    derivative = jax.grad(lambda x, y: add_one(jax.lax.stop_gradient(x)) @ y, 1)
    np.testing.assert_array_equal(derivative(F32, F32), F32 + 1)


@pytest.mark.parametrize("mistake, hint", [(add_text, "must return"), (add_to_input, "has no attribute 'args'")])
def test_hints_that_do_not_help_are_not_given(mistake, hint):
    with pytest.raises(TypeError) as caught:
        mistake()
    assert hint not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int4"])
def test_a_dtype_without_arithmetic_in_numba_is_refused_with_casts_that_can_be_pasted(dtype):
    x = jnp.array([0, 1, 1, 2]).astype(dtype)
    with pytest.raises(TypeError, match=rf"'add_one': input 0 is {dtype}\[4\]") as caught:
        add_one(x)
    result = eval(str(caught.value).partition("back: ")[2], {"f": add_one, "x": x, "jnp": jnp})
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.astype(int), [1, 2, 2, 3])


def test_op_backend_of_another_platform_can_be_traced_and_lowered_there_alone():
    call = partial(broken_op(), outs=like_first, backend="far")
    assert "stablehlo.add" in lower_for_cuda(call, VECTOR)
    for function, x in ((call, VECTOR), (jax.jit(call), VECTOR), (jax.vmap(call), ROWS)):
        with pytest.raises(ValueError, match="no backend 'far' for platform 'cpu'"):
            function(x)


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


def test_a_call_that_fails_gives_its_memory_back():
    """References: each that a failing call kept would be some ten blocks a call.  jax 0.9 keeps three itself."""
    call = jax.jit(raising("LookupError('no such number')"))
    for _ in range(20):
        error_of(call, F32)
    gc.collect()
    blocks = sys.getallocatedblocks()
    for _ in range(50):
        error_of(call, F32)
    gc.collect()
    assert sys.getallocatedblocks() - blocks < (50 if jax.__version_info__ >= (0, 11) else 250)


# ======================================================================================================
# Numba on CPU, and with it what all wrappers share: the C interface, kernels, inputs, the primitive, the handler
# ======================================================================================================


# -- which kernels are one kernel -----------------------------------------------------------------------


def helper(expression, jit=numba.njit, **values):
    """A function of `a`, with these values as its globals."""
    return jit(kernel_from(f"def helper(a):\n    return {expression}", name="helper", **values))


def closures(expression, values):
    """Kernels that one `def` makes: for each value `v` one whose result is the expression."""
    source = f"def make(v):\n    def kernel(x, out):\n        out[0] = {expression}\n    return kernel"
    return list(map(kernel_from(source, name="make"), values))


def overflows(x, out):
    total = 100 * int(x[0] + 1)
    total += 100
    out[0] = total


def test_kernels_of_equal_text_differ_in_what_they_call_and_in_their_options():
    """For numbers and arrays see test_names_do_not_depend_on_the_order_in_which_kernels_are_made."""
    helpers = [helper("a + 1"), helper("a + n", n=2), helper("a + 4", numba.vectorize)]
    kernels = closures("v(x[0] + 1)", [math.sin, math.cos, np.tan, abs, *helpers])
    kernels += [numba.njit(locals={"total": kind})(overflows) for kind in (numba.int8, numba.int64)]
    results = [result_of(kernel, np.zeros(1, np.float32)) for kernel in kernels]
    assert len(set(results)) == len(results), results


# A kernel object is compiled once for each signature: what it reads of globals is read then, and never again.


def result_of(kernel, x=F32):
    return float(wrap(kernel)(x).ravel()[0])


def test_globals_are_read_when_a_kernel_is_compiled():
    """Also by a call of the user's own."""
    jitted = numba.njit(kernel_from("def kernel(x, out): out[0] = number", number=1))
    jitted(np.frombuffer(F32.tobytes(), np.float32), F32.copy())  # read-only, as inputs are
    jitted.py_func.__globals__["number"] = 2
    for _ in range(2):
        assert result_of(jitted) == 1
        jax.clear_caches()
    assert result_of(jitted, F32.astype(np.int32)) == 2  # a signature of its own
    assert result_of(jitted.py_func) == result_of(numba.njit(jitted.py_func)) == 2


def test_a_kernel_sees_a_module_that_is_loaded_again():
    """As by `importlib.reload(config)`, which assigns its variables anew."""
    config = types.ModuleType("config")
    kernel = runs("out[0] = config.K * x[0]", config=config)
    for config.K in (2, 3):
        assert result_of(kernel) == config.K


@contextlib.contextmanager
def compiled_functions():
    """The names of the functions that Numba compiles meanwhile."""
    names = []
    with numba.core.event.install_recorder("numba:compile") as recorder:
        yield names
    names += [event.data["dispatcher"].py_func.__name__ for _, event in recorder.buffer if event.is_start]


def test_a_kernel_that_is_made_again_for_each_shape_is_compiled_once():
    """If it reads exact constants and stable modules alone."""

    def make(factor):
        def kernel(x, out):
            for i in range(x.size):
                out[i] = factor * np.sqrt(2 * x[i])

        return kernel

    for factor, jit, count in ((2.0, itself, 1), (3.0, itself, 1), (3.0, numba.njit, 1), (2.0, itself, 0)):
        with compiled_functions() as names:
            for n in (1, 2, 3):
                np.testing.assert_array_equal(wrap(jit(make(factor)))(np.full(n, 2, np.float32)), [2 * factor] * n)
        assert names.count("kernel") == count


def test_a_plain_function_that_is_wrapped_again_is_compiled_once():
    """Also one with a helper, a type and an array, until what it reads is another value."""
    function = runs("out[:] = twice(x) + table[1] + kind(x[0])", twice=numba.njit(lambda x: 2 * x))
    array, another = np.arange(2.0), np.array([0.0, 5.0])
    for table, kind, expected in ((array, numba.int8, 645), (another, numba.int8, 649), (array, numba.int16, 901)):
        function.__globals__.update(table=table, kind=kind)
        for is_new in (True, False):
            with compiled_functions() as names:
                assert result_of(function, np.full(3, 300, np.float32)) == expected
            assert names.count("kernel") == is_new


def test_what_is_compiled_is_logged(caplog):
    caplog.set_level("DEBUG", logger=xk.__name__)
    wrap(runs("out[:] = x + 0.5"), vmap_method="sequential")(F32)
    assert re.search(r"compiled kernel for \(float32\[:\]\) .* ms; slices run in order", caplog.text)


def test_many_kernels_of_one_def_are_a_warning(monkeypatch):
    """Which is given once."""
    assert xk._MANY == 50
    monkeypatch.setattr(xk, "_MANY", 5)
    kernels = [runs("out[0] = twice(x[0])", twice=helper("2 * a")) for _ in range(6)]
    with pytest.warns(UserWarning, match="compiled 5 times.*make it once") as caught:
        for kernel in kernels:
            jax.eval_shape(wrap(kernel), F32)
    assert result_of(kernels[0]) == result_of(kernels[5]) == 2
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("size, step", [(4, 1), (4, 2), (200_000, 1)])
def test_an_array_that_changes_is_its_own(size, step):
    """Numba reads large and strided arrays where they are: a kernel over another one must not see this one change."""
    array = np.ones(size)[::step]
    for value, read in ((1, array), (2, array), (1, np.ones(size)[::step])):
        array[:] = value
        (kernel,) = closures("x[0] + v[0]", [read])
        assert result_of(kernel) == 1 + value


OP_OF_THIS_MODULE = xk.XLACustomKernel("of another name")
also_add_one = wrap(add_one.__wrapped__)


@pytest.mark.parametrize("name", ["add_one", "also_add_one", "OP_OF_THIS_MODULE"])
def test_copies_and_pickles_of_what_has_a_variable_are_the_object(name):
    kept = globals()[name]
    assert pickle.loads(pickle.dumps([kept]))[0] is deepcopy(kept) is shallow_copy(kept) is kept


@pytest.mark.parametrize("make, name", [
    (lambda: xk.XLACustomKernel("local"), "local"),
    pytest.param(lambda: product(), "multiply", marks=pytest.mark.needs("warp")),
], ids=["op", "warp"])  # fmt: skip
def test_what_has_no_variable_and_no_value_cannot_be_pickled(make, name):
    with pytest.raises(pickle.PicklingError, match=rf"'.*{name}'.*in a variable of a module"):
        pickle.dumps(make())


def divided_by(c):
    return wrap(numba.njit(fastmath=True)(lambda x: x / c))


def test_kernels_without_a_variable_are_sent_to_other_processes_by_value(monkeypatch):
    """Or with one of `__main__`, which another process has not."""
    of_main = wrap(kernel_from("def kernel(x, out): out[:] = x / 2", __name__="__main__"))
    monkeypatch.setattr(sys.modules["__main__"], "of_main", of_main, raising=False)
    for kernel in (divided_by(2), of_main):
        np.testing.assert_array_equal(another_process().submit(call_on_ones, kernel).result(), F32 / 2)


def call_on_ones(kernel):
    return np.asarray(kernel(F32))


# -- transformations -----------------------------------------------------------------------------------
# Of a wrapper; the matrix and the tests of ops have those that need nothing of its primitive.

P = jax.sharding.PartitionSpec


def test_programs_are_exported_with_symbolic_shapes():
    (n,) = export.symbolic_shape("n")
    triple = wrap(runs("out[:] = 3 * x"), name="triple")  # which nothing has traced before
    program = export.export(jax.jit(triple), disabled_checks=xk.export_checks())(spec(n))
    for size in (1, 5, 8):
        np.testing.assert_array_equal(program.call(np.ones(size, np.float32)), np.full(size, 3.0))


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


@pytest.mark.parametrize("rank, dtype", [(0, "float32"), (2, "complex64"), (4, "int8")])
def test_any_nest_of_vmaps_is_a_loop_over_slices(rank, dtype):
    rng = np.random.default_rng(rank)
    cases = [random_nest(rng, rank, dtype) for _ in range(25)]

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
    results, expected = run(running_sum, operands), run(running_sum_in_jax, operands)
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), results, expected)


pthread_self = numba.types.ExternalFunction("pthread_self", numba.types.uint64())


def spin_on_a_thread(x, thread):
    """Some 50 µs of work that gives something else if it is done twice; says which thread did it."""
    total = 0.0
    for i in range(5000):
        total += math.sin(x[0] + i)
    x[0] = total
    thread[0] = pthread_self()


@pytest.mark.needs("cores")
@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled", None])
def test_each_slice_runs_once_on_any_thread_unless_in_order(method):
    outs = spec(1, dtype="float64"), spec(1, dtype="uint64")
    call = wrap(spin_on_a_thread, outs, in_out_argnames=["x"], vmap_method=method)
    x = np.arange(128.0).reshape(2, 64, 1)
    in_order = method in ("sequential", "sequential_unrolled")
    with x64(True):
        in_batches = jax.jit(jax.vmap(jax.vmap(call)))
        expected = [[call(value)[0] for value in row] for row in x]
        for _ in range(20 if in_order else 100):  # a busy machine may leave the caller alone
            sums, threads = in_batches(x)
            np.testing.assert_array_equal(sums, expected)
            on_one_thread = len(np.unique(threads)) == 1
            if not on_one_thread:
                break
    assert on_one_thread == in_order


# -- kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outs, signature", [(like_first, "(*args)"), (itself, "(x)"), (spec(3), "(*args)")])
def test_wrappers_show_their_kernel_and_the_signature_of_their_inputs(outs, signature):
    """By which jax.custom_vjp binds arguments."""
    assert repr(add_one) == "<numba_kernel add_one>" and inspect.isfunction(add_one.__wrapped__)
    square = wrap(lambda x: x * x, outs)
    assert str(inspect.signature(square)) == signature
    with_vjp = jax.custom_vjp(square)
    with_vjp.defvjp(lambda x: (square(x), x), lambda x, ct: (2 * x * ct,))
    np.testing.assert_array_equal(jax.grad(lambda x: with_vjp(x).sum())(jnp.arange(3.0)), [0, 2, 4])


def _scaled_head(x, n, alpha):
    return np.where(np.arange(x.size) < n, alpha * x, 0).astype(np.float32)


def _swap(x, y):
    return y, x


def _sum_and_twice(x):
    return x.sum(), (2 * x, x.size)


def _sums_of_int32(x):
    return x.sum(), (2 * x, np.int32(x.size))


SCALARS, VECTORS = np.array([1.25, 1.5], np.float32), np.array([[1, 1.5, 1.75], [2, 1.25, 1.125]], np.float32)
THREE_INPUTS = [SCALARS, VECTORS, VECTORS + 1]
THREE_FLOATS, COUNT = spec(3), spec(dtype=np.int32)
TWO_COUNTS = np.full(2, 2, np.int32)
in_out = wrap(_running, lambda x, total: (total, x), in_out_argnames=iter(["total"]), zero_outputs=True)


def shifted(x, y, out):
    for i in range(x.size):
        out[i] = x[i] + y


@functools.cache
def typed_add_one():
    """Compiled for writable arrays alone."""
    return numba.njit(["void(f8[:],f8[:])", "void(f4[::1],f4[::1])"])(add_one.__wrapped__)


def guvectorized():
    return wrap(numba.guvectorize("(n),()->(n)")(shifted), THREE_FLOATS)


call_typed = on_first_call(lambda: wrap(typed_add_one()))


def calls_typed_add_one():
    add = typed_add_one()

    def kernel(x, out):
        add(x, out)

    return wrap(kernel)


ONE_LINERS = {  # a function as it is, the same in Python, two slices of each input, and of those that go by keyword
    "returns a scalar": (wrap(lambda x: x.mean(), spec(), scratch=()), lambda x: x.mean(), [], {"x": VECTORS}),
    "returns another layout": (wrap(transpose_of, spec(3, 1)), np.transpose, [VECTORS[:, None]], {}),
    "returns a tuple": (wrap(_sum_and_twice, (spec(), (THREE_FLOATS, COUNT))), _sums_of_int32, [VECTORS], {}),
    "returns what outputs start as": (
        wrap(_swap, _swap, input_output_aliases={0: 0, 1: 1}), _swap, [VECTORS, -VECTORS], {},
    ),
    "a view by strides": (
        wrap(runs("out[:] = x[:, 1]"), spec(2)), lambda x: x[:, 1], [np.arange(12, dtype="f4").reshape(2, 2, 3)], {},
    ),
    "star args": (wrap(runs("a[-1][:] = a[0]", "*a")), like_first, [VECTORS, VECTORS + 1], {}),
    "a name of any object": (wrap(runs("out[:] = x.ndim * x", ndim=DESCRIBED)), like_first, [VECTORS], {}),
    "a default": (wrap(runs("out[:] = n * x", "x, out, n=3")), lambda x: 3 * x, [VECTORS], {}),
    "typed": (call_typed, lambda x: x + 1, [VECTORS], {}),
    "vectorize": (wrap(numba.vectorize(_axpy), like_last), _axpy, THREE_INPUTS, {}),
    "guvectorize": (on_first_call(guvectorized), np.add, [VECTORS, SCALARS], {}),
    "scalars": (wrap(_head, scalars=True), _scaled_head, [VECTORS], {"alpha": SCALARS, "n": TWO_COUNTS}),
    "in-out": (in_out, lambda x, total: (x + total, 2 * (x + total)), [VECTORS], {"total": VECTORS + 1}),
}  # fmt: skip


def check_slices(function, expected, inputs, named):
    """Compare the two slices of all inputs, alone and under vmap."""

    def slices_of(function):
        slices = [jax.tree.map(operator.itemgetter(i), (inputs, named)) for i in range(2)]
        results = [function(*args, **named) for args, named in slices]
        return jax.tree.map(lambda *slices: np.stack(slices), *results)

    vmapped = jax.vmap(lambda args, named: function(*args, **named))
    for found in (slices_of(function), vmapped(inputs, named)):
        check_close(found, slices_of(expected), 1e-6)


@pytest.mark.parametrize("name", ONE_LINERS)
def test_numba_functions_in_one_line(name):
    check_slices(*ONE_LINERS[name])


# -- inputs are never changed, and outputs start from something ------------------------------------------
# The library reads the source of these kernels, so they are functions of this file.

ONES_4 = np.ones((4, 4), np.float32)
add_in_place = numba.vectorize(lambda a, b: a + b)


@numba.njit
def store_in(array):
    array.flat[0] = 77


@numba.njit
def add_into(total, x):
    for i in range(x.size):
        total[i] += x[i]


@numba.njit
def copy_into(out, x):
    for i in range(x.size):
        out[i] = x[i]


class Writes:
    """Kernels that write to their input in ways that Numba lets pass: another holder of it would see that."""

    def by_flat(x, out):
        x.flat[0] = 77
        out[:] = x

    def a_diagonal(x, out):
        np.fill_diagonal(x.reshape((2, 2)), 77)
        out[:] = x

    def what_is_contiguous(x, out):
        np.ascontiguousarray(x)[0] = 77
        out[:] = x

    def a_product(x, out):
        np.dot(ONES_4, np.ones(4, np.float32), x)
        out[:] = x

    def in_a_helper(x, out):
        store_in(x)
        out[:] = x

    def in_a_second_step(x, out):
        target = np.zeros_like(x)
        for _ in range(2):
            target.flat[0] = 77
            target = x[1:]
        out[:] = x

    def swapped(x, out):
        source, target = x, out
        source, target = target, source
        out[:] = x
        target.flat[0] = 77


class OnlyUpdates:
    """Kernels that add to an output which nothing has filled, or never store to it: they give what memory held."""

    def each_element(x, out):
        for i in range(x.size):
            out[i] += x[i]

    def a_histogram(x, out):
        for v in x:
            out[int(v)] += 1

    def by_a_view(x, out):
        tail = out[1:]
        tail[0] += x[0]

    def in_a_helper(x, out):
        add_into(out, x)

    def written_out_in_one_branch(x, out):
        if x[0] > 0:
            out[0] = out[0] - x[0]

    def assigned_anew(x, out):
        out = 2 * x  # noqa: F841

    def nothing(x, out):
        pass


class Right:
    """Kernels that are right, and look like those: they must be taken."""

    def rows_of_enumerate(x, out):
        for i, row in enumerate(out.reshape((2, 2))):
            row[:] = x[i]

    def two_at_once(x, out):
        out[0], out[1] = divmod(x[3], x[2])
        out[2], out[3] = x[0], x[1]

    def by_a_ufunc(x, out):
        np.add(x, x, out)

    def vectorized(x, out):
        add_in_place(x, x, out)

    def starred(x, out):
        copy_into(*(out, x))

    def annotated(x, out):
        o: np.ndarray = out
        o[:] = x

    def filled_before(x, out):
        out.fill(1)
        for i in range(x.size):
            out[i] += x[i]

    def by_a_view(x, out):
        first, tail = out[:1], out[1:]
        first[:] = x[:1]
        tail[:] = x[1:]

    def a_product(x, out):
        np.dot(ONES_4, x, out)

    def reads_what_may_be_a_view(x, out):
        out[:] = np.ascontiguousarray(x) + np.nan_to_num(x)
        for i, v in enumerate(x.flat):
            out[i] += v

    def is_assigned_anew(x, out):
        x = x.copy()
        x[0] = 77
        out[:] = x


def kernels_of(group):
    """The functions of a class, as parameters of a test."""
    return [pytest.param(kernel, id=name) for name, kernel in vars(group).items() if callable(kernel)]


def plainly(kernel, x, out):
    """What the output is after a call of Python's own."""
    kernel(x.copy(), out)
    return out


FROM_ZERO = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize("code", [
    "x[0] = 77", "x[x > 0] = 77", "x += 77", "x.T[0] = 77", "np.add(x, 77, x)", "add_in_place(x, out, x)",
])  # fmt: skip
def test_what_numba_refuses_is_refused_in_words_of_jax(code):
    with pytest.raises(TypeError, match=r"(?s)inputs are read-only, .*input_output_aliases"):
        wrap(runs(f"{code}; out[:] = x", add_in_place=add_in_place))(F32)


@pytest.mark.parametrize("kernel", kernels_of(Writes))
def test_a_kernel_that_writes_to_an_input_unseen_by_numba_is_refused(kernel):
    """With a way out, by which it gives what Python gives."""
    with pytest.raises(TypeError, match=r"(?s)kernel.*in_out_argnames"):
        wrap(kernel)(F32)
    x = np.array([4, np.nan, 2, 1], np.float32)
    changed = x.copy()
    kernel(changed, np.zeros(4, np.float32))
    results = wrap(kernel, lambda x: (x, x), in_out_argnames=["x"])(x)
    np.testing.assert_array_equal(results[0], changed)


def test_what_is_guvectorized_and_writes_to_an_input_is_refused():
    """Numba has no read-only types for it."""

    def add_to_both(x, y, out):
        for i in range(x.size):
            x[i] += y[i]
            out[i] = x[i]

    for signatures in ([["void(f4[:],f4[:],f4[:])"]], []):
        with pytest.raises(TypeError, match=r"(?s)'x'.*in_out_argnames"):
            wrap(numba.guvectorize(*signatures, "(n),(n)->(n)")(add_to_both), FLOATS)(F32, F32)


@pytest.mark.parametrize("kernel", kernels_of(OnlyUpdates))
def test_a_kernel_that_only_updates_an_output_is_refused(kernel):
    for jit in (itself, numba.njit, numba.njit(parallel=True)):
        with pytest.raises(TypeError, match=r"(?s)'out'.*zero_outputs=True"):
            jax.eval_shape(wrap(jit(kernel)), F32)


@pytest.mark.parametrize("kernel", kernels_of(OnlyUpdates))
def test_an_output_that_is_updated_starts_from_zeros_or_from_an_input(kernel):
    """In each slice, and also in memory that was in use before."""
    zeroed, aliased = wrap(kernel, zero_outputs=True), wrap(kernel, input_output_aliases={0: 0})
    from_zeros = plainly(kernel, FROM_ZERO, np.zeros(4, np.float32))
    for _ in range(2):
        np.testing.assert_array_equal(jax.vmap(zeroed)(np.stack([FROM_ZERO] * 2)), [from_zeros] * 2)
    np.testing.assert_array_equal(aliased(FROM_ZERO), plainly(kernel, FROM_ZERO, FROM_ZERO.copy()))


def test_zero_outputs_false_takes_what_only_updates():
    assert jax.eval_shape(wrap(OnlyUpdates.each_element, zero_outputs=False), F32) == FLOATS


@pytest.mark.parametrize("kernel", kernels_of(Right))
def test_a_kernel_that_is_right_is_taken(kernel):
    x = FROM_ZERO + 1
    np.testing.assert_array_equal(wrap(kernel)(x), plainly(kernel, x, np.empty(4, np.float32)))


def test_an_output_that_nditer_stores_to_is_taken():
    """Apart from the others, as NumPy's own wants a flag for that."""

    def doubled(x, out):
        for source, target in np.nditer((x, out)):
            target[()] = 2 * source[()]

    np.testing.assert_array_equal(wrap(doubled)(F32), 2 * F32)


def test_a_kernel_without_outputs_needs_no_store():
    assert wrap(lambda x: None, (), has_side_effect=True)(F32) == ()


LARGE = spec(100_000)  # XLA keeps some bytes for itself


def reads_both(x, y, out):
    out[0] = x[0] + y[-1]


def test_no_input_is_copied():
    """Not even for a function that is compiled for writable arrays alone, nor one that all slices share."""
    shared = jax.vmap(wrap(reads_both), (0, None))
    for kernel, *specs in ((calls_typed_add_one(), LARGE), (shared, spec(8, 1), LARGE)):
        results = kernel(*[np.ones(each.shape, np.float32) for each in specs])
        np.testing.assert_array_equal(results, np.full(results.shape, 2))
        assert 0 <= copied_bytes(kernel, *specs) < 1000


# -- aliases, scratch, effects -------------------------------------------------------------------------


@xk.numba_kernel(outs=like_first, input_output_aliases={0: 0})
def accumulate(acc, x, out):
    for i in range(x.size):
        out[0] += x[i]


@pytest.mark.parametrize("batch", [(), (3, 2)])
def test_what_starts_with_an_input_does_where_xla_lost_the_alias(batch):
    """An alias is a hint: fusions of slices on GPUs lose it.  Here the program has none."""
    acc, x = jnp.broadcast_to(jnp.array([10.0, 5.0]), (*batch, 2)), jnp.broadcast_to(jnp.arange(4.0), (*batch, 4))
    call = jax.ffi.ffi_call(target_of(accumulate, spec(2), spec(4)), spec(*batch, 2))
    np.testing.assert_array_equal(call(acc, x), np.broadcast_to([16, 5], (*batch, 2)))
    np.testing.assert_array_equal(acc, np.broadcast_to([10, 5], (*batch, 2)))


def test_xla_is_told_of_an_alias():
    """So that it copies nothing where the input is donated."""
    donating = [jax.jit(call, donate_argnums=0) for call in (accumulate, lambda acc, x: add_one(acc))]
    told, not_told = [copied_bytes(call, LARGE, FLOATS) for call in donating]
    assert told < 1000 < 400_000 <= not_told


@pytest.mark.parametrize("transform", [itself, jax.jit, jax.vmap])
def test_scratch_is_no_result(transform):
    """Nor is it looked at by jax_debug_nans."""
    x = np.ones((2, 3), np.float32)
    call = transform(wrap(runs("s[0] = np.nan\n    out[:] = 1", "x, out, s"), scratch=spec(2)))
    with jax.debug_nans(True):
        check_close(call(x), x)
    for equation in jax.make_jaxpr(call)(x).eqns:
        assert len(equation.outvars) == 1


# -- state that kernels change in place ----------------------------------------------------------------


class Loops:
    """Programs of a state `v` and of `k(v, i)`, which adds 1 to v[i]."""

    def set_before(k, v):
        return jax.lax.fori_loop(0, 9, lambda i, v: k(v.at[i].set(2), i), v)

    def read_before(k, v):
        """As README says."""

        def step(i, state):
            v, total = state
            v, y = jax.lax.optimization_barrier((v, v[i]))
            return k(v, i), total + y

        return jax.lax.fori_loop(0, 9, step, (v, 0.0))

    def in_a_scan_and_a_branch(k, v):
        def step(v, i):
            v = jax.lax.cond(i % 2 == 0, lambda v: k(v.at[i].set(2), i), lambda v: v, v)
            return v, v[i]

        return jax.lax.scan(step, v, jnp.arange(9))


add_1_at = wrap(runs("v[i] += 1", "v, i"), in_out_argnames=["v"], scalars=["i"])


def add_1_in_op(v, i):
    return op_with(lambda outs: add_1_at)(v, i, outs=like_first)


def copies_of_state(function, **options):
    """How often a program copies all of a state of this size: in all, and in loops."""
    text = jax.jit(function, **options).lower(LARGE).compile().as_text()
    in_entry = re.compile(r"^ENTRY .*?^}", re.DOTALL | re.MULTILINE)
    return [len(re.findall(r"= f32\[[\d,]{6,}\]\S* copy\(", code)) for code in (text, in_entry.sub("", text))]


@pytest.mark.parametrize("program, k, options", [
    *((program.values[0], add_1_at, {}) for program in kernels_of(Loops)),
    (Loops.set_before, add_1_at, {"donate_argnums": 0}),
    (Loops.set_before, add_1_in_op, {}),
])  # fmt: skip
def test_state_that_a_kernel_changes_is_copied_where_that_of_jax_is(program, k, options):
    by_kernel, by_jax = partial(program, k), partial(program, lambda v, i: v.at[i].add(1))
    check_close(by_kernel(jnp.arange(100.0)), by_jax(jnp.arange(100.0)))
    if jax.__version_info__ < (0, 11, 2):
        pytest.skip("XLA drops the barrier before it looks for copies")
    in_all, in_loops = copies_of_state(by_kernel, **options)
    assert in_loops == 0 and in_all <= copies_of_state(by_jax, **options)[0]


@pytest.mark.parametrize("kept", [True, False])
def test_a_side_effect_keeps_unused_and_equal_calls(kept):
    call = wrap(has_side_effect=kept)

    def unused_in_a_scan(x):
        return jax.lax.scan(lambda carry, _: (2 * carry, call(carry).sum()), x, None, length=3)[0]

    in_a_scan = jax.jit(unused_in_a_scan).lower(FLOATS).compile()
    assert ("custom-call" in in_a_scan.as_text()) == kept
    np.testing.assert_array_equal(in_a_scan(F32), 8 * F32)
    twice = jax.jit(lambda x: (call(x), call(x))).lower(FLOATS).compile()
    assert twice.as_text().count("custom-call(") == (2 if kept else 1)


@pytest.mark.parametrize("code, parameters, options", [
    ("v[()] *= 0.5; n[()] += 1", "v, n", {"in_out_argnames": ["n", "v"]}),
    ("new_v[()] = 0.5 * v; new_n[()] = n + 1", "v, n, new_v, new_n", {}),
], ids=["in place", "new"])  # fmt: skip
def test_a_loop_whose_whole_state_is_what_a_kernel_gives(code, parameters, options):
    """XLA alone moves such a call out of the loop, which then never ends."""
    kernel = jax.vmap(wrap(runs(code, parameters), lambda v, n: (v, n), **options))
    asked = []

    def goes_on(n):
        asked.append(n)
        return np.bool_(n.max() < 10 and len(asked) < 50)

    def condition(state):
        return jax.pure_callback(goes_on, spec(dtype=bool), state[1])

    v, n = jax.lax.while_loop(condition, lambda state: kernel(*state), (8 * F32, np.zeros(4, np.int32)))
    np.testing.assert_array_equal(v, F32 / 128)
    np.testing.assert_array_equal(n, [10, 10, 10, 10])


# -- many threads, and what is registered --------------------------------------------------------------


def test_threads_that_wrap_one_function_get_one_kernel():
    """With a name, which no two kernels can have."""
    triple = runs("out[:] = 3 * x")
    wrappers = [xk.numba_kernel(triple, like_first, name="wrapped_by_threads") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda call: call(F32), wrappers):
            np.testing.assert_array_equal(result, 3 * F32)


def test_collected_wrappers_leave_their_kernels():
    """XLA keeps raw pointers to what was registered."""
    wrappers = [wrap(reads("x[0] + value", value=value)) for value in range(10)]
    programs = [jax.jit(wrapper).lower(F32).compile() for wrapper in wrappers]
    references = list(map(weakref.ref, wrappers))
    wrappers.clear()
    jax.clear_caches()
    gc.collect()
    assert [reference() for reference in references] == [None] * 10
    assert [float(call(F32)[0]) for call in programs] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("outs, args", [
    (FLOATS, (F32, F32)), ([FLOATS, FLOATS], (F32,)), (FLOATS, (F32.astype(np.int32),)), (spec(), (F32,)),
])  # fmt: skip
def test_buffers_of_another_count_rank_or_dtype_are_an_error(outs, args):
    """As another program of the same names could pass them."""
    target = target_of(add_one, FLOATS)
    assert "'add_one' was called with other buffers" in error_of(jax.ffi.ffi_call(target, outs), *args)


def load_copy(name, path=xk.__file__):
    """Another copy of the file in this process, under a name that it has while it is loaded."""
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        found.loader.exec_module(module)
    return module


def test_copies_of_this_file_in_a_process():
    """One that is vendored under another name, and one that replaces this module."""
    modules = xk, load_copy("package.vendored"), load_copy("xla_kernels")
    kernels = [module.numba_kernel(add_one.__wrapped__, like_first) for module in modules]
    chain = jax.jit(lambda x: functools.reduce(lambda x, kernel: kernel(x), kernels, x))
    np.testing.assert_array_equal(chain(F32), F32 + 3)


# -- names, in this process and in others -------------------------------------------------------------


def load_beside_another(program):
    """In a process that has another kernel of this name."""
    assert wrap(runs("for i in range(x.size): out[i] = x[i] + 2"), name="mine")(F32)[0] == 3
    return np.asarray(read_exported(program)(F32))


def executables(step):
    """Of kernels that differ in what they read, or in their options, made in this order."""
    kernels = closures("math.copysign(np.array([v]).itemsize + x[0], v)", [0.0, -0.0, True, np.float32(1), np.int16(1)])
    kernels += closures("x[0] + np.asarray(v).size + 0.25", [np.float32(3), np.arange(3)])
    kernels += closures("x[0] + v[1] + 0.5", [np.arange(3), np.arange(3) + 2, (0, 4)])
    kernels += closures("x[0] + v[1, 0] + 0.75", [np.arange(4).reshape(2, 2, order=order) for order in "CF"])
    kernels += [reads(f"np.{function}(x[0])") for function in ("sinh", "cosh")]
    kernels.append(numba.njit(fastmath={"nnan", "nsz", "arcp", "contract"})(reads("x[0] / 7")))  # a set has no order
    return [jax.jit(wrap(kernel, spec(1))).lower(FLOATS).compile() for kernel in kernels[::step]]


def run_executable(program):
    return np.asarray(program(F32))


def load_executables(serialized):
    executables(-1)
    load = serialize_executable.deserialize_and_load
    return [run_executable(load(*data, execution_devices=jax.devices()[:1])) for data in serialized]


@pytest.mark.processes
def test_names_do_not_depend_on_the_order_in_which_kernels_are_made():
    """So that serialized executables of another process find the kernels of this one."""
    made = executables(1)
    here = np.concatenate(list(map(run_executable, made)))
    assert len(set(here)) == len(here)  # so each finds its own
    loaded = another_process().submit(load_executables, list(map(serialize_executable.serialize, made))).result()
    np.testing.assert_array_equal(np.concatenate(loaded), here)


def test_a_kernel_of_the_users_name_is_found_in_another_process():
    mine = wrap(name="mine")
    elsewhere = another_process().submit(load_beside_another, exported_here(mine, FLOATS))
    np.testing.assert_array_equal(elsewhere.result(), 3 * F32)
    for dtype in (np.float32, np.int32):  # one kernel of each signature
        np.testing.assert_array_equal(mine(np.ones(3, dtype)), [2, 2, 2])


def test_a_kernel_that_does_not_compile_takes_no_name_and_can_be_mended():
    """As in a notebook, where it is run again after what it reads is defined, or with another text."""
    kernel = reads("late")
    call = wrap(kernel)
    for failing in (call, wrap(kernel, name="mended")):
        with pytest.raises(TypeError, match="cannot compile"):
            failing(F32)
    kernel.__globals__["late"] = 5
    assert call(F32)[0] == 5
    assert wrap(name="mended")(F32)[0] == 2


def test_a_named_kernel_that_is_defined_again_is_the_same_if_it_is_unchanged():
    """As by importlib.reload."""
    namespace = {"math": math, "constant": 1}
    for _ in range(2):
        exec("def kernel(x, out): out[0] = math.floor(x[0]) + constant", namespace)
        assert wrap(namespace["kernel"], name="defined again")(F32)[0] == 2
    exec("constant = 5\ndef kernel(x, out): out[0] = math.floor(x[0]) + constant", namespace)
    with pytest.raises(ValueError, match=r"defined again.*another kernel of this process, .* has this name"):
        wrap(namespace["kernel"], name="defined again")(F32)
    assert wrap(namespace["kernel"])(F32)[0] == 6


# ======================================================================================================
# Numba CUDA
# ======================================================================================================

simulated = pytest.mark.needs("simulator")
compiled = pytest.mark.needs("compiler")
on_gpu = pytest.mark.needs("gpu")
on_device = pytest.mark.needs("cuda")  # on a GPU or, in the same way, in the simulator


def sample(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(np.float32)


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


def cuda_op(kernel, outs=like_first, **options):
    """`kernel` with a thread for each element of its first input."""
    options = {"launch_dims": lambda x, *_: x.size, "threads_per_block": 8, **options}
    return xk.numba_cuda_kernel(cuda.jit(kernel), outs, **options)


# -- the packages that compile CUDA kernels ------------------------------------------------------------


CUDA_MODULES = {"numba_cuda_mlir.cuda": "numba-cuda-mlir", "numba.cuda": "numba-cuda"}  # which takes Numba's own place


@pytest.fixture(params=[
    pytest.param(module, marks=pytest.mark.needs("fake driver", package)) for module, package in CUDA_MODULES.items()
])  # fmt: skip
def package_cuda(request, gpus):
    """The module `cuda` of the successor of numba-cuda, and of numba-cuda, in a process that has the fake driver."""
    return importlib.import_module(request.param)


def is_successor(package_cuda):
    return package_cuda.__name__ == "numba_cuda_mlir.cuda"


def written_for(package_cuda, function, **names):
    """The same kernel with the `cuda` of a package."""
    float32 = np.float32 if is_successor(package_cuda) else numba.float32
    names = {"cuda": package_cuda, "cuda_float32": float32, **names}
    return types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)


KERNEL_NUMBERS = itertools.count(1)


def own_kernel(package_cuda, parameters, body="cuda.grid(1)", *, names={}, **options):
    """A kernel that no other test has compiled."""
    function = runs(f"{body}\n    number = {next(KERNEL_NUMBERS)}", parameters, cuda=package_cuda, **names)
    return package_cuda.jit(**options)(function)


# -- without a GPU: what XLA is told -------------------------------------------------------------------


def lower_for_cuda(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def run_for_cuda(function, *args):
    """Lower for CUDA, and run that program on the CPU."""
    return jax.block_until_ready(program_for_cuda(function, *args)(*args))


def program_for_cuda(function, *args):
    """For JAX an exported program, so that it may be lowered for another platform than it runs on."""
    names = re.findall(r"custom_call @\"?([\w.]+)", lower_for_cuda(function, *args))
    checks = [export.DisabledSafetyCheck.platform(), *map(export.DisabledSafetyCheck.custom_call, names)]
    return export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*args).call


@compiled
def test_cuda_nothing_to_run_is_no_call():
    """XLA may not capture an empty launch in a CUDA graph."""
    options = {"launch_dims": lambda x: x.size - 3, "input_output_aliases": {0: 1}, "zero_outputs": False}
    op = xk.numba_cuda_kernel(cuda.jit(lambda x, y, z: None), lambda x: (x, x), **options)
    assert "custom_call" in lower_for_cuda(jax.vmap(op), spec(1, 4))
    assert "custom_call" not in lower_for_cuda(jax.vmap(op), spec(0, 4))
    assert "custom_call" not in lower_for_cuda(op, spec(3))
    zeros, kept = run_for_cuda(op, jnp.arange(3.0))
    np.testing.assert_array_equal(zeros, [0, 0, 0])
    np.testing.assert_array_equal(kept, [0, 1, 2])


BLOCK = {"grid": 1, "block": 1}


@pytest.mark.needs("no gpu", "compiler")
def test_cuda_without_gpu_or_simulator():
    kernel = cuda_op(cuda_copy)
    for call in (kernel, kernel, jax.jit(kernel)):
        with pytest.raises(NotImplementedError, match=r"'cuda_copy' .*NUMBA_ENABLE_CUDASIM=1.*numba_kernel"):
            call(F32)


# -- without a GPU: what the driver is asked to do -----------------------------------------------------
# In one process with a `libcuda.so.1` that has two GPUs, keeps a log, and runs no kernel.  Programs are lowered for
# CUDA and run on the CPU, whose memory the fake GPUs share; handlers are told their stream and device as on a GPU.

FAKE_DRIVER = r"""
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef int R; typedef void *P; typedef uint64_t D; typedef unsigned U;

// what tests set and read
int device, n_params;
static char failing[64];  // the function that fails when it is called next
void fail(const char *function) { strcpy(failing, function); }
static char log_[1 << 16]; static int used;  // lines of JSON
#define LOG(...) (used += snprintf(log_ + used, sizeof log_ - used, __VA_ARGS__))
const char *take_log(void) { log_[used] = 0; used = 0; return log_; }

static R outcome(const char *function) {
  if (strcmp(failing, function)) { return 0; }
  *failing = 0;
  return 2;
}

// the driver: context 0x1000 + 16 n is device n's; a function of a module has the context in its upper half
static uintptr_t next_ = 0x20000;
static __thread uintptr_t stack[64]; static __thread int top;
#define GIVES(name, type, value) R name(type *given) { *given = (type)(value); return 0; }
GIVES(cuDriverGetVersion, int, 13000)
GIVES(cuDeviceGetCount, int, 2)
GIVES(cuOccupancyMaxActiveBlocksPerMultiprocessor, int, 4)
GIVES(cuCtxGetCurrent, P, top ? stack[top - 1] : 0)
GIVES(cuCtxGetDevice, int, top ? (stack[top - 1] - 0x1000) / 16 : device)  // XLA has its own current
GIVES(cuLibraryLoadData, P, next_ += 16)
R cuInit(void) { return 0; }
R cuStreamGetCtx(P s, P *c) { return cuCtxGetCurrent(c); }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : a == 97 ? 232448 : 1024; return 0; }
R cuDevicePrimaryCtxRetain(P *c, int d) { *c = (P)(uintptr_t)(0x1000 + 16 * d); return 0; }
R cuCtxPushCurrent_v2(P c) { stack[top++] = (uintptr_t)c; return 0; }
R cuCtxPopCurrent_v2(P *c) { if (!top) return 201; *c = (P)stack[--top]; return 0; }
R cuCtxSetCurrent(P c) { stack[top ? top - 1 : top++] = (uintptr_t)c; return 0; }
R cuModuleLoadData(P *m, const char *image) {
  *m = (P)(next_ += 16);
  return memcmp(image, "\177ELF", 4) ? 200 : outcome(__func__);
}
R cuModuleGetFunction(P *f, uintptr_t m, P name) { *f = (P)(m | stack[top - 1] << 32); return 0; }
R cuLibraryGetKernel(P *k, P l, P name) { *k = l; return 0; }
R cuLibraryGetGlobal(D *p, size_t *n, P l, P s) { *p = 0x1234; *n = 4; return 0; }
R cuModuleGetGlobal_v2(D *p, size_t *n, P m, P s) { *p = 0x1234; *n = 4; return 0; }
static int dynamic_limit;  // of shared memory; 128 bytes are static, and blocks have up to 128 threads
R cuFuncGetAttribute(int *v, int a, P f) { *v = a == 8 ? dynamic_limit : 128; return 0; }
R cuFuncSetAttribute(P f, int a, int v) {
  if (a == 8) { dynamic_limit = v; }
  return 0;
}
R cuGetErrorName(int e, const char **s) { *s = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "another"; return 0; }
R cuGetErrorString(int e, const char **s) { *s = e == 2 ? "out of memory" : "another"; return 0; }
R cuMemcpyDtoDAsync_v2(P to, P from, size_t n, P stream) { memmove(to, from, n); return 0; }
R cuMemsetD8Async(P to, unsigned char value, size_t n, P stream) {
  if (to == (P)0x1234) { return 0; }  // Numba's own, for the error code of a debug kernel
  LOG("[\"set %zu bytes\", %d]\n", n, value);
  memset(to, value, n);
  return outcome(__func__);
}
R cuLaunchKernel(P f, U gx, U gy, U gz, U bx, U by, U bz, U shared, P stream, D **params, P extra) {
  uintptr_t loaded_in = (uintptr_t)f >> 32, context = loaded_in ? loaded_in : top ? stack[top - 1] : 0;
  LOG("[\"%s %d: %u,%u,%u x %u,%u,%u +%u%s\", [", loaded_in ? "native" : "numba", (int)(context - 0x1000) / 16,
      gx, gy, gz, bx, by, bz, shared, stream == (P)0x5eed ? "" : " on another stream");
  for (int i = 0; i < n_params; i++) { LOG("%s%llu", i ? ", " : "", (unsigned long long)*params[i]); }
  LOG("]]\n");
  return outcome(__func__);
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
  if (!*result) { *result = (P)cuInit; }  // any other succeeds, and gives nothing
  if (status) { *status = 0; }
  return 0;
}
"""


class FakeGpus:
    """Two GPUs that JAX lists; XLA gives handlers for CUDA a stream and a device, and runs them on the CPU."""

    HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    device = 0  # on which calls are

    def __init__(self):
        self.handlers, self.traits_of = {}, {}  # by the name of the target
        self.local_devices, self.register = jax.local_devices, jax.ffi.register_ffi_target

    def patch(self, monkeypatch):
        monkeypatch.setattr(jax, "local_devices", self.with_gpus)
        monkeypatch.setattr(jax.ffi, "register_ffi_target", self.register_for_cpu)

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
            self.traits_of[name] = extension.metadata.contents.traits
            return error
        api = xk.XLA_FFI_Api.from_buffer_copy(frame.api.contents)
        give_stream, give_ordinal = self.HANDLER(self.give_stream), self.HANDLER(self.give_ordinal)
        api.XLA_FFI_Stream_Get = ctypes.cast(give_stream, ctypes.c_void_p)
        api.XLA_FFI_DeviceOrdinal_Get = ctypes.cast(give_ordinal, ctypes.c_void_p)
        frame.api = ctypes.pointer(api)
        return handler(frame_address)

    def give_stream(self, args):
        xk.XLA_FFI_Stream_Get_Args.from_address(args).stream = 0x5EED

    def give_ordinal(self, args):
        xk.XLA_FFI_DeviceOrdinal_Get_Args.from_address(args).device_ordinal = self.device

    def traits(self, function, *args):
        """What XLA is told about the handlers of a program: 1 is compatible with command buffers."""
        return {self.traits_of[name] for name in re.findall(r"custom_call @([\w.]+)", lower_for_cuda(function, *args))}


class FakeDriver(FakeGpus):
    """Those of a `libcuda.so.1` that keeps a log and runs no kernel."""

    device = property(lambda self: self.get("device"))

    def __init__(self):
        super().__init__()
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.take_log.restype = ctypes.c_char_p

    def set(self, **values):
        for name, value in values.items():
            ctypes.c_int.in_dll(self.driver, name).value = value

    def get(self, name):
        return ctypes.c_int.in_dll(self.driver, name).value

    def log(self):
        """What the driver was asked for since the last time: each time a text, and numbers."""
        return [json.loads(line) for line in self.driver.take_log().splitlines()]

    def launches(self, function, *args):
        """What a call calls: on which device, grid, block, and shared memory."""
        return [launch for launch, _ in self.launches_and_words(function, *args)]

    def launches_and_words(self, function, *args):
        self.log()
        run_for_cuda(function, *args)
        return [(text, numbers) for text, numbers in self.log() if " x " in text]

    def launches_and_addresses(self, package_cuda, arrays_of_launches, function, *args):
        """The same, and the addresses of the arrays that each launch got: like these, and in row-major order."""
        self.set(n_params=sum(len(packed_array(package_cuda, 0, array)) for array in arrays_of_launches[0]))
        launches, addresses = [], []
        calls = self.launches_and_words(function, *args)
        for (launch, words), arrays in zip(calls, arrays_of_launches, strict=True):
            launches.append(launch)
            addresses.append([])
            for array in arrays:
                address = words[0 if is_successor(package_cuda) else 4]
                expected = packed_array(package_cuda, address, array)
                assert words[: len(expected)] == expected
                del words[: len(expected)]
                addresses[-1].append(address)
        return launches, addresses


def packed_array(package_cuda, address, array):
    """The words that PTX of the package reads of an array in row-major order."""
    shape, itemsize = array.shape, array.dtype.itemsize
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if is_successor(package_cuda):  # data, data again, offset, shape, strides in elements
        return [address, address, 0, *shape, *strides]
    # meminfo, parent, size, size of an element, data, shape, strides in bytes
    return [0, 0, math.prod(shape), itemsize, address, *shape, *[itemsize * stride for stride in strides]]


fake_driver = functools.cache(FakeDriver)  # the same one for all tests, as XLA never forgets a handler


@pytest.fixture
def gpus(monkeypatch):
    found = fake_driver()
    found.patch(monkeypatch)
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


PTX_READS = {  # which parameters of an array of rank 3 an expression reads
    "numba": {".size": {2}, ".itemsize": {3}, "[0, 0, 0]": {4}, ".shape[0]": {5}, ".shape[1]": {6}, ".shape[2]": {7},
              ".strides[0]": {8}, ".strides[1]": {9}, ".strides[2]": {10}},
    "numba_cuda_mlir": {"[0, 0, 0]": {1, 2}, ".shape[0]": {3}, ".shape[1]": {4}, ".shape[2]": {5},
                        "[1, 0, 0]": {1, 2, 6}, "[0, 1, 0]": {1, 2, 7}, "[0, 0, 1]": {1, 2, 8}},
}  # fmt: skip


def test_fakecuda_parameters_mean_what_the_handler_packs(gpus, package_cuda):
    read_by = PTX_READS[package_cuda.__name__.partition(".")[0]]
    nbtypes = package_cuda.types if hasattr(package_cuda.types, "Array") else numba.types
    argtypes = (nbtypes.Array(nbtypes.int64, 3, "C"),)
    for expression, numbers in read_by.items():
        kernel = runs(f"x[0, 0, 0] += x{expression}", "x")
        ptx, _ = package_cuda.compile(kernel, argtypes, device=False, abi="numba", cc=(9, 0))
        loads = re.findall(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]", ptx)
        registers = {int(number): register for register, number in loads}
        assert set(registers) == numbers | read_by["[0, 0, 0]"], expression
        if len(numbers) == 3:  # strides count elements, here of 8 bytes
            assert re.search(rf"shl\.b64\s+%\w+, {registers[max(numbers)]}, 3;", ptx)


@pytest.mark.parametrize("options, launch", [
    ({"launch_dims": 256}, "1,1,1 x 256,1,1 +0"),
    ({"launch_dims": 257}, "2,1,1 x 256,1,1 +0"),
    ({"launch_dims": (17, 33)}, "2,3,1 x 16,16,1 +0"),
    ({"launch_dims": (9, 8, 5)}, "2,1,2 x 8,8,4 +0"),
    ({"grid": (2, 3), "block": (4, 5, 6), "shared_mem": 64}, "2,3,1 x 4,5,6 +64"),
], ids=str)  # fmt: skip
def test_fakecuda_launches_natively_on_each_device_that_jax_lists(gpus, package_cuda, options, launch):
    """After zeros in all slices at once, on the stream of the call."""
    options = {"vmap_method": "sequential", "zero_outputs": True, **options}
    op = jax.vmap(xk.numba_cuda_kernel(own_kernel(package_cuda, "x, out"), like_first, **options))
    batch = jnp.ones((2, 3))
    for device in 0, 1:
        gpus.set(device=device)
        np.testing.assert_array_equal(run_for_cuda(op, batch), np.zeros((2, 3)))
        assert gpus.log() == [["set 24 bytes", 0], *[[f"native {device}: {launch}", []]] * 2]
    assert gpus.traits(op, batch) == {1}
    for device in 2, 3, 10**9:  # the last one far beyond the table of functions
        gpus.set(device=device)
        with pytest.raises(RUNTIME_ERRORS, match="kernel 'kernel' is not loaded on this GPU, which JAX did not list"):
            run_for_cuda(op, batch)
        assert gpus.log() == [["set 24 bytes", 0]]


IN_Z = {"grid": (7, 2)}
NESTED_BATCHES = {  # options, sizes of x and y, the grids, and where x, y and out start in each launch, in floats
    "in z": (IN_Z, (3, 2), ["7,2,3"] * 2, [[0, 0, 0], [0, 5, 15]]),
    "in z, more than a grid has blocks": (IN_Z, (65_538, 1), ["7,2,65535", "7,2,3"],
                                          [[0, 0, 0], [5 * 65_535, 0, 5 * 65_535]]),
    "in order": ({"grid": (7, 1, 2)}, (3, 2), ["7,1,2"] * 6,
                 [[0, 0, 0], [5, 0, 5], [10, 0, 10], [0, 5, 15], [5, 5, 20], [10, 5, 25]]),
}  # fmt: skip


@pytest.mark.parametrize("kind", NESTED_BATCHES)
def test_fakecuda_nested_batches(gpus, package_cuda, kind):
    """If slices are the blocks' z, arrays have them as first dimension, of size 1 where they are not batched."""
    options, sizes, grids, starts = NESTED_BATCHES[kind]
    op = own_op(package_cuda, "x, y, out", block=32, **options)
    (x, x_data), (y, y_data) = [aligned((size, 5)) for size in sizes]
    nested = jax.vmap(jax.vmap(op, in_axes=(0, None)), in_axes=(None, 0))
    slices = [int(grid.split(",")[2]) for grid in grids]
    shapes = [[(n, 5), (1, 5), (n, 5)] if options is IN_Z else [(5,)] * 3 for n in slices]
    arrays_of_launches = [[spec(*shape) for shape in launch] for launch in shapes]
    launches, addresses = gpus.launches_and_addresses(package_cuda, arrays_of_launches, nested, x, y)
    assert launches == [f"native 0: {grid} x 32,1,1 +0" for grid in grids]
    _, _, out_data = addresses[0]
    assert (np.array(addresses) - [x_data, y_data, out_data]).tolist() == (4 * np.array(starts)).tolist()


def test_fakecuda_a_device_function_is_no_kernel(package_cuda):
    with pytest.raises(TypeError, match=r"takes a function decorated with @cuda\.jit"):
        xk.numba_cuda_kernel(package_cuda.jit(device=True)(runs("out[0] = x[0]")), like_first, **BLOCK)


@pytest.mark.parametrize("function, text, n_launches", [
    ("cuModuleLoadData", "cuModuleLoadData failed with CUDA_ERROR_OUT_OF_MEMORY", 0),
    ("cuMemsetD8Async", "cuMemsetD8Async failed where an output of kernel 'kernel' gets its first values", 0),
    ("cuLaunchKernel", "RuntimeError: CUDA_ERROR_OUT_OF_MEMORY, from a launch with grid=(1, 2, 1), "
     "block=(64, 4, 1), shared_mem=300000; on this GPU the kernel has at most 128 threads in a block, by its registers "
     "and launch_bounds: 256 are too many; on this GPU the kernel has at most 232320 bytes of dynamic shared memory: "
     "300000 are too many (raised in kernel 'kernel')", 1),
])  # fmt: skip
def test_fakecuda_a_failure_ends_the_call_and_no_other(gpus, package_cuda, function, text, n_launches):
    op = own_op(
        package_cuda, grid=(1, 2), block=(64, 4), shared_mem=300_000, vmap_method="sequential", zero_outputs=True
    )
    batch = jnp.ones((4, 2))
    gpus.driver.fail(function.encode())
    with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):  # at the lowering, or when it runs
        run_for_cuda(jax.vmap(op), batch)
    launch = "native 0: 1,2,1 x 64,4,1 +300000"
    assert gpus.log().count([launch, []]) == n_launches
    assert gpus.launches(jax.vmap(op), batch) == [launch] * 4


@pytest.mark.filterwarnings("ignore:Could not find source for function")  # that debug kernels would name
@pytest.mark.parametrize("body, options, feature", [
    ("cuda.grid(1)", {"debug": True, "opt": False}, "debug=True"),
    ("cuda.cg.this_grid().sync()", {}, "a cooperative launch"),
])  # fmt: skip
def test_fakecuda_kernels_that_only_numba_can_launch_are_refused(
    gpus, monkeypatch, package_cuda, body, options, feature
):
    """At the trace.  Their names are free again, and a callable launches them."""

    def launch(x, out, stream):
        kernel[1, 8, stream](x, out)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for _ in range(2):
        kernel = own_kernel(package_cuda, "x, out", body, **options)
        op = xk.numba_cuda_kernel(kernel, like_first, **BLOCK, name=feature)
        with pytest.raises(TypeError, match=f"'kernel' has {feature}: .*numba_cuda_callable"):
            jax.eval_shape(op, F32)
    gpus.set(device=1)
    assert gpus.launches(xk.numba_cuda_callable(launch, like_first), F32) == ["numba 1: 1,1,1 x 8,1,1 +0"]


@pytest.mark.parametrize("body, refused", [
    ("x[0] = out[0]", "its inputs are read-only"), ("return 1.0", "it returns a value"), ("out[0] = x.nope", "nope"),
    ("out[0] = jnp.sin(x[0])", CALLS_NO_JAX), ("out.at[0].set(1.0)", "write out[i] = 1.0"),
    ("out[0] = a[0]", NUMBERS_ALONE),
])  # fmt: skip
def test_fakecuda_what_numba_refuses_is_refused_in_words_of_jax(gpus, package_cuda, body, refused):
    kernel = own_kernel(package_cuda, "x, out", body, names={"jnp": jnp, "a": {0: 2.0}})
    with pytest.raises(TypeError, match=rf"(?s)kernel 'kernel' for \(float32\[:\]\).*{re.escape(refused)}"):
        run_for_cuda(xk.numba_cuda_kernel(kernel, like_first, **BLOCK), F32)


class DeviceArray:
    """What Numba takes for an array on the device."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (8,), "typestr": "<f4", "data": (0x7000, False), "version": 3}


def test_fakecuda_a_global_array_lives_as_long_as_the_program(gpus, package_cuda):
    """Another array has its name before the program runs."""
    kernel = own_kernel(package_cuda, "x, out", "table[0]", names={"table": DeviceArray()})
    array = weakref.ref(kernel.py_func.__globals__["table"])
    run = program_for_cuda(jax.vmap(xk.numba_cuda_kernel(kernel, like_first, **BLOCK)), jnp.ones(4))
    kernel.py_func.__globals__["table"] = None
    gc.collect()
    assert array() is not None
    run(jnp.ones(4))


# The library reads the source of these kernels, also of those that are in Numba's cache.


def cuda_count(x, out):
    cuda.atomic.add(x, 0, 1.0)
    out[0] = x[0]


def cuda_count_in_def(x, out):
    def count():
        cuda.atomic.add(x, 0, 1.0)

    count()
    out[0] = x[0]


def cuda_by_helper(x, out):
    helper(x, out)


def cuda_store_by_another_name(x, out):
    store(x, 0, 1.0)  # noqa: F821
    out[0] = x[0]


def cuda_wait_for_all(x, out):
    cuda.cg.this_grid().sync()
    out[0] = x[0]


def cuda_add_to_output(x, out):
    out[cuda.grid(1)] += x[0]


def cuda_count_in_output(x, out):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(out, 0, x[i])


def cuda_nothing(x, out):
    cuda.grid(1)


def cuda_store_and_add(x, out):
    out[0] = x[0]
    out[0] += x[0]


def cuda_store_by_a_view(x, out):
    tail = out[1:]
    tail[cuda.grid(1)] = x[0]


def cuda_read_by_helper(x, out):
    i = cuda.grid(1)
    cuda.syncthreads()
    if i < out.shape[0]:
        out[i] = cuda.fma(x[i], x[i], helper(x, cuda.blockIdx.x + cuda.shfl_sync(-1, i, 0)))


def cuda_square(x, i):
    tile = cuda.shared.array(8, cuda_float32)
    tile[i] = x[i]
    return math.sqrt(tile[i])


@pytest.fixture
def cached_in(package_cuda, tmp_path, monkeypatch):
    """Makes a kernel of another process, whose code is in Numba's cache from the second time on."""
    config = "numba_cuda_mlir.numba_cuda.core.config" if is_successor(package_cuda) else "numba.core.config"
    monkeypatch.setattr(sys.modules[config], "CACHE_DIR", str(tmp_path))

    def make(kernel, helper=None, **names):
        if helper:
            names["helper"] = package_cuda.jit(device=True)(written_for(package_cuda, helper))
        return package_cuda.jit(cache=True)(written_for(package_cuda, kernel, **names))

    yield make
    assert list(tmp_path.rglob("*.nbc"))


READ_ONLY, UPDATED = "its inputs are read-only|in_out_argnames", "(?s)'out'.*zero_outputs=True"


@pytest.mark.parametrize("kernel, helper, refused", [
    (cuda_count, None, READ_ONLY), (cuda_count_in_def, None, READ_ONLY), (cuda_by_helper, cuda_count, READ_ONLY),
    (cuda_store_by_another_name, None, READ_ONLY), (cuda_wait_for_all, None, "a cooperative launch"),
    (cuda_add_to_output, None, UPDATED), (cuda_count_in_output, None, UPDATED),
    (cuda_by_helper, cuda_add_to_output, UPDATED), (cuda_nothing, None, UPDATED),
    (cuda_store_and_add, None, None), (cuda_by_helper, cuda_store_and_add, None), (cuda_store_by_a_view, None, None),
    (cuda_read_by_helper, cuda_square, None),
])  # fmt: skip
def test_fakecuda_kernels_are_read_also_if_they_are_in_numbas_cache(
    gpus, package_cuda, cached_in, kernel, helper, refused
):
    for _ in range(2):
        cached = cached_in(kernel, helper, store=package_cuda.stwt)
        if refused:
            with pytest.raises(TypeError, match=refused):
                run_for_cuda(xk.numba_cuda_kernel(cached, like_first, **BLOCK), F32)
        if refused in (UPDATED, None):
            op = xk.numba_cuda_kernel(cached, like_first, zero_outputs=refused and True, **BLOCK)
            assert len(gpus.launches(op, F32)) == 1


def test_fakecuda_a_kernel_in_numbas_cache_is_not_compiled_again(gpus, cached_in, monkeypatch):
    compilations = []
    for _ in range(2):
        kernel = cached_in(cuda_read_by_helper, cuda_square)
        compile_kernel = type(kernel).compile

        def count(dispatcher, *args):
            compilations.append(args)
            return compile_kernel(dispatcher, *args)

        with monkeypatch.context() as context:
            context.setattr(type(kernel), "compile", count)
            gpus.launches(xk.numba_cuda_kernel(kernel, like_first, **BLOCK), F32)
    assert len(compilations) == 2


def test_fakecuda_a_kernel_that_is_made_again_is_compiled_once(gpus, package_cuda):
    def make(factor, cuda=package_cuda):
        def kernel(x, out):
            out[cuda.grid(1)] = factor * x[0]

        return xk.numba_cuda_kernel(cuda.jit(kernel), like_first, **BLOCK)

    before = len(gpus.handlers)
    for factor in 2.0, 3.0, 2.0, 3.0:
        assert len(gpus.launches(make(factor), F32)) == 1
    assert len(gpus.handlers) == before + 2


# -- the simulator, and the same on a GPU --------------------------------------------------------------


@on_device
@pytest.mark.parametrize("scalars", [("n", "a"), True], ids=["scalars", "all scalars"])
@pytest.mark.parametrize("vmap_method", [None, "sequential"])
def test_on_cuda_kernel_that_does_not_take_buffers(scalars, vmap_method):
    options = {"in_out_argnames": ["y"], "scalars": scalars, "grid": 1, "block": 8, "vmap_method": vmap_method}
    op = xk.numba_cuda_kernel(cuda.jit(cuda_axpy), spec(8), **options)
    x = jnp.arange(8.0)
    for n in 5, 3:
        call = functools.partial(op, n=n, a=2.0, x=x)
        expected = np.where(x < n, 5 * x, 3 * x)
        np.testing.assert_array_equal(call(y=3 * x), expected)
        slices = jax.vmap(lambda y: call(y=y))(jnp.stack([3 * x, 3 * x]))
        np.testing.assert_array_equal(slices, [expected, expected])


@on_device
def test_on_cuda_dynamic_shared_memory():
    @xk.numba_cuda_kernel(outs=like_first, grid=3, block=8, shared_mem=4 * 16_008)  # above the usual 48 KiB
    @cuda.jit
    def reverse_blocks(x, out):
        tile = cuda.shared.array(0, cuda_float32)
        i, t = cuda.grid(1), cuda.threadIdx.x
        tile[16_000 + t] = x[i]
        cuda.syncthreads()
        out[i] = tile[16_000 + cuda.blockDim.x - 1 - t]

    x = jnp.arange(24, dtype=jnp.float32)
    np.testing.assert_array_equal(reverse_blocks(x), x.reshape(3, 8)[:, ::-1].ravel())


@on_device
@pytest.mark.parametrize("vmap_method", [None, "sequential"])
def test_on_cuda_operands_without_dimensions_and_without_batch(vmap_method, monkeypatch):
    monkeypatch.setattr(xk, "_FALLS_BACK_ON", Exception)  # numba_cuda_mlir cannot compile them as one launch

    @partial(cuda_op, vmap_method=vmap_method)
    def scale(x, factor, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = factor[()] * x[i]

    x, factors = jnp.arange(5.0), jnp.array([2.0, 3.0])
    np.testing.assert_array_equal(scale(x, factors[0]), [0, 2, 4, 6, 8])
    np.testing.assert_array_equal(jax.vmap(scale, (None, 0))(x, factors), [[0, 2, 4, 6, 8], [0, 3, 6, 9, 12]])


@on_device
def test_on_cuda_arrays_without_elements():
    for op in cuda_op(cuda_copy), xk.numba_cuda_kernel(cuda.jit(cuda_copy), like_first, grid=1, block=4):
        assert op(jnp.zeros(0)).shape == (0,)
        assert jax.vmap(op)(jnp.zeros((0, 3))).shape == (0, 3)
        assert jax.vmap(op)(jnp.zeros((3, 0))).shape == (3, 0)
    np.testing.assert_array_equal(cuda_op(cuda_copy, spec(2))(jnp.zeros(0)), [0, 0])


@on_device
def test_on_cuda_an_output_that_is_counted_in_starts_from_zeros():
    count = cuda_op(cuda_count_in_output, spec(2), zero_outputs=True)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(jax.vmap(count)(x), [[6, 0], [22, 0], [38, 0]])


class FiveTimes:
    """A method, with a kernel as its default."""

    def launch(self, x, out, tmp, stream, add=cuda and cuda.jit(cuda_add)):
        own = cuda.device_array(x.shape, x.dtype)
        for a, b, total in (x, x, tmp), (tmp, x, own), (tmp, own, out):
            add[1, 8, stream](a, b, total)


@on_device
def test_on_cuda_callable_launches_several_kernels():
    """By way of a temporary buffer and of an array of its own, eagerly and for every slice."""
    five_times = xk.numba_cuda_callable(FiveTimes().launch, like_first, scratch=like_first)
    x = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    np.testing.assert_array_equal(five_times(x[0, 0]), 5 * x[0, 0])
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(five_times)))(x), 5 * x)


@on_device
def test_on_cuda_errors_of_callables_reach_the_user():
    def refuse_all(x, out, stream):
        raise LookupError(f"no table for {x.shape}", cuda)

    def generate(x, out, stream):  # which does not begin
        yield cuda

    for function, text in (
        (refuse_all, r"LookupError: .*no table for \(1, 3\).* \(raised in kernel 'refuse_all'\)"),
        (generate, "it returns a value: launch kernels that write to the outputs"),
    ):
        with pytest.raises(RUNTIME_ERRORS, match=text):
            jax.block_until_ready(xk.numba_cuda_callable(function, like_first)(jnp.ones((1, 3))))


@on_device
def test_on_cuda_a_callable_runs_once_per_slice():
    """It may name its package in a function."""
    shapes, kernel = [], cuda.jit(cuda_copy)

    def launch(x, out, stream):
        shapes.append(x.shape)
        (lambda: kernel[1, 8, stream](x, out))()

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(jax.vmap(xk.numba_cuda_callable(launch, like_first))(x), x)
    assert shapes == [(4,)] * 3


@on_device
def test_on_cuda_a_ready_kernel_in_an_op_has_a_thread_for_each_element():
    op = xk.XLACustomKernel("add")
    op.def_numba_cuda_kernel(cuda.jit(cuda_add))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(jax.vmap(call_op(op))(x, x), 2 * x)


@simulated
def test_cudasim_input_is_read_only_and_errors_name_the_thread():
    op = xk.numba_cuda_kernel(cuda.jit(runs("x[0] = 1")), like_first, **BLOCK)
    text = "tid=[0, 0, 0] ctaid=[0, 0, 0]: assignment destination is read-only; its inputs are read-only, because JAX"
    with pytest.raises(RUNTIME_ERRORS, match=re.escape(f"ValueError: {text}")):
        jax.block_until_ready(op(F32))
    np.testing.assert_array_equal(cuda_op(cuda_add)(F32, F32), F32 + F32)


# -- with a GPU ----------------------------------------------------------------------------------------


def with_warp(case):
    return pytest.param(case, marks=pytest.mark.needs("warp_gpu"))


def gpu_copy(how):
    """A kernel that copies its input, launched in each way that there is."""
    if how == "native":
        return cuda_op(cuda_copy)
    if how == "warp":
        relu = matrix_kernel("leaky_relu", "warp", np.dtype("float32"), alpha=0.5)  # copies positive numbers
        return xk.warp_kernel(relu, like_first)
    kernel = cuda.jit(cuda_copy)
    return xk.numba_cuda_callable(lambda x, out, stream: kernel[x.size // 256 + 1, 256, stream](x, out), like_first)


@on_gpu
@pytest.mark.parametrize("how", ["native", "callable", with_warp("warp")])
def test_gpu_stream_order_under_load(how):
    """The kernel stands between two XLA operations that take their time, many times over."""

    def square(a, k):  # the factor tells a late result from an early one
        b = a @ a
        return (k + 1) * b / jnp.max(b)

    def chain(kernel, a):
        for k in range(20):
            a = square(kernel(square(a, k).ravel()).reshape(a.shape), k)
        return a

    a = jnp.asarray(np.random.default_rng(3).uniform(size=(512, 512)).astype("float32"))
    expected = jax.jit(functools.partial(chain, like_first))(a)
    run = jax.jit(functools.partial(chain, gpu_copy(how)))
    for _ in range(2):
        np.testing.assert_allclose(run(a), expected, rtol=1e-2)


def integers(*shape):
    """float32 numbers whose sums and products are exact."""
    return np.random.default_rng(sum(shape)).integers(-8, 9, shape).astype(np.float32)


STARTING = {  # kernels for v + d: parameters, what they do for each i, options, and scalars of the call
    "aliased": ("v, d, out", "out[i] += d[i]", {"input_output_aliases": {0: 0}}, {}),
    "in_out": ("v, d", "v[i] += d[i]", {"in_out_argnames": ["v"]}, {}),
    "zeros": ("v, d, out, tmp", "out[i] += v[i]; tmp[i] = d[i]; out[i] += tmp[i]",
              {"zero_outputs": True, "scratch": lambda v, d: v}, {}),
    "scalars": ("v, d, a, out", "out[i] = v[i] * a + d[i]", {"scalars": ["a"]}, {"a": np.float32(1)}),
}  # fmt: skip


def starting_kernel(how):
    """A function that gives v + d, by a kernel whose outputs start from something, or that takes other things."""
    if how in STARTING:
        parameters, statements, options, scalars = STARTING[how]
        kernel = own_kernel(cuda, parameters, f"i = cuda.grid(1)\n    if i < v.size: {statements}")
        op = xk.numba_cuda_kernel(kernel, lambda v, *_: v, launch_dims=lambda v, *_: v.size, **options)
        return functools.partial(op, **scalars)
    if how == "warp differentiable":
        add = xk.warp_kernel(matrix_kernel("add", "warp", np.dtype("float32")), like_first, differentiable=True)
        return jax.grad(lambda v, d: (add(v, d) ** 2).sum() / 2)

    @wp.kernel(module="unique")
    def add_to_v(v: wp.array(dtype=float), d: wp.array(dtype=float)):
        i = wp.tid()
        v[i] = v[i] + d[i]

    return xk.warp_kernel(add_to_v, like_first, in_out_argnames=["v"])


@on_gpu
@pytest.mark.parametrize("options", [
    {"xla_gpu_enable_command_buffer": ""},
    {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1},
], ids=["launched", "command buffers"])  # fmt: skip
@pytest.mark.parametrize("how", [*STARTING, with_warp("warp in_out"), with_warp("warp differentiable")])
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
def test_gpu_a_row_that_a_kernel_reads_and_the_program_replaces():
    """XLA's dynamic-slice fusion lets a kernel write into the array that it reads (jax 0.11.2)."""

    @xk.numba_cuda_kernel(outs=lambda v, w: (v, w), launch_dims=64)
    @cuda.jit
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
def test_gpu_command_buffers(captured, tmp_path):
    """Tests that run on the GPU, with CUDA graphs off, and on for every computation."""
    flags = f"--xla_gpu_enable_command_buffer={captured} --xla_gpu_graph_min_graph_size=1"
    tests = "test_on_cuda or stream_order or (gpu and warp_values) or (warp_gpu-vmap-float32 and (blend or csr_event))"
    outcomes = outcomes_elsewhere(tests, tmp_path, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}")
    assert set(outcomes.values()) == {"passed"} | skips_for("warp_gpu")


@on_gpu
def test_gpu_an_array_in_the_memory_of_the_host():
    x = jnp.arange(4.0)
    (device,) = x.devices()
    x = jax.device_put(x, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
    np.testing.assert_array_equal(cuda_op(cuda_copy)(x), x)


@on_gpu
def test_gpu_every_device():
    op = jax.jit(cuda_op(cuda_add))
    for k, device in enumerate(jax.local_devices(backend="cuda")):
        x = jax.device_put(np.arange(9, dtype=np.float32) + k, device)
        out = op(x, x)
        assert out.devices() == {device}
        np.testing.assert_array_equal(out, 2 * x)


# -- a batch is one launch: with the fake driver for each package, and on a GPU --------------------------

LAUNCHED = []  # an item for each launch of handlers that count


@functools.cache
def counting(address):
    """A C function that counts, and calls cuLaunchKernel at this address."""
    number, pointer = ctypes.c_uint32, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(number, pointer, *[number] * 7, pointer, pointer, pointer)
    launch = kind(address)

    def count(*args):
        LAUNCHED.append(1)
        return launch(*args)

    return kind(count)


def count_launches(monkeypatch):
    """Of handlers that are compiled from now on."""
    find = xk._LibCuda.address

    def address(libcuda, name):
        found = find(libcuda, name)
        return ctypes.cast(counting(found), ctypes.c_void_p).value if name == "cuLaunchKernel" else found

    monkeypatch.setattr(xk._LibCuda, "address", address)


@pytest.fixture(autouse=True)
def no_mistake_looks_like_a_fallback(monkeypatch):
    """In all tests: what is raised while a batch becomes one launch is raised, but for the library's own reasons."""
    monkeypatch.setattr(xk, "_FALLS_BACK_ON", xk._NoSingleLaunch)


@pytest.fixture
def reasons(caplog):
    """Gives why batches that were lowered since it was last asked are a launch for each slice."""
    caplog.set_level("DEBUG", "xla_kernels")

    def take():
        texts = {text.partition("a batch is a launch for each slice: ")[2] for text in caplog.messages}
        caplog.clear()
        return texts - {""}

    return take


def run_on_gpu(function, *args):
    return jax.block_until_ready(jax.jit(function)(*args))


class OnGpu(typing.NamedTuple):
    """A GPU, or a fake one."""

    run: Callable  # (function, *args) -> what a program for CUDA gives
    cuda: types.ModuleType | None = None
    has_numbers: bool = True  # the fake driver runs no kernel

    def check(self, function, inputs, n_launches, expected=None):
        """A batch of the inputs that have as many slices as the first takes so many launches, and is right."""
        in_axes = [0 if x.shape[0] == len(inputs[0]) else None for x in inputs]

        def each_slice(*args):
            def call(slices):
                slices = iter(slices)
                return function(*[x if axis is None else next(slices) for x, axis in zip(args, in_axes)])

            return jax.lax.map(call, [x for x, axis in zip(args, in_axes) if axis == 0])

        LAUNCHED.clear()
        results = self.run(jax.vmap(function, in_axes), *inputs)
        assert len(LAUNCHED) == n_launches
        if self.has_numbers:
            check_close(results, self.run(each_slice, *inputs) if expected is None else expected, 1e-4)

    def check_threads(self, op):
        """They make batches of it at once."""
        LAUNCHED.clear()
        in_threads(lambda n: self.run(jax.vmap(op), *[np.tile(x, (n, 1)) for x in PAIRS]), [1, 2, 3, 4])
        assert len(LAUNCHED) == 4


ON_CUDA = [  # a process has one driver
    *[pytest.param(module, marks=pytest.mark.needs(package)) for module, package in CUDA_MODULES.items()],
] if conftest.FAKE_DRIVER else [pytest.param("gpu", marks=pytest.mark.needs("gpu", "cuda", "compiler"))]  # fmt: skip


@pytest.fixture(params=ON_CUDA)
def cuda_on_gpu(request, monkeypatch):
    count_launches(monkeypatch)
    if request.param == "gpu":
        return OnGpu(run_on_gpu, cuda)
    request.getfixturevalue("gpus")
    return OnGpu(run_for_cuda, importlib.import_module(request.param), has_numbers=False)


PAIRS, SHARED = (sample(3, 7), sample(3, 7, seed=1)), (sample(3, 7), sample(7, seed=1))
IN_ORDER = {"vmap_method": "sequential"}
EACH = "i = cuda.grid(1)\n    if i < 7: "
X_Y_OUT = "x, y, out", f"{EACH}out[i] = x[max(i - 1, 0)] + y[i]"
REVERSE = """i = cuda.grid(1)
    tile = cuda.shared.array(8, "float32")
    tile[cuda.threadIdx.x] = x[min(i, 6)]
    cuda.syncthreads()
    if i < 7: out[i] = tile[7 - cuda.threadIdx.x] + y[i]"""
CUDA_BATCHES = {  # parameters and what a thread does, the inputs, options, and why three slices are three launches
    "stencil": (X_Y_OUT, PAIRS, {}, None),
    "shared operand": (X_Y_OUT, SHARED, {}, None),
    "1,000 slices": (X_Y_OUT, (sample(1000, 7), sample(1000, 7)), {}, None),
    "in-out": (("x, y", f"{EACH}y[i] = 2 * y[i] + x[i]"), PAIRS, {"outs": like_last, "in_out_argnames": ["y"]}, None),
    "scalar": (("x, a, out", f"{EACH}out[i] = x[i] * a"), (PAIRS[0], sample(3)), {"scalars": ["a"]}, None),
    "shared memory": (("x, y, out", REVERSE), PAIRS, {}, None),
    "0-d arrays": (("x, a, out", f"{EACH}out[i] = x[i] * a[()]"), (PAIRS[0], sample(3)), {},
                   {"numba_cuda_mlir.cuda": "TypeError: .*cannot compile"}),
    "in order": (X_Y_OUT, PAIRS, IN_ORDER, "vmap_method says that slices run in order"),
    "asks for z": (("x, y, out", f"{EACH}out[i] = x[i] + cuda.gridDim.z"), PAIRS, {},
                   "blocks along z are the slices, and its PTX has %n?ctaid.z"),
}  # fmt: skip


def batch_op(kernel, **options):
    return xk.numba_cuda_kernel(kernel, **{"outs": like_first, "launch_dims": 7, "threads_per_block": 8, **options})


@pytest.mark.parametrize("kind", CUDA_BATCHES)
def test_fakecuda_or_gpu_a_batch_is_one_launch(cuda_on_gpu, kind, reasons, monkeypatch):
    (parameters, body), inputs, options, reason = CUDA_BATCHES[kind]
    if isinstance(reason, dict):  # an error of one package
        monkeypatch.setattr(xk, "_FALLS_BACK_ON", Exception)
        reason = reason.get(cuda_on_gpu.cuda.__name__)
    kernel = own_kernel(cuda_on_gpu.cuda, parameters, body)
    cuda_on_gpu.check(batch_op(kernel, **options), inputs, 3 if reason else 1)
    found = reasons()
    assert len(found) == bool(reason) and all(re.match(reason, text) for text in found)


def cuda_read_table(x, out):
    out[0] = table[0]  # noqa: F821


def cuda_count_in_table(x, out):
    if cuda.grid(1) == 0:
        table[0] += 1  # noqa: F821
        out[0] = table[0]  # noqa: F821


@pytest.mark.parametrize("kernel, helper, counts", [
    (cuda_read_table, None, [0, 0, 0]), (cuda_count_in_table, None, [1, 2, 3]),
    (cuda_by_helper, cuda_count_in_table, [1, 2, 3]),
])  # fmt: skip
def test_fakecuda_or_gpu_kernel_that_may_write_to_a_global_array(cuda_on_gpu, kernel, helper, counts, reasons):
    """One launch would race in silence."""
    package = cuda_on_gpu.cuda
    names = {"table": package.to_device(np.zeros(8, "f4")) if cuda_on_gpu.has_numbers else DeviceArray()}
    if helper:
        names["helper"] = package.jit(device=True)(written_for(package, helper, **names))
    op = batch_op(package.jit(written_for(package, kernel, **names)), outs=spec(1))
    cuda_on_gpu.check(op, PAIRS[:1], 3 if any(counts) else 1, np.float32(counts)[:, None])
    assert reasons() == ({"it may write to global arrays on the device: table"} if any(counts) else set())


def test_fakecuda_or_gpu_batch_reads_what_the_kernel_read(cuda_on_gpu, reasons):
    """Also where another wrapper had it compiled."""
    kernel = own_kernel(cuda_on_gpu.cuda, "x, out", f"{EACH}out[i] = factor * x[i]", names={"factor": 2.0})
    x, _ = PAIRS
    cuda_on_gpu.run(batch_op(kernel), x[0])
    kernel.py_func.__globals__["factor"] = 3.0
    for more in {}, {"input_output_aliases": {0: 0}}:
        cuda_on_gpu.check(batch_op(kernel, **more), [x], 3, 2 * x)
        assert reasons() == {"it reads other values now than when it was compiled"}


def test_fakecuda_or_gpu_launches_that_share_a_handler(cuda_on_gpu, reasons, monkeypatch):
    """Those with too many threads for the form of batches, or with a z, are launched for each slice."""
    limit = xk._LibCuda.limit
    monkeypatch.setattr(xk._LibCuda, "limit", lambda *args: 7 if args[2] == 0 else limit(*args))
    kernel = own_kernel(cuda_on_gpu.cuda, *X_Y_OUT)
    too_many = "it may then have 7 threads in a block, and block=(8, 1, 1)"
    has_z = "blocks along z are the slices, and it has some of its own: grid=(2, 1, 2)"
    for grid, block, n, reason in (1, 8, 3, too_many), (2, 4, 1, None), ((2, 1, 2), 4, 3, has_z), (1, 8, 3, too_many):
        cuda_on_gpu.check(xk.numba_cuda_kernel(kernel, like_first, grid=grid, block=block), PAIRS, n)
        assert reasons() == {reason} - {None}


def test_fakecuda_or_gpu_threads_make_batches_at_once(cuda_on_gpu, monkeypatch):
    """Of one form, which is compiled once."""
    forms, compile_batch = [], xk._Form.for_batch

    def compile_slowly(*args):
        forms.append(args)
        time.sleep(0.1)
        return compile_batch(*args)

    monkeypatch.setattr(xk._Form, "for_batch", compile_slowly)
    cuda_on_gpu.check_threads(batch_op(own_kernel(cuda_on_gpu.cuda, *X_Y_OUT)))
    assert len(forms) == 1


@pytest.mark.parametrize("ptx, asks", [
    ("mov.u32 %r1, %ctaid.z;", "%ctaid.z"), ("mov.v4.u32 {%r1, %r2, %r3, %r4}, %nctaid;", "%nctaid"),
    ("mov.u64 %rd1, %gridid;", "%gridid"), (".entry kernel() .explicitcluster {", ".explicitcluster"),
    ("mov.u32 %r1, %cluster_ctaid.x;", "%cluster_ctaid"),
    (".extern .func (.param .b32 result) of_the_user (.param .b64 x);", "of_the_user"),
    (".extern .func (.param .b32 result) vprintf (.param .b64 x);", ""),
    ("mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.z; mov.u32 %r3, %tid.z; mov.u32 %r4, %nctaid.y;", ""),
])  # fmt: skip
def test_ptx_that_asks_for_z(ptx, asks):
    found = xk._ASKS_FOR_Z.search(ptx)
    assert asks in found[0] if asks else found is None


def named_op(language):
    """x + y, by a kernel with a name."""
    if language == "warp":
        return xk.warp_kernel(matrix_kernel("add", "warp", np.dtype("float32")), like_first, name="batch in warp")
    return batch_op(cuda.jit(cuda_add), name="batch in cuda")


def run_batch_elsewhere(language, exported, *xs):
    """In another process, which has traced a slice: what an exported program gives, and by how many launches."""
    with conftest.computing_for(["gpu"]), pytest.MonkeyPatch.context() as monkeypatch:
        count_launches(monkeypatch)
        jax.eval_shape(named_op(language), spec(7), spec(7))
        LAUNCHED.clear()
        result = np.asarray(read_exported(exported)(*xs))
        return result, len(LAUNCHED)


@on_gpu
@pytest.mark.parametrize("language", [pytest.param("cuda", marks=compiled), with_warp("warp")])
def test_gpu_batch_of_any_size_is_one_launch_in_another_process(language):
    (n,) = export.symbolic_shape("n")
    function = jax.jit(jax.vmap(named_op(language)))
    jax.eval_shape(named_op(language), spec(7), spec(7))  # registers what `export_checks` names
    program = export.export(function, platforms=["cuda"], disabled_checks=xk.export_checks())(spec(n, 7), spec(n, 7))
    result, n_launches = another_process().submit(run_batch_elsewhere, language, program.serialize(), *PAIRS).result()
    np.testing.assert_allclose(result, PAIRS[0] + PAIRS[1], 1e-6)
    assert n_launches == 1


# ======================================================================================================
# Warp
# ======================================================================================================

needs_warp = pytest.mark.needs("warp")
floats = wp and wp.array(dtype=float)
rows_of_floats = wp and wp.array2d(dtype=float)


# -- kernels made of text, and the functions that they call ----------------------------------------------

FUNCTIONS = """
import warp as wp
from typing import Any
floats = wp.array(dtype=float)
ints = wp.array(dtype=int)
vectors = wp.array(dtype=wp.vec2)
matrices = wp.array(dtype=wp.mat22)
rows = wp.array2d(dtype=float)
halves = wp.array3d(dtype=wp.float16)
octets = wp.array(dtype=wp.uint8)
bools = wp.array(dtype=wp.bool)
cubes = wp.array4d(dtype=float)
FACTOR = wp.constant(2.5)
@wp.struct
class Params:
    a: float
    n: int
@wp.func
def add(a: floats, i: int, value: float):
    a[i] += value
@wp.func
def add_by_name(a: floats, i: int):
    add(i=i, a=a, value=1.0)
@wp.func
def tail(a: floats):
    return a[1:]
@wp.func
def second_and_tail(a: floats):
    return a[1], a[1:]
@wp.struct
class Holder:
    a: floats
@wp.func
def add_to_held(h: Holder, i: int):
    h.a[i] += 1.0
try:
    @wp.func
    def set_ref(r: wp.ref[float]):
        r = 1.0
except AttributeError:  # before Warp 1.19
    set_ref = None
@wp.struct
class Inner:
    axis: wp.vec3
@wp.struct
class Settings:
    gain: float
    inner: Inner
    turn: wp.mat22
@wp.func
def total(x: rows, i: int):
    s = float(0.0)
    for j in range(x.shape[1]):
        s += x[i, j]
    return s
@wp.func
def row_product(x: rows, i: int):
    s = float(1.0)
    for j in range(x.shape[1]):
        s = s * x[i, j]
    return s
@wp.func
def double(a: floats, count: ints, i: int):
    return 2.0 * a[i]
@wp.func_grad(double)
def write_and_count(a: floats, count: ints, i: int, adj_ret: float):
    wp.adjoint[a][i] += 2.0 * adj_ret
    a[i] = 9.0
    wp.atomic_add(count, 0, 1)
@wp.func
def double_again(a: floats, count: ints, i: int):
    return 2.0 * a[i]
@wp.func_replay(double_again)
def count_replays(a: floats, count: ints, i: int):
    wp.atomic_add(count, 0, 1)
    return 2.0 * a[i]
@wp.func
def double_again_by_call(a: floats, count: ints, i: int):
    return double_again(a, count, i)
@wp.func_native("return x + 1.0f;")
def native(x: float) -> float: ...
@wp.func_native('''
    static int inside;
    int count = __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < patience && count < 2; i++)
        count = __atomic_load_n(&inside, __ATOMIC_SEQ_CST);
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    return count;
''')
def meet(patience: float) -> float: ...  # how many threads are inside of it; the first waits a while for a second
"""


def kernels_from(sources, options="module='unique'"):
    """{name: kernel}: of {name: (parameters, body)}, with these functions, and i the index."""
    text = FUNCTIONS
    for name, (parameters, body) in sources.items():
        start = "" if re.match(r".*= wp\.tid\(\)|i = ", body) else "i = wp.tid()\n"
        text += f"@wp.kernel({options})\ndef {name}({parameters}):\n{textwrap.indent(start + body, '    ')}\n"
    file = f"<kernels {next(KERNEL_NUMBERS)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # Warp reads it there
    found = {"__name__": "kernels"}
    exec(compile(text, file, "exec"), found)
    return {name: found[name] for name in sources}


def kernel_with_body(body, x="floats"):
    return kernels_from({"kernel": (f"x: {x}, y: floats, out: floats", body)})["kernel"]


def kernels_of_programs(programs, module, options=""):
    """{(parameters, body): kernel}, in one module, as Warp builds each for some 0.4 s."""
    sources = {f"kernel_{number}": program for number, program in enumerate(programs)}
    return dict(zip(programs, kernels_from(sources, f"module=wp.get_module({module!r}){options}").values()))


WARP_KERNELS = {  # parameters, and what a thread does
    "multiply": ("x: floats, y: floats, out: floats", "out[i] = x[i] * y[i]"),
    "matvec": ("m: matrices, v: vectors, out: vectors", "out[i] = m[i] * v[i]"),
    "squares_of_rows": ("x: rows, out: floats", "out[i] = x[i, 0] * x[i, 0]"),
    "histogram": ("index: ints, weight: float, acc: floats", "wp.atomic_add(acc, index[i], weight)"),
    "every": (
        "x: wp.array(dtype=wp.vec3), i: wp.int8, v: wp.vec3h, m: wp.mat33, s: Settings, n: wp.uint64, w: rows, o: rows",
        "r, c = wp.tid()\nvalues = float(i) + float(v[1]) + m[2, 1] + s.gain + s.inner.axis[2] + s.turn[1, 0]\n"
        "o[r, c] = x[r][0] * w[r, c] + values + float(n)",
    ),
    "takes_doubles": ("x: wp.array(dtype=wp.float64), out: floats", "out[i] = float(x[i])"),
    "takes_arrays_in_structs": ("h: Holder, out: floats", "out[i] = h.a[i]"),
    "takes_arrays_of_structs": ("h: wp.array(dtype=Params), out: floats", "out[i] = h[i].a"),
    "takes_indices": ("t: wp.indexedarray(dtype=float), out: floats", "out[i] = t[i]"),
    "takes_many_kinds": (
        "x: floats, factor: floats, kind: int, on: bool, h: wp.handle, out: floats",
        "out[i] = x[i] + float(kind) + float(h)\nif on and factor:\n    out[i] *= factor[0]",
    ),
    "takes_nothing": ("", "pass"),
    "takes_anything": ("x: wp.array(dtype=Any), out: wp.array(dtype=Any)", "out[i] = x[i]"),
    "add_up": ("x: floats, out: floats", "wp.atomic_add(out, 0, x[i])"),
    "store_and_add": (
        "x: floats, y: floats, out: floats",
        "out[i] = x[i]\nif x[i] > 2.0:\n    out[i] = y[i]\nadd(out, i, x[i] * x[i])",
    ),
    "doubles": ("count: ints, y: floats, out: floats", "out[i] = y[i] * double(y, count, i)"),
    "doubles_again": ("count: ints, y: floats, out: floats", "out[i] = y[i] * double_again_by_call(y, count, i)"),
    "meets": ("x: floats, out: floats", "out[0] = meet(x[0])"),
    "meets_on_tiles": ("x: floats, out: floats", "wp.tile_store(out, wp.tile_load(x, shape=1))\nout[0] = meet(x[0])"),
}
TILES = "i, t = wp.tid()\nwp.tile_store(out, 2.0 * wp.tile_load(x, shape=64, offset=i * 64), offset=i * 64)"


@functools.cache
def warp_kernels():
    wp.init()  # vectors of halves need it
    return types.SimpleNamespace(**kernels_from(WARP_KERNELS, "module=wp.get_module('kernels')"))


PAIR = sample(5), sample(5, seed=1)


def product(**options):
    return xk.warp_kernel(warp_kernels().multiply, like_first, **options)


@functools.cache
def values_of_every_kind():
    """For the parameters of `every` that are no arrays, by name."""
    settings = warp_kernels().every.func.__annotations__["s"]()
    settings.gain = 1.5
    settings.inner.axis = wp.vec3(1.0, 2.0, 3.0)
    return {"i": -3, "v": wp.vec3h(4.0, 5.0, 6.0), "m": wp.mat33(*range(9)), "s": settings, "n": 8}


EVERY = sample(2, 3), sample(2, 3, seed=1)


def call_every(x, w, name=None, **others):
    """A call with those values, or others."""
    f = xk.warp_kernel(warp_kernels().every, like_last, launch_dims=(2, 3), block_dim=4, differentiable=True, name=name)
    return f(x, *(values_of_every_kind() | others).values(), w)


def every_in_jax(x, w):
    """The same for those values."""
    return x[:, :1] * w + (-3 + 5 + 7 + 1.5 + 3 + 8)


@pytest.fixture(params=[
    pytest.param("cpu", marks=needs_warp), pytest.param("gpu", marks=pytest.mark.needs("warp_gpu")),
])  # fmt: skip
def warp_path(request):
    """On the CPU, and on a GPU."""
    return request.param


# -- values --------------------------------------------------------------------------------------------


def test_warp_values(warp_path):
    """Python's, NumPy's, JAX's and Warp's; they are data of one target."""
    typed = {"i": wp.int8(-3), "n": np.uint64(8)}
    plain = {"v": np.array([4, 5, 6], np.float16), "m": jnp.arange(9).reshape(3, 3), "n": jnp.uint8(8)}
    for values in (typed, plain):
        call = partial(call_every, **values)
        check_close(gradient(call, EVERY)(*EVERY), gradient(every_in_jax, EVERY)(*EVERY), 1e-4)
    others = partial(call_every, i=3, m=[[1, 2, 3]] * 3, n=9)
    check_close(others(*EVERY), every_in_jax(*EVERY) + 6 + 1 - 5)
    assert target_of(others, *EVERY) == target_of(call_every, *EVERY)


@needs_warp
def test_warp_values_are_exported():
    call = partial(call_every, name="of_every_kind")
    check_close(loaded_elsewhere(call, *EVERY), every_in_jax(*EVERY), 1e-5)


@needs_warp
def test_warp_struct_that_changes_is_another_value():
    """And one that equals what it was is that value, also in another object: then nothing is traced."""
    traced = []
    f = xk.warp_kernel(warp_kernels().every, lambda *args: traced.append(args) or args[-1], launch_dims=(2, 3))
    values = values_of_every_kind()
    settings = deepcopy(values["s"])
    for gain, n_traced in ((1.5, 1), (4.0, 2), (1.5, 2)):
        settings.gain = gain
        result = f(EVERY[0], *deepcopy(values | {"s": settings}).values(), EVERY[1])
        check_close(result, every_in_jax(*EVERY) + gain - 1.5)
        assert len(traced) == n_traced


def test_warp_outputs_of_empty_launches_are_what_they_start_from_or_zeros(warp_path):
    options = {"launch_dims": 0, "in_out_argnames": ["out"]}
    x, starts = jnp.arange(4.0), jnp.ones((2, 3))
    check_close(jax.vmap(xk.warp_kernel(warp_kernels().add_up, like_last, **options), (None, 0))(x, starts), starts)
    assert not product(launch_dims=0)(*PAIR).any()
    assert product()(x[:0], x[:0]).shape == (0,)


# -- derivatives ---------------------------------------------------------------------------------------


def test_warp_adjoints_change_no_outputs(warp_path):
    """Warp runs the functions that a kernel calls again in the adjoint, which also changes its cotangent."""
    options = {"differentiable": True, "zero_outputs": False}  # as the kernel stores in `out` before it adds to it
    f = xk.warp_kernel(warp_kernels().store_and_add, like_first, **options)
    out, pullback = jax.vjp(f, jnp.arange(1.0, 5.0), jnp.ones(4))
    ct = jnp.arange(4.0)
    check_close(pullback(ct), ([0, 5, 12, 24], [0, 0, 2, 3]))
    check_close(ct, [0, 1, 2, 3])
    check_close(out, [2, 6, 10, 17])


@pytest.mark.parametrize("kernel", ["doubles", "doubles_again"])
def test_warp_custom_gradients_change_no_inputs(kernel, warp_path):
    """Those that write to an array of floats, or count calls, and functions that are run again by another one."""
    f = xk.warp_kernel(getattr(warp_kernels(), kernel), like_last, differentiable=True)
    count, y, ct = jnp.zeros(3, jnp.int32), jnp.arange(1.0, 4.0), jnp.arange(3.0)
    out, pullback = jax.vjp(lambda y: f(count, y), y)
    check_close(pullback(ct), (4 * jnp.arange(1.0, 4.0) * ct,))
    check_close((count, y, ct, out), ([0, 0, 0], [1, 2, 3], [0, 1, 2], [2, 8, 18]))


# -- names, lifetime, threads --------------------------------------------------------------------------


def kernel_with_a_constant(constant):
    """As generators make them: each call adds a kernel of the same name to one module, which is then built again."""
    c = wp.constant(constant)

    @wp.kernel(module=wp.get_module("generated"))
    def scaled(x: floats, out: floats):
        i = wp.tid()
        out[i] = c * x[i]

    return xk.warp_kernel(scaled, like_first)


def test_warp_generated_kernels_are_theirs_by_constant_and_option(warp_path, monkeypatch):
    """Options of the module count, which are no part of Warp's own hash."""
    x = jnp.arange(3.0)
    first = kernel_with_a_constant(2.0)
    for constant in (2.0, 3.0):
        check_close(kernel_with_a_constant(constant)(x), constant * x)
    check_close(first(x), 2 * x)  # although its module was built again
    options = wp.get_module("generated").options
    targets = [target_of(kernel_with_a_constant(2.0), x) for _ in range(2)]
    monkeypatch.setitem(options, "fast_math", not options["fast_math"])
    targets.append(target_of(kernel_with_a_constant(2.0), x))
    check_close(kernel_with_a_constant(2.0)(x), 2 * x)
    assert targets[0] == targets[1] != targets[2]


def test_warp_threads_that_call_kernels_of_one_module(warp_path, monkeypatch):
    """How much Warp prints, which the library changes for a while, is the user's choice afterwards."""
    monkeypatch.setattr(wp.config, "log_level", 20)
    functions = {constant: kernel_with_a_constant(constant) for constant in (1.0, 2.0, 3.0)}

    def work(constant):
        check_close(functions[constant](PAIR[0]), PAIR[0] * constant)

    in_threads(work, [*functions, *functions])
    assert wp.config.log_level == 20


SLICES = {  # how a kernel meets others: the kernel, options, threads that call it, and whether slices overlap
    "as they come": ("meets", {}, 1, True),
    "in order": ("meets", IN_ORDER, 1, False),
    "on tiles": ("meets_on_tiles", {"tiled": True}, 4, False),
}


@needs_warp
@pytest.mark.needs("cores")
@pytest.mark.parametrize("how", SLICES)
def test_warp_slices_of_a_batch_run_on_all_threads_unless_in_order_or_on_tiles(how):
    """Warp keeps the CPU's memory of all tiles behind one pointer."""
    kernel, options, n_threads, overlap = SLICES[how]
    run = jax.jit(jax.vmap(xk.warp_kernel(getattr(warp_kernels(), kernel), like_first, launch_dims=1, **options)))
    patience = np.full((16, 1), 1e6, np.float32)
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(100 if overlap else 5):  # a busy machine may leave the caller alone
            most = max(np.max(result) for result in pool.map(run, [patience] * n_threads))
            if most > 1:
                break
    assert (most > 1) == overlap


# -- without a GPU: the path for GPUs, on the CPU ------------------------------------------------------


def capsule_address(capsule):
    """The address of the C function in a PyCapsule of JAX's, which has no name."""
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return get_pointer(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, None)


class FakeWarp(FakeGpus):
    """Those for Warp, made of the CPU: Warp records launches there, which `libcuda` runs with what it gets."""

    device = 1
    run = staticmethod(run_for_cuda)

    def __init__(self):
        super().__init__()
        self.make_array, self.record_on_cpu = wp.array.__init__, wp.launch
        self.recorded = {}  # by CUfunction
        self.z = ctypes.c_uint32(0)  # of the block, whose address is in machine code
        number, size, pointer = ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p
        start = partial(ctypes.CFUNCTYPE, number, pointer)
        self.library = types.SimpleNamespace(
            cuLaunchKernel=start(*[number] * 7, pointer, ctypes.POINTER(pointer), pointer)(self.launch),
            cuMemcpyDtoDAsync_v2=start(pointer, size, pointer)(self.copy),
            cuMemsetD8Async=start(ctypes.c_ubyte, size, pointer)(self.fill),
            cuCtxGetCurrent=lambda context: 0,
            cuCtxSetCurrent=lambda context: 0,
            cuFuncGetAttribute=lambda value, attribute, function: 0,
        )

    def patch(self, monkeypatch):
        def make_on_cpu(array, *args, **options):
            self.make_array(array, *args, **{**options, "device": "cpu"})

        super().patch(monkeypatch)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(xk._LibCuda, "__init__", lambda libcuda: setattr(libcuda, "library", self.library))
        monkeypatch.setattr(wp, "launch", self.record)
        monkeypatch.setattr(wp.array, "__init__", make_on_cpu)
        self.grids, self.others = [], set()  # of launches: what goes with their grids
        z = f"*(unsigned*){ctypes.addressof(self.z)}ull"
        monkeypatch.setattr(xk, "_MOVE_SNIPPET", xk._MOVE_SNIPPET.replace("blockIdx.z", z))

    def copy(self, target, source, size, stream):
        ctypes.memmove(target, source, size)
        return 0

    def fill(self, target, value, size, stream):
        ctypes.memset(target, value, size)
        return 0

    def record(self, kernel, *args, device, block_dim, **options):
        launch = self.record_on_cpu(kernel, *args, device="cpu", block_dim=1, **options)
        hooks = launch.hooks
        code = hooks.backward if launch.adjoint else hooks.forward
        ordinal = int(device.removeprefix("cuda:"))
        function = ctypes.cast(code, ctypes.c_void_p).value + ordinal  # another one on each device
        launch.hooks = type(hooks)(*[ctypes.c_void_p(function)] * 2, block_dim + 1, block_dim + 1)
        launch.device = types.SimpleNamespace(is_cpu=False)
        self.recorded.setdefault(function, (launch, hooks, ordinal))  # the first: another thread may read this one
        return launch

    def launch(self, function, gx, gy, gz, bx, by, bz, shared_memory, stream, params, extra):
        self.grids.append((gx, gy, gz))
        launch, launch.hooks, ordinal = self.recorded[function]
        self.others.add(((bx, by, bz), shared_memory, stream, ordinal))
        for param, passed in zip(launch.params, params):
            ctypes.memmove(ctypes.addressof(param), passed, ctypes.sizeof(param))
        launch.device = wp.get_device("cpu")
        for self.z.value in range(gz):
            launch.launch()
        return 0


fake_warp = functools.cache(FakeWarp)
needs_fake_gpu = pytest.mark.needs("warp", "no gpu")  # where there is a real one, the same kernels have run on it


@pytest.fixture
def fake_gpu(monkeypatch):
    found = fake_warp()
    found.patch(monkeypatch)
    return found


@needs_fake_gpu
def test_warp_on_fake_gpu(fake_gpu):
    """Three slices, and the adjoint of each."""
    args = sample(3, 2, 3), EVERY[1]
    f, expected = over_first(call_every, args), over_first(every_in_jax, args)
    check_close(fake_gpu.run(gradient(f, args), *args), gradient(expected, args)(*args), 1e-4)
    assert fake_gpu.traits(gradient(f, args), *args) == {1}
    assert fake_gpu.grids == [(2, 1, 3)] * 2
    assert fake_gpu.others == {((4, 1, 1), 4 + 1, 0x5EED, 1)}  # on the stream and the device of the call


@needs_fake_gpu
@pytest.mark.needs("warp 1.15")
def test_warp_grid_of_kernels_without_a_grid_stride(fake_gpu):
    """That of wp_cuda_launch_kernel."""

    @wp.kernel(module="unique", grid_stride=False)
    def nothing(out: floats):
        wp.tid()

    fake_gpu.run(xk.warp_kernel(nothing, spec(1), launch_dims=2**24 + 1, block_dim=32, zero_outputs=True))
    assert fake_gpu.grids == [(2**19, 2, 1)]


# -- a batch is one launch: on a GPU that is made of the CPU, and on a real one --------------------------


class WarpBatch(typing.NamedTuple):
    """A kernel on slices of its inputs."""

    body: str
    inputs: tuple
    in_jax: Callable  # the same of a slice
    parameters: str = "x: floats, y: floats, out: floats"
    options: typing.Any = types.MappingProxyType({})
    values: tuple = ()  # of the parameters after the inputs
    gradient: bool = False
    reason: str | None = None  # why three slices are three launches

    def op(self):
        options = {"outs": like_first, "differentiable": self.gradient, **self.options}
        return xk.warp_kernel(kernels_of_batches()[self.parameters, self.body], **options)

    def check(self, gpu, n_launches):
        function, in_jax = self.op(), self.in_jax
        if self.gradient:
            function, in_jax = gradient(function, self.inputs), gradient(in_jax, self.inputs)
        in_axes = [0 if len(x) == len(self.inputs[0]) else None for x in self.inputs]
        expected = jax.vmap(in_jax, in_axes)(*self.inputs)
        gpu.check(lambda *x: function(*x, *self.values), self.inputs, n_launches, expected)


def add_in_jax(x, y, *others):
    return x + 2 * y


def double_in_jax(x):
    return 2 * x


def stencil_in_jax(x, y):
    return jnp.sin(x) * y + x[jnp.maximum(jnp.arange(7) - 1, 0)]


def views_in_jax(x, b, c, q):
    b, c, last = b[:, None, None], c[:, None, None], q[:, 3, None, None]
    return jnp.where(c, x + b, last.astype(x.dtype))


def outputs_in_jax(x, k):
    return x * x[k], jnp.sin(x).sum(keepdims=True), jnp.ones(5, jnp.int32)


def names_in_jax(x, y):
    return jnp.stack([2.5 * y[0], y[1], 2.5 * y[2], y[1], 2.5 * y[4], y[1], 0])


NAMES = """if i == 6: return
z = out
for k in range(wp.static(6)):
    if k == i:
        x = y
if i % 2 == 0:
    z[i] = x[i] * FACTOR
else:
    add(out, i, tail(x)[0])"""
X_OUT = "x: floats, out: floats"
ADD = "out[i] = x[i] + 2.0 * y[i]"
STENCIL = "out[i] = wp.sin(x[i]) * y[i] + x[wp.max(i - 1, 0)]"
SQUARES_OF_ROWS = "row = x[i]\ns = float(0.0)\nfor j in range(row.shape[0]):\n    s += row[j] * row[j]\nout[i] = s"
LONG, EMPTY = sample(3, 1030), np.zeros((3, 0), np.float32)
OF_THE_USER = "it calls C++, or has adjoints or code transformers, of your own"
WARP_BATCHES = {
    "shared operand": WarpBatch(ADD, SHARED, add_in_jax),
    "1,000 slices": WarpBatch(ADD, (sample(1000, 16), sample(1000, 16)), add_in_jax),
    "large blocks": WarpBatch(ADD, (LONG, LONG), add_in_jax, options={"block_dim": 1024}),
    "four dimensions": WarpBatch(
        "i, j, k, m = wp.tid()\nout[i, j, k, m] = x[i, j, k, m] + float(12 * i + 6 * j + 2 * k + m)",
        (sample(3, 2, 2, 3, 2),), lambda x: x + jnp.arange(24.0).reshape(x.shape), "x: cubes, out: cubes"),
    "dtypes and views": WarpBatch(
        "i, j, k = wp.tid()\nout[i, j, k] = wp.where(c[i], x[i][j, k] + wp.float16(b[i]), wp.float16(q[i][3]))",
        (sample(3, 2, 3, 2).astype("f2"), np.ones((3, 2), "u1"), np.eye(3, 2, dtype=bool), sample(3, 2, 4)),
        views_in_jax, "x: halves, b: octets, c: bools, q: wp.array(dtype=wp.quat), out: halves"),
    "in-out before an input": WarpBatch("y[i] = y[i] + 2.0 * x[i]", PAIRS, add_in_jax, "y: floats, x: floats",
                                        {"outs": like_first, "in_out_argnames": ["y"]}),
    "in-out from what is shared": WarpBatch("y[i] = x[i] + 2.0 * y[i]", SHARED, add_in_jax, "x: floats, y: floats",
                                            {"outs": like_last, "in_out_argnames": ["y"]}),
    "values": WarpBatch("out[i] = x[i] + v[1] + float(s)\nif none:\n    out[i] = none[i]", PAIRS[:1], lambda x: x + 7,
                        "x: floats, v: wp.vec3, s: wp.int64, none: floats, out: floats", values=((1, 2, 3), 5, None)),
    "gradient": WarpBatch(STENCIL, PAIRS, stencil_in_jax, gradient=True),
    "gradient, shared operand": WarpBatch(STENCIL, SHARED, stencil_in_jax, gradient=True),
    "gradient, matrices and vectors": WarpBatch(
        "out[i] = m[i] * v[i]", (sample(3, 6, 2, 2), sample(6, 2)), jax.vmap(jnp.matmul),
        "m: matrices, v: vectors, out: vectors", {"outs": like_last}, gradient=True),
    "gradient, views of rows": WarpBatch(
        SQUARES_OF_ROWS, (sample(3, 2, 4),), lambda x: (x * x).sum(1),
        "x: rows, out: floats", {"outs": spec(2), "launch_dims": 2}, gradient=True),
    "gradient, outputs that differ": WarpBatch(
        "squares[i] = x[i] * x[k[i]]\nwp.atomic_add(sines, 0, wp.sin(x[i]))\ncount[i] = 1",
        (sample(3, 5), np.array([1, 1, 3, 0, 2], np.int32)), outputs_in_jax,
        "x: floats, k: ints, squares: floats, sines: floats, count: ints",
        {"outs": (spec(5), spec(1), spec(5, dtype=np.int32)), "zero_outputs": True}, gradient=True),
    "gradient, tiles": WarpBatch(TILES, (sample(3, 128),), double_in_jax, X_OUT,
                                 {"launch_dims": 2, "tiled": True, "block_dim": 64}, gradient=True),
    "0-d and empty": WarpBatch("out[i] = x[i] + 2.0 * y[0] + float(z.shape[0])", (PAIRS[0], sample(3), EMPTY),
                               add_in_jax, "x: floats, y: floats, z: floats, out: floats"),
    "nothing": WarpBatch(ADD, (EMPTY, EMPTY), add_in_jax),
    "names": WarpBatch(NAMES, PAIRS, names_in_jax, options={"zero_outputs": True}),
    "an overload": WarpBatch("out[i] = x[i] + x[i]", PAIRS[:1], double_in_jax,
                             "x: wp.array(dtype=Any), out: wp.array(dtype=Any)"),
    "in order": WarpBatch(ADD, PAIRS, add_in_jax, options=IN_ORDER,
                          reason="vmap_method says that slices run in order"),
    "C++": WarpBatch("out[i] = native(x[i])", PAIRS[:1], lambda x: x + 1, X_OUT, reason=OF_THE_USER),
    "an adjoint": WarpBatch("out[i] = y[i] * double(y, count, i)", (np.zeros((3, 7), np.int32), PAIRS[0]),
                            lambda count, y: 2 * y * y, "count: ints, y: floats, out: floats", {"outs": like_last},
                            gradient=True, reason=OF_THE_USER),
}  # fmt: skip


@functools.cache
def kernels_of_batches():
    kernels = kernels_of_programs([(batch.parameters, batch.body) for batch in WARP_BATCHES.values()], "batches")
    for program, kernel in kernels.items():
        if kernel.is_generic:
            kernels[program] = wp.overload(kernel, [floats, floats])
    return kernels


@pytest.fixture(
    params=[pytest.param("fake", marks=needs_fake_gpu), pytest.param("gpu", marks=pytest.mark.needs("warp_gpu"))]
)
def warp_on_gpu(request, monkeypatch):
    count_launches(monkeypatch)
    if request.param == "gpu":
        return OnGpu(run_on_gpu)
    request.getfixturevalue("fake_gpu")
    return OnGpu(run_for_cuda)


@pytest.mark.parametrize("kind", WARP_BATCHES)
def test_warp_a_batch_is_one_launch(warp_on_gpu, kind, reasons):
    batch = WARP_BATCHES[kind]
    n_launches = 3 if batch.reason else min(1, batch.inputs[0].size)
    batch.check(warp_on_gpu, n_launches * (1 + batch.gradient))
    assert reasons() == {batch.reason} - {None}


@needs_warp
@pytest.mark.parametrize("kind", WARP_BATCHES)
def test_warp_a_batch_on_the_cpu(kind):
    """Gradients, too: of several outputs, through views, of vectors and matrices, and of what a batch shares."""
    WARP_BATCHES[kind].check(OnGpu(run_on_gpu), 0)


@pytest.mark.parametrize("n_threads", [1, 64])
def test_warp_tiles_need_whole_blocks(warp_path, n_threads):
    """Of a GPU; one of the CPU has one thread."""
    kernel, x = kernels_of_batches()[X_OUT, TILES], sample(128)
    f = xk.warp_kernel(kernel, like_first, launch_dims=(2, n_threads), block_dim=64)
    if warp_path == "cpu" or n_threads == 64:
        check_close(f(x), 2 * x)
    else:
        with pytest.raises(ValueError, match=r"all 64 threads of a block .* are 2 threads: with tiled=True"):
            f(x)


def fresh_kernel(**options):
    """x + factor * y, by a kernel that no other test has made."""
    factor = next(KERNEL_NUMBERS)

    @wp.kernel(module="unique", **options)
    def fresh(x: floats, y: floats, out: floats):
        i = wp.tid()
        out[i] = x[i] + float(factor) * y[i]

    return fresh


def test_warp_batches_share_a_kernel_in_all_threads_and_whatever_their_slices_share(warp_on_gpu, monkeypatch):
    built, make = [], xk._make_kernel_in_z
    monkeypatch.setattr(xk, "_make_kernel_in_z", lambda *args: built.append(args) or make(*args))
    op = xk.warp_kernel(fresh_kernel(), like_first)
    warp_on_gpu.check_threads(op)
    warp_on_gpu.check(op, SHARED, 1)
    assert len(built) == 1


@pytest.mark.needs("warp 1.15")
def test_warp_batch_of_a_kernel_without_a_grid_stride_is_one_launch(warp_on_gpu):
    warp_on_gpu.check(xk.warp_kernel(fresh_kernel(grid_stride=False), like_first), PAIRS, 1)


NESTED = {  # where the axes of x and y are in the outer batches and the inner ones, their shapes, and launches
    "one step apart": (((0, None), (0, None)), (3, 2, 7), (7,), 1),
    "not one step apart": (((0, None), (None, 0)), (3, 7), (2, 7), 3),  # a launch for each inner loop
    "70,000 slices": (((0, 0),), (70_000, 7), (70_000, 7), 2),  # a grid has 65,535 blocks along z
}


@pytest.mark.parametrize("kind", NESTED)
def test_warp_nested_batches(warp_on_gpu, kind):
    axes, *shapes, n_launches = NESTED[kind]
    f, in_jax = WARP_BATCHES["shared operand"].op(), add_in_jax
    for in_axes in reversed(axes):
        f, in_jax = jax.vmap(f, in_axes), jax.vmap(in_jax, in_axes)
    x, y = [sample(*shape, seed=shape[0]) for shape in shapes]
    LAUNCHED.clear()
    check_close(warp_on_gpu.run(f, x, y), in_jax(x, y))
    assert len(LAUNCHED) == n_launches


@needs_fake_gpu
def test_warp_batch_is_built_when_a_kernel_with_a_name_is_traced(fake_gpu, monkeypatch):
    """An exported program may have a batch of it, in a process that lowers none."""
    monkeypatch.setattr(xk, "_traced_platform", lambda: "cuda")
    kernel = fresh_kernel()
    for options, n_handlers in ({}, 1), ({"name": "at_once"}, 2), ({"name": "one", **IN_ORDER}, 1):
        op = xk.warp_kernel(kernel, like_first, **options)
        before = len(fake_gpu.handlers)
        jax.eval_shape(op, spec(7), spec(7))
        assert len(fake_gpu.handlers) == before + n_handlers
        fake_gpu.run(jax.vmap(op), *PAIRS)
        assert len(fake_gpu.handlers) == before + n_handlers + (not options)


@pytest.mark.needs("warp_gpu")
def test_warp_batches_over_a_mesh_are_a_launch_on_each_device(monkeypatch):
    count_launches(monkeypatch)
    mesh = jax.make_mesh((len(jax.devices("cuda")),), "i", devices=jax.devices("cuda"))
    x, y = sample(8, 7), sample(7, seed=1)
    put = lambda array, *axes: jax.device_put(array, jax.NamedSharding(mesh, jax.P(*axes)))
    LAUNCHED.clear()
    results = run_on_gpu(jax.vmap(WARP_BATCHES["shared operand"].op(), (0, None)), put(x, "i"), put(y))
    assert len(LAUNCHED) == mesh.size
    check_close(results, x + 2 * y)


def test_warp_batch_is_a_launch_for_each_slice_after_all(warp_on_gpu, reasons, monkeypatch):
    """By something that is known when its kernel is made or built.  Its numbers are those of before."""
    kernel = fresh_kernel()
    op, (x, y), factor = xk.warp_kernel(kernel, like_first), PAIRS, kernel.func.__closure__[0].cell_contents
    warp_on_gpu.run(op, x[0], y[0])
    changes = {  # by the reason: what is something else then
        "it .* code transformers": (kernel.adj, "transformers", [ast.NodeTransformer()]),
        "what it names is something else": (kernel.func.__closure__[0], "cell_contents", 0.5),
        "(?i).*(build|compil)": (xk, "_MOVE_SNIPPET", "this is no C++ {field}"),
        # as its registers leave few threads, for which a mere number stands
        "it does not fit then; .* at most 255 thre": (xk._LibCuda, "limit", lambda *args: 255),
    }
    for reason, change in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(xk, "_KERNELS_IN_Z", xk._BoundedCache())
            patch.setattr(*change)
            if "_MOVE_SNIPPET" in change:  # users get no error, and tests do
                with pytest.raises(Exception, match=reason):
                    warp_on_gpu.run(jax.vmap(op), x, y)
                patch.setattr(xk, "_FALLS_BACK_ON", Exception)
                patch.setattr(xk, "_KERNELS_IN_Z", xk._BoundedCache())
            warp_on_gpu.check(op, PAIRS, 3, x + factor * y)
        assert any(re.match(reason, text) for text in reasons())  # Warp 1.14 says once that it cannot build a kernel


# -- inputs are never changed, and outputs start from something ----------------------------------------
# What is taken gives what Warp's own launch gives.

WARP_WRITES = [  # statements that write to the input y, or x, an array of vectors
    "y[i] = 1.0",
    "x[i][0] = 1.0",
    "x[i].y -= 1.0",
    "wp.atomic_add(arr=y, i=i, value=1.0)",
    "wp.tile_store(y, wp.tile_load(out, shape=2))",
    "add_by_name(y, i)",
    "z = out\nif i > 0:\n    z = y\nz[i] = 1.0",
    "tail(y)[i] = 1.0",
    "wp.where(i > 0, x, x)[i][0] = 1.0",
    "second, z = second_and_tail(y)\nz[i] = second",
    "h = Holder()\nh.a = y\nadd(h.a, i, 1.0)",
    "h = Holder(y)\nadd_to_held(h, i)",
    "wp.dense_solve(n=1, A=out, L=out, b=out, x=y)",
]
WRITE_BY_REF = "set_ref(y[i])"  # since Warp 1.19
WARP_UPDATES = [  # statements that update the output, or do not store in it
    "wp.atomic_add(out, 0, y[i])",
    "out[i] += 1.0",
    "out[i] = y[i] + 2.0 * out[i]",
    "out[i].y -= 1.0",
    "row = out[i]\nrow[0] += 1.0",
    "n = wp.atomic_exch(out, i, 1.0)",
    "wp.tile_atomic_add(out, wp.tile_load(y, shape=2))",
    "add_by_name(out, i)",
    "tail(out)[i] += 1.0",
    "second, z = second_and_tail(out)\nz[i] -= second",
    "h = Holder()\nh.a = out\nwp.atomic_add(h.a, i, 1.0)",
    "h = Holder(out)\nadd_to_held(h, i)",
    "n = out.shape[0]",
    "if i > 9:\n    n = len(out)",
]
TYPES_OF_OUT = {"out[i].y -= 1.0": "vectors", "row = out[i]\nrow[0] += 1.0": "rows"}  # and of others floats
WARP_STORES = [  # statements that store in the output, and change no input
    "out[i] = y[i]",
    "z = out[1:]\nz[i] = y[i]\nout[0] = x[i][0]",
    "h = Holder(out)\nh.a[i] = y[i]",
    "wp.tile_store(out, wp.tile_load(y, shape=2))",
    "out[i] = y[i]\nadd_by_name(out, i)",
    "for k in range(3):\n    if k > 0:\n        out[i] *= y[k]\n    else:\n        out[i] = y[k]",
    "for k in range(3):\n    out[i] = out[i] + y[k] if k > 0 else y[k]",
    "src = y\ndst = out\nsrc, dst = dst, src\nsrc[i] = dst[i]",
    "v = x[i]\nv[0] = 9.0\nn = wp.lower_bound(y, -9.0) + len(y)\nout[i] = v[0] + x[i][0] + float(n)",
]
X_AND_Y = sample(3, 2), sample(3, seed=1)


@functools.cache
def warp_programs():
    """{statements: kernel} of these tables."""
    statements = WARP_WRITES + WARP_UPDATES + WARP_STORES
    if conftest.missing("warp 1.19") is None:
        statements.append(WRITE_BY_REF)
    programs = [(f"x: vectors, y: floats, out: {TYPES_OF_OUT.get(body, 'floats')}", body) for body in statements]
    return dict(zip(statements, kernels_of_programs(programs, "programs", ", enable_backward=False").values()))


def launched(kernel, out):
    """What the arrays are after a launch of Warp's own of two threads, of which the output starts from this."""
    pairs = zip((*X_AND_Y, out), kernel.adj.args)
    on_warp = [wp.array(np.array(array), dtype=x.type.dtype, device="cpu") for array, x in pairs]
    wp.launch(kernel, dim=2, inputs=on_warp, device="cpu")
    return tuple(array.numpy() for array in on_warp)


@needs_warp
@pytest.mark.parametrize("statement", [
    *WARP_WRITES, pytest.param(WRITE_BY_REF, marks=pytest.mark.needs("warp 1.19")),
])  # fmt: skip
def test_warp_kernel_that_writes_to_an_input_is_refused(statement):
    kernel = warp_programs()[statement]
    written = "x" if re.search(r"\bx[\[,]", statement) else "y"
    with pytest.raises(TypeError, match=f"(writes|may write) to its input '{written}'"):
        jax.eval_shape(xk.warp_kernel(kernel, like_last, launch_dims=2, zero_outputs=False), *X_AND_Y)
    options = {"in_out_argnames": ["x", "y"], "zero_outputs": True, "launch_dims": 2}
    results = xk.warp_kernel(kernel, lambda x, y: (x, y, y), **options)(*X_AND_Y)
    check_close(results, launched(kernel, np.zeros(3, np.float32)))


@needs_warp
@pytest.mark.parametrize("statement", WARP_UPDATES)
def test_warp_kernel_that_only_updates_an_output_is_refused(statement):
    kernel, out = warp_programs()[statement], spec(3, 2) if statement in TYPES_OF_OUT else spec(3)

    def call(outs=out, **options):
        return partial(xk.warp_kernel(kernel, outs, launch_dims=2, **options), *X_AND_Y)

    with pytest.raises(TypeError, match=r"'out'.*zero_outputs=True.*in_out_argnames"):
        jax.eval_shape(call())
    for zero_outputs in (None, True):
        with pytest.raises(TypeError, match="make scratch an output"):
            jax.eval_shape(call((), scratch=out, has_side_effect=True, zero_outputs=zero_outputs))
    jax.eval_shape(call(zero_outputs=False))
    zeros, start = np.zeros(out.shape, np.float32), sample(*out.shape)
    for _ in range(2):
        check_close(call(zero_outputs=True)(), launched(kernel, zeros)[2])
    check_close(call(in_out_argnames=["out"])(start), launched(kernel, start)[2])


@needs_warp
@pytest.mark.parametrize("statement", WARP_STORES)
def test_warp_kernel_that_is_right_is_taken(statement):
    kernel = warp_programs()[statement]
    result = xk.warp_kernel(kernel, like_last, launch_dims=2)(*X_AND_Y)
    check_close(result[:2], launched(kernel, np.zeros(3, np.float32))[2][:2])


def test_warp_outputs_that_are_added_to_start_from_zeros(warp_path):
    """In each slice, of ops that register a kernel with this option."""
    op = xk.XLACustomKernel("adds")
    op.def_warp_kernel(warp_kernels().add_up, zero_outputs=True)
    xs = jnp.arange(6.0).reshape(2, 3)
    check_close(jax.vmap(partial(op, outs=spec(2)))(xs), [[3, 0], [12, 0]])


# -- gradients that Warp gets wrong, in loops whose length it does not know ------------------------------

SUM = "s = float(0.0)\nfor j in range(x.shape[1]):\n    s += x[i, j]\n"
PRODUCT = "s = float(1.0)\nfor j in range(x.shape[1]):\n    s = s * x[i, j]\n"
LARGEST = "s = x[i, 0]\nfor j in range(x.shape[1]):\n    if x[i, j] > s:\n        s = x[i, j]\n"
SUM_OF_SUMS = "t = float(0.0)\nfor k in range(x.shape[1]):\n" + textwrap.indent(f"{SUM}t += s * x[i, k]", "    ")


def square_of_sum(x):
    return x.sum() ** 2


WARP_GRADIENTS = {  # a kernel on a row of x, the same in JAX, and of what the adjoint has another value, in which line
    "a sum of squares": (SUM.replace("x[i, j]", "x[i, j] * x[i, j]") + "out[i] = s", lambda x: x @ x, None),
    "a function of degree 1": (f"{SUM}out[i] = 2.0 * s + 1.0", lambda x: 2 * x.sum() + 1, None),
    "a mean": (f"{SUM}out[i] = s / float(x.shape[1])", jnp.mean, None),
    "a decaying sum": (SUM.replace("s +=", "s = 0.5 * s +") + "out[i] = s", lambda x: x @ 0.5 ** jnp.arange(3, -1, -1),
                       None),
    "in a function": ("s = total(x, i)\nout[i] = s * s", square_of_sum, None),
    "a constant length": (PRODUCT.replace("x.shape[1]", "4") + "out[i] = s", jnp.prod, None),
    "of vectors": ("v = wp.vec2(0.0, 0.0)\nfor j in range(x.shape[1]):\n    v += wp.vec2(x[i, j], 1.0)\nout[i] = v[0]",
                   jnp.sum, None),
    "a branch": (SUM.replace("s +=", "if x[i, j] > 0.9: s +=") + "out[i] = s", lambda x: x @ (x > 0.9), None),
    "a square": (f"{SUM}out[i] = s * s", square_of_sum, ("s", "out[i] = s * s")),
    "a product": (f"{PRODUCT}out[i] = s", jnp.prod, ("s", "s = s * x[i, j]")),
    "a maximum": (PRODUCT.replace("s * x[i, j]", "wp.max(s, x[i, j])") + "out[i] = s", lambda x: x.max(initial=1.0),
                  ("s", "s = wp.max(s, x[i, j])")),
    "a maximum by a branch": (f"{LARGEST}out[i] = s", jnp.max, ("s", "if x[i, j] > s:")),
    "while": ("s = float(0.0)\nj = int(0)\nwhile j < x.shape[1]:\n    s += x[i, j]\n    j += 1\nout[i] = s", jnp.sum,
              ("j", "s += x[i, j]")),
    "an output": ("out[i] = x[i, 0]\nout[i] = out[i] * x[i, 0]", lambda x: x[0] ** 2,
                  ("out[i]", "out[i] = out[i] * x[i, 0]")),
    "too long to unroll": (PRODUCT.replace("x.shape[1]", "20").replace("x[i, j]", "x[i, 0]") + "out[i] = s",
                           lambda x: x[0] ** 20, ("s", "s = s * x[i, 0]")),
    "a product in a function": ("out[i] = row_product(x, i)", jnp.prod, ("s", "s = s * x[i, j]")),
    "an inner loop": (f"{SUM_OF_SUMS}\nout[i] = t", square_of_sum, ("s", "t += s * x[i, k]")),
    "an earlier round": (
        "s = float(0.0)\nt = float(0.0)\nfor j in range(x.shape[1]):\n    t += s * s\n    s += x[i, j]\nout[i] = t",
        lambda x: ((jnp.cumsum(x) - x) ** 2).sum(), ("s", "t += s * s"),
    ),
    "an element": ("v = wp.vec3(0.0, 0.0, 0.0)\nfor j in range(x.shape[1]):\n    v[0] += x[i, j]\nout[i] = v[0] * v[0]",
                   square_of_sum, ("v", "out[i] = v[0] * v[0]")),
    "a length that was counted": (
        f"m = int(0)\nfor j in range(x.shape[1]):\n    m += 1\n{SUM.replace('x.shape[1]', 'm')}out[i] = s", jnp.sum,
        ("m", "for j in range(m):"),
    ),
    "a branch that begins anew": (f"{SUM}if i > 5:\n    s = 0.0\nout[i] = s * s", square_of_sum,
                                  ("s", "out[i] = s * s")),
    "one more branch": (f"{SUM}a = x[i, 0]\nif i > 5:\n    a = 1.0\nout[i] = a * s", lambda x: x[0] * x.sum(),
                        ("s", "out[i] = a * s")),
    "break": ("s = float(0.0)\nfor j in range(20):\n    if j == 4:\n        break\n    s += x[i, 0]\nout[i] = s",
              lambda x: 4 * x[0], ("the loop that it leaves", "break")),
}  # fmt: skip


@functools.cache
def kernels_of_gradients():
    return kernels_of_programs([("x: rows, out: floats", body) for body, _, _ in WARP_GRADIENTS.values()], "gradients")


@needs_warp
@pytest.mark.parametrize("case", WARP_GRADIENTS)
def test_warp_gradient_is_right_or_warned_about_once(case):
    """Where a new Warp is right, its warning can go."""
    body, reference, stale = WARP_GRADIENTS[case]
    kernel = kernels_of_gradients()["x: rows, out: floats", body]
    x = np.float32([[1.1, 0.7, 1.3, 0.9], [0.5, 1.5, 0.8, 1.2], [1.4, 1.1, 0.6, 1.7]])

    def call(x):
        return xk.warp_kernel(kernel, spec(3), launch_dims=3, differentiable=True)(x)

    def results_and_gradient(call, x):
        results, pullback = jax.vjp(call, x)
        return results, *pullback(jnp.ones(3))

    with warnings.catch_warnings(record=True, action="always") as caught:
        results, found = results_and_gradient(call, x)
        jax.eval_shape(partial(results_and_gradient, call), x)  # which warns no more
    expected_results, expected = results_and_gradient(jax.vmap(reference), x)
    check_close(results, expected_results)
    assert np.allclose(found, expected, 1e-3) == (stale is None)
    assert len(caught) == (stale is not None)
    for warning in caught:
        variable, statement = stale
        pattern = (
            rf"'{kernel.key}': the gradient .* needs {re.escape(repr(variable))} as it was in .* "
            r"\(line (\d+) of (.*)\), and has .* wp.func .* jax.test_util.check_grads"
        )
        line, file = re.search(pattern, str(warning.message)).groups()
        assert linecache.getline(file, int(line)).strip() == statement


# -- launches ------------------------------------------------------------------------------------------

WARP_INDICES = [  # the type of the first array, its shape, the start of a kernel, and how many indices that gives
    ("wp.array2d(dtype=float)", (3, 2), "i = wp.tid()", "1"),
    ("vectors", (3, 2), "i, j = wp.tid()", "2"),
    ("floats", (3,), "i = 0", "0"),
    ("floats", (3,), "i = wp.tid()\ni, j = wp.tid()", "1 or 2"),
]


@needs_warp
@pytest.mark.parametrize("kind, shape, start, n", WARP_INDICES)
def test_warp_default_launch_has_as_many_dimensions_as_the_kernel_has_indices(kind, shape, start, n):
    kernel = kernel_with_body(f"{start}\nout[i] = y[i]", x=kind)
    text = f"'kernel': launch_dims is missing, .* wp.tid.. gives {n} indices: give launch_dims, such as n, or"
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(xk.warp_kernel(kernel, like_last), spec(*shape), spec(3))
    jax.eval_shape(xk.warp_kernel(kernel, like_last, launch_dims=0), spec(*shape), spec(3))


@pytest.mark.needs("warp 1.19")
def test_warp_deterministic_mode_on_the_cpu(monkeypatch):
    """There it changes nothing, as in `wp.launch`; on a GPU it is refused when the launch is recorded."""
    monkeypatch.setattr(wp.config, "deterministic", wp.DeterministicMode.RUN_TO_RUN)
    kernel = kernel_with_body("wp.atomic_add(out, 0, x[i] * y[i])")
    f = xk.warp_kernel(kernel, spec(1), zero_outputs=True, differentiable=True)
    out, pullback = jax.vjp(f, *PAIR)
    check_close((out, pullback(jnp.ones(1))), (np.vdot(*PAIR)[None], PAIR[::-1]))


# -- arguments -----------------------------------------------------------------------------------------

THREE, INTEGERS = sample(3), np.arange(3, dtype=np.int32)


def test_warp_arguments_as_kernels_take_them(warp_path):
    kind = enum.IntFlag("Kind", "A B").B
    x = jnp.arange(3.0)
    f = xk.warp_kernel(warp_kernels().takes_many_kinds, like_first)
    check_close(f(x, jnp.float32(2), kind, 1, 1), [6, 8, 10])  # an array of one element
    check_close(f(x, h=1, on=True, kind=kind, factor=None), [3, 4, 5])


@needs_warp
def test_warp_arguments_bind_as_pythons():
    f = xk.warp_kernel(warp_kernels().histogram, spec(3), zero_outputs=True)
    check_close(f(weight=jnp.int32(2), index=INTEGERS), [2, 2, 2])
    check_close(jax.jit(f, static_argnums=1)(INTEGERS, 0.5), [0.5, 0.5, 0.5])
    with pytest.raises(TypeError, match=r"\(index, w.*, inputs first; got 1 by position and \(index\) by name"):
        f(INTEGERS, index=3)
    with pytest.raises(TypeError, match=r"got 1 by position and \(acc\) by name"):
        f(INTEGERS, acc=THREE)
    text = r"'weight' \(float32\) .* got .* make it a warp.array of shape \(1,\), .* static argument"
    with pytest.raises(TypeError, match=text):
        jax.vmap(f, (None, 0))(INTEGERS, THREE)


@needs_warp
def test_warp_names_the_settings_that_are_in_the_way(monkeypatch):
    monkeypatch.setattr(wp.config, "enable_backward", False)
    kernel = kernel_with_body("out[i] = x[i]")
    with pytest.raises(TypeError, match=r"'kernel' has no .* derivative: say differentiable=True for reverse mode"):
        jax.grad(lambda x: xk.warp_kernel(kernel, like_first)(x, x).sum())(THREE)
    f = xk.warp_kernel(kernel, like_first, differentiable=True)
    with pytest.raises(RuntimeError) as caught:
        jax.grad(lambda x: f(x, x).sum())(THREE)
    assert "enable_backward=False leaves out" in " ".join(caught.value.__notes__)
    monkeypatch.setattr(wp.config, "enable_cpu_blocks", True, raising=False)  # came with Warp 1.19
    check_close(xk.warp_kernel(kernel, like_first, block_dim=4)(THREE, THREE), THREE)
    tiles, x = kernel_with_body(TILES), sample(128)
    for options in {"launch_dims": 2, "tiled": True}, {"launch_dims": (2, 64)}:
        with pytest.raises(NotImplementedError, match="enable_cpu_blocks' blocks, a launch is more than"):
            xk.warp_kernel(tiles, like_first, block_dim=64, **options)(x, x)


@needs_warp
def test_warp_launches_that_are_more_than_the_start_of_a_kernel_are_refused(monkeypatch):
    launch = type("DeterministicLaunch", (wp.Launch,), {"__init__": lambda self: None})()
    monkeypatch.setattr(wp, "launch", lambda *args, **options: launch)
    with pytest.raises(NotImplementedError, match=r"warp_kernel 'multiply': .*: call it by warp.jax_kernel"):
        product(launch_dims=2)(*PAIR)


@needs_warp
@pytest.mark.parametrize("platforms", [["cpu"], pytest.param(["cpu", "cuda"], marks=on_gpu)], ids=str)
def test_warp_batches_of_any_size_are_exported(platforms):
    """A launch has other bytes on each platform."""
    (n,) = export.symbolic_shape("n")
    f = jax.vmap(product(launch_dims=lambda x, y: x.shape, name="for any number of slices"))
    program = export.export(jax.jit(f), platforms=platforms, disabled_checks=xk.export_checks())(spec(n, 5), spec(n, 5))
    for platform in platforms:
        x = jax.device_put(sample(3, 5), jax.devices(platform)[0])
        check_close(export.deserialize(program.serialize()).call(x, x), x * x)


@needs_warp
def test_warp_build_error_stays_an_error():
    """Warp < 1.19 notes what failed, and leaves it out of later builds."""

    @wp.kernel(module=wp.get_module("broken"))
    def broken(x: floats, out: floats):
        out[wp.tid()] = undefined_thing(x[wp.tid()])  # noqa: F821

    for _ in range(3):
        with pytest.raises(KeyError, match="undefined_thing"):
            xk.warp_kernel(broken, like_first)(jnp.arange(3.0))


def test_warp_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "warp", None)
    with pytest.raises(ImportError, match=r"warp_kernel needs warp .*install it: pip install warp-lang numba"):
        xk.warp_kernel(like_first, spec(3))


# ======================================================================================================
# XLACustomKernel
# ======================================================================================================

VECTOR = np.arange(1.0, 9.0, dtype=np.float32)
WEIGHTS = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
ROWS = np.stack([VECTOR, VECTOR + 1, 2 * VECTOR])


def op_with(generator):
    """An op with one kernel, for the CPU."""
    op = xk.XLACustomKernel("op")
    op.def_kernel("jax", "cpu", generator)
    return op


def op_of(function):
    """An op whose kernel is `function`; the static parameters of a call are its keyword arguments."""
    return op_with(lambda outs, **parameters: partial(function, **parameters))


def add_to(value):
    """The generator of a kernel that adds `value`."""
    return lambda: partial(operator.add, value)


def op_adding(**values):
    """An op with a backend for each keyword, which adds its value."""
    op = xk.XLACustomKernel("op")
    for backend, value in values.items():
        op.def_kernel(backend, "cpu", add_to(value))
    return op


def call_op(op):
    """An op as a function of its operands, whose result is like the first."""
    return partial(op, outs=like_first)


def eager_and_jitted(f):
    return f, jax.jit(f)


# -- under JAX's transformations, beside the matrix ----------------------------------------------------


@numba.njit
def numba_multiply(x, y, out):
    for i in np.ndindex(out.shape):
        out[i] = x[i] * y[i]


multiply_p = Primitive("multiply_without_batching_rule")  # as most hand-written primitives
multiply_p.def_abstract_eval(like_first)
mlir.register_lowering(multiply_p, mlir.lower_fun(operator.mul, multiple_results=False))


PRODUCT_KERNELS = {"jax": lambda: operator.mul, "numba": numba_multiply, "no_batching": lambda: multiply_p.bind}


def define_backward_pass(op):
    def forward(x, y):
        return op(x, y, outs=like_first), (x, y)

    def backward(operands, ct):
        x, y = operands
        return ct * y, ct * x

    op.def_vjp_rule(forward, backward)


def product_op(backend="jax", define_derivative=Hadamard.differentiate):
    """The elementwise product."""
    op = op_with(PRODUCT_KERNELS[backend])
    define_derivative(op)
    return op


@pytest.mark.parametrize("outs", [lambda n: spec(2 * n), lambda n: [spec()] * n])
@pytest.mark.parametrize("call", [lambda n, outs: wrap(outs=outs)(n), op_adding(a=1)])
def test_outs_that_want_values_are_told_what_they_get(call, outs):
    with pytest.raises(TypeError, match=r"outs.*: a function gets specs .* of arrays, no values"):
        call(3, outs=outs)


def sum_of(f):
    """A function whose gradient can be asked for."""
    return lambda *operands: f(*operands).sum()


BESIDE_THE_MATRIX = [  # backend, how the derivative is defined, and the transformation
    *itertools.product(["no_batching"], [Hadamard.differentiate], ["vmap_nested", "grad_of_shard_map"]),
    *itertools.product(["jax"], [define_backward_pass], ["grad_of_nested_vmap", "shard_map_of_grad"]),
]


@pytest.mark.parametrize("backend, define_derivative, transformation", BESIDE_THE_MATRIX)
def test_op_without_a_batching_rule_or_with_a_backward_pass(backend, define_derivative, transformation):
    multiply = call_op(product_op(backend, define_derivative))
    program = getattr(Transformations, transformation)
    results = program(lambda x, y: [multiply(x, y)], *inputs_and_batch("hadamard", "float32"))
    check_close(results, what_is_right("hadamard", transformation, "float32"), 1e-5)


def test_op_with_a_backward_pass_takes_batches_of_numpy_arrays():
    """JAX's custom_vjp does not."""
    multiply = call_op(product_op(define_derivative=define_backward_pass))
    check_close(jax.jit(lambda x: jax.vmap(multiply)(x, ROWS))(ROWS), ROWS**2)
    check_close(jax.jit(lambda: jax.grad(sum_of(jax.vmap(multiply)))(ROWS, ROWS))(), ROWS)


def test_op_vmap_is_that_of_the_backend():
    def multiply_by_rank(x):
        return jax.pure_callback(lambda x: x * np.ndim(x), x, x, vmap_method="broadcast_all")

    check_close(jax.vmap(call_op(op_of(multiply_by_rank)))(ROWS), 2 * ROWS)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_op_kernels_that_close_over_traced_values_are_refused(transform):
    """Also where no operand is traced."""

    def scale_one(x):
        op = op_with(lambda: lambda y: x * y)
        op.def_jvp_rule2(lambda t, y: x * t)
        return op(1.0, outs=spec())

    with pytest.raises(TypeError, match=r"'op': a kernel.*closes over a traced value: pass it as an operand"):
        transform(scale_one)(VECTOR if transform is jax.vmap else 1.0)


def test_op_kernels_know_no_axes_of_vmap():
    total = call_op(op_of(lambda x: jax.lax.psum(x, "i")))
    text = r"'op': .*names the axis 'i' of a vmap, and only jax.shard_map"
    for call in eager_and_jitted(jax.vmap(total, axis_name="i")):
        with pytest.raises(NotImplementedError, match=text):
            call(ROWS)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    on_devices = jax.shard_map(total, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    check_close(on_devices(ROWS[:2]), np.stack([ROWS[:2].sum(0)] * 2))


# -- outs, operands, parameters ------------------------------------------------------------------------

SPECS = [spec(8), spec(8, dtype=bool), spec(4), [spec(8)], [spec(4)], (spec(8),), {"low": spec(8), "high": spec(4)}, ()]
OUTS = [  # what `outs` may be, and as what it is understood
    *zip(SPECS, SPECS),
    (lambda x: (x, {"x": x}), (spec(8), {"x": spec(8)})),
    ([jnp.zeros(8), DESCRIBED], [spec(8), spec(3, dtype=np.int32)]),
]


def test_op_returns_what_outs_describes():
    """What an op remembers of a call is for its shapes, its dtypes and its structure."""

    op = op_of(lambda x: jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), understood))
    for outs, understood in OUTS:
        call = partial(op, outs=outs)
        for f in (call, jax.jit(call), jax.disable_jit()(call)):
            assert jax.eval_shape(like_first, f(VECTOR)) == understood


def test_op_refuses_another_structure():
    """Also a tuple for a dict: in which order?"""
    for kernel, outs in (
        (lambda x: {"low": x.min(), "top": x.max()}, [spec(), spec()]),
        (lambda x: (x.min(), x.max()), {"low": spec(), "high": spec()}),
    ):
        with pytest.raises(ValueError, match=r"'op'.*returned .*\*, .*, but outs declares .*"):
            op_of(kernel)(VECTOR, outs=outs)


def test_op_operands_may_be_numbers_or_arrays_of_other_libraries():
    of_jax_array = types.SimpleNamespace(__jax_array__=lambda: jnp.int32(2))
    double = call_op(op_of(lambda x: x + x))
    for operand in (2, OfOtherLibrary(np.array(2, np.int32)), of_jax_array):
        for f in eager_and_jitted(partial(double, operand)):
            assert f() == 4 and f().dtype == np.int32
    without_operands = partial(op_of(lambda: {"any container": np.float32([3, 4])}), outs=spec(2))
    for f in eager_and_jitted(without_operands):
        check_close(f(), np.float32([3, 4]))


class OfOtherLibrary:
    """A NumPy array that JAX sees by DLPack alone, or, if `is_exported` is false, not at all."""

    def __init__(self, array, is_exported=True):
        self.array, self.is_exported = array, is_exported

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.is_exported:
            raise BufferError("it is not to be had")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("cut", [np.s_[:, 1], np.s_[::-1]])
def test_arrays_of_other_libraries_may_be_parts_of_arrays(cut):
    part = np.arange(12, dtype=np.float32).reshape(4, 3)[cut]
    for f in (copy, call_op(op_of(lambda x: x))):
        check_close(f(OfOtherLibrary(part)), part)


REFUSED_INPUTS = {  # by all that is called, in these words
    "reference": (lambda: jax.new_ref(jnp.ones(4)), r"is a jax.Ref: pass its value, ref\[\.\.\.\]"),
    "fields": (
        lambda: np.ones(4, [("a", "f4"), ("b", "i4")]),
        "must be a number or an array.*the fields of a structured array one by one",
    ),
    "byte order": (lambda: F32.astype(">f4"), r"of another byte order.*newbyteorder\("),
    "not to be had": (lambda: OfOtherLibrary(F32, is_exported=False), "must be a number or an array.*not to be had"),
}


@pytest.mark.parametrize("case", REFUSED_INPUTS)
@pytest.mark.parametrize("call", [lambda x: add_one(x), call_op(op_adding(a=1))])
def test_what_is_no_input(call, case):
    """Also behind an array of the same kind."""
    make, text = REFUSED_INPUTS[case]
    call(F32)
    with pytest.raises(TypeError, match=f"'(add_one|op)': input 0.*{text}"):
        call(make())


# Python calls the values in a row equal; their representations have different lengths
EQUAL_PARAMETERS = [(1, 1.0, True, np.float32(1)), (0.0, -0.0), ((np.float32(0.0),), (np.float32(-0.0),))]


@pytest.mark.parametrize("values", EQUAL_PARAMETERS)
def test_op_tells_equal_parameters_apart(values):
    op = op_of(lambda x, k: x + len(repr(k)))

    def call(x):
        return [op(x, outs=spec(), k=k) for k in values]

    def bind(x):
        return [op.primitive.bind(x, outs=(spec(),), k=k)[0] for k in values]

    for f in (call, jax.jit(call), bind, jax.jit(bind)):
        assert f(0.0) == [len(repr(k)) for k in values]


# -- arrays of 64 bits ---------------------------------------------------------------------------------


def increment_kernel(outs):
    return wrap(outs=outs)


@pytest.mark.parametrize("make", [increment_kernel, lambda outs: partial(op_with(increment_kernel), outs=outs)])
def test_64_bits_where_x64_is_disabled(make):
    """As JAX does: arrays keep them, and outs are truncated, unless they are allowed."""
    with x64():
        x = jnp.arange(3) + 2**40
    for f in eager_and_jitted(make(like_first)):
        got = np.asarray(f(x))
        assert got.dtype == np.int64 and got[0] == 2**40 + 1
        assert f(np.arange(3)).dtype == np.int32
    increment = make(spec(3, dtype=np.int64))
    with pytest.warns(UserWarning, match="asks for int64, which JAX truncates to int32.*jax_enable_x64") as caught:
        assert increment(np.arange(3)).dtype == np.int32
    assert {warning.filename for warning in caught} == {__file__}
    with conftest.configured("jax_explicit_x64_dtypes", "allow"):
        assert increment(np.arange(3)).dtype == np.int64


def test_op_says_what_it_has_and_carries_what_brainevent_attaches():
    op = op_adding(a=1, b=2)
    assert repr(op) == "<XLACustomKernel 'op': cpu: a, b>" and xk.XLACustomKernel("op", doc="Adds.").__doc__ == "Adds."
    assert op.defaults == {"cpu": "a"} and op.get_default("cpu") == "a" and op.get_default("tpu") is None
    assert op.available_backends("cpu") == ["a", "b"] and op.available_backends("tpu") == []
    op.def_call(lambda x, backend=None: (x, backend))
    assert op.call(1, backend="numba") == (1, "numba") and op.def_benchmark_data(add_to) is add_to
    assert op.def_tags("sparse", "event") is None
    entry = xk.KernelEntry("a", "cpu", add_to)
    assert (entry.backend, entry.platform, entry.kernel_generator, entry.fallback) == ("a", "cpu", add_to, False)


NAMES_OF_BRAINEVENT = (
    "KernelEntry", "XLACustomKernel", "defjvp", "general_batching_rule", "jaxinfo_to_warpinfo", "jaxtype_to_warptype",
    "numba_cuda_callable", "numba_cuda_kernel", "numba_kernel",
)  # fmt: skip


@pytest.mark.needs("brainevent")
def test_brainevents_names_and_signatures():
    """From BrainEvent, change the import: all but its own benchmark."""
    with warnings.catch_warnings(action="ignore"):
        theirs = importlib.import_module("brainevent._op")
    for name in NAMES_OF_BRAINEVENT:
        check_accepts(getattr(xk, name), getattr(theirs, name))
    for name, method in vars(theirs.XLACustomKernel).items():
        if not name.startswith("_") and name != "benchmark":
            check_accepts(getattr(xk.XLACustomKernel, name), method)


def check_accepts(ours, theirs):
    """What can be called as theirs: required arguments by position, the others by name."""
    if isinstance(theirs, property):
        return
    required, named = [], {}
    for name, parameter in inspect.signature(theirs).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty:
            named[name] = None
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            required.append(None)
    inspect.signature(ours).bind(*required, **named)


# -- registration and dispatch -------------------------------------------------------------------------


CHANGES = {  # the options of calls, what changes then, and what such calls give
    "new default": ({}, methodcaller("set_default", "cpu", "b"), 2),
    "registered again": ({}, methodcaller("def_kernel", "a", "cpu", add_to(5)), 5),
    "another backend": ({}, methodcaller("def_kernel", "c", "cpu", add_to(3)), 1),
    "chosen backend": ({"backend": "b"}, methodcaller("def_kernel", "b", "cpu", add_to(3)), 3),
}


@pytest.mark.parametrize("case", CHANGES)
def test_op_change_reaches_warm_functions(case):
    options, change, changed = CHANGES[case]
    op = op_adding(a=1, b=2)
    add = partial(op, outs=like_first, **options)
    calls = add, jax.jit(jax.vmap(add)), jax.jit(jax.vmap(call_op(op_of(add))))  # also in another op's kernel
    for call in calls:
        call(jnp.zeros(1))
    change(op)
    for call in calls:
        assert call(jnp.zeros(1)) == changed


def test_op_warp_serves_the_cpu_only_where_nothing_else_does():
    op = xk.XLACustomKernel("warp")
    call = partial(op, 0, outs=like_first)
    op.def_warp_kernel(add_to(1), asdefault=True)
    assert op.defaults == {"gpu": "warp", "cpu": "warp"} and call() == 1
    op.def_numba_kernel(add_to(2))
    assert op.defaults == {"gpu": "warp", "cpu": "numba"}
    assert call() == 2 and call(backend="warp") == 1
    op.def_kernel("warp", "cpu", add_to(3))  # which no kernel for the GPU replaces
    op.def_warp_kernel(add_to(4))
    assert call(backend="warp") == 3
    op.set_default("cpu", "warp")
    op.def_kernel("jax", "cpu", add_to(5))
    assert call() == 3


SHORTHANDS = [  # a method, its arguments, and the platform and the backend that it registers for
    ("def_numba_kernel", (), "cpu", "numba"),
    ("def_warp_kernel", (), "gpu", "warp"),
    ("def_numba_cuda_kernel", (), "gpu", "numba_cuda"),
    ("def_pallas_kernel", ("cuda",), "gpu", "pallas"),
    ("def_triton_kernel", (), "gpu", "triton"),
    ("def_cuda_raw_kernel", (), "gpu", "cuda_raw"),
    ("def_kernel", ("mine", "tpu"), "tpu", "mine"),
    ("def_kernel", ("mine", "rocm"), "gpu", "mine"),
]


@pytest.mark.parametrize("name, args, platform, backend", SHORTHANDS)
def test_op_shorthands_and_decorators(name, args, platform, backend):
    op, generator = xk.XLACustomKernel("op"), add_to(1)
    define = getattr(op, name)
    assert define(*args, generator) is generator and op.defaults[platform] == backend
    assert op.available_backends(args[-1] if args else platform) == [backend]
    op.def_kernel("first", platform, generator, asdefault=True)
    assert define(*args)(generator) is generator and op.defaults[platform] == "first"
    assert define(*args, asdefault=True)(generator) is generator and op.defaults[platform] == backend


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda", "tpu")], ids="+".join)
def test_op_platform_is_that_of_the_lowering(platforms):
    op, values = xk.XLACustomKernel("where"), {"cpu": 1.0, "cuda": 2.0, "tpu": 3.0}
    for platform, value in values.items():
        op.def_kernel("jax", platform, add_to(value))
    text = jax.jit(call_op(op)).trace(VECTOR).lower(lowering_platforms=platforms).as_text()
    for platform, value in values.items():
        assert (f"dense<{value}" in text) == (platform in platforms)


# -- what a generator makes -----------------------------------------------------------------------------


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_generator_that_computes_with_jnp_on_a_mesh(axis_type):
    """What it makes serves on and off the mesh."""
    call = partial(op_with(lambda outs: partial(jnp.multiply, 2 * jnp.ones(4))), outs=lambda x: spec(*x.shape))
    np.testing.assert_array_equal(call(jnp.ones((2, 4))), np.full((2, 4), 2))
    for n_devices in (4, 2):
        mesh = jax.make_mesh((n_devices,), ("i",), axis_types=(axis_type,))
        x = jax.device_put(np.ones((8, 4), np.float32), jax.sharding.NamedSharding(mesh, P("i")))
        split = jax.shard_map(call, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        with jax.set_mesh(mesh):
            for f in (split, jax.jit(split), jax.jit(call)):
                np.testing.assert_array_equal(f(x), np.full((8, 4), 2))


def test_an_op_calls_a_generator_once_for_its_parameters():
    """Also if that computes with jnp, under jit: it gets arrays, which serve the next trace, too."""
    made = []
    op = xk.XLACustomKernel("counted")

    @op.def_numba_kernel
    def generator(outs, power):
        made.append((outs[0].shape, power))
        factors = np.asarray(jnp.full(outs[0].shape, 2.0) ** power)
        return wrap(lambda x: factors * x)

    for power in (1, 2, 1, 2):
        jax.clear_caches()
        call = partial(op, outs=like_first, power=power)
        for transform in (jax.jit, itself, jax.vmap):
            x = jnp.ones((4, 3) if transform is jax.vmap else 3)
            np.testing.assert_array_equal(transform(call)(x), 2.0**power * x)
    assert made == [((3,), 1), ((3,), 2)]
    op.def_numba_kernel(generator)
    op(jnp.ones(3), outs=like_first, power=1)
    assert len(made) == 3


# -- ready kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel, options", [
    (wrap(numba_multiply), {}),
    (lambda outs: numba_multiply, {}),  # a generator of a dispatcher
    (numba.njit(runs("out[:] *= y", "x, y, out")), {"input_output_aliases": {0: 0}}),
    (numba.guvectorize("(n),(n)->(n)")(numba_multiply.py_func), {}),
], ids=["wrapper", "generator", "in place", "guvectorize"])  # fmt: skip
def test_op_takes_ready_kernels(kernel, options):
    op = xk.XLACustomKernel("multiply")
    assert op.def_numba_kernel(**options)(kernel) is kernel
    check_close(op(VECTOR, WEIGHTS, outs=[spec(8)])[0], VECTOR * WEIGHTS)


# -- derivatives, and rules of one's own for batches ---------------------------------------------------


def like_sine_and_signs(x, n):
    return {"sine": x, "times_sign": spec(*x.shape, dtype=np.int32)}


def sine_and_signs(x, n, a):
    """Two outputs of two dtypes: sin(a x) and, as integers, n times the signs."""
    return {"sine": jnp.sin(a * x), "times_sign": jnp.sign(x).astype(np.int32) * n}


def define_jvp_rules_by_operand(op):
    """A tangent of integers, which have none, counts as None."""
    op.def_jvp_rule2(lambda t, x, n, a: [a * jnp.cos(a * x) * t, 0 * n], None)


def define_vjp_rule(op):
    """It gets and returns what has the structure of outs; the cotangent of an integer may be JAX's own of no bits."""

    def forward(x, n, a):
        return op(x, n, outs=like_sine_and_signs, a=a), x

    def backward(x, cotangents, a):
        return a * jnp.cos(a * x) * cotangents["sine"], np.zeros((), jax.dtypes.float0)

    op.def_vjp_rule(forward, backward)


@pytest.mark.parametrize("define_rule", [define_jvp_rules_by_operand, define_vjp_rule])
def test_op_derivative_rules_with_integers(define_rule):
    op = op_of(sine_and_signs)
    define_rule(op)

    def sine(x, n):
        return op(x, n, outs=like_sine_and_signs, a=2.0)["sine"]

    batch = jax.vmap(sine, (0, None))
    slopes, nothing = jax.grad(sum_of(batch), (0, 1), allow_int=True)(ROWS, 3)
    check_close(slopes, 2 * np.cos(2 * ROWS))
    assert nothing.dtype == jax.dtypes.float0
    curvature = jax.jit(jax.grad(sum_of(jax.grad(sum_of(batch)))))(ROWS, 3)
    check_close(curvature, -4 * np.sin(2 * ROWS), tolerance=2e-5)


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
    check_close(jax.grad(lambda x: product_with_weights(product_with_weights(x)).sum())(ROWS), np.zeros_like(ROWS))
    assert seen == ["x", "x", "transpose"]


@pytest.mark.parametrize("outs_of", [lambda x: x, lambda x: {"x": x}])
def test_op_takes_an_operand_without_value_as_outs(outs_of):
    """In rules JAX gives an operand that the op is linear in, and a tangent that is zero, by type alone."""
    op = op_of(lambda x, y: jax.tree.map(lambda x: x * y, outs_of(x)))

    def multiply(x, y, like):
        return jax.tree.leaves(op(x, y, outs=outs_of(like)))

    op.def_jvp_rule(lambda primals, tangents: (multiply(*primals, primals[0]), multiply(primals[0], *tangents[::-1])))
    op.def_transpose_rule(lambda cts, x, y: [None, *multiply(x, cts[0], y)])
    weighted = partial(op, WEIGHTS, outs=like_first)
    for f in (lambda y: weighted(y).sum(), lambda y: jax.vmap(weighted)(jnp.stack([y, y])).sum() / 2):
        check_close(jax.grad(f)(VECTOR), WEIGHTS)


RULE_ERRORS = {  # the method that defines a rule of the product, its arguments, and what the error says
    "jvps: too few": ("def_jvp_rule2", [None], "1 jvp rules for 2 operands"),
    "jvp: dtype": (
        "def_jvp_rule",
        [lambda x, t: (x[:1], [t[0].astype(int)])],
        "(int32[8]), but the outputs are (float32[8])",
    ),
    "transpose": ("def_transpose_rule", [lambda cts, x, y: cts], "but the operands are (None, float32[8])"),
    "vjp: no residuals": ("def_vjp_rule", [lambda x, y: x * y, lambda y, ct: (ct, ct)], "return (results, residuals)"),
    "vjp: dict": ("def_vjp_rule", [lambda x, y: (x, y), lambda y, ct: {"x": ct}], "return a tuple"),
    "batch: no axis": (
        "def_batching_rule",
        [lambda args, axes: (args[:1], [None])],
        "(float32[3,3,8]), but outs, with the batch in front",
    ),
    "batch: no such axis": ("def_batching_rule", [lambda args, axes: (args[:1], [2])], "axis 2 is out of bounds"),
    "batch: too few axes": ("def_batching_rule", [lambda args, axes: (args[:1], [])], "two sequences of one length"),
    "batch: too many axes": (
        "def_batching_rule",
        [lambda args, axes: (args[:1], [0, 0])],
        "two sequences of one length",
    ),
    "batch: no sequences": ("def_batching_rule", [lambda args, axes: (args[0], 0)], "two sequences"),
}


@pytest.mark.parametrize("case", RULE_ERRORS)
def test_op_rule_errors(case):
    """Rules of derivatives are for one slice."""
    method, args, text = RULE_ERRORS[case]
    op = product_op()
    getattr(op, method)(*args)
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        jax.make_jaxpr(jax.grad(sum_of(jax.vmap(call_op(op))), (0, 1)))(ROWS, ROWS)


def test_op_newest_rules_reach_warm_functions():
    op = op_adding(a=1)
    derivative = jax.jit(jax.grad(call_op(op)))
    of_batch = jax.jit(jax.vmap(lambda x: op.primitive.bind(x, outs=(spec(),))[0]))  # also if bound by hand
    for value in (2, 3):  # by rules that hold no call of the op
        op.def_jvp_rule(lambda primals, tangents, value=value: (primals, [value * tangents[0]]))
        assert derivative(0.0) == value
        op.def_vjp_rule(lambda x: (x, None), lambda residuals, ct, value=value: -value * ct)
        assert derivative(0.0) == -value
        op.def_batching_rule(lambda args, axes, value=value: ([value * args[0]], axes))
        assert of_batch(jnp.ones(1)) == value


def test_defjvp_and_general_batching_take_a_primitive_of_someone_else():
    square_p = Primitive("square")
    square_p.def_impl(jnp.square)
    square_p.def_abstract_eval(like_first)
    mlir.register_lowering(square_p, mlir.lower_fun(jnp.square, multiple_results=False))
    batching.primitive_batchers[square_p] = partial(xk.general_batching_rule, square_p)
    xk.defjvp(square_p, lambda t, x: 2 * x * t)
    check_close(jax.jvp(square_p.bind, (VECTOR,), (WEIGHTS,)), (VECTOR**2, 2 * VECTOR * WEIGHTS))
    check_close(jax.vmap(square_p.bind, 1)(ROWS.T), ROWS**2)


@pytest.mark.parametrize("outs", [like_first, [spec(8)], {"sum": spec(8)}])
def test_op_general_batching_of_a_batch_or_of_none(outs):
    op = op_with(lambda: lambda x: {"sum": x + 1} if isinstance(outs, dict) else x + 1)
    structure = jax.tree.structure(outs(spec(8)) if callable(outs) else outs)
    for primitive, (x, axis) in itertools.product((op, op.primitive), ((VECTOR, None), (ROWS, 0))):
        result, axes = xk.general_batching_rule(primitive, (x,), (axis,), outs=outs)
        check_close(result, structure.unflatten([x + 1]))
        assert axes == structure.unflatten([axis])


def spike_op(batching_rule=None):
    """Passes y where x > 0, with a surrogate derivative by x: y."""
    op = op_of(lambda x, y: jnp.where(x > 0, y, 0))
    spike = call_op(op)
    op.def_jvp_rule2(lambda t, x, y: t * y, lambda t, x, y: spike(x, t))
    op.def_transpose_rule(lambda cts, x, y: [None, spike(x, cts[0])])
    if batching_rule:
        op.def_batching_rule(batching_rule)
    return spike


def with_axis_at_the_end(args, axes, outs):
    x, y = [jnp.moveaxis(arg, axis, 0) for arg, axis in zip(args, axes)]
    return [jnp.where(x > 0, y, 0).T], [-1]


@pytest.mark.parametrize("batch", [  # of a function of vectors, and of stacks of two by three
    lambda f, x, y: jax.vmap(f, (1, 0))(x[0].T, y[0]),
    lambda f, x, y: jax.vmap(jax.vmap(f))(x, y),
])  # fmt: skip
def test_op_with_a_batching_rule_keeps_its_derivatives(batch):
    """What the rule runs has others."""
    x = np.stack([ROWS - 4, 3 - ROWS])
    y = np.stack([ROWS, 2 * ROWS])

    def derivatives(op):
        f = partial(batch, op)
        return jax.jvp(f, (x, y), (y, x)), jax.grad(lambda *operands: (f(*operands) ** 2).sum(), (0, 1))(x, y)

    check_close(*jax.jit(lambda: (derivatives(spike_op(with_axis_at_the_end)), derivatives(spike_op())))())


def test_op_batching_rule_runs_beside_derivatives_until_the_general_one_is_registered_again():
    """Its axes may count from the end."""
    op, with_derivative = op_adding(a=1), op_adding(a=1)
    with_derivative.def_jvp_rule2(lambda t, x: t)
    for each in (op, with_derivative):
        each.def_batching_rule(lambda args, axes: ([args[0].T + 2], [-1]))
        for added in (2, 1):
            check_close(jax.vmap(call_op(each))(ROWS), ROWS + added)
            each.register_general_batching()


def test_op_without_derivative_rules_has_those_of_what_its_batching_rule_runs():
    op = op_of(lambda x: x**2)
    op.def_batching_rule(lambda args, axes: ([args[0] ** 2], axes))
    check_close(jax.grad(lambda x: jax.vmap(call_op(op))(x).sum())(ROWS), 2 * ROWS)


# -- debugging and timing ------------------------------------------------------------------------------


def test_debug_nans():
    """Also of what is bound to arrays by hand."""
    kernel = wrap(runs("out[:] = np.log(x)"))
    op = op_of(kernel)

    def bind(x):
        return op.primitive.bind(x, outs=(spec(2),))[0]

    for log in (call_op(op), bind, jax.disable_jit()(kernel)):
        with jax.debug_nans(True):
            check_close(log(jnp.ones(2)), [0, 0])
            with pytest.raises(FloatingPointError):
                log(-jnp.ones(2))


def test_op_benchmark_compares_backends():
    op = op_adding(a=1, b=np.nan, c=1.5)
    op.def_kernel("bad", "cpu", raise_key_error)
    op.def_kernel("far", "gpu", add_to(1))
    result = op.benchmark(VECTOR, outs=like_first)
    a, b, c, bad = result.rows
    assert (a.difference, c.difference) == (0, 0.5) and np.isnan(b.difference)  # from a
    assert a.first_ms > 0 and a.median_us > 0 and not a.error
    assert np.isnan(bad.first_ms) and "KeyError" in bad.error
    (chosen,) = op.benchmark(VECTOR, outs=like_first, backend="c").rows
    assert chosen.backend == "c" and chosen.difference == 0
    assert op_adding(a=np.nan, b=np.nan).benchmark(VECTOR, outs=like_first).rows[1].difference == 0
    calls = itertools.count(1)
    failing = op_with(lambda: lambda x: jax.pure_callback(lambda x: 1 / (3 - next(calls)) + x, x, x))
    assert failing.benchmark(VECTOR, outs=like_first).rows[0].error and next(calls) > 3
    table = r"backend .*\na .*\d  0\nb .*\d  nan\nc .*\d  0.5\nbad .*nan  .*KeyError.*"
    assert re.fullmatch(table, str(result))


# ======================================================================================================
# Over several devices: XLA splits a batch over a mesh itself; a kernel's own dimensions are gathered
# ======================================================================================================


@xk.numba_kernel(outs=like_first)
def running_product(x, y, out):
    total = 0.0
    for i in range(x.size):
        total += x[i]
        out[i] = total * y[i]


@xk.numba_kernel(outs=like_first)
def matvec(x, w, out):
    for i in range(x.size):
        total = 0.0
        for j in range(x.size):
            total += w[i, j] * x[j]
        out[i] = total


@xk.numba_kernel(
    outs=lambda total, x: (total, spec(dtype=np.int32)), input_output_aliases={0: 0}, scratch=lambda total, x: x
)
def added_to(total, x, out, count, work):
    for i in range(x.size):
        work[i] = out[i] + x[i]
        out[i] = work[i]
    count[()] = x.size


AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


def four_devices(*shape, axis_type=AUTO):
    """A mesh: a row of them, "d", or two by two, "d" and "e"."""
    devices = np.array(jax.devices()[:4]).reshape(shape)
    return jax.sharding.Mesh(devices, ("d", "e")[: len(shape)], axis_types=(axis_type,) * len(shape))


def on_mesh(x, *axes, mesh=None):
    """An array on four devices, by default in a row, split over these axes of their mesh."""
    return jax.device_put(x, jax.sharding.NamedSharding(mesh or four_devices(4), P(*axes)))


COLLECTIVES = re.compile(r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")


X86, W66, X846 = [  # named by their shapes
    np.random.default_rng(0).random(shape, np.float32) for shape in ((8, 6), (6, 6), (8, 4, 6))
]
matvecs = jax.vmap(matvec, (0, None))
matvecs_of_blocks = jax.vmap(matvecs, (0, None))


def all_matvecs(rows):
    return rows @ W66.T


def over_d(x, w):
    return jax.shard_map(
        matvecs_of_blocks, mesh=four_devices(2, 2), in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"}
    )(x, w)


def sum_of_corners(x, y, z):
    """Of operands of different ranks, of which the second is not batched."""
    add = wrap(runs("for i in range(3): out[i] = x[()] + y[0, 0, 0] + i * z[0]", "x, y, z, out"), spec(3))
    return jax.vmap(add, (0, None, 0))(x, y, z)


multiply_in_op = call_op(product_op("numba"))


def of_parts(x, y):
    """A device has a half of a slice."""
    return jax.vmap(multiply_in_op)(x.reshape(2, 4), y.reshape(2, 4)).ravel()


def gradient_of_squares(x, y):
    return jax.grad(lambda x: (jax.vmap(multiply_in_op, (0, None))(x, y) ** 2).sum())(x)


XS, YS = X846[:2, :, :4]
SPLIT_PROGRAMS = [  # a function, its arrays with the axes that their dimensions are split over, and what is right
    (over_d, [(X846, "d", "e"), (W66,)], all_matvecs(X846)),
    (jax.vmap(jax.vmap(running_product), (0, None)), [(X846, "d"), (X846[0],)], X846.cumsum(2) * X846[0]),
    (jax.vmap(added_to), [(X86, "d"), (X86, "d")], (2 * X86, np.full(8, 6, np.int32))),
    (lambda x, w: (matvecs(x[:7], w), x), [(X86,), (W66,)], (all_matvecs(X86[:7]), X86)),
    (sum_of_corners, [(X86[:, 0], "d"), (X846[:2],), (X86, "d")],
     X86[:, :1] + X846[0, 0, 0] + np.arange(3, dtype=np.float32) * X86[:, :1]),
    (jax.vmap(jax.vmap(multiply_in_op, (None, 0)), (0, None)), [(XS, "d"), (YS, "e")], XS[:, None] * YS),
]  # fmt: skip
SPLIT_EXPLICITLY = [
    (jax.vmap(jax.vmap(multiply_in_op, (0, None))), [(X846, None, ("e", "d")), (X846[:, 0],)], X846 * X846[:, :1]),
    (gradient_of_squares, [(XS, "d"), (YS[0],)], 2 * XS * YS[0] ** 2),
]  # fmt: skip
GATHERED = [  # by XLA; with explicit axes JAX refuses it
    (multiply_in_op, [(X86[:, 0], "d"), (X86[:, 1], "d")], X86[:, 0] * X86[:, 1]),
    (of_parts, [(X846[0, :, :].ravel()[:8], ("d", "e"))] * 2, X846[0, :, :].ravel()[:8] ** 2),
]  # fmt: skip


@pytest.mark.parametrize("function, operands, expected, axis_type, moves", [
    *((*row, AUTO, False) for row in SPLIT_PROGRAMS),
    *((*row, EXPLICIT, False) for row in SPLIT_EXPLICITLY),
    *((*row, AUTO, True) for row in GATHERED),
])  # fmt: skip
def test_xla_splits_a_batch(function, operands, expected, axis_type, moves):
    """With aliases, scratch and shared operands; nothing moves between devices, unless a slice is split."""
    mesh = four_devices(2, 2, axis_type=axis_type)
    args = [on_mesh(x, *axes, mesh=mesh) for x, *axes in operands]
    executable = jax.jit(function).lower(*args).compile()
    check_close(executable(*args), expected)
    assert bool(COLLECTIVES.search(executable.as_text())) == moves


def over_axis(f, axis, **mesh):
    """`f` in a shard_map over one axis of the mesh alone."""
    return jax.shard_map(f, in_specs=P(axis), out_specs=P(axis), axis_names={axis}, **mesh)


def test_side_effects_need_a_sharding_that_says_where():
    two_by_two = four_devices(2, 2)
    add_aloud = wrap(runs("print('slice'); out[:] = x + 1"), has_side_effect=True)
    over_half_a_mesh = over_axis(add_aloud, "d", mesh=two_by_two)
    with pytest.raises(NotImplementedError, match="shard_map"):
        jax.jit(over_half_a_mesh)(XS)
    over_both = over_axis(over_axis(add_aloud, "e"), "d", mesh=two_by_two)
    check_close(jax.jit(over_both)(XS), XS + 1)


def test_donation_of_what_is_sharded():
    kernel = runs("work[:] = out * y; out[:] = work", "x, y, out, work")
    multiply = jax.vmap(wrap(kernel, input_output_aliases={0: 0}, scratch=like_first))
    x = jax.jit(jnp.negative)(on_mesh(XS, "d"))  # no view of NumPy's memory
    before = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    products = jax.jit(multiply, donate_argnums=0)(x, on_mesh(YS, "d"))
    assert [shard.data.unsafe_buffer_pointer() for shard in products.addressable_shards] == before
    check_close(products, -XS * YS)


@pytest.mark.parametrize("define_derivative", [Hadamard.differentiate, define_backward_pass])
@pytest.mark.parametrize("x_axes, y_axes", [(("d",), ()), ((), ("d",))])
def test_op_on_a_mesh_of_explicit_axes(x_axes, y_axes, define_derivative):
    """Also where its operands are split differently."""
    multiply = call_op(product_op("jax", define_derivative))
    with jax.set_mesh(four_devices(4, axis_type=EXPLICIT)):
        x, y = jax.device_put(VECTOR, P(*x_axes)), jax.device_put(WEIGHTS, P(*y_axes))
        check_close(jax.jit(multiply)(x, y), VECTOR * WEIGHTS)
        x_gradient, y_gradient = jax.jit(jax.grad(sum_of(multiply), (0, 1)))(x, y)
        check_close(x_gradient, WEIGHTS)
        check_close(y_gradient, VECTOR)


# ======================================================================================================
# What is inside the file and may change with it
# ======================================================================================================


def fields_in_header(text, name):
    """(name, bytes) of every field of a struct."""
    body = re.search(rf"struct {name} \{{(.*?)\}}", text, re.DOTALL)[1]
    fields = []
    for declaration in body.split(";")[:-1]:
        *kind, field = re.findall(r"\w+|\*", declaration)
        is_word = set(kind) & {"*", "size_t", "int64_t", "_XLA_FFI_API_STRUCT_FIELD"}
        struct_or_enum = getattr(xk, kind[-1], ctypes.c_int32)
        fields.append((field, 8 if is_word else ctypes.sizeof(struct_or_enum)))
    return fields


IN_JAXLIB_0_9 = {  # what has another name there
    "XLA_FFI_InternalExtension": "XLA_FFI_Extension_Base",
    "XLA_FFI_Error_GetDetails": "XLA_FFI_Error_GetMessage",
    "XLA_FFI_InvokeContext_Get": "XLA_FFI_ExecutionContext_Get",
}


def test_mirrored_structs_equal_the_header():
    """Which may have more fields at the end of a struct."""
    path = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    for name, older in IN_JAXLIB_0_9.items():
        text = text if name in text else text.replace(older, name)
    structs = [value for name, value in vars(xk).items() if name.startswith("XLA_FFI_") and isinstance(value, type)]
    assert len(structs) == 17
    for struct in structs:
        fields = [(name, ctypes.sizeof(kind)) for name, kind in struct._fields_]
        assert fields == fields_in_header(text, struct.__name__)[: len(fields)]


@pytest.mark.parametrize("vmap_method, n_launches", [(None, 1), ("sequential", 4)])
def test_fakecuda_all_is_compiled_when_a_call_is_traced(gpus, package_cuda, monkeypatch, vmap_method, n_launches):
    """Under the name that exported programs call; a batch, which has the same handler, reads no globals anew."""
    monkeypatch.setattr(xk, "_traced_platform", lambda: "cuda")
    name = f"exported.{package_cuda.__name__}.{vmap_method}"
    op = own_op(package_cuda, name=name, vmap_method=vmap_method)
    jax.eval_shape(op, FLOATS)
    names = [target for target in gpus.handlers if target.startswith(name)]
    jax.eval_shape(jax.vmap(op), spec(4, 3))
    assert [target for target in gpus.handlers if target.startswith(name)] == names and len(names) == 1
    assert len(gpus.launches(jax.vmap(op), jnp.ones((4, 3)))) == n_launches


# ======================================================================================================
# Processes: what only a process of its own can show.  Those of one kind run in one, as it takes 3 s to start
# ======================================================================================================

LIFE_OF_A_PROCESS = """
    import importlib, multiprocessing

    def check(module=xk):
        new = module.numba_kernel(add_one.__wrapped__, like_first)
        assert held(ones)[3] == jax.vmap(new)(ones[None])[0, 3] == 2

    held = jax.jit(add_one)
    jax.eval_shape(add_one, ones)  # registered before JAX has a backend
    if hasattr(os, "fork"):
        child = multiprocessing.get_context("fork").Process(target=check)
        child.start()
        child.join()
        assert child.exitcode == 0, "the forked process"
    check()
    jitted = numba.njit(add_one.__wrapped__)
    for module in (xk, importlib.reload(xk)):  # named kernels are the same then
        check(module)
        for name, kernel in (("plain", add_one.__wrapped__), ("jitted", jitted)):
            assert module.numba_kernel(kernel, like_first, name=name)(ones)[0] == 2
    """
SHARED_BATCHES = """
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

    pmapped(x, y)  # the first call by one thread: JAX's own cache of pmap (0.9) fails where several trace it at once
    in_threads(work, [10] * 16)

    whole, split = [jax.sharding.NamedSharding(mesh, P(*axes)) for axes in ((), "i")]
    kernel = jax.vmap(wrap(runs("if x[0] > 8: raise ValueError('too large')\\n    out[0] = x[0]")))
    of_seven = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * kernel(x[:7]), whole), in_shardings=split)
    slices = jax.device_put(np.arange(8, dtype=np.float32)[:, None], split)
    assert of_seven(slices)[6] == 12
    assert "too large" in error_of(of_seven, 2 * slices)
    running = [pmapped(x + i, y) for i in range(100)]  # when the process ends
    """


@pytest.mark.processes
def test_the_life_of_a_process_and_batches_of_many_callers_on_many_devices():
    """A fork, a late start of the backend, a reload.  Then 16 callers of 8 devices share XLA's threads, which none may
    wait for; ten rounds find a lost wake-up.  Nor is there one for each of seven slices."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    run_code(textwrap.dedent(LIFE_OF_A_PROCESS) + textwrap.dedent(SHARED_BATCHES), **flags)


SUBNORMAL = """
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
    kernel = wrap(halve)
    assert np.asarray(jax.pmap(kernel)(np.stack([tiny] * 4))).all()  # XLA's threads start Numba's
    assert np.asarray(kernel(tiny)).all() and by_numba().all()
    assert "nan" in error_of(kernel, tiny * np.nan) and by_numba().all()
    by_kernel, by_xla = map(np.asarray, jax.jit(lambda x: (kernel(x), x * np.float32(0.5)))(tiny))
    assert by_kernel.all() and not by_xla.any()  # XLA goes on as before
    """
WORKQUEUE = """
    @numba.njit(parallel=True)
    def direct(x, out):
        for i in numba.prange(x.size):
            out[i] = x[i] + 1
        if x[0] < 0:
            raise ValueError("negative")

    def through_helper(x, out):
        direct(x, out)

    wrap(runs("out[0] = x[0]"))(ones)  # of the same signature, but without a lock

    def work(kernel):
        f = wrap(kernel)
        for i in range(50 if kernel is direct else 3):
            assert "negative" in error_of(f, -ones)
            assert (jax.pmap(f)(np.ones((4, 1000), np.float32)) == 2).all()

    in_threads(work, [direct, through_helper] * 3)
    """


@pytest.mark.processes
@pytest.mark.parametrize("layer", ["workqueue", pytest.param("omp", marks=pytest.mark.needs("glibc"))])
def test_parallel_kernels_in_each_threading_layer(layer):
    """XLA's threads take subnormal numbers for 0, and Numba's inherit that from the thread that starts them.

    And Numba's workqueue aborts a process in which two threads enter it.
    """
    has_floats = hasattr(ctypes.pythonapi, "gnu_get_libc_version")  # the mode of floats is of glibc
    parts = [SUBNORMAL] * has_floats + [WORKQUEUE] * (layer == "workqueue")
    run_code("\n".join(map(textwrap.dedent, parts)), NUMBA_THREADING_LAYER=layer)


CACHED = """
    import numba, numpy as np

    @numba.njit(cache=True)
    def copy(x, out):
        for i in range(x.size):
            out[i] = x[i]

    @numba.njit(cache=True)
    def by_a_helper(x, out):
        copy(x, out)

    @numba.njit(cache=True, parallel=True)
    def in_parallel(x, out):
        for i in numba.prange(x.size):
            out[i] = 2 * x[i]

    @numba.njit(cache=True)
    def multiplies(A, x, out):
        copy(A @ x, out)

    @numba.njit(cache=True)
    def writes(x, out):
        x.flat[0] = 7
        copy(x, out)
    """
CACHED_BY_NUMBA = """
    from numba.core.event import install_recorder
    import cached

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
    scaled = wrap(runs(f"out[0] = {sys.argv[1]} * x[0]"), name="scaled")
    print("scaled", jax.jit(lambda x: jax.vmap(scaled)(x))(ones[None])[0, 0], "found:", any(hits))

    A = np.ones((1000, 1000), np.float32)
    with install_recorder("numba:compile") as recorder:
        print("multiplies", wrap(cached.multiplies, lambda A, x: x)(A, A[0])[0])
        for name in ("by_a_helper", "in_parallel"):
            print(name, *wrap(getattr(cached, name))(ones))
    print("compiled:", len(recorder.buffer) > 0)
    with pytest.raises(TypeError, match="in_out_argnames"):
        wrap(cached.writes)(ones)
    """
OF_CACHED = "multiplies 1000.0\nby_a_helper 1.0 1.0 1.0 1.0\nin_parallel 2.0 2.0 2.0 2.0"


@pytest.mark.processes
def test_a_second_process_compiles_no_kernel_that_numba_caches(tmp_path):
    """And refuses the same, though what Numba loads does not say what is in it.

    Programs that JAX keeps run the kernels of their process.
    """
    (tmp_path / "cached.py").write_text(textwrap.dedent(CACHED))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    for factor, is_first in ((2, True), (3, False)):
        environment = {"PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
        output = run_code(CACHED_BY_NUMBA, factor, **environment)
        assert output == f"scaled {factor}.0 found: {not is_first}\n{OF_CACHED}\ncompiled: {is_first}\n"


@pytest.mark.processes
@pytest.mark.needs("linux", "compiler", "real driver", "no gpu", "gcc", "cuda package")
def test_cuda_fake_driver(tmp_path):
    """Runs the tests below with the fake driver, on PTX of the packages that are here."""
    (tmp_path / "fake.c").write_text(FAKE_DRIVER)
    flags = "-shared -fPIC -w -Wl,-soname,libcuda.so.1 -o libcuda.so.1 fake.c -ldl".split()
    subprocess.run(["gcc", *flags], cwd=tmp_path, check=True)
    environment = {
        "JAX_PLATFORMS": "cpu",
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "NUMBA_CUDA_DRIVER": str(tmp_path / "libcuda.so.1"),
        "XLA_KERNELS_FAKE_CUDA": "1",
    }
    outcomes = outcomes_elsewhere("test_fakecuda", tmp_path, **environment)
    assert set(outcomes.values()) == {"passed"} | skips_for("numba-cuda", "numba-cuda-mlir")


# -- the simulator, what is imported, the self-check ----------------------------------------------------


ROOT = pathlib.Path(__file__).parent


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


def program_of(function):
    """The body of a function of one line of head, as the text of a program."""
    _, _, body = inspect.getsource(function).partition(":\n")
    return textwrap.dedent(body)


def outcomes_elsewhere(tests, folder, **environment):
    """{test: "passed", or why it was skipped} of those that `-k tests` selects, in a process with this environment, in
    which none may fail."""
    path = folder / "outcomes"
    options = ["-p", "no:cacheprovider", f"--outcomes-out={path}"]
    run_python("-m", "pytest", "-q", __file__, "-k", tests, *options, **environment)
    return json.loads(path.read_text())


def skips_for(*requirements):
    """Why tests that need these are skipped here: nothing where all are there."""
    return {f"{name}: {conftest.missing(name)}" for name in requirements if conftest.missing(name)}


# What XLA does with a call is the same on the CPU.  So the simulator runs cells that differ in what CUDA is called
# with: every operation and dtype alone and batched, and two operations under the other transformations.
IN_SIMULATOR = (
    "test_on_cuda or test_cudasim or (test_docstring and cuda)"
    " or (test_matrix and numba_cuda and (-eager- or -vmap-float32 or blend or hadamard-numba_cuda-)"
    " and not (grad or checkpoint or eager_shard_map))"
)


@pytest.mark.processes
@pytest.mark.needs("compiler")
def test_cuda_simulator(tmp_path, record_property):
    """What needs a device, in the simulator, which Numba decides on when it is imported."""
    outcomes = outcomes_elsewhere(IN_SIMULATOR, tmp_path, NUMBA_ENABLE_CUDASIM="1", JAX_PLATFORMS="cpu")
    assert set(outcomes.values()) == {"passed"}
    cells = [re.findall(r"\w+", name)[1:] for name in outcomes if name.startswith("test_matrix")]
    assert {(op, backend) for op, backend, *_ in cells} == set(itertools.product(OPS, in_language("cuda")))
    record_property("simulated", cells)


def load_backends_on_use():
    import sys

    import jax.numpy as jnp

    import xla_kernels

    def loaded():
        return sorted({"numba", "warp", "llvmlite", "cuda"} & sys.modules.keys())

    def kernel(x, out):
        for i in range(x.size):
            out[i] = x[i]

    xla_kernels.XLACustomKernel("op").def_warp_kernel(kernel)
    print(loaded())
    call = xla_kernels.numba_kernel(kernel, lambda x: x)
    sys.modules["numba"] = None  # cannot be imported
    try:
        call(jnp.ones(3))
    except ImportError as error:
        print(error)
    del sys.modules["numba"]
    print(call(jnp.ones(3)), loaded())


@pytest.mark.processes
def test_backends_load_on_use_and_a_missing_one_is_explained():
    at_import, error, after_use = run_python("-c", program_of(load_backends_on_use)).splitlines()
    assert at_import == "[]"
    assert re.fullmatch(r"numba_kernel needs numba \(.*None in sys.modules\); install it: pip install numba.*", error)
    assert after_use == "[1. 1. 1.] ['llvmlite', 'numba']"


WORKS = r"works, [\d.]+ µs per call under jit"


@pytest.mark.processes
@pytest.mark.parametrize("args, rc", [(["my_kernels.py"], 0), (["-m", "my_kernels"], 1)], ids=["right", "broken"])
def test_self_check_of_the_file_alone(args, rc, tmp_path):
    """Under another name, in an empty folder, or beside a file that takes Warp's place."""
    shutil.copy(ROOT / "xla_kernels.py", tmp_path / "my_kernels.py")
    warp_says = "not available: " if conftest.missing("warp") else WORKS
    if rc:
        (tmp_path / "warp.py").touch()
        warp_says = "FAILED: "
    report = run_python(*args, cwd=tmp_path, rc=rc, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert re.search(f"^numba +cpu +{WORKS}", report, re.MULTILINE), report
    assert re.search(f"^warp +cpu +{warp_says}", report, re.MULTILINE), report


# ======================================================================================================
# conftest.py: what is missing, what is required, and the grid
# ======================================================================================================

TWO_TESTS = """
    import pytest

    @pytest.mark.needs("warp")
    def test_of_warp(): pass

    def test_of_nothing(): pass
"""
A_MATRIX = """
    import itertools
    import pytest

    def possible_cells():
        yield from itertools.product(["add", "lif"], ["numba", "warp"], ["jit", "vmap"], ["float32"])
        yield from itertools.product(["lif"], ["numba", "warp"], ["jit"], ["int8"])

    def left_out(op, backend, transformation, dtype):
        return "no such lif" if op == "lif" and (transformation == "vmap" or backend == "warp") else None

    @pytest.mark.parametrize("op, backend, transformation, dtype", [c for c in possible_cells() if not left_out(*c)])
    def test_matrix(op, backend, transformation, dtype, record_property):
        if backend == "warp":
            pytest.skip("no Warp")
        record_property("simulated", [("add", "warp", "jit", "float32")])
        assert dtype != "int8"
"""


@pytest.fixture
def run_tests(pytester, monkeypatch):
    """A function that runs a test file with this conftest, where Warp is missing."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(conftest, "missing", {"warp": "warp is not installed"}.get)
    shutil.copy(ROOT / "pyproject.toml", pytester.path)

    def run(source, *options):
        pytester.makepyfile(source)
        always = ["-p", "no:cacheprovider", "-o", "testpaths=."]
        with warnings.catch_warnings(action="ignore"):  # argparse of Python 3.12.1 warns of pytest's use
            return pytester.runpytest_inprocess(*always, *options, plugins=[conftest])

    return run


def test_conftest_what_is_missing_is_skipped_with_the_reason(run_tests, pytester):
    """Which the outcomes say, too."""
    result = run_tests(TWO_TESTS, "--outcomes-out=outcomes")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["skipped: warp (warp is not installed)", "SKIPPED * warp: warp is not installed"])
    outcomes = json.loads((pytester.path / "outcomes").read_text())
    assert outcomes == {"test_of_nothing": "passed", "test_of_warp": "warp: warp is not installed"}


def test_conftest_what_is_required_fails(run_tests):
    result = run_tests(TWO_TESTS, "--require=numba,warp")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*--require=warp: warp is not installed"])


def test_conftest_grid(run_tests, pytester):
    """What passed, failed, was skipped, was simulated, was not selected or is no cell is told apart, in every table."""
    result = run_tests(A_MATRIX, "--grid-out=grid.md", "-k", "not numba-vmap")
    grid = """
    float32  numba  warp
    add      1 1-   1a 1s
    lif      1 1.   2.

    float32  numba  warp
    jit      2      1. 1s
    vmap     1- 1.  1. 1a

    dtype    numba     warp
    float32  2 1- 1.   2. 1a 1s
    int8     1 FAILED  1.

    FAILED: lif-numba-jit-int8
    3: passed; 3s: on Numba's simulator of CUDA; 3-: not run
    3a: skipped: no Warp
    4.: left out: no such lif
    """
    result.stdout.fnmatch_lines(textwrap.dedent(grid).split("\n")[1:-1], consecutive=True)
    assert textwrap.dedent(grid) in (pytester.path / "grid.md").read_text()


# ======================================================================================================
# The package: its documents, docstrings and pictures
# ======================================================================================================

DOCUMENTS = (
    "README.md", ".github/EXAMPLES.md", ".github/BENCHMARK.md", ".github/CHANGELOG.md", ".github/CONTRIBUTING.md"
)  # fmt: skip
WITH_PROGRAMS = DOCUMENTS[:2]  # whose blocks of Python run


def text_of(document):
    return (ROOT / document).read_text(encoding="utf-8")


def blocks_of(document):
    """{(document, heading, number of the block below it): (code, what it prints)}.

    A block that does not begin with an import continues the last.  What a print gives is said by a comment at its end,
    or by a block of text below.
    """
    text, blocks, code = text_of(document), {}, ""
    fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
    assert not any(fences[1::2]) and set(fences[::2]) <= {"python", "text", "sh"}, f"{document}: a block is not closed"
    for section in text.split("\n## "):
        found = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", section, re.DOTALL)
        for number, (block, text) in enumerate(found):
            code = block if block.startswith("import") else code + block
            prints = "\n".join(re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)) + "\n" + text
            blocks[document, section.partition("\n")[0], number] = code, prints
    assert blocks, f"{document} has no block of Python"
    return blocks


BLOCKS = {name: block for document in WITH_PROGRAMS for name, block in blocks_of(document).items()}


def programs_with_needs():
    for name, (code, _) in BLOCKS.items():
        needed = ["numba"] + ["warp"] * ("warp as wp" in code) + ["cuda"] * ("import cuda" in code)
        yield pytest.param(name, marks=pytest.mark.needs(*needed), id="{} {} {}".format(*name))


def output_of_program(name):
    """The output of a documented program, which runs in an empty folder."""
    code, _ = BLOCKS[name]
    if cuda:  # the package that is installed, or the simulator
        code = code.replace("from numba_cuda_mlir import cuda", f"import {cuda.__name__} as cuda")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        path = pathlib.Path(folder, "block.py")
        path.write_text(code, encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(str(path), run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize("name", list(programs_with_needs()))
def test_documented_programs_print_what_is_written_there(name):
    code, prints = BLOCKS[name]
    if "scipy" in code:
        pytest.importorskip("scipy")
    assert output_of_program(name).split() == prints.split()


def docstring_examples():
    """Those of Warp need it; those of `numba.cuda` run in the simulator."""
    for examples in doctest.DocTestFinder().find(xk):
        source = "".join(example.source for example in examples.examples)
        if source:
            marks = [pytest.mark.needs("warp")] if re.search(r"\b(wp|warp)\b|_warp", source) else []
            marks += [pytest.mark.needs("simulator")] * ("import cuda" in source)
            yield pytest.param(examples, id=examples.name, marks=marks)


DOCSTRING_EXAMPLES = list(docstring_examples())
assert DOCSTRING_EXAMPLES, "no docstring has an example"


@pytest.mark.parametrize("examples", DOCSTRING_EXAMPLES)
def test_docstring_examples(examples):
    assert doctest.DocTestRunner().run(examples).failed == 0


PATHS_OF_TABLE = (  # the names in the picture of what README's columns show, in their order
    "numba_kernel", "warp_kernel", "C++ for XLA", "brainevent.numba_kernel", "warp.jax_kernel", "jax.pure_callback",
)  # fmt: skip


def test_the_picture_of_speed_has_the_figures_of_the_readmes_table():
    """Each beside the name of what it was measured of."""
    row = re.search(r"^\| add 16 elements, in `fori_loop` \|(.*)\|$", text_of("README.md"), re.MULTILINE)[1]
    figures_of_table = [float(cell) for cell in row.split("|") if cell.strip()]
    picture = ElementTree.parse(ROOT / ".github" / "speed.svg")
    texts = [(x.text, float(x.get("y"))) for x in picture.iter("{http://www.w3.org/2000/svg}text")]

    def figure_beside(path):
        height = dict(texts)[path]
        (figure,) = [text for text, y in texts if text != path and abs(y - height) < 5]
        return float(figure)

    assert list(map(figure_beside, PATHS_OF_TABLE)) == figures_of_table


def anchors_of(text):
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_link_what_there_is(document):
    links = re.findall(r"\]\(([^)]+)\)", text_of(document))
    for path, _, anchor in [link.partition("#") for link in links if not link.startswith("https://")]:
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.is_file(), path
        assert not anchor or anchor in anchors_of(target.read_text(encoding="utf-8")), anchor


def test_the_readme_names_all_that_is_public():
    section = text_of("README.md").partition("\n## What works where\n")[2].partition("\n## ")[0]
    assert set(xk.__all__) <= set(re.findall(r"`(\w+)", section))


def test_the_readmes_figures_are_those_of_the_benchmark():
    section = text_of("README.md").partition("\n## Benchmark\n")[2]
    rows = re.findall(r"^\|.*$", section, re.MULTILINE)
    assert len(rows) > 2 and "\n".join(rows) in text_of(".github/BENCHMARK.md")


def test_the_badge_of_python_names_the_classifiers():
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text_of("pyproject.toml"))
    assert f"Python: {' | '.join(classifiers)}" in text_of(".github/python.svg")
