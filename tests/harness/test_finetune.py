"""The training loop's feedback: stop, roll back, lower the rate, give up."""

import importlib.util
import json
import math
import sys

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

from eval import data
from eval.records import ROOT

spec = importlib.util.spec_from_file_location("finetune", ROOT / "examples" / "finetune.py")
finetune = importlib.util.module_from_spec(spec)
sys.modules["finetune"] = finetune  # dataclasses looks its module up there
spec.loader.exec_module(finetune)

TOKENS = np.random.default_rng(0).integers(0, 67, 500)


class Faulty(torch.nn.Module):
    """A tiny GPT-2 whose loss is broken at chosen calls (counted from 0)."""

    def __init__(self, broken: dict[int, float]):
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=67, n_positions=16, n_embd=16, n_layer=1, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model, self.broken, self.calls = GPT2LMHeadModel(config), broken, 0

    def forward(self, **inputs):
        output = self.model(**inputs)
        output.loss = output.loss * self.broken.get(self.calls, 1.0)
        self.calls += 1
        return output


def run(tmp_path, broken=None, **changes):
    settings = finetune.Settings(
        **{
            **dict(
                steps=6, batch_size=2, context=16, learning_rate=1e-3, seed=0, checkpoint_every=2
            ),
            **changes,
        }
    )
    accelerator = Accelerator(cpu=True)
    model = Faulty(broken or {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    return finetune.train(
        accelerator, model, optimizer, TOKENS, settings, tmp_path / "checkpoint"
    ), model


def test_stops_after_the_steps_and_is_reproducible(tmp_path):
    (first, model), (second, other) = run(tmp_path / "a"), run(tmp_path / "b")
    assert len(first.losses) == 6 and first.losses == second.losses and not first.rollbacks
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_loss_rolls_back_and_lowers_the_rate(tmp_path, value):
    history, model = run(tmp_path, {3: value})
    (rollback,) = history.rollbacks
    assert (rollback.step, rollback.resumed_from, rollback.learning_rate_scale) == (3, 2, 0.5)
    assert len(history.losses) == 6
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_gives_up_with_a_report(tmp_path):
    with pytest.raises(
        finetune.TrainingDiverged, match="gave up at step 0: got loss is nan after 2 rollbacks"
    ):
        run(tmp_path, dict.fromkeys(range(20), math.nan), max_rollbacks=2)


def test_a_spike_is_a_fault_only_with_a_history():
    assert finetune.fault(9.0, [1.0] * 5, 2.0) is None
    assert "over 2.0 x the median" in finetune.fault(2.1, [1.0] * 20, 2.0)
    assert finetune.fault(1.9, [1.0] * 20, 2.0) is None


def test_command_writes_model_metadata_and_manifest(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n\n" * 400)
    output = tmp_path / "model"
    command = f"--model gpt2-mini --dataset {text} --output {output} --steps 2 --batch-size 1 --context 32"
    assert finetune.main(command.split()) == 0
    metadata = json.loads((output / "metadata.json").read_text())
    assert metadata["attn_implementation"] == "hf_fused" and metadata["seeds"]
    assert len(metadata["losses"]) == 2 and str(tmp_path) not in json.dumps(metadata)
    corpus = data.load([str(text)], None, default_split="validation")
    with pytest.raises(ValueError, match="overlaps"):
        data.refuse_overlap(corpus, data.read_manifest(output), "model")
