"""Every example of the docstrings and every Python block of README and "Coming from" runs."""

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
PAGES = "README.md", "examples/coming_from.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed


PUBLIC = {
    f"{home.__name__}.{name}": thing
    for home in (
        optax_accum,
        optax_accum.diagnostics,
        optax_accum.linen,
        optax_accum.nnx,
        optax_accum.planning,
        optax_accum.verify,
    )
    for name, thing in vars(home).items()
    if inspect.isfunction(thing) and thing.__module__ == home.__name__ and name[0] != "_"
}


@pytest.mark.parametrize("function", PUBLIC)
def test_every_public_function_has_an_example(function):
    for section in (">>>", "Args:", "Returns:", "Raises:"):
        assert section in PUBLIC[function].__doc__


def test_readme_has_no_gaps():
    assert not re.search(r"@\w+@|TODO", README)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page(page):
    """In one namespace, in order, as a reader would type them."""
    blocks = re.findall(r"```python\n(.*?)```", (PROJECT / page).read_text(), re.DOTALL)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)  # our own text
