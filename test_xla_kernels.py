"""Tests of xla_kernels: the matrix of operations, backends and transformations, and everything that broke elsewhere."""

import dataclasses
import doctest
import functools
import math
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.interpreters import ad

import xla_kernels as xk

try:
    from numba import cuda
except ImportError:
    cuda = None
try:
    import warp as wp
except ImportError:
    wp = None

if hasattr(jax, "shard_map"):
    shard_map = functools.partial(jax.shard_map, check_vma=True)
else:  # jax < 0.6
    from jax.experimental.shard_map import shard_map as old_shard_map

    shard_map = functools.partial(old_shard_map, check_rep=False)

# ======================================================================================================
# The matrix: every operation x backend x transformation
# ======================================================================================================


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation of the matrix: example inputs, what it should give, and its outputs' specs.

    `kernels` maps a backend to a generator for XLACustomKernel; one that is missing does not support the operation.
    """

    name: str
    inputs: Callable  # (rng, dtype) -> NumPy arrays; those of dtype float32 become `dtype`
    reference: Callable  # the same in JAX
    kernels: dict
    outs: Callable | None = None  # of the inputs; default: what the reference gives
    params: dict = dataclasses.field(default_factory=dict)
    dtypes: tuple = ("float32", "float64")
    scans: bool = False  # the first input can be replaced by the first output, again and again
    tolerance: float = 1e-5


def normal(*shapes):
    return lambda rng, dtype: [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def vector_and_spikes(n):
    return lambda rng, dtype: [rng.standard_normal(n).astype(dtype), rng.random(n) < 0.3]


def csr(rng, dtype, rows=12, columns=9):
    """data, indices, indptr of a random sparse matrix."""
    counts = rng.integers(0, 5, rows)
    indptr = np.r_[0, counts.cumsum()].astype(np.int32)
    indices = np.concatenate([rng.choice(columns, n, replace=False) for n in counts] or [[]]).astype(np.int32)
    return [rng.standard_normal(len(indices)).astype(dtype), indices, indptr]


def csr_dense(data, indices, indptr, columns):
    rows = jnp.searchsorted(indptr, jnp.arange(indices.size), side="right") - 1
    return jnp.zeros((indptr.size - 1, columns), data.dtype).at[rows, indices].add(data)


# -- Numba: one source, jitted with and without parallel=True ---------------------------------------------


def numba_generators(kernel, **options):
    """Generators for the serial and the parallel backend, from one plain function."""

    def make(parallel):
        compiled = numba.njit(parallel=parallel)(kernel)
        return lambda outs, **_: xk.numba_kernel(compiled, outs, **options)

    return {"numba": make(False), "numba_parallel": make(True)}


def nb_add(x, y, out):
    for i in numba.prange(x.size):
        out[i] = x[i] + y[i]


def nb_relu(x, out):
    for i in numba.prange(x.size):
        out[i] = max(x[i], 0)


def nb_leaky_relu(alpha):
    def leaky_relu(x, out):
        for i in numba.prange(x.size):
            out[i] = x[i] if x[i] > 0 else x.dtype.type(alpha) * x[i]

    return leaky_relu


def nb_hadamard(x, y, out):
    for i in numba.prange(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] * y[i, j]


def nb_sum(x, out):
    total = x.dtype.type(0)
    for i in numba.prange(x.size):
        total += x[i]
    out[0] = total


def nb_mean_std(x, mean, std):
    mean[0] = x.sum() / x.size
    total = x.dtype.type(0)
    for i in numba.prange(x.size):
        total += (x[i] - mean[0]) ** 2
    std[0] = np.sqrt(total / x.size)


def nb_matvec(a, x, out):
    for i in numba.prange(a.shape[0]):
        total = x.dtype.type(0)
        for j in range(a.shape[1]):
            total += a[i, j] * x[j]
        out[i] = total


def nb_csr_matvec(data, indices, indptr, x, out):
    for i in numba.prange(out.size):
        total = x.dtype.type(0)
        for k in range(indptr[i], indptr[i + 1]):
            total += data[k] * x[indices[k]]
        out[i] = total


def nb_csr_event(data, indices, indptr, spikes, out):
    out[:] = 0
    for i in range(spikes.size):  # scatter-add: rows share columns, so not parallel
        if spikes[i]:
            for k in range(indptr[i], indptr[i + 1]):
                out[indices[k]] += data[k]


def nb_lif(v, current, new_v, spikes):
    for i in numba.prange(v.size):
        u = v[i] + (current[i] - v[i]) * v.dtype.type(0.1)
        spikes[i] = u > 1
        new_v[i] = 0 if u > 1 else u


def nb_trace(trace, spikes, out):
    for i in numba.prange(trace.size):
        out[i] = trace[i] * trace.dtype.type(0.9) + spikes[i]


def nb_stencil(x, out):
    for i in numba.prange(x.size):
        left = x[i - 1] if i > 0 else x.dtype.type(0)
        right = x[i + 1] if i + 1 < x.size else x.dtype.type(0)
        out[i] = left - 2 * x[i] + right


def nb_prefix_sum(x, out):
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i]
        out[i] = total


def nb_decay_in_place(v, current, out):  # out starts as v
    for i in numba.prange(out.size):
        out[i] += (current[i] - out[i]) * out.dtype.type(0.1)


# -- Numba CUDA: on a GPU, or on the simulator -------------------------------------------------------------


def cuda_generators(kernel, dims=None, **options):
    """Generators for `numba_cuda_kernel`, and for `numba_cuda_callable` launching the same kernel itself."""

    def launch_dims(outs):
        return outs[0].shape if dims is None else dims

    def as_kernel(outs, **_):
        return xk.numba_cuda_kernel(kernel, outs, launch_dims=launch_dims(outs), **options)

    def as_callable(outs, **_):
        compiled = cuda.jit(kernel)
        block = {1: (32,), 2: (4, 8)}[len(np.atleast_1d(launch_dims(outs)))]
        grid = tuple(-(-n // b) for n, b in zip(np.atleast_1d(launch_dims(outs)).tolist(), block))

        def launch(*args):
            *arrays, stream = args
            compiled[grid, block, stream](*arrays)

        return xk.numba_cuda_callable(launch, outs, **options)

    return {"numba_cuda": as_kernel, "numba_cuda_callable": as_callable}


def cu_add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


def cu_relu(x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = max(x[i], 0)


def cu_leaky_relu(alpha):
    def leaky_relu(x, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = x[i] if x[i] > 0 else x.dtype.type(alpha) * x[i]

    return leaky_relu


def cu_hadamard(x, y, out):
    i, j = cuda.grid(2)
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = x[i, j] * y[i, j]


def cu_sum(x, out):
    if cuda.grid(1) == 0:
        out[0] = 0
        for i in range(x.size):
            out[0] += x[i]


def cu_mean_std(x, mean, std):
    if cuda.grid(1) == 0:
        mean[0] = 0
        std[0] = 0
        for i in range(x.size):
            mean[0] += x[i] / x.size
        for i in range(x.size):
            std[0] += (x[i] - mean[0]) ** 2 / x.size
        std[0] = math.sqrt(std[0])


def cu_matvec(a, x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = 0
        for j in range(x.size):
            out[i] += a[i, j] * x[j]


def cu_csr_matvec(data, indices, indptr, x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = 0
        for k in range(indptr[i], indptr[i + 1]):
            out[i] += data[k] * x[indices[k]]


def cu_csr_event(data, indices, indptr, spikes, out):
    j = cuda.grid(1)
    if j < out.size:
        out[j] = 0
    cuda.syncthreads()  # one block
    if j < spikes.size and spikes[j]:
        for k in range(indptr[j], indptr[j + 1]):
            cuda.atomic.add(out, indices[k], data[k])


def cu_lif(v, current, new_v, spikes):
    i = cuda.grid(1)
    if i < v.size:
        u = v[i] + (current[i] - v[i]) * v.dtype.type(0.1)
        spikes[i] = u > 1
        new_v[i] = 0 if u > 1 else u


def cu_trace(trace, spikes, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = trace[i] * trace.dtype.type(0.9) + spikes[i]


def cu_stencil(x, out):
    i = cuda.grid(1)
    if i < out.size:
        left = x[i - 1] if i > 0 else 0
        right = x[i + 1] if i + 1 < x.size else 0
        out[i] = left - 2 * x[i] + right


def cu_prefix_sum(x, out):
    if cuda.grid(1) == 0:
        out[0] = x[0]
        for i in range(1, x.size):
            out[i] = out[i - 1] + x[i]


def cu_decay_in_place(v, current, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] += (current[i] - out[i]) * out.dtype.type(0.1)


# -- Warp: kernels are typed, so each is made for a dtype --------------------------------------------------


def warp_generator(make, dims=None, **options):
    def generator(outs, **params):
        kernel = make(xk.jaxtype_to_warptype(outs[0].dtype), **params)
        return xk.warp_kernel(kernel, outs, launch_dims=outs[0].shape if dims is None else dims, **options)

    return {"warp": generator}


def wp_add(T):
    @wp.kernel
    def add(x: wp.array(dtype=T), y: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = x[i] + y[i]

    return add


def wp_relu(T):
    @wp.kernel
    def relu(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = wp.max(x[i], T(0.0))

    return relu


def wp_leaky_relu(T, alpha):
    @wp.kernel
    def leaky_relu(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = wp.where(x[i] > T(0.0), x[i], T(alpha) * x[i])

    return leaky_relu


def wp_hadamard(T):
    @wp.kernel
    def hadamard(x: wp.array2d(dtype=T), y: wp.array2d(dtype=T), out: wp.array2d(dtype=T)):
        i, j = wp.tid()
        out[i, j] = x[i, j] * y[i, j]

    return hadamard


def wp_sum(T):
    @wp.kernel
    def total(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        s = T(0.0)
        for i in range(x.shape[0]):
            s += x[i]
        out[0] = s

    return total


def wp_mean_std(T):
    @wp.kernel
    def mean_std(x: wp.array(dtype=T), mean: wp.array(dtype=T), std: wp.array(dtype=T)):
        m = T(0.0)
        for i in range(x.shape[0]):
            m += x[i] / T(x.shape[0])
        s = T(0.0)
        for i in range(x.shape[0]):
            s += (x[i] - m) * (x[i] - m) / T(x.shape[0])
        mean[0] = m
        std[0] = wp.sqrt(s)

    return mean_std


def wp_matvec(T):
    @wp.kernel
    def matvec(a: wp.array2d(dtype=T), x: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        s = T(0.0)
        for j in range(x.shape[0]):
            s += a[i, j] * x[j]
        out[i] = s

    return matvec


def wp_csr_matvec(T):
    @wp.kernel
    def csr_matvec(
        data: wp.array(dtype=T),
        indices: wp.array(dtype=wp.int32),
        indptr: wp.array(dtype=wp.int32),
        x: wp.array(dtype=T),
        out: wp.array(dtype=T),
    ):
        i = wp.tid()
        s = T(0.0)
        for k in range(indptr[i], indptr[i + 1]):
            s += data[k] * x[indices[k]]
        out[i] = s

    return csr_matvec


def warp_csr_event(outs, **_):
    """Scatter-add with an accumulator that is given a value and returned."""
    T = xk.jaxtype_to_warptype(outs[0].dtype)

    @wp.kernel
    def csr_event(
        data: wp.array(dtype=T),
        indices: wp.array(dtype=wp.int32),
        indptr: wp.array(dtype=wp.int32),
        spikes: wp.array(dtype=wp.bool),
        total: wp.array(dtype=T),
    ):
        i = wp.tid()
        if spikes[i]:
            for k in range(indptr[i], indptr[i + 1]):
                wp.atomic_add(total, indices[k], data[k])

    def call(data, indices, indptr, spikes):
        launch = xk.warp_kernel(csr_event, outs, launch_dims=spikes.shape, in_out_argnames=["total"])
        return launch(data, indices, indptr, spikes, jnp.zeros(outs[0].shape, outs[0].dtype))

    return call


def wp_lif(T):
    @wp.kernel
    def lif(
        v: wp.array(dtype=T), current: wp.array(dtype=T), new_v: wp.array(dtype=T), spikes: wp.array(dtype=wp.bool)
    ):
        i = wp.tid()
        u = v[i] + (current[i] - v[i]) * T(0.1)
        spikes[i] = u > T(1.0)
        new_v[i] = wp.where(u > T(1.0), T(0.0), u)

    return lif


def wp_trace(T):
    @wp.kernel
    def trace(x: wp.array(dtype=T), spikes: wp.array(dtype=wp.bool), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = x[i] * T(0.9) + wp.where(spikes[i], T(1.0), T(0.0))

    return trace


def wp_stencil(T):
    @wp.kernel
    def stencil(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        left = T(0.0)
        right = T(0.0)
        if i > 0:
            left = x[i - 1]
        if i + 1 < x.shape[0]:
            right = x[i + 1]
        out[i] = left - T(2.0) * x[i] + right

    return stencil


def wp_prefix_sum(T):
    @wp.kernel
    def prefix_sum(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        s = T(0.0)
        for i in range(x.shape[0]):
            s += x[i]
            out[i] = s

    return prefix_sum


def wp_decay_in_place(T):
    @wp.kernel
    def decay(v: wp.array(dtype=T), current: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = out[i] + (current[i] - out[i]) * T(0.1)

    return decay


# -- Pallas, in interpret mode -----------------------------------------------------------------------------


def pallas_generator(reference):
    """The reference as a Pallas kernel: it reads whole blocks and writes whole blocks."""

    def generator(outs, **params):
        def kernel(*refs):
            results = reference(*[ref[...] for ref in refs[: -len(outs)]], **params)
            for ref, result in zip(refs[-len(outs) :], jax.tree.leaves(results)):
                ref[...] = result

        return pl.pallas_call(kernel, out_shape=list(outs), interpret=True)

    return {"pallas": generator}


# -- the table ---------------------------------------------------------------------------------------------


def matrix_op(name, inputs, reference, *, nb, cu=None, wp_=None, dims=None, pallas=True, options=None, **fields):
    """One row: the kernels of all backends.  Parameters of the call reach kernels through makers."""
    options = options or {}

    def with_params(generators, maker):
        """A generator whose kernel is made from the call's parameters."""
        return {
            b: lambda outs, b=b, **params: generators(maker(**params), **options)[b](outs) for b in generators(maker(0))
        }

    params = fields.get("params")
    kernels = with_params(numba_generators, nb) if params else numba_generators(nb, **options)
    if cu is not None:
        on_gpu = functools.partial(cuda_generators, dims=dims)
        kernels |= with_params(on_gpu, cu) if params else on_gpu(cu, **options)
    kernels |= wp_ if isinstance(wp_, dict) else warp_generator(wp_, dims, **options)
    if pallas:
        kernels |= pallas_generator(reference)
    kernels |= {"jax": lambda outs, **params: functools.partial(reference, **params)}
    return Op(name, inputs, reference, kernels, **fields)


def lif_reference(v, current):
    u = v + (current - v) * v.dtype.type(0.1)
    return jnp.where(u > 1, 0, u).astype(v.dtype), u > 1


def csr_matvec_inputs(rng, dtype):
    return [*csr(rng, dtype), rng.standard_normal(9).astype(dtype)]


def csr_event_inputs(rng, dtype):
    return [*csr(rng, dtype), rng.random(12) < 0.5]


MATRIX = [
    matrix_op("add", normal(17, 17), lambda x, y: x + y, nb=nb_add, cu=cu_add, wp_=wp_add, scans=True),
    matrix_op("relu", normal(17), lambda x: jnp.maximum(x, 0), nb=nb_relu, cu=cu_relu, wp_=wp_relu, scans=True),
    matrix_op(
        "leaky_relu",
        normal(17),
        lambda x, alpha: jnp.where(x > 0, x, x.dtype.type(alpha) * x),
        nb=nb_leaky_relu,
        cu=cu_leaky_relu,
        wp_=wp_leaky_relu,
        params={"alpha": 0.25},
        scans=True,
    ),
    matrix_op(
        "hadamard",
        normal((5, 7), (5, 7)),
        lambda x, y: x * y,
        nb=nb_hadamard,
        cu=cu_hadamard,
        wp_=wp_hadamard,
        scans=True,
    ),
    matrix_op("sum", normal(33), lambda x: x.sum(keepdims=True), nb=nb_sum, cu=cu_sum, wp_=wp_sum, dims=1),
    matrix_op(
        "mean_std",
        normal(33),
        lambda x: (x.mean(keepdims=True), x.std(keepdims=True)),
        nb=nb_mean_std,
        cu=cu_mean_std,
        wp_=wp_mean_std,
        dims=1,
    ),
    matrix_op("matvec", normal((6, 6), 6), lambda a, x: a @ x, nb=nb_matvec, cu=cu_matvec, wp_=wp_matvec),
    matrix_op(
        "csr_matvec",
        csr_matvec_inputs,
        lambda data, indices, indptr, x: csr_dense(data, indices, indptr, x.size) @ x,
        nb=nb_csr_matvec,
        cu=cu_csr_matvec,
        wp_=wp_csr_matvec,
        pallas=False,
    ),
    matrix_op(
        "csr_event",
        csr_event_inputs,
        lambda data, indices, indptr, spikes: spikes.astype(data.dtype) @ csr_dense(data, indices, indptr, 9),
        nb=nb_csr_event,
        cu=cu_csr_event,
        wp_={"warp": warp_csr_event},
        dims=12,
        pallas=False,
    ),
    matrix_op("lif", normal(17, 17), lif_reference, nb=nb_lif, cu=cu_lif, wp_=wp_lif, scans=True),
    matrix_op(
        "trace",
        vector_and_spikes(17),
        lambda trace, spikes: trace * trace.dtype.type(0.9) + spikes,
        nb=nb_trace,
        cu=cu_trace,
        wp_=wp_trace,
        scans=True,
    ),
    matrix_op(
        "stencil",
        normal(17),
        lambda x: jnp.concatenate([x[:0], x[1:], x[:1] * 0]) - 2 * x + jnp.concatenate([x[:1] * 0, x[:-1]]),
        nb=nb_stencil,
        cu=cu_stencil,
        wp_=wp_stencil,
        scans=True,
    ),
    matrix_op(
        "prefix_sum", normal(17), jnp.cumsum, nb=nb_prefix_sum, cu=cu_prefix_sum, wp_=wp_prefix_sum, dims=1, scans=True
    ),
    matrix_op(
        "in_place",
        normal(17, 17),
        lambda v, current: v + (current - v) * v.dtype.type(0.1),
        nb=nb_decay_in_place,
        cu=cu_decay_in_place,
        wp_=wp_decay_in_place,
        options={"input_output_aliases": {0: 0}},
        scans=True,
    ),
]
OPS = {op.name: op for op in MATRIX}
BACKENDS = ["numba", "numba_parallel", "numba_cuda", "numba_cuda_callable", "warp", "pallas", "jax"]
CELLS = [(op.name, b, dtype) for op in MATRIX for b in BACKENDS if b in op.kernels for dtype in op.dtypes]
matrix = pytest.mark.parametrize("name, backend, dtype", CELLS, ids=["-".join(cell) for cell in CELLS])


@functools.cache
def custom_kernel(name):
    """The operation with every backend that this machine has, on the platform that JAX uses."""
    op = xk.XLACustomKernel(name)
    for backend, generator in OPS[name].kernels.items():
        op.def_kernel(backend, jax.default_backend(), generator)
    if OPS[name].reference is not None:
        reference = functools.partial(OPS[name].reference, **OPS[name].params)

        def jvp(primals, tangents, **_):
            outputs, derivatives = jax.jvp(reference, primals, tuple(map(ad.instantiate_zeros, tangents)))
            return jax.tree.leaves(outputs), jax.tree.leaves(derivatives)

        op.def_jvp_rule(jvp)
    return op


class Cell:
    """One operation on one backend: its function, inputs and reference."""

    def __init__(self, name, backend, dtype, seed=0):
        self.op, self.backend = OPS[name], backend
        self.inputs = self.op.inputs(np.random.default_rng(seed), np.dtype(dtype))
        self.reference = functools.partial(self.op.reference, **self.op.params)

    def __call__(self, *inputs):
        outs = jax.eval_shape(self.reference, *inputs)
        return custom_kernel(self.op.name)(*inputs, outs=outs, backend=self.backend, **self.op.params)

    def check(self, got, expected):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=self.op.tolerance, atol=self.op.tolerance)


@pytest.fixture
def cell(name, backend, dtype, enable_x64):
    with enable_x64(dtype == "float64"):
        yield Cell(name, backend, dtype)


@matrix
def test_eager(cell):
    before = [x.copy() for x in cell.inputs]
    cell.check(cell(*cell.inputs), cell.reference(*cell.inputs))
    for x, y in zip(cell.inputs, before):
        np.testing.assert_array_equal(x, y)


@matrix
def test_jit(cell):
    cell.check(jax.jit(cell)(*cell.inputs), cell.reference(*cell.inputs))


@matrix
def test_vmap(cell):
    """Over axis 0 of the first input, then over the last axis, with the other inputs unbatched; then nested."""
    first, *rest = cell.inputs
    batch = np.stack([first, 2 * first, first - 1])
    none = (None,) * len(rest)
    cell.check(jax.vmap(cell, (0, *none))(batch, *rest), jax.vmap(cell.reference, (0, *none))(batch, *rest))
    last = np.moveaxis(batch, 0, -1)
    cell.check(jax.vmap(cell, (-1, *none))(last, *rest), jax.vmap(cell.reference, (0, *none))(batch, *rest))
    nest = np.stack([batch, -batch])
    twice = lambda f: jax.jit(jax.vmap(jax.vmap(f, (0, *none)), (0, *none)))
    cell.check(twice(cell)(nest, *rest), twice(cell.reference)(nest, *rest))


@matrix
def test_vmap_of_all_inputs(cell):
    if cell.op.name.startswith("csr"):
        pytest.skip("the sparsity pattern has another size in every sample")
    batch = [np.stack([x, x[::-1] if x.ndim == 1 else -x]) for x in cell.inputs]
    cell.check(jax.vmap(cell)(*batch), jax.vmap(cell.reference)(*batch))


@matrix
def test_grad(cell):
    """Through the rule of the operation, against the gradient of the reference."""
    i = next(i for i, x in enumerate(cell.inputs) if x.dtype.kind == "f")
    loss = lambda f: (
        lambda *inputs: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*inputs)) if y.dtype.kind == "f")
    )
    cell.check(jax.grad(loss(cell), i)(*cell.inputs), jax.grad(loss(cell.reference), i)(*cell.inputs))


@matrix
def test_scan(cell):
    if not cell.op.scans:
        pytest.skip("its output is no input")
    first, *rest = map(jnp.asarray, cell.inputs)
    run = lambda f: jax.jit(lambda x: jax.lax.scan(lambda x, _: (jax.tree.leaves(f(x, *rest))[0],) * 2, x, length=4))
    cell.check(run(cell)(first), run(cell.reference)(first))


@matrix
def test_shard_map(cell):
    """Each of four devices runs its own shard of a batch, with JAX's check of varying axes."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    first, *rest = cell.inputs
    batch = np.stack([first * (i + 1) for i in range(8)])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "i")
    P = jax.sharding.PartitionSpec
    run = lambda f: jax.vmap(lambda x: f(x, *rest))
    sharded = jax.jit(shard_map(run(cell), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    cell.check(sharded(batch), run(cell.reference)(batch))


# ======================================================================================================
# The package: README, imports, vendored copies, several processes
# ======================================================================================================

ROOT = pathlib.Path(__file__).parent


def run_python(*args, cwd=ROOT, timeout=300, **environment):
    """Run Python in a fresh process; returns its output, or fails with it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, args)]
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(README_BLOCKS)))
def test_readme_block(number, tmp_path):
    code = README_BLOCKS[number]
    if "warp" in code and wp is None:
        pytest.skip("warp is not installed")
    (tmp_path / "block.py").write_text(code, encoding="utf-8")
    assert run_python(tmp_path / "block.py", cwd=tmp_path).strip()


def test_readme_has_the_two_lines():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 'pip install -e ".[warp]" && python -m xla_kernels\n' in text
    assert 'pip install -e ".[test]" && pytest -n auto\n' in text


LOADED = "import sys; print(sorted({m.partition('.')[0] for m in sys.modules} & {'numba', 'warp', 'llvmlite', 'cuda'}))"


def test_import_loads_no_backend():
    assert run_python("-c", f"import xla_kernels; {LOADED}").strip() == "[]"


def test_import_check_can_fail():
    assert "numba" in run_python("-c", f"import xla_kernels, numba; {LOADED}")


def test_docstring_examples():
    assert doctest.testmod(xk).attempted > 0
    assert doctest.testmod(xk).failed == 0


def test_self_check_runs(tmp_path):
    """The file alone, under another name, in an empty folder, as a script and as a module."""
    shutil.copy(ROOT / "xla_kernels.py", tmp_path / "my_kernels.py")
    for args in (["my_kernels.py"], ["-m", "my_kernels"]):
        report = run_python(*args, cwd=tmp_path, PYTHONPATH="")
        assert re.search(r"^numba +cpu +works, [\d.]+ µs", report, re.MULTILINE), report


def test_self_check_fails_for_a_wrong_backend(tmp_path):
    text = (ROOT / "xla_kernels.py").read_text(encoding="utf-8")
    assert "out[i] = 2 * x[i] + y[i]" in text
    (tmp_path / "wrong.py").write_text(text.replace("out[i] = 2 * x[i] + y[i]", "out[i] = 3 * x[i] + y[i]"), "utf-8")
    with pytest.raises(AssertionError, match=r"exit code 1\n(.*\n)*.*FAILED: AssertionError"):
        run_python("wrong.py", cwd=tmp_path, PYTHONPATH="")


def test_missing_numba_is_explained(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('none here')")
    code = "import jax.numpy as jnp, xla_kernels as xk; xk.numba_kernel(lambda x, out: None, lambda x: x)(jnp.ones(3))"
    with pytest.raises(AssertionError, match=r"ImportError: numba_kernel needs numba.*pip install numba"):
        run_python("-c", code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")


# -- export: every operation of a backend, reloaded in a fresh process that traces the same kernels ----------


def exported_cells(backend):
    """(name, cell) of what `backend` can do, at float32."""
    return [(op.name, Cell(op.name, backend, "float32")) for op in MATRIX if backend in op.kernels]


def export_all(backend, folder):
    from jax import export

    for name, cell in exported_cells(backend):
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cell.inputs]
        jax.eval_shape(cell, *specs)  # registers the targets, so that they can be named
        exported = export.export(jax.jit(cell), disabled_checks=xk.export_checks())(*specs)
        (folder / f"{name}.bin").write_bytes(exported.serialize())


def check_exported(backend, folder):
    """In the fresh process."""
    from jax import export

    for name, cell in exported_cells(backend):
        jax.jit(cell).lower(*cell.inputs)
        run = export.deserialize(bytearray((pathlib.Path(folder) / f"{name}.bin").read_bytes())).call
        cell.check(run(*cell.inputs), cell.reference(*cell.inputs))
        print(name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_export_and_reload(backend, tmp_path):
    export_all(backend, tmp_path)
    code = f"import conftest, test_xla_kernels as t; t.check_exported({backend!r}, {str(tmp_path)!r})"
    checked = run_python("-c", code).split()
    assert checked == [name for name, _ in exported_cells(backend)]


# -- several processes ---------------------------------------------------------------------------------------

DISTRIBUTED = """
import sys
import jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from jax.sharding import NamedSharding, PartitionSpec as P
import numba, xla_kernels as xk
square = xk.XLACustomKernel("square")
square.def_sharding_rule("i -> i")
@square.def_numba_kernel
@numba.njit
def kernel(x, out):
    for i in range(x.size):
        out[i] = x[i] * x[i]
mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
sharding = NamedSharding(mesh, P("d"))
x = jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8, dtype=np.float32)[index])
total = jax.jit(lambda x: square(x, outs=x).sum())(x)
print("devices", len(jax.devices()), "total", float(total))
"""


def test_two_processes_share_a_mesh(tmp_path):
    (tmp_path / "worker.py").write_text(DISTRIBUTED)
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    workers = [
        subprocess.Popen([sys.executable, "worker.py", port, str(i)], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for i in range(2)
    ]  # fmt: skip
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert all("devices 4 total 140.0" in output for output in outputs), "\n".join(outputs)


# ======================================================================================================
# Numba on CPU
# ======================================================================================================


def test_numba_add():
    @xk.numba_kernel(outs=lambda x, y: x)
    def add(x, y, out):
        for i in range(x.size):
            out[i] = x[i] + y[i]

    x = jnp.arange(16.0)
    np.testing.assert_array_equal(add(x, x), 2 * x)


# ======================================================================================================
# Numba CUDA
# ======================================================================================================

# ======================================================================================================
# Warp
# ======================================================================================================

# ======================================================================================================
# XLACustomKernel
# ======================================================================================================
