"""The one parser of compiled text: every collective of a program, what it moves, how often it runs.

The text is what `compiled.as_text()` gives: computations of one line an instruction,

    %name = shape opcode(operands), attribute=value, ...

which call each other through attributes (`body=`, `calls=`, `branch_computations=`, ...).
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from optax_accum._device_groups import Groups, device_groups

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_STRING = r'"(?:[^"\\]|\\.)*"|' + r"'[^']*'"  # the second: axis names
_TOKEN = re.compile(_STRING + r"|[()\[\]{},]")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\[\]]*)\]")
_HEADER = re.compile(r"\s*(ENTRY\s+)?%?([^\s(={]+)\s*(?:\(.*->.*)?\{\s*$")
_LINE = re.compile(r"\s*(ROOT\s+)?%?(\S+) = (.*)")
_NAME = re.compile(r"[^\s%,{}]+")
_CALLS = ("calls", "to_apply", "called_computations")
_RELEVANT = re.compile("|".join([*KINDS, r"\bwhile\(", r"\bconditional\(", *_CALLS]))
_KNOWN = re.compile(r"known_trip_count\W+n\W+(\d+)")


class Part(NamedTuple):
    """One array of a shape."""

    dtype: str
    elements: int

    @property
    def bytes(self) -> int:
        width = re.search(r"\d+", self.dtype)  # f32, bf16, s4, f8e4m3fn; pred and tokens have none
        bits = int(width.group()) if width else 8 * (self.dtype == "pred")
        return -(-self.elements * bits // 8)

    @property
    def numbers(self) -> int:
        """Real numbers: two for a complex element."""
        return self.elements * (1 + self.dtype.startswith("c"))


class Operation(NamedTuple):
    """A collective, where it is called from, how often that call runs."""

    kind: str
    parts: tuple[Part, ...]
    groups: Groups  # of positions in the program's order of devices
    in_loop: bool
    branches: tuple[tuple[str, int], ...]  # enclosing conditionals, and which branch of each
    runs: int | None


class Program(NamedTuple):
    devices: int
    operations: list[Operation]


class _Instruction(NamedTuple):
    shape: str
    opcode: str
    operands: list[str]
    attributes: dict[str, str]

    def called(self, *attributes: str) -> list[str]:
        """Names of computations."""
        return [n for a in attributes for n in _NAME.findall(self.attributes.get(a, ""))]


class _Computation(NamedTuple):
    lines: dict[str, str]  # what stands right of each name
    roots: list[str]  # the one root

    @property
    def root(self) -> str:
        return self.roots[0]

    def parse(self, name: str) -> _Instruction:
        if name not in self.lines:
            raise ValueError(f"%{name} is used but not defined, expected the whole compiled text.")
        return _instruction(self.lines[name])


class _Module(NamedTuple):
    computations: dict[str, _Computation]
    entry: str
    replicas: int
    partitions: int


class _Place(NamedTuple):
    """How one call of a computation is reached."""

    in_loop: bool = False
    branches: tuple[tuple[str, int], ...] = ()
    runs: int | None = 1

    def loop(self, trips: int | None) -> "_Place":
        runs = None if self.runs is None or trips is None else self.runs * trips
        return self._replace(in_loop=True, runs=runs)


def read(text: str) -> Program:
    """Every collective of a compiled program, once for each place that it is called from."""
    modules = [_module(each) for each in re.split(r"^(?=HloModule\b)", text, flags=re.MULTILINE)]
    found = [module for module in modules if module is not None]
    if not found:
        raise ValueError(
            "the text holds no compiled program, expected what compiled.as_text() gives; "
            "type jax.jit(f).lower(*arguments).compile()."
        )
    operations = [each for m in found for each in _operations(m, m.entry, _Place())]
    listed = (device for each in operations for group in each.groups for device in group)
    sizes = (module.replicas * module.partitions for module in found)
    return Program(max(*sizes, 1 + max(listed, default=0)), operations)


def _module(text: str) -> _Module | None:
    computations: dict[str, _Computation] = {}
    entry, current = None, _Computation({}, [])
    for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
        if instruction := _LINE.match(line):
            root, name, right = instruction.groups()
            current.lines[name] = right
            current.roots.extend([name] if root else [])
        elif header := _HEADER.match(line):
            current = computations[header[2]] = _Computation({}, [])
            entry = header[2] if header[1] else entry
    if entry is None:
        return None
    return _Module(computations, entry, _size(text, "replica_count"), _size(text, "num_partitions"))


def _size(text: str, name: str) -> int:
    found = re.search(rf"^HloModule\b.*\b{name}=(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 1


def _instruction(right: str) -> _Instruction:
    end = _closing(right, 0) if right.startswith("(") else right.index(" ")
    begin = right.index("(", end)
    close = _closing(right, begin)
    attributes = [piece.partition("=") for piece in _pieces(right[close:])]
    return _Instruction(
        right[:end],
        right[end:begin].strip(),
        # older texts repeat the shape of each operand before its name
        [piece.split(" ")[-1].lstrip("%") for piece in _pieces(right[begin + 1 : close - 1])],
        {key: value for key, _, value in attributes},
    )


def _closing(text: str, begin: int) -> int:
    """One past the bracket that closes the one at `begin`."""
    depth = 0
    for token in _TOKEN.finditer(text, begin):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0:
            return token.end()
    raise ValueError(f"a bracket is never closed, expected the whole compiled text: {text[:80]}")


def _pieces(text: str) -> list[str]:
    """What stands between the commas that no bracket encloses."""
    depth, begin, pieces = 0, 0, []
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and depth == 0:
            pieces.append(text[begin : token.start()])
            begin = token.end()
    return [stripped for piece in [*pieces, text[begin:]] if (stripped := piece.strip())]


def _parts(shape: str) -> tuple[Part, ...]:
    """The arrays of a shape, those of a tuple in order."""
    return tuple(
        Part(dtype, math.prod(int(size.strip(" <=")) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(shape)
    )


def _operations(module: _Module, name: str, place: _Place) -> Iterator[Operation]:
    computation = module.computations[name]
    for label, right in computation.lines.items():
        if not _RELEVANT.search(right):
            continue
        found = _instruction(right)
        kind = found.opcode.removesuffix("-start")
        if kind in KINDS:
            parts = _moved(kind, found, computation)
            groups = device_groups(kind, found.attributes, module.replicas, module.partitions)
            yield Operation(kind, parts, groups, place.in_loop, place.branches, place.runs)
        elif not found.opcode.endswith(("-done", "-update")):  # they name what -start has called
            for called, inside in _called(module, computation, label, place):
                yield from _operations(module, called, inside)


def _called(
    module: _Module, computation: _Computation, name: str, place: _Place
) -> Iterator[tuple[str, _Place]]:
    """The computations that an instruction runs."""
    found = computation.parse(name)
    if found.opcode == "while":
        trips = _trip_count(module, computation, found)
        yield found.called("body")[0], place.loop(trips)
        yield found.called("condition")[0], place.loop(None if trips is None else trips + 1)
    elif found.opcode == "conditional":
        attributes = ("branch_computations", "true_computation", "false_computation")
        for index, branch in enumerate(found.called(*attributes)):
            yield branch, place._replace(branches=(*place.branches, (name, index)))
    else:
        yield from ((called, place) for called in found.called(*_CALLS))


def _moved(kind: str, found: _Instruction, computation: _Computation) -> tuple[Part, ...]:
    """What a device gives; for an all-gather what it gets."""
    if kind == "all-gather":
        started = found.opcode.endswith("-start")  # the shape is (operands, results)
        return _parts(_pieces(found.shape[1:-1])[1] if started else found.shape)
    only_first = kind == "ragged-all-to-all" or "slice_sizes" in found.attributes
    operands = found.operands[:1] if only_first else found.operands
    return tuple(part for name in operands for part in _parts(computation.parse(name).shape))


def _trip_count(module: _Module, scope: _Computation, loop: _Instruction) -> int | None:
    """What the compiler knows, else what a counter, its stride and its limit say, else None."""
    if known := _KNOWN.search(loop.attributes.get("backend_config", "")):
        return int(known[1])
    condition, body = (module.computations[loop.called(a)[0]] for a in ("condition", "body"))
    start, after = scope.parse(loop.operands[0]), body.parse(body.root)
    match _value(module, condition, condition.root, None):
        case ("LT" | "LE" as direction, (int(counter), offset), (None, limit)):
            if start.opcode == after.opcode == "tuple":
                first = _value(module, scope, start.operands[counter], None)
                stride = _value(module, body, after.operands[counter], None)
                return _rounds(counter, first, stride, limit + (direction == "LE") - offset)
    return None


def _rounds(counter: int, first: Any, stride: Any, limit: int) -> int | None:
    match first, stride:
        case (None, start), (element, by) if element == counter and by > 0:
            return len(range(start, limit, by))
    return None


def _value(module: _Module, scope: _Computation, name: str, given: list[Any] | None) -> Any:
    """An integer of a loop, as far as it is simple: `(element of the state or None, plus this)`.

    A comparison gives `(direction, left, right)`; what is not simple gives None. `given` holds the
    operands of a fusion.
    """
    found = scope.parse(name)
    if found.shape[:1] not in tuple("psu"):  # pred, signed, unsigned
        return None
    match found.opcode:
        case "constant":
            number = "".join(found.operands)
            return (None, int(number)) if re.fullmatch(r"-?\d+", number) else None
        case "parameter":
            return given[int(found.operands[0])] if given else None
        case "get-tuple-element":
            of_state = given is None and scope.parse(found.operands[0]).opcode == "parameter"
            return (int(found.attributes["index"]), 0) if of_state else None
        case opcode if opcode not in ("add", "bitcast", "compare", "convert", "copy", "fusion"):
            return None
    inner = [_value(module, scope, operand, given) for operand in found.operands]
    match found.opcode, inner:
        case "copy" | "convert" | "bitcast", [value]:
            return value
        case "add", [(left, a), (right, b)] if left is None or right is None:
            return (right if left is None else left, a + b)
        case "compare", [left, right]:
            return (found.attributes["direction"], left, right)
        case "fusion", _:
            called = module.computations[found.called("calls")[0]]
            return _value(module, called, called.root, inner)
    return None
