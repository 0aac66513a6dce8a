"""What supervised fine-tuning learns from a row, and how it is weighted."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from shardproof.train.options.option import Finite, option


class LossOptions(BaseModel):
    """The options of the loss of `sft`."""

    loss: str = option(
        "Data",
        "answer",
        "what is learned: all answers ('answer'), the last one ('last_round'), either with '+ignore_empty_think', or"
        " 'all' tokens; or a plugin's loss; for embeddings infonce, cosine_similarity, contrastive; for rerankers"
        " pointwise, listwise",
    )
    token_weights: list[str] = option(
        "Data",
        [],
        "weight parts of answers: react, hermes, qwen, agentflan, alpha_umi, ignore_think_prefix, or .json files of "
        "patterns and weights",
    )
    loss_type: Literal["nll", "dft"] = option(
        "Data", "nll", "log-likelihood, or dynamic fine-tuning: each token's loss times its probability (dft)"
    )
    label_smoothing_factor: float = option(
        "Data", 0.0, "label smoothing: this share of the loss is the mean over the vocabulary", ge=0, lt=1
    )
    router_aux_loss_coef: Finite = option(
        "Data", 0.0, "weight of the load-balancing loss of mixture-of-experts models (such as 0.001)", ge=0
    )
