"""What a traced function gives back as it got it, through remat, jit, scan and cond."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def forwarded(jaxpr: Any) -> list[int | None]:
    """For each output the number of the input that it is, or None."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    origin = {variable: i for i, variable in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for out, source in zip(eqn.outvars, _sources(eqn), strict=True):
            known = None if source is None or isinstance(source, Literal) else origin.get(source)
            if known is not None:
                origin[out] = known
    return [None if isinstance(v, Literal) else origin.get(v) for v in jaxpr.outvars]


def _sources(eqn: Any) -> list[Any]:
    """For each output of an equation the input that it is, or None."""
    name, params, nothing = eqn.primitive.name, eqn.params, [None] * len(eqn.outvars)
    if name == "scan":
        return _of_scan(eqn)
    if name == "cond":
        ways = [forwarded(branch) for branch in params["branches"]]
        same = [way[0] if len(set(way)) == 1 else None for way in zip(*ways, strict=True)]
        return [None if i is None else eqn.invars[1 + i] for i in same]
    inner = next((params[key] for key in _CALLS if key in params), None)
    if inner is None or not (hasattr(inner, "eqns") or isinstance(inner, ClosedJaxpr)):
        return nothing
    found = forwarded(inner)
    body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    if len(found) != len(nothing) or len(body.invars) != len(eqn.invars):
        return nothing
    return [None if i is None else eqn.invars[i] for i in found]


def _of_scan(eqn: Any) -> list[Any]:
    """A carry that every iteration hands on, and rows that come out as they went in."""
    inner = eqn.params["jaxpr"]
    body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    is_row = lambda inside, outside: inside.aval.ndim < outside.aval.ndim  # noqa: E731
    rows_in = list(map(is_row, body.invars, eqn.invars))
    rows_out = list(map(is_row, body.outvars, eqn.outvars))
    consts = rows_in.count(False) - rows_out.count(False)  # then the carry, then the rows
    sources = []
    for j, i in enumerate(forwarded(inner)):
        same = i is not None and (rows_in[i] if rows_out[j] else i == consts + j)
        sources.append(eqn.invars[i] if same and i is not None else None)
    return sources
