"""The base class of every specification: frozen and strict; unknown keys are refused."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict


class AbsentError(AttributeError):
    """A value cannot be read: the user gave an invalid value or none, or a part of the user's own is not imported."""


class Spec(BaseModel):
    """A frozen value. Unknown keys are errors; a list in TOML becomes a tuple. If some values are invalid,
    `spec.validate.examine` returns a spec without these values, and reading one of them raises AbsentError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    if not TYPE_CHECKING:  # else any misspelt attribute would pass for one

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise AbsentError(name)
            return super().__getattr__(name)
