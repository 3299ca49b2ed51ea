from setuptools import setup

# `kernels/` and `examples/` stand at the top of the repository but install inside the package: a top-level module
# called `kernels` belongs to another project on PyPI, and transformers looks for it.
setup(
    packages=["tp_invariant", "tp_invariant.kernels", "tp_invariant.examples"],
    package_dir={
        "tp_invariant": "tp_invariant",
        "tp_invariant.kernels": "kernels",
        "tp_invariant.examples": "examples",
    },
    package_data={"tp_invariant": ["py.typed"]},
)
