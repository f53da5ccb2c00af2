"""The PEP 517 build backend: setuptools', with the CUDA compiler's wheels added where there is no toolkit."""

import setuptools
from setuptools import build_meta as _setuptools
from setuptools.build_meta import *  # noqa: F403  (every hook not redefined here)

from buildtools import toolkit

# The `requires` of pyproject.toml, which --no-build-isolation does not enforce: older ones reject `license`.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise toolkit.BuildError(
        f"tcgemm: expected setuptools 77 or newer, found {setuptools.__version__}: pip install -U setuptools"
    )


def get_requires_for_build_wheel(config_settings=None):
    return _setuptools.get_requires_for_build_wheel(config_settings) + toolkit.requirements()


def get_requires_for_build_editable(config_settings=None):
    return _setuptools.get_requires_for_build_editable(config_settings) + toolkit.requirements()
