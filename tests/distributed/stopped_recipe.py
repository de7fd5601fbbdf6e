"""The text classification recipe, ended by SIGTERM behind the step that HF_DIST_STOP_BEHIND names."""

import os
import signal

from transformers import TrainerCallback

from hf_dist.training.run import trainer


class Preempted(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        # The ranks agree on what came at the start of the next step.
        if state.global_step == int(os.environ["HF_DIST_STOP_BEHIND"]) - 2:
            os.kill(os.getpid(), signal.SIGTERM)


class PreemptedTrainer(trainer.ExactTrainer):
    def __init__(self, **settings):
        super().__init__(**settings)
        if self.args.max_steps > int(os.environ["HF_DIST_STOP_BEHIND"]):
            self.add_callback(Preempted())


if __name__ == "__main__":
    from hf_dist.training.run import building
    from recipes.text_classification import main

    building.ExactTrainer = PreemptedTrainer
    main()
