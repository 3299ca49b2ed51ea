from setuptools import find_packages, setup

# `kernels/` and `examples/` stand at the top of the repository but install inside the package: a top-level module
# called `kernels` belongs to another project on PyPI, and transformers looks for it. Links inside the package lead to
# them, and src/ holds a link to the package alone: so an editable install is one entry of the path, which type checkers
# follow too, and which holds no module of another name.
setup(
    packages=find_packages("src"),
    package_dir={"": "src"},
    package_data={"tp_invariant": ["py.typed"]},
)
