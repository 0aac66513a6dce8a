"""The peers, used as documented."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.casebook.engines import Engine, Optimizers


class DDP(Engine):
    """torch.nn.parallel.DistributedDataParallel. A model without trainable parameters is left alone, as DDP
    requires."""

    def prepare(self, model: nn.Module, make: Optimizers | None) -> tuple[Any, torch.optim.Optimizer | None]:
        if make is None:
            return model, None
        known = ("find_unused_parameters", "static_graph")
        options = {name: self.options[name] for name in known if name in self.options}
        return nn.parallel.DistributedDataParallel(model, **options), make(model)

    def bare(self, prepared: Any) -> nn.Module:
        return prepared.module if isinstance(prepared, nn.parallel.DistributedDataParallel) else prepared

    def no_sync(self, prepared: Any) -> contextlib.AbstractContextManager[Any]:
        return prepared.no_sync()

    def join(self, prepared: list[Any]) -> contextlib.AbstractContextManager[Any]:
        from torch.distributed.algorithms.join import Join

        return Join(prepared) if self.options.get("join") else contextlib.nullcontext()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost module lists: the blocks that users wrap individually."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += blocks_of(child)
    return list(dict.fromkeys(found))


def whole(value: Any) -> Any:
    """A DTensor as an ordinary tensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class FSDP2(Engine):
    """torch.distributed.fsdp.fully_shard on every block, then on the model."""

    def prepare(self, model: nn.Module, make: Optimizers | None) -> tuple[Any, torch.optim.Optimizer | None]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        settings: dict[str, Any] = {"mesh": init_device_mesh("cpu", (self.world,))}
        if self.case.bf16:
            settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks_of(model):
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        for name in self.options.get("forward_methods", ()):
            register_fsdp_forward_method(model, name)
        if self.options.get("broadcast"):
            self.load(model, values)
        return super().prepare(model, make)

    def step(self, prepared: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
        return whole(super().step(prepared, optimizer))

    @contextlib.contextmanager
    def no_sync(self, prepared: Any) -> Any:
        prepared.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            prepared.set_requires_gradient_sync(True)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def read(self, parameter: nn.Parameter) -> Tensor:
        return whole(parameter) if self.options.get("full_tensor") else parameter

    def state(self, prepared: Any) -> dict[str, Tensor]:
        named = prepared.named_parameters(remove_duplicate=False)
        return {name: whole(p).detach().clone() for name, p in named}

    def load(self, prepared: Any, state: dict[str, Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        given: dict[str, Any] = dict(state) if self.rank == 0 else {}
        set_model_state_dict(prepared, given, options=options)


class DeepSpeed(Engine):
    """DeepSpeed ZeRO 1, 2 or 3 with torch's optimizer.

    Stage 3 keeps parameters below 100,000 elements unsharded and releases none while fewer than a billion are live, so
    that a small model would hardly be sharded. Both thresholds are set to zero: a small model is treated as a large
    one.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trained: list[Any] = []

    @property
    def casts_inputs(self) -> bool:  # type: ignore[override]
        return self.case.bf16 and not self.options.get("autocast")

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 1_000_000}
        if self.stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
            }
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.case.accumulation,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": self.case.clip or 0.0,  # if unset, DeepSpeed clips to 1.0
            "bf16": {"enabled": self.casts_inputs},
            "torch_autocast": {"enabled": self.case.bf16 and not self.casts_inputs, "dtype": "bfloat16"},
            "steps_per_print": 10**9,
        }

    def prepare(self, model: nn.Module, make: Optimizers | None) -> tuple[Any, torch.optim.Optimizer | None]:
        import deepspeed

        if make is None and self.stage < 3:
            return model, None
        if self.stage == 3 and "leaf_modules" in self.options:
            deepspeed.utils.set_z3_leaf_modules(model, list(self.options["leaf_modules"]))
        optimizer = make(model) if make else None
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.config(), dist_init_required=False
        )
        if make:
            self.trained.append(engine)
        return engine, optimizer

    def bare(self, prepared: Any) -> nn.Module:
        return getattr(prepared, "module", prepared)

    def backward(self, prepared: Any, loss: Tensor, retain_graph: bool) -> None:
        # DeepSpeed divides by the accumulation steps, which scripts with a plain loop do themselves.
        prepared.backward(loss * prepared.gradient_accumulation_steps(), retain_graph=retain_graph)

    def next_part(self, prepared: Any) -> None:
        prepared.step()

    def step(self, prepared: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
        prepared.step()
        norm = prepared.get_global_grad_norm()
        return norm if norm is None else torch.as_tensor(norm, dtype=torch.float32)

    def no_sync(self, prepared: Any) -> contextlib.AbstractContextManager[Any]:
        return prepared.no_sync() if not self.options.get("without_no_sync") else contextlib.nullcontext()

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def next_stage(self) -> None:
        self.stage = self.stage % 3 + 1

    @contextlib.contextmanager
    def gathered(self, parameters: list[nn.Parameter], edit: bool) -> Any:
        """Whole parameters; edits are kept, also in the float32 copies that the optimizer steps."""
        import deepspeed

        rank = 0 if edit else None
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=rank, enabled=self.stage == 3):
            yield
        if edit:
            self.refresh()

    def refresh(self) -> None:
        for engine in self.trained:
            engine.optimizer.refresh_fp32_params()

    def state(self, prepared: Any) -> dict[str, Tensor]:
        import deepspeed

        named = dict(self.bare(prepared).named_parameters(remove_duplicate=False))
        if self.case.bf16:
            whole = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in named.items()}
            return {name: value.detach().clone() for name, value in whole.items()}
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=self.stage == 3):
            return {name: p.detach().clone() for name, p in named.items()}

    def load(self, prepared: Any, state: dict[str, Tensor]) -> None:
        """Like `load_checkpoint(load_module_only=True)`: into the module, then into the float32 copies."""
        prepared.load_module_state_dict({"module": state}, strict=False, fetch_z3_params=self.stage == 3)
        self.refresh()
