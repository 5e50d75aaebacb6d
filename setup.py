"""Names the packages: what lies under tpkit/, and the folder model_configs/ as tpkit.model_configs.

Everything else is in pyproject.toml. The folder of model descriptions stays at the top of the repository, where people
look for it; it has an __init__.py only because an editable install finds no nested package without one.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["tpkit", "tpkit.*"]), "tpkit.model_configs"],
    package_dir={"tpkit.model_configs": "model_configs"},
)
