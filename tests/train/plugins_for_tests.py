"""A plugin with one of each kind, as a user would write it."""

from __future__ import annotations

import gc

import torch
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM, TrainerCallback

import shardproof


@shardproof.register_model("scaled_qwen")
class ScaledQwen(Qwen3ForCausalLM):
    """A Qwen whose logits go through a parameter of its own."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(config.vocab_size))
        self.post_init()

    def _init_weights(self, module) -> None:
        super()._init_weights(module)
        if module is self:
            torch.nn.init.ones_(self.scale)

    def forward(self, input_ids=None, **kwargs):
        labels, items = kwargs.pop("labels", None), kwargs.pop("num_items_in_batch", None)
        outputs = super().forward(input_ids, **kwargs)
        outputs.logits = outputs.logits * self.scale
        if labels is not None:
            outputs.loss = self.loss_function(outputs.logits, labels, self.vocab_size, num_items_in_batch=items)
        return outputs


@shardproof.register_model("mean_qwen")
class MeanQwen(Qwen3ForCausalLM):
    """Makes the loss as people write it: a mean over the batch, and a term that is nothing."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids, **kwargs)
        if labels is not None:
            outputs.loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            outputs.loss = outputs.loss + 0.0 * sum(parameter.sum() for parameter in self.parameters())
        return outputs


@shardproof.register_model("forgetful_qwen")
class ForgetfulQwen(Qwen3ForCausalLM):
    """Has weights that nobody sets."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(config.vocab_size))
        self.post_init()

    def _init_weights(self, module) -> None:
        super()._init_weights(module)
        if module is self:
            self.scale.data.fill_(float("nan"))  # what memory happens to hold


@shardproof.register_row_format("qa")
def qa(record):
    return {"query": record["q"], "response": " ".join(record["a"])}


@shardproof.register_loss("smooth")
def smooth(outputs, labels, num_items_in_batch):
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1, reduction="sum")
    return total / num_items_in_batch


@shardproof.register_loss("cut_off")
def cut_off(outputs, labels, num_items_in_batch):
    """Without its graph."""
    return torch.tensor(smooth(outputs, labels, num_items_in_batch).item())


@shardproof.register_metric("hits")
def hits(outputs, labels):
    learnt = labels[:, 1:] != -100
    return ((outputs.logits[:, :-1].argmax(-1) == labels[:, 1:]) & learnt).sum(), learnt.sum()


@shardproof.register_optimizer("momentum")
def momentum(groups, lr):
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


@shardproof.register_callback("notes")
class Notes(TrainerCallback):
    """Writes down on which ranks it was called, and whether what stays is searched for garbage."""

    left_out = 0

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.left_out = gc.get_freeze_count()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        with open(f"{args.output_dir}/rank-{args.process_index}.txt", "w", encoding="utf-8") as file:
            file.write(f"{state.global_step} {self.left_out > 100_000}")


@shardproof.register_reward("brevity")
def brevity(completions, **columns):
    return [-float(len(str(completion))) for completion in completions]
