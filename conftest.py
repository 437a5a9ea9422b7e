"""Devices, markers and the header of the report."""

import os

# Several CPU devices, for shard_map and pmap; must be set before jax makes its backend.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
