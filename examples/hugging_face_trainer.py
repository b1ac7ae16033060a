"""Hugging Face Trainer: a callback squeezes a small GPT-2 that learns to write Python.

Run it from the repository's root: .venv/bin/python examples/hugging_face_trainer.py
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from squeezebox.integrations.huggingface import SqueezeboxCallback

LENGTH = 64
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
passages = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
dataset = [{"input_ids": passage, "labels": passage} for passage in passages]
config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
arguments = TrainingArguments(
    output_dir="squeezed-gpt2",
    max_steps=20,
    per_device_train_batch_size=16,
    save_steps=10,  # the session's state is in trainer_state.json; resume_from_checkpoint= goes on from it
    logging_steps=5,
    report_to="none",
    use_cpu=True,
)
with SqueezeboxCallback(noise=1e-3) as squeezed:
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset, callbacks=[squeezed]).train()
print(squeezed.report)
