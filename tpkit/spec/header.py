"""The top level of a description, strictly: identity, fields of config.json, and what may lie in a checkpoint."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tpkit.errors import SpecError
from tpkit.spec.data import Data, Table, to_python
from tpkit.spec.problems import Problems, shown

__all__ = ["SCHEMA", "Every", "Header", "Read", "StoredAs", "read_header"]

#: the version of the vocabulary that this program reads
SCHEMA = 1


class _Strict(BaseModel):
    # no namespace is protected: `model_types` is a word of ours
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class StoredAs(_Strict):
    """Another place where the same tree is found: inside a larger model's checkpoint."""

    architectures: list[str] = Field(default=[])
    config: str | None = None
    prefix: dict[str, str] = Field(default={})
    ignore: list[str] = Field(default=[])


class Read(_Strict):
    """A field of config.json that is more than its name and a default."""

    source: str | list[str] | None = Field(default=None, alias="from")
    per_layer: str | None = None
    every: int | str | None = None
    value: Any = Field(default=True, alias="is")
    otherwise: Any = False
    default: Any = None


class Every(_Strict):
    """A derived name that differs by layer: `value` in every N-th layer, counted from 1."""

    every: int | str
    value: Any = Field(default=True, alias="is")
    otherwise: Any = False


class Header(_Strict):
    """All of a description; `config`, `derived` and `tree` are looked into elsewhere."""

    schema_: Literal[1] = Field(alias="schema")
    family: str = Field(min_length=1)
    architectures: list[str] = Field(min_length=1)
    model_types: list[str] = Field(default=[])
    checkpoint: str | None = None
    stored_as: list[StoredAs] = Field(default=[])
    config: dict[str, Any]
    derived: dict[str, Any] = Field(default={})
    require: list[str] = Field(default=[])
    ignore: list[str] = Field(default=[])
    quant: str | dict[str, Any] | None = None
    tree: dict[str, Any] = Field(min_length=1)

    @field_validator("architectures", "model_types")
    @classmethod
    def _once(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise ValueError("a name is given twice")
        return names


def read_header(data: Data, source: str, problems: Problems) -> Header | None:
    """Returns the validated top level; None where it has problems, which have been noted.

    Raises:
        SpecError: for what is no description at all, or one of another schema: its other words may mean anything.
    """
    if not isinstance(data, Table):
        raise SpecError(f"{source}: a description is a mapping that starts with 'schema: {SCHEMA}'")
    version = data.get("schema")
    if version is not None and to_python(version) != SCHEMA:
        raise SpecError(
            f"{source} is written in schema {shown(to_python(version))}; this tpkit reads schema {SCHEMA}",
            problems=[f"{version.mark}: schema: {SCHEMA} is needed"],
            hint="use the version of tpkit it was written for, or rewrite the description",
        )
    try:
        return Header.model_validate(to_python(data))
    except ValidationError as error:
        problems.add_validation(error, data, "", Header)
        return None
