"""FlashAttention for Hugging Face Transformers: ``attn_implementation="hf_fused"``.

Importing this package registers that name, as soon as Transformers is imported as well. It loads
the compiled library if it is there, imports no Transformers and never initialises CUDA.
"""

from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from .functional import attention, attention_weights
from .integration import IMPLEMENTATION, register, register_when_imported, unregister
from .support import explain, trace, why_not

__version__ = "0.1.0"
__all__ = [
    "IMPLEMENTATION",
    "attention",
    "attention_weights",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "register",
    "trace",
    "unregister",
    "why_not",
]

register_when_imported()
