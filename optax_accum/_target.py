"""What `module:function` on a command line stands for: an update and its shapes."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn


def load(target: str, error: Callable[[str], NoReturn]) -> tuple[Any, Any]:
    """What the function returns: make_update and shapes, as `fit` takes them."""
    found: Any = _function(target, error)
    wanted = [each for each in inspect.signature(found).parameters.values() if _is_required(each)]
    if wanted:
        name = target.partition(":")[2]
        error(
            f"target: {target} takes {wanted[0].name!r}, expected no arguments; type def {name}():"
        )
    pair = found()
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(callable, pair)):
        error(
            f"target: {target} returned a {type(pair).__name__}, expected two functions of "
            "(micro_batch, k); type return make_update, shapes"
        )
    return tuple(pair)


def _function(target: str, error: Callable[[str], NoReturn]) -> Any:
    module, _, name = target.partition(":")
    if not name or module.endswith(".py") or os.sep in module:
        wanted = module.removesuffix(".py").replace(os.sep, ".") or "train"
        error(f"target: got {target!r}, expected module:function; type {wanted}:{name or 'plan'}")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as reason:
        error(
            f"target: {module} cannot be imported ({reason}); run this in the directory of "
            f"{module.split('.')[0]}.py, or install what is missing"
        )
    if not callable(found):
        error(f"target: {module} has no function {name!r}; type def {name}(): in it")
    return found


def _is_required(parameter: inspect.Parameter) -> bool:
    optional = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not optional
