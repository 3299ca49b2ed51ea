"""TRL's trainers for models that parallelize has changed: import them from here instead of from trl.

    from tp_invariant.integrations.trl import GRPOTrainer

    tpi.parallelize(model, mesh["tp"])
    trainer = GRPOTrainer(model, reward_funcs=reward, args=GRPOConfig(..), train_dataset=data, dp_group=mesh["dp"])
    trainer.train()

What this library's Trainer says (trainer.py) holds for all of them. Of GRPO and RLOO besides (rollouts.py):

    a generation   has per_device_train_batch_size x steps_per_generation texts at every degree, which data parallel
                   ranks share
    draws          are keyed by the seed, the step and the text (`tpi.sampling.KeyedDraws`): the same at every degree
    probabilities  are `tpi.token_log_probs`, for the sampler as for the trainer; their largest difference is logged as
                   sampling/sampling_logp_difference/max, and is 0 with the mode on
    rewards        are those of rank 0
    sampler=       another copy of the model, at any other degree, writes the texts; it gets the trainer's weights
    ref_model=     the reference model of beta > 0, which TRL would load by itself
"""

from __future__ import annotations

from typing import Any

import trl

from .rollouts import Rollouts
from .trainer import Trainer

__all__ = ["DPOTrainer", "GRPOTrainer", "RLOOTrainer", "SFTTrainer"]


class SFTTrainer(Trainer, trl.SFTTrainer):
    """TRL's SFTTrainer as this library's `Trainer`, with its arguments and dp_group."""


class DPOTrainer(Trainer, trl.DPOTrainer):
    """TRL's DPOTrainer as this library's `Trainer`, with its arguments and dp_group."""


class GRPOTrainer(Rollouts, trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer as this library's `Trainer`; see `Rollouts`."""

    def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any, *_: Any, **__: Any) -> Any:
        return self.sample(prompt_ids, images, multimodal_fields)


class RLOOTrainer(Rollouts, trl.RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOOTrainer as this library's `Trainer`; see `Rollouts`."""

    def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> Any:
        return self.sample(prompt_ids, images, multimodal_fields)[0]
