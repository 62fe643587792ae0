"""The table of all model families that transformers has too. A new family needs a module in this folder and a row in this table."""

from megalith.checkpoint.foreign.bloom import BLOOM
from megalith.checkpoint.foreign.deepseek import DEEPSEEK
from megalith.checkpoint.foreign.family import Foreign
from megalith.checkpoint.foreign.gemma2 import GEMMA2
from megalith.checkpoint.foreign.gpt import GPT
from megalith.checkpoint.foreign.llama import LLAMA
from megalith.checkpoint.foreign.mistral import MISTRAL
from megalith.checkpoint.foreign.mixtral import MIXTRAL
from megalith.checkpoint.foreign.nemotron import NEMOTRON
from megalith.checkpoint.foreign.qwen2 import QWEN2
from megalith.checkpoint.foreign.qwen3 import QWEN3
from megalith.checkpoint.foreign.qwen3_moe import QWEN3_MOE

FOREIGN: tuple[Foreign, ...] = (LLAMA, GPT, GEMMA2, MISTRAL, QWEN2, QWEN3, *DEEPSEEK, QWEN3_MOE, MIXTRAL, NEMOTRON, BLOOM)
BY_FAMILY = {foreign.family: foreign for foreign in FOREIGN}
BY_MODEL_TYPE = {foreign.model_type: foreign for foreign in FOREIGN}
