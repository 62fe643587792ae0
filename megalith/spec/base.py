"""The base every specification stands on: frozen, strict, unknown keys refused."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A frozen value. Unknown keys are errors; a list in TOML is a tuple here."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
