"""Specifications: frozen values for what to train, where, and how. No torch."""

from megalith.spec.families import Model
from megalith.spec.families.llama import Llama
from megalith.spec.model import ModelSpec
from megalith.spec.plan import Plan
from megalith.spec.run import RunSpec

__all__ = ["Llama", "Model", "ModelSpec", "Plan", "RunSpec"]
