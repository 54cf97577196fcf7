"""What Python code reads beside its arguments: defaults, closures, class attributes, names of its module."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator

_NO_DATA = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(staticmethod, classmethod, property, functools.cached_property, functools.partialmethod),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType),
)


def function_reads(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Names and values that a function can read without being given them.

    Attributes of modules, and what is reached through strings (``getattr``, ``globals()``), are not seen.
    """
    yield "its defaults", (function.__defaults__, function.__kwdefaults__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def class_data(kind: type) -> Iterator[tuple[str, object]]:
    """The data that instances of a class share, without that of its bases."""
    for name, value in list(vars(kind).items()):
        internal = name.startswith("__") or name == "_abc_impl"
        if not internal and not isinstance(value, _NO_DATA):
            yield name, value


def class_functions(kind: type) -> Iterator[types.FunctionType]:
    """The methods and properties that a class defines itself."""
    for value in list(vars(kind).values()):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, functools.cached_property):
            value = value.func
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(function, types.FunctionType):
                yield function


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or a function inside it, looks up in its module."""
    loads = (one for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    names = dict.fromkeys(str(one.argval) for one in loads)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_global_names(constant))
    return tuple(names)
