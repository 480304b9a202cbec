"""Every example of the docstrings and every Python block of the README runs."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import optax_accum

PROJECT = pathlib.Path(__file__).parent.parent
MODULES = ["optax_accum"] + [
    f"optax_accum.{module.name}"
    for module in pkgutil.iter_modules(optax_accum.__path__)
    if module.name != "__main__"
]
README = (PROJECT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed


@pytest.mark.parametrize(
    "function", ["accumulate", "apply_gradients", "flush", "has_updated", "mark_last"]
)
def test_every_public_function_has_an_example(function):
    assert ">>>" in getattr(optax_accum, function).__doc__


def test_readme_has_no_gaps():
    assert not re.search(r"@\w+@|TODO", README)


def test_readme_blocks():
    """In one namespace, in order, as a reader would type them."""
    assert BLOCKS
    namespace = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), namespace)  # our own text
