"""Trains a tiny GPT-2 under a preset, then writes what the live model computes, and saves it.

Embeddings are resized and the output layer is tied to them; with --lora an adapter is trained instead. Writes
`live.pt` (logits and generated tokens of fixed inputs) and the saved model below --folder.
"""

import argparse
import json
from pathlib import Path

from hf_dist.errors import exit_on_error

TOKENS = 6  # added to the vocabulary


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--best", action="store_true")
    options = parser.parse_args()

    from hf_dist.training.engines import lifecycle
    from hf_dist.training.engines.running import read_engine

    lifecycle.prepare_environment(options.preset)

    import torch
    import transformers
    from datasets import Dataset

    checkpoints = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    arguments = transformers.TrainingArguments(
        output_dir=str(options.folder / "run"),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        load_best_model_at_end=options.best,
        **(checkpoints if options.best else {"save_strategy": "no"}),
        **lifecycle.training_argument_overrides(options.preset),
    )
    lifecycle.start_communication(options.preset)
    model = transformers.GPT2LMHeadModel.from_pretrained(options.folder / "initial")
    facts = {"partitioned": sum(hasattr(weight, "ds_id") for weight in model.parameters())}
    facts["parameters"] = sum(1 for _ in model.parameters())
    facts["held"] = sum(_held(weight) for weight in model.parameters())
    if not options.lora:  # an adapter doesn't save the new rows, which are drawn at random
        model.resize_token_embeddings(model.config.vocab_size + TOKENS)
    else:
        import peft

        model = peft.get_peft_model(
            model,
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, r=4),
        )

    tokens = torch.randint(5, 100, (64, 16), generator=torch.Generator().manual_seed(3))
    data = Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data.select(range(8))
    )
    trainer.train()
    running = read_engine(trainer)
    trainer.save_model(str(options.folder / "saved"))

    live = trainer.model_wrapped
    live.eval()
    with torch.no_grad():
        logits = live(input_ids=tokens[:4]).logits
        # Every rank takes part in every forward pass of generation: ZeRO-3 gathers in step.
        generated = trainer.model.generate(
            input_ids=tokens[:2],
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            synced_gpus=True,
            pad_token_id=0,
        )
    if trainer.is_world_process_zero():
        torch.save(
            {"inputs": tokens[:4], "logits": logits, "generated": generated}, options.folder / "live.pt"
        )
        facts.update(engine=running.name, best=trainer.state.best_global_step)
        (options.folder / "facts.json").write_text(json.dumps(facts))
    lifecycle.shutdown()


def _held(weight) -> int:
    """How many elements of a parameter this rank keeps."""
    return weight.ds_tensor.numel() if hasattr(weight, "ds_tensor") else weight.numel()


if __name__ == "__main__":
    exit_on_error(main)
