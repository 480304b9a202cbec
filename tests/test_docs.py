"""Every example of the docstrings and every Python block of the README runs."""

import doctest
import importlib
import inspect
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


PUBLIC = {
    f"{home.__name__}.{name}": thing
    for home in (optax_accum, optax_accum.diagnostics, optax_accum.planning, optax_accum.verify)
    for name, thing in vars(home).items()
    if inspect.isfunction(thing) and thing.__module__ == home.__name__ and name[0] != "_"
}


@pytest.mark.parametrize("function", PUBLIC)
def test_every_public_function_has_an_example(function):
    for section in (">>>", "Args:", "Returns:", "Raises:"):
        assert section in PUBLIC[function].__doc__


def test_readme_has_no_gaps():
    assert not re.search(r"@\w+@|TODO", README)


def test_readme_blocks():
    """In one namespace, in order, as a reader would type them."""
    assert BLOCKS
    namespace = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), namespace)  # our own text
