"""The base class of every specification: frozen and strict; unknown keys are refused."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict


class AbsentError(AttributeError):
    """A value of a spec is absent, because the user gave a faulty one."""


class Spec(BaseModel):
    """A frozen value. Unknown keys are errors; a list in TOML is a tuple here. If some values are faulty,
    `spec.validate.examine` returns a spec without them: reading a missing value raises AbsentError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    if not TYPE_CHECKING:  # else any misspelt attribute would pass for one

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise AbsentError(name)
            return super().__getattr__(name)
