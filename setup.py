"""Build the optional compiled modules; everything else about the package is in pyproject.toml.

Without a C compiler, the package is installed without them and computes with numpy.
"""

import sys
import sysconfig

from setuptools import Extension, setup

# The stable ABI has buffers since Python 3.11; builds without the GIL have no stable ABI.
STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            f"reshard.{package}.{name}",
            [f"reshard/{package.replace('.', '/')}/{name}.c"],
            depends=["reshard/engine/move/values.h", "reshard/system/reads.h"],
            # A product and a sum that are one operation are rounded once, to other bits.
            extra_compile_args=["-O3", "-fno-trapping-math", "-ffp-contract=off"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
            py_limited_api=STABLE,
            optional=True,
        )
        for package, name in (
            ("engine.move", "_cast"),
            ("quantised", "_codes"),
            ("system", "_reads"),
            ("tensors.adapters", "_arithmetic"),
            ("tensors.averages", "_sums"),
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
